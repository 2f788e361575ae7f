"""Reference of the op family ``lmo``: the spectral polar iteration, the vector directions and the fused step.

Every function up to the coefficients has the schema of the op of its name and serves where no kernel does.

``compute`` names the arithmetic of the matrix products: operands of "bfloat16" are rounded to bfloat16 and
accumulated in float32 (but the first steps and the Gram form are in float32, which is no less accurate),
"bf16x3" splits each operand in two bfloat16 parts and adds the three largest products, "float32" and
"float64" are what they say.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from pyops.reference._precision import without_autocast, working_dtype

CARRIED_STEPS = 2  # bfloat16: this many steps in float32, since they amplify the rounding of X the most


def round_bf16(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16).to(x.dtype)


def stored(x: Tensor, compute: str) -> Tensor:
    """x as the iteration keeps it. What is both operand and addend is rounded once for both uses: the
    polynomial is flat near its fixed point, so the rounding cancels there; rounding one use alone doubles it.
    """
    return round_bf16(x) if compute == "bfloat16" else x


def product(a: Tensor, b: Tensor, compute: str) -> Tensor:
    """a @ b in the arithmetic named by ``compute``."""
    if compute == "bfloat16":
        return round_bf16(a) @ round_bf16(b)
    if compute == "bf16x3":
        a_high, b_high = round_bf16(a), round_bf16(b)
        return a_high @ b_high + (a_high @ round_bf16(b - b_high) + round_bf16(a - a_high) @ b_high)
    return a @ b


def power_of_two(x: Tensor, dims: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The power of two p with 1 <= amax/p < 2, and where x is not finite; exact for subnormal numbers too."""
    amax = x.abs().amax(tuple(dims), keepdim=True)
    scale = amax / (2 * torch.frexp(amax).mantissa)
    return torch.where((amax > 0) & amax.isfinite(), scale, torch.ones_like(scale)), ~amax.isfinite()


