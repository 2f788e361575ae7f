"""Tubal tensors in the transform domain: their faces, and what the symmetry of a real tensor saves.

The faces of A are the matrices Ahat_f of its DFT along the tubes (unnormalised, 1/n3 on the way back), or of
another invertible transform. For real A and the DFT, face n3 - f is the conjugate of face f: the faces
0 ... n3 // 2 say all, of which face 0 and, for even n3, face n3/2 are real.
"""

from __future__ import annotations

import functools
import itertools
import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from pyops.ops import _checks as checks
from pyops.ops import tubal as ops
from pyops.ops.tubal import DFT, LAYOUTS, Transform
from pyops.reference import tubal as reference
from pyops.reference._precision import without_autocast


def real_dtype(dtype: torch.dtype) -> torch.dtype:
    return ops.REAL_OF.get(dtype, dtype)


class Symmetry(NamedTuple):
    """Half faces (flat indices) of real tensors: which are real, which decide others.

    Plain numbers, and tensors only where they are used: tensors in a cache could be another mode's fakes.
    """

    real: list[int]  # faces that are their own conjugate
    complex: list[int]  # one of each pair of conjugates
    fill: (
        list[int] | None
    )  # where each half face lies in [real, complex, conjugates of complex]; None: in order
    mirrored: bool  # whether both faces of a pair can be among the halves: for two tube axes and more
    source: list[int]  # for each of all faces, the half face that it comes from
    conjugate: list[bool]  # and whether as its conjugate
    weights: list[float]  # how many faces each half face stands for, where mirrored pairs are both there


def symmetry(sizes: tuple[int, ...]) -> Symmetry:
    """The conjugate symmetry of the DFT of a real tensor with tube axes of these sizes."""
    # The compiler traces through a cache, and says so.
    return _symmetry(sizes) if torch.compiler.is_compiling() else _cached_symmetry(sizes)


