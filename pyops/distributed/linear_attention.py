"""Linear attention with T spread over ranks: what crosses from rank to rank is the state.

With A the product of the decays of a rank's tokens and L its state when it starts from zero, the state after
it is A S + L. So the states before each rank are a scan over the ranks of

    (A, L) then (A', L')  =  (A' A, A' L + L')

and backward, with M = scale sum_t (decay from the start to t) q_t^T dO_t, the gradients of the states after
each rank are the same scan from the right, over (A, M). A and L, or M, take one matrix product; the ranks
exchange them at once, and each then runs the op, or its backward, from its own state. With the delta rule A
is a K x K matrix per head, and the ranks run one after another instead.

Packed sequences have a state each on every rank: a sequence without tokens there has A = 1 and L = 0.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from pyops.ops import linear_attention as op
from pyops.reference._precision import without_autocast, working_dtype
from pyops.reference.linear_attention import checked_bounds

BLOCK = 512  # tokens of a product whose factors are copied to the working dtype
Group = dist.ProcessGroup


@torch.compiler.disable
def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: op.State | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    normalize: bool = False,
    chunk_size: int | None = None,
    group: Group | None = None,
) -> tuple[Tensor, op.State | None]:
    """:func:`pyops.linear_attention` of sequences whose tokens are spread over the ranks of a group.

    Rank r holds the tokens after those of rank r - 1, any number of them. Results and gradients are those of
    the op on the whole sequence. Without ``beta`` all ranks work at once, on one further product of K x V per
    token each, and exchange their states in one all-gather; with ``beta`` they work one after another, each
    sending its state to the next.

    Args:
        q, k, v, g, beta: this rank's tokens, as in :func:`pyops.linear_attention`. All ranks give the same
            ones, with the same shapes but for T.
        scale, normalize, chunk_size: as there, the same on all ranks.
        initial_state: as there, before the first token of the first rank; read on that rank only.
        output_final_state: also return the state after the last token of the last rank, the same on all
            ranks.
        cu_seqlens: [N + 1], the same on all ranks: borders of packed sequences as offsets in the tokens of
            all ranks together, from 0 to their sum; a sequence may lie on several ranks. Each rank then
            exchanges N states.
        group: of ``torch.distributed``; None is the default group.

    Returns:
        (o, final_state): this rank's o [B, T, HV, V]; the state as there, or None. Fed back as
        ``initial_state`` the state continues the sequence with the next tokens, as on one device.

    Gradients are those of the sum of all ranks' losses, final_state counting on every rank that uses it.
    ``initial_state`` has its gradient on the first rank. Forward and backward exchange tensors: every rank
    must call both, with gradients wanted on all ranks or on none.

    Raises:
        TypeError, ValueError: as the op, and where this process is not in ``group``.

    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> q = k = v = torch.ones(1, 3, 1, 1)
    >>> linear_attention(q, k, v)[0].flatten()
    tensor([1., 2., 3.])
    >>> dist.destroy_process_group()
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    if rank < 0:
        raise ValueError("group must contain this process, got one that does not")
    if rank > 0:
        initial_state = None
    alone, exchange = torch.ops.pyops.linear_attention, bool(output_final_state)
    call = alone if ranks == 1 else partial(_LinearAttention.apply, exchange, group)
    return op._run(
        call, q, k, v, g, beta, scale, initial_state, output_final_state, cu_seqlens, normalize, chunk_size
    )


class _LinearAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, exchange, group, q, k, v, g, beta, initial_state, cu_seqlens, *settings):
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        cu_seqlens = _own_part(cu_seqlens, q, group)
        count = q.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
        state = q.new_zeros(count, v.shape[2], q.shape[3], v.shape[3], dtype=working_dtype(q))
        if initial_state is not None:
            state.copy_(initial_state)
        totals = None
        if beta is None:
            total, part = _summary(k, v, g, cu_seqlens, to_end=True)
            if rank == 0:
                part = _after(state, total, part)
            totals, parts = _gather(total, part, group)
            for r in range(rank):
                state = _after(state, totals[r], parts[r]) if r else parts[0]
        elif rank > 0:
            dist.recv(state, group=group, group_src=rank - 1)
        o, final = torch.ops.pyops.linear_attention(q, k, v, g, beta, state, cu_seqlens, *settings)
        if beta is not None and rank < ranks - 1:
            dist.send(final, group=group, group_dst=rank + 1)
        if exchange:
            dist.broadcast(final, group=group, group_src=ranks - 1)
        ctx.save_for_backward(q, k, v, g, beta, state, totals, cu_seqlens)
        ctx.settings, ctx.group, ctx.exchange = settings, group, exchange
        ctx.initial_dtype = None if initial_state is None else initial_state.dtype
        return o, final if exchange else None

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_o, grad_final):
        q, k, v, g, beta, state, totals, cu_seqlens = ctx.saved_tensors
        group = ctx.group
        rank, last = dist.get_rank(group), dist.get_world_size(group) - 1
        after = torch.zeros_like(state)  # gradient of the state after this rank's tokens
        if ctx.exchange:
            after.copy_(grad_final)
            dist.reduce(after, group=group, group_dst=last)
        if beta is None:
            total, part = _summary(q, grad_o, g, cu_seqlens, to_end=False)
            part = ctx.settings[0] * part
            if rank == last:
                part = _after(after, total, part)
            _, parts = _gather(total, part, group)
            for r in range(last, rank, -1):
                after = _after(after, totals[r], parts[r]) if r < last else parts[last]
        elif rank < last:
            dist.recv(after, group=group, group_src=rank + 1)
        *grads, before = torch.ops.pyops.linear_attention_backward(
            grad_o, after, q, k, v, g, beta, state, cu_seqlens, *ctx.settings
        )
        if beta is not None and rank > 0:
            dist.send(before, group=group, group_dst=rank - 1)
        given = [None if t is None else grad for t, grad in zip((q, k, v, g, beta), grads, strict=True)]
        given.append(None if ctx.initial_dtype is None else before.to(ctx.initial_dtype))
        return None, None, *given, None, None, None


