"""Training against the real SGLang server: the whole loop, with routing replay, and an engine that dies in mid-step."""

import json
import re
import threading
import time
from pathlib import Path

import pytest

from megatron_grpo import report
from megatron_grpo.report.alerts import unchecked
from megatron_grpo.rollout.server import LocalServer
from tests.e2e.run import run_train
from tests.rollout.tiny import tiny_qwen3_moe

pytestmark = pytest.mark.engine
# charts of what this run does not do: dual clip and Clip-Cov, a reference, a correction; speeds are derived
OPTIONAL = {"clip_frac_dual", "clip_frac_cov", "ref_kl", "masked", "tis_clip_frac", "speed/rollout", "speed/train"}
RUN = """--platform cpu --algorithm grpo --no-use-kl-loss --seq-length 64 --lr 1e-3 --rollout-batch-size 4 --n-samples-per-prompt 4
--rollout-max-response-len 12 --use-dynamic-batch-size --max-tokens-per-gpu 128 --data-pad-size-multiplier 8 --ckpt-format torch_dist
--label-key label --rollout-stop-token-ids 7 --use-distributed-optimizer""".split()


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("train") / "prompts.jsonl"
    path.write_text("".join(json.dumps({"input": f"<t{5 + i}> <t{60 + i}> <t{100 + i}>", "label": "x"}) + "\n" for i in range(40)))
    return str(path)


def flags(model, prompts, *more):
    reward = str(Path(__file__).with_name("reward.py")) + ":even_tokens"
    return [*RUN, "--hf-checkpoint", str(model), "--prompt-data", prompts, "--custom-rm-path", reward, *map(str, more)]


def test_two_steps_with_routes(pool, prompts, tmp_path, sglang_server):
    """Published weights, replayed routes: the engine and the trainer agree to rounding, and the ratio is exactly 1."""
    model = tiny_qwen3_moe(tmp_path / "model")
    argv = flags(model, prompts, "--sglang-urls", sglang_server.url, "--train-iters", 2, "--save", tmp_path / "run",
                 "--expert-model-parallel-size", 2, "--eval-prompt-data", prompts, "--eval-num-prompts", 4, "--use-rollout-routing-replay")
    results = pool.run(run_train, argv, ranks=2, timeout=200)
    assert [code for code, _ in results] == [0, 0], results
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = {line["step"]: line["metrics"] for line in lines if "loss" in line["metrics"]}
    assert sorted(steps) == [1, 2]
    for metrics in steps.values():
        assert metrics["mismatch_k3"] < 1e-8
        assert metrics["ratio"] == 1 and metrics["ratio_max"] == 1
        assert metrics["routing/fallback"] == 0 and metrics["routing/router_mismatch"] < 0.01
        assert metrics["grad_norm"] > 0 and metrics["samples/count"] == 16
    assert sum("eval/accuracy" in line["metrics"] for line in lines) == 2
    assert "<html" in (tmp_path / "run" / "report.html").read_text()
    script = Path(report.__file__).with_name("report.js").read_text()
    drawn = {name for names in re.findall(r"metrics: \[([^]]*)\]", script) for name in re.findall(r'"([a-z_0-9/]+)"', names)}
    run = report.read_run(str(tmp_path / "run"))
    assert unchecked(run) == []                 # each rule of the report finds its metric under the name that the trainer writes
    assert len(drawn) > 20 and drawn - set(run.metrics) <= OPTIONAL, drawn - set(run.metrics)
    sample = json.loads((tmp_path / "run" / "samples" / "step_0000002.jsonl").read_text().splitlines()[0])
    assert abs(sample["tokens"][0]["old_logp"] - sample["tokens"][0]["rollout_logp"]) < 1e-3
    assert (tmp_path / "run" / "iter_0000002").is_dir()


def test_engine_dies_in_mid_step(pool, prompts, tmp_path):
    """Every rank ends with the engine's name, and nothing hangs."""
    model = tiny_qwen3_moe(tmp_path / "model")
    with LocalServer(model) as server:
        argv = flags(model, prompts, "--sglang-urls", server.url, "--train-iters", 200, "--eval-num-prompts", 0, "--sglang-down-timeout", 10,
                     "--rollout-health-check-interval", 1, "--run-dir", tmp_path / "run")
        killed = []

        def kill():
            log = tmp_path / "run" / "metrics.jsonl"
            while not (log.exists() and log.read_text().count("\n") >= 2):
                time.sleep(0.2)
            killed.append(time.monotonic())
            server.stop()

        threading.Thread(target=kill, daemon=True).start()
        results = pool.run(run_train, argv, ranks=2, timeout=240)
    assert killed and time.monotonic() - killed[0] < 60
    for code, said in results:
        assert code == 1 and server.url.split("//")[1] in said, said
