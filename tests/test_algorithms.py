from dataclasses import fields
from pathlib import Path

import pytest

from megatron_grpo.algorithms import SECTIONS, axes, describe, list_algorithms, papers, recipe_config
from megatron_grpo.config import GRPOConfig, LossConfig
from megatron_grpo.hooks import HookConfig
from megatron_grpo.recipes import RECIPES
from megatron_grpo.settings import ConfigError, flag, takes_none
from tests.algorithm_flags import parse, parser, resolve

DOCS = Path(__file__).parents[1] / "docs"
GDPO = " --gdpo-reward-keys a b"


def flags_of(name):
    return f"--algorithm {name}" + GDPO * (name == "gdpo")


def test_without_flags_the_defaults():
    assert resolve() == GRPOConfig()


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_sets_every_value_that_it_quotes(name):
    args = parse(flags_of(name))
    config = resolve(flags_of(name))
    settings = {k: v for section in SECTIONS for k, v in vars(getattr(config, section)).items()}
    for c in RECIPES[name].constants:
        assert settings[c.setting] == (c.value(args) if callable(c.value) else c.value), c
        assert c.where and c.quote
    assert recipe_config(name, response_len=1000).loss == config.loss


@pytest.mark.parametrize("name, expected", {
    "dapo": dict(eps_clip=0.2, eps_clip_high=0.28, reducer="token_mean", overlong_buffer_len=200, overlong_filter=True),
    "gspo": dict(ratio="sequence", eps_clip=3e-4, eps_clip_high=4e-4, reducer="seq_mean_token_mean", use_kl_loss=False),
    "cispo": dict(surrogate="cispo", eps_clip=1.0, eps_clip_high=4.0, reducer="token_mean"),     # weights in [0, 5]
    "dr_grpo": dict(advantage_std="none", reducer="seq_mean_token_sum_norm", loss_norm_length=1000),
    "rloo": dict(advantage_estimator="rloo", ratio="none", surrogate="reinforce", kl_coef=0.03),
    "icepop": dict(use_tis=True, tis_mode="icepop", tis_clip_low=0.5, tis_clip=5.0),
    "deepseek_v32": dict(use_opsm=True, use_unbiased_kl=True, advantage_std="none"),
}.items())
def test_constants_of_the_papers(name, expected):
    args = parse(flags_of(name))
    from megatron_grpo.algorithms import resolve_algorithm
    resolve_algorithm(args)
    assert {k: getattr(args, k) for k in expected} == expected


def test_a_given_flag_overrides_the_recipe():
    config = resolve("--algorithm dapo --eps-clip-high 0.5 --no-overlong-filter --overlong-buffer-len 0 --reducer prompt_mean")
    assert (config.loss.eps_clip, config.loss.eps_clip_high, config.loss.reducer) == (0.2, 0.5, "prompt_mean")
    assert not config.reward.overlong_filter and config.reward.overlong_buffer_len == 0
    assert resolve("--algorithm clip_cov --eps-clip-c none").loss.eps_clip_c is None
    assert resolve("--algorithm clip_cov").loss.eps_clip_c == 10.0
    assert resolve("--algorithm grpo --no-use-kl-loss").kl.kl_loss_coef == 0
    assert resolve("--algorithm grpo --kl-loss-coef 0.1").kl.kl_loss_coef == 0.1


def test_none_is_taken_where_the_help_says_so(capsys):
    for cls in SECTIONS.values():
        for field in fields(cls):
            said = next(a.help for a in parser()._actions if a.dest == field.name)
            assert ("takes none" in said) == takes_none(cls, field.name)
            if field.type in ("float", "int", float, int):
                with pytest.raises(SystemExit):
                    parse(f"{flag(field.name)} none")
            elif takes_none(cls, field.name):
                assert getattr(parse(f"{flag(field.name)} none"), field.name) is None
    assert takes_none(LossConfig, "eps_clip_c") and not takes_none(LossConfig, "eps_clip")


