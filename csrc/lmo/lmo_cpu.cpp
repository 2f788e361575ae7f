// CPU kernel of the oracle steps: reading and writing the tensors, the iteration, and the norms that need no products.
// The mathematics is in lmo.h, the matrix products in lmo_amx.h and lmo_vector.h.
//
// One matrix takes three phases: (1) momentum and the sum of squares, one pass; (2) the direction is read again, scaled
// and stored in the engine's layout; (3) the iteration, whose last product writes the weights block by block, so that
// neither the direction nor the polar factor ever exists as a tensor.
//
// Flops (multiply and add each 1), n <= m, k steps, s segments in the Gram form:
//   direct  k (3 n^2 m + n^3)         Gram  3 s n^2 m + n^3 (4 k - 3 s)
// bytes: gradient twice, momentum read twice and written once, weights read and written once; X (2 bytes times pieces)
// is read by every Gram matrix and read and written by every update.
//
// Gram form: R = X X^T is iterated instead of X. Each step has Z = b R + c R^2, Q <- a Q + Q Z, R <- (a + Z)^2 R; the
// segment ends with X <- Q X. All factors are polynomials of one matrix, so they commute and are symmetric. Q is kept
// as Q' = Q - (product of the a) I, which lets the update add its multiple of X at full precision. R loses the small
// singular values that X still has, so X is formed again after a few steps.
#include <omp.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <numeric>
#include <type_traits>
#include <vector>

#include "common/arena.h"
#include "common/isa.h"
#include "common/lines.h"
#include "common/team.h"
#include "lmo/lmo.h"
#include "lmo/lmo_amx.h"
#include "lmo/lmo_vector.h"

namespace pyops::PYOPS_ISA {
namespace {

constexpr int64_t kSpan = 256;  // elements of a line handled at a time: float buffers stay in L1

// Squares of floats are exact in double and cannot overflow; those of doubles need long double's exponents, and its
// rounding errors are carried along so that the order of summation does not show in the result.
class SumOfSquares {
  public:
    void add(const float* x, int64_t count) {
        int64_t i = 0;
        for (; i + kLanes <= count; i += kLanes)
            for (int l = 0; l < kLanes; ++l) lanes_[l] += static_cast<double>(x[i + l]) * static_cast<double>(x[i + l]);
        for (; i < count; ++i) lanes_[0] += static_cast<double>(x[i]) * static_cast<double>(x[i]);
    }
    void add(const double* x, int64_t count) {
        for (int64_t i = 0; i < count; ++i) {
            const long double v = x[i], term = v * v - rest_, next = total_ + term;
            rest_ = next - total_ - term;
            total_ = next;
        }
    }
    long double value() const { return std::accumulate(lanes_, lanes_ + kLanes, 0.0) + total_; }

  private:
    static constexpr int kLanes = 16;
    double lanes_[kLanes] = {};
    long double total_ = 0, rest_ = 0;
};

// x -> x * factor as fl(x * mantissa) * 2^exponent, so that inputs that differ by a power of two give the same bits.
template <class T>
struct Scale {
    T low = 1, mantissa = 1, high = 1;
    explicit Scale(long double factor) {
        int exponent = 0;
        mantissa = static_cast<T>(std::frexp(factor, &exponent));
        low = std::ldexp(T(1), exponent / 2);
        high = std::ldexp(T(1), exponent - exponent / 2);
    }
    void apply(T* x, int64_t count) const {
        for (int64_t i = 0; i < count; ++i) x[i] = x[i] * low * mantissa * high;
    }
};

// The tensors of a task, seen as lines in the direction in which the gradient is contiguous.
template <class T>
class Direction {
  public:
    Direction(const LmoPlan& plan, const LmoTask& task, bool rows_as_lines) : plan_(plan) {
        grad_ = lines_of(task.grad, rows_as_lines);
        if (task.momentum.data) momentum_ = lines_of(task.momentum, rows_as_lines);
    }

