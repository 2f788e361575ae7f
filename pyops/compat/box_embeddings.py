"""The package box-embeddings on pyops: its names, argument order, defaults and layouts (0.1.0, torch).

``from box_embeddings.parameterizations import BoxTensor``, and likewise from ``modules.intersection``,
``modules.volume``, ``modules.pooling``, ``modules.regularization``, ``initializations``, ``common.utils`` and
``modules``, becomes ``from pyops.compat.box_embeddings import BoxTensor``. State dicts fit both ways.

The floor. The package adds 1e-13 to sides before it takes logarithms (hard sides: at least 1e-13). Sides
whose logarithm is near -29.93 or below are lost with it, and so is the gradient between boxes that are far
apart. Here sides are exact: hard boxes that do not meet have the log volume -inf, soft and Gumbel ones the
slope 1 / volume_temperature. ``eps=FLOOR`` of every volume gives the package's numbers.

What else differs:

- ``gumbel_intersection`` is never larger than its operands by rounding, so that log P is not above 0, with
  any ``approximation_mode``: all three give the same numbers, and the gradients of the first (None).
- Modules of intersection leave their operands as they are, and broadcast whatever torch broadcasts after
  what the package does. ``BoxTensor.broadcast`` changes the box it is called on, but no tensor of the caller.
- ``softplus_inverse`` and ``hard_intersection_pooler`` do not write to their arguments. ``softplus_inverse``
  of 0 is finite in float32 too.
- What is made from a box (intersections, pooled boxes, ``box[...]``, ``like_this_from_zZ``) keeps its
  ``beta`` and ``threshold``; the package loses them or mixes them up.
- Masks and weights of ``bag_of_boxes_pooler`` may have the shape [...] of the boxes, as documented there.
- Initial values come from torch's random generator, not from NumPy's.
- Shapes are compared before values, and errors name the argument.

Not here: TensorFlow, ``BOX_DEBUG_LEVEL``, registration of subclasses by name except that of ``BoxFactory``.
As in the package, ``BoxTensor`` accepts z > Z (``check_if_valid_zZ`` refuses it), and products of sides
(``log_scale=False``) underflow in many dimensions.

A ``BoxTensor`` gives :attr:`BoxTensor.box` to the functions of :mod:`pyops.boxes`, which have what the
package lacks: containment, differences, unions, every pair without the cube, the best k.

>>> a = BoxTensor(torch.tensor([[0.0, 0.0], [2.0, 2.0]]))
>>> b = BoxTensor(torch.tensor([[1.0, 1.0], [3.0, 2.0]]))
>>> hard_volume(hard_intersection(a, b), log_scale=False)
tensor(1.)
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pyops.compat._box_tensors import (
    FLOOR,
    BoxFactory,
    BoxTensor,
    MinDeltaBoxTensor,
    SigmoidBoxTensor,
    TBoxTensor,
    broadcastable,
    inv_sigmoid,
    log1mexp,
    log1pexp,
    logsumexp2,
    nonzero,
    softplus_inverse,
    tiny_value_of_dtype,
)
from pyops.ops import _checks as checks
from pyops.reference import boxes as reference

__all__ = [
    "FLOOR",
    "BagOfBoxesBoxPooler",
    "BesselApproxVolume",
    "BoxEmbedding",
    "BoxFactory",
    "BoxInitializer",
    "BoxPooler",
    "BoxRegularizer",
    "BoxTensor",
    "GumbelIntersection",
    "HardIntersection",
    "HardIntersectionBoxPooler",
    "HardVolume",
    "Intersection",
    "L2SideBoxRegularizer",
    "MinDeltaBoxTensor",
    "SigmoidBoxTensor",
    "SoftVolume",
    "TBoxTensor",
    "UniformBoxInitializer",
    "Volume",
    "bag_of_boxes_pooler",
    "bessel_volume_approx",
    "gumbel_intersection",
    "hard_intersection",
    "hard_intersection_pooler",
    "hard_volume",
    "inv_sigmoid",
    "l2_side_regularizer",
    "log1mexp",
    "log1pexp",
    "logsumexp2",
    "soft_volume",
    "softplus_inverse",
    "tiny_value_of_dtype",
    "uniform_boxes",
]

L2_EPS = 1e-23  # beside a side, where its logarithm is taken
MODES = None, "clipping", "clipping_forward"


# modules.intersection


def hard_intersection(left: TBoxTensor, right: BoxTensor) -> TBoxTensor:
    """The larger z and the smaller Z, in the class of ``left``."""
    return _intersection(left, right, 0.0)


def gumbel_intersection(
    left: TBoxTensor,
    right: BoxTensor,
    intersection_temperature: float = 1.0,
    approximation_mode: str | None = None,
) -> TBoxTensor:
    """:func:`pyops.boxes.intersection` of two, in the class of ``left``; the modes are only checked."""
    temperature = nonzero("intersection_temperature", intersection_temperature)
    _check_mode(approximation_mode)
    return _intersection(left, right, temperature)


class Intersection(nn.Module):
    """Hard where intersection_temperature is 0, else Gumbel."""

    def __init__(self, intersection_temperature: float = 0.0, approximation_mode: str | None = None):
        super().__init__()
        self.intersection_temperature = checks.nonnegative(
            "intersection_temperature", intersection_temperature
        )
        _check_mode(approximation_mode)
        self.approximation_mode = approximation_mode

    def forward(self, left: TBoxTensor, right: BoxTensor) -> TBoxTensor:
        if len(left.box_shape) >= len(right.box_shape):
            right = right.box_reshape(broadcastable(right.box_shape, left.box_shape))
        else:
            left = left.box_reshape(broadcastable(left.box_shape, right.box_shape))
        return _intersection(left, right, self.intersection_temperature)


class HardIntersection(Intersection):
    def __init__(self) -> None:
        super().__init__()


class GumbelIntersection(Intersection):
    def __init__(self, intersection_temperature: float = 1.0, approximation_mode: str | None = None):
        super().__init__(nonzero("intersection_temperature", intersection_temperature), approximation_mode)


# modules.volume


def hard_volume(box_tensor: BoxTensor, log_scale: bool = True, *, eps: float = 0.0) -> Tensor:
    """[...]: product of max(Z - z, 0), or with log_scale the sum of log max(Z - z, eps)."""
    w = box_tensor.Z - box_tensor.z
    eps = checks.nonnegative("eps", eps)
    if not log_scale:
        return w.clamp(min=0).prod(-1)
    return w.clamp(min=eps).log().sum(-1) if eps else reference.log_softplus_volume(w, 0.0)


def soft_volume(
    box_tensor: BoxTensor,
    volume_temperature: float = 1.0,
    log_scale: bool = True,
    scale: float = 1.0,
    *,
    eps: float = 0.0,
) -> Tensor:
    """[...]: scale times the product of nu softplus((Z - z) / nu), or its logarithm with eps beside sides."""
    return bessel_volume_approx(box_tensor, volume_temperature, 0.0, log_scale, scale, eps=eps)


def bessel_volume_approx(
    box_tensor: BoxTensor,
    volume_temperature: float = 1.0,
    intersection_temperature: float = 1.0,
    log_scale: bool = True,
    scale: float = 1.0,
    *,
    eps: float = 0.0,
) -> Tensor:
    """[...]: :func:`soft_volume` of sides that are shorter by 2 gamma intersection_temperature."""
    nu = nonzero("volume_temperature", volume_temperature)
    tau = checks.nonnegative("intersection_temperature", intersection_temperature)
    scale, eps = checks.number("scale", scale), checks.nonnegative("eps", eps)
    if not 0.0 < scale <= 1.0:
        raise ValueError(f"scale must be in (0, 1], got {scale}")
    w = box_tensor.Z - box_tensor.z - 2 * reference.GAMMA * tau
    if log_scale and not eps:
        return reference.log_softplus_volume(w, nu) + math.log(scale)
    side = nu * F.softplus(w / nu, threshold=40.0)
    return (side + eps).log().sum(-1) + math.log(scale) if log_scale else side.prod(-1) * scale


class HardVolume(nn.Module):
    def __init__(self, log_scale: bool = True, *, eps: float = 0.0, **kwargs: Any):
        super().__init__()
        self.log_scale, self.eps = log_scale, checks.nonnegative("eps", eps)

    def forward(self, box_tensor: BoxTensor) -> Tensor:
        return hard_volume(box_tensor, self.log_scale, eps=self.eps)


class SoftVolume(HardVolume):
    def __init__(self, log_scale: bool = True, volume_temperature: float = 1.0, *, eps: float = 0.0):
        super().__init__(log_scale, eps=eps)
        self.volume_temperature = nonzero("volume_temperature", volume_temperature)

    def forward(self, box_tensor: BoxTensor) -> Tensor:
        return soft_volume(box_tensor, self.volume_temperature, self.log_scale, eps=self.eps)


class BesselApproxVolume(SoftVolume):
    def __init__(
        self,
        log_scale: bool = True,
        volume_temperature: float = 1.0,
        intersection_temperature: float = 1.0,
        *,
        eps: float = 0.0,
    ):
        super().__init__(log_scale, volume_temperature, eps=eps)
        self.intersection_temperature = checks.nonnegative(
            "intersection_temperature", intersection_temperature
        )

    def forward(self, box_tensor: BoxTensor) -> Tensor:
        temperatures = self.volume_temperature, self.intersection_temperature
        return bessel_volume_approx(box_tensor, *temperatures, self.log_scale, eps=self.eps)


class Volume(nn.Module):
    """Hard where both temperatures are 0, soft where the second is, else the Gumbel approximation."""

    def __init__(
        self,
        log_scale: bool = True,
        volume_temperature: float = 0.0,
        intersection_temperature: float = 0.0,
        *,
        eps: float = 0.0,
        **kwargs: Any,
    ):
        super().__init__()
        self.volume_temperature = checks.nonnegative("volume_temperature", volume_temperature)
        self.intersection_temperature = checks.nonnegative(
            "intersection_temperature", intersection_temperature
        )
        self.log_scale, self.eps = log_scale, checks.nonnegative("eps", eps)
        if self.intersection_temperature:
            nonzero("volume_temperature", volume_temperature)

    def forward(self, box_tensor: BoxTensor) -> Tensor:
        temperatures = self.volume_temperature, self.intersection_temperature
        if temperatures == (0.0, 0.0):
            return hard_volume(box_tensor, self.log_scale, eps=self.eps)
        return bessel_volume_approx(box_tensor, *temperatures, self.log_scale, eps=self.eps)


# modules.pooling


def hard_intersection_pooler(
    boxes: TBoxTensor, mask: Tensor | None = None, dim: int = 0, keepdim: bool = False
) -> TBoxTensor:
    """The hard intersection along a dimension.

    A mask [...] of the boxes, or [..., D] of their corners, is True where a box is left out.
    """
    z, Z = boxes.box
    if mask is not None:
        out = _of_corners("mask", mask, z).bool()
        z, Z = torch.where(out, -math.inf, z), torch.where(out, math.inf, Z)
    return boxes.like_this_from_zZ(z.amax(dim, keepdim=keepdim), Z.amin(dim, keepdim=keepdim))


def bag_of_boxes_pooler(
    boxes: TBoxTensor,
    mask: Tensor | None = None,
    weights: Tensor | None = None,
    dim: int = 0,
    keepdim: bool = False,
) -> TBoxTensor:
    """Weighted means of corners along a dimension; 0 where the weights sum to 0.

    Weights are [...] of the boxes, or [..., D] of their corners; so is a mask, 0 where a box is left out.
    """
    z, Z = boxes.box
    weight = torch.ones_like(z)
    for name, given in (("mask", mask), ("weights", weights)):
        if given is not None:
            weight = weight * _of_corners(name, given, z)
    total = weight.sum(dim, keepdim=keepdim)
    total = torch.where(total == 0, 1.0, total)
    return boxes.like_this_from_zZ(*((t * weight).sum(dim, keepdim=keepdim) / total for t in (z, Z)))


class BoxPooler(nn.Module):
    def __init__(self, dim: int = 0, keepdim: bool = False):
        super().__init__()
        self.dim, self.keepdim = dim, keepdim


class HardIntersectionBoxPooler(BoxPooler):
    def forward(self, box_tensor: TBoxTensor, mask: Tensor | None = None) -> TBoxTensor:
        return hard_intersection_pooler(box_tensor, mask, self.dim, self.keepdim)


class BagOfBoxesBoxPooler(BoxPooler):
    def forward(
        self, box_tensor: TBoxTensor, mask: Tensor | None = None, weights: Tensor | None = None
    ) -> TBoxTensor:
        return bag_of_boxes_pooler(box_tensor, mask, weights, self.dim, self.keepdim)


# modules.regularization


def l2_side_regularizer(box_tensor: BoxTensor, log_scale: bool = False) -> Tensor:
    """(Z - z)^2, or log |Z - z|; [..., D]."""
    w = box_tensor.Z - box_tensor.z
    return (w.abs() + L2_EPS).log() if log_scale else w.square()


class BoxRegularizer(nn.Module):
    """weight times the sum or mean of what ``_forward`` of a subclass gives."""

    def __init__(self, weight: float, log_scale: bool = True, reduction: str = "sum", **kwargs: Any):
        super().__init__()
        checks.one_of("reduction", reduction, ("sum", "mean"))
        self.weight, self.log_scale, self.reduction = checks.number("weight", weight), log_scale, reduction

    def forward(self, box_tensor: BoxTensor) -> Tensor:
        found = self._forward(box_tensor)
        return self.weight * (found.sum() if self.reduction == "sum" else found.mean())

    def _forward(self, box_tensor: BoxTensor) -> Tensor:
        raise NotImplementedError


class L2SideBoxRegularizer(BoxRegularizer):
    def __init__(self, weight: float, log_scale: bool = False, reduction: str = "sum"):
        super().__init__(weight, log_scale, reduction)

    def _forward(self, box_tensor: BoxTensor) -> Tensor:
        return l2_side_regularizer(box_tensor, self.log_scale)


# initializations, modules.BoxEmbedding


def uniform_boxes(
    dimensions: int,
    num_boxes: int,
    minimum: float = 0.0,
    maximum: float = 1.0,
    delta_min: float = 0.01,
    delta_max: float = 0.5,
) -> tuple[Tensor, Tensor]:
    """Corners [num_boxes, dimensions], float64: centres uniform where all sides fit, and uniform sides."""
    if delta_min <= 0:
        raise ValueError(f"delta_min must be above 0, got {delta_min}")
    if not delta_min < delta_max <= maximum - minimum:
        raise ValueError(
            f"delta_max must be above delta_min = {delta_min} and at most maximum - minimum = "
            f"{maximum - minimum}, got {delta_max}"
        )
    u, v = torch.rand(2, num_boxes, dimensions, dtype=torch.float64)
    centre = minimum + delta_max / 2 + (maximum - minimum - delta_max) * u
    half = (delta_min + (delta_max - delta_min) * v) / 2 - 1e-8
    return centre - half, centre + half


class BoxInitializer:
    def __call__(self, t: Tensor) -> None:
        """Writes initial weights to t."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"{type(self).__name__} with attributes {self.__dict__}"


