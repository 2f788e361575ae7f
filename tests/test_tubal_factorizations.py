"""QR, SVD, eigenvalues and thresholding of tubal tensors: identities, exact reality, gradients, ties."""

import math

import pytest
import torch
import tubal_oracle as oracle
from hypothesis import given, settings
from hypothesis import strategies as st
from suite import assert_close

from pyops import tubal
from pyops.tubal import HalfFaces, tprod, tube_fft

LENGTHS = [1, 2, 3, 4, 5, 7, 8, 61, 64]
lengths = pytest.mark.parametrize("n3", LENGTHS)
MATRICES = pytest.mark.parametrize(("rows", "columns"), [(5, 3), (3, 5), (4, 4), (1, 3), (3, 1)])


def draw(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def times(*factors, **options):
    product = factors[0]
    for factor in factors[1:]:
        product = tprod(product, factor, **options)
    return product


def rebuilt(factors):
    """U * S * V^T."""
    return times(factors.U, factors.S, tubal.ttranspose(factors.V))


def gram(u, **options):
    return tprod(u, u, transpose_a=True, **options)


def identity_like(g, transform="dft", order=3):
    sizes = g.shape[2 - order :]
    eye = tubal.teye(g.shape[-order], sizes, transform=transform, dtype=torch.float64)
    return eye.expand(g.shape)


def assert_f_diagonal(s):
    """Every slice of [..., r, c, n3] is diagonal, and the tubes are real and even."""
    r, c = s.shape[-3:-1]
    off = ~torch.eye(r, c, dtype=torch.bool)
    assert s[..., off, :].abs().max() <= 1e-13 * s.abs().max() if off.any() else True
    assert_close(s, torch.cat([s[..., :1], s[..., 1:].flip(-1)], -1), 1e-12)


# The t-SVD


@MATRICES
@lengths
def test_svd(rows, columns, n3):
    a = draw(2, rows, columns, n3)
    for full in (False, True):
        u, s, v = tubal.tsvd(a, full_matrices=full)
        assert u.dtype == s.dtype == v.dtype == torch.float64
        assert_close(times(u, s, tubal.ttranspose(v)), a, 1e-13)
        for factor in (u, v):
            assert_close(gram(factor), identity_like(gram(factor)), 1e-12)
        assert_f_diagonal(s)
        values = tube_fft(s).full().real.diagonal(dim1=-2, dim2=-1).sort(descending=True)[0]
        exact = torch.linalg.svdvals(torch.fft.fft(a, dim=-1).movedim(-1, -3))
        assert_close(values, exact, 1e-12)
        assert (tube_fft(s).faces.diagonal(dim1=-2, dim2=-1).real.diff(dim=-1) <= 1e-12).all()
    assert_close(tube_fft(s).full().real.flatten(1).square().sum(1) / n3, a.flatten(1).square().sum(1), 1e-12)


@pytest.mark.parametrize("sizes", [(2, 3), (4, 4), (1, 5), (3, 1), (2, 3, 4)])
@pytest.mark.parametrize("transform", ["dft", "dct"])
@pytest.mark.parametrize("layout", ["last", "first"])
def test_factorizations_of_order_p(sizes, transform, layout):
    """Exactly real factors, though a pair of conjugate faces can lie in the half that is kept."""
    order = 2 + len(sizes)
    options = {"transform": transform, "layout": layout, "order": order}
    move = (lambda t: t.movedim((-order, 1 - order), (-2, -1))) if layout == "first" else (lambda t: t)
    back = (lambda t: t.movedim((-2, -1), (-order, 1 - order))) if layout == "first" else (lambda t: t)
    kind = {"transform": transform, "order": order}
    a = draw(2, 3, 2, *sizes)
    for full in (False, True):
        u, s, v = (back(t) for t in tubal.tsvd(move(a), full_matrices=full, **options))
        assert_close(times(u, s, tubal.ttranspose(v, **kind), **kind), a, 1e-13)
        for factor in (u, v):
            g = gram(factor, **kind)
            assert_close(g, identity_like(g, transform, order), 1e-12)
    q, r = (back(t) for t in tubal.tqr(move(a), **options))
    assert_close(tprod(q, r, **kind), a, 1e-13)
    assert_close(gram(q, **kind), identity_like(gram(q, **kind), transform, order), 1e-12)
    square = gram(a, **kind)
    d, w = (back(t) for t in tubal.teigh(move(square), **options))
    assert_close(times(w, d, tubal.ttranspose(w, **kind), **kind), square, 1e-12)
    shrunk = back(tubal.tsvt(move(a), 0.3, **options))
    u, s, v = tubal.tsvd(tube_fft(a, **kind))
    faces = u.faces @ (s.faces.real - 0.3).clamp(min=0).to(s.faces.dtype) @ v.faces.mH
    assert_close(shrunk, u.with_faces(faces).to_tensor(), 1e-12)


def test_svd_of_complex_tensors():
    a = torch.complex(draw(2, 4, 3, 5), draw(2, 4, 3, 5))
    for full in (False, True):
        u, s, v = tubal.tsvd(a, full_matrices=full)
        assert (times(u, s, tubal.ttranspose(v)) - a).norm() <= 1e-13 * a.norm()
        g = gram(v)
        assert (g - identity_like(g)).norm() <= 1e-12 * g.norm()
    q, r = tubal.tqr(a)
    assert (tprod(q, r) - a).norm() <= 1e-13 * a.norm()
    h = gram(a)
    d, w = tubal.teigh(h)
    assert (times(w, d, tubal.ttranspose(w)) - h).norm() <= 1e-13 * h.norm()
    assert (tubal.tsvt(a, 0.0) - a).norm() <= 1e-13 * a.norm()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(dtype):
    gate = {torch.float64: 1e-13, torch.float32: 1e-5}.get(dtype, 3e-2)
    a = draw(2, 5, 3, 6).to(dtype)
    u, s, v = tubal.tsvd(a)
    q, r = tubal.tqr(a)
    wide = [t.double() for t in (u, s, v, q, r)]
    assert all(t.dtype == dtype and t.is_contiguous() for t in (u, s, v, q, r, tubal.tsvt(a, 0.1)))
    assert_close(times(wide[0], wide[1], tubal.ttranspose(wide[2])), a.double(), gate)
    assert_close(tprod(wide[3], wide[4]), a.double(), gate)
    assert_close(tubal.tsvt(a, 0.5), tubal.tsvt(a.double(), 0.5), gate)
    g = tprod(a.double(), a.double(), transpose_a=True).to(dtype)
    d, w = (t.double() for t in tubal.teigh(g))
    assert_close(times(w, d, tubal.ttranspose(w)), g.double(), gate)


@lengths
def test_truncation_is_the_best_approximation(n3):
    """The error of k singular tubes is the rest of the singular values, and no rank-k tensor is closer."""
    a = draw(2, 6, 5, n3)
    u, s, v = tubal.tsvd(a, 2)
    assert u.shape[-2] == v.shape[-2] == s.shape[-2] == 2
    error = (times(u, s, tubal.ttranspose(v)) - a).flatten(1).norm(dim=1)
    values = torch.linalg.svdvals(torch.fft.fft(a, dim=-1).movedim(-1, -3))[..., 2:]
    assert_close(error, (values.flatten(1).square().sum(1) / n3).sqrt(), 1e-12)
    assert tubal.tubal_rank(times(u, s, tubal.ttranspose(v))).tolist() == [2, 2]
    other = tprod(draw(2, 6, 2, n3), draw(2, 2, 5, n3))
    coefficient = (a * other).sum() / other.square().sum()
    assert ((coefficient * other - a).flatten(1).norm(dim=1) >= error).all()
    assert tubal.tsvd(a, 0).U.shape == (2, 6, 0, n3)


@pytest.mark.parametrize("n3", [1, 2, 5, 8])
def test_randomized(n3):
    """Exact for low rank, within percents of the best for decaying values, the same for the same seed."""
    low = tprod(draw(2, 30, 3, n3), draw(2, 3, 20, n3))
    u, s, v = tubal.tsvd(low, 3, method="randomized")
    assert_close(times(u, s, tubal.ttranspose(v)), low, 1e-11)
    assert_close(gram(u), identity_like(gram(u)), 1e-12)
    assert_close(s, tubal.tsvd(low, 3).S, 1e-11)
    decay = torch.diag_embed(0.7 ** torch.arange(20.0, dtype=torch.float64)).to(torch.complex128)
    exact = tubal.tsvd(tube_fft(draw(30, 20, n3)))
    a = (exact.U @ exact.S.with_faces(decay.expand_as(exact.S.faces)) @ exact.V.H).to_tensor()
    best = rebuilt(tubal.tsvd(a, 4))
    runs = [
        tubal.tsvd(a, 4, method="randomized", generator=torch.Generator().manual_seed(3), oversampling=6)
        for _ in range(2)
    ]
    found = rebuilt(runs[0])
    assert (found - a).norm() <= 1.02 * (best - a).norm()
    assert torch.equal(runs[0].U, runs[1].U)
    complex_low = torch.complex(low, low.flip(0))
    u, s, v = tubal.tsvd(complex_low, 6, method="randomized")
    assert (times(u, s, tubal.ttranspose(v)) - complex_low).norm() <= 1e-11 * complex_low.norm()


@MATRICES
@lengths
def test_qr(rows, columns, n3):
    a = draw(2, rows, columns, n3)
    for mode in ("reduced", "complete"):
        q, r = tubal.tqr(a, mode=mode)
        assert_close(tprod(q, r), a, 1e-13)
        assert_close(gram(q), identity_like(gram(q)), 1e-12)
        assert r.movedim(-1, 0).tril(-1).abs().max() <= 1e-13 * r.abs().max()
        assert q.shape[-2] == (rows if mode == "complete" else min(rows, columns))


@lengths
def test_eigh(n3):
    x = draw(2, 4, 4, n3)
    a = x + tubal.ttranspose(x)
    d, v = tubal.teigh(a)
    assert_close(times(v, d, tubal.ttranspose(v)), a, 1e-13)
    assert_close(gram(v), identity_like(gram(v)), 1e-12)
    assert_f_diagonal(d)
    values = tube_fft(d).faces.diagonal(dim1=-2, dim2=-1).real
    assert (values.diff(dim=-1) >= -1e-12).all()
    exact = torch.linalg.eigvalsh(oracle.bcirc(a))
    all_values = tube_fft(d).full().diagonal(dim1=-2, dim2=-1).real.flatten(1).sort(1)[0]
    assert_close(all_values, exact, 1e-12)


# The proximal map of the nuclear norm


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 4),
    columns=st.integers(1, 4),
    n3=st.integers(1, 9),
    tau=st.floats(0.0, 4.0),
    convention=st.sampled_from(["mean", "sum"]),
    transform=st.sampled_from(["dft", "dct"]),
    seed=st.integers(0, 10**6),
)
def test_prox_is_optimal(rows, columns, n3, tau, convention, transform, seed):
    """The optimality condition: (A - X)/tau is a subgradient, spectral norm at most 1 and <., X> = tnn(X)."""
    torch.manual_seed(seed)
    a = draw(rows, columns, n3)
    kind = {"transform": transform}
    tau = tau / n3 if convention == "sum" else tau
    x = tubal.tsvt(a, tau, convention=convention, **kind)
    nuclear = tubal.tnn(x, convention=convention, **kind)
    rest = a - x
    scale = 1 if convention == "mean" or transform == "dct" else n3
    assert tubal.tnorm(rest, "spectral", **kind) <= tau * scale + 1e-12
    assert abs((rest * x).sum() - tau * nuclear) <= 1e-11 * (1 + a.norm() ** 2)

    def objective(y):
        return tau * tubal.tnn(y, convention=convention, **kind) + (y - a).square().sum() / 2

    for step in (1e-1, 1e-3):
        assert objective(x + step * draw(rows, columns, n3)) >= objective(x) - 1e-12


