"""Every row of the paper's table of norms: its constants, its ball and its dual norm."""

import math

import lmo_oracle as oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from suite import ALL_DTYPES, UNIT, assert_close, assert_same_bits

import pyops

EXACT = {"method": "svd"}


def svd_factor(g):
    u, _, vh = torch.linalg.svd(g, full_matrices=False)
    return u @ vh


def taps(g):
    """[taps, c_out, c_in] of a convolution weight."""
    return g.reshape(*g.shape[:2], -1).permute(2, 0, 1)


def flat(g):
    return svd_factor(g.reshape(len(g), -1)).reshape(g.shape)


def by_tap(g):
    return svd_factor(taps(g)).permute(1, 2, 0).reshape(g.shape)


def operator(x):
    return torch.linalg.svdvals(x).max().item()


def nuclear(x):
    return torch.linalg.svdvals(x).sum().item()


def columns(x):
    return x.norm(dim=-2)


def rows(x):
    return x.norm(dim=-1)


# Every row and option of the table: (name, options, shape, -lmo(g) for radius 1, norm of the ball, its dual).
# Shapes are d_out x d_in, or c_out x c_in x kernel.
TABLE = [
    ("spectral", {}, (6, 10), lambda g: math.sqrt(6 / 10) * svd_factor(g),
     lambda x: math.sqrt(10 / 6) * operator(x), lambda g: math.sqrt(6 / 10) * nuclear(g)),
    ("spectral", {}, (10, 6), lambda g: math.sqrt(10 / 6) * svd_factor(g),
     lambda x: math.sqrt(6 / 10) * operator(x), lambda g: math.sqrt(10 / 6) * nuclear(g)),
    ("spectral", {"max": True}, (6, 10), svd_factor, operator, nuclear),
    ("spectral", {"max": True}, (10, 6), lambda g: math.sqrt(10 / 6) * svd_factor(g),
     lambda x: math.sqrt(6 / 10) * operator(x), lambda g: math.sqrt(10 / 6) * nuclear(g)),
    ("spectral", {"normalized": False}, (6, 10), lambda g: math.sqrt(6) * svd_factor(g),
     lambda x: operator(x) / math.sqrt(6), lambda g: math.sqrt(6) * nuclear(g)),
    ("spectral", {"transpose": True}, (6, 10), lambda g: math.sqrt(10 / 6) * svd_factor(g),
     lambda x: math.sqrt(6 / 10) * operator(x), lambda g: math.sqrt(10 / 6) * nuclear(g)),
    ("spectral_conv", {}, (4, 6, 3, 2), lambda g: math.sqrt(4 / 6) / 6 * flat(g),
     lambda x: 6 * math.sqrt(6 / 4) * operator(x.reshape(4, 36)),
     lambda g: math.sqrt(4 / 6) / 6 * nuclear(g.reshape(4, 36))),
    ("spectral_conv", {}, (4, 6, 5), lambda g: math.sqrt(4 / 6) / 5 * flat(g),
     lambda x: 5 * math.sqrt(6 / 4) * operator(x.reshape(4, 30)),
     lambda g: math.sqrt(4 / 6) / 5 * nuclear(g.reshape(4, 30))),
    ("spectral_conv_tap", {}, (4, 6, 3, 2), lambda g: math.sqrt(4 / 6) / 6 * by_tap(g),
     lambda x: 6 * math.sqrt(6 / 4) * operator(taps(x)), lambda g: math.sqrt(4 / 6) / 6 * nuclear(taps(g))),
    ("spectral_conv_tap", {}, (6, 4, 2, 1, 3), lambda g: math.sqrt(6 / 4) / 6 * by_tap(g),
     lambda x: 6 * math.sqrt(4 / 6) * operator(taps(x)), lambda g: math.sqrt(6 / 4) / 6 * nuclear(taps(g))),
    ("sign", {}, (6, 10), lambda g: g.sign() / 10,
     lambda x: 10 * x.abs().max().item(), lambda g: g.abs().sum().item() / 10),
    ("sign", {"normalized": False}, (6, 10), torch.sign,
     lambda x: x.abs().max().item(), lambda g: g.abs().sum().item()),
    ("sign", {"transpose": True}, (6, 10), lambda g: g.sign() / 6,
     lambda x: 6 * x.abs().max().item(), lambda g: g.abs().sum().item() / 6),
    ("col", {}, (6, 10), lambda g: math.sqrt(6) * g / columns(g),
     lambda x: columns(x).max().item() / math.sqrt(6), lambda g: math.sqrt(6) * columns(g).sum().item()),
    ("col", {"normalized": True}, (6, 10), lambda g: math.sqrt(6) / 10 * g / columns(g),
     lambda x: 10 * columns(x).max().item() / math.sqrt(6),
     lambda g: math.sqrt(6) / 10 * columns(g).sum().item()),
    ("col", {"transpose": True}, (6, 10), lambda g: math.sqrt(10) * g / rows(g)[:, None],
     lambda x: rows(x).max().item() / math.sqrt(10), lambda g: math.sqrt(10) * rows(g).sum().item()),
    ("row", {}, (6, 10), lambda g: g / rows(g)[:, None] / math.sqrt(10),
     lambda x: math.sqrt(10) * rows(x).max().item(), lambda g: rows(g).sum().item() / math.sqrt(10)),
    ("row", {"normalized": False}, (6, 10), lambda g: g / rows(g)[:, None],
     lambda x: rows(x).max().item(), lambda g: rows(g).sum().item()),
    ("row", {"transpose": True}, (6, 10), lambda g: g / columns(g) / math.sqrt(6),
     lambda x: math.sqrt(6) * columns(x).max().item(), lambda g: columns(g).sum().item() / math.sqrt(6)),
    ("rms", {}, (10,), lambda g: g / g.square().mean().sqrt(),
     lambda x: x.square().mean().sqrt().item(), lambda g: math.sqrt(10) * g.norm().item()),
    ("rms", {}, (), torch.sign, lambda x: x.abs().item(), lambda g: g.abs().item()),
    ("euclidean", {}, (10,), lambda g: g / g.norm(), lambda x: x.norm().item(), lambda g: g.norm().item()),
    ("euclidean", {}, (6, 10), lambda g: g / g.norm(), lambda x: x.norm().item(), lambda g: g.norm().item()),
    ("max", {}, (10,), torch.sign, lambda x: x.abs().max().item(), lambda g: g.abs().sum().item()),
    ("max", {}, (6, 10), torch.sign, lambda x: x.abs().max().item(), lambda g: g.abs().sum().item()),
    ("max", {}, (), torch.sign, lambda x: x.abs().item(), lambda g: g.abs().item()),
]  # fmt: skip
table = pytest.mark.parametrize(
    ("norm", "options", "shape", "direction", "ball", "dual"),
    TABLE,
    ids=["-".join([t[0], *t[1], "x".join(map(str, t[2]))]) for t in TABLE],
)


