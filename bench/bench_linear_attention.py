"""Linear attention against its peers: scalar and vector decay, the gated delta rule, decoding, and memory.

Every result, gradients included, is checked against the recurrence token after token in float64 before
anything is timed. Plain torch has its fastest layout, and is there as one peer per chunk size
and way of writing it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from bench import linear_attention_peers as peers
from bench import measure
from bench.case import Case, Impl, Runner, later

# Bounds on the relative error of the worst of o and the gradients; that of g is a long sum with cancellation.
FORWARD_ERROR = {torch.float32: 3e-6, torch.bfloat16: 6e-3}
BACKWARD_ERROR = {torch.float32: 3e-5, torch.bfloat16: 2e-2}
BF16_PEER_ERROR = 3e-2  # peers that keep bf16 between their products, or a state in bf16
KINDS = {"scalar": "scalar decay", "vector": "vector decay", "delta": "gated delta"}
CHUNK = 32  # of the roofline's algorithm: the smallest that fills the matrix units
LONG = 131072


class Shape(NamedTuple):
    kind: str  # scalar, vector or delta
    batch: int
    length: int
    heads: int
    key: int
    value: int
    dtype: torch.dtype = torch.float32


def flops(s: Shape, backward: bool) -> float:
    """The chunked form, products of triangles at half price; the backward pass computes the states again."""
    half, pair, outer = 0.5 * CHUNK, s.key + s.value, s.key * s.value
    each = 2 * half * pair + 4 * outer
    extra = 2 * half * (s.key + pair) + 2 * outer + CHUNK**2 / 3  # scores of k, [U | W], W S, the inverse
    if s.kind == "delta":
        each += extra
    if backward:
        each += half * (6 * s.key + 4 * s.value) + 10 * outer
    if backward and s.kind == "delta":  # again, then W, X, Y, the inverse, the scores of k, and the state
        each += extra + half * (4 * pair + 4 * CHUNK + 4 * s.key) + 4 * outer
    return float(s.batch * s.heads * s.length * each)


def least_bytes(s: Shape, backward: bool) -> float:
    """Each input, result and gradient once; the backward pass reads the inputs again."""
    gates = {"scalar": 4, "vector": 4 * s.key, "delta": 8}[s.kind]
    each = 2 * (s.key + s.value) * s.dtype.itemsize + gates
    if backward:
        each += (4 * s.key + 3 * s.value) * s.dtype.itemsize + 2 * gates
    return float(s.batch * s.heads * (s.length * each + 8 * s.key * s.value))


def inputs(s: Shape, backward: bool, device: str) -> Callable[[torch.Generator], tuple]:
    """q, k, v, g, beta for the delta rule, the gradient of o for the backward pass, as layers make them: k of
    norm 1 for the delta rule, decays by a log-sigmoid (a sixteenth of it for each channel, as in GLA)."""

    def make(generator: torch.Generator) -> tuple[Tensor, ...]:
        def normal(*shape: int) -> Tensor:
            return torch.randn(s.batch, s.length, s.heads, *shape, generator=generator, device=device)

        q, k, v = (normal(width).to(s.dtype) for width in (s.key, s.key, s.value))
        g = F.logsigmoid(normal(s.key)) / 16 if s.kind == "vector" else F.logsigmoid(normal() + 3)
        beta = ()
        if s.kind == "delta":
            k, beta = F.normalize(k.float(), dim=-1).to(s.dtype), (normal().sigmoid(),)
        return (q, k, v, g, *beta, *((normal(s.value).to(s.dtype),) if backward else ()))

    return make


# ---- what is right


class Oracle:
    """The worst relative error of o and the gradients against the token loop in float64, which runs once per
    input for all implementations of a case."""

    def __init__(self, backward: bool) -> None:
        self.backward = backward
        self.known: tuple = (None, ())

    def exact(self, data: tuple) -> tuple[Tensor, ...]:
        if self.known[0] is not data[0]:
            wide = [peers.heads_first(t.double()) for t in data]
            function = peers.checkpointed_loop if self.backward else peers.token_loop
            made = peers.runner(function, self.backward)
            found = made.run(*made.prepare(*wide))
            found = found if self.backward else (found,)
            self.known = data[0], tuple(peers.heads_last(t, data[0].shape[0]) for t in found)
        return self.known[1]

    def __call__(
        self, data: tuple, output: Tensor | tuple, head_first: bool = False, fewer: bool = False
    ) -> float:
        """fewer: the implementation has other inputs than ours after q and k, so v and g are not compared."""
        got = output if isinstance(output, tuple) else (output,)
        if head_first:
            got = tuple(peers.heads_last(t, data[0].shape[0]) for t in got)
        wanted = self.exact(data)
        assert len(got) == len(wanted), f"{len(got)} results, wanted {len(wanted)}"
        if fewer:
            got, wanted = got[:3], wanted[:3]
        return worst(map(relative_error, got, wanted))


def worst(errors: Iterable[float]) -> float:
    """The largest; NaN if there is one, which Python's max would drop."""
    return float(torch.tensor([*errors], dtype=torch.float64).max())


