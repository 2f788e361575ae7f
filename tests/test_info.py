"""The command line's facts, the instruction-set cap, and the thread count."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import pyops
from pyops import __main__ as command_line
from pyops import _info, _library

needs_library = pytest.mark.skipif(not _library.load(), reason="the compiled library is not built")


def run(*arguments, **environment):
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        timeout=300,
    )


def info(**environment):
    result = run("-m", "pyops", "info", "--json", **environment)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_info_names_versions_and_serves_every_op():
    facts = info()
    assert facts["versions"]["torch"] == torch.__version__
    rows = {(row["op"], row["device"]): row for row in facts["ops"]}
    assert {"polar", "unit_direction", "lmo_step_"} <= {op for op, _ in rows}
    for (op, device), row in rows.items():
        assert row["backend"].split(" ")[0] == _library.backend(op, device)
        assert row["why"]
        assert row["run on hardware"]


def test_text_form_has_a_line_for_every_op_and_device():
    text = run("-m", "pyops", "info").stdout
    for row in info()["ops"]:
        assert any(
            line.startswith(f"{row['op']} ") and row["device"] in line and row["why"] in line
            for line in text.split("\n")
        )


@needs_library
@pytest.mark.parametrize("cap", ["default", "avx2", "avx512"])
def test_cap(cap):
    order = ["default", "avx2", "avx512"]
    facts = info(PYOPS_CPU_ISA=cap)
    cpu = facts["cpu"]
    assert cpu["isa"] == order[min(order.index(cap), order.index(cpu["detected"]))]
    assert not (cpu["amx"] and cpu["isa"] != "avx512")
    kernels = {op.name for op in _library.OPS.values() if not op.plain}
    served = {
        row["backend"].split(" ")[0]
        for row in facts["ops"]
        if row["device"] == "cpu" and row["op"] in kernels
    }
    assert served == {f"cpu:{cpu['isa']}"}


@needs_library
def test_wrong_cap_is_reported_by_import():
    result = run("-c", "import pyops; pyops.which('polar')", PYOPS_CPU_ISA="sse9")
    assert result.returncode != 0
    assert "PYOPS_CPU_ISA must be default, avx2 or avx512, got 'sse9'" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "choices"),
    [
        (["fly"], ["info", "demo", "bench", "reproduce"]),
        (["reproduce", "nothing"], ["unknown paper 'nothing'", "scion"]),
    ],
)
def test_unknown_choice(arguments, choices):
    result = run("-m", "pyops", *arguments)
    assert result.returncode == 2
    assert all(choice in result.stderr for choice in choices)


def test_version_is_the_packages():
    result = run("-m", "pyops", "--version")
    assert result.stdout == f"pyops {pyops.__version__}\n"
    project = (Path(__file__).parent.parent / "pyproject.toml").read_text()
    assert re.search(r'^version = "(.*)"$', project, re.MULTILINE)[1] == pyops.__version__
    assert _info.info()["versions"]["pyops"] == pyops.__version__


def test_reproduce_writes_below_the_folder_it_is_called_from(monkeypatch, tmp_path):
    commands = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command_line, "_run", lambda *command: commands.append(command) or 0)
    assert command_line.main(["reproduce", "scion", "--out", "here"]) == 0
    assert [command[1:] for command in commands] == [("--out", str(tmp_path / "here" / "scion"))]


def test_reproduce_lists_papers():
    result = run("-m", "pyops", "reproduce", "--list")
    assert result.returncode == 0
    lines = dict(line.split(maxsplit=1) for line in result.stdout.splitlines())
    assert list(lines) == list(command_line.papers())
    assert all(re.fullmatch(r"\w.*\w \(.*(minutes|hour).*\)", line) for line in lines.values())


def test_dir_lists_what_is_public():
    names = run("-c", "import pyops; print(*dir(pyops))").stdout.split()
    assert set(pyops.__all__) <= set(names)
    assert [name for name in names if not name.startswith("__") and name not in pyops.__all__] == []


def test_which_rejects_an_unknown_op():
    with pytest.raises(ValueError, match=r"op must be one of .*polar.*got 'nothing'"):
        _library.which("nothing")


@needs_library
@pytest.mark.parametrize("threads", [1, 2])
def test_kernels_use_torch_threads(threads):
    torch.set_num_threads(threads)
    assert _library.cpu_info()["threads"] == threads


FORK = """
import os, sys, torch, pyops
torch.set_num_threads(2)
torch.ones(1 << 20).mul_(2)  # starts the thread pool
g = torch.randn(2, 96, 128)  # too small for torch to share out: its own threaded ops would wait forever
expected = pyops.polar(g)
child = os.fork()
if child == 0:
    from pyops import _library
    same = (pyops.polar(g).numpy() == expected.numpy()).all()
    os._exit(0 if same and _library.cpu_info()["threads"] == 1 else 3)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@needs_library
def test_forked_child_of_a_threaded_parent_does_not_hang():
    result = run("-c", FORK)
    assert result.returncode == 0, result.stderr


SINGLE_FORK = """
import os, sys, torch
from pyops import _library
_library.load()
assert len(os.listdir("/proc/self/task")) == 1
child = os.fork()
if child == 0:
    torch.set_num_threads(2)
    os._exit(0 if _library.cpu_info()["threads"] == 2 else 3)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@needs_library
def test_forked_child_of_a_single_threaded_parent_keeps_its_threads():
    result = run("-c", SINGLE_FORK, OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")
    assert result.returncode == 0, result.stderr


@needs_library
def test_one_openmp_runtime():
    script = (
        "import torch, pyops; torch.set_num_threads(2); pyops.polar(torch.randn(4, 64, 64));"
        "print(*{line.split()[-1] for line in open('/proc/self/maps') if 'gomp' in line or 'libomp' in line})"
    )
    assert len(run("-c", script).stdout.split()) == 1


STRICT = """
import torch
from pyops import _library
_library.register("twice", "(Tensor x) -> Tensor", reference=lambda x: 2 * x, fake=torch.empty_like)
assert _library.which("twice", torch.ones(2)) == "reference"
print(torch.ops.pyops.twice(torch.ones(2)).tolist())
torch.ops.pyops.twice(torch.ones(2))
"""


def test_reference_warns_once():
    result = run("-c", STRICT)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[2.0, 2.0]"
    assert result.stderr.count("plain torch reference") == 1


def test_strict_forbids_the_reference():
    result = run("-c", STRICT, PYOPS_STRICT="1")
    assert result.returncode == 1
    assert "RuntimeError: pyops::twice has no kernel for cpu here" in result.stderr
