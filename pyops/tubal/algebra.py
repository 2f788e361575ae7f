"""The algebra of tubal tensors besides the product: transpose, identity, inverses, norms and ranks.

Everything works face by face in the transform domain, on half of the faces of real tensors, with real
matrices for real faces: real tensors give exactly real results. Arguments may be tensors or
:class:`HalfFaces`; results are of the same kind. ``transform``, ``layout`` and ``order`` describe tensors;
HalfFaces have their own, and others are refused. bfloat16 and float16 tensors are computed in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from pyops.ops import _checks as checks
from pyops.ops import tubal as ops
from pyops.reference import tubal as reference
from pyops.tubal.faces import (
    HalfFaces,
    _pick,
    check_own,
    enter,
    map_faces,
    matrices,
    real_dtype,
    symmetry,
    tube_fft,
    unitary_scale,
)

T = TypeVar("T", Tensor, HalfFaces)
Which = str | Tensor | Sequence[Tensor] | None  # a transform; None: the DFT, or what HalfFaces have
CONVENTIONS = ("mean", "sum")


def ttranspose(a: T, *, transform: Which = None, layout: str = "last", order: int = 3) -> T:
    """The T-transpose: the conjugate transpose of each face.

    For the DFT that is every slice transposed (and conjugated) and slices 1 ... n3 - 1 in reverse order, with
    no arithmetic; for a real transform every slice transposed.

    Args:
        a: [..., n1, n2, n3] or :class:`HalfFaces`; ``transform``, ``layout``, ``order`` as in :func:`tprod`.

    Returns:
        [..., n2, n1, n3], contiguous.

    Raises:
        TypeError, ValueError: naming the argument.

    Kilmer, Martin 2011.

    >>> ttranspose(torch.tensor([[[1, 2, 3.0]]]))
    tensor([[[1., 3., 2.]]])
    """
    if isinstance(a, HalfFaces):
        check_own("a", a, transform, layout, order)
        return a.H
    ops.check_tubal("a", a, layout, order)
    t = ops.resolve(
        ops.DFT if transform is None else transform, ops.tube_sizes(a, layout, order), a.dtype, a.device
    )
    if t.forward is None:
        return reference.ttranspose(a, layout == "first", order - 2)
    if not any(m.is_complex() for m in t.forward):
        x = a.mT if layout == "first" else a.transpose(-order, 1 - order)
        return x.conj().resolve_conj().contiguous()
    return tube_fft(a, transform=t, layout=layout, order=order).H.to_tensor(layout)  # type: ignore[arg-type]


def teye(
    n: int,
    n3: int | Sequence[int],
    *,
    transform: str | Tensor | Sequence[Tensor] = "dft",
    layout: str = "last",
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """The identity of the t-product: every face is the identity matrix.

    Args:
        n: rows and columns.
        n3: length of the tubes, at least 1, or (n3, ..., np).
        transform, layout: as in :func:`tprod`. For the DFT, slice 0 is the identity and the others are zero.
        dtype, device: default as for ``torch.eye``.

    Returns:
        [n, n, n3], or [n3, n, n] with layout first.

    Raises:
        TypeError, ValueError: naming the argument.

    Kilmer, Martin 2011.

    >>> from pyops.tubal import tprod
    >>> a = torch.randn(2, 3, 4)
    >>> torch.allclose(tprod(teye(2, 4), a), a, atol=1e-6)
    True
    """
    checks.count("n", n)
    checks.one_of("layout", layout, ops.LAYOUTS)
    sizes = (n3,) if isinstance(n3, int) else tuple(n3)
    if not sizes or any(checks.integer("n3", size) < 1 for size in sizes):
        raise ValueError(f"n3 must be at least 1, got {n3}")
    tube = torch.zeros(sizes, dtype=dtype, device=device)
    t = ops.resolve(transform, sizes, tube.dtype, tube.device)
    if t.inverse is None:
        tube[(0,) * len(sizes)] = 1
    else:
        wide = torch.promote_types(t.inverse[0].dtype, torch.promote_types(tube.dtype, torch.float32))
        one = torch.ones(*sizes, 1, 1, dtype=wide, device=device)
        tube = reference.from_faces(one, sizes, True, [m.to(wide) for m in t.inverse], False)[..., 0, 0]
        tube = tube if tube.is_complex() else tube.to(dtype or torch.get_default_dtype())
    eye = torch.eye(n, dtype=tube.dtype, device=device)
    x = tube[..., None, None] * eye
    return x if layout == "first" else reference.tubes_last(x, len(sizes)).contiguous()


def _refuse_singular(info: Tensor, name: str, a: HalfFaces) -> None:
    """Raises LinAlgError for the first face whose factorization met a zero pivot."""
    if torch.compiler.is_compiling() or info.device.type == "meta" or not bool((info != 0).any()):
        return
    where = (info != 0).nonzero()[0].tolist()
    batch, face = where[: -len(a.sizes)], where[-len(a.sizes) :]
    number = face[0] if len(face) == 1 else tuple(face)
    entry = f" of batch entry {tuple(batch)}" if batch else ""
    raise torch.linalg.LinAlgError(
        f"{name}: a must be invertible, got a singular matrix for face {number}{entry} (tubes of {a.sizes})"
    )


def _square(name: str, a: HalfFaces) -> None:
    if a.faces.shape[-1] != a.faces.shape[-2]:
        rows, columns = a.faces.shape[-2:]
        raise ValueError(f"{name} must be square, got n1 = {rows} and n2 = {columns}")


def tinv(a: T, *, transform: Which = None, layout: str = "last", order: int = 3) -> T:
    """The inverse in the t-product: A^-1 * A = A * A^-1 = I.

    Args:
        a: [..., n, n, n3] or :class:`HalfFaces`; ``transform``, ``layout``, ``order`` as in :func:`tprod`.

    Returns:
        As a. Differentiable.

    Raises:
        torch.linalg.LinAlgError: when a face is singular, naming it; one that is singular but for rounding is
            not found, as with ``torch.linalg.inv``.
        TypeError, ValueError: naming the argument.

    Kilmer, Martin 2011.

    >>> from pyops.tubal import tprod
    >>> a = torch.randn(3, 3, 4, dtype=torch.float64)
    >>> torch.allclose(tprod(tinv(a), a), teye(3, 4, dtype=torch.float64))
    True
    """
    h, leave = enter("a", a, transform, layout, order)
    _square("a", h)
    inverse, info = map_faces(torch.linalg.inv_ex, h)
    _refuse_singular(info, "tinv", h)
    return leave(matrices(h, inverse))


def tsolve(a: T, b: T, *, transform: Which = None, layout: str = "last", order: int = 3) -> T:
    """X with A * X = B for square A; for others ``tprod(tpinv(a), b)`` is the X of least squares.

    Args:
        a, b: [..., n, n, n3] and [..., n, m, n3], or both :class:`HalfFaces`; leading dimensions broadcast;
            ``transform``, ``layout``, ``order`` as in :func:`tprod`.

    Returns:
        [..., n, m, n3]. Differentiable.

    Raises:
        torch.linalg.LinAlgError: when a face is singular, naming it.
        TypeError, ValueError: naming the argument; for an a that is not square before anything else.

    Kilmer, Martin 2011.

    >>> from pyops.tubal import tprod
    >>> a, x = torch.randn(3, 3, 4, dtype=torch.float64), torch.randn(3, 2, 4, dtype=torch.float64)
    >>> torch.allclose(tsolve(a, tprod(a, x)), x)
    True
    """
    if isinstance(a, HalfFaces):
        rows, columns = a.faces.shape[-2:]
    else:
        ops.check_tubal("a", a, layout, order)
        rows, columns = ops.matrix_sizes(a, layout, order)
    if rows != columns:
        raise ValueError(
            f"a must be square, got n1 = {rows} and n2 = {columns}; tprod(tpinv(a), b) solves least squares"
        )
    if not isinstance(a, HalfFaces) and not isinstance(b, HalfFaces):
        ops.check_product(a, b, False, False, layout, order)
    h, leave = enter("a", a, transform, layout, order)
    k, leave_b = enter("b", b, transform, layout, order)
    if h.faces.shape[-1] != k.faces.shape[-2]:
        raise ValueError(f"b must have {h.faces.shape[-1]} rows, got {k.faces.shape[-2]}")
    x, y, dtype = h._with(k)
    batch = torch.broadcast_shapes(x.shape[:-2], y.shape[:-2])  # solve takes some batches for vectors
    left = HalfFaces(x.expand(*batch, *x.shape[-2:]), h.sizes, dtype=dtype, transform=h.transform)
    right = HalfFaces(y.expand(*batch, *y.shape[-2:]), h.sizes, dtype=dtype, transform=h.transform)
    solution, info = map_faces(torch.linalg.solve_ex, left, right)
    _refuse_singular(info, "tsolve", left)
    return leave_b(matrices(left, solution)) if isinstance(b, HalfFaces) else leave(matrices(left, solution))


def tpinv(
    a: T,
    *,
    rcond: float | None = None,
    per_face: bool = False,
    transform: Which = None,
    layout: str = "last",
    order: int = 3,
) -> T:
    """The Moore-Penrose inverse in the t-product.

    Args:
        a: [..., n1, n2, n3] or :class:`HalfFaces`; ``transform``, ``layout``, ``order`` as in :func:`tprod`.
        rcond: singular values of faces up to ``rcond`` times the largest of all faces count as zero; default
            max(n1, n2) eps, with the eps of float64 or float32.
        per_face: ``rcond`` is relative to the largest of each face instead.

    Returns:
        [..., n2, n1, n3]. Differentiable where the face ranks are constant.

    Raises:
        TypeError, ValueError: naming the argument.

    >>> from pyops.tubal import tprod
    >>> a = torch.randn(4, 2, 3, dtype=torch.float64)
    >>> torch.allclose(tprod(tpinv(a), a), teye(2, 3, dtype=torch.float64))
    True
    """
    h, leave = enter("a", a, transform, layout, order)
    checks.boolean("per_face", per_face)
    limit = _rtol("rcond", rcond, h)
    if 0 in h.faces.shape[-2:]:
        return leave(h.with_faces(h.faces.mH))
    cut = None
    if not per_face:
        with torch.no_grad():
            cut = (limit * _largest(face_values(h), h)).unsqueeze(-1)
    return leave(matrices(h, map_faces(lambda m: (_Pinv.apply(m, cut, limit),), h)[0]))


class _Pinv(torch.autograd.Function):
    """V diag(1/s where s > cut) U^H, and its derivative at constant rank, which needs no distinct s.

    dP = -P dA P + P P^H dA^H (I - A P) + (I - P A) dA^H P^H P. ``torch.linalg.pinv`` has the same, but is
    wrong for complex square matrices when compiled (torch 2.13).
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor, cut: Tensor | None, rtol: float) -> Tensor:
        u, s, vh = torch.linalg.svd(a, full_matrices=False)
        kept = s > (rtol * s[..., :1] if cut is None else cut.unsqueeze(-1))
        inverse = torch.where(kept, 1 / torch.where(kept, s, 1.0), 0.0)
        return vh.mH @ (inverse.unsqueeze(-1) * u.mH)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        ctx.save_for_backward(inputs[0], output)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        a, p = ctx.saved_tensors
        pg, gp = p @ g.mH, g.mH @ p  # products of sizes [n2, n2] and [n1, n1]
        inner = -p.mH @ g @ p.mH
        outer = (g.mH - a @ pg) @ p @ p.mH + p.mH @ p @ (g.mH - gp @ a)
        return inner + outer, None, None


