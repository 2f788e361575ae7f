"""The norm balls of the Scion paper (Pethick et al., ICML 2025, arXiv 2502.07529) as they act on a parameter.

A parameter is cut into matrices (whole, per split, per head, per convolution tap), each a strided view. On
each the step is ``W <- shrink W - lr radius factor u(d)`` with u one of the four directions of
``torch.ops.pyops.lmo_step_`` and a factor that depends on the shape only; W acts as ``d_out x d_in``:

================= ================== ======================================================= ================
norm              ball               factor                                                  u(d)
================= ================== ======================================================= ================
spectral          RMS -> RMS         sqrt(d_out/d_in); rms_max: at least 1; out: sqrt(d_out) polar factor
spectral_conv     largest tap, ditto the same of the channels, over the number of taps       of [c_out, rest]
spectral_conv_tap largest tap, ditto the same                                                of each tap
sign              1 -> inf           1/d_in, or 1                                            sign
col               1 -> RMS           sqrt(d_out)/d_in, or sqrt(d_out)                        columns over l2
row               RMS -> inf         1/sqrt(d_in), or 1                                      rows over l2
rms               RMS of the vector  sqrt(size)                                              over l2
euclidean         l2, Frobenius      1                                                       over l2
max               largest entry      1                                                       sign
================= ================== ======================================================= ================

The second of two factors is that of ``normalized=False``. These are the norms of :func:`pyops.lmo`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyops.ops.lmo import NORMS

SETTINGS = ("norm", "scale", "normalized", "transpose", "split_sizes", "num_heads", "split_dim")
VECTOR_NORMS = ("rms", "euclidean", "max")


class Block(NamedTuple):
    """One view of a parameter: a matrix or a batch of equal matrices, and how its ball is scaled."""

    layout: str  # "matrix" | "conv" | "tap" | "vector"
    cut: tuple[int, int, int] | None  # (dimension, start, length) of a split
    heads: tuple[int, int] | None  # (dimension, how many of them in the cut)
    direction: str  # norm of lmo_step_
    factor: float


def resolve(norm: str, ndim: int) -> str:
    """The norm that "auto" stands for: by the number of dimensions, as in the paper's code."""
    if norm != "auto":
        return norm
    return "rms" if ndim < 2 else "spectral" if ndim == 2 else "spectral_conv"


def blocks(shape: torch.Size, settings: Mapping[str, Any]) -> tuple[Block, ...]:
    """See :func:`cut`; of the settings only those that matter here, so that equal ones are cut once."""
    return cut(shape, *[settings[name] for name in SETTINGS])


@functools.cache
def cut(
    shape: torch.Size,
    norm: str,
    scale: str,
    normalized: bool | None,
    transpose: bool,
    split_sizes: tuple[int, ...] | None,
    num_heads: int | tuple[int, ...] | None,
    split_dim: int,
) -> tuple[Block, ...]:
    """How a parameter of this shape is cut and scaled.

    Args:
        shape: of the whole parameter.
        others: as in :class:`pyops.optim.Scion`.

    Raises:
        ValueError: where the settings do not fit the shape.
    """
    norm = resolve(norm, len(shape))
    sizes, heads, dim = split_sizes, num_heads, split_dim
    if norm in VECTOR_NORMS:
        for name, value in (("split_sizes", sizes), ("num_heads", heads)):
            if value is not None:
                raise ValueError(f"{name} cuts matrices, norm {norm!r} takes {tuple(shape)} as a vector")
        factor = math.sqrt(max(shape.numel(), 1)) if norm == "rms" else 1.0
        direction = "sign" if norm == "max" else "euclidean"
        return (Block("matrix" if len(shape) == 2 else "vector", None, None, direction, factor),)
    if len(shape) < 2:
        raise ValueError(
            f"norm {norm!r} needs a matrix, got a parameter of shape {tuple(shape)}; norms for vectors: "
            f"{', '.join(VECTOR_NORMS)}; 'auto' takes rms"
        )
    if norm in ("spectral_conv", "spectral_conv_tap") and len(shape) == 2:
        norm = "spectral"
    layout = {"spectral": "matrix", "spectral_conv_tap": "tap"}.get(
        norm, "matrix" if len(shape) == 2 else "conv"
    )
    if (sizes or heads) and len(shape) > 2 and layout == "matrix":
        raise ValueError(
            f"split_sizes and num_heads need a matrix or a kernel, got a batch of shape {tuple(shape)}"
        )
    if not -2 <= dim <= 1:
        raise ValueError(f"split_dim must be 0 or 1, got {dim}")
    dim %= 2
    if sizes is None:
        parts: list[tuple[tuple[int, int, int] | None, int]] = [(None, shape[dim])]
    else:
        if sum(sizes) != shape[dim]:
            raise ValueError(
                f"split_sizes must sum to {shape[dim]}, dimension {dim} of {tuple(shape)}, got {tuple(sizes)}"
            )
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        parts = [((dim, start, size), size) for start, size in zip(starts, sizes, strict=True)]
    counts = [heads] * len(parts) if heads is None or isinstance(heads, int) else list(heads)
    if len(counts) != len(parts):
        raise ValueError(f"num_heads must be one number or one per part of split_sizes, got {heads}")
    result = []
    for (cut, size), count in zip(parts, counts, strict=True):
        if count is not None and (count < 1 or size % count):
            raise ValueError(f"num_heads must divide {size}, got {count}")
        extent = list(shape)
        extent[dim] = size // (count or 1)
        direction, factor = _direction(norm, extent, scale, normalized, transpose)
        block = Block(layout, cut, None if count is None else (dim, count), direction, factor)
        result.extend(_per_tap(block, size) if layout == "tap" else [block])
    return tuple(result)


