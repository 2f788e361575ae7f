"""The boxes benchmark: its oracles, the peers in every form, and that every case is right."""

import dataclasses
import itertools
import sys
from pathlib import Path

import boxes_oracle
import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench import bench_boxes as bench  # noqa: E402
from bench import boxes_peers as peers  # noqa: E402
from bench import measure  # noqa: E402
from bench.case import Missing  # noqa: E402

PEAKS = {"float32": 1e12, "copy": 1e10}
SHAPE = bench.Shape(37, 50, 6)
HARD = SHAPE._replace(hard=True)


@pytest.fixture
def uncompiled(monkeypatch):
    """torch.compile is left to the benchmark itself."""
    plain = lambda function=None, **_: function or (lambda decorated: decorated)  # noqa: E731
    monkeypatch.setattr(torch, "compile", plain)


def data_of(shape, backward, dtype=torch.float64):
    made = bench.inputs(shape, backward, "cpu")(torch.Generator().manual_seed(3))
    return tuple(t.to(dtype) for t in made)


def found_by(impl, data):
    made = impl.build()
    with torch.no_grad():
        return made.run(*made.prepare(*data))


def by_definition(shape, data):
    tau = shape.temperatures["intersection_temperature"]
    corners = [t.clone().requires_grad_() for t in data[:4]]
    logs = boxes_oracle.pairwise(*corners, tau, tau)
    if len(data) == 4:
        return (logs.detach(),)
    return logs.detach(), *torch.autograd.grad(logs, corners, data[4])


@pytest.mark.parametrize("shape", [SHAPE, HARD], ids=["gumbel", "hard"])
def test_the_oracle_is_the_definition_with_its_gradients(shape):
    for backward in {False, not shape.hard}:
        data = data_of(shape, backward)
        wanted = by_definition(shape, data)
        oracle = bench.Oracle(shape.hard, backward)
        assert oracle(data, wanted) < 1e-13
        for place in range(len(wanted)):  # each result is looked at, at its first and its last entry
            for entry in (0, -1):
                bad = [t.clone() for t in wanted]
                bad[place][entry] += 0.01 + 0.01 * bad[place][entry].nan_to_num(0, 0, 0).abs()
                bad[place][entry] = bad[place][entry].nan_to_num(neginf=-1.0)
                assert oracle(data, tuple(bad)) > bench.VOLUME_ERROR
                bad[place][entry] = torch.nan
                assert not oracle(data, tuple(bad)) <= 1e3
        other = tuple(t + 0.5 * i for i, t in enumerate(data))  # what it remembers is of one input alone
        assert not oracle(other, wanted) <= 1e-2


def test_hard_boxes_of_the_benchmark_meet_and_miss():
    shape = bench.Shape(200, 200, 64, hard=True)
    met = by_definition(shape, data_of(shape, False))[0] > -torch.inf
    assert 0.3 < met.double().mean() < 0.7
    data = data_of(shape, False)
    assert not bench.Oracle(True, False)(data, torch.where(met, by_definition(shape, data)[0], -1e30)) <= 1


@pytest.mark.parametrize(
    ("key", "backward"), [*itertools.product(("log", "exp"), (False, True)), ("hard", False), ("hard", True)]
)
def test_plain_torch_is_right_in_every_form(key, backward, uncompiled):
    shape = HARD if key == "hard" else SHAPE
    if key == "hard":  # gradients where all boxes meet
        shape = shape._replace(dim=2)
    data = data_of(shape, backward)
    if key == "hard" and backward:
        data = tuple(0.8 * t if i in (0, 2) else t for i, t in enumerate(data))
    wanted = by_definition(shape, data)
    for form in (peers.eager, peers.in_chunks, peers.compiled):
        found = found_by(form(key, backward), data)
        found = found if isinstance(found, tuple) else (found,)
        assert len(found) == len(wanted)
        for got, exact in zip(found, wanted, strict=True):
            assert torch.allclose(got, exact, rtol=1e-7, atol=1e-7)  # softplus is a line above 20


