"""What a run leaves behind: JSON, a page with plots, the README table, and a short console table."""

from __future__ import annotations

import base64
import html
import io
import json
import os
import tempfile
from pathlib import Path

MARKERS = ("<!-- perf -->", "<!-- /perf -->")


def write_atomically(path: Path, text: str) -> None:
    """Write through a temporary file in the same folder: a reader sees the old file or the whole new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as out:
            out.write(text)
            out.flush()
            os.fsync(out.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def write_json(report: dict, path: Path) -> None:
    write_atomically(path, json.dumps(report, indent=1, allow_nan=False) + "\n")


# ---- pieces of text


def describe(machine: dict, peaks: dict) -> list[str]:
    """The machine and its peaks, in two lines."""
    where = machine.get("gpu") or machine["cpu"]
    rates = ", ".join(f"{name} {rate / 1e12:.3g} TFLOP/s" for name, rate in peaks.items() if name != "copy")
    return [
        f"{where}, {machine['threads']} of {machine['cores']} CPU threads ({', '.join(machine['isa'])}), "
        f"torch {machine['torch']}, {machine['date'][:10]}, load before it {machine['load_average']:.1f}",
        f"peaks of torch.mm and of a copy in this run: {rates}, {peaks['copy'] / 1e9:.3g} GB/s read + write",
    ]


def absent(report: dict) -> list[str]:
    """One line per implementation that did not run: nothing is dropped silently."""
    lines = {}
    for case in report["cases"]:
        for row in case["implementations"]:
            if row["status"] != "ok":
                lines.setdefault(f"{row['status']}: {row['name']} ({row['reason']})", []).append(case["name"])
    return [f"{line} in {', '.join(names)}" for line, names in lines.items()]


def _row(case: dict, name: str | None) -> dict | None:
    return next((row for row in case["implementations"] if row["name"] == name), None)


def _ours(case: dict) -> dict:
    return next(row for row in case["implementations"] if row["kind"] == "ours")


def _ratio(row: dict | None) -> str:
    if row is None or "ratio" not in row:
        return "-"
    ratio = row["ratio"]
    return f"{ratio['median']:.2f} ({ratio['q1']:.2f}-{ratio['q3']:.2f})"


def _megabytes(row: dict | None) -> str:
    return "-" if row is None or row.get("extra_bytes") is None else f"{row['extra_bytes'] / 2**20:.0f}"


def _fraction(row: dict) -> str:
    return f"{100 * row['fraction']:.0f} %" if "fraction" in row else "-"


def _judgement(case: dict) -> str:
    bar = case["bar"]
    if bar is None:
        return "told"
    if bar["ratio"] is None:
        return f"not measured, >= {bar['least']}"
    return f"{'ok' if bar['met'] else 'MISS'} >= {bar['least']}"


def _summary(case: dict) -> list[str]:
    """What every table says of a case: the cells under HEADER."""
    ours, bar, best = _ours(case), case["bar"], _row(case, case["best_peer"])
    against = best if bar is None or bar["against"] == "best" else _row(case, bar["against"])
    if ours["status"] != "ok":
        return [case["name"], "-", "-", "-", "-", "-", f"MISS, ours {ours['status']}"]
    return [
        case["name"],
        against["name"] if against else "-",
        _ratio(against),
        f"{best['name']} {best['ratio']['median']:.2f}" if best else "-",
        _fraction(ours),
        f"{_megabytes(ours)} / {_megabytes(best)}",
        _judgement(case),
    ]


HEADER = [
    "case",
    "peer",
    "peer / ours (quartiles)",
    "fastest peer",
    "of bound",
    "extra MB ours / fastest",
    "promise",
]


def console(report: dict) -> str:
    """What is missing first, one line per case last."""
    rows = [HEADER, *(_summary(case) for case in report["cases"])]
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEADER))]
    table = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    return "\n".join([*absent(report), *describe(report["machine"], report["peaks"]), *table])


def markdown(report: dict) -> str:
    """The performance table of the README, without its markers."""
    lines = ["| " + " | ".join(HEADER) + " |", "|" + " --- |" * len(HEADER)]
    lines += ["| " + " | ".join(_summary(case)) + " |" for case in report["cases"]]
    told = [f"- {line}" for line in absent(report)]
    where = [
        f"Measured on {line}." if i == 0 else f"{line[0].upper()}{line[1:]}."
        for i, line in enumerate(describe(report["machine"], report["peaks"]))
    ]
    how = "Command: `python -m pyops bench`, then `python -m pyops bench --markdown --update-readme`."
    return "\n".join([*lines, "", *where, how, *([""] if told else []), *told])


def update_readme(readme: Path, table: str) -> None:
    """Replace what stands between the markers; ValueError when they are not there exactly once."""
    text = readme.read_text(encoding="utf-8")
    if any(text.count(marker) != 1 for marker in MARKERS):
        raise ValueError(f"{readme} must contain {MARKERS[0]} and {MARKERS[1]} exactly once")
    head, rest = text.split(MARKERS[0])
    tail = rest.split(MARKERS[1])[1]
    write_atomically(readme, f"{head}{MARKERS[0]}\n{table}\n{MARKERS[1]}{tail}")


# ---- the page


def _figure(report: dict) -> str:
    """Ratios with quartiles, and the fraction of the roofline per implementation, as a PNG in base64."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    cases = [case for case in report["cases"] if any("fraction" in row for row in case["implementations"])]
    rows = sum(len(case["implementations"]) + 1 for case in cases)
    figure = Figure(figsize=(12, max(2.5, 0.24 * rows)), layout="constrained")
    ratios, fractions = figure.subplots(1, 2, sharey=True)
    labels, places, place = [], [], 0
    for case in cases:
        for row in case["implementations"]:
            if "fraction" not in row:
                continue
            ours = row["kind"] == "ours"
            if not ours and "ratio" in row:
                ratio = row["ratio"]
                reach = [[ratio["median"] - ratio["q1"]], [ratio["q3"] - ratio["median"]]]
                ratios.barh(place, ratio["median"], xerr=reach, color="tab:blue")
            fractions.barh(place, 100 * row["fraction"], color="tab:orange" if ours else "tab:gray")
            labels.append(f"{case['name']}: {'ours' if ours else row['name']}")
            places.append(place)
            place += 1
        place += 1
    ratios.axvline(1.0, color="black", linewidth=1)
    ratios.set(
        yticks=places, yticklabels=labels, xlabel="peer's time / ours (median and quartiles of paired rounds)"
    )
    ratios.tick_params(axis="y", labelsize=7)
    ratios.invert_yaxis()
    ratios.margins(y=0.01)
    fractions.set(xlabel="per cent of the roofline bound")
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=110)
    return base64.b64encode(image.getvalue()).decode()


