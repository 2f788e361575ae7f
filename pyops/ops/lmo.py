"""Linear minimisation oracles: the orthogonal polar factor, its relatives over other norms, and the fused
step.

For a norm ball of radius r, lmo(s) = argmin {<s, x> : ||x|| <= r}, so that <s, lmo(s)> = -r ||s||_dual. The
spectral ball needs the polar factor U V^T of s = U S V^T, computed by an odd polynomial iteration of
matrix products.

Pethick, Xie, Antonakopoulos, Zhu, Silveti-Falls, Cevher: "Training Deep Learning Models with Norm-Constrained
LMOs", ICML 2025.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from pyops import _library
from pyops.ops import _checks as checks
from pyops.ops._registration import batched, batched_first_argument, like, triton
from pyops.reference import lmo as reference

COMPUTE = {torch.float64: "float64", torch.float32: "float32", torch.bfloat16: "bfloat16", "bf16x3": "bf16x3"}
COMPUTE_DEFAULT = {
    torch.float64: "float64",
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "bf16x3",
}
# Defaults: six Polar Express steps reach 1 +- 0.006 for singular values above 1e-3 of the Frobenius norm;
# five Newton-Schulz steps are torch.optim.Muon's.
STEPS_DEFAULT = {"polar_express": 6, "newton_schulz": 5}
ADAPTIVE_MAX_STEPS = 12
ADAPTIVE_TOL = {"float64": 1e-10, "float32": 1e-4, "bf16x3": 1e-3, "bfloat16": 3e-2}
FORMS = ("auto", "direct", "gram")
NORMALIZE = ("fro", "schatten4")
SCALES = ("rms", "rms_max", "out", "none")
FOR_A_VECTOR = 'for a vector, such as a bias: pyops.lmo(g, norm="rms") or pyops.lmo(g, norm="euclidean")'
# norm: (fewest dimensions, options that mean something for it, default of `normalized`)
NORMS: dict[str, tuple[int, tuple[str, ...], bool]] = {
    "spectral": (2, ("normalized", "max", "transpose"), True),
    "spectral_conv": (3, (), True),
    "spectral_conv_tap": (3, (), True),
    "sign": (2, ("normalized", "transpose"), True),
    "col": (2, ("normalized", "transpose"), False),
    "row": (2, ("normalized", "transpose"), True),
    "rms": (0, (), True),
    "euclidean": (0, (), True),
    "max": (0, (), True),
}


def polar_coefficients(
    method: str, steps: int | None = None, lower_bound: float = 1e-3, safety: float = 1.01
) -> tuple[tuple[float, float, float], ...]:
    """Coefficients (a, b, c) of each step X <- a X + b (X X^T) X + c (X X^T)^2 X.

    Args:
        method: ``"polar_express"`` (Amsel, Persson, Musco, Gower 2025: each step is the quintic closest to 1
            on the interval that the steps before it map the singular values to, computed here for any
            ``steps`` and ``lower_bound``); ``"newton_schulz"`` (3.4445, -4.7750, 2.0315 each step, Jordan
            2024, as in ``torch.optim.Muon``); or one of the published lists ``"you"`` (5 steps), ``"cans"``
            (5) and ``"deepseek"`` (10).
        steps: how many, at least 0; default 6 for polar_express, 5 for newton_schulz, the list's length
            otherwise.
        lower_bound: smallest singular value, relative to the Frobenius norm, that Polar Express maps to about
            1; in (0, 1). 1e-3 as published. The other methods do not use it.
        safety: at least 1; Polar Express uses (a/s, b/s^3, c/s^5) until its interval has converged, so that a
            largest singular value up to ``safety``, as rounding makes it, stays inside. 1.01 as published.

    Returns:
        One (a, b, c) per step.

    Raises:
        TypeError, ValueError: for an argument outside what is listed, naming it.

    >>> len(polar_coefficients("polar_express", 8))
    8
    >>> polar_coefficients("newton_schulz", 1)
    ((3.4445, -4.775, 2.0315),)
    """
    known = (*STEPS_DEFAULT, *reference.FIXED_SETS)
    checks.one_of("method", method, known)
    length = STEPS_DEFAULT.get(method) or len(reference.FIXED_SETS[method])
    steps = length if steps is None else checks.count("steps", steps)
    lower_bound, safety = checks.number("lower_bound", lower_bound), checks.number("safety", safety)
    if not 0.0 < lower_bound < 1.0:
        raise ValueError(f"lower_bound must be in (0, 1), got {lower_bound}")
    if not safety >= 1.0:
        raise ValueError(f"safety must be at least 1, got {safety}")
    if method == "polar_express":
        return reference.polar_express(steps, lower_bound, safety)
    if method == "newton_schulz":
        return (reference.JORDAN,) * steps
    if steps != length:
        raise ValueError(f"steps must be {length} for method={method!r}, a published list, got {steps}")
    return reference.FIXED_SETS[method]


def polar(
    g: Tensor,
    *,
    method: str = "polar_express",
    steps: int | str | None = None,
    coefficients: Sequence[Sequence[float]] | None = None,
    eps: float = 0.0,
    compute_dtype: torch.dtype | str | None = None,
    form: str = "auto",
    normalize: str = "fro",
    tol: float | None = None,
    rcond: float | None = None,
    return_residual: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Approximate orthogonal polar factor U V^T of each matrix g = U S V^T.

    X_0 = g / max(||g||_F, eps); X_{j+1} = a_j X + b_j A X + c_j A^2 X with A = X X^T; the result is X_k. It
    acts on the singular values alone: s -> p_k(...p_1(s / ||g||_F)). With s_0 the smallest singular value
    over the Frobenius norm, the result's singular values lie in [0.994, 1.001] for six Polar Express steps
    and s_0 >= 1e-3, and in [0.682, 1.134] for five Newton-Schulz steps and s_0 >= 1e-2; smaller ones come out
    smaller. The normalisation is safe from the smallest subnormal number to the largest finite one.

    Args:
        g: [..., rows, cols], float64, float32, bfloat16 or float16, any strides; never written to. A kernel
            [c_out, c_in, k, k] counts as c_out c_in matrices: for one, see ``lmo(norm="spectral_conv")``.
        method: ``"polar_express"`` (default), ``"newton_schulz"`` (the iteration of ``torch.optim.Muon``), or
            ``"svd"``: the exact partial isometry by a float64 SVD, which takes none of ``steps``,
            ``coefficients``, ``eps``, ``compute_dtype``, ``form``, ``normalize`` and ``tol``.
        steps: number of steps k; default 6 for polar_express, 5 for newton_schulz. 0 returns the normalised
            input. ``"adaptive"`` lets each matrix stop as soon as ||A^2 - A||_F is at most ``tol *
            ||A||_F``, A = X X^T, after at most 12 steps; it needs an iteration that converges, so not
            newton_schulz.
        coefficients: one (a, b, c) per step, instead of the method's own; see :func:`polar_coefficients`.
        eps: lower limit of the norm that g is divided by, in g's units. 0 (default) makes the result
            independent of the scale of g; torch.optim.Muon has 1e-7.
        compute_dtype: arithmetic of the products: ``torch.float64``, ``torch.float32``, ``torch.bfloat16``
            (operands in bfloat16, sums in float32) or ``"bf16x3"`` (operands split in two bfloat16 parts;
            error about 5e-5, which is not float32's 2e-6). Default: the dtype of g, and bf16x3 for float16.
        form: ``"direct"``; ``"gram"``, which iterates on A (fewer operations for oblong matrices, but for
            small singular values up to ten times the rounding error); ``"auto"`` (default) takes gram from
            aspect ratio 1.5 on (CPU; the Triton kernel from 1.75 on).
        normalize: ``"fro"``, or ``"schatten4"``: divide in step 1 by ||A||_F^(1/2) as well, a sharper bound
            on the largest singular value that is worth about one step.
        tol: for ``steps="adaptive"``; default 1e-10, 1e-4, 1e-3, 3e-2 for float64, float32, bf16x3, bfloat16.
        rcond: for ``method="svd"``: singular values up to ``rcond * largest`` count as zero; default
            ``max(rows, cols) * eps`` as in ``torch.linalg.matrix_rank``, with the eps of float64 for float64
            and of float32 for the others: the values of a 16-bit matrix are taken as exact.
        return_residual: also return ||A^2 - A||_F, which is 0 exactly for partial isometries of any rank.

    Returns:
        The factor, in the shape and dtype of g, contiguous. With ``return_residual``, also the residual [...]
        in float32 (float64 for float64 g), which carries no gradient.

        A zero matrix gives exactly zero; 1 x n and n x 1 give g/||g||_F; NaN or Inf in a matrix makes that
        matrix NaN and leaves its neighbours alone. A tall matrix gives the transpose of the wide result bit
        for bit.

        The gradient is the exact derivative of the computed iteration (for svd: of U V^T at constant rank).
        Second derivatives and forward mode raise RuntimeError.

    Raises:
        TypeError, ValueError: before any work, naming the argument, what was received and what is wanted.

    Jordan 2024, "Muon"; Amsel, Persson, Musco, Gower 2025, "The Polar Express"; Pethick et al., ICML 2025.

    >>> g = torch.tensor([[3.0, 0.0, 0.0], [0.0, 0.5, 0.0]])
    >>> polar(g, method="svd")
    tensor([[1., 0., 0.],
            [0., 1., 0.]])
    >>> p, residual = polar(g, return_residual=True)
    >>> bool((p @ p.mT - torch.eye(2)).abs().max() < 0.02), bool(residual < 0.02)
    (True, True)
    """
    checks.matrix("g", g, 2, FOR_A_VECTOR)
    if isinstance(method, str) and method in reference.FIXED_SETS:
        instead = f"coefficients=pyops.polar_coefficients({method!r})"
        raise ValueError(f"method={method!r} is a list of coefficients: give {instead} instead of it")
    checks.one_of("method", method, (*STEPS_DEFAULT, "svd"))
    if rcond is not None and method != "svd":
        raise ValueError(f'rcond needs method="svd", got rcond={rcond} with method={method!r}')
    if method == "svd":
        checks.unused(
            'method="svd"',
            steps=(steps, None),
            coefficients=(coefficients, None),
            eps=(eps, 0.0),
            compute_dtype=(compute_dtype, None),
            form=(form, "auto"),
            normalize=(normalize, "fro"),
            tol=(tol, None),
        )
        return _polar_svd(g, rcond, return_residual)
    checks.one_of("form", form, FORMS)
    checks.one_of("normalize", normalize, NORMALIZE)
    eps = checks.nonnegative("eps", eps)
    compute = _compute(g, compute_dtype)
    adaptive = steps == "adaptive"
    if adaptive:
        if method == "newton_schulz" and coefficients is None:
            raise ValueError('steps="adaptive" needs an iteration that converges, got method="newton_schulz"')
        if form == "gram":
            raise ValueError('form must be "auto" or "direct" with steps="adaptive", got "gram"')
    elif isinstance(steps, str):
        raise ValueError(f'steps must be an integer, None or "adaptive", got {steps!r}')
    elif tol is not None:
        raise ValueError(f'tol needs steps="adaptive", got tol={tol} with steps={steps}')
    rows = _rows(method, ADAPTIVE_MAX_STEPS if adaptive and coefficients is None else steps, coefficients)
    flat = [value for row in rows for value in row]
    limit = -1.0
    if adaptive:
        limit = ADAPTIVE_TOL[compute] if tol is None else checks.nonnegative("tol", tol)
        form = "direct"
    # No restarts of the Gram form are named: the kernel chooses.
    p, residual, _ = torch.ops.pyops.polar(
        g, flat, [], form, compute, normalize, eps, limit, 0, return_residual
    )
    return (p, residual) if return_residual else p


