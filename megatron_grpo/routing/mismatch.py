"""How far the replayed experts are from the trainer's own choice: the engines' mismatch, measured where it begins.

Experts are compared as sets: the order within a row is the engine's business. With S_tl the replayed and N_tl the native set
of token t in layer l,

    router mismatch   share of (t, l) with S_tl != N_tl          (about 10 % between SGLang and Megatron in bf16, arXiv 2510.11370)
    token mismatch    share of t with S_tl != N_tl in any l      (about 94 % over 48 layers)
    agreement         mean of |S_tl & N_tl| / K                  (near 1; near K / E when layers are permuted or weights differ)
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from ..losses.inputs import Metric
from ..parallel.layout import Layout
from .audit import RouteAuditError
from .placement import RoutesShare

MIN_ROWS = 16       # fewer rows of a sample say nothing about damage


@dataclass(frozen=True)
class RouteMismatch:
    """One rank's share of a micro-batch. `_TL`: [T, L], False or 0 where a row is unrouted or missing.

    Attributes:
        layers: 0-based decoder layer of each column.
        counted_TL: bool, rows that are compared.
        differs_TL: bool, the sets differ.
        agreement_TL: float32 share of common experts.
        missing_L: rows without a route from the engine.
    """

    layers: tuple[int, ...]
    counted_TL: torch.Tensor
    differs_TL: torch.Tensor
    agreement_TL: torch.Tensor
    missing_L: torch.Tensor


def compare(replayed: RoutesShare, own: RoutesShare, unrouted_T: torch.Tensor) -> RouteMismatch:
    """Replayed experts against the router's own top-k on the same scores.

    Args:
        replayed: what the engine reported; may have more layers (those of other virtual stages).
        own: the native choice.
        unrouted_T: [T] bool rows that are not compared (placement.unrouted).

    Raises:
        ValueError: `replayed` lacks a layer of `own`.
    """
    if not set(own.layers) <= set(replayed.layers):
        raise ValueError(f"replayed layers {sorted(replayed.layers)}, own {sorted(own.layers)}")
    columns = [replayed.layers.index(n) for n in own.layers]
    a_TLK, b_TLK = replayed.experts_TLK[:, columns].to(own.experts_TLK.device), own.experts_TLK
    missing_TL = (a_TLK[..., 0] < 0) & ~unrouted_T[:, None]
    counted_TL = ~missing_TL & ~unrouted_T[:, None]
    common_TL = sum(((a_TLK == b_TLK[..., k:k + 1]).any(-1).float() for k in range(b_TLK.shape[-1])), torch.zeros_like(counted_TL).float())
    agreement_TL = common_TL / a_TLK.shape[-1] * counted_TL
    return RouteMismatch(own.layers, counted_TL, (common_TL < a_TLK.shape[-1]) & counted_TL, agreement_TL, missing_TL.sum(0).float())


def mismatch_metrics(parts: Sequence[RouteMismatch], pp_group: dist.ProcessGroup | None = None) -> dict[str, Metric]:
    """(sum, count) pairs over the micro-batches of one pass; one all-reduce over the pipeline group, for the token mismatch.

    Args:
        parts: one a micro-batch, with all MoE layers of this rank; every rank of `pp_group` has the same micro-batches.
    """
    out: dict[str, Metric] = {}
    flips_T = torch.cat([p.differs_TL.sum(1, dtype=torch.int32) for p in parts])
    counted_T = torch.cat([p.counted_TL.sum(1, dtype=torch.int32) for p in parts])
    both = torch.stack([flips_T, counted_T])
    if pp_group is not None:
        dist.all_reduce(both, group=pp_group)
    out["routing/token_mismatch"] = (both[0] > 0).sum().float(), (both[1] > 0).sum().float()
    differs_L, agreement_L, counted_L, missing_L = (
        torch.stack(x).sum(0) for x in zip(*((p.differs_TL.sum(0).float(), p.agreement_TL.sum(0), p.counted_TL.sum(0).float(), p.missing_L)
                                             for p in parts), strict=True))
    out["routing/router_mismatch"] = differs_L.sum(), counted_L.sum()
    out["routing/agreement"] = agreement_L.sum(), counted_L.sum()
    out["routing/fallback"] = missing_L.sum(), (missing_L + counted_L).sum()
    for i, layer in enumerate(parts[0].layers):
        out[f"routing/router_mismatch/layer_{layer}"] = differs_L[i], counted_L[i]
    return out


def find_damage(part: RouteMismatch, layout: Layout, sample_ids: Sequence[int], floor: float, cp_rank: int = 0,
                tp_rank: int = 0) -> list[RouteAuditError]:
    """The samples with a layer whose agreement is below `floor`, each with its worst layer; the worst sample first.

    What the checks of `audit` cannot see: legal experts that are another layer's, or those of other weights.

    Args:
        part: of one micro-batch on this rank.
        sample_ids: of the layout's sequences.
    """
    index = layout.hidden_index(cp_rank, tp_rank).to(part.counted_TL.device)
    ends = torch.tensor(layout.lengths, device=index.device).cumsum(0)
    seq_T = torch.searchsorted(ends, index.clamp(min=0), right=True).clamp(max=layout.num_seqs - 1)
    sums = torch.zeros(2, layout.num_seqs, len(part.layers), device=index.device)
    sums[0].index_add_(0, seq_T, part.agreement_TL)
    sums[1].index_add_(0, seq_T, part.counted_TL.float())
    agreement_SL, rows_SL = sums.cpu().numpy()
    share_SL = np.where(rows_SL >= MIN_ROWS, agreement_SL / np.maximum(rows_SL, 1), 1.0)
    if share_SL.size == 0:
        return []
    worst_S = share_SL.argmin(1)
    lowest_S = share_SL.min(1)
    return [RouteAuditError(
        sample_ids[s], f"only {lowest_S[s]:.0%} of the engine's experts are the trainer's own (--router-agreement-floor {floor})",
        "permuted layers, or routes of other weights: the engine was not updated, or its prefix cache outlived the update",
        layer=part.layers[worst_S[s]]) for s in lowest_S.argsort() if lowest_S[s] < floor]
