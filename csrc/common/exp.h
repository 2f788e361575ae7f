// exp on whole vectors: plain code without branches, which the compiler vectorises for every instruction set, if it is
// inlined into the loop.
#pragma once

#include <cstdint>

namespace pyops::PYOPS_ISA {

// e^x with an error below 1 ulp (float) and 2 ulp (double); 0 for -inf and below the normal range's end, inf above
// it, NaN for NaN. n = round(x / ln 2) comes from adding 1.5 * 2^mantissa; the rest lies within half of ln 2 and goes
// through its Taylor series (float: degree 7, remainder 5e-9; double: degree 13, 4e-18); 2^n is applied in two halves.
[[gnu::always_inline]] inline float exp_of(float x) {
    const float low = x < -104.0f ? -104.0f : x, at = low > 89.0f ? 89.0f : low;
    const float shifted = at * 1.44269504f + 12582912.0f, n = shifted - 12582912.0f;
    const float r = (at - n * 0.693145752f) - n * 1.42860677e-6f;
    float p = 1.98412698e-4f;
    p = p * r + 1.38888889e-3f;
    p = p * r + 8.33333333e-3f;
    p = p * r + 4.16666667e-2f;
    p = p * r + 1.66666667e-1f;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    const int32_t k = static_cast<int32_t>(n), half = k >> 1;
    const float a = __builtin_bit_cast(float, (half + 127) << 23),
                b = __builtin_bit_cast(float, (k - half + 127) << 23);
    return x != x ? x : p * a * b;
}

[[gnu::always_inline]] inline double exp_of(double x) {
    const double low = x < -746.0 ? -746.0 : x, at = low > 710.0 ? 710.0 : low;
    const double shifted = at * 1.4426950408889634 + 6755399441055744.0, n = shifted - 6755399441055744.0;
    const double r = (at - n * 0.693147180369123816490) - n * 1.90821492927058770002e-10;
    double p = 1.6059043836821613e-10;
    p = p * r + 2.08767569878681e-9;
    p = p * r + 2.505210838544172e-8;
    p = p * r + 2.755731922398589e-7;
    p = p * r + 2.755731922398589e-6;
    p = p * r + 2.48015873015873e-5;
    p = p * r + 1.984126984126984e-4;
    p = p * r + 1.388888888888889e-3;
    p = p * r + 8.333333333333333e-3;
    p = p * r + 4.1666666666666664e-2;
    p = p * r + 1.6666666666666666e-1;
    p = p * r + 0.5;
    p = p * r + 1.0;
    p = p * r + 1.0;
    const int64_t k =
        static_cast<int64_t>(__builtin_bit_cast(uint64_t, shifted) & 0xfffffffffffffULL) - 0x8000000000000LL;
    const int64_t half = k >> 1;
    const double a = __builtin_bit_cast(double, static_cast<uint64_t>(half + 1023) << 52);
    const double b = __builtin_bit_cast(double, static_cast<uint64_t>(k - half + 1023) << 52);
    return x != x ? x : p * a * b;
}

}  // namespace pyops::PYOPS_ISA
