"""Tables of boxes and poolers: values, gradients, state, compile, initial values, and what is refused."""

import copy
import math

import pytest
import torch
from suite import assert_close, assert_same_bits
from torch.nn import functional as F

from pyops.boxes import Box, containment, intersection, sampled_scores
from pyops.nn import BagOfBoxesPooler, BoxEmbedding, IntersectionPooler, UniformBox

MAPS = {
    "raw": lambda a, b: (a, b),
    "min_delta": lambda a, b: (a, a + F.softplus(b)),
    "sigmoid": lambda a, b: (a.sigmoid(), a.sigmoid() + (1 - a.sigmoid()) * b.sigmoid()),
    "centre_offset": lambda a, b: (a - F.softplus(b), a + F.softplus(b)),
}
every_kind = pytest.mark.parametrize("kind", MAPS)
SOFT = {"intersection_temperature": 0.1, "volume_temperature": 0.1}


@every_kind
@pytest.mark.parametrize("shape", [(), (5,), (2, 3)])
def test_rows_are_mapped_to_corners_with_their_gradients(kind, shape):
    table = BoxEmbedding(7, 3, kind, dtype=torch.float64)
    with torch.no_grad():
        table.weight.normal_()
    index = torch.randint(7, shape)
    box = table(index)
    assert isinstance(box, Box) and box.shape == (*shape, 3)
    weight = table.weight.detach().clone().requires_grad_()
    wanted = MAPS[kind](*weight[index].split(3, -1))
    grads = torch.randn(2, *shape, 3, dtype=torch.float64)
    for found, exact in zip(box, wanted, strict=True):
        assert_close(found, exact, 1e-14)
    torch.autograd.backward(list(box), list(grads))
    torch.autograd.backward(list(wanted), list(grads))
    assert_close(table.weight.grad, weight.grad, 1e-13)
    for found, row in zip(table.boxes, table(torch.arange(7)), strict=True):
        assert_same_bits(found, row, "boxes")


@every_kind
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_initial_boxes_are_those_of_the_initializer(kind, dtype):
    table = BoxEmbedding(300, 8, kind, dtype=dtype)
    first = table.weight.detach().clone()
    assert table.weight.dtype == table.boxes.z.dtype == dtype and table.weight.shape == (300, 16)
    torch.manual_seed(1)
    table.reset_parameters()
    torch.manual_seed(1)
    wanted = UniformBox()(300, 8, dtype=torch.promote_types(dtype, torch.float32))
    gate = 8 * torch.finfo(dtype).eps
    for found, corner in zip(table.boxes, wanted, strict=True):
        assert (found - corner).abs().max() <= gate, kind
    assert not torch.equal(table.weight, first)


def test_uniform_boxes():
    found = UniformBox(low=-2.0, high=3.0, smallest=0.5, largest=1.5)(4000, 2, dtype=torch.float64)
    assert found.z.min() >= -2 and found.Z.max() <= 3
    assert found.side.min() >= 0.5 and found.side.max() <= 1.5
    assert found.side.mean().item() == pytest.approx(1.0, abs=0.02)
    assert found.z.min() < -1.9 and found.Z.max() > 2.9


def test_initializer_of_ones_own():
    box = Box(torch.tensor([[0.0, 1.0]]), torch.tensor([[2.0, 1.5]]))
    for kind in ("raw", "min_delta", "centre_offset"):
        table = BoxEmbedding(1, 2, kind, initializer=lambda *shape, **_: box)
        for found, wanted in zip(table.boxes, box, strict=True):
            assert_close(found, wanted, 1e-6)
    table = BoxEmbedding(1, 2, beta=5.0, initializer=lambda *shape, **_: box)
    assert_close(table.boxes.Z, box.Z, 1e-6)
    # The faces of the unit cube are infinitely far away for a sigmoid.
    unit = Box(torch.zeros(2, 2), torch.ones(2, 2))
    table = BoxEmbedding(2, 2, "sigmoid", initializer=lambda *shape, **_: unit)
    assert table.weight.isfinite().all() and table.boxes.Z.min() > 0.999


def test_beta():
    table = BoxEmbedding(3, 2, beta=4.0)
    a, b = table.weight.split(2, -1)
    assert_close(table.boxes.Z, a + F.softplus(4 * b) / 4, 1e-6)
    assert "beta=4.0" in repr(table)


