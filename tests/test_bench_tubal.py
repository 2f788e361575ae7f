"""The tubal benchmark: its oracles, the peers, and that every case is right."""

import sys
from pathlib import Path

import pytest
import torch
import tubal_oracle

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench import bench_tubal as bench  # noqa: E402
from bench import measure, tubal_sensing  # noqa: E402
from bench import tubal_peers as peers  # noqa: E402
from bench.case import Missing  # noqa: E402

PEAKS = {"float32": 1e12, "float64": 1e12, "copy": 1e10}
TUBES = (1, 2, 3, 4, 7, 8)


@pytest.fixture
def uncompiled(monkeypatch):
    """torch.compile is left to the benchmark itself."""
    plain = lambda function=None, **_: function or (lambda decorated: decorated)  # noqa: E731
    monkeypatch.setattr(torch, "compile", plain)


def data_of(tubes, backward=False, batch=()):
    shape = bench.Shape(3, 5, 4, tubes, torch.float64, batch)
    return bench.inputs(shape, backward, "cpu")(torch.Generator().manual_seed(3))


def gradients(product, a, b, grad):
    a, b = a.clone().requires_grad_(), b.clone().requires_grad_()
    c = product(a, b)
    return c.detach(), *torch.autograd.grad(c, (a, b), grad)


@pytest.mark.parametrize("tubes", TUBES)
def test_the_oracle_is_the_definition_with_its_gradients(tubes):
    data = data_of(tubes, True)
    wanted = gradients(tubal_oracle.tprod, *data)
    oracle = bench.Oracle(True)
    assert oracle(data, wanted) < 1e-14
    assert oracle(data, tuple(map(peers.to_first, wanted)), first=True) < 1e-14
    for place in range(3):  # each result is looked at
        bad = [*wanted]
        bad[place] = 1.001 * bad[place]
        assert oracle(data, tuple(bad)) > 5e-4
        bad[place] = torch.full_like(bad[place], torch.nan)
        assert not oracle(data, tuple(bad)) <= 1e3
    other = tuple(t + 0.5 for t in data)  # what it remembers is of one input alone
    assert oracle(other, wanted) > 1e-2
    with pytest.raises(AssertionError, match="complex"):
        bench.Oracle()(data[:2], wanted[0] + 0j)


def test_the_oracle_of_the_dct_is_the_definition():
    a, b = data_of(6)
    matrix = tubal_oracle.dct(6)
    assert torch.allclose(peers.dct_matrix(6), matrix, atol=1e-15)
    oracle = bench.Oracle(product=bench.dct_product)
    assert oracle((a, b), tubal_oracle.star(a, b, matrix)) < 1e-14
    assert oracle((a, b), tubal_oracle.tprod(a, b)) > 0.1


@pytest.mark.parametrize("tubes", TUBES)
@pytest.mark.parametrize("key", sorted(peers.FORMS))
def test_plain_torch_is_right_in_every_form(key, tubes):
    for backward in (False, True):
        oracle = bench.Oracle(backward, bench.dct_product if key == "dct" else bench.convolve)
        if key == "dct" and backward:
            continue  # the oracle's gradients are those of the DFT
        data = data_of(tubes, backward)
        impl = peers.torch_product(key, peers.Kind(tubes, torch.float64), backward, oracle)
        made = impl.build()
        with torch.no_grad():
            found = made.run(*made.prepare(*data))
        assert impl.check(data, found) < 1e-14


def test_gradients_by_hand_are_right_and_batches_too():
    data = data_of(5, True)
    impl = peers.torch_own_backward(bench.Oracle(True))
    made = impl.build()
    assert impl.check(data, made.run(*made.prepare(*data))) < 1e-14
    pair = data_of(5, batch=(2,))
    for key in sorted({*bench.FOURIER, *bench.PLANAR}):
        impl = peers.torch_product(key, peers.Kind(5, torch.float64), False, bench.Oracle())
        made = impl.build()
        assert impl.check(pair, made.run(*made.prepare(*pair))) < 1e-14


