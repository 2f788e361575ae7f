// Products of small row-major matrices that lie in cache: float32 and float64, on the widest vectors there are.
//
//   C = A B + r D        A(i, k) = a[i ai + k ak] (so a transpose costs nothing), B and C with contiguous rows
//
// Columns of B and C are counted in whole vectors: whoever packs an operand pads its rows with zeros. A tile of kMr x 2
// vectors (2 kMr x 1 for the last one) is accumulated in registers: per k it costs 2 kMr FMAs against kMr + 2 loads, so
// two FMA ports stay busy.
// Sums run over k in order, from zero; r D is added last. A result thus does not depend on how rows are tiled.
#pragma once

#include <algorithm>
#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "common/gemm.h"

namespace pyops::PYOPS_ISA {

// Which part of a product is wanted or not zero. With triangular operands some zeros are still multiplied.
enum class Shape {
    Full,
    LowerResult,  // only C(i, j), j <= i, is needed; what lies above is left or overwritten
    LowerLeft,    // A(i, k) = 0 for k > i
    UpperLeft,    // A(i, k) = 0 for k < i
};

template <class T>
struct SmallGemm {
    using Vector = typename Gemm<T>::Vector;
    static constexpr int kLanes = Gemm<T>::kLanes;
    static constexpr int kMr = kVectorBytes == 64 ? 8 : 4;

    static Vector load(const T* p) { return *reinterpret_cast<const typename Gemm<T>::Unaligned*>(p); }
    static void store(T* p, Vector v) { *reinterpret_cast<typename Gemm<T>::Unaligned*>(p) = v; }
    // A store past the caches where p is aligned, for what is not read soon: memory need not be read first. fence()
    // comes between it and whatever tells other threads of it.
    static void stream(T* p, Vector v) {
        if (reinterpret_cast<uintptr_t>(p) % kVectorBytes) return store(p, v);
#if defined(__AVX512F__)
        _mm512_stream_si512(reinterpret_cast<__m512i*>(p), (__m512i)v);
#elif defined(__AVX2__)
        _mm256_stream_si256(reinterpret_cast<__m256i*>(p), (__m256i)v);
#elif defined(__x86_64__)
        _mm_stream_si128(reinterpret_cast<__m128i*>(p), (__m128i)v);
#else
        store(p, v);
#endif
    }
    static void fence() {
#if defined(__x86_64__)
        _mm_sfence();
#endif
    }

    struct Operands {
        const T* a;
        int64_t ai, ak;
        const T* b;
        int64_t ldb;
        T* c;
        int64_t ldc;
        const T* r = nullptr;  // r(i) = r[i * r_step]; null: no D
        int64_t r_step = 0;
        Shape shape = Shape::Full;
        const T* add = nullptr;    // D, with C's leading dimension; null: C itself
        bool precise = false;      // of interest to engines that round operands: keep twice the bits
        bool exact_left = false;   // for those: A has no more bits than they keep
        bool past_caches = false;  // stream() C
    };

    // m x n x k; n is a multiple of kLanes. Calls between() before each tile.
    template <class F>
    static void multiply(int64_t m, int64_t n, int64_t k, const Operands& o, const F& between) {
        int64_t j = 0;
        for (; j + 2 * kLanes <= n; j += 2 * kLanes) rows<2>(m, k, o, j, between);
        if (j < n) rows<1>(m, k, o, j, between);
    }

    // Calls f<R>(i) for tiles of R rows, NV vectors wide, that cover rows `from` to m; the last two are of one size, so
    // that neither leaves the FMA ports waiting for its few sums.
    template <int NV, class F>
    static void tiles(int64_t from, int64_t m, const F& f) {
        constexpr int most = NV == 1 ? 2 * kMr : kMr;
        int64_t i = from;
        for (; m - i >= 2 * most || m - i == most; i += most) f.template operator()<most>(i);
        if (m - i > most) {
            const int64_t half = (m - i + 1) / 2;
            tile_of<most>(half, i, f);
            i += half;
        }
        tile_of<most>(m - i, i, f);
    }

  private:
    template <int R, class F>
    static void tile_of(int64_t rows, int64_t i, const F& f) {
        if (rows == R) return f.template operator()<R>(i);
        if constexpr (R > 1) tile_of<R - 1>(rows, i, f);
    }

