"""pyops.losses against formulas in float64, at the ends of log P, and what is refused."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from suite import assert_close
from torch.nn import functional as F

from pyops import boxes, losses

DTYPES = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 1e-6, torch.float16: 1e-6}
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
every_reduction = pytest.mark.parametrize("reduction", ["none", "mean", "sum"])


def reduced(loss, reduction):
    return loss if reduction == "none" else getattr(loss, reduction)()


def log_probs(*shape, dtype=torch.float64):
    return (torch.rand(shape, dtype=torch.float64) * 0.98 + 0.01).log().to(dtype)


@given(st.floats(-800, -1e-300))
@settings(deadline=None)
def test_log1mexp(x):
    """Against log(-expm1 x) of Python's floats, which is exact near 0, and log1p(-exp x), far from it."""
    wanted = math.log(-math.expm1(x)) if x > -1 else math.log1p(-math.exp(x))
    found = losses.log1mexp(torch.tensor(x, dtype=torch.float64)).item()
    assert found == pytest.approx(wanted, rel=1e-14, abs=1e-307)


def test_log1mexp_at_its_ends():
    x = torch.tensor([0.0, -math.inf, 0.5, math.nan, -200.0], requires_grad=True)
    found = losses.log1mexp(x)
    assert found[[0, 1, 2, 4]].tolist() == [-math.inf, 0.0, -math.inf, 0.0] and found[3].isnan()
    found[[0, 1, 2, 4]].sum().backward()
    assert x.grad[[0, 1, 2, 4]].tolist() == [0.0, 0.0, 0.0, 0.0]
    assert torch.autograd.gradcheck(losses.log1mexp, -torch.rand(9, dtype=torch.float64).requires_grad_())
    assert losses.log1mexp(torch.tensor(-1e-3, dtype=torch.float16)).dtype == torch.float32


@every_dtype
@every_reduction
def test_bce_with_log_probs(dtype, reduction):
    log_p = log_probs(7, 5, dtype=dtype)
    target = torch.rand(7, 5, dtype=torch.float64).to(dtype)
    target[0], target[1] = 0, 1
    found = losses.bce_with_log_probs(log_p, target, reduction=reduction)
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    p = log_p.double().exp()
    wanted = F.binary_cross_entropy(p, target.double(), reduction=reduction)
    assert_close(found.double(), wanted, DTYPES[dtype])


def test_bce_with_targets_that_are_no_floats():
    log_p = log_probs(6, dtype=torch.float32)
    wanted = losses.bce_with_log_probs(log_p, torch.tensor([0.0, 1, 1, 0, 1, 0]))
    for dtype in (torch.bool, torch.int64, torch.uint8):
        target = torch.tensor([0, 1, 1, 0, 1, 0], dtype=dtype)
        assert torch.equal(losses.bce_with_log_probs(log_p, target), wanted)


@every_dtype
@every_reduction
def test_noise_contrastive(dtype, reduction):
    positive, negative = log_probs(3, 4, dtype=dtype), log_probs(3, 4, 6, dtype=dtype)
    found = losses.noise_contrastive(positive, negative, reduction=reduction)
    each = -positive.double() - (1 - negative.double().exp()).log().sum(-1)
    assert_close(found.double(), reduced(each, reduction), DTYPES[dtype])
    assert found.shape == ((3, 4) if reduction == "none" else ())


@every_dtype
@every_reduction
def test_max_margin(dtype, reduction):
    positive, negative = (torch.randn(s).to(dtype) for s in ((3, 4), (3, 4, 6)))
    found = losses.max_margin(positive, negative, margin=0.5, reduction=reduction)
    each = (0.5 - positive.double().unsqueeze(-1) + negative.double()).clamp(min=0)
    assert_close(found.double(), reduced(each, reduction), DTYPES[dtype])
    assert (each == 0).any() and (each > 0).any()


@every_dtype
@every_reduction
def test_l2_side(dtype, reduction):
    box = boxes.Box(*torch.randn(2, 6, 3).to(dtype))
    found = losses.l2_side(box, reduction=reduction)
    each = (box.Z.double() - box.z.double()).square()
    assert_close(found.double(), reduced(each, reduction), DTYPES[dtype])
    assert torch.equal(losses.l2_side(tuple(box), reduction=reduction), found)


