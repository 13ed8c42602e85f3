"""The gate before the engine: requests pass while it is open; closing it aborts those inside and waits until they are out.

A response that is cut by a closed gate keeps its tokens and asks for the rest when the gate opens again: at the next step (partial
rollout) or after a weight update.
"""

import asyncio
import contextlib
import logging

from .engine import Engine, EngineError, Generation, GenerationRequest

log = logging.getLogger(__name__)

ABORT_AGAIN_S = 2.0         # a request may reach its server after the abort did


class Gate:
    """Open while nobody keeps it closed.

    Args:
        closed_by: who keeps it closed at first.
        drain_limit_s: longest wait for aborted requests to end.
    """

    def __init__(self, engine: Engine, *closed_by: str, drain_limit_s: float = 600.0):
        self.engine, self.drain_limit_s = engine, drain_limit_s
        self._opened, self._empty = asyncio.Event(), asyncio.Event()
        self._inside: set[str] = set()
        self._closed_by = set(closed_by)
        self._empty.set()
        if not closed_by:
            self._opened.set()

    @property
    def is_open(self) -> bool:
        return self._opened.is_set()

    async def wait(self) -> None:
        while not self.is_open:         # it may have closed again before the waiter's turn came
            await self._opened.wait()

    async def generate(self, request: GenerationRequest) -> Generation:
        """The engine's generate; the caller has waited for the gate."""
        self._inside.add(request.request_id)
        self._empty.clear()
        try:
            return await self.engine.generate(request)
        finally:
            self._inside.discard(request.request_id)
            if not self._inside:
                self._empty.set()

    def open(self, by: str) -> None:
        self._closed_by.discard(by)
        if not self._closed_by:
            self._opened.set()

    async def close(self, by: str) -> None:
        """Raises EngineError when aborted requests do not end."""
        self._closed_by.add(by)
        self._opened.clear()
        deadline = asyncio.get_running_loop().time() + self.drain_limit_s
        while self._inside:
            try:
                await self.engine.abort(list(self._inside))
            except EngineError as error:        # its requests fail on their own
                log.warning("abort failed: %s", error)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._empty.wait(), ABORT_AGAIN_S)
            if self._inside and asyncio.get_running_loop().time() > deadline:
                raise EngineError(f"{len(self._inside)} aborted requests did not end within {self.drain_limit_s:g} s, e.g. "
                                  f"{min(self._inside)}; the engine no longer answers")
