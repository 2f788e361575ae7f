"""Triton launchers of the linear-attention recurrence: forward, backward and one decode step.

Mathematics. Per token and value head, S in R^(K x V): S <- Diag(e^g) S; u = v, or beta (v - k S) for the
delta rule; S <- S + k^T u; o = scale q S. A chunk of C tokens starts in S and ends in S'. With G_i the sum of
g from the chunk's start to token i, G over the whole chunk, D_ij = e^(g_(j+1) + ... + g_i) for i >= j:

    A_ij = scale sum_c q_ic k_jc D_ijc, i >= j;      M_ij = sum_c k_ic k_jc D_ijc, i > j
    U = V, or T R with T = (I + Diag(beta) M)^-1, R = beta (V - (K e^(G_i)) S)                  (delta rule)
    O = scale (Q e^(G_i)) S + A U,      S' = e^G S + (K e^(G - G_i))^T U

and backward, from dO and the gradient dS' of the chunk's last state, with X = T^T dU for the delta rule:

    dU = A^T dO + (K e^(G - G_i)) dS';   dV = dU, or beta X
    dS = e^G dS' + scale (Q e^(G_i))^T dO [- (K e^(G_i))^T dV]
    dA = scale dO U^T;  dM = -beta X U^T;  dQ, dK: their sums over D, and through S and dS'
    dbeta_i = X_i (V - (K e^(G_i)) S)_i^T - sum_j (X_i U_j^T) M_ij
    dg_t = e^G <S, dS'> + sum over i >= t of what comes from before i - sum of what goes on after i
           + sum over i < t of k_i dk_i through S'

The delta rule thus needs no W = T (beta e^(G_i) K) in memory, one product C x C x V more in the pass instead.
dg is summed in this form, and without the diagonals of dA, because the usual q dq - k dk loses to rounding
what a strong decay leaves.

Decays are exponentials of sums of g, never quotients of exponentials: exact resets at g = -inf, no overflow
for g <= 0. A scalar D_ij is a difference of sums kept in two floats. For a vector decay, products over rows
of 16 use the sums up to their first or after their last row; within the 16, one distance i - j after another.

Tiling. `decays_kernel`, `scores_kernel` (vector decay: A and M) and `solve_kernel` (T) run over chunks;
`state_kernel` over sequences, heads and blocks of S, chunk after chunk in registers, storing S before each;
`output_kernel` over chunks again. Backward repeats these but the last; `state_backward_kernel` goes through
the chunks in reverse; `values_kernel`, `grad_scores_kernel`, `grads_kernel` or `channel_grads_kernel` and
`gate_kernel` run over chunks. There are no atomics: value heads that share a head, and blocks of K, are added
up afterwards in a fixed order. Forward costs 4 K V + 2 C (K + V) flops per token and value head and moves
3 (K + V) + 2 K V / C elements; the delta rule adds 2 K V + 2 C (K + V) flops and 2 C + K + V elements, a
vector decay 2 C + 4 K elements, three reads of g and 16 K exponentials. Backward: 10 K V + 6 C K + 4 C V
flops; S and dS' of every chunk are its only memory that grows with K V.

Precision. bfloat16 operands, float32 sums. float16 is widened and multiplied in TF32, which has its digits
but float32's range: states and gradients overflow float16. float32 uses IEEE products, float64 its own.

NaN. A product would carry 0 * NaN past a reset or back to earlier tokens. The forward kernels look for it and
then repeat the chunk token by token; the backward pass keeps it within its sequence and head.

Sequences of different lengths come as a table of chunks that is built from cu_seqlens, which is read once.
Every offset is 64-bit. Importing needs no GPU and no driver.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise

import torch

from ._linear_attention_backward import (
    channel_grads_kernel,
    gate_kernel,
    grad_scores_kernel,
    grads_kernel,
    state_backward_kernel,
    values_kernel,
)
from ._linear_attention_forward import (
    decays_kernel,
    output_kernel,
    scores_kernel,
    solve_kernel,
    state_kernel,
    step_kernel,
)


@dataclass(frozen=True)
class Blocks:
    """Operands of the products, tl.dot's precision for them; default and largest chunk; blocks of K and V;
    bytes of C rows of all of K (delta rule) from which on the passes over chunks spill.
    """

    operand: torch.dtype
    precision: str
    chunk: int
    largest: int
    k: int
    v: int
    tile: int


# bfloat16: 64 rows fill a warpgroup's tensor core instruction, and C near K balances C^2 against K V.
# Four-byte operands: half as many columns in the same registers. IEEE float32 and float64 products gain
# nothing from a longer chunk, which only adds to C^2.
BLOCKS = {
    torch.float64: Blocks(torch.float64, "ieee", 16, 32, 32, 32, 1 << 14),
    torch.float32: Blocks(torch.float32, "ieee", 32, 64, 32, 32, 1 << 13),
    torch.bfloat16: Blocks(torch.bfloat16, "ieee", 64, 64, 64, 64, 1 << 14),
    torch.float16: Blocks(torch.float32, "tf32", 64, 64, 32, 32, 1 << 14),
}


def _launch(kernel, programs: int, *args, warps: int = 4, stages: int = 1, **constants) -> None:
    """Runs `kernel` on a one-dimensional grid; asks for fused a*b+c, whose default differs by version."""
    if programs > 0:
        kernel[(programs,)](*args, **constants, num_warps=warps, num_stages=stages, enable_fp_fusion=True)


def _block(size: int, largest: int) -> int:
    """Smallest power of two that covers `size`, from 16 (what tl.dot takes) to `largest`."""
    return min(largest, max(16, 1 << max(size - 1, 0).bit_length()))


@lru_cache(maxsize=64)
def _tables(
    cu_seqlens: tuple[int, ...], chunk: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Per sequence (first token, end, first chunk), per chunk (first token, end of its sequence)."""
    ends = torch.tensor(cu_seqlens, dtype=torch.int64)
    counts = (ends.diff() + chunk - 1) // chunk
    before = counts.cumsum(0) - counts
    of_chunk = torch.repeat_interleave(counts)
    first = ends[of_chunk] + (torch.arange(len(of_chunk)) - before[of_chunk]) * chunk
    sequences = torch.stack([ends[:-1], ends[1:], before], 1)
    chunks = torch.stack([first, ends[1:][of_chunk]], 1)
    both = torch.cat([sequences.flatten(), chunks.flatten()])
    both = both.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else both.to(device)
    return both[: sequences.numel()], both[sequences.numel() :]


