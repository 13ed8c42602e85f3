"""Sums of token values over whole sequences: what GSPO, sequence masks and per-sequence errors are made of.

A micro-batch pays for one collective. Every part of the loss names the columns that it needs before it runs; `sum_columns` adds
them up with a single differentiable all-reduce over the context-parallel ranks, and each part then reads its own.
"""

import torch

from ..parallel.collectives import sequence_sums
from .inputs import LossInputs

Columns = dict[str, torch.Tensor]
"""name -> [T] before the sum, [S] after it."""


def sum_columns(x: LossInputs, columns: Columns) -> Columns:
    """[T] of each name -> [S] sums over the tokens with mask True of all shards. Entered by every rank or by none."""
    if not columns:
        return {}
    x_Tn = torch.stack(list(columns.values()), dim=1)
    x_Tn = torch.where(x.mask_T[:, None], x_Tn, 0)
    return dict(zip(columns, sequence_sums(x_Tn, x.seq_T, x.num_seqs, x.cp_group).unbind(1), strict=True))


def mean_per_token(x: LossInputs, sum_S: torch.Tensor) -> torch.Tensor:
    """Sums -> means over the masked tokens of each sequence; 0 for a fully masked one. [S] -> [S]"""
    return torch.where(x.seq_tokens_S > 0, sum_S / torch.where(x.seq_tokens_S > 0, x.seq_tokens_S, 1), 0)