def _polar_svd(g: Tensor, rcond: float | None, return_residual: bool) -> Tensor | tuple[Tensor, Tensor]:
    if rcond is None:
        rcond = max(g.shape[-2:]) * torch.finfo(reference.working_dtype(g)).eps
    p = torch.ops.pyops.polar_svd(g, checks.nonnegative("rcond", rcond))
    if not return_residual:
        return p
    x = p.detach().to(reference.working_dtype(g))
    a = x.mT @ x if x.shape[-2] > x.shape[-1] else x @ x.mT
    return p, reference.idempotency(a, a @ a)


def spectral_lmo(
    g: Tensor, radius: float = 1.0, *, scale: str = "rms", **polar_args: Any
) -> Tensor | tuple[Tensor, Tensor]:
    """argmin of <g, x> over the spectral ball: -radius * c * polar(g), with c from the shape.

    Args:
        g: [..., rows, cols] = [..., d_out, d_in]; see :func:`polar`.
        radius: of the ball, at least 0.
        scale: the norm of the ball. ``"rms"`` (default): sqrt(d_in/d_out) ||x||_2, the operator norm from RMS
            to RMS vectors, c = sqrt(d_out/d_in); ``"rms_max"``: c = max(1, sqrt(d_out/d_in)), for image
            inputs; ``"out"``: c = sqrt(d_out); ``"none"``: ||x||_2, c = 1.
        polar_args: passed to :func:`polar`; ``method="svd"`` gives the exact argmin.

    Returns:
        The minimiser in the shape and dtype of g; with ``return_residual=True`` also polar's residual.

    Raises:
        TypeError, ValueError: as :func:`polar`, and for a radius or scale outside what is listed.

    Pethick et al., ICML 2025, Table of norm choices.

    >>> g = torch.diag(torch.tensor([4.0, 1.0]))
    >>> spectral_lmo(g, 2.0, method="svd")
    tensor([[-2., -0.],
            [-0., -2.]])
    """
    checks.matrix("g", g, 2, FOR_A_VECTOR)
    checks.one_of("scale", scale, SCALES)
    radius = checks.nonnegative("radius", radius)
    d_out, d_in = g.shape[-2], max(g.shape[-1], 1)
    factor = {
        "rms": math.sqrt(d_out / d_in),
        "rms_max": max(1.0, math.sqrt(d_out / d_in)),
        "out": math.sqrt(d_out),
        "none": 1.0,
    }[scale]
    result = polar(g, **polar_args)
    if isinstance(result, tuple):
        return -radius * factor * result[0], result[1]
    return -radius * factor * result


