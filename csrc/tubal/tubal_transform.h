// Transforms of kBlock tubes at a time: element t of all tubes is a row of kBlock lanes, so nothing is shuffled.
//
// Real tubes of n give n real rows: Re of faces 0 .. n/2, then Im of faces 1 .. (n-1)/2 (the others are 0).
//
//   Re_f =  sum_{k=0}^{n/2} cos(2 pi f k / n) e_k,   e_k = x_k + x_{n-k}  (e_0 = x_0, e_{n/2} = x_{n/2})
//   Im_f = -sum_{k=1}^{(n-1)/2} sin(2 pi f k / n) o_k,   o_k = x_k - x_{n-k}
//
// and back, with weights w_f = 1 for faces 0 and n/2 and 2 for others, the same sums over f instead of k,
//
//   x_k, x_{n-k} = c_k -+ s_k,   c_k = 1/n sum_f w_f cos(2 pi f k / n) Re_f,   s_k = 2/n sum_f sin(2 pi f k / n) Im_f.
//
// For even n faces f and n/2 - f share the sums over even and odd k, which halves them: n^2 / 4 multiply-adds per tube
// and direction, n^2 / 2 for odd n. Longer tubes go through a complex FFT (tubal_fourier.h), of n / 2 points for even
// n.
#pragma once

#include "tubal/tubal_fourier.h"

namespace pyops::PYOPS_ISA {

template <class T>
class TubeTransform {
  public:
    using Gem = SmallGemm<T>;
    using Vector = typename Gem::Vector;
    static constexpr int64_t kLanes = Gem::kLanes, kBlock = 4 * kLanes;

    // One direction. A matrix (n x n, row-major) instead of the DFT must outlive the object; where forward() is given
    // one at the call, there is none here.
    TubeTransform(int64_t n, const T* matrix, bool inverse, Pieces& pieces)
        : n_(n), inverse_(inverse), matrix_(matrix) {
        if (matrix || n <= 4) return;
        if (n > kLongestSums && (n > kLongestRoughSums || Fourier<T>::smooth(n))) {
            fourier_ = Fourier<T>(n % 2 ? n : n / 2, pieces);
            by_fourier_ = true;
            cos_ = pieces.take<T>(n / 2 + 1);
            sin_ = pieces.take<T>(n / 2 + 1);
            return;
        }
        const int64_t half = n / 2, odd = (n - 1) / 2;
        cos_rows_ = n % 2 ? half + 1 : half / 2 + 1;
        cos_even_ = n % 2 ? half + 1 : half / 2 + 1;
        cos_odd_ = n % 2 ? 0 : (half + 1) / 2;
        sin_rows_ = n % 2 ? odd : half / 2;
        sin_even_ = n % 2 ? 0 : odd / 2;
        sin_odd_ = n % 2 ? odd : half / 2;
        cos_ = pieces.take<T>(cos_rows_ * (cos_even_ + cos_odd_));
        sin_ = pieces.take<T>(sin_rows_ * (sin_even_ + sin_odd_));
    }

    // Rows of a block of tubes, which are transposed in squares; and of what forward(), inverse() and prepare()
    // overwrite at t.
    static int64_t rows(int64_t n) { return padded(n, kLanes); }
    int64_t scratch_rows() const { return by_fourier_ ? fourier_.scratch_rows() : n_ + 4; }

    // Fills the tables.
    void prepare(T* t) {
        if (matrix_ || n_ <= 4) return;
        if (by_fourier_) {
            fourier_.prepare(t);
            for (int64_t j = 0; j <= n_ / 2; ++j) {
                const Angle a = angle(j, n_);
                cos_[j] = static_cast<T>(a.cos);
                sin_[j] = static_cast<T>(-a.sin);
            }
            return;
        }
        // n cosines and sines, of which the tables' n^2 / 2 are taken.
        double *const cosines = reinterpret_cast<double*>(t), *const sines = cosines + n_;
        for (int64_t j = 0; j < n_; ++j) {
            const Angle a = angle(j, n_);
            cosines[j] = a.cos;
            sines[j] = a.sin;
        }
        // factor times those of 2 pi f (first + step k) / n for k = 0, 1, ...
        const auto fill = [&](T* to, int64_t count, const double* of, double factor, int64_t f, int64_t first,
                              int64_t step) {
            const int64_t along = f * step % n_;
            int64_t at = f * first % n_;
            for (int64_t k = 0; k < count; ++k) {
                to[k] = static_cast<T>(factor * of[at]);
                at += along;
                if (at >= n_) at -= n_;
            }
        };
        const double scale = inverse_ ? 1.0 / static_cast<double>(n_) : 1.0, twice = inverse_ ? 2 * scale : 1.0;
        const int64_t step = n_ % 2 ? 1 : 2;
        for (int64_t f = 0; f < cos_rows_; ++f) {
            T* even = cos_ + f * cos_even_;
            T* odd = cos_ + cos_rows_ * cos_even_ + f * cos_odd_;
            fill(even, cos_even_, cosines, twice, f, 0, step);
            fill(odd, cos_odd_, cosines, twice, f, 1, 2);
            if (!inverse_) continue;
            // Faces that are their own conjugates count once.
            even[0] *= T(0.5);
            if (n_ % 2) continue;
            if (n_ / 2 % 2)
                odd[cos_odd_ - 1] *= T(0.5);
            else
                even[cos_even_ - 1] *= T(0.5);
        }
        const double sign = inverse_ ? twice : -1;
        for (int64_t f = 1; f <= sin_rows_; ++f) {
            fill(sin_ + (f - 1) * sin_odd_, sin_odd_, sines, sign, f, 1, step);
            fill(sin_ + sin_rows_ * sin_odd_ + (f - 1) * sin_even_, sin_even_, sines, sign, f, 2, 2);
        }
    }

