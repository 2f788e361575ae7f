"""Linear attention at its edges: sizes, resets, extreme decays, NaN, carried states, memory."""

import subprocess
import sys

import linear_attention_oracle as oracle
import pytest
import torch
from linear_attention_oracle import BF16, F32, F64, FORM, FORMS, GATED
from suite import ROOT, assert_close, assert_same_bits, bits

import pyops

NAN, INF = float("nan"), float("inf")
forms = pytest.mark.parametrize("form", FORMS, ids=lambda f: f.name)
gated = pytest.mark.parametrize("form", GATED, ids=lambda f: f.name)
delta = pytest.mark.parametrize("form", [f for f in FORMS if f.delta], ids=lambda f: f.name)

SIZES = {"batch": 2, "length": 70, "heads": 2, "key_dim": 8, "values": 4, "value_dim": 6}


def assert_exact(tensors, form, dtype=F32, **options):
    """Results and gradients within the gates."""
    wanted = oracle.exact(tensors, **options)
    for name, result, reference in zip(("o", "state"), oracle.run(tensors, **options), wanted, strict=True):
        if reference.numel() > 0:
            assert_close(result, reference, oracle.gate(form, dtype), f"{form.name} {name}")
    weights = oracle.weights_like(wanted, dtype)
    exact = oracle.exact_gradients(tensors, weights, **options)
    for name, gradient in oracle.gradients(oracle.run, tensors, weights, **options).items():
        if exact[name].norm() > 1e-36:  # below float32's smallest normal number there are fewer digits
            gate = oracle.gradient_gate(name, dtype)
            assert_close(gradient, exact[name], gate, f"{form.name} gradient of {name}")
        else:
            assert gradient.norm() < 1e-36, f"{form.name} gradient of {name}"


# Sizes


@forms
def test_no_tokens(form, poison):
    """T = 0: the state passes through, as a copy, and its gradient back."""
    tensors = oracle.inputs(form, F32, **SIZES | {"length": 0})
    state = tensors["initial_state"].clone().requires_grad_()
    o, final = oracle.run(tensors | {"initial_state": state})
    assert o.shape == (2, 0, 4, 6)
    assert torch.equal(final, state) and final.data_ptr() != state.data_ptr()
    weights = torch.randn_like(final)
    found = oracle.gradients(oracle.run, tensors, [None, weights])
    assert torch.equal(found["initial_state"], weights)
    assert all(found[name].shape == tensors[name].shape for name in tensors)
    del tensors["initial_state"]
    assert not oracle.run(tensors)[1].any()


@forms
def test_one_token_is_a_step(form):
    tensors = oracle.inputs(form, F32, **SIZES | {"length": 1})
    o, final = oracle.run(tensors)
    token = {name: t if name == "initial_state" else t[:, 0] for name, t in tensors.items()}
    stepped = pyops.linear_attention_step(state=token.pop("initial_state"), **token)
    for a, b in zip(stepped, (o[:, 0], final), strict=True):
        assert_close(a, b, oracle.gate(form, F32))


@pytest.mark.parametrize("length", [1, 2, 3, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 200])
@forms
def test_sizes_around_chunks(form, length):
    """The tail of a chunk is neither read nor added; the last decay is that of the last token."""
    assert_exact(oracle.inputs(form, F32, 1, length, 1, 4, value_dim=3), form)


@pytest.mark.parametrize(
    ("key_dim", "value_dim"),
    [
        (1, 1),
        (1, 64),
        (3, 1),
        (60, 3),
        (3, 60),
        (100, 96),
        (96, 100),
        (64, 192),
        (192, 17),
        (256, 64),
        (16, 512),
    ],
)
@forms
def test_sizes_of_heads(form, key_dim, value_dim):
    batch = 8 if key_dim * value_dim < 100 else 1  # the error of few numbers would be that of the unluckiest
    for dtype in (F32, BF16):
        tensors = oracle.inputs(form, dtype, batch, 37, 1, key_dim, 2, value_dim)
        assert_exact(tensors, form, dtype)


@pytest.mark.parametrize("heads", [(1, 6), (2, 6), (3, 6), (6, 6)])
@forms
def test_grouped_heads(form, heads):
    """Value head h has the q and k of head h // (HV // H); g and beta too where they have H heads."""
    few, many = heads
    for gate_heads, beta_heads in ((few, many), (many, few)):
        tensors = oracle.inputs(
            form, F32, 2, 20, few, 5, many, 4, gate_heads=gate_heads, beta_heads=beta_heads
        )
        assert_exact(tensors, form)


