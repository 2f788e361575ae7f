"""Factorizations of tubal tensors: those of the faces, led back to tensors.

Real tensors need half of the faces, and their real faces go through real LAPACK routines, so that the factors
are exactly real. Arguments may be tensors or :class:`HalfFaces`; results are of the same kind. ``transform``,
``layout`` and ``order`` describe tensors; HalfFaces have their own, and others are refused. bfloat16 and
float16 tensors are computed in float32, and factors rounded at the end.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyops.ops import _checks as checks
from pyops.ops.tubal import tprod
from pyops.tubal.algebra import T, Which, _square, threshold
from pyops.tubal.faces import HalfFaces, check_own, enter, map_faces, matrices, real_dtype


class TQR(NamedTuple):
    """A = Q * R."""

    Q: Any
    R: Any


class TSVD(NamedTuple):
    """A = U * S * V^T."""

    U: Any
    S: Any
    V: Any

    def reconstruct(self, *, transform: Which = None, layout: str = "last", order: int = 3) -> Any:
        """U * S * V^T, of the kind of the factors; ``transform``, ``layout`` and ``order`` as given to tsvd.

        >>> a = torch.randn(4, 3, 5, dtype=torch.float64)
        >>> torch.allclose(tsvd(a, transform="dct").reconstruct(transform="dct"), a)
        True
        """
        if isinstance(self.U, HalfFaces):
            check_own("U", self.U, transform, layout, order)
            return self.U.matmul(self.S).matmul(self.V.H)
        options: dict[str, Any] = {"layout": layout, "order": order}
        options["transform"] = "dft" if transform is None else transform
        return tprod(tprod(self.U, self.S, **options), self.V, transpose_b=True, **options)


class TEigh(NamedTuple):
    """A = V * D * V^T."""

    D: Any
    V: Any


def tqr(
    a: Tensor | HalfFaces,
    *,
    mode: str = "reduced",
    transform: Which = None,
    layout: str = "last",
    order: int = 3,
) -> TQR:
    """A = Q * R with Q^T * Q = I and every face of R upper triangular.

    Args:
        a: [..., n1, n2, n3] or :class:`HalfFaces`; ``transform``, ``layout``, ``order`` as in :func:`tprod`.
        mode: ``"reduced"`` (default; k = min(n1, n2)) or ``"complete"`` (k = n1).

    Returns:
        ``(Q, R)``: [..., n1, k, n3] and [..., k, n2, n3]. Differentiable as ``torch.linalg.qr`` is: faces of
        full column rank, and reduced unless n1 <= n2.

    Raises:
        TypeError, ValueError: naming the argument.

    Kilmer, Martin 2011.

    >>> from pyops.tubal import tprod
    >>> a = torch.randn(4, 2, 3, dtype=torch.float64)
    >>> q, r = tqr(a)
    >>> torch.allclose(tprod(q, r), a), q.shape
    (True, torch.Size([4, 2, 3]))
    """
    checks.one_of("mode", mode, ("reduced", "complete"))
    h, leave = enter("a", a, transform, layout, order)
    q, r = map_faces(lambda m: torch.linalg.qr(m, mode), h)
    return TQR(leave(matrices(h, q)), leave(matrices(h, r)))


def tsvd(
    a: Tensor | HalfFaces,
    k: int | None = None,
    *,
    full_matrices: bool = False,
    method: str = "exact",
    oversampling: int = 10,
    power_iterations: int = 2,
    generator: torch.Generator | None = None,
    transform: Which = None,
    layout: str = "last",
    order: int = 3,
) -> TSVD:
    """The t-SVD A = U * S * V^T: U^T * U = V^T * V = I, and S f-diagonal (slices diagonal).

    Args:
        a: [..., n1, n2, n3] or :class:`HalfFaces`; ``transform``, ``layout``, ``order`` as in :func:`tprod`.
        k: keep the k largest singular values of each face, which is the best approximation of tubal rank k in
            the Frobenius norm (for transforms unitary up to a factor); default min(n1, n2).
        full_matrices: U [..., n1, n1, n3], S [..., n1, n2, n3] and V [..., n2, n2, n3]; not with ``k``.
        method: ``"exact"`` (default), or ``"randomized"``, for k far below n1 and n2: each face is projected
            on the range of its product with a Gaussian matrix of k + ``oversampling`` columns, the same for
            all faces, after ``power_iterations`` steps of subspace iteration.
        oversampling, power_iterations: at least 0; with 10 and 2 the error is within percents of the exact
            truncation's, unless singular values decay slowly.
        generator: of the random numbers; default torch's own.

    Returns:
        ``(U, S, V)``: [..., n1, k, n3], [..., k, k, n3] and [..., n2, k, n3]; ``.reconstruct()`` is their
        product. The singular values of each
        face are in descending order; the singular tubes are the diagonal of S.

        Differentiable as ``torch.linalg.svd`` is: S always (a subgradient at zero), functions of U and V
        where the singular values of each face are distinct and not zero, and if they do not depend on the
        phase of the singular vectors. At ties only functions of A that ignore the choice within the tie, such
        as :func:`tsvt`, have derivatives.

    Raises:
        TypeError, ValueError: naming the argument, what was received and what is wanted.

    Kilmer, Martin 2011; randomized: Zhang, Saibaba, Kilmer, Aeron, "A randomized tensor singular value
    decomposition based on the t-product", Numerical Linear Algebra with Applications 25, 2018.

    >>> from pyops.tubal import tprod
    >>> a = torch.randn(4, 3, 5, dtype=torch.float64)
    >>> u, s, v = tsvd(a)
    >>> torch.allclose(tprod(tprod(u, s), v, transpose_b=True), a)
    True
    >>> tsvd(a, 1).reconstruct().shape  # the best approximation of tubal rank 1
    torch.Size([4, 3, 5])
    """
    checks.one_of("method", method, ("exact", "randomized"))
    checks.boolean("full_matrices", full_matrices)
    h, leave = enter("a", a, transform, layout, order)
    rows, columns = h.faces.shape[-2:]
    smallest = min(rows, columns)
    if k is not None and checks.count("k", k) > smallest:
        raise ValueError(f"k must be at most min(n1, n2) = {smallest}, got {k}")
    if full_matrices and (k is not None or method == "randomized"):
        raise ValueError("full_matrices must be False with k, got True")
    extra, steps = (
        checks.count("oversampling", oversampling),
        checks.count("power_iterations", power_iterations),
    )
    if method == "exact":
        u, s, v = map_faces(lambda m: _svd(m, k, full_matrices), h)
    else:
        if k is None:
            raise ValueError('k must be given with method="randomized", got None')
        width = min(k + extra, smallest)
        real = real_dtype(h.faces.dtype)
        omega = torch.randn(columns, width, dtype=real, device=h.device, generator=generator)
        u, s, v = map_faces(lambda m: _randomized(m, omega.to(m.dtype), k, steps), h)
    middle = torch.diag_embed(s)
    if full_matrices:
        middle = torch.nn.functional.pad(middle, (0, columns - smallest, 0, rows - smallest))
    return TSVD(leave(matrices(h, u)), leave(matrices(h, middle)), leave(matrices(h, v)))


def _svd(m: Tensor, k: int | None, full_matrices: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    u, s, vh = torch.linalg.svd(m, full_matrices=full_matrices)
    if k is None:
        return u, s, vh.mH
    return u[..., :k], s[..., :k], vh[..., :k, :].mH


def _randomized(m: Tensor, omega: Tensor, k: int, steps: int) -> tuple[Tensor, Tensor, Tensor]:
    q = torch.linalg.qr(m @ omega).Q
    for _ in range(steps):
        q = torch.linalg.qr(m.mH @ q).Q
        q = torch.linalg.qr(m @ q).Q
    u, s, v = _svd(q.mH @ m, k)
    return q @ u, s, v


def teigh(a: Tensor | HalfFaces, *, transform: Which = None, layout: str = "last", order: int = 3) -> TEigh:
    """A = V * D * V^T for T-symmetric A (A^T = A): V^T * V = I, and D f-diagonal.

    Args:
        a: [..., n, n, n3] or :class:`HalfFaces`; of each face the lower triangle is read, as by
            ``torch.linalg.eigh``, and symmetry is not checked. ``transform``, ``layout``, ``order`` as in
            :func:`tprod`.

    Returns:
        ``(D, V)``, both [..., n, n, n3]; eigenvalues of each face ascend. Differentiable as
        ``torch.linalg.eigh`` is: V where the eigenvalues of each face are distinct.

    Raises:
        TypeError, ValueError: naming the argument.

    >>> from pyops.tubal import tprod, ttranspose
    >>> x = torch.randn(3, 3, 4, dtype=torch.float64)
    >>> a = x + ttranspose(x)
    >>> d, v = teigh(a)
    >>> torch.allclose(tprod(tprod(v, d), v, transpose_b=True), a)
    True
    """
    h, leave = enter("a", a, transform, layout, order)
    _square("a", h)
    w, v = map_faces(torch.linalg.eigh, h)
    return TEigh(leave(matrices(h, torch.diag_embed(w))), leave(matrices(h, v)))


def tsvt(
    a: T,
    tau: float,
    *,
    convention: str = "mean",
    transform: Which = None,
    layout: str = "last",
    order: int = 3,
) -> T:
    """Singular value thresholding: argmin_X  tau tnn(X) + ||X - A||_F^2 / 2.

    Each face's singular values are lowered by ``tau``, but not below 0; with ``convention="sum"`` by n3 tau.

    Args:
        a: [..., n1, n2, n3] or :class:`HalfFaces`; ``transform``, ``layout``, ``order`` as in :func:`tprod`.
        tau: at least 0.
        convention: of the nuclear norm, ``"mean"`` (default) or ``"sum"``: see :func:`tnn`.

    Returns:
        As a. Differentiable unless a singular value equals the threshold, also where singular values
        coincide or vanish; once.

    Raises:
        TypeError, ValueError: naming the argument, and for a transform that is not unitary up to a factor.

    Lu et al. 2020, as in :func:`tnn`.

    >>> from pyops.tubal import teye
    >>> tsvt(3 * teye(2, 4), 1.0)[..., 0]  # all singular values are 3
    tensor([[2., 0.],
            [0., 2.]])
    """
    h, leave = enter("a", a, transform, layout, order)
    limit = threshold(tau, convention, h)
    return leave(matrices(h, map_faces(lambda m: (_Shrink.apply(m, limit),), h)[0]))


class _Shrink(torch.autograd.Function):
    """U f(S) V^H with f(s) = max(s - tau, 0)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(m: Tensor, tau: float) -> Tensor:
        u, s, vh = torch.linalg.svd(m, full_matrices=False)
        return (u * (s - tau).clamp(min=0).unsqueeze(-2).to(u.dtype)) @ vh

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.tau = inputs[1]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return _ShrinkGradient.apply(g, ctx.saved_tensors[0], ctx.tau), None


