"""Transpose, identity, inverses, norms, ranks and half faces, against the circulant oracle."""

import math
import warnings

import numpy as np
import pytest
import torch
import tubal_oracle as oracle
from hypothesis import given, settings
from hypothesis import strategies as st
from suite import assert_close

from pyops import tubal
from pyops.tubal import HalfFaces, tprod, tube_fft, tube_ifft

LENGTHS = [1, 2, 3, 4, 5, 7, 8, 61, 64]
lengths = pytest.mark.parametrize("n3", LENGTHS)
LAYOUTS = pytest.mark.parametrize("layout", ["last", "first"])
SIZES = pytest.mark.parametrize("sizes", [(4,), (5,), (2, 3), (4, 4), (3, 2, 4)])


def draw(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=torch.float64).to(dtype)


def times(*factors, **options):
    product = factors[0]
    for factor in factors[1:]:
        product = tprod(product, factor, **options)
    return product


# Algebra


shapes = st.tuples(*(st.integers(1, 5),) * 5)


@settings(max_examples=60, deadline=None)
@given(
    shape=shapes, n3=st.integers(1, 12), seed=st.integers(0, 10**6), transform=st.sampled_from(["dft", "dct"])
)
def test_laws(shape, n3, seed, transform):
    """Identity, associativity, distributivity, (A * B)^T = B^T * A^T, and how scalars pass through."""
    torch.manual_seed(seed)
    n, p, q, r, batch = shape
    a, b, c = draw(batch, n, p, n3), draw(p, q, n3), draw(batch, q, r, n3)
    kind = {"transform": transform}
    eye = tubal.teye(p, n3, dtype=torch.float64, **kind)
    ab = tprod(a, b, **kind)
    assert_close(tprod(a, eye, **kind), a, 1e-14)
    assert_close(tprod(eye, b, **kind), b, 1e-14)
    left, right = tprod(ab, c, **kind), tprod(a, tprod(b, c, **kind), **kind)
    scale = a.norm() * b.norm() * c.norm()
    assert (left - right).norm() <= 4e-14 * scale
    assert (
        tprod(a, b + 2 * b.flip(0), **kind) - ab - 2 * tprod(a, b.flip(0), **kind)
    ).norm() <= 1e-13 * scale
    transposed = tubal.ttranspose(ab, **kind)
    flipped = tprod(tubal.ttranspose(b, **kind), tubal.ttranspose(a, **kind), **kind)
    assert (transposed - flipped).norm() <= 1e-13 * scale
    assert_close(tubal.ttranspose(transposed, **kind), ab, 1e-14)
    direct = tprod(b, a, transpose_a=True, transpose_b=True, **kind)
    assert (direct - transposed).norm() <= 1e-13 * scale


@settings(max_examples=40, deadline=None)
@given(n=st.integers(1, 4), m=st.integers(1, 4), n3=st.integers(1, 12), seed=st.integers(0, 10**6))
def test_circulant_structure(n, m, n3, seed):
    """bcirc is a homomorphism, tubes commute, and a shift of the tubes of A shifts those of A * B."""
    torch.manual_seed(seed)
    a, b = draw(n, m, n3), draw(m, n, n3)
    c = tprod(a, b)
    assert_close(oracle.bcirc(c), oracle.bcirc(a) @ oracle.bcirc(b), 1e-13)
    assert_close(tprod(a.roll(1, -1), b), c.roll(1, -1), 1e-13)
    s, t = draw(1, 1, n3), draw(1, 1, n3)
    assert_close(tprod(s, t), tprod(t, s), 1e-13)
    assert torch.equal(oracle.bcirc(tubal.ttranspose(a)), oracle.bcirc(a).mT)


@lengths
def test_transpose_moves_entries_and_nothing_else(n3):
    for a in (draw(2, 3, 4, n3), torch.randn(3, 4, n3, dtype=torch.complex128)):
        assert torch.equal(tubal.ttranspose(a), oracle.transpose(a))
        first = tubal.ttranspose(oracle.first(a), layout="first")
        assert torch.equal(first, oracle.first(oracle.transpose(a))) and first.is_contiguous()
        faces = tube_fft(a)
        assert torch.allclose(faces.H.to_tensor(), oracle.transpose(a))
        assert torch.equal(tubal.ttranspose(faces).faces, faces.faces.mH)
    half = torch.randn(3, 2, n3).bfloat16()
    assert torch.equal(tubal.ttranspose(half), oracle.transpose(half))


