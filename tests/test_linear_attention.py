"""The shared suite on every form of linear attention, and every error message of the public functions."""

import math
from pathlib import Path

import linear_attention_oracle as oracle
import pytest
import torch
from linear_attention_oracle import BF16, F16, F32, F64, FORM
from suite import Case, Spec, op_suite

import pyops

NAN, INF = math.nan, math.inf
OPTIONS = {"chunk_size": 16}  # several chunks in short sequences


def shapes_of(form, batch, length, heads, key_dim, values, value_dim, sequences=None, gate_heads=None):
    """The shapes of a form's inputs, in the order of its names."""
    gate = (batch, length, gate_heads or values)
    shapes = {
        "q": (batch, length, heads, key_dim),
        "k": (batch, length, heads, key_dim),
        "v": (batch, length, values, value_dim),
        "g": gate + ((key_dim,) if form.gate == "vector" else ()),
        "beta": (batch, length, heads),
        "initial_state": (sequences or batch, values, key_dim, value_dim),
    }
    return tuple(shapes[name] for name in form.names)


def bounds(tensors):
    """cu_seqlens for the sequences of the inputs, whose number the states tell; the second is empty."""
    length, count = tensors["q"].shape[1], tensors["initial_state"].shape[0]
    ends = [length * i // count for i in range(count + 1)]
    if count > 2:
        ends[2] = ends[1]
    return torch.tensor(ends, dtype=torch.int32, device=tensors["q"].device)


def hides(form, resets):
    """NaN in q reaches o alone, g = -inf is a reset, and a reset drops the initial state."""

    def rule(i, j, value):
        name = form.names[i]
        dropped = name == "initial_state" and resets > 0
        return dropped or (name == "q" and j == 1) or (name == "g" and value == -INF)

    return rule


def case(name, form_name, normalize=False, varlen=False, resets=0.0, **sizes):
    form = FORM[form_name]

    def named(tensors):
        return dict(zip(form.names, tensors, strict=True))

    def call(*tensors):
        given = named(tensors)
        options = OPTIONS | ({"cu_seqlens": bounds(given)} if varlen else {})
        return oracle.run(given, **options)

    def op_args(*tensors):
        given = named(tensors)
        optional = (given.get("g"), given.get("beta"), given["initial_state"])
        return *tensors[:3], *optional, bounds(given) if varlen else None, 0.3, 16

    def exact(*tensors):
        given = named(tensors)
        return oracle.recurrent(**given, cu_seqlens=bounds(given) if varlen else None)

    def make(shapes, dtype):
        shape = dict(zip(form.names, shapes, strict=True))
        batch, length, heads, key_dim = shape["q"]
        made = oracle.inputs(
            form, dtype, batch, length, heads, key_dim, *shape["v"][2:],
            gate_heads=shape["g"][2] if form.gate else None, beta_heads=heads,
            sequences=shape["initial_state"][0], resets=resets,
        )  # fmt: skip
        return tuple(t.clone() for t in made.values())

    large = {"batch": 2, "length": 150, "heads": 2, "key_dim": 24, "values": 2, "value_dim": 20}
    small = {"batch": 3, "length": 18, "heads": 1, "key_dim": 2, "values": 1, "value_dim": 2}
    if varlen:
        large |= {"batch": 1, "sequences": 4}
        small |= {"batch": 1, "sequences": 2}
    heads = {key: value for key, value in sizes.items() if key in ("heads", "values", "gate_heads")}
    return Case(
        name=name,
        op="pyops::linear_attention",
        call=call,
        op_args=op_args,
        oracle=exact,
        shapes=shapes_of(form, **(large | sizes)),
        small=shapes_of(form, **(small | heads)),
        gate=lambda dtype: oracle.gate(form, dtype),
        make=make,
        batched=not varlen,
        hides=hides(form, resets),
        result_dtypes=lambda dtype: [dtype, F64 if dtype == F64 else F32],
        gradient_gate=lambda dtype: oracle.gradient_gate("g", dtype),
    )


def normalized_case():
    """normalize=True: positive q and k, and a state that is a pair."""

    def call(q, k, v, g, s, z):
        o, (s, z) = pyops.linear_attention(
            q, k, v, g=g, initial_state=(s, z), output_final_state=True, normalize=True, **OPTIONS
        )
        return o, s, z

    def exact(q, k, v, g, s, z):
        o, s = oracle.recurrent(q, k, v, g, None, s)
        total, z = oracle.recurrent(q, k, torch.ones_like(v[..., :1]), g, None, z[..., None])
        return o / (total + 1e-10), s, z[..., 0]

    def make(shapes, dtype):
        made = oracle.inputs(FORM["scalar"], dtype, *shapes[0], *shapes[2][2:])
        q, k, v, g, s = (t.clone() for t in made.values())
        return q.abs(), k.abs(), v, g, s, s[..., 0].abs() + 0.5

    def shapes(*sizes):
        all_but_z = shapes_of(FORM["scalar"], *sizes)
        return *all_but_z, all_but_z[-1][:-1]

    def op_args(q, k, v, g, s, z):
        return q, k, v, g, None, s, None, 0.3, 16

    return Case(
        name="normalized",
        op="pyops::linear_attention",
        call=call,
        op_args=op_args,
        oracle=exact,
        shapes=shapes(2, 150, 2, 24, 2, 20),
        small=shapes(3, 18, 1, 2, 1, 2),
        gate=lambda dtype: oracle.gate(FORM["scalar"], dtype),
        make=make,
        hides=lambda i, j, value: (
            (i == 0 and j > 0)  # q
            or (i in (2, 4) and j == 2)  # v, s
            or (i == 5 and j == 1)  # z
            or (i == 3 and value == -INF)  # g
            or abs(value) == INF  # the quotient by an infinite sum is 0
        ),
        result_dtypes=lambda dtype: [dtype, *[F64 if dtype == F64 else F32] * 2],
        gradient_gate=lambda dtype: oracle.gradient_gate("g", dtype),
    )


CASES = [
    case("scalar", "scalar", heads=1, values=2),
    case("none", "none"),
    case("vector", "vector", gate_heads=1, values=2, heads=1),
    case("delta", "delta"),
    case("gated_delta", "gated_delta", heads=1, values=2),
    case("kda", "kda"),
    case("resets", "scalar", resets=0.1),
    case("kda_resets", "kda", resets=0.05),
    case("varlen", "gated_delta", varlen=True),
    case("varlen_vector", "vector", varlen=True),
    normalized_case(),
]
# [B, T, H, K, HV, V] with zeros and ones.
EDGES = [
    shapes_of(FORM["scalar"], *sizes)
    for sizes in [
        (2, 0, 1, 3, 2, 4), (0, 5, 1, 3, 1, 4), (2, 5, 1, 3, 1, 0), (1, 1, 1, 1, 1, 1), (2, 1, 1, 4, 2, 3),
        (1, 7, 1, 1, 1, 5), (1, 7, 1, 5, 1, 1), (1, 16, 1, 4, 3, 4), (1, 17, 3, 4, 3, 4),
    ]
]  # fmt: skip


def given(**changes):
    """Good inputs of [B, T, H, K] = [2, 4, 2, 3], [HV, V] = [4, 5], with some of them replaced."""
    made = {
        "q": torch.zeros(2, 4, 2, 3),
        "k": torch.zeros(2, 4, 2, 3),
        "v": torch.zeros(2, 4, 4, 5),
        **changes,
    }
    return lambda: pyops.linear_attention(**made)


def packed(cu_seqlens, **changes):
    one = {"q": torch.zeros(1, 4, 2, 3), "k": torch.zeros(1, 4, 2, 3), "v": torch.zeros(1, 4, 4, 5)}
    if isinstance(cu_seqlens, list):
        cu_seqlens = torch.tensor(cu_seqlens)
    return given(**(one | {"cu_seqlens": cu_seqlens} | changes))


def one_token(state_shape=(2, 4, 3, 5), **changes):
    made = {
        "q": torch.zeros(2, 2, 3),
        "k": torch.zeros(2, 2, 3),
        "v": torch.zeros(2, 4, 5),
        "state": torch.zeros(state_shape),
        **changes,
    }
    return lambda: pyops.linear_attention_step(**made)


zeros = torch.zeros
WRONG_VALUE = (ValueError, RuntimeError)  # values in cu_seqlens: whoever reads them raises
ERRORS = [
    (given(q=[1.0]), TypeError, "q must be a torch.Tensor, got list"),
    (given(q=zeros(2, 4, 2)), ValueError, r"q must be \[B, T, H, K\], got shape \(2, 4, 2\)"),
    (given(q=zeros(2, 4, 2, 3).int()), TypeError, "q must be float64, float32, .*, got torch.int32"),
    (given(q=zeros(2, 4, 2, 3).to_sparse()), TypeError, "q must be a dense tensor"),
    (given(k=zeros(2, 4, 2, 3, 1)), ValueError, r"k must be \[B, T, H, K\]"),
    (
        given(k=zeros(2, 4, 2, 4)),
        ValueError,
        r"k must have the shape of q, \(2, 4, 2, 3\), got \(2, 4, 2, 4\)",
    ),
    (given(k=zeros(1, 4, 2, 3)), ValueError, r"k must have the shape of q, .* got \(1, 4, 2, 3\)"),
    (
        given(k=zeros(2, 4, 2, 3).half()),
        TypeError,
        "k must have the dtype of q, torch.float32, got torch.float16",
    ),
    (given(k=zeros(2, 4, 2, 3, device="meta")), ValueError, "k must be on the device of q, cpu, got meta"),
    (given(v=zeros(2, 4, 4, 5).double()), TypeError, "v must have the dtype of q, .* got torch.float64"),
    (
        given(v=zeros(2, 3, 4, 5)),
        ValueError,
        r"v must be \[B, T, HV, V\] for q of shape .*, got .*\(2, 3, 4, 5\)",
    ),
    (
        given(v=zeros(1, 4, 4, 5)),
        ValueError,
        r"v must be \[B, T, HV, V\] for q of shape .*, got .*\(1, 4, 4, 5\)",
    ),
    (given(v=zeros(2, 4, 3, 5)), ValueError, "v must have a multiple of q's 2 heads, got 3"),
    (given(v=zeros(2, 4, 1, 5)), ValueError, "v must have a multiple of q's 2 heads, got 1"),
    (given(v=zeros(2, 4, 0, 5)), ValueError, "v must have a multiple of q's 2 heads, got 0"),
    (given(q=zeros(2, 4, 0, 3), k=zeros(2, 4, 0, 3)), ValueError, "q must have at least one head"),
    (given(g=0.5), TypeError, "g must be a torch.Tensor, got float"),
    (given(g=zeros(())), ValueError, r"g must be \[H\], \[B, T, H\] or \[B, T, H, K\].*, got shape \(\)"),
    (given(g=zeros(4, 2)), ValueError, r"g must be \[H\], .* got shape \(4, 2\)"),
    (given(g=zeros(3)), ValueError, r"g must be \[H\], .*, where H = 2 and HV = 4, got shape"),
    (given(g=zeros(1)), ValueError, r"g must be \[H\], .*, where H = 2 and HV = 4, got shape"),
    (given(g=zeros(2, 4, 1)), ValueError, r"g must be \(2, 4, 2\) or \(2, 4, 4\), got shape \(2, 4, 1\)"),
    (given(g=zeros(1, 4, 2)), ValueError, r"g must be \(2, 4, 2\) or \(2, 4, 4\), got shape \(1, 4, 2\)"),
    (given(g=zeros(2, 1, 2)), ValueError, r"g must be \(2, 4, 2\) or \(2, 4, 4\), got shape \(2, 1, 2\)"),
    (
        given(g=zeros(2, 4, 2, 1)),
        ValueError,
        r"g must be \(2, 4, 2, 3\) or \(2, 4, 4, 3\), got shape \(2, 4, 2, 1\)",
    ),
    (given(g=zeros(2, 4, 1, 3)), ValueError, r"g must be .* got shape \(2, 4, 1, 3\)"),
    (given(g=zeros(2, 4, 2).int()), TypeError, "g must be float64"),
    (given(beta=1.0), TypeError, "beta must be a torch.Tensor, got float"),
    (given(beta=zeros(2)), ValueError, r"beta must be \(2, 4, 2\) or \(2, 4, 4\), got shape \(2,\)"),
    (given(beta=zeros(2, 4, 2, 5)), ValueError, r"beta must be .*, got shape \(2, 4, 2, 5\)"),
    (
        given(beta=zeros(2, 4, 1)),
        ValueError,
        r"beta must be \(2, 4, 2\) or \(2, 4, 4\), got shape \(2, 4, 1\)",
    ),
    (given(beta=zeros(2, 5, 2)), ValueError, r"beta must be \(2, 4, 2\) or \(2, 4, 4\)"),
    (given(beta=zeros(2, 4, 2).bool()), TypeError, "beta must be float64"),
    (given(scale="1"), TypeError, "scale must be a number, got '1'"),
    (given(scale=zeros(3)), TypeError, r"scale must be a number, got a tensor of shape \(3,\)"),
    (given(normalize=zeros(3)), TypeError, r"normalize must be a bool, got a tensor of shape \(3,\)"),
    (given(chunk_size=zeros(3)), TypeError, r"chunk_size must be an integer, got a tensor of shape \(3,\)"),
    (given(scale=NAN), ValueError, "scale must be finite, got nan"),
    (given(initial_state=1.0), TypeError, "initial_state must be a torch.Tensor, got float"),
    (given(initial_state=zeros(4, 3, 5)), ValueError, r"initial_state must be \(2, 4, 3, 5\), got shape"),
    (given(initial_state=zeros(1, 4, 3, 5)), ValueError, r"initial_state must be \(2, 4, 3, 5\), got shape"),
    (given(initial_state=zeros(2, 2, 3, 5)), ValueError, r"initial_state must be \(2, 4, 3, 5\), got shape"),
    (given(initial_state=zeros(2, 4, 5, 3)), ValueError, r"initial_state must be \(2, 4, 3, 5\), got shape"),
    (given(initial_state=zeros(2, 4, 3, 5).int()), TypeError, "initial_state must be float64"),
    (given(output_final_state=1), TypeError, "output_final_state must be a bool, got 1"),
    (given(normalize=1), TypeError, "normalize must be a bool, got 1"),
    (given(normalize=True, beta=zeros(2, 4, 2)), ValueError, "normalize must be False with beta"),
    (
        given(normalize=True, initial_state=zeros(2, 4, 3, 5)),
        TypeError,
        r"initial_state must be a pair \(S, z\)",
    ),
    (
        given(normalize=True, initial_state=(zeros(2, 4, 3, 5), zeros(2, 4, 4))),
        ValueError,
        r"initial_state\[1\] must be \(2, 4, 3\), got shape \(2, 4, 4\)",
    ),
    (
        given(initial_state=(zeros(2, 4, 3, 5),) * 2),
        TypeError,
        "initial_state must be a torch.Tensor, got tuple",
    ),
    (given(chunk_size=48), ValueError, "chunk_size must be a power of two, got 48"),
    (given(chunk_size=0), ValueError, "chunk_size must be a power of two, got 0"),
    (given(chunk_size=-16), ValueError, "chunk_size must be a power of two, got -16"),
    (given(scale=10**400), ValueError, "scale must be a number that a float can hold"),
    (given(chunk_size=16.0), TypeError, "chunk_size must be an integer, got 16.0"),
    (packed([0, 4], initial_state=zeros(2, 4, 3, 5)), ValueError, r"initial_state must be \(1, 4, 3, 5\)"),
    (given(cu_seqlens=torch.tensor([0, 4])), ValueError, "q must have a batch of 1 with cu_seqlens, got"),
    (packed((0, 4)), TypeError, "cu_seqlens must be a torch.Tensor, got tuple"),
    (packed(zeros(2)), TypeError, "cu_seqlens must be int32 or int64, got torch.float32"),
    (packed([[0, 4]]), ValueError, r"cu_seqlens must be \[N \+ 1\]"),
    (packed([0]), ValueError, r"cu_seqlens must be \[N \+ 1\] with N >= 1"),
    (packed([1, 4]), WRONG_VALUE, "cu_seqlens must start at 0, got 1"),
    (packed([0, 3]), WRONG_VALUE, "cu_seqlens must end at .*4, got 3"),
    (packed([0, 5]), WRONG_VALUE, "cu_seqlens must end at .*4, got 5"),
    (packed([0, 3, 2, 4]), WRONG_VALUE, "cu_seqlens must not decrease, got 2"),
    (packed([0, 2**40, 4]), WRONG_VALUE, "cu_seqlens must not decrease, got 4"),
    (packed([0, -1, 4]), WRONG_VALUE, "cu_seqlens must not decrease, got -1"),
    (one_token(q=zeros(2, 1, 2, 3)), ValueError, r"q must be \[B, H, K\]"),
    (one_token(v=zeros(3, 4, 5)), ValueError, r"v must be \[B, HV, V\]"),
    (one_token(g=zeros(2, 3)), ValueError, r"g must be \(2, 2\) or \(2, 4\), got shape \(2, 3\)"),
    (one_token(g=zeros(1)), ValueError, r"g must be \[H\], .*, where H = 2 and HV = 4, got shape"),
    (one_token(beta=zeros(2)), ValueError, r"beta must be \(2, 2\) or \(2, 4\), got shape \(2,\)"),
    (one_token(inplace=1), TypeError, "inplace must be a bool, got 1"),
    (one_token(state=None), TypeError, "state must be a torch.Tensor, got NoneType"),
    (one_token((1, 4, 3, 5)), ValueError, r"state must be \(2, 4, 3, 5\), got shape \(1, 4, 3, 5\)"),
    (
        one_token(state=zeros(2, 4, 3, 5).half(), inplace=True),
        TypeError,
        "state must be torch.float32 with inplace",
    ),
    (
        one_token(state=zeros(2, 4, 3, 5).to(torch.complex64).conj().imag, inplace=True),
        ValueError,
        "state must not be a negated view",
    ),
    (
        one_token(q=zeros(2, 2, 3).requires_grad_(), inplace=True),
        RuntimeError,
        "inplace=True records no gradient",
    ),
]
OTHERS = [
    str(Path(__file__).with_name(f"test_linear_attention_{name}.py"))
    for name in ("forms", "edges", "contained", "step")
]
ALSO = "test_form or test_step or test_contained or test_reset or test_sizes"
TestLinearAttention = op_suite(Spec(CASES, EDGES, ERRORS, [__file__, *OTHERS], ALSO), "TestLinearAttention")


def test_which_says_where_amx_serves():
    """AMX multiplies bfloat16 where no size is below 32; the other dtypes have the vector units."""
    cu_seqlens = torch.tensor([0, 31, 62])

    def served(dtype, length, key_dim, value_dim, cu_seqlens=None):
        q, v = (torch.zeros(1, length, 1, size, dtype=dtype) for size in (key_dim, value_dim))
        return pyops.which("linear_attention", q, q, v, None, None, None, cu_seqlens, 1.0, 0)

    vector = served(F32, 64, 64, 64)
    assert all(served(dtype, 64, 64, 64) == vector for dtype in (F64, F16))
    assert served(BF16, 64, 64, 64) in (vector, "cpu:amx")
    for sizes in ((31, 64, 64), (64, 31, 64), (64, 64, 31), (62, 64, 64, cu_seqlens)):
        assert served(BF16, *sizes) == vector


@pytest.mark.parametrize("name", ["linear_attention", "linear_attention_backward", "linear_attention_step_"])
def test_ops_exist(name):
    assert hasattr(torch.ops.pyops, name) and pyops.which(name, zeros(1), zeros(1), zeros(1))
