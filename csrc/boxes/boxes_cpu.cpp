// CPU kernel of box embeddings: pairwise log-volumes, their gradients, the best k items, sampled pairs. The mathematics
// of a few boxes against a tile of them is in boxes_tile.h.
//
// Elements are pairs times dimensions; about 20 operations each with nu = tau, 5 for hard boxes, twice that for
// gradients. Bytes: corners, results, and per thread a tile and a chunk of queries that stay in cache: nothing as large
// as pairs times dimensions ever exists, and the best k are found without the matrix of scores.
//
// Threads take tiles of items (queries, in the search for the best k). In the backward pass the smaller of the two
// tables is summed in a buffer per thread and the buffers are added in order, so results do not depend on timing.
#include <omp.h>

#include <algorithm>
#include <atomic>
#include <cmath>

#include "boxes/boxes_best.h"
#include "boxes/boxes_tile.h"
#include "common/arena.h"
#include "common/flush.h"
#include "common/isa.h"

namespace pyops::PYOPS_ISA {
namespace {

constexpr int64_t kChunkElements = int64_t{1} << 16;  // rows x dimensions of a chunk of queries

int64_t chunk_rows(const BoxModel& m, int64_t rows) {
    const int64_t most = std::max<int64_t>(32, kChunkElements / std::max<int64_t>(1, m.dims));
    return std::max<int64_t>(1, std::min(rows, most));
}

// Fewer threads where there is little to do.
int threads_for(double elements, int threads) {
    constexpr double kGrain = 1 << 16;
    return static_cast<int>(std::clamp(elements / kGrain, 1.0, 1.0 * threads));
}

// Where the share of `rank` of so many rows begins, in whole blocks.
int64_t share_of(int64_t rows, int64_t block, int rank, int size) {
    return std::min(rows, (rows + block - 1) / block * rank / size * block);
}

template <class F>
void on_threads(int threads, const F& work) {
    const auto member = [&](int rank, int size) {
        const FlushToZero flush;
        work(rank, size);
    };
    if (threads == 1) return member(0, 1);
#pragma omp parallel num_threads(threads)
    member(omp_get_thread_num(), omp_get_num_threads());
}

// The bytes of the settings, and of the scratch that each thread owns, by a dry run of take(settings, pieces).
template <class T>
struct Call {
    int64_t shared_bytes = 0, own_bytes = 0;
    template <class Take>
    Call(const BoxModel& m, const Take& take) {
        Pieces count(nullptr);
        const BoxSettings<T> s(m, count);
        for (int i = 0; i < 3; ++i) count.take<T>(m.dims);
        shared_bytes = padded(count.used(), 64);
        Pieces own(nullptr);
        take(s, own);
        own_bytes = padded(own.used(), 4096) + 320;
    }
    int64_t bytes(int threads) const { return shared_bytes + own_bytes * threads; }
};

// Settings with a centre that serves both tables.
template <class T>
BoxSettings<T> prepared(const BoxModel& m, const BoxTable& queries, const BoxTable& items, bool with_center,
                        Pieces& pieces) {
    BoxSettings<T> s(m, pieces);
    s.prepare(m);
    T *row = pieces.take<T>(m.dims), *low = pieces.take<T>(m.dims), *high = pieces.take<T>(m.dims);
    if (s.gumbel && with_center) find_center<T>(m, queries, items, row, low, high, s.center);
    return s;
}

template <class T>
void log_volumes(const BoxModel& m, const BoxTable& queries, const BoxTable& items, T* out, int threads) {
    using Tile = BoxTile<T>;
    constexpr int64_t kLanes = Tile::kLanes, kBlock = Tile::kBlock;
    if (queries.rows == 0 || items.rows == 0) return;
    const int64_t chunk = chunk_rows(m, queries.rows), tiles = (items.rows + kLanes - 1) / kLanes;
    const Call<T> call(m, [&](const BoxSettings<T>& s, Pieces& own) { Tile(s, false, own); });
    threads = threads_for(static_cast<double>(queries.rows) * static_cast<double>(items.rows * m.dims), threads);
    Pieces count(nullptr);
    const BoxSettings<T> sizes(m, count);
    BoxRows<T>(sizes, chunk, count);
    const int64_t rows_bytes = padded(count.used(), 64);
    Arena arena(call.bytes(threads) + rows_bytes);
    Pieces shared(arena.data());
    const BoxSettings<T> s = prepared<T>(m, queries, items, true, shared);
    Pieces rows_pieces(arena.data() + call.bytes(threads));
    const BoxRows<T> rows(s, chunk, rows_pieces);
    std::atomic<int64_t> next{0};
    for (int64_t first = 0; first < queries.rows; first += chunk) {
        const int64_t of_chunk = std::min(chunk, queries.rows - first);
        next = 0;
        on_threads(threads, [&](int rank, int size) {
            Pieces own(arena.data() + call.shared_bytes + rank * call.own_bytes);
            Tile tile(s, false, own);
            rows.load(m, s, queries, first, nullptr, share_of(of_chunk, kBlock, rank, size),
                      share_of(of_chunk, kBlock, rank + 1, size));
#pragma omp barrier
            for (int64_t t; (t = next.fetch_add(1, std::memory_order_relaxed)) < tiles;) {
                const int64_t start = t * kLanes, lanes = std::min(kLanes, items.rows - start);
                tile.load(m, s, items, start, nullptr, lanes);
                for (int64_t q = 0; q < of_chunk; q += 4) {
                    const int n = static_cast<int>(std::min<int64_t>(4, of_chunk - q));
                    typename Tile::Vector v[4];
                    tile.volumes(s, rows, q, n, v);
                    for (int i = 0; i < n; ++i) {
                        T* to = out + (first + q + i) * items.rows + start;
                        if (lanes == kLanes)
                            SmallGemm<T>::store(to, v[i]);
                        else
                            std::copy_n(reinterpret_cast<const T*>(v + i), lanes, to);
                    }
                }
            }
        });
    }
}

// Sums over lanes and over rows of what kLanes rows contribute in one dimension.
template <class T, class Part>
[[gnu::always_inline]] inline void add_parts(int64_t count, const Part& part, T* row_z, T* row_Z,
                                             typename BoxTile<T>::Vector* item_z, typename BoxTile<T>::Vector* item_Z) {
    using Gem = SmallGemm<T>;
    using Vector = typename Gem::Vector;
    constexpr int64_t kLanes = Gem::kLanes;
    Vector a[kLanes], b[kLanes];
    for (int64_t i = 0; i < count; ++i) {
        const auto p = part(i);
        a[i] = p.row_z;
        b[i] = p.row_Z;
        *item_z += p.item_z;
        *item_Z += p.item_Z;
    }
    for (int64_t i = count; i < kLanes; ++i) a[i] = b[i] = Vector{};
    Gem::store(row_z, Gem::load(row_z) + sums_of_lanes<T>(a));
    Gem::store(row_Z, Gem::load(row_Z) + sums_of_lanes<T>(b));
}

// What a gradient of log volumes comes to: NaN where a box has one, unless nothing is asked of that pair, and nothing
// where a hard volume is 0.
template <class T>
typename BoxTile<T>::Vector of_volume(const BoxSettings<T>& s, const BoxRows<T>& rows, const BoxTile<T>& tile,
                                      int64_t q, typename BoxTile<T>::Vector grad) {
    const auto bad = grad != T(0) ? tile.bad + rows.bad[q] : typename BoxTile<T>::Vector{};
    grad += bad;
    return s.soft ? grad : tile.smallest(s, rows, q) > T(0) ? grad : bad;
}

// Gradients of `count` rows from `first` with a tile, whose gradients of log volumes are grad[i], added to row_z and
// row_Z, laid out like the rows, and to item_z[d].
template <class T>
void tile_gradients(const BoxSettings<T>& s, const BoxRows<T>& rows, const BoxTile<T>& tile, int64_t first,
                    int64_t count, typename BoxTile<T>::Vector* grad, T* row_z, T* row_Z,
                    typename BoxTile<T>::Vector* item_z, typename BoxTile<T>::Vector* item_Z) {
    using Tile = BoxTile<T>;
    using Vector = typename Tile::Vector;
    constexpr int64_t kLanes = Tile::kLanes, kBlock = Tile::kBlock;
    for (int64_t i0 = 0; i0 < count; i0 += kLanes) {
        const int64_t n = std::min(kLanes, count - i0), q = first + i0, at = rows.at(q);
        bool products = true;
        for (int64_t i = 0; i < n; ++i) {
            products = products && tile.products(s, rows, q + i);
            grad[i0 + i] = of_volume(s, rows, tile, q + i, grad[i0 + i]);
        }
        const Vector* g = grad + i0;
        // Nothing to add: among hard boxes, pairs that do not meet.
        auto nothing = g[0] == T(0);
        for (int64_t i = 1; i < n; ++i) nothing &= g[i] == T(0);
        if (VectorMath<T>::all_negative(nothing)) continue;
        if (products) {
            for (int64_t i = 0; i < n; ++i) grad[i0 + i] *= s.inverse_tau;
            // The factors P and Q of each box: here, so that other tiles of the row may take the other form.
            for (int64_t d = 0; d < s.dims; ++d) {
                alignas(64) T sum_z[kLanes] = {}, sum_Z[kLanes] = {};
                Vector iz{}, iZ{};
                add_parts<T>(
                    n,
                    [&](int64_t i) __attribute__((always_inline)) { return tile.product_parts(rows, at + i, d, g[i]); },
                    sum_z, sum_Z, &iz, &iZ);
                const int64_t e = at + d * kBlock;
                for (int64_t i = 0; i < n; ++i) {
                    row_z[e + i] += rows.P[e + i] * sum_z[i];
                    row_Z[e + i] += rows.Q[e + i] * sum_Z[i];
                }
                // Of the tile's own factors only: both kinds of rows end up in one sum.
                item_z[d] += iz * SmallGemm<T>::load(tile.P + d * kLanes);
                item_Z[d] += iZ * SmallGemm<T>::load(tile.Q + d * kLanes);
            }
        } else {
            // Rows of both forms may stand together: those outside the window decide for all.
            int64_t worst = q;
            for (int64_t i = 0; i < n; ++i)
                if (!tile.factors(s, rows, q + i)) worst = q + i;
            tile.with_parts(s, rows, worst, [&](const auto& parts) {
                for (int64_t d = 0; d < s.dims; ++d)
                    add_parts<T>(
                        n, [&](int64_t i) __attribute__((always_inline)) { return parts(at + i, d, g[i]); },
                        row_z + at + d * kBlock, row_Z + at + d * kBlock, item_z + d, item_Z + d);
            });
        }
    }
}

// Gradients of `count` <= kLanes rows from `row` on, times a sign (dz = -sum, dZ = +sum), where dimension d of all of
// them is at sums[d step].
template <class T>
void store_corners(const BoxModel& m, void* target, int64_t row, int64_t count, const T* sums, int64_t step, T sign) {
    constexpr int64_t kLanes = SmallGemm<T>::kLanes;
    alignas(64) T square[kLanes * kLanes];
    with_type(m.dtype, [&](auto* tag) {
        using E = std::remove_pointer_t<decltype(tag)>;
        E* p = static_cast<E*>(target) + row * m.dims;
        for (int64_t d = 0; d < m.dims; d += kLanes) {
            const int64_t dims = std::min(kLanes, m.dims - d);
            if (dims == kLanes) {
                Transpose<T>::block(sums + d * step, step, square, kLanes);
            } else {
                for (int64_t j = 0; j < dims; ++j)
                    for (int64_t l = 0; l < count; ++l) square[l * kLanes + j] = sums[(d + j) * step + l];
            }
            for (int64_t l = 0; l < count; ++l)
                for (int64_t j = 0; j < dims; ++j) narrow(sign * square[l * kLanes + j], p[l * m.dims + d + j]);
        }
    });
}

template <class T>
void backward(const BoxModel& m, const BoxTable& queries, const BoxTable& items, const BoxGradients& g, int threads) {
    using Tile = BoxTile<T>;
    using Vector = typename Tile::Vector;
    constexpr int64_t kLanes = Tile::kLanes, kBlock = Tile::kBlock, kRows = 256;
    // Rows are the smaller table. Grad of row i and lane l is at grad[i row_step + l lane_step].
    const bool swapped = queries.rows > items.rows;
    const BoxTable &small = swapped ? items : queries, &large = swapped ? queries : items;
    const int64_t row_step = swapped ? 1 : items.rows, lane_step = swapped ? items.rows : 1;
    const T* grad = static_cast<const T*>(g.grad);
    void *row_z = swapped ? g.item_z : g.query_z, *row_Z = swapped ? g.item_Z : g.query_Z;
    void *lane_z = swapped ? g.query_z : g.item_z, *lane_Z = swapped ? g.query_Z : g.item_Z;

    const int64_t tiles = (large.rows + kLanes - 1) / kLanes;
    const int64_t sums = padded(small.rows, kBlock) * m.dims;
    struct Own {
        Tile tile;
        Vector *grad, *item_z, *item_Z;
        T *row_z, *row_Z;
        Own(const BoxModel& model, const BoxSettings<T>& s, int64_t sums, Pieces& p)
            : tile(s, false, p),
              grad(p.take<Vector>(kRows)),
              item_z(p.take<Vector>(model.dims)),
              item_Z(p.take<Vector>(model.dims)),
              row_z(p.take<T>(sums)),
              row_Z(p.take<T>(sums)) {}
    };
    const Call<T> call(m, [&](const BoxSettings<T>& s, Pieces& own) { Own(m, s, sums, own); });
    threads = threads_for(static_cast<double>(queries.rows) * static_cast<double>(items.rows * m.dims), threads);
    Pieces count(nullptr);
    const BoxSettings<T> sizes(m, count);
    BoxRows<T>(sizes, small.rows, count);
    Arena arena(call.bytes(threads) + padded(count.used(), 64));
    Pieces shared(arena.data());
    const BoxSettings<T> s = prepared<T>(m, small, large, true, shared);
    Pieces rows_pieces(arena.data() + call.bytes(threads));
    const BoxRows<T> rows(s, small.rows, rows_pieces);
    int members = 1;
    on_threads(threads, [&](int rank, int size) {
        Pieces own_pieces(arena.data() + call.shared_bytes + rank * call.own_bytes);
        Own own(m, s, sums, own_pieces);
        if (rank == 0) members = size;
        rows.load(m, s, small, 0, nullptr, share_of(small.rows, kBlock, rank, size),
                  share_of(small.rows, kBlock, rank + 1, size));
        std::fill(own.row_z, own.row_z + sums, T(0));
        std::fill(own.row_Z, own.row_Z + sums, T(0));
#pragma omp barrier
        for (int64_t t = tiles * rank / size; t < tiles * (rank + 1) / size; ++t) {
            const int64_t start = t * kLanes, lanes = std::min(kLanes, large.rows - start);
            own.tile.load(m, s, large, start, nullptr, lanes);
            std::fill(own.item_z, own.item_z + m.dims, Vector{});
            std::fill(own.item_Z, own.item_Z + m.dims, Vector{});
            for (int64_t first = 0; first < small.rows; first += kRows) {
                const int64_t n = std::min(kRows, small.rows - first);
                for (int64_t i = 0; i < n; ++i) {
                    const T* from = grad + (first + i) * row_step + start * lane_step;
                    T* to = reinterpret_cast<T*>(own.grad + i);
                    for (int64_t l = 0; l < kLanes; ++l) to[l] = l < lanes ? from[l * lane_step] : T(0);
                }
                tile_gradients(s, rows, own.tile, first, n, own.grad, own.row_z, own.row_Z, own.item_z, own.item_Z);
            }
            store_corners(m, lane_z, start, lanes, reinterpret_cast<const T*>(own.item_z), kLanes, T(-1));
            store_corners(m, lane_Z, start, lanes, reinterpret_cast<const T*>(own.item_Z), kLanes, T(1));
        }
    });
    // In the order of the threads' shares.
    const auto own_rows = [&](int rank) {
        Pieces p(arena.data() + call.shared_bytes + rank * call.own_bytes);
        return Own(m, s, sums, p);
    };
    const Own first = own_rows(0);
    for (int rank = 1; rank < members; ++rank) {
        const Own other = own_rows(rank);
        for (int64_t e = 0; e < sums; ++e) {
            first.row_z[e] += other.row_z[e];
            first.row_Z[e] += other.row_Z[e];
        }
    }
    for (int64_t i = 0; i < small.rows; i += kLanes) {
        const int64_t n = std::min(kLanes, small.rows - i);
        store_corners(m, row_z, i, n, first.row_z + rows.at(i), kBlock, T(-1));
        store_corners(m, row_Z, i, n, first.row_Z + rows.at(i), kBlock, T(1));
    }
}

// ---- the best k

template <class T>
void topk(const BoxModel& m, const BoxTopk& p, int threads) {
    using Tile = BoxTile<T>;
    using Vector = typename Tile::Vector;
    using Math = VectorMath<T>;
    constexpr int64_t kLanes = Tile::kLanes;
    const int64_t queries = p.queries.rows / std::max<int64_t>(1, p.terms), k = p.k;
    if (queries == 0 || k == 0) return;
    T* values = static_cast<T*>(p.values);
    const T* of_item = static_cast<const T*>(p.item_log_volume);
    threads = threads_for(static_cast<double>(p.queries.rows) * static_cast<double>(p.items.rows * m.dims), threads);
    // A thread takes a block of queries against a range of the items.
    const int64_t block = std::clamp<int64_t>(chunk_rows(m, queries * p.terms) / p.terms, 1, queries);
    const int64_t by_threads = (queries + threads - 1) / threads, in_block = std::min(block, by_threads);
    const int64_t blocks = (queries + in_block - 1) / in_block;
    const int64_t ranges = std::clamp<int64_t>(threads / blocks, 1, std::max<int64_t>(1, p.items.rows / kLanes));

    struct Own {
        Tile tile;
        BoxRows<T> rows;
        Own(const BoxTopk& p, const BoxSettings<T>& s, int64_t queries, Pieces& pieces)
            : tile(s, p.prune, pieces), rows(s, queries * p.terms, pieces) {}
    };
    const Call<T> call(m, [&](const BoxSettings<T>& s, Pieces& own) { Own(p, s, in_block, own); });
    Pieces count(nullptr);
    count.take<T>(ranges > 1 ? queries * ranges * k : 0);
    count.take<int64_t>(ranges > 1 ? queries * ranges * k : 0);
    count.take<Best<T>>(queries * ranges);
    Arena arena(call.bytes(threads) + count.used());
    Pieces shared(arena.data());
    const BoxSettings<T> s = prepared<T>(m, p.queries, p.items, true, shared);
    Pieces heaps(arena.data() + call.bytes(threads));
    T* range_values = heaps.take<T>(ranges > 1 ? queries * ranges * k : 0);
    int64_t* range_indices = heaps.take<int64_t>(ranges > 1 ? queries * ranges * k : 0);
    Best<T>* best = heaps.take<Best<T>>(queries * ranges);
    for (int64_t r = 0; r < ranges; ++r)
        for (int64_t q = 0; q < queries; ++q)
            best[r * queries + q] =
                ranges > 1 ? Best<T>{range_values + (r * queries + q) * k, range_indices + (r * queries + q) * k, k}
                           : Best<T>{values + q * k, p.indices + q * k, k};

    std::atomic<int64_t> next{0};
    on_threads(threads, [&](int rank, int) {
        Pieces own_pieces(arena.data() + call.shared_bytes + rank * call.own_bytes);
        Own own(p, s, in_block, own_pieces);
        for (int64_t u; (u = next.fetch_add(1)) < blocks * ranges;) {
            const int64_t first = u / ranges * in_block, n = std::min(in_block, queries - first), range = u % ranges;
            const int64_t from = p.items.rows * range / ranges / kLanes * kLanes;
            const int64_t to =
                range + 1 == ranges ? p.items.rows : p.items.rows * (range + 1) / ranges / kLanes * kLanes;
            own.rows.load(m, s, p.queries, first * p.terms, nullptr, 0, n * p.terms);
            // A query can be pruned by its first term alone, if the others are taken away from it.
            const auto prunes = [&](int64_t q) {
                if (!p.prune || p.signs[(first + q) * p.terms] <= 0) return false;
                for (int64_t t = 1; t < p.terms; ++t)
                    if (p.signs[(first + q) * p.terms + t] > 0) return false;
                return true;
            };
            for (int64_t start = from; start < to; start += kLanes) {
                const int64_t lanes = std::min(kLanes, to - start);
                own.tile.load(m, s, p.items, start, nullptr, lanes);
                alignas(64) T of_lane[kLanes] = {};
                if (of_item) std::copy_n(of_item + start, lanes, of_lane);
                const Vector shift = SmallGemm<T>::load(of_lane);
                const auto offer = [&](int64_t q, Vector score) {
                    if (of_item) score = score > T(0) ? Vector{} : score;  // by rounding, and would decide among equals
                    Best<T>& b = best[range * queries + first + q];
                    alignas(64) T scores[kLanes];
                    SmallGemm<T>::store(scores, score);
                    if (b.full()) {
                        const auto above = score > b.least();
                        bool any = false;
                        for (int64_t l = 0; l < kLanes; ++l) any = any || above[l];
                        if (!any) return;
                    }
                    for (int64_t l = 0; l < lanes; ++l) b.offer(scores[l], start + l);
                };
                if (p.terms == 1) {
                    for (int64_t q = 0; q < n; q += 4) {
                        const int of = static_cast<int>(std::min<int64_t>(4, n - q));
                        Vector v[4];
                        bool pruned = of == 4;
                        T least[4];
                        for (int i = 0; i < of; ++i) {
                            const Best<T>& b = best[range * queries + first + q + i];
                            least[i] = b.least();
                            pruned = pruned && prunes(q + i) && b.full() && own.tile.products(s, own.rows, q + i);
                        }
                        if (pruned) {
                            if (!own.tile.template volumes_above<4>(s, own.rows, q, shift, least, v)) continue;
                        } else {
                            own.tile.volumes(s, own.rows, q, of, v);
                        }
                        for (int i = 0; i < of; ++i) {
                            const T sign = static_cast<T>(p.signs[first + q + i]);
                            const Vector none =
                                Math::all(sign < 0 ? static_cast<T>(__builtin_nan("")) : -Math::kInfinity);
                            offer(q + i, sign > 0 ? v[i] - shift : none);
                        }
                    }
                    continue;
                }
                for (int64_t q = 0; q < n; ++q) {
                    const double* signs = p.signs + (first + q) * p.terms;
                    Vector v[4], most = Math::all(-Math::kInfinity), total{}, bad{};
                    if (prunes(q) && best[range * queries + first + q].full() &&
                        own.tile.products(s, own.rows, q * p.terms)) {
                        const T least = best[range * queries + first + q].least();
                        if (!own.tile.template volumes_above<1>(s, own.rows, q * p.terms, shift, &least, v)) continue;
                    }
                    // The largest added term, then all relative to it.
                    for (int pass = 0; pass < 2; ++pass)
                        for (int64_t t = 0; t < p.terms; t += 4) {
                            const int of = static_cast<int>(std::min<int64_t>(4, p.terms - t));
                            if (pass == 0 || p.terms > 4) own.tile.volumes(s, own.rows, q * p.terms + t, of, v);
                            for (int i = 0; i < of; ++i) {
                                const T sign = static_cast<T>(signs[t + i]);
                                if (sign == 0) continue;
                                if (pass == 0) {
                                    bad = v[i] != v[i] ? v[i] : bad;
                                    if (sign > 0) most = v[i] > most || v[i] != v[i] ? v[i] : most;
                                } else {
                                    total += sign * Math::exp(v[i] == most ? Vector{} : v[i] - most);
                                }
                            }
                        }
                    const Vector finite = Math::log_of_any(total > T(0) ? total : total == total ? Vector{} : total);
                    const Vector score = most == -Math::kInfinity ? most : most + finite;
                    offer(q, score - shift + bad);
                }
            }
        }
    });
    for (int64_t q = 0; q < queries; ++q) {
        if (ranges > 1) {
            Best<T> all{values + q * k, p.indices + q * k, k};
            for (int64_t r = 0; r < ranges; ++r) {
                const Best<T>& part = best[r * queries + q];
                for (int64_t i = 0; i < part.size; ++i) all.offer(part.values[i], part.indices[i]);
            }
            all.finish();
        } else {
            best[q].finish();
        }
    }
}

// ---- sampled pairs

// A block of queries, and a tile of the items of one of them.
template <class T>
struct SampleScratch {
    using Vector = typename BoxTile<T>::Vector;
    static constexpr int64_t kBlock = BoxSettings<T>::kBlock;
    BoxTile<T> tile;
    BoxRows<T> rows;
    T *middles, *center;
    Vector *row_z, *row_Z, *item_z, *item_Z;
    SampleScratch(const BoxSettings<T>& s, Pieces& p)
        : tile(s, false, p),
          rows(s, kBlock, p),
          middles(p.take<T>(s.dims * kBlock)),
          center(p.take<T>(s.dims)),
          row_z(p.take<Vector>(s.dims)),
          row_Z(p.take<Vector>(s.dims)),
          item_z(p.take<Vector>(s.dims)),
          item_Z(p.take<Vector>(s.dims)) {}

