"""The shared suite on pairwise box volumes and sampled scores, in every mode, and every error message."""

import math
from pathlib import Path

import boxes_oracle as oracle
import pytest
import torch
from suite import Case, Spec, assert_close, op_suite

from pyops import boxes
from pyops.boxes import box_topk, pairwise_containment, pairwise_log_volume, sampled_scores
from pyops.compat.box_embeddings import BoxTensor
from pyops.nn import BoxEmbedding

F64, F32 = torch.float64, torch.float32
# (tau, nu): equal, different both ways, soft, hard sides of smooth corners, hard, small.
MODES = [(0.1, 0.1), (0.1, 0.4), (0.3, 0.1), (0.0, 0.2), (0.2, 0.0), (0.0, 0.0), (0.01, 0.01)]


def gate(dtype):
    return 1e-12 if dtype == F64 else 2e-6


def gradient_gate(dtype):
    """float32 sums; 16-bit gradients are rounded at the end."""
    return {F32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 2e-3}[dtype]


def temperatures(tau, nu):
    return {"intersection_temperature": tau, "volume_temperature": nu}


def settings(tau, nu):
    """tau, nu and offset of the op."""
    return tau, nu, oracle.offset(tau, nu)


def overlapping(shapes, dtype):
    """Boxes that all meet: hard volumes are finite."""
    qz, qZ, iz, iZ = (torch.rand(shape, dtype=F64) for shape in shapes)
    return tuple(t.to(dtype) for t in (qz, qZ + 1.5, iz, iZ + 1.5))


def apart(shapes, dtype):
    """Boxes that meet in some dimensions, and are some units apart in others."""
    qz, qZ, iz, iZ = (torch.randn(shape, dtype=F64) for shape in shapes)
    return tuple(t.to(dtype) for t in (qz, qz + qZ.exp(), iz, iz + iZ.exp()))


def pair_shapes(queries, items, dim):
    return ((queries, dim),) * 2 + ((items, dim),) * 2


def nus(z):
    """Different volume temperatures per dimension."""
    return torch.linspace(0.05, 0.3, z.shape[-1], dtype=F64 if z.dtype == F64 else F32).to(z.device)


def taus(z):
    return nus(z).flip(0) + 0.05


def result_dtypes(dtype):
    return [F64 if dtype == F64 else F32]


def case(name, call, reference, op="box_log_volumes", op_args=None, make=apart, small=(3, 4, 2), **changes):
    shapes, small = pair_shapes(9, 37, 21), pair_shapes(*small)
    return Case(
        name=name,
        op=f"pyops::{op}",
        call=call,
        op_args=op_args or (lambda *t: (*t, *settings(0.1, 0.1), None)),
        oracle=reference,
        make=make,
        batched=False,
        result_dtypes=result_dtypes,
        gate=gate,
        **{"shapes": shapes, "small": small, "gradient_gate": gradient_gate, **changes},
    )


def mode_case(tau, nu):
    return case(
        f"tau={tau:g} nu={nu:g}",
        lambda qz, qZ, iz, iZ: pairwise_log_volume((qz, qZ), (iz, iZ), **temperatures(tau, nu)),
        lambda *t: oracle.pairwise(*t, tau, nu),
        op_args=lambda *t: (*t, *settings(tau, nu), None),
        make=apart if nu > 0 else overlapping,
    )


def composed(score):
    """Two conjuncts and two negations made of the queries."""

    def parts(qz, qZ):
        return [(qz, qZ), (qz - 0.5, qZ + 0.1)], [(qz + 0.6, qZ + 1.0), (qz - 1.0, qZ - 0.7)]

    def call(qz, qZ, iz, iZ):
        queries, without = parts(qz, qZ)
        return score(queries, (iz, iZ), without=without, **temperatures(0.2, 0.15))

    def reference(qz, qZ, iz, iZ):
        volume = oracle.composed(*parts(qz, qZ), (iz, iZ), 0.2, 0.15)
        return volume - oracle.log_volume((iz, iZ), 0.2, 0.15) * (score is pairwise_containment)

    return call, reference