def _symmetry(sizes: tuple[int, ...]) -> Symmetry:
    last = sizes[-1]
    half = list(itertools.product(*(range(n) for n in sizes[:-1]), range(last // 2 + 1)))
    number = {face: i for i, face in enumerate(half)}

    def opposite(face: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(-i % n for i, n in zip(face, sizes, strict=True))

    # The partner of a face lies in the half too if the last index is 0 or Nyquist.
    partner = [number.get(opposite(face)) for face in half]
    real = [i for i, other in enumerate(partner) if other == i]
    pairs = [i for i, other in enumerate(partner) if other is None or other > i]
    place = {face: i for i, face in enumerate([*real, *pairs])}
    follows = [i for i, other in enumerate(partner) if other is not None and other < i]
    for i in follows:
        place[i] = place[cast(int, partner[i])] + len(pairs)
    fill = [place[i] for i in range(len(half))]

    everything = list(itertools.product(*(range(n) for n in sizes)))
    conjugate = [2 * face[-1] > last for face in everything]
    source = [
        number[opposite(face) if mirror else face] for face, mirror in zip(everything, conjugate, strict=True)
    ]
    weights = [1.0 if 2 * face[-1] in (0, last) else 2.0 for face in half]
    ordered = None if fill == list(range(len(half))) else fill
    return Symmetry(real, pairs, ordered, bool(follows), source, conjugate, weights)


_cached_symmetry = functools.lru_cache(maxsize=256)(_symmetry)


def _number(name: str, value: Any) -> None:
    if isinstance(value, Tensor):
        if value.ndim > 0:
            raise ValueError(f"{name} needs a number, got a tensor of shape {tuple(value.shape)}")
    elif isinstance(value, bool) or not isinstance(value, numbers.Number | torch.SymInt | torch.SymFloat):
        raise TypeError(f"{name} needs a number, got {type(value).__name__}")


def _pick(x: Tensor, dim: int, index: list[int]) -> Tensor:
    return x.index_select(dim, torch.tensor(index, dtype=torch.int64, device=x.device))


class HalfFaces:
    """A tubal tensor in the transform domain; products stay there until :meth:`to_tensor`.

    Made by :func:`tube_fft`. A real tensor under the DFT keeps half of its faces; complex tensors and other
    transforms have all of them. It is a value: nothing writes to it. ``@``, ``+``, ``-``, multiplication and
    division by a number, and ``.H`` are those of the tensors (t-product, T-transpose).

    A product here saves the transforms, not the matrix products: on a CPU it beats :func:`tprod` of real
    tensors from about 24 x 24 with tubes of 5 on, the longer the more. For smaller matrices, whose calls cost
    more, and for tubes of 4 and less, half of whose faces or more are real and taken as such by tprod,
    :func:`tprod` is the faster one; from 128 x 128 with tubes of up to 10 both take the same time.

    Attributes:
        faces: [..., n3 // 2 + 1, n1, n2] complex; all n3 faces for complex tensors and other transforms (real
            for a real matrix). For order p: [..., n3, ..., np // 2 + 1, n1, n2].
        sizes: (n3, ..., np) of the tubes.
        real: whether the tensor is real.
        dtype: of the tensor that :meth:`to_tensor` makes.
        transform: what leads from tensor to faces.

    >>> a, b = tube_fft(torch.randn(2, 3, 4)), tube_fft(torch.randn(3, 5, 4))
    >>> (a @ b).to_tensor().shape, a.faces.shape
    (torch.Size([2, 5, 4]), torch.Size([3, 2, 3]))
    """

    __slots__ = ("dtype", "faces", "real", "sizes", "transform")

    def __init__(
        self,
        faces: Tensor,
        sizes: Sequence[int],
        *,
        dtype: torch.dtype | None = None,
        transform: Transform = DFT,
    ):
        if not isinstance(faces, Tensor):
            raise TypeError(f"faces must be a torch.Tensor, got {type(faces).__name__}")
        if not isinstance(sizes, Sequence):
            raise TypeError(f"sizes must be a sequence of tube lengths, got {type(sizes).__name__}")
        self.faces = faces
        self.sizes = tuple(sizes)
        self.dtype = faces.dtype if dtype is None else dtype
        if self.dtype not in ops.REAL and self.dtype not in ops.COMPLEX:
            raise TypeError(f"dtype must be floating or complex, got {self.dtype}")
        self.real = not self.dtype.is_complex
        self.transform = transform
        wanted = self.sizes
        if self.half:
            wanted = (*self.sizes[:-1], self.sizes[-1] // 2 + 1)
        found = tuple(faces.shape[-2 - len(wanted) : -2])
        if found != wanted:
            raise ValueError(
                f"faces must be [..., {', '.join(map(str, wanted))}, n1, n2] for tubes of sizes {self.sizes} "
                f"of a {self.dtype} tensor, got shape {tuple(faces.shape)}"
            )

    @property
    def half(self) -> bool:
        """Whether faces that are conjugates of others are left out."""
        return self.real and self.transform.forward is None

    @property
    def shape(self) -> torch.Size:
        """Of the tensor, tubes last."""
        batch = self.faces.shape[: -2 - len(self.sizes)]
        return torch.Size((*batch, *self.faces.shape[-2:], *self.sizes))

    @property
    def device(self) -> torch.device:
        return self.faces.device

    @property
    def weights(self) -> Tensor:
        """How many faces each one stands for, as factors of ``faces``: 1, 2, ..., 2, [1] for half faces.

        <A, B> = sum_f weight_f Re <Ahat_f, Bhat_f> / n3 (Parseval), for the DFT.
        """
        real = real_dtype(self.faces.dtype)
        if not self.half:
            return torch.ones((*self.sizes, 1, 1), dtype=real, device=self.device)
        weights = torch.tensor(symmetry(self.sizes).weights, dtype=real, device=self.device)
        return weights.reshape(*self.sizes[:-1], self.sizes[-1] // 2 + 1, 1, 1)

    def with_faces(self, faces: Tensor) -> HalfFaces:
        """Other faces of the same kind."""
        return HalfFaces(faces, self.sizes, dtype=self.dtype, transform=self.transform)

    def full(self) -> Tensor:
        """All faces, [..., n3, ..., np, n1, n2]."""
        if not self.half:
            return self.faces
        s, axes = symmetry(self.sizes), len(self.sizes)
        flat = _pick(self.faces.flatten(-2 - axes, -3), -3, s.source)
        mirrored = torch.tensor(s.conjugate, device=self.device)[:, None, None]
        flat = torch.where(mirrored, flat.conj(), flat)
        return flat.unflatten(-3, self.sizes)

    def to_tensor(self, layout: str = "last") -> Tensor:
        """The tensor: real, exactly, where it came from real ones."""
        checks.one_of("layout", layout, LAYOUTS)
        faces, t = self.faces, self.transform
        if t.inverse is not None and faces.dtype != t.inverse[0].dtype:
            wide = torch.promote_types(faces.dtype, t.inverse[0].dtype)
            faces, t = faces.to(wide), t._replace(inverse=tuple(m.to(wide) for m in t.inverse))
        x = reference.from_faces(faces, self.sizes, layout == "first", t.inverse, self.real)
        return x.to(self.dtype).contiguous() if self.real or x.is_complex() else x.contiguous()

    @property
    def H(self) -> HalfFaces:
        """The T-transpose: each face conjugate transposed."""
        return self.with_faces(self.faces.mH)

    @property
    def mT(self) -> HalfFaces:
        """The T-transpose of a real tensor, the same as ``H``."""
        if not self.real:
            raise TypeError("mT is for real tensors, got a complex one; its T-transpose, conjugate, is H")
        return self.H

    def _with(self, other: HalfFaces) -> tuple[Tensor, Tensor, torch.dtype]:
        """Faces of both in one form."""
        if self.sizes != other.sizes:
            raise ValueError(f"both must have tubes of sizes {self.sizes}, got {other.sizes}")
        if not self.transform.same(other.transform):
            names = self.transform.name, other.transform.name
            raise ValueError(f"both must have the same transform, got {names[0]!r} and {names[1]!r}")
        x, y = self.faces, other.faces
        if self.half != other.half:
            x, y = self.full(), other.full()
        wide = torch.promote_types(x.dtype, y.dtype)
        return x.to(wide), y.to(wide), torch.promote_types(self.dtype, other.dtype)

    def _combine(self, other: Any, name: str, function: Callable[[Tensor, Tensor], Tensor]) -> HalfFaces:
        if not isinstance(other, HalfFaces):
            raise TypeError(f"{name} needs HalfFaces on both sides, got {type(other).__name__}")
        x, y, dtype = self._with(other)
        # A transform's matrices have the precision of the tensor that they were made for.
        finer = other if y.dtype == other.faces.dtype else self
        return HalfFaces(function(x, y), self.sizes, dtype=dtype, transform=finer.transform)

    def __matmul__(self, other: HalfFaces) -> HalfFaces:
        if isinstance(other, HalfFaces) and self.faces.shape[-1] != other.faces.shape[-2]:
            raise ValueError(
                f"the right factor must have {self.faces.shape[-1]} rows, got {other.faces.shape[-2]}"
            )
        return self._combine(other, "@", reference.matmul)

    def matmul(self, other: HalfFaces) -> HalfFaces:
        """``self @ other``, by a name: ``torch.compile`` does not trace ``@`` of objects."""
        return self.__matmul__(other)

    def _same_matrices(self, name: str, other: Any) -> None:
        if isinstance(other, HalfFaces) and self.faces.shape[-2:] != other.faces.shape[-2:]:
            wanted, found = tuple(self.faces.shape[-2:]), tuple(other.faces.shape[-2:])
            raise ValueError(f"{name} needs matrices of one size, {wanted}, on both sides, got {found}")

    def __add__(self, other: HalfFaces) -> HalfFaces:
        self._same_matrices("+", other)
        return self._combine(other, "+", torch.add)

    def __sub__(self, other: HalfFaces) -> HalfFaces:
        self._same_matrices("-", other)
        return self._combine(other, "-", torch.sub)

    def __neg__(self) -> HalfFaces:
        return self.with_faces(-self.faces)

    def __mul__(self, factor: float | Tensor) -> HalfFaces:
        if isinstance(factor, HalfFaces):
            raise TypeError("* needs a number, got HalfFaces; the t-product is @")
        _number("*", factor)
        if self.real and (
            isinstance(factor, complex) or (isinstance(factor, Tensor) and factor.is_complex())
        ):
            raise TypeError("* needs a real number for a real tensor, got a complex one")
        return self.with_faces(self.faces * factor)

    __rmul__ = __mul__

    def __truediv__(self, divisor: float | Tensor) -> HalfFaces:
        _number("/", divisor)
        return self * (1 / divisor)

    def inner(self, other: HalfFaces) -> Tensor:
        """Re <A, B> of the tensors by Parseval, [...]: for the DFT and unitary transforms up to a factor."""
        if not isinstance(other, HalfFaces):
            raise TypeError(f"other must be HalfFaces, got {type(other).__name__}")
        self._same_matrices("inner", other)
        x, y, _ = self._with(other)
        kept = self if self.half == other.half else HalfFaces(x, self.sizes, transform=self.transform)
        products = (x.conj() * y).real * kept.weights
        return products.flatten(-2 - len(self.sizes)).sum(-1) / unitary_scale(self.transform, self.sizes)

    def norm(self) -> Tensor:
        """||A||_F of the tensor, [...]."""
        return self.inner(self).sqrt()

    def __repr__(self) -> str:
        kept = "half of the faces" if self.half else "all faces"
        return f"HalfFaces({tuple(self.shape)}, {self.dtype}, {self.transform.name}, {kept})"


def unitary_scale(transform: Transform, sizes: Sequence[int]) -> float:
    """l with L^H L = l I for the whole transform; ValueError where there is none."""
    if transform.forward is None:
        return float(math.prod(sizes))
    scale = 1.0
    for m in transform.forward:
        gram = reference.matmul(m.mH, m).detach()
        one = gram.diagonal().real.mean()
        eye = torch.eye(len(m), dtype=m.dtype, device=m.device)
        tolerance = 100 * len(m) * torch.finfo(m.dtype).eps
        if torch.linalg.matrix_norm(gram - one * eye) > tolerance * one * math.sqrt(len(m)):
            raise ValueError("transform must be unitary up to a factor here, got a matrix that is not")
        scale *= float(one)
    return scale


def tube_fft(
    a: Tensor, *, transform: str | Tensor | Sequence[Tensor] = "dft", layout: str = "last", order: int = 3
) -> HalfFaces:
    """The faces of a tubal tensor, as a value that keeps products in the transform domain.

    Args:
        a: [..., n1, n2, n3], real or complex, dtypes, ``transform``, ``layout`` and ``order`` as in
            :func:`tprod`. bfloat16 and float16 are transformed in float32.

    Returns:
        :class:`HalfFaces`.

    Raises:
        TypeError, ValueError: naming the argument, what was received and what is wanted.

    Kilmer, Martin 2011.

    >>> a = torch.randn(10, 2, 4, dtype=torch.float64)
    >>> u = tube_fft(a)
    >>> for _ in range(3):
    ...     u = u @ (u.H @ u)  # no transform in the loop
    >>> u.to_tensor().shape
    torch.Size([10, 2, 4])
    >>> torch.allclose(tube_fft(a).norm(), a.norm())
    True
    """
    ops.check_tubal("a", a, layout, order)
    sizes = ops.tube_sizes(a, layout, order)
    t = ops.resolve(transform, sizes, a.dtype, a.device)
    x = a.to(torch.promote_types(a.dtype, torch.float32))
    dtype = a.dtype
    if t.forward is not None:
        wide = torch.promote_types(x.dtype, t.forward[0].dtype)
        if wide.is_complex and not dtype.is_complex:
            dtype = wide
        x, t = x.to(wide), t._replace(forward=tuple(m.to(wide) for m in t.forward))
    faces = reference.to_faces(x, len(sizes), layout == "first", t.forward)
    # One copy here, or one in every product: the FFT leaves faces interleaved.
    return HalfFaces(faces.contiguous(), sizes, dtype=dtype, transform=t)


def tube_ifft(faces: HalfFaces, *, layout: str = "last") -> Tensor:
    """The tensor with these faces; real, exactly, where it came from real ones.

    Args:
        faces: :class:`HalfFaces`.
        layout: ``"last"`` gives [..., n1, n2, n3], ``"first"`` [..., n3, n1, n2].

    Raises:
        TypeError, ValueError: naming the argument.

    >>> a = torch.randn(3, 2, 5, dtype=torch.float64)
    >>> torch.allclose(tube_ifft(tube_fft(a)), a)
    True
    """
    if not isinstance(faces, HalfFaces):
        raise TypeError(f"faces must be HalfFaces, got {type(faces).__name__}")
    return faces.to_tensor(layout)


def facewise(a: Tensor, b: Tensor, *, layout: str = "last") -> Tensor:
    """The product of two tensors slice by slice, with no transform: C(:, :, f) = A(:, :, f) B(:, :, f).

    Args:
        a, b: [..., n1, n2, n3] and [..., n2, n4, n3], or tubes first; leading dimensions broadcast, tubes do
            not. Mixed dtypes promote.
        layout: ``"last"`` or ``"first"``.

    Returns:
        [..., n1, n4, n3], contiguous.

    Raises:
        TypeError, ValueError: naming the argument.

    >>> facewise(torch.ones(2, 3, 4), torch.ones(3, 5, 4))[0, 0]
    tensor([3., 3., 3., 3.])
    """
    ops.check_product(a, b, False, False, layout, 3)
    dtype = torch.promote_types(a.dtype, b.dtype)
    x, y = a.to(dtype), b.to(dtype)
    if layout == "first":
        return reference.matmul(x, y)
    c = reference.matmul(reference.faces_first(x, 1), reference.faces_first(y, 1))
    return reference.tubes_last(c, 1).contiguous()


def enter(name: str, a: Any, transform: Any, layout: str, order: int) -> tuple[HalfFaces, Callable]:
    """The faces of an argument, and what leads a result back to the argument's kind."""
    if isinstance(a, HalfFaces):
        check_own(name, a, transform, layout, order)
        return a, lambda faces: faces
    ops.check_tubal(name, a, layout, order)
    transform = DFT if transform is None else transform
    return tube_fft(a, transform=transform, layout=layout, order=order), lambda f: f.to_tensor(layout)


def check_own(name: str, a: HalfFaces, transform: Any, layout: Any, order: Any) -> None:
    """What describes tensors has no say over faces: given, it must be what they have."""
    if transform is not None:
        given = ops.resolve(transform, a.sizes, a.dtype, a.device)
        if not a.transform.same(given):
            own = a.transform.name
            raise ValueError(f"transform must be left out or that of {name}, {own!r}, got {given.name!r}")
    checks.one_of("layout", layout, LAYOUTS)
    if layout != "last":
        raise ValueError(
            f"layout must be left out where {name} is HalfFaces, which have none until to_tensor(layout), "
            f"got {layout!r}"
        )
    if checks.integer("order", order) not in (3, 2 + len(a.sizes)):
        raise ValueError(f"order must be left out or that of {name}, {2 + len(a.sizes)}, got {order}")


def map_faces(function: Callable[..., tuple[Tensor, ...]], *tensors: HalfFaces) -> tuple[Tensor, ...]:
    """A function of matrices [..., f, n1, n2], of which any batch may be taken apart, on the faces.

    Real faces go in as real matrices, so that real tensors give exactly real results; of two faces that are
    conjugates, one goes in. Results are [..., tubes, *rest], with as many leading dimensions as the faces.
    """
    function = without_autocast(function)
    lead, axes = tensors[0], len(tensors[0].sizes)
    batch = lead.faces.ndim - 2 - axes
    flat = [t.faces.flatten(batch, batch + axes - 1) for t in tensors]
    tubes = lead.faces.shape[batch : batch + axes]
    if not lead.half:
        results = function(*flat)
        return tuple(r.unflatten(batch, tubes) for r in results)
    s = symmetry(lead.sizes)
    real = function(*(_pick(x, batch, s.real).real for x in flat))
    parts: list[tuple[Tensor, ...]]
    if len(s.complex) == 0:
        parts = [(r,) for r in real]
    else:
        others = function(*(_pick(x, batch, s.complex) for x in flat))
        parts = [(r, c, c.conj()) if s.mirrored else (r, c) for r, c in zip(real, others, strict=True)]
    joined = [torch.cat([p.to(part[-1].dtype) for p in part], batch) for part in parts]
    if s.fill is not None:
        joined = [_pick(j, batch, s.fill) for j in joined]
    return tuple(j.unflatten(batch, tubes) for j in joined)


def matrices(like: HalfFaces, faces: Tensor) -> HalfFaces:
    """Results of ``map_faces`` as faces of a tensor like another; real ones of half faces become complex."""
    return like.with_faces(faces.to(like.faces.dtype))
