"""The Triton kernels of boxes: against the float64 oracle, by the interpreter and on a GPU; ahead of time."""

import math

import aot
import boxes_oracle as oracle
import pytest
import torch
from pyops.triton_kernels import boxes as kernels
from suite import assert_same_bits

from pyops.reference import boxes as reference

F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
INF, NAN = math.inf, math.nan
# (tau, nu): equal, unequal, hard sides, soft boxes, hard boxes, exponents beyond float32
MODES = [(0.1, 0.1), (0.3, 0.1), (0.2, 0.0), (0.0, 0.2), (0.0, 0.0), (0.01, 0.01)]
modes = pytest.mark.parametrize(("tau", "nu"), MODES, ids=lambda v: f"{v:g}")
GRADIENT_GATE = {F64: 1e-11, F32: 1e-5, BF16: 8e-3, F16: 2e-3}


def launch(run, function, *args):
    """Its result; the inputs must come back as they went, strides included."""
    result, after = run(function, *args)
    for x, y in zip(args, after, strict=True):
        if isinstance(x, torch.Tensor):
            assert x.stride() == y.stride()
            assert_same_bits(x, y, "an input")
    return result


def condition(corners, tau, nu, dtype):
    """What w near 0 amplifies rounding by: (of log volumes, of gradients)."""
    if not nu == 0 < tau:
        return 0.0, 0.0
    amplified = (8 * torch.finfo(F64 if dtype == F64 else F32).eps) * oracle.condition(*corners, tau)
    return amplified.sum(-1), amplified.max().item()


def check(run, queries, items, tau, nu, nus=None, gradients=True):
    """Log volumes and gradients of pairs; returns the volumes."""
    corners = [*queries, *items]
    dtype, dim = corners[0].dtype, corners[0].shape[1]
    exact = [t.double().requires_grad_() for t in corners]
    per_dim = nu if nus is None else nus.double()
    shift = oracle.offset(tau, per_dim)
    wanted = oracle.pairwise(*exact, tau, per_dim)
    found = launch(run, kernels.box_log_volumes, *corners, tau, nu, shift, nus)
    assert found.dtype == (F64 if dtype == F64 else F32) and found.is_contiguous()
    slack, amplified = condition([t.detach() for t in exact], tau, nu, dtype)
    oracle.assert_log_volumes(found, wanted.detach(), dtype, dim, slack)
    if gradients:
        seed = torch.randn(wanted.shape, dtype=F64).to(found.dtype)
        seed[:, ::3] = 0.0
        wanted_grads = torch.autograd.grad(wanted, exact, seed.double())
        args = (seed, *corners, tau, nu, shift, nus)
        grads = launch(run, kernels.box_log_volumes_backward, *args)
        assert all(g.dtype == dtype and g.is_contiguous() for g in grads)
        oracle.assert_gradients(grads, wanted_grads, GRADIENT_GATE[dtype] + amplified)
    return found


@pytest.mark.parametrize("dtype", [F64, F32, BF16, F16], ids=lambda d: str(d).removeprefix("torch."))
@modes
def test_pairs(run, tau, nu, dtype):
    check(run, oracle.boxes(5, 3, dtype=dtype), oracle.boxes(19, 3, dtype=dtype), tau, nu)


@pytest.mark.parametrize(("queries", "items", "dim"), [(1, 1, 1), (70, 3, 2), (3, 131, 1), (2, 5, 64)])
@modes
def test_sizes(run, tau, nu, queries, items, dim):
    """Around tiles; a gradient takes a program for each dimension."""
    gradients = dim < 64 or tau == nu == 0
    check(run, *(oracle.boxes(n, dim, dtype=F32) for n in (queries, items)), tau, nu, gradients=gradients)


def test_more_dimensions_than_are_summed_at_a_time(run):
    check(run, oracle.boxes(3, 100, dtype=F32), oracle.boxes(2, 100, dtype=F32), 0.1, 0.1)
    for tau, nu in ((0.1, 0.3), (0.0, 0.0)):
        check(run, *(oracle.boxes(n, 200, dtype=F32) for n in (2, 3)), tau, nu, gradients=False)


@pytest.mark.parametrize("dtype", [F64, F32], ids=["float64", "float32"])
@pytest.mark.parametrize("tau", [0.1, 0.0, 0.001])
def test_nu_per_dimension(run, tau, dtype):
    nus = torch.tensor([0.05, 0.1, 0.7, 2.0], dtype=dtype)
    check(run, oracle.boxes(4, 4, dtype=dtype), oracle.boxes(6, 4, dtype=dtype), tau, 0.0, nus)


