"""Tubal sensing: the operator, its gradient, and the fused steps against block circulant matrices in float64.

The fused op writes in place; the shared suite is for pure ops, so what fits of its checks is repeated here.
"""

import math
import os

import pytest
import torch
import tubal_oracle as oracle
from suite import ISAS, UNIT, assert_close, assert_same_bits, check_isa, layouts, memory

import pyops
from pyops.ops._tubal_sensing import tubal_sensing_steps_
from pyops.tubal import Sensing

F64, F32 = torch.float64, torch.float32
# n, rank, tubes, measurements. One tube and two: real faces alone; odd numbers: no Nyquist face.
SIZES = [
    (4, 3, 1, 9),
    (5, 7, 2, 20),
    (3, 5, 3, 33),
    (10, 50, 4, 60),
    (4, 2, 5, 1),
    (1, 1, 7, 3),
    (6, 40, 8, 17),
]
SHARED = (20, 33, 6, 300)  # large enough for more than one thread


def problem(n, rank, tubes, count, dtype=F64):
    """u, operator and y, rounded to a dtype."""
    operator = torch.randn(count, n, n, tubes, dtype=F64) / count**0.5
    u = 0.3 * torch.randn(n, rank, tubes, dtype=F64) / rank**0.5
    return u.to(dtype), operator.to(dtype), torch.randn(count, dtype=F64).to(dtype)


def formula(u, operator, y, step, steps):
    """The same steps by block circulant matrices, the operator symmetrised first; (u, losses) in float64."""
    u, operator, y = u.double(), operator.double(), y.double()
    symmetric = (operator + oracle.transpose(operator)) / 2
    losses = []
    for _ in range(steps):
        z = oracle.tprod(u, u, transpose_b=True)
        residual = torch.einsum("mijt,ijt->m", operator, z) - y
        losses.append(0.25 * residual.square().sum())
        u = u - step * oracle.tprod(torch.einsum("m,mijt->ijt", residual, symmetric), u)
    return u, torch.stack(losses) if losses else u.new_empty(0)


def steps(u, operator, y, step=0.02, count=3):
    with torch.no_grad():
        return tubal_sensing_steps_(u, operator, y, step, count)


def gate(dtype, count):
    """Roundings of sums over n, rank, tubes or coordinates, once more in every step."""
    return UNIT[dtype] * (16 + 2 * count)


# The fused steps


@pytest.mark.parametrize("dtype", [F64, F32])
@pytest.mark.parametrize("count", [1, 5, 40])  # 40: the measurements are rewritten as coordinates first
@pytest.mark.parametrize("size", [*SIZES, SHARED], ids=str)
def test_steps(size, count, dtype):
    u, operator, y = problem(*size, dtype)
    before = [operator.clone(), y.clone()]
    start, (wanted, wanted_losses) = u.clone(), formula(u, operator, y, 0.02, count)
    losses = steps(u, operator, y, count=count)
    assert losses.shape == (count,) and losses.dtype == u.dtype == dtype
    assert_close(u, wanted, gate(dtype, count))
    # What the steps changed, too: u alone would hide a wrong gradient behind a small step.
    assert_close(u.double() - start.double(), wanted - start.double(), 64 * gate(dtype, count))
    # The residual is a difference, of a size with y.
    scale = wanted_losses + y.double().square().sum() / 4
    assert ((losses - wanted_losses).abs() <= gate(dtype, count) * scale).all()
    assert_same_bits((operator, y), tuple(before), "operator or y were written to")


@pytest.mark.parametrize("dtype", [F64, F32])
def test_dependent_rows(dtype):
    """U with rows of zeros and rows that depend on each other, wide enough to be written as L Q."""
    u, operator, y = problem(6, 20, 4, 30, dtype)
    u[1] = 0
    u[3] = 2 * u[2]
    u[4:] = u[4:] * 1e-6 + u[:1]
    wanted, _ = formula(u, operator, y, 0.02, 40)
    steps(u, operator, y, count=40)
    assert_close(u, wanted, gate(dtype, 40))


@pytest.mark.parametrize("size", [(3, 5, 3, 33), (10, 50, 4, 60)], ids=str)
def test_a_start_whose_squares_vanish(size):
    u, operator, y = problem(*size, F64)
    u = (u * 1e-24).to(F32)
    wanted, _ = formula(u, operator.to(F32), y.to(F32), 0.02, 40)
    steps(u, operator.to(F32), y.to(F32), count=40)
    assert_close(u * 1e24, wanted * 1e24, 2 * gate(F32, 40))


