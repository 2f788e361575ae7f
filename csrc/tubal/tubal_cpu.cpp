// CPU kernel of the t-product. The transforms are in tubal_transform.h, reading and writing tubes in tubal_tubes.h.
//
// Three phases: (1) A and B go to n3 real planes of contiguous rows, kBlock tubes at a time; (2) every face is
// multiplied: a real one by one product, a complex one by three,
//
//   P = (Ar + Ai) Br:   Ci = P + Ar (Bi - Br),  Cr = P - Ai (Br + Bi),
//
// which a tile of C takes one after the other in registers, with P put aside; some columns of A, with their sums, at a
// time stay in L2, and column panels of B, with difference and sum, go through L1. A conjugate transpose reads A by its
// other stride, transposes B as it packs, and changes signs; (3) the planes of C go back.
//
// Flops for n1 x n2 times n2 x n4 and n3 faces: 2 n1 n2 n4 (1.5 n3 - 1), n3 even, or (1.5 n3 - 0.5), besides
// n3^2 / 2 (n3 odd: n3^2) per tube of A, B and C. Bytes: A, B, C once, and their planes (as large) written and read.
// A Gram tensor has half of the products and of the inverse transforms, and mirrored writes.
//
// Threads share the blocks of a phase, or, where there are enough entries, take an entry each.
#include <omp.h>

#include <algorithm>
#include <atomic>

#include "common/arena.h"
#include "common/isa.h"
#include "common/team.h"
#include "tubal/tubal.h"
#include "tubal/tubal_tubes.h"

namespace pyops::PYOPS_ISA {
namespace {

// Rows of B packed at a time: three panels of 128 x 2 vectors pass through L1, one of 256 stays.
constexpr int64_t kDepth = 256, kComplexDepth = 128;

// So many planes, of so many bytes, are written past the caches: more lines at a time than the processor fetches ahead.
constexpr int64_t kStreamedPlanes = 24, kStreamedBytes = int64_t{4} << 20;

// The size of `total`'s equal parts that are no larger than `most`.
int64_t part_of(int64_t total, int64_t most) {
    const int64_t parts = (total + most - 1) / most;
    return parts > 1 ? (total + parts - 1) / parts : most;
}

// A factor's planes: element (i, j) of plane f at data[f plane + i row + j col], where one stride is 1.
template <class T>
struct Planes {
    T* data = nullptr;
    int64_t plane = 0, row = 0, col = 0;
};

// A factor as stored, seen as `lines` lines of `length` tubes that are `lane` apart; one line if all are evenly spaced.
struct Layout {
    int64_t lines, length, line, lane;
    bool by_rows;  // a line is a row
    Layout(const TubalView& x, int64_t rows, int64_t cols) {
        by_rows = std::abs(x.col) <= std::abs(x.row) || rows == 1;
        if (cols == 1 && rows > 1) by_rows = false;
        lines = by_rows ? rows : cols;
        length = by_rows ? cols : rows;
        line = by_rows ? x.row : x.col;
        lane = by_rows ? x.col : x.row;
        if (lines == 1 || line == lane * length) {
            length *= lines;
            lines = 1;
        }
    }
};

// Of A, of B and back; A and B share one without matrices.
template <class T>
struct Transforms {
    TubeTransform<T> forward, back;
    Transforms(const TubalProduct& p, Pieces& pieces)
        : forward(p.tubes, nullptr, false, pieces), back(p.tubes, static_cast<const T*>(p.inverse), true, pieces) {}
    void prepare(T* t) {
        forward.prepare(t);
        back.prepare(t);
    }
};

// What one thread needs for itself.
template <class T>
struct Own {
    static constexpr int64_t kLanes = SmallGemm<T>::kLanes, kBlock = TubeTransform<T>::kBlock, kPanel = 2 * kLanes;
    T *x, *t, *y;                   // blocks of tubes
    T *panel, *difference, *total;  // of B: Br, Bi - Br, Br + Bi
    T* sum;                         // Ar + Ai
    Own(const TubalProduct& p, const Transforms<T>& transforms, Pieces& pieces) {
        const int64_t block = TubeTransform<T>::rows(p.tubes) * kBlock, depth = std::min(p.inner, kDepth),
                      part = std::min(p.inner, kComplexDepth);
        x = pieces.take<T>(block);
        t = pieces.take<T>(std::max(block, transforms.forward.scratch_rows() * kBlock));
        y = pieces.take<T>(block);
        panel = pieces.take<T>(depth * kPanel);
        difference = pieces.take<T>(part * kPanel);
        total = pieces.take<T>(part * kPanel);
        sum = pieces.take<T>(p.tubes > 2 ? p.rows * part : 0);
    }
};

// The planes of one product and the threads that work on it.
template <class T>
class Product {
    using Gem = SmallGemm<T>;
    using Vector = typename Gem::Vector;
    static constexpr int64_t kLanes = Gem::kLanes, kBlock = Own<T>::kBlock, kPanel = Own<T>::kPanel;

