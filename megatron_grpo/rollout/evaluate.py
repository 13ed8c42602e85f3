"""Accuracy on held-out prompts."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..batch import Sample, Status
from ..hooks import RolloutFunction
from ..rewards.reward import Rewards
from .config import RolloutConfig
from .engine import Engine, EngineError
from .gate import Gate
from .group import Group, GroupRunner, sampling_params
from .prompts import Prompts
from .trajectory import Trajectory


@dataclass
class Evaluation:
    """Answers to held-out prompts, in prompt order.

    Attributes:
        samples: scored answers; those that infrastructure failed are ABORTED and count nowhere.
        correct: how many have a reward of at least 1.
    """

    samples: list[Sample]

    @property
    def scored(self) -> list[Sample]:
        return [s for s in self.samples if s.status is not Status.ABORTED]

    @property
    def correct(self) -> int:
        return sum(s.reward >= 1 for s in self.scored)

    @property
    def accuracy(self) -> float:
        return self.correct / len(self.scored)

    @property
    def reward(self) -> float:
        return sum(s.reward for s in self.scored) / len(self.scored)


async def evaluate(engine: Engine, prompts: Prompts, rewards: Rewards, tokenizer, config: RolloutConfig, *, greedy: bool = True,
                   max_response_len: int | None = None, indices: Sequence[int] | None = None,
                   function: RolloutFunction | None = None) -> Evaluation:
    """Answer each prompt once.

    Args:
        greedy: take the likeliest token; otherwise sample as in training.
        indices: which prompts, e.g. one leader's share; all when None.
        function: Hooks.rollout.

    Raises:
        EngineError: every answer failed.
    """
    config = replace(config, rollout_max_response_len=max_response_len or config.rollout_max_response_len)
    params = sampling_params(config, tokenizer, greedy=greedy)
    runner = GroupRunner(Gate(engine), rewards, tokenizer, config, params, function=function, tag="eval")
    indices = range(len(prompts)) if indices is None else indices
    groups = [Group(i, [Trajectory(i, i, prompts[i], config.rollout_max_response_len)]) for i in indices]
    await asyncio.gather(*(runner.run(group) for group in groups))
    result = Evaluation([group.samples[group.position] for group in groups])
    if groups and not result.scored:
        raise EngineError(f"evaluation: all {len(groups)} answers failed; the last: {result.samples[-1].metadata['aborted']}")
    return result
