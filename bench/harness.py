"""The benchmark run: `python -m pyops bench [--quick] [--op lmo] [--out DIR]`.

Every case runs ours and all peers alternating in one process, and compares them round by round; the peaks for
the roofline are measured first, in the same run. Writes bench.json and bench.html into --out, prints a table.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
if str(HERE.parent) not in sys.path:
    sys.path.insert(0, str(HERE.parent))

import torch  # noqa: E402
from tqdm import tqdm  # noqa: E402

from bench import measure, report  # noqa: E402
from bench.case import SCALES, Case  # noqa: E402

SUBPROCESS_SECONDS = 900


def operators() -> list[str]:
    """Every op that has a file bench/bench_<op>.py."""
    return sorted(path.stem.removeprefix("bench_") for path in HERE.glob("bench_*.py"))


def gather(ops: list[str], device: str, scale: str, pattern: str = "") -> list[Case]:
    """The cases of these ops whose name contains pattern."""
    cases = [case for op in ops for case in importlib.import_module(f"bench.bench_{op}").cases(device, scale)]
    return [case for case in cases if pattern in case.name]


def peak_settings(scale: str, device: str) -> dict:
    """How long to look for the peaks; a GPU needs larger products to reach them."""
    if scale == "tiny":
        return {"sizes": (128,), "copy_bytes": 2**20, "seconds": 0.0}
    if device == "cuda":
        return {"sizes": (4096, 8192), "copy_bytes": 2**32, "seconds": 0.3}
    return {"sizes": (1024, 2048, 4096), "seconds": 1.0 if scale == "full" else 0.3}


def in_subprocess(options: argparse.Namespace, case: Case, mode: str) -> dict:
    """One case (`one`) or its memory probe (`probe`) in a process of its own; its answer comes by file."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        command = [sys.executable, str(HERE / "harness.py"), f"--{mode}", case.name, "--into", str(answer)]
        command += ["--op", case.op, "--device", options.device, "--threads", str(options.threads)]
        command += [f"--{options.scale}"] if options.scale != "full" else []
        command += ["--rounds", str(options.rounds)] if options.rounds else []
        extra = {"OMP_NUM_THREADS": str(options.threads), **(measure.MEMORY_ENV if mode == "probe" else {})}
        try:
            done = subprocess.run(
                command,
                env={**os.environ, **case.env, **extra},
                capture_output=True,
                text=True,
                timeout=SUBPROCESS_SECONDS,
            )
        except subprocess.TimeoutExpired:
            return {"failed": f"no answer within {SUBPROCESS_SECONDS} s"}
        if not answer.exists():
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            return {"failed": f"exit status {done.returncode}: {last}"}
        return json.loads(answer.read_text())


def failed_case(case: Case, device: str, reason: str) -> dict:
    """A case whose process gave no answer, in the form of one that did."""
    rows = [
        {**measure.about_impl(case, impl), "status": "failed", "reason": reason}
        for impl in case.implementations
    ]
    result = {**measure.about_case(case, device), "bound_seconds": 0.0, "rounds": 0, "implementations": rows}
    return {**result, **measure.verdict(rows, case.bar)}


def run_case(options: argparse.Namespace, case: Case, peaks: dict) -> dict:
    """One case with its memory; in a process of its own where it needs another environment."""
    if case.env:
        result = in_subprocess(options, case, "one")
        if "failed" in result:
            return failed_case(case, options.device, result["failed"])
    else:
        result = measure.measure_case(case, peaks, options.device, options.rounds)
    if (
        options.memory
        and options.device == "cpu"
        and any(row["status"] == "ok" for row in result["implementations"])
    ):
        taken = in_subprocess(options, case, "probe")
        result["memory_failed"] = taken.pop("failed", None)
        for row in result["implementations"]:
            row["extra_bytes"] = taken.get(row["name"])
    return result


