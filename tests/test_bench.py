"""The benchmark harness: pairing, roofline arithmetic, memory, reports, and the GPU check's dry run."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench import bench_lmo, gpu_driver, harness, lmo_peers, measure, report  # noqa: E402
from bench.case import Case, Impl, Missing, Runner, bound_seconds  # noqa: E402

PEAKS = {"float32": 1e12, "copy": 1e10}


def unavailable():
    raise Missing("cannot import nonesuch: no such module")


def double(x):
    return 2 * x


def wrong(x):
    return 2.1 * x


def slow_double(x):
    time.sleep(0.004)
    return 2 * x


SLOW = Impl("slow", lambda: Runner(slow_double))


def toy_case(ours=double, peers=(SLOW,), **more):
    def check(inputs, output):
        return (output - 2 * inputs[0]).abs().max()

    settings = {"flops": 1e6, "bytes": 1e3, "rounds": 5, **more}
    return Case(
        op="toy",
        name="double 64",
        compute="float32",
        inputs=lambda generator: (torch.randn(64, generator=generator),),
        ours=Impl("ours", lambda: Runner(ours)),
        peers=tuple(peers),
        check=check,
        error_bound=1e-6,
        **settings,
    )


def rows(result):
    return {row["name"]: row for row in result["implementations"]}


# ---- pairing


def test_a_slower_function_shows_its_ratio():
    samples = measure.paired(
        {"fast": Runner(lambda x: time.sleep(0.005)), "slow": Runner(lambda x: time.sleep(0.015))},
        lambda generator: (torch.zeros(1),),
        rounds=7,
        generator=torch.Generator(),
    )
    ratio = measure.spread([s / f for s, f in zip(samples["slow"], samples["fast"], strict=True)])
    assert 1.8 < ratio["median"] < 3.5
    assert ratio["q1"] <= ratio["median"] <= ratio["q3"]


def test_every_implementation_takes_every_place_in_a_round():
    names = ["a", "b", "c"]
    orders = [measure.rotated(names, turn) for turn in range(6)]
    assert all(sorted(order) == names for order in orders)
    for place in range(3):
        assert sorted(order[place] for order in orders) == sorted(names * 2)
    followers = {(order[i], order[i + 1]) for order in orders for i in range(2)}
    assert len(followers) == 6  # each pair of neighbours in both directions


def test_rounds_are_interleaved_on_the_same_fresh_inputs():
    seen = []

    def recorder(name):
        def run(x):
            seen.append((name, float(x.sum())))
            x.zero_()  # must reach nobody else

        return Runner(run)

    once = lambda run, calls: run(*calls[0]) or 1.0  # noqa: E731  a clock by which everything takes a second
    measure.paired(
        {"a": recorder("a"), "b": recorder("b")},
        lambda generator: (torch.randn(8, generator=generator),),
        rounds=4,
        generator=torch.Generator().manual_seed(1),
        timer=once,
        warmup=1,
    )
    timed = seen[2:]
    sums = []
    for turn in range(4):
        (first, x), (second, y) = timed[2 * turn : 2 * turn + 2]
        assert {first, second} == {"a", "b"} and x == y != 0.0
        sums.append(x)
    assert len(set(sums)) == 4


def test_warmup_is_not_counted():
    calls = iter(range(1000))
    clock = lambda run, args: 100.0 if next(calls) < 2 else 1.0  # noqa: E731
    samples = measure.paired({"a": Runner(double)}, lambda g: (torch.ones(1),), 3, torch.Generator(), clock)
    assert samples == {"a": [1.0, 1.0, 1.0]}


def test_short_calls_are_repeated_within_a_sample():
    lengths = []

    def clock(run, calls):
        lengths.append(len(calls))
        return 1e-4

    measure.paired({"a": Runner(double)}, lambda g: (torch.ones(1),), 2, torch.Generator(), clock)
    assert lengths == [1, 1, 20, 20]


def test_the_cuda_timer_counts_per_call_between_events(monkeypatch):
    log = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            log.append("event")

        def elapsed_time(self, end):
            return 6.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: log.append("synchronize"))
    timer = measure.CudaTimer(device="cpu", flush_bytes=16)
    assert timer(lambda: log.append("run"), [(), (), ()]) == pytest.approx(2e-3)
    assert log == ["event", "run", "run", "run", "event", "synchronize"]


# ---- one case


def test_roofline_is_the_larger_of_compute_and_traffic():
    assert bound_seconds(1e12, 1e9, 1e12, 1e10) == 1.0
    assert bound_seconds(1e12, 1e11, 1e12, 1e10) == 10.0


def test_a_case_reports_ratio_fraction_and_promise():
    result = measure.measure_case(toy_case(bar=(3.0, "slow")), PEAKS)
    table = rows(result)
    assert result["bound_seconds"] == 1e-6
    assert table["slow"]["ratio"]["median"] > 3
    for row in table.values():
        assert row["fraction"] == pytest.approx(1e-6 / row["seconds"]["median"])
        assert row["best_seconds"] <= row["seconds"]["median"]
    assert result["bar"]["met"] is True and result["best_peer"] == "slow"


def test_missing_and_wrong_implementations_are_named_and_not_timed():
    case = toy_case(peers=(Impl("gone", unavailable), Impl("liar", lambda: Runner(wrong))))
    table = rows(measure.measure_case(case, PEAKS))
    assert table["gone"]["status"] == "missing" and "nonesuch" in table["gone"]["reason"]
    assert table["liar"]["status"] == "failed" and "above" in table["liar"]["reason"]
    assert "seconds" not in table["gone"] and "seconds" not in table["liar"]
    assert table["ours"]["status"] == "ok"


def test_nan_does_not_pass_the_check():
    table = rows(measure.measure_case(toy_case(ours=lambda x: x * float("nan")), PEAKS))
    assert table["ours"]["status"] == "failed"


def test_a_variant_of_ours_is_no_peer():
    twin = Impl("twin", lambda: Runner(double))
    result = measure.measure_case(toy_case(variants=(twin,), bar=(1.0, "best")), PEAKS)
    assert rows(result)["twin"]["kind"] == "variant" and "ratio" in rows(result)["twin"]
    assert result["best_peer"] == "slow"


@pytest.mark.parametrize(
    ("bar", "met"),
    [((1.4, "best"), True), ((1.6, "best"), False), ((2.9, "b"), True), ((1.0, "gone"), False)],
)
def test_verdict(bar, met):
    table = [{"name": n, "kind": "peer", "ratio": {"median": m}} for n, m in (("a", 1.5), ("b", 3.0))]
    table += [{"name": "gone", "kind": "peer"}, {"name": "ours", "kind": "ours"}]
    out = measure.verdict(table, bar)
    assert out["best_peer"] == "a" and out["bar"]["met"] is met


def test_peaks_are_positive_rates_per_dtype():
    peaks = measure.measure_peaks(dtypes=("float32", "float64"), sizes=(64,), copy_bytes=4096, seconds=0.0)
    assert set(peaks) == {"float32", "float64", "copy"} and all(rate > 0 for rate in peaks.values())


MEMORY = """
import torch
from bench import measure
size = 64 * 2**20
def temporary():
    big = torch.ones(size, dtype=torch.uint8)
    return big[:1].clone()
