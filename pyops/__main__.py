"""The command line: ``python -m pyops info | demo | bench | reproduce``."""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pyops

INTERRUPTED = 130
CHECKOUT = Path(__file__).resolve().parent.parent


def _need(folder: str) -> Path:
    """The folder of the source checkout, or an exit that says why there is none."""
    path = CHECKOUT / folder
    if not path.is_dir():
        sys.exit(
            f"python -m pyops: this needs the source checkout ({folder}/ is not installed); run it from there"
        )
    return path


def _run(*command: str | Path) -> int:
    """Runs Python on something of the checkout, from the user's folder; Ctrl-C is the child's to handle."""
    path = os.pathsep.join(filter(None, [str(CHECKOUT), os.environ.get("PYTHONPATH")]))
    previous = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        environment = {**os.environ, "PYTHONPATH": path}
        status = subprocess.run([sys.executable, *map(str, command)], env=environment).returncode
        return INTERRUPTED if status == -signal.SIGINT else status
    finally:
        signal.signal(signal.SIGINT, previous)


def papers() -> dict[str, Path]:
    """The reproductions in the source checkout: paper name to its reproduce.py."""
    return {path.parent.name: path for path in sorted(_need("seeds").glob("*/reproduce.py"))}


def about(name: str) -> str:
    """A paper's title and how long its reproduction takes, from its page."""
    page = (papers()[name].parent / "README.md").read_text()
    title = page.partition("\n")[0].removeprefix("# ")
    (command,) = re.findall(rf"seeds/{name}/reproduce\.py +# (.+)", page)
    return f"{title} ({re.split('[,;:] ', command)[-1]})"


def bench(arguments: list[str]) -> int:
    """Runs the benchmarks; everything after ``bench`` goes to the harness."""
    return _run(_need("bench"), *arguments)  # by its path: the user's folder may have a bench of its own


def demo(out: str) -> int:
    """Measures every op against its peers, then trains a small language model with Scion and with AdamW."""
    folder = Path(out).resolve()
    measured = bench(["--quick", "--out", str(folder / "bench")])
    if measured == INTERRUPTED:
        return measured
    trained = _run(papers()["scion"], "--demo", "--out", folder / "scion")
    return trained or measured


def reproduce(names: list[str], quick: bool, out: str | None) -> int:
    """Runs the reproductions of some papers, all to their end; non-zero if a criterion of one was missed."""
    known = papers()
    failed = []
    for name in names:
        print(f"== {name}", flush=True)
        options = ["--quick"] * quick + (["--out", str(Path(out).resolve() / name)] if out else [])
        status = _run(known[name], *options)
        if status == INTERRUPTED:
            return status
        if status != 0:
            failed.append(name)
    if failed:
        print(f"missed or failed: {', '.join(failed)}")
    return 1 if failed else 0


def main(arguments: list[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m pyops", description="Compiled kernels for PyTorch.")
    parser.add_argument(
        "--version", action="version", version=f"pyops {pyops.__version__}", help="print the version and stop"
    )
    commands = parser.add_subparsers(dest="command", required=True)
    info_parser = commands.add_parser(
        "info", help="versions, instruction sets, and which backend serves each op"
    )
    info_parser.add_argument("--json", action="store_true", help="print JSON")
    demo_parser = commands.add_parser("demo", help="ops against their peers, then a small training run")
    demo_parser.add_argument(
        "--out", default="out/demo", help="folder for plots and JSON (default %(default)s)"
    )
    commands.add_parser("bench", help="measure ops against their peers", add_help=False)
    reproduce_parser = commands.add_parser("reproduce", help="check the claims of the papers at laptop scale")
    reproduce_parser.add_argument("papers", nargs="*", metavar="paper", help="a paper's name, see --list")
    reproduce_parser.add_argument("--all", action="store_true", help="every paper")
    reproduce_parser.add_argument(
        "--list", action="store_true", help="print names, titles and durations, and stop"
    )
    reproduce_parser.add_argument("--quick", action="store_true", help="within two minutes each")
    reproduce_parser.add_argument(
        "--out",
        help="folder for plots and JSON, one subfolder per paper (default: out/reproduce in the checkout)",
    )
    options, rest = parser.parse_known_args(arguments)
    if options.command == "bench":
        return bench(rest)
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if options.command == "info":
        from pyops._info import main as print_info

        return print_info(options.json)
    if options.command == "demo":
        return demo(options.out)
    known = papers()
    if options.list:
        width = max(map(len, known))
        print("\n".join(f"{name:{width}}  {about(name)}" for name in known))
        return 0
    unknown = [name for name in options.papers if name not in known]
    if unknown or options.all == bool(options.papers):
        wrong = f"unknown paper {unknown[0]!r}" if unknown else "name at least one paper, or --all"
        reproduce_parser.error(f"{wrong}; choose from: {', '.join(known)}")
    return reproduce(list(known) if options.all else options.papers, options.quick, options.out)


if __name__ == "__main__":
    sys.exit(main())