  public:
    Product(const TubalProduct& p, const Transforms<T>& transforms, Pieces& pieces) : p_(p), transforms_(transforms) {
        ldc_ = padded(p.cols, kLanes);
        // Planes are an odd number of cache lines apart: element (i, j) of all faces would share a few sets of the L1.
        const auto apart = [](int64_t size) { return (padded(size, kBlock) / kLanes | 1) * kLanes + kLanes * 2; };
        size_a_ = apart(p.rows * p.inner);
        size_b_ = apart(p.inner * p.cols);
        size_c_ = apart(p.rows * ldc_);
        a_ = pieces.take<T>(size_a_ * p.tubes + kBlock);
        b_ = pieces.take<T>(size_b_ * p.tubes + kBlock);
        c_ = pieces.take<T>(size_c_ * p.tubes + kBlock);
        stream_ = p.tubes >= kStreamedPlanes &&
                  (size_a_ + size_b_) * p.tubes * static_cast<int64_t>(sizeof(T)) > kStreamedBytes;
        matrix_ = p.inverse != nullptr;
        complex_faces_ = matrix_ ? 0 : (p.tubes - 1) / 2;
        faces_ = matrix_ ? p.tubes : p.tubes / 2 + 1;
    }

    // All entries that are summed into entries[0].c. Every member of the team calls this; `next` are two counters that
    // are zero.
    void run(const TubalEntry* entries, int64_t count, const Team& team, std::atomic<int64_t>* next, Own<T>& own) {
        for (int64_t e = 0; e < count; ++e) {
            if (entries[e].a.data != last_a_.data) {
                const int64_t rows = p_.transpose_a ? p_.inner : p_.rows, cols = p_.transpose_a ? p_.rows : p_.inner;
                forward(entries[e].a, rows, cols, p_.forward_a, a_, size_a_, team, own);
            }
            if (!p_.gram && entries[e].b.data != last_b_.data) {
                const int64_t rows = p_.transpose_b ? p_.cols : p_.inner, cols = p_.transpose_b ? p_.inner : p_.cols;
                forward(entries[e].b, rows, cols, p_.forward_b, b_, size_b_, team, own);
            }
            if (stream_) Gem::fence();
            team.wait();
            if (team.rank == 0) {
                last_a_ = entries[e].a;
                last_b_ = entries[e].b;
                next[1] = 0;
            }
            const Planes<T> a = planes(entries[e].a, p_.rows, p_.inner, a_, size_a_, p_.transpose_a);
            const Planes<T> b = p_.gram ? Planes<T>{a.data, a.plane, a.col, a.row}
                                        : planes(entries[e].b, p_.inner, p_.cols, b_, size_b_, p_.transpose_b);
            multiply(a, b, e > 0, next[0], own);
            team.wait();
            if (team.rank == 0) next[0] = 0;
            if (e + 1 < count) team.wait();
        }
        inverse(entries[0].c, next[1], own);
        team.wait();
    }

  private:
    struct Panel {
        const T* data;
        int64_t ld;
    };

    // Where forward() leaves the planes of a factor that is rows x cols as multiplied.
    static Planes<T> planes(const TubalView& x, int64_t rows, int64_t cols, T* data, int64_t plane, bool transpose) {
        if (transpose) std::swap(rows, cols);
        const Layout layout(x, rows, cols);
        Planes<T> out{data, plane, layout.by_rows ? cols : 1, layout.by_rows ? 1 : rows};
        if (transpose) std::swap(out.row, out.col);
        return out;
    }

