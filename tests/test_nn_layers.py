"""The recurrent layers: against a token loop, in pieces, packed, compiled, in 16 bits."""

import copy
from functools import partial

import nn_oracle
import pytest
import torch
from torch.nn.functional import softplus

from pyops.nn import GatedDeltaNet, GatedLinearAttention, LayerState, Mamba2Mixer

D = 12
CASES = {
    "gla": (partial(GatedLinearAttention, D, num_heads=2), nn_oracle.gla),
    "gla-conv": (partial(GatedLinearAttention, D, num_heads=3, expand_k=1.0, conv_size=3), nn_oracle.gla),
    "gdn": (partial(GatedDeltaNet, D, num_heads=2, head_dim=4, conv_size=2), nn_oracle.gated_delta_net),
    "gdn-grouped": (
        partial(GatedDeltaNet, D, num_heads=2, head_dim=3, num_v_heads=4, expand_v=1.0),
        nn_oracle.gated_delta_net,
    ),
    "mamba2": (partial(Mamba2Mixer, D, state_size=5, head_dim=4), nn_oracle.mamba2),
    "mamba2-groups": (partial(Mamba2Mixer, D, state_size=3, head_dim=4, n_groups=2), nn_oracle.mamba2),
}


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)  # for tensors this small


every_layer = pytest.mark.parametrize("name", CASES)


def make(name, dtype=torch.float64, **kwargs):
    return CASES[name][0](dtype=dtype, **kwargs)


def random_state(layer, count, dtype=torch.float64):
    zero = layer.zero_state(count)
    conv = tuple(torch.randn_like(c, dtype=dtype) for c in zero.conv)
    return LayerState(0.3 * torch.randn_like(zero.recurrent), conv)


def flat(y, state):
    return [y, state.recurrent, *state.conv]


def close(found, wanted, tolerance=1e-11):
    for a, b in zip(found, wanted, strict=True):
        assert a.shape == b.shape
        assert (a - b).norm() <= tolerance * (b.norm() + 1e-30), f"{((a - b).norm() / b.norm()):.3g}"


@every_layer
def test_equals_the_token_loop_with_its_gradients(name):
    layer = make(name)
    x = torch.randn(2, 7, D, dtype=torch.float64, requires_grad=True)
    state = random_state(layer, 2)
    leaves = [x, *layer.parameters(), *(t.requires_grad_() for t in flat(x, state)[1:])]
    found = flat(*layer(x, state))
    y, recurrent, conv = nn_oracle.run(CASES[name][1], layer, x, state.recurrent, state.conv)
    wanted = [y, recurrent, *conv]
    close(found, wanted)
    weights = [torch.randn_like(t) for t in wanted]
    grads = [
        torch.autograd.grad(sum((w * t).sum() for w, t in zip(weights, results, strict=True)), leaves)
        for results in (found, wanted)
    ]
    close(*grads)
    assert all(g.norm() > 0 for g in grads[0])


@every_layer
def test_pieces_and_their_gradients_equal_the_whole(name):
    layer, x = make(name), torch.randn(2, 12, D, dtype=torch.float64)
    whole, last = layer(x, layer.zero_state(2))
    for lengths in ([1] * 12, [5, 0, 7], [2, 10]):
        state, ys = None, []
        for piece in x.split(lengths, 1):
            y, state = layer(piece, state)
            ys.append(y)
        close(flat(torch.cat(ys, 1), state), flat(whole, last))
        found, wanted = (
            torch.autograd.grad(y.square().sum() + s.recurrent.sum(), layer.parameters(), retain_graph=True)
            for y, s in ((torch.cat(ys, 1), state), (whole, last))
        )
        close(found, wanted)


@every_layer
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decoding_in_lower_precision(name, dtype):
    layer, x = make(name, dtype), torch.randn(1, 20, D, dtype=dtype)
    with torch.no_grad():
        whole, last = layer(x)
        state, ys = None, []
        for token in x.split(1, 1):
            y, state = layer(token, state)
            ys.append(y)
        wanted, _ = copy.deepcopy(layer).double()(x.double())
    assert whole.dtype == dtype and last.recurrent.dtype == torch.float32
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    close([torch.cat(ys, 1).double(), state.recurrent], [whole.double(), last.recurrent], tolerance)
    close([whole.double()], [wanted], tolerance)


