"""What the tests of linear attention measure against: the recurrence, token after token, and the gates.

``recurrent`` computes in the dtype of q and has nothing of chunks. In float64 it is the oracle, for gradients
too, by autograd; in a lower dtype it is the naive loop that the relative gate compares with.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from suite import relative_error

import pyops
from pyops.reference import linear_attention as reference

F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16


@dataclass(frozen=True)
class Form:
    """One form of the recurrence: the decay, None, "scalar" or "vector", and whether by the delta rule."""

    name: str
    gate: str | None
    delta: bool

    @property
    def names(self):
        """Its differentiable inputs, in the order of the op's arguments."""
        return ["q", "k", "v", *["g"] * bool(self.gate), *["beta"] * self.delta, "initial_state"]


FORMS = [
    Form("none", None, False),
    Form("scalar", "scalar", False),
    Form("vector", "vector", False),
    Form("delta", None, True),
    Form("gated_delta", "scalar", True),
    Form("kda", "vector", True),
]
FORM = {form.name: form for form in FORMS}
GATED = [form for form in FORMS if form.gate]
DELTA = [form for form in FORMS if form.delta]

# Largest relative error ||x - r|| / ||r|| against the float64 recurrence on the rounded inputs.
FORWARD = {F64: 1e-12, F32: 3e-6, BF16: 4e-3, F16: 1e-3}
FORWARD_DELTA = {**FORWARD, BF16: 6e-3}
GRADIENT = {F64: 1e-12, F32: 1e-5, BF16: 1e-2, F16: 2e-3}
GRADIENT_OF = {"g": {**GRADIENT, F32: 3e-5, BF16: 2e-2}, "beta": {**GRADIENT, BF16: 2e-2}}
WORST_ENTRY = 3  # max |x - r| / max |r| may be this many times the gate
NAIVE = 2  # and the error this many times that of the naive loop in the same dtype
NAIVE_GRADIENT = 4  # a chunk's triangular solve and its transpose round more often than the loop does


def gate(form, dtype):
    """Of o and of the final state."""
    return (FORWARD_DELTA if form.delta else FORWARD)[dtype]


def gradient_gate(name, dtype):
    return GRADIENT_OF.get(name, GRADIENT)[dtype]


def assert_within(result, reference, gate, what):
    """The two gates of a result: in norm, and by its worst entry."""
    error = relative_error(result, reference)
    assert error <= gate, f"{what}: relative error {error:.3g} is above its gate {gate:.3g}"
    worst = ((result.double() - reference).abs().max() / reference.abs().max()).item()
    assert worst <= WORST_ENTRY * gate, f"{what}: worst entry off by {worst:.3g} of the largest"


def bounds_of(cu_seqlens, length):
    return [0, length] if cu_seqlens is None else cu_seqlens.tolist()