def lmo(
    g: Tensor,
    *,
    norm: str,
    radius: float = 1.0,
    normalized: bool | None = None,
    max: bool = False,
    transpose: bool = False,
    **polar_args: Any,
) -> Tensor:
    """argmin of <g, x> over the ball ||x|| <= radius of the named norm; g is [..., d_out, d_in] unless said.

    ===================  ==============================  ==================================================
    norm                 ball                            -lmo(g) / radius
    ===================  ==============================  ==================================================
    spectral             RMS -> RMS operator norm        sqrt(d_out/d_in) U V^T; normalized=False: sqrt(d_out)
                                                         U V^T; max=True: the factor at least 1
    spectral_conv        the same of the reshape         U V^T of [c_out, c_in k], times sqrt(c_out/c_in)/k
    spectral_conv_tap    largest over the k taps         U V^T of each tap [c_out, c_in], the same factor
    sign                 1 -> inf (entries)              sign(g)/d_in; normalized=False: sign(g)
    col                  1 -> RMS (columns)              sqrt(d_out) g_:j/||g_:j||; normalized=True: /d_in
    row                  RMS -> inf (rows)               g_i:/(sqrt(d_in) ||g_i:||); normalized=False: no sqrt
    rms                  RMS of the last dimension       g/sqrt(mean(g^2)), for biases [..., d] and norm gains
    euclidean            Frobenius, or l2 of a vector    g/||g||
    max                  largest entry                   sign(g)
    ===================  ==============================  ==================================================

    Args:
        g: float64, float32, bfloat16 or float16, any strides. [..., d_out, d_in] with leading batch
            dimensions; for spectral_conv and spectral_conv_tap one weight [c_out, c_in, *kernel] with k = the
            product of kernel; for rms [..., d]; for euclidean and max also a vector or a scalar.
        norm: one of the table.
        radius: of the ball, at least 0.
        normalized: as in the table; default True for spectral, sign and row, False for col.
        max: for spectral: max(1, factor), for image inputs.
        transpose: for spectral, sign, col and row: g is [..., d_in, d_out], as an embedding's weight is.
        polar_args: for the spectral norms: passed to :func:`polar`.

    Returns:
        The minimiser, in the shape and dtype of g. Where g, a column or a row is zero, zero is returned,
        which is a minimiser too. NaN or Inf makes its column, row or matrix NaN (its element for sign and
        max).

    Raises:
        TypeError, ValueError: before any work, naming the argument, what was received and what is wanted.

    Pethick et al., ICML 2025, Table of norm choices.

    >>> lmo(torch.tensor([[3.0, -4.0]]), norm="row", radius=2.0, normalized=False)
    tensor([[-1.2000,  1.6000]])
    >>> lmo(torch.tensor([3.0, -4.0]), norm="max")
    tensor([-1.,  1.])
    """
    checks.one_of("norm", norm, NORMS)
    fewest, options, normalized_default = NORMS[norm]
    others = [repr(name) for name, (least, *_) in NORMS.items() if least < fewest]
    checks.matrix("g", g, fewest, f"norms that take fewer: {', '.join(others)}")
    radius = checks.nonnegative("radius", radius)
    given = {"normalized": (normalized, None), "max": (max, False), "transpose": (transpose, False)}
    for name, (value, default) in given.items():
        if not isinstance(value, bool | type(default)):
            raise TypeError(f"{name} must be a bool, got {checks.shown(value)}")
    checks.unused(f"norm={norm!r}", **{name: given[name] for name in given if name not in options})
    if polar_args and not norm.startswith("spectral"):
        raise TypeError(f"norm={norm!r} takes no argument {next(iter(polar_args))!r}")
    if polar_args.get("return_residual"):
        raise ValueError("return_residual must be False in lmo, got True; spectral_lmo returns it")
    normalized = normalized_default if normalized is None else normalized

    if norm in ("spectral_conv", "spectral_conv_tap"):
        return _conv_lmo(g, norm, radius, polar_args)
    if norm in ("rms", "euclidean", "max"):
        return _vector_lmo(g, norm, radius)
    if transpose:
        g = g.mT
    d_out, d_in = g.shape[-2:]
    inner = d_in or 1
    if norm == "spectral":
        factor = math.sqrt(d_out / inner if normalized else d_out)
        u = -radius * (1.0 if max and factor < 1.0 else factor) * _factor(g, polar_args)
    else:
        factor = {
            "sign": 1.0 / inner if normalized else 1.0,
            "col": math.sqrt(d_out) / (inner if normalized else 1),
            "row": 1.0 / math.sqrt(inner) if normalized else 1.0,
        }[norm]
        u = torch.ops.pyops.unit_direction(g, norm, -radius * factor)
    return u.mT.contiguous() if transpose else u


