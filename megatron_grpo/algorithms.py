"""The table of algorithms: a name stands for values of the settings, each with the place in the paper that says so.

    --algorithm gspo                        the paper's constants
    --algorithm gspo --eps-clip 1e-3        any flag that is given overrides them
    python -m megatron_grpo.algorithms      prints docs/papers.md

The table itself is in recipes.py. Without --algorithm the settings have their own defaults: GRPO without a KL, as slime runs it.
"""

import argparse
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from .config import AdvantageConfig, CorrectionConfig, GRPOConfig, KLConfig, LossConfig, RewardConfig
from .recipes import RECIPES
from .refusals import OUTSIDE, refuse
from .settings import ConfigError, flag, setting

if TYPE_CHECKING:
    from .hooks import HookConfig

SLIME_ESTIMATORS = ("gspo", "cispo")        # slime's --advantage-estimator names these, which are more than a baseline
SECTIONS = dict(advantage=AdvantageConfig, loss=LossConfig, kl=KLConfig, correction=CorrectionConfig, reward=RewardConfig)


@dataclass(frozen=True)
class AlgorithmChoice:
    algorithm: str | None = setting(None, "recipe of a paper, which sets the flags below; see --list-algorithms", choices=tuple(RECIPES))
    disable_grpo_std_normalization: bool = setting(False, "slime's spelling of --advantage-std none")


def resolve_algorithm(args: argparse.Namespace) -> GRPOConfig:
    """The algorithm that the flags ask for: class defaults, then the recipe, then what was given.

    Also sets every setting in `args`, where flags that were not given are missing.

    Args:
        args: parsed by `settings.add_arguments` from AlgorithmChoice and the classes of SECTIONS; flags of other rooms are
            looked at when there (refusals.OUTSIDE, Megatron's calculate_per_token_loss).

    Raises:
        ConfigError: contradictions, each with its fix.
    """
    names = [f.name for cls in SECTIONS.values() for f in fields(cls)]
    chosen = {n: tuple(v) if isinstance(v := getattr(args, n), list) else v for n in names if hasattr(args, n)}
    given = set(chosen)
    name = _name(args, chosen)
    values = {c.setting: c.value(args) if callable(c.value) else c.value for c in RECIPES[name].constants} if name else {}
    if args.disable_grpo_std_normalization:
        if chosen.get("advantage_std", "none") != "none":
            raise ConfigError(f"--disable-grpo-std-normalization contradicts --advantage-std {chosen['advantage_std']}: drop one of them")
        values["advantage_std"] = "none"
    if getattr(args, "calculate_per_token_loss", False) and name is None:
        values["reducer"] = "token_mean"        # what the flag means in slime; else it only says how Megatron scales gradients
    values |= chosen
    if not values.get("use_kl_loss") and "kl_loss_coef" not in given:
        values.pop("kl_loss_coef", None)        # --no-use-kl-loss takes the recipe's coefficient with it
    if values.get("reducer") == "seq_mean_token_sum_norm" and values.get("loss_norm_length") is None:
        values["loss_norm_length"] = getattr(args, "rollout_max_response_len", None)
    sections = {section: cls(**{f.name: values[f.name] for f in fields(cls) if f.name in values}) for section, cls in SECTIONS.items()}
    refuse(argparse.Namespace(**sections), given, {n: getattr(args, n) for n in OUTSIDE if hasattr(args, n)})
    args.algorithm = name
    for section in sections.values():
        vars(args).update(vars(section))
    return GRPOConfig(**sections)


def _name(args, chosen: dict) -> str | None:
    """The recipe; takes slime's estimator names for it out of `chosen`."""
    if chosen.get("advantage_estimator") not in SLIME_ESTIMATORS:
        return args.algorithm
    implied = chosen.pop("advantage_estimator")
    if args.algorithm not in (None, implied):
        raise ConfigError(f"--advantage-estimator {implied} stands for --algorithm {implied} and contradicts --algorithm {args.algorithm}: "
                          "drop one of them")
    return implied


# ---- what people read ---------------------------------------------------------------------------------------------------


