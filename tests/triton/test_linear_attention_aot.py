"""The Triton kernels of linear attention, compiled ahead of time: what each uses, and its offsets."""

import aot
import pytest
import torch
from linear_attention_oracle import BF16, F16, F32, F64, FORM, FORMS
from pyops.triton_kernels import linear_attention as kernels


def meta(*shape, dtype):
    return torch.empty(shape, dtype=dtype, device="meta")


def launch(name, dtype, key_dim, value_dim, *, step=False, cu_seqlens=None, shape=(2, 256, 2, 4)):
    """Forward and backward, or the decode step, of one form; shape is (B, T, H, HV)."""
    form, wide = FORM[name], F64 if dtype == F64 else F32
    batch, length, heads, values = shape
    q, k = (meta(batch, length, heads, key_dim, dtype=dtype) for _ in range(2))
    v = meta(batch, length, values, value_dim, dtype=dtype)
    g = beta = None
    if form.gate:
        g = meta(*v.shape[:3], *(key_dim,) * (form.gate == "vector"), dtype=wide)
    if form.delta:
        beta = meta(*v.shape[:3], dtype=wide)
    sequences = batch if cu_seqlens is None else len(cu_seqlens) - 1
    state = meta(sequences, values, key_dim, value_dim, dtype=wide)
    if step:
        token = (None if t is None else t[:, 0] for t in (q, k, v, g, beta))
        kernels.linear_attention_step_(*token, state, 0.1)
    else:
        kernels.linear_attention(q, k, v, g, beta, state, cu_seqlens, 0.1, 0)
        kernels.linear_attention_backward(v, state, q, k, v, g, beta, state, cu_seqlens, 0.1, 0)


SEQUENCES = torch.tensor([0, 100, 256])
DEFAULT = [
    ("kda", BF16, 128, 128, "sm_90"),
    ("gated_delta", BF16, 128, 128, "gfx942"),
    ("scalar", BF16, 64, 64, "sm_80"),
    ("scalar", BF16, 128, 128, "sm_100"),
]
SLOW = [
    *((form.name, BF16, 128, 128, arch) for form in FORMS for arch in aot.TARGETS),
    *((form.name, dtype, 64, 64, arch) for form in FORMS for dtype in (F16, F32) for arch in aot.TARGETS),
    *((form.name, BF16, 256, 256, "sm_90") for form in FORMS),
    *((name, F64, 64, 64, "sm_90") for name in ("scalar", "kda")),
    *(("gated_delta", BF16, key_dim, 64, "sm_90") for key_dim in (512, 1024)),
    *(("kda", F32, key_dim, 64, "sm_90") for key_dim in (128, 256)),
]
CASES = DEFAULT + [case for case in SLOW if case not in DEFAULT]
KERNELS = {name for name in vars(kernels) if name.endswith("_kernel")}
# Bytes per thread (AMD: registers) that a kernel may spill. bfloat16 on sm_90 needs 8 and that in one kernel;
# where operands stay in registers (sm_80, gfx942) or have four bytes, the passes over chunks and the path
# that a chunk with NaN takes need more.
SPILLS = dict.fromkeys(KERNELS, 32) | {
    "output_kernel": 64,
    "scores_kernel": 64,
    "state_kernel": 96,
    "state_backward_kernel": 128,
}
# The delta rule keeps all of K in one program: what it spills from there on is the price of not refusing.
WIDE = dict.fromkeys(KERNELS, 4096)


def title(case):
    name, dtype, key_dim, value_dim, arch = case
    return f"{name}-{str(dtype).removeprefix('torch.')}-{key_dim}-{value_dim}-{arch}"


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, id=title(c), marks=() if c in DEFAULT else pytest.mark.slow) for c in CASES],
)
def test_compiles_within_the_bounds(case):
    *arguments, arch = case
    _, dtype, key_dim, _ = arguments
    spills = SPILLS if key_dim * dtype.itemsize <= 512 else WIDE
    wrong = aot.faults(title(case), lambda: launch(*arguments), arch, spills)
    assert not wrong, "\n".join(wrong)


def test_step_and_sequences_compile():
    """The decode step, and the tables of chunks that cu_seqlens brings."""
    wrong = aot.faults("step", lambda: launch("kda", BF16, 128, 128, step=True), "sm_90", {})
    with aot.record("sm_90") as launches:
        launch("scalar", BF16, 64, 64, cu_seqlens=SEQUENCES, shape=(1, 256, 2, 4))
    for item in launches:
        if item.name in ("state_kernel", "output_kernel"):
            wrong += aot.narrow_offsets(item.compile())
    assert not wrong, "\n".join(wrong)


def test_sizes_of_one_compile():
    """Triton makes a constant of every argument that is 1."""
    with aot.record("sm_90") as launches:
        for name in ("none", "kda"):
            launch(name, F32, 1, 1, shape=(1, 1, 1, 1))
        launch("kda", F32, 1, 1, step=True, shape=(1, 1, 1, 1))
    for item in launches:
        assert not aot.narrow_offsets(item.compile()), item.name


def test_every_kernel_is_compiled():
    """The default cases reach every kernel of the module."""
    with aot.record("sm_90") as launches:
        for name, *sizes, _ in DEFAULT:
            launch(name, *sizes)
        launch("kda", BF16, 128, 128, step=True)
    assert {item.name for item in launches} == KERNELS
