"""Prompts in, groups of scored samples out."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from ..batch import Sample, SampleGroup, Status
from ..rewards.reward import Rewards, abort
from .config import RolloutConfig
from .engine import Engine, EngineError, GenerationRequest, SamplingParams
from .prompts import Prompt, PromptOrder, Prompts
from .trajectory import Trajectory


@dataclass
class Rollout:
    """What one step trains on, in the order of group_id and sample_id."""

    groups: list[SampleGroup]


class Sampler:
    """Generates the groups of a step.

    Args:
        engine: any Engine.
        prompts, order: what is drawn, and in which order.
        rewards: scores the samples of a finished group.
        tokenizer: decodes responses; its eos token ends one.
        config: batch sizes, lengths and sampling.
        return_routes: ask the engine for routed experts (R3).
        on_group: called with (groups kept, groups wanted) whenever one is kept.
    """

    def __init__(self, engine: Engine, prompts: Prompts, order: PromptOrder, rewards: Rewards, tokenizer, config: RolloutConfig, *,
                 return_routes: bool = False, on_group: Callable[[int, int], None] = lambda kept, wanted: None):
        self.engine, self.prompts, self.order, self.rewards, self.tokenizer = engine, prompts, order, rewards, tokenizer
        self.config, self.return_routes, self.on_group = config, return_routes, on_group
        self.position = 0

    async def rollout(self) -> Rollout:
        """The next --rollout-batch-size groups."""
        wanted = self.config.rollout_batch_size
        groups, failures, running = [], [], set()
        while len(groups) < wanted:
            while len(running) + len(groups) < wanted:
                running.add(asyncio.ensure_future(self._group(self.position)))
                self.position += 1
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                group, aborted = task.result()
                if len(group.samples) > (self.config.n_samples_per_prompt > 1):
                    groups.append(group)
                    self.on_group(len(groups), wanted)
                failures += aborted
            if len(failures) >= wanted * self.config.n_samples_per_prompt:
                await _cancel(running)
                raise EngineError(f"{len(failures)} samples of this step failed; the last: {failures[-1].metadata['aborted']}")
        return Rollout(sorted(groups, key=lambda g: g.group_id))

    async def _group(self, position: int) -> tuple[SampleGroup, list[Sample]]:
        """The samples of one prompt that finished, and those that failed."""
        n, prompt = self.config.n_samples_per_prompt, self.prompts[self.order[position]]
        trajectories = [Trajectory(position * n + i, position, prompt, self.config.rollout_max_response_len) for i in range(n)]
        params = sampling_params(self.config, self.tokenizer)
        samples = await asyncio.gather(*(complete(self.engine, t, params, self.tokenizer, self.return_routes) for t in trajectories))
        await self.rewards([s for s in samples if s.status is not Status.ABORTED])
        group = SampleGroup(position, [s for s in samples if s.status is not Status.ABORTED])
        return group, [s for s in samples if s.status is Status.ABORTED]


def sampling_params(config: RolloutConfig, tokenizer, greedy: bool = False, max_new_tokens: int | None = None) -> SamplingParams:
    stops = tuple({*config.rollout_stop_token_ids, tokenizer.eos_token_id} - {None})
    limit = max_new_tokens or config.rollout_max_response_len
    if greedy:
        return SamplingParams(limit, temperature=0.0, stop_token_ids=stops)
    return SamplingParams(limit, config.rollout_temperature, config.rollout_top_p, config.rollout_top_k, stops)


async def complete(engine: Engine, trajectory: Trajectory, params: SamplingParams, tokenizer, return_routes: bool = False,
                   tag: str = "sample") -> Sample:
    """One response to the end; a sample whose engine fails is ABORTED."""
    reason = ""
    try:
        generation = await engine.generate(GenerationRequest(
            f"{tag}-{trajectory.sample_id}", list(trajectory.tokens), params, session=f"{tag}-{trajectory.sample_id}",
            return_routes=return_routes))
        trajectory.extend(generation, return_routes)
        trajectory.turns += 1
        trajectory.status = {"stop": Status.COMPLETED, "length": Status.TRUNCATED}.get(generation.finish_reason, Status.ABORTED)
        reason = generation.finish_reason
    except EngineError as error:
        reason = str(error)
    sample = trajectory.sample(tokenizer)
    if sample.status is Status.ABORTED:
        abort(sample, reason)
    return sample


@dataclass
class Evaluation:
    """Greedy answers to held-out prompts. accuracy: share whose reward is at least 1. failed: not counted in it."""

    accuracy: float
    reward: float
    failed: int
    samples: list[Sample]


async def evaluate(engine: Engine, prompts: Prompts, rewards: Rewards, tokenizer, config: RolloutConfig,
                   max_response_len: int | None = None) -> Evaluation:
    """Answer every prompt once, greedily."""
    limit = max_response_len or config.rollout_max_response_len
    params = sampling_params(config, tokenizer, greedy=True, max_new_tokens=limit)

    async def answer(index: int, prompt: Prompt) -> Sample:
        sample = await complete(engine, Trajectory(index, index, prompt, limit), params, tokenizer, tag="eval")
        if sample.status is not Status.ABORTED:
            await rewards([sample])
        return sample

    samples = await asyncio.gather(*(answer(i, prompts[i]) for i in range(len(prompts))))
    scored = [s.reward for s in samples if s.status is not Status.ABORTED]
    if not scored:
        raise EngineError(f"evaluation: all {len(samples)} samples failed; the last: {samples[-1].metadata['aborted']}")
    return Evaluation(sum(r >= 1 for r in scored) / len(scored), sum(scored) / len(scored), len(samples) - len(scored), samples)


async def _cancel(tasks) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