@every_layer
def test_packed_sequences_equal_single_ones(name):
    layer, lengths = make(name), [3, 0, 1, 6]
    x = torch.randn(1, sum(lengths), D, dtype=torch.float64)
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    for state in (None, random_state(layer, 4)):
        y, after = layer(x, state, bounds)
        for n, piece in enumerate(x.split(lengths, 1)):
            given = None if state is None else LayerState(*_entry(state, n))
            single = flat(*layer(piece, given))
            close([y[:, bounds[n] : bounds[n + 1]], *flat(y, LayerState(*_entry(after, n)))[1:]], single)


def _entry(state, n):
    return state.recurrent[n : n + 1], tuple(c[n : n + 1] for c in state.conv)


@every_layer
def test_nan_stays_in_its_sequence(name):
    layer, x = make(name), torch.randn(1, 9, D, dtype=torch.float64)
    x[:, 3:6] = float("nan")
    y, state = layer(x, None, torch.tensor([0, 3, 6, 9]))
    assert y[:, 3:6].isnan().all()
    rest = [y[:, :3], y[:, 6:], *(t[[0, 2]] for t in flat(y, state)[1:])]
    assert all(t.isfinite().all() for t in rest)


@every_layer
def test_states_are_fresh_and_given_ones_are_kept(name):
    layer, x = make(name), torch.randn(2, 6, D, dtype=torch.float64)
    state = random_state(layer, 2)
    kept = [t.clone() for t in flat(x, state)]
    grads = []
    for spoil in (False, True):
        y, after = layer(x, state)
        carried = after.detach()
        assert all(t.grad_fn is None for t in flat(x, carried)[1:])
        if spoil:
            for t in flat(x, carried)[1:]:
                t.fill_(7.0)
        grads.append(torch.autograd.grad(y.square().sum(), layer.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(kept, flat(x, state), strict=True))


@every_layer
def test_truncated_backpropagation(name):
    """The states of a stack travel from segment to segment, and no gradient does."""
    layers = torch.nn.ModuleList(make(name, torch.float32) for _ in range(2))
    x = torch.randn(3, 16, D)
    states = [None] * len(layers)
    for segment in x.split(4, 1):
        h = segment
        inputs = [s if s is None else s.detach() for s in states]
        for i, layer in enumerate(layers):
            y, states[i] = layer(h, inputs[i])
            h = h + y
        h.square().mean().backward()  # would raise if it reached into the graph of the segment before
    whole = x
    for layer in layers:
        y, _ = layer(whole)
        whole = whole + y
    close([h], [whole[:, -4:]], 1e-5)


@pytest.mark.parametrize("name", ["gla-conv", "gdn-grouped", "mamba2-groups"])
@pytest.mark.parametrize("packed", [False, True])
def test_compiles_in_one_graph(name, packed):
    layer = make(name, torch.float32)
    x = torch.randn(1, 9, D)
    bounds = torch.tensor([0, 4, 4, 9]) if packed else None
    state = random_state(layer, 3 if packed else 1, torch.float32)
    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    results = [flat(*f(x, state, bounds)) for f in (compiled, layer)]
    close(*results, 1e-6)
    sums = [sum(t.square().sum() for t in r) for r in results]
    close(*(torch.autograd.grad(s, layer.parameters()) for s in sums), 1e-5)


@pytest.mark.slow
def test_one_compilation_serves_every_batch_and_length():
    layer = make("gla-conv", torch.float32)
    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    compiled(torch.randn(7, 19, D), random_state(layer, 7, torch.float32))
    with torch.compiler.set_stance("fail_on_recompile"):
        for batch, length in ((9, 17), (8, 30)):
            x, state = torch.randn(batch, length, D), random_state(layer, batch, torch.float32)
            close(flat(*compiled(x, state)), flat(*layer(x, state)), 1e-6)


@pytest.mark.slow
@every_layer
def test_compiles_with_inductor(name):
    layer, x = make(name, torch.float32), torch.randn(2, 9, D)
    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True)
    close(flat(*compiled(x, layer.zero_state(2))), flat(*layer(x)), 1e-5)


@every_layer
def test_autocast(name):
    layer, x = make(name, torch.float32), torch.randn(2, 30, D)
    with torch.autocast("cpu", torch.bfloat16):
        y, state = layer(x)
        y.float().square().sum().backward()
    assert y.dtype == torch.bfloat16 and state.recurrent.dtype == torch.float32
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in layer.parameters())
    close([y.float(), state.recurrent], [layer(x)[0], layer(x)[1].recurrent], 5e-2)


