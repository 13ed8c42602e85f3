"""Prove a layout on your own machines: one step of your job's layout and algorithm against one rank in float64.

    torchrun --nproc-per-node N -m megatron_grpo.verify <the flags of your job>
    python -m megatron_grpo.verify --all-layouts --platform cpu          every axis and pair of axes, on up to 8 ranks of this machine

A small model with your architecture and layout takes one step on synthetic samples that contain what breaks losses: responses of
one token, fully masked samples, holes of tool tokens, context-parallel shards without a response token, groups of one, and
micro-batches without samples. The policy is not the one that sampled, so that ratios differ from 1, and neither is the reference.
The same step is taken by one rank in float64. Loss, every metric, the gradient norm and the gradient of every
parameter are compared, and any line out of tolerance makes the exit code 1. No engine is needed.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from .command import main
from .compare import Line, compare, table

if TYPE_CHECKING:
    from .problem import one_rank, prepare, with_layout, without
    from .step import Case, one_step, take_steps

__all__ = ["Case", "Line", "compare", "main", "one_rank", "one_step", "prepare", "table", "take_steps", "with_layout", "without"]
_LATE = dict.fromkeys(("one_rank", "prepare", "with_layout", "without"), "problem") | dict.fromkeys(("Case", "one_step", "take_steps"), "step")


def __getattr__(name: str):
    """Names of modules that import torch, which --help does not wait for."""
    if name in _LATE:
        return getattr(import_module(f"{__name__}.{_LATE[name]}"), name)
    raise AttributeError(name)
