"""The k best items: the same as sorting all scores, with and without pruning; ties, NaN, -inf, k > N."""

import math

import boxes_oracle as oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from suite import ALL_DTYPES, LargestTensor, assert_same_bits, layouts, memory

from pyops import boxes
from pyops.boxes import box_topk, pairwise_containment, pairwise_log_volume
from pyops.reference import boxes as reference

F64, F32 = torch.float64, torch.float32
MODES = [(0.1, 0.1), (0.1, 0.4), (0.0, 0.2), (0.2, 0.0), (0.0, 0.0), (0.01, 0.01)]
modes = pytest.mark.parametrize(("tau", "nu"), MODES, ids=lambda v: f"{v:g}")
dtypes = pytest.mark.parametrize("dtype", ALL_DTYPES, ids=lambda d: str(d).removeprefix("torch."))
prunes = pytest.mark.parametrize("prune", [True, False], ids=["pruned", "whole"])


def temperatures(tau, nu):
    return {"intersection_temperature": tau, "volume_temperature": nu}


def big(*shape, dtype=F64):
    """Users: boxes in the unit cube with sides that meet most items in many dimensions."""
    z = torch.rand(*shape, dtype=F64) * 0.4
    return z.to(dtype), (z + 0.4 + 0.2 * torch.rand(*shape, dtype=F64)).to(dtype)


def small(*shape, dtype=F64):
    z = torch.rand(*shape, dtype=F64) * 0.8
    return z.to(dtype), (z + 0.2 * torch.rand(*shape, dtype=F64)).to(dtype)


def assert_best(found, dense, k, tie=1e-6):
    """Values are those of the dense scores; the same set, except among scores within ``tie`` of the last."""
    values, indices = oracle.topk(dense, k)
    assert found.values.shape == found.indices.shape == (len(dense), k)
    assert found.values.dtype == dense.dtype and found.indices.dtype == torch.int64
    for b in range(len(dense)):
        got, want = found.indices[b].tolist(), indices[b].tolist()
        assert [n < 0 for n in got] == [n < 0 for n in want]
        assert len(set(got) - {-1}) == len([n for n in got if n >= 0]), "an item twice"
        last = min((v for v in values[b].tolist() if math.isfinite(v)), default=0.0)
        for n in set(got) ^ set(want):
            assert abs(dense[b, n].item() - last) <= tie * max(1, abs(last)), f"query {b}: item {n}"
        own = dense[b][[n for n in got if n >= 0]]
        shown = found.values[b][: len(own)]
        assert torch.equal(own.isnan(), shown.isnan())
        finite = own.isfinite()
        assert torch.equal(own[~finite & ~own.isnan()], shown[~finite & ~own.isnan()])
        assert ((own - shown)[finite].abs() <= tie * own[finite].abs().clamp(min=1)).all()
        assert (shown[:-1] >= shown[1:])[~shown[1:].isnan()].all(), "not descending"


@prunes
@modes
@dtypes
def test_dense(tau, nu, dtype, prune):
    """Containment and volume, k of 1 to all items, sizes around tiles."""
    options = temperatures(tau, nu)
    for batch, count, dim, k in (
        (5, 200, 24, 10),
        (1, 37, 5, 3),
        (9, 16, 3, 16),
        (4, 129, 64, 50),
        (17, 65, 7, 1),
    ):
        queries, items = big(batch, dim, dtype=dtype), small(count, dim, dtype=dtype)
        volume = pairwise_log_volume(queries, items, **options)
        found = box_topk(queries, items, k, score="volume", prune=prune, **options)
        assert_best(found, volume, k)
        dense = pairwise_containment(queries, items, **options)
        assert_best(box_topk(queries, items, k, prune=prune, **options), dense, k)


@prunes
@modes
@pytest.mark.parametrize("negations", [1, 2, 3])
def test_dense_composed(tau, nu, negations, prune):
    """AND of two, AND NOT of some."""
    options = temperatures(tau, nu)
    for dtype, tie in ((F64, 1e-9), (F32, 2e-5)):
        queries = [big(6, 8, dtype=dtype), big(1, 8, dtype=dtype)]
        without = [small(6, 8, dtype=dtype) for _ in range(negations)]
        items = small(150, 8, dtype=dtype)
        dense = pairwise_containment(queries, items, without=without, **options)
        found = box_topk(queries, items, 12, without=without, prune=prune, **options)
        assert_best(found, dense, 12, tie)
        exact = oracle.composed(
            [[t.double() for t in q] for q in queries],
            [[t.double() for t in w] for w in without],
            [t.double() for t in items],
            tau,
            nu,
        )
        exact = exact - oracle.log_volume([t.double() for t in items], tau, nu)
        kept = exact.gather(1, found.indices)
        seen = (
            kept > -8
        ) & found.values.isfinite()  # below, the difference of two volumes has lost its digits
        assert ((kept - found.values).abs()[seen] <= (1e-9 if dtype == F64 else 2e-3)).all()


