import os

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from tests.parallel.pool import WorkerPool  # noqa: E402


@pytest.fixture(scope="session")
def pool():
    """Ranks over gloo, shared by the whole test session."""
    workers = WorkerPool()
    yield workers
    workers.close()
