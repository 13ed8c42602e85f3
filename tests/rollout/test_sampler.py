import asyncio
import copy
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.simulation import SimulatedEngine, hash_of, run_virtual
from megatron_grpo.batch import Sample, Status
from megatron_grpo.hooks import FilterOutput, Hooks
from megatron_grpo.rollout.engine import EngineError
from megatron_grpo.rollout.filters import any_reward_nonzero_std, reward_nonzero_std
from megatron_grpo.rollout.gate import Gate
from megatron_grpo.settings import ConfigError

from .simulated import EOS, Faulty, StubRewards, Tokenizer, lengths, make_sampler, same


def steps(sampler, count, first=0):
    async def run():
        result = []
        for version in range(first, first + count):
            sampler.engine.version = version
            result.append(await sampler.rollout(version))
        return result
    return run_virtual(run())


def tally(account):
    return account.samples, account.tokens


def test_a_step_holds_the_groups_asked_for_in_order():
    sampler = make_sampler(rollout_batch_size=4, n_samples_per_prompt=3, rollout_max_response_len=25)
    first, second = steps(sampler, 2)
    assert [g.group_id for g in first.groups] == [0, 1, 2, 3] and [g.group_id for g in second.groups] == [4, 5, 6, 7]
    assert [s.sample_id for s in first.samples] == list(range(12))
    for sample in first.samples:
        wanted = lengths()(f"sample-{sample.sample_id}", [])
        assert sample.status is (Status.COMPLETED if wanted <= 25 else Status.TRUNCATED)
        assert sample.response_length == min(wanted, 25) and (sample.tokens[-1] == EOS) == (wanted <= 25)
        assert sample.loss_mask.all() and sample.weight_versions == [("0", 0, sample.response_length)]
        assert sample.prompt == f"prompt {sampler.order[sample.group_id]}" and sample.label == sampler.order[sample.group_id]
        assert sample.response == Tokenizer().decode(sample.tokens[sample.prompt_length:], True)
        assert sample.reward == sample.sample_id % 2
    assert tally(first.books.kept) == tally(first.books.generated) == (12, sum(s.response_length for s in first.samples))


def test_the_order_of_answers_does_not_change_the_step():
    def run(length_of_time):
        engine = SimulatedEngine(lengths())
        decode = engine.generate

        async def delayed(request):
            await asyncio.sleep(length_of_time(request.session))
            return await decode(request)
        engine.generate = delayed
        return steps(make_sampler(engine, rollout_batch_size=3, n_samples_per_prompt=2), 1)[0].samples
    fast, slow = run(lambda s: 0), run(lambda s: hash_of(s) % 97)
    assert all(same(a, b) for a, b in zip(fast, slow, strict=True))


def straggler(session, prompt):
    """Conversation 0 is twenty times as long as the others."""
    return 200 if session == "sample-0" else 10


def test_first_completed_groups_are_accepted_and_the_straggler_comes_again():
    sampler = make_sampler(SimulatedEngine(straggler), rollout_batch_size=2, n_samples_per_prompt=2, over_sampling_batch_size=3)
    first, second = steps(sampler, 2)
    assert [g.group_id for g in first.groups] == [1, 2]
    assert first.seconds == pytest.approx(10 * 0.02)
    assert first.books.discarded.samples == 2 and 18 <= first.books.discarded.tokens <= 20
    assert first.books.wasted_tokens == first.books.discarded.tokens and not first.books.carried_out.samples
    assert 0 in [p for p, _ in sampler.returned] and [g.group_id for g in second.groups] == [3, 4]


def test_a_partial_rollout_keeps_the_stragglers_tokens():
    sampler = make_sampler(SimulatedEngine(straggler, route_shape=(2, 2, 8)), return_routes=True, rollout_batch_size=2,
                           n_samples_per_prompt=2, over_sampling_batch_size=3, partial_rollout=True)
    rollouts = steps(sampler, 30)
    assert sum(r.books.wasted_tokens for r in rollouts) == 0
    number, group = next((i, g) for i, r in enumerate(rollouts) for g in r.groups if g.group_id == 0)
    sample, sibling = group.samples
    assert number > 10 and sample.response_length == 200 and sibling.response_length == 10
    assert [span[1:] for span in sample.weight_versions] == [(a, b) for a, b in zip(
        [0, *(s[2] for s in sample.weight_versions[:-1])], (s[2] for s in sample.weight_versions), strict=True)]
    assert sample.weight_versions[-1][2] == 200 and len(sample.weight_versions) > 10
    whole = steps(make_sampler(SimulatedEngine(straggler, route_shape=(2, 2, 8)), return_routes=True, rollout_batch_size=1,
                               n_samples_per_prompt=2), 1)[0].samples[0]
    for name in ("tokens", "rollout_logp", "routes"):
        assert (getattr(sample, name) == getattr(whole, name)).all()
    assert len(sample.routes) == len(sample.tokens) - 1
    for before, after in zip(rollouts, rollouts[1:], strict=False):
        assert tally(before.books.carried_out) == tally(after.books.carried_in)


