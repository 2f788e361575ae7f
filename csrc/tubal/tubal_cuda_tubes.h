// Device code of tubal_cuda.cu: roots of unity, transforms of short tubes, and memory.
#pragma once

#include "common/cuda.h"

namespace pyops::cuda {

// --- Roots of unity --------------------------------------------------------------------------------------------------

struct Root {
    double cosine, sine;
};

// e^(2 pi i m / n), 0 <= m < n, to the last bit but one; exact at multiples of a quarter turn.
PYOPS_HD constexpr Root root_of_unity(i64 m, i64 n) {
    i64 a = 4 * m;  // the angle is a / n quarter turns, brought into half of one
    const bool below = a > 2 * n;
    if (below) a = 4 * n - a;
    const bool left = a > n;
    if (left) a = 2 * n - a;
    const bool steep = 2 * a > n;
    if (steep) a = n - a;
    const double x = 1.5707963267948966 * static_cast<double>(a) / static_cast<double>(n), square = x * x;
    double c = 1.0, s = 1.0;
    for (int k = 18; k >= 2; k -= 2) {
        c = 1.0 - c * square / (k * (k - 1));
        s = 1.0 - s * square / (k * (k + 1));
    }
    s *= x;
    const double cosine = steep ? s : c, sine = steep ? c : s;
    return {left ? -cosine : cosine, below ? -sine : sine};
}

PYOPS_HD constexpr i64 planes_of(i64 n) { return n % 2 == 0 ? 3 * n / 2 - 1 : (3 * n - 1) / 2; }

// --- Transforms of one short tube, unrolled --------------------------------------------------------------------------

template <int N>
struct Roots {
    Root of[N];
};
template <int N>
PYOPS_HD constexpr Roots<N> roots_of_unity() {
    Roots<N> roots{};
    for (int m = 0; m < N; ++m) roots.of[m] = root_of_unity(m, N);
    return roots;
}

// put(p, value) gets the planes of tube x: face 0; re, im, re + im of the faces 1, 2, ...; face N/2 for even N.
template <int N, class Acc, class Put>
__device__ __forceinline__ void tube_to_planes(const Acc (&x)[N], bool conjugate, Put&& put) {
    constexpr Roots<N> roots = roots_of_unity<N>();
    constexpr int q = (N - 1) / 2;
    constexpr bool even = N % 2 == 0;
    Acc sum[q + 1], difference[q + 1];
    const Acc middle = even ? x[N / 2] : Acc(0);
    Acc all = even ? x[0] + middle : x[0], alternating = N / 2 % 2 == 0 ? x[0] + middle : x[0] - middle;
#pragma unroll
    for (int t = 1; t <= q; ++t) {
        sum[t] = x[t] + x[N - t];
        difference[t] = conjugate ? x[t] - x[N - t] : x[N - t] - x[t];
        all += sum[t];
        alternating += t % 2 == 0 ? sum[t] : -sum[t];
    }
    put(0, all);
#pragma unroll
    for (int f = 1; f <= q; ++f) {
        Acc re = !even ? x[0] : f % 2 == 0 ? x[0] + middle : x[0] - middle, im = Acc(0);
#pragma unroll
        for (int t = 1; t <= q; ++t) {
            const Root root = roots.of[f * t % N];  // zeros are known to the compiler, which must not assume 0 x = 0
            if (root.cosine != 0) re += static_cast<Acc>(root.cosine) * sum[t];
            if (root.sine != 0) im += static_cast<Acc>(root.sine) * difference[t];
        }
        put(3 * f - 2, re);
        put(3 * f - 1, im);
        put(3 * f, re + im);
    }
    if constexpr (even) put(3 * q + 1, alternating);
}

// get(p) gives the products of the planes; put(t, value) gets the entries of the tube.
template <int N, class Acc, class Get, class Put>
__device__ __forceinline__ void planes_to_tube(Get&& get, Put&& put) {
    constexpr Roots<N> roots = roots_of_unity<N>();
    constexpr int q = (N - 1) / 2;
    constexpr bool even = N % 2 == 0;
    const Acc first = get(0) * Acc(1.0 / N);
    const Acc last = even ? get(3 * q + 1) * Acc(1.0 / N) : Acc(0);
    Acc re[q + 1], im[q + 1];
    Acc all = first + last, alternating = N / 2 % 2 == 0 ? first + last : first - last;
#pragma unroll
    for (int f = 1; f <= q; ++f) {
        const Acc p1 = get(3 * f - 2), p2 = get(3 * f - 1), p3 = get(3 * f);
        re[f] = (p1 - p2) * Acc(2.0 / N);
        im[f] = (p3 - p1 - p2) * Acc(2.0 / N);
        all += re[f];
        alternating += f % 2 == 0 ? re[f] : -re[f];
    }
    put(0, all);
#pragma unroll
    for (int t = 1; t <= q; ++t) {
        Acc cosines = t % 2 == 0 ? first + last : first - last, sines = Acc(0);
#pragma unroll
        for (int f = 1; f <= q; ++f) {
            const Root root = roots.of[f * t % N];
            if (root.cosine != 0) cosines += static_cast<Acc>(root.cosine) * re[f];
            if (root.sine != 0) sines += static_cast<Acc>(root.sine) * im[f];
        }
        put(t, cosines - sines);
        put(N - t, cosines + sines);
    }
    if constexpr (even) put(N / 2, alternating);
}

// --- Memory ----------------------------------------------------------------------------------------------------------

constexpr int kBatch = 5;  // the caller's four dimensions, and one that a launcher adds: planes, or rows

struct Tubes {  // strides in elements, after the transposition
    void* data;
    DType dtype;
    i64 row, col, tube;
    i64 batch[kBatch];
    bool packed;  // every tube is contiguous and begins at a multiple of 16 bytes
};

struct Sizes {
    i64 of[kBatch];
    __device__ __forceinline__ i64 count() const { return of[0] * of[1] * of[2] * of[3] * of[4]; }
};

// Adds to `offset[o]` where the entry `index` of a batch of these sizes begins in tensor o.
template <int Count>
__device__ __forceinline__ void add_batch(i64 index, const Sizes& sizes, const Tubes* const (&tensors)[Count],
                                          i64 (&offset)[Count]) {
#pragma unroll
    for (int d = kBatch - 1; d >= 0; --d) {
        if (sizes.of[d] == 1) continue;
        i64 rest;
        divide(index, sizes.of[d], index, rest);
#pragma unroll
        for (int o = 0; o < Count; ++o) offset[o] += rest * tensors[o]->batch[d];
    }
}

// Neighbours in memory, moved 16 bytes at a time.
template <class T, int Count>
struct alignas(16) Few {
    T x[Count];
};
template <int Count, class T>
__device__ __forceinline__ Few<T, Count> load_few(const T* p) {
    return *reinterpret_cast<const Few<T, Count>*>(p);
}
template <int Count, class T>
__device__ __forceinline__ void store_few(T* p, const Few<T, Count>& few) {
    *reinterpret_cast<Few<T, Count>*>(p) = few;
}
#if defined(PYOPS_EMULATOR)
template <int Count, class T>
Few<T, Count> load_few(const emu::Shared<T>& p) {
    if (p.first % Count != 0) emu::fail("misaligned wide read of shared memory");
    Few<T, Count> few;
    for (int v = 0; v < Count; ++v) few.x[v] = p[v];
    return few;
}
template <int Count, class T>
void store_few(const emu::Shared<T>& p, const Few<T, Count>& few) {
    if (p.first % Count != 0) emu::fail("misaligned wide write of shared memory");
    for (int v = 0; v < Count; ++v) p[v] = few.x[v];
}
#endif

template <int N, class T, class Acc, class Convert>
__device__ __forceinline__ void load_entries(const T* from, i64 stride, bool packed, Acc (&x)[N], Convert&& convert) {
    constexpr int wide = 16 / sizeof(T);
    if constexpr (N % wide == 0) {
        if (packed) {
#pragma unroll
            for (int g = 0; g < N / wide; ++g) {
                const auto few = load_few<wide>(from + g * wide);
#pragma unroll
                for (int v = 0; v < wide; ++v) x[g * wide + v] = convert(few.x[v]);
            }
            return;
        }
    }
#pragma unroll
    for (int t = 0; t < N; ++t) x[t] = convert(from[t * stride]);
}

template <int N, class Acc>
__device__ __forceinline__ void load_tube(const void* data, DType dtype, i64 at, i64 stride, bool packed, Acc (&x)[N]) {
    if constexpr (sizeof(Acc) == 8) {
        load_entries(static_cast<const double*>(data) + at, stride, packed, x, [](double y) { return y; });
    } else if (dtype == DType::F32) {
        load_entries(static_cast<const float*>(data) + at, stride, packed, x, [](float y) { return y; });
    } else if (dtype == DType::BF16) {
        load_entries(static_cast<const u16*>(data) + at, stride, packed, x, [](u16 y) { return bf16_to_float(y); });
    } else {
        load_entries(static_cast<const u16*>(data) + at, stride, packed, x, [](u16 y) { return half_to_float(y); });
    }
}

template <class Acc>
__device__ __forceinline__ void store_one(const Tubes& c, i64 at, Acc x) {
    if constexpr (sizeof(Acc) == 8) {
        static_cast<double*>(c.data)[at] = x;
    } else if (c.dtype == DType::F32) {
        static_cast<float*>(c.data)[at] = x;
    } else {
        static_cast<u16*>(c.data)[at] = c.dtype == DType::BF16 ? float_to_bf16(x) : float_to_half(x);
    }
}

// Stores entry t of tube (i, j) of a T-symmetric c, which is also entry -t of tube (j, i).
template <class Acc>
__device__ __forceinline__ void store_mirrored(const Tubes& c, i64 base, i64 n, i64 i, i64 j, i64 t, Acc x) {
    if (j < i || (i == j && 2 * t > n)) return;
    store_one(c, base + i * c.row + j * c.col + t * c.tube, x);
    if (i != j || t != 0) store_one(c, base + j * c.row + i * c.col + (t == 0 ? 0 : n - t) * c.tube, x);
}

}  // namespace pyops::cuda
