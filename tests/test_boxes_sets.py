"""Boxes as sets: parameterisations, elementwise functions, their algebra, derivatives, agreement by pairs."""

import copy
import math
import pickle

import boxes_oracle as oracle
import pytest
import scipy.special
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from suite import assert_close

from pyops import boxes
from pyops.boxes import Box, complement, containment, difference, intersection, jaccard, log_volume, union
from pyops.reference import boxes as reference

F64, F32 = torch.float64, torch.float32
MODES = [(0.1, 0.1), (0.1, 0.4), (0.3, 0.1), (0.0, 0.2), (0.2, 0.0), (0.0, 0.0), (0.01, 0.01)]
KINDS = [
    *((tau, nu, "auto") for tau, nu in MODES),
    (0.2, 0.1, "bessel"),
    (0.2, 0.1, "soft"),
    (0.2, 0.1, "hard"),
]
kinds = pytest.mark.parametrize("kind", KINDS, ids=str)
FUNCTIONS = [containment, complement, difference, union, jaccard]
HARD = {"intersection_temperature": 0.0, "volume_temperature": 0.0}


def options(kind):
    tau, nu, volume = kind
    return {"intersection_temperature": tau, "volume_temperature": nu, "volume": volume}


def meeting(*shape, dtype=F64):
    """Boxes all of which meet, with sides of 1.5 to 2.5."""
    z = torch.rand(*shape, dtype=F64)
    return Box(z.to(dtype), (z + 1.5 + torch.rand(*shape, dtype=F64)).to(dtype))


def any_boxes(*shape, dtype=F64):
    return Box(*oracle.boxes(*shape, dtype=dtype))


# Box


def test_parameterisations_and_their_inverses():
    a, b = torch.randn(4, 3, dtype=F64), torch.randn(4, 3, dtype=F64)
    box = Box.min_delta(a, b)
    assert torch.equal(box.z, a) and (box.side > 0).all()
    assert_close(torch.stack(box.to_min_delta()), torch.stack([a, b]), 1e-12)
    steep = Box.min_delta(a, b, beta=3.0)
    assert_close(steep.side, torch.log1p(torch.exp(3 * b)) / 3, 1e-12)
    assert_close(torch.stack(steep.to_min_delta(beta=3.0)), torch.stack([a, b]), 1e-11)
    box = Box.sigmoid(a, b)
    assert (box.z > 0).all() and (box.z < box.Z).all() and (box.Z < 1).all()
    assert_close(box.Z, a.sigmoid() + (1 - a.sigmoid()) * b.sigmoid(), 1e-14)
    assert_close(torch.stack(box.to_sigmoid()), torch.stack([a, b]), 1e-11)
    box = Box.centre_offset(a, b)
    assert_close(box.centre, a, 1e-14)
    assert_close(box.side, 2 * torch.log1p(b.exp()), 1e-13)
    assert_close(torch.stack(box.to_centre_offset()), torch.stack([a, b]), 1e-12)
    assert torch.equal(Box.raw(a, b).Z, b)
    for make in (Box.min_delta, Box.sigmoid, Box.centre_offset):
        assert torch.autograd.gradcheck(
            lambda x, y, m=make: tuple(m(x, y)), (a.requires_grad_(), b.requires_grad_())
        )


def test_softplus_inverse_keeps_its_argument_and_its_digits():
    y = torch.tensor([1e-30, 1e-8, 0.5, 3.0, 100.0, 800.0], dtype=F64)
    before = y.clone()
    box = Box(torch.zeros_like(y), y)
    delta = box.to_min_delta()[1]
    assert torch.equal(y, before)
    assert_close(torch.nn.functional.softplus(delta, threshold=50).log(), y.log(), 1e-13)


