// The complex DFT of `length` points for 2 kLanes tubes at a time: a row holds two vectors of real parts, then two of
// imaginary parts, and nothing is shuffled or shared between tubes.
//
// Lengths whose prime factors are at most 13 take Stockham passes of radix 8 (where 16 complex vectors fit into
// registers), 4, 2, 3, 5, 7, 11 and 13, about 5 n log2 n flops per tube. Others are a convolution with a chirp
// (Bluestein), jk = (j^2 + k^2 - (k - j)^2) / 2,
//
//   X_k = c_k sum_j (x_j c_j) conj(c_{k-j}),   c_j = exp(-pi i j^2 / n),
//
// by two transforms of a size M >= 2 n - 1 of small factors. Angles are reduced in integers.
#pragma once

#include <algorithm>
#include <cmath>
#include <utility>

#include "common/pieces.h"
#include "common/small_gemm.h"

namespace pyops::PYOPS_ISA {

struct Angle {
    double cos, sin;
};
// Of 2 pi j / n for 0 <= j < n, from an angle of at most pi / 4.
inline Angle angle(int64_t j, int64_t n) {
    constexpr double kPi = 3.14159265358979323846;
    const bool below = 2 * j > n;
    if (below) j = n - j;
    const bool left = 4 * j > n;
    int64_t numerator = left ? n - 2 * j : 2 * j, denominator = 2 * n;  // of 2 pi: at most 1 / 4
    const bool steep = 8 * numerator > denominator;
    if (steep) {
        numerator = denominator - 4 * numerator;
        denominator *= 4;
    }
    const double a = 2 * kPi * static_cast<double>(numerator) / static_cast<double>(denominator);
    const double c = steep ? std::sin(a) : std::cos(a), s = steep ? std::cos(a) : std::sin(a);
    return {left ? -c : c, below ? -s : s};
}

template <class T>
class Fourier {
  public:
    using Gem = SmallGemm<T>;
    using Vector = typename Gem::Vector;
    static constexpr int64_t kLanes = Gem::kLanes, kBlock = 4 * kLanes;

    // Whether a length needs no chirp.
    static bool smooth(int64_t length) {
        for (const int64_t r : {2, 3, 5, 7, 11, 13})
            while (length % r == 0) length /= r;
        return length == 1;
    }

    // Of no length: to be assigned to.
    Fourier() = default;

    Fourier(int64_t length, Pieces& pieces) : length_(length), size_(length), chirp_(!smooth(length)) {
        if (chirp_) {
            const int64_t least = 2 * length - 1;
            size_ = 0;
            for (const int64_t odd : {1, 3, 5, 9, 15}) {
                int64_t size = odd;
                while (size < least) size *= 2;
                if (size_ == 0 || size < size_) size_ = size;
            }
            for (T** table : {&chirp_cos_, &chirp_sin_}) *table = pieces.take<T>(length);
            for (T** table : {&filter_cos_, &filter_sin_}) *table = pieces.take<T>(size_);
        }
        cos_ = pieces.take<T>(size_);
        sin_ = pieces.take<T>(size_);
        int64_t rest = size_;
        if (kVectorBytes == 64) {
            // As many of radix 8 as leave a power of 4.
            int twos = 0, eights = 0;
            while (rest >> twos & 1 ? false : twos < 62) ++twos;
            for (int k = twos / 3; k > 0 && eights == 0; --k)
                if ((twos - 3 * k) % 2 == 0) eights = k;
            for (; eights > 0; --eights, rest /= 8) radix_[factors_++] = 8;
        }
        for (const int64_t r : {4, 2, 3, 5, 7, 11, 13})
            for (; rest % r == 0; rest /= r) radix_[factors_++] = static_cast<int>(r);
    }

    // Rows of kBlock that transform() works in.
    int64_t scratch_rows() const { return 2 * size_; }

    // Fills the tables, working in scratch rows.
    void prepare(T* scratch) {
        for (int64_t j = 0; j < size_; ++j) {
            const Angle a = angle(j, size_);
            cos_[j] = static_cast<T>(a.cos);
            sin_[j] = static_cast<T>(-a.sin);
        }
        if (!chirp_) return;
        std::fill(scratch, scratch + size_ * kBlock, T(0));
        const double scale = 1.0 / static_cast<double>(size_);
        int64_t square = 0;  // j^2 modulo 2 length
        for (int64_t j = 0; j < length_; ++j) {
            const Angle a = angle(square, 2 * length_);
            chirp_cos_[j] = static_cast<T>(a.cos);
            chirp_sin_[j] = static_cast<T>(-a.sin);
            for (const int64_t at : {j, (size_ - j) % size_}) {
                scratch[at * kBlock] = static_cast<T>(scale * a.cos);
                scratch[at * kBlock + 2 * kLanes] = static_cast<T>(scale * a.sin);
            }
            square = (square + 2 * j + 1) % (2 * length_);
        }
        const T* filter = passes(scratch, scratch + size_ * kBlock);
        for (int64_t j = 0; j < size_; ++j) {
            filter_cos_[j] = filter[j * kBlock];
            filter_sin_[j] = filter[j * kBlock + 2 * kLanes];
        }
    }

