// log and exp on whole vectors, for every instruction set (common/exp.h has exp for scalars, in the same way).
//
// x = 2^e m. With AVX-512 and float, m in [1, 2) picks one of 32 pairs (c, -log c) by its leading bits, and log m =
// log(1 + r) - log c with r = m c - 1, |r| <= 1/64 (1/32 next to m = 1, where c = 1), by four terms of the series
// (r^5 / 5: 2e-7 of the result at worst). Otherwise m is in [2/3, 4/3) and log m = 2 atanh(s), s = (m - 1) / (m + 1),
// by its series to s^13 (float) or s^25.
#pragma once

#include "common/small_gemm.h"

namespace pyops::PYOPS_ISA {

template <class T>
struct VectorMath {
    using Vector = typename SmallGemm<T>::Vector;
    using Int = typename Transpose<T>::Index;
    using Ints = typename Transpose<T>::Mask;
    static constexpr int kLanes = SmallGemm<T>::kLanes;
    static constexpr int kMantissa = sizeof(T) == 4 ? 23 : 52;
    static constexpr Int kOne = sizeof(T) == 4 ? Int{0x3f800000} : static_cast<Int>(0x3ff0000000000000);
    static constexpr T kLn2 = T(0.69314718055994530942);
    static constexpr T kInfinity = static_cast<T>(__builtin_inf());

    [[gnu::always_inline]] static Ints bits(Vector x) { return __builtin_bit_cast(Ints, x); }
    [[gnu::always_inline]] static Vector value(Ints x) { return __builtin_bit_cast(Vector, x); }
    [[gnu::always_inline]] static Vector all(T x) { return x - Vector{}; }

    // x, positive and normal, to a mantissa in [1, 2), with the exponent added to e.
    [[gnu::always_inline]] static Vector split(Vector x, Ints& e) {
        const Ints b = bits(x);
        e += (b >> kMantissa) - (kOne >> kMantissa);
        return value((b & ((Int{1} << kMantissa) - 1)) | kOne);
    }

    // log x for positive, normal, finite x.
    [[gnu::always_inline]] static Vector log(Vector x) { return log_and_inverse(x, nullptr); }

    // log(1 + x) for finite x >= 0, to the last place also where x is small: the rounding error of 1 + x is added
    // where it matters.
    [[gnu::always_inline]] static Vector log1p(Vector x) {
        const Vector u = T(1) + x, lost = x - (u - T(1));
        return log_and_inverse(u, &lost);
    }

    // e^x as exp_of() computes it.
    [[gnu::always_inline]] static Vector exp(Vector x) {
        constexpr bool single = sizeof(T) == 4;
        constexpr T kLow = single ? T(-104) : T(-746), kHigh = single ? T(89) : T(710);
        constexpr T kRound = single ? T(12582912) : T(6755399441055744.0);
        constexpr T kHead = single ? T(0.693145752f) : T(0.693147180369123816490);
        constexpr T kTail = single ? T(1.42860677e-6f) : T(1.90821492927058770002e-10);
        const Vector low = x < kLow ? all(kLow) : x, at = low > kHigh ? all(kHigh) : low;
        const Vector n = (at * T(1.4426950408889634) + kRound) - kRound;
        const Vector r = (at - n * kHead) - n * kTail;
        constexpr double factorials[14] = {1,    1,     2,      6,       24,       120,       720,
                                           5040, 40320, 362880, 3628800, 39916800, 479001600, 6227020800};
        Vector p = all(static_cast<T>(1 / factorials[single ? 7 : 13]));
#pragma GCC unroll 13
        for (int i = single ? 6 : 12; i >= 0; --i) p = p * r + static_cast<T>(1 / factorials[i]);
        const Ints k = __builtin_convertvector(n, Ints), half = k >> 1;
        const Ints bias = (kOne >> kMantissa) - Ints{};
        return x == x ? p * value((half + bias) << kMantissa) * value((k - half + bias) << kMantissa) : x;
    }

    // log(1 + x), x >= 0, infinite and NaN too.
    [[gnu::always_inline]] static Vector log1p_of_any(Vector x) {
        const auto finite = x < kInfinity;
        const Vector y = log1p(finite ? x : Vector{});
        return finite ? y : x;
    }