def test_strict_refuses_inverted_and_nan():
    z, Z = torch.zeros(2, 3), torch.ones(2, 3)
    assert Box.raw(z, Z, strict=True).shape == (2, 3)
    assert Box.raw(z, z, strict=True).side.sum() == 0  # a point is not inverted
    Z[1, 2] = -1
    Box.raw(z, Z)
    with pytest.raises(
        ValueError, match=r"Z must be at least z .* strict=True, got 1 inverted .* at \(1, 2\)"
    ):
        Box.raw(z, Z, strict=True)
    Z[0, 0] = math.nan
    with pytest.raises(ValueError, match=r"Z must be at least z .* got 2 inverted or NaN .* at \(0, 0\)"):
        Box.raw(z, Z, strict=True)
    with pytest.raises(TypeError, match="strict must be a bool, got 1"):
        Box.raw(z, Z, strict=1)


BAD_BOXES = [
    (lambda: Box.raw(torch.ones(2), [1.0, 2.0]), TypeError, "box must be a Box .* of Tensor, list"),
    (lambda: Box.raw(torch.ones(2), torch.ones(3)), ValueError, r"box.Z must have the shape of z, \(2,\)"),
    (lambda: Box.raw(torch.ones(2).int(), torch.ones(2)), TypeError, "box.z must be float64"),
    (lambda: Box.min_delta(torch.ones(2), torch.ones(2), beta=0), ValueError, "beta must be finite and"),
    (lambda: Box.min_delta(torch.ones(2), None), TypeError, "box must be a Box or a pair"),
    (lambda: Box.stacked(torch.ones(3, 4)), ValueError, r"t must be \[..., 2, D\], got shape \(3, 4\)"),
    (lambda: Box.stacked(torch.ones(4)), ValueError, "t must have at least 2 dimensions"),
    (lambda: Box.concatenated(torch.ones(3)), ValueError, r"t must be \[..., 2 D\], got shape \(3,\)"),
    (lambda: Box.uniform(3, smallest=0), ValueError, "smallest must be finite and above 0, got 0.0"),
    (lambda: Box.uniform(3, smallest=0.6), ValueError, "smallest <= largest <= high - low must hold"),
    (lambda: Box.uniform(3, high=0.3), ValueError, "smallest <= largest <= high - low must hold"),
    (lambda: Box.uniform(3, low=None), TypeError, "low must be a number, got None"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "kind", "message"), BAD_BOXES, ids=[e[2] for e in BAD_BOXES])
def test_error_of_box(call, kind, message):
    with pytest.raises(kind, match=message):
        call()


def test_uniform_boxes():
    generator = torch.Generator().manual_seed(1)
    settings = {"low": -2.0, "high": 3.0, "smallest": 0.1, "largest": 1.0, "dtype": F64}
    box = Box.uniform(2000, 3, generator=generator, **settings)
    assert (box.z >= -2).all() and (box.Z <= 3).all()
    assert (box.side >= 0.1 - 1e-12).all() and (box.side <= 1 + 1e-12).all()
    assert box.side.min() < 0.11 and box.side.max() > 0.99 and box.z.min() < -1.9 and box.Z.max() > 2.9
    again = Box.uniform(2000, 3, generator=torch.Generator().manual_seed(1), **settings)
    assert torch.equal(box.z, again.z) and torch.equal(box.Z, again.Z)
    again = Box.uniform((2000, 3), generator=torch.Generator().manual_seed(1), **settings)
    assert torch.equal(box.z, again.z) and torch.equal(box.Z, again.Z)
    assert Box.uniform(torch.Size([2, 3])).shape == Box.unconstrained([2, 3]).shape == (2, 3)
    assert Box.uniform(()).shape == Box.uniform().shape == ()


