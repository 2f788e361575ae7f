// The ops of the lmo family: schemas, checks, allocation, CPU and CUDA registration.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <cmath>

#include "common/check.h"
#include "common/isa.h"
#include "common/threads.h"
#include "lmo/lmo.h"

#if defined(PYOPS_WITH_CUDA)
#include <torch/csrc/stable/accelerator.h>

#include "lmo/lmo_cuda.h"

// Only a CUDA build of torch has it, so the address is null on a CPU torch, where no CUDA tensor can arrive either.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device, void** stream);

#endif

namespace pyops {
namespace {

Compute checked_compute(const std::string& name, std::string_view op) {
    if (name == "float64") return Compute::Float64;
    if (name == "float32") return Compute::Float32;
    if (name == "bf16x3") return Compute::Bf16x3;
    PYOPS_CHECK(name == "bfloat16", op, "compute", "must be float64, float32, bf16x3 or bfloat16", name);
    return Compute::Bf16;
}

LmoNorm checked_norm(const std::string& name, std::string_view op, bool spectral) {
    if (name == "spectral" && spectral) return LmoNorm::Spectral;
    if (name == "sign") return LmoNorm::Sign;
    if (name == "col") return LmoNorm::Col;
    if (name == "row") return LmoNorm::Row;
    PYOPS_CHECK(name == "euclidean", op, "norm",
                spectral ? "must be spectral, sign, col, row or euclidean" : "must be sign, col, row or euclidean",
                name);
    return LmoNorm::Euclidean;
}

void set_iteration(LmoPlan& plan, std::string_view op, const std::vector<double>& coefficients,
                   const std::vector<int64_t>& restarts, const std::string& form, const std::string& compute,
                   double eps) {
    PYOPS_CHECK(coefficients.size() % 3 == 0, op, "coefficients", "must hold three numbers per step",
                std::to_string(coefficients.size()));
    for (size_t i = 0; i + 1 < restarts.size(); ++i)
        PYOPS_CHECK(restarts[i] < restarts[i + 1], op, "restarts", "must ascend", std::to_string(restarts[i + 1]));
    PYOPS_CHECK(restarts.empty() || restarts[0] >= 1, op, "restarts", "must be at least 1",
                std::to_string(restarts[0]));
    PYOPS_CHECK(form == "auto" || form == "direct" || form == "gram", op, "form", "must be auto, direct or gram", form);
    PYOPS_CHECK(eps >= 0 && std::isfinite(eps), op, "eps", "must be finite and at least 0", std::to_string(eps));
    plan.coefficients = coefficients.data();
    plan.steps = static_cast<int64_t>(coefficients.size() / 3);
    plan.restarts = restarts.data();
    plan.restart_count = static_cast<int64_t>(restarts.size());
    plan.form = form == "auto" ? Form::Auto : form == "gram" ? Form::Gram : Form::Direct;
    plan.compute = checked_compute(compute, op);
    plan.eps = eps;
}

// The matrices of a [..., rows, cols] tensor.
std::vector<MatrixView> matrices(const Tensor& t, DType dtype) {
    const int64_t dim = t.dim(), rows = t.size(dim - 2), cols = t.size(dim - 1);
    int64_t count = 1;
    for (int64_t d = 0; d < dim - 2; ++d) count *= t.size(d);
    std::vector<MatrixView> views(static_cast<size_t>(count));
    auto* data = static_cast<char*>(t.data_ptr());
    for (int64_t b = 0; b < count; ++b) {
        int64_t offset = 0, rest = b;
        for (int64_t d = dim - 3; d >= 0; --d) {
            offset += rest % t.size(d) * t.stride(d);
            rest /= t.size(d);
        }
        views[static_cast<size_t>(b)] = {
            data + offset * size_of(dtype), dtype, rows, cols, t.stride(dim - 2), t.stride(dim - 1)};
    }
    return views;
}

std::vector<int64_t> sizes_of(const Tensor& t, int64_t dims) {
    std::vector<int64_t> sizes;
    for (int64_t d = 0; d < dims; ++d) sizes.push_back(t.size(d));
    return sizes;
}

DType checked_matrices(const Tensor& t, std::string_view op, std::string_view argument) {
    const DType dtype = checked_dtype(t, op, argument);
    PYOPS_CHECK(t.dim() >= 2, op, argument, "must have at least 2 dimensions", shape_text(t));
    return dtype;
}

void run(const LmoPlan& plan, std::vector<LmoTask>& tasks) {
    PYOPS_ISA_CALL(lmo_steps, plan, tasks.data(), static_cast<int64_t>(tasks.size()), kernel_threads());
}

std::tuple<Tensor, Tensor, Tensor> polar(Tensor g, std::vector<double> coefficients, std::vector<int64_t> restarts,
                                         std::string form, std::string compute, std::string normalize, double eps,
                                         double tol, int64_t min_steps, bool with_residual) {
    const DType dtype = checked_matrices(g, "polar", "g");
    LmoPlan plan;
    set_iteration(plan, "polar", coefficients, restarts, form, compute, eps);
    PYOPS_CHECK(normalize == "fro" || normalize == "schatten4", "polar", "normalize", "must be fro or schatten4",
                normalize);
    PYOPS_CHECK(!std::isnan(tol), "polar", "tol", "must be a number", std::to_string(tol));
    PYOPS_CHECK(min_steps >= 0, "polar", "min_steps", "must be at least 0", std::to_string(min_steps));
    plan.schatten4 = normalize == "schatten4";
    plan.tolerance = tol;
    plan.min_steps = min_steps;

    Tensor out = allocate(g, sizes_of(g, g.dim()));
    const bool reports = with_residual || tol >= 0;
    const auto batch = reports ? sizes_of(g, g.dim() - 2) : std::vector<int64_t>{0};
    Tensor residual = allocate(g, batch, dtype == DType::F64 ? ScalarType::Double : ScalarType::Float);
    Tensor steps = allocate(g, batch, ScalarType::Long);
    const auto grads = matrices(g, dtype), results = matrices(out, dtype);
    std::vector<LmoTask> tasks(grads.size());
    std::vector<double> residuals(reports ? grads.size() : 0);
    auto* used = reports ? static_cast<int64_t*>(steps.data_ptr()) : nullptr;
    for (size_t i = 0; i < tasks.size(); ++i) {
        tasks[i].weight = results[i];
        tasks[i].grad = grads[i];
        if (reports) {
            tasks[i].residual = &residuals[i];
            tasks[i].steps_used = used + i;
        }
    }
    run(plan, tasks);
    for (size_t i = 0; i < residuals.size(); ++i) {
        if (grads[i].rows == 0 || grads[i].cols == 0) used[i] = 0;
        if (dtype == DType::F64)
            static_cast<double*>(residual.data_ptr())[i] = residuals[i];
        else
            static_cast<float*>(residual.data_ptr())[i] = static_cast<float>(residuals[i]);
    }
    return {out, residual, steps};
}

Tensor unit_direction(Tensor g, std::string norm, double scale) {
    const DType dtype = checked_matrices(g, "unit_direction", "g");
    LmoPlan plan;
    plan.norm = checked_norm(norm, "unit_direction", false);
    Tensor out = allocate(g, sizes_of(g, g.dim()));
    const auto grads = matrices(g, dtype), results = matrices(out, dtype);
    std::vector<LmoTask> tasks(grads.size());
    for (size_t i = 0; i < tasks.size(); ++i) {
        tasks[i].weight = results[i];
        tasks[i].grad = grads[i];
        tasks[i].step = -scale;
    }
    run(plan, tasks);
    return out;
}

void lmo_step_(std::vector<Tensor> weights, std::vector<Tensor> grads, std::vector<Tensor> momenta, std::string norm,
               std::vector<double> shrinks, std::vector<double> steps, double momentum, bool nesterov,
               double grad_decay, std::vector<double> coefficients, std::vector<int64_t> restarts, std::string form,
               std::string compute, double eps, int64_t seed) {
    constexpr std::string_view op = "lmo_step_";
    LmoPlan plan;
    plan.norm = checked_norm(norm, op, true);
    set_iteration(plan, op, coefficients, restarts, form, compute, eps);
    plan.momentum = momentum;
    plan.nesterov = nesterov;
    plan.grad_decay = momenta.empty() ? grad_decay : 1;
    plan.seed = seed;
    const size_t count = weights.size();
    const auto same_count = [&](size_t n, const char* argument) {
        PYOPS_CHECK(n == count, op, argument, "must have one entry per weight (" + std::to_string(count) + ")",
                    std::to_string(n));
    };
    same_count(grads.size(), "grads");
    if (!momenta.empty()) same_count(momenta.size(), "momenta");
    same_count(shrinks.size(), "shrinks");
    same_count(steps.size(), "steps");
    std::vector<LmoTask> tasks;
    for (size_t i = 0; i < count; ++i) {
        const auto views = [&](const Tensor& t, const char* argument) {
            const DType dtype = checked_matrices(t, op, argument);
            PYOPS_CHECK(sizes_of(t, t.dim()) == sizes_of(weights[i], weights[i].dim()), op, argument,
                        "must have the weight's shape " + shape_text(weights[i]), shape_text(t));
            return matrices(t, dtype);
        };
        for (int64_t d = 0; d < weights[i].dim(); ++d)
            PYOPS_CHECK(weights[i].size(d) <= 1 || weights[i].stride(d) != 0, op, "weights",
                        "must not be expanded: elements would share memory", shape_text(weights[i]));
        const auto w = views(weights[i], "weights"), g = views(grads[i], "grads");
        const auto m = momenta.empty() ? std::vector<MatrixView>(w.size()) : views(momenta[i], "momenta");
        for (size_t b = 0; b < w.size(); ++b) {
            LmoTask task;
            task.weight = w[b];
            task.grad = g[b];
            task.momentum = m[b];
            task.shrink = shrinks[i];
            task.step = steps[i];
            task.tensor = static_cast<int64_t>(i);
            task.first_element = static_cast<int64_t>(b) * w[b].rows * w[b].cols;
            tasks.push_back(task);
        }
    }
    run(plan, tasks);
}

#if defined(PYOPS_WITH_CUDA)

// A tensor of two or more dimensions as [batch, rows, cols]; `t` is replaced by a copy if its batch has no single
// stride.
View cuda_view(Tensor& t, DType dtype) {
    const int64_t dim = t.dim();
    for (int64_t d = dim - 4; d >= 0; --d)
        if (t.size(d) != 1 && t.stride(d) != t.stride(d + 1) * t.size(d + 1)) {
            t = torch::stable::contiguous(t);
            break;
        }
    return {t.data_ptr(), dtype, dim > 2 ? t.stride(dim - 3) : 0, t.stride(dim - 2), t.stride(dim - 1)};
}

cuda::VectorNorm cuda_norm(LmoNorm norm) {
    switch (norm) {
        case LmoNorm::Sign: return cuda::VectorNorm::Sign;
        case LmoNorm::Col: return cuda::VectorNorm::Col;
        case LmoNorm::Row: return cuda::VectorNorm::Row;
        default: return cuda::VectorNorm::Euclidean;
    }
}

// Sizes, scratch memory, device and stream of one launch on a tensor's matrices.
struct CudaLaunch {
    int64_t batch = 1, rows, cols;
    cuda::VectorNorm norm;
    torch::stable::accelerator::DeviceGuard guard;
    Tensor workspace;
    void* stream = nullptr;

