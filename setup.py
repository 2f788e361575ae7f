"""Builds pyops/lib/libpyops.so (ops, free of Python) and pyops/_C (pybind11); renames each into its place.

PYOPS_CUDA=0|1 leaves CUDA out or demands it (default: built when nvcc and .cu sources are found);
PYOPS_CUDA_ARCHS="80 90" names its targets, the last one also as PTX; CUDA_HOME and CXX name the compilers.
"""

import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
BUILD = ROOT / "build" / "native"
CXX = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
# The last two: gcc 12 takes the undefined registers of its own AVX-512 header for a mistake.
KERNEL_FLAGS = "-O3 -fopenmp -fno-math-errno -ffp-contract=fast -Wno-uninitialized -Wno-maybe-uninitialized"
NINJA = [sys.executable, "-m", "ninja"] if find_spec("ninja") else [shutil.which("ninja")]
ISA_FLAGS = {
    "default": "",
    "avx2": "-mavx2 -mfma -mf16c",
    "avx512": "-mavx512f -mavx512bw -mavx512dq -mavx512vl -mfma -mf16c",
}
X86 = platform.machine() in ("x86_64", "AMD64")
ISAS = list(ISA_FLAGS) if X86 else ["default"]

RULES = """\
rule cxx
  command = $cxx -MD -MF $out.d -std=c++20 -fPIC -fvisibility=hidden -Wall -Wextra $defines $
    $flags -c $in -o $out
  depfile = $out.d
  deps = gcc
  description = compile $out
rule nvcc
  command = $nvcc -MD -MF $out.d -std=c++20 -O3 -Xcompiler -fPIC,-fvisibility=hidden -Xptxas -v $
    $archs -I$csrc -c $in -o $out > $out.ptxas.txt 2>&1 || (cat $out.ptxas.txt; exit 1)
  depfile = $out.d
  deps = gcc
  description = compile $out
rule link
  command = $cxx -shared -o $out.new $in $flags && mv -f $out.new $out
  description = link $out
"""


def output_of(*command):
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def find_cuda(sources):
    """Returns (nvcc, its version), or None with the reason printed."""
    wish = os.environ.get("PYOPS_CUDA", "")
    if wish not in ("", "0", "1"):
        sys.exit(f"PYOPS_CUDA must be 0 or 1, got {wish!r}")
    home = Path(os.environ.get("CUDA_HOME") or "/usr/local/cuda")
    nvcc = home / "bin" / "nvcc"
    missing = "" if nvcc.is_file() else f"no nvcc at {nvcc} (CUDA_HOME says where)"
    missing = missing or ("" if sources else "no .cu source")
    if wish == "1" and missing:
        sys.exit(f"PYOPS_CUDA=1 asks for CUDA kernels, but there is {missing}")
    if wish == "0" or missing:
        print(f"pyops: without CUDA kernels ({'PYOPS_CUDA=0' if wish == '0' else missing})", flush=True)
        return None
    return nvcc, re.search(r"release ([\d.]+)", output_of(nvcc, "--version"))[1]