    static bool prefers_rows(const MatrixView& v) {
        return v.cols == 1 ? v.rows == 1 : v.rows == 1 || std::abs(v.col_stride) <= std::abs(v.row_stride);
    }
    static Lines lines_of(const MatrixView& v, bool rows_as_lines) {
        return rows_as_lines ? Lines{v.data, v.dtype, v.rows, v.cols, v.row_stride, v.col_stride}
                             : Lines{v.data, v.dtype, v.cols, v.rows, v.col_stride, v.row_stride};
    }

    int64_t lines() const { return grad_.lines; }
    int64_t length() const { return grad_.length; }

    // m <- m + (1 - momentum)(g - m) for part of a line, and d as read() will return it.
    void advance(int64_t line, int64_t start, int64_t count, T* d) const {
        if (!momentum_.data) return grad_.read(line, start, count, d);
        T g[kSpan];
        grad_.read(line, start, count, g);
        momentum_.read(line, start, count, d);
        const T rate = static_cast<T>(1 - plan_.momentum);
        for (int64_t i = 0; i < count; ++i) d[i] += rate * (g[i] - d[i]);
        momentum_.write(line, start, count, d);
        read(line, start, count, d);
    }

    void read(int64_t line, int64_t start, int64_t count, T* d) const {
        if (!momentum_.data) return grad_.read(line, start, count, d);
        momentum_.read(line, start, count, d);
        if (!plan_.nesterov) return;
        T g[kSpan];
        grad_.read(line, start, count, g);
        const T momentum = static_cast<T>(plan_.momentum);
        for (int64_t i = 0; i < count; ++i) d[i] = g[i] + momentum * (d[i] - g[i]);
    }

    // g <- grad_decay g
    void decay(int64_t line, int64_t start, int64_t count) const {
        if (plan_.grad_decay == 1) return;
        T g[kSpan];
        grad_.read(line, start, count, g);
        for (int64_t i = 0; i < count; ++i) g[i] *= static_cast<T>(plan_.grad_decay);
        grad_.write(line, start, count, g);
    }

  private:
    const LmoPlan& plan_;
    Lines grad_, momentum_;
};

// W <- shrink W - step u
template <class T>
class Writer {
  public:
    Writer(const LmoPlan& plan, const LmoTask& task, bool rows_as_lines)
        : weight_(Direction<T>::lines_of(task.weight, rows_as_lines)),
          shrink_(static_cast<T>(task.shrink)),
          step_(static_cast<T>(task.step)),
          stochastic_(plan.seed >= 0 && size_of(task.weight.dtype) == 2),
          key_(rounding_key(plan.seed, task.tensor)),
          first_element_(task.first_element) {
        // Elements are numbered along the weight's rows whichever way the lines run.
        line_index_ = rows_as_lines ? task.weight.cols : 1;
        step_index_ = rows_as_lines ? 1 : task.weight.cols;
    }

    int64_t lines() const { return weight_.lines; }
    int64_t length() const { return weight_.length; }

    void write(int64_t line, int64_t start, int64_t count, const T* u) const {
        T w[kSpan];
        if (shrink_ != 0) {
            weight_.read(line, start, count, w);
            for (int64_t i = 0; i < count; ++i) w[i] = shrink_ * w[i] - step_ * u[i];
        } else {
            for (int64_t i = 0; i < count; ++i) w[i] = -step_ * u[i];
        }
        if (stochastic_) {
            write_stochastic(line, start, count, w);
        } else {
            weight_.write(line, start, count, w);
        }
    }

    // `lines` pieces of 32 elements or fewer (count), 32 apart in u.
    void write_block(int64_t line, int64_t start, int64_t lines, int64_t count, const T* u) const {
        if (stochastic_ || weight_.step != 1 || count != 32) {
            for (int64_t l = 0; l < lines; ++l) write(line + l, start, count, u + 32 * l);
            return;
        }
        with_type(weight_.dtype, [&](auto* tag) {
            for (int64_t l = 0; l < lines; ++l) {
                auto* p = static_cast<decltype(tag)>(weight_.data) + (line + l) * weight_.line_stride + start;
                const T* x = u + 32 * l;
                if (shrink_ != 0)
                    for (int i = 0; i < 32; ++i) narrow(shrink_ * static_cast<T>(widen(p[i])) - step_ * x[i], p[i]);
                else
                    for (int i = 0; i < 32; ++i) narrow(-step_ * x[i], p[i]);
            }
        });
    }

