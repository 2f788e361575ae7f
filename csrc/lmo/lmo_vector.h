// The products of the spectral iteration in float32 or float64 vectors (see lmo.h for the mathematics, common/gemm.h
// for the inner kernel). The interface is AmxEngine's.
//
// X is kept as Y = X^T, row-major m x n: then R = Y^T Y, the products of symmetric matrices D = L^T R, and the update
// Y <- alpha Y + Y Z all read whole rows, and no operand is ever transposed. Symmetric results are computed in tiles
// that reach the lower triangle and stored with their mirror: n^2 m and n^3 multiply-adds instead of twice that.
// Left operands are packed by the team, kChunk rows at a time; right panels by the thread that uses them, each 32 KB,
// to stay in L1 while the left tiles pass; the update packs kGroup rows of Y at a time, which share each panel of Z.
#pragma once

#include <algorithm>
#include <numeric>

#include "common/gemm.h"
#include "common/team.h"

namespace pyops::PYOPS_ISA {

template <class T>
class VectorEngine {
  public:
    using Scalar = T;
    struct Symmetric {
        T* data = nullptr;                                // row-major, n x stride_
        Symmetric factor_only() const { return {data}; }  // for the engine that keeps more for use as a summand
    };
    static int64_t longest_segment(int64_t start, int64_t /*steps*/) { return start == 0 ? 3 : 2; }
    static constexpr double kGrowthLimit = 1e9;
    static constexpr int kMr = Gemm<T>::kMr, kNr = Gemm<T>::kNr;
    static constexpr int64_t kChunk = 24576 / (kNr * static_cast<int64_t>(sizeof(T)));  // a panel of it stays in L1
    static constexpr int64_t kGroup = 96, kTiles = kGroup / kMr;
    static_assert(kGroup % kMr == 0 && kGroup % 32 == 0);

    VectorEngine(int64_t n, int64_t m, int team_size, char* arena) : VectorEngine(n, m) {
        char* p = arena;
        const auto take = [&p](int64_t elements) {
            char* r = p;
            p += (elements * static_cast<int64_t>(sizeof(T)) + 63) / 64 * 64;
            return reinterpret_cast<T*>(r);
        };
        y_ = take(padded_m_ * stride_);
        Symmetric* matrices[] = {&gram, &z, &rz, &q[0], &q[1]};
        for (Symmetric* s : matrices) s->data = take(n_ * stride_);
        left_ = take(tiles_ * kMr * kChunk);
        partial_ = take(partial_elements());
        panels_ = take(panel_elements() * team_size);
        z_panels_ = take(panels_count_ * n_ * kNr);
        sums_ = reinterpret_cast<double*>(take(panels_count_ * 8 / static_cast<int64_t>(sizeof(T))));
    }

    static int64_t arena_bytes(int64_t n, int64_t m, int team_size) {
        const VectorEngine e(n, m);
        return static_cast<int64_t>(sizeof(T)) *
                   (e.padded_m_ * e.stride_ + 5 * n * e.stride_ + e.tiles_ * kMr * kChunk + e.partial_elements() +
                    e.panel_elements() * team_size + e.panels_count_ * n * kNr) +
               8 * e.panels_count_ + 64 * 16;
    }

    Symmetric gram, z, rz, q[2];

    int64_t block_rows() const { return (n_ + 31) / 32; }
    int64_t block_cols() const { return (m_ + 31) / 32; }

    // Stores the 32 x 32 block (i, j) of X, read with row stride `ld`. Every block is stored once before use, zeros
    // beyond the matrix included.
    void store_block(int64_t i, int64_t j, const T* c, int64_t ld) {
        T* t = y_ + 32 * j * stride_ + 32 * i;
        for (int col = 0; col < 32; ++col)
            for (int row = 0; row < 32; ++row) t[col * stride_ + row] = c[row * ld + col];
    }