def test_off_policy_tokens_are_counted_and_masked():
    options = dict(rollout_batch_size=2, n_samples_per_prompt=2, over_sampling_batch_size=3, partial_rollout=True)
    plain = steps(make_sampler(SimulatedEngine(straggler), **options), 30)
    masked = steps(make_sampler(SimulatedEngine(straggler), mask_offpolicy_in_partial_rollout=True, **options), 30)
    for version, (a, b) in enumerate(zip(plain, masked, strict=True)):
        old = 0
        for x, y in zip(a.samples, b.samples, strict=True):
            stale = sum(end - start for v, start, end in x.weight_versions if int(v) < version)
            old += stale
            assert x.loss_mask.all() and (~y.loss_mask).sum() == stale and not y.rollout_logp[~y.loss_mask].any()
        assert a.off_policy_tokens == b.off_policy_tokens == old
    assert sum(r.off_policy_tokens for r in plain) > 100


@pytest.mark.parametrize("limit", [1, 3])
def test_a_step_waits_for_what_would_grow_too_stale(limit):
    sampler = make_sampler(SimulatedEngine(straggler), rollout_batch_size=2, n_samples_per_prompt=2, over_sampling_batch_size=3,
                           partial_rollout=True, max_weight_staleness=limit)
    rollouts = steps(sampler, 8)
    for version, rollout in enumerate(rollouts):
        assert len(rollout.groups) == 2
        assert all(version - int(v) <= limit for s in rollout.samples for v, _, _ in s.weight_versions)
    assert [i for i, r in enumerate(rollouts) for g in r.groups if g.group_id == 0] == [limit]
    assert sum(r.books.wasted_tokens for r in rollouts) == 0


def test_what_is_too_stale_already_begins_again():
    sampler = make_sampler(SimulatedEngine(straggler), rollout_batch_size=2, n_samples_per_prompt=2, over_sampling_batch_size=3,
                           partial_rollout=True, max_weight_staleness=1)

    async def run():
        await sampler.rollout(0)
        sampler.engine.version = 5
        return await sampler.rollout(5)
    late = run_virtual(run())
    assert late.books.reasons["too stale"] == 2 and late.books.discarded.tokens > 0
    assert all(v == "5" for s in late.samples for v, _, _ in s.weight_versions)


def test_versions_that_are_no_numbers_are_refused_where_age_matters():
    sampler = make_sampler(SimulatedEngine(straggler), rollout_batch_size=1, over_sampling_batch_size=2, partial_rollout=True)
    sampler.engine.version = "default"
    with pytest.raises(EngineError, match="'default', not a number.*--weight-version 0"):
        run_virtual(sampler.rollout(1))


def test_dynamic_sampling_replaces_groups_without_signal():
    rewards = StubRewards(lambda s: float(s.group_id % 3 == 0 and s.sample_id % 2))
    sampler = make_sampler(rewards=rewards, hooks=Hooks(sampling_filter=lambda samples: reward_nonzero_std(None, samples)),
                           rollout_batch_size=4, n_samples_per_prompt=2)
    first, second = steps(sampler, 2)
    assert [g.group_id for g in first.groups] == [0, 3, 6, 9]
    assert all(g.group_id % 3 == 0 for g in second.groups) and len(second.groups) == 4
    assert first.books.filtered.samples == first.books.reasons["every reward is 0"] > 0
    assert first.books.generated.samples == first.books.kept.samples + first.books.filtered.samples + first.books.discarded.samples


def test_a_filter_that_refuses_everything_ends_the_step_with_the_reason():
    sampler = make_sampler(rewards=StubRewards(lambda s: 1.0),
                           hooks=Hooks(sampling_filter=lambda samples: reward_nonzero_std(None, samples)),
                           rollout_batch_size=2, n_samples_per_prompt=2, dynamic_sampling_max_batches=3)
    with pytest.raises(ConfigError, match=r"kept 0 of 2 groups after beginning 6 \(samples lost: every reward is 1: 12\)"):
        steps(sampler, 1)