for _ in range(2):
    print(measure.extra_bytes_cpu(temporary), measure.extra_bytes_cpu(lambda: None))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_extra_memory_sees_a_temporary_each_time():
    done = subprocess.run(
        [sys.executable, "-c", MEMORY],
        cwd=ROOT,
        env={**os.environ, **measure.MEMORY_ENV},
        capture_output=True,
        text=True,
        check=True,
    )
    for line in done.stdout.splitlines():
        taken, nothing = map(int, line.split())
        assert 60 * 2**20 < taken < 72 * 2**20
        assert nothing < 4 * 2**20


# ---- the report


@pytest.fixture
def toy(monkeypatch):
    """Puts toy cases in the place of the ops' files."""

    def use(*cases):
        monkeypatch.setattr(harness, "gather", lambda ops, device, scale, pattern="": list(cases))

    return use


def run_toy(tmp_path, *more):
    return harness.main(["--tiny", "--no-memory", "--out", str(tmp_path), *more])


def test_a_run_writes_json_and_page_and_names_the_missing(toy, tmp_path, capsys):
    toy(toy_case(peers=(SLOW, Impl("gone", unavailable))))
    assert run_toy(tmp_path) == 0
    printed = capsys.readouterr().out
    data = json.loads((tmp_path / "bench.json").read_text())
    assert data["schema"] == 1 and set(data["peaks"]) == {"bfloat16", "float32", "float64", "copy"}
    assert {"cpu", "cores", "threads", "isa", "torch", "date", "load_average"} <= set(data["machine"])
    case = data["cases"][0]
    assert {"op", "name", "flops", "bytes", "bound_seconds", "bar", "best_peer"} <= set(case)
    assert [row["status"] for row in case["implementations"]] == ["ok", "ok", "missing"]
    page = (tmp_path / "bench.html").read_text()
    for text in (printed, page, report.markdown(data)):
        assert "missing: gone (cannot import nonesuch" in text and "double 64" in text
    assert "data:image/png;base64," in page
    assert not list(tmp_path.glob("*.part"))


