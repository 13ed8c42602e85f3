"""The process groups of the control plane: who generates, who shares a model replica, who reports.

A *leader* is the first rank of a model replica: tensor, context and pipeline rank 0. There is one per data-parallel
rank. It generates that replica's share of the rollouts and hands the samples to its *replica*, the ranks that share its data-parallel rank.
Both kinds of group are gloo groups: they carry host data, and a peer that dies breaks the connection at once
instead of leaving the others to wait.
"""

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist


@dataclass(frozen=True)
class ControlGroups:
    """Groups of this rank. `leaders` is None on ranks that do not lead."""

    replica: dist.ProcessGroup
    leader_rank: int                        # global rank of this replica's leader
    leaders: dist.ProcessGroup | None
    dp_rank: int
    dp_size: int

    @property
    def is_leader(self) -> bool:
        return self.leaders is not None

    def from_leader(self, value):
        """The leader's picklable value, on every rank of its replica."""
        box = [value]
        dist.broadcast_object_list(box, src=self.leader_rank, group=self.replica)
        return box[0]


def make_control_groups(timeout_s: float) -> ControlGroups:
    """Collective over all ranks; call once after Megatron's model parallelism is set up."""
    from megatron.core import mpu

    coordinate = [mpu.get_data_parallel_rank(), mpu.get_pipeline_model_parallel_rank(), mpu.get_context_parallel_rank(),
                  mpu.get_tensor_model_parallel_rank()]
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, coordinate)
    timeout, mine = timedelta(seconds=timeout_s), {}
    replicas: dict[int, list[int]] = {}
    for rank, (dp, *_) in enumerate(everyone):
        replicas.setdefault(dp, []).append(rank)
    leader_of = {dp: next(r for r in ranks if everyone[r][1:] == [0, 0, 0]) for dp, ranks in replicas.items()}
    for dp in sorted(replicas):
        group = dist.new_group(replicas[dp], backend="gloo", timeout=timeout)
        if dp == coordinate[0]:
            mine["replica"] = group
    leaders = dist.new_group([leader_of[dp] for dp in sorted(replicas)], backend="gloo", timeout=timeout)
    return ControlGroups(
        replica=mine["replica"], leader_rank=leader_of[coordinate[0]],
        leaders=leaders if coordinate[1:] == [0, 0, 0] else None, dp_rank=coordinate[0], dp_size=len(replicas))
