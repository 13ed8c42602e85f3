"""Collectives of the loss and the metrics. Every rank of the group enters each of them, also with no tokens."""

import math
import zlib

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


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        if group is None:
            return x.unsqueeze(0)
        out = x.new_empty(dist.get_world_size(group), *x.shape)
        dist.all_gather_into_tensor(out.view(-1), x.contiguous().view(-1), group=group)
        return out

    @staticmethod
    def backward(ctx, grad):
        if ctx.group is None:
            return grad[0], None
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=ctx.group)
        return grad[dist.get_rank(ctx.group)], None


def all_gather(x: torch.Tensor, group: ProcessGroup | None = None) -> torch.Tensor:
    """Stack every rank's tensor: y_r = x of rank r.

    Differentiable: the loss of the step is the sum of the ranks' losses, so the backward sums the gradients of y over the ranks.
    Meant for small tensors (carries, statistics): the backward moves as many bytes per rank as the whole of y.

    Args:
        x: any shape, the same on every rank.
        group: None is a group of one.

    Returns:
        [ranks, *x.shape], equal on every rank.
    """
    return _AllGather.apply(x, group)


def reduce_means(metrics: dict[str, tuple[torch.Tensor, torch.Tensor]], group: ProcessGroup | None = None,
                 device: torch.device | str = "cpu") -> dict[str, float]:
    """Mean of every metric over all ranks: sum of sums / sum of counts; left out where nothing was counted.

    Args:
        metrics: name -> (sum, count), scalars; the same names on every rank.
        group: every rank that holds different tokens. A rank without tokens enters with zeros.
        device: where the collective runs (the backend's).

    Raises:
        ValueError: on every rank, when the names differ between ranks.
    """
    names = sorted(metrics)
    _same_names(names, group, device)
    pairs = torch.stack([torch.as_tensor(v, dtype=torch.float64, device=device) for n in names for v in metrics[n]] or
                        [torch.zeros((), dtype=torch.float64, device=device)])
    if group is not None:
        dist.all_reduce(pairs, group=group)
    sums, counts = pairs[::2].tolist(), pairs[1::2].tolist()
    return {n: s / c for n, s, c in zip(names, sums, counts, strict=False) if c}


def reduce_maxima(values: dict[str, torch.Tensor], group: ProcessGroup | None = None,
                  device: torch.device | str = "cpu") -> dict[str, float]:
    """Largest of every value over all ranks, as `reduce_means`; a rank without tokens enters with -inf; left out where all do."""
    names = sorted(values)
    _same_names(names, group, device)
    maxima = torch.stack([torch.as_tensor(values[n], dtype=torch.float64, device=device) for n in names] or
                         [torch.zeros((), dtype=torch.float64, device=device)])
    if group is not None:
        dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=group)
    return {n: value for n, value in zip(names, maxima.tolist(), strict=False) if value != -math.inf}


def _same_names(names: list[str], group: ProcessGroup | None, device) -> None:
    """Unequal names would pair up wrong numbers, or hang in a collective of unequal lengths: compare a checksum first."""
    if group is None:
        return
    checksum = zlib.crc32("\n".join(names).encode())
    extremes = torch.tensor([checksum, -checksum], dtype=torch.int64, device=device)
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group)
    if extremes.tolist() != [checksum, -checksum]:
        raise ValueError(f"the metrics have other names on another rank than on rank {dist.get_rank()}: {', '.join(names)}; "
                         "every rank must report every metric, with (0, 0) where it has no tokens")
