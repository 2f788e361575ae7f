"""Compiles CUDA sources with the host compiler under the emulator and runs them on torch CPU tensors.

    library = compile_emulated(HERE / "shims" / "lmo.cu")  # cached in build/emulator
    emulator = Emulator(library, order="random", seed=1)
    emulator.call("shim_name", ...)                        # raises EmulatorError on any fault

`Arena` hands out tensors whose memory ends (or begins) at an inaccessible page, so that an access out of
range is a fault; `poison` fills outputs with a NaN that no arithmetic produces, and `assert_written` finds
what is left of it.
"""

import ctypes
import hashlib
import mmap
import os
import re
import shutil
import subprocess
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
CACHE = Path(os.environ.get("PYOPS_EMULATOR_CACHE", ROOT / "build" / "emulator"))
ORDERS = {"forward": 0, "reverse": 1, "random": 2}
FLAGS = [
    *(
        "-std=c++20",
        "-O1",
        "-fPIC",
        "-shared",
        "-fvisibility=hidden",
        "-U_FORTIFY_SOURCE",
        "-DPYOPS_EMULATOR",
    ),
    *("-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"),
    # Misaligned vector accesses, which x86 forgives and a GPU does not, trap; so do overflow and bad shifts.
    *("-fsanitize=alignment,signed-integer-overflow,shift,bounds", "-fsanitize-undefined-trap-on-error"),
]

# One NaN per float type (quiet, with a payload), as an integer of its width.
POISON = {
    torch.float64: (torch.int64, 0x7FFBAD0BADBADBAD),
    torch.float32: (torch.int32, 0x7FDBADBA),
    torch.bfloat16: (torch.int16, 0x7FDB),
    torch.float16: (torch.int16, 0x7EDB),
}


class EmulatorError(AssertionError):
    """A fault that the emulator found in a kernel."""


def host_compiler():
    return os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")


def compile_emulated(source, *defines):
    """Returns the emulated shared library of a source, compiled now or taken from the cache."""
    cxx = host_compiler()
    flags = [*FLAGS, *(f"-D{d}" for d in defines)]
    inputs = [
        source,
        *sorted(HERE.glob("*.h")),
        *sorted((ROOT / "csrc").rglob("*.h")),
        *sorted((ROOT / "csrc").rglob("*.cu")),
    ]
    version = subprocess.run([cxx, "--version"], capture_output=True, text=True, check=True).stdout
    digest = hashlib.sha256(
        "\0".join([version, *flags, *(p.read_text() for p in inputs)]).encode()
    ).hexdigest()
    target = CACHE / f"{source.stem}-{digest[:16]}.so"
    if not target.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        partial = target.with_suffix(f".{os.getpid()}.tmp")
        command = [
            cxx,
            *flags,
            f"-I{ROOT / 'csrc'}",
            f"-I{HERE}",
            "-x",
            "c++",
            str(source),
            "-o",
            str(partial),
        ]
        run = subprocess.run(command, capture_output=True, text=True)
        if run.returncode:
            raise RuntimeError(f"{' '.join(command)}\n{run.stderr}")
        partial.replace(target)
    library = ctypes.CDLL(str(target))
    library.emulator_begin.argtypes = [ctypes.c_int, ctypes.c_ulonglong]
    library.emulator_error.restype = ctypes.c_char_p
    library.emulator_launches.restype = ctypes.c_ulonglong
    return library


class Emulator:
    """Runs launchers with blocks and threads in one order; `call` raises EmulatorError on a fault."""

    def __init__(self, library, order="forward", seed=0):
        self.library, self.order, self.seed = library, order, seed

    def call(self, name, *args):
        self.library.emulator_begin(ORDERS[self.order], self.seed)
        status = getattr(self.library, name)(*args)
        error = self.library.emulator_error().decode()
        if error:
            raise EmulatorError(f"{name}, threads in {self.order} order: {error}")
        return status

    @property
    def launches(self):
        """Kernels that the last call launched."""
        return self.library.emulator_launches()


class Arena:
    """Memory between two inaccessible pages. Keep it alive as long as its tensors."""

    SLACK = 0xA5

    def __init__(self):
        self.libc = ctypes.CDLL(None, use_errno=True)
        self.libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        self.blocks = []

    def allocate(self, count, dtype, edge="end", alignment=16):
        """Returns an uninitialised 1-D tensor against the upper (edge="end") or lower ("begin") page.

        Up to alignment - 1 bytes between an aligned tensor and the upper page are watched by
        `check`.
        """
        page = mmap.PAGESIZE
        size = count * dtype.itemsize
        pages = -(-max(size, 1) // page)
        block = mmap.mmap(-1, (pages + 2) * page)
        raw = torch.frombuffer(block, dtype=torch.uint8)
        raw.fill_(self.SLACK)
        base = raw.data_ptr()
        begin = page if edge == "begin" else (page + pages * page - size) // alignment * alignment
        for guard in (base, base + (pages + 1) * page):
            if self.libc.mprotect(guard, page, 0):
                raise OSError(ctypes.get_errno(), "mprotect")
        self.blocks.append((block, raw, page, begin, begin + size, (pages + 1) * page))
        return raw[begin : begin + size].view(dtype)

    def copy(self, tensor, edge="end", alignment=16):
        """Returns a tensor of the same values and strides inside guarded memory."""
        extent = (
            1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
            if tensor.numel()
            else 0
        )
        out = self.allocate(extent, tensor.dtype, edge, alignment).as_strided(tensor.shape, tensor.stride())
        if tensor.numel():
            out.as_strided((extent,), (1,)).copy_(tensor.as_strided((extent,), (1,), tensor.storage_offset()))
        return out

    def check(self):
        """Raises if anything was written between a tensor and its inaccessible pages."""
        for _, raw, low, begin, end, high in self.blocks:
            if not ((raw[low:begin] == self.SLACK).all() and (raw[end:high] == self.SLACK).all()):
                raise EmulatorError("write outside a tensor, within its page")


def poison(tensor):
    """Fills a floating tensor (of any strides) with the poison NaN; returns it."""
    integer, value = POISON[tensor.dtype]
    tensor.view(integer).fill_(value)
    return tensor


def assert_written(tensor):
    """Raises if an element still holds the poison."""
    integer, value = POISON[tensor.dtype]
    left = int((tensor.contiguous().view(integer) == value).sum())
    if left:
        raise EmulatorError(f"unwritten output: {left} of {tensor.numel()} elements")


def find_nvcc():
    """Returns the path of nvcc, or None: CUDA_HOME, then /usr/local/cuda, then the path."""
    for home in (os.environ.get("CUDA_HOME"), "/usr/local/cuda"):
        if home and (Path(home) / "bin" / "nvcc").is_file():
            return Path(home) / "bin" / "nvcc"
    found = shutil.which("nvcc")
    return Path(found) if found else None


def parse_ptxas(text):
    """Returns {mangled kernel: {"registers", "spills", "shared", "stack"}} from `nvcc -Xptxas -v` output."""
    kernels, current = {}, None
    for line in text.splitlines():
        if found := re.search(r"Compiling entry function '(\w+)'", line):
            current = kernels.setdefault(found[1], {"registers": 0, "spills": 0, "shared": 0, "stack": 0})
        elif current is None:
            continue
        elif found := re.search(
            r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line
        ):
            current["stack"], current["spills"] = int(found[1]), int(found[2]) + int(found[3])
        elif found := re.search(r"Used (\d+) registers", line):
            current["registers"] = int(found[1])
            shared = re.search(r"(\d+) bytes smem", line)
            current["shared"] = int(shared[1]) if shared else 0
    return kernels