def write_ninja(lib, module):
    """Writes build.ninja for the library and module files wanted."""
    missing = [name for name in ("torch", "pybind11") if not find_spec(name)] + ["ninja"] * (NINJA == [None])
    if missing:
        sys.exit(f"pyops: the build needs {', '.join(missing)}: pip install {' '.join(missing)}")
    import pybind11
    import torch

    torch_dir = Path(torch.__file__).parent
    csrc = ROOT / "csrc"
    cuda_sources = sorted(csrc.glob("*/*_cuda.cu"))
    cuda = find_cuda(cuda_sources)
    archs = os.environ.get("PYOPS_CUDA_ARCHS", "80 90").split()
    gencode = [f"-gencode arch=compute_{a},code=sm_{a}" for a in archs]
    gencode.append(f"-gencode arch=compute_{archs[-1]},code=compute_{archs[-1]}")
    defines = ["-DPYOPS_X86_ISAS"] * X86 + ["-DPYOPS_WITH_CUDA"] * bool(cuda)
    torch_flags = f"-O2 -DTORCH_TARGET_VERSION=0x020b000000000000 -isystem {torch_dir}/include -I{csrc}"
    torch_flags += f" -isystem {cuda[0].parent.parent}/include" if cuda else ""
    build_facts = {
        "COMPILER": output_of(*shlex.split(CXX), "--version").splitlines()[0],
        "TORCH": torch.__version__,
        "ISAS": " ".join(ISAS),
        "CUDA": cuda[1] if cuda else "",
        "CUDA_ARCHS": " ".join([*archs, f"{archs[-1]}+PTX"]) if cuda else "",
    }
    info_flags = " ".join(f"'-DPYOPS_BUILD_{key}=\"{value}\"'" for key, value in build_facts.items())
    head = {"builddir": BUILD, "cxx": CXX, "csrc": csrc, "defines": " ".join(defines)}
    head |= {"nvcc": cuda[0], "archs": " ".join(gencode)} if cuda else {}
    text = [*(f"{name} = {value}" for name, value in head.items()), RULES]
    objects = []

    def compile_(source, suffix="", rule="cxx", flags=""):
        out = BUILD / f"{source.relative_to(csrc).with_suffix('')}{suffix}.o".replace("/", ".")
        text.append(f"build {out}: {rule} {source}\n  flags = {flags}\n")
        return out

    for source in sorted(csrc.glob("*/*_cpu.cpp")):
        for isa in ISAS:
            flags = f"{KERNEL_FLAGS} {ISA_FLAGS[isa]} -DPYOPS_ISA=isa_{isa} -I{csrc}"
            objects.append(compile_(source, f".{isa}", flags=flags))
    portable = [*sorted(csrc.glob("*/*_op.cpp")), *sorted(csrc.glob("common/*.cpp"))]
    objects += [compile_(source, flags=torch_flags) for source in portable]
    objects += [compile_(csrc / "info.cpp", flags=f"{torch_flags} {info_flags}")]
    cudart = ""
    if cuda:
        objects += [compile_(source, rule="nvcc") for source in cuda_sources]
        cudart = f"{next(cuda[0].parent.parent.glob('lib*/libcudart_static.a'))} -lrt -ldl -lpthread"
    # No -fopenmp here: GOMP_* then resolves to whichever OpenMP runtime libtorch_cpu.so itself depends on.
    # --no-as-needed keeps libtorch.so, through which a CUDA build of torch offers its stream.
    torch_libs = f"-L{torch_dir}/lib -Wl,--no-as-needed -ltorch_cpu -ltorch -lc10"
    text.append(f"build {lib}: link {' '.join(map(str, objects))}\n  flags = {torch_libs} {cudart}\n")
    python = f"-O2 -isystem {pybind11.get_include()} -isystem {sysconfig.get_path('include')}"
    flags = f"-L{lib.parent} -lpyops '-Wl,-rpath,$$ORIGIN/lib'"
    glue = compile_(csrc / "module.cpp", flags=python)
    text.append(f"build {module}: link {glue} | {lib}\n  flags = {flags}\n")
    BUILD.mkdir(parents=True, exist_ok=True)
    (BUILD / "build.ninja").write_text("\n".join(text))


class NinjaBuild(build_ext):
    def run(self):
        package = ROOT / "pyops" if self.inplace else Path(self.build_lib).resolve() / "pyops"
        lib = package / "lib" / "libpyops.so"
        module = package / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"
        write_ninja(lib, module)
        print(f"pyops: building {lib.name} for {', '.join(ISAS)} in {BUILD}", flush=True)
        if subprocess.run([*NINJA, "-f", BUILD / "build.ninja"], cwd=ROOT).returncode != 0:
            sys.exit("pyops: the build failed; the compiler's message is above")


if CXX is None or platform.system() != "Linux":
    print("pyops: no Linux C++ compiler: a Python-only install, every op runs its plain torch reference")
    setup()
else:
    setup(ext_modules=[Extension("pyops._C", sources=[])], cmdclass={"build_ext": NinjaBuild})
