"""The shared suite fails broken ops: each toy below has one planted fault, and its check must see it.

The healthy toy is y = x / (1 + |x|^2) per matrix of a batch.
"""

import dataclasses
import math
import os

import pytest
import suite
import torch

from pyops.ops import _checks as checks

LIBRARY = torch.library.Library("pyops_toy", "DEF")


def per_matrix(t):
    return t.sum((-2, -1), keepdim=True)


def healthy(x):
    wide = x.to(torch.float64)
    return (wide / (1 + per_matrix(wide * wide))).to(x.dtype).contiguous()


def healthy_gradient(grad, x):
    """Of healthy: (g - 2 x <g, y>) / (1 + |x|^2), in torch operations, so that it has derivatives itself."""
    wide, g = x.to(torch.float64), grad.to(torch.float64)
    scale = 1 / (1 + per_matrix(wide * wide))
    return (scale * (g - 2 * wide * per_matrix(g * wide) * scale)).to(x.dtype)


def fake_like(x):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def guarded(op):
    """The public function of a toy: it refuses forward mode, as torch.library ops must."""

    def call(x):
        checks.matrix("x", x, 3)
        return op(x)

    return call


def toy(name, forward=healthy, gradient=healthy_gradient, fake=fake_like, batching=None, **changes):
    """A case whose op has the given parts in place of healthy ones."""
    LIBRARY.define(f"{name}(Tensor x) -> Tensor")
    LIBRARY.impl(name, forward, "CompositeExplicitAutograd")
    op = getattr(torch.ops.pyops_toy, name).default
    torch.library.register_fake(op, fake, lib=LIBRARY)
    torch.library.register_autograd(
        op,
        lambda ctx, grad: gradient(grad, *ctx.saved_tensors),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
        lib=LIBRARY,
    )
    batching = batching or (lambda info, dims, x: (op(x.movedim(dims[0], 0)), 0))
    torch.library.register_vmap(op, batching, lib=LIBRARY)
    case = suite.Case(
        name=name,
        op=f"pyops_toy::{name}",
        call=guarded(op),
        op_args=lambda x: (x,),
        oracle=lambda x: torch.stack([m / (1 + m.norm() ** 2) for m in x]) if x.numel() else x.clone(),
        shapes=((3, 8, 16),),
        small=((3, 4, 5),),
        gate=lambda dtype: 2 * suite.UNIT[dtype],
        second="works",
    )
    return dataclasses.replace(case, **changes)


def unwritten(x):
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    y = healthy(x)
    out.view(-1)[:-1] = y.view(-1)[:-1]
    return out


def mutates(x):
    y = healthy(x)
    x.mul_(2)
    return y


def writes_through_pointer(x):
    """As a kernel would: torch sees no write."""
    y = healthy(x)
    x.data.mul_(2)
    return y


def ignores_strides(x):
    return healthy(torch.as_strided(x, x.shape, torch.empty(x.shape, device="meta").stride()))


def writes_between(x):
    y = healthy(x)
    if not x.is_contiguous():
        memory = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())
        keep = x.clone()
        memory.add_(1)
        x.data.copy_(keep)
    return y


def cuts_offset(x):
    return healthy(x.as_strided(x.shape, x.stride(), x.storage_offset() % 2**31))


def cuts_stride(x):
    start = [x.storage_offset() + i * (x.stride(0) % 2**31) for i in range(len(x))]
    return torch.cat([healthy(x.as_strided((1, *x.shape[1:]), x.stride(), s)) for s in start])


calls = iter(range(10**9))


def varies_by_run(x):
    return healthy(x) * (1 + 1e-3 * (next(calls) % 2))


def varies_by_threads(x):
    return healthy(x) * (1 + 1e-3 * (torch.get_num_threads() - 1))


def varies_by_batch(x):
    return healthy(x) * (1 + 1e-3 * len(x))


def leaks_nan(x):
    """A padded lane: each problem's result has 0 times its neighbour's input in it."""
    return healthy(x) + 0 * x.roll(1, 0)


def hides_nan(x):
    return healthy(x.nan_to_num(0.0, 0.0, 0.0))


def wrong_gradient(grad, x):
    return healthy_gradient(grad, x) * 1.01