def test_spare_groups_fill_a_step_that_would_fail():
    def verdict(samples):
        return FilterOutput(keep=False, reason="dull", keep_when_insufficient=samples[0].group_id % 2 == 0)
    sampler = make_sampler(hooks=Hooks(sampling_filter=verdict), rollout_batch_size=2, n_samples_per_prompt=2,
                           dynamic_sampling_max_batches=3)
    rollout, = steps(sampler, 1)
    assert len(rollout.groups) == 2 and all(g.group_id % 2 == 0 for g in rollout.groups)
    assert tally(rollout.books.filtered)[0] == 8 and rollout.books.reasons == {"dull": 6, "spare": 2}


def test_filters_look_at_raw_rewards_whole_or_by_component():
    def group(*rewards):
        return [Sample(i, 0, np.zeros(1, np.int64), 1, np.zeros(0, bool), np.zeros(0, np.float32), rewards=r, reward=sum(r.values()))
                for i, r in enumerate(rewards)]
    opposed = group({"a": 0.0, "b": 1.0}, {"a": 1.0, "b": 0.0})
    assert not reward_nonzero_std(None, opposed).keep and any_reward_nonzero_std(None, opposed).keep
    flat = group({"a": 1.0, "b": 0.5}, {"a": 1.0, "b": 0.5})
    assert reward_nonzero_std(None, flat).reason == "every reward is 1.5"
    assert any_reward_nonzero_std(None, flat).reason == "every a is 1, every b is 0.5"
    assert not reward_nonzero_std(None, group({"a": 0.1 + 0.2}, {"a": 0.3})).keep


def test_a_failed_verifier_costs_its_sample_and_never_scores_zero():
    sampler = make_sampler(rewards=StubRewards(lambda s: None if s.sample_id == 5 else 1.0), rollout_batch_size=3, n_samples_per_prompt=4)
    rollout, = steps(sampler, 1)
    assert [len(g.samples) for g in rollout.groups] == [4, 3, 4]
    assert all(s.status is not Status.ABORTED and s.reward == 1.0 for s in rollout.samples)
    assert rollout.books.failed.samples == 1 and rollout.books.reasons == {"reward": 1}


def test_a_fallen_group_is_replaced_and_tried_again_once():
    tries = []

    def reward(sample):
        if sample.group_id == 1:
            tries.append(sample.sample_id)
            return None
        return 1.0
    sampler = make_sampler(rewards=StubRewards(reward), rollout_batch_size=3, n_samples_per_prompt=2)
    rollout, after = steps(sampler, 2)
    assert [g.group_id for g in rollout.groups + after.groups] == [0, 2, 3, 4, 5, 6]
    assert sorted(tries) == [2, 2, 3, 3] and not sampler.returned


def test_a_dead_engine_ends_the_step_at_once():
    class Dead(SimulatedEngine):
        async def generate(self, request):
            await asyncio.sleep(1.0)
            raise EngineError("server http://a:1 does not answer")
    sampler = make_sampler(Dead(lengths()), rollout_batch_size=8, n_samples_per_prompt=2)

    async def run():
        with pytest.raises(EngineError, match="8 groups of this step fell to infrastructure.*http://a:1 does not answer"):
            await sampler.rollout()
        return asyncio.get_running_loop().time()
    assert run_virtual(run()) < 3


def test_a_lost_sample_does_not_lose_its_group():
    class Flaky(SimulatedEngine):
        async def generate(self, request):
            if request.session == "sample-6":
                raise EngineError("lost")
            return await super().generate(request)
    rollout, = steps(make_sampler(Flaky(lengths()), rollout_batch_size=4, n_samples_per_prompt=3), 1)
    assert [len(g.samples) for g in rollout.groups] == [3, 3, 2, 3]


def test_a_fallen_group_keeps_the_sample_that_was_good():
    """Of two samples one is lost: only that one is sampled again."""
    class Flaky(SimulatedEngine):
        async def generate(self, request):
            lost = request.session == "sample-3" and "sample-3" not in self.seen
            self.seen.append(request.session)
            if lost:
                raise EngineError("lost")
            return await super().generate(request)
    engine = Flaky(lengths())
    engine.seen = []
    rollout, = steps(make_sampler(engine, rollout_batch_size=3, n_samples_per_prompt=2), 1)
    assert [g.group_id for g in rollout.groups] == [0, 1, 2] and [len(g.samples) for g in rollout.groups] == [2, 2, 2]
    assert {s: engine.seen.count(s) for s in set(engine.seen)} == {f"sample-{i}": 1 + (i == 3) for i in range(6)}
    assert rollout.books.failed.samples == 1 and rollout.books.generated.samples == 7


