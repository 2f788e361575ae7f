"""Edges of the t-product: sizes around tiles, special values, views, modes of torch."""

import math

import pytest
import torch
import tubal_oracle as oracle
from hypothesis import given, settings
from hypothesis import strategies as st
from suite import ALL_DTYPES, assert_close, assert_same_bits
from torch._subclasses.fake_tensor import FakeTensorMode

from pyops import tubal
from pyops.tubal import tgram, tprod, tube_fft

dtypes = pytest.mark.parametrize("dtype", ALL_DTYPES, ids=lambda d: str(d).removeprefix("torch."))
LENGTHS = [1, 2, 3, 4, 5, 7, 8, 61, 64]
lengths = pytest.mark.parametrize("n3", LENGTHS)


def draw(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=torch.float64).to(dtype)


# Sizes


@pytest.mark.parametrize("size", [1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 47, 49, 63, 64, 65, 96, 97])
@pytest.mark.parametrize("n3", [1, 2, 3, 4, 5, 8])
def test_sizes_around_tiles(size, n3):
    """Each of the three sizes in turn, in float32 and float64, with gradients."""
    for n1, n2, n4 in ((size, 5, 3), (4, size, 6), (3, 5, size), (size, size, size)):
        a, b = draw(n1, n2, n3), draw(n2, n4, n3)
        for dtype, gate in ((torch.float64, 1e-14), (torch.float32, 2e-6)):
            x, y = a.to(dtype).requires_grad_(), b.to(dtype).requires_grad_()
            c, wanted = tprod(x, y), oracle.tprod(x.double(), y.double())
            assert_close(c, wanted, oracle.gate(n2)(dtype))
            seed = torch.randn_like(c)
            found = torch.autograd.grad(c, (x, y), seed)
            exact = (
                oracle.tprod(seed.double(), y.double(), False, True),
                oracle.tprod(x.double(), seed.double(), True),
            )
            for g, e in zip(found, exact, strict=True):
                assert_close(g, e, 2 * gate * max(1.0, max(n1, n4) ** 0.5 / 8))


@pytest.mark.parametrize("size", [1, 2, 7, 8, 9, 16, 17, 33, 48, 65])
@pytest.mark.parametrize("n3", [1, 2, 3, 4, 7])
def test_sizes_of_gram_tensors(size, n3):
    """Tiles that straddle the diagonal are mirrored to the right places."""
    for shape in ((size, 3, n3), (5, size, n3), (size, size, n3)):
        u = draw(*shape)
        for transpose in (False, True):
            wanted = oracle.tprod(u, u, transpose, not transpose)
            assert_close(tgram(u, transpose=transpose), wanted, oracle.gate(size)(torch.float64))
            single = tgram(u.float(), transpose=transpose)
            wanted = oracle.tprod(u.float().double(), u.float().double(), transpose, not transpose)
            assert_close(single, wanted, 2e-6)


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.tuples(*(st.integers(0, 20),) * 3),
    n3=st.integers(1, 40),
    batch=st.sampled_from([(), (1,), (3,), (2, 2)]),
    transpose_a=st.booleans(),
    transpose_b=st.booleans(),
    layout=st.sampled_from(["last", "first"]),
    dtype=st.sampled_from(ALL_DTYPES),
    seed=st.integers(0, 10**6),
)
def test_sizes_of_any_kind(sizes, n3, batch, transpose_a, transpose_b, layout, dtype, seed):
    torch.manual_seed(seed)
    n1, n2, n4 = sizes
    a = draw(*batch, *((n2, n1) if transpose_a else (n1, n2)), n3, dtype=dtype)
    b = draw(*((n4, n2) if transpose_b else (n2, n4)), n3, dtype=dtype)
    wanted = oracle.tprod(a.double(), b.double(), transpose_a, transpose_b)
    first = layout == "first"
    x, y = (oracle.first(a), oracle.first(b)) if first else (a, b)
    c = tprod(x, y, transpose_a=transpose_a, transpose_b=transpose_b, layout=layout)
    c = oracle.last(c) if first else c
    assert c.shape == wanted.shape and c.dtype == dtype
    if wanted.numel() and n2:
        assert_close(c, wanted, oracle.gate(n2)(dtype))
    else:
        assert torch.equal(c.double(), wanted)


