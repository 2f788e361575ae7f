// Device code of tubal_cuda.cu: transforms of long tubes.
#pragma once

#include "tubal/tubal_cuda_tubes.h"

namespace pyops::cuda {

// --- Long tubes: tables ----------------------------------------------------------------------------------------------

constexpr int kThreads = 256;

template <class Acc>
__global__ void __launch_bounds__(kThreads) fill_roots(Acc* table, i64 n) {  // cosine and sine in turn
    for (i64 m = static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x; m < n;
         m += static_cast<i64>(gridDim.x) * kThreads) {
        const Root root = root_of_unity(m, n);
        table[2 * m] = static_cast<Acc>(root.cosine);
        table[2 * m + 1] = static_cast<Acc>(root.sine);
    }
}

// forward: P x n, from tubes to planes. Otherwise n x P, from products of planes to tubes.
template <class Acc>
__global__ void __launch_bounds__(kThreads) fill_dft(Acc* matrix, i64 n, bool forward, bool conjugate) {
    const i64 planes = planes_of(n), total = planes * n;
    for (i64 e = static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x; e < total;
         e += static_cast<i64>(gridDim.x) * kThreads) {
        i64 p, t;
        if (forward) {
            divide(e, n, p, t);
        } else {
            divide(e, planes, t, p);
        }
        const i64 f = (p + 2) / 3, part = p + 2 - 3 * f;  // part 0, 1, 2: re, im, re + im
        const Root root = root_of_unity(f * t % n, n);
        const double c = root.cosine, s = conjugate ? root.sine : -root.sine;
        const bool real = f == 0 || 2 * f == n;
        double x = real ? c : part == 0 ? c : part == 1 ? s : c + s;
        if (!forward) {
            if (!real) x = part == 0 ? c + root.sine : part == 1 ? root.sine - c : -root.sine;
            x *= (real ? 1.0 : 2.0) / static_cast<double>(n);
        }
        matrix[e] = static_cast<Acc>(x);
    }
}

// --- Long tubes: FFT -------------------------------------------------------------------------------------------------

constexpr int kPoints = 2048;           // complex numbers in shared memory, of 4096 / n tubes
constexpr int kBuffer = kPoints + 512;  // with a gap after each point of a group of four tubes or more

struct FftTask {
    Tubes x;            // a tensor; row: over the slow index of a tube, col: over the fast one
    void* planes;       // [batch][P][slow][fast]
    const void* roots;  // of order n
    Sizes batch;
    i64 slow, fast;
    int n;
    bool conjugate;   // forward
    bool mirrored;    // inverse, of a T-symmetric tensor
    bool along_tube;  // neighbouring threads read neighbouring entries of a tube, not of tubes
};

// In-place Stockham FFT of m points for each of kPoints / m tubes; direction -1 forward, 1 inverse (unscaled).
template <class Acc, class Shared>
__device__ __forceinline__ void fft_points(Shared re, Shared im, const Acc* roots, int m, int pitch, Acc direction) {
    const int thread = static_cast<int>(threadIdx.x), tubes = kPoints / m;
    int s = 1;
    for (; 4 * s <= m; s *= 4) {
        Acc xr[2][4], xi[2][4];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int g = thread + kThreads * h, q = g & (tubes - 1), j = g / tubes;
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const int at = (j + k * (m / 4)) * pitch + q;
                xr[h][k] = re[at];
                xi[h][k] = im[at];
            }
        }
        __syncthreads();
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int g = thread + kThreads * h, q = g & (tubes - 1), j = g / tubes;
            const int low = j & (s - 1), high = j - low;
            const Acc ar = xr[h][0] + xr[h][2], ai = xi[h][0] + xi[h][2];
            const Acc br = xr[h][0] - xr[h][2], bi = xi[h][0] - xi[h][2];
            const Acc cr = xr[h][1] + xr[h][3], ci = xi[h][1] + xi[h][3];
            const Acc dr = direction * (xr[h][1] - xr[h][3]), di = direction * (xi[h][1] - xi[h][3]);
            const Acc yr[4] = {ar + cr, br - di, ar - cr, br + di};
            const Acc yi[4] = {ai + ci, bi + dr, ai - ci, bi - dr};
            const int to = (4 * high + low) * pitch + q;
            re[to] = yr[0];
            im[to] = yi[0];
#pragma unroll
            for (int k = 1; k < 4; ++k) {
                const Acc c = roots[4 * k * high], w = direction * roots[4 * k * high + 1];
                re[to + k * s * pitch] = yr[k] * c - yi[k] * w;
                im[to + k * s * pitch] = yr[k] * w + yi[k] * c;
            }
        }
        __syncthreads();
    }
    if (s < m) {  // one pass of radix 2, without factors
#pragma unroll
        for (int h = 0; h < 4; ++h) {
            const int g = thread + kThreads * h, q = g & (tubes - 1), j = g / tubes;
            const int low = j * pitch + q, high = (j + s) * pitch + q;
            const Acc ar = re[low], ai = im[low], br = re[high], bi = im[high];
            re[low] = ar + br;
            im[low] = ai + bi;
            re[high] = ar - br;
            im[high] = ai - bi;
        }
        __syncthreads();
    }
}

