// Rows of strided tensors of any dtype, to and from zero-padded scratch memory; scratch memory itself.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/flush.h"
#include "common/lanes.h"
#include "common/lines.h"
#include "common/pieces.h"
#include "common/small_gemm.h"
#include "linear_attention/linear_attention.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace pyops::PYOPS_ISA {

// Where rows of a [batch, time, head, last] tensor begin: token t of batch entry b, one head.
struct Place {
    int64_t batch, time, head;
};

inline int64_t offset_of(const AttentionView& x, const Place& at) {
    return at.batch * x.batch + at.time * x.time + at.head * x.head;
}

// out[i][0 .. size) = factor x[i], zeros up to `ld`, for `count` rows `stride` elements apart.
template <class T>
inline void read_rows(const AttentionView& x, int64_t offset, int64_t stride, int64_t count, int64_t size, T factor,
                      T* __restrict out, int64_t ld) {
    with_type(x.dtype, [&](auto* tag) {
        using Element = std::remove_pointer_t<decltype(tag)>;
        const auto* row = static_cast<const Element*>(x.data) + offset;
        for (int64_t i = 0; i < count; ++i, row += stride, out += ld) {
            const Element* __restrict p = row;
            if (x.last == 1)
                for (int64_t j = 0; j < size; ++j) out[j] = factor * static_cast<T>(widen(p[j]));
            else
                for (int64_t j = 0; j < size; ++j) out[j] = factor * static_cast<T>(widen(p[j * x.last]));
            for (int64_t j = size; j < ld; ++j) out[j] = 0;
        }
    });
}

// A cache line to memory, without reading what was there.
inline void store_past_caches(void* target, const void* line) {
#if defined(__AVX512F__)
    _mm512_stream_si512(static_cast<__m512i*>(target), _mm512_load_si512(line));
#elif defined(__x86_64__)
    for (int i = 0; i < 4; ++i)
        _mm_stream_si128(static_cast<__m128i*>(target) + i, _mm_load_si128(static_cast<const __m128i*>(line) + i));
#else
    __builtin_memcpy(target, line, 64);
#endif
}

template <class T>
inline void write_rows(const AttentionView& x, int64_t offset, int64_t stride, int64_t count, int64_t size,
                       const T* __restrict in, int64_t ld) {
    with_type(x.dtype, [&](auto* tag) {
        using Element = std::remove_pointer_t<decltype(tag)>;
        constexpr int64_t kLine = 64 / sizeof(Element);
        alignas(64) Element line[kLine];
        auto* row = static_cast<Element*>(x.data) + offset;
        for (int64_t i = 0; i < count; ++i, row += stride, in += ld) {
            auto* __restrict p = row;
            if (x.past_caches && x.last == 1 && reinterpret_cast<uintptr_t>(p) % 64 == 0 && size % kLine == 0) {
                for (int64_t j = 0; j < size; j += kLine) {
                    for (int64_t l = 0; l < kLine; ++l) narrow(in[j + l], line[l]);
                    store_past_caches(p + j, line);
                }
                continue;
            }
            if (x.last == 1)
                for (int64_t j = 0; j < size; ++j) narrow(in[j], p[j]);
            else
                for (int64_t j = 0; j < size; ++j) narrow(in[j], p[j * x.last]);
        }
    });
}

// Brings rows that will be read soon into the L2 cache, a few at a time between other work: rows that lie a page apart
// are beyond the hardware's prefetchers, and requests in one burst would wait for each other.
class Prefetch {
  public:
    // Rows of any number of streams are fetched together, `rows` times.
    void start(int64_t rows) {
        streams_ = 0;
        left_ = rows;
    }
    void add(const AttentionView& x, const Place& at, int64_t size) {
        const int64_t bytes = size_of(x.dtype);
        stream_[streams_++] = {static_cast<const char*>(x.data) + offset_of(x, at) * bytes, x.time * bytes,
                               x.last == 1 ? size * bytes : 1};
    }
    void some() {
        for (int row = 0; row < 2 && left_ > 0; ++row, --left_)
            for (int s = 0; s < streams_; ++s) {
                for (int64_t b = 0; b < stream_[s].bytes; b += 64) __builtin_prefetch(stream_[s].row + b, 0, 2);
                stream_[s].row += stream_[s].stride;
            }
    }

  private:
    struct Stream {
        const char* row;
        int64_t stride, bytes;
    };
    Stream stream_[5];
    int streams_ = 0;
    int64_t left_ = 0;
};

template <class T>
inline bool all_finite(const T* x, int64_t count) {
    using Bits = std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>;
    constexpr Bits exponent = sizeof(T) == 4 ? Bits{0x7f800000u} : static_cast<Bits>(0x7ff0000000000000ull);
    Bits bad = 0;
    for (int64_t i = 0; i < count; ++i) bad |= (__builtin_bit_cast(Bits, x[i]) & exponent) == exponent;
    return bad == 0;
}

template <class T>
inline bool all_finite_rows(const T* x, int64_t rows, int64_t count, int64_t ld) {
    bool finite = true;
    for (int64_t r = 0; r < rows; ++r) finite &= all_finite(x + r * ld, count);
    return finite;
}

// out[i] = the sum of the lanes of row(i), for 0 <= i < count; `out` has room for whole vectors.
template <class T, class F>
inline void sums_of_rows(int64_t count, const F& row, T* out) {
    constexpr int64_t kLanes = Gemm<T>::kLanes;
    for (int64_t i = 0; i < count; i += kLanes) {
        typename Gemm<T>::Vector v[kLanes] = {};
        for (int64_t l = 0; l < std::min(kLanes, count - i); ++l) v[l] = row(i + l);
        SmallGemm<T>::store(out + i, sums_of_lanes<T>(v));
    }
}

// The leading dimension for rows of `size` elements: whole cache lines, and an odd number of them where there are many,
// so that a column of a matrix does not fall into a few sets of the L1 cache.
template <class T>
constexpr int64_t leading_dimension(int64_t size) {
    constexpr int64_t line = 64 / sizeof(T);
    const int64_t lines = (size + line - 1) / line;
    return (lines > 4 ? lines | 1 : lines) * line;
}

}  // namespace pyops::PYOPS_ISA
