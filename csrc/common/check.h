// Argument checks and output allocation for the bindings (csrc/<op>/<op>_op.cpp).
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <cstdlib>
#include <limits>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "common/dtype.h"

// PYOPS_CHECK(ok, "polar", "eps", "must be at least 0", eps) raises "pyops::polar: eps must be at least 0, got -1".
#define PYOPS_CHECK(condition, op, argument, wanted, got) \
    STD_TORCH_CHECK(condition, "pyops::", op, ": ", argument, " ", wanted, ", got ", got)

namespace pyops {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline std::string shape_text(const Tensor& t) {
    std::ostringstream out;
    out << "[";
    for (int64_t i = 0; i < t.dim(); ++i) out << (i ? ", " : "") << t.size(i);
    out << "]";
    return out.str();
}

// The kernels' name of t's dtype; raises for a dtype that pyops has no kernels for.
inline DType checked_dtype(const Tensor& t, std::string_view op, std::string_view argument) {
    switch (t.scalar_type()) {
        case ScalarType::Double: return DType::F64;
        case ScalarType::Float: return DType::F32;
        case ScalarType::BFloat16: return DType::BF16;
        case ScalarType::Half: return DType::F16;
        default:
            PYOPS_CHECK(false, op, argument, "must be float64, float32, bfloat16 or float16",
                        torch::headeronly::toString(t.scalar_type()));
    }
}

// A contiguous tensor on like's device whose elements the caller must write, all of them. With PYOPS_POISON=1 it
// holds NaN, so that the tests see an element that a kernel left out.
inline Tensor allocate(const Tensor& like, const std::vector<int64_t>& sizes, std::optional<ScalarType> dtype = {}) {
    static const bool poison = [] {
        const char* value = std::getenv("PYOPS_POISON");
        return value != nullptr && std::string_view(value) == "1";
    }();
    Tensor out = torch::stable::new_empty(like, sizes, dtype);
    const ScalarType type = out.scalar_type();
    if (poison && (type == ScalarType::Double || type == ScalarType::Float || type == ScalarType::BFloat16 ||
                   type == ScalarType::Half)) {
        torch::stable::fill_(out, std::numeric_limits<double>::quiet_NaN());
    }
    return out;
}

}  // namespace pyops
