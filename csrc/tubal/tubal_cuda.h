// Launchers of the CUDA kernels of the tubal family. Torch-free: pointers, sizes and a stream in, status out.
//
// Arithmetic is in double when the tensors are float64 and in float otherwise; float64 and other types do not mix.
// Nothing here allocates or waits. Inputs are only read, and no output may overlap one. Results are the same bits on
// every run and every device, since the order of each sum depends on the sizes alone.
#pragma once

#include <stddef.h>
#ifndef PYOPS_EMULATOR
#include <cuda_runtime_api.h>
#endif

#include "common/dtype.h"

namespace pyops::cuda {

constexpr int kTubalBatch = 4;  // dimensions of a batch; a caller with more of them merges or copies

// A [batch..., rows, cols, tubes] tensor in any layout. Strides count elements and may be zero or negative. A batch
// stride of zero broadcasts an input, and in an output sums over that dimension of the batch.
struct TubalTensor {
    void* data;
    DType dtype;
    long long row, col, tube;
    long long batch[kTubalBatch];
};

// A real n3 x n3 matrix; `data == nullptr`: the DFT. Its type is the tensors', or float32 where they have 16 bits.
struct TubalMatrix {
    const void* data;
    DType dtype;
    long long row, col;
};

// c = op(a) * op(b), the t-product: n1 x n2 times n2 x n4, tubes of n3. op is the T-transpose where its flag is set, so
// that the rows of `a` as stored are then n2 and its columns n1. With matrices (all three or none),
//     c = inverse x_3 [(forward_a x_3 a) facewise (forward_b x_3 b)],
// and op transposes the faces. n2 = 0 gives zeros; n3 is at least 1.
struct TubalProduct {
    TubalTensor a, b, c;
    long long batch[kTubalBatch];  // sizes of the whole batch, 1 where there is no such dimension
    long long n1, n2, n4, n3;
    bool transpose_a, transpose_b;
    TubalMatrix forward_a, forward_b, inverse;
};

// Bytes of scratch memory, 16-byte aligned; zero for the DFT of tubes of up to 16.
size_t tprod_workspace(const TubalProduct& product);
cudaError_t tprod(const TubalProduct& product, void* workspace, cudaStream_t stream);

// c = u * u^T, or u^T * u with `transpose`, by half the products; exactly T-symmetric. u is rows x cols, tubes of n3.
struct TubalGram {
    TubalTensor u, c;
    long long batch[kTubalBatch];
    long long rows, cols, n3;
    bool transpose;
};

size_t tgram_workspace(const TubalGram& gram);
cudaError_t tgram(const TubalGram& gram, void* workspace, cudaStream_t stream);

}  // namespace pyops::cuda