# Values


@lengths
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_special_values_stay_in_their_rows(n3, value):
    """A row of A reaches that row of C, a column of B that column, and all of their tubes; nothing else."""
    a, b = draw(5, 4, n3), draw(4, 6, n3)
    for layout in ("last", "first"):
        move = oracle.first if layout == "first" else (lambda t: t)
        clean = tprod(move(a), move(b), layout=layout)
        for dtype in (torch.float64, torch.float32):
            x, y = a.to(dtype, copy=True), b.to(dtype, copy=True)
            x[2, 1, n3 - 1] = value
            c = tprod(move(x), move(y), layout=layout)
            c = oracle.last(c) if layout == "first" else c
            others = [0, 1, 3, 4]
            assert torch.isfinite(c[others]).all()
            if math.isnan(value):
                assert c[2].isnan().all()
            else:
                assert not torch.isfinite(c[2]).any()
            x[2, 1, n3 - 1] = 0
            y[1, 3, 0] = value
            c = tprod(move(x), move(y), layout=layout)
            c = oracle.last(c) if layout == "first" else c
            assert torch.isfinite(c[:, [0, 1, 2, 4, 5]]).all() and not torch.isfinite(c[:, 3]).any()
        assert torch.isfinite(clean).all()


@dtypes
def test_special_values_zero_is_exactly_zero(dtype):
    for n3 in LENGTHS:
        a, b = torch.zeros(3, 4, n3, dtype=dtype), draw(4, 5, n3, dtype=dtype)
        c = tprod(a, b)
        assert not c.any() and not tgram(a).any()


@pytest.mark.parametrize("n3", [2, 4, 7, 64])
def test_special_values_of_half_precision(n3):
    """Sums are kept in float32: long ones lose nothing, and faces above float16's range do not overflow."""
    ones = torch.ones(1, 4096, n3, dtype=torch.float16) / 64
    c = tprod(ones, ones, transpose_b=True)
    assert_close(c, torch.full((1, 1, n3), float(n3), dtype=torch.float64), 1e-3)
    large, small = torch.full((2, 2, n3), 3e4).half(), torch.full((2, 2, n3), 1e-3).half()
    assert_close(tprod(large, small), oracle.tprod(large.double(), small.double()), 2e-3)
    for dtype in (torch.bfloat16, torch.float16):
        a, b = draw(40, 64, n3, dtype=dtype), draw(64, 40, n3, dtype=dtype)
        wide = tprod(a.float(), b.float())
        assert_close(tprod(a, b), wide.to(dtype), 5e-3 if dtype == torch.bfloat16 else 5e-4)


def test_special_values_far_apart():
    """Scales pass through: no step has a range of its own."""
    a, b = draw(4, 5, 6), draw(5, 3, 6)
    wanted = tprod(a, b)
    for scale in (1e-150, 1e150):
        assert_close(tprod(a * scale, b) / scale, wanted, 1e-14)
    single = tprod(a.float(), b.float())
    for scale in (2.0**-60, 2.0**60):
        assert torch.equal(tprod(a.float() * scale, b.float()) / scale, single)


def test_rows_of_different_scale_keep_their_accuracy():
    """The error is relative to each row and column, not to the largest entry of the tensor."""
    a, b = draw(8, 6, 5, dtype=torch.float32), draw(6, 8, 5, dtype=torch.float32)
    a[3] *= 1e-20
    b[:, 2] *= 1e-10
    c, wanted = tprod(a, b), oracle.tprod(a.double(), b.double())
    for i in range(8):
        for j in range(8):
            assert_close(c[i, j], wanted[i, j], 5e-6)


