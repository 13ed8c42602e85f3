"""The raw reward of a finished sample: built-in verifiers, a remote one, the user's own, all under one time limit.

A verifier that raises, hangs or dies says nothing about the response. Its sample becomes ABORTED with the reason, and is
never scored 0.
"""

import asyncio
import math

from ..batch import Sample, Status
from ..hooks import RewardModel
from ..settings import ConfigError
from .config import VerifierConfig
from .verifiers import VerifierPool


class Rewards:
    """Scores samples: `await rewards(samples)` fills `sample.rewards` and `sample.reward`, or aborts the sample.

    Args:
        config: built-in rewards and the time limit.
        custom: Hooks.rm, or None.

    Raises:
        ConfigError: no reward is named at all.
    """

    def __init__(self, config: VerifierConfig, custom: RewardModel | None = None):
        if not config.rm_type and custom is None:
            raise ConfigError("no reward: give --rm-type (task, math, remote) or --custom-rm-path")
        self.config, self.custom = config, custom
        self.pool = VerifierPool(config.rm_workers, config.rm_timeout)

    async def __call__(self, samples: list[Sample]) -> None:
        """Score the samples of one group, concurrently."""
        await asyncio.gather(*(self._score(sample) for sample in samples))

    def close(self):
        self.pool.close()

    async def _score(self, sample: Sample) -> None:
        try:
            for name in self.config.rm_type:
                sample.rewards[name] = await self.pool.score(name, sample.response, sample.label, sample.metadata)
            if self.custom is not None:
                sample.rewards.update(await asyncio.wait_for(self.custom(sample), self.config.rm_timeout))
            sample.reward = self.total(sample.rewards)
        except Exception as error:
            abort(sample, f"reward: {type(error).__name__}: {error}")

    def total(self, rewards: dict[str, float]) -> float:
        """One number of the named rewards: --reward-key, or the sum."""
        bad = {name: value for name, value in rewards.items() if not math.isfinite(value)}
        if bad:
            raise ValueError(f"not finite: {bad}")
        if self.config.reward_key is None:
            return float(sum(rewards.values()))
        if self.config.reward_key not in rewards:
            raise ValueError(f"--reward-key {self.config.reward_key}: the rewards are {sorted(rewards)}")
        return float(rewards[self.config.reward_key])


def abort(sample: Sample, reason: str) -> None:
    """Mark a sample as failed by infrastructure."""
    sample.status, sample.rewards, sample.reward = Status.ABORTED, {}, 0.0
    sample.metadata = {**sample.metadata, "aborted": reason}
