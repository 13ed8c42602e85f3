"""Broadcasts where NCCL would wait in silence: for engines that are not ready, that refuse, or that die."""

import os
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import distributed_c10d as c10d

from megatron_grpo.rollout.engine import EngineError
from megatron_grpo.weights import broadcast
from megatron_grpo.weights.broadcast import BroadcastGroup
from megatron_grpo.weights.control import EngineControl
from tests.weights.test_publish import DISTRIBUTED, engines, path, publish  # noqa: F401


def publish_counting(*args):
    """As `publish`, and how many buckets this rank drew."""
    from megatron_grpo.weights import publish as module
    draw, drawn = module.iterate_hf_tensors, []

    def counted(*arguments):
        drawn.append(1)
        yield from draw(*arguments)

    module.iterate_hf_tensors = counted
    return publish(*args), len(drawn)


def test_nothing_is_gathered_before_the_engines_are_ready(pool, path, engines, tmp_path):  # noqa: F811
    """Ranks that gather while the first one waits for an engine would wait in NCCL, whose watchdog ends them."""
    engine, = engines(1)
    engine.faults["/pause_generation"] = 2
    results = pool.run(publish_counting, str(path), [engine.url], str(tmp_path), DISTRIBUTED, ("1", "2"), ranks=2, timeout=500)
    for (refused, report), draws in results:
        assert "scripted" in refused and report.updated == (engine.url,) and draws == 1


def test_a_broadcast_that_cannot_begin_does_not_hide_a_refusal(engines, monkeypatch):  # noqa: F811
    """NCCL connects at the first broadcast, and waits there for an engine that answered no."""
    engine, = engines(1)
    group, connected = BroadcastGroup.__new__(BroadcastGroup), threading.Event()
    group.engines, group.device, group.name, group.group = [EngineControl(engine.url, 10)], torch.device("cpu"), "g", None
    group._executor = ThreadPoolExecutor(1)
    monkeypatch.setattr(torch.distributed, "broadcast", lambda *args, **kwargs: connected.wait(60))
    start = time.monotonic()
    with pytest.raises(EngineError, match="must run between"):
        group.send([("w", torch.zeros(1))])
    assert time.monotonic() - start < 30
    connected.set()


def test_a_lost_engine_breaks_its_group_alone(monkeypatch):
    """NCCL reads this when a group is made; by default its watchdog ends the trainer with the group."""
    name, seen = "TORCH_NCCL_ASYNC_ERROR_HANDLING", []
    monkeypatch.setattr(c10d, "_new_process_group_helper", lambda *args, **kwargs: (seen.append(os.environ[name]), None))
    monkeypatch.setattr(c10d, "_world", SimpleNamespace(pg_group_ranks={}))
    for before in ("3", None):
        monkeypatch.setenv(name, before) if before else monkeypatch.delenv(name)
        broadcast._join_as_sender(Future(), torch.distributed.HashStore(), 2, "g", "gloo", torch.device("cpu"), 1.0)
        assert seen.pop() == "2" and os.environ.get(name) == before
