// The memory-bound passes of a norm-constrained step, on CUDA. Interface: lmo_cuda.h.
//
// Mathematics. With d the direction (a gradient g, or its momentum average m <- m + (1-b)(g-m), with Nesterov
// d = g + b(m-g)), and u the unit vector of d for a norm,
//     W <- shrink W - step u(d),     u = sign(d) | d_ij/||d_:j|| | d_ij/||d_i:|| | d/||d||_F.
// Norms are scale-safe without a first pass for a maximum (common/safe_norm.h).
//
// Tiling. A thread owns packs of 8 neighbouring columns, moved 16 bytes at a time where alignment allows.
//     norm_partials    1 to 32 lanes, or a block of 256, per segment of a row or matrix
//     column_partials  a block per strip of up to 256 columns and segment of rows, rows spread over its thread groups
//     finish_*         sums the segments in a fixed order. No atomics on floats: the same bits on every run.
//     apply            one pass over W, with the direction recomputed from (g, m) rather than stored
// Rows and columns are exchanged when the tensor written to is column-major; a tensor whose unit stride is along the
// other dimension is read element by element, through 32-byte sectors.
//
// Cost. Bytes per element, s(x) the element size of x (flops: under 30 per element, never the limit):
//     unit_direction  sign: s(g)+s(out);   others: 2 s(g)+s(out)
//     vector_step     sign: s(g)+2 s(m)+2 s(W);   others: s(g)+2 s(m), then s(m) [+ s(g) with Nesterov] + 2 s(W)
//       without m     sign: s(g)+2 s(W);   others: 2 s(g)+2 s(W);   and s(g) for gradient decay
#include "common/cuda.h"
#include "common/safe_norm.h"
#ifndef __CUDACC_RTC__
#include "lmo/lmo_cuda.h"
#endif

