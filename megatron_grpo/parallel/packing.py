"""Which sequences go to which data-parallel rank and micro-batch.

Every rank computes the same plan from the same lengths, so nothing but the lengths has to be exchanged. Denominators are
those of the whole step (LossInputs.counts), so a plan changes speed only, never the loss.
"""

import heapq
from collections.abc import Sequence

import numpy as np

from ..settings import ConfigError

Plan = list[list[list[int]]]
"""plan[data-parallel rank][micro-batch] = indices of its sequences, ascending; a micro-batch can be empty."""


def plan(lengths: Sequence[int], *, dp_size: int, cp_size: int = 1, max_tokens_per_gpu: int | None = None,
         micro_batch_size: int | None = None, multiple: int = 1, sample_ids: Sequence[int] | None = None) -> Plan:
    """Balance the sequences of one optimizer step over data-parallel ranks and cut each rank's share into micro-batches.

    With `max_tokens_per_gpu` (--use-dynamic-batch-size) a micro-batch holds at most max_tokens_per_gpu * cp_size tokens, padding not
    counted; else `micro_batch_size` sequences. All ranks get the same number of micro-batches, at least one: the most that a rank needs.

    Args:
        lengths: tokens of each sequence, prompt and response.
        multiple: the number of micro-batches is a multiple of this (the pipeline-parallel size under virtual pipeline parallelism).
        sample_ids: names for the error message.

    Raises:
        ConfigError: a sequence alone is longer than a micro-batch may be.
    """
    if (max_tokens_per_gpu is None) == (micro_batch_size is None):
        raise ValueError("give one of max_tokens_per_gpu and micro_batch_size")
    shares = partition(lengths, dp_size)
    own = [[lengths[i] for i in share] for share in shares]
    if micro_batch_size is not None:
        count = _common([-(-len(share) // micro_batch_size) for share in shares], multiple)
        bins = [_by_count(weights, count, micro_batch_size) for weights in own]
    elif max_tokens_per_gpu is not None:
        limit = max_tokens_per_gpu * cp_size
        for i, n in enumerate(lengths):
            if n > limit:
                name = i if sample_ids is None else sample_ids[i]
                raise ConfigError(f"sample {name} has {n} tokens, more than a micro-batch of --max-tokens-per-gpu {max_tokens_per_gpu} x "
                                  f"context-parallel size {cp_size} = {limit}; raise the flag to at least {-(-n // cp_size)} "
                                  "or shorten the responses")
        count = _common([len(_first_fit(weights, limit)) for weights in own], multiple)
        bins = [_by_tokens(weights, count, limit) for weights in own]
    return [[sorted(share[i] for i in b) for b in rank] for share, rank in zip(shares, bins, strict=True)]


def _common(needed: list[int], multiple: int) -> int:
    return -(-max(1, *needed) // multiple) * multiple


def partition(weights: Sequence[float], parts: int) -> list[list[int]]:
    """Cut into `parts` of nearly equal total weight; returns the indices of each part, ascending. Deterministic.

    Largest differencing method (Karmarkar and Karp, 1982): partial partitions, at first one an item, are merged, the two of
    largest spread first, heaviest part of one with lightest of the other. O(n (parts + log n)).
    """
    totals = [np.append(float(w), np.zeros(parts - 1)) for w in weights]        # of each partial partition, descending
    heap = [(-float(w), i) for i, w in enumerate(weights)]
    heapq.heapify(heap)
    merges = []
    while len(heap) > 1:
        (_, a), (_, b) = heapq.heappop(heap), heapq.heappop(heap)
        merged = totals[a] + totals[b][::-1]
        rank = np.argsort(-merged, kind="stable")
        merges.append((a, b, rank))
        totals[a] = totals[b] = totals[0][:0]       # no longer needed
        totals.append(merged[rank])
        heapq.heappush(heap, (totals[-1][-1] - totals[-1][0], len(totals) - 1))
    labels: dict[int, np.ndarray] = {heap[0][1]: np.arange(parts)} if heap else {}
    for new, (a, b, rank) in zip(range(len(totals) - 1, len(weights) - 1, -1), reversed(merges), strict=True):
        label = labels.pop(new)
        labels[a], labels[b] = np.empty(parts, int), np.empty(parts, int)
        labels[a][rank], labels[b][parts - 1 - rank] = label, label
    bins: list[list[int]] = [[] for _ in range(parts)]
    for i in range(len(weights)):
        bins[labels[i][0]].append(i)
    return bins


def _by_tokens(weights: Sequence[int], count: int, limit: int) -> list[list[int]]:
    """`count` bins under the limit, balanced where that keeps the limit, else filled."""
    bins = partition(weights, count)
    if max(sum(weights[i] for i in b) for b in bins) <= limit:
        return bins
    bins = _first_fit(weights, limit)
    return bins + [[] for _ in range(count - len(bins))]


def _first_fit(weights: Sequence[int], limit: int) -> list[list[int]]:
    """First fit, heaviest first: each item goes to the first bin with room; returns the bins."""
    room = np.empty(len(weights), dtype=np.int64)
    bins: list[list[int]] = []
    for i in sorted(range(len(weights)), key=lambda i: (-weights[i], i)):
        fits = room[:len(bins)] >= weights[i]
        b = int(fits.argmax()) if fits.any() else len(bins)
        if b == len(bins):
            room[b] = limit
            bins.append([])
        room[b] -= weights[i]
        bins[b].append(i)
    return bins


def _by_count(weights: Sequence[int], count: int, size: int) -> list[list[int]]:
    """`count` bins of at most `size` items, alike lengths together, so that little is padded."""
    order = sorted(range(len(weights)), key=lambda i: (-weights[i], i))
    return [order[b * size:(b + 1) * size] for b in range(count)]