  private:
    void write_stochastic(int64_t line, int64_t start, int64_t count, const T* w) const {
        const auto each = [&](auto* tag) {
            auto* p = static_cast<decltype(tag)>(weight_.data) + line * weight_.line_stride + start * weight_.step;
            for (int64_t i = 0; i < count; ++i) {
                const int64_t element = first_element_ + line * line_index_ + (start + i) * step_index_;
                const uint32_t random = random_bits(key_, static_cast<uint64_t>(element));
                narrow_stochastic(static_cast<float>(w[i]), random, p[i * weight_.step]);
            }
        };
        if (weight_.dtype == DType::BF16)
            each(static_cast<Bf16Bits*>(nullptr));
        else
            each(static_cast<HalfBits*>(nullptr));
    }

    Lines weight_;
    T shrink_, step_;
    bool stochastic_;
    RoundingKey key_;
    int64_t first_element_, line_index_, step_index_;
};

// Writes 32 x 32 blocks of X (rows along the short side), computed in T, into the weights.
template <class T, class U>
class BlockWriter {
  public:
    BlockWriter(const LmoPlan& plan, const LmoTask& task, bool tall, bool rows_as_lines)
        : writer_(plan, task, rows_as_lines), lines_are_x_rows_(tall != rows_as_lines) {}

    void block(int64_t i, int64_t j, const T* c) const {
        U t[1024];
        const U* u = t;
        if (lines_are_x_rows_) {
            if constexpr (std::is_same_v<T, U>)
                u = c;
            else
                std::copy(c, c + 1024, t);
        } else {
            for (int a = 0; a < 32; ++a)
                for (int b = 0; b < 32; ++b) t[b * 32 + a] = c[a * 32 + b];
            std::swap(i, j);
        }
        const int64_t lines = std::min<int64_t>(32, writer_.lines() - 32 * i);
        const int64_t count = std::min<int64_t>(32, writer_.length() - 32 * j);
        writer_.write_block(32 * i, 32 * j, lines, count, u);
    }

