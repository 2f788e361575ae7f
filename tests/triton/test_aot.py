"""Every kernel, compiled ahead of time for each promised GPU: registers, spills, shared memory, offsets."""

import aot
import pytest
import torch
import triton
import triton.language as tl
from pyops.triton_kernels import lmo

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
NS4 = [3.4445, -4.775, 2.0315] * 4


def meta(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")


def polar(compute, n):
    """Segments of one, one and two steps: every form of both products."""
    g = meta(2, n, 4 * n, dtype=DTYPES.get(compute, torch.float32))
    lmo.polar(g, NS4, [1, 2], "gram", compute, "fro", 0.0, -1.0, 0, False)


def adaptive(compute, n):
    g = meta(2, 4 * n, n, dtype=DTYPES.get(compute, torch.float32))
    lmo.polar(g, NS4, [], "direct", compute, "fro", 0.0, 1e-3, 1, True)


def normalisations(dtype):
    """No step at all, one row, the sharper norm, and an input dtype other than the operands'."""
    g = meta(2, 100, 333, dtype=DTYPES[dtype])
    lmo.polar(g, [], [], "auto", "bfloat16", "fro", 1e-7, -1.0, 0, False)
    lmo.polar(meta(2, 333, 1), NS4, [], "auto", "float32", "fro", 0.0, -1.0, 0, True)
    lmo.polar(
        g,
        NS4[:3],
        [],
        "auto",
        "float64" if dtype == "float64" else "bf16x3",
        "schatten4",
        0.0,
        -1.0,
        0,
        False,
    )


def step(dtype, n):
    """Momentum in the first pass, weights rounded at random in the last epilogue; a norm without products."""
    weights, grads = ([meta(*s, dtype=DTYPES[dtype]) for s in ((n, 2 * n), (2 * n, n))] for _ in range(2))
    momenta = [meta(n, 2 * n), meta(2 * n, n)]
    for m in (momenta, []):
        lmo.lmo_step_(
            weights, grads, m, "spectral", [0.9] * 2, [0.1] * 2, 0.9, True, 1.0,
            NS4[:3], [], "direct", "bfloat16", 0.0, 1,
        )  # fmt: skip
    lmo._launch(
        lmo.apply_kernel, 16, weights[0], grads[0], 0.9, 0.1, 12345, 6789, n, 2 * n, *(0, 2 * n, 1) * 2,
        STOCHASTIC=dtype in ("bfloat16", "float16"), SIDE=lmo.SIDE,
    )  # fmt: skip


# An op joins by adding its launches. By default the first case is compiled for every target and the others
# for one of each vendor; the rest is for --run-slow.
CASES = [
    (polar, "bfloat16", 2048),
    (polar, "float32", 512),
    (polar, "bf16x3", 2048),
    (polar, "float64", 512),
    (adaptive, "bfloat16", 2048),
    (normalisations, "float32"),
    (step, "bfloat16", 2048),
]
SLOW = [
    *((polar, compute, n) for compute in ("bfloat16", "bf16x3", "float16") for n in (24, 512)),
    *((polar, compute, 24) for compute in ("float32", "float64")),
    (polar, "float16", 2048),
    *((adaptive, compute, 512) for compute in lmo.COMPUTE),
    *((normalisations, dtype) for dtype in ("float64", "bfloat16", "float16")),
    *((step, dtype, n) for dtype in DTYPES for n in (64, 512)),
]
# (kernel, case): bytes per thread that may spill. All are in the epilogue, once per tile, outside the
# loop over k: a 128 x 128 tile leaves 64 sums a thread, to which weights add old weights and random bits,
# and bf16x3 and the form that also stores Q add values to store. Triton 3.6 spills where later versions
# do not.
SPILLS = {
    ("update_kernel", "step-bfloat16-2048"): 512,
    ("symmetric_kernel", "polar-bf16x3-2048"): 256,
    ("symmetric_kernel", "polar-bfloat16-2048"): 256,
    ("symmetric_kernel", "polar-float16-2048"): 256,
    ("symmetric_kernel", "polar-float64-512"): 16,
    ("symmetric_kernel", "adaptive-float64-512"): 16,
    ("symmetric_kernel", "adaptive-bfloat16-2048"): 64,
}


def title(case):
    return "-".join([case[0].__name__, *map(str, case[1:])])


def cells():
    """Every case on every target, the less telling ones marked slow."""
    for case in CASES + SLOW:
        for arch in aot.TARGETS:
            default = case == CASES[0] or (case in CASES and arch in ("sm_90", "gfx942"))
            marks = () if default else pytest.mark.slow
            yield pytest.param(case, arch, id=f"{title(case)}-{arch}", marks=marks)


@pytest.mark.parametrize(("case", "arch"), list(cells()))
def test_compiles_within_the_bounds(case, arch):
    launch, *arguments = case
    name = title(case)
    spills = {kernel: size for (kernel, of), size in SPILLS.items() if of == name}
    wrong = aot.faults(name, lambda: launch(*arguments), arch, spills)
    assert not wrong, "\n".join(wrong)


def test_every_kernel_is_compiled():
    """The default cases reach every kernel of the module."""
    reached = set()
    with aot.record("sm_90") as launches:
        for launch, *arguments in CASES:
            launch(*arguments)
    reached = {item.name for item in launches}
    assert reached == {name for name in vars(lmo) if name.endswith("_kernel")}


def test_narrow_offsets_are_found():
    """The check itself: 32-bit products as offsets are reported, whether widened afterwards or not."""
    for kernel, expected in ((narrow_kernel, "addptr"), (widened_kernel, "extsi of the 32-bit product")):
        with aot.record("sm_90") as launches:
            kernel[(1,)](meta(8), 1000, enable_fp_fusion=True)
        found = aot.narrow_offsets(launches[0].compile())
        assert found and all(expected in line for line in found)


@triton.jit
def narrow_kernel(x_ptr, stride):
    tl.store(x_ptr + tl.program_id(0) * stride, 1.0)


@triton.jit
def widened_kernel(x_ptr, stride):
    tl.store(x_ptr + (tl.program_id(0) * stride).to(tl.int64), 1.0)
