"""What the recurrent layers share: their state, their checks, the gated norm and the initial decays."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pyops.nn.conv import ShortConvolution, check_input, check_state, sequences
from pyops.ops import _checks as checks
from pyops.ops.linear_attention import linear_attention

L2_EPS = 1e-6  # beside the square of a norm; flash-linear-attention's


class LayerState(NamedTuple):
    """What a layer carries from one piece of a sequence to the next; N sequences.

    A layer never writes to the state it is given, and what it returns is fresh memory that no backward pass
    reads: it may be changed in place.

    Attributes:
        recurrent: S [N, heads, K, V], float32 (float64 in a float64 layer).
        conv: of each short convolution in the layer, its last inputs [N, conv_size - 1, channels].
    """

    recurrent: Tensor
    conv: tuple[Tensor, ...] = ()

    def detach(self) -> LayerState:
        """The same values without their history: what truncated backpropagation passes on."""
        return LayerState(self.recurrent.detach(), tuple(c.detach() for c in self.conv))


class RecurrentLayer(nn.Module):
    """Base of the layers: ``forward(x, state=None, cu_seqlens=None) -> (y, state)``."""

    def __init__(self, hidden_size: int, state_shape: tuple[int, int, int]):
        super().__init__()
        self.hidden_size = hidden_size
        self.state_shape = state_shape  # heads, K, V

    def convolutions(self) -> list[ShortConvolution]:
        """The layer's short convolutions, in the order of ``LayerState.conv``."""
        return [m for m in self.children() if isinstance(m, ShortConvolution)]

    def forward(
        self, x: Tensor, state: LayerState | None = None, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, LayerState]:
        """y [B, T, hidden_size] in x's dtype (under autocast, its), and the state after the last token.

        Pieces of a sequence, down to single tokens, give what the whole gives. Gates and the recurrent state
        are computed in float32 (float64 in a float64 layer) whatever the dtype of parameters and autocast.

        Args:
            x: [B, T, hidden_size], in the dtype of the parameters, or under autocast.
            state: what an earlier call returned; None for the start of a sequence.
            cu_seqlens: [N + 1], int32 or int64: x is N sequences of any length one after another, in a batch
                of one; the state then has N entries.

        Raises:
            TypeError, ValueError: naming the argument, what was received and what is wanted.
        """
        raise NotImplementedError

    def zero_state(self, count: int = 1) -> LayerState:
        """The state before the first token of ``count`` sequences; the same as no state."""
        p = next(self.parameters())
        return LayerState(
            p.new_zeros(count, *self.state_shape, dtype=wide(p.dtype)),
            tuple(p.new_zeros(count, c.kernel_size - 1, c.hidden_size) for c in self.convolutions()),
        )

    def reset_parameters(self) -> None:
        """Draws every parameter anew."""
        for module in self.modules():
            if isinstance(module, nn.Linear | ShortConvolution | GatedRMSNorm):
                module.reset_parameters()

    def _parts(
        self, x: Tensor, state: LayerState | None, cu_seqlens: Tensor | None
    ) -> tuple[Tensor | None, Iterable[Tensor | None]]:
        """The checked state: the recurrent part, and that of each convolution."""
        check_input(x, self.hidden_size, next(self.parameters()))
        convolutions, count = self.convolutions(), sequences(x, cu_seqlens)
        if state is None:
            return None, [None] * len(convolutions)
        if not isinstance(state, LayerState):
            raise TypeError(f"state must be a pyops.nn.LayerState, got {type(state).__name__}")
        check_state("state.recurrent", state.recurrent, (count, *self.state_shape), x)
        if len(state.conv) != len(convolutions):
            raise ValueError(f"state.conv must hold {len(convolutions)} tensors, got {len(state.conv)}")
        for i, (kept, c) in enumerate(zip(state.conv, convolutions, strict=True)):
            check_state(f"state.conv[{i}]", kept, (count, c.kernel_size - 1, c.hidden_size), x)
        return state.recurrent, state.conv

    def _convolved(
        self, inputs: Sequence[Tensor], states: Iterable[Tensor | None], cu_seqlens: Tensor | None
    ) -> tuple[Sequence[Tensor], tuple[Tensor, ...]]:
        """Each input through its convolution, and the new ``LayerState.conv``."""
        convolutions = self.convolutions()
        if not convolutions:
            return inputs, ()
        results = [
            convolution(t, state, cu_seqlens)
            for convolution, t, state in zip(convolutions, inputs, states, strict=True)
        ]
        return [y for y, _ in results], tuple(state for _, state in results)


