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


@pytest.mark.parametrize("n3", [3, 17, 32])
def test_gradients_of_transposes_and_matrices(n3):
    for ta, tb, given in itertools.product([False, True], repeat=3):
        a = random(2, *((6, 7) if ta else (7, 6)), n3, dtype=F64).requires_grad_()
        b = random(2, *((5, 6) if tb else (6, 5)), n3, dtype=F64).requires_grad_()
        transform = random(n3, n3, dtype=F64) if given else "dft"
        grads = []
        for device in ("cuda", "cpu"):
            m = transform.to(device) if given else transform
            c = pyops.tubal.tprod(a.to(device), b.to(device), transform=m, transpose_a=ta, transpose_b=tb)
            weights = torch.linspace(-1, 1, c.numel(), dtype=F64).reshape(c.shape)
            grads.append((c, *torch.autograd.grad((c * weights.to(device)).sum(), (a, b))))
        for on_cuda, on_cpu in zip(*grads, strict=True):
            assert error(on_cuda, on_cpu) <= 1e-12, (ta, tb, given)


def test_batches_of_many_dimensions():
    """More than the launchers take: some merge, others are copied with their kinds of dimensions together."""
    for x, y in (
        ((2, 3, 2, 2, 2), (2, 3, 2, 2, 2)),
        ((2, 1, 2, 1, 2, 1), (1, 2, 1, 2, 1, 2)),
        ((2, 1, 3, 1, 2, 1), (2,)),
    ):
        a, b = random(*x, 5, 4, 6, dtype=F64), random(*y, 4, 3, 6, dtype=F64)
        a = a.movedim(0, 3).contiguous().movedim(3, 0) if len(x) > 4 else a
        grad = torch.randn_like(expected(a, b))
        found = (
            tprod(a.cuda(), b.cuda()),
            *torch.ops.pyops.tprod_backward(grad.cuda(), a.cuda(), b.cuda(), False, False, False, *NONE),
            torch.ops.pyops.tgram(a.cuda(), False, False),
        )
        wanted = (
            expected(a, b),
            expected(grad, b, False, True).sum_to_size(a.shape),
            expected(a, grad, True, False).sum_to_size(b.shape),
            expected(a, a, False, True),
        )
        for one, other in zip(found, wanted, strict=True):
            assert one.shape == other.shape and one.is_contiguous()
            assert error(one, other) <= 1e-13
    a, b = random(2, 0, 2, 1, 2, 5, 4, 6).cuda(), random(2, 1, 1, 2, 2, 4, 3, 6).cuda()
    assert tprod(a, b).shape == (2, 0, 2, 2, 2, 5, 3, 6)
    grads = torch.ops.pyops.tprod_backward(tprod(a, b), a, b, False, False, False, *NONE)
    assert grads[0].shape == a.shape and grads[1].shape == b.shape and not grads[1].any()


def test_strided_views():
    a, b = random(2, 12, 10, 9).cuda(), random(12, 14, 9).cuda()
    views = (
        (a[:, ::2, 1:9:2], b[:8:2, :, :]),
        (a.transpose(1, 2)[:, :, 1::3], b[2:6].flip(-1)),
        (a[:, :4, :1].expand(2, 4, 4, 9), b[:4, :1, :1].expand(4, 5, 9)),
        (a.movedim(-1, 0).contiguous().movedim(0, -1)[:, :5, :7, ::2], b[:7, :, 4:]),
    )
    for x, y in views:
        assert torch.equal(tprod(x, y), tprod(x.contiguous(), y.contiguous()))
        assert error(tprod(x, y), expected(x, y)) <= gate(F32, 10, 9)


def test_devices_must_agree():
    a, b, m = random(2, 3, 4), random(3, 2, 4), random(4, 4)
    with pytest.raises(ValueError, match=r"b must be on the device of a, cpu, got cuda:0"):
        pyops.tubal.tprod(a, b.cuda())
    op = torch.ops.pyops.tprod
    for call, message in (
        (
            lambda: op(a, b.cuda(), False, False, False, *NONE),
            "b must be on the device of a, cpu, got cuda:0",
        ),
        (
            lambda: op(a.cuda(), b, False, False, False, *NONE),
            "b must be on the device of a, cuda:0, got cpu",
        ),
        (
            lambda: op(a.cuda(), b.cuda(), False, False, False, m, m.cuda(), m.cuda()),
            "forward_a must be on the device of a, cuda:0, got cpu",
        ),
        (
            lambda: torch.ops.pyops.tprod_backward(
                random(2, 2, 4), a.cuda(), b.cuda(), False, False, False, *NONE
            ),
            "grad must be on the device of a, cuda:0, got cpu",
        ),
    ):
        with pytest.raises(RuntimeError, match=message):
            call()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices")
def test_the_second_device():
    a, b = random(9, 8, 17), random(8, 7, 17)
    out = tprod(a.to("cuda:1"), b.to("cuda:1"))
    assert out.device.index == 1 and error(out, expected(a, b)) <= gate(F32, 8, 17)
    with pytest.raises(RuntimeError, match="b must be on the device of a, cuda:1, got cuda:0"):
        tprod(a.to("cuda:1"), b.to("cuda:0"))


def test_the_public_functions_on_a_device():
    """What the ops' tests do not pass through: promotion, other transforms, half faces, factorizations."""
    a, b = random(2, 7, 6, 5, dtype=F64), random(6, 4, 5)
    for kind in ({}, {"transform": "dct"}, {"transform": random(5, 5)}):
        on = {k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in kind.items()}
        out = pyops.tubal.tprod(a.cuda(), b.cuda(), **on)
        assert out.dtype == F64 and error(out, pyops.tubal.tprod(a, b, **kind)) <= 1e-12
    faces = pyops.tubal.tube_fft(a.cuda()) @ pyops.tubal.tube_fft(b.double().cuda())
    assert error(faces.to_tensor(), expected(a, b)) <= 1e-13
    u, s, v = pyops.tubal.tsvd(a.cuda())
    again = pyops.tubal.tprod(pyops.tubal.tprod(u, s), v, transpose_b=True)
    assert error(again, a) <= 1e-13
    a16 = a.to(BF16).cuda().requires_grad_()
    pyops.tubal.tgram(a16).sum().backward()
    assert a16.grad.shape == a.shape and a16.grad.isfinite().all()


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
