// The ops of the boxes family: schemas, checks, allocation, registration.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <cmath>

#include "boxes/boxes.h"
#include "common/check.h"
#include "common/isa.h"
#include "common/threads.h"

namespace pyops {
namespace {

// A table of corners [rows, D]; `tail` dimensions before D count as rows, which then must be contiguous.
BoxTable checked_table(const Tensor& z, const Tensor& Z, std::string_view op, const char* name_z, const char* name_Z,
                       DType dtype, int64_t dims) {
    PYOPS_CHECK(checked_dtype(z, op, name_z) == dtype, op, name_z, "must have the dtype of the other corners",
                torch::headeronly::toString(z.scalar_type()));
    PYOPS_CHECK(checked_dtype(Z, op, name_Z) == dtype, op, name_Z, "must have the dtype of the other corners",
                torch::headeronly::toString(Z.scalar_type()));
    PYOPS_CHECK(z.dim() == 2, op, name_z, "must have 2 dimensions", shape_text(z));
    PYOPS_CHECK(Z.dim() == 2 && Z.size(0) == z.size(0) && Z.size(1) == z.size(1), op, name_Z,
                "must have the shape of " + std::string(name_z) + ", " + shape_text(z), shape_text(Z));
    PYOPS_CHECK(z.size(1) == dims, op, name_z, "must have " + std::to_string(dims) + " box dimensions", shape_text(z));
    return {z.data_ptr(), Z.data_ptr(), z.size(0), z.stride(0), z.stride(1), Z.stride(0), Z.stride(1)};
}

// Numbers of a tensor as double.
std::vector<double> numbers(const Tensor& given, std::string_view op, const char* argument) {
    const Tensor t = torch::stable::contiguous(given);
    const auto count = static_cast<size_t>(t.numel());
    std::vector<double> out(count);
    if (t.scalar_type() == ScalarType::Double) {
        const auto* p = static_cast<const double*>(t.data_ptr());
        for (size_t i = 0; i < count; ++i) out[i] = p[i];
    } else {
        PYOPS_CHECK(t.scalar_type() == ScalarType::Float, op, argument, "must be float32 or float64",
                    torch::headeronly::toString(t.scalar_type()));
        const auto* p = static_cast<const float*>(t.data_ptr());
        for (size_t i = 0; i < count; ++i) out[i] = static_cast<double>(p[i]);
    }
    return out;
}

class Model {
  public:
    Model(const Tensor& like, std::string_view op, const char* argument, double tau, double nu, double offset,
          const std::optional<Tensor>& nus) {
        model_.dtype = checked_dtype(like, op, argument);
        PYOPS_CHECK(like.dim() >= 2, op, argument, "must have box dimensions last", shape_text(like));
        model_.dims = like.size(like.dim() - 1);
        PYOPS_CHECK(std::isfinite(tau) && tau >= 0, op, "tau", "must be finite and at least 0", std::to_string(tau));
        PYOPS_CHECK(std::isfinite(nu) && nu >= 0, op, "nu", "must be finite and at least 0", std::to_string(nu));
        PYOPS_CHECK(std::isfinite(offset), op, "offset", "must be finite", std::to_string(offset));
        model_.tau = tau;
        model_.nu = nu;
        model_.offset = offset;
        if (!nus) return;
        PYOPS_CHECK(nus->dim() == 1 && nus->size(0) == model_.dims, op, "nus",
                    "must be [" + std::to_string(model_.dims) + "]", shape_text(*nus));
        nus_ = numbers(*nus, op, "nus");
        for (const double each : nus_)
            PYOPS_CHECK(std::isfinite(each) && each > 0, op, "nus", "must be positive", std::to_string(each));
        if (!nus_.empty()) model_.nus = nus_.data();
    }
    const BoxModel& get() const { return model_; }
    ScalarType result() const { return model_.dtype == DType::F64 ? ScalarType::Double : ScalarType::Float; }

