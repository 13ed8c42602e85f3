"""Shaping of one's own:  --custom-reward-post-process-path examples/hooks/reward_post_process.py:shorter_is_better

In place of the built-in shaping: among the right answers to a prompt, the shorter get up to 0.2 more.
"""

from collections import defaultdict

from megatron_grpo.hooks import RewardOutput


def shorter_is_better(args, samples):
    """`sample.reward` is the raw reward. The result goes through the group baseline; RewardOutput(..., is_advantage=True) would not."""
    lengths = defaultdict(list)
    for s in samples:
        if s.reward > 0:
            lengths[s.group_id].append(s.response_length)

    def bonus(s):
        shortest, longest = min(lengths[s.group_id]), max(lengths[s.group_id])
        return 0.2 * (longest - s.response_length) / (longest - shortest) if longest > shortest else 0.0

    return RewardOutput([s.reward + (bonus(s) if s.reward > 0 else 0.0) for s in samples])
