// A [batch, rows, cols] tensor as kernels see it: a pointer, an element type and three strides. No torch, no host
// headers.
#pragma once

#include "common/dtype.h"

namespace pyops {

// Strides count elements. `data == nullptr` means that the operand is absent.
struct View {
    void* data;
    DType dtype;
    long long batch, row, col;
};

}  // namespace pyops
