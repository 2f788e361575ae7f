"""The lmo ops on a CUDA device against the plain-torch reference in float64 on the CPU, and the device part
of the CUDA source through CuPy. The kernels themselves run without a GPU in test_lmo_cuda.py."""

import importlib.util
import math

import pytest
import torch
from harness import ROOT

import pyops
from pyops.reference import lmo as reference

pytestmark = pytest.mark.gpu

F64, F32, BF16, F16 = DTYPES = torch.float64, torch.float32, torch.bfloat16, torch.float16
UNIT = {F64: 2.0**-53, F32: 2.0**-24, BF16: 2.0**-9, F16: 2.0**-11}
NORMS = ["sign", "col", "row", "euclidean"]
SHAPES = [
    (1, 1),
    (7, 1),
    (1, 300),
    (33, 17),
    (3, 64, 96),
    (2, 770, 1030),
    (1, 100000),
    (100000, 3),
    (0, 4),
    (2, 0, 4),
]
NS5 = [3.4445, -4.7750, 2.0315] * 5


def error(actual, expected):
    expected = expected.double().cpu()
    return ((actual.double().cpu() - expected).norm() / expected.norm().clamp_min(1e-300)).item()


def gate(dtype):
    return 1.5 * UNIT[dtype] + 16 * UNIT[F64 if dtype == F64 else F32]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norm", NORMS)
def test_unit_direction(norm, dtype):
    for shape in SHAPES:
        g = torch.randn(shape, dtype=F64).to(dtype)
        expected = reference.unit_direction(g.double(), norm, 0.5)
        for x in (g.cuda(), g.mT.contiguous().cuda().mT, torch.cat([g, g], -1).cuda()[..., : g.shape[-1]]):
            before = x.clone()
            out = torch.ops.pyops.unit_direction(x, norm, 0.5)
            assert out.is_cuda and out.shape == x.shape and out.dtype == dtype
            assert torch.equal(x, before)
            if g.numel():
                assert error(out, expected) <= gate(dtype), shape
                assert torch.equal(out, torch.ops.pyops.unit_direction(x, norm, 0.5))


def test_unit_direction_is_served_by_cuda():
    """A library built with nvcc serves the vector norms by its own kernels, not by the reference."""
    build = pyops.info()["build"]
    if not build or not build["cuda"]:
        pytest.skip("the library was built without CUDA")
    assert pyops.which("unit_direction", torch.ones(2, 2, device="cuda"), "row", 1.0) == "cuda:cuda"


@pytest.mark.parametrize("norm", NORMS[1:])
def test_unit_direction_is_scale_safe(norm):
    for scale in (1e-44, 1e-30, 1e30, 1e38):
        g = ((torch.rand(40, 50) + 0.5) * scale).clamp(max=3e38)
        expected = reference.unit_direction(g.double(), norm, 1.0)
        assert error(torch.ops.pyops.unit_direction(g.cuda(), norm, 1.0), expected) <= gate(F32)
    g = torch.zeros(3, 5, 6, device="cuda")
    assert (torch.ops.pyops.unit_direction(g, norm, 1.0) == 0).all()
    g = torch.randn(3, 5, 6, device="cuda")
    clean = torch.ops.pyops.unit_direction(g, norm, 1.0)
    g[1, 2, 3] = math.inf
    out = torch.ops.pyops.unit_direction(g, norm, 1.0)
    bad = {"col": (1, slice(None), 3), "row": (1, 2), "euclidean": (1,)}[norm]
    assert out[bad].isnan().all()
    mask = out.isnan()
    assert torch.equal(out[~mask], clean[~mask])


def steps_of(norm, tensors, seed, nesterov, light):
    w, g, m = ([t.clone() for t in ts] for ts in tensors)
    compute = "bfloat16" if norm == "spectral" and w[0].dtype == BF16 else "float32"
    torch.ops.pyops.lmo_step_(
        w, g, [] if light else m, norm, [0.9] * len(w), [0.1] * len(w), 0.8, nesterov, 0.75 if light else 1.0,
        NS5, [], "direct", compute, 0.0, seed,
    )  # fmt: skip
    return w, g, m


