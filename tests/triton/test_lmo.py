"""The Triton kernels of the spectral step against float64, by the interpreter and on a GPU."""

import math

import probes
import pytest
import torch
from pyops.triton_kernels import lmo

import pyops
from pyops.reference import lmo as reference

PE5, PE8 = ([v for row in pyops.polar_coefficients("polar_express", k) for v in row] for k in (5, 8))
NS5 = [v for row in pyops.polar_coefficients("newton_schulz", 5) for v in row]
TAYLOR = [1.875, -1.25, 0.375] * 12  # slow: how many steps it takes shows the smallest singular value
RESTARTS = [1, 3, 5, 7]
# Unit roundoff of what the operands keep; bf16x3 keeps 16 bits of each.
ROUNDOFF = {"float64": 1.1e-16, "float32": 6e-8, "bf16x3": 2.0**-17, "bfloat16": 2e-3, "float16": 4.9e-4}
COMPUTES = list(ROUNDOFF)


def polar(
    run, g, coefficients=NS5, form="direct", compute="float32", *, restarts=RESTARTS, normalize="fro",
    eps=0.0, tol=-1.0, min_steps=0, residual=False,
):  # fmt: skip
    """The launcher's (p, residual, steps); the input must come back unchanged."""
    result, args = run(
        lmo.polar, g, coefficients, restarts, form, compute, normalize, eps, tol, min_steps, residual
    )
    assert torch.equal(args[0].nan_to_num(7.0), g.nan_to_num(7.0)), "the input was written to"
    p = result[0]
    assert p.shape == g.shape and p.dtype == g.dtype and p.is_contiguous()
    return result


def oracle(g, coefficients, normalize="fro", eps=0.0):
    """The polynomial on the singular values of g / max(||g||_F, eps), in float64."""
    x = g.double()
    amax = x.abs().amax((-2, -1), keepdim=True).clamp(min=1e-320)
    x = x / amax
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=eps / amax.clamp(min=1e-300))
    u, s, vh = torch.linalg.svd(x, full_matrices=False)
    if normalize == "schatten4":
        s = s / (s**4).sum(-1, keepdim=True) ** 0.25
    for a, b, c in zip(*[iter(coefficients)] * 3, strict=True):
        s = a * s + b * s**3 + c * s**5
    return (u * s[..., None, :]) @ vh


def error(p, exact):
    return ((p.double() - exact).norm() / exact.norm()).item()


def gate(compute, coefficients, dtype=torch.float64, conditioned=True):
    """20 u sqrt(k), or u/2 times the slope at zero: what rounding in the first step may grow to. That bound
    says nothing in 16 bits, so it is cut at what a well-conditioned and a hard matrix may show.
    """
    u, slopes = ROUNDOFF[compute], coefficients[::3]
    grown = min(0.5 * u * math.prod(slopes), 0.05 if conditioned else 0.8)
    return max(20 * u * math.sqrt(len(slopes)), grown) + torch.finfo(dtype).eps


