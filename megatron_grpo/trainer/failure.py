"""When a rank fails, every rank ends soon, with one message: which rank failed, and its error.

    with Failures(store, rank, world_size) as failures, make_job(...) as job:
        with failures.told():       # before the job is closed, which may take long
            train(job)

The first rank that fails writes its error into the job's store. The others see it there: those whose collectives break because
a peer is gone raise `PeerFailed` with the first rank's words in place of "connection closed by peer", and a thread ends
those that hang in a collective that will never complete. A rank that was killed writes nothing; then the ranks that lost it
call the roll, and who does not answer is named.
"""

import contextlib
import json
import os
import re
import socket
import sys
import threading
import time
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

FAILURE, ROLL_CALL, HERE, HOST = "grpo/failure", "grpo/roll_call", "grpo/here/{}", "grpo/host/{}"     # keys of the store
POLL = 1.0          # seconds between looks at the store
PATIENCE = 15.0     # seconds that a rank has to end by itself after a failure
ROLL_TIME = 8.0     # seconds to answer the roll call
# What gloo, NCCL and the store say when a peer is gone: gloo raises plain RuntimeErrors.
LOST_PEER = re.compile(r"gloo|nccl|connection (was )?(closed|reset|refused)|broken pipe|recvvalue failed|sendbytes failed", re.IGNORECASE)


class PeerFailed(RuntimeError):
    """Another rank failed; the message names it and repeats its error."""


def is_lost_peer(error: BaseException) -> bool:
    """Whether this says only that another rank is gone."""
    return isinstance(error, RuntimeError) and (isinstance(error, dist.DistError) or bool(LOST_PEER.search(str(error))))


class Failures:
    """
    Args:
        store: the job's; a connection of its own is made, because a wait in another thread blocks the first one.
        rank, world_size: of this process.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int):
        self.store, self.rank, self.world_size = store.clone(), rank, world_size
        self.store.set_timeout(timedelta(seconds=30))
        self._over = threading.Event()
        self._watch = threading.Thread(target=self._watching, daemon=True, name="failures")

    def __enter__(self) -> "Failures":
        self.store.set(HOST.format(self.rank), socket.gethostname())
        self._watch.start()
        return self

    def __exit__(self, kind, error, traceback) -> None:
        try:
            with self.told():
                if isinstance(error, Exception):
                    raise error
        finally:
            with contextlib.suppress(dist.DistError):
                self.store.set(HERE.format(self.rank), "")      # who is done is not missing
            self._over.set()

    @contextmanager
    def told(self):
        """An exception inside is told to the other ranks at once.

        Raises:
            PeerFailed: in place of an error that is the consequence of another rank's failure, which it names.
        """
        try:
            yield
        except PeerFailed:
            raise
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            try:
                first = self._who_failed() if is_lost_peer(error) else None
                if first is None:
                    self._post(self.rank, text)
            except dist.DistError:      # the store's node is gone too
                raise error from None
            if first is not None:
                raise PeerFailed(first) from None
            raise

    def _post(self, rank: int, message: str) -> None:
        """The first one stays."""
        host = self.store.get(HOST.format(rank)).decode() if self.store.check([HOST.format(rank)]) else "a node that never started it"
        self.store.compare_set(FAILURE, "", json.dumps({"rank": rank, "host": host, "message": message}))

    def _known(self) -> str | None:
        """The first failure, when it is another rank's."""
        first = json.loads(self.store.get(FAILURE))
        return None if first["rank"] == self.rank else f"rank {first['rank']} on {first['host']} failed: {first['message']}"

    def _who_failed(self) -> str | None:
        """Another rank's failure, by its own words or by its silence; None when all ranks are there."""
        start = time.monotonic()
        while time.monotonic() < start + ROLL_TIME:
            if self.store.check([FAILURE]):
                return self._known()
            if time.monotonic() > start + POLL:     # until then, who failed may be about to say so
                self.store.set(ROLL_CALL, "")
            time.sleep(POLL / 5)
        silent = [rank for rank in range(self.world_size) if not self.store.check([HERE.format(rank)])]
        if not silent:
            return None
        others = f"; so did {', '.join(map(str, silent[1:]))}" if silent[1:] else ""
        self._post(silent[0], f"it ended without a word, as a process does that is killed, e.g. for want of memory{others}")
        return self._known()

    def _watching(self) -> None:
        """Answer the roll call, and end this process when another's failure has not."""
        answered = False
        try:
            while not self._over.wait(POLL):
                if not answered and self.store.check([ROLL_CALL]):
                    self.store.set(HERE.format(self.rank), "")
                    answered = True
                if self.store.check([FAILURE]):
                    break
            else:
                return
            first = self._known()
        except dist.DistError:
            return      # the store's node is gone: the collectives will say so
        if not self._over.wait(PATIENCE):
            why = f"ended because {first}" if first else "did not end by itself after its error"
            print(f"megatron_grpo: rank {self.rank}: {why}", file=sys.stderr, flush=True)
            os._exit(1)


def watched() -> Failures:
    """Of the default process group."""
    from torch.distributed.distributed_c10d import _get_default_store
    return Failures(_get_default_store(), dist.get_rank(), dist.get_world_size())