def test_transpose_for_other_transforms():
    a = draw(2, 3, 4)
    assert torch.equal(tubal.ttranspose(a, transform="dct"), a.transpose(0, 1))
    matrix = torch.randn(4, 4, dtype=torch.complex128)
    wanted = torch.einsum(
        "kf,fij->ijk", torch.linalg.inv(matrix), torch.einsum("fk,ijk->fji", matrix, a.cdouble()).conj()
    )
    wanted = wanted.contiguous()
    found = tubal.ttranspose(a, transform=matrix)
    assert (found - wanted).norm() <= 1e-12 * wanted.norm()


@LAYOUTS
@SIZES
def test_identity_inverse_and_solve(sizes, layout):
    order, n = 2 + len(sizes), 3
    options = {"layout": layout, "order": order}
    move = (lambda t: t.movedim((-order, 1 - order), (-2, -1))) if layout == "first" else (lambda t: t)
    for transform in ("dft", "dct"):
        kind = {"transform": transform, **options}
        a, b = move(draw(2, n, n, *sizes)), move(draw(n, 2, *sizes))
        eye = tubal.teye(n, sizes, transform=transform, layout=layout, dtype=torch.float64)
        assert eye.is_contiguous()
        assert_close(tprod(a, eye, **kind), a, 1e-13)
        inverse = tubal.tinv(a, **kind)
        assert not inverse.is_complex() and inverse.is_contiguous()
        assert_close(tprod(inverse, a, **kind), eye.expand(a.shape), 1e-11)
        assert_close(tprod(a, inverse, **kind), eye.expand(a.shape), 1e-11)
        x = tubal.tsolve(a, b, **kind)
        assert_close(tprod(a, x, **kind), b.expand(x.shape), 1e-11)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex64, torch.complex128]
)
def test_dtypes_and_exactly_real_results(dtype):
    gate = {torch.float64: 1e-12, torch.complex128: 1e-12, torch.bfloat16: 5e-2}.get(dtype, 1e-4)
    a = (torch.randn(2, 3, 3, 6, dtype=dtype) + 4 * tubal.teye(3, 6, dtype=dtype)).to(dtype)
    eye = tubal.teye(3, 6, dtype=torch.complex128)
    for result in (tubal.tinv(a), tubal.tpinv(a), tubal.tsolve(a, tubal.teye(3, 6, dtype=dtype))):
        assert result.dtype == dtype
        wide = a.to(torch.complex128)
        assert (tprod(wide, result.to(torch.complex128)) - eye).norm() <= gate * eye.norm() * 2
    assert tubal.tnorm(a).dtype == tubal.tnn(a).dtype == tubal.tnorm(a, "spectral").dtype
    assert tubal.tnn(a).dtype == {torch.complex64: torch.float32, torch.complex128: torch.float64}.get(
        dtype, dtype
    )
    assert tubal.multi_rank(a).dtype == torch.int64 and tubal.average_rank(a).dtype == torch.float64


def test_solve_with_batches_that_could_be_vectors():
    """torch.linalg.solve takes b for a batch of vectors when the shapes fit; here b is always matrices."""
    a, b = draw(2, 3, 3, 5), draw(3, 3, 5)
    x = tubal.tsolve(a, b)
    assert x.shape == (2, 3, 3, 5)
    assert_close(tprod(a, x), b.expand(2, 3, 3, 5), 1e-11)
    assert_close(tubal.tsolve(b, a), torch.stack([tubal.tsolve(b, a[i]) for i in range(2)]), 1e-12)


