// The element types every op accepts; the one enumeration that kernels, launchers and bindings share.
#pragma once

namespace pyops {

enum class DType : int { F64 = 0, F32 = 1, BF16 = 2, F16 = 3 };

constexpr int size_of(DType t) { return t == DType::F64 ? 8 : t == DType::F32 ? 4 : 2; }

}  // namespace pyops
