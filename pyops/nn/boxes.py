"""Boxes in modules: tables of boxes with their initial values, and several boxes pooled into one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pyops.boxes import Box
from pyops.ops import _checks as checks
from pyops.ops._box_arguments import Pair, corners, in_functorch
from pyops.reference import boxes as reference

PARAMETERIZATIONS = ("raw", "min_delta", "sigmoid", "centre_offset")
INSIDE = (
    1e-6  # how far initial boxes of sigmoids keep from the faces of the unit cube, where weights are infinite
)


@dataclass(frozen=True)
class UniformBox:
    """Initial boxes inside [low, high]^D: sides uniform in [smallest, largest], then centres uniform.

    The defaults are those of ``UniformBoxInitializer`` in the package box-embeddings.

    >>> UniformBox(low=-1.0)(3, 5).shape
    torch.Size([3, 5])
    """

    low: float = 0.0
    high: float = 1.0
    smallest: float = 0.01
    largest: float = 0.5

    def __post_init__(self) -> None:
        Box.uniform(0, **asdict(self))  # refuses what makes no box

    def __call__(self, *shape: int, dtype: torch.dtype | None = None, device: Any = None) -> Box:
        """Boxes with corners of that shape, from torch's default random generator."""
        return Box.uniform(*shape, **asdict(self), dtype=dtype, device=device)


