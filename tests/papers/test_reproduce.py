"""The conventions that every seed's reproduce.py follows, on a toy seed in a folder of its own."""

import json
import math
import os
import signal
import subprocess
import sys
import time

import pytest

from pyops import reproduce

TOY = """
import os, sys, time
from dataclasses import dataclass
from pathlib import Path
from pyops.reproduce import main

HERE = Path(__file__).parent

@dataclass(frozen=True)
class Run:
    n: int
    work: float = 2.0

def square(run, tick):
    with open(HERE / "calls", "a") as calls:
        calls.write(f"{run.n} {os.getpid()}\\n")
    if run.n == 13:
        raise ValueError("unlucky")
    for _ in range(2):
        tick(1.0, f"run {run.n}", "going")
        if run.n >= 100:
            while True:
                time.sleep(0.02)
                tick(0.0)
    return run.n**2

def study(report):
    values = report.map(square, [Run(int(n)) for n in os.environ["RUNS"].split()])
    report.told("mode", report.mode)
    report.criterion("sum", sum(values), at_most=20)
    from matplotlib import pyplot
    figure, axes = pyplot.subplots()
    axes.plot(values)
    report.plot("values", figure)

if __name__ == "__main__":
    sys.exit(main(__file__, study))
"""


def until(condition, seconds=240):
    """Waits for a condition; a loaded machine takes a while to start a process."""
    deadline = time.time() + seconds
    while not condition():
        assert time.time() < deadline
        time.sleep(0.05)


@pytest.fixture
def toy(tmp_path):
    """Starts the toy seed from a foreign folder; wait=False gives the running process."""
    folder, out, elsewhere = tmp_path / "toy", tmp_path / "out", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.mkdir()
    script = folder / "reproduce.py"
    script.write_text(TOY)

    def start(runs, *argv, wait=True):
        process = subprocess.Popen(
            [sys.executable, str(script), "--out", str(out), *argv],
            cwd=elsewhere,
            env={**os.environ, "RUNS": runs, "PYTHONPATH": str(reproduce.CHECKOUT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # A test run in the background of a script ignores Ctrl-C and hands that down.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        if not wait:
            return process
        process.output, process.errors = process.communicate(timeout=300)
        assert list(elsewhere.iterdir()) == []
        assert not list(tmp_path.rglob("*.tmp"))
        return process

    def calls():
        path = folder / "calls"
        return (
            [tuple(map(int, line.split())) for line in path.read_text().splitlines()] if path.exists() else []
        )

    start.calls, start.out, start.script = calls, out, script
    return start


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_a_met_criterion_passes(toy, jobs):
    done = toy("1 2 3", "--jobs", jobs)
    assert done.returncode == 0, done.errors
    assert "ok    sum " in done.output and "<= 20" in done.output and "told  mode" in done.output
    assert "100%" in done.errors
    written = json.loads((toy.out / "toy.json").read_text())
    assert written["passed"] and written["mode"] == "full" and written["plots"] == ["values.png"]
    assert written["lines"][1] == {"verdict": "ok", "name": "sum", "value": 14, "bound": "<= 20"}
    assert (toy.out / "values.png").read_bytes()[:4] == b"\x89PNG"


def test_a_planted_miss_exits_with_one_and_is_written_down(toy):
    done = toy("4 5", "--jobs", "1", "--quick")
    assert done.returncode == 1
    assert "MISS  sum " in done.output and "toy: MISSED sum" in done.output
    written = json.loads((toy.out / "toy.json").read_text())
    assert not written["passed"] and written["mode"] == "quick"


@pytest.mark.parametrize("argv", [["--jobs", "0"], ["--fast"], ["--demo"]])
def test_wrong_usage_exits_with_two(toy, argv):
    done = toy("1", *argv)
    assert done.returncode == 2 and argv[0] in done.errors
    assert not toy.out.exists()


def test_finished_runs_are_kept_until_a_source_changes(toy):
    assert toy("1 2", "--jobs", "1").returncode == 0
    assert toy("1 2 3", "--jobs", "1").returncode == 0
    assert [n for n, _ in toy.calls()] == [1, 2, 3]
    toy.script.write_text(TOY + "# changed\n")
    assert toy("1 2", "--jobs", "1").returncode == 0
    assert [n for n, _ in toy.calls()] == [1, 2, 3, 1, 2]


@pytest.mark.parametrize("jobs, sent", [("1", signal.SIGINT), ("2", signal.SIGTERM)])
def test_an_interrupted_run_goes_on_later(toy, jobs, sent):
    process = toy("1 100 2", "--jobs", jobs, wait=False)
    kept = toy.out / "runs"
    expected = 1 if jobs == "1" else 2
    until(lambda: len(toy.calls()) > expected and len(list(kept.glob("*.json"))) == expected)
    process.send_signal(sent)
    _, errors = process.communicate(timeout=240)
    assert process.returncode == reproduce.INTERRUPTED, errors
    assert "goes on from" in errors and "Traceback" not in errors
    assert not (toy.out / "toy.json").exists() and not list(toy.out.rglob("*.tmp"))
    for _, pid in toy.calls():
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert toy("1 2", "--jobs", jobs).returncode == 0
    assert sorted(n for n, _ in toy.calls()) == [1, 2, 100]


def test_workers_end_when_their_parent_is_killed(toy):
    process = toy("100 101", "--jobs", "2", wait=False)
    until(lambda: len(toy.calls()) == 2)
    process.kill()
    process.communicate(timeout=240)
    pids = [pid for _, pid in toy.calls()]
    until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids))


def test_an_error_in_a_worker_ends_the_program(toy):
    done = toy("1 13 100", "--jobs", "3")
    assert done.returncode == 1 and "ValueError: unlucky" in done.errors
    assert not (toy.out / "toy.json").exists()


def report(tmp_path):
    return reproduce.Report(tmp_path / "toy" / "reproduce.py", "full", tmp_path / "out", 1)


@pytest.mark.parametrize(
    "value, bounds, met",
    [
        (1.0, {"at_most": 1.0}, True),
        (1.1, {"at_most": 1.0}, False),
        (1.0, {"at_least": 1.0}, True),
        (0.9, {"at_least": 1.0}, False),
        (math.nan, {"at_most": 1.0}, False),
        (math.nan, {"at_least": 1.0}, False),
    ],
)
def test_criterion(tmp_path, capsys, value, bounds, met):
    made = report(tmp_path)
    assert made.criterion("name", value, **bounds) is met
    assert made.passed is met
    line = capsys.readouterr().out
    assert line.split()[:2] == ["ok" if met else "MISS", "name"]
    assert (">= 1" if "at_least" in bounds else "<= 1") in line


@pytest.mark.parametrize("bounds", [{}, {"at_most": 1.0, "at_least": 0.0}])
def test_criterion_wants_one_bound(tmp_path, bounds):
    with pytest.raises(ValueError, match="at_most or at_least"):
        report(tmp_path).criterion("name", 1.0, **bounds)


def test_json_has_no_nan(tmp_path):
    path = tmp_path / "x.json"
    reproduce.write_json(path, {64: [math.nan, math.inf, 1.5], "t": (1, "a")})
    assert json.loads(path.read_text()) == {"64": [None, None, 1.5], "t": [1, "a"]}


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "x.json"
    reproduce.write_json(path, 1)

    def fail(*_):
        raise OSError("disk")

    monkeypatch.setattr(reproduce.os, "replace", fail)
    with pytest.raises(OSError, match="disk"):
        reproduce.write_json(path, 2)
    assert path.read_text() == "1\n" and list(tmp_path.iterdir()) == [path]
