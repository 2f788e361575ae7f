"""Pieces that the kernels of linear_attention.py share: addresses, decays, products, one token's recurrence.

A decay is only ever the exponential of a sum of the log-decays between two tokens, never a quotient of two
exponentials: it cannot overflow for g <= 0, and a sum that contains -inf is -inf, which `fade` turns into an
exact reset.
"""

import triton
import triton.language as tl


@triton.jit
def chunk_span(chunks_ptr, chunk, T, C: tl.constexpr):
    """(batch entry, first token, tokens) of a chunk; chunks_ptr has (first, end of sequence) for each."""
    if chunks_ptr is None:
        per_sequence = tl.cdiv(T, C)
        batch = chunk // per_sequence
        first = (chunk % per_sequence) * C
        end = first * 0 + T
    else:
        batch = chunk * 0
        first = tl.load(chunks_ptr + chunk * 2)
        end = tl.load(chunks_ptr + chunk * 2 + 1)
    return batch, first, tl.minimum(end - first, C)


@triton.jit
def sequence_span(sequences_ptr, sequence, T, C: tl.constexpr):
    """(batch entry, first token, end, first chunk) of a sequence; sequences_ptr has the last three."""
    if sequences_ptr is None:
        batch = sequence
        first = sequence * 0
        end = first + T
        chunk = sequence * tl.cdiv(T, C)
    else:
        batch = sequence * 0
        first = tl.load(sequences_ptr + sequence * 3)
        end = tl.load(sequences_ptr + sequence * 3 + 1)
        chunk = tl.load(sequences_ptr + sequence * 3 + 2)
    return batch, first, end, chunk


