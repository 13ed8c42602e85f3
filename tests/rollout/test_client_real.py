"""The client at real SGLang servers."""

import asyncio
import os
import signal
import time

import numpy as np
import pytest

from megatron_grpo.batch import Status
from megatron_grpo.rollout.client import SGLangClient
from megatron_grpo.rollout.config import EngineConfig
from megatron_grpo.rollout.engine import EngineError, Generation, GenerationRequest, SamplingParams
from megatron_grpo.rollout.responses import ServedModel
from megatron_grpo.rollout.server import LocalServer
from megatron_grpo.routing.audit import RouteSpec, audit
from megatron_grpo.weights.control import EngineControl
from tests.rollout.simulated import make_sampler
from tests.rollout.tiny import tiny_qwen3_moe

SPEC = RouteSpec(num_layers=4, moe_layers=(0, 1, 2, 3), topk=2, num_experts=8)
MODEL = ServedModel(512, SPEC, "qwen3_moe")


def greedy(name: str, prompt: list[int], tokens: int, **fields) -> GenerationRequest:
    return GenerationRequest(name, prompt, SamplingParams(tokens, temperature=0.0, ignore_eos=True), return_routes=True, **fields)


def run(scenario, *urls: str, model=MODEL, **settings):
    async def main():
        client = await SGLangClient(EngineConfig(**{"sglang_stream_interval": 4, **settings}), model, urls, backoff=0.05).start()
        try:
            return await scenario(client)
        finally:
            await client.close()
    return asyncio.run(asyncio.wait_for(main(), 300))


async def reload(client: SGLangClient, path: str, version: str) -> None:
    """The same weights under another version, as a published update."""
    for url in client.urls:
        await asyncio.to_thread(EngineControl(url, 120).update_from_disk, path, version, True)
    await client.expect(version)


@pytest.mark.engine
def test_turns_join_to_the_routes_of_the_whole(sglang_server):
    async def scenario(client):
        first = await client.generate(greedy("first", [5, 6, 7, 8], 6))
        tokens = [5, 6, 7, 8, *first.output_ids]
        second = await client.generate(greedy("second", [*tokens, 9, 10], 5, routes_start=len(tokens) - 1))
        whole = await client.generate(greedy("whole", [*tokens, 9, 10, *second.output_ids], 1))
        return first, second, whole
    first, second, whole = run(scenario, sglang_server.url)
    assert len(first.routes) == 9 and len(second.routes) == 7
    np.testing.assert_array_equal(np.sort(np.concatenate([first.routes, second.routes])), np.sort(whole.routes[:-1]))
    assert first.weight_versions == [(first.weight_versions[0][0], 0, 6)] and first.finish_reason == "length"


@pytest.mark.engine
@pytest.mark.parametrize("interval", [0, 1])
def test_abort_of_a_running_response(sglang_server, interval):
    async def scenario(client):
        tasks = [asyncio.create_task(client.generate(greedy(f"long{i}", [5 + i, 6], 1500))) for i in range(3)]
        await asyncio.sleep(1.0)
        await client.abort()
        return await asyncio.gather(*tasks), client.stats
    results, stats = run(scenario, sglang_server.url, sglang_stream_interval=interval)
    assert [r.finish_reason for r in results] == ["abort"] * 3 and stats.delivered == 3 and not stats.lost
    for result in results:
        count = len(result.output_ids)
        assert count < 1500 and len(result.logp) == count and (not count or len(result.routes) == 1 + count)


@pytest.mark.engine
def test_sampling_mask_and_behaviour(sglang_server):
    async def scenario(client):
        params = SamplingParams(12, top_k=5, ignore_eos=True)
        return await client.generate(GenerationRequest("mask", [5, 6, 7], params, return_sampling_mask=True))
    result = run(scenario, sglang_server.url)
    assert [len(m) for m in result.sampling_mask] == [5] * 12
    assert all(token in mask for token, mask in zip(result.output_ids, result.sampling_mask, strict=True))


@pytest.mark.engine
def test_another_model_is_refused(sglang_server):
    async def scenario(client):
        pass
    for model, message in ((ServedModel(513, SPEC), "vocab"), (ServedModel(512, RouteSpec(4, (0, 1, 2, 3), 2, 16)), "num_experts 8"),
                           (ServedModel(512, RouteSpec(4, (0, 1, 2, 3), 3, 8)), "num_experts_per_tok 2"),
                           (ServedModel(512, SPEC, "glm4_moe"), "model_type qwen3_moe")):
        with pytest.raises(EngineError, match=message):
            run(scenario, sglang_server.url, model=model)


