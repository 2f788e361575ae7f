"""Compiled kernels for PyTorch."""

from pyops._library import which

__all__ = ["which"]
