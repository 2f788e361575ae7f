"""Triton launchers of box embeddings: pairwise log volumes and their gradients, top-k, sampled pairs.

Mathematics. Boxes [z, Z] of D dimensions; of the intersection of a query and an item, per dimension,

    z = tau log(e^(z_q / tau) + e^(z_i / tau)),  Z likewise of -Z (maximum and minimum for tau = 0),
    w = Z - z - offset,  log side = log(nu softplus(w / nu)) (log relu(w) for nu = 0),  log volume = their sum

    d log side / dw = sigmoid(w / nu) / (nu softplus(w / nu)),   dw / dz_q = -sigmoid((z_q - z_i) / tau), ...

where an empty hard box has no gradient in any dimension.

In logarithms this takes three exponentials and four logarithms per pair and dimension, and holds for every
range. In float32 and for tau > 0 a tile of pairs mostly goes another way (the exponential domain): with
P = e^((z - c) / tau) and Q = e^((c - Z) / tau) of each box and any c per dimension, which cancels,

    e^(-w / tau) = e^(offset / tau) (P_q + P_i) (Q_q + Q_i),    for nu = tau  side = nu log1p(e^(w / tau)),

so that exponentials are per box and dimension, and for nu = tau one logarithm per pair remains: the sides are
multiplied with their exponents apart. The gradient's sigmoids are P_q / (P_q + P_i) and Q_q / (Q_q + Q_i).
This needs exponents within [LOW, HIGH]; a box may be below LOW where the other side's is not, since then its
P or Q is nothing beside the other. `centre_kernel` picks c, `flags_kernel` finds what blocks of 64 boxes are
outside, and each tile branches on two flags: no launch waits for the device.

Tiling. `scores_kernel`: a tile of queries x items per program, looping over D; nothing of size B x N x D is
stored. `grads_kernel`: for one dimension and a block of rows it sums over all columns in registers; launched
once for the queries and once, with the roles exchanged, for the items. No atomics: where one side is short
the other is cut into parts, which are added afterwards in a fixed order. `topk_kernel`: a block of queries
goes through a part of the items and keeps the K best as sort keys of 64 bits (score, then index); torch.topk
merges the parts, at most B x parts x K keys. For k > 128 and for float64 whose scores do not fit a key,
blocks of scores are sorted with the best so far. `prune` changes nothing here, as it changes no result.
`sampled_kernel` and `sampled_grads_kernel` read rows of tables in place, in logarithms: no power is shared.

Cost per pair and dimension in float32, nu = tau: 3 additions and products, a reciprocal, a log1p and 5
operations for the product of sides; backward twice that. Bytes: 4 B N of scores; backward reads the incoming
gradient once per dimension, mostly from cache.

Precision. float64 inside for float64, float32 otherwise; sums of 64 dimensions at a time. NaN stays in its
row or column. Every offset is 64-bit. Importing needs no GPU and no driver.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ._boxes_kernels import (
    centre_kernel,
    flags_kernel,
    grads_kernel,
    sampled_grads_kernel,
    sampled_kernel,
    scores_kernel,
    topk_kernel,
)

LARGEST_K = 128  # that topk_kernel keeps in registers
FLAG_ROWS = 64
SAMPLE = 256  # boxes of each side that the centre is found from
PROGRAMS = 1024  # that fill a GPU; fewer are cut further
BLOCK = 1 << 22  # scores that the top-k of blocks holds at a time


def _launch(kernel, programs: int, *args, **constants) -> None:
    """Runs `kernel` on a one-dimensional grid; asks for fused a*b+c, whose default differs by version.

    256 threads where there are tiles of pairs, one for each of 16 x 16.
    """
    warps = 8 if "BN" in constants else 4
    if torch.version.hip:
        warps //= 2  # of 64 lanes
    if programs > 0:
        kernel[(programs,)](*args, **constants, num_warps=warps, num_stages=1, enable_fp_fusion=True)


def _cover(size: int, fewest: int, most: int) -> int:
    """Smallest power of two that covers `size`, within the bounds."""
    return min(most, max(fewest, 1 << max(size - 1, 0).bit_length()))


def _work(t: torch.Tensor) -> torch.dtype:
    return torch.float64 if t.dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class Form:
    """What temperatures select: the names in kernels, and their numbers."""

    corners: str
    side: str
    tau: float
    nu: float
    offset: float

    @property
    def numbers(self) -> tuple[float, ...]:
        """(tau, log2(e) / tau, 1 / nu, offset, e^(offset / nu))."""
        inv_tau = math.log2(math.e) / self.tau if self.tau else 0.0
        inv_nu = 1.0 / self.nu if self.nu else 0.0
        return self.tau, inv_tau, inv_nu, self.offset, math.exp(self.offset * inv_nu) if self.equal else 1.0

    @property
    def equal(self) -> bool:
        return self.side == "equal"

    def log_nus(self, dim: int) -> float:
        """What log(side / nu) leaves of the log volume; kernels add per-dimension nus themselves."""
        return dim * math.log(self.nu) if self.side != "hard" and self.nu else 0.0


def _form(tau: float, nu: float, offset: float, nus: torch.Tensor | None, powers: bool) -> Form:
    if nus is not None:
        side, nu = "soft", 0.0
    elif nu == 0:
        side = "hard"
    else:
        # Beyond these offsets e^(offset / nu) would narrow the range of exponents.
        side = "equal" if powers and tau == nu and 0 <= offset <= 1.4 * nu else "soft"
    corners = "hard" if tau == 0 else ("powers" if powers else "log")
    return Form(corners, side, tau, nu, offset)


class Problem:
    """Queries [B, T, D] against items [N, D]: sizes, flags and the launches on them."""

    def __init__(self, qz, qZ, iz, iZ, tau: float, nu: float, offset: float, nus=None):
        self.qz, self.qZ, self.iz, self.iZ, self.nus = qz, qZ, iz, iZ, nus
        self.batch, self.terms, self.dim = qz.shape
        self.count = iz.shape[0]
        self.work = _work(qz)
        some = min(self.batch, self.terms, self.count, self.dim) > 0
        self.form = _form(tau, nu, offset, nus, some and tau > 0 and self.work == torch.float32)
        self.strides = *qz.stride(), *qZ.stride(), *iz.stride(), *iZ.stride()
        self.centre = self.flags = None
        if self.form.corners == "powers":
            self.centre, self.flags = self._flags()

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype or self.work, device=self.qz.device)

    def _flags(self) -> tuple[torch.Tensor, torch.Tensor]:
        centre = self.empty(self.dim)
        boxes = self.qz, self.qZ, self.iz, self.iZ
        sizes = self.batch, self.terms, self.count, self.dim
        sample = _cover(max(self.batch, self.count), 16, SAMPLE)
        _launch(
            centre_kernel, -(-self.dim // 16), *boxes, centre, *sizes, *self.strides, SAMPLE=sample, BD=16
        )
        blocks = self.query_blocks + -(-self.count // FLAG_ROWS)
        flags = self.empty(blocks, dtype=torch.int32)
        inv_tau = self.form.numbers[1]
        _launch(flags_kernel, blocks, *boxes, centre, flags, inv_tau, *sizes, *self.strides, BD=32)
        return centre, flags

    @property
    def query_blocks(self) -> int:
        return -(-self.batch // FLAG_ROWS) * self.terms

    @property
    def numbers(self) -> tuple[float, ...]:
        return *self.form.numbers, self.form.log_nus(self.dim)

    def scores(self, signs=None, item_log_volume=None, begin: int = 0, count: int | None = None):
        """[B, count] of the items from `begin` on, a multiple of 64."""
        count = self.count if count is None else count
        out = self.empty(self.batch, count)
        largest = 32 if self.work == torch.float64 else 64
        bm, bn = _cover(self.batch, 16, largest), _cover(count, 16, largest)
        programs = -(-self.batch // bm) * -(-count // bn)
        _launch(
            scores_kernel, programs, self.qz, self.qZ, signs, self.iz, self.iZ, item_log_volume, self.flags,
            self.centre, self.nus, out, *self.numbers, self.batch, self.terms, self.count, self.dim,
            begin, count, *self.strides, CORNERS=self.form.corners, SIDE=self.form.side, BM=bm, BN=bn,
        )  # fmt: skip
        return out

    def best(self, signs, item_log_volume, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores and indices of the k best items of each query, for k up to LARGEST_K, of float32 scores."""
        kept = _cover(k, 16, LARGEST_K)
        # K best of BM rows twice over fill the registers.
        bm, bn = min(_cover(self.batch, 16, 64), 2048 // kept), max(kept, 64)
        down = -(-self.batch // bm)
        parts = max(1, min(-(-PROGRAMS // down), self.count // (4 * bn)))
        per_part = -(-self.count // (parts * bn)) * bn
        parts = -(-self.count // per_part)
        keys = self.empty(self.batch, parts, kept, dtype=torch.int64)
        _launch(
            topk_kernel, down * parts, self.qz, self.qZ, signs, self.iz, self.iZ, item_log_volume, self.flags,
            self.centre, self.nus, keys, *self.numbers, self.batch, self.terms, self.count, self.dim,
            parts, per_part, *self.strides, CORNERS=self.form.corners, SIDE=self.form.side,
            K=kept, BM=bm, BN=bn,
        )  # fmt: skip
        return _read_keys(keys.flatten(1).topk(k).values)

    def best_of_blocks(self, signs, item_log_volume, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The same for any k and dtype: the best so far and a block of scores are sorted together."""
        integer = torch.int64 if self.work == torch.float64 else torch.int32
        lowest = torch.iinfo(integer).min
        indices = self.empty(self.batch, 0, dtype=torch.int64)
        values, order = self.empty(self.batch, 0), self.empty(self.batch, 0, dtype=integer)
        step = max(64, BLOCK // self.batch // 64 * 64, -(-k // 64) * 64)
        for begin in range(0, self.count, step):
            count = min(step, self.count - begin)
            found = self.scores(signs, item_log_volume, begin, count)
            bits = found.abs().view(integer)  # -0 is 0
            bits = torch.where(found < 0, -1 - bits, bits)
            order = torch.cat([order, torch.where(found.isnan(), lowest, bits)], 1)
            values = torch.cat([values, found], 1)
            here = torch.arange(begin, begin + count, device=found.device).expand(self.batch, -1)
            indices = torch.cat([indices, here], 1)
            order, at = order.sort(dim=1, descending=True, stable=True)
            order, at = order[:, :k], at[:, :k]
            values, indices = values.gather(1, at), indices.gather(1, at)
        return values, indices

    def backward(self, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        volume = self.scores() if self.form.side == "hard" else None
        return *self._grads(grad, volume, of_items=False), *self._grads(grad, volume, of_items=True)

    def _grads(self, grad, volume, of_items: bool) -> tuple[torch.Tensor, ...]:
        """Gradients of the queries' corners or, with the roles exchanged, of the items'."""
        corners = [(t, t.stride(0), t.stride(-1)) for t in (self.qz, self.qZ, self.iz, self.iZ)]
        flags = None, None
        if self.flags is not None:
            flags = self.flags[: self.query_blocks], self.flags[self.query_blocks :]
        sizes, steps = (
            (self.batch, self.count),
            (grad.stride(), (0, 0) if volume is None else volume.stride()),
        )
        if of_items:
            corners, flags, sizes = corners[2:] + corners[:2], flags[::-1], sizes[::-1]
            steps = tuple(pair[::-1] for pair in steps)
        rows, columns = sizes
        bm, bn = _cover(rows, 16, 32 if self.work == torch.float64 else 64), _cover(columns, 16, 32)
        programs = -(-rows // bm) * self.dim
        parts = max(1, min(-(-PROGRAMS // max(programs, 1)), columns // (8 * bn)))
        per_part = -(-columns // (parts * FLAG_ROWS)) * FLAG_ROWS
        parts = -(-columns // max(per_part, 1))
        dtype = self.qz.dtype if parts == 1 else self.work
        if parts == 0:
            return tuple(torch.zeros(rows, self.dim, dtype=self.qz.dtype, device=grad.device) for _ in "zZ")
        found = [self.empty(parts, rows, self.dim, dtype=dtype) for _ in "zZ"]
        _launch(
            grads_kernel, programs * parts, grad, *(t for t, *_ in corners), volume, *flags, self.centre,
            self.nus, *found, *self.form.numbers, rows, columns, self.dim, parts, per_part,
            *steps[0], *steps[1], *(stride for _, *strides in corners for stride in strides),
            CORNERS=self.form.corners, SIDE=self.form.side, BM=bm, BN=bn,
        )  # fmt: skip
        return tuple(t[0] if parts == 1 else t.sum(0).to(self.qz.dtype) for t in found)


def _read_keys(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(float32 scores, indices) of sort keys; (-inf, -1) of missing ones."""
    missing = keys == torch.iinfo(torch.int64).min
    ordered = (keys >> 32).to(torch.int32)
    scores = torch.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered).view(torch.float32)
    indices = 0xFFFFFFFF - (keys & 0xFFFFFFFF)
    return scores.masked_fill(missing, -math.inf), indices.masked_fill(missing, -1)


def box_log_volumes(
    qz: torch.Tensor, qZ: torch.Tensor, iz: torch.Tensor, iZ: torch.Tensor,
    tau: float, nu: float, offset: float, nus: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """The op ``pyops::box_log_volumes`` on a GPU: [B, N]."""
    with torch.cuda.device_of(qz):
        return Problem(qz.unsqueeze(1), qZ.unsqueeze(1), iz, iZ, tau, nu, offset, nus).scores()


def box_log_volumes_backward(
    grad: torch.Tensor, qz: torch.Tensor, qZ: torch.Tensor, iz: torch.Tensor, iZ: torch.Tensor,
    tau: float, nu: float, offset: float, nus: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """The op ``pyops::box_log_volumes_backward`` on a GPU: gradients of qz, qZ, iz, iZ in their dtype."""
    with torch.cuda.device_of(qz):
        return Problem(qz.unsqueeze(1), qZ.unsqueeze(1), iz, iZ, tau, nu, offset, nus).backward(grad)


def box_topk(
    qz: torch.Tensor, qZ: torch.Tensor, signs: torch.Tensor, iz: torch.Tensor, iZ: torch.Tensor,
    item_log_volume: torch.Tensor | None, tau: float, nu: float, offset: float, k: int, prune: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The op ``pyops::box_topk`` on a GPU: values and indices [B, k]."""
    del prune  # an option of the order of work, which here is fixed
    with torch.cuda.device_of(qz):
        problem = Problem(qz, qZ, iz, iZ, tau, nu, offset)
        values = torch.full((problem.batch, k), -math.inf, dtype=problem.work, device=qz.device)
        indices = torch.full((problem.batch, k), -1, dtype=torch.int64, device=qz.device)
        found = min(k, problem.count)
        if problem.batch and found:
            in_registers = found <= LARGEST_K and problem.work == torch.float32
            search = problem.best if in_registers else problem.best_of_blocks
            volume = None if item_log_volume is None else item_log_volume.contiguous()
            values[:, :found], indices[:, :found] = search(signs.contiguous(), volume, found)
        return values, indices


def _sampled_form(qz, tau, nu, offset, dim) -> tuple[Form, tuple[float, ...]]:
    form = _form(tau, nu, offset, None, powers=False)
    return form, (*form.numbers[:4], form.log_nus(dim))


def box_sampled(
    qz: torch.Tensor, qZ: torch.Tensor, iz: torch.Tensor, iZ: torch.Tensor, query_index: torch.Tensor,
    item_index: torch.Tensor, tau: float, nu: float, offset: float,
) -> torch.Tensor:  # fmt: skip
    """The op ``pyops::box_sampled`` on a GPU: [B, S]. An index out of range gives NaN."""
    batch, samples = item_index.shape
    (queries, dim), count = qz.shape, iz.shape[0]
    out = torch.empty(batch, samples, dtype=_work(qz), device=qz.device)
    form, numbers = _sampled_form(qz, tau, nu, offset, dim)
    bd = _cover(dim, 16, 64)
    bp = 1024 // bd
    with torch.cuda.device_of(qz):
        _launch(
            sampled_kernel, -(-batch * samples // bp), qz, qZ, iz, iZ, query_index, item_index, out, *numbers,
            batch * samples, samples, queries, count, dim, *query_index.stride(), *item_index.stride(),
            *qz.stride(), *qZ.stride(), *iz.stride(), *iZ.stride(),
            CORNERS=form.corners, SIDE=form.side, BP=bp, BD=bd,
        )  # fmt: skip
    return out


def box_sampled_backward(
    grad: torch.Tensor, qz: torch.Tensor, qZ: torch.Tensor, iz: torch.Tensor, iZ: torch.Tensor,
    query_index: torch.Tensor, item_index: torch.Tensor, tau: float, nu: float, offset: float,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """The op ``pyops::box_sampled_backward`` on a GPU: [B, D] of queries twice, [B S, D] of items twice."""
    batch, samples = item_index.shape
    (queries, dim), count = qz.shape, iz.shape[0]
    dq = [torch.empty(batch, dim, dtype=_work(qz), device=qz.device) for _ in "zZ"]
    di = [torch.empty(batch * samples, dim, dtype=_work(qz), device=qz.device) for _ in "zZ"]
    form, numbers = _sampled_form(qz, tau, nu, offset, dim)
    bd = _cover(dim, 16, 64)
    bs = _cover(samples, 4, 1024 // bd)
    volume = None
    if form.side == "hard":
        volume = box_sampled(qz, qZ, iz, iZ, query_index, item_index, tau, nu, offset)
    with torch.cuda.device_of(qz):
        _launch(
            sampled_grads_kernel, batch * -(-dim // bd), grad, volume, qz, qZ, iz, iZ, query_index,
            item_index, *dq, *di, *numbers[:4], samples, queries, count, dim, *grad.stride(),
            *query_index.stride(), *item_index.stride(), *qz.stride(), *qZ.stride(), *iz.stride(),
            *iZ.stride(), CORNERS=form.corners, SIDE=form.side, BS=bs, BD=bd,
        )  # fmt: skip
    return *dq, *di