def _factor(g: Tensor, polar_args: dict[str, Any]) -> Tensor:
    """``polar`` where the residual is not asked for."""
    return cast(Tensor, polar(g, **polar_args))


def _conv_lmo(g: Tensor, norm: str, radius: float, polar_args: dict[str, Any]) -> Tensor:
    c_out, c_in, *kernel = g.shape
    taps = math.prod(kernel)
    factor = -radius * math.sqrt(c_out / (c_in or 1)) / (taps or 1)
    if norm == "spectral_conv":
        return factor * _factor(g.reshape(c_out, c_in * taps), polar_args).reshape(g.shape)
    by_tap = g.reshape(c_out, c_in, taps).movedim(-1, 0)
    return (factor * _factor(by_tap, polar_args)).movedim(0, -1).reshape(g.shape).contiguous()


def _vector_lmo(g: Tensor, norm: str, radius: float) -> Tensor:
    matrix = g.reshape(1, -1) if g.ndim < 2 else g
    if norm == "rms":
        u = torch.ops.pyops.unit_direction(matrix, "row", -radius * math.sqrt(matrix.shape[-1]))
    else:
        u = torch.ops.pyops.unit_direction(matrix, {"euclidean": "euclidean", "max": "sign"}[norm], -radius)
    return u.reshape(g.shape)


