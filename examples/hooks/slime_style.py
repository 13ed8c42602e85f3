"""Functions in slime's own form, run unchanged: they are recognised by the names of their arguments.

    --custom-pg-loss-reducer-function-path examples/hooks/slime_style.py:get_dr_grpo_reducer
    --custom-advantage-function-path examples/hooks/slime_style.py:rewards_less_kl
    --custom-tis-function-path examples/hooks/slime_style.py:clip_both_ends
"""

import torch

DIVISOR = 1000


def get_dr_grpo_reducer(total_lengths, response_lengths, loss_masks, calculate_per_token_loss=False):
    """Sum over tokens over a constant; slime divides by the rollouts of the step."""
    def reduce(x):
        return sum((x_i * mask).sum() / DIVISOR for x_i, mask in zip(x.split(response_lengths), loss_masks, strict=True))
    return reduce


def rewards_less_kl(args, rollout_data):
    """One tensor of response tokens for each sample, whole also under context parallelism."""
    advantages = [reward - args.kl_coef * kl for reward, kl in zip(rollout_data["rewards"], rollout_data["kl"], strict=True)]
    rollout_data["advantages"] = rollout_data["returns"] = advantages


def clip_both_ends(args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks, **kwargs):
    ratio = (torch.cat(train_log_probs) - torch.cat(rollout_log_probs)).exp()
    return pg_loss * ratio.clamp(args.tis_clip_low, args.tis_clip), loss_masks, {"tis": ratio.detach()}
