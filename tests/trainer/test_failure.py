"""Failures: who is told what."""

import time

import pytest
import torch.distributed as dist

from megatron_grpo.trainer import failure
from megatron_grpo.trainer.failure import PeerFailed, is_lost_peer, watched


def with_accident(accident):
    """What each rank's error is in the end."""
    failure.ROLL_TIME = 4.0
    try:
        with watched() as failures, failures.told():
            accident(dist.get_rank())
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def one_raises(rank):
    if rank == 1:
        time.sleep(0.5)     # the others break before it has said why
        raise ValueError("boom")
    raise RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1")


def all_break(rank):
    raise RuntimeError(f"[gloo/transport/tcp/pair.cc:534] rank {rank}: Timed out waiting 1000ms for recv operation to complete")


def one_is_stuck(rank):
    failure.PATIENCE = 1.0
    if rank == 1:
        raise ValueError("boom")
    time.sleep(60)


def test_first_error_is_everybodys(pool):
    first, second, third = pool.run(with_accident, one_raises, ranks=3)
    assert second == "ValueError: boom"
    for said in (first, third):
        assert said.startswith("PeerFailed: rank 1 on ") and said.endswith(" failed: ValueError: boom")


def test_nobody_is_missing(pool):
    """A broken network: the first to notice is quoted, and nobody is called dead."""
    said = pool.run(with_accident, all_break, ranks=2)
    assert sum(s.startswith("RuntimeError: ") for s in said) == 1
    assert sum(s.startswith("PeerFailed: ") and "Timed out" in s for s in said) == 1


def test_stuck_rank_is_ended(pool):
    start = time.monotonic()
    with pytest.raises(AssertionError, match="rank 0: ended with exit code 1"):
        pool.run(with_accident, one_is_stuck, ranks=2, timeout=30)
    assert time.monotonic() - start < 30


def late_leader():
    from megatron.core import mpu

    from megatron_grpo.trainer.distribute import RolloutFailed, on_leaders
    from megatron_grpo.trainer.groups import make_control_groups
    mpu.initialize_model_parallel(tensor_model_parallel_size=2)

    def work():
        time.sleep(1.5)
        raise TimeoutError("a rollout took over 1 s")
    with pytest.raises(RolloutFailed) as failed:
        on_leaders(make_control_groups(1.0), work)
    return str(failed.value)


def test_who_waits_for_a_leader_outlasts_it(pool):
    assert pool.run(late_leader, ranks=2) == ["TimeoutError: a rollout took over 1 s"] * 2


def test_what_a_lost_peer_looks_like():
    assert is_lost_peer(dist.DistNetworkError("Connection was reset")) and is_lost_peer(RuntimeError("... Connection closed by peer [::1]:5"))
    assert not is_lost_peer(ValueError("Connection closed by peer")) and not is_lost_peer(RuntimeError("shape mismatch"))
    assert not is_lost_peer(PeerFailed("rank 1 on n2 failed: ValueError"))
