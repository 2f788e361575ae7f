// bf16 tile products on AMX, in the blocked layouts that keep every tile load one contiguous kilobyte.
//
// A matrix is cut into 32x32 blocks of bf16, each block two tiles of 16 rows of 64 bytes, 2 KB in all:
//   left layout   block (i, k): tile h holds rows 32i+16h.. and columns 32k..; the left operand of TDPBF16PS;
//   right layout  block (k, j): tile h holds rows 32k.. and columns 32j+16h.., two consecutive rows interleaved into
//                 32-bit pairs; the right operand. Blocks are ordered by column panel j, then k.
// Seen as 16x16 arrays of 32-bit pairs, a left tile of Y is the transpose of a right tile of Y^T. So the right operand
// of X X^T comes from X by transposing 16x16 dwords, and the mirror of a block of a symmetric matrix likewise.
//
// Numbers are kept as sums of `P` bf16 pieces (x = x0 + x1 + ..., each the rounding of what the ones before leave);
// a product adds the P(P+1)/2 pairs p + q < P: one is bf16, three keep 16 bits ("bf16x3"), six keep 24 (float32).
//
// Cost of one 32x32x32 step: 4 TDPBF16PS per pair, 16 cycles each; tile loads 4, 8, 14 for P = 1, 2, 3.
//
// Every function carries the target by the pragma below: call nothing here unless pyops::amx() is true.
#pragma once

#if defined(__AVX512F__)

#include <immintrin.h>

#include <cstdint>

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,amx-tile,amx-bf16")

