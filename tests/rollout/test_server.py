"""The local server: the tiny model served for real, refusals at start, and no orphan whatever the owner's end."""

import base64
import json
import urllib.request

import numpy as np
import pytest


def post(url, path, **body):
    request = urllib.request.Request(url + path, data=json.dumps(body).encode(), headers={"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.loads(reply.read())


@pytest.mark.engine
def test_routes_and_logprobs_equal_transformers(sglang_server):
    import torch
    from transformers import AutoModelForCausalLM
    prompt = np.random.RandomState(0).randint(3, 500, size=40).tolist()
    reply = post(sglang_server.url, "/generate", input_ids=prompt, return_logprob=True, return_routed_experts=True,
                 sampling_params=dict(max_new_tokens=8, temperature=1.0, ignore_eos=True))
    tokens = prompt + reply["output_ids"]
    routes = np.frombuffer(base64.b64decode(reply["meta_info"]["routed_experts"]), np.int32).reshape(-1, 4, 2)
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(sglang_server.model_path, dtype=torch.float32).eval()
        out = model(torch.tensor([tokens]), output_router_logits=True)
    expected = np.stack([x.topk(2, -1).indices.numpy() for x in out.router_logits], 1)[:-1]
    np.testing.assert_array_equal(np.sort(routes), np.sort(expected))
    logp = out.logits[0].log_softmax(-1)[len(prompt) - 1:-1].gather(1, torch.tensor(reply["output_ids"])[:, None])[:, 0]
    np.testing.assert_allclose([x for x, *_ in reply["meta_info"]["output_token_logprobs"]], logp, atol=1e-5)
