"""flash-linear-attention's functions on pyops: their names, argument order, defaults and layouts (0.6.0).

``from fla.ops.simple_gla import chunk_simple_gla`` becomes ``from pyops.compat.fla import chunk_simple_gla``.
chunk_*, fused_chunk_* and fused_recurrent_* of one method are the same op here. What differs:

- float32, float64 and any head size work everywhere, gradients reach ``g_gamma`` too, and ``torch.compile``
  does not break the graph. A final state that was not asked for is None, also of a normalised op.
- Arguments that only steer how it is computed (``cu_seqlens_cpu``, ``chunk_indices``, ``disable_recompute``,
  ``safe_gate``) are accepted and not used; a ``chunk_size`` is passed on. Other arguments that pyops has
  nothing for raise NotImplementedError; unknown ones raise TypeError, where flash-linear-attention ignores
  them.
- ``use_qk_l2norm_in_kernel``, ``use_gate_in_kernel`` and ``use_beta_sigmoid_in_kernel`` are plain torch
  before the op, in float32 or better. ``A_log``, ``dt_bias`` and ``lower_bound`` are read with
  ``use_gate_in_kernel`` alone.
- Nothing is broadcast, and no tensor of another shape is taken for what it is not: errors are TypeError and
  ValueError and name the argument.

Shapes: q, k [B, T, H, K], v [B, T, HV, V], g and beta [B, T, HV] or [B, T, H], a gate per entry of k
[B, T, HV, K] or [B, T, H, K]; states [N, HV, K, V], or [N, HV, V, K] with ``state_v_first``.

The state of a normalised op is a pair (S, z): S [N, H, K, V] as without ``normalize``, and z [N, 1, H, K] the
sum of k, by which o = scale q S is divided: o / (scale q z + 1e-10). As ``initial_state`` S alone stands for
(S, 0). :func:`pyops.linear_attention` has the same pair with z [N, H, K].
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from pyops.nn.layer import l2_normalized, log_decay, wide
from pyops.ops import _checks as checks
from pyops.ops import linear_attention as op

ABSENT = (
    "gv", "reverse", "cp_context", "return_intermediate_states", "use_graph", "max_num_seqs",
)  # fmt: skip
WITHOUT_EFFECT = "cu_seqlens_cpu", "chunk_indices", "disable_recompute", "safe_gate"
GATE = "use_gate_in_kernel", "A_log", "dt_bias"


def _call(
    arguments: dict[str, Any],
    required: tuple[str, ...] = (),
    keywords: tuple[str, ...] = (),
    **more: Any,
) -> tuple[Tensor, Any]:
    """Runs a function of this module from its ``locals()``.

    Args:
        arguments: by name; what is in its ``kwargs`` may be named in ``keywords``, or be ``chunk_size``.
        required: names of tensors for which None is no value.
        more: what the function fixes.
    """
    further = arguments.pop("kwargs", {})
    for name, value in further.items():
        if name not in (*keywords, "chunk_size"):
            raise TypeError(f"{name} is not an argument of this function in pyops, got {checks.shown(value)}")
    given = {**arguments, **further, **more}
    for name in ABSENT:
        value = given.pop(name, None)
        if value is not None and value is not False:
            raise NotImplementedError(
                f"{name} must be left out: pyops has nothing for it, got {checks.shown(value)}"
            )
    for name in required:
        if given[name] is None:
            raise TypeError(f"{name} must be a torch.Tensor, got NoneType")
    return _run(**{name: value for name, value in given.items() if name not in WITHOUT_EFFECT})


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    initial_state: Any,
    cu_seqlens: Any,
    g: Any = None,
    gk: Any = None,
    g_gamma: Any = None,
    per_entry: bool = False,
    beta: Any = None,
    default_beta: float | None = None,
    normalize: bool = False,
    state_v_first: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    use_gate_in_kernel: bool | None = None,
    A_log: Any = None,
    dt_bias: Any = None,
    lower_bound: Any = None,
    **options: Any,
) -> tuple[Tensor, Any]:
    """``per_entry``: g is [B, T, HV, K]; ``options`` are those of :func:`pyops.linear_attention`."""
    op._check_tokens(q, k, v, "[B, T, {}, {}]")
    if g is not None:
        if g_gamma is not None:
            raise ValueError("g_gamma must be None where g is given")
        _check("g", g, q, v, *q.shape[3:] * per_entry)
    if use_gate_in_kernel:
        g = _activated(g, A_log, dt_bias, lower_bound)
    if gk is not None:
        _check("gk", gk, q, v, q.shape[3])
        if g is not None and g.shape != gk.shape[:3]:
            raise ValueError(f"gk must have the heads of g, {g.shape[2]}, got shape {tuple(gk.shape)}")
        g = gk if g is None else g.unsqueeze(-1) + gk
    if g_gamma is not None:
        op._check_tensor("g_gamma", g_gamma, q)
        if tuple(g_gamma.shape) not in ((q.shape[2],), (v.shape[2],)):
            raise ValueError(f"g_gamma must be [H = {q.shape[2]}], got shape {tuple(g_gamma.shape)}")
        g = g_gamma
    if beta is not None:
        _check("beta", beta, q, v)
    elif use_beta_sigmoid_in_kernel:
        raise ValueError("beta must be given with use_beta_sigmoid_in_kernel=True, got None")
    elif default_beta is not None:
        beta = q.new_full(q.shape[:3], default_beta)
    if use_beta_sigmoid_in_kernel:
        beta = (2.0 if allow_neg_eigval else 1.0) * beta.to(wide(beta.dtype)).sigmoid()
    elif allow_neg_eigval:
        raise ValueError("allow_neg_eigval must be False without use_beta_sigmoid_in_kernel=True, got True")
    if initial_state is not None:
        shape = (op._sequences(cu_seqlens, q), v.shape[2], q.shape[3], v.shape[3])
        initial_state = _state(initial_state, shape, q, state_v_first, normalize)
    if use_qk_l2norm_in_kernel:
        q, k = l2_normalized(q), l2_normalized(k)
    o, final = op.linear_attention(
        q, k, v, g=g, beta=beta, initial_state=initial_state, cu_seqlens=cu_seqlens, normalize=normalize,
        **options,
    )  # fmt: skip
    if isinstance(final, tuple):
        return o, (final[0], final[1].unsqueeze(1))
    return o, final.mT.contiguous() if state_v_first and final is not None else final


def _check(name: str, t: Any, q: Tensor, v: Tensor, *channels: int) -> None:
    """[B, T, H or HV, *channels] exactly: what flash-linear-attention would misread is refused."""
    op._check_tensor(name, t, q)
    op._check_heads(name, t, q, v, *channels)


def _state(state: Any, shape: tuple[int, ...], q: Tensor, v_first: bool, normalize: bool) -> Any:
    """The state as :func:`pyops.linear_attention` has it."""
    if not normalize:
        if not v_first:
            return op._check_state("initial_state", state, shape, q)
        return op._check_state("initial_state", state, (*shape[:2], *shape[:1:-1]), q).mT
    if isinstance(state, Tensor):  # of the sums alone: k's starts at 0
        return state, op._check_state("initial_state", state, shape, q).new_zeros(shape[:3])
    sums, z = op._pair(state)
    return sums, op._check_state("initial_state[1]", z, (shape[0], 1, *shape[1:3]), q).squeeze(1)


def _activated(g: Any, A_log: Any, dt_bias: Any, lower_bound: Any) -> Tensor:
    """-exp(A_log) softplus(g + dt_bias), or lower_bound sigmoid(exp(A_log) (g + dt_bias)); in float32, or
    float64 for float64.
    """
    for name, value in (("g", g), ("A_log", 0 if A_log is None and lower_bound is not None else A_log)):
        if value is None:
            raise ValueError(f"{name} must be given with use_gate_in_kernel=True, got None")
    dtype, heads = wide(g.dtype), g.shape[2]
    bias = _parameter("dt_bias", dt_bias, g.shape[2:], g)
    rate = _parameter("A_log", A_log, (heads, *[1] * (g.ndim - 3)), g)
    if lower_bound is None:
        return log_decay(g, bias, rate)[1]
    logits = g.to(dtype) + bias.to(dtype)
    return checks.number("lower_bound", lower_bound) * (rate.to(dtype).exp() * logits).sigmoid()


def _parameter(name: str, t: Any, shape: tuple[int, ...], g: Tensor) -> Tensor:
    """t in a shape that broadcasts to g; None is zeros."""
    if t is None:
        return g.new_zeros(shape)
    op._check_tensor(name, t, g)
    size = math.prod(shape)
    if t.numel() != size:
        raise ValueError(
            f"{name} must have {size} entries for g of shape {tuple(g.shape)}, got shape {tuple(t.shape)}"
        )
    return t.reshape(shape)


def chunk_linear_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Any = None,
    output_final_state: bool = False,
    normalize: bool = True,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Any]:
    """Linear attention without a decay; normalised, its states are pairs (S [N, H, K, V], z [N, 1, H, K])."""
    return _call(locals())


fused_chunk_linear_attn = chunk_linear_attn


def fused_recurrent_linear_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Any = None,
    output_final_state: bool = False,
    reverse: bool = False,
    normalize: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Any]:
    """As :func:`chunk_linear_attn`, not normalised by default."""
    return _call(locals())


def chunk_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """A decay per head: ``g`` [B, T, H] by token, or ``g_gamma`` [H] constant, not both (Mamba-2, RetNet)."""
    return _call(locals())


def fused_recurrent_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """As :func:`chunk_simple_gla`."""
    return _call(locals())


def chunk_retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """RetNet: head h decays by 1 - 2^(-5 - h) per token."""
    arguments = locals()
    op._check_tokens(q, k, v, "[B, T, {}, {}]")
    heads = torch.arange(q.shape[2], dtype=wide(q.dtype), device=q.device)
    return _call(arguments, g_gamma=(1 - 2.0 ** (-5.0 - heads)).log())


def chunk_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """GLA: a decay ``g`` [B, T, H, K] per entry of k."""
    return _call(locals(), required=("g",), per_entry=True)


def fused_recurrent_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """As :func:`chunk_gla`."""
    return _call(locals())


def chunk_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """DeltaNet: ``beta`` [B, T, H], and no decay."""
    return _call(locals(), required=("beta",))


def fused_recurrent_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """As :func:`chunk_delta_rule`; ``beta`` 1 by default."""
    return _call(locals(), default_beta=1.0)


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Gated DeltaNet: a decay ``g`` [B, T, HV] and ``beta`` [B, T, HV].

    Further keywords: ``use_gate_in_kernel``, ``A_log`` [HV], ``dt_bias`` [HV], ``chunk_size``.
    """
    return _call(locals(), required=("g", "beta"), keywords=GATE)


def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """As :func:`chunk_gated_delta_rule`; decays ``g`` per head and ``gk`` per entry of k multiply."""
    return _call(locals(), default_beta=1.0)


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    cp_context: Any = None,
    use_graph: bool = False,
    max_num_seqs: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """KDA: a decay ``g`` [B, T, HV, K] per entry of k, and ``beta`` [B, T, HV].

    Further keywords: ``A_log`` [HV], ``dt_bias`` [HV * K], ``chunk_size``.
    """
    return _call(locals(), required=("g", "beta"), keywords=GATE[1:], per_entry=True)
