"""Bad input ends every rank with a message that names the thing and the fix, and a code that is not 0."""

import json
import socket

import pytest

from megatron_grpo import verify
from tests.e2e.run import run_train
from tests.rollout.tiny import tiny_qwen3_moe

BASE = ["--platform", "cpu", "--algorithm", "grpo", "--no-use-kl-loss", "--seq-length", "64", "--train-iters", "1", "--lr", "1e-3",
        "--rollout-max-response-len", "8", "--rm-type", "math", "--ckpt-format", "torch_dist"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(tiny_qwen3_moe(tmp_path_factory.mktemp("bad") / "model"))


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("bad") / "prompts.jsonl"
    path.write_text("".join(json.dumps({"input": "<t5> <t6>", "label": "1"}) + "\n" for _ in range(40)))
    return str(path)


def fails(pool, flags, *words, ranks=1):
    results = pool.run(run_train, [*BASE, *flags], ranks=ranks, timeout=60)
    for code, said in results:
        assert code not in (0, None), said
        assert all(word in said for word in words), said


def test_unknown_flag(pool, model):
    fails(pool, ["--hf-checkpoint", model, "--no-such-flag", "1"], "--no-such-flag")


def test_contradiction_on_every_rank(pool, model):
    fails(pool, ["--hf-checkpoint", model, "--kl-loss-coef", "0.1"], "--kl-loss-coef", "--use-kl-loss", ranks=2)


def test_prefix_rows_that_survive_an_update(pool, model):
    fails(pool, ["--hf-checkpoint", model, "--use-rollout-routing-replay", "--weight-sync-pause", "in_place", "--sglang-urls", "http://a:1"],
          "--weight-sync-pause in_place", "abort, drain or retract")


def test_warmup_without_an_end(pool, model):
    fails(pool, ["--hf-checkpoint", model, "--lr-warmup-iters", "5"], "--lr-warmup-iters 5", "--train-iters 1")


def test_two_engines(pool, model):
    fails(pool, ["--hf-checkpoint", model, "--sglang-urls", "http://a:1", "--sglang-launch", "local"], "--sglang-urls", "--sglang-launch")


def test_no_model(pool):
    fails(pool, [], "--hf-checkpoint")


def test_flag_against_the_model(pool, model):
    fails(pool, ["--hf-checkpoint", model, "--num-experts", "16"], "--num-experts", "16", "8")


def test_expert_dispatcher(pool, model):
    fails(pool, ["--hf-checkpoint", model, "--moe-token-dispatcher-type", "allgather"], "--moe-token-dispatcher-type", "alltoall")


def test_too_long_for_a_micro_batch(pool, tmp_path):
    flags = verify.prepare(str(tmp_path), ["--platform", "cpu", "--algorithm", "grpo", "--no-use-kl-loss"])
    (code, said), _ = pool.run(run_train, [*verify.without(flags, "--max-tokens-per-gpu"), "--max-tokens-per-gpu", "16"], ranks=2, timeout=60)
    assert code and "--max-tokens-per-gpu" in said and "sample 2" in said


def test_engine_not_reachable(pool, model, prompts):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    fails(pool, ["--hf-checkpoint", model, "--prompt-data", prompts, "--label-key", "label", "--sglang-urls", f"http://127.0.0.1:{port}",
                 "--sglang-start-timeout", "5"], f"127.0.0.1:{port}", ranks=2)


def test_missing_prompt_file(pool, model):
    fails(pool, ["--hf-checkpoint", model, "--prompt-data", "/no/such.jsonl", "--label-key", "label", "--sglang-urls", "http://a:1"],
          "--prompt-data", "/no/such.jsonl", ranks=2)


def test_wrong_key(pool, model, prompts):
    fails(pool, ["--hf-checkpoint", model, "--prompt-data", prompts, "--input-key", "question", "--label-key", "label", "--sglang-urls",
                 "http://a:1"], "question", "input")


def test_rewards_without_labels(pool, model, prompts):
    fails(pool, ["--hf-checkpoint", model, "--prompt-data", prompts, "--sglang-urls", "http://a:1"],
          "--rm-type math", "name the column", "--label-key")


def test_malformed_line(pool, model, tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"input": "<t5>", "label": "1"}\n{"input": \n')
    fails(pool, ["--hf-checkpoint", model, "--prompt-data", str(path), "--label-key", "label", "--sglang-urls", "http://a:1"], "bad.jsonl", "2")


@pytest.mark.engine
def test_engine_serves_another_vocabulary(pool, prompts, tmp_path, sglang_server):
    other = str(tiny_qwen3_moe(tmp_path / "other", vocab_size=640))
    fails(pool, ["--hf-checkpoint", other, "--prompt-data", prompts, "--label-key", "label", "--sglang-urls", sglang_server.url],
          "512", "640", ranks=2)
