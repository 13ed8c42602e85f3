"""Weights by broadcast: one process group of the publishing rank and every rank of every engine, rank 0 sends.

The engines' ranks join by themselves when `/init_weights_update_group` asks them to; their torch and ours have to agree on how
a group finds together, as they do for any release that SGLang supports. Each attempt of an update has a group of its own
when the one before failed, because a group that lost a member stays broken.
"""

import os
import secrets
import socket
import threading
import time
import urllib.parse
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ..rollout.engine import EngineError
from .control import EngineControl, on_each, raise_failures
from .export import Bucket

POLL = 0.001        # seconds between looks at a broadcast under way


class BroadcastGroup:
    """The trainer's publishing rank and the engines.

    Args:
        engines: who receives.
        device: of the tensors; decides between NCCL and gloo.
        timeout: of one broadcast [s].

    Raises:
        EngineError: an engine cannot be part of such a group, or did not join.
    """

    def __init__(self, engines: Sequence[EngineControl], device: torch.device, timeout: float):
        self.engines, self.device, self.name = list(engines), device, f"megatron-grpo-{secrets.token_hex(6)}"
        sizes = on_each(self.engines, _ranks_of, must=True)
        backend = "nccl" if device.type == "cuda" else "gloo"
        world_size, offsets = 1, {}
        for engine in self.engines:
            offsets[engine] = world_size
            world_size += sizes[engine]
        address = _address_towards([engine.url for engine in self.engines])
        store = dist.TCPStore(address, 0, world_size, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout))
        self._executor = ThreadPoolExecutor(len(self.engines))
        joining = {e: self._executor.submit(e.join_group, address, store.port, offset, world_size, self.name, backend)
                   for e, offset in offsets.items()}
        ours: Future = Future()
        arguments = (ours, store, world_size, self.name, backend, device, timeout)
        threading.Thread(target=_join_as_sender, args=arguments, daemon=True).start()
        while not ours.done():
            raise_failures(_failed(joining))       # an engine that refused never joins, and ours would wait for it
            time.sleep(POLL)
        raise_failures({e: _outcome(f) for e, f in joining.items()})
        try:
            self.group: dist.ProcessGroup = ours.result()
        except RuntimeError as error:
            raise EngineError(f"no broadcast group with {', '.join(e.url for e in self.engines)}: {error}") from None

    def send(self, bucket: Bucket) -> None:
        """One bucket to every engine.

        Raises:
            EngineError: an engine failed; the group is then broken.
        """
        receiving = {e: self._executor.submit(e.receive, self.name, bucket) for e in self.engines}
        # NCCL connects at the first broadcast and waits there for every engine, also for one that has refused: not in this thread
        sent: Future = Future()
        stream = torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None
        threading.Thread(target=_broadcast, args=(sent, bucket, self.group, stream), daemon=True).start()
        try:
            while not sent.done():
                raise_failures(_failed(receiving))
                time.sleep(POLL)
            sent.result()
        except RuntimeError as error:       # what torch raises for a broken connection; EngineError is one too
            if isinstance(error, EngineError):
                raise
            raise_failures({e: _outcome(f) for e, f in receiving.items()})
            raise EngineError(f"broadcast of weights: {error}") from None
        raise_failures({e: _outcome(f) for e, f in receiving.items()})

    def close(self, broken: bool) -> None:
        """Leave the group. A broken one is aborted, and its engines, which may hang in it, are not waited for."""
        if broken:
            self.group.abort()
        else:
            on_each(self.engines, lambda engine: engine.leave_group(self.name))
            dist.destroy_process_group(self.group)
        self._executor.shutdown(wait=False)


def send_all(group: BroadcastGroup, buckets: Iterable[Bucket]) -> int:
    """Send every bucket; after a failure go on drawing them, because drawing is a collective of the trainer's ranks.

    Returns:
        bytes sent to each engine.
    """
    fault, sent = None, 0
    for bucket in buckets:
        if fault is None:
            try:
                group.send(bucket)
                sent += sum(tensor.nbytes for _, tensor in bucket)
            except EngineError as error:
                fault = error
    if fault is not None:
        raise fault
    return sent


def _ranks_of(engine: EngineControl) -> int:
    """Ranks of an engine that receive."""
    info = engine.info
    for name in ("dp_size", "pp_size"):
        if info.get(name, 1) > 1:
            raise EngineError(f"{engine.url} runs with {name} {info[name]}: SGLang takes broadcast weights only with {name} 1; "
                              "use --weight-sync disk")
    return info["tp_size"]


def _broadcast(sent: Future, bucket: Bucket, group: dist.ProcessGroup, stream) -> None:
    """From rank 0 to all; on CUDA after what `stream` has been given, on its device: a new thread starts on device 0."""
    try:
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            works: list = [dist.broadcast(tensor.contiguous(), group_src=0, group=group, async_op=True) for _, tensor in bucket]
            while not all(work.is_completed() for work in works):
                time.sleep(POLL)
            for work in works:
                work.wait()
        sent.set_result(None)
    except BaseException as error:
        sent.set_exception(error)


def _join_as_sender(joined: Future, store: dist.Store, world_size: int, name: str, backend: str, device: torch.device, timeout: float):
    """Make the group in which this process is rank 0 although its default group knows nothing of the other members."""
    try:
        if device.type == "cuda":
            torch.cuda.set_device(device)       # a new thread starts on device 0
        with _surviving():
            group, _ = c10d._new_process_group_helper(world_size, 0, [], c10d.Backend(backend), c10d.PrefixStore(name, store),
                                                      group_name=c10d.GroupName(name), timeout=timedelta(seconds=timeout))
        c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(world_size)}
        joined.set_result(group)
    except BaseException as error:
        joined.set_exception(error)


@contextmanager
def _surviving():
    """A group of NCCL that is made inside is aborted when a peer dies or hangs; others then end the whole process (ProcessGroupNCCL.hpp)."""
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    before = os.environ.get(name)
    os.environ[name] = "2"      # CleanUpOnly
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _address_towards(urls: Sequence[str]) -> str:
    """This machine's address as all of `urls` can reach it: the loopback only when all of them are on it."""
    addresses = []
    for where in map(urllib.parse.urlsplit, urls):
        family, kind, protocol, _, target = socket.getaddrinfo(where.hostname, where.port or 80, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)       # sends nothing
            addresses.append(probe.getsockname()[0])
    return next((a for a in addresses if not a.startswith("127.") and a != "::1"), addresses[0])


def _failed(futures: dict[EngineControl, Future]) -> dict:
    return {engine: _outcome(future) for engine, future in futures.items() if future.done()}


def _outcome(future: Future):
    try:
        return future.result()
    except EngineError as error:
        return error
