import asyncio
import contextlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.simulation import SimulatedEngine, run_virtual
from megatron_grpo.batch import Status
from megatron_grpo.hooks import Hooks
from megatron_grpo.rollout.engine import EngineError, SamplingParams
from megatron_grpo.rollout.gate import Gate
from megatron_grpo.rollout.multi_turn import Conversation, converse
from megatron_grpo.rollout.prompts import Prompt
from megatron_grpo.rollout.trajectory import Trajectory

from .simulated import Tokenizer, make_sampler

SHAPE = (3, 2, 8)       # layers, top-k, experts


class Turns(SimulatedEngine):
    """Each turn has the length that `turns` says next; routes tell position and weight version."""

    def __init__(self, turns, **options):
        super().__init__(lambda session, prompt: 1 << 30, route_shape=SHAPE, **options)
        self.turns = list(turns)

    async def _decode(self, request, abort):
        if not request.input_ids or request.routes_start > self.starts.get(request.session, len(request.input_ids)):
            raise AssertionError("rows are asked for from a position that is past the earlier turns")
        begin, wanted = len(request.input_ids), min(self.turns.pop(0), request.params.max_new_tokens)
        self.sampled += wanted
        ids = self.tokens(request.session, begin, begin + wanted)
        routes = self.rows(request.routes_start, begin + wanted - 1, self.version)
        finish = "length" if wanted == request.params.max_new_tokens else "stop"
        return self.answer(request, ids, finish, routes)

    def rows(self, start, end, version):
        rows = self.routes("", start, end)
        rows[:, 0, :] = version
        return rows

    def answer(self, request, ids, finish, routes):
        from megatron_grpo.rollout.engine import Generation
        support = [np.array([t], np.int32) for t in ids] if request.return_sampling_mask else None
        self.starts[request.session] = len(request.input_ids) + len(ids)
        return Generation(request.request_id, ids, -np.arange(1, len(ids) + 1, dtype=np.float32), finish, routes, support,
                          [(str(self.version), 0, len(ids))])


def start(engine, limit=100, prompt=4, **options):
    trajectory = Trajectory(3, 1, Prompt(0, "p", list(range(10, 10 + prompt)), "label", {"k": 1}), limit, want_routes=True, **options)
    return Conversation(trajectory, Gate(engine), SamplingParams(limit, stop_token_ids=(0,)), Tokenizer())


def test_two_turns_with_a_tool_between_by_hand():
    engine = Turns([3, 2])
    conversation = start(engine, want_sampling_mask=True)

    async def play(episode):
        assert (episode.prompt, episode.label, episode.metadata, episode.remaining) == ("p", "label", {"k": 1}, 100)
        first = await episode.generate(stop_token_ids=(5,))
        assert len(first.output_ids) == 3 and first.finish_reason == "stop" and episode.tokens[4:] == first.output_ids
        episode.append([7, 7])
        engine.version = 1
        second = await episode.generate(max_new_tokens=50)
        assert second.output_ids == episode.tokens[9:] and second.weight_versions == [("1", 0, 2)] and second.logp.tolist() == [-1, -2]
        episode.append([8, 8, 8])

    run_virtual(converse(conversation, play, 10.0))
    one, two = engine.requests
    assert one.params.stop_token_ids == (0, 5) and two.params.stop_token_ids == (0,) and two.params.max_new_tokens == 50
    assert one.session == two.session and one.request_id != two.request_id
    # 4 prompt + 3 sampled = 7 tokens give rows 0..5; the next turn is asked from row 6, the boundary token's
    assert (one.routes_start, two.routes_start) == (0, 6) and two.input_ids[7:] == [7, 7]
    sample = conversation.trajectory.sample(Tokenizer())
    assert sample.status is Status.COMPLETED and sample.turns == 2 and sample.prompt_length == 4
    assert sample.loss_mask.tolist() == [True] * 3 + [False] * 2 + [True] * 2      # the trailing tool tokens are cut off
    assert sample.rollout_logp.tolist() == [-1, -2, -3, 0, 0, -1, -2]
    assert sample.weight_versions == [("0", 0, 3), ("1", 5, 7)]
    assert [m.tolist() for m in sample.sampling_mask] == [[t] for t in sample.tokens[4:]]
    assert len(sample.routes) == len(sample.tokens) - 1 == 10
    assert (sample.routes[:6] == engine.rows(0, 6, 0)).all() and (sample.routes[6:] == engine.rows(6, 10, 1)).all()


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5), st.lists(st.tuples(st.integers(1, 6), st.integers(0, 4), st.booleans()), min_size=1, max_size=6))
def test_merged_routes_are_those_of_each_absolute_position(prompt, turns):
    """Row i always comes from the request that was the first to read token i, with that request's weights."""
    engine = Turns([n for n, _, _ in turns])
    conversation = start(engine, prompt=prompt)

    async def play(episode):
        for version, (_, tool, _) in enumerate(turns):
            engine.version = version % 8
            await episode.generate()
            episode.append([9] * tool)
    run_virtual(converse(conversation, play, 10.0))
    sample = conversation.trajectory.sample(Tokenizer())
    expected, held, length = [], 0, prompt
    for version, (n, tool, _) in enumerate(turns):
        expected.append(engine.rows(held, length + n - 1, version % 8))
        held, length = length + n - 1, length + n + tool
    assert (sample.routes == np.concatenate(expected)).all() and len(sample.routes) == len(sample.tokens) - 1
    assert sample.loss_mask.sum() == sum(n for n, _, _ in turns)


