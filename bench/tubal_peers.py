"""The t-product, its gradients and the t-SVD in plain torch at its best, and other people's packages. Every
builder may raise Missing.

Every form has its inputs in the memory order that it likes, which is not timed. A planar form keeps real and
imaginary parts in matrices of their own. Its transforms are matrix products, and a complex face takes three
real products:

    P1 = Ar Br,  P2 = Ai Bi,  P3 = (Ar + Ai)(Br + Bi);    Cr = P1 - P2,  Ci = P3 - P1 - P2,

whose sums are rows and columns of the transforms.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench import tubal_sensing
from bench.case import Impl, Runner, need
from bench.linear_attention_peers import both_ways

Product = Callable[[Tensor, Tensor], Tensor]
Check = Callable[[tuple, Any], float]


def to_first(t: Tensor) -> Tensor:
    """[..., n1, n2, n3] as [..., n3, n1, n2], a copy."""
    return t.movedim(-1, -3).clone(memory_format=torch.contiguous_format)


def to_last(t: Tensor) -> Tensor:
    return t.movedim(-3, -1)


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """Without what matmul takes to find out that it is bmm."""
    return torch.bmm(a, b) if a.ndim == 3 else torch.matmul(a, b)


# ---- the product by Fourier transforms


def fft_last(a: Tensor, b: Tensor) -> Tensor:
    faces = matmul(torch.fft.fft(a).movedim(-1, -3), torch.fft.fft(b).movedim(-1, -3))
    return torch.fft.ifft(faces.movedim(-3, -1)).real


def fft_first(a: Tensor, b: Tensor) -> Tensor:
    return torch.fft.ifft(matmul(torch.fft.fft(a, dim=-3), torch.fft.fft(b, dim=-3)), dim=-3).real


def rfft_last(a: Tensor, b: Tensor) -> Tensor:
    faces = matmul(torch.fft.rfft(a).movedim(-1, -3), torch.fft.rfft(b).movedim(-1, -3))
    return torch.fft.irfft(faces.movedim(-3, -1), n=a.shape[-1])


def rfft_first(a: Tensor, b: Tensor) -> Tensor:
    faces = matmul(torch.fft.rfft(a, dim=-3), torch.fft.rfft(b, dim=-3))
    return torch.fft.irfft(faces, n=a.shape[-3], dim=-3)


def rfft_both_ways(a: Tensor, b: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(c, gradient of a, of b), tubes first: six transforms of half faces. Autograd takes whole ones back."""
    a_hat, b_hat, g_hat = (torch.fft.rfft(t, dim=-3) for t in (a, b, grad))
    back = functools.partial(torch.fft.irfft, n=a.shape[-3], dim=-3)
    return back(matmul(a_hat, b_hat)), back(matmul(g_hat, b_hat.mH)), back(matmul(a_hat.mH, g_hat))


# ---- the product by matrix products alone


def planar_matrices(
    tubes: int, trimmed: bool, dtype: torch.dtype, device: str = "cpu"
) -> tuple[Tensor, Tensor]:
    """The transform [planes, tubes] and the way back. Trimmed: one product for a real face, not three."""
    half = tubes // 2 + 1
    angles = 2 * math.pi / tubes * (torch.arange(half).outer(torch.arange(tubes)) % tubes).double()
    c, s = angles.cos(), -angles.sin()
    faces = torch.arange(half)
    real = (faces == 0) | (2 * faces == tubes)
    weights = torch.where(real, 1.0, 2.0).double()[:, None] / tubes
    forward = torch.cat([c, s, c + s])
    inverse = torch.cat([weights * (c - s), -weights * (c + s), weights * s]).mT
    if trimmed:  # their s is zero
        inverse[:, :half][:, real] = (weights * c).mT[:, real]
        keep = torch.cat([torch.ones_like(real), ~real, ~real])
        forward, inverse = forward[keep], inverse[:, keep]
    return tuple(t.to(device, dtype).contiguous() for t in (forward, inverse))


def by_matrices(forward: Tensor, inverse: Tensor) -> Product:
    """Tubes first, any number of planes."""
    planes, tubes = forward.shape

    def product(a: Tensor, b: Tensor) -> Tensor:
        *batch, _, rows, inner = a.shape
        columns = b.shape[-1]
        a_hat = (forward @ a.view(*batch, tubes, rows * inner)).view(*batch, planes, rows, inner)
        b_hat = (forward @ b.view(*batch, tubes, inner * columns)).view(*batch, planes, inner, columns)
        c_hat = matmul(a_hat, b_hat).view(*batch, planes, rows * columns)
        return (inverse @ c_hat).view(*batch, tubes, rows, columns)

    return product


def circulant(tubes: int, device: str = "cpu") -> Product:
    """Tubes first, one product with the block circulant matrix of a."""
    shift = ((torch.arange(tubes)[:, None] - torch.arange(tubes)) % tubes).to(device)

    def product(a: Tensor, b: Tensor) -> Tensor:
        n, rows, inner = a.shape
        whole = a[shift].transpose(1, 2).reshape(n * rows, n * inner)
        return torch.mm(whole, b.view(n * inner, -1)).view(n, rows, -1)

    return product


def dct_matrix(tubes: int) -> Tensor:
    """The orthonormal DCT-II in float64, by its definition."""
    turns = torch.arange(tubes).outer(2 * torch.arange(tubes) + 1) % (4 * tubes)
    m = (2 / tubes) ** 0.5 * torch.cos(math.pi / (2 * tubes) * turns.double())
    m[0] *= 0.5**0.5
    return m


