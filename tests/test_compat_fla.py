"""pyops.compat.fla against flash-linear-attention: signatures, naive references, and what is refused."""

import importlib
import inspect
import warnings

import linear_attention_oracle as oracle
import pytest
import torch
from linear_attention_oracle import BF16, F32, F64, FORM
from suite import assert_close, assert_same_bits
from torch.nn import functional as F

import pyops
from pyops.compat import fla as compat

# alias -> module of flash-linear-attention
ALIASES = {
    "chunk_linear_attn": "linear_attn",
    "fused_chunk_linear_attn": "linear_attn",
    "fused_recurrent_linear_attn": "linear_attn",
    "chunk_simple_gla": "simple_gla",
    "fused_recurrent_simple_gla": "simple_gla",
    "chunk_gla": "gla",
    "fused_recurrent_gla": "gla",
    "chunk_retention": "retention",
    "chunk_delta_rule": "delta_rule",
    "fused_recurrent_delta_rule": "delta_rule",
    "chunk_gated_delta_rule": "gated_delta_rule",
    "fused_recurrent_gated_delta_rule": "gated_delta_rule",
    "chunk_kda": "kda",
}
SIZES = {"batch": 2, "length": 64, "heads": 2, "key_dim": 8, "value_dim": 6}
GATE = 1e-5  # the naive references sum in float32, token by token


