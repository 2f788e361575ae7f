"""Every op has the same stem in every folder, one schema, and a row in the README's backend table."""

import doctest
import inspect
import re
from pathlib import Path

import pytest
import torch

import pyops  # registers the ops
from pyops._info import GPU_BACKENDS
from pyops._library import OPS, load

ROOT = Path(__file__).resolve().parent.parent

# Where an op's stem must appear; {} is the stem.
PLACES = [
    "csrc/{0}/{0}.h",
    "csrc/{0}/{0}_cpu.cpp",
    "csrc/{0}/{0}_cuda.cu",
    "csrc/{0}/{0}_op.cpp",
    "triton_kernels/{0}.py",
    "pyops/ops/{0}.py",
    "pyops/reference/{0}.py",
    "tests/test_{0}.py",
    "tests/triton/test_{0}.py",
    "tests/cuda/test_{0}_cuda.py",
    "bench/bench_{0}.py",
]
# (stem, place) -> why the op has nothing there.
TILES = "products of tiles: Triton serves it"
BUTTERFLIES = "transforms of tubes around small products: CUDA serves it"
CORNERS = "tiles of queries x items: Triton serves it"
ABSENT: dict[tuple[str, str], str] = {
    ("boxes", "csrc/{0}/{0}_cuda.cu"): CORNERS,
    ("boxes", "tests/cuda/test_{0}_cuda.py"): CORNERS,
    ("linear_attention", "csrc/{0}/{0}_cuda.cu"): TILES,
    ("linear_attention", "tests/cuda/test_{0}_cuda.py"): TILES,
    ("tubal", "triton_kernels/{0}.py"): BUTTERFLIES,
    ("tubal", "tests/triton/test_{0}.py"): BUTTERFLIES,
}


def stems_at(place):
    """The stems that occur at one place of the tree."""
    pattern = re.compile(
        re.escape(place).replace(r"\{0\}", "(?P<stem>[a-z][a-z0-9_]*)", 1).replace(r"\{0\}", "(?P=stem)")
    )
    found = (pattern.fullmatch(str(p.relative_to(ROOT))) for p in ROOT.glob(place.replace("{0}", "*")))
    return {match["stem"] for match in found if match}


STEMS = set().union(*(stems_at(place) for place in PLACES if not place.startswith("tests/")))
CASES = [(stem, place) for stem in sorted(STEMS) for place in PLACES]


def test_the_ops_that_exist_are_found():
    assert {"linear_attention", "lmo"} <= STEMS


@pytest.mark.parametrize(("stem", "place"), CASES)
def test_stem_in_every_folder(stem, place):
    path = ROOT / place.format(stem)
    reason = ABSENT.get((stem, place))
    if reason is None:
        assert path.is_file(), f"{stem} has no {path.relative_to(ROOT)}, and ABSENT gives no reason for that"
    else:
        assert not path.exists(), f"ABSENT says why there is no {path.relative_to(ROOT)}, but there is one"


@pytest.mark.parametrize("op", sorted(OPS))
def test_one_schema(op):
    if not load():
        pytest.skip("the library is not built, so there is one schema only")
    registered = getattr(torch.ops.pyops, op).default._schema
    assert str(registered) == str(torch._C.parse_schema(f"pyops::{op}{OPS[op].schema}"))


def test_readme_lists_the_backend_of_every_op():
    rows = re.findall(
        r"^\| `(\w+)` \| (\w+) \| (.+?) \| (.+?) \|$", (ROOT / "README.md").read_text(), re.MULTILINE
    )
    documented = {name: (kind.lower(), why, hardware) for name, kind, why, hardware in rows}
    assert documented == {name: tuple(backend) for name, backend in GPU_BACKENDS.items()}
    assert set(documented) == set(OPS)


BLOCKS = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.splitlines()[-2][:40].strip())
def test_readme_blocks_run_alone(block):
    if "init_process_group" in block:
        compile(block, "README.md", "exec")  # torchrun runs it
    elif ">>> " in block:
        example = doctest.DocTestParser().get_doctest(block, {}, "README.md", "README.md", 0)
        found = doctest.DocTestRunner().run(example)
        assert found.attempted > 0 and found.failed == 0
    else:
        exec(compile(block, "README.md", "exec"), {})


def test_readme_names_every_reproduction():
    (row,) = re.findall(
        r"^\| (`python -m pyops reproduce .*?) \|", (ROOT / "README.md").read_text(), re.MULTILINE
    )
    for path in ROOT.glob("seeds/*/reproduce.py"):
        assert path.parent.name in row


def test_public_functions_show_public_arguments_alone():
    for name in pyops.__all__:
        if inspect.isfunction(public := getattr(pyops, name)):
            assert not [a for a in inspect.signature(public).parameters if a.startswith("_")], name