def test_exit_status_tells_failure_and_with_gate_a_miss(toy, tmp_path):
    toy(toy_case(ours=wrong))
    assert run_toy(tmp_path) == 1
    toy(toy_case(bar=(1e6, "slow")))
    assert run_toy(tmp_path) == 0
    assert run_toy(tmp_path, "--gate") == 1


def test_a_miss_is_printed(toy, tmp_path, capsys):
    toy(toy_case(bar=(1e6, "slow")))
    run_toy(tmp_path)
    assert "MISS >= 1000000.0" in capsys.readouterr().out


def test_a_peer_that_did_not_run_is_no_miss(toy, tmp_path, capsys):
    """It is not called met either: with --gate the run fails."""
    toy(toy_case(bar=(1.0, "gone")))
    assert run_toy(tmp_path, "--gate") == 1
    printed = capsys.readouterr().out
    assert "not measured, >= 1.0" in printed and "MISS" not in printed


def test_a_broken_write_leaves_the_old_file(tmp_path):
    target = tmp_path / "bench.json"
    report.write_json({"old": 1}, target)
    with pytest.raises(ValueError):
        report.write_json({"bad": float("nan")}, target)
    with pytest.raises(UnicodeEncodeError):
        report.write_atomically(target, "half\udcff")
    assert json.loads(target.read_text()) == {"old": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["bench.json"]


def test_readme_table_goes_between_its_markers(toy, tmp_path, capsys, monkeypatch):
    toy(toy_case())
    run_toy(tmp_path)
    readme = tmp_path / "README.md"
    readme.write_text("before\n<!-- perf -->\nstale row\n<!-- /perf -->\nafter\n")
    monkeypatch.setattr(harness, "HERE", tmp_path / "bench")
    capsys.readouterr()
    assert harness.main(["--markdown", "--out", str(tmp_path)]) == 0
    table = capsys.readouterr().out
    assert "| double 64 | slow |" in table and "stale row" in readme.read_text()
    update = ["--markdown", "--update-readme", "--out", str(tmp_path)]
    assert harness.main(update) == 2 and "stale row" in readme.read_text()  # a toy run is nothing to publish
    data = json.loads((tmp_path / "bench.json").read_text())
    report.write_json({**data, "scale": "full"}, tmp_path / "bench.json")
    assert harness.main(update) == 0
    text = readme.read_text()
    assert text.startswith("before\n<!-- perf -->\n| case |") and text.endswith("<!-- /perf -->\nafter\n")
    assert "stale row" not in text
    readme.write_text("no markers")
    with pytest.raises(ValueError, match="exactly once"):
        report.update_readme(readme, table)


def test_bad_use_is_one_sentence(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        harness.main(["--op", "nonesuch", "--tiny"])
    assert re.search("--op: invalid choice: 'nonesuch' .*lmo", capsys.readouterr().err)
    assert harness.main(["--case", "nonesuch", "--tiny"]) == 2
    assert harness.main(["--markdown", "--out", str(tmp_path)]) == 2
    for arguments in (["--threads", "0"], ["--rounds", "0"]):
        with pytest.raises(SystemExit):
            harness.main(arguments)


def test_every_option_is_explained(capsys):
    with pytest.raises(SystemExit, match="0"):
        harness.main(["--help"])
    shown = capsys.readouterr().out.split("options:")[1]
    entries = re.split(r"^  (?=-)", shown, flags=re.MULTILINE)[1:]
    assert {"--op", "--quick", "--device", "--threads", "--out"} <= {entry.split()[0] for entry in entries}
    for entry in entries:
        assert re.search(r"( |\n) +\S", entry), f"no help: {entry}"


def test_the_command_line_writes_below_the_folder_it_is_called_from(tmp_path):
    (tmp_path / "bench").mkdir()  # of the user, and nothing to do with ours
    (tmp_path / "bench" / "__init__.py").write_text("raise ImportError('wrong folder')")
    command = [sys.executable, "-m", "pyops", "bench", "--tiny", "--no-memory", "--rounds", "1"]
    command += ["--op", "lmo", "--case", "direction sign", "--out", "here"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "[1/1] direction sign" in done.stderr
    assert {path.name for path in (tmp_path / "here").iterdir()} == {"bench.json", "bench.html"}
    assert f"written: {tmp_path / 'here' / 'bench.json'}" in done.stdout


def test_a_case_whose_process_dies_is_reported(toy, tmp_path, capsys):
    toy(toy_case(env={"PYOPS_CPU_ISA": "avx2"}))  # the child knows no such case
    assert run_toy(tmp_path) == 1
    assert "failed: ours (exit status 2" in capsys.readouterr().out


# ---- the LMO cases


def test_polar_flops_are_those_of_the_cheapest_safe_form():
    assert bench_lmo.polar_flops(768, 768) == 20 * 768**3
    assert bench_lmo.polar_flops(3072, 768) == bench_lmo.polar_flops(768, 3072) == 38 * 768**3
    assert bench_lmo.polar_flops(10, 11, steps=1) == 3 * 100 * 11 + 1000  # both forms


@pytest.mark.parametrize("shape", [(7, 7), (5, 11), (11, 5), (2, 6, 9)])
def test_the_oracle_is_the_iteration_and_tells_results_apart(shape):
    g = torch.randn(shape, dtype=torch.float64)
    x = lmo_peers.newton_schulz(g, torch.float64, bench_lmo.COEFFICIENTS, bench_lmo.STEPS)
    oracle = bench_lmo.Oracle()
    assert oracle((g,), x) < 1e-12
    fewer = lmo_peers.newton_schulz(g, torch.float64, bench_lmo.COEFFICIENTS, bench_lmo.STEPS - 1)
    for bad in (fewer, -x, torch.zeros_like(x), 1.1 * x):
        assert oracle((g,), bad) > bench_lmo.BF16_ERROR
    other = torch.randn(shape, dtype=torch.float64)
    assert oracle((other,), x) > bench_lmo.BF16_ERROR  # what it remembers is of one input alone


def test_the_promised_table_is_there_in_full_shape():
    bars = {case.name: case.bar for case in bench_lmo.cases("cpu", "full") if case.bar}
    assert {name: bar for name, bar in bars.items() if "AVX2" not in name} == {
        "polar bfloat16 768x3072": (2.3, "torch.optim.Muon"),
        "polar bfloat16 1024x4096": (2.0, "torch.optim.Muon"),
        "polar bfloat16 768x768": (1.6, "torch.optim.Muon"),
        "polar bfloat16 12x768x768": (1.3, "best"),
        "polar float32 768x3072": (2.0, "eager float32"),
        "polar float32 768x768": (1.25, "eager float32"),
        "polar bf16x3 768x3072": (3.5, "eager float32"),
        "step GPT-2 124M float32 weights": (1.6, "best"),
        "step GPT-2 124M bfloat16 weights": (1.6, "best"),
    }
    capped = [case for case in bench_lmo.cases("cpu", "full") if case.env]
    assert len(capped) == 2 and all(case.env["PYOPS_CPU_ISA"] == "avx2" and case.bar for case in capped)


def test_a_quick_run_names_the_peers_that_it_leaves_to_the_full_run():
    case = bench_lmo.cases("cpu", "quick")[0]
    heavyball = next(impl for impl in case.peers if impl.name == "heavyball")
    with pytest.raises(Missing, match="only in the full run"):
        heavyball.build()
    assert {impl.name for impl in case.peers} == {
        impl.name for impl in bench_lmo.cases("cpu", "full")[0].peers
    }


@pytest.mark.parametrize("case", bench_lmo.cases("cpu", "tiny"), ids=lambda case: case.name)
def test_every_case_runs_and_is_right(case, monkeypatch):
    """Ours and every peer that is here, once; torch.compile is left to the benchmark itself."""
    if case.env:
        pytest.skip(
            "needs a process of its own: test_a_capped_case_and_its_memory_run_in_their_own_processes"
        )
    monkeypatch.setattr(
        torch, "compile", lambda function=None, **_: function or (lambda decorated: decorated)
    )
    table = rows(measure.measure_case(case, {"bfloat16": 1e12, **PEAKS}, rounds=1))
    failed = {name: row["reason"] for name, row in table.items() if row["status"] == "failed"}
    assert not failed
    assert all(row["status"] == "ok" for row in table.values() if row["kind"] != "peer")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is read from /proc")
def test_a_capped_case_and_its_memory_run_in_their_own_processes(tmp_path):
    arguments = ["--tiny", "--case", "ours capped to AVX2", "--out", str(tmp_path)]
    assert harness.main(arguments) == 0
    (case,) = json.loads((tmp_path / "bench.json").read_text())["cases"]
    assert case["env"] == bench_lmo.AVX2 and case["served_by"] in ("cpu:avx2", "cpu:default", "reference")
    assert set(case["peaks"]) == {"float32", "copy"}
    assert case["memory_failed"] is None
    assert all(0 <= row["extra_bytes"] < 2**30 for row in case["implementations"])


def test_pytest_benchmark_runs_the_same_cases(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "bench", "-q", "--scale", "tiny", "-k", "direction and not compile"],
        cwd=ROOT,
        env={**os.environ, "PYTEST_ADDOPTS": f"--benchmark-json={tmp_path / 'bench.json'}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    data = json.loads((tmp_path / "bench.json").read_text())
    assert len(data["benchmarks"]) == 8 and all("error" in b["extra_info"] for b in data["benchmarks"])


# ---- the GPU check


def test_the_gpu_driver_passes_on_the_cpu_and_notices_a_wrong_kernel(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu_driver.py", "--device", "cpu"])
    assert gpu_driver.main() == 0, capsys.readouterr().out
    monkeypatch.setattr(gpu_driver, "direction", lambda g, norm: 1.01 * torch.sign(g))
    assert gpu_driver.main() == 1
    assert "unit_direction col" in capsys.readouterr().out


FAKE_PYTHON = """#!/bin/bash
# Stands in for the interpreter of the check: answers by the part that calls it, as its plan says.
case "$*" in
  *"pyops bench"*) part=bench ;;
  *"pyops info"*) part=machine ;;
  *setup.py*) part=build ;;
  *pytest*) part=tests ;;
  *gpu_driver*) part=driver ;;
esac
echo "$part called: $*"
eval "$(grep "^$part:" "{plan}" | cut -d: -f2-)"
"""


def gpu_check(tmp_path, plan, **env):
    """A dry run with a stand-in interpreter; returns (finished process, its JSON)."""
    python, script = tmp_path / "python", tmp_path / "plan"
    script.write_text(plan)
    python.write_text(FAKE_PYTHON.replace("{plan}", str(script)))
    python.chmod(0o755)
    done = subprocess.run(
        [str(ROOT / "bench" / "gpu_check.sh"), "--dry-run"],
        cwd=tmp_path,
        env={**os.environ, "PYTHON": str(python), "OUT": str(tmp_path / "out"), **env},
        capture_output=True,
        text=True,
        timeout=120,
    )
    data = json.loads((tmp_path / "out" / "gpu_check.json").read_text())
    return done, {part["name"]: part for part in data["parts"]}


PARTS = ["machine", "build", "tests", "memcheck", "racecheck", "bench", "triton", "attention", "boxes"]


def test_the_gpu_check_passes_when_its_parts_do(tmp_path):
    done, parts = gpu_check(tmp_path, "")
    assert done.returncode == 0, done.stdout
    assert list(parts) == PARTS and {part["state"] for part in parts.values()} == {"ok"}
    assert "compute-sanitizer needs a GPU" in parts["memcheck"]["reason"]
    assert "pytest called: " not in done.stdout
    assert [line.split()[0] for line in done.stdout.splitlines()[-len(PARTS) :]] == PARTS
    assert "tests called: " in (tmp_path / "out" / "gpu_check.log").read_text()


def test_each_part_of_the_gpu_check_fails_alone(tmp_path):
    plan = 'bench: echo page >"$OUT/bench.html"; echo ratios\n'
    plan += 'build: echo "no \\"nvcc\\" here"; exit 3\ndriver: kill -SEGV $$\ntests: echo planted; exit 77\n'
    done, parts = gpu_check(tmp_path, plan)
    assert done.returncode == 1
    states = {name: part["state"] for name, part in parts.items()}
    assert states == {
        "machine": "ok",
        "build": "FAIL",
        "tests": "skip",
        "memcheck": "FAIL",
        "racecheck": "FAIL",
        "bench": "ok",
        "triton": "FAIL",
        "attention": "FAIL",
        "boxes": "FAIL",
    }
    assert parts["build"]["reason"] == "exit status 3: no nvcc here"
    assert parts["tests"]["reason"] == "planted"
    first_failure, table = done.stdout.index("FAIL build"), done.stdout.index("part       state")
    assert first_failure < done.stdout.index("benchmarks") < table


def test_the_gpu_check_stops_what_hangs_and_says_what_did_not_run(tmp_path):
    done, parts = gpu_check(tmp_path, "tests: sleep 60\n", GPU_CHECK_SECONDS="3")
    assert done.returncode == 1
    assert parts["tests"]["state"] == "FAIL" and "stopped at its limit" in parts["tests"]["reason"]
    assert "not run" in parts["bench"]["reason"] and parts["bench"]["state"] == "FAIL"


def test_the_gpu_check_refuses_unknown_arguments():
    done = subprocess.run([str(ROOT / "bench" / "gpu_check.sh"), "--fast"], capture_output=True, text=True)
    assert done.returncode == 2 and "usage" in done.stderr


@pytest.mark.slow
def test_the_real_dry_run(tmp_path):
    done = subprocess.run(
        [str(ROOT / "bench" / "gpu_check.sh"), "--dry-run"],
        env={**os.environ, "PYTHON": sys.executable, "OUT": str(tmp_path), "GPU_CHECK_SECONDS": "3600"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    assert {"gpu_check.json", "gpu_check.log", "bench.json", "bench.html"} <= {
        p.name for p in tmp_path.iterdir()
    }
