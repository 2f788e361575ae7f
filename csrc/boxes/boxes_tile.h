// Log-volumes of a few query boxes with a tile of kLanes item boxes, and their gradients.
//
// With nu = tau all dimensions of an intersection follow from products: with P = e^((z - c + offset) / tau) and
// Q = e^((c - Z) / tau), whose sums over boxes are those of the intersection, e^((offset - w) / tau) = P Q and
//
//   side = tau log1p(x),  x = 1 / (P Q):   two adds, two products, a reciprocal and a log1p per dimension.
//
// Sides are multiplied, and the exponent of the product split off every four dimensions (every one, if sides may be
// smaller than e^-17). This needs |z - c|, |Z - c| <= 40 tau. Outside, and for nu != tau, the log domain:
//
//   w = min Z - max z - tau log((1 + e^-|dz / tau|) (1 + e^-|dZ / tau|)),
//   side = nu (max(s, 0) + log1p(e^-|s|)),  s = (w - offset) / nu,
//
// where log side = s for s below about -80. Hard boxes: max, min, difference, product.
//
// Gradients, with r = grad dlog(side)/dw: product form r = grad / ((P Q + 1) log1p(x) tau), dz_q -= r P_q / P,
// dZ_q += r Q_q / Q and likewise for items, where P_q and Q_q are multiplied to the sums over items at the end.
#pragma once

#include <cmath>

#include "boxes/boxes.h"
#include "common/exp.h"
#include "common/lanes.h"
#include "common/lines.h"
#include "common/log.h"
#include "common/pieces.h"

namespace pyops::PYOPS_ISA {

template <class T>
struct BoxSettings {
    using Math = VectorMath<T>;
    static constexpr T kWindow = 40;
    static constexpr int64_t kBlock = std::max(VectorMath<T>::kLanes, 4);  // rows that lie together

    int64_t dims;
    T tau, inverse_tau, offset, factor;  // factor = e^(offset / tau)
    bool gumbel, soft, products;         // tau > 0, nu > 0, nu = tau > 0
    bool exponentials;                   // P and Q serve
    T* inverse_nu;                       // per dimension
    T* center;                           // c
    T constant = 0;                      // sum of log nu

    BoxSettings(const BoxModel& m, Pieces& pieces)
        : dims(m.dims),
          tau(static_cast<T>(m.tau)),
          inverse_tau(static_cast<T>(1 / m.tau)),
          offset(static_cast<T>(m.offset)),
          factor(near(m) ? static_cast<T>(std::exp(m.offset / m.tau)) : T(1)),
          gumbel(m.tau > 0),
          soft(m.nu > 0 || m.nus),
          products(m.tau > 0 && !m.nus && m.nu == m.tau && near(m)),
          exponentials(m.tau > 0 && near(m)),
          inverse_nu(pieces.take<T>(m.dims)),
          center(pieces.take<T>(m.dims)) {}

    // Whether e^(offset / tau) leaves P within range.
    static bool near(const BoxModel& m) { return std::abs(m.offset) <= 4 * m.tau; }

