"""One run of gradient descent, as a value: what `reproduce.py` maps over."""

from dataclasses import asdict, dataclass

import torch

from pyops.papers.tubal_factorization import PowerIteration, draw, follow, small_start

N, TUBES = 10, 4  # the paper's sizes


@dataclass(frozen=True)
class Run:
    """Tubal rank r of the truth, `rank` columns of U, m measurements, step size mu of the normalised loss."""

    r: int
    rank: int
    m: int
    mu: float
    alpha: float
    steps: int
    seed: int
    every: int = 10
    subspaces: bool = False
    dtype: str = "float64"

    @property
    def work(self) -> int:
        return self.steps


def trace(run: Run, tick) -> dict:
    """The history of one run. The problem depends on the seed, r and m alone, the start on seed and rank."""
    problem = draw(N, run.r, TUBES, run.m, run.seed, getattr(torch, run.dtype))
    start = small_start(N, run.rank, TUBES, run.alpha, run.seed)
    _, history = follow(problem, start, run.mu, run.steps, every=run.every, subspaces=run.subspaces)
    values = PowerIteration(problem, start.to(problem.x), run.mu).values
    # How much of A^*A(T) lies outside its leading r directions; 0 if A^*A were the identity.
    noise = values[:, -run.r - 1].max().item()
    tick(run.steps, f"R={run.rank} m={run.m} alpha={run.alpha:g}", f"{history.test[-1]:.1e}")
    escapes = {str(e): history.first_below(e) for e in (0.5, 0.1, 1e-2, 1e-3, 1e-4)}
    return {**asdict(history), "first_below": escapes, "noise": noise}
