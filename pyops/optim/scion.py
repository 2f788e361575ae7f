"""Scion: steps to the minimiser of the linearised loss over a norm ball, one norm and radius per layer."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pyops.ops.lmo import NORMS, SCALES
from pyops.optim import auto
from pyops.optim.base import LmoOptimizer, Plan, Rule, mix, named, recipe
from pyops.optim.light import Folder
from pyops.optim.norms import VECTOR_NORMS, Block, blocks, boundary_, resolve

LIGHT = (False, True, "deferred")
INIT = ("boundary", "zeros", "keep")
STALL = 2.0**-7  # half the spacing of bfloat16: m + (1 - momentum) (g - m) no longer moves m


class Scion(LmoOptimizer):
    r"""Stochastic conditional gradient over norm balls.

    With d the momentum average of the gradients and lmo(d) = argmin {<d, X> : ||X|| <= 1}:

        d <- momentum d + (1 - momentum) g
        W <- (1 - lr) W + lr radius lmo(d)      constrained: W stays in the ball, lr is the weight decay
        W <-          W + lr radius lmo(d)      unconstrained

    The step does not depend on the scale of the gradients.

    Args:
        params: parameters, named parameters, or parameter groups; every argument below except ``grad_scaler``
            may be set per group (``light`` has to be the same in all). :meth:`auto_groups` makes groups for a
            model.
        lr: step size gamma, in [0, 1] when constrained.
        momentum: weight of the past in d, in [0, 1); torch's convention. 0.9 if neither is given, the paper's
            recommendation. The paper's code calls 1 - momentum ``momentum``.
        alpha: 1 - momentum, the paper's symbol, in (0, 1]. Give one of the two.
        norm: one of the norms of :func:`pyops.lmo`, or ``"auto"``: spectral for matrices, spectral_conv from
            three dimensions on, rms for vectors. ``"spectral"`` of [..., rows, cols] is a batch of matrices.
        radius: radius rho of the ball. In the paper 50 for hidden layers and 3000 for the output of a 124M
            GPT.
        constrained: which of the two updates.
        scale: for the spectral norms, as in :func:`pyops.spectral_lmo`.
        normalized, transpose: for sign, col and row (``transpose`` for spectral norms too), as in
            :func:`pyops.lmo`.
        split_sizes: cuts dimension ``split_dim`` into matrices of these sizes, each with its own ball of that
            radius (fused query, key and value). Views, no copies.
        num_heads: cuts that dimension, or each part of it, into so many equal matrices; one number or one per
            part.
        split_dim: 0 (rows, outputs) or 1 (columns, inputs).
        init: what :meth:`init_` does: ``"boundary"``, ``"zeros"`` or ``"keep"``; None: zeros for rms,
            boundary else.
        light: where the gradients live, for all groups and whatever a checkpoint says. False: in ``p.grad``,
            beside the momentum. True: nowhere; each is folded into the momentum during backward, so that one
            set of weights and one of gradients is all there is. Right under gradient accumulation, GradScaler
            (see ``grad_scaler``), clearing gradients before backward or after the step, non-finite gradients,
            and averaging by DistributedDataParallel; clipping, and clearing gradients before they were used,
            raise RuntimeError. ``"deferred"``: in ``p.grad`` until the step, which then frees them; anything
            the plain form allows.
        grad_scaler: with ``light=True``, the ``torch.amp.GradScaler`` in use, since gradients are unscaled
            when they are folded. The finite gradients of a step that it skips count towards the next step.
        method, steps, coefficients, eps, form: of the polar iteration, as in :func:`pyops.polar`. Five steps,
            as in the paper; ``steps=None`` is the method's own default.
        compute_dtype: arithmetic of its products: ``torch.bfloat16`` (as the published optimizers, whatever
            the dtype of the weights), ``torch.float32``, ``torch.float64`` or ``"bf16x3"``.
        error_if_nonfinite: raise RuntimeError for NaN or Inf in a gradient before any parameter changes.
            Without it, the plain form passes them on to the matrix concerned, and the light form leaves the
            parameter concerned and its momentum as they were.
        stochastic_rounding: round bfloat16 and float16 weights up or down at random, with the right mean, so
            that steps smaller than their spacing are not lost.
        seed: of the stochastic rounding; the state dict holds it and the step.

    Raises:
        TypeError: for complex, integer or sparse parameters.
        ValueError: for a setting outside what is listed, or one that does not fit a parameter's shape, naming
            it.

    State: ``momentum_buffer``, in the shape and dtype of the gradient. ``differentiable`` and ``capturable``
    are not supported.

    Pethick, Xie, Antonakopoulos, Zhu, Silveti-Falls, Cevher, "Training Deep Learning Models with
    Norm-Constrained LMOs", ICML 2025.

    >>> model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    >>> opt = Scion(Scion.auto_groups(model, hidden=2.0, output=8.0), lr=0.1)
    >>> opt.init_()
    >>> model(torch.randn(5, 8)).square().mean().backward()
    >>> opt.step()
    >>> [group["norm"] for group in opt.param_groups]
    ['spectral', 'rms', 'sign']
    """

    def __init__(
        self,
        params: Iterable,
        lr: float | Tensor = 1e-3,
        momentum: float | None = None,
        *,
        alpha: float | None = None,
        norm: str = "auto",
        radius: float = 1.0,
        constrained: bool = True,
        scale: str = "rms",
        normalized: bool | None = None,
        transpose: bool = False,
        split_sizes: Sequence[int] | None = None,
        num_heads: int | Sequence[int] | None = None,
        split_dim: int = 0,
        init: str | None = None,
        light: bool | str = False,
        grad_scaler: torch.amp.GradScaler | None = None,
        method: str = "polar_express",
        steps: int | None = 5,
        coefficients: Sequence[Sequence[float]] | None = None,
        eps: float = 0.0,
        form: str = "auto",
        compute_dtype: torch.dtype | str = torch.bfloat16,
        error_if_nonfinite: bool = False,
        stochastic_rounding: bool = False,
        seed: int = 0,
    ):
        defaults = {
            "lr": lr,
            "momentum": momentum_from(momentum, alpha),
            "norm": norm,
            "radius": radius,
            "constrained": constrained,
            "scale": scale,
            "normalized": normalized,
            "transpose": transpose,
            "split_sizes": split_sizes,
            "num_heads": num_heads,
            "split_dim": split_dim,
            "init": init,
            "light": light,
            "method": method,
            "steps": steps,
            "coefficients": coefficients,
            "eps": eps,
            "form": form,
            "compute_dtype": compute_dtype,
            "error_if_nonfinite": error_if_nonfinite,
            "stochastic_rounding": stochastic_rounding,
            "seed": seed,
            "step": 0,
        }
        if grad_scaler is not None and light is not True:
            raise ValueError(
                "grad_scaler is for light=True; otherwise scaler.step(optimizer) is all it takes"
            )
        self.grad_scaler = grad_scaler
        self._folder = Folder(self)
        super().__init__(params, defaults)
        if norm != "auto" and norm not in NORMS:  # an error even where every group has its own
            raise ValueError(f"norm must be auto or one of {', '.join(NORMS)}, got {norm!r}")

    # Groups

    @staticmethod
    def auto_groups(model: nn.Module, **settings: Any) -> list[dict[str, Any]]:
        """Parameter groups for a model, by the types of its modules; see :func:`pyops.optim.auto.groups`."""
        return auto.groups(model, **settings)

    def summary(self, model: nn.Module | None = None) -> str:
        """Every parameter's shape, norm, radius and ||W|| / radius; see :func:`pyops.optim.auto.summary`."""
        return auto.summary(self, model)

    def ball_ratios(self) -> dict[str, float]:
        """||W|| / radius of every parameter by name, in the norm of its group: at most 1 inside the ball.

        Kernels are measured tap by tap. Singular values are computed: not for every step of a run.
        """
        return auto.ratios(self)

    @torch.no_grad()
    def init_(self, generator: torch.Generator | None = None) -> None:
        """Draws every parameter anew on the boundary of its ball, as the constrained form wants it to start.

        Semi-orthogonal matrices (kernels: taps) for the spectral norms, random signs for sign and max,
        normalised Gaussian columns, rows or vectors for col, row and euclidean, zeros for rms; each times its
        factor and radius, drawn in float64. Groups with ``init="keep"`` stay as they are.

        Args:
            generator: source of the random numbers, on the parameters' device.
        """
        for group in self.param_groups:
            for _, p in named(group):
                init = group["init"] or ("zeros" if resolve(group["norm"], p.dim()) == "rms" else "boundary")
                if init == "zeros":
                    p.zero_()
                elif init == "boundary":
                    auto.on_whole(p, boundary_, self._blocks(group, p.shape), group["radius"], generator)

    def _canonical(self, group: dict[str, Any]) -> dict[str, Any]:
        if "alpha" in group:
            group["momentum"] = momentum_from(group.get("momentum"), group.pop("alpha"))
        return super()._canonical(group)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        half = [name for name, p in named(group) if p.dtype in (torch.bfloat16, torch.float16)]
        if half and 1 - group["momentum"] < STALL:
            warnings.warn(
                f"momentum={group['momentum']} is more than the 16 bits of {half[0]} can average: the buffer "
                "stops moving above 1 - 2^-7",
                stacklevel=2,
            )
        self._folder.watch(group)

    def _check_group(self, group: dict[str, Any]) -> None:
        lr, norm = float(group["lr"]), group["norm"]
        if not 0 <= lr < math.inf or (group["constrained"] and lr > 1):
            raise ValueError(f"lr must be at least 0, and at most 1 when constrained, got {lr}")
        if not 0 <= group["momentum"] < 1:
            raise ValueError(f"momentum must be in [0, 1), got {group['momentum']}")
        if norm != "auto" and norm not in NORMS:
            raise ValueError(f"norm must be auto or one of {', '.join(NORMS)}, got {norm!r}")
        if not 0 <= group["radius"] < math.inf:
            raise ValueError(f"radius must be finite and at least 0, got {group['radius']}")
        if group["scale"] not in SCALES:
            raise ValueError(f"scale must be one of {', '.join(SCALES)}, got {group['scale']!r}")
        if group["normalized"] is not None and norm not in ("sign", "col", "row"):
            raise ValueError(f"normalized has no meaning for norm={norm!r}, got {group['normalized']!r}")
        if group["transpose"] and norm in VECTOR_NORMS:
            raise ValueError(f"transpose has no meaning for norm={norm!r}, got True")
        if group["init"] not in (None, *INIT):
            raise ValueError(f"init must be None or one of {', '.join(INIT)}, got {group['init']!r}")
        if group["light"] not in LIGHT:
            raise ValueError(f"light must be one of {LIGHT}, got {group['light']!r}")
        if group["light"] != self.defaults["light"]:
            raise ValueError(f"light must be the same in every group, got {group['light']!r}")
        self._recipe(group)

    def _recipe(self, group: dict[str, Any]):
        coefficients = group["coefficients"]
        steps = None if coefficients is not None else group["steps"]
        return recipe(
            group["method"], steps, coefficients, group["form"], group["compute_dtype"], group["eps"]
        )

    def _blocks(self, group: dict[str, Any], shape: torch.Size) -> tuple[Block, ...]:
        return blocks(shape, group)

    def _plan(self, group: dict[str, Any]) -> Plan:
        lr = float(group["lr"])
        seed = mix(group["seed"], group["step"]) if group["stochastic_rounding"] else -1
        rule = Rule(self._recipe(group), group["momentum"], False, seed)
        return Plan(rule, 1 - lr if group["constrained"] else 1.0, lr * group["radius"])

    # The step

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """GradScaler then leaves unscaling and skipping to step(), by setting grad_scale and found_inf."""
        return self.param_groups[0]["light"] is True

    def _begin(self) -> bool:
        if self.param_groups[0]["light"] is not True:
            return True
        self._folder.agree()
        if hasattr(self, "found_inf"):
            if self.grad_scaler is None:
                raise RuntimeError(
                    "Scion(light=True) unscales gradients as they come: give it grad_scaler=scaler"
                )
            if getattr(self, "grad_scale", None) is None:  # the user has called scaler.unscale_
                self._folder.rescale(self.grad_scaler.get_scale())
            if float(self.found_inf):
                self._folder.skip()
                return False
        return True

    def _end(self) -> None:
        light = self.param_groups[0]["light"]
        if light is True:
            self._folder.release()
        for group in self.param_groups:
            group["step"] += 1
            if light == "deferred":
                for p in group["params"]:
                    p.grad = None

    def _gradient(self, group: dict[str, Any], p: Tensor) -> Tensor | None:
        return self._folder.gradient(p) if group["light"] is True else p.grad

    def _sources(self, group: dict[str, Any], p: Tensor, g: Tensor) -> tuple[Tensor, Tensor | None] | None:
        if group["light"] is not True:
            return super()._sources(group, p, g)
        average = self._folder.source(p, g)
        return None if average is None else (average, None)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch. In the light form RuntimeError where a gradient is waiting for its step."""
        self._folder.clear()
        super().zero_grad(set_to_none)

    # State

    def state_dict(self) -> dict[str, Any]:
        """As in torch. In the light form only between step and backward (else RuntimeError)."""
        if self._folder.waiting():
            raise RuntimeError(
                "Scion(light=True): state_dict between backward and step would hold half a step"
            )
        return super().state_dict()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "_folder" not in self.__dict__:  # unpickled
            self.grad_scaler, self._folder = None, Folder(self)
        self._folder.forget()
        for group in self.param_groups:
            group["light"] = self.defaults[
                "light"
            ]  # where gradients live is this optimizer's, not a checkpoint's
            self._folder.watch(group)


def momentum_from(momentum: float | None, alpha: float | None) -> float:
    """momentum, or 1 - alpha.

    Raises:
        ValueError: when both are given, or alpha is not in (0, 1].
    """
    if alpha is None:
        return 0.9 if momentum is None else momentum
    if momentum is not None:
        raise ValueError(
            f"give momentum or alpha, which is 1 - momentum, not both: got {momentum} and {alpha}"
        )
    if not 0 < alpha <= 1:
        raise ValueError(f"alpha must be in (0, 1], got {alpha}")
    return 1 - alpha


__all__ = ["Scion"]
