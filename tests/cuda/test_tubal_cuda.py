"""csrc/tubal/tubal_cuda.cu, executed by the emulator, against direct circular convolution in float64."""

import ctypes
import itertools
import math

import pytest
import torch
from harness import HERE, ORDERS, Arena, Emulator, assert_written, compile_emulated, poison

F64, F32, BF16, F16 = DTYPES = torch.float64, torch.float32, torch.bfloat16, torch.float16
UNIT = {F64: 2.0**-53, F32: 2.0**-24, BF16: 2.0**-9, F16: 2.0**-11}
TUBES = [1, 2, 3, 4, 5, 7, 8, 16, 17, 61, 64]
BATCH = 4  # dimensions, as in tubal_cuda.h


class Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("dtype", ctypes.c_int),
        *((name, ctypes.c_longlong) for name in ("row", "col", "tube")),
        ("batch", ctypes.c_longlong * BATCH),
    ]


class Matrix(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("dtype", ctypes.c_int),
        *((name, ctypes.c_longlong) for name in ("row", "col")),
    ]


class Product(ctypes.Structure):
    _fields_ = [
        *((name, Tensor) for name in "abc"),
        ("batch", ctypes.c_longlong * BATCH),
        *((name, ctypes.c_longlong) for name in ("n1", "n2", "n4", "n3")),
        *((name, ctypes.c_bool) for name in ("transpose_a", "transpose_b")),
        *((name, Matrix) for name in ("forward_a", "forward_b", "inverse")),
    ]


class Gram(ctypes.Structure):
    _fields_ = [
        *((name, Tensor) for name in "uc"),
        ("batch", ctypes.c_longlong * BATCH),
        *((name, ctypes.c_longlong) for name in ("rows", "cols", "n3")),
        ("transpose", ctypes.c_bool),
    ]


def tensor(x, batch, first):
    """The struct of a tensor whose batch dimensions broadcast to `batch` (four sizes)."""
    if x is None:
        return Tensor()
    row, col, tube = x.stride()[-3:] if not first else (*x.stride()[-2:], x.stride(-3))
    lead = x.dim() - 3
    strides = [0] * BATCH
    for d in range(lead):
        at = BATCH - lead + d
        strides[at] = 0 if x.shape[d] == 1 and batch[at] != 1 else x.stride(d)
    return Tensor(x.data_ptr(), DTYPES.index(x.dtype), row, col, tube, (ctypes.c_longlong * BATCH)(*strides))


def matrix(x):
    return Matrix() if x is None else Matrix(x.data_ptr(), DTYPES.index(x.dtype), *x.stride())


