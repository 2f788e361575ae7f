"""The shared suite on tprod and tgram, every error message, and every way of calling them."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
import tubal_oracle as oracle
from suite import ALL_DTYPES, Case, Spec, assert_close, assert_same_bits, op_suite

from pyops import tubal
from pyops.tubal import tgram, tprod

LENGTHS = [1, 2, 3, 4, 5, 7, 8, 61, 64]  # of tubes: direct, even, odd, prime, power of two
dtypes = pytest.mark.parametrize("dtype", ALL_DTYPES, ids=lambda d: str(d).removeprefix("torch."))
lengths = pytest.mark.parametrize("n3", LENGTHS)
SETTINGS = [(False, False), (True, False), (False, True), (True, True)]


def gradient_gate(dtype):
    """Gradients against float64's on the same inputs, the factor for the rounding of C's gradient."""
    return 3 * oracle.gate(16)(dtype)


def factors(batch, n1, n2, n4, n3, transpose_a=False, transpose_b=False, layout="last"):
    """Shapes of a and b."""
    a, b = (n2, n1) if transpose_a else (n1, n2), (n4, n2) if transpose_b else (n2, n4)
    if layout == "first":
        return (*batch, n3, *a), (*batch, n3, *b)
    return (*batch, *a, n3), (*batch, *b, n3)


def product_case(name, n3, sizes=(9, 12, 7), small=(2, 5, 2), transform="dft", layout="last", **transposes):
    first = layout == "first"
    ta, tb = transposes.get("transpose_a", False), transposes.get("transpose_b", False)

    def matrices(dtype):
        if transform == "dft":
            return None, None, None
        m = oracle.dct(n3).to(torch.float64 if dtype == torch.float64 else torch.float32)
        return m, m, m.mT.contiguous()

    def reference(a, b):
        if first:
            a, b = oracle.last(a), oracle.last(b)
        if transform == "dft":
            c = oracle.tprod(a, b, ta, tb)
        else:
            c = oracle.star(a, b, oracle.dct(a.shape[-1]), ta, tb)
        return oracle.first(c) if first else c

    return Case(
        name=name,
        op="pyops::tprod",
        call=lambda a, b: tprod(a, b, transform=transform, layout=layout, **transposes),
        op_args=lambda a, b: (a, b, ta, tb, first, *matrices(a.dtype)),
        oracle=reference,
        shapes=factors((3,), *sizes, n3, ta, tb, layout),
        small=factors((3,), *small, n3, ta, tb, layout),
        gate=oracle.gate(sizes[1]),
        second="works",
        gradient_gate=gradient_gate,
    )


PRODUCTS = [
    product_case("n3=4", 4),
    product_case("n3=1", 1),
    product_case("n3=2 transpose_a", 2, transpose_a=True),
    product_case("n3=3 transpose_b first", 3, transpose_b=True, layout="first"),
    product_case("n3=5 first", 5, layout="first"),
    product_case("n3=7 both", 7, transpose_a=True, transpose_b=True),
    product_case("n3=8", 8, (33, 40, 17)),
    product_case("n3=61", 61, (5, 6, 4), (1, 2, 1)),
    product_case("n3=64 first", 64, (5, 6, 4), (1, 1, 2), layout="first"),
    product_case("dct n3=6 transpose_a", 6, transform="dct", transpose_a=True),
    product_case("dct n3=5 first", 5, transform="dct", layout="first", transpose_b=True),
]

EDGES = [
    factors((), 3, 4, 5, 4),
    factors((2, 2), 3, 4, 5, 6),
    factors((), 0, 4, 5, 4),
    factors((), 3, 4, 0, 4),
    factors((0,), 3, 4, 5, 4),
    factors((2,), 0, 0, 0, 1),
    factors((), 1, 1, 1, 1),
    factors((), 1, 1, 1, 9),
    factors((3,), 1, 7, 1, 2),
    ((2, 1, 3, 4, 5), (3, 4, 2, 5)),
    ((3, 4, 5), (6, 4, 2, 5)),
]

a, b = torch.ones(2, 3, 4), torch.ones(3, 5, 4)


def error(kind, message, *args, function=tprod, **kwargs):
    return (lambda: function(*args, **kwargs)), kind, message


SPARSE = a.to_sparse()
PRODUCT_ERRORS = [
    error(TypeError, "a must be a torch.Tensor, got list", [[[1.0]]], b),
    error(TypeError, "b must be a torch.Tensor, got NoneType", a, None),
    error(TypeError, "a must be float64, .* got torch.int64", a.long(), b.long()),
    error(TypeError, "b must be float64, .* got torch.bool", a, b.bool()),
    error(TypeError, "a must be a dense tensor, got layout torch.sparse_coo", SPARSE, b),
    error(ValueError, r"a must have at least 3 dimensions, .* got shape \(3, 4\)", a[0], b),
    error(ValueError, r"b must have at least 3 dimensions, .* got shape \(4,\)", a, b[0, 0]),
    error(ValueError, r"a must have tubes .* got shape \(2, 3, 0\)", a[..., :0], b[..., :0]),
    error(ValueError, r"b must have tubes of a's length 4, got 3 in shape \(3, 5, 3\)", a, b[..., :3]),
    error(ValueError, "b must have tubes of a's length 4, got 1", a, b[..., :1]),
    error(ValueError, "b must have tubes of a's length 1, got 4", a[..., :1], b),
    error(ValueError, r"b must have 3 rows for a of .*, got 2 in shape \(2, 5, 4\)", a, b[:2]),
    error(ValueError, "b must have 2 rows .*, got 3", a, b, transpose_a=True),
    error(ValueError, "b must have 3 columns .*, got 5", a, b, transpose_b=True),
    error(ValueError, "b must have 4 rows", a, b[:2], layout="first"),
    error(
        ValueError,
        r"b must have batch dimensions that broadcast with a's \(2,\), got \(3,\)",
        a.expand(2, 2, 3, 4),
        b.expand(3, 3, 5, 4),
    ),
    error(ValueError, "b must be on the device of a, cpu, got meta", a, b.to("meta")),
    error(TypeError, "transpose_a must be a bool, got 1", a, b, transpose_a=1),
    error(TypeError, "transpose_b must be a bool, got None", a, b, transpose_b=None),
    error(ValueError, "layout must be one of 'last', 'first', got 'middle'", a, b, layout="middle"),
    error(ValueError, "layout must be one of 'last', 'first', got None", a, b, layout=None),
    error(TypeError, "order must be an integer, got 3.0", a, b, order=3.0, transform="dct"),
    error(ValueError, "order must be at least 3, got 2", a, b, order=2),
    error(ValueError, "a must have at least 4 dimensions", a, b, order=4),
    error(ValueError, "transform must be one of 'dft', 'dct', got 'fft'", a, b, transform="fft"),
    error(TypeError, 'transform must be "dft", "dct" or a matrix, got NoneType', a, b, transform=None),
    error(TypeError, "transform must be a torch.Tensor, got int", a, b, transform=[1]),
    error(ValueError, r"transform must be \(4, 4\) .* got shape \(2, 2\)", a, b, transform=np.eye(2)),
    error(TypeError, "transform must be a floating", a, b, transform=np.eye(4, dtype=np.int64)),
    error(ValueError, r"transform must be \(4, 4\) .* got shape \(3, 3\)", a, b, transform=torch.eye(3)),
    error(ValueError, "transform must be invertible", a, b, transform=torch.ones(4, 4)),
    error(ValueError, "transform must be invertible", a, b, transform=torch.arange(16.0).view(4, 4)),
    error(ValueError, "transform must be invertible", a, b, transform=torch.full((4, 4), math.nan)),
    error(TypeError, "transform must be a floating", a, b, transform=torch.eye(4).long()),
    error(ValueError, "transform must be on the device", a, b, transform=torch.eye(4, device="meta")),
    error(ValueError, "transform must have 1 matrices", a, b, transform=[torch.eye(4)] * 2),
]

EDGES_FILE = str(Path(__file__).with_name("test_tubal_edges.py"))
ALSO = "test_lengths or test_broadcast or test_sizes or test_special"
TestTprod = op_suite(Spec(PRODUCTS, EDGES, PRODUCT_ERRORS, [__file__, EDGES_FILE], ALSO), "TestTprod")


def gram_case(name, n3, sizes=(9, 7), small=(4, 2), transpose=False, layout="last"):
    first = layout == "first"

    def reference(u):
        u = oracle.last(u) if first else u
        c = oracle.tprod(u, u, transpose, not transpose)
        return oracle.first(c) if first else c

    return Case(
        name=name,
        op="pyops::tgram",
        call=lambda u: tgram(u, transpose=transpose, layout=layout),
        op_args=lambda u: (u, transpose, first),
        oracle=reference,
        shapes=((3, n3, *sizes) if first else (3, *sizes, n3),),
        small=((3, n3, *small) if first else (3, *small, n3),),
        gate=oracle.gate(max(sizes)),
        second="works",
        gradient_gate=gradient_gate,
    )


GRAMS = [
    gram_case("n3=4", 4, small=(5, 2)),
    gram_case("n3=1 transpose", 1, transpose=True),
    gram_case("n3=2 first", 2, layout="first"),
    gram_case("n3=3", 3),
    gram_case("n3=7 transpose first", 7, transpose=True, layout="first"),
    gram_case("n3=8 transpose", 8, (30, 45), transpose=True),
    gram_case("n3=61", 61, (6, 5), (1, 1)),
    gram_case("n3=64 first", 64, (5, 20), (1, 2), layout="first"),
]
GRAM_EDGES = [
    ((3, 4, 5),),
    ((2, 2, 3, 4, 5),),
    ((0, 4, 5),),
    ((0, 2, 3, 4),),
    ((1, 1, 1),),
    ((1, 1, 6),),
    ((7, 1, 2),),
]
GRAM_ERRORS = [
    error(TypeError, "u must be a torch.Tensor, got float", 1.0, function=tgram),
    error(TypeError, "u must be float64, .* got torch.int32", a.int(), function=tgram),
    error(TypeError, "u must be a dense tensor", SPARSE, function=tgram),
    error(ValueError, "u must have at least 3 dimensions", a[0], function=tgram),
    error(ValueError, "u must have tubes of at least one entry", a[..., :0], function=tgram),
    error(TypeError, "transpose must be a bool, got 0", a, transpose=0, function=tgram),
    error(ValueError, "layout must be one of", a, layout="tubes", function=tgram),
    error(ValueError, "order must be at least 3, got 2", a, order=2, function=tgram),
    error(ValueError, "u must have at least 4 dimensions", a, order=4, function=tgram),
    error(ValueError, "transform must be one of 'dft', 'dct'", a, transform="fft", function=tgram),
]
TestTgram = op_suite(Spec(GRAMS, GRAM_EDGES, GRAM_ERRORS), "TestTgram")


@dtypes
def test_edge_of_empty_sums(dtype, poison):
    """Nothing to add up: exact zeros, and zeros or empty gradients."""
    for n3 in (1, 4, 5):
        for layout in ("last", "first"):
            x, y = (
                torch.ones(s, dtype=dtype, requires_grad=True)
                for s in factors((2,), 3, 0, 5, n3, layout=layout)
            )
            c = tprod(x, y, layout=layout)
            assert torch.equal(c, torch.zeros(factors((2,), 3, 5, 0, n3, layout=layout)[0], dtype=dtype))
            assert [g.shape for g in torch.autograd.grad(c.sum(), (x, y))] == [x.shape, y.shape]
            g = tgram(x.detach(), layout=layout)
            assert torch.equal(g, torch.zeros(factors((2,), 3, 3, 0, n3, layout=layout)[0], dtype=dtype))
            assert tgram(x.detach(), transpose=True, layout=layout).numel() == 0
    x, y = torch.ones(2, 3, 4, requires_grad=True), torch.ones(3, 0, 4)
    assert torch.equal(torch.autograd.grad(tprod(x, y).sum(), x)[0], torch.zeros(2, 3, 4))


# Every tube length, transpose and layout


@dtypes
@lengths
@pytest.mark.parametrize("layout", ["last", "first"])
def test_lengths(n3, layout, dtype):
    """Odd, even and prime lengths alike, with every pair of transposes."""
    for ta, tb in SETTINGS:
        x, y = (torch.randn(s, dtype=torch.float64).to(dtype) for s in factors((2,), 6, 10, 5, n3, ta, tb))
        wanted = oracle.tprod(x.double(), y.double(), ta, tb)
        if layout == "first":
            x, y, wanted = oracle.first(x), oracle.first(y), oracle.first(wanted)
        c = tprod(x, y, transpose_a=ta, transpose_b=tb, layout=layout)
        assert c.dtype == dtype and c.is_contiguous()
        assert_close(c, wanted, oracle.gate(10)(dtype))
        largest = (c.double() - wanted).abs().max() / wanted.abs().max()
        assert largest <= {torch.float64: 1e-13, torch.float32: 1e-5}.get(dtype, 2e-2)


@pytest.mark.parametrize("n3", [13, 16, 31, 100, 127, 128, 257, 1021])
def test_lengths_long(n3):
    x, y = torch.randn(2, 3, n3, dtype=torch.float64), torch.randn(3, 2, n3, dtype=torch.float64)
    assert_close(tprod(x, y), oracle.tprod(x, y), 2e-14)
    assert_close(tprod(x.float(), y.float()), oracle.tprod(x.float().double(), y.float().double()), 2e-6)


@lengths
@pytest.mark.parametrize("layout", ["last", "first"])
def test_gradcheck_of_every_length(n3, layout):
    for ta, tb in SETTINGS[: 1 if n3 > 8 else 4]:
        shapes = (
            factors((), 1, 2, 2, n3, ta, tb, layout) if n3 <= 8 else factors((), 1, 1, 2, n3, ta, tb, layout)
        )
        x, y = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes)

        def call(x, y, ta=ta, tb=tb):
            return tprod(x, y, transpose_a=ta, transpose_b=tb, layout=layout)

        assert torch.autograd.gradcheck(call, (x, y))
        if n3 <= 8:
            assert torch.autograd.gradgradcheck(call, (x, y))


@lengths
def test_gram_gradcheck_of_every_length(n3):
    for transpose in (False, True):
        u = torch.randn(2, 1, n3, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(lambda u, t=transpose: tgram(u, transpose=t), (u,))


@pytest.mark.parametrize(
    ("batch_a", "batch_b"),
    [((), (3,)), ((3,), ()), ((2, 1), (3,)), ((1,), (4,)), ((2, 3), (2, 1)), ((1,), (1, 1))],
)
def test_broadcast(batch_a, batch_b):
    """Leading dimensions as in matmul, forward and for gradients, which are summed back."""
    for ta, tb in SETTINGS:
        x = torch.randn(factors(batch_a, 2, 3, 4, 5, ta, tb)[0], dtype=torch.float64, requires_grad=True)
        y = torch.randn(factors(batch_b, 2, 3, 4, 5, ta, tb)[1], dtype=torch.float64, requires_grad=True)
        c, wanted = tprod(x, y, transpose_a=ta, transpose_b=tb), oracle.tprod(x, y, ta, tb)
        assert_close(c, wanted, 1e-14)
        seed = torch.randn_like(c)
        for wanted_of in ((x, y), (x,), (y,)):
            found = torch.autograd.grad(c, wanted_of, seed, retain_graph=True)
            exact = torch.autograd.grad(wanted, wanted_of, seed, retain_graph=True)
            for g, e in zip(found, exact, strict=True):
                assert_close(g, e, 1e-14)


def test_gradient_of_one_factor_alone():
    """Where one factor needs no gradient, and where gradients of a shared factor add up."""
    x, y = torch.randn(2, 3, 4, dtype=torch.float64), torch.randn(3, 3, 4, dtype=torch.float64)
    for needs_x, needs_y in ((True, False), (False, True)):
        p, q = x.clone().requires_grad_(needs_x), y.clone().requires_grad_(needs_y)
        assert torch.autograd.gradcheck(tprod, (p, q))
    assert torch.autograd.gradcheck(lambda q: tprod(q, q), (y.requires_grad_(),))
    assert torch.autograd.gradgradcheck(lambda q: tprod(q, q, transpose_a=True), (y,))


def test_second_derivatives_of_broadcast_products():
    x = torch.randn(1, 2, 2, 3, dtype=torch.float64, requires_grad=True)
    y = torch.randn(2, 2, 1, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(tprod, (x, y))
    m = torch.randn(3, 3, dtype=torch.float64)
    assert torch.autograd.gradgradcheck(lambda x, y: tprod(x, y, transform=m), (x, y))


# Dtypes and transforms


@pytest.mark.parametrize(
    ("one", "other", "wanted"),
    [
        (torch.float32, torch.float64, torch.float64),
        (torch.bfloat16, torch.float32, torch.float32),
        (torch.bfloat16, torch.float16, torch.float32),
        (torch.float64, torch.complex64, torch.complex128),
        (torch.bfloat16, torch.complex64, torch.complex64),
        (torch.float32, torch.complex128, torch.complex128),
    ],
)
def test_mixed_dtypes_promote(one, other, wanted):
    x, y = torch.randn(2, 3, 4).to(one), torch.randn(3, 2, 4).to(other)
    for p, q in ((x, y), (y.mT.contiguous().mT.transpose(0, 1), x.transpose(0, 1))):
        c = tprod(p, q)
        assert c.dtype == wanted
        exact = oracle.tprod(p.to(torch.complex128), q.to(torch.complex128))
        assert (c - exact).norm() <= 2e-6 * exact.norm()


@lengths
def test_complex(n3):
    """All faces, and the T-transpose conjugates."""
    for ta, tb in SETTINGS:
        x, y = (torch.randn(s, dtype=torch.complex128) for s in factors((2,), 3, 4, 2, n3, ta, tb))
        c, wanted = tprod(x, y, transpose_a=ta, transpose_b=tb), oracle.tprod(x, y, ta, tb)
        assert c.dtype == torch.complex128 and (c - wanted).norm() <= 1e-14 * wanted.norm()
        if not (ta or tb):
            separate = torch.complex(tprod(x.real, y.real), tprod(x.real, y.imag))
            assert (tprod(x.real, y) - separate).norm() <= 1e-13 * wanted.norm()
    u = torch.randn(3, 2, n3, dtype=torch.complex128)
    for transpose in (False, True):
        wanted = oracle.tprod(u, u, transpose, not transpose)
        assert (tgram(u, transpose=transpose) - wanted).norm() <= 1e-14 * wanted.norm()


def test_complex_gradients():
    x = torch.randn(2, 2, 3, dtype=torch.complex128, requires_grad=True)
    y = torch.randn(2, 2, 3, dtype=torch.float64, requires_grad=True)
    for ta, tb in SETTINGS:
        call = lambda x, y, ta=ta, tb=tb: tprod(x, y, transpose_a=ta, transpose_b=tb)  # noqa: E731
        assert torch.autograd.gradcheck(call, (x, y)) and torch.autograd.gradgradcheck(call, (x, y))
    assert torch.autograd.gradcheck(tgram, (x,))


@dtypes
def test_matrix_transform(dtype):
    """A general invertible matrix, its inverse taken in float64."""
    m = torch.randn(5, 5, dtype=torch.float64)
    for ta, tb in SETTINGS:
        x, y = (torch.randn(s, dtype=torch.float64).to(dtype) for s in factors((2,), 4, 6, 3, 5, ta, tb))
        wanted = oracle.star(x.double(), y.double(), m, ta, tb)
        c = tprod(x, y, transform=m, transpose_a=ta, transpose_b=tb)
        gate = {torch.float64: 1e-12, torch.float32: 1e-4}.get(dtype, 2e-2)
        assert c.dtype == dtype
        assert_close(c, wanted, gate)
        f = tprod(
            oracle.first(x), oracle.first(y), transform=m, transpose_a=ta, transpose_b=tb, layout="first"
        )
        assert_close(oracle.last(f), wanted, gate)


def test_gradients_through_a_matrix_transform():
    x, y, m = torch.randn(2, 2, 3), torch.randn(2, 1, 3), torch.randn(3, 3)
    tensors = tuple(t.double().requires_grad_() for t in (x, y, m))
    for ta in (False, True):
        call = lambda x, y, m, ta=ta: tprod(x, y, transform=m, transpose_a=ta)  # noqa: E731
        assert torch.autograd.gradcheck(call, tensors)
        assert torch.autograd.gradcheck(lambda x, y, f=call: f(x, y, tensors[2].detach()), tensors[:2])


def test_transforms_may_be_arrays():
    a, b = torch.randn(2, 3, 4, 5, dtype=torch.float64), torch.randn(3, 2, 4, 5, dtype=torch.float64)
    matrices = [np.random.rand(n, n) + n * np.eye(n) for n in (4, 5)]
    tensors = [torch.from_numpy(m) for m in matrices]
    assert torch.equal(tprod(a, b, transform=matrices, order=4), tprod(a, b, transform=tensors, order=4))
    for x in (a, a.float()):
        assert torch.equal(tgram(x, transform=matrices[1]), tgram(x, transform=tensors[1]))


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize(
    ("transform", "layout", "order"),
    [("dct", "last", 3), ("dct", "first", 3), ("dft", "last", 4), ("dct", "first", 5)],
)
def test_gram_tensors_of_other_transforms_and_orders(transform, layout, order, transpose):
    u = torch.randn(3, 2, 4, 5, 2, dtype=torch.float64)
    options = {"transform": transform, "layout": layout, "order": order}
    wanted = tprod(u, u, transpose_a=transpose, transpose_b=not transpose, **options)
    assert_close(tgram(u, transpose=transpose, **options), wanted, 1e-14)


def test_dft_matrix_as_a_transform():
    """The DFT given as a complex matrix: the same product, complex."""
    n = 6
    matrix = torch.fft.fft(torch.eye(n, dtype=torch.complex128), dim=0)
    x, y = torch.randn(3, 4, n, dtype=torch.float64), torch.randn(2, 4, n, dtype=torch.float64)
    c = tprod(x, y, transform=matrix, transpose_b=True)
    assert c.is_complex()
    assert (c - oracle.tprod(x, y, False, True)).norm() <= 1e-13 * c.norm()


def test_identity_transform_is_facewise():
    x, y = torch.randn(3, 4, 5), torch.randn(4, 2, 5)
    assert torch.allclose(tprod(x, y, transform=torch.eye(5)), tubal.facewise(x, y), atol=1e-6)


@pytest.mark.parametrize("sizes", [(3, 4), (2, 2), (1, 3), (4, 1), (2, 3, 2)])
@pytest.mark.parametrize("layout", ["last", "first"])
def test_order_p(sizes, layout):
    """Circular convolution along every tube axis, by sums of shifted products."""
    order = 2 + len(sizes)
    x, y = torch.randn(2, 3, *sizes, dtype=torch.float64), torch.randn(3, 2, *sizes, dtype=torch.float64)
    axes = tuple(range(-len(sizes), 0))
    wanted = torch.zeros(2, 2, *sizes, dtype=torch.float64)
    for shift in torch.cartesian_prod(*(torch.arange(n) for n in sizes)).view(-1, len(sizes)).tolist():
        weight = x[(..., *shift)]
        wanted += torch.einsum("ij,jk...->ik...", weight, y.roll(shift, axes))
    move = (lambda t: t.movedim((0, 1), (-2, -1))) if layout == "first" else (lambda t: t)
    c = tprod(move(x), move(y), layout=layout, order=order)
    assert not c.is_complex()
    assert_close(c, move(wanted), 1e-14)
    mixed = tprod(move(x), move(y).to(torch.complex128), layout=layout, order=order)
    assert (mixed - move(wanted)).norm() <= 1e-14 * wanted.norm()
    batched = tprod(move(x).expand(5, *move(x).shape), move(y), layout=layout, order=order)
    assert_close(batched[3], move(wanted), 1e-14)


def test_order_p_gradcheck():
    x, y = (torch.randn(2, 2, 2, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(lambda x, y: tprod(x, y, order=4), (x, y))
    assert torch.autograd.gradcheck(lambda x, y: tprod(x, y, order=4, transform="dct"), (x, y))


# The call


def test_fast_path_gives_the_bits_of_the_op():
    """Without gradients the call goes below autograd: the same kernel, the same errors."""
    x, y = torch.randn(4, 5, 6), torch.randn(5, 3, 6)
    wanted = tprod(x, y)
    recorded = tprod(x.clone().requires_grad_(), y)
    assert recorded.requires_grad and not wanted.requires_grad
    assert_same_bits(recorded.detach(), wanted, "with a gradient recorded")
    with torch.no_grad():
        assert_same_bits(tprod(torch.nn.Parameter(x), y), wanted, "under no_grad")
    with torch.inference_mode():
        assert_same_bits(tprod(x, y), wanted, "under inference_mode")


def test_results_can_be_used_in_autograd_afterwards():
    c = tprod(torch.randn(2, 3, 4), torch.randn(3, 2, 4))
    c.requires_grad_()
    assert torch.autograd.grad(c.square().sum(), c)[0].shape == c.shape


def test_nested_vmap_and_one_sided_vmap():
    x, y = torch.randn(3, 2, 4, 5, 6, dtype=torch.float64), torch.randn(5, 2, 6, dtype=torch.float64)
    wanted = tprod(x, y)
    assert_close(torch.vmap(torch.vmap(lambda t: tprod(t, y)))(x), wanted, 1e-14)
    assert_close(torch.vmap(tprod, in_dims=(0, None))(x, y), wanted, 1e-14)
    z = torch.randn(3, 5, 2, 6, dtype=torch.float64)
    assert_close(
        torch.vmap(tprod, in_dims=(1, 0))(x[:, :, :, :, :], z[:2]),
        torch.stack([tprod(x[:, i], z[i]) for i in range(2)]),
        1e-14,
    )


def test_symmetry_of_the_gram_tensor():
    u = torch.randn(2, 6, 4, 5, dtype=torch.float64)
    for transpose in (False, True):
        g = tgram(u, transpose=transpose)
        assert_close(g, oracle.transpose(g), 1e-14)
