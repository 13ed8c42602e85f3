"""Rollouts for a trainer that knows no asyncio, and steps generated ahead of it.

With --rollout-ahead N, asking for the rollout of step k starts that of step k + N: while the trainer works on step k, the next N are
generated, with weights up to N updates old. With 0, a step is generated when it is asked for.
"""

import asyncio
import contextlib
import math
from collections import deque
from collections.abc import Coroutine
from concurrent.futures import Future

from .group import Group
from .sampler import Rollout, Sampler


class Rollouts:
    """The steps' rollouts in order.

    Args:
        loop: the running event loop, in another thread, on which the sampler's engine and rewards live.
        sampler: asked for one step after another.
        timeout_s: longest wait for one rollout, and for anything else on the loop.
        end: the run ends at this version, so that no rollout is generated for it.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, sampler: Sampler, timeout_s: float | None = None, end: float = math.inf):
        self.loop, self.sampler, self.timeout_s, self.end = loop, sampler, timeout_s, end
        self._pending: deque[tuple[int, Future]] = deque()
        self._tasks: set[asyncio.Task] = set()
        self._ready: dict[int, Rollout] = {}        # generated and not taken yet
        self._one_at_a_time = asyncio.Lock()        # first come, first served

    def next(self, version: int) -> Rollout:
        """The rollout that the trainer uses at weights number `version`; called with sampler.version_step more each time.

        Raises:
            EngineError, ConfigError: from the sampler. TimeoutError.
        """
        first, step = self._pending[0][0] if self._pending else version, self.sampler.version_step
        if version != first:
            raise ValueError(f"the rollout of weights version {first} comes next, not that of {version}")
        for target in range(version, version + (self.sampler.config.rollout_ahead + 1) * step, step)[len(self._pending):]:
            if target == version or target < self.end:
                self._pending.append((target, self._submit(self._generate(target))))
        self._wait(self._pending[0][1])
        self._pending.popleft()
        return self._ready.pop(version)

    @contextlib.contextmanager
    def paused(self):
        """No request is at the engine inside this block, and no prompt is drawn; what was cut goes on after it."""
        self.run(self.sampler.pause())
        try:
            yield
        finally:
            self.loop.call_soon_threadsafe(self.sampler.resume)

    def state_dict(self) -> dict:
        """The sampler's state; rollouts that the trainer has not taken yet are in it as complete groups.

        Ask for it while the rollouts of every leader are `paused`: a prompt drawn between two leaders' states would be in neither.
        """
        return self.run(self._state())

    def load_state_dict(self, states: list[dict]) -> None:
        """From the states of all leaders, before the first `next`."""
        self.sampler.load_state_dict(states)

    def close(self) -> None:
        """Cancel what is being generated."""
        self._pending.clear()
        self.run(self._stop())

    def run(self, coroutine: Coroutine):
        """Its result, from the loop. Raises TimeoutError after `timeout_s`."""
        return self._wait(self._submit(coroutine))

    async def _generate(self, version: int) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        async with self._one_at_a_time:
            self._ready[version] = await self.sampler.rollout(version)

    async def _stop(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.sampler.close()

    async def _state(self) -> dict:
        state = self.sampler.state_dict()
        state["groups"] = [Group(g.group_id, [], samples={s.sample_id: s for s in g.samples}, done=True, due=version)
                           for version, rollout in self._ready.items() for g in rollout.groups] + state["groups"]
        return state

    def _submit(self, coroutine: Coroutine) -> Future:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def _wait(self, future: Future):
        try:
            return future.result(self.timeout_s)
        except BaseException as error:      # a time-out, or an interrupt of the waiting thread
            late = isinstance(error, TimeoutError) and not future.done()
            future.cancel()
            if late:
                raise TimeoutError(f"a rollout or an evaluation took over {self.timeout_s:g} s (--control-timeout)") from None
            raise