@pytest.mark.parametrize("tau", [1.0, 0.02, 1e-6, 1e-30])
def test_small_temperatures_and_both_domains(run, tau):
    """Blocks of boxes whose exponents fit beside blocks whose do not, on either side."""
    z, Z = oracle.boxes(130, 3, dtype=F32, spread=10 * min(tau, 0.1), side=min(tau, 0.1))
    z[3, 1], Z[70, 2] = -300 * tau, 300 * tau
    z[129] += 200 * tau
    Z[129] += 200 * tau
    check(run, (z[:3], Z[:3]), (z, Z), tau, tau if tau >= 1e-6 else 0.1)
    check(run, (z, Z), (z[::40], Z[::40]), tau, 0.1)


@pytest.mark.parametrize("distance", [30, 1000, 1e5])
def test_disjoint_boxes_keep_their_slope(run, distance):
    for tau, nu in ((0.1, 0.1), (0.1, 0.3), (0.0, 0.1)):
        z = torch.zeros(1, 3)
        corners = z, z + 1, z + 1 + distance * nu, z + 2 + distance * nu
        check(run, corners[:2], corners[2:], tau, nu)
        args = (torch.ones(1, 1), *corners, tau, nu, 0.0, None)
        grads = launch(run, kernels.box_log_volumes_backward, *args)
        assert ((grads[1] * nu - 1).abs() <= 1e-5).all() and ((grads[2] * nu + 1).abs() <= 1e-5).all()


def test_large_coordinates(run):
    queries, items = oracle.boxes(3, 5, dtype=F32), oracle.boxes(4, 5, dtype=F32)
    check(run, [t + 1e5 for t in queries], [t + 1e5 for t in items], 0.1, 0.1)


def test_strides(run):
    """Stacked, transposed, sliced and expanded corners, and an expanded gradient, bit for bit."""
    for dtype in (F32, F64):
        qz, qZ = oracle.boxes(6, 5, dtype=dtype)
        iz, iZ = oracle.boxes(9, 5, dtype=dtype)
        stacked = torch.stack((qz, qZ), 1)
        wide = torch.full((9, 11), NAN, dtype=dtype)
        wide[:, 1::2] = iZ
        views = stacked[:, 0], stacked[:, 1], iz.mT.contiguous().mT, wide[:, 1::2]
        numbers = 0.1, 0.1, 0.1, None
        grad = torch.randn(9, dtype=dtype).expand(6, 9)
        plain = launch(run, kernels.box_log_volumes, qz, qZ, iz, iZ, *numbers)
        assert_same_bits(launch(run, kernels.box_log_volumes, *views, *numbers), plain, "volumes")
        plain = launch(run, kernels.box_log_volumes_backward, grad.contiguous(), qz, qZ, iz, iZ, *numbers)
        assert_same_bits(
            launch(run, kernels.box_log_volumes_backward, grad, *views, *numbers), plain, "grads"
        )


@modes
def test_infinities_and_nan(run, tau, nu):
    queries, items = oracle.boxes(6, 4, dtype=F32), oracle.boxes(21, 4, dtype=F32)
    clean = check(run, queries, items, tau, nu, gradients=False)
    qz, qZ, iz, iZ = (t.clone() for t in (*queries, *items))
    qz[1], qZ[1] = -INF, INF  # unconstrained
    qz[2, 3] = -INF
    iZ[4, 0] = INF
    qz[3, 1], iZ[5, 2] = INF, -INF  # empty
    qz[4, 0], iZ[20, 3] = NAN, NAN
    iz[6], iZ[6] = -INF, INF
    shift = oracle.offset(tau, nu)
    found = launch(run, kernels.box_log_volumes, qz, qZ, iz, iZ, tau, nu, shift, None)
    nan = torch.zeros(6, 21, dtype=torch.bool)
    nan[4], nan[:, 20] = True, True
    assert torch.equal(found.isnan(), nan)
    empty = torch.zeros(6, 21, dtype=torch.bool)
    empty[3], empty[:, 5] = True, True
    assert (found[empty & ~nan] == -INF).all() and found[1, 6] == INF
    same = [0, 5]
    columns = [*range(4), *range(7, 20)]
    wanted = clean[same][:, columns].double()
    slack = condition([t.double() for t in (*queries, *items)], tau, nu, F32)[0]
    slack = slack[same][:, columns] if nu == 0 < tau else 0.0
    oracle.assert_log_volumes(found[same][:, columns], wanted, F32, 4, slack)
    free = oracle.log_volume([t.double() for t in (iz, iZ)], tau, nu)
    oracle.assert_log_volumes(found[1, columns], free[columns], F32, 4)
    # What has no incoming gradient passes none on, whatever its pairs are.
    grad = torch.randn(6, 21)
    grad[nan | found.isinf()] = 0.0
    args = grad, qz, qZ, iz, iZ, tau, nu, shift, None
    grads = launch(run, kernels.box_log_volumes_backward, *args)
    assert all(g.isfinite().all() for g in grads)
    grad[2, 3] = NAN
    grads = launch(run, kernels.box_log_volumes_backward, *args)
    if found[2, 3] > -INF:
        for g, row in zip(grads, (2, 2, 3, 3), strict=True):
            hit = g.isnan().any(1)
            assert hit[row] and hit.sum() == 1