PAIRS = [
    *(mode_case(*mode) for mode in MODES),
    case(
        "nus",
        lambda qz, qZ, iz, iZ: pairwise_log_volume((qz, qZ), (iz, iZ), **temperatures(0.1, nus(qz))),
        lambda *t: oracle.pairwise(*t, 0.1, nus(t[0])),
        op_args=lambda *t: (*t, *settings(0.1, 0.1), nus(t[0])),
    ),
    case(
        "taus nus",
        lambda qz, qZ, iz, iZ: pairwise_log_volume((qz, qZ), (iz, iZ), **temperatures(taus(qz), nus(qz))),
        lambda *t: sum(
            oracle.pairwise(*(x[:, d : d + 1] for x in t), taus(t[0])[d].item(), nus(t[0])[d].item())
            for d in range(t[0].shape[1])
        ),
        op_args=lambda *t: (*t, *settings(1.0, 0.0), nus(t[0])),
    ),
    case(
        "containment",
        lambda qz, qZ, iz, iZ: pairwise_containment((qz, qZ), (iz, iZ), **temperatures(0.1, 0.1)),
        lambda *t: oracle.containment(*t, 0.1, 0.1),
    ),
    # In 16 bits the parts would be other boxes than the oracle's.
    case("composed", *composed(pairwise_log_volume), make=overlapping, dtypes=(F64, F32)),
    case("composed containment", *composed(pairwise_containment), make=overlapping, dtypes=(F64, F32)),
]
EDGES = [
    pair_shapes(0, 3, 4),
    pair_shapes(3, 0, 4),
    pair_shapes(0, 0, 4),
    pair_shapes(0, 3, 0),
    pair_shapes(1, 1, 1),
    pair_shapes(1, 1, 17),
    pair_shapes(1, 33, 3),
    pair_shapes(33, 1, 3),
    pair_shapes(5, 7, 1),
]

a, b = boxes.Box(torch.zeros(2, 3), torch.ones(2, 3)), boxes.Box(torch.zeros(4, 3), torch.ones(4, 3))
narrow = boxes.Box(torch.zeros(4, 2), torch.ones(4, 2))
HARD = temperatures(0.0, 0.0)
SOFT = temperatures(0.1, 0.1)


def error(kind, message, call, *args, **kwargs):
    return (lambda: call(*args, **kwargs)), kind, message


def pair_errors(call, *more):
    """What the functions of queries and items refuse alike; ``more``: further arguments."""

    def wrong(kind, message, queries=a, items=b, options=SOFT, **changes):
        return error(kind, message, call, queries, items, *more, **{**options, **changes})

    meta = boxes.Box(*(t.to("meta") for t in b))
    return [
        wrong(TypeError, r"queries must be a Box, a pair \(z, Z\) or a sequence of them, got a ten", a.z),
        wrong(TypeError, r"queries\[0\] must be a Box .*, got a tensor of shape \(2, 3\)", [a.z, a.z, a.z]),
        wrong(ValueError, "queries must have at least one box, got an empty list", []),
        wrong(ValueError, "queries must have at least one box, got an empty tuple", ()),
        wrong(TypeError, r"queries\[1\] must be a Box .*, got NoneType", [a, None]),
        wrong(TypeError, r"items must be a Box or a pair \(z, Z\) of tensors, got a list of nothing", a, []),
        wrong(TypeError, r"items must be a Box .*, got a tuple of Box, Box", a, (b, b)),
        wrong(TypeError, "queries.z must be float64, .* got torch.int64", (a.z.long(), a.Z.long())),
        wrong(TypeError, "queries.Z must be a dense tensor", (a.z, a.Z.to_sparse())),
        wrong(TypeError, "items.z must be float64, .* got torch.bool", a, (b.z.bool(), b.Z)),
        wrong(ValueError, "queries.z must have at least 1 dimensions", (a.z[0, 0], a.Z[0, 0])),
        wrong(ValueError, r"items.Z must have the shape of z, \(4, 3\), got \(2, 3\)", a, (b.z, b.Z[:2])),
        wrong(ValueError, "queries.Z must be on the device of z, cpu, got meta", (a.z, a.Z.to("meta"))),
        wrong(ValueError, "items must be on the device of queries, cpu, got meta", a, meta),
        wrong(ValueError, r"items must have the 3 dimensions of queries, got 2 in shape \(4, 2\)", a, narrow),
        wrong(ValueError, r"queries\[1\] must have the 3 dimensions of queries\[0\], got 2", [a, narrow]),
        wrong(ValueError, r"queries\[1\] must have leading dimensions that broadcast with \(2,\)", [a, b]),
        wrong(ValueError, r"without\[0\] must have leading dimensions that broadcast .*, got", without=[b]),
        wrong(ValueError, r"without\[0\] must have the 3 dimensions of queries, got 2", without=[narrow]),
        wrong(TypeError, "without must be a Box, a pair", without=0),
        wrong(TypeError, "queries must be .*, got BoxEmbedding; its Box is .boxes", BoxEmbedding(2, 3)),
        wrong(TypeError, "items must be .*, got BoxTensor; its Box is .box", items=BoxTensor((a.z, a.Z))),
        wrong(ValueError, "without must have at most 8 boxes, got 9", without=[a] * 9),
        wrong(ValueError, "intersection_temperature must be finite and at least 0, got -0.1", options={
            **SOFT, "intersection_temperature": -0.1}),
        wrong(ValueError, "volume_temperature must be finite and at least 0, got -1.0", options={
            **SOFT, "volume_temperature": -1}),
        wrong(ValueError, "volume_temperature must be finite and at least 0, got nan", options={
            **SOFT, "volume_temperature": math.nan}),
        wrong(TypeError, "intersection_temperature must be a number, got None", options={
            **SOFT, "intersection_temperature": None}),
        wrong(TypeError, "volume_temperature must be a number, got True", options={
            **SOFT, "volume_temperature": True}),
        wrong(ValueError, "volume must be one of 'auto', .*, got 'tanh'", volume="tanh"),
        wrong(ValueError, "intersection_temperature must be above 0 for volume='gumbel', got 0.0", options={
            **SOFT, "intersection_temperature": 0}, volume="gumbel"),
        wrong(ValueError, "volume_temperature must be above 0 for volume='soft', got 0.0", options=HARD,
              volume="soft"),
        wrong(ValueError, "intersection_temperature must be above 0 for volume='bessel'", options=HARD,
              volume="bessel"),
    ]  # fmt: skip


