"""Triton launchers of the spectral step: approximate polar factor and the update that uses it.

Mathematics. A matrix is taken wide, X of n x m with n <= m (a tall one through its strides: nothing is
copied and the result is the transpose of the wide result, bit for bit). One step is the odd quintic

    X <- a X + B X,    B = b A + c A A,    A = X X^T,                                                 (direct)

applied to X_0 = G / max(||G||_F, eps). Between two restarts the same steps can run on the n x n side alone,

    R = X X^T; per step Z = b R + c R R, Q <- a Q + Q Z,  R <- a T + Z T with T = a R + R Z;  X <- Q X  (Gram)

where every factor is a polynomial in R, hence symmetric and commuting. The direct form is the Gram form
restarted after every step, so one loop (`_iterate`) runs both.

Tiling. `symmetric_kernel` computes D = alpha P + beta A B^T only for the tiles on and above the diagonal
and stores each together with its mirror, so D is symmetric to the last bit: n^2 k flops instead of 2 n^2 k.
`update_kernel` computes X' = s (alpha X + Q X) on all tiles and writes what the step needs: the next
operand, the float32 copy of X, the result in the caller's layout, or straight the weight W <- shrink W -
step X'. Work buffers have their last dimension contiguous and both padded with zeros to multiples of 16,
which keeps 16-byte loads for every size; zeros stay zeros under all of the above. Direct: 3 n^2 m + n^3
flops a step; Gram: 3 n^2 m a segment and 4 n^3 a step. Bytes a step with 2-byte operands: 6 n m + 8 n^2 at
the least (X read twice and written, A and B written and read).

Precision. bfloat16 and float16 operands accumulate in float32. The term a X is taken from a float32 copy of
X in the first two direct steps: rounding X there is what later steps amplify along small singular values.
"bf16x3" keeps every operand as a pair hi + lo of bfloat16 and forms hi hi + hi lo + lo hi (16 bits of each
operand, so not float32's accuracy). float32 uses IEEE products, never TF32; float64 uses float64 dots,
which are tensor core instructions where there are any.

Scale. amax (integer maximum of the bit patterns: exact, order-free, and it sees NaN and Inf) gives a power
of two; the scaled matrix gives the Frobenius norm; the factor 1/norm is folded into the first step, as is
the sharper Schatten-4 one. A non-finite matrix gets the factor NaN, a zero matrix 0. Nothing here waits for
the device: the adaptive mode keeps a flag per matrix, and later steps only copy the matrices that are done.

Every offset is 64-bit. The block sizes depend on dtype and size alone, so a matrix gives the same bits in
any batch. Importing needs no GPU and no driver.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch

from ._lmo_kernels import (
    amax_kernel,
    apply_kernel,
    norm_kernel,
    residual_kernel,
    scale_kernel,
    schatten_kernel,
    square_sum_kernel,
    symmetric_kernel,
    update_kernel,
)

# Below this aspect ratio the direct form does not cost more, and rounds less; below this many rows the time
# is that of the launches, of which the Gram form has more.
GRAM_ASPECT, GRAM_ROWS = 1.75, 128
CARRIED_STEPS = 2  # steps whose a X comes from the float32 copy of X
SIDE = 64  # of the tiles of the element-wise passes
CHUNK = 4096  # elements that one program of the norm reads
WIDTH = 1024  # partial sums that one program reads at a time


@dataclass(frozen=True)
class Compute:
    """Dtype of operands, of sums and the carried X, whether operands are hi + lo, tl.dot's precision."""

    operand: torch.dtype
    sums: torch.dtype
    split: bool = False
    precision: str = "ieee"


COMPUTE = {
    "float64": Compute(torch.float64, torch.float64),
    "float32": Compute(torch.float32, torch.float32),
    "bf16x3": Compute(torch.bfloat16, torch.float32, split=True),
    "bfloat16": Compute(torch.bfloat16, torch.float32),
    "float16": Compute(torch.float16, torch.float32),
}

# compute: rows (largest n, symmetric (side, depth, warps), update (rows, columns, depth, warps)).
_SMALL = (32, (32, 32, 4), (32, 64, 32, 4))
_HALF = (_SMALL, (1023, (64, 64, 4), (64, 128, 64, 8)), (math.inf, (128, 64, 8), (128, 128, 64, 8)))
BLOCKS = {
    "float64": ((32, (32, 16, 4), (32, 32, 16, 4)), (math.inf, (64, 16, 8), (64, 64, 16, 8))),
    "float32": (_SMALL, (math.inf, (64, 32, 8), (64, 64, 32, 8))),
    "bf16x3": (_SMALL, (1023, (64, 32, 4), (64, 128, 32, 8)), (math.inf, (128, 32, 8), (128, 128, 32, 8))),
    "bfloat16": _HALF,
    "float16": _HALF,
}