namespace pyops::cuda {

constexpr int kBlock = 256;

// --- Where the direction comes from ----------------------------------------------------------------------------------

struct Source {
    Operand g, m;  // m.view.data == nullptr: d = g
    double momentum;
    bool nesterov;
    bool advance;  // update and store m; otherwise m is already this step's
};

template <class Acc>
__device__ __forceinline__ void direction(const Source& s, i64 b, i64 r, i64 c, int n, Acc (&d)[kPack]) {
    if (s.m.view.data == nullptr) return load_pack(s.g, b, r, c, n, d);
    load_pack(s.m, b, r, c, n, d);
    if (!s.advance && !s.nesterov) return;
    Acc g[kPack];
    load_pack(s.g, b, r, c, n, g);
    const Acc keep = static_cast<Acc>(s.momentum), take = static_cast<Acc>(1.0 - s.momentum);
    if (s.advance) {
#pragma unroll
        for (int v = 0; v < kPack; ++v) d[v] = round_to(s.m.view.dtype, d[v] + take * (g[v] - d[v]));
        store_pack(s.m, b, r, c, n, d);
    }
    if (s.nesterov) {
#pragma unroll
        for (int v = 0; v < kPack; ++v) d[v] = g[v] + keep * (d[v] - g[v]);
    }
}

// --- Norms ------------------------------------------------------------------------------------------------

// A unit is what shares one norm: a row, or a matrix.
struct UnitPlan {
    i64 rows, cols, packs;  // packs of a row
    i64 units, unit_rows;   // unit_rows: 1 or rows
    i64 segments, chunk;    // segments of a unit, and packs of a segment
    int lanes;              // threads of a segment: 1, 2, ..., 32 or kBlock
};

template <class Acc>
__global__ void __launch_bounds__(kBlock, sizeof(Acc) == 8 ? 2 : 4)
    norm_partials(Source source, UnitPlan plan, Acc* partials, Factor<Acc>* factors) {
    constexpr int warps = kBlock / 32;
    PYOPS_SHARED(Acc, sums, 3 * warps);
    const int thread = static_cast<int>(threadIdx.x), lanes = plan.lanes, lane = thread & (lanes - 1);
    const i64 items = plan.units * plan.segments, per_block = kBlock / lanes;
    for (i64 base = blockIdx.x * per_block; base < items; base += gridDim.x * per_block) {
        const i64 item = base + thread / lanes;
        Bins<Acc> bins = {Acc(0), Acc(0), Acc(0)};
        i64 unit = 0, segment = 0;
        if (item < items) {
            divide(item, plan.segments, unit, segment);
            i64 b = unit, first_row = 0;
            if (plan.unit_rows == 1) divide(unit, plan.rows, b, first_row);
            const i64 unit_packs = plan.unit_rows * plan.packs, begin = segment * plan.chunk;
            const i64 end = begin + plan.chunk < unit_packs ? begin + plan.chunk : unit_packs;
            for (i64 at = begin + lane; at < end; at += lanes) {
                i64 r = 0, pack = at;
                if (plan.unit_rows != 1) divide(at, plan.packs, r, pack);
                const i64 c = pack * kPack, left = plan.cols - c;
                Acc d[kPack];
                direction(source, b, first_row + r, c, left < kPack ? static_cast<int>(left) : kPack, d);
#pragma unroll
                for (int v = 0; v < kPack; ++v) add(bins, d[v]);
            }
        }
        const int within = lanes < 32 ? lanes : 32;
        bins = {lanes_sum(bins.small, within), lanes_sum(bins.middle, within), lanes_sum(bins.large, within)};
        if (lanes > 32) {
            if (thread % 32 == 0) {
                sums[thread / 32] = bins.small;
                sums[warps + thread / 32] = bins.middle;
                sums[2 * warps + thread / 32] = bins.large;
            }
            __syncthreads();
            if (thread == 0) {
                for (int w = 1; w < warps; ++w) {
                    bins.small += sums[w];
                    bins.middle += sums[warps + w];
                    bins.large += sums[2 * warps + w];
                }
            }
            __syncthreads();
        }
        if (lane == 0 && item < items) {
            if (plan.segments == 1) {
                factors[unit] = factor_of(bins);
            } else {
                Acc* p = partials + 3 * item;
                p[0] = bins.small;
                p[1] = bins.middle;
                p[2] = bins.large;
            }
        }
    }
}

// A warp per unit.
template <class Acc>
__global__ void __launch_bounds__(kBlock)
    finish_norms(const Acc* partials, Factor<Acc>* factors, i64 units, i64 segments) {
    const int lane = static_cast<int>(threadIdx.x) & 31;
    const i64 stride = gridDim.x * (kBlock / 32);
    for (i64 unit = blockIdx.x * (kBlock / 32) + threadIdx.x / 32; unit < units; unit += stride) {
        Bins<Acc> bins = {Acc(0), Acc(0), Acc(0)};
        for (i64 s = lane; s < segments; s += 32) {
            const Acc* p = partials + 3 * (unit * segments + s);
            bins.small += p[0];
            bins.middle += p[1];
            bins.large += p[2];
        }
        bins = {lanes_sum(bins.small, 32), lanes_sum(bins.middle, 32), lanes_sum(bins.large, 32)};
        if (lane == 0) factors[unit] = factor_of(bins);
    }
}

struct ColumnPlan {
    i64 batch, rows, cols;
    i64 strips, segments, chunk;  // strips of lanes * kPack columns; segments of chunk rows
    int lanes;                    // 1, 2, ..., 32; the kBlock / lanes groups take rows in turn
};

// partials[batch][segment][bin][col]
template <class Acc>
__global__ void __launch_bounds__(kBlock) column_partials(Source source, ColumnPlan plan, Acc* partials) {
    PYOPS_SHARED(Acc, tile, kBlock * kPack);  // [group][v][lane]: free of bank conflicts
    const int thread = static_cast<int>(threadIdx.x), lanes = plan.lanes, lane = thread & (lanes - 1);
    const int group = thread / lanes, groups = kBlock / lanes;
    const i64 items = plan.batch * plan.segments * plan.strips;
    for (i64 item = blockIdx.x; item < items; item += gridDim.x) {
        i64 slab, strip, b, segment;
        divide(item, plan.strips, slab, strip);
        divide(slab, plan.segments, b, segment);
        const i64 c = (strip * lanes + lane) * kPack, left = plan.cols - c;
        const i64 begin = segment * plan.chunk;
        const i64 end = begin + plan.chunk < plan.rows ? begin + plan.chunk : plan.rows;
        Bins<Acc> bins[kPack] = {};
        if (left > 0) {
            for (i64 r = begin + group; r < end; r += groups) {
                Acc d[kPack];
                direction(source, b, r, c, left < kPack ? static_cast<int>(left) : kPack, d);
#pragma unroll
                for (int v = 0; v < kPack; ++v) add(bins[v], d[v]);
            }
        }
#pragma unroll
        for (int bin = 0; bin < 3; ++bin) {
#pragma unroll
            for (int v = 0; v < kPack; ++v)
                tile[(group * kPack + v) * lanes + lane] = bin == 0   ? bins[v].small
                                                           : bin == 1 ? bins[v].middle
                                                                      : bins[v].large;
            __syncthreads();
            const int v = thread / lanes;  // this thread now sums column v of the pack of its lane
            const i64 column = c + v;
            if (v < kPack && column < plan.cols) {
                Acc sum = 0;
                for (int k = 0; k < groups; ++k) sum += tile[(k * kPack + v) * lanes + lane];
                partials[((b * plan.segments + segment) * 3 + bin) * plan.cols + column] = sum;
            }
            __syncthreads();
        }
    }
}

// A thread per column.
template <class Acc>
__global__ void __launch_bounds__(kBlock)
    finish_columns(const Acc* partials, Factor<Acc>* factors, i64 batch, i64 cols, i64 segments) {
    const i64 columns = batch * cols, stride = static_cast<i64>(gridDim.x) * kBlock;
    for (i64 at = static_cast<i64>(blockIdx.x) * kBlock + threadIdx.x; at < columns; at += stride) {
        i64 b, c;
        divide(at, cols, b, c);
        Bins<Acc> bins = {Acc(0), Acc(0), Acc(0)};
        for (i64 s = 0; s < segments; ++s) {
            const Acc* p = partials + (b * segments + s) * 3 * cols + c;
            bins.small += p[0];
            bins.middle += p[cols];
            bins.large += p[2 * cols];
        }
        factors[at] = factor_of(bins);
    }
}

// --- Elementwise pass ------------------------------------------------------------------------------------------------

enum class Scaling : int { Sign, PerMatrix, PerRow, PerCol };

struct Update {
    Operand w, g;  // g.view.data == nullptr: no decay
    View index;    // its strides give the row-major element index that stochastic rounding hashes
    RoundingKey key;
    double shrink, step, decay;
    bool keep;        // false: w is only written, w = -step u
    bool stochastic;  // for a 16-bit w
    Scaling scaling;
};

template <class Acc>
__device__ __forceinline__ Acc unit(const Update& update, const Factor<Acc>* factors, i64 at, int v, Acc d) {
    if (update.scaling == Scaling::Sign) return d > 0 ? Acc(1) : d < 0 ? Acc(-1) : d;
    const Factor<Acc> f = factors[update.scaling == Scaling::PerCol ? at + v : at];
    return (d * f.power) * f.inverse;
}

template <class Acc>
__global__ void __launch_bounds__(kBlock)
    apply_pass(Source source, Update update, i64 batch, i64 rows, i64 cols, const Factor<Acc>* factors) {
    const i64 packs = (cols + kPack - 1) / kPack, total = batch * rows * packs;
    const i64 stride = static_cast<i64>(gridDim.x) * kBlock;
    const Acc shrink = static_cast<Acc>(update.shrink), step = static_cast<Acc>(update.step);
    for (i64 at = static_cast<i64>(blockIdx.x) * kBlock + threadIdx.x; at < total; at += stride) {
        i64 line, pack, b, r;
        divide(at, packs, line, pack);
        divide(line, rows, b, r);
        const i64 c = pack * kPack;
        const int n = cols - c < kPack ? static_cast<int>(cols - c) : kPack;
        Acc d[kPack], w[kPack];
        direction(source, b, r, c, n, d);
        if (update.keep) load_pack(update.w, b, r, c, n, w);
        const i64 first = update.scaling == Scaling::PerMatrix ? b
                          : update.scaling == Scaling::PerRow  ? line
                                                               : b * cols + c;
#pragma unroll
        for (int v = 0; v < kPack; ++v) {
            const Acc change = v < n ? step * unit(update, factors, first, v, d[v]) : Acc(0);
            w[v] = update.keep ? shrink * w[v] - change : -change;
        }
        if (update.stochastic) {
            const i64 element = offset_of(update.index, b, r, c);
            const bool bf16 = update.w.view.dtype == DType::BF16;
#pragma unroll
            for (int v = 0; v < kPack; ++v) {
                const u32 random = random_bits(update.key, static_cast<u64>(element + v * update.index.col));
                const float x = static_cast<float>(w[v]);
                w[v] = static_cast<Acc>(bf16 ? bf16_to_float(float_to_bf16_stochastic(x, random))
                                             : half_to_float(float_to_half_stochastic(x, random)));
            }
        }
        store_pack(update.w, b, r, c, n, w);
        if (update.g.view.data != nullptr) {
            const Acc decay = static_cast<Acc>(update.decay);
            Acc g[kPack];
            load_pack(update.g, b, r, c, n, g);
#pragma unroll
            for (int v = 0; v < kPack; ++v) g[v] *= decay;
            store_pack(update.g, b, r, c, n, g);
        }
    }
}

}  // namespace pyops::cuda