class _ShrinkGradient(torch.autograd.Function):
    """The derivative of ``_Shrink``, which is its own adjoint, without the derivatives of U and V.

    With M = U^H G V: U [P o herm(M) + Q o skew(M)] V^H, P_ij = (f_i - f_j)/(s_i - s_j), which is 1 or 0 for
    singular values on one side of tau, Q_ij = (f_i + f_j)/(s_i + s_j); and f(s)/s on what lies outside the
    ranges of U or V.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(g: Tensor, matrix: Tensor, tau: float) -> Tensor:
        u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
        f, kept = (s - tau).clamp(min=0), s > tau
        i, j, fi, fj = s.unsqueeze(-1), s.unsqueeze(-2), f.unsqueeze(-1), f.unsqueeze(-2)
        ki, kj = kept.unsqueeze(-1), kept.unsqueeze(-2)
        p = torch.where(ki ^ kj, (fi - fj) / torch.where(ki ^ kj, i - j, 1.0), (ki & kj).to(s.dtype))
        at_zero = 1.0 if tau == 0 else 0.0
        q = torch.where(i + j > 0, (fi + fj) / torch.where(i + j > 0, i + j, 1.0), at_zero)
        ratio = torch.where(s > 0, f / torch.where(s > 0, s, 1.0), at_zero).unsqueeze(-2)
        left, right = u.mH @ g, g @ vh.mH
        m = u.mH @ right
        grad = u @ (p * (m + m.mH) / 2 + q * (m - m.mH) / 2) @ vh
        if u.shape[-2] > u.shape[-1]:
            grad = grad + ((right - u @ m) * ratio) @ vh
        if vh.shape[-1] > vh.shape[-2]:
            grad = grad + (u * ratio) @ (left - m @ vh)
        return grad

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        raise RuntimeError("tsvt has no second derivative: its gradient cannot be differentiated again")


__all__ = ["TQR", "TSVD", "TEigh", "teigh", "tqr", "tsvd", "tsvt"]
