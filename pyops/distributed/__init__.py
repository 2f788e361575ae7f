"""Ops whose sequence is spread over the ranks of a ``torch.distributed`` group."""

from pyops.distributed.linear_attention import linear_attention

__all__ = ["linear_attention"]
