"""Every fault of faults.py against the client: no hang, no bad sample, and the books balance."""

import asyncio

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_grpo.rollout.client import SGLangClient
from megatron_grpo.rollout.config import EngineConfig
from megatron_grpo.rollout.engine import EngineError, GenerationRequest, SamplingParams

from .faults import FAULTS, HARMLESS, REFUSED, RETRIED, TIMED
from .server import FaultServer
from .truth import MODEL, VOCAB, check, continuation

TOKENS = 20
CONFIG = dict(sglang_stall_timeout=60.0, sglang_request_timeout=60.0, sglang_stream_interval=4, sglang_retries=2, sglang_down_timeout=5.0,
              rollout_health_check_interval=0.5, rollout_health_check_timeout=5.0)


def config(**changes) -> EngineConfig:
    return EngineConfig(**{**CONFIG, **changes})


def request(name: str, *, tokens: int = TOKENS, prompt: int = 9, start: int = 2) -> GenerationRequest:
    ids = continuation([sum(name.encode()) % VOCAB], prompt)
    return GenerationRequest(name, ids, SamplingParams(tokens), return_routes=True, routes_start=start,
                             return_sampling_mask=name.startswith("mask"))


async def client_of(*servers: FaultServer, **changes) -> SGLangClient:
    client = await SGLangClient(config(**changes), MODEL, [s.url for s in servers], backoff=0.01).start(check=False)
    client.versions.append("v1")
    return client


async def outcome(client: SGLangClient, asked: GenerationRequest):
    """The Generation, or the EngineError."""
    try:
        return await client.generate(asked)
    except EngineError as error:
        return error


async def _first_attempts(names, **changes):
    """Each fault on the first attempt of the request of its name, all at the same time: results, attempts, stats."""
    server = await FaultServer(lambda name, attempt: name if attempt == 0 else "ok").start()
    client = await client_of(server, **changes)
    results = await asyncio.gather(*(outcome(client, request(name)) for name in names))
    attempts = {name: sum(f".{name}." in body["rid"] for body in server.seen) for name in names}
    await client.close()
    await server.stop()
    return dict(zip(names, results, strict=True)), attempts, client.stats


@pytest.fixture(scope="module")
def first_attempts():
    return asyncio.run(asyncio.wait_for(_first_attempts([name for name in FAULTS if name not in TIMED]), 60))


def test_there_are_enough_faults():
    assert len(RETRIED | set(REFUSED)) >= 40 and len(FAULTS) == len(RETRIED) + len(REFUSED) + len(HARMLESS)


@pytest.mark.parametrize("name", sorted(RETRIED - set(TIMED)))
def test_spoiled_answer_is_not_used_and_the_request_is_redone(first_attempts, name):
    results, attempts, _ = first_attempts
    check(results[name], request(name))
    assert results[name].finish_reason == "length" and attempts[name] == 2


def test_hung_answer_ends_at_its_deadline_and_the_request_is_redone():
    run = _first_attempts(TIMED, sglang_stall_timeout=0.5, sglang_request_timeout=1.0, sglang_retries=9)
    results, attempts, stats = asyncio.run(asyncio.wait_for(run, 60))
    for name in TIMED:
        check(results[name], request(name))
        assert attempts[name] >= 2
    assert stats.delivered == len(TIMED) and stats.lost["silence"] >= 3 and stats.lost["timeout"] >= 1


@pytest.mark.parametrize("name", HARMLESS)
def test_unusual_answer_is_used(first_attempts, name):
    results, attempts, _ = first_attempts
    check(results[name], request(name))
    assert attempts[name] == 1


@pytest.mark.parametrize("name", REFUSED)
def test_refused_request_is_not_sent_again(first_attempts, name):
    results, attempts, _ = first_attempts
    assert isinstance(results[name], EngineError) and attempts[name] == 1


def test_books_of_first_attempts(first_attempts):
    results, _, stats = first_attempts
    assert stats.requested == len(results) == stats.delivered + sum(stats.dropped.values())
    assert stats.dropped == {"not accepted": len(REFUSED)}
    assert sum(stats.refused.values()) + sum(stats.lost.values()) == len(RETRIED - set(TIMED))


def test_request_that_only_fails_is_dropped_with_its_reason():
    async def run():
        server = await FaultServer(lambda name, attempt: name).start()
        client = await client_of(server)
        names = ["logprob_nan", "routes_out_of_range", "stale_version", "status_500", "reset_in_mid_stream"]
        results = await asyncio.gather(*(outcome(client, request(name)) for name in names))
        await client.close()
        await server.stop()
        return results, client.stats
    results, stats = asyncio.run(run())
    assert all(isinstance(result, EngineError) for result in results)
    assert stats.dropped == {"log-probs": 1, "routes": 1, "weight version": 1, "status 500": 1, "connection lost": 1}
    assert "expert id 8" in str(results[1]) and "sampled under v0, expected v1" in str(results[2])


FAULTY = st.lists(st.sampled_from(sorted(FAULTS)), max_size=4)


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(scripts=st.lists(FAULTY, min_size=1, max_size=12), servers=st.integers(1, 3), stream=st.sampled_from([0, 4]),
       aborted=st.sets(st.integers(0, 11), max_size=2), cancelled=st.sets(st.integers(0, 11), max_size=2), dead=st.booleans())
def test_books_balance_for_any_faults(scripts, servers, stream, aborted, cancelled, dead):
    """requested = delivered + dropped by reason, and what is delivered is true."""
    def script(name, attempt):
        faults = scripts[int(name)]
        return faults[attempt] if attempt < len(faults) else "ok"

    async def run():
        fleet = [await FaultServer(script, pause=0.01).start() for _ in range(servers)]
        client = await client_of(*fleet, sglang_stream_interval=stream, sglang_stall_timeout=0.2, sglang_request_timeout=0.5)
        tasks = [asyncio.create_task(outcome(client, request(str(i)))) for i in range(len(scripts))]
        await asyncio.sleep(0.03)
        await client.abort([str(i) for i in aborted])
        for i in cancelled & set(range(len(tasks))):
            tasks[i].cancel()
        if dead and servers > 1:
            await fleet[0].die()
        results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 30)
        in_flight = len(client._calls)
        await client.close()
        for server in fleet:
            await server.stop()
        return results, client.stats, in_flight

    results, stats, in_flight = asyncio.run(run())
    delivered = [r for r in results if not isinstance(r, BaseException)]
    for i, result in enumerate(results):
        if not isinstance(result, BaseException):
            check(result, request(str(i)))
    assert in_flight == 0
    assert stats.requested == len(scripts) and stats.delivered == len(delivered)
    assert stats.requested == stats.delivered + sum(stats.dropped.values())
    assert sum(isinstance(r, asyncio.CancelledError) for r in results) == stats.dropped["cancelled"]
