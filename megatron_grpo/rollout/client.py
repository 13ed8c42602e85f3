"""The engine: SGLang servers, or one SGLang router, over HTTP. Every call has a deadline; an answer is checked or it is not used.

A request goes to its conversation's server, else to the least loaded one. What fails on the way, or comes back wrong
(responses.py), is tried again elsewhere, after a pause that doubles; after --sglang-retries further attempts it is dropped with its
reason. Responses are streamed in large parts, and what a lost attempt had brought is kept (call.py).
"""

import asyncio
import logging
import random
import resource
import time
import uuid
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import MappingProxyType

from .call import Call
from .config import EngineConfig
from .engine import EngineError, Generation, GenerationRequest, SamplingParams
from .fleet import Fleet, NoServer, Server, expire
from .responses import BadResponse, Part, ServedModel, body, finish, read
from .server_check import check_server, describe, vocabulary_fault
from .wire import Lost, Wire

logger = logging.getLogger(__name__)

ABORT_GRACE = 15            # seconds that a server has to end an aborted request; it is told once a second
BACKOFF_CAP = 30.0          # longest pause between two attempts [s]
OFF_LOOP = 1 << 20          # bytes of an answer that are worth a thread, so that other requests go on


@dataclass
class ClientStats:
    """requested = delivered + sum(dropped) + those in flight. `refused` and `lost` count attempts, not requests."""

    requested: int = 0
    delivered: int = 0
    dropped: Counter[str] = field(default_factory=Counter)      # requests given up, by the last failure
    refused: Counter[str] = field(default_factory=Counter)      # answers that were not used, by reason
    lost: Counter[str] = field(default_factory=Counter)         # attempts without an answer, by kind
    rescued_tokens: int = 0                                     # received from a server that was then lost, and used
    left_out: int = 0                                           # times that a server was left out
    taken_back: int = 0

    def metrics(self) -> dict[str, float]:
        """Flat numbers, e.g. `refused` and, of these, `refused/log-probs`."""
        flat: dict[str, float] = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, Counter):
                flat |= {f.name: float(value.total())} | {f"{f.name}/{reason}": float(count) for reason, count in value.items()}
            else:
                flat[f.name] = float(value)
        return flat


class _Dropped(EngineError):
    def __init__(self, reason: str, message: str):
        super().__init__(message)
        self.reason = reason