    // log x: -inf for zero, NaN for negative x and NaN, right for subnormal x.
    [[gnu::always_inline]] static Vector log_of_any(Vector x) {
        constexpr T kNormal = sizeof(T) == 4 ? T(1.17549435e-38) : T(2.2250738585072014e-308);
        constexpr T kScale = sizeof(T) == 4 ? T(16777216) : T(9007199254740992);
        const auto small = x < kNormal;
        const auto usual = (x > T(0)) & (x < kInfinity);
        const Vector scaled = small ? x * kScale : x;
        const Vector y = log(usual ? scaled : all(1)) - (small ? all(kLn2 * T(sizeof(T) == 4 ? 24 : 53)) : Vector{});
        const Vector special = x == T(0) ? all(-kInfinity) : x < T(0) ? all(static_cast<T>(__builtin_nan(""))) : x;
        return usual ? y : special;
    }

  private:
    // log u + lost / u (u >= 1 then, and lost is dropped from 2 on, where it is below the last place).
    [[gnu::always_inline]] static Vector log_and_inverse(Vector u, const Vector* lost) {
#if defined(__AVX512F__)
        if constexpr (sizeof(T) == 4) {
            alignas(64) static constexpr float inverse[32] = {
                1.000000000e+00f, 9.552238584e-01f, 9.275362492e-01f, 9.014084339e-01f, 8.767123222e-01f,
                8.533333540e-01f, 8.311688304e-01f, 8.101266026e-01f, 7.901234627e-01f, 7.710843086e-01f,
                7.529411912e-01f, 7.356321812e-01f, 7.191011310e-01f, 7.032967210e-01f, 6.881720424e-01f,
                6.736842394e-01f, 6.597937942e-01f, 6.464646459e-01f, 6.336633563e-01f, 6.213592291e-01f,
                6.095238328e-01f, 5.981308222e-01f, 5.871559381e-01f, 5.765765905e-01f, 5.663716793e-01f,
                5.565217137e-01f, 5.470085740e-01f, 5.378151536e-01f, 5.289255977e-01f, 5.203251839e-01f,
                5.120000243e-01f, 5.039370060e-01f};
            alignas(64) static constexpr float logs[32] = {0.0f,
                                                           4.580955952e-02f,
                                                           7.522340119e-02f,
                                                           1.037968099e-01f,
                                                           1.315763593e-01f,
                                                           1.586050093e-01f,
                                                           1.849223375e-01f,
                                                           2.105647475e-01f,
                                                           2.355660647e-01f,
                                                           2.599575520e-01f,
                                                           2.837681472e-01f,
                                                           3.070250452e-01f,
                                                           3.297532797e-01f,
                                                           3.519763947e-01f,
                                                           3.737164140e-01f,
                                                           3.949937522e-01f,
                                                           4.158279300e-01f,
                                                           4.362367690e-01f,
                                                           4.562374353e-01f,
                                                           4.758459032e-01f,
                                                           4.950772226e-01f,
                                                           5.139457583e-01f,
                                                           5.324648619e-01f,
                                                           5.506470799e-01f,
                                                           5.685047507e-01f,
                                                           5.860490799e-01f,
                                                           6.032907963e-01f,
                                                           6.202403307e-01f,
                                                           6.369075179e-01f,
                                                           6.533012986e-01f,
                                                           6.694306135e-01f,
                                                           6.853039861e-01f};
            const Ints b = bits(u);
            const Ints index = b >> 18;
            const Vector m = value((b & 0x007fffff) | kOne);
            const auto* c = reinterpret_cast<const Vector*>(inverse);
            const auto* l = reinterpret_cast<const Vector*>(logs);
            const Vector inverse_of_m = __builtin_shuffle(c[0], c[1], index), r = m * inverse_of_m - T(1);
            const Vector e = __builtin_convertvector((b >> 23) - 127, Vector);
            Vector p = T(1.0 / 3) - T(0.25) * r;
            p = p * r - T(0.5);
            Vector y = e * kLn2 + __builtin_shuffle(l[0], l[1], index);
            if (lost) y += u < T(2) ? *lost * inverse_of_m : Vector{};
            return y + (r + r * r * p);
        }
#endif
        constexpr Int kTwoThirds = sizeof(T) == 4 ? Int{0x3f2aaaab} : static_cast<Int>(0x3fe5555555555555);
        const Ints b = bits(u);
        const Ints exponent = (b - kTwoThirds) >> kMantissa;
        const Vector f = value(b - (exponent << kMantissa)) - T(1), s = f / (T(2) + f), q = s * s;
        Vector p = Vector{};
        for (int i = sizeof(T) == 4 ? 13 : 25; i >= 3; i -= 2) p = (p + T(2.0 / i)) * q;
        Vector y = __builtin_convertvector(exponent, Vector) * kLn2 + s * p;
        if (lost) y += u < T(2) ? *lost / u : Vector{};
        return y + T(2) * s;
    }
};

}  // namespace pyops::PYOPS_ISA