# Views


def test_lazy_negatives_and_conjugates():
    z, y = torch.randn(3, 4, 5, dtype=torch.complex128), draw(4, 2, 5)
    wanted = tprod(z.imag.clone(), y)
    assert z.conj().imag.is_neg()
    assert torch.equal(tprod(z.conj().imag, y), -wanted)
    assert torch.equal(tgram(z.conj().imag), tgram(z.imag.clone()))
    w = torch.randn(4, 2, 5, dtype=torch.complex128)
    assert torch.allclose(tprod(z.conj(), w), tprod(z.conj().resolve_conj(), w))
    assert torch.allclose(tube_fft(z.conj()).to_tensor(), z.conj())


@dtypes
def test_views_of_one_memory(dtype):
    """Both factors from one storage, overlapping; expanded tubes; a tensor with itself."""
    memory = torch.randn(200).to(dtype)
    a, b = memory.as_strided((3, 4, 5), (7, 3, 1)), memory.as_strided((4, 2, 5), (1, 9, 2), 3)
    wanted = tprod(
        a.clone(memory_format=torch.contiguous_format), b.clone(memory_format=torch.contiguous_format)
    )
    assert_same_bits(tprod(a, b), wanted, "overlapping views")
    tube = torch.randn(3, 3, 1).to(dtype).expand(3, 3, 6)
    assert_same_bits(tprod(tube, tube), tprod(tube.contiguous(), tube.contiguous()), "expanded tubes")
    square = torch.randn(4, 4, 6).to(dtype)
    assert_same_bits(tprod(square, square), tprod(square, square.clone()), "a tensor with itself")
    flipped = torch.randn(4, 4, 6).to(dtype).permute(2, 1, 0).contiguous().permute(2, 1, 0)
    assert_same_bits(tprod(flipped, square), tprod(flipped.contiguous(), square), "reversed memory")


def test_expanded_batches_and_gradients_of_expanded_results():
    a = draw(1, 3, 4, 5).expand(6, 3, 4, 5)
    b = draw(4, 2, 5).requires_grad_()
    c = tprod(a, b)
    assert_same_bits(c[0], c[5], "expanded batch")
    (found,) = torch.autograd.grad(c.sum(), b)  # the gradient of a sum is an expanded scalar
    exact = oracle.tprod(a, torch.ones_like(c), True).sum(0)
    assert_close(found, exact, 1e-14)


# Modes of torch


def test_compiled_algebra():
    a = draw(2, 3, 3, 5)
    functions = {
        "tinv": tubal.tinv,
        "tpinv": tubal.tpinv,
        "tsvt": lambda a: tubal.tsvt(a, 0.3),
        "tsvd": lambda a: tubal.tsvd(a).S,
        "tnn": tubal.tnn,
        "order 4": lambda a: tprod(a.unsqueeze(-1), a.unsqueeze(-1), order=4),
        "faces": lambda a: tube_fft(a).H.to_tensor(),
        "matrix": lambda a: tprod(a, a, transform=torch.eye(5, dtype=torch.float64) + a[0, 0, 0]),
    }
    for name, function in functions.items():
        torch.compiler.reset()
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        assert torch.allclose(compiled(a), function(a)), name


def test_vmapped_algebra():
    a = draw(4, 3, 2, 5)
    for function in (
        tubal.tpinv,
        lambda a: tubal.tsvt(a, 0.3),
        lambda a: tubal.tsvd(a).S,
        tubal.tnn,
        tubal.ttranspose,
    ):
        assert torch.allclose(torch.vmap(function)(a), function(a))
    assert torch.allclose(torch.vmap(lambda a: tprod(a, a, transpose_b=True, transform="dct"))(a),
                          tprod(a, a, transpose_b=True, transform="dct"))  # fmt: skip


