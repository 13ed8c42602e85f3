"""Log-prob and entropy of tokens from logits that are split over the vocabulary.

With d_j = (x_j - max x) / temperature, over the columns j of the support on all ranks:

    l = log sum_j exp(d_j)      p_j = exp(d_j - l)      m = sum_j p_j d_j
    logp = d_target - l         entropy = l - m
    d logp / d x_j = (1[j = target] - p_j) / temperature
    d entropy / d x_j = -p_j (d_j - m) / temperature

So max, l and m, three numbers a token, are all that the backward needs besides the logits: the softmax is never stored. Each rank
makes one pass over its columns, relative to its own maximum (Milakov and Gimelshein, arXiv 1805.02867), and two small all-reduces
join the ranks: the maximum [T], then the sums [2 or 3, T]. The backward has no collective.

Everything is relative to the maximum and in float32 (float64 for float64 logits), so logits near 1e4 or -1e4 lose nothing.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from . import chunked
from .support import SupportMask

FLOOR = chunked.FLOOR


@dataclass(frozen=True)
class Shard:
    """This rank's columns, and how to read them.

    Attributes:
        first: the token id of column 0.
        columns: the columns that are real tokens; those after it are padding.
        scale: 1 / temperature.
        keep: the support of each position, or None.
        chunk_size: most positions at a time (chunked implementation).
    """

    first: int
    columns: int
    scale: float
    keep: SupportMask | None
    chunk_size: int


def vocab_parallel_logprob(
        logits_TV: torch.Tensor, target_T: torch.Tensor, *, tp_group: dist.ProcessGroup | None = None, vocab_size: int | None = None,
        temperature: float = 1.0, with_entropy: bool = False, entropy_grad: bool = False, keep_mask: SupportMask | None = None,
        chunk_size: int = 1024, inplace_grad: bool = False, kernel: bool | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """log pi(target) and, if asked for, the entropy of pi = softmax(logits / temperature) at each position.

    Every rank of `tp_group` calls it with its columns of the same positions and gets the same result; the loss made of it is the
    same on each, so nothing has to be summed over tensor-parallel ranks afterwards. Memory beyond the logits and their gradient is
    at most 0.1 of one float32 [T, V] tensor.

    Args:
        logits_TV: [T, V] bfloat16, float16, float32 or float64; V columns of this rank, the same number on each rank.
        target_T: [T] integer token ids in [0, vocab_size), also at positions that the loss ignores.
        tp_group: the ranks that share the vocabulary, in the order of their columns; None when this rank holds all of it.
        vocab_size: true number of tokens; the columns that Megatron appends to reach a divisible number are padding, whatever they
            hold: their probability and gradient are 0. None: no column is padding.
        temperature: that of the rollout, > 0.
        with_entropy: also return the entropy.
        entropy_grad: let gradients flow through it; without it the entropy is a metric only.
        keep_mask: truncated support of each position (support.py); log-prob and entropy are those of the renormalised rest.
        chunk_size: most positions that the PyTorch implementation works on at a time; fewer where the memory bound or the cache
            wants it.
        inplace_grad: let the backward write the gradient over the logits, which saves one [T, V] tensor. Only for logits whose
            values nobody reads after the forward; if an operation saved them for its own backward, or the backward runs twice,
            PyTorch raises. Leaf tensors (parameters, test inputs) are never overwritten.
        kernel: True for the Triton kernel, False for PyTorch; None: the kernel for CUDA tensors that are not float64.

    Returns:
        (logp_T, entropy_T or None): float32 in nats (float64 for float64 logits).

    Raises:
        ValueError: shapes, temperature or vocab_size do not fit; on CPU also a target outside [0, vocab_size). On CUDA, where looking
            would synchronise the device, the log-prob of such a target is NaN.
    """
    if logits_TV.dim() != 2 or target_T.shape != logits_TV.shape[:1]:
        raise ValueError(f"logits must be [T, V] and targets [T]; got {tuple(logits_TV.shape)} and {tuple(target_T.shape)}")
    if not temperature > 0:
        raise ValueError(f"--rollout-temperature {temperature} must be above 0 to compute log-probs")
    if entropy_grad and not with_entropy:
        raise ValueError("entropy_grad needs with_entropy")
    if keep_mask is not None and keep_mask.num_rows != len(target_T):
        raise ValueError(f"the sampling mask has {keep_mask.num_rows} positions for {len(target_T)} tokens")
    rank, ranks = (0, 1) if tp_group is None else (dist.get_rank(tp_group), dist.get_world_size(tp_group))
    width = logits_TV.shape[1]
    vocab_size = width * ranks if vocab_size is None else vocab_size
    if not 0 < vocab_size <= width * ranks:
        raise ValueError(f"a vocabulary of {vocab_size} tokens does not fit in {ranks} tensor-parallel ranks x {width} columns")
    if target_T.device.type == "cpu" and target_T.numel() and not 0 <= int(target_T.min()) <= int(target_T.max()) < vocab_size:
        bad = int(((target_T < 0) | (target_T >= vocab_size)).nonzero()[0])
        raise ValueError(f"position {bad}: target {int(target_T[bad])} is not a token of a vocabulary of {vocab_size}")
    shard = Shard(first=rank * width, columns=min(max(vocab_size - rank * width, 0), width), scale=1 / temperature, keep=keep_mask,
                  chunk_size=chunk_size)
    if kernel is None:
        kernel = logits_TV.is_cuda and logits_TV.dtype != torch.float64
    if kernel and logits_TV.stride(1) != 1:
        logits_TV = logits_TV.contiguous()
    logp_T, entropy_T = _LogProb.apply(logits_TV, target_T, shard, vocab_size, tp_group, with_entropy, entropy_grad,
                                       inplace_grad and not logits_TV.is_leaf, kernel)
    return logp_T, entropy_T if with_entropy else None


def _implementation(kernel: bool):
    if not kernel:
        return chunked
    from . import kernel as triton_kernel  # needs Triton, which machines without an accelerator may lack
    return triton_kernel


class _LogProb(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, target, shard, vocab_size, tp_group, with_entropy, entropy_grad, inplace_grad, kernel):
        local = target.to(torch.int64) - shard.first
        local = torch.where((local >= 0) & (local < shard.columns), local, -1)
        own_max, own_sum, own_mean, own_target = _implementation(kernel).statistics(logits, local, shard, with_entropy)
        maximum = own_max.clone()
        if tp_group is not None:
            dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=tp_group)
        maximum.masked_fill_(maximum == -torch.inf, 0)
        shift = (own_max - maximum) * shard.scale           # -inf where this rank has no column in the support
        rescale, shift = shift.exp(), shift.clamp(min=FLOOR)
        parts = [own_sum * rescale, torch.where(local >= 0, (own_target - maximum) * shard.scale, 0)]
        if with_entropy:
            parts.append((own_mean + shift * own_sum) * rescale)
        parts = torch.stack(parts)
        if tp_group is not None:
            dist.all_reduce(parts, group=tp_group)
        log_sum = parts[0].log()
        logp = parts[1] - log_sum
        logp.masked_fill_((target < 0) | (target >= vocab_size), torch.nan)
        mean = parts[2] / parts[0] if with_entropy else None
        entropy = log_sum - mean if with_entropy else None
        ctx.save_for_backward(logits, local, maximum, log_sum, mean if entropy_grad else None)
        ctx.shard, ctx.inplace_grad, ctx.kernel = shard, inplace_grad, kernel
        ctx.set_materialize_grads(False)
        if with_entropy and not entropy_grad:
            ctx.mark_non_differentiable(entropy)
        return logp, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_logp, grad_entropy):
        logits, local, maximum, log_sum, mean = ctx.saved_tensors
        grad_logp = torch.zeros_like(maximum) if grad_logp is None else grad_logp
        # detach shares the version counter: whoever saved the logits too gets PyTorch's error, not wrong numbers
        grad = logits.detach() if ctx.inplace_grad else torch.empty_like(logits)
        _implementation(ctx.kernel).gradient(grad, logits, local, ctx.shard, maximum, log_sum, mean, grad_logp, grad_entropy)
        return grad, *[None] * 8