# ---- implementations in torch


class Kind(NamedTuple):
    """What a form is specialised to."""

    tubes: int
    dtype: torch.dtype
    device: str = "cpu"


class Form(NamedTuple):
    name: str
    make: Callable[[Kind], Product]
    first: bool = True


def _matrices(trimmed: bool) -> Callable[[Kind], Product]:
    return lambda kind: by_matrices(*planar_matrices(kind.tubes, trimmed, kind.dtype, kind.device))


def _dct(kind: Kind) -> Product:
    m = dct_matrix(kind.tubes).to(kind.device, kind.dtype)
    return by_matrices(m, m.mT.contiguous())


FORMS = {
    "fft last": Form("torch fft of all faces, tubes last", lambda _: fft_last, False),
    "fft first": Form("torch fft of all faces, tubes first", lambda _: fft_first),
    "rfft last": Form("torch rfft + matmul, tubes last", lambda _: rfft_last, False),
    "rfft first": Form("torch rfft + matmul, tubes first", lambda _: rfft_first),
    "planar": Form("torch planar", _matrices(False)),
    "planar trimmed": Form("torch planar, one product for real faces", _matrices(True)),
    "circulant": Form("torch block circulant", lambda kind: circulant(kind.tubes, kind.device)),
    "dct": Form("torch DCT as matrix product", _dct),
}


def runner(function: Callable, backward: bool, first: bool) -> Runner:
    """With backward, the inputs are a, b and the gradient of the product."""
    layout = to_first if first else torch.clone

    def leaves(*inputs: Tensor) -> tuple[Tensor, ...]:
        *factors, grad = map(layout, inputs)
        return *(t.requires_grad_() for t in factors), grad

    if backward:
        return Runner(both_ways(function), leaves)
    return Runner(function, lambda *inputs: tuple(map(layout, inputs)))


def torch_product(key: str, kind: Kind, backward: bool, check: Check, compiled: bool = False) -> Impl:
    form = FORMS[key]

    def build() -> Runner:
        function = form.make(kind)
        return runner(torch.compile(function, dynamic=False) if compiled else function, backward, form.first)

    check = functools.partial(check, first=form.first)
    return Impl(form.name + ", compiled" * compiled, build, check)


def torch_own_backward(check: Check) -> Impl:
    """Written by hand, the gradients reuse the faces of a and b."""

    def build() -> Runner:
        return Runner(rfft_both_ways, lambda *inputs: tuple(map(to_first, inputs)))

    check = functools.partial(check, first=True)
    return Impl("torch rfft + matmul, tubes first, gradients by hand", build, check)


# ---- packages


def mprod(tubes: int, check: Check) -> Impl:
    """mprod-package's M-product with its DCT, on NumPy arrays with tubes last, the order it asks for."""

    def build() -> Runner:
        package = need("mprod")
        forward, inverse = package.generate_dct(tubes)
        return Runner(
            lambda a, b: package.m_prod(a, b, forward, inverse),
            lambda *inputs: tuple(t.clone().numpy() for t in inputs),
        )

    return Impl(
        "mprod-package m_prod", build, lambda data, found: check(data, torch.from_numpy(found.copy()))
    )


def cupy_product(check: Check) -> Impl:
    """Half faces on a GPU, tubes first."""

    def build() -> Runner:
        cupy = need("cupy")

        def product(a: Any, b: Any) -> Any:
            faces = cupy.matmul(cupy.fft.rfft(a, axis=-3), cupy.fft.rfft(b, axis=-3))
            return cupy.fft.irfft(faces, n=a.shape[-3], axis=-3)

        return Runner(product, lambda *inputs: tuple(cupy.from_dlpack(to_first(t)) for t in inputs))

    return Impl(
        "cupy rfft + matmul, tubes first",
        build,
        lambda data, found: check(data, torch.from_dlpack(found), first=True),
    )


# ---- the t-SVD


def torch_svd(half: bool, check: Check) -> Impl:
    """(U, S, V), tubes first: the SVD of all faces, as usually written, whose factors are complex, or of half
    of them, where the real ones go through the complex routine and the factors need not be real faces."""

    def all_faces(a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        u, s, vh = torch.linalg.svd(torch.fft.fft(a, dim=0), full_matrices=False)
        return tuple(torch.fft.ifft(t, dim=0) for t in (u, torch.diag_embed(s), vh.mH))

    def half_faces(a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        u, s, vh = torch.linalg.svd(torch.fft.rfft(a, dim=0), full_matrices=False)
        middle = torch.diag_embed(s).to(u.dtype)
        return tuple(torch.fft.irfft(t, n=a.shape[0], dim=0) for t in (u, middle, vh.mH))

    name = "torch SVD of half the faces" if half else "torch SVD of all faces"
    check = functools.partial(check, first=True)
    return Impl(name, lambda: Runner(half_faces if half else all_faces, lambda a: (to_first(a),)), check)


# ---- steps on measurements


def sensing_loops(step: float, steps: int) -> tuple[Impl, ...]:
    """torch loops; what they convert once per run is in their time, as it is in ours."""

    def impl(name: str, loop: tubal_sensing.Loop) -> Impl:
        return Impl(
            f"torch loop, {name}", lambda: Runner(lambda u, operator, y: loop(u, operator, y, step, steps))
        )

    return tuple(impl(name, loop) for name, loop in tubal_sensing.LOOPS.items())