def exact(norm):
    return EXACT if norm.startswith("spectral") else {}


@table
@pytest.mark.parametrize("radius", [1.0, 2.5])
def test_constants(norm, options, shape, direction, ball, dual, radius):
    g = torch.randn(shape, dtype=torch.float64)
    assert_close(
        pyops.lmo(g, norm=norm, radius=radius, **options, **exact(norm)), -radius * direction(g), 1e-12
    )


@table
def test_minimises_over_the_ball(norm, options, shape, direction, ball, dual):
    """On the boundary, with <g, lmo(g)> = -radius ||g||_dual, which no other point of the ball undercuts."""
    g = torch.randn(shape, dtype=torch.float64)
    x = pyops.lmo(g, norm=norm, radius=2.5, **options, **exact(norm))
    assert ball(x) == pytest.approx(2.5, rel=1e-12)
    assert (g * x).sum().item() == pytest.approx(-2.5 * dual(g), rel=1e-12)
    for _ in range(20):
        other = torch.randn(shape, dtype=torch.float64)
        assert (g * other).sum().item() * 2.5 / ball(other) >= -2.5 * dual(g) * (1 + 1e-12)


@table
@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=lambda d: str(d).removeprefix("torch."))
def test_dtypes(norm, options, shape, direction, ball, dual, dtype):
    g = torch.randn(shape, dtype=torch.float64).to(dtype)
    x = pyops.lmo(g, norm=norm, radius=2.5, **options, **exact(norm))
    assert x.dtype == dtype and x.shape == g.shape and x.is_contiguous()
    assert_close(x, -2.5 * direction(g.double()), 1e-12 + 3 * UNIT[dtype])


@table
def test_zero_and_scale(norm, options, shape, direction, ball, dual):
    zero = torch.zeros(shape)
    assert torch.equal(pyops.lmo(zero, norm=norm, **options, **exact(norm)), zero)
    g = torch.randint(1, 9, shape).float() * torch.randn(shape).sign()
    wanted = pyops.lmo(g, norm=norm, **options)
    for exponent in (-140, -60, 60, 120):
        scaled = torch.ldexp(g.double(), torch.tensor(exponent)).float()
        assert_same_bits(pyops.lmo(scaled, norm=norm, **options), wanted, f"2^{exponent}")
    assert_same_bits(pyops.lmo(g, norm=norm, radius=0.0, **options).abs(), zero, "radius 0")


