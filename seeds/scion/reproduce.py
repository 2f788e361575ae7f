"""Scion at laptop scale: (a) against AdamW, (b) step sizes that carry over to other widths, (c) memory.

The criteria and how they were chosen are in README.md beside this file.
"""

import math
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))  # an installed pyops comes first

import memory
import torch
from training import Run, train

import pyops
from pyops.papers._text import text
from pyops.papers.scion import Transfer, transfer
from pyops.reproduce import Report, band, main

NAMES = {"scion": "Scion", "adamw": "AdamW"}
COLORS = {"scion": "tab:blue", "adamw": "tab:orange"}
SECOND = {"scion": ("alpha", (0.1, 0.3)), "adamw": ("init", ("fan_in", "gpt2"))}


@dataclass(frozen=True)
class Sizes:
    """What the three parts run over. `rates` are exponents of two, the grid of step sizes."""

    widths: tuple[int, ...]  # (b); (a) is run at the middle one
    steps: int
    context: int
    rates: dict[str, tuple[int, ...]]
    tuning_seeds: tuple[int, ...]
    fresh_seeds: tuple[int, ...]

    def run(self, optimizer: str, rate: int, width: int, seed: int, **others) -> Run:
        return Run(optimizer, rate, width, self.steps, seed, context=self.context, **others)


SIZES = {
    "full": Sizes(
        (64, 128, 256),
        160,
        128,
        {"scion": tuple(range(-8, -1)), "adamw": tuple(range(-10, -3))},
        (0,),
        (2, 3, 4, 5, 6),
    ),
    "quick": Sizes(
        (32, 64, 128), 80, 64, {"scion": tuple(range(-7, -2)), "adamw": tuple(range(-8, -3))}, (0,), (2, 3, 4)
    ),
}


def compare(report: Report, sizes: Sizes) -> dict[str, Run]:
    """(a) Each optimizer tuned on its whole grid, then both on fresh seeds. Returns the best settings."""
    width, seed = sizes.widths[1], sizes.tuning_seeds[0]
    grid = [
        sizes.run(name, rate, width, seed, **{option: value})
        for name, (option, values) in SECOND.items()
        for value in values
        for rate in sizes.rates[name]
    ]
    tuned = dict(zip(grid, report.map(train, grid), strict=True))
    best = {}
    for name, (option, values) in SECOND.items():
        candidates = {run: result["loss"] for run, result in tuned.items() if run.optimizer == name}
        best[name] = min(
            candidates, key=lambda run: candidates[run] if math.isfinite(candidates[run]) else math.inf
        )
        report.results[f"grid_{name}"] = {
            f"{option}={value}": {
                f"2^{run.log2_lr}": x for run, x in candidates.items() if getattr(run, option) == value
            }
            for value in values
        }
        rates = sizes.rates[name]
        inside = min(best[name].log2_lr - rates[0], rates[-1] - best[name].log2_lr)
        report.told(f"a_{name}_tuned", f"2^{best[name].log2_lr}", f"{option}={getattr(best[name], option)}")
        report.criterion(f"a_{name}_steps_from_grid_edge", inside, at_least=1)
    duel(report, {name: [replace(run, seed=s) for s in sizes.fresh_seeds] for name, run in best.items()})
    return best


