"""The shared suite on polar and on the directions, and every error message of the public functions."""

import math
from pathlib import Path

import lmo_oracle as oracle
import pytest
import torch
from suite import UNIT, Case, Spec, op_suite

import pyops

NAN, INF = math.nan, math.inf


def polar_args(rows, form="auto", normalize="fro", tol=-1.0):
    """The op's arguments for the public defaults."""
    flat = [x for row in rows for x in row]

    def args(g):
        return (g, flat, [], form, oracle.COMPUTE_OF[g.dtype], normalize, 0.0, tol, 0, False)

    return args


def polar_case(name, shape, small, method="polar_express", steps=None, conditioned=False, **options):
    rows = pyops.polar_coefficients(method, steps)
    form = options.get("form", "auto")

    def gate(dtype):
        return oracle.gate(oracle.COMPUTE_OF[dtype], rows, form, dtype, conditioned)

    return Case(
        name=name,
        op="pyops::polar",
        call=lambda g: pyops.polar(g, method=method, steps=steps, **options),
        op_args=polar_args(rows, form, options.get("normalize", "fro")),
        oracle=lambda g: oracle.polar(g, rows, options.get("normalize", "fro")),
        shapes=(shape,),
        small=(small,),
        gate=gate,
        gradient_gate=gradient_gate,
    )


def gradient_gate(dtype):
    """The backward pass computes in float32 on the same inputs; only its result is rounded to the dtype."""
    return 1e-4 + 2 * UNIT[dtype]


ADAPTIVE_TOL = {
    torch.float64: 1e-10,
    torch.float32: 1e-4,
    torch.float16: 1e-3,
    torch.bfloat16: 3e-2,
}
TWELVE = pyops.polar_coefficients("polar_express", 12)

POLAR = [
    polar_case("wide", (3, 24, 56), (3, 4, 6), conditioned=True),
    polar_case("tall", (3, 72, 33), (3, 5, 4), "newton_schulz", conditioned=True),
    polar_case("square", (3, 20, 20), (3, 5, 5), steps=5),
    polar_case("gram", (3, 16, 64), (3, 4, 7), steps=8, form="gram", conditioned=True),
    polar_case("gram_tall", (3, 130, 17), (3, 7, 4), "newton_schulz", form="gram", conditioned=True),
    polar_case("schatten4", (3, 24, 56), (3, 4, 6), steps=5, normalize="schatten4", conditioned=True),
    Case(
        name="adaptive",
        op="pyops::polar",
        call=lambda g: pyops.polar(g, steps="adaptive"),
        op_args=lambda g: polar_args(TWELVE, "direct", tol=ADAPTIVE_TOL[g.dtype])(g),
        oracle=oracle.svd_factor,
        shapes=((3, 24, 56),),
        small=((3, 4, 6),),
        gate=lambda dtype: (
            ADAPTIVE_TOL[dtype] + oracle.gate(oracle.COMPUTE_OF[dtype], TWELVE[:6], "direct", dtype, True)
        ),
        gradient_gate=lambda dtype: 0.2 if dtype == torch.bfloat16 else 5e-3,
    ),
    Case(
        name="svd",
        op="pyops::polar_svd",
        call=lambda g: pyops.polar(g, method="svd"),
        op_args=lambda g: (g, 1e-7),
        oracle=oracle.svd_factor,
        shapes=((3, 24, 56),),
        small=((3, 4, 6),),
        gate=lambda dtype: 1e-13 + UNIT[dtype],
        gradient_gate=lambda dtype: 1e-13 + 2 * UNIT[dtype],
    ),
    Case(
        name="spectral_lmo",
        op="pyops::polar",
        call=lambda g: pyops.spectral_lmo(g, 3.0, method="newton_schulz"),
        op_args=polar_args(pyops.polar_coefficients("newton_schulz")),
        oracle=lambda g: (
            -3.0
            * math.sqrt(g.shape[-2] / max(g.shape[-1], 1))
            * oracle.polar(g, pyops.polar_coefficients("newton_schulz"))
        ),
        shapes=((3, 24, 56),),
        small=((3, 4, 6),),
        gate=lambda dtype: (
            UNIT[dtype]
            + oracle.gate(oracle.COMPUTE_OF[dtype], pyops.polar_coefficients("newton_schulz"), dtype=dtype)
        ),
        gradient_gate=gradient_gate,
    ),
]

