"""Several leaders, one or two steps ahead of a trainer that updates the weights in mid-rollout, with random faults: on virtual time."""

import asyncio
import random
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.simulation import run_virtual
from megatron_grpo.hooks import FilterOutput, Hooks
from megatron_grpo.rollout.engine import EngineError
from megatron_grpo.rollout.tickets import StoreTickets

from .simulated import Faulty, StubRewards, lengths, make_sampler

STEPS, LENGTHS = 5, lengths(2, 60)


class Store(dict):
    """What StoreTickets needs of a TCPStore; waiting for a key that is not there is an error."""

    def add(self, key, by):
        self[key] = self.get_number(key) + by
        return self[key]

    def get_number(self, key):
        return dict.get(self, key, 0)

    def compare_set(self, key, expected, wanted):
        if dict.get(self, key, "") == expected:
            self[key] = wanted
        return self[key].encode() if key in self else expected.encode()

    def get(self, key):
        return self[key].encode()

    def check(self, keys):
        return all(key in self for key in keys)

    def delete_key(self, key):
        return self.pop(key, None) is not None


class SlowToBegin(Faulty):
    """A share of its answers is an error before or after some tokens, or has no routes."""

    def __init__(self, rng, faults, **options):
        draw = lambda: rng.choice(["refused", "reset", "no routes"]) if rng.random() < faults else ""
        super().__init__(draw, LENGTHS, route_shape=(1, 1, 4), **options)
        self.rng = rng

    async def generate(self, request):
        await asyncio.sleep(self.rng.random() / 10)
        return await super().generate(request)


@dataclass
class Job:
    """A run of `STEPS` steps; `rollouts[step]` are those of the leaders."""

    rng: random.Random
    samplers: list
    ahead: int
    step: int

    async def run(self):
        self.rollouts = [[None] * len(self.samplers) for _ in range(STEPS)]
        self.trained = [asyncio.Event() for _ in range(STEPS)]
        async with asyncio.timeout(10_000), asyncio.TaskGroup() as tasks:
            for number in range(len(self.samplers)):
                tasks.create_task(self.lead(number))
            tasks.create_task(self.train())

    async def lead(self, number):
        carried = None
        for step in range(STEPS):
            if step > self.ahead:
                await self.trained[step - self.ahead - 1].wait()
            rollout = self.rollouts[step][number] = await self.samplers[number].rollout(step * self.step)      # checks its books itself
            assert carried in (None, rollout.books.carried_in)
            carried = rollout.books.carried_out

    async def train(self):
        for step in range(STEPS):
            while not all(self.rollouts[step]):
                await asyncio.sleep(0.05)
            await asyncio.sleep(self.rng.random() * 2)
            await asyncio.gather(*(sampler.pause() for sampler in self.samplers))
            for sampler in self.samplers:
                sampler.engine.version = (step + 1) * self.step
            await asyncio.sleep(0.1)
            assert not any(sampler.engine.aborts for sampler in self.samplers), "a request is at the engine in a pause"
            for sampler in self.samplers:
                sampler.resume()
            self.trained[step].set()


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_nothing_lost_nothing_twice_nothing_stale_and_no_hang(data):
    draw = lambda *values: data.draw(st.sampled_from(values))
    rng, leaders, batch, extra = random.Random(data.draw(st.integers(0, 2**32))), draw(1, 2, 3, 5), draw(1, 2, 4, 9), draw(0, 1, 5, 9)
    partial, ahead, step, n = draw(True, False), draw(0, 1, 2), draw(1, 2), draw(1, 2, 3)
    limit, faults = draw(None, ahead + 1, ahead + 2), draw(0.0, 0.03)
    refused, store = set(), Store()

    class Slow(StubRewards):
        async def __call__(self, sample):
            await asyncio.sleep(rng.random() / 2)
            await super().__call__(sample)

    def keep(samples):
        verdict = FilterOutput(samples[0].group_id % 7 > 1, "seven")
        if not verdict.keep:
            refused.add(samples[0].group_id)
        return verdict
    samplers = [make_sampler(
        SlowToBegin(rng, faults, seconds_per_token=0.01 * (1 + i), slots=draw(4, 1000)), rewards=Slow(), hooks=Hooks(sampling_filter=keep), count=37,
        return_routes=True, tickets=StoreTickets(store, i, leaders, ahead), rollout_batch_size=batch, n_samples_per_prompt=n,
        over_sampling_batch_size=batch + extra, partial_rollout=partial, max_weight_staleness=limit, rollout_ahead=ahead, version_step=step,
        dynamic_sampling_max_batches=100) for i in range(leaders)]
    job = Job(rng, samplers, ahead, step)
    try:
        run_virtual(job.run())
    except ExceptionGroup as errors:
        assert faults and all(isinstance(e, EngineError) and "fell to infrastructure" in str(e) for e in errors.exceptions), errors.exceptions
        return
    trained = [group for rollouts in job.rollouts for rollout in rollouts for group in rollout.groups]
    for number, rollouts in enumerate(job.rollouts):
        assert sum(len(rollout.groups) for rollout in rollouts) == batch
        for sample in (sample for rollout in rollouts for sample in rollout.samples):
            ages = {number - int(version) // step for version, _, _ in sample.weight_versions}
            assert max(ages) <= (ahead if not partial else limit or STEPS) and min(ages) >= 0
            assert sample.response_length == LENGTHS(f"sample-{sample.sample_id}", []) and len(sample.routes) == len(sample.tokens) - 1
    held = [g.position for s in samplers for g in (*s.finished, *s.waiting, *s.running.values())] + [p for s in samplers for p, _ in s.returned]
    seen = [*(group.group_id for group in trained), *held]
    assert len(seen) == len(set(seen))
    lost = set(range(samplers[0].tickets.drawn())) - set(seen) - refused
    assert not lost or faults       # a prompt whose group fell twice is dropped
