"""What the tests of the lmo ops measure against: float64 formulas that share no code with the kernels.

The polar iteration is an odd polynomial, so its oracle applies that polynomial to the singular values of an
SVD.
"""

import math

import suite
import torch

COMPUTE_OF = {
    torch.float64: "float64",
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "bf16x3",
}
DTYPE_OF = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16x3": "bf16x3",
}
# Unit roundoff of the products; the split in two bfloat16 parts keeps 16 bits and drops the product of the
# small parts. In float64 it is the oracle's SVD that errs by several.
COMPUTE_UNIT = {"float64": 1e-15, "float32": 6e-8, "bf16x3": 3e-6, "bfloat16": 2e-3}


def apply(s, rows):
    """p_k(...p_1(s)) with p(s) = a s + b s^3 + c s^5."""
    for a, b, c in rows:
        s = a * s + b * s**3 + c * s**5
    return s


def singular_values(g):
    return torch.linalg.svdvals(g.double())


def polar(g, rows, normalize="fro", eps=0.0):
    """The exact result of the iteration, from the SVD."""
    if g.numel() == 0:
        return g.double().clone()
    u, s, vh = torch.linalg.svd(g.double(), full_matrices=False)
    start = start_values(s, normalize, eps)
    s = (
        torch.where(s > 0, start / start.norm(dim=-1, keepdim=True), 0)
        if s.shape[-1] == 1 and rows
        else apply(start, rows)
    )
    return (u * s[..., None, :]) @ vh


def start_values(s, normalize="fro", eps=0.0):
    norm = s.norm(dim=-1, keepdim=True).clamp(min=eps)
    norm = torch.where(norm > 0, norm, 1.0)
    s = s / norm
    if normalize == "schatten4":
        quartic = s.pow(4).sum(-1, keepdim=True).pow(0.25)
        s = s / torch.where(quartic > 0, quartic, 1.0)
    return s


def svd_factor(g, rcond=1e-10):
    """The exact partial isometry."""
    if g.numel() == 0:
        return g.double().clone()
    u, s, vh = torch.linalg.svd(g.double(), full_matrices=False)
    return (u * (s > rcond * s[..., :1])[..., None, :]) @ vh


def gate(compute, rows, form="auto", dtype=None, conditioned=False, fill=1.0):
    """Largest relative error of a result against :func:`polar`.

    20 u sqrt(k) from rounding k steps; 0.5 u S with S the product of the slopes a_j, from rounding that the
    iteration amplifies at small singular values. Where the latter says nothing, above 0.1, ``conditioned``
    input has the former. The Gram form, which auto may choose, has ten times that, except in bfloat16.
    ``dtype``: of the result, which is rounded once more. ``fill``: rank over min(rows, cols); a
    rank-deficient result is smaller, the error in its null space is not. Never so large that a result of
    zeros, with an error of 1, would pass.
    """
    u, slope = COMPUTE_UNIT[compute], math.prod(a for a, _, _ in rows)
    bound = 20 * u * math.sqrt(max(len(rows), 1))
    if not conditioned or u * slope < 0.2:
        bound = max(bound, 0.5 * u * slope)
    if form != "direct" and compute != "bfloat16":
        bound *= 10
    if dtype is not None:
        bound += suite.UNIT[dtype]
    return min(bound / math.sqrt(fill), 0.9)


def with_singular_values(s, rows, cols, seed=0):
    """A float64 matrix of the given singular values and random singular vectors."""
    generator = torch.Generator().manual_seed(seed)
    n = len(s)
    u, _ = torch.linalg.qr(torch.randn(rows, n, generator=generator, dtype=torch.float64))
    v, _ = torch.linalg.qr(torch.randn(cols, n, generator=generator, dtype=torch.float64))
    return (u * torch.as_tensor(s, dtype=torch.float64)) @ v.mT


def spectrum(kind, n):
    """Singular values of the kinds of input that the iterations are measured on."""
    i = torch.arange(n, dtype=torch.float64)
    return {
        "1/i": 1 / (i + 1),
        "cond 1e3": torch.logspace(0, -3, n, dtype=torch.float64),
        "cond 1e6": torch.logspace(0, -6, n, dtype=torch.float64),
        "rank n/4": (i < max(n // 4, 1)).double(),
        "rank 1": (i < 1).double(),
        "orthogonal": torch.ones(n, dtype=torch.float64),
    }[kind]
