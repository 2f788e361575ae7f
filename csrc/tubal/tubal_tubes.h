// Blocks of tubes between tensors of any strides and dtype, and rows of kBlock lanes: lane l of row t is element t of
// tube l. Contiguous tubes are transposed in registers, short ones by shuffles of whole vectors.
#pragma once

#include "common/lines.h"
#include "tubal/tubal_transform.h"

namespace pyops::PYOPS_ISA {

template <class T>
struct Tubes {
    using Gem = SmallGemm<T>;
    using Vector = typename Gem::Vector;
    using Mask = typename Transpose<T>::Mask;
    static constexpr int64_t kLanes = Gem::kLanes, kBlock = TubeTransform<T>::kBlock;

    // The tubes p[l lane + t tube], 0 <= l < count, 0 <= t < n; the other lanes become zero.
    template <class E>
    static void read(const E* p, int64_t lane, int64_t tube, int64_t n, int64_t count, T* x) {
        constexpr bool same = std::is_same_v<E, T>;
        if (lane == 1) {
            for (int64_t t = 0; t < n; ++t) {
                const E* row = p + t * tube;
                T* out = x + t * kBlock;
                if (count == kBlock) {
                    // More rows than the processor follows by itself.
                    constexpr int64_t kLine = 64 / sizeof(E);
                    for (int64_t l = 0; l < kBlock; l += kLine) __builtin_prefetch(row + kBlock + l, 0, 2);
                    for (int64_t l = 0; l < kBlock; ++l) out[l] = static_cast<T>(widen(row[l]));
                } else
                    for (int64_t l = 0; l < kBlock; ++l) out[l] = l < count ? static_cast<T>(widen(row[l])) : T(0);
            }
            return;
        }
        if constexpr (same) {
            if (tube == 1 && lane == n && count == kBlock) {
                if (n == 2) return split<2>(p, x);
                if (n == 3) return split<3>(p, x);
                if (n == 4) return split<4>(p, x);
            }
        }
        if (tube != 1) {
            for (int64_t t = 0; t < n; ++t)
                for (int64_t l = 0; l < kBlock; ++l)
                    x[t * kBlock + l] = l < count ? static_cast<T>(widen(p[l * lane + t * tube])) : T(0);
            return;
        }
        for (int64_t l0 = 0; l0 < kBlock; l0 += kLanes)
            for (int64_t t0 = 0; t0 < n; t0 += kLanes) {
                const int64_t t = n >= kLanes ? std::min(t0, n - kLanes) : 0;  // the last squares may overlap
                T* target = x + t * kBlock + l0;
                if constexpr (same) {
                    if (n >= kLanes && l0 + kLanes <= count) {
                        const E* source = p + l0 * lane + t;
                        for (int64_t l = 0; l < kLanes; ++l) __builtin_prefetch(source + (kBlock + l) * lane, 0, 2);
                        Transpose<T>::block(source, lane, target, kBlock);
                        continue;
                    }
                }
                if constexpr (same) {
                    // Of shorter tubes whole vectors too, where the block goes on behind them.
                    if (n < kLanes && (l0 + kLanes - 1) * lane + kLanes <= (count - 1) * lane + n) {
                        Vector v[kLanes];
#pragma GCC unroll 16
                        for (int l = 0; l < kLanes; ++l) v[l] = Gem::load(p + (l0 + l) * lane);
                        __builtin_prefetch(p + (l0 + kBlock) * lane, 0, 2);
                        Transpose<T>::square(v);
                        for (int64_t j = 0; j < n; ++j) Gem::store(target + j * kBlock, v[j]);
                        continue;
                    }
                }
                alignas(64) T square[kLanes * kLanes] = {};
                for (int64_t l = 0; l < std::min(kLanes, count - l0); ++l) {
                    const E* source = p + (l0 + l) * lane + t;
                    if (n >= kLanes)
                        for (int64_t j = 0; j < kLanes; ++j) square[l * kLanes + j] = static_cast<T>(widen(source[j]));
                    else
                        for (int64_t j = 0; j < n; ++j) square[l * kLanes + j] = static_cast<T>(widen(source[j]));
                }
                Transpose<T>::block(square, kLanes, target, kBlock);
            }
    }

