"""From the leaders' samples to every rank's micro-batches: exchange cards, plan, move samples, broadcast, place.

Tokens, masks and log-probs of a replica's samples go to all of its ranks: a few bytes a token. Routes are hundreds of
bytes a token: each rank gets its own tokens' routes for its own layers, and nobody else's.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from ..batch import Sample
from ..parallel.config import PackingConfig
from ..parallel.layout import Layout
from ..rollout.exchange import exchange_samples
from ..routing import placement
from ..routing.placement import RoutesShare
from .groups import ControlGroups
from .microbatch import MicroBatch, PackedSamples, place
from .plan import MiniStepPlan, SampleCard, StepScalars, plan_rollout


class RolloutFailed(RuntimeError):
    """A rollout cannot be trained on: a leader could not produce its share, or `damaged` samples show in it. Raised on every rank."""

    def __init__(self, message: str, damaged: frozenset[int] = frozenset()):
        super().__init__(message)
        self.damaged = damaged


@dataclass
class RolloutBatch:
    """One rollout on one rank: the micro-batches of each optimizer step, and the scalars of all samples."""

    mini_steps: list[list[MicroBatch]]
    scalars: StepScalars
    cards: list[SampleCard]
    metrics: dict[str, float] = field(default_factory=dict)
    is_advantage: bool = False      # the rewards are advantages already
    samples: dict[int, Sample] | None = None        # by sample_id, those of this replica; on its leader

    @property
    def microbatches(self) -> list[MicroBatch]:
        return [mb for step in self.mini_steps for mb in step]


@dataclass(frozen=True)
class Placement:
    """This rank's place in the layout, and the layout's rules."""

    packing: PackingConfig
    num_steps: int
    micro_batch_size: int
    multiple: int           # the number of micro-batches is a multiple of this
    cp_size: int
    cp_rank: int
    tp_size: int            # 1 without sequence parallelism
    tp_rank: int            # 0 without sequence parallelism
    device: torch.device

    def layout(self, lengths) -> Layout:
        packed = self.packing.qkv_format == "thd"
        return Layout(tuple(lengths), cp_size=self.cp_size, tp_size=self.tp_size, kind=self.packing.cp_layout,
                      qkv_format=self.packing.qkv_format, multiple=self.packing.data_pad_size_multiplier if packed else 1)


def agree(groups: ControlGroups, error: str | None) -> None:
    """Every rank learns whether any leader failed; none is left waiting.

    Raises:
        RolloutFailed: on every rank, with each failed leader's message.
    """
    errors = groups.over_leaders(error) or []
    report = groups.from_leader([f"data-parallel rank {i}: {e}" if groups.dp_size > 1 else e for i, e in enumerate(errors) if e])
    if report:
        raise RolloutFailed("\n".join(report))


def on_leaders(groups: ControlGroups, work: Callable[[], Any]) -> Any:
    """work() on every leader, its value there and None elsewhere. Collective: a leader that fails fails every rank.

    Raises:
        RolloutFailed: on every rank, with each failed leader's message.
    """
    value = error = None
    if groups.is_leader:
        try:
            value = work()
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}"
    agree(groups, error)
    return value


def distribute(groups: ControlGroups, where: Placement, samples: list[Sample] | None, metrics: dict[str, float] | None,
               is_advantage: bool = False, replay=None) -> RolloutBatch:
    """Collective over all ranks.

    Args:
        groups: the control plane.
        where: this rank's place.
        samples, metrics, is_advantage: the leader's.
        replay: the bound RouterReplay when samples carry routes (R3), else None.
    """
    payload: Any = None
    mine = None
    cards = groups.over_leaders([SampleCard.of(s, groups.dp_rank) for s in samples] if groups.is_leader else None)
    if cards is not None:
        cards = sorted((c for own in cards for c in own), key=lambda c: c.sample_id)
        try:
            plan = plan_rollout(cards, where.num_steps, dp_size=groups.dp_size, cp_size=where.cp_size, config=where.packing,
                                micro_batch_size=where.micro_batch_size, multiple=where.multiple)
            mine = _moved(groups, plan, cards, samples)
            payload = (_packed(groups, plan, cards, mine), cards, [step.counts for step in plan], metrics or {}, is_advantage)
        except Exception as error:      # the same on every leader: all plan from the same cards
            payload = error
    payload = groups.from_leader(payload)
    if isinstance(payload, Exception):
        raise payload
    packed_steps, cards, counts, metrics, is_advantage = payload
    mini_steps = [[place(p, (step, i), where.layout(p.lengths), where.cp_rank, where.tp_rank, counts[step], where.device)
                   for i, p in enumerate(packed)] for step, packed in enumerate(packed_steps)]
    batch = RolloutBatch(mini_steps, StepScalars.of(cards), cards, metrics, is_advantage, mine)
    if replay is not None:
        _share_routes(groups, where, batch, packed_steps, mine, replay)
    return batch


def _moved(groups: ControlGroups, plan: list[MiniStepPlan], cards: list[SampleCard], samples: list[Sample]) -> dict[int, Sample]:
    destination = {i: dp for step in plan for dp, mbs in enumerate(step.assignment) for mb in mbs for i in mb}
    owner = {c.sample_id: c.owner for c in cards}
    return {s.sample_id: s for s in exchange_samples(samples, destination, owner, groups.leaders)}


def _packed(groups: ControlGroups, plan: list[MiniStepPlan], cards: list[SampleCard], mine: dict[int, Sample]) -> list[list[PackedSamples]]:
    index = {c.sample_id: i for i, c in enumerate(cards)}
    return [[PackedSamples.pack([mine[i] for i in mb], index, step.rollout_tokens, step.prompt_tokens) for mb in step.assignment[groups.dp_rank]]
            for step in plan]


def _share_routes(groups: ControlGroups, where: Placement, batch: RolloutBatch, packed_steps, mine: dict[int, Sample] | None, replay) -> None:
    """Cut every rank's routes on the leader and scatter them, micro-batch by micro-batch, so that only one is in flight."""
    spec = replay.spec
    columns = [spec.moe_layers.index(layer) for layer in replay.layers]
    wanted = groups.to_leader(columns)
    keys = []           # what each rank of the replica holds; ranks with the same key share one cut
    if wanted is not None:
        keys = [(at.cp_rank, at.tp_rank if where.tp_size > 1 else 0, tuple(layers)) for at, layers in zip(groups.places, wanted, strict=True)]
    for packed, mbs in zip(packed_steps, batch.mini_steps, strict=True):
        for p, mb in zip(packed, mbs, strict=True):
            shares = None
            if mine is not None:
                cut: dict = {}
                for key in keys:
                    if key not in cut:
                        cut[key] = placement.place([mine[i].routes for i in p.sample_ids], mb.layout, columns=key[2], topk=spec.topk,
                                                   num_experts=spec.num_experts, cp_rank=key[0], tp_rank=key[1])
                shares = [cut[key] for key in keys]
            mb.routes = RoutesShare.of(groups.scatter(shares), replay.layers)
