"""From the rewards of a step to the advantage of every token: baseline, KL in the reward, returns, whitening, clipping."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist

from ..config import AdvantageConfig
from ..losses.kl import estimate
from .group import Groups, group_advantage
from .inputs import AdvantageInputs
from .returns import discounted_returns
from .whiten import moments, standardize, whiten

Metric = tuple[torch.Tensor, torch.Tensor]


def compute_advantages(inputs: AdvantageInputs, config, hooks=None) -> tuple[torch.Tensor, dict[str, Metric]]:
    """The advantage of every token of this rank, and metrics.

    Enters the same collectives on every rank of `dp_cp_group` and `cp_group`, whatever the rank holds.

    Args:
        inputs: rewards and tokens.
        config: has `.advantage` (AdvantageConfig), `.kl` (the estimator, `kl_loss_type`) and `.correction` (`use_rollout_logprobs`).
        hooks: may have `.advantage` (hooks/protocols.py), which replaces baseline and returns; whitening and clipping follow it.

    Returns:
        [T] float32, 0 where the mask is False; and (sum, count) pairs over this rank.

    Raises:
        ValueError: the settings need something that the inputs lack: reference log-probs, or a named reward.
    """
    c: AdvantageConfig = config.advantage
    kl_T = _token_kl(inputs, config)
    inputs = replace(inputs, kl_T=kl_T)
    if kl_T is not None and c.kl_form == "sequence":
        inputs = replace(inputs, reward_N=inputs.reward_N - c.kl_coef * _sum_over_samples(inputs, kl_T).to(inputs.reward_N.dtype))
    estimate_N, metrics = sample_advantage(inputs, c)
    inputs = replace(inputs, estimate_N=estimate_N.to(inputs.reward_N.dtype))

    hook = getattr(hooks, "advantage", None)
    advantage_T = hook(inputs, c) if hook is not None else _token_advantage(inputs, c)
    advantage_T = torch.where(inputs.mask_T, advantage_T, 0)
    if c.advantage_estimator == "gdpo" and c.gdpo_batch_norm == "tokens" or c.normalize_advantages:
        advantage_T = whiten(advantage_T, inputs.mask_T, inputs.dp_cp_group, ddof=_ddof(c))
    if c.advantage_clip is not None:
        advantage_T = advantage_T.clamp(-c.advantage_clip, c.advantage_clip)
    count = inputs.mask_T.sum().float()
    return advantage_T, metrics | {"advantage": (advantage_T.sum(), count), "advantage_abs": (advantage_T.abs().sum(), count)}


def sample_advantage(inputs: AdvantageInputs, c: AdvantageConfig) -> tuple[torch.Tensor, dict[str, Metric]]:
    """[N] float64 advantage of each sample by the built-in estimator, 0 where aborted; and metrics.

    REINFORCE and REINFORCE++ take the reward itself. GDPO, arXiv 2601.05242: A = sum_n w_n A_n with A_n the group advantage of
    reward n, then normalised over the responses of the batch.
    """
    def groups_of(reward_N):
        return Groups.of(reward_N, inputs.group_N, inputs.valid_N, inputs.rollout_N)

    groups = groups_of(inputs.reward_N)
    metrics = {"zero_std_groups": (groups.count_flat().float(), torch.tensor(float(groups.num_groups), device=groups.flat_N.device)),
               "aborted_samples": ((~inputs.valid_N).sum().float(), torch.ones_like(inputs.valid_N, dtype=torch.float32).sum())}
    if inputs.is_advantage or c.advantage_estimator in ("reinforce", "reinforce_plus_plus"):
        return groups.reward_N, metrics

    lengths_N = _sum_over_samples(inputs, torch.ones_like(inputs.mask_T, dtype=torch.float32)) if c.advantage_estimator == "opo" else None

    def advantage(groups):
        std = "none" if c.group_std == "batch" else c.group_std
        out_N = group_advantage(groups, baseline=c.baseline, std=std, eps=c.advantage_eps, singleton=c.singleton_advantage,
                                tokens_N=lengths_N)
        if c.group_std == "batch":
            _, variance = moments(groups.reward_N, inputs.valid_N, inputs.sample_group)
            out_N = torch.where(variance > 0, out_N / (variance.sqrt() + c.advantage_eps), 0.0)
        return out_N

    if c.advantage_estimator == "gpg":
        # GPG, arXiv 2504.02546: scaled up by the share of samples with a reward, since the others bring no gradient.
        counts = torch.stack([inputs.valid_N.sum(), (groups.reward_N != 0).sum()]).double()
        if inputs.sample_group is not None:
            dist.all_reduce(counts, group=inputs.sample_group)
        return advantage(groups) * counts[0] / counts[1].clamp(min=1), metrics
    if c.advantage_estimator != "gdpo":
        return advantage(groups), metrics
    weights = c.gdpo_reward_weights or (1.0,) * len(c.gdpo_reward_keys)
    total_N, flat = torch.zeros_like(groups.reward_N), torch.zeros((), dtype=torch.float64, device=groups.reward_N.device)
    for key, weight in zip(c.gdpo_reward_keys, weights, strict=True):
        reward_N = inputs.rewards_N.get(key, torch.full_like(inputs.reward_N, torch.nan))
        if missing := int((inputs.valid_N & reward_N.isnan()).sum()):
            raise ValueError(f"--gdpo-reward-keys {key}: {missing} of the {int(inputs.valid_N.sum())} samples of this step have no reward of that "
                             f"name (the names are {sorted(inputs.rewards_N)}): give one to every sample, or drop the key")
        component = groups_of(reward_N)
        total_N, flat = total_N + weight * advantage(component), flat + component.count_flat()
    metrics["zero_std_groups"] = (flat.float(), torch.tensor(float(groups.num_groups * len(weights)), device=flat.device))
    if c.gdpo_batch_norm == "responses":
        total_N = standardize(total_N, inputs.valid_N, inputs.sample_group, ddof=_ddof(c), eps=c.advantage_eps)
    return total_N, metrics


def _token_advantage(inputs: AdvantageInputs, c: AdvantageConfig) -> torch.Tensor:
    """[T] from the samples' advantages: spread over the tokens, less the KL in the form asked for."""
    assert inputs.estimate_N is not None
    estimate_S = inputs.estimate_N[inputs.sample_S]
    penalty_T = None if inputs.kl_T is None or c.kl_form == "sequence" else -c.kl_coef * inputs.kl_T
    if c.kl_form != "return_to_go":
        spread_T = estimate_S[inputs.seq_T]
        return spread_T if penalty_T is None else spread_T + penalty_T
    returns: Callable = partial(discounted_returns, seq_T=inputs.seq_T, num_seqs=inputs.num_seqs, chunk_T=inputs.chunk_T,
                                columns=inputs.columns, cp_group=inputs.cp_group)
    step_T = inputs.mask_T
    if c.gamma_tool_tokens and c.gamma != 1:        # every token from the first to the last that the policy chose
        step_T = step_T | (returns(step_T.float(), step_T) > 0)
    r_T = estimate_S.new_zeros(len(step_T)) if penalty_T is None else penalty_T
    return returns(r_T, step_T, gamma=c.gamma, final_S=estimate_S)


