"""Diagnostics of one micro-batch on one rank, in a form that does not depend on the layout.

A mean is a pair (sum, count) until the last reduction: sums and counts add up over micro-batches and ranks (reduce_means of
parallel/collectives.py). A maximum is a plain number, -inf without tokens, reduced with MAX (reduce_maxima). What is per sequence
is known on every context-parallel rank, so each rank reports 1 / CP of it. `derived` turns reduced means into the rest.
"""

import torch

from ..config import LossConfig
from .corrections import Correction, log_mismatch
from .inputs import LossInputs, Metric
from .sequence import Columns, mean_per_token

Means = dict[str, Metric]
Maxima = dict[str, torch.Tensor]


def token_mean(values_T: torch.Tensor, mask_T: torch.Tensor) -> Metric:
    """(sum over the mask, tokens of the mask)."""
    return torch.where(mask_T, values_T, 0).sum().detach(), mask_T.sum().to(torch.float32)


def sequence_mean(values_S: torch.Tensor, x: LossInputs) -> Metric:
    """(sum over sequences that have tokens, how many), split evenly over the context-parallel ranks."""
    valid_S = x.seq_tokens_S > 0
    ranks = 1 if x.cp_group is None else x.cp_group.size()
    return torch.where(valid_S, values_S, 0).sum().detach() / ranks, valid_S.sum().to(torch.float32) / ranks


def maximum(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The largest value under the mask, -inf when there is none."""
    return torch.where(mask, values, -torch.inf).amax().detach() if len(values) else values.new_tensor(-torch.inf)


def policy_metrics(x: LossInputs, ratio_T: torch.Tensor, bounded: Columns) -> tuple[Means, Maxima]:
    """How far the policy moved from pi_old, and how often the clip rule acted.

    clip_frac_low/high/dual/cov: share of tokens that each rule bounds. ratio, ratio_sq: for the mean and the effective sample size.
    ppo_kl: k1 of KL(pi_old || pi). entropy: mean of the full entropy, where it was computed.
    """
    ratio_T = ratio_T.detach()
    means = dict(ratio=token_mean(ratio_T, x.mask_T), ratio_sq=token_mean(ratio_T.square(), x.mask_T),
                 ppo_kl=token_mean(x.old_logp_T - x.logp_T, x.mask_T))
    means |= {f"clip_frac_{name}": token_mean(flags_T.float(), x.mask_T) for name, flags_T in bounded.items()}
    if x.entropy_T is not None:
        means["entropy"] = token_mean(x.entropy_T, x.mask_T)
    return means, dict(ratio_max=maximum(ratio_T, x.mask_T))


def mismatch_metrics(x: LossInputs, sums: Columns, guard: LossConfig) -> tuple[Means, Maxima]:
    """How far the trainer is from the engine, r = pi_old / mu on the sampled tokens.

    mismatch_k1, mismatch_k3: estimates of KL(mu || pi_old), mean(-log r) and mean(r - 1 - log r). mismatch_abs: mean |log r|.
    mismatch_f2: share of tokens with max(r, 1/r) > 2 (2510.11370, F(2)). mismatch_ratio(_sq): for the effective sample size.
    seq_logprob_error: mean over sequences of mean_t exp|log r|. The largest |log r| and sequence error are maxima.
    """
    log_r_T, _ = log_mismatch(x, guard)
    r_T, m = log_r_T.exp(), x.mask_T
    error_S = mean_per_token(x, sums["logprob_error"])
    means = dict(
        mismatch_k1=token_mean(-log_r_T, m), mismatch_k3=token_mean(torch.expm1(log_r_T) - log_r_T, m),
        mismatch_abs=token_mean(log_r_T.abs(), m), mismatch_f2=token_mean(((r_T > 2) | (r_T < 0.5)).float(), m),
        mismatch_ratio=token_mean(r_T, m), mismatch_ratio_sq=token_mean(r_T.square(), m), seq_logprob_error=sequence_mean(error_S, x))
    return means, dict(mismatch_abs_max=maximum(log_r_T.abs(), m), seq_logprob_error_max=maximum(error_S, x.seq_tokens_S > 0))


def correction_metrics(x: LossInputs, correction: Correction, weighted: bool) -> Means:
    """What the correction did: masked_<rule> and masked: shares of tokens; tis_weight(_sq); tis_clip_frac: share of clipped weights."""
    means = {f"masked_{name}": token_mean(flags_T.float(), x.mask_T) for name, flags_T in correction.masked.items()}
    if weighted or correction.masked:
        means["masked"] = token_mean((correction.weight_T == 0).float(), x.mask_T)
    if weighted:
        means["tis_weight"] = token_mean(correction.weight_T, x.mask_T)
        means["tis_weight_sq"] = token_mean(correction.weight_T.square(), x.mask_T)
        if correction.clipped_T is not None:
            means["tis_clip_frac"] = token_mean(correction.clipped_T.float(), x.mask_T)
    return means


def derived(means: dict[str, float]) -> dict[str, float]:
    """Effective sample size mean(w)^2 / mean(w^2) in (0, 1] of every w that was reduced as (w, w_sq); the squares are dropped.

    A w that is 0 throughout has none.
    """
    out = {name: value for name, value in means.items() if not name.endswith("_sq")}
    for name, square in means.items():
        if name.endswith("_sq") and square > 0:
            out[f"{name[:-3]}_ess"] = means[name[:-3]] ** 2 / square
    return out