@pytest.mark.parametrize("tubes", TUBES)
def test_the_trimmed_planes_are_as_many_as_the_real_products(tubes):
    forward, inverse = peers.planar_matrices(tubes, True, torch.float64)
    assert len(forward) == inverse.shape[1] == bench.real_products(tubes)
    assert bench.real_products(tubes) == (1.5 * tubes - (1 if tubes % 2 == 0 else 0.5))
    assert len(peers.planar_matrices(tubes, False, torch.float64)[0]) == 3 * (tubes // 2 + 1)


def test_a_peer_gets_copies_in_its_layout():
    (a, _), impl = data_of(4), peers.FORMS["rfft first"]
    for first in (True, False):
        copy, _ = peers.runner(impl.make(None), False, first).prepare(a, a)
        assert copy.is_contiguous() and copy.data_ptr() != a.data_ptr()
        assert torch.equal(peers.to_last(copy) if first else copy, a)


def test_flops_and_bytes_are_those_of_the_shape():
    s = bench.Shape(2, 3, 5, 8)
    transforms = (6 + 15 + 10) * 2.5 * 8 * 3
    assert bench.flops(s, False) == 2 * 30 * 11 + transforms
    assert bench.flops(s, True) == 3 * 2 * 30 * 11 + 2 * transforms
    assert bench.flops(s, False, dct=True) == 2 * 30 * 8 + transforms
    assert bench.least_bytes(s, False) == 4 * 8 * (6 + 15 + 10)
    assert bench.least_bytes(s, True) == 4 * 8 * (3 * 6 + 3 * 15 + 2 * 10)
    assert bench.transform_flops(1) == 0
    for backward in (False, True):
        twice = s._replace(batch=(2,))
        assert bench.flops(twice, backward) == 2 * bench.flops(s, backward)
        assert bench.least_bytes(twice, backward) == 2 * bench.least_bytes(s, backward)


def test_the_svd_check_tells_results_apart():
    case = bench.svd_case(6, 5)
    data = case.inputs(torch.Generator().manual_seed(0))
    for impl in case.implementations:
        made = impl.build()
        u, s, v = made.run(*made.prepare(*data))
        check = impl.check or case.check
        assert check(data, (u, s, v)) < 2e-6
        wrong = [(1.01 * u, s, v), (u, 1.01 * s, v), (u, s, 1.01 * v), (-u, -s, v), (u, s, v + torch.nan)]
        for bad in wrong:
            assert not check(data, bad) <= case.error_bound
        # a factorization with orthogonal factors, whose middle is not diagonal or not in order
        if impl is case.ours:
            from pyops.tubal import teye, tprod

            middle = tprod(s, v, transpose_b=True)
            assert not check(data, (u, middle, teye(6, 5))) <= case.error_bound
            last_first = u.flip(1), s.flip(0, 1), v.flip(1)
            assert not check(data, last_first) <= case.error_bound


def test_the_promised_table_is_there_in_full_shape():
    cases = bench.cases("cpu", "full")
    sizes = {
        "256x256 by 256x256, n3=64": (1.9, 1.3),
        "256x256 by 256x256, n3=61": (1.9, 1.3),
        "64x64 by 64x64, n3=64": (2.0, 1.3),
        "64x64 by 64x64, n3=3": (6, 1.6),
        "10x100 by 100x10, n3=4": (6, 2.5),
        "512x512 by 512x512, n3=8": (1.6, 1.15),
        "256x256 by 256x256, n3=64, forward + backward": (2.2, 1.4),
    }
    wanted = {}
    for name, (least, planar) in sizes.items():
        wanted[f"tprod float32 {name}"] = (least, "best")
        wanted[f"tprod float32 {name}, planar"] = (planar, "best")
    wanted["tprod float64 256x256 by 256x256, n3=64, DCT"] = (25, "mprod-package m_prod")
    wanted["500 sensing steps float32 10x100, n3=4, 254 measurements"] = (8, "best")
    wanted["tsvd float32 256x256, n3=64"] = (1.9, "torch SVD of all faces")
    assert {case.name: case.bar for case in cases} == wanted
    for case in cases:
        names = [impl.name for impl in case.implementations]
        assert len(set(names)) == len(names)
        assert case.bar[1] in ("best", *names)


def test_a_quick_run_names_the_compiled_peers_that_it_leaves_to_the_full_run():
    quick, full = (bench.cases("cpu", scale)[0].peers for scale in ("quick", "full"))
    assert [impl.name for impl in quick] == [impl.name for impl in full]
    compiled = [impl for impl in quick if "compiled" in impl.name]
    assert len(compiled) == 2
    for impl in compiled:
        with pytest.raises(Missing, match="only in the full run"):
            impl.build()


def test_packages_that_are_not_there_are_named(monkeypatch):
    for module, impl in (
        ("mprod", peers.mprod(4, bench.Oracle())),
        ("cupy", peers.cupy_product(bench.Oracle())),
    ):
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(Missing, match=f"cannot import {module}"):
            impl.build()


@pytest.mark.parametrize("scale", ["quick", "full"])
def test_gpu_cases_are_listed_without_a_gpu(scale):
    listed = bench.cases("cuda", scale)
    assert len({case.name for case in listed}) == len(listed)
    for case in listed:
        names = [impl.name for impl in case.peers]
        assert len(set(names)) == len(names)
        assert any("cupy" in name or "by hand" in name for name in names)


@pytest.mark.skipif(torch.cuda.is_available(), reason="here they run")
def test_gpu_cases_fail_in_a_sentence_without_a_gpu():
    case = bench.cases("cuda", "quick")[-1]
    with pytest.raises((RuntimeError, AssertionError), match=r"(?i)cuda"):
        case.inputs(torch.Generator())


@pytest.mark.parametrize("name", sorted(tubal_sensing.LOOPS))
def test_sensing_steps_of_every_loop_are_the_same(name):
    tensors = tubal_sensing.inputs(7, 30, torch.float64, 4, 5)
    with torch.no_grad():
        found = tubal_sensing.LOOPS[name](*tensors, 0.01, 20)
        assert bench.relative_error(found, tubal_sensing.fused(*tensors, 0.01, 20)) < 1e-12


@pytest.mark.parametrize("case", bench.cases("cpu", "tiny"), ids=lambda case: case.name)
def test_every_case_runs_and_is_right(case, uncompiled):
    table = {row["name"]: row for row in measure.measure_case(case, PEAKS, rounds=1)["implementations"]}
    assert not {name: row["reason"] for name, row in table.items() if row["status"] == "failed"}
    assert all(row["status"] == "ok" for row in table.values() if row["kind"] != "peer")