    void prepare(const BoxModel& m) {
        double sum = 0;
        for (int64_t d = 0; d < dims; ++d) {
            const double nu = m.nus ? m.nus[d] : m.nu;
            inverse_nu[d] = soft ? static_cast<T>(1 / nu) : T(1);
            if (soft) sum += std::log(nu);
            center[d] = 0;
        }
        constant = static_cast<T>(sum);
    }
};

// One corner of a row, widened.
template <class T>
inline void read_corner(const BoxModel& m, const BoxTable& t, bool upper, int64_t row, T* out) {
    with_type(m.dtype, [&](auto* tag) {
        using E = std::remove_pointer_t<decltype(tag)>;
        const E* p = static_cast<const E*>(upper ? t.Z : t.z) + row * (upper ? t.Z_row : t.z_row);
        const int64_t stride = upper ? t.Z_dim : t.z_dim;
        for (int64_t d = 0; d < m.dims; ++d) out[d] = static_cast<T>(widen(p[d * stride]));
    });
}

// The middle of each dimension's finite corners, so that exponents are small on either side.
template <class T>
inline void find_center(const BoxModel& m, const BoxTable& queries, const BoxTable& items, T* row, T* low, T* high,
                        T* center) {
    constexpr T kInfinity = VectorMath<T>::kInfinity;
    std::fill(low, low + m.dims, kInfinity);
    std::fill(high, high + m.dims, -kInfinity);
    for (const BoxTable* t : {&queries, &items})
        for (int64_t i = 0; i < t->rows; ++i)
            for (const bool upper : {false, true}) {
                read_corner(m, *t, upper, i, row);
                for (int64_t d = 0; d < m.dims; ++d) {
                    const T x = row[d];
                    const bool finite = x - x == 0;
                    low[d] = finite && x < low[d] ? x : low[d];
                    high[d] = finite && x > high[d] ? x : high[d];
                }
            }
    for (int64_t d = 0; d < m.dims; ++d) center[d] = low[d] <= high[d] ? low[d] + (high[d] - low[d]) / 2 : T(0);
}

// What is known of kLanes boxes besides their corners, in a lane each.
template <class T>
struct BoxBounds {
    using Vector = typename SmallGemm<T>::Vector;
    using Mask = typename VectorMath<T>::Ints;
    Vector bad;        // NaN if a corner is, else 0
    Vector low, high;  // largest exponents of P and of Q
    Vector width;      // largest Z - z
    Mask window;       // exponents within the window, or no constraint (P or Q zero)
    Mask constrained;  // no corner at infinity
};

// Corners of kLanes boxes: rows first .. first + count, or index[0 .. count), of which the first is repeated in the
// lanes that are left. Dimension d of all of them goes to out[d step].
template <class T>
inline void load_corners(const BoxModel& m, const BoxTable& t, bool upper, int64_t first, const int64_t* index,
                         int64_t count, T* out, int64_t step) {
    using Gem = SmallGemm<T>;
    constexpr int64_t kLanes = Gem::kLanes;
    with_type(m.dtype, [&](auto* tag) {
        using E = std::remove_pointer_t<decltype(tag)>;
        const E* base = static_cast<const E*>(upper ? t.Z : t.z);
        const int64_t row = upper ? t.Z_row : t.z_row, stride = upper ? t.Z_dim : t.z_dim;
        const E* rows[kLanes];
        for (int64_t l = 0; l < kLanes; ++l) {
            const int64_t i = l < count ? l : 0;
            rows[l] = base + (index ? index[i] : first + i) * row;
        }
        typename Gem::Vector v[kLanes];
        for (int64_t d = 0; d < m.dims; d += kLanes) {
            const int64_t dims = std::min(kLanes, m.dims - d);
            for (int64_t l = 0; l < kLanes; ++l) {
                const E* p = rows[l] + d * stride;
                if (dims == kLanes && stride == 1) {
                    if constexpr (std::is_same_v<E, T>) {
                        v[l] = Gem::load(p);
                    } else {
                        for (int64_t j = 0; j < kLanes; ++j) v[l][j] = static_cast<T>(widen(p[j]));
                    }
                } else {
                    alignas(64) T some[kLanes] = {};
                    for (int64_t j = 0; j < dims; ++j) some[j] = static_cast<T>(widen(p[j * stride]));
                    v[l] = Gem::load(some);
                }
            }
            Transpose<T>::square(v);
            for (int64_t j = 0; j < dims; ++j) Gem::store(out + (d + j) * step, v[j]);
        }
    });
}

// What d = a - b lost to rounding.
template <class V>
[[gnu::always_inline]] inline V lost(V a, V b, V d) {
    const V back = d - a;
    return (a - (d - back)) - (b + back);
}

// Corners as load_corners() has them, their exponentials if wanted, and their bounds. Exponentials are about the centre
// of the settings, or about the middles of the boxes themselves, which then go to own_middles[d step].
template <class T>
inline BoxBounds<T> load_boxes(const BoxModel& m, const BoxSettings<T>& s, const BoxTable& t, int64_t first,
                               const int64_t* index, int64_t count, T* z, T* Z, T* P, T* Q, int64_t step,
                               T* own_middles = nullptr) {
    using Gem = SmallGemm<T>;
    using Math = VectorMath<T>;
    using Vector = typename Gem::Vector;
    constexpr T kInfinity = Math::kInfinity, kWindow = BoxSettings<T>::kWindow;
    load_corners(m, t, false, first, index, count, z, step);
    load_corners(m, t, true, first, index, count, Z, step);
    Vector bad{}, most_p = Math::all(-kInfinity), most_q = most_p, most_width = most_p;
    auto window = ~typename Math::Ints{}, constrained = window;
    const T inverse_tau = s.inverse_tau, factor = s.factor;
    for (int64_t d = 0; d < s.dims; ++d) {
        const Vector low = Gem::load(z + d * step), high = Gem::load(Z + d * step), width = high - low;
        Vector c;
        if (own_middles) {
            const Vector middle = low + width / 2;
            c = middle - middle == T(0) ? middle : Vector{};
            Gem::store(own_middles + d * step, c);
        } else {
            c = Math::all(s.center[d]);
        }
        bad = (low != low) | (high != high) ? Math::all(static_cast<T>(__builtin_nan(""))) : bad;
        const Vector from_low = low - c, from_high = c - high;
        const Vector p = from_low * inverse_tau, q = from_high * inverse_tau;
        most_p = p > most_p ? p : most_p;
        most_q = q > most_q ? q : most_q;
        most_width = width > most_width ? width : most_width;
        const auto open_low = low == -kInfinity, open_high = high == kInfinity;
        constrained &= ~(open_low | open_high);
        window &= (open_low | ((p <= kWindow) & (p >= -kWindow))) & (open_high | ((q <= kWindow) & (q >= -kWindow)));
        if (!P) continue;
        // The rounding of an exponent of 30 would cost 16 ulp: what the difference and the product lost is put back.
        const Vector lost_p = lost(low, c, from_low) * inverse_tau + (from_low * inverse_tau - p);
        const Vector lost_q = lost(c, high, from_high) * inverse_tau + (from_high * inverse_tau - q);
        Gem::store(P + d * step, open_low ? Vector{} : Math::exp(p) * (factor + factor * lost_p));
        Gem::store(Q + d * step, open_high ? Vector{} : Math::exp(q) * (T(1) + lost_q));
    }
    return {bad, most_p, most_q, most_width, window & (bad == T(0)), constrained};
}

// Query boxes, kBlock together, of which dimension d is at [d kBlock].
template <class T>
struct BoxRows {
    using Gem = SmallGemm<T>;
    static constexpr int64_t kLanes = Gem::kLanes, kBlock = BoxSettings<T>::kBlock;
    int64_t dims;
    T *z, *Z, *P, *Q;
    T *bad, *low, *high, *width;
    typename VectorMath<T>::Int* window;

