"""The recipes of examples/recipes: their flags, their layout, and the memory that a dry run expects of them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron_grpo import train
from megatron_grpo.algorithms import axes
from megatron_grpo.parallel.layout import Layout
from megatron_grpo.routing.placement import place
from megatron_grpo.trainer import memory
from megatron_grpo.trainer.dry_run import plan, render
from tests.weights.published import parameters

RECIPES = Path(__file__).parents[2] / "examples" / "recipes"
# published sizes: name -> (parameters, active for a token), billions, of the models' cards
MODELS = {"qwen3-30b-a3b": (30.5, 3.3), "qwen3-235b-a22b": (235, 22), "deepseek-v3": (671, 37), "kimi-k2": (1026, 32), "glm-4.5-air": (106, 12)}


def flags_of(name: str) -> tuple[int, list[str]]:
    """(GPUs, flags) of a recipe, as bash sees them."""
    script = f'set -eu; source "{RECIPES}/{name}.sh"; printf "%s\\0" "$GPUS" "${{RECIPE[@]}}"'
    words = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True, timeout=60).stdout.split("\0")[:-1]
    return int(words[0]), words[1:]


@pytest.fixture(scope="module")
def plans():
    patch = pytest.MonkeyPatch()
    patch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    found = {}
    for name in MODELS:
        gpus, flags = flags_of(name)
        patch.setenv("WORLD_SIZE", str(gpus))
        found[name] = plan(["--hf-checkpoint", str(RECIPES / name), "--save", "runs/plan", *flags])
    patch.undo()
    return found


def test_every_recipe_is_tested():
    assert {p.name for p in RECIPES.iterdir() if p.is_dir()} == set(MODELS) == {p.stem for p in RECIPES.glob("*.sh")} - {"common", "dry_run"}


@pytest.mark.parametrize("name", MODELS)
def test_flags_are_accepted_and_the_plan_fits(plans, name):
    found = plans[name]
    assert found.refusals == []
    assert found.memory[found.fullest].total < 0.8 * 80e9       # the rest is for one layer's activations and communication
    layers = [n for stage in found.stages for n in stage.layers]
    assert layers == list(range(found.args.num_layers)) and (found.stages[0].first, found.stages[-1].last) == (True, True)
    assert found.args.world_size == found.args.data_parallel_size * 8 * found.args.pipeline_model_parallel_size
    text = render(found)
    assert all(f"{axis:<11}{value}" in text for axis, value in axes(found.args.grpo.algorithm).items())
    assert "R3" in text and "refused     nothing" in text


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_those_of_the_model(plans, name):
    """Against the published sizes, and exactly against the Hugging Face model without its multi-token-prediction layer."""
    total, active = MODELS[name]
    args = plans[name].args
    assert memory.model_parameters(args) / 1e9 == pytest.approx(total, rel=0.01)
    assert memory.active_parameters(args) / 1e9 == pytest.approx(active, rel=0.13)
    padding = 2 * (args.padded_vocab_size - args.vocab_size) * args.hidden_size
    assert memory.model_parameters(args) - padding == parameters(json.loads((RECIPES / name / "config.json").read_text()))


@pytest.mark.parametrize("name", MODELS)
def test_memory_agrees_with_megatrons_own_estimate(plans, name):
    found = plans[name]
    assert max(m.model_and_optimizer for m in found.memory) == pytest.approx(found.megatron, rel=0.1)


def test_routes_are_those_that_a_rank_is_sent(plans):
    found = plans["deepseek-v3"]
    args, tokens = found.args, memory.tokens_per_gpu(found.args)
    layout = Layout((tokens * args.context_parallel_size,), cp_size=args.context_parallel_size, tp_size=args.tensor_model_parallel_size)
    routes = np.tile(np.arange(8, dtype=np.int16), (tokens * args.context_parallel_size - 1, 58, 1))
    share = place([routes], layout, columns=range(4, 12), topk=8, num_experts=256)
    assert found.memory[1].routes == share.nbytes


# ---- what a dry run refuses ----------------------------------------------------------------------------------------------


def refused(capsys, *flags):
    """(exit code, what is printed) of a dry run of the smallest recipe with further flags."""
    code = train.main(["--dry-run", "--hf-checkpoint", str(RECIPES / "qwen3-30b-a3b"), "--save", "runs/plan",
                       *flags_of("qwen3-30b-a3b")[1], *flags])
    return code, capsys.readouterr().out


@pytest.fixture
def connections(monkeypatch):
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    monkeypatch.delenv("WORLD_SIZE", raising=False)


def test_every_refusal_is_listed(capsys, connections):
    """Ours by the class, the algorithm's, the model's and the hooks', all in one run."""
    code, said = refused(capsys, "--rollout-batch-size", "0", "--eps-clip", "-1", "--kl-loss-coef", "3", "--hidden-size", "77",
                         "--rollout-temperature", "0", "--custom-rm-path", "no.such.module.f")
    lines = said.split("refused     ")[1:]
    for words in ("--rollout-batch-size 0", "--eps-clip -1", "--kl-loss-coef", "--hidden-size gives hidden_size = 77"):
        assert any(words in line for line in lines), said
    assert code == 2 and len(lines) >= 4
    code, said = refused(capsys, "--moe-router-fusion", "--moe-input-jitter-eps", "0.1", "--custom-rm-path", "no.such.module.f")
    assert code == 2 and [word for line in said.split("refused     ")[1:] for word in line.split() if word.startswith("--")][:3] == [
        "--custom-rm-path", "--moe-router-fusion:", "--moe-input-jitter-eps:"], said