def test_prox_is_firmly_nonexpansive_and_shrinks_rank():
    a, b = draw(6, 5, 4), draw(6, 5, 4)
    x, y = tubal.tsvt(a, 2.0), tubal.tsvt(b, 2.0)
    assert (x - y).square().sum() <= ((a - b) * (x - y)).sum() + 1e-12
    assert tubal.average_rank(x) < tubal.average_rank(a)
    assert torch.equal(tubal.tsvt(a, 1e3), torch.zeros_like(a))
    assert_close(tubal.tsvt(a, 0.0), a, 1e-13)
    scaled = 2 * torch.linalg.qr(draw(4, 4)).Q
    shrunk = tubal.tsvt(a, 0.7, transform=scaled)
    faces = torch.einsum("fk,ijk->fij", scaled, a)
    u, s, vh = torch.linalg.svd(faces, full_matrices=False)
    wanted = torch.einsum("kf,fij->ijk", torch.linalg.inv(scaled), (u * (s - 0.7).clamp(min=0)[:, None]) @ vh)
    assert_close(shrunk, wanted.contiguous(), 1e-12)


# Gradients


@lengths
def test_gradients(n3):
    check = torch.autograd.gradcheck
    rows, columns = (3, 2) if n3 <= 8 else (2, 1)
    a = draw(rows, columns, n3).requires_grad_()
    wide = draw(columns, rows, n3).requires_grad_()
    for x in (a, wide) if n3 <= 8 else (a,):
        assert check(lambda x: tubal.tsvd(x).S, (x,))
        assert check(lambda x: rebuilt(tubal.tsvd(x, 1)), (x,))
        assert check(lambda x: tubal.tsvt(x, 0.8), (x,))
    assert check(lambda x: tprod(*tubal.tqr(x)), (a,))
    assert check(lambda x: tubal.tqr(x).R, (a,))
    if n3 <= 8:
        square = draw(2, 2, n3).requires_grad_()
        symmetric = lambda x: x + tubal.ttranspose(x)  # noqa: E731
        assert check(lambda x: tubal.teigh(symmetric(x)).D, (square,))
        assert check(lambda x: gram(tubal.ttranspose(tubal.teigh(symmetric(x)).V[:, :1])), (square,))