@pytest.mark.parametrize("before", [0, 2, 5, 13])
def test_a_step_that_failed_loses_no_sample_that_was_good(before):
    """An engine that turns bad ends the step; resumed at a good one, what had been answered is used and not asked for again."""
    class Turning(SimulatedEngine):
        good, answered, asked = 10**6, [], []

        async def generate(self, request):
            self.asked.append(request.session)
            generation = await super().generate(request)
            if len(self.answered) >= self.good:
                raise EngineError("routes of a damaged answer")
            self.answered.append(request.session)
            return generation
    options = dict(rollout_batch_size=6, n_samples_per_prompt=4)
    sampler = make_sampler(Turning(lengths()), **options)
    sampler.engine.good, sampler.engine.answered, sampler.engine.asked = before, [], []

    async def fails():
        with pytest.raises(EngineError, match="6 groups of this step fell.*routes of a damaged answer"):
            await sampler.rollout(0)
        return sampler.state_dict()
    state = run_virtual(fails())
    assert all(s.status is not Status.ABORTED for g in state["groups"] for s in g.samples.values())     # those are sampled again
    resumed = make_sampler(Turning(lengths()), **options)
    resumed.engine.answered, resumed.engine.asked = [], []
    resumed.load_state_dict([copy.deepcopy(state)])
    rollout, = steps(resumed, 1)
    good = set(sampler.engine.answered)
    assert len(good) == before and not good & set(resumed.engine.asked)
    assert len(rollout.groups) == 6 and good <= {f"sample-{s.sample_id}" for s in rollout.samples}


def test_an_abort_nobody_asked_for_is_continued():
    """A weight update that aborts: what was sampled stays, the rest comes from the new weights."""
    sampler = make_sampler(SimulatedEngine(lengths(30, 40), route_shape=(1, 2, 8)), return_routes=True, rollout_batch_size=2,
                           n_samples_per_prompt=2)

    async def run():
        rollout = asyncio.ensure_future(sampler.rollout())
        await asyncio.sleep(0.2)
        sampler.engine.version = 1
        await sampler.engine.abort()
        return await rollout
    samples = run_virtual(run()).samples
    assert all([v for v, _, _ in s.weight_versions] == ["0", "1"] and len(s.routes) == len(s.tokens) - 1 for s in samples)


def test_a_pause_holds_everything_back():
    sampler = make_sampler(SimulatedEngine(lengths(30, 40)), rollout_batch_size=2, n_samples_per_prompt=2)

    async def run():
        rollout = asyncio.ensure_future(sampler.rollout())
        await asyncio.sleep(0.2)
        await sampler.pause()
        seen = len(sampler.engine.requests)
        await asyncio.sleep(100)
        assert not sampler.engine.aborts and len(sampler.engine.requests) == seen
        sampler.resume()
        return await rollout
    assert len(run_virtual(run()).groups) == 2


def test_a_gate_that_opens_for_a_moment_lets_nothing_pass():
    async def run():
        gate = Gate(SimulatedEngine(lengths()), "a", "b")
        waiting = asyncio.ensure_future(gate.wait())
        await asyncio.sleep(1)
        gate.open("a")
        gate.open("b")
        await gate.close("b")
        await asyncio.sleep(1)
        assert not waiting.done()
        gate.open("b")
        await waiting
    run_virtual(run())