def _check_cu_seqlens(cu_seqlens: torch.Tensor, tokens: int) -> tuple[int, ...]:
    """Its values, read once."""
    ends = tuple(cu_seqlens.tolist())
    if not ends or ends[0] != 0:
        raise ValueError(f"cu_seqlens must start at 0, got {ends[0] if ends else 'no value'}")
    for i, (a, b) in enumerate(pairwise(ends)):
        if b < a:
            raise ValueError(f"cu_seqlens must never decrease, got cu_seqlens[{i + 1}] = {b} after {a}")
    if ends[-1] != tokens:
        raise ValueError(f"cu_seqlens must end at the number of tokens {tokens}, got {ends[-1]}")
    return ends


def _strides(t: torch.Tensor | None, rank: int) -> tuple[int, ...]:
    """Strides, of an absent tensor or dimension 0."""
    strides = () if t is None else t.stride()
    return (*strides, *[0] * (rank - len(strides)))


class Problem:
    """One call: its sizes, chunk tables, work buffers and the launches on them."""

    def __init__(self, q, k, v, g, beta, initial_state, cu_seqlens, scale: float, chunk_size: int):
        self.q, self.k, self.v, self.g, self.beta, self.initial = q, k, v, g, beta, initial_state
        self.scale = scale
        self.batch, self.tokens, heads, self.dk = q.shape
        self.heads, self.dv = v.shape[2:]
        self.delta = beta is not None
        self.decay = "none" if g is None else ("scalar" if g.ndim == 3 else "vector")
        # How many value heads share a head of q and k, of g, of beta.
        self.gq = self.heads // max(heads, 1)
        self.gg = 1 if g is None else self.heads // max(g.shape[2], 1)
        self.gb = 1 if beta is None else self.heads // max(beta.shape[2], 1)
        # v - k S cancels most where K is small; bfloat16 operands would leave 1e-2 of it.
        narrow = self.delta and self.dk < 16 and q.dtype == torch.bfloat16
        self.blocks = b = BLOCKS[torch.float16 if narrow else q.dtype]
        self.precision = "ieee" if torch.version.hip else b.precision
        chunk = max(16, min(chunk_size or b.chunk, b.largest))
        if self.delta:
            chunk = min(chunk, max(16, b.tile // (_block(self.dk, 1 << 20) * b.operand.itemsize)))
        self.chunk = _block(self.tokens, chunk)
        self.sequence_table = self.chunk_table = None
        if cu_seqlens is None:
            self.sequences = self.batch
            self.chunks = self.batch * -(-self.tokens // self.chunk)
        else:
            ends = _check_cu_seqlens(cu_seqlens, self.tokens)
            self.sequence_table, self.chunk_table = _tables(ends, self.chunk, q.device)
            self.sequences, self.chunks = len(ends) - 1, self.chunk_table.numel() // 2
        self.stages = 1 if torch.version.hip else 2

    @cached_property
    def work(self) -> torch.dtype:
        return torch.float64 if self.q.dtype == torch.float64 else torch.float32

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype or self.blocks.operand, device=self.q.device)

    def square(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """One C x C matrix per chunk and head."""
        return self.empty(self.chunks, self.heads, self.chunk, self.chunk, dtype=dtype)

    def states(self) -> torch.Tensor:
        return self.empty(self.chunks, self.heads, self.dk, self.dv)

    @cached_property
    def qkg(self) -> tuple[int, ...]:
        return (*self.q.stride(), *self.k.stride(), *_strides(self.g, 4))

    def warps(self, count: int) -> int:
        """An AMD warp has 64 lanes."""
        return min(count, 4) if torch.version.hip else count

    @property
    def state_blocks(self) -> tuple[int, int, int]:
        """(BK, BV, warps) of the passes over chunks; the delta rule needs all of K in one program."""
        if not self.delta:
            return _block(self.dk, self.blocks.k), _block(self.dv, self.blocks.v), 4
        bk = _block(self.dk, 1 << 20)
        few, many = (64, 256) if self.blocks.operand == torch.bfloat16 else (16, 32)
        return bk, _block(self.dv, 32 if bk <= many else 16), self.warps(4 if bk <= few else 8)

    def scores(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """A and M under a vector decay."""
        if self.decay != "vector":
            return None, None
        a, m = self.square(), self.square(self.work) if self.delta else None
        c = self.chunk
        _launch(
            scores_kernel, self.chunks * self.heads * (c // 16), self.q, self.k, self.g, a, m,
            self.chunk_table, self.scale, self.tokens, self.heads, self.dk, self.gq, self.gg, *self.qkg,
            C=c, BK=_block(self.dk, self.blocks.k), PRECISION=self.precision,
        )  # fmt: skip
        return a, m

    def prepare(self, backward: bool) -> tuple[torch.Tensor | None, ...]:
        """A, M and T, each where something reads it."""
        a, m = self.scores()
        if not self.delta:
            return a, m, None
        stored = backward and self.decay != "vector"
        if stored:
            a, m = self.square(), self.square(self.work)
        t, c = self.square(), self.chunk
        _launch(
            solve_kernel, self.chunks * self.heads, self.q, self.k, self.g, self.beta, t,
            a if stored else None, m, self.chunk_table, self.scale,
            self.tokens, self.heads, self.dk, self.gq, self.gg, self.gb, *self.qkg, *_strides(self.beta, 3),
            DECAY=self.decay, C=c, BK=_block(self.dk, self.blocks.k), LEVELS=(c // 16).bit_length() - 1,
            PRECISION=self.precision,
        )  # fmt: skip
        return a, m, t

    def decays(self, backward: bool) -> tuple[torch.Tensor | None, ...]:
        """Vector decay: Q and K decayed from the chunk's start, K to its end; the sum over the chunk."""
        if self.decay != "vector":
            return None, None, None, None
        shape = self.batch, self.tokens, self.heads, self.dk
        early_q = self.empty(*shape) if backward else None
        early_k = self.empty(*shape) if self.delta else None
        late_k = self.empty(*shape)
        total = self.empty(self.chunks, self.heads, self.dk, dtype=self.work)
        bk = _block(self.dk, self.blocks.k)
        _launch(
            decays_kernel, -(-self.dk // bk) * self.chunks * self.heads, self.q, self.k, self.g,
            early_q, early_k, late_k, total, self.chunk_table,
            self.tokens, self.heads, self.dk, self.gq, self.gg, *self.qkg, C=self.chunk, BK=bk,
        )  # fmt: skip
        return early_q, early_k, late_k, total

    def state_pass(self, t, decays) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The state before every chunk, U (v itself without the delta rule), the final states."""
        states = self.states()
        u = self.v if t is None else self.empty(*self.v.shape)
        final = self.empty(self.sequences, self.heads, self.dk, self.dv, dtype=self.work)
        bk, bv, warps = self.state_blocks
        programs = -(-self.dk // bk) * -(-self.dv // bv) * self.sequences * self.heads
        _launch(
            state_kernel, programs, self.k, self.v, self.g, self.beta, t, *decays[1:], self.initial, states,
            u, final, self.sequence_table, self.tokens, self.heads, self.dk, self.dv, self.gq, self.gg,
            self.gb, *self.k.stride(), *self.v.stride(), *_strides(self.g, 4), *_strides(self.beta, 3),
            *_strides(self.initial, 4),
            DECAY=self.decay, C=self.chunk, BK=bk, BV=bv, PRECISION=self.precision,
            warps=warps, stages=self.stages,
        )  # fmt: skip
        return states, u, final

    @property
    def empty_problem(self) -> bool:
        return 0 in (self.batch, self.tokens, self.heads, self.dk, self.dv)

    def forward(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self.empty_problem:
            final = torch.zeros(
                self.sequences, self.heads, self.dk, self.dv, dtype=self.work, device=self.q.device
            )
            return torch.zeros_like(self.empty(*self.v.shape, dtype=self.q.dtype)), (
                final if self.initial is None else final.copy_(self.initial)
            )
        a, _, t = self.prepare(backward=False)
        states, u, final = self.state_pass(t, self.decays(backward=False))
        o = self.empty(*self.v.shape, dtype=self.q.dtype)
        bv = _block(self.dv, self.blocks.v)
        _launch(
            output_kernel, self.chunks * self.heads * -(-self.dv // bv), self.q, self.k, u, self.g, a,
            states, o, self.chunk_table, self.scale, self.tokens, self.heads, self.dk, self.dv,
            self.gq, self.gg, *self.q.stride(), *self.k.stride(), *u.stride(), *_strides(self.g, 4),
            DECAY=self.decay, C=self.chunk, BK=_block(self.dk, self.blocks.k), BV=bv,
            PRECISION=self.precision, stages=self.stages,
        )  # fmt: skip
        return o, final

    def backward(self, grad_o: torch.Tensor, grad_state: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if self.empty_problem:
            given = self.q, self.k, self.v, self.g, self.beta, self.initial
            *zeros, grad_initial = (
                None if t is None else torch.zeros_like(t, memory_format=torch.contiguous_format)
                for t in given
            )
            return *zeros, None if grad_initial is None else grad_initial.copy_(grad_state)
        a, m, t = self.prepare(backward=True)
        decays = self.decays(backward=True)
        states, u, _ = self.state_pass(t, decays)
        grad_states, x, grad_v, grad_initial = self.state_backward_pass(a, t, decays, grad_o, grad_state)
        if not self.delta:
            self.values(a, grad_o, grad_states, grad_v)
        grad_q, grad_k, grad_g, grad_beta = self.token_grads(u, m, x, states, grad_o, grad_states)
        return (
            _fold(grad_q, self.q),
            _fold(grad_k, self.k),
            grad_v,
            _fold(grad_g, self.g),
            _fold(grad_beta, self.beta),
            None if grad_initial is None else grad_initial.to(self.initial.dtype),
        )

    def state_backward_pass(self, a, t, decays, grad_o, grad_state):
        """The gradient of the state after every chunk, X and dV of the delta rule, of the initial state."""
        grad_states = self.states()
        grad_v = self.empty(*self.v.shape, dtype=self.v.dtype)
        x = self.empty(*self.v.shape) if self.delta else None
        grad_initial = None
        if self.initial is not None:
            grad_initial = self.empty(*self.initial.shape, dtype=self.work)
        bk, bv, warps = self.state_blocks
        programs = -(-self.dk // bk) * -(-self.dv // bv) * self.sequences * self.heads
        _launch(
            state_backward_kernel, programs, self.q, self.k, self.g, self.beta, t,
            *decays, a if self.delta else None, grad_o, grad_state, grad_states, x, grad_v, grad_initial,
            self.sequence_table, self.scale, self.tokens, self.heads, self.dk, self.dv,
            self.gq, self.gg, self.gb, *self.qkg, *_strides(self.beta, 3), *grad_o.stride(),
            *grad_state.stride(),
            DECAY=self.decay, C=self.chunk, BK=bk, BV=bv, PRECISION=self.precision,
            warps=warps, stages=self.stages,
        )  # fmt: skip
        return grad_states, x, grad_v, grad_initial

    def values(self, a, grad_o, grad_states, grad_v) -> None:
        bv = _block(self.dv, self.blocks.v)
        _launch(
            values_kernel, self.chunks * self.heads * -(-self.dv // bv), self.q, self.k, self.g, a, grad_o,
            grad_states, grad_v, self.chunk_table, self.scale, self.tokens, self.heads, self.dk, self.dv,
            self.gq, self.gg, *self.qkg, *grad_o.stride(),
            DECAY=self.decay, C=self.chunk, BK=_block(self.dk, self.blocks.k), BV=bv,
            PRECISION=self.precision, stages=self.stages,
        )  # fmt: skip

    def token_grads(self, u, m, x, states, grad_o, grad_states):
        """dq and dk per value head; dg and dbeta per value head, summed over the blocks of K."""
        c, bv = self.chunk, _block(self.dv, self.blocks.v)
        bk = _block(self.dk, self.blocks.k // 2 if self.delta else self.blocks.k)
        blocks = -(-self.dk // bk)
        shape = self.batch, self.tokens, self.heads
        grad_a, grad_m = self.square(), self.square() if self.delta else None
        grad_q, grad_k = (
            self.empty(*shape, self.dk, dtype=self.q.dtype if self.gq == 1 else self.work) for _ in range(2)
        )
        grad_beta = self.empty(1 + blocks, *shape, dtype=self.work) if self.delta else None
        strides = *_strides(self.beta, 3), *grad_o.stride()
        _launch(
            grad_scores_kernel, self.chunks * self.heads, self.v, u, self.g, self.beta, m, x, grad_o, grad_a,
            grad_m, grad_beta, self.chunk_table, self.scale, self.tokens, self.heads, self.dv, self.gg,
            self.gb, *self.v.stride(), *u.stride(), *_strides(self.g, 4)[:3], *strides,
            DECAY=self.decay, C=c, BV=bv, PRECISION=self.precision, stages=self.stages,
        )  # fmt: skip
        programs = blocks * self.chunks * self.heads
        inputs = self.q, self.k, u, self.g, self.beta, x, states, grad_o, grad_states, grad_a, grad_m
        sizes = self.tokens, self.heads, self.dk, self.dv, self.gq, self.gg, self.gb, self.batch * self.tokens
        strides = *self.q.stride(), *self.k.stride(), *u.stride(), *_strides(self.g, 4), *strides
        if self.decay != "vector":
            grad_g = None if self.g is None else self.empty(blocks, *shape, dtype=self.work)
            _launch(
                grads_kernel, programs, *inputs, grad_q, grad_k, grad_g, grad_beta, self.chunk_table,
                self.scale, *sizes, *strides,
                DECAY=self.decay, C=c, BK=bk, BV=bv, PRECISION=self.precision, stages=self.stages,
                warps=self.warps(8),
            )  # fmt: skip
            return grad_q, grad_k, _total(grad_g), _total(grad_beta)
        both, ends, grad_g = (self.empty(*shape, self.dk, dtype=self.work) for _ in range(3))
        _launch(
            channel_grads_kernel, programs * (c // 16), *inputs, grad_q, grad_k, both, ends, grad_beta,
            self.chunk_table, self.scale, *sizes, *strides, C=c, BK=bk, BV=bv, PRECISION=self.precision,
        )  # fmt: skip
        _launch(
            gate_kernel, programs, self.g, both, ends, states, grad_states, grad_g,
            self.chunk_table, self.tokens, self.heads, self.dk, self.dv, self.gg, *self.g.stride(),
            C=c, BK=bk, BV=bv,
        )  # fmt: skip
        return grad_q, grad_k, grad_g, _total(grad_beta)


def _total(parts: torch.Tensor | None) -> torch.Tensor | None:
    return None if parts is None else (parts[0] if len(parts) == 1 else parts.sum(0))


def _fold(grad: torch.Tensor | None, like: torch.Tensor | None) -> torch.Tensor | None:
    """[B, T, HV, ...] summed over the value heads that share a head of `like`, in its dtype."""
    if grad is None or like is None:
        return None
    group = grad.shape[2] // like.shape[2]
    return (grad if group == 1 else grad.unflatten(2, (-1, group)).sum(3)).to(like.dtype)


def linear_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor | None, beta: torch.Tensor | None,
    initial_state: torch.Tensor | None, cu_seqlens: torch.Tensor | None, scale: float, chunk_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The op ``pyops::linear_attention`` on a GPU: (o, final state)."""
    with torch.cuda.device_of(q):
        return Problem(q, k, v, g, beta, initial_state, cu_seqlens, scale, chunk_size).forward()


def linear_attention_backward(
    grad_o: torch.Tensor, grad_state: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    g: torch.Tensor | None, beta: torch.Tensor | None, initial_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None, scale: float, chunk_size: int,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """The op ``pyops::linear_attention_backward`` on a GPU: gradients of q, k, v, g, beta, initial_state.

    Each in its input's shape and dtype, contiguous; shape [0] for an absent input.
    """
    with torch.cuda.device_of(q):
        problem = Problem(q, k, v, g, beta, initial_state, cu_seqlens, scale, chunk_size)
        grads = problem.backward(grad_o, grad_state)
    absent = torch.empty(0, dtype=torch.float32, device=q.device)
    return tuple(absent if grad is None else grad for grad in grads)


def linear_attention_step_(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor | None, beta: torch.Tensor | None,
    state: torch.Tensor, scale: float,
) -> torch.Tensor:  # fmt: skip
    """The op ``pyops::linear_attention_step_`` on a GPU: o of one token; the state is updated in place."""
    batch, heads, dv = v.shape
    dk = q.shape[-1]
    o = torch.empty(v.shape, dtype=q.dtype, device=q.device)
    if o.numel() == 0:
        return o
    bk = _block(dk, 1 << 20)
    bv = max(1, min(_block(dv, 64), 4096 // bk))
    groups = (heads // q.shape[1], heads // g.shape[1] if g is not None else 1)
    groups = (*groups, heads // beta.shape[1] if beta is not None else 1)
    with torch.cuda.device_of(q):
        _launch(
            step_kernel, batch * heads * -(-dv // bv), q, k, v, g, beta, state, o, scale, heads, dk, dv,
            *groups, *q.stride(), *k.stride(), *v.stride(), *_strides(g, 3), *_strides(beta, 2),
            *state.stride(),
            DECAY="none" if g is None else ("scalar" if g.ndim == 2 else "vector"), BK=bk, BV=bv,
        )  # fmt: skip
    return o
