"""Set-theoretic recommendation: the model, the three ways to answer, ranks, and the seed's study in small."""

import importlib
import json
import math
import os
import subprocess
import sys

import pytest
import torch

from pyops.boxes import Box, containment, intersection, log_volume
from pyops.papers.box_recommender import (
    BoxRecommender,
    Queries,
    answer,
    joint_loss,
    quality,
    ranks,
)
from pyops.reproduce import CHECKOUT

SEED = CHECKOUT / "seeds" / "box_recommender"
MODULES = ("sets", "baselines", "training", "plane", "reproduce")


@pytest.fixture
def modules(monkeypatch):
    """The modules of the seed, which lie beside its script; other seeds have modules of the same names."""
    monkeypatch.syspath_prepend(str(SEED))
    for name in MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield {name: importlib.import_module(name) for name in MODULES}
    for name in MODULES:
        sys.modules.pop(name, None)


def model(sets=7, items=11, dim=5, **options):
    g = torch.Generator().manual_seed(0)
    return BoxRecommender(sets, items, dim, 0.2, 0.3, generator=g, **options)


def queries(wanted, unwanted, count=4):
    g = torch.Generator().manual_seed(1)
    order = torch.rand(count, 7, generator=g).argsort(1)
    return Queries(order[:, 0], order[:, 1 : 1 + wanted], order[:, 1 + wanted : 1 + wanted + unwanted])


class Told:
    """A model of sets that says what it is told: P [sets, items]."""

    def __init__(self, p):
        self.p = p

    def log_probability(self, sets):
        return self.p[sets].log()

    def composed(self, q):
        return -self.p[q.users]


# The model


@pytest.mark.parametrize("wanted,unwanted", [(0, 0), (1, 0), (2, 0), (1, 1), (3, 0), (1, 2)])
def test_composed_is_the_volume_of_the_intersection(wanted, unwanted):
    m, q = model(), queries(wanted, unwanted)
    found = m.composed(q).double()
    tau, both = 0.2, m.temperatures
    items = Box(*(t.double() for t in m.items.boxes))
    for b in range(len(q)):
        inside = [Box(*(t.double() for t in m.sets(r))) for r in (q.users[b], *q.wanted[b])]
        outside = [Box(*(t.double() for t in m.sets(r))) for r in q.unwanted[b]]

        def volume(boxes):
            return log_volume(intersection(items, *boxes, intersection_temperature=tau), **both).exp()

        expected = volume(inside)
        if unwanted:
            expected = expected - volume([*inside, outside[0]])
        if unwanted == 2:
            expected = expected - volume([*inside, outside[1]]) + volume([*inside, *outside])
        expected = (expected / log_volume(items, **both).exp()).log().clamp(max=0)
        torch.testing.assert_close(found[b], expected, rtol=1e-3, atol=1e-4)


