"""Dispatch, rescue, aborts, weight versions and health, against scripted servers."""

import asyncio

import numpy as np
import pytest

from megatron_grpo.rollout import responses
from megatron_grpo.rollout.client import SGLangClient
from megatron_grpo.rollout.config import EngineConfig
from megatron_grpo.rollout.engine import EngineError, GenerationRequest, SamplingParams
from megatron_grpo.rollout.fleet import Fleet
from megatron_grpo.rollout.responses import ServedModel
from tests.faults.server import FaultServer
from tests.faults.truth import MODEL, VOCAB, check, continuation

FAST = dict(sglang_stall_timeout=30.0, sglang_request_timeout=60.0, sglang_stream_interval=1, sglang_retries=3, sglang_down_timeout=20.0,
            rollout_health_check_interval=0.05, rollout_health_check_timeout=10.0)


def ask(name: str = "a", tokens: int = 12, **fields) -> GenerationRequest:
    return GenerationRequest(name, continuation([5], 7), SamplingParams(tokens), **{"return_routes": True, **fields})


def run(scenario, *servers: FaultServer, model=MODEL, start=False, **settings):
    """scenario(client, *servers) on a fresh event loop, with the servers started and stopped; bounded in time."""
    async def main():
        for server in servers:
            await server.start()
        client = SGLangClient(EngineConfig(**{**FAST, **settings}), model, [s.url for s in servers], backoff=0.01)
        try:
            await client.start(check=start)
            return await scenario(client, *servers)
        finally:
            await client.close()
            for server in servers:
                await server.stop()
    return asyncio.run(asyncio.wait_for(main(), 60))


async def until(condition):
    while not condition():
        await asyncio.sleep(0.005)


# ---- dispatch -------------------------------------------------------------------------------------------------------------------


def test_least_loaded_and_bounded():
    async def scenario(client, *servers):
        asked = [ask(f"r{i}") for i in range(24)]
        for request, generation in zip(asked, await asyncio.gather(*map(client.generate, asked)), strict=True):
            check(generation, request)
        return [(len(s.seen), s.most_at_once) for s in servers]
    loads = run(scenario, *(FaultServer(pause=0.01) for _ in range(3)), sglang_server_concurrency=4)
    assert [count for count, _ in loads] == [8, 8, 8] and all(most <= 4 for _, most in loads)


def test_a_conversation_stays_at_its_server():
    async def scenario(client, *servers):
        where = {}
        for turn in range(4):
            asked = [ask(f"t{turn}c{c}", session=f"c{c}") for c in range(5)]
            for c, generation in enumerate(await asyncio.gather(*map(client.generate, asked))):
                where.setdefault(c, set()).add(generation.server)
        return where
    assert all(len(servers) == 1 for servers in run(scenario, FaultServer(), FaultServer()).values())


def test_a_broken_server_does_not_attract_the_work():
    """It fails at once, so it is always the least loaded."""
    async def scenario(client, broken, sound):
        for i in range(30):
            await client.generate(ask(f"r{i}"))
        return len(broken.seen), client.stats
    seen, stats = run(scenario, FaultServer(lambda name, attempt: "logprob_nan"), FaultServer())
    assert seen <= 3 and stats.delivered == 30 and stats.refused == {"log-probs": seen}


# ---- dead servers -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("routes", [True, False])
@pytest.mark.parametrize("interval", [1, 0])
def test_another_server_goes_on_from_the_tokens_received(routes, interval):
    async def scenario(client, *servers):
        request = ask(tokens=40, return_routes=routes, return_sampling_mask=True)
        task = asyncio.create_task(client.generate(request))
        await until(lambda: any(s.at_once for s in servers))
        await asyncio.sleep(0.1)
        first, other = sorted(servers, key=lambda s: -s.at_once)
        await first.die()
        generation = await task
        check(generation, request)
        assert generation.server == other.url and [m[0] for m in generation.sampling_mask] == generation.output_ids
        sent = len(other.seen[0]["input_ids"]) - len(request.input_ids)
        assert client.stats.rescued_tokens == sent and other.seen[0]["sampling_params"]["max_new_tokens"] == 40 - sent
        return sent
    sent = run(scenario, FaultServer(pause=0.02), FaultServer(pause=0.02), sglang_stream_interval=interval)
    assert sent > 0 if interval else sent == 0


def test_dead_server_is_left_out_and_taken_back(caplog):
    async def scenario(client, one, two):
        await one.die()
        asked = [ask(f"r{i}") for i in range(6)]
        await asyncio.gather(*map(client.generate, asked))
        assert len(two.seen) == 6 and client.stats.left_out == 1
        await one.start()
        await until(lambda: client.stats.taken_back)
        await asyncio.gather(*(client.generate(ask(f"s{i}")) for i in range(6)))
        return len(one.seen)
    assert run(scenario, FaultServer(pause=0.01), FaultServer(pause=0.01)) == 3
    assert "is left out" in caplog.text and "is taken back" in caplog.text


