"""pyops.compat.box_embeddings against the package: signatures, values, gradients, where its floor bites."""

import importlib
import inspect
import math

import pytest
import torch
from suite import assert_close, assert_same_bits

from pyops import boxes, nn
from pyops.compat import box_embeddings as compat
from pyops.reference import boxes as reference

MODULES = {
    "common.utils": "tiny_value_of_dtype log1mexp log1pexp softplus_inverse logsumexp2 inv_sigmoid",
    "parameterizations": "BoxTensor MinDeltaBoxTensor SigmoidBoxTensor",
    "parameterizations.box_tensor": "BoxFactory",
    "modules": "BoxEmbedding",
    "modules.intersection": (
        "hard_intersection gumbel_intersection Intersection HardIntersection GumbelIntersection"
    ),
    "modules.volume": (
        "hard_volume soft_volume bessel_volume_approx HardVolume SoftVolume BesselApproxVolume Volume"
    ),
    "modules.pooling": "bag_of_boxes_pooler BoxPooler HardIntersectionBoxPooler BagOfBoxesBoxPooler",
    "modules.pooling.intersection": "hard_intersection_pooler",
    "modules.regularization": "BoxRegularizer l2_side_regularizer L2SideBoxRegularizer",
    "initializations": "BoxInitializer uniform_boxes UniformBoxInitializer",
}
WHERE = {name: module for module, names in MODULES.items() for name in names.split()}
# The package's base classes take (*args, **kwargs) of torch.nn.Module or object.
WITHOUT_SIGNATURE = "BoxPooler", "BoxInitializer", "HardIntersection"
GATE = {torch.float32: 1e-5, torch.float64: 1e-12}
KINDS = ["boxtensor", "mindelta", "sigmoid"]
MODES = [None, "clipping", "clipping_forward"]
both_dtypes = pytest.mark.parametrize("dtype", GATE, ids=str)


def peer(name):
    """A name of the package, or a skip with the reason."""
    try:
        return getattr(importlib.import_module(f"box_embeddings.{WHERE[name]}"), name)
    except ImportError as error:
        pytest.skip(f"box-embeddings 0.1.0 is not installed here: {error}")


def weights(kind, shape, dtype=torch.float32):
    """Data [*shape[:-1], 2, D] of boxes with sides about 0.3 ... 1, within a few units."""
    z = torch.rand(shape, dtype=dtype)
    if kind == "boxtensor":
        return torch.stack((z, z + 0.3 + torch.rand(shape, dtype=dtype)), -2)
    return torch.stack((z, torch.rand(shape, dtype=dtype)), -2)


def pair(kind, shape, dtype=torch.float32):
    """The same boxes here and there, of data that are leaves."""
    data = weights(kind, shape, dtype)
    leaves = [data.clone().requires_grad_() for _ in range(2)]
    factories = compat.BoxFactory(kind), peer("BoxFactory")(kind)
    return leaves, *(make(leaf) for make, leaf in zip(factories, leaves, strict=True))


def corners(box):
    return torch.stack((box.z, box.Z))


@pytest.mark.parametrize("name", WHERE)
def test_signature(name):
    """The same names, order and defaults; beyond them `eps` as a keyword alone."""
    theirs = peer(name)
    if name in WITHOUT_SIGNATURE:
        return

    def shape(function):
        found = [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]
        return [p for p in found if p[0] != "eps"]

    ours = getattr(compat, name)
    assert [p[::2] for p in shape(ours)] == [p[::2] for p in shape(theirs)]
    extra = inspect.signature(ours).parameters.get("eps")
    assert extra is None or extra.kind == inspect.Parameter.KEYWORD_ONLY


def test_every_method_and_name_is_there():
    for name, module in WHERE.items():
        theirs, ours = peer(name), getattr(compat, name)
        if inspect.isclass(theirs):
            missing = [m for m in vars(theirs) if not m.startswith("_") and not hasattr(ours, m)]
            assert missing == ["register"] * ("register" in missing), (name, missing)
        assert name in compat.__all__, module


# Values and gradients


