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
  before the op.

Shapes: q, k [B, T, H, K], v [B, T, HV, V], g and beta [B, T, HV] or [B, T, H], a gate per entry of k
[B, T, HV, K]; states [N, HV, K, V], or [N, HV, V, K] with ``state_v_first``; the sum of k of a normalised op
[N, 1, H, K].
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from pyops.ops import linear_attention as op

L2_EPS = 1e-6


def _refuse(**given: Any) -> None:
    """Arguments that pyops has no counterpart of must be left at None or False."""
    for name, value in given.items():
        if value is not None and value is not False:
            raise NotImplementedError(f"{name} must be left out: pyops has nothing for it, got {value!r}")


def _chunk_size(kwargs: dict[str, Any]) -> int | None:
    """What is left in kwargs, which the functions of flash-linear-attention mostly ignore."""
    chunk_size = kwargs.pop("chunk_size", None)
    for name in kwargs:
        raise TypeError(f"{name} is not an argument of this function in pyops, got {kwargs[name]!r}")
    return chunk_size


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    initial_state: Any,
    state_v_first: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **options: Any,
) -> tuple[Tensor, Any]:
    if use_qk_l2norm_in_kernel:
        q, k = _l2norm(q), _l2norm(k)
    if state_v_first and initial_state is not None:
        initial_state = initial_state.mT
    o, final = op.linear_attention(q, k, v, initial_state=initial_state, **options)
    return o, final.mT.contiguous() if state_v_first and isinstance(final, Tensor) else final


def _l2norm(x: Tensor) -> Tensor:
    wide = x if x.dtype == torch.float64 else x.float()
    return (wide * (wide.square().sum(-1, keepdim=True) + L2_EPS).rsqrt()).to(x.dtype)


def _beta(beta: Tensor, use_beta_sigmoid_in_kernel: bool, allow_neg_eigval: bool) -> Tensor:
    if allow_neg_eigval and not use_beta_sigmoid_in_kernel:
        raise ValueError("allow_neg_eigval must be False without use_beta_sigmoid_in_kernel=True, got True")
    if not use_beta_sigmoid_in_kernel:
        return beta
    return (2.0 if allow_neg_eigval else 1.0) * beta.sigmoid()


def _gate(
    g: Tensor, use_gate_in_kernel: bool, A_log: Any, dt_bias: Any, lower_bound: float | None = None
) -> Tensor:
    """-exp(A_log) softplus(g + dt_bias), or lower_bound sigmoid(exp(A_log) (g + dt_bias)), in float32."""
    if not use_gate_in_kernel:
        return g
    g = g.float()
    if dt_bias is not None:
        g = g + dt_bias.float().view(g.shape[2:])
    if A_log is None:
        if lower_bound is None:
            raise ValueError("A_log must be given with use_gate_in_kernel=True, got None")
        return lower_bound * g.sigmoid()
    rate = A_log.float().exp().view(g.shape[2], *[1] * (g.ndim - 3))
    return -rate * F.softplus(g) if lower_bound is None else lower_bound * (rate * g).sigmoid()


