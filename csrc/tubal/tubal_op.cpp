// The ops of the tubal family: schemas, checks, allocation, registration.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <array>
#include <numeric>

#include "common/check.h"
#include "common/isa.h"
#include "common/threads.h"
#include "tubal/tubal.h"

#if defined(PYOPS_WITH_CUDA)
#include <torch/csrc/stable/accelerator.h>

#include "tubal/tubal_cuda.h"

// Only a CUDA build of torch has it, so the address is null on a CPU torch, where no CUDA tensor can arrive either.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device, void** stream);

#endif

namespace pyops {
namespace {

// Where the last three dimensions of a tensor lie.
struct Axes {
    size_t row, col, tube;
    Axes(size_t dim, bool tubes_first)
        : row(dim - (tubes_first ? 2 : 3)), col(row + 1), tube(dim - (tubes_first ? 3 : 1)) {}
};

struct Factor {
    int64_t rows, cols, tubes;  // as stored
    DType dtype;
    TubalView view;  // of batch entry 0
};

Factor checked_factor(const Tensor& t, bool tubes_first, std::string_view op, std::string_view argument) {
    const DType dtype = checked_dtype(t, op, argument);
    const auto sizes = t.sizes(), strides = t.strides();
    PYOPS_CHECK(sizes.size() >= 3, op, argument, "must have at least 3 dimensions", shape_text(t));
    const Axes axes(sizes.size(), tubes_first);
    PYOPS_CHECK(sizes[axes.tube] > 0, op, argument, "must have tubes of at least one element", shape_text(t));
    return {sizes[axes.row],
            sizes[axes.col],
            sizes[axes.tube],
            dtype,
            {t.data_ptr(), strides[axes.row], strides[axes.col], strides[axes.tube]}};
}

std::vector<int64_t> batch_of(const Tensor& t) {
    std::vector<int64_t> sizes;
    for (int64_t d = 0; d < t.dim() - 3; ++d) sizes.push_back(t.size(d));
    return sizes;
}

std::string sizes_text(const std::vector<int64_t>& sizes) {
    std::ostringstream out;
    out << "[";
    for (size_t i = 0; i < sizes.size(); ++i) out << (i ? ", " : "") << sizes[i];
    out << "]";
    return out.str();
}

std::vector<int64_t> broadcast(const Tensor& a, const Tensor& b, std::string_view op) {
    if (a.dim() == 3 && b.dim() == 3) return {};
    const std::vector<int64_t> x = batch_of(a), y = batch_of(b);
    std::vector<int64_t> out(std::max(x.size(), y.size()));
    for (size_t d = 0; d < out.size(); ++d) {
        const int64_t at_x = static_cast<int64_t>(d + x.size()) - static_cast<int64_t>(out.size());
        const int64_t at_y = static_cast<int64_t>(d + y.size()) - static_cast<int64_t>(out.size());
        const int64_t m = at_x < 0 ? 1 : x[static_cast<size_t>(at_x)], n = at_y < 0 ? 1 : y[static_cast<size_t>(at_y)];
        PYOPS_CHECK(m == n || m == 1 || n == 1, op, "b",
                    "must have batch dimensions that broadcast with those of a, " + sizes_text(x), sizes_text(y));
        out[d] = m == 1 ? n : m;
    }
    return out;
}

// The views of t's entries, one for each of a batch that t's own broadcasts to.
std::vector<TubalView> views(const Tensor& t, const TubalView& first, const std::vector<int64_t>& batch) {
    int64_t count = 1;
    for (const int64_t size : batch) count *= size;
    std::vector<TubalView> out(static_cast<size_t>(count), first);
    const int64_t own = t.dim() - 3, shift = static_cast<int64_t>(batch.size()) - own;
    const auto bytes = static_cast<int64_t>(t.element_size());
    if (own > 0)
        for (int64_t i = 0; i < count; ++i) {
            int64_t offset = 0, rest = i;
            for (auto d = static_cast<int64_t>(batch.size()) - 1; d >= shift; --d) {
                const int64_t size = batch[static_cast<size_t>(d)];
                if (t.size(d - shift) > 1) offset += rest % size * t.stride(d - shift);
                rest /= size;
            }
            out[static_cast<size_t>(i)].data = static_cast<char*>(first.data) + offset * bytes;
        }
    return out;
}

// A transform's matrix, checked; none for the DFT.
struct Matrix {
    const Tensor* tensor = nullptr;
    bool transpose = false;

