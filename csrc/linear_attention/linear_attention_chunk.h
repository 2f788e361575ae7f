// One chunk of c tokens of one value head: all its products, forward and backward (decays: linear_attention_decay.h).
// q below is scale * q; S and S' are the states before and after; P = prefix, X = suffix, A = total decay. The scale
// and a scalar P multiply results, not operands: q and k then enter the products on the state as they were given.
//
//   M = lower(q k^T),  N = strictly lower(k k^T), both decayed                       delta rule: R = I + Diag(beta) N
//   u = v,  or u = R^-1 Diag(beta) (v - (P k) S)
//   o = (P q) S + M u                     S' = A S + (X k)^T u
//
// Backward, from do and dS' (each product read off the line it differentiates):
//   du = M^T do + (X k) dS'      dM = lower(do u^T)      d(P q) = do S^T      d(X k) = u dS'^T
//   x = R^-T du,  dv = beta x,   dN = -beta strictly lower(x u^T),   d(P k) = -(beta x) S^T,
//   dbeta_i = x_i (v - (P k) S)_i - sum_j (x u^T)_ij N_ij
//   dS = A dS' + (P q)^T do - (P k)^T (beta x)
//   dg_t = the sum of value times gradient over all pairs of tokens, or of token and state, whose decay runs through t:
//     S to o_i (i >= t), k_j to S' (j < t), S to S', and k_j to o_i or u_i (j < t <= i). Pairs i = j have no decay and
//     are left out; adding and subtracting them would drown the others where decays are strong.
//
// Multiply-adds per token, half of each triangle counted: forward c (K + V) / 2 + 2 K V, delta rule c (K + V) / 2 + c^2
// / 6 + K V more; backward c (3 K + 2 V) / 2 + 5 K V with the states made again.
#pragma once

#include "linear_attention/linear_attention_decay.h"

namespace pyops::PYOPS_ISA {

template <class E, Gate G, bool kDelta>
class Chunk {
  public:
    using T = typename E::Scalar;
    using Gem = SmallGemm<T>;
    using Vector = typename Gem::Vector;
    static constexpr int64_t kLanes = Gem::kLanes;
    static constexpr int64_t kMostTokens = 128;

    Chunk(const LinearAttention& problem, int64_t chunk, bool backward, Pieces& pieces)
        : p_(problem),
          keys_(problem.key_dim),
          values_(problem.value_dim),
          kn_(padded(problem.key_dim, kLanes)),
          vn_(padded(problem.value_dim, kLanes)),
          kld_(leading_dimension<T>(problem.key_dim)),
          vld_(leading_dimension<T>(problem.value_dim)),
          engine_(padded(chunk, kBlock), kld_, vld_, pieces),
          decay_(engine_, pieces, chunk, kld_, keys_),
          side_(decay_.side()) {
        const int64_t key_size = side_ * kld_, value_size = side_ * vld_, square = side_ * side_;
        q_ = pieces.take<T>(key_size);
        k_ = pieces.take<T>(key_size);
        v_ = pieces.take<T>(value_size);
        k_t_ = pieces.take<T>(key_size);
        m_ = pieces.take<T>(square);
        o_ = pieces.take<T>(value_size);
        if (G == Gate::Scalar) scaled_prefix_ = pieces.take<T>(side_);
        if (G == Gate::Vector || backward) decayed_q_ = pieces.take<T>(key_size);
        last_k_ = G == Gate::None ? k_ : pieces.take<T>(key_size);
        u_ = v_;
        if (kDelta) {
            decayed_k_ = G == Gate::None ? k_ : pieces.take<T>(key_size);
            beta_ = pieces.take<T>(side_);
            n_ = pieces.take<T>(square);
            inverse_ = pieces.take<T>(square);
            rest_ = pieces.take<T>(value_size);
            u_ = pieces.take<T>(value_size);
        }
        if (!backward) return;
        du_ = pieces.take<T>(value_size);
        u_t_ = pieces.take<T>(E::kLowPrecision ? 0 : value_size);
        dm_ = pieces.take<T>(square);
        state_t_ = pieces.take<T>(E::kLowPrecision ? 0 : kld_ * vld_);
        dstate_t_ = pieces.take<T>(E::kLowPrecision ? 0 : kld_ * vld_);
        d_decayed_q_ = pieces.take<T>(key_size);
        d_last_k_ = pieces.take<T>(key_size);
        dq_ = pieces.take<T>(key_size);
        dk_ = pieces.take<T>(key_size);
        if (G == Gate::Vector) {
            dg_ = pieces.take<T>(key_size);
            dx_ = pieces.take<T>(key_size);
            dy_ = pieces.take<T>(key_size);
            if (kDelta) dz_ = pieces.take<T>(key_size);
        }
        if (G == Gate::Scalar) dg_ = pieces.take<T>(side_);
        if (kDelta) {
            dn_ = pieces.take<T>(square);
            x_ = pieces.take<T>(value_size);
            d_decayed_k_ = pieces.take<T>(key_size);
            dbeta_ = pieces.take<T>(side_);
        }
    }

