"""The emulator names each planted fault, in every order of threads, and accepts the kernels without it."""

import ctypes
import re

import pytest
import torch
from harness import HERE, ORDERS, Arena, Emulator, EmulatorError, assert_written, compile_emulated, poison

THREADS, BLOCKS = 128, 3
SOURCE = HERE / "shims" / "faults.cu"
NAMES = re.findall(r"\w+", re.search(r"enum Fault : int \{(.*?)\}", SOURCE.read_text(), re.DOTALL)[1])
UCONTEXT = "PYOPS_EMULATOR_UCONTEXT"


def run(kernel, fault="None", order="forward", seed=7, defines=()):
    """Runs one kernel of faults.cu on guarded memory and returns (its input, its output)."""
    emulator = Emulator(compile_emulated(SOURCE, *defines), order, seed)
    arena = Arena()
    x = arena.copy(torch.randn(BLOCKS * THREADS))
    if kernel == "count_positive":
        out = arena.copy(torch.zeros(1, dtype=torch.int32))
    else:
        out = poison(arena.allocate(BLOCKS if kernel == "block_sum" else x.numel(), torch.float32))
    pointers = ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(out.data_ptr())
    emulator.call(f"run_{kernel}", *pointers, BLOCKS, NAMES.index(fault))
    if kernel != "count_positive":
        assert_written(out)
    arena.check()
    return x.clone(), out.clone()


def expected(kernel, x):
    blocks = x.view(BLOCKS, THREADS)
    if kernel == "reverse":
        return blocks.flip(1).reshape(-1)
    if kernel == "block_sum":
        return blocks.double().sum(1).float()
    if kernel == "warp_exchange":
        return x.view(-1, 2).flip(1).reshape(-1)
    if kernel == "count_positive":
        return (x > 0).sum().to(torch.int32).view(1)
    return x


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kernel", ["reverse", "block_sum", "warp_exchange", "count_positive", "copy_wide"])
def test_right_kernels_pass(kernel, order):
    x, out = run(kernel, order=order)
    torch.testing.assert_close(out, expected(kernel, x))


FAULTS = [
    ("reverse", "MissingBarrier", "missing barrier|unwritten shared memory"),
    ("reverse", "OutOfRangeShared", r"shared-memory index out of range: tile\[128\] of 128"),
    ("reverse", "RawOutOfRangeShared", "write outside shared memory: guard zone of tile"),
    (
        "reverse",
        "DivergentBarrier",
        "divergent barrier: thread 0 waits on line .* thread 64 ended without it",
    ),
    ("reverse", "TwoBarriers", "divergent barrier: thread 0 waits on line .* thread 64 on line"),
    ("reverse", "UnwrittenOutput", "unwritten output: 3 of 384"),
    ("reverse", "TooManyThreads", "invalid launch configuration"),
    ("block_sum", "ReadWriteRace", "missing barrier"),
    (
        "block_sum",
        "WrongShuffleMask",
        "mask 0000ffff does not name lane|mask: 0000ffff does not name the calling lane",
    ),
    ("block_sum", "AbsentLane", "wrong mask: lane .* not all of them come"),
    ("block_sum", "ShuffleFromUnnamed", "does not name lane"),
    ("warp_exchange", "MissingSyncwarp", "missing barrier|unwritten shared memory"),
    ("warp_exchange", "SyncwarpAcrossWarps", "missing barrier|unwritten shared memory"),
    ("warp_exchange", "UnwrittenShared", "read of unwritten shared memory"),
    ("count_positive", "PlainBesideAtomic", "missing barrier"),
    ("copy_wide", "OutOfRangeGlobal", "memory fault"),
    ("copy_wide", "StackOverflow", "memory fault"),
    ("copy_wide", "Misaligned", "undefined behaviour"),
    ("copy_wide", "Overflow", "undefined behaviour"),
]


def test_every_fault_is_tested():
    assert sorted(f[1] for f in FAULTS) == sorted(NAMES[1:])


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("kernel", "fault", "message"), FAULTS, ids=[f[1] for f in FAULTS])
def test_planted_faults_fail(kernel, fault, message, order):
    with pytest.raises(EmulatorError, match=message):
        run(kernel, fault, order)


@pytest.mark.parametrize("fault", ["OutOfRangeGlobal", "StackOverflow", "Overflow"])
def test_a_fault_does_not_stay(fault):
    """After a fault that the processor raised, the same library runs the next kernel."""
    with pytest.raises(EmulatorError):
        run("copy_wide", fault)
    x, out = run("reverse")
    assert torch.equal(out, expected("reverse", x))


def test_orders_expose_order_dependence():
    """Blocks run in the asked order, so a kernel whose result depends on it gives different results."""
    library = compile_emulated(SOURCE)
    results = set()
    for order, seed in (("forward", 0), ("reverse", 0), ("random", 1), ("random", 2), ("random", 3)):
        out = torch.zeros(1)
        Emulator(library, order, seed).call("run_last_block", ctypes.c_void_p(out.data_ptr()), 16)
        results.add(out.item())
    assert {15.0, 0.0} < results


def test_portable_fibers():
    """The ucontext fibers of other processors give the same results and find the same faults."""
    for kernel in ("block_sum", "warp_exchange", "count_positive"):
        x, out = run(kernel, order="random", defines=[UCONTEXT])
        torch.testing.assert_close(out, expected(kernel, x))
    for kernel, fault, message in FAULTS:
        with pytest.raises(EmulatorError, match=message):
            run(kernel, fault, defines=[UCONTEXT])


def test_arena_and_poison_find_stray_and_missing_writes():
    arena = Arena()
    x = arena.allocate(5, torch.float32)  # 20 bytes: 12 of slack before the page
    x.as_strided((6,), (1,))[5] = 1.0
    with pytest.raises(EmulatorError, match="write outside a tensor"):
        arena.check()
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        y = poison(torch.empty(4, 3, dtype=dtype).t())
        assert y.isnan().all()
        y[0] = float("nan")  # a NaN that arithmetic produces is not the poison
        with pytest.raises(EmulatorError, match="8 of 12"):
            assert_written(y)