@settings(max_examples=100, deadline=None)
@given(
    sizes=st.tuples(st.integers(0, 12), st.integers(0, 150), st.integers(0, 40)),
    k=st.integers(1, 60),
    mode=st.sampled_from(MODES),
    dtype=st.sampled_from(ALL_DTYPES),
    score=st.sampled_from(["containment", "volume"]),
    negated=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_pruning_changes_nothing(sizes, k, mode, dtype, score, negated, seed):
    torch.manual_seed(seed)
    batch, count, dim = sizes
    queries, items = big(batch, dim, dtype=dtype), small(count, dim, dtype=dtype)
    options = {**temperatures(*mode), "score": score, "without": [small(batch, dim, dtype=dtype)] * negated}
    pruned, whole = (box_topk(queries, items, k, prune=prune, **options) for prune in (True, False))
    assert_same_bits(tuple(pruned), tuple(whole), "pruned")


@prunes
def test_dense_ties_go_to_the_lower_index(prune):
    """Equal items, in runs that cross tiles: the first ones, in order."""
    items = [t.repeat_interleave(25, 0) for t in small(8, 6, dtype=F32)]
    queries = big(4, 6, dtype=F32)
    options = temperatures(0.1, 0.1)
    dense = pairwise_containment(queries, items, **options)
    values, indices = oracle.topk(dense, 60)
    found = box_topk(queries, items, 60, prune=prune, **options)
    assert torch.equal(found.indices, indices)
    assert ((found.values - values).abs() <= 1e-6 * values.abs().clamp(min=1)).all()
    # all alike
    same = [t[:1].expand(70, 6) for t in items]
    found = box_topk(queries, same, 50, prune=prune, **options)
    assert torch.equal(found.indices, torch.arange(50).expand(4, 50))


@prunes
def test_dense_scores_of_minus_infinity(prune):
    """Items that a hard query does not meet, and empty ones, come last, by index, and not as missing."""
    z = torch.tensor([[0.1], [5.0], [0.2], [6.0], [0.5]])
    items = z, z + torch.tensor([[0.1], [1.0], [0.0], [1.0], [1.0]])  # the third one is empty
    found = box_topk((torch.zeros(1), torch.ones(1)), items, 7, prune=prune, **temperatures(0.0, 0.0))
    assert found.indices.tolist() == [0, 4, 1, 2, 3, -1, -1]
    assert found.values.tolist()[2:] == [-math.inf] * 5
    assert torch.allclose(found.values[:2].exp(), torch.tensor([1.0, 0.5]))
    # a negation that takes everything
    everything = torch.full((1,), -9.0), torch.full((1,), 9.0)
    gone = box_topk(
        (torch.zeros(1), torch.ones(1)), items, 2, without=[everything], prune=prune, **temperatures(0.0, 0.0)
    )
    assert gone.indices.tolist() == [0, 1] and (gone.values == -math.inf).all()


@prunes
@modes
def test_dense_nan_is_lowest(tau, nu, prune):
    queries, items = big(3, 5, dtype=F32), small(40, 5, dtype=F32)
    items[0][7, 2] = items[1][21, 0] = math.nan
    queries[0][1, 1] = math.nan
    options = temperatures(tau, nu)
    dense = pairwise_containment(queries, items, **options)
    for k in (3, 38, 40, 45):
        found = box_topk(queries, items, k, prune=prune, **options)
        assert_best(found, dense, k)
        assert found.values[1][: min(k, 40)].isnan().all()
        assert found.indices[1].tolist() == [n if n < 40 else -1 for n in range(k)]
        clean = box_topk([t[::2] for t in queries], items, k, prune=prune, **options)
        assert torch.equal(clean.indices, found.indices[::2])
    assert found.indices[0, 38:].tolist() == [7, 21, -1, -1, -1, -1, -1]
    assert found.values[0, 38:40].isnan().all() and (found.values[0, 40:] == -math.inf).all()


@prunes
@dtypes
def test_edge_of_empty_sizes(dtype, prune):
    options = {**temperatures(0.1, 0.1), "prune": prune}
    none = box_topk(big(3, 4, dtype=dtype), small(0, 4, dtype=dtype), 2, **options)
    assert (none.values == -math.inf).all() and (none.indices == -1).all() and none.values.shape == (3, 2)
    assert box_topk(big(0, 4, dtype=dtype), small(5, 4, dtype=dtype), 2, **options).indices.shape == (0, 2)
    flat = box_topk(big(3, 0, dtype=dtype), small(5, 0, dtype=dtype), 2, **options)
    assert torch.equal(flat.values, torch.zeros_like(flat.values))
    assert torch.equal(flat.indices, torch.tensor([[0, 1]] * 3))


@dtypes
def test_layouts(dtype):
    """Any strides, and no input is written to."""
    queries, items = big(6, 9, dtype=dtype), small(40, 9, dtype=dtype)
    options = temperatures(0.1, 0.2)
    wanted = box_topk(queries, items, 5, **options)
    for name in layouts(queries[0]):
        views = [tuple(layouts(t)[name] for t in box) for box in (queries, items)]
        before = [memory(t).clone() for box in views for t in box]
        assert_same_bits(tuple(box_topk(*views, 5, **options)), tuple(wanted), name)
        after = [memory(t) for box in views for t in box]
        assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))