    // The tokens of a chunk if the caller has no wish: large states want more, to be worth reading.
    static int64_t preferred_size(const LinearAttention& p) {
        if (E::kLowPrecision) return 64;
        return G != Gate::Vector && !kDelta && p.key_dim * p.value_dim > 96 * 96 ? 64 : 32;
    }

    int64_t state_size() const { return kn_ * vld_; }
    int64_t state_rows() const { return kn_; }
    int64_t state_ld() const { return vld_; }

    // The tokens that load() will be called for next: they are prefetched between the products of this chunk.
    void will_load(const Place& at, int64_t c, bool with_q, const AttentionView* dout) {
        auto& prefetch = engine_.prefetch;
        prefetch.start(std::max<int64_t>(0, c));
        const Place key{at.batch, at.time, at.head / p_.q_group};
        if (with_q) prefetch.add(p_.q, key, keys_);
        prefetch.add(p_.k, key, keys_);
        prefetch.add(p_.v, at, values_);
        if (G == Gate::Vector) prefetch.add(p_.g, {at.batch, at.time, at.head / p_.gate_group}, keys_);
        if (dout) prefetch.add(*dout, at, values_);
    }

    // Reads the tokens of a value head; q only if o or gradients are wanted. False if a number in them is not finite:
    // recurrent() then is the way to go on, since in the products 0 * NaN would carry it to earlier tokens.
    bool load(const Place& at, int64_t c, bool with_q = true) {
        c_ = c;
        const int64_t rows = padded(c, kLanes);
        const Place key{at.batch, at.time, at.head / p_.q_group};
        if (with_q) read_rows<T>(p_.q, offset_of(p_.q, key), p_.q.time, c, keys_, T(1), q_, kld_);
        read_rows<T>(p_.k, offset_of(p_.k, key), p_.k.time, c, keys_, T(1), k_, kld_);
        read_rows<T>(p_.v, offset_of(p_.v, at), p_.v.time, c, values_, T(1), v_, vld_);
        std::fill(k_ + c * kld_, k_ + rows * kld_, T(0));
        std::fill(v_ + c * vld_, v_ + rows * vld_, T(0));
        bool finite = all_finite(k_, c * kld_) && all_finite(v_, c * vld_);
        decay_.load(p_.g, {at.batch, at.time, at.head / p_.gate_group}, c);
        finite = finite && decay_.finite();
        if constexpr (kDelta) {
            const Place beta{at.batch, at.time, at.head / p_.beta_group};
            read_rows<T>(p_.beta, offset_of(p_.beta, beta), p_.beta.time, c, 1, T(1), beta_, 1);
            finite = finite && all_finite(beta_, c);
            std::fill(u_ + c * vld_, u_ + rows * vld_, T(0));
        }
        return finite;
    }

    // What does not depend on the state.
    void prepare(bool with_q, bool backward) {
        constexpr bool vector = G == Gate::Vector;
        if constexpr (G == Gate::Scalar)
            for (int64_t i = 0; i < c_; ++i) scaled_prefix_[i] = scale() * decay_.prefix(i, 0)[0];
        for (int64_t i = 0; i < c_; ++i)
            for (int64_t j = 0; j < kn_; j += kLanes) {
                const int64_t e = i * kld_ + j;
                const Vector k = Gem::load(k_ + e), prefix = decay_.prefix(i, j);
                if ((vector && with_q) || backward) Gem::store(decayed_q_ + e, scale() * prefix * Gem::load(q_ + e));
                if (G != Gate::None) Gem::store(last_k_ + e, decay_.suffix(i, j) * k);
                if (kDelta && G != Gate::None && (vector || backward)) Gem::store(decayed_k_ + e, prefix * k);
            }
        if constexpr (!vector && !E::kLowPrecision) Transpose<T>::run(padded(c_, kLanes), kn_, k_, kld_, k_t_, side_);
        if constexpr (kDelta) {
            decay_.gram(k_, k_, k_t_, true, T(1), n_);
            invert();
        }
    }