def recurrent(q, k, v, g=None, beta=None, initial_state=None, scale=None, cu_seqlens=None):
    """(o, final state) of the recurrence, one token at a time."""
    heads, dtype = v.shape[2], q.dtype
    q, k = (t.repeat_interleave(heads // t.shape[2], 2) for t in (q, k))
    if g is not None:
        g = g.repeat_interleave(heads // g.shape[2], 2).to(dtype)
        g = g[..., None] if g.ndim == 3 else g
    if beta is not None:
        beta = beta.repeat_interleave(heads // beta.shape[2], 2).to(dtype)
    scale = q.shape[3] ** -0.5 if scale is None else scale
    outputs, finals = [], []
    for n, (start, stop) in enumerate(pairwise(bounds_of(cu_seqlens, q.shape[1]))):
        if initial_state is None:
            state = q.new_zeros(q.shape[0], heads, q.shape[3], v.shape[3])
        else:
            state = (initial_state if cu_seqlens is None else initial_state[n : n + 1]).to(dtype)
        for t in range(start, stop):
            if g is not None:
                reset = g[:, t].isneginf()[..., None]
                decay = torch.where(reset, 0, g[:, t, ..., None]).exp()
                state = torch.where(reset, 0, decay * torch.where(reset, 0, state))
            u = v[:, t]
            if beta is not None:
                u = beta[:, t, :, None] * (u - (k[:, t, :, None] @ state)[:, :, 0])
            state = state + k[:, t, ..., None] * u[:, :, None]
            outputs.append(scale * (q[:, t, :, None] @ state)[:, :, 0])
        finals.append(state)
    o = torch.stack(outputs, 1) if outputs else v.new_zeros(v.shape).to(dtype) + 0 * q.sum()
    return o, torch.cat(finals)


def inputs(form, dtype, batch=1, length=40, heads=2, key_dim=8, values=None, value_dim=6, **options):
    """The inputs of a form by name.

    Args:
        values: HV, default ``heads``.
        options: ``gate_heads``, ``beta_heads``, default HV; ``sequences``, N, default ``batch``; ``resets``,
            the share of g that is -inf; ``decay``, the typical -g; ``wide``, the dtype of g, beta and
            initial_state, default float32, or float64 for float64.
    """
    values = values or heads
    wide = options.get("wide") or (F64 if dtype == F64 else F32)
    q, k = torch.randn(2, batch, length, heads, key_dim, dtype=F64)
    if form.delta:  # a contraction needs rows of about 1
        k = torch.nn.functional.normalize(k, dim=-1)
    made = {"q": q.to(dtype), "k": k.to(dtype)}
    made["v"] = torch.randn(batch, length, values, value_dim, dtype=F64).to(dtype)
    if form.gate:
        shape = (batch, length, options.get("gate_heads") or values)
        shape += (key_dim,) if form.gate == "vector" else ()
        g = -options.get("decay", 0.1) * torch.randn(shape, dtype=F64).exp()
        g[torch.rand(shape) < options.get("resets", 0.0)] = -torch.inf
        made["g"] = g.to(wide)
    if form.delta:
        made["beta"] = torch.rand(batch, length, options.get("beta_heads") or values, dtype=F64).to(wide)
    state = torch.randn(options.get("sequences") or batch, values, key_dim, value_dim, dtype=F64)
    made["initial_state"] = state.to(wide)
    return made


def run(tensors, **options):
    """(o, final state) of the public function."""
    return pyops.linear_attention(**tensors, output_final_state=True, **options)


def exact(tensors, **options):
    """(o, final state) of the recurrence in float64 on the same rounded inputs."""
    return recurrent(**{name: t.double() for name, t in tensors.items()}, **options)


def gradients(call, tensors, weights, **options):
    """Gradients, by name, of the weighted sum of o and the final state; weight None leaves an output out."""
    leaves = {name: t.detach().clone().requires_grad_() for name, t in tensors.items()}
    results = call(leaves, **options)
    used = [(r, w.to(r.dtype)) for r, w in zip(results, weights, strict=True) if w is not None]
    found = torch.autograd.grad([r for r, _ in used], list(leaves.values()), [w for _, w in used])
    return dict(zip(leaves, found, strict=True))


def exact_gradients(tensors, weights, **options):
    return gradients(exact, {name: t.double() for name, t in tensors.items()}, weights, **options)


def weights_like(results, dtype):
    """Incoming gradients, representable in dtype."""
    return [torch.randn(r.shape, dtype=F64).to(dtype).double() for r in results]


class _Reference(torch.autograd.Function):
    """The reference on the CPU, which the kernel serves."""

    @staticmethod
    def forward(ctx, *args):
        *tensors, scale, chunk_size = args
        ctx.save_for_backward(*tensors)
        ctx.settings = scale, chunk_size
        return reference.linear_attention(*args)

    @staticmethod
    def backward(ctx, grad_o, grad_state):
        tensors = ctx.saved_tensors
        grads = reference.linear_attention_backward(grad_o, grad_state, *tensors, *ctx.settings)
        given = [None if t is None else grad for t, grad in zip(tensors[:6], grads, strict=True)]
        return *given, None, None, None


# Names of ops, and what a test may put in their place to have the reference.
REFERENCE = {
    "linear_attention": _Reference.apply,
    "linear_attention_step_": reference.linear_attention_step_,
}
