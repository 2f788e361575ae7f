"""Every form of linear attention in every dtype against the float64 recurrence: results and gradients."""

import linear_attention_oracle as oracle
import pytest
import torch
from linear_attention_oracle import BF16, F16, F32, F64, FORM, FORMS
from suite import ALL_DTYPES, assert_close, assert_same_bits, relative_error

import pyops

forms = pytest.mark.parametrize("form", FORMS, ids=lambda f: f.name)
dtypes = pytest.mark.parametrize("dtype", ALL_DTYPES, ids=lambda d: str(d).removeprefix("torch."))
low = pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=lambda d: str(d).removeprefix("torch."))

# Two value heads per head, gates and betas per value head or per head; 70 tokens end inside a chunk of 64.
SIZES = {"batch": 2, "length": 70, "heads": 2, "key_dim": 12, "values": 4, "value_dim": 10}
BOUNDS = [0, 0, 33, 34, 34, 98, 130]  # empty, and of one token


def spaced(t):
    """The same values with steps between the elements of every dimension."""
    steps = tuple(slice(None, None, 2) for _ in t.shape)
    return t.new_full([2 * n for n in t.shape], 7.0)[steps].copy_(t)


def setting(form, dtype, layout):
    """(inputs, options) of one cell of the table of forms, dtypes and layouts."""
    heads = {"gate_heads": 2 if form.delta else 4, "beta_heads": 4 if form.gate == "vector" else 2}
    if layout == "varlen":
        sizes = SIZES | {"batch": 1, "length": BOUNDS[-1], "sequences": len(BOUNDS) - 1}
        return oracle.inputs(form, dtype, **sizes, **heads), {"cu_seqlens": torch.tensor(BOUNDS)}
    tensors = oracle.inputs(form, dtype, **SIZES, **heads)
    if layout == "no initial state":
        del tensors["initial_state"]
    if layout == "strided":
        tensors = {name: spaced(t) for name, t in tensors.items()}
    if layout == "same dtype":
        tensors = {name: t.to(dtype) for name, t in tensors.items()}
    return tensors, {}


@pytest.mark.parametrize("layout", ["state", "no initial state", "varlen", "strided", "same dtype"])
@dtypes
@forms
def test_form(form, dtype, layout, poison):
    tensors, options = setting(form, dtype, layout)
    results, wanted = oracle.run(tensors, **options), oracle.exact(tensors, **options)
    assert [r.dtype for r in results] == [dtype, F64 if dtype == F64 else F32]
    for name, result, reference in zip(("o", "final state"), results, wanted, strict=True):
        assert result.is_contiguous()
        oracle.assert_within(result, reference, oracle.gate(form, dtype), f"{form.name} {name}")
    weights = oracle.weights_like(wanted, dtype)
    found = oracle.gradients(oracle.run, tensors, weights, **options)
    exact = oracle.exact_gradients(tensors, weights, **options)
    for name, gradient in found.items():
        assert gradient.dtype == tensors[name].dtype
        gate = oracle.gradient_gate(name, dtype)
        oracle.assert_within(gradient, exact[name], gate, f"{form.name} gradient of {name}")


@low
@forms
def test_no_worse_than_the_naive_loop(form, dtype):
    """The loop in the same dtype, state and all, is what chunks replace: they may err twice as much."""
    tensors = oracle.inputs(form, dtype, 1, 300, 2, 16, value_dim=16, wide=dtype)
    naive, wanted = oracle.recurrent(**tensors), oracle.exact(tensors)
    for result, loop, reference in zip(oracle.run(tensors), naive, wanted, strict=True):
        assert_close(result, reference, oracle.NAIVE * relative_error(loop, reference))


@forms
def test_gradients_no_worse_than_those_of_the_naive_loop(form):
    tensors = oracle.inputs(form, F32, 1, 300, 2, 16, value_dim=16)
    weights = oracle.weights_like(oracle.exact(tensors), F32)
    found = oracle.gradients(oracle.run, tensors, weights)
    naive = oracle.gradients(lambda t: oracle.recurrent(**t), tensors, weights)
    exact = oracle.exact_gradients(tensors, weights)
    for name, gradient in found.items():
        bound = oracle.NAIVE_GRADIENT * relative_error(naive[name], exact[name])
        assert_close(gradient, exact[name], bound, f"error of the gradient of {name}")