    Matrix() = default;
    Matrix(const std::optional<Tensor>& given, const Tensor& like, int64_t tubes, std::string_view op,
           const char* argument) {
        if (!given) return;
        const ScalarType wanted = like.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
        PYOPS_CHECK(given->scalar_type() == wanted, op, argument,
                    wanted == ScalarType::Double ? "must be float64 for float64 factors" : "must be float32 here",
                    torch::headeronly::toString(given->scalar_type()));
        PYOPS_CHECK(given->dim() == 2 && given->size(0) == tubes && given->size(1) == tubes, op, argument,
                    "must be [" + std::to_string(tubes) + ", " + std::to_string(tubes) + "]", shape_text(*given));
        tensor = &*given;
    }
    Matrix transposed() const {
        Matrix m = *this;
        m.transpose = !m.transpose;
        return m;
    }
    int64_t row() const { return tensor->stride(transpose ? 1 : 0); }
    int64_t col() const { return tensor->stride(transpose ? 0 : 1); }

    // Row after row, in the type of its elements.
    std::vector<char> packed() const {
        if (tensor == nullptr) return {};
        const int64_t n = tensor->size(0), bytes = static_cast<int64_t>(tensor->element_size());
        std::vector<char> out(static_cast<size_t>(n * n * bytes));
        const auto* from = static_cast<const char*>(tensor->data_ptr());
        for (int64_t i = 0; i < n; ++i)
            for (int64_t j = 0; j < n; ++j)
                std::copy_n(from + (i * row() + j * col()) * bytes, bytes, out.data() + (i * n + j) * bytes);
        return out;
    }
};

void check_matrices(const std::optional<Tensor>& forward_a, const std::optional<Tensor>& forward_b,
                    const std::optional<Tensor>& inverse, std::string_view op) {
    const bool all = forward_a && forward_b && inverse, none = !forward_a && !forward_b && !inverse;
    PYOPS_CHECK(all || none, op, "forward_a, forward_b and inverse", "must be given together", "some of them");
}

// A product's factors: two tensors of one dtype whose tubes have one length.
struct Factors {
    Factor a, b;
    TubalProduct product;
    Factors(const Tensor& ta, const Tensor& tb, bool transpose_a, bool transpose_b, bool tubes_first,
            std::string_view op, const char* name_a = "a", const char* name_b = "b")
        : a(checked_factor(ta, tubes_first, op, name_a)), b(checked_factor(tb, tubes_first, op, name_b)) {
        PYOPS_CHECK(
            ta.scalar_type() == tb.scalar_type(), op, name_b,
            std::string("must have the dtype of ") + name_a + ", " + torch::headeronly::toString(ta.scalar_type()),
            torch::headeronly::toString(tb.scalar_type()));
        PYOPS_CHECK(
            a.tubes == b.tubes, op, name_b,
            "must have tubes of length " + std::to_string(a.tubes) + ", as " + name_a + " has: they do not broadcast",
            shape_text(tb));
        product.rows = transpose_a ? a.cols : a.rows;
        product.inner = transpose_a ? a.rows : a.cols;
        product.cols = transpose_b ? b.rows : b.cols;
        const int64_t inner = transpose_b ? b.cols : b.rows;
        PYOPS_CHECK(product.inner == inner, op, name_b,
                    "must have an inner dimension of " + std::to_string(product.inner) + ", as " + name_a + " has",
                    shape_text(tb));
        product.tubes = a.tubes;
        product.transpose_a = transpose_a;
        product.transpose_b = transpose_b;
        product.dtype = a.dtype;
    }
};

std::vector<int64_t> result_sizes(std::vector<int64_t> batch, const TubalProduct& p, bool tubes_first) {
    if (tubes_first)
        batch.insert(batch.end(), {p.tubes, p.rows, p.cols});
    else
        batch.insert(batch.end(), {p.rows, p.cols, p.tubes});
    return batch;
}

std::vector<int64_t> sizes_of(const Tensor& t) {
    std::vector<int64_t> sizes;
    for (int64_t d = 0; d < t.dim(); ++d) sizes.push_back(t.size(d));
    return sizes;
}

// target = sum over `batch`, where the target has none of it, of x * y
struct Job {
    const Tensor &x, &y;
    TubalProduct product;
    bool tubes_first;
    Matrix forward_x, forward_y, inverse;
    const std::vector<int64_t>& batch;
    std::string_view op;
};

TubalView first_view(const Tensor& t, bool tubes_first) {
    const auto strides = t.strides();
    const Axes axes(strides.size(), tubes_first);
    return {t.data_ptr(), strides[axes.row], strides[axes.col], strides[axes.tube]};
}

struct Cpu {
    static void check_device(const Tensor&, const Tensor&, std::string_view, const char*) {}

