"""Tubal tensors measured by linear functionals, and descent on a factor of what was measured."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor

from pyops.ops import _checks as checks
from pyops.ops._tubal_sensing import (
    check_dense,
    check_measured,
    check_same_kind,
    tubal_sensing_steps_,
)
from pyops.ops.tubal import tgram, tprod
from pyops.reference.tubal import matmul, ttranspose


class Sensing:
    """The measurement operator A(Z)_i = <A_i, Z>, its adjoint, and least squares for Z = U * U^T:

        L(U) = 1/4 |A(U * U^T) - y|^2,    grad L(U) = sum_i res_i (A_i + A_i^T)/2 * U,

    with * the t-product, ^T the T-transpose and res = A(U * U^T) - y. U * U^T is T-symmetric, so of A_i only
    its T-symmetric part counts.

    Args:
        operator: the A_i, [m, n, n, tubes], tubes last, float64 or float32; kept, not copied.

    Raises:
        TypeError, ValueError: here and in the methods, naming the argument, what was received and what is
            wanted.

    Karnik, Veselovska, Iwen, Krahmer: "Implicit regularization for tubal tensor factorizations via gradient
    descent", ICML 2025.

    >>> torch.manual_seed(0)  # doctest: +ELLIPSIS
    <torch...>
    >>> a = Sensing(torch.randn(60, 4, 4, 3, dtype=torch.float64) / 60**0.5)
    >>> x = torch.randn(4, 1, 3, dtype=torch.float64) / 3
    >>> y = a(tgram(x))
    >>> u, losses = a.descend(1e-3 * torch.randn(4, 4, 3, dtype=torch.float64), y, step=0.1, steps=2000)
    >>> bool((tgram(u) - tgram(x)).norm() < 1e-2 * tgram(x).norm())
    True
    """

    def __init__(self, operator: Tensor):
        check_dense("operator", operator)
        if operator.ndim != 4 or operator.shape[1] != operator.shape[2] or operator.shape[3] == 0:
            wanted = "[m, n, n, tubes] with tubes of at least one entry"
            raise ValueError(f"operator must be {wanted}, got {tuple(operator.shape)}")
        self.operator = operator

    @cached_property
    def symmetric(self) -> bool:
        """Whether every A_i equals its T-transpose exactly; compared once."""
        return all(torch.equal(a, ttranspose(a, False)) for a in self.operator)

    def __call__(self, z: Tensor) -> Tensor:
        """A(Z): [..., n, n, tubes] to [..., m]."""
        check_dense("z", z)
        wanted = tuple(self.operator.shape[1:])
        if tuple(z.shape[-3:]) != wanted:
            raise ValueError(f"z must be [..., {', '.join(map(str, wanted))}], got {tuple(z.shape)}")
        return matmul(z.flatten(-3), self.operator.flatten(1).mT)

    def adjoint(self, residual: Tensor) -> Tensor:
        """A^*(r) = sum_i r_i A_i: [..., m] to [..., n, n, tubes]."""
        check_dense("residual", residual)
        if residual.ndim == 0 or residual.shape[-1] != len(self.operator):
            raise ValueError(f"residual must be [..., {len(self.operator)}], got {tuple(residual.shape)}")
        z = matmul(residual, self.operator.flatten(1))
        return z.unflatten(-1, tuple(self.operator.shape[1:]))

    def loss(self, u: Tensor, y: Tensor) -> Tensor:
        """1/4 |A(U * U^T) - y|^2 for u [n, rank, tubes] and y [m]; differentiable."""
        self._check(u, y)
        return (self(tgram(u)) - y).square().sum() / 4

    def gradient(self, u: Tensor, y: Tensor) -> Tensor:
        """The gradient of ``loss`` in u, by its formula."""
        self._check(u, y)
        g = self.adjoint(self(tgram(u)) - y)
        if not self.symmetric:
            g = (g + ttranspose(g, False)) / 2
        return tprod(g, u)

    def descend(
        self,
        u: Tensor,
        y: Tensor,
        step: float,
        steps: int,
        *,
        callback: Callable[[int, Tensor], None] | None = None,
        every: int = 1,
    ) -> tuple[Tensor, Tensor]:
        """Gradient descent from u, with one read of the operator per step; nothing of it is differentiable.

        Args:
            u: [n, rank, tubes], the start; not written to.
            y: [m].
            step, steps: the step size, finite and at least 0, and how many.
            callback: called as callback(t, U_t) for t = 0, every, 2 every, ... and steps; it must not change
                U_t, nor keep it without a copy.
            every: at least 1. Intervals of 32 steps and more also read the operator in half the bytes.

        Returns:
            U after the last step, and the loss before each step, [steps].
        """
        self._check(u, y)
        if checks.count("every", every) == 0:
            raise ValueError("every must be at least 1, got 0")
        remaining = checks.count("steps", steps)
        step = checks.nonnegative("step", step)
        u = u.detach().clone(memory_format=torch.contiguous_format)
        operator, y = self.operator.detach(), y.detach()
        if callback is None:
            return u, tubal_sensing_steps_(u, operator, y, step, steps)
        losses = []
        callback(0, u)
        while remaining > 0:
            taken = min(every, remaining)
            remaining -= taken
            losses.append(tubal_sensing_steps_(u, operator, y, step, taken))
            callback(steps - remaining, u)
        return u, torch.cat(losses) if losses else u.new_empty(0)

    def _check(self, u: Tensor, y: Tensor) -> None:
        check_dense("u", u)
        n, tubes = self.operator.shape[1], self.operator.shape[3]
        if u.ndim != 3 or (u.shape[0], u.shape[2]) != (n, tubes):
            raise ValueError(f"u must be [{n}, rank, {tubes}] for this operator, got {tuple(u.shape)}")
        check_same_kind("u", u, "operator", self.operator)
        check_measured("y", y, self.operator)
