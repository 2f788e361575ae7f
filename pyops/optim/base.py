"""What Scion and Muon share: parameter groups, checks, and one ``lmo_step_`` call per kind of step."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from pyops.ops._checks import DTYPES
from pyops.ops.lmo import COMPUTE, FORMS, lmo_step_
from pyops.ops.lmo import _rows as polar_rows
from pyops.optim.norms import Block, view

EXTRA_KEYS = {"params", "param_names", "name", "initial_lr"}


class Recipe(NamedTuple):
    """How the polar factor is computed, in the terms of ``lmo_step_``."""

    coefficients: tuple[float, ...]
    restarts: tuple[int, ...]
    form: str
    compute: str
    eps: float


@functools.cache
def recipe(
    method: str, steps: int | None, coefficients: tuple | None, form: str, compute: str, eps: float
) -> Recipe:
    """Checks the settings of the polar iteration and flattens its coefficients.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    if steps == "adaptive":
        raise ValueError("steps must be an integer or None in an optimizer, got 'adaptive'")
    if form not in FORMS:
        raise ValueError(f"form must be one of {', '.join(map(repr, FORMS))}, got {form!r}")
    if compute not in COMPUTE.values():
        raise ValueError(f"compute_dtype must be one of {', '.join(map(str, COMPUTE))}, got {compute!r}")
    if not 0 <= eps < math.inf:
        raise ValueError(f"eps must be finite and at least 0, got {eps}")
    rows = polar_rows(method, steps, coefficients)
    return Recipe(tuple(itertools.chain.from_iterable(rows)), (), form, compute, float(eps))


class Rule(NamedTuple):
    """What every parameter of a group has in common; groups of one rule share their calls."""

    recipe: Recipe
    momentum: float
    nesterov: bool
    seed: int  # -1: round to nearest


class Plan(NamedTuple):
    """One step of a group: W <- shrink W - length factor u(d), the factor being each block's."""

    rule: Rule
    shrink: float
    length: float


class Job(NamedTuple):
    """One parameter's part in a step."""

    param: Any  # Tensor or DTensor, as the two below
    grad: Any
    momentum_buffer: Any  # None: grad already is the momentum average
    blocks: Sequence[Block]
    plan: Plan