EDGES = [
    ((0, 4, 5),),
    ((3, 0, 5),),
    ((3, 5, 0),),
    ((0, 0, 0),),
    ((0, 5),),
    ((5, 0),),
    ((1, 1),),
    ((1, 1, 1),),
    ((3, 1, 7),),
    ((3, 7, 1),),
    ((4, 6),),
    ((2, 1, 3, 4),),
]

g = torch.ones(2, 3)


def lmo_error(error, message, *args, function=pyops.lmo, **kwargs):
    return (lambda: function(*args, **kwargs)), error, message


def polar_error(error, message, x=g, **kwargs):
    return lmo_error(error, message, x, function=pyops.polar, **kwargs)


POLAR_ERRORS = [
    polar_error(TypeError, "g must be a torch.Tensor, got list", [[1.0]]),
    polar_error(TypeError, "g must be a torch.Tensor, got NoneType", None),
    polar_error(TypeError, "g must be float64, .* got torch.int64", torch.ones(2, 2, dtype=torch.int64)),
    polar_error(TypeError, "g must be float64, .* got torch.bool", torch.ones(2, 2, dtype=torch.bool)),
    polar_error(
        TypeError, "g must be float64, .* got torch.complex64", torch.ones(2, 2, dtype=torch.complex64)
    ),
    polar_error(TypeError, "g must be float64, .* got torch.float8_e4m3fn", g.to(torch.float8_e4m3fn)),
    polar_error(TypeError, "g must be a dense tensor, got layout torch.sparse_coo", g.to_sparse()),
    polar_error(TypeError, "g must be a dense tensor, got layout torch.sparse_csr", g.to_sparse_csr()),
    polar_error(ValueError, r"g must have at least 2 dimensions, got shape \(\)", torch.tensor(1.0)),
    polar_error(
        ValueError, r'at least 2 dimensions, got shape \(3,\); .*pyops.lmo\(g, norm="rms"\)', torch.ones(3)
    ),
    polar_error(ValueError, "method must be one of 'polar_express', .* got 'newton'", method="newton"),
    polar_error(ValueError, "method must be one of .* got None", method=None),
    polar_error(ValueError, r"coefficients=pyops.polar_coefficients\('cans'\)", method="cans"),
    polar_error(ValueError, "steps must be at least 0, got -1", steps=-1),
    polar_error(TypeError, "steps must be an integer, got 2.5", steps=2.5),
    polar_error(TypeError, "steps must be an integer, got True", steps=True),
    polar_error(TypeError, r"steps must be an integer, got a tensor of shape \(2,\)", steps=torch.ones(2)),
    polar_error(ValueError, r"compute_dtype must be .*, got a tensor of shape", compute_dtype=torch.ones(2)),
    polar_error(ValueError, r"method must be .*, got a tensor of shape \(2,\)", method=torch.ones(2)),
    polar_error(TypeError, "coefficients must be .*, got a tensor of shape", coefficients=torch.ones(2)),
    polar_error(ValueError, "steps must be an integer, None or \"adaptive\", got 'auto'", steps="auto"),
    polar_error(ValueError, "steps=.adaptive. needs .* got method", steps="adaptive", method="newton_schulz"),
    polar_error(
        ValueError,
        "steps must be the number of coefficients, 1, .* got 2",
        coefficients=[(2, -1, 0)],
        steps=2,
    ),
    polar_error(ValueError, "coefficients must be finite triples .* got", coefficients=[(1.0, 2.0)]),
    polar_error(ValueError, "coefficients must be finite triples .* got", coefficients=[(1.0, 2.0, NAN)]),
    polar_error(TypeError, "coefficients must be finite triples .* got", coefficients=[1.0, 2.0, 3.0]),
    polar_error(TypeError, "coefficients must be finite triples .* got 1.5", coefficients=1.5),
    polar_error(ValueError, "eps must be finite and at least 0, got -1", eps=-1e-7),
    polar_error(ValueError, "eps must be finite and at least 0, got nan", eps=NAN),
    polar_error(ValueError, "eps must be finite and at least 0, got inf", eps=INF),
    polar_error(TypeError, "eps must be a number, got '1e-7'", eps="1e-7"),
    polar_error(
        ValueError, "compute_dtype must be None or one of .* got torch.float16", compute_dtype=torch.float16
    ),
    polar_error(ValueError, "compute_dtype must be None or one of .* got 'tf32'", compute_dtype="tf32"),
    polar_error(ValueError, "compute_dtype must be None or one of .* got 32", compute_dtype=32),
    polar_error(ValueError, "form must be one of 'auto', 'direct', 'gram', got 'tall'", form="tall"),
    polar_error(ValueError, 'form must be "auto" or "direct" .* got "gram"', form="gram", steps="adaptive"),
    polar_error(ValueError, "normalize must be one of 'fro', 'schatten4', got 'max'", normalize="max"),
    polar_error(ValueError, "tol must be finite and at least 0, got -1", steps="adaptive", tol=-1.0),
    polar_error(ValueError, "tol must be finite and at least 0, got nan", steps="adaptive", tol=NAN),
    polar_error(ValueError, 'tol needs steps="adaptive", got tol=0.1 with steps=4', steps=4, tol=0.1),
    polar_error(ValueError, 'rcond needs method="svd", got rcond=0.1', rcond=0.1),
    polar_error(ValueError, "rcond must be finite and at least 0, got -1", method="svd", rcond=-1.0),
    polar_error(ValueError, 'steps has no meaning for method="svd", got steps=5', method="svd", steps=5),
    polar_error(ValueError, "eps has no meaning .* got eps=1.0", method="svd", eps=1.0),
    polar_error(ValueError, "form has no meaning .* got form='gram'", method="svd", form="gram"),
    polar_error(ValueError, "normalize has no meaning", method="svd", normalize="schatten4"),
    polar_error(ValueError, "compute_dtype has no meaning", method="svd", compute_dtype=torch.float32),
    polar_error(ValueError, "coefficients has no meaning", method="svd", coefficients=[(1.5, -0.5, 0.0)]),
    lmo_error(
        ValueError, "radius must be finite and at least 0, got -1", g, -1.0, function=pyops.spectral_lmo
    ),
    lmo_error(
        ValueError, "radius must be finite and at least 0, got nan", g, NAN, function=pyops.spectral_lmo
    ),
    lmo_error(
        ValueError, "radius must be finite and at least 0, got inf", g, INF, function=pyops.spectral_lmo
    ),
    lmo_error(TypeError, "radius must be a number, got '1'", g, "1", function=pyops.spectral_lmo),
    lmo_error(
        ValueError, "scale must be one of 'rms', .* got 'max'", g, scale="max", function=pyops.spectral_lmo
    ),
    lmo_error(ValueError, "steps must be at least 0, got -2", g, steps=-2, function=pyops.spectral_lmo),
    lmo_error(ValueError, r'at least 2 .*; .*pyops.lmo\(g, norm="rms"\)', g[0], function=pyops.spectral_lmo),
]

