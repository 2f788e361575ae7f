"""Every CUDA source compiles for real: by nvcc for two generations of GPUs, with bounds on registers and no
spills, and its device part by NVRTC with no host header in reach, as CuPy compiles it. No GPU is needed."""

import ctypes
import functools
import importlib.util
import os
import re
import subprocess
from pathlib import Path

import pytest
from harness import ROOT, find_nvcc, parse_ptxas

SOURCES = sorted((ROOT / "csrc").rglob("*.cu"))
ARCHS = ["80", "90"]
NVCC = find_nvcc()

# Per thread: two blocks of 256 threads fit a multiprocessor (65536 registers) in double, three in float.
MAX_REGISTERS = {"double": 128, "float": 80}
# A product of matrices lives on its sums, 32 in a thread: four blocks of 160 threads, five of 128.
MAX_REGISTERS_OF_PRODUCTS = {"double": 128, "float": 96}
LAUNCHERS = {
    "lmo": ("norm_workspace", "unit_direction", "vector_step"),
    "tubal": ("tprod_workspace", "tprod", "tgram_workspace", "tgram"),
}

needs_nvcc = pytest.mark.skipif(NVCC is None, reason="no nvcc: set CUDA_HOME, or put CUDA in /usr/local/cuda")


@functools.cache
def compiled(source, arch, folder):
    """{demangled kernel: resources} of one source on one architecture."""
    command = [
        NVCC,
        "-std=c++20",
        "-O3",
        f"-I{ROOT / 'csrc'}",
        f"-arch=sm_{arch}",
        "-Xptxas",
        "-v",
        "-c",
        source,
    ]
    output = Path(folder) / f"{source.stem}.{arch}.o"
    run = subprocess.run([*map(str, command), "-o", str(output)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    kernels = parse_ptxas(run.stderr)
    names = subprocess.run(
        ["c++filt"], input="\n".join(kernels), capture_output=True, text=True, check=True
    ).stdout
    return dict(zip(names.splitlines(), kernels.values(), strict=True))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tmp_path_factory.mktemp("nvcc"))


def test_ptxas_parser():
    """The bounds below mean something only if what ptxas prints is read right."""
    text = """ptxas info    : Compiling entry function '_Z1kPf' for 'sm_80'
ptxas info    : Function properties for _Z1kPf
    40 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads
ptxas info    : Used 80 registers, used 1 barriers, 192 bytes smem, 552 bytes cmem[0]
ptxas info    : Compiling entry function '_Z1jPf' for 'sm_80'
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 9 registers, used 0 barriers"""
    assert parse_ptxas(text) == {
        "_Z1kPf": {"registers": 80, "spills": 28, "shared": 192, "stack": 40},
        "_Z1jPf": {"registers": 9, "spills": 0, "shared": 0, "stack": 0},
    }


def test_there_are_sources():
    assert SOURCES


@needs_nvcc
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("source", SOURCES, ids=lambda p: p.stem)
def test_registers_and_spills(source, arch, folder, capsys):
    kernels = compiled(source, arch, folder)
    assert kernels, "no kernel in this source"
    with capsys.disabled():
        print(f"\n{source.relative_to(ROOT)}, sm_{arch}{'':24} registers  spills  shared  stack")
        for name, used in sorted(kernels.items()):
            short = name.removeprefix("void ").split("(")[0].replace("pyops::cuda::", "")
            print(
                f"  {short:50} {used['registers']:9} {used['spills']:7} {used['shared']:7} {used['stack']:6}"
            )
    for name, used in kernels.items():
        bounds = MAX_REGISTERS_OF_PRODUCTS if "tube_product<" in name else MAX_REGISTERS
        bound = bounds["double" if "<double" in name else "float"]
        assert used["spills"] == 0 and used["stack"] == 0, name
        assert used["registers"] <= bound, f"{name}: {used['registers']} registers, at most {bound} wanted"
        assert used["shared"] <= 48 * 1024, name


def find_nvrtc():
    """libnvrtc beside nvcc, or of the wheel nvidia-cuda-nvrtc that CUDA builds of torch bring."""
    wheels = importlib.util.find_spec("nvidia")
    folders = [NVCC.parent.parent / "lib64"] if NVCC else []
    folders += [Path(root) for root in wheels.submodule_search_locations] if wheels else []
    names = [p for folder in folders for p in sorted(folder.rglob("libnvrtc.so*"))]
    if not names:
        return None
    for builtins in names[0].parent.glob("libnvrtc-builtins.so*"):
        ctypes.CDLL(
            str(builtins)
        )  # NVRTC looks for it by name, and a wheel's folder is not on the search path
    return ctypes.CDLL(str(names[0]))


NVRTC = find_nvrtc()


@pytest.mark.skipif(
    NVRTC is None, reason="no libnvrtc: neither beside nvcc nor from the wheel nvidia-cuda-nvrtc"
)
@pytest.mark.parametrize("source", SOURCES, ids=lambda p: p.stem)
def test_device_part_by_nvrtc(source):
    """NVRTC has no host headers, so a stray include or host call in the device part fails here. Every kernel
    that is launched is asked for by its name, as CuPy's RawModule does."""
    text = source.read_text()
    launched = sorted(set(re.findall(r"PYOPS_LAUNCH\(\(?(\w+<[\w, ]+>)", text)))
    kernels = [f"pyops::cuda::{k.replace('Acc', t)}" for k in launched for t in ("float", "double")]
    assert kernels
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    assert (
        NVRTC.nvrtcCreateProgram(ctypes.byref(program), text.encode(), source.name.encode(), 0, None, None)
        == 0
    )
    for name in kernels:
        assert NVRTC.nvrtcAddNameExpression(program, name.encode()) == 0
    options = [f"-I{ROOT / 'csrc'}".encode(), b"-std=c++20", f"--gpu-architecture=sm_{ARCHS[-1]}".encode()]
    status = NVRTC.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
    NVRTC.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    NVRTC.nvrtcGetProgramLog(program, log)
    assert status == 0, log.value.decode()
    for name in kernels:
        lowered = ctypes.c_char_p()
        assert NVRTC.nvrtcGetLoweredName(program, name.encode(), ctypes.byref(lowered)) == 0, name
    NVRTC.nvrtcDestroyProgram(ctypes.byref(program))


@needs_nvcc
@pytest.mark.parametrize("family", LAUNCHERS)
def test_launchers_link_without_torch(family, folder):
    """The header is enough for a host compiler, and the object holds every launcher that it declares."""
    caller = Path(folder) / "caller.cpp"
    uses = "".join(f"const auto f_{name} = &pyops::cuda::{name};\n" for name in LAUNCHERS[family])
    caller.write_text(f'#include "{family}/{family}_cuda.h"\n{uses}')
    cuda = NVCC.parent.parent / "include"
    command = [os.environ.get("CXX", "g++"), "-std=c++20", "-fsyntax-only", "-Wall", "-Werror"]
    command += ["-Wno-unused-variable"]
    subprocess.run([*command, f"-I{ROOT / 'csrc'}", f"-isystem{cuda}", str(caller)], check=True)
    source = ROOT / "csrc" / family / f"{family}_cuda.cu"
    assert source in SOURCES
    compiled(source, ARCHS[0], folder)
    symbols = subprocess.run(
        ["nm", "-C", f"{folder}/{family}_cuda.{ARCHS[0]}.o"], capture_output=True, text=True
    ).stdout
    for launcher in LAUNCHERS[family]:
        assert f" T pyops::cuda::{launcher}(" in symbols