def relative_error(got: Tensor, wanted: Tensor) -> float:
    assert got.shape == wanted.shape, f"shape {tuple(got.shape)}, wanted {tuple(wanted.shape)}"
    return float(torch.linalg.vector_norm(got.double() - wanted) / torch.linalg.vector_norm(wanted))


def softmax_error(data: tuple, output: Tensor | tuple) -> float:
    """Of the first head of o."""
    q, k, v = (t[0, :, 0].double() for t in data[:3])
    o = output[0] if isinstance(output, tuple) else output
    scores = (q @ k.mT * q.shape[1] ** -0.5).masked_fill(torch.ones_like(q @ k.mT).triu(1).bool(), -torch.inf)
    return relative_error(o[0, 0], scores.softmax(-1) @ v)


# ---- cases


def attention(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None = None) -> Tensor:
    import pyops

    return pyops.linear_attention(q, k, v, g=g, beta=beta)[0]


Against = Callable[[Oracle], tuple[Impl, ...]]


def attention_case(
    s: Shape, backward: bool, against: Against, suffix: str = "", device: str = "cpu", **more
) -> Case:
    oracle, make = Oracle(backward), inputs(s, backward, device)
    small = inputs(s._replace(length=min(s.length, 256)), backward, device)

    def served() -> str:
        import pyops

        q, k, v, g, *rest = small(torch.Generator(device=device).manual_seed(0))
        beta = rest[0] if s.kind == "delta" else None
        return pyops.which("linear_attention", q, k, v, g, beta, None, None, s.key**-0.5, 0)

    dtype = str(s.dtype).removeprefix("torch.")
    return Case(
        op="linear_attention",
        name=f"{KINDS[s.kind]} {dtype} {size(s)}, {'forward + backward' if backward else 'forward'}{suffix}",
        compute=dtype,
        inputs=make,
        small_inputs=small,
        ours=Impl("pyops.linear_attention", lambda: peers.runner(attention, backward)),
        peers=against(oracle),
        flops=flops(s, backward),
        bytes=least_bytes(s, backward),
        check=oracle,
        error_bound=(BACKWARD_ERROR if backward else FORWARD_ERROR)[s.dtype],
        served_by=served,
        **more,
    )


def size(s: Shape) -> str:
    widths = f"{s.key}" if s.key == s.value else f"{s.key}x{s.value}"
    return f"{s.batch}x{s.length}x{s.heads}x{widths}"


def chunks(
    kind: str,
    backward: bool,
    scale: str,
    listed: Sequence[str],
    dtype: torch.dtype | None = None,
    error: float | None = None,
) -> Against:
    """Plain torch, each named by way, chunk size and perhaps "compiled"."""

    def against(oracle: Oracle) -> tuple[Impl, ...]:
        check = functools.partial(oracle, head_first=True)
        out = {}
        for words in map(str.split, listed):
            length = 16 if scale == "tiny" else int(words[1])
            compiled = "compiled" in words
            impl = peers.torch_chunks(kind, words[0], length, backward, check, compiled, dtype, error)
            out[impl.name] = later(impl) if compiled and scale == "quick" else impl
        return tuple(out.values())

    return against


def libraries(kind: str, backward: bool, device: str) -> Against:
    """Packages, whose kernels need a GPU and are named as missing elsewhere; on a GPU flash attention too."""

    def against(oracle: Oracle) -> tuple[Impl, ...]:
        out = [peers.flash_linear_attention(kind, backward, device, BF16_PEER_ERROR)]
        if kind == "scalar":
            out.append(peers.mamba(backward, device, functools.partial(oracle, fewer=True), BF16_PEER_ERROR))
        if device == "cuda":
            out.append(peers.sdpa(backward, softmax_error, BF16_PEER_ERROR))
        return tuple(out)

    return against


def together(*sets: Against) -> Against:
    return lambda oracle: tuple(impl for each in sets for impl in each(oracle))


# ---- decoding


def decode_inputs(s: Shape, device: str) -> Callable[[torch.Generator], tuple]:
    def make(generator: torch.Generator) -> tuple[Tensor, ...]:
        def normal(*shape: int) -> Tensor:
            return torch.randn(s.batch, s.heads, *shape, generator=generator, device=device)

        q, k, v = (normal(width).to(s.dtype) for width in (s.key, s.key, s.value))
        return q, k, v, F.logsigmoid(normal() + 3), normal(s.key, s.value)

    return make