class DecayLayer(RecurrentLayer):
    """A layer with Mamba's decays, of parameters ``dt_bias`` and ``A_log`` per head.

    Args:
        lowest: of exp(A_log) when it is drawn.
        factory: device and dtype of the parameters.
    """

    def __init__(
        self, hidden_size: int, state_shape: tuple[int, int, int], lowest: float, factory: dict[str, Any]
    ):
        super().__init__(hidden_size, state_shape)
        self.lowest = lowest
        self.dt_bias, self.A_log = (nn.Parameter(torch.empty(state_shape[0], **factory)) for _ in range(2))

    def reset_parameters(self) -> None:
        super().reset_parameters()
        self._draw_decays()

    @torch.no_grad()
    def _draw_decays(self) -> None:
        """exp(A_log) uniform in (lowest, 16], softplus(dt_bias) log-uniform in [0.001, 0.1): Mamba-2's."""
        unit = torch.rand(2, *self.dt_bias.shape, device=self.dt_bias.device)
        self.A_log.copy_((16 - (16 - self.lowest) * unit[0]).log())  # above lowest: unit is below 1
        low, high = math.log(1e-3), math.log(1e-1)
        dt = (low + (high - low) * unit[1]).exp()
        self.dt_bias.copy_(dt + (-torch.expm1(-dt)).log())  # inverse of softplus


class GatedRMSNorm(nn.Module):
    """RMSNorm(x) * weight * silu(gate), or, gate first, RMSNorm(x * silu(gate)) * weight; in float32 inside.

    Args:
        size: last dimension of x and gate.
        eps: added to the mean square.
        groups: parts of the last dimension that are normalised by themselves.
        gate_first: which of the two.
    """

    def __init__(self, size: int, eps: float, groups: int = 1, gate_first: bool = False, **factory: Any):
        super().__init__()
        self.eps, self.groups, self.gate_first = eps, groups, gate_first
        self.weight = nn.Parameter(torch.empty(size, **factory))
        self.reset_parameters()

    def extra_repr(self) -> str:
        shape = f"{self.weight.shape[0]}, eps={self.eps}"
        return f"{shape}, groups={self.groups}, gate_first={self.gate_first}"

    def reset_parameters(self) -> None:
        """Weights of one."""
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        dtype = wide(x.dtype)
        factor, y = F.silu(gate.to(dtype)), x.to(dtype)
        if self.gate_first:
            y = y * factor
        y = y.unflatten(-1, (self.groups, -1))
        y = F.rms_norm(y, y.shape[-1:], eps=self.eps).flatten(-2) * self.weight
        return (y if self.gate_first else y * factor).to(x.dtype)


def attend(q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> tuple[Tensor, Tensor]:
    """:func:`pyops.linear_attention` with the final state."""
    o, state = linear_attention(q, k, v, output_final_state=True, **arguments)
    assert isinstance(state, Tensor)
    return o, state


def divided(name: str, channels: float, by: str, parts: int) -> int:
    """channels / parts, for channels that a ratio ``name`` gave.

    Raises:
        TypeError, ValueError: naming ``by`` where parts is no positive integer, ``name`` where the channels
            are not a positive multiple of it.
    """
    if checks.count(by, parts) == 0:
        raise ValueError(f"{by} must be at least 1, got 0")
    whole = round(channels)
    if whole <= 0 or whole % parts or not math.isclose(channels, whole):
        raise ValueError(f"{name} must give a positive multiple of {by} = {parts}, got {channels:g}")
    return whole // parts


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of gates and states."""
    return torch.promote_types(dtype, torch.float32)


def l2_normalized(t: Tensor) -> Tensor:
    """t / |t| over the last dimension, computed in float32 or better."""
    wider = t.to(wide(t.dtype))
    return (wider * (wider.square().sum(-1, keepdim=True) + L2_EPS).rsqrt()).to(t.dtype)


def log_decay(a: Tensor, dt_bias: Tensor, A_log: Tensor) -> tuple[Tensor, Tensor]:
    """Mamba's step dt = softplus(a + dt_bias) and g = -exp(A_log) dt, in float32 or better."""
    dtype = wide(a.dtype)
    dt = F.softplus(a.to(dtype) + dt_bias.to(dtype))
    return dt, -A_log.to(dtype).exp() * dt