def test_hung_server_is_found_by_its_health_and_its_requests_move():
    async def scenario(client, one, two):
        one.healthy = "hangs"
        asked = [ask(f"r{i}") for i in range(4)]
        for request, generation in zip(asked, await asyncio.gather(*map(client.generate, asked)), strict=True):
            check(generation, request)
        return client.stats
    stats = run(scenario, FaultServer(lambda *_: "hang_in_mid_stream"), FaultServer(), rollout_health_check_timeout=0.2)
    assert stats.delivered == 4 and stats.left_out == 1 and stats.rescued_tokens > 0


def test_all_servers_dead_ends_with_their_reasons():
    async def scenario(client, server):
        await server.die()
        with pytest.raises(EngineError, match=r"no SGLang server has been usable for 0.5 s .*Cannot connect"):
            await client.generate(ask())
        return client.stats
    stats = run(scenario, FaultServer(), sglang_down_timeout=0.5)
    assert stats.dropped == {"no server": 1}


def test_waiting_requests_go_on_when_a_server_comes_back():
    async def scenario(client, server):
        await server.die()
        tasks = [asyncio.create_task(client.generate(ask(f"r{i}"))) for i in range(3)]
        await until(lambda: client.stats.left_out)
        await server.start()
        return await asyncio.gather(*tasks)
    for i, generation in enumerate(run(scenario, FaultServer())):
        check(generation, ask(f"r{i}"))


# ---- aborts -----------------------------------------------------------------------------------------------------------------------


def test_abort_returns_what_there_is_and_spares_others():
    async def scenario(client, server):
        asked = [ask("r1", tokens=60), ask("r10", tokens=12)]       # one id begins the other
        tasks = [asyncio.create_task(client.generate(request)) for request in asked]
        await until(lambda: server.at_once == 2)
        await asyncio.sleep(0.1)
        await client.abort(["r1"])
        results = await asyncio.gather(*tasks)
        for request, result in zip(asked, results, strict=True):
            check(result, request)
        return [(r.finish_reason, len(r.output_ids)) for r in results]
    (reason, count), other = run(scenario, FaultServer(pause=0.05))
    assert reason == "abort" and 0 < count < 60 and other == ("length", 12)


def test_abort_of_requests_that_wait():
    async def scenario(client, server):
        tasks = [asyncio.create_task(client.generate(ask(f"r{i}", tokens=60))) for i in range(4)]
        await until(lambda: server.at_once == 1)
        await asyncio.sleep(0.3)
        await client.abort()
        return await asyncio.gather(*tasks), client.stats
    results, stats = run(scenario, FaultServer(pause=0.05), sglang_server_concurrency=1)
    assert [r.finish_reason for r in results] == ["abort"] * 4 and sum(not r.output_ids for r in results) == 3
    assert stats.delivered == 4


def test_abort_at_a_server_that_does_not_answer(monkeypatch):
    monkeypatch.setattr("megatron_grpo.rollout.client.ABORT_GRACE", 1)

    async def scenario(client, server):
        tasks = [asyncio.create_task(client.generate(ask(f"r{routes}", return_routes=routes))) for routes in (True, False)]
        await until(lambda: len(server.seen) == 2)
        await asyncio.sleep(0.1)
        await client.abort()
        return await asyncio.gather(*tasks)
    with_routes, without = run(scenario, FaultServer(lambda *_: "hang_in_mid_stream"))
    assert with_routes.finish_reason == "abort" and with_routes.output_ids == []        # its routes never came
    assert without.finish_reason == "abort" and len(without.output_ids) == 5


def test_aborts_and_looks_go_to_the_workers_behind_a_router():
    async def scenario(client, router):
        workers = [await FaultServer().start() for _ in range(2)]
        object.__setattr__(client.config, "sglang_worker_urls", tuple(w.url for w in workers))
        await workers[0].die()
        task = asyncio.create_task(client.generate(ask(tokens=60)))
        await until(lambda: router.at_once)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await until(lambda: workers[1].aborts)
        assert not router.aborts
        await workers[0].start()
        workers[0].info["enable_return_routed_experts"] = False
        faults = await client._faults(client.fleet.servers[0])
        await asyncio.gather(*(w.stop() for w in workers))
        return workers[0].url, faults
    url, faults = run(scenario, FaultServer(pause=0.05))
    assert len(faults) == 1 and faults[0].startswith(f"{url}: ") and "--enable-return-routed-experts" in faults[0]


