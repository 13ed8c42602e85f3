"""Two results of a step, number by number and gradient by gradient."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

TOLERANCE = {"float32": 1e-5, "bfloat16": 5e-2, "float16": 1e-2}
"""Largest relative error by the dtype of the layout's step. A wrong scale, group or sum is off by far more than the widest of them."""

SMALLEST = 1e-2
"""Metrics are means of numbers near 1 that may cancel: below this size their error is compared with it."""

SIGNED = {"mismatch_k1": "mismatch_abs"}
"""Means of numbers of both signs: their error is compared with the mean of the numbers' sizes."""

WORST = 12
SHOWN = ("loss", "pg_loss", "kl_loss", "entropy", "grad_norm")


@dataclass
class Line:
    """One compared number or tensor: `error` is relative to the reference's size."""

    name: str
    value: float
    reference: float
    error: float
    tolerance: float

    @property
    def ok(self) -> bool:
        return self.error <= self.tolerance


def compare(found: dict[str, Any], reference: dict[str, Any], tolerance: float = TOLERANCE["float32"]) -> list[Line]:
    """Every number and every gradient, worst last.

    Args:
        found, reference: from step.take_steps.
        tolerance: largest error of a metric relative to it, and of a parameter's gradient relative to that gradient's norm.
    """
    lines = []
    for name in sorted(set(found["metrics"]) | set(reference["metrics"])):
        got, want = (side["metrics"].get(name, math.nan) for side in (found, reference))
        missing = (name in found["metrics"]) != (name in reference["metrics"])
        if math.isnan(got) and math.isnan(want) and not missing or got == want:
            error = 0.0
        else:
            error = abs(got - want) / max(abs(want), reference["metrics"].get(SIGNED.get(name), 0.0), SMALLEST)
        lines.append(Line(name, got, want, math.inf if missing or math.isnan(error) else error, tolerance))
    for name in sorted(set(found["gradients"]) | set(reference["gradients"])):
        got, want = found["gradients"].get(name), reference["gradients"].get(name)
        size, wanted = (math.nan if x is None else float(np.linalg.norm(x)) for x in (got, want))
        if got is None or want is None or got.shape != want.shape or not np.isfinite(got).all():
            error = math.inf
        else:
            error = float(np.linalg.norm(got - want)) / wanted if wanted else math.inf if size else 0.0
        lines.append(Line(f"gradient of {name}", size, wanted, error, tolerance))
    return sorted(lines, key=lambda line: line.error)


def table(lines: list[Line]) -> str:
    """The loss, the norm, and the worst lines."""
    shown = [line for line in lines if line.name in SHOWN]
    shown += [line for line in lines[-WORST:] if not line.ok and line not in shown] or [line for line in lines[-3:] if line not in shown]
    rows = [f"  {line.name:<64} {line.value:>14.7g} {line.reference:>14.7g}  {line.error:.1e}{'' if line.ok else '  OUT'}" for line in shown]
    bad = sum(not line.ok for line in lines)
    head = f"  {'compared':<64} {'this layout':>14} {'one rank, f64':>14}  relative error"
    return "\n".join([head, *rows, f"  {len(lines)} lines compared, {bad} out of tolerance {lines[0].tolerance:g}"])
