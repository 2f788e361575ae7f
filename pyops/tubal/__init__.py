"""Tubal tensors: the t-product and its algebra."""

from pyops.ops.tubal import tgram, tprod

__all__ = ["tgram", "tprod"]
