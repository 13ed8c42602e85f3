"""What every policy-loss function receives and returns."""

from dataclasses import dataclass, field

import torch

Metric = tuple[torch.Tensor, torch.Tensor]
"""(sum, count), detached scalars over this rank's tokens; mean = total sum / total count after the last reduction."""


@dataclass(frozen=True)
class StepCounts:
    """Denominators of the whole optimizer step: every micro-batch, every rank. Known before micro-batching."""

    tokens: float       # tokens with mask 1
    sequences: float    # sequences with at least one such token
    rollouts: float     # rollouts with at least one such token
    prompts: float      # prompt groups with at least one such token


@dataclass(frozen=True)
class LossInputs:
    """One micro-batch on one rank, packed over T local token positions of S sequences.

    Shapes: `_T` [T] float32 (bool for the mask, int64 for seq_T), `_S` [S] float32. Under context parallelism T
    counts this rank's shard only, while S counts every sequence of the micro-batch on every CP rank.
    Values at positions with mask False are arbitrary, also non-finite, and never reach the loss.
    """

    logp_T: torch.Tensor                    # trainer weights now; the only stream with gradient
    old_logp_T: torch.Tensor                # trainer weights at rollout
    advantage_T: torch.Tensor
    mask_T: torch.Tensor
    seq_T: torch.Tensor                     # the sequence of each position, in [0, S)
    num_seqs: int                           # S
    counts: StepCounts
    seq_tokens_S: torch.Tensor              # masked tokens of each sequence, over all CP shards
    rollout_tokens_S: torch.Tensor          # masked tokens of the rollout that the sequence belongs to, in the whole step
    prompt_tokens_S: torch.Tensor           # masked tokens of its prompt group, in the whole step
    rollout_logp_T: torch.Tensor | None = None      # the engine that sampled
    ref_logp_T: torch.Tensor | None = None
    entropy_T: torch.Tensor | None = None           # has gradient when an entropy bonus is asked for
    weight_T: torch.Tensor | None = None            # off-policy weights that were computed for the whole step (renormalize.py)
    cp_group: "torch.distributed.ProcessGroup | None" = None
    position_T: torch.Tensor | None = None          # int64 place of each token in its own sequence, -1 on padding
    length_S: torch.Tensor | None = None            # int64 tokens of each sequence, prompt included, over all CP shards
    prompt_length_S: torch.Tensor | None = None     # int64 prompt tokens of each sequence


@dataclass
class LossOutput:
    """`loss`: this rank's addend; the sum over micro-batches, DP and CP ranks is the loss of the step. Has gradient."""

    loss: torch.Tensor
    metrics: dict[str, Metric] = field(default_factory=dict)
    maxima: dict[str, torch.Tensor] = field(default_factory=dict)       # reduced with MAX; -inf without tokens
