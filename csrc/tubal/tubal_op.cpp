// The ops of the tubal family: schemas, checks, allocation, registration.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>

#include "common/check.h"
#include "common/isa.h"
#include "common/threads.h"
#include "tubal/tubal.h"

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

// A transform's matrix, perhaps transposed, as the kernel wants it.
class Matrix {
  public:
    Matrix(const std::optional<Tensor>& given, const Tensor& like, int64_t tubes, std::string_view op,
           const char* argument, bool transpose = false) {
        if (!given) return;
        const Tensor& m = *given;
        const ScalarType wanted = like.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
        PYOPS_CHECK(m.scalar_type() == wanted, op, argument,
                    wanted == ScalarType::Double ? "must be float64 for float64 factors" : "must be float32 here",
                    torch::headeronly::toString(m.scalar_type()));
        PYOPS_CHECK(m.dim() == 2 && m.size(0) == tubes && m.size(1) == tubes, op, argument,
                    "must be [" + std::to_string(tubes) + ", " + std::to_string(tubes) + "]", shape_text(m));
        data_.resize(static_cast<size_t>(tubes * tubes) * m.element_size());
        const int64_t row = m.stride(transpose ? 1 : 0), col = m.stride(transpose ? 0 : 1);
        const auto copy = [&](auto* to) {
            const auto* from = static_cast<const std::remove_pointer_t<decltype(to)>*>(m.data_ptr());
            for (int64_t i = 0; i < tubes; ++i)
                for (int64_t j = 0; j < tubes; ++j) *to++ = from[i * row + j * col];
        };
        if (wanted == ScalarType::Double)
            copy(reinterpret_cast<double*>(data_.data()));
        else
            copy(reinterpret_cast<float*>(data_.data()));
    }
    const void* get() const { return data_.empty() ? nullptr : data_.data(); }