// Entry t of tube q of a group, for element e of 4096.
__device__ __forceinline__ void locate(const FftTask& task, int e, int tubes, int& t, int& q) {
    t = task.along_tube ? e & (task.n - 1) : e / tubes;
    q = task.along_tube ? e / task.n : e & (tubes - 1);
}

// Even entries of a tube are the real, odd ones the imaginary parts of n/2 points Z; with w = e^(-2 pi i f / n)
//     E = (Z_f + conj Z_-f)/2,  O = (Z_f - conj Z_-f)/2i,  x^_f = E + w O.
template <class Acc>
__global__ void __launch_bounds__(kThreads) fft_forward(FftTask task) {
    PYOPS_SHARED(Acc, re, kBuffer);
    PYOPS_SHARED(Acc, im, kBuffer);
    const int thread = static_cast<int>(threadIdx.x), m = task.n / 2, tubes = kPoints / m;
    const int pitch = tubes + (tubes >= 4);
    const Acc* const roots = static_cast<const Acc*>(task.roots);
    const i64 count = task.slow * task.fast, groups = (count + tubes - 1) / tubes;
    for (i64 item = blockIdx.x; item < task.batch.count() * groups; item += gridDim.x) {
        i64 entry, group;
        divide(item, groups, entry, group);
        i64 start[1] = {0};
        add_batch(entry, task.batch, {&task.x}, start);
        __syncthreads();
        for (int e = thread; e < 2 * kPoints; e += kThreads) {
            int t, q;
            locate(task, e, tubes, t, q);
            const i64 u = group * tubes + q;
            Acc x[1] = {Acc(0)};
            if (u < count) {
                i64 slow, fast;
                divide(u, task.fast, slow, fast);
                load_tube(task.x.data, task.x.dtype, start[0] + slow * task.x.row + fast * task.x.col + t * task.x.tube,
                          0, false, x);
            }
            if (t % 2 == 0) {
                re[t / 2 * pitch + q] = x[0];
            } else {
                im[t / 2 * pitch + q] = x[0];
            }
        }
        __syncthreads();
        fft_points(re, im, roots, m, pitch, Acc(-1));
        Acc* const planes = static_cast<Acc*>(task.planes) + entry * (3 * m - 1) * count;
        for (int e = thread; e < kPoints; e += kThreads) {
            const int f = e / tubes, q = e & (tubes - 1);
            const i64 u = group * tubes + q;
            if (u >= count) continue;
            const Acc zr = re[f * pitch + q], zi = im[f * pitch + q];
            if (f == 0) {
                planes[u] = zr + zi;
                planes[(3 * m - 2) * count + u] = zr - zi;
                continue;
            }
            const Acc yr = re[(m - f) * pitch + q], yi = im[(m - f) * pitch + q];
            const Acc odd_r = (zi + yi) / 2, odd_i = (yr - zr) / 2, c = roots[2 * f], s = roots[2 * f + 1];
            const Acc x_r = (zr + yr) / 2 + (c * odd_r + s * odd_i);
            const Acc x_i = (zi - yi) / 2 + (c * odd_i - s * odd_r), signed_i = task.conjugate ? -x_i : x_i;
            Acc* const p = planes + (3 * f - 2) * count + u;
            p[0] = x_r;
            p[count] = signed_i;
            p[2 * count] = x_r + signed_i;
        }
    }
}