def vector_error(kind, message, tau=0.1, nu=0.1):
    return error(kind, message, pairwise_log_volume, a, b, **temperatures(tau, nu))


ERRORS = [
    *pair_errors(pairwise_log_volume),
    vector_error(ValueError, r"volume_temperature must be a number or \[3\], got shape", 0.1, torch.ones(2)),
    vector_error(ValueError, "intersection_temperature must be a number or .*, got shape", torch.ones(2, 3)),
    vector_error(ValueError, "intersection_temperature must be finite and above 0 where", torch.zeros(3)),
    vector_error(ValueError, "volume_temperature must be finite and above 0", 0.1, -torch.ones(3)),
    vector_error(TypeError, "volume_temperature must be a number or a floating", 0.1, torch.ones(3).int()),
    vector_error(ValueError, "volume_temperature must be on the device", 0.1, torch.ones(3, device="meta")),
    vector_error(
        ValueError,
        "volume_temperature must not require a gradient here",
        0.1,
        torch.ones(3, requires_grad=True),
    ),
]  # fmt: skip
FILES = [__file__, *(str(Path(__file__).with_name(f"test_boxes_{n}.py")) for n in ("edges", "topk"))]
ALSO = "test_sizes or test_tails or test_infinite or test_dense"
TestPairs = op_suite(Spec(PAIRS, EDGES, ERRORS, FILES, ALSO), "TestPairs")

TOPK_ERRORS = [
    *pair_errors(box_topk, 2),
    error(ValueError, "k must be at least 1, got 0", box_topk, a, b, 0, **SOFT),
    error(ValueError, "k must be at least 1, got -3", box_topk, a, b, -3, **SOFT),
    error(TypeError, "k must be an integer, got 2.0", box_topk, a, b, 2.0, **SOFT),
    error(TypeError, "k must be an integer, got True", box_topk, a, b, True, **SOFT),
    error(ValueError, r"items must be \[N, D\], got shape \(3,\)", box_topk, a, b.rows(0), 1, **SOFT),
    error(
        ValueError, r"items must be \[N, D\], got shape \(1, 4, 3\)", box_topk, a, b.rows(None), 1, **SOFT
    ),
    error(ValueError, "score must be one of 'containment', 'volume'", box_topk, a, b, 1, **SOFT, score="p"),
    error(TypeError, "prune must be a bool, got 1", box_topk, a, b, 1, **SOFT, prune=1),
    error(ValueError, "volume must be .* here, got 'bessel'", box_topk, a, b, 1, **SOFT, volume="bessel"),
    error(TypeError, "volume_temperature must be a number, got a tensor of shape", box_topk, a, b, 1,
          **temperatures(0.1, torch.ones(3))),
    error(ValueError, r"item_log_volume must be \[4\], got shape \(2,\)", box_topk, a, b, 1, **SOFT,
          item_log_volume=torch.ones(2)),
    error(TypeError, "item_log_volume must be a torch.Tensor, got list", box_topk, a, b, 1, **SOFT,
          item_log_volume=[0.0] * 4),
    error(ValueError, "item_log_volume must be on the device", box_topk, a, b, 1, **SOFT,
          item_log_volume=torch.ones(4, device="meta")),
    error(ValueError, 'item_log_volume must be None with score="volume"', box_topk, a, b, 1, **SOFT,
          score="volume", item_log_volume=torch.ones(4)),
]  # fmt: skip


