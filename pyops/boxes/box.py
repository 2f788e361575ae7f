"""The value type of boxes, its parameterisations and its initial values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pyops.ops import _checks as checks
from pyops.ops._box_arguments import corners


class Box(NamedTuple):
    """Axis-parallel boxes: lower corners z and upper corners Z, both [..., D].

    A named tuple, so that every function that takes a Box also takes a plain pair (z, Z), and torch.compile
    and vmap see two tensors. ``len(box)`` is therefore 2, ``box[0]`` is z and a loop gives z and Z; boxes are
    counted by ``box.shape``, that of the corners, and taken by ``box.rows(index)``.

    Four parameterisations, each by any two tensors of one shape, and the way back for initial values:

    ==================  ==============================================  ===================
    constructor         corners                                         inverse
    ==================  ==============================================  ===================
    ``raw``             z, Z as given; z > Z (inverted) is possible     the box itself
    ``min_delta``       z, Z = z + softplus(beta delta) / beta          ``to_min_delta``
    ``sigmoid``         z = sigmoid(w), Z = z + (1 - z) sigmoid(W)      ``to_sigmoid``
    ``centre_offset``   c - softplus(o), c + softplus(o)                ``to_centre_offset``
    ==================  ==============================================  ===================

    >>> box = Box.raw(torch.tensor([0.0, 1.0]), torch.tensor([2.0, 4.0]), strict=True)
    >>> box.side, box.centre
    (tensor([2., 3.]), tensor([1.0000, 2.5000]))
    """

    z: Tensor
    Z: Tensor

    @classmethod
    def raw(cls, z: Tensor, Z: Tensor, *, strict: bool = False) -> Box:
        """The box with these corners, checked; ``strict``: ValueError where z > Z or a corner is NaN."""
        checks.boolean("strict", strict)
        box = cls(*corners("box", (z, Z)))
        if strict and not bool((box.z <= box.Z).all()):
            bad = (~(box.z <= box.Z)).nonzero()
            raise ValueError(
                f"Z must be at least z everywhere with strict=True, got {len(bad)} inverted or NaN sides, "
                f"the first at {tuple(bad[0].tolist())}"
            )
        return box

    @classmethod
    def min_delta(cls, z: Tensor, delta: Tensor, *, beta: float = 1.0, threshold: float = 20.0) -> Box:
        """Z = z + softplus(beta delta) / beta, linear where beta delta > threshold; never inverted."""
        z, delta = corners("box", (z, delta))
        return cls(z, z + F.softplus(delta, beta=_positive("beta", beta), threshold=threshold))

    @classmethod
    def sigmoid(cls, w: Tensor, W: Tensor) -> Box:
        """z = sigmoid(w), Z = z + (1 - z) sigmoid(W): inside the unit cube, never inverted."""
        w, W = corners("box", (w, W))
        z = w.sigmoid()
        return cls(z, z + w.neg().sigmoid() * W.sigmoid())

    @classmethod
    def centre_offset(cls, centre: Tensor, offset: Tensor) -> Box:
        """centre -+ softplus(offset), as in Query2Box; never inverted."""
        centre, offset = corners("box", (centre, offset))
        half = F.softplus(offset)
        return cls(centre - half, centre + half)

    @classmethod
    def stacked(cls, t: Tensor) -> Box:
        """Views of the corners of [..., 2, D]."""
        checks.matrix("t", t, 2)
        if t.shape[-2] != 2:
            raise ValueError(f"t must be [..., 2, D], got shape {tuple(t.shape)}")
        return cls(*t.unbind(-2))

    @classmethod
    def concatenated(cls, t: Tensor) -> Box:
        """Views of the corners of [..., 2 D], z first."""
        checks.matrix("t", t, 1)
        if t.shape[-1] % 2:
            raise ValueError(f"t must be [..., 2 D], got shape {tuple(t.shape)}")
        return cls(*t.chunk(2, -1)) if t.shape[-1] else cls(t, t)

    @classmethod
    def unconstrained(
        cls, *shape: int | Sequence[int], dtype: torch.dtype | None = None, device: Any = None
    ) -> Box:
        """z = -inf and Z = inf: every intersection with it is the other box."""
        z = torch.full(_shape(shape), -math.inf, dtype=dtype, device=device)
        return cls(z, -z)

    @classmethod
    def uniform(
        cls,
        *shape: int | Sequence[int],
        low: float = 0.0,
        high: float = 1.0,
        smallest: float = 0.01,
        largest: float = 0.5,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: Any = None,
    ) -> Box:
        """Random boxes inside [low, high]^D: sides uniform in [smallest, largest], then centres uniform.

        The shape is that of the corners, as numbers or as one tuple. The defaults are those of
        ``UniformBoxInitializer`` in the package box-embeddings.

        >>> Box.uniform(3, 5, generator=torch.Generator().manual_seed(0)).shape
        torch.Size([3, 5])
        """
        low, high = checks.number("low", low), checks.number("high", high)
        smallest, largest = _positive("smallest", smallest), _positive("largest", largest)
        if not smallest <= largest <= high - low:
            raise ValueError(
                f"smallest <= largest <= high - low must hold, got {smallest}, {largest} and {high - low}"
            )
        sizes = _shape(shape)
        unit = [torch.rand(sizes, generator=generator, dtype=dtype, device=device) for _ in range(2)]
        side = smallest + (largest - smallest) * unit[0]
        z = low + (high - low - side) * unit[1]
        return cls(z, z + side)

    # Inverses

    def to_min_delta(self, *, beta: float = 1.0) -> tuple[Tensor, Tensor]:
        """(z, delta) of :meth:`min_delta`; sides must be above 0, or delta is -inf or NaN."""
        beta = _positive("beta", beta)
        return self.z, softplus_inverse(beta * self.side) / beta

    def to_sigmoid(self) -> tuple[Tensor, Tensor]:
        """(w, W) of :meth:`sigmoid`; the box must lie inside the unit cube."""
        return self.z.logit(), (self.side / (1 - self.z)).logit()

    def to_centre_offset(self) -> tuple[Tensor, Tensor]:
        """(centre, offset) of :meth:`centre_offset`; sides must be above 0."""
        return self.centre, softplus_inverse(self.side / 2)

    # Properties

    @property
    def side(self) -> Tensor:
        """Z - z."""
        return self.Z - self.z

    @property
    def centre(self) -> Tensor:
        """(z + Z) / 2."""
        return (self.z + self.Z) / 2

    @property
    def shape(self) -> torch.Size:
        """[..., D], of the corners."""
        return self.z.shape

    def rows(self, index: Any) -> Box:
        """The boxes at an index of the leading dimensions: a number, slice, tensor or tuple of them.

        >>> Box.uniform(5, 2).rows(slice(1, 3)).shape
        torch.Size([2, 2])
        """
        return Box(self.z[index], self.Z[index])


def _shape(shape: tuple[Any, ...]) -> Sequence[int]:
    return shape[0] if len(shape) == 1 and isinstance(shape[0], list | tuple) else shape


def softplus_inverse(y: Tensor) -> Tensor:
    """x with softplus(x) = y: y + log(1 - exp(-y))."""
    return y + torch.log(-torch.expm1(-y))


def _positive(name: str, value: Any) -> float:
    value = checks.number(name, value)
    if not 0 < value < math.inf:
        raise ValueError(f"{name} must be finite and above 0, got {value}")
    return value
