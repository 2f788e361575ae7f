"""Measurement: paired interleaved timing, peaks, peak extra memory, and what the machine is."""

from __future__ import annotations

import ctypes
import datetime
import gc
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from bench.case import Case, Impl, Missing, Runner, bound_seconds

DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
}
SHORTEST_SAMPLE = (
    2e-3  # seconds; shorter calls are repeated within a sample, so that the clock does not matter
)


# ---- timing


def cpu_timer(run: Callable, calls: Sequence[tuple]) -> float:
    """Seconds per call."""
    start = time.perf_counter()
    for args in calls:
        run(*args)
    return (time.perf_counter() - start) / len(calls)


class CudaTimer:
    """Seconds per call by CUDA events, with the L2 cache overwritten before each sample."""

    def __init__(self, device: str = "cuda", flush_bytes: int = 2**28) -> None:
        self.flush = torch.empty(flush_bytes, dtype=torch.int8, device=device)

    def __call__(self, run: Callable, calls: Sequence[tuple]) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.flush.zero_()
        start.record()
        for args in calls:
            run(*args)
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) * 1e-3 / len(calls)


def timer_for(device: str) -> Callable[[Callable, Sequence[tuple]], float]:
    return CudaTimer() if device == "cuda" else cpu_timer


def rotated(names: Sequence[str], turn: int) -> list[str]:
    """The order of one round: every implementation takes every place, in both directions."""
    shift = turn % len(names)
    order = [*names[shift:], *names[:shift]]
    return order[::-1] if turn // len(names) % 2 else order


def paired(
    runners: dict[str, Runner],
    inputs: Callable[[torch.Generator], tuple],
    rounds: int,
    generator: torch.Generator,
    timer: Callable[[Callable, Sequence[tuple]], float] = cpu_timer,
    warmup: int = 2,
) -> dict[str, list[float]]:
    """Seconds per call, one number per round and implementation. All see the same fresh inputs in a round."""
    repeats = {}
    for name, runner in runners.items():
        data = inputs(generator)
        took = [timer(runner.run, [runner.prepare(*data)]) for _ in range(warmup)]
        repeats[name] = min(100, max(1, round(SHORTEST_SAMPLE / max(took[-1], 1e-9))))
    samples: dict[str, list[float]] = {name: [] for name in runners}
    collecting = gc.isenabled()
    gc.disable()
    try:
        for turn in range(rounds):
            data = inputs(generator)
            for name in rotated(list(runners), turn):
                calls = [runners[name].prepare(*data) for _ in range(repeats[name])]
                samples[name].append(timer(runners[name].run, calls))
    finally:
        if collecting:
            gc.enable()
    return samples


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and quartiles."""
    low, middle, high = np.quantile(np.asarray(values, dtype=float), [0.25, 0.5, 0.75])
    return {"median": float(middle), "q1": float(low), "q3": float(high)}


# ---- one case


def about_case(case: Case, device: str) -> dict:
    """What the report knows of a case before it is measured."""
    named = ("op", "name", "note", "compute", "flops", "bytes")
    return {**{name: getattr(case, name) for name in named}, "device": device, "env": dict(case.env)}


def about_impl(case: Case, impl: Impl) -> dict:
    return {"name": impl.name, "kind": case.kind(impl), "note": impl.note}


def measure_case(case: Case, peaks: dict[str, float], device: str = "cpu", rounds: int | None = None) -> dict:
    """Build, check and time every implementation of a case; a dictionary ready for JSON."""
    generator = torch.Generator(device=device).manual_seed(20250701)
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()  # the peers' compiled forms are specialised to this case's shapes
    built: dict[str, Runner] = {}
    rows: dict[str, dict] = {}
    with torch.no_grad():
        data = case.inputs(generator)
        for impl in case.implementations:
            rows[impl.name] = row = about_impl(case, impl)
            row.update(_admit(case, impl, data, built))
        torch.set_float32_matmul_precision("highest")  # importing a peer may have lowered it for everyone
        samples = {}
        if built:
            samples = paired(built, case.inputs, rounds or case.rounds, generator, timer_for(device))
        if (
            device == "cuda"
        ):  # torch's own count is exact there and costs one call; on the CPU it takes a process
            for name, runner in built.items():
                args = runner.prepare(*case.inputs(generator))
                rows[name]["extra_bytes"] = extra_bytes_cuda(lambda r=runner, a=args: r.run(*a))
    bound = bound_seconds(case.flops, case.bytes, peaks[case.compute], peaks["copy"])
    ours = samples.get(case.ours.name)
    for name, seconds in samples.items():
        time_s = spread(seconds)
        rows[name].update(seconds=time_s, best_seconds=min(seconds), fraction=bound / time_s["median"])
        if ours is not None and name != case.ours.name:
            rows[name]["ratio"] = spread([peer / own for peer, own in zip(seconds, ours, strict=True)])
    result = {
        **about_case(case, device),
        "bound_seconds": bound,
        "rounds": rounds or case.rounds,
        "served_by": case.served_by() if case.served_by and case.ours.name in built else None,
        "implementations": list(rows.values()),
    }
    result.update(verdict(result["implementations"], case.bar))
    return result


def _admit(case: Case, impl: Impl, data: tuple, built: dict[str, Runner]) -> dict:
    """Build an implementation and check one result of it; only what is right is timed."""
    try:
        runner = impl.build()
        error = case.error(impl, data, runner.run(*runner.prepare(*data)))
    except Missing as reason:
        return {"status": "missing", "reason": str(reason)}
    except Exception as reason:
        return {"status": "failed", "reason": f"{type(reason).__name__}: {reason}".splitlines()[0]}
    built[impl.name] = runner
    return {"status": "ok", "error": error}


def verdict(rows: list[dict], bar: tuple[float, str] | None) -> dict:
    """The fastest peer by median ratio, and whether the promised ratio is met (not met if unknown)."""
    ratios = {row["name"]: row["ratio"]["median"] for row in rows if row["kind"] == "peer" and "ratio" in row}
    best = min(ratios, key=ratios.__getitem__, default=None)
    out: dict[str, Any] = {"best_peer": best, "bar": None}
    if bar is not None:
        least, against = bar
        ratio = ratios.get(best if against == "best" else against) if ratios else None
        out["bar"] = {
            "least": least,
            "against": against,
            "ratio": ratio,
            "met": ratio is not None and ratio >= least,
        }
    return out


# ---- peaks


def _best(run: Callable[[], Any], device: str, seconds: float) -> float:
    timer = timer_for(device)
    timer(run, [()])
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end or best == float("inf"):
        best = min(best, timer(run, [()]))
    return best


def measure_peaks(
    device: str = "cpu",
    dtypes: Sequence[str] = ("bfloat16", "float32", "float64"),
    sizes: Sequence[int] = (1024, 2048, 4096),
    copy_bytes: int = 2**30,
    seconds: float = 1.0,
) -> dict[str, float]:
    """GEMM rate per dtype (flop/s by torch.mm, best size), and copy bandwidth (bytes read + written)."""
    peaks = {}
    for name in dtypes:
        rate = 0.0
        for size in sizes:
            a, b = (
                torch.randn(size, size, device=device, dtype=torch.float32).to(DTYPES[name]) for _ in range(2)
            )
            out = torch.empty_like(a)
            took = _best(lambda a=a, b=b, out=out: torch.mm(a, b, out=out), device, seconds)
            rate = max(rate, 2.0 * size**3 / took)
        peaks[name] = rate
    source = torch.randint(-128, 128, (copy_bytes,), dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    peaks["copy"] = 2.0 * copy_bytes / _best(lambda: target.copy_(source), device, seconds)
    return peaks


# ---- memory


def _status(field: str) -> int:
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


def extra_bytes_cpu(run: Callable[[], Any]) -> int:
    """Peak resident memory during run() above that before it, its result included (Linux).

    Freed memory that the allocator keeps would hide an allocation: it is handed back first, and the process
    must run with MEMORY_ENV, so that large blocks always come from the kernel and go back to it.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/clear_refs", "w") as reset:
        reset.write("5")  # VmHWM starts again from the present resident size
    before = _status("VmRSS")
    result = run()
    peak = _status("VmHWM")
    del result
    return max(0, peak - before)