  private:
    Writer<U> writer_;
    bool lines_are_x_rows_;
};

// Phase 1; line_sums has a slot per line. Returns |d|_F^2 on every member.
template <class T>
long double sum_of_squares(const Team& team, const Direction<T>& direction, long double* line_sums) {
    T d[kSpan];
    for (int64_t line = team.begin(direction.lines()); line < team.end(direction.lines()); ++line) {
        SumOfSquares sum;
        for (int64_t s = 0; s < direction.length(); s += kSpan) {
            const int64_t count = std::min(kSpan, direction.length() - s);
            direction.advance(line, s, count, d);
            sum.add(d, count);
        }
        line_sums[line] = sum.value();
    }
    team.wait();
    return std::accumulate(line_sums, line_sums + direction.lines(), 0.0L);
}

// u = factor * d for every line, in one pass.
template <class T, class Factor>
void write_scaled(const Team& team, const Direction<T>& direction, const Writer<T>& writer, const Factor& factor) {
    T d[kSpan];
    for (int64_t line = team.begin(direction.lines()); line < team.end(direction.lines()); ++line)
        for (int64_t s = 0; s < direction.length(); s += kSpan) {
            const int64_t count = std::min(kSpan, direction.length() - s);
            direction.read(line, s, count, d);
            direction.decay(line, s, count);
            factor(line, s, count, d);
            writer.write(line, s, count, d);
        }
}

// Phase 2: X_0 into the engine, split over the columns of X as update() splits them.
template <class Engine, class U>
void load(const Team& team, Engine& engine, const Direction<U>& direction, const Scale<U>& scale,
          bool lines_are_x_rows) {
    using T = typename Engine::Scalar;
    alignas(64) T buffer[32 * kSpan], block[1024];
    U d[kSpan];
    const int64_t lines = direction.lines(), length = direction.length();
    const auto fill = [&](int64_t line0, int64_t start, int64_t width) {
        for (int64_t l = 0; l < 32; ++l) {
            T* row = buffer + l * kSpan;
            const int64_t count = line0 + l < lines ? std::max<int64_t>(0, std::min(width, length - start)) : 0;
            if (count) {
                direction.read(line0 + l, start, count, d);
                direction.decay(line0 + l, start, count);
                scale.apply(d, count);
                std::copy(d, d + count, row);
            }
            std::fill(row + count, row + width, T(0));
        }
    };
    const int64_t j_begin = team.begin(engine.block_cols()), j_end = team.end(engine.block_cols());
    if (lines_are_x_rows) {
        for (int64_t i = 0; i < engine.block_rows(); ++i)
            for (int64_t j = j_begin; j < j_end; j += kSpan / 32) {
                const int64_t blocks = std::min(kSpan / 32, j_end - j);
                fill(32 * i, 32 * j, 32 * blocks);
                for (int64_t b = 0; b < blocks; ++b) engine.store_block(i, j + b, buffer + 32 * b, kSpan);
            }
        return;
    }
    for (int64_t j = j_begin; j < j_end; ++j)
        for (int64_t i = 0; i < engine.block_rows(); i += kSpan / 32) {
            const int64_t blocks = std::min(kSpan / 32, engine.block_rows() - i);
            fill(32 * j, 32 * i, 32 * blocks);
            for (int64_t b = 0; b < blocks; ++b) {
                for (int r = 0; r < 32; ++r)
                    for (int c = 0; c < 32; ++c) block[r * 32 + c] = buffer[c * kSpan + 32 * b + r];
                engine.store_block(i + b, j, block, 32);
            }
        }
}

// Phase 3.
template <class Engine, class Sink>
class Iteration {
    using T = typename Engine::Scalar;
    using Sum = typename Engine::Sum;

  public:
    Iteration(const LmoPlan& plan, const LmoTask& task, Engine& engine, const Team& team, Sink& sink)
        : plan_(plan), task_(task), engine_(engine), team_(team), sink_(sink) {}

    void direct() {
        for (int64_t j = 0; j < plan_.steps; ++j) {
            const Coefficients p = first_products(j);
            if (plan_.tolerance >= 0 && j >= plan_.min_steps && !(plan_.schatten4 && j == 0)) {
                const double residual = idempotency();
                if (residual <= plan_.tolerance * gram_norm_) {
                    emit();
                    return report(residual, j);
                }
            }
            const auto z = engine_.q[0].factor_only();
            engine_.product(team_, {z, engine_.gram, engine_.gram, p.c, p.b});
            team_.wait();
            finish_segment(z, p.a, j + 1);
        }
        if (task_.residual) measure();
    }

    void gram() {
        for (int64_t start = 0; start < plan_.steps;) {
            const int64_t end = std::min(segment_end(start), plan_.steps);
            T multiple = 1;
            int current = 0;
            typename Engine::Symmetric q;
            for (int64_t j = start; j < end; ++j) {
                const bool first = j == start, last = j + 1 == end;
                const Coefficients p = first ? first_products(j) : coefficients(j, 1);
                typename Engine::Symmetric z = first ? engine_.q[0] : engine_.z;
                if (first && last) z = z.factor_only();
                engine_.product(team_, {z, engine_.gram, engine_.gram, p.c, p.b});
                team_.wait();
                if (first) {
                    q = z;
                } else {
                    const typename Engine::Symmetric old = engine_.q[current];
                    q = engine_.q[1 - current];
                    if (last) q = q.factor_only();
                    engine_.product(team_, {q, z, old, 1, p.a, multiple});
                    current = 1 - current;
                }
                multiple *= p.a;
                if (last) break;
                engine_.product(team_, {engine_.rz, z, engine_.gram, 1, p.a});
                team_.wait();
                engine_.product(team_, {engine_.gram, z, engine_.rz, 1, p.a});
                team_.wait();
            }
            team_.wait();
            finish_segment(q, multiple, end);
            start = end;
        }
        if (task_.residual) measure();
    }

