"""The page of a run: report.html from metrics.jsonl and samples/, one self-contained file. Standard library only.

    python -m megatron_grpo.report RUN [RUN ...] [--output FILE] [--watch]
"""

from .alerts import RULES, Alert, check_run
from .page import write_report
from .runs import Run, read_run

__all__ = ["RULES", "Alert", "Run", "check_run", "read_run", "write_report"]
