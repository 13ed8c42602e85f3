"""The process groups of the control plane: who generates, who shares a model replica, who reports.

A *leader* is the first rank of a model replica: tensor, context and pipeline rank 0. There is one per data-parallel
rank. It generates that replica's share of the rollouts and hands the samples to its *replica*, the ranks that share its data-parallel rank.
Both kinds of group are gloo groups: they carry host data, and a peer that dies breaks the connection at once
instead of leaving the others to wait.
"""

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

PATIENCE = 60.0     # seconds that those who wait for a leader wait longer than the leader itself, which then says what was late


def any_rank(said: bool, device) -> bool:
    """Whether any rank of the job says so, on all of them. Collective."""
    flag = torch.tensor([float(said)], device=device)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag.item())


@dataclass(frozen=True)
class Place:
    """Where a rank of a replica stands: what it holds of each micro-batch."""

    pp_rank: int
    cp_rank: int
    tp_rank: int


@dataclass(frozen=True)
class ControlGroups:
    """Groups of this rank. `leaders` is None on ranks that do not lead; `places` follows the replica's rank order."""

    replica: dist.ProcessGroup
    leader_rank: int                        # global rank of this replica's leader
    leaders: dist.ProcessGroup | None
    dp_rank: int
    dp_size: int
    places: tuple[Place, ...]

    @property
    def is_leader(self) -> bool:
        return self.leaders is not None

    def from_leader(self, value):
        """The leader's picklable value, on every rank of its replica."""
        box = [value]
        dist.broadcast_object_list(box, src=self.leader_rank, group=self.replica)
        return box[0]

    def scatter(self, values: list | None):
        """From the leader's list, one value for each rank of its replica."""
        box: list = [None]
        dist.scatter_object_list(box, values, src=self.leader_rank, group=self.replica)
        return box[0]

    def to_leader(self, value) -> list | None:
        """Every rank's value, in the replica's order, on the leader."""
        out: list | None = [None] * len(self.places) if self.is_leader else None
        dist.gather_object(value, out, dst=self.leader_rank, group=self.replica)
        return out

    def over_leaders(self, value) -> list | None:
        """Every leader's value, by data-parallel rank, on each leader; None on other ranks."""
        if self.leaders is None:
            return None
        out: list = [None] * self.dp_size
        dist.all_gather_object(out, value, group=self.leaders)
        return out


def make_control_groups(timeout_s: float) -> ControlGroups:
    """Collective over all ranks; call once after Megatron's model parallelism is set up.

    Args:
        timeout_s: longest time that a leader takes for its work.
    """
    from megatron.core import mpu

    mine = (mpu.get_data_parallel_rank(), Place(mpu.get_pipeline_model_parallel_rank(), mpu.get_context_parallel_rank(),
                                                mpu.get_tensor_model_parallel_rank()))
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    timeout, replica = timedelta(seconds=timeout_s + PATIENCE), None
    group: Any
    leaders: Any
    members: dict[int, list[int]] = {}
    for rank, (dp, _) in enumerate(everyone):
        members.setdefault(dp, []).append(rank)
    leader_of = {dp: next(r for r in ranks if everyone[r][1] == Place(0, 0, 0)) for dp, ranks in members.items()}
    for dp in sorted(members):
        group = dist.new_group(members[dp], backend="gloo", timeout=timeout)
        if dp == mine[0]:
            replica = group
    leaders = dist.new_group([leader_of[dp] for dp in sorted(members)], backend="gloo", timeout=timeout)
    return ControlGroups(replica=replica, leader_rank=leader_of[mine[0]], leaders=leaders if mine[1] == Place(0, 0, 0) else None,
                         dp_rank=mine[0], dp_size=len(members), places=tuple(everyone[r][1] for r in members[mine[0]]))
