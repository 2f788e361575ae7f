// 2-norms on the GPU that neither overflow nor underflow, in one pass: three sums, as in the BLAS. Squares of large
// elements are scaled down, those of small ones up, and the rest are as they are.
#pragma once

#include "common/cuda.h"

namespace pyops::cuda {

// Elements above `large` are multiplied by `shrink` before squaring, those below `small` by `grow`; 2^40 of either
// kind, and of those between, sum without overflow and without losing bits to subnormals.
template <class Acc>
struct Range;
template <>
struct Range<float> {
    static constexpr float small = 0x1p-60f, large = 0x1p42f, grow = 0x1p100f, ungrow = 0x1p-100f, shrink = 0x1p-90f;
};
template <>
struct Range<double> {
    static constexpr double small = 0x1p-480, large = 0x1p480, grow = 0x1p700, ungrow = 0x1p-700, shrink = 0x1p-560;
};

template <class Acc>
struct Bins {
    Acc small, middle, large;
};

template <class Acc>
__device__ __forceinline__ void add(Bins<Acc>& bins, Acc x) {
    const Acc a = x < 0 ? -x : x;
    if (a > Range<Acc>::large) {
        bins.large += (x * Range<Acc>::shrink) * (x * Range<Acc>::shrink);
    } else if (a < Range<Acc>::small) {
        bins.small += (x * Range<Acc>::grow) * (x * Range<Acc>::grow);
    } else {
        bins.middle += x * x;  // NaN comes here
    }
}

// x / norm = (x * power) * inverse, with power a power of two such that neither product leaves the range.
template <class Acc>
struct Factor {
    Acc power, inverse;
};

template <class Acc>
__device__ __forceinline__ Factor<Acc> factor_of(const Bins<Acc>& bins) {
    using R = Range<Acc>;
    const Acc sum = bins.small + bins.middle + bins.large;
    if (!(sum - sum == Acc(0))) return {Acc(1), static_cast<Acc>(bits_float(0x7fc00000u))};
    if (bins.large > 0) return {R::shrink, Acc(1) / sqrt(bins.large + (bins.middle * R::shrink) * R::shrink)};
    if (bins.middle > 0) return {Acc(1), Acc(1) / sqrt(bins.middle + (bins.small * R::ungrow) * R::ungrow)};
    if (bins.small > 0) return {R::grow, Acc(1) / sqrt(bins.small)};
    return {Acc(1), Acc(0)};
}

}  // namespace pyops::cuda
