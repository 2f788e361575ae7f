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

// m <- m + (1 - momentum)(g - m);  d = nesterov ? g + momentum (m - g) : m.   Without m (data == nullptr), d = g.
// Writes m, d unless d.data is null, and unless it is null amax[batch]: the largest |d| of each matrix before d is
// rounded (NaN or Inf if the matrix holds one), float, or double when a tensor is float64.
cudaError_t momentum_direction(View g, View m, View d, long long batch, long long rows, long long cols, double momentum,
                               bool nesterov, void* amax, cudaStream_t stream);

// w <- shrink w - step u;  then, if g.data is not null, g <- grad_decay g.
// seed >= 0 rounds bfloat16 and float16 weights stochastically, by a hash of (seed, tensor, row-major element index).
cudaError_t apply_update(View w, View u, View g, long long batch, long long rows, long long cols, double shrink,
                         double step, double grad_decay, long long seed, long long tensor, cudaStream_t stream);

// One optimizer step of a vector norm: momentum_direction (without m, d = g), unit_direction and apply_update, with no
// d and no u in memory. Without m, g <- grad_decay g at the end; with m, g is only read.
cudaError_t vector_step(View w, View g, View m, long long batch, long long rows, long long cols, VectorNorm norm,
                        double shrink, double step, double momentum, bool nesterov, double grad_decay, long long seed,
                        long long tensor, void* workspace, cudaStream_t stream);

}  // namespace pyops::cuda