template <class Acc>
__global__ void __launch_bounds__(kThreads) fft_inverse(FftTask task) {
    PYOPS_SHARED(Acc, re, kBuffer);
    PYOPS_SHARED(Acc, im, kBuffer);
    const int thread = static_cast<int>(threadIdx.x), m = task.n / 2, tubes = kPoints / m;
    const int pitch = tubes + (tubes >= 4);
    const Acc* const roots = static_cast<const Acc*>(task.roots);
    const Acc scale = Acc(1) / static_cast<Acc>(task.n);
    const i64 count = task.slow * task.fast, groups = (count + tubes - 1) / tubes;
    for (i64 item = blockIdx.x; item < task.batch.count() * groups; item += gridDim.x) {
        i64 entry, group;
        divide(item, groups, entry, group);
        if (task.mirrored) {  // nothing to do for a group that lies below the diagonal
            i64 slow, fast;
            divide(group * tubes, task.fast, slow, fast);
            if (fast + tubes <= slow) continue;
        }
        i64 start[1] = {0};
        add_batch(entry, task.batch, {&task.x}, start);
        const Acc* const planes = static_cast<const Acc*>(task.planes) + entry * (3 * m - 1) * count;
        __syncthreads();
        for (int e = thread; e < (m / 2 + 1) * tubes; e += kThreads) {
            const int f = e / tubes, q = e & (tubes - 1);
            const i64 u = group * tubes + q;
            Acc even_r = 0, even_i = 0, odd_r = 0, odd_i = 0;
            if (u < count && f == 0) {
                const Acc first = planes[u], last = planes[(3 * m - 2) * count + u];
                even_r = first + last;
                odd_r = first - last;
            } else if (u < count) {
                const Acc* const p = planes + (3 * f - 2) * count + u;
                const Acc* const o = planes + (3 * (m - f) - 2) * count + u;
                const Acc ar = p[0] - p[count], ai = p[2 * count] - p[0] - p[count];
                const Acc br = o[0] - o[count], bi = o[2 * count] - o[0] - o[count];
                const Acc dr = ar - br, di = ai + bi, c = roots[2 * f], s = roots[2 * f + 1];
                even_r = ar + br;
                even_i = ai - bi;
                odd_r = dr * c - di * s;
                odd_i = dr * s + di * c;
            }
            re[f * pitch + q] = scale * (even_r - odd_i);
            im[f * pitch + q] = scale * (even_i + odd_r);
            if (f != 0 && 2 * f != m) {
                re[(m - f) * pitch + q] = scale * (even_r + odd_i);
                im[(m - f) * pitch + q] = scale * (odd_r - even_i);
            }
        }
        __syncthreads();
        fft_points(re, im, roots, m, pitch, Acc(1));
        for (int e = thread; e < 2 * kPoints; e += kThreads) {
            int t, q;
            locate(task, e, tubes, t, q);
            const i64 u = group * tubes + q;
            if (u >= count) continue;
            i64 slow, fast;
            divide(u, task.fast, slow, fast);
            const int at = t / 2 * pitch + q;
            Acc x;
            if (t % 2 == 0) {
                x = re[at];
            } else {
                x = im[at];
            }
            if (task.mirrored) {
                store_mirrored(task.x, start[0], task.n, slow, fast, t, x);
            } else {
                store_one(task.x, start[0] + slow * task.x.row + fast * task.x.col + t * task.x.tube, x);
            }
        }
    }
}

}  // namespace pyops::cuda
