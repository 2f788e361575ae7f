// The inner product of float32 and float64 matrix kernels, on the widest vectors the instruction set has.
//
// acc[kMr][kNr] += sum_k a[k][.] b[k][.]^T over packed panels: a holds kMr values per k, b holds kNr = 2 vectors per k.
// kMr * 2 accumulators, two right-hand vectors and a broadcast fill the register file (12 x 2 of 32 registers with
// AVX-512, 6 x 2 of 16 otherwise); per k it costs kMr * 2 FMAs against kMr + 2 loads, so two FMA ports stay busy.
#pragma once

#include <cstdint>
#include <cstring>

namespace pyops::PYOPS_ISA {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif

template <class T>
struct Gemm {
    typedef T Vector __attribute__((vector_size(kVectorBytes)));
    typedef T Unaligned __attribute__((vector_size(kVectorBytes), aligned(sizeof(T)), may_alias));
    static constexpr int kLanes = kVectorBytes / sizeof(T);
    static constexpr int kMr = kVectorBytes == 64 ? 12 : 6;
    static constexpr int kNr = 2 * kLanes;

    // c (row-major, kNr wide) = [c +] a^T b over k steps.
    static void multiply(int64_t k, const T* a, const T* b, T* c, bool accumulate) {
        Vector acc[kMr][2];
#pragma GCC unroll 16
        for (int i = 0; i < kMr; ++i)
            for (int j = 0; j < 2; ++j)
                acc[i][j] = accumulate ? *reinterpret_cast<const Unaligned*>(c + i * kNr + j * kLanes) : Vector{};
        for (int64_t p = 0; p < k; ++p, a += kMr, b += kNr) {
            const Vector b0 = *reinterpret_cast<const Unaligned*>(b);
            const Vector b1 = *reinterpret_cast<const Unaligned*>(b + kLanes);
#pragma GCC unroll 16
            for (int i = 0; i < kMr; ++i) {
                const Vector s = a[i] - Vector{};  // a broadcast
                acc[i][0] += s * b0;
                acc[i][1] += s * b1;
            }
        }
#pragma GCC unroll 16
        for (int i = 0; i < kMr; ++i)
            for (int j = 0; j < 2; ++j) *reinterpret_cast<Unaligned*>(c + i * kNr + j * kLanes) = acc[i][j];
    }
};

}  // namespace pyops::PYOPS_ISA