    static Tensor run(const Job& job, const std::vector<int64_t>& sizes) {
        Tensor target = allocate(job.x, sizes);
        const std::vector<int64_t>& batch = job.batch;
        const bool first = job.tubes_first;
        const auto forward_x = job.forward_x.packed(), forward_y = job.forward_y.packed();
        const auto inverse = job.inverse.packed();
        TubalProduct product = job.product;
        if (!inverse.empty()) {
            product.forward_a = forward_x.data();
            product.forward_b = forward_y.data();
            product.inverse = inverse.data();
        }
        if (batch.empty()) {
            const TubalEntry entry{first_view(job.x, first), first_view(job.y, first), first_view(target, first)};
            PYOPS_ISA_CALL(tubal_products, product, &entry, 1, kernel_threads());
            return target;
        }
        const auto a = views(job.x, first_view(job.x, first), batch), b = views(job.y, first_view(job.y, first), batch);
        const auto c = views(target, first_view(target, first), batch);
        if (a.empty()) return torch::stable::fill_(target, 0.0);
        std::vector<TubalEntry> entries(a.size());
        for (size_t i = 0; i < entries.size(); ++i) entries[i] = {a[i], b[i], c[i]};
        if (target.dim() - 3 < static_cast<int64_t>(batch.size()) || batch_of(target) != batch)
            std::stable_sort(entries.begin(), entries.end(),
                             [](const TubalEntry& m, const TubalEntry& n) { return m.c.data < n.c.data; });
        PYOPS_ISA_CALL(tubal_products, product, entries.data(), static_cast<int64_t>(entries.size()), kernel_threads());
        return target;
    }
};

#if defined(PYOPS_WITH_CUDA)

std::string device_text(const Tensor& t) {
    if (t.is_cuda()) return "cuda:" + std::to_string(t.get_device_index());
    return t.is_cpu() ? "cpu" : "another device";
}

// A dimension of a batch, with its strides in x, y and the target: zero where one does not move.
struct BatchDim {
    int64_t size;
    std::array<int64_t, 3> strides;
};

// No dimension of size 1, and those merged that can be.
std::vector<BatchDim> merged_batch(const std::vector<int64_t>& batch, const std::array<const Tensor*, 3>& tensors) {
    std::vector<BatchDim> out;
    for (size_t d = 0; d < batch.size(); ++d) {
        if (batch[d] == 1) continue;
        BatchDim dim{batch[d], {}};
        for (size_t i = 0; i < 3; ++i) {
            const Tensor& t = *tensors[i];
            const int64_t own = static_cast<int64_t>(d) - static_cast<int64_t>(batch.size()) + t.dim() - 3;
            dim.strides[i] = own < 0 || t.size(own) == 1 ? 0 : t.stride(own);
        }
        bool merge = !out.empty();
        for (size_t i = 0; merge && i < 3; ++i) merge = out.back().strides[i] == dim.size * dim.strides[i];
        if (merge) dim.size *= out.back().size, out.pop_back();
        out.push_back(dim);
    }
    return out;
}

// Dimension order[d] of t as dimension d.
Tensor permuted(Tensor t, const std::vector<int64_t>& order) {
    std::vector<int64_t> at(order.size());
    std::iota(at.begin(), at.end(), 0);
    for (size_t d = 0; d < order.size(); ++d) {
        const auto from = static_cast<size_t>(std::find(at.begin(), at.end(), order[d]) - at.begin());
        if (from == d) continue;
        t = torch::stable::transpose(t, static_cast<int64_t>(d), static_cast<int64_t>(from));
        std::swap(at[d], at[from]);
    }
    return t;
}

struct Cuda {
    static void check_device(const Tensor& t, const Tensor& a, std::string_view op, const char* argument) {
        PYOPS_CHECK(t.is_cuda() == a.is_cuda() && t.get_device_index() == a.get_device_index(), op, argument,
                    "must be on the device of a, " + device_text(a), device_text(t));
    }

