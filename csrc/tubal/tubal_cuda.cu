// The t-product on CUDA. Interface: tubal_cuda.h.
//
// Mathematics. With the DFT of every tube, x^_f = sum_t x_t e^(-2 pi i f t / n), a t-product is one complex matrix
// product per face f, and real tensors need the faces 0 ... n/2 only, of which 0 and n/2 are real. A complex face
// r + i s is three planes r, s, r + s, so that its product is three real ones (p = plane of a times plane of b):
//     re = p1 - p2,   im = p3 - p1 - p2,
// and the recombination belongs to the inverse transform. A t-product thus is a transform of tubes to P = (3n - 1)/2
// (odd n) or 3n/2 - 1 (even n) real planes, P independent real products, and a transform back. Transposing is
// conjugation of the faces: s -> -s. A real n x n matrix instead of the DFT has P = n planes and no conjugation.
//
// Kernels.
//     tube_product<N>  the whole t-product for n = N <= 16 (12 in double: registers). A block owns 32 x 32 tubes of c
//                      (16 x 32 in double, half of that for the longest), a warp one plane of them, a thread 8 x 4 (or
//                      4 x 4, 8 x 2, 4 x 2) of these. Tubes of a and b are transformed on their way to shared memory by
//                      unrolled code; sums go back through shared memory for the inverse. N = 1 is a plain batched
//                      product; longer tubes use it for their planes, for real matrices, and for the DFT as a matrix.
//     fft_forward      tubes of n = 16, 32, ..., 4096 to planes: a block transforms 4096 / n tubes, each as a complex
//     fft_inverse      FFT of n / 2 points, radix 4, in place in shared memory; and back.
//     fill_roots, fill_dft   tables: roots of unity, and the transforms as P x n and n x P matrices.
// Angles are reduced as the integers (f t) mod n. No atomics: the same bits on every run. U * U^T skips the tiles below
// the diagonal and stores what is above it twice.
//
// Cost, s bytes per number: tube_product reads a n4/32 and b n1/32 times (through L2), writes c once; 2 P n1 n2 n4
// flops. Long tubes add a write and reads of P planes for each of a, b and c, thus some 4 s P (n1 n2 + n2 n4 + n1 n4).
#include "tubal/tubal_cuda_fft.h"
#include "tubal/tubal_cuda_product.h"
#ifndef __CUDACC_RTC__

#include "tubal/tubal_cuda.h"

// --- Launchers -------------------------------------------------------------------------------------------------------

namespace pyops::cuda {
namespace {

#ifdef PYOPS_EMULATOR
constexpr i64 kMaxGrid = 5;  // so that tests reach what comes after a block's first item
#else
constexpr i64 kMaxGrid = 1 << 16;
#endif

i64 divide_up(i64 a, i64 b) { return (a + b - 1) / b; }
unsigned grid_for(i64 blocks) { return static_cast<unsigned>(blocks < 1 ? 1 : blocks > kMaxGrid ? kMaxGrid : blocks); }
i64 distance(i64 stride) { return stride < 0 ? -stride : stride; }

bool packed(const Tubes& t) {
    const i64 size = size_of(t.dtype);
    bool aligned = t.tube == 1 && reinterpret_cast<unsigned long long>(t.data) % 16 == 0;
    for (i64 stride : t.batch) aligned = aligned && stride * size % 16 == 0;
    return aligned && t.row * size % 16 == 0 && t.col * size % 16 == 0;
}

enum class Way : int { Short, Fft, Dft, Matrix };

Way way_of(const TubalProduct& p) {
    if (p.forward_a.data != nullptr) return Way::Matrix;
    if (p.n3 <= (p.c.dtype == DType::F64 ? 12 : 16)) return Way::Short;
    return p.n3 <= 4096 && (p.n3 & (p.n3 - 1)) == 0 ? Way::Fft : Way::Dft;
}

// Planes of an operand of the product (x is its dimension other than k), or of c (x is i, k is j).
struct Planes {
    i64 batch[kTubalBatch];  // sizes, 1 where the tensor does not move
    i64 slow, fast;
    bool fast_k;
    i64 count;  // numbers

