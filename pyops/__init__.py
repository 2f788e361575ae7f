"""Compiled kernels for PyTorch: ops, and on top of them optimizers and the methods of papers.

>>> import torch, pyops
>>> g = torch.tensor([[3.0, 0.0], [0.0, -0.5]])
>>> pyops.polar(g, method="svd")
tensor([[ 1.,  0.],
        [ 0., -1.]])
"""

import importlib
from typing import TYPE_CHECKING, Any

from pyops._info import info
from pyops._library import which
from pyops.ops import _tubal_sensing  # noqa: F401  registers its op
from pyops.ops import boxes as _boxes  # noqa: F401  registers its ops; its names are in pyops.boxes
from pyops.ops import tubal as _tubal  # noqa: F401  registers its ops; its names are in pyops.tubal
from pyops.ops.linear_attention import linear_attention, linear_attention_step
from pyops.ops.lmo import lmo, polar, polar_coefficients, spectral_lmo

if TYPE_CHECKING:
    from pyops import boxes, compat, distributed, losses, nn, optim, papers, tubal

__all__ = [
    "boxes",
    "compat",
    "distributed",
    "info",
    "linear_attention",
    "linear_attention_step",
    "lmo",
    "losses",
    "nn",
    "optim",
    "papers",
    "polar",
    "polar_coefficients",
    "spectral_lmo",
    "tubal",
    "which",
]

__version__ = "0.1.0"  # and in pyproject.toml


def __getattr__(name: str) -> Any:
    if name in ("boxes", "compat", "distributed", "losses", "nn", "optim", "papers", "tubal"):
        return importlib.import_module(f"pyops.{name}")
    raise AttributeError(f"module 'pyops' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])
