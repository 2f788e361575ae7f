"""Boxes on a CUDA device against the float64 oracle, at the sizes the kernels are tiled for.

tests/triton/test_boxes.py runs the same kernels on small sizes, by the interpreter and here.
"""

import math

import boxes_oracle as oracle
import pytest
import torch
from suite import assert_same_bits

import pyops
from pyops.boxes import box_topk, pairwise_log_volume, sampled_scores

pytestmark = pytest.mark.gpu

F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
INF, NAN = math.inf, math.nan
MODES = [(0.1, 0.1), (0.1, 0.4), (0.2, 0.0), (0.0, 0.2), (0.0, 0.0), (0.01, 0.01)]
modes = pytest.mark.parametrize(("tau", "nu"), MODES, ids=lambda v: f"{v:g}")
dtypes = pytest.mark.parametrize("dtype", [F64, F32, BF16, F16], ids=lambda d: str(d).removeprefix("torch."))
GRADIENT_GATE = {F64: 1e-11, F32: 1e-5, BF16: 8e-3, F16: 2e-3}


def boxes(*shape, **options):
    return tuple(t.cuda() for t in oracle.boxes(*shape, **options))


def temperatures(tau, nu):
    return {"intersection_temperature": tau, "volume_temperature": nu}


def check(queries, items, tau, nu):
    """Volumes and gradients; the oracle runs on the GPU too."""
    inputs = [t.clone().requires_grad_() for t in (*queries, *items)]
    exact = [t.detach().double().requires_grad_() for t in inputs]
    dtype, dim = inputs[0].dtype, inputs[0].shape[1]
    found = pairwise_log_volume(inputs[:2], inputs[2:], **temperatures(tau, nu))
    wanted = oracle.pairwise(*exact, tau, nu)
    slack, gate = 0.0, GRADIENT_GATE[dtype]
    if nu == 0 < tau:
        amplified = 8 * torch.finfo(found.dtype).eps * oracle.condition(*exact, tau).detach()
        slack, gate = amplified.sum(-1), gate + amplified.max().item()
    oracle.assert_log_volumes(found.detach(), wanted.detach(), dtype, dim, slack)
    seed = torch.randn_like(found)
    pairs = (torch.autograd.grad(r, i, seed.to(r.dtype)) for r, i in ((found, inputs), (wanted, exact)))
    oracle.assert_gradients(*pairs, gate)


def test_is_served_by_triton():
    z, Z = boxes(2, 3, dtype=F32)
    assert pyops.which("box_log_volumes", z, Z, z, Z) == "cuda:triton"


@dtypes
@modes
def test_pairs(tau, nu, dtype):
    for queries, items, dim in ((130, 200, 64), (1, 1000, 20), (500, 3, 100), (17, 65, 1), (64, 64, 3)):
        check(boxes(queries, dim, dtype=dtype), boxes(items, dim, dtype=dtype), tau, nu)


@modes
def test_many_dimensions(tau, nu):
    check(boxes(40, 1000, dtype=F32), boxes(70, 1000, dtype=F32), tau, nu)


def test_both_domains_in_one_call():
    """Blocks whose exponents fit float32 beside blocks whose do not."""
    z, Z = oracle.boxes(600, 16, dtype=F32)
    z[70], Z[300] = -500.0, 500.0
    z[450:] += 50.0
    Z[450:] += 50.0
    z, Z = z.cuda(), Z.cuda()
    for nu in (0.1, 0.3):
        check((z[:200], Z[:200]), (z, Z), 0.1, nu)


@modes
def test_nan_stays_in_its_row_or_column(tau, nu):
    queries, items = boxes(200, 32, dtype=F32), boxes(300, 32, dtype=F32)
    clean = pairwise_log_volume(queries, items, **temperatures(tau, nu))
    queries[0][7, 3], items[1][299, 31] = NAN, NAN
    found = pairwise_log_volume(queries, items, **temperatures(tau, nu))
    hit = torch.zeros_like(found, dtype=torch.bool)
    hit[7], hit[:, 299] = True, True
    assert torch.equal(found.isnan(), hit)
    # The centre of a dimension is that of its finite corners, so that the last digits may change.
    torch.testing.assert_close(found[~hit], clean[~hit], rtol=1e-3 if nu == 0 < tau else 1e-5, atol=1e-4)


@modes
def test_the_same_bits_again(tau, nu):
    """Also with other work on the device in between."""
    inputs = [t.requires_grad_() for t in (*boxes(300, 64, dtype=F32), *boxes(5000, 64, dtype=F32))]

    def once():
        found = pairwise_log_volume(inputs[:2], inputs[2:], **temperatures(tau, nu))
        return found.detach(), *torch.autograd.grad(found, inputs, torch.ones_like(found))

    first = once()
    torch.randn(2000, 2000, device="cuda") @ torch.randn(2000, 2000, device="cuda")
    assert_same_bits(once(), first, "again")


