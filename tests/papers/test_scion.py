"""The Scion module and its seed: model, norms, start, transfer table, runs, and the study in small."""

import json
import math
import os
import subprocess
import sys

import pytest
import torch

from pyops.papers.scion import GPT, ScaledGELU, rms_norm, rotate, scion, transfer
from pyops.reproduce import CHECKOUT

SEED = CHECKOUT / "seeds" / "scion"


@pytest.fixture
def training(monkeypatch):
    monkeypatch.syspath_prepend(str(SEED))
    import training

    return training


def small(**settings):
    return GPT(**{"vocabulary": 97, "width": 64, "depth": 2, "head_dim": 16, **settings})


def test_gpt_is_causal_and_sees_its_past():
    model, tokens = small(), torch.randint(97, (2, 24))
    changed = tokens.clone()
    changed[:, 12] = (changed[:, 12] + 1) % 97
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    assert before.shape == (2, 24, 97)
    torch.testing.assert_close(before[:, :12], after[:, :12], rtol=0, atol=1e-6)
    for later in range(12, 24):
        assert (before[:, later] - after[:, later]).abs().max() > 1e-4


def test_gpt_knows_the_order_of_its_past():
    model = small()
    with torch.no_grad():
        a, b = (model(torch.tensor([order]))[0, -1] for order in ([5, 9, 7, 3], [9, 5, 7, 3]))
    assert (a - b).abs().max() > 1e-4


def test_attention_depends_on_distances_alone():
    q, k = torch.randn(2, 1, 1, 1, 32, dtype=torch.float64).expand(2, 1, 1, 9, 32)
    scores = (rotate(q) @ rotate(k).mT)[0, 0]
    for distance in range(-8, 9):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=0, atol=1e-5)
    torch.testing.assert_close(rotate(q).norm(dim=-1), q.norm(dim=-1), rtol=1e-6, atol=0)
    assert (scores[0, 0] - scores[0, 5]).abs() > 1e-3


@pytest.mark.parametrize("settings", [{"head_dim": 24}, {"head_dim": 15, "width": 60}])
def test_gpt_refuses_head_dims_that_do_not_fit(settings):
    with pytest.raises(ValueError, match=f"head_dim .* got {settings['head_dim']}"):
        small(**settings)


def test_activations_keep_unit_rms():
    x = torch.randn(200_000)
    assert ScaledGELU()(x).square().mean().sqrt() == pytest.approx(0.92, abs=0.01)  # 0.65 without the factor
    torch.testing.assert_close(rms_norm(7 * x.view(100, -1)).square().mean(-1), torch.ones(100))


@pytest.mark.parametrize("width", [32, 128])
def test_weights_start_on_their_balls_and_activations_ignore_width(width):
    model = small(width=width, head_dim=32)
    optimizer = scion(model, 0.1, embedding=1.5, hidden=2.0, head=5.0)
    covered = [p for group in optimizer.param_groups for p in group["params"]]
    assert len(covered) == len(list(model.parameters())) == len(set(covered))
    torch.testing.assert_close(model.embedding.weight.square().mean(-1).sqrt(), torch.full((97,), 1.5))
    torch.testing.assert_close(model.head.weight.abs(), torch.full((97, width), 5.0 / width))
    for name, weight in model.blocks.named_parameters():
        rows, cols = weight.shape
        values = torch.linalg.svdvals(weight) * math.sqrt(cols / rows)
        torch.testing.assert_close(
            values, torch.full_like(values, 2.0), msg=lambda text, name=name: f"{name} {text}"
        )