@every_kind
def test_state_dict(kind, tmp_path):
    table, other = (BoxEmbedding(5, 3, kind) for _ in range(2))
    torch.save(table.state_dict(), tmp_path / "state")
    assert list(table.state_dict()) == ["weight"]
    assert not torch.equal(other.weight, table.weight)
    other.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
    twin = copy.deepcopy(other)
    for a, b, c in zip(table.boxes, other.boxes, twin.boxes, strict=True):
        assert_same_bits(a, b, "loaded")
        assert_same_bits(a, c, "copied")
    assert twin.double().boxes.z.dtype == torch.float64


@every_kind
def test_sparse_gradients(kind):
    dense = BoxEmbedding(50, 3, kind)
    sparse = BoxEmbedding(50, 3, kind, sparse=True)
    sparse.load_state_dict(dense.state_dict())
    index = torch.tensor([4, 7, 4, 49])
    grad = torch.randn(4, 3)
    for table in (dense, sparse):
        box = table(index)
        (box.z * grad).sum().add((box.Z.square() * grad).sum()).backward()
    assert sparse.weight.grad.is_sparse
    assert sparse.weight.grad.coalesce().indices().flatten().tolist() == [4, 7, 49]
    assert_close(sparse.weight.grad.to_dense(), dense.weight.grad, 1e-6)
    before = sparse.weight.detach().clone()
    torch.optim.SparseAdam(sparse.parameters()).step()
    changed = (sparse.weight != before).any(1).nonzero().flatten()
    assert changed.tolist() == [4, 7, 49]


def test_rows_that_occur_for_sampled_scores():
    """What the docstring shows: scores and gradients equal those of all corners, elementwise."""
    users, items = BoxEmbedding(20, 4, sparse=True), BoxEmbedding(60, 4, sparse=True)
    user, item = torch.tensor([3, 7, 3]), torch.tensor([[1, 2], [2, 40], [1, 1]])
    (u, at_u), (i, at_i) = (t.unique(return_inverse=True) for t in (user, item))
    grads = []
    for log_p in (
        sampled_scores(users(u), items(i), at_u, at_i, **SOFT),
        sampled_scores(users, items, user, item, **SOFT),
        containment(users(user.unsqueeze(1)), items(item), **SOFT),
    ):
        log_p.sum().backward()
        grads.append([t.weight.grad.to_dense() for t in (users, items)])
        grads[-1].append(log_p.detach())
        users.zero_grad()
        items.zero_grad()
    for found, whole, wanted in zip(*grads, strict=True):
        assert_close(found, wanted, 1e-5)
        assert torch.equal(found, whole)


@pytest.mark.parametrize("score", ["containment", "volume"])
@every_kind
def test_sampled_scores_of_tables(kind, score):
    """Rows of a module and of its boxes give the same, whatever the shape of the indices."""
    users, items = BoxEmbedding(20, 4, kind, sparse=True), BoxEmbedding(60, 4, kind)
    few, many = torch.tensor([3, 7, 3]), torch.tensor([[1, 2], [2, 19], [1, 1]], dtype=torch.int32)
    for q, i in ((few, many), (many, few), (many, many), (few, few)):
        wanted = sampled_scores(users.boxes, items.boxes, q, i, score=score, **SOFT)
        assert_close(sampled_scores(users, items, q, i, score=score, **SOFT), wanted, 1e-6)
        found = sampled_scores(users, items.boxes, q, i, score=score, **SOFT)
        assert_close(found, wanted, 1e-6)
    found.sum().backward()
    assert users.weight.grad.is_sparse and not items.weight.grad.is_sparse
    assert users.weight.grad.coalesce().indices().flatten().tolist() == [3, 7]


