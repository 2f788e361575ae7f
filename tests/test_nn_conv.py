"""ShortConvolution: its equation, the inputs it carries, borders of sequences."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from pyops.nn import ShortConvolution

EXACT = {"rtol": 1e-12, "atol": 1e-12}


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)  # for tensors this small


def layer(channels=5, taps=4, **kwargs):
    return ShortConvolution(channels, taps, **{"dtype": torch.float64, **kwargs})


@pytest.mark.parametrize("taps", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", ["silu", None])
@pytest.mark.parametrize("length", [1, 2, 9])
def test_is_a_padded_depthwise_convolution(taps, bias, activation, length):
    conv = layer(5, taps, bias=bias, activation=activation)
    x = torch.randn(3, length, 5, dtype=torch.float64)
    padded = F.pad(x.mT, (taps - 1, 0))
    wanted = F.conv1d(padded, conv.weight, conv.bias, groups=5).mT
    wanted = F.silu(wanted) if activation else wanted
    y, state = conv(x)
    torch.testing.assert_close(y, wanted, **EXACT)
    assert torch.equal(state, padded.mT[:, length:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("length", [1, 33])
def test_dtypes(dtype, length):
    conv = layer(16, bias=True, dtype=dtype)
    x, state = torch.randn(2, length, 16, dtype=dtype), torch.randn(2, 3, 16, dtype=dtype)
    y, after = conv(x, state)
    wanted, _ = conv.double()(x.double(), state.double())
    assert y.dtype == after.dtype == dtype
    bound = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(y.double(), wanted, rtol=bound, atol=bound)
    assert torch.equal(after, torch.cat([state, x], 1)[:, -3:])


@given(st.integers(1, 5), st.lists(st.integers(0, 6), min_size=1, max_size=5))
@settings(max_examples=30, deadline=None)
def test_pieces_equal_the_whole(taps, lengths):
    conv = layer(3, taps, bias=True)
    x = torch.randn(2, sum(lengths), 3, dtype=torch.float64)
    start = torch.randn(2, taps - 1, 3, dtype=torch.float64)
    whole, wanted = conv(x, start)
    state, pieces = start, []
    for piece in x.split(lengths, 1):
        y, state = conv(piece, state)
        pieces.append(y)
    torch.testing.assert_close(torch.cat(pieces, 1), whole, **EXACT)
    assert torch.equal(state, wanted)


@given(st.integers(1, 5), st.lists(st.integers(0, 6), min_size=1, max_size=5), st.booleans())
@settings(max_examples=30, deadline=None)
def test_packed_sequences_equal_single_ones(taps, lengths, with_state):
    conv = layer(3, taps, bias=True)
    x = torch.randn(1, sum(lengths), 3, dtype=torch.float64)
    start = torch.randn(len(lengths), taps - 1, 3, dtype=torch.float64) if with_state else None
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    y, state = conv(x, start, bounds.int())
    for n, piece in enumerate(x.split(lengths, 1)):
        wanted, after = conv(piece, None if start is None else start[n : n + 1])
        torch.testing.assert_close(y[:, bounds[n] : bounds[n + 1]], wanted, **EXACT)
        assert torch.equal(state[n : n + 1], after)


def test_nan_stays_in_its_sequence():
    conv = layer(4)
    x = torch.randn(1, 9, 4, dtype=torch.float64)
    x[:, 3:6] = float("nan")
    y, state = conv(x, cu_seqlens=torch.tensor([0, 3, 6, 9]))
    assert y[:, 3:6].isnan().all() and state[1].isnan().all()
    assert y[:, :3].isfinite().all() and y[:, 6:].isfinite().all() and state[[0, 2]].isfinite().all()


@pytest.mark.parametrize("bounds", [None, [0, 3, 3, 7]])
def test_gradients(bounds):
    conv = layer(2, 3, bias=True)
    bounds = None if bounds is None else torch.tensor(bounds)
    count = 1 if bounds is None else 3
    x = torch.randn(1, 7, 2, dtype=torch.float64, requires_grad=True)
    state = torch.randn(count, 2, 2, dtype=torch.float64, requires_grad=True)

    def call(x, state, weight, bias):
        return torch.func.functional_call(conv, {"weight": weight, "bias": bias}, (x, state, bounds))

    inputs = (x, state, conv.weight, conv.bias)
    assert torch.autograd.gradcheck(call, inputs, check_undefined_grad=False)


def test_the_state_is_its_own_memory():
    conv = layer()
    x = torch.randn(2, 8, 5, dtype=torch.float64, requires_grad=True)
    start = torch.randn(2, 3, 5, dtype=torch.float64)
    grads = []
    for spoil in (False, True):
        given = start.clone()
        y, state = conv(x, given)
        assert state.untyped_storage().nbytes() <= 6 * 2 * 5 * 8
        if spoil:
            given.zero_()
            state.detach().zero_()
        grads.append(torch.autograd.grad(y.square().sum(), x)[0])
    assert torch.equal(*grads)


def test_autocast_and_the_dtype_of_the_state():
    conv = ShortConvolution(8)
    for length in (1, 5):
        with torch.autocast("cpu", torch.bfloat16):
            y, state = conv(torch.randn(1, length, 8, dtype=torch.bfloat16))
        assert y.dtype == state.dtype == torch.bfloat16
    assert conv(torch.randn(1, 5, 8), state)[0].dtype == torch.float32


@pytest.mark.parametrize("bounds", [None, torch.tensor([0, 4, 4, 9])])
def test_compiles(bounds):
    conv = ShortConvolution(6, bias=True)
    x, state = torch.randn(1, 9, 6), torch.randn(1 if bounds is None else 3, 3, 6)
    torch.compiler.reset()
    compiled = torch.compile(conv, fullgraph=True, backend="aot_eager")
    for found, wanted in zip(compiled(x, state, bounds), conv(x, state, bounds), strict=True):
        torch.testing.assert_close(found, wanted)


def test_initial_values():
    conv = ShortConvolution(512, 16, bias=True)
    for p in (conv.weight, conv.bias):
        assert 0.2 < p.abs().max() <= 0.25 and abs(p.mean()) < 0.03
    before = conv.weight.clone()
    conv.reset_parameters()
    assert not torch.equal(before, conv.weight)


X = torch.randn(1, 6, 5)
BAD = [
    (lambda c: c(None), TypeError, "x must be a torch.Tensor, got NoneType"),
    (
        lambda c: c(X.double()),
        TypeError,
        "x must have the dtype of the parameters, .*, got torch.float64",
    ),
    (
        lambda c: c(X.int()),
        TypeError,
        "x must have the dtype of the parameters, .*, got torch.int32",
    ),
    (lambda c: c(X.to("meta")), ValueError, "x must be on the device of the parameters, cpu, got meta"),
    (lambda c: c(X, 0.0), TypeError, "state must be a torch.Tensor, got float"),
    (lambda c: c(X, torch.zeros(1, 3, 5).int()), TypeError, "state must be floating, got torch.int32"),
    (lambda c: c(X, torch.zeros(1, 3, 5, device="meta")), ValueError, "state must be on the device of x"),
    (lambda c: c(X, None, torch.tensor([0, 6], device="meta")), ValueError, "cu_seqlens .* device of x, cpu"),
    (lambda c: c(X[0]), ValueError, r"x must be \[B, T, 5\], got shape \(6, 5\)"),
    (lambda c: c(X[..., :4]), ValueError, r"x must be \[B, T, 5\]"),
    (lambda c: c(X, torch.zeros(1, 4, 5)), ValueError, r"state must be \(1, 3, 5\), got shape \(1, 4, 5\)"),
    (lambda c: c(X, torch.zeros(1, 3, 5), torch.tensor([0, 3, 6])), ValueError, r"state must be \(2, 3, 5\)"),
    (lambda c: c(X, None, [0, 6]), TypeError, "cu_seqlens must be a torch.Tensor, got list"),
    (lambda c: c(X, None, torch.tensor([0.0, 6])), TypeError, "got torch.float32"),
    (lambda c: c(X, None, torch.tensor([0])), ValueError, r"cu_seqlens must be \[N \+ 1\]"),
    (lambda c: c(X, None, torch.tensor([1, 6])), ValueError, "cu_seqlens must start at 0, got 1"),
    (lambda c: c(X, None, torch.tensor([0, 5])), ValueError, "cu_seqlens must end at T = 6, got 5"),
    (
        lambda c: c(X, None, torch.tensor([0, 7, 6])),
        ValueError,
        "must not decrease, got 6 after 7",
    ),
    (lambda c: c(X.expand(2, 6, 5), None, torch.tensor([0, 6])), ValueError, "x must have a batch of 1"),
    (lambda c: ShortConvolution(5, 0), ValueError, "kernel_size must be at least 1"),
    (lambda c: ShortConvolution(5, activation="relu"), ValueError, "activation must be 'silu' or None"),
]


@pytest.mark.parametrize(("call", "error", "message"), BAD)
def test_errors(call, error, message):
    with pytest.raises(error, match=message):
        call(ShortConvolution(5))
