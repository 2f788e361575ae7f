// The products of the spectral iteration on AMX tiles (see lmo.h for the mathematics, common/amx.h for the layouts).
//
// Gram matrix, R = X X^T (n x m, n <= m): only blocks I >= J are computed, each stored with its mirror. Matrices have
// the left layout alone. The right operand is made by transposing tiles, for a stripe of up to kStripe panels (256 rows
// of X) and a chunk of columns at a time, and used by up to kRows row blocks: it and their float32 partial sums, 1 MB
// each at most, stay in the L2 of the thread that makes and uses them. Threads share no scratch memory and never wait:
// making a chunk together costs a barrier and the transfer of half of it between caches.
//   n^2 m multiply-adds (half of the full product), per 32x32x32 step 64 cycles; a block is transposed for n/64 steps.
// Symmetric product, D = c L R + c_r R + c_l L of commuting symmetric matrices: the same with m = n, and the polynomial
//   as the epilogue. To store right layouts too would cost more than to transpose: results are written to be read by
//   other threads.  n^3 multiply-adds.
// Diagonals are kept apart, in float32: near convergence R is close to the identity and the factors close to multiples
//   of it, so rounding their diagonals to bf16 would be the largest error of all (3x on Gaussian input). The stored
//   off-diagonal parts L', R' give L R = L' R' + d_L R' + L' d_R + d_L d_R: two more terms of the epilogue.
// Update, X <- alpha X + Z X, in place: each thread owns a range of column panels and walks it in groups of up to
//   kPanels whose right-layout copy (up to 1 MB) stays in L2; the last update hands float32 blocks to the sink, which
//   writes the weights.  2 n^2 m multiply-adds.
// In bf16, what rounding takes off R, Z, Q and R Z is kept for their use as summands (not as factors): the error of the
//   small eigenvalues of R then is relative to themselves instead of to |R|.
// Bytes from L3, where X exceeds L2: a Gram matrix reads P pieces of X (2 n m bytes each) n/512 + 1/2 times, a product
// its operands likewise; an update reads P pieces of X and, for each group, of Z, then writes what is stored of X.
#pragma once

#include "common/amx.h"

#if defined(__AVX512F__)

#include <algorithm>

#include "common/team.h"

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,amx-tile,amx-bf16")

namespace pyops::PYOPS_ISA {

template <int P>
class AmxEngine {
  public:
    using Scalar = float;
    using Bf16 = amx::Bf16;
    struct Symmetric {
        Bf16* data = nullptr;  // left layout, without the diagonal; P pieces, piece_ elements apart
        float* diagonal = nullptr;
        Bf16* low = nullptr;  // bf16 only: what rounding took off, blocks I >= J; for use as a summand
        Symmetric factor_only() const { return {data, diagonal, nullptr}; }
    };
    // Pieces of X that are stored; products use P of them. The second one that bf16 carries keeps the rounding of X out
    // of alpha X, where the slopes a_j of the later steps would amplify it at small singular values (10x in the error
    // of rank-deficient input, for 2 n m bytes per update).
    static constexpr int kStored = P == 1 ? 2 : P;
    // Steps of the Gram form between two formations of X, and how far an update of R may multiply its errors. In bf16
    // many steps reach far below the rounding of R, and 150 lets three steps of slope 3.5 pass, but not of slope 4 (u =
    // 2^-9).
    static int64_t longest_segment(int64_t start, int64_t steps) {
        if (P > 1) return start == 0 ? 3 : 2;
        return start < 2 && steps > 6 ? 1 : 2;
    }
    static constexpr double kGrowthLimit = P == 1 ? 150 : 1e9;
    static constexpr int64_t kPanels = 16, kStripe = 8, kRows = 32, kMatrices = 5;
    static constexpr bool kLow = P == 1;

    // Carves its buffers from `arena` (of arena_bytes()); `team_size` threads will call the members together.
    AmxEngine(int64_t n, int64_t m, int team_size, char* arena) : n_(n), m_(m) {
        set_sizes();
        char* p = arena;
        const auto take = [&p](int64_t bytes) {
            char* r = p;
            p += (bytes + 63) / 64 * 64;
            return r;
        };
        x_ = reinterpret_cast<Bf16*>(take(kStored * x_piece_ * 2));
        scratch_ = take(scratch_bytes() * team_size);
        sums_ = reinterpret_cast<double*>(take(nb_ * nb_ * 8));
        Symmetric* matrices[kMatrices] = {&gram, &z, &rz, &q[0], &q[1]};
        for (Symmetric* s : matrices)
            *s = {reinterpret_cast<Bf16*>(take(P * piece_ * 2)), reinterpret_cast<float*>(take(nb_ * 32 * 4)),
                  kLow ? reinterpret_cast<Bf16*>(take(piece_ * 2)) : nullptr};
    }

