"""Box embeddings in plain torch: sides, intersections and volumes of boxes [z, Z] per dimension.

Hard boxes intersect in z = max z_i, Z = min Z_i and have the side relu(Z - z). The corners of a Gumbel box
are random, of scale tau:

    z = tau log sum exp(z_i / tau),   Z = -tau log sum exp(-Z_i / tau),   w = Z - z,
    E[side] = 2 tau K0(2 exp(-w / (2 tau)))  ~  nu softplus((w - 2 gamma tau) / nu),   gamma = 0.5772...

All volumes are logarithms, log volume = sum over dimensions of log side. Below softplus's argument -30 its
logarithm is the argument itself, so that boxes far apart keep the slope 1 / nu.

The functions of the first part are differentiable any number of times; those of the second, which the ops
register, never hold B x N x D numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pyops.reference._precision import working_dtype

GAMMA = 0.5772156649015329  # Euler's
LINEAR = -30.0  # below it log softplus(x) - x, about exp(x) / 2, is under float64's rounding of x
CHUNK = 1 << 19  # elements of a working tensor


# Elementwise


def log_softplus(x: Tensor) -> Tensor:
    """log log(1 + exp x), which is x + O(exp x) far below 0."""
    tail = x < LINEAR
    return torch.where(tail, x, F.softplus(torch.where(tail, 0.0, x), threshold=40.0).log())


def no_volume(w: Tensor) -> Tensor:
    """[..., 1]: whether a hard box with sides w is empty."""
    return (w <= 0).any(-1, keepdim=True) & ~w.isnan().any(-1, keepdim=True)


def log_softplus_volume(w: Tensor, nu: float | Tensor) -> Tensor:
    """sum_d log(nu softplus(w_d / nu)); for nu = 0 sum_d log relu(w_d), where -inf has gradient 0."""
    if not isinstance(nu, Tensor) and nu == 0:
        empty = no_volume(w)
        logs = torch.where(empty, 1.0, w).log().sum(-1)
        return torch.where(empty.squeeze(-1), -math.inf, logs)
    return (log_softplus(w / nu) + (nu.log() if isinstance(nu, Tensor) else math.log(nu))).sum(-1)


class _BesselRatio(torch.autograd.Function):
    """K1(y) / K0(y), whose derivative r^2 - r / y - 1 is again made of r."""

    generate_vmap_rule = True

    @staticmethod
    def forward(y: Tensor) -> Tensor:
        return torch.special.scaled_modified_bessel_k1(y) / torch.special.scaled_modified_bessel_k0(y)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        r = _BesselRatio.apply(y)
        return grad * (r * r - r / y - 1)


class _LogBesselK0(torch.autograd.Function):
    """log K0(y) for y > 0; the derivative is -K1(y) / K0(y)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(y: Tensor) -> Tensor:
        return torch.special.scaled_modified_bessel_k0(y).log() - y

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return -grad * _BesselRatio.apply(y)


def log_bessel_side(w: Tensor, tau: float | Tensor) -> Tensor:
    """log(2 tau K0(2 exp(-w / (2 tau)))), the exact expectation.

    Where exp overflows (w < -160 tau in float32, -1400 tau in float64) it stays at its value there.
    """
    u = w / (2 * tau)
    u = u.clamp(min=-700.0 if u.dtype == torch.float64 else -80.0)
    wide = u > 20  # K0(y) = -log(y / 2) - gamma + O(y^2 log y)
    k0 = _LogBesselK0.apply(2 * torch.exp(-torch.where(wide, 0.0, u)))
    line = (torch.where(wide, u, 20.0) - GAMMA).log()
    scale = (2 * tau).log() if isinstance(tau, Tensor) else math.log(2 * tau)
    return torch.where(wide, line, k0) + scale


def log_volume(
    z: Tensor, Z: Tensor, kind: str, tau: float | Tensor, nu: float | Tensor, offset: float | Tensor
) -> Tensor:
    """Log volumes of boxes; kind "bessel" is the exact one."""
    if kind == "bessel":
        return log_bessel_side(Z - z, tau).sum(-1)
    return log_softplus_volume(Z - z - offset, nu)


def smooth_max(xs: Sequence[Tensor], tau: float | Tensor) -> Tensor:
    """tau log sum exp(x_i / tau) of tensors that broadcast, and their maximum for tau = 0."""
    x = torch.stack(torch.broadcast_tensors(*xs))
    if not isinstance(tau, Tensor) and tau == 0:
        return x.amax(0)
    top = x.detach().amax(0)
    none = top == -math.inf
    top = torch.where(top.isinf(), 0.0, top)  # infinity minus itself would be NaN
    x = torch.where(none, 0.0, x)  # so would the gradient of a sum of zeros
    return torch.where(none, -math.inf, top + tau * torch.logsumexp((x - top) / tau, 0))