def test_cancelled_request_is_aborted_at_the_server():
    async def scenario(client, server):
        task = asyncio.create_task(client.generate(ask(tokens=60)))
        await until(lambda: server.at_once)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await until(lambda: server.aborts)
        return client.stats
    assert run(scenario, FaultServer(pause=0.05)).dropped == {"cancelled": 1}


# ---- weights ------------------------------------------------------------------------------------------------------------------------


def test_only_expected_weights_are_sampled_from():
    async def scenario(client, one, two):
        await client.expect("v1")
        await client.generate(ask("a"))
        one.version = "v2"
        await client.expect("v2", {two.url: "the update failed"})
        await asyncio.gather(*(client.generate(ask(f"b{i}")) for i in range(4)))
        assert not any(".b" in body["rid"] for body in two.seen)
        two.version = "v3"
        await client.expect("v3", {one.url: "the update failed"})
        generation = await client.generate(ask("c"))
        check(generation, ask("c"), version="v3")
        return client.stats
    stats = run(scenario, FaultServer(), FaultServer())
    assert stats.refused == {} and stats.dropped == {}


def test_a_server_that_is_barred_during_its_health_check_stays_out():
    async def main():
        healthy, changes = asyncio.Event(), []
        fleet = Fleet(["http://a:1"], EngineConfig(**FAST), lambda server: healthy.wait(), lambda server, up: changes.append(up))
        fleet.watch()
        await asyncio.sleep(0.1)        # the check waits
        fleet.bar(fleet.servers[0], "it kept the old weights")
        healthy.set()
        await asyncio.sleep(0.1)
        out = list(changes)
        fleet.bar(fleet.servers[0], "")
        await until(lambda: fleet.servers[0].up)
        await fleet.close()
        return out
    assert asyncio.run(main()) == [False]


def test_restarted_server_with_old_weights_stays_out_until_it_has_the_new_ones():
    async def scenario(client, one, two):
        await client.expect("v1")
        await one.die()
        await asyncio.gather(*(client.generate(ask(f"a{i}")) for i in range(4)))
        two.version, one.version = "v2", "v0"
        await client.expect("v2")
        await one.start()
        await asyncio.sleep(0.3)
        assert client.stats.taken_back == 0
        one.version = "v2"
        await until(lambda: client.stats.taken_back)
    run(scenario, FaultServer(), FaultServer())


def test_request_that_was_in_flight_at_an_update_may_have_the_old_weights():
    async def scenario(client, server):
        await client.expect("v1")
        task = asyncio.create_task(client.generate(ask("a", tokens=40)))
        await until(lambda: server.at_once)
        await client.expect("v2")       # published, but this answer is still all v1
        check(await task, ask("a", tokens=40))
        with pytest.raises(EngineError, match="sampled under v1, expected v2"):
            await client.generate(ask("b"))
    run(scenario, FaultServer(pause=0.02), sglang_retries=1)


def test_tokens_of_other_weights_are_not_continued():
    """The new server would return the new weights' routes for tokens that the old weights sampled."""
    async def scenario(client, *servers):
        task = asyncio.create_task(client.generate(ask(tokens=40)))
        await until(lambda: any(s.at_once for s in servers))
        await asyncio.sleep(0.1)
        first, other = sorted(servers, key=lambda s: -s.at_once)
        other.version = "v2"
        await first.die()
        generation = await task
        check(generation, ask(tokens=40), version="v2")
        return client.stats
    stats = run(scenario, FaultServer(pause=0.02), FaultServer(pause=0.02))
    assert stats.rescued_tokens == 0 and stats.refused == {"weight version": 1}


# ---- start ---------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("info, model, message", [
    (dict(enable_return_routed_experts=False), MODEL, "--enable-return-routed-experts"),
    (dict(pp_size=2), MODEL, "zeros"),
    (dict(version="0.5.12"), MODEL, "install 0.5"),
    (dict(enable_hierarchical_cache=True), MODEL, "--enable-hierarchical-cache"),
    (dict(moe_runner_backend="triton_kernel"), MODEL, "triton_kernel"),
    ({}, ServedModel(VOCAB + 1, MODEL.routes), f"vocabulary of {VOCAB}, the trainer's of {VOCAB + 1}"),
])
def test_unfit_server_is_refused_at_start(info, model, message):
    async def scenario(client, one, two):
        pass
    bad = FaultServer()
    bad.info = bad.info | info
    with pytest.raises(EngineError, match=message) as error:
        run(scenario, FaultServer(), bad, model=model, start=True)
    assert bad.url in str(error.value)


@pytest.mark.parametrize("fault, message", [("no_routes", "gateway drops the field"), ("status_401", "--sglang-api-key-env"),
                                            ("routes_layer_of_zeros", "all rows of layers .1. are zero"), ("token_too_high", "vocabulary")])
