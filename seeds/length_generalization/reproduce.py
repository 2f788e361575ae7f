"""Length generalization at laptop scale: (a) losses far beyond the training length, before and after each
intervention, (b) the norms of states, (c) effective remembrance, (d) a passkey far back.

The criteria and how they were chosen are in README.md beside this file.
"""

import statistics
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))  # an installed pyops comes first

import torch
from training import TOKENS, Run, study

import pyops
from pyops.papers._text import words
from pyops.reproduce import Report, band, main

LABELS = {
    "base": "trained model",
    "none": "more training",
    "random_noise": "random noise",
    "fitted_noise": "fitted noise",
    "state_passing": "state passing",
    "truncated_bptt": "truncated BPTT",
}
COLORS = dict(
    zip(LABELS, ("black", "tab:gray", "tab:red", "tab:orange", "tab:blue", "tab:green"), strict=True)
)
SIZES = {
    "full": [Run(seed) for seed in range(40, 46)],
    "quick": [
        Run(seed, steps=900, post_steps=90, tune_steps=1000, passkeys=("none",), texts=8) for seed in (20, 21)
    ],
}


def mean(results: list[dict], name: str, what: str) -> list[float]:
    """Mean over the seeds of one model's list of values."""
    return [statistics.mean(x) for x in zip(*(r[name][what] for r in results), strict=True)]


def losses(report: Report, run: Run, results: list[dict]) -> None:
    """(a) What the past beyond T costs, at the far end of the texts."""
    excess = {name: mean(results, name, "excess")[-1] for name in LABELS}
    report.told("a_loss_at_training_length", mean(results, "base", "loss")[0], "nats/token, trained model")
    report.criterion("a_base_excess", excess["base"], at_least=0.05)
    report.criterion("a_none_excess", excess["none"], at_least=0.05)
    report.criterion("a_random_noise_excess", excess["random_noise"], at_least=0.05)
    report.told("a_fitted_noise_excess", excess["fitted_noise"], "nats/token")
    report.criterion("a_state_passing_excess", excess["state_passing"], at_most=0.02)
    report.criterion("a_truncated_bptt_excess", excess["truncated_bptt"], at_most=0.02)
    for name in ("random_noise", "fitted_noise", "state_passing", "truncated_bptt"):
        cost = mean(results, name, "loss")[0] - mean(results, "none", "loss")[0]
        report.told(f"a_{name}_cost_within_T", cost, "nats/token, loss at T against more training")

    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(11, 4.2))
    for name, label in LABELS.items():
        for axes, what in zip(panels, ("loss", "excess"), strict=True):
            band(axes, run.lengths, [r[name][what] for r in results], label, COLORS[name])
    panels[0].set(ylabel="nats per token", title="loss")
    panels[1].set(ylabel="nats per token", title="loss, minus that from the last T/2 to T tokens alone")
    for axes in panels:
        axes.axvline(run.context, color="black", linestyle=":", linewidth=1)
        axes.set_xscale("log", base=2)
        axes.set_xlabel("position (dotted: training length T)")
        axes.grid(alpha=0.3)
    panels[1].legend(title=f"{len(results)} seeds, one standard deviation")
    report.plot("loss", figure)


def norms(report: Report, run: Run, results: list[dict]) -> None:
    """(b) How much the states grow beyond T: geometric mean over layers, heads and seeds."""
    curves = {
        name: [
            [
                statistics.geometric_mean(
                    now / start
                    for layer, first in zip(at, r[name]["norms"][0], strict=True)
                    for now, start in zip(layer, first, strict=True)
                )
                for at in r[name]["norms"]
            ]
            for r in results
        ]
        for name in LABELS
    }
    for name in LABELS:
        grown = statistics.geometric_mean(curve[-1] for curve in curves[name])
        report.told(f"b_{name}_growth", grown, f"norm of states at {run.reach} T against T")

    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4.2))
    for name, of_seeds in curves.items():
        band(axes, run.lengths, of_seeds, LABELS[name], COLORS[name])
    axes.set_xscale("log", base=2)
    axes.set(
        xlabel="position",
        ylabel="norm of states, relative to that at T",
        title="growth of states, geometric mean over layers and heads",
    )
    axes.grid(alpha=0.3)
    axes.legend()
    report.plot("norms", figure)