    template <int NV, class F>
    static void rows(int64_t m, int64_t k, const Operands& o, int64_t j, const F& between) {
        tiles<NV>(o.shape == Shape::LowerResult ? j / kMr * kMr : 0, m, [&]<int R>(int64_t i) {
            between();
            tile<R, NV>(k, o, i, j);
        });
    }

    template <int MR, int NV>
    static void tile(int64_t k, const Operands& o, int64_t i, int64_t j) {
        const int64_t k0 = o.shape == Shape::UpperLeft ? i : 0;
        const int64_t k1 = o.shape == Shape::LowerLeft ? std::min<int64_t>(k, i + MR) : k;
        const T* a = o.a + i * o.ai + k0 * o.ak;
        const T* b = o.b + k0 * o.ldb + j;
        Vector acc[MR][NV] = {};
        for (int64_t p = k0; p < k1; ++p, a += o.ak, b += o.ldb) {
            Vector v[NV];
#pragma GCC unroll 2
            for (int s = 0; s < NV; ++s) v[s] = load(b + s * kLanes);
#pragma GCC unroll 16
            for (int r = 0; r < MR; ++r) {
                const Vector x = a[r * o.ai] - Vector{};  // a broadcast
#pragma GCC unroll 2
                for (int s = 0; s < NV; ++s) acc[r][s] += x * v[s];
            }
        }
        T* c = o.c + i * o.ldc + j;
        const T* d = o.add ? o.add + i * o.ldc + j : c;
#pragma GCC unroll 16
        for (int r = 0; r < MR; ++r) {
#pragma GCC unroll 2
            for (int s = 0; s < NV; ++s) {
                const int64_t e = r * o.ldc + s * kLanes;
                const Vector v = o.r ? acc[r][s] + o.r[(i + r) * o.r_step] * load(d + e) : acc[r][s];
                o.past_caches ? stream(c + e, v) : store(c + e, v);
            }
        }
    }
};

// Square blocks of kLanes x kLanes, by log2(kLanes) rounds of two-operand shuffles.
template <class T>
struct Transpose {
    using Vector = typename Gemm<T>::Vector;
    static constexpr int kLanes = Gemm<T>::kLanes;
    using Index = std::conditional_t<sizeof(T) == 4, int32_t, int64_t>;
    typedef Index Mask __attribute__((vector_size(kVectorBytes)));

    // The halves of 2 x 2 blocks of side `step`: low takes block columns 0 of a and b, high columns 1.
    template <int step>
    [[gnu::always_inline]] static void exchange(Vector& a, Vector& b) {
        Mask low{}, high{};
        for (int l = 0; l < kLanes; ++l) {
            low[l] = l & step ? kLanes + l - step : l;
            high[l] = l & step ? kLanes + l : l + step;
        }
        const Vector x = a, y = b;
        a = __builtin_shuffle(x, y, low);
        b = __builtin_shuffle(x, y, high);
    }

    template <int step>
    [[gnu::always_inline]] static void round(Vector (&v)[kLanes]) {
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i)
            if (!(i & step)) exchange<step>(v[i], v[i + step]);
    }

    [[gnu::always_inline]] static void square(Vector (&v)[kLanes]) {
        round<1>(v);
        if constexpr (kLanes > 2) round<2>(v);
        if constexpr (kLanes > 4) round<4>(v);
        if constexpr (kLanes > 8) round<8>(v);
    }

    static void block(const T* source, int64_t source_ld, T* target, int64_t target_ld) {
        Vector v[kLanes];
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) v[i] = SmallGemm<T>::load(source + i * source_ld);
        square(v);
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) SmallGemm<T>::store(target + i * target_ld, v[i]);
    }

    // target (cols x rows) = transpose of source (rows x cols); both counts are multiples of kLanes.
    static void run(int64_t rows, int64_t cols, const T* source, int64_t source_ld, T* target, int64_t target_ld) {
        for (int64_t i = 0; i < rows; i += kLanes)
            for (int64_t j = 0; j < cols; j += kLanes)
                block(source + i * source_ld + j, source_ld, target + j * target_ld + i, target_ld);
    }
};

}  // namespace pyops::PYOPS_ISA
