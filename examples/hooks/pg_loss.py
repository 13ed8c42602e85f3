"""A policy loss of one's own:  --custom-pg-loss-path examples/hooks/pg_loss.py:ppo_with_positive_nll

PPO's clip, and on tokens of positive advantage a small likelihood term that the clip cannot silence (VAPO, arXiv 2504.05118).
"""

import torch

from megatron_grpo.hooks import PgLossOutput

NLL_WEIGHT = 0.1


def ppo_with_positive_nll(inputs, config):
    """[T] loss per token. `inputs` is a LossInputs, `config` a LossConfig."""
    high = config.eps_clip if config.eps_clip_high is None else config.eps_clip_high
    ratio_T = (inputs.logp_T - inputs.old_logp_T).clamp(-20, 20).exp()
    clipped_T = ratio_T.clamp(1 - config.eps_clip, 1 + high)
    positive_T = inputs.mask_T & (inputs.advantage_T > 0)
    loss_T = torch.maximum(-inputs.advantage_T * ratio_T, -inputs.advantage_T * clipped_T)
    loss_T = loss_T - NLL_WEIGHT * torch.where(positive_T, inputs.logp_T, 0.0)
    return PgLossOutput(loss_T, {"positive_tokens": (positive_T.sum().float(), inputs.mask_T.sum().float())})
