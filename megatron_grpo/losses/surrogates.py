"""Surrogates: the clip rule. Each turns ratio and advantage into a loss per token, behind one interface.

    surrogate(x, ratio_T, sums, config) -> Surrogate

A is the advantage, r the ratio of the chosen granularity, l = log pi - log pi_old of the token, sg stop-gradient, and
[lo, hi] = [1 - --eps-clip, 1 + --eps-clip-high]. The losses are negated objectives: the optimizer descends.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from ..config import LossConfig
from ..parallel.collectives import all_gather
from .inputs import LossInputs
from .sequence import Columns, mean_per_token


@dataclass
class Surrogate:
    """loss_T: [T] with gradient. bounded: [T] bool of the tokens that the lower, upper, dual or covariance rule ("cov") bounds."""

    loss_T: torch.Tensor
    bounded: dict[str, torch.Tensor] = field(default_factory=dict)


def bounds(c: LossConfig) -> tuple[float, float]:
    """(lo, hi), the clip range of the ratio."""
    return 1 - c.eps_clip, 1 + _eps_high(c)


def ppo(x: LossInputs, ratio_T: torch.Tensor, sums: Columns, c: LossConfig) -> Surrogate:
    """L = max(-A r, -A clip(r, lo, hi)), and with dual clip L = min(L, -A c) where A < 0.

    PPO (1707.06347, eq. 7); asymmetric bounds: DAPO (2503.14476, eq. 10); dual clip: 1912.09729.
    """
    A, (lo, hi) = x.advantage_T, bounds(c)
    bounded = dict(low=(A < 0) & (ratio_T < lo), high=(A > 0) & (ratio_T > hi))
    # The maximum, written out: on a bound of the range autograd would give max and clamp half of the gradient.
    loss_T = torch.where(bounded["low"] | bounded["high"], -A * ratio_T.detach().clamp(lo, hi), -A * ratio_T)
    if c.eps_clip_c is not None:
        loss_T = torch.where(A < 0, torch.minimum(loss_T, -A * c.eps_clip_c), loss_T)
        bounded["dual"] = (A < 0) & (ratio_T > c.eps_clip_c)
    return Surrogate(loss_T, bounded)


def cispo(x: LossInputs, ratio_T: torch.Tensor, sums: Columns, c: LossConfig) -> Surrogate:
    """L = -sg(clip(r, lo, hi)) A log pi: clipped tokens keep their gradient. CISPO (2506.13585, eq. 4-5; there lo is off: --eps-clip 1)."""
    lo, hi = bounds(c)
    loss_T = -ratio_T.detach().clamp(lo, hi) * x.advantage_T * x.logp_T
    return Surrogate(loss_T, dict(low=ratio_T < lo, high=ratio_T > hi))


def reinforce(x: LossInputs, ratio_T: torch.Tensor, sums: Columns, c: LossConfig) -> Surrogate:
    """L = -sg(r) A log pi, unbounded. REINFORCE with importance weights; with --ratio none, plain REINFORCE."""
    return Surrogate(-ratio_T.detach() * x.advantage_T * x.logp_T)


def sapo(x: LossInputs, ratio_T: torch.Tensor, sums: Columns, c: LossConfig) -> Surrogate:
    """L = -A (4 / tau) sigmoid(tau (r - 1)), tau by the sign of A. SAPO (2511.20347)."""
    tau_T = _by_sign(x.advantage_T, c.sapo_tau_pos, c.sapo_tau_neg)
    return Surrogate(-x.advantage_T * torch.sigmoid(tau_T * (ratio_T - 1)) * 4 / tau_T)


def gmpo(x: LossInputs, ratio_T: torch.Tensor, sums: Columns, c: LossConfig) -> Surrogate:
    """L = -A_i exp(mean_t l'_t) on every token of sequence i. GMPO (2507.20673).

    l'_t is the pessimistic one of l and clip(l, -eps_low, eps_high), A_i the mean advantage of the sequence: under
    seq_mean_token_mean the loss of a sequence is -A_i times the geometric mean of its clipped ratios.
    """
    mean_S = mean_per_token(x, sums["gmpo_log_ratio"]).clamp(c.log_ratio_min, c.log_ratio_max)
    loss_S = -mean_per_token(x, sums["gmpo_advantage"]) * mean_S.exp()
    log_ratio_T, A = (x.logp_T - x.old_logp_T).detach(), x.advantage_T
    bounded = dict(low=(A < 0) & (log_ratio_T < -c.eps_clip), high=(A > 0) & (log_ratio_T > _eps_high(c)))
    return Surrogate(loss_S[x.seq_T], bounded)


def clip_cov(x: LossInputs, ratio_T: torch.Tensor, sums: Columns, c: LossConfig, key_T: torch.Tensor | None = None) -> Surrogate:
    """PPO's loss, but a random few of the tokens with a high covariance lose it: L = 0. Clip-Cov (2505.22617).

    Candidates: low < (A - mean A)(log pi - mean log pi) < high, and not clipped by PPO. Of n tokens, max(1, int(ratio n))
    candidates are chosen: those with the smallest key. Means and n are of the micro-batch, over its context-parallel
    ranks; so is the choice, at the price of one all-gather of that many keys.

    Args:
        key_T: [T] float64 random order; when not given a hash of the old log-prob and of the place in the sequence, so that no rank or order
            changes the choice.
    """
    base = ppo(x, ratio_T, sums, c)
    covariance_T = _covariance(x, sums)
    clipped_T = base.bounded["low"] | base.bounded["high"]
    candidate_T = x.mask_T & (covariance_T > c.clip_cov_low) & (covariance_T < c.clip_cov_high) & ~clipped_T
    key_T = _random_key(x) if key_T is None else key_T
    chosen_T = _smallest(key_T, candidate_T, _share(x, c.clip_cov_ratio), x.cp_group)
    return Surrogate(torch.where(chosen_T, 0, base.loss_T), base.bounded | dict(cov=chosen_T))


def kl_cov(x: LossInputs, ratio_T: torch.Tensor, sums: Columns, c: LossConfig) -> Surrogate:
    """L = -A r, plus coef |l| on the share of tokens with the highest covariance. KL-Cov (2505.22617).

    Covariance, means and choice as in `clip_cov`; the key is the negative covariance.
    """
    chosen_T = _smallest(-_covariance(x, sums).double(), x.mask_T, _share(x, c.kl_cov_ratio), x.cp_group)
    penalty_T = c.kl_cov_coef * (x.logp_T - x.old_logp_T).abs()
    return Surrogate(-x.advantage_T * ratio_T + torch.where(chosen_T, penalty_T, 0), dict(cov=chosen_T))


def dppo_tv(x: LossInputs, ratio_T: torch.Tensor, sums: Columns, c: LossConfig) -> Surrogate:
    """L = -M sg(min(r, c)) A log pi; M = 0 where pi - pi_old leaves [-eps_low, eps_high] in the direction of A.

    DPPO with the binary total variation |pi - pi_old| (2602.04879); c is --dppo-ratio-max.
    """
    change_T = x.logp_T.detach().exp() - x.old_logp_T.exp()
    return _dppo(x, ratio_T, c, low_T=change_T < -c.eps_clip, high_T=change_T > _eps_high(c))


def dppo_kl(x: LossInputs, ratio_T: torch.Tensor, sums: Columns, c: LossConfig) -> Surrogate:
    """As `dppo_tv` with the KL of the two-outcome distributions (token, any other): KL = q log q/p + (1-q) log (1-q)/(1-p).

    DPPO with the binary KL (2602.04879); p = pi, q = pi_old.
    """
    logp_T, old_T = x.logp_T.detach(), x.old_logp_T
    tiny = torch.finfo(logp_T.dtype).tiny                   # a token of probability 1 leaves nothing for the others
    log_rest_T, log_old_rest_T = (torch.log((-torch.expm1(y)).clamp(min=tiny)) for y in (logp_T, old_T))
    q_T = old_T.exp()
    kl_T = q_T * (old_T - logp_T) + (1 - q_T) * (log_old_rest_T - log_rest_T)
    return _dppo(x, ratio_T, c, low_T=(logp_T < old_T) & (kl_T > c.eps_clip), high_T=(logp_T > old_T) & (kl_T > _eps_high(c)))


def dro(x: LossInputs, ratio_T: torch.Tensor, sums: Columns, c: LossConfig) -> Surrogate:
    """L = -A log pi + beta / 2 l^2. DRO (2405.19107)."""
    return Surrogate(-x.advantage_T * x.logp_T + c.dro_beta / 2 * (x.logp_T - x.old_logp_T).square())


def vespo(x: LossInputs, ratio_T: torch.Tensor, sums: Columns, c: LossConfig) -> Surrogate:
    """L = -sg(W^k exp(lambda (1 - W))) A log pi, W the product of the ratios of the sequence; k, lambda by the sign of A.

    VESPO (2602.10693); log W is clamped to [--log-ratio-min, --log-ratio-max].
    """
    log_w_T = sums["vespo_log_ratio"].clamp(c.log_ratio_min, c.log_ratio_max)[x.seq_T]
    k_T = _by_sign(x.advantage_T, c.vespo_k_pos, c.vespo_k_neg)
    lambda_T = _by_sign(x.advantage_T, c.vespo_lambda_pos, c.vespo_lambda_neg)
    weight_T = (k_T * log_w_T + lambda_T * (1 - log_w_T.exp())).exp()
    return Surrogate(-weight_T * x.advantage_T * x.logp_T)


SURROGATES: dict[str, Callable[..., Surrogate]] = dict(
    ppo=ppo, cispo=cispo, reinforce=reinforce, sapo=sapo, gmpo=gmpo, clip_cov=clip_cov, kl_cov=kl_cov, dppo_tv=dppo_tv,
    dppo_kl=dppo_kl, dro=dro, vespo=vespo)


def columns(x: LossInputs, c: LossConfig) -> Columns:
    """What the clip rule must know of whole sequences."""
    if c.surrogate == "gmpo":
        log_ratio_T, sign_T = x.logp_T - x.old_logp_T, x.advantage_T.sign()
        clipped_T = log_ratio_T.clamp(-c.eps_clip, _eps_high(c))
        pessimistic_T = sign_T * torch.minimum(sign_T * log_ratio_T, sign_T * clipped_T)
        return dict(gmpo_log_ratio=pessimistic_T, gmpo_advantage=x.advantage_T)
    if c.surrogate in ("clip_cov", "kl_cov"):
        return dict(cov_advantage=x.advantage_T, cov_logp=x.logp_T.detach())
    if c.surrogate == "vespo":
        return dict(vespo_log_ratio=(x.logp_T - x.old_logp_T).detach())
    return {}


def _eps_high(c: LossConfig) -> float:
    return c.eps_clip if c.eps_clip_high is None else c.eps_clip_high


def _by_sign(advantage_T: torch.Tensor, positive: float, other: float) -> torch.Tensor:
    return torch.where(advantage_T > 0, positive, torch.full_like(advantage_T, other))


def _dppo(x: LossInputs, ratio_T: torch.Tensor, c: LossConfig, low_T: torch.Tensor, high_T: torch.Tensor) -> Surrogate:
    low_T, high_T = (x.advantage_T <= 0) & low_T, (x.advantage_T > 0) & high_T
    loss_T = -ratio_T.detach().clamp(max=c.dppo_ratio_max) * x.advantage_T * x.logp_T
    return Surrogate(torch.where(low_T | high_T, 0, loss_T), dict(low=low_T, high=high_T))


def _covariance(x: LossInputs, sums: Columns) -> torch.Tensor:
    """(A - mean A)(log pi - mean log pi), means over the tokens of the micro-batch on all context-parallel ranks. [T]"""
    tokens = x.seq_tokens_S.sum().clamp(min=1)
    return (x.advantage_T - sums["cov_advantage"].sum() / tokens) * (x.logp_T.detach() - sums["cov_logp"].sum() / tokens)


def _share(x: LossInputs, share: float) -> int:
    """How many tokens of the micro-batch a share of them is, at least 1. Waits for the device."""
    return max(1, int(float(x.seq_tokens_S.sum()) * share))


def _smallest(key_T: torch.Tensor, valid_T: torch.Tensor, k: int, cp_group) -> torch.Tensor:
    """[T] bool: the k valid tokens with the smallest key over all shards; every one of equal keys, all of them if fewer are valid."""
    key_T = torch.where(valid_T, key_T, torch.inf)
    own = torch.full((k,), torch.inf, dtype=key_T.dtype, device=key_T.device)
    smallest = key_T.topk(min(k, len(key_T)), largest=False).values
    own[:len(smallest)] = smallest
    threshold = all_gather(own, cp_group).flatten().kthvalue(k).values
    return valid_T & (key_T <= threshold)


def _random_key(x: LossInputs) -> torch.Tensor:
    """[T] a fixed scramble of old log-prob and position as float64 in [0, 2^53). Many old log-probs are equal: 0, of a certain token."""
    bits = x.old_logp_T.double().view(torch.int64)
    if x.position_T is not None:
        bits = bits + 1 + x.position_T
    for factor in (-7046029254386353131, -4658895280553007687):     # odd 64-bit constants of splitmix64; products wrap
        bits = bits * factor
        bits = bits ^ ((bits >> 32) & 0xFFFFFFFF)
    return ((bits >> 11) & ((1 << 53) - 1)).double()
