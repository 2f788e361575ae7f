"""What every `seeds/<paper>/reproduce.py` shares: options, parallel runs that resume, criteria, plots, JSON.

A seed is a function `study(report)` handed to `main`. It maps a training function over its runs, states its
criteria and draws its plots:

    def study(report):
        losses = report.map(train, [Run(lr=0.1), Run(lr=0.2)])
        report.criterion("loss", min(losses), at_most=1.0)

    if __name__ == "__main__":
        sys.exit(main(__file__, study))

Needs the `reproduce` extra (matplotlib, tqdm). `python -m pyops reproduce` finds and runs the seeds.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import importlib.util
import inspect
import json
import math
import multiprocessing
import os
import platform
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CHECKOUT = Path(__file__).resolve().parent.parent
INTERRUPTED = 130  # the shell's code for a program that Ctrl-C ended


def write_atomically(path: Path, data: bytes) -> None:
    """Writes a file under a temporary name and renames it: readers see all of it or the old one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(data)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Writes JSON atomically; NaN and infinities, which JSON has not, become null."""
    write_atomically(path, (json.dumps(_finite(value), indent=1, allow_nan=False) + "\n").encode())


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


Tick = Callable[..., None]  # tick(work=1.0, label="", text=""): progress made; which run, and a word on it


class Report:
    """One reproduction in progress: its runs, criteria, figures and plots.

    `mode` is "full", "quick" or "demo"; `out` the folder for everything written; `jobs` the number of worker
    processes. `settings` and `results` go into the JSON as they are.
    """

    def __init__(self, script: Path, mode: str, out: Path, jobs: int):
        self.script, self.mode, self.out, self.jobs = script, mode, out, jobs
        self.paper = script.parent.name
        self.settings: dict[str, Any] = {}
        self.results: dict[str, Any] = {}
        self.lines: list[dict[str, Any]] = []
        self.plots: list[str] = []
        self.started = time.time()

    # --- runs

    def map(self, function: Callable[[Any, Tick], Any], runs: Iterable[Any]) -> list[Any]:
        """[function(run, tick) for run in runs], on `jobs` processes of one thread each, with a progress bar.

        A run is a frozen dataclass; its `work` attribute (any unit, 1 if missing) is its share of the bar, of
        which function reports parts by `tick(work, label, text)`. Results must be JSON values: each is kept
        under out/runs/ as soon as it is there, and found again by the next call with the same run, the same
        function in an unchanged file, an unchanged module of the paper, and the same torch and Python.
        """
        import torch

        runs = list(runs)
        kept = {run: self._kept(function, run) for run in runs}
        todo = [run for run, path in kept.items() if not path.exists()]
        work = {run: getattr(run, "work", 1) for run in kept}
        with _Bar(sum(work.values()), sum(work.values()) - sum(work[run] for run in todo), self.paper) as bar:
            if self.jobs == 1 or len(todo) < 2:
                torch.set_num_threads(1)
                for item in todo:
                    write_json(kept[item], function(item, bar.tick))
            else:
                _in_processes(
                    function, todo, min(self.jobs, len(todo)), bar, lambda r, v: write_json(kept[r], v)
                )
            bar.finish()
        return [json.loads(kept[run].read_text()) for run in runs]

    def _kept(self, function: Callable, run: Any) -> Path:
        import torch

        sources = [Path(inspect.getfile(function)), CHECKOUT / "pyops" / "papers" / f"{self.paper}.py"]
        digest = hashlib.sha256()
        for source in sources:
            digest.update(source.read_bytes() if source.exists() else b"")
        described = json.dumps([type(run).__name__, dataclasses.asdict(run)], sort_keys=True, default=str)
        for text in (function.__qualname__, described, torch.__version__, platform.python_version()):
            digest.update(text.encode() + b"\0")
        return self.out / "runs" / f"{digest.hexdigest()[:32]}.json"

    # --- what is reported

    def criterion(
        self, name: str, value: float, *, at_most: float | None = None, at_least: float | None = None
    ) -> bool:
        """Prints one gated line, `ok` or `MISS`. NaN misses. Exactly one bound is wanted."""
        if (at_most is None) == (at_least is None):
            raise ValueError(f"criterion {name!r} wants at_most or at_least, one of them")
        bound = at_least if at_most is None else at_most
        met = bool(value >= bound) if at_most is None else bool(value <= bound)  # type: ignore[operator]
        relation = ">=" if at_most is None else "<="
        self._line("ok" if met else "MISS", name, value, f"{relation} {bound:.6g}")
        return met

    def told(self, name: str, value: Any, unit: str = "") -> None:
        """Prints one line that is reported and not gated."""
        self._line("told", name, value, unit)

    def _line(self, verdict: str, name: str, value: Any, bound: str) -> None:
        shown = f"{value:.6g}" if isinstance(value, float) else str(value)
        self.lines.append({"verdict": verdict, "name": name, "value": value, "bound": bound})
        print(f"{verdict:4}  {name:34}  {shown:>12}  {bound}".rstrip(), flush=True)

    def plot(self, name: str, figure: Figure) -> Path:
        """Saves a figure as out/<name>.png and prints its path."""
        import io

        from matplotlib import pyplot

        picture = io.BytesIO()
        figure.savefig(picture, format="png", dpi=100, bbox_inches="tight")
        pyplot.close(figure)
        path = self.out / f"{name}.png"
        write_atomically(path, picture.getvalue())
        self.plots.append(path.name)
        print(f"plot  {path}", flush=True)
        return path

    @property
    def passed(self) -> bool:
        """True when no criterion was missed."""
        return all(line["verdict"] != "MISS" for line in self.lines)

    def write(self) -> Path:
        """Writes out/<paper>.json: verdicts, settings, results and where they were obtained."""
        import torch

        path = self.out / f"{self.paper}.json"
        write_json(
            path,
            {
                "paper": self.paper,
                "mode": self.mode,
                "passed": self.passed,
                "lines": self.lines,
                "plots": self.plots,
                "settings": self.settings,
                "results": self.results,
                "environment": {
                    "python": platform.python_version(),
                    "torch": torch.__version__,
                    "machine": platform.machine(),
                    "jobs": self.jobs,
                    "seconds": round(time.time() - self.started, 1),
                },
            },
        )
        print(f"json  {path}", flush=True)
        return path


def band(axes: Any, x: Sequence[float], curves: Sequence[Sequence[float]], label: str, color: str) -> None:
    """Draws the mean of curves [seeds][points] with a band of one standard deviation over the seeds."""
    import numpy

    values = numpy.asarray(curves, dtype=float)
    mean, spread = values.mean(0), values.std(0, ddof=1) if len(values) > 1 else numpy.zeros(values.shape[1])
    axes.plot(x, mean, label=label, color=color, marker=".")
    axes.fill_between(x, mean - spread, mean + spread, color=color, alpha=0.25, linewidth=0)


def main(
    script: str,
    study: Callable[[Report], None],
    argv: Sequence[str] | None = None,
    *,
    demo: bool = False,
) -> int:
    """The command line of a seed. Returns 0, 1 on a miss, 2 on wrong usage, 130 when interrupted.

    `demo=True` adds the option --demo. An interrupted run leaves finished training runs under out/runs/, from
    which the same command goes on, and no half-written file.
    """
    path = Path(script).resolve()
    paper = path.parent.name
    parser = argparse.ArgumentParser(prog=f"{paper}/reproduce.py", description=f"Reproduces {paper}.")
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument("--quick", action="store_true", help="small sizes, within two minutes on two cores")
    if demo:
        modes.add_argument("--demo", action="store_true", help="the main comparison alone, about two minutes")
    parser.add_argument(
        "--out", type=Path, help="folder for plots and JSON (default: out/reproduce in the checkout)"
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=_cores(),
        help="worker processes of one thread each (default: %(default)s)",
    )
    options = parser.parse_args(argv)
    missing = [name for name in ("matplotlib", "tqdm") if importlib.util.find_spec(name) is None]
    if missing:
        parser.error(f"{' and '.join(missing)} missing: pip install 'pyops-kernels[reproduce]'")
    if options.jobs < 1:
        parser.error(f"--jobs must be at least 1, got {options.jobs}")
    mode = "quick" if options.quick else "demo" if demo and options.demo else "full"
    default = CHECKOUT / "out" / "reproduce" / (paper if mode == "full" else f"{paper}-{mode}")
    report = Report(path, mode, (options.out or default).resolve(), options.jobs)

    import matplotlib

    matplotlib.use("Agg")
    # A polite kill ends like Ctrl-C does: workers stopped, finished runs kept.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        study(report)
        report.write()
    except KeyboardInterrupt:
        print(f"\ninterrupted; the same command goes on from {report.out}", file=sys.stderr)
        return INTERRUPTED
    missed = [line["name"] for line in report.lines if line["verdict"] == "MISS"]
    print(f"{paper}: " + (f"MISSED {', '.join(missed)}" if missed else "all criteria met"), flush=True)
    return 1 if missed else 0


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Bar:
    """A progress bar over work of any unit, shown as a percentage with the latest words of two runs."""

    def __init__(self, total: float, initial: float, title: str):
        from tqdm import tqdm

        terminal = sys.stderr.isatty()
        self.words: dict[str, str] = {}
        self.bar = tqdm(
            total=total,
            initial=initial,
            desc=title,
            mininterval=0.1 if terminal else 15.0,
            dynamic_ncols=terminal,
            bar_format="{desc} {percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}",
        )

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.close()

    def finish(self) -> None:
        # Words of processes may still be on their way.
        self.bar.update(self.bar.total - self.bar.n)

    def tick(self, work: float = 1.0, label: str = "", text: str = "") -> None:
        if label:
            self.words.pop(label, None)
            self.words[label] = text
            latest = [f"{label} {text}" for label, text in list(self.words.items())[-2:]]
            self.bar.set_postfix_str("  ".join(sorted(latest)), refresh=False)
        self.bar.update(work)


class _Stopped(Exception):
    """Raised inside a worker's tick after the parent was interrupted."""


