"""Routing replay end to end with the real server: a GLM4-MoE, and an engine whose routes are damaged on their way."""

import json

import pytest
import torch
from safetensors.torch import load_file

from megatron_grpo.rollout.server import LocalServer
from megatron_grpo.routing import mismatch
from megatron_grpo.trainer.checkpoint import complete_iterations
from tests.e2e.damage import damaging_proxy
from tests.e2e.run import run_train
from tests.e2e.test_train import flags, prompts  # noqa: F401
from tests.rollout.tiny import tiny_glm4_moe, tiny_qwen3_moe

pytestmark = pytest.mark.engine


def metrics_of(run):
    """step -> metrics of its optimizer step."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["metrics"] for line in lines if "loss" in line["metrics"]}


def bias(directory):
    """[MoE layers, experts] of a Hugging Face directory."""
    tensors = {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}
    return torch.stack([tensors[f"model.layers.{n}.mlp.gate.e_score_correction_bias"] for n in (1, 2, 3)])


def test_glm4_moe(pool, prompts, tmp_path):  # noqa: F811
    """First layer dense, a shared expert, sigmoid scores in groups with an expert bias, which the trainer moves and the engine follows."""
    model = tiny_glm4_moe(tmp_path / "model")
    with LocalServer(model, start_timeout=900) as server:
        argv = flags(model, prompts, "--sglang-urls", server.url, "--train-iters", 3, "--save", tmp_path / "run", "--eval-num-prompts", 0,
                     "--expert-model-parallel-size", 2, "--use-rollout-routing-replay", "--moe-router-bias-update-rate", 0.05,
                     "--save-hf", tmp_path / "trained")
        results = pool.run(run_train, argv, ranks=2, timeout=300)
    assert [code for code, _ in results] == [0, 0], results
    steps = metrics_of(tmp_path / "run")
    assert sorted(steps) == [1, 2, 3]
    for metrics in steps.values():
        assert metrics["mismatch_abs_max"] < 1e-4
        assert metrics["ratio"] == 1 and metrics["ratio_max"] == 1
        assert metrics["routing/fallback"] == 0 and metrics["routing/router_mismatch"] < 0.01
        assert {n for n in range(4) if f"routing/router_mismatch/layer_{n}" in metrics} == {1, 2, 3}
        assert metrics["grad_norm"] > 0 and metrics["samples/count"] == 16
    assert ((bias(tmp_path / "trained") - bias(model)).abs() > 0.04).any()


STOPS = {       # damage -> what the run says
    "truncated": ("routes of sample sample-", "the answer was truncated"),
    "out of range": ("expert id 10, but the model has 8 routed experts", "layer", "position"),
    "other model's width": ("as 3 experts a token", "another top-k"),
    "permuted layers": ("routes of 12 samples are damaged", "permuted layers", "--router-agreement-floor"),
}


def test_damaged_routes_stop_the_run_and_lose_no_good_sample(pool, tmp_path, sglang_server):
    """After a good step, three of four answers are damaged, run after run in another way; then the engine is mended."""
    model, run, rollouts = tiny_qwen3_moe(tmp_path / "model"), tmp_path / "run", tmp_path / "rollouts"
    questions = tmp_path / "prompts.jsonl"      # long enough to tell permuted layers by
    questions.write_text("".join(json.dumps({"input": " ".join(f"<t{8 + i + k}>" for k in range(mismatch.MIN_ROWS)), "label": "x"}) + "\n"
                                 for i in range(40)))
    with damaging_proxy(sglang_server.url, layers=4, topk=2) as proxy:
        proxy.spared = lambda sample: sample < 16 or sample % 4 == 0
        argv = flags(model, str(questions), "--sglang-urls", proxy.url, "--train-iters", 2, "--save", run, "--load", run, "--save-interval", 1,
                     "--eval-num-prompts", 0, "--use-rollout-routing-replay", "--sglang-retries", 0,
                     "--expert-model-parallel-size", 2, "--save-debug-rollout-data", rollouts / "{step}_{dp_rank}.pt")
        for damage, words in STOPS.items():
            proxy.damage, proxy.asked = damage, []
            for code, said in pool.run(run_train, argv, ranks=2, timeout=240):
                assert code == 1 and all(word in said for word in words), said
            assert complete_iterations(run) == [1]
        good, proxy.damage, proxy.asked = dict(proxy.intact), None, []
        results = pool.run(run_train, argv, ranks=2, timeout=240)
        assert [code for code, _ in results] == [0, 0], results
    assert sorted(good) == [*range(16), 16, 20, 24, 28]
    assert sorted(proxy.asked) == [i for i in range(16, 32) if i not in good]
    trained = {s.sample_id: s for rank in range(2) for s in torch.load(rollouts / f"1_{rank}.pt", weights_only=False)}
    assert sorted(trained) == list(range(16, 32))
    assert all(trained[i].tokens[trained[i].prompt_length:].tolist() == good[i] for i in good if i in trained)
    metrics = metrics_of(run)
    assert sorted(metrics) == [1, 2] and all(m["routing/fallback"] == 0 and m["ratio_max"] == 1 for m in metrics.values())