    BoxRows(const BoxSettings<T>& s, int64_t rows, Pieces& pieces) : dims(s.dims) {
        const int64_t most = padded(rows, kBlock);
        z = pieces.take<T>(s.dims * most);
        Z = pieces.take<T>(s.dims * most);
        P = pieces.take<T>(s.gumbel ? s.dims * most : 0);
        Q = pieces.take<T>(s.gumbel ? s.dims * most : 0);
        for (T** each : {&bad, &low, &high, &width}) *each = pieces.take<T>(most);
        window = pieces.take<typename VectorMath<T>::Int>(most);
    }
    // Where dimension 0 of box q is.
    int64_t at(int64_t q) const { return q / kBlock * (kBlock * dims) + q % kBlock; }

    // Rows first + from .. first + to of the table, or index[from .. to), to places from .. to; from is a multiple of
    // kBlock. The middles of each vector of boxes go to own_middles + at(i).
    void load(const BoxModel& m, const BoxSettings<T>& s, const BoxTable& t, int64_t first, const int64_t* index,
              int64_t from, int64_t to, T* own_middles = nullptr) const {
        for (int64_t i = from; i < to; i += kLanes) {
            T *p = s.gumbel ? P + at(i) : nullptr, *q = s.gumbel ? Q + at(i) : nullptr;
            const BoxBounds<T> b =
                load_boxes(m, s, t, first + i, index ? index + i : nullptr, std::min(kLanes, to - i), z + at(i),
                           Z + at(i), p, q, kBlock, own_middles ? own_middles + at(i) : nullptr);
            Gem::store(bad + i, b.bad);
            Gem::store(low + i, b.low);
            Gem::store(high + i, b.high);
            Gem::store(width + i, b.width);
            __builtin_memcpy(window + i, &b.window, sizeof(b.window));
        }
    }
};

// kLanes item boxes: dimension d of all of them is one vector.
template <class T>
struct BoxTile {
    using Gem = SmallGemm<T>;
    using Math = VectorMath<T>;
    using Vector = typename Gem::Vector;
    using Ints = typename Math::Ints;
    using Exponents = typename Math::Exponents;
    static constexpr int64_t kLanes = Gem::kLanes, kBlock = BoxSettings<T>::kBlock;
    static constexpr int64_t kSegment = 16;  // dimensions between the tests of a pruned search

