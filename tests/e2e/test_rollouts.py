"""Rollouts in the real trainer with the real server: a tool conversation, and every asynchronous strategy at the same time."""

import contextlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_grpo.rollout.tokenizer import make_character_tokenizer
from megatron_grpo.routing.audit import audit
from tests.e2e.router import router
from tests.e2e.run import run_train
from tests.e2e.test_train import flags
from tests.rollout.test_client_real import SPEC
from tests.rollout.tiny import tiny_qwen3_moe

pytestmark = pytest.mark.engine
R3 = ["--use-rollout-routing-replay", "--expert-model-parallel-size", 2, "--eval-num-prompts", 0]


def train(pool, argv):
    results = pool.run(run_train, list(map(str, argv)), ranks=2, timeout=240)
    assert [code for code, _ in results] == [0, 0], results


def metrics_of(run):
    """Of each optimizer step, in order."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["metrics"] for line in lines]


def samples_of(directory, step):
    return [s for rank in (0, 1) for s in torch.load(directory / f"{step}_{rank}.pt", weights_only=False)]


def check_routes(sample):
    """A row for every token but the last, and each passes the audit."""
    assert len(sample.routes) == len(sample.tokens) - 1 and (audit(sample.sample_id, sample.routes, SPEC, tokens=len(sample.tokens)) >= 0).all()


# ---- the calculator -------------------------------------------------------------------------------------------------------------


def calculator_model(path):
    """Writes [, ], digits and signs, and ] most of all; channel 0, which no layer changes or routes by, is the bias of the output layer."""
    from safetensors.torch import load_file, save_file
    tiny_qwen3_moe(path)
    tokenizer = make_character_tokenizer(path, "+-*0123456789=[]?")
    weights = load_file(path / "model.safetensors")
    for name, tensor in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor[0] = 0
        elif name.endswith("mlp.gate.weight"):
            tensor[:, 0] = 0
    weights["model.embed_tokens.weight"][:, 0] = 1.0
    bias = torch.full((512,), -20.0)
    bias[8:len(tokenizer)] = 0.0
    bias[tokenizer.convert_tokens_to_ids("]")] = 1.0
    weights["lm_head.weight"][:, 0] = bias
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    return path, tokenizer


def test_the_calculator_trains_with_routes_and_sampling_masks(pool, tmp_path, sglang_server):
    """Engine and trainer agree to rounding: the tool's tokens, the routes of all turns and the truncated support are replayed."""
    model, tokenizer = calculator_model(tmp_path / "model")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"input": f"{i}+{i + 1}=", "label": str(2 * i + 1)}) + "\n" for i in range(20)))
    example = Path(__file__).parents[2] / "examples" / "calculator_tool.py"
    train(pool, flags(
        model, str(prompts), *R3, "--sglang-urls", sglang_server.url, "--train-iters", 3, "--run-dir", tmp_path / "run",
        "--rollout-function-path", f"{example}:rollout", "--rollout-max-response-len", 30, "--rollout-stop-token-ids", 2,
        "--use-rollout-sampling-mask", "--rollout-top-k", 12, "--rollout-top-p", 0.9,
        "--save-debug-rollout-data", tmp_path / "{step}_{dp_rank}.pt"))
    steps = metrics_of(tmp_path / "run")
    assert len(steps) == 3
    for step, metrics in enumerate(steps):
        assert metrics["mismatch_k3"] < 1e-8 and metrics["ratio"] == 1 and metrics["ratio_max"] == 1
        assert metrics["routing/fallback"] == 0 and metrics["routing/router_mismatch"] < 0.01 and metrics["grad_norm"] > 0
        samples = samples_of(tmp_path, step)
        assert len(samples) == metrics["samples/count"] == 16 and max(s.turns for s in samples) > 1
        assert metrics["tokens/trained"] == sum(s.loss_mask.sum() for s in samples) < sum(s.response_length for s in samples)
        for sample in samples:
            check_routes(sample)
            response = tokenizer.convert_ids_to_tokens(sample.tokens[sample.prompt_length:].tolist())
            assert len(sample.sampling_mask) == len(response)
            assert all(token in support for token, support in zip(sample.tokens[sample.prompt_length:], sample.sampling_mask, strict=True))
            assert {t for t, own in zip(response, sample.loss_mask, strict=True) if not own} <= set("-0123456789?")
            assert all(response[i - 1] == "]" for i in np.flatnonzero(~sample.loss_mask) if sample.loss_mask[i - 1])
        assert max(len(support) for s in samples for support in s.sampling_mask) <= 12


# ---- everything asynchronous ----------------------------------------------------------------------------------------------------


STEPS, PROMPTS, CAP = 5, 10, 2
SPOILT: dict[str, str] = {}      # prompt -> the response on which the judge fails


