"""The fused step against its float64 formula: norms, dtypes, layouts, momentum, the light form, rounding."""

import itertools
import math

import lmo_oracle as oracle
import pytest
import torch
from suite import UNIT, assert_close, assert_same_bits, layouts

import pyops
from pyops.ops.lmo import lmo_step_

ROWS = pyops.polar_coefficients("newton_schulz", 5)
FLAT = [x for row in ROWS for x in row]
NORMS = ["spectral", "sign", "col", "row", "euclidean"]
F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16


def step(weights, grads, momenta=(), norm="spectral", shrink=0.9, step=0.1, **options):
    """lmo_step_ with defaults, under no_grad."""
    count = len(weights)
    shrinks = shrink if isinstance(shrink, list) else [shrink] * count
    steps = step if isinstance(step, list) else [step] * count
    settings = {
        "momentum": 0.9,
        "nesterov": False,
        "grad_decay": 1.0,
        "coefficients": FLAT,
        "restarts": [],
        "form": "auto",
        "compute": "float32",
        "eps": 0.0,
        "seed": -1,
    } | options
    with torch.no_grad():
        lmo_step_(list(weights), list(grads), list(momenta), norm, shrinks, steps, *settings.values())


def direction(d, norm):
    if norm == "spectral":
        return oracle.polar(d, ROWS)
    if norm == "sign":
        return d.sign()
    dims = {"col": -2, "row": -1, "euclidean": (-2, -1)}[norm]
    return d / d.pow(2).sum(dims, keepdim=True).sqrt()


def formula(w, g, m, norm, shrink, step, momentum=0.9, nesterov=False, grad_decay=1.0):
    """(W, g, m) after the step, in float64; m is rounded to its dtype before it is used."""
    g64 = g.double()
    if m is None:
        d, after = g64, g64 * grad_decay
    else:
        m64 = m.double() + (1 - momentum) * (g64 - m.double())
        d, after = (g64 + momentum * (m64 - g64) if nesterov else m64), g64
        m = m64
    return shrink * w.double() - step * direction(d, norm), after, m


def random(shape, dtype):
    return torch.randn(shape, dtype=F64).to(dtype)


def gate(norm, dtypes, compute="float32"):
    """Of the change of W: from the direction, and from roundings of d and W to their dtypes."""
    rounding = max(UNIT[d] for d in dtypes)
    if norm == "spectral":
        return oracle.gate(compute, ROWS, conditioned=True) + 8 * rounding
    return 8 * rounding


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("shape", [(12, 40), (40, 12), (3, 10, 25), (7, 1), (1, 7)])
def test_float64(norm, nesterov, shape):
    """Several tensors of one call, each with its own shrink and step."""
    w, g, m = ([random(shape, F64) for _ in range(3)] for _ in range(3))
    shrinks, steps = [1.0, 0.9, 0.0], [0.1, 0.2, -1.0]
    wanted = [
        formula(*tensors, norm, *settings, nesterov=nesterov)
        for tensors, settings in zip(zip(w, g, m, strict=True), zip(shrinks, steps, strict=True), strict=True)
    ]
    before = [x.clone() for x in g]
    step(w, g, m, norm, shrinks, steps, nesterov=nesterov, compute="float64")
    for i, (new_w, _, new_m) in enumerate(wanted):
        assert_close(w[i], new_w, 1e-12)
        assert_close(m[i], new_m, 1e-14)
        assert_same_bits(g[i], before[i], "gradient")


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("grad_decay", [1.0, 0.9, 0.0])
def test_light_form(norm, grad_decay):
    """The gradient buffer is the momentum: used as it is, then decayed."""
    w, g = random((9, 30), F64), random((9, 30), F64)
    new_w, new_g, _ = formula(w, g, None, norm, 0.95, 0.3, grad_decay=grad_decay)
    step([w], [g], [], norm, 0.95, 0.3, grad_decay=grad_decay, compute="float64")
    assert_close(w, new_w, 1e-12)
    assert torch.allclose(g, new_g, rtol=1e-15, atol=0)


def test_grad_decay_is_for_the_light_form_only():
    w, g, m = (random((4, 6), F64) for _ in range(3))
    before = g.clone()
    step([w], [g], [m], grad_decay=0.5, compute="float64")
    assert_same_bits(g, before, "gradient")


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(
    "types",
    list(itertools.product([F32, BF16, F16], [F32, BF16], [F32, BF16, None])),
    ids=lambda t: "-".join(map(str, t)).replace("torch.", ""),
)
def test_mixed_dtypes(norm, types):
    """Weights, gradients and momenta each in their own dtype; float32 arithmetic between."""
    w_type, g_type, m_type = types
    w, g = random((10, 36), w_type), random((10, 36), g_type)
    m = None if m_type is None else random((10, 36), m_type)
    start = w.double()
    new_w, _, new_m = formula(w, g, m, norm, 1.0, 3.0)
    step([w], [g], [] if m is None else [m], norm, 1.0, 3.0)
    assert (w.dtype, g.dtype) == (w_type, g_type)
    if norm == "sign" and m is not None:  # rounding of d may turn a sign near zero
        d = new_m.abs()
        near = d < 4 * UNIT[m_type] * d.amax()
        new_w = torch.where(near, w.double(), new_w)
    assert_close(w.double() - start, new_w - start, gate(norm, [t for t in types if t]))
    if m is not None:
        assert m.dtype == m_type
        assert_close(m, new_m, 2 * UNIT[m_type])


