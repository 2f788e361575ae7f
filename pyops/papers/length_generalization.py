"""Length generalization: recurrent models that keep working far beyond the length they were trained on.

Buitrago Ruiz, Gu, "Understanding and Improving Length Generalization in Recurrent Models", ICML 2025
(arXiv 2507.02782).

A recurrent model carries a state, h_t = f(h_{t-1}, x_t), and predicts from it, y_t = g(h_t, x_t). Trained
from h_{-1} = 0 on T tokens it sees the states of the first T steps alone, and may fail on those that come
later: the unexplored states hypothesis. The remedy is a short post-training from other initial states:

    random noise    h_{-1} ~ N(0, sigma^2), one sigma for all layers and heads      `RandomNoise`
    fitted noise    h_{-1} ~ N(m, s^2), m and s of each layer and head's h_{T-1}    `FittedNoise`
    state passing   h_{-1} = h_{T-1} of the last batch, unrelated texts             `StatePassing`
    truncated BPTT  h_{-1} = h_{T-1} of the same text's last T tokens               `TruncatedBPTT`

An intervention gives the states to start a batch from and is shown those that the batch ended in:

    states = intervention.initial(model.zero_states(len(tokens)), fresh)
    logits, states = model(tokens, states)
    intervention.observe(states)

No gradient passes from a batch to the one before. This module holds the interventions, the statistics of
states they need, the paper's effective remembrance, losses by position, and a small language model on the
layers of `pyops.nn`.
"""

import math
from collections.abc import Callable, Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pyops.nn import GatedLinearAttention, LayerState
from pyops.nn.layer import RecurrentLayer

States = list[LayerState]  # one per layer


class Block(nn.Module):
    """Pre-norm recurrent layer and MLP; without gains, like the norms of the model around it."""

    def __init__(self, width: int, mixer: Callable[[int], RecurrentLayer]):
        super().__init__()
        self.mixer = mixer(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width, bias=False), nn.GELU(), nn.Linear(4 * width, width, bias=False)
        )

    def forward(
        self, x: Tensor, state: LayerState | None, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, LayerState]:
        y, state = self.mixer(F.rms_norm(x, x.shape[-1:]), state, cu_seqlens)
        x = x + y
        return x + self.mlp(F.rms_norm(x, x.shape[-1:])), state


class RecurrentLM(nn.Module):
    """A language model without positions: whatever it knows of the past is in its states.

    tokens [B, T] int64, states (None: zeros) -> logits [B, T, vocabulary], the states after the last token.
    With cu_seqlens [N + 1], tokens [1, T] are N sequences one after another, with a state each.
    `mixer(width)` makes the recurrent layer, any of `pyops.nn`.
    """

    def __init__(
        self,
        vocabulary: int,
        width: int,
        depth: int = 2,
        mixer: Callable[[int], RecurrentLayer] = GatedLinearAttention,
    ):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, mixer) for _ in range(depth))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(
        self, tokens: Tensor, states: States | None = None, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, States]:
        x, states = self.features(tokens, states, cu_seqlens)
        return self.head(x), states

    def features(
        self, tokens: Tensor, states: States | None = None, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, States]:
        """The same before the head: [B, T, width]."""
        x, after = self.embedding(tokens), []
        for i, block in enumerate(self.blocks):
            x, state = block(x, None if states is None else states[i], cu_seqlens)
            after.append(state)
        return F.rms_norm(x, x.shape[-1:]), after

    def last_logits(self, tokens: Tensor, cu_seqlens: Tensor) -> Tensor:
        """Logits [N, vocabulary] after the last token of each of the N sequences in tokens [1, T]."""
        x, _ = self.features(tokens, None, cu_seqlens)
        return self.head(x[0, cu_seqlens[1:] - 1])

    def zero_states(self, count: int) -> States:
        """The states before the first token of `count` sequences."""
        return [cast(Block, block).mixer.zero_state(count) for block in self.blocks]


