// log and exp on whole vectors, for every instruction set (common/exp.h has exp for scalars, in the same way).
//
// With AVX-512 and float, the leading bits of m in x = 2^e m, 1 <= m < 2, pick one of 32 pairs (c, -log c), c = 1 /
// (the lower end of an interval), and log x = e log 2 - log c + log(1 + r) with r = m c - 1 in [0, 1/32), by r (1 + a r
// + b r^2), a and b fitted to a relative error of 2.8e-7. Otherwise m is in [2/3, 4/3) and log m = 2 atanh(s), s = (m -
// 1) / (m + 1), by its series to s^13 (float) or s^25.
#pragma once

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

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

    // a | b | c
    [[gnu::always_inline]] static Ints any_of(Ints a, Ints b, Ints c) {
#if defined(__AVX512F__)
        return (Ints)_mm512_ternarylogic_epi32((__m512i)a, (__m512i)b, (__m512i)c, 0xfe);
#else
        return a | b | c;
#endif
    }

    // Whether the sign of every lane is set.
    [[gnu::always_inline]] static bool all_negative(Ints x) {
#if defined(__AVX512F__)
        if constexpr (sizeof(T) == 4) return _mm512_movepi32_mask((__m512i)x) == 0xffff;
#endif
        bool all = true;
        for (int l = 0; l < kLanes; ++l) all = all && x[l] < 0;
        return all;
    }

    // Sums of exponents: whole numbers.
#if defined(__AVX512F__)
    using Exponents = std::conditional_t<sizeof(T) == 4, Vector, Ints>;
#else
    using Exponents = Ints;