def test_the_formula_as_written_is_right():
    data = data_of(SHAPE, False)
    assert torch.allclose(found_by(peers.as_written(), data), by_definition(SHAPE, data)[0], rtol=1e-7)


@pytest.mark.parametrize("shape", [SHAPE, HARD], ids=["gumbel", "hard"])
def test_box_embeddings_is_right_where_boxes_meet(shape):
    pytest.importorskip("box_embeddings", reason="box-embeddings is not installed")
    data = data_of(shape, False)
    wanted = by_definition(shape, data)[0]
    found = found_by(peers.package(hard=shape.hard), data)
    assert torch.allclose(found[wanted > -torch.inf], wanted[wanted > -torch.inf], rtol=1e-7)


@pytest.mark.parametrize("excluded", [False, True])
def test_the_best_items_are_those_of_the_definition(excluded, uncompiled):
    shape, k, tau = bench.Shape(20, 300, 6), 7, bench.TAU
    data = tuple(t.double() for t in bench.topk_inputs(shape, excluded, "cpu")(torch.Generator()))
    user, attribute, *without = peers.pairs(data[:-2])
    items = data[-2:]
    scores = boxes_oracle.composed([user, attribute], without, items, tau, tau)
    scores = scores - boxes_oracle.log_volume(items, tau, tau)
    if excluded:  # the excluded attribute is no formality
        plain = boxes_oracle.composed([user, attribute], [], items, tau, tau)
        plain = plain - boxes_oracle.log_volume(items, tau, tau)
        assert (plain - scores).median() > 1e-2
    values, indices = scores.topk(k)
    oracle = bench.BestOracle(k)
    assert oracle(data, (values, indices)) < 1e-12
    for impl in (peers.topk("log", k), peers.topk("exp", k), peers.topk("log", k, compile_whole=True)):
        assert oracle(data, found_by(impl, data)) < 1e-7
    few = peers.topk("exp", k, rows=6, columns=70)
    assert oracle(data, found_by(few, data)) < 1e-7
    second = scores.topk(k + 1)
    worse = second.values[:, 1:], second.indices[:, 1:]
    assert oracle(data, worse) > 1e-4  # right scores, not of the best
    assert oracle(data, (values + 0.01, indices)) > 5e-3
    assert not oracle(data, (values + torch.nan, indices)) <= 1
    with pytest.raises(AssertionError, match="twice"):
        oracle(data, (values[:, :1].expand(-1, k), indices[:, :1].expand(-1, k)))
    with pytest.raises(AssertionError, match="outside"):
        oracle(data, (values, indices - 1000))


def test_flops_and_bytes_are_those_of_the_shape():
    s = bench.Shape(2, 3, 5)
    assert bench.flops(s, False) == 30 * 20 and bench.flops(s._replace(hard=True), False) == 30 * 5
    assert bench.flops(s, True) == 30 * 50
    assert bench.least_bytes(s, False) == 4 * (2 * 5 * 5 + 6)
    assert bench.least_bytes(s, True) == 4 * (3 * 2 * 5 * 5 + 2 * 6)
    assert bench.cases("cpu", "full")[0].note == "268.4 M elements: 1e9 elements/s = 268.4 / ms."


