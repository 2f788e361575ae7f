"""Edges of pairwise box volumes: far tails, infinite and inverted corners, ties, NaN, sizes, memory."""

import math

import boxes_oracle as oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from suite import ALL_DTYPES, LargestTensor, assert_same_bits
from torch.autograd import forward_ad

from pyops import boxes
from pyops.boxes import pairwise_containment, pairwise_log_volume, sampled_scores
from pyops.reference import boxes as reference

F64, F32 = torch.float64, torch.float32
MODES = [(0.1, 0.1), (0.1, 0.4), (0.3, 0.1), (0.0, 0.2), (0.2, 0.0), (0.0, 0.0), (0.01, 0.01)]
modes = pytest.mark.parametrize(("tau", "nu"), MODES, ids=lambda v: f"{v:g}")
dtypes = pytest.mark.parametrize("dtype", ALL_DTYPES, ids=lambda d: str(d).removeprefix("torch."))
GRADIENT_GATE = {F64: 1e-11, F32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 2e-3}


def temperatures(tau, nu):
    return {"intersection_temperature": tau, "volume_temperature": nu}


def assert_near(found, wanted, gate):
    """Equal to rounding of the largest entry: where a corner is infinite, a kernel may go another way."""
    assert found.shape == wanted.shape and torch.equal(found.isfinite(), wanted.isfinite())
    assert torch.equal(found[found.isinf()], wanted[wanted.isinf()])
    finite = wanted.isfinite()
    if finite.any():
        largest = wanted[finite].double().abs().max()
        assert ((found[finite].double() - wanted[finite].double()).abs() <= gate * largest).all()


def check(queries, items, tau, nu, gradients=True):
    """Volumes elementwise and gradients against autograd of the oracle, for boxes of one dtype."""
    inputs = [t.clone().requires_grad_() for t in (*queries, *items)]
    exact = [t.detach().double().requires_grad_() for t in inputs]
    dtype, dim = inputs[0].dtype, inputs[0].shape[1]
    found = pairwise_log_volume(inputs[:2], inputs[2:], **temperatures(tau, nu))
    wanted = oracle.pairwise(*exact, tau, nu)
    slack, gate = 0.0, GRADIENT_GATE[dtype]
    if nu == 0 < tau and wanted.numel() and dim:
        amplified = 4 * (1.1e-16 if dtype == F64 else 6e-8) * oracle.condition(*exact, tau).detach()
        slack, gate = amplified.sum(-1), gate + amplified.max().item()
    oracle.assert_log_volumes(found.detach(), wanted.detach(), dtype, dim, slack)
    assert found.dtype == (F64 if dtype == F64 else F32)
    if gradients and wanted.numel() and dim:
        seed = torch.randn(wanted.shape, dtype=F64).to(found.dtype)
        pairs = (torch.autograd.grad(r, i, seed.to(r.dtype)) for r, i in ((found, inputs), (wanted, exact)))
        oracle.assert_gradients(*pairs, gate)
    return found.detach()


# Sizes and tiles


@modes
@dtypes
def test_sizes(tau, nu, dtype):
    """Around vector and tile sizes, one of queries, items and dimensions at a time."""
    for queries, items, dim in (
        *((n, 5, 6) for n in (1, 2, 3, 4, 7, 8, 17, 33)),
        *((5, n, 6) for n in (1, 2, 3, 15, 16, 17, 31, 33, 64, 65, 130)),
        *((3, 18, n) for n in (1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 129, 200)),
    ):
        check(oracle.boxes(queries, dim, dtype=dtype), oracle.boxes(items, dim, dtype=dtype), tau, nu)