class BoxEmbedding(nn.Module):
    """A table of boxes: rows of 2 D weights, which a parameterization of :class:`pyops.boxes.Box` maps to
    lower and upper corners.

    ====================  ===============================================================
    parameterization      corners of a row (a, b)
    ====================  ===============================================================
    ``"min_delta"``       a, a + softplus(beta b) / beta
    ``"raw"``             a, b; may become inverted
    ``"sigmoid"``         sigmoid(a) and, of what is above it up to 1, the part sigmoid(b)
    ``"centre_offset"``   a - softplus(b), a + softplus(b)
    ====================  ===============================================================

    Args:
        num_embeddings: rows N.
        embedding_dim: dimensions D of a box.
        parameterization: one of the above.
        beta: of ``"min_delta"``, above 0; sides below about 1 / beta are soft.
        initializer: called as ``initializer(N, D, dtype=..., device=...)``, at least in float32, for boxes
            with [N, D] corners, which become the weights; by default :class:`UniformBox`.
        sparse: the gradient of ``weight`` by :meth:`forward` is sparse (COO, not coalesced) and has the rows
            that were looked up, as of ``torch.nn.Embedding``; for ``torch.optim.SparseAdam``.
        device, dtype: of the weight; float64, float32, bfloat16 or float16.

    Parameters:
        ``weight`` [N, 2 D], a first. It is that of box-embeddings' ``BoxEmbedding`` with the factories
        "mindelta_from_vector", "boxtensor_from_vector" and "sigmoid_from_vector": state dicts fit both ways.

    Raises:
        TypeError, ValueError: naming the argument, what was received and what is wanted.

    Training with few rows of large tables: :func:`pyops.boxes.sampled_scores` looks up those that occur:

    >>> from pyops.boxes import sampled_scores
    >>> users, items = BoxEmbedding(100, 8, sparse=True), BoxEmbedding(5000, 8, sparse=True)
    >>> user, item = torch.tensor([3, 7]), torch.tensor([[1, 2, 3], [2, 4, 1]])
    >>> soft = {"intersection_temperature": 0.1, "volume_temperature": 0.1}
    >>> log_p = sampled_scores(users, items, user, item, **soft)  # [2, 3]
    >>> log_p.sum().backward()
    >>> items.weight.grad.coalesce().indices()
    tensor([[1, 2, 3, 4]])
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        parameterization: str = "min_delta",
        *,
        beta: float = 1.0,
        initializer: Callable[..., Pair] | None = None,
        sparse: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.num_embeddings = checks.count("num_embeddings", num_embeddings)
        self.embedding_dim = checks.count("embedding_dim", embedding_dim)
        checks.one_of("parameterization", parameterization, PARAMETERIZATIONS)
        beta = checks.nonnegative("beta", beta)
        if beta == 0:
            raise ValueError("beta must be above 0, got 0.0")
        if parameterization != "min_delta":
            checks.unused(f"parameterization={parameterization!r}", beta=(beta, 1.0))
        if initializer is not None and not callable(initializer):
            raise TypeError(f"initializer must be callable, got {checks.shown(initializer)}")
        checks.boolean("sparse", sparse)
        dtype = torch.get_default_dtype() if dtype is None else dtype
        if dtype not in checks.DTYPES:
            raise TypeError(f"dtype must be float64, float32, bfloat16 or float16, got {dtype}")
        self.parameterization, self.beta, self.sparse = parameterization, beta, sparse
        self.initializer = UniformBox() if initializer is None else initializer
        self.weight = nn.Parameter(torch.empty(num_embeddings, 2 * embedding_dim, device=device, dtype=dtype))
        self.reset_parameters()

    def extra_repr(self) -> str:
        text = f"{self.num_embeddings}, {self.embedding_dim}, {self.parameterization}"
        text += f", beta={self.beta}" if self.parameterization == "min_delta" else ""
        return text + (", sparse=True" if self.sparse else "")

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws the boxes anew."""
        dtype = torch.promote_types(self.weight.dtype, torch.float32)
        shape = self.num_embeddings, self.embedding_dim
        found = corners("initializer's box", self.initializer(*shape, dtype=dtype, device=self.weight.device))
        box = Box(*found)
        if tuple(box.shape) != shape:
            raise ValueError(f"initializer must give corners {list(shape)}, got shape {tuple(box.shape)}")
        if self.parameterization == "raw":
            weights: Pair = box
        elif self.parameterization == "min_delta":
            weights = box.to_min_delta(beta=self.beta)
        elif self.parameterization == "sigmoid":
            inner = Box(box.z.clamp(min=INSIDE), box.Z.clamp(max=1 - INSIDE))
            inside = ((box.z >= 0) & (box.Z <= 1)).all()
            weights = inner.to_sigmoid()
            if not box.z.is_meta and not bool(inside):
                raise ValueError("initializer must give boxes inside the unit cube for 'sigmoid'")
        else:
            weights = box.to_centre_offset()
        stacked = torch.cat(weights, -1)
        if not stacked.is_meta and not bool(stacked.isfinite().all()):
            raise ValueError(
                f"initializer must give boxes that {self.parameterization!r} can hold, with finite corners "
                "and sides above 0, got others"
            )
        self.weight.copy_(stacked)

    def forward(self, index: Tensor) -> Box:
        """The boxes of some rows.

        Args:
            index: [...] int64 or int32, of any shape.

        Returns:
            Box with corners [..., D] in the dtype of the weight.

        Raises:
            TypeError, ValueError: naming index. Rows outside the table are found on the CPU only, and by
                torch where torch.compile traces.
        """
        self._check_index(index)
        return self._box(F.embedding(index, self.weight, sparse=self.sparse))

    @property
    def boxes(self) -> Box:
        """All boxes, corners [N, D]; for "raw" views of the weight. Gradients through it are dense."""
        return self._box(self.weight)

    def bounding_box(self) -> Box:
        """The smallest box [D] that contains all."""
        if not self.num_embeddings:
            raise ValueError("num_embeddings must be at least 1 for a bounding box, got 0")
        z, Z = self.boxes
        return Box(torch.minimum(z, Z).amin(0), torch.maximum(z, Z).amax(0))

    def _box(self, rows: Tensor) -> Box:
        a, b = rows.split(self.embedding_dim, -1) if self.embedding_dim else (rows, rows)
        if self.parameterization == "min_delta":
            return Box.min_delta(a, b, beta=self.beta)
        if self.parameterization == "sigmoid":
            return Box.sigmoid(a, b)
        return Box.raw(a, b) if self.parameterization == "raw" else Box.centre_offset(a, b)

    def _check_index(self, index: Any) -> None:
        if not isinstance(index, Tensor):
            raise TypeError(f"index must be a torch.Tensor, got {type(index).__name__}")
        if index.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"index must be int64 or int32, got {index.dtype}")
        if index.device != self.weight.device:
            raise ValueError(
                f"index must be on the device of weight, {self.weight.device}, got {index.device}"
            )
        if index.is_cpu and index.numel() and not torch.compiler.is_compiling() and in_functorch() is None:
            low, high = (int(t) for t in index.aminmax())
            if low < 0 or high >= self.num_embeddings:
                raise ValueError(
                    f"index must be in 0 ... {self.num_embeddings - 1}, got {low if low < 0 else high}"
                )


class _Pooler(nn.Module):
    """One box of the boxes along one dimension.

    Args:
        dim: of the corners [..., D], along which boxes are pooled; not the last.
        keepdim: that dimension stays, of size 1.
    """

    def __init__(self, dim: int, keepdim: bool):
        super().__init__()
        self.dim = checks.integer("dim", dim)
        checks.boolean("keepdim", keepdim)
        self.keepdim = keepdim

    def extra_repr(self) -> str:
        return f"dim={self.dim}, keepdim={self.keepdim}"

    def _boxes(self, box: Any, mask: Any) -> tuple[Tensor, Tensor, int, Tensor | None]:
        """Corners in at least float32, the dimension from the end, and the mask [..., 1]."""
        z, Z = corners("box", box)
        dim = self.dim - z.ndim if self.dim >= 0 else self.dim
        if not -z.ndim <= dim <= -2:
            raise ValueError(
                f"dim must be a dimension of box of shape {tuple(z.shape)} and not its last, got {self.dim}"
            )
        if mask is not None:
            if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
                got = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
                raise TypeError(f"mask must be a bool tensor, got {got}")
            mask = _per_box("mask", mask, z)
        dtype = torch.promote_types(z.dtype, torch.float32)
        return z.to(dtype), Z.to(dtype), dim, mask