def test_one_step_is_the_papers_update():
    """W <- (1 - lr) W - lr radius u(alpha g): exact for the embedding and the head, in size for the rest."""
    model = small()
    optimizer = scion(model, 0.25, alpha=0.5, embedding=1.5, hidden=2.0, head=5.0)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model(torch.randint(97, (4, 16))).square().mean().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    optimizer.step()
    moved = {name: (0.75 * before[name] - p.detach()) / 0.25 for name, p in model.named_parameters()}
    g = gradients["embedding.weight"]
    expected = 1.5 * math.sqrt(64) * torch.nn.functional.normalize(g, dim=-1)
    torch.testing.assert_close(moved["embedding.weight"], expected, rtol=1e-4, atol=1e-5)
    assert (expected.norm(dim=-1) == 0).any()  # tokens that did not occur have no gradient and only shrink
    torch.testing.assert_close(
        moved["head.weight"], 5 / 64 * gradients["head.weight"].sign(), rtol=1e-4, atol=1e-5
    )
    for name, weight in model.blocks.named_parameters():
        rows, cols = weight.shape
        step = moved[f"blocks.{name}"]
        assert torch.linalg.matrix_norm(step, 2) <= 1.15 * 2.0 * math.sqrt(rows / cols), name
        # The oracle's value is the dual norm: <g, lmo(g)> = -radius ||g||_dual.
        dual = 2.0 * math.sqrt(rows / cols) * torch.linalg.svdvals(gradients[f"blocks.{name}"]).sum()
        assert (step * gradients[f"blocks.{name}"]).sum() == pytest.approx(dual.item(), rel=0.05), name


def test_light_form_takes_the_same_steps():
    batches = torch.randint(97, (4, 4, 17))
    ends = []
    for light in (False, True):
        torch.manual_seed(0)
        model = small()
        optimizer = scion(model, 0.05, light=light)
        for batch in batches:
            logits = model(batch[:, :-1])
            torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
        ends.append([p.detach() for p in model.parameters()])
    for plain, light in zip(*ends, strict=True):
        torch.testing.assert_close(plain, light, rtol=1e-3, atol=1e-3)


def test_transfer_reads_shift_regret_and_edges():
    study = transfer({64: [3.0, 2.0, 2.5, 9.0], 128: [2.0, 1.5, 1.25, 2.0], 256: [9.0, math.nan, 2.0, 1.0]})
    assert study.best == {64: 1, 128: 2, 256: 3}
    assert study.shift == 2 and not study.interior
    assert study.regret == {64: 0.0, 128: 0.25, 256: math.inf}
    still = transfer({64: [3.0, 2.0, 2.5], 128: [3.0, 1.0, 2.0]})
    assert still.shift == 0 and still.interior and still.regret == {64: 0.0, 128: 0.0}


def test_schedule_rises_then_falls_to_zero(training):
    values = [training.schedule(step, 40) for step in range(41)]
    assert values[0] == 0.25 and max(values) == values[3] == values[4] == 1.0 and values[40] == 0.0
    assert values[4:] == sorted(values[4:], reverse=True)


@pytest.mark.parametrize("init", ["gpt2", "fan_in"])
def test_adamw_initialisation(training, init):
    model = small(width=256)
    training.adamw(model, 1e-3, init)
    stds = {name: p.std().item() for name, p in model.named_parameters()}
    linear = 0.02 if init == "gpt2" else 1 / 16
    assert stds["embedding.weight"] == pytest.approx(0.02, rel=0.05)
    assert stds["head.weight"] == pytest.approx(linear, rel=0.05)
    assert stds["blocks.1.query.weight"] == pytest.approx(linear, rel=0.05)
    assert stds["blocks.1.mix.weight"] == pytest.approx(linear / 2, rel=0.05)


