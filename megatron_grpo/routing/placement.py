"""From samples to each rank's own share of the routes: its tokens under packing, CP and SP, and its pipeline stage's MoE layers.

A share is an array [T, L, K] whose row t belongs to the t-th row that a decoder layer of that rank sees (parallel/layout's
`hidden_index`). Bytes a rank receives and holds fall as DP x CP x SP (tokens) x PP (layers).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..parallel.layout import Layout
from .codec import MISSING, route_dtype


@dataclass(frozen=True)
class RoutesShare:
    """One rank's routes of one micro-batch.

    Attributes:
        experts_TLK: [T, L, K] int8, int16 or int32; MISSING in all K places where the row routes natively.
        layers: 0-based decoder layer of each of the L columns.
        missing: the layers with MISSING rows. Known on the host, so that a forward need not ask the device.
    """

    experts_TLK: torch.Tensor
    layers: tuple[int, ...]
    missing: frozenset[int] = frozenset()

    @staticmethod
    def of(experts_TLK: np.ndarray, layers: Sequence[int]) -> "RoutesShare":
        """From a host array."""
        missing = (experts_TLK[:, :, 0] == MISSING).any(axis=0)
        return RoutesShare(torch.from_numpy(experts_TLK), tuple(layers), frozenset(np.asarray(layers)[missing].tolist()))

    def to(self, device) -> "RoutesShare":
        """On another device; a copy to the host is complete when this returns, one to a device need not be."""
        return RoutesShare(self.experts_TLK.to(device, non_blocking=torch.device(device).type != "cpu"), self.layers, self.missing)


def unrouted(layout: Layout, cp_rank: int = 0, tp_rank: int = 0) -> torch.Tensor:
    """[T] bool: the rows that carry no route of their own: padding, and the last token of each sequence.

    The engine never runs the last token as an input, so it has no row for it; no other token attends to it and its
    log-prob predicts nothing, so its experts reach no loss.
    """
    index = layout.hidden_index(cp_rank, tp_rank)
    return (index < 0) | torch.isin(index, torch.tensor(layout.lengths).cumsum(0) - 1)


def spread(rows: torch.Tensor, topk: int, num_experts: int) -> torch.Tensor:
    """[T] row numbers -> [T, K] int64 distinct experts; consecutive rows take turns over all experts.

    For unrouted rows: dispatch counts on K distinct experts a row, and one fixed choice would load one rank with all padding.
    """
    return (rows[:, None] * topk + torch.arange(topk, device=rows.device)) % num_experts


def place(routes: Sequence[np.ndarray | None], layout: Layout, *, columns: Sequence[int], topk: int, num_experts: int, cp_rank: int = 0,
          tp_rank: int = 0) -> np.ndarray:
    """One rank's share of a micro-batch, cut from whole samples on the rank that generated them.

    Args:
        routes: of each sequence of `layout`, in order: [N - 1 or N, all MoE layers, K] (audit.accept), or None: all rows missing.
        layout: of the micro-batch.
        columns: the MoE layers of the receiving rank's pipeline stage, as columns of `routes`.
        topk: K.
        num_experts: routed experts of the model.
        cp_rank: of the receiving rank.
        tp_rank: of the receiving rank; 0 without sequence parallelism.

    Returns:
        [T, len(columns), K] of the narrowest dtype. Unrouted rows hold spread experts, rows that the engine did not report MISSING.

    Raises:
        ValueError: another number of sequences, or a sequence's rows do not fit its tokens.
    """
    if len(routes) != layout.num_seqs and (len(routes) or layout.num_tokens):
        raise ValueError(f"routes of {len(routes)} sequences for a micro-batch of {layout.num_seqs}")
    index = layout.hidden_index(cp_rank, tp_rank).numpy()
    wanted = np.asarray(columns, dtype=np.int64)
    share = np.full((len(index), len(wanted), topk), MISSING, route_dtype(num_experts))
    start = 0
    for s, (rows, length) in enumerate(zip(routes, layout.lengths, strict=False)):
        if rows is not None:
            if len(rows) not in (length - 1, length):
                raise ValueError(f"sequence {s}: {len(rows)} rows of routes for {length} tokens, expected {length - 1}")
            mine = np.flatnonzero((index >= start) & (index < start + length - 1))
            share[mine] = rows[(index[mine] - start)[:, None], wanted]
        start += length
    free = unrouted(layout, cp_rank, tp_rank).numpy()
    numbers = torch.from_numpy(np.flatnonzero(free))
    share[free] = spread(numbers, topk, num_experts).numpy()[:, None]
    return share


class RouteStore:
    """The routes that a pass recorded, by micro-batch, narrow and on the host, until the rollout batch is done.

    The chunks of a virtual pipeline record one after the other; their layers are joined.
    """

    def __init__(self) -> None:
        self._shares: dict[object, RoutesShare] = {}

    def put(self, key: object, share: RoutesShare) -> None:
        """Store the share of one chunk of micro-batch `key`.

        Raises:
            ValueError: a layer of it is stored already: the key names two micro-batches, or the store was not cleared.
        """
        share = share.to("cpu")
        held = self._shares.get(key)
        if held is not None:
            if set(held.layers) & set(share.layers):
                raise ValueError(f"micro-batch {key}: routes of layers {sorted(set(held.layers) & set(share.layers))} are stored already; "
                                 "clear the store before a new rollout batch")
            share = RoutesShare(torch.cat([held.experts_TLK, share.experts_TLK], dim=1), held.layers + share.layers,
                                held.missing | share.missing)
        self._shares[key] = share

    def get(self, key: object) -> RoutesShare:
        """The routes of micro-batch `key`.

        Raises:
            KeyError: none were recorded.
        """
        if key not in self._shares:
            raise KeyError(f"no routes were recorded for micro-batch {key}")
        return self._shares[key]

    def nbytes(self) -> int:
        """Host bytes held."""
        return sum(s.experts_TLK.nbytes for s in self._shares.values())

    def clear(self) -> None:
        self._shares.clear()
