"""The advantages of a rollout, on the ranks that hold log-probs (the last pipeline stage)."""

import torch

from ..advantages import AdvantageInputs, compute_advantages
from .distribute import RolloutBatch


def fill_advantages(batch: RolloutBatch, config, hooks, *, columns, cp_group, dp_cp_group) -> dict:
    """Set `advantage_T` of every micro-batch; returns the metrics of the advantage function.

    The statistics are those of the whole rollout: every data-parallel and context-parallel rank of the last stage
    enters, also with micro-batches that hold no sample.
    """
    mbs = batch.microbatches
    device = mbs[0].tokens.device
    first = [0]
    for mb in mbs:
        first.append(first[-1] + mb.num_seqs)

    def cat(name):
        parts = [getattr(mb, name) for mb in mbs]
        return None if parts[0] is None else torch.cat(parts)

    scalars = batch.scalars
    advantage_T, metrics = compute_advantages(
        AdvantageInputs(
            reward_N=scalars.reward_N.to(device), group_N=scalars.group_N.to(device), valid_N=scalars.valid_N.to(device),
            rewards_N={k: v.to(device) for k, v in scalars.rewards_N.items()}, rollout_N=scalars.rollout_N.to(device),
            sample_S=cat("sample_S"), seq_T=torch.cat([mb.seq_T + start for mb, start in zip(mbs, first, strict=False)]), mask_T=cat("mask_T"),
            num_seqs=first[-1], old_logp_T=cat("old_logp_T"), ref_logp_T=cat("ref_logp_T"), rollout_logp_T=cat("rollout_logp_T"),
            position_T=torch.cat([torch.where(mb.padding_T, -1, mb.positions.flatten()) for mb in mbs]), length_S=cat("length_S"),
            prompt_length_S=cat("prompt_length_S"), chunk_T=cat("chunk_T"), columns=columns, cp_group=cp_group, dp_cp_group=dp_cp_group),
        config, hooks)
    for mb, part in zip(mbs, advantage_T.split([len(mb.seq_T) for mb in mbs]), strict=True):
        mb.advantage_T = part
    return metrics
