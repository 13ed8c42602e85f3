import asyncio
import threading
import time
from contextlib import asynccontextmanager

import numpy as np
import pytest
from aiohttp import web

from megatron_grpo.batch import Sample, Status
from megatron_grpo.hooks import HookConfig, load_hooks
from megatron_grpo.rewards.config import VerifierConfig
from megatron_grpo.rewards.reward import Rewards
from megatron_grpo.settings import ConfigError


def sample(number=0, response="3", **options):
    return Sample(number, 0, np.zeros(2, np.int64), 1, np.ones(1, bool), np.zeros(1, np.float32), response=response, prompt="1+2=",
                  label="3", **options)


def custom(tmp_path, body, name="rm"):
    """Hooks.rm of a file with this body."""
    path = tmp_path / f"{name}_{abs(hash(body))}.py"
    path.write_text("import asyncio, time, threading\n" + body)
    return load_hooks(HookConfig(custom_rm_path=f"{path}:rm"), None).rm


def score(rewards_of, *samples, group=False):
    """Score the samples on a loop of its own; returns the seconds it took."""
    async def run():
        rewards = rewards_of()
        start = time.monotonic()
        try:
            await asyncio.gather(*(rewards(s) for s in samples))
            if group:
                await rewards.finish([s for s in samples if s.status is not Status.ABORTED])
        finally:
            await rewards.close()
        return time.monotonic() - start
    return asyncio.run(run())


@pytest.mark.parametrize("body, rewards, total", [
    ("async def rm(args, sample): return len(sample.response)", {"reward": 1.0}, 1.0),
    ("def rm(args, sample): return {'right': 1, 'short': 0.25}", {"right": 1.0, "short": 0.25}, 1.25)])
def test_custom_rewards_one_number_or_several(tmp_path, body, rewards, total):
    one = sample()
    score(lambda: Rewards(VerifierConfig(), custom(tmp_path, body)), one)
    assert one.rewards == rewards and one.reward == total and one.status is Status.COMPLETED


def test_one_of_several_rewards_can_be_the_reward(tmp_path):
    rm = custom(tmp_path, "def rm(args, sample): return {'right': 1, 'short': 0.25}")
    one, other = sample(), sample()
    score(lambda: Rewards(VerifierConfig(reward_key="short"), rm), one)
    score(lambda: Rewards(VerifierConfig(reward_key="long"), rm), other)
    assert one.reward == 0.25 and one.rewards == {"right": 1.0, "short": 0.25}
    assert other.status is Status.ABORTED and "--reward-key long: the rewards are right, short" in other.metadata["aborted"]


def test_a_group_hook_sees_the_whole_group(tmp_path):
    rm = custom(tmp_path, "async def rm(args, samples): return [len(samples) + s.sample_id for s in samples]")
    samples = [sample(i) for i in range(3)]
    score(lambda: Rewards(VerifierConfig(), rm), *samples, group=True)
    assert [s.reward for s in samples] == [3, 4, 5]
    bad = custom(tmp_path, "async def rm(args, samples): return [1]")
    score(lambda: Rewards(VerifierConfig(), bad), *samples, group=True)
    assert all(s.status is Status.ABORTED and "expected a list of 3" in s.metadata["aborted"] for s in samples)


@pytest.mark.parametrize("body, reason", [
    ("async def rm(args, sample): raise OSError('no judge')", "OSError: no judge"),
    ("def rm(args, sample): return None", "expected a number"),
    ("def rm(args, sample): return float('nan')", "nan"),
    ("async def rm(args, sample): await asyncio.sleep(60)", r"--custom-rm-path gave no answer within 0.3 s"),
    ("def rm(args, sample): time.sleep(60)", r"--custom-rm-path gave no answer within 0.3 s"),
    ("async def rm(args, sample): time.sleep(60)", r"--custom-rm-path gave no answer within 0.3 s")])
def test_a_hook_that_raises_or_hangs_aborts_its_sample_and_never_scores_zero(tmp_path, body, reason):
    samples = [sample(i) for i in range(3)]
    limit = 0.3 if "sleep" in body else 30.0
    seconds = score(lambda: Rewards(VerifierConfig(rm_timeout=limit), custom(tmp_path, body)), *samples)
    assert all(s.status is Status.ABORTED and reason in s.metadata["aborted"] and not s.rewards for s in samples)
    assert seconds < 30      # not the 60 s that it sleeps


def test_a_hook_that_blocks_its_loop_does_not_stop_the_others_for_good(tmp_path):
    body = "async def rm(args, sample):\n    if sample.sample_id == 0: time.sleep(60)\n    return 1.0"
    first, second = sample(0), sample(1)

    async def run():
        rewards = Rewards(VerifierConfig(rm_timeout=2.0), custom(tmp_path, body))
        await rewards(first)
        await rewards(second)
        await rewards.close()
    asyncio.run(run())
    assert first.status is Status.ABORTED and second.reward == 1.0
    assert all(t.daemon for t in threading.enumerate() if t is not threading.main_thread())    # nothing keeps the process alive


