"""What every advantage function receives: the rewards of the whole step, and the tokens that this rank holds."""

from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class AdvantageInputs:
    """N samples of the step, of which this rank holds S sequences, packed over T local token positions.

    The `_N` arrays are scalars of every sample that a group statistic may need: of the whole step (gathered over
    data-parallel ranks, the same on each), or of this rank alone when every group lives whole on one rank. `sample_S`
    says which of them this rank's sequences are. Under context parallelism T counts this rank's shard only, S every
    sequence that the CP group shares. Values at positions with mask False are arbitrary, also non-finite.
    """

    reward_N: torch.Tensor                  # float, after shaping
    group_N: torch.Tensor                   # int64 group id
    valid_N: torch.Tensor                   # bool; False: aborted, out of every statistic, advantage 0
    sample_S: torch.Tensor                  # int64 in [0, N)
    seq_T: torch.Tensor                     # int64, the local sequence of each position, in [0, S)
    mask_T: torch.Tensor                    # bool
    num_seqs: int                           # S
    rewards_N: dict[str, torch.Tensor] = field(default_factory=dict)    # named rewards, for GDPO; NaN: the sample has none
    rollout_N: torch.Tensor | None = None   # int64 rollout id; siblings of one rollout count once in a group
    is_advantage: bool = False              # reward_N already is the advantage (a reward post-process hook made it)
    estimate_N: torch.Tensor | None = None  # what the built-in baseline gives each sample; set before a hook is called
    kl_T: torch.Tensor | None = None        # KL to the reference in nats; from old and reference log-probs when not given
    old_logp_T: torch.Tensor | None = None
    ref_logp_T: torch.Tensor | None = None
    rollout_logp_T: torch.Tensor | None = None
    position_T: torch.Tensor | None = None          # int64 place of each token in its own sequence, -1 on padding
    length_S: torch.Tensor | None = None            # int64 tokens of each sequence, prompt included
    prompt_length_S: torch.Tensor | None = None     # int64
    chunk_T: torch.Tensor | None = None             # int64 context-parallel chunk of each position (parallel.layout.chunk_ids)
    columns: tuple[tuple[int, ...], ...] = ((0,),)  # the chunks that each CP rank holds, ascending (parallel.layout.columns)
    cp_group: "torch.distributed.ProcessGroup | None" = None            # the shards of one sequence
    dp_cp_group: "torch.distributed.ProcessGroup | None" = None         # all ranks that hold different tokens
    sample_group: "torch.distributed.ProcessGroup | None" = None        # ranks whose _N arrays are disjoint; None: they are the whole step
