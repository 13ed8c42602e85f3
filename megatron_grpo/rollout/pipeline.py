"""Rollouts for a trainer that knows no asyncio: an event loop in a thread, and steps generated ahead of the trainer.

With --rollout-ahead N, asking for the rollout of step k starts that of step k + N: while the trainer works on step k, the next N are
generated, with weights up to N updates old. With 0, a step is generated when it is asked for.
"""

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Coroutine
from concurrent.futures import Future

from .group import Group
from .sampler import Rollout, Sampler


class LoopThread:
    """The event loop on which engine, sampler and rewards live, for the whole run."""

    def __init__(self):
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="rollout", daemon=True)
        self._thread.start()

    def submit(self, coroutine: Coroutine) -> Future:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def run(self, coroutine: Coroutine, timeout_s: float | None = None):
        """The coroutine's result. Raises TimeoutError, after cancelling it."""
        return wait_for(self.submit(coroutine), timeout_s)

    def stop(self) -> None:
        """Cancel what still runs and end the thread."""
        if self._thread.is_alive():
            with contextlib.suppress(TimeoutError):
                self.run(_cancel_all(), timeout_s=10)
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(timeout=10)


class Rollouts:
    """The steps' rollouts in order.

    Args:
        thread: where the sampler's engine and rewards live.
        sampler: asked for one step after another.
        timeout_s: longest wait for one rollout.
    """

    def __init__(self, thread: LoopThread, sampler: Sampler, timeout_s: float | None = None):
        self.thread, self.sampler, self.timeout_s = thread, sampler, timeout_s
        self._pending: deque[tuple[int, Future]] = deque()
        self._one_at_a_time = asyncio.Lock()        # first come, first served

    def next(self, version: int) -> Rollout:
        """The rollout that the trainer uses at weights number `version`; called with 1 more each time.

        Raises:
            EngineError, ConfigError: from the sampler. TimeoutError.
        """
        first = self._pending[0][0] if self._pending else version
        if version != first:
            raise ValueError(f"the rollout of weights version {first} comes next, not that of {version}")
        while len(self._pending) <= self.sampler.config.rollout_ahead:
            target = version + len(self._pending)
            self._pending.append((target, self.thread.submit(self._generate(target))))
        rollout = wait_for(self._pending[0][1], self.timeout_s)
        self._pending.popleft()
        return rollout

    @contextlib.contextmanager
    def paused(self):
        """No request is at the engine inside this block; what was cut goes on after it. For weight updates."""
        was_open = self.thread.run(self.sampler.pause(), self.timeout_s)
        try:
            yield
        finally:
            if was_open:
                self.thread.loop.call_soon_threadsafe(self.sampler.resume)

    def state_dict(self) -> dict:
        """The sampler's state; rollouts that the trainer has not taken yet are in it as complete groups."""
        with self.paused():
            return self.thread.run(self._state())

    def load_state_dict(self, states: list[dict]) -> None:
        """From the states of all leaders, before the first `next`."""
        self.sampler.load_state_dict(states)

    def close(self) -> None:
        """Cancel what is generated ahead."""
        for _, future in self._pending:
            future.cancel()
        self._pending.clear()
        self.thread.run(self.sampler.close(), timeout_s=30)

    async def _generate(self, version: int) -> Rollout:
        async with self._one_at_a_time:
            return await self.sampler.rollout(version)

    async def _state(self) -> dict:
        state = self.sampler.state_dict()
        ready = [future.result() for _, future in self._pending if future.done()]
        state["groups"] = [Group(g.group_id, [], samples={s.sample_id: s for s in g.samples}, done=True)
                           for rollout in ready for g in rollout.groups] + state["groups"]
        return state


def wait_for(future: Future, timeout_s: float | None):
    try:
        return future.result(timeout_s)
    except BaseException:       # a time-out, or an interrupt of the waiting thread
        future.cancel()
        raise


async def _cancel_all() -> None:
    tasks = [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