@pytest.mark.parametrize(("rows", "columns"), [(4, 2), (2, 4), (3, 3)])
@lengths
def test_pseudo_inverse(rows, columns, n3):
    """The four Penrose conditions, also with a face of lower rank, and against the block circulant matrix."""
    h = tube_fft(draw(2, rows, columns, n3))
    faces = h.faces.clone()
    faces[..., 0, :, -1] = faces[..., 0, :, 0]
    for a in (h.to_tensor(), h.with_faces(faces).to_tensor()):
        p = tubal.tpinv(a)
        assert_close(p, _from_bcirc(torch.linalg.pinv(oracle.bcirc(a)), columns, n3), 1e-10)
        assert_close(times(a, p, a), a, 1e-11)
        assert_close(times(p, a, p), p, 1e-11)
        for product in (tprod(a, p), tprod(p, a)):
            assert_close(tubal.ttranspose(product), product, 1e-11)


def _from_bcirc(matrix, rows, n3):
    """The tensor of a block circulant matrix: its first block column."""
    columns = matrix.shape[-1] // n3
    return oracle.fold(matrix[..., :columns], n3)


def test_rcond_is_relative_to_the_largest_of_all_faces():
    h = tube_fft(torch.zeros(2, 2, 4, dtype=torch.float64))
    scales = torch.tensor([1.0, 1e-3, 1e-6], dtype=torch.float64)
    a = h.with_faces((scales[:, None, None] * torch.eye(2)).to(torch.complex128)).to_tensor()
    count = lambda t: (tube_fft(t).faces.abs() > 1e-9).sum().item() // 2  # noqa: E731
    assert count(tubal.tpinv(a)) == 3
    assert count(tubal.tpinv(a, rcond=1e-4)) == 2
    assert count(tubal.tpinv(a, rcond=1e-2)) == 1
    assert count(tubal.tpinv(a, rcond=1e-2, per_face=True)) == 3
    assert_close(tprod(tubal.tpinv(a), a), tubal.teye(2, 4, dtype=torch.float64), 1e-12)
    assert tubal.multi_rank(a, rtol=1e-4).tolist() == [2, 2, 0, 2]
    assert_close(1e-30 * tubal.tpinv(1e-30 * a, rcond=1e-4), tubal.tpinv(a, rcond=1e-4), 1e-12)


# Norms and ranks


@lengths
def test_norms(n3):
    a = draw(2, 4, 3, n3)
    for convention, factor in (("mean", 1 / n3), ("sum", 1.0)):
        nuclear = factor * torch.linalg.matrix_norm(oracle.bcirc(a), "nuc")
        assert_close(tubal.tnn(a, convention=convention), nuclear, 1e-12)
    assert_close(tubal.tnorm(a, "spectral"), torch.linalg.matrix_norm(oracle.bcirc(a), 2), 1e-12)
    assert_close(tubal.tnorm(a), a.flatten(1).norm(dim=1), 1e-14)
    assert_close(tube_fft(a).norm(), a.flatten(1).norm(dim=1), 1e-14)
    assert_close(tubal.tnorm(tube_fft(a)), a.flatten(1).norm(dim=1), 1e-14)
    complex_a = torch.complex(a, draw(2, 4, 3, n3))
    assert_close(tube_fft(complex_a).norm(), complex_a.flatten(1).norm(dim=1), 1e-14)
    assert_close(tubal.tnn(complex_a), torch.linalg.matrix_norm(oracle.bcirc(complex_a), "nuc") / n3, 1e-12)


def test_norm_duality_and_other_transforms():
    """<A, B> <= spectral(A) tnn(B), with equality for A = U * V^T of B."""
    a, b = draw(4, 3, 5), draw(4, 3, 5)
    for transform in ("dft", "dct"):
        kind = {"transform": transform}
        assert (a * b).sum() <= tubal.tnorm(a, "spectral", **kind) * tubal.tnn(b, **kind)
        u, _, v = tubal.tsvd(b, **kind)
        best = tprod(u, v, transpose_b=True, **kind)
        assert_close((best * b).sum(), tubal.tnn(b, **kind), 1e-12)
    matrix = draw(5, 5)
    faces = torch.einsum("fk,ijk->fij", matrix, a)
    wanted = torch.linalg.matrix_norm(faces, "nuc").sum()
    assert_close(tubal.tnn(a, convention="sum", transform=matrix), wanted, 1e-12)
    scaled = 3 * torch.linalg.qr(matrix).Q
    faces = torch.einsum("fk,ijk->fij", scaled, a)
    assert_close(tubal.tnn(a, transform=scaled), torch.linalg.matrix_norm(faces, "nuc").sum() / 9, 1e-12)