@settings(max_examples=80, deadline=None)
@given(
    sizes=st.tuples(st.integers(0, 40), st.integers(0, 70), st.integers(0, 40)),
    mode=st.sampled_from(MODES),
    dtype=st.sampled_from(ALL_DTYPES),
    spread=st.sampled_from([0.01, 1.0, 30.0]),
    seed=st.integers(0, 10**6),
)
def test_sizes_of_any_kind(sizes, mode, dtype, spread, seed):
    torch.manual_seed(seed)
    queries, items, dim = sizes
    check(
        oracle.boxes(queries, dim, dtype=dtype, spread=spread),
        oracle.boxes(items, dim, dtype=dtype, spread=spread),
        *mode,
    )


@modes
def test_sizes_of_many_dimensions(tau, nu):
    """Sums over thousands of dimensions keep the gate, and underflow as volumes but not as logarithms."""
    for dim in (512, 1024, 4096):
        logs = check(oracle.boxes(3, dim, dtype=F32), oracle.boxes(5, dim, dtype=F32), tau, nu)
        if nu > 0:
            assert logs.isfinite().all()
    half = boxes.Box(torch.zeros(1, 512), torch.full((1, 512), 0.5))
    logs = pairwise_log_volume(half, half, **temperatures(0.0, 0.0))
    assert abs(logs.item() + 512 * math.log(2)) < 1e-3 and logs.exp() == 0


@modes
def test_sizes_of_no_dimension(tau, nu):
    """An empty product: volume 1."""
    empty = torch.zeros(3, 0), torch.ones(3, 0)
    many = torch.zeros(5, 0, requires_grad=True), torch.ones(5, 0, requires_grad=True)
    logs = pairwise_log_volume(empty, many, **temperatures(tau, nu))
    assert torch.equal(logs, torch.zeros(3, 5))
    assert torch.autograd.grad(logs.sum(), many[0])[0].shape == (5, 0)
    assert torch.equal(pairwise_containment(empty, many, **temperatures(tau, nu)), torch.zeros(3, 5))
    q, i = torch.tensor([0, 2]), torch.tensor([[0, 1], [4, 4]])
    assert torch.equal(sampled_scores(empty, many, q, i, **temperatures(tau, nu)), torch.zeros(2, 2))


def test_sizes_of_leading_dimensions():
    queries, items = oracle.boxes(2, 3, 1, 5), oracle.boxes(4, 6, 5)
    logs = pairwise_log_volume(queries, items, **temperatures(0.1, 0.2))
    flat = [(z.flatten(0, -2), Z.flatten(0, -2)) for z, Z in (queries, items)]
    wanted = pairwise_log_volume(*flat, **temperatures(0.1, 0.2))
    assert logs.shape == (2, 3, 1, 4, 6)
    assert torch.equal(logs.view(6, 24), wanted)
    one = queries[0][0, 0, 0], queries[1][0, 0, 0]
    assert pairwise_log_volume(one, one, **temperatures(0.1, 0.2)).shape == ()
    conjuncts = [queries, (queries[0][:, :1], queries[1][:, :1]), one]
    composed = pairwise_log_volume(conjuncts, items, without=[one], **temperatures(0.1, 0.2))
    assert composed.shape == (2, 3, 1, 4, 6)
    # ``without`` alone may widen the queries
    wide = pairwise_log_volume(one, items, without=queries, **temperatures(0.1, 0.2))
    assert wide.shape == (2, 3, 1, 4, 6)


