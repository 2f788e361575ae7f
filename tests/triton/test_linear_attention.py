"""The Triton kernels of linear attention against the float64 recurrence, by the interpreter and on a GPU."""

import linear_attention_oracle as oracle
import pytest
import torch
from linear_attention_oracle import BF16, F16, F32, F64, FORM, FORMS, GATED
from pyops.triton_kernels import linear_attention as kernels
from suite import assert_same_bits

NAN, INF = float("nan"), float("inf")
SIZES = {"length": 37, "heads": 1, "values": 2, "key_dim": 8, "value_dim": 6}
forms = pytest.mark.parametrize("form", FORMS, ids=lambda f: f.name)
gated = pytest.mark.parametrize("form", GATED, ids=lambda f: f.name)


def arguments(tensors, cu_seqlens=None, scale=0.3, chunk_size=16):
    names = "q", "k", "v", "g", "beta", "initial_state"
    return *(tensors.get(name) for name in names), cu_seqlens, scale, chunk_size


def launch(run, function, *args):
    """Its result; the inputs must come back as they went, strides included."""
    result, after = run(function, *args)
    for x, y in zip(args, after, strict=True):
        if isinstance(x, torch.Tensor):
            assert x.stride() == y.stride()
            assert_same_bits(x, y, "an input")
    return result


def forward(run, tensors, **options):
    """(o, final state)."""
    o, state = launch(run, kernels.linear_attention, *arguments(tensors, **options))
    assert o.shape == tensors["v"].shape and o.dtype == tensors["q"].dtype and o.is_contiguous()
    assert state.dtype == (F64 if o.dtype == F64 else F32) and state.is_contiguous()
    return o, state


def backward(run, tensors, weights, **options):
    """The gradients by name."""
    found = launch(run, kernels.linear_attention_backward, *weights, *arguments(tensors, **options))
    grads = {}
    for name, value, grad in zip(
        ("q", "k", "v", "g", "beta", "initial_state"), arguments(tensors), found, strict=False
    ):
        if value is None:
            assert grad.shape == (0,) and grad.dtype == F32
        else:
            assert grad.shape == value.shape and grad.dtype == value.dtype and grad.is_contiguous()
            grads[name] = grad
    return grads


def incoming(tensors, results, dtype):
    o, state = oracle.weights_like(results, dtype)
    return o.to(tensors["q"].dtype), state.to(F64 if tensors["q"].dtype == F64 else F32)


def check(run, tensors, form, chunk_size=16, **options):
    """Results and gradients within the gates of the dtype of q."""
    dtype = tensors["q"].dtype
    wanted = oracle.exact(tensors, scale=0.3, **options)
    options["chunk_size"] = chunk_size
    for name, result, reference in zip(("o", "state"), forward(run, tensors, **options), wanted, strict=True):
        oracle.assert_within(result, reference, oracle.gate(form, dtype), f"{form.name} {name}")
    weights = incoming(tensors, wanted, dtype)
    del options["chunk_size"]
    exact = oracle.exact_gradients(tensors, [w.double() for w in weights], scale=0.3, **options)
    for name, grad in backward(run, tensors, weights, chunk_size=chunk_size, **options).items():
        gate = oracle.gradient_gate(name, dtype)
        oracle.assert_within(grad, exact[name], gate, f"{form.name} gradient of {name}")


@pytest.mark.parametrize("dtype", [F64, F32, BF16, F16], ids=lambda d: str(d).removeprefix("torch."))
@forms
def test_against_the_recurrence(run, form, dtype):
    check(run, oracle.inputs(form, dtype, **SIZES), form)


@pytest.mark.parametrize(("name", "chunk_size"), [("kda", 32), ("gated_delta", 64), ("scalar", 0)])
def test_chunk_sizes(run, name, chunk_size):
    """Blocks of 16 rows are put together, and the chunk is cut down to short sequences."""
    tensors = oracle.inputs(FORM[name], F32, **SIZES | {"length": 70, "values": 1})
    check(run, tensors, FORM[name], chunk_size)


@pytest.mark.parametrize(
    ("name", "key_dim", "value_dim"),
    [("scalar", 40, 40), ("vector", 40, 40), ("gated_delta", 40, 70), ("kda", 40, 5), ("none", 1, 1)],
)
def test_several_blocks_of_keys_and_values(run, name, key_dim, value_dim):
    sizes = SIZES | {"length": 19, "values": 1, "key_dim": key_dim, "value_dim": value_dim}
    check(run, oracle.inputs(FORM[name], F32, **sizes), FORM[name])


@forms
def test_sequences_groups_and_strides(run, form):
    """Empty sequences, gates with fewer heads than values, and views of any strides."""
    bounds = torch.tensor([0, 0, 5, 5, 22, 37, 37], dtype=torch.int32)
    sizes = SIZES | {"heads": 2, "values": 4, "gate_heads": 2, "beta_heads": 4, "sequences": 6}
    tensors = oracle.inputs(form, F32, **sizes)
    for name, t in tensors.items():
        wide = torch.full((*t.shape[:-1], 2 * t.shape[-1]), NAN, dtype=t.dtype)
        wide[..., 1::2] = t
        tensors[name] = wide[..., 1::2]
    tensors["v"] = tensors["v"].transpose(1, 3).contiguous().transpose(1, 3)
    check(run, tensors, form, cu_seqlens=bounds)
    empty = [0, 2, 5]
    _, final = forward(run, tensors, cu_seqlens=bounds)
    assert_same_bits(final[empty], tensors["initial_state"][empty], "state of an empty sequence")