class UniformBoxInitializer(BoxInitializer):
    """Writes weights of :func:`uniform_boxes` to a tensor [num_boxes, 2, dimensions] or [num_boxes, 2 D]."""

    def __init__(
        self,
        dimensions: int,
        num_boxes: int,
        box_type_factory: BoxFactory,
        minimum: float = 0.0,
        maximum: float = 1.0,
        delta_min: float = 0.01,
        delta_max: float = 0.5,
    ):
        self.dimensions, self.num_boxes = dimensions, num_boxes
        self.box_type_factory = box_type_factory
        self.minimum, self.maximum = minimum, maximum
        self.delta_min, self.delta_max = delta_min, delta_max

    @torch.no_grad()
    def __call__(self, t: Tensor) -> None:
        sizes = self.minimum, self.maximum, self.delta_min, self.delta_max
        z, Z = uniform_boxes(self.dimensions, self.num_boxes, *sizes)
        weights = self.box_type_factory.box_subclass.W(z, Z, **self.box_type_factory.kwargs_dict)
        if t.shape not in (weights.shape, weights.flatten(-2).shape):
            raise ValueError(
                f"t must be {list(weights.shape)} or {list(weights.flatten(-2).shape)}, got {list(t.shape)}"
            )
        t.copy_(weights.reshape(t.shape))