    void forward(const TubalView& x, int64_t rows, int64_t cols, const void* matrix, T* planes, int64_t plane,
                 const Team& team, Own<T>& own) const {
        const Layout layout(x, rows, cols);
        const int64_t blocks = (layout.length + kBlock - 1) / kBlock, all = layout.lines * blocks;
        with_type(p_.dtype, [&](auto* tag) {
            using E = std::remove_pointer_t<decltype(tag)>;
            const E* data = static_cast<const E*>(x.data);
            for (int64_t i = team.begin(all); i < team.end(all); ++i) {
                const int64_t line = i / blocks, first = i % blocks * kBlock;
                const int64_t count = std::min(kBlock, layout.length - first);
                Tubes<T>::read(data + line * layout.line + first * layout.lane, layout.lane, x.tube, p_.tubes, count,
                               own.x);
                T* target = planes + line * layout.length + first;
                const auto* m = static_cast<const T*>(matrix);
                if (count == kBlock) {
                    transforms_.forward.forward(own.x, own.t, target, plane, kBlock, m, stream_);
                    continue;
                }
                // A whole block would run into the next line.
                transforms_.forward.forward(own.x, own.t, own.y, kBlock, padded(count, kLanes), m, false);
                for (int64_t f = 0; f < p_.tubes; ++f)
                    for (int64_t l = 0; l < count; ++l) target[f * plane + l] = own.y[f * kBlock + l];
            }
        });
    }

    // Planes of C (+)= A B. Units are a face's range of columns, complex faces first.
    void multiply(const Planes<T>& a, const Planes<T>& b, bool add, std::atomic<int64_t>& next, Own<T>& own) const {
        const int64_t panels = (ldc_ + kPanel - 1) / kPanel;
        const int64_t ranges = std::clamp<int64_t>(16 / faces_, 1, std::max<int64_t>(1, panels)),
                      units = faces_ * ranges;
        if (p_.rows == 0 || p_.cols == 0) return;
        for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < units;) {
            const int64_t face = i / ranges, range = i % ranges;
            const int64_t from = panels * range / ranges * kPanel,
                          to = std::min(ldc_, panels * (range + 1) / ranges * kPanel);
            if (matrix_) {
                real_face(a, b, face, from, to, add, own);
            } else if (face < complex_faces_) {
                complex_face(a, b, face + 1, from, to, add, own);
            } else {
                real_face(a, b, face == complex_faces_ ? 0 : p_.tubes / 2, from, to, add, own);
            }
        }
    }

    int64_t rows_of(int64_t column_end) const { return p_.gram ? std::min(p_.rows, column_end) : p_.rows; }

    void real_face(const Planes<T>& a, const Planes<T>& b, int64_t f, int64_t from, int64_t to, bool add,
                   Own<T>& own) const {
        constexpr T one = 1;
        T* c = c_ + f * size_c_;
        if (p_.inner == 0 && !add) return clear(c, from, to);
        const int64_t part = part_of(p_.inner, kDepth);
        for (int64_t k = 0; k < p_.inner; k += part) {
            const int64_t depth = std::min(part, p_.inner - k);
            for (int64_t j = from; j < to; j += kPanel) {
                const int64_t width = std::min(kPanel, to - j);
                const Panel panel = pack(b, f, k, depth, j, width, own.panel);
                Gem::multiply(rows_of(j + width), width, depth,
                              {a.data + f * a.plane + k * a.col, a.row, a.col, panel.data, panel.ld, c + j, ldc_,
                               add || k > 0 ? &one : nullptr, 0},
                              [] {});
            }
        }
    }

    void clear(T* c, int64_t from, int64_t to) const {
        for (int64_t i = 0; i < p_.rows; ++i) std::fill(c + i * ldc_ + from, c + i * ldc_ + to, T(0));
    }