namespace pyops::PYOPS_ISA::amx {

using Bf16 = uint16_t;
constexpr int64_t kBlock = 32;
constexpr int64_t kTile = 512;        // bf16 elements of a tile
constexpr int64_t kBlockSize = 1024;  // bf16 elements of a block

// Configures the calling thread's eight tiles as 16 rows of 64 bytes until the end of the scope.
class TileScope {
  public:
    TileScope() {
        alignas(64) struct {
            uint8_t palette = 1, start_row = 0, reserved[14] = {};
            uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
            uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
        } config;
        // gcc 12 declares only eight bytes of the operand as read: without this the stores above may vanish.
        asm volatile("" : : "r"(&config) : "memory");
        _tile_loadconfig(&config);
    }
    ~TileScope() { _tile_release(); }
    TileScope(const TileScope&) = delete;
};

inline void zero_accumulator() {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}

// The accumulator is tiles 0..3, a 32x32 float32 block stored row-major.
inline void load_accumulator(const float* c) {
    asm volatile("" : : : "memory");
    _tile_loadd(0, c, 128);
    _tile_loadd(1, c + 16, 128);
    _tile_loadd(2, c + 16 * 32, 128);
    _tile_loadd(3, c + 16 * 32 + 16, 128);
}

inline void store_accumulator(float* c) {
    _tile_stored(0, c, 128);
    _tile_stored(1, c + 16, 128);
    _tile_stored(2, c + 16 * 32, 128);
    _tile_stored(3, c + 16 * 32 + 16, 128);
    asm volatile("" : : : "memory");
}

// Products of the loaded tiles, each load right before its first use so that it hides behind the products ahead of it.
// The right operand streams past once, the left one is used again by the next panel and should stay in L1.
#define PYOPS_AMX_BOTH(left, right)             \
    _tile_stream_loadd(6, (right), 64);         \
    _tile_loadd(4, (left), 64);                 \
    _tile_dpbf16ps(0, 4, 6);                    \
    _tile_stream_loadd(7, (right) + kTile, 64); \
    _tile_dpbf16ps(1, 4, 7);                    \
    _tile_loadd(5, (left) + kTile, 64);         \
    _tile_dpbf16ps(2, 5, 6);                    \
    _tile_dpbf16ps(3, 5, 7)
#define PYOPS_AMX_LEFT(left)            \
    _tile_loadd(4, (left), 64);         \
    _tile_dpbf16ps(0, 4, 6);            \
    _tile_dpbf16ps(1, 4, 7);            \
    _tile_loadd(5, (left) + kTile, 64); \
    _tile_dpbf16ps(2, 5, 6);            \
    _tile_dpbf16ps(3, 5, 7)
#define PYOPS_AMX_RIGHT(right)                  \
    _tile_stream_loadd(6, (right), 64);         \
    _tile_dpbf16ps(0, 4, 6);                    \
    _tile_dpbf16ps(2, 5, 6);                    \
    _tile_stream_loadd(7, (right) + kTile, 64); \
    _tile_dpbf16ps(1, 4, 7);                    \
    _tile_dpbf16ps(3, 5, 7)

// accumulator += sum over `blocks` consecutive blocks of left * right; pieces lie left_piece, right_piece elements
// apart. Small terms first, in the order that reloads the fewest tiles. A left operand that is exact in bf16 has one
// piece against two.
template <int P, int Left>
inline void accumulate(const Bf16* left, int64_t left_piece, const Bf16* right, int64_t right_piece, int64_t blocks) {
    static_assert(Left == P || (Left == 1 && P == 2));
    for (int64_t k = 0; k < blocks; ++k, left += kBlockSize, right += kBlockSize) {
        if constexpr (Left < P) {
            PYOPS_AMX_BOTH(left, right + right_piece);
            PYOPS_AMX_RIGHT(right);
        } else if constexpr (P == 1) {
            PYOPS_AMX_BOTH(left, right);
        } else if constexpr (P == 2) {
            PYOPS_AMX_BOTH(left + left_piece, right);
            PYOPS_AMX_LEFT(left);
            PYOPS_AMX_RIGHT(right + right_piece);
        } else {
            PYOPS_AMX_BOTH(left + 2 * left_piece, right);
            PYOPS_AMX_LEFT(left + left_piece);
            PYOPS_AMX_RIGHT(right + right_piece);
            PYOPS_AMX_LEFT(left);
            PYOPS_AMX_RIGHT(right);
            PYOPS_AMX_RIGHT(right + 2 * right_piece);
        }
    }
}

#undef PYOPS_AMX_BOTH
#undef PYOPS_AMX_LEFT
#undef PYOPS_AMX_RIGHT

// c[j] (+)= left * right[j] for `panels` panels, right_panel elements apart: c holds 32x32 float blocks. The depth is
// cut so that the left blocks of a cut (24 KB) stay in L1 while the panels stream from L2: 1.5x over one pass per
// panel. finish(j) is called as soon as c[j] is complete: what it stores drains behind the products of the next panel.
template <int P, int Left = P, class Finish>
inline void multiply_row(const Bf16* left, int64_t left_piece, const Bf16* right, int64_t right_panel,
                         int64_t right_piece, int64_t blocks, int64_t panels, float* c, bool add,
                         const Finish& finish) {
    const int64_t cuts = (blocks * Left + 11) / 12;
    for (int64_t cut = 0; cut < cuts; ++cut) {
        const int64_t k0 = blocks * cut / cuts, k1 = blocks * (cut + 1) / cuts;
        for (int64_t j = 0; j < panels; ++j) {
            if (add || cut > 0)
                load_accumulator(c + j * 1024);
            else
                zero_accumulator();
            accumulate<P, Left>(left + k0 * kBlockSize, left_piece, right + j * right_panel + k0 * kBlockSize,
                                right_piece, k1 - k0);
            store_accumulator(c + j * 1024);
            if (cut + 1 == cuts) finish(j);
        }
    }
}

// Transposes a tile seen as 16x16 dwords. The 128-bit columns are gathered by masked broadcasts from memory, which
// leaves the shuffle port the two unpack stages only.
inline void transpose_tile(const Bf16* source, Bf16* target) {
    const auto* s = reinterpret_cast<const char*>(source);
    __m512i r[16];
#pragma GCC unroll 4
    for (int column = 0; column < 4; ++column) {
#pragma GCC unroll 4
        for (int row = 0; row < 4; ++row) {
            const char* p = s + row * 64 + column * 16;
            __m512i v = _mm512_castsi128_si512(_mm_load_si128(reinterpret_cast<const __m128i*>(p)));
            v = _mm512_mask_broadcast_i32x4(v, 0x00f0, _mm_load_si128(reinterpret_cast<const __m128i*>(p + 256)));
            v = _mm512_mask_broadcast_i32x4(v, 0x0f00, _mm_load_si128(reinterpret_cast<const __m128i*>(p + 512)));
            v = _mm512_mask_broadcast_i32x4(v, 0xf000, _mm_load_si128(reinterpret_cast<const __m128i*>(p + 768)));
            r[column * 4 + row] = v;  // lane l: row (row + 4 l), dwords 4 column ..
        }
    }
#pragma GCC unroll 4
    for (int column = 0; column < 4; ++column) {
        const __m512i a = r[column * 4], b = r[column * 4 + 1], c = r[column * 4 + 2], d = r[column * 4 + 3];
        const __m512i ab0 = _mm512_unpacklo_epi32(a, b), ab1 = _mm512_unpackhi_epi32(a, b);
        const __m512i cd0 = _mm512_unpacklo_epi32(c, d), cd1 = _mm512_unpackhi_epi32(c, d);
        __m512i* t = reinterpret_cast<__m512i*>(target) + column * 4;
        _mm512_store_si512(t, _mm512_unpacklo_epi64(ab0, cd0));
        _mm512_store_si512(t + 1, _mm512_unpackhi_epi64(ab0, cd0));
        _mm512_store_si512(t + 2, _mm512_unpacklo_epi64(ab1, cd1));
        _mm512_store_si512(t + 3, _mm512_unpackhi_epi64(ab1, cd1));
    }
}

// A block in left layout (32 rows x 32 columns) to the same block in right layout.
inline void left_to_right(const Bf16* left, Bf16* right) {
    alignas(64) static constexpr uint16_t index[2][32] = {
        {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
         8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47},
        {16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55,
         24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63}};
    const __m512i low = _mm512_load_si512(index[0]), high = _mm512_load_si512(index[1]);
    for (int p = 0; p < 16; ++p) {
        const __m512i row0 = _mm512_load_si512(left + 64 * p), row1 = _mm512_load_si512(left + 64 * p + 32);
        _mm512_store_si512(right + 32 * p, _mm512_permutex2var_epi16(row0, low, row1));
        _mm512_store_si512(right + kTile + 32 * p, _mm512_permutex2var_epi16(row0, high, row1));
    }
}

// 16 bf16 widened; `half` picks which of the 32 in a left-layout row.
inline __m512 widen(__m512i row, int half) {
    const __m256i h = half ? _mm512_extracti64x4_epi64(row, 1) : _mm512_castsi512_si256(row);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16));
}

