"""Whole optimizer steps on a parameter set with GPT-2 small's shapes, in float32 and in bfloat16 weights.

Everyone does the least work that its update allows: no weight decay, no constraint, gradients already there.
The embeddings, gains and biases of the Muons go to torch's fused AdamW, the fastest it has; the Scions take
signs of the embeddings and normalise vectors by their root mean square.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from bench.case import Case, Impl, Runner, need

LR = 0.5  # so large that a step survives rounding into bf16 weights, and its direction can be checked
ADAMW = {"lr": 3e-4, "weight_decay": 0.0, "fused": True}


def gpt2_shapes(layers: int, width: int, vocabulary: int, positions: int) -> list[tuple[int, ...]]:
    """Embeddings; per layer q, k, v and output projection, MLP up and down, biases, two layer norms."""
    layer = [(width, width)] * 4 + [(4 * width, width), (width, 4 * width)]
    vectors = [(3 * width,), (width,), (4 * width,), (width,), *[(width,)] * 4]
    return [(vocabulary, width), (positions, width), *(layer + vectors) * layers, (width,), (width,)]


class Model:
    """Parameters, sorted by their role, as an optimizer under test sees them."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(0)
        self.parameters = [
            torch.nn.Parameter((0.02 * torch.randn(shape, generator=generator)).to(dtype)) for shape in shapes
        ]
        self.embeddings = self.parameters[:2]
        self.matrices = [p for p in self.parameters[2:] if p.ndim == 2]
        self.vectors = [p for p in self.parameters[2:] if p.ndim == 1]

    @property
    def others(self) -> list[torch.nn.Parameter]:
        return self.embeddings + self.vectors


def stepper(
    optimizers: Callable[[Model], list], shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, buffers: list
) -> Runner:
    """Runs these optimizers' steps. The result: (before, after) of one square and one wide matrix.

    buffers: gradients, shared by all runners, as only one of them is between prepare and run.
    """
    model = Model(shapes, dtype)
    buffers.extend(torch.empty_like(p) for p in model.parameters[len(buffers) :])
    steps = [optimizer.step for optimizer in optimizers(model)]
    watched = [model.matrices[0], model.matrices[5]]

    def prepare(*grads: torch.Tensor) -> tuple:
        for parameter, buffer, grad in zip(model.parameters, buffers, grads, strict=True):
            parameter.grad = buffer.copy_(grad)  # some optimizers write into it
        return ([p.detach().clone() for p in watched],)

    def run(before: list[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        for step in steps:
            step()
        return [(old, new.detach()) for old, new in zip(before, watched, strict=True)]

    return Runner(run, prepare)


def torch_muon(model: Model) -> list:
    muon = need("torch.optim").Muon(model.matrices, lr=LR, weight_decay=0.0)
    return [muon, torch.optim.AdamW(model.others, **ADAMW)]


def pytorch_optimizer_muon(model: Model) -> list:
    group = {"params": model.matrices, "use_muon": True}
    muon = need("pytorch_optimizer").Muon([group], lr=LR)
    return [muon, torch.optim.AdamW(model.others, **ADAMW)]


def pytorch_optimizer_scion(model: Model) -> list:
    package = need("pytorch_optimizer")
    norms = need("pytorch_optimizer.optimizer.scion").LMONorm
    groups = [
        {"params": model.matrices, "norm_type": norms.SPECTRAL},
        {"params": model.embeddings, "norm_type": norms.SIGN},
        {"params": model.vectors, "norm_type": norms.BIAS},
    ]
    return [package.SCION(groups, lr=LR, momentum=0.1)]


def pyops_muon(model: Model) -> list:
    from pyops.optim import Muon

    return [Muon(model.matrices, lr=LR, weight_decay=0.0), torch.optim.AdamW(model.others, **ADAMW)]


def pyops_scion(model: Model) -> list:
    from pyops.optim import Scion

    groups = [
        {"params": model.matrices, "norm": "spectral"},
        {"params": model.embeddings, "norm": "sign"},
        {"params": model.vectors, "norm": "rms"},
    ]
    return [Scion(groups, lr=LR, momentum=0.9, constrained=False, method="newton_schulz", steps=5)]


def step_case(dtype: torch.dtype, sizes: dict[str, int], rounds: int) -> Case:
    from bench.bench_lmo import BF16_ERROR, exact, polar_flops

    shapes = gpt2_shapes(**sizes)
    matrices = [shape for shape in shapes[2:] if len(shape) == 2]
    count = sum(torch.Size(shape).numel() for shape in shapes)
    name = str(dtype).removeprefix("torch.")

    def inputs(generator: torch.Generator) -> tuple:
        return tuple(torch.randn(shape, generator=generator).to(dtype) for shape in shapes)

    def check(inputs: tuple, moved: list) -> float:
        """The direction of the first step is the polar factor of the gradient, whatever the scale."""
        grads = [g for g in inputs[2:] if g.ndim == 2]
        errors = []
        for g, (before, after) in zip((grads[0], grads[5]), moved, strict=True):
            step, wanted = before.double() - after.double(), exact(g)
            unit = step / torch.linalg.vector_norm(step)
            errors.append(float(torch.linalg.vector_norm(unit - wanted / torch.linalg.vector_norm(wanted))))
        return max(errors)

    buffers: list[torch.Tensor] = []

    def impl(label: str, optimizers: Callable[[Model], list]) -> Impl:
        return Impl(label, lambda: stepper(optimizers, shapes, dtype, buffers))

    return Case(
        op="lmo",
        name=f"step GPT-2 {count / 1e6:.0f}M {name} weights",
        compute="bfloat16",
        inputs=inputs,
        ours=impl("pyops.optim.Scion", pyops_scion),
        variants=(impl("pyops.optim.Muon", pyops_muon),),
        peers=(
            impl("torch.optim.Muon", torch_muon),
            impl("pytorch_optimizer Muon", pytorch_optimizer_muon),
            impl("pytorch_optimizer SCION", pytorch_optimizer_scion),
        ),
        flops=float(sum(polar_flops(*shape) for shape in matrices)),
        bytes=5.0 * count * dtype.itemsize,  # gradient read; momentum and weight read and written
        check=check,
        error_bound=BF16_ERROR,
        bar=(1.6, "best"),
        rounds=rounds,
        note="No decay, bf16 matrix products, AdamW (torch, fused) for what the Muons do not take.",
    )


def step_cases(scale: str) -> list[Case]:
    if scale == "tiny":
        sizes = {"layers": 1, "width": 32, "vocabulary": 50, "positions": 16}
    else:
        layers = 12 if scale == "full" else 2
        sizes = {"layers": layers, "width": 768, "vocabulary": 50257, "positions": 1024}
    rounds = {"full": 9, "quick": 3, "tiny": 1}[scale]
    return [step_case(dtype, sizes, rounds) for dtype in (torch.float32, torch.bfloat16)]