    T *z, *Z, *P, *Q;
    Vector* own;  // of the boxes themselves: log volume of the first kSegment, 2 kSegment ... dimensions
    Vector bad;
    T low, high, width;
    bool window;

    BoxTile(const BoxSettings<T>& s, bool with_own, Pieces& pieces) {
        z = pieces.take<T>(s.dims * kLanes);
        Z = pieces.take<T>(s.dims * kLanes);
        P = pieces.take<T>(s.gumbel ? s.dims * kLanes : 0);
        Q = pieces.take<T>(s.gumbel ? s.dims * kLanes : 0);
        own = pieces.take<Vector>(with_own ? s.dims / kSegment + 1 : 0);
        if (!with_own) own = nullptr;
    }

    // Rows first .. first + count, or index[0 .. count); the lanes that are left repeat the first.
    void load(const BoxModel& m, const BoxSettings<T>& s, const BoxTable& t, int64_t first, const int64_t* index,
              int64_t count) {
        T *p = s.gumbel ? P : nullptr, *q = s.gumbel ? Q : nullptr;
        const BoxBounds<T> b = load_boxes(m, s, t, first, index, count, z, Z, p, q, kLanes);
        bad = b.bad;
        low = high = width = -Math::kInfinity;
        window = true;
        for (int64_t l = 0; l < kLanes; ++l) {
            low = std::max(low, b.low[l]);
            high = std::max(high, b.high[l]);
            width = std::max(width, b.width[l]);
            window = window && b.window[l] && b.constrained[l];
        }
        if (!own || !s.products || !window) return;
        Vector product = Math::all(1);
        Exponents exponent{};
        for (int64_t d = 0; d < s.dims; ++d) {
            const Vector pq = Gem::load(P + d * kLanes) * Gem::load(Q + d * kLanes);
            product = Math::split(product * Math::log1p(Math::reciprocal(pq)), exponent);
            if (d % kSegment == kSegment - 1) own[d / kSegment] = Math::log(product, exponent);
        }
        own[s.dims / kSegment] = Math::log(product, exponent);
    }

    // Whether the product form serves row q, and whether sides are no smaller than e^-17 then.
    bool products(const BoxSettings<T>& s, const BoxRows<T>& rows, int64_t q) const {
        return s.products && factors(s, rows, q);
    }
    // Whether P and Q of the row and of the tile are within the window. Hard volumes need w to the last place.
    bool factors(const BoxSettings<T>& s, const BoxRows<T>& rows, int64_t q) const {
        return s.exponentials && s.soft && window && rows.window[q];
    }
    bool mild(const BoxRows<T>& rows, int64_t q) const {
        return std::max(low, rows.low[q]) + std::max(high, rows.high[q]) <= 15;
    }

    // out[i] = the log volumes of row q + i with the tile, for n <= 4 rows.
    void volumes(const BoxSettings<T>& s, const BoxRows<T>& rows, int64_t q, int n, Vector* out) const {
        if (n == 4 && q % 4 == 0) {  // else they may lie in two blocks
            bool all = true, all_mild = true;
            T widest = width;
            for (int i = 0; i < 4; ++i) {
                all = all && products(s, rows, q + i);
                all_mild = all_mild && mild(rows, q + i);
                widest = std::max(widest, rows.width[q + i]);
            }
            if (all && all_mild) return by_products<4, 4>(s, rows, q, out);
            if (all) return by_products<4, 1>(s, rows, q, out);
            if (!s.gumbel && !s.soft && s.offset == 0) {
                if (widest < kWide) return hard<4, 8>(s, rows, q, out);
                if (widest < kVeryWide) return hard<4, 4>(s, rows, q, out);
            }
        }
        for (int i = 0; i < n; ++i) {
            if (products(s, rows, q + i))
                mild(rows, q + i) ? by_products<1, 4>(s, rows, q + i, out + i)
                                  : by_products<1, 1>(s, rows, q + i, out + i);
            else
                by_logarithms(s, rows, q + i, out + i);
        }
    }

