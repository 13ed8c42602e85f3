"""Collectives that the loss is differentiated through. Every rank of the group enters each of them, also with no tokens."""

import torch
import torch.distributed as dist

ProcessGroup = dist.ProcessGroup


class _SequenceSums(torch.autograd.Function):
    """Sums per sequence over all shards; the gradient of a rank's tokens collects what every rank's loss asks of the sums."""

    @staticmethod
    def forward(ctx, x_Tn, seq_T, num_seqs, cp_group):
        ctx.save_for_backward(seq_T)
        ctx.cp_group = cp_group
        sums_Sn = x_Tn.new_zeros(num_seqs, x_Tn.shape[1]).index_add_(0, seq_T, x_Tn)
        if cp_group is not None:
            dist.all_reduce(sums_Sn, group=cp_group)
        return sums_Sn

    @staticmethod
    def backward(ctx, grad_Sn):
        (seq_T,) = ctx.saved_tensors
        if ctx.cp_group is not None:
            grad_Sn = grad_Sn.clone(memory_format=torch.contiguous_format)
            dist.all_reduce(grad_Sn, group=ctx.cp_group)
        return grad_Sn[seq_T], None, None, None


def sequence_sums(x_Tn: torch.Tensor, seq_T: torch.Tensor, num_seqs: int, cp_group: ProcessGroup | None = None) -> torch.Tensor:
    """Sum token values per sequence over all context-parallel shards: y_s = sum over ranks, over t of s, of x_t.

    Differentiable, with one all-reduce of [S, n] forward and one backward. Each rank's loss covers its own tokens only and
    the loss of the step is the sum over ranks, so the backward sums the gradients of y over the ranks.

    Args:
        x_Tn: [T, n] float values of this rank's tokens, 0 where the mask is False; T may be 0.
        seq_T: [T] int64, the sequence of each token in [0, S).
        num_seqs: S, the same on every rank of the group.
        cp_group: the ranks that hold shards of these sequences; None when one rank holds them whole.

    Returns:
        [S, n], equal on every rank of the group.
    """
    return _SequenceSums.apply(x_Tn, seq_T, num_seqs, cp_group)
