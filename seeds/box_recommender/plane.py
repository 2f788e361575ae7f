"""Boxes in two dimensions: five overlapping sets of items, learned from their members."""

from dataclasses import dataclass

import torch

from pyops.losses import bce_with_log_probs
from pyops.papers.box_recommender import BoxRecommender
from pyops.reproduce import Report

SIDE = 0.1  # of items
COLORS = ("tab:blue", "tab:orange", "tab:green", "tab:red", "tab:purple")


@dataclass(frozen=True)
class Plane:
    """Five sets of items that are points of the unit square; memberships are shown, the points are not."""

    seed: int = 0
    items: int = 120
    starts: int = 6
    steps: int = 1000
    warm: float = 0.3
    cold: float = 0.02
    work: float = 30.0


TRUE = torch.tensor(  # left, bottom, right, top
    [
        [0.05, 0.05, 0.55, 0.60],
        [0.40, 0.05, 0.95, 0.45],
        [0.30, 0.35, 0.75, 0.95],
        [0.55, 0.50, 0.95, 0.90],
        [0.05, 0.70, 0.50, 0.95],
    ]
)


def learn(run: Plane, tick) -> dict:
    """The best of some random starts by training loss."""
    g = torch.Generator().manual_seed(run.seed)
    points = torch.rand(run.items, 2, generator=g)
    member = ((points >= TRUE[:, None, :2]) & (points <= TRUE[:, None, 2:])).all(-1)
    everything = torch.arange(len(TRUE)), torch.arange(run.items).expand(len(TRUE), -1)
    best = None
    for _ in range(run.starts):
        model = BoxRecommender(len(TRUE), run.items, 2, set_side=0.6, item_side=SIDE, generator=g)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for step in range(run.steps):
            done = step / run.steps
            optimizer.param_groups[0]["lr"] = 0.02 * (1 - done)
            # Warm boxes overlap all others, so that none is stuck behind another; cold ones have edges.
            temperature = run.warm * (run.cold / run.warm) ** done
            model.temperatures = dict.fromkeys(model.temperatures, temperature)
            log_p = model.pairs(*everything)
            loss = bce_with_log_probs(log_p, member)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                # Items keep their side, so that they can be told from a picture: nearly points.
                centre = model.items.boxes.centre
                model.items.weight.copy_(torch.cat([centre - SIDE / 2, centre + SIDE / 2], 1))
        tick(run.work / run.starts, "plane", f"{loss.item():.3f}")
        if best is None or loss.item() < best[0]:
            best = loss.item(), model
    loss, model = best
    with torch.no_grad():
        right = (model.log_probability(everything[0]).exp() > 0.5) == member
        corners = [torch.cat(tuple(box), 1).tolist() for box in (model.sets.boxes, model.items.boxes)]
    return {
        "loss": loss,
        "right": right.double().mean().item(),
        "points": points.tolist(),
        "member": member.tolist(),
        "sets": corners[0],
        "items": corners[1],
    }


def plane(report: Report) -> None:
    """The picture: the sets as they are, and the boxes that were learned from memberships alone."""
    run = Plane(starts=2, steps=500) if report.mode == "quick" else Plane()
    [found] = report.map(learn, [run])
    report.results["plane"] = found
    report.told("plane_right", found["right"], f"of memberships, P > 1/2; best of {run.starts} starts")

    from matplotlib import patches, pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(12, 5.6))
    centres = [((i[0] + i[2]) / 2, (i[1] + i[3]) / 2) for i in found["items"]]
    shown = (
        ("the sets, as they are", TRUE.tolist(), found["points"]),
        ("learned boxes", found["sets"], centres),
    )
    for axes, (title, sets, where) in zip(panels, shown, strict=True):
        for (x, y, right, top), color in zip(sets, COLORS, strict=True):
            box = {"linewidth": 2, "edgecolor": color, "facecolor": color}
            axes.add_patch(patches.Rectangle((x, y), right - x, top - y, alpha=0.12, **box))
            axes.add_patch(patches.Rectangle((x, y), right - x, top - y, **{**box, "facecolor": "none"}))
        for i, (x, y) in enumerate(where):
            of = [color for color, row in zip(COLORS, found["member"], strict=True) if row[i]]
            if axes is panels[1]:
                left, bottom, right, top = found["items"][i]
                outline = patches.Rectangle(
                    (left, bottom), right - left, top - bottom, fill=False, color="gray", alpha=0.35
                )
                axes.add_patch(outline)
            if not of:
                axes.plot(x, y, ".", color="gray", markersize=6)
            for j, color in enumerate(of):  # a wedge for each set that has the item
                wedge = {"marker": (pie(j, len(of))), "markersize": 9, "color": color}
                axes.plot(x, y, markeredgewidth=0, **wedge)
        axes.set_title(title)
        axes.set_aspect("equal", adjustable="datalim")
        axes.autoscale_view()
    panels[1].set_xlabel("items: grey outlines; colours of a dot: the sets that have the item")
    report.plot("plane", figure)


def pie(part: int, parts: int):
    """A wedge as a marker."""
    from matplotlib.path import Path

    if parts == 1:
        return Path.unit_circle()
    wedge = Path.wedge(360 * part / parts, 360 * (part + 1) / parts)
    return Path(wedge.vertices, wedge.codes)
