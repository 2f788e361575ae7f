"""One base model on real text, post-trained from it by every intervention, and all of them measured."""

import copy
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import passkey
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pyops.nn import GatedLinearAttention
from pyops.papers._text import windows, words
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
)

TOKENS = 1024  # vocabulary: symbols and the most frequent names, numbers and indents
Batches = Iterator[tuple[Tensor, Tensor, Tensor]]  # inputs, targets [batch, T], rows that are fresh texts
INTERVENTIONS = ("none", "random_noise", "fitted_noise", "state_passing", "truncated_bptt")


@dataclass(frozen=True)
class Run:
    """A base model and its post-training by every intervention: all that the results depend on.

    steps, post_steps: of training and of each post-training, with step sizes lr and post_lr; tune_steps: of
    each training on passkeys, with tune_lr, by the interventions in `passkeys`; context: T; reach: the length
    evaluated, as a multiple of T; texts: how many of them.
    """

    seed: int
    steps: int = 1500
    post_steps: int = 100
    tune_steps: int = 1200
    passkeys: tuple[str, ...] = INTERVENTIONS[:-1]  # a passkey text has no continuation
    width: int = 64
    depth: int = 2
    context: int = 64
    batch: int = 16
    lr: float = 4e-3
    post_lr: float = 1e-3
    tune_lr: float = 2e-3
    reach: int = 64
    texts: int = 36
    chapter: int = 64  # pieces of T tokens that truncated backpropagation reads in a row

    @property
    def length(self) -> int:
        """Tokens that the models are evaluated over."""
        return self.reach * self.context

    @property
    def lengths(self) -> list[int]:
        """T, 2 T, 4 T, ... up to the length."""
        return [self.context << i for i in range(self.reach.bit_length())]

    @property
    def remembered(self) -> int:
        """T of the effective remembrance: half the length evaluated."""
        return self.length // 2

    @property
    def starts(self) -> list[int]:
        """Its values of t: all but T, T/2, T/4 ... of the tokens dropped, and the mirror image of these."""
        parts = [self.remembered >> i for i in range(1, self.remembered.bit_length())]
        return sorted({*parts, *(self.remembered - part for part in parts)})

    @property
    def work(self) -> float:
        """Tokens read in training, three times for its backward pass, and in the evaluations."""
        steps = self.steps + len(INTERVENTIONS) * self.post_steps
        steps += len(self.passkeys) * self.tune_steps
        return 3 * steps * self.batch * self.context + 3 * (1 + len(INTERVENTIONS)) * self.texts * self.length


def make(run: Run) -> RecurrentLM:
    """Gated linear attention with short convolutions, and forget gates that start open.

    Every key channel has a decay that depends on the token and may take any value in (0, 1). With a bias of
    12 the states forget nothing at first; what is to be forgotten has to be learned.
    """

    def mixer(width: int) -> GatedLinearAttention:
        layer = GatedLinearAttention(width, num_heads=4, conv_size=4)
        nn.init.constant_(layer.gk_proj[1].bias, 12.0)
        return layer

    return RecurrentLM(TOKENS, run.width, run.depth, mixer)


def shuffled(run: Run, generator: torch.Generator) -> Batches:
    """Batches of unrelated windows."""
    symbols = words(TOKENS)["train"]
    while True:
        starts = torch.randint(len(symbols) - run.context - 1, (run.batch,), generator=generator)
        yield *windows(symbols, starts, run.context), torch.ones(run.batch, dtype=torch.bool)


def continued(run: Run, generator: torch.Generator) -> Batches:
    """Batches whose rows continue those before, for `chapter` segments; the rows begin anew one by one."""
    symbols, chapter = words(TOKENS)["train"], run.chapter
    at = torch.randint(len(symbols) - chapter * run.context - 1, (run.batch,), generator=generator)
    left = torch.arange(run.batch) * chapter // run.batch
    fresh = torch.ones(run.batch, dtype=torch.bool)
    while True:
        yield *windows(symbols, at, run.context), fresh
        at, left, fresh = at + run.context, left - 1, left == 0
        begin = torch.randint(len(symbols) - chapter * run.context - 1, (run.batch,), generator=generator)
        at, left = torch.where(fresh, begin, at), torch.where(fresh, chapter - 1, left)


