import argparse
import asyncio

import pytest
import torch

from megatron_grpo.hooks import HookConfig, HookError, load_function, load_hooks
from megatron_grpo.settings import ConfigError, add_arguments, flag, from_namespace

ARGS = argparse.Namespace(calculate_per_token_loss=False)


def hook_file(tmp_path, text):
    path = tmp_path / "mine.py"
    path.write_text(text)
    return path


def load(path, name, setting):
    return load_hooks(HookConfig(**{setting: f"{path}:{name}"}), ARGS)


def test_flags_and_alias():
    parser = argparse.ArgumentParser()
    add_arguments(parser, "hooks", HookConfig)
    assert from_namespace(HookConfig, parser.parse_args([])) == HookConfig()
    words = ["--custom-pg-loss-reducer-function-path", "a.b", "--custom-rm-path", "c.d"]
    assert from_namespace(HookConfig, parser.parse_args(words)) == HookConfig(custom_pg_loss_reducer_path="a.b", custom_rm_path="c.d")


def test_both_forms_of_a_path(tmp_path):
    import math
    assert load_function("math.hypot", "--x") is math.hypot
    path = hook_file(tmp_path, "from dataclasses import dataclass\n@dataclass\nclass D:\n    x: int\ndef f(): return D(3)\n")
    assert load_function(f"{path}:f", "--x")().x == 3
    assert load_function(f"{path}:f", "--x") is load_function(f"{path}:f", "--y")       # one module, however often it is named


def test_files_of_similar_paths_are_two_modules(tmp_path):
    paths = [tmp_path / "a_b" / "c.py", tmp_path / "a" / "b_c.py"]
    for i, path in enumerate(paths):
        path.parent.mkdir()
        path.write_text(f"def f(): return {i}\n")
    assert [load_function(f"{path}:f", "--x")() for path in paths] == [0, 1]


@pytest.mark.parametrize("path, message", [
    ("f", "--x f: give pkg.mod.function or file.py:function"),
    ("no_such_package.f", "--x no_such_package.f: cannot import no_such_package: ModuleNotFoundError"),
    ("/nowhere/mine.py:f", "cannot import /nowhere/mine.py: FileNotFoundError: no file"),
    ("math.no_such", "math has no 'no_such'; it has"),
    ("math.pi", "pi is a float, not a function"),
])
def test_wrong_path(path, message):
    with pytest.raises(HookError, match=message):
        load_function(path, "--x")


def test_error_in_the_file_is_told(tmp_path):
    path = hook_file(tmp_path, "import no_such_package\n")
    for _ in range(2):
        with pytest.raises(HookError, match="ModuleNotFoundError: No module named 'no_such_package'"):
            load_function(f"{path}:f", "--x")


@pytest.mark.parametrize("setting, expected", [
    ("custom_pg_loss_path", "expected fn(inputs, config)"),
    ("custom_pg_loss_reducer_path", "expected fn(loss_T, inputs), or slime's fn(total_lengths, response_lengths, loss_masks"),
    ("custom_advantage_function_path", "expected fn(inputs, config), or slime's fn(args, rollout_data)"),
    ("custom_tis_function_path", "expected fn(loss_T, inputs, config), or slime's fn(args, *, pg_loss"),
    ("custom_rm_path", "expected fn(args, sample)"),
    ("custom_reward_post_process_path", "expected fn(args, samples)"),
    ("dynamic_sampling_filter_path", "expected fn(args, samples)"),
    ("rollout_function_path", "expected fn(args, episode)"),
])
def test_wrong_signature(tmp_path, setting, expected):
    path = hook_file(tmp_path, "def f(one, two, three, four, five): pass\n")
    with pytest.raises(HookError) as error:
        load(path, "f", setting)
    assert flag(setting) in str(error.value) and str(path) in str(error.value) and expected in str(error.value)
    assert isinstance(error.value, ConfigError)


def test_rollout_function_must_be_async(tmp_path):
    path = hook_file(tmp_path, "def f(args, episode): pass\n")
    with pytest.raises(HookError, match="write it as `async def f"):
        load(path, "f", "rollout_function_path")


class Inputs:
    """As much of LossInputs as the checks look at."""

    logp_T = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    mask_T = torch.tensor([True, True, False])
    seq_T = torch.zeros(3, dtype=torch.int64)