def test_sampled_scores_of_tables_refuses():
    users, items = BoxEmbedding(20, 4, sparse=True), BoxEmbedding(60, 4)
    one, many = torch.tensor([3]), torch.tensor([[59, 2]])

    def call(queries=users, items=items, q=one, i=many, **changes):
        return sampled_scores(queries, items, q, i, **SOFT, **changes)

    with pytest.raises(ValueError, match=r"query_index must be in 0 ... 19, got 20"):
        call(q=one + 17)
    with pytest.raises(ValueError, match=r"item_index must be in 0 ... 59, got 60"):
        call(i=many + 1)
    with pytest.raises(TypeError, match=r"item_index must be a torch.Tensor"):
        call(i=[1])
    with pytest.raises(ValueError, match="sparse must be False where items is a module"):
        call(Box.uniform(20, 4), sparse=True)
    with pytest.raises(ValueError, match=r"queries.Z is a result of AddBackward0.* give the module itself"):
        call(users.boxes, Box.uniform(60, 4), sparse=True)
    with pytest.raises(TypeError, match=r"a must be a Box or a pair .* got BoxEmbedding; its Box is .boxes"):
        containment(items, items.boxes, **SOFT)


def test_raw_tables_take_sparse_gradients_of_all_boxes():
    items = BoxEmbedding(60, 4, "raw")
    sampled_scores(Box.uniform(5, 4), items.boxes, torch.tensor([3]), torch.tensor([[59, 2]]), sparse=True,
                   **SOFT).sum().backward()  # fmt: skip
    assert items.weight.grad.coalesce().indices().flatten().tolist() == [2, 59]


@every_kind
@pytest.mark.parametrize("sparse", [False, True])
def test_compile(kind, sparse):
    table = BoxEmbedding(9, 3, kind, sparse=sparse)
    index = torch.tensor([[1, 8], [0, 1]])
    wanted = table(index)
    found = torch.compile(table, backend="aot_eager", fullgraph=True)(index)
    assert isinstance(found, Box)
    grads = []
    for box in (found, wanted):
        (box.z.sum() + box.Z.square().sum()).backward()
        grads.append(table.weight.grad.to_dense().clone())
        table.weight.grad = None
    assert_close(found.z, wanted.z, 1e-6)
    assert_close(found.Z, wanted.Z, 1e-6)
    assert_close(*grads, 1e-6)


def test_meta_and_empty_tables():
    table = BoxEmbedding(4, 3, "sigmoid", device="meta")
    assert table.weight.is_meta
    table = table.to_empty(device="cpu")
    table.reset_parameters()
    assert table.boxes.side.min() > 0
    assert table(torch.zeros(0, dtype=torch.int32)).shape == (0, 3)
    for shape in ((0, 3), (4, 0), (0, 0)):
        assert BoxEmbedding(*shape).boxes.shape == shape


def test_bounding_box():
    table = BoxEmbedding(30, 3, "raw")
    z, Z = table.boxes
    found = table.bounding_box()
    assert torch.equal(found.z, z.amin(0)) and torch.equal(found.Z, Z.amax(0))


def test_training_moves_a_box_into_another():
    user, item = BoxEmbedding(1, 4), BoxEmbedding(1, 4, initializer=UniformBox(low=3.0, high=4.0))
    optimizer = torch.optim.Adam([*user.parameters(), *item.parameters()], lr=0.1)
    row = torch.tensor([0])
    first = containment(user(row), item(row), **SOFT).item()
    for _ in range(150):
        optimizer.zero_grad()
        loss = -containment(user(row), item(row), **SOFT).sum()
        loss.backward()
        optimizer.step()
    assert first < -50 and loss < 1


# Poolers


def some_boxes(*shape):
    z = torch.rand(shape, dtype=torch.float64)
    return Box(z, z + 0.2 + torch.rand(shape, dtype=torch.float64))


@pytest.mark.parametrize("tau", [0.0, 0.2])
@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("dim", [-2, 0, 1, -3])
def test_intersection_pooler(dim, keepdim, tau):
    box = some_boxes(4, 5, 3)
    found = IntersectionPooler(tau, dim=dim, keepdim=keepdim)(box)
    pairs = [Box(*p) for p in zip(box.z.unbind(dim), box.Z.unbind(dim), strict=True)]
    wanted = intersection(*pairs, intersection_temperature=tau)
    for a, b in zip(found, wanted, strict=True):
        assert_close(a, b.unsqueeze(dim) if keepdim else b, 1e-14)