# Statistics of states


@torch.no_grad()
def state_norms(states: States) -> Tensor:
    """Frobenius norm of every state: [layers, sequences, heads]."""
    return torch.stack([state.recurrent.flatten(2).norm(dim=-1) for state in states])


class StateStatistics:
    """Mean and standard deviation of the entries of states, per layer and head.

    Taken over sequences and entries, and over the batches shown so far, of which each counts for the share
    `forget` when it is new (the first ones as much as there are of them: the plain average).
    """

    def __init__(self, forget: float = 0.05):
        if not 0 < forget <= 1:
            raise ValueError(f"forget must be in (0, 1], got {forget}")
        self.forget = forget
        self.batches = 0
        self.moments = torch.empty(0)  # [2, layers, heads], float64: of x and of x^2

    @torch.no_grad()
    def update(self, states: States) -> None:
        """Takes the states of one batch into account."""
        entries = [state.recurrent.double().transpose(0, 1).flatten(1) for state in states]
        new = torch.stack(
            [torch.stack([x.mean(1) for x in entries]), torch.stack([x.square().mean(1) for x in entries])]
        )
        self.batches += 1
        share = max(self.forget, 1 / self.batches)
        self.moments = new if self.batches == 1 else torch.lerp(self.moments, new, share)

    def _seen(self) -> Tensor:
        if not self.batches:
            raise RuntimeError("no states were seen yet: update() comes first")
        return self.moments

    @property
    def mean(self) -> Tensor:
        """[layers, heads], float64."""
        return self._seen()[0]

    @property
    def std(self) -> Tensor:
        """[layers, heads], float64."""
        mean, square = self._seen()
        return (square - mean.square()).clamp_min(0).sqrt()

    @property
    def rms(self) -> float:
        """Root mean square over all layers and heads: the sigma of a random noise of the states' size."""
        return math.sqrt(self._seen()[1].mean().item())


# Interventions


class Intervention:
    """The paper's baseline, and the base of the others: every batch starts from zero states."""

    def initial(self, zero: States, fresh: Tensor | None = None) -> States:
        """The states to start the next batch from.

        zero: the zero states of that batch. fresh [sequences], bool: sequences that are not the continuation
        of what the last batch had in their place; None is all of them. Only `TruncatedBPTT` asks for it.
        """
        return zero

    def observe(self, final: States) -> None:
        """Takes note of the states a batch ended in."""


class RandomNoise(Intervention):
    """h_{-1} ~ N(0, sigma^2), independent, with one sigma for all layers and heads.

    Convolutions, here and in `FittedNoise`, start from zeros: they forget within a few tokens anyway.
    """

    def __init__(self, sigma: float, generator: torch.Generator | None = None):
        self.sigma, self.generator = sigma, generator

    def initial(self, zero: States, fresh: Tensor | None = None) -> States:
        return [z._replace(recurrent=self.sigma * _normal(z.recurrent, self.generator)) for z in zero]


class FittedNoise(Intervention):
    """h_{-1} ~ N(m, s^2), independent, with mean and deviation of each layer and head's final states.

    `statistics` are those of the states observed so far, in this training or before; until there are any,
    h_{-1} is 0.
    """

    def __init__(self, statistics: StateStatistics | None = None, generator: torch.Generator | None = None):
        self.statistics, self.generator = statistics or StateStatistics(), generator

    def initial(self, zero: States, fresh: Tensor | None = None) -> States:
        if not self.statistics.batches:
            return zero
        return [
            z._replace(
                recurrent=(
                    mean[:, None, None] + std[:, None, None] * _normal(z.recurrent, self.generator)
                ).to(z.recurrent.dtype)
            )
            for z, mean, std in zip(zero, self.statistics.mean, self.statistics.std, strict=True)
        ]

    def observe(self, final: States) -> None:
        self.statistics.update(final)