def test_gradients_for_order_p_and_complex():
    check = torch.autograd.gradcheck
    a = draw(2, 2, 2, 3).requires_grad_()
    assert check(lambda x: tubal.tsvd(x, order=4).S, (a,))
    assert check(lambda x: tubal.tsvt(x, 0.8, order=4), (a,))
    z = torch.randn(3, 2, 3, dtype=torch.complex128, requires_grad=True)
    assert check(lambda x: tubal.tsvt(x, 0.8), (z,))
    assert check(lambda x: tubal.tsvt(x.mT, 0.8, layout="first"), (z,))


@pytest.mark.parametrize("n3", [1, 2, 3, 4])
def test_thresholding_has_a_gradient_at_ties(n3):
    """Equal and zero singular values, where the derivatives of U and V do not exist and the map's does."""
    tied = 3 * tubal.teye(3, n3, dtype=torch.float64)
    low = tprod(draw(4, 1, n3), draw(1, 3, n3))
    for a in (tied, torch.cat([tied, 0 * tied[:1]]), low, low.transpose(0, 1).contiguous()):
        a = a.clone().requires_grad_()
        assert torch.autograd.gradcheck(lambda x: tubal.tsvt(x, 0.25), (a,))
    zero = torch.zeros(2, 3, n3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: tubal.tsvt(x, 0.5), (zero,))


