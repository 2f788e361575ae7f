"""Length generalization: model, statistics, interventions, effective remembrance; the seed in small."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from pyops.nn import GatedDeltaNet, GatedLinearAttention, LayerState, Mamba2Mixer
from pyops.papers.length_generalization import (
    FittedNoise,
    Intervention,
    RandomNoise,
    RecurrentLM,
    StatePassing,
    StateStatistics,
    TruncatedBPTT,
    effective_remembrance,
    losses_by_position,
    state_norms,
    total_variation,
)
from pyops.reproduce import CHECKOUT

SEED = CHECKOUT / "seeds" / "length_generalization"

MIXERS = {
    "gla": GatedLinearAttention,
    "gdn": lambda width: GatedDeltaNet(width, num_heads=2, head_dim=4),
    "mamba2": lambda width: Mamba2Mixer(width, state_size=4, head_dim=8),
}


@pytest.fixture(params=MIXERS)
def model(request):
    return RecurrentLM(11, 16, depth=2, mixer=MIXERS[request.param])


def states_of(model, count=3, seed=0):
    tokens = torch.randint(11, (count, 9), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        return model(tokens)[1]


def leaves(states):
    return [t for state in states for t in (state.recurrent, *state.conv)]


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(leaves(one), leaves(other), strict=True))


# The model


def test_states_carry_all_of_the_past(model):
    tokens = torch.randint(11, (2, 12))
    with torch.no_grad():
        whole, last = model(tokens)
        first, states = model(tokens[:, :5])
        second, states = model(tokens[:, 5:], states)
        forgetful, _ = model(tokens[:, 5:])
    torch.testing.assert_close(torch.cat([first, second], 1), whole, rtol=1e-4, atol=1e-5)
    for a, b in zip(leaves(states), leaves(last), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert (forgetful - second).abs().max() > 1e-3


def test_zero_states_are_the_default(model):
    tokens = torch.randint(11, (2, 6))
    with torch.no_grad():
        torch.testing.assert_close(model(tokens, model.zero_states(2))[0], model(tokens)[0])


def test_last_logits_of_sequences_in_a_row(model):
    tokens = torch.randint(11, (1, 13))
    with torch.no_grad():
        together = model.last_logits(tokens, torch.tensor([0, 4, 5, 13]))
        apart = [model(part)[0][0, -1] for part in tokens.split([4, 1, 8], 1)]
    torch.testing.assert_close(together, torch.stack(apart), rtol=1e-4, atol=1e-5)


# Statistics


def test_norms_are_per_layer_sequence_and_head(model):
    states = states_of(model)
    norms = state_norms(states)
    assert norms.shape == (2, 3, states[0].recurrent.shape[1])
    assert norms[1, 2, 0].item() == pytest.approx(states[1].recurrent[2, 0].norm().item())


def test_statistics_per_layer_and_head():
    shift = torch.tensor([[1.0, -2.0], [0.0, 30.0]])
    scale = torch.tensor([[1.0, 0.5], [3.0, 0.1]])
    statistics = StateStatistics()
    for _ in range(3):
        statistics.update(
            [
                LayerState(m[:, None, None] + s[:, None, None] * torch.randn(40, 2, 16, 16))
                for m, s in zip(shift, scale, strict=True)
            ]
        )
    torch.testing.assert_close(statistics.mean.float(), shift, rtol=0, atol=0.06)
    torch.testing.assert_close(statistics.std.float(), scale, rtol=0.02, atol=0)
    assert statistics.rms == pytest.approx((shift**2 + scale**2).mean().sqrt().item(), rel=0.02)


def test_statistics_average_first_and_forget_later():
    statistics = StateStatistics(forget=0.25)
    expected = 0.0
    for i, value in enumerate([1.0, 5.0, 9.0, 2.0, 4.0, 8.0], start=1):
        statistics.update([LayerState(torch.full((2, 1, 3, 3), value))])
        share = max(0.25, 1 / i)
        expected = (1 - share) * expected + share * value
        assert statistics.mean.item() == pytest.approx(expected)
    assert StateStatistics().batches == 0
    with pytest.raises(RuntimeError, match="update"):
        _ = StateStatistics().mean
    with pytest.raises(ValueError, match=r"forget must be in .* got 0"):
        StateStatistics(forget=0)


# Interventions


def test_the_baseline_starts_from_zeros(model):
    intervention, zero = Intervention(), model.zero_states(3)
    intervention.observe(states_of(model))
    assert same(intervention.initial(zero), zero)


def test_random_noise_has_one_sigma_everywhere():
    model = RecurrentLM(11, 32, depth=2)
    zero = model.zero_states(200)
    drawn = RandomNoise(2.5, torch.Generator().manual_seed(0)).initial(zero)
    for state in drawn:
        torch.testing.assert_close(state.recurrent.std((0, 2, 3)), torch.full((4,), 2.5), rtol=0.03, atol=0)
        torch.testing.assert_close(state.recurrent.mean((0, 2, 3)), torch.zeros(4), rtol=0, atol=0.1)
    again = RandomNoise(2.5, torch.Generator().manual_seed(0)).initial(zero)
    assert same(drawn, again) and not same(drawn, zero)


def test_noise_leaves_convolutions_at_zero():
    model = RecurrentLM(11, 16, mixer=MIXERS["gdn"])
    fitted = FittedNoise()
    fitted.observe(states_of(model))
    for intervention in (RandomNoise(1.0), fitted):
        for state in intervention.initial(model.zero_states(2)):
            assert state.conv and all((c == 0).all() for c in state.conv)
            assert (state.recurrent != 0).all()


def test_fitted_noise_has_the_statistics_of_final_states():
    model = RecurrentLM(11, 32, depth=2)
    fitted, zero = FittedNoise(generator=torch.Generator().manual_seed(0)), model.zero_states(3000)
    assert same(fitted.initial(zero), zero)
    final = states_of(model, count=64)
    fitted.observe(final)
    for drawn, seen in zip(fitted.initial(zero), final, strict=True):
        for take in (torch.Tensor.mean, torch.Tensor.std):
            a, b = take(drawn.recurrent, (0, 2, 3)), take(seen.recurrent, (0, 2, 3))
            torch.testing.assert_close(a, b, rtol=0.02, atol=0.02 * seen.recurrent.std().item())
    deviations = torch.cat([s.recurrent.std((0, 2, 3)) for s in fitted.initial(zero)])
    assert deviations.max() / deviations.min() > 1.05  # not one for all


def test_state_passing_hands_on_final_states_without_history(model):
    passing, zero = StatePassing(), model.zero_states(3)
    assert same(passing.initial(zero), zero)
    _, final = model(torch.randint(11, (3, 9)))
    assert final[0].recurrent.requires_grad
    passing.observe(final)
    handed = passing.initial(zero)
    assert same(handed, final) and not any(t.requires_grad for t in leaves(handed))
    passing.observe(states_of(model, seed=1))
    assert same(passing.initial(zero), states_of(model, seed=1))


def test_truncated_bptt_restarts_fresh_texts_alone(model):
    truncated, zero, final = TruncatedBPTT(), model.zero_states(3), states_of(model)
    fresh = torch.tensor([False, True, False])
    assert same(truncated.initial(zero, torch.ones(3, dtype=torch.bool)), zero)
    truncated.observe(final)
    started = truncated.initial(zero, fresh)
    for mine, z, last in zip(leaves(started), leaves(zero), leaves(final), strict=True):
        assert torch.equal(mine[fresh], z[fresh]) and torch.equal(mine[~fresh], last[~fresh])
    assert same(truncated.initial(zero), zero)


def test_truncated_bptt_reads_a_text_as_if_whole(model):
    tokens, truncated = torch.randint(11, (2, 12)), TruncatedBPTT()
    parts = []
    for i, part in enumerate(tokens.split(4, 1)):
        with torch.no_grad():
            logits, states = model(part, truncated.initial(model.zero_states(2), torch.tensor([i == 0] * 2)))
        truncated.observe(states)
        parts.append(logits)
    torch.testing.assert_close(torch.cat(parts, 1), model(tokens)[0].detach(), rtol=1e-4, atol=1e-5)


def test_no_gradient_passes_between_batches():
    model, passing = RecurrentLM(11, 16), StatePassing()
    for _ in range(2):
        logits, states = model(torch.randint(11, (2, 5)), passing.initial(model.zero_states(2)))
        passing.observe(states)
        logits.square().mean().backward()  # raises where the first batch's graph is reached again


# What is measured


def test_total_variation():
    p = torch.tensor([[1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [0.2, 0.3, 0.5]])
    q = torch.tensor([[0.0, 0.0, 1.0], [0.5, 0.5, 0.0], [0.3, 0.3, 0.4]])
    torch.testing.assert_close(total_variation(p, q), torch.tensor([1.0, 0.0, 0.1]))


def test_effective_remembrance_is_that_of_one_run_per_suffix(model):
    tokens, starts, calls = torch.randint(11, (3, 14)), [0, 1, 5, 13], []

    def last_logits(row, cu_seqlens):
        calls.append(row.shape)
        return model.last_logits(row, cu_seqlens)

    found = effective_remembrance(last_logits, tokens, starts)
    assert calls == [(1, 3 * (14 + 14 + 13 + 9 + 1))]
    with torch.no_grad():
        full = model(tokens)[0][:, -1].softmax(-1)
        for i, t in enumerate(starts):
            part = model(tokens[:, t:])[0][:, -1].softmax(-1)
            torch.testing.assert_close(found[:, i], total_variation(full, part), rtol=1e-3, atol=1e-6)
    assert (found[:, 0] == 0).all() and (found[:, 1:] > 0).all() and (found <= 1).all()
    for wrong in ([], [-1], [14]):
        with pytest.raises(ValueError, match="starts"):
            effective_remembrance(last_logits, tokens, wrong)


def test_losses_by_position_do_not_depend_on_segments(model):
    tokens = torch.randint(11, (4, 14))
    losses, norms = losses_by_position(model, tokens, 13)
    with torch.no_grad():
        logits, states = model(tokens[:, :-1])
    expected = torch.nn.functional.cross_entropy(logits.mT, tokens[:, 1:], reduction="none").mean(0)
    torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(norms, state_norms(states).mean(1)[None])
    parts, norms = losses_by_position(model, tokens, 5)
    torch.testing.assert_close(parts, expected, rtol=1e-4, atol=1e-5)
    assert norms.shape[0] == 3
    torch.testing.assert_close(norms[-1], state_norms(states).mean(1), rtol=1e-4, atol=1e-5)


# The seed


@pytest.fixture
def seed(monkeypatch):
    """The modules of the seed, which lie beside its script; other seeds have modules of the same names."""
    monkeypatch.syspath_prepend(str(SEED))
    for name in ("training", "passkey"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import passkey
    import training

    yield SimpleNamespace(training=training, passkey=passkey)
    for name in ("training", "passkey"):
        sys.modules.pop(name, None)


def run_of(training, **settings):
    return training.Run(
        **{"seed": 1, "steps": 4, "post_steps": 2, "tune_steps": 5, "width": 16, "context": 32, "batch": 4}
        | {"reach": 8, "texts": 3, "chapter": 4}
        | settings
    )


def test_gates_start_open(seed):
    run = run_of(seed.training)
    layer = seed.training.make(run).blocks[0].mixer
    x = torch.nn.functional.rms_norm(torch.randn(2, 40, run.width), (run.width,))
    decay = torch.sigmoid(layer.gk_proj(x)) ** (1 / layer.gate_logit_normalizer)
    assert decay.min() > 0.9999 and decay.std() > 0


def test_continued_batches_continue(seed):
    run = run_of(seed.training)
    batches = seed.training.continued(run, torch.Generator().manual_seed(0))
    inputs, targets, fresh = next(batches)
    assert fresh.all()
    begun = torch.zeros(run.batch, dtype=torch.long)
    for _ in range(3 * run.chapter):
        last = targets[:, -1]
        inputs, targets, fresh = next(batches)
        assert torch.equal(inputs[:, 1:], targets[:, :-1])
        assert torch.equal(inputs[~fresh, 0], last[~fresh])
        begun += fresh
    assert (begun == 3).all()  # each row, once in `chapter` batches


def test_shuffled_batches_are_fresh_and_repeat_with_the_generator(seed):
    run = run_of(seed.training)
    one, other = (next(seed.training.shuffled(run, torch.Generator().manual_seed(3))) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True)) and one[2].all()
    assert one[0].shape == (4, 32)


def test_losses_in_windows_see_no_more_than_a_window(seed):
    training = seed.training
    torch.manual_seed(0)
    model = training.make(run_of(training))
    tokens = torch.randint(training.TOKENS, (2, 8 * 8 + 1))
    found = training.losses_in_windows(model, tokens, 8)
    assert found[:4].isnan().all() and not found[4:].isnan().any()
    with torch.no_grad():
        for position in (4, 7, 8, 30, 61):
            begin = (position // 4 - 1) * 4  # the half window before that of the position
            logits = model(tokens[:, begin : position + 1])[0][:, -1]
            expected = torch.nn.functional.cross_entropy(logits, tokens[:, position + 1])
            assert found[position].item() == pytest.approx(expected.item(), rel=1e-4)


def test_octaves(seed):
    run = run_of(seed.training, context=4, reach=4)
    assert run.lengths == [4, 8, 16] and run.length == 16
    assert seed.training.per_octave(torch.arange(16.0), run) == [2.5, 5.5, 11.5]
    assert run.remembered == 8 and run.starts == [1, 2, 4, 6, 7]


def test_passkeys_are_noted_once_and_asked_for_at_the_end(seed):
    passkey, training = seed.passkey, seed.training
    symbols = training.words(training.TOKENS)["validation"]
    for length, span in ((40, 40), (200, 40), (200, 200)):
        tokens = passkey.texts(symbols, 50, length, span, torch.Generator().manual_seed(0))
        assert tokens.shape == (50, length + 1)
        question = torch.cat([passkey.MARK.expand(50, -1), tokens[:, -5:]], 1)
        assert torch.equal(tokens[:, -11:], question)
        found = (tokens.unfold(1, 11, 1) == question[:, None]).all(-1)
        assert (found.sum(1) == 2).all()
        note = found.int().argmax(1)
        assert note.min() >= length - span and note.max() <= length - 22 and len(set(note.tolist())) > 5
        assert (tokens[torch.arange(50), note + 11] == 0).all()  # a line of its own


def test_recall_counts_texts_with_all_digits_right(seed):
    tokens = torch.randint(10, (8, 33))

    class Oracle(RecurrentLM):
        """Knows the next token from the states it carries, a count; fails at the last digit of odd texts."""

        def forward(self, inputs, states=None, cu_seqlens=None):
            at = 0 if isinstance(states[0], LayerState) else states[0]
            following = tokens[:, at + 1 : at + 1 + inputs.shape[1]].clone()
            if at + inputs.shape[1] == 32:
                following[1::2, -1] += 1
            return torch.nn.functional.one_hot(following, 11), [at + inputs.shape[1]]

    assert seed.passkey.recall(Oracle(11, 16), tokens, 8) == 0.5


def test_only_the_answer_counts_in_training(seed):
    symbols = seed.training.words(seed.training.TOKENS)["train"]
    inputs, targets, fresh = next(seed.passkey.batches(symbols, 3, 40, torch.Generator().manual_seed(0)))
    assert inputs.shape == targets.shape == (3, 40) and fresh.all()
    assert (targets[:, :-5] == seed.passkey.IGNORED).all()
    assert torch.equal(targets[:, -5:-1], inputs[:, -4:]) and (targets[:, -5:] >= 0).all()


TINY = """
import sys
sys.path.insert(0, {seed!r})
import reproduce
from pyops.reproduce import main
tiny = dict(steps=6, post_steps=2, tune_steps=5, width=16, context=32, batch=4, reach=8, texts=3, chapter=4)
reproduce.SIZES["quick"] = [reproduce.Run(seed, **tiny) for seed in (1, 2)]
sys.exit(main(reproduce.__file__, reproduce.whole))
"""


def test_the_whole_study_in_small(tmp_path):
    out = tmp_path / "out"
    command = [sys.executable, "-c", TINY.format(seed=str(SEED)), "--quick", "--jobs", "1", "--out", str(out)]
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    written = json.loads((out / "length_generalization.json").read_text())
    assert done.returncode == (0 if written["passed"] else 1), done.stderr
    assert written["plots"] == ["loss.png", "norms.png", "remembrance.png", "passkey.png"]
    for name in written["plots"]:
        assert 5_000 < (out / name).stat().st_size < 200_000
    lines = {line["name"]: line for line in written["lines"]}
    assert {"a_state_passing_excess", "b_base_growth", "c_base_remembrance", "d_none_recall"} <= lines.keys()
    models = written["results"]["seeds"][0]["models"]
    assert written["results"]["seeds"][0]["seed"] == 1 and models["base"]["excess"][0] == 0
    assert models["state_passing"]["loss"] != models["none"]["loss"]
    assert [len(models["base"][what]) for what in ("loss", "norms", "remembrance")] == [4, 4, 13]


@pytest.mark.slow
def test_quick(tmp_path):
    """The command as people give it; every criterion is met."""
    command = [sys.executable, str(SEED / "reproduce.py"), "--quick", "--out", str(tmp_path / "out")]
    done = subprocess.run(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(CHECKOUT)})
    assert done.returncode == 0
    assert os.listdir(tmp_path) == ["out"]
