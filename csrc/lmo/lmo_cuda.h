// Launchers of the memory-bound CUDA kernels of the lmo family. Torch-free: pointers, sizes and a stream in, status
// out.
//
// Every tensor is a View of [batch, rows, cols] elements with its own dtype and strides; arithmetic is in double when a
// tensor of the call is float64 and in float otherwise. Nothing here allocates or waits; sizes of zero do nothing.
// Results are the same bits on every run and every device, since the order of each sum depends on the sizes alone.
#pragma once

#include <stddef.h>
#ifndef PYOPS_EMULATOR
#include <cuda_runtime_api.h>
#endif

#include "common/view.h"

namespace pyops::cuda {

enum class VectorNorm : int { Sign, Col, Row, Euclidean };

// Bytes of scratch memory (16-byte aligned) that unit_direction and vector_step need.
size_t norm_workspace(VectorNorm norm, long long batch, long long rows, long long cols);

// out = scale * u(g): sign(g), or g over the 2-norm of its column, row or matrix. A zero column, row or matrix gives
// zero, one with NaN or Inf gives NaN throughout; sign(NaN) is NaN. Norms neither overflow nor underflow.
// out may be g itself.
cudaError_t unit_direction(View g, View out, long long batch, long long rows, long long cols, VectorNorm norm,
                           double scale, void* workspace, cudaStream_t stream);

// One optimizer step, with no d and no u in memory:
//     m <- m + (1 - momentum)(g - m),  d = nesterov ? g + momentum (m - g) : m;   d = g without m (data == nullptr)
//     w <- shrink w - step u(d);   then, without m, g <- grad_decay g. With m, g is only read.
// seed >= 0 rounds bfloat16 and float16 weights stochastically, by a hash of (seed, tensor, row-major element index).
cudaError_t vector_step(View w, View g, View m, long long batch, long long rows, long long cols, VectorNorm norm,
                        double shrink, double step, double momentum, bool nesterov, double grad_decay, long long seed,
                        long long tensor, void* workspace, cudaStream_t stream);

}  // namespace pyops::cuda
