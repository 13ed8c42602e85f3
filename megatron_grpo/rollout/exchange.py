"""Finished samples from the leaders that generated them to the leaders that train on them, peer to peer.

Each pair of leaders that has anything to move moves one buffer: a small header (scalars, strings, the arrays' dtypes and shapes) and the
arrays' bytes behind it. In round r a leader sends to rank + r and receives from rank - r, so that at any time it holds one
outgoing and one incoming buffer beside its own samples.
"""

import pickle
from collections.abc import Mapping
from dataclasses import fields

import numpy as np
import torch
import torch.distributed as dist

from ..batch import Sample

ARRAYS = ("tokens", "loss_mask", "rollout_logp", "routes")
SCALARS = tuple(f.name for f in fields(Sample) if f.name not in (*ARRAYS, "sampling_mask"))
ALIGN = 8
CHUNK = 1 << 28     # bytes of one message


def exchange_samples(samples: list[Sample], destination: Mapping[int, int], owner: Mapping[int, int],
                     group: dist.ProcessGroup | None) -> list[Sample]:
    """Move each sample to the leader that trains on it. Collective over `group`.

    Args:
        samples: those that this leader owns; more than `destination` names are dropped.
        destination: sample_id -> rank in `group` that wants it. The same on every rank.
        owner: sample_id -> rank in `group` that has it. The same on every rank.
        group: gloo group of the leaders; None or of size 1 moves nothing.

    Returns:
        This leader's samples, by sample_id.

    Raises:
        ValueError: a sample that this rank owns by `owner` is not in `samples`.
    """
    rank, size = (0, 1) if group is None else (group.rank(), group.size())
    own = {s.sample_id: s for s in samples}
    missing = [i for i in destination if owner[i] == rank and i not in own]
    if missing:
        raise ValueError(f"data-parallel rank {rank} does not hold its samples {missing[:5]}")
    result = [own[i] for i, to in destination.items() if to == rank and owner[i] == rank]
    sources = {owner[i] for i, to in destination.items() if to == rank}
    leaving: dict[int, list[int]] = {}
    for i in sorted(own.keys() & destination.keys()):
        leaving.setdefault(destination[i], []).append(i)
    for step in range(1, size):
        assert group is not None
        to, source = (rank + step) % size, (rank - step) % size
        outgoing = [own.pop(i) for i in leaving.get(to, ())]
        result += _swap(pack(outgoing) if outgoing else None, to, source if source in sources else None, group)
    return sorted(result, key=lambda s: s.sample_id)


def pack(samples: list[Sample]) -> np.ndarray:
    """Samples as one uint8 array that describes itself."""
    headers, arrays = [], []
    for sample in samples:
        parts = [getattr(sample, name) for name in ARRAYS]
        if sample.sampling_mask is not None:
            lengths = np.array([len(ids) for ids in sample.sampling_mask], np.int32)
            parts += [lengths, np.concatenate(sample.sampling_mask).astype(np.int32) if len(lengths) else lengths]
        headers.append(([getattr(sample, name) for name in SCALARS], [None if a is None else (a.dtype.str, a.shape) for a in parts]))
        arrays += [np.ascontiguousarray(a) for a in parts if a is not None]
    header = pickle.dumps(headers)
    sizes = [_aligned(a.nbytes) for a in arrays]
    buffer = np.zeros(ALIGN + _aligned(len(header)) + sum(sizes), np.uint8)
    buffer[:ALIGN] = np.frombuffer(np.int64(len(header)).tobytes(), np.uint8)
    buffer[ALIGN:ALIGN + len(header)] = np.frombuffer(header, np.uint8)
    at = ALIGN + _aligned(len(header))
    for array, size in zip(arrays, sizes, strict=True):
        buffer[at:at + array.nbytes] = array.reshape(-1).view(np.uint8)
        at += size
    return buffer


def unpack(buffer: np.ndarray) -> list[Sample]:
    """The samples of `pack`; their arrays are views of the buffer."""
    length = int(buffer[:ALIGN].view(np.int64)[0])
    at, samples = ALIGN + _aligned(length), []
    for scalars, shapes in pickle.loads(buffer[ALIGN:ALIGN + length].tobytes()):
        parts: list = []
        for described in shapes:
            if described is None:
                parts.append(None)
                continue
            dtype, shape = np.dtype(described[0]), described[1]
            nbytes = int(np.prod(shape)) * dtype.itemsize
            parts.append(buffer[at:at + nbytes].view(dtype).reshape(shape))
            at += _aligned(nbytes)
        support = None
        if len(parts) > len(ARRAYS):
            support = np.split(parts[-1], np.cumsum(parts[-2])[:-1]) if len(parts[-2]) else []
        samples.append(Sample(**dict(zip(SCALARS, scalars, strict=True)), **dict(zip(ARRAYS, parts, strict=False)), sampling_mask=support))
    return samples


def _swap(outgoing: np.ndarray | None, to: int, source: int | None, group: dist.ProcessGroup) -> list[Sample]:
    """Send `outgoing` to one peer while receiving from another; either may be nothing."""
    size = torch.zeros(1, dtype=torch.int64)
    works: list = []
    if outgoing is not None:
        messages = [torch.tensor([len(outgoing)]), *map(torch.from_numpy, _pieces(outgoing))]
        works = [dist.isend(message, group=group, group_dst=to) for message in messages]
    incoming = np.empty(0, np.uint8)
    if source is not None:
        dist.recv(size, group=group, group_src=source)
        incoming = np.empty(int(size), np.uint8)
        for piece in _pieces(incoming):
            dist.recv(torch.from_numpy(piece), group=group, group_src=source)
    for work in works:
        work.wait()
    return unpack(incoming) if source is not None else []


def _pieces(buffer: np.ndarray) -> list[np.ndarray]:
    return [buffer[at:at + CHUNK] for at in range(0, len(buffer), CHUNK)]


def _aligned(size: int) -> int:
    return -(-size // ALIGN) * ALIGN
