"""What one benchmark is. A file `bench/bench_<op>.py` joins the harness by defining

    def cases(device: str, scale: str) -> list[Case]

where scale is "full" (the published shapes), "quick" (the same shapes, fewer rounds and cases) or "tiny"
(shapes that only test the harness). Building an implementation may raise Missing: the report then names it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

SCALES = ("full", "quick", "tiny")


class Missing(Exception):
    """A peer that cannot run here; the text says why and goes into the report."""


def need(module: str):
    """Import a peer's module, or raise Missing with the reason (which may also be that it wants a GPU)."""
    try:
        return importlib.import_module(module)
    except Exception as error:
        raise Missing(f"cannot import {module}: {type(error).__name__}: {error}".splitlines()[0]) from error


def clones(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Fresh copies, because some implementations write into their input."""
    return tuple(t.clone() for t in inputs)


@dataclass(frozen=True)
class Runner:
    """A built implementation. `prepare(*inputs)` makes a call's arguments, untimed; `run(*args)` is timed."""

    run: Callable[..., Any]
    prepare: Callable[..., tuple] = clones


@dataclass(frozen=True)
class Impl:
    """One implementation: a name and its builder. It has a check or an error bound of its own where it
    computes something else than the case says, or less exactly."""

    name: str
    build: Callable[[], Runner]
    check: Callable[[tuple, Any], float] | None = None
    error_bound: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Case:
    """One op at one shape, against its peers.

    flops, bytes: the least work the result needs by the cheapest known algorithm, and the bytes it must read
        and write; with the measured peaks they give the roofline bound. `compute` names the GEMM peak.
    check(inputs, output): the error of a result (any number), or raises; must not exceed error_bound.
    small_inputs: the same kind of inputs, small, to load code before extra memory is measured on the first
        full call; None measures the second call instead (for implementations with a state).
    bar: (least ratio, peer name or "best"), where the project promises one.
    variants: further forms of ours, shown beside it; `ratio` is theirs to ours, and no promise rests on it.
    env: environment in which the case must run; such a case gets a process of its own.
    served_by(): which of our backends serves the case.
    """

    op: str
    name: str
    compute: str
    inputs: Callable[[torch.Generator], tuple]
    ours: Impl
    peers: tuple[Impl, ...]
    flops: float
    bytes: float
    check: Callable[[tuple, Any], float]
    error_bound: float
    small_inputs: Callable[[torch.Generator], tuple] | None = None
    bar: tuple[float, str] | None = None
    variants: tuple[Impl, ...] = ()
    rounds: int = 25
    env: Mapping[str, str] = field(default_factory=dict)
    served_by: Callable[[], str] | None = None
    note: str = ""

    @property
    def implementations(self) -> tuple[Impl, ...]:
        return (self.ours, *self.variants, *self.peers)

    def kind(self, impl: Impl) -> str:
        """One of "ours", "variant" (another form of ours) and "peer"."""
        return "ours" if impl is self.ours else "variant" if impl in self.variants else "peer"

    def error(self, impl: Impl, inputs: tuple, output: Any) -> float:
        """The error of a result; raises AssertionError above the bound (also when it is NaN)."""
        error = float((impl.check or self.check)(inputs, output))
        bound = self.error_bound if impl.error_bound is None else impl.error_bound
        if not error <= bound:
            raise AssertionError(f"error {error:.3g} above {bound:.3g}")
        return error


def later(impl: Impl) -> Impl:
    """The implementation, named as missing from a quick run: it compiles longer than the rest takes."""

    def build() -> Runner:
        raise Missing("compiled for minutes: only in the full run")

    return replace(impl, build=build)


def bound_seconds(flops: float, nbytes: float, flops_per_s: float, bytes_per_s: float) -> float:
    """The roofline: no implementation of this algorithm on this machine can be faster."""
    return max(flops / flops_per_s, nbytes / bytes_per_s)