def test_pairs_and_probabilities_agree():
    m = model(parameterization="min_delta")
    sets, items = torch.tensor([0, 3, 3]), torch.tensor([[1, 2], [0, 0], [10, 4]])
    every = m.log_probability(sets)
    torch.testing.assert_close(m.pairs(sets, items), every.gather(1, items), rtol=1e-5, atol=1e-5)
    expected = containment(m.sets(sets[1]), m.items(torch.tensor(5)), **m.temperatures)
    torch.testing.assert_close(every[1, 5], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("wanted,unwanted", [(0, 0), (2, 0), (1, 1)])
def test_recommend_is_the_top_of_composed(wanted, unwanted):
    m, q = model(), queries(wanted, unwanted)
    best = m.recommend(q, 4)
    scores = m.composed(q)
    torch.testing.assert_close(best.values, scores.topk(4, 1).values, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(scores.gather(1, best.indices), best.values, rtol=1e-5, atol=1e-5)


def test_starts_are_repeatable():
    a, b = model(), model()
    assert torch.equal(a.sets.weight, b.sets.weight) and torch.equal(a.items.weight, b.items.weight)
    assert (a.sets.boxes.side > 0).all() and sum(p.numel() for p in a.parameters()) == (7 + 11) * 10


def test_penalty_counts_the_rows_used():
    m = model()
    sets, items = torch.tensor([1, 1]), torch.tensor([2, 3])
    rows = m.sets.weight[1].square().sum(), m.items.weight[2:4].square().sum(1).mean()
    torch.testing.assert_close(m.penalty(sets, items), sum(rows))


# Loss and answers


def test_joint_loss():
    losses = torch.tensor([1.0, 2.0, 6.0])
    attribute = torch.tensor([False, True, True])
    assert joint_loss(losses, attribute, 0.25).item() == pytest.approx(0.25 * 1 + 0.75 * 4)
    assert joint_loss(losses, attribute.logical_not(), 1.0).item() == pytest.approx(4)
    assert joint_loss(losses, torch.zeros(3, dtype=torch.bool), 0.5).item() == pytest.approx(1.5)


def test_the_three_ways():
    p = torch.tensor([[0.9, 0.5, 0.2, 0.8], [0.6, 0.7, 0.9, 0.1], [0.4, 0.6, 0.1, 1.0]])
    told, q = Told(p), Queries(torch.tensor([0]), torch.tensor([[1]]), torch.tensor([[2]]))
    product = answer(told, q, "product")[0].exp().tolist()
    assert product == pytest.approx([0.9 * 0.6 * 0.6, 0.5 * 0.7 * 0.4, 0.2 * 0.9 * 0.9, 0.0], rel=1e-5)
    # Items 0 and 2 pass; the others follow by the user's score.
    assert answer(told, q, "filter")[0].argsort(descending=True).tolist() == [0, 2, 3, 1]
    assert answer(told, q, "filter", 0.65)[0].argsort(descending=True).tolist() == [1, 2, 0, 3]
    assert torch.equal(answer(told, q, "geometric"), -p[:1])
    with pytest.raises(ValueError, match="way must be one of filter, product, geometric, got 'sum'"):
        answer(told, q, "sum")
    with pytest.raises(ValueError, match=r"threshold must be in \(0, 1\), got 1"):
        answer(told, q, "filter", 1)


# Evaluation


def test_ranks_by_hand():
    scores = torch.tensor([[5.0, 4.0, 3.0, 3.0, 1.0, -math.inf], [1.0, math.nan, 2.0, 2.0, 2.0, 0.0]])
    relevant = torch.tensor([[0, 1, 1, 0, 0, 0], [0, 1, 0, 1, 0, 0]], dtype=torch.bool)
    excluded = torch.tensor([[1, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0]], dtype=torch.bool)
    query, rank = ranks(scores, relevant, excluded)
    assert query.tolist() == [0, 0, 1, 1]
    # 4 leads; 3 ties with one other; NaN is behind all four others; 2 ties with two.
    assert rank.tolist() == [1, 1.5, 5, 2]


def test_ranks_against_brute_force():
    g = torch.Generator().manual_seed(0)
    scores = torch.randint(8, (20, 30), generator=g).float()
    relevant = torch.rand(20, 30, generator=g) < 0.2
    excluded = (torch.rand(20, 30, generator=g) < 0.2) & ~relevant
    query, rank = ranks(scores, relevant, excluded)
    for (b, i), r in zip(relevant.nonzero().tolist(), rank.tolist(), strict=True):
        others = scores[b][~(relevant[b] | excluded[b])]
        assert r == 1 + (others > scores[b, i]).sum().item() + (others == scores[b, i]).sum().item() / 2
    assert torch.equal(query, relevant.nonzero()[:, 0])


def test_infinitely_bad_items_tie_with_each_other_only():
    scores = torch.tensor([[-math.inf, -math.inf, -5.0, -math.inf]])
    relevant, excluded = torch.zeros(1, 4, dtype=torch.bool), torch.zeros(1, 4, dtype=torch.bool)
    relevant[0, 0], excluded[0, 3] = True, True
    assert ranks(scores, relevant, excluded)[1].tolist() == [2.5]


def test_quality_is_a_mean_over_queries():
    scores = torch.arange(6.0).flip(0).expand(3, 6)
    relevant = torch.zeros(3, 6, dtype=torch.bool)
    relevant[0, 0] = relevant[0, 5] = relevant[1, 2] = True
    found = quality(scores, relevant, torch.zeros_like(relevant), 3)
    assert found.hit_rate == pytest.approx((1 / 2 + 1) / 2)
    assert found.ndcg == pytest.approx((1 / 2 + 1 / math.log2(4)) / 2)
    assert math.isnan(quality(scores, torch.zeros_like(relevant), relevant, 3).hit_rate)


# The seed


@pytest.mark.parametrize("kind", ["intervals", "halfspaces"])
def test_data(modules, kind):
    make = getattr(modules["sets"], kind)
    data, again = make(60, 8, 400, 3), make(60, 8, 400, 3)
    assert torch.equal(data.member, again.member) and not torch.equal(data.member, make(60, 8, 400, 4).member)
    share = data.member.float().mean(1)
    assert share[:60].mean().item() == pytest.approx(0.085, abs=0.03)
    assert share[60:].mean().item() == pytest.approx(0.28, abs=0.06)
    assert torch.equal(data.train[:60] | data.valid[:60] | data.test[:60], data.member[:60])
    parts = (data.train, data.valid, data.test)
    assert (sum(part.int() for part in parts) <= 1).all()
    assert not data.test[60:].any() and 0.4 < data.train[60:].sum() / data.member[60:].sum() < 0.6


def test_queries_find_what_the_truth_says(modules):
    sets = modules["sets"]
    data = sets.intervals(40, 8, 300, 0)
    for form, (wanted, unwanted) in sets.FORMS.items():
        q, relevant, excluded = data.queries(form, 50, "test", 1)
        assert len(q) == 50 and q.wanted.shape == (50, wanted) and q.unwanted.shape == (50, unwanted)
        assert relevant.any(1).all() and not (relevant & excluded).any()
        for b in range(0, 50, 7):
            inside = data.member[[q.users[b].item(), *q.wanted[b].tolist()]].all(0)
            for a in q.unwanted[b].tolist():
                assert (inside & data.member[a]).any()
                inside &= ~data.member[a]
            assert torch.equal(relevant[b], inside & data.test[q.users[b]])


@pytest.mark.parametrize("name", ["mf", "neumf", "lightgcn"])
def test_baselines(modules, name):
    training = modules["training"]
    run = training.Run("intervals", name, 0, lr=0.01, users=30, attributes=6, items=200)
    data = training.load(run)
    m = training.build(run, data)
    numbers = sum(p.numel() for p in m.parameters())
    assert 0.97 * 236 * 128 < numbers <= 236 * 128 + 1
    with torch.no_grad():
        for p in m.parameters():  # biases too
            p.add_(0.05 * torch.randn(p.shape))
        sets, items = torch.tensor([1, 33]), torch.tensor([[5, 7, 5], [0, 1, 199]])
        every = m.log_probability(sets)
        chosen = torch.nn.functional.logsigmoid(m.logits(sets, items))
        torch.testing.assert_close(chosen, every.gather(1, items), rtol=1e-4, atol=1e-5)
        q = Queries(sets[:1], torch.tensor([[31, 32]]), torch.tensor([[31]]))
        plain = Queries(sets[:1], torch.tensor([[32]]), torch.empty(1, 0, dtype=torch.int64))
        torch.testing.assert_close(m.composed(q), m.composed(plain), rtol=1e-4, atol=1e-5)


def test_lightgcn_propagates(modules):
    g = torch.Generator().manual_seed(0)
    train = torch.rand(5, 9, generator=g) < 0.4
    m = modules["baselines"].LightGCN(train, 16, g)
    a = torch.zeros(14, 14)
    a[:5, 5:], a[5:, :5] = train.float(), train.T.float()
    d = a.sum(1).clamp(min=1).rsqrt()
    a = d[:, None] * a * d
    x = torch.cat([m.set_vectors, m.item_vectors])
    expected = (x + a @ x + a @ a @ x) / 3
    torch.testing.assert_close(torch.cat(m.tables()), expected)


def test_curves_of_the_op_and_of_plain_torch(modules):
    training = modules["training"]
    run = training.Run("intervals", "boxes", 0, lr=0.03, tau=0.2, nu=1.0, users=30, attributes=6, items=200)
    found = training.curves(run, 15)
    op, eager = (torch.tensor(found[name]["loss"]) for name in ("op", "eager"))
    assert (op - eager).abs().max() < 1e-4
    assert op[-1] < 0.9 * op[0]


@pytest.mark.parametrize("name", ["boxes", "lightgcn"])
def test_training_learns(modules, name):
    training = modules["training"]
    small = {"users": 50, "attributes": 6, "items": 200, "epochs": 8, "checks": 2, "batch": 128, "k": 10}
    run = training.Run("intervals", name, 0, lr=0.03, tau=0.2, nu=1.0, test=True, queries=50, **small)
    found = training.train(run, lambda *_: None)
    assert found["curve"][-1][1] < found["curve"][0][1]
    assert found["test"]["u_a_b"]["geometric"][0] > 0.15  # chance: 10 of about 190
    assert found["threshold"] in training.THRESHOLDS and found["test"]["u"].keys() == {
        "filter", "product", "geometric",
    }  # fmt: skip


def test_movielens_is_read_from_a_package(modules, monkeypatch, tmp_path):
    sets = modules["sets"]
    monkeypatch.setattr(sets, "movielens_folder", lambda: None)
    with pytest.raises(FileNotFoundError, match="pip install --no-deps recbole"):
        sets.movielens(0)
    films = [f"{i}\tfilm\t1995\t{'Drama Sci-Fi' if i % 2 else 'Drama'}" for i in range(1, 101)]
    (tmp_path / "ml-100k.item").write_text("\n".join(["header", *films, ""]))
    ratings = [f"{u}\t{i}\t{3 + (u + i) % 3}\t0" for u in (2, 7) for i in range(1, 101)]
    (tmp_path / "ml-100k.inter").write_text("\n".join(["header", *ratings]))
    monkeypatch.setattr(sets, "movielens_folder", lambda: tmp_path)
    data = sets.movielens(0)
    assert data.member.shape == (4, 100) and data.users == 2
    assert data.member[2].all() and data.member[3].tolist() == [i % 2 == 1 for i in range(1, 101)]
    assert data.member[0].tolist() == [(2 + i) % 3 > 0 for i in range(1, 101)]


TINY = """
import sys
sys.path.insert(0, {seed!r})
import reproduce
reproduce.QUICK = dict(users=40, attributes=6, items=150, epochs=2, checks=1, k=10, queries=30, batch=256)
sys.exit(reproduce.main(reproduce.__file__, reproduce.study))
"""


def test_the_whole_study_in_small(tmp_path):
    """Tiny data and two epochs, from a foreign folder; what it concludes means nothing."""
    out = tmp_path / "out"
    code = TINY.format(seed=str(SEED))
    command = [sys.executable, "-c", code, "--quick", "--jobs", "1", "--out", str(out)]
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr
    report = json.loads((out / "box_recommender.json").read_text())
    verdicts = {line["name"]: line["verdict"] for line in report["lines"]}
    assert verdicts["curves_differ_by"] == "ok"
    assert sum(verdict in ("ok", "MISS") for verdict in verdicts.values()) == 5
    assert sorted(report["plots"]) == ["intervals_hits.png", "intervals_training.png", "plane.png"]
    assert all((out / name).stat().st_size > 5000 for name in report["plots"])