    // The other way; lanes from `count` on are dropped.
    template <class E>
    static void write(E* p, int64_t lane, int64_t tube, int64_t n, int64_t count, const T* x) {
        constexpr bool same = std::is_same_v<E, T>;
        if (lane == 1) {
            for (int64_t t = 0; t < n; ++t) {
                E* row = p + t * tube;
                const T* in = x + t * kBlock;
                if (count == kBlock)
                    for (int64_t l = 0; l < kBlock; ++l) narrow(in[l], row[l]);
                else
                    for (int64_t l = 0; l < count; ++l) narrow(in[l], row[l]);
            }
            return;
        }
        if constexpr (same) {
            if (tube == 1 && lane == n) {
                if (n == 2) return join<2>(p, count, x);
                if (n == 3) return join<3>(p, count, x);
                if (n == 4) return join<4>(p, count, x);
            }
        }
        if (tube != 1) {
            for (int64_t t = 0; t < n; ++t)
                for (int64_t l = 0; l < count; ++l) narrow(x[t * kBlock + l], p[l * lane + t * tube]);
            return;
        }
        for (int64_t l0 = 0; l0 < count; l0 += kLanes)
            for (int64_t t0 = 0; t0 < n; t0 += kLanes) {
                const int64_t t = n >= kLanes ? std::min(t0, n - kLanes) : 0;
                const T* source = x + t * kBlock + l0;
                if constexpr (same) {
                    if (n >= kLanes && l0 + kLanes <= count) {
                        Transpose<T>::block(source, kBlock, p + l0 * lane + t, lane);
                        continue;
                    }
                }
                if constexpr (same) {
                    // Of shorter tubes whole vectors too, the next tube over what stands behind the one before.
                    if (lane == n && n < kLanes && (l0 + kLanes - 1) * n + kLanes <= count * n) {
                        Vector v[kLanes];
#pragma GCC unroll 16
                        for (int j = 0; j < kLanes; ++j)
                            v[j] = Gem::load(source + std::min<int64_t>(j, n - 1) * kBlock);
                        Transpose<T>::square(v);
                        for (int64_t l = 0; l < kLanes; ++l) Gem::store(p + (l0 + l) * n, v[l]);
                        continue;
                    }
                }
                alignas(64) T square[kLanes * kLanes];
                Transpose<T>::block(source, kBlock, square, kLanes);
                for (int64_t l = 0; l < std::min(kLanes, count - l0); ++l) {
                    E* target = p + (l0 + l) * lane + t;
                    if (n >= kLanes)
                        for (int64_t j = 0; j < kLanes; ++j) narrow(square[l * kLanes + j], target[j]);
                    else
                        for (int64_t j = 0; j < n; ++j) narrow(square[l * kLanes + j], target[j]);
                }
            }
    }

  private:
    // kBlock tubes of N contiguous elements, one after another: lane l of row t is element N l + t.
    template <int N>
    static void split(const T* p, T* x) {
        for (int64_t l0 = 0; l0 < kBlock; l0 += kLanes, p += N * kLanes) {
            Vector v[N];
#pragma GCC unroll 4
            for (int i = 0; i < N; ++i) v[i] = Gem::load(p + i * kLanes);
#pragma GCC unroll 4
            for (int t = 0; t < N; ++t) {
                Vector r = v[0];
#pragma GCC unroll 4
                for (int i = 1; i < N; ++i) {
                    Mask mask{};
                    for (int l = 0; l < kLanes; ++l) {
                        const int at = N * l + t, from = at / static_cast<int>(kLanes),
                                  place = at % static_cast<int>(kLanes);
                        mask[l] = from == i ? static_cast<int>(kLanes) + place : i == 1 ? (from == 0 ? place : 0) : l;
                    }
                    r = __builtin_shuffle(r, v[i], mask);
                }
                Gem::store(x + t * kBlock + l0, r);
            }
        }
    }

    template <int N>
    static void join(T* p, int64_t count, const T* x) {
        for (int64_t l0 = 0; l0 < count; l0 += kLanes, p += N * kLanes) {
            alignas(64) T last[N * kLanes];
            const bool whole = l0 + kLanes <= count;
            T* target = whole ? p : last;
#pragma GCC unroll 4
            for (int i = 0; i < N; ++i) {
                Vector r = Gem::load(x + l0);
#pragma GCC unroll 4
                for (int t = 1; t < N; ++t) {
                    Mask mask{};
                    for (int l = 0; l < kLanes; ++l) {
                        const int at = i * static_cast<int>(kLanes) + l, row = at % N, place = at / N;
                        mask[l] = row == t ? static_cast<int>(kLanes) + place : t == 1 ? (row == 0 ? place : 0) : l;
                    }
                    r = __builtin_shuffle(r, Gem::load(x + t * kBlock + l0), mask);
                }
                Gem::store(target + i * kLanes, r);
            }
            if (!whole)
                for (int64_t e = 0; e < N * (count - l0); ++e) p[e] = last[e];
        }
    }
};

}  // namespace pyops::PYOPS_ISA