def test_box_is_a_plain_pair():
    box = any_boxes(3, 4)
    z, Z = box
    assert z is box.z and Z is box.Z and box.shape == (3, 4)
    assert torch.equal(box.rows(1).z, z[1]) and box.rows(slice(2)).shape == (2, 4)
    assert torch.equal(pickle.loads(pickle.dumps(box)).Z, Z) and torch.equal(copy.deepcopy(box).z, z)
    assert torch.equal(log_volume((z, Z), **HARD), log_volume(box, **HARD))
    assert torch.equal(log_volume([z, Z], **HARD), log_volume(box, **HARD))
    compiled = torch.compile(
        lambda b: log_volume(b, **options((0.1, 0.1, "auto"))), fullgraph=True, backend="eager"
    )
    assert torch.equal(compiled(box), log_volume(box, **options((0.1, 0.1, "auto"))))


# Against the definition


@kinds
@pytest.mark.parametrize("dtype", [F64, F32, torch.bfloat16, torch.float16], ids=lambda d: str(d)[6:])
def test_log_volume_of_intersections(kind, dtype):
    tau, nu, volume = kind
    a, b, c = (any_boxes(7, 5, dtype=dtype) for _ in range(3))
    both = intersection(a, b, c, intersection_temperature=tau)
    assert both.z.dtype == (F64 if dtype == F64 else F32)
    wide = [[t.double() for t in box] for box in (a, b, c)]
    z, Z = oracle.intersection(wide, tau)
    found = log_volume(both, **options(kind))
    if volume == "bessel":
        y = 2 * torch.exp(-(Z - z) / (2 * tau))
        wanted = (torch.from_numpy(scipy.special.k0e(y.numpy())).log() - y + math.log(2 * tau)).sum(-1)
        # w is rounded, and w / (2 tau) is an exponent
        gate = 1e-11 if dtype == F64 else 2e-5
        assert ((found.double() - wanted).abs() <= gate * (1 + wanted.abs())).all()
        return
    nu, shift = (0.0, 0.0) if volume == "hard" else (nu, 0.0 if volume == "soft" else None)
    wanted = oracle.log_volume((z, Z), tau, nu, shift)
    slack = 1e-11 if dtype == F64 else 1e-4  # hard sides of smooth corners have no bound of their own
    oracle.assert_log_volumes(found, wanted, dtype, 5, slack if nu == 0 < tau else 0.0)


@kinds
def test_set_functions_against_volumes(kind):
    """Each function written out in float64 volumes."""
    a, b = meeting(6, 3), meeting(6, 3)

    def volume(*some):
        return log_volume(intersection(*some, intersection_temperature=kind[0]), **options(kind)).exp()

    va, vb, vab = volume(a), volume(b), volume(a, b)
    wanted = {
        containment: vab / vb,
        complement: 1 - vab / vb,
        difference: va - vab,
        union: va + vb - vab,
        jaccard: vab / (va + vb - vab),
    }
    for function, exact in wanted.items():
        assert_close(function(a, b, **options(kind)).exp(), exact, 1e-10)


@kinds
def test_union_of_several(kind):
    a, b, c = (meeting(5, 2) for _ in range(3))

    def volume(*some):
        return log_volume(intersection(*some, intersection_temperature=kind[0]), **options(kind)).exp()

    total = volume(a) + volume(b) + volume(c) - volume(a, b) - volume(a, c) - volume(b, c) + volume(a, b, c)
    assert_close(union(a, b, c, **options(kind)).exp(), total, 1e-11)
    assert_close(union(a, **options(kind)), log_volume(a, **options(kind)), 1e-14)
    if kind[2] == "auto" and kind[:2] == (0.0, 0.0):
        assert_close(union(a, a, a, **options(kind)), log_volume(a, **options(kind)), 1e-12)