@contextlib.contextmanager
def judge():
    """A remote reward of two names, which fails on one response to each prompt."""
    SPOILT.clear()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            tokens = [int(t) for t in re.findall(r"<t(\d+)>", asked["response"])]
            answer = {"even": float(sum(t % 2 == 0 for t in tokens) > len(tokens) / 2), "long": float(len(tokens) > 8)}
            body = json.dumps(answer).encode()
            self.send_response(500 if SPOILT.setdefault(asked["prompt"], asked["response"]) == asked["response"] else 200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args): ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/score"
    finally:
        server.shutdown()
        server.server_close()




def test_rollouts_ahead_with_partial_rollouts_over_broadcast_weights(pool, tmp_path, sglang_server):
    """Two leaders behind a router, one step ahead: nothing lost, nothing twice, no token older than the cap, and the books balance."""
    import pyarrow
    import pyarrow.parquet
    model, prompts = tiny_qwen3_moe(tmp_path / "model"), str(tmp_path / "prompts.parquet")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"input": f"<t{5 + i}> <t{60 + i}>", "label": "x"} for i in range(PROMPTS)]), prompts)
    argv = flags(model, prompts, *R3, "--sglang-worker-urls", sglang_server.url, "--train-iters", STEPS, "--save", tmp_path / "run",
                 "--weight-sync", "distributed", "--rollout-ahead", 1, "--use-tis", "--partial-rollout", "--over-sampling-batch-size", 8,
                 "--max-weight-staleness", CAP, "--rollout-shuffle", "--rollout-max-response-len", 48, "--sglang-stream-interval", 4,
                 "--rollout-stop-token-ids", *range(7, 40), "--save-debug-rollout-data", tmp_path / "{step}_{dp_rank}.pt",
                 "--algorithm", "gdpo", "--gdpo-reward-keys", "even", "long", "--rm-type", "remote")
    at = argv.index("--custom-rm-path")
    del argv[at:at + 2]
    with router(sglang_server.url) as address, judge() as url:
        train(pool, [*argv, "--sglang-urls", address, "--rm-url", url])
    steps = metrics_of(tmp_path / "run")
    assert len(steps) == STEPS
    trained = [samples_of(tmp_path, step) for step in range(STEPS)]
    for step, (metrics, samples) in enumerate(zip(steps, trained, strict=True)):
        check_books(metrics, steps[step - 1] if step else None)
        assert len(samples) == metrics["samples/count"] == metrics["rollout/samples_kept"] and len({s.group_id for s in samples}) == 4
        assert metrics["tokens/trained"] == metrics["rollout/tokens_kept"] and metrics["routing/fallback"] == 0
        assert metrics["mismatch_k3"] < 1e-8 if step == 0 else 1e-8 < metrics["mismatch_k3"] < 0.1
        assert (metrics["tis_weight_ess"] > 1 - 1e-6) == (step == 0)        # weights differ only where the policy does
        assert metrics["engine/dropped"] == metrics["engine/refused"] == 0
        old = 0
        for sample in samples:
            check_routes(sample)
            versions, starts, ends = zip(*((int(v), a, b) for v, a, b in sample.weight_versions), strict=True)
            assert (*starts, sample.response_length) == (0, *ends) and versions == tuple(sorted(set(versions)))
            assert step - CAP <= versions[0] and versions[-1] <= step and sample.loss_mask.all() and set(sample.rewards) == {"even", "long"}
            old += sum(b - a for v, a, b in zip(versions, starts, ends, strict=True) if v < step)
        assert metrics["rollout/tokens_off_policy"] == old
    assert any(len(s.weight_versions) > 1 for own in trained for s in own)      # the weights changed in mid-response
    assert sum(m["rollout/samples_failed"] for m in steps) >= len(SPOILT) >= PROMPTS // 2
    ids = [s.sample_id for own in trained for s in own]
    assert len(ids) == len(set(ids))
    states = [torch.load(file, weights_only=False).state for file in (tmp_path / "run" / "grpo" / f"iter_{STEPS:07d}").iterdir()]
    held = [g.position for state in states for g in state["groups"]] + [p for state in states for p, _ in state["returned"]]
    assert sorted([*{s.group_id for own in trained for s in own}, *held]) == list(range(max(state["position"] for state in states)))


def check_books(metrics, before):
    """What came in went out, and what was carried out came in again."""
    for unit in ("samples", "tokens"):
        account = lambda *names: sum(metrics[f"rollout/{unit}_{name}"] for name in names)
        assert account("carried_in", "generated") == account("kept", "filtered", "failed", "discarded", "carried_out")
        assert account("carried_in") == (before[f"rollout/{unit}_carried_out"] if before else 0)