def few_heads(form, dtype, **options):
    """One head and more tokens than threads can share out by heads: a kernel may cut the sequence."""
    torch.set_num_threads(4)
    return oracle.inputs(form, dtype, 1, 1100, 1, 8, value_dim=6, sequences=2, **options), {
        "cu_seqlens": torch.tensor([0, 0, 1100])
    }


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["float32", "bfloat16"])
@forms
def test_few_heads_and_many_tokens(form, dtype):
    tensors, options = few_heads(form, dtype, decay=0.005, resets=0.001)
    results, wanted = oracle.run(tensors, **options), oracle.exact(tensors, **options)
    assert_same_bits(oracle.run(tensors, **options), results, "another run")
    for name, result, reference in zip(("o", "final state"), results, wanted, strict=True):
        oracle.assert_within(result, reference, oracle.gate(form, dtype), f"{form.name} {name}")
    weights = oracle.weights_like(wanted, dtype)
    found = oracle.gradients(oracle.run, tensors, weights, **options)
    exact = oracle.exact_gradients(tensors, weights, **options)
    for name, gradient in found.items():
        gate = oracle.gradient_gate(name, dtype)
        oracle.assert_within(gradient, exact[name], gate, f"{form.name} gradient of {name}")


@forms
def test_few_heads_contain_nan_and_drop_it_at_a_reset(form):
    tensors, options = few_heads(form, F32)
    good = oracle.run(tensors, **options)
    tensors["k"][:, 300] = torch.nan
    o, final = oracle.run(tensors, **options)
    assert_close(o[:, :300], good[0][:, :300], oracle.gate(form, F32))
    assert o[:, 300:].isnan().all() and final[1].isnan().all() and final[0].isfinite().all()
    if form.gate:
        tensors["g"][:, 700] = -torch.inf
        after = {name: t if name == "initial_state" else t[:, 700:] for name, t in tensors.items()}
        o, final = oracle.run(tensors, **options)
        wanted = oracle.exact(after, cu_seqlens=torch.tensor([0, 0, 400]))
        assert_close(o[:, 700:], wanted[0], oracle.gate(form, F32))
        assert_close(final, wanted[1], oracle.gate(form, F32))


@pytest.mark.slow
@dtypes
@forms
def test_form_at_training_size(form, dtype):
    """The shape that the gates were measured at."""
    tensors = oracle.inputs(form, dtype, 1, 2048, 16, 64, value_dim=64)
    wanted = oracle.exact(tensors)
    for name, result, reference in zip(("o", "final state"), oracle.run(tensors), wanted, strict=True):
        oracle.assert_within(result, reference, oracle.gate(form, dtype), f"{form.name} {name}")
    weights = oracle.weights_like(wanted, dtype)
    found = oracle.gradients(oracle.run, tensors, weights)
    exact = oracle.exact_gradients(tensors, weights)
    for name, gradient in found.items():
        gate = oracle.gradient_gate(name, dtype)
        oracle.assert_within(gradient, exact[name], gate, f"{form.name} gradient of {name}")


# Gradients of one input through one output


@pytest.mark.parametrize("through", ["o", "final state"])
@forms
def test_gradcheck_of_each_input_alone(form, through):
    """Of one input that requires a gradient, through one output; the other output is not used."""
    tensors = oracle.inputs(form, F64, 1, 9, 1, 3, 2, 2)
    for name in form.names:
        if (name, through) == ("q", "final state"):
            continue  # the state does not read q

        def call(t, name=name):
            o, state = pyops.linear_attention(
                **(tensors | {name: t}), output_final_state=through == "final state", chunk_size=4
            )
            return o if state is None else state

        assert torch.autograd.gradcheck(call, (tensors[name].clone().requires_grad_(),)), name