def test_fake_tensors_do_not_stay_in_caches():
    """The first call for a size may be with fake tensors; the next one must not meet them again."""
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(draw(3, 3, 37))
        assert tprod(fake, fake, transform="dct").shape == (3, 3, 37)
        assert tubal.tsvd(fake).S.shape == (3, 3, 37)
        assert tube_fft(fake, transform="dct").to_tensor().shape == (3, 3, 37)
    a = draw(3, 3, 37)
    assert_close(tprod(a, a, transform="dct"), oracle.star(a, a, oracle.dct(37)), 1e-13)
    assert_close(tubal.tsvd(a).S.norm(), a.norm(), 1e-13)
    with torch.inference_mode():
        tprod(draw(2, 2, 39), draw(2, 2, 39), transform="dct")
    b = draw(2, 2, 39).requires_grad_()
    assert torch.isfinite(torch.autograd.grad(tprod(b, b, transform="dct").sum(), b)[0]).all()


def test_forward_mode_never_drops_a_tangent():
    a, b = draw(2, 3, 4), draw(3, 2, 4)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(a, draw(2, 3, 4))
        for call in (lambda: tprod(dual, b), lambda: tgram(dual), lambda: tprod(b, dual, transform="dct")):
            with pytest.raises(RuntimeError, match="forward-mode tangent"):
                call()
        assert torch.autograd.forward_ad.unpack_dual(tprod(dual.cdouble(), b)).tangent is not None


def test_autocast_changes_no_precision():
    a, b = draw(6, 7, 5, dtype=torch.float32), draw(7, 6, 5, dtype=torch.float32)
    wanted = [tprod(a, b), tprod(a, b, transform="dct"), tgram(a)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = [tprod(a, b), tprod(a, b, transform="dct"), tgram(a)]
    for f, w in zip(found, wanted, strict=True):
        assert_same_bits(f, w, "autocast")


def test_parameters_and_subclasses():
    class Tagged(torch.Tensor):
        pass

    a, b = draw(2, 3, 4), draw(3, 2, 4)
    wanted = tprod(a, b)
    assert_same_bits(tprod(torch.nn.Parameter(a), b).detach(), wanted, "a parameter")
    assert torch.equal(tprod(a.as_subclass(Tagged), b).as_subclass(torch.Tensor), wanted)


# Long tubes: every way of transforming them


@pytest.mark.parametrize("n3", [160, 162, 169, 240, 509, 512, 514, 521, 1001, 1024, 1042, 4093, 6561, 20011])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
def test_long_tubes(n3, dtype):
    """Sums, passes of every radix, and chirps for large prime factors, against torch's FFT."""
    a, b = draw(2, 3, n3, dtype=dtype), draw(3, 2, n3, dtype=dtype)
    faces = [torch.fft.rfft(t.double()).permute(2, 0, 1) for t in (a, b)]
    for x, y, transpose in ((a, b, False), (b, b, True)):
        u, v = (faces[0] if x is a else faces[1]), faces[1]
        wanted = torch.fft.irfft((u @ (v.mH if transpose else v)).permute(1, 2, 0), n=n3)
        assert_close(tprod(x, y, transpose_b=transpose), wanted, 1e-14 if dtype == torch.float64 else 2e-6)


@pytest.mark.parametrize("n3", [61, 169, 512, 521, 1042])
def test_long_tubes_share_nothing(n3):
    """A tube of large numbers leaves the others exact, and a NaN its own row."""
    a, b = draw(40, 1, n3), draw(1, 1, n3)
    wanted = tprod(a, b)
    a[17] *= 1e30
    a[23, 0, n3 // 2] = math.nan
    c = tprod(a, b)
    others = [i for i in range(40) if i not in (17, 23)]
    assert_same_bits(c[others], wanted[others], "other rows")
    assert c[23].isnan().all() and c[17].isfinite().all()