class Tubal:
    """The launchers on torch tensors in guarded memory, with scratch memory of exactly the size asked for."""

    def __init__(self, order="forward", seed=0, aligned=True):
        self.aligned = aligned
        self.emulator = Emulator(compile_emulated(HERE / "shims" / "tubal.cu"), order, seed)
        for name in ("tprod", "tgram"):
            getattr(self.emulator.library, f"shim_{name}_workspace").restype = ctypes.c_size_t
        self.arena = Arena()

    def call(self, name, struct, status=0, workspace=True):
        size = getattr(self.emulator.library, f"shim_{name}_workspace")(ctypes.byref(struct))
        assert size % 16 == 0
        self.scratch = poison(self.arena.allocate(size // 4, F32))
        pointer = ctypes.c_void_p(self.scratch.data_ptr()) if workspace and size else None
        assert self.emulator.call(f"shim_{name}", ctypes.byref(struct), pointer) == status
        self.arena.check()
        return size

    def inputs(self, *tensors):
        """Copies at the alignment of one element where `self.aligned` is False."""
        return [
            t if t is None else self.arena.copy(t, alignment=16 if self.aligned else t.element_size())
            for t in tensors
        ]

    def output(self, shape, dtype, first):
        shape = list(shape) if not first else [*shape[:-3], shape[-1], *shape[-3:-1]]
        return poison(self.arena.copy(torch.empty(shape, dtype=dtype)))

    def tprod(self, a, b, ta=False, tb=False, first=False, matrices=(None, None, None), out=None, batch=None):
        a, b, *matrices = self.inputs(a, b, *matrices)
        sizes = [last(x, first).shape for x in (a, b)]
        (n1, n2), (_, n4) = sizes[0][-3:-1][:: -1 if ta else 1], sizes[1][-3:-1][:: -1 if tb else 1]
        full = batch or torch.broadcast_shapes(sizes[0][:-3], sizes[1][:-3])
        out = self.output((*full, n1, n4, sizes[0][-1]), a.dtype, first) if out is None else out
        padded = [1] * (BATCH - len(full)) + list(full)
        product = Product(
            *(tensor(x, padded, first) for x in (a, b, out)),
            (ctypes.c_longlong * BATCH)(*padded),
            *(n1, n2, n4, sizes[0][-1], ta, tb),
            *map(matrix, matrices),
        )
        self.size = self.call("tprod", product)
        assert_written(out)
        return last(out, first)

    def tgram(self, u, transpose=False, first=False):
        (u,) = self.inputs(u)
        shape = last(u, first).shape
        side = shape[-2] if transpose else shape[-3]
        out = self.output((*shape[:-3], side, side, shape[-1]), u.dtype, first)
        padded = [1] * (BATCH - len(shape) + 3) + list(shape[:-3])
        gram = Gram(
            *(tensor(x, padded, first) for x in (u, out)),
            (ctypes.c_longlong * BATCH)(*padded),
            *(*shape[-3:], transpose),
        )
        self.size = self.call("tgram", gram)
        assert_written(out)
        return last(out, first)


def last(x, first):
    return x.movedim(-3, -1) if first else x


def ttranspose(x):
    return torch.cat([x[..., :1], x[..., 1:].flip(-1)], -1).transpose(-3, -2)


def convolution(a, b, ta=False, tb=False):
    """The t-product by its definition, through the block-circulant matrix of b's tubes."""
    a, b = a.double(), b.double()
    a, b = ttranspose(a) if ta else a, ttranspose(b) if tb else b
    n = a.shape[-1]
    shift = (torch.arange(n)[:, None] - torch.arange(n)) % n  # out t, in s: b's entry t - s
    return torch.einsum("...iks,...kjts->...ijt", a, b[..., shift])


def facewise(a, b, ta, tb, forward_a, forward_b, inverse):
    a = torch.einsum("ft,...t->...f", forward_a.double(), a.double())
    b = torch.einsum("ft,...t->...f", forward_b.double(), b.double())
    a, b = a.transpose(-3, -2) if ta else a, b.transpose(-3, -2) if tb else b
    return torch.einsum("tf,...ijf->...ijt", inverse.double(), torch.einsum("...ikf,...kjf->...ijf", a, b))


def error(actual, reference):
    reference = reference.double()
    return ((actual.double() - reference).norm() / reference.norm().clamp_min(1e-300)).item()


def gate(dtype, terms, tubes):
    """Rounding of the result, and the accumulator's in the sums over k and over the entries of a tube."""
    return 1.5 * UNIT[dtype] + (8 + math.sqrt(terms) + math.sqrt(tubes)) * UNIT[F64 if dtype == F64 else F32]


def random(*shape, dtype=F32):
    return torch.randn(shape, dtype=F64).to(dtype)


SHAPES = [(1, 1, 1), (3, 5, 2), (17, 9, 13)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n3", TUBES)
def test_product(n3, dtype):
    for n1, n2, n4 in SHAPES:
        a, b = random(n1, n2, n3, dtype=dtype), random(n2, n4, n3, dtype=dtype)
        out = Tubal().tprod(a, b)
        assert error(out, convolution(a, b)) <= gate(dtype, n2, n3), (n1, n2, n4)


@pytest.mark.parametrize("n3", [6, 9, 10, 11, 12, 13, 14, 15, 18, 32, 128])
def test_product_of_other_lengths(n3):
    for dtype in (F32, F64):
        a, b = random(5, 7, n3, dtype=dtype), random(7, 6, n3, dtype=dtype)
        assert error(Tubal().tprod(a, b), convolution(a, b)) <= gate(dtype, 7, n3)


@pytest.mark.parametrize(("n3", "dtype"), [(256, F32), (512, F64), (1024, F16), (4096, F32), (300, F64)])
def test_long_tubes(n3, dtype):
    """FFTs with odd and even numbers of passes, and a length that takes the matrix, against torch's FFT."""
    a, b = random(1, 2, n3, dtype=dtype), random(2, 1 if n3 > 512 else 2, n3, dtype=dtype)
    faces = torch.einsum("ikf,kjf->ijf", torch.fft.rfft(a.double()), torch.fft.rfft(b.double()))
    assert error(Tubal().tprod(a, b), torch.fft.irfft(faces, n=n3)) <= gate(dtype, 2, n3)


def test_several_tiles():
    """More than one tile in each direction and more than one step over k, for each kind of kernel."""
    for n3, (n1, n2, n4), dtype in (
        (1, (70, 40, 130), F32),
        (4, (35, 20, 67), F32),
        (3, (18, 17, 40), F64),
        (15, (9, 13, 33), F32),
        (12, (17, 9, 18), F64),
        (16, (40, 6, 17), F32),
        (17, (66, 18, 70), F32),
        (32, (20, 18, 66), F32),
    ):
        a, b = random(n1, n2, n3, dtype=dtype), random(n2, n4, n3, dtype=dtype)
        assert error(Tubal("random").tprod(a, b), convolution(a, b)) <= gate(dtype, n2, n3), n3


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("n3", [1, 2, 5, 8, 17, 32])
def test_transposes_and_layouts(n3, first):
    for ta, tb in itertools.product([False, True], repeat=2):
        a = random(*((6, 7) if ta else (7, 6)), n3)
        b = random(*((9, 6) if tb else (6, 9)), n3)
        reference = convolution(a, b, ta, tb)
        arrange = (lambda x: x.movedim(-1, 0).contiguous()) if first else (lambda x: x)
        out = Tubal().tprod(arrange(a), arrange(b), ta, tb, first)
        assert error(out, reference) <= gate(F32, 6, n3), (ta, tb)


@pytest.mark.parametrize(("n3", "dtype"), [(4, F32), (16, F32), (4, F64), (8, BF16), (16, F16), (6, F32)])
def test_alignment(n3, dtype):
    """Whole tubes are read 16 bytes at a time where their addresses allow it, with the same results."""
    wide = torch.randn(3, 3, 5, 2 * n3, dtype=F64).to(dtype)
    for a in (wide[..., :n3].contiguous(), wide[..., :n3], wide[..., 1 : n3 + 1], wide[:, ::2, :, :n3]):
        b = random(5, 4, n3, dtype=dtype)
        reference = convolution(a, b)
        aligned, unaligned = (Tubal(aligned=x).tprod(a, b) for x in (True, False))
        assert error(aligned, reference) <= gate(dtype, 5, n3)
        assert torch.equal(aligned, unaligned)


def layouts(x):
    """The same values in memory of many layouts."""
    yield "transposed", x.transpose(-3, -2).contiguous().transpose(-3, -2)
    yield "all reversed", x.permute(*reversed(range(x.dim()))).contiguous().permute(*reversed(range(x.dim())))
    yield "rows", x.repeat_interleave(3, -3)[..., ::3, :, :]
    yield "columns", torch.cat([x, x], -2)[..., : x.shape[-2], :]
    yield "tubes", x.repeat_interleave(2, -1)[..., ::2]
    yield "batch inside", x.movedim(0, -1).contiguous().movedim(-1, 0)


@pytest.mark.parametrize("n3", [1, 4, 17, 16])
def test_strides(n3):
    dtype = F64 if n3 == 16 else F32  # an FFT of 16 in double
    a, b = random(2, 4, 3, n3, dtype=dtype), random(2, 3, 5, n3, dtype=dtype)
    reference = convolution(a, b)
    several = list(layouts(b))
    for i, (name_a, x) in enumerate(layouts(a)):
        name_b, y = several[(i + 1) % len(several)]
        assert error(Tubal().tprod(x, y), reference) <= gate(dtype, 3, n3), (name_a, name_b)
    for name, like in layouts(reference.to(dtype)):
        tubal = Tubal()
        out = tubal.arena.copy(like)
        out.fill_(math.nan)
        assert error(tubal.tprod(a, b, out=out), reference) <= gate(dtype, 3, n3), name
        assert out.isfinite().all()


def test_negative_and_zero_strides():
    tubal = Tubal()
    a, b = random(3, 4, 5), random(4, 2, 5)
    storage = tubal.arena.copy(a.flip(-1).contiguous())
    out = tubal.output((3, 2, 5), F32, False)
    product = Product(
        *(tensor(x, [1] * 4, False) for x in (storage, tubal.arena.copy(b), out)),
        (ctypes.c_longlong * 4)(1, 1, 1, 1), *(3, 4, 2, 5),
    )  # fmt: skip
    product.a.data += 4 * storage.element_size()
    product.a.tube = -1
    tubal.call("tprod", product)
    assert error(out, convolution(a, b)) <= gate(F32, 4, 5)
    for n3 in (3, 17, 64):
        x, y = random(3, 1, n3).expand(3, 4, n3), random(4, 2, 1).expand(4, 2, n3)
        assert error(Tubal().tprod(x, y), convolution(x, y)) <= gate(F32, 4, n3)


@pytest.mark.parametrize("n3", [1, 3, 17, 32])
def test_batches(n3):
    for batch_a, batch_b in (((3,), (3,)), ((3,), ()), ((), (2, 1)), ((1, 2, 1, 2), (2, 1, 3, 1))):
        a, b = random(*batch_a, 4, 3, n3), random(*batch_b, 3, 5, n3)
        first = batch_b == ()
        x, y = (t.movedim(-1, -3).contiguous() for t in (a, b)) if first else (a, b)
        out = Tubal().tprod(x, y, first=first)
        assert error(out, convolution(a, b)) <= gate(F32, 3, n3), (batch_a, batch_b)


@pytest.mark.parametrize("n3", [1, 4, 17, 32])
def test_sums_over_a_batch(n3):
    """An output that does not move with a dimension of the batch gets the sum: a broadcast's gradient."""
    g, b = random(2, 3, 4, 5, n3), random(3, 6, 5, n3)
    full = convolution(g, b, False, True)
    for dims in ((0,), (1,), (0, 1)):
        tubal = Tubal()
        shape = [1 if d in dims else (2, 3)[d] for d in range(2)]
        out = tubal.output((*shape, 4, 6, n3), F32, False)
        tubal.tprod(g, b, False, True, out=out, batch=(2, 3))
        assert error(out, full.sum(dims, keepdim=True)) <= gate(F32, 5 * 6, n3), dims


@pytest.mark.parametrize("dtype", [F32, F64, BF16], ids=str)
@pytest.mark.parametrize("n3", [1, 2, 5, 16, 33])
def test_real_matrices(n3, dtype):
    matrices = [random(n3, n3, dtype=F64 if dtype == F64 else F32) for _ in range(3)]
    matrices[1] = matrices[1].mT.contiguous().mT
    for ta, tb, first in itertools.product([False, True], repeat=3):
        a = random(2, *((6, 7) if ta else (7, 6)), n3, dtype=dtype)
        b = random(*((9, 6) if tb else (6, 9)), n3, dtype=dtype)
        reference = facewise(a, b, ta, tb, *matrices)
        arrange = (lambda x: x.movedim(-1, -3).contiguous()) if first else (lambda x: x)
        out = Tubal().tprod(arrange(a), arrange(b), ta, tb, first, matrices)
        assert error(out, reference) <= gate(dtype, 6 * n3, n3), (ta, tb, first)


@pytest.mark.parametrize("dtype", [F32, F64, BF16], ids=str)
@pytest.mark.parametrize("n3", TUBES)
def test_gram(n3, dtype):
    for shape, transpose, first in (
        ((5, 3), False, False),
        ((2, 9, 13), True, False),
        ((2, 9, 13), False, True),
        ((35, 6), False, False),
        ((4, 70), True, True),
        ((1, 1), False, False),
    ):
        if n3 > 32 and (shape == (4, 70) or dtype == BF16):
            continue
        u = random(*shape, n3, dtype=dtype)
        out = Tubal().tgram(u.movedim(-1, -3).contiguous() if first else u, transpose, first)
        terms = shape[-2] if transpose else shape[-1]
        reference = convolution(u, u, transpose, not transpose)
        assert error(out, reference) <= gate(dtype, terms, n3), (shape, transpose)
        assert torch.equal(out, ttranspose(out))


def test_gram_skips_the_tiles_below_the_diagonal():
    """Of four tiles of 64 x 64, the one with i > j is left as it was in scratch memory."""
    tubal = Tubal()
    tubal.tgram(random(70, 3, 17))
    planes = tubal.scratch[-25 * 70 * 70 :].view(torch.int32).view(25, 70, 70)
    untouched = planes == poison(torch.empty(1)).view(torch.int32)
    below = torch.zeros(70, 70, dtype=torch.bool)
    below[64:, :64] = True
    assert torch.equal(untouched, below.expand(25, 70, 70))


def test_empty():
    for n3 in (1, 4, 17, 32):
        for n1, n2, n4 in ((0, 3, 2), (3, 0, 2), (3, 2, 0), (0, 0, 0)):
            for first in (False, True):
                arrange = (lambda x: x.movedim(-1, -3).contiguous()) if first else (lambda x: x)
                tubal = Tubal()
                out = tubal.tprod(arrange(random(n1, n2, n3)), arrange(random(n2, n4, n3)), first=first)
                assert out.shape == (n1, n4, n3)
                assert (out == 0).all()
                assert tubal.size == 0
        assert Tubal().tprod(random(0, 2, 3, n3), random(3, 2, n3)).shape == (0, 2, 2, n3)
        assert (Tubal().tgram(random(3, 0, n3)) == 0).all()
        tubal = Tubal()
        out = tubal.output((1, 2, 2, n3), F32, False)
        tubal.tprod(random(0, 2, 3, n3), random(0, 3, 2, n3), out=out, batch=(0,))
        assert (out == 0).all()


@pytest.mark.parametrize("n3", TUBES)
def test_nan_stays_in_its_tube_row(n3):
    for value in (math.nan, math.inf):
        a, b = random(2, 5, 6, n3), random(2, 6, 4, n3)
        clean = Tubal().tprod(a, b)
        a[1, 3, 2, n3 // 2] = value
        out = Tubal().tprod(a, b)
        bad = torch.zeros(2, 5, 4, n3, dtype=torch.bool)
        bad[1, 3] = True
        assert not out[bad].isfinite().any()
        assert value == math.inf or out[bad].isnan().all()
        assert torch.equal(out[~bad], clean[~bad])
        b[0, 4, 1, -1] = value
        bad[0, :, 1] = True
        out = Tubal().tprod(a, b)
        assert not out[bad].isfinite().any()
        assert torch.equal(out[~bad], clean[~bad])


def test_same_bits_in_every_order_of_threads():
    """No result depends on the order in which blocks and threads run; no order shows a race."""
    for n3, dtype in ((1, F32), (4, F32), (7, F64), (16, F32), (17, F32), (64, F32)):
        a, b = random(2, 8, 5, n3, dtype=dtype), random(5, 3, n3, dtype=dtype)
        results = []
        for order, seed in [*((o, 0) for o in ORDERS), ("random", 1)]:
            results.append((Tubal(order, seed).tprod(a, b), Tubal(order, seed).tgram(a)))
        for other in results[1:]:
            assert all(torch.equal(x, y) for x, y in zip(results[0], other, strict=True))


def test_inputs_are_only_read():
    for n3 in (4, 17, 32):
        tubal = Tubal()
        a, b = tubal.inputs(random(3, 4, n3), random(4, 2, n3))
        before = a.clone(), b.clone()
        product = Product(
            *(tensor(x, [1] * 4, False) for x in (a, b, tubal.output((3, 2, n3), F32, False))),
            (ctypes.c_longlong * 4)(1, 1, 1, 1), *(3, 4, 2, n3),
        )  # fmt: skip
        tubal.call("tprod", product)
        assert torch.equal(a, before[0])
        assert torch.equal(b, before[1])


def test_kernels_of_a_call():
    """Short tubes take one kernel and no scratch memory; long ones tables, three transforms, a product."""
    cases = (1, F32, 1), (16, F32, 1), (12, F64, 1), (16, F64, 5), (17, F32, 6), (64, F32, 5)
    for n3, dtype, launches in cases:
        tubal = Tubal()
        tubal.tprod(random(2, 2, n3, dtype=dtype), random(2, 2, n3, dtype=dtype))
        assert tubal.emulator.launches == launches
        assert (tubal.size == 0) == (launches == 1)
        padded = sum(-(-x // 4) * 4 for x in {5: (2 * n3,)}.get(launches, (n3 * (3 * n3 - 1) // 2,) * 2))
        planes = 3 * n3 // 2 - 1 if n3 % 2 == 0 else (3 * n3 - 1) // 2
        assert launches == 1 or tubal.size == dtype.itemsize * (padded + 3 * 4 * planes)


def test_offsets_above_two_to_the_31():
    """Strides that reach beyond 2^31 elements: a sparse mapping holds two rows four gigabytes apart."""
    import mmap

    gap = 2**31 + 1040
    for n3 in (4, 17, 64):
        with mmap.mmap(-1, (gap + 640) * 2, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000) as block:
            storage = torch.frombuffer(block, dtype=BF16)
            a = storage.as_strided((2, 3, n3), (gap, n3, 1))
            a.copy_(random(2, 3, n3))
            b = random(3, 2, n3, dtype=BF16)
            tubal = Tubal()
            out = tubal.output((2, 2, n3), BF16, False)
            product = Product(
                *(tensor(x, [1] * 4, False) for x in (a, tubal.arena.copy(b), out)),
                (ctypes.c_longlong * 4)(1, 1, 1, 1), *(2, 3, 2, n3),
            )  # fmt: skip
            tubal.call("tprod", product)
            assert error(out, convolution(a, b)) <= gate(BF16, 3, n3)
            del storage, a


def test_bad_arguments():
    tubal = Tubal()
    a, b, out = random(3, 4, 17), random(4, 2, 17), torch.empty(3, 2, 17)
    m = random(17, 17)

    def refused(
        a=a, b=b, out=out, sizes=(3, 4, 2, 17), batch=(1, 1, 1, 1), matrices=(None,) * 3, workspace=True
    ):
        product = Product(
            *(tensor(x, [1] * 4, False) for x in (a, b, out)),
            (ctypes.c_longlong * 4)(*batch), *sizes, False, False, *map(matrix, matrices),
        )  # fmt: skip
        product.a.dtype = 1 if a is None else product.a.dtype
        product.b.dtype = 1 if b is None else product.b.dtype
        product.c.dtype = 1 if out is None else product.c.dtype
        tubal.call("tprod", product, 1, workspace)

    for sizes in ((-1, 4, 2, 17), (3, -4, 2, 17), (3, 4, -2, 17), (3, 4, 2, 0)):
        refused(sizes=sizes)
    refused(batch=(1, -1, 1, 1))
    for name in ("a", "b", "out"):
        refused(**{name: None})
    refused(a=a.double())
    refused(out=out.double())
    refused(matrices=(m, m, None))
    refused(matrices=(m, None, m))
    refused(matrices=(m, m, m.double()))
    refused(workspace=False)
