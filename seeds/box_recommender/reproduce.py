"""Set-theoretic recommendation at laptop scale: boxes against vectors on simple and composed queries, losses
of the op against plain torch, the cost of a query, and boxes in two dimensions to look at.

The criteria and how they were chosen are in README.md beside this file.
"""

import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))  # an installed pyops comes first

import torch
from plane import plane
from sets import FORMS, movielens_folder
from training import MODELS, WAYS, Run, curves, train

import pyops
from pyops.papers.box_recommender import BoxRecommender, Queries
from pyops.reproduce import Report, main

LABELS = {"boxes": "boxes", "mf": "matrix factorization", "neumf": "NeuMF", "lightgcn": "LightGCN"}
COLORS = {"boxes": "tab:blue", "mf": "tab:orange", "neumf": "tab:green", "lightgcn": "tab:red"}
NAMES = {
    "u": "u",
    "u_a": "u ∧ a",
    "u_a_b": "u ∧ a ∧ b",
    "u_a_not_b": "u ∧ a ∧ ¬b",
    "u_a_b_c": "u ∧ a ∧ b ∧ c",
}
# Four settings for each model; they are compared by validation on data of their own.
GRID = {
    "boxes": [
        {"lr": 0.03, "tau": 0.2, "nu": 1.0, "decay": 3e-3},
        {"lr": 0.03, "tau": 0.2, "nu": 1.0, "decay": 3e-3, "parameterization": "min_delta"},
        {"lr": 0.03, "tau": 0.2, "nu": 1.0, "decay": 1e-3},
        {"lr": 0.1, "tau": 0.2, "nu": 1.0, "decay": 3e-3},
    ],
    "mf": [
        {"lr": 0.01, "decay": 1e-4},
        {"lr": 0.01, "decay": 1e-3},
        {"lr": 0.01, "decay": 3e-3},
        {"lr": 0.03, "decay": 1e-3},
    ],
    "neumf": [
        {"lr": 0.01, "decay": 1e-4},
        {"lr": 0.01, "decay": 1e-3},
        {"lr": 0.01, "decay": 3e-3},
        {"lr": 0.03, "decay": 1e-3},
    ],
    "lightgcn": [
        {"lr": 0.01, "decay": 0.0},
        {"lr": 0.01, "decay": 1e-4},
        {"lr": 0.01, "decay": 1e-3},
        {"lr": 0.01, "decay": 1e-4, "ranking": True},
    ],
}
QUICK = {
    "users": 200,
    "attributes": 16,
    "items": 1000,
    "epochs": 10,
    "checks": 5,
    "k": 20,
    "queries": 150,
    "batch": 512,
}
FULL = {"users": 300, "attributes": 20, "items": 1500, "epochs": 12, "checks": 6, "k": 50, "queries": 300}
TUNING_SEED = 500
SEEDS = {"full": (11, 12, 13), "quick": (1,)}


def choose(report: Report, data: str, size: dict, settings: dict) -> dict[str, Run]:
    """The setting of each model that validation prefers."""
    runs = [
        Run(data, model, TUNING_SEED, **setting, **size) for model in MODELS for setting in settings[model]
    ]
    results = report.map(train, runs)
    report.results[f"{data}_grid"] = [
        {"run": vars(run), **result} for run, result in zip(runs, results, strict=True)
    ]
    chosen = {}
    for model in MODELS:
        of_model = [(r["valid"], run) for run, r in zip(runs, results, strict=True) if run.model == model]
        value, best = max(of_model, key=lambda pair: pair[0])
        chosen[model] = best
        told = f"lr {best.lr:g}, decay {best.decay:g}"
        if model == "boxes":
            told += f", {best.parameterization}"
        if model == "lightgcn":
            told += ", BPR" if best.ranking else ", BCE"
        report.told(f"{data}_{model}_setting", told, f"of {len(of_model)}; validation {value:.3f}")
    return chosen


def compare(report: Report, data: str, chosen: dict[str, Run], gated: bool) -> None:
    """Hit rates of all models and ways on one kind of data; two seeds where nothing is gated."""
    seeds = SEEDS[report.mode] if gated else SEEDS[report.mode][:2]
    runs = [replace(chosen[model], data=data, seed=seed, test=True) for model in MODELS for seed in seeds]
    results = report.map(train, runs)
    report.results[data] = [{"run": vars(run), **result} for run, result in zip(runs, results, strict=True)]
    of = {model: [r for run, r in zip(runs, results, strict=True) if run.model == model] for model in MODELS}

    def mean(model: str, form: str, way: str, which: int = 0) -> float:
        return statistics.mean(r["test"][form][way][which] for r in of[model])

    k = runs[0].k
    for form in FORMS:
        best = {model: max(WAYS, key=lambda way, m=model: mean(m, form, way)) for model in MODELS}
        rival = max(MODELS[1:], key=lambda model: mean(model, form, best[model]))
        ours, theirs = mean("boxes", form, "geometric"), mean(rival, form, best[rival])
        if form == "u":
            report.told(f"{data}_{form}_boxes_over_best", ours / theirs, f"HR@{k}; best baseline: {rival}")
            for model in MODELS:
                value = f"{mean(model, form, 'geometric'):.3f}, {mean(model, form, 'geometric', 1):.3f}"
                report.told(f"{data}_{form}_{model}", value, f"HR@{k}, NDCG@{k}")
            continue
        if gated:
            report.criterion(f"{data}_{form}_boxes_over_best", ours / theirs, at_least=1.0)
        else:
            report.told(f"{data}_{form}_boxes_over_best", ours / theirs, f"HR@{k}; {rival}, {best[rival]}")
        for model in MODELS:
            value = ", ".join(f"{mean(model, form, way):.3f}" for way in WAYS)
            more = ", ".join(f"{mean(model, form, way, 1):.3f}" for way in WAYS)
            report.told(f"{data}_{form}_{model}", value, f"HR@{k} by {', '.join(WAYS)}; NDCG@{k} {more}")
    sizes = ", ".join(str(of[model][0]["parameters"]) for model in MODELS)
    report.told(f"{data}_parameters", sizes, ", ".join(MODELS))
    seconds = ", ".join(f"{statistics.mean(r['seconds'] for r in of[model]):.1f}" for model in MODELS)
    report.told(f"{data}_training_seconds", seconds, "of one core, with validation")
    draw(report, data, of, mean, k)