    // Calls f(b, q, mine) for the queries from b = `first` to `last`, each of which is at place q of the rows and has
    // its own middle as the centre of the settings `mine`.
    template <class F>
    void each(const BoxModel& m, const BoxSettings<T>& s, const BoxSamples& p, int64_t first, int64_t last,
              const F& f) const {
        BoxSettings<T> mine = s;
        mine.center = center;
        for (int64_t start = first; start < last; start += kBlock) {
            const int64_t n = std::min(kBlock, last - start);
            rows.load(m, s, p.queries, 0, p.query_index + start, 0, n, middles);
            for (int64_t q = 0; q < n; ++q) {
                for (int64_t d = 0; d < m.dims; ++d) center[d] = middles[rows.at(q) + d * kBlock];
                f(start + q, q, mine);
            }
        }
    }
};

// Asks for the items of `count` pairs from `first` on: their rows lie anywhere in memory, and the arithmetic of one
// tile hides the way of the next.
void fetch_ahead(const BoxModel& m, const BoxSamples& p, int64_t first, int64_t count) {
    constexpr int64_t kLine = 64, kMost = 1024;  // bytes; what is longer is found by the processor itself
    const BoxTable& t = p.items;
    if (t.z_dim != 1 || t.Z_dim != 1) return;
    const int64_t size = size_of(m.dtype), bytes = std::min(kMost, m.dims * size);
    for (int64_t i = first; i < std::min(first + count, p.count * p.samples); ++i)
        for (int64_t at = 0; at < bytes; at += kLine) {
            __builtin_prefetch(static_cast<const char*>(t.z) + p.item_index[i] * t.z_row * size + at);
            __builtin_prefetch(static_cast<const char*>(t.Z) + p.item_index[i] * t.Z_row * size + at);
        }
}

template <class T>
void sampled(const BoxModel& m, const BoxSamples& p, T* out, int threads) {
    constexpr int64_t kLanes = BoxTile<T>::kLanes;
    const Call<T> call(m, [&](const BoxSettings<T>& s, Pieces& own) { SampleScratch<T>(s, own); });
    threads = threads_for(static_cast<double>(p.count) * static_cast<double>(p.samples * m.dims), threads);
    Arena arena(call.bytes(threads));
    Pieces shared(arena.data());
    const BoxSettings<T> s = prepared<T>(m, p.queries, p.items, false, shared);
    on_threads(threads, [&](int rank, int size) {
        Pieces own(arena.data() + call.shared_bytes + rank * call.own_bytes);
        const SampleScratch<T> scratch(s, own);
        BoxTile<T> tile = scratch.tile;
        const auto scores = [&](int64_t b, int64_t q, const BoxSettings<T>& mine) {
            for (int64_t j = 0; j < p.samples; j += kLanes) {
                const int64_t lanes = std::min(kLanes, p.samples - j), pair = b * p.samples + j;
                tile.load(m, mine, p.items, 0, p.item_index + pair, lanes);
                fetch_ahead(m, p, pair + lanes, kLanes);
                typename BoxTile<T>::Vector v;
                tile.volumes(mine, scratch.rows, q, 1, &v);
                std::copy_n(reinterpret_cast<const T*>(&v), lanes, out + pair);
            }
        };
        scratch.each(m, s, p, p.count * rank / size, p.count * (rank + 1) / size, scores);
    });
}

// Gradients of row q with a tile: those of the items to item_z[d], those of the row in each lane added to row_z[d].
template <class T>
void row_gradients(const BoxSettings<T>& s, const SampleScratch<T>& x, const BoxTile<T>& tile, int64_t q,
                   typename BoxTile<T>::Vector grad) {
    using Gem = SmallGemm<T>;
    constexpr int64_t kLanes = BoxTile<T>::kLanes, kBlock = BoxTile<T>::kBlock;
    const BoxRows<T>& rows = x.rows;
    const int64_t at = rows.at(q);
    grad = of_volume(s, rows, tile, q, grad);
    if (tile.products(s, rows, q)) {
        grad *= s.inverse_tau;
        for (int64_t d = 0; d < s.dims; ++d) {
            const auto part = tile.product_parts(rows, at, d, grad);
            x.item_z[d] = part.item_z * Gem::load(tile.P + d * kLanes);
            x.item_Z[d] = part.item_Z * Gem::load(tile.Q + d * kLanes);
            x.row_z[d] += part.row_z * rows.P[at + d * kBlock];
            x.row_Z[d] += part.row_Z * rows.Q[at + d * kBlock];
        }
        return;
    }
    tile.with_parts(s, rows, q, [&](const auto& parts) {
        for (int64_t d = 0; d < s.dims; ++d) {
            const auto part = parts(at, d, grad);
            x.item_z[d] = part.item_z;
            x.item_Z[d] = part.item_Z;
            x.row_z[d] += part.row_z;
            x.row_Z[d] += part.row_Z;
        }
    });
}

// The sums over lanes of v[d], times a sign, as a row of gradients.
template <class T>
void store_sums(int64_t dims, const typename BoxTile<T>::Vector* v, T sign, T* out) {
    constexpr int64_t kLanes = BoxTile<T>::kLanes;
    for (int64_t d = 0; d < dims; d += kLanes) {
        const int64_t n = std::min(kLanes, dims - d);
        typename BoxTile<T>::Vector some[kLanes] = {};
        std::copy_n(v + d, n, some);
        const auto sums = sign * sums_of_lanes<T>(some);
        std::copy_n(reinterpret_cast<const T*>(&sums), n, out + d);
    }
}

template <class T>
void sampled_backward(const BoxModel& m, const BoxSamples& p, const BoxGradients& g, int threads) {
    using Vector = typename BoxTile<T>::Vector;
    constexpr int64_t kLanes = BoxTile<T>::kLanes;
    BoxModel rows = m;  // what is written is not narrowed
    rows.dtype = sizeof(T) == 8 ? DType::F64 : DType::F32;
    const Call<T> call(m, [&](const BoxSettings<T>& s, Pieces& own) { SampleScratch<T>(s, own); });
    threads = threads_for(static_cast<double>(p.count) * static_cast<double>(p.samples * m.dims), threads);
    Arena arena(call.bytes(threads));
    Pieces shared(arena.data());
    const BoxSettings<T> s = prepared<T>(m, p.queries, p.items, false, shared);
    const T* grad = static_cast<const T*>(g.grad);
    on_threads(threads, [&](int rank, int size) {
        Pieces own(arena.data() + call.shared_bytes + rank * call.own_bytes);
        const SampleScratch<T> x(s, own);
        BoxTile<T> tile = x.tile;
        const auto gradients = [&](int64_t b, int64_t q, const BoxSettings<T>& mine) {
            std::fill_n(x.row_z, m.dims, Vector{});
            std::fill_n(x.row_Z, m.dims, Vector{});
            for (int64_t j = 0; j < p.samples; j += kLanes) {
                const int64_t lanes = std::min(kLanes, p.samples - j), pair = b * p.samples + j;
                tile.load(m, mine, p.items, 0, p.item_index + pair, lanes);
                fetch_ahead(m, p, pair + lanes, kLanes);
                alignas(64) T of_lane[kLanes] = {};
                std::copy_n(grad + pair, lanes, of_lane);
                row_gradients(mine, x, tile, q, SmallGemm<T>::load(of_lane));
                store_corners(rows, g.item_z, pair, lanes, reinterpret_cast<const T*>(x.item_z), kLanes, T(-1));
                store_corners(rows, g.item_Z, pair, lanes, reinterpret_cast<const T*>(x.item_Z), kLanes, T(1));
            }
            store_sums(m.dims, x.row_z, T(-1), static_cast<T*>(g.query_z) + b * m.dims);
            store_sums(m.dims, x.row_Z, T(1), static_cast<T*>(g.query_Z) + b * m.dims);
        };
        x.each(m, s, p, p.count * rank / size, p.count * (rank + 1) / size, gradients);
    });
}

template <class F>
void with_scalar(const BoxModel& m, const F& f) {
    m.dtype == DType::F64 ? f(static_cast<double*>(nullptr)) : f(static_cast<float*>(nullptr));
}

}  // namespace

void box_log_volumes(const BoxModel& m, const BoxTable& queries, const BoxTable& items, void* out, int threads) {
    with_scalar(m, [&](auto* tag) { log_volumes(m, queries, items, static_cast<decltype(tag)>(out), threads); });
}

void box_log_volumes_backward(const BoxModel& m, const BoxTable& queries, const BoxTable& items, const BoxGradients& g,
                              int threads) {
    with_scalar(m, [&](auto* tag) { backward<std::remove_pointer_t<decltype(tag)>>(m, queries, items, g, threads); });
}

void box_topk(const BoxModel& m, const BoxTopk& p, int threads) {
    with_scalar(m, [&](auto* tag) { topk<std::remove_pointer_t<decltype(tag)>>(m, p, threads); });
}

void box_sampled(const BoxModel& m, const BoxSamples& p, void* out, int threads) {
    with_scalar(m, [&](auto* tag) { sampled(m, p, static_cast<decltype(tag)>(out), threads); });
}

void box_sampled_backward(const BoxModel& m, const BoxSamples& p, const BoxGradients& g, int threads) {
    with_scalar(m, [&](auto* tag) { sampled_backward<std::remove_pointer_t<decltype(tag)>>(m, p, g, threads); });
}

}  // namespace pyops::PYOPS_ISA
