"""Functions on several ranks of this machine, each time in fresh processes that are forked from one that has imported everything.

    def case(x):                               # at module level
        return dist.get_rank(), x

    LocalRanks().run(case, 5, ranks=4) == [(0, 5), (1, 5), (2, 5), (3, 5)]

Importing torch and Megatron takes many seconds, a fork takes none. Where Transformer Engine is installed only torch is imported before:
it may look at the GPU, which no fork survives, and the CPU platform hides it from Megatron.

Fresh processes are needed because a process that has been through many layouts keeps threads of every process group it ever had. A case
that raises on any rank fails with that rank's traceback; a case that hangs is killed at its deadline.
"""

import importlib.util
import multiprocessing as mp
import os
import pickle
import queue
import tempfile
import time
import traceback
from datetime import timedelta

PRELOAD = ["torch", "torch.distributed", "megatron.core.parallel_state", "megatron.training.training", "megatron.training.checkpointing",
           "megatron.core.models.gpt", "transformers"]
GRACE = 15      # seconds that the other ranks get to report after the first failure


class RankFailed(AssertionError):
    """A rank raised, died, or did not answer in time; the message has each such rank's traceback."""


def _rank(index: int, outbox, fn, args, kwargs, ranks: int, store: str, timeout: float, backend: str, quiet: bool,
          env: dict):
    os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", RANK=str(index), WORLD_SIZE=str(ranks), LOCAL_RANK=str(index),
                      LOCAL_WORLD_SIZE=str(ranks), **env)
    if quiet:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
    try:
        import torch
        import torch.distributed as dist
        torch.set_num_threads(1)
        if "nccl" in backend:
            torch.cuda.set_device(index)
        dist.init_process_group(backend, init_method=f"file://{store}", rank=index, world_size=ranks, timeout=timedelta(seconds=timeout))
        value = fn(*args, **kwargs)
        if dist.is_initialized():
            dist.barrier()          # a rank that leaves early would break the connections of those still at work
        outbox.put((index, True, pickle.dumps(value)))       # a tensor goes by value: shared memory would die with this process
    except BaseException:
        outbox.put((index, False, traceback.format_exc()))
    outbox.close()
    outbox.join_thread()
    os._exit(0)     # no destructors: peers may already be gone


class LocalRanks:
    """Runs cases on up to `size` ranks.

    Args:
        backend: of the process groups: "gloo", or "cpu:gloo,cuda:nccl" with one device a rank.
        preload: modules that the forking process imports besides Megatron.
        quiet: what cases print is dropped.
    """

    def __init__(self, size: int = 8, backend: str = "gloo", preload: tuple[str, ...] = (), quiet: bool = False):
        self.size, self.backend, self.quiet, self.number = size, backend, quiet, 0
        self.directory = tempfile.TemporaryDirectory(prefix="ranks-")
        self.context = mp.get_context("forkserver")
        megatron = PRELOAD[:2] if importlib.util.find_spec("transformer_engine") else PRELOAD
        self.context.set_forkserver_preload([*megatron, *preload])

    def run(self, fn, *args, ranks: int = 1, timeout: float = 120, env: dict | None = None, **kwargs) -> list:
        """fn(*args, **kwargs) on every rank; returns the results in rank order. `fn` must be importable.

        Raises:
            RankFailed: some rank has no result.
        """
        if ranks > self.size:
            raise ValueError(f"{ranks} ranks of {self.size}")
        self.number += 1
        store = os.path.join(self.directory.name, str(self.number))
        outbox = self.context.Queue()
        processes = [self.context.Process(target=_rank, args=(i, outbox, fn, args, kwargs, ranks, store, timeout, self.backend, self.quiet,
                                                              env or {})) for i in range(ranks)]
        for process in processes:
            process.start()
        results: dict = {}
        failures: dict = {}
        deadline = time.monotonic() + timeout + 60        # 60: the first case waits for the imports
        try:
            while len(results) + len(failures) < ranks:
                try:
                    index, ok, value = outbox.get(timeout=1)
                except queue.Empty:
                    dead = [i for i, p in enumerate(processes) if p.exitcode not in (None, 0) and i not in results and i not in failures]
                    failures.update({i: f"ended with exit code {processes[i].exitcode}" for i in dead})
                    if time.monotonic() > deadline:
                        missing = sorted(set(range(ranks)) - set(results) - set(failures))
                        failures.update({i: f"gave no answer in {timeout:.0f} s" for i in missing})
                    continue
                (results if ok else failures)[index] = pickle.loads(value) if ok else value
                if not ok:
                    deadline = min(deadline, time.monotonic() + GRACE)
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.join()
        if failures:
            raise RankFailed("\n".join(f"{fn.__name__}, rank {i}: {failures[i]}" for i in sorted(failures)))
        return [results[i] for i in range(ranks)]

    def close(self):
        """Nothing outlives a case; the forking process ends with this one."""
        self.directory.cleanup()