@pytest.mark.parametrize(("call", "kind", "message"), TOPK_ERRORS, ids=[e[2] for e in TOPK_ERRORS])
def test_error_of_topk(call, kind, message):
    with pytest.raises(kind, match=message):
        call()


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    errors := pair_errors(pairwise_containment),
    ids=[e[2] for e in errors],
)
def test_error_of_containment(call, kind, message):
    with pytest.raises(kind, match=message):
        call()


# Sampled scores


def indices(z, iz, form):
    """Rows of the two tables, some more than once; none where a table is empty."""
    count = 6 if len(z) and len(iz) else 0
    q = torch.arange(count, device=z.device) * 2 % max(len(z), 1)
    i = (torch.arange(count * 4, device=z.device) * 5 % max(len(iz), 1)).view(count, 4)
    return {"items": (q, i), "queries": (i % max(len(z), 1), q % max(len(iz), 1)), "one": (q, i[:, 0]),
            "pairs": (i % max(len(z), 1), i)}[form]  # fmt: skip


def sampled_case(name, tau, nu, form="items", score="volume", sparse=False, **changes):
    def rows(qz, iz):
        q, i = indices(qz, iz, form)
        return (q.unsqueeze(1) if q.ndim < i.ndim else q), (i.unsqueeze(1) if i.ndim < q.ndim else i)

    def call(qz, qZ, iz, iZ):
        q, i = indices(qz, iz, form)
        return sampled_scores((qz, qZ), (iz, iZ), q, i, score=score, sparse=sparse, **temperatures(tau, nu))

    def reference(qz, qZ, iz, iZ):
        q, i = rows(qz, iz)
        both = oracle.intersection([(qz[q], qZ[q]), (iz[i], iZ[i])], tau)
        volume = oracle.log_volume(both, tau, nu)
        own = oracle.log_volume((iz[i], iZ[i]), tau, nu)
        return volume - own * (score == "containment")

    return case(
        name,
        call,
        reference,
        op="box_sampled",
        op_args=lambda *t: (*t, *indices(t[0], t[2], "items"), *settings(tau, nu)),
        make=apart if nu > 0 else overlapping,
        **changes,
    )


SAMPLED = [
    *(sampled_case(f"tau={tau:g} nu={nu:g}", tau, nu) for tau, nu in MODES),
    sampled_case("queries per item", 0.1, 0.2, "queries"),
    sampled_case("one by one", 0.1, 0.1, "one"),
    sampled_case("pairs", 0.1, 0.1, "pairs"),
    sampled_case("containment", 0.1, 0.1, score="containment"),
    sampled_case("containment of queries per item", 0.1, 0.1, "queries", score="containment"),
    sampled_case("containment of pairs", 0.1, 0.1, "pairs", score="containment"),
]
q1, i2 = torch.tensor([0, 1]), torch.tensor([[0, 1, 3], [2, 2, 0]])


def sampled_error(kind, message, queries=a, items=b, q=q1, i=i2, options=SOFT, **changes):
    return error(kind, message, sampled_scores, queries, items, q, i, **{**options, **changes})


