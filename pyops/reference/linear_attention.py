"""Reference of the op family ``linear_attention``: the gated recurrence, chunk after chunk.

Every function without an underscore has the schema of the op of its name. Per token and value head

    S <- Diag(exp g) S;  u = v, or beta (v - k S) with beta;  S <- S + k^T u;  o = scale q S

A chunk of C tokens that starts in state S is a few matrix products. With the decays D[i, j] = exp(sum of g
over the tokens j..i), j = 0 meaning from the chunk's start (the columns j > 0 belong to token j - 1):

    o = scale ((q * D[:, 0]) S + A u),   A[i, j] = sum_c q[i, c] k[j, c] D[i, j + 1, c]  for j <= i
    u = v,  or  (I + beta * strict_tril(B)) u = beta (v - (k * D[:, 0]) S),  B as A with k for q
    S <- D[-1, 0] S + (k * D[-1, 1:])^T u

Sums of g are formed for every pair and never subtracted, so g = -inf gives an exact 0, and a large g costs no
digits of the others. Products of a chunk may overflow where the recurrence does not, and carry NaN to earlier
tokens as 0 * NaN. So where an input, a state or a result of a chunk is not finite, the recurrence itself
decides, token by token, for that head alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from pyops.reference._precision import without_autocast, working_dtype

CHUNK, CHUNK_VECTOR = 64, 16  # with a decay per entry of k, the decays of a chunk are [C, C + 1, K]
LARGEST, LARGEST_VECTOR = 256, 32


class Tokens(NamedTuple):
    """Some tokens of N problems (batch entry times value head), in the working dtype, contiguous."""

    q: Tensor  # [N, C, K]
    k: Tensor
    v: Tensor  # [N, C, V]
    g: Tensor | None  # [N, C, 1] or [N, C, K]
    beta: Tensor | None  # [N, C, 1]

    def at(self, *index: slice | Tensor) -> Tokens:
        return Tokens(*(None if t is None else t[index] for t in self))  # type: ignore[arg-type]


class Decays(NamedTuple):
    """exp of sums of g, 0 where there is no path; the last dimension is 1, or K for a vector g."""

    start: Tensor  # [N, C, .] from the chunk's start to each token
    pair: Tensor  # [N, C, C, .] from after token j to token i >= j
    end: Tensor  # [N, C, .] from after each token to the chunk's end
    through: Tensor  # [N, ., 1] over the whole chunk


def _lower(tokens: Tensor, diagonal: int) -> Tensor:
    """[C, C + 1, 1]: True where column j <= i + diagonal."""
    length = tokens.shape[1]
    ones = torch.ones(length, length + 1, dtype=torch.bool, device=tokens.device)
    return ones.tril(diagonal)[:, :, None]


def _decays(x: Tokens) -> Decays:
    if x.g is None:
        d = _lower(x.q, 1).to(x.q.dtype)[None]
    else:
        sums = torch.where(_lower(x.q, 0), x.g[:, :, None], 0).cumsum(1)
        d = torch.where(_lower(x.q, 1), sums.exp(), 0)
    return Decays(d[:, :, 0], d[:, :, 1:], d[:, -1, 1:], d[:, -1, 0, :, None])


def _scores(x: Tensor, y: Tensor, pair: Tensor) -> Tensor:
    """sum_c x[i, c] y[j, c] pair[i, j, c], selected: no path is 0, whatever x and y overflow to."""
    if pair.shape[-1] == 1:
        return torch.where(pair[..., 0] == 0, 0, (x @ y.mT) * pair[..., 0])
    return torch.where(pair == 0, 0, x[:, :, None] * y[:, None] * pair).sum(-1)


def _weigh(p: Tensor, y: Tensor, pair: Tensor) -> Tensor:
    """sum_j p[i, j] pair[i, j, c] y[j, c]."""
    if pair.shape[-1] == 1:
        return torch.where(pair[..., 0] == 0, 0, p * pair[..., 0]) @ y
    return (torch.where(pair == 0, 0, p[..., None] * pair) * y[:, None]).sum(2)


def _without_reset(x: Tokens, state: Tensor) -> Tensor:
    """The state without the rows that the first token drops, which may hold NaN."""
    return state if x.g is None else state.masked_fill(x.g[:, 0, :, None].isneginf(), 0)


def _updates(x: Tokens, state: Tensor, d: Decays) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """u [N, C, V]; with beta also I + beta * strict_tril(B) [N, C, C] and the read v - (k * start) S."""
    if x.beta is None:
        return x.v, None, None
    read = x.v - (x.k * d.start) @ state
    matrix = x.beta * _scores(x.k, x.k, d.pair).tril(-1)
    return torch.linalg.solve_triangular(
        matrix, x.beta * read, upper=False, unitriangular=True
    ), matrix, read  # fmt: skip


def _chunk(x: Tokens, state: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    d = _decays(x)
    u, *_ = _updates(x, state, d)
    o = scale * ((x.q * d.start) @ state + _scores(x.q, x.k, d.pair) @ u)
    return o, d.through * state + (x.k * d.end).mT @ u


def _chunk_backward(
    x: Tokens, state: Tensor, scale: float, grad_o: Tensor, grad_state: Tensor
) -> tuple[Tokens, Tensor]:
    """Gradients of the tokens and of the state before them, from those of o and of the state after them."""
    d, state = _decays(x), _without_reset(x, state)
    u, matrix, read = _updates(x, state, d)
    grad_o = scale * grad_o

    def per_channel(t: Tensor) -> Tensor:
        return t if x.g is not None and x.g.shape[-1] > 1 else t.sum(-1, keepdim=True)

    def pairs(p: Tensor, left: Tensor) -> Tensor:  # gradient of the logarithm of pair
        if d.pair.shape[-1] == 1:
            return (p * _scores(left, x.k, d.pair))[..., None]
        return torch.where(d.pair == 0, 0, p[..., None] * left[:, :, None] * x.k[:, None] * d.pair)

    grad_a = (grad_o @ u.mT).tril()
    from_state, to_state = grad_o @ state.mT, u @ grad_state.mT
    grad_q = d.start * from_state + _weigh(grad_a, x.k, d.pair)
    grad_k = d.end * to_state + _weigh(grad_a.mT, x.q, d.pair.transpose(1, 2))
    grad_u = _scores(x.q, x.k, d.pair).mT @ grad_o + (x.k * d.end) @ grad_state
    before = d.through * grad_state + (x.q * d.start).mT @ grad_o
    along_start, along_pair = x.q * d.start * from_state, pairs(grad_a, x.q)
    grad_beta = None
    if x.beta is None or matrix is None or read is None:
        grad_v = grad_u
    else:
        solved = torch.linalg.solve_triangular(matrix.mT, grad_u, upper=True, unitriangular=True)
        grad_v = x.beta * solved
        grad_matrix = -(solved @ u.mT).tril(-1)
        grad_b = x.beta * grad_matrix
        of_read = grad_v @ state.mT
        grad_beta = (solved * read).sum(-1, keepdim=True)
        grad_beta = grad_beta + (grad_matrix * _scores(x.k, x.k, d.pair)).sum(-1, keepdim=True)
        grad_k = grad_k + _weigh(grad_b, x.k, d.pair) + _weigh(grad_b.mT, x.k, d.pair.transpose(1, 2))
        grad_k = grad_k - d.start * of_read
        before = before - (x.k * d.start).mT @ grad_v
        along_start = along_start - x.k * d.start * of_read
        along_pair = along_pair + pairs(grad_b, x.k)
    grad_g = None
    if x.g is not None:
        along = torch.cat([per_channel(along_start)[:, :, None], along_pair], 2)
        along[:, -1, 0] += per_channel((d.through * state * grad_state).sum(-1))
        along[:, -1, 1:] += per_channel(x.k * d.end * to_state)
        crossing = along.flip(1).cumsum(1).flip(1)  # D[i, j] holds g of token t for j <= t <= i
        grad_g = torch.where(_lower(x.q, 0), crossing, 0).sum(2).masked_fill(x.g.isneginf(), 0)
    return Tokens(grad_q, grad_k, grad_v, grad_g, grad_beta), _without_reset(x, before)


def _token(x: Tokens, state: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The recurrence, of one token [N, 1, .]; a decay of 0 drops what it meets, NaN included."""
    if x.g is not None:
        decay = x.g.mT.exp()
        state = torch.where(decay == 0, 0, decay * state)
    u = x.v if x.beta is None else x.beta * (x.v - x.k @ state)
    state = state + x.k.mT * u
    return scale * (x.q @ state), state


