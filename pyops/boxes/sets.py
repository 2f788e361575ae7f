"""Set functions of boxes, elementwise with broadcasting, in logarithms, differentiable any number of times.

In all of them a box is a :class:`Box` or a pair (z, Z) of [..., D] tensors in float64, float32, bfloat16 or
float16; leading dimensions broadcast as in torch, 16-bit corners are computed with in float32, results are
float32 (float64 where any box is). ``intersection_temperature`` (tau, in the units of the corners),
``volume_temperature`` (nu) and ``volume`` are those of :func:`pairwise_log_volume`; temperatures may also be
tensors that broadcast against the corners, and have gradients. Errors are TypeError or ValueError, naming the
argument, what was received and what is wanted.

Two Gumbel boxes are independent random boxes, even where both have the corners of one. The intersection of a
box with itself is smaller, by 2 tau log 2 in w per dimension: P(a | a) < 1, jaccard(a, a) < 1, union(a, a) is
larger than a, and difference(a, a) is not empty. All of it fades with the intersection temperature: take one
that is small beside the sides, or 0, for soft and hard boxes, where equal boxes are equal. For the many with
the many, see :func:`pairwise_log_volume`.

Dasgupta et al.: "Improving local identifiability in probabilistic box embeddings", NeurIPS 2020.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from pyops.boxes.box import Box
from pyops.ops._box_arguments import Pair, Volume, check_broadcast, corners, resolve_volume
from pyops.reference import boxes as reference

MOST_BOXES = 10  # of a union: 2^n terms
Temperature = float | Tensor
_APART = "pass the boxes as separate arguments"


def intersection(*boxes: Pair, intersection_temperature: Temperature) -> Box:
    """The box that lies in all of the given ones.

        z = tau log sum exp(z_i / tau),   Z = -tau log sum exp(-Z_i / tau);   max z_i, min Z_i for tau = 0.

    Its sides may be inverted (z > Z), which :func:`log_volume` understands. One box is its own intersection.

    >>> a, b = Box(torch.zeros(2), torch.ones(2)), Box(torch.full((2,), 0.5), torch.full((2,), 2.0))
    >>> intersection(a, b, intersection_temperature=0.0)
    Box(z=tensor([0.5000, 0.5000]), Z=tensor([1., 1.]))
    """
    found = _boxes("boxes", boxes)
    # Any volume serves: only the temperature is taken.
    tau = resolve_volume(intersection_temperature, 0.0, "hard").tau
    return Box(*reference.intersection(found, tau)) if len(found) > 1 else found[0]


def log_volume(
    box: Pair,
    *,
    intersection_temperature: Temperature,
    volume_temperature: Temperature,
    volume: str = "auto",
) -> Tensor:
    """Log volumes, [...]: the sum over dimensions of log side of w = Z - z.

    ======  =================================  =====================================================
    volume  side                               where w is far below 0
    ======  =================================  =====================================================
    gumbel  nu softplus((w - 2 gamma tau)/nu)  log side has the slope 1 / nu
    soft    nu softplus(w / nu)                the same
    hard    max(w, 0)                          -inf; the gradient of all dimensions is 0
    bessel  2 tau K0(2 exp(-w / (2 tau)))      falls doubly exponentially; where the exponential leaves
                                               the dtype (w < -160 tau, float64 -1400 tau) it stays
    ======  =================================  =====================================================

    "auto" is hard if nu = 0, else soft if tau = 0, else gumbel.

    >>> box = Box(torch.zeros(2), torch.tensor([2.0, 1.0]))
    >>> log_volume(box, intersection_temperature=0.0, volume_temperature=0.0).exp()
    tensor(2.)
    """
    chosen = resolve_volume(intersection_temperature, volume_temperature, volume)
    return _log_volume(_boxes("box", [box], single=True)[0], chosen)


def containment(
    a: Pair,
    b: Pair,
    *,
    intersection_temperature: Temperature,
    volume_temperature: Temperature,
    volume: str = "auto",
) -> Tensor:
    """log P(a | b) = log volume(a and b) - log volume(b), at most 0.

    P(a | a) is 1 for hard and soft boxes and less for Gumbel boxes, which are independent even with equal
    corners: per dimension w falls by 2 tau log 2. Smaller temperatures bring it to 1.

    What rounding puts above 0 is cut and keeps its gradient; -inf where the volume of both is 0.

    >>> a, b = Box(torch.zeros(1), torch.ones(1)), Box(torch.full((1,), 0.5), torch.full((1,), 1.5))
    >>> containment(a, b, intersection_temperature=0.0, volume_temperature=0.0).exp()
    tensor(0.5000)
    """
    chosen = resolve_volume(intersection_temperature, volume_temperature, volume)
    a, b = _boxes("", {"a": a, "b": b})
    return _containment(a, b, chosen)


def complement(
    a: Pair,
    b: Pair,
    *,
    intersection_temperature: Temperature,
    volume_temperature: Temperature,
    volume: str = "auto",
) -> Tensor:
    """log P(not a | b) = log(1 - P(a | b)); -inf with gradient 0 where P(a | b) = 1.

    >>> a, b = Box(torch.zeros(1), torch.ones(1)), Box(torch.full((1,), 0.5), torch.full((1,), 2.5))
    >>> complement(a, b, intersection_temperature=0.0, volume_temperature=0.0).exp()
    tensor(0.7500)
    """
    chosen = resolve_volume(intersection_temperature, volume_temperature, volume)
    a, b = _boxes("", {"a": a, "b": b})
    inside = _containment(a, b, chosen)
    return reference.log_difference(torch.zeros_like(inside), inside)


def difference(
    a: Pair,
    b: Pair,
    *,
    intersection_temperature: Temperature,
    volume_temperature: Temperature,
    volume: str = "auto",
) -> Tensor:
    """Log volume of what is in a and not in b: log(volume(a) - volume(a and b)).

    -inf with gradient 0 where nothing remains. Of a Gumbel box less itself something does, since the two are
    independent: see :func:`containment`.

    >>> a, b = Box(torch.zeros(1), torch.ones(1)), Box(torch.full((1,), 0.25), torch.full((1,), 2.0))
    >>> difference(a, b, intersection_temperature=0.0, volume_temperature=0.0).exp()
    tensor(0.2500)
    """
    chosen = resolve_volume(intersection_temperature, volume_temperature, volume)
    a, b = _boxes("", {"a": a, "b": b})
    return reference.log_difference(_log_volume(a, chosen), _joint([a, b], chosen))


def union(
    *boxes: Pair,
    intersection_temperature: Temperature,
    volume_temperature: Temperature,
    volume: str = "auto",
) -> Tensor:
    """Log volume of the union of at most 10 boxes, which is no box, by inclusion-exclusion.

    For two: log(volume(a) + volume(b) - volume(a and b)). The bounding box is larger. The union of a Gumbel
    box with itself is larger than the box, since the two are independent: see :func:`containment`.

    >>> a, b = Box(torch.zeros(1), torch.ones(1)), Box(torch.full((1,), 0.5), torch.full((1,), 2.0))
    >>> union(a, b, intersection_temperature=0.0, volume_temperature=0.0).exp().round()
    tensor(2.)
    """
    chosen = resolve_volume(intersection_temperature, volume_temperature, volume)
    found = _boxes("boxes", boxes)
    if len(found) > MOST_BOXES:
        raise ValueError(f"boxes must be at most {MOST_BOXES}, got {len(found)}")
    return _union(found, chosen)


def jaccard(
    a: Pair,
    b: Pair,
    *,
    intersection_temperature: Temperature,
    volume_temperature: Temperature,
    volume: str = "auto",
) -> Tensor:
    """Logarithm of the Jaccard index, log(volume(a and b) / volume(a or b)), at most 0.

    Below 0 for a Gumbel box and itself, since the two are independent: see :func:`containment`.

    >>> a, b = Box(torch.zeros(1), torch.ones(1)), Box(torch.full((1,), 0.5), torch.full((1,), 2.0))
    >>> jaccard(a, b, intersection_temperature=0.0, volume_temperature=0.0).exp()
    tensor(0.2500)
    """
    chosen = resolve_volume(intersection_temperature, volume_temperature, volume)
    a, b = _boxes("", {"a": a, "b": b})
    return reference.conditional(_joint([a, b], chosen), _union([a, b], chosen))


def _boxes(name: str, boxes: Sequence[Pair] | dict[str, Pair], single: bool = False) -> list[Box]:
    """Checked boxes in one dtype, at least float32, whose leading dimensions broadcast."""
    if not boxes:
        raise ValueError(f"{name} must be at least one box, got none")
    if isinstance(boxes, dict):
        names = list(boxes)
        boxes = list(boxes.values())
    else:
        names = [name] if single else [f"{name}[{i}]" for i in range(len(boxes))]
    for n, box in zip(names, boxes, strict=True):
        if isinstance(box, list | tuple) and any(isinstance(part, list | tuple) for part in box):
            raise TypeError(f"{n} must be one Box, got a {type(box).__name__} of boxes: {_APART}")
    found = [corners(n, box) for n, box in zip(names, boxes, strict=True)]
    check_broadcast(names, found)
    dtype = torch.float32
    for z, _ in found:
        dtype = torch.promote_types(dtype, z.dtype)
    return [Box(z.to(dtype), Z.to(dtype)) for z, Z in found]


def _log_volume(box: Pair, volume: Volume) -> Tensor:
    kind, tau, nu, offset = volume
    return reference.log_volume(*box, kind, tau, nu, offset)


def _joint(boxes: Sequence[Pair], volume: Volume) -> Tensor:
    return _log_volume(reference.intersection(boxes, volume.tau) if len(boxes) > 1 else boxes[0], volume)


def _containment(a: Box, b: Box, volume: Volume) -> Tensor:
    return reference.conditional(_joint([a, b], volume), _log_volume(b, volume))


def _union(boxes: Sequence[Box], volume: Volume) -> Tensor:
    logs, signs = [], []
    for size in range(1, len(boxes) + 1):
        for chosen in itertools.combinations(boxes, size):
            logs.append(_joint(chosen, volume))
            signs.append(1.0 if size % 2 else -1.0)
    stacked = torch.stack(torch.broadcast_tensors(*logs))
    return reference.signed_log_sum(stacked, stacked.new_tensor(signs).view(-1, *(1,) * (stacked.ndim - 1)))