@forms
def test_empty_sequences(form):
    """Among others, first and last: the state passes through, bit for bit, and its gradient back."""
    bounds = [0, 0, 30, 30, 30, 70, 70]
    empty = [0, 2, 3, 5]
    sizes = SIZES | {"batch": 1, "sequences": len(bounds) - 1}
    tensors = oracle.inputs(form, F32, **sizes)
    options = {"cu_seqlens": torch.tensor(bounds)}
    assert_exact(tensors, form, **options)
    final = oracle.run(tensors, **options)[1]
    assert_same_bits(final[empty], tensors["initial_state"][empty], "state of an empty sequence")
    weights = torch.randn_like(final)
    found = oracle.gradients(oracle.run, tensors, [None, weights], **options)["initial_state"]
    assert_same_bits(found[empty], weights[empty], "gradient of an empty sequence")


def test_no_keys():
    """K = 0: a sum over nothing."""
    o, state = pyops.linear_attention(
        torch.zeros(1, 3, 2, 0), torch.zeros(1, 3, 2, 0), torch.ones(1, 3, 2, 4), output_final_state=True
    )
    assert not o.any() and state.shape == (1, 2, 0, 4)


# Resets


def reset_at(form, position, dtype=F32, **options):
    """Inputs whose state is dropped before the token at ``position``, in every head and entry."""
    tensors = oracle.inputs(form, dtype, **SIZES, **options)
    tensors["g"][:, position] = -INF
    return tensors


@pytest.mark.parametrize("position", [0, 1, 15, 16, 40, 63, 64, 69])
@gated
def test_reset_is_exact(form, position):
    tensors = reset_at(form, position)
    assert_exact(tensors, form)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("position", [1, 16, 40, 64])
@gated
def test_reset_forgets_bit_for_bit(form, position, dtype):
    """Nothing before the reset reaches what comes after it, not even NaN."""
    tensors = reset_at(form, position, dtype)
    o, final = oracle.run(tensors)
    for value in (3.0, NAN, INF):
        changed = {name: t.clone() for name, t in tensors.items()}
        for name in ("q", "k", "v"):
            changed[name][:, position - 1] = value
        changed["initial_state"][:] = value
        other, other_final = oracle.run(changed)
        if value == 3.0:
            assert_same_bits(other[:, position:], o[:, position:], "o after a reset")
            assert_same_bits(other_final, final, "state after a reset")
        else:
            assert_close(other[:, position:], o[:, position:], oracle.gate(form, dtype), f"o after {value}")
            assert_close(other_final, final, oracle.gate(form, dtype), f"state after {value}")


@gated
def test_reset_of_every_token(form):
    """Then only the token itself is left."""
    tensors = oracle.inputs(form, F32, **SIZES, resets=1.0)
    assert_exact(tensors, form)
    found = oracle.gradients(oracle.run, tensors, [torch.ones(2, 70, 4, 6), torch.ones(2, 4, 8, 6)])
    assert not found["g"].any() and not found["initial_state"].any()


@pytest.mark.parametrize("chunk_size", [None, 16])
@gated
def test_resets_at_random(form, chunk_size):
    """Gradients are finite, and that of g is 0 at each reset."""
    tensors = oracle.inputs(form, F32, **SIZES, resets=0.1)
    assert_exact(tensors, form)
    weights = [torch.ones(2, 70, 4, 6), torch.ones(2, 4, 8, 6)]
    found = oracle.gradients(oracle.run, tensors, weights, chunk_size=chunk_size)
    assert all(t.isfinite().all() for t in found.values())
    assert not found["g"][tensors["g"] == -INF].any()


def test_reset_of_one_entry_of_k():
    """A vector decay drops the rows of the state that it names and keeps the others, NaN or not."""
    for name in ("vector", "kda"):
        tensors = oracle.inputs(FORM[name], F32, **SIZES)
        tensors["g"][:, 20, :, 3] = -INF
        assert_exact(tensors, FORM[name])
    tensors = oracle.inputs(FORM["vector"], F32, **SIZES)
    tensors["g"][:, 20, :, 3] = -INF
    good = oracle.run(tensors)
    tensors["k"][:, 19, :, 3] = NAN  # reaches row 3 alone, which the reset drops
    o, final = oracle.run(tensors)
    assert_close(o[:, 20:], good[0][:, 20:], oracle.gate(FORM["vector"], F32))
    assert_close(final, good[1], oracle.gate(FORM["vector"], F32))


# Decays


@gated
def test_zero_decay_is_none(form):
    """g = 0 equals no g."""
    tensors = oracle.inputs(form, F32, **SIZES)
    tensors["g"] = torch.zeros_like(tensors["g"])
    without = {name: t for name, t in tensors.items() if name != "g"}
    for result, wanted in zip(oracle.run(tensors), oracle.run(without), strict=True):
        assert_close(result, wanted, oracle.gate(form, F32))
    assert_exact(tensors, form)


