// What every CUDA kernel of the project shares. Device code includes nothing else, so that nvcc, NVRTC (CuPy) and the
// CPU emulator of tests/cuda compile the same source.
#pragma once

#if defined(PYOPS_EMULATOR)
#include "emulator.h"
#elif !defined(__CUDACC_RTC__)
#include <cuda_runtime_api.h>
#endif

#include "common/dtype.h"
#include "common/half.h"
#include "common/view.h"

#if !defined(PYOPS_EMULATOR)
#define PYOPS_SHARED(type, name, count) __shared__ type name[count]
#define PYOPS_DYNAMIC_SHARED(type, name)                                        \
    extern __shared__ __align__(16) unsigned char pyops_dynamic_shared_bytes[]; \
    type* const name = reinterpret_cast<type*>(pyops_dynamic_shared_bytes)
#define PYOPS_LAUNCH(kernel, grid, block, shared, stream, ...) kernel<<<grid, block, shared, stream>>>(__VA_ARGS__)
#endif

namespace pyops::cuda {

constexpr unsigned kAllLanes = 0xffffffffu;

// --- Packs: kPack consecutive columns of a row, the unit of work of a thread ----------------------------------------

constexpr int kPack = 8;  // 16 bytes of a 16-bit type, 32 of float, 64 of double

struct alignas(16) Chunk {  // one 128-bit memory transaction
    u32 word[4];
};

// A View and whether whole packs of it may be moved as chunks: unit column stride, every pack 16-byte aligned.
struct Operand {
    View view;
    bool packed;
};

__device__ __forceinline__ i64 offset_of(const View& v, i64 b, i64 r, i64 c) {
    return b * v.batch + r * v.row + c * v.col;
}

template <class Acc>
__device__ __forceinline__ Acc load_scalar(const View& v, i64 at) {
    switch (v.dtype) {
        case DType::F64: return static_cast<Acc>(static_cast<const double*>(v.data)[at]);
        case DType::F32: return static_cast<Acc>(static_cast<const float*>(v.data)[at]);
        case DType::BF16: return static_cast<Acc>(bf16_to_float(static_cast<const u16*>(v.data)[at]));
        default: return static_cast<Acc>(half_to_float(static_cast<const u16*>(v.data)[at]));
    }
}

template <class Acc>
__device__ __forceinline__ void store_scalar(const View& v, i64 at, Acc x) {
    switch (v.dtype) {
        case DType::F64: static_cast<double*>(v.data)[at] = static_cast<double>(x); break;
        case DType::F32: static_cast<float*>(v.data)[at] = static_cast<float>(x); break;
        case DType::BF16: static_cast<u16*>(v.data)[at] = float_to_bf16(static_cast<float>(x)); break;
        default: static_cast<u16*>(v.data)[at] = float_to_half(static_cast<float>(x));
    }
}

// x as a tensor of this type would hold it.
template <class Acc>
__device__ __forceinline__ Acc round_to(DType t, Acc x) {
    switch (t) {
        case DType::F64: return x;
        case DType::F32: return static_cast<Acc>(static_cast<float>(x));
        case DType::BF16: return static_cast<Acc>(bf16_to_float(float_to_bf16(static_cast<float>(x))));
        default: return static_cast<Acc>(half_to_float(float_to_half(static_cast<float>(x))));
    }
}

// Loads columns [c, c + n) of row (b, r), n <= kPack; what is beyond n reads as zero.
template <class Acc>
__device__ __forceinline__ void load_pack(const Operand& o, i64 b, i64 r, i64 c, int n, Acc (&x)[kPack]) {
    const i64 at = offset_of(o.view, b, r, c);
    if (!o.packed || n < kPack) {
#pragma unroll
        for (int v = 0; v < kPack; ++v) x[v] = v < n ? load_scalar<Acc>(o.view, at + v * o.view.col) : Acc(0);
        return;
    }
    if (o.view.dtype == DType::F64) {
        const Chunk* p = reinterpret_cast<const Chunk*>(static_cast<const double*>(o.view.data) + at);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const Chunk k = p[i];
#pragma unroll
            for (int j = 0; j < 2; ++j)
                x[2 * i + j] = static_cast<Acc>(__builtin_bit_cast(
                    double, static_cast<u64>(k.word[2 * j]) | static_cast<u64>(k.word[2 * j + 1]) << 32));
        }
    } else if (o.view.dtype == DType::F32) {
        const Chunk* p = reinterpret_cast<const Chunk*>(static_cast<const float*>(o.view.data) + at);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const Chunk k = p[i];
#pragma unroll
            for (int j = 0; j < 4; ++j) x[4 * i + j] = static_cast<Acc>(bits_float(k.word[j]));
        }
    } else {
        const Chunk k = *reinterpret_cast<const Chunk*>(static_cast<const u16*>(o.view.data) + at);
        const bool bf16 = o.view.dtype == DType::BF16;
#pragma unroll
        for (int v = 0; v < kPack; ++v) {
            const u16 h = static_cast<u16>(k.word[v / 2] >> (16 * (v % 2)));
            x[v] = static_cast<Acc>(bf16 ? bf16_to_float(h) : half_to_float(h));
        }
    }
}

