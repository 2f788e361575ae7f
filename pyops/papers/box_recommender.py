"""Set-theoretic recommendation: users and attributes are boxes, items are found by intersecting them.

Dasgupta, Boratko, McCallum, ICML 2025 (PMLR 267:12539-12553, arXiv 2502.10875).

A user is the set of the items that he likes, an attribute the set of those that have it. As boxes, with items
boxes too, P(set | item) = vol(set and item) / vol(item), and every query is a set again:

    user                         P(u | m)
    user and a1 and a2           P(u and a1 and a2 | m)
    user and a1 but not a2       P(u and a1 | m) - P(u and a1 and a2 | m)

This module holds the model and its joint loss, w L_user + (1 - w) L_attribute; the three ways to answer a
composed query, which need no boxes but any model of P(set | item) (`SetModel`); and hit rates and NDCG.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from pyops.boxes import Box, TopK, box_topk, pairwise_containment, sampled_scores
from pyops.losses import log1mexp
from pyops.nn import BoxEmbedding

WAYS = ("filter", "product", "geometric")


class Queries(NamedTuple):
    """Composed queries of one form: rows of the table of sets, users first and then attributes.

    users [B]; wanted [B, k] and unwanted [B, j]: the attributes, k and j may be 0. int64.
    """

    users: Tensor
    wanted: Tensor
    unwanted: Tensor

    def __len__(self) -> int:
        return len(self.users)

    def part(self, rows: slice | Tensor) -> Queries:
        """Some of the queries."""
        return Queries(*(t[rows] for t in self))


class SetModel(Protocol):
    """What the three ways need: log P(set | item) for one set, and a score of a whole query."""

    def log_probability(self, sets: Tensor) -> Tensor:
        """sets [B] -> log P(set | item), [B, items]."""

    def composed(self, queries: Queries) -> Tensor:
        """Scores [B, items] of what the model makes of the query as a whole."""


class BoxRecommender(nn.Module):
    """Gumbel boxes for sets (users, then attributes) and items, by their corners: 2 D numbers each.

    sets, items: how many; dim: D. The temperatures are those of :func:`pyops.boxes.pairwise_log_volume`, in
    the units of the corners. Boxes start with sides of about `set_side` and `item_side` around centres that
    are uniform in [-spread, spread].
    """

    def __init__(
        self,
        sets: int,
        items: int,
        dim: int = 64,
        intersection_temperature: float = 0.1,
        volume_temperature: float = 0.1,
        *,
        parameterization: str = "raw",
        set_side: float = 2.0,
        item_side: float = 0.4,
        spread: float = 0.5,
        generator: torch.Generator | None = None,
    ):
        super().__init__()
        self.temperatures: dict[str, Any] = {
            "intersection_temperature": intersection_temperature,
            "volume_temperature": volume_temperature,
        }

        def table(count: int, side: float) -> BoxEmbedding:
            def start(*shape: int, **options: Any) -> Box:
                centre = spread * (2 * torch.rand(shape, generator=generator) - 1)
                half = side / 2 * (0.75 + 0.5 * torch.rand(shape, generator=generator))
                return Box(centre - half, centre + half)

            return BoxEmbedding(count, dim, parameterization, initializer=start)

        self.sets, self.items = table(sets, set_side), table(items, item_side)

    def pairs(self, sets: Tensor, items: Tensor) -> Tensor:
        """log P(set | item) of chosen pairs, sets [B] and items [B, S]: [B, S], with gradients."""
        return sampled_scores(self.sets.boxes, self.items.boxes, sets, items, **self.temperatures)

    def penalty(self, sets: Tensor, items: Tensor) -> Tensor:
        """Mean squared norm of the corners that a batch uses, sets [B] and items [B]."""
        corners = (*self.sets(sets), *self.items(items))
        return torch.stack([t.square().sum(-1).mean() for t in corners]).sum()

    def log_probability(self, sets: Tensor) -> Tensor:
        """log P(set | item), [B, items]."""
        return pairwise_containment(self.sets(sets), self.items.boxes, **self.temperatures)

    def _boxes(self, queries: Queries) -> tuple[list[Box], list[Box]]:
        wanted = [self.sets(rows) for rows in (queries.users, *queries.wanted.unbind(1))]
        return wanted, [self.sets(rows) for rows in queries.unwanted.unbind(1)]

    def composed(self, queries: Queries) -> Tensor:
        """log P(query | item) of the intersection of all boxes of the query, [B, items]."""
        wanted, unwanted = self._boxes(queries)
        return pairwise_containment(wanted, self.items.boxes, without=unwanted, **self.temperatures)

    @torch.no_grad()
    def recommend(self, queries: Queries, k: int) -> TopK:
        """The k best items of each query by `composed`, without the matrix of all scores."""
        wanted, unwanted = self._boxes(queries)
        return box_topk(wanted, self.items.boxes, k, without=unwanted, **self.temperatures)


# The loss


def joint_loss(losses: Tensor, attribute: Tensor, w: float) -> Tensor:
    """w L_user + (1 - w) L_attribute, each the mean over its pairs; a part without pairs is 0.

    losses [B]: of observed pairs with their negatives, as by :func:`pyops.losses.noise_contrastive` with
    reduction="none"; attribute [B], bool: whose they are.
    """
    users, attributes = (
        (losses * mask).sum() / mask.sum().clamp(min=1) for mask in (attribute.logical_not(), attribute)
    )
    return w * users + (1 - w) * attributes


# Answers


@torch.no_grad()
def answer(model: SetModel, queries: Queries, way: str, threshold: float = 0.5) -> Tensor:
    """Scores [B, items] of composed queries, higher is better.

    filter      by P(u | m); items behind all others where P(a | m) < threshold for a wanted attribute, or
                not for an unwanted one
    product     P(u | m) prod P(a | m) prod (1 - P(b | m))
    geometric   of the query as one set, `SetModel.composed`
    """
    if way not in WAYS:
        raise ValueError(f"way must be one of {', '.join(WAYS)}, got {way!r}")
    if way == "geometric":
        return model.composed(queries)
    score = model.log_probability(queries.users).double()
    wanted = [model.log_probability(rows).double() for rows in queries.wanted.unbind(1)]
    unwanted = [model.log_probability(rows).double() for rows in queries.unwanted.unbind(1)]
    if way == "product":
        for log_p in wanted:
            score = score + log_p
        for log_p in unwanted:
            score = score + log1mexp(log_p)
        return score
    if not 0 < threshold < 1:
        raise ValueError(f"threshold must be in (0, 1), got {threshold}")
    passes = torch.ones_like(score, dtype=torch.bool)
    for log_p in wanted:
        passes &= log_p >= math.log(threshold)
    for log_p in unwanted:
        passes &= log_p < math.log(threshold)
    return score - 1e6 * passes.logical_not()


# Evaluation


def ranks(scores: Tensor, relevant: Tensor, excluded: Tensor) -> tuple[Tensor, Tensor]:
    """Where each relevant item stands among the items that are neither relevant nor excluded, from 1.

    scores [B, N]; relevant, excluded [B, N], bool, disjoint. Ties count half, NaN as lowest. Returns the
    query of each relevant item [R] and its rank [R], float64.
    """
    scores = scores.double().nan_to_num(nan=-1e300, neginf=-1e300)
    others = scores.masked_fill(relevant | excluded, -math.inf).sort(1).values
    query, item = relevant.nonzero(as_tuple=True)
    rank = torch.empty(len(query), dtype=torch.float64)
    sizes = relevant.sum(1).tolist()
    start = 0
    for row, size in enumerate(sizes):  # one search per query: their numbers of relevant items differ
        mine = scores[row, item[start : start + size]].contiguous()
        below = torch.searchsorted(others[row], mine)
        above = scores.shape[1] - torch.searchsorted(others[row], mine, right=True)
        ties = scores.shape[1] - above - below
        rank[start : start + size] = 1 + above + ties / 2
        start += size
    return query, rank


class Quality(NamedTuple):
    """Means over queries of the means over each one's relevant items, ranked one at a time."""

    hit_rate: float
    ndcg: float


def quality(scores: Tensor, relevant: Tensor, excluded: Tensor, k: int) -> Quality:
    """HR@k, the share of relevant items with rank <= k, and NDCG@k, 1 / log2(1 + rank) there and 0 beyond.

    Arguments as of `ranks`. Queries without relevant items do not count; if none has any, NaN.
    """
    query, rank = ranks(scores, relevant, excluded)
    hit = (rank <= k).double()
    count = relevant.sum(1).double()
    has = count > 0
    means = [
        torch.zeros(len(scores), dtype=torch.float64).index_add_(0, query, value)[has] / count[has]
        for value in (hit, hit / torch.log2(1 + rank))
    ]
    return Quality(*(mean.mean().item() for mean in means))