    Planes(const TubalProduct& p, const TubalTensor& t, i64 x, i64 k, i64 stride_x, i64 stride_k, i64 planes) {
        fast_k = distance(stride_k) <= distance(stride_x);
        slow = fast_k ? x : k;
        fast = fast_k ? k : x;
        count = planes * slow * fast;
        for (int d = 0; d < kTubalBatch; ++d) count *= batch[d] = t.batch[d] == 0 ? 1 : p.batch[d];
    }
    Sizes sizes(i64 last) const { return {{batch[0], batch[1], batch[2], batch[3], last}}; }
    // The planes of all batch entries, as Tubes whose last batch dimension is the plane.
    Tubes tubes(void* data, DType dtype, i64 planes) const {
        Tubes t{data, dtype, fast_k ? fast : 1, fast_k ? 1 : fast, 0, {0, 0, 0, 0, slow * fast}, false};
        i64 stride = planes * slow * fast;
        for (int d = kTubalBatch - 1; d >= 0; --d) {
            t.batch[d] = batch[d] == 1 ? 0 : stride;
            stride *= batch[d];
        }
        return t;
    }
};

// The product in the layout in which the kernels run it, and its scratch memory.
struct Plan {
    TubalProduct p;
    Way way;
    bool gram;
    i64 planes, roots, tables[3];    // numbers: planes of a tube, root table, matrices forward a, forward b, inverse
    i64 a_row, a_col, b_row, b_col;  // strides over i, k; k, j
    Planes a, b, c;

    Plan(const TubalProduct& product, bool symmetric)
        : p(product),
          way(way_of(product)),
          gram(symmetric),
          planes(way == Way::Matrix ? p.n3 : planes_of(p.n3)),
          a_row(p.transpose_a ? p.a.col : p.a.row),
          a_col(p.transpose_a ? p.a.row : p.a.col),
          b_row(p.transpose_b ? p.b.col : p.b.row),
          b_col(p.transpose_b ? p.b.row : p.b.col),
          a(p, p.a, p.n1, p.n2, a_row, a_col, planes),
          b(p, p.b, p.n4, p.n2, b_col, b_row, planes),
          c(p, p.c, p.n1, p.n4, p.c.row, p.c.col, planes) {
        if (gram) c.fast_k = true, c.slow = p.n1, c.fast = p.n4;
        roots = way == Way::Fft ? 2 * p.n3 : 0;
        const i64 matrix = way == Way::Dft ? planes * p.n3 : 0;
        tables[0] = tables[2] = matrix;
        tables[1] = p.transpose_a == p.transpose_b ? 0 : matrix;
    }
    bool nothing() const {  // c has no entry
        i64 entries = p.n1 * p.n4;
        for (int d = 0; d < kTubalBatch; ++d) entries *= p.c.batch[d] == 0 ? 1 : p.batch[d];
        return entries == 0;
    }
    bool zero() const {  // each is a sum without terms
        i64 terms = p.n2;
        for (i64 size : p.batch) terms *= size;
        return terms == 0;
    }
    // Every part begins at a multiple of 16 bytes.
    i64 numbers() const {
        i64 all = 0;
        for (i64 n : {roots, tables[0], tables[1], tables[2], a.count, b.count, c.count}) all += divide_up(n, 4) * 4;
        return all;
    }
    size_t bytes() const {
        if (way == Way::Short || nothing() || zero()) return 0;
        return static_cast<size_t>(numbers()) * (p.c.dtype == DType::F64 ? 8 : 4);
    }
};

template <class Acc>
struct Launcher {
    const Plan& plan;
    cudaStream_t stream;
    static constexpr DType kType = sizeof(Acc) == 8 ? DType::F64 : DType::F32;

    template <int N>
    void cut(ProductTask& task) const {  // into tiles
        using S = Shape<Acc, N>;
        task.down = divide_up(task.rows, S::kRows);
        task.across = divide_up(task.cols, S::kCols);
        task.terms = task.items = 1;
        for (int d = 0; d < kBatch; ++d) task.terms *= task.summed.of[d], task.items *= task.batch.of[d];
        task.items *= task.down * task.across;
    }

