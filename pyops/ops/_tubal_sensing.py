"""The fused gradient steps behind ``pyops.tubal.Sensing.descend``; part of the slice ``tubal``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyops import _library
from pyops.ops import _checks as checks
from pyops.reference import _tubal_sensing as reference

DTYPES = (torch.float64, torch.float32)


def tubal_sensing_steps_(u: Tensor, operator: Tensor, y: Tensor, step: float, steps: int) -> Tensor:
    """``steps`` times, in place, with one read of the operator per step:

        res_i = <A_i, U * U^T> - y_i,    U <- U - step sum_i res_i (A_i + A_i^T)/2 * U.

    Args:
        u: [n, rank, tubes], float64 or float32, any strides; written.
        operator: the A_i, [m, n, n, tubes], of u's dtype; contiguous is the fast path.
        y: [m], of u's dtype.
        step: the step size, finite and at least 0.
        steps: how many, at least 0.

    Returns:
        [steps]: the loss 1/4 sum_i res_i^2 before each step.

    Raises:
        TypeError, ValueError: naming the argument, what was received and what is wanted.
        RuntimeError: when a tensor requires grad while gradients are recorded.

    >>> a, u, y = torch.randn(20, 3, 3, 4), torch.randn(3, 2, 4), torch.randn(20)
    >>> tubal_sensing_steps_(u, a, y, 1e-4, 5).diff().max() < 0
    tensor(True)
    """
    check_factor(u)
    check_operator(operator, u)
    check_measured("y", y, operator)
    checks.nonnegative("step", step)
    checks.count("steps", steps)
    if torch.is_grad_enabled() and any(t.requires_grad for t in (u, operator, y)):
        raise RuntimeError("tubal_sensing_steps_ writes u in place: call it under torch.no_grad()")
    losses = torch.ops.pyops.tubal_sensing_steps_(u, operator, y, step, steps)
    if not torch.compiler.is_compiling():  # a kernel writes through pointers; autograd must know of it
        torch.autograd.graph.increment_version(u)
    return losses


def check_dense(name: str, x: Any) -> None:
    if isinstance(x, Tensor) and x.dtype not in DTYPES:
        raise TypeError(f"{name} must be float64 or float32, got {x.dtype}")
    checks.matrix(name, x, 0)


def check_factor(u: Any) -> None:
    check_dense("u", u)
    if u.ndim != 3 or u.shape[2] == 0:
        raise ValueError(f"u must be [n, rank, tubes] with tubes of at least one entry, got {tuple(u.shape)}")


def check_operator(operator: Any, u: Tensor) -> None:
    check_dense("operator", operator)
    n, _, tubes = u.shape
    if operator.ndim != 4 or operator.shape[1:] != (n, n, tubes):
        wanted = f"[m, {n}, {n}, {tubes}] for u of shape {tuple(u.shape)}"
        raise ValueError(f"operator must be {wanted}, got {tuple(operator.shape)}")
    check_same_kind("operator", operator, "u", u)


def check_measured(name: str, y: Any, operator: Tensor) -> None:
    check_dense(name, y)
    if tuple(y.shape) != (operator.shape[0],):
        wanted = f"one entry per measurement, [{operator.shape[0]}]"
        raise ValueError(f"{name} must have {wanted}, got {tuple(y.shape)}")
    check_same_kind(name, y, "operator", operator)


def check_same_kind(name: str, x: Tensor, other: str, y: Tensor) -> None:
    if x.dtype != y.dtype:
        raise TypeError(f"{name} must have {other}'s dtype {y.dtype}, got {x.dtype}")
    if x.device != y.device:
        raise ValueError(f"{name} must be on {other}'s device {y.device}, got {x.device}")


_library.register(
    "tubal_sensing_steps_",
    "(Tensor(a!) u, Tensor operator, Tensor y, float step, int steps) -> Tensor",
    reference=reference.tubal_sensing_steps_,
    fake=lambda u, operator, y, step, steps: u.new_empty(steps),
    plain=True,  # where there is no CPU kernel: products with the measurements, which torch does best
)