@pytest.mark.parametrize("norm", [*NORMS, "spectral"])
@pytest.mark.parametrize("light", [False, True])
def test_lmo_step_agrees_with_the_cpu(norm, light):
    """The same op, the same arguments, on both devices; several tensors, mixed layouts and types."""
    for dtype in (F32, BF16):
        shapes = [(33, 17), (2, 64, 96), (130, 264)]
        tensors = [[torch.randn(s).to(dtype) for s in shapes] for _ in range(3)]
        tensors[0][1] = tensors[0][1].mT.contiguous().mT
        on_gpu = [[t.cuda() for t in ts] for ts in tensors]
        on_gpu[0][1] = on_gpu[0][1].mT.contiguous().mT
        here = steps_of(norm, tensors, -1, True, light)
        there = steps_of(norm, on_gpu, -1, True, light)
        # A rounding of d that falls the other way moves u by an ulp of its type, a tenth of which reaches w.
        bound = (
            (3e-2 if norm == "spectral" else 0.0) * (dtype == BF16)
            + 2 * gate(dtype)
            + 2e-5 * (norm == "spectral")
        )
        for a, b in zip((t for ts in here for t in ts), (t for ts in there for t in ts), strict=True):
            assert error(b, a) <= bound


def test_stochastic_rounding_hashes_the_same_bits_on_both_devices():
    tensors = [[torch.randn(40, 50).to(BF16)], [torch.randn(40, 50).to(BF16)], []]
    here, _, _ = steps_of("sign", tensors, 7, False, True)
    there, _, _ = steps_of("sign", [[t.cuda() for t in ts] for ts in tensors], 7, False, True)
    # Another hash would move a third of the weights; one fused multiply-add more or less moves hardly any.
    assert (here[0] == there[0].cpu()).double().mean() > 0.99


def test_current_stream_and_graph_capture():
    """Launches follow torch's stream and allocate from its pool, so a CUDA graph replays them."""
    g = torch.randn(64, 96, device="cuda")
    torch.ops.pyops.unit_direction(g, "row", 1.0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = torch.ops.pyops.unit_direction(g, "row", 1.0)
    g.copy_(torch.randn(64, 96))
    graph.replay()
    torch.cuda.synchronize()
    assert error(out, reference.unit_direction(g.cpu().double(), "row", 1.0)) <= gate(F32)


def test_more_than_two_to_the_31_elements():
    if torch.cuda.get_device_properties(0).total_memory < 40 * 2**30:
        pytest.skip("needs 40 GiB of device memory")
    g = torch.ones(2**16 + 1, 2**15, dtype=BF16, device="cuda")
    g[-1] = 3.0
    out = torch.ops.pyops.unit_direction(g, "row", 1.0)
    assert torch.allclose(out[[0, -1]].float(), torch.full((2, 1), 2.0**-7.5, device="cuda"), rtol=2**-8)
    out = torch.ops.pyops.unit_direction(g, "col", 1.0)
    assert torch.allclose(out[-1].float(), torch.tensor(3 / math.sqrt(2**16 + 9), device="cuda"), rtol=2**-8)


@pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="no CuPy")
@pytest.mark.parametrize("name", ["float", "double"])
def test_device_part_through_cupy(name):
    """CuPy's RawModule compiles the same source without nvcc, and its kernels run on torch's memory."""
    import cupy

    kernels = [
        f"pyops::cuda::{k}<{name}>"
        for k in ("apply_pass", "column_partials", "norm_partials", "finish_norms")
    ]
    module = cupy.RawModule(
        code=(ROOT / "csrc" / "lmo" / "lmo_cuda.cu").read_text(),
        options=("-std=c++20", f"-I{ROOT / 'csrc'}"),
        name_expressions=kernels,
    )
    for kernel in kernels:
        assert module.get_function(kernel).num_regs > 0
    dtype = F32 if name == "float" else F64
    units, segments = 70, 50
    partials = torch.zeros(units, segments, 3, dtype=dtype, device="cuda")
    partials[..., 1] = torch.rand(units, segments, dtype=dtype, device="cuda")
    factors = torch.full((units, 2), math.nan, dtype=dtype, device="cuda")
    finish = module.get_function(kernels[-1])
    arguments = (partials.data_ptr(), factors.data_ptr(), cupy.int64(units), cupy.int64(segments))
    with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
        finish((9,), (256,), arguments)
    torch.cuda.synchronize()
    torch.testing.assert_close(factors[:, 1], partials[..., 1].sum(1).rsqrt())
    assert (factors[:, 0] == 1).all()
