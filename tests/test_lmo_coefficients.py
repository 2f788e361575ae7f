"""The coefficient generator: published coefficients, and the intervals they map the singular values to."""

import math

import pytest
import torch
from lmo_oracle import apply

import pyops

# Polar Express for a lower bound of 1e-3, as published; then 1.875, -1.25, 0.375 for ever.
PUBLISHED = [
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845749493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
]
TAYLOR = [(1.875, -1.25, 0.375)]

# (rows, smallest singular value over the Frobenius norm, lower end, upper end) to the digits printed here.
NS, PE = "newton_schulz", "polar_express"
INTERVALS = [
    (NS, 3, 1.0, 0.1, 0.682, 1.134),
    (NS, 3, 1.0, 1e-2, 0.400, 1.202),
    (NS, 3, 1.0, 1e-3, 0.041, 1.202),
    (NS, 5, 1.0, 0.1, 0.682, 1.134),
    (NS, 5, 1.0, 1e-2, 0.682, 1.134),
    (NS, 5, 1.0, 1e-3, 0.471, 1.202),
    (NS, 5, 1.0, 1e-4, 0.048, 1.202),
    (NS, 6, 1.0, 1e-3, 0.682, 1.202),
    (NS, 7, 1.0, 1e-3, 0.682, 1.134),
    (NS, 8, 1.0, 1e-4, 0.682, 1.202),
    (NS, 10, 1.0, 1e-4, 0.682, 1.134),
    (PE, 5, 1.01, 0.1, 0.870, 1.124),
    (PE, 5, 1.01, 1e-2, 0.870, 1.124),
    (PE, 5, 1.01, 1e-3, 0.846, 1.124),
    (PE, 5, 1.01, 1e-4, 0.097, 1.124),
    (PE, 5, 1.0, 0.1, 0.876, 1.124),
    (PE, 5, 1.0, 1e-3, 0.876, 1.124),
    (PE, 5, 1.05, 0.1, 0.846, 1.124),
    (PE, 5, 1.05, 1e-3, 0.729, 1.124),
    (PE, 6, 1.01, 0.1, 0.997, 1.001),
    (PE, 6, 1.01, 1e-2, 0.997, 1.001),
    (PE, 6, 1.01, 1e-3, 0.994, 1.001),
    (PE, 6, 1.01, 1e-4, 0.181, 1.001),
    (PE, 10, 1.01, 1e-4, 0.994, 1.000),
    ("you", 5, 1.0, 0.1, 0.978, 1.032),
    ("you", 5, 1.0, 1e-2, 0.978, 1.032),
    ("you", 5, 1.0, 1e-3, 0.475, 1.145),
    ("you", 5, 1.0, 1e-4, 0.049, 1.145),
    ("cans", 5, 1.0, 0.1, 0.884, 1.120),
    ("cans", 5, 1.0, 1e-3, 0.884, 1.120),
    ("deepseek", 10, 1.0, 0.1, 1.000, 1.001),
    ("deepseek", 10, 1.0, 1e-3, 1.000, 1.001),
    ("deepseek", 10, 1.0, 1e-4, 1.000, 1.002),
]
SLOPES = [(NS, 3, 41), (NS, 5, 485), (NS, 6, 1670), (NS, 7, 5753), (NS, 8, 19816), (NS, 10, 235105)]
SLOPES += [(PE, 5, 976), (PE, 6, 1828), (PE, 7, 3394), (PE, 8, 6363), (PE, 10, 22371)]
SLOPES += [("you", 5, 493), ("cans", 5, 1049), ("deepseek", 10, 79263)]


def image(rows, low, high=1.0):
    """Smallest and largest value of the composition on a dense grid of [low, high]."""
    x = torch.cat(
        [
            torch.logspace(math.log10(low), math.log10(high), 40_001, dtype=torch.float64),
            torch.linspace(low, high, 40_001, dtype=torch.float64),
        ]
    ).clamp(low, high)
    y = apply(x, rows)
    return y.min().item(), y.max().item()


@pytest.mark.parametrize(("method", "steps", "safety", "low", "lower", "upper"), INTERVALS)
def test_interval(method, steps, safety, low, lower, upper):
    lowest, highest = image(pyops.polar_coefficients(method, steps, safety=safety), low)
    assert lowest == pytest.approx(lower, abs=6e-4)
    assert highest == pytest.approx(upper, abs=6e-4)


@pytest.mark.parametrize(("steps", "low", "half_width"), [(7, 1e-2, 5e-6), (7, 1e-3, 9e-6), (8, 1e-3, 2e-15)])
def test_interval_of_converged_steps(steps, low, half_width):
    lowest, highest = image(pyops.polar_coefficients("polar_express", steps), low)
    assert max(1 - lowest, highest - 1) <= 1.1 * half_width


