// The op of tubal sensing: schema, checks, workspace, CPU registration.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "common/check.h"
#include "common/isa.h"
#include "common/threads.h"
#include "tubal/tubal_sensing.h"

namespace pyops {
namespace {

constexpr std::string_view kOp = "tubal_sensing_steps_";

DType checked(const Tensor& t, std::string_view argument, ScalarType wanted) {
    PYOPS_CHECK(t.scalar_type() == ScalarType::Double || t.scalar_type() == ScalarType::Float, kOp, argument,
                "must be float64 or float32", torch::headeronly::toString(t.scalar_type()));
    PYOPS_CHECK(t.scalar_type() == wanted, kOp, argument,
                std::string("must have u's dtype ") + torch::headeronly::toString(wanted),
                torch::headeronly::toString(t.scalar_type()));
    return wanted == ScalarType::Double ? DType::F64 : DType::F32;
}

Tensor tubal_sensing_steps_(Tensor u, Tensor measured, Tensor y, double step, int64_t steps) {
    SensingProblem problem;
    problem.dtype = checked(u, "u", u.scalar_type());
    checked(measured, "operator", u.scalar_type());
    checked(y, "y", u.scalar_type());
    PYOPS_CHECK(u.dim() == 3 && u.size(2) > 0, kOp, "u", "must be [n, rank, tubes] with at least one tube entry",
                shape_text(u));
    problem.n = u.size(0);
    problem.rank = u.size(1);
    problem.tubes = u.size(2);
    const bool fits = measured.dim() == 4 && measured.size(1) == problem.n && measured.size(2) == problem.n &&
                      measured.size(3) == problem.tubes;
    PYOPS_CHECK(fits, kOp, "operator", "must be [m, n, n, tubes] for u " + shape_text(u), shape_text(measured));
    problem.count = measured.size(0);
    PYOPS_CHECK(y.dim() == 1 && y.size(0) == problem.count, kOp, "y",
                "must have one entry per measurement, [" + std::to_string(problem.count) + "]", shape_text(y));
    PYOPS_CHECK(steps >= 0, kOp, "steps", "must be at least 0", std::to_string(steps));
    for (int64_t d = 0; d < 3; ++d)
        PYOPS_CHECK(u.size(d) <= 1 || u.stride(d) != 0, kOp, "u", "must not be expanded: elements would share memory",
                    shape_text(u));

    Tensor losses = allocate(u, {steps});
    if (steps == 0) return losses;
    measured = torch::stable::contiguous(measured);
    y = torch::stable::contiguous(y);
    problem.u = u.data_ptr();
    problem.u_row = u.stride(0);
    problem.u_column = u.stride(1);
    problem.u_tube = u.stride(2);
    problem.measured = measured.data_ptr();
    problem.y = y.data_ptr();
    problem.step = step;
    problem.steps = steps;
    problem.losses = losses.data_ptr();
    problem.threads = kernel_threads();
    Tensor workspace = allocate(u, {PYOPS_ISA_CALL(tubal_sensing_workspace, problem)});
    PYOPS_ISA_CALL(tubal_sensing_steps, problem, workspace.data_ptr());
    return losses;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(pyops, m) {
    m.def("tubal_sensing_steps_(Tensor(a!) u, Tensor operator, Tensor y, float step, int steps) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(pyops, CPU, m) { m.impl("tubal_sensing_steps_", TORCH_BOX(&tubal_sensing_steps_)); }

}  // namespace pyops