def wrong_second(grad, x):
    return healthy_gradient(grad, x.detach())


def low_gradient(grad, x):
    """Right in float64, which is all that gradcheck sees."""
    return healthy_gradient(grad, x) * (1 if x.dtype == torch.float64 else 1.5)


def obeys_autocast(x):
    eye = torch.eye(x.shape[-1], dtype=x.dtype)
    return (healthy(x) @ eye).to(x.dtype)


def wrong_dtype(x):
    return healthy(x).float()


def big_storage(x):
    return torch.cat([healthy(x), healthy(x)])[: len(x)]


def unpicklable(x):
    y = healthy(x)
    y.note = lambda: None
    return y


PARENT = os.getpid()


def breaks_in_children(x):
    return healthy(x) if os.getpid() == PARENT else torch.zeros_like(x)


def fails_on_empty(x):
    assert x.numel() > 0, "numel"
    return healthy(x)


def wrong_at_one(x):
    return healthy(x) * (2 if x.shape[-1] == 1 else 1)


def breaks_graph(x):
    torch._dynamo.graph_break()
    return torch.ops.pyops_toy.healthy(x)


HEALTHY = toy("healthy")
F32 = torch.float32

CHECKS = {
    "accuracy": lambda case, tmp: suite.check_accuracy(case, F32),
    "accuracy64": lambda case, tmp: suite.check_accuracy(case, torch.float64),
    "empty": lambda case, tmp: suite.check_edge(case, ((0, 4, 5),), F32),
    "one": lambda case, tmp: suite.check_edge(case, ((2, 4, 1),), F32),
    "layouts": lambda case, tmp: suite.check_layouts(case, F32),
    "huge": lambda case, tmp: suite.check_huge(case, F32, tmp),
    "deterministic": lambda case, tmp: suite.check_deterministic(case, F32),
    "nan": lambda case, tmp: suite.check_nan(case, F32),
    "gradcheck": lambda case, tmp: suite.check_gradcheck(case),
    "gradients": lambda case, tmp: suite.check_gradients(case, F32),
    "second": lambda case, tmp: suite.check_second_derivative(case),
    "forward": lambda case, tmp: suite.check_forward_mode(case),
    "opcheck": lambda case, tmp: suite.check_opcheck(case, F32),
    "compile": lambda case, tmp: suite.check_compile(case, dynamic=False),
    "dynamic": lambda case, tmp: suite.check_compile(case, dynamic=True),
    "meta": lambda case, tmp: suite.check_meta(case),
    "vmap": lambda case, tmp: suite.check_vmap(case),
    "autocast": lambda case, tmp: suite.check_autocast(case, F32),
    "pickle": lambda case, tmp: suite.check_pickle(case),
    "fork": lambda case, tmp: suite.check_fork(case),
}