def test_hanging_hooks_do_not_use_up_the_threads(tmp_path):
    body = "def rm(args, sample):\n    if sample.sample_id < 40: time.sleep(60)\n    return 1.0"
    samples = [sample(i) for i in range(44)]
    score(lambda: Rewards(VerifierConfig(rm_timeout=4.0), custom(tmp_path, body)), *samples)
    assert [s.status is Status.ABORTED for s in samples] == [True] * 40 + [False] * 4


def test_a_hook_that_ends_after_its_time_limit_says_nothing(tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(threading, "excepthook", lambda problem: said.append(problem.exc_value))
    before = set(threading.enumerate())

    async def run():
        rewards, late = Rewards(VerifierConfig(rm_timeout=0.1), custom(tmp_path, "def rm(args, sample): time.sleep(0.5); return 1.0")), sample()
        await rewards(late)
        for thread in set(threading.enumerate()) - before:
            if thread.name != "reward-hooks":
                await asyncio.to_thread(thread.join, 20)
        await rewards.close()
        return late
    assert asyncio.run(run()).status is Status.ABORTED and said == []


@asynccontextmanager
async def judge(answers, together=1):
    """A server on loopback that gives these answers one after another, the last for ever, once `together` requests are there."""
    seen, enough = [], asyncio.Event()

    async def answer(request):
        seen.append(await request.json())
        if len(seen) >= together:
            enough.set()
        await enough.wait()
        status, body = answers[min(len(seen), len(answers)) - 1]
        if status == "hang":
            await asyncio.sleep(1.5)
            status = 200
        return web.json_response(body, status=status)
    app = web.Application()
    app.router.add_post("/score", answer)
    runner = web.AppRunner(app, shutdown_timeout=0)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}/score", seen
    finally:
        await runner.cleanup()


def remote(answers, **options):
    async def run():
        async with judge(answers) as (url, seen):
            rewards, one = Rewards(VerifierConfig(rm_type=("remote",), rm_url=url, **options)), sample(metadata={"k": 1})
            await rewards(one)
            await rewards.close()
            return one, seen
    return asyncio.run(run())


def test_remote_rewards():
    one, seen = remote([(200, 0.75)])
    assert one.rewards == {"remote": 0.75} and one.reward == 0.75
    assert seen == [{"prompt": "1+2=", "response": "3", "label": "3", "metadata": {"k": 1}}]
    one, _ = remote([(200, {"a": 1, "b": 2})])
    assert one.rewards == {"a": 1.0, "b": 2.0} and one.reward == 3.0
    one, seen = remote([(500, {}), (503, {}), (200, 1)])
    assert one.reward == 1.0 and len(seen) == 3


def test_the_flags_alone_limit_remote_rewards():
    """aiohttp's own limits are 100 connections and five minutes."""
    async def run():
        async with judge([(200, 1.0)], together=150) as (url, _):
            rewards = Rewards(VerifierConfig(rm_type=("remote",), rm_url=url, rm_concurrency=150, rm_timeout=20.0))
            samples = [sample(i) for i in range(150)]
            await asyncio.gather(*map(rewards, samples))
            limit = rewards._session.timeout.total
            await rewards.close()
            return {s.reward for s in samples}, limit
    assert asyncio.run(run()) == ({1.0}, None)


@pytest.mark.parametrize("answers, reason", [
    ([(500, {})], "500"), ([("hang", {})], r"gave no answer within 0.7 s"), ([(200, "good")], "answered 'good'; a number"),
    ([(200, {})], "answered {}"), ([(200, True)], "answered True"), ([(200, {"a": None})], "answered {'a': None}")])
def test_a_remote_judge_that_fails_aborts_the_sample(answers, reason):
    one, _ = remote(answers, rm_timeout=0.7 if answers[0][0] == "hang" else 30.0)
    assert one.status is Status.ABORTED and reason in one.metadata["aborted"] and not one.rewards


def test_a_judge_that_is_not_there_aborts_the_sample():
    one = sample()
    score(lambda: Rewards(VerifierConfig(rm_type=("remote",), rm_url="http://127.0.0.1:9/")), one)
    assert one.status is Status.ABORTED and "--rm-url http://127.0.0.1:9/" in one.metadata["aborted"]


def test_settings_that_cannot_work_are_refused():
    with pytest.raises(ConfigError, match="no reward: give --rm-type"):
        Rewards(VerifierConfig())
    with pytest.raises(ConfigError, match="--rm-type maths: choose among task, exact, math, remote"):
        VerifierConfig(rm_type=("maths",))
    with pytest.raises(ConfigError, match="--rm-type remote: give the address with --rm-url"):
        VerifierConfig(rm_type=("remote",))
    with pytest.raises(ConfigError, match="--rm-workers 0: give a positive number"):
        VerifierConfig(rm_workers=0)