    void load_block(int64_t i, int64_t j, T* c) const {
        const T* s = y_ + 32 * j * stride_ + 32 * i;
        for (int row = 0; row < 32; ++row)
            for (int col = 0; col < 32; ++col) c[row * 32 + col] = s[col * stride_ + row];
    }

    enum class Sum { None, Squares, Idempotency };
    struct Combination {
        Symmetric out{};
        Symmetric left{}, right{};
        T c = 1, c_right = 0, c_left = 0;
        Sum sum = Sum::None;
    };

    void gram_matrix(const Team& team, const Symmetric& out, Sum sum) {
        symmetric(team, y_, y_, m_, {.out = out, .sum = sum});
    }
    void product(const Team& team, const Combination& e) { symmetric(team, e.left.data, e.right.data, n_, e); }
    double sum() const { return std::accumulate(sums_, sums_ + panels_count_, 0.0); }

    template <class Sink>
    void update(const Team& team, const Symmetric& z, T alpha, bool /*keep*/, Sink* sink) {
        for (int64_t j = team.begin(panels_count_); j < team.end(panels_count_); ++j)
            pack<kNr>(z.data, 0, n_, j * kNr, z_panels_ + j * n_ * kNr);
        team.wait();
        alignas(64) T c[kGroup * kNr], block[1024];
        T* rows = panels_ + team.rank * panel_elements();
        const int64_t groups = padded_m_ / kGroup;
        for (int64_t g = team.begin(groups); g < team.end(groups); ++g) {
            T* y = y_ + g * kGroup * stride_;
            for (int64_t t = 0; t < kTiles; ++t)
                for (int64_t k = 0; k < n_; ++k)
                    for (int r = 0; r < kMr; ++r) rows[(t * n_ + k) * kMr + r] = y[(t * kMr + r) * stride_ + k];
            for (int64_t j = 0; j < panels_count_; ++j) {
                const T* panel = z_panels_ + j * n_ * kNr;
                for (int64_t k = 0; k < n_; k += kChunk)
                    for (int64_t t = 0; t < kTiles; ++t)
                        Gemm<T>::multiply(std::min(kChunk, n_ - k), rows + (t * n_ + k) * kMr, panel + k * kNr,
                                          c + t * kMr * kNr, k > 0);
                const int64_t width = std::min<int64_t>(kNr, n_ - j * kNr);
                for (int64_t r = 0; r < kGroup; ++r) {
                    T* target = y + r * stride_ + j * kNr;
                    for (int64_t i = 0; i < width; ++i) target[i] = alpha * target[i] + c[r * kNr + i];
                }
            }
            if (sink)
                for (int64_t j = g * (kGroup / 32); j < std::min((g + 1) * (kGroup / 32), block_cols()); ++j)
                    for (int64_t i = 0; i < block_rows(); ++i) {
                        load_block(i, j, block);
                        sink->block(i, j, block);
                    }
        }
    }

  private:
    VectorEngine(int64_t n, int64_t m) : n_(n), m_(m) {
        // An odd number of cache lines, so that a column of a packed panel does not fall into a few sets of the cache.
        stride_ = (n + 31) / 32 * 32 + 64 / static_cast<int64_t>(sizeof(T));
        padded_m_ = (m + kGroup - 1) / kGroup * kGroup;
        tiles_ = (n + kMr - 1) / kMr;
        panels_count_ = (n + kNr - 1) / kNr;
    }
    int64_t panel_elements() const { return std::max(kGroup * n_, kChunk * kNr); }
    int64_t partial_elements() const { return std::max(n_, m_) > kChunk ? tiles_ * panels_count_ * kMr * kNr : 0; }

    // Rows [k0, k1) and columns [column, column + W) of a row-major matrix, zeros beyond n.
    template <int W>
    void pack(const T* source, int64_t k0, int64_t k1, int64_t column, T* target) const {
        const int64_t width = std::min<int64_t>(W, n_ - column);
        for (int64_t k = k0; k < k1; ++k, target += W) {
            const T* s = source + k * stride_ + column;
            if (width == W)
                std::memcpy(target, s, W * sizeof(T));
            else
                for (int i = 0; i < W; ++i) target[i] = i < width ? s[i] : T(0);
        }
    }