@pytest.mark.parametrize(("method", "steps", "slope"), SLOPES)
def test_slope_at_zero(method, steps, slope):
    found = math.prod(a for a, _, _ in pyops.polar_coefficients(method, steps))
    assert found == pytest.approx(slope, abs=0.5)


def test_published_polar_express():
    found = pyops.polar_coefficients("polar_express", 12, safety=1.0)
    for mine, theirs in zip(found, PUBLISHED + 4 * TAYLOR, strict=True):
        assert mine == pytest.approx(theirs, abs=1e-6)


def test_safety_scales_every_row_until_convergence():
    plain = pyops.polar_coefficients("polar_express", 10, safety=1.0)
    safe = pyops.polar_coefficients("polar_express", 10, safety=1.01)
    for j, ((a, b, c), row) in enumerate(zip(plain, safe, strict=True)):
        s = 1.01 if j < 7 else 1.0
        assert row == pytest.approx((a / s, b / s**3, c / s**5), rel=1e-13)


def test_cans_is_the_same_recursion_without_cushion():
    """An independent check of the exchange algorithm: another group's published minimax rows."""
    from pyops.reference.lmo import minimax_quintic

    low, high = 1e-3, 1.0
    for published in pyops.polar_coefficients("cans"):
        row = minimax_quintic(low, high)
        assert row == pytest.approx(published, abs=6e-4)
        low = apply(low, [row])
        high = 2 - low


@pytest.mark.parametrize("low", [1e-4, 1e-2, 0.3, 0.9, 0.999])
def test_minimax(low):
    """Each row is the best of its form: its error is reached four times with alternating sign."""
    from pyops.reference.lmo import minimax_quintic

    row = minimax_quintic(low, 1.0)
    x = torch.linspace(low, 1.0, 200_001, dtype=torch.float64)
    error = 1 - apply(x, [row])
    largest = error.abs().max().item()
    extreme = error[error.abs() > largest * (1 - 1e-4) - 1e-15].sign()
    alternations = int((extreme[1:] != extreme[:-1]).sum()) + 1
    assert alternations == 4


@pytest.mark.parametrize("steps", [1, 3, 6, 12])
@pytest.mark.parametrize("low", [1e-6, 1e-4, 1e-2, 0.1, 0.6, 0.999])
def test_any_steps_and_lower_bound(steps, low):
    """The image is an interval around 1, narrower with every step, and enough steps reach 1."""
    rows = pyops.polar_coefficients("polar_express", steps, lower_bound=low, safety=1.0)
    lowest, highest = image(rows, low)
    assert lowest > low or low > 0.99
    assert lowest + highest == pytest.approx(2, abs=1e-6)
    fewer = image(rows[:-1], low)
    assert lowest >= fewer[0] - 1e-12
    if steps == 12:
        assert max(1 - lowest, highest - 1) < 1e-9


def test_defaults():
    assert pyops.polar_coefficients("polar_express") == pyops.polar_coefficients(
        "polar_express", 6, 1e-3, 1.01
    )
    assert pyops.polar_coefficients("newton_schulz") == ((3.4445, -4.7750, 2.0315),) * 5
    assert pyops.polar_coefficients("polar_express", 0) == ()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("jordan",), ValueError, "method must be one of .*polar_express.*, got 'jordan'"),
        ((None,), ValueError, "method must be one of .*, got None"),
        (("newton_schulz", -1), ValueError, "steps must be at least 0, got -1"),
        (("newton_schulz", 2.0), TypeError, "steps must be an integer, got 2.0"),
        (("newton_schulz", True), TypeError, "steps must be an integer, got True"),
        (("you", 4), ValueError, "steps must be 5 for method='you'.* got 4"),
        (("polar_express", 5, 0.0), ValueError, r"lower_bound must be in \(0, 1\), got 0.0"),
        (("polar_express", 5, 1.0), ValueError, r"lower_bound must be in \(0, 1\), got 1.0"),
        (("polar_express", 5, math.nan), ValueError, r"lower_bound must be in \(0, 1\), got nan"),
        (("polar_express", 5, "a"), TypeError, "lower_bound must be a number, got 'a'"),
        (("polar_express", 5, 0.1, 0.9), ValueError, "safety must be at least 1, got 0.9"),
        (("polar_express", 5, 0.1, math.nan), ValueError, "safety must be at least 1, got nan"),
    ],
)
def test_errors(arguments, error, message):
    with pytest.raises(error, match=message):
        pyops.polar_coefficients(*arguments)
