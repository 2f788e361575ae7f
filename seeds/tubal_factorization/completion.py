"""A photograph with most of its entries missing, completed by the tensor nuclear norm and by matrices.

    minimise |X|  where X agrees with the picture on the entries seen,

|X| the tensor nuclear norm of X [height, width, colour] (`pyops.tubal.tnn`), or the sum of the nuclear norms
of its three colour matrices: the same with the identity in place of the DFT. By ADMM, whose one step of
substance is singular value thresholding, `pyops.tubal.tsvt`.
"""

from dataclasses import dataclass

import numpy
import torch
from torch import Tensor

from pyops.tubal import tsvt

ITERATIONS = 160  # the threshold 1/beta has then fallen from 1000 to 2e-4: nothing moves any more


@dataclass(frozen=True)
class Completion:
    """`share` of the entries (each colour of a pixel for itself) is seen, of a picture shrunk by `shrink`."""

    share: float
    method: str  # "tensor" or "matrices"
    shrink: int = 2
    seed: int = 0

    @property
    def work(self) -> float:
        return 60_000 / self.shrink**3


def picture(shrink: int) -> Tensor:
    """Matplotlib's sample photograph of Grace Hopper, [height, width, 3] in [0, 1]; blocks are averaged."""
    from matplotlib import cbook, image

    pixels = image.imread(cbook.get_sample_data("grace_hopper.jpg", asfileobj=False))
    x = torch.from_numpy(numpy.array(pixels, dtype=numpy.float32)) / 255
    height, width = (size // shrink * shrink for size in x.shape[:2])
    return x[:height, :width].unflatten(0, (-1, shrink)).unflatten(2, (-1, shrink)).mean((1, 3))


def seen(truth: Tensor, share: float, seed: int) -> Tensor:
    """Which entries are seen."""
    return torch.rand(truth.shape, generator=torch.Generator().manual_seed(seed)) < share


def psnr(x: Tensor, truth: Tensor) -> float:
    """Peak signal-to-noise ratio in dB, over all entries, seen or not."""
    return -10 * torch.log10((x.clamp(0, 1) - truth).square().mean()).item()


def complete(observed: Tensor, mask: Tensor, transform, tick=lambda: None) -> Tensor:
    """ADMM: X <- prox(Z - Y/beta), Z <- X + Y/beta where nothing is seen, Y <- Y + beta (X - Z)."""
    z, y = observed.clone(), torch.zeros_like(observed)
    beta = 1e-3
    for _ in range(ITERATIONS):
        x = tsvt(z - y / beta, 1 / beta, transform=transform)
        z = torch.where(mask, observed, x + y / beta)
        y = y + beta * (x - z)
        beta *= 1.1
        tick()
    return z


def restore(run: Completion, tick) -> dict:
    truth = picture(run.shrink)
    mask = seen(truth, run.share, run.seed)
    observed = torch.where(mask, truth, 0.0)
    transform = "dft" if run.method == "tensor" else torch.eye(3)
    x = complete(observed, mask, transform, lambda: tick(run.work / ITERATIONS, f"picture, {run.method}"))
    pixels = (x.clamp(0, 1) * 255).round().to(torch.uint8).flatten().tolist()
    return {"psnr": psnr(x, truth), "shape": list(truth.shape), "pixels": pixels}
