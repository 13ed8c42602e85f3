"""Worker processes that are started once and run many multi-rank cases over gloo.

    def case(x):                               # at module level of a test file
        return dist.get_rank(), x

    def test_it(pool):                         # the session-wide fixture of tests/conftest.py
        assert pool.run(case, 5, ranks=4) == [(0, 5), (1, 5), (2, 5), (3, 5)]

Each `run` sets up a fresh default process group of `ranks` ranks and takes it down again, so that cases with different
layouts share the processes and nothing else. A case that raises on any rank fails the test with that rank's traceback; a
case that hangs is killed at the deadline and the pool restarts its workers.
"""

import multiprocessing as mp
import os
import tempfile
import traceback
from datetime import timedelta


def _worker(index: int, inbox, outbox):
    os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
    import torch
    import torch.distributed as dist
    torch.set_num_threads(1)
    while True:
        job = inbox.get()
        if job is None:
            return
        number, fn, args, kwargs, ranks, store, timeout, env = job
        try:
            os.environ.update(RANK=str(index), WORLD_SIZE=str(ranks), LOCAL_RANK=str(index), LOCAL_WORLD_SIZE=str(ranks), **env)
            dist.init_process_group("gloo", init_method=f"file://{store}", rank=index, world_size=ranks, timeout=timedelta(seconds=timeout))
            try:
                outbox.put((number, index, True, fn(*args, **kwargs)))
            finally:
                _forget_megatron()
                if dist.is_initialized():
                    dist.destroy_process_group()
        except BaseException:
            outbox.put((number, index, False, traceback.format_exc()))


def _forget_megatron():
    """Take down what a case set up in Megatron, so that the next case chooses its own layout."""
    import sys
    if "megatron.core.parallel_state" in sys.modules:
        from megatron.core import parallel_state
        parallel_state.destroy_model_parallel()
    if "megatron.training.global_vars" in sys.modules:
        from megatron.training import global_vars
        global_vars.destroy_global_vars()
    if "megatron.core.num_microbatches_calculator" in sys.modules:
        from megatron.core.num_microbatches_calculator import destroy_num_microbatches_calculator
        destroy_num_microbatches_calculator()
    if "megatron.core.rerun_state_machine" in sys.modules:
        from megatron.core.rerun_state_machine import destroy_rerun_state_machine
        destroy_rerun_state_machine()


class WorkerPool:
    """Up to `size` ranks; started at the first use, stopped by `close`."""

    def __init__(self, size: int = 8):
        self.size, self.workers, self.number = size, [], 0
        self.directory = tempfile.mkdtemp(prefix="pool-")

    def _start(self, count):
        context = mp.get_context("spawn")
        if not self.workers:
            self.outbox = context.Queue()
        for index in range(len(self.workers), count):
            inbox = context.Queue()
            process = context.Process(target=_worker, args=(index, inbox, self.outbox), daemon=True)
            process.start()
            self.workers.append((process, inbox))

    def run(self, fn, *args, ranks: int = 1, timeout: float = 120, env: dict | None = None, **kwargs) -> list:
        """fn(*args, **kwargs) on every rank; returns the results in rank order. `fn` must be importable."""
        assert ranks <= self.size, f"the pool has {self.size} ranks"
        self._start(ranks)
        self.number += 1
        store = os.path.join(self.directory, str(self.number))
        for _, inbox in self.workers[:ranks]:
            inbox.put((self.number, fn, args, kwargs, ranks, store, timeout, env or {}))
        results, failures = {}, {}
        while len(results) + len(failures) < ranks:
            try:
                number, index, ok, value = self.outbox.get(timeout=timeout if not failures else 15)
            except Exception:
                self.close()
                raise AssertionError("\n".join([f"{fn.__name__}: ranks {sorted(set(range(ranks)) - set(results) - set(failures))} gave no answer",
                                                *failures.values()])) from None
            if number == self.number:
                (results if ok else failures)[index] = value
        if failures:
            self.close()        # peers may be left inside a collective
            raise AssertionError("\n".join(f"rank {i}: {failures[i]}" for i in sorted(failures)))
        return [results[i] for i in range(ranks)]

    def close(self):
        for process, _ in self.workers:
            process.kill()
        for process, _ in self.workers:
            process.join()
        self.workers = []
