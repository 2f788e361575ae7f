"""Linear attention with a state: one recurrence for linear attention, RetNet, Mamba-2 (SSD), GLA, DeltaNet,
gated DeltaNet and KDA.

Katharopoulos et al. 2020, "Transformers are RNNs"; Sun et al. 2023, "Retentive Network"; Dao, Gu 2024,
"Transformers are SSMs"; Yang et al. 2024, "Gated Linear Attention" and "Parallelizing Linear Transformers
with the Delta Rule"; Yang, Kautz, Hatamizadeh 2025, "Gated Delta Networks".
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pyops import _library
from pyops.ops import _checks as checks
from pyops.ops._registration import like, triton
from pyops.reference import linear_attention as reference

NORMALIZE_EPS = 1e-10  # flash-linear-attention's
LARGEST_CHUNK = 1 << 20  # above any backend's
State = Tensor | tuple[Tensor, Tensor]


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: State | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    normalize: bool = False,
    chunk_size: int | None = None,
) -> tuple[Tensor, State | None]:
    """Causal linear attention, o_t = scale q_t S_t, with a decayed or corrected state S per value head.

    Per token, with row vectors and S = 0 or ``initial_state`` before the first one:

        S <- Diag(exp g_t) S                                                        (no g: as it is)
        u = v_t, or with beta (the delta rule) u = beta_t (v_t - k_t S)
        S <- S + k_t^T u,    o_t = scale q_t S

    ======================================  ==============  ======
    method                                  g               beta
    ======================================  ==============  ======
    linear attention                        None            None
    RetNet, lightning attention             [H]             None
    Mamba-2 (SSD), simple GLA               [B, T, H]       None
    GLA                                     [B, T, H, K]    None
    DeltaNet                                None            [B, T, H]
    gated DeltaNet                          [B, T, H]       [B, T, H]
    KDA                                     [B, T, H, K]    [B, T, H]
    ======================================  ==============  ======

    Args:
        q, k: [B, T, H, K], one dtype of float64, float32, bfloat16 and float16, any strides. They are used as
            they are; the delta rule wants rows of k of norm about 1.
        v: [B, T, HV, V], HV a multiple of H: value head h uses the q and k of head h // (HV // H).
        g: logarithm of the decay, [B, T, H] or [B, T, HV], with a further dimension K for one decay per entry
            of k, or [H] or [HV] for one constant per head; any of the four dtypes. -inf is an exact reset:
            the state before it is dropped, NaN included. 0 equals None. Positive values are allowed: the
            state grows, and overflows to infinity where the recurrence does.
        beta: [B, T, H] or [B, T, HV], usually in [0, 1] or [0, 2]; any of the four dtypes.
        scale: of q; default K^(-1/2).
        initial_state: [N, HV, K, V], any of the four dtypes, never written to; N = B, or the number of
            sequences of ``cu_seqlens``.
        output_final_state: also return the state after the last token.
        cu_seqlens: [N + 1], int32 or int64: sequences of any length lie one after another in a batch of one,
            sequence n being tokens ``cu_seqlens[n]`` to ``cu_seqlens[n + 1]``; empty ones are allowed.
        normalize: divide o by ``scale q_t z_t + 1e-10``, z_t the sum of the (decayed) k; not with beta.
            Meant for q and k above 0, as feature maps give them. It computes 16-bit inputs in float32,
            because sums over T overflow float16. ``initial_state`` and the final state are then pairs
            (S, z [N, HV, K]). It takes a copy of v and one of o more, and of 16-bit q, k and v copies in
            float32.
        chunk_size: tokens computed at once, a power of two; a backend takes the nearest size it has. Default:
            the backend's choice. It changes the speed and the rounding, not the result.

    Returns:
        (o, final_state): o [B, T, HV, V] in q's dtype; the state [N, HV, K, V] in float32 (float64 for
        float64), or None without ``output_final_state``. Both are contiguous and share no memory with inputs.

        States and sums are in float32 (float64 for float64 inputs); without ``normalize``, memory beyond
        inputs and results does not grow with T in the forward, and by one state per chunk in the backward
        pass. Numbers below the smallest normal one, 1.2e-38 (float64: 2.2e-308), may become 0, results and
        products on the way alike: a token whose products q k are that small may add nothing to o, however
        large its v.

        NaN and Inf in a token reach that sequence and head from that token on, and nothing else; from v only
        their own column. Where finite inputs overflow in a product that the recurrence does not form, its
        tokens are computed one by one, and slower. Of gradients less is promised: where a sequence holds NaN
        or Inf, or a product of it overflows, any gradient of that sequence and head may be NaN, at earlier
        tokens too (of q, k, g and beta, those of the value heads that share them); gradients of other
        sequences and heads are what they are without it, to rounding.

        The same inputs give the same bits for a given number of threads; where there are fewer heads than
        threads, long sequences are cut into segments (not by the delta rule), and another number rounds
        differently.

        Gradients reach every tensor argument, also through the final state alone; a g of -inf has gradient 0.
        Second derivatives, forward mode and the transforms of ``torch.func`` that differentiate (``grad``,
        ``vjp``, ``jacrev``) raise RuntimeError. ``torch.vmap`` works, but not with ``cu_seqlens``.

    Raises:
        TypeError, ValueError: naming the argument, what was received and what is wanted; before any work, the
            values in ``cu_seqlens`` (ValueError or RuntimeError) when the work starts.

    >>> q = k = v = torch.ones(1, 3, 1, 1)
    >>> linear_attention(q, k, v)[0].flatten()
    tensor([1., 2., 3.])
    >>> o, state = linear_attention(q, k, v, g=torch.tensor([0.5]).log(), output_final_state=True)
    >>> o.flatten(), state.shape
    (tensor([1.0000, 1.5000, 1.7500]), torch.Size([1, 1, 1, 1]))
    >>> linear_attention(q, k, v, beta=torch.ones(1, 3, 1))[0].flatten()
    tensor([1., 1., 1.])
    """
    return _run(
        torch.ops.pyops.linear_attention, q, k, v, g, beta, scale, initial_state, output_final_state,
        cu_seqlens, normalize, chunk_size,
    )  # fmt: skip


def _run(
    call: Callable[..., tuple[Tensor, Tensor]],
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    scale: Any,
    initial_state: Any,
    output_final_state: Any,
    cu_seqlens: Any,
    normalize: Any,
    chunk_size: Any,
) -> tuple[Tensor, State | None]:
    """What surrounds the op: checks and defaults before ``call``, which has its schema, and the quotient."""
    _check_tokens(q, k, v, "[B, T, {}, {}]")
    batch, length, _, key_dim = q.shape
    values = v.shape[2]
    g = _gate(g, q, v)
    _check_beta(beta, q, v)
    checks.boolean("output_final_state", output_final_state)
    checks.boolean("normalize", normalize)
    if normalize and beta is not None:
        raise ValueError("normalize must be False with beta, got True")
    count = _sequences(cu_seqlens, q)
    initial = None
    if normalize:
        if initial_state is not None:
            initial = _joined_state(initial_state, (count, values, key_dim, v.shape[3]), q)
        ones = torch.ones(1, dtype=v.dtype, device=v.device).expand(batch, length, values, 1)
        v = torch.cat([v, ones], -1)
    elif initial_state is not None:
        initial = _check_state("initial_state", initial_state, (count, values, key_dim, v.shape[3]), q)
    wide = torch.float32 if normalize and q.dtype in (torch.bfloat16, torch.float16) else q.dtype
    o, final = call(
        q.to(wide), k.to(wide), v.to(wide), g, beta, initial, cu_seqlens, _scale(scale, key_dim),
        _chunk_size(chunk_size),
    )  # fmt: skip
    if not normalize:
        return o, final if output_final_state else None
    o = (o[..., :-1] / (o[..., -1:] + NORMALIZE_EPS)).to(q.dtype)
    return o, (final[..., :-1].contiguous(), final[..., -1].contiguous()) if output_final_state else None


def linear_attention_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    *,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    inplace: bool = False,
) -> tuple[Tensor, Tensor]:
    """One token of :func:`linear_attention`, as in decoding.

    Args:
        q, k: [B, H, K]; v: [B, HV, V]; dtypes as in :func:`linear_attention`.
        state: [B, HV, K, V] before the token, zeros before the first one; any of the four dtypes.
        g: [B, H], [B, HV], either with a further dimension K, or [H] or [HV]; beta: [B, H] or [B, HV].
        scale: default K^(-1/2).
        inplace: write the new state into ``state``, which must be float32 (float64 for float64 q), and no
            two elements of which may share memory, as those of an expanded tensor do. It records no gradient.
            Under ``torch.vmap``, ``state`` must be among the vmapped arguments.

    Returns:
        (o [B, HV, V] in q's dtype, the new state in float32 or float64; with ``inplace``, ``state`` itself).

    Raises:
        TypeError, ValueError: naming the argument, what was received and what is wanted, before any work.
        RuntimeError: for ``inplace`` where a gradient would be recorded.

    >>> q = k = v = torch.ones(1, 1, 1)
    >>> state = torch.zeros(1, 1, 1, 1)
    >>> for _ in range(3):
    ...     o, state = linear_attention_step(q, k, v, state, inplace=True)
    >>> o.item()
    3.0
    """
    _check_tokens(q, k, v, "[B, {}, {}]")
    batch, _, key_dim = q.shape
    g = _gate(g, q, v)
    _check_beta(beta, q, v)
    _check_state("state", state, (batch, v.shape[1], key_dim, v.shape[2]), q)
    checks.boolean("inplace", inplace)
    factor = _scale(scale, key_dim)
    if not inplace:
        token = [None if t is None else t.unsqueeze(1) for t in (q, k, v, g, beta)]
        o, after = torch.ops.pyops.linear_attention(*token, state, None, factor, 0)
        return o.squeeze(1), after
    if not torch.compiler.is_compiling():
        _check_own_memory(state)
    wanted = reference.working_dtype(q)
    if state.dtype != wanted:
        raise TypeError(f"state must be {wanted} with inplace=True and q in {q.dtype}, got {state.dtype}")
    tensors = [t for t in (q, k, v, g, beta, state) if t is not None]
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        raise RuntimeError("inplace=True records no gradient: call it under torch.no_grad()")
    o = torch.ops.pyops.linear_attention_step_(q, k, v, g, beta, state, factor)
    if not torch.compiler.is_compiling():  # a kernel writes through a pointer; autograd must know of it
        torch.autograd.graph.increment_version([state])
    return o, state


# Argument checks


def _check_tensor(name: str, t: Any, q: Tensor) -> None:
    checks.matrix(name, t, 0)
    if t.device != q.device:
        raise ValueError(f"{name} must be on the device of q, {q.device}, got {t.device}")


def _check_ndim(name: str, t: Tensor, ndims: tuple[int, ...], shape: str) -> None:
    if t.ndim not in ndims:
        raise ValueError(f"{name} must be {shape}, got shape {tuple(t.shape)}")


def _check_tokens(q: Any, k: Any, v: Any, layout: str) -> None:
    """q, k and v of a sequence, or of one token; ``layout`` is their shape but for heads and channels."""
    ndim = layout.count(",") + 1
    of_q, of_v = layout.format("H", "K"), layout.format("HV", "V")
    checks.matrix("q", q, 0)
    for name, t, shape in (("q", q, of_q), ("k", k, of_q), ("v", v, of_v)):
        _check_tensor(name, t, q)
        _check_ndim(name, t, (ndim,), shape)
        if t.dtype != q.dtype:
            raise TypeError(f"{name} must have the dtype of q, {q.dtype}, got {t.dtype}")
    if k.shape != q.shape:
        raise ValueError(f"k must have the shape of q, {tuple(q.shape)}, got {tuple(k.shape)}")
    if v.shape[:-2] != q.shape[:-2]:
        raise ValueError(f"v must be {of_v} for q of shape {tuple(q.shape)}, got shape {tuple(v.shape)}")
    if q.shape[-2] == 0:
        raise ValueError(f"q must have at least one head, got shape {tuple(q.shape)}")
    if v.shape[-2] == 0 or v.shape[-2] % q.shape[-2]:
        raise ValueError(
            f"v must have a multiple of q's {q.shape[-2]} heads, got {v.shape[-2]} in shape {tuple(v.shape)}"
        )


def _check_heads(name: str, t: Tensor, q: Tensor, v: Tensor, *channels: int) -> None:
    """t must have the leading dimensions of q, and q's heads or v's."""
    few, many = ((*q.shape[:-2], heads, *channels) for heads in (q.shape[-2], v.shape[-2]))
    if tuple(t.shape) != few and tuple(t.shape) != many:
        wanted = f"{tuple(few)}" if few == many else f"{tuple(few)} or {tuple(many)}"
        raise ValueError(f"{name} must be {wanted}, got shape {tuple(t.shape)}")


def _check_beta(beta: Any, q: Tensor, v: Tensor) -> None:
    if beta is not None:
        _check_tensor("beta", beta, q)
        _check_heads("beta", beta, q, v)


def _gate(g: Any, q: Tensor, v: Tensor) -> Tensor | None:
    """g as [B, T, heads] or [B, T, heads, K] (without T for one token)."""
    if g is None:
        return None
    _check_tensor("g", g, q)
    if g.ndim == 1 and g.shape[0] in (q.shape[-2], v.shape[-2]):
        return g.expand(*q.shape[:-2], g.shape[0])
    if g.ndim in (0, 1) or g.ndim not in (q.ndim - 1, q.ndim):
        lead = ", ".join("BT"[: q.ndim - 2])
        wanted = f"[H], [{lead}, H] or [{lead}, H, K], each with H or HV for H"
        raise ValueError(
            f"g must be {wanted}, where H = {q.shape[-2]} and HV = {v.shape[-2]}, got shape {tuple(g.shape)}"
        )
    _check_heads("g", g, q, v, *q.shape[-1:] * (g.ndim == q.ndim))
    return g


def _check_state(name: str, state: Any, shape: tuple[int, ...], q: Tensor) -> Tensor:
    _check_tensor(name, state, q)
    if tuple(state.shape) != shape:
        raise ValueError(f"{name} must be {shape}, got shape {tuple(state.shape)}")
    return state


def _pair(state: Any) -> tuple[Any, Any]:
    if not isinstance(state, tuple) or len(state) != 2:
        found = f"a tuple of {len(state)}" if isinstance(state, tuple) else type(state).__name__
        raise TypeError(f"initial_state must be a pair (S, z) with normalize=True, got {found}")
    return state


def _check_own_memory(state: Tensor) -> None:
    """A state to be written to: strides of no two elements may meet, which is what nested ones ensure."""
    if state.is_neg():
        raise ValueError(
            "state must not be a negated view with inplace=True: it shares memory with its negative"
        )
    if state.is_contiguous():
        return
    reach = 0  # of the dimensions with smaller strides
    for stride, size in sorted(zip(state.stride(), state.shape, strict=True)):
        if size > 1 and stride <= reach:
            raise ValueError(
                "state must not share memory between its elements with inplace=True, "
                f"got strides {state.stride()} for shape {tuple(state.shape)}"
            )
        reach += stride * max(size - 1, 0)


def _joined_state(state: Any, shape: tuple[int, ...], q: Tensor) -> Tensor:
    """[N, HV, K, V + 1] of the pair (S, z) of normalize=True."""
    sums, z = _pair(state)
    _check_state("initial_state[0]", sums, shape, q)
    _check_state("initial_state[1]", z, shape[:3], q)
    dtype = torch.promote_types(sums.dtype, z.dtype)
    return torch.cat([sums.to(dtype), z.to(dtype).unsqueeze(-1)], -1)


def _sequences(cu_seqlens: Any, q: Tensor, name: str = "q") -> int:
    """N: the number of sequences in q, which messages call by ``name``."""
    if cu_seqlens is None:
        return q.shape[0]
    if not isinstance(cu_seqlens, Tensor):
        raise TypeError(f"cu_seqlens must be a torch.Tensor, got {type(cu_seqlens).__name__}")
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"cu_seqlens must be int32 or int64, got {cu_seqlens.dtype}")
    if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 2:
        raise ValueError(f"cu_seqlens must be [N + 1] with N >= 1, got shape {tuple(cu_seqlens.shape)}")
    if cu_seqlens.device != q.device:
        raise ValueError(f"cu_seqlens must be on the device of {name}, {q.device}, got {cu_seqlens.device}")
    if q.shape[0] != 1:
        raise ValueError(f"{name} must have a batch of 1 with cu_seqlens, got shape {tuple(q.shape)}")
    return cu_seqlens.shape[0] - 1


def _scale(scale: Any, key_dim: int) -> float:
    if scale is None:
        return max(key_dim, 1) ** -0.5
    scale = checks.number("scale", scale)
    if not math.isfinite(scale):
        raise ValueError(f"scale must be finite, got {scale}")
    return scale


def _chunk_size(chunk_size: Any) -> int:
    if chunk_size is None:
        return 0
    size = max(checks.integer("chunk_size", chunk_size), 0)
    if size == 0 or size & (size - 1):
        raise ValueError(f"chunk_size must be a power of two, got {chunk_size}")
    return min(size, LARGEST_CHUNK)


# Registration

_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? beta, Tensor? initial_state, Tensor? cu_seqlens"


def _fake(q, k, v, g, beta, initial_state, cu_seqlens, scale, chunk_size):
    count = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    shape = (count, v.shape[2], q.shape[3], v.shape[3])
    return q.new_empty(v.shape), q.new_empty(shape, dtype=reference.working_dtype(q))


def _backward_fake(grad_o, grad_state, q, k, v, g, beta, initial_state, *_):
    inputs = (q, k, v, g, beta, initial_state)
    return tuple(q.new_empty(0, dtype=torch.float32) if t is None else like(t) for t in inputs)


def _context(ctx, inputs, output):
    *tensors, scale, chunk_size = inputs
    ctx.save_for_backward(*tensors)
    ctx.settings = scale, chunk_size


def _grad(ctx, grad_o, grad_state):
    tensors = ctx.saved_tensors
    grads = torch.ops.pyops.linear_attention_backward(grad_o, grad_state, *tensors, *ctx.settings)
    # For an absent input the op returns an empty tensor.
    given = [None if t is None else grad for t, grad in zip(tensors[:6], grads, strict=True)]
    return *given, None, None, None


def _no_second_derivative(ctx, *grads):
    raise RuntimeError(
        "linear_attention has no second derivative: its gradient cannot be differentiated again"
    )


def _folded(info, in_dims, tensors, cu_seqlens):
    """The vmapped dimension joined with the batch."""
    if cu_seqlens is not None:
        raise RuntimeError("cu_seqlens must be None under torch.vmap: join the sequences instead")
    wide = (t if d is None else t.movedim(d, 0) for t, d in zip(tensors, in_dims, strict=False))
    return [
        None if t is None else (t.expand(info.batch_size, *t.shape) if d is None else t).flatten(0, 1)
        for t, d in zip(wide, in_dims, strict=False)
    ]


def _unfolded(info, in_dims, tensors, t):
    """A result whose first dimension is vmapped dimension times batch, with the two apart."""
    batch = next(size for d, size in enumerate(tensors[0].shape) if d != in_dims[0])
    return t.reshape(info.batch_size, batch, *t.shape[1:])


def _vmap(info, in_dims, *args):
    *tensors, cu_seqlens, scale, chunk_size = args
    folded = _folded(info, in_dims, tensors, cu_seqlens)
    results = torch.ops.pyops.linear_attention(*folded, None, scale, chunk_size)
    return tuple(_unfolded(info, in_dims, tensors, r) for r in results), (0, 0)


def _backward_vmap(info, in_dims, *args):
    *tensors, cu_seqlens, scale, chunk_size = args
    folded = _folded(info, in_dims, tensors, cu_seqlens)
    grads = torch.ops.pyops.linear_attention_backward(*folded, None, scale, chunk_size)
    given = [t is not None for t in tensors[2:]]
    unfolded = [
        _unfolded(info, in_dims, tensors, r) if there else r for r, there in zip(grads, given, strict=True)
    ]
    return tuple(unfolded), tuple(0 if there else None for there in given)


def _step_vmap(info, in_dims, *args):
    *tensors, scale = args
    state, dim = tensors[5], in_dims[5]
    if dim is None:
        raise ValueError("state must be vmapped with inplace=True, got one that all entries would write to")
    _check_own_memory(state)
    *folded, joined = _folded(info, in_dims, tensors, None)
    o = torch.ops.pyops.linear_attention_step_(*folded, joined, scale)
    state = state.movedim(dim, 0)
    viewed = 1 in state.shape[:2] or state.stride(0) == state.shape[1] * state.stride(1)
    if viewed:
        torch.autograd.graph.increment_version([state])
    else:
        state.copy_(joined.unflatten(0, state.shape[:2]))
    return _unfolded(info, in_dims, tensors, o), 0


def _amx(q, k=None, v=None, g=None, beta=None, initial_state=None, cu_seqlens=None, *_, **__) -> bool:
    """As the kernel decides: smaller products would be mostly padding."""
    if q.dtype != torch.bfloat16 or v is None:
        return False
    longest = q.shape[1] if cu_seqlens is None else int(cu_seqlens.diff().max())
    return min(q.shape[-1], v.shape[-1], longest) >= 32


_library.register(
    "linear_attention",
    f"({_INPUTS}, float scale, int chunk_size) -> (Tensor, Tensor)",
    reference=reference.linear_attention,
    fake=_fake,
    cuda=triton("linear_attention", "linear_attention"),
    vmap=_vmap,
    backward=_grad,
    setup_context=_context,
    uses_amx=_amx,
)
_library.register(
    "linear_attention_backward",
    f"(Tensor grad_o, Tensor grad_state, {_INPUTS}, float scale, int chunk_size) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    reference=reference.linear_attention_backward,
    fake=_backward_fake,
    cuda=triton("linear_attention", "linear_attention_backward"),
    vmap=_backward_vmap,
    backward=_no_second_derivative,
    uses_amx=lambda grad_o, grad_state, *inputs, **others: _amx(*inputs, **others),
)
_library.register(
    "linear_attention_step_",
    "(Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? beta, Tensor(a!) state, float scale) -> Tensor",
    reference=reference.linear_attention_step_,
    fake=lambda q, k, v, *_: q.new_empty(v.shape),
    cuda=triton("linear_attention", "linear_attention_step_"),
    vmap=_step_vmap,
)
