"""Group baselines: one number for each sample from the rewards of all samples of its prompt.

Groups are found by id, so they may have any size and stand in any order. Samples that infrastructure aborted are in no
statistic and get 0. Siblings cut from one rollout count as one sample. All arithmetic is float64: there are few samples.
"""

from dataclasses import dataclass
from functools import partial

import torch

ROUNDING = 8 * torch.finfo(torch.float32).eps
"""Rewards of a group whose spread is below this share of their size are equal: they came from float32 arithmetic."""


@dataclass(frozen=True)
class Groups:
    """Statistics of each sample's group, as [N] float64 (bool, int64) arrays.

    Attributes:
        index_N: the group, in [0, num_groups).
        reward_N: the rewards, 0 where aborted.
        weight_N: 1 / siblings of the sample's rollout, 0 where aborted; sums to the group's size.
        size_N: n, rollouts in the group.
        centered_N: reward - group mean.
        squares_N: sum over the group of (reward - mean)^2.
        flat_N: all rewards of the group are equal.
    """

    num_groups: int
    index_N: torch.Tensor
    reward_N: torch.Tensor
    weight_N: torch.Tensor
    size_N: torch.Tensor
    centered_N: torch.Tensor
    squares_N: torch.Tensor
    flat_N: torch.Tensor

    @staticmethod
    def of(reward_N: torch.Tensor, group_N: torch.Tensor, valid_N: torch.Tensor | None = None,
           rollout_N: torch.Tensor | None = None) -> "Groups":
        """Statistics of `reward_N` [N] by `group_N` [N]; `valid_N` [N] bool, `rollout_N` [N] as in AdvantageInputs."""
        valid_N = torch.ones_like(group_N, dtype=torch.bool) if valid_N is None else valid_N
        r_N = torch.where(valid_N, reward_N.double(), 0.0)
        ids, index_N = torch.unique(group_N, return_inverse=True)

        total, largest = partial(_total, index_N, len(ids)), partial(_largest, index_N, len(ids))
        weight_N = valid_N.double()
        if rollout_N is not None:
            pairs, pair_N = torch.unique(torch.stack([group_N, rollout_N]), dim=1, return_inverse=True)
            weight_N = weight_N / weight_N.new_zeros(pairs.shape[1]).index_add(0, pair_N, weight_N)[pair_N].clamp(min=1)
        size_N = total(weight_N)
        shifted_N = torch.where(valid_N, r_N + largest(torch.where(valid_N, -r_N, -torch.inf)), 0.0)    # above the group's smallest
        centered_N = torch.where(valid_N, shifted_N - total(weight_N * shifted_N) / size_N.clamp(min=1), 0.0)
        flat_N = largest(shifted_N) <= ROUNDING * largest(r_N.abs())
        return Groups(len(ids), index_N, r_N, weight_N, size_N, centered_N, total(weight_N * centered_N.square()), flat_N)

    def total(self, x_N: torch.Tensor) -> torch.Tensor:
        """[N]: the sum over each sample's group."""
        return _total(self.index_N, self.num_groups, x_N)

    def largest(self, x_N: torch.Tensor) -> torch.Tensor:
        """[N]: the maximum over each sample's group."""
        return _largest(self.index_N, self.num_groups, x_N)

    def count_flat(self) -> torch.Tensor:
        """Groups without signal: every reward equal (groups of one and groups without a valid sample included)."""
        flat_N = self.flat_N.double()
        return flat_N.new_zeros(self.num_groups).scatter_reduce(0, self.index_N, flat_N, "amax").sum()


def _total(index_N, num_groups, x_N):
    return x_N.new_zeros(num_groups).index_add(0, index_N, x_N)[index_N]


def _largest(index_N, num_groups, x_N):
    return x_N.new_full((num_groups,), -torch.inf).scatter_reduce(0, index_N, x_N, "amax")[index_N]


def group_advantage(groups: Groups, *, baseline: str = "mean", std: str = "sample", eps: float = 1e-6, singleton: str = "zero",
                    tokens_N: torch.Tensor | None = None) -> torch.Tensor:
    """[N] float64: A_i = (r_i - b_i) / (std_i + eps); exactly 0 in a group whose rewards are all equal.

    Args:
        baseline: b_i is the
            mean           mean of the group (GRPO, arXiv 2402.03300 section 4.1.2)
            leave_one_out  mean of the others: r_i - b_i = n / (n - 1) (r_i - mean) (RLOO, arXiv 2402.14740 section 2.3)
            length         mean weighted by response length, sum l r / sum l (OPO, arXiv 2505.23585)
            second_best    second best reward for the best sample; all others get 0 (pass@k, arXiv 2503.19595)
        std: the std is
            sample         sqrt(sum (r - mean)^2 / (n - 1))
            population     sqrt(sum (r - mean)^2 / n)
            leave_one_out  sample std of the others; not divided by where they are all equal
            none           1, without eps (Dr.GRPO, arXiv 2503.20783 section 3.2)
        eps: added to the std.
        singleton: what a group of one gets: "zero", or "reward": mean 0 and std 1.
        tokens_N: [N] response tokens of each sample, for the baseline "length".
    """
    n_N, centered_N, squares_N = groups.size_N, groups.centered_N, groups.squares_N
    if baseline == "mean":
        out_N = centered_N
    elif baseline == "leave_one_out":
        out_N = centered_N * (n_N / (n_N - 1).clamp(min=1))
    elif baseline == "length":
        if tokens_N is None:
            raise ValueError("the baseline length needs tokens_N")
        lengths_N = tokens_N * groups.weight_N
        out_N = centered_N - groups.total(lengths_N * centered_N) / groups.total(lengths_N).clamp(min=1)
    elif baseline == "second_best":
        out_N = _above_second(groups)
    else:
        raise ValueError(f"unknown baseline {baseline!r}")
    if std == "sample":
        out_N = out_N / ((squares_N / (n_N - 1).clamp(min=1)).sqrt() + eps)
    elif std == "population":
        out_N = out_N / ((squares_N / n_N.clamp(min=1)).sqrt() + eps)
    elif std == "leave_one_out":
        others_N = squares_N - n_N / (n_N - 1).clamp(min=1) * centered_N.square()
        has_spread_N = (n_N > 2) & (others_N > ROUNDING**2 * squares_N)
        others_std_N = (torch.where(has_spread_N, others_N, 1.0) / (n_N - 2).clamp(min=1)).sqrt()
        out_N = torch.where(has_spread_N, out_N / (others_std_N + eps), out_N)
    elif std != "none":
        raise ValueError(f"unknown std {std!r}")
    out_N = torch.where(groups.flat_N | (groups.weight_N == 0), 0.0, out_N)
    alone = groups.reward_N / (1 if std == "none" else 1 + eps) if singleton == "reward" else torch.zeros_like(out_N)
    return torch.where(n_N < 1.5, alone, out_N)        # siblings' shares of one rollout do not sum to exactly 1


def _above_second(groups: Groups) -> torch.Tensor:
    """[N]: how far the best sample of each group is above the second best, 0 for the others and for a tie."""
    place_N = torch.arange(len(groups.index_N), device=groups.index_N.device)
    valid_N = torch.where(groups.weight_N > 0, groups.centered_N, -torch.inf)
    is_top_N = valid_N == groups.largest(valid_N)
    first_N = is_top_N & (place_N == -groups.largest(torch.where(is_top_N, -place_N, -len(place_N)).double()))
    second_N = groups.largest(torch.where(first_N, -torch.inf, valid_N))
    return torch.where(first_N & second_N.isfinite(), valid_N - second_N, 0.0)


