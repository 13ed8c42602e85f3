"""Off-policy corrections whose denominators span the optimizer step.

A correction masks tokens, but the counts that the reducers divide by are fixed before micro-batching. --renormalize-masked takes
the masked tokens out of these too, and --tis-batch-normalize divides the weights by their mean; both need every micro-batch
of every rank. Corrections compare two streams that are known before the step, old and rollout log-probs, so the whole step is prepared
at once, with one small all-reduce. Only OPSM looks at the current policy: what it masks stays in the denominators.
"""

from dataclasses import replace

import torch
import torch.distributed as dist

from . import corrections, metrics
from .inputs import LossInputs, Metric, StepCounts
from .policy_loss import prepared
from .sequence import sum_columns


def prepare_step(batches: list[LossInputs], config, rollout_S: list[torch.Tensor], prompt_S: list[torch.Tensor], num_rollouts: int,
                 num_prompts: int, dp_cp_group: dist.ProcessGroup | None = None) -> tuple[list[LossInputs], dict[str, Metric]]:
    """The micro-batches of a step with weights, and with masks and denominators without what the correction masks.

    Args:
        batches: this rank's micro-batches; `logp_T` is not read. Replace it in the result when it is known.
        config: as for policy_loss.
        rollout_S, prompt_S: for each micro-batch [S] int64, which rollout and which prompt of the step each sequence belongs to.
        num_rollouts, num_prompts: how many the step has, over all ranks.
        dp_cp_group: every rank that holds different tokens; None for one rank.

    Returns:
        The same number of micro-batches, for policy_loss; and the metrics of the correction (metrics.py) as step_*, which
        count the tokens that leave: the metrics of policy_loss do not see them any more.
    """
    c = replace(config.correction, use_opsm=False)
    geometric = config.loss.surrogate == "gmpo"
    per_sequence = c.use_tis and c.tis_mode not in corrections.TOKEN_MODES
    kept: list[LossInputs] = []
    weights_T: list[torch.Tensor] = []
    means: dict[str, Metric] = {}
    device = batches[0].mask_T.device if batches else "cpu"
    tokens_of_rollout, tokens_of_prompt = (torch.zeros(n, dtype=torch.float64, device=device) for n in (num_rollouts, num_prompts))
    rest = torch.zeros(3, dtype=torch.float64, device=device)         # sequences with tokens, sum of weights, number of weights
    for batch, rollouts, prompts in zip(batches, rollout_S, prompt_S, strict=True):
        x = prepared(batch, c)
        correction = corrections.correct(x, sum_columns(x, corrections.columns(x, c, config.loss, geometric)), c, config.loss, geometric)
        for name, pair in metrics.correction_metrics(x, correction, c.use_tis).items():
            before = means.get(f"step_{name}", (torch.zeros(()), torch.zeros(())))
            means[f"step_{name}"] = (before[0].to(device) + pair[0], before[1].to(device) + pair[1])
        mask_T = x.mask_T & (correction.weight_T != 0) if c.renormalize_masked else x.mask_T
        seq_tokens_S = sum_columns(x, dict(tokens=mask_T.to(x.seq_tokens_S.dtype)))["tokens"]
        tokens_of_rollout.index_add_(0, rollouts[x.seq_T], mask_T.double())
        tokens_of_prompt.index_add_(0, prompts[x.seq_T], mask_T.double())
        share_T = torch.where(mask_T, 1 / seq_tokens_S[x.seq_T].double() if per_sequence else 1.0, 0)
        rest += torch.stack([metrics.sequence_mean(torch.ones_like(seq_tokens_S), replace(x, seq_tokens_S=seq_tokens_S))[1].double(),
                             (share_T * correction.weight_T).sum(), share_T.sum()])
        kept.append(replace(batch, mask_T=mask_T, seq_tokens_S=seq_tokens_S))
        weights_T.append(correction.weight_T)

    total = torch.cat([tokens_of_rollout, tokens_of_prompt, rest])
    if dp_cp_group is not None:
        dist.all_reduce(total, group=dp_cp_group)
    tokens_of_rollout, tokens_of_prompt, (sequences, weights, number) = total.split([num_rollouts, num_prompts, 3])
    counts = StepCounts(tokens=float(tokens_of_rollout.sum()), sequences=float(sequences), rollouts=float((tokens_of_rollout > 0).sum()),
                        prompts=float((tokens_of_prompt > 0).sum()))
    scale = number / weights if c.tis_batch_normalize and weights > 0 else torch.ones_like(weights)
    return [replace(
        x, weight_T=weight_T * scale.to(weight_T.dtype), counts=counts,
        rollout_tokens_S=tokens_of_rollout[rollouts].to(x.rollout_tokens_S.dtype),
        prompt_tokens_S=tokens_of_prompt[prompts].to(x.prompt_tokens_S.dtype))
        for x, weight_T, rollouts, prompts in zip(kept, weights_T, rollout_S, prompt_S, strict=True)], means
