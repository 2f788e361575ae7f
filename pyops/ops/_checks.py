"""Argument checks of the public functions: errors name the argument, what was received and what is wanted."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def matrix(name: str, g: Any, fewest: int, instead: str = "") -> None:
    """A dense floating tensor of at least so many dimensions; `instead` says what takes one of fewer."""
    if not isinstance(g, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(g).__name__}")
    if g.layout != torch.strided:
        raise TypeError(f"{name} must be a dense tensor, got layout {g.layout}")
    if g.dtype not in DTYPES:
        raise TypeError(f"{name} must be float64, float32, bfloat16 or float16, got {g.dtype}")
    if g.ndim < fewest:
        wanted = f"{name} must have at least {fewest} dimensions, got shape {tuple(g.shape)}"
        raise ValueError(f"{wanted}; {instead}" if instead else wanted)
    if not torch.compiler.is_compiling() and forward_ad.unpack_dual(g).tangent is not None:
        # torch's registration of derivatives knows backward only and would take the tangent for zero.
        raise RuntimeError(
            f"{name} has a forward-mode tangent, and only backward derivatives are implemented"
        )


def shown(value: Any) -> str:
    """A value in a message; of a tensor no elements, which may be many and on a device."""
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)


def one_of(name: str, value: Any, allowed: Iterable[str]) -> None:
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {shown(value)}")


def number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number, got {shown(value)}")
    try:
        return float(value)
    except OverflowError as error:
        raise ValueError(f"{name} must be a number that a float can hold, got one too large") from error


def boolean(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be a bool, got {shown(value)}")


def nonnegative(name: str, value: Any) -> float:
    value = number(name, value)
    if not 0.0 <= value < math.inf:
        raise ValueError(f"{name} must be finite and at least 0, got {value}")
    return value


def integer(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an integer, got {shown(value)}")
    return operator.index(value)  # a plain int also where torch.compile traces it as a symbol


def count(name: str, value: Any) -> int:
    value = integer(name, value)
    if value < 0:
        raise ValueError(f"{name} must be at least 0, got {value}")
    return value


def unused(where: str, **given: tuple[Any, Any]) -> None:
    """Every value, given as (value, default), must be its default."""
    for name, (value, default) in given.items():
        if value != default:
            raise ValueError(f"{name} has no meaning for {where}, got {name}={shown(value)}")
