"""Several leaders, one store: each generates its share, together they keep exactly the step's groups."""

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from benchmarks.simulation import SimulatedEngine
from megatron_grpo.hooks import FilterOutput, Hooks
from megatron_grpo.rollout.books import Books
from megatron_grpo.rollout.engine import EngineError
from megatron_grpo.rollout.group import Group
from megatron_grpo.rollout.pipeline import Rollouts
from megatron_grpo.rollout.tickets import StoreTickets

from .simulated import StubRewards, lengths, make_sampler


@pytest.fixture
def store():
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def test_tickets_are_unique_and_slots_exact_under_contention(store):
    """8 threads with a connection each draw positions and fight for 20 slots, giving every third back."""
    results, errors = [], []

    def leader(number):
        try:
            own = StoreTickets(dist.TCPStore("127.0.0.1", store.port, is_master=False), number, 8)
            own.start_at(100)
            own.open_step(20)
            drawn, taken = [own.draw() for _ in range(10)], 0
            for i in range(30):
                if own.claim():
                    taken += 1
                    if i % 3 == 0:
                        own.release()
                        taken -= 1
            results.append((drawn, taken, own))
        except Exception as error:
            errors.append(error)
    threads = [threading.Thread(target=leader, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not errors
    assert sorted(p for drawn, _, _ in results for p in drawn) == list(range(100, 180))
    last = results[-1][2]
    while last.claim():
        results.append(([], 1, last))
    assert sum(taken for _, taken, _ in results) == 20 and last.full() and last.drawn() == 180
    last.release()
    assert not last.full() and last.claim() and not last.claim()


def test_a_new_step_has_all_its_slots(store):
    tickets = StoreTickets(store, 0, 1)
    for _ in range(4):
        tickets.open_step(2)
        assert [tickets.claim() for _ in range(3)] == [True, True, False]


def test_a_leader_two_steps_behind_still_finds_its_slots():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=2))
    fast, slow = StoreTickets(store, 0, 2, ahead=2), StoreTickets(store, 1, 2, ahead=2)
    slow.open_step(1)
    for _ in range(3):
        fast.open_step(1)
    assert slow.claim() and slow.full()
    for _ in range(10):
        fast.open_step(1)
    assert not store.check(["rollout/slots/0"]) and store.check(["rollout/slots/9"])


def test_states_of_paused_leaders_hold_every_prompt_that_was_drawn(store):
    """While steps are generated ahead and a filter makes every leader draw all the time, also for what is scored in the pause."""
    loop, refused = asyncio.new_event_loop(), set()
    threading.Thread(target=loop.run_forever, daemon=True).start()

    class Slow(StubRewards):
        async def __call__(self, sample):
            await asyncio.sleep(0.1)
            await super().__call__(sample)

    def dull(samples):
        if keep := samples[0].group_id % 8 == 0:
            return FilterOutput(keep)
        refused.add(samples[0].group_id)
        return FilterOutput(False, "dull")
    options = dict(rollout_batch_size=4, n_samples_per_prompt=2, over_sampling_batch_size=6, partial_rollout=True, rollout_ahead=1,
                   dynamic_sampling_max_batches=1000, hooks=Hooks(sampling_filter=dull))
    tickets = [StoreTickets(dist.TCPStore("127.0.0.1", store.port, is_master=False), i, 2, ahead=1) for i in range(2)]
    leaders = [Rollouts(loop, make_sampler(SimulatedEngine(lengths(2, 9), seconds_per_token=0.001), rewards=Slow(), count=10_000,
                                           tickets=own, **options), timeout_s=60) for own in tickets]
    with ThreadPoolExecutor(2) as pool:
        taken = [g.group_id for r in pool.map(lambda leader: leader.next(0), leaders) for g in r.groups]
    with leaders[0].paused(), leaders[1].paused():
        states = [leaders[0].state_dict()]
        time.sleep(0.3)     # the other leader draws no further prompt meanwhile
        states.append(leaders[1].state_dict())
    for leader in leaders:
        leader.close()
    loop.call_soon_threadsafe(loop.stop)
    held = [g.position for s in states for g in s["groups"]] + [p for s in states for p, _ in s["returned"]]
    assert sorted([*taken, *held, *refused - set(held)]) == list(range(max(s["position"] for s in states)))