def test_namespace_is_complete_afterwards():
    args = parse("--algorithm gspo")
    assert not hasattr(args, "eps_clip")
    from megatron_grpo.algorithms import resolve_algorithm
    resolve_algorithm(args)
    assert (args.eps_clip, args.tis_clip, args.advantage_estimator, args.algorithm) == (3e-4, 2.0, "grpo", "gspo")


def test_spellings_of_slime():
    assert resolve("--advantage-estimator gspo") == resolve("--algorithm gspo")
    cispo = resolve("--advantage-estimator cispo --eps-clip 0.2 --eps-clip-high 0.28")
    assert (cispo.loss.surrogate, cispo.loss.eps_clip, cispo.loss.eps_clip_high) == ("cispo", 0.2, 0.28)
    assert cispo.advantage.advantage_estimator == "grpo"
    assert resolve("--advantage-estimator grpo --disable-grpo-std-normalization").advantage.group_std == "none"
    assert resolve("--calculate-per-token-loss").loss.reducer == "token_mean"
    assert resolve("--calculate-per-token-loss --reducer prompt_mean").loss.reducer == "prompt_mean"
    assert resolve("--calculate-per-token-loss --algorithm gspo").loss.reducer == "seq_mean_token_mean"
    slime_script = "--advantage-estimator grpo --use-kl-loss --kl-loss-coef 0.00 --kl-loss-type low_var_kl --entropy-coef 0.00 " \
                   "--eps-clip 0.2 --eps-clip-high 0.28"
    assert resolve(slime_script).kl.kl_loss_type == "low_var_kl"


@pytest.mark.parametrize("words, message", [
    ("--algorithm rloo --advantage-estimator gspo", "stands for --algorithm gspo and contradicts --algorithm rloo: drop one of them"),
    ("--disable-grpo-std-normalization --advantage-std sample", "--disable-grpo-std-normalization contradicts --advantage-std sample"),
])
def test_contradicting_spellings(words, message):
    with pytest.raises(ConfigError, match=message):
        resolve(words)


def test_start_up_prints_the_axes():
    text = describe(resolve("--algorithm icepop --kl-coef 0.1 --overlong-buffer-len 100"), "icepop")
    for words in ("grpo / (sample std + 1e-06)", "ppo eps 0.2 / 0.2", "0.1 k1 in the reward", "icepop [0.5, 5]", "overlong ramp 100"):
        assert words in text
    assert set(axes(GRPOConfig())) == {"baseline", "ratio", "clip", "reducer", "kl", "correction", "rewards"}


def test_hooks_stand_in_their_axes():
    """In place of what each replaces; what it leaves is still told."""
    hooks = HookConfig(custom_pg_loss_path="p.f", custom_pg_loss_reducer_path="r.f", custom_advantage_function_path="a.f",
                       custom_tis_function_path="t.f", custom_reward_post_process_path="s.f")
    found = axes(resolve("--use-tis --rejection token_k3=..1 --entropy-coef 0.1 --overlong-filter"), hooks)
    assert found == dict(baseline="a.f, given grpo / (sample std + 1e-06)", ratio="of its own", clip="p.f", kl="none",
                         reducer="r.f; of entropy: seq_mean_token_mean", correction="t.f; token_k3=..1", rewards="s.f; truncated masked")
    assert "  reducer    r.f\n" in describe(resolve(), None, hooks)


def test_list_has_every_algorithm_with_its_axes():
    text = list_algorithms()
    for name, recipe in RECIPES.items():
        assert f"{name}: {recipe.title}" in text
    assert text.count("  ratio ") == text.count("  reducer ") == len(RECIPES)


def test_papers_page_is_current():
    assert (DOCS / "papers.md").read_text() == papers(), "run: python -m megatron_grpo.algorithms > docs/papers.md"
    for name in RECIPES:
        assert f"## `{name}`" in papers()




def test_every_recipe_flag_exists():
    names = {n for cls in SECTIONS.values() for n in cls.__dataclass_fields__}
    for recipe in RECIPES.values():
        for c in recipe.constants:
            assert c.setting in names, flag(c.setting)
