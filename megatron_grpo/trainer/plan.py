"""From a rollout's samples to the micro-batches of its optimizer steps.

Every leader knows the lengths and ids of all samples of the rollout (a few numbers each), so each computes the same plan:
which samples form which optimizer step, which replica trains on which of them, in which micro-batch, and the
denominators of each step. Only then do the samples move, straight to the replica that trains on them. The plan's
maths (steps, counts) does not depend on the layout; only the assignment does.
"""

import math
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from ..batch import Sample, Status
from ..losses.inputs import StepCounts
from ..parallel import packing
from ..parallel.config import PackingConfig


@dataclass(frozen=True)
class SampleCard:
    """What every leader knows of every sample."""

    sample_id: int
    group_id: int
    rollout_id: int
    length: int
    trained_tokens: int         # loss_mask tokens
    owner: int                  # data-parallel rank that holds it
    reward: float
    rewards: tuple[tuple[str, float], ...]
    valid: bool                 # False: aborted by infrastructure, out of every statistic
    response_length: int
    truncated: bool

    @staticmethod
    def of(sample: Sample, owner: int) -> "SampleCard":
        return SampleCard(sample.sample_id, sample.group_id, sample.rollout_id, len(sample.tokens), int(np.sum(sample.loss_mask)), owner,
                          sample.reward, tuple(sorted(sample.rewards.items())), sample.status is not Status.ABORTED,
                          sample.response_length, sample.status is Status.TRUNCATED)


@dataclass(frozen=True)
class StepScalars:
    """The scalars of every sample of the rollout, in the order of sample ids: what group statistics need.

    `rewards_N` is NaN for a sample that has no reward of the name.
    """

    reward_N: torch.Tensor
    group_N: torch.Tensor
    rollout_N: torch.Tensor
    valid_N: torch.Tensor
    rewards_N: dict[str, torch.Tensor]

    @staticmethod
    def of(cards: list[SampleCard]) -> "StepScalars":
        names = sorted({name for c in cards for name, _ in c.rewards})
        columns = {name: torch.tensor([dict(c.rewards).get(name, math.nan) for c in cards]) for name in names}
        return StepScalars(torch.tensor([c.reward for c in cards]), torch.tensor([c.group_id for c in cards]),
                           torch.tensor([c.rollout_id for c in cards]), torch.tensor([c.valid for c in cards]), columns)


@dataclass(frozen=True)
class MiniStepPlan:
    """One optimizer step: its denominators and, for each data-parallel rank, the sample ids of each micro-batch."""

    counts: StepCounts
    rollout_tokens: dict[int, int]
    prompt_tokens: dict[int, int]
    num_samples: int
    assignment: list[list[list[int]]]


def plan_rollout(cards: list[SampleCard], num_steps: int, *, dp_size: int, cp_size: int, config: PackingConfig, micro_batch_size: int,
                 multiple: int) -> list[MiniStepPlan]:
    """Split the rollout into `num_steps` optimizer steps by whole groups, in the order of sample ids, and balance each.

    Raises:
        ConfigError: a sample given twice, fewer groups than optimizer steps, or a sample longer than a micro-batch.
    """
    from ..settings import ConfigError

    cards = sorted(cards, key=lambda c: c.sample_id)
    twice = [a.sample_id for a, b in pairwise(cards) if a.sample_id == b.sample_id]
    if twice:
        raise ConfigError(f"samples {twice[:5]} are in this rollout twice: recorded rollouts must not overlap")
    groups = list(dict.fromkeys(c.group_id for c in cards))
    if len(groups) < num_steps:
        raise ConfigError(f"--num-steps-per-rollout {num_steps}: this rollout has only {len(groups)} groups; give at most as many steps as groups")
    step_of = {g: i * num_steps // len(groups) for i, g in enumerate(groups)}
    result = []
    for step in range(num_steps):
        own = [c for c in cards if step_of[c.group_id] == step]
        rollout_tokens: Counter[int] = Counter()
        prompt_tokens: Counter[int] = Counter()
        for c in own:
            rollout_tokens[c.rollout_id] += c.trained_tokens
            prompt_tokens[c.group_id] += c.trained_tokens
        counts = StepCounts(tokens=float(sum(c.trained_tokens for c in own)), sequences=float(sum(c.trained_tokens > 0 for c in own)),
                            rollouts=float(sum(n > 0 for n in rollout_tokens.values())), prompts=float(sum(n > 0 for n in prompt_tokens.values())))
        limit = dict(max_tokens_per_gpu=config.max_tokens_per_gpu) if config.use_dynamic_batch_size else dict(micro_batch_size=micro_batch_size)
        assignment = packing.plan([c.length for c in own], dp_size=dp_size, cp_size=cp_size, multiple=multiple,
                                  sample_ids=[c.sample_id for c in own], **limit)
        result.append(MiniStepPlan(counts, dict(rollout_tokens), dict(prompt_tokens), len(own),
                                   [[[own[i].sample_id for i in mb] for mb in rank] for rank in assignment]))
    return result