@pytest.mark.engine
def test_reload_from_disk(sglang_server):
    async def scenario(client):
        await reload(client, sglang_server.model_path, "7")     # whatever an earlier test published to the shared server
        before = await client.generate(greedy("before", [5, 6, 7], 8))
        await reload(client, sglang_server.model_path, "7")
        with pytest.raises(EngineError, match="/update_weights_from_disk answered 400"):
            await reload(client, "nowhere", "99")
        return before, await client.generate(greedy("after", [5, 6, 7], 8))
    before, after = run(scenario, sglang_server.url)
    assert before.output_ids == after.output_ids and before.weight_versions == after.weight_versions and after.cached_tokens == 0


# ---- a fleet, and what happens to it ------------------------------------------------------------------------------------------------


RESPONSE = 160      # tokens; long enough that no server has answered everything when two of them fail


class Prefix:
    """Sends the sampler's requests as greedy ones, so that each answer is known, whoever gave it."""

    def __init__(self, client: SGLangClient):
        self.client, self.sent = client, {}

    async def generate(self, request: GenerationRequest) -> Generation:
        asked = greedy(request.request_id, [3 + t for t in request.input_ids], RESPONSE, session=request.session,
                       routes_start=request.routes_start)
        self.sent[request.session] = asked
        return await self.client.generate(asked)

    async def abort(self, request_ids=None):
        await self.client.abort(request_ids)


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.timeout(1500)
def test_killed_stopped_and_restarted_servers(tmp_path, caplog):
    """One server of three is killed in mid-rollout, another is stopped for longer than its deadline; both come back."""
    model = tiny_qwen3_moe(tmp_path / "model")
    servers = [LocalServer(model, start_timeout=900, extra_args=["--max-total-tokens", "8192", "--weight-version", "0"]).launch()
               for _ in range(3)]
    try:
        for server in servers:
            server.wait()
        asyncio.run(_disturbed_steps(servers))
    finally:
        for server in servers:
            if server.process is not None:
                os.killpg(server.process.pid, signal.SIGCONT)
            server.stop()
    killed, stopped = servers[0].url, servers[1].url
    for url in (killed, stopped):
        assert f"{url} is left out" in caplog.text and f"{url} is taken back" in caplog.text


async def _disturbed_steps(servers):
    killed, stopped, kept = servers
    config = EngineConfig(sglang_stream_interval=1, rollout_health_check_interval=0.5, rollout_health_check_timeout=4.0)
    client = await SGLangClient(config, MODEL, [s.url for s in servers], backoff=0.05).start()
    engine = Prefix(client)
    sampler = make_sampler(engine, rollout_batch_size=8, n_samples_per_prompt=4, rollout_max_response_len=RESPONSE, return_routes=True)
    try:
        task = asyncio.create_task(sampler.rollout(0))
        await _until(lambda: sum(bool(c.rid) for c in client._calls.values()) == 32)
        os.killpg(stopped.process.pid, signal.SIGSTOP)
        os.killpg(killed.process.pid, signal.SIGKILL)
        first = await asyncio.wait_for(task, 400)
        assert client.stats.left_out == 2 and client.stats.lost and not client.stats.dropped
        os.killpg(stopped.process.pid, signal.SIGCONT)
        killed.stop()
        await asyncio.to_thread(killed.start)
        await _until(lambda: client.stats.taken_back == 2, 400)
        used = {server.url: 0 for server in servers}
        second = await asyncio.wait_for(sampler.rollout(1), 400)
        for sample_groups in (first, second):
            await _check(sample_groups, engine, client)
        assert not {s.sample_id for s in first.samples} & {s.sample_id for s in second.samples}
        for i in range(6):
            used[(await client.generate(greedy(f"last{i}", [5], 4))).server] += 1
        assert all(used.values())
    finally:
        await client.close()


async def _check(rollout, engine, client):
    """The whole step, no sample twice, and each sample what an undisturbed server answers."""
    samples = rollout.samples
    assert len(rollout.groups) == 8 and len({s.sample_id for s in samples}) == len(samples) == 32
    requests = [engine.sent[f"sample-{s.sample_id}"] for s in samples]
    expected = await asyncio.gather(*(client.generate(greedy(f"again{s.sample_id}", r.input_ids, RESPONSE))
                                      for s, r in zip(samples, requests, strict=True)))
    for sample, true in zip(samples, expected, strict=True):
        assert sample.status is Status.TRUNCATED and sample.tokens[sample.prompt_length:].tolist() == true.output_ids
        np.testing.assert_allclose(sample.rollout_logp, true.logp, atol=1e-4)
        audit(sample.sample_id, sample.routes, SPEC, tokens=len(sample.tokens))
        assert (np.sort(sample.routes) != np.sort(true.routes)).any(-1).mean() < 0.01


async def _until(condition, seconds: float = 60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)