@forms
def test_gradient_through_the_final_state_alone(form):
    """As a training step that carries a state takes it: o is not used at all, and q gets zeros."""
    tensors = oracle.inputs(form, F32, **SIZES)
    weights = [None, *oracle.weights_like(oracle.exact(tensors)[1:], F32)]
    found = oracle.gradients(oracle.run, tensors, weights)
    leaves = {name: t.double().requires_grad_() for name, t in tensors.items()}
    state = oracle.exact(leaves)[1]
    used = {name: leaf for name, leaf in leaves.items() if name != "q"}
    exact = torch.autograd.grad(state, list(used.values()), weights[1])
    assert torch.equal(found["q"], torch.zeros_like(found["q"]))
    for name, reference in zip(used, exact, strict=True):
        oracle.assert_within(found[name], reference, oracle.gradient_gate(name, F32), f"gradient of {name}")


@forms
def test_gradient_of_one_input_is_that_of_all(form):
    """Bit for bit, whichever inputs require one."""
    tensors = oracle.inputs(form, F32, **SIZES)
    weights = oracle.weights_like(oracle.exact(tensors), F32)
    together = oracle.gradients(oracle.run, tensors, weights)
    for name, t in tensors.items():
        leaf = t.clone().requires_grad_()
        results = oracle.run(tensors | {name: leaf})
        alone = torch.autograd.grad(
            results, leaf, [w.to(r.dtype) for r, w in zip(results, weights, strict=True)]
        )
        assert_same_bits(alone, together[name], f"gradient of {name}")


@forms
def test_chained_sequences_train_as_one(form):
    """Gradients through the carried state: two calls, the second from the state of the first."""
    tensors = oracle.inputs(form, F64, **SIZES)

    def halves(t):
        parts = [
            {name: x if name == "initial_state" else x[:, cut] for name, x in t.items()}
            for cut in (slice(0, 37), slice(37, None))
        ]
        first, state = oracle.run(parts[0])
        second, state = oracle.run(parts[1] | {"initial_state": state})
        return torch.cat([first, second], 1), state

    weights = oracle.weights_like(oracle.exact(tensors), F64)
    exact = oracle.exact_gradients(tensors, weights)
    for name, gradient in oracle.gradients(halves, tensors, weights).items():
        assert_close(gradient, exact[name], oracle.gradient_gate(name, F64), f"gradient of {name}")


@pytest.mark.parametrize("shared", ["H", "HV"])
@pytest.mark.parametrize("name", ["scalar", "gated_delta"])
def test_constant_decay_per_head(name, shared):
    """g of shape [H] or [HV]: its gradient is summed over batch and tokens."""
    heads = {"H": 2, "HV": 4}[shared]
    tensors = oracle.inputs(FORM[name], F64, **SIZES)
    constant = -torch.rand(heads, dtype=F64)
    weights = oracle.weights_like(oracle.exact(tensors), F64)
    found = oracle.gradients(oracle.run, tensors | {"g": constant}, weights)

    def expanded(t):
        return oracle.exact(t | {"g": t["g"].expand(SIZES["batch"], SIZES["length"], heads)})

    exact = oracle.gradients(expanded, tensors | {"g": constant}, weights)
    for name, gradient in found.items():
        assert_close(gradient, exact[name], oracle.gradient_gate(name, F64), f"gradient of {name}")


@pytest.mark.parametrize("wide", ALL_DTYPES, ids=lambda d: str(d).removeprefix("torch."))
@low
@forms
def test_mixed_dtypes(form, dtype, wide):
    """g, beta and initial_state of any dtype beside q; each gradient in its input's dtype."""
    tensors = oracle.inputs(form, dtype, **SIZES, wide=wide)
    results, wanted = oracle.run(tensors), oracle.exact(tensors)
    assert [r.dtype for r in results] == [dtype, F32]
    for result, reference in zip(results, wanted, strict=True):
        assert_close(result, reference, oracle.gate(form, dtype))
    weights = oracle.weights_like(wanted, dtype)
    exact = oracle.exact_gradients(tensors, weights)
    for name, gradient in oracle.gradients(oracle.run, tensors, weights).items():
        assert gradient.dtype == tensors[name].dtype, name
        narrowest = max(dtype, gradient.dtype, key=lambda d: oracle.gradient_gate(name, d))
        assert_close(gradient, exact[name], oracle.gradient_gate(name, narrowest), f"gradient of {name}")