    static int64_t arena_bytes(int64_t n, int64_t m, int team_size) {
        AmxEngine e(n, m);
        return kStored * e.x_piece_ * 2 + e.scratch_bytes() * team_size + e.nb_ * e.nb_ * 8 +
               kMatrices * ((P + kLow) * e.piece_ * 2 + e.nb_ * 32 * 4) + 64 * 24;
    }

    // The matrices of the iteration. Q is kept without its multiple of the identity, so after a segment's first step it
    // is that step's Z.
    Symmetric gram, z, rz, q[2];

    int64_t block_rows() const { return nb_; }
    int64_t block_cols() const { return mb_; }

    // Stores the 32 x 32 float block (i, j) of X, read with row stride `ld`.
    void store_block(int64_t i, int64_t j, const float* c, int64_t ld) {
        Bf16* t = x_ + (i * mb_ + j) * amx::kBlockSize;
        for (int r = 0; r < 32; ++r)
            amx::store_pieces(_mm512_loadu_ps(c + ld * r), _mm512_loadu_ps(c + ld * r + 16), t + 32 * r, x_piece_,
                              kStored);
    }

    void load_block(int64_t i, int64_t j, float* c) const {
        const Bf16* s = x_ + (i * mb_ + j) * amx::kBlockSize;
        for (int r = 0; r < 32; ++r) {
            __m512 a = _mm512_setzero_ps(), b = a;
            for (int p = 0; p < kStored; ++p) {
                const __m512i row = _mm512_load_si512(s + p * x_piece_ + 32 * r);
                a = _mm512_add_ps(a, amx::widen(row, 0));
                b = _mm512_add_ps(b, amx::widen(row, 1));
            }
            _mm512_storeu_ps(c + 32 * r, a);
            _mm512_storeu_ps(c + 32 * r + 16, b);
        }
    }

    enum class Sum { None, Squares, Idempotency };

    // out = c * left * right + c_right * right + c_left * left
    struct Combination {
        Symmetric out{};
        Symmetric left{}, right{};
        float c = 1, c_right = 0, c_left = 0;
        Sum sum = Sum::None;  // of out^2, or of (left * right - right)^2
    };

    // out = X X^T
    void gram_matrix(const Team& team, const Symmetric& out, Sum sum) {
        symmetric(team, x_, x_, x_piece_, mb_, {.out = out, .sum = sum});
    }

    void product(const Team& team, const Combination& e) { symmetric(team, e.left.data, e.right.data, piece_, nb_, e); }

    // The sum asked for by the last product, in a fixed order; valid on every member after a wait.
    double sum() const {
        double s = 0;
        for (int64_t i = 0; i < nb_; ++i)
            for (int64_t j = 0; j <= i; ++j) s += (i == j ? 1 : 2) * sums_[i * nb_ + j];
        return s;
    }

    // X <- alpha X + left X, stored if `keep`; with a sink, each float block (i, j) goes to sink->block(i, j, c) as
    // well.
    template <class Sink>
    void update(const Team& team, const Symmetric& left, float alpha, bool keep, Sink* sink) {
        const amx::TileScope tiles;
        alignas(64) float rows[kPanels * 1024];
        auto* panels = reinterpret_cast<Bf16*>(scratch_ + team.rank * scratch_bytes());
        const int64_t begin = team.begin(mb_), mine = team.end(mb_) - begin;
        const int64_t groups = (mine + group_panels() - 1) / group_panels();
        for (int64_t group = 0; group < groups; ++group) {
            const int64_t j0 = begin + mine * group / groups, j1 = begin + mine * (group + 1) / groups;
            const int64_t panel_piece = group_panels() * nb_ * amx::kBlockSize;
            for (int64_t k = 0; k < nb_; ++k)
                for (int64_t j = j0; j < j1; ++j)
                    for (int p = 0; p < P; ++p)
                        amx::left_to_right(x_ + p * x_piece_ + (k * mb_ + j) * amx::kBlockSize,
                                           panels + p * panel_piece + ((j - j0) * nb_ + k) * amx::kBlockSize);
            for (int64_t i = 0; i < nb_; ++i) {
                amx::multiply_row<P>(left.data + i * nb_ * amx::kBlockSize, piece_, panels, nb_ * amx::kBlockSize,
                                     panel_piece, nb_, j1 - j0, rows, false, [&](int64_t j) {
                                         float* c = rows + j * 1024;
                                         finish_update(x_ + (i * mb_ + j0 + j) * amx::kBlockSize,
                                                       panels + (j * nb_ + i) * amx::kBlockSize, panel_piece, c, alpha,
                                                       left.diagonal + 32 * i, keep, sink != nullptr);
                                         if (sink) sink->block(i, j0 + j, c);
                                     });
            }
        }
    }

