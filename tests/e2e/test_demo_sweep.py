"""The demo's job for two steps with every algorithm and with every example hook: its model, its flags, a real server."""

import json
import math
from pathlib import Path

import pytest
import torch

from examples import demo
from megatron_grpo.recipes import RECIPES
from megatron_grpo.rollout.server import LocalServer
from tests.e2e.run import run_train

pytestmark = pytest.mark.engine
HERE, HOOKS = Path(__file__).parent, Path(demo.__file__).parent / "hooks"
REWARD = ["--custom-rm-path", f"{HERE}/reward.py:even_tokens"]        # untrained weights seldom solve the demo's task
TWO_REWARDS = ["--custom-rm-path", f"{HERE}/reward.py:two_rewards", "--gdpo-reward-keys", "even", "short"]
EXTRA = {"gdpo": TWO_REWARDS}
CASES = {name: ["--algorithm", name, *EXTRA.get(name, REWARD)] for name in RECIPES} | {
    "hook " + name: ["--algorithm", "grpo", *REWARD, *[word.format(HOOKS) for word in words.split()]] for name, words in {
        "pg_loss": "--custom-pg-loss-path {}/pg_loss.py:ppo_with_positive_nll",
        "reducer": "--custom-pg-loss-reducer-path {}/reducer.py:sqrt_length",
        "advantage": "--custom-advantage-function-path {}/advantage.py:mean_normalized",
        "tis": "--custom-tis-function-path {}/tis.py:two_sided",
        "reward_post_process": "--custom-reward-post-process-path {}/reward_post_process.py:shorter_is_better",
        "sampling_filter": "--dynamic-sampling-filter-path {}/sampling_filter.py:neither_easy_nor_hopeless",
        "rollout": "--rollout-function-path {}/rollout.py:think_twice --rollout-max-response-len 12",
        "rm": "--custom-rm-path {}/rm.py:answer_and_format --reward-key format",
        "slime reducer": "--custom-pg-loss-reducer-function-path {}/slime_style.py:get_dr_grpo_reducer",
        "slime advantage": "--custom-advantage-function-path {}/slime_style.py:rewards_less_kl",
        "slime tis": "--custom-tis-function-path {}/slime_style.py:clip_both_ends --use-tis",
    }.items()}


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """Flags of the demo's GRPO run, shortened, against one server that is started once."""
    import transformers
    model = demo.make_model(tmp_path_factory.mktemp("demo") / "model")
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(model)).float().save_pretrained(model)
    with LocalServer(model) as server:
        flags = [word for word in demo.GRPO if word not in ("--sglang-launch", "local")]
        flags[flags.index("--rollout-batch-size") + 1], flags[flags.index("--n-samples-per-prompt") + 1] = "4", "4"
        yield [*demo.COMMON, *flags, "--hf-checkpoint", str(model), "--sglang-urls", server.url, "--train-iters", "2",
               "--eval-num-prompts", "0"]


@pytest.mark.parametrize("case", CASES)
def test_two_steps(pool, job, tmp_path, case):
    results = pool.run(run_train, [*job, *CASES[case], "--run-dir", str(tmp_path)], ranks=2, timeout=200)
    assert [code for code, _ in results] == [0, 0], results
    lines = [json.loads(line)["metrics"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    steps = [m for m in lines if "loss" in m]
    assert len(steps) == 2 and all(math.isfinite(m["loss"]) and math.isfinite(m["grad_norm"]) for m in steps)
    assert all(m["grad_norm"] > 0 for m in steps) or case == "hook rm"        # no numbers in the demo's alphabet: every reward is 0
    assert all(m.get("mismatch_k3", 0) < 1e-8 for m in steps)                 # bypass mode has no old log-probs to compare
