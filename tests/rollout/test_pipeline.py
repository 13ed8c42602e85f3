import asyncio
import pickle
import threading

import pytest

from benchmarks.simulation import SimulatedEngine
from megatron_grpo.rollout.pipeline import Rollouts

from .simulated import lengths, make_sampler, same


@pytest.fixture
def loop():
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()


def make(loop, ahead, seconds_per_token=0.0005, step=1, **options):
    engine = SimulatedEngine(lengths(2, 20), seconds_per_token=seconds_per_token)
    options = dict(rollout_batch_size=2, n_samples_per_prompt=2) | options
    sampler = make_sampler(engine, rollout_ahead=ahead, version_step=step, **options)
    return Rollouts(loop, sampler, timeout_s=30)


def in_loop(rollouts, coroutine):
    return asyncio.run_coroutine_threadsafe(coroutine, rollouts.loop).result(30)


async def until(condition):
    while not condition():
        await asyncio.sleep(0.002)


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_rollouts_come_in_order_and_at_most_n_updates_old(loop, ahead):
    rollouts = make(loop, ahead)
    for version in range(5):
        with rollouts.paused():
            rollouts.sampler.engine.version = version
        rollout = rollouts.next(version)
        assert [g.group_id for g in rollout.groups] == [2 * version, 2 * version + 1]
        ages = {version - int(v) for s in rollout.samples for v, _, _ in s.weight_versions}
        assert ages == {min(version, ahead)}
        assert rollout.off_policy_tokens == (sum(s.response_length for s in rollout.samples) if ages != {0} else 0)
        in_loop(rollouts, until(lambda: len(rollouts._ready) == ahead))     # the next ones are generated meanwhile, and no more
        assert rollouts.sampler.tickets.drawn() == 2 * (version + ahead + 1)
    rollouts.close()


def test_a_pause_holds_back_also_a_step_that_begins_in_it(loop):
    rollouts = make(loop, 1)
    rollouts.next(0)
    with rollouts.paused():
        seen = len(rollouts.sampler.engine.requests)
        in_loop(rollouts, asyncio.sleep(0.1))
        assert not rollouts.sampler.engine.aborts and len(rollouts.sampler.engine.requests) == seen
    assert [g.group_id for g in rollouts.next(1).groups] == [2, 3]
    rollouts.close()


def test_no_rollout_is_generated_for_the_end_of_the_run(loop):
    rollouts = make(loop, 2)
    rollouts.end = 3
    for version in range(3):
        assert len(rollouts.next(version).groups) == 2
    assert rollouts.sampler.tickets.drawn() == 6 and not rollouts._pending
    rollouts.close()


def test_versions_are_asked_for_one_after_the_other(loop):
    rollouts = make(loop, 1, step=4)
    rollouts.next(8)
    with pytest.raises(ValueError, match="the rollout of weights version 12 comes next, not that of 9"):
        rollouts.next(9)
    rollouts.next(12)
    rollouts.close()


def test_a_step_that_takes_too_long_raises_and_what_fails_ahead_raises_when_asked_for(loop):
    slow = make(loop, 0, seconds_per_token=5.0)
    slow.timeout_s = 0.1
    with pytest.raises(TimeoutError, match="over 0.1 s .--control-timeout"):
        slow.next(0)
    slow.timeout_s = 30
    slow.close()

    broken = make(loop, 1)
    broken.next(0)
    broken.next(1)
    broken.sampler.runner.function = "not callable"
    with pytest.raises(Exception, match="fell to infrastructure.*not callable"):
        for version in (2, 3, 4):
            broken.next(version)
    broken.close()


@pytest.mark.parametrize("partial", [False, True])
def test_what_was_ready_is_handed_out_by_a_resumed_run_in_the_same_steps(loop, partial):
    """Positions of several steps are mixed: the first groups that complete are taken, which are those at odd positions."""
    def start(ahead):
        rollouts = make(loop, ahead, seconds_per_token=0.01, over_sampling_batch_size=6, partial_rollout=partial)
        rollouts.sampler.engine.length_of = lambda session, prompt: 2 if int(session.split("-")[1]) // 2 % 2 else 10
        return rollouts

    first = start(2)
    first.next(0)
    in_loop(first, until(lambda: {1, 2} <= first._ready.keys()))
    with first.paused():
        state = pickle.loads(pickle.dumps(first.state_dict()))
    positions = lambda rollout: [g.group_id for g in rollout.groups]
    after = [positions(first.next(v)) for v in (1, 2)]
    first.close()
    assert sorted(sum(after, [])) != sum(after, []), "or nothing is shown"
    second = start(0)
    second.load_state_dict([state])
    assert [positions(second.next(v)) for v in (1, 2)] == after
    second.close()


def test_a_checkpoint_holds_what_is_ready_and_what_is_on_its_way(loop):
    first = make(loop, 2, seconds_per_token=0.002, over_sampling_batch_size=3, partial_rollout=True)
    first.next(0)
    in_loop(first, until(lambda: 1 in first._ready))
    with first.paused():
        state = pickle.loads(pickle.dumps(first.state_dict()))
    after = [first.next(v) for v in (1, 2)]
    first.close()
    second = make(loop, 2, seconds_per_token=0.002, over_sampling_batch_size=3, partial_rollout=True)
    second.sampler.engine.starts = first.sampler.engine.starts
    second.load_state_dict([state])
    resumed = [second.next(v) for v in (1, 2)]
    second.close()
    held = {s.sample_id: s for r in after for s in r.samples}
    both = [s for r in resumed for s in r.samples if s.sample_id in held]
    assert len(both) >= 4 and all(same(s, held[s.sample_id]) for s in both)
    assert [s.sample_id for s in resumed[0].samples] == [s.sample_id for s in after[0].samples]