FAULTS = [
    ("accuracy", "relative error 1 is", toy("zeros", torch.zeros_like)),
    ("accuracy", "relative error", toy("slightly_off", lambda x: healthy(x) * 1.00001)),
    (
        "accuracy",
        "relative error",
        toy("one_problem_off", lambda x: healthy(x) * torch.tensor([1, 1, 1.00001])[:, None, None]),
    ),
    ("accuracy", "relative error nan", toy("unwritten", unwritten)),
    ("accuracy", "inputs were written to", toy("mutates", mutates)),
    ("accuracy", "inputs were written to", toy("writes_through_pointer", writes_through_pointer)),
    ("accuracy64", "result in torch.float32", toy("wrong_dtype", wrong_dtype)),
    (
        "accuracy",
        "result in torch.float32",
        toy("narrow_result", result_dtypes=lambda dtype: [torch.float64]),
    ),
    ("empty", "numel", toy("fails_on_empty", fails_on_empty)),
    ("one", "relative error", toy("wrong_at_one", wrong_at_one)),
    ("layouts", "transposed", toy("ignores_strides", ignores_strides)),
    ("layouts", "memory between their elements", toy("writes_between", writes_between)),
    ("huge", "huge offset", toy("cuts_offset", cuts_offset)),
    ("huge", "huge stride", toy("cuts_stride", cuts_stride)),
    ("deterministic", "1 threads", toy("varies_by_run", varies_by_run)),
    ("deterministic", "[12] threads", toy("varies_by_threads", varies_by_threads)),
    ("deterministic", "a problem alone", toy("varies_by_batch", varies_by_batch)),
    ("nan", "nan in its neighbour", toy("leaks_nan", leaks_nan)),
    ("nan", "is hidden by the result", toy("hides_nan", hides_nan)),
    (
        "nan",
        "nan is hidden by the result",
        toy("hides_more", hides_nan, hides=lambda i, j, value: math.isinf(value)),
    ),
    ("gradcheck", "Jacobian mismatch", toy("wrong_gradient", gradient=wrong_gradient)),
    ("gradients", "gradient error", toy("low_gradient", gradient=low_gradient)),
    ("second", "Jacobian mismatch", toy("wrong_second", gradient=wrong_second)),
    ("second", "DID NOT RAISE", toy("silent_second", gradient=wrong_second, second="raises")),
    ("forward", "silently dropped", toy("drops_tangent", call=lambda x: torch.ops.pyops_toy.healthy(x))),
    ("opcheck", "x is not defined as mutable", toy("mutates_schema", mutates)),
    ("opcheck", "Shapes .* are not equal", toy("wrong_fake_shape", fake=lambda x: x.new_empty(x.shape[1:]))),
    ("opcheck", "Dtypes .* are not equal", toy("wrong_fake_dtype", fake=lambda x: fake_like(x).double())),
    ("compile", "graph_break", toy("graph_break", call=breaks_graph)),
    (
        "compile",
        "doesn't match the broadcast shape",
        toy("wrong_fake", fake=lambda x: x.new_empty(x.shape[1:])),
    ),
    (
        "dynamic",
        "recompile",
        toy("fixed_shape", call=lambda x: torch.ops.pyops_toy.healthy(x) * (1 if x.shape[0] == 3 else 2)),
    ),
    ("meta", "stride", toy("wrong_meta", fake=lambda x: x.new_empty(x.mT.shape).mT)),
    (
        "vmap",
        "vmap's error",
        toy("wrong_vmap", batching=lambda info, dims, x: (healthy(x.movedim(dims[0], 0)), 1)),
    ),
    ("autocast", "autocast", toy("obeys_autocast", obeys_autocast)),
    ("pickle", "storage", toy("big_storage", big_storage)),
    ("pickle", "Can't pickle", toy("unpicklable", call=lambda x: unpicklable(x))),
    ("fork", "computes otherwise", toy("breaks_in_children", breaks_in_children)),
]


@pytest.mark.parametrize("check", CHECKS)
def test_healthy_op_passes(check, tmp_path, poison):
    CHECKS[check](HEALTHY, tmp_path)


@pytest.mark.parametrize(("check", "message", "case"), FAULTS, ids=lambda v: getattr(v, "name", ""))
def test_fault_is_caught(check, message, case, tmp_path, poison):
    with pytest.raises((Exception, pytest.fail.Exception), match=message):
        CHECKS[check](case, tmp_path)


def test_fault_in_messages_is_caught():
    """A missing error, a wrong type and a wrong text each fail the generated tests."""

    def refuses():
        raise ValueError("steps must be at least 0, got -1")

    def passes(call, error, message):
        spec = suite.Spec(cases=[HEALTHY], edges=[], errors=[])
        suite.op_suite(spec, "TestToy")().test_error(call, error, message)

    passes(refuses, ValueError, "steps must be at least 0, got -1")
    for broken in (
        (lambda: None, ValueError, "steps"),
        (refuses, TypeError, "steps"),
        (refuses, ValueError, "radius"),
    ):
        with pytest.raises((Exception, pytest.fail.Exception)):
            passes(*broken)


def test_failure_under_one_instruction_set_is_caught(tmp_path):
    module = tmp_path / "test_broken.py"
    module.write_text(
        "import os\n\n\nclass TestToy:\n    def test_accuracy(self):\n"
        "        assert os.environ['PYOPS_CPU_ISA'] != 'default'\n"
    )
    with pytest.raises((AssertionError, pytest.skip.Exception), match=r"1 failed|no compiled library"):
        suite.check_isa([str(module)], "default")
