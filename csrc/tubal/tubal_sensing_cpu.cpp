// Steps of gradient descent on a factor of measured tubal tensors (see tubal_sensing.h for the mathematics).
//
// The steps are taken in the Fourier domain of the tubes, where the t-product is one matrix product per face and the
// T-transpose is the conjugate transpose; real tensors need the faces f = 0 .. tubes/2 only, and f = 0 and tubes/2 are
// real. U is transformed once per call and returns at its end. With <A, Z> = sum_f c_f Re tr(A_f^H Z_f), c_f =
// (1 or 2) / tubes, and Z = U * U^T Hermitian, A_f counts by its Hermitian part: its real coordinates
//
//   p = (strict lower triangle and diagonal of Re (A_f + A_f^H)/2, strict lower triangle of its Im)
//
// are n (n + 1)/2 for a real face and n^2 for another, about half as many as A has entries, and g = sum_i res_i p_i is
// the gradient's factor E_f itself. When there are steps enough to repay it, A is rewritten as [count, coordinates] and
// each step reads that; otherwise a step reads A as it is, and Z and the sum over i are converted.
//
// Steps multiply U from the left only. With more columns than twice the rows, U_f = L Q with orthonormal rows of Q
// (Gram-Schmidt, twice), so that U U^H = L L^H and a step is one on L [n, n], whatever the rank; U = L Q at the end.
//
// A step reads the measurements once: kBlock rows are multiplied by z and, while they lie in L1, added to g with their
// residuals. It costs 4 count x coordinates flops at one load per FMA, and for V = U^T or L^T [columns, 2n] per complex
// face (real and imaginary parts beside each other) the products V^T V and V M, each 8 n^2 columns flops; a quarter for
// a real face.
//
// Members of the team share faces, then rows in slices of fixed count: results do not depend on the number of threads.
#include <math.h>
#include <omp.h>

#include "common/small_gemm.h"
#include "common/team.h"
#include "tubal/tubal_sensing.h"

namespace pyops::PYOPS_ISA {
namespace {

constexpr int kBlock = 8;
constexpr int64_t kSlices = 16;
constexpr int64_t kSharedWork = int64_t{1} << 18;  // measurements x coordinates from which threads pay
constexpr int64_t kPackSteps = 32;                 // rewriting the measurements costs about as much as twenty steps
constexpr int64_t kReduceSteps = 8;                // writing U as L Q costs about as much as five steps
constexpr int64_t kPackBytes = int64_t{1} << 28;   // and memory, which is not taken without limit

int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

template <class T>
class Sensing {
    using Small = SmallGemm<T>;
    using Vector = typename Small::Vector;
    static constexpr int kLanes = Small::kLanes;
    static constexpr int64_t padded(int64_t n) { return (n + kLanes - 1) / kLanes * kLanes; }

    const SensingProblem& o_;
    const int64_t n_, k_, rank_, area_, faces_, stride_, row_;
    const bool reduces_;
    const int64_t columns_;            // of U, or of L
    const int64_t below_, triangle_;   // entries below the diagonal, and with it
    int64_t coordinates_ = 0, width_;  // width_: of a row of measurements as the steps read it
    bool packs_;
    int64_t slices_;
    char* base_;
    int64_t used_ = 0;  // bytes of the workspace
    // cosine(f, t) = cos(2 pi f t / tubes), sine = -sin
    T *cosine_, *sine_, *z_, *flat_, *g_, *planes_, *work_, *rows_, *result_, *factors_[2], *measured_ = nullptr;
    double* loss_;
    int64_t* tubes_;  // where the tubes (i, j), then the tubes (j, i), of the triangle begin

    T* take(int64_t elements) {
        const int64_t start = used_;
        used_ += (elements * static_cast<int64_t>(sizeof(T)) + 63) / 64 * 64;
        return base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + start);
    }

    bool real(int64_t f) const { return f == 0 || 2 * f == k_; }
    T face_weight(int64_t f) const { return static_cast<T>((real(f) ? 1.0 : 2.0) / static_cast<double>(k_)); }
    int64_t face_coordinates(int64_t f) const { return real(f) ? triangle_ : area_; }
    int64_t first_coordinate(int64_t f) const { return f == 0 ? 0 : triangle_ + (f - 1) * area_; }
    int64_t face_width(int64_t f) const { return padded(real(f) ? n_ : 2 * n_); }
    T* factor(int which, int64_t f) const { return factors_[which] + f * columns_ * stride_; }
    T* face_rows(int64_t f) const { return rows_ + f * 2 * n_ * row_; }
    T* face_result(int64_t f) const { return result_ + f * 2 * n_ * row_; }

