// Decays inside a chunk, and the decayed Gram matrix with its gradient.
//
// All decays are products of a_t = exp(g_t) over ranges of tokens, multiplied up and never divided: nothing overflows
// that the recurrence would not, g = -inf (a = 0) resets exactly, and no exponential is taken of a difference.
//
//   prefix_i = a_0 ... a_i      suffix_j = a_{j+1} ... a_{c-1}      D_ij = a_{j+1} ... a_i  (i >= j)
//   M_ij = sum_k x_ik y_jk D_ij(k)
//
// Scalar decay: one product, then D elementwise. Vector decay: blocks of 16 tokens. Left of a block's first token n the
// decay is split there, M_ij = sum_k (x_ik D_in)(y_jk D_nj): one product of factors that are both at most 1 in size if
// decays are. Inside a block w = y_j D_ij is multiplied on from row to row. Per token and channel: 8.5 + c/32
// multiply-adds on vectors besides the product.
#pragma once

#include <limits>

#include "common/exp.h"
#include "linear_attention/linear_attention_rows.h"

namespace pyops::PYOPS_ISA {

constexpr int64_t kBlock = 16;

template <class E, Gate G>
class Decay {
  public:
    using T = typename E::Scalar;
    using Gem = SmallGemm<T>;
    using Vector = typename Gem::Vector;
    static constexpr int64_t kLanes = Gem::kLanes;
    static_assert(kBlock % kLanes == 0);

    Decay(E& engine, Pieces& pieces, int64_t chunk, int64_t ld, int64_t keys)
        : engine_(engine), ld_(ld), keys_(keys), columns_(padded(keys, kLanes)), side_(padded(chunk, kBlock)) {
        const int64_t size = G == Gate::None ? 0 : G == Gate::Scalar ? side_ : side_ * ld;
        a_ = pieces.take<T>(size);
        prefix_ = pieces.take<T>(size);
        suffix_ = pieces.take<T>(size);
        if (G == Gate::Scalar) d_ = pieces.take<T>(side_ * side_);
        if (G == Gate::Vector) {
            left_ = pieces.take<T>(kBlock * ld);
            left_decay_ = pieces.take<T>(kBlock * ld);
            right_ = pieces.take<T>(side_ * ld);
            right_decay_ = pieces.take<T>(side_ * ld);
            product_ = pieces.take<T>(side_ * ld);
            transposed_ = pieces.take<T>(side_ * ld);
            sums_ = pieces.take<Vector>(kBlock * kBlock);
        }
    }

    // Reads g of the chunk's c tokens.
    void load(const AttentionView& g, const Place& at, int64_t c) {
        c_ = c;
        if constexpr (G == Gate::Scalar) {
            read_rows<T>(g, offset_of(g, at), g.time, c, 1, T(1), a_, 1);
            for (int64_t i = 0; i < c; ++i) a_[i] = exp_of(a_[i]);
            T p = 1, s = 1;
            for (int64_t i = 0; i < c; ++i) prefix_[i] = p *= a_[i];
            for (int64_t i = c - 1; i >= 0; --i) {
                suffix_[i] = s;
                s *= a_[i];
            }
            for (int64_t j = 0; j < c; j += 2 * kLanes) pairs(j);
        } else if constexpr (G == Gate::Vector) {
            read_rows<T>(g, offset_of(g, at), g.time, c, keys_, T(1), a_, ld_);
            for (int64_t i = 0; i < c * ld_; ++i) a_[i] = exp_of(a_[i]);
            for (int64_t j = 0; j < columns_; j += kLanes) {
                Vector p = T(1) - Vector{}, s = p;
                for (int64_t i = 0; i < c; ++i) Gem::store(prefix_ + i * ld_ + j, p *= Gem::load(a_ + i * ld_ + j));
                for (int64_t i = c - 1; i >= 0; --i) {
                    Gem::store(suffix_ + i * ld_ + j, s);
                    s *= Gem::load(a_ + i * ld_ + j);
                }
            }
        }
    }

    // Whether every product of decays over a range of the chunk is finite.
    bool finite() const {
        if constexpr (G == Gate::None) return true;
        const int64_t columns = G == Gate::Scalar ? 1 : columns_, ld = G == Gate::Scalar ? 1 : ld_;
        for (int64_t j = 0; j < columns; ++j) {
            T growth = 1;
            for (int64_t i = 0; i < c_; ++i) growth *= a_[i * ld + j] <= 1 ? T(1) : a_[i * ld + j];  // NaN stays NaN
            if (!(growth <= std::numeric_limits<T>::max())) return false;
        }
        return true;
    }