// Stores columns [c, c + n) of row (b, r), rounding to nearest.
template <class Acc>
__device__ __forceinline__ void store_pack(const Operand& o, i64 b, i64 r, i64 c, int n, const Acc (&x)[kPack]) {
    const i64 at = offset_of(o.view, b, r, c);
    if (!o.packed || n < kPack) {
#pragma unroll
        for (int v = 0; v < kPack; ++v)
            if (v < n) store_scalar(o.view, at + v * o.view.col, x[v]);
        return;
    }
    if (o.view.dtype == DType::F64) {
        Chunk* p = reinterpret_cast<Chunk*>(static_cast<double*>(o.view.data) + at);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            Chunk k;
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const u64 bits = __builtin_bit_cast(u64, static_cast<double>(x[2 * i + j]));
                k.word[2 * j] = static_cast<u32>(bits);
                k.word[2 * j + 1] = static_cast<u32>(bits >> 32);
            }
            p[i] = k;
        }
    } else if (o.view.dtype == DType::F32) {
        Chunk* p = reinterpret_cast<Chunk*>(static_cast<float*>(o.view.data) + at);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            Chunk k;
#pragma unroll
            for (int j = 0; j < 4; ++j) k.word[j] = float_bits(static_cast<float>(x[4 * i + j]));
            p[i] = k;
        }
    } else {
        const bool bf16 = o.view.dtype == DType::BF16;
        Chunk k = {{0, 0, 0, 0}};
#pragma unroll
        for (int v = 0; v < kPack; ++v) {
            const float f = static_cast<float>(x[v]);
            k.word[v / 2] |= static_cast<u32>(bf16 ? float_to_bf16(f) : float_to_half(f)) << (16 * (v % 2));
        }
        *reinterpret_cast<Chunk*>(static_cast<u16*>(o.view.data) + at) = k;
    }
}

// Row and rest of a flat index. 64-bit division is some twenty times slower than 32-bit: used only when it must be.
__device__ __forceinline__ void divide(i64 n, i64 by, i64& quotient, i64& rest) {
    if ((static_cast<u64>(n) | static_cast<u64>(by)) >> 32 == 0) {
        quotient = static_cast<u32>(n) / static_cast<u32>(by);
    } else {
        quotient = n / by;
    }
    rest = n - quotient * by;
}

// --- Reductions over 2^k neighbouring lanes; every lane of the warp takes part --------------------------------------

template <class T>
__device__ __forceinline__ T lanes_sum(T x, int lanes) {
    for (int step = lanes / 2; step > 0; step /= 2) x += __shfl_xor_sync(kAllLanes, x, step);
    return x;
}

}  // namespace pyops::cuda