    // u; for the delta rule from the state.
    void solve([[maybe_unused]] const T* state) {
        if constexpr (kDelta) {
            const T* k = G == Gate::Vector ? decayed_k_ : k_;
            engine_.multiply(c_, vn_, keys_, precisely({k, kld_, 1, state, vld_, rest_, vld_}, k == k_));
            for (int64_t i = 0; i < c_; ++i) {
                const Vector prefix = G == Gate::Vector ? T(1) - Vector{} : decay_.prefix(i, 0);
                for (int64_t j = 0; j < vn_; j += kLanes) {
                    const int64_t e = i * vld_ + j;
                    const Vector rest = Gem::load(v_ + e) - prefix * Gem::load(rest_ + e);
                    Gem::store(rest_ + e, rest);
                    Gem::store(o_ + e, beta_[i] * rest);
                }
            }
            engine_.multiply(c_, vn_, c_,
                             precisely({inverse_, side_, 1, o_, vld_, u_, vld_, nullptr, 0, Shape::LowerLeft}));
        }
    }

    void scores() { decay_.gram(q_, k_, k_t_, false, scale(), m_); }

    // o, for write_output().
    void output(const T* state) {
        const T* q = G == Gate::Vector ? decayed_q_ : q_;
        const auto factor = row_factor();
        engine_.multiply(c_, vn_, keys_, precisely({q, kld_, 1, state, vld_, o_, vld_}, q == q_));
        engine_.multiply(c_, vn_, c_, {m_, side_, 1, u_, vld_, o_, vld_, factor.data, factor.step, Shape::LowerLeft});
    }

    // The state after the chunk; `next` may be `state`.
    void advance(const T* state, T* next) {
        const auto total = decay_.total();
        engine_.multiply(keys_, vn_, c_,
                         {last_k_, 1, kld_, u_, vld_, next, vld_, total.data, total.step, Shape::Full, state});
        std::fill(next + keys_ * vld_, next + kn_ * vld_, T(0));
    }

    bool output_finite() const { return all_finite_rows(o_, c_, vn_, vld_); }

    // The gradient of the state before the chunk, as far as it comes from later tokens and this chunk's reads. False if
    // a number in it is not finite.
    bool retreat(const LinearAttentionGradients& d, const Place& at, int64_t c, T* dstate) {
        const bool finite_tokens = load(at, c);
        prepare(true, true);
        read_rows<T>(d.o, offset_of(d.o, at), d.o.time, c_, values_, T(1), o_, vld_);
        const auto total = decay_.total();
        engine_.multiply(keys_, vn_, c_, {decayed_q_, 1, kld_, o_, vld_, dstate, vld_, total.data, total.step});
        return finite_tokens && finite(dstate);
    }

    // decay *= the chunk's total decay; false if that is not finite.
    bool multiply_total(T* decay) const {
        const auto total = decay_.total();
        for (int64_t r = 0; r < keys_; ++r) decay[r] *= total.data[r * total.step];
        return all_finite(decay, keys_);
    }

    bool finite(const T* state) const { return all_finite_rows(state, keys_, vn_, vld_); }

    // The recurrence itself, token by token: o and the state.
    void recurrent(T* state, bool with_q = true) {
        for (int64_t i = 0; i < c_; ++i) {
            const T *q = q_ + i * kld_, *k = k_ + i * kld_, *v = v_ + i * vld_;
            if constexpr (G != Gate::None)
                for (int64_t r = 0; r < keys_; ++r) {
                    const T a = decay_.a(i, r / kLanes * kLanes)[r % kLanes];
                    T* row = state + r * vld_;
                    for (int64_t j = 0; j < vn_; ++j) row[j] = a == 0 ? T(0) : a * row[j];
                }
            for (int64_t j = 0; j < vn_; j += kLanes) {
                Vector u = Gem::load(v + j), o{};
                if constexpr (kDelta) {
                    Vector read{};
                    for (int64_t r = 0; r < keys_; ++r) read += k[r] * Gem::load(state + r * vld_ + j);
                    u = beta_[i] * (u - read);
                }
                for (int64_t r = 0; r < keys_; ++r) {
                    const Vector s = Gem::load(state + r * vld_ + j) + k[r] * u;
                    Gem::store(state + r * vld_ + j, s);
                    if (with_q) o += q[r] * s;
                }
                Gem::store(o_ + i * vld_ + j, scale() * o);
            }
        }
    }