@both_dtypes
@pytest.mark.parametrize("kind", KINDS)
def test_parameterizations_agree(kind, dtype):
    peer("BoxFactory")
    leaves, ours, theirs = pair(kind, (5, 3), dtype)
    assert_close(corners(ours), corners(theirs), GATE[dtype])
    assert_close(ours.centre, theirs.centre, GATE[dtype])
    assert ours.box_shape == theirs.box_shape == (5, 3)
    assert ours.kwargs == theirs.kwargs and ours.args == theirs.args
    grad = torch.randn(2, 5, 3, dtype=dtype)
    for box in (ours, theirs):
        (corners(box) * grad).sum().backward()
    assert_close(leaves[0].grad, leaves[1].grad, GATE[dtype])
    vector = torch.randn(4, 6, dtype=dtype)
    settings = {"beta": 2.0} if kind == "mindelta" else {}
    factories = [f(f"{kind}_from_vector", settings) for f in (compat.BoxFactory, peer("BoxFactory"))]
    assert_close(*(corners(f(vector)) for f in factories), GATE[dtype])
    z, Z = corners(theirs).detach()
    z, Z = (0.1 + 0.4 * t / Z.max() for t in (z, Z))
    assert_close(*(f.box_subclass.W(z, Z, **settings) for f in factories), GATE[dtype])
    assert_close(*(f.box_subclass.zZ_to_embedding(z, Z, **settings) for f in factories), GATE[dtype])
    back = factories[0].box_subclass(factories[0].box_subclass.W(z, Z, **settings), **settings)
    assert_close(corners(back), torch.stack((z, Z)), GATE[dtype])


VOLUMES = {
    "hard": ("HardVolume", {}),
    "soft": ("SoftVolume", {"volume_temperature": 0.3}),
    "gumbel": ("BesselApproxVolume", {"volume_temperature": 0.2, "intersection_temperature": 0.1}),
    "all-hard": ("Volume", {}),
    "all-soft": ("Volume", {"volume_temperature": 0.3}),
    "all-gumbel": ("Volume", {"volume_temperature": 0.2, "intersection_temperature": 0.1}),
}