@pytest.mark.parametrize(("dtype", "wide"), [(BF16, F16), (F32, F64), (F64, F32)], ids=str)
def test_other_dtypes_of_gates_and_states(run, dtype, wide):
    """An initial state too; an expanded grad_o and g; a batch."""
    form = FORM["kda" if dtype == F32 else "gated_delta"]
    tensors = oracle.inputs(form, dtype, 2, **SIZES | {"length": 18}, wide=wide)
    tensors["g"] = tensors["g"][:, :1].expand(-1, 18, *[-1] * (tensors["g"].ndim - 2))
    o, state = forward(run, tensors)
    weights = torch.ones(1, dtype=dtype).expand(o.shape), torch.zeros(state.shape, dtype=wide)
    exact = oracle.exact_gradients(tensors, [w.double() for w in weights], scale=0.3)
    for name, grad in backward(run, tensors, weights).items():
        gate = oracle.gradient_gate(name, max(dtype, wide, key=lambda d: torch.finfo(d).eps))
        oracle.assert_within(grad, exact[name], gate, name)
    del tensors["initial_state"]
    again = forward(run, tensors)
    for x, y in zip(again, oracle.exact(tensors, scale=0.3), strict=True):
        oracle.assert_within(x, y, oracle.gate(form, dtype), "without a state")


@gated
def test_resets_and_extreme_decays(run, form):
    """-inf drops the state exactly, heavy decays cost no digits of light ones, dg is 0 at a reset."""
    tensors = oracle.inputs(form, F32, **SIZES, resets=0.1)
    tensors["g"][:, ::5] *= 1e3
    tensors["g"][:, 20] = -1e30
    check(run, tensors, form)
    weights = incoming(tensors, oracle.exact(tensors), F32)
    grads = backward(run, tensors, weights)
    assert all(t.isfinite().all() for t in grads.values())
    assert not grads["g"][tensors["g"] == -INF].any()


@forms
def test_nan_reaches_only_what_it_must(run, form):
    """Tokens after its own in its head; of v only its column; nothing behind a reset."""
    clean = oracle.inputs(form, F32, **SIZES)
    if form.gate:
        clean["g"][:, 27] = -INF
    good = forward(run, clean)
    for name, index in {"v": (0, 20, 1, 3), "k": (0, 20, 0, 3), "initial_state": (0, 1, 3, 3)}.items():
        tensors = {key: t.clone() for key, t in clean.items()}
        tensors[name][index] = NAN
        o, final = forward(run, tensors)
        hit = torch.zeros(o.shape, dtype=torch.bool)
        heads = slice(None) if name == "k" else 1
        columns = slice(None) if name == "k" else 3
        hit[0, 0 if name == "initial_state" else 20 : 27 if form.gate else None, heads, columns] = True
        assert o[hit].isnan().all(), f"NaN in {name} is hidden"
        oracle.assert_within(o[~hit], good[0][~hit].double(), 2e-6, f"o beside NaN in {name}")
        hit = torch.zeros(final.shape, dtype=torch.bool)
        hit[0, heads, :, columns] = not form.gate
        if not hit.all():
            oracle.assert_within(final[~hit], good[1][~hit].double(), 2e-6, f"state beside NaN in {name}")


def test_the_same_bits_again_and_in_any_batch(run):
    form = FORM["kda"]
    tensors = oracle.inputs(form, F32, 2, **SIZES)
    o, state = forward(run, tensors)
    alone = forward(run, {name: t[1:] for name, t in tensors.items()})
    assert_same_bits(alone[0][0], o[1], "o")
    assert_same_bits(alone[1][0], state[1], "state")


@pytest.mark.parametrize("dtype", [F64, F32, BF16, F16], ids=lambda d: str(d).removeprefix("torch."))
@forms
def test_step(run, form, dtype):
    """In place, through a view of any strides."""
    tensors = oracle.inputs(form, dtype, 2, length=1, heads=1, values=2, key_dim=20, value_dim=70)
    wide = F64 if dtype == F64 else F32
    want_o, want_state = oracle.exact(tensors, scale=0.3)
    token = {name: t[:, 0] for name, t in tensors.items() if name != "initial_state"}
    state = tensors["initial_state"].to(wide).mT.contiguous().mT
    args = *(token.get(name) for name in ("q", "k", "v", "g", "beta")), state, 0.3
    o, after = run(kernels.linear_attention_step_, *args)
    assert o.dtype == dtype and o.shape == token["v"].shape
    oracle.assert_within(o, want_o[:, 0], oracle.gate(form, dtype), "o")
    oracle.assert_within(after[5], want_state, oracle.gate(form, F32), "state")


def test_nothing_to_do(run):
    form = FORM["kda"]
    for length, key_dim in ((0, 8), (3, 0)):
        tensors = oracle.inputs(form, F32, **SIZES | {"length": length, "key_dim": key_dim})
        o, state = forward(run, tensors)
        assert not o.any()
        assert_same_bits(state, tensors["initial_state"], "state")
        grads = backward(run, tensors, (torch.ones_like(o), state))
        assert_same_bits(grads.pop("initial_state"), state, "gradient of the state")
        assert not any(grad.any() for grad in grads.values())


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ([1, 37], "cu_seqlens must start at 0, got 1"),
        ([0, 9, 5, 37], r"cu_seqlens must never decrease, got cu_seqlens\[2\] = 5 after 9"),
        ([0, 5, 36], "cu_seqlens must end at the number of tokens 37, got 36"),
    ],
)
def test_wrong_bounds(run, bounds, message):
    tensors = oracle.inputs(FORM["none"], F32, **SIZES | {"sequences": len(bounds) - 1})
    with pytest.raises(ValueError, match=message):
        run(kernels.linear_attention, *arguments(tensors, torch.tensor(bounds)))
