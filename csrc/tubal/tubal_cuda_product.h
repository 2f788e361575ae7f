// Device code of tubal_cuda.cu: the fused product of short tubes, which for N = 1 is a batched product of matrices.
#pragma once

#include "tubal/tubal_cuda_tubes.h"

namespace pyops::cuda {

// --- Fused product of short tubes; with N = 1, a batched product -----------------------------------------------------

enum class Half : int {
    No,      // every tile of c
    Upper,   // tiles that meet i <= j only
    Mirror,  // the same, and tube (j, i) from tube (i, j)
    Tubes,   // Mirror where the rows of the product are entries of tubes, and the last batch dimension i
};

struct ProductTask {
    Tubes a, b, c;  // a.row, c.row: over i; a.col, b.row: over k; b.col, c.col: over j
    Sizes batch, summed;
    i64 rows, inner, cols, n;
    i64 down, across, items, terms;  // tiles of a matrix of c, tiles of all, entries of `summed`
    bool conjugate_a, conjugate_b;
    bool a_along_k, b_along_k;  // which neighbours in memory are read by neighbouring threads
    Half half;
};

template <class Acc, int N>
struct Shape {
    static constexpr int kPlanes = static_cast<int>(planes_of(N));
    static constexpr int kSide = N == 1 ? 2 : 1;  // warps along each side of a plane's tile
    static constexpr int kThreads = 32 * kPlanes * kSide * kSide;
    // A thread owns kDown x kAcross numbers of a plane, a warp 4 x 8 threads.
    static constexpr int kDown = 32 / sizeof(Acc), kAcross = N > 14 || (sizeof(Acc) == 8 && N > 11) ? 2 : 4;
    static constexpr int kRows = 4 * kDown * kSide, kCols = 8 * kAcross * kSide;
    static constexpr int kPitchA = kRows + 4, kPitchB = kCols + 4;  // rows of shared tiles, apart by 4 banks
    PYOPS_HD static constexpr int bytes(int depth) { return kPlanes * depth * (kPitchA + kPitchB) * int(sizeof(Acc)); }
    static constexpr int kDepth = N == 1 ? 16 : bytes(8) <= 48 * 1024 ? 8 : 4;
    static constexpr int kRound = N == 1 ? 0 : kPlanes * 8 * kCols * int(sizeof(Acc));  // two rows of each thread
    static constexpr int kBytes = bytes(kDepth) > kRound ? bytes(kDepth) : kRound;
    // Blocks that fit a multiprocessor with 128 registers a thread in double, 96 in float.
    static constexpr int kFit = (1 << 16) / ((kThreads + 127) / 128 * 128 * (sizeof(Acc) == 8 ? 128 : 96));
    static constexpr int kBlocks = kFit < 1 ? 1 : kFit;
    static_assert(kBytes <= 48 * 1024 && kThreads <= 1024);
};

template <class Acc, int N, class Shared>
__device__ __forceinline__ void load_tiles(const ProductTask& task, const i64 (&base)[2], i64 i0, i64 j0, i64 k0,
                                           Shared shared) {
    using S = Shape<Acc, N>;
    constexpr int in_a = S::kRows * S::kDepth, all = in_a + S::kCols * S::kDepth;
#pragma unroll(N == 1 ? 2 : 1)
    for (int e = static_cast<int>(threadIdx.x); e < all; e += S::kThreads) {
        const bool is_a = e < in_a;
        const int slot = is_a ? e : e - in_a;
        const bool along_k = is_a ? task.a_along_k : task.b_along_k;
        const int k = along_k ? slot % S::kDepth : is_a ? slot / S::kRows : slot / S::kCols;
        const int x = along_k ? slot / S::kDepth : is_a ? slot % S::kRows : slot % S::kCols;
        const i64 at = (is_a ? i0 : j0) + x;
        Acc tube[N] = {};
        if (at < (is_a ? task.rows : task.cols) && k0 + k < task.inner) {
            const i64 from = (is_a ? base[0] : base[1]) + at * (is_a ? task.a.row : task.b.col) +
                             (k0 + k) * (is_a ? task.a.col : task.b.row);
            load_tube(is_a ? task.a.data : task.b.data, is_a ? task.a.dtype : task.b.dtype, from,
                      is_a ? task.a.tube : task.b.tube, is_a ? task.a.packed : task.b.packed, tube);
        }
        const int pitch = is_a ? S::kPitchA : S::kPitchB;
        const int to = (is_a ? 0 : S::kPlanes * S::kDepth * S::kPitchA) + k * pitch + x;
        tube_to_planes(tube, is_a ? task.conjugate_a : task.conjugate_b,
                       [&](int p, Acc value) { shared[to + p * S::kDepth * pitch] = value; });
    }
}

template <class Acc, int N>
__device__ __forceinline__ void tile_of(const ProductTask& task, i64 item, i64& entry, i64& i0, i64& j0) {
    divide(item, task.across, entry, j0);
    divide(entry, task.down, entry, i0);
    i0 *= Shape<Acc, N>::kRows;
    j0 *= Shape<Acc, N>::kCols;
}

__device__ __forceinline__ i64 slice_of(const ProductTask& task, i64 entry) {
    i64 quotient, rest;
    divide(entry, task.batch.of[kBatch - 1], quotient, rest);
    return rest;
}

template <class Acc, int N>
__global__ void __launch_bounds__(Shape<Acc, N>::kThreads, Shape<Acc, N>::kBlocks) tube_product(ProductTask task) {
    using S = Shape<Acc, N>;
    PYOPS_DYNAMIC_SHARED(Acc, shared);
    const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
    const int plane = warp / (S::kSide * S::kSide), part = warp % (S::kSide * S::kSide);
    const int row = part / S::kSide * (4 * S::kDown) + lane / 8 * S::kDown;
    const int col = part % S::kSide * (8 * S::kAcross) + lane % 8 * S::kAcross;
    const int from_a = plane * S::kDepth * S::kPitchA + row;
    const int from_b = S::kPlanes * S::kDepth * S::kPitchA + plane * S::kDepth * S::kPitchB + col;
    for (i64 item = blockIdx.x; item < task.items; item += gridDim.x) {
        i64 entry, i0, j0;
        tile_of<Acc, N>(task, item, entry, i0, j0);
        if (task.half != Half::No && j0 + S::kCols <= (task.half == Half::Tubes ? slice_of(task, entry) : i0)) continue;

        Few<Acc, S::kAcross> sum[S::kDown] = {};
        for (i64 term = 0; term < task.terms; ++term) {
            i64 base[2] = {0, 0};
            add_batch(entry, task.batch, {&task.a, &task.b}, base);
            add_batch(term, task.summed, {&task.a, &task.b}, base);
            for (i64 k0 = 0; k0 < task.inner; k0 += S::kDepth) {
                __syncthreads();
                load_tiles<Acc, N>(task, base, i0, j0, k0, shared);
                __syncthreads();
#pragma unroll 4
                for (int k = 0; k < S::kDepth; ++k) {
                    const auto b = load_few<S::kAcross>(shared + (from_b + k * S::kPitchB));
#pragma unroll
                    for (int g = 0; g < S::kDown / 4; ++g) {
                        const auto a = load_few<4>(shared + (from_a + k * S::kPitchA + 4 * g));
#pragma unroll
                        for (int r = 0; r < 4; ++r)
#pragma unroll
                            for (int v = 0; v < S::kAcross; ++v) sum[4 * g + r].x[v] += a.x[r] * b.x[v];
                    }
                }
            }
        }

        i64 to[1] = {0};
        add_batch(entry, task.batch, {&task.c}, to);
        if constexpr (N == 1) {
            const bool tubes = task.half == Half::Tubes;
            const i64 slice = tubes ? slice_of(task, entry) : 0;
#pragma unroll
            for (int r = 0; r < S::kDown; ++r) {
#pragma unroll
                for (int v = 0; v < S::kAcross; ++v) {
                    const i64 i = i0 + row + r, j = j0 + col + v;
                    if (i >= task.rows || j >= task.cols) continue;
                    if (task.half == Half::Mirror || task.half == Half::Tubes) {
                        store_mirrored(task.c, to[0], task.n, tubes ? slice : i, j, tubes ? i : 0, sum[r].x[v]);
                    } else {
                        store_one(task.c, to[0] + i * task.c.row + j * task.c.col, sum[r].x[v]);
                    }
                }
            }
        } else {
#pragma unroll 1
            for (int round = 0; round < S::kDown / 2; ++round) {  // rows 2 round, 2 round + 1 of every thread
                __syncthreads();
#pragma unroll
                for (int r = 0; r < S::kDown; ++r)
                    if (r / 2 == round)
                        store_few(shared + ((plane * 8 + r % 2 * 4 + lane / 8) * S::kCols + col), sum[r]);
                __syncthreads();
                for (int e = thread; e < 8 * S::kCols; e += S::kThreads) {
                    const int slot = e / S::kCols;
                    const i64 i = i0 + slot % 4 * S::kDown + 2 * round + slot / 4, j = j0 + e % S::kCols;
                    if (i >= task.rows || j >= task.cols || (task.half != Half::No && j < i)) continue;
                    const auto product = [&](int p) -> Acc { return shared[p * 8 * S::kCols + e]; };
                    if (task.half != Half::No) {
                        planes_to_tube<N, Acc>(product,
                                               [&](int t, Acc x) { store_mirrored(task.c, to[0], N, i, j, t, x); });
                    } else {
                        const i64 at = to[0] + i * task.c.row + j * task.c.col;
                        planes_to_tube<N, Acc>(product,
                                               [&](int t, Acc x) { store_one(task.c, at + t * task.c.tube, x); });
                    }
                }
            }
        }
    }
}

}  // namespace pyops::cuda
