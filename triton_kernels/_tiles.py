"""Pieces of kernels that belong to no single op: batched tiles, reductions, split products, rounding."""

import triton
import triton.language as tl


@triton.jit
def matrix_tile(n, m, SIDE: tl.constexpr):
    """The (matrix, rows, cols) of this program in a one-dimensional grid over batch and tiles; 64-bit."""
    across = tl.cdiv(m, SIDE)
    tiles = tl.cdiv(n, SIDE) * across
    pid = tl.program_id(0)
    at = pid % tiles
    rows = (at // across).to(tl.int64) * SIDE + tl.arange(0, SIDE)
    cols = (at % across).to(tl.int64) * SIDE + tl.arange(0, SIDE)
    return (pid // tiles).to(tl.int64), rows[:, None], cols[None, :]


@triton.jit
def matrix_base(ptr, table_ptr, column: tl.constexpr, batch, batch_stride):
    """Start of matrix `batch`: in a strided batch, or from `column` of a table of addresses."""
    if table_ptr is None:
        return ptr + batch * batch_stride
    else:
        return tl.load(table_ptr + batch * 5 + column).to(ptr.dtype)


@triton.jit
def power_halves(bits):
    """Two powers of two whose product brings a positive float with these bits into [1, 2).

    One factor would overflow for the smallest numbers. Subnormal ones stay below 1.
    """
    if bits.dtype == tl.int64:
        power = 1023 - tl.maximum(bits >> 52, 1)
        half = power >> 1
        first = ((half + 1023) << 52).to(tl.float64, bitcast=True)
        second = ((power - half + 1023) << 52).to(tl.float64, bitcast=True)
    else:
        power = 127 - tl.maximum(bits >> 23, 1)
        half = power >> 1
        first = ((half + 127) << 23).to(tl.float32, bitcast=True)
        second = ((power - half + 127) << 23).to(tl.float32, bitcast=True)
    return first, second


@triton.jit
def row_total(partial_ptr, count, WIDTH: tl.constexpr):
    """(batch, float64 sum) of row `program` of the partial sums, in a fixed order."""
    batch = tl.program_id(0).to(tl.int64)
    row = partial_ptr + batch * count
    lane = tl.arange(0, WIDTH).to(tl.int64)
    sums = tl.zeros((WIDTH,), tl.float64)
    for start in range(0, count, WIDTH):
        sums += tl.load(row + (start + lane), start + lane < count, other=0.0).to(tl.float64)
    return batch, tl.sum(sums, 0)


@triton.jit
def load_split(ptr, at, mask, lo, dtype: tl.constexpr, SPLIT: tl.constexpr):
    value = tl.load(ptr + at, mask, other=0.0).to(dtype)
    if SPLIT:
        value += tl.load(ptr + lo + at, mask, other=0.0).to(dtype)
    return value


@triton.jit
def store_split(ptr, at, value, mask, lo, SPLIT: tl.constexpr):
    rounded = value.to(ptr.dtype.element_ty)
    tl.store(ptr + at, rounded, mask)
    if SPLIT:
        tl.store(ptr + lo + at, (value - rounded.to(value.dtype)).to(ptr.dtype.element_ty), mask)


@triton.jit
def product(
    a_ptr, b_ptr, rows, cols, row_end, col_end, k, a_row, a_col, b_row, b_col, a_lo, b_lo,
    SPLIT: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The BM x BN tile of a b (a: rows x k, b: k x cols): sums in float32, of float64 operands in float64."""
    dtype: tl.constexpr = tl.float64 if a_ptr.dtype.element_ty == tl.float64 else tl.float32
    depth = tl.arange(0, BK)
    a_at = a_ptr + (rows[:, None] * a_row + depth[None, :].to(tl.int64) * a_col)
    b_at = b_ptr + (depth[:, None].to(tl.int64) * b_row + cols[None, :] * b_col)
    chunk = tl.full((), BK, tl.int64)
    acc = tl.zeros((BM, BN), dtype)
    for start in range(0, k, BK):
        a_mask = (rows < row_end)[:, None] & (depth < k - start)[None, :]
        b_mask = (depth < k - start)[:, None] & (cols < col_end)[None, :]
        a = tl.load(a_at, a_mask, other=0.0)
        b = tl.load(b_at, b_mask, other=0.0)
        acc = tl.dot(a, b, acc, input_precision=PRECISION, out_dtype=dtype)
        if SPLIT:
            acc = tl.dot(a, tl.load(b_at + b_lo, b_mask, other=0.0), acc, out_dtype=dtype)
            acc = tl.dot(tl.load(a_at + a_lo, a_mask, other=0.0), b, acc, out_dtype=dtype)
        a_at += chunk * a_col
        b_at += chunk * b_row
    return acc


@triton.jit
def random_bits(seed, stream, index):
    """32 random bits per element of `index` from a counter, the same on every device.

    seed and stream are already multiplied by their constants and reduced to 32 bits.
    """
    key = (seed + stream).to(tl.uint32)
    x = index.to(tl.uint32) + key
    for _ in tl.static_range(2):
        x = (x ^ (x >> 16)) * 0x21F0AAAD
        x = (x ^ (x >> 15)) * 0x735A2D97
        x = (x ^ (x >> 15)) + key
    return x


@triton.jit
def stochastic_round(value, dtype: tl.constexpr, random):
    """float32 to a neighbour in bfloat16 or float16 that keeps the mean: floor(value/q + u) q, q its spacing.

    u is the top bits of `random`. The floor is taken on the bit pattern, that is on the magnitude: a negative
    value needs the complement of u.
    """
    dropped: tl.constexpr = 16 if dtype == tl.bfloat16 else 13
    below: tl.constexpr = (1 << dropped) - 1
    u = (random >> (32 - dropped)).to(tl.int32)
    bits = value.to(tl.int32, bitcast=True)
    rounded = (bits + tl.where(bits < 0, u ^ below, u)) & ~below
    result = rounded.to(tl.float32, bitcast=True)
    if dtype == tl.float16:  # below 2^-14 the spacing is 2^-24
        subnormal = tl.floor(value * 16777216.0 + u.to(tl.float32) * 0.0001220703125) * 5.9604644775390625e-08
        result = tl.where(tl.abs(value) < 6.103515625e-05, subnormal, result)
    return tl.where(tl.abs(value) < float("inf"), result, value).to(dtype)