    // Rows of tubes x, which are overwritten, to rows of faces y, ldy apart, for the first `lanes` lanes (whole
    // vectors); of a matrix, if it is not null. `stream`: past the caches (common/small_gemm.h).
    void forward(T* x, T* t, T* y, int64_t ldy, int64_t lanes, const T* matrix, bool stream) const {
        if (matrix) return multiply(lanes, n_, n_, matrix, n_, x, kBlock, y, ldy, stream);
        if (n_ <= 4) return small_forward(lanes, x, y, ldy, stream);
        if (by_fourier_) return fourier_forward(lanes, x, t, y, ldy, stream);
        const int64_t odd = (n_ - 1) / 2;
        for (int64_t k = 1; k <= odd; ++k) sum_and_difference(lanes, x + k * kBlock, x + (n_ - k) * kBlock);
        cosines(lanes, x, kBlock, t, y, ldy, stream);
        sines(lanes, x + (n_ - 1) * kBlock, -kBlock, t, y + (n_ / 2 + 1) * ldy, ldy, stream);
    }

    // Rows of faces y, ldy apart, to rows of tubes x.
    void inverse(const T* y, int64_t ldy, int64_t lanes, T* t, T* x) const {
        if (matrix_) return multiply(lanes, n_, n_, matrix_, n_, y, ldy, x, kBlock, false);
        if (n_ <= 4) return small_inverse(lanes, y, ldy, x);
        if (by_fourier_) return fourier_inverse(lanes, y, ldy, t, x);
        cosines(lanes, y, ldy, t, x, kBlock, false);
        sines(lanes, y + (n_ / 2 + 1) * ldy, ldy, t, x + (n_ - 1) * kBlock, -kBlock, false);
        const int64_t odd = (n_ - 1) / 2;
        for (int64_t k = 1; k <= odd; ++k) {
            T *a = x + k * kBlock, *b = x + (n_ - k) * kBlock;
            for (int64_t l = 0; l < lanes; l += kLanes) {
                const Vector c = Gem::load(a + l), s = Gem::load(b + l);
                Gem::store(a + l, c - s);
                Gem::store(b + l, c + s);
            }
        }
    }

  private:
    // Beyond, an FFT is quicker: of lengths with small factors; of others.
    static constexpr int64_t kLongestSums = 31, kLongestRoughSums = 512;

    // y = a x
    static void multiply(int64_t lanes, int64_t m, int64_t k, const T* a, int64_t lda, const T* x, int64_t ldx, T* y,
                         int64_t ldy, bool stream) {
        typename Gem::Operands o{a, lda, 1, x, ldx, y, ldy};
        o.past_caches = stream;
        Gem::multiply(m, lanes, k, o, [] {});
    }

    static void put(T* p, Vector v, bool stream) { stream ? Gem::stream(p, v) : Gem::store(p, v); }

    static void sum_and_difference(int64_t lanes, T* a, T* b) {
        for (int64_t l = 0; l < lanes; l += kLanes) {
            const Vector x = Gem::load(a + l), y = Gem::load(b + l);
            Gem::store(a + l, x + y);
            Gem::store(b + l, x - y);
        }
    }

    // out_f = sum_k cos_fk in_k for 0 <= f, k <= n/2, rows `step` and `stride` apart.
    void cosines(int64_t lanes, const T* in, int64_t step, T* t, T* out, int64_t stride, bool stream) const {
        if (n_ % 2) return multiply(lanes, cos_rows_, cos_even_, cos_, cos_even_, in, step, out, stride, stream);
        const int64_t half = n_ / 2;
        T *even = t, *odd = t + cos_rows_ * kBlock;
        multiply(lanes, cos_rows_, cos_even_, cos_, cos_even_, in, 2 * step, even, kBlock, false);
        multiply(lanes, cos_rows_, cos_odd_, cos_ + cos_rows_ * cos_even_, cos_odd_, in + step, 2 * step, odd, kBlock,
                 false);
        for (int64_t f = 0; f < cos_rows_; ++f)
            for (int64_t l = 0; l < lanes; l += kLanes) {
                const Vector e = Gem::load(even + f * kBlock + l), o = Gem::load(odd + f * kBlock + l);
                put(out + f * stride + l, e + o, stream);
                if (half - f != f) put(out + (half - f) * stride + l, e - o, stream);
            }
    }

