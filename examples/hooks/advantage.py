"""Advantages of one's own:  --custom-advantage-function-path examples/hooks/advantage.py:mean_normalized

(r - mean) / mean of the group: the rarer success is, the more it counts (MaxRL, arXiv 2602.02710). Rewards must not be negative.
"""

from megatron_grpo.advantages.group import Groups


def mean_normalized(inputs, config):
    """[T] advantage per token. `inputs` is an AdvantageInputs: `_N` speaks of all samples of the step, `_T` of this rank's tokens."""
    groups = Groups.of(inputs.reward_N, inputs.group_N, inputs.valid_N, inputs.rollout_N)
    mean_N = groups.reward_N - groups.centered_N
    advantage_N = groups.centered_N / mean_N.clamp(min=1e-6)
    return advantage_N[inputs.sample_S][inputs.seq_T].float()