# The ends of log P


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_negative_sample_inside_costs_a_finite_amount(dtype):
    """P = 1 by rounding: the loss and its slope are those of 1 - P = eps, also a little above."""
    eps = torch.finfo(dtype).eps
    x = torch.tensor([0.0, 1e-5, -eps / 2, -2 * eps], dtype=dtype, requires_grad=True)
    found = losses.bce_with_log_probs(x, torch.zeros(4), reduction="none")
    assert found[:3].tolist() == pytest.approx([-math.log(eps)] * 3, rel=1e-6)
    assert found[3].item() == pytest.approx(-math.log(2 * eps), rel=1e-6)
    found.sum().backward()
    assert x.grad[:3].tolist() == pytest.approx([1 / eps] * 3, rel=1e-6)
    assert x.grad[3].item() == pytest.approx(1 / (2 * eps), rel=1e-6)
    y = x.detach().requires_grad_()
    losses.noise_contrastive(torch.zeros((), dtype=dtype), y, reduction="sum").backward()
    assert torch.equal(x.grad, y.grad)


def test_hard_boxes_that_do_not_meet():
    """P = 0: a negative sample costs nothing, a positive one is infinite; no gradient is NaN."""
    z = torch.tensor([[0.0], [0.5], [5.0]], requires_grad=True)
    user = torch.zeros(1), torch.ones(1)
    hard = {"intersection_temperature": 0.0, "volume_temperature": 0.0}
    log_p = boxes.pairwise_containment(user, (z, z + 1), **hard)
    assert log_p.exp().tolist() == [1.0, 0.5, 0.0]
    loss = losses.bce_with_log_probs(log_p, torch.tensor([1.0, 1.0, 0.0]), reduction="none")
    assert loss.tolist() == pytest.approx([0.0, math.log(2), 0.0])
    (grad,) = torch.autograd.grad(loss.sum(), z, retain_graph=True)
    assert grad.isfinite().all() and grad[1] > 0
    loss = losses.noise_contrastive(log_p, log_p.unsqueeze(-1), reduction="none")
    assert loss[2] == math.inf
    (grad,) = torch.autograd.grad(loss.sum(), z)
    assert grad.isfinite().all() and grad[2] == 0


def test_boxes_far_apart_are_pulled_together():
    """The gradient of a positive pair is 1 / nu however far apart they are; exp(log P) would be 0."""
    z = torch.tensor([40.0], requires_grad=True)
    soft = {"intersection_temperature": 0.1, "volume_temperature": 0.1}
    log_p = boxes.pairwise_containment((torch.zeros(1), torch.ones(1)), (z, z + 1), **soft)
    assert log_p < -300
    losses.bce_with_log_probs(log_p, torch.ones(())).backward()
    assert z.grad.item() == pytest.approx(10.0, rel=1e-5)


def test_max_margin_of_nothing():
    positive = torch.tensor([-math.inf, -math.inf, 0.0], requires_grad=True)
    negative = torch.tensor([[-math.inf], [0.0], [-math.inf]], requires_grad=True)
    found = losses.max_margin(positive, negative, reduction="none")
    assert found.flatten().tolist() == [1.0, math.inf, 0.0]
    found.sum().backward()
    assert positive.grad.isfinite().all() and negative.grad.isfinite().all()


def test_nan_stays_where_it_is():
    log_p = torch.tensor([math.nan, -1.0])
    assert losses.bce_with_log_probs(log_p, torch.zeros(2), reduction="none").isnan().tolist() == [
        True,
        False,
    ]
    found = losses.noise_contrastive(torch.zeros(2), log_p.unsqueeze(-1), reduction="none")
    assert found.isnan().tolist() == [True, False]
    found = losses.max_margin(torch.zeros(2), log_p.unsqueeze(-1), reduction="none")
    assert found.isnan().flatten().tolist() == [True, False]