    void write_output(const AttentionView& o, const Place& at) const {
        write_rows<T>(o, offset_of(o, at), o.time, c_, values_, o_, vld_);
    }

    // Gradients that several value heads share start from zero and are written after the last of them.
    void clear_keys() {
        std::fill(dq_, dq_ + c_ * kld_, T(0));
        std::fill(dk_, dk_ + c_ * kld_, T(0));
    }
    void clear_gates() {
        if (G != Gate::None) std::fill(dg_, dg_ + c_ * (G == Gate::Vector ? kld_ : 1), T(0));
    }
    void clear_beta() {
        if (kDelta) std::fill(dbeta_, dbeta_ + c_, T(0));
    }
    void write_keys(const LinearAttentionGradients& d, const Place& at) const {
        const Place key{at.batch, at.time, at.head / p_.q_group};
        write_rows<T>(d.q, offset_of(d.q, key), d.q.time, c_, keys_, dq_, kld_);
        write_rows<T>(d.k, offset_of(d.k, key), d.k.time, c_, keys_, dk_, kld_);
    }
    void write_gates(const LinearAttentionGradients& d, const Place& at) const {
        const Place gate{at.batch, at.time, at.head / p_.gate_group};
        if constexpr (G == Gate::Scalar) write_rows<T>(d.g, offset_of(d.g, gate), d.g.time, c_, 1, dg_, 1);
        if constexpr (G == Gate::Vector) write_rows<T>(d.g, offset_of(d.g, gate), d.g.time, c_, keys_, dg_, kld_);
    }
    void write_beta(const LinearAttentionGradients& d, const Place& at) const {
        const Place beta{at.batch, at.time, at.head / p_.beta_group};
        if constexpr (kDelta) write_rows<T>(d.beta, offset_of(d.beta, beta), d.beta.time, c_, 1, dbeta_, 1);
    }

    // After load() and prepare(): from the state before the chunk and dstate after it, adds to the gradients of the
    // tokens, writes those of v, and turns dstate into the gradient of `state`.
    void backward(const LinearAttentionGradients& d, const Place& at, const T* state, T* dstate) {
        T* dout = o_;
        solve(state);
        scores();
        read_rows<T>(d.o, offset_of(d.o, at), d.o.time, c_, values_, T(1), dout, vld_);
        if constexpr (!E::kLowPrecision) {
            Transpose<T>::run(kn_, vn_, state, vld_, state_t_, kld_);
            Transpose<T>::run(kn_, vn_, dstate, vld_, dstate_t_, kld_);
            Transpose<T>::run(padded(c_, kLanes), vn_, u_, vld_, u_t_, side_);
        }
        const auto total = decay_.total();
        const T* one = decay_.one();

        engine_.multiply(c_, vn_, c_, {m_, 1, side_, dout, vld_, du_, vld_, nullptr, 0, Shape::UpperLeft});
        engine_.multiply(c_, vn_, keys_, {last_k_, kld_, 1, dstate, vld_, du_, vld_, one, 0});
        times_transposed(padded(c_, kLanes), dout, u_, u_t_, side_, dm_, Shape::LowerResult);
        times_transposed(kn_, dout, state, state_t_, kld_, d_decayed_q_);
        times_transposed(kn_, u_, dstate, dstate_t_, kld_, d_last_k_);
        const T* dv = du_;
        if constexpr (kDelta) {
            engine_.multiply(c_, vn_, c_,
                             precisely({inverse_, 1, side_, du_, vld_, x_, vld_, nullptr, 0, Shape::UpperLeft}));
            times_transposed(padded(c_, kLanes), x_, u_, u_t_, side_, dn_, Shape::LowerResult);
            dv = du_;
            backward_of_beta();
            times_transposed(kn_, x_, state, state_t_, kld_, d_decayed_k_);
        }
        write_rows<T>(d.v, offset_of(d.v, at), d.v.time, c_, values_, dv, vld_);

        if constexpr (G == Gate::Vector)
            channel_gradients(state, dstate);
        else
            token_gradients(state, dstate);

        engine_.multiply(keys_, vn_, c_, {decayed_q_, 1, kld_, dout, vld_, dstate, vld_, total.data, total.step});
        if constexpr (kDelta) engine_.multiply(keys_, vn_, c_, {decayed_k_, 1, kld_, x_, vld_, dstate, vld_, one, 0});
    }

