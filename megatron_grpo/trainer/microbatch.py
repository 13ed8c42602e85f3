"""A micro-batch, twice: on the host as its leader packs it, and on a rank as its share of the tokens."""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from ..batch import Sample
from ..logprobs import SupportMask
from ..losses.inputs import LossInputs, StepCounts
from ..parallel.layout import Layout
from ..routing.placement import unrouted


@dataclass
class PackedSamples:
    """The samples of one micro-batch as flat arrays: what a leader sends to its replica.

    `tokens` is the stream of all sequences [N]; arrays named `_R` are the responses one after the other [sum of R].
    `routes` is not here: every rank gets only its share of them (routing/placement).
    """

    sample_ids: list[int]
    lengths: list[int]
    prompt_lengths: list[int]
    tokens: np.ndarray
    mask_R: np.ndarray
    rollout_logp_R: np.ndarray
    sample_S: np.ndarray                # int64 place of each sequence's sample among the scalars of the rollout (StepScalars)
    rollout_tokens_S: np.ndarray        # masked tokens of its rollout and of its prompt group in the whole step
    prompt_tokens_S: np.ndarray
    support: tuple[np.ndarray, np.ndarray] | None = None   # sampling mask: (ids, length of each response token's list)

    @staticmethod
    def pack(samples: list[Sample], place: dict[int, int], rollout_tokens: dict[int, int], prompt_tokens: dict[int, int]) -> "PackedSamples":
        """Flatten samples; the dictionaries are keyed by sample_id, rollout_id and group_id."""
        def cat(parts, dtype):
            return np.concatenate([np.asarray(p, dtype) for p in parts]) if samples else np.zeros(0, dtype)

        support = None
        if any(s.sampling_mask is not None for s in samples):
            lists = [ids for s in samples for ids in s.sampling_mask]
            support = (cat(lists, np.int32), np.array([len(ids) for ids in lists], np.int32))
        return PackedSamples(
            sample_ids=[s.sample_id for s in samples], lengths=[len(s.tokens) for s in samples],
            prompt_lengths=[s.prompt_length for s in samples], tokens=cat([s.tokens for s in samples], np.int64),
            mask_R=cat([s.loss_mask for s in samples], bool), rollout_logp_R=cat([s.rollout_logp for s in samples], np.float32),
            sample_S=np.array([place[s.sample_id] for s in samples], np.int64),
            rollout_tokens_S=np.array([rollout_tokens[s.rollout_id] for s in samples], np.float32),
            prompt_tokens_S=np.array([prompt_tokens[s.group_id] for s in samples], np.float32), support=support)


@dataclass
class MicroBatch:
    """One rank's share of a micro-batch, on its device. `_T` [T] local positions, `_S` [S] sequences (see LossInputs).

    A micro-batch without samples is legal: one sequence of padding, masked, so that every rank runs the same schedule.
    """

    key: tuple[int, int]                # (optimizer step of the rollout, place in it); with the layer, the key of its routes
    layout: Layout
    tokens: torch.Tensor                # [batch, sequence] int64 input ids
    positions: torch.Tensor             # [batch, sequence] int64
    labels_T: torch.Tensor              # the next token
    mask_T: torch.Tensor                # bool, True where the next token is trained on
    seq_T: torch.Tensor
    rollout_logp_T: torch.Tensor | None
    sample_S: torch.Tensor              # int64 place of each sequence among the scalars of the rollout
    seq_tokens_S: torch.Tensor
    rollout_tokens_S: torch.Tensor
    prompt_tokens_S: torch.Tensor
    length_S: torch.Tensor              # int64 tokens, prompt included
    prompt_length_S: torch.Tensor
    counts: StepCounts
    padding_T: torch.Tensor             # bool, True where the position holds no token
    chunk_T: torch.Tensor               # int64 context-parallel chunk of each position
    sample_ids: list[int]
    unrouted_T: torch.Tensor            # bool [rows that a decoder layer of this rank sees]: padding and last tokens
    packed_seq_params: Any = None    # Megatron's PackedSeqParams, or None when padded to [S, sequence]
    keep_mask: Any = None            # truncated support of each position (top-p, top-k), or None
    old_logp_T: torch.Tensor | None = None
    logp_T: torch.Tensor | None = None  # of the newest policy pass, detached
    ref_logp_T: torch.Tensor | None = None
    advantage_T: torch.Tensor | None = None
    routes: Any = None               # this rank's share of the experts to replay, or None
    prepared: LossInputs | None = None  # weights, mask and denominators that a correction set for the whole step
    context: Any = field(default=None, repr=False)     # the StepContext of the pass that is running

    @property
    def num_seqs(self) -> int:
        return self.layout.num_seqs

    def loss_inputs(self, logp_T: torch.Tensor, entropy_T: torch.Tensor | None, cp_group) -> LossInputs:
        """What the policy loss receives; without an old-log-prob pass the policy is its own old one."""
        if self.prepared is not None:
            return replace(self.prepared, logp_T=logp_T, entropy_T=entropy_T)
        return LossInputs(
            logp_T=logp_T, old_logp_T=logp_T.detach() if self.old_logp_T is None else self.old_logp_T, advantage_T=self.advantage_T,
            mask_T=self.mask_T, seq_T=self.seq_T, num_seqs=self.num_seqs, counts=self.counts, seq_tokens_S=self.seq_tokens_S,
            rollout_tokens_S=self.rollout_tokens_S, prompt_tokens_S=self.prompt_tokens_S, rollout_logp_T=self.rollout_logp_T,
            ref_logp_T=self.ref_logp_T, entropy_T=entropy_T, cp_group=cp_group,
            position_T=torch.where(self.padding_T, -1, self.positions.flatten()), length_S=self.length_S,
            prompt_length_S=self.prompt_length_S)


