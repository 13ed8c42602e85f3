"""Megatron -> Hugging Face: full tensors, bucket by bucket, where they are wanted.

Ranks that together hold one copy of a tensor form a *holder group*: the tensor-parallel group for dense weights; for experts the
expert tensor-parallel group, or all of a stage's expert ranks. A bucket is gathered to the first rank of its holder
group in one collective. Two ways to end:

    to="owners"   each first rank keeps what it gathered. Nothing crosses expert or pipeline ranks, and many ranks write.
    to="rank0"    the first rank of each pipeline stage passes its buckets on to global rank 0, stage after stage.

Memory: a rank holds at most a bucket of shards, the gathered bucket and the assembled one, i.e. 3 `bucket_bytes` (plus the
excess of a single tensor that is larger than a bucket, which goes alone).
"""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from .bridge import bridged_tensors
from .live import LiveModel, Shard

Bucket = list[tuple[str, torch.Tensor]]
ALIGNMENT = 16      # bytes; a shard's view in the flat buffer must be aligned for any dtype


def iterate_hf_tensors(model: LiveModel, bucket_bytes: int, to: str = "rank0") -> Iterator[Bucket]:
    """Yield buckets of (Hugging Face name, full tensor) on the ranks that publish; on the others, nothing.

    Collective over all ranks: each must run it to the end. A rank that fails in between must go on to draw buckets.

    Args:
        model: the live model.
        bucket_bytes: gathered at a time [bytes].
        to: "rank0" or "owners".
    """
    if model.bridge is not None:
        yield from bridged_tensors(model.bridge, model.chunks, bucket_bytes)
        return
    shards = [shard for shard in model.shards() if shard.exported]
    if to == "owners":
        yield from _gathered(model, shards, bucket_bytes, experts=False)
        yield from _gathered(model, shards, bucket_bytes, experts=True)
        return
    stage = _stage_buckets(model, shards, bucket_bytes)
    groups = model.groups
    if groups.pp.rank() > 0:
        for bucket in stage:
            _send(bucket, groups.pp)
        if _leads_stage(model):
            _send(None, groups.pp)
        return
    yield from stage
    if _leads_stage(model):
        for source in range(1, groups.pp.size()):
            while (received := _receive(groups.pp, source, model.device)) is not None:
                yield received


def _leads_stage(model: LiveModel) -> bool:
    groups = model.groups
    return groups.first_replica and groups.first_expert_replica and groups.tp.rank() == 0 and groups.etp_ep.rank() == 0


def _stage_buckets(model: LiveModel, shards: Sequence[Shard], bucket_bytes: int) -> Iterator[Bucket]:
    yield from _gathered(model, shards, bucket_bytes, experts=False)
    yield from _gathered(model, shards, bucket_bytes, experts=True, whole_stage=True)


def _gathered(model: LiveModel, shards: Sequence[Shard], bucket_bytes: int, experts: bool, whole_stage: bool = False) -> Iterator[Bucket]:
    """Gather the dense or the expert shards to the first rank of each holder group of the first replica."""
    groups = model.groups
    if not (groups.first_expert_replica if experts else groups.first_replica):
        return
    group = (groups.etp_ep if whole_stage else groups.etp) if experts else groups.tp
    shards = [shard for shard in shards if shard.entry.is_expert == experts]
    members: list = [None] * group.size()
    # (rank in the tensor-parallel group, expert-parallel rank) of each member: the order of ranks in a group is Megatron's affair
    mine = (groups.etp.rank(), groups.ep.rank()) if experts else (groups.tp.rank(), 0)
    dist.all_gather_object(members, mine, group=group)
    for bucket in _buckets(shards, bucket_bytes // group.size()):
        buffers = _gather(bucket, group)
        if buffers is not None:
            yield _assemble(model, bucket, buffers, members)


def _buckets(shards: Sequence[Shard], limit: int) -> Iterator[list[Shard]]:
    """Runs of shards of at most `limit` bytes; a larger one alone. The same on all ranks of a group: their shards have equal sizes."""
    bucket: list[Shard] = []
    size = 0
    for shard in shards:
        if bucket and size + _aligned(shard) > limit:
            yield bucket
            bucket, size = [], 0
        bucket.append(shard)
        size += _aligned(shard)
    if bucket:
        yield bucket


def _aligned(shard: Shard) -> int:
    return -(-shard.tensor.nbytes // ALIGNMENT) * ALIGNMENT


def _gather(bucket: Sequence[Shard], group: dist.ProcessGroup) -> list[torch.Tensor] | None:
    """Every member's shards as flat bytes, on the first rank of the group; None elsewhere."""
    flat = torch.zeros(sum(map(_aligned, bucket)), dtype=torch.uint8, device=bucket[0].tensor.device)
    for shard, view in _views(bucket, flat):
        view.copy_(shard.tensor)
    if group.size() == 1:
        return [flat]
    buffers = [torch.empty_like(flat) for _ in range(group.size())] if group.rank() == 0 else None
    dist.gather(flat, buffers, group=group, group_dst=0)
    return buffers


def _views(bucket: Sequence[Shard], flat: torch.Tensor) -> Iterator[tuple[Shard, torch.Tensor]]:
    start = 0
    for shard in bucket:
        tensor = shard.tensor
        yield shard, flat[start:start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        start += _aligned(shard)


def _assemble(model: LiveModel, bucket: Sequence[Shard], buffers: list[torch.Tensor], members: list[tuple[int, int]]) -> Bucket:
    full: dict[str, torch.Tensor] = {}
    offset = model.groups.ep.rank() * model.experts_per_rank
    for buffer, (tp_rank, ep_rank) in zip(buffers, members, strict=True):
        for shard, view in _views(bucket, buffer):
            expert = shard.numbers["expert"] - offset + ep_rank * model.experts_per_rank if shard.entry.is_expert else None
            names = shard.hf_names(expert)
            shapes, blocks = model.blocks(shard, tp_rank)
            for name, shape in zip(names, shapes, strict=True):
                if name not in full:
                    full[name] = view.new_empty(shape)
            for block in blocks:
                block.of_hf(full[names[block.source]]).copy_(block.of_shard(view))
    return list(full.items())


def _send(bucket: Bucket | None, group: dist.ProcessGroup) -> None:
    """To the first pipeline stage: a header, then each tensor."""
    dist.send_object_list([bucket and [(name, tensor.shape, tensor.dtype) for name, tensor in bucket]], group=group, group_dst=0)
    for _, tensor in bucket or ():
        dist.send(tensor, group=group, group_dst=0)


def _receive(group: dist.ProcessGroup, source: int, device: torch.device) -> Bucket | None:
    header: list = [None]
    dist.recv_object_list(header, group=group, group_src=source)
    if header[0] is None:
        return None
    bucket = []
    for name, shape, dtype in header[0]:
        tensor = torch.empty(shape, dtype=dtype, device=device)
        dist.recv(tensor, group=group, group_src=source)
        bucket.append((name, tensor))
    return bucket
