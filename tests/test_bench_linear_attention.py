"""The linear-attention benchmark: its oracle, the plain-torch peers, and that every case is right."""

import dataclasses
import itertools
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench import bench_linear_attention as bench  # noqa: E402
from bench import linear_attention_peers as peers  # noqa: E402
from bench import measure  # noqa: E402
from bench.case import Missing  # noqa: E402

PEAKS = {"float32": 1e12, "bfloat16": 1e12, "copy": 1e10}
KINDS = ("scalar", "vector", "delta")


@pytest.fixture
def uncompiled(monkeypatch):
    """torch.compile is left to the benchmark itself."""
    plain = lambda function=None, **_: function or (lambda decorated: decorated)  # noqa: E731
    monkeypatch.setattr(torch, "compile", plain)


def data_of(kind, backward, length=96, dtype=torch.float64):
    shape = bench.Shape(kind, 2, length, 3, 8, 5, torch.float32)
    made = bench.inputs(shape, backward, "cpu")(torch.Generator().manual_seed(3))
    return tuple(t.to(dtype) for t in made)


def by_definition(q, k, v, g, *beta):
    """[B, T, H, ...] in einsum, entry by entry of the definition."""
    state, out = q.new_zeros(len(q), *q.shape[2:], v.shape[3]), []
    for t in range(q.shape[1]):
        decay = g[:, t].exp()
        state = state * (decay[..., None] if g.ndim == 4 else decay[..., None, None])
        u = v[:, t]
        if beta:
            u = beta[0][:, t, :, None] * (u - torch.einsum("bhk,bhkv->bhv", k[:, t], state))
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], u)
        out.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state) * q.shape[3] ** -0.5)
    return torch.stack(out, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_the_oracle_is_the_definition_with_its_gradients(kind):
    data = data_of(kind, True)
    made = peers.runner(by_definition, True)
    wanted = made.run(*made.prepare(*data))
    oracle = bench.Oracle(True)
    assert oracle(data, wanted) < 1e-12
    assert bench.Oracle(False)(data[:-1], wanted[0].detach()) < 1e-12
    for place in range(len(wanted)):  # each result is looked at
        bad = [*wanted]
        bad[place] = 1.001 * bad[place]
        assert oracle(data, tuple(bad)) > 5e-4
        bad[place] = torch.full_like(bad[place], torch.nan)
        assert not oracle(data, tuple(bad)) <= 1e3
    other = tuple(t + 0.5 for t in data)  # what it remembers is of one input alone
    assert oracle(other, wanted) > 1e-2


FORMS = [
    *itertools.product(KINDS, ("loop", "indexed", "batched"), (16, 32)),
    *itertools.product(["vector, any decay"], ("loop", "batched"), (16, 32, 48)),
]


@pytest.mark.parametrize(("kind", "way", "size"), FORMS)
def test_plain_torch_is_right_in_every_form(kind, way, size):
    family = kind.split(",")[0]
    for backward in (False, True):
        data = data_of(family, backward)
        made = peers.runner(peers.form(kind, way, size), backward, peers.heads_first)
        with torch.no_grad():
            found = made.run(*made.prepare(*data))
        error = bench.Oracle(backward)(data, found, head_first=True)
        # the triangular solve is in float32, as for every dtype of the peers
        assert error < (1e-5 if kind == "delta" else 1e-12)


def test_the_form_for_any_decay_survives_what_overflows_the_quick_one():
    data = data_of("vector", False, dtype=torch.float32)
    data = (*data[:3], 200 * data[3])
    oracle = bench.Oracle(False)
    errors = {}
    for kind in ("vector", "vector, any decay"):
        made = peers.runner(peers.form(kind, "batched", 32), False, peers.heads_first)
        with torch.no_grad():
            errors[kind] = oracle(data, made.run(*made.prepare(*data)), head_first=True)
    assert errors["vector, any decay"] < 1e-5 and not errors["vector"] < 1e-2


def test_flops_and_bytes_are_those_of_the_shape():
    s = bench.Shape("scalar", 1, 100, 1, 4, 8)
    assert bench.flops(s, False) == 100 * (32 * 12 + 4 * 32)
    assert bench.flops(s, True) == bench.flops(s, False) + 100 * (16 * (24 + 32) + 320)
    assert bench.least_bytes(s, False) == 100 * (2 * 12 * 4 + 4) + 8 * 32
    for backward in (False, True):
        delta, twice = s._replace(kind="delta"), s._replace(batch=2)
        assert bench.flops(delta, backward) > bench.flops(s, backward)
        assert bench.flops(twice, backward) == 2 * bench.flops(s, backward)
        assert bench.least_bytes(twice, backward) == 2 * bench.least_bytes(s, backward)


def test_the_promised_table_is_there_in_full_shape():
    cases = bench.cases("cpu", "full")
    usual = "torch indexed loop over chunks of 64"
    assert {case.name: case.bar for case in cases if case.bar} == {
        "scalar decay float32 1x2048x16x64, forward": (2.2, "best"),
        "scalar decay float32 1x2048x16x64, forward, token loop": (20, "torch token loop"),
        "scalar decay bfloat16 1x2048x16x64, forward, against float32": (5, "best"),
        "scalar decay float32 1x2048x16x64, forward + backward, indexed loop": (16, usual),
        "scalar decay float32 1x2048x16x64, forward + backward": (3, "best"),
        "scalar decay float32 1x2048x16x128, forward + backward": (12, usual),
        "vector decay float32 1x2048x16x64, forward + backward": (10, usual),
        "gated delta float32 1x2048x16x128, forward": (3, "best"),
        "gated delta float32 1x2048x16x128, forward + backward": (8, usual),
        "decode step, scalar decay float32 1x16x128": (3, "torch expression"),
        "decode step, scalar decay float32 32x16x128, share of copy bandwidth": (0.6, "copy of the state"),
    }
    assert cases[-1].name.startswith("memory of forward + backward, 1x131072x16x64")
    for case in cases:
        names = [impl.name for impl in case.implementations]
        assert len(set(names)) == len(names)
        assert case.bar is None or case.bar[1] in ("best", *names)


def test_a_quick_run_names_the_compiled_peers_that_it_leaves_to_the_full_run():
    case = bench.cases("cpu", "quick")[0]
    compiled = [impl for impl in case.peers if "compiled" in impl.name]
    assert len(compiled) == 3
    for impl in compiled:
        with pytest.raises(Missing, match="only in the full run"):
            impl.build()


@pytest.mark.parametrize("kind", KINDS)
def test_packages_that_need_a_gpu_are_named(kind):
    for impl in bench.libraries(kind, True, "cpu")(bench.Oracle(True)):
        with pytest.raises(Missing, match=r"cannot import|fail on CPU tensors"):
            impl.build()


def test_gpu_cases_list_the_same_peers_and_flash_attention():
    for scale in ("quick", "full"):
        for case in bench.cases("cuda", scale):
            names = " ".join(impl.name for impl in case.peers)
            assert ("flash-linear-attention" in names and "SDPA" in names) or "decode" in case.name


@pytest.mark.parametrize("case", bench.cases("cpu", "tiny"), ids=lambda case: case.name)
def test_every_case_runs_and_is_right(case, uncompiled):
    if case.env:
        case = dataclasses.replace(case, env={})  # its memory is measured well enough here to see it run
    table = {row["name"]: row for row in measure.measure_case(case, PEAKS, rounds=1)["implementations"]}
    assert not {name: row["reason"] for name, row in table.items() if row["status"] == "failed"}
    assert all(row["status"] == "ok" for row in table.values() if row["kind"] != "peer")


def test_the_memory_case_fails_above_its_allowance_and_when_wrong(monkeypatch):
    case = bench.memory_case(bench.Shape("scalar", 1, 256, 2, 16, 16))
    runner = case.ours.build()
    data = case.inputs(None)
    extra, results = runner.run(*runner.prepare(*data))
    assert 0 < case.error(case.ours, data, (extra, results)) < 1
    with pytest.raises(AssertionError, match="above 1"):
        case.error(case.ours, data, (300 * 2**20, results))
    for place in (0, 3):
        bad = [*results]
        bad[place] = 1.01 * bad[place]
        with pytest.raises(AssertionError, match=r"error 0\.01"):
            case.error(case.ours, data, (extra, tuple(bad)))


def test_a_copy_of_the_state_is_all_of_it():
    impl = peers.copy_of_state()
    runner = impl.build()
    data = bench.decode_inputs(bench.Shape("scalar", 2, 1, 3, 4, 5), "cpu")(torch.Generator())
    assert impl.check(data, runner.run(*runner.prepare(*data))) == 0
    assert impl.check(data, torch.zeros_like(data[-1])) > 0