def intersection(boxes: Sequence[tuple[Tensor, Tensor]], tau: float | Tensor) -> tuple[Tensor, Tensor]:
    """Corners of the intersection of any number of boxes."""
    return smooth_max([z for z, _ in boxes], tau), -smooth_max([-Z for _, Z in boxes], tau)


def log1mexp(x: Tensor) -> Tensor:
    """log(1 - exp x) for x < 0; -inf at 0."""
    near = x > -math.log(2)
    a = torch.log(-torch.expm1(torch.where(near, x, -1.0)))
    b = torch.log1p(-torch.exp(torch.where(near, -1.0, x)))
    return torch.where(near, a, b)


def log_difference(a: Tensor, b: Tensor) -> Tensor:
    """log(exp a - exp b); -inf with gradient 0 where b >= a."""
    empty = b >= a
    inner = torch.where(empty, -1.0, b - a)
    return torch.where(empty, -math.inf, torch.where(empty, 0.0, a) + log1mexp(inner))


def signed_log_sum(logs: Tensor, signs: Tensor, dim: int = 0) -> Tensor:
    """log sum s_i exp(logs_i) for signs of 1, -1 and 0; -inf with gradient 0 unless the sum is positive."""
    plus, minus = (torch.where(s, logs, -math.inf).logsumexp(dim) for s in (signs > 0, signs < 0))
    return log_difference(plus, minus)


def conditional(log_joint: Tensor, of_condition: Tensor) -> Tensor:
    """log(volume / volume of the condition) <= 0: rounding above 0 is cut, its gradient is kept.

    -inf where the volume is 0, also for a condition of volume 0.
    """
    found = torch.where(log_joint == -math.inf, log_joint, log_joint - of_condition)
    return found - found.detach().clamp(min=0)


# Pairs