    // out_f = sum_k sin_fk in_k for 1 <= f, k <= (n-1)/2; in and out point to row 1.
    void sines(int64_t lanes, const T* in, int64_t step, T* t, T* out, int64_t stride, bool stream) const {
        if (n_ % 2) return multiply(lanes, sin_rows_, sin_odd_, sin_, sin_odd_, in, step, out, stride, stream);
        const int64_t half = n_ / 2;
        T *even = t, *odd = t + sin_rows_ * kBlock;
        multiply(lanes, sin_rows_, sin_even_, sin_ + sin_rows_ * sin_odd_, sin_even_, in + step, 2 * step, even, kBlock,
                 false);
        multiply(lanes, sin_rows_, sin_odd_, sin_, sin_odd_, in, 2 * step, odd, kBlock, false);
        for (int64_t f = 1; f <= sin_rows_; ++f)
            for (int64_t l = 0; l < lanes; l += kLanes) {
                const Vector e = Gem::load(even + (f - 1) * kBlock + l), o = Gem::load(odd + (f - 1) * kBlock + l);
                put(out + (f - 1) * stride + l, o + e, stream);
                if (half - f != f) put(out + (half - f - 1) * stride + l, o - e, stream);
            }
    }

    void small_forward(int64_t lanes, const T* x, T* y, int64_t ldy, bool stream) const {
        for (int64_t l = 0; l < lanes; l += kLanes) {
            const Vector a = Gem::load(x + l);
            if (n_ == 1) {
                put(y + l, a, stream);
                continue;
            }
            const Vector b = Gem::load(x + kBlock + l);
            if (n_ == 2) {
                put(y + l, a + b, stream);
                put(y + ldy + l, a - b, stream);
                continue;
            }
            const Vector c = Gem::load(x + 2 * kBlock + l);
            if (n_ == 3) {
                put(y + l, a + (b + c), stream);
                put(y + ldy + l, a - T(0.5) * (b + c), stream);
                put(y + 2 * ldy + l, static_cast<T>(kSin60) * (c - b), stream);
                continue;
            }
            const Vector d = Gem::load(x + 3 * kBlock + l);
            put(y + l, (a + c) + (b + d), stream);
            put(y + ldy + l, a - c, stream);
            put(y + 2 * ldy + l, (a + c) - (b + d), stream);
            put(y + 3 * ldy + l, d - b, stream);
        }
    }

    void small_inverse(int64_t lanes, const T* y, int64_t ldy, T* x) const {
        for (int64_t l = 0; l < lanes; l += kLanes) {
            const Vector a = Gem::load(y + l);
            if (n_ == 1) {
                Gem::store(x + l, a);
                continue;
            }
            const Vector b = Gem::load(y + ldy + l);
            if (n_ == 2) {
                Gem::store(x + l, T(0.5) * (a + b));
                Gem::store(x + kBlock + l, T(0.5) * (a - b));
                continue;
            }
            const Vector c = Gem::load(y + 2 * ldy + l);
            if (n_ == 3) {
                const Vector rest = a - b, odd = static_cast<T>(2 * kSin60) * c;
                Gem::store(x + l, static_cast<T>(1.0 / 3) * (a + T(2) * b));
                Gem::store(x + kBlock + l, static_cast<T>(1.0 / 3) * (rest - odd));
                Gem::store(x + 2 * kBlock + l, static_cast<T>(1.0 / 3) * (rest + odd));
                continue;
            }
            const Vector d = Gem::load(y + 3 * ldy + l);
            const Vector sum = a + c, rest = a - c;
            Gem::store(x + l, T(0.25) * (sum + T(2) * b));
            Gem::store(x + kBlock + l, T(0.25) * (rest - T(2) * d));
            Gem::store(x + 2 * kBlock + l, T(0.25) * (sum - T(2) * b));
            Gem::store(x + 3 * kBlock + l, T(0.25) * (rest + T(2) * d));
        }
    }
    static constexpr double kSin60 = 0.86602540378443864676;

