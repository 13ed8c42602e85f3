"""The algorithm's settings: four axes (baseline, ratio, clip rule, reducer), KL, correction, rewards.

Every field is a flag (settings.py). `algorithms.py` maps a recipe's name to values of these fields; a flag given by the user
overrides the recipe. Every illegal value or pair is refused, and the message says the fix (refusals.py).
"""

from dataclasses import dataclass
from typing import ClassVar

from .refusals import refuse
from .settings import setting


@dataclass(frozen=True)
class AdvantageConfig:
    by_recipe: ClassVar[bool] = True

    advantage_estimator: str = setting("grpo", "baseline of the advantage; gspo and cispo (slime) stand for --algorithm", choices=(
        "grpo", "rloo", "reinforce", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gdpo", "opo", "gpg", "passk", "gspo", "cispo"))
    advantage_std: str | None = setting(None, "std that a group's rewards are divided by; when not given, sample for grpo, gdpo and passk, "
                                        "else none", choices=("sample", "population", "leave_one_out", "batch", "none"))
    advantage_baseline: str | None = setting(None, "what grpo and gdpo subtract: the mean of the group, or that of the other samples; "
                                             "mean when not given", choices=("mean", "leave_one_out"))
    advantage_eps: float = setting(1e-6, "added to the std of the rewards; for gdpo also to that of the batch")
    singleton_advantage: str = setting("zero", "advantage of a group of one: zero, or its reward (mean 0, std 1)",
                                       choices=("zero", "reward"))
    gdpo_reward_keys: tuple[str, ...] = setting((), "names of the rewards that GDPO normalises one by one", nargs="+")
    gdpo_reward_weights: tuple[float, ...] = setting((), "weight of each GDPO reward, in the order of the keys; 1 when not given",
                                                     nargs="+")
    gdpo_batch_norm: str = setting("responses", "what the summed GDPO advantages are normalised over",
                                   choices=("responses", "tokens", "none"))
    kl_coef: float = setting(0.0, "weight of the KL to the reference folded into the reward; its estimator is --kl-loss-type")
    kl_penalty: str | None = setting(None, "how --kl-coef enters: from each token on (return_to_go), of each token alone (immediate), "
                                     "or summed over the response before the baseline (sequence); by estimator when not given",
                                     choices=("return_to_go", "immediate", "sequence"))
    gamma: float = setting(1.0, "discount per response token of --kl-penalty return_to_go")
    gamma_tool_tokens: bool = setting(False, "tool and environment tokens count as time steps for --gamma, as in slime")
    normalize_advantages: bool = setting(False, "whiten advantages over all tokens of all data-parallel and context-parallel ranks")
    whiten_std: str = setting("sample", "std that whitening divides by", choices=("sample", "population"))
    advantage_clip: float | None = setting(None, "clip advantages to [-x, x], after whitening")

    @property
    def baseline(self) -> str:
        return self.advantage_baseline or {"rloo": "leave_one_out", "opo": "length", "passk": "second_best"}.get(
            self.advantage_estimator, "mean")

    @property
    def group_std(self) -> str:
        return self.advantage_std or ("sample" if self.advantage_estimator in ("grpo", "gdpo", "passk") else "none")

    @property
    def kl_form(self) -> str:
        return self.kl_penalty or {"reinforce_plus_plus": "return_to_go", "reinforce_plus_plus_baseline": "immediate"}.get(
            self.advantage_estimator, "sequence")


@dataclass(frozen=True)
class LossConfig:
    by_recipe: ClassVar[bool] = True

    ratio: str = setting("token", "granularity of the importance ratio", choices=(
        "token", "sequence", "sequence_token", "none", "on_policy"))
    surrogate: str = setting("ppo", "clip rule", choices=(
        "ppo", "cispo", "reinforce", "sapo", "gmpo", "clip_cov", "kl_cov", "dppo_tv", "dppo_kl", "dro", "vespo"))
    eps_clip: float = setting(0.2, "lower clip range of the ratio; of its logarithm for gmpo; divergence threshold for dppo_*")
    eps_clip_high: float | None = setting(None, "upper clip range of the ratio; same as --eps-clip when not given")
    eps_clip_c: float | None = setting(None, "dual clip: upper bound c > 1 of the ratio where the advantage is negative")
    log_ratio_min: float = setting(-20.0, "log-ratios are clamped from below before exp; -inf is off", unit="nats")
    log_ratio_max: float = setting(20.0, "log-ratios are clamped from above before exp; inf is off", unit="nats")
    sapo_tau_pos: float = setting(1.0, "SAPO: temperature of the soft gate where the advantage is positive")
    sapo_tau_neg: float = setting(1.05, "SAPO: temperature of the soft gate where the advantage is not positive")
    clip_cov_ratio: float = setting(2e-4, "Clip-Cov: share of the tokens that lose their gradient")
    clip_cov_low: float = setting(1.0, "Clip-Cov: candidates have a covariance above this")
    clip_cov_high: float = setting(5.0, "Clip-Cov: candidates have a covariance below this")
    kl_cov_ratio: float = setting(2e-4, "KL-Cov: share of the tokens, those of highest covariance, that pay the KL penalty")
    kl_cov_coef: float = setting(1.0, "KL-Cov: weight of the penalty |log ratio|")
    dppo_ratio_max: float = setting(20.0, "DPPO: upper bound of the (detached) ratio that weighs the gradient")
    dro_beta: float = setting(0.1, "DRO: weight of the quadratic penalty on the log-ratio")
    vespo_k_pos: float = setting(2.0, "VESPO: power of the sequence weight where the advantage is positive")
    vespo_k_neg: float = setting(3.0, "VESPO: power of the sequence weight where the advantage is not positive")
    vespo_lambda_pos: float = setting(3.0, "VESPO: decay of the sequence weight where the advantage is positive")
    vespo_lambda_neg: float = setting(2.0, "VESPO: decay of the sequence weight where the advantage is not positive")
    reducer: str = setting("seq_mean_token_mean", "how token losses become one number", choices=(
        "token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm", "rollout_mean", "prompt_mean"))
    loss_norm_length: int | None = setting(None, "fixed length that seq_mean_token_sum_norm divides by", unit="tokens")
    entropy_coef: float = setting(0.0, "weight of the entropy bonus")


@dataclass(frozen=True)
class KLConfig:
    by_recipe: ClassVar[bool] = True

    use_kl_loss: bool = setting(False, "add the KL to the reference policy to the loss")
    kl_loss_coef: float = setting(0.0, "weight of the KL in the loss")
    kl_loss_type: str = setting("k1", "estimator of the KL; low_var_kl is k3 with its value clamped to 10", choices=(
        "k1", "k2", "k3", "low_var_kl", "abs"))
    use_unbiased_kl: bool = setting(False, "weight the KL by pi/pi_old, with gradient (DeepSeek-V3.2): exact off-policy too")
    kl_gradient: str = setting("score_function", "gradient of the KL without --use-unbiased-kl: that of the true KL (score_function), "
                               "that of k2 (straight_through), or only through the estimator (pathwise, biased)",
                               choices=("score_function", "straight_through", "pathwise"))
    kl_input_clamp: float = setting(20.0, "log(pi/pi_ref) is clamped to [-x, x]; inf is off", unit="nats")
    kl_output_clamp: float | None = setting(None, "the KL of a token, weighted, is clamped to [-x, x]; low_var_kl: 10 when not given",
                                            unit="nats")


@dataclass(frozen=True)
class CorrectionConfig:
    by_recipe: ClassVar[bool] = True

    use_tis: bool = setting(False, "weigh the policy loss by old/rollout (truncated importance sampling)")
    tis_mode: str = setting("tis", "rule of the weight", choices=(
        "tis", "icepop", "seq_tis", "seq_icepop", "seq_mask_tis", "geometric"))
    tis_clip: float = setting(2.0, "upper bound of the weight")
    tis_clip_low: float = setting(0.0, "lower bound of the weight")
    tis_batch_normalize: bool = setting(False, "divide the weights by their mean over the optimizer step")
    rejection: tuple[str, ...] = setting((), "rules LEVEL_METRIC=LOW..HIGH that a token or sequence must pass: level token, seq_sum, "
                                         "seq_mean or seq_all; metric ratio (old/rollout), k1, k2 or k3; "
                                         "e.g. seq_mean_ratio=0.99..1.01 token_k3=..0.3", nargs="+")
    rs_veto_threshold: float | None = setting(None, "reject sequences with a token whose old/rollout is below this")
    use_opsm: bool = setting(False, "off-policy sequence masking (DeepSeek-V3.2)")
    opsm_delta: float = setting(1e-4, "largest mean log(old/policy) of a sequence that keeps its tokens of negative advantage",
                                unit="nats a token")
    use_rollout_logprobs: bool = setting(False, "bypass: old log-probs are the rollout's")
    seq_logprob_error_threshold: float | None = setting(None, "drop sequences whose mean exp|old - rollout| exceeds this")
    renormalize_masked: bool = setting(False, "tokens that a correction masks leave the denominators too")


@dataclass(frozen=True)
class RewardConfig:
    by_recipe: ClassVar[bool] = True

    reward_scale: float = setting(1.0, "factor on the raw reward")
    reward_clip: float | None = setting(None, "clip the scaled reward to [-x, x]")
    overlong_buffer_len: int = setting(0, "length of the soft overlong punishment's ramp, which ends at --rollout-max-response-len (DAPO); "
                                       "0 is off", unit="tokens")
    overlong_penalty_factor: float = setting(1.0, "soft overlong punishment at the end of the ramp")
    overlong_unbounded: bool = setting(False, "let the punishment grow beyond its factor on longer responses, as in verl and NeMo-RL")
    stop_properly_penalty_coef: float | None = setting(None, "reward of a truncated sample: times this, or this itself if negative")
    overlong_filter: bool = setting(False, "mask truncated samples out of the loss")


@dataclass(frozen=True)
class GRPOConfig:
    """The algorithm as resolved: recipe, then the user's flags. Refuses what contradicts (refusals.py)."""

    advantage: AdvantageConfig = AdvantageConfig()
    loss: LossConfig = LossConfig()
    kl: KLConfig = KLConfig()
    correction: CorrectionConfig = CorrectionConfig()
    reward: RewardConfig = RewardConfig()

    def __post_init__(self):
        refuse(self)

    @property
    def needs_reference(self) -> bool:
        """The reference model's log-probs are needed."""
        return self.kl.use_kl_loss or self.advantage.kl_coef != 0