@pytest.mark.parametrize("shape", [(0, 4, 3), (4, 0, 3), (4, 5, 0)])
def test_nothing_to_do(run, shape):
    queries, items, dim = shape
    corners = (
        torch.zeros(queries, dim),
        torch.ones(queries, dim),
        torch.zeros(items, dim),
        torch.ones(items, dim),
    )
    for tau, nu in ((0.1, 0.1), (0.0, 0.0)):
        found = launch(run, kernels.box_log_volumes, *corners, tau, nu, 0.0, None)
        assert torch.equal(found, torch.zeros(queries, items))
        grads = launch(run, kernels.box_log_volumes_backward, found, *corners, tau, nu, 0.0, None)
        for g, c in zip(grads, corners, strict=True):
            assert torch.equal(g, torch.zeros_like(c))
    terms = (t.unsqueeze(1) for t in corners[:2])
    signs = torch.ones(queries, 1)
    values, indices = launch(run, kernels.box_topk, *terms, signs, *corners[2:], None, 0.1, 0.1, 0.0, 2, True)
    assert values.shape == indices.shape == (queries, 2)
    if items == 0:
        assert (values == -INF).all() and (indices == -1).all()


# ---- the best items


def search(run, dtype, *, queries=3, terms=1, items=300, dim=3, k=5, tau=0.1, nu=0.1, ilv=True, change=None):
    """(values, indices, the reference's) of random queries; with several terms, AND NOT and unused ones."""
    qz, qZ = oracle.boxes(queries, terms, dim, dtype=dtype, side=2.0)
    iz, iZ = oracle.boxes(items, dim, dtype=dtype)
    signs = torch.ones(queries, terms, dtype=F64 if dtype == F64 else F32)
    signs[:, 1:2] = -1.0
    signs[:, 2:] = 0.0
    if change is not None:
        change(qz, qZ, iz, iZ)
    shift = oracle.offset(tau, nu)
    volume = oracle.log_volume((iz.double(), iZ.double()), tau, nu).to(signs.dtype) if ilv else None
    args = qz, qZ, signs, iz, iZ, volume, tau, nu, shift, k, True
    values, indices = launch(run, kernels.box_topk, *args)
    wide = [t.double() for t in args[:5]]
    volume = None if volume is None else volume.double()
    exact = reference.box_topk(*wide, volume, tau, nu, shift, items, False)
    assert values.shape == indices.shape == (queries, k) and indices.dtype == torch.int64
    dense = torch.full((queries, items), NAN, dtype=F64).scatter(1, exact[1], exact[0])
    return values, indices, exact, dense


def check_found(values, indices, exact, dense, gate=5e-5):
    """The exact scores of what was found are the best ones, and the values are those scores."""
    count = min(values.shape[1], dense.shape[1])
    found = dense.gather(1, indices[:, :count])
    wanted = exact[0][:, :count]
    for row in indices[:, :count]:
        assert len(set(row.tolist())) == count
    torch.testing.assert_close(found, wanted, rtol=gate, atol=gate, equal_nan=True)
    torch.testing.assert_close(values[:, :count].double(), wanted, rtol=gate, atol=gate, equal_nan=True)