def _linear_attn(q, k, v, scale, initial_state, output_final_state, normalize, cu_seqlens):
    options = {"scale": scale, "cu_seqlens": cu_seqlens, "output_final_state": output_final_state}
    if not normalize:
        return _run(q, k, v, initial_state, **options)
    if isinstance(initial_state, Tensor):  # of the sums alone: k's starts at 0
        z = initial_state.new_zeros(len(initial_state), 1, *initial_state.shape[1:3])
        initial_state = initial_state, z
    if initial_state is not None:
        initial_state = initial_state[0], initial_state[1].squeeze(1)
    o, final = op.linear_attention(q, k, v, initial_state=initial_state, normalize=True, **options)
    return o, None if final is None else (final[0], final[1].unsqueeze(1))


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
    """Linear attention without a decay; a normalised one has states (S, z [N, 1, H, K])."""
    return _linear_attn(q, k, v, scale, initial_state, output_final_state, normalize, cu_seqlens)


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
    _refuse(reverse=reverse)
    return _linear_attn(q, k, v, scale, initial_state, output_final_state, normalize, cu_seqlens)


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
    if g is not None and g_gamma is not None:
        raise ValueError("g_gamma must be None where g is given")
    return _run(
        q, k, v, initial_state, state_v_first, g=g_gamma if g is None else g, scale=scale,
        output_final_state=output_final_state, cu_seqlens=cu_seqlens, chunk_size=_chunk_size(kwargs),
    )  # fmt: skip


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
    _refuse(reverse=reverse)
    return chunk_simple_gla(
        q, k, v, g, g_gamma, scale, initial_state, output_final_state, state_v_first, cu_seqlens, **kwargs
    )


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
    heads = torch.arange(q.shape[2], dtype=torch.float32, device=q.device)
    g_gamma = (1 - 2.0 ** (-5.0 - heads)).log()
    return chunk_simple_gla(
        q, k, v, None, g_gamma, scale, initial_state, output_final_state, False, cu_seqlens, **kwargs
    )


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
    return _run(
        q, k, v, initial_state, state_v_first, g=g, scale=scale, output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
    )  # fmt: skip


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
    _refuse(gv=gv, reverse=reverse)
    return _run(
        q, k, v, initial_state, state_v_first, g=gk, scale=scale, output_final_state=output_final_state,
        cu_seqlens=cu_seqlens, chunk_size=_chunk_size(kwargs),
    )  # fmt: skip


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
    return _run(
        q, k, v, initial_state, False, use_qk_l2norm_in_kernel, beta=beta, scale=scale,
        output_final_state=output_final_state, cu_seqlens=cu_seqlens, chunk_size=_chunk_size(kwargs),
    )  # fmt: skip


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
    beta = torch.ones_like(q[..., 0]) if beta is None else beta
    return chunk_delta_rule(
        q, k, v, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens
    )


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
    _refuse(cp_context=cp_context)
    gate = [kwargs.pop(name, None) for name in ("use_gate_in_kernel", "A_log", "dt_bias")]
    g = _gate(g, *gate)
    return _run(
        q, k, v, initial_state, state_v_first, use_qk_l2norm_in_kernel, g=g, scale=scale,
        beta=_beta(beta, use_beta_sigmoid_in_kernel, allow_neg_eigval), cu_seqlens=cu_seqlens,
        output_final_state=output_final_state, chunk_size=_chunk_size(kwargs),
    )  # fmt: skip


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
    _refuse(gv=gv)
    beta = torch.ones_like(q[..., 0]) if beta is None else beta
    if use_gate_in_kernel and g is None:
        raise ValueError("g must be given with use_gate_in_kernel=True, got None")
    if g is not None:
        g = _gate(g, use_gate_in_kernel, A_log, dt_bias)
        g = g if gk is None else g.unsqueeze(-1) + gk
    return _run(
        q, k, v, initial_state, state_v_first, use_qk_l2norm_in_kernel, g=gk if g is None else g,
        beta=_beta(beta, use_beta_sigmoid_in_kernel, allow_neg_eigval), scale=scale, cu_seqlens=cu_seqlens,
        output_final_state=output_final_state, chunk_size=_chunk_size(kwargs),
    )  # fmt: skip


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
    _refuse(
        cp_context=cp_context,
        return_intermediate_states=return_intermediate_states,
        use_graph=use_graph,
        max_num_seqs=max_num_seqs,
    )
    a_log, dt_bias = kwargs.pop("A_log", None), kwargs.pop("dt_bias", None)
    return _run(
        q, k, v, initial_state, state_v_first, use_qk_l2norm_in_kernel, scale=scale,
        g=_gate(g, use_gate_in_kernel, a_log, dt_bias, lower_bound), cu_seqlens=cu_seqlens,
        beta=_beta(beta, use_beta_sigmoid_in_kernel, allow_neg_eigval),
        output_final_state=output_final_state, chunk_size=_chunk_size(kwargs),
    )  # fmt: skip
