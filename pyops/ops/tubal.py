"""The t-product of third-order tensors: matrix products whose scalars are tubes, multiplied by circular
convolution.

Kilmer, Martin: "Factorization strategies for third-order tensors", Linear Algebra and its Applications 435,
2011.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad

from pyops import _library
from pyops.ops import _checks as checks
from pyops.ops._registration import batched, like
from pyops.reference import tubal as reference

LAYOUTS = ("last", "first")
COMPLEX = (torch.complex64, torch.complex128)
REAL = frozenset(checks.DTYPES)
REAL_OF = {torch.complex64: torch.float32, torch.complex128: torch.float64}
COMPLEX_OF = {real: wide for wide, real in REAL_OF.items()}
PLAIN = (Tensor, torch.nn.Parameter)
_BelowAutograd = torch._C._AutoDispatchBelowAutograd
_in_functorch = torch._C._functorch.peek_interpreter_stack


class Transform(NamedTuple):
    """A transform of the tubes: the DFT, or one matrix with its inverse per tube axis."""

    name: str  # "dft", "dct" or "matrix"
    forward: tuple[Tensor, ...] | None = None
    inverse: tuple[Tensor, ...] | None = None

    def same(self, other: Transform) -> bool:
        if self.name != other.name or self.name != "matrix" or not (self.forward and other.forward):
            return self.name == other.name
        pairs = zip(self.forward, other.forward, strict=False)
        return len(self.forward) == len(other.forward) and all(
            x is y
            or (x.shape == y.shape and (x.is_complex() or not y.is_complex()) and torch.equal(x, y.to(x)))
            for x, y in pairs
        )


DFT = Transform("dft")


def tprod(
    a: Tensor,
    b: Tensor,
    *,
    transform: str | Tensor | Sequence[Tensor] = "dft",
    transpose_a: bool = False,
    transpose_b: bool = False,
    layout: str = "last",
    order: int = 3,
) -> Tensor:
    """The t-product C = A * B, or with A^T or B^T in place of a factor.

        C(i, j, :) = sum_l A(i, l, :) (*) B(l, j, :),    (*) the circular convolution of tubes,

    which is a matrix product for every face of the DFT along the tubes (unnormalised, 1/n3 on the way back).
    With another invertible ``transform`` M the faces are those of M applied to each tube. The T-transpose is
    the conjugate transpose of each face: for the DFT, every slice transposed and slices 1 ... n3 - 1 in
    reverse order.

    Args:
        a, b: [..., n1, n2, n3] and [..., n2, n4, n3], tubes last; leading dimensions broadcast as in matmul,
            tubes do not. float64, float32, bfloat16, float16 (float32 inside), complex64, complex128, any
            strides; never written to. Mixed dtypes promote. Real inputs give exactly real results.
        transform: ``"dft"`` (default), ``"dct"`` (the orthonormal DCT-II), or an invertible [n3, n3] matrix,
            tensor or NumPy array, taken in the precision of a and b; for ``order`` above 3 one matrix per
            tube axis. Gradients reach a matrix that requires them.
        transpose_a, transpose_b: take the T-transpose of that factor.
        layout: ``"last"``, or ``"first"``: a is [..., n3, n1, n2], and so on for b and the result.
        order: p >= 3, of the tensors themselves: the last p dimensions, [n1, n2, n3, ..., np] with layout
            last and [n3, ..., np, n1, n2] first, transformed along each of n3 ... np.

    Returns:
        [..., n1, n4, n3], contiguous. Differentiable any number of times (backward mode).

    Raises:
        TypeError, ValueError, RuntimeError: before any work, naming the argument, what was received and what
            is wanted: for example tubes of different lengths, no tubes (n3 = 0), integers.

    Kilmer, Martin 2011; for other transforms Kernfeld, Kilmer, Aeron, "Tensor-tensor products with invertible
    linear transforms", Linear Algebra and its Applications 485, 2015.

    >>> a = torch.tensor([[[1.0, 2.0, 3.0]]])
    >>> shift = torch.tensor([[[0.0, 1.0, 0.0]]])  # a tube that delays by one
    >>> (tprod(a, shift) - torch.tensor([3.0, 1.0, 2.0])).abs().max() < 1e-6
    tensor(True)
    >>> tprod(torch.randn(5, 10, 20, 4), torch.randn(20, 7, 4)).shape
    torch.Size([5, 10, 7, 4])
    """
    if (
        _FAST
        and type(a) in PLAIN
        and type(b) in PLAIN
        and type(transform) is str
        and transform == "dft"
        and order == 3
        and (layout == "last" or layout == "first")
        and type(transpose_a) is bool
        and type(transpose_b) is bool
        and a.is_cpu
        and a.layout is b.layout is torch.strided
        and a.dtype in REAL
        and a.dtype is b.dtype
        and _unrecorded(a.requires_grad or b.requires_grad)
    ):
        try:  # below autograd, whose Python rule costs more than a small product; the op checks shapes
            with _BelowAutograd():
                return _TPROD(a, b, transpose_a, transpose_b, layout == "first", None, None, None)
        except RuntimeError:
            check_product(a, b, transpose_a, transpose_b, layout, order)
            raise
    check_product(a, b, transpose_a, transpose_b, layout, order)
    axes, first = order - 2, layout == "first"
    dtype = torch.promote_types(a.dtype, b.dtype)
    t = resolve(transform, tube_sizes(a, layout, order), dtype, a.device)
    matrices = () if t.forward is None else (*t.forward, *(t.inverse or ()))
    if axes > 1 or dtype in COMPLEX or any(m.is_complex() or m.requires_grad for m in matrices):
        wide = torch.promote_types(dtype, torch.float32)
        c = reference.product(
            a.to(wide), b.to(wide), transpose_a, transpose_b, first, axes, t.forward, t.forward, t.inverse
        )
        return (c if c.is_complex() else c.to(dtype)).contiguous()
    _no_tangent(a, b)
    forward, inverse = (
        (None, None) if t.forward is None or t.inverse is None else (t.forward[0], t.inverse[0])
    )
    return torch.ops.pyops.tprod(
        a.to(dtype), b.to(dtype), transpose_a, transpose_b, first, forward, forward, inverse
    )


def tgram(
    u: Tensor,
    *,
    transform: str | Tensor | Sequence[Tensor] = "dft",
    transpose: bool = False,
    layout: str = "last",
    order: int = 3,
) -> Tensor:
    """The t-product of a tensor with its own T-transpose: U * U^T, or U^T * U with ``transpose``.

    Its faces are Hermitian, so that half of the products do: for real tensors, the DFT and order 3. The rest
    is :func:`tprod` of u with itself.

    Args:
        u: [..., n1, n2, n3], dtypes as in :func:`tprod`.
        transpose: U^T * U instead.
        transform, layout, order: as in :func:`tprod`.

    Returns:
        [..., n1, n1, n3] (n2 with ``transpose``), T-symmetric up to rounding. Differentiable any number of
        times.

    Raises:
        TypeError, ValueError, RuntimeError: naming the argument, what was received and what is wanted.

    Kilmer, Martin 2011.

    >>> u = torch.randn(4, 2, 5, dtype=torch.float64)
    >>> torch.allclose(tgram(u), tprod(u, u, transpose_b=True))
    True
    """
    if (
        _FAST
        and type(u) in PLAIN
        and type(transform) is str
        and transform == "dft"
        and order == 3
        and (layout == "last" or layout == "first")
        and type(transpose) is bool
        and u.is_cpu
        and u.layout is torch.strided
        and u.dtype in REAL
        and _unrecorded(u.requires_grad)
    ):
        try:
            with _BelowAutograd():
                return _TGRAM(u, transpose, layout == "first")
        except RuntimeError:
            check_tubal("u", u, layout, 3)
            raise
    check_tubal("u", u, layout, order)
    checks.boolean("transpose", transpose)
    t = resolve(transform, tube_sizes(u, layout, order), u.dtype, u.device)
    if t.forward is not None or order > 3 or u.is_complex():
        options: dict[str, Any] = {"transform": t, "layout": layout, "order": order}
        return tprod(u, u, transpose_a=transpose, transpose_b=not transpose, **options)
    _no_tangent(u)
    return torch.ops.pyops.tgram(u, transpose, layout == "first")


def _unrecorded(requires_grad: bool) -> bool:
    """No derivative is wanted of this call, in any mode; False while torch traces."""
    return not (
        torch.compiler.is_compiling()
        or (requires_grad and torch.is_grad_enabled())
        or forward_ad._current_level >= 0
        or _in_functorch() is not None
    )


def _no_tangent(*tensors: Tensor) -> None:
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return
    if any(forward_ad.unpack_dual(t).tangent is not None for t in tensors):
        raise RuntimeError(
            "a forward-mode tangent reached the t-product, and only backward derivatives are implemented"
        )


# Argument checks


def check_tubal(name: str, x: Any, layout: Any, order: Any) -> None:
    """A dense floating or complex tensor of at least ``order`` dimensions with tubes."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
    if x.layout != torch.strided:
        raise TypeError(f"{name} must be a dense tensor, got layout {x.layout}")
    if x.dtype not in REAL and x.dtype not in COMPLEX:
        wanted = "float64, float32, bfloat16, float16, complex64 or complex128"
        raise TypeError(f"{name} must be {wanted}, got {x.dtype}")
    checks.one_of("layout", layout, LAYOUTS)
    if checks.integer("order", order) < 3:
        raise ValueError(f"order must be at least 3, got {order}")
    if x.ndim < order:
        wanted = (
            f"at least {order} dimensions, {'[..., n1, n2, n3]' if layout == 'last' else '[..., n3, n1, n2]'}"
        )
        raise ValueError(f"{name} must have {wanted}, got shape {tuple(x.shape)}")
    if any(size == 0 for size in tube_sizes(x, layout, order)):
        raise ValueError(f"{name} must have tubes of at least one entry, got shape {tuple(x.shape)}")