@pytest.mark.parametrize("compute", ["float32", "bf16x3", "bfloat16"])
def test_compute(compute):
    w, g = random((3, 24, 80), F32), random((3, 24, 80), F32)
    start = w.clone()
    step([w], [g], step=1.0, shrink=1.0, compute=compute)
    bound = {"float32": 1e-5, "bf16x3": 1e-4, "bfloat16": 2.5e-2}[compute]
    assert_close(start - w, oracle.polar(g, ROWS), bound)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype", [F64, BF16])
def test_layouts(norm, dtype):
    """Any strides of any of the three tensors: the same bits, and nothing written beside them."""
    shape = (3, 10, 14)
    plain = [random(shape, dtype) for _ in range(3)]
    compute = oracle.COMPUTE_OF[dtype]
    wanted = [t.clone() for t in plain]
    step(wanted[:1], wanted[1:2], wanted[2:], norm, compute=compute)
    for which in range(3):
        for name, view in layouts(plain[which]).items():
            tensors = [t.clone() for t in plain]
            tensors[which] = view
            guard = torch.empty(0, dtype=dtype).set_(view.untyped_storage())
            outside = guard.clone()
            outside.as_strided(view.shape, view.stride(), view.storage_offset()).copy_(wanted[which])
            step(tensors[:1], tensors[1:2], tensors[2:], norm, compute=compute)
            assert_same_bits(tuple(tensors), tuple(wanted), f"{name} of tensor {which}")
            assert_same_bits(guard, outside, f"memory around {name} of tensor {which}")


@pytest.mark.parametrize("norm", NORMS)
def test_one_call_equals_many(norm):
    """Grouping tensors of different shapes, batching, and the number of threads change no bit."""
    shapes = [(8, 20), (20, 8), (2, 8, 20), (5, 5), (1, 9)]
    start = [[random(s, F32) for s in shapes] for _ in range(3)]
    together = [[t.clone() for t in group] for group in start]
    step(*together, norm)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for i in range(len(shapes)):
            alone = [group[i].clone() for group in start]
            step(*([t] for t in alone), norm)
            assert_same_bits(
                tuple(alone), tuple(group[i] for group in together), f"tensor {i}, {threads} threads"
            )


def test_equals_polar():
    """With shrink 0 and step -1 the step is polar itself."""
    for shape in ((16, 40), (40, 16), (12, 12)):
        for dtype in (F32, BF16):
            g, w = random(shape, dtype), torch.zeros(shape, dtype=dtype)
            compute = oracle.COMPUTE_OF[dtype]
            step([w], [g], [], shrink=0.0, step=-1.0, compute=compute)
            assert_same_bits(w, pyops.polar(g, method="newton_schulz"), f"{shape} {dtype}")


def test_shrink_zero_ignores_the_weight():
    """0 W is 0, also where W holds NaN: the step then writes u alone."""
    g = random((4, 8), F64)
    w = torch.full((4, 8), math.nan, dtype=F64)
    step([w], [g], [], "row", 0.0, -1.0)
    assert_close(w, direction(g, "row"), 1e-14)


@pytest.mark.parametrize("norm", NORMS)
def test_nan_stays_in_its_matrix(norm):
    w, g = random((3, 5, 8), F32), random((3, 5, 8), F32)
    clean = w.clone()
    step([clean], [g.clone()], [], norm)
    g[1, 2, 3] = math.nan
    step([w], [g], [], norm)
    assert_same_bits(w[[0, 2]], clean[[0, 2]], "neighbours")
    assert w[1].isnan().any()
    assert w[1].isnan().all() == (norm in ("spectral", "euclidean"))