def spectrum(kind, n, m):
    """n x m with a given spectrum, random singular vectors."""
    i = torch.arange(n, dtype=torch.float64)
    s = {
        "1/i": 1 / (i + 1),
        "1e3": 10 ** (-3 * i / (n - 1)),
        "1e6": 10 ** (-6 * i / (n - 1)),
        "rank": 1.0 * (i < n // 4),
    }
    u = torch.linalg.qr(torch.randn(n, n, dtype=torch.float64)).Q
    v = torch.linalg.qr(torch.randn(m, n, dtype=torch.float64)).Q
    return (u * s[kind]) @ v.mT


@pytest.mark.parametrize("compute", COMPUTES)
@pytest.mark.parametrize(
    ("shape", "form"),
    [
        ((2, 40, 100), "direct"),
        ((2, 40, 100), "gram"),
        ((70, 33), "gram"),
        ((70, 70), "direct"),
        ((3, 5, 6), "direct"),
    ],
)
def test_against_the_polynomial_of_the_singular_values(run, compute, shape, form):
    g = torch.randn(shape, dtype=torch.float64 if compute == "float64" else torch.float32)
    p, residual, steps = polar(run, g, PE5, form, compute)
    assert error(p, oracle(g, PE5)) <= gate(compute, PE5, g.dtype, conditioned=shape[-2] != shape[-1])
    assert residual.shape == steps.shape == (0,)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("compute", ["float64", "bf16x3", "bfloat16"])
def test_every_dtype_in_and_out(run, dtype, compute):
    g = torch.randn(24, 50).to(dtype)
    p, _, _ = polar(run, g, NS5, "direct", compute)
    assert error(p, oracle(g, NS5)) <= gate(compute, NS5, dtype)


@pytest.mark.parametrize("kind", ["1/i", "1e3", "1e6", "rank"])
@pytest.mark.parametrize(
    ("compute", "form"),
    [("float32", "direct"), ("bf16x3", "direct"), ("bfloat16", "direct"), ("bfloat16", "gram")],
)
def test_hard_spectra(run, kind, compute, form):
    g = spectrum(kind, 32, 96).float()
    for coefficients in (PE5, PE8) if form == "direct" else (PE5,):
        p, _, _ = polar(run, g, coefficients, form, compute)
        assert error(p, oracle(g, coefficients)) <= gate(compute, coefficients, conditioned=False)


@pytest.mark.parametrize("compute", ["float64", "float32"])
def test_gram_without_and_with_restarts(run, compute):
    g = torch.randn(40, 150, dtype=torch.float64)
    exact = oracle(g, NS5)
    for restarts in ([], [5], [2], [2, 4], [1, 2, 3, 4]):
        p, _, _ = polar(run, g, NS5, "gram", compute, restarts=restarts)
        assert error(p, exact) <= 10 * gate(compute, NS5)


def test_auto_is_gram_from_the_aspect_on(run):
    cases = ((128, 224), "gram"), ((128, 223), "direct"), ((224, 128), "gram"), ((112, 224), "direct")
    for shape, form in cases:
        g = torch.randn(shape)
        auto, chosen, other = (
            polar(run, g, NS5[:6], f, "bfloat16", restarts=[2])[0]
            for f in ("auto", form, "direct" if form == "gram" else "gram")
        )
        assert torch.equal(auto, chosen) and not torch.equal(auto, other)


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_tall_is_the_transpose_of_wide_bit_for_bit(run, compute):
    g = torch.randn(2, 35, 80)
    wide = polar(run, g, PE5, "auto", compute)[0]
    assert torch.equal(polar(run, g.mT.contiguous(), PE5, "auto", compute)[0], wide.mT)


def test_any_strides_bit_for_bit(run):
    base = torch.randn(2, 3, 36, 90)
    expected = polar(run, base, NS5)[0]
    sliced = torch.randn(2, 3, 72, 181)[..., ::2, 1::2]
    sliced.copy_(base)
    permuted = base.permute(1, 3, 0, 2).contiguous().permute(2, 0, 3, 1)
    for view in (sliced, permuted, base.mT.contiguous().mT):
        assert not view.is_contiguous()
        assert torch.equal(polar(run, view, NS5)[0], expected)
    expanded = base[0, 0].expand(2, 36, 90)
    assert torch.equal(polar(run, expanded, NS5)[0], expected[0, 0].expand(2, 36, 90))


@pytest.mark.parametrize("compute", ["float32", "bf16x3", "bfloat16"])
def test_scale_does_not_matter(run, compute):
    g = torch.randn(20, 45)
    p = polar(run, g, PE5, "direct", compute)[0]
    for power in (2.0**100, 2.0**-100):
        assert torch.equal(polar(run, g * power, PE5, "direct", compute)[0], p)
    for factor in (1e37 / g.abs().max().item(), 1e-30, 3e-44):
        scaled = g * factor
        assert error(polar(run, scaled, PE5, "direct", compute)[0], oracle(scaled, PE5)) <= gate(
            compute, PE5, g.dtype
        )


def test_scale_does_not_matter_in_float64(run):
    g = torch.randn(20, 45, dtype=torch.float64)
    p = polar(run, g, PE5, "direct", "float64")[0]
    for factor in (2.0**1000, 2.0**-1010):
        assert torch.equal(polar(run, g * factor, PE5, "direct", "float64")[0], p)
    assert error(polar(run, g * 2.0**1000, PE5, "direct", "float32")[0], oracle(g, PE5)) <= gate(
        "float32", PE5
    )


@pytest.mark.parametrize("form", ["direct", "gram"])
@pytest.mark.parametrize("compute", COMPUTES)
def test_zero_and_non_finite_stay_in_their_matrix(run, form, compute):
    clean = torch.randn(5, 20, 40)
    clean[2] = 0.0
    g = clean.clone()
    g[0, 3, 7], g[3, 0, 0], g[4, 19, 39] = math.nan, math.inf, -math.inf
    p, residual, _ = polar(run, g, NS5, form, compute, residual=True)
    expected = polar(run, clean, NS5, form, compute)[0]
    assert p[[0, 3, 4]].isnan().all() and residual[[0, 3, 4]].isnan().all()
    assert torch.equal(p[1], expected[1]) and not p[1].isnan().any()
    assert torch.equal(p[2], torch.zeros(20, 40)) and residual[2] == 0


@pytest.mark.parametrize("compute", COMPUTES)
@pytest.mark.parametrize("shape", [(2, 1, 90), (90, 1), (1, 1)])
def test_vectors_are_normalised_exactly(run, compute, shape):
    g = torch.randn(shape, dtype=torch.float64)
    p, residual, steps = polar(run, g, PE5, "auto", compute, eps=1e9, residual=True)
    exact = g / torch.linalg.matrix_norm(g, keepdim=True)
    assert error(p, exact) <= (1e-15 if compute == "float64" else 2e-7)
    assert (residual <= 20 * ROUNDOFF[compute]).all() and (steps == 0).all() and steps.shape == shape[:-2]


def test_no_steps_and_eps(run):
    g = torch.randn(2, 12, 30)
    norm = torch.linalg.matrix_norm(g, keepdim=True)
    assert error(polar(run, g, [], compute="bfloat16")[0], (g / norm).double()) <= 2e-7
    assert error(polar(run, g, [], eps=1e3)[0], (g / 1e3).double()) <= 2e-7
    assert error(polar(run, g, NS5, eps=1e3)[0], oracle(g, NS5, eps=1e3)) <= gate("float32", NS5, g.dtype)
    tiny = g * 2.0**-80
    assert error(polar(run, tiny, [], eps=1e-20)[0], (tiny / 1e-20).double()) <= 2e-7


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 4, 6), (2, 3, 0, 7)])
def test_empty(run, shape):
    p, residual, steps = polar(run, torch.empty(shape), NS5, residual=True)
    assert p.shape == shape and residual.shape == steps.shape == shape[:-2]


