"""The algebra of linear attention: what must not change its result, and how the result must change."""

import itertools

import linear_attention_oracle as oracle
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from linear_attention_oracle import F32, F64, FORM, FORMS
from suite import assert_close, assert_same_bits

import pyops

few = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
form_names = st.sampled_from([form.name for form in FORMS])
gated_names = st.sampled_from(["scalar", "vector", "gated_delta", "kda"])
lengths = st.integers(1, 90)
EXACT = 1e-12  # two ways to the same float64 number
INPUTS = ("q", "k", "v", "g", "beta")


def problem(name, length, seed=0, dtype=F64, resets=0.02, **sizes):
    torch.manual_seed(seed)
    form = FORM[name]
    sizes = {"batch": 2, "heads": 2, "key_dim": 5, "values": 4, "value_dim": 4, "gate_heads": 2} | sizes
    return oracle.inputs(form, dtype, length=length, resets=resets, beta_heads=2, **sizes)


def cut(tensors, start, stop, state):
    """The tokens start to stop, from a state."""
    part = {key: t[:, start:stop] for key, t in tensors.items() if key in INPUTS}
    return part | {"initial_state": state}


def assert_equal(results, wanted, what):
    for result, reference in zip(results, wanted, strict=True):
        if reference.numel() > 0:
            assert_close(result, reference, EXACT, what)


@few
@given(form_names, lengths, st.integers(0, 8), st.integers(0, 99))
def test_chunk_size_is_of_no_consequence(name, length, power, seed):
    tensors = problem(name, length, seed)
    assert_equal(oracle.run(tensors, chunk_size=2**power), oracle.run(tensors), f"chunks of {2**power}")


@few
@given(form_names, st.integers(2, 70), st.integers(0, 99))
def test_chunk_size_is_of_no_consequence_for_gradients(name, length, seed):
    tensors = problem(name, length, seed)
    weights = oracle.weights_like(oracle.run(tensors), F64)
    found = [
        oracle.gradients(oracle.run, tensors, weights, chunk_size=size) for size in (None, 1, 16, 32, 256)
    ]
    for other, key in itertools.product(found[1:], tensors):
        if found[0][key].any():
            assert_close(other[key], found[0][key], EXACT, f"gradient of {key}")


@few
@given(form_names, lengths, st.data())
def test_split_anywhere(name, length, data):
    """[0:a] and then [a:T] from its state is [0:T]; for bfloat16 states too, since they stay float32."""
    tensors = problem(name, length)
    at = data.draw(st.integers(0, length))
    first, state = oracle.run(cut(tensors, 0, at, tensors["initial_state"]))
    second, state = oracle.run(cut(tensors, at, length, state))
    assert_equal((torch.cat([first, second], 1), state), oracle.run(tensors), f"split at {at} of {length}")


@few
@given(
    form_names,
    st.lists(st.integers(0, 40), min_size=1, max_size=5),
    st.sampled_from([torch.int32, torch.int64]),
)
def test_packed_sequences_are_sequences(name, sizes, dtype):
    """Results and gradients."""
    bounds = [0, *itertools.accumulate(sizes)]
    tensors = problem(name, bounds[-1], batch=1, sequences=len(sizes))
    weights = oracle.weights_like(oracle.run(tensors, cu_seqlens=torch.tensor(bounds)), F64)

    def one_by_one(t):
        parts = [
            oracle.run(cut(t, a, b, t["initial_state"][n : n + 1]))
            for n, (a, b) in enumerate(itertools.pairwise(bounds))
        ]
        return torch.cat([o for o, _ in parts], 1), torch.cat([s for _, s in parts])

    cu_seqlens = torch.tensor(bounds, dtype=dtype)
    packed = oracle.run(tensors, cu_seqlens=cu_seqlens)
    assert_equal(packed, one_by_one(tensors), f"packed {sizes}")
    found = oracle.gradients(oracle.run, tensors, weights, cu_seqlens=cu_seqlens)
    wanted = oracle.gradients(one_by_one, tensors, weights)
    for key, gradient in found.items():
        if wanted[key].any():
            assert_close(gradient, wanted[key], EXACT, f"gradient of {key}")


@few
@given(form_names, st.integers(1, 40), st.booleans())
def test_steps_are_a_sequence(name, length, inplace):
    tensors = problem(name, length)
    state = tensors["initial_state"].clone()
    outputs = []
    for t in range(length):
        token = {key: x[:, t] for key, x in tensors.items() if key in INPUTS}
        o, state = pyops.linear_attention_step(**token, state=state, inplace=inplace)
        outputs.append(o)
    assert_equal((torch.stack(outputs, 1), state), oracle.run(tensors), "steps")