@pytest.mark.parametrize(
    "settings",
    [{}, {"optimizer": "adamw", "log2_lr": -7}, {"light": True}, {"light": True, "dtype": "bfloat16"}],
    ids=["scion", "adamw", "light", "half light"],
)
def test_a_run_learns_and_repeats_bitwise(training, settings):
    run = training.Run(
        **{
            "optimizer": "scion",
            "log2_lr": -5,
            "width": 32,
            "steps": 24,
            "seed": 1,
            "context": 32,
            **settings,
        }
    )
    work = []
    first, second = (training.train(run, lambda done, *_: work.append(done)) for _ in range(2))
    assert first["loss"] == second["loss"] and first["curve"] == second["curve"]
    assert first["loss"] < 3.9  # log(97) = 4.57
    assert [point[0] for point in first["curve"]] == [2 * 16 * 32 * i for i in range(1, 13)]
    assert sum(work) == pytest.approx(2 * run.work)


def test_a_diverged_run_ends_early(training, monkeypatch):
    monkeypatch.setattr(training, "loss", lambda *_: torch.tensor(math.inf, requires_grad=True))
    work = []
    run = training.Run("adamw", -7, 32, 8, 0, context=16)
    assert math.isnan(training.train(run, lambda done, *_: work.append(done))["loss"])
    assert sum(work) == pytest.approx(run.work)


TINY = """
import sys
sys.path.insert(0, {seed!r})
import memory, reproduce
from pyops.reproduce import main
reproduce.SIZES["quick"] = reproduce.Sizes(
    (32, 64, 96), 12, 16, {{"scion": (-6, -5, -4), "adamw": (-8, -7, -6)}}, (0,), (2, 3)
)
reproduce.DEMO = {{name: [reproduce.Run(name, -6, 32, 12, 2, context=16)] for name in ("scion", "adamw")}}
sys.exit(main(reproduce.__file__, reproduce.study, demo=True))
"""


@pytest.fixture
def tiny(tmp_path):
    """Runs the seed's study on tiny sizes from a foreign folder."""

    def start(*argv):
        command = [sys.executable, "-c", TINY.format(seed=str(SEED)), "--out", str(tmp_path / "out"), *argv]
        environment = {**os.environ, "PYTHONPATH": str(CHECKOUT)}
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
        written = json.loads((tmp_path / "out" / "scion.json").read_text())
        assert done.returncode == (0 if written["passed"] else 1), done.stderr
        return done, written, tmp_path / "out"

    return start


def test_the_whole_study_in_small(tiny):
    done, written, out = tiny("--quick", "--jobs", "1")
    assert written["mode"] == "quick" and written["plots"] == ["loss.png", "transfer.png", "memory.png"]
    for name in written["plots"]:
        assert 5_000 < (out / name).stat().st_size < 200_000
    lines = {line["name"]: line for line in written["lines"]}
    assert {"a_gain_minus_two_errors", "b_scion_shift", "c_half_light_over_adamw"} <= lines.keys()
    for name, line in lines.items():
        assert f"{line['verdict']:4}  {name} " in done.stdout
        # Sizes so small decide nothing about training; what memory costs does not depend on them.
        assert not name.startswith("c_light_over") or line["verdict"] == "ok"
    assert lines["c_adamw_float32"]["value"] == pytest.approx(16, rel=0.01)
    assert lines["c_light_bfloat16"]["value"] == pytest.approx(4, rel=0.01)
    assert len(written["results"]["grid_adamw"]["init=gpt2"]) == 3
    assert [len(row) for row in written["results"]["transfer_scion"]["losses"].values()] == [3, 3, 3]


def test_the_demo_in_small(tiny):
    done, written, out = tiny("--demo", "--jobs", "1")
    assert written["mode"] == "demo" and written["plots"] == ["loss.png"]
    assert f"plot  {out / 'loss.png'}" in done.stdout
    assert "adamw width 32" in done.stderr and "scion width 32" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["--quick", "--demo"])
def test_as_people_run_it(tmp_path, mode):
    """Every criterion is met."""
    command = [sys.executable, str(SEED / "reproduce.py"), mode, "--out", str(tmp_path / "out")]
    done = subprocess.run(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(CHECKOUT)})
    assert done.returncode == 0
    assert os.listdir(tmp_path) == ["out"]