MEMORY_ENV = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


def extra_bytes_cuda(run: Callable[[], Any]) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = run()
    torch.cuda.synchronize()
    del result
    return torch.cuda.max_memory_allocated() - before


def measure_memory(case: Case) -> dict[str, int]:
    """Extra bytes of one call on the CPU per implementation that runs; meant for a process of its own."""
    generator = torch.Generator().manual_seed(1)
    taken = {}
    with torch.no_grad():
        for impl in case.implementations:
            try:
                runner = impl.build()
                warm = (case.small_inputs or case.inputs)(generator)
                runner.run(*runner.prepare(*warm))
                args = runner.prepare(*case.inputs(generator))
                taken[impl.name] = extra_bytes_cpu(lambda r=runner, a=args: r.run(*a))
            except Exception:
                continue  # the timing run names what is missing or fails, with the reason
    return taken


# ---- machine


def machine(device: str, threads: int) -> dict:
    """What the numbers belong to. The load average tells whether the machine was quiet."""
    model = platform.processor()
    flags: list[str] = []
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as lines:
            info = dict(line.split(":", 1) for line in lines if ":" in line)
        info = {key.strip(): value.strip() for key, value in info.items()}
        model, flags = info.get("model name", model), info.get("flags", "").split()
    wanted = ("avx2", "avx512f", "avx512bw", "avx512_bf16", "amx_bf16", "asimd", "sve")
    out = {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": threads,
        "isa": [flag for flag in wanted if flag in flags],
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "load_average": os.getloadavg()[0],
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
    }
    if device == "cuda":
        out["gpu"] = torch.cuda.get_device_name()
        out["cuda"] = torch.version.cuda
    return out
