"""The decode step: one token of the recurrence, with the state in place on request."""

import linear_attention_oracle as oracle
import pytest
import torch
from linear_attention_oracle import BF16, F32, F64, FORM, FORMS
from suite import ALL_DTYPES, assert_close, assert_same_bits, layouts, memory

import pyops

forms = pytest.mark.parametrize("form", FORMS, ids=lambda f: f.name)
dtypes = pytest.mark.parametrize("dtype", ALL_DTYPES, ids=lambda d: str(d).removeprefix("torch."))
SIZES = {"batch": 3, "length": 1, "heads": 2, "key_dim": 20, "values": 4, "value_dim": 12}


def token(form, dtype, scale=None, **options):
    """(inputs of a step, its state, (o, state) as the recurrence has them)."""
    tensors = oracle.inputs(form, dtype, **SIZES | options, gate_heads=2, beta_heads=4)
    wanted = oracle.exact(tensors, scale=scale)
    state = tensors.pop("initial_state")
    return {name: t[:, 0] for name, t in tensors.items()}, state, (wanted[0][:, 0], wanted[1])


@pytest.mark.parametrize("inplace", [False, True], ids=["new state", "in place"])
@dtypes
@forms
def test_step_accuracy(form, dtype, inplace, poison):
    tensors, state, wanted = token(form, dtype, scale=-0.7)
    before, inputs = state.clone(), [t.clone() for t in tensors.values()]
    o, after = pyops.linear_attention_step(**tensors, state=state, scale=-0.7, inplace=inplace)
    assert o.dtype == dtype and after.dtype == (F64 if dtype == F64 else F32)
    for result, reference in zip((o, after), wanted, strict=True):
        oracle.assert_within(result, reference, oracle.gate(form, dtype), f"{form.name} step")
    assert (after is state) == inplace
    if not inplace:
        assert_same_bits(state, before, "the state was written to")
    assert_same_bits(tuple(tensors.values()), tuple(inputs), "inputs were written to")


@pytest.mark.parametrize(("key_dim", "value_dim"), [(1, 1), (3, 60), (100, 7), (128, 128), (96, 33)])
@forms
def test_step_sizes(form, key_dim, value_dim):
    for dtype in (F32, BF16):
        tensors, state, wanted = token(form, dtype, key_dim=key_dim, value_dim=value_dim)
        found = pyops.linear_attention_step(**tensors, state=state, inplace=True)
        for result, reference in zip(found, wanted, strict=True):
            oracle.assert_within(result, reference, oracle.gate(form, dtype), f"{form.name} step")


@dtypes
@forms
def test_step_layouts(form, dtype):
    """The same bits whatever the strides, also of the state that is written; memory between stays."""
    tensors, state, _ = token(form, dtype)
    kept = state.clone()
    o, after = pyops.linear_attention_step(**tensors, state=state, inplace=True)
    for name in layouts(kept):
        views = {key: layouts(t)[name] for key, t in tensors.items()}
        written = layouts(kept)[name]
        around = memory(written).clone()
        result, _ = pyops.linear_attention_step(**views, state=written, inplace=True)
        assert_same_bits((result, written), (o, after), name)
        written.copy_(kept)
        assert torch.equal(memory(written), around), f"{name}: memory around the state"


@forms
def test_step_reset(form):
    """g = -inf drops the state, NaN included."""
    if form.gate is None:
        return
    tensors, state, _ = token(form, F32)
    tensors["g"].fill_(-torch.inf)
    wanted = pyops.linear_attention_step(**tensors, state=torch.zeros_like(state))
    for inplace in (False, True):
        found = pyops.linear_attention_step(
            **tensors, state=torch.full_like(state, torch.nan), inplace=inplace
        )
        for result, reference in zip(found, wanted, strict=True):
            assert_close(result, reference, oracle.gate(form, F32))


@forms
def test_step_contained(form):
    """NaN in one entry of the batch stays there."""
    clean, state, _ = token(form, F32)
    good_o, good_state = pyops.linear_attention_step(**clean, state=state.clone(), inplace=True)
    for name in (*clean, "state"):
        tensors = {key: t.clone() for key, t in clean.items()} | {"state": state.clone()}
        tensors[name][1] = torch.nan
        o, after = pyops.linear_attention_step(**tensors, inplace=True)
        assert_same_bits(o[::2], good_o[::2], f"NaN in {name}")
        assert_same_bits(after[::2], good_state[::2], f"NaN in {name}")
        assert o[1].isnan().any()


@forms
def test_step_gradients(form):
    """Without inplace the step is differentiable, through o and the state."""
    tensors, state, _ = token(form, F64, batch=1, key_dim=3, value_dim=2)

    def call(*given):
        *inputs, s = given
        return pyops.linear_attention_step(**dict(zip(tensors, inputs, strict=True)), state=s)

    leaves = tuple(t.clone().requires_grad_() for t in (*tensors.values(), state))
    assert torch.autograd.gradcheck(call, leaves)


def test_step_marks_the_state_as_written():
    tensors, state, _ = token(FORM["scalar"], F32)
    version = state._version
    pyops.linear_attention_step(**tensors, state=state, inplace=True)
    assert state._version > version