@lengths
def test_ranks(n3):
    a = tprod(draw(2, 6, 2, n3), draw(2, 2, 5, n3))
    assert tubal.tubal_rank(a).tolist() == [2, 2]
    assert tubal.multi_rank(a).tolist() == [[2] * n3] * 2
    assert tubal.average_rank(a).tolist() == [2.0, 2.0]
    constant = torch.ones(3, 4, n3, dtype=torch.float64)
    assert tubal.multi_rank(constant).tolist() == [1] + [0] * (n3 - 1)
    assert tubal.tubal_rank(constant) == 1 and tubal.average_rank(constant) == pytest.approx(1 / n3)
    assert tubal.tubal_rank(torch.zeros(3, 4, n3)) == 0
    c = torch.complex(draw(4, 3, n3), draw(4, 3, n3))
    assert tubal.multi_rank(c).tolist() == [3] * n3


def test_rank_of_all_faces_for_order_p():
    faces = torch.linalg.matrix_rank(
        torch.fft.fftn(torch.ones(2, 2, 3, 4), dim=(-2, -1)).movedim((0, 1), (-2, -1))
    )
    assert torch.equal(tubal.multi_rank(torch.ones(2, 2, 3, 4), order=4), faces)
    assert tubal.tubal_rank(torch.ones(2, 2, 3, 4), order=4) == 1
    assert tubal.average_rank(torch.ones(2, 2, 3, 4), order=4) == pytest.approx(1 / 12)


def test_empty_matrices():
    for shape in ((0, 3, 4), (3, 0, 4), (0, 0, 5)):
        a = torch.zeros(shape)
        assert tubal.tpinv(a).shape == (shape[1], shape[0], shape[2])
        assert tubal.tubal_rank(a) == 0 and tubal.tnn(a) == 0 and tubal.tnorm(a, "spectral") == 0
        assert tubal.ttranspose(a).shape == (shape[1], shape[0], shape[2])
        assert tube_ifft(tube_fft(a)).shape == shape
    assert tubal.tinv(torch.zeros(0, 0, 5)).shape == (0, 0, 5)
    assert tubal.teye(0, 3).shape == (0, 0, 3)
    assert tubal.tsolve(torch.eye(2)[..., None].expand(2, 2, 1), torch.zeros(2, 0, 1)).shape == (2, 0, 1)


# Half faces


@SIZES
@LAYOUTS
def test_faces_and_back(sizes, layout):
    order = 2 + len(sizes)
    axes = tuple(range(-len(sizes), 0))
    a = draw(2, 3, 2, *sizes)
    faces = torch.fft.fftn(a, dim=axes).movedim((1, 2), (-2, -1))
    move = (lambda t: t.movedim((1, 2), (-2, -1))) if layout == "first" else (lambda t: t)
    h = tube_fft(move(a), layout=layout, order=order)
    assert h.shape == a.shape and h.half and h.real
    assert torch.allclose(h.full(), faces)
    assert torch.equal(h.to_tensor(layout), tube_ifft(h, layout=layout))
    assert h.to_tensor(layout).dtype == torch.float64
    assert_close(h.to_tensor(layout), move(a), 1e-14)
    total = (h.weights.squeeze() * torch.ones(h.weights.squeeze().shape)).sum()
    assert total == math.prod(sizes)
    b = draw(2, 3, 2, *sizes)
    assert_close(h.inner(tube_fft(move(b), layout=layout, order=order)), (a * b).flatten(1).sum(1), 1e-13)
    c = torch.complex(a, b)
    full = tube_fft(move(c), layout=layout, order=order)
    assert not full.half and full.faces.shape[1:-2] == torch.Size(sizes)
    assert (full.to_tensor(layout) - move(c)).norm() <= 1e-14 * c.norm()