def test_the_promised_table_is_there_in_full_shape():
    cases = bench.cases("cpu", "full")
    gumbel, hard = "Gumbel float32 1024x4096x64", "hard float32 1024x4096x64"
    best = "top 10 of 100000, 256 queries"
    chunks, blocks = "chunks of 16 rows", "torch eager, chunks of 16 x 4096, torch.topk"
    assert {case.name: case.bar for case in cases if case.bar} == {
        f"{gumbel}, forward": (45, "torch eager"),
        f"{gumbel}, forward, in chunks": (22, f"torch eager, {chunks}"),
        f"{gumbel}, forward, compiled": (20, "torch.compile"),
        f"{gumbel}, forward, package": (55, "box-embeddings 0.1.0"),
        f"{gumbel}, forward, exp-domain": (8, f"torch exp-domain, {chunks}"),
        f"{gumbel}, forward + backward": (50, "torch eager"),
        f"{gumbel}, forward + backward, compiled": (20, "torch.compile"),
        f"{hard}, forward": (90, "torch eager"),
        f"{best} AND, NOT, 64 dimensions": (10, blocks),
        f"{best} AND, 64 dimensions": (10, blocks),
    }
    assert [case.name for case in cases[-2:]] == [
        f"memory of forward, {gumbel}, within 64 MB",
        f"memory of forward + backward, {gumbel}, within 64 MB",
    ]
    kept = [case for case in cases if case.env == bench.KEPT]
    assert len(kept) == 3 and all("torch eager" in case.peers[0].name for case in kept)
    assert len({case.name for case in cases}) == len(cases)
    for case in cases:
        names = [impl.name for impl in case.implementations]
        assert len(set(names)) == len(names)
        assert case.bar is None or case.bar[1] in names


@pytest.mark.parametrize("scale", ["quick", "tiny"])
def test_smaller_runs_name_the_compiled_peers_that_they_leave_to_the_full_run(scale):
    listed = bench.cases("cpu", scale)
    compiled = [impl for case in listed for impl in case.peers if "compile" in impl.name]
    assert len(compiled) == (3 if scale == "quick" else 6)
    for impl in compiled:
        with pytest.raises(Missing, match="only in the full run"):
            impl.build()


def test_a_package_that_is_not_there_is_named(monkeypatch):
    for module in ("box_embeddings", "box_embeddings.parameterizations.box_tensor"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(Missing, match=r"cannot import box_embeddings"):
        peers.package().build()


@pytest.mark.parametrize("scale", ["quick", "full"])
def test_gpu_cases_are_listed_without_a_gpu(scale):
    listed = bench.cases("cuda", scale)
    assert len({case.name for case in listed}) == len(listed) == 5
    for case in listed:
        names = [impl.name for impl in case.peers]
        assert len(set(names)) == len(names)
        assert any("compile" in name for name in names) and any("compile" not in name for name in names)


@pytest.mark.skipif(torch.cuda.is_available(), reason="here they run")
def test_gpu_cases_fail_in_a_sentence_without_a_gpu():
    for case in bench.cases("cuda", "quick"):
        with pytest.raises((RuntimeError, AssertionError), match=r"(?i)cuda"):
            case.inputs(torch.Generator())


@pytest.mark.parametrize("case", bench.cases("cpu", "tiny"), ids=lambda case: case.name)
def test_every_case_runs_and_is_right(case):
    if case.env:
        case = dataclasses.replace(case, env={})  # its memory is measured well enough here to see it run
    table = {row["name"]: row for row in measure.measure_case(case, PEAKS, rounds=1)["implementations"]}
    assert not {name: row["reason"] for name, row in table.items() if row["status"] == "failed"}
    assert all(row["status"] == "ok" for row in table.values() if row["kind"] != "peer")


@pytest.mark.parametrize("backward", [False, True])
def test_the_memory_case_fails_above_its_allowance_and_when_wrong(backward):
    case = bench.memory_case(SHAPE, backward)
    runner = case.ours.build()
    data = case.inputs(torch.Generator())
    extra, results = runner.run(*runner.prepare(*data))
    assert 0 <= case.error(case.ours, data, (extra, results)) < 1
    with pytest.raises(AssertionError, match="above 1"):
        case.error(case.ours, data, (65 * 2**20, results))
    listed = results if backward else (results,)
    for place in range(len(listed)):
        bad = [*listed]
        bad[place] = 1.01 * bad[place]
        with pytest.raises(AssertionError, match=r"error 0\.0"):
            case.error(case.ours, data, (extra, tuple(bad)))