    void complex_face(const Planes<T>& a, const Planes<T>& b, int64_t f, int64_t from, int64_t to, bool add,
                      Own<T>& own) const {
        const int64_t imag = p_.tubes / 2 + f;
        T *cr = c_ + f * size_c_, *ci = c_ + imag * size_c_;
        if (p_.inner == 0 && !add) {
            clear(cr, from, to);
            return clear(ci, from, to);
        }
        const T sign_a = p_.transpose_a ? T(-1) : T(1), sign_b = p_.transpose_b ? T(-1) : T(1);
        const int64_t part = part_of(p_.inner, kComplexDepth);
        for (int64_t k = 0; k < p_.inner; k += part) {
            const int64_t depth = std::min(part, p_.inner - k);
            Left left{
                a.data + f * a.plane + k * a.col, a.data + imag * a.plane + k * a.col, own.sum, a.row, a.col, 0, 0};
            add_parts(left, depth, sign_a, own.sum);
            for (int64_t j = from; j < to; j += kPanel) {
                const int64_t width = std::min(kPanel, to - j);
                const Panel re = pack(b, f, k, depth, j, width, own.panel);
                const Panel im = pack(b, imag, k, depth, j, width, own.total);
                for (int64_t r = 0; r < depth; ++r)
                    for (int64_t l = 0; l < width; l += kLanes) {
                        const Vector x = Gem::load(re.data + r * re.ld + l);
                        const Vector y = sign_b * Gem::load(im.data + r * im.ld + l);
                        Gem::store(own.difference + r * width + l, y - x);
                        Gem::store(own.total + r * width + l, sign_a * (x + y));
                    }
                const auto tiles = [&]<int NV>() {
                    Gem::template tiles<NV>(0, rows_of(j + width), [&]<int MR>(int64_t i) {
                        complex_tile<MR, NV>(depth, left, i, re, {own.difference, width}, {own.total, width},
                                             cr + i * ldc_ + j, ci + i * ldc_ + j, ldc_, add || k > 0);
                    });
                };
                width == kPanel ? tiles.template operator()<2>() : tiles.template operator()<1>();
            }
        }
    }

    // Some columns of A: re and im with the strides of the planes, and their sum with its own.
    struct Left {
        const T *re, *im, *sum;
        int64_t row, col, sum_row, sum_col;
    };

    // left.sum = re + sign im, with the unit stride where the planes have it.
    void add_parts(Left& left, int64_t depth, T sign, T* sum) const {
        const bool by_rows = left.col == 1;
        const int64_t lines = by_rows ? p_.rows : depth, length = by_rows ? depth : p_.rows;
        const int64_t step = by_rows ? left.row : left.col;
        left.sum_row = by_rows ? depth : 1;
        left.sum_col = by_rows ? 1 : p_.rows;
        for (int64_t i = 0; i < lines; ++i) {
            const T *re = left.re + i * step, *im = left.im + i * step;
            T* to = sum + i * length;
            for (int64_t e = 0; e < length; ++e) to[e] = re[e] + sign * im[e];
        }
    }

    // acc += a b, or -= if kMinus.
    template <bool kMinus, int MR, int NV>
    [[gnu::always_inline]] static void accumulate(int64_t depth, const T* a, int64_t row, int64_t col, const Panel& b,
                                                  Vector (&acc)[MR][NV]) {
        const T* v = b.data;
        for (int64_t k = 0; k < depth; ++k, a += col, v += b.ld) {
            Vector of[NV];
#pragma GCC unroll 2
            for (int s = 0; s < NV; ++s) of[s] = Gem::load(v + s * kLanes);
#pragma GCC unroll 16
            for (int r = 0; r < MR; ++r) {
                const Vector x = a[r * row] - Vector{};  // a broadcast
#pragma GCC unroll 2
                for (int s = 0; s < NV; ++s) acc[r][s] = kMinus ? acc[r][s] - x * of[s] : acc[r][s] + x * of[s];
            }
        }
    }

    template <int MR, int NV>
    [[gnu::always_inline]] static void copy(const Vector (&from)[MR][NV], Vector (&to)[MR][NV]) {
#pragma GCC unroll 16
        for (int r = 0; r < MR; ++r)
#pragma GCC unroll 2
            for (int s = 0; s < NV; ++s) to[r][s] = from[r][s];
    }

