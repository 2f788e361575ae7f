"""Gradient descent on a factor of measured tubal tensors: the fused op, and torch loops that do the same.

The loops take the state that their form of the iteration wants and keep it there: what is converted once per
call is not timed per step. `python -m bench.tubal_sensing` prints the paper's sizes, on one thread.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from pyops.ops._tubal_sensing import tubal_sensing_steps_
from pyops.reference.tubal import ttranspose

Loop = Callable[[Tensor, Tensor, Tensor, float, int], Tensor]


def fused(u: Tensor, operator: Tensor, y: Tensor, step: float, steps: int) -> Tensor:
    """pyops, one call for all steps; everything it converts is in the time."""
    u = u.clone()
    tubal_sensing_steps_(u, operator, y, step, steps)
    return u


def all_faces(u: Tensor, operator: Tensor, y: Tensor, step: float, steps: int) -> Tensor:
    """As the published scripts: fft, product and ifft over all faces for each t-product."""
    rows, symmetric = operator.flatten(1), _symmetric(operator)

    def product(a: Tensor, b: Tensor) -> Tensor:
        faces = torch.fft.fft(a).movedim(-1, 0) @ torch.fft.fft(b).movedim(-1, 0)
        return torch.fft.ifft(faces.movedim(0, -1)).real

    for _ in range(steps):
        residual = rows @ product(u, ttranspose(u, False)).flatten() - y
        u = u - step * product((residual @ symmetric).view(operator.shape[1:]), u)
    return u


def half_faces(u: Tensor, operator: Tensor, y: Tensor, step: float, steps: int) -> Tensor:
    """Half the faces, tubes first, T-transposes as conjugate transposes of faces, one rfft of U per step."""
    tubes = u.shape[-1]
    u = u.permute(2, 0, 1).contiguous()
    rows = operator.permute(0, 3, 1, 2).flatten(1).contiguous()
    symmetric = _symmetric(operator).view(operator.shape).permute(0, 3, 1, 2).flatten(1).contiguous()
    shape = (tubes, *operator.shape[1:3])
    for _ in range(steps):
        faces = torch.fft.rfft(u, dim=0)
        residual = rows @ torch.fft.irfft(faces @ faces.mH, n=tubes, dim=0).flatten() - y
        gradient = torch.fft.rfft((residual @ symmetric).view(shape), dim=0)
        u = u - step * torch.fft.irfft(gradient @ faces, n=tubes, dim=0)
    return u.permute(1, 2, 0).contiguous()


def transformed(
    u: Tensor, operator: Tensor, y: Tensor, step: float, steps: int, reduce: bool = False
) -> Tensor:
    """No transform in the loop: U and the operator stay in the Fourier domain, as complex half faces."""
    tubes = u.shape[-1]
    weights = torch.full((tubes // 2 + 1, 1, 1), 2.0, dtype=u.dtype)
    weights[0] = 1
    if tubes % 2 == 0:
        weights[-1] = 1
    faces = torch.fft.rfft(u).movedim(-1, 0).contiguous()
    basis = None
    if reduce and u.shape[1] > u.shape[0]:  # U = L Q: steps multiply from the left, so they need L alone
        q, r = torch.linalg.qr(faces.mH)
        faces, basis = r.mH.contiguous(), q.mH
    symmetric = torch.fft.rfft(_symmetric(operator).view(operator.shape)).movedim(-1, 1).contiguous()
    rows = torch.view_as_real(symmetric).flatten(1)
    weighted = torch.view_as_real(symmetric * (weights / tubes)).flatten(1).contiguous()
    shape = (*symmetric.shape[1:], 2)
    for _ in range(steps):
        z = torch.view_as_real(faces @ faces.mH).view(-1)
        residual = torch.addmv(y, weighted, z, beta=-1)
        gradient = torch.view_as_complex((residual @ rows).view(shape))
        faces = torch.baddbmm(faces, gradient, faces, alpha=-step)
    if basis is not None:
        faces = faces @ basis
    return torch.fft.irfft(faces.movedim(0, -1), n=tubes)


def reduced(u: Tensor, operator: Tensor, y: Tensor, step: float, steps: int) -> Tensor:
    """``transformed`` on the n x n factor L of U = L Q, as the fused op does."""
    return transformed(u, operator, y, step, steps, reduce=True)


def circulant(u: Tensor, operator: Tensor, y: Tensor, step: float, steps: int) -> Tensor:
    """No transform at all: block circulant matrices of U and of the gradient, two real products per step."""
    n, rank, tubes = u.shape
    shift = (torch.arange(tubes).unsqueeze(1) - torch.arange(tubes)) % tubes
    u = u.permute(2, 0, 1).contiguous()
    rows = operator.permute(0, 3, 1, 2).flatten(1).contiguous()
    symmetric = _symmetric(operator).view(operator.shape).permute(0, 3, 1, 2).flatten(1).contiguous()
    for _ in range(steps):
        whole = u[shift].permute(0, 2, 1, 3).reshape(tubes * n, tubes * rank)
        z = whole @ whole[:n].mT  # block s of the first block column: slice s of U * U^T
        residual = torch.addmv(y, rows, z.view(-1), beta=-1)
        g = (residual @ symmetric).view(tubes, n, n)[shift].permute(0, 2, 1, 3).reshape(tubes * n, tubes * n)
        u = torch.addmm(u.view(tubes * n, rank), g, u.view(tubes * n, rank), alpha=-step).view(tubes, n, rank)
    return u.permute(1, 2, 0).contiguous()


def _symmetric(operator: Tensor) -> Tensor:
    return torch.stack([(a + ttranspose(a, False)) / 2 for a in operator]).flatten(1)


LOOPS: dict[str, Loop] = {
    "all faces": all_faces,
    "half faces": half_faces,
    "half faces, transformed once": transformed,
    "the same, U reduced to n columns": reduced,
    "block circulant": circulant,
}


def inputs(rank: int, m: int, dtype: torch.dtype, n: int = 10, tubes: int = 4) -> tuple[Tensor, ...]:
    """The paper's sizes: (u, operator, y)."""
    generator = torch.Generator().manual_seed(0)
    u, operator, y = (
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in ((n, rank, tubes), (m, n, n, tubes), (m,))
    )
    return (0.1 * u / rank**0.5).to(dtype), (operator / m**0.5).to(dtype), (0.1 * y).to(dtype)


