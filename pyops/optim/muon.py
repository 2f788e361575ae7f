"""Muon on the compiled step, with the signature, semantics and checkpoints of ``torch.optim.Muon``."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from pyops.optim.base import LmoOptimizer, Plan, Rule, recipe
from pyops.optim.norms import Block, cut

ADJUST = {
    "original": lambda rows, cols: math.sqrt(max(1, rows / cols)),
    "match_rms_adamw": lambda rows, cols: 0.2 * math.sqrt(max(rows, cols)),
    "spectral": lambda rows, cols: math.sqrt(rows / cols),
    "unit_rms": lambda rows, cols: math.sqrt(max(rows, cols)),
    "none": lambda rows, cols: 1.0,
}


class Muon(LmoOptimizer):
    r"""Momentum whose matrices are orthogonalised; drop-in for ``torch.optim.Muon``.

        m <- m + (1 - momentum) (g - m);  d = g + momentum (m - g) if nesterov else m
        W <- (1 - lr weight_decay) W - lr adjust(rows, cols) polar(d)

    Args:
        params, lr, weight_decay, momentum, nesterov, ns_coefficients, eps, ns_steps: as in
            ``torch.optim.Muon``, and checked: momentum in [0, 1], ns_steps in [0, 100), eps at least 0.
        adjust_lr_fn: ``None`` or ``"original"``: sqrt(max(1, rows/cols)); ``"match_rms_adamw"``: 0.2
            sqrt(max(rows, cols)); beyond torch's: ``"spectral"``: sqrt(rows/cols), ``"unit_rms"``:
            sqrt(max(rows, cols)), ``"none"``: 1.
        foreach: accepted; the step always takes all matrices in one call.
        flatten: take parameters of three and more dimensions, kernels for instance, as matrices [rows, rest].
            Without it they raise ValueError, as in torch.
        split_sizes, num_heads, split_dim, compute_dtype, error_if_nonfinite: as in
            :class:`pyops.optim.Scion`.

    Raises:
        TypeError: for complex, integer or sparse parameters.
        ValueError: for a setting outside what is listed, naming it; parameters that are not matrices.

    State: ``momentum_buffer``; state dicts load in both directions between this class and torch's. Where it
    differs: 1 x n and n x 1 matrices give exactly d/||d||, norms beyond float32's squares are handled, and a
    gradient is never overwritten.

    >>> w = torch.nn.Parameter(torch.eye(2))
    >>> opt = Muon([w], lr=0.1, weight_decay=0.0)
    >>> w.sum().backward()
    >>> opt.step()
    >>> bool(w[0, 0] < 1)
    True
    """

    def __init__(
        self,
        params: Iterable,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        foreach: bool | None = None,
        flatten: bool = False,
        split_sizes: Sequence[int] | None = None,
        num_heads: int | Sequence[int] | None = None,
        split_dim: int = 0,
        compute_dtype: torch.dtype | str = torch.bfloat16,
        error_if_nonfinite: bool = False,
    ):
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "foreach": foreach,
            "flatten": flatten,
            "split_sizes": split_sizes,
            "num_heads": num_heads,
            "split_dim": split_dim,
            "compute_dtype": compute_dtype,
            "error_if_nonfinite": error_if_nonfinite,
        }
        super().__init__(params, defaults)

    def _check_group(self, group: dict[str, Any]) -> None:
        if isinstance(group["lr"], Tensor) and group["lr"].numel() != 1:
            raise ValueError(f"lr must be one number, got a tensor of shape {tuple(group['lr'].shape)}")
        for name in ("lr", "weight_decay"):
            if not 0 <= float(group[name]) < math.inf:
                raise ValueError(f"{name} must be finite and at least 0, got {group[name]}")
        if not 0 <= group["momentum"] <= 1:
            raise ValueError(f"momentum must be in [0, 1], got {group['momentum']}")
        if group["adjust_lr_fn"] is not None and group["adjust_lr_fn"] not in ADJUST:
            raise ValueError(
                f"adjust_lr_fn must be None or one of {', '.join(ADJUST)}, got {group['adjust_lr_fn']!r}"
            )
        if isinstance(group["ns_steps"], bool) or not isinstance(group["ns_steps"], int):
            raise TypeError(f"ns_steps must be an integer, got {group['ns_steps']!r}")
        if not 0 <= group["ns_steps"] < 100:
            raise ValueError(f"ns_steps must be in [0, 100), got {group['ns_steps']}")
        if len(group["ns_coefficients"]) != 3:
            raise ValueError(f"ns_coefficients must be three numbers, got {group['ns_coefficients']}")
        self._recipe(group)

    def _recipe(self, group: dict[str, Any]):
        rows = (tuple(group["ns_coefficients"]),) * group["ns_steps"]
        return recipe("newton_schulz", None, rows, "auto", group["compute_dtype"], group["eps"])

    def _blocks(self, group: dict[str, Any], shape: torch.Size) -> tuple[Block, ...]:
        if len(shape) != 2 and not (group["flatten"] and len(shape) > 2):
            vector = "pyops.optim.Scion takes vectors too, torch.optim.AdamW is the usual choice for them"
            hint = vector if len(shape) < 2 else "flatten=True takes it as [rows, rest]"
            raise ValueError(f"Muon needs matrices, got a parameter of shape {tuple(shape)}: {hint}")
        split = group["split_sizes"], group["num_heads"], group["split_dim"]
        return _cut(shape, *split, group["adjust_lr_fn"] or "original")

    def _plan(self, group: dict[str, Any]) -> Plan:
        lr = float(group["lr"])
        rule = Rule(self._recipe(group), group["momentum"], group["nesterov"], -1)
        return Plan(rule, 1 - lr * group["weight_decay"], lr)


@functools.cache
def _cut(shape: torch.Size, split_sizes, num_heads, split_dim, adjust: str) -> tuple[Block, ...]:
    """The blocks of a flattened parameter, with torch's adjustment of the learning rate as factor."""
    result = []
    for block in cut(shape, "sign", "rms", None, False, split_sizes, num_heads, split_dim):
        rows, cols = shape[0], math.prod(shape[1:])
        size = (block.cut[2] if block.cut else shape[split_dim]) // (block.heads[1] if block.heads else 1)
        if split_dim % 2 == 0:
            rows = size
        else:
            cols = cols // shape[1] * size
        result.append(block._replace(direction="spectral", factor=ADJUST[adjust](max(rows, 1), max(cols, 1))))
    return tuple(result)