@dtypes
@pytest.mark.parametrize("k", [1, 10, 60, 128, 300])
def test_topk(k, dtype):
    """What is found has the best scores by the oracle, in every way to keep them."""
    queries, other = (boxes(40, 16, dtype=dtype, side=2.0) for _ in range(2))
    items = boxes(7001, 16, dtype=dtype)
    wide = [tuple(t.double() for t in pair) for pair in (queries, other, items)]
    for without in ([], [other]):
        found = box_topk(queries, items, k, without=without, **temperatures(0.1, 0.1))
        total = oracle.pairwise(*wide[0], *wide[2], 0.1, 0.1)
        if without:
            both = oracle.intersection(wide[:2], 0.1)
            total = total + torch.log(-torch.expm1(oracle.pairwise(*both, *wide[2], 0.1, 0.1) - total))
        dense = total - oracle.log_volume(wide[2], 0.1, 0.1)
        gate = 1e-10 if dtype == F64 else 1e-3  # a difference loses digits
        torch.testing.assert_close(found.values.double(), dense.topk(k).values, rtol=gate, atol=gate)
        torch.testing.assert_close(dense.gather(1, found.indices), dense.topk(k).values, rtol=gate, atol=gate)
        again = box_topk(queries, items, k, without=without, **temperatures(0.1, 0.1))
        assert_same_bits(tuple(again), tuple(found), "again")


def test_topk_holds_no_matrix_of_scores():
    queries, items = boxes(512, 32, dtype=F32), boxes(200_000, 32, dtype=F32)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    box_topk(queries, items, 10, **temperatures(0.1, 0.1))
    peak = torch.cuda.max_memory_allocated() - before
    assert peak < 512 * 200_000 * 4 / 4


def test_memory():
    """The brief's shape: beyond inputs, volumes and gradients less than 64 MB."""
    inputs = [t.requires_grad_() for t in (*boxes(1024, 64, dtype=F32), *boxes(4096, 64, dtype=F32))]
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    pairwise_log_volume(inputs[:2], inputs[2:], **temperatures(0.1, 0.1)).sum().backward()
    peak = torch.cuda.max_memory_allocated() - before
    assert peak <= 64 * 2**20


@modes
def test_sampled(tau, nu):
    """Volumes and gradients as those of the pairs, which meet in many dimensions."""
    users, items = boxes(500, 64, dtype=F32, side=20.0), boxes(3000, 64, dtype=F32, side=20.0)
    q, i = torch.randint(500, (700,)).cuda(), torch.randint(3000, (700, 6)).cuda()
    inputs = [t.requires_grad_() for t in (*users, *items)]
    found = sampled_scores(users, items, q, i, score="volume", **temperatures(tau, nu))
    wanted = pairwise_log_volume(users, items, **temperatures(tau, nu))[q.unsqueeze(1), i]
    assert torch.equal(found.isfinite(), wanted.isfinite())
    finite = wanted.isfinite()
    assert finite.float().mean() > 0.1
    gate = 1e-3 if nu == 0 < tau else 2e-5
    torch.testing.assert_close(found[finite], wanted[finite], rtol=gate, atol=gate)
    pairs = (torch.autograd.grad(r[finite].sum(), inputs) for r in (found, wanted))
    for g, w in zip(*pairs, strict=True):
        assert (g - w).abs().max() <= gate * w.abs().max()


def test_current_stream_and_graph_capture():
    """Launches follow torch's stream and wait for nothing, so a CUDA graph replays them."""
    queries, items = boxes(100, 32, dtype=F32), boxes(900, 32, dtype=F32)

    def once():
        found = pairwise_log_volume(queries, items, **temperatures(0.1, 0.1))
        best = torch.ops.pyops.box_topk(
            *(t.unsqueeze(1) for t in queries), torch.ones(100, 1, device="cuda"), *items, None,
            0.1, 0.1, 0.1, 10, True,
        )  # fmt: skip
        return found, *best

    once()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = once()
    items[0].copy_(items[0] - 0.1)
    graph.replay()
    torch.cuda.synchronize()
    assert_same_bits(results, once(), "replayed")


def test_more_than_two_to_the_31_elements():
    """The last rows lie beyond 32-bit offsets; they must equal those rows on their own."""
    if torch.cuda.get_device_properties(0).total_memory < 60 * 2**30:
        pytest.skip("needs 60 GiB of device memory")
    queries, items = boxes(2**15 + 5, 4, dtype=F32), boxes(2**16 + 3, 4, dtype=F32)
    found = pairwise_log_volume(queries, items, **temperatures(0.1, 0.1))
    assert found.numel() > 2**31
    last = pairwise_log_volume([t[-64:] for t in queries], items, **temperatures(0.1, 0.1))
    torch.testing.assert_close(found[-64:], last, rtol=1e-5, atol=1e-4)
    del found, last
    z = torch.rand(2**24 + 64, 128, device="cuda")  # 2^31 corners and some
    query = (z[:3] - 0.1).unsqueeze(1), (z[:3] + 0.1).unsqueeze(1)
    z[-2:] = z[:2]
    signs = torch.ones(3, 1, device="cuda")
    _, indices = torch.ops.pyops.box_topk(*query, signs, z, z + 0.0, None, 0.0, 0.2, 0.0, 2, True)
    assert indices.tolist()[:2] == [[0, len(z) - 2], [1, len(z) - 1]] and indices[2, 0] == 2


def test_compiles_without_a_graph_break():
    queries, items = boxes(30, 8, dtype=F32), boxes(50, 8, dtype=F32)
    run = torch.compile(
        lambda *t: pairwise_log_volume(t[:2], t[2:], **temperatures(0.1, 0.1)), fullgraph=True
    )
    assert_same_bits(run(*queries, *items), run(*queries, *items), "compiled")
    plain = pairwise_log_volume(queries, items, **temperatures(0.1, 0.1))
    assert_same_bits(run(*queries, *items), plain, "compiled")