class BoxEmbedding(nn.Embedding):
    """Rows of weights [num_embeddings, 2 embedding_dim] as boxes; further arguments as ``nn.Embedding``'s."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        box_factory: BoxFactory | None = None,
        box_initializer: BoxInitializer | None = None,
        **kwargs: Any,
    ):
        box_factory = box_factory or BoxFactory("mindelta_from_vector")
        super().__init__(num_embeddings, embedding_dim * box_factory.box_subclass.w2z_ratio, **kwargs)
        self.box_factory = box_factory
        if box_initializer is None:
            box_initializer = UniformBoxInitializer(embedding_dim, num_embeddings, box_factory)
        box_initializer(self.weight)

    def forward(self, inputs: Tensor) -> BoxTensor:  # type: ignore[override]
        return self.box_factory(super().forward(inputs))

    @property
    def all_boxes(self) -> BoxTensor:
        return self.box_factory(self.weight)

    def get_bounding_box(self) -> BoxTensor:
        z, Z = self.all_boxes.box
        return self.box_factory.box_subclass.from_zZ(z.amin(0), Z.amax(0), **self.box_factory.kwargs_dict)


# Checks


def _intersection(left: TBoxTensor, right: BoxTensor, tau: float) -> TBoxTensor:
    return left.like_this_from_zZ(*reference.intersection([left.box, right.box], tau))


def _check_mode(mode: Any) -> None:
    if mode not in MODES:
        raise ValueError(f"approximation_mode must be one of {MODES}, got {checks.shown(mode)}")


def _of_corners(name: str, t: Any, z: Tensor) -> Tensor:
    """A tensor of the boxes [...] or of their corners [..., D], as one that broadcasts with the corners."""
    if not isinstance(t, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(t).__name__}")
    found = t.unsqueeze(-1) if t.ndim == z.ndim - 1 else t
    if found.ndim != z.ndim or any(a not in (1, b) for a, b in zip(found.shape, z.shape, strict=True)):
        raise ValueError(f"{name} must be {list(z.shape[:-1])}, of the boxes, got shape {tuple(t.shape)}")
    return found
