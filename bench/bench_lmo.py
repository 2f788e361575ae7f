"""The spectral LMO step against its peers: polar factors, vector-norm directions, and whole optimizer steps.

All polar factors are five quintic Newton-Schulz steps with the same coefficients, and are checked against the
polynomial applied to the spectrum in float64 before anything is timed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import torch

from bench import lmo_peers as peers
from bench.case import Case, Impl, Runner, later
from bench.lmo_step import step_cases

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5

# Bounds on the relative error of five steps on Gaussian input, by the rounding of the products' operands. The
# report has what each implementation reached; the bf16 forms lie between 0.01 and 0.04.
BF16_ERROR, SPLIT_ERROR, FLOAT32_ERROR = 5e-2, 1e-4, 2e-5


def polar_flops(rows: int, cols: int, steps: int = STEPS) -> float:
    """The least flops for `steps` steps by a form that is safe in bf16, symmetric products at half price.

    Direct, per step: X X^T (n^2 m), A^2 (n^3), times X (2 n^2 m). In Gram space, in segments of three steps:
    3 n^2 m per segment, and 4 n^3 per step less 3 n^3 per segment.
    """
    n, m = sorted((rows, cols))
    segments = math.ceil(steps / 3)
    direct = steps * (3 * n * n * m + n**3)
    gram = 3 * segments * n * n * m + n**3 * (4 * steps - 3 * segments)
    return float(min(direct, gram))


def exact(g: torch.Tensor, coefficients=(COEFFICIENTS,) * STEPS) -> torch.Tensor:
    """The polynomial applied to the spectrum of g / ||g||_F, in float64 and through an eigendecomposition."""
    g = g.double()
    wide = g if g.shape[-2] <= g.shape[-1] else g.mT
    x = wide / torch.linalg.matrix_norm(wide)[..., None, None]
    squares, vectors = torch.linalg.eigh(x @ x.mT)
    squares = squares.clamp_min(0.0)
    gain = torch.ones_like(squares)
    for a, b, c in coefficients:
        now = gain**2 * squares
        gain = gain * (a + b * now + c * now**2)
    result = (vectors * gain[..., None, :]) @ (vectors.mT @ x)
    return result if g.shape[-2] <= g.shape[-1] else result.mT


class Oracle:
    """Relative error against `exact`, which is computed once for all implementations of a case."""

    def __init__(self) -> None:
        self.known: dict[tuple, tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(self, inputs: tuple, output: torch.Tensor, coefficients=(COEFFICIENTS,) * STEPS) -> float:
        g = inputs[0]
        if self.known.get(coefficients, (None,))[0] is not g:
            self.known[coefficients] = (g, exact(g, coefficients))
        return relative_error(self.known[coefficients][1], output)


def relative_error(reference: torch.Tensor, output: torch.Tensor) -> float:
    assert output.shape == reference.shape, f"shape {tuple(output.shape)}, wanted {tuple(reference.shape)}"
    return float(torch.linalg.vector_norm(output.double() - reference) / torch.linalg.vector_norm(reference))


def gaussian(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Callable[[torch.Generator], tuple]:
    return lambda generator: (torch.randn(shape, generator=generator, device=device).to(dtype),)


def ours(compute) -> Impl:
    def build() -> Runner:
        import pyops

        return Runner(lambda g: pyops.polar(g, method="newton_schulz", steps=STEPS, compute_dtype=compute))

    return Impl("pyops.polar", build)


def served(shape: tuple[int, ...], compute: str, dtype: torch.dtype, device: str) -> Callable[[], str]:
    def ask() -> str:
        import pyops

        g = torch.empty(shape, dtype=dtype, device=device)
        flat = [c for _ in range(STEPS) for c in COEFFICIENTS]
        return pyops.which("polar", g, flat, [1, 3], "auto", compute, "fro", 0.0, -1.0, 0, False)

    return ask


def polar_case(
    shape: tuple[int, ...], compute: str, against: tuple[Impl, ...], error: float, device: str = "cpu", **more
) -> Case:
    """One polar factor; `compute` is bfloat16, float32 or bf16x3 (three bf16 products for one)."""
    dtype = torch.bfloat16 if compute == "bfloat16" else torch.float32
    batch, (rows, cols) = math.prod(shape[:-2]), shape[-2:]
    products = 3 if compute == "bf16x3" else 1
    label = "x".join(map(str, shape))
    return Case(
        op="lmo",
        name=f"polar {compute} {label}{more.pop('suffix', '')}",
        compute="float32" if compute == "float32" else "bfloat16",
        inputs=gaussian(shape, dtype, device),
        small_inputs=gaussian((*shape[:-2], 64, 64 * max(1, cols // rows)), dtype, device),
        ours=ours("bf16x3" if compute == "bf16x3" else getattr(torch, compute)),
        peers=against,
        flops=products * batch * polar_flops(rows, cols),
        bytes=2.0 * math.prod(shape) * dtype.itemsize,
        check=Oracle(),
        error_bound=error,
        served_by=served(shape, compute, dtype, device),
        **more,
    )


def bf16_peers(batched: bool, scale: str) -> tuple[Impl, ...]:
    eager = peers.eager(torch.bfloat16, COEFFICIENTS, STEPS, batched)
    return (
        peers.torch_muon(COEFFICIENTS, STEPS),
        peers.pytorch_optimizer(COEFFICIENTS, STEPS),
        peers.pytorch_optimizer_gram(COEFFICIENTS, STEPS),
        *((eager,) if batched else ()),
        peers.gram_newton_schulz(COEFFICIENTS, STEPS),
        *slow_to_start(scale, peers.compiled(eager), peers.heavyball(STEPS, batched, Oracle())),
    )


def float32_peers(scale: str) -> tuple[Impl, ...]:
    eager = peers.eager(torch.float32, COEFFICIENTS, STEPS, batched=False)
    # torch's float32 norm of two million elements is off by 4e-5, and with it the result.
    eager = dataclasses.replace(eager, error_bound=SPLIT_ERROR)
    return (eager, *slow_to_start(scale, peers.compiled(eager)))


def slow_to_start(scale: str, *compiled: Impl) -> tuple[Impl, ...]:
    return tuple(map(later, compiled)) if scale == "quick" else compiled


def direction_cases(
    device: str, rows: int, cols: int, dtypes: Sequence[torch.dtype] = (torch.float32, torch.bfloat16)
) -> list[Case]:
    """The other norms of the table: one read and one write of the matrix."""

    def expression(norm: str) -> Callable[[torch.Tensor], torch.Tensor]:
        if norm == "sign":
            return torch.sign
        dim = {"col": -2, "row": -1, "euclidean": (-2, -1)}[norm]
        return lambda g: g / torch.linalg.vector_norm(g, dim=dim, keepdim=True)

    def case(norm: str, dtype: torch.dtype) -> Case:
        def build() -> Runner:
            import pyops  # noqa: F401  registers the op

            return Runner(lambda g: torch.ops.pyops.unit_direction(g, norm, 1.0))

        def check(inputs: tuple, output: torch.Tensor) -> float:
            reference = expression(norm)(inputs[0].double())
            return float(torch.linalg.vector_norm(output - reference) / torch.linalg.vector_norm(reference))

        torch_form = expression(norm)
        return Case(
            op="lmo",
            name=f"direction {norm} {str(dtype).removeprefix('torch.')} {rows}x{cols}",
            compute="float32",
            inputs=gaussian((rows, cols), dtype, device),
            small_inputs=gaussian((64, 64), dtype, device),
            ours=Impl("pyops unit_direction", build),
            peers=(
                Impl("torch expression", lambda: Runner(torch_form)),
                Impl("torch.compile of it", lambda: Runner(torch.compile(torch_form, dynamic=False))),
            ),
            flops=0.0 if norm == "sign" else 3.0 * rows * cols,
            bytes=2.0 * rows * cols * dtype.itemsize,
            check=check,
            error_bound=2 * torch.finfo(dtype).eps,
        )

    return [case(norm, dtype) for norm in ("sign", "col", "row", "euclidean") for dtype in dtypes]


# What an AVX2 machine would run: our kernels capped, and for the second the libraries under torch as well.
AVX2 = {"PYOPS_CPU_ISA": "avx2"}
AVX2_MACHINE = {
    **AVX2,
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "ATEN_CPU_CAPABILITY": "avx2",
}


def cpu_cases(scale: str) -> list[Case]:
    if scale == "tiny":
        wide, larger, square, batch = (32, 96), (48, 160), (48, 48), (3, 48, 48)
    else:
        wide, larger, square, batch = (768, 3072), (1024, 4096), (768, 768), (12, 768, 768)
    rounds = {"rounds": {"full": 25, "quick": 7, "tiny": 2}[scale]}
    muon, fp32 = "torch.optim.Muon", "eager float32"
    listed = [
        polar_case(wide, "bfloat16", bf16_peers(False, scale), BF16_ERROR, bar=(2.3, muon), **rounds),
        polar_case(larger, "bfloat16", bf16_peers(False, scale), BF16_ERROR, bar=(2.0, muon), **rounds),
        polar_case(square, "bfloat16", bf16_peers(False, scale), BF16_ERROR, bar=(1.6, muon), **rounds),
        polar_case(batch, "bfloat16", bf16_peers(True, scale), BF16_ERROR, bar=(1.3, "best"), **rounds),
        polar_case(wide, "float32", float32_peers(scale), FLOAT32_ERROR, bar=(2.0, fp32), **rounds),
        polar_case(square, "float32", float32_peers(scale), FLOAT32_ERROR, bar=(1.25, fp32), **rounds),
        polar_case(wide, "bf16x3", float32_peers(scale), SPLIT_ERROR, bar=(3.5, fp32), **rounds),
        *step_cases(scale),
        polar_case(wide, "float32", float32_peers(scale)[:1], FLOAT32_ERROR, suffix=", ours capped to AVX2",
                   env=AVX2, bar=(1.0, fp32), **rounds),
        polar_case(wide, "float32", float32_peers(scale)[:1], FLOAT32_ERROR, suffix=", all capped to AVX2",
                   env=AVX2_MACHINE, bar=(1.0, fp32), **rounds),
    ]  # fmt: skip
    if scale == "tiny":
        return [*listed, *direction_cases("cpu", *larger, dtypes=(torch.float32,))]
    return listed if scale == "quick" else [*listed, *direction_cases("cpu", *larger)]


def cuda_cases(scale: str) -> list[Case]:
    shapes = [(1024, 4096), (4096, 4096), (12, 768, 768)]
    if scale == "full":
        shapes += [(768, 3072), (2048, 2048), (2048, 8192)]
    rounds = {"rounds": 15 if scale == "full" else 7}
    polars = [polar_case(shape, "bfloat16", bf16_peers(len(shape) == 3, "full"), BF16_ERROR, "cuda", **rounds)
              for shape in shapes]  # fmt: skip
    return [*polars, *(direction_cases("cuda", 4096, 16384) if scale == "full" else ())]


def cases(device: str, scale: str) -> list[Case]:
    return cuda_cases(scale) if device == "cuda" else cpu_cases(scale)


def test_lmo(measured, case, impl):
    measured(case, impl)
