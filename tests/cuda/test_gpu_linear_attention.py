"""Linear attention on a CUDA device against the float64 recurrence, at the sizes its kernels are tiled for.

tests/triton/test_linear_attention.py runs the same kernels on small sizes, by the interpreter and here.
"""

import linear_attention_oracle as oracle
import pytest
import torch
from linear_attention_oracle import BF16, F16, F32, F64, FORM, FORMS, GATED
from suite import assert_same_bits

import pyops

pytestmark = pytest.mark.gpu

NAN, INF = float("nan"), float("inf")
forms = pytest.mark.parametrize("form", FORMS, ids=lambda f: f.name)
gated = pytest.mark.parametrize("form", GATED, ids=lambda f: f.name)
dtypes = pytest.mark.parametrize("dtype", [F64, F32, BF16, F16], ids=lambda d: str(d).removeprefix("torch."))


def on_gpu(tensors):
    return {name: t.cuda() for name, t in tensors.items()}


def check(tensors, form, **options):
    """Results and gradients within the gates; the oracle runs on the GPU too."""
    tensors, dtype = on_gpu(tensors), tensors["q"].dtype
    before = {name: t.clone() for name, t in tensors.items()}
    asked = {name: option for name, option in options.items() if name != "chunk_size"}
    wanted = oracle.exact(tensors, **asked)
    for name, result, reference in zip(("o", "state"), oracle.run(tensors, **options), wanted, strict=True):
        oracle.assert_within(result, reference, oracle.gate(form, dtype), f"{form.name} {name}")
    weights = [torch.randn_like(r).to(dtype).double() for r in wanted]
    exact = oracle.exact_gradients(tensors, weights, **asked)
    for name, grad in oracle.gradients(oracle.run, tensors, weights, **options).items():
        oracle.assert_within(grad, exact[name], oracle.gradient_gate(name, dtype), f"{form.name} d{name}")
    for name, t in tensors.items():
        assert_same_bits(t, before[name], f"input {name}")


def test_is_served_by_triton():
    token = torch.ones(1, 1, 1, 16, device="cuda")
    assert pyops.which("linear_attention", token, token, token) == "cuda:triton"


@dtypes
@forms
def test_against_the_recurrence(form, dtype):
    sizes = {"length": 150, "heads": 2, "values": 4, "key_dim": 64, "value_dim": 64}
    check(oracle.inputs(form, dtype, 2, **sizes), form)


@pytest.mark.parametrize(
    ("key_dim", "value_dim"), [(1, 1), (16, 200), (100, 60), (128, 128), (256, 64), (256, 256), (512, 64)]
)
@forms
def test_sizes_of_heads(form, key_dim, value_dim):
    for dtype in (BF16, F32):
        sizes = {"heads": 1, "values": 2, "key_dim": key_dim, "value_dim": value_dim}
        check(oracle.inputs(form, dtype, 1, 130, **sizes), form)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 63, 64, 65, 128, 200])
@forms
def test_sizes_around_chunks(form, length):
    for chunk_size in (None, 16, 32):
        tensors = oracle.inputs(form, F32, 1, length, 1, 32, 1, 16)
        check(tensors, form, chunk_size=chunk_size)


@forms
def test_sequences_and_strides(form):
    bounds = torch.tensor([0, 0, 1, 64, 64, 193, 200], device="cuda")
    sizes = {"length": 200, "heads": 2, "values": 4, "key_dim": 64, "value_dim": 64, "gate_heads": 2}
    tensors = oracle.inputs(form, BF16, 1, **sizes, beta_heads=2, sequences=6)
    for name in ("q", "k", "v"):
        tensors[name] = tensors[name].transpose(1, 2).contiguous().transpose(1, 2)
    check(tensors, form, cu_seqlens=bounds)


@gated
def test_resets_and_strong_decays(form):
    sizes = {"length": 200, "heads": 2, "key_dim": 64, "value_dim": 64}
    for dtype in (BF16, F32):
        tensors = oracle.inputs(form, dtype, **sizes, resets=0.05)
        tensors["g"][:, ::7] *= 1e3
        check(tensors, form)


@forms
def test_nan_reaches_only_what_it_must(form):
    sizes = {"length": 200, "heads": 2, "key_dim": 64, "value_dim": 64}
    for dtype in (BF16, F32):
        clean = on_gpu(oracle.inputs(form, dtype, **sizes))
        if form.gate:
            clean["g"][:, 110] = -INF
        good = oracle.run(clean)
        for name, index in {"v": (0, 70, 1, 3), "k": (0, 70, 1, 3), "initial_state": (0, 1, 3, 3)}.items():
            tensors = {key: t.clone() for key, t in clean.items()}
            tensors[name][index] = NAN
            o, _ = oracle.run(tensors)
            columns = slice(None) if name == "k" else 3
            hit = torch.zeros(o.shape, dtype=torch.bool)
            first = 0 if name == "initial_state" else 70
            hit[0, first : 110 if form.gate else None, 1, columns] = True
            assert o[hit].isnan().all(), f"NaN in {name} is hidden"
            rest = good[0][~hit].double()
            oracle.assert_within(o[~hit], rest, oracle.gate(form, dtype), f"o beside NaN in {name}")