@lengths
def test_products_in_the_transform_domain(n3):
    a, b, c = draw(2, 3, 4, n3), draw(4, 4, n3), draw(2, 3, 4, n3)
    p, q, r = tube_fft(a), tube_fft(b), tube_fft(c)
    assert_close((p @ q).to_tensor(), oracle.tprod(a, b), 1e-13)
    assert_close((p.H @ r).to_tensor(), oracle.tprod(a, c, True, False), 1e-13)
    assert_close((p.mT @ r - q).to_tensor(), oracle.tprod(a, c, True, False) - b, 1e-13)
    assert_close((2 * p - r / 4 + p * 0.5).to_tensor(), 2.5 * a - c / 4, 1e-14)
    assert_close((-p).to_tensor(), -a, 1e-14)
    z = torch.complex(a, c)
    mixed = tube_fft(z) @ q
    assert not mixed.real and (mixed.to_tensor() - tprod(z, b)).norm() <= 1e-13 * mixed.norm().norm()
    assert (
        (q @ tube_fft(z).H).to_tensor() - oracle.tprod(b.cdouble(), z, False, True)
    ).norm() <= 1e-12 * z.norm() * 4
    assert (tube_fft(z).inner(p) - a.square().flatten(1).sum(1)).norm() <= 1e-12 * a.norm() ** 2
    power = p.H @ p
    for _ in range(2):
        power = power @ power
    exact = oracle.tprod(a, a, True, False)
    for _ in range(2):
        exact = oracle.tprod(exact, exact)
    assert_close(power.to_tensor(), exact, 1e-13)


@pytest.mark.parametrize("transform", ["dft", "dct"])
@LAYOUTS
def test_faces_are_whole_matrices_in_memory(layout, transform):
    a = draw(6, 6, 6)
    h = tube_fft(a, layout=layout, transform=transform)
    for faces in (h, h @ h, h @ h.H, tubal.tpinv(h), tubal.tsvd(h).V):
        assert faces.faces.is_contiguous()


def test_what_describes_tensors_must_agree_with_faces():
    a, matrix = draw(3, 3, 4), draw(4, 4)
    for transform in ("dft", "dct", matrix):
        h = tube_fft(a, transform=transform)
        for function in (tubal.tinv, tubal.tpinv, tubal.ttranspose):
            assert torch.equal(function(h, transform=transform).faces, function(h).faces)
            with pytest.raises(ValueError, match="transform must be left out or that of a"):
                function(h, transform="dct" if transform == "dft" else "dft")
        with pytest.raises(ValueError, match="transform must be left out"):
            tubal.tubal_rank(h, transform=2 * matrix)
    assert tubal.tubal_rank(tube_fft(draw(3, 3, 2, 2), order=4), order=4) == 3
    imaginary = torch.complex(matrix, draw(4, 4))
    with pytest.raises(ValueError, match="transform must be left out"):
        tubal.tubal_rank(tube_fft(a, transform=matrix), transform=imaginary)


def test_faces_of_other_transforms():
    a, b, matrix = draw(3, 2, 5), draw(2, 4, 5), draw(5, 5)
    for transform in ("dct", matrix):
        p, q = tube_fft(a, transform=transform), tube_fft(b, transform=transform)
        assert not p.half and p.faces.dtype == torch.float64
        assert_close((p @ q).to_tensor(), tprod(a, b, transform=transform), 1e-11)
        assert_close(p.to_tensor(), a, 1e-12)
    assert_close(tube_fft(a, transform="dct").norm(), a.norm(), 1e-14)
    z = torch.complex(a, draw(3, 2, 5))
    assert (tube_fft(z, transform="dct").to_tensor() - z).norm() < 1e-13 * z.norm()
    unitary = torch.linalg.qr(torch.randn(5, 5, dtype=torch.complex128)).Q
    p = tube_fft(a, transform=unitary)
    assert p.dtype == torch.complex128 and (p.to_tensor() - a).norm() < 1e-13 * a.norm()
    order4 = draw(2, 2, 3, 5)
    matrices = (draw(3, 3), draw(5, 5))
    assert_close(tube_fft(order4, transform=matrices, order=4).to_tensor(), order4, 1e-11)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_faces_remember_the_dtype(dtype):
    a = torch.randn(3, 3, 4).to(dtype)
    h = tube_fft(a)
    assert h.faces.dtype == torch.complex64 and h.to_tensor().dtype == dtype
    assert torch.equal(h.to_tensor(), a) or dtype == torch.float32
    assert (h @ h).to_tensor().dtype == dtype
    assert (h @ tube_fft(a.double())).dtype == torch.float64
    assert tubal.tinv(h).dtype == dtype and repr(h).startswith("HalfFaces((3, 3, 4)")