    // Of the first `length` rows at t; returns where the result is, in scratch rows at t.
    T* transform(T* t) const {
        if (!chirp_) return passes(t, t + size_ * kBlock);
        times(t, length_, chirp_cos_, chirp_sin_, false);
        std::fill(t + length_ * kBlock, t + size_ * kBlock, T(0));
        T* z = passes(t, t + size_ * kBlock);
        times(z, size_, filter_cos_, filter_sin_, true);  // the inverse is the same between two exchanges
        z = passes(z, z == t ? t + size_ * kBlock : t);
        exchange(z, length_);
        times(z, length_, chirp_cos_, chirp_sin_, false);
        return z;
    }

  private:
    static constexpr int kMostFactors = 64;

    // Rows times (c + i s), with real and imaginary part exchanged if wanted.
    static void times(T* x, int64_t rows, const T* c, const T* s, bool exchanged) {
        for (int64_t j = 0; j < rows; ++j, x += kBlock)
            for (int64_t l = 0; l < 2 * kLanes; l += kLanes) {
                const Vector a = Gem::load(x + l), b = Gem::load(x + 2 * kLanes + l);
                const Vector re = c[j] * a - s[j] * b, im = c[j] * b + s[j] * a;
                Gem::store(x + l, exchanged ? im : re);
                Gem::store(x + 2 * kLanes + l, exchanged ? re : im);
            }
    }

    static void exchange(T* x, int64_t rows) {
        for (int64_t j = 0; j < rows; ++j, x += kBlock)
            for (int64_t l = 0; l < 2 * kLanes; l += kLanes) {
                const Vector a = Gem::load(x + l), b = Gem::load(x + 2 * kLanes + l);
                Gem::store(x + l, b);
                Gem::store(x + 2 * kLanes + l, a);
            }
    }

    // The DFT of size_ rows, from a to b and back as often as there are factors; returns where the result is.
    T* passes(T* a, T* b) const {
        int64_t n = size_, s = 1;
        for (int i = 0; i < factors_; ++i) {
            switch (radix_[i]) {
                case 2: pass<2>(n, s, a, b); break;
                case 3: pass<3>(n, s, a, b); break;
                case 4: pass<4>(n, s, a, b); break;
                case 5: pass<5>(n, s, a, b); break;
                case 7: pass<7>(n, s, a, b); break;
                case 8: pass<8>(n, s, a, b); break;
                case 11: pass<11>(n, s, a, b); break;
                default: pass<13>(n, s, a, b); break;
            }
            n /= radix_[i];
            s *= radix_[i];
            std::swap(a, b);
        }
        return a;
    }

    // n is the length that is left; w of the whole length is tabulated.
    // Stockham: out[q + s (r p + u)] = w_n^(p u) sum_t in[q + s (p + m t)] w_r^(t u), m = n / r.
    template <int r>
    void pass(int64_t n, int64_t s, const T* in, T* out) const {
        const int64_t m = n / r, unit = size_ / n;
        butterflies<r, false>(0, m, s, unit, in, out);
        for (int64_t p = 1; p < m; ++p) butterflies<r, true>(p, m, s, unit, in, out);
    }

    // The DFT of 4 points.
    [[gnu::always_inline]] static void four(const Vector* re, const Vector* im, int step, Vector* yr, Vector* yi) {
        const Vector ar = re[0] + re[2 * step], ai = im[0] + im[2 * step];
        const Vector br = re[0] - re[2 * step], bi = im[0] - im[2 * step];
        const Vector cr = re[step] + re[3 * step], ci = im[step] + im[3 * step];
        const Vector dr = re[step] - re[3 * step], di = im[step] - im[3 * step];
        yr[0] = ar + cr, yi[0] = ai + ci;
        yr[1] = br + di, yi[1] = bi - dr;
        yr[2] = ar - cr, yi[2] = ai - ci;
        yr[3] = br - di, yi[3] = bi + dr;
    }

