"""Tubal tensors against their peers: the t-product with its gradients, the DCT's, the t-SVD, steps on
measurements.

Every result, gradients included, is checked in float64 against direct convolution or the transform's
definition before anything is timed. Plain torch has its fastest memory order.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench import tubal_peers as peers
from bench import tubal_sensing
from bench.case import Case, Impl, Runner, later

# Bounds on the relative error in the Frobenius norm, of the worst of the product and the gradients.
ERROR = {torch.float64: 2e-14, torch.float32: 2e-6, torch.bfloat16: 1e-2}
SVD_ERROR = 1e-5  # float32; also of U^T U and V^T V
SENSING_ERROR = 1e-4  # float32, after all steps
FOURIER = ("fft last", "fft first", "rfft last", "rfft first")
PLANAR = ("planar", "planar trimmed")


class Shape(NamedTuple):
    """A [rows, inner, tubes] times B [inner, columns, tubes]."""

    rows: int
    inner: int
    columns: int
    tubes: int
    dtype: torch.dtype = torch.float32
    batch: tuple[int, ...] = ()


def type_name(s: Shape) -> str:
    return str(s.dtype).removeprefix("torch.")


def size(s: Shape) -> str:
    batch = "".join(f"{n} x " for n in s.batch)
    return f"{batch}{s.rows}x{s.inner} by {s.inner}x{s.columns}, n3={s.tubes}"


# ---- what a product costs at least


def entries(s: Shape) -> tuple[int, int, int]:
    """Tubes of A, B and C."""
    n = math.prod(s.batch)
    return n * s.rows * s.inner, n * s.inner * s.columns, n * s.rows * s.columns


def real_products(tubes: int) -> int:
    """One for each real face, three for each complex face of half the faces."""
    real = 2 - tubes % 2
    return real + 3 * (tubes // 2 + 1 - real)


def transform_flops(tubes: int) -> float:
    """A tube of real numbers: the FFT, or a matrix product with half the faces if that is less."""
    return min(2.5 * tubes * math.log2(tubes), 4.0 * tubes * (tubes // 2 + 1))


def flops(s: Shape, backward: bool, dct: bool = False) -> float:
    """Products of half the faces; a gradient takes one product, and the gradient of C is transformed once.
    The DCT has as many products as tubes, and costs what a real FFT does."""
    products = s.tubes if dct else real_products(s.tubes)
    multiply = 2.0 * math.prod(s.batch) * s.rows * s.inner * s.columns * products
    transforms = sum(entries(s)) * transform_flops(s.tubes)
    return multiply * (3 if backward else 1) + transforms * (2 if backward else 1)


def least_bytes(s: Shape, backward: bool) -> float:
    """Each input, result and gradient once; the backward pass reads A and B again."""
    a, b, c = entries(s)
    return float(s.dtype.itemsize * s.tubes * (3 * a + 3 * b + 2 * c if backward else a + b + c))


# ---- what is right


def relative_error(got: Tensor, wanted: Tensor) -> float:
    assert got.shape == wanted.shape, f"shape {tuple(got.shape)}, wanted {tuple(wanted.shape)}"
    assert not got.is_complex(), "a complex result, wanted a real one"
    return float(torch.linalg.vector_norm(got.double() - wanted) / torch.linalg.vector_norm(wanted))


def worst(errors: Sequence[float]) -> float:
    """The largest; NaN if there is one, which Python's max would drop."""
    return float(torch.tensor([*errors], dtype=torch.float64).max())


def convolve(a: Tensor, b: Tensor) -> Tensor:
    """The t-product by its definition, slice after slice, with no Fourier transform."""
    n, wide, slices = a.shape[-1], a.flatten(-2), []
    for k in range(n):
        shift = (k - torch.arange(n, device=a.device)) % n
        slices.append(wide @ b[..., shift].transpose(-1, -2).flatten(-3, -2))
    return torch.stack(slices, -1)


def transposed(a: Tensor) -> Tensor:
    """The T-transpose: slices transposed, slices 1 ... n3 - 1 in reverse order."""
    return a.transpose(-3, -2)[..., -torch.arange(a.shape[-1], device=a.device) % a.shape[-1]]