@both_dtypes
@pytest.mark.parametrize("mode", ["hard", *MODES], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_intersections_agree_with_their_gradients(kind, mode, dtype):
    hard = mode == "hard"
    name = "hard_intersection" if hard else "gumbel_intersection"
    arguments = () if hard else (0.1, mode)
    theirs = peer(name)
    (lefts, l1, l2), (rights, r1, r2) = pair(kind, (6, 1, 3), dtype), pair(kind, (1, 4, 3), dtype)
    found, wanted = getattr(compat, name)(l1, r1, *arguments), theirs(l2, r2, *arguments)
    assert type(found).__name__ == type(wanted).__name__
    assert found.box_shape == wanted.box_shape == (6, 4, 3)
    assert_close(corners(found), corners(wanted), GATE[dtype])
    grad = torch.randn(2, 6, 4, 3, dtype=dtype)
    for box in (found, wanted):
        (corners(box) * grad).sum().backward()
    assert_close(lefts[0].grad, lefts[1].grad, GATE[dtype])
    assert_close(rights[0].grad, rights[1].grad, GATE[dtype])


@both_dtypes
@pytest.mark.parametrize("log_scale", [True, False])
@pytest.mark.parametrize("case", VOLUMES)
def test_volumes_agree_where_no_side_is_lost(case, log_scale, dtype):
    name, settings = VOLUMES[case]
    theirs = peer(name)
    leaves, ours, other = pair("boxtensor", (50, 4), dtype)
    found = getattr(compat, name)(**settings)
    wanted = theirs(**settings)
    found.log_scale = wanted.log_scale = log_scale
    results = found(ours), wanted(other)
    assert ((results[0] - results[1]).abs() <= GATE[dtype] * results[1].abs().clamp(min=1)).all()
    for result in results:
        result.sum().backward()
    assert_close(leaves[0].grad, leaves[1].grad, GATE[dtype])


@both_dtypes
@pytest.mark.parametrize("gap", [1.5, 3.0])
def test_the_floor_bites_far_apart(gap, dtype):
    """The package loses the sides below its floor, and their gradient; eps=FLOOR has its numbers."""
    theirs = [peer(name) for name in ("BoxTensor", "gumbel_intersection", "bessel_volume_approx")]
    ours = [compat.BoxTensor, compat.gumbel_intersection, compat.bessel_volume_approx]
    z = torch.tensor([[[0.0, 0.0]], [[gap + 1, gap + 1]]], dtype=dtype)
    tau = 0.1
    results, gradients = {}, {}
    for name, (Tensor, intersection, volume), more in (
        ("theirs", theirs, {}),
        ("exact", ours, {}),
        ("floor", ours, {"eps": compat.FLOOR}),
    ):
        data = torch.cat((z, z + 1), 1).requires_grad_()  # two unit boxes, with that gap between them
        results[name] = volume(intersection(Tensor(data[0]), Tensor(data[1]), tau), tau, tau, **more)
        (gradients[name],) = torch.autograd.grad(results[name], data)
    # The other terms of the sums are e^-25 and less.
    exact = 2 * (math.log(tau) + (-gap - 2 * reference.GAMMA * tau) / tau)
    assert results["exact"].item() == pytest.approx(exact, rel=1e-6)
    # It falls by 1 / nu with the lower corner of the upper box, and rises with the upper of the lower one.
    assert gradients["exact"][1, 0].tolist() == pytest.approx([-1 / tau] * 2, rel=1e-5)
    assert gradients["exact"][0, 1].tolist() == pytest.approx([1 / tau] * 2, rel=1e-5)
    if exact / 2 > -25:
        assert_close(results["exact"], results["theirs"], 1e-5)
    else:
        floor = 2 * math.log(compat.FLOOR)
        assert results["theirs"].item() == pytest.approx(floor, abs=0.1)
        assert results["exact"] < floor - 5
        assert gradients["theirs"].abs().max() < 0.1 / tau
    assert_close(results["floor"], results["theirs"], 1e-5)
    difference = (gradients["floor"] - gradients["theirs"]).abs().max()
    assert difference <= 1e-5 * max(gradients["theirs"].abs().max(), 1e-3)


def test_the_floor_of_hard_volumes():
    volume = peer("hard_volume")
    data = torch.tensor([[[0.0, 0.0], [-1.0, 2.0]], [[0.0, 0.0], [0.0, 2.0]], [[0.0, 0.0], [1.0, 2.0]]])
    theirs = volume(peer("BoxTensor")(data))
    assert_close(compat.hard_volume(compat.BoxTensor(data), eps=compat.FLOOR), theirs, 1e-6)
    exact = compat.hard_volume(compat.BoxTensor(data))
    assert exact.tolist() == [-math.inf, -math.inf, pytest.approx(math.log(2))]
    assert theirs[0].item() == pytest.approx(math.log(2 * compat.FLOOR))
    assert compat.HardVolume(eps=compat.FLOOR)(compat.BoxTensor(data)).isfinite().all()


def test_every_pair_agrees_with_the_package():
    """The kernel of pyops.boxes for all pairs, where the package needs the cube."""
    intersect, volume, Tensor = (
        peer(n) for n in ("gumbel_intersection", "bessel_volume_approx", "BoxTensor")
    )
    a, b = weights("boxtensor", (20, 8)), weights("boxtensor", (30, 8))
    wanted = volume(intersect(Tensor(a.unsqueeze(1)), Tensor(b.unsqueeze(0)), 0.1), 0.1, 0.1)
    found = boxes.pairwise_log_volume(
        compat.BoxTensor(a).box,
        compat.BoxTensor(b).box,
        intersection_temperature=0.1,
        volume_temperature=0.1,
    )
    assert ((found - wanted).abs() <= 1e-5 * wanted.abs().clamp(min=1)).all()


def test_utilities_agree():
    x = torch.cat((-torch.logspace(-6, 2, 50), torch.tensor([0.0])))
    names = {
        "log1mexp": (x,),
        "log1pexp": (torch.linspace(-30, 50, 60),),
        "softplus_inverse": (torch.linspace(0.01, 40, 60), 2.0),
        "logsumexp2": (torch.randn(9), torch.randn(9)),
        "inv_sigmoid": (torch.linspace(0.01, 0.99, 20),),
    }
    for name, arguments in names.items():
        leaves = [arguments[0].clone().requires_grad_() for _ in range(2)]
        inputs = leaves[0], leaves[1].clone()  # the package writes to the argument of softplus_inverse
        results = [
            f(t, *arguments[1:]) for f, t in zip((getattr(compat, name), peer(name)), inputs, strict=True)
        ]
        assert_close(*results, 1e-5, name)
        for result in results:
            result.sum().backward()
        assert_close(leaves[0].grad, leaves[1].grad, 1e-5, name)
    for dtype in (torch.float64, torch.float32, torch.float16):
        assert compat.tiny_value_of_dtype(dtype) == peer("tiny_value_of_dtype")(dtype)
    with pytest.raises(TypeError, match="dtype must be"):
        compat.tiny_value_of_dtype(torch.int64)


@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize(("dim", "keepdim"), [(0, False), (1, True)])
def test_poolers_agree(dim, keepdim, mask):
    _, ours, theirs = pair("boxtensor", (3, 5, 4))
    given = torch.rand(3, 5) < 0.5
    given[0], given[1:, 0] = False, False
    name = "HardIntersectionBoxPooler"
    hard = [pooler(dim, keepdim) for pooler in (getattr(compat, name), peer(name))]
    copy = peer("BoxTensor")((theirs.z.clone(), theirs.Z.clone()))  # it writes to its argument
    options = {"mask": given} if mask else {}
    assert_close(corners(hard[0](ours, **options)), corners(hard[1](copy, **options)), 1e-6)
    bag = compat.BagOfBoxesBoxPooler(dim, keepdim), peer("BagOfBoxesBoxPooler")(dim, keepdim)
    w = torch.rand(3, 5, 1)
    options = {"mask": ~given.unsqueeze(-1)} if mask else {}
    wanted = bag[1](theirs, weights=w, **options)
    assert_close(corners(bag[0](ours, weights=w, **options)), corners(wanted), 1e-5)
    # As documented, without the last dimension.
    options = {"mask": ~given} if mask else {}
    assert_close(corners(bag[0](ours, weights=w.squeeze(-1), **options)), corners(wanted), 1e-5)
    with pytest.raises(ValueError, match=r"weights must be \[3, 5\], of the boxes, got shape \(5,\)"):
        bag[0](ours, weights=torch.rand(5))


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("log_scale", [False, True])
def test_regularizers_agree(log_scale, reduction):
    leaves, ours, theirs = pair("mindelta", (7, 3))
    arguments = 0.3, log_scale, reduction
    results = (
        compat.L2SideBoxRegularizer(*arguments)(ours),
        peer("L2SideBoxRegularizer")(*arguments)(theirs),
    )
    assert_close(*results, 1e-6)
    for result in results:
        result.backward()
    assert_close(leaves[0].grad, leaves[1].grad, 1e-5)
    with pytest.raises(ValueError, match="reduction must be one of 'sum', 'mean', got 'none'"):
        compat.L2SideBoxRegularizer(1.0, reduction="none")


# Broadcasting


@pytest.mark.parametrize(
    ("shape", "target"),
    [((10,), (4, 5, 10)), ((4, 10), (4, 5, 10)), ((5, 10), (4, 5, 10)), ((3, 4), (3, 1, 4))],
)
@pytest.mark.parametrize("split", [False, True])
def test_broadcast_agrees_and_leaves_the_caller_alone(shape, target, split):
    data = torch.randn(*shape[:-1], 2, shape[-1])
    given = tuple(data.unbind(-2)) if split else data
    copies = tuple(t.clone() for t in given) if split else data.clone()
    ours, theirs = compat.BoxTensor(given), peer("BoxTensor")(copies)
    ours.broadcast(target)
    theirs.broadcast(target)
    assert ours.box_shape == theirs.box_shape
    assert_same_bits(corners(ours), corners(theirs), "corners")
    assert (given[0] if split else given).shape == (shape if split else data.shape)


def test_modules_do_not_touch_their_operands():
    """The package reshapes the right operand in place."""
    right = weights("boxtensor", (4, 2))
    theirs = right.clone()
    left = weights("boxtensor", (5, 4, 2))
    peer("HardIntersection")()(peer("BoxTensor")(left), peer("BoxTensor")(theirs))
    assert theirs.shape == (1, 4, 2, 2)
    for module in (compat.HardIntersection(), compat.GumbelIntersection(0.1), compat.Intersection(0.2)):
        a, b = compat.BoxTensor(left), compat.BoxTensor(right)
        for pair_ in ((a, b), (b, a)):
            assert module(*pair_).box_shape == (5, 4, 2)
        assert b.box_shape == (4, 2) and right.shape == (4, 2, 2)


def test_shapes_that_the_package_cannot_broadcast():
    left, right = weights("boxtensor", (5, 1, 2)), weights("boxtensor", (3, 2))
    with pytest.raises(AssertionError):
        peer("HardIntersection")()(peer("BoxTensor")(left), peer("BoxTensor")(right.clone()))
    found = compat.HardIntersection()(compat.BoxTensor(left), compat.BoxTensor(right))
    assert found.box_shape == (5, 3, 2)
    wanted = compat.hard_intersection(compat.BoxTensor(left), compat.BoxTensor(right.unsqueeze(0)))
    assert_same_bits(corners(found), corners(wanted), "corners")
    with pytest.raises(ValueError, match=r"box_shape must broadcast with \(5, 2\), got \(3, 2\)"):
        compat.HardIntersection()(compat.BoxTensor(left[:, 0]), compat.BoxTensor(right))


# What is mended


def test_log_p_is_not_above_zero():
    """Rounding makes the package's intersection larger than its operand."""
    a, b = weights("boxtensor", (400, 1, 16)), weights("boxtensor", (1, 400, 16))
    a[..., 0, :] -= 3
    a[..., 1, :] += 3  # contains b

    def worst(Tensor, intersection, volume):
        joint = volume(intersection(Tensor(a), Tensor(b), 0.05), 0.05, 0.05)
        return (joint - volume(Tensor(b), 0.05, 0.05)).max()

    names = "BoxTensor", "gumbel_intersection", "bessel_volume_approx"
    assert worst(*(getattr(compat, name) for name in names)) <= 0 < worst(*map(peer, names))


def test_arguments_are_not_written_to():
    t = torch.linspace(0.1, 3, 5)
    before = t.clone()
    peer("softplus_inverse")(t)
    assert not torch.equal(t, before)
    t = before.clone()
    compat.softplus_inverse(t)
    assert_same_bits(t, before, "argument")
    assert compat.softplus_inverse(torch.zeros(2)).isfinite().all()
    data = weights("boxtensor", (4, 3))
    before = data.clone()
    compat.hard_intersection_pooler(compat.BoxTensor(data), torch.tensor([True, False, False, True]))
    assert_same_bits(data, before, "data")


def test_settings_are_kept():
    box = compat.MinDeltaBoxTensor(weights("mindelta", (4, 3)), beta=3.0, threshold=9.0)
    made = [
        box[1:],
        box.box_reshape((2, 2, 3)),
        box.like_this_from_zZ(box.z, box.Z),
        compat.hard_intersection(box, box),
        compat.hard_intersection_pooler(box),
    ]
    for other in made:
        assert other.kwargs == {"beta": 3.0, "threshold": 9.0}
    assert box[1:].box_shape == (3, 3) and box[1:] == box[1:] and box[1:] != box[:3]


# Embeddings


@pytest.mark.parametrize("kind", KINDS)
def test_embedding_agrees_and_shares_state(kind):
    name = f"{kind}_from_vector"
    ours = compat.BoxEmbedding(11, 4, compat.BoxFactory(name))
    theirs = peer("BoxEmbedding")(11, 4, peer("BoxFactory")(name))
    other = nn.BoxEmbedding(11, 4, {"boxtensor": "raw", "mindelta": "min_delta", "sigmoid": "sigmoid"}[kind])
    ours.load_state_dict(theirs.state_dict())
    other.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    index = torch.tensor([[1, 3], [10, 0]])
    wanted = corners(theirs(index))
    assert_close(corners(ours(index)), wanted, 1e-6)
    assert_close(corners(other(index)), wanted, 1e-6)
    assert_close(corners(ours.all_boxes), corners(theirs.all_boxes), 1e-6)
    assert_close(corners(ours.get_bounding_box()), corners(theirs.get_bounding_box()), 1e-6)


def test_initial_boxes():
    peer("uniform_boxes")
    z, Z = compat.uniform_boxes(200, 300, -1.0, 2.0, 0.1, 0.7)
    wanted = peer("uniform_boxes")(200, 300, -1.0, 2.0, 0.1, 0.7)
    side = Z - z
    assert z.dtype == wanted[0].dtype and z.shape == wanted[0].shape
    assert (z >= -1).all() and (Z <= 2).all() and side.min() > 0.0999 and side.max() < 0.7001
    for found, known in ((z, wanted[0]), (side, wanted[1] - wanted[0])):
        assert found.mean().item() == pytest.approx(known.mean().item(), abs=0.02)
        assert found.std().item() == pytest.approx(known.std().item(), rel=0.02)
    factory = compat.BoxFactory("mindelta", {"beta": 5.0})
    weight = torch.empty(6, 2, 3)
    compat.UniformBoxInitializer(3, 6, factory)(weight)
    box = factory(weight)
    assert (box.z >= 0).all() and (box.Z <= 1).all() and (box.z < box.Z).all()
    flat = torch.empty(6, 6)
    compat.UniformBoxInitializer(3, 6, factory)(flat)
    assert compat.BoxFactory("mindelta_from_vector", {"beta": 5.0})(flat).Z.max() <= 1
    with pytest.raises(ValueError, match=r"t must be \[6, 2, 3\] or \[6, 6\], got \[5, 6\]"):
        compat.UniformBoxInitializer(3, 6, factory)(torch.empty(5, 6))


def test_embedding_passes_arguments_on():
    embedding = compat.BoxEmbedding(9, 2, sparse=True)
    embedding(torch.tensor([2, 2])).Z.sum().backward()
    assert embedding.weight.grad.is_sparse


REFUSED = {
    "data must be": lambda: compat.BoxTensor(torch.zeros(3, 4)),
    "Z must have the shape of z": lambda: compat.BoxTensor((torch.zeros(3), torch.zeros(4))),
    "Z must be at least z, got 1": lambda: compat.BoxTensor.W(torch.ones(2), torch.tensor([0.0, 2.0])),
    "vector must have an even": lambda: compat.BoxTensor.from_vector(torch.zeros(3)),
    "name must be one of 'boxtensor'": lambda: compat.BoxFactory("tanh"),
    "name 'boxtensor' is in use": lambda: compat.BoxFactory.register_box_class("boxtensor")(compat.BoxTensor),
    "approximation_mode must be one of": lambda: compat.GumbelIntersection(1.0, "clip"),
    "intersection_temperature must be above 0": lambda: compat.gumbel_intersection(
        *[compat.BoxTensor(torch.zeros(2, 3))] * 2, 0.0
    ),
    "volume_temperature must be above 0": lambda: compat.soft_volume(
        compat.BoxTensor(torch.zeros(2, 3)), 0.0
    ),
    "scale must be in": lambda: compat.soft_volume(compat.BoxTensor(torch.zeros(2, 3)), 1.0, True, 2.0),
    "eps must be finite and at least 0": lambda: compat.hard_volume(
        compat.BoxTensor(torch.zeros(2, 3)), eps=-1.0
    ),
    "target_shape must have the last dimension": lambda: compat.BoxTensor(torch.zeros(2, 3)).box_reshape(
        (2,)
    ),
    "delta_min must be above 0": lambda: compat.uniform_boxes(2, 3, delta_min=0.0),
    "delta_max must be above": lambda: compat.uniform_boxes(2, 3, delta_max=1.5),
    "beta must be above 0": lambda: compat.MinDeltaBoxTensor(torch.zeros(2, 3), beta=0.0),
}


@pytest.mark.parametrize("message", REFUSED)
def test_errors_name_the_argument(message):
    with pytest.raises((TypeError, ValueError, RuntimeError, KeyError), match=message):
        REFUSED[message]()
