"""Arguments of box functions: boxes, temperatures and volumes, rows of tables; composition of queries."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from pyops.ops import _checks as checks
from pyops.reference import boxes as reference

VOLUMES = ("auto", "gumbel", "soft", "hard", "bessel")
MOST_NEGATIONS = 8  # k of them are 2^k terms
Pair = tuple[Tensor, Tensor]
SPLITS = ("SplitBackward", "SplitWithSizesBackward", "UnbindBackward")  # take sparse gradients
in_functorch = torch._C._functorch.peek_interpreter_stack


class Volume(NamedTuple):
    """How volumes are taken: the kind, both temperatures, the offset in softplus((w - offset) / nu)."""

    kind: str
    tau: float | Tensor
    nu: float | Tensor
    offset: float | Tensor


def corners(name: str, box: Any) -> Pair:
    """(z, Z) of a box, of one shape, dtype and device."""
    if not _is_pair(box):
        raise TypeError(f"{name} must be a Box or a pair (z, Z) of tensors, got {_kind(box)}{_instead(box)}")
    z, Z = box
    checks.matrix(f"{name}.z", z, 1)
    checks.matrix(f"{name}.Z", Z, 1)
    if z.shape != Z.shape:
        raise ValueError(f"{name}.Z must have the shape of z, {tuple(z.shape)}, got {tuple(Z.shape)}")
    if z.device != Z.device:
        raise ValueError(f"{name}.Z must be on the device of z, {z.device}, got {Z.device}")
    if z.dtype != Z.dtype:
        dtype = torch.promote_types(z.dtype, Z.dtype)
        return z.to(dtype), Z.to(dtype)
    return z, Z


def several(name: str, boxes: Any) -> list[Pair]:
    """The boxes of a sequence, or the one box."""
    if _is_pair(boxes):
        return [corners(name, boxes)]
    if not isinstance(boxes, list | tuple):
        wanted = f"{name} must be a Box, a pair (z, Z) or a sequence of them"
        raise TypeError(f"{wanted}, got {_kind(boxes)}{_instead(boxes)}")
    if not boxes:
        raise ValueError(f"{name} must have at least one box, got an empty {type(boxes).__name__}")
    found = [corners(f"{name}[{i}]", box) for i, box in enumerate(boxes)]
    check_broadcast([f"{name}[{i}]" for i in range(len(found))], found)
    return found


def check_broadcast(names: Sequence[str], boxes: Sequence[Pair]) -> torch.Size:
    """Boxes of one dimension and device whose leading dimensions broadcast; the shape they broadcast to."""
    shape = boxes[0][0].shape
    for name, box in zip(names[1:], boxes[1:], strict=True):
        check_alike(name, box, names[0], boxes[0])
        try:
            shape = torch.broadcast_shapes(shape, box[0].shape)
        except RuntimeError:
            raise ValueError(
                f"{name} must have leading dimensions that broadcast with {tuple(shape[:-1])}, "
                f"got shape {tuple(box[0].shape)}"
            ) from None
    return shape


def resolve_volume(tau: Any, nu: Any, volume: Any) -> Volume:
    """The kind of volume that the three arguments choose."""
    tau = _temperature("intersection_temperature", tau)
    nu = _temperature("volume_temperature", nu)
    checks.one_of("volume", volume, VOLUMES)
    no_tau, no_nu = (not isinstance(t, Tensor) and t == 0 for t in (tau, nu))
    if volume == "auto":
        volume = "hard" if no_nu else "soft" if no_tau else "gumbel"
    if no_tau and volume in ("gumbel", "bessel"):
        raise ValueError(f"intersection_temperature must be above 0 for volume={volume!r}, got {tau}")
    if no_nu and volume in ("gumbel", "soft"):
        raise ValueError(f"volume_temperature must be above 0 for volume={volume!r}, got {nu}")
    offset = 2 * reference.GAMMA * tau if volume == "gumbel" else 0.0
    return Volume(volume, tau, 0.0 if volume in ("hard", "bessel") else nu, offset)


def _temperature(name: str, value: Any) -> float | Tensor:
    if not isinstance(value, Tensor):
        return checks.nonnegative(name, value)
    if value.dtype not in checks.DTYPES:
        raise TypeError(f"{name} must be a number or a floating tensor, got {value.dtype}")
    if not torch.compiler.is_compiling() and value.device.type != "meta" and in_functorch() is None:
        with torch.no_grad():
            if not bool(((value > 0) & (value < math.inf)).all()):
                raise ValueError(f"{name} must be finite and above 0 where it is a tensor")
    return value


def _is_pair(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2 and all(isinstance(t, Tensor) for t in value)


def _kind(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"a {type(value).__name__} of {', '.join(type(v).__name__ for v in value) or 'nothing'}"
    return checks.shown(value) if isinstance(value, Tensor) else type(value).__name__


def _instead(value: Any) -> str:
    """What of a table or of box-embeddings' tensors is a Box."""
    found = [name for name in ("boxes", "box") if hasattr(type(value), name)]
    return f"; its Box is .{found[0]}" if found else ""