  public:
    Sensing(const SensingProblem& o, char* workspace)
        : o_(o),
          n_(o.n),
          k_(o.tubes),
          rank_(o.rank),
          area_(o.n * o.n),
          faces_(o.tubes / 2 + 1),
          stride_(padded(2 * o.n)),
          row_(padded(o.rank)),
          reduces_(o.steps >= kReduceSteps && o.rank >= 2 * o.n),
          columns_(reduces_ ? o.n : o.rank),
          below_(o.n * (o.n - 1) / 2),
          triangle_(o.n * (o.n + 1) / 2),
          base_(workspace) {
        for (int64_t f = 0; f < faces_; ++f) coordinates_ += face_coordinates(f);
        const int64_t packed = padded(coordinates_);
        packs_ = o.steps >= kPackSteps && o.count * packed * static_cast<int64_t>(sizeof(T)) <= kPackBytes;
        width_ = packs_ ? packed : area_ * k_;
        slices_ = o.count * coordinates_ >= kSharedWork ? kSlices : 1;
        cosine_ = take(faces_ * k_);
        sine_ = take(faces_ * k_);
        z_ = take(packed);
        flat_ = take(padded(area_ * k_));
        g_ = take(slices_ * padded(width_));
        planes_ = take(2 * k_ * triangle_ * members());
        tubes_ = reinterpret_cast<int64_t*>(take(2 * triangle_ * static_cast<int64_t>(8 / sizeof(T))));
        work_ = take(4 * n_ * stride_ * members());
        rows_ = take(faces_ * 2 * n_ * row_);
        result_ = reduces_ ? take(faces_ * 2 * n_ * row_) : rows_;
        for (T*& factors : factors_) factors = take(faces_ * columns_ * stride_);
        loss_ = reinterpret_cast<double*>(take(slices_ * static_cast<int64_t>(8 / sizeof(T))));
        if (packs_) measured_ = take(o.count * width_);
    }

    int64_t elements() const { return used_ / static_cast<int64_t>(sizeof(T)); }
    int members() const { return slices_ > 1 ? static_cast<int>(least(o_.threads, slices_)) : 1; }

    void make_tables() {
        for (int64_t f = 0; f < faces_; ++f)
            for (int64_t t = 0; t < k_; ++t) {
                const double angle =
                    6.283185307179586476925 * static_cast<double>(f * t % k_) / static_cast<double>(k_);
                const double c = cos(angle), s = -sin(angle);
                cosine_[f * k_ + t] = static_cast<T>(fabs(c) < 1e-15 ? 0 : c);
                sine_[f * k_ + t] = static_cast<T>(fabs(s) < 1e-15 ? 0 : s);
            }
        for (int64_t c = 0; c < padded(coordinates_); ++c) z_[c] = 0;
        for (int64_t i = 0, c = 0; i < n_; ++i) {
            for (int64_t j = 0; j < i; ++j, ++c) {
                tubes_[c] = (i * n_ + j) * k_;
                tubes_[triangle_ + c] = (j * n_ + i) * k_;
            }
            tubes_[below_ + i] = tubes_[triangle_ + below_ + i] = (i * n_ + i) * k_;
        }
    }

    void run(const Team& team) {
        if (packs_) {
            for (int64_t i = team.begin(o_.count); i < team.end(o_.count); ++i)
                coordinates(static_cast<const T*>(o_.measured) + i * area_ * k_, measured_ + i * width_, team.rank);
        }
        for (int64_t f = team.rank; f < faces_; f += team.size) {
            load(f);
            enter(f);
            product(f, 0, team.rank);
        }
        for (int64_t step = 0; step < o_.steps; ++step) {
            team.wait();
            if (!packs_) {
                if (team.rank == 0) flatten();
                team.wait();
            }
            for (int64_t s = team.begin(slices_); s < team.end(slices_); ++s)
                measure(o_.count * s / slices_, o_.count * (s + 1) / slices_, g_ + s * padded(width_), loss_ + s);
            team.wait();
            if (team.rank == 0) sum_slices(step);
            if (team.size > 1) team.wait();
            for (int64_t f = team.rank; f < faces_; f += team.size) {
                update(f, static_cast<int>(step & 1), team.rank);
                if (step + 1 < o_.steps) product(f, 1 - static_cast<int>(step & 1), team.rank);
            }
        }
        for (int64_t f = team.rank; f < faces_; f += team.size) leave(f, static_cast<int>(o_.steps & 1), team.rank);
        team.wait();
        if (team.rank == 0) store();
    }

