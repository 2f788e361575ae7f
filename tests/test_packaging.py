"""What the build makes: objects true to their instruction set, installs of every kind, refusals."""

import contextlib
import os
import re
import shutil
import subprocess
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
OBJECTS = sorted((ROOT / "build" / "native").glob("*_cpu.*.o"))

needs_objects = pytest.mark.skipif(
    not OBJECTS or not shutil.which("nm"), reason="no objects in build/native, or no binutils, to look into"
)


def run(*command, cwd=ROOT, **environment):
    env = {**os.environ, **environment}
    return subprocess.run([*map(str, command)], cwd=cwd, env=env, capture_output=True, text=True, timeout=900)


def isa_of(path):
    return path.name.split(".")[-2]


def leaks(symbols, isa):
    """The functions of an `nm --defined-only` listing that lie outside isa's namespace."""
    functions = re.findall(r"^[0-9a-f]* ?([WT]) (.+)$", symbols, re.MULTILINE)
    return [name for _, name in functions if f"isa_{isa}" not in name]


def test_leaks_are_recognised():
    listing = (
        "00 W std::vector<int>::push_back(int)\n00 T pyops::isa_avx2::run(int)\n00 t local\n00 V DW.ref.x\n"
    )
    assert leaks(listing, "avx2") == ["std::vector<int>::push_back(int)"]
    assert len(leaks(listing, "avx512")) == 2


@needs_objects
@pytest.mark.parametrize("path", OBJECTS, ids=lambda path: path.name)
def test_no_symbol_outside_its_instruction_set(path):
    """The linker keeps one copy of a weak function; if that is the AVX-512 one, an older CPU dies of it."""
    symbols = run("nm", "--defined-only", path).stdout
    assert f"isa_{isa_of(path)}" in symbols
    assert leaks(symbols, isa_of(path)) == []


@needs_objects
@pytest.mark.parametrize("path", [p for p in OBJECTS if isa_of(p) != "avx512"], ids=lambda path: path.name)
def test_no_wider_registers(path):
    assembly = run("objdump", "-d", "--no-show-raw-insn", path).stdout
    assert "xmm" in assembly
    wider = {
        "default": r"%[yz]mm|%k[0-7]|\bv[a-z0-9]+\s+%xmm",
        "avx2": r"%zmm|%k[0-7]|%xmm(1[6-9]|2\d|3[01])",
    }
    assert re.findall(rf".*(?:{wider[isa_of(path)]}).*", assembly)[:3] == []


@needs_objects
def test_wide_registers_are_used_where_they_should_be():
    for path in OBJECTS:
        if isa_of(path) != "default":
            assert ("%zmm" if isa_of(path) == "avx512" else "%ymm") in run("objdump", "-d", path).stdout


TOY = {
    "toy.h": "namespace pyops::isa_default { int toy(); }\n",
    "toy_cpu.cpp": "namespace pyops::PYOPS_ISA { int toy() { return 7; } }\n",
    "toy_op.cpp": """
        #include <torch/csrc/stable/library.h>
        #include "toy.h"
        namespace {
        #if defined(PYOPS_WITH_CUDA)
        extern "C" int toy_launch();
        int64_t toy() { return pyops::isa_default::toy() + (toy_launch() >= 0 ? 100 : 0); }
        #else
        int64_t toy() { return pyops::isa_default::toy(); }
        #endif
        }
        STABLE_TORCH_LIBRARY_FRAGMENT(pyops_toy, m) { m.def("toy() -> int"); }
        STABLE_TORCH_LIBRARY_IMPL(pyops_toy, CompositeExplicitAutograd, m) { m.impl("toy", TORCH_BOX(&toy)); }
    """,
    "toy_cuda.cu": """
        __global__ void fill(float* x) { x[blockIdx.x * blockDim.x + threadIdx.x] = 1.0f; }
        extern "C" int toy_launch() { fill<<<1, 32>>>(nullptr); return (int)cudaGetLastError(); }
    """,
}
NVCC = Path(os.environ.get("CUDA_HOME") or "/usr/local/cuda") / "bin" / "nvcc"


@pytest.fixture
def toy(tmp_path):
    """A checkout with one op, and a function that builds it and returns (output, what the op says)."""
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "pyops").mkdir()
    shutil.copytree(ROOT / "csrc" / "common", tmp_path / "csrc" / "common")
    for name in ("info.h", "info.cpp", "module.cpp"):
        shutil.copy(ROOT / "csrc" / name, tmp_path / "csrc")
    (tmp_path / "csrc" / "toy").mkdir()
    for name, text in TOY.items():
        (tmp_path / "csrc" / "toy" / name).write_text(text)

    def build(**environment):
        built = run(sys.executable, "setup.py", "-q", "build_ext", "--inplace", cwd=tmp_path, **environment)
        assert built.returncode == 0, built.stdout + built.stderr
        load = (
            "import torch; torch.ops.load_library('pyops/lib/libpyops.so'); print(torch.ops.pyops_toy.toy())"
        )
        called = run(sys.executable, "-c", load, cwd=tmp_path)
        assert called.returncode == 0, called.stderr
        return built.stdout, int(called.stdout)

    return tmp_path, build


def test_sources_are_found_by_name_and_built_when_they_change(toy):
    folder, build = toy
    output, value = build(PYOPS_CUDA="0")
    assert "toy.toy_cpu.avx2.o" in output or "avx2" not in output
    assert value == 7
    output, _ = build(PYOPS_CUDA="0")
    assert "no work to do" in output
    header = folder / "csrc" / "toy" / "toy.h"
    header.write_text(header.read_text() + "// changed\n")
    output, _ = build(PYOPS_CUDA="0")
    assert "toy.toy_op.o" in output
    assert "toy_cpu" not in output
    assert "info.o" not in output