@pytest.mark.parametrize("size", SIZES[1:4], ids=str)
def test_a_small_start_keeps_its_relative_accuracy(size):
    """The paper starts from 1e-7: U * U^T is then 1e-14 and the residual just -y."""
    u, operator, y = problem(*size, F32)
    u *= 1e-7
    wanted, _ = formula(u, operator, y, 0.02, 40)
    steps(u, operator, y, count=40)
    assert_close(u, wanted, 2 * gate(F32, 40))


@pytest.mark.parametrize("count", [2, 33])
@pytest.mark.parametrize("dtype", [F64, F32])
def test_layouts(count, dtype):
    """Any strides of u, operator and y: the same bits, and nothing written beside u."""
    u, operator, y = problem(3, 7, 4, 6, dtype)
    wanted = u.clone()
    losses = steps(wanted, operator, y, count=count)
    for name, view in layouts(u).items():
        whole = memory(view).clone().view(dtype)
        whole.as_strided(view.shape, view.stride(), view.storage_offset()).copy_(wanted)
        assert_same_bits(steps(view, operator, y, count=count), losses, name)
        assert_same_bits(view, wanted, name)
        assert_same_bits(memory(view).view(dtype), whole, f"memory around {name}")
    for name, view in layouts(operator).items():
        other = u.clone()
        spread = y.repeat_interleave(2)[::2]
        assert_same_bits(steps(other, view, spread, count=count), losses, name)
        assert_same_bits(other, wanted, name)


@pytest.mark.parametrize("count", [2, 40])
@pytest.mark.parametrize("size", [SIZES[3], SHARED], ids=str)
def test_deterministic(size, count):
    """The same bits in every run and for one thread and two."""
    u, operator, y = problem(*size, F32)
    results = []
    for threads in (1, 2, 2, 1):
        torch.set_num_threads(threads)
        v = u.clone()
        results.append((v, steps(v, operator, y, count=count)))
    for result in results[1:]:
        assert_same_bits(result, results[0], "another run")


@pytest.mark.parametrize("count", [0, 3, 40])
@pytest.mark.parametrize("size", [(0, 2, 3, 4), (3, 0, 3, 4), (3, 2, 3, 0), (0, 0, 1, 0)], ids=str)
def test_empty(size, count):
    """No measurement or no rank: nothing moves; the loss of a residual -y remains."""
    u, operator, y = problem(*size[:3], 4)
    operator, y, start = operator[: size[3]], y[: size[3]], u.clone()
    losses = steps(u, operator, y, count=count)
    torch.testing.assert_close(losses, (y.square().sum() / 4).expand(count))
    torch.testing.assert_close(u, start, rtol=0, atol=1e-15)


def test_no_steps_change_no_bit():
    u, operator, y = problem(*SIZES[2], F32)
    start = u.clone()
    assert steps(u, operator, y, count=0).shape == (0,)
    assert_same_bits(u, start, "u")


@pytest.mark.parametrize("count", [1, 40])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_nan_is_not_hidden(which, count):
    tensors = problem(*SIZES[1], F32)
    tensors[which].view(-1)[-1] = torch.nan
    losses = steps(*tensors, count=count)
    assert losses.isnan().all() and tensors[0].isnan().all()


def test_versions_are_counted():
    u, operator, y = problem(*SIZES[1])
    leaf = torch.ones_like(u, requires_grad=True)
    loss = (leaf * u).sum()
    steps(u, operator, y)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("dtype", [F64, F32])