def _token_kl(inputs: AdvantageInputs, config) -> torch.Tensor | None:
    """[T] estimate of KL(old || ref), 0 where masked; None without --kl-coef."""
    if config.advantage.kl_coef == 0:
        return None
    if inputs.kl_T is not None:
        return torch.where(inputs.mask_T, inputs.kl_T, 0)
    old_T = inputs.rollout_logp_T if config.correction.use_rollout_logprobs else inputs.old_logp_T
    if old_T is None or inputs.ref_logp_T is None:
        raise ValueError("--kl-coef needs the log-probs of the policy and of the reference, and this step lacks them")
    clamp = config.kl.kl_input_clamp
    return torch.where(inputs.mask_T, estimate(config.kl.kl_loss_type, (old_T - inputs.ref_logp_T).clamp(-clamp, clamp)), 0)


def _sum_over_samples(inputs: AdvantageInputs, x_T: torch.Tensor) -> torch.Tensor:
    """[N] float64 sum of x over the trained tokens of each sample, over every rank that holds a part of them."""
    x_T = torch.where(inputs.mask_T, x_T.double(), 0.0)
    out_N = x_T.new_zeros(len(inputs.reward_N)).index_add(0, inputs.sample_S[inputs.seq_T], x_T)
    group = inputs.cp_group if inputs.sample_group is not None else inputs.dp_cp_group
    if group is not None:
        dist.all_reduce(out_N, group=group)
    return out_N


def _ddof(c: AdvantageConfig) -> int:
    return 1 if c.whiten_std == "sample" else 0