def _each(x: Tokens) -> list[Tokens]:
    return [x.at(slice(None), slice(t, t + 1)) for t in range(x.q.shape[1])]


def _irregular(x: Tokens, state: Tensor, *results: Tensor | None) -> Tensor:
    """[N]: whether an input, the state or a result is not finite (g = -inf is regular)."""
    finite = [t.isfinite() for t in (x.q, x.k, x.v, x.beta, state, *results) if t is not None]
    if x.g is not None:
        finite.append(x.g.isfinite() | x.g.isneginf())
    return ~torch.stack([f.flatten(1).all(1) for f in finite]).all(0)


def _forward(x: Tokens, state: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """A chunk: at once, but token by token for the problems that are irregular in it."""
    o, after = _chunk(x, state, scale)
    if (bad := _irregular(x, state, o, after)).any():
        s, rows = state[bad], []
        for token in _each(x.at(bad)):
            row, s = _token(token, s, scale)
            rows.append(row)
        o[bad], after[bad] = torch.cat(rows, 1), s
    return o, after


def _backward(
    x: Tokens, state: Tensor, scale: float, grad_o: Tensor, grad_state: Tensor
) -> tuple[Tokens, Tensor]:
    grads, before = _chunk_backward(x, state, scale, grad_o, grad_state)
    if (bad := _irregular(x, state, before, *grads)).any():
        tokens, states = _each(x.at(bad)), [state[bad]]
        for token in tokens[:-1]:
            states.append(_token(token, states[-1], scale)[1])
        ds = grad_state[bad]
        for t in reversed(range(len(tokens))):
            one, ds = _chunk_backward(tokens[t], states[t], scale, grad_o[bad, t : t + 1], ds)
            for whole, part in zip(grads, one, strict=True):
                if whole is not None and part is not None:
                    whole[bad, t : t + 1] = part
        before[bad] = ds
    return grads, before


class _Problem:
    """The inputs of a call, cut into sequences and chunks."""

    def __init__(self, q, k, v, g, beta, initial_state, cu_seqlens, chunk_size):
        self.dtype = working_dtype(q)
        self.batch, self.length, _, self.key_dim = q.shape
        self.heads, self.value_dim = v.shape[2:]
        # Every input as [B, T, heads, channels].
        g = g[..., None] if g is not None and g.ndim == 3 else g
        self.inputs = Tokens(q, k, v, g, None if beta is None else beta[..., None])
        vector = g is not None and g.shape[-1] > 1
        largest = LARGEST_VECTOR if vector else LARGEST
        self.chunk = min(chunk_size or (CHUNK_VECTOR if vector else CHUNK), largest)
        self.sequences = [(slice(0, self.batch), 0, self.length)]
        if cu_seqlens is not None:
            bounds = checked_bounds(cu_seqlens, self.length)
            self.sequences = [(slice(0, 1), a, b) for a, b in pairwise(bounds)]
        self.count = self.batch if cu_seqlens is None else len(self.sequences)
        shape = (self.count, self.heads, self.key_dim, self.value_dim)
        if initial_state is None:
            self.initial_state = torch.zeros(shape, dtype=self.dtype, device=q.device)
        else:
            # A copy, since products of an unaligned view round in another order.
            self.initial_state = initial_state.clone(memory_format=torch.contiguous_format).to(self.dtype)

    def states(self, states: Tensor) -> Iterator[tuple[tuple[slice, int, int], Tensor]]:
        """Each sequence with the states [problems, K, V] of it, a view where states is contiguous."""
        per = self.count // len(self.sequences)
        for i, sequence in enumerate(self.sequences):
            yield sequence, states[i * per : (i + 1) * per].flatten(0, 1)

    def chunks(self, sequence: tuple[slice, int, int]) -> list[tuple[slice, slice]]:
        rows, start, stop = sequence
        return [(rows, slice(t, min(t + self.chunk, stop))) for t in range(start, stop, self.chunk)]

    def load(self, t: Tensor, place: tuple[slice, slice]) -> Tensor:
        """[problems, C, channels] of [B, T, heads, channels], heads repeated for the value heads of each."""
        t = t[place].to(self.dtype).transpose(1, 2)
        t = t.repeat_interleave(self.heads // t.shape[1], 1)
        return t.flatten(0, 1).contiguous()

    def tokens(self, place: tuple[slice, slice]) -> Tokens:
        return Tokens(*(None if t is None else self.load(t, place) for t in self.inputs))  # type: ignore[arg-type]

    def store(self, out: Tensor, place: tuple[slice, slice], value: Tensor) -> None:
        """The reverse of load: value heads that share a head are added."""
        target = out[place]
        groups = value.unflatten(0, (target.shape[0], target.shape[2], self.heads // target.shape[2]))
        target.copy_(groups.sum(2).transpose(1, 2))


def checked_bounds(cu_seqlens: Tensor, length: int) -> list[int]:
    bounds = cu_seqlens.tolist()
    if bounds[0] != 0:
        raise ValueError(f"cu_seqlens must start at 0, got {bounds[0]}")
    for a, b in pairwise(bounds):
        if b < a:
            raise ValueError(f"cu_seqlens must not decrease, got {b} after {a}")
    if bounds[-1] != length:
        raise ValueError(f"cu_seqlens must end at T = {length}, got {bounds[-1]}")
    return bounds


@without_autocast
def linear_attention(q, k, v, g, beta, initial_state, cu_seqlens, scale, chunk_size):
    p = _Problem(q, k, v, g, beta, initial_state, cu_seqlens, chunk_size)
    o = torch.empty(v.shape, dtype=q.dtype, device=q.device)
    final = p.initial_state.clone(memory_format=torch.contiguous_format)
    for sequence, final_state in p.states(final):
        state = final_state
        for place in p.chunks(sequence):
            part, state = _forward(p.tokens(place), state, scale)
            p.store(o, place, part)
        final_state.copy_(state)
    return o, final


@without_autocast
def linear_attention_backward(
    grad_o, grad_state, q, k, v, g, beta, initial_state, cu_seqlens, scale, chunk_size
):
    p = _Problem(q, k, v, g, beta, initial_state, cu_seqlens, chunk_size)
    like = [None if t is None else torch.empty(t.shape, dtype=t.dtype, device=q.device) for t in p.inputs]
    grad_initial = grad_state.to(p.dtype).clone(memory_format=torch.contiguous_format)
    for (sequence, start), (_, ds_start) in zip(
        p.states(p.initial_state), p.states(grad_initial), strict=True
    ):
        places = p.chunks(sequence)
        states = [start]
        for place in places[:-1]:
            states.append(_forward(p.tokens(place), states[-1], scale)[1])
        ds = ds_start
        for place, state in zip(reversed(places), reversed(states), strict=False):
            grads, ds = _backward(p.tokens(place), state, scale, p.load(grad_o, place), ds)
            for out, grad in zip(like, grads, strict=True):
                if out is not None and grad is not None:
                    p.store(out, place, grad)
        ds_start.copy_(ds)
    absent = torch.empty(0, dtype=torch.float32, device=q.device)
    found = [
        absent.clone() if out is None else out.reshape(given.shape)
        for given, out in zip((q, k, v, g, beta), like, strict=True)
    ]
    return *found, absent if initial_state is None else grad_initial.to(initial_state.dtype)


@without_autocast
def linear_attention_step_(q, k, v, g, beta, state, scale):
    token = [None if t is None else t[:, None] for t in (q, k, v, g, beta)]
    o, after = linear_attention(*token, state, None, scale, 1)
    state.copy_(after)
    return o[:, 0]
