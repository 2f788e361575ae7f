"""Losses on log P and on scores, and regularisers of boxes: plain torch, differentiable any number of times.

Tensors are float64, float32, bfloat16 or float16 of any strides; results float32 (float64 where an input is).
``reduction`` is that of ``torch.nn``: ``"mean"``, ``"sum"`` or ``"none"``.

log P = 0 is what rounding makes of a box inside another, and a negative sample there would cost infinitely
much. In losses log P therefore counts as at most -eps, the unit of rounding (1.2e-7 in float32, 2.2e-16 in
float64), and has the gradient of that: log(1 - P) is at least -15.9 (-36.0), its slope at most 1 / eps.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyops.ops import _checks as checks
from pyops.ops._box_arguments import Pair, corners, in_functorch
from pyops.reference import boxes as reference
from pyops.reference._precision import working_dtype

REDUCTIONS = ("none", "mean", "sum")
ROUNDING = 1e-3  # log P above 0 by more is no probability


def log1mexp(x: Tensor) -> Tensor:
    """log(1 - exp x) for x <= 0, elementwise: to the last digits near 0 and far from it.

    log(-expm1(x)) above -log 2, else log1p(-exp x); Maechler 2012, "Accurately computing log(1 - exp(-|a|))".

    Args:
        x: [...]; at 0 and above it is -inf with gradient 0.

    Returns:
        [...].

    Raises:
        TypeError: naming x.

    >>> log1mexp(torch.tensor([-1e-10, -1.0, -50.0]))
    tensor([-2.3026e+01, -4.5868e-01, -1.9287e-22])
    """
    checks.matrix("x", x, 0)
    x = x.to(working_dtype(x))
    return reference.log_difference(torch.zeros_like(x), x)


def bce_with_log_probs(log_p: Tensor, target: Tensor, *, reduction: str = "mean") -> Tensor:
    """Binary cross entropy of probabilities that are given by their logarithms.

        loss = -target log P - (1 - target) log(1 - P)

    Small P is exact, with its gradient, where ``torch.nn.functional.binary_cross_entropy`` of exp(log P)
    would see 0. At P = 1 the term -log(1 - P) is capped: 15.9 with the slope 1 / eps = 8.4e6 in log P in
    float32, 36.0 with 4.5e15 in float64.

    Args:
        log_p: [...], at most 0, as of :func:`pyops.boxes.containment`.
        target: [...], between 0 and 1; floating, bool or integer.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.

    Returns:
        A scalar, or [...] for ``"none"``. inf where P = 0 and target > 0, as of hard boxes that do not meet.

    Raises:
        TypeError, ValueError: naming the argument, what was received and what is wanted. Values are looked at
            on the CPU only, and not while torch.compile traces.

    >>> bce_with_log_probs(torch.tensor([-200.0, -200.0]), torch.tensor([1.0, 0.0]), reduction="none")
    tensor([200.,   0.])
    """
    checks.one_of("reduction", reduction, REDUCTIONS)
    _check_log_p("log_p", log_p)
    if not isinstance(target, Tensor):
        raise TypeError(f"target must be a torch.Tensor, got {type(target).__name__}")
    if target.is_complex():
        raise TypeError(f"target must be real, got {target.dtype}")
    if target.shape != log_p.shape:
        raise ValueError(
            f"target must have the shape of log_p, {tuple(log_p.shape)}, got {tuple(target.shape)}"
        )
    _check_device("target", target, "log_p", log_p)
    x, t = _wide(log_p, target)
    if _visible(t) and t.numel():
        low, high = (float(bound) for bound in t.detach().aminmax())
        if low < 0 or high > 1:
            raise ValueError(f"target must be between 0 and 1, got {low if low < 0 else high}")
    # 0 log 0 is 0.
    inside, outside = torch.where(t == 0, 0.0, x), torch.where(t == 1, 0.0, _log_outside(x))
    return _reduced(-t * inside - (1 - t) * outside, reduction)


def noise_contrastive(log_positive: Tensor, log_negative: Tensor, *, reduction: str = "mean") -> Tensor:
    """One positive sample against several negative ones.

        loss = -log P(positive) - sum_s log(1 - P(negative_s))

    At P = 1 the cost of a negative sample is capped: 15.9 with the slope 1 / eps = 8.4e6 in its log P in
    float32, 36.0 with 4.5e15 in float64. Where hard boxes lie inside each other, clip gradients.

    Args:
        log_positive: [...], log P of the positive sample, at most 0.
        log_negative: [..., S], log P of its negative samples, at most 0.
        reduction: ``"mean"`` and ``"sum"`` over the positive samples, or ``"none"``.

    Returns:
        A scalar, or [...] for ``"none"``. inf where a positive sample has P = 0.

    Raises:
        TypeError, ValueError: naming the argument, what was received and what is wanted. Values are looked at
            on the CPU only, and not while torch.compile traces.

    Dasgupta, Boratko, McCallum, ICML 2025 (arXiv 2502.10875).

    >>> p, q = torch.tensor([0.5, 0.25]), torch.tensor([[0.5, 0.5], [0.0, 0.75]])
    >>> noise_contrastive(p.log(), q.log(), reduction="none").exp()
    tensor([ 8., 16.])
    """
    checks.one_of("reduction", reduction, REDUCTIONS)
    _check_log_p("log_positive", log_positive)
    _check_log_p("log_negative", log_negative)
    _check_samples("log_positive", log_positive, "log_negative", log_negative)
    positive, negative = _wide(log_positive, log_negative)
    return _reduced(-positive - _log_outside(negative).sum(-1), reduction)


def max_margin(positive: Tensor, negative: Tensor, *, margin: float = 1.0, reduction: str = "mean") -> Tensor:
    """Every negative sample shall score less than the positive one, by a margin.

        loss = max(0, margin - positive + negative_s)

    Args:
        positive: [...], scores, as of :func:`pyops.boxes.containment`; any sign.
        negative: [..., S], scores of its negative samples.
        margin: at least 0, in the units of the scores. 1, as in ``torch.nn.MultiMarginLoss``.
        reduction: ``"mean"`` and ``"sum"`` over all pairs, or ``"none"``.

    Returns:
        A scalar, or [..., S] for ``"none"``. Two scores of -inf are equal: their loss is the margin.

    Raises:
        TypeError, ValueError: naming the argument, what was received and what is wanted.

    >>> max_margin(torch.tensor([-1.0]), torch.tensor([[-3.0, -1.5]]), reduction="none")
    tensor([[0.0000, 0.5000]])
    """
    checks.one_of("reduction", reduction, REDUCTIONS)
    margin = checks.nonnegative("margin", margin)
    checks.matrix("positive", positive, 0)
    checks.matrix("negative", negative, 0)
    _check_samples("positive", positive, "negative", negative)
    better, worse = _wide(positive.unsqueeze(-1), negative)
    neither = (better == -torch.inf) & (worse == -torch.inf)
    gap = torch.where(neither, 0.0, worse) - torch.where(neither, 0.0, better)
    return _reduced((margin + gap).clamp(min=0), reduction)


def l2_side(box: Pair, *, reduction: str = "mean") -> Tensor:
    """Squares of the sides of boxes, (Z - z)^2: keeps them from growing.

    Args:
        box: a :class:`pyops.boxes.Box` or pair (z, Z) of [..., D] tensors.
        reduction: ``"mean"`` and ``"sum"`` over all sides, or ``"none"``.

    Returns:
        A scalar, or [..., D] for ``"none"``, in the squared units of the corners. Inverted sides count too.

    Raises:
        TypeError, ValueError: naming the argument, what was received and what is wanted.

    >>> l2_side((torch.zeros(2), torch.tensor([2.0, 3.0])), reduction="sum")
    tensor(13.)
    """
    checks.one_of("reduction", reduction, REDUCTIONS)
    z, Z = _wide(*corners("box", box))
    return _reduced((Z - z).square(), reduction)


def _log_outside(x: Tensor) -> Tensor:
    """log(1 - exp x), where x counts as at most -eps and has the gradient of that."""
    excess = (x.detach() + torch.finfo(x.dtype).eps).clamp(min=0)
    return reference.log1mexp(x - excess)


def _reduced(loss: Tensor, reduction: str) -> Tensor:
    return loss if reduction == "none" else loss.mean() if reduction == "mean" else loss.sum()


def _wide(*tensors: Tensor) -> list[Tensor]:
    """In one dtype, at least float32; integers do not decide."""
    dtype = torch.float32
    for t in tensors:
        dtype = torch.promote_types(dtype, t.dtype)
    return [t.to(dtype) for t in tensors]


def _visible(t: Tensor) -> bool:
    """Whether looking at values costs no wait for a device and breaks no trace."""
    return t.is_cpu and not torch.compiler.is_compiling() and in_functorch() is None


def _check_log_p(name: str, log_p: Any) -> None:
    checks.matrix(name, log_p, 0)
    if _visible(log_p) and log_p.numel():
        highest = float(log_p.detach().amax())
        if highest > ROUNDING:
            raise ValueError(f"{name} must be logarithms of probabilities, at most 0, got {highest:g}")


def _check_device(name: str, t: Tensor, other: str, first: Tensor) -> None:
    if t.device != first.device:
        raise ValueError(f"{name} must be on the device of {other}, {first.device}, got {t.device}")


def _check_samples(name: str, t: Tensor, other: str, samples: Tensor) -> None:
    if samples.ndim != t.ndim + 1 or samples.shape[:-1] != t.shape:
        wanted = ", ".join([*map(str, t.shape), "S"])
        raise ValueError(f"{other} must be [{wanted}] for {name} of shape {tuple(t.shape)}, "
                         f"got shape {tuple(samples.shape)}")  # fmt: skip
    _check_device(other, samples, name, t)