def test_the_response_limit_covers_tool_tokens():
    conversation = start(Turns([5, 50, 50]), limit=12)

    async def play(episode):
        await episode.generate()
        episode.append([7] * 4)
        assert episode.remaining == 3
        assert (await episode.generate()).finish_reason == "length"
        assert episode.remaining == 0
        late = await episode.generate()
        assert late.output_ids == [] and late.finish_reason == "length"
    run_virtual(converse(conversation, play, 10.0))
    sample = conversation.trajectory.sample(Tokenizer())
    assert sample.status is Status.TRUNCATED and sample.response_length == 12


def test_tool_output_that_does_not_fit_is_cut_and_marks_the_sample():
    conversation = start(Turns([5]), limit=8)

    async def play(episode):
        await episode.generate()
        episode.append([7] * 9)
        assert episode.remaining == 0
    run_virtual(converse(conversation, play, 10.0))
    assert conversation.trajectory.status is Status.TRUNCATED and conversation.trajectory.sample(Tokenizer()).response_length == 5


def test_a_turn_cut_by_the_function_is_not_a_truncated_sample_if_a_later_one_ends():
    conversation = start(Turns([50, 2]))

    async def play(episode):
        assert (await episode.generate(max_new_tokens=3)).finish_reason == "length"
        await episode.generate()
    run_virtual(converse(conversation, play, 10.0))
    assert conversation.trajectory.status is Status.COMPLETED and conversation.trajectory.turns == 2


@pytest.mark.parametrize("spoil, message", [
    (lambda g: setattr(g, "routes", None), "returned no routes, expected 6 rows from position 0 on"),
    (lambda g: setattr(g, "routes", g.routes[:4]), "returned 4 route rows, expected 6"),
    (lambda g: g.output_ids.extend([1] * 200), "asked for at most 100 tokens and got 203")])
def test_answers_that_do_not_fit_are_refused(spoil, message):
    class Spoiled(Turns):
        async def generate(self, request):
            generation = await super().generate(request)
            spoil(generation)
            return generation
    conversation = start(Spoiled([3]))
    with pytest.raises(EngineError, match=message):
        run_virtual(converse(conversation, None, 10.0))
    assert conversation.trajectory.route_rows == 0 and len(conversation.trajectory.tokens) == 4


def test_an_engine_that_adds_the_last_tokens_row_is_cut_to_size():
    class Full(Turns):
        async def generate(self, request):
            generation = await super().generate(request)
            generation.routes = np.concatenate([generation.routes, generation.routes[-1:] * 0 + 99])
            return generation
    conversation = start(Full([3, 2]))

    async def play(episode):
        await episode.generate()
        await episode.generate()
    run_virtual(converse(conversation, play, 10.0))
    sample = conversation.trajectory.sample(Tokenizer())
    assert len(sample.routes) == len(sample.tokens) - 1 and not (sample.routes == 99).any()