  private:
    const T& table(const T* t, int64_t f, int64_t tube) const { return t[f * k_ + tube]; }
    T* u(int64_t i, int64_t r) const { return static_cast<T*>(o_.u) + i * o_.u_row + r * o_.u_column; }

    // Face f of U, rows of real parts and then, unless it is real, rows of imaginary parts.
    void load(int64_t f) {
        T* rows = face_rows(f);
        for (int64_t e = 0; e < 2 * n_ * row_; ++e) rows[e] = 0;
        for (int64_t i = 0; i < n_; ++i) {
            T *re = rows + i * row_, *im = rows + (n_ + i) * row_;
            for (int64_t t = 0; t < k_; ++t) {
                const T c = table(cosine_, f, t), s = table(sine_, f, t);
                const T* x = u(i, 0) + t * o_.u_tube;
                for (int64_t r = 0; r < rank_; ++r) re[r] += c * x[r * o_.u_column];
                if (real(f)) continue;
                for (int64_t r = 0; r < rank_; ++r) im[r] += s * x[r * o_.u_column];
            }
        }
    }

    void store() {
        for (int64_t i = 0; i < n_; ++i)
            for (int64_t t = 0; t < k_; ++t) {
                T* x = u(i, 0) + t * o_.u_tube;
                for (int64_t f = 0; f < faces_; ++f) {
                    const T c = face_weight(f) * table(cosine_, f, t), s = face_weight(f) * table(sine_, f, t);
                    const T *re = face_result(f) + i * row_, *im = re + n_ * row_;
                    for (int64_t r = 0; r < rank_; ++r) {
                        const T part = real(f) ? c * re[r] : c * re[r] + s * im[r];
                        x[r * o_.u_column] = f == 0 ? part : x[r * o_.u_column] + part;
                    }
                }
            }
    }

    // V = U^T, or L^T for rows U = L Q; the rows then hold Q.
    void enter(int64_t f) {
        T *rows = face_rows(f), *v = factor(0, f), *other = factor(1, f);
        for (int64_t e = 0; e < columns_ * stride_; ++e) v[e] = other[e] = 0;
        if (!reduces_) {
            for (int64_t i = 0; i < (real(f) ? n_ : 2 * n_); ++i)
                for (int64_t r = 0; r < rank_; ++r) v[r * stride_ + i] = rows[i * row_ + r];
            return;
        }
        for (int64_t i = 0; i < n_; ++i) {
            T *re = rows + i * row_, *im = re + n_ * row_;  // those of a real face are zero
            for (int pass = 0; pass < 2; ++pass)
                for (int64_t c = 0; c < i; ++c) {
                    const T *qr = rows + c * row_, *qi = qr + n_ * row_;
                    T x = 0, y = 0;  // <u_i, q_c>
#pragma omp simd reduction(+ : x, y)
                    for (int64_t r = 0; r < row_; ++r) {
                        x += re[r] * qr[r] + im[r] * qi[r];
                        y += im[r] * qr[r] - re[r] * qi[r];
                    }
#pragma omp simd
                    for (int64_t r = 0; r < row_; ++r) {
                        re[r] -= x * qr[r] - y * qi[r];
                        im[r] -= x * qi[r] + y * qr[r];
                    }
                    v[c * stride_ + i] += x;
                    if (!real(f)) v[c * stride_ + n_ + i] += y;
                }
            v[i * stride_ + i] = normalize(re, im);
        }
    }