class SGLangClient:
    """An Engine. It lives on the event loop on which `start` ran.

    Args:
        config: deadlines, concurrency, retries.
        model: what the servers have to serve.
        urls: servers or a router; those of `config` when not given.
        backoff: pause before the first retry [s].
    """

    def __init__(self, config: EngineConfig, model: ServedModel, urls: Sequence[str] = (), backoff: float = 0.5):
        self.config, self.model, self.backoff = config, model, backoff
        self.urls = tuple(url.rstrip("/") for url in urls) or config.server_urls
        if not self.urls:
            raise EngineError("no SGLang server is named: give --sglang-urls, or --sglang-launch local")
        self.stats = ClientStats()
        self.versions: list[str] = []       # weight versions published so far
        self._nonce = uuid.uuid4().hex[:8]
        self._calls: dict[str, Call] = {}
        self._background: set[asyncio.Task] = set()

    # ---- start and end --------------------------------------------------------------------------------------------------------

    async def start(self, check: bool = True) -> "SGLangClient":
        """Wait for the servers, refuse those that cannot serve this run, and watch them from now on.

        Args:
            check: wait, look at each server's arguments, and try one request on each.

        Raises:
            EngineError: names each server that is at fault and the fix.
        """
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))        # each request in flight holds a connection
        self.wire = Wire(self.config.api_key, self.config.sglang_stall_timeout)
        self.fleet = Fleet(self.urls, self.config, self._healthy, self._count_change)
        if check:
            found = await asyncio.gather(*(self._faults(server) for server in self.fleet.servers))
            if lines := [line for faults in found for line in faults]:
                await self.close()
                raise EngineError("\n".join(lines))
        self.fleet.watch()
        return self

    async def close(self) -> None:
        """Abort what runs, stop watching, close the connections."""
        await self.abort()
        for call in list(self._calls.values()):
            expire(call.scope)
        await self.fleet.close()
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        await self.wire.close()

    async def _faults(self, server: Server) -> list[str]:
        deadline = time.monotonic() + self.config.sglang_start_timeout
        while True:
            try:
                await self._healthy(server)
                break
            except EngineError as error:
                if time.monotonic() > deadline:
                    return [f"{server.url}: not healthy within {self.config.sglang_start_timeout:g} s (--sglang-start-timeout): {error}"]
            await asyncio.sleep(0.5)
        probe = GenerationRequest("probe", [0, 1, 2], SamplingParams(4, ignore_eos=True), return_routes=self.model.routes is not None)
        try:
            for url in self._behind(server):
                if faults := check_server(url, *await describe(self.wire, url), self.model):
                    return [f"{url}: {fault}" for fault in faults]
                if fault := await vocabulary_fault(self.wire, url, self.model):
                    return [f"{url}: {fault}"]
            await self._attempt(Call(probe, self.model), server, 0)
        except (EngineError, Lost, BadResponse) as error:
            return [f"{server.url}: a first request failed: {error}"]
        return []

    # ---- generation -------------------------------------------------------------------------------------------------------------

    async def generate(self, request: GenerationRequest) -> Generation:
        """Sample one continuation; see Engine.

        Raises:
            EngineError: the request is dropped; names the last failure.
        """
        self._refuse_request(request)
        call = self._calls[request.request_id] = Call(request, self.model)
        self.stats.requested += 1
        dropped = "cancelled"
        try:
            generation = await self._attempts(call)
            dropped = ""
            return generation
        except _Dropped as error:
            dropped = error.reason
            raise
        except NoServer:
            dropped = "no server"
            raise
        except EngineError:
            dropped = "not accepted"
            raise
        finally:
            del self._calls[request.request_id]
            if dropped:
                self.stats.dropped[dropped] += 1
            else:
                self.stats.delivered += 1
                self.stats.rescued_tokens += call.rescued

    def _refuse_request(self, request: GenerationRequest) -> None:
        if request.request_id in self._calls:
            raise EngineError(f"request {request.request_id} is in flight already: request ids have to be unique")
        if request.return_routes and self.model.routes is None:
            raise EngineError(f"request {request.request_id} asks for routes, but the client was not told the model's routers")
        if not request.input_ids or not 0 <= min(request.input_ids) <= max(request.input_ids) < self.model.vocab_size:
            raise EngineError(f"request {request.request_id}: its prompt is empty, or has tokens outside the vocabulary of "
                              f"{self.model.vocab_size}, which would kill the server: check the tokenizer")

    async def _attempts(self, call: Call) -> Generation:
        avoid: tuple[Server, ...] = ()
        for attempt in range(self.config.sglang_retries + 1):
            server = None if call.aborted else await call.unless_aborted(self.fleet.acquire(call.request.session, avoid))
            if server is None:
                break
            try:
                generation = await self._attempt(call, server, attempt)
                server.failures = 0
                return generation
            except (BadResponse, Lost) as error:
                failure = error
            finally:
                self.fleet.release(server)
            logger.info("request %s at %s: %s", call.request.request_id, server.url, failure)
            server.failures += 1
            pause = self._book(call, server, failure)
            if call.aborted:
                break
            if attempt == self.config.sglang_retries:
                raise _Dropped(failure.reason, f"request {call.request.request_id} is dropped after {attempt + 1} attempts; the last, at "
                                               f"{server.url}: {failure}")
            avoid = (server,)
            pause = max(pause, min(self.backoff * 2 ** attempt, BACKOFF_CAP) * random.uniform(0.5, 1.5))
            if not await call.unless_aborted(asyncio.sleep(pause, True)):
                break
        return call.partial()

    def _book(self, call: Call, server: Server, failure: BadResponse | Lost) -> float:
        """Returns the seconds that the server asks to be left alone."""
        if isinstance(failure, BadResponse):
            self.stats.refused[failure.reason] += 1
            call.held = None
            return 0.0
        self.stats.lost[failure.reason] += 1
        if failure.gone:
            self.fleet.leave_out(server, str(failure))
        else:
            server.suspected.set()
        return failure.wait

    async def _attempt(self, call: Call, server: Server, attempt: int) -> Generation:
        """
        Raises:
            Lost, BadResponse: to be tried again. EngineError: the server will never accept it.
        """
        request = call.rest()
        call.server, rid = server, f"{self._nonce}.{request.request_id}.{attempt};"     # SGLang aborts by prefix: none may begin another
        call.rid = rid
        known = len(self.versions)
        part: Part | None = None
        try:
            async with asyncio.timeout(self.config.sglang_request_timeout) as scope:
                call.scope = scope
                server.scopes.add(scope)
                async for raw in self.wire.generate(server.url, body(request, rid, self.config.sglang_stream_interval)):
                    part = await _aside(len(raw), read, raw, request, rid, self.model, part, server.url)
                    if part.finish:
                        break
                if part is None or not part.finish:
                    raise Lost("cut", "the answer ended in mid-response")
                allowed = self.versions[known - 1:] if known else ()
                generation = await _aside(part.nbytes, finish, part, request, self.model, allowed, server.url)
            return call.whole(generation)
        except TimeoutError:
            call.hold(part, server.url)
            if call.aborted:
                raise Lost("aborted", "and the server did not end it in time") from None
            if not server.up:
                raise Lost("left out", server.why) from None
            raise Lost("timeout", f"no end within {self.config.sglang_request_timeout:g} s (--sglang-request-timeout)") from None
        except Lost:
            call.hold(part, server.url)
            raise
        finally:
            if call.scope is not None:
                server.scopes.discard(call.scope)
            call.scope, call.rid = None, ""
            if (part is None or not part.finish) and server.up:
                self._later(self._abort_at(server, rid))

    # ---- control ----------------------------------------------------------------------------------------------------------------

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """Abort these requests (None: all of this client's); their `generate` returns what there is, finish_reason "abort"."""
        calls = [self._calls[i] for i in (list(self._calls) if request_ids is None else request_ids) if i in self._calls]
        for call in calls:
            call.aborted = True
        await asyncio.gather(*(self._abort(call) for call in calls))

    async def _abort(self, call: Call) -> None:
        server, rid = call.server, call.rid
        if server and rid and await self._abort_at(server, rid):
            self._later(self._insist(call, server, rid))
        else:
            expire(call.scope)

    async def _insist(self, call: Call, server: Server, rid: str) -> None:
        """An abort that overtakes its request finds nothing; a hung server never ends it."""
        for _ in range(ABORT_GRACE):
            await asyncio.sleep(1)
            if call.rid != rid:
                return
            await self._abort_at(server, rid)
        expire(call.scope)

    async def _abort_at(self, server: Server, rid: str) -> bool:
        asked = (self.wire.control(url, "/abort_request", {"rid": rid}) for url in self._behind(server))
        return not all(isinstance(answer, EngineError) for answer in await asyncio.gather(*asked, return_exceptions=True))

    def _behind(self, server: Server) -> tuple[str, ...]:
        """Where its control requests go: to the workers of a router."""
        return self.config.worker_urls or (server.url,)

    async def expect(self, version: str, left_out: Mapping[str, str] = MappingProxyType({})) -> None:
        """The servers now answer with this weight version, except those in `left_out` (url -> why), which are not sampled from.

        Answers under earlier versions are refused, but for requests that are in flight at this call.
        """
        self.versions.append(version)
        for server in self.fleet.servers:
            self.fleet.bar(server, left_out.get(server.url, ""))

    async def _healthy(self, server: Server) -> None:
        """Raises EngineError if it is not, or, once left out, if it is not on the expected weights either."""
        await self.wire.control(server.url, "/health", timeout=self.config.rollout_health_check_timeout)
        if not server.up and self.versions:
            found = (await describe(self.wire, server.url))[1].get("weight_version")
            if found is not None and str(found) != self.versions[-1]:
                raise EngineError(f"{server.url} has weight version {found}, expected {self.versions[-1]}; the next update brings it back")

    def _count_change(self, server: Server, up: bool) -> None:
        self.stats.taken_back += up
        self.stats.left_out += not up

    def _later(self, coroutine: Coroutine) -> None:
        task = asyncio.create_task(coroutine)
        self._background.add(task)
        task.add_done_callback(self._background.discard)


async def _aside(nbytes: int, function, *args):
    """In a thread if the work is long enough to hold up the event loop."""
    return function(*args) if nbytes < OFF_LOOP else await asyncio.to_thread(function, *args)
