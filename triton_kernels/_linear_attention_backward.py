"""The backward kernels that linear_attention.py launches; its first lines say what they compute and how."""

import triton
import triton.language as tl

from ._linear_attention_tiles import (
    arange,
    chunk_span,
    fade,
    load_line,
    load_tile,
    pair_log_decay,
    product,
    sequence_span,
    split_program,
    store_tile,
)


@triton.jit
def state_backward_kernel(
    q_ptr, k_ptr, g_ptr, beta_ptr, t_ptr, early_q_ptr, early_k_ptr, late_k_ptr, total_ptr, a_ptr,
    grad_o_ptr, grad_state_ptr, grad_states_ptr, x_ptr, grad_v_ptr, grad_initial_ptr, sequences_ptr,
    scale: tl.float64,
    T, HV, K, V, GQ, GG, GB,
    q_b, q_t, q_h, q_c, k_b, k_t, k_h, k_c, g_b, g_t, g_h, g_c, beta_b, beta_t, beta_h,
    o_b, o_t, o_h, o_c, s_n, s_h, s_k, s_v,
    DECAY: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of a block of the state, from the last chunk to the first: stores it after each chunk.

    dS = Diag(e^G) dS' + scale (Q e^(G_i))^T dO. Delta rule (BK covers K): X = T^T dU is stored, with
    dU = A^T dO + (K e^(G - G_i)) dS'; dV = beta X, and dS loses (K e^(G_i))^T dV.
    """
    blocks_k = tl.full((), tl.cdiv(K, BK), tl.int64)
    block, head, sequence = split_program(blocks_k * tl.cdiv(V, BV), HV)
    batch, first, end, chunk = sequence_span(sequences_ptr, sequence, T, C)
    operand: tl.constexpr = grad_states_ptr.dtype.element_ty
    dtype: tl.constexpr = tl.float64 if operand == tl.float64 else tl.float32
    scale = tl.full((), scale, dtype)
    c = block % blocks_k * BK + arange(BK)
    x = block // blocks_k * BV + arange(BV)
    c_in = c < K
    x_in = x < V
    i = arange(C)
    square = i[:, None] * C + i[None, :]
    q_ptr += batch * q_b + head // GQ * q_h
    k_ptr += batch * k_b + head // GQ * k_h
    grad_o_ptr += batch * o_b + head * o_h
    if DECAY == "scalar":
        g_ptr += batch * g_b + head // GG * g_h
    elif DECAY == "vector":
        early_q_ptr += (batch * T * HV + head) * K
    if t_ptr is not None:
        if DECAY == "vector":
            early_k_ptr += (batch * T * HV + head) * K
            late_k_ptr += (batch * T * HV + head) * K
        beta_ptr += batch * beta_b + head // GB * beta_h
        x_ptr += (batch * T * HV + head) * V
        grad_v_ptr += (batch * T * HV + head) * V
    wide_k = HV * tl.full((), K, tl.int64)
    wide = HV * tl.full((), V, tl.int64)
    ds = load_tile(grad_state_ptr + sequence * s_n + head * s_h, c, x, s_k, s_v, c_in, x_in).to(dtype)
    count = tl.cdiv(end - first, C).to(tl.int32)
    for step in range(0, count):
        at = chunk + (count - 1 - step)
        rows = first + (at - chunk) * C + i
        inside = rows < end
        store_tile(grad_states_ptr + (at * HV + head) * K * V, ds, c, x, V, 1, c_in, x_in)
        do = load_tile(grad_o_ptr, rows, x, o_t, o_c, inside, x_in)
        early_do = do
        next_ds = ds
        if DECAY == "vector":
            early = load_tile(early_q_ptr, rows, c, wide_k, 1, inside, c_in)
            total = load_line(total_ptr + (at * HV + head) * K, c, 1, c_in, dtype)
            next_ds = fade(ds, total[:, None])
        else:
            early = load_tile(q_ptr, rows, c, q_t, q_c, inside, c_in)
        if DECAY == "scalar":
            g = load_line(g_ptr, rows, g_t, inside, dtype)
            g_next = load_line(g_ptr, rows + 1, g_t, (rows + 1 < end) & (i + 1 < C), dtype)
            until = tl.cumsum(g, 0)[:, None]
            after = tl.cumsum(g_next, 0, reverse=True)[:, None]
            early_do = fade(do, until)
            next_ds = fade(ds, tl.sum(g, 0)[None, None])
        if t_ptr is not None:
            base = (at * HV + head) * (C * C)
            if DECAY == "vector":
                early_k = load_tile(early_k_ptr, rows, c, wide_k, 1, inside, c_in)
                late_k = load_tile(late_k_ptr, rows, c, wide_k, 1, inside, c_in)
            else:
                early_k = load_tile(k_ptr, rows, c, k_t, k_c, inside, c_in)
                late_k = early_k
            du = product(late_k, ds, operand, PRECISION)
            if DECAY == "scalar":
                du = fade(du, after)
            du += product(tl.trans(tl.load(a_ptr + base + square)), do, operand, PRECISION)
            of_r = product(tl.trans(tl.load(t_ptr + base + square)), du, operand, PRECISION)
            dv = load_line(beta_ptr, rows, beta_t, inside, dtype)[:, None] * of_r
            store_tile(x_ptr, of_r, rows, x, wide, 1, inside, x_in)
            store_tile(grad_v_ptr, dv, rows, x, wide, 1, inside, x_in)
            if DECAY == "scalar":
                dv = fade(dv, until)
            next_ds -= product(tl.trans(early_k), dv, operand, PRECISION)
        ds = next_ds + scale * product(tl.trans(early), early_do, operand, PRECISION)
    if grad_initial_ptr is not None:
        store_tile(grad_initial_ptr + (sequence * HV + head) * K * V, ds, c, x, V, 1, c_in, x_in)


@triton.jit
def values_kernel(
    q_ptr, k_ptr, g_ptr, a_ptr, grad_o_ptr, grad_states_ptr, grad_v_ptr, chunks_ptr, scale: tl.float64,
    T, HV, K, V, GQ, GG,
    q_b, q_t, q_h, q_c, k_b, k_t, k_h, k_c, g_b, g_t, g_h, g_c, o_b, o_t, o_h, o_c,
    DECAY: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dV = A^T dO + (K e^(G - G_i)) dS' for one chunk and a block of columns, without the delta rule."""
    block, head, chunk = split_program(tl.cdiv(V, BV), HV)
    batch, first, count = chunk_span(chunks_ptr, chunk, T, C)
    operand: tl.constexpr = grad_states_ptr.dtype.element_ty
    dtype: tl.constexpr = tl.float64 if operand == tl.float64 else tl.float32
    i = arange(C)
    inside = i < count
    later = i + 1 < count
    x = block * BV + arange(BV)
    x_in = x < V
    q_ptr += batch * q_b + first * q_t + head // GQ * q_h
    k_ptr += batch * k_b + first * k_t + head // GQ * k_h
    grad_o_ptr += batch * o_b + first * o_t + head * o_h
    grad_states_ptr += (chunk * HV + head) * K * V
    if DECAY != "none":
        g_ptr += batch * g_b + first * g_t + head // GG * g_h
    dv = tl.zeros((C, BV), dtype)
    a = tl.zeros((C, C), dtype)
    for start in range(0, K, BK):
        c = start + arange(BK)
        c_in = c < K
        k = load_tile(k_ptr, i, c, k_t, k_c, inside, c_in)
        ds = load_tile(grad_states_ptr, c, x, V, 1, c_in, x_in)
        if DECAY == "vector":
            g_next = load_tile(g_ptr, i + 1, c, g_t, g_c, later, c_in).to(dtype)
            k = fade(k, tl.cumsum(g_next, 0, reverse=True))
        else:
            q = load_tile(q_ptr, i, c, q_t, q_c, inside, c_in)
            a += product(q, tl.trans(k), operand, PRECISION)
        dv += product(k, ds, operand, PRECISION)
    if DECAY == "scalar":
        after = tl.cumsum(load_line(g_ptr, i + 1, g_t, later, dtype), 0, reverse=True)
        dv = fade(dv, after[:, None])
        a = fade(a, pair_log_decay(load_line(g_ptr, i, g_t, inside, dtype), C))
    if DECAY == "vector":
        a = load_tile(a_ptr + (chunk * HV + head) * (C * C), i, i, C, 1, i >= 0, i >= 0)
    else:
        a = tl.where(i[:, None] >= i[None, :], a * tl.full((), scale, dtype), 0.0)
    do = load_tile(grad_o_ptr, i, x, o_t, o_c, inside, x_in)
    dv += product(tl.trans(a), do, operand, PRECISION)
    wide = HV * tl.full((), V, tl.int64)
    store_tile(grad_v_ptr + ((batch * T + first) * HV + head) * V, dv, i, x, wide, 1, inside, x_in)


@triton.jit
def grad_scores_kernel(
    v_ptr, u_ptr, g_ptr, beta_ptr, m_ptr, x_ptr, grad_o_ptr, grad_a_ptr, grad_m_ptr, grad_beta_ptr,
    chunks_ptr, scale: tl.float64,
    T, HV, V, GG, GB,
    v_b, v_t, v_h, v_c, u_b, u_t, u_h, u_c, g_b, g_t, g_h, beta_b, beta_t, beta_h, o_b, o_t, o_h, o_c,
    DECAY: tl.constexpr, C: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One chunk: dA = scale (dO U^T) D, i >= j; dM = -beta (X U^T) D, i > j; M's share of dbeta.

    D here is that of a scalar decay; channel_grads_kernel puts in that of a vector one.
    """
    _, head, chunk = split_program(1, HV)
    batch, first, count = chunk_span(chunks_ptr, chunk, T, C)
    operand: tl.constexpr = grad_a_ptr.dtype.element_ty
    dtype: tl.constexpr = tl.float64 if operand == tl.float64 else tl.float32
    i = arange(C)
    inside = i < count
    grad_o_ptr += batch * o_b + first * o_t + head * o_h
    u_ptr += batch * u_b + first * u_t + head * u_h
    v_ptr += batch * v_b + first * v_t + head * v_h
    wide = HV * tl.full((), V, tl.int64)
    place = (batch * T + first) * HV + head
    da = tl.zeros((C, C), dtype)
    xu = tl.zeros((C, C), dtype)
    dbeta = tl.zeros((C,), dtype)
    for start in range(0, V, BV):
        x = start + arange(BV)
        x_in = x < V
        do = load_tile(grad_o_ptr, i, x, o_t, o_c, inside, x_in)
        u = load_tile(u_ptr, i, x, u_t, u_c, inside, x_in)
        da += product(do, tl.trans(u), operand, PRECISION)
        if beta_ptr is not None:
            of_r = load_tile(x_ptr + place * V, i, x, wide, 1, inside, x_in)
            xu += product(of_r, tl.trans(u), operand, PRECISION)
            dbeta += tl.sum(of_r * load_tile(v_ptr, i, x, v_t, v_c, inside, x_in), 1)
    base = (chunk * HV + head) * (C * C)
    if DECAY == "scalar":
        g_ptr += batch * g_b + first * g_t + head // GG * g_h
        log_decay = pair_log_decay(load_line(g_ptr, i, g_t, inside, dtype), C)
        da = fade(da, log_decay)
    da = tl.where(i[:, None] >= i[None, :], da * tl.full((), scale, dtype), 0.0)
    store_tile(grad_a_ptr + base, da, i, i, C, 1, i >= 0, i >= 0)
    if beta_ptr is not None:
        beta = load_line(
            beta_ptr + batch * beta_b + first * beta_t + head // GB * beta_h, i, beta_t, inside, dtype
        )
        xu = tl.where(i[:, None] > i[None, :], -xu, 0.0)
        dbeta += tl.sum(xu * load_tile(m_ptr + base, i, i, C, 1, i >= 0, i >= 0), 1)
        tl.store(grad_beta_ptr + place + i * HV, dbeta, inside)
        xu *= beta[:, None]
        if DECAY == "scalar":
            xu = fade(xu, log_decay)
        store_tile(grad_m_ptr + base, xu, i, i, C, 1, i >= 0, i >= 0)


@triton.jit
def grads_kernel(
    q_ptr, k_ptr, u_ptr, g_ptr, beta_ptr, x_ptr, states_ptr, grad_o_ptr, grad_states_ptr, grad_a_ptr,
    grad_m_ptr, grad_q_ptr, grad_k_ptr, grad_g_ptr, grad_beta_ptr, chunks_ptr, scale: tl.float64,
    T, HV, K, V, GQ, GG, GB, tokens,
    q_b, q_t, q_h, q_c, k_b, k_t, k_h, k_c, u_b, u_t, u_h, u_c, g_b, g_t, g_h, g_c,
    beta_b, beta_t, beta_h, o_b, o_t, o_h, o_c,
    DECAY: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dQ and dK of one chunk and a block of columns, and these columns' share of dg and dbeta.

    No decay or a scalar one: dQ = scale e^(G_i) (dO S^T) + dA K,
    dK = dA^T Q + e^(G - G_i) (U dS'^T) + dM K + dM^T K - e^(G_i) beta X S^T.
    """
    block, head, chunk = split_program(tl.cdiv(K, BK), HV)
    batch, first, count = chunk_span(chunks_ptr, chunk, T, C)
    operand: tl.constexpr = states_ptr.dtype.element_ty
    dtype: tl.constexpr = tl.float64 if operand == tl.float64 else tl.float32
    i = arange(C)
    inside = i < count
    c = block * BK + arange(BK)
    c_in = c < K
    grad_o_ptr += batch * o_b + first * o_t + head * o_h
    u_ptr += batch * u_b + first * u_t + head * u_h
    states_ptr += (chunk * HV + head) * K * V
    grad_states_ptr += (chunk * HV + head) * K * V
    wide_v = HV * tl.full((), V, tl.int64)
    wide_k = HV * tl.full((), K, tl.int64)
    place = (batch * T + first) * HV + head
    wide_share = tl.full((), tokens, tl.int64) * HV
    share = block * wide_share + place + i * HV
    of_q = tl.zeros((C, BK), dtype)
    of_k = tl.zeros((C, BK), dtype)
    of_x = tl.zeros((C, BK), dtype)
    carried = tl.zeros((BK,), dtype)
    for start in range(0, V, BV):
        x = start + arange(BV)
        x_in = x < V
        s = load_tile(states_ptr, c, x, V, 1, c_in, x_in)
        ds = load_tile(grad_states_ptr, c, x, V, 1, c_in, x_in)
        do = load_tile(grad_o_ptr, i, x, o_t, o_c, inside, x_in)
        u = load_tile(u_ptr, i, x, u_t, u_c, inside, x_in)
        of_q += product(do, tl.trans(s), operand, PRECISION)
        of_k += product(u, tl.trans(ds), operand, PRECISION)
        if DECAY == "scalar":
            carried += tl.sum(s * ds, 1)
        if beta_ptr is not None:
            of_r = load_tile(x_ptr + place * V, i, x, wide_v, 1, inside, x_in)
            of_x += product(of_r, tl.trans(s), operand, PRECISION)
    of_q *= tl.full((), scale, dtype)
    if DECAY == "scalar":
        g_ptr += batch * g_b + first * g_t + head // GG * g_h
        g = load_line(g_ptr, i, g_t, inside, dtype)
        until = tl.cumsum(g, 0)[:, None]
        after = tl.cumsum(load_line(g_ptr, i + 1, g_t, i + 1 < count, dtype), 0, reverse=True)[:, None]
        of_q = fade(of_q, until)
        of_k = fade(of_k, after)
        of_x = fade(of_x, until)
    q = load_tile(q_ptr + batch * q_b + first * q_t + head // GQ * q_h, i, c, q_t, q_c, inside, c_in)
    k = load_tile(k_ptr + batch * k_b + first * k_t + head // GQ * k_h, i, c, k_t, k_c, inside, c_in)
    base = (chunk * HV + head) * (C * C)
    da = load_tile(grad_a_ptr + base, i, i, C, 1, i >= 0, i >= 0)
    own = tl.sum(tl.where(i[:, None] == i[None, :], da, 0.0), 1)[:, None]
    da = tl.where(i[:, None] > i[None, :], da, 0.0)
    dq = of_q + product(da, k, operand, PRECISION)
    column = product(tl.trans(da), q, operand, PRECISION)
    row = tl.zeros((C, BK), dtype)
    if beta_ptr is not None:
        beta_ptr += batch * beta_b + first * beta_t + head // GB * beta_h
        beta = load_line(beta_ptr, i, beta_t, inside, dtype)
        dm = load_tile(grad_m_ptr + base, i, i, C, 1, i >= 0, i >= 0)
        row = product(dm, k, operand, PRECISION) - beta[:, None] * of_x
        column += product(tl.trans(dm), k, operand, PRECISION)
        tl.store(grad_beta_ptr + (wide_share + share), -tl.sum(k * of_x, 1), inside)
    if DECAY == "scalar":
        # A pair (j, i) counts for the tokens in between: reached from i backwards, left again before j.
        dg = tl.cumsum(tl.sum(q * dq + k * row - k * column, 1), 0, reverse=True)
        ends = tl.sum(k * of_k, 1)
        dg += tl.sum(tl.where(i[:, None] < i[None, :], ends[:, None], 0.0), 0)
        dg += tl.sum(fade(carried, tl.sum(g, 0)[None]), 0)
        tl.store(grad_g_ptr + share, tl.where(g < -750.0, 0.0, dg), inside)
    store_tile(grad_q_ptr + place * K, dq + own * k, i, c, wide_k, 1, inside, c_in)
    store_tile(grad_k_ptr + place * K, column + row + of_k + own * q, i, c, wide_k, 1, inside, c_in)


@triton.jit
def channel_grads_kernel(
    q_ptr, k_ptr, u_ptr, g_ptr, beta_ptr, x_ptr, states_ptr, grad_o_ptr, grad_states_ptr, grad_a_ptr,
    grad_m_ptr, grad_q_ptr, grad_k_ptr, both_ptr, ends_ptr, grad_beta_ptr, chunks_ptr, scale: tl.float64,
    T, HV, K, V, GQ, GG, GB, tokens,
    q_b, q_t, q_h, q_c, k_b, k_t, k_h, k_c, u_b, u_t, u_h, u_c, g_b, g_t, g_h, g_c,
    beta_b, beta_t, beta_h, o_b, o_t, o_h, o_c,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """As grads_kernel for a vector decay: 16 rows of a chunk and a block of columns.

    Sums over other rows by products around the first (n) and last (z) of the 16, over the 16 themselves one
    distance after another. `both` and `ends` are what gate_kernel sums up to dg.
    """
    blocks = tl.full((), tl.cdiv(K, BK), tl.int64)
    rows_block, head, chunk = split_program(blocks * (C // 16), HV)
    block = rows_block // (C // 16)
    batch, first, count = chunk_span(chunks_ptr, chunk, T, C)
    operand: tl.constexpr = states_ptr.dtype.element_ty
    dtype: tl.constexpr = tl.float64 if operand == tl.float64 else tl.float32
    scale = tl.full((), scale, dtype)
    n = rows_block % (C // 16) * 16
    z = n + 15
    r = arange(16)
    rows = n + r
    inside = rows < count
    j = arange(C)
    c = block * BK + arange(BK)
    c_in = c < K
    q_ptr += batch * q_b + first * q_t + head // GQ * q_h
    k_ptr += batch * k_b + first * k_t + head // GQ * k_h
    g_ptr += batch * g_b + first * g_t + head // GG * g_h
    u_ptr += batch * u_b + first * u_t + head * u_h
    grad_o_ptr += batch * o_b + first * o_t + head * o_h
    grad_a_ptr += (chunk * HV + head) * (C * C)
    place = (batch * T + first) * HV + head
    wide_k = HV * tl.full((), K, tl.int64)
    wide_v = HV * tl.full((), V, tl.int64)

    # Rows of the chunk before n: their k, decayed from after each until n.
    before = (j < n) & (j < count)
    g_some = load_tile(g_ptr, j + 1, c, g_t, g_c, before & (j + 1 < count), c_in).to(dtype)
    some = fade(load_tile(k_ptr, j, c, k_t, k_c, before, c_in), tl.cumsum(g_some, 0, reverse=True))
    at_a = grad_a_ptr + (rows[:, None] * C + j[None, :])
    dq = product(tl.load(at_a, (j < n)[None, :], other=0.0), some, operand, PRECISION)
    row = tl.zeros((16, BK), dtype)
    if beta_ptr is not None:
        grad_m_ptr += (chunk * HV + head) * (C * C)
        at_m = grad_m_ptr + (rows[:, None] * C + j[None, :])
        row = product(tl.load(at_m, (j < n)[None, :], other=0.0), some, operand, PRECISION)
    since_n = tl.cumsum(load_tile(g_ptr, rows, c, g_t, g_c, inside & (r > 0), c_in).to(dtype), 0)
    dq = fade(dq, since_n)
    row = fade(row, since_n)

    # Rows after z: their q (and k), decayed from z until each.
    behind = (j > z) & (j < count)
    since_z = tl.cumsum(load_tile(g_ptr, j, c, g_t, g_c, behind, c_in).to(dtype), 0)
    some = fade(load_tile(q_ptr, j, c, q_t, q_c, behind, c_in), since_z)
    at_a = grad_a_ptr + (rows[:, None] + j[None, :] * C)
    column = product(tl.load(at_a, (j > z)[None, :], other=0.0), some, operand, PRECISION)
    if beta_ptr is not None:
        some = fade(load_tile(k_ptr, j, c, k_t, k_c, behind, c_in), since_z)
        at_m = grad_m_ptr + (rows[:, None] + j[None, :] * C)
        column += product(tl.load(at_m, (j > z)[None, :], other=0.0), some, operand, PRECISION)
    g_next = load_tile(g_ptr, rows + 1, c, g_t, g_c, (r < 15) & (rows + 1 < count), c_in).to(dtype)
    until_z = tl.cumsum(g_next, 0, reverse=True)
    column = fade(column, until_z)

    # The 16 rows among themselves.
    down = tl.zeros((16, BK), dtype)
    up = tl.zeros((16, BK), dtype)
    for distance in range(1, 16):
        down += load_tile(g_ptr, rows - distance + 1, c, g_t, g_c, inside & (r >= distance), c_in).to(dtype)
        up_in = (r + distance < 16) & (rows + distance < count)
        up += load_tile(g_ptr, rows + distance, c, g_t, g_c, up_in, c_in).to(dtype)
        there = inside & (r >= distance)
        near = fade(load_tile(k_ptr, rows - distance, c, k_t, k_c, there, c_in), down)
        dq += load_line(grad_a_ptr, rows * C + rows - distance, 1, there, dtype)[:, None] * near
        if beta_ptr is not None:
            row += load_line(grad_m_ptr, rows * C + rows - distance, 1, there, dtype)[:, None] * near
        near = fade(load_tile(q_ptr, rows + distance, c, q_t, q_c, up_in, c_in), up)
        column += load_line(grad_a_ptr, (rows + distance) * C + rows, 1, up_in, dtype)[:, None] * near
        if beta_ptr is not None:
            near = fade(load_tile(k_ptr, rows + distance, c, k_t, k_c, up_in, c_in), up)
            column += load_line(grad_m_ptr, (rows + distance) * C + rows, 1, up_in, dtype)[:, None] * near

    # Through the state before the chunk and the one after it.
    states_ptr += (chunk * HV + head) * K * V
    grad_states_ptr += (chunk * HV + head) * K * V
    of_q = tl.zeros((16, BK), dtype)
    of_k = tl.zeros((16, BK), dtype)
    of_x = tl.zeros((16, BK), dtype)
    for start in range(0, V, BV):
        x = start + arange(BV)
        x_in = x < V
        s = tl.trans(load_tile(states_ptr, c, x, V, 1, c_in, x_in))
        ds = tl.trans(load_tile(grad_states_ptr, c, x, V, 1, c_in, x_in))
        do = load_tile(grad_o_ptr, rows, x, o_t, o_c, inside, x_in)
        u = load_tile(u_ptr, rows, x, u_t, u_c, inside, x_in)
        of_q += product(do, s, operand, PRECISION)
        of_k += product(u, ds, operand, PRECISION)
        if beta_ptr is not None:
            of_r = load_tile(x_ptr + place * V, rows, x, wide_v, 1, inside, x_in)
            of_x += product(of_r, s, operand, PRECISION)
    g_n = load_tile(g_ptr, j, c, g_t, g_c, (j <= n) & (j < count), c_in).to(dtype)
    until = since_n + tl.sum(g_n, 0)[None, :]
    g_z = load_tile(g_ptr, j, c, g_t, g_c, behind, c_in).to(dtype)
    dq += fade(scale * of_q, until)
    of_k = fade(of_k, until_z + tl.sum(g_z, 0)[None, :])
    q = load_tile(q_ptr, rows, c, q_t, q_c, inside, c_in)
    k = load_tile(k_ptr, rows, c, k_t, k_c, inside, c_in)
    if beta_ptr is not None:
        beta = load_line(
            beta_ptr + batch * beta_b + first * beta_t + head // GB * beta_h, rows, beta_t, inside, dtype
        )
        of_x = fade(of_x, until)
        row -= beta[:, None] * of_x
        at = (block + 1) * (tl.full((), tokens, tl.int64) * HV) + place + rows * HV
        tl.store(grad_beta_ptr + at, -tl.sum(k * of_x, 1), inside)
    store_tile(both_ptr + place * K, q * dq + k * row - k * column, rows, c, wide_k, 1, inside, c_in)
    store_tile(ends_ptr + place * K, k * of_k, rows, c, wide_k, 1, inside, c_in)
    own = load_line(grad_a_ptr, rows * C + rows, 1, inside, dtype)[:, None]
    store_tile(grad_q_ptr + place * K, dq + own * k, rows, c, wide_k, 1, inside, c_in)
    store_tile(grad_k_ptr + place * K, column + row + of_k + own * q, rows, c, wide_k, 1, inside, c_in)


@triton.jit
def gate_kernel(
    g_ptr, both_ptr, ends_ptr, states_ptr, grad_states_ptr, grad_g_ptr, chunks_ptr,
    T, HV, K, V, GG, g_b, g_t, g_h, g_c,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """dg_t = sum over i >= t of both_i + sum over i < t of ends_i + e^G sum over V of S dS', per channel."""
    block, head, chunk = split_program(tl.cdiv(K, BK), HV)
    batch, first, count = chunk_span(chunks_ptr, chunk, T, C)
    dtype: tl.constexpr = both_ptr.dtype.element_ty
    i = arange(C)
    inside = i < count
    c = block * BK + arange(BK)
    c_in = c < K
    place = ((batch * T + first) * HV + head) * K
    wide = HV * tl.full((), K, tl.int64)
    base = (chunk * HV + head) * K * V
    carried = tl.zeros((BK,), dtype)
    for start in range(0, V, BV):
        x = start + arange(BV)
        s = load_tile(states_ptr + base, c, x, V, 1, c_in, x < V)
        carried += tl.sum(s * load_tile(grad_states_ptr + base, c, x, V, 1, c_in, x < V), 1)
    g_ptr += batch * g_b + first * g_t + head // GG * g_h
    g = load_tile(g_ptr, i, c, g_t, g_c, inside, c_in).to(dtype)
    both = load_tile(both_ptr + place, i, c, wide, 1, inside, c_in)
    ends = load_tile(ends_ptr + place, i - 1, c, wide, 1, inside & (i > 0), c_in)
    dg = tl.cumsum(both, 0, reverse=True) + tl.cumsum(ends, 0) + fade(carried, tl.sum(g, 0))[None, :]
    dg = tl.where(g == float("-inf"), 0.0, dg)
    store_tile(grad_g_ptr + place, dg, i, c, wide, 1, inside, c_in)