    void measure() {
        engine_.gram_matrix(team_, engine_.gram, Sum::None);
        team_.wait();
        report(idempotency(), plan_.steps);
    }

  private:
    struct Coefficients {
        T a, b, c;
    };

    Coefficients coefficients(int64_t j, double scale) const {
        const double* p = plan_.coefficients + 3 * j;
        const double cube = scale * scale * scale;
        return {static_cast<T>(p[0] * scale), static_cast<T>(p[1] * cube), static_cast<T>(p[2] * cube * scale * scale)};
    }

    // The step after which X is formed again, for a segment that starts after `start` steps. Rounding shifts the
    // eigenvalues of R by up to u |R|_F, which for small ones is a large relative error (or a change of sign), and
    // every update of R multiplies the shift by a^2. The singular values that X then has are not those that the next
    // polynomial expects, and it may diverge: segments are short, above all the first, where the spread is largest.
    int64_t segment_end(int64_t start) const {
        if (plan_.restart_count > 0) {
            const int64_t* end = plan_.restarts + plan_.restart_count;
            const int64_t* next = std::upper_bound(plan_.restarts, end, start);
            return next == end ? plan_.steps : *next;
        }
        const int64_t longest = std::min(start + Engine::longest_segment(start, plan_.steps), plan_.steps);
        int64_t end = start + 1;
        for (double growth = 1; end < longest; ++end) {
            growth *= plan_.coefficients[3 * (end - 1)] * plan_.coefficients[3 * (end - 1)];
            if (growth > Engine::kGrowthLimit) break;
        }
        return end;
    }

    // R = X X^T, and the coefficients of step j.
    Coefficients first_products(int64_t j) {
        const bool rescale = plan_.schatten4 && j == 0, wants_norm = rescale || plan_.tolerance >= 0;
        engine_.gram_matrix(team_, engine_.gram, wants_norm ? Sum::Squares : Sum::None);
        team_.wait();
        if (!wants_norm) return coefficients(j, 1);
        gram_norm_ = std::sqrt(engine_.sum());
        team_.wait();  // before a member starts the next product's sums
        return coefficients(j, rescale ? 1 / std::sqrt(gram_norm_) : 1);
    }

    // X <- multiple X + q X, after which `end` steps are done.
    void finish_segment(const typename Engine::Symmetric& q, T multiple, int64_t end) {
        const bool last = end == plan_.steps;
        engine_.update(team_, q, multiple, !last || task_.residual, last ? &sink_ : nullptr);
        team_.wait();
    }

    void emit() {
        alignas(64) T c[1024];
        for (int64_t j = team_.begin(engine_.block_cols()); j < team_.end(engine_.block_cols()); ++j)
            for (int64_t i = 0; i < engine_.block_rows(); ++i) {
                engine_.load_block(i, j, c);
                sink_.block(i, j, c);
            }
    }

    // |R^2 - R|_F
    double idempotency() {
        engine_.product(team_, {.left = engine_.gram, .right = engine_.gram, .sum = Sum::Idempotency});
        team_.wait();
        const double residual = std::sqrt(engine_.sum());
        team_.wait();  // before a member starts the next product's sums
        return residual;
    }

    void report(double residual, int64_t steps) const {
        if (team_.rank) return;
        if (task_.residual) *task_.residual = residual;
        if (task_.steps_used) *task_.steps_used = steps;
    }