    static Tensor run(const Job& job, const std::vector<int64_t>& sizes) {
        const torch::stable::accelerator::DeviceGuard guard(job.x.get_device_index());
        Tensor target = allocate(job.x, sizes);
        const auto batch = merged_batch(job.batch, {&job.x, &job.y, &target});
        if (batch.size() > cuda::kTubalBatch) return run_grouped(job, sizes);
        launch(job, target, batch);
        return target;
    }

  private:
    // Along a dimension of the batch x, y or the target may stand still. With the dimensions of each of these kinds
    // side by side in contiguous copies, they merge to three.
    static Tensor run_grouped(const Job& job, const std::vector<int64_t>& sizes) {
        const auto dim = static_cast<int64_t>(job.batch.size());
        const auto widened = [&](const std::vector<int64_t>& given) {
            std::vector<int64_t> out(static_cast<size_t>(dim + 3) - given.size(), 1);
            out.insert(out.end(), given.begin(), given.end());
            return out;
        };
        const std::vector<int64_t> of_x = widened(sizes_of(job.x)), of_y = widened(sizes_of(job.y));
        const std::vector<int64_t> of_target = widened(sizes);
        std::vector<int64_t> order(static_cast<size_t>(dim + 3)), back(order.size()), batch, target_sizes;
        std::iota(order.begin(), order.end(), 0);
        const auto kind = [&](int64_t d) {
            const auto i = static_cast<size_t>(d);
            return (of_x[i] == 1) * 4 + (of_y[i] == 1) * 2 + (of_target[i] == 1);
        };
        std::stable_sort(order.begin(), order.begin() + dim, [&](int64_t m, int64_t n) { return kind(m) < kind(n); });
        for (size_t d = 0; d < order.size(); ++d) {
            const auto from = static_cast<size_t>(order[d]);
            back[from] = static_cast<int64_t>(d);
            target_sizes.push_back(of_target[from]);
            if (d < job.batch.size()) batch.push_back(job.batch[from]);
        }
        const auto copy = [&](const Tensor& t, const std::vector<int64_t>& wide) {
            return torch::stable::contiguous(permuted(torch::stable::reshape(t, wide), order));
        };
        const Tensor x = copy(job.x, of_x), y = copy(job.y, of_y);
        Tensor target = allocate(x, target_sizes);
        const Job grouped{x, y, job.product, job.tubes_first, job.forward_x, job.forward_y, job.inverse, batch, job.op};
        launch(grouped, target, merged_batch(batch, {&x, &y, &target}));
        return torch::stable::reshape(torch::stable::contiguous(permuted(target, back)), sizes);
    }

    static cuda::TubalTensor view(const Tensor& t, const Job& job, const std::vector<BatchDim>& batch, size_t which) {
        const TubalView v = first_view(t, job.tubes_first);
        cuda::TubalTensor out{v.data, job.product.dtype, v.row, v.col, v.tube, {}};
        for (size_t d = 0; d < batch.size(); ++d) out.batch[d] = batch[d].strides[which];
        return out;
    }

    static cuda::TubalMatrix view(const Matrix& m) {
        if (m.tensor == nullptr) return {nullptr, DType::F32, 0, 0};
        const DType dtype = m.tensor->scalar_type() == ScalarType::Double ? DType::F64 : DType::F32;
        return {m.tensor->data_ptr(), dtype, m.row(), m.col()};
    }