def test_empty():
    none = torch.zeros(0)
    assert losses.bce_with_log_probs(none, none, reduction="sum") == 0
    assert losses.noise_contrastive(none, torch.zeros(0, 3), reduction="none").shape == (0,)
    assert losses.noise_contrastive(torch.full((2,), -1.0), torch.zeros(2, 0), reduction="none").tolist() == [
        1,
        1,
    ]
    assert losses.max_margin(torch.zeros(2), torch.zeros(2, 0), reduction="none").shape == (2, 0)
    assert losses.l2_side((torch.zeros(0, 3), torch.zeros(0, 3)), reduction="none").shape == (0, 3)


# Derivatives and transformations

CALLS = {
    "bce": lambda a, b: losses.bce_with_log_probs(a, torch.linspace(0, 1, 4).to(a.dtype)),
    "nce": losses.noise_contrastive,
    "margin": losses.max_margin,
    "l2": lambda a, b: losses.l2_side((b, 2 * b)),
}


def inputs():
    return [log_probs(*s).requires_grad_() for s in ((4,), (4, 3))]


@pytest.mark.parametrize("name", CALLS)
def test_derivatives(name):
    assert torch.autograd.gradcheck(CALLS[name], inputs())
    assert torch.autograd.gradgradcheck(CALLS[name], inputs())


@pytest.mark.parametrize("name", CALLS)
def test_compile_and_vmap(name):
    a, b = (t.detach() for t in inputs())
    wanted = CALLS[name](a, b)
    found = torch.compile(CALLS[name], backend="aot_eager", fullgraph=True)(a, b)
    assert_close(found, wanted, 1e-14)
    several = torch.func.vmap(CALLS[name])(torch.stack([a, a]), torch.stack([b, b]))
    assert_close(several, wanted.expand(2), 1e-14)


def test_strides():
    log_p, target = log_probs(6, 8), torch.rand(6, 8, dtype=torch.float64)
    wanted = losses.bce_with_log_probs(log_p, target, reduction="none").mT
    assert torch.equal(losses.bce_with_log_probs(log_p.mT, target.mT, reduction="none"), wanted)


# Refusals

V, M = torch.full((3,), -1.0), torch.full((3, 2), -1.0)
REFUSED = {
    "reduction must be one of 'none', 'mean', 'sum', got 'max'": lambda: losses.max_margin(
        V, M, reduction="max"
    ),
    "x must be a torch.Tensor, got float": lambda: losses.log1mexp(-1.0),
    "log_p must be logarithms of probabilities, at most 0, got 0.5": lambda: losses.bce_with_log_probs(
        -V / 2, torch.ones(3)
    ),
    "log_p must be float64": lambda: losses.bce_with_log_probs(V.int(), V),
    r"target must have the shape of log_p, \(3,\), got \(3, 2\)": lambda: losses.bce_with_log_probs(V, M),
    "target must be between 0 and 1, got -1": lambda: losses.bce_with_log_probs(V, V),
    "target must be between 0 and 1, got 2": lambda: losses.bce_with_log_probs(V, -2 * V),
    "target must be a torch.Tensor, got int": lambda: losses.bce_with_log_probs(V, 1),
    "target must be real": lambda: losses.bce_with_log_probs(V, V.cfloat()),
    "target must be on the device of log_p, cpu, got meta": lambda: losses.bce_with_log_probs(
        V, V.to("meta")
    ),
    "log_positive must be logarithms": lambda: losses.noise_contrastive(-V, M),
    "log_negative must be logarithms": lambda: losses.noise_contrastive(V, -M),
    r"log_negative must be \[3, S\] for log_positive of shape \(3,\), got shape \(3,\)": lambda: (
        losses.noise_contrastive(V, V)
    ),
    r"negative must be \[2, S\]": lambda: losses.max_margin(V[:2], M),
    "margin must be finite and at least 0, got -1": lambda: losses.max_margin(V, M, margin=-1),
    "margin must be a number": lambda: losses.max_margin(V, M, margin=None),
    "positive must be a dense tensor": lambda: losses.max_margin(V.to_sparse(), M),
    "box must be a Box or a pair": lambda: losses.l2_side(V),
    "box.Z must have the shape of z": lambda: losses.l2_side((V, M)),
}


@pytest.mark.parametrize("message", REFUSED)
def test_errors_name_the_argument(message):
    with pytest.raises((TypeError, ValueError), match=message):
        REFUSED[message]()
