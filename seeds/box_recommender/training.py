"""Training of boxes and baselines on the same batches, choice by validation, and what tests measure."""

import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from baselines import LightGCN, MatrixFactorization, NeuralMF
from sets import FORMS, Data, halfspaces, intervals, movielens
from torch import Tensor

from pyops.losses import noise_contrastive
from pyops.papers.box_recommender import (
    WAYS,
    BoxRecommender,
    answer,
    joint_loss,
    quality,
)

MODELS = ("boxes", "mf", "neumf", "lightgcn")
WIDTH = 128  # numbers per set and per item
THRESHOLDS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7)


@dataclass(frozen=True)
class Run:
    """One training run. `seed` is that of the data; the model's start and the batches follow from it."""

    data: str
    model: str
    seed: int
    lr: float
    tau: float = 0.1  # boxes: intersection temperature
    nu: float = 0.1  # boxes: volume temperature
    parameterization: str = "raw"
    decay: float = 0.0
    ranking: bool = False  # lightgcn: BPR instead of binary cross entropy
    users: int = 400
    attributes: int = 24
    items: int = 2000
    epochs: int = 24
    checks: int = 6
    batch: int = 1024
    negatives: int = 8
    w: float = 0.5
    queries: int = 400
    k: int = 50
    test: bool = False  # choices are made without a look at tests

    @property
    def work(self) -> float:
        return self.epochs * self.users * self.items / 1e5 * (2 if self.model == "neumf" else 1)


def load(run: Run) -> Data:
    """The data of a run."""
    if run.data == "movielens":
        return movielens(run.seed)
    make = {"intervals": intervals, "halfspaces": halfspaces}[run.data]
    return make(run.users, run.attributes, run.items, run.seed)


def build(run: Run, data: Data) -> torch.nn.Module:
    """The model of a run, before training."""
    g = torch.Generator().manual_seed(run.seed)
    size = data.sets, data.items
    if run.model == "boxes":
        return BoxRecommender(
            *size, WIDTH // 2, run.tau, run.nu, parameterization=run.parameterization, generator=g
        )
    if run.model == "lightgcn":
        return LightGCN(data.train, WIDTH, g)
    return {"mf": MatrixFactorization, "neumf": NeuralMF}[run.model](*size, WIDTH, g)


def loss_of(model: torch.nn.Module, run: Run, data: Data, sets: Tensor, items: Tensor, pairs=None) -> Tensor:
    """The joint loss of a batch; items [B, 1 + negatives], the positive one first."""
    if isinstance(model, BoxRecommender):
        log_p = (pairs or model.pairs)(sets, items)
        losses = noise_contrastive(log_p[:, 0], log_p[:, 1:], reduction="none")
    else:
        logits = model.logits(sets, items)
        if run.ranking:
            losses = F.softplus(logits[:, 1:] - logits[:, :1]).sum(1)
        else:
            losses = F.softplus(-logits[:, 0]) + F.softplus(logits[:, 1:]).sum(1)
    loss = joint_loss(losses, sets >= data.users, run.w)
    return loss + run.decay * model.penalty(sets, items[:, 0]) if run.decay else loss


def batches(data: Data, run: Run, epochs: int):
    """Shuffled observed memberships with items drawn at random beside each, as (sets, items) for a step."""
    g = torch.Generator().manual_seed(1000 + run.seed)
    pairs = data.train.nonzero()
    for _ in range(epochs):
        for rows in torch.randperm(len(pairs), generator=g).split(run.batch):
            sets, item = pairs[rows].T
            drawn = torch.randint(data.items, (len(rows), run.negatives), generator=g)
            yield sets, torch.cat([item.unsqueeze(1), drawn], 1)


def measure(model, data: Data, run: Run, part: str, ways=WAYS, thresholds=(0.5,), forms=FORMS) -> dict:
    """HR@k and NDCG@k: {form: {way: [hit rate, NDCG]}}, with one entry `filter@t` per threshold."""
    found = {}
    for i, form in enumerate(forms):
        queries, relevant, excluded = data.queries(form, run.queries, part, 7 * run.seed + i)
        found[form] = {}
        for way in ways:
            for t in thresholds if way == "filter" else (0.5,):
                scores = answer(model, queries, way, t)
                name = f"filter@{t}" if way == "filter" else way
                found[form][name] = list(quality(scores, relevant, excluded, run.k))
    return found