  private:
    AmxEngine(int64_t n, int64_t m) : n_(n), m_(m) { set_sizes(); }

    void set_sizes() {
        nb_ = (n_ + 31) / 32;
        mb_ = (m_ + 31) / 32;
        x_piece_ = nb_ * mb_ * amx::kBlockSize;
        piece_ = nb_ * nb_ * amx::kBlockSize;
    }
    // Block columns of a symmetric product handled at a time: all while a stripe's right operand is at most 1 MB, else
    // as many as accumulate in tiles at a stretch.
    static int64_t chunk(int64_t blocks) { return blocks * P <= 64 ? blocks : 12 / P; }
    // Panels of a group of the update: up to 1 MB.
    int64_t group_panels() const { return std::clamp<int64_t>(512 / (nb_ * P), 4, kPanels); }
    int64_t panel_elements() const { return P * group_panels() * nb_ * amx::kBlockSize; }
    int64_t built_elements() const { return P * kStripe * std::max(chunk(nb_), chunk(mb_)) * amx::kBlockSize; }
    // Of one member, for one product at a time.
    int64_t scratch_bytes() const {
        return std::max(panel_elements() * 2, built_elements() * 2 + kRows * kStripe * 4096);
    }

    // Whether item i goes to this member: in snake order, since stripes get shorter and rows longer one by one.
    static bool dealt(int64_t i, int64_t members, int64_t member) {
        const int64_t turn = i / members, seat = i % members;
        return (turn % 2 ? members - 1 - seat : seat) == member;
    }

    // out = combination of left * right; both in left layout, `right` as its transpose.
    void symmetric(const Team& team, const Bf16* left, const Bf16* right, int64_t piece, int64_t kb,
                   const Combination& e) {
        const amx::TileScope tiles;
        auto* built = reinterpret_cast<Bf16*>(scratch_ + team.rank * scratch_bytes());
        auto* partial = reinterpret_cast<float*>(built + built_elements());
        const int64_t chunk = this->chunk(kb), built_panel = chunk * amx::kBlockSize;
        const int64_t built_piece = kStripe * built_panel;
        // The team is cut into groups, which are dealt the stripes, and their members the rows of each: with fewer
        // groups every member transposes more, with more groups the stripes are narrow and left operands are read more
        // often.
        int64_t groups = 1;
        while (team.size % (2 * groups) == 0 && 2 * groups * groups <= team.size) groups *= 2;
        const int64_t members = team.size / groups, group = team.rank / members, member = team.rank % members;
        const int64_t unit = groups == 1 ? 1 : 2 * groups,
                      stripes = unit * ((nb_ + unit * kStripe - 1) / (unit * kStripe));
        for (int64_t s = 0; s < stripes; ++s) {
            if (!dealt(s, groups, group)) continue;
            const int64_t j0 = nb_ * s / stripes, j1 = nb_ * (s + 1) / stripes;
            for (int64_t i0 = j0; i0 < nb_ && j0 < j1; i0 += kRows)
                for (int64_t k0 = 0; k0 < kb; k0 += chunk) {
                    const int64_t k1 = std::min(k0 + chunk, kb);
                    for (int64_t j = j0; j < j1; ++j)
                        for (int p = 0; p < P; ++p) {
                            const Bf16* source = right + p * piece + (j * kb + k0) * amx::kBlockSize;
                            Bf16* target = built + p * built_piece + (j - j0) * built_panel;
                            for (int64_t t = 0; t < (k1 - k0) * amx::kBlockSize; t += amx::kTile)
                                amx::transpose_tile(source + t, target + t);
                        }
                    for (int64_t i = i0; i < std::min(i0 + kRows, nb_); ++i) {
                        if (!dealt(i - i0, members, member)) continue;
                        float* c = partial + (chunk < kb ? (i - i0) * kStripe * 1024 : 0);
                        amx::multiply_row<P>(left + (i * kb + k0) * amx::kBlockSize, piece, built, built_panel,
                                             built_piece, k1 - k0, std::min(j1, i + 1) - j0, c, k0 > 0, [&](int64_t j) {
                                                 if (k1 == kb) finish_symmetric(e, c + j * 1024, i, j0 + j);
                                             });
                    }
                }
        }
    }

