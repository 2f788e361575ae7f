// Small kernels that plant a fault when asked: the emulator must name it, and must accept the same kernel without.
#include "common/cuda.h"

using pyops::i64;

enum Fault : int {
    None,
    MissingBarrier,
    OutOfRangeShared,
    RawOutOfRangeShared,
    DivergentBarrier,
    TwoBarriers,
    UnwrittenOutput,
    TooManyThreads,
    ReadWriteRace,
    WrongShuffleMask,
    AbsentLane,
    ShuffleFromUnnamed,
    MissingSyncwarp,
    SyncwarpAcrossWarps,
    UnwrittenShared,
    PlainBesideAtomic,
    OutOfRangeGlobal,
    Misaligned,
    Overflow,
    StackOverflow,
};

constexpr int kThreads = 128;

// out[i] = in[n - 1 - i] within each block, through shared memory.
__global__ void reverse(const float* in, float* out, int fault) {
    PYOPS_SHARED(float, tile, kThreads);
    const int t = threadIdx.x;
    tile[fault == OutOfRangeShared ? t + 1 : t] = in[blockIdx.x * kThreads + t];
    if (fault == RawOutOfRangeShared && t == 0) tile.raw()[kThreads + 3] = 1.0f;
    if (fault != MissingBarrier) __syncthreads();
    if (fault == DivergentBarrier && t < kThreads / 2) __syncthreads();
    if (fault == TwoBarriers && t < kThreads / 2) {
        __syncthreads();
    } else if (fault == TwoBarriers) {
        __syncthreads();
    }
    if (fault == UnwrittenOutput && t == 77) return;
    out[blockIdx.x * kThreads + t] = tile[kThreads - 1 - t];
}

// out[block] = sum of the block's elements: a tree in shared memory down to one warp, then shuffles.
__global__ void block_sum(const float* in, float* out, int fault) {
    PYOPS_SHARED(float, sums, kThreads);
    const int t = threadIdx.x;
    sums[t] = in[blockIdx.x * kThreads + t];
    for (int half = kThreads / 2; half >= 32; half /= 2) {
        __syncthreads();
        if (t < half) sums[t] += sums[t + half];
        if (fault == ReadWriteRace && t == half) sums[t - half] = 0.0f;
    }
    if (t >= 32) return;
    const unsigned mask = fault == WrongShuffleMask ? 0x0000ffffu : pyops::cuda::kAllLanes;
    float x = sums[t];
    if (fault == AbsentLane && t == 5) return;
    if (fault == ShuffleFromUnnamed && t < 16) x += __shfl_down_sync(0x0000ffffu, x, 8);
    for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(mask, x, step);
    if (t == 0) out[blockIdx.x] = x;
}

// out[i] = in[i ^ 1], exchanged inside a warp, ordered by __syncwarp alone.
__global__ void warp_exchange(const float* in, float* out, int fault) {
    PYOPS_DYNAMIC_SHARED(float, tile);
    const int t = threadIdx.x;
    if (fault != UnwrittenShared) tile[t] = in[blockIdx.x * kThreads + t];
    if (fault == MissingSyncwarp) {
        __shfl_sync(pyops::cuda::kAllLanes, 0, 0);  // brings the lanes together, and orders no memory
    } else {
        __syncwarp();
    }
    out[blockIdx.x * kThreads + t] = tile[fault == SyncwarpAcrossWarps ? t ^ 32 : t ^ 1];
}

// Counts the elements above zero by shared and global atomics; the votes must agree with each other.
__global__ void count_positive(const float* in, int* out, int fault) {
    PYOPS_SHARED(int, count, 1);
    const int t = threadIdx.x;
    if (t == 0) count[0] = 0;
    __syncthreads();
    const int positive = in[blockIdx.x * kThreads + t] > 0.0f;
    if (fault == PlainBesideAtomic && t == 9) count[0] += positive;
    atomicAdd(&count[0], positive);
    __syncthreads();
    const unsigned all = pyops::cuda::kAllLanes, votes = __ballot_sync(all, positive);
    if (__any_sync(all, positive) != (votes != 0) || __all_sync(all, positive) != (votes == all)) return;
    if (t == 0) atomicAdd(out, count[0]);
}

struct alignas(16) Four {
    float x[4];
};

int depth(int n) {
    volatile char frame[4096];
    frame[0] = static_cast<char>(n);
    return n == 0 ? 0 : 1 + depth(n - 1) + frame[0] * 0;
}

// out = in, sixteen bytes per thread.
__global__ void copy_wide(const float* in, float* out, i64 count, int fault) {
    const i64 t = static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x;
    volatile int largest = 0x7fffffff;
    if (fault == Overflow) largest = largest + static_cast<int>(threadIdx.x);
    if (fault == StackOverflow && depth(1000) != 1000) return;
    if (t >= count / 4 + (fault == OutOfRangeGlobal ? 1 : 0)) return;
    const i64 from = 4 * t + (fault == Misaligned && t == 3 ? 1 : 0);
    *reinterpret_cast<Four*>(out + 4 * t) = *reinterpret_cast<const Four*>(in + from);
}

// The block that runs last wins: the answer depends on the order of blocks.
__global__ void last_block(float* out) {
    if (threadIdx.x == 0) out[0] = static_cast<float>(blockIdx.x);
}

PYOPS_EMULATOR_API void run_reverse(const float* in, float* out, int blocks, int fault) {
    PYOPS_LAUNCH(reverse, blocks, fault == TooManyThreads ? 2048 : kThreads, 0, nullptr, in, out, fault);
}
PYOPS_EMULATOR_API void run_block_sum(const float* in, float* out, int blocks, int fault) {
    PYOPS_LAUNCH(block_sum, blocks, kThreads, 0, nullptr, in, out, fault);
}
PYOPS_EMULATOR_API void run_warp_exchange(const float* in, float* out, int blocks, int fault) {
    PYOPS_LAUNCH(warp_exchange, blocks, kThreads, kThreads * sizeof(float), nullptr, in, out, fault);
}
PYOPS_EMULATOR_API void run_count_positive(const float* in, int* out, int blocks, int fault) {
    PYOPS_LAUNCH(count_positive, blocks, kThreads, 0, nullptr, in, out, fault);
}
PYOPS_EMULATOR_API void run_copy_wide(const float* in, float* out, int blocks, int fault) {
    PYOPS_LAUNCH(copy_wide, blocks, kThreads, 0, nullptr, in, out, static_cast<i64>(blocks) * kThreads, fault);
}
PYOPS_EMULATOR_API void run_last_block(float* out, int blocks) {
    PYOPS_LAUNCH(last_block, blocks, kThreads, 0, nullptr, out);
}