    const LmoPlan& plan_;
    const LmoTask& task_;
    Engine& engine_;
    const Team& team_;
    Sink& sink_;
    double gram_norm_ = 0;
};

bool wants_gram(const LmoPlan& plan, int64_t n, int64_t m) {
    if (plan.tolerance >= 0) return false;
    if (plan.form != Form::Auto) return plan.form == Form::Gram;
    return plan.steps > 1 && m * 2 >= n * 3;
}

// A task whose matrix the team works on together.
template <class Engine, class U>
void spectral(const LmoPlan& plan, LmoTask& task, const Team& team, char* arena, int64_t arena_bytes) {
    using Sink = BlockWriter<typename Engine::Scalar, U>;
    const bool tall = task.grad.rows > task.grad.cols;
    const int64_t n = tall ? task.grad.cols : task.grad.rows, m = tall ? task.grad.rows : task.grad.cols;
    const bool grad_rows = Direction<U>::prefers_rows(task.grad), weight_rows = Direction<U>::prefers_rows(task.weight);
    const Direction<U> direction(plan, task, grad_rows);
    auto* line_sums = reinterpret_cast<long double*>(arena + arena_bytes) - direction.lines();
    const long double squares = sum_of_squares(team, direction, line_sums);
    if (team.rank == 0) {
        if (task.residual) *task.residual = 0;
        if (task.steps_used) *task.steps_used = plan.tolerance >= 0 ? 0 : plan.steps;
    }
    const Writer<U> writer(plan, task, grad_rows);
    const bool finite = std::isfinite(squares);
    if (!finite || squares == 0 || n == 1 || plan.steps == 0) {
        if (team.rank == 0 && task.residual && !finite) *task.residual = std::nan("");
        const long double norm = std::sqrt(squares);
        const bool normalise = finite && squares > 0;
        const Scale<U> scale(normalise ? 1 / (n == 1 && plan.steps ? norm : std::max<long double>(norm, plan.eps)) : 1);
        write_scaled(team, direction, writer, [&](int64_t, int64_t, int64_t count, U* d) {
            if (normalise)
                scale.apply(d, count);
            else
                std::fill(d, d + count, finite ? U(0) : static_cast<U>(std::nan("")));
        });
        if (!task.residual || !normalise || plan.steps > 0) return;
        Engine engine(n, m, team.size, arena);
        Sink sink(plan, task, tall, weight_rows);
        load(team, engine, direction, scale, tall != grad_rows);
        team.wait();
        Iteration<Engine, Sink>(plan, task, engine, team, sink).measure();
        return;
    }
    Engine engine(n, m, team.size, arena);
    Sink sink(plan, task, tall, weight_rows);
    Iteration<Engine, Sink> iteration(plan, task, engine, team, sink);
    // The rescaling of the first step undoes any scalar, so eps has no effect on it.
    const Scale<U> scale(1 / std::max<long double>(std::sqrt(squares), plan.schatten4 ? 0 : plan.eps));
    load(team, engine, direction, scale, tall != grad_rows);
    team.wait();
    wants_gram(plan, n, m) ? iteration.gram() : iteration.direct();
}

// u_ij = d_ij / |d_:j| where j numbers the positions along a line; factors has three slots per position.
template <class T>
void across_lines(const Team& team, const Direction<T>& direction, const Writer<T>& writer, T* factors) {
    T d[kSpan];
    T *low = factors, *mantissa = low + direction.length(), *high = mantissa + direction.length();
    const int64_t spans = (direction.length() + kSpan - 1) / kSpan;
    for (int64_t span = team.begin(spans); span < team.end(spans); ++span) {
        const int64_t s = span * kSpan, count = std::min(kSpan, direction.length() - s);
        using Wide = std::conditional_t<std::is_same_v<T, double>, long double, double>;
        Wide squares[kSpan] = {};
        for (int64_t line = 0; line < direction.lines(); ++line) {
            direction.advance(line, s, count, d);
            for (int64_t i = 0; i < count; ++i) squares[i] += static_cast<Wide>(d[i]) * static_cast<Wide>(d[i]);
        }
        for (int64_t i = 0; i < count; ++i) {
            const long double square = squares[i];
            Scale<T> scale(square > 0 && std::isfinite(square) ? 1 / std::sqrt(square) : 1);
            if (square == 0) scale.mantissa = 0;
            if (!std::isfinite(square)) scale.mantissa = static_cast<T>(std::nan(""));
            low[s + i] = scale.low;
            mantissa[s + i] = scale.mantissa;
            high[s + i] = scale.high;
        }
    }
    team.wait();
    write_scaled(team, direction, writer, [&](int64_t, int64_t s, int64_t count, T* x) {
        for (int64_t i = 0; i < count; ++i) x[i] = x[i] * low[s + i] * mantissa[s + i] * high[s + i];
    });
}

template <class T>
void normalise_in_place(T* d, int64_t count, const Scale<T>& scale, long double square) {
    if (square > 0 && std::isfinite(square)) return scale.apply(d, count);
    std::fill(d, d + count, square == 0 ? T(0) : static_cast<T>(std::nan("")));
}

template <class T>
void elementwise(const LmoPlan& plan, LmoTask& task, const Team& team, char* arena) {
    const bool rows = Direction<T>::prefers_rows(task.grad);
    const Direction<T> direction(plan, task, rows);
    const Writer<T> writer(plan, task, rows);
    auto* sums = reinterpret_cast<long double*>(arena);
    if (plan.norm == LmoNorm::Euclidean) {
        const long double square = sum_of_squares(team, direction, sums);
        const Scale<T> scale(square > 0 && std::isfinite(square) ? 1 / std::sqrt(square) : 1);
        return write_scaled(team, direction, writer, [&](int64_t, int64_t, int64_t count, T* d) {
            normalise_in_place(d, count, scale, square);
        });
    }
    if (plan.norm != LmoNorm::Sign && (plan.norm == LmoNorm::Row) != rows)
        return across_lines(team, direction, writer, reinterpret_cast<T*>(arena));
    T d[kSpan];
    for (int64_t line = team.begin(direction.lines()); line < team.end(direction.lines()); ++line) {
        SumOfSquares sum;
        for (int64_t s = 0; s < direction.length(); s += kSpan) {
            const int64_t count = std::min(kSpan, direction.length() - s);
            direction.advance(line, s, count, d);
            if (plan.norm == LmoNorm::Sign) {
                direction.decay(line, s, count);
                for (int64_t i = 0; i < count; ++i)
                    d[i] = d[i] > 0 ? T(1) : d[i] < 0 ? T(-1) : d[i];  // zero and NaN stay
                writer.write(line, s, count, d);
            } else {
                sum.add(d, count);
            }
        }
        if (plan.norm == LmoNorm::Sign) continue;
        const long double square = sum.value();
        const Scale<T> scale(square > 0 && std::isfinite(square) ? 1 / std::sqrt(square) : 1);
        for (int64_t s = 0; s < direction.length(); s += kSpan) {
            const int64_t count = std::min(kSpan, direction.length() - s);
            direction.read(line, s, count, d);
            direction.decay(line, s, count);
            normalise_in_place(d, count, scale, square);
            writer.write(line, s, count, d);
        }
    }
}

struct Kernel {
    void (*run)(const LmoPlan&, LmoTask&, const Team&, char*, int64_t);
    int64_t (*bytes)(int64_t n, int64_t m, int team_size);
};

// Line sums follow the engine's buffers; there are at most m lines or positions.
template <class Engine>
int64_t spectral_bytes(int64_t n, int64_t m, int team_size) {
    return Engine::arena_bytes(n, m, team_size) + 16 * m + 64;
}
int64_t elementwise_bytes(int64_t, int64_t m, int) { return 24 * m + 64; }

template <class U>
void run_elementwise(const LmoPlan& plan, LmoTask& task, const Team& team, char* arena, int64_t) {
    elementwise<U>(plan, task, team, arena);
}

template <class Engine>
Kernel spectral_kernel(bool wide) {
    if constexpr (std::is_same_v<typename Engine::Scalar, double>)
        return {spectral<Engine, double>, spectral_bytes<Engine>};
    else
        return {wide ? spectral<Engine, double> : spectral<Engine, float>, spectral_bytes<Engine>};
}

// wide: a tensor of the task is float64, so it is read, updated and written in float64 whatever the products use.
Kernel choose(const LmoPlan& plan, bool wide) {
    if (plan.norm != LmoNorm::Spectral)
        return {wide ? run_elementwise<double> : run_elementwise<float>, elementwise_bytes};
    if (plan.compute == Compute::Float64) return spectral_kernel<VectorEngine<double>>(wide);
#if defined(__AVX512F__)
    if (::pyops::amx()) {
        if (plan.compute == Compute::Bf16) return spectral_kernel<AmxEngine<1>>(wide);
        if (plan.compute == Compute::Bf16x3) return spectral_kernel<AmxEngine<2>>(wide);
        return spectral_kernel<AmxEngine<3>>(wide);
    }
#endif
    return spectral_kernel<VectorEngine<float>>(wide);
}

Kernel choose(const LmoPlan& plan, const LmoTask& task) {
    const auto is_double = [](const MatrixView& v) { return v.data && v.dtype == DType::F64; };
    return choose(plan, is_double(task.weight) || is_double(task.grad) || is_double(task.momentum));
}

}  // namespace

void lmo_steps(const LmoPlan& plan, LmoTask* tasks, int64_t count, int threads) {
    const auto cost = [&](const LmoTask& t) {
        const double n = static_cast<double>(std::min(t.grad.rows, t.grad.cols)),
                     size = double(t.grad.rows) * double(t.grad.cols);
        return plan.norm == LmoNorm::Spectral ? n * size : size;
    };
    // Largest first. With many tasks each thread takes whole matrices; otherwise, and for the few that are worth it,
    // all threads share each.
    std::vector<int64_t> order;
    for (int64_t i = 0; i < count; ++i)
        if (tasks[i].grad.rows > 0 && tasks[i].grad.cols > 0) order.push_back(i);
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return cost(tasks[a]) > cost(tasks[b]); });
    if (order.empty()) return;
    const double worth_sharing = plan.norm == LmoNorm::Spectral ? 64.0 * 64 * 64 : 65536;
    const int64_t total = static_cast<int64_t>(order.size());
    const auto bytes_of = [&](const LmoTask& t, int team_size) {
        const int64_t n = std::min(t.grad.rows, t.grad.cols), m = std::max(t.grad.rows, t.grad.cols);
        return (choose(plan, t).bytes(n, m, team_size) + 63) / 64 * 64;
    };
    // Scratch memory is per thread for tasks of their own: beyond 256 MiB a task is shared however many there are.
    const auto shares = [&](const LmoTask& t) {
        return (total < 2 * threads && cost(t) > worth_sharing) || bytes_of(t, 1) > int64_t{256} << 20;
    };
    int64_t shared = 0;
    if (threads > 1)
        while (shared < total && shares(tasks[order[shared]])) ++shared;
    if (shared == 0) threads = static_cast<int>(std::min<int64_t>(threads, total));

    int64_t shared_bytes = 0, own_bytes = 0;
    for (int64_t i = 0; i < total; ++i) {
        int64_t& b = i < shared ? shared_bytes : own_bytes;
        b = std::max(b, bytes_of(tasks[order[i]], i < shared ? threads : 1));
    }
    Arena arena(std::max(shared_bytes, own_bytes * threads));
    Barrier barrier;
    std::atomic<int64_t> next{shared};
    const auto work = [&](int rank, int size) {
        const Team team{rank, size, &barrier};
        for (int64_t i = 0; i < shared; ++i) {
            choose(plan, tasks[order[i]]).run(plan, tasks[order[i]], team, arena.data(), shared_bytes);
            team.wait();
        }
        const Team alone;
        for (int64_t i; (i = next.fetch_add(1)) < total;)
            choose(plan, tasks[order[i]]).run(plan, tasks[order[i]], alone, arena.data() + rank * own_bytes, own_bytes);
    };
    if (threads == 1) return work(0, 1);
#pragma omp parallel num_threads(threads)
    {
        // OpenMP may grant fewer threads than asked for.
#pragma omp single
        barrier.set_members(omp_get_num_threads());
        work(omp_get_thread_num(), omp_get_num_threads());
    }
}

}  // namespace pyops::PYOPS_ISA
