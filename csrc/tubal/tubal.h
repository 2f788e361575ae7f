// The t-product: products of matrices whose scalars are tubes of n3 numbers. No torch.
//
//   C = A * B:   C^_f = A^_f B^_f  for every face f of the transformed tensors,  A^ = F A along the tubes,  C = F^-1 C^
//
// F is the DFT (unnormalised, 1/n3 on the way back), where faces f and n3 - f of real tensors are conjugates, so that
// floor(n3/2) + 1 faces do; or a real matrix, with one for each factor and one for the way back. A T-transposed factor
// enters with the conjugate transpose of every face.
#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace pyops {

// A third-order tensor: element (i, j, t) at data[i row + j col + t tube], strides in elements.
struct TubalView {
    void* data = nullptr;
    int64_t row = 0, col = 0, tube = 0;
};

struct TubalEntry {
    TubalView a, b, c;
};

// Sizes of the product as multiplied: A is rows x inner after its transpose, B is inner x cols.
struct TubalProduct {
    int64_t rows = 0, inner = 0, cols = 0, tubes = 0;
    bool transpose_a = false, transpose_b = false;
    bool gram = false;  // A * B is T-symmetric, as of b = a with the other transpose: half of it is computed
    DType dtype = DType::F32;
    // tubes x tubes, row-major, double for float64 and float otherwise; all null for the DFT.
    const void *forward_a = nullptr, *forward_b = nullptr, *inverse = nullptr;
};

// C = A * B for every entry; neighbouring entries with the same c are summed into it.
#define PYOPS_TUBAL_DECLARE(isa)                                                                             \
    namespace isa {                                                                                          \
    void tubal_products(const TubalProduct& product, const TubalEntry* entries, int64_t count, int threads); \
    }
PYOPS_TUBAL_DECLARE(isa_default)
#if defined(PYOPS_X86_ISAS)
PYOPS_TUBAL_DECLARE(isa_avx2)
PYOPS_TUBAL_DECLARE(isa_avx512)
#endif
#undef PYOPS_TUBAL_DECLARE

}  // namespace pyops