    // One p of a pass; those of p = 0 have no twiddle factors.
    template <int r, bool twiddled>
    void butterflies(int64_t p, int64_t m, int64_t s, int64_t unit, const T* in, T* out) const {
        const int64_t root = size_ / r;
        T wr[r], wi[r];
        for (int u = 1; u < r; ++u) {
            wr[u] = cos_[p * u * unit];
            wi[u] = sin_[p * u * unit];
        }
        for (int64_t q = 0; q < s; ++q)
            for (int64_t l = 0; l < 2 * kLanes; l += kLanes) {
                const T* x = in + (q + s * p) * kBlock + l;
                T* y = out + (q + s * r * p) * kBlock + l;
                Vector re[r], im[r];
#pragma GCC unroll 16
                for (int t = 0; t < r; ++t) {
                    re[t] = Gem::load(x + t * s * m * kBlock);
                    im[t] = Gem::load(x + t * s * m * kBlock + 2 * kLanes);
                }
                const auto put = [&](int u, Vector a, Vector b) __attribute__((always_inline)) {
                    if (twiddled && u > 0) {
                        const Vector c = wr[u] * a - wi[u] * b;
                        b = wr[u] * b + wi[u] * a;
                        a = c;
                    }
                    Gem::store(y + u * s * kBlock, a);
                    Gem::store(y + u * s * kBlock + 2 * kLanes, b);
                };
                if constexpr (r == 2) {
                    put(0, re[0] + re[1], im[0] + im[1]);
                    put(1, re[0] - re[1], im[0] - im[1]);
                } else if constexpr (r == 4) {
                    Vector yr[4], yi[4];
                    four(re, im, 1, yr, yi);
#pragma GCC unroll 4
                    for (int u = 0; u < 4; ++u) put(u, yr[u], yi[u]);
                } else if constexpr (r == 8) {
                    // X_u, X_{u+4} = E_u +- w^u O_u of the even and the odd points, w = (1 - i) / sqrt 2.
                    constexpr T kHalfRoot = static_cast<T>(0.70710678118654752440);
                    Vector er[4], ei[4], or_[4], oi[4];
                    four(re, im, 2, er, ei);
                    four(re + 1, im + 1, 2, or_, oi);
                    const auto both = [&](int u, Vector a, Vector b) __attribute__((always_inline)) {
                        put(u, er[u] + a, ei[u] + b);
                        put(u + 4, er[u] - a, ei[u] - b);
                    };
                    both(0, or_[0], oi[0]);
                    both(1, kHalfRoot * (or_[1] + oi[1]), kHalfRoot * (oi[1] - or_[1]));
                    both(2, oi[2], -or_[2]);
                    both(3, kHalfRoot * (oi[3] - or_[3]), -kHalfRoot * (or_[3] + oi[3]));
                } else {
                    // Terms t and r - t together: cosines of their sum, sines of their difference.
                    constexpr int h = (r - 1) / 2;
                    Vector sr[h], si[h], dr[h], di[h];
                    Vector zr = re[0], zi = im[0];
#pragma GCC unroll 8
                    for (int t = 0; t < h; ++t) {
                        sr[t] = re[t + 1] + re[r - 1 - t];
                        si[t] = im[t + 1] + im[r - 1 - t];
                        dr[t] = re[t + 1] - re[r - 1 - t];
                        di[t] = im[t + 1] - im[r - 1 - t];
                        zr += sr[t];
                        zi += si[t];
                    }
                    put(0, zr, zi);
                    for (int u = 1; u <= h; ++u) {
                        Vector cr = re[0], ci = im[0], tr{}, ti{};
                        for (int t = 0; t < h; ++t) {
                            const int64_t e = (t + 1) * u % r * root;
                            const T c = cos_[e], d = sin_[e];
                            cr += c * sr[t];
                            ci += c * si[t];
                            tr += d * di[t];  // i d times the difference
                            ti += d * dr[t];
                        }
                        put(u, cr - tr, ci + ti);
                        put(r - u, cr + tr, ci - ti);
                    }
                }
            }
    }

    int64_t length_ = 0, size_ = 0;
    bool chirp_ = false;
    T *cos_ = nullptr, *sin_ = nullptr;  // sin_ is negative: of exp(-2 pi i j / size)
    T *chirp_cos_ = nullptr, *chirp_sin_ = nullptr, *filter_cos_ = nullptr, *filter_sin_ = nullptr;
    int factors_ = 0, radix_[kMostFactors] = {};
};

}  // namespace pyops::PYOPS_ISA
