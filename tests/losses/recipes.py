"""One recipe for every ratio, surrogate, reducer and correction, and every --algorithm: what the property tests and the multi-rank tests
walk through."""

from megatron_grpo.algorithms import recipe_config
from megatron_grpo.recipes import RECIPES as ALGORITHMS

KL = dict(use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type="k3")
TIS = dict(use_tis=True)

RECIPES = {
    "ppo": dict(eps_clip_high=0.28),
    "ppo token_mean kl entropy": dict(reducer="token_mean", kl=KL, entropy_coef=0.01),
    "dual clip prompt_mean": dict(eps_clip_c=1.5, reducer="prompt_mean"),
    "dr_grpo": dict(reducer="seq_mean_token_sum_norm", loss_norm_length=50),
    "rollout_mean unbiased kl": dict(reducer="rollout_mean", kl=dict(KL, use_unbiased_kl=True)),
    "token_sum straight-through kl": dict(reducer="seq_mean_token_sum", kl=dict(KL, kl_gradient="straight_through")),
    "gspo": dict(ratio="sequence", eps_clip=0.05),
    "gspo_token": dict(ratio="sequence_token", eps_clip=0.05, kl=KL),
    "gspo seq_tis": dict(ratio="sequence", correction=dict(TIS, tis_mode="seq_tis")),
    "cispo": dict(surrogate="cispo", eps_clip=1.0, eps_clip_high=0.3, reducer="token_mean"),
    "cispo sequence": dict(surrogate="cispo", ratio="sequence"),
    "reinforce": dict(surrogate="reinforce", ratio="none"),
    "reinforce weighted": dict(surrogate="reinforce", ratio="sequence"),
    "on_policy": dict(ratio="on_policy"),
    "sapo": dict(surrogate="sapo"),
    "sapo sequence": dict(surrogate="sapo", ratio="sequence"),
    "gmpo": dict(surrogate="gmpo", eps_clip=0.2),
    "gmpo tis": dict(surrogate="gmpo", eps_clip=0.2, correction=TIS),
    "clip_cov": dict(surrogate="clip_cov", clip_cov_ratio=0.3, clip_cov_low=0.0),
    "kl_cov": dict(surrogate="kl_cov", kl_cov_ratio=0.3),
    "dppo_tv": dict(surrogate="dppo_tv", eps_clip=0.05),
    "dppo_kl": dict(surrogate="dppo_kl", eps_clip=0.01),
    "dro": dict(surrogate="dro"),
    "vespo": dict(surrogate="vespo"),
    "tis": dict(correction=dict(TIS, tis_clip=1.2, tis_clip_low=0.8)),
    "icepop": dict(correction=dict(TIS, tis_mode="icepop", tis_clip_low=0.7, tis_clip=1.4)),
    "seq_icepop": dict(correction=dict(TIS, tis_mode="seq_icepop", tis_clip_low=0.5)),
    "seq_mask_tis": dict(correction=dict(TIS, tis_mode="seq_mask_tis", tis_clip_low=0.9, tis_clip=1.1)),
    "geometric": dict(correction=dict(TIS, tis_mode="geometric", tis_clip_low=0.9, tis_clip=1.1)),
    "opsm": dict(correction=dict(use_opsm=True)),
    "rejection": dict(correction=dict(rejection=("token_k3=..0.2", "seq_mean_ratio=0.8..1.2", "seq_sum_k2=..2"), rs_veto_threshold=0.5)),
    "seq error": dict(kl=KL, entropy_coef=0.01, correction=dict(seq_logprob_error_threshold=1.25)),
    "bypass": dict(correction=dict(use_rollout_logprobs=True)),
}

for _name in ALGORITHMS:
    _config = recipe_config(_name, response_len=50)
    RECIPES[f"--algorithm {_name}"] = vars(_config.loss) | dict(kl=vars(_config.kl), correction=vars(_config.correction))

# Their covariance is that of the micro-batch, over its context-parallel ranks.
OF_THE_MICRO_BATCH = {name for name, recipe in RECIPES.items() if recipe.get("surrogate") in ("clip_cov", "kl_cov")}