OTHERS = [str(Path(__file__).with_name(f"test_lmo_{name}.py")) for name in ("polar", "norms", "step")]
ALSO = (
    "test_error_on or test_sizes or test_extreme or test_tiny or test_constants or test_mixed or test_float64"
)
TestPolar = op_suite(Spec(POLAR, EDGES, POLAR_ERRORS, [__file__, *OTHERS], ALSO), "TestPolar")


def unit(x, dims):
    norm = x.pow(2).sum(dims, keepdim=True).sqrt()
    return x / torch.where(norm > 0, norm, 1.0)


def hides_inf(i, j, value):
    """The sign of an infinite entry is finite."""
    return math.isinf(value)


def direction_case(name, norm, factor, formula, shape=(3, 40, 70), **changes):
    options = {"norm": name, "radius": 2.0} | changes.pop("options", {})
    return Case(
        name=name,
        op="pyops::unit_direction",
        call=lambda x: pyops.lmo(x, **options),
        op_args=lambda x: (x, norm, -2.0 * factor(x)),
        oracle=lambda x: -2.0 * factor(x) * formula(x) if x.numel() else x.clone(),
        shapes=(shape,),
        small=((*shape[:1], 4, 5),),
        gate=lambda dtype: 8 * UNIT[dtype],
        second="works",
        gradient_gate=lambda dtype: 1e-6 + 2 * UNIT[dtype],
        **changes,
    )