def face_values(h: HalfFaces) -> Tensor:
    """Singular values [..., tubes, min(n1, n2)] of the faces, half of them where the others are equal."""
    return map_faces(lambda m: (torch.linalg.svdvals(m),), h)[0]


def _largest(values: Tensor, h: HalfFaces) -> Tensor:
    """[...]: the largest singular value of all faces."""
    flat = values.flatten(-1 - len(h.sizes))
    return flat.amax(-1) if flat.shape[-1] else flat.new_zeros(flat.shape[:-1])


def _rtol(name: str, rtol: float | None, h: HalfFaces) -> float:
    if rtol is None:
        return max(h.faces.shape[-2:]) * torch.finfo(h.faces.dtype).eps
    return checks.nonnegative(name, rtol)


def multi_rank(
    a: Tensor | HalfFaces,
    *,
    rtol: float | None = None,
    transform: Which = None,
    layout: str = "last",
    order: int = 3,
) -> Tensor:
    """The ranks of all faces.

    Args:
        a: [..., n1, n2, n3] or :class:`HalfFaces`; ``transform``, ``layout``, ``order`` as in :func:`tprod`.
        rtol: singular values up to ``rtol`` times the largest of all faces count as zero; default
            max(n1, n2) eps, with the eps of float64 or float32.

    Returns:
        [..., n3] (or [..., n3, ..., np]), int64.

    Raises:
        TypeError, ValueError: naming the argument.

    >>> multi_rank(torch.ones(2, 3, 4))  # a constant tube has one face that is not zero
    tensor([1, 0, 0, 0])
    """
    h, _ = enter("a", a, transform, layout, order)
    limit = _rtol("rtol", rtol, h)
    with torch.no_grad():
        values = face_values(h)
        cut = limit * _largest(values, h)
        ranks = (values > cut.reshape(*cut.shape, *(1,) * (len(h.sizes) + 1))).sum(-1)
    if not h.half:
        return ranks
    flat = _pick(ranks.flatten(-len(h.sizes)), -1, symmetry(h.sizes).source)
    return flat.unflatten(-1, h.sizes)