@pytest.mark.parametrize("tau", [0.0, 0.2])
def test_intersection_pooler_with_a_mask(tau):
    box = some_boxes(4, 5, 3)
    leaves = [t.clone().requires_grad_() for t in box]
    mask = torch.rand(4, 5) < 0.5
    mask[0], mask[1] = False, True
    found = IntersectionPooler(tau)(tuple(leaves), mask)
    for n in range(1, 4):
        kept = [box.rows((n, m)) for m in mask[n].nonzero().flatten().tolist()]
        wanted = intersection(*kept, intersection_temperature=tau)
        assert_close(found.z[n], wanted.z, 1e-14)
        assert_close(found.Z[n], wanted.Z, 1e-14)
    assert (found.z[0] == -math.inf).all() and (found.Z[0] == math.inf).all()
    (found.z[1:].sum() - found.Z[1:].sum()).backward()
    for leaf in leaves:
        assert leaf.grad.isfinite().all() and (leaf.grad[~mask] == 0).all()
        assert_close(leaf.grad.abs().sum((1, 2))[1:], torch.full((3,), 3.0, dtype=torch.float64), 1e-12)


@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("dim", [-2, 0])
def test_bag_of_boxes(dim, keepdim):
    box = some_boxes(4, 5, 3)
    weights, mask = torch.rand(4, 5, dtype=torch.float64), torch.rand(4, 5) < 0.6
    mask[0, 0] = True
    pooler = BagOfBoxesPooler(dim=dim, keepdim=keepdim)
    for given, share in (
        ({}, torch.ones(4, 5)),
        ({"weights": weights}, weights),
        ({"mask": mask}, mask),
        ({"weights": weights, "mask": mask}, weights * mask),
    ):
        found = pooler(box, **given)
        share = share.double().unsqueeze(-1)
        total = share.sum(dim, keepdim=keepdim)
        for a, t in zip(found, box, strict=True):
            wanted = (t * share).sum(dim, keepdim=keepdim) / torch.where(total == 0, 1, total)
            assert_close(a, wanted, 1e-13)


def test_a_bag_ignores_what_is_masked():
    z, Z = some_boxes(2, 3, 2)
    Z[0, 1], z[1] = math.nan, math.inf
    mask = torch.tensor([[True, False, True], [False, False, False]])
    leaves = [t.requires_grad_() for t in (z, Z)]
    found = BagOfBoxesPooler()(Box(z, Z), mask=mask)
    assert_close(found.Z[0], Z[0, [0, 2]].mean(0), 1e-14)
    assert (found.z[1] == 0).all() and (found.Z[1] == 0).all()
    found.Z.sum().add(found.z.sum()).backward()
    for leaf in leaves:
        assert leaf.grad.isfinite().all() and (leaf.grad[~mask] == 0).all()


@pytest.mark.parametrize(
    "pooler", [IntersectionPooler(), IntersectionPooler(0.1), BagOfBoxesPooler()], ids=repr
)
def test_poolers_of_nothing_in_16_bits_and_compiled(pooler):
    box = Box(torch.zeros(2, 0, 3), torch.ones(2, 0, 3))
    found = pooler(box)
    assert found.shape == (2, 3)
    empty = -math.inf if isinstance(pooler, IntersectionPooler) else 0.0
    assert (found.z == empty).all() and (found.Z.neg() == empty).all()
    box = Box(*(t.bfloat16() for t in some_boxes(2, 4, 3)))
    found = pooler(box)
    assert found.z.dtype == torch.float32
    wanted = pooler(Box(box.z.double(), box.Z.double()))
    assert_close(found.Z.double(), wanted.Z, 1e-6)
    compiled = torch.compile(pooler, backend="aot_eager", fullgraph=True)(box)
    assert_close(compiled.Z, found.Z, 1e-6)
    double = some_boxes(2, 3, 2)
    leaves = [t.requires_grad_() for t in double]
    assert torch.autograd.gradcheck(lambda z, Z: tuple(pooler((z, Z))), leaves)


# Refusals

INDEX = torch.tensor([0])
TABLE = BoxEmbedding(3, 2)
BOX = Box(torch.zeros(4, 5, 3), torch.ones(4, 5, 3))


def given_box(z, Z):
    return lambda *shape, **_: Box(torch.as_tensor(z), torch.as_tensor(Z))