    void product(ProductTask task, i64 n) const {
        task.a.packed = packed(task.a), task.b.packed = packed(task.b);
        task.a_along_k = distance(task.a.col) <= distance(task.a.row);
        task.b_along_k = distance(task.b.row) <= distance(task.b.col);
        task.n = plan.p.n3;
        switch (n) {
            case 1:
                cut<1>(task);
                PYOPS_LAUNCH((tube_product<Acc, 1>), grid_for(task.items), (Shape<Acc, 1>::kThreads),
                             (Shape<Acc, 1>::kBytes), stream, task);
                break;
            case 2:
                cut<2>(task);
                PYOPS_LAUNCH((tube_product<Acc, 2>), grid_for(task.items), (Shape<Acc, 2>::kThreads),
                             (Shape<Acc, 2>::kBytes), stream, task);
                break;
            case 3:
                cut<3>(task);
                PYOPS_LAUNCH((tube_product<Acc, 3>), grid_for(task.items), (Shape<Acc, 3>::kThreads),
                             (Shape<Acc, 3>::kBytes), stream, task);
                break;
            case 4:
                cut<4>(task);
                PYOPS_LAUNCH((tube_product<Acc, 4>), grid_for(task.items), (Shape<Acc, 4>::kThreads),
                             (Shape<Acc, 4>::kBytes), stream, task);
                break;
            case 5:
                cut<5>(task);
                PYOPS_LAUNCH((tube_product<Acc, 5>), grid_for(task.items), (Shape<Acc, 5>::kThreads),
                             (Shape<Acc, 5>::kBytes), stream, task);
                break;
            case 6:
                cut<6>(task);
                PYOPS_LAUNCH((tube_product<Acc, 6>), grid_for(task.items), (Shape<Acc, 6>::kThreads),
                             (Shape<Acc, 6>::kBytes), stream, task);
                break;
            case 7:
                cut<7>(task);
                PYOPS_LAUNCH((tube_product<Acc, 7>), grid_for(task.items), (Shape<Acc, 7>::kThreads),
                             (Shape<Acc, 7>::kBytes), stream, task);
                break;
            case 8:
                cut<8>(task);
                PYOPS_LAUNCH((tube_product<Acc, 8>), grid_for(task.items), (Shape<Acc, 8>::kThreads),
                             (Shape<Acc, 8>::kBytes), stream, task);
                break;
            case 9:
                cut<9>(task);
                PYOPS_LAUNCH((tube_product<Acc, 9>), grid_for(task.items), (Shape<Acc, 9>::kThreads),
                             (Shape<Acc, 9>::kBytes), stream, task);
                break;
            case 10:
                cut<10>(task);
                PYOPS_LAUNCH((tube_product<Acc, 10>), grid_for(task.items), (Shape<Acc, 10>::kThreads),
                             (Shape<Acc, 10>::kBytes), stream, task);
                break;
            case 11:
                cut<11>(task);
                PYOPS_LAUNCH((tube_product<Acc, 11>), grid_for(task.items), (Shape<Acc, 11>::kThreads),
                             (Shape<Acc, 11>::kBytes), stream, task);
                break;
            case 12:
                cut<12>(task);
                PYOPS_LAUNCH((tube_product<Acc, 12>), grid_for(task.items), (Shape<Acc, 12>::kThreads),
                             (Shape<Acc, 12>::kBytes), stream, task);
                break;
            default: break;
        }
        if constexpr (sizeof(Acc) == 4) {
            switch (n) {
                case 13:
                    cut<13>(task);
                    PYOPS_LAUNCH((tube_product<Acc, 13>), grid_for(task.items), (Shape<Acc, 13>::kThreads),
                                 (Shape<Acc, 13>::kBytes), stream, task);
                    break;
                case 14:
                    cut<14>(task);
                    PYOPS_LAUNCH((tube_product<Acc, 14>), grid_for(task.items), (Shape<Acc, 14>::kThreads),
                                 (Shape<Acc, 14>::kBytes), stream, task);
                    break;
                case 15:
                    cut<15>(task);
                    PYOPS_LAUNCH((tube_product<Acc, 15>), grid_for(task.items), (Shape<Acc, 15>::kThreads),
                                 (Shape<Acc, 15>::kBytes), stream, task);
                    break;
                case 16:
                    cut<16>(task);
                    PYOPS_LAUNCH((tube_product<Acc, 16>), grid_for(task.items), (Shape<Acc, 16>::kThreads),
                                 (Shape<Acc, 16>::kBytes), stream, task);
                    break;
                default: break;
            }
        }
    }

    // A batch of c, and what is summed into each of its entries.
    void set_batch(ProductTask& task, i64 last) const {
        for (int d = 0; d < kTubalBatch; ++d) {
            const bool summed = plan.p.c.batch[d] == 0;
            task.batch.of[d] = summed ? 1 : plan.p.batch[d];
            task.summed.of[d] = summed ? plan.p.batch[d] : 1;
        }
        task.batch.of[kBatch - 1] = last;
        task.summed.of[kBatch - 1] = 1;
    }

    static Tubes tensor(const TubalTensor& t, i64 row, i64 col) {
        return {t.data, t.dtype, row, col, t.tube, {t.batch[0], t.batch[1], t.batch[2], t.batch[3], 0}, false};
    }

