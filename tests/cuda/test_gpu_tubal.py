"""The tubal ops on a CUDA device against float64 on the CPU, and the device part of the CUDA source through
CuPy. The kernels themselves run without a GPU in test_tubal_cuda.py."""

import importlib.util
import itertools
import math

import pytest
import torch
from harness import ROOT

import pyops

pytestmark = pytest.mark.gpu

F64, F32, BF16, F16 = DTYPES = torch.float64, torch.float32, torch.bfloat16, torch.float16
UNIT = {F64: 2.0**-53, F32: 2.0**-24, BF16: 2.0**-9, F16: 2.0**-11}
NONE = (None, None, None)
SHAPES = [(1, 1, 1), (3, 5, 2), (17, 9, 13), (64, 64, 64), (10, 100, 10), (130, 40, 70), (0, 3, 2), (3, 0, 2)]


def expected(a, b, ta=False, tb=False):
    """In float64 on the CPU; faces through torch's complex FFT."""
    a, b = (torch.fft.fft(x.double().cpu()) for x in (a, b))
    a = a.transpose(-3, -2).conj() if ta else a
    b = b.transpose(-3, -2).conj() if tb else b
    return torch.fft.ifft(torch.einsum("...ikf,...kjf->...ijf", a, b)).real


def error(actual, reference):
    return ((actual.double().cpu() - reference).norm() / reference.norm().clamp_min(1e-300)).item()


def gate(dtype, terms, tubes):
    return 1.5 * UNIT[dtype] + (8 + math.sqrt(terms) + math.sqrt(tubes)) * UNIT[F64 if dtype == F64 else F32]


def random(*shape, dtype=F32):
    return torch.randn(shape, dtype=F64).to(dtype)


def tprod(a, b, ta=False, tb=False, first=False, matrices=NONE):
    return torch.ops.pyops.tprod(a, b, ta, tb, first, *matrices)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n3", [*range(1, 19), 32, 61, 64, 100, 256, 4096])
def test_tprod(n3, dtype):
    for n1, n2, n4 in SHAPES if n3 < 256 else SHAPES[:3]:
        a, b = random(n1, n2, n3, dtype=dtype), random(n2, n4, n3, dtype=dtype)
        out = tprod(a.cuda(), b.cuda())
        assert out.is_cuda and out.shape == (n1, n4, n3) and out.dtype == dtype
        assert error(out, expected(a, b)) <= gate(dtype, n2, n3), (n1, n2, n4)
        assert torch.equal(out, tprod(a.cuda(), b.cuda()))


@pytest.mark.parametrize("n3", [1, 4, 8, 17, 64])
def test_transposes_layouts_and_batches(n3):
    for ta, tb, first in itertools.product([False, True], repeat=3):
        a = random(2, 1, *((35, 40) if ta else (40, 35)), n3)
        b = random(3, *((50, 35) if tb else (35, 50)), n3)
        x, y = (t.cuda().movedim(-1, -3).contiguous() if first else t.cuda() for t in (a, b))
        out = tprod(x, y, ta, tb, first)
        assert error(out.movedim(-3, -1) if first else out, expected(a, b, ta, tb)) <= gate(F32, 35, n3)


@pytest.mark.parametrize("n3", [3, 16, 33])
def test_real_matrices(n3):
    a, b = random(40, 35, n3), random(35, 50, n3)
    matrices = [random(n3, n3) for _ in range(3)]
    faces = [
        torch.einsum("ft,...t->...f", m.double(), x.double())
        for m, x in zip(matrices[:2], (a, b), strict=True)
    ]
    product = torch.einsum("ikf,kjf->ijf", *faces)
    reference = torch.einsum("tf,...f->...t", matrices[2].double(), product)
    out = tprod(a.cuda(), b.cuda(), matrices=[m.cuda() for m in matrices])
    assert error(out, reference) <= gate(F32, 35 * n3, n3)


