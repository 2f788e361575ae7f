"""Linear attention in plain torch at its best, and other people's kernels. Every builder may raise Missing.

Plain torch works head first, [batch * heads, T, channels] with contiguous heads, which is its fastest layout;
inputs are brought there outside the timing. With G the inclusive sum of g inside a chunk that starts in S,

    A[i, j] = q_i . (k_j e^(G_i - G_j))  for j <= i;    o = scale (A u + (q e^G) S)
    S' = e^(G_last) S + (k e^(G_last - G))^T u
    u = v, or with beta: u = U - W S, where (I + L) [U | W] = [beta v | beta k e^G]
    and L is A strictly below its diagonal, with beta k for q.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from bench.case import Impl, Missing, Runner, need

SUB_BLOCK = 16
LAYOUT = "head-first inputs"


# ---- layouts: the op has [B, T, H, ...], plain torch wants [B * H, T, ...]


def heads_first(t: Tensor) -> Tensor:
    return t.transpose(1, 2).flatten(0, 1).contiguous()


def heads_last(t: Tensor, batch: int) -> Tensor:
    return t.unflatten(0, (batch, -1)).transpose(1, 2)


# ---- token after token


def token_loop(*inputs: Tensor) -> Tensor:
    """The definition, head first, of (q, k, v, g) or (q, k, v, g, beta)."""
    return _tokens(_no_state(inputs), *inputs)[0]


def checkpointed_loop(*inputs: Tensor, segment: int = 64) -> Tensor:
    """The same, for a backward pass that keeps one state per segment and not one per token."""
    state, out = _no_state(inputs), []
    for piece in zip(*(t.split(segment, 1) for t in inputs), strict=True):
        o, state = checkpoint(_tokens, state, *piece, use_reentrant=False)
        out.append(o)
    return torch.cat(out, 1)


def _tokens(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, *beta: Tensor
) -> tuple[Tensor, Tensor]:
    decay, out = g.exp()[..., None] if g.ndim == 3 else g.exp()[..., None, None], []
    for piece in zip(*(t.unbind(1) for t in (q, k, v, decay, *beta)), strict=True):
        o, state = token(state, *piece)
        out.append(o)
    return q.shape[2] ** -0.5 * torch.stack(out, 1), state


def token(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(q S, S); without gradients S stays where the state is."""
    state, u = _times(state, decay), v[:, None]
    if beta is not None:
        u = beta[:, None, None] * torch.baddbmm(u, k[:, None], state, alpha=-1)
    add = torch.baddbmm if torch.is_grad_enabled() else Tensor.baddbmm_
    state = add(state, k[:, :, None], u)
    return torch.bmm(q[:, None], state)[:, 0], state


def _times(a: Tensor, b: Tensor) -> Tensor:
    """a * b, in a's memory where that is allowed."""
    return a * b if torch.is_grad_enabled() or torch.compiler.is_compiling() else a.mul_(b)


def _no_state(inputs: tuple[Tensor, ...]) -> Tensor:
    q, _, v = inputs[:3]
    return q.new_zeros(q.shape[0], q.shape[2], v.shape[2])


# ---- chunk after chunk


class Within(NamedTuple):
    """What a chunk computes without knowing its state."""

    scores: Tensor  # A
    read: Tensor  # q e^G
    write: Tensor  # k e^(G_last - G)
    through: Tensor  # e^(G_last), to multiply a state with
    u: Tensor  # v or U
    w: Tensor | None = None  # W


Gates = tuple[Tensor, ...]


def scalar_gates(g: Tensor, dtype: torch.dtype) -> Gates:
    """e^(G_i - G_j) with 0 above the diagonal, e^G, e^(G_last - G), e^(G_last)."""
    total = g.cumsum(1)
    last, upper = total[:, -1:], above_diagonal(total)
    pair = (total[:, :, None] - total[:, None]).masked_fill_(upper, -torch.inf).exp_()
    columns = (t.exp()[..., None].to(dtype) for t in (total, last - total, last))
    return pair.to(dtype), *columns


def above_diagonal(total: Tensor) -> Tensor:
    size = total.shape[1]
    return torch.ones(size, size, dtype=torch.bool, device=total.device).triu(1)


def vector_gates(g: Tensor, dtype: torch.dtype) -> Gates:
    """G, e^G, e^(G_last - G), e^(G_last)."""
    total = g.cumsum(1)
    last = total[:, -1:]
    return total, total.exp().to(dtype), (last - total).exp().to(dtype), last.exp().mT.to(dtype)