def test_functions_of_half_faces_stay_half_faces():
    a, b = draw(3, 3, 4), draw(3, 2, 4)
    h, k = tube_fft(a), tube_fft(b)
    for result, wanted in (
        (tubal.tinv(h), tubal.tinv(a)),
        (tubal.tpinv(k), tubal.tpinv(b)),
        (tubal.tsolve(h, k), tubal.tsolve(a, b)),
        (tubal.tsvt(k, 0.5), tubal.tsvt(b, 0.5)),
        (tubal.ttranspose(k), tubal.ttranspose(b)),
    ):
        assert isinstance(result, HalfFaces)
        assert_close(result.to_tensor(), wanted, 1e-12)
    for function in (tubal.tubal_rank, tubal.multi_rank, tubal.average_rank, tubal.tnn, tubal.tnorm):
        assert torch.allclose(function(k), function(b))
    assert_close(tubal.tnorm(k, "spectral"), tubal.tnorm(b, "spectral"), 1e-13)


# Gradients


@lengths
def test_gradients(n3):
    """tinv, tsolve, tpinv, norms and faces, for every length."""
    check = torch.autograd.gradcheck
    n = 2 if n3 <= 8 else 1
    a = (draw(n, n, n3) + 3 * tubal.teye(n, n3, dtype=torch.float64)).requires_grad_()
    b = draw(n, 1, n3).requires_grad_()
    assert check(tubal.tinv, (a,))
    assert check(tubal.tsolve, (a, b))
    assert check(tubal.tnn, (a,)) and check(tubal.tnorm, (a,))
    assert check(lambda a: (tube_fft(a) @ tube_fft(a).H).to_tensor(), (a,))
    assert check(lambda a: tube_fft(a).norm(), (a,))
    assert check(tubal.ttranspose, (a,))
    if n3 <= 8:
        tall = draw(3, 2, n3).requires_grad_()
        assert check(tubal.tpinv, (tall,))
        assert check(lambda a: tubal.tnorm(a, "spectral"), (tall,))
        assert torch.autograd.gradgradcheck(tubal.tinv, (a,))
    if n3 <= 4:
        z = torch.randn(2, 2, n3, dtype=torch.complex128, requires_grad=True)
        assert check(tubal.tinv, (z,)) and check(tubal.tpinv, (z,)) and check(tubal.tnn, (z,))


def test_gradients_for_order_p():
    a = (draw(2, 2, 2, 3) + 3 * tubal.teye(2, (2, 3), dtype=torch.float64)).requires_grad_()
    assert torch.autograd.gradcheck(lambda a: tubal.tinv(a, order=4), (a,))
    assert torch.autograd.gradcheck(lambda a: tubal.tnn(a, order=4), (a,))
    assert torch.autograd.gradcheck(lambda a: tubal.tinv(a, order=4, transform="dct"), (a,))


# Bad input


def singular(face, n3=4, batch=()):
    h = tube_fft(tubal.teye(2, n3, dtype=torch.float64).expand(*batch, 2, 2, n3))
    faces = h.faces.clone()
    faces[(*(1,) * len(batch), face)] = 0
    return h.with_faces(faces)


@pytest.mark.parametrize("face", [0, 1, 2])
def test_singular_faces_are_named(face):
    a = singular(face)
    for call in (tubal.tinv, lambda a: tubal.tsolve(a, a)):
        with pytest.raises(torch.linalg.LinAlgError, match=f"singular matrix for face {face} "):
            call(a)
        with pytest.raises(torch.linalg.LinAlgError, match=rf"face {face} of batch entry \(1,\)"):
            call(singular(face, batch=(3,)))
    with pytest.raises(torch.linalg.LinAlgError, match=r"tinv: a must be invertible, .* face 0 "):
        tubal.tinv(torch.zeros(2, 2, 4))
    with pytest.raises(torch.linalg.LinAlgError, match=r"face \(0, 0\)"):
        tubal.tinv(torch.zeros(2, 2, 4, 3), order=4)
    assert torch.isfinite(tubal.tpinv(a).faces.abs()).all()