@pytest.mark.parametrize("compute", ["float64", "float32", "bf16x3"])
def test_schatten4(run, compute):
    g = torch.randn(2, 30, 70, dtype=torch.float64)
    exact = oracle(g, NS5[:9], "schatten4")
    for form in ("direct", "gram"):
        p, _, _ = polar(run, g, NS5[:9], form, compute, restarts=[2], normalize="schatten4")
        assert error(p, exact) <= gate(compute, NS5[:9])
    zero = polar(run, torch.zeros(1, 8, 9), NS5, normalize="schatten4")[0]
    assert torch.equal(zero, torch.zeros(1, 8, 9))


def idempotency(p):
    x = p.double()
    a = x @ x.mT if x.shape[-2] <= x.shape[-1] else x.mT @ x
    return torch.linalg.matrix_norm(a @ a - a)


@pytest.mark.parametrize("compute", COMPUTES)
@pytest.mark.parametrize("form", ["direct", "gram"])
def test_residual_is_that_of_the_result(run, compute, form):
    g = torch.randn(2, 36, 80, dtype=torch.float64)
    p, residual, steps = polar(run, g, NS5, form, compute, residual=True)
    assert residual.dtype == torch.float64 and residual.shape == (2,) and (steps == 5).all()
    torch.testing.assert_close(
        residual, idempotency(p), rtol=8 * ROUNDOFF[compute], atol=8 * ROUNDOFF[compute] * 6
    )