def draw(report: Report, data: str, of: dict, mean, k: int) -> None:
    """Bars of hit rates and curves of training."""
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(FORMS), figsize=(15, 3.6), sharey=True)
    shades = {"filter": 0.35, "product": 0.65, "geometric": 1.0}
    for axes, form in zip(panels, FORMS, strict=True):
        ways = WAYS if form != "u" else ("geometric",)
        for i, model in enumerate(MODELS):
            for j, way in enumerate(ways):
                values = [r["test"][form][way][0] for r in of[model]]
                x = i + (j - (len(ways) - 1) / 2) * 0.27
                axes.bar(x, mean(model, form, way), 0.25, color=COLORS[model], alpha=shades[way])
                axes.plot([x] * len(values), values, ".", color="black", markersize=3)
        axes.set_xticks(range(len(MODELS)), [LABELS[m].replace("matrix factorization", "MF") for m in MODELS])
        axes.tick_params(axis="x", labelrotation=30)
        axes.set_title(NAMES[form])
        axes.grid(axis="y", alpha=0.3)
    panels[0].set_ylabel(f"HR@{k}")
    figure.suptitle(f"{data}: pale filter, middle product, full geometric (dots: seeds)", y=1.03)
    report.plot(f"{data}_hits", figure)

    figure, axes = pyplot.subplots(figsize=(6, 3.8))
    for model in MODELS:
        epochs = [point[0] for point in of[model][0]["curve"]]
        for i, r in enumerate(of[model]):
            label = LABELS[model] if i == 0 else None
            axes.plot(epochs, [p[2] for p in r["curve"]], color=COLORS[model], marker=".", label=label)
    axes.set(xlabel="epoch", ylabel=f"validation HR@{k}", title=f"{data}: best of product and geometric")
    axes.grid(alpha=0.3)
    axes.legend()
    report.plot(f"{data}_training", figure)


def agreement(report: Report, size: dict) -> None:
    """The same 100 steps of training by the op and in plain torch."""
    run = Run("intervals", "boxes", 3, **GRID["boxes"][0], **size)
    [found] = report.map(same_curves, [run])
    op, eager = (found[name]["loss"] for name in ("op", "eager"))
    report.criterion(
        "curves_differ_by", max(abs(a - b) for a, b in zip(op, eager, strict=True)), at_most=1e-4
    )
    report.told("curves_loss", f"{op[0]:.4f} to {op[-1]:.4f}", "first and last of 100 steps")
    ratio = found["eager"]["seconds"] / found["op"]["seconds"]
    report.told("curves_eager_over_op", ratio, "time of 100 whole steps")


def same_curves(run: Run, tick) -> dict:
    """100 steps of a run in both ways."""
    found = curves(run, 100)
    tick(run.work)
    return found


def cost(report: Report) -> None:
    """Microseconds of one thread for the best 50 of u and a and b, in both kinds of models."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    count = 64
    for items in (2_000, 100_000) if report.mode == "full" else (2_000, 20_000):
        model = BoxRecommender(300, items, 64, 0.2, 1.0, generator=generator)
        users = torch.randint(300, (count, 3), generator=generator)
        queries = Queries(users[:, 0], users[:, 1:], users[:, :0])
        vectors = torch.randn(300, 128, generator=generator)
        of_items = torch.randn(items, 128, generator=generator)
        by_boxes = microseconds(lambda m=model, q=queries: m.recommend(q, 50), count)
        by_vectors = microseconds(
            lambda u=users, v=vectors, i=of_items: (v[u].sum(1) @ i.T).topk(50, 1), count
        )
        report.told(f"cost_boxes_{items}", by_boxes, "microseconds per query, one thread")
        report.told(f"cost_vectors_{items}", by_vectors, "microseconds per query, one thread")
        report.told(f"cost_ratio_{items}", by_boxes / by_vectors, "boxes over vectors")


def microseconds(call, queries: int, repeats: int = 5) -> float:
    """Least time of several calls, per query."""
    call()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return min(times) / queries * 1e6


def study(report: Report) -> None:
    """All parts."""
    quick = report.mode == "quick"
    size = QUICK if quick else FULL
    settings = {model: [of[0], of[1]] for model, of in GRID.items()} if quick else GRID
    report.settings.update(size=size, grid=settings, seeds=SEEDS[report.mode], tuning_seed=TUNING_SEED)
    table = torch.zeros(2, 4)
    index = torch.zeros(1, 1, dtype=torch.int64)
    pair = (table, table, table, table, index[0], index)
    report.told("backend", pyops.which("box_sampled", *pair, 0.2, 1.0, 0.0), "runs the sampled scores")
    agreement(report, size)
    cost(report)
    plane(report)
    chosen = choose(report, "intervals", size, settings)
    compare(report, "intervals", chosen, gated=True)
    if quick:
        return
    compare(report, "halfspaces", chosen, gated=False)  # of the same sizes, with the same settings
    if movielens_folder() is None:
        report.told("movielens", "left out", "pip install --no-deps recbole")
    else:
        compare(report, "movielens", choose(report, "movielens", size, settings), gated=False)


if __name__ == "__main__":
    sys.exit(main(__file__, study))