def axes(config: GRPOConfig, hooks: "HookConfig | None" = None) -> dict[str, str]:
    """The four axes, then KL, correction and rewards, in words; a hook of `hooks` stands in place of what it replaces."""
    a, loss, kl, fix, reward = (getattr(config, name) for name in SECTIONS)
    baseline = [a.advantage_estimator]
    if a.group_std != "none":
        baseline.append(f"/ ({a.group_std} std + {a.advantage_eps:g})")
    if a.advantage_estimator == "gdpo":
        weights = a.gdpo_reward_weights or (1.0,) * len(a.gdpo_reward_keys)
        baseline.append("of " + ", ".join(f"{w:g} {k}" for k, w in zip(a.gdpo_reward_keys, weights, strict=True)))
        baseline.append(f"batch norm over {a.gdpo_batch_norm}")
    if a.kl_form == "return_to_go":
        baseline.append(f"returns, gamma {a.gamma:g}")
    if a.normalize_advantages:
        baseline.append("whitened")
    if a.advantage_clip is not None:
        baseline.append(f"clipped to {a.advantage_clip:g}")
    hook: dict[str, str] = {name: getattr(hooks, f"custom_{name}_path", None) or "" for name in (
        "advantage_function", "pg_loss", "pg_loss_reducer", "tis_function", "reward_post_process")}
    if hook["advantage_function"]:      # it is given what the baseline makes; whitening and clipping come after it
        baseline.insert(0, f"{hook['advantage_function']}, given")
    high = loss.eps_clip if loss.eps_clip_high is None else loss.eps_clip_high
    clip = {"sapo": f"tau {loss.sapo_tau_pos:g} / {loss.sapo_tau_neg:g}", "reinforce": "", "dro": f"beta {loss.dro_beta:g}",
            "kl_cov": f"share {loss.kl_cov_ratio:g}, coef {loss.kl_cov_coef:g}",
            "vespo": f"k {loss.vespo_k_pos:g} / {loss.vespo_k_neg:g}, lambda {loss.vespo_lambda_pos:g} / {loss.vespo_lambda_neg:g}",
            }.get(loss.surrogate, f"eps {loss.eps_clip:g} / {high:g}" + (f", dual {loss.eps_clip_c:g}" if loss.eps_clip_c else ""))
    norm = f" over {loss.loss_norm_length}" if loss.reducer == "seq_mean_token_sum_norm" else ""
    kls = []
    if kl.use_kl_loss:
        gradient = "weighted by pi/pi_old" if kl.use_unbiased_kl else kl.kl_gradient
        kls.append(f"{kl.kl_loss_coef:g} {kl.kl_loss_type} in the loss, {gradient}")
    if a.kl_coef:
        kls.append(f"{a.kl_coef:g} {kl.kl_loss_type} in the reward, {a.kl_form}")
    reducer = loss.reducer + norm
    if hook["pg_loss_reducer"]:
        rest = " and ".join(["KL"] * kl.use_kl_loss + ["entropy"] * (loss.entropy_coef != 0))
        reducer = hook["pg_loss_reducer"] + (f"; of {rest}: {reducer}" if rest else "")
    fixes = [hook["tis_function"]] if hook["tis_function"] else [f"{fix.tis_mode} [{fix.tis_clip_low:g}, {fix.tis_clip:g}]"] if fix.use_tis else []
    fixes += list(fix.rejection)
    fixes += [f"veto below {fix.rs_veto_threshold:g}"] if fix.rs_veto_threshold is not None else []
    fixes += [f"sequence error above {fix.seq_logprob_error_threshold:g}"] if fix.seq_logprob_error_threshold is not None else []
    fixes += [f"opsm {fix.opsm_delta:g}"] if fix.use_opsm else []
    fixes += ["old = rollout"] if fix.use_rollout_logprobs else []
    shaped = not hook["reward_post_process"]
    rewards = [] if shaped else [hook["reward_post_process"]]
    rewards += [f"x {reward.reward_scale:g}"] if shaped and reward.reward_scale != 1 else []
    rewards += [f"clipped to {reward.reward_clip:g}"] if shaped and reward.reward_clip is not None else []
    if shaped and reward.overlong_buffer_len:
        rewards.append(f"overlong ramp {reward.overlong_buffer_len}, factor {reward.overlong_penalty_factor:g}")
    rewards += ["truncated masked"] if reward.overlong_filter else []
    own_ratio = hook["pg_loss"] or loss.surrogate in ("gmpo", "dro", "vespo")
    words = dict(baseline=" ".join(baseline), ratio="of its own" if own_ratio else loss.ratio,
                 clip=hook["pg_loss"] or f"{loss.surrogate} {clip}".strip(), reducer=reducer, kl="; ".join(kls),
                 correction="; ".join(fixes), rewards="; ".join(rewards))
    return {axis: text or "none" for axis, text in words.items()}


def describe(config: GRPOConfig, name: str | None = None, hooks: "HookConfig | None" = None) -> str:
    """The resolved axes, for the start of a run."""
    lines = [f"algorithm   {name or 'defaults'}"] + [f"  {axis:<11}{text}" for axis, text in axes(config, hooks).items()]
    return "\n".join(lines)


def recipe_config(name: str, response_len: int = 8192, **changes) -> GRPOConfig:
    """A recipe as a config. GDPO gets two reward names unless `changes` gives others; `changes` are settings, like flags."""
    if name == "gdpo":
        changes.setdefault("gdpo_reward_keys", ("a", "b"))
    return resolve_algorithm(argparse.Namespace(algorithm=name, disable_grpo_std_normalization=False,
                                                rollout_max_response_len=response_len, **changes))


def list_algorithms() -> str:
    """Every recipe with its axes, at a response length of 8192 tokens."""
    blocks = [describe(recipe_config(name), f"{name}: {recipe.title}, {recipe.paper}") for name, recipe in RECIPES.items()]
    return "\n\n".join(blocks)


def papers() -> str:
    """docs/papers.md."""
    lines = ["# Algorithms and their papers", "",
             "Made by `python -m megatron_grpo.algorithms` from the table in `megatron_grpo/recipes.py`. `--algorithm NAME` sets these",
             "flags; any flag that is given overrides them. What a source leaves open has the default of `--help`.", ""]
    for name, recipe in RECIPES.items():
        lines += [f"## `{name}`: {recipe.title}", "", f"{recipe.paper}.{' ' + recipe.note if recipe.note else ''}", "",
                  "| flag | value | where | what it says |", "|---|---|---|---|"]
        for c in recipe.constants:
            value = "from `--rollout-max-response-len`" if callable(c.value) else f"`{c.value}`"
            lines.append("| " + " | ".join([f"`{flag(c.setting)}`", value, c.where, c.quote.replace("|", "\\|")]) + " |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    print(papers(), end="")