def scalar(gates: Gates, q: Tensor, k: Tensor, v: Tensor) -> Within:
    pair, into, out_of, through = gates
    return Within(_times(torch.bmm(q, k.mT), pair), q * into, k * out_of, through, v)


def vector(gates: Gates, q: Tensor, k: Tensor, v: Tensor) -> Within:
    """The quick way, k e^(-G): it overflows where a chunk decays by more than 88 nats."""
    total, into, out_of, through = gates
    read = q * into
    scores = torch.bmm(read, (k * (-total).exp().to(k.dtype)).mT).tril_()
    return Within(scores, read, k * out_of, through, v)


def vector_safe(gates: Gates, q: Tensor, k: Tensor, v: Tensor) -> Within:
    """The way for any decay: blocks of 16 rows against all before them, relative to their first row; inside a
    block, every pair of tokens by itself."""
    total, into, out_of, through = gates
    size, rows = SUB_BLOCK, []
    rows_q, rows_k, rows_g = (t.unflatten(1, (-1, size)) for t in (q, k, total))
    pair = rows_g[:, :, :, None] - rows_g[:, :, None]
    pair = pair.masked_fill_(above_diagonal(rows_g[:, 0])[..., None], -torch.inf).exp_()
    inside = (rows_q[:, :, :, None] * rows_k[:, :, None] * pair).sum(-1)
    for i, own in enumerate(inside.unbind(1)):
        first, start = rows_g[:, i, :1], i * size
        left = rows_q[:, i] * (rows_g[:, i] - first).exp()
        before = k[:, :start] * (first - total[:, :start]).exp()
        rows.append(F.pad(torch.cat([torch.bmm(left, before.mT), own], 2), (0, q.shape[1] - start - size)))
    return Within(torch.cat(rows, 1), q * into, k * out_of, through, v)


