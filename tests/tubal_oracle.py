"""Float64 oracle of the t-product: block circulant matrices, with no Fourier transform anywhere."""

import torch


def bcirc(a):
    """[..., n1, n2, n3] as the block circulant [..., n3 n1, n3 n2]: block (s, t) is slice (s - t) mod n3."""
    *batch, rows, columns, n = a.shape
    shifted = (torch.arange(n).unsqueeze(1) - torch.arange(n)) % n
    blocks = a[..., shifted]  # [..., n1, n2, s, t]
    return blocks.movedim((-2, -4, -1, -3), (-4, -3, -2, -1)).reshape(*batch, n * rows, n * columns)


def unfold(b):
    """[..., n2, n4, n3] as the block column [..., n3 n2, n4]."""
    *batch, rows, columns, n = b.shape
    return b.movedim(-1, -3).reshape(*batch, n * rows, columns)


def fold(c, n):
    *batch, rows, columns = c.shape
    return c.reshape(*batch, n, rows // n, columns).movedim(-3, -1)


def transpose(a):
    """Slice 0 transposed, then the slices n3 - 1 ... 1 transposed (and conjugated)."""
    n = a.shape[-1]
    return torch.stack([a[..., (n - k) % n].mH for k in range(n)], -1)


def tprod(a, b, transpose_a=False, transpose_b=False):
    a, b = (transpose(a) if transpose_a else a), (transpose(b) if transpose_b else b)
    return fold(bcirc(a) @ unfold(b), a.shape[-1])


def star(a, b, matrix, transpose_a=False, transpose_b=False):
    """The product for a real transform M by its structure constants, one for each three tube entries."""
    matrix = matrix.double()
    constants = torch.einsum("kf,fi,fj->kij", torch.linalg.inv(matrix), matrix, matrix)
    a = a.transpose(-3, -2) if transpose_a else a
    b = b.transpose(-3, -2) if transpose_b else b
    return torch.einsum("...xli,...lyj,kij->...xyk", a, b, constants)


def first(x):
    """Tubes last to tubes first."""
    return x.movedim(-1, -3)


def last(x):
    return x.movedim(-3, -1)


def dct(n):
    from scipy.fft import dct as scipy_dct

    return torch.from_numpy(scipy_dct(torch.eye(n, dtype=torch.float64).numpy(), axis=0, norm="ortho"))


def gate(inner):
    """Relative Frobenius error for sums over ``inner`` entries, by dtype."""
    return {
        torch.float64: 1e-14 * max(1.0, inner**0.5 / 8),
        torch.float32: 2e-6,
        torch.bfloat16: 1e-2,
        torch.float16: 2e-3,
    }.__getitem__