@kinds
def test_pairs_agree_with_elementwise(kind):
    """pairwise_* of [B, D] and [N, D] is the elementwise function of [B, 1, D] and [N, D], gradients too."""
    queries, items, more, less = (meeting(4, 3), meeting(6, 3), meeting(4, 3), any_boxes(4, 3))
    columns = Box(queries.z.unsqueeze(1), queries.Z.unsqueeze(1))
    both = intersection(columns, items, intersection_temperature=kind[0])
    dense = boxes.pairwise_log_volume(queries, items, **options(kind))
    assert_close(dense, log_volume(both, **options(kind)), 1e-12)
    inside = boxes.pairwise_containment(queries, items, **options(kind))
    assert_close(inside, containment(columns, items, **options(kind)), 1e-11)

    conjuncts = [Box(t.z.unsqueeze(1), t.Z.unsqueeze(1)) for t in (queries, more, less)]
    left = intersection(*conjuncts[:2], intersection_temperature=kind[0])
    joint = intersection(left, items, intersection_temperature=kind[0])
    wanted = difference(joint, conjuncts[2], **options(kind))
    found = boxes.pairwise_log_volume([queries, more], items, without=[less], **options(kind))
    assert_close(found.exp(), wanted.exp(), 1e-10)

    inputs = [t.clone().requires_grad_() for t in (*queries, *items)]
    pair = boxes.pairwise_containment(inputs[:2], inputs[2:], without=[less], **options(kind))
    columns = Box(inputs[0].unsqueeze(1), inputs[1].unsqueeze(1))
    both = intersection(columns, inputs[2:], intersection_temperature=kind[0])
    single = difference(both, conjuncts[2], **options(kind)) - log_volume(inputs[2:], **options(kind))
    seed = torch.where(pair.isfinite(), torch.randn(pair.shape, dtype=F64), 0.0)
    grads = [torch.autograd.grad(logs, inputs, seed) for logs in (pair, single)]
    oracle.assert_gradients(*grads, 1e-9)


def test_bessel_by_pairs_is_computed_again():
    """The exact volume takes its rows in pieces; the pieces give what the whole does."""
    queries, items = any_boxes(40, 3), any_boxes(30, 3)
    inputs = [t.clone().requires_grad_() for t in (*queries, *items)]
    before = reference.CHUNK
    results = []
    try:
        for chunk in (before, 200):
            reference.CHUNK = chunk
            logs = boxes.pairwise_log_volume(inputs[:2], inputs[2:], **options((0.3, 0.1, "bessel")))
            results.append((logs.detach(), *torch.autograd.grad(logs.sum(), inputs)))
    finally:
        reference.CHUNK = before
    for whole, pieces in zip(*results, strict=True):
        assert_close(pieces, whole, 1e-13)


def test_bessel_and_softplus_agree_for_wide_boxes():
    """The quality of the approximation that the paper's softplus is, at w / tau of 16 to -4."""
    w = torch.tensor([16.0, 8, 4, 2, 1, 0, -1, -2, -4], dtype=F64).unsqueeze(1)
    box = Box(torch.zeros_like(w), w)
    soft, exact = (log_volume(box, **options((1.0, 1.0, volume))) for volume in ("gumbel", "bessel"))
    quotient = (soft - exact).exp()
    wanted = torch.tensor([1.0000, 0.9997, 0.989, 0.963, 0.989, 1.203, 2.22, 9.1, 2.3e4], dtype=F64)
    assert ((quotient / wanted - 1).abs() <= 0.02).all()


@pytest.mark.parametrize("dtype", [F64, F32], ids=["float64", "float32"])
def test_bessel_far_away(dtype):
    """Finite with finite gradients everywhere, on the line log(w - 2 gamma tau) for wide boxes."""
    w = (
        torch.tensor([-1e6, -1e3, -100.0, -10, 0, 10, 30, 100, 1e3, 1e6], dtype=dtype)
        .unsqueeze(1)
        .requires_grad_()
    )
    logs = log_volume((torch.zeros_like(w), w), **options((1.0, 1.0, "bessel")))
    (grad,) = torch.autograd.grad(logs.sum(), w)
    assert logs.isfinite().all() and grad.isfinite().all()
    line = (w.detach()[6:, 0].double() - 2 * oracle.GAMMA).log()
    assert_close(logs.detach()[6:], line, 1e-6)
    assert ((logs.diff() >= 0) if dtype == F64 else (logs.diff() >= -1e-6)).all()


