"""Compiles the kernels that a launcher launches, ahead of time and without a GPU, and reads what they use.

An op joins by calling its launchers on tensors of device "meta" inside `record`: what is compiled is then
what runs, with the same specialisation of arguments and the same options.
"""

import contextlib
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

# name: (target, bytes of shared memory that one block may use)
TARGETS = {
    "sm_80": (GPUTarget("cuda", 80, 32), 163 * 1024),
    "sm_90": (GPUTarget("cuda", 90, 32), 227 * 1024),
    "sm_100": (GPUTarget("cuda", 100, 32), 227 * 1024),
    "gfx942": (GPUTarget("hip", "gfx942", 64), 64 * 1024),
}


@dataclass(frozen=True)
class Usage:
    """Per thread: registers and bytes (AMD: registers) spilled; per block: bytes of shared memory."""

    registers: int
    spilled: int
    shared: int


@dataclass
class Launch:
    """One kernel as launched: what triton.compile takes."""

    source: ASTSource
    target: GPUTarget
    options: dict

    @property
    def name(self):
        return self.source.fn.__name__

    def compile(self):
        return triton.compile(self.source, target=self.target, options=self.options)


@contextlib.contextmanager
def record(arch):
    """Yields a list that receives each distinct kernel launched inside, as specialised for `arch`."""
    target, _ = TARGETS[arch]
    backend = make_backend(target)
    launches, seen = [], set()

    def run(self, *args, grid, warmup, **kwargs):
        del grid, warmup
        kwargs.update(debug=False, instrumentation_mode="")
        binder = create_function_from_signature(self.signature, self.params, backend)
        bound, specialization, options = binder(*args, **kwargs)
        options, signature, constants, attributes = self._pack_args(
            backend, kwargs, bound, specialization, options
        )
        source = ASTSource(self, signature, constants, attributes)
        key = source.hash(), str(options)
        if key not in seen:
            seen.add(key)
            launches.append(Launch(source, target, options.__dict__))

    hip = "ahead of time" if target.backend == "hip" else None
    with mock.patch.object(JITFunction, "run", run), mock.patch.object(torch.version, "hip", hip):
        yield launches


def usage(compiled):
    """What a compiled kernel uses, read from the machine code's own metadata."""
    if "cubin" in compiled.asm:
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(compiled.asm["cubin"])
            file.flush()
            command = [tool, "--dump-resource-usage", file.name]
            text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        found = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
        return Usage(found["REG"], found["STACK"] + found["LOCAL"], compiled.metadata.shared)
    text = compiled.asm["amdgcn"]
    found = {key: int(value) for key, value in re.findall(r"\.([a-z_]+_count): *(\d+)", text)}
    spilled = found["vgpr_spill_count"] + found["sgpr_spill_count"]
    return Usage(found["vgpr_count"], spilled, compiled.metadata.shared)


def narrow_offsets(compiled):
    """Pointer offsets that are neither 64-bit nor constants, or that were widened only after a product."""
    text = compiled.asm["ttir"]
    constants = set(re.findall(r"(%\S+) = arith\.constant", text))
    offsets = re.findall(r"tt\.addptr %\S+, (%\S+) : \S.*?, (?:tensor<[\dx]*)?(i\d+)", text)
    narrow = [
        f"addptr of {name}: {kind}" for name, kind in offsets if kind != "i64" and name not in constants
    ]
    products = set(re.findall(r"(%\S+) = arith\.muli .* : (?:tensor<[\dx]*)?i32", text))
    widened = re.findall(r"arith\.extsi (%\S+) : .*", text)
    return narrow + [f"extsi of the 32-bit product {name}" for name in widened if name in products]


def faults(title, launch, arch, spills):
    """What `launch()` launches, compiled: what exceeds the bounds. Prints a table.

    Args:
        spills: kernel name -> bytes per thread that it may spill; 0 for the others.
    """
    with record(arch) as launches:
        launch()
    assert launches
    _, shared = TARGETS[arch]
    print(f"\n{title} {arch}\n{'kernel':22} registers  spilled  shared")
    wrong = []
    for item in launches:
        compiled = item.compile()
        used = usage(compiled)
        print(f"{item.name:22} {used.registers:9} {used.spilled:8} {used.shared:7}")
        if used.spilled > spills.get(item.name, 0):
            wrong.append(f"{item.name} spills {used.spilled}")
        if used.shared > shared:
            wrong.append(f"{item.name} wants {used.shared} bytes of shared memory, {arch} has {shared}")
        wrong += [f"{item.name}: {line}" for line in narrow_offsets(compiled)]
    return wrong