    // planes <- matrix x_3 tensor, or with `inverse` tensor <- matrix x_3 planes: a product of matrices in which each
    // column is a tube, with the slow index as another dimension of the batch where it cannot be merged.
    void transform(const TubalMatrix& m, const TubalTensor& t, i64 row, i64 col, const Planes& at, void* planes,
                   bool inverse) const {
        const i64 slow_stride = at.fast_k ? row : col, fast_stride = at.fast_k ? col : row, area = at.slow * at.fast;
        const bool mirrored = inverse && plan.gram;
        const bool merged = !mirrored && (at.slow == 1 || at.fast == 1 || slow_stride == at.fast * fast_stride);
        Tubes tensor_side = tensor(t, t.tube, merged && at.fast == 1 ? slow_stride : fast_stride);
        tensor_side.batch[kBatch - 1] = merged ? 0 : slow_stride;
        Tubes planes_side = at.tubes(planes, kType, plan.planes);
        planes_side.row = area;
        planes_side.col = 1;
        planes_side.batch[kBatch - 1] = merged ? 0 : at.fast;
        ProductTask task{};
        task.a = {const_cast<void*>(m.data), m.dtype, m.row, m.col, 0, {}, false};
        task.b = inverse ? planes_side : tensor_side;
        task.c = inverse ? tensor_side : planes_side;
        if (mirrored) {
            task.c = tensor(t, t.row, t.col);
            task.half = Half::Tubes;
        }
        task.batch = at.sizes(merged ? 1 : at.slow);
        task.summed = {{1, 1, 1, 1, 1}};
        task.rows = inverse ? plan.p.n3 : plan.planes;
        task.inner = inverse ? plan.planes : plan.p.n3;
        task.cols = merged ? area : at.fast;
        product(task, 1);
    }

    FftTask fft(const TubalTensor& t, i64 row, i64 col, const Planes& at, void* planes, const Acc* roots) const {
        FftTask task{};
        task.x = tensor(t, at.fast_k ? row : col, at.fast_k ? col : row);
        task.planes = planes;
        task.roots = roots;
        task.batch = at.sizes(1);
        task.slow = at.slow;
        task.fast = at.fast;
        task.n = static_cast<int>(plan.p.n3);
        task.along_tube = distance(t.tube) <= distance(task.x.col);
        return task;
    }
    unsigned fft_grid(const FftTask& task) const {
        i64 entries = 1;
        for (i64 size : task.batch.of) entries *= size;
        return grid_for(entries * divide_up(task.slow * task.fast, 2 * kPoints / task.n));
    }

    void zero() const {  // the product over no k, with the entries of tubes as another dimension of the batch
        ProductTask task{};
        task.c = tensor(plan.p.c, plan.p.c.row, plan.p.c.col);
        task.c.batch[kBatch - 1] = plan.p.c.tube;
        set_batch(task, plan.p.n3);
        task.rows = plan.p.n1;
        task.cols = plan.p.n4;
        product(task, 1);
    }