# Algebra


def draws(draw_seed, count, dim, batch=4):
    torch.manual_seed(draw_seed)
    return [any_boxes(batch, dim) for _ in range(count)]


algebra = given(
    seed=st.integers(0, 10**6),
    count=st.integers(2, 5),
    dim=st.integers(1, 12),
    kind=st.sampled_from(KINDS),
)
some = settings(max_examples=60, deadline=None)


@some
@algebra
def test_adding_a_conjunct_never_raises_the_volume(seed, count, dim, kind):
    found = draws(seed, count, dim)
    logs = [
        log_volume(intersection(*found[:n], intersection_temperature=kind[0]), **options(kind))
        for n in range(1, count + 1)
    ]
    items = any_boxes(5, dim, dtype=F32)
    low = [Box(z.float(), Z.float()) for z, Z in found]
    pairs = [boxes.pairwise_log_volume(low[:n], items, **options(kind)) for n in range(1, count + 1)]
    for sequence, slack in ((logs, 1e-12), (pairs, 1e-5)):
        for more, fewer in zip(sequence[1:], sequence, strict=False):
            assert (more <= fewer + slack * (1 + fewer.abs().nan_to_num(posinf=0, neginf=0))).all()


@some
@algebra
def test_probabilities_are_at_most_one(seed, count, dim, kind):
    """log P <= 0 without slack, float32 too; boxes inside others are where rounding would show."""
    a, b, *rest = draws(seed, count, dim)
    inner = Box(a.z + 1e-3, a.Z - 1e-3)
    for x, y in ((a, b), (a, a), (a, inner), (inner, a)):
        x32, y32 = (Box(t.z.float(), t.Z.float()) for t in (x, y))
        for f in (containment, complement, jaccard):
            assert (f(x, y, **options(kind)) <= 0).all() and (f(x32, y32, **options(kind)) <= 0).all()
        for without in ([], rest[:2]):
            inside = boxes.pairwise_containment([x32, *rest], y32, without=without, **options(kind))
            assert (inside <= 0).all()


@some
@algebra
def test_order_does_not_matter(seed, count, dim, kind):
    found = draws(seed, count, dim)
    order = torch.randperm(count).tolist()
    shuffled = [found[n] for n in order]
    both = [intersection(*f, intersection_temperature=kind[0]) for f in (found, shuffled)]
    assert_close(torch.stack(both[1]), torch.stack(both[0]), 1e-14)
    first, second = (union(*f, **options(kind)) for f in (found, shuffled))
    seen = first > -20
    assert torch.allclose(first[seen].exp(), second[seen].exp(), rtol=1e-9, atol=1e-12)
    a, b = found[:2]
    assert torch.allclose(
        jaccard(a, b, **options(kind)).exp(), jaccard(b, a, **options(kind)).exp(), rtol=1e-10
    )
    nested = intersection(intersection(*found[:-1], intersection_temperature=kind[0]), found[-1],
                          intersection_temperature=kind[0])  # fmt: skip
    assert_close(torch.stack(nested), torch.stack(both[0]), 1e-14)


