"""What the registrations of the ops share: shape functions, vmap rules and Triton launchers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor


def triton(family: str, name: str) -> Callable[..., Any]:
    """Launcher of ``pyops.triton_kernels.<family>.<name>``, which is imported at its first call."""

    def launch(*args: Any) -> Any:
        return getattr(import_module(f"pyops.triton_kernels.{family}"), name)(*args)

    return launch


def like(t: Tensor) -> Tensor:
    """A contiguous result of t's shape and dtype."""
    return torch.empty_like(t, memory_format=torch.contiguous_format)


def batched(info: Any, in_dims: Sequence[int | None], *tensors: Tensor) -> list[Tensor]:
    """Every tensor with the vmapped dimension first."""
    return [
        t.expand(info.batch_size, *t.shape) if dim is None else t.movedim(dim, 0)
        for t, dim in zip(tensors, in_dims, strict=True)
    ]


def batched_first_argument(op: str) -> Callable[..., tuple[Tensor, int]]:
    """The vmap rule of an op whose first argument alone has batches, as leading dimensions."""

    def rule(info: Any, in_dims: Sequence[int | None], t: Tensor, *args: Any) -> tuple[Tensor, int]:
        (t,) = batched(info, in_dims[:1], t)
        return getattr(torch.ops.pyops, op)(t, *args), 0

    return rule