    static void launch(const Job& job, const Tensor& target, const std::vector<BatchDim>& batch) {
        long long sizes[cuda::kTubalBatch] = {1, 1, 1, 1};
        STD_TORCH_CHECK(batch.size() <= cuda::kTubalBatch, "pyops::", job.op, ": a batch of too many dimensions");
        for (size_t d = 0; d < batch.size(); ++d) sizes[d] = batch[d].size;
        const TubalProduct& p = job.product;
        const cuda::TubalTensor x = view(job.x, job, batch, 0), c = view(target, job, batch, 2);
        if (p.gram) {
            cuda::TubalGram gram{x, c, {}, 0, 0, p.tubes, p.transpose_a};
            gram.rows = p.transpose_a ? p.inner : p.rows;
            gram.cols = p.transpose_a ? p.rows : p.inner;
            std::copy_n(sizes, cuda::kTubalBatch, gram.batch);
            call(job, gram, cuda::tgram_workspace(gram), &cuda::tgram);
            return;
        }
        cuda::TubalProduct product{};
        product.a = x;
        product.b = view(job.y, job, batch, 1);
        product.c = c;
        std::copy_n(sizes, cuda::kTubalBatch, product.batch);
        product.n1 = p.rows;
        product.n2 = p.inner;
        product.n4 = p.cols;
        product.n3 = p.tubes;
        product.transpose_a = p.transpose_a;
        product.transpose_b = p.transpose_b;
        product.forward_a = view(job.forward_x);
        product.forward_b = view(job.forward_y);
        product.inverse = view(job.inverse);
        call(job, product, cuda::tprod_workspace(product), &cuda::tprod);
    }

    template <class Task>
    static void call(const Job& job, const Task& task, size_t bytes,
                     cudaError_t (*launcher)(const Task&, void*, cudaStream_t)) {
        const Tensor workspace =
            torch::stable::new_empty(job.x, {static_cast<int64_t>(bytes)}, std::make_optional(ScalarType::Byte));
        void* stream = nullptr;
        TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(job.x.get_device_index(), &stream));
        const cudaError_t status = launcher(task, workspace.data_ptr(), static_cast<cudaStream_t>(stream));
        STD_TORCH_CHECK(status == cudaSuccess, "pyops::", job.op, ": CUDA says ", cudaGetErrorString(status));
    }
};

#endif

// A transform's three matrices.
struct Matrices {
    Matrix forward_a, forward_b, inverse;