@some
@given(
    seed=st.integers(0, 10**6),
    dim=st.integers(1, 12),
    kind=st.sampled_from(KINDS),
    scale=st.floats(1e-3, 1e3),
    shift=st.floats(-10, 10),
)
def test_scale_and_translation(seed, dim, kind, scale, shift):
    """(z, Z, tau, nu) s -> log volume + D log s; z + c, Z + c -> the same; by pairs and elementwise."""
    a, b = draws(seed, 2, dim)
    tau, nu, volume = kind
    scaled = options((tau * scale, nu * scale, volume))
    moved = [Box(t.z * scale + shift * scale, t.Z * scale + shift * scale) for t in (a, b)]
    for pairs in (False, True):

        def volumes(x, y, settings, pairs=pairs):
            if pairs:
                return boxes.pairwise_log_volume(x, y, **settings)
            both = intersection(x, y, intersection_temperature=settings["intersection_temperature"])
            return log_volume(both, **settings)

        before, after = volumes(a, b, options(kind)), volumes(*moved, scaled)
        finite = before.isfinite() & after.isfinite()
        assert torch.equal(before.isinf(), after.isinf()) or kind[1] == 0
        gate = (1e-6 if tau > 0 and (nu == 0 or volume in ("hard", "bessel")) else 1e-9) * (1 + before.abs())
        error = (after - before - dim * math.log(scale)).abs()
        assert (error[finite] <= gate[finite]).all()


@some
@algebra
def test_union_and_intersection_add_up(seed, count, dim, kind):
    """P(a or b) + P(a and b) = P(a) + P(b), of volumes, to 1e-5 in float32."""
    a, b = draws(seed, 2, dim)
    for dtype, gate in ((F64, 1e-11), (F32, 1e-5)):
        x, y = (Box(t.z.to(dtype), t.Z.to(dtype)) for t in (a, b))
        both = (
            log_volume(intersection(x, y, intersection_temperature=kind[0]), **options(kind)).double().exp()
        )
        sides = sum(log_volume(t, **options(kind)).double().exp() for t in (x, y))
        total = union(x, y, **options(kind)).double().exp() + both
        assert ((total - sides).abs() <= gate * (1 + sides)).all()
        rest = difference(x, y, **options(kind)).double().exp() + both
        own = log_volume(x, **options(kind)).double().exp()
        assert ((rest - own).abs() <= gate * (1 + own)).all()


# Edges


def test_a_gumbel_box_and_itself_are_independent():
    a = Box(torch.zeros(4, dtype=F64), torch.ones(4, dtype=F64))
    for tau in (0.1, 0.01):
        meets, how = intersection(a, a, intersection_temperature=tau), options((tau, 0.1, "gumbel"))
        assert_close(meets.side, a.side - 2 * tau * math.log(2), 1e-14)
        assert containment(a, a, **how) < 0 and jaccard(a, a, **how) < 0
        assert union(a, a, **how) > log_volume(a, **how) and difference(a, a, **how) > -math.inf
    assert containment(a, a, **options((1e-6, 1e-6, "gumbel"))) > -1e-4
    for kind in ("soft", "hard"):
        how = options((0.0, 0.1, kind))
        assert containment(a, a, **how) == 0 and jaccard(a, a, **how) == 0
        assert difference(a, a, **how) == -math.inf