def decode_error(data: tuple, output: tuple) -> float:
    """Of o and of the state after it; plain torch has batch and heads in one dimension."""
    q, k, v, g, state = (t.flatten(0, 1).double() for t in data)
    o, after = peers.token(state, q, k, v, g.exp()[:, None, None])
    wanted = (q.shape[1] ** -0.5 * o, after)
    return worst(relative_error(x.reshape(y.shape), y) for x, y in zip(output, wanted, strict=True))


def decode_case(s: Shape, against: tuple[Impl, ...], suffix: str = "", device: str = "cpu", **more) -> Case:
    make = decode_inputs(s, device)

    def build() -> Runner:
        import pyops

        return Runner(
            lambda q, k, v, g, state: pyops.linear_attention_step(q, k, v, state, g=g, inplace=True)
        )

    def served() -> str:
        import pyops

        q, k, v, g, state = make(torch.Generator(device=device).manual_seed(0))
        return pyops.which("linear_attention_step_", q, k, v, g, None, state, s.key**-0.5)

    dtype = str(s.dtype).removeprefix("torch.")
    return Case(
        op="linear_attention",
        name=f"decode step, scalar decay {dtype} {s.batch}x{s.heads}x{s.key}{suffix}",
        compute=dtype,
        inputs=make,
        ours=Impl("pyops.linear_attention_step", build),
        peers=against,
        flops=4.0 * s.batch * s.heads * s.key * s.value,
        bytes=8.0 * s.batch * s.heads * s.key * s.value,
        check=decode_error,
        error_bound=FORWARD_ERROR[s.dtype],
        served_by=served,
        note="Every call has a state of its own: as in a model of many layers, it is not in the L2 cache.",
        **more,
    )


# ---- memory


def memory_case(s: Shape) -> Case:
    """Forward and backward pass; the error is the peak of extra memory as a share of what is allowed.

    The first outputs and the last gradients of v, which tokens elsewhere do not reach, are checked.
    """
    make = inputs(s, True, "cpu")
    fixed = functools.cache(lambda: make(torch.Generator().manual_seed(0)))
    tokens = s.batch * s.heads * s.length
    held = 3 * tokens * s.dtype.itemsize * s.value + 4 * tokens * s.dtype.itemsize * s.key + 8 * tokens
    allowed = 1.2 * held + 200e6

    def build() -> Runner:
        both = peers.runner(attention, True)

        def run(*args: Tensor) -> tuple[int, tuple[Tensor, ...]]:
            results: list[tuple[Tensor, ...]] = []
            return measure.extra_bytes_cpu(lambda: results.append(both.run(*args))), results[0]

        return Runner(run, both.prepare)

    def check(data: tuple, output: tuple) -> float:
        extra, (o, _, _, dv, _) = output
        oracle, part = Oracle(True), min(s.length, 256)
        first, last = slice(part), slice(s.length - part, None)
        for got, at, which in ((o, first, 0), (dv, last, 3)):
            error = relative_error(got[:, at], oracle.exact(tuple(t[:, at] for t in data))[which])
            assert error <= BACKWARD_ERROR[s.dtype], f"error {error:.3g}"
        return extra / allowed

    return Case(
        op="linear_attention",
        name=f"memory of forward + backward, {size(s)} within {allowed / 2**20:.0f} MB",
        compute=str(s.dtype).removeprefix("torch."),
        inputs=lambda generator: fixed(),
        small_inputs=inputs(s._replace(length=min(s.length, 256)), True, "cpu"),
        ours=Impl("pyops.linear_attention", build, note="error: share of the allowed memory"),
        peers=(),
        flops=flops(s, True),
        bytes=least_bytes(s, True),
        check=check,
        error_bound=1.0,
        rounds=1,
        env=measure.MEMORY_ENV,
        note="Allowed: 1.2 (inputs + outputs + gradients) + 200 MB.",
    )


# ---- what is shown


def plain_decode(s: Shape, scale: str) -> tuple[Impl, ...]:
    compiled = peers.torch_token("compiled")
    return (
        peers.torch_token(),
        peers.torch_token("in place"),
        later(compiled) if scale == "quick" else compiled,
    )


