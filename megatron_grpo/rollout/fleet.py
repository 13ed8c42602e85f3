"""The servers of a client: which one takes the next request, which are left out, and when they are taken back.

A server is left out when it refuses connections, fails two health checks in a row, serves other weights than expected, or when its
caller says so. What it was working on is interrupted at once and goes to another server; checks go on, and it is taken back when it
is healthy and on the expected weights.
"""

import asyncio
import contextlib
import logging
import random
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Collection, Sequence

from .config import EngineConfig
from .engine import EngineError

logger = logging.getLogger(__name__)

SESSIONS = 100_000      # conversations whose server is remembered
SHUNNED = 3             # after so many failures in a row a server is the last choice, however idle: broken servers are fast


def expire(scope: asyncio.Timeout | None) -> None:
    """Interrupt what runs under the scope, unless that is over."""
    if scope is not None and not scope.expired():
        scope.reschedule(asyncio.get_running_loop().time())


class NoServer(EngineError):
    """None was usable for too long."""


class Server:
    """One url, and this client's view of it."""

    def __init__(self, url: str):
        self.url = url
        self.up = True
        self.why = ""                               # it was left out
        self.barred = ""                            # the caller's reason to leave it out, until the caller clears it
        self.in_flight = 0
        self.scopes: set[asyncio.Timeout] = set()   # the attempts running at it; expiring one interrupts it
        self.failures = 0                           # attempts in a row that brought nothing usable
        self.suspected = asyncio.Event()            # check it now


class Fleet:
    """
    Args:
        urls: of the servers.
        check: awaitable that raises an exception, with the reason, if the server must not be sampled from; bounded in time by itself.
        on_change: called with (server, up) after a change.
    """

    def __init__(self, urls: Sequence[str], config: EngineConfig, check: Callable[[Server], Awaitable[None]],
                 on_change: Callable[[Server, bool], None] = lambda server, up: None):
        self.servers = [Server(url) for url in urls]
        self.config, self.check, self.on_change = config, check, on_change
        self._turn = random.randrange(len(urls))        # leaders share the servers: each begins elsewhere
        self._sessions: OrderedDict[str, Server] = OrderedDict()
        self._waiters: deque[asyncio.Future] = deque()
        self._down_since: float | None = None
        self._watches: list[asyncio.Task] = []

    def watch(self) -> None:
        """Begin the health checks."""
        self._watches = [asyncio.create_task(self._watch(server)) for server in self.servers]

    async def acquire(self, session: str = "", avoid: Collection[Server] = ()) -> Server:
        """A server with room for one more request; `release` it. The conversation's own one, else the least loaded.

        Raises:
            NoServer: none was healthy for --sglang-down-timeout.
        """
        while (server := self._choose(session, avoid)) is None:
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            try:
                async with asyncio.timeout(self._patience()):
                    await waiter
            except TimeoutError:
                raise NoServer(self._all_down()) from None
            except BaseException:
                if waiter.done() and not waiter.cancelled():    # woken and cancelled at the same time: the room is another's
                    self._wake(1)
                raise
        server.in_flight += 1
        if session:
            self._sessions[session] = server
            self._sessions.move_to_end(session)
            if len(self._sessions) > SESSIONS:
                self._sessions.popitem(last=False)
        return server

    def release(self, server: Server) -> None:
        server.in_flight -= 1
        self._wake(1)

    def leave_out(self, server: Server, why: str) -> None:
        server.why = why
        if not server.up:
            return
        server.up = False
        logger.warning("%s is left out, its %d requests go elsewhere: %s", server.url, server.in_flight, why)
        for scope in list(server.scopes):
            expire(scope)
        if not any(s.up for s in self.servers):
            self._down_since = time.monotonic()
            self._wake(len(self._waiters))      # they now wait with a deadline
        self.on_change(server, False)

    def take_back(self, server: Server) -> None:
        if server.up or server.barred:      # barred while its check was under way
            return
        server.up, server.failures, self._down_since = True, 0, None
        logger.warning("%s is taken back", server.url)
        self._wake(len(self._waiters))
        self.on_change(server, True)

    def bar(self, server: Server, why: str) -> None:
        """Leave it out until this is called again with an empty reason."""
        server.barred = why
        if why:
            self.leave_out(server, why)
        server.suspected.set()

    async def close(self) -> None:
        for watch in self._watches:
            watch.cancel()
        await asyncio.gather(*self._watches, return_exceptions=True)

    def _choose(self, session: str, avoid: Collection[Server]) -> Server | None:
        free = [s for s in self.servers if s.up and s.in_flight < self.config.sglang_server_concurrency]
        if not free:
            return None
        own = self._sessions.get(session)
        if own in free and own not in avoid and own.failures < SHUNNED:
            return own
        self._turn += 1
        count = len(self.servers)
        order = {s: (i - self._turn) % count for i, s in enumerate(self.servers)}
        return min(free, key=lambda s: (s.failures >= SHUNNED, s in avoid, s.in_flight, order[s]))

    def _wake(self, count: int) -> None:
        while self._waiters and count:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                count -= 1

    def _patience(self) -> float | None:
        """Seconds until giving up; None while a server is up (it is busy, and its requests have deadlines)."""
        return None if self._down_since is None else self._down_since + self.config.sglang_down_timeout - time.monotonic()

    def _all_down(self) -> str:
        states = "; ".join(f"{s.url}: {s.why}" for s in self.servers)
        return (f"no SGLang server has been usable for {self.config.sglang_down_timeout:g} s ({states}): restart them, or correct "
                "--sglang-urls")

    async def _watch(self, server: Server) -> None:
        failures = 0
        while True:
            if not failures or not server.up:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(server.suspected.wait(), self.config.rollout_health_check_interval)
                server.suspected.clear()
            try:
                if server.barred:
                    raise EngineError(server.barred)
                await self.check(server)
            except Exception as error:
                failures += 1
                if failures > 1 or not server.up:
                    self.leave_out(server, str(error) or type(error).__name__)
            else:
                failures = 0
                self.take_back(server)
