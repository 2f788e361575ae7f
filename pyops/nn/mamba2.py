"""The layer of Mamba-2, on the recurrence that it shares with linear attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pyops.nn.conv import ShortConvolution
from pyops.nn.layer import DecayLayer, GatedRMSNorm, LayerState, attend, divided, log_decay


class Mamba2Mixer(DecayLayer):
    r"""The state space layer of Mamba-2, with u for the paper's x inside the layer:

        z, uBC, a = W_in x;   u, B, C = conv(uBC)
        dt = softplus(a + dt_bias),   g = -exp(A_log) dt
        S <- exp(g) S + B^T (dt u);   o = C S + D u
        y = W_out (RMSNorm(o * silu(z)))     (the norm over the channels of each group)

    That is linear attention with q = C, k = B, v = dt u and scale 1.

    Args:
        hidden_size: channels of x and y.
        state_size: K, channels of B and C.
        head_dim: V, channels of a head of u.
        expand: channels of u, as a ratio to ``hidden_size``; the heads are these divided by ``head_dim``.
        n_groups: heads of B and C; each serves an equal share of the heads of u.
        conv_size: taps of the short convolution.
        norm_eps: of the norm.
        device, dtype: of the parameters.

    Parameters have names and shapes of ``mamba_ssm``'s Mamba2: ``in_proj``, ``conv1d``, ``dt_bias``,
    ``A_log``, ``D``, ``norm``, ``out_proj``. Initial values, as there: exp(A_log) uniform in (1, 16],
    softplus(dt_bias) log-uniform in [0.001, 0.1], D and the norm one, else those of ``nn.Linear`` and
    ``nn.Conv1d``; default sizes are its too.

    Dao, Gu, "Transformers are SSMs: Generalized Models and Efficient Algorithms Through Structured State
    Space Duality", ICML 2024.

    >>> layer = Mamba2Mixer(32, state_size=16, head_dim=8)
    >>> x = torch.randn(1, 10, 32)
    >>> whole, _ = layer(x)
    >>> first, state = layer(x[:, :6])
    >>> second, state = layer(x[:, 6:], state)
    >>> torch.allclose(whole, torch.cat([first, second], 1), atol=1e-5), state.recurrent.shape
    (True, torch.Size([1, 8, 16, 8]))
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        state_size: int = 128,
        head_dim: int = 64,
        expand: float = 2,
        n_groups: int = 1,
        conv_size: int = 4,
        norm_eps: float = 1e-5,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        heads = divided("expand", expand * hidden_size, "head_dim", head_dim)
        divided("expand", heads, "n_groups", n_groups)
        factory = {"device": device, "dtype": dtype}
        super().__init__(hidden_size, (heads, state_size, head_dim), 1.0, factory)
        self.n_groups = n_groups
        self.inner, self.projected = heads * head_dim, n_groups * state_size
        mixed = self.inner + 2 * self.projected
        self.in_proj = nn.Linear(hidden_size, self.inner + mixed + heads, bias=False, **factory)
        self.conv1d = ShortConvolution(mixed, conv_size, bias=True, **factory)
        self.D = nn.Parameter(torch.ones(heads, **factory))
        self.norm = GatedRMSNorm(self.inner, norm_eps, n_groups, gate_first=True, **factory)
        self.out_proj = nn.Linear(self.inner, hidden_size, bias=False, **factory)
        self._draw_decays()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.ones_(self.D)

    def forward(
        self, x: Tensor, state: LayerState | None = None, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, LayerState]:
        recurrent, carried = self._parts(x, state, cu_seqlens)
        heads = self.state_shape[0]
        mixed = self.inner + 2 * self.projected
        z, uBC, a = self.in_proj(x).split([self.inner, mixed, heads], -1)
        (uBC,), carried = self._convolved([uBC], carried, cu_seqlens)
        u, B, C = uBC.split([self.inner, self.projected, self.projected], -1)
        u = u.unflatten(-1, (heads, -1))
        k, q = (t.unflatten(-1, (self.n_groups, -1)) for t in (B, C))
        dt, g = log_decay(a, self.dt_bias, self.A_log)
        v = (u * dt[..., None]).to(u.dtype)
        o, recurrent = attend(q, k, v, g=g, scale=1.0, initial_state=recurrent, cu_seqlens=cu_seqlens)
        o = (o + self.D[:, None] * u).to(u.dtype)
        return self.out_proj(self.norm(o.flatten(-2), z)), LayerState(recurrent, carried)