// Even and odd rows of a right-layout row of 16 pairs.
inline __m512 widen_even(__m512i pairs) { return _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)); }
inline __m512 widen_odd(__m512i pairs) {
    return _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
}

// 32 floats (a: columns 0..15, b: 16..31) rounded to a left-layout row.
inline __m512i narrow(__m512 a, __m512 b) { return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(b, a)); }

// Rows 2p and 2p+1, 16 columns, rounded to a right-layout row of pairs.
inline __m512i narrow_pairs(__m512 even, __m512 odd) {
    alignas(64) static constexpr uint16_t index[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                       8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    return _mm512_permutexvar_epi16(_mm512_load_si512(index),
                                    reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(odd, even)));
}

// Rounds 32 floats into `pieces` bf16 pieces, left layout, `stride` elements apart.
inline void store_pieces(__m512 a, __m512 b, Bf16* target, int64_t stride, int pieces) {
    for (int p = 0;;) {
        const __m512i row = narrow(a, b);
        _mm512_store_si512(target, row);
        if (++p == pieces) return;
        a = _mm512_sub_ps(a, widen(row, 0));
        b = _mm512_sub_ps(b, widen(row, 1));
        target += stride;
    }
}

// Transposes a 32x32 float block in place.
inline void transpose_floats(float* c) {
    alignas(64) float t[1024];
    for (int i = 0; i < 2; ++i)
        for (int j = 0; j < 2; ++j) {
            alignas(64) float tile[256];
            for (int r = 0; r < 16; ++r) _mm512_store_ps(tile + 16 * r, _mm512_load_ps(c + (16 * i + r) * 32 + 16 * j));
            transpose_tile(reinterpret_cast<const Bf16*>(tile), reinterpret_cast<Bf16*>(tile));
            for (int r = 0; r < 16; ++r) _mm512_store_ps(t + (16 * j + r) * 32 + 16 * i, _mm512_load_ps(tile + 16 * r));
        }
    for (int r = 0; r < 64; ++r) _mm512_store_ps(c + 16 * r, _mm512_load_ps(t + 16 * r));
}

}  // namespace pyops::PYOPS_ISA::amx

#pragma GCC pop_options

#endif  // __AVX512F__