@pytest.mark.parametrize("name", ["gdn", "mamba2"])
def test_gates_are_float32_in_a_bfloat16_layer(name):
    """In bfloat16 the decay of a step, 1 - 1e-4, would be 1."""
    layer = make(name, torch.bfloat16)
    with torch.no_grad():
        for p in layer.parameters():
            p.zero_()
        layer.dt_bias.fill_(-9.25)  # softplus: 1e-4
        state = random_state(layer, 1, torch.bfloat16)
        _, after = layer(torch.zeros(1, 100, D, dtype=torch.bfloat16), state)
    wanted = state.recurrent * torch.exp(-100 * softplus(torch.tensor(-9.25)))
    close([after.recurrent], [wanted], 1e-5)


@every_layer
def test_no_tokens(name):
    layer = make(name)
    state = random_state(layer, 2)
    y, after = layer(torch.randn(2, 0, D, dtype=torch.float64), state)
    assert y.shape == (2, 0, D)
    assert all(torch.equal(a, b) for a, b in zip(flat(y, state), flat(y, after), strict=True))


@every_layer
@pytest.mark.parametrize("length", [1, 5])
def test_meta_device(name, length):
    layer = make(name, torch.float32, device="meta")
    y, state = layer(torch.empty(2, length, D, device="meta"), layer.zero_state(2))
    assert y.shape == (2, length, D) and state.recurrent.device.type == "meta"


@every_layer
def test_device_dtype_and_initial_values(name):
    layer = make(name, torch.bfloat16, device="meta")
    assert {(p.device.type, p.dtype) for p in layer.parameters()} == {("meta", torch.bfloat16)}
    assert layer.zero_state(2).recurrent.dtype == torch.float32
    layer.to_empty(device="cpu")
    for p in layer.parameters():
        torch.nn.init.constant_(p, float("nan"))
    layer.reset_parameters()
    assert all(p.isfinite().all() for p in layer.parameters())
    torch.manual_seed(3)
    layer.reset_parameters()
    torch.manual_seed(3)
    other = make(name, torch.bfloat16)
    assert layer.state_dict().keys() == other.state_dict().keys()


@pytest.mark.parametrize(("name", "lowest"), [("gdn", 0.0), ("mamba2", 1.0)])
def test_initial_decays(name, lowest):
    make_layer = {
        "gdn": partial(GatedDeltaNet, 8, num_heads=4096, head_dim=1, expand_v=1.0),
        "mamba2": partial(Mamba2Mixer, 2048, head_dim=1, state_size=1),
    }[name]
    layer = make_layer(device="meta").to_empty(device="cpu")
    layer.reset_parameters()
    a, dt = layer.A_log.exp(), softplus(layer.dt_bias)
    assert lowest < a.min() < lowest + 0.1 and 15.9 < a.max() <= 16.001
    assert abs(a.mean() - (lowest + 16) / 2) < 0.3
    assert 0.00099 < dt.min() < 0.0011 and 0.095 < dt.max() < 0.101
    assert abs(dt.log10().mean() + 2) < 0.05


PARAMETERS = {
    "gla-conv": {
        "q_proj.weight": (12, 12), "k_proj.weight": (12, 12), "v_proj.weight": (12, 12),
        "g_proj.weight": (12, 12), "gk_proj.0.weight": (16, 12), "gk_proj.1.weight": (12, 16),
        "gk_proj.1.bias": (12,), "q_conv1d.weight": (12, 1, 3), "k_conv1d.weight": (12, 1, 3),
        "v_conv1d.weight": (12, 1, 3), "g_norm_swish_gate.weight": (4,), "o_proj.weight": (12, 12),
    },
    "gdn-grouped": {
        "q_proj.weight": (6, 12), "k_proj.weight": (6, 12), "v_proj.weight": (12, 12),
        "a_proj.weight": (4, 12), "b_proj.weight": (4, 12), "g_proj.weight": (12, 12), "A_log": (4,),
        "dt_bias": (4,), "q_conv1d.weight": (6, 1, 4), "k_conv1d.weight": (6, 1, 4),
        "v_conv1d.weight": (12, 1, 4), "o_norm.weight": (3,), "o_proj.weight": (12, 12),
    },
    "mamba2-groups": {
        "in_proj.weight": (66, 12), "conv1d.weight": (36, 1, 4), "conv1d.bias": (36,), "dt_bias": (6,),
        "A_log": (6,), "D": (6,), "norm.weight": (24,), "out_proj.weight": (12, 24),
    },
}  # fmt: skip


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_are_those_of_the_published_layers(name):
    assert {key: tuple(p.shape) for key, p in make(name).state_dict().items()} == PARAMETERS[name]