def test_hooks_are_checked_beside_refused_settings_and_named_in_their_axes(capsys, connections):
    _, said = refused(capsys, "--rollout-temperature", "0", "--custom-rm-path", "no.such.module.f")
    assert "refused     --rollout-temperature 0" in said and "refused     --custom-rm-path no.such.module.f" in said
    reducer = f"{RECIPES.parent}/hooks/reducer.py:sqrt_length"
    code, said = refused(capsys, "--custom-pg-loss-reducer-path", reducer)
    assert code == 0 and f"  reducer    {reducer}\n" in said


@pytest.mark.parametrize("row, flags, message", [
    (None, [], "--prompt-data {path}: no such file"),
    ("", [], "--prompt-data {path}: holds no prompt"),
    ('{"prompt": "1+1", "answer": "2"}', [], "--prompt-data {path}, line 1: no key 'label'; set --label-key to one of the keys found"),
    ('{"prompt": "1+1", "label": "2"}', ["--input-key", "input"], "--prompt-data {path}, line 1: no key 'input'; set --input-key"),
    ('{"prompt": "1+1", "label": "2"}\nnot read', [], "nothing")])
def test_the_first_prompt_is_read(capsys, connections, tmp_path, row, flags, message):
    path = tmp_path / "prompts.jsonl"
    if row is not None:
        path.write_text(row)
    code, said = refused(capsys, "--prompt-data", str(path), *flags)
    assert f"refused     {message.format(path=path)}" in said and (code == 0) == (message == "nothing")


def test_rewards_that_no_label_could_give(connections, tmp_path):
    (tmp_path / "prompts.jsonl").write_text('{"input": "1+1", "label": "2"}')
    flags = ["--hf-checkpoint", str(RECIPES / "qwen3-30b-a3b"), "--prompt-data", str(tmp_path / "prompts.jsonl")]
    for more, words in ((["--rm-type", "exact"], "--rm-type exact compares the response with the label"),
                        (["--loss-type", "sft"], "--loss-type sft learns the labels")):
        assert any(words in text and "--label-key" in text for text in plan([*flags, *more]).refusals)
        assert not any("--label-key" in text for text in plan([*flags, *more, "--label-key", "label"]).refusals)
    for more in (["--custom-rm-path", f"{RECIPES.parent}/hooks/rm.py:f"], ["--rm-type", "exact", "--load-debug-rollout-data", "x"]):
        assert not any("--label-key" in text for text in plan([*flags, *more]).refusals)