def remembrance(report: Report, run: Run, results: list[dict]) -> None:
    """(c) How far the prediction depends on the first tokens of a text, all later ones being there."""
    length = run.remembered
    half = run.starts.index(length // 2)
    for name in LABELS:
        value = mean(results, name, "remembrance")[half]
        report.told(f"c_{name}_remembrance", value, f"of the first {length // 2} of {length} tokens")
    ratio = mean(results, "base", "remembrance")[half] / mean(results, "state_passing", "remembrance")[half]
    if report.mode == "full":
        report.criterion("c_base_over_state_passing", ratio, at_least=1.5)
    else:
        report.told("c_base_over_state_passing", ratio, "ratio of the two")

    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4.2))
    for name in LABELS:
        kept = [length - t for t in run.starts]
        band(axes, kept, [r[name]["remembrance"] for r in results], LABELS[name], COLORS[name])
    axes.axvline(run.context, color="black", linestyle=":", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set(
        xlabel="latest tokens kept (dotted: training length)",
        ylabel="total variation distance",
        title=f"effective remembrance of the tokens before, text of {length}",
    )
    axes.grid(alpha=0.3)
    axes.legend()
    report.plot("remembrance", figure)


def passkeys(report: Report, run: Run, results: list[dict]) -> None:
    """(d) Recall of five digits, noted within T of the question after a long text, or anywhere in it."""
    near = {name: mean(results, name, "near") for name in run.passkeys}
    far = {name: mean(results, name, "far") for name in run.passkeys}
    report.criterion("d_none_recall_at_T", near["none"][0], at_least=0.9)
    report.criterion("d_none_recall", near["none"][-1], at_most=0.2)
    if "fitted_noise" in near:
        report.criterion("d_fitted_noise_recall", near["fitted_noise"][-1], at_least=0.8)
    for name in run.passkeys:
        if name not in ("none", "fitted_noise"):
            report.told(f"d_{name}_recall", near[name][-1], f"after {run.reach} T, note within T")
    for name in run.passkeys:
        kept = near[name][-1] / near[name][0] if near[name][0] else 0.0
        report.told(f"d_{name}_kept", kept, f"of the recall at T, after {run.reach} T")
        report.told(f"d_{name}_recall_anywhere", far[name][2], "in 4 T, note anywhere")

    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True)
    titles = {"near": "passkey within T of the question", "far": "passkey anywhere in the text"}
    for axes, (what, title) in zip(panels, titles.items(), strict=True):
        for name in run.passkeys:
            label = "zero states" if name == "none" else LABELS[name]
            band(axes, run.lengths, [r[name][what] for r in results], label, COLORS[name])
        axes.set_xscale("log", base=2)
        axes.set(xlabel="length of the text", title=title, ylim=(-0.03, 1.03))
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("share of texts with all digits right")
    panels[0].legend()
    report.plot("passkey", figure)


def whole(report: Report) -> None:
    """All parts, on one set of models."""
    runs = SIZES[report.mode]
    report.settings["text"] = words(TOKENS)["about"]
    report.settings["runs"] = [vars(run) for run in runs]
    nothing = [torch.zeros(1, 1, 1, 1)] * 3 + [None] * 4
    report.told("backend", pyops.which("linear_attention", *nothing, 1.0, 0), "runs the recurrence")
    results = report.map(study, runs)
    report.results["seeds"] = [
        {"seed": run.seed, **result} for run, result in zip(runs, results, strict=True)
    ]
    models = [result["models"] for result in results]
    losses(report, runs[0], models)
    norms(report, runs[0], models)
    remembrance(report, runs[0], models)
    passkeys(report, runs[0], [result["passkey"] for result in results])


if __name__ == "__main__":
    sys.exit(main(__file__, whole))