def child(options: argparse.Namespace) -> int:
    """The other side of in_subprocess."""
    name = options.one or options.probe
    case = next(case for case in gather(options.op, options.device, options.scale) if case.name == name)
    if options.probe:
        answer = measure.measure_memory(case)
    else:
        settings = peak_settings(options.scale, options.device)
        peaks = measure.measure_peaks(options.device, dtypes=(case.compute,), **settings)
        answer = {**measure.measure_case(case, peaks, options.device, options.rounds), "peaks": peaks}
    report.write_json(answer, Path(options.into))
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m pyops bench", description=__doc__.split("\n\n")[1])
    parser.add_argument(
        "--op", action="append", choices=operators(), help="only this op (may be repeated); default all"
    )
    parser.add_argument("--case", default="", help="only cases whose name contains this text")
    for scale, what in (
        ("quick", "fewer rounds and cases"),
        ("tiny", "toy shapes: tests the harness, not the ops"),
    ):
        parser.add_argument(f"--{scale}", dest="scale", action="store_const", const=scale, help=what)
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="where to measure (default: %(default)s)"
    )
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: %(default)s)")
    parser.add_argument("--rounds", type=int, help="paired rounds per case (default: the case's own)")
    parser.add_argument(
        "--out",
        type=Path,
        default=HERE / "out",
        help="folder of bench.json and bench.html (default: bench/out in the checkout)",
    )
    parser.add_argument(
        "--no-memory", dest="memory", action="store_false", help="skip the memory measurement"
    )
    parser.add_argument("--gate", action="store_true", help="exit 1 when a promised ratio is missed")
    parser.add_argument(
        "--markdown", action="store_true", help="print the README table from --out's JSON, run nothing"
    )
    parser.add_argument(
        "--update-readme", action="store_true", help="with --markdown: write it into README.md"
    )
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--probe", help=argparse.SUPPRESS)
    parser.add_argument("--into", help=argparse.SUPPRESS)
    parser.set_defaults(scale=SCALES[0])
    options = parser.parse_args(argv)
    if options.threads < 1 or (options.rounds is not None and options.rounds < 1):
        parser.error("--threads and --rounds must be at least 1")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: this torch sees no CUDA device")
    options.op = options.op or operators()
    options.out = options.out.resolve()
    return options


def readme_table(options: argparse.Namespace) -> int:
    source = options.out / "bench.json"
    if not source.exists():
        print(f"bench: {source} does not exist; run `python -m pyops bench` first", file=sys.stderr)
        return 2
    data = json.loads(source.read_text())
    table = report.markdown(data)
    print(table)
    if options.update_readme and data["scale"] != "full":
        print(f"bench: the README takes a full run, {source} is a {data['scale']} one", file=sys.stderr)
        return 2
    if options.update_readme:
        report.update_readme(HERE.parent / "README.md", table)
    return 0


def main(argv: list[str] | None = None) -> int:
    """Run the benchmarks; the exit status is 1 when ours failed (or, with --gate, missed), 2 for bad use."""
    options = parse(argv)
    if options.markdown:
        return readme_table(options)
    torch.set_num_threads(options.threads)
    if options.one or options.probe:
        return child(options)
    cases = gather(options.op, options.device, options.scale, options.case)
    if not cases:
        print(f"bench: no case of {', '.join(options.op)} contains {options.case!r}", file=sys.stderr)
        return 2
    about = measure.machine(options.device, options.threads)
    progress = tqdm(cases, desc="peaks of this machine", file=sys.stderr, disable=None)
    peaks = measure.measure_peaks(options.device, **peak_settings(options.scale, options.device))
    result = {"schema": 1, "scale": options.scale, "machine": about, "peaks": peaks, "cases": []}
    for number, case in enumerate(progress, 1):
        progress.set_description(case.name)
        if progress.disable:  # no terminal: a line for each case
            print(f"[{number}/{len(cases)}] {case.name}", file=sys.stderr, flush=True)
        result["cases"].append(run_case(options, case, peaks))
        report.write_json(result, options.out / "bench.json")  # what is measured survives an interruption
    report.write_atomically(options.out / "bench.html", report.page(result))
    print(report.console(result))
    print(f"written: {options.out / 'bench.json'}, {options.out / 'bench.html'}")
    broken = any(
        row["kind"] != "peer" and row["status"] != "ok"
        for case in result["cases"]
        for row in case["implementations"]
    )
    missed = options.gate and any(case["bar"] and not case["bar"]["met"] for case in result["cases"])
    return int(broken or missed)


if __name__ == "__main__":
    sys.exit(main())
