"""polar's Newton-Schulz against the one inside torch.optim.Muon, and what torch's gets wrong."""

import lmo_oracle as oracle
import pytest
import torch
from suite import assert_close, assert_same_bits, relative_error
from torch.optim import _muon as torch_muon

import pyops

JORDAN = (3.4445, -4.7750, 2.0315)
SHAPES = [(64, 64), (64, 256), (256, 64), (96, 100)]


def torch_polar(g, steps=5):
    return torch_muon._zeropower_via_newtonschulz(g.clone(), JORDAN, steps, 1e-7)


def ours(g, steps=5):
    return pyops.polar(g, method="newton_schulz", steps=steps, eps=1e-7)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("steps", [1, 3, 5, 8])
def test_same_iteration(shape, steps):
    """Apart by no more than the roundings of two bfloat16 computations."""
    g = torch.randn(shape).bfloat16()
    assert_close(ours(g, steps), torch_polar(g, steps), 0.05)


@pytest.mark.parametrize("shape", SHAPES)
def test_no_less_accurate_than_torch(shape):
    g = torch.randn(shape).bfloat16()
    exact = oracle.polar(g, [JORDAN] * 5)
    assert relative_error(ours(g), exact) <= 1.25 * relative_error(torch_polar(g), exact)


def test_same_coefficients_and_eps():
    assert pyops.polar_coefficients("newton_schulz", 1) == (
        (torch_muon.DEFAULT_A, torch_muon.DEFAULT_B, torch_muon.DEFAULT_C),
    )
    assert len(pyops.polar_coefficients("newton_schulz")) == torch_muon.DEFAULT_NS_STEPS
    assert torch_muon.EPS == 1e-7


def test_torch_writes_to_its_input():
    """Ours never does; torch's normalises bfloat16 input in place: the momentum buffer if nesterov=False."""
    g = torch.randn(8, 16).bfloat16()
    before = g.clone()
    ours(g)
    assert_same_bits(g, before, "our input")
    torch_muon._zeropower_via_newtonschulz(g, JORDAN, 5, 1e-7)
    if torch.equal(g, before):
        pytest.skip(f"torch {torch.__version__} no longer writes to its input")
    assert g.float().norm().item() == pytest.approx(1.0, abs=0.02)


def test_torch_loses_huge_input():
    """Ours is the same at every scale; torch's sum of squares overflows and the step is silently zero."""
    g = torch.randn(8, 16).bfloat16()
    wanted = pyops.polar(g, method="newton_schulz")
    huge = g * 2.0**83
    assert_same_bits(pyops.polar(huge, method="newton_schulz"), wanted, "our result for huge input")
    lost = torch_polar(huge)
    if relative_error(lost, wanted) < 0.1:
        pytest.skip(f"torch {torch.__version__} no longer loses huge input")
    assert not lost.any()


def test_torch_loses_tiny_input():
    g = torch.randn(8, 16).bfloat16()
    wanted = pyops.polar(g, method="newton_schulz")
    tiny = g * 2.0**-83
    assert_same_bits(pyops.polar(tiny, method="newton_schulz"), wanted, "our result for tiny input")
    lost = torch_polar(tiny)
    if relative_error(lost, wanted) < 0.1:
        pytest.skip(f"torch {torch.__version__} no longer loses tiny input")
    assert lost.float().norm() < 0.1 * wanted.float().norm()


def test_vector_is_normalised_where_torch_is_off():
    g = torch.randn(1, 16)
    assert ours(g).norm().item() == pytest.approx(1.0, abs=1e-5)
    assert not 0.9 < torch_polar(g).float().norm().item() < 1.1
