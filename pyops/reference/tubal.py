"""The t-product in plain torch: transform the tubes, multiply face by face, transform back.

    C(i, j, :) = sum_l A(i, l, :) (*) B(l, j, :)    with (*) the circular convolution,
    Chat_f = Ahat_f Bhat_f                          with Ahat the DFT of A along its tubes.

For real A, face n3 - f is the conjugate of face f, so the faces 0 ... n3 // 2 suffice. A transform other than
the DFT is given as matrices; faces are then real and transposes plain.

Bits are those of torch's FFT and matrix products, which may cut their sums by the number of threads; the
kernels give the same bits for any number.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from pyops.reference._precision import without_autocast, working_dtype


def faces_first(x: Tensor, axes: int) -> Tensor:
    """[..., n1, n2, tubes] as [..., tubes, n1, n2], a view; tubes are ``axes`` dimensions."""
    return x.movedim((-2 - axes, -1 - axes), (-2, -1))


def tubes_last(x: Tensor, axes: int) -> Tensor:
    return x.movedim((-2, -1), (-2 - axes, -1 - axes))


@without_autocast
def matmul(x: Tensor, y: Tensor) -> Tensor:
    return x @ y


def along(matrix: Tensor, x: Tensor, dim: int) -> Tensor:
    """matrix x_dim x: every line of x along dim is multiplied by the matrix."""
    return matmul(x.movedim(dim, -1), matrix.mT).movedim(-1, dim)


def to_faces(x: Tensor, axes: int, first: bool, matrices: Sequence[Tensor] | None) -> Tensor:
    """Faces [..., tubes, n1, n2] of x; the DFT of real x has the last tube axis halved."""
    tubes = range(-2 - axes, -2) if first else range(-axes, 0)
    if matrices is None and x.numel() == 0:  # MKL refuses to transform nothing
        half = x.shape[tubes[-1]] if x.is_complex() else x.shape[tubes[-1]] // 2 + 1
        x = x.narrow(tubes[-1], 0, half).to(torch.promote_types(x.dtype, torch.complex64))
    elif matrices is None:
        x = torch.fft.fftn(x, dim=tuple(tubes)) if x.is_complex() else torch.fft.rfftn(x, dim=tuple(tubes))
    else:
        for matrix, dim in zip(matrices, tubes, strict=True):
            x = along(matrix, x, dim)
    return x if first else faces_first(x, axes)


def from_faces(
    x: Tensor, sizes: Sequence[int], first: bool, matrices: Sequence[Tensor] | None, real: bool
) -> Tensor:
    """The tensor with these faces; ``sizes`` of the tubes, which half of the faces do not tell."""
    axes = len(sizes)
    x = x if first else tubes_last(x, axes)
    tubes = tuple(range(-2 - axes, -2) if first else range(-axes, 0))
    if matrices is not None:
        for matrix, dim in zip(matrices, tubes, strict=True):
            x = along(matrix, x, dim)
        return x
    if x.numel() == 0:
        shape = list(x.shape)
        shape[tubes[-1]] = sizes[-1]
        x = x.narrow(tubes[-1], 0, 1).expand(shape)
        return x.real if real else x
    return torch.fft.irfftn(x, s=tuple(sizes), dim=tubes) if real else torch.fft.ifftn(x, dim=tubes)


def product(
    a: Tensor,
    b: Tensor,
    transpose_a: bool,
    transpose_b: bool,
    tubes_first: bool,
    axes: int,
    forward_a: Sequence[Tensor] | None,
    forward_b: Sequence[Tensor] | None,
    inverse: Sequence[Tensor] | None,
) -> Tensor:
    """The product for any order, real and complex, differentiable by autograd in the matrices too."""
    real = not (a.is_complex() or b.is_complex())
    if not real and inverse is None:  # the halves of a real factor would not fit the faces of a complex one
        a, b = a.to(torch.promote_types(a.dtype, b.dtype)), b.to(torch.promote_types(a.dtype, b.dtype))
    elif inverse is not None:  # matrix products need one dtype
        wide = functools.reduce(torch.promote_types, (t.dtype for t in (a, b, *inverse)))
        a, b, inverse = a.to(wide), b.to(wide), [m.to(wide) for m in inverse]
        forward_a, forward_b = ([m.to(wide) for m in f or ()] for f in (forward_a, forward_b))
    x = to_faces(a, axes, tubes_first, forward_a)
    y = to_faces(b, axes, tubes_first, forward_b)
    c = matmul(x.mH if transpose_a else x, y.mH if transpose_b else y)
    sizes = a.shape[-2 - axes : -2] if tubes_first else a.shape[-axes:]
    return from_faces(c, sizes, tubes_first, inverse, real)


@without_autocast
def tprod(a, b, transpose_a, transpose_b, tubes_first, forward_a, forward_b, inverse):
    """inverse x_3 [(forward_a x_3 a) facewise (forward_b x_3 b)]; the DFT where there are no matrices."""
    wide = working_dtype(a)
    x, y = (t.to(wide).contiguous() for t in (a, b))  # sums in one order, whatever the strides
    matrices = [None if m is None else (m.to(wide),) for m in (forward_a, forward_b, inverse)]
    c = product(x, y, transpose_a, transpose_b, tubes_first, 1, *matrices)
    return c.to(a.dtype).clone(memory_format=torch.contiguous_format)  # whose strides sizes of 1 have too


def left(grad, b, transpose_a, transpose_b, tubes_first, forward_a, forward_b, inverse):
    """Arguments of ``tprod`` for the gradient of a, before sums over broadcast batches: G * B^T.

    With matrices, the gradient in the transform domain is inverse^T x_3 G, and forward_a^T leads back.
    """
    out, back = (None if m is None else m.mT for m in (inverse, forward_a))
    if transpose_a:
        return b, grad, transpose_b, True, tubes_first, forward_b, out, back
    return grad, b, False, not transpose_b, tubes_first, out, forward_b, back


def right(grad, a, transpose_a, transpose_b, tubes_first, forward_a, forward_b, inverse):
    """As ``left`` for the gradient of b: A^T * G."""
    out, back = (None if m is None else m.mT for m in (inverse, forward_b))
    if transpose_b:
        return grad, a, True, transpose_a, tubes_first, out, forward_a, back
    return a, grad, not transpose_a, False, tubes_first, forward_a, out, back


@without_autocast
def tprod_backward(grad, a, b, *settings):
    """Gradients of a and b in their shapes and dtypes; two more t-products."""
    wide = working_dtype(grad)
    g, x, y = (t.to(wide) for t in (grad, a, b))
    grad_a = tprod(*left(g, y, *settings)).sum_to_size(a.shape)
    grad_b = tprod(*right(g, x, *settings)).sum_to_size(b.shape)
    return grad_a.to(a.dtype).contiguous(), grad_b.to(b.dtype).contiguous()


@without_autocast
def tgram(u, transpose, tubes_first):
    """U * U^T, or U^T * U: its faces are Hermitian."""
    return tprod(u, u, transpose, not transpose, tubes_first, None, None, None)


def ttranspose(x: Tensor, tubes_first: bool, axes: int = 1) -> Tensor:
    """Every slice (conjugate) transposed, and slices 1 ... n3 - 1 in reverse order, on each tube axis."""
    tubes = range(-2 - axes, -2) if tubes_first else range(-axes, 0)
    for dim in tubes:
        x = torch.cat([x.narrow(dim, 0, 1), x.narrow(dim, 1, x.shape[dim] - 1).flip(dim)], dim)
    x = x.mT if tubes_first else x.transpose(-2 - axes, -1 - axes)
    return (x.conj() if x.is_complex() else x).contiguous()


def dct_matrix(n: int) -> Tensor:
    """The orthonormal DCT-II in float64: sqrt((2 - [f = 0])/n) cos(pi f (2 t + 1) / (2 n))."""
    f, t = torch.arange(n).unsqueeze(1), torch.arange(n)
    angle = (f * (2 * t + 1)) % (4 * n)  # the cosine of a large argument would lose digits
    matrix = torch.cos(angle.double() * (math.pi / (2 * n))) * math.sqrt(2 / n)
    matrix[0] *= math.sqrt(0.5)
    return matrix