    // Scaled before it is squared: a start may be as small as the smallest numbers there are.
    T normalize(T* re, T* im) {
        T scale = 0;
        for (int64_t r = 0; r < row_; ++r) {
            const T x = re[r] < 0 ? -re[r] : re[r], y = im[r] < 0 ? -im[r] : im[r];
            scale = scale < x ? x : scale;
            scale = scale < y ? y : scale;
        }
        T sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t r = 0; r < row_; ++r) {
            const T x = scale == 0 ? re[r] : re[r] / scale, y = scale == 0 ? im[r] : im[r] / scale;
            sum += x * x + y * y;
        }
        if (sum == 0) return 0;
        const T root = static_cast<T>(sqrt(static_cast<double>(sum)));
        for (int64_t r = 0; r < row_; ++r) {
            re[r] = re[r] / scale / root;
            im[r] = im[r] / scale / root;
        }
        return scale * root;
    }

    // The rows of U again, from V = U^T or from V = L^T and the rows of Q.
    void leave(int64_t f, int which, int member) {
        const T* v = factor(which, f);
        T *rows = face_rows(f), *out = face_result(f);
        const int64_t w = real(f) ? n_ : 2 * n_;
        if (!reduces_) {
            for (int64_t i = 0; i < w; ++i)
                for (int64_t r = 0; r < rank_; ++r) out[i * row_ + r] = v[r * stride_ + i];
            return;
        }
        T* m = work_ + member * 4 * n_ * stride_;  // L, or [Re, -Im; Im, Re] of it
        for (int64_t c = 0; c < n_; ++c)
            for (int64_t i = 0; i < n_; ++i) {
                m[i * stride_ + c] = v[c * stride_ + i];
                if (real(f)) continue;
                m[(n_ + i) * stride_ + n_ + c] = v[c * stride_ + i];
                m[(n_ + i) * stride_ + c] = v[c * stride_ + n_ + i];
                m[i * stride_ + n_ + c] = -v[c * stride_ + n_ + i];
            }
        Small::multiply(w, row_, w, {m, stride_, 1, rows, row_, out, row_}, [] {});
    }

    // Coordinates of the Hermitian part of a spatial tensor [n, n, tubes]; what pads the row is zero.
    void coordinates(const T* a, T* p, int member) {
        T* even = planes_ + member * 2 * k_ * triangle_;  // of each slice: halves of sums and of differences
        T* odd = even + k_ * triangle_;
        switch (k_) {
            case 2: split<2>(a, even, odd); break;
            case 3: split<3>(a, even, odd); break;
            case 4: split<4>(a, even, odd); break;
            default: split<0>(a, even, odd);
        }
        for (int64_t f = 0; f < faces_; ++f) {
            transform(triangle_, even, cosine_ + f * k_, p);
            p += triangle_;
            if (real(f)) continue;
            transform(below_, odd, sine_ + f * k_, p);
            p += below_;
        }
        for (int64_t c = coordinates_; c < padded(coordinates_); ++c) *p++ = 0;
    }

    // Short tubes at a count the compiler knows: three times as fast.
    template <int K>
    void split(const T* a, T* even, T* odd) {
        const int64_t k = K > 0 ? K : k_, count = triangle_;
        const int64_t *lower = tubes_, *upper = tubes_ + triangle_;
        const T half = static_cast<T>(0.5);
        for (int64_t c = 0; c < count; ++c) {
            const T *x = a + lower[c], *y = a + upper[c];
#pragma GCC unroll 4
            for (int64_t t = 0; t < k; ++t) {
                const T p = half * x[t], q = half * y[t];
                even[t * count + c] = p + q;
                odd[t * count + c] = p - q;
            }
        }
    }

    void transform(int64_t count, const T* slices, const T* factors, T* out) {
        int64_t c = 0;
        for (; c + kLanes <= count; c += kLanes) {
            Vector sum = factors[0] * Small::load(slices + c);
            for (int64_t t = 1; t < k_; ++t) sum += factors[t] * Small::load(slices + t * triangle_ + c);
            Small::store(out + c, sum);
        }
        for (; c < count; ++c) {
            T sum = factors[0] * slices[c];
            for (int64_t t = 1; t < k_; ++t) sum += factors[t] * slices[t * triangle_ + c];
            out[c] = sum;
        }
    }

