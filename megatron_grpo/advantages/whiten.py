"""Standardisation over the whole step: of tokens or of responses, over all ranks that hold a part of them."""

import torch
import torch.distributed as dist

from .group import ROUNDING


def moments(x: torch.Tensor, mask: torch.Tensor, group: "dist.ProcessGroup | None" = None,
            ddof: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """(x - mean, variance) over the elements with mask True of all ranks of `group`, in float64.

    Two passes, one all-reduce each, entered by every rank whatever it holds.

    Args:
        x: [n] float; arbitrary where the mask is False, also non-finite.
        mask: [n] bool; may be all False on a rank.
        group: ranks that hold disjoint parts; None: this rank holds everything.
        ddof: 1 divides the squares by count - 1, 0 by count.

    Returns:
        [n] centered values, 0 where masked; and the variance, exactly 0 when the values are equal up to rounding.
    """
    x64 = torch.where(mask, x.double(), 0.0)
    sums = torch.stack([x64.sum(), mask.sum().double()])
    if group is not None:
        dist.all_reduce(sums, group=group)
    mean, count = sums[0] / sums[1].clamp(min=1), sums[1]
    centered = torch.where(mask, x64 - mean, 0.0)
    squares = centered.square().sum()
    if group is not None:
        dist.all_reduce(squares, group=group)
    flat = squares <= ROUNDING**2 * (squares + count * mean.square())
    return centered, torch.where(flat, 0.0, squares / (count - ddof).clamp(min=1))


def whiten(x: torch.Tensor, mask: torch.Tensor, group: "dist.ProcessGroup | None" = None, *, ddof: int = 1,
           eps: float = 1e-8) -> torch.Tensor:
    """x -> (x - mean) / sqrt(var + eps), 0 where masked and where all values are equal.

    REINFORCE++, arXiv 2501.03262 section 3 (global advantage normalisation). Arguments as `moments`; [n] of x's dtype.
    """
    centered, var = moments(x, mask, group, ddof)
    return torch.where(var > 0, centered * (var + eps).rsqrt(), 0.0).to(x.dtype)


def standardize(x: torch.Tensor, mask: torch.Tensor, group: "dist.ProcessGroup | None" = None, *, ddof: int = 1,
                eps: float = 1e-4) -> torch.Tensor:
    """x -> (x - mean) / (std + eps), 0 where masked and where all values are equal.

    GDPO, arXiv 2601.05242 (batch normalisation of the summed advantages). Arguments as `moments`; [n] of x's dtype.
    """
    centered, var = moments(x, mask, group, ddof)
    return torch.where(var > 0, centered / (var.sqrt() + eps), 0.0).to(x.dtype)