    // Even n: z_k = x_{2k} + i x_{2k+1} has the spectrum Z of length m = n / 2, and
    //   X_k = E_k + w^k O_k,  E_k = (Z_k + conj Z_{m-k}) / 2,  O_k = (Z_k - conj Z_{m-k}) / 2i,  w = exp(-2 pi i / n).
    // Odd n: z = x. Half of the lanes at a time, so that no tube shares a number with another.
    void fourier_forward(int64_t lanes, const T* x, T* t, T* y, int64_t ldy, bool stream) const {
        const int64_t half = n_ / 2, length = n_ % 2 ? n_ : half;
        const Vector point5 = T(0.5) - Vector{};
        for (int64_t first = 0; first < lanes; first += 2 * kLanes) {
            for (int64_t k = 0; k < length; ++k)
                for (int64_t l = 0; l < 2 * kLanes; l += kLanes) {
                    const T* from = x + (n_ % 2 ? k : 2 * k) * kBlock + first + l;
                    Gem::store(t + k * kBlock + l, Gem::load(from));
                    Gem::store(t + k * kBlock + 2 * kLanes + l, n_ % 2 ? Vector{} : Gem::load(from + kBlock));
                }
            const T* z = fourier_.transform(t);
            for (int64_t f = 0; f <= half; ++f) {
                T *re = y + f * ldy + first, *im = y + (half + f) * ldy + first;
                const T *p = z + (f < length ? f : 0) * kBlock, *q = z + (f > 0 ? length - f : 0) * kBlock;
                for (int64_t l = 0; l < 2 * kLanes; l += kLanes) {
                    Vector a = Gem::load(p + l), b = Gem::load(p + 2 * kLanes + l);
                    if (n_ % 2 == 0) {
                        const Vector c = Gem::load(q + l), d = Gem::load(q + 2 * kLanes + l);
                        const Vector er = a + c, ei = b - d, or_ = b + d, oi = c - a;
                        a = point5 * (er + (cos_[f] * or_ - sin_[f] * oi));
                        b = point5 * (ei + (cos_[f] * oi + sin_[f] * or_));
                    }
                    put(re + l, a, stream);
                    if (f > 0 && 2 * f != n_) put(im + l, b, stream);
                }
            }
        }
    }

    // Back by E_k = (X_k + conj X_{m-k}) / 2, O_k = conj(w)^k (X_k - conj X_{m-k}) / 2, Z = E + i O. The inverse FFT is
    // the forward one between two exchanges of real and imaginary part.
    void fourier_inverse(int64_t lanes, const T* y, int64_t ldy, T* t, T* x) const {
        const int64_t half = n_ / 2, length = n_ % 2 ? n_ : half;
        const Vector scale = static_cast<T>(1.0 / static_cast<double>(n_)) - Vector{};
        const auto imaginary = [&](int64_t f, int64_t lane) {
            return f == 0 || 2 * f == n_ ? Vector{} : Gem::load(y + (half + f) * ldy + lane);
        };
        for (int64_t first = 0; first < lanes; first += 2 * kLanes) {
            for (int64_t k = 0; k < length; ++k)
                for (int64_t l = 0; l < 2 * kLanes; l += kLanes) {
                    const int64_t lane = first + l;
                    Vector zr, zi;
                    if (n_ % 2) {
                        const int64_t f = std::min(k, n_ - k);
                        zr = Gem::load(y + f * ldy + lane);
                        zi = k <= half ? imaginary(f, lane) : -imaginary(f, lane);
                    } else {
                        const Vector a = Gem::load(y + k * ldy + lane), b = imaginary(k, lane);
                        const Vector c = Gem::load(y + (half - k) * ldy + lane), d = imaginary(half - k, lane);
                        const Vector er = a + c, ei = b - d, dr = a - c, di = b + d;
                        const Vector or_ = cos_[k] * dr + sin_[k] * di, oi = cos_[k] * di - sin_[k] * dr;
                        zr = er - oi;
                        zi = ei + or_;
                    }
                    Gem::store(t + k * kBlock + l, scale * zi);
                    Gem::store(t + k * kBlock + 2 * kLanes + l, scale * zr);
                }
            const T* z = fourier_.transform(t);
            for (int64_t k = 0; k < length; ++k)
                for (int64_t l = 0; l < 2 * kLanes; l += kLanes) {
                    T* to = x + (n_ % 2 ? k : 2 * k) * kBlock + first + l;
                    Gem::store(to, Gem::load(z + k * kBlock + 2 * kLanes + l));
                    if (n_ % 2 == 0) Gem::store(to + kBlock, Gem::load(z + k * kBlock + l));
                }
        }
    }

    int64_t n_;
    bool inverse_;
    const T* matrix_;
    T *cos_ = nullptr, *sin_ = nullptr;
    int64_t cos_rows_ = 0, cos_even_ = 0, cos_odd_ = 0, sin_rows_ = 0, sin_even_ = 0, sin_odd_ = 0;
    bool by_fourier_ = false;
    Fourier<T> fourier_;
};

}  // namespace pyops::PYOPS_ISA