    // Rows 2r, 2r + 1 of a symmetric matrix's block, widened: the even one in v[0..1], the odd one in v[2..3].
    [[gnu::always_inline]] void load_pair(const Symmetric& s, int64_t i, int64_t j, int r, __m512 v[4]) const {
        for (int t = 0; t < 4; ++t) v[t] = _mm512_setzero_ps();
        for (int p = 0; p < P + kLow; ++p) {
            if (p == P && !s.low) break;
            const Bf16* b = (p < P ? s.data + p * piece_ : s.low) + (i * nb_ + j) * amx::kBlockSize + r * 64;
            for (int t = 0; t < 4; ++t)
                v[t] = _mm512_add_ps(v[t], amx::widen(_mm512_load_si512(b + 32 * (t / 2)), t % 2));
        }
    }

    // The diagonal of the result goes to out.diagonal, and zero takes its place in the block. Returns its share of the
    // sum.
    double finish_diagonal(const Combination& e, float* c, int64_t i) {
        const float* left = e.left.data ? e.left.diagonal + 32 * i : nullptr;
        const float* right = e.left.data ? e.right.diagonal + 32 * i : nullptr;
        double squares = 0;
        for (int r = 0; r < 32; ++r) {
            float v = c[33 * r];
            c[33 * r] = 0;
            if (left) {
                v += left[r] * right[r];
                const double defect = v - right[r];
                if (e.sum == Sum::Idempotency) squares += defect * defect;
                v = e.c * v + e.c_right * right[r] + e.c_left * left[r];
            }
            if (e.sum == Sum::Squares) squares += static_cast<double>(v) * static_cast<double>(v);
            if (e.out.diagonal) e.out.diagonal[32 * i + r] = v;
        }
        return squares;
    }

    // Rows 2r, 2r + 1 of the combination's off-diagonal part in block (i, j), from the accumulated product c. column[]
    // holds the factors of left_ij; squares gathers the sum.
    [[gnu::always_inline]] void combine(const Combination& e, const float* c, int64_t i, int64_t j, int r,
                                        const __m512 column[2], __m512 v[4], __m512& squares) const {
        for (int t = 0; t < 4; ++t) v[t] = _mm512_mul_ps(_mm512_set1_ps(e.c), _mm512_load_ps(c + 64 * r + 16 * t));
        if (e.left.data) {
            __m512 right[4], left[4], row[2];  // row[]: the factors of right_ij
            for (int t = 0; t < 2; ++t) row[t] = _mm512_set1_ps(e.c_right + e.c * e.left.diagonal[32 * i + 2 * r + t]);
            const bool same = e.left.data == e.right.data;
            load_pair(e.right, i, j, r, right);
            if (!same) load_pair(e.left, i, j, r, left);
            for (int t = 0; t < 4; ++t) {
                v[t] = _mm512_fmadd_ps(row[t / 2], right[t], v[t]);
                v[t] = _mm512_fmadd_ps(column[t % 2], same ? right[t] : left[t], v[t]);
            }
            if (e.sum == Sum::Idempotency)  // c = 1, c_right = c_left = 0
                for (int t = 0; t < 4; ++t) {
                    const __m512 d = _mm512_sub_ps(v[t], right[t]);
                    squares = _mm512_fmadd_ps(d, d, squares);
                }
        }
        if (e.sum == Sum::Squares)
            for (int t = 0; t < 4; ++t) squares = _mm512_fmadd_ps(v[t], v[t], squares);
    }

