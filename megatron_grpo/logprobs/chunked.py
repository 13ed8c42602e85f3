"""The passes over the logits in PyTorch, a few positions at a time (vocab_parallel.py has the formulas)."""

import torch

FLOOR = -1e4
"""exp(FLOOR) is 0 in float64 too; logits of probability 0 are raised to it, so that 0 * log 0 is 0 and not NaN."""

CACHE = 2 ** 18
"""Numbers that a chunk should not exceed on a CPU: two float32 buffers of them fit in a second-level cache."""


def statistics(logits: torch.Tensor, local: torch.Tensor, shard, with_mean: bool):
    """One pass: (maximum, sum of exp(d), sum of exp(d) d or None, target logit), each [T], d relative to this rank's own maximum.

    Args:
        logits: [T, V].
        local: [T] the target's column, -1 where another rank has it.
        shard: Shard.
        with_mean: also sum exp(d) d.
    """
    dtype = torch.promote_types(logits.dtype, torch.float32)
    maximum = torch.full((len(logits),), -torch.inf, dtype=dtype, device=logits.device)
    total, mean = torch.zeros_like(maximum), torch.zeros_like(maximum)
    if shard.columns:
        for rows, x, d, e in _chunks(logits, local, shard, dtype):
            maximum[rows] = x.amax(1)
            _relative(d, x, maximum[rows].masked_fill(maximum[rows] == -torch.inf, 0), shard.scale, floor=with_mean)
            torch.sum(torch.exp(d, out=e), 1, out=total[rows])
            if with_mean:
                torch.sum(e.mul_(d), 1, out=mean[rows])
    target = logits.gather(1, local.clamp(min=0)[:, None]).squeeze(1).to(dtype)
    return maximum, total, mean if with_mean else None, target


def gradient(out: torch.Tensor, logits: torch.Tensor, local: torch.Tensor, shard, maximum, log_sum, mean, grad_logp, grad_entropy):
    """Write d loss / d logits to `out` [T, V], which may be `logits` itself. All else [T]; `grad_entropy` may be None."""
    scale = shard.scale
    for rows, x, d, e in _chunks(logits, local, shard, maximum.dtype) if shard.columns else ():
        _relative(d, x, maximum[rows], scale, floor=grad_entropy is not None)
        p = torch.sub(d, log_sum[rows, None], out=e).exp_()
        if grad_entropy is None:
            p.mul_((-scale * grad_logp[rows])[:, None])
        else:       # -scale * p * (grad_logp + grad_entropy * (d - mean))
            slope = -scale * grad_entropy[rows]
            p.mul_(d.mul_(slope[:, None]).sub_((scale * grad_logp[rows] + slope * mean[rows])[:, None]))
        hit, column = local[rows] >= 0, local[rows].clamp(min=0)[:, None]
        p.scatter_add_(1, column, torch.where(hit, scale * grad_logp[rows], 0)[:, None])
        out[rows, :shard.columns] = p
    out[:, shard.columns:] = 0


def _relative(d: torch.Tensor, x: torch.Tensor, maximum: torch.Tensor, scale: float, floor: bool) -> None:
    """d = (x - maximum) * scale."""
    torch.sub(x, maximum[:, None], out=d)
    if scale != 1:
        d.mul_(scale)
    if floor:
        d.clamp_(min=FLOOR)


def _chunks(logits, local, shard, dtype):
    """(rows, their logits, two work buffers), a chunk at a time; the logits are in the first buffer already where they had to be copied."""
    size = _chunk_rows(len(logits), shard.columns, shard.chunk_size, logits.device.type == "cpu")
    buffers = torch.empty(2, size, shard.columns, dtype=dtype, device=logits.device)
    for start in range(0, len(logits), size):
        rows = slice(start, min(start + size, len(logits)))
        x = logits[rows, :shard.columns]
        d, e = buffers[:, :len(x)]
        if logits.dtype != dtype or shard.keep is not None:
            x = d.copy_(x)
        if shard.keep is not None:
            keep = shard.keep.dense(rows.start, rows.stop, shard.first, shard.columns)
            column = local[rows, None].clamp(min=0)
            keep.scatter_(1, column, keep.gather(1, column) | (local[rows, None] >= 0))         # the target always stays
            x.masked_fill_(keep.logical_not_(), -torch.inf)
        yield rows, x, d, e


def _chunk_rows(rows: int, columns: int, limit: int, cpu: bool) -> int:
    """Rows of a chunk: so few that the two buffers and a mask stay under 0.1 of one float32 [T, V] tensor, and in the cache.

    At least 64k numbers, though, below which the calls cost more than the memory is worth.
    """
    size = max(rows // 26, 2 ** 16 // columns)
    if cpu:
        size = min(size, CACHE // columns)
    return max(1, min(size, limit, rows))