def dct_product(a: Tensor, b: Tensor) -> Tensor:
    m = peers.dct_matrix(a.shape[-1])
    return torch.einsum("...ilk,...ljk->...ijk", a @ m.mT, b @ m.mT) @ m


class Oracle:
    """The worst relative error of the product and the gradients; float64 runs once per input for all
    implementations of a case."""

    def __init__(
        self, backward: bool = False, product: Callable[[Tensor, Tensor], Tensor] = convolve
    ) -> None:
        self.backward, self.product = backward, product
        self.known: tuple = (None, ())

    def exact(self, data: tuple) -> tuple[Tensor, ...]:
        if self.known[0] is not data[0]:
            a, b, *grad = (t.double() for t in data)
            found = [self.product(a, b)]
            if self.backward:
                found += [self.product(*grad, transposed(b)), self.product(transposed(a), *grad)]
            self.known = data[0], tuple(found)
        return self.known[1]

    def __call__(self, data: tuple, output: Any, first: bool = False) -> float:
        got = output if isinstance(output, tuple) else (output,)
        wanted = self.exact(data)
        assert len(got) == len(wanted), f"{len(got)} results, wanted {len(wanted)}"
        got = tuple(peers.to_last(t) if first else t for t in got)
        return worst([*map(relative_error, got, wanted)])


def svd_error(data: tuple, output: tuple, first: bool = False) -> float:
    """Of U * S * V^T, of U^T * U and V^T * V, and of the off-diagonal of S, face by face in float64."""
    (a,) = data
    u, s, v = (t if first else t.movedim(-1, 0) for t in output)
    u, s, v = (torch.fft.fft(t.to(torch.complex128), dim=0) for t in (u, s, v))
    faces = torch.fft.fft(a.double().movedim(-1, 0), dim=0)
    eye = torch.eye(u.shape[-1], dtype=u.dtype)
    diagonal = torch.diagonal(s, dim1=-2, dim2=-1)
    scale = float(diagonal.abs().max())
    norm = torch.linalg.vector_norm
    return worst(
        [
            float(norm(u @ s @ v.mH - faces) / norm(faces)),
            *(float(norm(t.mH @ t - eye) / norm(eye.expand_as(t.mH @ t))) for t in (u, v)),
            float((s - torch.diag_embed(diagonal)).abs().max()) / scale,
            float(diagonal.imag.abs().max()) / scale,
            max(0.0, -float(diagonal.real.min())) / scale,
            max(0.0, float(diagonal.real.diff(dim=-1).max())) / scale if diagonal.shape[-1] > 1 else 0.0,
        ]
    )


# ---- cases


Against = Callable[[Oracle], tuple[Impl, ...]]


def inputs(s: Shape, backward: bool, device: str) -> Callable[[torch.Generator], tuple]:
    """A, B, and the gradient of C for the backward pass."""
    pairs = [(s.rows, s.inner), (s.inner, s.columns), *[(s.rows, s.columns)] * backward]

    def make(generator: torch.Generator) -> tuple[Tensor, ...]:
        return tuple(
            torch.randn(*s.batch, *pair, s.tubes, generator=generator, device=device).to(s.dtype)
            for pair in pairs
        )

    return make


def product_case(
    s: Shape,
    backward: bool,
    against: Against,
    suffix: str = "",
    device: str = "cpu",
    transform: str = "dft",
    **more,
) -> Case:
    oracle = Oracle(backward, convolve if transform == "dft" else dct_product)
    options = {} if transform == "dft" else {"transform": transform}
    make = inputs(s, backward, device)

    def build(first: bool) -> Runner:
        from pyops.tubal import tprod

        layout = {"layout": "first"} if first else {}
        function = functools.partial(tprod, **options, **layout) if options or first else tprod
        return peers.runner(function, backward, first)

    def served() -> str:
        import pyops

        a, b = inputs(s._replace(batch=()), False, device)(torch.Generator(device=device))
        return pyops.which("tprod", a, b, False, False, False, None, None, None)

    words = [f"tprod {type_name(s)} {size(s)}", *["DCT"] * (transform == "dct")]
    return Case(
        op="tubal",
        name=", ".join([*words, *["forward + backward"] * backward]) + suffix,
        compute=type_name(s),
        inputs=make,
        ours=Impl("pyops.tubal.tprod", lambda: build(False)),
        variants=(Impl("pyops, tubes first", lambda: build(True), functools.partial(oracle, first=True)),),
        peers=against(oracle),
        flops=flops(s, backward, transform == "dct"),
        bytes=least_bytes(s, backward),
        check=oracle,
        error_bound=ERROR[s.dtype],
        served_by=served,
        **more,
    )


