"""The short causal convolution that comes before a recurrence, and the inputs it carries along."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pyops.ops import _checks as checks
from pyops.ops import linear_attention as op
from pyops.reference.linear_attention import checked_bounds

Factory = dict[str, Any]


def _autocast(x: Tensor) -> bool:
    """Whether autocast chooses the dtype of products with x."""
    device = x.device.type
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def check_input(x: Any, channels: int, parameter: Tensor) -> None:
    """x must be [B, T, channels], and what the parameters can be multiplied with.

    Raises:
        TypeError, ValueError: naming x.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"x must be a torch.Tensor, got {type(x).__name__}")
    if x.ndim != 3 or x.shape[-1] != channels:
        raise ValueError(f"x must be [B, T, {channels}], got shape {tuple(x.shape)}")
    if x.device != parameter.device:
        raise ValueError(f"x must be on the device of the parameters, {parameter.device}, got {x.device}")
    if x.dtype != parameter.dtype and not (_autocast(x) and x.is_floating_point()):
        raise TypeError(f"x must have the dtype of the parameters, {parameter.dtype}, got {x.dtype}")


def check_state(name: str, state: Any, shape: tuple[int, ...], x: Tensor) -> None:
    """A floating tensor of that shape on x's device.

    Raises:
        TypeError, ValueError: naming it.
    """
    if not isinstance(state, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(state).__name__}")
    if tuple(state.shape) != shape:
        raise ValueError(f"{name} must be {shape}, got shape {tuple(state.shape)}")
    if not state.is_floating_point():
        raise TypeError(f"{name} must be floating, got {state.dtype}")
    if state.device != x.device:
        raise ValueError(f"{name} must be on the device of x, {x.device}, got {state.device}")


def sequences(x: Tensor, cu_seqlens: Any) -> int:
    """N, the number of sequences in x [B, T, ...].

    Raises:
        TypeError, ValueError: naming cu_seqlens, or x where its batch is not 1 although cu_seqlens is given.
            Values are looked at on the CPU only; elsewhere that would wait for the device.
    """
    count = op._sequences(cu_seqlens, x, "x")
    if cu_seqlens is not None and x.device.type == "cpu" and not torch.compiler.is_compiling():
        checked_bounds(cu_seqlens, x.shape[1])
    return count