def cpu_cases(scale: str) -> list[Case]:
    """The promised table. Where two promises are of one shape, each is a case with its own peers."""
    long = LONG
    narrow, wide = (Shape("scalar", 1, 2048, 16, width, width) for width in (64, 128))
    if scale == "tiny":
        narrow, wide, long = Shape("scalar", 1, 64, 2, 16, 16), Shape("scalar", 1, 64, 2, 32, 32), 256
    short = narrow._replace(dtype=torch.bfloat16)
    channels, corrected = narrow._replace(kind="vector"), wide._replace(kind="delta")
    rounds = {"rounds": {"full": 25, "quick": 7, "tiny": 1}[scale]}
    slower = {"rounds": {"full": 11, "quick": 3, "tiny": 1}[scale]}

    def plain(kind: str, backward: bool, *listed: str, **more) -> Against:
        return chunks(kind, backward, scale, listed, **more)

    def softmax(error: float, backward: bool = False) -> Against:
        return lambda oracle: (peers.sdpa(backward, softmax_error, error),)

    usual = f"torch indexed loop over chunks of {16 if scale == 'tiny' else 64}"
    forward = ("loop 32", "loop 64", "batched 64", "loop 64 compiled", "batched 64 compiled",
               "batched 128 compiled")  # fmt: skip
    both = ("loop 64", "batched 64", "loop 32 compiled", "loop 64 compiled", "batched 64 compiled")
    few = ("loop 64", "batched 64", "loop 64 compiled", "batched 64 compiled")
    # With the delta rule the batched form unrolls a scan of products: compiled for minutes, and no faster.
    solved = ("loop 64", "batched 64", "loop 64 compiled")
    packages = functools.partial(libraries, device="cpu")
    listed = [
        attention_case(
            narrow, False,
            together(plain("scalar", False, *forward), softmax(1e-5), packages("scalar", False)),
            bar=(2.2, "best"), **rounds),
        attention_case(
            narrow, False, lambda oracle: (peers.torch_tokens(functools.partial(oracle, head_first=True)),),
            ", token loop", bar=(20, "torch token loop"), **slower),
        attention_case(
            short, False, plain("scalar", False, *forward, dtype=torch.float32), ", against float32",
            bar=(5, "best"), **rounds),
        attention_case(
            short, False,
            together(plain("scalar", False, *forward, error=BF16_PEER_ERROR), softmax(BF16_PEER_ERROR)),
            **rounds),
        attention_case(
            narrow, True, plain("scalar", True, "indexed 64"), ", indexed loop", bar=(16, usual), **slower),
        attention_case(
            narrow, True,
            together(plain("scalar", True, *both), softmax(1e-5, True), packages("scalar", True)),
            bar=(3, "best"), **slower),
        attention_case(
            wide, True, plain("scalar", True, "indexed 64", *both), bar=(12, usual), **slower),
        attention_case(
            channels, True,
            together(plain("vector", True, "indexed 64", *few),
                     plain("vector, any decay", True, "loop 64", "batched 64 compiled"),
                     packages("vector", True)),
            bar=(10, usual), **slower),
        attention_case(
            corrected, False,
            together(plain("delta", False, "indexed 64", *solved), packages("delta", False)),
            bar=(3, "best"), **slower),
        attention_case(
            corrected, True,
            together(plain("delta", True, "indexed 64", *solved), packages("delta", True)),
            bar=(8, usual), **slower),
        decode_case(wide, plain_decode(wide, scale), bar=(3, "torch expression"), **rounds),
        decode_case(wide._replace(batch=32), plain_decode(wide, scale), **rounds),
        decode_case(wide._replace(batch=32), (peers.copy_of_state(),), ", share of copy bandwidth",
                    bar=(0.6, "copy of the state"), **rounds),
    ]  # fmt: skip
    return listed if scale == "quick" else [*listed, memory_case(narrow._replace(length=long))]


def cuda_cases(scale: str) -> list[Case]:
    narrow, wide = (Shape("scalar", 4, 4096, 16, width, width, torch.bfloat16) for width in (64, 128))
    rounds = {"rounds": 15 if scale == "full" else 7}

    def case(s: Shape, backward: bool) -> Case:
        compiled = () if s.kind == "delta" else ("batched 64 compiled", "batched 128 compiled")
        plain = chunks(s.kind, backward, scale, ("batched 64", *compiled), error=BF16_PEER_ERROR)
        return attention_case(
            s, backward, together(plain, libraries(s.kind, backward, "cuda")), device="cuda", **rounds
        )

    shown = [
        narrow,
        wide,
        narrow._replace(kind="vector"),
        wide._replace(kind="vector"),
        wide._replace(kind="delta"),
    ]
    shown = shown if scale == "full" else [narrow, shown[3], shown[4]]
    steps = [
        wide._replace(batch=batch, dtype=torch.float32)
        for batch in ((1, 64, 1024) if scale == "full" else (64,))
    ]
    return [
        *(case(s, backward) for s in shown for backward in (False, True)),
        *(decode_case(s, plain_decode(s, scale), device="cuda", **rounds) for s in steps),
    ]


def cases(device: str, scale: str) -> list[Case]:
    return cuda_cases(scale) if device == "cuda" else cpu_cases(scale)


def test_linear_attention(measured, case, impl):
    measured(case, impl)
