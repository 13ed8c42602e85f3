"""Run every case of a directory of golden files against this package.

    python tests/golden/run.py DIR        # e.g. tests/golden/data

A file DIR/<name>.json holds {"family", "cases": [{"id", "source", "notes", "inputs", "outputs"}, ...]}. The family's adapter is
tests/golden/adapters/<family>.py:

    def run(case, pool) -> dict           # output name -> value, shaped like case["outputs"]; None inside a value is not compared
    IGNORED = {"name": "why"}             # optional: outputs that are not compared
    UNREAD = {"name": "why"}              # optional: inputs and params that change nothing here; in some cases only: inputs.ignore
    def tolerance(case, name) -> float    # optional: default 1e-9, absolute below 1 and relative above

It reads `inputs` and `params`, never values it knows. `raise tests.golden.NotCovered("why")` names a case that the package does not
cover. A case is not covered either when it holds an input or option that the adapter did not look at (unless in UNREAD), or lacks one
that it asked for, or has an output that is neither computed nor in IGNORED. Of a dict of metrics, those that the adapter gives are compared.
`pool` runs ranks (megatron_grpo/verify/ranks.py). Exit status: 0 when no case failed.
"""

import importlib
import json
import math
import sys
from dataclasses import dataclass, field
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from tests.golden import NotCovered, Recorded

ADAPTERS = Path(__file__).parent / "adapters"
DESCRIPTIVE = ("response_lengths", "prompt_lengths", "total_lengths", "group_ids")
"""Inputs that say where the rows of the others come from; many functions need none of it."""


@dataclass
class Report:
    """Outcomes of one family: ids, and (id, reason)."""

    family: str
    passed: list[str] = field(default_factory=list)
    failed: list[tuple[str, str]] = field(default_factory=list)
    not_covered: list[tuple[str, str]] = field(default_factory=list)


def run_file(path: Path, pool) -> Report:
    """Every case of one file."""
    try:
        data = json.loads(path.read_text())
        report, cases = Report(data["family"]), data["cases"]
    except (ValueError, KeyError, TypeError) as error:
        return Report(path.stem, failed=[(path.name, f"not a golden file: {type(error).__name__}: {error}")])
    adapter = adapter_of(report.family)
    for case in cases:
        if adapter is None:
            report.not_covered.append((case["id"], "no adapter for this family"))
            continue
        try:
            problems = check(case, adapter, pool)
        except NotCovered as reason:
            report.not_covered.append((case["id"], str(reason)))
        except Exception as error:          # one broken case must not hide the others
            report.failed.append((case["id"], f"{type(error).__name__}: {error}"))
        else:
            if problems:
                report.failed.append((case["id"], "; ".join(problems[:3])))
            else:
                report.passed.append(case["id"])
    return report


def adapter_of(family: str):
    """The module adapters/<family>.py, or None."""
    if not (ADAPTERS / f"{family}.py").is_file():
        return None
    return importlib.import_module(f"tests.golden.adapters.{family}")


def check(case: dict, adapter, pool) -> list[str]:
    """What differs between the adapter's outputs and the case's; empty when it passes.

    Raises:
        NotCovered: the adapter says so; it left an option or an output of the case unread.
    """
    case = case | dict(inputs=Recorded(case["inputs"]))
    got, want = adapter.run(case, pool), case["outputs"]
    unread = [path for path in case["inputs"].unread() if path.split(".")[-1] not in (*DESCRIPTIVE, *getattr(adapter, "UNREAD", {}))]
    if unread:
        raise NotCovered(f"the adapter does not know {', '.join(unread)}")
    problems, missing = [f"{name}: computed, but not an output of the case" for name in got if name not in want], []
    for name, expected in want.items():
        if name in got:
            tolerance = adapter.tolerance(case, name) if hasattr(adapter, "tolerance") else 1e-9
            problems += compare(name, got[name], expected, tolerance)
        elif name not in getattr(adapter, "IGNORED", {}):
            missing.append(name)
    if missing and not problems:
        raise NotCovered(f"the adapter does not compute {', '.join(missing)}; the other outputs agree")
    return problems


def compare(name: str, got, want, tolerance: float) -> list[str]:
    """Differences beyond the tolerance. `got` may be a tensor, a nested list, a dict, a number, a string or None."""
    if got is None:
        return []
    if isinstance(got, torch.Tensor):
        got = got.detach().tolist()
    if isinstance(got, dict):
        unknown = [f"{name}.{key}: computed, but not an output of the case" for key in got if key not in want]
        return unknown + [p for key in got if key in want for p in compare(f"{name}.{key}", got[key], want[key], tolerance)]
    if isinstance(got, list) and isinstance(want, list):
        if len(got) != len(want):
            return [f"{name}: {len(got)} entries, {len(want)} expected"]
        return [p for i, (g, w) in enumerate(zip(got, want, strict=True)) for p in compare(f"{name}[{i}]", g, w, tolerance)]
    if isinstance(got, (int, float)) and isinstance(want, (int, float)):
        same = got == want or (math.isnan(got) and math.isnan(want)) or abs(got - want) <= tolerance * max(1.0, abs(want))
    else:
        same = got == want
    return [] if same else [f"{name}: {got} != {want}"]


def main(directory: str) -> int:
    """Print the report; the number of failed cases."""
    from megatron_grpo.verify.ranks import LocalRanks
    torch.set_num_threads(1)
    pool = LocalRanks()
    try:
        reports = [run_file(path, pool) for path in sorted(Path(directory).glob("*.json"))]
    finally:
        pool.close()
    if not reports:
        sys.exit(f"{directory}: no golden files (*.json)")
    print(f"{'family':<20}{'passed':>8}{'failed':>8}{'not covered':>13}")
    for r in reports:
        print(f"{r.family:<20}{len(r.passed):>8}{len(r.failed):>8}{len(r.not_covered):>13}")
    print(f"{'all':<20}{sum(len(r.passed) for r in reports):>8}{sum(len(r.failed) for r in reports):>8}"
          f"{sum(len(r.not_covered) for r in reports):>13}")
    for title, cases in (("not covered", "not_covered"), ("FAILED", "failed")):
        for r in reports:
            for case, reason in getattr(r, cases):
                print(f"{title}: {r.family}/{case}: {reason}")
    return sum(len(r.failed) for r in reports)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python tests/golden/run.py DIR")
    sys.exit(1 if main(sys.argv[1]) else 0)
