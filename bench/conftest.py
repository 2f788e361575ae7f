"""pytest-benchmark on the same cases: one test = one op at one shape in one implementation, grouped by shape.

Groups run one after another, so the ratios of record come from `python -m pyops bench`, which interleaves.
"""

import pytest
import torch

from bench.case import SCALES, Missing


def pytest_addoption(parser):
    parser.addoption("--scale", choices=SCALES, default=SCALES[0], help="shapes: full, quick or tiny")
    parser.addoption("--threads", type=int, default=2)


def pytest_generate_tests(metafunc):
    if {"case", "impl"} <= set(metafunc.fixturenames):
        cases = metafunc.module.cases("cpu", metafunc.config.getoption("--scale"))
        pairs = [(case, impl) for case in cases if not case.env for impl in case.implementations]
        names = [f"{case.name}: {impl.name}" for case, impl in pairs]
        metafunc.parametrize(("case", "impl"), pairs, ids=names)


@pytest.fixture
def measured(benchmark, pytestconfig):
    """A function that checks one result of an implementation and then times it."""
    torch.set_num_threads(pytestconfig.getoption("--threads"))

    def run(case, impl):
        torch.compiler.reset()
        generator = torch.Generator().manual_seed(20250701)
        with torch.no_grad():
            try:
                runner = impl.build()
            except Missing as reason:
                pytest.skip(f"missing: {reason}")
            torch.set_float32_matmul_precision("highest")
            inputs = case.inputs(generator)
            error = case.error(impl, inputs, runner.run(*runner.prepare(*inputs)))
            benchmark.group = case.name
            benchmark.extra_info.update(error=error, flops=case.flops, bytes=case.bytes)
            benchmark.pedantic(
                runner.run,
                setup=lambda: (runner.prepare(*case.inputs(generator)), {}),
                rounds=case.rounds,
                warmup_rounds=2,
            )

    return run
