"""Tubal factorization: problems, step sizes, subspaces, histories, and the seed's study in small."""

import importlib
import json
import math
import os
import subprocess
import sys

import pytest
import torch

from pyops.papers.tubal_factorization import (
    PowerIteration,
    draw,
    escape_time,
    follow,
    largest_angle,
    leading,
    published_step,
    small_start,
    symmetric_dimension,
)
from pyops.reproduce import CHECKOUT
from pyops.tubal import teye, tgram, tprod, ttranspose, tube_fft

SEED = CHECKOUT / "seeds" / "tubal_factorization"
F64 = torch.float64


@pytest.fixture
def modules(monkeypatch):
    """The modules of the seed, which lie beside its script; other seeds have modules of the same names."""
    monkeypatch.syspath_prepend(str(SEED))
    names = ("dynamics", "completion", "reproduce")
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield {name: importlib.import_module(name) for name in names}
    for name in names:
        sys.modules.pop(name, None)


def test_the_truth_has_unit_singular_values():
    p = draw(10, 3, 4, 285, seed=3)
    torch.testing.assert_close(tgram(p.x, transpose=True), teye(3, 4, dtype=F64), rtol=0, atol=1e-13)
    torch.testing.assert_close(p.truth, tgram(p.x))
    torch.testing.assert_close(p.y, torch.einsum("mijt,ijt->m", p.sensing.operator, p.truth))
    assert p.sensing.operator.std().item() == pytest.approx(285**-0.5, rel=0.02)


def test_draws_are_repeatable_and_the_same_in_float32():
    a, b, single = draw(5, 2, 3, 40, 7), draw(5, 2, 3, 40, 7), draw(5, 2, 3, 40, 7, torch.float32)
    assert torch.equal(a.sensing.operator, b.sensing.operator) and torch.equal(a.x, b.x)
    assert not torch.equal(a.x, draw(5, 2, 3, 40, 8).x)
    assert single.y.dtype == torch.float32 and torch.equal(single.y, a.y.float())
    start = small_start(400, 25, 4, 1e-3, 7)
    assert start.std().item() == pytest.approx(1e-3 / 5, rel=0.02)


@pytest.mark.parametrize("symmetrized", [False, True])
def test_published_steps(symmetrized):
    """One step of the scripts, U - nu sum res_i (S_i + S_i^T) * U with S = G or G + G^T, is one of ours."""
    n, r, tubes, m, nu = 4, 2, 3, 50, 1e-4
    p = draw(n, r, tubes, m, seed=0)
    g = p.sensing.operator * math.sqrt(m)
    s = g + ttranspose(g) if symmetrized else g
    u = 0.3 * torch.randn(n, 6, tubes, dtype=F64)
    residual = torch.einsum("mijt,ijt->m", s, tgram(u) - p.truth)
    theirs = u - nu * tprod(torch.einsum("m,mijt->ijt", residual, s + ttranspose(s)), u)
    ours, _ = p.sensing.descend(u, p.y, published_step(nu, m, symmetrized=symmetrized), 1)
    torch.testing.assert_close(ours - u, theirs - u, rtol=1e-10, atol=1e-13)
    assert (ours - u).norm() > 1e-3


@pytest.mark.parametrize("tubes", [1, 2, 3, 4, 5, 8])
def test_symmetric_dimension(tubes):
    n = 3
    basis = torch.eye(n * n * tubes, dtype=F64).view(-1, n, n, tubes)
    symmetric = (basis + ttranspose(basis)).flatten(1)
    assert torch.linalg.matrix_rank(symmetric).item() == symmetric_dimension(n, tubes)


def test_small_angles_are_exact():
    q, _ = torch.linalg.qr(torch.randn(2, 8, 8, dtype=torch.complex128))
    for angle in (1e-13, 1e-9, 1e-3, 1.0):
        turned = q[..., :2].clone()
        turned[1, :, 0] = math.cos(angle) * q[1, :, 0] + math.sin(angle) * q[1, :, 5]
        # The same subspace in another basis.
        turned = turned @ torch.linalg.qr(torch.randn(2, 2, 2, dtype=torch.complex128))[0]
        assert largest_angle(turned, q[..., :2]) == pytest.approx(math.sin(angle), rel=1e-3, abs=2e-15)
    assert largest_angle(q[..., :2], q[..., 2:4]) == pytest.approx(1.0)


def test_power_iteration():
    """Against repeated t-products, and the spectral phase of descent from a tiny start."""
    p, mu, steps, r = draw(6, 2, 4, 120, seed=1), 0.05, 25, 2
    start = small_start(6, 9, 4, 1e-9, seed=1)
    m = p.sensing.adjoint(p.y)
    m = (m + ttranspose(m)) / 2
    w = start
    for _ in range(steps):
        w = w + mu * tprod(m, w)
    power = PowerIteration(p, start, mu)
    assert largest_angle(power.leading(steps, r), leading(w, r)) < 1e-12
    u, _ = p.sensing.descend(start, p.y, mu, steps)
    torch.testing.assert_close(u, w, rtol=1e-9, atol=1e-9 * w.abs().max().item())
    faces, target = tube_fft(m).faces, power.target(r)
    values = torch.linalg.eigvalsh(faces)[:, -r:]
    torch.testing.assert_close(faces @ target, target * values.unsqueeze(-2).to(target))
    # The start is forgotten.
    early, late = (largest_angle(power.leading(t, r), target) for t in (25, 800))
    assert late < 1e-3 * early
    assert power.leading(100_000, r).isfinite().all()