def test_default_sizes():
    assert GatedLinearAttention(1024, device="meta").state_shape == (4, 128, 256)
    assert GatedDeltaNet(2048, device="meta").state_shape == (6, 256, 512)
    assert Mamba2Mixer(1024, device="meta").state_shape == (32, 128, 64)


X = torch.randn(1, 6, D)
STATE = make("gla-conv", torch.float32).zero_state()
NO_TENSOR = {
    "None": (lambda a: a(None), TypeError, "x must be a torch.Tensor, got NoneType"),
    "list": (lambda a: a([[[0.0] * D]]), TypeError, "x must be a torch.Tensor, got list"),
    "float64": (
        lambda a: a(X.double()),
        TypeError,
        "x must have the dtype of the parameters, torch.float32, got",
    ),
    "int64": (
        lambda a: a(X.long()),
        TypeError,
        "x must have the dtype of the parameters, .*, got torch.int64",
    ),
    "size": (lambda a: a(X[..., :-1]), ValueError, r"x must be \[B, T, 12\], got shape \(1, 6, 11\)"),
    "device": (
        lambda a: a(X.to("meta")),
        ValueError,
        "x must be on the device of the parameters, cpu, got meta",
    ),
}


@pytest.mark.parametrize("what", NO_TENSOR)
@every_layer
def test_bad_inputs_of_every_layer(name, what, monkeypatch):
    """Before any work."""
    call, error, message = NO_TENSOR[what]
    layer = make(name, torch.float32)
    monkeypatch.setattr(torch.nn.Linear, "forward", None)
    with pytest.raises(error, match=message):
        call(layer)


BAD = [
    (lambda a: a(X[0]), ValueError, r"x must be \[B, T, 12\], got shape \(6, 12\)"),
    (lambda a: a(X, STATE._replace(recurrent=None)), TypeError, "state.recurrent must be a torch.Tensor"),
    (
        lambda a: a(X, STATE._replace(recurrent=STATE.recurrent.int())),
        TypeError,
        "state.recurrent must be floating, got torch.int32",
    ),
    (
        lambda a: a(X, STATE._replace(conv=(*STATE.conv[:2], STATE.conv[0][:, 1:]))),
        ValueError,
        r"state.conv\[2\] must be \(1, 2, 12\), got shape \(1, 1, 12\)",
    ),
    (lambda a: a(X, STATE._replace(conv=(None,) * 3)), TypeError, r"state.conv\[0\] must be a torch.Tensor"),
    (lambda a: a(X, (torch.zeros(1),)), TypeError, "state must be a pyops.nn.LayerState"),
    (lambda a: a(X, a.zero_state(2)), ValueError, r"state.recurrent must be \(1, 3, 4, 4\), got shape \(2"),
    (lambda a: a(X, LayerState(a.zero_state().recurrent)), ValueError, "state.conv must hold 3 tensors"),
    (lambda a: a(X, None, torch.tensor([0, 5])), ValueError, "cu_seqlens must end at T = 6, got 5"),
    (lambda a: a(X, a.zero_state(), torch.tensor([0, 2, 6])), ValueError, r"state.recurrent must be \(2, "),
    (lambda a: GatedLinearAttention(D, num_heads=5), ValueError, "expand_k must give .* num_heads = 5"),
    (lambda a: GatedLinearAttention(D, num_heads=2, expand_v=0.1), ValueError, "expand_v must give"),
    (lambda a: GatedLinearAttention(D, num_heads=0), ValueError, "num_heads must be at least 1, got 0"),
    (lambda a: GatedDeltaNet(D, num_heads=2, num_v_heads=3), ValueError, "num_v_heads must give a positive"),
    (lambda a: GatedDeltaNet(D, num_heads=2, head_dim=3, expand_v=1.5), ValueError, "expand_v must give"),
    (lambda a: GatedDeltaNet(D, conv_size=0), ValueError, "kernel_size must be at least 1"),
    (lambda a: Mamba2Mixer(D), ValueError, "expand must give a positive multiple of head_dim = 64, got 24"),
    (lambda a: Mamba2Mixer(D, head_dim=4, n_groups=4), ValueError, "expand must give .* n_groups = 4, got 6"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "message"), BAD)
def test_errors(call, error, message):
    with pytest.raises(error, match=message):
        call(make("gla-conv", torch.float32))