  private:
    BoxModel model_;
    std::vector<double> nus_;
};

struct Tables {
    BoxTable queries, items;
    Tables(const Model& m, std::string_view op, const Tensor& qz, const Tensor& qZ, const Tensor& iz, const Tensor& iZ)
        : queries(checked_table(qz, qZ, op, "qz", "qZ", m.get().dtype, m.get().dims)),
          items(checked_table(iz, iZ, op, "iz", "iZ", m.get().dtype, m.get().dims)) {}
};

Tensor box_log_volumes(Tensor qz, Tensor qZ, Tensor iz, Tensor iZ, double tau, double nu, double offset,
                       std::optional<Tensor> nus) {
    constexpr std::string_view op = "box_log_volumes";
    const Model model(qz, op, "qz", tau, nu, offset, nus);
    const Tables tables(model, op, qz, qZ, iz, iZ);
    Tensor out = allocate(qz, {tables.queries.rows, tables.items.rows}, model.result());
    PYOPS_ISA_CALL(box_log_volumes, model.get(), tables.queries, tables.items, out.data_ptr(), kernel_threads());
    return out;
}

Tensor checked_grad(const Tensor& grad, const Model& model, std::string_view op, int64_t rows, int64_t cols) {
    PYOPS_CHECK(grad.scalar_type() == model.result(), op, "grad", "must have the dtype of the log volumes",
                torch::headeronly::toString(grad.scalar_type()));
    PYOPS_CHECK(grad.dim() == 2 && grad.size(0) == rows && grad.size(1) == cols, op, "grad",
                "must be [" + std::to_string(rows) + ", " + std::to_string(cols) + "]", shape_text(grad));
    return torch::stable::contiguous(grad);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> box_log_volumes_backward(Tensor grad, Tensor qz, Tensor qZ, Tensor iz,
                                                                    Tensor iZ, double tau, double nu, double offset,
                                                                    std::optional<Tensor> nus) {
    constexpr std::string_view op = "box_log_volumes_backward";
    const Model model(qz, op, "qz", tau, nu, offset, nus);
    const Tables tables(model, op, qz, qZ, iz, iZ);
    const int64_t rows = tables.queries.rows, cols = tables.items.rows, dims = model.get().dims;
    const Tensor g = checked_grad(grad, model, op, rows, cols);
    Tensor dqz = allocate(qz, {rows, dims}), dqZ = allocate(qZ, {rows, dims});
    Tensor diz = allocate(iz, {cols, dims}), diZ = allocate(iZ, {cols, dims});
    if (rows == 0 || cols == 0) {
        for (Tensor* t : {&dqz, &dqZ, &diz, &diZ}) torch::stable::fill_(*t, 0.0);
        return {dqz, dqZ, diz, diZ};
    }
    const BoxGradients gradients{g.data_ptr(), dqz.data_ptr(), dqZ.data_ptr(), diz.data_ptr(), diZ.data_ptr()};
    PYOPS_ISA_CALL(box_log_volumes_backward, model.get(), tables.queries, tables.items, gradients, kernel_threads());
    return {dqz, dqZ, diz, diZ};
}

std::tuple<Tensor, Tensor> box_topk(Tensor qz, Tensor qZ, Tensor signs, Tensor iz, Tensor iZ,
                                    std::optional<Tensor> item_log_volume, double tau, double nu, double offset,
                                    int64_t k, bool prune) {
    constexpr std::string_view op = "box_topk";
    const Model model(qz, op, "qz", tau, nu, offset, {});
    PYOPS_CHECK(qz.dim() == 3, op, "qz", "must be [queries, terms, box dimensions]", shape_text(qz));
    PYOPS_CHECK(qZ.dim() == 3 && qZ.size(0) == qz.size(0) && qZ.size(1) == qz.size(1) && qZ.size(2) == qz.size(2), op,
                "qZ", "must have the shape of qz, " + shape_text(qz), shape_text(qZ));
    const int64_t queries = qz.size(0), terms = qz.size(1), dims = qz.size(2);
    PYOPS_CHECK(terms >= 1, op, "qz", "must have at least one term per query", shape_text(qz));
    PYOPS_CHECK(k >= 1, op, "k", "must be at least 1", std::to_string(k));
    PYOPS_CHECK(signs.dim() == 2 && signs.size(0) == queries && signs.size(1) == terms, op, "signs",
                "must be [" + std::to_string(queries) + ", " + std::to_string(terms) + "]", shape_text(signs));
    const Tensor flat_z = torch::stable::reshape(qz, {queries * terms, dims});
    const Tensor flat_Z = torch::stable::reshape(qZ, {queries * terms, dims});
    const Tables tables(model, op, flat_z, flat_Z, iz, iZ);
    const std::vector<double> of_terms = numbers(signs, op, "signs");
    std::optional<Tensor> of_items;
    if (item_log_volume) {
        PYOPS_CHECK(item_log_volume->scalar_type() == model.result() && item_log_volume->dim() == 1 &&
                        item_log_volume->size(0) == tables.items.rows,
                    op, "item_log_volume", "must be one number per item in the dtype of the scores",
                    shape_text(*item_log_volume));
        of_items = torch::stable::contiguous(*item_log_volume);
    }
    Tensor values = allocate(qz, {queries, k}, model.result());
    Tensor indices = allocate(qz, {queries, k}, ScalarType::Long);
    BoxTopk p;
    p.queries = tables.queries;
    p.items = tables.items;
    p.terms = terms;
    p.k = k;
    p.signs = of_terms.data();
    p.item_log_volume = of_items ? of_items->data_ptr() : nullptr;
    p.prune = prune;
    p.values = values.data_ptr();
    p.indices = static_cast<int64_t*>(indices.data_ptr());
    PYOPS_ISA_CALL(box_topk, model.get(), p, kernel_threads());
    return {values, indices};
}

// The indices, which must outlive the samples.
struct Samples {
    Tensor query_index, item_index;
    BoxSamples get;
    Samples(const Tables& tables, std::string_view op, const Tensor& queries, const Tensor& items)
        : query_index(queries), item_index(items) {
        PYOPS_CHECK(queries.scalar_type() == ScalarType::Long && queries.dim() == 1, op, "query_index",
                    "must be int64 with 1 dimension", shape_text(queries));
        PYOPS_CHECK(items.scalar_type() == ScalarType::Long && items.dim() == 2 && items.size(0) == queries.size(0), op,
                    "item_index", "must be int64 [" + std::to_string(queries.size(0)) + ", samples]",
                    shape_text(items));
        query_index = torch::stable::contiguous(queries);
        item_index = torch::stable::contiguous(items);
        get.queries = tables.queries;
        get.items = tables.items;
        get.query_index = static_cast<const int64_t*>(query_index.data_ptr());
        get.item_index = static_cast<const int64_t*>(item_index.data_ptr());
        get.count = items.size(0);
        get.samples = items.size(1);
        const auto within = [&](const int64_t* index, int64_t count, int64_t rows, const char* argument) {
            for (int64_t i = 0; i < count; ++i)
                PYOPS_CHECK(0 <= index[i] && index[i] < rows, op, argument,
                            "must be at least 0 and below " + std::to_string(rows), std::to_string(index[i]));
        };
        within(get.query_index, get.count, tables.queries.rows, "query_index");
        within(get.item_index, get.count * get.samples, tables.items.rows, "item_index");
    }
};

Tensor box_sampled(Tensor qz, Tensor qZ, Tensor iz, Tensor iZ, Tensor query_index, Tensor item_index, double tau,
                   double nu, double offset) {
    constexpr std::string_view op = "box_sampled";
    const Model model(qz, op, "qz", tau, nu, offset, {});
    const Tables tables(model, op, qz, qZ, iz, iZ);
    const Samples samples(tables, op, query_index, item_index);
    Tensor out = allocate(qz, {samples.get.count, samples.get.samples}, model.result());
    if (out.numel() > 0) PYOPS_ISA_CALL(box_sampled, model.get(), samples.get, out.data_ptr(), kernel_threads());
    return out;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> box_sampled_backward(Tensor grad, Tensor qz, Tensor qZ, Tensor iz, Tensor iZ,
                                                                Tensor query_index, Tensor item_index, double tau,
                                                                double nu, double offset) {
    constexpr std::string_view op = "box_sampled_backward";
    const Model model(qz, op, "qz", tau, nu, offset, {});
    const Tables tables(model, op, qz, qZ, iz, iZ);
    const Samples samples(tables, op, query_index, item_index);
    const int64_t count = samples.get.count, pairs = count * samples.get.samples, dims = model.get().dims;
    const Tensor g = checked_grad(grad, model, op, count, samples.get.samples);
    // In the dtype of the log volumes: rows of one box are yet to be added up.
    Tensor dqz = allocate(qz, {count, dims}, model.result()), dqZ = allocate(qZ, {count, dims}, model.result());
    Tensor diz = allocate(iz, {pairs, dims}, model.result()), diZ = allocate(iZ, {pairs, dims}, model.result());
    const BoxGradients gradients{g.data_ptr(), dqz.data_ptr(), dqZ.data_ptr(), diz.data_ptr(), diZ.data_ptr()};
    if (count > 0) PYOPS_ISA_CALL(box_sampled_backward, model.get(), samples.get, gradients, kernel_threads());
    return {dqz, dqZ, diz, diZ};
}

STABLE_TORCH_LIBRARY_FRAGMENT(pyops, m) {
    m.def(
        "box_log_volumes(Tensor qz, Tensor qZ, Tensor iz, Tensor iZ, float tau, float nu, float offset, Tensor? nus) "
        "-> Tensor");
    m.def(
        "box_log_volumes_backward(Tensor grad, Tensor qz, Tensor qZ, Tensor iz, Tensor iZ, float tau, float nu, "
        "float offset, Tensor? nus) -> (Tensor, Tensor, Tensor, Tensor)");
    m.def(
        "box_topk(Tensor qz, Tensor qZ, Tensor signs, Tensor iz, Tensor iZ, Tensor? item_log_volume, float tau, "
        "float nu, float offset, int k, bool prune) -> (Tensor, Tensor)");
    m.def(
        "box_sampled(Tensor qz, Tensor qZ, Tensor iz, Tensor iZ, Tensor query_index, Tensor item_index, float tau, "
        "float nu, float offset) -> Tensor");
    m.def(
        "box_sampled_backward(Tensor grad, Tensor qz, Tensor qZ, Tensor iz, Tensor iZ, Tensor query_index, "
        "Tensor item_index, float tau, float nu, float offset) -> (Tensor, Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(pyops, CPU, m) {
    m.impl("box_log_volumes", TORCH_BOX(&box_log_volumes));
    m.impl("box_log_volumes_backward", TORCH_BOX(&box_log_volumes_backward));
    m.impl("box_topk", TORCH_BOX(&box_topk));
    m.impl("box_sampled", TORCH_BOX(&box_sampled));
    m.impl("box_sampled_backward", TORCH_BOX(&box_sampled_backward));
}

}  // namespace
}  // namespace pyops