def named(group: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """The parameters of a group with their names, or their positions where the user gave none."""
    names = group.get("param_names") or [f"parameter {i}" for i in range(len(group["params"]))]
    return zip(names, group["params"], strict=True)


def name_of(group: dict[str, Any], position: int) -> str:
    return next(itertools.islice(named(group), position, None))[0]


def is_dtensor(t: Tensor) -> bool:
    return hasattr(t, "device_mesh")


def local(t: Any) -> Tensor:
    """The tensor, or this rank's part of a DTensor."""
    return t.to_local() if is_dtensor(t) else t


def finite(tensors: Sequence[Tensor]) -> list[bool]:
    """For each tensor, whether all its entries are finite; one transfer from the device for all of them.

    Minimum and maximum pass NaN on, need no temporary, and cannot overflow.
    """
    flags = [
        torch.isfinite(torch.stack(torch.aminmax(t))).all() if t.numel() else None
        for t in map(local, tensors)
    ]
    known = [flag for flag in flags if flag is not None]
    answers = iter(torch.stack([flag.to(known[0].device) for flag in known]).tolist() if known else ())
    return [True if flag is None else next(answers) for flag in flags]


def check_param(name: str, p: Tensor) -> None:
    """Raises TypeError or ValueError for a parameter that no group may hold."""
    if p.layout != torch.strided:
        raise TypeError(f"{name} must be a dense tensor, got layout {p.layout}")
    if p.dtype not in DTYPES:
        raise TypeError(f"{name} must be float64, float32, bfloat16 or float16, got {p.dtype}")
    if getattr(p, "_fsdp_flattened", False) or type(p).__name__ == "FlatParameter":
        raise ValueError(
            f"{name} is a flat shard of FSDP1, whose matrices no longer exist: shard the model by "
            "torch.distributed.fsdp.fully_shard instead"
        )


def like_weight(g: Tensor, p: Tensor) -> Tensor:
    """g with the strides of p, so that both are cut the same way."""
    if g.stride() == p.stride() or g.dim() <= 2:
        return g
    return torch.empty_like(p, dtype=g.dtype).copy_(g)


class LmoOptimizer(Optimizer):
    """An optimizer whose step is a linear minimisation oracle of the momentum average.

    A subclass says how its groups are checked (``_check_group``), how a shape is cut (``_blocks``) and what a
    step of a group is (``_plan``).
    """

    def __init__(self, params: Iterable, defaults: dict[str, Any]):
        if isinstance(params, torch.nn.Module):
            raise TypeError(
                f"params must be parameters or groups of them, got the module {type(params).__name__}; "
                "pyops.optim.Scion.auto_groups(model) makes groups of it"
            )
        super().__init__(params, defaults)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:  # a checkpoint of torch.optim.Muon knows fewer settings
            for name, value in self.defaults.items():
                group.setdefault(name, value)
            self._canonical(group)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch, with the group's settings and parameters checked before it is added.

        Raises:
            TypeError, ValueError: naming the setting or the parameter.
        """
        if not isinstance(param_group, dict):
            raise TypeError(f"param_group must be a dict, got {type(param_group).__name__}")
        group = self._canonical(dict(param_group))
        unknown = sorted(group.keys() - self.defaults.keys() - EXTRA_KEYS)
        if unknown:
            raise ValueError(
                f"{unknown[0]} is not a setting of {type(self).__name__}, got {group[unknown[0]]!r}; "
                f"its settings are {', '.join(sorted(self.defaults))}"
            )
        if not isinstance(group["params"], Tensor | set):
            group["params"] = list(group["params"])
            tensors = [p[1] if isinstance(p, tuple) else p for p in group["params"]]
            if len({id(p) for p in tensors}) < len(tensors):
                raise ValueError("params holds the same parameter twice")
        super().add_param_group(group)
        try:
            self._check_group(group)
            for name, p in named(group):
                check_param(name, p)
                try:
                    self._blocks(group, p.shape)
                except ValueError as error:
                    raise ValueError(f"{name}: {error}") from None
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise

    def _canonical(self, group: dict[str, Any]) -> dict[str, Any]:
        """The settings in types that checkpoints hold, which excludes torch.dtype, and tuples for lists."""
        wanted = group.get("compute_dtype", self.defaults["compute_dtype"])
        group["compute_dtype"] = COMPUTE.get(wanted, wanted)
        for name in ("split_sizes", "num_heads", "coefficients", "ns_coefficients"):
            if name in self.defaults and isinstance(
                group.setdefault(name, self.defaults[name]), list | tuple
            ):
                group[name] = tuple(tuple(x) if isinstance(x, list | tuple) else x for x in group[name])
        return group

    def _check_group(self, group: dict[str, Any]) -> None:
        raise NotImplementedError

    def _blocks(self, group: dict[str, Any], shape: torch.Size) -> tuple[Block, ...]:
        raise NotImplementedError

    def _plan(self, group: dict[str, Any]) -> Plan:
        raise NotImplementedError

    @torch._disable_dynamo
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step for every parameter that has a gradient.

        Args:
            closure: evaluates the model again, calls backward and returns the loss.

        Returns:
            The closure's loss, or None.

        Raises:
            RuntimeError: for sparse gradients; for NaN or Inf where ``error_if_nonfinite`` is set. Nothing
                has been changed then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self._begin():
            return loss
        jobs = self._jobs()
        spread = [job for job in jobs if is_dtensor(job.param)]
        if spread:
            from pyops.optim import sharded

            jobs = [job for job in jobs if not is_dtensor(job.param)] + sharded.step(spread)
        run(jobs)
        self._end()
        return loss

    def _begin(self) -> bool:
        """Before a step; False skips it."""
        return True

    def _end(self) -> None:
        """After a step."""

    def _jobs(self) -> list[Job]:
        """The work of this step. What can be refused is refused here, before any parameter is written."""
        found: list[tuple[dict[str, Any], Plan, Tensor, Tensor]] = []
        watched: list[tuple[str, Tensor]] = []
        for group in self.param_groups:
            self._check_group(group)
            plan = self._plan(group)
            for i, p in enumerate(group["params"]):
                g = self._gradient(group, p)
                if g is None:
                    continue
                if g.layout != torch.strided:
                    raise RuntimeError(
                        f"{name_of(group, i)} has a sparse gradient ({g.layout}): give it dense ones"
                    )
                found.append((group, plan, p, g))
                if group["error_if_nonfinite"]:
                    watched.append((name_of(group, i), g))
        self._refuse_nonfinite(watched)
        jobs = []
        for group, plan, p, g in found:
            sources = self._sources(group, p, g)
            if sources is not None:
                jobs.append(Job(p, *sources, self._blocks(group, p.shape), plan))
        return jobs

    def _gradient(self, group: dict[str, Any], p: Tensor) -> Tensor | None:
        return p.grad

    def _sources(self, group: dict[str, Any], p: Tensor, g: Tensor) -> tuple[Tensor, Tensor | None] | None:
        """The gradient and the momentum buffer that the step reads; None to leave the parameter alone."""
        state = self.state[p]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(p, dtype=g.dtype, memory_format=torch.preserve_format)
        return g, state["momentum_buffer"]

    def _refuse_nonfinite(self, watched: Sequence[tuple[str, Tensor]]) -> None:
        flags = all_ranks(finite([g for _, g in watched]), [g for _, g in watched])
        bad = [name for (name, _), good in zip(watched, flags, strict=True) if not good]
        if bad:
            raise RuntimeError(
                f"error_if_nonfinite: NaN or Inf in the gradient of {', '.join(bad)}; nothing was changed"
            )


def all_ranks(flags: list[bool], tensors: Sequence[Tensor]) -> list[bool]:
    """Each flag, and-ed over the ranks that hold a part of its tensor."""
    if not any(is_dtensor(t) for t in tensors):
        return flags
    from pyops.optim import sharded

    return sharded.all_ranks(flags, tensors)


def run(jobs: Iterable[Job]) -> None:
    """One ``lmo_step_`` per direction, rule, device and dtypes, over all blocks that share them."""
    calls: dict[tuple, tuple[list, ...]] = {}
    rules: dict[Rule, int] = {}
    numbers: dict[
        int, int
    ] = {}  # of a plan: hashing its rule for every parameter would cost more than the loop
    for p, g, m, blocks, plan in jobs:
        number = numbers.get(id(plan))
        if number is None:
            number = numbers[id(plan)] = rules.setdefault(plan.rule, len(rules))
        if p.dim() > 2:
            g = like_weight(g, p)
        kind = (number, p.device, p.dtype, g.dtype, None if m is None else m.dtype)
        for block in blocks:
            call = calls.get((block.direction, kind))
            if call is None:
                call = calls[block.direction, kind] = ([], [], [], [], [])
            weights, grads, momenta, shrinks, lengths = call
            weights.append(view(p, block))
            grads.append(view(g, block, p))
            if m is not None:
                momenta.append(view(m, block, p))
            shrinks.append(plan.shrink)
            lengths.append(plan.length * block.factor)
    order = list(rules)
    for i, ((direction, (number, *_)), call) in enumerate(calls.items()):
        weights, grads, momenta, shrinks, lengths = call
        rule = order[number]
        coefficients, restarts, form, compute, eps = rule.recipe
        seed = -1 if rule.seed < 0 else mix(rule.seed, i)
        lmo_step_(
            weights, grads, momenta, direction, shrinks, lengths, rule.momentum, rule.nesterov, 1.0,
            coefficients, restarts, form, compute, eps, seed,
        )  # fmt: skip


def mix(*values: int) -> int:
    """A 31-bit number from several: neighbouring steps and calls must not share their random bits."""
    x = 0
    for value in values:
        x = (x ^ value) * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
        x ^= x >> 29
    return x & 0x7FFFFFFF