  private:
    using Operands = typename Gem::Operands;
    // as_given: the left operand is an input as it was given, exact where inputs are narrow.
    static Operands precisely(Operands o, bool as_given = false) {
        o.precise = true;
        o.exact_left = as_given;
        return o;
    }
    T scale() const { return scale_; }

    // result (c x n) = x y^T for rows of values, where y^T is given too, with the result's leading dimension, unless
    // the engine transposes as it packs.
    void times_transposed(int64_t n, const T* x, const T* y, [[maybe_unused]] const T* y_t, int64_t ld, T* result,
                          Shape shape = Shape::Full) {
        if constexpr (E::kLowPrecision)
            engine_.multiply_by_columns(c_, n, values_, {x, vld_, 1, y, vld_, result, ld, nullptr, 0, shape});
        else
            engine_.multiply(c_, n, values_, {x, vld_, 1, y_t, ld, result, ld, nullptr, 0, shape});
    }

    // What q S is to be multiplied by, row by row.
    typename Decay<E, G>::Rows row_factor() const {
        if (G == Gate::Vector) return {decay_.one(), 0};
        if (G == Gate::Scalar) return {scaled_prefix_, 1};
        return {&scale_, 0};
    }

    // inverse_ = (I + Diag(beta) n_)^-1, row by row: row_i = e_i - sum_{j<i} beta_i n_ij row_j.
    void invert() {
        for (int64_t i = 0; i < c_; ++i) {
            T* row = inverse_ + i * side_;
            for (int64_t l = 0; l < side_; l += kLanes) {
                Vector sum{}, other{};
                int64_t j = l;
                for (; j + 1 < i; j += 2) {
                    sum += n_[i * side_ + j] * Gem::load(inverse_ + j * side_ + l);
                    other += n_[i * side_ + j + 1] * Gem::load(inverse_ + (j + 1) * side_ + l);
                }
                if (j < i) sum += n_[i * side_ + j] * Gem::load(inverse_ + j * side_ + l);
                Gem::store(row + l, -beta_[i] * (sum + other));
            }
            row[i] = 1;
        }
    }

    // x_ holds R^-T du, dn_ the products x u^T. Leaves -beta x in x_, beta x in du_ and the gradient of n_ in dn_.
    void backward_of_beta() {
        for (int64_t i = 0; i < c_; ++i) {
            Vector sum{};
            for (int64_t j = 0; j < vn_; j += kLanes) {
                const Vector x = Gem::load(x_ + i * vld_ + j), scaled = beta_[i] * x;
                sum += x * Gem::load(rest_ + i * vld_ + j);
                Gem::store(du_ + i * vld_ + j, scaled);
                Gem::store(x_ + i * vld_ + j, -scaled);
            }
            T* __restrict dn = dn_ + i * side_;
            for (int64_t j = 0; j < side_; ++j) dn[j] = j < i ? dn[j] : T(0);
            for (int64_t j = 0; j < side_; j += kLanes) {
                const Vector d = Gem::load(dn + j);
                sum -= d * Gem::load(n_ + i * side_ + j);
                Gem::store(dn + j, -beta_[i] * d);
            }
            dbeta_[i] += sum_of_lanes<T>(sum);
        }
    }