@few
@given(form_names, lengths, st.permutations(range(2)), st.permutations(range(3)))
def test_order_of_heads_and_batch(name, length, heads, batch):
    """Bit for bit: what is computed for a head does not depend on its place."""
    tensors = problem(name, length, dtype=F32, batch=3, values=2)
    o, final = oracle.run(tensors)
    moved = {
        key: t[batch][:, heads] if key == "initial_state" else t[batch][:, :, heads]
        for key, t in tensors.items()
    }
    found = oracle.run(moved)
    assert_same_bits(found, (o[batch][:, :, heads], final[batch][:, heads]), "permuted")


@few
@given(form_names, lengths)
def test_grouped_heads_are_repeated_heads(name, length):
    tensors = problem(name, length)
    repeated = {
        key: t if key in ("v", "initial_state") else t.repeat_interleave(4 // t.shape[2], 2)
        for key, t in tensors.items()
    }
    assert_equal(oracle.run(tensors), oracle.run(repeated), "repeated heads")


@few
@given(form_names, lengths, st.floats(-4, 4).filter(lambda x: abs(x) > 1e-3))
def test_scale_is_a_factor_of_o_and_of_q(name, length, factor):
    tensors = problem(name, length)
    o, final = oracle.run(tensors, scale=0.3)
    assert_equal(oracle.run(tensors, scale=0.3 * factor), (factor * o, final), "scale")
    scaled = tensors | {"q": factor * tensors["q"]}
    assert_equal(oracle.run(scaled, scale=0.3), (factor * o, final), "q")


@few
@given(form_names, lengths, st.floats(-3, 3), st.floats(-3, 3).filter(lambda x: abs(x) > 0.1))
def test_linear_in_v_and_the_state(name, length, a, b):
    tensors, other = problem(name, length), problem(name, length, seed=1)
    mixed = {key: a * tensors[key] + b * other[key] for key in ("v", "initial_state")}
    first, second = (oracle.run(tensors | {key: t[key] for key in mixed}) for t in (tensors, other))
    wanted = [a * x + b * y for x, y in zip(first, second, strict=True)]
    for result, reference in zip(oracle.run(tensors | mixed), wanted, strict=True):
        assert_close(result, reference, 10 * EXACT, "linear combination")


@few
@given(form_names, lengths, st.integers(1, 40))
def test_leading_tokens_that_write_nothing(name, length, shift):
    """A later start changes nothing: tokens with v = 0, k = 0 and no decay before the first one."""
    tensors = problem(name, length)
    padded = {
        key: torch.cat([torch.zeros(2, shift, *t.shape[2:], dtype=F64), t], 1)
        for key, t in tensors.items()
        if key in INPUTS
    }
    padded["initial_state"] = tensors["initial_state"]
    padded["q"][:, :shift] = 1.0
    o, final = oracle.run(padded)
    assert_equal((o[:, shift:], final), oracle.run(tensors), f"shift by {shift}")


@few
@given(form_names, st.integers(2, 60), st.data())
def test_causal(name, length, data):
    """Bit for bit: later tokens do not reach earlier ones."""
    tensors = problem(name, length, dtype=F32)
    at = data.draw(st.integers(1, length - 1))
    changed = {key: t.clone() for key, t in tensors.items()}
    for key in changed.keys() & set(INPUTS):
        changed[key][:, at:] *= 0.5
    o, other = oracle.run(tensors)[0], oracle.run(changed)[0]
    assert_same_bits(o[:, :at], other[:, :at], f"tokens before {at}")
    assert not torch.equal(o[:, at:], other[:, at:])


@few
@given(gated_names, lengths, st.integers(0, 9))
def test_equal_decays_are_one(name, length, seed):
    """A vector decay with equal entries is the scalar decay; 0 is none."""
    tensors = problem({"vector": "scalar", "kda": "gated_delta"}.get(name, name), length, seed)
    vector = tensors | {"g": tensors["g"][..., None].expand(*tensors["g"].shape, 5)}
    assert_equal(oracle.run(vector), oracle.run(tensors), "equal decays")
    none = {key: t for key, t in tensors.items() if key != "g"}
    for g in (torch.zeros_like(tensors["g"]), torch.zeros_like(vector["g"])):
        assert_equal(oracle.run(none | {"g": g}), oracle.run(none), "no decay")


@few
@given(st.sampled_from(["none", "scalar", "vector"]), lengths, st.integers(0, 9))
def test_rotation_of_values(name, length, seed):
    """Columns of v are independent: any mixture of them mixes those of o and of the state."""
    tensors = problem(name, length, seed)
    mix = torch.randn(4, 7, dtype=F64)
    o, final = oracle.run(tensors)
    mixed = tensors | {key: tensors[key] @ mix for key in ("v", "initial_state")}
    for result, reference in zip(oracle.run(mixed), (o @ mix, final @ mix), strict=True):
        assert_close(result, reference, 10 * EXACT, "mixed columns")


@few
@given(st.sampled_from(["none", "scalar", "delta", "gated_delta"]), lengths, st.integers(0, 9))
def test_rotation_of_keys(name, length, seed):
    """q and k turned together leave o as it is, without a decay per entry, and turn the state."""
    tensors = problem(name, length, seed)
    turn = torch.linalg.qr(torch.randn(5, 5, dtype=F64))[0]
    turned = tensors | {key: tensors[key] @ turn for key in ("q", "k")}
    turned["initial_state"] = turn.mT @ tensors["initial_state"]
    o, final = oracle.run(tensors)
    for result, reference in zip(oracle.run(turned), (o, turn.mT @ final), strict=True):
        assert_close(result, reference, 10 * EXACT, "turned keys")


@few
@given(lengths, st.integers(0, 9))
def test_normalized_is_an_average(length, seed):
    """With positive q and k, o is a weighted mean of v: constant v gives itself, and bounds hold."""
    tensors = problem("scalar", length, seed)
    del tensors["initial_state"]
    tensors |= {key: tensors[key].abs() + 0.01 for key in ("q", "k")}
    o, _ = pyops.linear_attention(**tensors, normalize=True)
    v = tensors["v"]
    assert (o <= v.cummax(1).values + 1e-6).all() and (o >= v.cummin(1).values - 1e-6).all()
    ones = pyops.linear_attention(**tensors | {"v": torch.ones_like(v)}, normalize=True)[0]
    assert_close(ones, torch.ones_like(ones), 1e-6)


def test_normalized_in_float16_beyond_its_range():
    """Sums over T above 65504: the quotient is a mean of v all the same."""
    q = torch.full((1, 400, 1, 64), 8.0, dtype=torch.float16)
    v = torch.randn(1, 400, 1, 4).half()
    o, (s, z) = pyops.linear_attention(q, q, v, normalize=True, output_final_state=True)
    assert o.dtype == torch.float16 and s.dtype == z.dtype == torch.float32
    mean = v.double().cumsum(1) / torch.arange(1, 401)[:, None, None]
    assert_close(o, mean, 1e-3)


def test_normalized_carries_its_state():
    tensors = problem("scalar", 50)
    del tensors["initial_state"]
    tensors |= {key: tensors[key].abs() for key in ("q", "k")}
    options = {"normalize": True, "output_final_state": True}
    o, (s, z) = pyops.linear_attention(**tensors, **options)
    first, state = pyops.linear_attention(**{key: t[:, :20] for key, t in tensors.items()}, **options)
    rest = {key: t[:, 20:] for key, t in tensors.items()}
    second, state = pyops.linear_attention(**rest, initial_state=state, **options)
    assert_equal((torch.cat([first, second], 1), *state), (o, s, z), "two parts")
    assert z.shape == (2, 4, 5) and z.is_contiguous() and s.is_contiguous()


@torch.no_grad()
def wide_delta(gate, values, heads, dtype=torch.float64):
    """A delta rule with one key head, whose value channels are what threads can share."""
    generator = torch.Generator().manual_seed(values)
    q, k = torch.randn(2, 1, 75, 1, 40, generator=generator, dtype=dtype)
    v, beta = (
        torch.randn(1, 75, heads, values, generator=generator, dtype=dtype),
        torch.rand(1, 75, heads, generator=generator, dtype=dtype),
    )
    g = -torch.rand(1, 75, heads, *([40] if gate == "vector" else []), generator=generator, dtype=dtype)
    state = torch.randn(1, heads, 40, values, generator=generator, dtype=dtype)
    inputs = {"q": q, "k": torch.nn.functional.normalize(k, dim=-1), "v": v, "beta": beta}
    return inputs | {"initial_state": state} | ({} if gate is None else {"g": g})


def test_threads_share_value_channels():
    before = torch.get_num_threads()
    try:
        for gate, values, heads in itertools.product((None, "scalar", "vector"), (64, 65, 130), (1, 2)):
            results = []
            for threads in (1, 2, 4):
                torch.set_num_threads(threads)
                inputs = {
                    name: t.clone().requires_grad_() for name, t in wide_delta(gate, values, heads).items()
                }
                o, state = pyops.linear_attention(**inputs, output_final_state=True)
                (o.sin().sum() + state.cos().sum()).backward()
                results.append([o.detach(), state.detach(), *(t.grad for t in inputs.values())])
            for other in results[1:]:
                for got, wanted in zip(other, results[0], strict=True):
                    assert_close(got, wanted, 1e-13, f"{gate}, {values} values, {heads} heads")
    finally:
        torch.set_num_threads(before)