def test_first_request_shows_what_the_server_does_not_tell(fault, message):
    async def scenario(client, server):
        pass
    with pytest.raises(EngineError, match=message):
        run(scenario, FaultServer(lambda *_: fault), start=True)


def test_fit_servers_start():
    async def scenario(client, *servers):
        check(await client.generate(ask()), ask())
    run(scenario, FaultServer(), FaultServer(), start=True)


def test_server_that_never_comes_up():
    async def scenario(client, server):
        pass
    server = FaultServer()
    server.healthy = False
    with pytest.raises(EngineError, match=r"not healthy within 0.3 s .--sglang-start-timeout.: .*answered 503"):
        run(scenario, server, start=True, sglang_start_timeout=0.3)


def test_bad_requests_are_refused_before_they_are_sent():
    async def scenario(client, server):
        for request, message in ((ask("a", session=""), "in flight"), (GenerationRequest("b", [VOCAB], SamplingParams(3)), "vocabulary"),
                                 (GenerationRequest("c", [], SamplingParams(3)), "empty")):
            first = asyncio.create_task(client.generate(ask("a")))
            await asyncio.sleep(0)
            with pytest.raises(EngineError, match=message):
                await client.generate(request)
            await first
        return client.stats
    stats = run(scenario, FaultServer())
    assert stats.requested == stats.delivered == 3


def test_api_key_is_sent(monkeypatch):
    monkeypatch.setenv("KEY_OF_TEST", "secret")

    async def scenario(client, server):
        await client.generate(ask())
        return server.keys
    assert run(scenario, FaultServer(), sglang_api_key_env="KEY_OF_TEST", start=True) == {"Bearer secret"}


def test_large_answers_are_decoded_off_the_event_loop(monkeypatch):
    import threading
    monkeypatch.setattr("megatron_grpo.rollout.client.OFF_LOOP", 100)
    threads = set()
    for name in ("read", "finish"):
        original = getattr(responses, name)
        monkeypatch.setattr(f"megatron_grpo.rollout.client.{name}",
                            lambda *args, original=original: threads.add(threading.current_thread()) or original(*args))

    async def scenario(client, server):
        check(await client.generate(ask()), ask())
    run(scenario, FaultServer())
    assert threads and threading.main_thread() not in threads


# ---- validation, in particular what no fault covers ------------------------------------------------------------------------------------


def test_routes_before_a_change_of_weights_are_forgotten():
    """Prompt of 4 tokens, 5 output tokens, the weights change after 2: rows 0 .. 4 predict tokens up to the change."""
    from tests.faults.truth import routes
    request = GenerationRequest("x", continuation([5], 4), SamplingParams(5), return_routes=True, routes_start=1)
    message = FaultServer().message({"rid": "r", "input_ids": request.input_ids, "sampling_params": {"max_new_tokens": 5},
                                     "return_routed_experts": True, "routed_experts_start_len": 1})
    message["meta_info"]["weight_versions"] = [{"version": "1", "start": 0, "end": 2}, {"version": "2", "start": 2, "end": 5}]
    generation = responses.finish(responses.parse(message, request, "r", MODEL), request, MODEL, ("1", "2"), "url")
    true = routes(request.input_ids + generation.output_ids, 1)
    assert (generation.routes[:4] == -1).all() and np.array_equal(generation.routes[4:], true[4:])
    assert generation.weight_versions == [("1", 0, 2), ("2", 2, 5)]


def test_old_servers_send_one_version():
    request = GenerationRequest("x", [5], SamplingParams(5))
    message = FaultServer().message({"rid": "r", "input_ids": [5], "sampling_params": {"max_new_tokens": 5}})
    del message["meta_info"]["weight_versions"]
    assert responses.finish(responses.parse(message, request, "r", MODEL), request, MODEL, (), "url").weight_versions == [("v1", 0, 5)]


def test_positive_rounding_becomes_zero():
    request = GenerationRequest("x", [5], SamplingParams(1))
    message = FaultServer().message({"rid": "r", "input_ids": [5], "sampling_params": {"max_new_tokens": 1}})
    message["meta_info"]["output_token_logprobs"][0][0] = responses.LOGP_ROUNDING / 2
    assert responses.parse(message, request, "r", MODEL).logp.tolist() == [0.0]
    message["meta_info"]["output_token_logprobs"][0][0] = responses.LOGP_ROUNDING * 2
    with pytest.raises(responses.BadResponse):
        responses.parse(message, request, "r", MODEL)


def test_long_responses_are_streamed_in_few_parts():
    fields = responses.body(GenerationRequest("x", [5], SamplingParams(32_000)), "r", 256)
    assert fields["sampling_params"]["stream_interval"] == 2000 and fields["stream"]
    assert "stream" not in responses.body(GenerationRequest("x", [5], SamplingParams(32_000)), "r", 0)
