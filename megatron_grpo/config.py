"""The algorithm's settings: four axes (baseline, ratio, clip rule, reducer), KL, correction, rewards.

Every field is a flag (settings.py). Every illegal value or pair is refused here, and the message says the fix.
`algorithms.py` maps a recipe's name to values of these fields; a flag given by the user overrides the recipe.
"""

from dataclasses import dataclass

from .settings import setting


@dataclass(frozen=True)
class AdvantageConfig:
    advantage_estimator: str = setting("grpo", "baseline of the advantage", choices=(
        "grpo", "rloo", "reinforce", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gdpo"))
    advantage_std: str = setting("sample", "std that a group's rewards are divided by", choices=("sample", "population", "leave_one_out", "none"))
    advantage_eps: float = setting(1e-6, "added to the group's std")
    gamma: float = setting(1.0, "discount per response token of REINFORCE++ returns")
    kl_coef: float = setting(0.0, "weight of the token KL folded into the reward")
    normalize_advantages: bool = setting(False, "whiten advantages over all tokens of all data-parallel and context-parallel ranks")
    advantage_clip: float | None = setting(None, "clip advantages to [-x, x]")
    gdpo_reward_keys: tuple[str, ...] = setting((), "names of the rewards that GDPO normalises one by one", nargs="+")
    gdpo_reward_weights: tuple[float, ...] = setting((), "weight of each GDPO reward, in the order of the keys", nargs="+")


@dataclass(frozen=True)
class LossConfig:
    ratio: str = setting("token", "granularity of the importance ratio", choices=("token", "sequence", "sequence_token", "none", "on_policy"))
    surrogate: str = setting("ppo", "clip rule", choices=(
        "ppo", "cispo", "reinforce", "sapo", "gmpo", "clip_cov", "kl_cov", "dppo_tv", "dppo_kl"))
    eps_clip: float = setting(0.2, "lower clip range of the ratio")
    eps_clip_high: float | None = setting(None, "upper clip range of the ratio; same as --eps-clip when not given")
    eps_clip_c: float | None = setting(None, "dual clip: upper bound c > 1 of the ratio where the advantage is negative")
    reducer: str = setting("seq_mean_token_mean", "how token losses become one number", choices=(
        "token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm", "rollout_mean", "prompt_mean"))
    loss_norm_length: int | None = setting(None, "fixed length that seq_mean_token_sum_norm divides by", unit="tokens")
    entropy_coef: float = setting(0.0, "weight of the entropy bonus")


@dataclass(frozen=True)
class KLConfig:
    use_kl_loss: bool = setting(False, "add the KL to the reference policy to the loss")
    kl_loss_coef: float = setting(0.0, "weight of the KL in the loss")
    kl_loss_type: str = setting("k1", "estimator of the KL", choices=("k1", "k2", "k3", "low_var_kl"))
    use_unbiased_kl: bool = setting(False, "weight the KL by pi/pi_old (DeepSeek-V3.2)")
    kl_score_function: bool = setting(True, "add the score-function term, so that the gradient is that of the true KL")


@dataclass(frozen=True)
class CorrectionConfig:
    use_tis: bool = setting(False, "truncated importance sampling with old/rollout ratios")
    tis_mode: str = setting("tis", "rule of the correction", choices=("tis", "icepop", "seq_mask_tis", "seq_tis", "geometric"))
    tis_clip: float = setting(2.0, "upper bound of the correction weight")
    tis_clip_low: float = setting(0.0, "lower bound of the correction weight")
    use_opsm: bool = setting(False, "off-policy sequence masking (DeepSeek-V3.2)")
    opsm_delta: float = setting(1e-4, "threshold of the mean log-ratio of a sequence", unit="nats a token")
    use_rollout_logprobs: bool = setting(False, "bypass: old log-probs are the rollout's")
    seq_logprob_error_threshold: float | None = setting(None, "mask sequences whose mean exp|old - rollout| exceeds this")
    renormalize_masked: bool = setting(False, "tokens that a correction masks leave the denominators too")


@dataclass(frozen=True)
class RewardConfig:
    overlong_buffer_len: int = setting(0, "length of the soft overlong punishment's ramp (DAPO); 0 is off", unit="tokens")
    overlong_penalty_factor: float = setting(1.0, "largest soft overlong punishment")
    overlong_filter: bool = setting(False, "mask truncated samples out of the loss")
    reward_scale: float = setting(1.0, "factor on the raw reward")
    reward_clip: float | None = setting(None, "clip the scaled reward to [-x, x]")
