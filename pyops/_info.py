"""What `python -m pyops info` reports: versions, instruction sets, which backend serves each op and why."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from typing import Any, NamedTuple

import torch

from pyops import _library


class GpuBackend(NamedTuple):
    """The backend that serves an op on a GPU: triton, cuda, or torch where plain torch does best."""

    kind: str
    why: str
    on_hardware: str


# The README shows the same table; tests/test_layout.py compares the two and demands a row for every op.
GPU_BACKENDS = {
    "polar": GpuBackend("triton", "a chain of products of matrix tiles", "no (interpreter only)"),
    "polar_backward": GpuBackend("torch", "plain matrix products, which the vendor's GEMM does best", "no"),
    "polar_svd": GpuBackend("torch", "LAPACK or cuSOLVER through torch.linalg.svd", "no"),
    "polar_svd_backward": GpuBackend("torch", "plain matrix products after the same SVD", "no"),
    "unit_direction": GpuBackend("cuda", "row and column reductions, bound by memory", "no (emulator only)"),
    "lmo_step_": GpuBackend(
        "triton", "the polar iteration between two elementwise passes", "no (interpreter only)"
    ),
    "linear_attention": GpuBackend(
        "triton", "products of matrix tiles, chunk after chunk", "no (interpreter only)"
    ),
    "linear_attention_backward": GpuBackend(
        "triton", "products of matrix tiles, chunk after chunk", "no (interpreter only)"
    ),
    "linear_attention_step_": GpuBackend(
        "triton", "one pass over the state, bound by memory", "no (interpreter only)"
    ),
    "tprod": GpuBackend("cuda", "butterflies along the tubes around small products", "no (emulator only)"),
    "tprod_backward": GpuBackend("cuda", "the same, twice", "no (emulator only)"),
    "tgram": GpuBackend("cuda", "the same, for half of the products", "no (emulator only)"),
    "tubal_sensing_steps_": GpuBackend(
        "torch", "two products with the measurements, which the vendor's GEMM does best", "no"
    ),
    "box_log_volumes": GpuBackend("triton", "tiles of queries x items, reduced over dimensions", "no"),
    "box_log_volumes_backward": GpuBackend("triton", "the same tiles, computed again", "no"),
    "box_topk": GpuBackend("triton", "the same tiles, of which the best are kept", "no"),
    "box_sampled": GpuBackend("triton", "gathered rows, one program per query", "no"),
    "box_sampled_backward": GpuBackend("triton", "gathered rows, one program per query", "no"),
}


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cupy_version() -> str | None:
    return next((v for name in ("cupy", "cupy-cuda13x", "cupy-cuda12x") if (v := _version(name))), None)


def _row(op: str, device: str) -> dict[str, str]:
    served = _library.backend(op, device)
    planned = GPU_BACKENDS[op]
    on_hardware = "yes" if device == "cpu" else planned.on_hardware
    if served == "reference":
        if _library.OPS[op].plain:
            why = planned.why
        elif device == "cpu":
            why = "the library has no CPU kernel for it" if _library.load() else "the library is not built"
        else:
            missing = "Triton is not installed" if planned.kind == "triton" else "built without CUDA kernels"
            why = f"{missing}; {planned.kind} would serve: {planned.why}"
    elif device == "cpu":
        why = "the best instruction set of CPU and PYOPS_CPU_ISA"
        if _library.cpu_info()["amx"] and _library.OPS[op].uses_amx:
            served += " (cpu:amx for bf16 products)"
    else:
        why = planned.why
    return {"op": op, "device": device, "backend": served, "why": why, "run on hardware": on_hardware}


def info() -> dict[str, Any]:
    """Collects versions, CPU and GPU facts, and one row per op and device.

    Returns:
        A dict of plain values (it can be written as JSON) with the keys ``versions``, ``build`` (None without
        the compiled library), ``cpu``, ``gpu`` and ``ops``.
    """
    from pyops import __version__

    built = _library.load()
    versions = {
        "pyops": __version__,
        "python": platform.python_version(),
        **{name: _version(name) for name in ("torch", "triton", "numpy")},
        "cupy": _cupy_version(),
    }
    cpu = {"cap": os.environ.get("PYOPS_CPU_ISA") or None, **_library.cpu_info()}
    gpu = {
        "torch cuda": torch.version.cuda,
        "torch hip": torch.version.hip,
        "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    }
    ops = [_row(op, device) for op in sorted(_library.OPS) for device in ("cpu", "cuda")]
    return {
        "versions": versions,
        "build": _library.build_info() if built else None,
        "cpu": cpu,
        "gpu": gpu,
        "ops": ops,
    }


def _table(rows: list[dict[str, str]]) -> list[str]:
    widths = {key: max(len(key), *(len(row[key]) for row in rows)) for key in rows[0]}
    lines = ["  ".join(key.ljust(width) for key, width in widths.items())]
    lines += ["  ".join(row[key].ljust(width) for key, width in widths.items()) for row in rows]
    return [line.rstrip() for line in lines]


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(value) or "none"
    return "none" if value in (None, "") else str(value)


def render(facts: dict[str, Any]) -> str:
    """The text form of ``info()``."""
    lines = []
    for title in ("versions", "build", "cpu", "gpu"):
        lines.append(title)
        section = facts[title] or {"library": "not built: every op runs its plain torch reference"}
        lines += [f"  {key:<11} {_text(value)}" for key, value in section.items()]
    lines += ["", *(_table(facts["ops"]) if facts["ops"] else [])]
    return "\n".join(lines)


def main(as_json: bool) -> int:
    """Prints ``info()`` as text or JSON."""
    facts = info()
    print(json.dumps(facts, indent=2) if as_json else render(facts))
    return 0