@modes
@dtypes
def test_reference_agrees(tau, nu, dtype):
    """What other devices run, against what serves here: all five ops."""
    numbers = tau, nu, oracle.offset(tau, nu)
    # All boxes meet where sides are hard: a difference of smooth corners near 0 has no bound of its own.
    corners = [t for box in (oracle.boxes(6, 9), oracle.boxes(33, 9)) for t in box]
    if nu == 0:
        corners = [t.tanh() for t in corners]
        corners = [t if n % 2 == 0 else t + 3 for n, t in enumerate(corners)]
    qz, qZ, iz, iZ = pairs = tuple(t.to(dtype) for t in corners)
    rows = torch.arange(8) % 6, torch.arange(24).view(8, 3) % 33
    wide = F64 if dtype == F64 else F32
    seeds = torch.randn(6, 33, dtype=wide), torch.randn(8, 3, dtype=wide)
    signs = torch.tensor([[1.0, -1.0], [1.0, 0.0], [1.0, 1.0]], dtype=wide)
    terms = qz.view(3, 2, 9), qZ.view(3, 2, 9), signs, iz, iZ, torch.randn(33, dtype=wide)
    nus = torch.linspace(0.05, 0.4, 9, dtype=wide) if nu else None
    calls = {
        "box_log_volumes": [(*pairs, *numbers, None), (*pairs, *numbers, nus)],
        "box_log_volumes_backward": [(seeds[0], *pairs, *numbers, None), (seeds[0], *pairs, *numbers, nus)],
        "box_sampled": [(*pairs, *rows, *numbers)],
        "box_sampled_backward": [(seeds[1], *pairs, *rows, *numbers)],
        "box_topk": [(*terms, *numbers, 7, True), (*terms[:5], None, *numbers, 40, False)],
    }
    gate = {**GRADIENT_GATE, F64: 1e-12}[dtype]
    for name, several in calls.items():
        for args in several:
            served = getattr(torch.ops.pyops, name)(*args)
            written = getattr(reference, name)(*args)
            if isinstance(served, torch.Tensor):
                served, written = [served], [written]
            for s, w in zip(served, written, strict=True):
                assert s.dtype == w.dtype and s.shape == w.shape and w.is_contiguous()
                if s.is_floating_point():
                    assert_near(s, w, 4 * gate)
                else:
                    assert (s == w).double().mean() > 0.9  # scores that differ by rounding may change places


# Far apart


@pytest.mark.parametrize("dtype", [F64, F32], ids=["float64", "float32"])
@pytest.mark.parametrize(("tau", "nu"), [m for m in MODES if m[1] > 0], ids=lambda v: f"{v:g}")
@pytest.mark.parametrize("distance", [5, 30, 100, 1000, 1e5])
def test_tails_of_disjoint_boxes(tau, nu, distance, dtype):
    """Finite, on the line (w - 2 gamma tau) / nu + log nu, with the slope 1 / nu in every dimension."""
    dim, unit = 3, max(tau, nu)
    gap = distance * unit
    z = torch.arange(dim, dtype=F64) * 0.1
    queries = [t.to(dtype).unsqueeze(0).requires_grad_() for t in (z, z + 1)]
    items = [t.to(dtype).unsqueeze(0).requires_grad_() for t in (z + 1 + gap, z + 2 + gap)]
    check([t.detach() for t in queries], [t.detach() for t in items], tau, nu)
    logs = pairwise_log_volume(queries, items, **temperatures(tau, nu))
    grads = torch.autograd.grad(logs, (*queries, *items))
    assert all(g.isfinite().all() for g in grads)
    if distance >= 1000:
        # w = Z_query - z_item: these two corners alone matter
        slope = torch.full((1, dim), 1 / nu, dtype=dtype)
        for found, sign in ((grads[1], 1), (grads[2], -1)):
            assert ((found - sign * slope).abs() <= 1e-5 / nu).all()
        assert (grads[0].abs() <= 1e-5 / nu).all() and (grads[3].abs() <= 1e-5 / nu).all()


@pytest.mark.parametrize("dtype", [F64, F32], ids=["float64", "float32"])
def test_tails_with_a_slope_per_dimension(dtype):
    nus = torch.tensor([0.05, 0.1, 0.7], dtype=dtype)
    z = torch.zeros(1, 3, dtype=dtype)
    Z = (z + 1).requires_grad_()
    items = (z + 300, z + 301)
    logs = pairwise_log_volume((z, Z), items, intersection_temperature=0.1, volume_temperature=nus)
    (grad,) = torch.autograd.grad(logs, Z)
    assert ((grad * nus - 1).abs() <= 1e-5).all()
    wanted = oracle.pairwise(*(t.detach().double() for t in (z, Z, *items)), 0.1, nus.double())
    oracle.assert_log_volumes(logs.detach(), wanted, dtype, 3)