def lmo_step_(
    weights: Sequence[Tensor],
    grads: Sequence[Tensor],
    momenta: Sequence[Tensor],
    norm: str,
    shrinks: Sequence[float],
    steps: Sequence[float],
    momentum: float,
    nesterov: bool,
    grad_decay: float,
    coefficients: Sequence[float],
    restarts: Sequence[int],
    form: str,
    compute: str,
    eps: float,
    seed: int,
) -> None:
    """One optimizer step over tensors of one norm, in place; the optimizers check its settings.

    For each i, with matrices [rows, cols] or [batch, rows, cols] of any strides and floating dtypes:

        m <- m + (1 - momentum) (g - m),  d = g + momentum (m - g) if nesterov else m    (momenta given)
        d = g, and afterwards g <- grad_decay g                                           (momenta empty)
        W <- shrinks[i] W - steps[i] u(d)

    u is the polar iteration ("spectral": ``coefficients`` flat, a_1, b_1, c_1, a_2, ...) or the direction
    "sign", "col", "row" or "euclidean". ``seed >= 0`` rounds bfloat16 and float16 weights stochastically.

    Raises:
        RuntimeError: when a tensor requires grad while gradients are recorded: call it under
            ``torch.no_grad()``.
        ValueError: for lists of different lengths.
    """
    tensors = [*weights, *grads, *momenta]
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        raise RuntimeError("lmo_step_ writes its tensors in place: call it under torch.no_grad()")
    wanted = {"grads": grads, "shrinks": shrinks, "steps": steps, "momenta": momenta or weights}
    for name, values in wanted.items():
        if len(values) != len(weights):
            raise ValueError(f"{name} must have one entry per weight, {len(weights)}, got {len(values)}")
    torch.ops.pyops.lmo_step_(
        weights, grads, momenta, norm, shrinks, steps, momentum, nesterov, grad_decay,
        coefficients, restarts, form, compute, eps, seed,
    )  # fmt: skip
    if not torch.compiler.is_compiling():  # a kernel writes through pointers; autograd must know of it
        torch.autograd.graph.increment_version([*weights, *(momenta or (grads if grad_decay != 1.0 else ()))])


