// The products of a chunk on AMX tiles: operands are rounded to bf16 as they are packed, or for a precise product to
// the sum of two bf16 (three products then, 16 bits; two where the left operand is exact in bf16); sums are float32.
//
// Per 32 x 32 x 32 step 64 cycles of products against 16 + 16 rows of conversions, which the other row and column
// blocks of the product share. Two rows of the right operand are interleaved into pairs; a left operand that is given
// by columns is packed like a right one and then transposed tile by tile (common/amx.h has the layouts).
#pragma once

#include "common/amx.h"
#include "linear_attention/linear_attention_rows.h"

#if defined(__AVX512F__)

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,amx-tile,amx-bf16")

namespace pyops::PYOPS_ISA {

class AmxProducts {
  public:
    using Scalar = float;
    static constexpr bool kLowPrecision = true;
    using Operands = SmallGemm<float>::Operands;

    // For products of up to `side`, keys and values in each direction.
    AmxProducts(int64_t side, int64_t keys, int64_t values, Pieces& pieces) {
        const int64_t blocks = (std::max({side, keys, values}) + 31) / 32;
        left_piece_ = blocks * amx::kBlockSize;
        right_piece_ = blocks * left_piece_;
        left_ = pieces.take<amx::Bf16>(2 * left_piece_);
        right_ = pieces.take<amx::Bf16>(2 * right_piece_);
        sums_ = pieces.take<float>(blocks * 1024);
    }

    // The right operand given by columns, b(k, j) = o.b[j * o.ldb + k], of which there are n.
    void multiply_by_columns(int64_t m, int64_t n, int64_t k, const Operands& o) {
        const int64_t kb = (k + 31) / 32, nb = (n + 31) / 32;
        alignas(64) amx::Bf16 rows[amx::kTile];
        for (int64_t p = 0; p < kb; ++p)
            for (int64_t h = 0; h < 2 * nb; ++h) {
                const float* source = o.b + 16 * h * o.ldb + 32 * p;
                const __mmask16 low = first_lanes(k - 32 * p), high = first_lanes(k - 32 * p - 16);
                for (int64_t r = 0; r < 16; ++r) {
                    const bool inside = 16 * h + r < n;
                    const float* s = source + r * o.ldb;
                    const __m512 x = _mm512_maskz_loadu_ps(inside ? low : 0, s);
                    const __m512 y = _mm512_maskz_loadu_ps(inside ? high : 0, s + 16);
                    _mm512_store_si512(rows + 32 * r, amx::narrow(x, y));
                }
                amx::transpose_tile(rows, right_ + (h / 2 * kb + p) * amx::kBlockSize + h % 2 * amx::kTile);
            }
        products<1, 1>(m, n, k, o);
    }

    void multiply(int64_t m, int64_t n, int64_t k, const Operands& o) {
        if (!o.precise) return multiply<1, 1>(m, n, k, o);
        o.exact_left ? multiply<2, 1>(m, n, k, o) : multiply<2, 2>(m, n, k, o);
    }

    Prefetch prefetch;

  private:
    template <int P, int Left>
    void multiply(int64_t m, int64_t n, int64_t k, const Operands& o) {
        const int64_t kb = (k + 31) / 32, nb = (n + 31) / 32;
        for (int64_t p = 0; p < kb; ++p)
            for (int64_t h = 0; h < 2 * nb; ++h)
                pack_pairs<P>(o.b + 32 * p * o.ldb + 16 * h, o.ldb, std::min<int64_t>(32, k - 32 * p), n - 16 * h,
                              right_ + (h / 2 * kb + p) * amx::kBlockSize + h % 2 * amx::kTile, right_piece_);
        products<P, Left>(m, n, k, o);
    }

    // With the packed right operand.
    template <int P, int Left>
    void products(int64_t m, int64_t n, int64_t k, const Operands& o) {
        const int64_t kb = (k + 31) / 32, nb = (n + 31) / 32;
        for (int64_t i = 0; i * 32 < m; ++i) {
            const int64_t rows = std::min<int64_t>(32, m - 32 * i);
            const int64_t first = o.shape == Shape::UpperLeft ? i : 0;
            const int64_t last = o.shape == Shape::LowerLeft ? std::min(kb, i + 1) : kb;
            const int64_t panels = o.shape == Shape::LowerResult ? std::min(nb, i + 1) : nb;
            for (int64_t p = first; p < last; ++p)
                pack_left<Left>(o.a + 32 * i * o.ai + 32 * p * o.ak, o.ai, o.ak, rows,
                                std::min<int64_t>(32, k - 32 * p), left_ + p * amx::kBlockSize);
            amx::multiply_row<P, Left>(left_ + first * amx::kBlockSize, left_piece_, right_ + first * amx::kBlockSize,
                                       kb * amx::kBlockSize, right_piece_, last - first, panels, sums_, false,
                                       [&](int64_t j) { finish(o, 32 * i, rows, 32 * j, n); });
        }
    }