    // The factors of token i and channels j..: a, prefix or suffix.
    Vector a(int64_t i, int64_t j) const { return at(a_, i, j); }
    Vector prefix(int64_t i, int64_t j) const { return at(prefix_, i, j); }
    Vector suffix(int64_t i, int64_t j) const { return at(suffix_, i, j); }

    // A factor per row of a product: row i's prefix or suffix (scalar decay), channel k's decay of the whole chunk.
    struct Rows {
        const T* data;
        int64_t step;
    };
    Rows row_prefix() const { return G == Gate::Scalar ? Rows{prefix_, 1} : Rows{&one_, 0}; }
    Rows row_suffix() const { return G == Gate::Scalar ? Rows{suffix_, 1} : Rows{&one_, 0}; }
    Rows total() const {
        if (G == Gate::None) return {&one_, 0};
        return G == Gate::Scalar ? Rows{prefix_ + c_ - 1, 0} : Rows{prefix_ + (c_ - 1) * ld_, 1};
    }
    const T* one() const { return &one_; }

    // m = factor times the decayed Gram matrix of x and y, zero above the diagonal (and on it if `strict`). y_t is y
    // transposed, used by the scalar forms only, and there by engines that do not transpose as they pack.
    void gram(const T* x, const T* y, [[maybe_unused]] const T* y_t, bool strict, T factor, T* m) {
        if constexpr (G == Gate::Vector) {
            gram_blocks(x, y, m);
        } else {
            const int64_t n = padded(c_, kLanes);
            if constexpr (E::kLowPrecision)
                engine_.multiply_by_columns(c_, n, keys_,
                                            {x, ld_, 1, y, ld_, m, side_, nullptr, 0, Shape::LowerResult});
            else
                engine_.multiply(c_, n, keys_, {x, ld_, 1, y_t, side_, m, side_, nullptr, 0, Shape::LowerResult});
        }
        mask(m, strict, factor);
    }

    // Zero above the diagonal (and on it if `strict`), elsewhere times the factor, and times D in the scalar form.
    void mask(T* m, bool strict, T factor) const {
        for (int64_t i = 0; i < c_; ++i) {
            T* __restrict row = m + i * side_;
            const T* __restrict d = d_ + i * side_;
            const int64_t end = i + !strict;
            for (int64_t j = 0; j < side_; ++j) {
                if constexpr (G == Gate::Scalar)
                    row[j] = j < end ? factor * row[j] * d[j] : T(0);
                else
                    row[j] = j < end ? factor * row[j] : T(0);
            }
        }
    }

    // Vector decay: adds the gradients of x and y, given that of m (zero above the diagonal), leaving out the pairs
    // i = j, which no decay touches.
    void gram_backward(const T* dm, const T* x, const T* y, T* dx, T* dy) {
        for (int64_t n = 0; n < c_; n += kBlock) {
            const int64_t end = std::min(n + kBlock, c_);
            if (n > 0) {
                split(x, y, n, end);
                engine_.multiply(end - n, columns_, n, {dm + n * side_, side_, 1, right_, ld_, product_, ld_});
                add_scaled(end - n, product_, left_decay_, dx + n * ld_);
                engine_.multiply(n, columns_, end - n, {dm + n * side_, 1, side_, left_, ld_, product_, ld_});
                add_scaled(n, product_, right_decay_, dy);
            }
            for (int64_t v = 0; v < columns_; v += kLanes)
                for (int64_t j = n; j < end; ++j) {
                    const Vector yj = Gem::load(y + j * ld_ + v);
                    Vector w = T(1) - Vector{}, sum{};
                    for (int64_t i = j + 1; i < end; ++i) {
                        w *= Gem::load(a_ + i * ld_ + v);
                        const Vector s = dm[i * side_ + j] * w;
                        T* t = dx + i * ld_ + v;
                        Gem::store(t, Gem::load(t) + s * yj);
                        sum += s * Gem::load(x + i * ld_ + v);
                    }
                    T* t = dy + j * ld_ + v;
                    Gem::store(t, Gem::load(t) + sum);
                }
        }
    }

    int64_t side() const { return side_; }

