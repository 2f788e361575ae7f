"""Half faces and the tubal functions under the modes of torch: autocast, compilation, vmap, copies, forks."""

import copy
import pickle

import pytest
import torch
from suite import assert_close

from pyops import tubal
from pyops.tubal import HalfFaces, tprod, tube_fft

TRANSFORMS = ["dft", "dct"]
transforms = pytest.mark.parametrize("transform", TRANSFORMS)


def draw(*shape, dtype=torch.float32):
    return torch.randn(*shape, dtype=torch.float64).to(dtype)


@transforms
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_lowers_nothing(transform, low):
    """Faces of real transforms are real matrices, whose products autocast would round to 8 bits."""
    a, b, square = draw(4, 6, 5), draw(6, 3, 5), draw(4, 4, 5)
    of_tensor, of_residual = draw(2, 4, 4, 5), draw(2)
    kind = {"transform": transform}

    def everything():
        fa, fb = tube_fft(a, **kind), tube_fft(b, **kind)
        sensing = tubal.Sensing(of_tensor)
        return [
            tprod(a, b, **kind),
            (fa @ fb).to_tensor(),
            (fa @ fa.H).full().abs(),
            tubal.facewise(a, b),
            tubal.facewise(a.permute(2, 0, 1), b.permute(2, 0, 1), layout="first"),
            tubal.tsvd(a, **kind)[1],
            tubal.tsvd(a, 2, **kind)[1],
            tubal.tsvt(a, 0.1, **kind),
            tubal.tinv(square, **kind),
            tubal.tpinv(a, **kind),
            tubal.tsolve(square, a, **kind),
            sensing(square),
            sensing.adjoint(of_residual),
        ]

    wanted = everything()
    with torch.autocast("cpu", dtype=low):
        found = everything()
    for i, (x, y) in enumerate(zip(found, wanted, strict=True)):
        assert x.dtype == y.dtype, i
        assert_close(x, y, 1e-6)


@transforms
def test_half_faces_compile(transform):
    """With no break in the graph; @ itself is nothing that the tracer knows, hence its name."""

    def both(a, b):
        x, y = tube_fft(a, transform=transform), tube_fft(b, transform=transform)
        return ((x.matmul(y) * 2.0 - x.matmul(y) / 4).H).to_tensor()

    a, b = draw(2, 3, 4, dtype=torch.float64), draw(3, 5, 4, dtype=torch.float64)
    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    assert_close(compiled(a, b), both(a, b), 1e-14)
    x, y = tube_fft(a, transform=transform), tube_fft(b, transform=transform)
    assert torch.equal(x.matmul(y).faces, (x @ y).faces)


@pytest.mark.parametrize("clone", [copy.copy, copy.deepcopy, lambda f: pickle.loads(pickle.dumps(f))])
@transforms
def test_half_faces_are_copied_whole(clone, transform):
    f = tube_fft(draw(3, 2, 4), transform=transform)
    g = clone(f)
    assert (g.sizes, g.dtype, g.real, g.transform.name) == (f.sizes, f.dtype, f.real, f.transform.name)
    assert torch.equal((g.H @ f).to_tensor(), (f.H @ f).to_tensor())


def test_messages_of_half_faces():
    f = tube_fft(draw(2, 3, 4))
    other = tube_fft(draw(3, 2, 4))
    cases = [
        (lambda: f * "x", TypeError, "needs a number, got str"),
        (lambda: f * None, TypeError, "needs a number, got NoneType"),
        (lambda: f * True, TypeError, "needs a number, got bool"),
        (lambda: f / "x", TypeError, "/ needs a number, got str"),
        (lambda: f / torch.ones(2), ValueError, r"/ needs a number, got a tensor of shape \(2,\)"),
        (
            lambda: f + other,
            ValueError,
            r"\+ needs matrices of one size, \(2, 3\), on both sides, got \(3, 2\)",
        ),
        (
            lambda: f - other,
            ValueError,
            r"- needs matrices of one size, \(2, 3\), on both sides, got \(3, 2\)",
        ),
        (lambda: f.inner(other), ValueError, "inner needs matrices of one size"),
        (lambda: f.inner(3), TypeError, "other must be HalfFaces, got int"),
        (lambda: HalfFaces(None, (4,)), TypeError, "faces must be a torch.Tensor, got NoneType"),
        (lambda: HalfFaces(f.faces, 4), TypeError, "sizes must be a sequence of tube lengths, got int"),
        (
            lambda: HalfFaces(f.faces, (4,), dtype=torch.int64),
            TypeError,
            "dtype must be floating or complex, got torch.int64",
        ),
    ]
    for call, kind, message in cases:
        with pytest.raises(kind, match=message):
            call()


def test_vmap_of_each_argument():
    a, b = draw(5, 3, 4, 6, dtype=torch.float64), draw(5, 4, 2, 6, dtype=torch.float64)
    vmap = torch.func.vmap
    assert_close(vmap(tprod, (1, -1))(a.movedim(0, 1), b.movedim(0, -1)), tprod(a, b), 1e-14)
    assert_close(vmap(tprod, (0, None))(a, b[0]), tprod(a, b[0]), 1e-14)
    assert_close(vmap(vmap(tprod, (0, None)), (None, 0))(a, b), tprod(a[None], b[:, None]), 1e-14)
    through = vmap(lambda x: (tube_fft(x) @ tube_fft(b[0])).to_tensor())(a)
    assert_close(through, tprod(a, b[0]), 1e-14)
    with pytest.raises(RuntimeError, match="transform must not be vmapped: give one matrix"):
        vmap(lambda m: tprod(a[0], b[0], transform=m))(draw(5, 6, 6, dtype=torch.float64))