def place(packed: PackedSamples, key: tuple[int, int], layout: Layout, cp_rank: int, tp_rank: int, counts: StepCounts, device) -> MicroBatch:
    """This rank's share of a packed micro-batch; `tp_rank` is 0 without sequence parallelism."""
    tokens = torch.from_numpy(packed.tokens)
    where_R = layout.response_index(packed.prompt_lengths)

    def stream(values_R, dtype):
        out = torch.zeros(layout.num_tokens, dtype=dtype)
        out[where_R] = torch.from_numpy(values_R).to(dtype)
        return out

    mask_N = stream(packed.mask_R, torch.bool)
    lengths = torch.tensor(layout.lengths)
    seq_N = torch.repeat_interleave(torch.arange(layout.num_seqs), lengths)
    seq_tokens_S = torch.zeros(layout.num_seqs).index_add_(0, seq_N, mask_N.float())

    def per_seq(values_S):
        return torch.from_numpy(values_S) if len(values_S) else torch.zeros(layout.num_seqs)

    def shard(x_N, fill=0):
        return layout.shard(x_N, cp_rank, fill).to(device)

    seq_T = layout.seq_ids(cp_rank)
    keep_mask = None
    if packed.support is not None:
        keep_mask = SupportMask.from_response(*packed.support, where_R, layout.num_tokens, layout.index(cp_rank)).to(device)
    return MicroBatch(
        key=key, layout=layout, tokens=shard(tokens).view(layout.local_shape),
        positions=layout.positions(cp_rank).view(layout.local_shape).to(device), labels_T=shard(layout.labels(tokens)),
        mask_T=shard(mask_N, False), seq_T=seq_T.to(device), rollout_logp_T=shard(stream(packed.rollout_logp_R, torch.float32)),
        sample_S=per_seq(packed.sample_S).long().to(device), length_S=lengths.to(device),
        prompt_length_S=per_seq(np.array(packed.prompt_lengths)).long().to(device),
        seq_tokens_S=seq_tokens_S.to(device), rollout_tokens_S=per_seq(packed.rollout_tokens_S).to(device),
        prompt_tokens_S=per_seq(packed.prompt_tokens_S).to(device), counts=counts,
        padding_T=(layout.index(cp_rank) < 0).to(device),
        chunk_T=layout.chunk_ids(cp_rank).to(device),
        sample_ids=packed.sample_ids, unrouted_T=unrouted(layout, cp_rank, tp_rank).to(device),
        packed_seq_params=_packed_seq_params(layout, device), keep_mask=keep_mask)


def _packed_seq_params(layout: Layout, device):
    """Megatron's description of a THD pack; None for padded batches, whose rows speak for themselves."""
    if layout.qkv_format == "bshd":
        return None
    from megatron.core.packed_seq_params import PackedSeqParams

    padded = layout.cu_seqlens_padded.to(device)
    # Padding is given to attention as tokens of the sequence that it follows: causality keeps it out of every real
    # token, and no kernel has to know of gaps between sequences. Padded boundaries beside these would make Transformer Engine compare
    # the two at every layer, which waits for the device.
    return PackedSeqParams(qkv_format="thd", cu_seqlens_q=padded, cu_seqlens_kv=padded, max_seqlen_q=layout.max_seqlen,
                           max_seqlen_kv=layout.max_seqlen)
