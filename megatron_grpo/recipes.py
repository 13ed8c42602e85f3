"""The recipes of the papers: for each, the settings that it fixes, where its source says so, and what it says."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Constant:
    """One setting of a recipe. `value` may depend on the flags: a function of the namespace. `quote`: what the source says."""

    setting: str
    value: Any
    where: str
    quote: str


@dataclass(frozen=True)
class Recipe:
    title: str
    paper: str
    constants: tuple[Constant, ...]
    note: str = ""


def _response_len(args) -> int:
    return args.rollout_max_response_len


C = Constant
PPO_CLIP = C("eps_clip", 0.2, "PPO, arXiv 1707.06347, section 6.1", "clipping, eps = 0.2")
GROUP_Z = "A_i = (r_i - mean(r)) / std(r)"
SEQUENCE_MEAN = "1/G sum_i 1/|o_i| sum_t"
TOKEN_MEAN = "1/sum_i |o_i| sum_i sum_t"
GROUP_MEAN = "A_i = r_i - mean(r)"

RECIPES: dict[str, Recipe] = {
    "grpo": Recipe("GRPO", "DeepSeekMath, arXiv 2402.03300", (
        C("advantage_estimator", "grpo", "section 4.1.2", GROUP_Z),
        C("ratio", "token", "equation 3", "pi_theta(o_t) / pi_old(o_t)"),
        C("surrogate", "ppo", "equation 3", "min(r A, clip(r, 1 - eps, 1 + eps) A)"),
        PPO_CLIP,
        C("reducer", "seq_mean_token_mean", "equation 3", SEQUENCE_MEAN),
        C("use_kl_loss", True, "equation 3", "- beta D_KL(pi_theta || pi_ref), added to the loss"),
        C("kl_loss_coef", 0.04, "section 4.2", "KL coefficient 0.04"),
        C("kl_loss_type", "k3", "equation 4", "pi_ref/pi_theta - log(pi_ref/pi_theta) - 1"),
        C("kl_gradient", "pathwise", "appendix A.1.6", "gradient coefficient A + beta (pi_ref/pi_theta - 1)"),
    ), "The paper's own KL gradient is that of the estimator, not of the KL; --kl-gradient score_function mends it."),
    "dr_grpo": Recipe("Dr.GRPO", "Understanding R1-Zero-like training, arXiv 2503.20783", (
        C("advantage_estimator", "grpo", "section 3.2", GROUP_MEAN),
        C("advantage_std", "none", "section 3.2", "the std normalisation is removed"),
        C("ratio", "token", "section 3.1", "as GRPO"),
        C("surrogate", "ppo", "section 3.1", "as GRPO"),
        PPO_CLIP,
        C("reducer", "seq_mean_token_sum_norm", "section 3.2", "masked sum / MAX_TOKENS, a constant"),
        C("loss_norm_length", _response_len, "section 3.2", "MAX_TOKENS = the generation budget; 3000 in the paper's runs"),
    )),
    "dapo": Recipe("DAPO", "arXiv 2503.14476", (
        C("advantage_estimator", "grpo", "equation 9", GROUP_Z),
        C("ratio", "token", "equation 9", "pi_theta(o_t) / pi_old(o_t)"),
        C("surrogate", "ppo", "equation 8", "min(r A, clip(r, 1 - eps_low, 1 + eps_high) A)"),
        C("eps_clip", 0.2, "section 4.1", "eps_low = 0.2"),
        C("eps_clip_high", 0.28, "section 4.1", "eps_high = 0.28"),
        C("reducer", "token_mean", "equation 8", TOKEN_MEAN),
        C("overlong_filter", True, "section 3.4", "the loss of truncated samples is masked"),
        C("overlong_buffer_len", lambda args: args.rollout_max_response_len // 5, "section 4.1",
          "L_max 20480 of which L_cache 4096: a fifth of the response length"),
        C("overlong_penalty_factor", 1.0, "equation 13", "0 to -1 over L_cache, -1 beyond"),
    ), "Dynamic sampling (equation 11) has its own flag: --dynamic-sampling-filter-path megatron_grpo.rollout.filters.reward_nonzero_std. "
       "Rewards are +1 and -1; no KL (section 2.3)."),
    "gspo": Recipe("GSPO", "Group Sequence Policy Optimization, arXiv 2507.18071v2", (
        C("advantage_estimator", "grpo", "equation 6", GROUP_Z),
        C("ratio", "sequence", "equation 7", "s_i = (pi_theta(y_i) / pi_old(y_i))^(1/|y_i|)"),
        C("surrogate", "ppo", "equation 5", "min(s_i A_i, clip(s_i, 1 - eps, 1 + eps) A_i)"),
        C("eps_clip", 3e-4, "section 5.1", "left clipping range 3e-4"),
        C("eps_clip_high", 4e-4, "section 5.1", "right clipping range 4e-4"),
        C("reducer", "seq_mean_token_mean", "equation 5", "1/G sum_i"),
    ), "The range belongs to long responses: log s_i shrinks as 1/sqrt(|y_i|), so short ones need a wider range."),
    "gspo_token": Recipe("GSPO-token", "Group Sequence Policy Optimization, arXiv 2507.18071v2", (
        C("advantage_estimator", "grpo", "equation 6", GROUP_Z),
        C("ratio", "sequence_token", "equation 14", "s_it = sg[s_i] pi_theta(y_t) / sg[pi_theta(y_t)]"),
        C("surrogate", "ppo", "equation 13", "min(s_it A_it, clip(s_it, 1 - eps, 1 + eps) A_it)"),
        C("eps_clip", 3e-4, "section 5.1", "left clipping range 3e-4"),
        C("eps_clip_high", 4e-4, "section 5.1", "right clipping range 4e-4"),
        C("reducer", "seq_mean_token_mean", "equation 13", SEQUENCE_MEAN),
    )),
    "cispo": Recipe("CISPO", "MiniMax-M1, arXiv 2506.13585", (
        C("advantage_estimator", "grpo", "section 3.1", GROUP_Z),
        C("ratio", "token", "equation 4", "pi_theta(o_t) / pi_old(o_t)"),
        C("surrogate", "cispo", "equation 4", "sg(clip(r)) A log pi_theta"),
        C("eps_clip", 1.0, "equation 5", "no lower bound: eps_low is set to a large value"),
        C("eps_clip_high", 4.0, "not published; ScaleRL, arXiv 2510.13786", "sg(min(r, eps_max)), eps_max = 5 = 1 + eps_high"),
        C("reducer", "token_mean", "equation 4", TOKEN_MEAN),
    )),
    "rloo": Recipe("RLOO", "Back to Basics, arXiv 2402.14740", (
        C("advantage_estimator", "rloo", "section 2.3", "R_i less the mean of the k - 1 others"),
        C("ratio", "none", "section 2.2", "one update for each batch, no importance ratio"),
        C("surrogate", "reinforce", "section 2.2", "A log pi(y|x)"),
        C("reducer", "seq_mean_token_sum", "section 2.2", "the whole generation is one action"),
        C("kl_coef", 0.03, "appendix C", "beta = 0.03"),
        C("kl_penalty", "sequence", "equation 1", "R(x, y) = r(x, y) - beta log(pi(y|x) / pi_ref(y|x))"),
        C("kl_loss_type", "k1", "equation 1", "log(pi / pi_ref)"),
    )),
    "reinforce": Recipe("REINFORCE", "Williams, Machine Learning 8 (1992)", (
        C("advantage_estimator", "reinforce", "section 4", "r times the characteristic eligibility, no baseline"),
        C("ratio", "none", "section 4", "on-policy"),
        C("surrogate", "reinforce", "section 4", "r grad log pi"),
        C("reducer", "seq_mean_token_sum", "section 5", "episodic: summed over the steps of an episode"),
    )),
    "reinforce_plus_plus": Recipe("REINFORCE++", "arXiv 2501.03262", (
        C("advantage_estimator", "reinforce_plus_plus", "equation 4", "A_t = r - beta sum_{i >= t} KL_i"),
        C("kl_coef", 0.01, "experiments, general domain", "beta = 0.01"),
        C("kl_penalty", "return_to_go", "equation 4", "beta sum_{i >= t} KL(i)"),
        C("kl_loss_type", "k1", "equation 5", "KL(t) = log(pi_old(t) / pi_ref(t))"),
        C("gamma", 1.0, "experiments", "gamma = 1.0"),
        C("normalize_advantages", True, "equation 6", "(A - mean_batch) / std_batch over the global batch"),
        C("ratio", "token", "PPO loss", "pi_theta(t) / pi_old(t)"),
        C("surrogate", "ppo", "PPO loss", "min(r A, clip(r) A)"),
        C("eps_clip", 0.2, "experiments", "eps = 0.2"),
        C("reducer", "token_mean", "PPO loss", "mean over the tokens"),
    )),
    "reinforce_plus_plus_baseline": Recipe("REINFORCE++ with baseline", "arXiv 2501.03262", (
        C("advantage_estimator", "reinforce_plus_plus_baseline", "equation 7", "A' = r - mean_group(r)"),
        C("normalize_advantages", True, "equation 7", "then normalised over the global batch"),
        C("use_kl_loss", True, "equation 8", "+ lambda k2"),
        C("kl_loss_coef", 1e-3, "experiments, mathematics", "0.001"),
        C("kl_loss_type", "k2", "equation 8", "(log pi/pi_ref)^2 / 2"),
        C("kl_gradient", "pathwise", "equation 8", "k2's own gradient is that of the KL"),
        C("ratio", "token", "PPO loss", "pi_theta(t) / pi_old(t)"),
        C("surrogate", "ppo", "PPO loss", "min(r A, clip(r) A)"),
        C("eps_clip", 0.2, "experiments", "eps = 0.2"),
        C("reducer", "token_mean", "PPO loss", "mean over the tokens"),
    )),
    "gdpo": Recipe("GDPO", "arXiv 2601.05242", (
        C("advantage_estimator", "gdpo", "method", "A = sum_n w_n (r_n - mean(r_n)) / (std(r_n) + eps)"),
        C("advantage_eps", 1e-4, "code, NVlabs/GDPO b080e63", "std() + 1e-4"),
        C("gdpo_batch_norm", "responses", "method", "(A - mean_batch(A)) / (std_batch(A) + eps)"),
        C("ratio", "token", "as GRPO", "pi_theta(o_t) / pi_old(o_t)"),
        C("surrogate", "ppo", "as GRPO", "min(r A, clip(r) A)"),
        PPO_CLIP,
        C("reducer", "seq_mean_token_mean", "as GRPO", SEQUENCE_MEAN),
    ), "Name the rewards with --gdpo-reward-keys and weigh them with --gdpo-reward-weights."),
    "sapo": Recipe("SAPO", "Soft Adaptive Policy Optimization, arXiv 2511.20347", (
        C("advantage_estimator", "grpo", "as GRPO", GROUP_Z),
        C("ratio", "token", "method", "pi_theta(y_t) / pi_old(y_t)"),
        C("surrogate", "sapo", "method", "(4 / tau) sigmoid(tau (r - 1)) A"),
        C("sapo_tau_pos", 1.0, "experiments", "tau_pos = 1.0"),
        C("sapo_tau_neg", 1.05, "experiments", "tau_neg = 1.05"),
        C("reducer", "seq_mean_token_mean", "method", SEQUENCE_MEAN),
    )),
    "gmpo": Recipe("GMPO", "Geometric-Mean Policy Optimization, arXiv 2507.20673", (
        C("advantage_estimator", "grpo", "as GRPO", GROUP_Z),
        C("surrogate", "gmpo", "method", "(prod_t r_t A)^(1/|o|), clipped by token before the product"),
        C("eps_clip", 0.4, "section 4", "clip to (e^-0.4, e^0.4)"),
        C("eps_clip_high", 0.4, "section 4", "clip to (e^-0.4, e^0.4)"),
        C("reducer", "seq_mean_token_mean", "method", "1/G sum_i"),
    )),
    "clip_cov": Recipe("Clip-Cov", "The Entropy Mechanism, arXiv 2505.22617", (
        C("advantage_estimator", "grpo", "as GRPO", GROUP_Z),
        C("ratio", "token", "as GRPO", "pi_theta(y_t) / pi_old(y_t)"),
        C("surrogate", "clip_cov", "section 4.2", "a random few tokens of high covariance are detached"),
        C("clip_cov_ratio", 2e-4, "section 4.3", "r = 2e-4"),
        C("clip_cov_low", 1.0, "section 4.3", "omega_low = 1"),
        C("clip_cov_high", 5.0, "section 4.3", "omega_high = 5"),
        C("eps_clip", 1.0, "the authors' script in verl", "clip_ratio_low=1"),
        C("eps_clip_high", 1.0, "the authors' script in verl", "clip_ratio_high=1"),
        C("eps_clip_c", 10.0, "the authors' script in verl", "clip_ratio_c=10.0"),
        C("reducer", "token_mean", "the authors' script in verl", "loss_agg_mode=token-mean"),
    )),
    "kl_cov": Recipe("KL-Cov", "The Entropy Mechanism, arXiv 2505.22617", (
        C("advantage_estimator", "grpo", "as GRPO", GROUP_Z),
        C("ratio", "token", "as GRPO", "pi_theta(y_t) / pi_old(y_t)"),
        C("surrogate", "kl_cov", "section 4.2", "the tokens of highest covariance pay a KL penalty"),
        C("kl_cov_ratio", 2e-4, "section 4.3", "k = 2e-4 for 32B (2e-3 for 7B)"),
        C("kl_cov_coef", 1.0, "section 4.3", "beta = 1"),
        C("reducer", "token_mean", "the authors' script in verl", "loss_agg_mode=token-mean"),
    )),
    "dppo": Recipe("DPPO, binary total variation", "Rethinking the Trust Region, arXiv 2602.04879", (
        C("advantage_estimator", "grpo", "as GRPO", GROUP_Z),
        C("ratio", "token", "method", "pi_theta(y_t) / mu(y_t)"),
        C("use_rollout_logprobs", True, "method", "mu is the policy that sampled, as the engine computed it"),
        C("surrogate", "dppo_tv", "method", "M r A, M = 0 where |pi - mu| leaves the trust region"),
        C("eps_clip", 0.15, "script of verl-project/verl", "TV threshold 0.15"),
        C("eps_clip_high", 0.15, "script of verl-project/verl", "TV threshold 0.15"),
        C("dppo_ratio_max", 20.0, "code of verl-project/verl", "ratio truncated at 20"),
        C("reducer", "token_mean", "code of verl-project/verl", "loss_agg_mode token-mean"),
    )),
    "dppo_kl": Recipe("DPPO, binary KL", "Rethinking the Trust Region, arXiv 2602.04879", (
        C("advantage_estimator", "grpo", "as GRPO", GROUP_Z),
        C("ratio", "token", "method", "pi_theta(y_t) / mu(y_t)"),
        C("use_rollout_logprobs", True, "method", "mu is the policy that sampled, as the engine computed it"),
        C("surrogate", "dppo_kl", "method", "M r A, M = 0 where KL(mu, pi) leaves the trust region"),
        C("eps_clip", 0.05, "script of verl-project/verl", "KL threshold 0.05"),
        C("eps_clip_high", 0.05, "script of verl-project/verl", "KL threshold 0.05"),
        C("dppo_ratio_max", 20.0, "code of verl-project/verl", "ratio truncated at 20"),
        C("reducer", "token_mean", "code of verl-project/verl", "loss_agg_mode token-mean"),
    )),
    "minirl": Recipe("MiniRL", "Stabilizing RL with LLMs, arXiv 2512.01374", (
        C("advantage_estimator", "grpo", "formulation", GROUP_MEAN),
        C("advantage_std", "none", "formulation", "no std"),
        C("ratio", "token", "formulation", "r_t = pi_theta / pi_old"),
        C("surrogate", "ppo", "formulation", "M_t = 0 if A > 0 and r > 1 + eps_high, or A < 0 and r < 1 - eps_low"),
        C("eps_clip", 0.2, "experiments", "eps_low = 0.2"),
        C("eps_clip_high", 0.27, "experiments", "eps_high = 0.27"),
        C("use_tis", True, "formulation", "sg[pi_theta / mu] = (pi_old / mu) sg[r]"),
        C("tis_clip", 5.0, "experiments", "importance weight truncated at 5"),
        C("reducer", "seq_mean_token_sum", "formulation", "sum_t, without length normalisation"),
    )),
    "deepseek_v32": Recipe("DeepSeek-V3.2's GRPO", "arXiv 2512.02556", (
        C("advantage_estimator", "grpo", "section 3.1", GROUP_MEAN),
        C("advantage_std", "none", "section 3.1", "no std"),
        C("ratio", "token", "section 3.1", "pi_theta / pi_old"),
        C("surrogate", "ppo", "section 3.1", "min(r A, clip(r) A)"),
        PPO_CLIP,
        C("reducer", "seq_mean_token_mean", "section 3.1", SEQUENCE_MEAN),
        C("use_kl_loss", True, "section 3.1", "unbiased KL estimate"),
        C("use_unbiased_kl", True, "section 3.1", "(pi_theta / pi_old) (pi_ref/pi_theta - log(pi_ref/pi_theta) - 1)"),
        C("kl_loss_type", "k3", "section 3.1", "pi_ref/pi_theta - log(pi_ref/pi_theta) - 1"),
        C("kl_loss_coef", 1e-3, "not published; DeepSeek-R1, arXiv 2501.12948", "KL coefficient 0.001"),
        C("use_opsm", True, "section 3.1", "M_i = 0 if A_i < 0 and 1/|o_i| sum_t log(pi_old / pi_theta) > delta"),
        C("opsm_delta", 0.5, "not published; documentation of huggingface/trl", "0.5"),
    ), "Keep Routing is --use-rollout-routing-replay, Keep Sampling Mask is --use-rollout-sampling-mask."),
    "icepop": Recipe("GRPO with IcePop", "Small Leak Can Sink a Great Ship (Ant Ling, 2025); Ring-1T, arXiv 2510.18855", (
        C("advantage_estimator", "grpo", "as GRPO", GROUP_Z),
        C("ratio", "token", "as GRPO", "pi_theta(o_t) / pi_old(o_t)"),
        C("surrogate", "ppo", "as GRPO", "min(r A, clip(r) A)"),
        PPO_CLIP,
        C("reducer", "seq_mean_token_mean", "as GRPO", "1/G sum_i 1/|y_i| sum_t"),
        C("use_tis", True, "method", "M(pi_old / mu) times the objective"),
        C("tis_mode", "icepop", "method", "M(k) = k if alpha <= k <= beta, else 0"),
        C("tis_clip_low", 0.5, "Ring-1T", "alpha = 0.5"),
        C("tis_clip", 5.0, "Ring-1T", "beta = 5"),
    )),
    "tis": Recipe("GRPO with TIS", "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training (Yao et al., 2025)", (
        C("advantage_estimator", "grpo", "as GRPO", GROUP_Z),
        C("ratio", "token", "as GRPO", "pi_theta(o_t) / pi_old(o_t)"),
        C("surrogate", "ppo", "as GRPO", "min(r A, clip(r) A)"),
        PPO_CLIP,
        C("reducer", "seq_mean_token_mean", "as GRPO", SEQUENCE_MEAN),
        C("use_tis", True, "method", "min(pi_old / mu, C) times the objective"),
        C("tis_clip", 2.0, "not fixed; default of THUDM/slime", "tis_clip 2.0"),
    )),
    "gpg": Recipe("GPG", "Group Policy Gradient, arXiv 2504.02546", (
        C("advantage_estimator", "gpg", "method", "alpha (r_i - mean(r)), alpha = batch / samples with a reward"),
        C("ratio", "none", "method", "no importance ratio"),
        C("surrogate", "reinforce", "method", "A log pi_theta"),
        C("reducer", "token_mean", "method", TOKEN_MEAN),
    )),
    "lite_ppo": Recipe("Lite PPO", "Tricks or Traps?, arXiv 2508.08221", (
        C("advantage_estimator", "grpo", "method", "group mean"),
        C("advantage_std", "batch", "method", "std of the rewards of the whole batch"),
        C("ratio", "token", "PPO loss", "pi_theta(t) / pi_old(t)"),
        C("surrogate", "ppo", "PPO loss", "min(r A, clip(r) A)"),
        PPO_CLIP,
        C("reducer", "token_mean", "method", "token-level aggregation"),
    )),
    "vespo": Recipe("VESPO", "arXiv 2602.10693", (
        C("advantage_estimator", "grpo", "as GRPO", GROUP_Z),
        C("surrogate", "vespo", "method", "W^k exp(lambda (1 - W)) A log pi_theta, W the ratio of the sequence"),
        C("vespo_k_pos", 2.0, "defaults of huggingface/trl", "k_pos 2.0"),
        C("vespo_lambda_pos", 3.0, "defaults of huggingface/trl", "lambda_pos 3.0"),
        C("vespo_k_neg", 3.0, "defaults of huggingface/trl", "k_neg 3.0"),
        C("vespo_lambda_neg", 2.0, "defaults of huggingface/trl", "lambda_neg 2.0"),
        C("reducer", "token_mean", "code of huggingface/trl", "normalised by the items of the batch"),
    )),
}
