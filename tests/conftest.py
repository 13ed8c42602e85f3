import os

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from megatron_grpo.verify.ranks import LocalRanks  # noqa: E402


@pytest.fixture(scope="session")
def pool():
    """Ranks over gloo, shared by the whole test session."""
    workers = LocalRanks(preload=("pytest",))
    yield workers
    workers.close()


@pytest.fixture(scope="session")
def sglang_server(tmp_path_factory):
    """A real SGLang server of the tiny model in float32, with routed experts; started at the first use."""
    from megatron_grpo.rollout.server import LocalServer
    from tests.rollout.tiny import tiny_qwen3_moe
    with LocalServer(tiny_qwen3_moe(tmp_path_factory.mktemp("sglang") / "model"), start_timeout=900) as server:
        yield server