def _own_part(cu_seqlens: Tensor | None, q: Tensor, group: Group | None) -> Tensor | None:
    """Borders of the sequences in this rank's tokens, from those in all ranks' tokens."""
    if cu_seqlens is None:
        return None
    lengths = cu_seqlens.new_empty(dist.get_world_size(group))
    dist.all_gather(list(lengths.split(1)), cu_seqlens.new_full((1,), q.shape[1]), group=group)
    checked_bounds(cu_seqlens, int(lengths.sum()))
    return (cu_seqlens - lengths[: dist.get_rank(group)].sum()).clamp(0, q.shape[1])


def _summary(
    x: Tensor, y: Tensor, g: Tensor | None, cu_seqlens: Tensor | None, to_end: bool
) -> tuple[Tensor, Tensor]:
    """log A [N, HV, K or 1] and L [N, HV, K, V] of k and v; of q and dO, not ``to_end``, M without scale."""
    if cu_seqlens is not None:
        pieces = [
            _summary(x[:, a:b], y[:, a:b], None if g is None else g[:, a:b], None, to_end)
            for a, b in pairwise(cu_seqlens.tolist())
        ]
        totals, parts = zip(*pieces, strict=True)
        return torch.cat(totals), torch.cat(parts)
    log_decay, total = _log_decay(g, x, y, to_end)
    return total, _outer_products(x, y, log_decay)


def _log_decay(g: Tensor | None, q: Tensor, v: Tensor, to_end: bool) -> tuple[Tensor | None, Tensor]:
    """Sums of g per token, and over all tokens [B, HV, K or 1].

    The sums are over the tokens after it (``to_end``), or up to it and with it; [B, T, heads, K or 1]. They
    are formed from the side where they are small and never subtracted, so that -inf stays what it is.
    """
    batch, length, heads = v.shape[:3]
    if g is None:
        return None, q.new_zeros(batch, heads, 1, dtype=working_dtype(q))
    g = (g if g.ndim == 4 else g[..., None]).to(working_dtype(q))
    sums = g.flip(1).cumsum(1).flip(1) if to_end else g.cumsum(1)
    total = _per_value_head(g.sum(1, keepdim=True), heads)[:, 0]
    if to_end and length:
        sums = torch.cat([sums[:, 1:], torch.zeros_like(sums[:, :1])], 1)
    return sums, total


def _per_value_head(t: Tensor, heads: int) -> Tensor:
    return t.repeat_interleave(heads // t.shape[2], 2)


@without_autocast
def _outer_products(x: Tensor, y: Tensor, log_weight: Tensor | None) -> Tensor:
    """sum_t Diag(exp log_weight_t) x_t^T y_t [B, HV, K, V].

    -inf drops x and y, NaN included; but NaN in y_t stays where only some of token t's K weights are -inf.
    """
    batch, length, heads, value_dim = y.shape
    dtype = working_dtype(x)
    out = y.new_zeros(batch, heads, x.shape[3], value_dim, dtype=dtype)
    for start in range(0, length, BLOCK):
        tokens = slice(start, start + BLOCK)
        left = _per_value_head(x[:, tokens], heads).to(dtype)
        right = y[:, tokens].to(dtype)
        if log_weight is not None:
            weight = _per_value_head(log_weight[:, tokens], heads)
            dropped = weight.isneginf()
            left = torch.where(dropped, 0, weight.exp() * left)
            right = torch.where(dropped.all(-1, keepdim=True), 0, right)
        out += left.permute(0, 2, 3, 1) @ right.transpose(1, 2)
    return out


def _after(state: Tensor, total: Tensor, part: Tensor) -> Tensor:
    """A S + L for the logarithm of A; where that is -inf, S is dropped, NaN included; zeros stay zeros."""
    total = total[..., None]
    return torch.where(total.isneginf() | (state == 0), 0, total.exp() * state) + part


def _gather(total: Tensor, part: Tensor, group: Group | None) -> tuple[Tensor, Tensor]:
    """Every rank's total [ranks, B, HV, K or 1] and part [ranks, B, HV, K, V]."""
    mine = torch.cat([total, part.flatten(2)], 2)
    everyone = mine.new_empty(dist.get_world_size(group), *mine.shape)
    dist.all_gather(list(everyone.unbind(0)), mine, group=group)
    return everyone[..., : total.shape[2]], everyone[..., total.shape[2] :].unflatten(-1, part.shape[2:])
