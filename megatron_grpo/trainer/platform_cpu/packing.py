"""How attention on CPU sees a micro-batch: the positions of this rank's rows, and the sequences grouped by length."""

import copy
import functools
from dataclasses import dataclass

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from ...parallel.layout import Layout


@dataclass
class Rows(PackedSeqParams):
    """A PackedSeqParams as one context-parallel rank sees it. A bucket is a batch of B sequences of like length, padded to Q
    local queries and K keys; a padding query or key repeats row 0, and its output is not read.

    Attributes:
        position_T: [T] place in its sequence of each row (thd), or [s] of each row of the padded batch (bshd).
        query, key: [sum of B Q] local rows and [sum of B K] gathered rows of all buckets. None: all rows as they are.
        output_T: [T] where each row's output stands among those of the buckets.
        shapes: (B, Q, K) of each bucket.
        masks: per bucket [B or 1, 1, Q, K], True where a query sees a key. None: square and causal.
        cos_sin: the rotary factors of each row, or None.
    """

    position_T: torch.Tensor = None
    query: torch.Tensor | None = None
    key: torch.Tensor | None = None
    output_T: torch.Tensor | None = None
    shapes: tuple = ()
    masks: tuple = ()
    cos_sin: tuple | None = None
    _rotary: tuple = ()

    def rotated(self, angles, scale: float, dtype: torch.dtype) -> "Rows":
        """These rows with rotary factors scale * cos and scale * sin of `angles` [positions, 1, 1, d]."""
        if angles is None:
            return self
        if not self._rotary or self._rotary[0] is not angles or self._rotary[1].dtype != dtype:
            longest = int(self.position_T.max()) + 1
            if len(angles) < longest:
                raise ValueError(f"rotary angles for {len(angles)} positions, but a sequence has {longest}, padding included: "
                                 "give the longest padded length as packed_seq_params.max_seqlen_q")
            mine = angles[self.position_T]
            if self.qkv_format == "thd":
                mine = mine.squeeze(1)
            self._rotary = (angles, (mine.cos() * scale).to(dtype), (mine.sin() * scale).to(dtype))
        rows = copy.copy(self)      # not set in place: a recompute in the backward must see what its forward saw
        rows.cos_sin = self._rotary[1:]
        return rows


def packed_rows(params: PackedSeqParams, n: int, rank: int, contiguous: bool, device: torch.device) -> Rows:
    """The rows of a packed micro-batch on rank `rank` of n; made once a micro-batch and kept with its `params`."""
    kept = vars(params).setdefault("_rows", {})
    key = (n, rank, contiguous, device)
    if key not in kept:
        kept[key] = _packed_rows(params, n, rank, contiguous, device)
    return kept[key]


@functools.lru_cache(maxsize=8)
def padded_rows(s: int, n: int, rank: int, contiguous: bool, device: torch.device) -> Rows:
    """The rows of a padded batch of which each rank holds s positions."""
    layout = Layout((n * s,), cp_size=n, kind="contiguous" if contiguous else "zigzag", qkv_format="bshd")
    where = torch.stack([layout.index(r) for r in range(n)]).to(device)     # [n, s] positions on each rank
    rows = Rows(qkv_format="bshd", position_T=where[rank])
    if n > 1:
        rows.key, rows.masks = where.flatten().argsort(), (where[rank, :, None] >= torch.arange(n * s, device=device),)
    return rows


def _packed_rows(params, n, rank, contiguous, device) -> Rows:
    cu = params.cu_seqlens_q_padded if params.cu_seqlens_q_padded is not None else params.cu_seqlens_q
    offsets = cu.cpu().numpy().astype(np.int64)
    lengths, total = np.diff(offsets), int(offsets[-1])
    if n > 1 and (total % n if contiguous else (lengths % (2 * n)).any()):
        raise ValueError(f"context parallel size {n}: " + (
            f"the pack has {total} tokens, not a multiple of {n}" if contiguous
            else f"a sequence's padded length is not a multiple of {2 * n}: {lengths.tolist()}"))
    sequence = np.repeat(np.arange(len(lengths)), lengths)
    position = np.arange(total) - offsets[:-1][sequence]
    layout = Layout(tuple(lengths), cp_size=n, kind="contiguous" if contiguous else "zigzag")   # padded already: it adds nothing
    held = np.stack([layout.index(r).numpy() for r in range(n)])    # [n, T] rows of the pack on each rank
    gathered = np.empty(total, np.int64)
    gathered[held.ravel()] = np.arange(total)
    rows = Rows(qkv_format="thd", position_T=torch.from_numpy(position[held[rank]]).to(device))
    _bucket(rows, sequence[held[rank]], position[held[rank]], offsets, gathered, device)
    return rows


def _bucket(rows: Rows, sequence_T, position_T, offsets, gathered, device):
    """Group the sequences that this rank has queries of by length, so that padding costs at most about a quarter."""
    seqs, first, count = np.unique(sequence_T, return_index=True, return_counts=True)
    last = np.maximum.reduceat(position_T, first) + 1           # keys that the last local query sees
    queries, keys, shapes, masks, output, base = [], [], [], [], np.empty(len(sequence_T), np.int64), 0
    for group in _groups(last):
        B, Q, K = len(group), int(count[group].max()), int(last[group].max())
        query, where, key = np.zeros((B, Q), np.int64), np.zeros((B, Q), np.int64), np.zeros((B, K), np.int64)
        for b, g in enumerate(group):
            mine = np.arange(first[g], first[g] + count[g])
            query[b, :count[g]], where[b, :count[g]] = mine, position_T[mine]
            key[b, :last[g]] = gathered[offsets[seqs[g]]:offsets[seqs[g]] + last[g]]
            output[mine] = base + b * Q + np.arange(count[g])
        base += B * Q
        causal = Q == K and (count[group] == last[group]).all()      # each query's place is its position
        queries.append(query.ravel())
        keys.append(key.ravel())
        shapes.append((B, Q, K))
        masks.append(None if causal else torch.from_numpy(where[:, None, :, None] >= np.arange(K)).to(device))
    rows.query, rows.key = (torch.from_numpy(np.concatenate(x)).to(device) for x in (queries, keys))
    rows.output_T, rows.shapes, rows.masks = torch.from_numpy(output).to(device), tuple(shapes), tuple(masks)


def _groups(length):
    """Indices of like lengths: the longest of a group is at most a quarter longer than its shortest."""
    order = np.argsort(length, kind="stable")
    start = 0
    for i in range(1, len(order) + 1):
        if i == len(order) or length[order[i]] > max(16, 1.25 * length[order[start]]):
            yield order[start:i]
            start = i
