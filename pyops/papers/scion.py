"""Scion: training with linear minimisation oracles over norm balls, as a method for a small GPT.

Pethick, Xie, Antonakopoulos, Zhu, Silveti-Falls, Cevher, "Training Deep Learning Models with
Norm-Constrained LMOs", ICML 2025 (arXiv 2502.07529).

Every layer l has a norm and a radius rho_l. With the momentum average d of its gradients, one step is

    d <- (1 - alpha) d + alpha g
    W <- (1 - gamma) W + gamma rho_l lmo_l(d)      constrained (the step size is the weight decay)
    W <-             W + gamma rho_l lmo_l(d)      unconstrained

where lmo_l(d) = argmin <d, X> over the unit ball of the layer's norm. The optimizer, `pyops.optim.Scion`,
does that; this module says which norm and radius each layer of a GPT gets, how the weights start on
their balls, and how to read whether a step size carries over from one width to another.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pyops.optim import Scion


class ScaledGELU(nn.Module):
    """sqrt(2) * gelu(x): keeps the root mean square of a unit-RMS input near one, elementwise."""

    def forward(self, x: Tensor) -> Tensor:
        return math.sqrt(2) * F.gelu(x)


def rms_norm(x: Tensor) -> Tensor:
    """x / RMS(x) over the last dimension, without a gain: nothing here needs a norm ball of its own."""
    return F.rms_norm(x, x.shape[-1:])


def rotate(x: Tensor) -> Tensor:
    """Rotary positions for x [batch, heads, time, head_dim]: no position table, hence no extra parameter."""
    time, half = x.shape[-2], x.shape[-1] // 2
    frequency = 10000.0 ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angle = torch.outer(torch.arange(time, device=x.device, dtype=torch.float32), frequency)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


class Block(nn.Module):
    """Pre-norm attention and MLP. Query and key are normalised, so attention ignores their radius."""

    def __init__(self, width: int, head_dim: int):
        super().__init__()
        self.head_dim = head_dim
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.mix = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width, bias=False), ScaledGELU(), nn.Linear(4 * width, width, bias=False)
        )

    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = rms_norm(x)
        q, k = (rotate(rms_norm(self.heads(project(h)))) for project in (self.query, self.key))
        y = F.scaled_dot_product_attention(q, k, self.heads(self.value(h)), is_causal=True)
        x = x + self.mix(y.transpose(1, 2).flatten(2))
        return x + self.mlp(rms_norm(x))


class GPT(nn.Module):
    """A nanoGPT-style decoder: RMSNorm without gains, sqrt(2)-scaled GELU, rotary positions, untied head.

    tokens [batch, time] int64 -> logits [batch, time, vocabulary]. `head_dim` stays fixed while `width`
    grows (more heads, not larger ones), so that width is the only thing that changes in a transfer study.
    Raises ValueError if head_dim is odd or does not divide width.
    """

    def __init__(self, vocabulary: int, width: int, depth: int = 2, head_dim: int = 32):
        super().__init__()
        if head_dim % 2 or width % head_dim:
            raise ValueError(f"head_dim must be even and divide width {width}, got {head_dim}")
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.Sequential(*(Block(width, head_dim) for _ in range(depth)))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(rms_norm(self.blocks(rms_norm(self.embedding(tokens)))))


def scion(
    model: nn.Module,
    lr: float,
    *,
    alpha: float = 0.1,
    embedding: float = 1.0,
    hidden: float = 3.0,
    head: float = 10.0,
    first: str = "col",
    **settings: Any,
) -> Scion:
    """Puts a model's weights on their balls and returns the constrained optimizer that keeps them inside.

    | layer | norm, d_out x d_in | unit direction u = -lmo(g) |
    |---|---|---|
    | embedding (one-hot input), first="col" | 1 -> RMS | column j: sqrt(d_out) g_j / ||g_j||_2 |
    | embedding, first="sign" | 1 -> inf | sign(g) / d_in |
    | linear layers | RMS -> RMS | sqrt(d_out/d_in) U V^T |
    | head | 1 -> inf | sign(g) / d_in |

    The sizes of a layer are in its direction and not in the step size or the radius: that is why those two
    are expected to carry over from one width to another.

    Args:
        model: whose weights are drawn anew from torch's global generator. Layers are told apart by module
            types, see `pyops.optim.Scion.auto_groups`.
        lr: step size gamma in [0, 1]; also the weight decay. alpha: weight of the newest gradient, in (0, 1].
        embedding, hidden, head: radii; the defaults are those of the paper's code for a shallow GPT.
        first: norm of the embedding, "col" or "sign" or another of `pyops.lmo`.
        settings: further arguments of `pyops.optim.Scion`, such as `light=True`.

    Raises what `pyops.optim.Scion` raises for wrong settings.
    """
    groups = Scion.auto_groups(model, input=embedding, hidden=hidden, output=head, input_norm=first)
    optimizer = Scion(groups, lr, alpha=alpha, **settings)
    optimizer.init_()
    return optimizer


@dataclass(frozen=True)
class Transfer:
    """How the best step size moves with width, on one grid of step sizes for all widths.

    best: width -> index on the grid of the lowest loss. shift: the largest distance in grid steps from the
    smallest width's best to another width's. regret: width -> what is lost there by keeping the smallest
    width's best. interior: whether every width's best lies inside the grid, without which nothing is known.
    """

    best: dict[int, int]
    shift: int
    regret: dict[int, float]
    interior: bool


def transfer(losses: Mapping[int, Sequence[float]]) -> Transfer:
    """Reads a transfer study: losses[width][i] is the loss with the i-th step size; NaN counts as infinite.

    >>> transfer({64: [3.0, 2.0, 2.5, 9.0], 128: [2.5, 1.9, 1.75, 2.0]})
    Transfer(best={64: 1, 128: 2}, shift=1, regret={64: 0.0, 128: 0.1499999999999999}, interior=True)
    """
    finite = {w: [x if math.isfinite(x) else math.inf for x in row] for w, row in losses.items()}
    best = {w: min(range(len(row)), key=row.__getitem__) for w, row in finite.items()}
    kept = best[min(best)]
    return Transfer(
        best=best,
        shift=max(abs(i - kept) for i in best.values()),
        regret={w: row[kept] - row[best[w]] for w, row in finite.items()},
        interior=all(0 < i < len(finite[w]) - 1 for w, i in best.items()),
    )