@pytest.mark.parametrize("tau", [1.0, 0.1, 0.05, 0.02, 0.01, 1e-3, 1e-6, 1e-12, 1e-30])
def test_tails_of_small_temperatures(tau):
    """No overflow on the way: the same gate at every temperature, and tau -> 0 tends to the hard volume."""
    for dtype in (F32, F64):
        queries, items = oracle.boxes(6, 16, dtype=dtype), oracle.boxes(11, 16, dtype=dtype)
        if tau >= 1e-12 or dtype == F64:
            check(queries, items, tau, tau)
        check(queries, items, tau, 0.1)
        check(queries, items, tau, 0.0)
    hard = pairwise_log_volume(queries, items, **temperatures(0.0, 0.0))
    near = pairwise_log_volume(queries, items, **temperatures(1e-12, 0.0))
    meet = hard > -50
    assert ((hard - near)[meet].abs() <= 1e-6).all()


def test_tails_of_large_coordinates():
    """Translation far from the origin costs no more than the rounding of the corners."""
    queries, items = oracle.boxes(6, 8, dtype=F32), oracle.boxes(9, 8, dtype=F32)
    for shift in (1e3, 1e5, -1e6):
        moved = [tuple((t + shift) for t in box) for box in (queries, items)]
        check(*moved, 0.1, 0.1)
        check(*moved, 0.0, 0.0)


# Hard sides


@pytest.mark.parametrize("tau", [0.0, 0.2])
def test_disjoint_hard_boxes(tau):
    """Volume 0, logarithm -inf, gradient 0, also of the dimensions that do meet; touching boxes alike."""
    z, Z = torch.zeros(1, 2), torch.ones(1, 2)
    items = (
        torch.tensor([[5.0, 0.0], [1.0, 0.0], [0.5, 0.5]]),
        torch.tensor([[6.0, 1.0], [2.0, 1.0], [2.0, 2.0]]),
    )
    inputs = [t.clone().requires_grad_() for t in (z, Z, *items)]
    logs = pairwise_log_volume(inputs[:2], inputs[2:], **temperatures(tau, 0.0))
    assert logs[0, 0] == logs[0, 1] == -math.inf
    assert logs[0, 2].isfinite()
    grads = torch.autograd.grad(logs.sum(), inputs)
    assert all(g.isfinite().all() for g in grads)
    assert (grads[2][:2] == 0).all() and (grads[3][:2] == 0).all() and (grads[2][2] != 0).all()


def test_inverted_boxes():
    """Legal locations for Gumbel boxes, empty for hard ones; both orders of a pair."""
    queries = oracle.boxes(4, 3)
    inverted = queries[1], queries[0]
    items = oracle.boxes(5, 3)
    for tau, nu in MODES:
        check(inverted, items, tau, nu)
    hard = pairwise_log_volume(inverted, items, **temperatures(0.0, 0.0))
    assert (hard == -math.inf).all()
    assert pairwise_log_volume(inverted, items, **temperatures(0.1, 0.1)).isfinite().all()


def test_identical_boxes():
    """Gumbel self-intersections shrink by 2 tau log 2 per side; hard ones do not."""
    a = boxes.Box(torch.zeros(1, 2, dtype=F64), torch.full((1, 2), 20.0, dtype=F64))
    assert pairwise_containment(a, a, **temperatures(0.0, 0.0)).item() == 0
    tau = 0.5
    side = 20 - 2 * oracle.GAMMA * tau
    wanted = 2 * math.log((side - 2 * tau * math.log(2)) / side)
    assert abs(pairwise_containment(a, a, **temperatures(tau, tau)).item() - wanted) < 1e-12