#endif

    // x, positive and normal, to a mantissa in [1, 2), with the exponent added to e.
    [[gnu::always_inline]] static Vector split(Vector x, Exponents& e) {
#if defined(__AVX512F__)
        if constexpr (sizeof(T) == 4) {
            e += static_cast<Vector>(_mm512_getexp_ps(x));
            return _mm512_getmant_ps(x, _MM_MANT_NORM_1_2, _MM_MANT_SIGN_zero);
        } else
#endif
        {
            const Ints b = bits(x);
            e += (b >> kMantissa) - (kOne >> kMantissa);
            return value((b & ((Int{1} << kMantissa) - 1)) | kOne);
        }
    }

    // log(x 2^e) of what split() left.
    [[gnu::always_inline]] static Vector log(Vector x, Exponents e) {
        return log(x) + __builtin_convertvector(e, Vector) * kLn2;
    }

    // 1 / x for normal x and 1 / x, within 2 ulp.
    [[gnu::always_inline]] static Vector reciprocal(Vector x) {
#if defined(__AVX512F__)
        if constexpr (sizeof(T) == 4) {
            const Vector y = _mm512_rcp14_ps(x);  // 2^-14, squared by a Newton step
            return y + y * (T(1) - x * y);
        }
#endif
        return T(1) / x;
    }

    // log x for positive, normal, finite x.
    [[gnu::always_inline]] static Vector log(Vector x) {
#if defined(__AVX512F__)
        if constexpr (sizeof(T) == 4) {
            const Pair of = pair_of(x);
            const Vector m = _mm512_getmant_ps(x, _MM_MANT_NORM_1_2, _MM_MANT_SIGN_zero);
            return from_pair(_mm512_getexp_ps(x), of, m * value(bits(of.inverse) - kOne) - T(1));
        }
#endif
        return by_series(x, nullptr);
    }

    // log(1 + x) for 0 <= x < 2^125, with a small relative error (4e-7 for float) also where x is small.
    [[gnu::always_inline]] static Vector log1p(Vector x) {
        const Vector u = T(1) + x;
#if defined(__AVX512F__)
        if constexpr (sizeof(T) == 4) {
            // r = x 2^-e c + (2^-e c - 1), so that the rounding error of 1 + x is never seen.
            const Pair of = pair_of(u);
            const Vector scaled = value(bits(of.inverse) - (bits(u) & 0x7f800000));
            return from_pair(_mm512_getexp_ps(u), of, x * scaled + (scaled - T(1)));
        }
#endif
        const Vector lost = x - (u - T(1));  // the rounding error, added where it matters
        return by_series(u, &lost);
    }

    // e^x as exp_of() computes it.
    [[gnu::always_inline]] static Vector exp(Vector x) {
#if defined(__AVX512F__)
        if constexpr (sizeof(T) == 4) {
            // As below, with the scaling by 2^n in one step; NaN passes max and min as their second operand.
            const Vector at = _mm512_min_ps(all(89.0f), _mm512_max_ps(all(-104.0f), x));
            const Vector n = _mm512_roundscale_ps(at * 1.44269504f, 0);
            const Vector r = (at - n * 0.693145752f) - n * 1.42860677e-6f;
            Vector p = all(1.0f / 5040);
            for (const float c : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) p = p * r + c;
            return _mm512_scalef_ps(p, n);
        }
#endif
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
#if defined(__AVX512F__)
    // 2^127 c and -log c of the interval of x's mantissa: from 2^127 c the exponent of x can be taken away by bits.
    struct Pair {
        Vector inverse, log;
    };
    [[gnu::always_inline]] static Pair pair_of(Vector x) {
        alignas(64) static constexpr float inverse[32] = {
            1.701411835e+38f, 1.649853949e+38f, 1.601328791e+38f, 1.555576543e+38f, 1.512366086e+38f, 1.471491352e+38f,
            1.432767871e+38f, 1.396030241e+38f, 1.361129488e+38f, 1.327931139e+38f, 1.296313803e+38f, 1.266166942e+38f,
            1.237390462e+38f, 1.209892889e+38f, 1.183590864e+38f, 1.158408021e+38f, 1.134274590e+38f, 1.111126073e+38f,
            1.088903550e+38f, 1.067552561e+38f, 1.047022706e+38f, 1.027267538e+38f, 1.008244058e+38f, 9.899123088e+37f,
            9.722353775e+37f, 9.551785809e+37f, 9.387099742e+37f, 9.227996408e+37f, 9.074196924e+37f, 8.925438634e+37f,
            8.781480175e+37f, 8.642092357e+37f};
        alignas(64) static constexpr float logs[32] = {
            0.000000000e+00f, 3.077162802e-02f, 6.062461808e-02f, 8.961215615e-02f, 1.177830249e-01f, 1.451819837e-01f,
            1.718502492e-01f, 1.978257298e-01f, 2.231435329e-01f, 2.478362024e-01f, 2.719337046e-01f, 2.954642177e-01f,
            3.184536994e-01f, 3.409265578e-01f, 3.629054725e-01f, 3.844117224e-01f, 4.054650664e-01f, 4.260844290e-01f,
            4.462871253e-01f, 4.660896957e-01f, 4.855077863e-01f, 5.045560002e-01f, 5.232481360e-01f, 5.415973067e-01f,
            5.596157312e-01f, 5.773153305e-01f, 5.947071314e-01f, 6.118015647e-01f, 6.286085844e-01f, 6.451380253e-01f,
            6.613985300e-01f, 6.773987412e-01f};
        const auto index = reinterpret_cast<__m512i>(bits(x) >> 18);
        return {_mm512_permutex2var_ps(_mm512_load_ps(inverse), index, _mm512_load_ps(inverse + 16)),
                _mm512_permutex2var_ps(_mm512_load_ps(logs), index, _mm512_load_ps(logs + 16))};
    }
    [[gnu::always_inline]] static Vector from_pair(Vector exponent, const Pair& of, Vector r) {
        const Vector h = (r * T(0.32276221) - T(0.49989888)) * r + T(1);
        return h * r + (exponent * kLn2 + of.log);
    }
#endif

    // log u + lost / u (u >= 1 then, and lost is dropped from 2 on, where it is below the last place).
    [[gnu::always_inline]] static Vector by_series(Vector u, const Vector* lost) {
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