def normalized(x: Tensor, dims: Sequence[int], eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x / max(||x||, eps) with 0/0 = 0; also the scaled norm, its power of two, and where x is not finite."""
    scale, bad = power_of_two(x, dims)
    scaled = x / scale
    floor = torch.full_like(scale, eps) / scale  # eps / scale would go through 1 / scale, which may overflow
    norm = torch.linalg.vector_norm(scaled, dim=dims, keepdim=True).clamp(min=floor)
    return scaled / torch.where(norm > 0, norm, torch.ones_like(norm)), norm, scale, bad


def idempotency(a: Tensor, a2: Tensor) -> Tensor:
    """||A^2 - A||_F per matrix: zero for every partial isometry, of full rank or not."""
    return torch.linalg.matrix_norm(a2 - a)


def split_rows(coefficients: Sequence[float]) -> list[tuple[float, float, float]]:
    return list(zip(coefficients[0::3], coefficients[1::3], coefficients[2::3], strict=True))


def iterate_direct(x, rows, compute, normalize, tol, min_steps):
    """X <- a X + (b A + c A^2) X with A = X X^T; returns X and how many steps each matrix took."""
    active = torch.ones(x.shape[:-2], dtype=torch.bool, device=x.device)
    used = torch.zeros(x.shape[:-2], dtype=torch.int64, device=x.device)
    asked = compute
    for j, (a, b, c) in enumerate(rows):
        compute = "float32" if asked == "bfloat16" and j < CARRIED_STEPS else asked
        carried = stored(x, compute)
        gram = product(x, x.mT, compute)
        if j == 0 and normalize == "schatten4":
            factor = schatten4_factor(gram)
            carried, gram = carried * factor, gram * factor.square()
            x = carried
        gram = stored(gram, compute)
        gram2 = product(gram, gram, compute)
        if tol >= 0 and j >= min_steps and not (normalize == "schatten4" and j == 0):
            # Relative to A, since a small A is close to its square whatever its shape.
            active = active & ~(idempotency(gram, gram2) <= tol * torch.linalg.matrix_norm(gram))
            if not active.any():
                break
        step = a * carried + product(b * gram + c * gram2, x, compute)
        x = torch.where(active[..., None, None], step, x)
        used = used + active
    return x, used


def iterate_gram(x, rows, restarts, compute, normalize):
    """The same polynomial on R = X X^T (n x n), with Q collecting the factors; X <- Q X at each restart.

    In float32 for "bfloat16": with rounded factors it diverges on rank-deficient input.
    """
    compute = "float32" if compute == "bfloat16" else compute
    r = q = None
    restarts = restarts or range(1, len(rows), 2)
    for j, (a, b, c) in enumerate(rows):
        if r is None:
            r = product(x, x.mT, compute)
            if j == 0 and normalize == "schatten4":
                factor = schatten4_factor(r)
                x, r = x * factor, r * factor.square()
        z = b * r + c * product(r, r, compute)
        eye = torch.eye(r.shape[-1], dtype=r.dtype, device=r.device)
        q = z + a * eye if q is None else a * q + product(q, z, compute)
        if j + 1 in restarts or j + 1 == len(rows):
            x, r, q = product(q, x, compute), None, None
            continue
        rz = a * r + product(r, z, compute)
        r = a * rz + product(z, rz, compute)
        r = (r + r.mT) / 2
    return x


def schatten4_factor(gram: Tensor) -> Tensor:
    """||A||_F^(-1/2), the Schatten-4 norm's reciprocal: a sharper bound on the largest singular value."""
    norm = torch.linalg.matrix_norm(gram, keepdim=True)
    return torch.where(norm > 0, norm, torch.ones_like(norm)).rsqrt()


@without_autocast
def polar(g, coefficients, restarts, form, compute, normalize, eps, tol, min_steps, with_residual):
    """Polynomial approximation of the polar factor; see :func:`pyops.polar`. "auto" is the direct form."""
    report = with_residual or tol >= 0
    batch, rows = g.shape[:-2], split_rows(coefficients)
    nothing = g.new_empty(0, dtype=working_dtype(g)), g.new_empty(0, dtype=torch.int64)
    if g.numel() == 0:
        empty = g.new_zeros(batch, dtype=working_dtype(g)), g.new_zeros(batch, dtype=torch.int64)
        return torch.empty_like(g, memory_format=torch.contiguous_format), *(empty if report else nothing)
    tall = g.shape[-2] > g.shape[-1]
    wide = (g.mT if tall else g).to(working_dtype(g)).contiguous()
    wide = wide.reshape(-1, *wide.shape[-2:])  # one batch dimension, so that a matrix alone is computed alike
    vector = wide.shape[-2] == 1 and len(rows) > 0
    x, _, _, bad = normalized(wide, (-2, -1), 0.0 if vector else eps)
    x = x.to(torch.float64 if compute == "float64" else torch.float32)
    used = torch.full(x.shape[:-2], 0 if tol >= 0 else len(rows), dtype=torch.int64, device=g.device)
    if form == "gram" and tol < 0 and not vector:
        x = iterate_gram(x, rows, restarts, compute, normalize)
    elif not vector:
        x, used = iterate_direct(x, rows, compute, normalize, tol, min_steps)
    x = x.masked_fill(bad, math.nan)
    p = (x.mT if tall else x).to(g.dtype).contiguous().view(g.shape)
    if not report:
        return p, *nothing
    gram = product(x, x.mT, compute)
    residual = idempotency(gram, product(gram, gram, compute)).to(working_dtype(g))
    return p, residual.view(batch), used.view(batch)


@without_autocast
def polar_backward(grad, g, coefficients, normalize, eps, steps):
    """Derivative of :func:`polar`'s polynomial: X_j again, then the reverse of each step.

    With Y = a X + B X, B = b A + c A^2, A = X X^T and Z the gradient of Y:
    dB = Z X^T, dA = b dB + c (dB A + A dB), dX = a Z + B Z + (dA + dA^T) X.
    ``steps`` [...] is how many steps each matrix took, or empty when all took every one.
    """
    if g.numel() == 0:
        return torch.zeros_like(g, memory_format=torch.contiguous_format)
    rows, tall = split_rows(coefficients), g.shape[-2] > g.shape[-1]
    wide, z = ((t.mT if tall else t).to(working_dtype(g)).contiguous() for t in (g, grad))
    vector = wide.shape[-2] == 1 and len(rows) > 0
    eps = 0.0 if vector else eps
    start, norm, scale, bad = normalized(wide, (-2, -1), eps)
    xs, factor = [start], None
    for a, b, c in () if vector else rows:
        gram = xs[-1] @ xs[-1].mT
        if factor is None and normalize == "schatten4":
            factor, start_gram = schatten4_factor(gram), gram
            xs[0], gram = start * factor, gram * factor.square()
        xs.append(a * xs[-1] + (b * gram + c * gram @ gram) @ xs[-1])
    for j in reversed(range(len(xs) - 1)):
        (a, b, c), x = rows[j], xs[j]
        gram = x @ x.mT
        d_b = z @ x.mT
        d_a = b * d_b + c * (d_b @ gram + gram @ d_b)
        dx = a * z + (b * gram + c * gram @ gram) @ z + (d_a + d_a.mT) @ x
        z = torch.where((steps > j)[..., None, None], dx, z) if steps.numel() else dx
    if factor is not None:
        d_factor = (z * start).sum((-2, -1), keepdim=True)
        z = factor * z - d_factor * factor.pow(5) * (start_gram @ start)
    inside = (z * start).sum((-2, -1), keepdim=True) * start
    free = (
        norm > torch.full_like(scale, eps) / scale
    )  # ||g|| > eps: the normalisation takes the radial part away
    z = torch.where(free, z - inside, z) / torch.where(norm > 0, norm, torch.ones_like(norm)) / scale
    z = z.masked_fill(norm == 0, 0.0).masked_fill(bad, math.nan)
    return (z.mT if tall else z).to(g.dtype).contiguous()


def cut_svd(g: Tensor, rcond: float) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """float64 SVD of g / power of two; singular values up to rcond * largest become Inf, their vectors 0."""
    x = g.to(torch.float64)
    scale, bad = power_of_two(x, (-2, -1))
    u, s, vh = torch.linalg.svd((x / scale).masked_fill(bad, 0.0), full_matrices=False)
    keep = s > rcond * s[..., :1]
    return u * keep[..., None, :], s.masked_fill(~keep, math.inf), vh * keep[..., :, None], scale, bad


@without_autocast
def polar_svd(g, rcond):
    """The exact partial isometry U V^T over the singular values above rcond * largest, through float64."""
    if g.numel() == 0:
        return torch.empty_like(g, memory_format=torch.contiguous_format)
    u, _, vh, _, bad = cut_svd(g, rcond)
    return (u @ vh).masked_fill(bad, math.nan).to(g.dtype).contiguous()


@without_autocast
def polar_svd_backward(grad, g, rcond):
    """Derivative of :func:`polar_svd` at constant rank.

    With M = U^T Z V:
    U [(M - M^T)_ij / (s_i + s_j)] V^T + (I - U U^T) Z V S^-1 V^T + U S^-1 U^T Z (I - V V^T).
    """
    if g.numel() == 0:
        return torch.zeros_like(g, memory_format=torch.contiguous_format)
    u, s, vh, scale, bad = cut_svd(g, rcond)
    z = grad.to(torch.float64)
    left, right = u.mT @ z, z @ vh.mT
    m = left @ vh.mT
    core = u @ ((m - m.mT) / (s[..., :, None] + s[..., None, :])) @ vh
    rows = ((right - u @ m) / s[..., None, :]) @ vh
    columns = u @ ((left - m @ vh) / s[..., :, None])
    return ((core + rows + columns) / scale).masked_fill(bad, math.nan).to(g.dtype).contiguous()


DIRECTION_DIMS = {"col": (-2,), "row": (-1,), "euclidean": (-2, -1)}


@without_autocast
def unit_direction(g, norm, scale):
    """scale * (sign(g), or g over the norm of its column, row or matrix); zero norms give zero."""
    if g.numel() == 0:
        return torch.empty_like(g, memory_format=torch.contiguous_format)
    x = g.to(working_dtype(g)).contiguous()  # sums in one order, whatever the strides
    if norm == "sign":
        u = torch.where(x.isnan(), x, x.sign())
    else:
        u, _, _, bad = normalized(x, DIRECTION_DIMS[norm], 0.0)
        u = u.masked_fill(bad, math.nan)
    return (scale * u).to(g.dtype).contiguous()


@without_autocast
def unit_direction_backward(grad, g, norm, scale):
    """scale * (z - u <u, z>) / ||g|| with u = g/||g||; zero where the direction is zero, and for "sign"."""
    if norm == "sign" or g.numel() == 0:
        return torch.zeros_like(g, memory_format=torch.contiguous_format)
    dims = DIRECTION_DIMS[norm]
    u, length, power, bad = normalized(g.to(working_dtype(g)), dims, 0.0)
    z = grad.to(u.dtype)
    length = torch.where(length > 0, length, math.inf)
    tangent = (z - (z * u).sum(dims, keepdim=True) * u) / length
    z = (scale * tangent / power).masked_fill(bad, math.nan)
    return z.to(g.dtype).contiguous()


def random_bits(shape: torch.Size, seed: int, stream: int, device: torch.device) -> Tensor:
    """32 random bits per element from a counter: mix(seed, stream, index), the same on every device."""
    key = (0x9E3779B9 * (stream + 1) + 0x85EBCA6B * seed) & 0xFFFFFFFF
    x = torch.arange(math.prod(shape), device=device) + key
    for _ in range(2):
        x = x & 0xFFFFFFFF
        x = ((x ^ (x >> 16)) * 0x21F0AAAD) & 0xFFFFFFFF
        x = ((x ^ (x >> 15)) * 0x735A2D97) & 0xFFFFFFFF
        x = (x ^ (x >> 15)) + key
    return (x & 0xFFFFFFFF).view(shape)


def stochastic_round(x: Tensor, dtype: torch.dtype, bits: Tensor) -> Tensor:
    """x rounded up or down to dtype with mean x: floor(x/q + u) q, q dtype's spacing at x, u in [0, 1)."""
    precision, smallest = {torch.bfloat16: (8, -133), torch.float16: (11, -24)}[dtype]
    exponent = torch.frexp(x).exponent.clamp(-149, 128)
    spacing = torch.exp2((exponent - precision).clamp(min=smallest).to(x.dtype))
    dropped = 24 - precision
    u = (bits >> (32 - dropped)).to(x.dtype) * 2.0**-dropped
    return torch.where(x.isfinite(), torch.floor(x / spacing + u) * spacing, x).to(dtype)


@without_autocast
def lmo_step_(weights, grads, momenta, norm, shrinks, steps, momentum, nesterov, grad_decay,
              coefficients, restarts, form, compute, eps, seed):  # fmt: skip
    """W <- shrink W - step u(d), d the momentum average of g; without momenta g itself (the light form)."""
    for i, (w, g) in enumerate(zip(weights, grads, strict=True)):
        if w.numel() == 0:
            continue
        if momenta:
            m = momenta[i]
            wide = torch.promote_types(working_dtype(m), working_dtype(g))
            m.copy_(torch.lerp(m.to(wide), g.to(wide), 1 - momentum))
            d = torch.lerp(g.to(wide), m.to(wide), momentum) if nesterov else m
        else:
            d = g
        if norm == "spectral":
            d = d.to(working_dtype(d))
            u, _, _ = polar(d, coefficients, restarts, form, compute, "fro", eps, -1.0, 0, False)
        else:
            u = unit_direction(d.to(working_dtype(d)), norm, 1.0)
        wide = working_dtype(w)
        value = -steps[i] * u.to(wide)
        if shrinks[i] != 0:  # 0 W is 0, whatever W holds
            value += shrinks[i] * w.to(wide)
        if seed >= 0 and w.dtype in (torch.bfloat16, torch.float16):
            value = stochastic_round(value, w.dtype, random_bits(w.shape, seed, i, w.device))
        w.copy_(value)
        if not momenta and grad_decay != 1.0:
            g.mul_(grad_decay)


JORDAN = (3.4445, -4.7750, 2.0315)
FIXED_SETS = {
    "you": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    "cans": (
        (8.4703, -25.1081, 18.6293),
        (4.1828, -3.1087, 0.5806),
        (3.9619, -2.9541, 0.5630),
        (3.2866, -2.4647, 0.5074),
        (2.2737, -1.6447, 0.4162),
    ),
    "deepseek": (JORDAN,) * 8 + ((2.0, -1.5, 0.5),) * 2,
}
CUSHION = 0.02407327424182761  # Polar Express: the design interval's ends are at most this ratio apart
CONVERGED = 1 - 5e-6  # an interval this narrow is a point for float64: Taylor's quintic from there on


def minimax_quintic(low: float, high: float) -> tuple[float, float, float]:
    """a x + b x^3 + c x^5 closest to 1 on [low, high] in the maximum norm, by Remez exchange.

    With t = x^2, p(x)/x is a quadratic in t, so its third divided difference over the four points of
    alternation is zero: that gives the error E. Interpolation through three points gives a, b, c; the zeros
    of p' are the next points.
    """
    if low / high >= CONVERGED:
        return 1.875 / high, -1.25 / high**3, 0.375 / high**5
    points = [low, (3 * low + high) / 4, (low + 3 * high) / 4, high]
    for _ in range(30):  # converges quadratically
        t = [x * x for x in points]
        weight = [1 / (x * math.prod(t[i] - s for s in t if s != t[i])) for i, x in enumerate(points)]
        error = sum(weight) / (weight[0] - weight[1] + weight[2] - weight[3])
        y = [(1 - error) / points[0], (1 + error) / points[1], (1 - error) / points[2]]
        slope = (y[1] - y[0]) / (t[1] - t[0])
        c = ((y[2] - y[1]) / (t[2] - t[1]) - slope) / (t[2] - t[0])
        b = slope - c * (t[0] + t[1])
        a = y[0] - (b + c * t[0]) * t[0]
        root = math.sqrt(9 * b * b - 20 * a * c)
        points[1:3] = math.sqrt((-3 * b - root) / (10 * c)), math.sqrt((-3 * b + root) / (10 * c))
    return a, b, c


@functools.cache
def polar_express(steps: int, lower_bound: float, safety: float) -> tuple[tuple[float, float, float], ...]:
    """Greedy composition: each quintic is the minimax one on the interval that its predecessors map to."""
    low, high, rows = lower_bound, 1.0, []
    for _ in range(steps):
        converged = low / high >= CONVERGED
        a, b, c = minimax_quintic(max(low, CUSHION * high), high)
        at_low, at_high = (a * x + b * x**3 + c * x**5 for x in (low, high))
        centre = (at_low + at_high) / 2  # the cushion moves the image off centre
        low, high = at_low / centre, 2 - at_low / centre
        s = 1.0 if converged else safety
        rows.append((a / centre / s, b / centre / s**3, c / centre / s**5))
    return tuple(rows)