def check_alike(name: str, box: Pair, other: str, first: Pair) -> None:
    if box[0].shape[-1] != first[0].shape[-1]:
        raise ValueError(
            f"{name} must have the {first[0].shape[-1]} dimensions of {other}, "
            f"got {box[0].shape[-1]} in shape {tuple(box[0].shape)}"
        )
    if box[0].device != first[0].device:
        raise ValueError(f"{name} must be on the device of {other}, {first[0].device}, got {box[0].device}")


def only_numbers(volume: Volume) -> None:
    for name, value in (("intersection_temperature", volume.tau), ("volume_temperature", volume.nu)):
        checks.number(name, value)
    if volume.kind == "bessel":
        raise ValueError("volume must be one of 'auto', 'gumbel', 'soft', 'hard' here, got 'bessel'")


def check_index(name: str, index: Any, table: Tensor) -> Tensor:
    if not isinstance(index, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(index).__name__}")
    if index.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} must be int64, got {index.dtype}")
    if index.ndim not in (1, 2):
        raise ValueError(f"{name} must be [B] or [B, S], got shape {tuple(index.shape)}")
    if index.device != table.device:
        raise ValueError(f"{name} must be on the device of the boxes, {table.device}, got {index.device}")
    looks = index.is_cpu and type(index) is Tensor and not torch.compiler.is_compiling()
    if looks and in_functorch() is None and index.numel():
        low, high = (int(t) for t in index.aminmax())
        if low < 0 or high >= len(table):
            raise ValueError(f"{name} must be in 0 ... {len(table) - 1}, got {low if low < 0 else high}")
    return index.long()


def looked_up(name: str, table: Any, index_name: str, index: Any, sparse: bool) -> tuple[Any, Any]:
    """Of a module, the boxes of the rows that occur, each once, and where each index lies among them."""
    weight = getattr(table, "weight", None)
    if not isinstance(table, torch.nn.Module) or not isinstance(weight, Tensor):
        return table, index
    if sparse:
        raise ValueError(
            f"sparse must be False where {name} is a module, got True: BoxEmbedding(..., sparse=True) decides"
        )
    rows, at = check_index(index_name, index, weight).unique(return_inverse=True)
    return table(rows), at


def check_sparse(name: str, corner: Tensor) -> None:
    """Autograd takes sparse gradients of leaves and of pieces of leaves, and of little else."""
    if torch.compiler.is_compiling() or in_functorch() is not None or not torch.is_grad_enabled():
        return
    node = corner.grad_fn
    while node is not None and node.name().startswith(SPLITS):
        node = node.next_functions[0][0]
    if node is not None and not node.name().endswith("AccumulateGrad"):
        raise ValueError(
            "sparse=True needs corners that are leaf tables, or pieces of one by split, chunk or unbind; "
            f"{name} is a result of {node.name()}. In place of a BoxEmbedding's boxes give the module "
            'itself, made with sparse=True, or make it with parameterization="raw"'
        )


def check_indices(query_index: Tensor, item_index: Tensor) -> None:
    same = query_index.shape == item_index.shape
    if not same and (query_index.ndim == item_index.ndim or len(query_index) != len(item_index)):
        raise ValueError(
            "item_index must be [B, S] or [B] with the B and S of query_index, of shape "
            f"{tuple(query_index.shape)}, got shape {tuple(item_index.shape)}"
        )


def check_item_log_volume(given: Any, items: Tensor, score: str) -> None:
    if score == "volume":
        raise ValueError('item_log_volume must be None with score="volume"')
    checks.matrix("item_log_volume", given, 1)
    if tuple(given.shape) != (len(items),):
        raise ValueError(f"item_log_volume must be [{len(items)}], got shape {tuple(given.shape)}")
    if given.device != items.device:
        raise ValueError(
            f"item_log_volume must be on the device of items, {items.device}, got {given.device}"
        )


# Composition


class Prepared(NamedTuple):
    queries: Pair  # [T, B, D]: the terms of inclusion-exclusion
    signs: list[float]
    items: Pair  # [N, D]
    volume: Volume
    shape: tuple[int, ...]  # of the result
    shift: Tensor | None  # sum log tau_d, where corners are in units of tau_d


