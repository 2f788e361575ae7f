// Gradient descent on a factor U of measured tubal tensors: `steps` times
//
//   res_i = <A_i, U * U^T> - y_i,   loss = 1/4 sum_i res_i^2,   U <- U - step sum_i res_i (A_i + A_i^T)/2 * U
//
// for U [n, rank, tubes] and A [count, n, n, tubes], * the t-product (circular convolution of tubes) and ^T the
// T-transpose. Of A only its T-symmetric part matters.
#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace pyops {

struct SensingProblem {
    DType dtype = DType::F32;  // of everything; F64 or F32
    int64_t n = 0, rank = 0, tubes = 1, count = 0;
    void* u = nullptr;                            // read and written
    int64_t u_row = 0, u_column = 0, u_tube = 0;  // strides in elements
    const void* measured = nullptr;               // A, contiguous
    const void* y = nullptr;                      // contiguous
    double step = 0;
    int64_t steps = 0;
    void* losses = nullptr;  // [steps], each before its step
    int threads = 1;
};

namespace isa_default {
int64_t tubal_sensing_workspace(const SensingProblem& problem);  // in elements, to be aligned to 64 bytes
void tubal_sensing_steps(const SensingProblem& problem, void* workspace);
}  // namespace isa_default
namespace isa_avx2 {
int64_t tubal_sensing_workspace(const SensingProblem& problem);
void tubal_sensing_steps(const SensingProblem& problem, void* workspace);
}  // namespace isa_avx2
namespace isa_avx512 {
int64_t tubal_sensing_workspace(const SensingProblem& problem);
void tubal_sensing_steps(const SensingProblem& problem, void* workspace);
}  // namespace isa_avx512

}  // namespace pyops
