"""The checks that every op passes, written once.

An op joins by describing itself: a :class:`Case` per way of calling it, and one :class:`Spec` for its edge
shapes and its error messages. ``op_suite`` makes the test class:

    TestPolar = op_suite(Spec(cases=[Case(...), ...], edges=[...], errors=[...], files=[__file__]), name)

Every check is also a plain function of a case, so that ``test_suite_catches.py`` can hand it broken ops and
see it fail.
"""

from __future__ import annotations

import copy
import multiprocessing
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

ALL_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
ISAS = ("default", "avx2", "avx512")
ROOT = Path(__file__).resolve().parent.parent

# Unit roundoff: what one rounding to the dtype can do to a number, relative. Gates are multiples of it.
UNIT = {torch.float64: 1.1e-16, torch.float32: 6e-8, torch.bfloat16: 2e-3, torch.float16: 4.9e-4}


def normal(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Gaussian inputs; the test's seed decides them."""
    return tuple(torch.randn(shape, dtype=torch.float64).to(dtype) for shape in shapes)


@dataclass(frozen=True)
class Case:
    """One way of calling an op.

    Args:
        name: as in the test's name.
        op: qualified name, ``"pyops::polar"``.
        call: the public function, of the input tensors alone.
        op_args: the arguments of the op itself, from the same tensors.
        oracle: float64 result from float64 tensors, by another way than the kernel's.
        shapes: of the inputs, as large as the accuracy check wants them; the first dimension counts
            independent problems if ``batched``.
        small: shapes for the checks that call the op often, at least 3 in the first dimension if ``batched``.
        gate: largest relative Frobenius error for a dtype.
        dtypes: that the case accepts.
        make: inputs from shapes and dtype.
        batched: whether entries of the first dimension are independent; decides the checks of vmap, of NaN
            containment and of independence from the batch.
        hides: whether output j may stay finite where input i holds a value (i, j, value), as sign(inf) does.
        result_dtypes: of the outputs for inputs made in a dtype; default that dtype for all.
        differentiable: whether gradients are checked.
        second: what a second derivative does: ``"works"`` or ``"raises"``.
        gradient_gate: as ``gate``, for gradients; default ten times ``gate``.
    """

    name: str
    op: str
    call: Callable[..., Tensor | tuple[Tensor, ...]]
    op_args: Callable[..., tuple]
    oracle: Callable[..., Tensor | tuple[Tensor, ...]]
    shapes: tuple[tuple[int, ...], ...]
    small: tuple[tuple[int, ...], ...]
    gate: Callable[[torch.dtype], float]
    dtypes: Sequence[torch.dtype] = ALL_DTYPES
    make: Callable[..., tuple[Tensor, ...]] = normal
    batched: bool = True
    hides: Callable[[int, int, float], bool] = lambda i, j, value: False
    result_dtypes: Callable[[torch.dtype], Sequence[torch.dtype]] | None = None
    differentiable: bool = True
    second: str = "raises"
    gradient_gate: Callable[[torch.dtype], float] | None = None

    def overload(self):
        namespace, name = self.op.split("::")
        return getattr(getattr(torch.ops, namespace), name).default

    def inputs(self, dtype=torch.float64):
        return self.make(self.small, dtype)

    def dtypes_of(self, results: Sequence[Tensor], dtype: torch.dtype) -> Sequence[torch.dtype]:
        """What results must have for inputs made in a dtype."""
        return self.result_dtypes(dtype) if self.result_dtypes else [dtype] * len(results)


@dataclass(frozen=True)
class Spec:
    """An op's cases, and what belongs to the op and not to one case.

    Args:
        cases: the first one is also compiled with dynamic shapes, and by inductor.
        edges: input shapes with sizes of zero and one; the first case's call and oracle serve them.
        errors: (call without arguments, exception type, pattern of its message), each raised before any work.
        files: test modules to run again for every instruction set, its own first; () where another suite of
            the module has it.
        also: names of further tests of those modules to run again, as in pytest's ``-k``.
    """

    cases: Sequence[Case]
    edges: Sequence[tuple[tuple[int, ...], ...]]
    errors: Sequence[tuple[Callable[[], object], type[Exception], str]]
    files: Sequence[str] = ()
    also: str = ""


def outputs(result: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else tuple(result)


def relative_error(result: Tensor, reference: Tensor) -> float:
    """||result - reference||_F / ||reference||_F in float64; NaN gives NaN, which no gate lets pass."""
    assert result.shape == reference.shape, f"shape {tuple(result.shape)}, not {tuple(reference.shape)}"
    reference = reference.double()
    norm = torch.linalg.vector_norm(reference)
    assert norm > 0, "a reference of zeros would let an op that writes zeros pass"
    return (torch.linalg.vector_norm(result.double() - reference) / norm).item()


def assert_close(result: Tensor, reference: Tensor, gate: float, what: str = "relative error") -> None:
    error = relative_error(result, reference)
    assert error <= gate, f"{what} {error:.3g} is above its gate {gate:.3g}"


def bits(t: Tensor) -> Tensor:
    """The bit pattern, so that equal means equal: NaN equals itself and -0 is not 0."""
    size = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[t.element_size()]
    return t.detach().contiguous().view(size)


class LargestTensor(TorchDispatchMode):
    """The bytes of the largest tensor that an op made inside the block, without the scratch of kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, tuple | list) else [out]:
            if isinstance(t, Tensor):
                self.bytes = max(self.bytes, t.untyped_storage().nbytes())
        return out


def assert_same_bits(a: Tensor | tuple[Tensor, ...], b: Tensor | tuple[Tensor, ...], what: str) -> None:
    for x, y in zip(outputs(a), outputs(b), strict=True):
        assert x.shape == y.shape and x.dtype == y.dtype, f"{what}: {x.shape} {x.dtype}, {y.shape} {y.dtype}"
        assert torch.equal(bits(x), bits(y)), f"{what}: {(bits(x) != bits(y)).sum()} of {x.numel()} differ"


# The checks


def check_accuracy(case: Case, dtype: torch.dtype) -> None:
    """Within the gate of the float64 oracle on the rounded inputs, in the right dtype, inputs untouched."""
    tensors = case.make(case.shapes, dtype)
    before = [t.clone() for t in tensors]
    results = outputs(case.call(*tensors))
    assert_same_bits(tuple(tensors), tuple(before), "inputs were written to")
    assert all(t._version == 0 for t in tensors), "inputs were marked as written to"
    references = outputs(case.oracle(*(t.double() for t in tensors)))
    wanted_dtypes = case.dtypes_of(results, dtype)
    for result, reference, wanted_dtype in zip(results, references, wanted_dtypes, strict=True):
        assert result.dtype == wanted_dtype, f"result in {result.dtype} for inputs in {dtype}"
        pairs = zip(result, reference, strict=True) if case.batched else [(result, reference)]
        for one, wanted in pairs:
            assert_close(one, wanted, case.gate(dtype))


def check_edge(case: Case, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> None:
    """Sizes of zero: an empty result of the right shape and dtype. Sizes of one: as any other size."""
    tensors = case.make(shapes, dtype)
    references = outputs(case.oracle(*(t.double() for t in tensors)))
    results = outputs(case.call(*tensors))
    for result, wanted, wanted_dtype in zip(results, references, case.dtypes_of(results, dtype), strict=True):
        assert result.shape == wanted.shape and result.dtype == wanted_dtype
        if wanted.numel() > 0:
            assert_close(result, wanted, case.gate(dtype))


def memory(view: Tensor) -> Tensor:
    """All bytes of the storage of a view, those between its elements too."""
    return torch.empty(0, dtype=torch.uint8).set_(view.untyped_storage())


def layouts(x: Tensor) -> dict[str, Tensor]:
    """The values of x in other memory layouts."""
    spaced = torch.full((*x.shape[:-1], 2 * x.shape[-1]), 7.0, dtype=x.dtype)[..., ::2]
    rows = torch.full((*x.shape[:-2], x.shape[-2] + 3, x.shape[-1] + 5), 7.0, dtype=x.dtype)
    offset = torch.full((x.numel() + 3,), 7.0, dtype=x.dtype)[3:].view(x.shape)
    reversed_dims = torch.full(x.shape[::-1], 7.0, dtype=x.dtype).permute(*reversed(range(x.ndim)))
    found = {
        "transposed": x.mT.contiguous().mT,
        "every second element": spaced.copy_(x),
        "slice": rows[..., 2:-1, 1:-4].copy_(x),
        "storage offset": offset.copy_(x),
        "reversed dimensions": reversed_dims.copy_(x),
    }
    assert all(torch.equal(v, x) for v in found.values())
    return found


def check_layouts(case: Case, dtype: torch.dtype) -> None:
    """The same bits whatever the strides of the inputs, whose memory stays as it was."""
    tensors = case.inputs(dtype)
    wanted = case.call(*tensors)
    for name in layouts(tensors[0]):
        views = tuple(layouts(t)[name] for t in tensors)
        storages = [memory(v).clone() for v in views]
        assert_same_bits(case.call(*views), wanted, name)
        same = all(torch.equal(memory(v), s) for v, s in zip(views, storages, strict=True))
        assert same, f"{name}: inputs, or memory between their elements, were written to"
    expanded = tuple(t[:1].expand(t.shape) for t in tensors)
    assert_same_bits(case.call(*expanded), case.call(*(t.contiguous() for t in expanded)), "expanded")


def check_huge(case: Case, dtype: torch.dtype, folder: Path) -> None:
    """Inputs above element 2^31 of their storage, and first strides above 2^31, in sparse files."""
    tensors = tuple(t[:2] for t in case.inputs(dtype))
    wanted = case.call(*tensors)
    for name, offset, stride in (("offset", 2**31 + 5, None), ("stride", 1, 2**31 + 7)):
        views = []
        for i, t in enumerate(tensors):
            strides = (stride or t.stride(0), *t.stride()[1:])
            span = offset + (t.shape[0] - 1) * strides[0] + t[0].numel()
            path = folder / f"{name}{i}"
            with path.open("wb") as file:
                file.truncate(span * t.element_size())
            memory = torch.from_file(str(path), shared=True, size=span, dtype=t.dtype)
            views.append(memory.as_strided(t.shape, strides, offset).copy_(t))
        assert_same_bits(case.call(*views), wanted, f"huge {name}")


def check_deterministic(case: Case, dtype: torch.dtype) -> None:
    """The same bits in every run, for one thread and two, and for each problem alone as within its batch."""
    tensors = case.make(case.shapes, dtype)
    wanted = case.call(*tensors)
    for threads in (1, 2, 2, 1):
        torch.set_num_threads(threads)
        assert_same_bits(case.call(*tensors), wanted, f"{threads} threads")
    if case.batched:
        alone = outputs(case.call(*(t[1:2] for t in tensors)))
        assert_same_bits(alone, tuple(w[1:2] for w in outputs(wanted)), "a problem alone")


def check_nan(case: Case, dtype: torch.dtype) -> None:
    """NaN or Inf in one problem of a batch reaches that problem's result and no other's."""
    clean = case.inputs(dtype)
    wanted = outputs(case.call(*clean))
    for i in range(len(clean)):
        for value in (float("nan"), float("inf"), float("-inf")):
            tensors = tuple(t.clone() for t in clean)
            tensors[i][1].view(-1)[-1] = value
            for j, (result, good) in enumerate(zip(outputs(case.call(*tensors)), wanted, strict=True)):
                others = [n for n in range(len(good)) if n != 1]
                assert_same_bits(result[others], good[others], f"{value} in its neighbour")
                hidden = result[1].isfinite().all() and not case.hides(i, j, value)
                assert not hidden, f"{value} is hidden by the result"


def check_gradcheck(case: Case) -> None:
    tensors = tuple(t.requires_grad_() for t in case.inputs())
    assert torch.autograd.gradcheck(case.call, tensors)


def gradients(case: Case, dtype: torch.dtype, call: Callable) -> tuple[Tensor, ...]:
    torch.manual_seed(1)
    tensors = tuple(t.to(torch.bfloat16).to(dtype).requires_grad_() for t in case.inputs(torch.bfloat16))
    results = outputs(call(*tensors))
    weights = [torch.randn(r.shape, dtype=torch.float64).to(torch.bfloat16).to(r.dtype) for r in results]
    return torch.autograd.grad(results, tensors, weights)


def check_gradients(case: Case, dtype: torch.dtype) -> None:
    """Gradients in each dtype against those in float64, which gradcheck has checked."""
    gate = (case.gradient_gate or (lambda d: 10 * case.gate(d)))(dtype)
    for low, high in zip(
        gradients(case, dtype, case.call), gradients(case, torch.float64, case.call), strict=True
    ):
        assert low.dtype == dtype
        assert_close(low, high, gate, "gradient error")


def check_second_derivative(case: Case) -> None:
    """Second derivatives are right or raise; never silently wrong."""
    tensors = tuple(t.requires_grad_() for t in case.inputs())
    if case.second == "works":
        assert torch.autograd.gradgradcheck(case.call, tensors)
        return
    first = torch.autograd.grad(
        [r.square().sum() for r in outputs(case.call(*tensors))], tensors, create_graph=True
    )
    with pytest.raises(RuntimeError, match="second derivative"):
        torch.autograd.grad(first[0].sum(), tensors)


def check_forward_mode(case: Case) -> None:
    """Forward-mode derivatives are right or raise; never dropped, as torch.library ops drop them."""
    tensors = case.inputs()
    tangents = tuple(torch.randn_like(t) for t in tensors)
    with forward_ad.dual_level():
        try:
            results = outputs(case.call(*map(forward_ad.make_dual, tensors, tangents)))
        except (RuntimeError, NotImplementedError):
            return
        found = [forward_ad.unpack_dual(r).tangent for r in results]
    steps = (
        outputs(case.call(*(t + h * d for t, d in zip(tensors, tangents, strict=True))))
        for h in (1e-6, -1e-6)
    )
    for tangent, up, down in zip(found, *steps, strict=True):
        assert tangent is not None, "the tangent is silently dropped"
        assert_close(tangent, (up - down) / 2e-6, 1e-6, "forward-mode error")


def check_opcheck(case: Case, dtype: torch.dtype) -> None:
    tensors = tuple(t.requires_grad_(case.differentiable) for t in case.inputs(dtype))
    torch.library.opcheck(case.overload(), case.op_args(*tensors))
    transposed = tuple(t.detach().mT.contiguous().mT for t in tensors)
    torch.library.opcheck(case.overload(), case.op_args(*transposed))


def check_compile(case: Case, dynamic: bool, backend: str = "aot_eager") -> None:
    """One graph, the same numbers and gradients; with dynamic shapes, the same graph for other shapes."""
    torch.compiler.reset()
    compiled = torch.compile(case.call, fullgraph=True, dynamic=dynamic, backend=backend)
    tensors = case.inputs(torch.float32)
    assert_same_bits(compiled(*tensors), case.call(*tensors), "compiled")
    if case.differentiable:
        pairs = zip(*(gradients(case, torch.float32, f) for f in (compiled, case.call)), strict=True)
        for found, wanted in pairs:  # the compiler may fuse what a backward pass has in plain torch
            assert_close(found, wanted, 1e-5, "error of the compiled gradient")
    if dynamic:
        longer = tuple(torch.cat([t, t]) for t in tensors)
        with torch.compiler.set_stance("fail_on_recompile"):
            assert_same_bits(compiled(*longer), case.call(*longer), "compiled, another shape")


def check_meta(case: Case) -> None:
    """The shape function: right shape, strides and dtype on the meta device."""
    tensors = case.inputs(torch.float32)
    results = outputs(case.call(*(t.to("meta") for t in tensors)))
    for result, wanted in zip(results, outputs(case.call(*tensors)), strict=True):
        assert result.device.type == "meta"
        assert (result.shape, result.dtype) == (wanted.shape, wanted.dtype)
        assert result.stride() == wanted.stride(), f"stride {result.stride()}, not {wanted.stride()}"


def check_vmap(case: Case) -> None:
    """vmap over the first and over the last dimension equals a loop, forward and for batched gradients."""
    tensors = case.inputs()
    many = tuple(torch.stack([t, t.flip(0), 2 * t]) for t in tensors)
    wanted = [outputs(case.call(*(m[i] for m in many))) for i in range(3)]
    for dim in (0, -1):
        moved = tuple(m.movedim(0, dim) for m in many)
        results = outputs(torch.vmap(case.call, in_dims=dim)(*moved))
        for i, result in enumerate(results):
            for j in range(3):
                assert_close(result[j], wanted[j][i], 1e-12, "vmap's error")
    if case.differentiable:
        tensors = tuple(t.requires_grad_() for t in tensors)
        results = outputs(case.call(*tensors))
        seeds = [torch.randn(3, *r.shape, dtype=r.dtype) for r in results]
        batched = torch.autograd.grad(results, tensors, seeds, is_grads_batched=True, retain_graph=True)
        for j in range(3):
            single = torch.autograd.grad(results, tensors, [s[j] for s in seeds], retain_graph=True)
            for b, s in zip(batched, single, strict=True):
                assert_close(b[j], s, 1e-12, "error of vmapped gradients")


def check_autocast(case: Case, dtype: torch.dtype) -> None:
    """Autocast changes nothing: an op's precision is its own argument."""
    tensors = case.inputs(dtype)
    wanted = case.call(*tensors)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_same_bits(case.call(*tensors), wanted, "autocast")


def check_pickle(case: Case) -> None:
    """Results and copies of results survive pickling, and own no more memory than they show."""
    for result in outputs(case.call(*case.inputs())):
        assert_same_bits(pickle.loads(pickle.dumps(result)), result, "pickled")
        assert_same_bits(copy.deepcopy(result), result, "copied")
        held = result.untyped_storage().nbytes()
        assert held == result.numel() * result.element_size(), f"a storage of {held} bytes"


def check_fork(case: Case) -> None:
    """A forked child, such as a DataLoader's worker (one thread each), computes what its parent does."""
    tensors = case.inputs(torch.float32)
    torch.set_num_threads(2)
    wanted = outputs(case.call(*tensors))
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def child() -> None:
        torch.set_num_threads(1)
        try:
            sender.send([r.numpy().tobytes() for r in outputs(case.call(*tensors))])
        except Exception as error:
            sender.send(repr(error))

    process = context.Process(target=child)
    process.start()
    try:
        assert receiver.poll(60), "the forked child hangs"
        assert receiver.recv() == [r.numpy().tobytes() for r in wanted], "the forked child computes otherwise"
    finally:
        process.kill()
        process.join()


def check_isa(files: Sequence[str], isa: str, also: str = "") -> None:
    """The accuracy, edge, layout and NaN checks of test modules again, capped to one instruction set."""
    from pyops import _library

    if not _library.load():
        pytest.skip("no compiled library: there is one reference for every instruction set")
    from pyops import _C

    available = ISAS[: ISAS.index(_C.cpu_info()["detected"]) + 1]
    if isa not in available:
        pytest.skip(f"this CPU has {', '.join(available)}")
    chosen = "test_accuracy or test_edge or test_layouts or test_nan or test_capped" + (
        also and f" or {also}"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *files]
    done = subprocess.run(
        [*command, "-k", chosen],
        env={**os.environ, "PYOPS_CPU_ISA": isa, "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-4000:] + done.stderr[-2000:]


def op_suite(spec: Spec, name: str) -> type:
    """The test class of an op; ``name`` is what the module binds it to."""
    ids = {"ids": lambda value: getattr(value, "name", None) or str(value).removeprefix("torch.")}

    def over(cases: Sequence[Case], dtypes: Sequence[torch.dtype] | None = None):
        """One test per case, or per case and dtype that it accepts."""
        if dtypes is None:
            return pytest.mark.parametrize("case", cases, **ids)
        pairs = [(case, dtype) for case in cases for dtype in dtypes if dtype in case.dtypes]
        return pytest.mark.parametrize(("case", "dtype"), pairs, **ids)

    cases = spec.cases
    batched = [case for case in cases if case.batched]
    smooth = [case for case in cases if case.differentiable]
    two = (torch.float32, torch.bfloat16)
    low = (torch.float32, torch.bfloat16, torch.float16)
    edges = [(shapes, dtype) for shapes in spec.edges for dtype in cases[0].dtypes]

    class Suite:
        @over(cases, ALL_DTYPES)
        def test_accuracy(self, case, dtype, poison):
            check_accuracy(case, dtype)

        @pytest.mark.parametrize(("shapes", "dtype"), edges, **ids)
        def test_edge(self, shapes, dtype, poison):
            check_edge(cases[0], shapes, dtype)

        @over(cases, ALL_DTYPES)
        def test_layouts(self, case, dtype):
            check_layouts(case, dtype)

        @over(cases, two)
        def test_huge(self, case, dtype, tmp_path):
            check_huge(case, dtype, tmp_path)

        @over(cases, low)
        def test_deterministic(self, case, dtype):
            check_deterministic(case, dtype)

        @over(batched, ALL_DTYPES)
        def test_nan(self, case, dtype):
            check_nan(case, dtype)

        @over(smooth)
        def test_gradcheck(self, case):
            check_gradcheck(case)

        @over(smooth, low)
        def test_gradients(self, case, dtype):
            check_gradients(case, dtype)

        @over(smooth)
        def test_second_derivative(self, case):
            check_second_derivative(case)

        @over(cases)
        def test_forward_mode(self, case):
            check_forward_mode(case)

        @over(cases)
        def test_opcheck(self, case):
            check_opcheck(case, torch.float32)

        @over(cases)
        def test_compile(self, case):
            check_compile(case, dynamic=False)

        def test_compile_dynamic(self):
            check_compile(cases[0], dynamic=True)

        def test_inductor(self):
            check_compile(cases[0], dynamic=False, backend="inductor")

        @over(cases)
        def test_meta(self, case):
            check_meta(case)

        @over(batched)
        def test_vmap(self, case):
            check_vmap(case)

        @over(cases, two)
        def test_autocast(self, case, dtype):
            check_autocast(case, dtype)

        @over(cases)
        def test_pickle(self, case):
            check_pickle(case)

        @over(cases)
        def test_fork(self, case):
            check_fork(case)

        @pytest.mark.parametrize(("call", "error", "message"), spec.errors, ids=[e[2] for e in spec.errors])
        def test_error(self, call, error, message):
            with pytest.raises(error, match=message):
                call()

        @pytest.mark.parametrize("isa", ISAS)
        def test_isa(self, isa):
            check_isa(spec.files, isa, spec.also)

        def test_capped(self):
            """What runs is what the cap of ``test_isa`` asks for."""
            from pyops import which

            name, cap = cases[0].op.split("::")[1], os.environ.get("PYOPS_CPU_ISA")
            served = which(name, *cases[0].op_args(*cases[0].inputs()))
            assert cap is None or served in (f"cpu:{cap}", "reference")

    if not spec.files:
        del Suite.test_isa
    Suite.__name__ = Suite.__qualname__ = name
    return Suite