class StatePassing(Intervention):
    """h_{-1} = the final state of the sequence that had this place in the last batch; 0 in the first one."""

    def __init__(self) -> None:
        self.final: States | None = None

    def initial(self, zero: States, fresh: Tensor | None = None) -> States:
        return zero if self.final is None else self.final

    def observe(self, final: States) -> None:
        self.final = [state.detach() for state in final]


class TruncatedBPTT(StatePassing):
    """State passing along each text: the batches continue one another, but for the sequences in `fresh`."""

    def initial(self, zero: States, fresh: Tensor | None = None) -> States:
        if self.final is None or fresh is None:
            return zero
        return [
            LayerState(
                _where(fresh, z.recurrent, last.recurrent),
                tuple(_where(fresh, *pair) for pair in zip(z.conv, last.conv, strict=True)),
            )
            for z, last in zip(zero, self.final, strict=True)
        ]


def _normal(like: Tensor, generator: torch.Generator | None) -> Tensor:
    return torch.randn(like.shape, dtype=like.dtype, device=like.device, generator=generator)


def _where(fresh: Tensor, zero: Tensor, last: Tensor) -> Tensor:
    return torch.where(fresh.view(-1, *[1] * (zero.ndim - 1)), zero, last)


# What is measured


def total_variation(p: Tensor, q: Tensor) -> Tensor:
    """Half the sum of |p - q| over the last dimension: the distance of two distributions, in [0, 1]."""
    return (p - q).abs().sum(-1) / 2


@torch.no_grad()
def effective_remembrance(
    last_logits: Callable[[Tensor, Tensor], Tensor], tokens: Tensor, starts: Sequence[int]
) -> Tensor:
    """How much the first t tokens of a text of T change the prediction of the one after the text.

        EffRem_T(t) = d(q(. | x[0:T]), q(. | x[t:T])),    d the total variation distance

    It is 0 where the first t tokens do not matter. A model that generalizes forgets them gradually; one that
    fails depends on them although thousands of later tokens are there.

    All suffixes of all texts are sequences of one call, which lays sum(T - t) tokens in a row.

    Args:
        last_logits: (tokens [1, L], cu_seqlens [N + 1]) -> logits [N, vocabulary] after the last token of
            each sequence, for instance `RecurrentLM.last_logits`.
        tokens: [texts, T].
        starts: the values of t, each in 0 <= t < T.

    Returns EffRem_T(t), [texts, len(starts)].
    """
    texts, length = tokens.shape
    if not starts or min(starts) < 0 or max(starts) >= length:
        raise ValueError(f"starts must be in [0, {length}), got {list(starts)}")
    suffixes = [text[t:] for text in tokens for t in (0, *starts)]
    sizes = torch.tensor([0, *map(len, suffixes)], device=tokens.device)
    logits = last_logits(torch.cat(suffixes)[None], sizes.cumsum(0))
    q = logits.float().softmax(-1).unflatten(0, (texts, 1 + len(starts)))
    return total_variation(q[:, :1], q[:, 1:])


@torch.no_grad()
def losses_by_position(model: RecurrentLM, tokens: Tensor, segment: int) -> tuple[Tensor, Tensor]:
    """Rolls the model over texts from zero states, `segment` tokens at a time.

    tokens [texts, L + 1] -> cross entropy in nats at every position, mean over the texts [L]; norms of the
    states after each segment, mean over the texts [segments, layers, heads].
    """
    states = model.zero_states(len(tokens))
    losses, norms = [], []
    for inputs, targets in zip(
        tokens[:, :-1].split(segment, 1), tokens[:, 1:].split(segment, 1), strict=True
    ):
        logits, states = model(inputs, states)
        losses.append(F.cross_entropy(logits.mT.float(), targets, reduction="none").mean(0))
        norms.append(state_norms(states).mean(1))
    return torch.cat(losses), torch.stack(norms)
