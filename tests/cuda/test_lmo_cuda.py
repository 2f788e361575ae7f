"""csrc/lmo/lmo_cuda.cu, executed by the emulator, against float64 references on the rounded inputs."""

import ctypes
import itertools
import math

import pytest
import torch
from harness import HERE, ORDERS, Arena, Emulator, assert_written, compile_emulated, poison

F64, F32, BF16, F16 = DTYPES = torch.float64, torch.float32, torch.bfloat16, torch.float16
NORMS = ["sign", "col", "row", "euclidean"]
# Half an ulp of the stored type, and of the accumulator with room for the sum of a norm.
UNIT = {F64: 2.0**-53, F32: 2.0**-24, BF16: 2.0**-9, F16: 2.0**-11}


class View(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("dtype", ctypes.c_int)] + [
        (name, ctypes.c_longlong) for name in ("batch", "row", "col")
    ]


def view(tensor):
    if tensor is None:
        return View(None, DTYPES.index(F32), 0, 0, 0)
    strides = (0, *tensor.stride()) if tensor.dim() == 2 else tensor.stride()
    return View(tensor.data_ptr(), DTYPES.index(tensor.dtype), *strides)


class Lmo:
    """The launchers on torch tensors, with scratch memory of exactly the size asked for."""

    def __init__(self, order="forward", seed=0):
        self.emulator = Emulator(compile_emulated(HERE / "shims" / "lmo.cu"), order, seed)
        self.emulator.library.shim_norm_workspace.restype = ctypes.c_size_t
        self.arena = Arena()

    def call(self, name, tensors, sizes, *rest, status=0):
        def argument(x):
            if isinstance(x, torch.Tensor):
                return ctypes.c_void_p(x.data_ptr())
            return (
                ctypes.c_double(x)
                if isinstance(x, float)
                else ctypes.c_longlong(x)
                if x is not None
                else None
            )

        views = [ctypes.byref(view(t)) for t in tensors]
        assert (
            self.emulator.call(f"shim_{name}", *views, *map(argument, sizes), *map(argument, rest)) == status
        )
        self.arena.check()

    def workspace(self, norm, sizes):
        count = self.emulator.library.shim_norm_workspace(norm, *map(ctypes.c_longlong, sizes))
        assert count % 8 == 0
        return poison(self.arena.allocate(count // 8, F64))

    def guarded(self, tensor):
        return self.arena.copy(tensor)

    def poisoned(self, tensor):
        return poison(self.arena.copy(tensor))

    def unit_direction(self, g, norm, scale=1.0, out=None):
        out = self.poisoned(torch.empty(g.shape, dtype=g.dtype)) if out is None else out
        norm = NORMS.index(norm)
        self.call("unit_direction", (g, out), sizes(g), norm, scale, self.workspace(norm, sizes(g)))
        assert_written(out)
        return out

    def vector_step(
        self, w, g, m, norm, shrink, step, momentum=0.0, nesterov=False, decay=1.0, seed=-1, tensor=0
    ):
        norm = NORMS.index(norm)
        rest = (
            norm,
            shrink,
            step,
            momentum,
            int(nesterov),
            decay,
            seed,
            tensor,
            self.workspace(norm, sizes(w)),
        )
        self.call("vector_step", (w, g, m), sizes(w), *rest)


def sizes(t):
    return (1, *t.shape) if t.dim() == 2 else tuple(t.shape)


def unit(d, norm):
    """u(d) in float64, with every norm computed after dividing by the largest magnitude."""
    d = d.double()
    if norm == "sign":
        return d.sign() + 0 * d  # sign(NaN) is NaN
    dims = {"col": (-2,), "row": (-1,), "euclidean": (-2, -1)}[norm]
    top = d.abs().amax(dims, keepdim=True) if d.numel() else d.new_ones(())
    scaled = d / top.where(top > 0, 1)
    length = (scaled * scaled).sum(dims, keepdim=True).sqrt()
    finite = d.isfinite().all(dims, keepdim=True)
    return torch.where(finite, scaled / length.where(top > 0, 1), float("nan"))


def error(actual, reference):
    reference = reference.double()
    return ((actual.double() - reference).norm() / reference.norm().clamp_min(1e-300)).item()


def gate(stored, *others):
    """Rounding of the result, plus a few of the accumulator's."""
    accumulator = F64 if F64 in (stored, *others) else F32
    return 1.5 * UNIT[stored] + 8 * UNIT[accumulator]


def layouts(shape, dtype, random=None):
    """The same values in memory of many layouts; the last repeats its first matrix."""
    b, r, c = shape
    x = torch.randn(shape, dtype=F64, generator=random).to(dtype)
    yield "contiguous", x
    yield "transposed", x.mT.contiguous().mT
    yield "columns", torch.cat([x, x, x], -1)[:, :, c : 2 * c]
    yield "strided", x.repeat_interleave(2, -1)[:, :, ::2]
    yield "rows", x.repeat_interleave(3, 1)[:, ::3]
    yield "unaligned", torch.cat([x.flatten(), x.flatten()[:1]]).as_strided(shape, x.stride(), 1).contiguous()
    yield "permuted batch", x.movedim(0, 2).contiguous().movedim(2, 0)
    yield "expanded", x[:1].expand(b, r, c)


SHAPES = [
    (1, 1, 1), (1, 1, 7), (2, 7, 1), (3, 5, 8), (1, 16, 24), (2, 33, 17), (1, 3, 300), (1, 70, 264),
    (5, 2, 2), (1, 2, 4200), (1, 4200, 2), (2, 90, 96),
]  # fmt: skip
LONG = [(1, 1, 40000), (1, 40000, 1), (1, 300, 300), (1, 5000, 9)]  # more than one segment per norm


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norm", NORMS)
def test_unit_direction(norm, dtype):
    lmo = Lmo()
    for shape in SHAPES + LONG:
        g = lmo.guarded(torch.randn(shape, dtype=F64).to(dtype))
        before = g.clone()
        out = lmo.unit_direction(g, norm, 0.75)
        assert error(out, 0.75 * unit(g, norm)) <= gate(dtype), shape
        assert torch.equal(g, before)


@pytest.mark.parametrize("norm", NORMS)
def test_unit_direction_of_any_strides(norm):
    for dtype, shape in itertools.product((F32, BF16), [(3, 5, 8), (2, 33, 17), (2, 24, 48)]):
        for name, g in layouts(shape, dtype):
            lmo = Lmo()
            g = lmo.guarded(g)
            for out in (torch.empty(shape, dtype=dtype), torch.empty(shape, dtype=dtype).mT.contiguous().mT):
                out = lmo.unit_direction(g, norm, out=lmo.poisoned(out))
                assert error(out, unit(g, norm)) <= gate(dtype), (name, shape, out.stride())


@pytest.mark.parametrize("norm", NORMS)
def test_unaligned_memory(norm):
    """Tensors that begin at any multiple of their element size, against the end of their memory."""
    for dtype, shape in itertools.product(DTYPES, [(1, 4, 16), (2, 3, 9)]):
        lmo = Lmo()
        for offset in range(1, 16 // dtype.itemsize):
            x = lmo.arena.allocate(math.prod(shape) + offset, dtype).copy_(
                torch.randn(math.prod(shape) + offset)
            )
            g = x[offset:].view(shape)
            out = poison(lmo.arena.allocate(math.prod(shape) + offset, dtype))[offset:].view(shape)
            assert error(lmo.unit_direction(g, norm, out=out), unit(g, norm)) <= gate(dtype)


@pytest.mark.parametrize("norm", NORMS)
def test_in_place(norm):
    lmo = Lmo()
    g = lmo.guarded(torch.randn(2, 33, 40))
    reference = unit(g, norm)
    assert error(lmo.unit_direction(g, norm, out=g), reference) <= gate(F32)


@pytest.mark.parametrize("norm", NORMS[1:])
@pytest.mark.parametrize(("dtype", "scales"), [
    (F32, [1e-44, 1e-30, 2**-60, 1.0, 2**42, 1e38]), (BF16, [1e-39, 2**-60, 1.0, 2**42, 1e38]),
    (F16, [1e-7, 1.0, 6e4]), (F64, [4e-323, 1e-300, 2**-480, 1.0, 2.0**480, 1e308]),
], ids=lambda x: str(x) if isinstance(x, torch.dtype) else "")  # fmt: skip
def test_norms_are_scale_safe(norm, dtype, scales):
    """From subnormals to the largest finite number, and both in one row: no overflow, no flush to zero.

    At the powers of two the kernel changes the scale of its squares, and units have elements on both sides.
    """
    lmo = Lmo()
    base = torch.rand(2, 12, 20, dtype=F64) + 0.5
    base *= torch.randn_like(base).sign()
    for scale in scales:
        limit = torch.finfo(dtype).max
        g = lmo.guarded((base * scale).clamp(-limit, limit).to(dtype))
        assert error(lmo.unit_direction(g, norm), unit(g, norm)) <= gate(dtype), scale
    small, large = scales[0], scales[-1]
    mixed = lmo.guarded(torch.where(torch.rand_like(base) < 0.5, base * small, (base * large / 2)).to(dtype))
    assert error(lmo.unit_direction(mixed, norm), unit(mixed, norm)) <= gate(dtype)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_zeros_and_empties(norm, dtype):
    lmo = Lmo()
    zero = lmo.guarded(torch.zeros(2, 9, 17, dtype=dtype))
    assert (lmo.unit_direction(zero, norm) == 0).all()
    for shape in ((0, 3, 4), (2, 0, 4), (2, 3, 0), (0, 0, 0)):
        empty = lmo.guarded(torch.empty(shape, dtype=dtype))
        lmo.unit_direction(empty, norm)
        lmo.vector_step(empty, empty, None, norm, 0.5, 0.5)
        lmo.vector_step(empty, empty, empty, norm, 0.5, 0.5, 0.9, True)
        assert lmo.emulator.launches == 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("norm", NORMS)
def test_nonfinite_stays_in_its_unit(norm, bad):
    for dtype, shape in itertools.product((F32, F16), [(3, 6, 20), (2, 30, 1100)]):
        lmo = Lmo()
        g = torch.randn(shape).to(dtype)
        g[1, 2] = 0.0
        clean = lmo.unit_direction(lmo.guarded(g), norm)
        g[1, 2, 5] = bad
        out = lmo.unit_direction(lmo.guarded(g), norm)
        affected = torch.zeros(shape, dtype=torch.bool)
        if norm == "sign":
            affected[1, 2, 5] = math.isnan(bad)
            clean[1, 2, 5] = math.copysign(1.0, bad)
        affected[{"sign": (1, 2, 5), "col": (1, slice(None), 5), "row": (1, 2), "euclidean": (1,)}[norm]] |= (
            norm != "sign"
        )
        assert torch.equal(out.isnan(), affected)
        assert torch.equal(out[~affected], clean[~affected])


def step_reference(w, g, m, norm, shrink, step, momentum, nesterov):
    """(new w, new m) in float64; m is rounded to its type before d is formed, as the buffer holds it."""
    d = g.double()
    if m is not None:
        m = (m.double() + (1 - momentum) * (g.double() - m.double())).to(m.dtype)
        d = g.double() + momentum * (m.double() - g.double()) if nesterov else m.double()
    return shrink * w.double() - step * (unit(d, norm) if norm else d), m


MIXES = [
    (F32, F32, F32),
    (BF16, BF16, BF16),
    (F16, F16, F32),
    (BF16, F32, BF16),
    (F64, F64, F64),
    (F32, F64, BF16),
]


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("norm", NORMS)
def test_vector_step_with_momentum(norm, nesterov):
    for (tw, tg, tm), shape in itertools.product(
        MIXES, [(1, 5, 9), (2, 17, 40), (1, 130, 264), (1, 1, 9000)]
    ):
        lmo = Lmo()
        w, g, m = (lmo.guarded(torch.randn(shape, dtype=F64).to(t)) for t in (tw, tg, tm))
        w0, g0, m0 = w.clone(), g.clone(), m.clone()
        want, want_m = step_reference(w, g, m, norm, 0.9, 0.1, 0.8, nesterov)
        lmo.vector_step(w, g, m, norm, 0.9, 0.1, 0.8, nesterov)
        assert torch.equal(g, g0)
        assert not torch.equal(m, m0)
        assert not torch.equal(w, w0)
        assert error(m, want_m) <= 2 * UNIT[tm] + 4 * UNIT[F32]
        # u follows the momentum that was stored, so a tie that rounds the other way must not count against w.
        want, _ = step_reference(w0, g, m, norm, 0.9, 0.1, 1.0, False)
        if nesterov:
            want = 0.9 * w0.double() - 0.1 * unit(g.double() + 0.8 * (m.double() - g.double()), norm)
        assert error(w, want) <= gate(tw, tg, tm), (tw, tg, tm, shape)


@pytest.mark.parametrize("norm", NORMS)
def test_vector_step_in_the_light_form(norm):
    """Without a momentum buffer the gradient is the direction, and decays afterwards."""
    for (tw, tg, _), shape in itertools.product(MIXES, [(2, 17, 40), (1, 70, 9)]):
        lmo = Lmo()
        w, g = (lmo.guarded(torch.randn(shape, dtype=F64).to(t)) for t in (tw, tg))
        g0 = g.clone()
        want, _ = step_reference(w, g, None, norm, 0.9, 0.1, 0.0, False)
        lmo.vector_step(w, g, None, norm, 0.9, 0.1, decay=0.75)
        assert error(w, want) <= gate(tw, tg)
        assert torch.equal(g, (0.75 * g0.double()).to(tg))
        lmo.vector_step(w, g, None, norm, 0.9, 0.1, decay=1.0)
        assert torch.equal(g, (0.75 * g0.double()).to(tg))


@pytest.mark.parametrize("norm", NORMS)
def test_steps_of_mixed_layouts(norm):
    """Weight, gradient and momentum each in another layout, row and column major among them."""
    shape = (2, 16, 24)
    names = ["contiguous", "transposed", "columns", "permuted batch"]
    for pick in itertools.product(names, repeat=3):
        lmo = Lmo()
        w, g, m = (lmo.guarded(dict(layouts(shape, F32))[name]) for name in pick)
        want, want_m = step_reference(w, g, m, norm, 1.0, 0.5, 0.5, True)
        lmo.vector_step(w, g, m, norm, 1.0, 0.5, 0.5, True)
        assert error(w, want) <= 1e-6, pick
        assert error(m, want_m) <= 1e-6, pick


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_stochastic_rounding_is_unbiased(dtype):
    """A step of a tenth of an ulp moves the mean by that much, and every result is one of two neighbours."""
    for value, ulp in ((1.0, torch.finfo(dtype).eps), (-3.0, 2 * torch.finfo(dtype).eps), (2.0**-20, None)):
        if ulp is None:
            ulp = 2.0**-24 if dtype == F16 else 2.0**-20 * torch.finfo(dtype).eps  # subnormal in float16
        lmo = Lmo()
        w = lmo.guarded(torch.full((64, 512), value, dtype=dtype))
        g = lmo.guarded(torch.full((64, 512), -1.0))
        lmo.vector_step(w, g, None, "sign", 1.0, 0.1 * ulp, seed=11, tensor=3)
        moved = ((w.double() - value) / ulp).round(decimals=6)
        assert set(moved.unique().tolist()) == {0.0, 1.0}
        deviation = math.sqrt(0.1 * 0.9 / w.numel())
        assert abs(moved.mean().item() - 0.1) < 4 * deviation
        assert moved.mean(0).std().item() < 1.3 * math.sqrt(
            0.09 / 64
        )  # no column, no row moves more than by chance
        assert moved.mean(1).std().item() < 1.3 * math.sqrt(0.09 / 512)


def test_stochastic_rounding_depends_on_seed_tensor_and_element_alone():
    base = torch.randn(3, 24, 40).to(BF16)
    g = torch.randn(3, 24, 40)

    def step(w, order="forward", **key):
        lmo = Lmo(order)
        w = lmo.guarded(w)
        lmo.vector_step(w, lmo.guarded(g), None, "sign", 1.0, 1e-3, **key)
        return w.clone()

    first = step(base, seed=5, tensor=2)
    for layout in (
        base.mT.contiguous().mT,
        torch.cat([base, base], -1)[..., :40],
        base.movedim(0, 2).contiguous().movedim(2, 0),
    ):
        assert torch.equal(first, step(layout, order="random", seed=5, tensor=2))
    for other in ({"seed": 6, "tensor": 2}, {"seed": 5, "tensor": 3}, {"seed": -1}):
        assert not torch.equal(first, step(base, **other))
    # Exact values, zeros, infinities and NaN stay themselves.
    special = torch.tensor(
        [[0.0, -0.0, 1.0, float("inf"), -float("inf"), float("nan"), 3.3895e38, -3.3895e38]]
    ).to(BF16)
    lmo = Lmo()
    w = lmo.guarded(special)
    lmo.vector_step(w, lmo.guarded(torch.zeros(1, 8)), None, "sign", 1.0, 1.0, seed=1)
    torch.testing.assert_close(w, special, rtol=0, atol=0, equal_nan=True)


def converted(x, dtype):
    """x as the kernels load and store it: a momentum of zero that is replaced by the gradient."""
    lmo = Lmo()
    w, m = lmo.guarded(torch.zeros_like(x)), lmo.guarded(torch.zeros_like(x, dtype=dtype))
    lmo.vector_step(w, lmo.guarded(x), m, "sign", 1.0, 0.0, momentum=0.0)
    return m.clone()


def test_16_bit_conversions_of_every_value():
    """All values of each type survive the trip to float32 and back, and float32 rounds as in torch."""
    for dtype in (BF16, F16):
        every = torch.arange(65536).to(torch.int16).view(dtype).view(1, 256, 256)
        torch.testing.assert_close(converted(every, F32), every.float(), rtol=0, atol=0, equal_nan=True)
        # Every value, the midpoints between neighbours, and a bit to either side of them.
        bits = every.float().view(torch.int32)
        half_ulp = 1 << (15 if dtype == BF16 else 12)
        for shift in (0, half_ulp - 1, half_ulp, half_ulp + 1):
            x = (bits + shift).view(F32)
            torch.testing.assert_close(converted(x, dtype), x.to(dtype), rtol=0, atol=0, equal_nan=True)
    tiny = torch.cat([torch.arange(4096) * 2.0**-26, -torch.arange(4096) * 2.0**-26]).view(1, 2, 4096)
    assert torch.equal(converted(tiny, F16), tiny.half())


@pytest.mark.parametrize("norm", NORMS)
def test_same_bits_in_every_order_of_threads(norm):
    """No result depends on the order in which blocks and threads run; no order shows a race."""
    w, g, m = (torch.randn(2, 140, 270) for _ in range(3))
    results = []
    for order, seed in [*((o, 0) for o in ORDERS), ("random", 1)]:
        lmo = Lmo(order, seed)
        copies = [lmo.guarded(x) for x in (w, g, m)]
        lmo.vector_step(*copies, norm, 0.9, 0.1, 0.8, True)
        results.append([x.clone() for x in copies])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_offsets_above_two_to_the_31():
    """Strides that reach beyond 2^31 elements: a sparse mapping holds two rows five gigabytes apart."""
    import mmap

    gap = 2**31 + 1040
    with mmap.mmap(-1, (gap + 64) * 2, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000) as block:
        storage = torch.frombuffer(block, dtype=BF16)
        g = storage.as_strided((1, 2, 40), (0, gap, 1))
        g.copy_(torch.randn(1, 2, 40))
        reference = unit(g, "col")
        lmo = Lmo()
        assert error(lmo.unit_direction(g, "col"), reference) <= gate(BF16)
        lmo.vector_step(g, g, None, "row", 0.0, 1.0)
        assert error(g.double().norm(dim=-1), torch.ones(1, 2)) <= gate(BF16)
        del storage, g


def test_bad_arguments():
    lmo = Lmo()
    g, out = torch.randn(2, 3), torch.empty(2, 3)
    for bad_sizes in ((-1, 2, 3), (1, -2, 3), (1, 2, -3)):
        lmo.call("unit_direction", (g, out), bad_sizes, 0, 1.0, None, status=1)
    lmo.call("unit_direction", (g, None), (1, 2, 3), 0, 1.0, None, status=1)
    lmo.call("unit_direction", (None, out), (1, 2, 3), 0, 1.0, None, status=1)
    lmo.call("unit_direction", (g, out), (1, 2, 3), 1, 1.0, None, status=1)
    for step_of in ((None, g, None), (g, None, None)):
        lmo.call("vector_step", step_of, (1, 2, 3), 0, 1.0, 1.0, 0.0, 0, 1.0, -1, 0, None, status=1)
