"""Where numbers are not finite: NaN, infinity and overflow stay where they belong; kernel and reference."""

import linear_attention_oracle as oracle
import pytest
import torch
from linear_attention_oracle import BF16, F16, F32, F64, FORMS
from suite import assert_close, assert_same_bits

import pyops

NAN, INF = float("nan"), float("inf")
forms = pytest.mark.parametrize("form", FORMS, ids=lambda f: f.name)

SIZES = {"batch": 2, "length": 70, "heads": 2, "key_dim": 8, "values": 4, "value_dim": 6}


@pytest.fixture(params=["op", "reference"], autouse=True)
def implementation(request, monkeypatch):
    """Every test of this file is of what serves the CPU, and of what serves other devices."""
    if request.param == "reference":
        for name, function in oracle.REFERENCE.items():
            monkeypatch.setattr(torch.ops.pyops, name, function)


def places(form):
    """(input, index of the value) at token 20 of entry 0 and head 0 of SIZES, or in the state there."""
    found = {
        "q": (0, 20, 0, 3),
        "k": (0, 20, 0, 3),
        "v": (0, 20, 1, 3),
        "g": (0, 20, 1, 3) if form.gate == "vector" else (0, 20, 1),
        "beta": (0, 20, 1),
        "initial_state": (0, 1, 3, 3),
    }
    return {name: found[name] for name in form.names}


@pytest.mark.parametrize("chunk_size", [None, 16])
@pytest.mark.parametrize("dtype", [F64, F32, BF16, F16], ids=lambda d: str(d).removeprefix("torch."))
@forms
def test_contained_forward(form, dtype, chunk_size):
    """NaN and Inf reach tokens from theirs on, of their head; from v and the state only their column."""
    clean = oracle.inputs(form, dtype, **SIZES)
    good = oracle.run(clean, chunk_size=chunk_size)
    gate = oracle.gate(form, dtype)
    for name, place in places(form).items():
        # q and k serve two value heads.
        hit = torch.zeros(2, 70, 4, 6, dtype=torch.bool)
        heads = slice(0, 2) if name in ("q", "k") else slice(1, 2)
        columns = slice(3, 4) if name in ("v", "initial_state") else slice(None)
        start = 0 if name == "initial_state" else 20
        hit[0, start : 21 if name == "q" else None, heads, columns] = True
        hit_state = torch.zeros(2, 4, 8, 6, dtype=torch.bool)
        hit_state[0, heads, :, columns] = name != "q"
        for value in (NAN, INF):
            tensors = {key: t.clone() for key, t in clean.items()}
            tensors[name][place] = value
            o, final = oracle.run(tensors, chunk_size=chunk_size)
            for result, reference, touched in ((o, good[0], hit), (final, good[1], hit_state)):
                what = f"{form.name}: {value} in {name}"
                assert result[~touched].isfinite().all(), f"{what} reaches what it must not"
                assert_close(result[~touched], reference[~touched], gate, f"{what} changes others by")
            rest = torch.ones(2, 4, dtype=torch.bool)
            rest[0, 0] = rest[0, 1] = False
            assert_same_bits(o.transpose(1, 2)[rest], good[0].transpose(1, 2)[rest], f"{what}, other heads")
            assert_same_bits(final[rest], good[1][rest], f"{what}, other heads")
            assert not o[hit].isfinite().all(), f"{what} is hidden"
            if value != value and name not in ("k", "g"):  # of these only some entries must be NaN
                assert o[hit].isnan().all() or name == "initial_state", f"{what} is hidden in part"


@forms
def test_contained_in_its_sequence(form):
    """NaN in one sequence of several leaves the others bit for bit."""
    bounds = [0, 20, 41, 70]
    clean = oracle.inputs(form, F32, **SIZES | {"batch": 1, "sequences": 3})
    options = {"cu_seqlens": torch.tensor(bounds)}
    good = oracle.run(clean, **options)
    for name in form.names:
        tensors = {key: t.clone() for key, t in clean.items()}
        tensors[name][(1,) if name == "initial_state" else (0, slice(20, 41))] = NAN
        o, final = oracle.run(tensors, **options)
        kept = [*range(20), *range(41, 70)]
        assert_same_bits(o[:, kept], good[0][:, kept], f"NaN in {name}")
        assert_same_bits(final[[0, 2]], good[1][[0, 2]], f"NaN in {name}")


@forms
def test_contained_backward(form):
    """NaN in one problem's inputs or incoming gradient leaves the gradients of the others bit for bit."""
    clean = oracle.inputs(form, F32, 3, 40, 1, 4, value_dim=3)
    weights = oracle.weights_like(oracle.exact(clean), F32)
    good = oracle.gradients(oracle.run, clean, weights)
    for name in (*form.names, "grad_o", "grad_state"):
        tensors = {key: t.clone() for key, t in clean.items()}
        incoming = [w.clone() for w in weights]
        target = {"grad_o": incoming[0], "grad_state": incoming[1], **tensors}[name]
        target[1] = NAN
        found = oracle.gradients(oracle.run, tensors, incoming)
        for key, gradient in found.items():
            assert_same_bits(gradient[::2], good[key][::2], f"NaN in {name}, gradient of {key}")