    cudaError_t run(void* workspace) const {
        const TubalProduct& p = plan.p;
        if (plan.zero()) {
            zero();
            return cudaGetLastError();
        }
        ProductTask task{};
        task.rows = p.n1, task.inner = p.n2, task.cols = p.n4;
        if (plan.way == Way::Short) {
            task.a = tensor(p.a, plan.a_row, plan.a_col);
            task.b = tensor(p.b, plan.b_row, plan.b_col);
            task.c = tensor(p.c, p.c.row, p.c.col);
            task.conjugate_a = p.transpose_a, task.conjugate_b = p.transpose_b;
            task.half = plan.gram ? Half::Mirror : Half::No;
            set_batch(task, 1);
            product(task, p.n3);
            return cudaGetLastError();
        }
        Acc* next = static_cast<Acc*>(workspace);
        const auto part = [&](i64 count) {
            Acc* const begin = next;
            next += divide_up(count, 4) * 4;
            return begin;
        };
        Acc* const roots = part(plan.roots);
        Acc* const tables[3] = {part(plan.tables[0]), part(plan.tables[1]), part(plan.tables[2])};
        Acc* const planes[3] = {part(plan.a.count), part(plan.b.count), part(plan.c.count)};
        TubalMatrix matrices[3] = {p.forward_a, p.forward_b, p.inverse};
        if (plan.way == Way::Fft)
            PYOPS_LAUNCH((fill_roots<Acc>), grid_for(divide_up(p.n3, kThreads)), kThreads, 0, stream, roots, p.n3);
        for (int i = 0; i < 3 && plan.way == Way::Dft; ++i) {
            const bool shared = i == 1 && plan.tables[1] == 0, forward = i < 2;
            const bool conjugate = i == 0 ? p.transpose_a : p.transpose_b;
            Acc* const table = tables[shared ? 0 : i];
            matrices[i] = {table, kType, forward ? p.n3 : plan.planes, 1};
            if (!shared)
                PYOPS_LAUNCH((fill_dft<Acc>), grid_for(divide_up(plan.tables[i], kThreads)), kThreads, 0, stream, table,
                             p.n3, forward, conjugate);
        }
        if (plan.way == Way::Fft) {
            FftTask forward = fft(p.a, plan.a_row, plan.a_col, plan.a, planes[0], roots);
            forward.conjugate = p.transpose_a;
            PYOPS_LAUNCH((fft_forward<Acc>), fft_grid(forward), kThreads, 0, stream, forward);
            forward = fft(p.b, plan.b_col, plan.b_row, plan.b, planes[1], roots);
            forward.conjugate = p.transpose_b;
            PYOPS_LAUNCH((fft_forward<Acc>), fft_grid(forward), kThreads, 0, stream, forward);
        } else {
            transform(matrices[0], p.a, plan.a_row, plan.a_col, plan.a, planes[0], false);
            transform(matrices[1], p.b, plan.b_col, plan.b_row, plan.b, planes[1], false);
        }
        task.a = plan.a.tubes(planes[0], kType, plan.planes);
        task.b = plan.b.tubes(planes[1], kType, plan.planes);
        const i64 x = task.b.row;
        task.b.row = task.b.col, task.b.col = x;  // to (k, j)
        task.c = plan.c.tubes(planes[2], kType, plan.planes);
        task.half = plan.gram ? Half::Upper : Half::No;
        set_batch(task, plan.planes);
        product(task, 1);
        if (plan.way == Way::Fft) {
            FftTask inverse = fft(p.c, p.c.row, p.c.col, plan.c, planes[2], roots);
            inverse.mirrored = plan.gram;
            PYOPS_LAUNCH((fft_inverse<Acc>), fft_grid(inverse), kThreads, 0, stream, inverse);
        } else {
            transform(matrices[2], p.c, p.c.row, p.c.col, plan.c, planes[2], true);
        }
        return cudaGetLastError();
    }
};

bool valid(const TubalProduct& p) {
    if (p.n1 < 0 || p.n2 < 0 || p.n4 < 0 || p.n3 < 1) return false;
    for (i64 size : p.batch)
        if (size < 0) return false;
    const bool twice = p.c.dtype == DType::F64;
    for (DType t : {p.a.dtype, p.b.dtype})
        if ((t == DType::F64) != twice) return false;
    const bool matrix = p.forward_a.data != nullptr;
    for (const TubalMatrix& m : {p.forward_a, p.forward_b, p.inverse})
        if ((m.data != nullptr) != matrix || (matrix && (m.dtype == DType::F64) != twice)) return false;
    return true;
}

cudaError_t run(const TubalProduct& p, bool gram, void* workspace, cudaStream_t stream) {
    if (!valid(p)) return cudaErrorInvalidValue;
    const Plan plan(p, gram);
    if (plan.nothing()) return cudaSuccess;
    if (p.c.data == nullptr || (plan.bytes() != 0 && workspace == nullptr)) return cudaErrorInvalidValue;
    if (!plan.zero() && (p.a.data == nullptr || p.b.data == nullptr)) return cudaErrorInvalidValue;
    return p.c.dtype == DType::F64 ? Launcher<double>{plan, stream}.run(workspace)
                                   : Launcher<float>{plan, stream}.run(workspace);
}

TubalProduct product_of(const TubalGram& g) {
    TubalProduct p{};
    p.a = p.b = g.u;
    p.c = g.c;
    for (int d = 0; d < kTubalBatch; ++d) p.batch[d] = g.batch[d];
    p.n1 = p.n4 = g.transpose ? g.cols : g.rows;
    p.n2 = g.transpose ? g.rows : g.cols;
    p.n3 = g.n3;
    p.transpose_a = g.transpose;
    p.transpose_b = !g.transpose;
    return p;
}

}  // namespace

size_t tprod_workspace(const TubalProduct& product) { return valid(product) ? Plan(product, false).bytes() : 0; }

cudaError_t tprod(const TubalProduct& product, void* workspace, cudaStream_t stream) {
    return run(product, false, workspace, stream);
}

size_t tgram_workspace(const TubalGram& gram) {
    const TubalProduct p = product_of(gram);
    return valid(p) ? Plan(p, true).bytes() : 0;
}

cudaError_t tgram(const TubalGram& gram, void* workspace, cudaStream_t stream) {
    return run(product_of(gram), true, workspace, stream);
}

}  // namespace pyops::cuda

#endif  // __CUDACC_RTC__
