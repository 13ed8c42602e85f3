"""What the benchmarks measure with: seconds, peak bytes, collectives, and the speed of memory in the same run."""

import contextlib
import os
import socket
import time
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

os.environ.setdefault("KINETO_LOG_LEVEL", "99")         # the profiler's chatter


def seconds(fn, device: torch.device, repeats: int = 5) -> float:
    """Best of `repeats` runs after one that is not counted: on a CPU processor time, which other jobs do not lengthen; on CUDA events."""
    fn()
    best = float("inf")
    for _ in range(repeats):
        if device.type == "cuda":
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            fn()
            end.record()
            end.synchronize()
            best = min(best, start.elapsed_time(end) / 1e3)
        else:
            start = time.process_time()
            fn()
            best = min(best, time.process_time() - start)
    return best


def peak_bytes(fn, device: torch.device) -> int:
    """Most bytes of tensors that `fn` has alive at once, beyond those alive before it."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        fn()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        fn()
    alive = peak = 0
    for event in sorted((e for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        alive += event.nbytes()
        peak = max(peak, alive)
    return peak


def copy_bandwidth(device: torch.device, megabytes: int = 256) -> float:
    """Bytes read and written a second by a large copy: what memory gives on this machine, in this run."""
    a = torch.zeros(megabytes << 20, dtype=torch.uint8, device=device)
    b = torch.empty_like(a)
    return 2 * a.numel() / seconds(lambda: b.copy_(a), device)


def free_port() -> int:
    """A TCP port of this machine that nobody listens on."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@dataclass
class Collectives:
    """Calls and payload bytes of torch.distributed collectives inside `counted()`."""

    calls: list[tuple[str, int]] = field(default_factory=list)

    @contextlib.contextmanager
    def counted(self):
        originals = {name: getattr(dist, name) for name in ("all_reduce", "all_gather_into_tensor", "all_gather", "reduce_scatter_tensor")}

        def wrap(name, original):
            def call(*args, **kwargs):
                payload = args[1] if name.startswith("all_gather") else args[0]
                self.calls.append((name, payload.numel() * payload.element_size()))
                return original(*args, **kwargs)
            return call

        for name, original in originals.items():
            setattr(dist, name, wrap(name, original))
        try:
            yield self
        finally:
            for name, original in originals.items():
                setattr(dist, name, original)

    @property
    def count(self) -> int:
        return len(self.calls)

    @property
    def bytes(self) -> int:
        return sum(n for _, n in self.calls)
