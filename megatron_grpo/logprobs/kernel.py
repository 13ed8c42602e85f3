"""The passes over the logits as Triton kernels: each logit is read once forward, read and written once backward.

The same two functions as chunked.py, for bfloat16, float16 and float32 logits; the arithmetic is float32. On purpose:

* columns past the end of the shard (block remainder and padded vocabulary) are -inf, never 0: a zero is a logit;
* a running maximum starts at -inf, not at 0, so that rows of very negative logits keep their sum;
* grids are one-dimensional, in x, the only dimension without a limit of 65535;
* nothing is autotuned: trial runs of a kernel that writes over its input would destroy the input.
"""

import torch
import triton
import triton.language as tl

from .chunked import FLOOR

BLOCK, WARPS = 4096, 8


def statistics(logits: torch.Tensor, local: torch.Tensor, shard, with_mean: bool):
    """As chunked.statistics."""
    tokens = len(logits)
    maximum, total, mean, target = torch.empty(4, tokens, dtype=torch.float32, device=logits.device)
    keep = _keep_bits(logits, shard)
    if tokens:
        with torch.cuda.device_of(logits):
            _statistics[(tokens,)](
                logits, local, keep, maximum, total, mean, target, logits.stride(0), keep.shape[1], shard.columns,
                logits.shape[1], shard.scale, WITH_KEEP=shard.keep is not None, WITH_MEAN=with_mean, LEAST=FLOOR, BLOCK=BLOCK,
                num_warps=WARPS)
    return maximum, total, mean if with_mean else None, target


def gradient(out: torch.Tensor, logits: torch.Tensor, local: torch.Tensor, shard, maximum, log_sum, mean, grad_logp, grad_entropy):
    """As chunked.gradient."""
    tokens, width = logits.shape
    keep, blocks = _keep_bits(logits, shard), triton.cdiv(width, BLOCK)
    with_entropy = grad_entropy is not None
    if tokens:
        with torch.cuda.device_of(logits):
            _gradient[(tokens * blocks,)](
                out, logits, local, keep, maximum, log_sum, mean if with_entropy else maximum, grad_logp.contiguous(),
                grad_entropy.contiguous() if with_entropy else grad_logp, out.stride(0), logits.stride(0), keep.shape[1], shard.columns,
                width, blocks, shard.scale, WITH_KEEP=shard.keep is not None, WITH_ENTROPY=with_entropy, LEAST=FLOOR, BLOCK=BLOCK,
                num_warps=WARPS)
    torch.autograd.graph.increment_version(out)


def _keep_bits(logits: torch.Tensor, shard) -> torch.Tensor:
    """[T, columns / 32] int32, one bit a column: whether it is in the position's support. Without a mask a stand-in."""
    if shard.keep is None:
        return torch.empty(1, 1, dtype=torch.int32, device=logits.device)
    bits = torch.full((len(logits), triton.cdiv(shard.columns, 32) + 1), -1, dtype=torch.int32, device=logits.device)
    ids, row = shard.keep.ids.contiguous(), shard.keep.row
    bits.index_fill_(0, row, 0)
    if len(ids):
        with torch.cuda.device_of(logits):
            _set_bits[(triton.cdiv(len(ids), 256),)](bits, ids, row, len(ids), shard.first, shard.columns, bits.shape[1], BLOCK=256)
    return bits


@triton.jit
def _set_bits(bits, ids, row, count, first, columns, words, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    column = tl.load(ids + i, mask=inside, other=-1).to(tl.int32) - first
    where = tl.load(row + i, mask=inside, other=0) * words
    inside = inside & (column >= 0) & (column < columns)
    column = tl.where(inside, column, 0)
    tl.atomic_or(bits + where + column // 32, (tl.full([BLOCK], 1, tl.int32) << (column % 32)), mask=inside)


@triton.jit
def _load(logits, row, stride, column, own, keep, words, columns, width, WITH_KEEP: tl.constexpr):
    """Logits of one row in float32; -inf outside the shard and the support. The target is always in the support.

    The load is masked by the width of the tensor, which divides by 16 in practice and so lets it be vectorised; the true number of
    columns need not.
    """
    inside = column < columns
    if WITH_KEEP:
        word = tl.load(keep + row * words + column // 32, mask=inside, other=0)
        inside = inside & ((((word >> (column % 32)) & 1) != 0) | (column == own))
    x = tl.load(logits + row * stride + column, mask=column < width, other=-float("inf")).to(tl.float32)
    return tl.where(inside, x, -float("inf"))


@triton.jit
def _statistics(logits, local, keep, maximum, total, mean, target, stride, words, columns, width, scale, WITH_KEEP: tl.constexpr,
                WITH_MEAN: tl.constexpr, LEAST: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    own = tl.load(local + row)
    m = -float("inf")
    s = 0.0
    w = 0.0
    for start in range(0, columns, BLOCK):
        x = _load(logits, row, stride, start + tl.arange(0, BLOCK), own, keep, words, columns, width, WITH_KEEP)
        new = tl.maximum(m, tl.max(x, 0))
        finite = tl.where(new == -float("inf"), 0.0, new)
        d = tl.maximum((x - finite) * scale, LEAST, propagate_nan=tl.PropagateNan.ALL)
        e = tl.exp(d)
        shift = tl.maximum((m - finite) * scale, LEAST)
        rescale = tl.exp(shift)
        if WITH_MEAN:
            w = (w + shift * s) * rescale + tl.sum(e * d, 0)
        s = s * rescale + tl.sum(e, 0)
        m = new
    tl.store(maximum + row, m)
    tl.store(total + row, s)
    if WITH_MEAN:
        tl.store(mean + row, w)
    tl.store(target + row, tl.load(logits + row * stride + own, mask=own >= 0, other=0.0).to(tl.float32))


@triton.jit
def _gradient(out, logits, local, keep, maximum, log_sum, mean, grad_logp, grad_entropy, out_stride, stride, words, columns, width, blocks,
              scale, WITH_KEEP: tl.constexpr, WITH_ENTROPY: tl.constexpr, LEAST: tl.constexpr, BLOCK: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    row = program // blocks
    column = (program % blocks).to(tl.int32) * BLOCK + tl.arange(0, BLOCK)
    own = tl.load(local + row)
    x = _load(logits, row, stride, column, own, keep, words, columns, width, WITH_KEEP)
    d = tl.maximum((x - tl.load(maximum + row)) * scale, LEAST, propagate_nan=tl.PropagateNan.ALL)
    g = tl.load(grad_logp + row)
    slope = -tl.exp(d - tl.load(log_sum + row))
    if WITH_ENTROPY:
        slope = slope * (g + tl.load(grad_entropy + row) * (d - tl.load(mean + row)))
    else:
        slope = slope * g
    grad = scale * (slope + tl.where(column == own, g, 0.0))
    tl.store(out + row * out_stride + column, grad.to(out.dtype.element_ty), mask=column < width)
