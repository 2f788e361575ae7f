"""Box embeddings by pairs: log volumes of all intersections, the best items of each query, sampled scores.

Dasgupta, Boratko, Zhang, Vilnis, Li, McCallum: "Improving local identifiability in probabilistic box
embeddings", NeurIPS 2020 (Gumbel boxes); Dasgupta, Boratko, McCallum, ICML 2025 (arXiv 2502.10875: composed
queries over users, attributes and items).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from pyops import _library
from pyops.ops import _checks as checks
from pyops.ops._box_arguments import (
    Pair,
    Prepared,
    Volume,
    check_alike,
    check_index,
    check_indices,
    check_item_log_volume,
    check_sparse,
    corners,
    in_functorch,
    looked_up,
    only_numbers,
    prepare,
    resolve_volume,
)
from pyops.ops._registration import like, triton
from pyops.reference import boxes as reference

SCORES = ("containment", "volume")
PLAIN = (Tensor, torch.nn.Parameter)
_BelowAutograd = torch._C._AutoDispatchBelowAutograd


class TopK(NamedTuple):
    """Scores [..., k], best first, and the items they belong to; -inf and -1 where there is none."""

    values: Tensor
    indices: Tensor


def pairwise_log_volume(
    queries: Pair | Sequence[Pair],
    items: Pair,
    *,
    intersection_temperature: float | Tensor,
    volume_temperature: float | Tensor,
    volume: str = "auto",
    without: Sequence[Pair] | None = (),
) -> Tensor:
    """Log volumes of the intersections of every query with every item.

    With tau the intersection and nu the volume temperature, per dimension

        z = tau log(exp(z_q / tau) + exp(z_i / tau)),   Z likewise with -Z,   w = Z - z,
        log side = log(nu softplus((w - 2 gamma tau) / nu)),

    summed over dimensions. No tensor of queries x items x dimensions is made, forward or backward.

    Args:
        queries: a :class:`pyops.boxes.Box` or pair (z, Z) of [..., D] tensors, z the lower and Z the upper
            corner; or a sequence of such boxes whose leading dimensions broadcast, whose intersection (AND)
            is the query: it is one box, so that their number costs nothing here. float64, float32, bfloat16
            or float16, any strides; mixed dtypes promote. z above Z (inverted) is allowed, -inf and +inf mean
            unconstrained.
        items: a box, [..., D].
        intersection_temperature: tau, in the units of the corners; a number (0: maximum and minimum of
            corners) or a tensor [D] of positive ones.
        volume_temperature: nu, a number (0: hard sides) or a tensor [D] of positive ones.
        volume: ``"gumbel"`` as above, the expected volume of Gumbel boxes to a good approximation for
            w >= 0; ``"soft"`` without 2 gamma tau; ``"hard"`` max(w, 0), whatever nu; ``"bessel"`` the exact
            expectation 2 tau K0(2 exp(-w / (2 tau))) per side, whatever nu, in plain torch and slower;
            ``"auto"`` (default): hard if nu = 0, else soft if tau = 0, else gumbel.
        without: at most 8 boxes, broadcast with the queries, of each of which nothing may be in the result
            (AND NOT): volume(q) - volume(q and a) for one, inclusion-exclusion for more, where k of them cost
            2^k times the work of none.

    Returns:
        [*query dimensions, *item dimensions] in float32 (float64 for float64). -inf with
        gradient 0 where the volume is 0: hard boxes that do not meet, also those that touch, or a difference
        of which nothing remains. Boxes far apart have finite soft and Gumbel
        volumes with slope 1 / nu. Equal corners share the gradient of a maximum equally. D = 0 gives 0. NaN
        stays with its query and its item. Backward mode only; second derivatives raise RuntimeError
        (:func:`pyops.boxes.log_volume` has them), except with ``"bessel"``. No gradient reaches temperatures.

    Raises:
        TypeError, ValueError: naming the argument, what was received and what is wanted.

    Dasgupta et al. 2020.

    >>> users = torch.tensor([[0.0, 0.0], [1.0, 1.0]]), torch.tensor([[2.0, 2.0], [3.0, 2.0]])
    >>> items = torch.tensor([[0.5, 1.0]]), torch.tensor([[1.5, 1.5]])
    >>> pairwise_log_volume(users, items, intersection_temperature=0.0, volume_temperature=0.0).exp()
    tensor([[0.5000],
            [0.2500]])
    >>> soft = {"intersection_temperature": 0.1, "volume_temperature": 0.1}
    >>> pairwise_log_volume(users, items, **soft).shape
    torch.Size([2, 1])
    """
    prepared = prepare(
        queries, items, without, intersection_temperature, volume_temperature, volume, vector=True
    )
    logs = _composed(prepared)
    if prepared.shift is not None:
        logs = logs + prepared.shift
    return logs.reshape(prepared.shape)


def pairwise_containment(
    queries: Pair | Sequence[Pair],
    items: Pair,
    *,
    intersection_temperature: float | Tensor,
    volume_temperature: float | Tensor,
    volume: str = "auto",
    without: Sequence[Pair] | None = (),
) -> Tensor:
    """log P(query | item) = log volume(query and item) - log volume(item), for every query and item.

    Args:
        queries, items, intersection_temperature, volume_temperature, volume, without: as in
            :func:`pairwise_log_volume`.

    Returns:
        [*query dimensions, *item dimensions], at most 0: what rounding puts above is cut to 0 and keeps its
        gradient. -inf where the volume is 0, also for an item of volume 0.

    Raises:
        TypeError, ValueError: as :func:`pairwise_log_volume`.

    >>> user = torch.tensor([0.0, 0.0]), torch.tensor([1.0, 1.0])
    >>> items = torch.tensor([[0.5, 0.0], [0.2, 0.2]]), torch.tensor([[1.5, 1.0], [0.4, 0.4]])
    >>> pairwise_containment(user, items, intersection_temperature=0.0, volume_temperature=0.0).exp()
    tensor([0.5000, 1.0000])
    """
    prepared = prepare(
        queries, items, without, intersection_temperature, volume_temperature, volume, vector=True
    )
    logs = reference.conditional(_composed(prepared), _own_volume(prepared.items, prepared.volume))
    return logs.reshape(prepared.shape)


def box_topk(
    queries: Pair | Sequence[Pair],
    items: Pair,
    k: int,
    *,
    intersection_temperature: float,
    volume_temperature: float,
    volume: str = "auto",
    without: Sequence[Pair] | None = (),
    score: str = "containment",
    item_log_volume: Tensor | None = None,
    prune: bool = True,
) -> TopK:
    """The k best items of each query, without the matrix of all scores.

    Args:
        queries, without: [..., D], as in :func:`pairwise_log_volume`.
        items: a box, [N, D].
        k: at least 1; above N, the rest is filled with -inf and -1.
        intersection_temperature, volume_temperature, volume: as in :func:`pairwise_log_volume`; numbers only,
            and not ``"bessel"``.
        score: ``"containment"``, log P(query | item), or ``"volume"``, the log volume of the intersection.
        item_log_volume: [N], ``pairwise_log_volume`` of the items with an unconstrained query, so that
            repeated calls with ``"containment"`` need not compute it again.
        prune: leave an item as soon as a bound says that it is not among the k best; the result is the same.

    Returns:
        (values [..., k], indices [..., k] int64): values descending in float32 (float64 for float64), equal
        ones by lower index, NaN last. Values have no gradient.

    Raises:
        TypeError, ValueError: naming the argument, what was received and what is wanted.

    >>> user = torch.tensor([0.0, 0.0]), torch.tensor([1.0, 1.0])
    >>> items = torch.tensor([[0.5, 0.0], [0.2, 0.2]]), torch.tensor([[1.5, 1.0], [0.4, 0.4]])
    >>> best = box_topk(user, items, 1, intersection_temperature=0.0, volume_temperature=0.0)
    >>> best.values.exp(), best.indices
    (tensor([1.]), tensor([1]))
    """
    k = checks.integer("k", k)
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")
    checks.one_of("score", score, SCORES)
    checks.boolean("prune", prune)
    prepared = prepare(
        queries, items, without, intersection_temperature, volume_temperature, volume, vector=False
    )
    (z, Z), (iz, iZ) = prepared.queries, prepared.items
    if items[0].ndim != 2:
        raise ValueError(f"items must be [N, D], got shape {tuple(items[0].shape)}")
    if item_log_volume is not None:
        check_item_log_volume(item_log_volume, iz, score)
    elif score == "containment":
        with torch.no_grad():
            item_log_volume = _own_volume(prepared.items, prepared.volume)
    wide = reference.working_dtype(z)
    if item_log_volume is not None:  # an empty item has no volume in common with a query either
        item_log_volume = item_log_volume.to(wide).masked_fill(item_log_volume == -math.inf, 0.0)
    signs = z.new_tensor(prepared.signs, dtype=wide).expand(z.shape[1], len(prepared.signs))
    tensors = (z.movedim(0, 1), Z.movedim(0, 1), signs, iz, iZ, item_log_volume)
    detached = (None if t is None else t.detach() for t in tensors)
    values, indices = torch.ops.pyops.box_topk(*detached, *prepared.volume[1:], k, prune)
    shape = (*prepared.shape[:-1], k)
    return TopK(values.reshape(shape), indices.reshape(shape))


def sampled_scores(
    queries: Pair | torch.nn.Module,
    items: Pair | torch.nn.Module,
    query_index: Tensor,
    item_index: Tensor,
    *,
    intersection_temperature: float,
    volume_temperature: float,
    volume: str = "auto",
    score: str = "containment",
    sparse: bool = False,
) -> Tensor:
    """Scores of chosen pairs of rows of two tables of boxes, as training with negative samples needs them.

    Rows are gathered inside; the gradient is that of the rows which occur.

    Args:
        queries: a box of [U, D] corners; items: a box of [N, D] corners. Either may be a
            :class:`pyops.nn.BoxEmbedding`, of which the rows that occur are looked up, each once; its own
            ``sparse`` says how its gradient is stored. Not under vmap.
        query_index, item_index: int64 rows, [B] or [B, S]; of an index [B], entry b serves all S pairs of
            row b. So ``[B]`` and ``[B, S]`` give each query S items, ``[B, S]`` and ``[B]`` each item S
            queries, and two of the same shape are paired one by one.
        intersection_temperature, volume_temperature, volume: as in :func:`pairwise_log_volume`; numbers only,
            and not ``"bessel"``.
        score: ``"containment"``, log P(query | item) at most 0, or ``"volume"``, the log volume of the
            intersection.
        sparse: gradients of the tables are sparse (COO, not coalesced), as of ``torch.nn.Embedding``. Their
            corners must be leaf tables, or pieces of one by split, chunk or unbind, as ``.boxes`` of a
            BoxEmbedding with ``parameterization="raw"`` are; for the others give the BoxEmbedding itself.

    Returns:
        [B, S], or [B] where both indices are, in float32 (float64 for float64). Second derivatives raise
        RuntimeError.

    Raises:
        TypeError, ValueError: naming the argument, what was received and what is wanted. Rows outside the
            tables: ValueError, or RuntimeError or IndexError where torch.compile traces.

    >>> users = torch.zeros(3, 2), torch.ones(3, 2)
    >>> items = torch.tensor([[0.5, 0.0], [0.2, 0.2]]), torch.tensor([[1.5, 1.0], [0.4, 0.4]])
    >>> hard = {"intersection_temperature": 0.0, "volume_temperature": 0.0}
    >>> sampled_scores(users, items, torch.tensor([2]), torch.tensor([[0, 1]]), **hard).exp()
    tensor([[0.5000, 1.0000]])

    Training with sparse gradients:

    >>> from pyops.nn import BoxEmbedding
    >>> users, items = BoxEmbedding(3, 2, sparse=True), BoxEmbedding(900, 2, sparse=True)
    >>> soft = {"intersection_temperature": 0.1, "volume_temperature": 0.1}
    >>> sampled_scores(users, items, torch.tensor([2]), torch.tensor([[0, 7]]), **soft).sum().backward()
    >>> items.weight.grad.coalesce().indices()
    tensor([[0, 7]])
    """
    checks.one_of("score", score, SCORES)
    checks.boolean("sparse", sparse)
    queries, query_index = looked_up("queries", queries, "query_index", query_index, sparse)
    items, item_index = looked_up("items", items, "item_index", item_index, sparse)
    chosen = resolve_volume(intersection_temperature, volume_temperature, volume)
    only_numbers(chosen)
    tables = [corners("queries", queries), corners("items", items)]
    for name, (z, _) in zip(("queries", "items"), tables, strict=True):
        if z.ndim != 2:
            raise ValueError(f"{name} must be [rows, D], got shape {tuple(z.shape)}")
    check_alike("items", tables[1], "queries", tables[0])
    dtype = torch.promote_types(tables[0][0].dtype, tables[1][0].dtype)
    users, things = ((z.to(dtype), Z.to(dtype)) for z, Z in tables)
    if sparse:
        for name, table in (("queries", users), ("items", things)):
            for corner, t in zip("zZ", table, strict=True):
                check_sparse(f"{name}.{corner}", t)
    query_index = check_index("query_index", query_index, users[0])
    item_index = check_index("item_index", item_index, things[0])
    check_indices(query_index, item_index)
    shape = max(query_index.shape, item_index.shape, key=len)
    numbers = chosen[1:]
    if query_index.ndim > item_index.ndim:
        logs = _sampled(things, users, item_index, query_index, numbers, sparse)
    elif item_index.ndim == 1:
        logs = _sampled(users, things, query_index, item_index.unsqueeze(1), numbers, sparse)
    elif query_index.ndim == 1:
        logs = _sampled(users, things, query_index, item_index, numbers, sparse)
    else:
        pairs = query_index.flatten(), item_index.flatten().unsqueeze(1)
        logs = _sampled(users, things, *pairs, numbers, sparse)
    logs = logs.reshape(shape)
    if score == "volume":
        return logs
    rows = item_index if item_index.ndim == 2 else item_index.unsqueeze(1)
    nobody = rows.new_zeros(len(rows))
    own = _sampled(unconstrained(things[0]), things, nobody, rows, numbers, sparse)
    own = own.reshape(item_index.shape)
    return reference.conditional(logs, own.unsqueeze(-1) if own.ndim < logs.ndim else own)


# Calls


def unconstrained(like: Tensor) -> Pair:
    """One box [1, D] without bounds: its intersection with a box is that box."""
    shape = (1, like.shape[-1])
    return like.new_full(shape, -math.inf), like.new_full(shape, math.inf)


def _own_volume(items: Pair, volume: Volume) -> Tensor:
    """[N]: log volumes of the items alone."""
    return _volumes(unconstrained(items[0]), items, volume).squeeze(0)


def _composed(prepared: Prepared) -> Tensor:
    """[B, N]"""
    z, Z = prepared.queries
    terms, batch, _ = z.shape
    logs = _volumes((z.flatten(0, 1), Z.flatten(0, 1)), prepared.items, prepared.volume)
    if terms == 1:
        return logs
    signs = logs.new_tensor(prepared.signs).view(terms, 1, 1)
    return reference.signed_log_sum(logs.view(terms, batch, logs.shape[1]), signs)


def _volumes(queries: Pair, items: Pair, volume: Volume) -> Tensor:
    if volume.kind == "bessel":
        return _bessel(queries, items, volume)
    nu, nus = (0.0, volume.nu) if isinstance(volume.nu, Tensor) else (volume.nu, None)
    args = (*queries, *items, volume.tau, nu, volume.offset, nus)
    if _unrecorded(*queries, *items):
        with _BelowAutograd():  # torch's Python rule for gradients costs more than a small call
            return _LOG_VOLUMES(*args)
    return torch.ops.pyops.box_log_volumes(*args)


def _bessel(queries: Pair, items: Pair, volume: Volume) -> Tensor:
    """Some queries at a time; where gradients are wanted, they are computed again in the backward pass."""
    wide = reference.working_dtype(queries[0])
    qz, qZ, iz, iZ = (t.to(wide) for t in (*queries, *items))

    def some(qz: Tensor, qZ: Tensor) -> Tensor:
        z, Z = reference.intersection([(qz.unsqueeze(1), qZ.unsqueeze(1)), (iz, iZ)], volume.tau)
        return reference.log_volume(z, Z, volume.kind, volume.tau, volume.nu, volume.offset)

    parts = [
        checkpoint(some, qz[rows], qZ[rows], use_reentrant=False)
        for rows in reference.chunks(qz.shape[0], iz.numel())
    ]
    return torch.cat(parts) if parts else qz.new_zeros(0, iz.shape[0])


def _sampled(
    queries: Pair, items: Pair, query_index: Tensor, item_index: Tensor, numbers: tuple, sparse: bool
) -> Tensor:
    args = (*queries, *items, query_index, item_index, *numbers)
    if _unrecorded(*queries, *items):
        with _BelowAutograd():
            return _SAMPLED(*args)
    return _SparseSampled.apply(*args) if sparse else torch.ops.pyops.box_sampled(*args)


def _unrecorded(*tensors: Tensor) -> bool:
    """No derivative is wanted of this call, in any mode; False while torch traces."""
    return not (
        torch.compiler.is_compiling()
        or any(type(t) not in PLAIN for t in tensors)
        or (torch.is_grad_enabled() and any(t.requires_grad for t in tensors))
        or forward_ad._current_level >= 0
        or in_functorch() is not None
    )


# Registration

_PAIRS = "Tensor qz, Tensor qZ, Tensor iz, Tensor iZ"
_NUMBERS = "float tau, float nu, float offset"


def _fake(qz, qZ, iz, iZ, tau, nu, offset, nus):
    return qz.new_empty((qz.shape[0], iz.shape[0]), dtype=reference.working_dtype(qz))


def _backward_fake(grad, qz, qZ, iz, iZ, *_):
    return like(qz), like(qZ), like(iz), like(iZ)


def _topk_fake(qz, qZ, signs, iz, iZ, item_log_volume, tau, nu, offset, k, prune):
    shape = (qz.shape[0], k)
    return qz.new_empty(shape, dtype=reference.working_dtype(qz)), qz.new_empty(shape, dtype=torch.int64)


def _sampled_fake(qz, qZ, iz, iZ, query_index, item_index, tau, nu, offset):
    return qz.new_empty(item_index.shape, dtype=reference.working_dtype(qz))


def _sampled_backward_fake(grad, qz, qZ, iz, iZ, query_index, item_index, *_):
    batch, samples = item_index.shape
    shapes = [(batch, qz.shape[1])] * 2 + [(batch * samples, iz.shape[1])] * 2
    return tuple(grad.new_empty(shape) for shape in shapes)


def _context(ctx, inputs, output):
    *tensors, tau, nu, offset, nus = inputs
    ctx.save_for_backward(*tensors)
    ctx.settings = tau, nu, offset, nus


def _grad(ctx, grad):
    grads = torch.ops.pyops.box_log_volumes_backward(grad, *ctx.saved_tensors, *ctx.settings)
    return *grads, None, None, None, None


def _sampled_context(ctx, inputs, output):
    *tensors, tau, nu, offset = inputs
    ctx.save_for_backward(*tensors)
    ctx.settings = tau, nu, offset


def _sampled_rows(ctx, grad):
    """(table, index, gradient of the gathered rows or None) of the four tables."""
    *tables, query_index, item_index = ctx.saved_tensors
    rows = torch.ops.pyops.box_sampled_backward(grad, *tables, query_index, item_index, *ctx.settings)
    indices = [query_index] * 2 + [item_index.flatten()] * 2
    wanted = [r if needed else None for r, needed in zip(rows, ctx.needs_input_grad[:4], strict=True)]
    return zip(tables, indices, wanted, strict=True)


def _sampled_grad(ctx, grad):
    def dense(table, index, rows):
        if rows.is_cuda:  # without atomics, so that sums repeat bit for bit
            total = torch.ops.aten.embedding_dense_backward(rows, index, len(table), -1, False)
        else:
            total = rows.new_zeros(table.shape).index_add_(0, index, rows)
        return total.to(table.dtype)

    found = [None if rows is None else dense(t, i, rows) for t, i, rows in _sampled_rows(ctx, grad)]
    return *found, *(None,) * 5


class _SparseSampled(torch.autograd.Function):
    """box_sampled with sparse gradients of the tables."""

    @staticmethod
    def forward(*args: Any) -> Tensor:
        return _SAMPLED(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        _sampled_context(ctx, inputs, output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        def sparse(table: Tensor, index: Tensor, rows: Tensor) -> Tensor:
            made = torch.sparse_coo_tensor(index.unsqueeze(0), rows, table.shape, check_invariants=False)
            return (
                made if rows.dtype == table.dtype else made.coalesce().to(table.dtype)
            )  # added up unrounded

        found = [None if rows is None else sparse(t, i, rows) for t, i, rows in _sampled_rows(ctx, grad)]
        return *found, *(None,) * 5


def _no_second_derivative(ctx, *grads):
    raise RuntimeError(
        "box volumes by pairs have no second derivative; pyops.boxes.log_volume of an intersection has"
    )


def _looped(name, outputs):
    """A vmap rule that calls the op once per entry."""

    def rule(info, in_dims, *args):
        op = getattr(torch.ops.pyops, name)
        entries = [
            op(*(a if d is None else a.select(d, n) for a, d in zip(args, in_dims, strict=True)))
            for n in range(info.batch_size)
        ]
        if outputs == 1:
            return torch.stack(entries), 0
        return tuple(torch.stack(parts) for parts in zip(*entries, strict=True)), (0,) * outputs

    return rule


_library.register(
    "box_log_volumes",
    f"({_PAIRS}, {_NUMBERS}, Tensor? nus) -> Tensor",
    reference=reference.box_log_volumes,
    fake=_fake,
    cuda=triton("boxes", "box_log_volumes"),
    vmap=_looped("box_log_volumes", 1),
    backward=_grad,
    setup_context=_context,
)
_library.register(
    "box_log_volumes_backward",
    f"(Tensor grad, {_PAIRS}, {_NUMBERS}, Tensor? nus) -> (Tensor, Tensor, Tensor, Tensor)",
    reference=reference.box_log_volumes_backward,
    fake=_backward_fake,
    cuda=triton("boxes", "box_log_volumes_backward"),
    vmap=_looped("box_log_volumes_backward", 4),
    backward=_no_second_derivative,
)
_library.register(
    "box_topk",
    f"(Tensor qz, Tensor qZ, Tensor signs, Tensor iz, Tensor iZ, Tensor? item_log_volume, {_NUMBERS}, "
    "int k, bool prune) -> (Tensor, Tensor)",
    reference=reference.box_topk,
    fake=_topk_fake,
    cuda=triton("boxes", "box_topk"),
    vmap=_looped("box_topk", 2),
)
_library.register(
    "box_sampled",
    f"({_PAIRS}, Tensor query_index, Tensor item_index, {_NUMBERS}) -> Tensor",
    reference=reference.box_sampled,
    fake=_sampled_fake,
    cuda=triton("boxes", "box_sampled"),
    vmap=_looped("box_sampled", 1),
    backward=_sampled_grad,
    setup_context=_sampled_context,
)
_library.register(
    "box_sampled_backward",
    f"(Tensor grad, {_PAIRS}, Tensor query_index, Tensor item_index, {_NUMBERS}) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    reference=reference.box_sampled_backward,
    fake=_sampled_backward_fake,
    cuda=triton("boxes", "box_sampled_backward"),
    vmap=_looped("box_sampled_backward", 4),
    backward=_no_second_derivative,
)
_LOG_VOLUMES, _SAMPLED = torch.ops.pyops.box_log_volumes.default, torch.ops.pyops.box_sampled.default