    CudaLaunch(const Tensor& t, LmoNorm which)
        : rows(t.size(t.dim() - 2)), cols(t.size(t.dim() - 1)), norm(cuda_norm(which)), guard(t.get_device_index()) {
        for (int64_t d = 0; d < t.dim() - 2; ++d) batch *= t.size(d);
        const auto bytes = static_cast<int64_t>(cuda::norm_workspace(norm, batch, rows, cols));
        workspace = torch::stable::new_empty(t, {bytes}, ScalarType::Byte);
        TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(t.get_device_index(), &stream));
    }
    cudaStream_t cuda_stream() const { return static_cast<cudaStream_t>(stream); }
};

void checked(cudaError_t status, std::string_view op) {
    STD_TORCH_CHECK(status == cudaSuccess, "pyops::", op, ": CUDA says ", cudaGetErrorString(status));
}

Tensor unit_direction_cuda(Tensor g, std::string norm, double scale) {
    const DType dtype = checked_matrices(g, "unit_direction", "g");
    const LmoNorm which = checked_norm(norm, "unit_direction", false);
    Tensor out = allocate(g, sizes_of(g, g.dim()));
    CudaLaunch launch(g, which);
    const View from = cuda_view(g, dtype), to = cuda_view(out, dtype);
    checked(cuda::unit_direction(from, to, launch.batch, launch.rows, launch.cols, launch.norm, scale,
                                 launch.workspace.data_ptr(), launch.cuda_stream()),
            "unit_direction");
    return out;
}

// lmo_step_ for one tensor (2-D or 3-D) and a norm without matrix products.
void vector_step_cuda(Tensor weight, Tensor grad, std::optional<Tensor> momentum_buffer, std::string norm,
                      double shrink, double step, double momentum, bool nesterov, double grad_decay, int64_t seed,
                      int64_t tensor) {
    constexpr std::string_view op = "vector_step_";
    const LmoNorm which = checked_norm(norm, op, false);
    const auto view = [&](Tensor& t, const char* argument) {
        const DType dtype = checked_matrices(t, op, argument);
        PYOPS_CHECK(t.dim() <= 3, op, argument, "must have 2 or 3 dimensions", shape_text(t));
        PYOPS_CHECK(sizes_of(t, t.dim()) == sizes_of(weight, weight.dim()), op, argument,
                    "must have the weight's shape " + shape_text(weight), shape_text(t));
        return cuda_view(t, dtype);
    };
    const View w = view(weight, "weight"), g = view(grad, "grad");
    const View m = momentum_buffer ? view(*momentum_buffer, "momentum_buffer") : View{nullptr, DType::F32, 0, 0, 0};
    CudaLaunch launch(weight, which);
    checked(cuda::vector_step(w, g, m, launch.batch, launch.rows, launch.cols, launch.norm, shrink, step, momentum,
                              nesterov, momentum_buffer ? 1.0 : grad_decay, seed, tensor, launch.workspace.data_ptr(),
                              launch.cuda_stream()),
            op);
}

#endif

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(pyops, m) {
    m.def(
        "polar(Tensor g, float[] coefficients, int[] restarts, str form, str compute, str normalize, float eps, float "
        "tol, "
        "int min_steps, bool with_residual) -> (Tensor, Tensor, Tensor)");
    m.def("unit_direction(Tensor g, str norm, float scale) -> Tensor");
    m.def(
        "lmo_step_(Tensor(a!)[] weights, Tensor(b!)[] grads, Tensor(c!)[] momenta, str norm, float[] shrinks, "
        "float[] steps, float momentum, bool nesterov, float grad_decay, float[] coefficients, int[] restarts, str "
        "form, "
        "str compute, float eps, int seed) -> ()");
#if defined(PYOPS_WITH_CUDA)
    // What the Triton launcher of lmo_step_ calls for the norms without matrix products.
    m.def(
        "vector_step_(Tensor(a!) weight, Tensor(b!) grad, Tensor(c!)? momentum_buffer, str norm, float shrink, float "
        "step, "
        "float momentum, bool nesterov, float grad_decay, int seed, int tensor) -> ()");
#endif
}

STABLE_TORCH_LIBRARY_IMPL(pyops, CPU, m) {
    m.impl("polar", TORCH_BOX(&polar));
    m.impl("unit_direction", TORCH_BOX(&unit_direction));
    m.impl("lmo_step_", TORCH_BOX(&lmo_step_));
}

#if defined(PYOPS_WITH_CUDA)
STABLE_TORCH_LIBRARY_IMPL(pyops, CUDA, m) {
    m.impl("unit_direction", TORCH_BOX(&unit_direction_cuda));
    m.impl("vector_step_", TORCH_BOX(&vector_step_cuda));
}
#endif

}  // namespace pyops
