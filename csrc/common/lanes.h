// Sums over the lanes of vectors.
#pragma once

#include "common/small_gemm.h"

namespace pyops::PYOPS_ISA {

// The sum of a vector's lanes, in a fixed order.
template <class T>
inline T sum_of_lanes(typename Gemm<T>::Vector v) {
    T lanes[Gemm<T>::kLanes];
    __builtin_memcpy(lanes, &v, sizeof(v));
    for (int width = Gemm<T>::kLanes / 2; width > 0; width /= 2)
        for (int l = 0; l < width; ++l) lanes[l] += lanes[l + width];
    return lanes[0];
}

// Lane l of the result is the sum of the lanes of v[l].
template <class T>
inline typename Gemm<T>::Vector sums_of_lanes(typename Gemm<T>::Vector (&v)[Gemm<T>::kLanes]) {
    constexpr int kLanes = Gemm<T>::kLanes;
    const auto halve = [&]<int step>() __attribute__((always_inline)) {
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; i += 2 * step) {
            Transpose<T>::template exchange<step>(v[i], v[i + step]);
            v[i] += v[i + step];
        }
    };
    halve.template operator()<1>();
    if constexpr (kLanes > 2) halve.template operator()<2>();
    if constexpr (kLanes > 4) halve.template operator()<4>();
    if constexpr (kLanes > 8) halve.template operator()<8>();
    return v[0];
}

}  // namespace pyops::PYOPS_ISA