    void finish_symmetric(const Combination& e, float* c, int64_t i, int64_t j) {
        __m512 column[2] = {};
        if (e.left.data)
            for (int t = 0; t < 2; ++t)
                column[t] = _mm512_fmadd_ps(_mm512_set1_ps(e.c), _mm512_loadu_ps(e.right.diagonal + 32 * j + 16 * t),
                                            _mm512_set1_ps(e.c_left));
        __m512 squares = _mm512_setzero_ps(), v[4];
        double diagonal_squares = 0;
        if (i == j) {  // products of commuting matrices are symmetric up to rounding: make the block exactly so
            diagonal_squares = finish_diagonal(e, c, i);
            for (int r = 0; r < 16; ++r) {
                combine(e, c, i, j, r, column, v, squares);
                for (int t = 0; t < 4; ++t) _mm512_store_ps(c + 64 * r + 16 * t, v[t]);
            }
            alignas(64) float mirror[1024];
            std::copy(c, c + 1024, mirror);
            amx::transpose_floats(mirror);
            for (int r = 0; r < 64; ++r)
                _mm512_store_ps(c + 16 * r,
                                _mm512_mul_ps(_mm512_set1_ps(0.5f), _mm512_add_ps(_mm512_load_ps(c + 16 * r),
                                                                                  _mm512_load_ps(mirror + 16 * r))));
        }
        // The block is stored, and its mirror from the same block in right layout, which is what transposing tiles
        // takes.
        alignas(64) Bf16 spare[P][1024], pairs[P][1024];
        Bf16* target[P];
        for (int p = 0; p < P; ++p)
            target[p] = e.out.data ? e.out.data + p * piece_ + (i * nb_ + j) * amx::kBlockSize : spare[p];
        for (int r = 0; r < 16; ++r) {
            if (i == j)
                for (int t = 0; t < 4; ++t) v[t] = _mm512_load_ps(c + 64 * r + 16 * t);
            else
                combine(e, c, i, j, r, column, v, squares);
            for (int p = 0; p < P; ++p) {
                const __m512i low = amx::narrow_pairs(v[0], v[2]), high = amx::narrow_pairs(v[1], v[3]);
                _mm512_store_si512(pairs[p] + 32 * r, low);
                _mm512_store_si512(pairs[p] + amx::kTile + 32 * r, high);
                _mm512_store_si512(target[p] + 64 * r, amx::narrow(v[0], v[1]));
                _mm512_store_si512(target[p] + 64 * r + 32, amx::narrow(v[2], v[3]));
                if (p + 1 == P && !(kLow && e.out.low)) break;
                v[0] = _mm512_sub_ps(v[0], amx::widen_even(low));
                v[1] = _mm512_sub_ps(v[1], amx::widen_even(high));
                v[2] = _mm512_sub_ps(v[2], amx::widen_odd(low));
                v[3] = _mm512_sub_ps(v[3], amx::widen_odd(high));
            }
            if (kLow && e.out.low) {
                Bf16* b = e.out.low + (i * nb_ + j) * amx::kBlockSize + 64 * r;
                _mm512_store_si512(b, amx::narrow(v[0], v[1]));
                _mm512_store_si512(b + 32, amx::narrow(v[2], v[3]));
            }
        }
        if (e.sum != Sum::None) sums_[i * nb_ + j] = _mm512_reduce_add_ps(squares) + diagonal_squares;
        if (i == j || !e.out.data) return;
        for (int p = 0; p < P; ++p)
            for (int64_t h = 0; h < amx::kBlockSize; h += amx::kTile)
                amx::transpose_tile(pairs[p] + h, e.out.data + p * piece_ + (j * nb_ + i) * amx::kBlockSize + h);
    }

    // The pieces of X that were multiplied are read from the panel, which is in L2.
    void finish_update(Bf16* x, const Bf16* panel, int64_t panel_piece, float* c, float alpha, const float* diagonal,
                       bool keep, bool emit) {
        for (int r = 0; r < 16; ++r, c += 64, x += 64, panel += 32) {
            __m512 v[4], scale[2];
            for (int t = 0; t < 4; ++t) v[t] = _mm512_load_ps(c + 16 * t);
            for (int t = 0; t < 2; ++t) scale[t] = _mm512_set1_ps(alpha + diagonal[2 * r + t]);
            for (int p = kStored - 1; p >= 0; --p) {
                __m512 w[4];
                if (p < P) {
                    const __m512i low = _mm512_load_si512(panel + p * panel_piece),
                                  high = _mm512_load_si512(panel + p * panel_piece + amx::kTile);
                    w[0] = amx::widen_even(low), w[1] = amx::widen_even(high);
                    w[2] = amx::widen_odd(low), w[3] = amx::widen_odd(high);
                } else {
                    for (int t = 0; t < 4; ++t)
                        w[t] = amx::widen(_mm512_load_si512(x + p * x_piece_ + 32 * (t / 2)), t % 2);
                }
                for (int t = 0; t < 4; ++t) v[t] = _mm512_fmadd_ps(scale[t / 2], w[t], v[t]);
            }
            if (emit)
                for (int t = 0; t < 4; ++t) _mm512_store_ps(c + 16 * t, v[t]);
            if (keep)
                for (int t = 0; t < 2; ++t) amx::store_pieces(v[2 * t], v[2 * t + 1], x + 32 * t, x_piece_, kStored);
        }
    }

    int64_t n_, m_, nb_ = 0, mb_ = 0, x_piece_ = 0, piece_ = 0;
    Bf16* x_ = nullptr;
    char* scratch_ = nullptr;
    double* sums_ = nullptr;
};

}  // namespace pyops::PYOPS_ISA

#pragma GCC pop_options

#endif  // __AVX512F__