@pytest.mark.parametrize("dtype", [F32, F64, BF16], ids=str)
@pytest.mark.parametrize("n3", [1, 2, 5, 8, 16, 17, 64])
def test_tgram(n3, dtype):
    u = random(2, 70, 35, n3, dtype=dtype)
    for transpose in (False, True):
        out = torch.ops.pyops.tgram(u.cuda(), transpose, False)
        reference = expected(u, u, transpose, not transpose)
        assert error(out, reference) <= gate(dtype, 70 if transpose else 35, n3)
        flipped = torch.cat([out[..., :1], out[..., 1:].flip(-1)], -1).transpose(-3, -2)
        assert torch.equal(out, flipped)


@pytest.mark.parametrize("n3", [4, 17, 32])
def test_gradients_of_broadcast_operands(n3):
    a, b, grad = random(2, 1, 7, 6, n3), random(3, 6, 5, n3), random(2, 3, 7, 5, n3)
    grad_a, grad_b = torch.ops.pyops.tprod_backward(
        *(x.cuda() for x in (grad, a, b)), False, False, False, *NONE
    )
    reference = expected(grad, b, False, True).sum(1, keepdim=True)
    assert error(grad_a, reference) <= gate(F32, 15, n3)
    assert error(grad_b, expected(a, grad, True, False).sum(0)) <= gate(F32, 14, n3)


def test_nan_stays_in_its_tube_row():
    for n3 in (4, 17, 64):
        a, b = random(2, 40, 35, n3).cuda(), random(2, 35, 50, n3).cuda()
        clean = tprod(a, b)
        a[1, 3, 2, 1] = math.nan
        out = tprod(a, b)
        bad = torch.zeros_like(out, dtype=torch.bool)
        bad[1, 3] = True
        assert out[bad].isnan().all()
        assert torch.equal(out[~bad], clean[~bad])


def test_current_stream_and_graph_capture():
    for n3 in (4, 17, 64):
        a, b = random(20, 30, n3).cuda(), random(30, 10, n3).cuda()
        tprod(a, b)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = tprod(a, b)
        a.copy_(random(20, 30, n3))
        graph.replay()
        torch.cuda.synchronize()
        assert error(out, expected(a, b)) <= gate(F32, 30, n3)


def test_it_is_served_by_cuda():
    build = pyops.info()["build"]
    if not build or not build["cuda"]:
        pytest.skip("the library was built without CUDA")
    x = torch.ones(2, 2, 4, device="cuda")
    assert pyops.which("tprod", x, x, False, False, False, *NONE) == "cuda:cuda"


@pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="no CuPy")
@pytest.mark.parametrize("name", ["float", "double"])
def test_device_part_through_cupy(name):
    """CuPy's RawModule compiles the same source without nvcc, and its kernels run on torch's memory."""
    import cupy

    names = [
        "tube_product<{}, 1>",
        "tube_product<{}, 4>",
        "fft_forward<{}>",
        "fft_inverse<{}>",
        "fill_dft<{}>",
    ]
    kernels = [f"pyops::cuda::{k.format(name)}" for k in names]
    module = cupy.RawModule(
        code=(ROOT / "csrc" / "tubal" / "tubal_cuda.cu").read_text(),
        options=("-std=c++20", f"-I{ROOT / 'csrc'}"),
        name_expressions=kernels,
    )
    for kernel in kernels:
        assert module.get_function(kernel).num_regs > 0
    n, planes = 7, 10
    matrix = torch.full((planes, n), math.nan, dtype=F32 if name == "float" else F64, device="cuda")
    arguments = (matrix.data_ptr(), cupy.int64(n), cupy.bool_(True), cupy.bool_(False))
    with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
        module.get_function(kernels[-1])((2,), (256,), arguments)
    torch.cuda.synchronize()
    faces = torch.fft.rfft(torch.eye(n, dtype=F64)).T
    parts = torch.stack([faces.real, faces.imag, faces.real + faces.imag], 1).flatten(0, 1)
    torch.testing.assert_close(matrix.cpu().double(), torch.cat([parts[:1], parts[3:]]), atol=1e-6, rtol=1e-6)