def test_step_constant_decay():
    tensors, state, _ = token(FORM["scalar"], F32)
    g = torch.tensor([-0.1, -0.5])
    found = pyops.linear_attention_step(**tensors | {"g": g}, state=state)
    assert_same_bits(
        found, pyops.linear_attention_step(**tensors | {"g": g.expand(3, 2)}, state=state), "g [H]"
    )


@pytest.mark.parametrize("threads", [1, 2])
@forms
def test_step_is_the_same_in_every_run(form, threads):
    tensors, state, _ = token(form, F32, key_dim=64, value_dim=64)
    wanted = pyops.linear_attention_step(**tensors, state=state)
    torch.set_num_threads(threads)
    for inplace in (False, True, True):
        found = pyops.linear_attention_step(**tensors, state=state.clone(), inplace=inplace)
        if inplace:
            first = first if "first" in locals() else found  # noqa: F821
            assert_same_bits(found, first, f"{threads} threads")
        else:
            assert_same_bits(found, wanted, f"{threads} threads")


@forms
def test_step_compiles(form):
    """A decode loop under torch.compile, in place, without a graph break."""
    tensors, state, _ = token(form, F32)
    torch.compiler.reset()

    def step(**given):
        return pyops.linear_attention_step(**given, inplace=True)[0]

    compiled, state_of = (
        torch.compile(step, fullgraph=True, backend="aot_eager"),
        [state.clone(), state.clone()],
    )
    for _ in range(2):
        found = compiled(**tensors, state=state_of[0])
        assert_same_bits(found, step(**tensors, state=state_of[1]), "compiled")
    assert_same_bits(*state_of, "compiled state")


@forms
def test_step_opcheck(form):
    tensors, state, _ = token(form, F32)
    args = [tensors.get(name) for name in ("q", "k", "v", "g", "beta")]
    torch.library.opcheck(torch.ops.pyops.linear_attention_step_.default, (*args, state, 0.5))


SHARED = {
    "expanded batch": lambda: torch.zeros(1, 4, 20, 12).expand(3, 4, 20, 12),
    "expanded heads": lambda: torch.zeros(3, 1, 20, 12).expand(3, 4, 20, 12),
    "expanded rows": lambda: torch.zeros(3, 4, 1, 12).expand(3, 4, 20, 12),
    "expanded columns": lambda: torch.zeros(3, 4, 20, 1).expand(3, 4, 20, 12),
    "overlapping rows": lambda: torch.zeros(4000).as_strided((3, 4, 20, 12), (1000, 250, 11, 1)),
    "overlapping heads": lambda: torch.zeros(4000).as_strided((3, 4, 20, 12), (960, 239, 12, 1)),
    "sliding windows": lambda: torch.zeros(3, 4, 51).unfold(2, 20, 1)[..., :12, :].mT,
}


@pytest.mark.parametrize("what", SHARED)
def test_step_refuses_a_state_that_shares_memory_with_itself(what):
    """In place; as an input it is as good as any."""
    tensors, _, _ = token(FORM["scalar"], F32)
    state = SHARED[what]()
    assert state.shape == (3, 4, 20, 12)
    with pytest.raises(ValueError, match="state must not share memory between its elements"):
        pyops.linear_attention_step(**tensors, state=state, inplace=True)
    assert not state.any()
    assert pyops.linear_attention_step(**tensors, state=state)[1].any()


@pytest.mark.parametrize("dim", [0, 2, 4, -1])
@forms
def test_step_vmap(form, dim):
    """In place, over any dimension of the state, the other arguments vmapped or shared."""
    tensors, state, _ = token(form, F32)
    states = torch.stack([state, 2 * state], dim)
    queries = torch.stack([tensors["q"], tensors["q"] + 1])
    wanted = [
        pyops.linear_attention_step(**tensors | {"q": q}, state=s.clone(), inplace=True)
        for q, s in zip(queries, states.unbind(dim), strict=True)
    ]

    def step(q, state):
        return pyops.linear_attention_step(**tensors | {"q": q}, state=state, inplace=True)[0]

    version = states._version
    o = torch.vmap(step, in_dims=(0, dim))(queries, states)
    assert states._version > version
    for i, (one, after) in enumerate(wanted):
        assert_same_bits((o[i], states.select(dim, i)), (one, after), "vmap")


def test_step_vmap_refuses_a_state_for_all():
    tensors, state, _ = token(FORM["scalar"], F32)
    before, q = state.clone(), tensors.pop("q").repeat(2, 1, 1, 1)

    def step(q, state):
        return pyops.linear_attention_step(q, **tensors, state=state, inplace=True)[0]

    with pytest.raises(ValueError, match="state must be vmapped with inplace=True"):
        torch.vmap(step, in_dims=(0, None))(q, state)
    with pytest.raises(ValueError, match="state must not share memory"):
        torch.vmap(step)(q, state.expand(2, *state.shape))
    assert_same_bits(state, before, "a refused state was written to")


@forms
def test_step_empty(form):
    tensors, state, _ = token(form, F32)
    o, after = pyops.linear_attention_step(**{name: t[:0] for name, t in tensors.items()}, state=state[:0])
    assert o.shape == (0, 4, 12) and after.shape == (0, 4, 20, 12)