@modes
def test_ties_share_the_gradient(tau, nu):
    """Equal corners: half for each, as torch.maximum has it, for every temperature."""
    a = [t.requires_grad_() for t in (torch.zeros(1, 3), torch.ones(1, 3))]
    b = [t.detach().clone().requires_grad_() for t in a]
    grads = torch.autograd.grad(pairwise_log_volume(a, b, **temperatures(tau, nu)).sum(), (*a, *b))
    for x, y in zip(grads[:2], grads[2:], strict=True):
        assert torch.equal(x, y) and (x != 0).all()


# Infinities and NaN


@modes
@dtypes
def test_infinite_corners_are_unconstrained(tau, nu, dtype):
    """z = -inf and Z = inf of one box leave the other; of both, the side and its logarithm are infinite."""
    queries, items = oracle.boxes(4, 5, dtype=dtype), oracle.boxes(6, 5, dtype=dtype)
    free_z, free_Z = queries[0].clone(), queries[1].clone()
    free_z[1], free_Z[1] = -math.inf, math.inf
    free_z[2, 3], free_Z[3, 0] = -math.inf, math.inf
    logs = check((free_z, free_Z), items, tau, nu, gradients=False)
    wanted = oracle.log_volume([t.double() for t in items], tau, nu)
    oracle.assert_log_volumes(logs[1], wanted, dtype, 5)
    inputs = [t.requires_grad_() for t in (free_z, free_Z, *(t.clone() for t in items))]
    found = pairwise_log_volume(inputs[:2], inputs[2:], **temperatures(tau, nu))
    grads = torch.autograd.grad(found.sum(), inputs)
    assert all(g.isfinite().all() for g in grads)
    assert (grads[0][1] == 0).all() and (grads[1][1] == 0).all()
    both = pairwise_log_volume(
        (free_z[1:2], free_Z[1:2]), (free_z[1:2], free_Z[1:2]), **temperatures(tau, nu)
    )
    assert both.item() == math.inf


@modes
@pytest.mark.parametrize("dtype", [F64, F32, torch.bfloat16], ids=["float64", "float32", "bfloat16"])
def test_infinite_corners_that_exclude(tau, nu, dtype):
    """z = +inf or Z = -inf: nothing is inside."""
    queries, items = oracle.boxes(3, 4, dtype=dtype), oracle.boxes(5, 4, dtype=dtype)
    queries[0][0, 1], queries[1][1, 2] = math.inf, -math.inf
    logs = pairwise_log_volume(queries, items, **temperatures(tau, nu))
    assert (logs[:2] == -math.inf).all()
    rest = pairwise_log_volume([t[2:] for t in queries], items, **temperatures(tau, nu))
    assert_near(logs[2:], rest, 1e-12 if dtype == F64 else 4e-6)