    // The same for rows that products() serves, unless every score `out[i] - shift` falls below least[i]: then false,
    // as soon as that is certain.
    template <int N>
    bool volumes_above(const BoxSettings<T>& s, const BoxRows<T>& rows, int64_t q, Vector shift, const T* least,
                       Vector* out) const {
        Vector product[N];
        Exponents exponent[N] = {};
        for (int i = 0; i < N; ++i) product[i] = Math::all(1);
        const int64_t last = s.dims / kSegment;
        for (int64_t g = 0; g <= last; ++g) {
            multiply_sides<N, 1>(rows, q, g * kSegment, std::min(s.dims, (g + 1) * kSegment), product, exponent);
            if (g == last) break;
            // What is to come can at most be the items' own sides.
            const Vector rest = own[last] - own[g] + s.constant - shift;
            // Several times what both can err by: all are sums of so many terms, of about the items' own logarithms.
            const Vector sizes = magnitude(own[last]) + magnitude(own[g]) + magnitude(shift) + std::abs(s.constant);
            const Vector slack = T(2e-6) * (sizes + static_cast<T>(s.dims)) + T(1e-5);
            bool hope = false;
            for (int i = 0; i < N; ++i) {
                const Vector bound = Math::log(product[i], exponent[i]) + rest;
                const auto above = !(bound < least[i] - slack);
                for (int64_t l = 0; l < kLanes; ++l) hope = hope || above[l];
            }
            if (!hope) return false;
        }
        for (int i = 0; i < N; ++i) out[i] = Math::log(product[i], exponent[i]) + s.constant + bad + rows.bad[q + i];
        return true;
    }

    // Contributions to gradients of one row and one dimension, for sum over lanes and over rows.
    struct Parts {
        Vector row_z, row_Z, item_z, item_Z;
    };

    // grad is that of the log volume over tau. Without the factors P_q and P of each box.
    [[gnu::always_inline]] Parts product_parts(const BoxRows<T>& rows, int64_t at, int64_t d, Vector grad) const {
        const Vector p = rows.P[at + d * kBlock] + Gem::load(P + d * kLanes);
        const Vector t = rows.Q[at + d * kBlock] + Gem::load(Q + d * kLanes);
        const Vector y = p * t, x = Math::reciprocal(y);
        // Neither leaves the range of T: r is near grad, and 1 / p and 1 / t are within e^40.
        const Vector r = grad * Math::reciprocal((y + T(1)) * Math::log1p(x));
        const Vector a = r * (x * t), b = r * (x * p);
        return {a, b, a, b};
    }

    // Calls f with the parts of a dimension as a function of (at of the row, dimension, grad), in the form that serves
    // row q.
    template <class F>
    void with_parts(const BoxSettings<T>& s, const BoxRows<T>& rows, int64_t q, const F& f) const {
        with_way(s, rows, q, [&]<Way way, bool kSoft>() {
            f([&](int64_t at, int64_t d, Vector grad)
                  __attribute__((always_inline)) { return logarithm_parts<way, kSoft>(s, rows, at, d, grad); });
        });
    }

    // The smallest w - offset over the dimensions, of which hard boxes need to know whether it is positive: if none is,
    // not all dimensions are looked at.
    Vector smallest(const BoxSettings<T>& s, const BoxRows<T>& rows, int64_t q) const {
        Vector least = Math::all(Math::kInfinity);
        with_way(s, rows, q, [&]<Way way, bool>() {
            for (int64_t d = 0; d < s.dims; ++d) {
                const Vector w = argument<way, false>(s, rows, rows.at(q), d);
                least = w < least ? w : least;
                if (d % 16 == 15 && Math::all_negative(Math::bits(least))) break;
            }
        });
        return least;
    }

