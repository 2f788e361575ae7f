"""Shared test configuration."""

import os

# Read by the extension's allocation helper: every output is NaN before its kernel runs.
os.environ["PYOPS_POISON"] = "1"

import pytest
import torch


def pytest_addoption(parser):
    parser.addoption("--run-slow", action="store_true", help="run the tests marked slow too")


def pytest_collection_modifyitems(config, items):
    for item in items:
        if "slow" in item.keywords and not config.getoption("--run-slow"):
            item.add_marker(pytest.mark.skip(reason="slow: add --run-slow"))
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="gpu: no CUDA device here"))


@pytest.fixture(autouse=True)
def seeded():
    """Every test starts from the same random state and leaves the thread count as it found it."""
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def poison(monkeypatch):
    """Fills every tensor that Python code allocates by torch.empty, empty_like or new_empty with NaN."""

    def poisoned(allocate):
        def fill(*args, **kwargs):
            out = allocate(*args, **kwargs)
            return out.fill_(float("nan")) if out.is_floating_point() else out

        return fill

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))