def test_nothing_remains():
    """NOT of something larger: -inf with gradient 0; and where P(a | b) = 1."""
    outer = Box(torch.full((2, 2), -1.0, dtype=F64), torch.full((2, 2), 3.0, dtype=F64))
    z = torch.zeros(2, 2, dtype=F64, requires_grad=True)
    Z = torch.ones(2, 2, dtype=F64, requires_grad=True)
    results = [
        difference((z, Z), outer, **HARD),
        complement(outer, (z, Z), **HARD),
        boxes.pairwise_log_volume((z, Z), (z, Z), without=[outer], **HARD),
        boxes.pairwise_containment((z, Z), (z, Z), without=[(z, Z)], **HARD),
    ]
    for logs in results:
        assert (logs == -math.inf).all()
        assert all((g == 0).all() for g in torch.autograd.grad(logs.sum(), (z, Z)))


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_disjoint_and_empty_hard_boxes(function):
    a = Box(torch.zeros(1, 2), torch.ones(1, 2))
    b = Box(torch.full((1, 2), 2.0), torch.full((1, 2), 3.0))
    empty = Box(torch.ones(1, 2), torch.ones(1, 2))
    wanted = {containment: 0.0, complement: 1.0, difference: 1.0, union: 2.0, jaccard: 0.0}[function]
    inputs = [t.clone().requires_grad_() for t in (*a, *b)]
    found = function(inputs[:2], inputs[2:], **HARD)
    assert abs(found.exp().item() - wanted) < 1e-6
    assert all(g.isfinite().all() for g in torch.autograd.grad(found.exp().sum(), inputs))
    assert not function(a, empty, **HARD).isnan().any()
    assert not function(empty, empty, **HARD).isnan().any()


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("dtype", [F64, F32], ids=["float64", "float32"])
def test_far_apart_keeps_the_slope(function, dtype):
    """1000 tau apart: log P has the slope 1 / nu per dimension; the others have finite gradients too."""
    tau = nu = 0.1
    a = [
        torch.zeros(1, 2, dtype=dtype, requires_grad=True),
        torch.ones(1, 2, dtype=dtype, requires_grad=True),
    ]
    b = [torch.full((1, 2), 101.0, dtype=dtype), torch.full((1, 2), 102.0, dtype=dtype)]
    logs = function(a, b, **options((tau, nu, "auto")))
    grads = torch.autograd.grad(logs.sum(), a)
    assert logs.isfinite().all() and all(g.isfinite().all() for g in grads)
    if function is containment:
        assert ((grads[1] * nu - 1).abs() <= 1e-5).all()
        assert logs.item() < -1900


@pytest.mark.parametrize("function", [*FUNCTIONS, log_volume], ids=lambda f: f.__name__)
@kinds
def test_derivatives(function, kind):
    """First and second derivatives, of corners and of temperatures per dimension, away from ties."""
    a, b = meeting(2, 2), meeting(2, 2)
    inputs = [t.clone().requires_grad_() for t in (*a, *b)]

    def call(z, Z, y, Y):
        args = [(z, Z)] if function is log_volume else [(z, Z), (y, Y)]
        return function(*args, **options(kind))

    used = inputs[:2] if function is log_volume else inputs
    assert torch.autograd.gradcheck(lambda *t: call(*t, *inputs[len(t) :]), used)
    assert torch.autograd.gradgradcheck(lambda *t: call(*t, *inputs[len(t) :]), used, atol=1e-4)


@pytest.mark.parametrize("volume", ["gumbel", "soft", "bessel"])
def test_temperatures_learn(volume):
    """Per dimension or per box, they broadcast against the corners and have gradients."""
    a, b = meeting(3, 2), meeting(3, 2)
    for shape in ((2,), (3, 1), ()):
        tau = (torch.rand(shape, dtype=F64) + 0.1).requires_grad_()
        nu = (torch.rand(shape, dtype=F64) + 0.1).requires_grad_()

        def call(tau, nu):
            logs = containment(a, b, **options((tau, nu, volume)))
            return logs + (0.0 * nu).sum()  # the exact volume has no nu

        assert torch.autograd.gradcheck(call, (tau, nu))
    plain = containment(a, b, **options((0.3, 0.2, volume)))
    full = (torch.full((2,), t, dtype=F64) for t in (0.3, 0.2))
    assert_close(containment(a, b, **options((*full, volume))), plain, 1e-13)


@kinds
def test_infinite_and_nan_corners(kind):
    a = any_boxes(4, 3)
    free = Box.unconstrained(4, 3, dtype=F64)
    inputs = [t.clone().requires_grad_() for t in a]
    both = intersection(free, inputs, intersection_temperature=kind[0])
    assert torch.equal(both.z, a.z) and torch.equal(both.Z, a.Z)
    logs = log_volume(both, **options(kind))
    assert torch.equal(logs, log_volume(a, **options(kind)))
    assert all(g.isfinite().all() for g in torch.autograd.grad(logs[logs.isfinite()].sum(), inputs))
    assert (log_volume(free, **options(kind)) == math.inf).all()
    a.z[1, 2] = math.nan
    bad = log_volume(a, **options(kind))
    assert bad[1].isnan() and not bad[[0, 2, 3]].isnan().any()


