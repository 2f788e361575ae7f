// bfloat16 and binary16 as uint16 bits, and counter-based stochastic rounding to them.
//
// The same code serves the host compiler, nvcc and NVRTC, so that the CPU and the GPU agree bit for bit and no vendor
// header for 16-bit floats is needed. binary16 subnormals go through float32 subnormals: compile without flush-to-zero.
#pragma once

#include "common/dtype.h"

namespace pyops {

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

PYOPS_HD u32 float_bits(float x) { return __builtin_bit_cast(u32, x); }
PYOPS_HD float bits_float(u32 x) { return __builtin_bit_cast(float, x); }

PYOPS_HD float bf16_to_float(u16 h) { return bits_float(static_cast<u32>(h) << 16); }

// Round to nearest, ties to even; NaN stays NaN.
PYOPS_HD u16 float_to_bf16(float x) {
    const u32 b = float_bits(x);
    const u32 rounded = (b + 0x7fffu + ((b >> 16) & 1u)) >> 16;
    return static_cast<u16>((b & 0x7fffffffu) > 0x7f800000u ? (b >> 16) | 0x40u : rounded);
}

// The exponent is moved by a multiplication, which is exact and normalises subnormals.
PYOPS_HD float half_to_float(u16 h) {
    const float magnitude = bits_float((h & 0x7fffu) << 13) * bits_float((254u - 15u) << 23);  // times 2^112
    u32 b = float_bits(magnitude);
    if ((h & 0x7c00u) == 0x7c00u) b |= 0x7f800000u;
    return bits_float(b | (h & 0x8000u) << 16);
}

// Round to nearest, ties to even. Adding 0.5 puts the last kept bit of a subnormal result at the end of the float.
PYOPS_HD u16 float_to_half(float x) {
    const u32 b = float_bits(x), sign = (b >> 16) & 0x8000u, a = b & 0x7fffffffu;
    if (a >= 0x47800000u)
        return static_cast<u16>(sign | (a > 0x7f800000u ? 0x7e00u : 0x7c00u));  // |x| >= 2^16, Inf, NaN
    if (a < 0x38800000u)
        return static_cast<u16>(sign | (float_bits(bits_float(a) + 0.5f) - 0x3f000000u));  // |x| < 2^-14
    return static_cast<u16>(sign | ((a - 0x38000000u + 0xfffu + ((a >> 13) & 1u)) >> 13));
}

// --- Stochastic rounding -------------------------------------------------------------------------------------------
// x is rounded up with probability (x - below) / (above - below), so its expectation is x. The 32 random bits of an
// element are a hash of (seed, tensor, element) alone: no state, and no dependence on layout, device or thread count.

struct RoundingKey {
    u32 low, high;
};

PYOPS_HD u32 mix32(u32 x) {
    x = (x ^ (x >> 16)) * 0x7feb352du;  // a full-avalanche integer permutation (multiply, xor-shift)
    x = (x ^ (x >> 15)) * 0x846ca68bu;
    return x ^ (x >> 16);
}

PYOPS_HD u64 mix64(u64 x) {  // the finaliser of SplitMix64
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

PYOPS_HD RoundingKey rounding_key(i64 seed, i64 tensor) {
    const u64 golden = 0x9e3779b97f4a7c15ull;
    const u64 key = mix64(mix64(static_cast<u64>(seed) + golden) + static_cast<u64>(tensor) * golden);
    return {static_cast<u32>(key), static_cast<u32>(key >> 32)};
}

PYOPS_HD u32 random_bits(RoundingKey key, u64 element) {
    return mix32(mix32(static_cast<u32>(element) ^ key.low) + key.high + static_cast<u32>(element >> 32) * 0x9e3779b9u);
}

// Values that are not below the largest finite number of the target, and NaN, round to nearest.
PYOPS_HD u16 float_to_bf16_stochastic(float x, u32 random) {
    const u32 b = float_bits(x);
    if ((b & 0x7fffffffu) >= 0x7f7f0000u) return float_to_bf16(x);
    return static_cast<u16>((b + (random >> 16)) >> 16);
}

PYOPS_HD u16 float_to_half_stochastic(float x, u32 random) {
    const u32 b = float_bits(x), sign = (b >> 16) & 0x8000u, a = b & 0x7fffffffu;
    if (a >= 0x477fe000u) return float_to_half(x);
    if (a >= 0x38800000u) return static_cast<u16>(sign | ((a - 0x38000000u + (random >> 19)) >> 13));
    const float steps = bits_float(a) * 16777216.0f;  // in units of 2^-24, the spacing of subnormals
    const u32 below = static_cast<u32>(steps);
    const float chance = static_cast<float>(random >> 8) * (1.0f / 16777216.0f);
    return static_cast<u16>(sign | (below + (steps - static_cast<float>(below) > chance ? 1u : 0u)));
}

}  // namespace pyops
