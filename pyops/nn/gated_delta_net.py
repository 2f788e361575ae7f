"""The layer of the gated delta rule."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pyops.nn.conv import ShortConvolution
from pyops.nn.layer import (
    DecayLayer,
    GatedRMSNorm,
    LayerState,
    attend,
    divided,
    l2_normalized,
    log_decay,
    wide,
)
from pyops.ops import _checks as checks


class GatedDeltaNet(DecayLayer):
    r"""A state that decays per head and is corrected towards v at k:

        q, k, v = conv(W_q x), conv(W_k x), conv(W_v x);   q, k <- q / |q|, k / |k|  per head
        g = -exp(A_log) softplus(W_a x + dt_bias),   beta = sigmoid(W_b x)
        S <- exp(g) S;   S <- S + k^T beta (v - k S);   o = K^(-1/2) q S
        y = W_o (RMSNorm(o) * silu(W_g x))                 (the norm over each head)

    Args:
        hidden_size: channels of x and y.
        num_heads: heads of q and k.
        head_dim: K, channels of such a head.
        expand_v: V, channels of a head of v, as a ratio to ``head_dim``.
        num_v_heads: heads of v, g and beta, a multiple of ``num_heads`` (grouped values); None: as many.
        conv_size: taps of the short convolutions.
        norm_eps: of the norm.
        device, dtype: of the parameters.

    Parameters have names and shapes of flash-linear-attention's layer: ``q_proj``, ``k_proj``, ``v_proj``,
    ``a_proj``, ``b_proj``, ``A_log``, ``dt_bias``, ``q_conv1d``, ``k_conv1d``, ``v_conv1d``, ``g_proj``,
    ``o_norm``, ``o_proj``. Initial values, as there: exp(A_log) uniform in (0, 16], softplus(dt_bias)
    log-uniform in [0.001, 0.1], ones in the norm, else those of ``nn.Linear`` and ``nn.Conv1d``; default
    sizes are its too, as is 1e-6 beside the square of |q| and |k|.

    Yang, Kautz, Hatamizadeh, "Gated Delta Networks: Improving Mamba2 with Delta Rule", ICLR 2025.

    >>> layer = GatedDeltaNet(32, num_heads=2, head_dim=8, num_v_heads=4)
    >>> x = torch.randn(1, 10, 32)
    >>> whole, _ = layer(x)
    >>> first, state = layer(x[:, :6])
    >>> second, state = layer(x[:, 6:], state)
    >>> torch.allclose(whole, torch.cat([first, second], 1), atol=1e-5), state.recurrent.shape
    (True, torch.Size([1, 4, 8, 16]))
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        num_heads: int = 6,
        head_dim: int = 256,
        expand_v: float = 2.0,
        num_v_heads: int | None = None,
        conv_size: int = 4,
        norm_eps: float = 1e-5,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        heads = num_heads if num_v_heads is None else checks.count("num_v_heads", num_v_heads)
        divided("num_v_heads", heads, "num_heads", num_heads)
        value_dim = divided("expand_v", expand_v * head_dim * heads, "num_v_heads", heads)
        factory = {"device": device, "dtype": dtype}
        super().__init__(hidden_size, (heads, head_dim, value_dim), 0.0, factory)
        self.num_heads = num_heads
        keys, values = num_heads * head_dim, heads * value_dim
        self.q_proj = nn.Linear(hidden_size, keys, bias=False, **factory)
        self.k_proj = nn.Linear(hidden_size, keys, bias=False, **factory)
        self.v_proj = nn.Linear(hidden_size, values, bias=False, **factory)
        self.a_proj = nn.Linear(hidden_size, heads, bias=False, **factory)
        self.b_proj = nn.Linear(hidden_size, heads, bias=False, **factory)
        self.g_proj = nn.Linear(hidden_size, values, bias=False, **factory)
        self.q_conv1d = ShortConvolution(keys, conv_size, **factory)
        self.k_conv1d = ShortConvolution(keys, conv_size, **factory)
        self.v_conv1d = ShortConvolution(values, conv_size, **factory)
        self.o_norm = GatedRMSNorm(value_dim, norm_eps, **factory)
        self.o_proj = nn.Linear(values, hidden_size, bias=False, **factory)
        self._draw_decays()

    def forward(
        self, x: Tensor, state: LayerState | None = None, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, LayerState]:
        recurrent, carried = self._parts(x, state, cu_seqlens)
        projected = [self.q_proj(x), self.k_proj(x), self.v_proj(x)]
        (q, k, v), carried = self._convolved(projected, carried, cu_seqlens)
        q, k = (l2_normalized(t.unflatten(-1, (self.num_heads, -1))) for t in (q, k))
        _, g = log_decay(self.a_proj(x), self.dt_bias, self.A_log)
        beta = self.b_proj(x)
        beta = beta.to(wide(beta.dtype)).sigmoid()
        values = (self.state_shape[0], -1)
        o, recurrent = attend(
            q, k, v.unflatten(-1, values), g=g, beta=beta, initial_state=recurrent,
            cu_seqlens=cu_seqlens,
        )  # fmt: skip
        o = self.o_norm(o, self.g_proj(x).unflatten(-1, values))
        return self.o_proj(o.flatten(-2)), LayerState(recurrent, carried)