class ShortConvolution(nn.Module):
    r"""Causal convolution over T, each channel by itself, with silu after it:

        y_t = silu(bias + sum_{j=0}^{W-1} weight[:, 0, j] x_{t - (W - 1) + j})

    Args:
        hidden_size: channels D.
        kernel_size: taps W, at least 1.
        bias: whether there is one.
        activation: ``"silu"`` or None.
        device, dtype: of the parameters.

    Parameters, as those of a depthwise ``nn.Conv1d``: ``weight`` [D, 1, W] and ``bias`` [D]; drawn as there,
    uniformly in ±W^(-1/2).

    Poli et al. 2023, "Hyena Hierarchy"; Gu, Dao 2023, "Mamba".

    >>> conv = ShortConvolution(8, kernel_size=4)
    >>> x = torch.randn(2, 5, 8)
    >>> whole, _ = conv(x)
    >>> first, state = conv(x[:, :3])
    >>> second, state = conv(x[:, 3:], state)
    >>> torch.allclose(whole, torch.cat([first, second], 1), atol=1e-6), state.shape
    (True, torch.Size([2, 3, 8]))
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        hidden_size: int,
        kernel_size: int = 4,
        bias: bool = False,
        activation: str | None = "silu",
        *,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        if checks.count("kernel_size", kernel_size) == 0:
            raise ValueError("kernel_size must be at least 1, got 0")
        if activation not in ("silu", None):
            raise ValueError(f"activation must be 'silu' or None, got {activation!r}")
        self.hidden_size = checks.count("hidden_size", hidden_size)
        self.kernel_size = kernel_size
        self.activation = activation
        factory: Factory = {"device": device, "dtype": dtype}
        self.weight = nn.Parameter(torch.empty(hidden_size, 1, kernel_size, **factory))
        self.bias = nn.Parameter(torch.empty(hidden_size, **factory)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws weight and bias uniformly in ±W^(-1/2)."""
        bound = 1 / math.sqrt(self.kernel_size)
        for p in (self.weight, self.bias):
            if p is not None:
                nn.init.uniform_(p, -bound, bound)

    def extra_repr(self) -> str:
        return (
            f"{self.hidden_size}, kernel_size={self.kernel_size}, bias={self.bias is not None}, "
            f"activation={self.activation!r}"
        )

    def forward(
        self, x: Tensor, state: Tensor | None = None, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Convolves x; the parameters and x have one dtype, or autocast chooses.

        Args:
            x: [B, T, D].
            state: the W - 1 inputs before x, [N, W - 1, D]; None is zeros. N = B, or the number of sequences.
            cu_seqlens: [N + 1], int32 or int64: x is N sequences one after another, in a batch of one.
                Nothing crosses their borders, and an empty sequence leaves its state as it is.

        Returns:
            (y, state): y [B, T, D]; the last W - 1 inputs [N, W - 1, D] in x's dtype, a copy.

        Raises:
            TypeError, ValueError: naming the argument, what was received and what is wanted.
        """
        check_input(x, self.hidden_size, self.weight)
        carried = self.kernel_size - 1
        shape = (sequences(x, cu_seqlens), carried, self.hidden_size)
        if state is None:
            state = x.new_zeros(shape)
        check_state("state", state, shape, x)
        state, length = state.to(x.dtype), x.shape[1]
        if cu_seqlens is None:
            # Its own memory: a view of the row would keep x alive and alias what the backward pass needs.
            last = torch.cat([state, x[:, max(length - carried, 0) :]], 1)
            last = last[:, last.shape[1] - carried :].contiguous()
            return self._convolve(torch.cat([state, x], 1)), last
        # Every sequence behind its own state, in one row: sequence n moves up by (n + 1) (W - 1).
        count, starts = shape[0], cu_seqlens[:-1].long()
        n = torch.arange(count, device=x.device)
        t = torch.arange(length, device=x.device)
        tokens = t + torch.searchsorted(cu_seqlens.long(), t, right=True) * carried
        taps = torch.arange(carried, device=x.device)
        states = (starts + n * carried)[:, None] + taps
        row = x.new_empty(length + count * carried, self.hidden_size)
        row.index_copy_(0, tokens, x[0]).index_copy_(0, states.flatten(), state.flatten(0, 1))
        last = (cu_seqlens[1:].long() + n * carried)[:, None] + taps
        return self._convolve(row[None]).index_select(1, tokens - carried), row[last]

    def _convolve(self, x: Tensor) -> Tensor:
        """y [B, T, D] of x [B, W - 1 + T, D]."""
        if x.shape[1] < self.kernel_size:
            return x[:, :0]
        if (
            x.shape[1] == self.kernel_size and x.dtype == self.weight.dtype and not _autocast(x)
        ):  # one token, as in decoding: a convolution costs 4 times as much to set up as this sum to take
            dtype = torch.promote_types(x.dtype, torch.float32)
            y = (x.to(dtype) * self.weight[:, 0].mT).sum(1, keepdim=True)
            y = (y if self.bias is None else y + self.bias).to(x.dtype)
            return F.silu(y) if self.activation else y
        # As an image of one row in channels-last order, which oneDNN takes without a copy: about 8 times as
        # fast as conv1d in a forward pass (one AVX-512 core).
        image = x.transpose(1, 2).unsqueeze(2)
        y = F.conv2d(image, self.weight.unsqueeze(2), self.bias, groups=self.hidden_size)
        y = y.squeeze(2).transpose(1, 2)
        return F.silu(y) if self.activation else y