    // z = coordinates of Z_f = U_f U_f^H, with the weights of the inner product if the rows are coordinates too.
    void product(int64_t f, int which, int member) {
        T* s = work_ + member * 4 * n_ * stride_;
        T* v = factor(which, f);
        typename Small::Operands operands{v, 1, stride_, v, stride_, s, stride_};
        operands.shape = Shape::LowerResult;
        if (!real(f)) operands.shape = Shape::Full;
        Small::multiply(real(f) ? n_ : 2 * n_, face_width(f), columns_, operands, [] {});
        const T on = packs_ ? face_weight(f) : T(1), off = packs_ ? 2 * face_weight(f) : T(1);
        T *z = z_ + first_coordinate(f), *diagonal = z + below_, *imaginary = z + triangle_;
        const T *low = s + n_ * stride_, *right = s + n_;
        for (int64_t i = 0; i < n_; ++i) {
            const T *row = s + i * stride_, *down = low + i * stride_ + n_;
            if (real(f)) {
                for (int64_t j = 0; j < i; ++j) *z++ = off * row[j];
                *diagonal++ = on * row[i];
            } else {
                for (int64_t j = 0; j < i; ++j) *z++ = off * (row[j] + down[j]);
                *diagonal++ = on * (row[i] + down[i]);
                for (int64_t j = 0; j < i; ++j) *imaginary++ = off * (low[i * stride_ + j] - right[i * stride_ + j]);
            }
        }
    }

    // The spatial Z from its coordinates.
    void flatten() {
        for (int64_t e = 0; e < area_ * k_; ++e) flat_[e] = 0;
        for (int64_t f = 0; f < faces_; ++f) {
            const T* re = z_ + first_coordinate(f);
            const T *diagonal = re + below_, *im = re + triangle_;
            for (int64_t i = 0; i < n_; ++i)
                for (int64_t j = 0; j <= i; ++j) {
                    const T x = face_weight(f) * (i == j ? *diagonal++ : *re++);
                    const T y = real(f) || i == j ? T(0) : face_weight(f) * *im++;
                    T *ij = flat_ + (i * n_ + j) * k_, *ji = flat_ + (j * n_ + i) * k_;
                    for (int64_t t = 0; t < k_; ++t) {
                        const T c = table(cosine_, f, t) * x, s = table(sine_, f, t) * y;
                        ij[t] += c + s;
                        if (i != j) ji[t] += c - s;
                    }
                }
        }
    }

    // g = sum of res_i a_i over rows [first, last), and their part of the loss.
    void measure(int64_t first, int64_t last, T* g, double* loss) {
        const T* a = (packs_ ? measured_ : static_cast<const T*>(o_.measured)) + first * width_;
        const T* z = packs_ ? z_ : flat_;
        const T* y = static_cast<const T*>(o_.y);
        for (int64_t c = 0; c < width_; ++c) g[c] = 0;
        *loss = 0;
        int64_t i = first;
        for (; i + kBlock <= last; i += kBlock, a += kBlock * width_) rows<kBlock>(a, z, y + i, g, loss);
        for (; i < last; ++i, a += width_) rows<1>(a, z, y + i, g, loss);
    }

    template <int NR>
    void rows(const T* a, const T* z, const T* y, T* g, double* loss) {
        const int64_t d = width_, whole = d / kLanes * kLanes;
        Vector acc[NR] = {};
        for (int64_t c = 0; c < whole; c += kLanes) {
            const Vector x = Small::load(z + c);
#pragma GCC unroll 8
            for (int r = 0; r < NR; ++r) acc[r] += x * Small::load(a + r * d + c);
        }
        T residual[NR];
        sums<NR>(acc, residual);
        for (int64_t c = whole; c < d; ++c)
            for (int r = 0; r < NR; ++r) residual[r] += z[c] * a[r * d + c];
        Vector scale[NR];
        for (int r = 0; r < NR; ++r) {
            residual[r] -= y[r];
            *loss += 0.25 * static_cast<double>(residual[r]) * static_cast<double>(residual[r]);
            scale[r] = residual[r] - Vector{};
        }
        for (int64_t c = 0; c < whole; c += kLanes) {
            Vector sum = Small::load(g + c);
#pragma GCC unroll 8
            for (int r = 0; r < NR; ++r) sum += scale[r] * Small::load(a + r * d + c);
            Small::store(g + c, sum);
        }
        for (int64_t c = whole; c < d; ++c)
            for (int r = 0; r < NR; ++r) g[c] += residual[r] * a[r * d + c];
    }

