"""Every value and pair of flags that cannot work, in one table, each with its fix.

A rule looks at the resolved settings. Rules of `UNUSED` look at what the user gave: a flag that nothing would read is
refused, so that nobody believes in a setting that does not act; values that a recipe sets are not.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, fields
from functools import partial
from types import SimpleNamespace
from typing import Any

from .settings import ConfigError, flag

OUTSIDE = dict(rollout_ahead=0, rollout_max_response_len=None, n_samples_per_prompt=None, num_steps_per_rollout=1,
               custom_pg_loss_path=None, custom_pg_loss_reducer_path=None, custom_tis_function_path=None,
               custom_reward_post_process_path=None, custom_advantage_function_path=None)
"""Settings of other rooms that rules look at, and what they are when unknown."""

GROUP_ESTIMATORS = ("grpo", "rloo", "reinforce_plus_plus_baseline", "gdpo", "opo", "gpg", "passk")
RATIO_CLIPPED = ("ppo", "cispo", "clip_cov")
CLIPPED = (*RATIO_CLIPPED, "gmpo", "dppo_tv", "dppo_kl")
OWN_RATIO = ("gmpo", "dro", "vespo")
MASKING_MODES = ("icepop", "seq_icepop", "seq_mask_tis", "geometric")


@dataclass(frozen=True)
class Rule:
    """flags: the settings that contradict. when: whether they do. why: the message; it ends with the fix, and {names} are values."""

    flags: tuple[str, ...]
    when: Callable[[Any], bool]
    why: str


@dataclass(frozen=True)
class Unused:
    """`flags` are refused, when given, unless `used`; `by` are the settings that decide."""

    flags: tuple[str, ...]
    by: tuple[str, ...]
    used: Callable[[Any], bool]
    why: str


def _outside(v, name, low, high=float("inf")):
    """Not None and not in (low, high]; NaN is outside."""
    value = getattr(v, name)
    return value is not None and not low < value <= high


def _negative(v, name):
    value = getattr(v, name)
    return value is not None and not value >= 0


def _compares_rollout(v, name):
    return v.use_rollout_logprobs and getattr(v, name) not in (None, ())


def _surrogate_in(v, names):
    return v.surrogate in names


def _positive(*names: str) -> list[Rule]:
    return [Rule((n,), partial(_outside, name=n, low=0), f"{flag(n)} {{{n}}}: give a number above 0") for n in names]


def _not_negative(*names: str) -> list[Rule]:
    return [Rule((n,), partial(_negative, name=n), f"{flag(n)} {{{n}}}: give 0 or more") for n in names]


WORDS = Rule((), lambda v: False, "a word that its setting does not know")

VALUES = [
    *_positive("advantage_clip", "reward_clip", "loss_norm_length", "sapo_tau_pos", "sapo_tau_neg", "dppo_ratio_max", "kl_input_clamp",
               "kl_output_clamp", "tis_clip", "vespo_k_pos", "vespo_k_neg", "vespo_lambda_pos", "vespo_lambda_neg"),
    *_not_negative("advantage_eps", "kl_coef", "kl_loss_coef", "eps_clip", "eps_clip_high", "tis_clip_low", "opsm_delta", "dro_beta",
                   "kl_cov_coef", "overlong_buffer_len", "overlong_penalty_factor"),
    Rule(("gamma",), lambda v: not 0 <= v.gamma <= 1, "--gamma {gamma}: give a discount in [0, 1]"),
    Rule(("reward_scale",), lambda v: v.reward_scale == 0, "--reward-scale 0 makes every reward 0: drop it"),
    Rule(("eps_clip_c",), lambda v: _outside(v, "eps_clip_c", 1),
         "--eps-clip-c {eps_clip_c} bounds the ratio from above where the advantage is negative: give a number above 1, such as 3"),
    Rule(("clip_cov_ratio",), lambda v: not 0 < v.clip_cov_ratio <= 1, "--clip-cov-ratio {clip_cov_ratio}: give a share in (0, 1]"),
    Rule(("kl_cov_ratio",), lambda v: not 0 < v.kl_cov_ratio <= 1, "--kl-cov-ratio {kl_cov_ratio}: give a share in (0, 1]"),
    Rule(("rs_veto_threshold",), lambda v: _outside(v, "rs_veto_threshold", 0, 1),
         "--rs-veto-threshold {rs_veto_threshold} is the smallest old/rollout that a token may have: give one in (0, 1], such as 1e-4"),
    Rule(("seq_logprob_error_threshold",), lambda v: _outside(v, "seq_logprob_error_threshold", 1),
         "--seq-logprob-error-threshold {seq_logprob_error_threshold} bounds the mean of exp|old - rollout|, which is at least 1: "
         "give more, such as 1.05"),
    Rule(("rejection",), lambda v: _bad_rejection(v.rejection) is not None, "{bad_rejection}"),
]

PAIRS = [
    # baseline and rewards
    Rule(("advantage_estimator", "reward_scale", "reward_clip", "stop_properly_penalty_coef"),
         lambda v: v.advantage_estimator == "gdpo" and (
             v.reward_scale != 1 or v.reward_clip is not None or v.stop_properly_penalty_coef is not None),
         "--advantage-estimator gdpo normalises raw rewards one by one, never their sum: drop --reward-scale, --reward-clip and "
         "--stop-properly-penalty-coef"),
    Rule(("advantage_estimator", "gdpo_reward_keys"), lambda v: v.advantage_estimator == "gdpo" and len(set(v.gdpo_reward_keys)) < 2,
         "--advantage-estimator gdpo normalises two or more different rewards one by one, and --gdpo-reward-keys names {gdpo_reward_keys}: "
         "name them, or use --advantage-estimator grpo, which is the same with one reward"),
    Rule(("gdpo_reward_keys", "gdpo_reward_weights"),
         lambda v: bool(v.gdpo_reward_weights) and len(v.gdpo_reward_weights) != len(v.gdpo_reward_keys),
         "--gdpo-reward-weights {gdpo_reward_weights} and --gdpo-reward-keys {gdpo_reward_keys} differ in number: give each key a weight"),
    Rule(("gdpo_reward_weights",), lambda v: bool(v.gdpo_reward_weights) and not any(v.gdpo_reward_weights),
         "--gdpo-reward-weights are all 0: no reward would count; give at least one other weight"),
    Rule(("gdpo_batch_norm", "normalize_advantages"),
         lambda v: v.advantage_estimator == "gdpo" and v.gdpo_batch_norm == "tokens" and v.normalize_advantages,
         "--gdpo-batch-norm tokens and --normalize-advantages do the same thing twice: drop --normalize-advantages"),
    Rule(("advantage_estimator", "overlong_buffer_len", "gdpo_reward_keys"),
         lambda v: v.advantage_estimator == "gdpo" and v.overlong_buffer_len > 0 and "overlong" not in v.gdpo_reward_keys,
         "--overlong-buffer-len adds a reward named overlong, and --advantage-estimator gdpo sees named rewards only: add overlong to "
         "--gdpo-reward-keys, or set --overlong-buffer-len 0"),
    Rule(("advantage_estimator", "n_samples_per_prompt"),
         lambda v: v.advantage_estimator in GROUP_ESTIMATORS and v.n_samples_per_prompt == 1 and v.singleton_advantage == "zero",
         "--advantage-estimator {advantage_estimator} compares samples of one prompt and --n-samples-per-prompt is 1, so that every "
         "advantage would be 0: raise --n-samples-per-prompt, or use --advantage-estimator reinforce or reinforce_plus_plus"),
    Rule(("overlong_buffer_len", "rollout_max_response_len"),
         lambda v: v.rollout_max_response_len is not None and v.overlong_buffer_len > v.rollout_max_response_len,
         "--overlong-buffer-len {overlong_buffer_len} is more than --rollout-max-response-len {rollout_max_response_len}: the ramp must "
         "fit in the response; lower the first"),
    # KL
    Rule(("kl_loss_coef", "use_kl_loss"), lambda v: v.kl_loss_coef != 0 and not v.use_kl_loss,
         "--kl-loss-coef {kl_loss_coef} has no effect without --use-kl-loss: add it, or drop the coefficient"),
    Rule(("kl_coef", "kl_loss_coef"), lambda v: v.kl_coef != 0 and v.use_kl_loss and v.kl_loss_coef != 0,
         "--kl-coef {kl_coef} (KL in the reward) and --kl-loss-coef {kl_loss_coef} (KL in the loss) count the KL twice: drop one"),
    # ratio and clip rule
    Rule(("ratio", "surrogate"), lambda v: v.ratio == "none" and v.surrogate not in ("reinforce", *OWN_RATIO),
         "--ratio none leaves --surrogate {surrogate} nothing to clip or weigh: use --surrogate reinforce, or another --ratio"),
    Rule(("ratio", "surrogate"), lambda v: v.ratio == "sequence_token" and v.surrogate in ("cispo", "reinforce", "dppo_tv", "dppo_kl"),
         "--ratio sequence_token differs from sequence in its gradient only, and --surrogate {surrogate} takes none through the ratio: "
         "use --ratio sequence"),
    Rule(("ratio", "num_steps_per_rollout"), lambda v: v.ratio == "on_policy" and v.num_steps_per_rollout > 1,
         "--ratio on_policy says that a rollout is trained on once, and --num-steps-per-rollout is {num_steps_per_rollout}: set it to 1, "
         "or use --ratio token"),
    Rule(("eps_clip", "surrogate"), lambda v: v.eps_clip > 1 and v.surrogate in RATIO_CLIPPED,
         "--eps-clip {eps_clip}: the lower bound 1 - eps of a ratio cannot be negative; give at most 1, which turns it off"),
    Rule(("log_ratio_min", "log_ratio_max"), lambda v: not v.log_ratio_min < 0 < v.log_ratio_max,
         "--log-ratio-min {log_ratio_min} and --log-ratio-max {log_ratio_max} must lie on both sides of 0"),
    Rule(("clip_cov_low", "clip_cov_high"), lambda v: not v.clip_cov_low < v.clip_cov_high,
         "--clip-cov-low {clip_cov_low} must be below --clip-cov-high {clip_cov_high}"),
    # reducer
    Rule(("reducer", "loss_norm_length"), lambda v: v.reducer == "seq_mean_token_sum_norm" and v.loss_norm_length is None,
         "--reducer seq_mean_token_sum_norm divides by a fixed length: give it with --loss-norm-length"),
    Rule(("ratio", "reducer"),
         lambda v: v.ratio in ("sequence", "sequence_token") and v.reducer == "token_mean" and not v.given("reducer"),
         "--ratio {ratio} with the mean over tokens weighs a sequence by its length, unlike GSPO's equation 5: use --reducer "
         "seq_mean_token_mean, or say --reducer token_mean if you mean it"),
    Rule(("surrogate", "reducer"), lambda v: v.surrogate == "gmpo" and v.reducer == "token_mean" and not v.given("reducer"),
         "--surrogate gmpo with the mean over tokens weighs a sequence by its length: use --reducer seq_mean_token_mean, or say "
         "--reducer token_mean if you mean it"),
    # off-policy correction
    Rule(("use_rollout_logprobs", "use_tis"), lambda v: v.use_rollout_logprobs and v.use_tis,
         "--use-rollout-logprobs makes old and rollout log-probs the same, so every weight of --use-tis is 1: drop one of them"),
    *[Rule(("use_rollout_logprobs", name), partial(_compares_rollout, name=name),
           f"--use-rollout-logprobs makes old and rollout log-probs the same, so {flag(name)} never acts: drop one of them")
      for name in ("rejection", "rs_veto_threshold", "seq_logprob_error_threshold", "custom_tis_function_path")],
    Rule(("use_rollout_logprobs", "ratio"),
         lambda v: v.use_rollout_logprobs and v.ratio in ("none", "on_policy") and v.surrogate not in OWN_RATIO,
         "--use-rollout-logprobs replaces old log-probs, which --ratio {ratio} does not read: use --ratio token, or drop it"),
    Rule(("tis_clip_low", "tis_clip"), lambda v: not v.tis_clip_low < v.tis_clip,
         "--tis-clip-low {tis_clip_low} must be below --tis-clip {tis_clip}"),
    Rule(("renormalize_masked", "use_tis"), lambda v: v.renormalize_masked and not _masks(v),
         "--renormalize-masked takes masked tokens out of the denominators, and nothing here masks tokens before the loss (what OPSM masks "
         "stays in the denominators): add --rejection, --seq-logprob-error-threshold or a masking --tis-mode such as icepop, or drop it"),
    Rule(("renormalize_masked", "custom_tis_function_path"), lambda v: v.renormalize_masked and v.custom_tis_function_path is not None,
         "--renormalize-masked needs the masks before the step, and --custom-tis-function-path gives them within it: drop one of them"),
    Rule(("rollout_ahead", "use_tis"), lambda v: v.rollout_ahead > 0 and not _corrects_staleness(v),
         "--rollout-ahead {rollout_ahead} trains on samples of older weights and nothing corrects for it: add --use-tis, --rejection, "
         "--use-rollout-logprobs or --custom-tis-function-path, or set --rollout-ahead 0"),
]

UNUSED = [
    Unused(("gdpo_reward_keys", "gdpo_reward_weights", "gdpo_batch_norm"), ("advantage_estimator",),
           lambda v: v.advantage_estimator == "gdpo", "only --advantage-estimator gdpo reads it"),
    Unused(("advantage_std", "singleton_advantage"), ("advantage_estimator",), lambda v: v.advantage_estimator in GROUP_ESTIMATORS,
           "--advantage-estimator {advantage_estimator} has no group baseline"),
    Unused(("advantage_baseline",), ("advantage_estimator",), lambda v: v.advantage_estimator in ("grpo", "gdpo"),
           "--advantage-estimator {advantage_estimator} has its own baseline"),
    Unused(("advantage_eps",), ("advantage_std",), lambda v: v.group_std != "none" or v.advantage_estimator == "gdpo",
           "no std is divided by: give --advantage-std"),
    Unused(("kl_penalty",), ("kl_coef",), lambda v: v.kl_coef != 0 or v.kl_form == "return_to_go", "--kl-coef is 0"),
    Unused(("gamma",), ("kl_penalty",), lambda v: v.gamma == 1 or v.kl_form == "return_to_go",
           "advantages are not returns: use --advantage-estimator reinforce_plus_plus or --kl-penalty return_to_go"),
    Unused(("gamma_tool_tokens",), ("gamma",), lambda v: not v.gamma_tool_tokens or v.gamma != 1, "--gamma is 1"),
    Unused(("whiten_std",), ("normalize_advantages",),
           lambda v: v.normalize_advantages or v.advantage_estimator == "gdpo" and v.gdpo_batch_norm != "none",
           "nothing is whitened: add --normalize-advantages"),
    Unused(("overlong_penalty_factor", "overlong_unbounded"), ("overlong_buffer_len",), lambda v: v.overlong_buffer_len > 0,
           "there is no soft overlong punishment: give --overlong-buffer-len"),
    Unused(("reward_scale", "reward_clip", "stop_properly_penalty_coef", "overlong_buffer_len", "overlong_penalty_factor",
            "overlong_unbounded"), ("custom_reward_post_process_path",), lambda v: v.custom_reward_post_process_path is None,
           "--custom-reward-post-process-path replaces reward shaping"),
    Unused(("kl_loss_type",), ("use_kl_loss", "kl_coef"), lambda v: v.use_kl_loss or v.kl_coef != 0,
           "there is no KL: add --use-kl-loss (KL in the loss) or --kl-coef (KL in the reward)"),
    Unused(("use_unbiased_kl", "kl_gradient", "kl_input_clamp", "kl_output_clamp"), ("use_kl_loss",),
           lambda v: v.use_kl_loss, "there is no KL in the loss: add --use-kl-loss"),
    Unused(("kl_gradient",), ("use_unbiased_kl",), lambda v: not v.use_unbiased_kl,
           "--use-unbiased-kl already has the gradient of the true KL"),
    Unused(("eps_clip", "eps_clip_high"), ("surrogate",), lambda v: v.surrogate in CLIPPED, "--surrogate {surrogate} does not clip"),
    Unused(("eps_clip", "eps_clip_high", "eps_clip_c"), ("ratio",),
           lambda v: v.ratio not in ("none", "on_policy") or v.surrogate not in RATIO_CLIPPED, "--ratio {ratio} is always 1"),
    Unused(("eps_clip_c",), ("surrogate",), lambda v: v.eps_clip_c is None or v.surrogate in ("ppo", "clip_cov"),
           "dual clip belongs to --surrogate ppo"),
    Unused(("ratio",), ("surrogate",), lambda v: v.surrogate not in OWN_RATIO, "--surrogate {surrogate} has its own ratio"),
    *[Unused(names, ("surrogate",), partial(_surrogate_in, names=users), f"only --surrogate {' or '.join(users)} reads it")
      for names, users in ((("sapo_tau_pos", "sapo_tau_neg"), ("sapo",)),
                           (("clip_cov_ratio", "clip_cov_low", "clip_cov_high"), ("clip_cov",)),
                           (("kl_cov_ratio", "kl_cov_coef"), ("kl_cov",)), (("dppo_ratio_max",), ("dppo_tv", "dppo_kl")),
                           (("dro_beta",), ("dro",)),
                           (("vespo_k_pos", "vespo_k_neg", "vespo_lambda_pos", "vespo_lambda_neg"), ("vespo",)))],
    Unused(("surrogate",), ("custom_pg_loss_path",), lambda v: v.custom_pg_loss_path is None, "--custom-pg-loss-path replaces it"),
    Unused(("reducer",), ("custom_pg_loss_reducer_path",),
           lambda v: v.custom_pg_loss_reducer_path is None or v.use_kl_loss or v.entropy_coef != 0,
           "--custom-pg-loss-reducer-path replaces it, and there is neither KL nor entropy in the loss, which it would still reduce"),
    Unused(("loss_norm_length",), ("reducer",), lambda v: v.reducer == "seq_mean_token_sum_norm" or v.loss_norm_length is None,
           "only --reducer seq_mean_token_sum_norm reads it"),
    Unused(("tis_clip", "tis_clip_low"), ("use_tis",), lambda v: v.use_tis or v.custom_tis_function_path is not None,
           "there is no truncated importance sampling: add --use-tis"),
    Unused(("tis_mode", "tis_batch_normalize"), ("use_tis",), lambda v: v.use_tis and v.custom_tis_function_path is None,
           "there is no built-in truncated importance sampling: add --use-tis, without --custom-tis-function-path"),
    Unused(("opsm_delta",), ("use_opsm",), lambda v: v.use_opsm, "there is no off-policy sequence masking: add --use-opsm"),
]


def refuse(config, given: Collection[str] | None = None, outside: dict[str, Any] | None = None) -> None:
    """Raise ConfigError with every contradiction in `config` (the sections of a GRPOConfig), or return.

    Args:
        given: names of the settings that the user gave; None: the config was made by hand, so that all of them were meant.
        outside: settings of other rooms, by name; see OUTSIDE.
    """
    messages = [message for _, message in broken(config, given, outside)]
    if messages:
        raise ConfigError("\n".join(dict.fromkeys(messages)))


def broken(config, given: Collection[str] | None = None, outside: dict[str, Any] | None = None) -> list[tuple[Rule | Unused, str]]:
    """The rules that `config` breaks, each with its message."""
    v = _flatten(config, given, outside or {})
    found: list[tuple[Rule | Unused, str]] = [(WORDS, message) for message in _unknown_words(config)]
    found += [(rule, rule.why.format(**vars(v))) for rule in (*VALUES, *PAIRS) if rule.when(v)]
    for rule in UNUSED:
        names = [n for n in rule.flags if n in (given or ()) and _acts(config, n)]
        if names and not rule.used(v):
            which, it = ", ".join(map(flag, names)), "it" if len(names) == 1 else "them"
            found.append((rule, f"{which} would have no effect: {rule.why.format(**vars(v))}, or drop {it}"))
    return found


def _unknown_words(config) -> list[str]:
    """A word that is no choice of its setting; the parser sees only those of a command line."""
    return [f"{flag(f.name)} {getattr(section, f.name)}: choose among {', '.join(f.metadata['choices'])}"
            for section in _sections(config) for f in fields(section)
            if f.metadata["choices"] and getattr(section, f.name) not in (None, *f.metadata["choices"])]


def _acts(config, name: str) -> bool:
    """A flag that turns something off (--no-x, none) is no claim that it acts."""
    value = next(getattr(section, name) for section in _sections(config) if hasattr(section, name))
    return value is not None and value is not False


def _sections(config) -> list:
    return list(vars(config).values())


def _flatten(config, given, outside) -> SimpleNamespace:
    v = SimpleNamespace(**OUTSIDE)
    for section in _sections(config):
        v.__dict__.update({f.name: getattr(section, f.name) for f in fields(section)})
    v.__dict__.update({name: value for name, value in outside.items() if name in OUTSIDE})
    v.group_std, v.kl_form = config.advantage.group_std, config.advantage.kl_form
    v.bad_rejection, v.given = _bad_rejection(v.rejection), lambda name: given is None or name in given
    return v


def _bad_rejection(rejection: tuple[str, ...]) -> str | None:
    from .losses.corrections import Rule as Rejection  # late: corrections import the config that calls us
    for text in rejection:
        try:
            Rejection.parse(text)
        except ValueError as error:
            return str(error)
    return None


def _masks(v) -> bool:
    return bool(v.rejection) or v.rs_veto_threshold is not None or v.seq_logprob_error_threshold is not None or (
        v.use_tis and v.tis_mode in MASKING_MODES)


def _corrects_staleness(v) -> bool:
    return v.use_tis or bool(v.rejection) or v.use_rollout_logprobs or v.custom_tis_function_path is not None