    // out = combination of sum_k left[k][.] right[k][.]^T
    void symmetric(const Team& team, const T* left, const T* right, int64_t depth, const Combination& e) {
        alignas(64) T c[kMr * kNr];
        T* panel = panels_ + team.rank * panel_elements();
        for (int64_t k0 = 0; k0 < depth; k0 += kChunk) {
            const int64_t k1 = std::min(k0 + kChunk, depth);
            const bool first = k0 == 0, last = k1 == depth;
            for (int64_t i = team.begin(tiles_); i < team.end(tiles_); ++i)
                pack<kMr>(left, k0, k1, i * kMr, left_ + i * kMr * kChunk);
            team.wait();
            for (int64_t j = 0; j < panels_count_; ++j) {
                const int64_t turn = j / team.size, seat = j % team.size;
                if ((turn % 2 ? team.size - 1 - seat : seat) != team.rank) continue;
                pack<kNr>(right, k0, k1, j * kNr, panel);
                double sum = 0;
                for (int64_t i = j * kNr / kMr; i < tiles_; ++i) {
                    T* partial = partial_ + (j * tiles_ + i) * kMr * kNr;
                    T* target = first && last ? c : partial;
                    Gemm<T>::multiply(k1 - k0, left_ + i * kMr * kChunk, panel, target, !first);
                    if (last) sum += finish(e, target, i * kMr, j * kNr);
                }
                sums_[j] = sum;
            }
            team.wait();
        }
    }

    double finish(const Combination& e, T* c, int64_t i0, int64_t j0) {
        const int64_t i1 = std::min(i0 + kMr, n_), j1 = std::min<int64_t>(j0 + kNr, n_);
        double sum = 0;
        for (int64_t i = i0; i < i1; ++i) {
            T* row = c + (i - i0) * kNr - j0;
            const int64_t end = std::min(j1, i + 1);
            if (e.sum == Sum::Idempotency) {
                T squares = 0;
                const T* a = e.right.data + i * stride_;
                for (int64_t j = j0; j < end; ++j) squares += (i == j ? 1 : 2) * (row[j] - a[j]) * (row[j] - a[j]);
                sum += static_cast<double>(squares);
            }
            for (int64_t j = j0; j < end; ++j) row[j] *= e.c;
            if (e.c_right != 0)
                for (int64_t j = j0; j < end; ++j) row[j] += e.c_right * e.right.data[i * stride_ + j];
            if (e.c_left != 0)
                for (int64_t j = j0; j < end; ++j) row[j] += e.c_left * e.left.data[i * stride_ + j];
            if (e.sum == Sum::Squares) {
                T squares = 0;
                for (int64_t j = j0; j < end; ++j) squares += (i == j ? 1 : 2) * row[j] * row[j];
                sum += static_cast<double>(squares);
            }
        }
        T* out = e.out.data;
        if (!out) return sum;
        for (int64_t i = i0; i < i1; ++i)
            for (int64_t j = j0; j < std::min(j1, i + 1); ++j) out[i * stride_ + j] = c[(i - i0) * kNr + j - j0];
        for (int64_t j = j0; j < j1; ++j)
            for (int64_t i = std::max(i0, j + 1); i < i1; ++i) out[j * stride_ + i] = c[(i - i0) * kNr + j - j0];
        return sum;
    }

    int64_t n_, m_, stride_ = 0, padded_m_ = 0, tiles_ = 0, panels_count_ = 0;
    T *y_ = nullptr, *left_ = nullptr, *partial_ = nullptr, *panels_ = nullptr, *z_panels_ = nullptr;
    double* sums_ = nullptr;
};

}  // namespace pyops::PYOPS_ISA