  private:
    enum class Way { Factors, Exponentials, Hard };

    template <Way way, bool kSoft>
    [[gnu::always_inline]] Parts logarithm_parts(const BoxSettings<T>& s, const BoxRows<T>& rows, int64_t at, int64_t d,
                                                 Vector grad) const {
        const Vector side = argument<way, kSoft>(s, rows, at, d);
        Shares low, high;
        if constexpr (way == Way::Factors) {
            const Vector pq = Math::all(rows.P[at + d * kBlock]), tq = Math::all(rows.Q[at + d * kBlock]);
            const Vector pi = Gem::load(P + d * kLanes), ti = Gem::load(Q + d * kLanes);
            const Vector p = pq + pi, t = tq + ti, inverse = T(1) / (p * t);
            low = {pq * (inverse * t), pi * (inverse * t)};
            high = {tq * (inverse * p), ti * (inverse * p)};
        } else {
            const Vector zq = Math::all(rows.z[at + d * kBlock]), Zq = Math::all(rows.Z[at + d * kBlock]);
            const Vector zi = Gem::load(z + d * kLanes), Zi = Gem::load(Z + d * kLanes);
            if constexpr (way == Way::Exponentials) {
                low = shares(difference(zq, zi) * s.inverse_tau);
                high = shares(difference(Zi, Zq) * s.inverse_tau);
            } else {
                low = hard_shares(zq, zi);
                high = hard_shares(Zi, Zq);
            }
        }
        Vector slope;
        if constexpr (kSoft) {
            const Vector e = Math::exp(side > T(0) ? -side : side);
            const Vector sigma = (side > T(0) ? Math::all(1) : e) / (T(1) + e);
            const Vector value = (side > T(0) ? side : Vector{}) + Math::log1p(e);
            slope = s.inverse_nu[d] * (side < kTail ? Math::all(1) : sigma / value);
        } else {
            slope = side > T(0) ? T(1) / side : Vector{};
        }
        // Without a gradient there is nothing, whatever the boxes: of a NaN box no other hears that does not meet it.
        const auto live = grad != T(0);
        const Vector r = grad * slope;
        const auto part = [&](Vector share) { return live ? r * share : Vector{}; };
        return {part(low.first), part(high.first), part(low.second), part(high.second)};
    }

    static constexpr T kTail = sizeof(T) == 4 ? T(-80) : T(-700);  // log softplus(s) = s below, to the last place
    // Products of 8, and of 4, numbers below these are finite.
    static constexpr T kWide = sizeof(T) == 4 ? T(5e4) : T(1e38), kVeryWide = sizeof(T) == 4 ? T(1e9) : T(1e76);
    static constexpr T kNormal = sizeof(T) == 4 ? T(1.17549435e-38) : T(2.2250738585072014e-308);

    template <int N, int kEvery>
    [[gnu::always_inline]] void multiply_sides(const BoxRows<T>& rows, int64_t q, int64_t from, int64_t to,
                                               Vector* product, Exponents* exponent) const {
        const T *pq = rows.P + rows.at(q) + from * kBlock, *qq = rows.Q + rows.at(q) + from * kBlock;
        const auto side = [&](int64_t d, int i) __attribute__((always_inline)) {
            const T *a = pq + (d - from) * kBlock, *b = qq + (d - from) * kBlock;
            const Vector p = a[i] + Gem::load(P + d * kLanes), t = b[i] + Gem::load(Q + d * kLanes);
            return Math::log1p(Math::reciprocal(p * t));
        };
        int64_t d = from;
        for (; d + kEvery <= to; d += kEvery) {
#pragma GCC unroll 4
            for (int e = 0; e < kEvery; ++e)
#pragma GCC unroll 4
                for (int i = 0; i < N; ++i) product[i] *= side(d + e, i);
#pragma GCC unroll 4
            for (int i = 0; i < N; ++i) product[i] = Math::split(product[i], exponent[i]);
        }
        for (; d < to; ++d)
            for (int i = 0; i < N; ++i) product[i] = Math::split(product[i] * side(d, i), exponent[i]);
    }