@table
def test_iteration_is_the_default(norm, options, shape, direction, ball, dual):
    """Without method="svd", the Polar Express result: near the boundary, never far outside."""
    g = torch.randn(shape, dtype=torch.float64)
    x = pyops.lmo(g, norm=norm, radius=2.5, **options)
    assert ball(x) <= 2.5 * 1.002
    assert (g * x).sum().item() == pytest.approx(-2.5 * dual(g), rel=0.02)


def test_zero_rows_and_columns():
    g = torch.randn(4, 5)
    g[:, 2] = 0
    g[3] = 0
    for norm in ("row", "col"):
        x = pyops.lmo(g, norm=norm)
        assert x.isfinite().all() and not x[3].any() and not x[:, 2].any()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nonfinite_stays_in_its_row_or_column(value):
    g = torch.randn(4, 5)
    bad = g.clone()
    bad[1, 3] = value
    for norm, index in (("row", (1, slice(None))), ("col", (slice(None), 3))):
        wanted, found = pyops.lmo(g, norm=norm), pyops.lmo(bad, norm=norm)
        assert found[index].isnan().all()
        wanted[index] = found[index] = 0
        assert_same_bits(found, wanted, norm)
    for norm in ("sign", "max"):
        wanted, found = pyops.lmo(g, norm=norm), pyops.lmo(bad, norm=norm)
        assert found[1, 3].isnan() == math.isnan(value)
        wanted[1, 3] = found[1, 3] = 0
        assert_same_bits(found, wanted, norm)
    assert pyops.lmo(bad, norm="euclidean").isnan().all()


@pytest.mark.parametrize("scale", ["rms", "rms_max", "out", "none"])
@pytest.mark.parametrize("shape", [(6, 10), (10, 6), (3, 6, 10)])
def test_spectral_lmo_scales(scale, shape):
    g = torch.randn(shape, dtype=torch.float64)
    out, into = shape[-2:]
    factor = {
        "rms": math.sqrt(out / into),
        "rms_max": max(1, math.sqrt(out / into)),
        "out": math.sqrt(out),
        "none": 1,
    }
    x = pyops.spectral_lmo(g, 0.3, scale=scale, method="svd")
    assert_close(x, -0.3 * factor[scale] * svd_factor(g), 1e-12)
    y, residual = pyops.spectral_lmo(g, 0.3, scale=scale, steps=8, return_residual=True)
    assert_close(y, x, 1e-9)
    assert residual.shape == shape[:-2] and residual.max() < 1e-9


def test_conv_taps_and_reshape_differ():
    """Two oracles of two norms; ports mix them up."""
    g = torch.randn(4, 6, 3, 3)
    a, b = (pyops.lmo(g, norm=norm, **EXACT) for norm in ("spectral_conv", "spectral_conv_tap"))
    assert (a - b).norm() > 0.1 * b.norm()


def test_batches():
    """Leading dimensions of matrices, and of vectors for rms, are independent."""
    g = torch.randn(2, 3, 4, 5)
    for norm in ("spectral", "sign", "col", "row", "euclidean", "max"):
        single = torch.stack([pyops.lmo(x, norm=norm) for x in g.view(6, 4, 5)]).view(g.shape)
        assert_same_bits(pyops.lmo(g, norm=norm), single, norm)
    single = torch.stack([pyops.lmo(x, norm="rms") for x in g.reshape(-1, 5)]).view(g.shape)
    assert_same_bits(pyops.lmo(g, norm="rms"), single, "rms")


@pytest.mark.parametrize(
    "norm",
    ["spectral", "spectral_conv", "spectral_conv_tap", "sign", "col", "row", "rms", "euclidean", "max"],
)
@pytest.mark.parametrize("shape", [(0, 3, 2), (3, 0, 2), (3, 2, 0)])
def test_empty(norm, shape):
    assert pyops.lmo(torch.zeros(shape), norm=norm).shape == shape


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 6),
    st.integers(1, 6),
    st.integers(0, 999),
    st.sampled_from(["spectral", "sign", "col", "row", "euclidean", "max"]),
)
def test_dual_gap_of_any_shape(n, m, seed, norm):
    """<g, lmo(g)> = -||g||_dual for the unit ball whose norm lmo(g) attains."""
    g = torch.randn(n, m, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    duals = {
        "spectral": math.sqrt(n / m) * nuclear(g),
        "sign": g.abs().sum().item() / m,
        "col": math.sqrt(n) * columns(g).sum().item(),
        "row": rows(g).sum().item() / math.sqrt(m),
        "euclidean": g.norm().item(),
        "max": g.abs().sum().item(),
    }
    x = pyops.lmo(g, norm=norm, **exact(norm))
    assert (g * x).sum().item() == pytest.approx(-duals[norm], rel=1e-10)


def test_oracle_agrees_with_torch_svd():
    g = torch.randn(5, 9, dtype=torch.float64)
    assert_close(oracle.svd_factor(g), svd_factor(g), 1e-14)