@pytest.mark.parametrize("norm", NORMS)
def test_zero_gradient_only_shrinks(norm):
    w = random((5, 8), F32)
    start = w.clone()
    step([w], [torch.zeros(5, 8)], [], norm, shrink=0.5)
    assert_same_bits(w, 0.5 * start, "zero gradient")


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 3, 4), (2, 0, 4)])
def test_empty(shape):
    w, g, m = (torch.zeros(shape) for _ in range(3))
    step([w], [g], [m])
    step([], [], [])
    assert w.shape == shape


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("norm", ["row", "spectral"])
def test_stochastic_rounding_is_unbiased(dtype, norm):
    """A step of a fraction of the spacing moves the mean by that fraction; nearest rounding would lose it."""
    n, runs = 64, 200
    g = random((n, n), F32)
    u = -direction(g.double(), norm) if norm == "row" else -oracle.polar(g, ROWS)
    start = torch.ones(n, n, dtype=dtype)
    spacing = {BF16: 2.0**-8, F16: 2.0**-11}[dtype]  # below 1; twice that above
    amount = spacing / 4 / u.abs().mean().item()
    total = torch.zeros(n, n, dtype=F64)
    for seed in range(runs):
        w = start.clone()
        step([w], [g], [], norm, 1.0, amount, seed=seed)
        total += w.double() - 1
        below, above = (w.double() - 1).amin(), (w.double() - 1).amax()
        assert -spacing * 4 <= below and above <= spacing * 8
    mean, wanted = total / runs, amount * u
    # The average over all entries has a standard error of about spacing / sqrt(runs n^2).
    error = ((mean - wanted) * u.sign()).mean().item()
    assert abs(error) <= 5 * spacing / math.sqrt(runs * n * n) + 0.01 * amount * u.abs().mean().item()
    nearest = start.clone()
    step([nearest], [g], [], norm, 1.0, amount / 8, seed=-1)
    assert_same_bits(nearest, start, "nearest rounding of a tiny step")


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_stochastic_rounding_depends_on_seed_tensor_and_element(dtype):
    g = random((16, 32), F32)

    def run(seed, position=0):
        w = [torch.ones(16, 32, dtype=dtype) for _ in range(2)]
        step(w, [g, g], [], "row", 1.0, 0.01, seed=seed)
        return w[position]

    assert_same_bits(run(3), run(3), "same seed")
    assert not torch.equal(run(3), run(4))
    assert not torch.equal(run(3), run(3, position=1))
    same_value = torch.ones(16, 32)
    w = torch.ones(16, 32, dtype=dtype)
    step([w], [same_value], [], "row", 1.0, 0.005, seed=1)
    assert w.unique().numel() == 2  # up here, down there


def test_exact_values_are_never_moved_by_stochastic_rounding():
    w = torch.tensor([[1.0, -2.5, 0.0, 3.25]], dtype=BF16)
    for seed in range(50):
        x = w.clone()
        step([x], [torch.zeros(1, 4)], [], "row", 1.0, 0.1, seed=seed)
        assert_same_bits(x, w, "exact value")


def test_stochastic_rounding_of_float32_is_none():
    w, g = random((5, 8), F32), random((5, 8), F32)
    other = w.clone()
    step([w], [g], [], "row", seed=5)
    step([other], [g], [], "row", seed=-1)
    assert_same_bits(w, other, "float32")


def test_versions_are_counted():
    """Autograd notices that the tensors changed, although a kernel wrote them."""
    w = torch.randn(4, 6, requires_grad=True)
    loss = (w * w).sum()
    step([w], [torch.randn(4, 6)], [])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_opcheck():
    args = [
        [random((4, 6), F32), random((2, 3, 5), F32)],
        [random((4, 6), F32), random((2, 3, 5), F32)],
        [random((4, 6), F32), random((2, 3, 5), F32)],
    ]
    tail = (FLAT, [1, 3], "auto", "float32", 0.0, -1)
    for momenta in (args[2], []):
        torch.library.opcheck(
            torch.ops.pyops.lmo_step_.default,
            (args[0], args[1], momenta, "spectral", [0.9, 0.9], [0.1, 0.1], 0.9, True, 0.5, *tail),
            test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"),
        )


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(dynamic):
    def run(w, g, m):
        step([w], [g], [m], "spectral")
        return w * 2

    tensors = [random((4, 6), F32) for _ in range(3)]
    eager = [t.clone() for t in tensors]
    doubled = run(*eager)
    torch.compiler.reset()
    compiled = torch.compile(run, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    assert_same_bits(compiled(*tensors), doubled, "compiled")
    assert_same_bits(tuple(tensors), tuple(eager), "tensors")


def test_autocast_changes_nothing():
    tensors = [[random((8, 24), F32)] for _ in range(3)]
    wanted = [[t.clone() for t in group] for group in tensors]
    step(*wanted)
    with torch.autocast("cpu", dtype=BF16):
        step(*tensors)
    for found, good in zip(tensors, wanted, strict=True):
        assert_same_bits(tuple(found), tuple(good), "autocast")


def test_errors():
    w, g = torch.randn(3, 4), torch.randn(3, 4)
    tail = ([0.9], [0.1], 0.9, False, 1.0, FLAT, [1, 3], "auto", "float32", 0.0, -1)
    with pytest.raises(RuntimeError, match=r"lmo_step_ writes .* under torch.no_grad"):
        lmo_step_([w.clone().requires_grad_()], [g], [], "spectral", *tail)
    with pytest.raises(ValueError, match="grads must have one entry per weight, 1, got 2"):
        lmo_step_([w], [g, g], [], "spectral", *tail)
    with pytest.raises(ValueError, match="momenta must have one entry per weight, 1, got 2"):
        lmo_step_([w], [g], [g, g], "spectral", *tail)
    with pytest.raises(ValueError, match="steps must have one entry per weight, 1, got 0"):
        lmo_step_([w], [g], [], "spectral", [0.9], [], *tail[2:])
