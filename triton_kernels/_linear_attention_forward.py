"""The forward kernels that linear_attention.py launches; its first lines say what they compute and how."""

import triton
import triton.language as tl

from ._linear_attention_tiles import (
    advance,
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
    token_gate,
    unit_lower_inverse,
    unusable,
)


@triton.jit
def decays_kernel(
    q_ptr, k_ptr, g_ptr, early_q_ptr, early_k_ptr, late_k_ptr, total_ptr, chunks_ptr,
    T, HV, K, GQ, GG,
    q_b, q_t, q_h, q_c, k_b, k_t, k_h, k_c, g_b, g_t, g_h, g_c,
    C: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Vector decay, one chunk and a block of columns: Q e^(G_i), K e^(G_i), K e^(G - G_i) and G.

    They keep sums over rows out of the passes over chunks, which no other program can take a share of.
    """
    block, head, chunk = split_program(tl.cdiv(K, BK), HV)
    batch, first, count = chunk_span(chunks_ptr, chunk, T, C)
    dtype: tl.constexpr = total_ptr.dtype.element_ty
    i = arange(C)
    inside = i < count
    c = block * BK + arange(BK)
    c_in = c < K
    place = ((batch * T + first) * HV + head) * K
    wide = HV * tl.full((), K, tl.int64)
    g_ptr += batch * g_b + first * g_t + head // GG * g_h
    k = load_tile(k_ptr + batch * k_b + first * k_t + head // GQ * k_h, i, c, k_t, k_c, inside, c_in)
    g_next = load_tile(g_ptr, i + 1, c, g_t, g_c, i + 1 < count, c_in).to(dtype)
    late_k = fade(k, tl.cumsum(g_next, 0, reverse=True))
    store_tile(late_k_ptr + place, late_k, i, c, wide, 1, inside, c_in)
    g = load_tile(g_ptr, i, c, g_t, g_c, inside, c_in).to(dtype)
    tl.store(total_ptr + (chunk * HV + head) * K + c, tl.sum(g, 0), c_in)
    until = tl.cumsum(g, 0)
    if early_k_ptr is not None:
        store_tile(early_k_ptr + place, fade(k, until), i, c, wide, 1, inside, c_in)
    if early_q_ptr is not None:
        q = load_tile(q_ptr + batch * q_b + first * q_t + head // GQ * q_h, i, c, q_t, q_c, inside, c_in)
        store_tile(early_q_ptr + place, fade(q, until), i, c, wide, 1, inside, c_in)


@triton.jit
def scores_kernel(
    q_ptr, k_ptr, g_ptr, a_ptr, m_ptr, chunks_ptr, scale: tl.float64,
    T, HV, K, GQ, GG,
    q_b, q_t, q_h, q_c, k_b, k_t, k_h, k_c, g_b, g_t, g_h, g_c,
    C: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Vector decay, 16 rows i of a chunk: A_ij = scale sum_c q_ic k_jc e^(g_(j+1)c + ... + g_ic), i >= j.

    M, for the delta rule, is the same with k_i for q_i, i > j and without the scale. Columns before the 16
    rows by products around their first row n, in which no exponent is positive for g <= 0; the last 16
    columns one distance i - j after another.
    """
    block, head, chunk = split_program(C // 16, HV)
    batch, first, count = chunk_span(chunks_ptr, chunk, T, C)
    operand: tl.constexpr = a_ptr.dtype.element_ty
    dtype: tl.constexpr = tl.float64 if operand == tl.float64 else tl.float32
    q_ptr += batch * q_b + first * q_t + head // GQ * q_h
    k_ptr += batch * k_b + first * k_t + head // GQ * k_h
    g_ptr += batch * g_b + first * g_t + head // GG * g_h
    n = block * 16
    r = arange(16)
    j = arange(C)
    rows = n + r
    inside = rows < count
    a = tl.zeros((16, C), dtype)
    a_near = tl.zeros((16, 16), dtype)
    m = tl.zeros((16, C), dtype)
    m_near = tl.zeros((16, 16), dtype)
    for start in range(0, K, BK):
        c = start + arange(BK)
        c_in = c < K
        q = load_tile(q_ptr, rows, c, q_t, q_c, inside, c_in)
        k = load_tile(k_ptr, rows, c, k_t, k_c, inside, c_in)
        since_n = tl.cumsum(load_tile(g_ptr, rows, c, g_t, g_c, inside & (r > 0), c_in).to(dtype), 0)
        g_next = load_tile(g_ptr, j + 1, c, g_t, g_c, (j < n) & (j + 1 < count), c_in).to(dtype)
        until_n = tl.cumsum(g_next, 0, reverse=True)
        before = tl.trans(fade(load_tile(k_ptr, j, c, k_t, k_c, (j < n) & (j < count), c_in), until_n))
        a += product(fade(q, since_n), before, operand, PRECISION)
        if m_ptr is not None:
            m += product(fade(k, since_n), before, operand, PRECISION)
        between = tl.zeros((16, BK), dtype)
        for distance in range(16):
            at = rows - distance
            there = inside & (r >= distance)
            here = r[None, :] == (r - distance)[:, None]
            k_at = fade(load_tile(k_ptr, at, c, k_t, k_c, there, c_in), between)
            a_near = tl.where(here, a_near + tl.sum(q * k_at, 1)[:, None], a_near)
            if m_ptr is not None:
                value = tl.where(distance > 0, tl.sum(k * k_at, 1), 0.0)
                m_near = tl.where(here, m_near + value[:, None], m_near)
            between += load_tile(g_ptr, at, c, g_t, g_c, there, c_in).to(dtype)
    scale = tl.full((), scale, dtype)
    base = (chunk * HV + head) * (C * C)
    everywhere = r >= 0
    far = (j < n) | (j >= n + 16)
    near = j[None, :] < n
    store_tile(a_ptr + base, tl.where(near, a * scale, 0.0), rows, j, C, 1, everywhere, far)
    store_tile(a_ptr + base, a_near * scale, rows, n + r, C, 1, everywhere, everywhere)
    if m_ptr is not None:
        store_tile(m_ptr + base, tl.where(near, m, 0.0), rows, j, C, 1, everywhere, far)
        store_tile(m_ptr + base, m_near, rows, n + r, C, 1, everywhere, everywhere)


@triton.jit
def solve_kernel(
    q_ptr, k_ptr, g_ptr, beta_ptr, t_ptr, a_ptr, m_ptr, chunks_ptr, scale: tl.float64,
    T, HV, K, GQ, GG, GB,
    q_b, q_t, q_h, q_c, k_b, k_t, k_h, k_c, g_b, g_t, g_h, g_c, beta_b, beta_t, beta_h,
    DECAY: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, LEVELS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Delta rule, one chunk: T = (I + Diag(beta) M)^-1, M_ij = k_i k_j^T D_ij below the diagonal.

    M comes from memory under a vector decay. Otherwise it is formed here, and where the backward pass asks
    (a_ptr), stored together with A = scale q k^T D.
    """
    _, head, chunk = split_program(1, HV)
    batch, first, count = chunk_span(chunks_ptr, chunk, T, C)
    operand: tl.constexpr = t_ptr.dtype.element_ty
    dtype: tl.constexpr = tl.float64 if operand == tl.float64 else tl.float32
    i = arange(C)
    inside = i < count
    everywhere = i >= 0
    base = (chunk * HV + head) * (C * C)
    beta_ptr += batch * beta_b + first * beta_t + head // GB * beta_h
    beta = load_line(beta_ptr, i, beta_t, inside, dtype)
    if DECAY == "vector":
        m = load_tile(m_ptr + base, i, i, C, 1, everywhere, everywhere)
    else:
        q_ptr += batch * q_b + first * q_t + head // GQ * q_h
        k_ptr += batch * k_b + first * k_t + head // GQ * k_h
        m = tl.zeros((C, C), dtype)
        a = tl.zeros((C, C), dtype)
        for start in range(0, K, BK):
            c = start + arange(BK)
            k = load_tile(k_ptr, i, c, k_t, k_c, inside, c < K).to(operand)
            m += product(k, tl.trans(k), operand, PRECISION)
            if a_ptr is not None:
                q = load_tile(q_ptr, i, c, q_t, q_c, inside, c < K)
                a += product(q, tl.trans(k), operand, PRECISION)
        if DECAY == "scalar":
            g_ptr += batch * g_b + first * g_t + head // GG * g_h
            log_decay = pair_log_decay(load_line(g_ptr, i, g_t, inside, dtype), C)
            m = fade(m, log_decay)
            a = fade(a, log_decay)
        m = tl.where(i[:, None] > i[None, :], m, 0.0)
        if a_ptr is not None:
            a = tl.where(i[:, None] >= i[None, :], a * tl.full((), scale, dtype), 0.0)
            store_tile(a_ptr + base, a, i, i, C, 1, everywhere, everywhere)
            store_tile(m_ptr + base, m, i, i, C, 1, everywhere, everywhere)
    t = unit_lower_inverse(beta[:, None] * m, C, LEVELS)
    store_tile(t_ptr + base, t, i, i, C, 1, everywhere, everywhere)


@triton.jit
def state_kernel(
    k_ptr, v_ptr, g_ptr, beta_ptr, t_ptr, early_k_ptr, late_k_ptr, total_ptr, initial_ptr, states_ptr, u_ptr,
    final_ptr, sequences_ptr,
    T, HV, K, V, GQ, GG, GB,
    k_b, k_t, k_h, k_c, v_b, v_t, v_h, v_c, g_b, g_t, g_h, g_c, beta_b, beta_t, beta_h, s_n, s_h, s_k, s_v,
    DECAY: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A block of the state of one sequence and head, chunk after chunk: stores it before each and at the end.

    S' = Diag(e^G) S + (K e^(G - G_i))^T U. Delta rule (BK covers K): U = T R is stored, with
    R = beta (V - (K e^(G_i)) S). A chunk whose values are not all finite goes token by token, since a product
    would spread 0 * NaN to tokens that a zero is meant to separate.
    """
    blocks_k = tl.full((), tl.cdiv(K, BK), tl.int64)
    block, head, sequence = split_program(blocks_k * tl.cdiv(V, BV), HV)
    batch, first, end, chunk = sequence_span(sequences_ptr, sequence, T, C)
    operand: tl.constexpr = states_ptr.dtype.element_ty
    dtype: tl.constexpr = final_ptr.dtype.element_ty
    c = block % blocks_k * BK + arange(BK)
    x = block // blocks_k * BV + arange(BV)
    c_in = c < K
    x_in = x < V
    i = arange(C)
    square = i[:, None] * C + i[None, :]
    k_ptr += batch * k_b + head // GQ * k_h
    v_ptr += batch * v_b + head * v_h
    if DECAY != "none":
        g_ptr += batch * g_b + head // GG * g_h
    if DECAY == "vector":
        late_k_ptr += (batch * T * HV + head) * K
        if t_ptr is not None:
            early_k_ptr += (batch * T * HV + head) * K
    if t_ptr is not None:
        beta_ptr += batch * beta_b + head // GB * beta_h
        u_ptr += (batch * T * HV + head) * V
    wide_k = HV * tl.full((), K, tl.int64)
    s = tl.zeros((BK, BV), dtype)
    if initial_ptr is not None:
        s += load_tile(initial_ptr + sequence * s_n + head * s_h, c, x, s_k, s_v, c_in, x_in).to(dtype)
    for _ in range(0, tl.cdiv(end - first, C).to(tl.int32)):
        store_tile(states_ptr + (chunk * HV + head) * K * V, s, c, x, V, 1, c_in, x_in)
        rows = first + i
        inside = rows < end
        v = load_tile(v_ptr, rows, x, v_t, v_c, inside, x_in)
        u = v
        s_next = s
        bad = 0
        if DECAY == "vector":
            k = load_tile(late_k_ptr, rows, c, wide_k, 1, inside, c_in)
            total = load_line(total_ptr + (chunk * HV + head) * K, c, 1, c_in, dtype)[:, None]
            bad = unusable(v)
        else:
            k = load_tile(k_ptr, rows, c, k_t, k_c, inside, c_in)
        if DECAY == "scalar":
            g = load_line(g_ptr, rows, g_t, inside, dtype)
            total = tl.sum(g, 0)
            if total == float("-inf"):  # a reset: rows of k before it meet zeros
                bad += unusable(k)
            total = total[None, None]
            g_next = load_line(g_ptr, rows + 1, g_t, (rows + 1 < end) & (i + 1 < C), dtype)
            after = tl.cumsum(g_next, 0, reverse=True)[:, None]
        if DECAY != "none":
            bad += tl.sum(tl.where(total == total, 0, 1))
            s_next = fade(s, total)
        if t_ptr is not None:
            if DECAY == "vector":
                early_k = load_tile(early_k_ptr, rows, c, wide_k, 1, inside, c_in)
                read = product(early_k, s, operand, PRECISION)
            else:
                read = product(k, s, operand, PRECISION)
            if DECAY == "scalar":
                read = fade(read, tl.cumsum(g, 0)[:, None])
            r = load_line(beta_ptr, rows, beta_t, inside, dtype)[:, None] * (v - read)
            bad += unusable(r)
            t = tl.load(t_ptr + (chunk * HV + head) * (C * C) + square)
            u = product(t, r, operand, PRECISION)
        late_u = u
        if DECAY == "scalar":  # it may go to either side of the product: to this one, k stays as loaded
            late_u = fade(u, after)
        s_next += product(tl.trans(k), late_u, operand, PRECISION)
        if bad > 0:
            s_next = s
            for row in range(0, tl.minimum(end - first, C).to(tl.int32)):
                at = first + row
                g_at = token_gate(g_ptr, at, g_t, c, g_c, c_in, DECAY, dtype)
                k_at = load_line(k_ptr + at * k_t, c, k_c, c_in, dtype)
                v_at = load_line(v_ptr + at * v_t, x, v_c, x_in, dtype)
                beta = 1.0
                if t_ptr is not None:
                    beta = tl.load(beta_ptr + at * beta_t).to(dtype)
                s_next, u_at = advance(s_next, k_at, v_at, g_at, beta, c_in, DECAY, t_ptr is not None)
                u = tl.where((i == row)[:, None], u_at[None, :], u)
        if t_ptr is not None:
            store_tile(u_ptr, u, rows, x, HV * tl.full((), V, tl.int64), 1, inside, x_in)
        s = s_next
        first += C
        chunk += 1
    store_tile(final_ptr + (sequence * HV + head) * K * V, s, c, x, V, 1, c_in, x_in)


@triton.jit
def output_kernel(
    q_ptr, k_ptr, v_ptr, g_ptr, a_ptr, states_ptr, o_ptr, chunks_ptr, scale: tl.float64,
    T, HV, K, V, GQ, GG,
    q_b, q_t, q_h, q_c, k_b, k_t, k_h, k_c, v_b, v_t, v_h, v_c, g_b, g_t, g_h, g_c,
    DECAY: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """O = scale (Q e^(G_i)) S + A U for one chunk and a block of columns; v_ptr holds U.

    A = scale (Q K^T) D, which under a vector decay comes from memory. Token by token where values that are
    not finite could leak through a product.
    """
    block, head, chunk = split_program(tl.cdiv(V, BV), HV)
    batch, first, count = chunk_span(chunks_ptr, chunk, T, C)
    operand: tl.constexpr = states_ptr.dtype.element_ty
    dtype: tl.constexpr = tl.float64 if operand == tl.float64 else tl.float32
    scale = tl.full((), scale, dtype)
    i = arange(C)
    inside = i < count
    x = block * BV + arange(BV)
    x_in = x < V
    q_ptr += batch * q_b + first * q_t + head // GQ * q_h
    k_ptr += batch * k_b + first * k_t + head // GQ * k_h
    v_ptr += batch * v_b + first * v_t + head * v_h
    states_ptr += (chunk * HV + head) * K * V
    bad = 0
    if DECAY != "none":
        g_ptr += batch * g_b + first * g_t + head // GG * g_h
    v = load_tile(v_ptr, i, x, v_t, v_c, inside, x_in)
    o = tl.zeros((C, BV), dtype)
    a = tl.zeros((C, C), dtype)
    for start in range(0, K, BK):
        c = start + arange(BK)
        c_in = c < K
        q = load_tile(q_ptr, i, c, q_t, q_c, inside, c_in)
        s = load_tile(states_ptr, c, x, V, 1, c_in, x_in)
        if DECAY == "vector":
            g = load_tile(g_ptr, i, c, g_t, g_c, inside, c_in).to(dtype)
            bad += unusable(s) + tl.sum(tl.where(g == g, 0, 1))
            q = fade(q, tl.cumsum(g, 0))
        else:
            k = load_tile(k_ptr, i, c, k_t, k_c, inside, c_in)
            a += product(q, tl.trans(k), operand, PRECISION)
        o += product(q, s, operand, PRECISION)
    if DECAY == "vector":
        a = load_tile(a_ptr + (chunk * HV + head) * (C * C), i, i, C, 1, i >= 0, i >= 0)
    else:
        a *= scale
    if DECAY == "scalar":
        g = load_line(g_ptr, i, g_t, inside, dtype)
        bad += tl.sum(tl.where(g == g, 0, 1), 0)
        o = fade(o, tl.cumsum(g, 0)[:, None])
        a = fade(a, pair_log_decay(g, C))
    elif DECAY == "none":
        a = tl.where(i[:, None] >= i[None, :], a, 0.0)
    o = o * scale + product(a, v, operand, PRECISION)
    bad += unusable(v)
    if bad > 0:
        o = tl.zeros((C, BV), dtype)
        for start in range(0, K, 16):  # narrow, so that this rare path does not cost registers
            c = start + arange(16)
            c_in = c < K
            s = load_tile(states_ptr, c, x, V, 1, c_in, x_in)
            for row in range(0, count.to(tl.int32)):
                at = count * 0 + row
                g_at = token_gate(g_ptr, at, g_t, c, g_c, c_in, DECAY, dtype)
                k_at = load_line(k_ptr + at * k_t, c, k_c, c_in, dtype)
                u_at = load_line(v_ptr + at * v_t, x, v_c, x_in, dtype)
                q_at = load_line(q_ptr + at * q_t, c, q_c, c_in, dtype)
                s, _ = advance(s, k_at, u_at, g_at, 1.0, c_in, DECAY, False)
                o = tl.where((i == row)[:, None], o + scale * tl.sum(q_at[:, None] * s, 0)[None, :], o)
    store_tile(
        o_ptr + ((batch * T + first) * HV + head) * V, o, i, x, HV * tl.full((), V, tl.int64), 1, inside, x_in
    )


@triton.jit
def step_kernel(
    q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, state_ptr, o_ptr, scale: tl.float64,
    HV, K, V, GQ, GG, GB,
    q_b, q_h, q_c, k_b, k_h, k_c, v_b, v_h, v_c, g_b, g_h, g_c, beta_b, beta_h, s_b, s_h, s_k, s_v,
    DECAY: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """One token: the state's columns x are read once and written once; BK covers K."""
    block, head, batch = split_program(tl.cdiv(V, BV), HV)
    dtype: tl.constexpr = tl.float64 if q_ptr.dtype.element_ty == tl.float64 else tl.float32
    c = arange(BK)
    x = block * BV + arange(BV)
    c_in = c < K
    x_in = x < V
    state_ptr += batch * s_b + head * s_h
    s = load_tile(state_ptr, c, x, s_k, s_v, c_in, x_in).to(dtype)
    q = load_line(q_ptr + batch * q_b + head // GQ * q_h, c, q_c, c_in, dtype)
    k = load_line(k_ptr + batch * k_b + head // GQ * k_h, c, k_c, c_in, dtype)
    v = load_line(v_ptr + batch * v_b + head * v_h, x, v_c, x_in, dtype)
    beta = 1.0
    g = 0.0
    if DECAY != "none":
        g = token_gate(g_ptr + head // GG * g_h, batch, g_b, c, g_c, c_in, DECAY, dtype)
    if beta_ptr is not None:
        beta = tl.load(beta_ptr + batch * beta_b + head // GB * beta_h).to(dtype)
    s, _ = advance(s, k, v, g, beta, c_in, DECAY, beta_ptr is not None)
    store_tile(state_ptr, s, c, x, s_k, s_v, c_in, x_in)
    o = tl.full((), scale, dtype) * tl.sum(q[:, None] * s, 0)
    tl.store(o_ptr + (batch * HV + head) * V + x, o.to(o_ptr.dtype.element_ty), x_in)