#ifndef __CUDACC_RTC__

// --- Launchers -------------------------------------------------------------------------------------------------------

namespace pyops::cuda {
namespace {

constexpr i64 kFill = 1024;  // segments that occupy a large GPU; a constant, so that sums do not depend on the device
#ifdef PYOPS_EMULATOR
constexpr i64 kMaxGrid = 5;  // so that tests reach what comes after a block's first item
#else
constexpr i64 kMaxGrid = 1 << 16;
#endif

i64 divide_up(i64 a, i64 b) { return (a + b - 1) / b; }
i64 clamp(i64 x, i64 low, i64 high) { return x < low ? low : x > high ? high : x; }
unsigned grid_for(i64 blocks) { return static_cast<unsigned>(clamp(blocks, 1, kMaxGrid)); }
int lanes_for(i64 packs) {
    int lanes = 1;
    while (lanes < packs && lanes < 32) lanes *= 2;
    return lanes;
}

UnitPlan unit_plan(i64 batch, i64 rows, i64 cols, bool per_row) {
    UnitPlan p{};
    p.rows = rows, p.cols = cols, p.packs = divide_up(cols, kPack);
    p.units = per_row ? batch * rows : batch;
    p.unit_rows = per_row ? 1 : rows;
    const i64 unit_packs = p.unit_rows * p.packs;
    p.lanes = unit_packs > 2 * kBlock ? kBlock : lanes_for(unit_packs);
    const i64 useful = p.lanes == kBlock ? divide_up(unit_packs, 4 * kBlock) : 1;  // at least four packs per thread
    p.segments = clamp(divide_up(kFill, p.units), 1, useful);
    p.chunk = divide_up(unit_packs, p.segments);
    return p;
}

ColumnPlan column_plan(i64 batch, i64 rows, i64 cols) {
    ColumnPlan p{};
    p.batch = batch, p.rows = rows, p.cols = cols;
    const i64 packs = divide_up(cols, kPack);
    p.lanes = lanes_for(packs);
    p.strips = divide_up(packs, p.lanes);
    p.segments = clamp(divide_up(kFill, batch * p.strips), 1, divide_up(rows, 4 * (kBlock / p.lanes)));
    p.chunk = divide_up(rows, p.segments);
    return p;
}

// Bytes for the factors, then for the partials, in double: enough for either accumulator.
size_t factor_bytes(i64 units) { return sizeof(double) * 2 * units; }

size_t workspace_for(VectorNorm norm, i64 batch, i64 rows, i64 cols) {
    if (norm == VectorNorm::Sign || batch == 0 || rows == 0 || cols == 0) return 0;
    if (norm == VectorNorm::Col) {
        const ColumnPlan p = column_plan(batch, rows, cols);
        return factor_bytes(batch * cols) + sizeof(double) * 3 * batch * p.segments * cols;
    }
    const UnitPlan p = unit_plan(batch, rows, cols, norm == VectorNorm::Row);
    return factor_bytes(p.units) + (p.segments == 1 ? 0 : sizeof(double) * 3 * p.units * p.segments);
}

// A problem in the layout in which the kernels run it: unit stride along the columns of views[0] where it has one.
struct Problem {
    i64 batch, rows, cols;
    Scaling scaling;
    View views[5];  // absent ones have no data

