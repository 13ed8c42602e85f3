"""Soft overlong punishment, and the coefficient of truncated samples."""

import numpy as np

from megatron_grpo.batch import Sample, Status
from megatron_grpo.config import RewardConfig
from megatron_grpo.rewards.shaping import overlong_punishment, shape_rewards
from tests.golden import NotCovered, choose
from tests.golden.peers import name

BOUNDED = dict(openrlhf=True, trl=True, verl=False, nemo=False, areal=False)


def tolerance(case: dict, output: str) -> float:
    return 1e-9 if name(case) == "trl" else 1e-6        # the others add in float32


def run(case: dict, pool) -> dict:
    inputs, p = case["inputs"], case["inputs"]["params"]
    if "assistant_lengths" in inputs:
        raise NotCovered("the peer's legacy path measures only the first assistant message; ours measures the response")
    if "truncated" in inputs:
        coefficient = p["coef"] if "coef" in p else p["stop_properly_penalty_coef"]
        if coefficient < 0 and name(case) != "openrlhf":
            raise NotCovered("a negative coefficient is the truncated reward itself here; NeMo-RL multiplies by it")
        config = RewardConfig(stop_properly_penalty_coef=coefficient)
        samples = [_sample(i, 4, r, t) for i, (r, t) in enumerate(zip(inputs["rewards"], inputs["truncated"], strict=True))]
        shape_rewards(samples, config, max_response_len=100)
        return dict(reward=[s.reward for s in samples])
    bounded, limits = choose(BOUNDED, name(case), "the overlong penalty of"), (p["max_response_length"], p["overlong_buffer_len"])
    config = RewardConfig(overlong_buffer_len=limits[1], overlong_penalty_factor=p["penalty_factor"], overlong_unbounded=not bounded)
    samples = [_sample(i, n, inputs.get("base_reward", 0.0), False) for i, n in enumerate(inputs["lengths"])]
    shape_rewards(samples, config, max_response_len=limits[0])
    punishments = [overlong_punishment(n, *limits, p["penalty_factor"], bounded) for n in inputs["lengths"]]
    out = dict(reward=[s.reward for s in samples], penalty=punishments, num_penalized=sum(x < 0 for x in punishments))
    return {k: v for k, v in out.items() if k in case["outputs"]}


def _sample(i: int, length: int, reward: float, truncated: bool) -> Sample:
    return Sample(sample_id=i, group_id=0, tokens=np.zeros(1 + length, np.int64), prompt_length=1, loss_mask=np.ones(length, bool),
                  rollout_logp=np.zeros(length, np.float32), status=Status.TRUNCATED if truncated else Status.COMPLETED, reward=reward)
