"""A thread with an event loop for the user's own reward functions, given up when it blocks.

A reward function may block where it should await, or hang for good. Run here, it can neither stop the rollout's event loop nor keep
the process alive: a loop that no longer answers is left behind and the next call gets a fresh one.
"""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

ALIVE_S = 1.0       # a loop that does not answer within this is blocked


class HookThread:
    def __init__(self):
        self._loop: asyncio.AbstractEventLoop | None = None

    async def call(self, fn: Callable, *args, timeout_s: float):
        """`await fn(*args)` on the hook thread. Raises TimeoutError, or what the function raises."""
        loop = self._loop = self._loop or _start()
        running = asyncio.run_coroutine_threadsafe(_bounded(fn, args, timeout_s), loop)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(running), timeout_s + ALIVE_S)
        except TimeoutError:
            if not await _answers(loop) and loop is self._loop:
                self._loop = None
            raise

    def close(self):
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._loop = None


async def _bounded(fn, args, timeout_s):
    return await asyncio.wait_for(fn(*args), timeout_s)


async def _answers(loop) -> bool:
    answer = asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop)
    try:
        await asyncio.wait_for(asyncio.wrap_future(answer), ALIVE_S)
    except TimeoutError:
        return False
    return True


def _start() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    loop.set_default_executor(_DaemonThreads())
    threading.Thread(target=loop.run_forever, name="reward-hooks", daemon=True).start()
    return loop


class _DaemonThreads(ThreadPoolExecutor):
    """One daemon thread a call: one that hangs blocks no other, nor the interpreter's exit, which waits for a pool's threads."""

    def submit(self, fn, /, *args, **kwargs):
        future: Future = Future()
        future.set_running_or_notify_cancel()       # a caller that gives up then leaves it be, and the thread can end in peace

        def run():
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=run, daemon=True).start()
        return future
