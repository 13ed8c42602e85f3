"""What a run left on disk: its metrics by step, the seconds of its phases, its samples, and the lines that could not be read."""

import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field

SAMPLE_STEPS = 12               # steps whose samples the page carries: the first, the last, and others evenly between
SAMPLES_PER_STEP = 64
TOKENS_PER_SAMPLE = 4096        # of a longer response the first half and the last half of this
TOKENS_PER_RUN = 200_000        # about 8 MB of page
NAMED_PROBLEMS = 20


@dataclass
class Run:
    """One run directory.

    Attributes:
        steps: sorted steps that have any line.
        times: Unix time of each step's last line, NaN where the line had none.
        metrics: name -> {step: value}; the last line of a step wins. Values may be NaN or infinite.
        seconds: phase -> {step: seconds}, in the order in which phases were first logged.
        resumes: steps at which the log goes back, i.e. at which the run was resumed.
        samples: step -> samples (see `_sample`), of at most SAMPLE_STEPS steps.
        sample_steps: all steps that have a samples file.
        problems: "FILE:LINE: what is wrong"; at most NAMED_PROBLEMS, then one line with the rest's number.
    """

    name: str
    directory: str
    steps: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    metrics: dict[str, dict[int, float]] = field(default_factory=dict)
    seconds: dict[str, dict[int, float]] = field(default_factory=dict)
    resumes: list[int] = field(default_factory=list)
    samples: dict[int, list[dict]] = field(default_factory=dict)
    sample_steps: list[int] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def series(self, name: str, finite: bool = True) -> list[tuple[int, float]]:
        """(step, value) in order of steps; without NaN and infinities unless asked for."""
        return [(s, v) for s, v in sorted(self.metrics.get(name, {}).items()) if math.isfinite(v) or not finite]


def run_name(directory: str) -> str:
    """The directory's name, after its parent's where it is only called `report`."""
    parent, name = os.path.split(os.path.abspath(directory))
    return os.path.join(os.path.basename(parent), name) if name == "report" else name or directory


def read_run(directory: str, name: str | None = None) -> Run:
    """Read a run directory; what cannot be read is named in `problems` and the rest is kept.

    Raises:
        FileNotFoundError: no such directory.
    """
    if not os.path.isdir(directory):
        raise FileNotFoundError(f"no run directory {directory!r}: give the directory that holds metrics.jsonl (the trainer's --run-dir)")
    run = Run(name or run_name(directory), directory)
    _read_metrics(run)
    _read_samples(run)
    if len(run.problems) > NAMED_PROBLEMS:
        run.problems[NAMED_PROBLEMS:] = [f"and {len(run.problems) - NAMED_PROBLEMS} more such lines"]
    return run


def _read_metrics(run: Run) -> None:
    times: dict[int, float] = {}
    previous = None
    for where, record in _objects(os.path.join(run.directory, "metrics.jsonl"), run):
        step = record.get("step")
        if not isinstance(step, int) or isinstance(step, bool):
            run.problems.append(f"{where}: `step` is {step!r}, not an integer")
            continue
        if previous is not None and step < previous:
            run.resumes.append(step)
        previous = step
        time = record.get("time", math.nan)
        times[step] = float(time) if _is_number(time) else math.nan
        for kind, table in (("metrics", run.metrics), ("seconds", run.seconds)):
            values = record.get(kind, {})
            if not isinstance(values, dict):
                run.problems.append(f"{where}: `{kind}` is not an object")
                continue
            for name, value in values.items():
                if _is_number(value):
                    table.setdefault(name, {})[step] = float(value)
                else:
                    run.problems.append(f"{where}: {kind} {name!r} is {value!r}, not a number")
    run.steps = sorted(times)
    run.times = [times[s] for s in run.steps]


def _read_samples(run: Run) -> None:
    """Samples of evenly chosen steps, the newest first where the page's budget of tokens ends early."""
    directory, files = os.path.join(run.directory, "samples"), {}
    for file in sorted(os.listdir(directory)) if os.path.isdir(directory) else []:
        digits = file.removeprefix("step_").removesuffix(".jsonl")
        if file == f"step_{digits}.jsonl" and digits.isdecimal():
            files[int(digits)] = os.path.join(directory, file)
    run.sample_steps = steps = sorted(files)
    if len(steps) > SAMPLE_STEPS:
        steps = [steps[round(i * (len(steps) - 1) / (SAMPLE_STEPS - 1))] for i in range(SAMPLE_STEPS)]
    left = TOKENS_PER_RUN
    for step in reversed(steps):
        samples: list[dict] = []
        for where, record in _objects(files[step], run):
            if len(samples) == SAMPLES_PER_STEP or left <= 0:
                break
            try:
                samples.append(_sample(record))
            except (TypeError, ValueError, AttributeError) as error:
                run.problems.append(f"{where}: {error}")
                continue
            left -= len(samples[-1]["tokens"])
        if samples:
            run.samples[step] = samples
    run.samples = dict(sorted(run.samples.items()))


def _sample(record: dict) -> dict:
    """The page's form of a sample: tokens as [text, mask, logp, old_logp, rollout_logp], null where a value is missing or not finite."""
    tokens = record.get("tokens") or []
    if not isinstance(tokens, list):
        raise ValueError("`tokens` is not a list")
    half = TOKENS_PER_SAMPLE // 2
    kept = tokens if len(tokens) <= TOKENS_PER_SAMPLE else tokens[:half] + tokens[-half:]
    cells = [[str(t.get("text", "")), int(bool(t.get("mask", True))), *(_rounded(t.get(k)) for k in ("logp", "old_logp", "rollout_logp"))]
             for t in kept]
    rewards = record.get("rewards") or {}
    if not isinstance(rewards, dict):
        raise ValueError("`rewards` is not an object")
    return {
        "id": record.get("sample_id"), "group": record.get("group_id"), "prompt": str(record.get("prompt", "")),
        "response": str(record.get("response", "")), "label": _text(record.get("label")), "status": str(record.get("status", "")),
        "reward": _rounded(record.get("reward")), "advantage": _rounded(record.get("advantage")),
        "rewards": {str(k): _rounded(v) for k, v in rewards.items()}, "tokens": cells, "length": len(tokens)}


def _objects(path: str, run: Run) -> Iterator[tuple[str, dict]]:
    """("FILE:LINE", object) of a JSON-lines file."""
    if not os.path.exists(path):
        return
    shown = os.path.relpath(path, run.directory)
    with open(path, encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            where = f"{shown}:{number}"
            try:
                record = json.loads(line)
            except ValueError as error:
                if line.endswith("\n"):
                    run.problems.append(f"{where}: not JSON ({error})")
                else:
                    run.problems.append(f"{where}: the last line is incomplete (being written, or cut off when the run ended)")
                continue
            if isinstance(record, dict):
                yield where, record
            else:
                run.problems.append(f"{where}: not a JSON object")


def _is_number(value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _rounded(value) -> float | None:
    return float(f"{value:.6g}") if _is_number(value) and math.isfinite(value) else None


def _text(value) -> str | None:
    return value if value is None or isinstance(value, str) else json.dumps(value, ensure_ascii=False)