def test_the_engine_must_return_the_support_that_was_asked_for():
    class Old(SimulatedEngine):
        async def generate(self, request):
            generation = await super().generate(request)
            generation.sampling_mask = None
            return generation
    options = dict(use_rollout_sampling_mask=True, rollout_top_k=8, rollout_batch_size=2, n_samples_per_prompt=2)
    rollout, = steps(make_sampler(**options), 1)
    assert all([m.tolist() for m in s.sampling_mask] == [[t] for t in s.tokens[s.prompt_length:]] for s in rollout.samples)
    old = make_sampler(Old(lengths()), **options)
    with pytest.raises(EngineError, match="no sampling mask.*--use-rollout-sampling-mask needs SGLang 0.5.16"):
        steps(old, 1)
    assert len(old.engine.requests) == 1


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_the_books_balance_whatever_happens(data):
    kinds = st.sampled_from(["", "", "", "refused", "reset", "no routes", "too long", "empty abort", "reward"])
    faults = data.draw(st.lists(kinds, max_size=60))
    partial, stale = data.draw(st.booleans()), data.draw(st.sampled_from([None, 1, 2]))
    batch, extra = data.draw(st.integers(1, 4)), data.draw(st.integers(0, 4))
    filtered = data.draw(st.integers(2, 5))
    broken = {i for i, f in enumerate(faults) if f == "reward"}
    engine_faults = [f for f in faults if f != "reward"]
    sampler = make_sampler(
        Faulty(lambda: engine_faults.pop() if engine_faults else "", lengths(2, 30), route_shape=(1, 1, 4)), return_routes=True,
        rewards=StubRewards(lambda s: None if s.sample_id in broken else float(s.group_id % filtered and s.sample_id % 2)),
        hooks=Hooks(sampling_filter=lambda samples: reward_nonzero_std(None, samples)), rollout_batch_size=batch, n_samples_per_prompt=2,
        over_sampling_batch_size=batch + extra, partial_rollout=partial, max_weight_staleness=stale, dynamic_sampling_max_batches=50)
    seen: set = set()

    async def run():
        before = 0, 0
        for version in range(4):
            sampler.engine.version = version
            try:
                rollout = await sampler.rollout(version)        # checks its books itself
            except EngineError as error:
                assert "fell to infrastructure" in str(error)
                return
            assert len(rollout.groups) == batch and not sampler.engine.aborts
            assert tally(rollout.books.carried_in) == before
            before = tally(rollout.books.carried_out)
            assert tally(rollout.books.kept) == (len(rollout.samples), sum(int(s.loss_mask.sum()) for s in rollout.samples))
            for sample in rollout.samples:
                assert sample.sample_id not in seen and sample.status is not Status.ABORTED and len(sample.routes) == len(sample.tokens) - 1
                assert sample.response_length == lengths(2, 30)(f"sample-{sample.sample_id}", [])
                seen.add(sample.sample_id)
    run_virtual(run())


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 4), st.integers(0, 4), st.booleans(), st.integers(1, 5))
def test_every_prompt_is_seen_exactly_once_an_epoch(batch, extra, partial, count):
    """Whatever is aborted, filtered never: over an epoch each prompt is trained once, in flight or still to come."""
    sampler = make_sampler(count=20, rollout_batch_size=batch, n_samples_per_prompt=2, over_sampling_batch_size=batch + extra,
                           partial_rollout=partial)
    rollouts = steps(sampler, count)
    trained = [g.group_id for r in rollouts for g in r.groups]
    held = [g.position for g in (*sampler.running.values(), *sampler.finished)] + [p for p, _ in sampler.returned]
    assert sorted(trained + held) == list(range(sampler.tickets.drawn()))


@pytest.mark.parametrize("partial", [False, True])
def test_a_resumed_run_is_bitwise_the_run_that_never_stopped(partial):
    def fresh():
        return make_sampler(SimulatedEngine(lengths(), route_shape=(2, 2, 8)), return_routes=True, rollout_batch_size=3,
                            n_samples_per_prompt=2, over_sampling_batch_size=6, partial_rollout=partial)
    whole = fresh()
    expected = steps(whole, 6)
    first = fresh()
    steps(first, 3)
    state = pickle.loads(pickle.dumps(first.state_dict()))
    assert state["groups"] or not partial
    second = fresh()
    second.engine.starts = first.engine.starts
    second.load_state_dict([state])
    resumed = steps(second, 3, first=3)
    for a, b in zip(expected[3:], resumed, strict=True):
        assert [s.sample_id for s in a.samples] == [s.sample_id for s in b.samples]
        assert all(same(x, y) for x, y in zip(a.samples, b.samples, strict=True))
        assert a.books == b.books


def test_a_state_of_other_prompts_is_refused():
    state = make_sampler(count=10).state_dict()
    with pytest.raises(ConfigError, match="drew from prompts 10, this run has 1000.*--prompt-data"):
        make_sampler().load_state_dict([state])
    with pytest.raises(ConfigError, match="drew from shuffle False, this run has True.*--rollout-shuffle"):
        make_sampler(count=10).load_state_dict([state | {"shuffle": False}])