BAD = {
    "custom_pg_loss_path": ("pg_loss", (Inputs, None), {
        "return None": "loss_T is a NoneType, expected a tensor of shape (3,)",
        "return inputs.logp_T[:2]": "loss_T has shape (2,), expected (3,)",
        "return inputs.logp_T.bfloat16()": "loss_T has dtype torch.bfloat16, expected float32",
        "return inputs.logp_T / torch.tensor([1.0, 0.0, 1.0])": "loss_T of shape (3,) is not finite at 1 of the 2 tokens with mask 1; "
                                                                "the first is position 1",
        "return inputs.logp_T.detach()": "loss_T has no gradient",
        "from megatron_grpo.hooks import PgLossOutput; return PgLossOutput(inputs.logp_T, {'m': 3.0})": "metric 'm' must be a pair",
    }),
    "custom_pg_loss_reducer_path": ("reducer", (Inputs.logp_T, Inputs), {
        "return loss_T": "returned (3,) for loss_T of shape (3,), expected a scalar tensor",
        "return 1.0": "returned float for loss_T of shape (3,)",
        "return loss_T.sum() * float('nan')": "returned nan for loss_T of shape (3,), expected a finite number",
        "return loss_T.detach().sum()": "the result has no gradient",
    }),
    "custom_tis_function_path": ("tis", (Inputs.logp_T, Inputs, None), {
        "return loss_T": "returned a Tensor, expected a TisOutput",
        "from megatron_grpo.hooks import TisOutput; return TisOutput(loss_T, torch.ones(3))": "mask_T is torch.float32 of shape (3,), "
                                                                                              "expected bool of shape (3,)",
        "from megatron_grpo.hooks import TisOutput; return TisOutput(loss_T[:1], inputs.mask_T)": "loss_T has shape (1,), expected (3,)",
    }),
    "custom_advantage_function_path": ("advantage", (Inputs, None), {
        "return [1.0]": "advantage_T is a list, expected a tensor of shape (3,)",
        "return torch.full((3,), float('inf'))": "advantage_T of shape (3,) is not finite at 2 of the 2 tokens with mask 1",
    }),
}
ARGUMENTS = dict(custom_pg_loss_path="inputs, config", custom_pg_loss_reducer_path="loss_T, inputs",
                 custom_tis_function_path="loss_T, inputs, config", custom_advantage_function_path="inputs, config")


@pytest.mark.parametrize("setting", BAD)
def test_wrong_result_names_the_hook_and_the_shapes(tmp_path, setting):
    member, arguments, bodies = BAD[setting]
    for number, (body, message) in enumerate(bodies.items()):
        path = tmp_path / f"{setting}{number}.py"
        path.write_text(f"import torch\ndef f({ARGUMENTS[setting]}):\n    {body}\n")
        hook = getattr(load(path, "f", setting), member)
        with pytest.raises(HookError) as error:
            hook(*arguments)
        assert message in str(error.value) and f"{flag(setting)} {path}:f" in str(error.value), str(error.value)


def test_what_stands_under_the_mask_is_free(tmp_path):
    path = hook_file(tmp_path, "import torch\ndef f(inputs, config): return inputs.logp_T * torch.tensor([1.0, 1.0, float('nan')])\n")
    assert load(path, "f", "custom_pg_loss_path").pg_loss(Inputs, None).loss_T.isnan().tolist() == [False, False, True]


@pytest.mark.parametrize("body, message", [
    ("return 'good'", "reward 'reward' is 'good' of type str, expected a number"),
    ("return float('nan')", "reward 'reward' is nan, expected a finite number"),
    ("return {'a': 1.0, 'b': None}", "reward 'b' is None of type NoneType, expected a number"),
    ("return {}", "returned an empty dict, expected at least one named reward"),
])
def test_wrong_rewards(tmp_path, body, message):
    path = hook_file(tmp_path, f"def f(args, sample):\n    {body}\n")
    with pytest.raises(HookError, match=message):
        asyncio.run(load(path, "f", "custom_rm_path").rm(object()))


def test_rewards_of_a_whole_group(tmp_path):
    path = hook_file(tmp_path, "async def f(args, samples): return [1, True]\n")
    rm = load(path, "f", "custom_rm_path").rm
    assert rm.group and asyncio.run(rm(["a", "b"])) == [{"reward": 1.0}, {"reward": 1.0}]
    with pytest.raises(HookError, match="returned a list of length 2 for 3 samples, expected a list of 3"):
        asyncio.run(rm(["a", "b", "c"]))


def test_wrong_post_process_and_filter(tmp_path):
    path = hook_file(tmp_path, "def short(args, samples): return [1.0]\ndef slime(args, samples): return [0, 0], [3, 4]\n"
                               "def none(args, samples): return None\ndef boolean(args, samples): return len(samples) > 1\n")
    samples = [argparse.Namespace(sample_id=i) for i in range(2)]
    with pytest.raises(HookError, match="reward is a list of length 1, expected 2 numbers"):
        load(path, "short", "custom_reward_post_process_path").reward_post_process(samples)
    out = load(path, "slime", "custom_reward_post_process_path").reward_post_process(samples)      # (raw, advantages), as in slime
    assert out.reward == [3, 4] and out.is_advantage
    with pytest.raises(HookError, match="returned a NoneType for 2 samples, expected a FilterOutput or a bool"):
        load(path, "none", "dynamic_sampling_filter_path").sampling_filter(samples)
    assert load(path, "boolean", "dynamic_sampling_filter_path").sampling_filter(samples).keep
