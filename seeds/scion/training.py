"""One training run of a small GPT by Scion or AdamW on real text."""

import math
import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pyops.papers._text import VOCABULARY, text, windows
from pyops.papers.scion import GPT, scion

HEAD_DIM = 32
CHECKS = 12  # validation losses per run, the last one after the last step


@dataclass(frozen=True)
class Run:
    """One training run: everything its result depends on.

    `alpha` and `light` are Scion's, `init` ("gpt2" or "fan_in") is AdamW's. Work counts for the progress bar.
    """

    optimizer: str
    log2_lr: int
    width: int
    steps: int
    seed: int
    alpha: float = 0.1
    init: str = "fan_in"
    light: bool = False
    dtype: str = "float32"
    batch: int = 16
    context: int = 128
    depth: int = 2

    @property
    def tokens(self) -> int:
        """Characters read in training."""
        return self.steps * self.batch * self.context

    @property
    def work(self) -> float:
        """Cost in arbitrary units: matrix products, plus an overhead that matters at small widths."""
        return self.tokens * (self.width**2 + 64 * self.width) * self.depth


def loss(model: GPT, inputs: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy in nats per character, computed in float32."""
    return F.cross_entropy(model(inputs).flatten(0, 1).float(), targets.flatten())


@torch.no_grad()
def validate(model: GPT, context: int, count: int) -> float:
    """Loss over `count` windows spread evenly over the validation text: the same ones for every run."""
    symbols = text()["validation"]
    starts = torch.linspace(0, len(symbols) - context - 1, count).long()
    parts = [loss(model, *windows(symbols, part, context)).item() * len(part) for part in starts.split(32)]
    return sum(parts) / count


def adamw(model: GPT, lr: float, init: str) -> torch.optim.AdamW:
    """AdamW as nanoGPT sets it (betas 0.9 and 0.95, weight decay 0.1), on an initialisation of its own.

    init "gpt2": normal, 0.02 everywhere; "fan_in": normal, 1/sqrt(d_in) for linear layers and 0.02 for the
    embedding; both divide the layers that write to the residual stream by sqrt(2 depth).
    """
    for name, weight in model.named_parameters():
        std = 0.02 if init == "gpt2" or name.startswith("embedding") else weight.shape[1] ** -0.5
        if name.endswith(("mix.weight", "mlp.2.weight")):
            std /= math.sqrt(2 * len(model.blocks))
        torch.nn.init.normal_(weight, std=std)
    return torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.1)


def schedule(step: int, steps: int) -> float:
    """Multiplies the step size, the same for both optimizers: up over the first tenth, then down to zero."""
    warm_up = max(1, steps // 10)
    return min((step + 1) / warm_up, (steps - step) / (steps - warm_up))


def train(run: Run, tick) -> dict:
    """Trains one model. Returns {"loss": final, "curve": [[characters, loss], ...], "step_ms": median}.

    The seed decides initialisation and batches; two optimizers with one seed see the same batches. A loss
    that is not finite ends the run: its result is NaN.
    """
    torch.manual_seed(run.seed)
    batches = torch.Generator().manual_seed(run.seed)
    lr = 2.0**run.log2_lr
    model = GPT(VOCABULARY, run.width, run.depth, HEAD_DIM).to(getattr(torch, run.dtype))
    if run.optimizer == "scion":
        half = {"stochastic_rounding": run.dtype != "float32", "seed": run.seed}
        optimizer = scion(model, lr, alpha=run.alpha, light=run.light, **half)
    else:
        optimizer = adamw(model, lr, run.init)
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: schedule(step, run.steps))
    symbols = text()["train"]
    name = f"{run.optimizer} width {run.width} lr 2^{run.log2_lr}"
    curve: list[list[float]] = []
    times = []
    for step in range(1, run.steps + 1):
        start = time.perf_counter()
        where = torch.randint(len(symbols) - run.context - 1, (run.batch,), generator=batches)
        now = loss(model, *windows(symbols, where, run.context))
        optimizer.zero_grad()
        now.backward()
        if run.optimizer == "adamw":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rate.step()
        times.append(time.perf_counter() - start)
        if not math.isfinite(now.item()):
            tick(run.work * (run.steps - step + 1) / run.steps, name, "not finite")
            return {"loss": math.nan, "curve": curve, "step_ms": math.nan}
        if step * CHECKS // run.steps > (step - 1) * CHECKS // run.steps:
            curve.append([step * run.batch * run.context, validate(model, run.context, 64)])
        tick(run.work / run.steps, name, f"{now.item():.2f}")
    final = validate(model, run.context, 512)
    return {"loss": final, "curve": curve, "step_ms": 1e3 * sorted(times)[len(times) // 2]}