    template <int N, int kEvery>
    void by_products(const BoxSettings<T>& s, const BoxRows<T>& rows, int64_t q, Vector* out) const {
        Vector product[N];
        Exponents exponent[N] = {};
#pragma GCC unroll 4
        for (int i = 0; i < N; ++i) product[i] = Math::all(1);
        multiply_sides<N, kEvery>(rows, q, 0, s.dims, product, exponent);
        for (int i = 0; i < N; ++i) out[i] = Math::log(product[i], exponent[i]) + s.constant + bad + rows.bad[q + i];
    }

    // Sides are multiplied with their signs, which are remembered: where one is negative, the volume is 0. Where all
    // are and no product is normal, a side is 0 or many are small. Ends as soon as all volumes are 0.
    template <int N, int kEvery>
    void hard(const BoxSettings<T>& s, const BoxRows<T>& rows, int64_t q, Vector* out) const {
        constexpr int64_t kFirst = 16, kOften = 64;  // dimensions before the first test for an end, and between others
        static_assert(kFirst % kEvery == 0 && kEvery % 2 == 0);
        Vector product[N], least[N];
        Exponents exponent[N] = {};
        Ints empty[N] = {};
#pragma GCC unroll 4
        for (int i = 0; i < N; ++i) {
            product[i] = Math::all(1);
            least[i] = Math::all(1);
        }
        const int64_t at = rows.at(q);
        const auto side = [&](int64_t d, int i) __attribute__((always_inline)) {
            const Vector zq = Math::all(rows.z[at + d * kBlock + i]), Zq = Math::all(rows.Z[at + d * kBlock + i]);
            const Vector zi = Gem::load(z + d * kLanes), Zi = Gem::load(Z + d * kLanes);
            const Vector w = (Zi < Zq ? Zi : Zq) - (zi > zq ? zi : zq);
            product[i] *= w;
            return w;
        };
        const auto split = [&](int i) __attribute__((always_inline)) {
            least[i] = product[i] < least[i] ? product[i] : least[i];
            product[i] = Math::split(product[i], exponent[i]);
        };
        int64_t d = 0;
        for (; d + kEvery <= s.dims; d += kEvery) {
#pragma GCC unroll 4
            for (int e = 0; e < kEvery; e += 2)
#pragma GCC unroll 4
                for (int i = 0; i < N; ++i) {
                    const Vector a = side(d + e, i), b = side(d + e + 1, i);
                    empty[i] = Math::any_of(empty[i], Math::bits(a), Math::bits(b));
                }
#pragma GCC unroll 4
            for (int i = 0; i < N; ++i) split(i);
            if (d + kEvery == kFirst || (d + kEvery) % kOften == 0) {
                Ints all = empty[0];
                for (int i = 1; i < N; ++i) all &= empty[i];
                if (Math::all_negative(all)) d = s.dims;
            }
        }
        for (; d < s.dims; ++d)
            for (int i = 0; i < N; ++i) {
                empty[i] |= Math::bits(side(d, i));
                split(i);
            }
        for (int i = 0; i < N; ++i) {
            const Ints some = empty[i] >= 0, sure = least[i] >= kNormal;
            if (!Math::all_negative(sure | empty[i])) {
                by_logarithms(s, rows, q + i, out + i);
                continue;
            }
            const Vector value = Math::log(product[i], exponent[i]);
            out[i] = (some ? value : Math::all(-Math::kInfinity)) + bad + rows.bad[q + i];
        }
    }

    // a - b, and 0 for equal infinities.
    [[gnu::always_inline]] static Vector difference(Vector a, Vector b) { return a == b ? Vector{} : a - b; }
    [[gnu::always_inline]] static Vector magnitude(Vector x) { return x < T(0) ? -x : x; }

    // The weights of two numbers in their (soft) maximum, of difference x: first is that of the larger for x > 0.
    struct Shares {
        Vector first, second;
    };
    [[gnu::always_inline]] static Shares shares(Vector x) {
        const Vector e = Math::exp(-magnitude(x)), large = T(1) / (T(1) + e), small = e * large;
        return {x < T(0) ? small : large, x < T(0) ? large : small};
    }
    [[gnu::always_inline]] static Shares hard_shares(Vector a, Vector b) {
        const Vector first = a > b ? Math::all(1) : a == b ? Math::all(T(0.5)) : Vector{};
        return {first, T(1) - first};
    }

