"""Ratios: how far the policy is from the policy that the advantage speaks of, per token, per sequence, or not at all.

    r = exp(clamp(l)),  l the log-ratio of the chosen granularity;  sg is stop-gradient
"""

from collections.abc import Callable

import torch

from ..config import LossConfig
from .inputs import LossInputs
from .sequence import Columns, mean_per_token


def token(x: LossInputs, sums: Columns) -> torch.Tensor:
    """l_t = log pi(t) - log pi_old(t). PPO (1707.06347, section 3), GRPO (2402.03300, eq. 3)."""
    return x.logp_T - x.old_logp_T


def sequence(x: LossInputs, sums: Columns) -> torch.Tensor:
    """l_t = mean over the sequence of log pi - log pi_old, one value for all its tokens. GSPO (2507.18071, eq. 7)."""
    return mean_per_token(x, sums["log_ratio"])[x.seq_T]


def sequence_token(x: LossInputs, sums: Columns) -> torch.Tensor:
    """l_t = sg(sequence) + log pi(t) - sg(log pi(t)): GSPO's value, the token's own gradient. GSPO-token (2507.18071, eq. 14)."""
    return mean_per_token(x, sums["log_ratio"].detach())[x.seq_T] + x.logp_T - x.logp_T.detach()


def none(x: LossInputs, sums: Columns) -> torch.Tensor:
    """l_t = 0: no ratio; the surrogate takes its gradient from log pi (REINFORCE)."""
    return torch.zeros_like(x.logp_T)


def on_policy(x: LossInputs, sums: Columns) -> torch.Tensor:
    """l_t = log pi(t) - sg(log pi(t)): the ratio is 1 and its gradient is that of log pi."""
    return x.logp_T - x.logp_T.detach()


RATIOS: dict[str, Callable[[LossInputs, Columns], torch.Tensor]] = dict(
    token=token, sequence=sequence, sequence_token=sequence_token, none=none, on_policy=on_policy)


def columns(x: LossInputs, c: LossConfig) -> Columns:
    """What the ratio must know of whole sequences; with gradient only where the gradient flows through the sum."""
    if c.ratio == "sequence":
        return dict(log_ratio=x.logp_T - x.old_logp_T)
    if c.ratio == "sequence_token":
        return dict(log_ratio=(x.logp_T - x.old_logp_T).detach())
    return {}


def ratio(x: LossInputs, sums: Columns, c: LossConfig) -> torch.Tensor:
    """[T] r = exp(clamp(l, --log-ratio-min, --log-ratio-max)); beyond the clamp the gradient is 0.

    The papers have no clamp. It keeps exp finite in float32; verl, miles and OpenRLHF clamp to +-20 too, slime and NeMo-RL do not.
    """
    return RATIOS[c.ratio](x, sums).clamp(c.log_ratio_min, c.log_ratio_max).exp()