def tubal_rank(
    a: Tensor | HalfFaces,
    *,
    rtol: float | None = None,
    transform: Which = None,
    layout: str = "last",
    order: int = 3,
) -> Tensor:
    """The number of singular tubes that are not zero: the largest rank of a face.

    Args:
        a, rtol, transform, layout, order: as in :func:`multi_rank`.

    Returns:
        [...], int64.

    Raises:
        TypeError, ValueError: naming the argument.

    Kilmer, Braman, Hao, Hoover: "Third-order tensors as operators on matrices", SIAM Journal on Matrix
    Analysis and Applications 34, 2013.

    >>> from pyops.tubal import tprod
    >>> tubal_rank(tprod(torch.randn(5, 2, 4), torch.randn(2, 6, 4)))
    tensor(2)
    """
    ranks = multi_rank(a, rtol=rtol, transform=transform, layout=layout, order=order)
    axes = len(a.sizes) if isinstance(a, HalfFaces) else order - 2
    return ranks.flatten(-axes).amax(-1)


def average_rank(
    a: Tensor | HalfFaces,
    *,
    rtol: float | None = None,
    transform: Which = None,
    layout: str = "last",
    order: int = 3,
) -> Tensor:
    """The mean rank of all faces.

    Args:
        a, rtol, transform, layout, order: as in :func:`multi_rank`.

    Returns:
        [...], float64.

    Raises:
        TypeError, ValueError: naming the argument.

    >>> average_rank(torch.ones(2, 3, 4))
    tensor(0.2500, dtype=torch.float64)
    """
    ranks = multi_rank(a, rtol=rtol, transform=transform, layout=layout, order=order)
    axes = len(a.sizes) if isinstance(a, HalfFaces) else order - 2
    return ranks.flatten(-axes).double().mean(-1)


