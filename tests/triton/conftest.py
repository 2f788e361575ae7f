"""Makes aot.py and interp.py importable and offers `run`, which runs a launcher on each backend that can."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

import interp


@pytest.fixture(scope="session")
def interpreter():
    process = interp.Interpreter()
    yield process
    process.close()


@pytest.fixture(params=["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def run(request):
    """`run(function, *args)` -> (result, args afterwards), by the interpreter and, if there is one, a GPU."""
    if request.param == "cuda":
        return interp.Device().run
    return request.getfixturevalue("interpreter").run
