"""Routing replay end to end with the real server: a GLM4-MoE, and an engine whose routes are damaged on their way."""

import json

import pytest
import torch
from safetensors import safe_open

from megatron_grpo.rollout.server import LocalServer
from tests.e2e.run import run_train
from tests.e2e.test_train import flags, prompts  # noqa: F401
from tests.rollout.tiny import tiny_glm4_moe

pytestmark = pytest.mark.engine


def metrics_of(run):
    """step -> metrics of its optimizer step."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["metrics"] for line in lines if "loss" in line["metrics"]}


def bias(directory):
    with safe_open(next(directory.glob("*.safetensors")), "pt") as file:
        return torch.stack([file.get_tensor(n) for n in sorted(file.keys()) if n.endswith("e_score_correction_bias")])


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
