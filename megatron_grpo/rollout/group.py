"""One prompt's responses from the first request to their rewards."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from ..batch import Sample, SampleGroup, Status
from ..hooks import RolloutFunction
from ..rewards.reward import Rewards, abort
from .config import RolloutConfig
from .engine import EngineError, SamplingParams
from .gate import Gate
from .multi_turn import Conversation, converse
from .trajectory import Trajectory

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Group:
    """The responses to the prompt at `position`.

    Attributes:
        growing: not finished, or not scored yet.
        tries: how often it was begun before and fell to infrastructure.
        samples: finished and scored, by sample_id.
        done: all are finished, those that failed are out, and the filter let the group pass.
        claimed: it holds a slot of the step before it is complete.
        due: weights version of the step that kept it; a resumed run gives it to the same one.
    """

    position: int
    growing: list[Trajectory]
    tries: int = 0
    samples: dict[int, Sample] = field(default_factory=dict)
    done: bool = False
    claimed: bool = False
    due: int | None = None

    @property
    def size(self) -> int:
        return len(self.growing) + len(self.samples)

    @property
    def sampled(self) -> int:
        """Tokens sampled so far."""
        return sum(t.sampled for t in self.growing) + sum(int(s.loss_mask.sum()) for s in self.samples.values())

    def age(self, version: int) -> int:
        """How far the weights of the oldest token are behind `version`; 0 before the first token."""
        spans = [span for t in self.growing for span in t.versions] + [span for s in self.samples.values() for span in s.weight_versions]
        return max((version - version_number(v) for v, _, _ in spans), default=0)

    def sample_group(self) -> SampleGroup:
        return SampleGroup(self.position, [self.samples[i] for i in sorted(self.samples)])


def version_number(version: str) -> int:
    """Raises EngineError if the engine's weight version is not a number."""
    try:
        return int(version)
    except ValueError:
        raise EngineError(f"the engine reports weight version {version!r}, not a number, so the age of its samples is unknown; start it "
                          "with --weight-version 0") from None


class GroupRunner:
    """Brings groups to their end.

    Args:
        gate: the way to the engine.
        params: sampling; `seed` is mixed with the sample's id.
        on_tokens: called with the number of tokens of each answer of the engine.
        tag: prefix of request ids.
    """

    def __init__(self, gate: Gate, rewards: Rewards, tokenizer, config: RolloutConfig, params: SamplingParams, *,
                 function: RolloutFunction | None = None, on_tokens: Callable[[int], None] = lambda n: None, tag: str = "sample"):
        self.gate, self.rewards, self.tokenizer, self.config, self.params = gate, rewards, tokenizer, config, params
        self.function, self.on_tokens, self.tag = function, on_tokens, tag

    async def run(self, group: Group) -> None:
        """Finish and score every sample of the group; one that infrastructure failed is ABORTED and says why."""
        await asyncio.gather(*(self._finish(group, t) for t in list(group.growing)))
        await self.rewards.finish([s for s in group.samples.values() if s.status is not Status.ABORTED])

    async def _finish(self, group: Group, trajectory: Trajectory) -> None:
        seed = None if self.params.seed is None else (self.params.seed * 1_000_003 + trajectory.sample_id) % 2**31
        conversation = Conversation(trajectory, self.gate, replace(self.params, seed=seed), self.tokenizer, tag=self.tag,
                                    on_tokens=self.on_tokens)
        reason = ""
        if trajectory.status is None:
            try:
                await converse(conversation, self.function, self.config.rollout_function_timeout)
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
        sample = trajectory.sample(self.tokenizer)
        if reason:
            abort(sample, reason)
            log.warning("%s %d failed: %s", self.tag, sample.sample_id, reason)
        else:
            await self.rewards(sample)
        group.growing.remove(trajectory)
        group.samples[sample.sample_id] = sample


def sampling_params(config: RolloutConfig, tokenizer, seed: int | None = None, greedy: bool = False) -> SamplingParams:
    stops = tuple(dict.fromkeys(t for t in (*config.rollout_stop_token_ids, tokenizer.eos_token_id) if t is not None))
    if greedy:
        return SamplingParams(config.rollout_max_response_len, temperature=0.0, stop_token_ids=stops)
    return SamplingParams(config.rollout_max_response_len, config.rollout_temperature, config.rollout_top_p, config.rollout_top_k, stops,
                          seed=seed)