def schedule(step: int, steps: int) -> float:
    """Multiplies the step size: up over the first tenth, then down to zero."""
    warm_up = max(1, steps // 10)
    return min((step + 1) / warm_up, (steps - step) / max(1, steps - warm_up))


def fit(
    model: RecurrentLM,
    batches: Batches,
    intervention: Intervention,
    steps: int,
    lr: float,
    told: Callable[[int, float], None],
) -> RecurrentLM:
    """Trains the model in place from the initial states of the intervention; told(tokens, loss) each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.1)
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: schedule(step, steps))
    for _, (inputs, targets, fresh) in zip(range(steps), batches, strict=False):
        logits, final = model(inputs, intervention.initial(model.zero_states(len(inputs)), fresh))
        intervention.observe(final)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=passkey.IGNORED)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rate.step()
        told(inputs.numel(), loss.item())
    return model


def intervention(name: str, base: RecurrentLM, run: Run, batches: Batches) -> Intervention:
    """An intervention for post-training the base; random noise has the size of its states after batches."""
    noise = torch.Generator().manual_seed(run.seed)
    if name == "random_noise":
        statistics = StateStatistics()
        for inputs, _, _ in itertools.islice(batches, 4):
            with torch.no_grad():
                statistics.update(base(inputs)[1])
        return RandomNoise(statistics.rms, noise)
    if name == "fitted_noise":
        return FittedNoise(generator=noise)
    return {"none": Intervention, "state_passing": StatePassing, "truncated_bptt": TruncatedBPTT}[name]()


def per_octave(values: Tensor, run: Run) -> list[float]:
    """Means of values by position over (T/2, T], (T, 2 T], (2 T, 4 T] and so on."""
    return [values[end // 2 : end].mean().item() for end in run.lengths]


@torch.no_grad()
def losses_in_windows(model: RecurrentLM, tokens: Tensor, context: int) -> Tensor:
    """Loss at every position when the model sees only the T/2 to T tokens before it, as in training; [L].

    The mean over the texts; positions before T/2 are NaN. The targets are those of `losses_by_position`: what
    the two differ by is what the longer past does, whatever the text is like there.
    """
    half, length = context // 2, tokens.shape[1] - 1
    losses = torch.full((len(tokens), length), math.nan)
    for text, row in zip(tokens, losses, strict=True):
        for start in (0, half):
            end = start + (length - start) // context * context
            inputs, targets = (text[start + i : end + i].view(-1, context) for i in (0, 1))
            logits = model(inputs)[0][:, half:]
            row[start:end].view(-1, context)[:, half:] = F.cross_entropy(
                logits.mT, targets[:, half:], reduction="none"
            )
    return losses.mean(0)


def evaluate(model: RecurrentLM, run: Run) -> dict:
    """Losses and norms of states by octave of the position, and effective remembrance, on held-out text."""
    symbols, length = words(TOKENS)["validation"], run.length
    starts = torch.linspace(0, len(symbols) - length - 2, run.texts).long()
    tokens = symbols[starts[:, None] + torch.arange(length + 1)]
    losses, norms = losses_by_position(model, tokens, run.context)
    recent = losses_in_windows(model, tokens, run.context)
    ends = torch.tensor(run.lengths)
    some = tokens[:: max(1, run.texts // 9), : run.remembered]
    return {
        "loss": per_octave(losses, run),
        "excess": per_octave(losses - recent, run),
        "norms": norms[ends // run.context - 1].tolist(),
        "remembrance": effective_remembrance(model.last_logits, some, run.starts).mean(0).tolist(),
    }


def recalls(model: RecurrentLM, run: Run) -> dict:
    """Passkeys recalled from held-out texts of each length, the note within T of the question or anywhere."""

    def share(length: int, span: int) -> float:
        generator = torch.Generator().manual_seed(run.seed)
        symbols = words(TOKENS)["validation"]
        return passkey.recall(model, passkey.texts(symbols, 32, length, span, generator), run.context)

    return {
        "near": [share(length, run.context) for length in run.lengths],
        "far": [share(length, length) for length in run.lengths],
    }


def study(run: Run, tick) -> dict:
    """Trains the base and, from it, a model per intervention; then the same on passkeys. Evaluates all.

    Returns "models" and "passkey": name -> results.
    """

    def told(tokens: int, loss: float) -> None:
        tick(3 * tokens, f"seed {run.seed}", f"{loss:.2f}")

    def evaluated(model: RecurrentLM) -> dict:
        result = evaluate(model, run)
        tick(3 * run.texts * run.length, f"seed {run.seed}", "evaluated")
        return result

    def generator(purpose: int) -> torch.Generator:
        return torch.Generator().manual_seed(1000 * purpose + run.seed)

    def keys(purpose: int) -> Batches:
        return passkey.batches(words(TOKENS)["train"], run.batch, run.context, generator(purpose))

    torch.manual_seed(run.seed)
    base = fit(make(run), shuffled(run, generator(0)), Intervention(), run.steps, run.lr, told)
    models = {"base": evaluated(base)}
    for name in INTERVENTIONS:
        batches = (continued if name == "truncated_bptt" else shuffled)(run, generator(1))
        chosen = intervention(name, base, run, shuffled(run, generator(2)))
        model = fit(copy.deepcopy(base), batches, chosen, run.post_steps, run.post_lr, told)
        models[name] = evaluated(model)

    passkeys = {}
    for name in run.passkeys:
        chosen = intervention(name, base, run, keys(3))
        model = fit(copy.deepcopy(base), keys(4), chosen, run.tune_steps, run.tune_lr, told)
        passkeys[name] = recalls(model, run)
    return {"models": models, "passkey": passkeys}