def test_thresholding_differentiates_once_and_says_so():
    a = draw(3, 2, 4).requires_grad_()
    (g,) = torch.autograd.grad(tubal.tsvt(a, 0.3).square().sum(), a, create_graph=True)
    with pytest.raises(RuntimeError, match="tsvt has no second derivative"):
        torch.autograd.grad(g.sum(), a)


def test_phase_dependent_losses_raise():
    """The sign, or phase, of singular vectors is arbitrary: torch refuses a loss that depends on it."""
    a = draw(3, 2, 5).requires_grad_()
    with pytest.raises(RuntimeError, match="phase"):
        torch.autograd.grad((tubal.tsvd(a).U * draw(3, 2, 5)).sum(), a)


# Bad input and special values


a = torch.ones(2, 3, 4)
ERRORS = [
    (lambda: tubal.tsvd(a, 3), ValueError, r"k must be at most min\(n1, n2\) = 2, got 3"),
    (lambda: tubal.tsvd(a, -1), ValueError, "k must be at least 0, got -1"),
    (lambda: tubal.tsvd(a, 1.0), TypeError, "k must be an integer, got 1.0"),
    (
        lambda: tubal.tsvd(a, 1, full_matrices=True),
        ValueError,
        "full_matrices must be False with k, got True",
    ),
    (lambda: tubal.tsvd(a, full_matrices=1), TypeError, "full_matrices must be a bool, got 1"),
    (lambda: tubal.tsvd(a, method="lanczos"), ValueError, "method must be one of 'exact', 'randomized', got"),
    (lambda: tubal.tsvd(a, method="randomized"), ValueError, "k must be given with method="),
    (lambda: tubal.tsvd(a, 1, oversampling=-1), ValueError, "oversampling must be at least 0, got -1"),
    (
        lambda: tubal.tsvd(a, 1, power_iterations=0.5),
        TypeError,
        "power_iterations must be an integer, got 0.5",
    ),
    (lambda: tubal.tsvd(a.int()), TypeError, "a must be float64, .* got torch.int32"),
    (lambda: tubal.tqr(a, mode="r"), ValueError, "mode must be one of 'reduced', 'complete', got 'r'"),
    (lambda: tubal.tqr(a[0]), ValueError, "a must have at least 3 dimensions"),
    (lambda: tubal.teigh(a), ValueError, "a must be square, got n1 = 2 and n2 = 3"),
    (lambda: tubal.tsvt(a, -1.0), ValueError, "tau must be finite and at least 0, got -1"),
    (lambda: tubal.tsvt(a, "1"), TypeError, "tau must be a number, got '1'"),
    (lambda: tubal.tsvt(a, 1.0, convention="l1"), ValueError, "convention must be one of 'mean', 'sum'"),
    (lambda: tubal.tsvt(a, 1.0, transform=torch.eye(4) + 1), ValueError, "transform must be unitary up to"),
]