def _blocks(compute: str, n: int) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Block sizes of the symmetric product and of the update for n rows, and the pipeline's stages."""
    _, symmetric, update = next(row for row in BLOCKS[compute] if n <= row[0])
    return symmetric, update, 2 if torch.version.hip else 3


def _launch(kernel, programs: int, *args, warps: int = 4, stages: int = 1, **constants) -> None:
    """Runs `kernel` on a one-dimensional grid; asks for fused a*b+c, whose default differs by version."""
    kernel[(programs,)](*args, **constants, num_warps=warps, num_stages=stages, enable_fp_fusion=True)


def _working(x: torch.Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _wide(x: torch.Tensor) -> torch.Tensor:
    """[..., r, c] as a batch [b, n, m] of matrices with n <= m; a view where the batch strides allow one."""
    x = x.reshape(-1, *x.shape[-2:])
    return x.mT if x.shape[1] > x.shape[2] else x


@dataclass(frozen=True)
class Source:
    """The directions d: g [b, n, m], or with a table of addresses any tensors of g's layout."""

    g: torch.Tensor
    batch: int
    m: torch.Tensor | None = None
    table: torch.Tensor | None = None
    momentum: float = 0.0
    nesterov: bool = False


@dataclass(frozen=True)
class Target:
    """Where X_k goes: out [b, n, m], or with a table w <- shrink w - step X_k for weights of out's layout."""

    out: torch.Tensor
    table: torch.Tensor | None = None
    shrink: float = 1.0
    step: float = 0.0
    seed: int = -1
    element: tuple[int, int] = (0, 0)


class Iteration:
    """The work buffers of one batch and the launches on them."""

    def __init__(self, source: Source, target: Target, compute: str, eps: float):
        self.source, self.target = source, target
        self.compute, g = COMPUTE[compute], source.g
        self.batch, self.n, self.m = source.batch, g.shape[-2], g.shape[-1]
        self.np, self.mp = (self.n if self.n == 1 else _pad(self.n)), _pad(self.m)
        self.symmetric_blocks, self.update_blocks, self.stages = _blocks(compute, self.n)
        self.carry = None
        self.x, self.scale = self._normalize(eps)

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype or self.compute.sums, device=self.source.g.device)

    def operand(self, columns: int) -> torch.Tensor:
        """[planes, batch, n, columns]; two planes, hi and lo, when split."""
        return self.empty(1 + self.compute.split, self.batch, self.np, columns, dtype=self.compute.operand)

    def _normalize(self, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
        """X_0 = scale * x, with x the input times a power of two."""
        s = self.source
        g, m = s.g, s.m
        double = g.dtype == torch.float64 or (m is not None and m.dtype == torch.float64)
        amax = torch.zeros(self.batch, dtype=torch.int64 if double else torch.int32, device=g.device)
        strides = (g.stride(0), *g.stride()[1:], *(m.stride()[1:] if m is not None else (0, 0)))
        tiles = -(-self.n // SIDE) * -(-self.m // SIDE)
        _launch(
            amax_kernel, self.batch * tiles, g, m, s.table, amax, s.momentum, self.n, self.m, *strides,
            NESTEROV=s.nesterov, SIDE=SIDE,
        )  # fmt: skip
        x = self.operand(self.mp)
        plain = self.compute.operand == self.compute.sums
        self.carry = None if plain else self.empty(self.batch, self.np, self.mp)
        tiles = -(-self.np // SIDE) * -(-self.mp // SIDE)
        _launch(
            scale_kernel, self.batch * tiles, g, m, s.table, amax, self.carry, x, s.momentum,
            self.n, self.m, self.np, self.mp, *strides, *x.stride()[1:], x.stride(0),
            NESTEROV=s.nesterov, SPLIT=self.compute.split, SIDE=SIDE,
        )  # fmt: skip
        size = self.np * self.mp
        chunks = -(-size // CHUNK)
        partial, scale = self.empty(self.batch, chunks), self.empty(self.batch)
        squared = x if self.carry is None else self.carry
        _launch(square_sum_kernel, self.batch * chunks, squared, partial, size, chunks, CHUNK=CHUNK)
        _launch(norm_kernel, self.batch, partial, amax, scale, eps, chunks, WIDTH=WIDTH)
        return x, scale

    def partial(self) -> torch.Tensor:
        """One partial sum per tile of the symmetric product."""
        return self.empty(self.batch, self._triangle())

    def _triangle(self) -> int:
        across = -(-self.np // self.symmetric_blocks[0])
        return across * (across + 1) // 2

    def symmetric(
        self, a, b, alpha=0.0, p=None, beta=1.0, *,
        diagonal=None, scale=None, done=None, partial=None, sums="", store=True,
    ):  # fmt: skip
        """alpha s p + beta s^2 a b^T; with `diagonal` also that plus diagonal I."""
        side, depth, warps = self.symmetric_blocks
        d = self.operand(self.np) if store else None
        q = self.operand(self.np) if diagonal is not None else None
        like = b if p is None and d is None else (p if d is None else d)
        _launch(
            symmetric_kernel, self.batch * self._triangle(), a, b, p, d, q, scale, done, partial,
            alpha, beta, diagonal or 0.0, self.np, a.shape[-1],
            *a.stride()[1:], *b.stride()[1:], *like.stride()[1:], a.stride(0), b.stride(0), like.stride(0),
            PARTIAL=sums, SPLIT=self.compute.split,
            PRECISION=self.compute.precision, SIDE=side, BK=depth, warps=warps, stages=self.stages,
        )  # fmt: skip
        return d if q is None else (d, q)

    def update(
        self, q, alpha, *, scale=None, done=None, carry_in=False, carry_out=False, keep=True, emit=False
    ):
        """X <- s (alpha X + q X); q None: no product."""
        rows, columns, depth, warps = self.update_blocks
        y = self.operand(self.mp) if keep else None
        out, t, x = self.target.out, self.target, self.x
        k = 0 if q is None else self.np
        q = x if q is None else q
        stochastic = emit and t.seed >= 0 and out.dtype in (torch.bfloat16, torch.float16)
        _launch(
            update_kernel, self.batch * (-(-self.np // rows)) * (-(-self.mp // columns)), q, x,
            self.carry if carry_in else None, self.carry if carry_out else None, y, out if emit else None,
            t.table if emit else None, scale, done, alpha, t.shrink, t.step, _key(t.seed),
            self.np, self.mp, k, self.n, self.m, *q.stride()[1:], *x.stride()[1:],
            out.stride(0), *out.stride()[1:], *t.element, q.stride(0), x.stride(0), STOCHASTIC=stochastic,
            SPLIT=self.compute.split, PRECISION=self.compute.precision, BM=rows, BN=columns, BK=depth,
            warps=warps, stages=self.stages,
        )  # fmt: skip
        self.x = y


def _pad(size: int) -> int:
    return -(-size // 16) * 16


def _segments(steps: int, restarts: list[int], gram: bool, single_first: bool) -> list[range]:
    """The steps (from 0) between two formations of X; every step on its own is the direct form."""
    if not gram:
        return [range(j, j + 1) for j in range(steps)]
    wanted = [*(restarts or range(1, steps, 2)), *([1] if single_first else []), steps]
    ends = sorted({r for r in wanted if 0 < r <= steps})
    return [range(start, stop) for start, stop in zip([0, *ends], ends, strict=False)]


def _iterate(
    source: Source, target: Target, coefficients: list[float], restarts: list[int], form: str, compute: str,
    normalize: str, eps: float, tol: float, min_steps: int, report: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """X_k of every matrix into the target; returns residual (if `report`) and steps, one per matrix."""
    rows = list(zip(*[iter(coefficients)] * 3, strict=True))
    vector = source.g.shape[-2] == 1 and len(rows) > 0
    x = Iteration(source, target, compute, 0.0 if vector else eps)
    rows = [] if vector else rows
    adaptive = tol >= 0
    device = source.g.device
    steps = torch.full((x.batch,), len(rows), dtype=torch.int64, device=device)
    done = torch.zeros(x.batch, dtype=torch.int32, device=device) if report else None
    flag = done if adaptive else None
    residual = x.empty(x.batch if report else 0, dtype=_working(source.g))

    def measure(partial, step=0, gram_partial=None):
        _launch(
            residual_kernel, x.batch, partial, gram_partial, residual, done, steps, tol, step,
            partial.shape[1], WIDTH=WIDTH,
        )  # fmt: skip

    worthwhile = x.n >= GRAM_ROWS and x.m >= GRAM_ASPECT * x.n
    gram = not adaptive and (form == "gram" or (form == "auto" and worthwhile))
    schatten = normalize == "schatten4"
    scale, gram_scale = x.scale, None
    for segment in _segments(len(rows), restarts, gram, schatten):
        single = len(segment) == 1
        rescale = schatten and segment.start == 0
        gram_partial = x.partial() if rescale or adaptive else None
        r = x.symmetric(x.x, x.x, scale=scale, done=flag, partial=gram_partial, sums="value")
        if rescale:
            gram_scale = torch.empty_like(scale)
            _launch(
                schatten_kernel, x.batch, gram_partial, scale, gram_scale, gram_partial.shape[1], WIDTH=WIDTH
            )
        q = None
        for j in segment:
            a, b, c = rows[j]
            checked = adaptive and j >= min_steps and not (schatten and j == 0)
            partial = x.partial() if checked else None
            shifted = a if q is None and not single else None
            z = x.symmetric(
                r, r, b, r, c, diagonal=shifted, scale=gram_scale, done=flag, partial=partial, sums="change"
            )  # fmt: skip
            if shifted is not None:
                z, q = z
            elif not single:
                q = x.symmetric(q, z, a, q)
            if checked:
                measure(partial, j, gram_partial)
            if j + 1 < segment.stop:
                t = x.symmetric(r, z, a, r)
                r = x.symmetric(z, t, a, t)
            gram_scale = None
        last = segment.stop == len(rows)
        carried = x.carry is not None and single and segment.start < CARRIED_STEPS
        x.update(
            z if single else q, a if single else 0.0, scale=scale, done=flag,
            keep=report or not last, emit=last, carry_in=carried,
            carry_out=carried and segment.stop < CARRIED_STEPS,
        )  # fmt: skip
        scale = None
    if not rows:
        x.update(None, 1.0, scale=scale, keep=report, emit=True, carry_in=x.carry is not None)
    if report:
        r, partial = x.symmetric(x.x, x.x, done=flag), x.partial()
        x.symmetric(r, r, 0.0, r, done=flag, partial=partial, sums="change", store=False)
        measure(partial)
    return residual, steps


def polar(
    g: torch.Tensor, coefficients: list[float], restarts: list[int], form: str, compute: str, normalize: str,
    eps: float, tol: float, min_steps: int, with_residual: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """The op ``pyops::polar`` on a GPU.

    Args:
        g: [..., rows, cols] in float64, float32, bfloat16 or float16, any strides; not written to.
        coefficients: a_1, b_1, c_1, a_2, ...; none gives X_0.
        restarts: steps (counted from 1) after which the Gram form goes back to X.
        form: "direct", "gram", or "auto": gram from 128 rows and an aspect ratio of 1.75 on.
        compute: a key of ``COMPUTE``.
        normalize: "fro", or "schatten4": also divide by ||A||_F^(1/2) in step 1.
        eps: lower limit of the norm that g is divided by.
        tol, min_steps: tol >= 0 makes the direct form stop a matrix, after min_steps or more steps, as
            soon as ||A^2 - A||_F <= tol ||A||_F (not before the rescaling of schatten4).
        with_residual: report ||A^2 - A||_F of the result, measured in the operand dtype.

    Returns:
        The result (shape and dtype of g, contiguous), the residual [...] in float32 (float64 for float64 g)
        and the steps taken [...] in int64; the last two have shape [0] if neither ``with_residual`` nor
        ``tol >= 0`` asks for them.
    """
    report = with_residual or tol >= 0
    p = torch.empty(g.shape, dtype=g.dtype, device=g.device)
    batch = g.shape[:-2] if report else (0,)
    if g.numel() == 0:
        residual = torch.zeros(
            batch, dtype=torch.float64 if g.dtype == torch.float64 else torch.float32, device=g.device
        )
        return p, residual, torch.zeros(batch, dtype=torch.int64, device=g.device)
    wide = _wide(g)
    with torch.cuda.device_of(g):
        residual, steps = _iterate(
            Source(wide, wide.shape[0]), Target(_wide(p)), coefficients, restarts, form, compute,
            normalize, eps, tol, min_steps, report,
        )  # fmt: skip
    return p, residual.view(batch), steps.view(batch) if report else steps.new_empty(0)


@lru_cache(maxsize=1024)
def _table(rows: tuple[tuple[int, ...], ...], device: torch.device) -> torch.Tensor:
    """One row per matrix: addresses of weight, gradient and momentum, its tensor's stream, its first index.

    Cached, since parameters mostly stay where they are; a copy from pinned memory does not wait either.
    """
    table = torch.tensor(rows, dtype=torch.int64)
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table.to(device)


def _layout(x: torch.Tensor) -> tuple:
    return x.dtype, x.stride()[-2:]


def lmo_step_(
    weights: list[torch.Tensor], grads: list[torch.Tensor], momenta: list[torch.Tensor], norm: str,
    shrinks: list[float], steps: list[float], momentum: float, nesterov: bool, grad_decay: float,
    coefficients: list[float], restarts: list[int], form: str, compute: str, eps: float, seed: int,
) -> None:  # fmt: skip
    """The op ``pyops::lmo_step_`` on a GPU: m <- m + (1 - momentum)(g - m), W <- shrink W - step u(d).

    d is m, or g + momentum (m - g) with ``nesterov``, or g without momenta and then g <- grad_decay g
    afterwards. Spectral tensors of one shape, layout, shrink and step run as one batch: momentum in the first
    pass over it, the update in the epilogue of the last product. Other norms go through
    ``pyops::unit_direction``.
    """
    groups: dict[tuple, list[int]] = {}
    for i, (w, g) in enumerate(zip(weights, grads, strict=True)):
        m = _layout(momenta[i]) if momenta else None
        if w.numel() > 0:
            key = (w.device, w.shape[-2:], _layout(w), _layout(g), m, shrinks[i], steps[i])
            groups.setdefault(key, []).append(i)
    for (device, *_, shrink, step), members in groups.items():
        lists = [[x[i] for i in members] if x else [] for x in (weights, grads, momenta)]
        with torch.cuda.device_of(lists[0][0]):
            if norm == "spectral":
                table = _table(tuple(_entries(*lists, members)), device)
                w, g, m = (_wide(x[0][None] if x[0].ndim == 2 else x[0]) if x else None for x in lists)
                tall = lists[0][0].shape[-2] > lists[0][0].shape[-1]
                cols = lists[0][0].shape[-1]
                source = Source(g, len(table), m, table, momentum, nesterov)
                target = Target(w, table, shrink, step, seed, (1, cols) if tall else (cols, 1))
                _iterate(source, target, coefficients, restarts, form, compute, "fro", eps, -1.0, 0, False)
            else:
                for i, w, g in zip(members, lists[0], lists[1], strict=True):
                    m = momenta[i] if momenta else None
                    _vector_step(w, g, m, norm, shrink, step, momentum, nesterov, seed, i)
    if not momenta and grad_decay != 1.0:
        torch._foreach_mul_([g for g in grads if g.numel() > 0], grad_decay)


def _key(seed: int) -> int:
    """The seed's part of the counter behind the random bits."""
    return (0x85EBCA6B * seed) & 0xFFFFFFFF


def _stream(tensor: int) -> int:
    """The part that tells the random bits of one tensor from another's."""
    return (0x9E3779B9 * (tensor + 1)) & 0xFFFFFFFF


def _entries(weights, grads, momenta, members):
    """Rows of `_table`, one per matrix of each tensor."""
    for i, (w, g) in enumerate(zip(weights, grads, strict=True)):
        tensors = [w, g, momenta[i]] if momenta else [w, g]
        for b in range(w.shape[0] if w.ndim == 3 else 1):
            at = [x.data_ptr() + (b * x.stride(0) * x.element_size() if x.ndim == 3 else 0) for x in tensors]
            yield (*at, *[0] * (3 - len(at)), _stream(members[i]), b * w.shape[-2] * w.shape[-1])


def _vector_step(w, g, m, norm, shrink, step, momentum, nesterov, seed, tensor):
    if w.is_cuda and hasattr(torch.ops.pyops, "vector_step_"):  # the CUDA kernels: one pass, no u in memory
        torch.ops.pyops.vector_step_(w, g, m, norm, shrink, step, momentum, nesterov, 1.0, seed, tensor)
        return
    d = g
    if m is not None:
        wide = torch.promote_types(torch.promote_types(m.dtype, g.dtype), torch.float32)
        m.copy_(torch.lerp(m.to(wide), g.to(wide), 1 - momentum))
        d = torch.lerp(g.to(wide), m.to(wide), momentum) if nesterov else m
    wide = torch.promote_types(d.dtype, torch.float32)
    u = torch.ops.pyops.unit_direction(d.to(wide), norm, 1.0)
    w, u = (x if x.ndim == 3 else x[None] for x in (w, u))
    batch, n, m = w.shape
    _launch(
        apply_kernel, batch * -(-n // SIDE) * -(-m // SIDE), w, u, shrink, step, _key(seed), _stream(tensor),
        n, m, *w.stride(), *u.stride(),
        STOCHASTIC=seed >= 0 and w.dtype in (torch.bfloat16, torch.float16), SIDE=SIDE,
    )  # fmt: skip