def test_megatrons_own_reinforcement_learning_is_refused(capsys, connections):
    code, said = refused(capsys, "--grpo-clamp-eps-lower", "0.2", "--perform-rl-step")
    assert code == 2 and "refused     --grpo-clamp-eps-lower belongs to Megatron's own RL and would have no effect: give --eps-clip\n" in said
    assert "refused     --perform-rl-step belongs to Megatron's own RL and would have no effect: drop it" in said


def test_megatrons_own_refusals_are_among_them(capsys, connections):
    code, said = refused(capsys, "--pipeline-model-parallel-size", "5")
    assert code == 2 and "refused     Megatron refuses the flags: Number of layers should be divisible" in said


def test_the_fewest_gpus_of_a_layout(capsys, connections):
    code, said = refused(capsys, "--pipeline-model-parallel-size", "2", "--num-virtual-stages-per-pipeline-rank", "2")
    assert code == 0 and "16 GPUs = TP 4 with sequence parallelism x CP 2 x PP 2 x 2 virtual x DP 1; experts: EP 8 x ETP 1 x DP 1" in said
    assert "(0-11, 24-35), embedding" in said and "(12-23, 36-47), output" in said


def test_the_script_prints_the_plan():
    done = subprocess.run([RECIPES / "dry_run.sh"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and sorted(done.stderr.split()[1:]) == sorted(MODELS)
    done = subprocess.run([RECIPES / "dry_run.sh", "glm-4.5-air", "--use-kl-loss"], capture_output=True, text=True, timeout=300,
                          env=os.environ | {"PYTHON": sys.executable})
    assert done.returncode == 0 and "64 GPUs" in done.stdout and "on the host, a rank: reference" in done.stdout, done.stderr


def test_configs_are_readable_json():
    for name in MODELS:
        assert json.loads((RECIPES / name / "config.json").read_text())["torch_dtype"] == "bfloat16"


@pytest.mark.parametrize("name", MODELS)
def test_servers_of_fp8_models_keep_plain_weights(name):
    from megatron_grpo.rollout.server_check import PLAIN_WEIGHTS
    done = subprocess.run(["bash", "-c", f'source "{RECIPES}/{name}.sh"; printf "%s\\0" $SERVER_ARGS'], capture_output=True, text=True, timeout=60)
    fp8 = "quantization_config" in json.loads((RECIPES / name / "config.json").read_text())
    assert (" ".join(PLAIN_WEIGHTS) in " ".join(done.stdout.split("\0"))) == fp8 == (name in ("deepseek-v3", "kimi-k2"))


def table_row(name: str, found) -> str:
    """A recipe's line of docs/recipes.md."""
    args, m, last = found.args, found.memory[found.fullest], found.memory[-1]
    layout = (f"TP {args.tensor_model_parallel_size}, CP {args.context_parallel_size}, PP {args.pipeline_model_parallel_size}, "
              f"DP {args.data_parallel_size}, EP {args.expert_model_parallel_size}")
    sizes = [m.weights, m.gradients, m.optimizer, last.logits, m.layer_inputs, m.total, found.megatron]
    cells = [f"`{name}`", f"`{args.algorithm}`", str(args.world_size), layout, f"{memory.model_parameters(args) / 1e9:.1f} B",
             f"{m.parameters / 1e9:.2f} B", *(f"{size / memory.GIB:.1f}" for size in sizes)]
    return f"| {' | '.join(cells)} |"


def test_the_table_of_the_docs(plans):
    page = (RECIPES.parents[1] / "docs" / "recipes.md").read_text()
    missing = [row for name, found in plans.items() if (row := table_row(name, found)) not in page]
    assert not missing, "docs/recipes.md needs\n" + "\n".join(missing)