    // s of softplus(s), or of relu(s), of the row at `at` in dimension d: by factors P and Q, by their exponentials, or
    // hard.
    template <Way way, bool kSoft>
    [[gnu::always_inline]] Vector argument(const BoxSettings<T>& s, const BoxRows<T>& rows, int64_t at,
                                           int64_t d) const {
        Vector w;
        if constexpr (way == Way::Factors) {
            const Vector p = rows.P[at + d * kBlock] + Gem::load(P + d * kLanes);
            const Vector t = rows.Q[at + d * kBlock] + Gem::load(Q + d * kLanes);
            w = -s.tau * Math::log(p * t);
        } else {
            const Vector zq = Math::all(rows.z[at + d * kBlock]), Zq = Math::all(rows.Z[at + d * kBlock]);
            const Vector zi = Gem::load(z + d * kLanes), Zi = Gem::load(Z + d * kLanes);
            w = (Zq < Zi ? Zq : Zi) - (zq > zi ? zq : zi) - s.offset;
            if constexpr (way == Way::Exponentials) {
                const Vector a = Math::exp(-magnitude(difference(zq, zi) * s.inverse_tau));
                const Vector b = Math::exp(-magnitude(difference(Zq, Zi) * s.inverse_tau));
                w -= s.tau * Math::log1p(a + b + a * b);
            }
        }
        return kSoft ? w * s.inverse_nu[d] : w;
    }

    void by_logarithms(const BoxSettings<T>& s, const BoxRows<T>& rows, int64_t q, Vector* out) const {
        with_way(s, rows, q, [&]<Way way, bool kSoft>() { by_logarithms_of<way, kSoft>(s, rows, q, out); });
    }

    template <class F>
    void with_way(const BoxSettings<T>& s, const BoxRows<T>& rows, int64_t q, const F& f) const {
        const auto of = [&]<Way way>() {
            s.soft ? f.template operator()<way, true>() : f.template operator()<way, false>();
        };
        if (!s.gumbel) return of.template operator()<Way::Hard>();
        factors(s, rows, q) ? of.template operator()<Way::Factors>() : of.template operator()<Way::Exponentials>();
    }

    template <Way way, bool kSoft>
    void by_logarithms_of(const BoxSettings<T>& s, const BoxRows<T>& rows, int64_t q, Vector* out) const {
        Vector product = Math::all(1), sum{};
        Exponents exponent{};
        Ints empty{};
        const int64_t at = rows.at(q);
        // In two loops: the chain of both would leave too few dimensions in flight.
        constexpr int64_t kStep = 16;
        Vector arguments[kStep];
        for (int64_t start = 0; start < s.dims; start += kStep) {
            const int64_t count = std::min(kStep, s.dims - start);
            for (int64_t i = 0; i < count; ++i) {
                arguments[i] = argument<way, kSoft>(s, rows, at, start + i);
            }
            for (int64_t i = 0; i < count; ++i) {
                const Vector x = arguments[i];
                Vector side;
                if constexpr (kSoft) {
                    const auto usual = (x >= kTail) & (x < Math::kInfinity);
                    sum += usual ? Vector{} : x;
                    side = (x > T(0) ? x : Vector{}) + Math::log1p(Math::exp(-magnitude(x)));
                    side = usual ? side : Math::all(1);
                } else {
                    // A side of 0 empties the box, even if another is unbounded.
                    const auto usual = (x > T(0)) & (x < Math::kInfinity);
                    sum += x == Math::kInfinity ? x : Vector{};
                    empty |= ~(x > T(0));
                    side = usual ? (x > kNormal ? x : Math::all(kNormal)) : Math::all(1);
                }
                product = Math::split(product * side, exponent);
            }
        }
        const Vector value = Math::log(product, exponent) + sum + s.constant;
        *out = (empty < 0 ? Math::all(-Math::kInfinity) : value) + bad + rows.bad[q];
    }
};

}  // namespace pyops::PYOPS_ISA