a = torch.ones(2, 3, 4)
h = tube_fft(a)
NOT_UNITARY = torch.diag(torch.tensor([1.0, 2.0, 3.0, 4.0]))
ERRORS = [
    (lambda: tubal.tinv(a), ValueError, "a must be square, got n1 = 2 and n2 = 3"),
    (lambda: tubal.tinv(a.long()), TypeError, "a must be float64, .* got torch.int64"),
    (lambda: tubal.tinv(a[..., :0]), ValueError, "a must have tubes of at least one entry"),
    (lambda: tubal.tinv([a]), TypeError, "a must be a torch.Tensor, got list"),
    (lambda: tubal.tsolve(a, a), ValueError, r"a must be square, .*; tprod\(tpinv\(a\), b\) solves least"),
    (lambda: tubal.tsolve(h, h), ValueError, "a must be square, got n1 = 2 and n2 = 3; tprod"),
    (lambda: tubal.tsolve(a[0], a), ValueError, "a must have at least 3 dimensions"),
    (lambda: tubal.tsolve(a[:, :2], a.mT), ValueError, "b must have tubes of a's length 4, got 3"),
    (lambda: tubal.tsolve(a[:, :2], a[:1]), ValueError, "b must have 2 rows"),
    (
        lambda: tubal.tinv(h, transform="dct"),
        ValueError,
        "transform must be left out or that of a, 'dft', got",
    ),
    (lambda: tubal.tnn(h, transform="foo"), ValueError, "transform must be one of"),
    (lambda: tubal.tinv(h, layout="foo"), ValueError, "layout must be one of"),
    (lambda: tubal.tinv(h, layout="first"), ValueError, "layout must be left out where a is HalfFaces"),
    (lambda: tubal.tinv(h, order=4), ValueError, "order must be left out or that of a, 3, got 4"),
    (lambda: tubal.tnorm(h, transform="dct"), ValueError, "transform must be left out"),
    (lambda: tubal.ttranspose(h, order=4), ValueError, "order must be left out"),
    (lambda: tubal.tpinv(a, rcond=-1.0), ValueError, "rcond must be finite and at least 0, got -1"),
    (lambda: tubal.tpinv(a, rcond="1"), TypeError, "rcond must be a number, got '1'"),
    (lambda: tubal.tpinv(a, per_face=1), TypeError, "per_face must be a bool, got 1"),
    (lambda: tubal.tubal_rank(a, rtol=-1.0), ValueError, "rtol must be finite and at least 0"),
    (lambda: tubal.tnorm(a, "nuc"), ValueError, "ord must be one of 'fro', 'spectral', got 'nuc'"),
    (lambda: tubal.tnn(a, convention="lu"), ValueError, "convention must be one of 'mean', 'sum', got 'lu'"),
    (lambda: tubal.tnn(a, transform=NOT_UNITARY), ValueError, "transform must be unitary up to a factor"),
    (lambda: tubal.teye(-1, 3), ValueError, "n must be at least 0, got -1"),
    (lambda: tubal.teye(2, 0), ValueError, "n3 must be at least 1, got 0"),
    (lambda: tubal.teye(2, ()), ValueError, "n3 must be at least 1"),
    (lambda: tubal.teye(2, 3, layout="x"), ValueError, "layout must be one of"),
    (lambda: tubal.ttranspose(a[0]), ValueError, "a must have at least 3 dimensions"),
    (lambda: tubal.tube_fft(a, order=4), ValueError, "a must have at least 4 dimensions"),
    (lambda: tubal.tube_fft(a, transform="haar"), ValueError, "transform must be one of 'dft', 'dct'"),
    (lambda: tube_ifft(a), TypeError, "faces must be HalfFaces, got Tensor"),
    (lambda: h.to_tensor("middle"), ValueError, "layout must be one of"),
    (lambda: HalfFaces(h.faces, (6,), dtype=torch.float32), ValueError, r"faces must be \[..., 4, n1, n2\]"),
    (lambda: h @ h, ValueError, "the right factor must have 3 rows, got 2"),
    (lambda: h @ a, TypeError, "@ needs HalfFaces on both sides, got Tensor"),
    (lambda: h + 1, TypeError, r"\+ needs HalfFaces on both sides, got int"),
    (lambda: h * h, TypeError, r"\* needs a number, got HalfFaces; the t-product is @"),
    (lambda: h * torch.ones(3), ValueError, r"\* needs a number, got a tensor of shape \(3,\)"),
    (lambda: h * 1j, TypeError, "needs a real number for a real tensor"),
    (lambda: h - tube_fft(a[..., :3]), ValueError, r"must have tubes of sizes \(4,\), got \(3,\)"),
    (lambda: h - tube_fft(a, transform="dct"), ValueError, "same transform, got 'dft' and 'dct'"),
    (lambda: tube_fft(a.cfloat()).mT, TypeError, "mT is for real tensors"),
    (lambda: tubal.facewise(a, a), ValueError, "b must have 3 rows"),
    (lambda: tubal.facewise(a, a[..., :1]), ValueError, "b must have tubes of a's length 4, got 1"),
]