  private:
    Vector at(const T* f, int64_t i, int64_t j) const {
        if constexpr (G == Gate::Vector) return Gem::load(f + i * ld_ + j);
        if constexpr (G == Gate::Scalar) return f[i] - Vector{};
        return T(1) - Vector{};
    }

    // left_ = x D_in for the rows n <= i < end, right_ = y D_nj for the rows j < n; calls go up through n.
    void split(const T* x, const T* y, int64_t n, int64_t end) {
        for (int64_t v = 0; v < columns_; v += kLanes) {
            Vector w = T(1) - Vector{};
            for (int64_t i = n; i < end; ++i) {
                if (i > n) w *= Gem::load(a_ + i * ld_ + v);
                Gem::store(left_decay_ + (i - n) * ld_ + v, w);
                Gem::store(left_ + (i - n) * ld_ + v, w * Gem::load(x + i * ld_ + v));
            }
            w = T(1) - Vector{};
            for (int64_t j = n - 1; j >= 0; --j) {
                w *= Gem::load(a_ + (j + 1) * ld_ + v);
                Gem::store(right_decay_ + j * ld_ + v, w);
                Gem::store(right_ + j * ld_ + v, w * Gem::load(y + j * ld_ + v));
            }
        }
    }

    // Columns j .. j + 2 kLanes of D from row j on: each row is a_i times the one before it, with a 1 on the diagonal.
    // What lies above the diagonal is left or overwritten.
    void pairs(int64_t j) {
        using Lanes = typename Transpose<T>::Mask;
        Lanes left, right;
        for (int l = 0; l < kLanes; ++l) left[l] = l;
        right = left + static_cast<int>(kLanes);
        const bool wide = j + kLanes < side_;
        const Vector one = T(1) - Vector{};
        Vector x{}, y{};
        T* row = d_ + j * side_ + j;
        for (int64_t i = j; i < c_; ++i, row += side_) {
            const Vector a = a_[i] - Vector{};
            const Lanes diagonal = static_cast<typename Transpose<T>::Index>(i - j) - Lanes{};
            x = left == diagonal ? one : a * x;
            Gem::store(row, x);
            if (!wide) continue;
            y = right == diagonal ? one : a * y;
            Gem::store(row + kLanes, y);
        }
    }

    void add_scaled(int64_t count, const T* __restrict product, const T* __restrict decay, T* __restrict out) const {
        for (int64_t i = 0; i < count; ++i, out += ld_, product += ld_, decay += ld_)
            for (int64_t j = 0; j < columns_; ++j) out[j] += product[j] * decay[j];
    }

    void gram_blocks(const T* x, const T* y, T* m) {
        for (int64_t n = 0; n < c_; n += kBlock) {
            const int64_t end = std::min(n + kBlock, c_);
            if (n > 0) {
                split(x, y, n, end);
                Transpose<T>::run(n, columns_, right_, ld_, transposed_, side_);
                engine_.multiply(end - n, n, keys_, {left_, ld_, 1, transposed_, side_, m + n * side_, side_});
            }
            for (int64_t i = 0; i < kBlock * kBlock; ++i) sums_[i] = Vector{};
            for (int64_t v = 0; v < columns_; v += kLanes)
                for (int64_t j = n; j < end; ++j) {
                    Vector w = Gem::load(y + j * ld_ + v);
                    for (int64_t i = j; i < end; ++i) {
                        if (i > j) w *= Gem::load(a_ + i * ld_ + v);
                        sums_[(i - n) * kBlock + j - n] += w * Gem::load(x + i * ld_ + v);
                    }
                }
            for (int64_t i = n; i < end; ++i) {
                for (int64_t j = 0; j < kBlock; j += kLanes) {
                    Vector part[kLanes];
                    for (int64_t l = 0; l < kLanes; ++l) part[l] = sums_[(i - n) * kBlock + j + l];
                    Gem::store(m + i * side_ + n + j, sums_of_lanes<T>(part));
                }
            }
        }
    }

    E& engine_;
    int64_t ld_, keys_, columns_, side_, c_ = 0;
    T one_ = 1;
    T *a_ = nullptr, *prefix_ = nullptr, *suffix_ = nullptr, *d_ = nullptr;
    T *left_ = nullptr, *left_decay_ = nullptr, *right_ = nullptr, *right_decay_ = nullptr, *product_ = nullptr;
    T* transposed_ = nullptr;
    Vector* sums_ = nullptr;
};

}  // namespace pyops::PYOPS_ISA