def test_a_new_library_takes_the_place_of_the_old_one_at_once(toy):
    """A process that has the old file open keeps it, and a failed link leaves it."""
    folder, build = toy
    build(PYOPS_CUDA="0")
    libraries = [*folder.glob("pyops/_C*.so"), folder / "pyops" / "lib" / "libpyops.so"]
    before = [path.read_bytes() for path in libraries]
    source = folder / "csrc" / "toy" / "toy_cpu.cpp"
    source.write_text(source.read_text().replace("7", "8"))
    with contextlib.ExitStack() as stack:
        running = [stack.enter_context(path.open("rb")) for path in libraries]
        _, value = build(PYOPS_CUDA="0")
        assert value == 8
        assert [file.read() for file in running] == before
    assert libraries[1].read_bytes() != before[1]
    assert {path.name for path in folder.glob("pyops/**/*.so*")} == {path.name for path in libraries}


@pytest.mark.skipif(not NVCC.is_file(), reason=f"no nvcc at {NVCC}")
def test_cuda_sources_need_nvcc_but_neither_a_gpu_nor_a_cuda_torch(toy):
    folder, build = toy
    _, value = build(PYOPS_CUDA="1", PYOPS_CUDA_ARCHS="90")
    assert value == 107
    report = (folder / "build" / "native" / "toy.toy_cuda.o.ptxas.txt").read_text()
    assert "sm_90" in report
    assert "registers" in report


def test_regular_install(tmp_path):
    """Built into a wheel, pyops carries its library, and triton_kernels only as a part of itself."""
    target = tmp_path / "site"
    pip = (
        sys.executable,
        "-m",
        "pip",
        "install",
        "--no-build-isolation",
        "--no-deps",
        "--target",
        target,
        ".",
    )
    result = run(*pip)
    assert result.returncode == 0, result.stdout + result.stderr
    assert (target / "pyops" / "lib" / "libpyops.so").is_file()
    assert (target / "pyops" / "triton_kernels" / "lmo.py").is_file()
    assert not (target / "triton_kernels").exists()
    script = "import pyops, torch; print(pyops.__file__, pyops.which('polar', torch.ones(2, 2)))"
    result = run(sys.executable, "-c", script, cwd=tmp_path, PYTHONPATH=str(target))
    assert result.stdout.startswith(str(target)), result.stderr
    assert "cpu:" in result.stdout


def test_triton_kernels_is_no_top_level_package(tmp_path):
    script = (
        "from importlib.util import find_spec;"
        "print(find_spec('pyops.triton_kernels').name, find_spec('triton_kernels'))"
    )
    result = run(sys.executable, "-c", script, cwd=tmp_path)
    assert result.stdout.split() == ["pyops.triton_kernels", "None"], result.stderr


@pytest.fixture
def python_only(tmp_path):
    """A copy of the package as a Python-only install leaves it."""
    ignore = shutil.ignore_patterns("lib", "_C*.so", "__pycache__")
    shutil.copytree(ROOT / "pyops", tmp_path / "pyops", ignore=ignore)
    shutil.copytree(ROOT / "triton_kernels", tmp_path / "pyops" / "triton_kernels", ignore=ignore)
    return tmp_path


def test_without_the_library_the_reference_serves_and_says_so_once(python_only):
    script = (
        "import torch, pyops; g = torch.eye(3); print(pyops.which('polar', g)); pyops.polar(g);"
        "pyops.polar(g); print(torch.allclose(pyops.polar(g, method='svd'), g, atol=1e-5))"
    )
    result = run(sys.executable, "-c", script, cwd=python_only)
    assert result.stdout.split() == ["reference", "True"], result.stderr
    assert result.stderr.count("plain torch reference") == 1


def test_a_build_for_another_python_says_so(python_only):
    (python_only / "pyops" / "lib").mkdir()
    (python_only / "pyops" / "lib" / "libpyops.so").touch()
    (python_only / "pyops" / f"_C{EXTENSION_SUFFIXES[0]}").touch()
    result = run(sys.executable, "-c", "import pyops", cwd=python_only)
    assert "ImportError: pyops is built, but not for Python" in result.stderr.strip().splitlines()[-1]


def test_without_the_library_strict_refuses(python_only):
    script = "import torch, pyops; pyops.polar(torch.eye(3))"
    result = run(sys.executable, "-W", "ignore", "-c", script, cwd=python_only, PYOPS_STRICT="1")
    assert "PYOPS_STRICT=1" in result.stderr.strip().splitlines()[-1]


def test_no_compiler_is_a_python_only_install():
    result = run(sys.executable, "setup.py", "--name", PATH=str(Path(sys.executable).parent), CXX="")
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("Python-only install") == 1


@pytest.mark.parametrize(
    ("environment", "sentence"),
    [
        (
            {"PYOPS_CUDA": "1", "CUDA_HOME": "/nowhere"},
            "PYOPS_CUDA=1 asks for CUDA kernels, but there is no nvcc at /nowhere",
        ),
        ({"PYOPS_CUDA": "maybe"}, "PYOPS_CUDA must be 0 or 1, got 'maybe'"),
    ],
)
def test_refusals_are_one_sentence(environment, sentence):
    result = run(sys.executable, "setup.py", "-q", "build_ext", "--inplace", **environment)
    assert result.returncode != 0
    assert sentence in result.stderr
    assert "Traceback" not in result.stderr