def duel(report: Report, runs: dict[str, list[Run]]) -> None:
    """Trains both optimizers on the same seeds; criterion: Scion's loss is lower by two standard errors."""
    flat = [run for pair in zip(*runs.values(), strict=True) for run in pair]
    results = dict(zip(flat, report.map(train, flat), strict=True))
    losses = {name: [results[run]["loss"] for run in mine] for name, mine in runs.items()}
    report.results["duel"] = {
        name: [{"seed": run.seed, **results[run]} for run in mine] for name, mine in runs.items()
    }
    for name, values in losses.items():
        report.told(f"a_{name}_loss", statistics.mean(values), "nats/character, mean over seeds")
    gains = [theirs - ours for ours, theirs in zip(losses["scion"], losses["adamw"], strict=True)]
    margin = 2 * statistics.stdev(gains) / math.sqrt(len(gains)) if len(gains) > 1 else 0.0
    report.told("a_gain", statistics.mean(gains), "AdamW's loss minus Scion's, same batches")
    report.criterion("a_gain_minus_two_errors", statistics.mean(gains) - margin, at_least=0.0)
    curves = {name: [results[run]["curve"] for run in mine] for name, mine in runs.items()}
    mean = {
        name: [statistics.mean(y) for y in zip(*([p[1] for p in c] for c in curves[name]), strict=True)]
        for name in runs
    }
    characters = [point[0] for point in curves["scion"][0]]
    reached = [x for x, y in zip(characters, mean["scion"], strict=True) if y <= mean["adamw"][-1]]
    if reached:
        report.told(
            "a_share_of_characters", reached[0] / characters[-1], "at which Scion is at AdamW's last loss"
        )
    ratio = statistics.median(
        results[a]["step_ms"] / results[b]["step_ms"] for a, b in zip(*runs.values(), strict=True)
    )
    report.told("a_time_per_step", ratio, "Scion / AdamW, whole training step")

    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4))
    for name, of_seeds in curves.items():
        run = runs[name][0]
        label = f"{NAMES[name]}, step size $2^{{{run.log2_lr}}}$"
        band(axes, characters, [[p[1] for p in curve] for curve in of_seeds], label, COLORS[name])
    axes.set(
        xlabel="characters read", ylabel="validation loss, nats per character", title=f"width {run.width}"
    )
    axes.grid(alpha=0.3)
    axes.legend(title=f"mean of {len(gains)} seeds, one standard deviation" if len(gains) > 1 else None)
    report.plot("loss", figure)


def carry_over(report: Report, sizes: Sizes, best: dict[str, Run]) -> None:
    """(b) The same grid of step sizes at every width, each optimizer at the second setting that (a) chose."""
    studies: dict[str, Transfer] = {}
    tables = {}
    grid = [
        replace(best[name], width=width, log2_lr=rate, seed=seed)
        for seed in sizes.tuning_seeds
        for width in sorted(sizes.widths, reverse=True)  # the long runs first: the cores finish together
        for name, rates in sizes.rates.items()
        for rate in rates
    ]
    results = dict(zip(grid, report.map(train, grid), strict=True))
    for name, rates in sizes.rates.items():
        table = {
            width: [
                [
                    results[replace(best[name], width=width, log2_lr=rate, seed=s)]["loss"]
                    for s in sizes.tuning_seeds
                ]
                for rate in rates
            ]
            for width in sizes.widths
        }
        tables[name] = table
        study = transfer({width: [statistics.mean(x) for x in row] for width, row in table.items()})
        studies[name] = study
        report.results[f"transfer_{name}"] = {
            "rates": rates,
            "losses": table,
            "best": study.best,
            "regret": study.regret,
        }
        chosen = ", ".join(f"2^{rates[i]}" for i in study.best.values())
        report.told(f"b_{name}_best", chosen, f"at widths {', '.join(map(str, sizes.widths))}")
        report.told(f"b_{name}_regret", study.regret[max(sizes.widths)], "nats lost at the largest width")
    report.criterion("b_scion_shift", studies["scion"].shift, at_most=1)
    if report.mode == "full":
        report.criterion("b_adamw_shift", studies["adamw"].shift, at_least=2)
        for name, study in studies.items():
            report.criterion(f"b_{name}_interior", int(study.interior), at_least=1)
    else:
        report.told("b_adamw_shift", studies["adamw"].shift, "grid steps")

    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(9, 4), sharey=True)
    for axes, (name, table) in zip(panels, tables.items(), strict=True):
        for shade, (width, row) in zip((0.35, 0.65, 1.0), table.items(), strict=True):
            mean = [statistics.mean(x) for x in row]
            axes.plot(
                sizes.rates[name], mean, marker=".", color=COLORS[name], alpha=shade, label=f"width {width}"
            )
            axes.fill_between(
                sizes.rates[name], [min(x) for x in row], [max(x) for x in row], color=COLORS[name], alpha=0.2
            )
            i = studies[name].best[width]
            axes.plot(
                sizes.rates[name][i], mean[i], marker="o", markersize=9, fillstyle="none", color="black"
            )
        axes.set(xlabel="log2 of the step size", title=f"{NAMES[name]}; circles: best of each width")
        axes.grid(alpha=0.3)
        axes.legend()
    panels[0].set_ylabel("validation loss, nats per character")
    report.plot("transfer", figure)