def test_opcheck(dtype):
    u, operator, y = problem(*SIZES[2], dtype)
    for view in (u, u.mT.contiguous().mT):
        torch.library.opcheck(
            torch.ops.pyops.tubal_sensing_steps_.default,
            (view, operator, y, 0.05, 3),
            test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"),
        )


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(dynamic):
    def run(u, operator, y):
        losses = steps(u, operator, y)
        return losses * 2

    tensors = problem(*SIZES[2], F32)
    eager = tensors[0].clone()
    doubled = run(eager, *tensors[1:])
    torch.compiler.reset()
    compiled = torch.compile(run, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    assert_same_bits(compiled(*tensors), doubled, "compiled")
    assert_same_bits(tensors[0], eager, "u")


def test_autocast_changes_nothing():
    u, operator, y = problem(*SIZES[2], F32)
    wanted = u.clone()
    steps(wanted, operator, y)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        steps(u, operator, y)
    assert_same_bits(u, wanted, "autocast")


def test_the_reference_says_the_same():
    from pyops.reference._tubal_sensing import tubal_sensing_steps_ as reference

    u, operator, y = problem(*SIZES[3])
    wanted, wanted_losses = formula(u, operator, y, 0.05, 6)
    losses = reference(u, operator, y, 0.05, 6)
    assert_close(u, wanted, gate(F64, 6))
    assert_close(losses, wanted_losses, gate(F64, 6))


def test_errors():
    u, operator, y = problem(3, 2, 4, 6, F32)
    wrong = [
        (lambda: steps(u[0], operator, y), ValueError, r"u must be \[n, rank, tubes\].*got \(2, 4\)"),
        (lambda: steps(u.long(), operator, y), TypeError, "u must be float64 or float32, got torch.int64"),
        (lambda: steps(u.half(), operator, y), TypeError, "u must be float64 or float32, got torch.float16"),
        (lambda: steps(u, operator, y, -0.1), ValueError, "step must be finite and at least 0, got -0.1"),
        (
            lambda: steps(u, operator[..., :3], y),
            ValueError,
            r"operator must be \[m, 3, 3, 4\].*got \(6, 3, 3, 3\)",
        ),
        (lambda: steps(u, operator.double(), y), TypeError, "operator must have u's dtype torch.float32"),
        (
            lambda: steps(u, operator, y[:5]),
            ValueError,
            r"y must have one entry per measurement, \[6\], got \(5,\)",
        ),
        (lambda: steps(u, operator, y.double()), TypeError, "y must have operator's dtype"),
        (
            lambda: steps(u, operator, y, float("nan")),
            ValueError,
            "step must be finite and at least 0, got nan",
        ),
        (lambda: steps(u, operator, y, "1"), TypeError, "step must be a number"),
        (lambda: steps(u, operator, y, count=-1), ValueError, "steps must be at least 0, got -1"),
        (lambda: steps(u[:, :1].expand(3, 5, 4), operator, y), RuntimeError, "u must not be expanded"),
        (
            lambda: tubal_sensing_steps_(u.requires_grad_(), operator, y, 0.1, 1),
            RuntimeError,
            "tubal_sensing_steps_ writes u in place: call it under torch.no_grad",
        ),
    ]
    for call, kind, message in wrong:
        with pytest.raises(kind, match=message):
            call()


def test_the_op_checks_for_itself():
    """Whoever calls torch.ops.pyops gets the same answers, and no crash."""
    u, operator, y = problem(3, 2, 4, 6, F32)
    op = torch.ops.pyops.tubal_sensing_steps_
    if pyops.which("tubal_sensing_steps_", u) == "reference":
        pytest.skip("the library is not built")
    for arguments, message in [
        ((u[0], operator, y), r"u must be \[n, rank, tubes\]"),
        (
            (u, operator[..., :3], y),
            r"operator must be \[m, n, n, tubes\] for u \[3, 2, 4\], got \[6, 3, 3, 3\]",
        ),
        ((u, operator.double(), y), "operator must have u's dtype Float, got Double"),
        ((u, operator, y[:5]), r"y must have one entry per measurement, \[6\], got \[5\]"),
        ((u.half(), operator, y), "u must be float64 or float32, got Half"),
    ]:
        with pytest.raises(RuntimeError, match=f"pyops::tubal_sensing_steps_: {message}"):
            op(*arguments, 0.1, 1)
    with pytest.raises(RuntimeError, match="steps must be at least 0, got -1"):
        op(u, operator, y, 0.1, -1)


@pytest.mark.parametrize("isa", ISAS)
def test_isa(isa):
    check_isa([__file__], isa, "test_steps or test_small or test_deterministic or test_empty")


def test_capped():
    """What runs is what the cap of ``test_isa`` asks for."""
    cap = os.environ.get("PYOPS_CPU_ISA")
    served = pyops.which("tubal_sensing_steps_", *problem(*SIZES[0]), 0.1, 1)
    assert served == "reference" or cap is None or served == f"cpu:{cap}"


# The operator


def test_operator_and_adjoint():
    a = Sensing(torch.randn(7, 3, 3, 4, dtype=F64))
    z, r = torch.randn(2, 5, 3, 3, 4, dtype=F64), torch.randn(2, 5, 7, dtype=F64)
    assert_close(a(z), torch.einsum("mijt,abijt->abm", a.operator, z), 1e-14)
    assert_close((a(z) * r).sum(-1), (z * a.adjoint(r)).sum((-3, -2, -1)), 1e-13)


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("symmetric", [False, True])
def test_gradient(size, symmetric):
    """The formula against autograd through the loss, and the loss against block circulant matrices."""
    u, operator, y = problem(*size)
    if symmetric:
        operator = operator + oracle.transpose(operator)
    a = Sensing(operator)
    assert a.symmetric == symmetric or size[0] == size[2] == 1
    u.requires_grad_()
    loss = a.loss(u, y)
    assert_close(loss, formula(u.detach(), operator, y, 0.0, 1)[1][0], 1e-14)
    (wanted,) = torch.autograd.grad(loss, u)
    with torch.no_grad():
        assert_close(a.gradient(u, y), wanted, 1e-13)
        before = u.detach().clone()
        stepped, _ = a.descend(u.detach(), y, 1e-3, 1)
    assert_close((before - stepped) / 1e-3, wanted, 1e-11)
    assert_same_bits(u.detach(), before, "u")


def test_symmetry_is_found_once(monkeypatch):
    operator = torch.randn(4, 3, 3, 5)
    a = Sensing(operator + oracle.transpose(operator))
    assert a.symmetric
    a.operator.zero_()[0, 0, 1, 0] = 1.0
    assert a.symmetric
    assert not Sensing(a.operator).symmetric


def test_descend_calls_back():
    u, operator, y = problem(*SIZES[3])
    a, seen = Sensing(operator), {}
    end, losses = a.descend(u, y, 0.05, 23, callback=lambda t, x: seen.setdefault(t, x.clone()), every=10)
    assert list(seen) == [0, 10, 20, 23] and losses.shape == (23,)
    assert_same_bits(seen[0], u, "the start")
    assert_same_bits(seen[23], end, "the end")
    wanted, wanted_losses = a.descend(u, y, 0.05, 23)
    assert_close(end, wanted, 1e-13)
    assert_close(losses, wanted_losses, 1e-13)
    calls = []
    same, none = a.descend(u, y, 0.05, 0, callback=lambda t, x: calls.append(t))
    assert calls == [0] and none.shape == (0,)
    assert_same_bits(same, u, "no steps")


def test_descend_from_a_parameter():
    u, operator, y = problem(*SIZES[3])
    wanted, wanted_losses = Sensing(operator).descend(u, y, 0.05, 3)
    start = torch.nn.Parameter(u.clone())
    operator, y = operator.clone().requires_grad_(), y.clone().requires_grad_()
    found, losses = Sensing(operator).descend(start, y, 0.05, 3)
    assert not found.requires_grad and not losses.requires_grad
    assert_same_bits(found, wanted, "the end")
    assert_same_bits(losses, wanted_losses, "the losses")
    assert_same_bits(start.detach(), u, "the start")
    assert start._version == 0


def test_descent_recovers_a_tensor_of_low_rank():
    n, r, tubes = 5, 1, 4
    x = torch.randn(n, r, tubes, dtype=F64) / tubes
    truth = pyops.tubal.tgram(x)
    a = Sensing(torch.randn(120, n, n, tubes, dtype=F64) / 120**0.5)
    u, losses = a.descend(1e-4 * torch.randn(n, n, tubes, dtype=F64), a(truth), 0.05, 6000)
    assert_close(pyops.tubal.tgram(u), truth, 1e-2)
    assert losses[-1] < 1e-4 * losses[0]


def test_operator_errors():
    u, operator, y = problem(3, 2, 4, 6)
    a = Sensing(operator)
    wrong = [
        (lambda: Sensing(operator[0]), ValueError, r"operator must be \[m, n, n, tubes\].*got \(3, 3, 4\)"),
        (lambda: Sensing(operator[:, :2]), ValueError, r"operator must be .*got \(6, 2, 3, 4\)"),
        (lambda: Sensing(operator.long()), TypeError, "operator must be"),
        (lambda: Sensing([1.0]), TypeError, "operator must be a torch.Tensor, got list"),
        (lambda: a(u), ValueError, r"z must be \[..., 3, 3, 4\], got \(3, 2, 4\)"),
        (lambda: a.adjoint(y[:4]), ValueError, r"residual must be \[..., 6\], got \(4,\)"),
        (
            lambda: a.loss(u[:2], y),
            ValueError,
            r"u must be \[3, rank, 4\] for this operator, got \(2, 2, 4\)",
        ),
        (lambda: a.gradient(u, y[:4]), ValueError, r"y must have one entry per measurement, \[6\]"),
        (
            lambda: a.descend(u, y, 0.1, 3, callback=print, every=0),
            ValueError,
            "every must be at least 1, got 0",
        ),
        (lambda: a.descend(u.float(), y, 0.1, 3), TypeError, "u must have operator's dtype torch.float64"),
        (lambda: a.descend(u, y.float(), 0.1, 3), TypeError, "y must have operator's dtype torch.float64"),
        (lambda: a.descend(u.long(), y, 0.1, 3), TypeError, "u must be float64 or float32, got torch.int64"),
        (lambda: a.descend(u, y, -0.1, 0, callback=print), ValueError, "step must be finite and at least 0"),
        (lambda: a.descend(u, y, math.inf, 3), ValueError, "step must be finite and at least 0, got inf"),
    ]
    for call, kind, message in wrong:
        with pytest.raises(kind, match=message):
            call()
