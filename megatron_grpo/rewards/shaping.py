"""From the raw rewards of finished samples to the reward that the advantage sees, and which samples are trained on.

A truncated sample is the policy's own doing: it keeps its reward, may be punished, and may be masked out of the loss. A sample that
infrastructure aborted has no reward at all: it is masked, and the advantages leave it out of every statistic.
"""

from collections.abc import Callable, Sequence

import numpy as np

from ..batch import Sample, Status
from ..config import RewardConfig

OVERLONG = "overlong"       # the punishment's name among a sample's rewards


def shape_rewards(samples: Sequence[Sample], config: RewardConfig, max_response_len: int, post_process: Callable | None = None) -> bool:
    """Set `reward`, and clear `loss_mask` of the samples that are not trained on; `reward` is raw before.

        reward = clip(scale * raw, -x, x), of a truncated sample times a coefficient, plus the soft overlong punishment

    Args:
        samples: finished ones, of whole groups.
        max_response_len: L_max of the punishment, in tokens.
        post_process: hook of --custom-reward-post-process-path, in place of the formula.

    Returns:
        Whether the rewards are advantages already, which only a hook can say.
    """
    valid = [s for s in samples if s.status is not Status.ABORTED]
    for sample in samples:
        if sample.status is Status.ABORTED or (config.overlong_filter and sample.status is Status.TRUNCATED):
            sample.loss_mask = np.zeros_like(sample.loss_mask)
        if sample.status is Status.ABORTED:
            sample.reward = 0.0
    if post_process is not None:
        out = post_process(valid)
        for sample, reward in zip(valid, out.reward, strict=True):
            sample.reward = reward
        return out.is_advantage
    for sample in valid:
        sample.reward *= config.reward_scale
        if config.reward_clip is not None:
            sample.reward = min(max(sample.reward, -config.reward_clip), config.reward_clip)
        coefficient = config.stop_properly_penalty_coef
        if coefficient is not None and sample.status is Status.TRUNCATED:
            sample.reward = coefficient * sample.reward if coefficient >= 0 else coefficient
        if config.overlong_buffer_len:
            sample.rewards[OVERLONG] = overlong_punishment(sample.response_length, max_response_len, config.overlong_buffer_len,
                                                           config.overlong_penalty_factor, bounded=not config.overlong_unbounded)
            sample.reward += sample.rewards[OVERLONG]
    return False


def overlong_punishment(length: int, max_length: int, buffer: int, factor: float = 1.0, bounded: bool = True) -> float:
    """factor * min(0, (L_max - L_cache - |y|) / L_cache), floored at -factor. DAPO, arXiv 2503.14476, equation 13.

    Args:
        length: |y|, response tokens.
        max_length: L_max in tokens, where the ramp ends.
        buffer: L_cache, the ramp's length in tokens.
        bounded: False leaves the floor out, as verl, NeMo-RL and AReaL do.
    """
    ramp = min(0.0, (max_length - buffer - length) / buffer)
    return factor * (max(ramp, -1.0) if bounded else ramp)
