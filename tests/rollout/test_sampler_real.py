"""Partial rollouts on the real server: aborted, carried over a weight update, continued."""

import numpy as np
import pytest

from megatron_grpo.batch import Status
from megatron_grpo.hooks import Hooks
from megatron_grpo.routing.audit import audit

from .simulated import make_sampler
from .test_client_real import MODEL, SPEC, greedy, reload, run

SHORT, LONG = 4, 200


async def two_lengths(episode):
    await episode.generate(max_new_tokens=LONG if episode.label == two_lengths.long else SHORT)


@pytest.mark.engine
def test_a_response_that_was_cut_is_the_one_that_was_not(sglang_server):
    """Greedy, and the same weights under two version numbers, so each token, log-prob and route is known."""
    async def scenario(client):
        sampler = make_sampler(client, hooks=Hooks(rollout=two_lengths), return_routes=True, rollout_batch_size=1, n_samples_per_prompt=2,
                               over_sampling_batch_size=2, partial_rollout=True, rollout_max_response_len=LONG, rollout_top_k=1)
        two_lengths.long = sampler.order[0]
        before = (await client.generate(greedy("before", [5], 1))).weight_versions[0][0]
        rollouts = []
        for version in (1, 2):
            await reload(client, sglang_server.model_path, str(version))
            if version == 2:
                two_lengths.long = None     # groups begun from here on are short; the cut ones go on as they are
                sampler.width = 1
            rollouts.append(await sampler.rollout(version))
        samples = [s for r in rollouts for s in r.samples]
        whole = [await client.generate(greedy(f"w{s.sample_id}", s.tokens[:s.prompt_length].tolist(), s.response_length)) for s in samples]
        await sampler.close()
        await reload(client, sglang_server.model_path, before)
        return rollouts, samples, whole
    (first, second), samples, whole = run(scenario, sglang_server.url, model=MODEL)
    assert [g.group_id for g in first.groups] == [1] and [g.group_id for g in second.groups] == [0]
    assert second.books.carried_in == first.books.carried_out and first.books.wasted_tokens == 0 and first.books.carried_out.tokens > 0
    assert second.off_policy_tokens == first.books.carried_out.tokens
    for sample, expected in zip(samples, whole, strict=True):
        assert sample.status is Status.TRUNCATED and sample.tokens[sample.prompt_length:].tolist() == expected.output_ids
        np.testing.assert_allclose(sample.rollout_logp, expected.logp, atol=1e-4)
        audit(sample.sample_id, sample.routes, SPEC, tokens=len(sample.tokens))
        assert (np.sort(sample.routes) != np.sort(expected.routes)).any(-1).mean() < 0.01
    assert any([v for v, _, _ in s.weight_versions] == ["1", "2"] for s in second.samples)
