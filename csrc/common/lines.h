// Reading and writing strided lines of any dtype through float or double buffers.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/dtype.h"
#include "common/half.h"

namespace pyops::PYOPS_ISA {

// 16-bit elements; the conversions are those of the GPU kernels, bit for bit.
struct Bf16Bits {
    uint16_t bits;
};
struct HalfBits {
    uint16_t bits;
};

inline float widen(Bf16Bits x) { return bf16_to_float(x.bits); }
inline float widen(HalfBits x) { return half_to_float(x.bits); }
inline float widen(float x) { return x; }
inline double widen(double x) { return x; }

// Rounds to nearest even; NaN stays NaN.
template <class T>
inline void narrow(T x, Bf16Bits& out) {
    out.bits = float_to_bf16(static_cast<float>(x));
}
template <class T>
inline void narrow(T x, HalfBits& out) {
    out.bits = float_to_half(static_cast<float>(x));
}
template <class T>
inline void narrow(T x, float& out) {
    out = static_cast<float>(x);
}
template <class T>
inline void narrow(T x, double& out) {
    out = static_cast<double>(x);
}

inline void narrow_stochastic(float x, uint32_t random, Bf16Bits& out) {
    out.bits = float_to_bf16_stochastic(x, random);
}
inline void narrow_stochastic(float x, uint32_t random, HalfBits& out) {
    out.bits = float_to_half_stochastic(x, random);
}

// Calls f with a null pointer of the element type.
template <class F>
inline void with_type(DType t, F&& f) {
    switch (t) {
        case DType::F64: return f(static_cast<double*>(nullptr));
        case DType::F32: return f(static_cast<float*>(nullptr));
        case DType::BF16: return f(static_cast<Bf16Bits*>(nullptr));
        case DType::F16: return f(static_cast<HalfBits*>(nullptr));
    }
}

// A matrix seen as `lines` lines of `length` elements, `step` apart.
struct Lines {
    void* data = nullptr;
    DType dtype = DType::F32;
    int64_t lines = 0, length = 0, line_stride = 0, step = 1;

    // out[0 .. count) = line[start ..)
    template <class T>
    void read(int64_t line, int64_t start, int64_t count, T* __restrict out) const {
        with_type(dtype, [&](auto* tag) {
            using E = std::remove_pointer_t<decltype(tag)>;
            const E* __restrict p = static_cast<const E*>(data) + line * line_stride + start * step;
            if (step == 1)
                for (int64_t i = 0; i < count; ++i) out[i] = static_cast<T>(widen(p[i]));
            else
                for (int64_t i = 0; i < count; ++i) out[i] = static_cast<T>(widen(p[i * step]));
        });
    }

    template <class T>
    void write(int64_t line, int64_t start, int64_t count, const T* __restrict in) const {
        with_type(dtype, [&](auto* tag) {
            using E = std::remove_pointer_t<decltype(tag)>;
            E* __restrict p = static_cast<E*>(data) + line * line_stride + start * step;
            if (step == 1)
                for (int64_t i = 0; i < count; ++i) narrow(in[i], p[i]);
            else
                for (int64_t i = 0; i < count; ++i) narrow(in[i], p[i * step]);
        });
    }
};

}  // namespace pyops::PYOPS_ISA
