"""Gradient descent on an overparametrized tubal factorization, from a small random start.

Karnik, Veselovska, Iwen, Krahmer, "Implicit Regularization for Tubal Tensor Factorizations via Gradient
Descent", ICML 2025 (arXiv 2410.16247).

A tensor T = X * X^T of low tubal rank, X [n, r, k], is seen through y = A(T), y_i = <A_i, T>. Descent on

    L(U) = 1/4 |A(U * U^T) - y|^2,    U [n, R, k] with R above r (and even above n),    U_0 = alpha G

stays near tensors of tubal rank r although nothing in L asks for it. At first U is so small that the residual
is -y, and a step is U <- (I + mu A^*A(T)) * U: a power iteration in every Fourier face, which turns the
columns of U towards the r leading eigenvectors of A^*A(T) (the spectral phase), and multiplies them by about
1 + mu. They reach the size of X after ln(1/alpha) / mu steps; then U * U^T converges, up to an error that the
other directions leave, the smaller alpha the smaller.

The steps are ``pyops.tubal.Sensing.descend``; this module draws the problems, converts the published scripts'
step sizes, and measures subspaces and errors on the way.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from pyops.tubal import Sensing, tgram, tsvd, ttranspose, tube_fft


class Problem(NamedTuple):
    """A tensor of low tubal rank and what is seen of it; y = sensing(truth), truth = x * x^T."""

    x: Tensor
    truth: Tensor
    sensing: Sensing
    y: Tensor


def draw(n: int, r: int, tubes: int, m: int, seed: int, dtype: torch.dtype = torch.float64) -> Problem:
    """A random problem; the same for every dtype, up to rounding.

    X is the left t-singular factor of a Gaussian tensor [n, r, tubes]: all its Fourier singular values are 1.
    The entries of the m measurements are N(0, 1/m) and independent.

    >>> p = draw(10, 3, 4, 285, seed=0)
    >>> p.x.shape, p.y.shape
    (torch.Size([10, 3, 4]), torch.Size([285]))
    """
    generator = torch.Generator().manual_seed(seed)
    x = tsvd(torch.randn(n, r, tubes, generator=generator, dtype=torch.float64)).U
    operator = torch.randn(m, n, n, tubes, generator=generator, dtype=torch.float64) / math.sqrt(m)
    truth, sensing = tgram(x), Sensing(operator)
    y = sensing(truth)
    return Problem(x.to(dtype), truth.to(dtype), Sensing(operator.to(dtype)), y.to(dtype))


def small_start(n: int, rank: int, tubes: int, alpha: float, seed: int) -> Tensor:
    """U_0 = alpha G, the entries of G N(0, 1/rank); float64."""
    generator = torch.Generator().manual_seed(1_000_003 + seed)
    g = torch.randn(n, rank, tubes, generator=generator, dtype=torch.float64)
    return g * (alpha / math.sqrt(rank))


def published_step(nu: float, m: int, *, symmetrized: bool) -> float:
    """The step size mu of L that equals the published scripts' nu.

    The scripts measure with G, entries N(0, 1), or with G + G^T, and step by nu sum res_i (G_i + G_i^T) * U,
    or the same with G + G^T in place of G. Here the entries are N(0, 1/m), and of A_i the T-symmetric part
    acts.

    >>> round(published_step(1e-5, 285, symmetrized=True), 6)
    0.0228
    """
    return (8 if symmetrized else 2) * m * nu


def escape_time(alpha: float, mu: float) -> float:
    """Predicted steps until the error falls below a half, for an X with singular values 1: ln(1/alpha) / mu.

    >>> round(escape_time(1e-7, 0.0228))
    707
    """
    return math.log(1 / alpha) / mu


def symmetric_dimension(n: int, tubes: int) -> int:
    """Of the T-symmetric tensors [n, n, tubes]; as many measurements determine T without any bias.

    >>> symmetric_dimension(10, 4)
    210
    """
    return sum(n * (n + 1) // 2 if 2 * f in (0, tubes) else n * n for f in range(tubes // 2 + 1))


def leading(a: Tensor, r: int) -> Tensor:
    """Orthonormal bases of the r leading left singular vectors in every half face of a: [faces, n, r]."""
    return torch.linalg.svd(tube_fft(a).faces, full_matrices=False).U[..., :r]


def largest_angle(v: Tensor, w: Tensor) -> float:
    """The sine of the largest principal angle between subspaces, the largest over the faces.

    From orthonormal bases [faces, n, r], as ||(I - W W^H) V||_2, which is exact to rounding for small angles;
    sqrt(1 - cos^2) would be wrong below 1e-8.

    >>> v = torch.tensor([[[1.0], [0.0]]], dtype=torch.float64)
    >>> w = torch.tensor([[[1.0], [1e-12]]], dtype=torch.float64)
    >>> largest_angle(v, w)
    1e-12
    """
    rest = v - w @ (w.mH @ v)
    return torch.linalg.matrix_norm(rest, 2).max().item()


class PowerIteration:
    """The spectral phase alone: W_t = (I + mu A^*A(T))^t * U_0, from one eigendecomposition per face."""

    def __init__(self, problem: Problem, start: Tensor, mu: float):
        m = problem.sensing.adjoint(problem.y)
        values, self.vectors = torch.linalg.eigh(tube_fft((m + ttranspose(m)) / 2).faces)
        self.start = self.vectors.mH @ tube_fft(start).faces
        growth = 1 + mu * values
        # Relative to the fastest direction of each face, so that no power overflows.
        self.growth = growth / growth.abs().amax(-1, keepdim=True)
        self.values = values

    def target(self, r: int) -> Tensor:
        """Bases of the r leading eigenvectors of A^*A(T), [faces, n, r]."""
        return self.vectors[..., -r:]

    def leading(self, t: int, r: int) -> Tensor:
        """Bases of the r leading left singular vectors of W_t, [faces, n, r].

        Valid while the slowest of the r directions is above rounding beside the fastest.
        """
        w = self.growth.pow(t).unsqueeze(-1) * self.start
        return self.vectors @ torch.linalg.svd(w, full_matrices=False).U[..., :r]


@dataclass
class History:
    """What was measured on the way; each list has one entry per recorded step."""

    step: list[int] = field(default_factory=list)
    test: list[float] = field(default_factory=list)  # |U * U^T - T| / |T|
    train: list[float] = field(default_factory=list)  # |A(U * U^T) - y| / |y|
    # With subspaces only. L_t: the r leading left singular vectors of U_t, L: those of A^*A(T).
    tube: list[float] = field(
        default_factory=list
    )  # |s_r(U) - s_r(X)| / |s_r(X)|, s_r the r-th singular tube
    angle_spectral: list[float] = field(default_factory=list)  # L_t and L
    angle_truth: list[float] = field(default_factory=list)  # L_t and the columns of X
    angle_power: list[float] = field(default_factory=list)  # leading vectors of the power iterate, and L

    def first_below(self, error: float) -> float:
        """The first recorded step with a test error below ``error``; infinity if there is none.

        >>> History(step=[0, 10, 20], test=[1.0, 0.6, 0.4]).first_below(0.5)
        20
        """
        return next((s for s, e in zip(self.step, self.test, strict=True) if e < error), math.inf)


def follow(
    problem: Problem, start: Tensor, mu: float, steps: int, *, every: int = 10, subspaces: bool = False
) -> tuple[Tensor, History]:
    """Gradient descent from ``start``, measured every so many steps; returns the last U, and the history.

    >>> p = draw(6, 1, 3, 60, seed=0)
    >>> _, history = follow(p, small_start(6, 8, 3, 1e-3, seed=0), mu=0.05, steps=600)
    >>> bool(history.test[0] > 0.99) and bool(history.test[-1] < 0.05)
    True
    """
    history = History()
    r = problem.x.shape[1]
    start = start.to(problem.x.dtype)
    norms = torch.linalg.vector_norm(problem.truth), torch.linalg.vector_norm(problem.y)
    if subspaces:
        power = PowerIteration(problem, start, mu)
        target, truth = power.target(r), leading(problem.x, r)
        weights = tube_fft(problem.x).weights.flatten()
        tube = torch.linalg.svdvals(tube_fft(problem.x).faces)[:, r - 1]

    def record(t: int, u: Tensor) -> None:
        z = tgram(u)
        history.step.append(t)
        history.test.append((torch.linalg.vector_norm(z - problem.truth) / norms[0]).item())
        history.train.append((torch.linalg.vector_norm(problem.sensing(z) - problem.y) / norms[1]).item())
        if not subspaces:
            return
        basis, values, _ = torch.linalg.svd(tube_fft(u).faces, full_matrices=False)
        basis = basis[..., :r]
        difference = weights * (values[:, r - 1] - tube).square()  # Parseval: as for the tubes themselves
        history.tube.append((difference.sum() / (weights * tube.square()).sum()).sqrt().item())
        history.angle_spectral.append(largest_angle(basis, target))
        history.angle_truth.append(largest_angle(basis, truth))
        history.angle_power.append(largest_angle(power.leading(t, r), target))

    u, _ = problem.sensing.descend(start, problem.y, mu, steps, callback=record, every=every)
    return u, history