@modes
@dtypes
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nan_stays_in_its_row_or_column(tau, nu, dtype, value):
    queries, items = oracle.boxes(9, 6, dtype=dtype), oracle.boxes(21, 6, dtype=dtype)
    options = temperatures(tau, nu)
    clean = pairwise_log_volume(queries, items, **options)
    seed = torch.randn(clean.shape).to(clean.dtype)

    def gradients(queries, items):
        inputs = [t.clone().requires_grad_() for t in (*queries, *items)]
        return torch.autograd.grad(pairwise_log_volume(inputs[:2], inputs[2:], **options), inputs, seed)

    clean_grads = gradients(queries, items)
    gate = 1e-12 if dtype == F64 else 2e-6
    grad_gate = 2 * GRADIENT_GATE[dtype] * (100 if nu == 0 < tau else 1)  # 1 / w of small w
    for corner in range(4):
        box, row = (queries, 4) if corner < 2 else (items, 17)
        dirty = [[t.clone() for t in queries], [t.clone() for t in items]]
        dirty[corner // 2][corner % 2][row, 3] = value
        logs = pairwise_log_volume(*dirty, **options)
        others = [n for n in range(len(box[0])) if n != row]
        hit, kept = (logs[row], logs[others]) if corner < 2 else (logs[:, row], logs[:, others])
        wanted = clean[others] if corner < 2 else clean[:, others]
        if math.isnan(value):
            assert hit.isnan().all()
        assert_near(kept, wanted, 4 * gate)
        grads = gradients(*dirty)
        own = (0, 1) if corner < 2 else (2, 3)
        for n in own:  # of the side that holds the value, the other rows do not see it
            assert_near(grads[n][others], clean_grads[n][others], grad_gate)
        if math.isnan(value):
            assert any(grads[n][row].isnan().any() for n in own)


def test_nan_in_a_gradient_stays_in_its_row_and_column():
    queries, items = oracle.boxes(4, 3), oracle.boxes(5, 3)
    inputs = [t.clone().requires_grad_() for t in (*queries, *items)]
    logs = pairwise_log_volume(inputs[:2], inputs[2:], **temperatures(0.1, 0.1))
    seed = torch.ones_like(logs)
    seed[1, 2] = math.nan
    grads = torch.autograd.grad(logs, inputs, seed)
    for grad, row in zip(grads, (1, 1, 2, 2), strict=True):
        assert grad[row].isnan().all()
        assert grad[[n for n in range(len(grad)) if n != row]].isfinite().all()


# Dtypes and layouts


def test_mixed_dtypes_promote():
    queries, items = oracle.boxes(3, 4, dtype=torch.bfloat16), oracle.boxes(5, 4, dtype=F32)
    options = temperatures(0.1, 0.1)
    logs = pairwise_log_volume(queries, items, **options)
    wide = [t.float() for t in queries]
    assert_same_bits(logs, pairwise_log_volume(wide, items, **options), "bfloat16 with float32")
    assert pairwise_log_volume(queries, [t.double() for t in items], **options).dtype == F64
    mixed = queries[0].float(), queries[1]
    assert_same_bits(pairwise_log_volume(mixed, items, **options), logs, "z and Z of two dtypes")
    halves = [t.half() for t in items]
    assert pairwise_log_volume(queries, halves, **options).dtype == F32


def test_stacked_and_concatenated_corners_are_views():
    t, options = torch.rand(6, 2, 4), temperatures(0.1, 0.1)
    t[:, 1] += 1
    stacked = boxes.Box.stacked(t)
    joined = boxes.Box.concatenated(t.reshape(6, 8))
    assert stacked.z.data_ptr() == t.data_ptr() and stacked.Z.stride() == (8, 1)
    plain = boxes.Box(t[:, 0].contiguous(), t[:, 1].contiguous())
    wanted = pairwise_log_volume(plain, plain, **options)
    for box in (stacked, joined):
        assert_same_bits(pairwise_log_volume(box, box, **options), wanted, "layout")


@pytest.mark.parametrize("backward", [False, True])
def test_memory(backward):
    """No cube: far less than queries x items x dimensions is held (measured by the largest tensor)."""

    queries, items = oracle.boxes(300, 64, dtype=F32), oracle.boxes(400, 64, dtype=F32)
    inputs = [t.requires_grad_(backward) for t in (*queries, *items)]
    with LargestTensor() as largest:
        logs = pairwise_log_volume(inputs[:2], inputs[2:], **temperatures(0.1, 0.1))
        if backward:
            logs.sum().backward()
    assert largest.bytes <= 300 * 400 * 64 * 4 / 8


def test_tangents_of_temperatures_are_refused():
    """By pairs they have no derivative; dropping one silently would be wrong."""
    queries, items = oracle.boxes(3, 4), oracle.boxes(5, 4)
    with forward_ad.dual_level():
        tau = forward_ad.make_dual(torch.full((4,), 0.1, dtype=F64), torch.ones(4, dtype=F64))
        for pair in (temperatures(tau, 0.1), temperatures(0.1, tau)):
            with pytest.raises(RuntimeError, match="temperature has a forward-mode tangent"):
                pairwise_log_volume(queries, items, **pair)


@pytest.mark.parametrize("dims", [1, 7, 8, 16, 17, 64, 65, 130])
@pytest.mark.parametrize("scale", [1e-30, 1e-6, 1.0, 1e5, 1e12, 1e30])
def test_hard_products_neither_vanish_nor_overflow(dims, scale):
    """Sides of any size, of which many are multiplied at a time; touching and disjoint boxes among them."""
    g = torch.Generator().manual_seed(dims)
    queries, items = (
        (scale * (z := torch.rand(n, dims, generator=g, dtype=torch.float64)), scale * (2 - z))
        for n in (9, 37)
    )
    queries, items = ([t.float() for t in pair] for pair in (queries, items))
    items[0][3, dims // 2] = queries[1][2, dims // 2]  # touches
    items[0][5, -1] = 3 * scale  # disjoint from all
    items[0][6], items[1][6] = 0.5 * scale, 0.6 * scale  # within all others, if they reach so far
    items[0][7, 0] = math.nan
    hard = {"intersection_temperature": 0, "volume_temperature": 0}
    got = pairwise_log_volume(tuple(queries), tuple(items), **hard)
    q, i = ([t.double() for t in pair] for pair in (queries, items))
    side = torch.minimum(q[1][:, None], i[1]) - torch.maximum(q[0][:, None], i[0])
    exact = side.float().clamp(min=0).double().log().sum(-1)  # sides are rounded once
    assert torch.equal(got.isnan(), exact.isnan()) and got.isnan().any()
    assert torch.equal(got == -math.inf, exact == -math.inf) and (got == -math.inf).any()
    finite = exact.isfinite()
    error = (got - exact)[finite].abs() - 2e-6 * exact[finite].abs().clamp(min=1)
    assert error.max() <= 1e-6 * dims


def test_hard_boxes_that_never_meet():
    """Nothing is left to multiply after a few dimensions; NaN is still found behind them."""
    z = torch.rand(40, 200, generator=torch.Generator().manual_seed(0))
    items = [z + 2, z + 3]
    items[0][11, 150] = math.nan
    hard = {"intersection_temperature": 0, "volume_temperature": 0}
    queries = [z.clone().requires_grad_(), (z + 1).requires_grad_()]
    logs = pairwise_log_volume(tuple(queries), tuple(items), **hard)
    expected = torch.full_like(logs, -math.inf)
    expected[:, 11] = math.nan
    torch.testing.assert_close(logs, expected, equal_nan=True)
    logs = pairwise_log_volume(tuple(queries), tuple(t[:11] for t in items), **hard)
    for grad in torch.autograd.grad(logs.sum(), queries):
        assert (grad == 0).all()


@pytest.mark.parametrize("distance", [20.0, 60.0, 75.0])
@pytest.mark.parametrize("upstream", [1e-15, 1e-6, 1.0, 1e6, 1e15])
def test_gradients_scale_with_what_comes_from_above(distance, upstream):
    """Boxes far apart and boxes far wider than tau, with small and large gradients of the volumes."""
    tau, index = 0.5, (torch.zeros(2, dtype=torch.long), torch.arange(2).repeat(2, 1))
    for sign in (1, -1):  # disjoint, wide
        corners = [torch.full((n, 3), sign * side * distance * tau / 2) for n, side in ((2, 1), (5, -1))]
        if sign == 1:
            queries, items = ((t, t + tau / 2) for t in corners)
        else:
            queries, items = ((-t.abs(), t.abs()) for t in corners)
        inputs = [t.clone().requires_grad_() for t in (*queries, *items)]
        for op in (
            lambda *t: pairwise_log_volume(t[:2], t[2:], **temperatures(tau, tau)),
            lambda *t: sampled_scores(t[:2], t[2:], *index, score="volume", **temperatures(tau, tau)),
        ):
            once, scaled = (torch.autograd.grad(f * op(*inputs).sum(), inputs) for f in (1, upstream))
            for a, b in zip(once, scaled, strict=True):
                assert a.isfinite().all() and a.any()
                torch.testing.assert_close(b, upstream * a, rtol=1e-5, atol=1e-37)  # below, some are 0


@pytest.mark.parametrize("dtype", [F32, F64])
def test_an_empty_side_empties_an_unbounded_box(dtype):
    queries = torch.tensor([[0.0, 0.0]], dtype=dtype), torch.tensor([[1.0, math.inf]], dtype=dtype)
    items = (
        torch.tensor([[5.0, 0.0], [0.0, 0.0]], dtype=dtype),
        torch.tensor([[6.0, math.inf]] * 2, dtype=dtype),
    )
    hard = temperatures(0, 0)
    assert pairwise_log_volume(queries, items, **hard).tolist() == [[-math.inf, math.inf]]
    index = torch.zeros(1, dtype=torch.long), torch.arange(2)[None]
    found = sampled_scores(queries, items, *index, score="volume", **hard)
    assert found.tolist() == [[-math.inf, math.inf]]


def test_gradient_of_an_intersection_without_a_bound():
    """No box bounds a dimension: its corners at infinity have no gradient, rather than NaN."""
    inputs = [
        torch.tensor([[v, w]], requires_grad=True)
        for v, w in ((-math.inf, 0.0), (math.inf, 1.0), (-math.inf, 0.2), (math.inf, 1.5))
    ]
    items = torch.zeros(1, 2), torch.ones(1, 2)
    logs = pairwise_log_volume([tuple(inputs[:2]), tuple(inputs[2:])], items, **temperatures(0.1, 0.1))
    for grad in torch.autograd.grad(logs.sum(), inputs):
        assert grad[0, 0] == 0 and grad[0, 1].isfinite() and grad[0, 1] != 0


@modes
def test_nan_reaches_no_gradient_without_it(tau, nu):
    """A NaN query whose volumes have no gradient leaves those of the items alone."""
    g = torch.Generator().manual_seed(3)
    z, item = torch.rand(5, 6, generator=g), torch.rand(40, 6, generator=g)
    inputs = [t.requires_grad_() for t in (z, z + 1, item, item + 1)]
    broken = [t.detach().clone() for t in inputs]
    broken[0][2, 3] = math.nan
    broken = [t.requires_grad_() for t in broken]
    grads = []
    for tensors in (inputs, broken):
        logs = pairwise_log_volume(tensors[:2], tensors[2:], **temperatures(tau, nu))
        weights = torch.ones_like(logs)
        weights[2] = 0
        grads.append(torch.autograd.grad(logs, tensors, weights))
    for clean, found in zip(*grads, strict=True):
        torch.testing.assert_close(found, clean, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tau", [1e-1, 1e-3, 1e-5])
def test_temperatures_per_dimension_far_from_the_origin(tau):
    """Quotients of corners by tau keep the digits of the corners' differences."""
    g = torch.Generator().manual_seed(5)
    queries, items = ([10 + 3 * tau * torch.randn(n, 8, generator=g)] for n in (6, 50))
    for pair in (queries, items):
        pair.append(pair[0] + 3 * tau)
    each = torch.full((8,), tau)
    found = pairwise_log_volume(queries, items, intersection_temperature=each, volume_temperature=each)
    wanted = pairwise_log_volume(
        *([t.double() for t in pair] for pair in (queries, items)),
        **temperatures(float(each[0]), float(each[0])),
    )
    assert ((found - wanted).abs() <= 2e-6 * wanted.abs().clamp(min=1) + 8e-6).all()