def chunks(rows: int, per_row: int) -> Iterator[slice]:
    """Slices of the rows, so that a working tensor has about CHUNK elements."""
    step = max(1, CHUNK // max(per_row, 1))
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def larger(a: Tensor, b: Tensor, tau: float) -> Tensor:
    """``smooth_max`` of two, with fewer working tensors."""
    if tau == 0:
        return torch.maximum(a, b)
    gap = torch.where(a == b, 0.0, (a - b).abs())
    return torch.maximum(a, b) + tau * torch.log1p(torch.exp(-gap / tau))


def share(a: Tensor, b: Tensor, tau: float) -> Tensor:
    """The derivative of ``larger`` in a: sigmoid((a - b) / tau); for tau = 0 a tie is shared equally."""
    if tau == 0:
        return torch.where(a == b, 0.5, (a > b).to(a.dtype))
    return torch.where(a == b, 0.5, torch.sigmoid((a - b) / tau))


def overlap(corners: Sequence[Tensor], tau: float, offset: float) -> Tensor:
    """w - offset of the intersection of two boxes, given as qz, qZ, iz, iZ."""
    qz, qZ, iz, iZ = corners
    return -larger(-qZ, -iZ, tau) - larger(qz, iz, tau) - offset


def slope(w: Tensor, nu: float | Tensor) -> Tensor:
    """The derivative of ``log_softplus_volume``: sigmoid(x) / (nu softplus(x)), 1 / nu far below 0."""
    if not isinstance(nu, Tensor) and nu == 0:
        return torch.where(no_volume(w), 0.0, 1 / w)
    x = w / nu
    inner = torch.where(x < LINEAR, 0.0, x)
    return torch.where(x < LINEAR, 1.0, torch.sigmoid(inner) / F.softplus(inner, threshold=40.0)) / nu


def corner_gradients(
    r: Tensor, corners: Sequence[Tensor], tau: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of qz, qZ, iz and iZ for a gradient r of w."""
    qz, qZ, iz, iZ = corners
    return (
        -r * share(qz, iz, tau),
        r * share(iZ, qZ, tau),
        -r * share(iz, qz, tau),
        r * share(qZ, iZ, tau),
    )


def _wide(*tensors: Tensor) -> list[Tensor]:
    """In the working dtype and in one memory layout, so that strides change no bit."""
    return [t.to(working_dtype(t)).contiguous() for t in tensors]


def _nu(nu: float, nus: Tensor | None, like: Tensor) -> float | Tensor:
    return nu if nus is None else nus.to(like.dtype)


def box_log_volumes(qz, qZ, iz, iZ, tau, nu, offset, nus):
    """[B, N]: log volumes of the intersections of boxes [B, D] with boxes [N, D]."""
    qz, qZ, iz, iZ = _wide(qz, qZ, iz, iZ)
    nu = _nu(nu, nus, qz)
    out = qz.new_empty(qz.shape[0], iz.shape[0])
    for rows in chunks(qz.shape[0], iz.numel()):
        w = overlap((qz[rows].unsqueeze(1), qZ[rows].unsqueeze(1), iz, iZ), tau, offset)
        out[rows] = log_softplus_volume(w, nu)
    return out


def box_log_volumes_backward(grad, qz, qZ, iz, iZ, tau, nu, offset, nus):
    """Gradients of the corners: sums over the other side's boxes, computed again from the corners."""
    dtype = qz.dtype
    grad, qz, qZ, iz, iZ = _wide(grad, qz, qZ, iz, iZ)
    nu = _nu(nu, nus, qz)
    dqz, dqZ, diz, diZ = (torch.zeros_like(t) for t in (qz, qZ, iz, iZ))
    for rows in chunks(qz.shape[0], iz.numel()):
        corners = qz[rows].unsqueeze(1), qZ[rows].unsqueeze(1), iz, iZ
        r = grad[rows].unsqueeze(-1) * slope(overlap(corners, tau, offset), nu)
        found = corner_gradients(r, corners, tau)
        dqz[rows], dqZ[rows] = found[0].sum(1), found[1].sum(1)
        diz += found[2].sum(0)
        diZ += found[3].sum(0)
    return tuple(t.to(dtype) for t in (dqz, dqZ, diz, diZ))


def box_topk(qz, qZ, signs, iz, iZ, item_log_volume, tau, nu, offset, k, prune):
    """The k best items of each query, by log sum_t signs_t volume_t; NaN is lowest.

    With item_log_volume by what is left of it, at most 0: a log probability.
    """
    batch, terms, _ = qz.shape
    count = iz.shape[0]
    wide = working_dtype(qz)
    found = min(k, count)
    values = torch.full((batch, k), -math.inf, dtype=wide, device=qz.device)
    indices = torch.full((batch, k), -1, dtype=torch.int64, device=qz.device)
    for rows in chunks(batch, terms * count):
        z, Z = (t[rows].flatten(0, 1) for t in (qz, qZ))
        logs = box_log_volumes(z, Z, iz, iZ, tau, nu, offset, None).view(rows.stop - rows.start, terms, count)
        scores = signed_log_sum(logs, signs[rows].unsqueeze(-1), 1)
        if item_log_volume is not None:
            scores = (scores - item_log_volume).clamp(max=0)
        best, order = (-scores).sort(dim=-1, stable=True)  # ascending, where NaN comes last
        values[rows, :found], indices[rows, :found] = -best[:, :found], order[:, :found]
    return values, indices


def _gathered(rows, tables, query_index, item_index) -> list[Tensor]:
    """Corners [b, 1, D] of the queries and [b, S, D] of the items of some rows."""
    qz, qZ, iz, iZ = tables
    q = (t.index_select(0, query_index[rows]).unsqueeze(1) for t in (qz, qZ))
    shape = (*item_index[rows].shape, iz.shape[1])
    i = (t.index_select(0, item_index[rows].reshape(-1)).reshape(shape) for t in (iz, iZ))
    return [t.to(working_dtype(t)) for t in (*q, *i)]


def box_sampled(qz, qZ, iz, iZ, query_index, item_index, tau, nu, offset):
    """[B, S]: log volumes of the intersections of query query_index[b] with items item_index[b, s]."""
    tables = qz, qZ, iz, iZ
    out = qz.new_empty(item_index.shape, dtype=working_dtype(qz))
    for rows in chunks(item_index.shape[0], item_index.shape[1] * iz.shape[1]):
        corners = _gathered(rows, tables, query_index, item_index)
        out[rows] = log_softplus_volume(overlap(corners, tau, offset), nu)
    return out


def box_sampled_backward(grad, qz, qZ, iz, iZ, query_index, item_index, tau, nu, offset):
    """Gradients of the gathered rows, in the dtype of the log volumes: [B, D] twice and [B S, D] twice."""
    tables = qz, qZ, iz, iZ
    batch, samples = item_index.shape
    dim = iz.shape[1]
    dqz, dqZ = (grad.new_empty(batch, dim) for _ in range(2))
    diz, diZ = (grad.new_empty(batch, samples, dim) for _ in range(2))
    for rows in chunks(batch, samples * dim):
        corners = _gathered(rows, tables, query_index, item_index)
        r = grad[rows].to(corners[0].dtype).unsqueeze(-1) * slope(overlap(corners, tau, offset), nu)
        found = corner_gradients(r, corners, tau)
        dqz[rows], dqZ[rows] = (t.sum(1) for t in found[:2])
        diz[rows], diZ[rows] = found[2:]
    return dqz, dqZ, diz.flatten(0, 1), diZ.flatten(0, 1)