@pytest.mark.parametrize(("compute", "tol"), [("float64", 1e-9), ("float32", 1e-4), ("bfloat16", 3e-2)])
def test_adaptive_stops_each_matrix_by_its_own_residual(run, compute, tol):
    g = torch.randn(3, 24, 60, dtype=torch.float64)
    g[0] = torch.linalg.qr(g[0].mT).Q.mT
    g[2] = 0.0
    p, residual, steps = polar(run, g, TAYLOR, "auto", compute, tol=tol)
    assert (residual <= tol * math.sqrt(24)).all()
    assert 0 == steps[2] < steps[0] < steps[1] < 12, "the case should stop at three different steps"
    for i, used in enumerate(steps.tolist()):
        alone, r, k = polar(run, g[i], TAYLOR[: 3 * used], "direct", compute, residual=True)
        tolerance = 1.5 * torch.finfo(torch.bfloat16).eps if compute == "bfloat16" else 0.0
        torch.testing.assert_close(p[i], alone, rtol=0.0, atol=tolerance)
        torch.testing.assert_close(residual[i], r, rtol=0.0, atol=tolerance)
        assert k == used


def test_adaptive_limits(run):
    g = torch.randn(3, 16, 30)
    p, residual, steps = polar(run, g, PE8, compute="float32", tol=0.0)
    assert (steps == 8).all() and torch.equal(p, polar(run, g, PE8)[0]) and (residual > 0).all()
    assert (polar(run, g, PE8, tol=1e9, min_steps=3)[2] == 3).all()
    g[1, 0, 0] = math.nan
    p, residual, steps = polar(run, g, PE8, tol=1e9)
    assert steps.tolist() == [0, 8, 0] and p[1].isnan().all() and not p[[0, 2]].isnan().any()


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_same_bits_again_and_in_any_batch(run, compute):
    g = torch.randn(4, 40, 90)
    p = polar(run, g, PE5, "auto", compute)[0]
    assert torch.equal(p, polar(run, g, PE5, "auto", compute)[0])
    assert torch.equal(p[2], polar(run, g[2], PE5, "auto", compute)[0])


@pytest.mark.parametrize("compute", COMPUTES)
def test_products_are_right_and_exactly_symmetric(run, compute):
    g = torch.randn(2, 75, 90, dtype=torch.float64)
    ((r, z, q, t), x, scale), _ = run(probes.products, g, compute)
    for d in (r, z, q, t):
        assert torch.equal(d, d.mT)
    u = ROUNDOFF[compute]
    x = x.double() * scale.double()[:, None, None]
    torch.testing.assert_close(
        torch.linalg.matrix_norm(x), torch.ones(2, dtype=torch.float64), rtol=2e-7, atol=0.0
    )
    assert error(r, x @ x.mT) <= 4 * u
    assert error(z, 2 * r + 3 * r @ r) <= 4 * u
    assert error(q, z + 5 * torch.eye(75, dtype=torch.float64)) <= 4 * u
    assert error(t, 2 * r + r @ z) <= 4 * u


# ---- the fused optimizer step


def step(
    run, weights, grads, momenta, norm="spectral", *, shrink=0.9, size=0.1, momentum=0.8, nesterov=False,
    decay=1.0, compute="float32", seed=-1,
):  # fmt: skip
    """lmo_step_ on copies; returns the new (weights, grads, momenta)."""
    count = len(weights)
    _, args = run(
        lmo.lmo_step_, weights, grads, momenta, norm, [shrink] * count, [size] * count, momentum, nesterov,
        decay, NS5, RESTARTS, "auto", compute, 0.0, seed,
    )  # fmt: skip
    return args[:3]


def expected_step(w, g, m, shrink, size, momentum, nesterov):
    """float64 (weight, momentum)."""
    g = g.double()
    m = g if m is None else m.double() + (1 - momentum) * (g - m.double())
    d = g + momentum * (m - g) if nesterov else m
    u = oracle(d, NS5) if d.shape[-2] > 1 else d / d.norm()
    return shrink * w.double() - size * u, m


SHAPES = [(20, 40), (40, 20), (20, 40), (3, 16, 24), (1, 30), (24, 24)]