def delta(gates: Gates, q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Within:
    pair, into, out_of, through = gates
    key = beta[..., None].to(k.dtype) * k
    lower = _times(
        torch.bmm(key, k.mT), pair
    )  # the solver and its gradient see only what is below the diagonal
    right = torch.cat([beta[..., None].to(v.dtype) * v, key * into], 2)
    both = torch.linalg.solve_triangular(lower.float(), right.float(), upper=False, unitriangular=True)
    u, w = both.to(v.dtype).split([v.shape[2], k.shape[2]], 2)
    return Within(_times(torch.bmm(q, k.mT), pair), q * into, k * out_of, through, u, w)


KINDS: dict[str, tuple[Callable[..., Gates], Callable[..., Within]]] = {
    "scalar": (scalar_gates, scalar),
    "vector": (vector_gates, vector),
    "vector, any decay": (vector_gates, vector_safe),
    "delta": (scalar_gates, delta),
}


def finish(x: Within, state: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """(o, state) after a chunk."""
    u = x.u if x.w is None else torch.baddbmm(x.u, x.w, state, alpha=-1)
    o = torch.bmm(x.scores, u).baddbmm_(x.read, state, beta=scale, alpha=scale)
    return o, _times(state, x.through).baddbmm_(x.write.mT, u)


def looped(kind: str, size: int) -> Callable[..., Tensor]:
    """All of a chunk, then the next one; what depends on a scalar decay alone is done for all chunks at once.
    The views come from split, whose backward pass is one concatenation."""
    gates, within = KINDS[kind]

    def run(q: Tensor, k: Tensor, v: Tensor, g: Tensor, *beta: Tensor) -> Tensor:
        state, out = _no_state((q, k, v)), []
        if g.ndim == 2:
            ready = per_chunk(gates(g.reshape(-1, size), q.dtype), g.shape[1] // size)
        else:
            ready = (gates(piece, q.dtype) for piece in g.split(size, 1))
        for gate, *piece in zip(ready, *(t.split(size, 1) for t in (q, k, v, *beta)), strict=True):
            o, state = finish(within(gate, *piece), state, q.shape[2] ** -0.5)
            out.append(o)
        return torch.cat(out, 1)

    return run


def looped_compiled(kind: str, size: int) -> Callable[..., Tensor]:
    """The same, its body compiled. Unrolled as a whole, the loop compiles for minutes and is no faster."""
    gates, within = KINDS[kind]

    @functools.partial(torch.compile, dynamic=False)
    def step(state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, *beta: Tensor):
        return finish(within(gates(g, q.dtype), q, k, v, *beta), state, q.shape[2] ** -0.5)

    def run(*inputs: Tensor) -> Tensor:
        state, out = _no_state(inputs), []
        for piece in zip(*(t.split(size, 1) for t in inputs), strict=True):
            o, state = step(state, *piece)
            out.append(o)
        return torch.cat(out, 1)

    return run


def indexed(kind: str, size: int) -> Callable[..., Tensor]:
    """As the field's plain references are written: what needs no state for all chunks at once, then a loop
    that indexes them. The backward pass of an index fills a whole tensor with zeros, once per chunk."""

    def run(*inputs: Tensor) -> Tensor:
        count = inputs[0].shape[1] // size
        x = [None if t is None else t.unflatten(0, (-1, count)) for t in _all_chunks(kind, size, inputs)]
        state, out = _no_state(inputs), []
        for i in range(count):
            chunk = Within(*(None if t is None else t[:, i] for t in x))
            o, state = finish(chunk, state, inputs[0].shape[2] ** -0.5)
            out.append(o)
        return torch.cat(out, 1)

    return run


def batched(kind: str, size: int) -> Callable[..., Tensor]:
    """Everything for all chunks at once, but for a short scan over the states."""

    def run(*inputs: Tensor) -> Tensor:
        x = _all_chunks(kind, size, inputs)
        count, scale = inputs[0].shape[1] // size, inputs[0].shape[2] ** -0.5
        state, u = _no_state(inputs), x.u
        states, corrected = [state], []
        if x.w is None:
            added = torch.bmm(x.write.mT, u)
            for through, more in per_chunk((x.through, added), count)[:-1]:
                states.append(torch.addcmul(more, states[-1], through))
        else:
            for through, write, own, w in per_chunk((x.through, x.write, u, x.w), count):
                corrected.append(torch.baddbmm(own, w, states[-1], alpha=-1))
                states.append(torch.baddbmm(states[-1] * through, write.mT, corrected[-1]))
            states.pop()
            u = torch.stack(corrected, 1).flatten(0, 1)
        state = torch.stack(states, 1).flatten(0, 1)
        o = torch.bmm(x.scores, u).baddbmm_(x.read, state, beta=scale, alpha=scale)
        return o.view(inputs[2].shape)

    return run


def _all_chunks(kind: str, size: int, inputs: tuple[Tensor, ...]) -> Within:
    gates, within = KINDS[kind]
    q, k, v, g, *beta = (t.reshape(-1, size, *t.shape[2:]) for t in inputs)
    return within(gates(g, q.dtype), q, k, v, *beta)


def per_chunk(tensors: tuple[Tensor, ...], count: int) -> list[tuple[Tensor, ...]]:
    """From [heads * chunks, ...] to one tuple per chunk."""
    return list(zip(*(t.unflatten(0, (-1, count)).unbind(1) for t in tensors), strict=True))


def form(kind: str, way: str, size: int, compiled: bool = False) -> Callable[..., Tensor]:
    """One of the forms above as a function of the head-first inputs."""
    if way == "loop":
        return (looped_compiled if compiled else looped)(kind, size)
    function = {"indexed": indexed, "batched": batched}[way](kind, size)
    return torch.compile(function, dynamic=False) if compiled else function


# ---- implementations


def both_ways(function: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, ...]]:
    """(o, gradients of the inputs) from the inputs and the gradient of o."""

    def run(*args: Tensor) -> tuple[Tensor, ...]:
        *inputs, grad = args
        with torch.enable_grad():
            o = function(*inputs)
        return o.detach(), *torch.autograd.grad(o, inputs, grad)

    return run


def runner(function: Callable[..., Tensor], backward: bool, layout: Callable = lambda t: t) -> Runner:
    """The function with its inputs in a layout, which is not timed; nobody writes into them. With backward,
    the last input is the gradient of o, and all others want one."""

    def leaves(*args: Tensor) -> tuple[Tensor, ...]:
        *inputs, grad = map(layout, args)
        return *(t.detach().requires_grad_() for t in inputs), grad

    if backward:
        return Runner(both_ways(function), leaves)
    return Runner(function, lambda *args: tuple(map(layout, args)))


def torch_chunks(
    kind: str,
    way: str,
    size: int,
    backward: bool,
    check: Callable,
    compiled: bool = False,
    dtype: torch.dtype | None = None,
    error: float | None = None,
) -> Impl:
    label = {"loop": "loop over chunks", "indexed": "indexed loop over chunks", "batched": "batched chunks"}
    words = [f"torch {label[way]} of {size}", *kind.split(", ")[1:], *["compiled"] * compiled]
    words += [] if dtype is None else [str(dtype).removeprefix("torch.")]

    def layout(t: Tensor) -> Tensor:
        return heads_first(t if dtype is None else t.to(dtype))

    def build() -> Runner:
        return runner(form(kind, way, size, compiled), backward, layout)

    return Impl(", ".join(words), build, check, error, LAYOUT)


def torch_tokens(check: Callable) -> Impl:
    return Impl("torch token loop", lambda: runner(token_loop, False, heads_first), check, note=LAYOUT)


def sdpa(backward: bool, check: Callable, error: float) -> Impl:
    """Softmax attention of the same q, k and v: another function, shown as a yardstick."""

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def build() -> Runner:
        made = runner(attention, backward, lambda t: t.transpose(1, 2).contiguous())

        def prepare(q: Tensor, k: Tensor, v: Tensor, g: Tensor, *grad: Tensor) -> tuple[Tensor, ...]:
            return made.prepare(q, k, v, *grad)

        return Runner(made.run, prepare)

    return Impl("SDPA, causal", build, check, error, "softmax attention, another function: a yardstick")


def torch_token(way: str = "") -> Impl:
    """A decode step on a state that has batch and heads in one dimension: as it is usually written, with a
    new state, or "in place", or "compiled"."""

    def usual(q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        state = g.exp()[:, None, None] * state + k[:, :, None] * v[:, None]
        return q.shape[1] ** -0.5 * torch.bmm(q[:, None], state)[:, 0], state

    def in_place(q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        o, state = token(state, q, k, v, g.exp()[:, None, None])
        return q.shape[1] ** -0.5 * o, state

    def fused(q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """The form that compiles to one pass."""
        state.mul_(g.exp()[:, None, None]).add_(k[:, :, None] * v[:, None])
        return q.shape[1] ** -0.5 * (q[:, :, None] * state).sum(1), state

    def build() -> Runner:
        run = {"": usual, "in place": in_place, "compiled": fused}[way]
        if way == "compiled":
            run = torch.compile(run, dynamic=False)
        return Runner(run, lambda *args: tuple(t.flatten(0, 1).clone() for t in args))

    return Impl("torch expression" + (way and f", {way}"), build)


def copy_of_state() -> Impl:
    """As many bytes as a step must move."""

    def build() -> Runner:
        return Runner(Tensor.copy_, lambda *args: (torch.empty_like(args[-1]), args[-1]))

    return Impl("copy of the state", build, lambda data, copy: float((copy != data[-1]).sum()))


FLA = {
    "scalar": ("fla.ops.simple_gla", "chunk_simple_gla"),
    "vector": ("fla.ops.gla", "chunk_gla"),
    "delta": ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule"),
}


def flash_linear_attention(kind: str, backward: bool, device: str, error_bound: float) -> Impl:
    module, name = FLA[kind]

    def build() -> Runner:
        function = getattr(need(module), name)
        _need_gpu(device)
        return runner(lambda q, k, v, *gates: function(q, k, v, *gates)[0], backward)

    return Impl(f"flash-linear-attention {name}", build, error_bound=error_bound)


def mamba(backward: bool, device: str, check: Callable, error_bound: float) -> Impl:
    """Mamba-2's scan: C, B, dt * x and dt * A for q, k, v and g, here with A = -1."""

    def build() -> Runner:
        scan = need("mamba_ssm.ops.triton.ssd_combined").mamba_chunk_scan_combined
        _need_gpu(device)

        def attention(q: Tensor, k: Tensor, x: Tensor, dt: Tensor) -> Tensor:
            a = -torch.ones(q.shape[2], device=q.device)
            return scan(x, dt, a, k, q, chunk_size=256)

        made = runner(attention, backward)

        def prepare(q: Tensor, k: Tensor, v: Tensor, g: Tensor, *grad: Tensor) -> tuple[Tensor, ...]:
            x = (v.float() * q.shape[3] ** -0.5 / -g.float()[..., None]).to(v.dtype)
            return made.prepare(q, k, x, -g.float(), *grad)

        return Runner(made.run, prepare)

    return Impl("mamba_ssm chunk scan", build, check, error_bound)


def _need_gpu(device: str) -> None:
    if device != "cuda":
        raise Missing("its kernels are Triton for GPUs and fail on CPU tensors")