@pytest.mark.parametrize("options, again", [(dict(n_samples_per_prompt=3), True), (dict(return_routes=True), True), (dict(), False)])
def test_carried_groups_that_do_not_fit_begin_again(options, again):
    common = dict(rollout_batch_size=2, over_sampling_batch_size=5, partial_rollout=True)
    first = make_sampler(n_samples_per_prompt=2, **common)
    first.waiting = [Group(i, [], samples={2 * i: None}) for i in (4, 2)]
    first.returned = [(3, 1)]
    second = make_sampler(**common, **dict(n_samples_per_prompt=2) | options)
    second.load_state_dict([first.state_dict()])
    assert [g.position for g in second.waiting] == ([] if again else [2, 4])
    assert second.returned == ([(2, 0), (3, 1), (4, 0)] if again else [(3, 1)])


def test_a_leader_that_begins_no_groups_inherits_none(store):
    state = make_sampler(n_samples_per_prompt=2).state_dict() | {"returned": [(i, 0) for i in range(5)]}
    heirs = [make_sampler(rollout_batch_size=2, n_samples_per_prompt=2, tickets=StoreTickets(store, i, 4)) for i in range(4)]
    for heir in heirs:
        heir.load_state_dict([state])
    assert [len(h.returned) for h in heirs] == [0, 3, 0, 2] and [h.width for h in heirs] == [0, 1, 0, 1]


def leaders_case(port, steps, options, die=None):
    """One leader of a job over real time; returns what it kept."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=30))

    class Dying(SimulatedEngine):
        async def generate(self, request):
            if rank == die:
                raise EngineError("server http://b:2 is gone")
            return await super().generate(request)
    engine = Dying(lengths(2, 30), seconds_per_token=0.001 * (1 + rank))
    sampler = make_sampler(engine, tickets=StoreTickets(store, rank, ranks), **options)

    async def run():
        result = []
        for version in range(steps):
            engine.version = version
            rollout = await sampler.rollout(version)
            result.append(([g.group_id for g in rollout.groups], rollout.books))
            dist.barrier()
        held = [g.position for g in (*sampler.running.values(), *sampler.finished)] + [p for p, _ in sampler.returned]
        await sampler.close()
        return result, held, sampler.state_dict()
    try:
        return asyncio.run(run())
    except EngineError as error:
        return str(error)


@pytest.mark.parametrize("ranks, options", [
    (2, dict(rollout_batch_size=5)),
    (3, dict(rollout_batch_size=7, over_sampling_batch_size=11)),
    (4, dict(rollout_batch_size=6, over_sampling_batch_size=12, partial_rollout=True, max_weight_staleness=2))])
def test_leaders_keep_the_steps_groups_together_and_lose_none(pool, store, ranks, options):
    results = pool.run(leaders_case, store.port, 3, dict(options, n_samples_per_prompt=2), ranks=ranks)
    trained = []
    for step in range(3):
        kept = [ids for result, _, _ in results for ids in result[step][0]]
        assert len(kept) == options["rollout_batch_size"] == len(set(kept))
        trained += kept
        sum((result[step][1] for result, _, _ in results), Books()).check()
    held = [p for _, held, _ in results for p in held]
    assert sorted(trained + held) == list(range(results[0][2]["position"]))
    if "over_sampling_batch_size" not in options:
        assert [len(result[0][0]) for result, _, _ in results] == [2, 3]

    states = [state for _, _, state in results]     # a run with another number of leaders takes it all over
    heirs = [make_sampler(tickets=StoreTickets(store, i, 2, prefix="heirs"), **options) for i in range(2)]
    for heir in heirs:
        heir.load_state_dict(states)
    inherited = [g.position for h in heirs for g in (*h.finished, *h.waiting)] + [p for h in heirs for p, _ in h.returned]
    assert sorted(inherited) == sorted([g.position for s in states for g in s["groups"]] + [p for s in states for p, _ in s["returned"]])
    assert heirs[0].tickets.draw() == states[0]["position"]


def test_one_leaders_dead_engine_ends_the_step_on_all(pool, store):
    results = pool.run(leaders_case, store.port, 1, dict(rollout_batch_size=12, n_samples_per_prompt=2), die=1, ranks=3)
    assert results[1].startswith("4 groups of this step fell to infrastructure; the last failure: EngineError: server http://b:2 is gone")
    for other in (results[0], results[2]):
        assert other.startswith("data-parallel rank 1: EngineError: 4 groups of this step fell")