    template <class Device>
    static Matrices checked(const std::optional<Tensor>& forward_a, const std::optional<Tensor>& forward_b,
                            const std::optional<Tensor>& inverse, const Tensor& a, int64_t tubes, std::string_view op) {
        check_matrices(forward_a, forward_b, inverse, op);
        if (!inverse) return {};
        Device::check_device(*forward_a, a, op, "forward_a");
        Device::check_device(*forward_b, a, op, "forward_b");
        Device::check_device(*inverse, a, op, "inverse");
        return {{forward_a, a, tubes, op, "forward_a"},
                {forward_b, a, tubes, op, "forward_b"},
                {inverse, a, tubes, op, "inverse"}};
    }
};

template <class Device>
Tensor tprod(Tensor a, Tensor b, bool transpose_a, bool transpose_b, bool tubes_first, std::optional<Tensor> forward_a,
             std::optional<Tensor> forward_b, std::optional<Tensor> inverse) {
    constexpr std::string_view op = "tprod";
    Device::check_device(b, a, op, "b");
    const Factors factors(a, b, transpose_a, transpose_b, tubes_first, op);
    const auto matrices = Matrices::checked<Device>(forward_a, forward_b, inverse, a, factors.product.tubes, op);
    const std::vector<int64_t> batch = broadcast(a, b, op);
    const Job job{a,     b, factors.product, tubes_first, matrices.forward_a, matrices.forward_b, matrices.inverse,
                  batch, op};
    return Device::run(job, result_sizes(batch, factors.product, tubes_first));
}

// With G^ = inverse^T G:  dA = forward_a^T (G^ B^H), or forward_a^T (B^ G^^H) where A was transposed; dB likewise.
template <class Device>
std::tuple<Tensor, Tensor> tprod_backward(Tensor grad, Tensor a, Tensor b, bool transpose_a, bool transpose_b,
                                          bool tubes_first, std::optional<Tensor> forward_a,
                                          std::optional<Tensor> forward_b, std::optional<Tensor> inverse) {
    constexpr std::string_view op = "tprod_backward";
    Device::check_device(b, a, op, "b");
    Device::check_device(grad, a, op, "grad");
    const Factors factors(a, b, transpose_a, transpose_b, tubes_first, op);
    const TubalProduct& p = factors.product;
    const auto matrices = Matrices::checked<Device>(forward_a, forward_b, inverse, a, p.tubes, op);
    const std::vector<int64_t> batch = broadcast(a, b, op);
    const Factor g = checked_factor(grad, tubes_first, op, "grad");
    PYOPS_CHECK(grad.scalar_type() == a.scalar_type(), op, "grad", "must have the dtype of a",
                torch::headeronly::toString(grad.scalar_type()));
    PYOPS_CHECK(g.rows == p.rows && g.cols == p.cols && g.tubes == p.tubes && batch_of(grad) == batch, op, "grad",
                "must have the shape of the product", shape_text(grad));
    const Matrix of_grad = matrices.inverse.transposed();

    const auto gradient = [&](const Tensor& of, bool grad_first, const Tensor& other, bool transpose_grad,
                              bool transpose_other, const Matrix& matrix_other, const Matrix& back) {
        const Tensor &x = grad_first ? grad : other, &y = grad_first ? other : grad;
        const Factors f(x, y, grad_first ? transpose_grad : transpose_other,
                        grad_first ? transpose_other : transpose_grad, tubes_first, op);
        return Device::run({x, y, f.product, tubes_first, grad_first ? of_grad : matrix_other,
                            grad_first ? matrix_other : of_grad, back, batch, op},
                           sizes_of(of));
    };
    const Matrix &m_a = matrices.forward_a, &m_b = matrices.forward_b;
    Tensor da = transpose_a ? gradient(a, false, b, true, transpose_b, m_b, m_a.transposed())
                            : gradient(a, true, b, false, !transpose_b, m_b, m_a.transposed());
    Tensor db = transpose_b ? gradient(b, true, a, true, transpose_a, m_a, m_b.transposed())
                            : gradient(b, false, a, false, !transpose_a, m_a, m_b.transposed());
    return {da, db};
}

template <class Device>
Tensor tgram(Tensor u, bool transpose, bool tubes_first) {
    constexpr std::string_view op = "tgram";
    Factors factors(u, u, transpose, !transpose, tubes_first, op, "u", "u");
    factors.product.gram = true;
    const std::vector<int64_t> batch = batch_of(u);
    return Device::run({u, u, factors.product, tubes_first, {}, {}, {}, batch, op},
                       result_sizes(batch, factors.product, tubes_first));
}

STABLE_TORCH_LIBRARY_FRAGMENT(pyops, m) {
    m.def(
        "tprod(Tensor a, Tensor b, bool transpose_a, bool transpose_b, bool tubes_first, Tensor? forward_a, "
        "Tensor? forward_b, Tensor? inverse) -> Tensor");
    m.def(
        "tprod_backward(Tensor grad, Tensor a, Tensor b, bool transpose_a, bool transpose_b, bool tubes_first, "
        "Tensor? forward_a, Tensor? forward_b, Tensor? inverse) -> (Tensor, Tensor)");
    m.def("tgram(Tensor u, bool transpose, bool tubes_first) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(pyops, CPU, m) {
    m.impl("tprod", TORCH_BOX(&tprod<Cpu>));
    m.impl("tprod_backward", TORCH_BOX(&tprod_backward<Cpu>));
    m.impl("tgram", TORCH_BOX(&tgram<Cpu>));
}

#if defined(PYOPS_WITH_CUDA)
STABLE_TORCH_LIBRARY_IMPL(pyops, CUDA, m) {
    m.impl("tprod", TORCH_BOX(&tprod<Cuda>));
    m.impl("tprod_backward", TORCH_BOX(&tprod_backward<Cuda>));
    m.impl("tgram", TORCH_BOX(&tgram<Cuda>));
}
#endif

}  // namespace
}  // namespace pyops