def tube_sizes(x: Tensor, layout: str, order: int) -> tuple[int, ...]:
    """(n3, ..., np)."""
    return tuple(x.shape[-order:-2] if layout == "first" else x.shape[2 - order :])


def matrix_sizes(x: Tensor, layout: str, order: int) -> tuple[int, int]:
    """(n1, n2)."""
    return x.shape[-2:] if layout == "first" else x.shape[-order : 2 - order]  # type: ignore[return-value]


def check_product(a: Any, b: Any, transpose_a: Any, transpose_b: Any, layout: Any, order: Any) -> None:
    check_tubal("a", a, layout, order)
    check_tubal("b", b, layout, order)
    checks.boolean("transpose_a", transpose_a)
    checks.boolean("transpose_b", transpose_b)
    if a.device != b.device:
        raise ValueError(f"b must be on the device of a, {a.device}, got {b.device}")
    for x, y in zip(tube_sizes(a, layout, order), tube_sizes(b, layout, order), strict=True):
        if x != y:
            raise ValueError(f"b must have tubes of a's length {x}, got {y} in shape {tuple(b.shape)}")
    inner = matrix_sizes(a, layout, order)[0 if transpose_a else 1]
    found = matrix_sizes(b, layout, order)[1 if transpose_b else 0]
    if inner != found:
        where = "columns" if transpose_b else "rows"
        raise ValueError(
            f"b must have {inner} {where} for a of shape {tuple(a.shape)}, "
            f"got {found} in shape {tuple(b.shape)}"
        )
    for x, y in zip(reversed(a.shape[:-order]), reversed(b.shape[:-order]), strict=False):
        if x != y and x != 1 and y != 1:
            raise ValueError(
                f"b must have batch dimensions that broadcast with a's {tuple(a.shape[:-order])}, "
                f"got {tuple(b.shape[:-order])}"
            )