SAMPLED_ERRORS = [
    sampled_error(TypeError, r"queries must be a Box or a pair \(z, Z\) of tensors, got a list of B", [a]),
    sampled_error(ValueError, r"queries must be \[rows, D\], got shape \(3,\)", a.rows(0)),
    sampled_error(ValueError, r"items must be \[rows, D\], got shape \(1, 4, 3\)", items=b.rows(None)),
    sampled_error(ValueError, "items must have the 3 dimensions of queries, got 2", items=narrow),
    sampled_error(TypeError, "query_index must be a torch.Tensor, got list", q=[0, 1]),
    sampled_error(TypeError, "item_index must be int64, got torch.float32", i=i2.float()),
    sampled_error(TypeError, "item_index must be int64, got torch.bool", i=i2 > 0),
    sampled_error(ValueError, r"query_index must be \[B\] or \[B, S\], got shape \(\)", q=q1[0]),
    sampled_error(ValueError, r"item_index must be \[B\] or .*, got shape \(1, 2, 3\)", i=i2[None]),
    sampled_error(ValueError, r"item_index must be .* of query_index, of shape \(1,\), got", q=q1[:1]),
    sampled_error(ValueError, r"item_index must be .* of query_index, of shape \(2, 2\)", q=i2[:, :2] % 2),
    sampled_error(ValueError, r"query_index must be in 0 ... 1, got 2", q=q1 + 1),
    sampled_error(ValueError, r"item_index must be in 0 ... 3, got -1", i=i2 - 1),
    sampled_error(ValueError, "item_index must be on the device of the boxes", i=i2.to("meta")),
    sampled_error(ValueError, "score must be one of 'containment', 'volume', got None", score=None),
    sampled_error(TypeError, "sparse must be a bool, got 'yes'", sparse="yes"),
    sampled_error(ValueError, "sparse=True needs corners .*; queries.Z is a result of MulBackward0",
                  (a.z, (1 * a.Z.clone().requires_grad_())), sparse=True),
    sampled_error(ValueError, "sparse=True needs corners .*; items.z is a result of SliceBackward0",
                  items=(b.z.clone().requires_grad_()[:], b.Z), sparse=True),
    sampled_error(ValueError, "volume must be one of .* here, got 'bessel'", volume="bessel"),
    sampled_error(TypeError, "intersection_temperature must be a number, got a tensor",
                  options=temperatures(torch.ones(3), 0.1)),
    sampled_error(ValueError, "volume_temperature must be finite", options=temperatures(0.1, -1)),
]  # fmt: skip
SAMPLED_EDGES = [
    pair_shapes(0, 3, 4),
    pair_shapes(3, 0, 4),
    pair_shapes(0, 0, 0),
    pair_shapes(1, 1, 1),
    pair_shapes(2, 9, 33),
]
TestSampled = op_suite(Spec(SAMPLED, SAMPLED_EDGES, SAMPLED_ERRORS), "TestSampled")


@pytest.mark.parametrize("form", ["items", "queries", "one", "pairs"])
@pytest.mark.parametrize("score", ["volume", "containment"])
def test_sparse_gradients_equal_dense_ones(form, score):
    def tables():
        torch.manual_seed(3)
        return [t.requires_grad_() for t in apart(pair_shapes(30, 40, 5), F32)]

    found = []
    for sparse in (False, True):
        qz, qZ, iz, iZ = inputs = tables()
        q, i = indices(qz, iz, form)
        logs = sampled_scores((qz, qZ), (iz, iZ), q, i, score=score, sparse=sparse, **SOFT)
        found.append(torch.autograd.grad(logs, inputs, torch.linspace(-1, 2, logs.numel()).view(logs.shape)))
    for dense, sparse in zip(*found, strict=True):
        assert dense.layout == torch.strided and sparse.layout == torch.sparse_coo
        assert sparse.shape == dense.shape
        assert_close(sparse.to_dense(), dense, 1e-6)
        touched = sparse.coalesce().indices()[0]
        assert len(touched) < len(dense)  # rows that do not occur have no entry


def test_sparse_tables_train():
    z, Z = (torch.nn.Parameter(t) for t in oracle.boxes(50, 4, dtype=F32))
    items = oracle.boxes(20, 4, dtype=F32)
    optimizer = torch.optim.SparseAdam([z, Z], lr=0.05)
    q, i = torch.arange(10), torch.arange(20).view(10, 2)
    before, losses = z.detach().clone(), []
    for _ in range(30):
        loss = -sampled_scores((z, Z), items, q, i, sparse=True, **SOFT).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    assert torch.equal(z[10:], before[10:]) and not torch.equal(z[:10], before[:10])


