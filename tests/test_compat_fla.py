"""pyops.compat.fla against flash-linear-attention: signatures, naive references, and what is refused."""

import importlib
import inspect
import warnings

import linear_attention_oracle as oracle
import pytest
import torch
from linear_attention_oracle import BF16, F32, FORM
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
    assert_close(compat._gate(g, True, a_log, bias), wanted, 1e-6)
    bounded = peer("kda.gate", "naive_kda_lowerbound_gate")
    for rate in (a_log, None):
        assert_close(compat._gate(g, True, rate, bias, -5.0), bounded(g, rate, bias, -5.0), 1e-6)
    wanted = peer("gated_delta_rule.gate", "naive_gdn_gate")(g[..., 0], a_log, bias[:3])
    assert_close(compat._gate(g[..., 0], True, a_log, bias[:3]), wanted, 1e-6)


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
    ("chunk_kda", (Q, Q[..., 0]), {"allow_neg_eigval": True}, ValueError, "allow_neg_eigval"),
    ("fused_recurrent_gated_delta_rule", (), {"use_gate_in_kernel": True}, ValueError, "g must be given"),
    ("chunk_gla", (Q[..., :2],), {}, ValueError, r"g must be \(1, 2, 2, 3\), got"),
]


@pytest.mark.parametrize(("name", "args", "options", "error", "message"), REFUSED)
def test_refused(name, args, options, error, message):
    with pytest.raises(error, match=message):
        getattr(compat, name)(Q, Q, Q, *args, **options)