def _compute(g: Tensor, compute_dtype: Any) -> str:
    if compute_dtype is None:
        return COMPUTE_DEFAULT[g.dtype]
    if not isinstance(compute_dtype, torch.dtype | str) or compute_dtype not in COMPUTE:
        wanted = ", ".join(map(str, COMPUTE))
        raise ValueError(f"compute_dtype must be None or one of {wanted}, got {checks.shown(compute_dtype)}")
    return COMPUTE[compute_dtype]


@torch.compiler.assume_constant_result  # the compiler need not see how these numbers come about
def _method_rows(method: str, steps: int | None) -> Sequence[Sequence[float]]:
    return polar_coefficients(method, steps)


def _rows(method: str, steps: Any, coefficients: Any) -> Sequence[Sequence[float]]:
    if coefficients is None:
        return _method_rows(method, steps if steps is None else checks.count("steps", steps))
    wrong = f"coefficients must be finite triples (a, b, c), one per step, got {checks.shown(coefficients)}"
    try:
        rows = [tuple(map(float, row)) for row in coefficients]
    except TypeError as error:
        raise TypeError(wrong) from error
    if any(len(row) != 3 or not all(map(math.isfinite, row)) for row in rows):
        raise ValueError(wrong)
    if steps not in (None, "adaptive") and checks.count("steps", steps) != len(rows):
        raise ValueError(f"steps must be the number of coefficients, {len(rows)}, or None, got {steps}")
    return rows


# Registration


def _polar_fake(g, coefficients, restarts, form, compute, normalize, eps, tol, min_steps, with_residual):
    shape = g.shape[:-2] if with_residual or tol >= 0 else (0,)
    residual = g.new_empty(shape, dtype=reference.working_dtype(g))
    return like(g), residual, g.new_empty(shape, dtype=torch.int64)


def _polar_vmap(info, in_dims, g, *args):
    p, residual, steps = torch.ops.pyops.polar(g.movedim(in_dims[0], 0), *args)
    reported = 0 if args[8] or args[6] >= 0 else None
    return (p, residual, steps), (0, reported, reported)


def _polar_context(ctx, inputs, output):
    g, coefficients, _, _, _, normalize, eps, *_ = inputs
    ctx.mark_non_differentiable(output[1], output[2])
    ctx.save_for_backward(g, output[2])
    ctx.settings = coefficients, normalize, eps


