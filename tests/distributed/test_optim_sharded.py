"""Scion and Muon with DTensor, FSDP2 and DistributedDataParallel parameters, on gloo processes."""

import pytest

from distributed import spawn

MODULE = "distributed.cases"
CASES = [
    "placements", "muon_placements", "dtypes", "ranks_take_turns", "fsdp", "fsdp_ranks_see_different_data",
    "fsdp_accumulation", "fsdp_clipping", "init_and_ratios", "nonfinite", "ddp", "ddp_clipping",
    "fsdp1", "stochastic_rounding", "checkpoint",
]  # fmt: skip


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Every case on two processes, started once."""
    return spawn.run(MODULE, CASES, 2, tmp_path_factory.mktemp("two"))


@pytest.mark.parametrize("case", CASES)
def test_two_processes(two, case):
    for rank, result in enumerate(two[case]):
        assert not isinstance(result, str), f"rank {rank}: {result}"
    if case == "ranks_take_turns":
        assert two[case] == [3, 3]
    if case == "init_and_ratios":
        assert two[case][0] == two[case][1]


FOUR = [*CASES, "meshes"]


@pytest.mark.slow
def test_four_processes(tmp_path):
    results = spawn.run(MODULE, FOUR, 4, tmp_path)
    for case, ranks in results.items():
        for rank, result in enumerate(ranks):
            assert not isinstance(result, str), f"{case}, rank {rank}: {result}"
    assert results["ranks_take_turns"] == [3] * 4