@pytest.mark.parametrize("value", [NAN, INF, 3e38])
@forms
def test_contained_backward_in_sequence_and_head(form, value):
    """NaN, infinity or overflow in one head of one of several sequences: the gradients of the rest are finite
    and the same bits; q and k have those of the two value heads that share them."""
    bounds = [0, 20, 20, 41, 70]
    clean = oracle.inputs(form, F32, **SIZES | {"batch": 1, "sequences": 4})
    options = {"cu_seqlens": torch.tensor(bounds), "chunk_size": 16}
    weights = oracle.weights_like(oracle.exact(clean, cu_seqlens=options["cu_seqlens"]), F32)
    good = oracle.gradients(oracle.run, clean, weights, **options)
    for name in form.names:
        tensors = {key: t.clone() for key, t in clean.items()}
        shared = name in ("q", "k")
        tensors[name][(2, 1) if name == "initial_state" else (0, slice(20, 41), 0 if shared else 1)] = value
        found = oracle.gradients(oracle.run, tensors, weights, **options)
        for key, gradient in found.items():
            kept = torch.ones(gradient.shape, dtype=torch.bool)
            if key == "initial_state":
                kept[2, 0:2] = False
            else:
                kept[:, 20:41, 0 : 1 if key in ("q", "k") else 2] = False
            assert good[key][kept].isfinite().all()
            assert_same_bits(gradient[kept], good[key][kept], f"{value} in {name}, gradient of {key}")


# Numbers that are finite in the recurrence and not in products of a chunk, and the other way round

ALL = slice(None)


def scalar_sequence(length, **values):
    """q, k, v of ones and g of zeros, [1, length, 1, 1]; values are {name: [(index, value)]}."""
    made = {name: torch.ones(1, length, 1, 1) for name in ("q", "k", "v")}
    made["g"] = torch.zeros(1, length, 1)
    for name, entries in values.items():
        for at, value in entries:
            made[name][0, at] = value
    return made


def assert_like_the_recurrence(tensors, **more):
    """The same numbers as token by token, NaN and Inf where they belong."""
    o, state = pyops.linear_attention(**tensors, **more, output_final_state=True)
    after, tokens = torch.zeros_like(state), []
    sequences = {**tensors, **more}
    for t in range(o.shape[1]):
        token = {name: x[:, t].contiguous() for name, x in sequences.items()}
        one, after = pyops.linear_attention_step(**token, state=after, inplace=True)
        tokens.append(one)
    torch.testing.assert_close(o, torch.stack(tokens, 1), rtol=1e-5, atol=0, equal_nan=True)
    torch.testing.assert_close(state, after, rtol=1e-5, atol=0, equal_nan=True)


@pytest.mark.parametrize("threads", [1, 2, 4, 8])
def test_nan_outlives_a_decay_that_underflows(threads):
    """A product of decays that becomes 0 is no reset, however the sequence is cut."""
    torch.set_num_threads(threads)
    tensors = scalar_sequence(4000, v=[(5, NAN)], g=[(ALL, -0.05)])
    o, state = pyops.linear_attention(**tensors, output_final_state=True)
    assert o[0, :5].isfinite().all() and o[0, 5:].isnan().all() and state.isnan()


@pytest.mark.parametrize("threads", [1, 4, 8])
def test_growth_before_a_reset_stays_there(threads):
    torch.set_num_threads(threads)
    tensors = scalar_sequence(2000, k=[(slice(450), 0)], g=[(slice(200, 400), 1.0), (450, -INF)])
    assert_like_the_recurrence(tensors)


@pytest.mark.parametrize("beta", [None, 1.0])
def test_growth_inside_a_chunk_stays_before_its_reset(beta):
    tensors = scalar_sequence(16, k=[(slice(5), 0)], g=[(0, -INF), (3, 60), (4, 60), (6, -INF)])
    more = {} if beta is None else {"beta": torch.full((1, 16, 1), beta)}
    assert_like_the_recurrence(tensors, **more)


def test_overflow_of_a_product_that_no_decay_lets_through():
    k = [(2, 1e30), (slice(7, 11), 0)]
    tensors = scalar_sequence(16, k=k, q=[(10, 1e30)], v=[(ALL, 1e-3)], g=[(6, -INF)])
    assert_like_the_recurrence(tensors)


def test_the_delta_rule_overflows_no_earlier_than_its_recurrence():
    tensors = scalar_sequence(64, k=[(ALL, 30.0)])
    assert_like_the_recurrence(tensors, beta=torch.ones(1, 64, 1))


@pytest.mark.parametrize("form", [f for f in FORMS if not f.delta], ids=lambda f: f.name)
def test_contained_overflow_of_scores(form):
    """q k overflows in every token of one head, and neither the state nor o does."""
    tensors = oracle.inputs(form, F32, **SIZES | {"heads": 4})
    good = oracle.run(tensors)
    for name, factor in (("q", 1e20), ("k", 1e20), ("v", 1e-30)):
        tensors[name][:, :, 1] *= factor
    tensors["initial_state"][:, 1] *= 1e-10
    results = oracle.run(tensors)
    for dim, result, whole, exact in zip((2, 1), results, good, oracle.exact(tensors), strict=True):
        others = torch.tensor([0, 2, 3])
        assert_close(result.select(dim, 1), exact.select(dim, 1), oracle.gate(form, F32))
        assert_same_bits(result.index_select(dim, others), whole.index_select(dim, others), "other heads")


def test_infinity_in_bfloat16_is_infinity():
    q = torch.ones(1, 32, 1, 32, dtype=BF16)
    infinite = q.clone()
    infinite[0, 5, 0, 0] = INF
    o = pyops.linear_attention(infinite, q, q)[0]
    assert (o[0, 5] == INF).all() and o[0, [4, 6]].isfinite().all()
