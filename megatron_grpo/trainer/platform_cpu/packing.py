"""How attention on CPU sees a packed batch: the positions of a rank's own rows, and the sequences grouped by length."""

from dataclasses import dataclass, field

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from ...parallel.layout import Layout


@dataclass
class Bucket:
    """Sequences of like length, as one padded batch. Q local queries and K keys a sequence.

    query_BQ: local row of each query (a padding query repeats row 0). key_BK: row of each key among the gathered ones.
    mask_B1QK: True where a query sees a key; None: causal and square. `rows` of the batch's B*Q outputs are real.
    """

    query_BQ: torch.Tensor | None
    key_BK: torch.Tensor | None
    mask_B1QK: torch.Tensor | None
    shape: tuple[int, int, int]


@dataclass
class Pack(PackedSeqParams):
    """The pack as one context-parallel rank sees it: a single stretch of T rows, whose RoPE positions are given.

    position_T: [T] int64, position in its sequence. output_T: [T] int64 or None, place of row t among the buckets' outputs.
    """

    position_T: torch.Tensor = None
    buckets: list[Bucket] = field(default_factory=list)
    output_T: torch.Tensor | None = None
    _rotary: tuple = ()

    @staticmethod
    def of(params: PackedSeqParams, n: int, rank: int, contiguous: bool, device: torch.device) -> "Pack":
        """The view of `params` for one rank; made once a micro-batch and kept with it."""
        if isinstance(params, Pack):
            return params
        kept = vars(params).setdefault("_packs", {})
        key = (n, rank, contiguous, device)
        if key not in kept:
            kept[key] = _pack(params, n, rank, contiguous, device)
        return kept[key]

    def rotary(self, freqs: torch.Tensor) -> torch.Tensor:
        """[T, 1, 1, d]: the rotary angles of this rank's rows, from those of positions 0.. of one sequence."""
        if not self._rotary or self._rotary[0] is not freqs:
            if len(freqs) < self.max_seqlen_kv:
                raise ValueError(f"packed_seq_params.max_seqlen_q is {len(freqs)}, but a sequence of the pack has {self.max_seqlen_kv} "
                                 "tokens, padding included: give the longest padded length")
            self._rotary = (freqs, freqs[self.position_T])
        return self._rotary[1]


def _pack(params, n, rank, contiguous, device) -> Pack:
    cu = params.cu_seqlens_q_padded if params.cu_seqlens_q_padded is not None else params.cu_seqlens_q
    offsets = cu.cpu().numpy().astype(np.int64)
    lengths = np.diff(offsets)
    total = int(offsets[-1])
    if n > 1 and (total % n if contiguous else (lengths % (2 * n)).any()):
        raise ValueError(f"context parallel size {n}: " + (
            f"the pack has {total} tokens, not a multiple of {n}" if contiguous
            else f"a sequence's padded length is not a multiple of {2 * n}: {lengths.tolist()}"))
    sequence = np.repeat(np.arange(len(lengths)), lengths)
    position = np.arange(total) - offsets[:-1][sequence]
    layout = Layout(tuple(lengths), cp_size=n, kind="contiguous" if contiguous else "zigzag")   # padded already: it adds nothing
    rows = np.stack([layout.index(r).numpy() for r in range(n)])    # [n, T] rows of the pack on each rank
    mine, gathered = rows[rank], np.empty(total, np.int64)
    gathered[rows.ravel()] = np.arange(total)
    buckets, output = _buckets(sequence[mine], position[mine], offsets, gathered, device)
    T = len(mine)
    one = torch.tensor([0, T], dtype=torch.int32, device=device)
    pack = Pack(qkv_format="thd", cu_seqlens_q=one, cu_seqlens_kv=one, max_seqlen_q=T, max_seqlen_kv=int(lengths.max(initial=0)))
    pack.position_T = torch.from_numpy(position[mine]).to(device)
    pack.buckets, pack.output_T = buckets, output
    return pack


def _buckets(sequence_T, position_T, offsets, gathered, device):
    """Group the sequences that this rank has queries of by length, so that padding costs at most about a quarter."""
    held, first, count = np.unique(sequence_T, return_index=True, return_counts=True)
    last = np.maximum.reduceat(position_T, first) + 1           # keys that the last local query sees
    order = np.argsort(last, kind="stable")
    groups, start = [], 0
    for i in range(1, len(order) + 1):
        if i == len(order) or last[order[i]] > max(16, 1.25 * last[order[start]]):
            groups.append(order[start:i])
            start = i
    buckets, output, base = [], np.empty(len(sequence_T), np.int64), 0
    for group in groups:
        B, Q, K = len(group), int(count[group].max()), int(last[group].max())
        query, where = np.zeros((B, Q), np.int64), np.zeros((B, Q), np.int64)
        key = np.zeros((B, K), np.int64)
        for b, g in enumerate(group):
            rows = np.arange(first[g], first[g] + count[g])
            query[b, :count[g]], where[b, :count[g]] = rows, position_T[rows]
            key[b, :last[g]] = gathered[offsets[held[g]]:offsets[held[g]] + last[g]]
            output[rows] = base + b * Q + np.arange(count[g])
        base += B * Q
        square = Q == K and (where == np.arange(Q)).sum() == count[group].sum() and (count[group] == last[group]).all()
        mask = None if square else torch.from_numpy(where[:, None, :, None] >= np.arange(K)).to(device)
        buckets.append(Bucket(torch.from_numpy(query).to(device), torch.from_numpy(key).to(device), mask, (B, Q, K)))
    return buckets, torch.from_numpy(output).to(device)
