"""From the leaders' samples to every rank's micro-batches: exchange cards, plan, move samples, broadcast, place."""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from ..batch import Sample
from ..parallel.config import PackingConfig
from ..parallel.layout import Layout
from .groups import ControlGroups
from .microbatch import MicroBatch, PackedSamples, place
from .plan import MiniStepPlan, SampleCard, StepScalars, plan_rollout


class RolloutFailed(RuntimeError):
    """A leader could not produce its share. Raised on every rank, with the leader's message."""


@dataclass
class RolloutBatch:
    """One rollout on one rank: the micro-batches of each optimizer step, and the scalars of all samples."""

    mini_steps: list[list[MicroBatch]]
    num_samples: list[int]
    scalars: StepScalars
    cards: list[SampleCard]
    metrics: dict[str, float]

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
    device: torch.device

    def layout(self, lengths) -> Layout:
        thd = self.packing.qkv_format == "thd"
        return Layout(tuple(lengths), cp_size=self.cp_size, tp_size=self.tp_size, kind=self.packing.cp_layout,
                      qkv_format=self.packing.qkv_format, multiple=self.packing.data_pad_size_multiplier if thd else 1)


def agree(groups: ControlGroups, error: str | None) -> None:
    """Every rank learns whether any leader failed; none is left waiting.

    Raises:
        RolloutFailed: on every rank, with each failed leader's message.
    """
    report = None
    if groups.leaders is not None:
        errors: list = [None] * groups.dp_size
        dist.all_gather_object(errors, error, group=groups.leaders)
        report = [f"data-parallel rank {i}: {e}" if groups.dp_size > 1 else e for i, e in enumerate(errors) if e]
    report = groups.from_leader(report)
    if report:
        raise RolloutFailed("\n".join(report))


def distribute(groups: ControlGroups, placement: Placement, samples: list[Sample] | None, metrics: dict[str, float] | None,
               replay=None) -> RolloutBatch:
    """Collective over all ranks. `samples` and `metrics` are given on leaders.

    Args:
        replay: when routes are replayed (R3), the adapter that cuts each rank's share of them.
    """
    payload = None
    if groups.leaders is not None:
        everyone: list = [None] * groups.dp_size
        dist.all_gather_object(everyone, [SampleCard.of(s, groups.dp_rank) for s in samples], group=groups.leaders)
        cards = sorted((c for own in everyone for c in own), key=lambda c: c.sample_id)
        try:
            plan = plan_rollout(cards, placement.num_steps, dp_size=groups.dp_size, cp_size=placement.cp_size, config=placement.packing,
                                micro_batch_size=placement.micro_batch_size, multiple=placement.multiple)
            payload = (_move_and_pack(groups, plan, cards, samples), cards, plan, metrics)
        except Exception as error:      # the same on every leader: all have the same cards
            payload = error
    payload = groups.from_leader(_without_routes(payload))
    if isinstance(payload, Exception):
        raise payload
    packed_steps, cards, plan, metrics = payload
    mini_steps = []
    for step, packed in zip(plan, packed_steps, strict=True):
        mini_steps.append([place(p, number, placement.layout(p.lengths), placement.cp_rank, step.counts, placement.device)
                           for number, p in enumerate(packed)])
    return RolloutBatch(mini_steps, [s.num_samples for s in plan], StepScalars.of(cards), cards, metrics)


def _move_and_pack(groups: ControlGroups, plan: list[MiniStepPlan], cards: list[SampleCard], samples: list[Sample]) -> list[list[PackedSamples]]:
    from ..rollout.exchange import exchange_samples

    destination = {i: dp for step in plan for dp, mbs in enumerate(step.assignment) for mb in mbs for i in mb}
    owner = {c.sample_id: c.owner for c in cards}
    mine = {s.sample_id: s for s in exchange_samples(samples, destination, owner, groups.leaders)}
    index = {c.sample_id: i for i, c in enumerate(cards)}
    return [[PackedSamples.pack([mine[i] for i in mb], index, step.rollout_tokens, step.prompt_tokens) for mb in step.assignment[groups.dp_rank]]
            for step in plan]


def _without_routes(payload):
    return payload
