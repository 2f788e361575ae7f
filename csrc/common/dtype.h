// The element types every op accepts; the one enumeration that kernels, launchers and bindings share.
#pragma once

// Marks functions that both CPU and GPU kernels call.
#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define PYOPS_HD __host__ __device__ __forceinline__
#else
#define PYOPS_HD inline __attribute__((always_inline))  // never a shared copy compiled for one instruction set
#endif

namespace pyops {

enum class DType : int { F64 = 0, F32 = 1, BF16 = 2, F16 = 3 };

PYOPS_HD constexpr int size_of(DType t) { return t == DType::F64 ? 8 : t == DType::F32 ? 4 : 2; }

}  // namespace pyops