def footprint(report: Report, sizes: Sizes, best: Run) -> None:
    """(c) Bytes kept between two steps, and that the light form, in either precision, trains as well."""
    with ThreadPoolExecutor(report.jobs) as pool:
        rows = pool.map(lambda kind: memory.measure(*kind), memory.KINDS)
        measured = dict(zip(memory.KINDS, rows, strict=True))
    report.results["memory"] = list(measured.values())
    for (kind, dtype), row in measured.items():
        report.told(f"c_{kind}_{dtype}", row["storage_bytes"] / row["parameters"], "bytes per parameter")

    def ratio(what: str, light: str, adamw: str) -> float:
        return measured["light", light][what] / measured["adamw", adamw][what]

    report.criterion("c_light_over_adamw", ratio("storage_bytes", "float32", "float32"), at_most=0.51)
    report.criterion("c_light_over_adamw_half", ratio("storage_bytes", "bfloat16", "bfloat16"), at_most=0.51)
    report.criterion("c_half_light_over_adamw", ratio("storage_bytes", "bfloat16", "float32"), at_most=0.26)
    report.criterion("c_light_over_adamw_rss", ratio("resident_bytes", "float32", "float32"), at_most=0.6)
    report.criterion(
        "c_half_light_over_adamw_rss", ratio("resident_bytes", "bfloat16", "float32"), at_most=0.35
    )

    plain = [replace(best, seed=seed) for seed in sizes.fresh_seeds[:2]]
    forms = {
        "plain": plain,
        "light": [replace(run, light=True) for run in plain],
        "half": [replace(run, light=True, dtype="bfloat16") for run in plain],
    }
    results = report.map(train, [run for runs in forms.values() for run in runs])
    losses = [
        statistics.mean(r["loss"] for r in results[i : i + len(plain)])
        for i in range(0, len(results), len(plain))
    ]
    report.results["light"] = dict(zip(forms, losses, strict=True))
    report.criterion("c_light_loss_difference", abs(losses[1] - losses[0]), at_most=0.01)
    report.criterion("c_half_light_loss_excess", losses[2] - losses[0], at_most=0.03)

    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.2))
    labels = [f"{kind} {dtype}" for kind, dtype in measured]
    heights = range(len(measured))
    for offset, what in ((-0.2, "storage_bytes"), (0.2, "resident_bytes")):
        values = [row[what] / row["parameters"] for row in measured.values()]
        axes.barh([y + offset for y in heights], values, 0.38, label=what.replace("_", " "))
    axes.set_yticks(heights, labels)
    axes.invert_yaxis()
    axes.set(xlabel="bytes per parameter between two steps")
    axes.legend()
    report.plot("memory", figure)


def study(report: Report) -> None:
    """All three parts, or for the demo the fresh seeds of (a), at the settings that its full grid found."""
    report.settings["text"] = text()["about"]
    report.told(
        "backend",
        pyops.which("polar", torch.zeros(64, 64), [], [], "auto", "bfloat16"),
        "runs the polar iteration",
    )
    if report.mode == "demo":
        duel(report, DEMO)
        return
    sizes = SIZES[report.mode]
    report.settings["sizes"] = vars(sizes) | {"second": SECOND}
    best = compare(report, sizes)
    carry_over(report, sizes, best)
    footprint(report, sizes, best["scion"])


FULL = SIZES["full"]
DEMO = {
    "scion": [FULL.run("scion", -5, FULL.widths[1], seed, alpha=0.1) for seed in FULL.fresh_seeds],
    "adamw": [FULL.run("adamw", -7, FULL.widths[1], seed, init="fan_in") for seed in FULL.fresh_seeds],
}

if __name__ == "__main__":
    sys.exit(main(__file__, study, demo=True))