def test_leading_dimensions_broadcast():
    a, b = any_boxes(5, 1, 3, dtype=F32), any_boxes(4, 3, dtype=torch.bfloat16)
    for function in FUNCTIONS:
        found = function(a, b, **options((0.1, 0.1, "auto")))
        assert found.shape == (5, 4) and found.dtype == F32
    assert log_volume(any_boxes(3, dtype=F32), **HARD).shape == ()
    assert torch.equal(log_volume(any_boxes(2, 0), **HARD), torch.zeros(2, dtype=F64))
    assert intersection(a, b, any_boxes(3), intersection_temperature=0.1).z.dtype == F64


def test_inputs_are_not_written_to():
    a, b = any_boxes(5, 3), any_boxes(5, 3)
    before = [t.clone() for t in (*a, *b)]
    for function in FUNCTIONS:
        function(a, b, **options((0.1, 0.1, "auto")))
    intersection(a, b, intersection_temperature=0.1)
    assert all(torch.equal(x, y) and x._version == 0 for x, y in zip((*a, *b), before, strict=True))
    assert a.shape == (5, 3)


ONE = Box(torch.zeros(2, 3), torch.ones(2, 3))
TWO = Box(torch.zeros(2, 2), torch.ones(2, 2))
SOFT = options((0.1, 0.1, "auto"))
ZERO = torch.zeros(3)
BAD_CALLS = [
    (lambda: intersection(intersection_temperature=0.1), ValueError, "boxes must be at least one box"),
    (lambda: union(**SOFT), ValueError, "boxes must be at least one box, got none"),
    (lambda: union(*[ONE] * 11, **SOFT), ValueError, "boxes must be at most 10, got 11"),
    (lambda: union([ONE, ONE], **SOFT), TypeError, r"boxes\[0\] .* got a list of boxes: pass the boxes"),
    (lambda: intersection((ONE, ONE), intersection_temperature=0.1), TypeError, "pass the boxes as separate"),
    (lambda: union(ONE, ONE.z, **SOFT), TypeError, r"boxes\[1\] must be a Box or a pair"),
    (lambda: union(ONE, TWO, **SOFT), ValueError, r"boxes\[1\] must have the 3 dimensions of boxes\[0\]"),
    (lambda: intersection(ONE, intersection_temperature=-1.0), ValueError, "intersection_temperature must"),
    (lambda: log_volume(ONE.z, **SOFT), TypeError, r"box must be a Box or a pair \(z, Z\) of tensors, got a"),
    (lambda: log_volume(ONE, **options((0.1, 0.1, "no"))), ValueError, "volume must be one of 'auto', 'gum"),
    (lambda: containment(ONE, TWO, **SOFT), ValueError, "b must have the 3 dimensions of a, got 2"),
    (lambda: jaccard(ONE, None, **SOFT), TypeError, "b must be a Box or a pair .* got NoneType"),
    (lambda: difference((ONE.z, None), ONE, **SOFT), TypeError, "a must be a Box .* of Tensor, NoneType"),
    (lambda: complement(ONE, ONE.rows([0, 1, 1]), **SOFT), ValueError, "b must have leading dimensions that"),
    (lambda: jaccard(ONE, ONE, **options((0, 1, "gumbel"))), ValueError, "intersection_temperature must"),
    (lambda: jaccard(ONE, ONE, **options((ZERO, 1, "auto"))), ValueError, "above 0 where it is a tensor"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "kind", "message"), BAD_CALLS, ids=[e[2] for e in BAD_CALLS])
def test_error_of_set_functions(call, kind, message):
    with pytest.raises(kind, match=message):
        call()


def test_everything_is_exported():
    for name in boxes.__all__:
        assert getattr(boxes, name).__doc__