    // dq, dk and dg of a decay that all channels share, or of none.
    void token_gradients(const T* state, const T* dstate) {
        if constexpr (G == Gate::Scalar) {
            mask_triangle(dm_);
            gate_gradient(state, dstate);
        }
        decay_.mask(dm_, false, scale());
        if constexpr (G == Gate::Scalar && kDelta) decay_.mask(dn_, true, T(1));
        const auto factor = row_factor(), prefix = decay_.row_prefix(), suffix = decay_.row_suffix();
        engine_.multiply(c_, kn_, c_,
                         {dm_, side_, 1, k_, kld_, d_decayed_q_, kld_, factor.data, factor.step, Shape::LowerLeft});
        engine_.multiply(c_, kn_, c_,
                         {dm_, 1, side_, q_, kld_, d_last_k_, kld_, suffix.data, suffix.step, Shape::UpperLeft});
        if constexpr (kDelta) {
            const T* one = decay_.one();
            engine_.multiply(c_, kn_, c_,
                             {dn_, side_, 1, k_, kld_, d_decayed_k_, kld_, prefix.data, prefix.step, Shape::LowerLeft});
            engine_.multiply(c_, kn_, c_, {dn_, 1, side_, k_, kld_, d_last_k_, kld_, one, 0, Shape::UpperLeft});
        }
        for (int64_t i = 0; i < c_; ++i)
            for (int64_t j = 0; j < kn_; j += kLanes) {
                const int64_t e = i * kld_ + j;
                Gem::store(dq_ + e, Gem::load(dq_ + e) + Gem::load(d_decayed_q_ + e));
                Vector dk = Gem::load(dk_ + e) + Gem::load(d_last_k_ + e);
                if constexpr (kDelta) dk += Gem::load(d_decayed_k_ + e);
                Gem::store(dk_ + e, dk);
            }
    }

    void mask_triangle(T* m) const {
        for (int64_t i = 0; i < c_; ++i) {
            T* __restrict row = m + i * side_;
            for (int64_t j = 0; j < side_; ++j) row[j] = j <= i ? row[j] : T(0);
        }
    }

    // The scalar decay's dg. m_, n_ are decayed; dm_, dn_ are not yet; d_decayed_q_ and the like are as the state gives
    // them.
    void gate_gradient(const T* state, const T* dstate) {
        alignas(64) T first[kMostTokens], last[kMostTokens], pairs[kMostTokens];
        sums_of_rows<T>(
            c_,
            [&](int64_t t) {
                Vector sum{};
                for (int64_t j = 0; j < kn_; j += kLanes) {
                    const int64_t e = t * kld_ + j;
                    sum += Gem::load(decayed_q_ + e) * Gem::load(d_decayed_q_ + e);
                    if constexpr (kDelta) sum += Gem::load(decayed_k_ + e) * Gem::load(d_decayed_k_ + e);
                }
                return sum;
            },
            first);
        sums_of_rows<T>(
            c_,
            [&](int64_t t) {
                Vector sum{};
                for (int64_t j = 0; j < kn_; j += kLanes) {
                    const int64_t e = t * kld_ + j;
                    sum += Gem::load(last_k_ + e) * Gem::load(d_last_k_ + e);
                }
                return sum;
            },
            last);
        // later: the sums over i >= t of the pairs (i, j), per j.
        alignas(64) T later[kMostTokens] = {};
        for (int64_t t = c_ - 1; t >= 0; --t) {
            T* __restrict sums = later;
            const T* __restrict dm = dm_ + t * side_, * __restrict m = m_ + t * side_;
            for (int64_t j = 0; j < side_; ++j) sums[j] += dm[j] * m[j];
            if constexpr (kDelta) {
                const T* __restrict dn = dn_ + t * side_, * __restrict n = n_ + t * side_;
                for (int64_t j = 0; j < side_; ++j) sums[j] += dn[j] * n[j];
            }
            Vector sum{};
            int64_t j = 0;
            for (; j + kLanes <= t; j += kLanes) sum += Gem::load(later + j);
            pairs[t] = sum_of_lanes<T>(sum);
            for (; j < t; ++j) pairs[t] += later[j];
        }
        Vector sum[4] = {};
        for (int64_t r = 0; r < keys_; ++r)
            for (int64_t j = 0; j < vn_; j += kLanes)
                sum[(r + j / kLanes) % 4] += Gem::load(state + r * vld_ + j) * Gem::load(dstate + r * vld_ + j);
        T carried = *decay_.total().data *
                    sum_of_lanes<T>((sum[0] + sum[1]) + (sum[2] + sum[3]));  // S to S', then k_j to S' for j < t
        for (int64_t t = 0; t < c_; ++t) {
            pairs[t] += carried;
            carried += last[t];
        }
        T read = 0;  // S to o_i or u_i for i >= t
        for (int64_t t = c_ - 1; t >= 0; --t) {
            read += first[t];
            if (decay_.a(t, 0)[0] != 0) dg_[t] += pairs[t] + read;
        }
    }