@pytest.mark.parametrize("nesterov", [False, True])
def test_step_with_momentum(run, nesterov):
    weights, grads, momenta = ([torch.randn(s) for s in SHAPES] for _ in range(3))
    grads[1], momenta[2] = grads[1].double(), momenta[2].mT.contiguous().mT
    new_w, new_g, new_m = step(run, weights, grads, momenta, nesterov=nesterov)
    for i, (w, g, m) in enumerate(zip(weights, grads, momenta, strict=True)):
        want_w, want_m = expected_step(w, g, m, 0.9, 0.1, 0.8, nesterov)
        assert error(new_w[i], want_w) <= 1e-5, f"weight {i}"
        assert error(new_m[i], want_m) <= 1e-6, f"momentum {i}"
        assert torch.equal(new_g[i], g)


def test_light_step_keeps_the_momentum_in_the_gradient(run):
    weights, grads = ([torch.randn(s).to(torch.bfloat16) for s in SHAPES[:4]] for _ in range(2))
    new_w, new_g, _ = step(run, weights, grads, [], decay=0.5, compute="bf16x3")
    for w, g, got_w, got_g in zip(weights, grads, new_w, new_g, strict=True):
        assert error(got_w, 0.9 * w.double() - 0.1 * oracle(g, NS5)) <= 5e-3
        assert torch.equal(got_g, 0.5 * g)


@pytest.mark.parametrize("norm", ["sign", "col", "row", "euclidean"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_step_in_other_norms_is_the_reference_bit_for_bit(run, norm, dtype):
    weights, grads = ([torch.randn(s).to(dtype) for s in ((20, 40), (3, 16, 24))] for _ in range(2))
    momenta = [torch.randn(w.shape) for w in weights]
    weights[0][0, :4] = torch.tensor([1e-6, -2e-7, 3e4, -1e-5]).to(dtype)
    got = step(run, weights, grads, momenta, norm, nesterov=True, seed=11, size=1e-3)
    want = [[t.clone() for t in group] for group in (weights, grads, momenta)]
    reference.lmo_step_(
        *want, norm, [0.9] * 2, [1e-3] * 2, 0.8, True, 1.0, [], [], "auto", "float32", 0.0, 11
    )
    for a, b in zip(got, want, strict=True):
        for x, y in zip(a, b, strict=True):
            if norm == "sign":
                assert torch.equal(x, y)
            else:
                torch.testing.assert_close(x, y, rtol=2 * torch.finfo(dtype).eps, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_stochastic_rounding_keeps_the_mean(run, dtype):
    """A step below the weights' spacing moves them on average, and differs by seed, tensor and element."""
    ones = [torch.ones(64, 64).to(dtype) for _ in range(2)]
    grads = [torch.randn(64, 64) for _ in range(2)]
    spacing = torch.finfo(dtype).eps
    moved = {}
    for seed in (3, 4):
        new, _, _ = step(run, ones, grads, [], shrink=1 + spacing / 4, size=0.0, seed=seed)
        values = torch.stack([x.double() - 1 for x in new]) / spacing
        assert set(values.unique().tolist()) == {0.0, 1.0}
        assert abs(values.mean().item() - 0.25) < 4 * math.sqrt(0.25 * 0.75 / values.numel())
        moved[seed] = values
        assert not torch.equal(values[0], values[1])
    assert not torch.equal(moved[3], moved[4])
    nearest, _, _ = step(run, ones, grads, [], shrink=1 + spacing / 4, size=0.0)
    assert torch.equal(nearest[0], ones[0])


def test_step_of_an_empty_and_a_non_finite_tensor(run):
    weights, grads = ([torch.randn(s) for s in ((20, 40), (0, 5), (20, 40))] for _ in range(2))
    alone, _, _ = step(run, weights[:1], grads[:1], [])
    grads[2][0, 0] = math.nan
    new, _, _ = step(run, weights, grads, [])
    assert torch.equal(new[0], alone[0]) and new[1].shape == (0, 5) and new[2].isnan().all()


# ---- every row of the block table


@pytest.mark.slow
@pytest.mark.parametrize("compute", COMPUTES)
@pytest.mark.parametrize("form", ["direct", "gram"])
def test_large(run, compute, form):
    g = torch.randn(1040, 1900)
    p, _, _ = polar(run, g, NS5[:6], form, compute, restarts=[2])
    assert error(p, oracle(g, NS5[:6])) <= 10 * gate(compute, NS5[:6], g.dtype, conditioned=False)