def tnorm(
    a: Tensor | HalfFaces,
    ord: str = "fro",
    *,
    transform: Which = None,
    layout: str = "last",
    order: int = 3,
) -> Tensor:
    """A norm of a tubal tensor.

    Args:
        a: [..., n1, n2, n3] or :class:`HalfFaces`; ``transform``, ``layout``, ``order`` as in :func:`tprod`.
        ord: ``"fro"`` (default): the root of the sum of squared entries; ``"spectral"``: the largest singular
            value of all faces. For the nuclear norm see :func:`tnn`.

    Returns:
        [...], real. Differentiable; for spectral where the largest singular value is simple.

    Raises:
        TypeError, ValueError: naming the argument.

    >>> tnorm(torch.ones(2, 3, 4), "spectral")  # face 0 has entries 4, and the others are zero
    tensor(9.7980)
    """
    checks.one_of("ord", ord, ("fro", "spectral"))
    if ord == "fro":
        if isinstance(a, HalfFaces):
            check_own("a", a, transform, layout, order)
            return a.norm().to(real_dtype(a.dtype))
        ops.check_tubal("a", a, layout, order)
        return torch.linalg.vector_norm(a, dim=tuple(range(-order, 0)))
    h, _ = enter("a", a, transform, layout, order)
    return _largest(face_values(h), h).to(real_dtype(h.dtype))


def tnn(
    a: Tensor | HalfFaces,
    *,
    convention: str = "mean",
    transform: Which = None,
    layout: str = "last",
    order: int = 3,
) -> Tensor:
    """The tensor nuclear norm: nuclear norms of the faces, averaged or summed.

    Args:
        a: [..., n1, n2, n3] or :class:`HalfFaces`; ``transform``, ``layout``, ``order`` as in :func:`tprod`.
        convention: ``"mean"`` (default): (1/n3) sum_f ||Ahat_f||_*, the dual of the spectral norm, as in
            Lu et al.; for a transform L with L^H L = l I, 1/l instead of 1/n3. ``"sum"``: without the factor.

    Returns:
        [...], real. The gradient is a subgradient where a face is rank-deficient.

    Raises:
        TypeError, ValueError: naming the argument, and for ``"mean"`` with a transform that is not unitary up
            to a factor.

    Lu, Feng, Chen, Liu, Lin, Yan: "Tensor robust principal component analysis with a new tensor nuclear
    norm", IEEE Transactions on Pattern Analysis and Machine Intelligence 42, 2020.

    >>> tnn(teye(3, 4)), tnn(teye(3, 4), convention="sum")
    (tensor(3.), tensor(12.))
    """
    checks.one_of("convention", convention, CONVENTIONS)
    h, _ = enter("a", a, transform, layout, order)
    scale = unitary_scale(h.transform, h.sizes) if convention == "mean" else 1.0
    weighted = face_values(h) * h.weights.squeeze(-1)
    return (weighted.flatten(-1 - len(h.sizes)).sum(-1) / scale).to(real_dtype(h.dtype))


def threshold(tau: Any, convention: str, h: HalfFaces) -> float:
    """What the prox of tau tnn takes off the singular values of the faces."""
    checks.one_of("convention", convention, CONVENTIONS)
    scale = unitary_scale(h.transform, h.sizes)
    tau = checks.nonnegative("tau", tau)
    return tau if convention == "mean" else tau * scale


__all__ = [
    "average_rank",
    "multi_rank",
    "teye",
    "tinv",
    "tnn",
    "tnorm",
    "tpinv",
    "tsolve",
    "ttranspose",
    "tubal_rank",
]