class IntersectionPooler(_Pooler):
    """The intersection of all boxes along a dimension, hard or Gumbel: what lies in every one of them.

    Args:
        intersection_temperature: as of :func:`pyops.boxes.intersection`; 0 (default) takes max z and min Z.
        dim, keepdim: the dimension of the corners [..., n, D] that is pooled, by default that of n, and
            whether it stays, of size 1.

    ``pooler(box, mask=None)`` gives a Box with corners [..., D] in float32 (float64 for float64). ``mask``,
    bool and broadcast to [..., n], is True where a box counts. None at all is no constraint: z = -inf,
    Z = inf. It may be inverted where boxes do not meet. Errors are TypeError and ValueError and name the
    argument.

    >>> box = Box(torch.tensor([[0.0], [1.0], [5.0]]), torch.tensor([[2.0], [3.0], [6.0]]))
    >>> IntersectionPooler()(box, mask=torch.tensor([True, True, False]))
    Box(z=tensor([1.]), Z=tensor([2.]))
    """

    def __init__(self, intersection_temperature: float = 0.0, *, dim: int = -2, keepdim: bool = False):
        super().__init__(dim, keepdim)
        self.intersection_temperature = checks.nonnegative(
            "intersection_temperature", intersection_temperature
        )

    def extra_repr(self) -> str:
        return f"intersection_temperature={self.intersection_temperature}, {super().extra_repr()}"

    def forward(self, box: Pair, mask: Tensor | None = None) -> Box:
        z, Z, dim, mask = self._boxes(box, mask)
        if mask is not None:
            z, Z = torch.where(mask, z, -torch.inf), torch.where(mask, Z, torch.inf)
        if z.shape[dim]:
            pairs = list(zip(z.unbind(dim), Z.unbind(dim), strict=True))
            z, Z = reference.intersection(pairs, self.intersection_temperature)
        else:
            z, Z = (t.sum(dim) + bound for t, bound in ((z, -torch.inf), (Z, torch.inf)))
        return Box(z.unsqueeze(dim), Z.unsqueeze(dim)) if self.keepdim else Box(z, Z)


class BagOfBoxesPooler(_Pooler):
    """The weighted mean of all boxes along a dimension, corner by corner.

        z = sum_n weight_n z_n / sum_n weight_n,   Z likewise

    Args:
        dim, keepdim: as of :class:`IntersectionPooler`.

    ``pooler(box, weights=None, mask=None)`` gives a Box with corners [..., D] in float32 (float64 for
    float64). ``weights``, floating and broadcast to [..., n], are 1 by default; ``mask`` is True where a box
    counts. Where the weights sum to 0 both corners are 0. Errors are TypeError and ValueError and name the
    argument.

    >>> box = Box(torch.tensor([[0.0], [1.0]]), torch.tensor([[2.0], [4.0]]))
    >>> BagOfBoxesPooler()(box, weights=torch.tensor([1.0, 3.0]))
    Box(z=tensor([0.7500]), Z=tensor([3.5000]))
    """

    def __init__(self, *, dim: int = -2, keepdim: bool = False):
        super().__init__(dim, keepdim)

    def forward(self, box: Pair, weights: Tensor | None = None, mask: Tensor | None = None) -> Box:
        z, Z, dim, mask = self._boxes(box, mask)
        if weights is None:
            weights = z.new_ones(*z.shape[:-1], 1)
        else:
            checks.matrix("weights", weights, 0)
            weights = _per_box("weights", weights, z).to(z.dtype)
        if mask is not None:
            # Boxes that do not count may hold anything.
            z, Z, weights = (torch.where(mask, t, 0.0) for t in (z, Z, weights))
        total = weights.sum(dim, keepdim=self.keepdim)
        total = torch.where(total == 0, 1.0, total)
        return Box(*((t * weights).sum(dim, keepdim=self.keepdim) / total for t in (z, Z)))


def _per_box(name: str, t: Tensor, z: Tensor) -> Tensor:
    """[..., 1] of a tensor that broadcasts to the leading dimensions of z."""
    if t.device != z.device:
        raise ValueError(f"{name} must be on the device of box, {z.device}, got {t.device}")
    try:
        return t.expand(z.shape[:-1]).unsqueeze(-1)
    except RuntimeError:
        raise ValueError(
            f"{name} must broadcast to {list(z.shape[:-1])}, the boxes, got shape {tuple(t.shape)}"
        ) from None