def prepare(
    queries: Any, items: Any, without: Any, tau: Any, nu: Any, volume: Any, *, vector: bool
) -> Prepared:
    """Checks, one dtype, composition; with ``vector`` temperatures may be tensors [D]."""
    chosen = resolve_volume(tau, nu, volume)
    if not vector:
        only_numbers(chosen)
    conjuncts = several("queries", queries)
    item = corners("items", items)
    none = without is None or (isinstance(without, list | tuple) and not without)
    excluded = [] if none else several("without", without)
    if len(excluded) > MOST_NEGATIONS:
        raise ValueError(f"without must have at most {MOST_NEGATIONS} boxes, got {len(excluded)}")
    everything = [*conjuncts, *excluded]
    check_alike("items", item, "queries", everything[0])
    names = ["queries"] * len(conjuncts) + [f"without[{i}]" for i in range(len(excluded))]
    shape = check_broadcast(names, everything)
    vectors = isinstance(chosen.tau, Tensor) or isinstance(chosen.nu, Tensor)
    result = (*shape[:-1], *item[0].shape[:-1])
    if len(everything) == 1 and everything[0][0].dtype == item[0].dtype and not vectors:
        z, Z = everything[0]
        queries = _rows(z).unsqueeze(0), _rows(Z).unsqueeze(0)
        return Prepared(queries, [1.0], (_rows(item[0]), _rows(item[1])), chosen, result, None)
    dtype = item[0].dtype
    for z, _ in everything:
        dtype = torch.promote_types(dtype, z.dtype)
    if len(everything) > 1 or isinstance(chosen.tau, Tensor):
        dtype = torch.promote_types(dtype, torch.float32)  # corners that are computed keep their digits
    shift = None
    boxes = [(z.to(dtype), Z.to(dtype)) for z, Z in [*everything, item]]
    if vectors:
        chosen, boxes, shift = _per_dimension(chosen, boxes)
    *everything, item = boxes
    base = everything[: len(conjuncts)]
    terms, signs = [reference.intersection(base, chosen.tau) if len(base) > 1 else base[0]], [1.0]
    for box in everything[len(conjuncts) :]:
        terms += [reference.intersection([term, box], chosen.tau) for term in terms]
        signs += [-sign for sign in signs]
    z, Z = (torch.stack([_rows(t[i].expand(shape)) for t in terms]) for i in (0, 1))
    return Prepared((z, Z), signs, (_rows(item[0]), _rows(item[1])), chosen, result, shift)


def _rows(t: Tensor) -> Tensor:
    """[..., D] as [rows, D]."""
    return t if t.ndim == 2 else t.unsqueeze(0) if t.ndim == 1 else t.flatten(0, -2)


def _per_dimension(volume: Volume, boxes: list[Pair]) -> tuple[Volume, list[Pair], Tensor | None]:
    """Temperatures [D]: the corners in units of tau_d, where tau is 1, and log volume lacks sum log tau_d."""
    z = boxes[0][0]
    wide = reference.working_dtype(z)
    tau, nu = (
        _vector(name, value, z, wide) if isinstance(value, Tensor) else value
        for name, value in (("intersection_temperature", volume.tau), ("volume_temperature", volume.nu))
    )
    if not isinstance(tau, Tensor):
        return volume._replace(nu=nu), boxes, None
    # About their middle, so that the quotients keep the digits of the differences.
    some = boxes[-1][0].detach().to(wide).flatten(0, -2)
    middle = torch.where(some.isfinite(), some, math.nan).nanmean(0).nan_to_num(0.0)
    boxes = [((z - middle) / tau, (Z - middle) / tau) for z, Z in boxes]
    nu = nu / tau if isinstance(nu, Tensor) or nu else 0.0
    offset = 2 * reference.GAMMA if volume.kind == "gumbel" else 0.0
    return Volume(volume.kind, 1.0, nu, offset), boxes, tau.log().sum()


def _vector(name: str, value: Tensor, z: Tensor, dtype: torch.dtype) -> Tensor:
    if value.ndim > 1 or (value.ndim == 1 and value.shape[0] != z.shape[-1]):
        raise ValueError(f"{name} must be a number or [{z.shape[-1]}], got shape {tuple(value.shape)}")
    if value.device != z.device:
        raise ValueError(f"{name} must be on the device of the boxes, {z.device}, got {value.device}")
    if value.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{name} must not require a gradient here: pyops.boxes.log_volume gives it one")
    if not torch.compiler.is_compiling() and forward_ad.unpack_dual(value).tangent is not None:
        raise RuntimeError(f"{name} has a forward-mode tangent, and its derivative is not implemented here")
    return value.to(dtype).expand(z.shape[-1]).contiguous()
