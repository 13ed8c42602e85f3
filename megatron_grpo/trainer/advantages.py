"""What is known of a rollout before its optimizer steps: advantages, and corrections that span a step.

Runs on the ranks that hold log-probs (the last pipeline stage); all of them enter, also with micro-batches without samples.
"""

import torch

from ..advantages import AdvantageInputs, compute_advantages
from ..losses.renormalize import prepare_step
from .distribute import RolloutBatch


def fill_advantages(batch: RolloutBatch, config, hooks, *, cp_group, dp_cp_group) -> dict:
    """Set `advantage_T` of every micro-batch from the statistics of the whole rollout; returns (sum, count) metrics."""
    mbs, scalars = batch.microbatches, batch.scalars
    layout, device = mbs[0].layout, mbs[0].tokens.device
    starts = [0]
    for mb in mbs:
        starts.append(starts[-1] + mb.num_seqs)

    def cat(name):
        parts = [getattr(mb, name) for mb in mbs]
        return None if parts[0] is None else torch.cat(parts)

    advantage_T, metrics = compute_advantages(
        AdvantageInputs(
            reward_N=scalars.reward_N.to(device), group_N=scalars.group_N.to(device), valid_N=scalars.valid_N.to(device),
            rewards_N={k: v.to(device) for k, v in scalars.rewards_N.items()}, rollout_N=scalars.rollout_N.to(device),
            is_advantage=batch.is_advantage,
            sample_S=cat("sample_S"), mask_T=cat("mask_T"),
            seq_T=torch.cat([mb.seq_T + start for mb, start in zip(mbs, starts, strict=False)]),
            num_seqs=starts[-1], old_logp_T=cat("old_logp_T"), ref_logp_T=cat("ref_logp_T"), rollout_logp_T=cat("rollout_logp_T"),
            position_T=torch.cat([torch.where(mb.padding_T, -1, mb.positions.flatten()) for mb in mbs]), length_S=cat("length_S"),
            prompt_length_S=cat("prompt_length_S"), chunk_T=cat("chunk_T"),
            columns=tuple(layout.columns(r) for r in range(layout.cp_size)), cp_group=cp_group, dp_cp_group=dp_cp_group),
        config, hooks)
    for mb, part in zip(mbs, advantage_T.split([len(mb.seq_T) for mb in mbs]), strict=True):
        mb.advantage_T = part
    return metrics


def prepare_corrections(batch: RolloutBatch, config, *, cp_group, dp_cp_group) -> dict:
    """Masks, weights and denominators of corrections that need the whole step; returns (sum, count) metrics, of the last step."""
    if not (config.correction.renormalize_masked or config.correction.tis_batch_normalize):
        return {}
    rollout_index, prompt_index = (torch.unique(ids, return_inverse=True) for ids in (batch.scalars.rollout_N, batch.scalars.group_N))
    metrics: dict = {}
    for mbs in batch.mini_steps:
        inputs = [mb.loss_inputs(mb.old_logp_T, None, cp_group) for mb in mbs]
        device = inputs[0].mask_T.device
        prepared, metrics = prepare_step(
            inputs, config, [rollout_index[1].to(device)[mb.sample_S] for mb in mbs], [prompt_index[1].to(device)[mb.sample_S] for mb in mbs],
            len(rollout_index[0]), len(prompt_index[0]), dp_cp_group)
        for mb, x in zip(mbs, prepared, strict=True):
            mb.prepared = x
    return metrics