@pytest.mark.parametrize(("call", "kind", "message"), ERRORS, ids=[e[2] for e in ERRORS])
def test_error(call, kind, message):
    with pytest.raises(kind, match=message):
        call()


def test_empty_and_zero_tensors():
    for shape in ((0, 3, 4), (3, 0, 4), (0, 0, 5), (0, 2, 3, 4)):
        a = torch.zeros(shape)
        u, s, v = tubal.tsvd(a)
        assert times(u, s, tubal.ttranspose(v)).shape == shape
        assert tprod(*tubal.tqr(a)).shape == shape and tubal.tsvt(a, 1.0).shape == shape
        assert [t.shape[-2] for t in tubal.tsvd(a, full_matrices=True)] == [shape[-3], shape[-2], shape[-2]]
    assert tubal.teigh(torch.zeros(0, 0, 4)).V.shape == (0, 0, 4)
    zero = torch.zeros(3, 2, 5, dtype=torch.float64)
    u, s, v = tubal.tsvd(zero)
    assert not s.any() and torch.isfinite(u).all()
    assert_close(gram(u), identity_like(gram(u)), 1e-12)


def test_half_faces_in_half_faces_out():
    h = tube_fft(draw(4, 3, 6))
    for result in (tubal.tsvd(h), tubal.tqr(h), tubal.teigh(h.H @ h)):
        assert all(isinstance(factor, HalfFaces) and factor.half for factor in result)
    u, s, v = tubal.tsvd(h)
    assert_close((u @ s @ v.H).to_tensor(), h.to_tensor(), 1e-13)
    assert math.isclose(s.norm(), h.norm(), rel_tol=1e-12)
    assert_close(tubal.tsvd(h).reconstruct().to_tensor(), h.to_tensor(), 1e-13)
    with pytest.raises(ValueError, match="transform must be left out or that of a, 'dft', got 'dct'"):
        tubal.tsvd(h, 2, transform="dct")
    with pytest.raises(ValueError, match="transform must be left out or that of U"):
        tubal.tsvd(h, 2).reconstruct(transform="dct")
    for function in (tubal.tsvd, tubal.tqr, tubal.teigh):
        with pytest.raises(ValueError, match="order must be left out or that of a, 3, got 4"):
            function(h, order=4)


@pytest.mark.parametrize(
    "options", [{}, {"transform": "dct"}, {"layout": "first", "transform": "dct"}, {"order": 4}]
)
def test_svd_leads_back(options):
    a = draw(4, 3, 5, 2)
    assert_close(tubal.tsvd(a, **options).reconstruct(**options), a, 1e-13)
    assert_close(tubal.tsvd(a, full_matrices=True, **options).reconstruct(**options), a, 1e-13)
    low = tubal.tsvd(a, 1, **options).reconstruct(**options)
    assert tubal.tubal_rank(low, **options).eq(1).all()