def resolve(transform: Any, sizes: Sequence[int], dtype: torch.dtype, device: torch.device) -> Transform:
    """The transform that an argument means for tubes of these sizes and tensors of this dtype."""
    if isinstance(transform, Transform):
        return transform
    if isinstance(transform, str):
        checks.one_of("transform", transform, ("dft", "dct"))
        if transform == "dft":
            return DFT
        wide = torch.promote_types(dtype, torch.float32)
        wide = REAL_OF.get(wide, wide)
        if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:  # no fakes in the cache
            return _dct(tuple(sizes), wide, device)
        return _cached_dct(tuple(sizes), wide, device)
    if isinstance(transform, Tensor | np.ndarray):
        transform = (transform,)
    if not isinstance(transform, list | tuple):
        raise TypeError(f'transform must be "dft", "dct" or a matrix, got {type(transform).__name__}')
    if len(transform) != len(sizes):
        raise ValueError(
            f"transform must have {len(sizes)} matrices, one per tube axis, got {len(transform)}"
        )
    pairs = [_matrix(m, n, dtype, device) for m, n in zip(transform, sizes, strict=True)]
    return Transform("matrix", tuple(p[0] for p in pairs), tuple(p[1] for p in pairs))


def _dct(sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Transform:
    forward = tuple(reference.dct_matrix(n).to(device, dtype) for n in sizes)
    return Transform("dct", forward, tuple(m.mT.contiguous() for m in forward))


@functools.lru_cache(maxsize=64)
def _cached_dct(sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Transform:
    with torch.inference_mode(False), torch.no_grad():
        return _dct(sizes, dtype, device)


def _matrix(m: Any, n: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """A transform's matrix and its inverse, in the precision of the tensors."""
    if isinstance(m, np.ndarray):
        m = torch.as_tensor(m, device=device)
    if not isinstance(m, Tensor):
        raise TypeError(f"transform must be a torch.Tensor, got {type(m).__name__}")
    if m.dtype not in REAL and m.dtype not in COMPLEX:
        raise TypeError(f"transform must be a floating or complex matrix, got {m.dtype}")
    if tuple(m.shape) != (n, n):
        raise ValueError(f"transform must be {(n, n)} for tubes of length {n}, got shape {tuple(m.shape)}")
    if m.device != device:
        raise ValueError(f"transform must be on the device of the tensors, {device}, got {m.device}")
    if not torch.compiler.is_compiling() and torch._C._functorch.is_batchedtensor(m):
        raise RuntimeError("transform must not be vmapped: give one matrix for the whole batch")
    exact = m.to(torch.complex128 if m.is_complex() else torch.float64)
    inverse, info = torch.linalg.inv_ex(exact)
    if not torch.compiler.is_compiling() and m.device.type != "meta":
        with torch.no_grad():
            condition = torch.linalg.matrix_norm(exact) * torch.linalg.matrix_norm(inverse)
            if int(info) or not float(condition) < 0.1 / torch.finfo(torch.float64).eps:
                raise ValueError("transform must be invertible, got a singular matrix")
    wide = torch.promote_types(dtype, torch.float32)
    wide = (COMPLEX_OF if m.is_complex() else REAL_OF).get(wide, wide)
    return exact.to(wide), inverse.to(wide)


# Registration

_SETTINGS = (
    "bool transpose_a, bool transpose_b, bool tubes_first, "
    "Tensor? forward_a, Tensor? forward_b, Tensor? inverse"
)


def _fake(a, b, transpose_a, transpose_b, tubes_first, forward_a, forward_b, inverse):
    layout = "first" if tubes_first else "last"
    check_product(a, b, transpose_a, transpose_b, layout, 3)
    if a.dtype != b.dtype:  # the public function promotes
        raise TypeError(f"b must have the dtype of a, {a.dtype}, got {b.dtype}")
    rows = matrix_sizes(a, layout, 3)[transpose_a]
    columns = matrix_sizes(b, layout, 3)[1 - transpose_b]
    batch = torch.broadcast_shapes(a.shape[:-3], b.shape[:-3])
    tubes = tube_sizes(a, layout, 3)
    shape = (*batch, *tubes, rows, columns) if tubes_first else (*batch, rows, columns, *tubes)
    return a.new_empty(shape)


def _context(ctx, inputs, output):
    a, b, *settings = inputs
    ctx.save_for_backward(a, b, *settings[3:])
    ctx.settings = settings[:3]


def _grad(ctx, grad):
    a, b, *matrices = ctx.saved_tensors
    settings = (*ctx.settings, *matrices)
    wants_a, wants_b, *_ = ctx.needs_input_grad
    # One gradient alone is one t-product, unless it is summed over batches, which the op does in float32.
    if wants_a and wants_b:
        grads = torch.ops.pyops.tprod_backward(grad, a, b, *settings)
    elif wants_a and a.shape[:-3] == grad.shape[:-3]:
        grads = torch.ops.pyops.tprod(*reference.left(grad, b, *settings)).to(a.dtype), None
    elif wants_b and b.shape[:-3] == grad.shape[:-3]:
        grads = None, torch.ops.pyops.tprod(*reference.right(grad, a, *settings)).to(b.dtype)
    else:
        found = torch.ops.pyops.tprod_backward(grad, a, b, *settings)
        grads = found[0] if wants_a else None, found[1] if wants_b else None
    return *grads, *(None,) * 6


def _backward_fake(grad, a, b, *settings):
    return like(a), like(b)


def _second_grad(ctx, grad_a, grad_b):
    """The derivative of <da, G * B^T> + <db, A^T * G> in G, A and B: t-products again."""
    g, a, b, *matrices = ctx.saved_tensors
    settings = (*ctx.settings, *matrices)
    tprod_op = torch.ops.pyops.tprod
    wants_g, wants_a, wants_b, *_ = ctx.needs_input_grad
    found: list[Tensor | None] = [None] * 3
    if wants_g:
        found[0] = tprod_op(grad_a, b, *settings) + tprod_op(a, grad_b, *settings)
    if wants_a:
        found[1] = tprod_op(*reference.left(g, grad_b, *settings)).sum_to_size(a.shape)
    if wants_b:
        found[2] = tprod_op(*reference.right(g, grad_a, *settings)).sum_to_size(b.shape)
    return *found, *(None,) * 6


def _second_context(ctx, inputs, output):
    g, a, b, *settings = inputs
    ctx.save_for_backward(g, a, b, *settings[3:])
    ctx.settings = settings[:3]


def _gram_context(ctx, inputs, output):
    ctx.save_for_backward(inputs[0])
    ctx.settings = inputs[1:]


def _gram_grad(ctx, grad):
    """(G + G^T) * U for U * U^T, and U * (G + G^T) for U^T * U."""
    (u,) = ctx.saved_tensors
    transpose, first = ctx.settings
    s = grad + reference.ttranspose(grad, first)
    factors = (u, s) if transpose else (s, u)
    return torch.ops.pyops.tprod(*factors, False, False, first, None, None, None), None, None


def _gram_fake(u, transpose, tubes_first):
    layout = "first" if tubes_first else "last"
    check_tubal("u", u, layout, 3)
    n = matrix_sizes(u, layout, 3)[transpose]
    tubes = tube_sizes(u, layout, 3)
    return u.new_empty((*u.shape[:-3], *tubes, n, n) if tubes_first else (*u.shape[:-3], n, n, *tubes))


def _aligned(info, in_dims, *tensors):
    """The vmapped dimension first, and after it as many batch dimensions for each tensor."""
    wide = batched(info, in_dims, *tensors)
    ndim = max(t.ndim for t in wide)
    return [t.reshape(t.shape[0], *(1,) * (ndim - t.ndim), *t.shape[1:]) for t in wide]


def _plain_matrices(in_dims):
    if any(dim is not None for dim in in_dims):
        raise RuntimeError("transform must not be vmapped: give one matrix for the whole batch")


def _vmap(info, in_dims, a, b, *settings):
    _plain_matrices(in_dims[5:])
    return torch.ops.pyops.tprod(*_aligned(info, in_dims[:2], a, b), *settings), 0


def _backward_vmap(info, in_dims, grad, a, b, *settings):
    _plain_matrices(in_dims[6:])
    wide = _aligned(info, in_dims[:3], grad, a, b)
    shapes = [t.shape for t in batched(info, in_dims[1:3], a, b)]
    grads = torch.ops.pyops.tprod_backward(*wide, *settings)
    return tuple(g.reshape(shape) for g, shape in zip(grads, shapes, strict=True)), (0, 0)


def _gram_vmap(info, in_dims, u, *settings):
    return torch.ops.pyops.tgram(*batched(info, in_dims[:1], u), *settings), 0


_library.register(
    "tprod",
    f"(Tensor a, Tensor b, {_SETTINGS}) -> Tensor",
    reference=reference.tprod,
    fake=_fake,
    vmap=_vmap,
    backward=_grad,
    setup_context=_context,
)
_library.register(
    "tprod_backward",
    f"(Tensor grad, Tensor a, Tensor b, {_SETTINGS}) -> (Tensor, Tensor)",
    reference=reference.tprod_backward,
    fake=_backward_fake,
    vmap=_backward_vmap,
    backward=_second_grad,
    setup_context=_second_context,
)
_library.register(
    "tgram",
    "(Tensor u, bool transpose, bool tubes_first) -> Tensor",
    reference=reference.tgram,
    fake=_gram_fake,
    vmap=_gram_vmap,
    backward=_gram_grad,
    setup_context=_gram_context,
)
# Where the op has a kernel, a call that records nothing goes to it directly.
_TPROD, _TGRAM = torch.ops.pyops.tprod.default, torch.ops.pyops.tgram.default
_FAST = _library.backend("tprod", "cpu") != "reference" and _library.backend("tgram", "cpu") != "reference"