    // The sums of the lanes of each vector: rounds of transposition, so that every addition is of whole vectors.
    template <int NR>
    static void sums(Vector (&v)[NR], T* out) {
        constexpr int kGroup = NR < kLanes ? NR : kLanes;
        for (int first = 0; first < NR; first += kGroup) {
            Vector* w = v + first;
            if constexpr (kGroup > 1) fold<1, kGroup>(w);
            if constexpr (kGroup > 2) fold<2, kGroup>(w);
            if constexpr (kGroup > 4) fold<4, kGroup>(w);
            for (int r = 0; r < kGroup; ++r) {
                T sum = w[0][r];
                for (int l = r + kGroup; l < kLanes; l += kGroup) sum += w[0][l];
                out[first + r] = sum;
            }
        }
    }

    template <int step, int group>
    [[gnu::always_inline]] static void fold(Vector* w) {
#pragma GCC unroll 4
        for (int r = 0; r < group; r += 2 * step) {
            Transpose<T>::template exchange<step>(w[r], w[r + step]);
            w[r] += w[r + step];
        }
    }

    void sum_slices(int64_t step) {
        double loss = loss_[0];
        for (int64_t s = 1; s < slices_; ++s) {
            loss += loss_[s];
            const T* from = g_ + s * padded(width_);
            for (int64_t c = 0; c < width_; ++c) g_[c] += from[c];
        }
        static_cast<T*>(o_.losses)[step] = static_cast<T>(loss);
        if (!packs_) coordinates(g_, flat_, 0);  // flat_ is read no more in this step, and has room for them
    }

    // V <- V + V M, M = -step (E^T as a real matrix), out of place.
    void update(int64_t f, int which, int member) {
        const int64_t w = real(f) ? n_ : 2 * n_, width = face_width(f);
        T* m = work_ + member * 4 * n_ * stride_;
        const T scale = static_cast<T>(-o_.step), one = 1;
        const T* re = (packs_ ? g_ : flat_) + first_coordinate(f);
        const T *diagonal = re + below_, *im = re + triangle_;
        for (int64_t i = 0; i < w; ++i)
            for (int64_t j = w; j < width; ++j) m[i * stride_ + j] = 0;
        const auto set = [&](int64_t i, int64_t j, T x) { m[i * stride_ + j] = m[j * stride_ + i] = x; };
        for (int64_t i = 0; i < n_; ++i)
            for (int64_t j = 0; j <= i; ++j) {
                const T x = scale * (i == j ? *diagonal++ : *re++);
                set(i, j, x);
                if (real(f)) continue;
                // E_ij = x + i y (j < i): rows are Re and Im of U's entry, columns of the result's.
                const T y = i == j ? T(0) : scale * *im++;
                set(n_ + i, n_ + j, x);
                set(j, n_ + i, y);
                set(i, n_ + j, -y);
            }
        const T* v = factor(which, f);
        typename Small::Operands operands{v, stride_, 1, m, stride_, factor(1 - which, f), stride_};
        operands.r = &one;
        operands.add = v;
        Small::multiply(columns_, width, w, operands, [] {});
    }
};

template <class T>
void run_steps(const SensingProblem& problem, char* workspace) {
    Sensing<T> sensing(problem, workspace);
    sensing.make_tables();
    const int members = sensing.members();
    if (members == 1) {
        sensing.run(Team{});
        return;
    }
    Barrier barrier;
#pragma omp parallel num_threads(members)
    {
#pragma omp single
        barrier.set_members(omp_get_num_threads());
        sensing.run(Team{omp_get_thread_num(), omp_get_num_threads(), &barrier});
    }
}

}  // namespace

int64_t tubal_sensing_workspace(const SensingProblem& problem) {
    return problem.dtype == DType::F64 ? Sensing<double>(problem, nullptr).elements()
                                       : Sensing<float>(problem, nullptr).elements();
}

void tubal_sensing_steps(const SensingProblem& problem, void* workspace) {
    auto* memory = static_cast<char*>(workspace);
    if (problem.dtype == DType::F64)
        run_steps<double>(problem, memory);
    else
        run_steps<float>(problem, memory);
}

}  // namespace pyops::PYOPS_ISA