_worker: dict[str, Any] = {}


def _start_worker(ticks: Any, stop: Any) -> None:
    import torch

    torch.set_num_threads(1)
    ticks.cancel_join_thread()  # nobody reads progress after an interrupt: do not wait for a reader
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears Ctrl-C and tells the workers
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _worker.update(ticks=ticks, stop=stop)

    def end_with_parent() -> None:
        parent = multiprocessing.parent_process()
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()


def _worker_tick(*progress: Any) -> None:
    if _worker["stop"].is_set():
        raise _Stopped
    _worker["ticks"].put(progress)


def _call(function: Callable[[Any, Tick], Any], item: Any) -> Any:
    return function(item, _worker_tick)


def _in_processes(
    function: Callable[[Any, Tick], Any],
    items: Sequence[Any],
    jobs: int,
    bar: _Bar,
    keep: Callable[[Any, Any], None],
) -> None:
    context = multiprocessing.get_context("spawn")
    ticks, stop = context.Queue(), context.Event()
    pool = ProcessPoolExecutor(jobs, context, _start_worker, (ticks, stop))
    try:
        running: dict[Future, Any] = {pool.submit(_call, function, item): item for item in items}
        while running:
            done, _ = wait(running, timeout=0.2, return_when=FIRST_COMPLETED)
            while not ticks.empty():
                bar.tick(*ticks.get())
            for future in done:
                keep(running.pop(future), future.result())
    except BaseException:
        stop.set()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
