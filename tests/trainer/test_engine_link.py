"""The link to the engines: where its files are."""

import os
from types import SimpleNamespace

import torch.distributed as dist

from megatron_grpo.rollout.config import EngineConfig


def directories(given):
    """(the directory, whether it is there before and after the link is closed)."""
    from megatron_grpo.trainer.engine_link import EngineLink
    link = EngineLink(SimpleNamespace(grpo=SimpleNamespace(engine=EngineConfig())), None, given)
    there = os.path.isdir(link.directory)
    dist.barrier()
    link.close()
    dist.barrier()
    return link.directory, there, os.path.isdir(link.directory)


def test_all_ranks_share_a_directory_also_where_none_is_named(pool, tmp_path):
    first, second = pool.run(directories, None, ranks=2)
    assert first == second and first[1:] == (True, False)
    assert pool.run(directories, str(tmp_path), ranks=2) == [(str(tmp_path), True, True)] * 2