  private:
    std::vector<char> data_;
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

Tensor allocate_result(const Tensor& like, std::vector<int64_t> batch, const TubalProduct& p, bool tubes_first) {
    if (tubes_first)
        batch.insert(batch.end(), {p.tubes, p.rows, p.cols});
    else
        batch.insert(batch.end(), {p.rows, p.cols, p.tubes});
    return allocate(like, batch);
}

TubalView first_view(const Tensor& t, bool tubes_first) {
    const auto strides = t.strides();
    const Axes axes(strides.size(), tubes_first);
    return {t.data_ptr(), strides[axes.row], strides[axes.col], strides[axes.tube]};
}

// target = sum over `batch` of x * y
void run(const TubalProduct& product, const Tensor& x, const Tensor& y, const Tensor& target,
         const std::vector<int64_t>& batch, bool tubes_first) {
    if (batch.empty()) {
        const TubalEntry entry{first_view(x, tubes_first), first_view(y, tubes_first), first_view(target, tubes_first)};
        PYOPS_ISA_CALL(tubal_products, product, &entry, 1, kernel_threads());
        return;
    }
    const auto a = views(x, first_view(x, tubes_first), batch), b = views(y, first_view(y, tubes_first), batch);
    const auto c = views(target, first_view(target, tubes_first), batch);
    std::vector<TubalEntry> entries(a.size());
    for (size_t i = 0; i < entries.size(); ++i) entries[i] = {a[i], b[i], c[i]};
    if (target.dim() - 3 < static_cast<int64_t>(batch.size()) || batch_of(target) != batch)
        std::stable_sort(entries.begin(), entries.end(),
                         [](const TubalEntry& m, const TubalEntry& n) { return m.c.data < n.c.data; });
    PYOPS_ISA_CALL(tubal_products, product, entries.data(), static_cast<int64_t>(entries.size()), kernel_threads());
}

Tensor tprod(Tensor a, Tensor b, bool transpose_a, bool transpose_b, bool tubes_first, std::optional<Tensor> forward_a,
             std::optional<Tensor> forward_b, std::optional<Tensor> inverse) {
    constexpr std::string_view op = "tprod";
    Factors factors(a, b, transpose_a, transpose_b, tubes_first, op);
    TubalProduct& product = factors.product;
    check_matrices(forward_a, forward_b, inverse, op);
    const std::vector<int64_t> batch = broadcast(a, b, op);
    const Matrix of_a(forward_a, a, product.tubes, op, "forward_a"), of_b(forward_b, a, product.tubes, op, "forward_b");
    const Matrix back(inverse, a, product.tubes, op, "inverse");
    product.forward_a = of_a.get();
    product.forward_b = of_b.get();
    product.inverse = back.get();
    Tensor c = allocate_result(a, batch, product, tubes_first);
    run(product, a, b, c, batch, tubes_first);
    return c;
}

// With G^ = inverse^T G:  dA = forward_a^T (G^ B^H), or forward_a^T (B^ G^^H) where A was transposed; dB likewise.
std::tuple<Tensor, Tensor> tprod_backward(Tensor grad, Tensor a, Tensor b, bool transpose_a, bool transpose_b,
                                          bool tubes_first, std::optional<Tensor> forward_a,
                                          std::optional<Tensor> forward_b, std::optional<Tensor> inverse) {
    constexpr std::string_view op = "tprod_backward";
    const Factors factors(a, b, transpose_a, transpose_b, tubes_first, op);
    const TubalProduct& p = factors.product;
    check_matrices(forward_a, forward_b, inverse, op);
    const std::vector<int64_t> batch = broadcast(a, b, op);
    const Factor g = checked_factor(grad, tubes_first, op, "grad");
    PYOPS_CHECK(grad.scalar_type() == a.scalar_type(), op, "grad", "must have the dtype of a",
                torch::headeronly::toString(grad.scalar_type()));
    PYOPS_CHECK(g.rows == p.rows && g.cols == p.cols && g.tubes == p.tubes && batch_of(grad) == batch, op, "grad",
                "must have the shape of the product", shape_text(grad));
    const auto matrix = [&](const std::optional<Tensor>& m, const char* argument, bool transpose) {
        return Matrix(m, a, p.tubes, op, argument, transpose);
    };
    const Matrix of_grad = matrix(inverse, "inverse", true);
    const Matrix of_a = matrix(forward_a, "forward_a", false), of_b = matrix(forward_b, "forward_b", false);
    const Matrix to_a = matrix(forward_a, "forward_a", true), to_b = matrix(forward_b, "forward_b", true);

    const auto gradient = [&](const Tensor& of, bool grad_first, const Tensor& other, bool transpose_grad,
                              bool transpose_other, const Matrix& matrix_other, const Matrix& back) {
        Tensor out = allocate(of, [&] {
            std::vector<int64_t> sizes;
            for (int64_t d = 0; d < of.dim(); ++d) sizes.push_back(of.size(d));
            return sizes;
        }());
        const Tensor &x = grad_first ? grad : other, &y = grad_first ? other : grad;
        const Factors f(x, y, grad_first ? transpose_grad : transpose_other,
                        grad_first ? transpose_other : transpose_grad, tubes_first, op);
        TubalProduct product = f.product;
        product.forward_a = grad_first ? of_grad.get() : matrix_other.get();
        product.forward_b = grad_first ? matrix_other.get() : of_grad.get();
        product.inverse = back.get();
        int64_t entries = 1;
        for (const int64_t size : batch) entries *= size;
        if (entries == 0) return torch::stable::fill_(out, 0.0);
        run(product, x, y, out, batch, tubes_first);
        return out;
    };
    Tensor da = transpose_a ? gradient(a, false, b, true, transpose_b, of_b, to_a)
                            : gradient(a, true, b, false, !transpose_b, of_b, to_a);
    Tensor db = transpose_b ? gradient(b, true, a, true, transpose_a, of_a, to_b)
                            : gradient(b, false, a, false, !transpose_a, of_a, to_b);
    return {da, db};
}

Tensor tgram(Tensor u, bool transpose, bool tubes_first) {
    constexpr std::string_view op = "tgram";
    Factors factors(u, u, transpose, !transpose, tubes_first, op, "u", "u");
    factors.product.gram = true;
    const std::vector<int64_t> batch = batch_of(u);
    Tensor c = allocate_result(u, batch, factors.product, tubes_first);
    run(factors.product, u, u, c, batch, tubes_first);
    return c;
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
    m.impl("tprod", TORCH_BOX(&tprod));
    m.impl("tprod_backward", TORCH_BOX(&tprod_backward));
    m.impl("tgram", TORCH_BOX(&tgram));
}

}  // namespace
}  // namespace pyops
