"""The kernels that boxes.py launches; its first lines say what they compute and how."""

import triton
import triton.language as tl

from ._boxes_tiles import (
    FLAG_ROWS,
    HIGH,
    LN2,
    LOW,
    MISSING,
    T16,
    column,
    log1p,
    log_side,
    may_use_powers,
    overlap,
    scores,
    share,
    slope,
    sort_keys,
    tile_cols,
    tile_rows,
    whole,
)


@triton.jit
def _extremes(z_ptr, Z_ptr, rows, d, inside, z_row, z_d, Z_row, Z_d):
    """Smallest finite z and largest finite Z of some rows, per dimension."""
    z = tl.load(z_ptr + (rows * z_row + d * z_d), inside, other=float("nan")).to(tl.float32)
    Z = tl.load(Z_ptr + (rows * Z_row + d * Z_d), inside, other=float("nan")).to(tl.float32)
    low = tl.min(tl.where(tl.abs(z) < float("inf"), z, float("inf")), 0)
    return low, tl.max(tl.where(tl.abs(Z) < float("inf"), Z, float("-inf")), 0)


@triton.jit
def centre_kernel(
    qz_ptr, qZ_ptr, iz_ptr, iZ_ptr, centre_ptr, B, T, N, D,
    qz_b, qz_t, qz_d, qZ_b, qZ_t, qZ_d, iz_n, iz_d, iZ_n, iZ_d, SAMPLE: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """centre[d] <- the middle of the finite corners of SAMPLE queries (of one term each) and items.

    It cancels in every result; a good one keeps exponents small.
    """
    d = tl.program_id(0).to(tl.int64) * BD + tl.arange(0, BD)
    inside = (d < D)[None, :]
    sample = tl.arange(0, SAMPLE).to(tl.int64)[:, None]
    q = sample * B // SAMPLE
    t = sample % T
    i = sample * N // SAMPLE
    d_row = d[None, :]
    low, high = _extremes(qz_ptr + t * qz_t, qZ_ptr + t * qZ_t, q, d_row, inside, qz_b, qz_d, qZ_b, qZ_d)
    i_low, i_high = _extremes(iz_ptr, iZ_ptr, i, d_row, inside, iz_n, iz_d, iZ_n, iZ_d)
    low = tl.minimum(low, i_low)
    high = tl.maximum(high, i_high)
    centre = low * 0.5 + high * 0.5
    tl.store(centre_ptr + d, tl.where(tl.abs(centre) < float("inf"), centre, 0.0), d < D)


@triton.jit
def _flag(z_ptr, Z_ptr, centre_ptr, rows, D, z_row, z_d, Z_row, Z_d, inv_tau, BD: tl.constexpr):
    """1 if an exponent of the rows is above HIGH, plus 2 if one is below LOW."""
    high = tl.zeros((FLAG_ROWS, BD), tl.int32)
    low = tl.zeros((FLAG_ROWS, BD), tl.int32)
    for first in range(0, D, BD):
        d = tl.full((), 1, tl.int64) * first + tl.arange(0, BD)
        inside = (d < D)[None, :]
        c = tl.load(centre_ptr + d, d < D, other=0.0)[None, :]
        z = tl.load(z_ptr + (rows[:, None] * z_row + d[None, :] * z_d), inside, other=0.0).to(tl.float32)
        Z = tl.load(Z_ptr + (rows[:, None] * Z_row + d[None, :] * Z_d), inside, other=0.0).to(tl.float32)
        p = tl.where(inside, (z - c) * inv_tau, 0.0)
        n = tl.where(inside, (c - Z) * inv_tau, 0.0)
        high |= tl.where((p > HIGH) | (n > HIGH), 1, 0)
        low |= tl.where((p < LOW) | (n < LOW), 2, 0)
    return tl.max(tl.max(high, 1), 0) + tl.max(tl.max(low, 1), 0)


@triton.jit
def flags_kernel(
    qz_ptr, qZ_ptr, iz_ptr, iZ_ptr, centre_ptr, flags_ptr, inv_tau: tl.float64, B, T, N, D,
    qz_b, qz_t, qz_d, qZ_b, qZ_t, qZ_d, iz_n, iz_d, iZ_n, iZ_d, BD: tl.constexpr,
):  # fmt: skip
    """flags: of blocks of FLAG_ROWS queries for each term, [blocks, T], then of blocks of items."""
    pid = tl.program_id(0).to(tl.int64)
    inv_tau = tl.full((), inv_tau, tl.float32)
    of_queries = tl.full((), 1, tl.int64) * tl.cdiv(B, FLAG_ROWS) * T
    lane = tl.arange(0, FLAG_ROWS)
    if pid < of_queries:
        t = pid % T
        rows = tl.minimum(pid // T * FLAG_ROWS + lane, B - 1)
        flag = _flag(
            qz_ptr + t * qz_t, qZ_ptr + t * qZ_t, centre_ptr, rows, D, qz_b, qz_d, qZ_b, qZ_d, inv_tau, BD
        )
    else:
        rows = tl.minimum((pid - of_queries) * FLAG_ROWS + lane, N - 1)
        flag = _flag(iz_ptr, iZ_ptr, centre_ptr, rows, D, iz_n, iz_d, iZ_n, iZ_d, inv_tau, BD)
    tl.store(flags_ptr + pid, flag)


@triton.jit
def scores_kernel(
    qz_ptr, qZ_ptr, signs_ptr, iz_ptr, iZ_ptr, item_log_volume_ptr, flags_ptr, centre_ptr, nus_ptr, out_ptr,
    tau: tl.float64, inv_tau: tl.float64, inv_nu: tl.float64, offset: tl.float64, inv_k: tl.float64,
    log_nus: tl.float64, B, T, N, D, begin, count,
    qz_b, qz_t, qz_d, qZ_b, qZ_t, qZ_d, iz_n, iz_d, iZ_n, iZ_d,
    CORNERS: tl.constexpr, SIDE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """out[B, count] <- scores of items begin, ..., begin + count - 1; begin is a multiple of FLAG_ROWS."""
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    pid = tl.program_id(0).to(tl.int64)
    down = tl.cdiv(B, BM)
    first_row = pid % down * BM
    first = pid // down * BN
    rows = tile_rows(first_row, BM)
    cols = tile_cols(first, BN)
    score = scores(
        qz_ptr, qZ_ptr, signs_ptr, iz_ptr, iZ_ptr, item_log_volume_ptr, flags_ptr, centre_ptr, nus_ptr,
        tl.minimum(rows, B - 1), tl.minimum(begin + cols, N - 1), first_row, begin + first, T, N, B, D,
        qz_b, qz_t, qz_d, qZ_b, qZ_t, qZ_d, iz_n, iz_d, iZ_n, iZ_d,
        tau, inv_tau, inv_nu, offset, inv_k, log_nus, dtype, CORNERS, SIDE, BM, BN,
    )  # fmt: skip
    inside = (rows < B) & (cols < count)
    wide = tl.full((), 1, tl.int64) * count
    tl.store(out_ptr + (rows * wide + cols), score, inside)


@triton.jit
def topk_kernel(
    qz_ptr, qZ_ptr, signs_ptr, iz_ptr, iZ_ptr, item_log_volume_ptr, flags_ptr, centre_ptr, nus_ptr, keys_ptr,
    tau: tl.float64, inv_tau: tl.float64, inv_nu: tl.float64, offset: tl.float64, inv_k: tl.float64,
    log_nus: tl.float64, B, T, N, D, parts, per_part,
    qz_b, qz_t, qz_d, qZ_b, qZ_t, qZ_d, iz_n, iz_d, iZ_n, iZ_d,
    CORNERS: tl.constexpr, SIDE: tl.constexpr, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """keys[B, parts, K] <- the K largest sort keys of each part of the items, MISSING where it has fewer.

    A tile without a key above its rows' K-th costs no sorting.
    """
    pid = tl.program_id(0).to(tl.int64)
    down = tl.cdiv(B, BM)
    first_row = pid % down * BM
    part = pid // down
    rows = tile_rows(first_row, BM)
    at = tl.minimum(rows, B - 1)
    best = tl.full((BM, K), MISSING, tl.int64)
    floor = tl.full((BM // T16, 1, T16, 1), MISSING, tl.int64)
    for first in range(part * per_part, tl.minimum((part + 1) * per_part, N), BN):
        cols = tile_cols(first, BN)
        score = scores(
            qz_ptr, qZ_ptr, signs_ptr, iz_ptr, iZ_ptr, item_log_volume_ptr, flags_ptr, centre_ptr, nus_ptr,
            at, tl.minimum(cols, N - 1), first_row, first, T, N, B, D,
            qz_b, qz_t, qz_d, qZ_b, qZ_t, qZ_d, iz_n, iz_d, iZ_n, iZ_d,
            tau, inv_tau, inv_nu, offset, inv_k, log_nus, tl.float32, CORNERS, SIDE, BM, BN,
        )  # fmt: skip
        keys = tl.where(cols < N, sort_keys(score, cols), MISSING)
        if tl.max(tl.reshape((keys > floor).to(tl.int32), (BM * BN,)), 0) != 0:
            here = tl.reshape(tl.permute(keys, (0, 2, 1, 3)), (BM, BN))
            kept = tl.topk(here, K) if BN > K else here
            best = tl.topk(tl.reshape(tl.join(best, kept), (BM, 2 * K)), K)
            floor = tl.reshape(tl.min(best, 1), (BM // T16, 1, T16, 1))
    k = tl.arange(0, K).to(tl.int64)
    rows = first_row + tl.arange(0, BM)
    out = (rows * parts + part)[:, None] * K + k[None, :]
    tl.store(keys_ptr + out, best, (rows < B)[:, None])


@triton.jit
def grads_kernel(
    grad_ptr, az_ptr, aZ_ptr, bz_ptr, bZ_ptr, volume_ptr, a_flags_ptr, b_flags_ptr, centre_ptr, nus_ptr,
    dz_ptr, dZ_ptr,
    tau: tl.float64, inv_tau: tl.float64, inv_nu: tl.float64, offset: tl.float64, inv_k: tl.float64,
    A, N, D, parts, per_part, grad_a, grad_b, volume_a, volume_b,
    az_a, az_d, aZ_a, aZ_d, bz_n, bz_d, bZ_n, bZ_d,
    CORNERS: tl.constexpr, SIDE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """dz, dZ[parts, A, D] <- gradients of the A boxes a from the pairs with each part of the N boxes b.

    One dimension and BM boxes per program, which sums over tiles of b in registers. volume: for hard sides
    the log volumes, whose empty pairs have no gradient in any dimension.
    """
    dtype: tl.constexpr = tl.float64 if az_ptr.dtype.element_ty == tl.float64 else tl.float32
    pid = tl.program_id(0).to(tl.int64)
    down = tl.cdiv(A, BM)
    d = pid % D
    first_row = pid // D % down * BM
    part = pid // D // down
    rows = tile_rows(first_row, BM)
    rows_inside = rows < A
    at = tl.minimum(rows, A - 1)
    az = column(az_ptr + at * az_a, d, az_d, dtype)
    aZ = column(aZ_ptr + at * aZ_a, d, aZ_d, dtype)
    tau = tl.full((), tau, dtype)
    inv_tau = tl.full((), inv_tau, dtype)
    offset = tl.full((), offset, dtype)
    inv_nu = tl.full((), inv_nu, dtype)
    inv_k = tl.full((), inv_k, dtype)
    if nus_ptr is not None:
        inv_nu = tl.full((), 1.0, dtype) / tl.load(nus_ptr + d).to(dtype)
    if CORNERS == "powers":
        c = tl.load(centre_ptr + d)
        ap = tl.exp2((az - c) * inv_tau)
        an = tl.exp2((c - aZ) * inv_tau)
        a_flag = tl.load(a_flags_ptr + first_row // FLAG_ROWS)
    dz = tl.zeros((BM // T16, BN // T16, T16, T16), dtype)
    dZ = tl.zeros((BM // T16, BN // T16, T16, T16), dtype)
    for first in range(part * per_part, tl.minimum((part + 1) * per_part, N), BN):
        cols = tile_cols(first, BN)
        inside = rows_inside & (cols < N)
        grad = tl.load(grad_ptr + (rows * grad_a + cols * grad_b), inside, other=0.0)
        grad = grad.to(dtype)
        if volume_ptr is not None:
            volume = tl.load(volume_ptr + (rows * volume_a + cols * volume_b), inside, other=0.0)
            grad = tl.where(volume == float("-inf"), 0.0, grad)
        cols = tl.minimum(cols, N - 1)
        bz = column(bz_ptr + cols * bz_n, d, bz_d, dtype)
        bZ = column(bZ_ptr + cols * bZ_n, d, bZ_d, dtype)
        if CORNERS == "powers":
            start = tl.full((), 1, tl.int64) * first
            if may_use_powers(a_flag, tl.load(b_flags_ptr + start // FLAG_ROWS)):
                p = ap + tl.exp2((bz - c) * inv_tau)
                n = an + tl.exp2((c - bZ) * inv_tau)
                inverse = 1.0 / (p * n)
                if SIDE == "equal":
                    y = p * n * inv_k
                    r = grad * inv_nu / ((1.0 + y) * log1p(1.0 / y))
                else:
                    r = grad * slope(tl.log2(p * n) * (-LN2 * tau) - offset, inv_nu, SIDE)
                z_part = r * (ap * n * inverse)
                Z_part = r * (an * p * inverse)
            else:
                r = grad * slope(overlap(az, aZ, bz, bZ, tau, inv_tau, offset, "log"), inv_nu, SIDE)
                z_part = r * share(az, bz, inv_tau, "log")
                Z_part = r * share(bZ, aZ, inv_tau, "log")
        else:
            r = grad * slope(overlap(az, aZ, bz, bZ, tau, inv_tau, offset, CORNERS), inv_nu, SIDE)
            z_part = r * share(az, bz, inv_tau, CORNERS)
            Z_part = r * share(bZ, aZ, inv_tau, CORNERS)
        # A gradient of 0 also takes nothing from a pair whose slope is NaN or infinite.
        dz -= tl.where(grad == 0.0, 0.0, z_part)
        dZ += tl.where(grad == 0.0, 0.0, Z_part)
    out = (part * A + rows) * D + d
    element: tl.constexpr = dz_ptr.dtype.element_ty
    tl.store(dz_ptr + out, tl.sum(tl.sum(dz, 3, keep_dims=True), 1, keep_dims=True).to(element), rows_inside)
    tl.store(dZ_ptr + out, tl.sum(tl.sum(dZ, 3, keep_dims=True), 1, keep_dims=True).to(element), rows_inside)


@triton.jit
def _gather(ptr, index, d, mask, row, col, dtype: tl.constexpr):
    """[rows, dimensions] of the rows `index` of a table."""
    return tl.load(ptr + (index[:, None] * row + d[None, :] * col), mask, other=0.0).to(dtype)


@triton.jit
def sampled_kernel(
    qz_ptr, qZ_ptr, iz_ptr, iZ_ptr, query_ptr, item_ptr, out_ptr,
    tau: tl.float64, inv_tau: tl.float64, inv_nu: tl.float64, offset: tl.float64, log_nus: tl.float64,
    pairs, S, U, N, D, query_b, item_b, item_s, qz_u, qz_d, qZ_u, qZ_d, iz_n, iz_d, iZ_n, iZ_d,
    CORNERS: tl.constexpr, SIDE: tl.constexpr, BP: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """out[B, S] <- log volumes of gathered pairs; NaN where an index is out of range."""
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    pair = tl.program_id(0).to(tl.int64) * BP + tl.arange(0, BP)
    inside = pair < pairs
    q = tl.load(query_ptr + pair // S * query_b, inside, other=0)
    i = tl.load(item_ptr + (pair // S * item_b + pair % S * item_s), inside, other=0)
    valid = (q >= 0) & (q < U) & (i >= 0) & (i < N)
    tau = tl.full((), tau, dtype)
    inv_tau = tl.full((), inv_tau, dtype)
    inv_nu = tl.full((), inv_nu, dtype)
    offset = tl.full((), offset, dtype)
    total = tl.zeros((BP, BD), dtype)
    for first in range(0, D, BD):
        d = tl.full((), 1, tl.int64) * first + tl.arange(0, BD)
        mask = (inside & valid)[:, None] & (d < D)[None, :]
        qz = _gather(qz_ptr, q, d, mask, qz_u, qz_d, dtype)
        qZ = _gather(qZ_ptr, q, d, mask, qZ_u, qZ_d, dtype)
        iz = _gather(iz_ptr, i, d, mask, iz_n, iz_d, dtype)
        iZ = _gather(iZ_ptr, i, d, mask, iZ_n, iZ_d, dtype)
        w = overlap(qz, qZ, iz, iZ, tau, inv_tau, offset, CORNERS)
        total += tl.where(mask, log_side(w, inv_nu, SIDE), 0.0)
    volume = whole(tl.sum(total, 1), SIDE) + tl.full((), log_nus, dtype)
    tl.store(out_ptr + pair, tl.where(valid, volume, float("nan")), inside)


@triton.jit
def sampled_grads_kernel(
    grad_ptr, volume_ptr, qz_ptr, qZ_ptr, iz_ptr, iZ_ptr, query_ptr, item_ptr,
    dqz_ptr, dqZ_ptr, diz_ptr, diZ_ptr,
    tau: tl.float64, inv_tau: tl.float64, inv_nu: tl.float64, offset: tl.float64,
    S, U, N, D, grad_b, grad_s, query_b, item_b, item_s, qz_u, qz_d, qZ_u, qZ_d, iz_n, iz_d, iZ_n, iZ_d,
    CORNERS: tl.constexpr, SIDE: tl.constexpr, BS: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Gradients of the gathered rows: dq [B, D] summed over the samples, di [B, S, D]."""
    dtype: tl.constexpr = tl.float64 if qz_ptr.dtype.element_ty == tl.float64 else tl.float32
    pid = tl.program_id(0).to(tl.int64)
    across = tl.cdiv(D, BD)
    b = pid // across
    d = pid % across * BD + tl.arange(0, BD)
    d_inside = d < D
    q = tl.load(query_ptr + (b * query_b + tl.zeros((1,), tl.int64)))
    q_valid = (q >= 0) & (q < U)
    q_mask = d_inside & q_valid
    qz = tl.load(qz_ptr + (q * qz_u + d * qz_d), q_mask, other=0.0).to(dtype)[None, :]
    qZ = tl.load(qZ_ptr + (q * qZ_u + d * qZ_d), q_mask, other=0.0).to(dtype)[None, :]
    tau = tl.full((), tau, dtype)
    inv_tau = tl.full((), inv_tau, dtype)
    inv_nu = tl.full((), inv_nu, dtype)
    offset = tl.full((), offset, dtype)
    dqz = tl.zeros((BS, BD), dtype)
    dqZ = tl.zeros((BS, BD), dtype)
    element: tl.constexpr = dqz_ptr.dtype.element_ty
    for first in range(0, S, BS):
        s = tl.full((), 1, tl.int64) * first + tl.arange(0, BS)
        s_inside = s < S
        i = tl.load(item_ptr + (b * item_b + s * item_s), s_inside, other=0)
        valid = s_inside & (i >= 0) & (i < N) & q_valid
        mask = valid[:, None] & d_inside[None, :]
        grad = tl.load(grad_ptr + (b * grad_b + s * grad_s), s_inside, other=0.0).to(dtype)
        if volume_ptr is not None:
            volume = tl.load(volume_ptr + (b * S + s), s_inside, other=0.0)
            grad = tl.where(volume == float("-inf"), 0.0, grad)
        grad = tl.where(valid, grad, float("nan"))[:, None]
        iz = _gather(iz_ptr, i, d, mask, iz_n, iz_d, dtype)
        iZ = _gather(iZ_ptr, i, d, mask, iZ_n, iZ_d, dtype)
        r = grad * slope(overlap(qz, qZ, iz, iZ, tau, inv_tau, offset, CORNERS), inv_nu, SIDE)
        used = grad != 0.0  # as in grads_kernel
        inside = s_inside[:, None] & d_inside[None, :]
        dqz -= tl.where(inside & used, r * share(qz, iz, inv_tau, CORNERS), 0.0)
        dqZ += tl.where(inside & used, r * share(iZ, qZ, inv_tau, CORNERS), 0.0)
        diz = tl.where(used, -r * share(iz, qz, inv_tau, CORNERS), 0.0)
        diZ = tl.where(used, r * share(qZ, iZ, inv_tau, CORNERS), 0.0)
        out = (b * S + s)[:, None] * D + d[None, :]
        tl.store(diz_ptr + out, diz.to(element), inside)
        tl.store(diZ_ptr + out, diZ.to(element), inside)
    out = b * D + d
    tl.store(dqz_ptr + out, tl.sum(dqz, 0).to(element), d_inside)
    tl.store(dqZ_ptr + out, tl.sum(dqZ, 0).to(element), d_inside)
