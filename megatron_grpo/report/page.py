"""From runs to one HTML file: the data as JSON in the page, with the page's own script and style."""

import json
import math
import os
import tempfile
from dataclasses import asdict
from functools import cache

from .alerts import RULES, agreement, check_run, unchecked, worst_first
from .runs import Run, read_run

POINTS = 1000       # a longer series keeps, of each bin of steps, its lowest and its highest value
BARS = 160          # bars of a stacked chart: means over bins of steps
HERE = os.path.dirname(os.path.abspath(__file__))
BOOKS = ("kept", "filtered", "failed", "discarded", "carried_out")


def write_report(run_dirs: list[str], output: str | None = None) -> str:
    """Write the report of one or more runs; the file appears whole or not at all.

    Args:
        run_dirs: run directories, the first is the main one.
        output: the file; `report.html` in the first run directory when None.

    Returns:
        The path that was written.

    Raises:
        FileNotFoundError: a run directory does not exist.
        OSError: the file cannot be written.
    """
    output = output or os.path.join(run_dirs[0], "report.html")
    text = render(page_data(run_dirs))
    handle, temporary = tempfile.mkstemp(dir=os.path.dirname(os.path.abspath(output)), prefix=".report-", suffix=".html")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", errors="replace") as file:
            file.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, output)
    except BaseException:
        os.unlink(temporary)
        raise
    return output


def page_data(run_dirs: list[str]) -> dict:
    """Everything the page shows, as plain JSON values without NaN."""
    runs = [read_run(directory, name) for directory, name in zip(run_dirs, _names(run_dirs), strict=True)]
    alerts = [check_run(run) for run in runs]
    return {
        "runs": [_run_data(run) | {"agreement": asdict(agreement(run, found))} for run, found in zip(runs, alerts, strict=True)],
        "alerts": [asdict(alert) for alert in worst_first([a for found in alerts for a in found])],
        "unchecked": {run.name: unchecked(run) for run in runs},
        "rules": [{"metric": r.metric, "title": r.title, "warn": r.warn, "bad": r.bad, "over": r.over, "source": r.source} for r in RULES]}


def render(data: dict, poll_seconds: float = 0) -> str:
    """The page; with `poll_seconds` it asks its server for new data that often."""
    text = json.dumps(data | {"poll": poll_seconds}, allow_nan=False, separators=(",", ":"), ensure_ascii=False)
    # "<" cannot end the script element early when it is an escape, and the two line separators end no string.
    text = text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    page = _asset("report.html")
    for mark, content in (("/*STYLE*/", _asset("report.css")), ("/*CHARTS*/", _asset("charts.js")), ("/*SCRIPT*/", _asset("report.js")),
                          ("/*DATA*/", text)):
        page = page.replace(mark, content, 1)
    return page


@cache
def _asset(name: str) -> str:
    with open(os.path.join(HERE, name), encoding="utf-8") as file:
        return file.read()


def _names(run_dirs: list[str]) -> list[str]:
    """The shortest trailing parts of the paths that tell the runs apart; a directory given twice gets its number."""
    parts = [os.path.abspath(d).strip(os.sep).split(os.sep) for d in run_dirs]
    depth = 1
    while len({tuple(p[-depth:]) for p in parts}) < len({tuple(p) for p in parts}):
        depth += 1
    names: list[str] = []
    for i, p in enumerate(parts):
        name = "/".join(p[-depth:])
        names.append(f"{name} #{i + 1}" if name in names else name)
    return names


def _run_data(run: Run) -> dict:
    lost = [{"name": name, "steps": bad} for name in run.metrics
            if (bad := [s for s, v in run.series(name, finite=False) if not math.isfinite(v)])]
    metrics = {name: thinned(points) for name in sorted(run.metrics) if (points := run.series(name))}
    metrics |= {name: thinned(points) for name, points in _speeds(run).items() if points}
    phases = {name: {s: v for s, v in values.items() if math.isfinite(v)} for name, values in run.seconds.items()}
    books = {name: dict(run.series(f"rollout/samples_{name}")) for name in BOOKS}
    times = dict(zip(run.steps, run.times, strict=True))
    start = min((t for t in run.times if math.isfinite(t)), default=0.0)
    clock = [(s, (t - start) / 3600) for s, t in times.items() if math.isfinite(t)]
    clock = [clock[round(i * (len(clock) - 1) / (POINTS - 1))] for i in range(POINTS)] if len(clock) > POINTS else clock
    return {
        "name": run.name, "steps": len(run.steps), "last_step": run.steps[-1] if run.steps else None, "start": start or None,
        "has_log": os.path.exists(os.path.join(run.directory, "metrics.jsonl")), "hours": [[s, round(h, 5)] for s, h in clock],
        "metrics": metrics, "lost": lost, "resumes": run.resumes, "problems": run.problems,
        "phases": stacked(phases), "recent_phases": recent(phases), "books": stacked({k: v for k, v in books.items() if v}),
        "samples": [{"step": s, "samples": v} for s, v in run.samples.items()], "sample_steps": len(run.sample_steps)}


def _speeds(run: Run) -> dict[str, list[tuple[int, float]]]:
    """Tokens a second of the two phases that have both numbers."""
    out = {}
    for name, tokens, phase in (("speed/rollout", "rollout/tokens_generated", "rollout"), ("speed/train", "tokens/trained", "train")):
        seconds = run.seconds.get(phase, {})
        out[name] = [(s, v / seconds[s]) for s, v in run.series(tokens) if seconds.get(s, 0) > 0 and math.isfinite(seconds[s])]
    return out


def thinned(points: list[tuple[int, float]], limit: int = POINTS) -> dict:
    """{"x": steps, "y": values, "of": their true number}; over `limit` points only the extremes of each bin, so no spike is lost."""
    kept = points
    if len(points) > limit:
        bins, kept = limit // 2, []
        for i in range(bins):
            part = points[i * len(points) // bins:(i + 1) * len(points) // bins]
            kept += sorted({min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])})
        kept = sorted({*kept, points[0], points[-1]})
    return {"x": [s for s, _ in kept], "y": [float(f"{v:.6g}") for _, v in kept], "of": len(points)}


def stacked(table: dict[str, dict[int, float]], bars: int = BARS) -> dict:
    """{"names", "x" and "to": first and last step of each bar, "rows": a mean per bar and name}."""
    steps = sorted({s for values in table.values() for s in values})
    width = max(math.ceil(len(steps) / bars), 1)
    chunks = [steps[i:i + width] for i in range(0, len(steps), width)]
    rows = [[float(f"{sum(values.get(s, 0.0) for s in chunk) / len(chunk):.5g}") for values in table.values()] for chunk in chunks]
    return {"names": list(table), "x": [c[0] for c in chunks], "to": [c[-1] for c in chunks], "rows": rows}


def recent(phases: dict[str, dict[int, float]], steps: int = 20) -> list[list]:
    """[phase, mean seconds] over the last steps that have any phase of a training step, in logged order; evaluations are not among them."""
    trained = sorted({s for name, values in phases.items() if name != "eval" for s in values})[-steps:]
    return [[name, float(f"{sum(values.get(s, 0.0) for s in trained) / len(trained):.5g}")]
            for name, values in phases.items() if name != "eval" and any(s in values for s in trained)]