@pytest.mark.parametrize("decay", [1.0, 20.0, 90.0, 1e3, 1e5])
@gated
def test_strong_decay(form, decay):
    """Decays far beyond exp's range underflow to 0, and cost no digits of the weak ones beside them."""
    tensors = oracle.inputs(form, F32, **SIZES)
    strong = torch.rand(tensors["g"].shape) < 0.2
    tensors["g"] = torch.where(strong, -decay * torch.rand(strong.shape), tensors["g"])
    assert_exact(tensors, form)


@gated
def test_weak_decay_after_a_huge_one(form):
    """One token with g = -1e5: the sum of g from there on would have no digits left for -0.01."""
    tensors = oracle.inputs(form, F32, **SIZES, decay=0.01)
    tensors["g"][:, 3] = -1e5
    assert_exact(tensors, form)


@pytest.mark.parametrize("value", [-87.0, -100.0, -104.0, -1e30, -3e38])
@gated
def test_constant_strong_decay(form, value):
    """Around and beyond float32's smallest exponential, in every token."""
    tensors = oracle.inputs(form, F32, **SIZES)
    tensors["g"].fill_(value)
    assert_exact(tensors, form)


@gated
def test_growth(form):
    """g > 0 is allowed."""
    tensors = oracle.inputs(form, F32, **SIZES)
    tensors["g"] = 0.1 * torch.randn(tensors["g"].shape)
    assert_exact(tensors, form)


@gated
def test_growth_overflows_to_infinity_alone_in_its_head(form):
    tensors = oracle.inputs(form, F32, **SIZES)
    good = oracle.run(tensors)
    tensors["g"][0, :, 0] = 30.0
    o, final = oracle.run(tensors)
    assert not final[0, 0].isfinite().all()
    assert_same_bits(o[:, :, 1:], good[0][:, :, 1:], "other heads")
    assert_same_bits(final[1], good[1][1], "another entry")


# Values with a meaning of their own


@pytest.mark.parametrize("scale", [0.0, -0.7, 2, 1e-30])
@forms
def test_scale(form, scale):
    assert_exact(oracle.inputs(form, F32, **SIZES), form, scale=scale) if scale else None
    o, state = oracle.run(oracle.inputs(form, F32, **SIZES), scale=scale)
    assert state.any() and (o.any() or scale == 0)
    assert not o.any() or scale != 0


@delta
def test_rows_that_write_nothing(form):
    """beta = 0 and k = 0 leave the (decayed) state as it is."""
    tensors = oracle.inputs(form, F32, **SIZES)
    tensors["beta"][:, ::3] = 0
    tensors["k"][:, ::5] = 0
    assert_exact(tensors, form)
    tensors["beta"].zero_()
    tensors.pop("g", None)
    assert_same_bits(oracle.run(tensors)[1], tensors["initial_state"], "state after beta = 0")


@delta
def test_beta_up_to_two(form):
    """Reflections, which negative eigenvalues need."""
    tensors = oracle.inputs(form, F32, **SIZES)
    tensors["beta"] = 2 * tensors["beta"]
    assert_exact(tensors, form)


@pytest.mark.parametrize("magnitude", [1e-30, 1e-10, 1e10])
@forms
def test_huge_and_tiny_values(form, magnitude):
    """The recurrence is linear in v and the state: their scale is of no consequence."""
    tensors = oracle.inputs(form, F32, **SIZES)
    tensors["v"] = tensors["v"] * magnitude
    tensors["initial_state"] = tensors["initial_state"] * magnitude
    assert_exact(tensors, form)


# Memory and states


@forms
def test_state_shares_no_memory_and_is_not_written(form):
    """A carried state may be overwritten in place: it was not saved; the one that was is guarded by torch."""
    tensors = oracle.inputs(form, F32, **SIZES)
    state = tensors["initial_state"]
    before, version = state.clone(), state._version
    leaves = {name: t.clone().requires_grad_() for name, t in tensors.items()}
    o, final = oracle.run(leaves | {"initial_state": state})
    assert_same_bits(state, before, "initial state") and state._version == version
    wanted = torch.autograd.grad(o.sum(), leaves["v"], retain_graph=True)
    final.detach().zero_()
    assert_same_bits(torch.autograd.grad(o.sum(), leaves["v"], retain_graph=True), wanted, "gradient")
    state.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(o.sum(), leaves["v"])


