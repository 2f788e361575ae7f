"""The kernels that lmo.py launches; its first lines say what they compute and how."""

import triton
import triton.language as tl

from ._tiles import (
    load_split,
    matrix_base,
    matrix_tile,
    power_halves,
    product,
    random_bits,
    row_total,
    stochastic_round,
    store_split,
)


@triton.jit
def _direction(
    g_ptr, m_ptr, g_at, m_at, mask, momentum,
    UPDATE: tl.constexpr, NESTEROV: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """The step's direction d; UPDATE first advances the momentum in memory."""
    d = tl.load(g_ptr + g_at, mask, other=0.0).to(dtype)
    if m_ptr is not None:
        g = d
        d = tl.load(m_ptr + m_at, mask, other=0.0)
        if UPDATE:
            d = (d.to(g.dtype) + (g - d) * (1.0 - tl.full((1, 1), momentum, g.dtype))).to(d.dtype)
            tl.store(m_ptr + m_at, d, mask)
        d = d.to(g.dtype)
        if NESTEROV:
            d = g + (d - g) * tl.full((1, 1), momentum, g.dtype)
    return d


@triton.jit
def amax_kernel(
    g_ptr, m_ptr, table_ptr, amax_ptr, momentum: tl.float64,
    n, m, g_batch, g_row, g_col, m_row, m_col,
    NESTEROV: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    """amax[batch] <- bits of max |d|, above Inf's if any is NaN; advances the momentum if there is one."""
    batch, rows, cols = matrix_tile(n, m, SIDE)
    mask = (rows < n) & (cols < m)
    g_ptr = matrix_base(g_ptr, table_ptr, 1, batch, g_batch)
    if m_ptr is not None:
        m_ptr = matrix_base(m_ptr, table_ptr, 2, batch, 0)
    g_at = rows * g_row + cols * g_col
    dtype: tl.constexpr = tl.float64 if amax_ptr.dtype.element_ty == tl.int64 else tl.float32
    d = _direction(g_ptr, m_ptr, g_at, rows * m_row + cols * m_col, mask, momentum, True, NESTEROV, dtype)
    if dtype == tl.float64:
        bits = d.to(tl.int64, bitcast=True) & 0x7FFFFFFFFFFFFFFF
    else:
        bits = d.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    tl.atomic_max(amax_ptr + batch, tl.max(tl.max(bits, 1), 0))


@triton.jit
def scale_kernel(
    g_ptr, m_ptr, table_ptr, amax_ptr, carry_ptr, x_ptr, momentum: tl.float64,
    n, m, n_pad, m_pad, g_batch, g_row, g_col, m_row, m_col, x_batch, x_row, x_col, x_lo: tl.int64,
    NESTEROV: tl.constexpr, SPLIT: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    """carry, x <- d scaled by a power of two to amax in [1, 2), zero-padded."""
    batch, rows, cols = matrix_tile(n_pad, m_pad, SIDE)
    g_ptr = matrix_base(g_ptr, table_ptr, 1, batch, g_batch)
    if m_ptr is not None:
        m_ptr = matrix_base(m_ptr, table_ptr, 2, batch, 0)
    g_at = rows * g_row + cols * g_col
    m_at = rows * m_row + cols * m_col
    inside = (rows < n) & (cols < m)
    dtype: tl.constexpr = tl.float64 if amax_ptr.dtype.element_ty == tl.int64 else tl.float32
    d = _direction(g_ptr, m_ptr, g_at, m_at, inside, momentum, False, NESTEROV, dtype)
    first, second = power_halves(tl.load(amax_ptr + batch))
    at = batch * x_batch + rows * x_row + cols * x_col
    mask = (rows < n_pad) & (cols < m_pad)
    value = d * first * second
    if carry_ptr is not None:
        value = value.to(carry_ptr.dtype.element_ty)
        tl.store(carry_ptr + at, value, mask)
    store_split(x_ptr, at, value, mask, x_lo, SPLIT)


@triton.jit
def square_sum_kernel(x_ptr, partial_ptr, size, chunks, CHUNK: tl.constexpr):
    """partial[batch, chunk] <- sum of squares of a chunk of the contiguous x[batch, size]."""
    pid = tl.program_id(0)
    batch = (pid // chunks).to(tl.int64)
    at = (pid % chunks).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(x_ptr + batch * size + at, at < size, other=0.0)
    tl.store(partial_ptr + pid.to(tl.int64), tl.sum(x * x, 0))


@triton.jit
def norm_kernel(partial_ptr, amax_ptr, scale_ptr, eps: tl.float64, count, WIDTH: tl.constexpr):
    """scale[batch] <- 1 / max(||d||_F, eps) relative to the power of two; 0 for zero d, NaN if not finite."""
    batch, total = row_total(partial_ptr, count, WIDTH)
    bits = tl.load(amax_ptr + batch)
    first, second = power_halves(bits)
    eps = tl.full((), eps, tl.float64) * first.to(tl.float64) * second.to(tl.float64)
    scale = tl.where(total > 0, 1.0 / tl.maximum(tl.sqrt(total), eps), 0.0)
    infinity: tl.constexpr = 0x7FF0000000000000 if bits.dtype == tl.int64 else 0x7F800000
    tl.store(scale_ptr + batch, tl.where(bits < infinity, scale, float("nan")))


@triton.jit
def schatten_kernel(partial_ptr, scale_ptr, gram_scale_ptr, count, WIDTH: tl.constexpr):
    """From sum(A^2): gram_scale <- 1 / ||A||_F for A, and scale <- scale / ||A||_F^(1/2) for X."""
    batch, total = row_total(partial_ptr, count, WIDTH)
    factor = tl.where(total == 0, 0.0, 1.0 / tl.sqrt(total))
    tl.store(gram_scale_ptr + batch, factor)
    tl.store(scale_ptr + batch, tl.load(scale_ptr + batch) * tl.sqrt(factor))


@triton.jit
def residual_kernel(
    partial_ptr, gram_partial_ptr, residual_ptr, done_ptr, steps_ptr, tol: tl.float64, step, count,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """residual <- ||A^2 - A||_F of a matrix still running; given sums of A^2, done if at most tol ||A||_F."""
    batch, total = row_total(partial_ptr, count, WIDTH)
    if tl.load(done_ptr + batch) == 0:
        residual = tl.sqrt(total)
        tl.store(residual_ptr + batch, residual)
        if gram_partial_ptr is not None:
            _, square = row_total(gram_partial_ptr, count, WIDTH)
            if residual <= tol * tl.sqrt(square):
                tl.store(done_ptr + batch, 1)
                tl.store(steps_ptr + batch, tl.full((), step, tl.int64))


@triton.jit
def symmetric_kernel(
    a_ptr, b_ptr, p_ptr, d_ptr, q_ptr, scale_ptr, done_ptr, partial_ptr,
    alpha: tl.float64, beta: tl.float64, diagonal: tl.float64,
    n, k, a_batch, a_row, a_col, b_batch, b_row, b_col, d_batch, d_row, d_col,
    a_lo: tl.int64, b_lo: tl.int64, d_lo: tl.int64,
    PARTIAL: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr, SIDE: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """D = alpha s P + beta s^2 A B^T (n x n, symmetric), Q = D + diagonal I; P, D, Q share strides.

    PARTIAL: "value" sums D^2 per tile, "change" sums (s^2 A B^T - s P)^2; s is scale[batch], 1 without it.
    """
    across = tl.cdiv(n, SIDE)
    tiles = across * (across + 1) // 2
    pid = tl.program_id(0)
    batch = (pid // tiles).to(tl.int64)
    if done_ptr is not None:  # noqa: SIM102  likewise
        if tl.load(done_ptr + batch) != 0:
            return
    tile = pid % tiles
    # Column j of the upper triangle starts at tile j (j + 1) / 2; the float root may be one off.
    j = ((tl.sqrt(8.0 * tile.to(tl.float32) + 1.0) - 1.0) * 0.5).to(tl.int32)
    j = tl.where(j * (j + 1) // 2 > tile, j - 1, j)
    j = tl.where((j + 1) * (j + 2) // 2 <= tile, j + 1, j)
    i = tile - j * (j + 1) // 2
    rows = i.to(tl.int64) * SIDE + tl.arange(0, SIDE)
    cols = j.to(tl.int64) * SIDE + tl.arange(0, SIDE)
    a_ptr += batch * a_batch
    b_ptr += batch * b_batch
    acc = product(
        a_ptr, b_ptr, rows, cols, n, n, k, a_row, a_col, b_col, b_row, a_lo, b_lo,
        SPLIT, PRECISION, SIDE, SIDE, BK,
    )  # fmt: skip
    rows = rows[:, None]
    cols = cols[None, :]
    inside = (rows < n) & (cols < n)
    at = batch * d_batch + rows * d_row + cols * d_col
    scale = tl.full((1, 1), 1.0, acc.dtype)
    if scale_ptr is not None:
        scale *= tl.load(scale_ptr + batch)
        acc *= scale * scale
    value = acc * tl.full((1, 1), beta, acc.dtype)
    if p_ptr is not None:
        p = load_split(p_ptr, at, inside, d_lo, acc.dtype, SPLIT) * scale
        value += p * tl.full((1, 1), alpha, acc.dtype)
        if PARTIAL == "change":
            acc -= p
    if partial_ptr is not None:
        if PARTIAL == "value":
            acc = value
        total = tl.sum(tl.sum(tl.where(inside, acc * acc, 0.0), 1), 0)
        tl.store(partial_ptr + pid.to(tl.int64), tl.where(i < j, 2.0, 1.0) * total)
    mirror = batch * d_batch + cols * d_row + rows * d_col
    if d_ptr is not None:
        store_split(d_ptr, at, value, inside & (rows <= cols), d_lo, SPLIT)
        store_split(d_ptr, mirror, value, inside & (rows < cols), d_lo, SPLIT)
    if q_ptr is not None:
        value += tl.where(rows == cols, tl.full((1, 1), diagonal, acc.dtype), 0.0)
        store_split(q_ptr, at, value, inside & (rows <= cols), d_lo, SPLIT)
        store_split(q_ptr, mirror, value, inside & (rows < cols), d_lo, SPLIT)


@triton.jit
def _apply(w_ptr, at, u, mask, shrink, step, seed, stream, index, STOCHASTIC: tl.constexpr):
    """w <- shrink w - step u in float32, for float64 weights in float64."""
    element: tl.constexpr = w_ptr.dtype.element_ty
    dtype: tl.constexpr = tl.float64 if element == tl.float64 else tl.float32
    w = tl.load(w_ptr + at, mask, other=0.0).to(dtype)
    w = w * tl.full((1, 1), shrink, dtype) - u.to(dtype) * tl.full((1, 1), step, dtype)
    if STOCHASTIC:
        w = stochastic_round(w, element, random_bits(seed, stream, index))
    tl.store(w_ptr + at, w.to(element), mask)


@triton.jit(do_not_specialize=["seed"])
def update_kernel(
    q_ptr, x_ptr, carry_ptr, next_carry_ptr, y_ptr, out_ptr, table_ptr, scale_ptr, done_ptr,
    alpha: tl.float64, shrink: tl.float64, step: tl.float64, seed: tl.int64,
    n, m, k, out_n, out_m, q_batch, q_row, q_col, x_batch, x_row, x_col,
    out_batch, out_row, out_col, element_row, element_col,
    q_lo: tl.int64, x_lo: tl.int64, STOCHASTIC: tl.constexpr,
    SPLIT: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """X' = s (alpha X + Q X), s = scale[batch]; k is n, or 0 for no product; X' = s X where a matrix is done.

    X in the first term is `carry` if given. X' goes to y (x's layout), next_carry, and out: stored, or with a
    table of addresses as out <- shrink out - step X'.
    """
    across = tl.cdiv(n, BM)
    tiles = across * tl.cdiv(m, BN)
    pid = tl.program_id(0)
    batch = (pid // tiles).to(tl.int64)
    tile = pid % tiles
    rows = (tile % across).to(tl.int64) * BM + tl.arange(0, BM)
    cols = (tile // across).to(tl.int64) * BN + tl.arange(0, BN)
    dtype: tl.constexpr = tl.float64 if x_ptr.dtype.element_ty == tl.float64 else tl.float32
    alpha = tl.full((1, 1), alpha, dtype)
    seed = tl.full((), seed, tl.int64)
    depth = k + 0
    if done_ptr is not None:
        done = tl.load(done_ptr + batch) != 0
        depth = tl.where(done, 0, depth)
        alpha = tl.where(done, 1.0, alpha)
    x_ptr += batch * x_batch
    value = product(
        q_ptr + batch * q_batch, x_ptr, rows, cols, n, m, depth, q_row, q_col, x_row, x_col, q_lo, x_lo,
        SPLIT, PRECISION, BM, BN, BK,
    )  # fmt: skip
    rows = rows[:, None]
    cols = cols[None, :]
    inside = (rows < n) & (cols < m)
    at = rows * x_row + cols * x_col
    if carry_ptr is not None:
        value += alpha * tl.load(carry_ptr + batch * x_batch + at, inside, other=0.0)
    else:
        value += alpha * load_split(x_ptr, at, inside, x_lo, dtype, SPLIT)
    if scale_ptr is not None:
        value *= tl.load(scale_ptr + batch)
    if next_carry_ptr is not None:
        tl.store(next_carry_ptr + batch * x_batch + at, value, inside)
    if y_ptr is not None:
        store_split(y_ptr + batch * x_batch, at, value, inside, x_lo, SPLIT)
    if out_ptr is not None:
        mask = (rows < out_n) & (cols < out_m)
        out_at = rows * out_row + cols * out_col
        if table_ptr is None:
            tl.store(out_ptr + batch * out_batch + out_at, value.to(out_ptr.dtype.element_ty), mask)
        else:
            entry = table_ptr + batch * 5
            # Random bits use 32 bits of the index; wrapping products save registers here.
            index = tl.load(entry + 4).to(tl.int32) + (rows.to(tl.int32) * tl.full((), element_row, tl.int32))
            index += cols.to(tl.int32) * tl.full((), element_col, tl.int32)
            w_ptr = matrix_base(out_ptr, table_ptr, 0, batch, 0)
            _apply(w_ptr, out_at, value, mask, shrink, step, seed, tl.load(entry + 3), index, STOCHASTIC)


@triton.jit(do_not_specialize=["seed", "stream"])
def apply_kernel(
    w_ptr, u_ptr, shrink: tl.float64, step: tl.float64, seed: tl.int64, stream: tl.int64,
    n, m, w_batch, w_row, w_col, u_batch, u_row, u_col, STOCHASTIC: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    """w <- shrink w - step u for a batch of matrices."""
    batch, rows, cols = matrix_tile(n, m, SIDE)
    mask = (rows < n) & (cols < m)
    u = tl.load(u_ptr + batch * u_batch + rows * u_row + cols * u_col, mask, other=0.0)
    at = batch * w_batch + rows * w_row + cols * w_col
    seed = tl.full((), seed, tl.int64)
    stream = tl.full((), stream, tl.int64)
    _apply(w_ptr, at, u, mask, shrink, step, seed, stream, (batch * n + rows) * m + cols, STOCHASTIC)