@pytest.mark.parametrize("dtype", [F64, F32, BF16], ids=["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("terms", [1, 3])
def test_topk(run, dtype, terms):
    check_found(*search(run, dtype, terms=terms, items=130))


@pytest.mark.parametrize(
    ("k", "items", "queries"), [(1, 520, 2), (20, 70, 17), (100, 140, 1), (130, 300, 2), (9, 4, 2)]
)
def test_topk_sizes(run, k, items, queries):
    """Every way to keep the best, several parts of the items, and more than there are."""
    values, indices, exact, dense = search(run, F32, k=k, items=items, queries=queries, dim=2)
    check_found(values, indices, exact, dense)
    assert (values[:, items:] == -INF).all() and (indices[:, items:] == -1).all()


@pytest.mark.parametrize("dtype", [F64, F32], ids=["float64", "float32"])
@pytest.mark.parametrize("k", [6, 140])
def test_topk_ties_infinities_and_nan(run, dtype, k):
    """Equal scores by lower index, over tiles too; -inf above NaN, which has its index."""

    def change(qz, qZ, iz, iZ):
        iz[:] = iz[:1]
        iZ[:] = iZ[:1]
        iz[[7, 66, 130]] -= 1.0
        iZ[[7, 66, 130]] += 1.0
        iZ[9] = -INF
        iz[70, 1] = NAN

    values, indices, *_ = search(
        run, dtype, queries=1, items=138, k=k, tau=0.0, nu=0.5, ilv=False, change=change
    )
    assert indices[0, :6].tolist() == [7, 66, 130, 0, 1, 2]
    if k > 138:
        rest = [n for n in range(138) if n not in (7, 9, 66, 70, 130)]
        assert indices[0, :138].tolist() == [7, 66, 130, *rest, 9, 70]
        assert values[0, 136] == -INF and values[0, 137].isnan()
        assert (indices[0, 138:] == -1).all()


def test_topk_of_empty_differences(run):
    """A query less a larger one holds nothing: -inf for every item, by index."""

    def change(qz, qZ, iz, iZ):
        qz[:, 1] = qz[:, 0] - 1
        qZ[:, 1] = qZ[:, 0] + 1

    for nu in (0.0, 0.2):
        values, indices, *_ = search(run, F32, terms=2, items=70, k=3, tau=0.0, nu=nu, change=change)
        assert (values == -INF).all() and torch.equal(indices, torch.arange(3).expand(3, 3))


# ---- sampled pairs


@pytest.mark.parametrize("dtype", [F64, F32, BF16], ids=["float64", "float32", "bfloat16"])
@modes
def test_sampled(run, tau, nu, dtype):
    for users, items, dim, batch, samples in ((7, 9, 3, 5, 6), (3, 2, 70, 4, 1)):
        queries, table = oracle.boxes(users, dim, dtype=dtype), oracle.boxes(items, dim, dtype=dtype)
        stacked = torch.stack(table, 1)
        table = stacked[:, 0], stacked[:, 1]
        q, i = torch.randint(users, (batch,)), torch.randint(items, (samples, batch)).mT
        shift = oracle.offset(tau, nu)
        exact = [
            t[n].double().requires_grad_() for t, n in zip((*queries, *table), (q, q, i, i), strict=True)
        ]
        both = oracle.intersection([[t.unsqueeze(1) for t in exact[:2]], exact[2:]], tau)
        wanted = oracle.log_volume(both, tau, nu)
        tail = q, i, tau, nu, shift
        found = launch(run, kernels.box_sampled, *queries, *table, *tail)
        pairs = [
            t.flatten(0, -2).detach()
            for t in (*(e.unsqueeze(1).expand_as(exact[2]) for e in exact[:2]), *exact[2:])
        ]
        slack, amplified = condition(pairs, tau, nu, dtype)
        slack = slack.diagonal().view(batch, samples) if nu == 0 < tau else 0.0
        oracle.assert_log_volumes(found, wanted.detach(), dtype, dim, slack)
        seed = torch.randn(wanted.shape, dtype=F64).to(found.dtype)
        grads = launch(run, kernels.box_sampled_backward, seed, *queries, *table, *tail)
        wanted_grads = torch.autograd.grad(wanted, exact, seed.double())
        flat = [w.flatten(0, -2) for w in wanted_grads]
        assert all(g.dtype == seed.dtype for g in grads)
        oracle.assert_gradients(grads, flat, GRADIENT_GATE[dtype] + amplified)


def test_sampled_out_of_range_and_nan(run):
    """No access outside the tables; NaN in its own pairs and rows only."""
    queries, items = oracle.boxes(4, 3, dtype=F32), oracle.boxes(5, 3, dtype=F32)
    items[0][2, 1] = NAN
    q, i = torch.tensor([0, 4, -1, 3]), torch.tensor([[0, 1], [0, 1], [0, 1], [2, 5]])
    found = launch(run, kernels.box_sampled, *queries, *items, q, i, 0.1, 0.1, 0.1)
    assert found[0].isfinite().all() and found[1:].isnan().all()
    grads = launch(run, kernels.box_sampled_backward, torch.ones(4, 2), *queries, *items, q, i, 0.1, 0.1, 0.1)
    assert grads[0][0].isfinite().all() and grads[2][:2].isfinite().all() and grads[0][1].isnan().all()


def test_sampled_nothing(run):
    queries, items = oracle.boxes(4, 3, dtype=F32), oracle.boxes(5, 3, dtype=F32)
    for q, i in ((torch.empty(0), torch.empty(0, 2)), (torch.ones(2), torch.empty(2, 0))):
        tail = q.long(), i.long(), 0.1, 0.1, 0.1
        assert launch(run, kernels.box_sampled, *queries, *items, *tail).shape == i.shape
        grads = launch(run, kernels.box_sampled_backward, i, *queries, *items, *tail)
        assert not any(g.any() for g in grads)


# ---- compiled ahead of time


def meta(*shape, dtype=F32):
    return torch.empty(shape, dtype=dtype, device="meta")


def everything(dtype, tau, nu, *, nus=False, queries=1024, items=4096, dim=64, terms=2, k=10):
    """Every launcher on one form."""
    wide = F64 if dtype == F64 else F32
    q, i = ([meta(n, dim, dtype=dtype) for _ in "zZ"] for n in (queries, items))
    numbers = tau, nu, oracle.offset(tau, nu)
    slopes = meta(dim, dtype=wide) if nus else None
    kernels.box_log_volumes(*q, *i, *numbers, slopes)
    kernels.box_log_volumes_backward(meta(queries, items, dtype=wide), *q, *i, *numbers, slopes)
    if not nus:
        several = [meta(queries, terms, dim, dtype=dtype) for _ in "zZ"]
        volume, signs = meta(items, dtype=wide), meta(queries, terms, dtype=wide)
        kernels.box_topk(*several, signs, *i, volume, *numbers, k, True)
        index = meta(queries, dtype=torch.int64), meta(queries, 6, dtype=torch.int64)
        kernels.box_sampled(*q, *i, *index, *numbers)
        kernels.box_sampled_backward(meta(queries, 6, dtype=wide), *q, *i, *index, *numbers)


FORMS = {
    "equal": {"dtype": F32, "tau": 0.1, "nu": 0.1},
    "general": {"dtype": F32, "tau": 0.1, "nu": 0.3},
    "nus": {"dtype": F32, "tau": 0.1, "nu": 0.3, "nus": True},
    "smooth_hard": {"dtype": F32, "tau": 0.1, "nu": 0.0},
    "soft": {"dtype": F32, "tau": 0.0, "nu": 0.1},
    "hard": {"dtype": F32, "tau": 0.0, "nu": 0.0},
    "bfloat16": {"dtype": BF16, "tau": 0.1, "nu": 0.1},
    "float64": {"dtype": F64, "tau": 0.1, "nu": 0.1},
    "k128": {"dtype": F32, "tau": 0.1, "nu": 0.1, "k": 128},
    "small": {"dtype": F32, "tau": 0.1, "nu": 0.1, "queries": 3, "items": 300},
}
DEFAULT = [("equal", "sm_90"), ("hard", "sm_80"), ("bfloat16", "gfx942"), ("general", "sm_100")]
CASES = DEFAULT + [(f, a) for f in FORMS for a in aot.TARGETS if (f, a) not in DEFAULT]
KERNELS = {name for name in vars(kernels) if name.endswith("_kernel")}
# Bytes per thread; the most are those of topk_kernel, which also sorts.
SPILLS = dict.fromkeys(KERNELS, 32) | {"topk_kernel": 160}
# Scalar registers, kept in vector registers, none of which spills.
SPILLS_AMD = dict.fromkeys(KERNELS, 64)


@pytest.mark.parametrize(
    ("form", "arch"),
    [pytest.param(*c, id="-".join(c), marks=() if c in DEFAULT else pytest.mark.slow) for c in CASES],
)
def test_compiles_within_the_bounds(form, arch):
    spills = SPILLS_AMD if arch.startswith("gfx") else SPILLS
    wrong = aot.faults(form, lambda: everything(**FORMS[form]), arch, spills)
    assert not wrong, "\n".join(wrong)


def test_sizes_of_one_compile():
    """Triton makes a constant of every argument that is 1."""
    with aot.record("sm_90") as launches:
        everything(F32, 0.1, 0.1, queries=1, items=1, dim=1, terms=1, k=1)
    for item in launches:
        assert not aot.narrow_offsets(item.compile()), item.name


def test_every_kernel_is_compiled():
    with aot.record("sm_90") as launches:
        everything(**FORMS["equal"])
    assert {item.name for item in launches} == KERNELS