@pytest.mark.parametrize("pieces", [
    lambda t: t.split(2, -1), lambda t: t.split([2, 2], -1), lambda t: t.chunk(2, -1),
    lambda t: t.view(-1, 2, 2).unbind(1), lambda t: t.view(2, -1, 2).unbind(0), lambda t: (t, t),
])  # fmt: skip
def test_sparse_gradients_of_pieces(pieces):
    """What the check lets through works, and what torch cannot do is refused before any work."""
    table = torch.rand(6, 4, requires_grad=True)
    other = boxes.Box.uniform(4, pieces(table)[0].shape[1])
    q, i = torch.tensor([0, 2]), torch.tensor([[0], [3]])
    try:
        scores = sampled_scores(pieces(table), other, q, i, sparse=True, **SOFT)
    except ValueError as error:
        assert "sparse=True needs corners" in str(error)
        assert pieces(table)[0].grad_fn.next_functions[0][0].name().startswith("View")
        return
    scores.sum().backward()
    found, table.grad = table.grad, None
    sampled_scores(pieces(table), other, q, i, **SOFT).sum().backward()
    assert found.is_sparse
    assert_close(found.to_dense(), table.grad, 1e-6)


def test_sparse_says_nothing_where_no_gradient_is_recorded():
    table = torch.rand(4, 3, requires_grad=True)
    with torch.no_grad():
        sampled_scores((2 * table, 3 * table), b, q1, i2, sparse=True, **SOFT)
    sampled_scores((table.detach() * 2, table.detach() * 3), b, q1, i2, sparse=True, **SOFT)


def test_sparse_has_no_second_derivative():
    inputs = [t.requires_grad_() for t in apart(pair_shapes(2, 4, 3), F64)]
    logs = sampled_scores(inputs[:2], inputs[2:], q1, i2, sparse=True, **SOFT)
    (first,) = torch.autograd.grad(logs.sum(), inputs[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="second derivative"):
        first.to_dense().sum().backward()


def test_without_none():
    for call in (pairwise_log_volume, pairwise_containment):
        assert torch.equal(call(a, b, without=None, **SOFT), call(a, b, **SOFT))
    assert torch.equal(box_topk(a, b, 2, without=None, **SOFT).values, box_topk(a, b, 2, **SOFT).values)


def test_int32_rows():
    q, i = (t.int() for t in (q1, i2))
    assert torch.equal(sampled_scores(a, b, q, i, **SOFT), sampled_scores(a, b, q1, i2, **SOFT))


@pytest.mark.parametrize("case", [PAIRS[0], PAIRS[5], PAIRS[9], PAIRS[10], SAMPLED[0], SAMPLED[-3]],
                         ids=lambda c: c.name)  # fmt: skip
def test_vmap(case):
    """Items and queries are shared by all results, so that the suite does not take these for batched."""
    from suite import check_vmap

    check_vmap(case)


def test_vmap_of_one_argument_and_of_topk():
    qz, qZ, iz, iZ = apart(pair_shapes(3, 5, 4), F64)
    many = torch.stack([qz, qz - 1, qz - 2])
    call = lambda z: pairwise_log_volume((z, qZ), (iz, iZ), **SOFT)  # noqa: E731
    assert_close(torch.vmap(call)(many), torch.stack([call(z) for z in many]), 1e-14)
    best = torch.vmap(lambda z: box_topk((z, qZ), (iz, iZ), 2, **SOFT))(many)
    for n, z in enumerate(many):
        alone = box_topk((z, qZ), (iz, iZ), 2, **SOFT)
        assert torch.equal(best.indices[n], alone.indices)
        assert_close(best.values[n], alone.values, 1e-14)


def test_opcheck_of_topk():
    qz, qZ, iz, iZ = apart(pair_shapes(6, 5, 4), F32)
    signs = torch.tensor([[1.0, -1.0], [1.0, 0.0], [1.0, -1.0]])
    for own in (None, torch.randn(5)):
        args = (qz.view(3, 2, 4), qZ.view(3, 2, 4), signs, iz, iZ, own, *settings(0.1, 0.1), 3, True)
        torch.library.opcheck(torch.ops.pyops.box_topk.default, args)


def test_compiled_topk():
    queries, items = oracle.boxes(3, 4, dtype=F32), oracle.boxes(9, 4, dtype=F32)

    def call(queries, items):
        return box_topk(queries, items, 3, without=[queries], **SOFT)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")(queries, items)
    for found, wanted in zip(compiled, call(queries, items), strict=True):
        assert torch.equal(found, wanted)