@pytest.mark.parametrize(("call", "kind", "message"), ERRORS, ids=[e[2] for e in ERRORS])
def test_error(call, kind, message):
    with pytest.raises(kind, match=message):
        call()


def test_facewise():
    for dtype in (torch.float64, torch.complex128):
        x, y = torch.randn(5, 2, 3, 4, dtype=dtype), torch.randn(3, 6, 4, dtype=dtype)
        wanted = torch.einsum("bijk,jlk->bilk", x, y)
        c = tubal.facewise(x, y)
        assert c.is_contiguous() and torch.allclose(c, wanted)
        first = tubal.facewise(oracle.first(x), oracle.first(y), layout="first")
        assert torch.allclose(first, oracle.first(wanted))
    assert tubal.facewise(torch.ones(2, 3, 4).bfloat16(), torch.ones(3, 1, 4)).dtype == torch.float32


# The peer on PyPI


@pytest.fixture
def mprod():
    return pytest.importorskip("mprod", reason="mprod-package is not installed", exc_type=ImportError)


def test_agrees_with_mprod(mprod):
    """The product and the transpose for the DCT, a random orthogonal matrix, and the product for the DFT."""
    x, y = draw(4, 3, 6), draw(3, 5, 6)
    p, q = x.numpy(), y.numpy()
    wanted = mprod.m_prod(p, q, *mprod.generate_dct(6))
    assert_close(tprod(x, y, transform="dct"), torch.from_numpy(wanted), 1e-14)
    matrix = np.linalg.qr(draw(6, 6).numpy())[0]
    wanted = mprod.m_prod(p, q, mprod.x_m3(matrix), mprod.x_m3(matrix.T))
    assert_close(tprod(x, y, transform=torch.from_numpy(matrix)), torch.from_numpy(wanted.copy()), 1e-13)
    transposed = mprod.tensor_mtranspose(p, *mprod.generate_dct(6))
    assert_close(tubal.ttranspose(x, transform="dct"), torch.from_numpy(transposed.copy()), 1e-14)
    dft = np.fft.fft(np.eye(6))
    found = mprod.m_prod(p, q, mprod.x_m3(dft), mprod.x_m3(np.linalg.inv(dft)))
    assert_close(tprod(x, y), torch.from_numpy(found.real.copy()), 1e-13)


def test_where_mprod_is_wrong(mprod):
    """For the DFT its product of real tensors is complex, and its QR drops imaginary parts."""
    from mprod.decompositions._qr import tqrm

    x, y = draw(4, 3, 6), draw(3, 5, 6)
    dft = np.fft.fft(np.eye(6))
    forward, inverse = mprod.x_m3(dft), mprod.x_m3(np.linalg.inv(dft))
    assert np.iscomplexobj(mprod.m_prod(x.numpy(), y.numpy(), forward, inverse))
    assert not tprod(x, y).is_complex()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", np.exceptions.ComplexWarning)
        q, r = tqrm(x.numpy(), forward, inverse)
    rebuilt = mprod.m_prod(q, r, forward, inverse)
    assert np.linalg.norm(rebuilt - x.numpy()) > 0.1 * np.linalg.norm(x.numpy())
    ours = tubal.tqr(x)
    assert_close(tprod(ours.Q, ours.R), x, 1e-13)