def _per_tap(block: Block, size: int) -> list[Block]:
    """The block tap by tap; heads become cuts, as taps and heads together have no strided view."""
    if block.heads is None:
        return [block._replace(layout="tap")]
    dim, count = block.heads
    start, length = (block.cut[1] if block.cut else 0), size // count
    cuts = [(dim, start + i * length, length) for i in range(count)]
    return [block._replace(layout="tap", cut=cut, heads=None) for cut in cuts]


def _measured(shape: torch.Size, block: Block) -> list[Block]:
    """The blocks whose lengths make up the norm: of a kernel its taps, whatever the direction spans."""
    if block.direction != "spectral" or block.layout != "conv":
        return [block]
    dim = block.heads[0] if block.heads else 0
    return _per_tap(block, block.cut[2] if block.cut else shape[dim])


def _direction(
    norm: str, extent: list[int], scale: str, normalized: bool | None, transpose: bool
) -> tuple[str, float]:
    if norm == "spectral":
        rows, cols, taps = extent[-2], extent[-1], 1
    elif norm in ("spectral_conv", "spectral_conv_tap"):
        rows, cols, taps = extent[0], extent[1], math.prod(extent[2:])
    else:
        rows, cols, taps = extent[0], math.prod(extent[1:]), 1
    if transpose:
        rows, cols = cols, rows
    rows, cols = max(rows, 1), max(cols, 1)
    if normalized is None:
        normalized = NORMS[norm][2]
    if norm.startswith("spectral"):
        return "spectral", spectral_factor(scale, rows, cols) / max(taps, 1)
    if norm == "sign":
        return "sign", 1 / cols if normalized else 1.0
    if norm == "col":
        factor = math.sqrt(rows) / (cols if normalized else 1)
        return ("row" if transpose else "col"), factor
    factor = 1 / math.sqrt(cols) if normalized else 1.0
    return ("col" if transpose else "row"), factor


def spectral_factor(scale: str, rows: int, cols: int) -> float:
    """Of the spectral ball: "rms" sqrt(rows/cols), "rms_max" max(1, that), "out" sqrt(rows), "none" 1."""
    if scale == "rms":
        return math.sqrt(rows / cols)
    if scale == "rms_max":
        return max(1.0, math.sqrt(rows / cols))
    return math.sqrt(rows) if scale == "out" else 1.0


def view(t: Tensor, block: Block, like: Tensor | None = None) -> Tensor:
    """The block of t as [rows, cols] or [batch, rows, cols] in t's own memory.

    The order in which the entries of a kernel or vector are flattened follows the strides of ``like``
    (default t), so that a channels-last kernel needs no copy; the directions do not depend on that order.

    Raises:
        RuntimeError: by torch, where t's strides allow no such view.
    """
    if block.cut is None and block.heads is None:
        if block.layout == "matrix" and t.dim() == 2:
            return t
        if block.layout == "vector" and t.dim() < 2:
            return t.view(1, -1)
    order = (t if like is None else like).stride()
    if block.layout == "vector":
        dims = sorted(range(t.dim()), key=lambda i: -order[i])
        return t.permute(dims).view(1, -1)
    if block.cut is not None:
        t = t.narrow(*block.cut)
    lead = 0
    if block.heads is not None:
        dim, count = block.heads
        t = t.unflatten(dim, (count, t.shape[dim] // count)).movedim(dim, 0)
        lead = 1
    if block.layout == "conv":
        rest = sorted(range(lead + 1, t.dim()), key=lambda i: -order[i - lead])
        t = t.permute(*range(lead + 1), *rest)
        return t.view(*t.shape[: lead + 1], -1)
    if block.layout == "tap":
        taps = sorted(range(2, t.dim()), key=lambda i: -order[i])
        t = t.permute(*taps, 0, 1)
        return t.view(-1, *t.shape[-2:])
    return t if t.dim() <= 3 else t.view(-1, *t.shape[-2:])


def gauge(w: Tensor, parts: tuple[Block, ...]) -> float:
    """||W|| in the norm of these blocks, the largest over them; 1 on the boundary of the unit ball.

    Kernels are measured tap by tap, the norm in which both conv directions have length at most 1.
    """
    worst = 0.0
    for block in (measured for part in parts for measured in _measured(w.shape, part)):
        x = view(w, block).detach().to(torch.float64)
        if x.numel() == 0:
            continue
        if block.direction == "spectral":
            length = torch.linalg.matrix_norm(x, ord=2).amax()
        elif block.direction == "sign":
            length = x.abs().amax()
        else:
            dims = {"col": -2, "row": -1, "euclidean": (-2, -1)}[block.direction]
            length = torch.linalg.vector_norm(x, dim=dims).amax()
        worst = max(worst, length.item() / block.factor)
    return worst


def boundary_(
    w: Tensor, parts: tuple[Block, ...], radius: float, generator: torch.Generator | None = None
) -> None:
    """Fills w with a random point on the boundary of its ball, drawn in float64."""
    for block in (measured for part in parts for measured in _measured(w.shape, part)):
        target = view(w, block)
        x = torch.randn(target.shape, dtype=torch.float64, device=w.device, generator=generator)
        if block.direction == "spectral":
            x = _semi_orthogonal(x)
        else:
            x = torch.ops.pyops.unit_direction(x, block.direction, 1.0)
        target.copy_(radius * block.factor * x)


def _semi_orthogonal(x: Tensor) -> Tensor:
    """Haar-distributed: the QR of a Gaussian with the signs of R's diagonal moved into Q."""
    tall = x if x.shape[-2] >= x.shape[-1] else x.mT
    q, r = torch.linalg.qr(tall)
    q = q * torch.where(r.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0).to(x)[..., None, :]
    return q if tall is x else q.mT