def _polar_grad(ctx, grad, *_):
    g, steps = ctx.saved_tensors
    return torch.ops.pyops.polar_backward(grad, g, *ctx.settings, steps), *(None,) * 9


def _polar_backward_vmap(info, in_dims, grad, g, coefficients, normalize, eps, steps):
    grad, g = batched(info, in_dims[:2], grad, g)
    if steps.numel() > 0:
        (steps,) = batched(info, in_dims[5:], steps)
    return torch.ops.pyops.polar_backward(grad, g, coefficients, normalize, eps, steps), 0


def _polar_svd_grad(ctx, grad):
    (g,) = ctx.saved_tensors
    return torch.ops.pyops.polar_svd_backward(grad, g, ctx.rcond), None


def _polar_svd_context(ctx, inputs, output):
    ctx.save_for_backward(inputs[0])
    ctx.rcond = inputs[1]


def _polar_svd_backward_vmap(info, in_dims, grad, g, rcond):
    return torch.ops.pyops.polar_svd_backward(*batched(info, in_dims[:2], grad, g), rcond), 0


def _no_second_derivative(ctx, grad):
    raise RuntimeError("polar has no second derivative: its gradient cannot be differentiated again")


def _register_gradient(name: str, schema: str, vmap: Callable) -> None:
    """A gradient of polar: plain torch on every device."""
    _library.register(
        name,
        schema,
        reference=getattr(reference, name),
        fake=lambda grad, *args: like(grad),
        vmap=vmap,
        backward=_no_second_derivative,
        plain=True,
    )


def _direction_grad(ctx, grad):
    (g,) = ctx.saved_tensors
    return reference.unit_direction_backward(grad, g, *ctx.settings), None, None


def _direction_context(ctx, inputs, output):
    ctx.save_for_backward(inputs[0])
    ctx.settings = inputs[1:]


def _polar_amx(g, coefficients=(), restarts=(), form="auto", compute=None, *_: Any) -> bool:
    return (compute or COMPUTE_DEFAULT[g.dtype]) != "float64"


def _step_amx(*args: Any) -> bool:
    return args[3] == "spectral" and args[12] != "float64"


_library.register(
    "polar",
    "(Tensor g, float[] coefficients, int[] restarts, str form, str compute, str normalize, float eps, "
    "float tol, int min_steps, bool with_residual) -> (Tensor, Tensor, Tensor)",
    reference=reference.polar,
    fake=_polar_fake,
    cuda=triton("lmo", "polar"),
    vmap=_polar_vmap,
    backward=_polar_grad,
    setup_context=_polar_context,
    uses_amx=_polar_amx,
)
_register_gradient(
    "polar_backward",
    "(Tensor grad, Tensor g, float[] coefficients, str normalize, float eps, Tensor steps) -> Tensor",
    _polar_backward_vmap,
)
_library.register(
    "polar_svd",
    "(Tensor g, float rcond) -> Tensor",
    reference=reference.polar_svd,
    fake=lambda g, rcond: like(g),
    vmap=batched_first_argument("polar_svd"),
    backward=_polar_svd_grad,
    setup_context=_polar_svd_context,
    plain=True,
)
_register_gradient(
    "polar_svd_backward", "(Tensor grad, Tensor g, float rcond) -> Tensor", _polar_svd_backward_vmap
)
_library.register(
    "unit_direction",
    "(Tensor g, str norm, float scale) -> Tensor",
    reference=reference.unit_direction,
    fake=lambda g, norm, scale: like(g),
    vmap=batched_first_argument("unit_direction"),
    backward=_direction_grad,
    setup_context=_direction_context,
)
_library.register(
    "lmo_step_",
    "(Tensor(a!)[] weights, Tensor(b!)[] grads, Tensor(c!)[] momenta, str norm, float[] shrinks, "
    "float[] steps, float momentum, bool nesterov, float grad_decay, float[] coefficients, int[] restarts, "
    "str form, str compute, float eps, int seed) -> ()",
    reference=reference.lmo_step_,
    fake=lambda *args: None,
    cuda=triton("lmo", "lmo_step_"),
    uses_amx=_step_amx,
)