def per_step(loop: Loop, tensors: tuple[Tensor, ...], steps: int) -> float:
    """Seconds per step: the difference of a run and of one of no steps, so that set-up is not in it."""
    start = time.perf_counter()
    loop(*tensors, 0.01, steps)
    middle = time.perf_counter()
    if loop is fused:
        return (middle - start) / steps
    loop(*tensors, 0.01, 0)
    return (2 * middle - start - time.perf_counter()) / steps


def compare(rank: int, m: int, dtype: torch.dtype, steps: int = 200, runs: int = 21) -> dict[str, float]:
    """Median seconds per step of each loop, runs alternating; all must agree with the fused steps."""
    tensors = inputs(rank, m, dtype)
    wanted = fused(*tensors, 0.01, steps)
    for name, loop in LOOPS.items():
        error = (loop(*tensors, 0.01, steps) - wanted).norm() / wanted.norm()
        assert error < 1e3 * torch.finfo(dtype).eps, f"{name} computes something else: {error}"
    contenders = {"pyops, fused": fused, **LOOPS}
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(runs):
        for name, loop in contenders.items():
            times[name].append(per_step(loop, tensors, steps))
    return {name: statistics.median(seconds) for name, seconds in times.items()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    with torch.no_grad():
        for dtype in (torch.float32, torch.float64):
            for rank, m in ((50, 285), (100, 254), (200, 285)):
                found = compare(rank, m, dtype)
                ours = found["pyops, fused"]
                print(f"n=10 tubes=4 rank={rank} m={m} {dtype}")
                for name, seconds in found.items():
                    print(f"  {name:34} {1e6 * seconds:8.1f} us per step  {seconds / ours:6.1f} x")