def merit(found: dict) -> float:
    """What models are chosen by: hit rate of the best way, mean over forms."""
    return sum(max(hit for hit, _ in ways.values()) for ways in found.values()) / len(found)


def train(run: Run, tick) -> dict:
    """Trains, keeps the best of `checks` states by validation, and measures that."""
    data = load(run)
    model = build(run, data)
    optimizer = torch.optim.Adam(model.parameters(), lr=run.lr)
    label = f"{run.data} {run.model}"
    best, kept, kept_at, curve, losses = -1.0, None, 0, [], []
    started = time.process_time()
    each = max(1, run.epochs // run.checks)
    per_epoch = -(-int(data.train.sum()) // run.batch)
    for step, (sets, items) in enumerate(batches(data, run, run.epochs), 1):
        loss = loss_of(model, run, data, sets, items)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        if step % (per_epoch * each) == 0:
            value = merit(
                measure(model, data, run, "valid", ("product", "geometric"), forms=("u", "u_a", "u_a_not_b"))
            )
            curve.append([step // per_epoch, torch.stack(losses).mean().item(), value])
            losses = []
            tick(run.work * each / run.epochs, label, f"{value:.3f}")
            if value > best:
                best, kept_at = value, step // per_epoch
                kept = {name: t.clone() for name, t in model.state_dict().items()}
    seconds = time.process_time() - started
    model.load_state_dict(kept)
    valid = measure(model, data, run, "valid", thresholds=THRESHOLDS)
    # The threshold of filters is chosen by validation too, one for all forms.
    threshold = max(
        THRESHOLDS, key=lambda t: sum(valid[form][f"filter@{t}"][0] for form in FORMS if form != "u")
    )
    result = {
        "curve": curve,
        "epoch": kept_at,
        "threshold": threshold,
        "valid": merit(valid),
        "seconds": seconds,
        "parameters": sum(p.numel() for p in model.parameters()),
    }
    if run.test:
        found = measure(model, data, run, "test", thresholds=(threshold,))
        result["test"] = {
            form: {way.partition("@")[0]: values for way, values in ways.items()}
            for form, ways in found.items()
        }
    return result


def eager_pairs(model: BoxRecommender, sets: Tensor, items: Tensor) -> Tensor:
    """`BoxRecommender.pairs` in plain torch, with all its intermediate tensors."""
    tau, nu = model.temperatures.values()
    gamma = 0.5772156649015329

    def log_volume(z: Tensor, Z: Tensor) -> Tensor:
        s = (Z - z - 2 * gamma * tau) / nu
        # softplus(s) is exp(s) there, whose logarithm float32 has not.
        side = torch.where(s > -15, F.softplus(s.clamp(min=-15)).log(), s)
        return (side + torch.log(torch.tensor(nu))).sum(-1)

    z, Z = (F.embedding(sets, t).unsqueeze(1) for t in model.sets.boxes)
    iz, iZ = (F.embedding(items, t) for t in model.items.boxes)
    both = tau * torch.logaddexp(z / tau, iz / tau), -tau * torch.logaddexp(-Z / tau, -iZ / tau)
    log_p = log_volume(*both) - log_volume(iz, iZ)
    return log_p + (log_p.detach().clamp(max=0) - log_p.detach())


def curves(run: Run, steps: int) -> dict:
    """The losses of the same training by the op and in plain torch, and the seconds each took."""
    data = load(run)
    found = {}
    for name in ("op", "eager"):
        model = build(run, data)
        optimizer = torch.optim.Adam(model.parameters(), lr=run.lr)
        pairs = None if name == "op" else lambda sets, items, model=model: eager_pairs(model, sets, items)
        losses, started = [], time.perf_counter()
        for _, (sets, items) in zip(range(steps), batches(data, run, 100), strict=False):
            loss = loss_of(model, run, data, sets, items, pairs)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        found[name] = {"loss": losses, "seconds": time.perf_counter() - started}
    return found