REFUSED = {
    "num_embeddings must be at least 0, got -1": lambda: BoxEmbedding(-1, 2),
    "embedding_dim must be an integer, got 2.0": lambda: BoxEmbedding(1, 2.0),
    "parameterization must be one of 'raw', 'min_delta', 'sigmoid', 'centre_offset', got 'tanh'": lambda: (
        BoxEmbedding(1, 2, "tanh")
    ),
    "beta must be above 0": lambda: BoxEmbedding(1, 2, beta=0.0),
    "beta has no meaning for parameterization='raw', got beta=2.0": lambda: BoxEmbedding(
        1, 2, "raw", beta=2.0
    ),
    "sparse must be a bool": lambda: BoxEmbedding(1, 2, sparse=1),
    "initializer must be callable, got 'uniform'": lambda: BoxEmbedding(1, 2, initializer="uniform"),
    r"initializer must give corners \[1, 2\], got shape \(2, 2\)": lambda: BoxEmbedding(
        1, 2, initializer=given_box([[0.0, 0.0]] * 2, [[1.0, 1.0]] * 2)
    ),
    "initializer's box must be a Box": lambda: BoxEmbedding(1, 2, initializer=lambda *shape, **_: None),
    "initializer must give boxes that 'min_delta' can hold": lambda: BoxEmbedding(
        1, 2, initializer=given_box([[0.0, 0.0]], [[1.0, -1.0]])
    ),
    "initializer must give boxes that 'raw' can hold": lambda: BoxEmbedding(
        1, 2, "raw", initializer=given_box([[0.0, math.nan]], [[1.0, 1.0]])
    ),
    "initializer must give boxes inside the unit cube": lambda: BoxEmbedding(
        1, 2, "sigmoid", initializer=UniformBox(low=1.5, high=3.0)
    ),
    "dtype must be float64": lambda: BoxEmbedding(1, 2, dtype=torch.int64),
    "smallest must be finite and above 0": lambda: UniformBox(smallest=0.0),
    "smallest <= largest <= high - low must hold": lambda: UniformBox(largest=1.5),
    "index must be a torch.Tensor, got int": lambda: TABLE(1),
    "index must be int64 or int32, got torch.float32": lambda: TABLE(torch.zeros(2)),
    "index must be in 0 ... 2, got 3": lambda: TABLE(torch.tensor([0, 3])),
    "index must be in 0 ... 2, got -1": lambda: TABLE(torch.tensor([-1, 1])),
    "index must be on the device of weight, cpu, got meta": lambda: TABLE(INDEX.to("meta")),
    "num_embeddings must be at least 1 for a bounding box": lambda: BoxEmbedding(0, 2).bounding_box(),
    "intersection_temperature must be finite and at least 0": lambda: IntersectionPooler(-1.0),
    r"dim must be a dimension of box of shape \(4, 5, 3\) and not its last, got -1": lambda: (
        IntersectionPooler(dim=-1)(BOX)
    ),
    "dim must be a dimension of box of shape .* got 2": lambda: BagOfBoxesPooler(dim=2)(BOX),
    "dim must be a dimension of box of shape .* got -4": lambda: BagOfBoxesPooler(dim=-4)(BOX),
    "dim must be an integer": lambda: BagOfBoxesPooler(dim=None),
    "keepdim must be a bool": lambda: BagOfBoxesPooler(keepdim=0),
    "mask must be a bool tensor, got torch.float32": lambda: BagOfBoxesPooler()(BOX, mask=torch.ones(4, 5)),
    "mask must be a bool tensor, got list": lambda: IntersectionPooler()(BOX, [True]),
    r"mask must broadcast to \[4, 5\], the boxes, got shape \(4,\)": lambda: IntersectionPooler()(
        BOX, torch.ones(4, dtype=torch.bool)
    ),
    r"weights must broadcast to \[4, 5\], the boxes, got shape \(4, 5, 3\)": lambda: BagOfBoxesPooler()(
        BOX, torch.ones(4, 5, 3)
    ),
    "weights must be float64": lambda: BagOfBoxesPooler()(BOX, torch.ones(4, 5, dtype=torch.int64)),
    "box must be a Box or a pair": lambda: BagOfBoxesPooler()(BOX.z),
}


@pytest.mark.parametrize("message", REFUSED)
def test_errors_name_the_argument(message):
    with pytest.raises((TypeError, ValueError), match=message):
        REFUSED[message]()