    template <int MR, int NV>
    static void complex_tile(int64_t depth, const Left& left, int64_t i, const Panel& re, const Panel& difference,
                             const Panel& total, T* cr, T* ci, int64_t ldc, bool add) {
        Vector acc[MR][NV] = {}, aside[MR][NV];
        accumulate<false>(depth, left.sum + i * left.sum_row, left.sum_row, left.sum_col, re, acc);
        const auto put = [&](T* c) __attribute__((always_inline)) {
#pragma GCC unroll 16
            for (int r = 0; r < MR; ++r)
#pragma GCC unroll 2
                for (int s = 0; s < NV; ++s) {
                    T* to = c + r * ldc + s * kLanes;
                    Gem::store(to, add ? acc[r][s] + Gem::load(to) : acc[r][s]);
                }
        };
        copy(acc, aside);
        accumulate<false>(depth, left.re + i * left.row, left.row, left.col, difference, acc);
        put(ci);
        copy(aside, acc);
        accumulate<true>(depth, left.im + i * left.row, left.row, left.col, total, acc);
        put(cr);
    }

    // Rows k .. and columns j .. of a plane of B: where they are, if they are read too few times to be worth packing.
    // What stands beyond the last column is of no consequence.
    Panel pack(const Planes<T>& b, int64_t f, int64_t k, int64_t depth, int64_t j, int64_t width, T* panel) const {
        const T* source = b.data + f * b.plane + k * b.row + j * b.col;
        if (b.col == 1) {
            if (p_.rows <= 32) return {source, b.row};
            for (int64_t r = 0; r < depth; ++r)
                for (int64_t l = 0; l < width; l += kLanes)
                    Gem::store(panel + r * width + l, Gem::load(source + r * b.row + l));
            return {panel, width};
        }
        const int64_t valid = std::min(width, p_.cols - j);
        for (int64_t l = 0; l < width; l += kLanes)
            for (int64_t r = 0; r < depth; r += kLanes) {
                const T* from = source + l * b.col + r;
                T* to = panel + r * width + l;
                if (l + kLanes <= valid && r + kLanes <= depth) {
                    Transpose<T>::block(from, b.col, to, width);
                    continue;
                }
                for (int64_t i = 0; i < std::min(kLanes, depth - r); ++i)
                    for (int64_t s = 0; s < kLanes; ++s) to[i * width + s] = l + s < valid ? from[s * b.col + i] : T(0);
            }
        return {panel, width};
    }

    void inverse(const TubalView& c, std::atomic<int64_t>& next, Own<T>& own) const {
        const int64_t n = p_.tubes;
        with_type(p_.dtype, [&](auto* tag) {
            using E = std::remove_pointer_t<decltype(tag)>;
            E* data = static_cast<E*>(c.data);
            constexpr int64_t kRows = 4;
            const int64_t units = (p_.rows + kRows - 1) / kRows;
            for (int64_t u; (u = next.fetch_add(1, std::memory_order_relaxed)) < units;)
                for (int64_t i = u * kRows; i < std::min(p_.rows, (u + 1) * kRows); ++i)
                    for (int64_t j = p_.gram ? i : 0; j < p_.cols; j += kBlock) {
                        const int64_t count = std::min(kBlock, p_.cols - j);
                        transforms_.back.inverse(c_ + i * ldc_ + j, size_c_, padded(count, kLanes), own.t, own.x);
                        Tubes<T>::write(data + i * c.row + j * c.col, c.col, c.tube, n, count, own.x);
                        if (!p_.gram) continue;
                        // (j, i) has the same tube backwards.
                        for (int64_t t = 0; t < n; ++t)
                            std::copy_n(own.x + t * kBlock, kBlock, own.t + (t ? n - t : 0) * kBlock);
                        const int64_t own_lane = j == i;
                        Tubes<T>::write(data + (j + own_lane) * c.row + i * c.col, c.row, c.tube, n, count - own_lane,
                                        own.t + own_lane);
                    }
        });
    }

