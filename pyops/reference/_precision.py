"""What the references share: the dtype they compute in, whatever autocast says."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor


def without_autocast(function: Callable) -> Callable:
    """Products in here choose their own precision; autocast must not lower it."""

    @functools.wraps(function)
    def wrapper(*args):
        tensor = args[0] if isinstance(args[0], Tensor) else next(iter(args[0]), None)
        kind = "" if tensor is None else tensor.device.type
        # The context costs as much as a small product: none where there is nothing to switch off.
        if not kind or not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
            return function(*args)
        with torch.autocast(kind, enabled=False):
            return function(*args)

    return wrapper


def working_dtype(g: Tensor) -> torch.dtype:
    return torch.float64 if g.dtype == torch.float64 else torch.float32