@forms
def test_the_same_bits_again(form):
    """Also with other work on the device in between, and as entries of a larger batch."""
    sizes = {"length": 300, "heads": 4, "key_dim": 128, "value_dim": 128}
    tensors = on_gpu(oracle.inputs(form, BF16, 3, **sizes))
    weights = [torch.randn(3, 300, 4, 128), torch.randn(3, 4, 128, 128)]
    weights = [w.cuda() for w in weights]
    first = oracle.run(tensors), oracle.gradients(oracle.run, tensors, weights)
    torch.randn(2000, 2000, device="cuda") @ torch.randn(2000, 2000, device="cuda")
    again = oracle.run(tensors), oracle.gradients(oracle.run, tensors, weights)
    for a, b in zip(first[0], again[0], strict=True):
        assert_same_bits(a, b, "results")
    for name in first[1]:
        assert_same_bits(first[1][name], again[1][name], f"gradient of {name}")
    alone = oracle.run({name: t[1:2] for name, t in tensors.items()})
    assert_same_bits(alone[0][0], first[0][0][1], "o alone")


@dtypes
@forms
def test_steps_are_the_sequence(form, dtype):
    tensors = oracle.inputs(form, dtype, 3, 5, 2, 128, 4, 128)
    o, final = oracle.exact(tensors)
    tensors = on_gpu(tensors)
    state = tensors.pop("initial_state").to(F64 if dtype == F64 else F32)
    for t in range(5):
        token = {name: x[:, t] for name, x in tensors.items()}
        out, same = pyops.linear_attention_step(state=state, inplace=True, **token)
        assert same.data_ptr() == state.data_ptr()
        oracle.assert_within(out.cpu(), o[:, t], oracle.gate(form, dtype), f"o of token {t}")
    oracle.assert_within(state.cpu(), final, oracle.gate(form, F32), "state")


def test_current_stream_and_graph_capture():
    """Launches follow torch's stream and allocate from its pool, so a CUDA graph replays them."""
    tensors = on_gpu(oracle.inputs(FORM["gated_delta"], BF16, 1, 128, 2, 64, 2, 64))
    oracle.run(tensors)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, final = oracle.run(tensors)
    tensors["v"].copy_(torch.randn_like(tensors["v"]))
    graph.replay()
    torch.cuda.synchronize()
    wanted = oracle.run(tensors)
    assert_same_bits(o, wanted[0], "o")
    assert_same_bits(final, wanted[1], "state")


def test_more_than_two_to_the_31_elements():
    """The last head of the last entry lies beyond 32-bit offsets; it must equal that entry on its own."""
    if torch.cuda.get_device_properties(0).total_memory < 60 * 2**30:
        pytest.skip("needs 60 GiB of device memory")
    batch, length, heads, dim = 2, 2**17, 2**7, 64
    q = torch.randn(1, length, 1, dim, dtype=BF16, device="cuda").expand(batch, -1, heads, -1)
    v = torch.randn(batch, length, heads, dim, dtype=BF16, device="cuda")
    assert v.numel() == 2**31
    v = torch.cat([v, v[:, :64]], 1)
    q = torch.cat([q, q[:, :64]], 1) / 8  # materialised: its own offsets pass 2^31 as well
    g = torch.full((batch, length + 64, heads), -0.1, device="cuda")
    o, final = pyops.linear_attention(q, q, v, g=g, output_final_state=True)
    last = slice(heads - 1, heads)
    alone = pyops.linear_attention(
        q[1:, :, last], q[1:, :, last], v[1:, :, last], g=g[1:, :, last], output_final_state=True
    )
    assert_same_bits(o[1:, :, last], alone[0], "o")
    assert_same_bits(final[1:, last], alone[1], "state")


@pytest.mark.parametrize("name", ["scalar", "gated_delta"])
def test_memory(name):
    """Beyond inputs, outputs and gradients: S and dS' of every chunk, and the delta rule's U and X."""
    length, heads, dim = 2**15, 16, 128
    tensors = on_gpu(oracle.inputs(FORM[name], BF16, 1, length, heads, dim, heads, dim))
    leaves = {key: t.requires_grad_() for key, t in tensors.items()}
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    o, _ = oracle.run(leaves)
    o.backward(torch.ones_like(o))
    peak = torch.cuda.max_memory_allocated() - before
    tokens = length * heads * dim * 2
    per_chunk = 2 * (length // 64) * heads * dim * dim * 2
    assert peak <= 1.2 * (10 * tokens + per_chunk) + 2**26


def test_compiles_without_a_graph_break():
    tensors = on_gpu(oracle.inputs(FORM["gated_delta"], BF16, 1, 100, 2, 64, 2, 64))
    run = torch.compile(lambda t: oracle.run(t), fullgraph=True)
    for a, b in zip(run(tensors), oracle.run(tensors), strict=True):
        assert_same_bits(a, b, "compiled")
