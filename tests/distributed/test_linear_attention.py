"""pyops.distributed.linear_attention on gloo processes."""

import re
import subprocess
import sys

import pytest
from suite import ROOT

from distributed import spawn

MODULE = "distributed.linear_attention_cases"
CASES = [
    "forms", "packed", "packed_resets_and_nan", "normalized", "options",
    "dtypes", "many_blocks", "resets", "through_the_state_alone", "segments", "autocast",
    "all_ranks_work_at_once", "inside_a_compiled_module", "refusals",
]  # fmt: skip


def check(results, ranks):
    for case, found in results.items():
        for rank, result in enumerate(found):
            assert not isinstance(result, str), f"{case}, rank {rank}: {result}"
    # One state forward and one gradient backward, over each border.
    counts = [[0, (rank < ranks - 1) + (rank > 0)] for rank in range(ranks)]
    assert results["all_ranks_work_at_once"] == counts


def test_four_processes(tmp_path):
    check(spawn.run(MODULE, [*CASES, "groups"], 4, tmp_path), 4)


@pytest.mark.slow
def test_two_processes(tmp_path):
    check(spawn.run(MODULE, CASES, 2, tmp_path), 2)


def test_readme_example(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (code,) = [block for block in blocks if "init_process_group" in block]
    (tmp_path / "spread.py").write_text(code)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run = subprocess.run(
        [*command, str(tmp_path / "spread.py")], capture_output=True, text=True, cwd=ROOT, timeout=300
    )
    assert run.returncode == 0 and run.stdout.count("True") == 4, run.stdout + run.stderr
