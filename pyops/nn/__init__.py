"""Modules: recurrent layers with a state in and a state out, and tables and poolers of boxes.

GatedLinearAttention, GatedDeltaNet, Mamba2Mixer        on pyops.linear_attention; their state is LayerState
ShortConvolution                                        the causal convolution before a recurrence
BoxEmbedding, UniformBox                                a table of boxes and its initial values
IntersectionPooler, BagOfBoxesPooler                    one box of many
"""

from pyops.nn.boxes import BagOfBoxesPooler, BoxEmbedding, IntersectionPooler, UniformBox
from pyops.nn.conv import ShortConvolution
from pyops.nn.gated_delta_net import GatedDeltaNet
from pyops.nn.gated_linear_attention import GatedLinearAttention
from pyops.nn.layer import LayerState
from pyops.nn.mamba2 import Mamba2Mixer

__all__ = [
    "BagOfBoxesPooler",
    "BoxEmbedding",
    "GatedDeltaNet",
    "GatedLinearAttention",
    "IntersectionPooler",
    "LayerState",
    "Mamba2Mixer",
    "ShortConvolution",
    "UniformBox",
]
