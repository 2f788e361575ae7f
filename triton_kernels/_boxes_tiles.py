"""Pieces that the kernels of boxes.py share: sides and slopes, volumes and scores of a tile, sort keys."""

import triton
import triton.language as tl

# Bounds of an exponent of 2 in the exponential domain: a product of two sums of two powers stays a normal
# float32 above 2^-124 and below 2^118, and so does its inverse.
HIGH = tl.constexpr(57.0)
LOW = tl.constexpr(-62.0)
FLAG_ROWS = tl.constexpr(64)  # boxes that share a flag
DEPTH = tl.constexpr(64)  # dimensions summed before they join the total
T16 = tl.constexpr(16)  # threads of a tile span 16 x 16 pairs
LN2 = tl.constexpr(0.6931471805599453)
HUGE = tl.constexpr(1e30)  # stands for infinity in sums of logarithms of hard sides
MISSING = tl.constexpr(-(2**63))


@triton.jit
def tile_rows(first, BM: tl.constexpr):
    """Rows first, ..., first + BM - 1 as [BM / 16, 1, 16, 1].

    Tiles are kept as [BM / 16, BN / 16, 16, 16]: threads spread over the last two dimensions, and each holds
    a square of rows and columns. Of [BM, BN] it would hold a column, and form a power for every pair.
    """
    outer = tl.arange(0, BM // T16)[:, None, None, None] * T16
    return first + (outer + tl.arange(0, T16)[None, None, :, None]).to(tl.int64)


@triton.jit
def tile_cols(first, BN: tl.constexpr):
    """Columns first, ..., first + BN - 1 as [1, BN / 16, 1, 16]."""
    outer = tl.arange(0, BN // T16)[None, :, None, None] * T16
    return first + (outer + tl.arange(0, T16)[None, None, None, :]).to(tl.int64)


@triton.jit
def log1p(x):
    """log(1 + x) for x >= 0 to a rounding or two: log of the rounded 1 + x, and what the sum lost."""
    y = 1.0 + x
    return tl.log(y) + tl.where(x < 1.0, (x - (y - 1.0)) * (1.0 - x), 0.0)


@triton.jit
def log_softplus(s):
    """log log(1 + e^s); s itself where the difference e^s / 2 is below a rounding."""
    tail: tl.constexpr = -37.0 if s.dtype == tl.float64 else -17.0
    return tl.where(s < tail, s, tl.log(tl.maximum(s, 0.0) + log1p(tl.exp(-tl.abs(s)))))


@triton.jit
def log_side(w, inv_nu, SIDE: tl.constexpr):
    """log(side / nu) of w = Z - z - offset, for SIDE "hard" log relu(w), with HUGE for infinity.

    An empty hard side empties the box even if another is unbounded: their sum must not be NaN.
    """
    if SIDE == "hard":
        return tl.where(w == float("inf"), HUGE, tl.log(tl.where(w <= 0.0, 0.0, w)))
    else:
        return log_softplus(w * inv_nu)


@triton.jit
def whole(total, SIDE: tl.constexpr):
    """A sum of log_side, with infinity for HUGE."""
    if SIDE == "hard":
        return tl.where(total > 0.5 * HUGE, float("inf"), total)
    else:
        return total


@triton.jit
def slope(w, inv_nu, SIDE: tl.constexpr):
    """d log side / dw; 0 for an empty hard side, 1 / nu far below 0 for a soft one."""
    if SIDE == "hard":
        return tl.where(w <= 0.0, 0.0, 1.0 / w)
    else:
        s = w * inv_nu
        tail: tl.constexpr = -37.0 if s.dtype == tl.float64 else -17.0
        e = tl.exp(-tl.abs(s))
        ratio = tl.where(s >= 0.0, 1.0, e) / ((1.0 + e) * (tl.maximum(s, 0.0) + log1p(e)))
        return tl.where(s < tail, 1.0, ratio) * inv_nu


@triton.jit
def overlap(az, aZ, bz, bZ, tau, inv_tau, offset, CORNERS: tl.constexpr):
    """w = Z - z - offset of the intersection; inv_tau is log2(e) / tau. NaN stays, infinities may meet."""
    if CORNERS == "hard":
        z = tl.maximum(az, bz, propagate_nan=tl.PropagateNan.ALL)
        return tl.minimum(aZ, bZ, propagate_nan=tl.PropagateNan.ALL) - z - offset
    else:
        gap = tl.where(az == bz, 0.0, tl.abs(az - bz))
        z = tl.maximum(az, bz) + tau * log1p(tl.exp2(-gap * inv_tau))
        gap = tl.where(aZ == bZ, 0.0, tl.abs(aZ - bZ))
        return tl.minimum(aZ, bZ) - tau * log1p(tl.exp2(-gap * inv_tau)) - z - offset


@triton.jit
def share(a, b, inv_tau, CORNERS: tl.constexpr):
    """d max(a, b) / da, smooth or hard; a tie is shared equally."""
    if CORNERS == "hard":
        part = tl.where(a > b, 1.0, 0.0).to(a.dtype)
    else:
        part = 1.0 / (1.0 + tl.exp2((b - a) * inv_tau))
    return tl.where(a == b, 0.5, part)


@triton.jit
def column(at, d, stride, dtype: tl.constexpr):
    """Coordinate d of the boxes whose rows start at the pointers `at`."""
    return tl.load(at + tl.full((), 1, tl.int64) * d * stride).to(dtype)


@triton.jit
def may_use_powers(a_flag, b_flag):
    """No exponent above HIGH, and none below LOW in boxes of both sides."""
    return (((a_flag | b_flag) & 1) == 0) & ((a_flag & b_flag & 2) == 0)


@triton.jit
def _power_volumes(
    qz_at, qZ_at, iz_at, iZ_at, centre_ptr, nus_ptr, D, qz_d, qZ_d, iz_d, iZ_d,
    tau, inv_tau, inv_nu, offset, inv_k, SIDE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Sums of log(side / nu) from e^(-w / tau) = (P_q + P_i) (Q_q + Q_i), float32.

    SIDE "equal" (nu = tau): the sides are multiplied, their exponents summed as integers.
    """
    total = tl.zeros((BM // T16, BN // T16, T16, T16), tl.float32)
    exponents = tl.zeros((BM // T16, BN // T16, T16, T16), tl.int32)
    for first in range(0, D, DEPTH):
        part = tl.full((BM // T16, BN // T16, T16, T16), 1.0 if SIDE == "equal" else 0.0, tl.float32)
        for d in range(first, tl.minimum(first + DEPTH, D)):
            c = tl.load(centre_ptr + tl.full((), 1, tl.int64) * d)
            qp = tl.exp2((column(qz_at, d, qz_d, tl.float32) - c) * inv_tau)
            qn = tl.exp2((c - column(qZ_at, d, qZ_d, tl.float32)) * inv_tau)
            ip = tl.exp2((column(iz_at, d, iz_d, tl.float32) - c) * inv_tau)
            i_n = tl.exp2((c - column(iZ_at, d, iZ_d, tl.float32)) * inv_tau)
            pq = (qp + ip) * (qn + i_n)
            if SIDE == "equal":
                side = log1p(1.0 / (pq * inv_k))
                power = side.to(tl.int32, bitcast=True) & 0x7F800000
                exponents += power >> 23
                part *= side * (0x7F000000 - power).to(tl.float32, bitcast=True)  # keeps NaN
            else:
                w = tl.log2(pq) * (-LN2 * tau) - offset
                if nus_ptr is not None:
                    nu = tl.load(nus_ptr + tl.full((), 1, tl.int64) * d).to(tl.float32)
                    part += log_side(w, 1.0 / nu, SIDE) + tl.log(nu)
                else:
                    part += log_side(w, inv_nu, SIDE)
        total += tl.log(part) if SIDE == "equal" else part
    if SIDE == "equal":
        total += (exponents - 127 * D).to(tl.float32) * LN2
    return total


@triton.jit
def _log_volumes(
    qz_at, qZ_at, iz_at, iZ_at, nus_ptr, D, qz_d, qZ_d, iz_d, iZ_d, tau, inv_tau, inv_nu, offset,
    dtype: tl.constexpr, CORNERS: tl.constexpr, SIDE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """The same in logarithms, for every range and dtype."""
    total = tl.zeros((BM // T16, BN // T16, T16, T16), dtype)
    for first in range(0, D, DEPTH):
        part = tl.zeros((BM // T16, BN // T16, T16, T16), dtype)
        for d in range(first, tl.minimum(first + DEPTH, D)):
            qz = column(qz_at, d, qz_d, dtype)
            qZ = column(qZ_at, d, qZ_d, dtype)
            iz = column(iz_at, d, iz_d, dtype)
            iZ = column(iZ_at, d, iZ_d, dtype)
            w = overlap(qz, qZ, iz, iZ, tau, inv_tau, offset, CORNERS)
            if nus_ptr is not None:
                nu = tl.load(nus_ptr + tl.full((), 1, tl.int64) * d).to(dtype)
                part += log_side(w, 1.0 / nu, SIDE) + tl.log(nu)
            else:
                part += log_side(w, inv_nu, SIDE)
        total += part
    return total


@triton.jit
def volumes(
    qz_at, qZ_at, iz_at, iZ_at, usable, centre_ptr, nus_ptr, D, qz_d, qZ_d, iz_d, iZ_d,
    tau, inv_tau, inv_nu, offset, inv_k, log_nus,
    dtype: tl.constexpr, CORNERS: tl.constexpr, SIDE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Log volumes (a tile) of the intersections of boxes given by pointers to their rows.

    CORNERS "powers": in the exponential domain where `usable`, else in logarithms. log_nus: D log nu.
    """
    tau = tl.full((), tau, dtype)
    inv_nu = tl.full((), inv_nu, dtype)
    offset = tl.full((), offset, dtype)
    if CORNERS == "powers":
        if usable:
            total = _power_volumes(
                qz_at, qZ_at, iz_at, iZ_at, centre_ptr, nus_ptr, D, qz_d, qZ_d, iz_d, iZ_d,
                tau, tl.full((), inv_tau, dtype), inv_nu, offset, tl.full((), inv_k, dtype),
                SIDE, BM, BN,
            )  # fmt: skip
        else:
            total = _log_volumes(
                qz_at, qZ_at, iz_at, iZ_at, nus_ptr, D, qz_d, qZ_d, iz_d, iZ_d,
                tau, tl.full((), inv_tau, dtype), inv_nu, offset, dtype, "log", SIDE, BM, BN,
            )  # fmt: skip
    else:
        total = _log_volumes(
            qz_at, qZ_at, iz_at, iZ_at, nus_ptr, D, qz_d, qZ_d, iz_d, iZ_d,
            tau, tl.full((), inv_tau, dtype), inv_nu, offset, dtype, CORNERS, SIDE, BM, BN,
        )  # fmt: skip
    return whole(total, SIDE) + tl.full((), log_nus, dtype)


@triton.jit
def scores(
    qz_ptr, qZ_ptr, signs_ptr, iz_ptr, iZ_ptr, item_log_volume_ptr, flags_ptr, centre_ptr, nus_ptr,
    rows, cols, first_row, first_col, T, N, B, D, qz_b, qz_t, qz_d, qZ_b, qZ_t, qZ_d, iz_n, iz_d, iZ_n, iZ_d,
    tau, inv_tau, inv_nu, offset, inv_k, log_nus,
    dtype: tl.constexpr, CORNERS: tl.constexpr, SIDE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """log sum_t signs_t volume_t - item log volume (a tile); without signs the log volume of the one term."""
    iz_at = iz_ptr + cols * iz_n
    iZ_at = iZ_ptr + cols * iZ_n
    qz_at = qz_ptr + rows * qz_b
    qZ_at = qZ_ptr + rows * qZ_b
    one = tl.full((), 1, tl.int64)
    i_flag = tl.full((), 0, tl.int32)
    if flags_ptr is not None:
        blocks = one * tl.cdiv(B, FLAG_ROWS) * T
        for block in tl.static_range(0, BN, FLAG_ROWS):  # a block may start past the last item
            at = tl.minimum(first_col + block, N - 1) // FLAG_ROWS
            i_flag |= tl.load(flags_ptr + blocks + at)
    if signs_ptr is None:
        usable = i_flag == 0
        if flags_ptr is not None:
            usable = may_use_powers(tl.load(flags_ptr + first_row // FLAG_ROWS * T), i_flag)
        return volumes(
            qz_at, qZ_at, iz_at, iZ_at, usable, centre_ptr, nus_ptr, D, qz_d, qZ_d, iz_d, iZ_d,
            tau, inv_tau, inv_nu, offset, inv_k, log_nus, dtype, CORNERS, SIDE, BM, BN,
        )  # fmt: skip
    else:
        top = tl.full((BM // T16, BN // T16, T16, T16), float("-inf"), dtype)
        total = tl.zeros((BM // T16, BN // T16, T16, T16), dtype)
        for t in range(0, T):
            usable = i_flag == 0
            if flags_ptr is not None:
                usable = may_use_powers(tl.load(flags_ptr + (first_row // FLAG_ROWS * T + t)), i_flag)
            term = volumes(
                qz_at + one * t * qz_t, qZ_at + one * t * qZ_t, iz_at, iZ_at, usable, centre_ptr, nus_ptr, D,
                qz_d, qZ_d, iz_d, iZ_d, tau, inv_tau, inv_nu, offset, inv_k, log_nus,
                dtype, CORNERS, SIDE, BM, BN,
            )  # fmt: skip
            sign = tl.load(signs_ptr + (rows * T + t)).to(dtype)
            term = tl.where(sign == 0.0, float("-inf"), term)
            higher = tl.maximum(top, term)
            old = tl.where(top == higher, 1.0, tl.exp(top - higher))
            new = tl.where(term == higher, 1.0, tl.exp(term - higher))
            total = total * old + sign * new
            top = higher
        score = tl.where(total <= 0.0, float("-inf"), top + tl.log(tl.where(total <= 0.0, 1.0, total)))
        if item_log_volume_ptr is not None:
            item = tl.load(item_log_volume_ptr + cols).to(dtype)
            score = tl.where(score == float("-inf"), score, score - item)
            score = tl.where(score > 0.0, 0.0, score)  # by rounding
        return score


@triton.jit
def sort_keys(score, index):
    """int64 keys of float32 scores: higher first, then the lower index (below 2^32); NaN lowest."""
    score = tl.where(score == 0.0, 0.0, score)  # -0 is 0
    bits = score.to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    ordered = tl.where(score != score, -2147483648, ordered)
    return (ordered.to(tl.int64) << 32) | (4294967295 - index)
