// Steps of linear minimisation oracles: W <- shrink W - step u(d), with u the direction of a norm ball's oracle.
//
//   spectral   u = p_k(...p_1(d / |d|_F)), p_j(X) = a_j X + b_j A X + c_j A^2 X, A = X X^T: an approximation of the
//              orthogonal polar factor U V^T of d = U S V^T
//   sign, col, row, euclidean   u_ij = sign(d_ij),  d_ij / |d_:j|,  d_ij / |d_i:|,  d_ij / |d|_F
//
// and d one of
//   g                                   (no momentum buffer; afterwards g <- grad_decay g)
//   m <- m + (1 - momentum)(g - m)      (d = m, or g + momentum (m - g) with nesterov)
//
// One kernel serves the optimizers' in-place step and the pure ops, which are a step with shrink 0 and step -1 into
// fresh memory. Matrices are strided views; nothing is written before all of a matrix's gradient has been read.
// Results do not depend on the number of threads or on the other matrices of the call, and a tall matrix gives the
// transpose of what its wide transpose gives, bit for bit.
#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace pyops {

// A rows x cols view; strides in elements.
struct MatrixView {
    void* data = nullptr;
    DType dtype = DType::F32;
    int64_t rows = 0, cols = 0, row_stride = 0, col_stride = 0;
};

struct LmoTask {
    MatrixView weight;    // read unless shrink == 0, written
    MatrixView grad;      // read; scaled by grad_decay if that is not 1
    MatrixView momentum;  // read and written; data == nullptr: none
    double shrink = 0, step = -1;
    int64_t tensor = 0, first_element = 0;  // of this matrix among the weights: what stochastic rounding hashes
    double* residual = nullptr;             // out, if wanted: |A^2 - A|_F of the result's Gram matrix A
    int64_t* steps_used = nullptr;
};

enum class LmoNorm { Spectral, Sign, Col, Row, Euclidean };
enum class Form { Auto, Direct, Gram };
enum class Compute { Float64, Float32, Bf16x3, Bf16 };

struct LmoPlan {
    LmoNorm norm = LmoNorm::Spectral;
    double momentum = 0;
    bool nesterov = false;
    double grad_decay = 1;
    int64_t seed = -1;  // >= 0: stochastic rounding of 16-bit weights
    // spectral only
    const double* coefficients = nullptr;  // a, b, c of each step
    int64_t steps = 0;
    const int64_t* restarts = nullptr;  // after which steps (counted from 1) the Gram form returns to X, ascending
    int64_t restart_count = 0;          // 0: the kernel's choice
    Form form = Form::Auto;
    Compute compute = Compute::Float32;
    bool schatten4 = false;  // rescale by |X X^T|_F^(1/2) in the first step
    double eps = 0;          // X_0 = d / max(|d|_F, eps)
    double tolerance = -1;  // >= 0: stop once |A^2 - A|_F <= tolerance |A|_F, in the direct form (not before rescaling)
    int64_t min_steps = 0;
};

namespace isa_default {
void lmo_steps(const LmoPlan& plan, LmoTask* tasks, int64_t count, int threads);
}
namespace isa_avx2 {
void lmo_steps(const LmoPlan& plan, LmoTask* tasks, int64_t count, int threads);
}
namespace isa_avx512 {
void lmo_steps(const LmoPlan& plan, LmoTask* tasks, int64_t count, int threads);
}

}  // namespace pyops