def test_deterministic_and_threads():
    queries, items = big(20, 16, dtype=F32), small(3000, 16, dtype=F32)
    wanted = box_topk(queries, items, 10, **temperatures(0.1, 0.1))
    for threads in (1, 2, 2, 1):
        torch.set_num_threads(threads)
        assert_same_bits(tuple(box_topk(queries, items, 10, **temperatures(0.1, 0.1))), tuple(wanted), "run")


def test_item_log_volume_is_reused():
    queries, items = big(2, 3, 6, dtype=F32), small(50, 6, dtype=F32)
    options = temperatures(0.1, 0.2)
    own = pairwise_log_volume(boxes.Box.unconstrained(6), items, **options)
    found = box_topk(queries, items, 4, item_log_volume=own, **options)
    wanted = box_topk(queries, items, 4, **options)
    assert found.values.shape == (2, 3, 4)
    assert_same_bits(tuple(found), tuple(wanted), "given")
    shifted = box_topk(queries, items, 4, item_log_volume=own + 1, **options)
    assert torch.equal(shifted.indices, wanted.indices) and (shifted.values <= wanted.values - 0.99).all()
    mixed = box_topk(queries, items, 4, item_log_volume=own.double(), **options)
    assert torch.equal(mixed.indices, wanted.indices)


def test_no_gradient_is_recorded():
    queries = [t.requires_grad_() for t in big(2, 3)]
    found = box_topk(queries, small(9, 3), 2, without=[small(2, 3)], **temperatures(0.1, 0.1))
    assert not found.values.requires_grad
    assert (found.values <= 0).all()


def test_memory():
    """The matrix of scores is not held."""
    queries, items = big(64, 8, dtype=F32), small(20000, 8, dtype=F32)
    from pyops import which

    if which("box_topk", queries[0]) == "reference":
        pytest.skip("the reference holds some rows of scores")

    with LargestTensor() as largest:
        box_topk(queries, items, 10, **temperatures(0.1, 0.1))
    assert largest.bytes <= items[0].numel() * 4


def test_probabilities_of_one_are_equal():
    """A box within the query has P = 1 to rounding: the lower index is the better."""
    items = boxes.Box.uniform(300, 4, largest=0.3, generator=torch.Generator().manual_seed(0))
    query = torch.full((1, 4), -0.4), torch.full((1, 4), 1.48)
    options = {"intersection_temperature": 0.02, "volume_temperature": 0.02}
    dense = boxes.pairwise_containment(query, items, **options)
    assert (dense == 0).sum() > 50
    for prune in (True, False):
        values, indices = boxes.box_topk(query, items, 20, prune=prune, **options)
        assert (values == 0).all() and (indices[0].diff() > 0).all()


@pytest.mark.parametrize("dim", [64, 256, 1024])
def test_pruning_among_near_duplicates(dim):
    """Whole tiles of items whose scores differ by rounding only."""
    g = torch.Generator().manual_seed(6)
    items = boxes.Box.uniform(60, dim, largest=0.3, generator=g)
    items = tuple(t.repeat_interleave(16, 0) * 2 for t in items)
    query = torch.full((4, dim), -1.1), torch.full((4, dim), 3.1)
    options = {"intersection_temperature": 0.1, "volume_temperature": 0.1}
    for k in (1, 100):
        a, b = (boxes.box_topk(query, items, k, prune=prune, **options) for prune in (True, False))
        assert torch.equal(a.values, b.values) and torch.equal(a.indices, b.indices)


def test_nan_of_an_excluded_box_that_excludes_nothing():
    query, item = (torch.zeros(1, 2), torch.ones(1, 2)), (torch.full((1, 2), 5.0), torch.full((1, 2), 6.0))
    nan = torch.full((1, 2), math.nan), torch.ones(1, 2)
    hard = {"intersection_temperature": 0, "volume_temperature": 0}
    assert boxes.pairwise_containment(query, item, without=[nan], **hard).isnan().all()
    assert boxes.box_topk(query, item, 1, without=[nan], **hard).values.isnan().all()


@pytest.mark.parametrize("terms", [3, 5, 7])
def test_op_takes_any_number_of_terms(terms):
    """Rows of a query may lie anywhere among those that are packed together."""
    g = torch.Generator().manual_seed(terms)
    z, Z = (torch.rand(9, terms, 6, generator=g) * 0.2 + shift for shift in (0.0, 0.8))
    iz, iZ = (torch.rand(40, 6, generator=g) * 0.2 + shift for shift in (0.1, 0.6))
    signs = torch.ones(9, terms)
    for tau, nu in ((0.1, 0.1), (0.0, 0.0)):
        args = (z, Z, signs, iz, iZ, None, tau, nu, 0.1 * tau, 12, False)
        found, wanted = torch.ops.pyops.box_topk(*args), reference.box_topk(*args)
        torch.testing.assert_close(found[0], wanted[0], rtol=1e-5, atol=1e-5)
        assert torch.equal(found[1], wanted[1])