    // dq, dk and dg of a decay per channel.
    void channel_gradients(const T* state, const T* dstate) {
        decay_.mask(dm_, false, scale());
        std::fill(dx_, dx_ + c_ * kld_, T(0));
        std::fill(dy_, dy_ + c_ * kld_, T(0));
        decay_.gram_backward(dm_, q_, k_, dx_, dy_);
        if constexpr (kDelta) {
            std::fill(dz_, dz_ + c_ * kld_, T(0));
            decay_.gram_backward(dn_, k_, k_, dz_, dy_);
        }
        for (int64_t j = 0; j < kn_; j += kLanes) {
            T through[64 / sizeof(T)] = {};
            for (int64_t l = 0; l < std::min(kLanes, keys_ - j); ++l) {
                Vector sum{};
                for (int64_t v = 0; v < vn_; v += kLanes)
                    sum += Gem::load(state + (j + l) * vld_ + v) * Gem::load(dstate + (j + l) * vld_ + v);
                through[l] = sum_of_lanes<T>(sum);
            }
            Vector carried = Gem::load(through) * decay_.prefix(c_ - 1, j);
            for (int64_t t = 0; t < c_; ++t) {
                const int64_t e = t * kld_ + j;
                Gem::store(dg_ + e, Gem::load(dg_ + e) + (decay_.a(t, j) != 0 ? carried : Vector{}));
                carried += Gem::load(last_k_ + e) * Gem::load(d_last_k_ + e);
            }
            Vector later{};
            for (int64_t t = c_ - 1; t >= 0; --t) {
                const int64_t e = t * kld_ + j;
                const Vector q = Gem::load(q_ + e), k = Gem::load(k_ + e), prefix = decay_.prefix(t, j);
                const Vector d_q = Gem::load(d_decayed_q_ + e), dx = Gem::load(dx_ + e), dy = Gem::load(dy_ + e);
                later += Gem::load(decayed_q_ + e) * d_q + q * dx - k * dy;
                const Vector dm = dm_[t * side_ + t] - Vector{};
                Vector dk = Gem::load(dk_ + e) + decay_.suffix(t, j) * Gem::load(d_last_k_ + e) + dy + dm * q;
                if constexpr (kDelta) {
                    const Vector d_k = Gem::load(d_decayed_k_ + e), dz = Gem::load(dz_ + e);
                    later += Gem::load(decayed_k_ + e) * d_k + k * dz;
                    dk += prefix * d_k + dz;
                }
                Gem::store(dk_ + e, dk);
                Gem::store(dq_ + e, Gem::load(dq_ + e) + scale() * prefix * d_q + dx + dm * k);
                Gem::store(dg_ + e, Gem::load(dg_ + e) + (decay_.a(t, j) != 0 ? later : Vector{}));
            }
        }
    }

    const LinearAttention& p_;
    int64_t keys_, values_, kn_, vn_, kld_, vld_, c_ = 0;  // kn_, vn_: counts in whole vectors
    E engine_;
    Decay<E, G> decay_;
    int64_t side_;
    T *q_, *k_, *v_, *k_t_, *m_, *o_, *u_, *last_k_, *decayed_q_ = nullptr;
    T scale_ = static_cast<T>(p_.scale);
    T *scaled_prefix_ = nullptr, *decayed_k_ = nullptr, *beta_ = nullptr, *n_ = nullptr, *inverse_ = nullptr,
      *rest_ = nullptr;
    T *du_ = nullptr, *u_t_ = nullptr, *dm_ = nullptr, *state_t_ = nullptr, *dstate_t_ = nullptr;
    T *d_decayed_q_ = nullptr, *d_last_k_ = nullptr, *dq_ = nullptr, *dk_ = nullptr, *dg_ = nullptr;
    T *dx_ = nullptr, *dy_ = nullptr, *dz_ = nullptr, *dn_ = nullptr, *x_ = nullptr, *d_decayed_k_ = nullptr;
    T* dbeta_ = nullptr;
};

}  // namespace pyops::PYOPS_ISA