def plain(
    s: Shape,
    backward: bool,
    scale: str,
    keys: Sequence[str],
    compiled: Sequence[str] = (),
    device: str = "cpu",
) -> Against:
    """Plain torch in these forms, some of them compiled too."""
    kind = peers.Kind(s.tubes, s.dtype, device)

    def against(oracle: Oracle) -> tuple[Impl, ...]:
        out = [peers.torch_product(key, kind, backward, oracle) for key in keys]
        for key in compiled:
            impl = peers.torch_product(key, kind, backward, oracle, compiled=True)
            out.append(impl if scale == "full" else later(impl))
        return tuple(out)

    return against


def together(*sets: Against) -> Against:
    return lambda oracle: tuple(impl for each in sets for impl in each(oracle))


def svd_case(n: int, tubes: int, **more) -> Case:
    """Of square matrices. The least work: with both factors, and a complex matrix costs four real ones."""
    real = 2 - tubes % 2
    faces = 4 * (tubes // 2 + 1 - real) + real

    def build() -> Runner:
        from pyops.tubal import tsvd

        return Runner(tsvd)

    return Case(
        op="tubal",
        name=f"tsvd float32 {n}x{n}, n3={tubes}",
        compute="float32",
        inputs=lambda generator: (torch.randn(n, n, tubes, generator=generator),),
        ours=Impl("pyops.tubal.tsvd", build),
        peers=(peers.torch_svd(False, svd_error), peers.torch_svd(True, svd_error)),
        flops=21.0 * n**3 * faces + 4 * n**2 * transform_flops(tubes),
        bytes=4.0 * 4 * n**2 * tubes,
        check=svd_error,
        error_bound=SVD_ERROR,
        note="Half the faces are ours too, so that form of torch is a yardstick.",
        **more,
    )


def sensing_case(n: int, tubes: int, rank: int, m: int, steps: int, step: float = 0.01, **more) -> Case:
    """All steps in one call. The least work per step: of the operator its T-symmetric part, read twice; U in
    the Fourier domain as an n x n factor, of whose square half is computed."""

    def make(generator: torch.Generator) -> tuple[Tensor, ...]:
        shapes = {(n, rank, tubes): 0.1 * rank**-0.5, (m, n, n, tubes): m**-0.5, (m,): 0.1}
        return tuple(scale * torch.randn(shape, generator=generator) for shape, scale in shapes.items())

    def build() -> Runner:
        return Runner(lambda u, operator, y: tubal_sensing.fused(u, operator, y, step, steps))

    @functools.lru_cache(maxsize=1)
    def exact(data: tuple) -> Tensor:
        return tubal_sensing.circulant(*(t.double() for t in data), step, steps)

    def served() -> str:
        import pyops

        return pyops.which("tubal_sensing_steps_", *make(torch.Generator()), step, steps)

    symmetric = (n * n * tubes + n * (2 - tubes % 2)) // 2
    return Case(
        op="tubal",
        name=f"{steps} sensing steps float32 {n}x{rank}, n3={tubes}, {m} measurements",
        compute="float32",
        inputs=make,
        ours=Impl("pyops, fused steps", build),
        peers=peers.sensing_loops(step, steps),
        flops=steps * (4.0 * m * symmetric + 1.5 * 2 * n**3 * real_products(tubes)),
        bytes=4.0 * (m * (n * n * tubes + 1) + 2 * n * rank * tubes),
        check=lambda data, u: relative_error(u, exact(data)),
        error_bound=SENSING_ERROR,
        served_by=served,
        note="What is converted once per run is in everybody's time.",
        **more,
    )


# ---- what is shown


def cpu_cases(scale: str) -> list[Case]:
    """The promised table. Each shape against torch with Fourier transforms, and against torch without, is a
    case with its own peers. Compiled is slower than eager for all faces, and for what takes microseconds."""
    tiny = scale == "tiny"
    rounds = {"rounds": {"full": 25, "quick": 7, "tiny": 1}[scale]}
    slower = {"rounds": {"full": 11, "quick": 3, "tiny": 1}[scale]}
    large = Shape(16, 12, 20, 8) if tiny else Shape(256, 256, 256, 64)
    prime = large._replace(tubes=7 if tiny else 61)
    medium = Shape(8, 8, 8, 16) if tiny else Shape(64, 64, 64, 64)
    short, paper = medium._replace(tubes=3), Shape(10, 100, 10, 4)
    wide = Shape(24, 24, 24, 6) if tiny else Shape(512, 512, 512, 8)
    exact = large._replace(dtype=torch.float64)
    compiled = ("rfft last", "rfft first")

    def both(
        s: Shape,
        least: float,
        planar: float,
        many: dict[str, int],
        backward: bool = False,
        fourier: Sequence[str] = compiled,
        small: bool = False,
    ) -> list[Case]:
        own: Against = lambda oracle: (peers.torch_own_backward(oracle),) * backward  # noqa: E731
        without = (*PLANAR, "circulant") if small else PLANAR
        return [
            product_case(
                s, backward, together(plain(s, backward, scale, FOURIER, fourier), own),
                bar=(least, "best"), **many),
            product_case(
                s, backward, plain(s, backward, scale, without, () if small else PLANAR), ", planar",
                bar=(planar, "best"), **many),
        ]  # fmt: skip

    measurements = {"n": 4, "tubes": 3, "rank": 6, "m": 20} if tiny else {
        "n": 10, "tubes": 4, "rank": 100, "m": 254}  # fmt: skip
    package = "mprod-package m_prod"
    return [
        *both(large, 1.9, 1.3, rounds),
        *both(prime, 1.9, 1.3, rounds),
        *both(medium, 2.0, 1.3, rounds),
        *both(short, 6, 1.6, rounds, fourier=(), small=True),
        *both(paper, 6, 2.5, rounds, fourier=(), small=True),
        *both(wide, 1.6, 1.15, rounds),
        *both(large, 2.2, 1.4, slower, backward=True),
        product_case(
            exact, False,
            together(lambda oracle: (peers.mprod(exact.tubes, oracle),), plain(exact, False, scale, ["dct"])),
            transform="dct", bar=(25, package), **slower),
        sensing_case(**measurements, steps=50 if tiny else 500, bar=(8, "best"), **slower),
        svd_case(12 if tiny else 256, 6 if tiny else 64, bar=(1.9, "torch SVD of all faces"),
                 rounds={"full": 7, "quick": 3, "tiny": 1}[scale]),
    ]  # fmt: skip


def cuda_cases(scale: str) -> list[Case]:
    large = Shape(256, 256, 256, 64)
    rounds = {"rounds": 15 if scale == "full" else 7}

    def case(s: Shape, backward: bool = False) -> Case:
        keys = ("fft first", "rfft last", "rfft first", *PLANAR)
        compiled = ("rfft first", "planar trimmed")
        own: Against = lambda oracle: (  # noqa: E731
            (peers.torch_own_backward(oracle),) if backward else (peers.cupy_product(oracle),)
        )
        return product_case(
            s,
            backward,
            together(plain(s, backward, scale, keys, compiled, "cuda"), own),
            device="cuda",
            **rounds,
        )

    paper = Shape(10, 100, 10, 4, batch=(1024,))
    short = Shape(64, 64, 64, 3, batch=(64,))
    shown = [large, short, paper]
    if scale == "full":
        more = [Shape(256, 256, 256, 61), Shape(512, 512, 512, 8), Shape(64, 64, 64, 16, batch=(64,))]
        shown += [*more, large._replace(dtype=torch.float64)]
    return [*map(case, shown), case(large, backward=True)]


def cases(device: str, scale: str) -> list[Case]:
    return cuda_cases(scale) if device == "cuda" else cpu_cases(scale)


def test_tubal(measured, case, impl):
    measured(case, impl)