    const TubalProduct& p_;
    const Transforms<T>& transforms_;
    int64_t ldc_, size_a_, size_b_, size_c_, complex_faces_, faces_;
    bool matrix_, stream_;
    T *a_, *b_, *c_;
    TubalView last_a_, last_b_;
};

// The number of entries from the first on that are summed into the same c.
int64_t group_size(const TubalEntry* entries, int64_t count) {
    int64_t size = 1;
    while (size < count && entries[size].c.data == entries[0].c.data) ++size;
    return size;
}

// Multiply-adds, so that no thread is woken for less than about 30 microseconds of work.
double work(const TubalProduct& p) {
    const auto rows = static_cast<double>(p.rows), inner = static_cast<double>(p.inner);
    const auto cols = static_cast<double>(p.cols), tubes = static_cast<double>(p.tubes);
    return rows * inner * cols * 1.5 * tubes / (p.gram ? 2 : 1) +
           (rows * inner + inner * cols + rows * cols) * tubes * (8 + std::min(tubes, 64.0));
}

template <class T>
void products(const TubalProduct& p, const TubalEntry* entries, int64_t count, int threads) {
    constexpr double kGrain = 1 << 20;
    if (count == 0 || p.rows == 0 || p.cols == 0) return;
    threads = static_cast<int>(std::clamp(work(p) * static_cast<double>(count) / kGrain, 1.0, 1.0 * threads));
    int64_t groups = 0;
    for (int64_t e = 0; e < count; e += group_size(entries + e, count - e)) ++groups;
    const bool apart = groups >= 4 * threads || work(p) < 2 * kGrain;  // an entry per thread

    Pieces sizes(nullptr);
    const Transforms<T> tables(p, sizes);
    const int64_t table_bytes = sizes.used();
    const Own<T> own_size(p, tables, sizes);
    const int64_t own_bytes = padded(sizes.used() - table_bytes, 4096) + 320;
    const int64_t before = sizes.used();
    const Product<T> product_size(p, tables, sizes);
    const int64_t product_bytes = padded(sizes.used() - before, 64);
    const int64_t products_at_once = apart ? threads : 1;
    Arena arena(table_bytes + own_bytes * threads + product_bytes * products_at_once);

    Pieces pieces(arena.data());
    Transforms<T> transforms(p, pieces);
    char* own_start = arena.data() + table_bytes;
    {
        Pieces first(own_start);
        transforms.prepare(Own<T>(p, transforms, first).t);
    }
    char* product_start = own_start + own_bytes * threads;
    if (threads == 1) {
        Pieces own_pieces(own_start), product_pieces(product_start);
        Own<T> own(p, transforms, own_pieces);
        Product<T> product(p, transforms, product_pieces);
        std::atomic<int64_t> next[2] = {0, 0};
        for (int64_t e = 0, size; e < count; e += size) {
            size = group_size(entries + e, count - e);
            next[0] = next[1] = 0;
            product.run(entries + e, size, {}, next, own);
        }
        return;
    }
    Pieces shared_pieces(product_start);
    Product<T> shared(p, transforms, shared_pieces);
    Barrier barrier;
    std::atomic<int64_t> next[2] = {0, 0}, next_group{0};
#pragma omp parallel num_threads(threads)
    {
        const int rank = omp_get_thread_num(), size = omp_get_num_threads();
        Pieces own_pieces(own_start + rank * own_bytes);
        Own<T> own(p, transforms, own_pieces);
        if (apart) {
            Pieces product_pieces(product_start + rank * product_bytes);
            Product<T> product(p, transforms, product_pieces);
            std::atomic<int64_t> mine[2] = {0, 0};
            int64_t group = 0, wanted = next_group.fetch_add(1);
            for (int64_t e = 0, of_group; e < count; e += of_group, ++group) {
                of_group = group_size(entries + e, count - e);
                if (group != wanted) continue;
                mine[0] = mine[1] = 0;
                product.run(entries + e, of_group, {}, mine, own);
                wanted = next_group.fetch_add(1);
            }
        } else {
            if (rank == 0) barrier.set_members(size);
#pragma omp barrier
            const Team team{rank, size, &barrier};
            for (int64_t e = 0, of_group; e < count; e += of_group) {
                of_group = group_size(entries + e, count - e);
                shared.run(entries + e, of_group, team, next, own);
            }
        }
    }
}

}  // namespace

void tubal_products(const TubalProduct& product, const TubalEntry* entries, int64_t count, int threads) {
    product.dtype == DType::F64 ? products<double>(product, entries, count, threads)
                                : products<float>(product, entries, count, threads);
}

}  // namespace pyops::PYOPS_ISA