    static __mmask16 first_lanes(int64_t count) {
        return static_cast<__mmask16>(count >= 16 ? 0xffff : count <= 0 ? 0 : (1 << count) - 1);
    }

    // Adds r D to a block of sums and stores it.
    void finish(const Operands& o, int64_t i0, int64_t rows, int64_t j0, int64_t n) {
        prefetch.some();
        const int64_t width = std::min<int64_t>(32, n - j0);
        const float* sums = sums_ + j0 / 32 * 1024;
        for (int64_t r = 0; r < rows; ++r) {
            float* c = o.c + (i0 + r) * o.ldc + j0;
            const float* d = o.add ? o.add + (i0 + r) * o.ldc + j0 : c;
            const __m512 factor = _mm512_set1_ps(o.r ? o.r[(i0 + r) * o.r_step] : 0.0f);
            for (int64_t j = 0; j < width; j += 16) {
                __m512 sum = _mm512_load_ps(sums + 32 * r + j);
                if (o.r) sum = _mm512_fmadd_ps(factor, _mm512_loadu_ps(d + j), sum);
                _mm512_storeu_ps(c + j, sum);
            }
        }
    }

    // A tile of pairs, in P pieces: `rows` rows (up to 32) of 16 floats, zeros below; all zeros if no column is left.
    template <int P>
    static void pack_pairs(const float* source, int64_t ld, int64_t rows, int64_t columns, amx::Bf16* tile,
                           int64_t piece) {
        int64_t p = 0;
        if (columns > 0)
            for (; 2 * p < rows; ++p) {
                __m512 even = _mm512_loadu_ps(source + 2 * p * ld);
                __m512 odd = 2 * p + 1 < rows ? _mm512_loadu_ps(source + (2 * p + 1) * ld) : _mm512_setzero_ps();
                const __m512i pairs = amx::narrow_pairs(even, odd);
                _mm512_store_si512(tile + 32 * p, pairs);
                if constexpr (P == 2) {
                    even = _mm512_sub_ps(even, amx::widen_even(pairs));
                    odd = _mm512_sub_ps(odd, amx::widen_odd(pairs));
                    _mm512_store_si512(tile + piece + 32 * p, amx::narrow_pairs(even, odd));
                }
            }
        for (; p < 16; ++p)
            for (int s = 0; s < P; ++s) _mm512_store_si512(tile + s * piece + 32 * p, _mm512_setzero_si512());
    }

    // A block in left layout. Rows beyond `rows` give rows of the product that nobody reads; columns beyond `columns`
    // are zeros.
    template <int P>
    void pack_left(const float* source, int64_t row_step, int64_t column_step, int64_t rows, int64_t columns,
                   amx::Bf16* block) const {
        if (column_step == 1) {
            const __mmask16 low = first_lanes(columns), high = first_lanes(columns - 16);
            for (int64_t r = 0; r < rows; ++r) {
                const float* s = source + r * row_step;
                amx::store_pieces(_mm512_maskz_loadu_ps(low, s), _mm512_maskz_loadu_ps(high, s + 16), block + 32 * r,
                                  left_piece_, P);
            }
            return;
        }
        alignas(64) amx::Bf16 pairs[P * amx::kTile];
        for (int64_t h = 0; 16 * h < rows; ++h) {
            pack_pairs<P>(source + 16 * h, column_step, columns, 1, pairs, amx::kTile);
            for (int s = 0; s < P; ++s)
                amx::transpose_tile(pairs + s * amx::kTile, block + s * left_piece_ + h * amx::kTile);
        }
    }

    amx::TileScope tiles_;
    int64_t left_piece_, right_piece_;
    amx::Bf16 *left_, *right_;
    float* sums_;
};

}  // namespace pyops::PYOPS_ISA

#pragma GCC pop_options

#endif  // __AVX512F__