DIRECTIONS = [
    direction_case("row", "row", lambda x: 1 / math.sqrt(x.shape[-1] or 1), lambda x: unit(x, -1)),
    direction_case("col", "col", lambda x: math.sqrt(x.shape[-2]), lambda x: unit(x, -2)),
    direction_case("euclidean", "euclidean", lambda x: 1.0, lambda x: unit(x, (-2, -1))),
    direction_case("rms", "row", lambda x: math.sqrt(x.shape[-1]), lambda x: unit(x, -1)),
    direction_case(
        "sign", "sign", lambda x: 1 / (x.shape[-1] or 1), torch.sign, differentiable=False, hides=hides_inf
    ),
    direction_case("max", "sign", lambda x: 1.0, torch.sign, differentiable=False, hides=hides_inf),
]

LMO_ERRORS = [
    lmo_error(TypeError, "norm", g),
    lmo_error(ValueError, "norm must be one of 'spectral', .* got 'nuclear'", g, norm="nuclear"),
    lmo_error(ValueError, "norm must be one of .* got None", g, norm=None),
    lmo_error(TypeError, "g must be a torch.Tensor, got float", 1.0, norm="max"),
    lmo_error(
        TypeError, "g must be float64, .* got torch.int32", torch.ones(2, 2, dtype=torch.int32), norm="sign"
    ),
    lmo_error(TypeError, "g must be a dense tensor", g.to_sparse(), norm="row"),
    lmo_error(
        ValueError, r"at least 2 .* \(3,\); .*fewer: 'rms', 'euclidean', 'max'$", torch.ones(3), norm="sign"
    ),
    lmo_error(ValueError, r"g must have at least 3 dimensions, got shape \(2, 3\)", g, norm="spectral_conv"),
    lmo_error(ValueError, r"g must have at least 3 dimensions", g, norm="spectral_conv_tap"),
    lmo_error(ValueError, "radius must be finite and at least 0, got -0.5", g, norm="row", radius=-0.5),
    lmo_error(ValueError, "radius must be finite and at least 0, got nan", g, norm="max", radius=NAN),
    lmo_error(TypeError, "radius must be a number, got None", g, norm="row", radius=None),
    lmo_error(ValueError, "normalized has no meaning for norm='rms', got", g, norm="rms", normalized=True),
    lmo_error(TypeError, "normalized must be a bool, got 1", g, norm="row", normalized=1),
    lmo_error(TypeError, "normalized must be a bool, got a tensor of shape", g, norm="row", normalized=g),
    lmo_error(ValueError, "max has no meaning for norm='col', got max=True", g, norm="col", max=True),
    lmo_error(
        ValueError, "transpose has no meaning for norm='euclidean'", g, norm="euclidean", transpose=True
    ),
    lmo_error(TypeError, "norm='row' takes no argument 'steps'", g, norm="row", steps=3),
    lmo_error(ValueError, "return_residual must be False in lmo", g, norm="spectral", return_residual=True),
    lmo_error(ValueError, "steps must be at least 0, got -3", g, norm="spectral", steps=-3),
]

TestDirection = op_suite(Spec(DIRECTIONS, EDGES, LMO_ERRORS), "TestDirection")


@pytest.mark.parametrize("norm", ["sign", "max"])
def test_sign_has_zero_gradient(norm):
    x = torch.randn(3, 4, requires_grad=True)
    (gradient,) = torch.autograd.grad(pyops.lmo(x, norm=norm).sum(), x)
    assert torch.equal(gradient, torch.zeros(3, 4))
