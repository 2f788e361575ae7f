"""What :mod:`pyops.compat.box_embeddings` has of common.utils and parameterizations."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from pyops.boxes import Box
from pyops.ops import _checks as checks

FLOOR = 1e-13  # the package's, added to a side
TBoxTensor = TypeVar("TBoxTensor", bound="BoxTensor")
Data = Tensor | tuple[Tensor, Tensor]


# common.utils


def tiny_value_of_dtype(dtype: torch.dtype) -> float:
    """1e-13 for float32 and float64, 1e-4 for float16."""
    if dtype in (torch.float32, torch.float64):
        return FLOOR
    if dtype == torch.float16:
        return 1e-4
    raise TypeError(f"dtype must be float64, float32 or float16, got {dtype}")


def log1mexp(x: Tensor, split_point: float = math.log(0.5), exp_zero_eps: float = 1e-7) -> Tensor:
    """log(1 - exp x), at least log 1e-38, with exp_zero_eps beside 1 - exp x in the gradient.

    :func:`pyops.losses.log1mexp` is the exact one.
    """
    checks.matrix("x", x, 0)
    near = x > split_point
    outside = -torch.expm1(torch.where(near, x, -1.0))
    value, smooth = outside.clamp(min=1e-38).log(), (outside + exp_zero_eps).log()
    far = torch.log1p(-torch.exp(torch.where(near, -1.0, x)))
    return torch.where(near, value.detach() + (smooth - smooth.detach()), far)


def log1pexp(x: Tensor) -> Tensor:
    """log(1 + exp x)."""
    checks.matrix("x", x, 0)
    return F.softplus(x, threshold=40.0)


def softplus_inverse(t: Tensor, beta: float = 1.0, threshold: float = 20) -> Tensor:
    """x with softplus(beta x) / beta = t; t itself where beta t is not below the threshold."""
    checks.matrix("t", t, 0)
    beta = nonzero("beta", beta)
    below = beta * t < threshold
    y = torch.where(below, beta * t, 1.0)
    return torch.where(below, (y + (-torch.expm1(-y)).clamp(min=torch.finfo(t.dtype).tiny).log()) / beta, t)


def logsumexp2(t1: Tensor, t2: Tensor) -> Tensor:
    """log(exp t1 + exp t2), elementwise."""
    return torch.logaddexp(t1, t2)


def inv_sigmoid(t1: Tensor) -> Tensor:
    """log(t1 / (1 - t1))."""
    return torch.log(t1 / (1.0 - t1))


# parameterizations


class BoxTensor:
    """Boxes as one tensor ``data`` [..., 2, D] or as a pair (z, Z) of corners [..., D]."""

    w2z_ratio: int = 2  #: weights per dimension

    def __init__(self, data: Data, *args: Any, **kwargs: Any):
        self.data: Tensor | None = None
        self._z: Tensor | None = None
        self._Z: Tensor | None = None
        self.reinit(data)

    def __repr__(self) -> str:
        name = type(self).__name__
        return f"{name}({self.data!r})" if self.data is not None else f"{name}(z={self._z!r},\nZ={self._Z!r})"

    def reinit(self, data: Data) -> None:
        """Other values of the same shape."""
        if isinstance(data, Tensor):
            if data.ndim < 2 or data.shape[-2] != 2:
                raise ValueError(f"data must be [..., 2, num_dims], got shape {tuple(data.shape)}")
            if self.data is not None and data.shape != self.data.shape:
                raise ValueError(
                    f"data must have the shape {tuple(self.data.shape)}, got {tuple(data.shape)}"
                )
            self.data = data
            return
        if not isinstance(data, tuple | list) or [isinstance(t, Tensor) for t in data] != [True, True]:
            raise TypeError(f"data must be a torch.Tensor or a pair of them, got {type(data).__name__}")
        z, Z = data
        _same_shape(z, Z)
        if self._z is not None and z.shape != self._z.shape:
            raise ValueError(f"z must have the shape {tuple(self._z.shape)}, got {tuple(z.shape)}")
        self._z, self._Z = z, Z

    @property
    def kwargs(self) -> dict[str, Any]:
        """Settings beside the data."""
        return {}

    @property
    def args(self) -> tuple:
        return ()

    @property
    def z(self) -> Tensor:
        """Lower corners [..., D]."""
        return self._corners(self.data).z if self.data is not None else _given(self._z)

    @property
    def Z(self) -> Tensor:
        """Upper corners [..., D]."""
        return self._corners(self.data).Z if self.data is not None else _given(self._Z)

    @property
    def box(self) -> Box:
        """For the functions of :mod:`pyops.boxes`."""
        return self._corners(self.data) if self.data is not None else Box(self.z, self.Z)

    @property
    def centre(self) -> Tensor:
        """(z + Z) / 2."""
        return self.box.centre

    def _corners(self, data: Tensor) -> Box:
        return Box.stacked(data)

    @classmethod
    def check_if_valid_zZ(cls, z: Tensor, Z: Tensor) -> None:
        """ValueError unless z and Z have one shape and z <= Z."""
        _same_shape(z, Z)
        if not bool((z <= Z).all()):
            raise ValueError(f"Z must be at least z, got {int((~(z <= Z)).sum())} sides where it is not")

    @classmethod
    def W(cls, z: Tensor, Z: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Weights [..., 2, D] of the boxes with these corners."""
        cls.check_if_valid_zZ(z, Z)
        return torch.stack((z, Z), -2)

    @classmethod
    def zZ_to_embedding(cls, z: Tensor, Z: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Weights [..., 2 D]."""
        return cls.W(z, Z, *args, **kwargs).flatten(-2)

    @classmethod
    def from_zZ(cls: type[TBoxTensor], z: Tensor, Z: Tensor, *args: Any, **kwargs: Any) -> TBoxTensor:
        """A box of these corners, whatever the parameterization."""
        return cls((z, Z), *args, **kwargs)

    def like_this_from_zZ(self: TBoxTensor, z: Tensor, Z: Tensor) -> TBoxTensor:
        """:meth:`from_zZ` with the settings of this box."""
        return self.from_zZ(z, Z, *self.args, **self.kwargs)

    @classmethod
    def from_vector(cls: type[TBoxTensor], vector: Tensor, *args: Any, **kwargs: Any) -> TBoxTensor:
        """A box of weights [..., 2 D]."""
        return cls(_stacked(vector).unbind(-2), *args, **kwargs)  # type: ignore[arg-type]

    @property
    def box_shape(self) -> tuple[int, ...]:
        """[..., D], the shape of z and Z."""
        if self.data is not None:
            return (*self.data.shape[:-2], self.data.shape[-1])
        return tuple(_given(self._z).shape)

    def broadcast(self, target_shape: tuple[int, ...]) -> None:
        """Inserts dimensions of size 1 into this box, so that it broadcasts with a target [..., D].

        From the right, a dimension that differs from the target's gets a 1: (4, 10) becomes (4, 1, 10) for
        (4, 5, 10), and (5, 10) becomes (1, 5, 10). Where that leads nowhere, torch's rule holds.

        Raises:
            ValueError: neither does it.
        """
        shape = broadcastable(self.box_shape, tuple(target_shape))
        if self.data is not None:
            self.data = self.data.reshape(*shape[:-1], 2, shape[-1])
        else:
            self._z, self._Z = (_given(t).reshape(shape) for t in (self._z, self._Z))

    def box_reshape(self: TBoxTensor, target_shape: tuple[int, ...]) -> TBoxTensor:
        """A box with corners of that shape; the last dimension stays.

        Raises:
            RuntimeError: the last dimensions differ, or torch cannot reshape.
        """
        if self.box_shape[-1] != target_shape[-1]:
            raise RuntimeError(
                f"target_shape must have the last dimension of box_shape, {self.box_shape[-1]}, "
                f"got {target_shape[-1]}"
            )
        if self.data is None:
            return self.like_this_from_zZ(*(t.reshape(target_shape).contiguous() for t in self.box))
        data = self.data.reshape(*target_shape[:-1], 2, target_shape[-1]).contiguous()
        return type(self)(data, *self.args, **self.kwargs)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, BoxTensor):
            return NotImplemented
        return torch.allclose(self.z, other.z) and torch.allclose(self.Z, other.Z)

    __hash__ = None  # type: ignore[assignment]

    def __getitem__(self: TBoxTensor, indx: Any) -> TBoxTensor:
        return self.like_this_from_zZ(self.z[indx], self.Z[indx])


class MinDeltaBoxTensor(BoxTensor):
    """Weights (z, delta) with Z = z + softplus(beta delta) / beta."""

    def __init__(self, data: Data, beta: float = 1.0, threshold: float = 20):
        self.beta = nonzero("beta", beta)
        self.threshold = checks.number("threshold", threshold)
        super().__init__(data)

    @property
    def kwargs(self) -> dict[str, Any]:
        return {"beta": self.beta, "threshold": self.threshold}

    def _corners(self, data: Tensor) -> Box:
        return Box.min_delta(*Box.stacked(data), beta=self.beta, threshold=self.threshold)

    @classmethod
    def W(cls, z: Tensor, Z: Tensor, beta: float = 1.0, threshold: float = 20.0) -> Tensor:
        cls.check_if_valid_zZ(z, Z)
        return torch.stack((z, softplus_inverse(Z - z, beta=beta, threshold=threshold)), -2)

    @classmethod
    def from_vector(
        cls: type[TBoxTensor], vector: Tensor, beta: float = 1.0, threshold: float = 20
    ) -> TBoxTensor:
        return cls(_stacked(vector), beta=beta, threshold=threshold)


class SigmoidBoxTensor(BoxTensor):
    """Weights (w, W) with z = sigmoid(w), Z = z + (1 - z) sigmoid(W): boxes in the unit cube."""

    def __init__(self, data: Data):
        super().__init__(data)

    def _corners(self, data: Tensor) -> Box:
        return Box.sigmoid(*Box.stacked(data))

    @classmethod
    def W(cls, z: Tensor, Z: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        cls.check_if_valid_zZ(z, Z)
        eps = torch.finfo(z.dtype).tiny
        parts = (t.clamp(eps, 1.0 - eps) for t in (z, (Z - z) / (1.0 - z)))
        return torch.stack([inv_sigmoid(t) for t in parts], -2)

    @classmethod
    def from_vector(cls: type[TBoxTensor], vector: Tensor, *args: Any, **kwargs: Any) -> TBoxTensor:
        return cls(_stacked(vector))


class BoxFactory:
    """Makes boxes of a registered kind: "boxtensor", "mindelta", "sigmoid", each also with "_from_zZ" and
    "_from_vector".

    >>> BoxFactory("mindelta_from_vector", {"beta": 2.0})(torch.zeros(3, 8)).box_shape
    (3, 4)
    """

    box_registry: ClassVar[dict[str, tuple[type[BoxTensor], str | None]]] = {}

    def __init__(self, name: str, kwargs_dict: dict[str, Any] | None = None):
        if name not in self.box_registry:
            raise KeyError(f"name must be one of {', '.join(map(repr, self.box_registry))}, got {name!r}")
        self.name = name
        self.kwargs_dict = kwargs_dict or {}
        self.box_subclass, constructor = self.box_registry[name]
        self.creator: Callable[..., BoxTensor] = self.box_subclass
        if constructor:
            if not hasattr(self.box_subclass, constructor):
                raise ValueError(
                    f"{self.box_subclass.__name__} has no {constructor}, with which {name} is made"
                )
            self.creator = getattr(self.box_subclass, constructor)

    @classmethod
    def register_box_class(
        cls, name: str, constructor: str | None = None, exist_ok: bool = False
    ) -> Callable[[type[BoxTensor]], type[BoxTensor]]:
        """A decorator that gives a class a name here; RuntimeError for one in use, unless ``exist_ok``."""

        def add(subclass: type[BoxTensor]) -> type[BoxTensor]:
            if name in cls.box_registry and not exist_ok:
                raise RuntimeError(f"name {name!r} is in use for {cls.box_registry[name][0].__name__}")
            cls.box_registry[name] = subclass, constructor
            return subclass

        return add

    def __call__(self, *args: Any, **kwargs: Any) -> BoxTensor:
        return self.creator(*args, **kwargs, **self.kwargs_dict)


for _name, _class in (
    ("boxtensor", BoxTensor),
    ("mindelta", MinDeltaBoxTensor),
    ("sigmoid", SigmoidBoxTensor),
):
    BoxFactory.register_box_class(_name)(_class)
    for _constructor in ("from_zZ", "from_vector"):
        BoxFactory.register_box_class(f"{_name}_{_constructor}", _constructor)(_class)


# Checks


def _given(t: Tensor | None) -> Tensor:
    assert t is not None
    return t


def nonzero(name: str, value: Any) -> float:
    value = checks.nonnegative(name, value)
    if value == 0:
        raise ValueError(f"{name} must be above 0, got 0.0")
    return value


def _same_shape(z: Tensor, Z: Tensor) -> None:
    if z.shape != Z.shape:
        raise ValueError(f"Z must have the shape of z, {tuple(z.shape)}, got {tuple(Z.shape)}")


def _stacked(vector: Tensor) -> Tensor:
    """[..., 2, D] of [..., 2 D], a view."""
    checks.matrix("vector", vector, 1)
    if vector.shape[-1] % 2:
        raise ValueError(f"vector must have an even last dimension, got shape {tuple(vector.shape)}")
    return vector.reshape(*vector.shape[:-1], 2, vector.shape[-1] // 2)


def broadcastable(shape: tuple[int, ...], target: tuple[int, ...]) -> tuple[int, ...]:
    """The shape with ones inserted, of as many dimensions as the target, that broadcasts with it."""
    if shape[-1] == target[-1] and len(shape) <= len(target):
        rest, found = list(shape[:-1]), [shape[-1]]
        for size in reversed(target[:-1]):
            found.insert(0, rest.pop() if rest and rest[-1] == size else 1)
        aligned = [1] * (len(target) - len(shape)) + list(shape)
        for candidate in (aligned,) if rest else (found, aligned):
            if all(a == b or 1 in (a, b) for a, b in zip(candidate, target, strict=True)):
                return tuple(candidate)
    raise ValueError(f"box_shape must broadcast with {target}, got {shape}")