def test_history():
    p, start = draw(6, 2, 3, 90, seed=0), small_start(6, 8, 3, 1e-2, seed=0)
    last, history = follow(p, start, 0.05, 205, every=50, subspaces=True)
    assert history.step == [0, 50, 100, 150, 200, 205]
    lengths = {len(values) for values in vars(history).values()}
    assert lengths == {6}
    u, _ = p.sensing.descend(start, p.y, 0.05, 205)
    torch.testing.assert_close(last, u, rtol=1e-9, atol=1e-12)
    error = (tgram(u) - p.truth).norm() / p.truth.norm()
    assert history.test[-1] == pytest.approx(error.item(), rel=1e-6)
    train = (p.sensing(tgram(u)) - p.y).norm() / p.y.norm()
    assert history.train[-1] == pytest.approx(train.item(), rel=1e-6)
    # The singular tube after the inverse transform, as the paper measures it.
    values = torch.linalg.svdvals(tube_fft(u).faces)[:, 1], torch.linalg.svdvals(tube_fft(p.x).faces)[:, 1]
    ours, truth = (torch.fft.irfft(v, n=3) for v in values)
    assert history.tube[-1] == pytest.approx(((ours - truth).norm() / truth.norm()).item(), rel=1e-6)
    assert history.first_below(0.5) in history.step and history.first_below(0.0) == math.inf


def test_escape_is_where_it_is_predicted():
    p, mu, alpha = draw(8, 1, 3, 400, seed=0), 0.02, 1e-5
    _, history = follow(p, small_start(8, 30, 3, alpha, seed=0), mu, 1200)
    assert 0.85 < history.first_below(0.5) / escape_time(alpha, mu) < 1.4


def test_a_small_start_generalizes_where_the_data_leaves_the_tensor_open():
    n, tubes = 8, 3
    m = symmetric_dimension(n, tubes) * 2 // 3
    p = draw(n, 1, tubes, m, seed=0)
    ends = [follow(p, small_start(n, 16, tubes, a, 0), 0.02, 6000, every=6000)[1] for a in (1e-6, 1.0)]
    assert ends[0].test[-1] < 1e-2
    assert ends[1].test[-1] > 0.2 and ends[1].train[-1] < 0.1 * ends[1].test[-1]


def test_a_run_repeats_bitwise_and_reports_its_work(modules):
    dynamics, work = modules["dynamics"], []
    run = dynamics.Run(3, 20, 285, 0.0228, 1e-2, 120, seed=1, subspaces=True)
    first, second = (dynamics.trace(run, lambda done, *_: work.append(done)) for _ in range(2))
    assert first == second and sum(work) == 2 * run.work
    assert first["noise"] > 0 and json.dumps(first)


def test_completion_of_a_tensor_of_low_rank(modules):
    completion = modules["completion"]
    truth = tprod(torch.randn(24, 2, 3), torch.randn(2, 20, 3))
    truth = (truth - truth.min()) / (truth.max() - truth.min())
    mask = completion.seen(truth, 0.6, 0)
    observed = torch.where(mask, truth, 0.0)
    x = completion.complete(observed, mask, "dft")
    assert torch.equal(x[mask], truth[mask])
    assert completion.psnr(x, truth) > completion.psnr(observed, truth) + 20
    # With the identity for a transform, each colour is completed for itself.
    three = completion.complete(observed, mask, torch.eye(3))
    one = completion.complete(observed[..., 1:2], mask[..., 1:2], "dft")
    torch.testing.assert_close(three[..., 1:2], one, rtol=0, atol=1e-3)


def test_the_picture_comes_with_matplotlib(modules):
    x = modules["completion"].picture(4)
    assert x.shape == (150, 128, 3) and 0 <= x.min() < 0.1 and 0.9 < x.max() <= 1


TINY = """
import sys
sys.path.insert(0, {seed!r})
import completion, reproduce
from pyops.reproduce import main
reproduce.SIZES["quick"] = reproduce.Sizes((0,), (0, 1, 2), (0, 1), (0,), (0.5,), 16, (10, 50))
sys.exit(main(reproduce.__file__, reproduce.study))
"""


def test_the_whole_study_in_small(tmp_path):
    """Few seeds and a tiny picture, from a foreign folder; the criteria are those of the quick run."""
    out = tmp_path / "out"
    command = [sys.executable, "-c", TINY.format(seed=str(SEED)), "--quick", "--jobs", "1", "--out", str(out)]
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    written = json.loads((out / "tubal_factorization.json").read_text())
    assert done.returncode == (0 if written["passed"] else 1), done.stderr
    assert written["plots"] == [
        "figure2.png", "figure3.png", "figure4.png", "undersampled.png", "picture.png"
    ]  # fmt: skip
    for name in written["plots"]:
        assert 5_000 < (out / name).stat().st_size < 400_000
    lines = {line["name"]: line for line in written["lines"]}
    # The README says why this bound is missed.
    assert [name for name, line in lines.items() if line["verdict"] == "MISS"] == ["fig3_final_worst"]
    assert {
        "fig2_escape_latest",
        "fig4_ratio_least",
        "under_m159_large",
        "picture_gain_least",
    } <= lines.keys()
    assert len(written["results"]["undersampled"]) == 4


@pytest.mark.slow
def test_as_people_run_it(tmp_path):
    """Every criterion is met but the one that the README explains."""
    command = [sys.executable, str(SEED / "reproduce.py"), "--quick", "--out", str(tmp_path / "out")]
    done = subprocess.run(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(CHECKOUT)})
    assert done.returncode == 1
    written = json.loads((tmp_path / "out" / "tubal_factorization.json").read_text())
    assert [x["name"] for x in written["lines"] if x["verdict"] == "MISS"] == ["fig3_final_worst"]
    assert os.listdir(tmp_path) == ["out"]
