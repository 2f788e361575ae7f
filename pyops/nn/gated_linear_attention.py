"""The layer of gated linear attention (GLA)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pyops.nn.conv import ShortConvolution
from pyops.nn.layer import GatedRMSNorm, LayerState, RecurrentLayer, attend, divided, wide


class GatedLinearAttention(RecurrentLayer):
    r"""Linear attention with a decay per head and key channel that depends on the token:

        q, k, v = W_q x, W_k x, W_v x            (with ``conv_size``, each through a short convolution)
        g = logsigmoid(W_2 W_1 x + b) / 16,      S <- Diag(exp g) S + k^T v,      o = K^(-1/2) q S
        y = W_o (RMSNorm(o) * silu(W_g x))       (the norm over each head)

    Args:
        hidden_size: channels of x and y.
        num_heads: heads.
        expand_k, expand_v: channels of k and of v, as ratios to ``hidden_size``; head sizes K and V are these
            channels divided by ``num_heads``.
        conv_size: taps of the short convolutions on q, k and v; 0, the paper's, is none.
        gate_low_rank_dim: rows of W_1.
        gate_logit_normalizer: the 16 in g. It keeps decays close to 1.
        norm_eps: of the norm.
        device, dtype: of the parameters.

    Parameters have names and shapes of flash-linear-attention's layer: ``q_proj``, ``k_proj``, ``v_proj``,
    ``g_proj``, ``gk_proj.0``, ``gk_proj.1``, ``g_norm_swish_gate``, ``o_proj`` and, with ``conv_size``,
    ``q_conv1d``, ``k_conv1d``, ``v_conv1d``. Initial values, as there, are those of ``nn.Linear`` and
    ``nn.Conv1d``, and ones in the norm; default sizes are its too.

    Yang, Wang, Shen, Panda, Kim, "Gated Linear Attention Transformers with Hardware-Efficient Training",
    ICML 2024.

    >>> layer = GatedLinearAttention(32, num_heads=2)
    >>> x = torch.randn(1, 10, 32)
    >>> whole, _ = layer(x)
    >>> first, state = layer(x[:, :6])
    >>> second, state = layer(x[:, 6:], state)
    >>> torch.allclose(whole, torch.cat([first, second], 1), atol=1e-5), state.recurrent.shape
    (True, torch.Size([1, 2, 8, 16]))
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        num_heads: int = 4,
        expand_k: float = 0.5,
        expand_v: float = 1.0,
        conv_size: int = 0,
        gate_low_rank_dim: int = 16,
        gate_logit_normalizer: float = 16.0,
        norm_eps: float = 1e-5,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        key_dim = divided("expand_k", expand_k * hidden_size, "num_heads", num_heads)
        value_dim = divided("expand_v", expand_v * hidden_size, "num_heads", num_heads)
        super().__init__(hidden_size, (num_heads, key_dim, value_dim))
        self.gate_logit_normalizer = gate_logit_normalizer
        factory = {"device": device, "dtype": dtype}
        keys, values = num_heads * key_dim, num_heads * value_dim
        self.q_proj = nn.Linear(hidden_size, keys, bias=False, **factory)
        self.k_proj = nn.Linear(hidden_size, keys, bias=False, **factory)
        self.v_proj = nn.Linear(hidden_size, values, bias=False, **factory)
        self.g_proj = nn.Linear(hidden_size, values, bias=False, **factory)
        self.gk_proj = nn.Sequential(
            nn.Linear(hidden_size, gate_low_rank_dim, bias=False, **factory),
            nn.Linear(gate_low_rank_dim, keys, **factory),
        )
        if conv_size:
            self.q_conv1d = ShortConvolution(keys, conv_size, **factory)
            self.k_conv1d = ShortConvolution(keys, conv_size, **factory)
            self.v_conv1d = ShortConvolution(values, conv_size, **factory)
        self.g_norm_swish_gate = GatedRMSNorm(value_dim, norm_eps, **factory)
        self.o_proj = nn.Linear(values, hidden_size, bias=False, **factory)

    def forward(
        self, x: Tensor, state: LayerState | None = None, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, LayerState]:
        recurrent, carried = self._parts(x, state, cu_seqlens)
        projected = [self.q_proj(x), self.k_proj(x), self.v_proj(x)]
        qkv, carried = self._convolved(projected, carried, cu_seqlens)
        heads = self.state_shape[0]
        q, k, v = (t.unflatten(-1, (heads, -1)) for t in qkv)
        logits = self.gk_proj(x)
        g = F.logsigmoid(logits.to(wide(logits.dtype))) / self.gate_logit_normalizer
        o, recurrent = attend(
            q, k, v, g=g.unflatten(-1, (heads, -1)), initial_state=recurrent,
            cu_seqlens=cu_seqlens,
        )  # fmt: skip
        o = self.g_norm_swish_gate(o, self.g_proj(x).unflatten(-1, (heads, -1)))
        return self.o_proj(o.flatten(-2)), LayerState(recurrent, carried)
