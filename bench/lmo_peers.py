"""Other people's Newton-Schulz iterations, as they are called there. Every builder may raise Missing."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from bench.case import Impl, Runner, need

Triple = tuple[float, float, float]
HEAVYBALL_ERROR = 0.1  # its polynomial is rounded to bf16 between its terms: measured 0.06


def torch_muon(coefficients: Triple, steps: int) -> Impl:
    """torch.optim.Muon's own function. It knows single matrices: a batch is a loop, as in the optimizer."""

    def build() -> Runner:
        function = need("torch.optim._muon")._zeropower_via_newtonschulz

        def run(g: torch.Tensor) -> torch.Tensor:
            if g.ndim == 2:
                return function(g, coefficients, steps, 1e-7)
            return torch.stack([function(matrix, coefficients, steps, 1e-7) for matrix in g])

        return Runner(run)

    return Impl("torch.optim.Muon", build, note="its _zeropower_via_newtonschulz, bf16")


def pytorch_optimizer(coefficients: Triple, steps: int) -> Impl:
    def build() -> Runner:
        function = need("pytorch_optimizer.optimizer.utils.matrix").zero_power_via_newton_schulz_5
        return Runner(lambda g: function(g, num_steps=steps, weights=coefficients))

    return Impl(
        "pytorch_optimizer", build, note="zero_power_via_newton_schulz_5, bf16, batched where the input is"
    )


def pytorch_optimizer_gram(coefficients: Triple, steps: int) -> Impl:
    def build() -> Runner:
        function = need("pytorch_optimizer.optimizer.utils.matrix").zero_power_via_gram_newton_schulz
        return Runner(lambda g: function(g, num_steps=steps, weights=coefficients))

    return Impl(
        "pytorch_optimizer Gram", build, note="zero_power_via_gram_newton_schulz, its default float16"
    )


def newton_schulz(g: torch.Tensor, dtype: torch.dtype, coefficients: Triple, steps: int) -> torch.Tensor:
    """The eager form that the field shares: addmm (baddbmm for a batch) for both polynomial products."""
    a, b, c = coefficients
    x = g.to(dtype)
    if g.shape[-2] > g.shape[-1]:
        x = x.mT
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    add_product = torch.addmm if x.ndim == 2 else torch.baddbmm
    for _ in range(steps):
        gram = x @ x.mT
        x = add_product(x, add_product(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if g.shape[-2] > g.shape[-1] else x


def eager(dtype: torch.dtype, coefficients: Triple, steps: int, batched: bool) -> Impl:
    function = functools.partial(newton_schulz, dtype=dtype, coefficients=coefficients, steps=steps)
    name = f"eager {str(dtype).removeprefix('torch.')}"
    return Impl(name, lambda: Runner(function), note="baddbmm" if batched else "addmm")


def compiled(form: Impl) -> Impl:
    def build() -> Runner:
        return Runner(torch.compile(form.build().run, dynamic=False))

    return Impl(f"torch.compile of {form.name}", build, note=form.note)


def gram_newton_schulz(coefficients: Triple, steps: int) -> Impl:
    """Dao-AILab's package: its own kernels where they import, else its torch path; compiled on a GPU."""

    def build() -> Runner:
        package = need("gram_newton_schulz")
        options = {
            "ns_coefficients": [list(coefficients)] * steps,
            "gram_newton_schulz_reset_iterations": [2],
        }
        if not torch.cuda.is_available():
            return Runner(package.GramNewtonSchulz(ns_use_kernels=False, compile_kwargs=None, **options))
        try:
            return Runner(package.GramNewtonSchulz(ns_use_kernels=True, **options))
        except ImportError:
            return Runner(package.GramNewtonSchulz(ns_use_kernels=False, **options))

    return Impl("gram-newton-schulz", build, note="restart after step 2, float16 iterates")


def heavyball(steps: int, batched: bool, error: Callable) -> Impl:
    """It compiles itself. Its function for single matrices has our coefficients, that for batches its own."""
    own = (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    )

    def build() -> Runner:
        utils = need("heavyball.utils")
        function = utils.zeropower_via_newtonschulz5 if batched else utils.legacy_zeropower_via_newtonschulz5
        return Runner(lambda g: function(g, steps))

    note = "stochastic rounding to bf16" + (", its own five coefficient triples" if batched else "")
    check = functools.partial(error, coefficients=own) if batched else None
    return Impl("heavyball", build, check, HEAVYBALL_ERROR, note)