@forms
def test_second_derivative_raises_through_the_state(form):
    tensors = {name: t.requires_grad_() for name, t in oracle.inputs(form, F64, 1, 5, 1, 3).items()}
    state = oracle.run(tensors)[1]
    (first,) = torch.autograd.grad(state.square().sum(), tensors["v"], create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(first.sum(), tensors["k"])


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacrev, torch.func.jacfwd])
def test_func_transforms_that_differentiate_raise(transform):
    """And return no zeros."""
    tensors = oracle.inputs(FORM["scalar"], F32, 1, 3, 1, 2)
    with pytest.raises(RuntimeError):
        transform(lambda q: oracle.run(tensors | {"q": q})[0].sum())(tensors["q"])


def test_vmap_refuses_cu_seqlens():
    q = torch.randn(3, 1, 4, 1, 2)
    with pytest.raises(RuntimeError, match="cu_seqlens must be None"):
        torch.vmap(lambda t: pyops.linear_attention(t, t, t, cu_seqlens=torch.tensor([0, 4]))[0])(q)


def test_vmap_over_some_inputs():
    """An input without the vmapped dimension is shared, and its gradient summed."""
    tensors = oracle.inputs(FORM["gated_delta"], F64, **SIZES)
    g = torch.stack([tensors["g"], 2 * tensors["g"], tensors["g"] - 1])

    def call(g, k):
        return oracle.run(tensors | {"g": g, "k": k})

    o, final = torch.vmap(call, in_dims=(0, None))(g, tensors["k"])
    for i in range(3):
        wanted = call(g[i], tensors["k"])
        assert_close(o[i], wanted[0], 1e-12)
        assert_close(final[i], wanted[1], 1e-12)
    k = tensors["k"].clone().requires_grad_()
    (together,) = torch.autograd.grad(torch.vmap(call, in_dims=(0, None))(g, k)[0].sum(), k)
    (one_by_one,) = torch.autograd.grad(sum(call(g[i], k)[0].sum() for i in range(3)), k)
    assert_close(together, one_by_one, 1e-12)


@forms
def test_backward_is_the_same_in_every_run(form):
    """For any number of threads, and each problem alone as within its batch."""
    tensors = oracle.inputs(form, F32, **SIZES)
    weights = oracle.weights_like(oracle.exact(tensors), F32)
    wanted = oracle.gradients(oracle.run, tensors, weights)
    for threads in (1, 2, 2, 1):
        torch.set_num_threads(threads)
        found = oracle.gradients(oracle.run, tensors, weights)
        for name in form.names:
            assert_same_bits(found[name], wanted[name], f"{threads} threads, gradient of {name}")
    alone = oracle.gradients(oracle.run, {n: t[1:] for n, t in tensors.items()}, [w[1:] for w in weights])
    for name in form.names:
        assert_same_bits(alone[name], wanted[name][1:], f"a problem alone, gradient of {name}")


MEMORY = """
import resource, torch, pyops
torch.set_num_threads(2)
T, H, K = 131072, {heads}, 64
kinds = [(1, T, H, K)] * 3 + [(1, T, H)]
q, k, v, g = (torch.randn(s).requires_grad_() for s in kinds)
with torch.no_grad():
    g.abs_().neg_().mul_(0.1)
grad = torch.ones(1, T, H, K)

def step(n):
    o, s = pyops.linear_attention(q[:, :n], k[:, :n], v[:, :n], g=g[:, :n], output_final_state=True)
    torch.autograd.backward([o, s], [grad[:, :n], torch.ones_like(s)])
    return o

step(256)
q.grad = k.grad = v.grad = g.grad = None
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
o = step(T)
extra = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak
made = sum(t.numel() * 4 for t in (q, k, v, g, o))
print(extra * 1024, made)
"""


@pytest.mark.slow
@pytest.mark.skipif(
    not pyops.which("linear_attention_backward", torch.zeros(1), torch.zeros(1), torch.zeros(1)).startswith(
        "cpu"
    ),
    reason="the reference keeps every chunk's state in float32; the promise is the kernel's",
)
def test_memory_at_131072_tokens():
    """Forward and backward: beyond the inputs, their gradients and o at most 200 MB and a fifth of all."""
    code = MEMORY.format(heads=4)
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stderr
    extra, made = map(int, run.stdout.split())
    inputs = made * 4 // 5
    assert extra <= made + 0.2 * (made + inputs) + 200e6, f"{extra / 1e6:.0f} MB over {made / 1e6:.0f} MB"


def test_autocast_keeps_g_and_the_state():
    """Autocast lowers nothing: a bfloat16 state would show."""
    for form in FORMS:
        tensors = oracle.inputs(form, F32, **SIZES)
        wanted = oracle.run(tensors)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = oracle.run(tensors)
        assert_same_bits(found, wanted, f"{form.name} under autocast")
        assert bits(found[1]).shape == bits(wanted[1]).shape