    void orient() {
        const View& main = views[0];
        if (rows == 1 || (cols != 1 && !(main.row == 1 && main.col != 1))) return;
        const i64 r = rows;
        rows = cols, cols = r;
        for (View& v : views) {
            const i64 stride = v.row;
            v.row = v.col, v.col = stride;
        }
        if (scaling == Scaling::PerRow) {
            scaling = Scaling::PerCol;
        } else if (scaling == Scaling::PerCol) {
            scaling = Scaling::PerRow;
        }
    }

    // Rows that follow each other in every tensor become one; then matrices, if nothing is per matrix.
    void collapse() {
        if (scaling == Scaling::PerRow || scaling == Scaling::PerCol) return;
        bool joined = true;
        for (const View& v : views) joined = joined && (v.data == nullptr || rows == 1 || v.row == cols * v.col);
        if (!joined) return;
        cols *= rows, rows = 1;
        if (scaling == Scaling::PerMatrix) return;
        for (const View& v : views) joined = joined && (v.data == nullptr || batch == 1 || v.batch == cols * v.col);
        if (joined) cols *= batch, batch = 1;
    }

    Operand operand(int i) const {
        const View& v = views[i];
        const i64 per_chunk = 16 / size_of(v.dtype);
        const bool aligned = reinterpret_cast<unsigned long long>(v.data) % 16 == 0 &&
                             (rows == 1 || v.row % per_chunk == 0) && (batch == 1 || v.batch % per_chunk == 0);
        return {v, v.data != nullptr && aligned && v.col == 1};
    }
};

bool any_double(const Problem& p) {
    for (const View& v : p.views)
        if (v.data != nullptr && v.dtype == DType::F64) return true;
    return false;
}

bool bad_sizes(i64 batch, i64 rows, i64 cols) { return batch < 0 || rows < 0 || cols < 0; }
bool nothing(i64 batch, i64 rows, i64 cols) { return batch == 0 || rows == 0 || cols == 0; }

template <class Acc>
void launch_norms(const Problem& p, const Source& source, Factor<Acc>* factors, Acc* partials, cudaStream_t stream) {
    if (p.scaling == Scaling::PerCol) {
        const ColumnPlan plan = column_plan(p.batch, p.rows, p.cols);
        PYOPS_LAUNCH((column_partials<Acc>), grid_for(plan.batch * plan.segments * plan.strips), kBlock, 0, stream,
                     source, plan, partials);
        PYOPS_LAUNCH((finish_columns<Acc>), grid_for(divide_up(p.batch * p.cols, kBlock)), kBlock, 0, stream, partials,
                     factors, p.batch, p.cols, plan.segments);
        return;
    }
    const UnitPlan plan = unit_plan(p.batch, p.rows, p.cols, p.scaling == Scaling::PerRow);
    PYOPS_LAUNCH((norm_partials<Acc>), grid_for(divide_up(plan.units * plan.segments, kBlock / plan.lanes)), kBlock, 0,
                 stream, source, plan, partials, factors);
    if (plan.segments > 1)
        PYOPS_LAUNCH((finish_norms<Acc>), grid_for(divide_up(plan.units, kBlock / 32)), kBlock, 0, stream, partials,
                     factors, plan.units, plan.segments);
}

template <class Acc>
cudaError_t launch_step(const Problem& p, Source source, const Update& update, void* workspace, cudaStream_t stream) {
    Factor<Acc>* const factors = static_cast<Factor<Acc>*>(workspace);
    if (p.scaling != Scaling::Sign) {
        const i64 units = p.scaling == Scaling::PerMatrix ? p.batch
                          : p.scaling == Scaling::PerRow  ? p.batch * p.rows
                                                          : p.batch * p.cols;
        launch_norms(p, source, factors, reinterpret_cast<Acc*>(factors + units), stream);
        source.advance = false;
    }
    const i64 packs = p.batch * p.rows * divide_up(p.cols, kPack);
    PYOPS_LAUNCH((apply_pass<Acc>), grid_for(divide_up(packs, kBlock)), kBlock, 0, stream, source, update, p.batch,
                 p.rows, p.cols, factors);
    return cudaGetLastError();
}

Scaling scaling_of(VectorNorm norm) {
    switch (norm) {
        case VectorNorm::Sign: return Scaling::Sign;
        case VectorNorm::Col: return Scaling::PerCol;
        case VectorNorm::Row: return Scaling::PerRow;
        default: return Scaling::PerMatrix;
    }
}

// w <- shrink w - step u(d(g, m)) (or w = -step u), with g <- decay g. The common end of every launcher that writes w.
struct Step {
    View w, g, m, decayed;
    double shrink, step, momentum, decay;
    bool keep, nesterov;
    long long seed, tensor;
    Scaling scaling;
};

cudaError_t run(const Step& s, i64 batch, i64 rows, i64 cols, void* workspace, cudaStream_t stream) {
    if (bad_sizes(batch, rows, cols)) return cudaErrorInvalidValue;
    if (nothing(batch, rows, cols)) return cudaSuccess;
    const bool needs_workspace = s.scaling != Scaling::Sign;
    if (s.w.data == nullptr || s.g.data == nullptr || (needs_workspace && workspace == nullptr))
        return cudaErrorInvalidValue;
    const View index{s.w.data, s.w.dtype, rows * cols, cols, 1};
    Problem p{batch, rows, cols, s.scaling, {s.w, s.g, s.m, s.decayed, index}};
    p.orient();
    p.collapse();
    const Source source{p.operand(1), p.operand(2), s.momentum, s.nesterov, s.m.data != nullptr};
    const bool half = s.w.dtype == DType::BF16 || s.w.dtype == DType::F16;
    const Update update{
        p.operand(0), p.operand(3),        p.views[4], rounding_key(s.seed, s.tensor), s.shrink, s.step, s.decay,
        s.keep,       half && s.seed >= 0, p.scaling};
    return any_double(p) ? launch_step<double>(p, source, update, workspace, stream)
                         : launch_step<float>(p, source, update, workspace, stream);
}

View absent() { return View{nullptr, DType::F32, 0, 0, 0}; }

}  // namespace

size_t norm_workspace(VectorNorm norm, long long batch, long long rows, long long cols) {
    // The kernels may exchange rows and columns; the caller does not know which way.
    const VectorNorm exchanged = norm == VectorNorm::Col   ? VectorNorm::Row
                                 : norm == VectorNorm::Row ? VectorNorm::Col
                                                           : norm;
    const size_t one = workspace_for(norm, batch, rows, cols), other = workspace_for(exchanged, batch, cols, rows);
    const size_t flat = norm == VectorNorm::Euclidean ? workspace_for(norm, batch, 1, rows * cols) : 0;
    return one > other ? (one > flat ? one : flat) : (other > flat ? other : flat);
}

cudaError_t unit_direction(View g, View out, long long batch, long long rows, long long cols, VectorNorm norm,
                           double scale, void* workspace, cudaStream_t stream) {
    const Step s{out, g, absent(), absent(), 0.0, -scale, 0.0, 1.0, false, false, -1, 0, scaling_of(norm)};
    return run(s, batch, rows, cols, workspace, stream);
}

cudaError_t vector_step(View w, View g, View m, long long batch, long long rows, long long cols, VectorNorm norm,
                        double shrink, double step, double momentum, bool nesterov, double grad_decay, long long seed,
                        long long tensor, void* workspace, cudaStream_t stream) {
    const View decayed = m.data == nullptr && grad_decay != 1.0 ? g : absent();
    const Step s{w, g, m, decayed, shrink, step, momentum, grad_decay, true, nesterov, seed, tensor, scaling_of(norm)};
    return run(s, batch, rows, cols, workspace, stream);
}

}  // namespace pyops::cuda

#endif  // __CUDACC_RTC__