def test_a_function_that_hangs_outside_the_engine_fails_its_sample_only():
    async def play(episode):
        await episode.generate()
        if episode.label == hang:
            await asyncio.sleep(1e6)
    sampler = make_sampler(hooks=Hooks(rollout=play), rollout_batch_size=3, n_samples_per_prompt=2, rollout_function_timeout=60)
    hang = sampler.order[1]

    async def run():
        rollout = await sampler.rollout()
        assert [g.group_id for g in rollout.groups] == [0, 2, 3] and 120 < asyncio.get_running_loop().time() < 130
        assert rollout.books.reasons == {"EngineError": 4}      # it was tried twice
    run_virtual(run())


def test_a_function_that_hangs_after_its_engine_failed_is_given_up():
    class Fails:
        async def generate(self, request):
            raise EngineError("gone")

    async def play(episode):
        with contextlib.suppress(EngineError):
            await episode.generate()
        await asyncio.sleep(1e6)

    async def run():
        with pytest.raises(EngineError, match="spent over 60 s outside the engine"):
            await converse(start(Fails()), play, 60.0)
        assert asyncio.get_running_loop().time() < 70
    run_virtual(run())


def test_a_function_that_raises_fails_its_sample_and_long_generation_is_no_hang():
    async def play(episode):
        await episode.generate()
        if episode.label == sampler.order[0]:
            raise KeyError("tool")
    sampler = make_sampler(SimulatedEngine(lambda s, p: 20, seconds_per_token=100.0), hooks=Hooks(rollout=play), rollout_batch_size=2,
                           n_samples_per_prompt=2, rollout_function_timeout=60)
    rollout = run_virtual(sampler.rollout())
    assert [g.group_id for g in rollout.groups] == [1, 2] and rollout.books.reasons == {"KeyError": 4}


def test_a_cut_conversation_goes_on_in_the_next_step_without_noticing():
    seen = []

    async def play(episode):
        first = await episode.generate(max_new_tokens=30)
        episode.append([7, 7])
        second = await episode.generate()
        seen.append((episode.label, len(first.output_ids), len(second.output_ids)))
    long = lambda session, prompt: 60 if session in ("sample-0", "sample-1") else 8
    sampler = make_sampler(SimulatedEngine(long, route_shape=SHAPE), return_routes=True, hooks=Hooks(rollout=play), rollout_batch_size=1,
                           n_samples_per_prompt=2, over_sampling_batch_size=3, partial_rollout=True)

    async def run():
        for version in range(40):
            sampler.engine.version = version
            rollout = await sampler.rollout(version)
            if rollout.groups[0].group_id == 0:
                return version, rollout.groups[0].samples
        raise AssertionError("the cut conversation never came back")
    version, samples = run_virtual(run())
    assert version >= 2 and (sampler.order[0], 30, 28) in seen
    for sample in samples:
        assert sample.response_length == 60 and sample.turns == 2 and len(sample.routes) == len(sample.tokens) - 1
        assert sample.loss_mask.sum() == 58 and not sample.loss_mask[30:32].any()
        assert (sample.routes == sampler.engine.routes(f"sample-{sample.sample_id}", 0, len(sample.routes))).all()
        assert sample.weight_versions[-1][2] == 60


def test_a_checkpoint_begins_unfinished_conversations_again():
    async def play(episode):
        await episode.generate()
    long = lambda session, prompt: 600 if session == "sample-0" else 8
    sampler = make_sampler(SimulatedEngine(long), hooks=Hooks(rollout=play), rollout_batch_size=1, n_samples_per_prompt=2,
                           over_sampling_batch_size=2, partial_rollout=True)
    run_virtual(sampler.rollout())
    state = sampler.state_dict()
    assert state["returned"] == [(0, 0)] and all(g.done for g in state["groups"])
