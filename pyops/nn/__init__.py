"""Recurrent layers on :func:`pyops.linear_attention`: modules with a state in and a state out."""

from pyops.nn.conv import ShortConvolution
from pyops.nn.gated_delta_net import GatedDeltaNet
from pyops.nn.gated_linear_attention import GatedLinearAttention
from pyops.nn.layer import LayerState
from pyops.nn.mamba2 import Mamba2Mixer

__all__ = ["GatedDeltaNet", "GatedLinearAttention", "LayerState", "Mamba2Mixer", "ShortConvolution"]