def peer(module, name):
    """A function of flash-linear-attention, or a skip with the reason."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that it has no device here
        try:
            return getattr(importlib.import_module(f"fla.ops.{module}"), name)
        except ImportError as error:
            pytest.skip(f"flash-linear-attention 0.6 is not installed here: {error}")


def inputs(name, **options):
    return oracle.inputs(FORM[name], F32, **SIZES | options)


def assert_agree(found, wanted):
    for result, reference in zip(found, wanted, strict=True):
        assert_close(result, reference, GATE)


@pytest.mark.parametrize("name", ALIASES)
def test_signature(name):
    """The same names, order, kinds and defaults."""

    def shape(function):
        return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]

    theirs = peer(ALIASES[name], name)
    assert shape(getattr(compat, name)) == shape(inspect.unwrap(theirs))


# Their naive references


@pytest.mark.parametrize("normalize", [False, True])
def test_linear_attn_agrees(normalize):
    naive = peer("linear_attn.naive", "naive_recurrent_linear_attn")
    tensors = inputs("none")
    tensors |= {key: tensors[key].abs() for key in ("q", "k")}
    if normalize:
        tensors["initial_state"] = (tensors["initial_state"], torch.rand(2, 1, 2, 8))
    options = {"output_final_state": True, "normalize": normalize}
    (o, final), (naive_o, naive_final) = (f(**tensors, **options) for f in (compat.chunk_linear_attn, naive))
    assert_close(o, naive_o, GATE)
    if not normalize:
        final, naive_final = (final,), (naive_final,)
    assert_agree(final, naive_final)
    for other in (compat.fused_chunk_linear_attn, compat.fused_recurrent_linear_attn):
        assert_same_bits(other(**tensors, **options)[0], o, other.__name__)


def test_simple_gla_agrees():
    naive = peer("simple_gla.naive", "naive_recurrent_simple_gla")
    tensors = inputs("scalar")
    wanted = naive(**tensors, output_final_state=True)
    for function in (compat.chunk_simple_gla, compat.fused_recurrent_simple_gla):
        assert_agree(function(**tensors, output_final_state=True), wanted)


def test_gla_agrees():
    naive = peer("gla.naive", "naive_recurrent_gla")
    tensors = inputs("vector")
    g = tensors.pop("g")
    wanted = naive(**tensors, gk=g, output_final_state=True)
    assert_agree(compat.chunk_gla(**tensors, g=g, output_final_state=True), wanted)
    assert_agree(compat.fused_recurrent_gla(**tensors, gk=g, output_final_state=True), wanted)


def test_retention_agrees():
    naive = peer("retention.naive", "naive_retention")
    tensors = inputs("none", heads=4)
    del tensors["initial_state"]
    wanted = naive(*(t.transpose(1, 2) for t in tensors.values())).transpose(1, 2)
    assert_close(compat.chunk_retention(**tensors)[0], wanted, GATE)


def test_delta_rule_agrees():
    naive = peer("delta_rule.naive", "delta_rule_recurrence")
    tensors = inputs("delta")
    state = tensors.pop("initial_state")
    o, final = naive(*(t.transpose(1, 2) for t in tensors.values()), initial_state=state)
    for function in (compat.chunk_delta_rule, compat.fused_recurrent_delta_rule):
        found = function(**tensors, initial_state=state, output_final_state=True)
        assert_agree(found, (o.transpose(1, 2), final))


def test_gated_delta_rule_agrees():
    naive = peer("gated_delta_rule.naive", "naive_recurrent_gated_delta_rule")
    tensors = inputs("gated_delta")
    wanted = naive(**tensors, output_final_state=True)
    for function in (compat.chunk_gated_delta_rule, compat.fused_recurrent_gated_delta_rule):
        assert_agree(function(**tensors, output_final_state=True), wanted)


def test_kda_agrees():
    naive = peer("kda.naive", "naive_recurrent_kda")
    tensors = inputs("kda", heads=2, values=4)
    wanted = naive(**tensors, output_final_state=True)
    assert_agree(compat.chunk_kda(**tensors, output_final_state=True), wanted)
    found = compat.fused_recurrent_gated_delta_rule(
        **{key: t for key, t in tensors.items() if key != "g"}, gk=tensors["g"], output_final_state=True
    )
    assert_agree(found, wanted)


def test_gates_agree():
    """The gate activations that their kernels fuse."""
    torch.manual_seed(0)
    g, a_log, bias = torch.randn(2, 5, 3, 4), torch.randn(3), torch.randn(12)
    wanted = peer("kda.gate", "naive_kda_gate")(g, a_log, bias)
    assert_close(compat._activated(g, a_log, bias, None), wanted, 1e-6)
    bounded = peer("kda.gate", "naive_kda_lowerbound_gate")
    for rate in (a_log, None):
        assert_close(compat._activated(g, rate, bias, -5.0), bounded(g, rate, bias, -5.0), 1e-6)
    wanted = peer("gated_delta_rule.gate", "naive_gdn_gate")(g[..., 0], a_log, bias[:3])
    assert_close(compat._activated(g[..., 0], a_log, bias[:3], None), wanted, 1e-6)


# Without flash-linear-attention


def test_options_are_plain_torch_before_the_op():
    tensors = inputs("gated_delta")
    a_log, bias = torch.randn(2), torch.randn(2)
    found = compat.chunk_gated_delta_rule(
        **tensors, output_final_state=True, use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True,
        allow_neg_eigval=True, use_gate_in_kernel=True, A_log=a_log, dt_bias=bias, chunk_size=32,
    )  # fmt: skip
    tensors |= {key: F.normalize(tensors[key], dim=-1) for key in ("q", "k")}
    tensors["g"] = -a_log.exp() * F.softplus(tensors["g"] + bias)
    tensors["beta"] = 2 * tensors["beta"].sigmoid()
    assert_agree(found, oracle.run(tensors))


@pytest.mark.parametrize("name", ["chunk_simple_gla", "chunk_gla", "chunk_gated_delta_rule", "chunk_kda"])
def test_state_v_first(name):
    form = {"chunk_simple_gla": "scalar", "chunk_gla": "vector", "chunk_kda": "kda"}.get(name, "gated_delta")
    tensors = inputs(form)
    o, final = oracle.run(tensors)
    tensors["initial_state"] = tensors["initial_state"].mT.contiguous()
    found = getattr(compat, name)(**tensors, output_final_state=True, state_v_first=True)
    assert_agree(found, (o, final.mT))
    assert found[1].is_contiguous()


def test_constant_decay():
    tensors = inputs("scalar")
    g_gamma = torch.tensor([-0.1, -0.4])
    wanted = oracle.run(tensors | {"g": g_gamma})
    del tensors["g"]
    found = compat.chunk_simple_gla(**tensors, g_gamma=g_gamma, output_final_state=True)
    assert_same_bits(found, wanted, "g_gamma")


def test_scalar_and_vector_decays_multiply():
    tensors = inputs("kda")
    g = -torch.rand(2, 64, 2)
    wanted = oracle.run(tensors | {"g": tensors["g"] + g[..., None]})
    found = compat.fused_recurrent_gated_delta_rule(
        **tensors | {"g": g}, gk=tensors["g"], output_final_state=True
    )
    assert_same_bits(found, wanted, "g and gk")


def test_float64_stays_float64():
    """The gate, beta's sigmoid, the norms and RetNet's decays."""
    q, k, v, g = torch.randn(4, 1, 20, 2, 8, dtype=F64)
    a_log, bias, beta = (
        torch.randn(2, dtype=F64),
        torch.randn(16, dtype=F64),
        torch.randn(1, 20, 2, dtype=F64),
    )
    found = compat.chunk_kda(
        q, k, v, g, beta, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, A_log=a_log, dt_bias=bias,
        use_beta_sigmoid_in_kernel=True,
    )[0]  # fmt: skip
    q, k = (t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt() for t in (q, k))
    gate = -a_log.exp()[:, None] * F.softplus(g + bias.view(2, 8))
    assert_close(found, oracle.recurrent(q, k, v, gate, beta.sigmoid())[0], 1e-12)
    decay = (1 - 2.0 ** (-5 - torch.arange(2, dtype=F64))).log().expand(1, 20, 2)
    assert_close(compat.chunk_retention(q, k, v)[0], oracle.recurrent(q, k, v, decay)[0], 1e-12)


def test_sigmoid_of_beta_is_not_rounded():
    """Of bfloat16 logits; 3e-3 would be lost."""
    q, k, v = F.normalize(torch.randn(3, 1, 20, 1, 8), dim=-1).bfloat16().float()
    logits = torch.randn(1, 20, 1).bfloat16()
    decay = -torch.rand(1, 20, 1)
    found, wanted = (
        compat.chunk_gated_delta_rule(q, k, v, decay, beta, use_beta_sigmoid_in_kernel=True)[0]
        for beta in (logits, logits.float())
    )
    assert_same_bits(found, wanted, "beta")


def test_compiles_in_one_graph():
    torch.compiler.reset()
    tensors = inputs("gated_delta", length=5)
    options = {"use_gate_in_kernel": True, "A_log": torch.randn(2), "output_final_state": True}
    compiled = torch.compile(compat.chunk_gated_delta_rule, fullgraph=True, backend="aot_eager")
    assert_agree(compiled(**tensors, **options), compat.chunk_gated_delta_rule(**tensors, **options))


def test_no_final_state_unless_asked_for():
    for name in ("chunk_linear_attn", "chunk_retention", "fused_recurrent_delta_rule"):
        q = torch.rand(1, 4, 2, 3, dtype=BF16)
        o, final = getattr(compat, name)(q, q, q)
        assert final is None and o.dtype == BF16


def test_packed_sequences():
    tensors = inputs("delta", batch=1, sequences=2)
    options = {"cu_seqlens": torch.tensor([0, 20, 64])}
    found = compat.chunk_delta_rule(**tensors, output_final_state=True, **options, cu_seqlens_cpu=None)
    assert_same_bits(found, oracle.run(tensors, **options), "packed")


def test_normalized_from_the_sums_alone():
    """A plain tensor as the state of a normalised call: the sum of k starts at 0, as theirs does."""
    q = torch.rand(1, 4, 2, 3)
    state = torch.rand(1, 2, 3, 3)
    o, _ = compat.chunk_linear_attn(q, q, q, initial_state=state)
    wanted, _ = pyops.linear_attention(q, q, q, initial_state=(state, torch.zeros(1, 2, 3)), normalize=True)
    assert_same_bits(o, wanted, "state alone")


Q = torch.zeros(1, 2, 2, 3)
STATE, Z = torch.zeros(1, 2, 3, 3), torch.zeros(1, 1, 2, 3)
REFUSED = [
    ("fused_recurrent_linear_attn", (), {"reverse": True}, NotImplementedError, "reverse"),
    ("fused_recurrent_simple_gla", (), {"reverse": True}, NotImplementedError, "reverse"),
    ("fused_recurrent_gla", (), {"gv": Q}, NotImplementedError, "gv"),
    ("fused_recurrent_gla", (), {"reverse": True}, NotImplementedError, "reverse"),
    ("fused_recurrent_gated_delta_rule", (), {"gv": Q}, NotImplementedError, "gv"),
    ("chunk_gated_delta_rule", (Q[..., 0], Q[..., 0]), {"cp_context": 1}, NotImplementedError, "cp_context"),
    ("chunk_kda", (Q, Q[..., 0]), {"cp_context": 1}, NotImplementedError, "cp_context"),
    ("chunk_kda", (Q, Q[..., 0]), {"use_graph": True}, NotImplementedError, "use_graph"),
    ("chunk_kda", (Q, Q[..., 0]), {"max_num_seqs": 3}, NotImplementedError, "max_num_seqs"),
    (
        "chunk_kda",
        (Q, Q[..., 0]),
        {"return_intermediate_states": True},
        NotImplementedError,
        "return_intermediate_states",
    ),
    ("chunk_simple_gla", (), {"head_first": True}, TypeError, "head_first"),
    ("chunk_retention", (), {"head_first": True}, TypeError, "head_first"),
    ("chunk_delta_rule", (Q[..., 0],), {"transpose_state_layout": True}, TypeError, "transpose_state_layout"),
    ("chunk_simple_gla", (), {"g": Q[..., 0], "g_gamma": Q[0, 0, :, 0]}, ValueError, "g_gamma"),
    ("chunk_simple_gla", (), {"chunk_size": 48}, ValueError, "chunk_size"),
    ("chunk_kda", (Q, Q[..., 0]), {"use_gate_in_kernel": True}, ValueError, "A_log"),
    # [HV] and [HV * K] of a gate's parameters
    (
        "chunk_kda",
        (Q, Q[..., 0]),
        {"use_gate_in_kernel": True, "A_log": Q[0, 0, 0]},
        ValueError,
        r"A_log must have 2 entries for g of shape \(1, 2, 2, 3\), got shape \(3,\)",
    ),
    (
        "chunk_kda",
        (Q, Q[..., 0]),
        {"use_gate_in_kernel": True, "A_log": Q[0, 0, :, 0], "dt_bias": Q[0, 0, :, 0]},
        ValueError,
        "dt_bias must have 6 entries",
    ),
    (
        "chunk_kda",
        (Q, Q[..., 0]),
        {"use_gate_in_kernel": True, "A_log": Q[0, 0, :, 0], "lower_bound": "-5"},
        TypeError,
        "lower_bound must be a number",
    ),
    (
        "chunk_gated_delta_rule",
        (Q[..., 0], Q[..., 0]),
        {"use_gate_in_kernel": True, "A_log": Q[0, 0, 0]},
        ValueError,
        "A_log must have 2 entries",
    ),
    (
        "fused_recurrent_gated_delta_rule",
        (Q[..., 0],),
        {"use_gate_in_kernel": True, "A_log": Q[0, 0, :, 0], "dt_bias": Q[0, 0, 0]},
        ValueError,
        "dt_bias must have 2 entries",
    ),
    (
        "chunk_gated_delta_rule",
        (Q[..., 0], Q[..., 0]),
        {"use_gate_in_kernel": True, "A_log": 1.0},
        TypeError,
        "A_log must be a torch.Tensor, got float",
    ),
    # None where a tensor is needed
    ("chunk_gla", (None,), {}, TypeError, "g must be a torch.Tensor, got NoneType"),
    ("chunk_delta_rule", (None,), {}, TypeError, "beta must be a torch.Tensor, got NoneType"),
    (
        "chunk_gated_delta_rule",
        (None, Q[..., 0]),
        {"use_gate_in_kernel": True, "A_log": Q[0, 0, :, 0]},
        TypeError,
        "g must be a torch.Tensor, got NoneType",
    ),
    ("chunk_kda", (Q, None), {"use_beta_sigmoid_in_kernel": True}, TypeError, "beta must be a torch.Tensor"),
    (
        "fused_recurrent_gated_delta_rule",
        (),
        {"use_beta_sigmoid_in_kernel": True},
        ValueError,
        "beta must be given with use_beta_sigmoid_in_kernel=True, got None",
    ),
    ("chunk_retention", (), {"q": None}, TypeError, "q must be a torch.Tensor, got NoneType"),
    # shapes that would broadcast, or be taken for something else
    ("chunk_gla", (Q[..., 0],), {}, ValueError, r"g must be \(1, 2, 2, 3\), got shape \(1, 2, 2\)"),
    ("chunk_gla", (Q[0, 0, :, 0],), {}, ValueError, r"g must be \(1, 2, 2, 3\), got shape \(2,\)"),
    ("chunk_simple_gla", (Q,), {}, ValueError, r"g must be \(1, 2, 2\), got shape \(1, 2, 2, 3\)"),
    ("chunk_simple_gla", (), {"g_gamma": Q[0, 0, :1, 0]}, ValueError, r"g_gamma must be \[H = 2\], got"),
    ("chunk_simple_gla", (), {"g_gamma": Q[..., 0]}, ValueError, r"g_gamma must be \[H = 2\], got"),
    ("chunk_simple_gla", (), {"g_gamma": -0.1}, TypeError, "g_gamma must be a torch.Tensor, got float"),
    ("fused_recurrent_gla", (Q[..., :1],), {}, ValueError, r"gk must be \(1, 2, 2, 3\), got"),
    ("fused_recurrent_gla", (Q[..., 0],), {}, ValueError, r"gk must be \(1, 2, 2, 3\), got"),
    ("chunk_delta_rule", (Q[:, :1, :, 0],), {}, ValueError, r"beta must be \(1, 2, 2\), got"),
    (
        "fused_recurrent_gated_delta_rule",
        (Q[:, :, :1, 0], Q),
        {},
        ValueError,
        r"g must be \(1, 2, 2\), got shape \(1, 2, 1\)",
    ),
    (
        "fused_recurrent_gated_delta_rule",
        (Q[..., 0], Q[:, :1]),
        {},
        ValueError,
        r"gk must be \(1, 2, 2, 3\), got shape \(1, 1, 2, 3\)",
    ),
    (
        "fused_recurrent_gated_delta_rule",
        (Q[..., 0], Q.repeat(1, 1, 2, 1)),
        {"v": Q.repeat(1, 1, 2, 1)},
        ValueError,
        r"gk must have the heads of g, 2, got shape \(1, 2, 4, 3\)",
    ),
    # states
    ("chunk_simple_gla", (), {"initial_state": Q}, ValueError, r"initial_state must be \(1, 2, 3, 3\), got"),
    ("chunk_simple_gla", (), {"initial_state": STATE.int()}, TypeError, "initial_state must be float64"),
    ("chunk_simple_gla", (), {"initial_state": (STATE, Z)}, TypeError, "initial_state must be .*, got tuple"),
    (
        "chunk_gla",
        (Q,),
        {"initial_state": STATE[0, 0, 0], "state_v_first": True},
        ValueError,
        r"initial_state must be \(1, 2, 3, 3\), got shape \(3,\)",
    ),
    (
        "chunk_gla",
        (Q,),
        {"v": Q[..., :1], "initial_state": STATE[..., :1], "state_v_first": True},
        ValueError,
        r"initial_state must be \(1, 2, 1, 3\), got shape \(1, 2, 3, 1\)",
    ),
    (
        "chunk_gla",
        (Q,),
        {"initial_state": 0, "state_v_first": True},
        TypeError,
        "initial_state must be .* int",
    ),
    ("chunk_linear_attn", (), {"initial_state": Q}, ValueError, r"initial_state must be \(1, 2, 3, 3\), got"),
    ("chunk_linear_attn", (), {"initial_state": [STATE, Z]}, TypeError, r"a pair \(S, z\) .*, got list"),
    (
        "chunk_linear_attn",
        (),
        {"initial_state": (STATE,)},
        TypeError,
        r"a pair \(S, z\) .*, got a tuple of 1",
    ),
    ("chunk_linear_attn", (), {"initial_state": (STATE, None)}, TypeError, r"initial_state\[1\] must be a"),
    ("chunk_linear_attn", (), {"initial_state": (None, Z)}, TypeError, r"initial_state\[0\] must be a torch"),
    (
        "chunk_linear_attn",
        (),
        {"initial_state": (STATE, Z[:, 0])},
        ValueError,
        r"initial_state\[1\] must be \(1, 1, 2, 3\), got shape \(1, 2, 3\)",
    ),
    ("chunk_kda", (Q, Q[..., 0]), {"allow_neg_eigval": True}, ValueError, "allow_neg_eigval"),
    ("fused_recurrent_gated_delta_rule", (), {"use_gate_in_kernel": True}, ValueError, "g must be given"),
    ("chunk_gla", (Q[..., :2],), {}, ValueError, r"g must be \(1, 2, 2, 3\), got"),
]


@pytest.mark.parametrize(("name", "args", "options", "error", "message"), REFUSED)
def test_refused(name, args, options, error, message):
    """Before any work, naming the argument, and without the elements of a tensor."""
    given = {"q": Q, "k": Q, "v": Q} | options
    names = list(inspect.signature(getattr(compat, name)).parameters)[3:]
    given |= dict(zip(names, args, strict=False))
    with pytest.raises(error, match=message) as found:
        getattr(compat, name)(**given)
    assert "tensor(" not in str(found.value)