@triton.jit
def split_program(blocks, heads):
    """(block, head, rest) of this program in a one-dimensional grid; 64-bit."""
    pid = tl.program_id(0).to(tl.int64)
    return pid % blocks, (pid // blocks) % heads, pid // blocks // heads


@triton.jit
def arange(n: tl.constexpr):
    return tl.arange(0, n).to(tl.int64)


@triton.jit
def load_tile(ptr, rows, cols, row_stride, col_stride, rows_inside, cols_inside):
    """[rows, cols] in float32 (float64 of float64), zero outside."""
    dtype: tl.constexpr = tl.float64 if ptr.dtype.element_ty == tl.float64 else tl.float32
    at = rows[:, None] * row_stride + cols[None, :] * col_stride
    return tl.load(ptr + at, rows_inside[:, None] & cols_inside[None, :], other=0.0).to(dtype)


@triton.jit
def load_line(ptr, at, stride, inside, dtype: tl.constexpr):
    return tl.load(ptr + at * stride, inside, other=0.0).to(dtype)


@triton.jit
def store_tile(ptr, value, rows, cols, row_stride, col_stride, rows_inside, cols_inside):
    at = rows[:, None] * row_stride + cols[None, :] * col_stride
    tl.store(ptr + at, value.to(ptr.dtype.element_ty), rows_inside[:, None] & cols_inside[None, :])


@triton.jit
def product(a, b, operand: tl.constexpr, PRECISION: tl.constexpr):
    """a b of operands rounded to operand; sums in float32, for float64 in float64."""
    dtype: tl.constexpr = tl.float64 if operand == tl.float64 else tl.float32
    return tl.dot(a.to(operand), b.to(operand), input_precision=PRECISION, out_dtype=dtype)


@triton.jit
def fade(x, log_decay):
    """x e^log_decay; 0 where the sum is -inf, whatever x holds.

    The select is spelled in bits: Triton 3.9 fails to move one-bit tensors between the layouts of operands.
    """
    y = x * tl.exp(log_decay)
    bits: tl.constexpr = tl.int64 if y.dtype == tl.float64 else tl.int32
    keep = tl.where(log_decay == float("-inf"), 0, -1).to(bits)
    return (y.to(bits, bitcast=True) & keep).to(y.dtype, bitcast=True)


@triton.jit
def unusable(x):
    """How many elements are NaN or infinite."""
    return tl.sum(tl.where(tl.abs(x) < float("inf"), 0, 1))


@triton.jit
def pair_log_decay(g, C: tl.constexpr):
    """g_(j+1) + ... + g_i for i >= j from a scalar log-decay per row; -inf for i < j and across a reset.

    Differences of the running sum are taken between its float32 parts hi and lo, so that heavy decays do not
    spoil light ones; below -750, where the exponential is 0 in every dtype, a decay counts as a reset here.
    """
    i = tl.arange(0, C)
    reset = g < -750.0
    total = tl.cumsum(tl.where(reset, 0.0, g).to(tl.float64), 0)
    segment = tl.cumsum(reset.to(tl.int32), 0)
    if g.dtype == tl.float64:
        exponent = total[:, None] - total[None, :]
    else:
        hi = total.to(tl.float32)
        lo = (total - hi.to(tl.float64)).to(tl.float32)
        exponent = (hi[:, None] - hi[None, :]) + (lo[:, None] - lo[None, :])
    related = (i[:, None] >= i[None, :]) & (segment[:, None] == segment[None, :])
    return tl.where(related, exponent, float("-inf"))


@triton.jit
def unit_lower_inverse(lower, C: tl.constexpr, LEVELS: tl.constexpr):
    """(I + L)^-1 for a strictly lower L of C = 16 * 2^LEVELS rows; products in L's own precision.

    Forward substitution in all 16 x 16 diagonal blocks at once, then two products per doubling of the block.
    """
    N: tl.constexpr = C // 16
    b = tl.arange(0, N)
    r = tl.arange(0, 16)
    same = (b[:, None] == b[None, :])[:, None, :, None]
    blocks = tl.sum(tl.where(same, tl.reshape(lower, (N, 16, N, 16)), 0.0), 2)
    x = tl.where((r[:, None] == r[None, :])[None, :, :], 1.0, tl.zeros((N, 16, 16), lower.dtype))
    for step in range(1, 16):
        here = (r == step)[None, :, None]
        row = tl.sum(tl.where(here, blocks, 0.0), 1)
        x -= tl.where(here, tl.sum(row[:, :, None] * x, 1)[:, None, :], 0.0)
    for level in tl.static_range(LEVELS):
        x = _merge_blocks(x, lower, C // (32 << level), 16 << level)
    return tl.reshape(x, (C, C))


@triton.jit
def _merge_blocks(x, lower, P: tl.constexpr, S: tl.constexpr):
    """Inverses of the P diagonal blocks of 2 S rows from the 2 P of S rows (x).

    [[A, 0], [B, D]]^-1 = [[A^-1, 0], [-D^-1 B A^-1, D^-1]].
    """
    p = tl.arange(0, P)
    first = tl.arange(0, 2) == 0
    same = (p[:, None] == p[None, :])[:, None, None, :, None, None]
    b = tl.reshape(lower, (P, 2, S, P, 2, S))
    b = tl.where(same & first[None, None, None, None, :, None], b, 0.0)
    b = tl.sum(tl.sum(b, 4), 3)
    b = tl.sum(tl.where(first[None, :, None, None], 0.0, b), 1)
    halves = tl.reshape(x, (P, 2, S, S))
    a = tl.sum(tl.where(first[None, :, None, None], halves, 0.0), 1)
    d = tl.sum(tl.where(first[None, :, None, None], 0.0, halves), 1)
    b = tl.dot(d, b, input_precision="ieee", out_dtype=x.dtype)
    b = -tl.dot(b, a, input_precision="ieee", out_dtype=x.dtype)
    left = first[None, None, :, None]
    top = tl.where(left, a[:, :, None, :], 0.0)
    bottom = tl.where(left, b[:, :, None, :], d[:, :, None, :])
    both = tl.where(first[None, :, None, None, None], top[:, None, :, :, :], bottom[:, None, :, :, :])
    return tl.reshape(both, (P, 2 * S, 2 * S))


@triton.jit
def token_gate(ptr, token, token_stride, c, c_stride, c_inside, DECAY: tl.constexpr, dtype: tl.constexpr):
    """One token's log-decay: 0, a scalar, or [K, 1]."""
    if DECAY == "none":
        return 0.0
    elif DECAY == "scalar":
        return tl.load(ptr + token * token_stride).to(dtype)
    else:
        return load_line(ptr + token * token_stride, c, c_stride, c_inside, dtype)[:, None]


@triton.jit
def advance(s, k, v, g, beta, k_inside, DECAY: tl.constexpr, DELTA: tl.constexpr):
    """One token: (Diag(e^g) S + k^T u, u), u = v or beta (v - k S of the decayed S).

    Rows of S outside K stay 0, where 0 * NaN would be NaN, which no decay drops again.
    """
    if DECAY != "none":
        s = fade(s, g)
    u = v
    if DELTA:
        u = beta * (v - tl.sum(k[:, None] * s, 0))
    return tl.where(k_inside[:, None], s + k[:, None] * u[None, :], 0.0), u