def page(report: dict) -> str:
    """One self-contained HTML page."""
    paragraphs = [*describe(report["machine"], report["peaks"]), *absent(report)]
    parts = [f"<p>{html.escape(line)}</p>" for line in paragraphs]
    parts.append(f'<img alt="ratios and roofline fractions" src="data:image/png;base64,{_figure(report)}">')
    for case in report["cases"]:
        parts.append(
            f"<h2>{html.escape(case['name'])}</h2><p>{html.escape(case['note'])} Bound "
            f"{1e3 * case['bound_seconds']:.3g} ms ({case['flops'] / 1e9:.3g} Gflop at the {case['compute']} "
            f"peak, {case['bytes'] / 1e6:.3g} MB). {html.escape(_judgement(case))}.</p><table>"
        )
        head = ["implementation", "median ms", "peer / ours", "of bound", "extra MB", "error", "note"]
        parts.append("<tr>" + "".join(f"<th>{cell}</th>" for cell in head) + "</tr>")
        for row in case["implementations"]:
            if row["status"] == "ok":
                cells = [
                    f"{1e3 * row['seconds']['median']:.3g}",
                    _ratio(row),
                    _fraction(row),
                    _megabytes(row),
                    f"{row['error']:.2g}",
                    row["note"],
                ]
            else:
                cells = ["-", "-", "-", "-", "-", f"{row['status']}: {row['reason']}"]
            parts.append(
                "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in [row["name"], *cells]) + "</tr>"
            )
        parts.append("</table>")
    style = (
        "body{font-family:sans-serif;max-width:80em;margin:2em auto}td,th{padding:.2em .8em;text-align:left}"
    )
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>pyops benchmarks</title><style>{style}img"
        f"{{max-width:100%}}</style><h1>pyops and its peers</h1>{''.join(parts)}</html>\n"
    )
