"""A simulated engine on simulated time, for the rollout benchmarks and tests: no server, no waiting."""

import asyncio
from collections import deque
from collections.abc import Callable

import numpy as np

from megatron_grpo.rollout.engine import EngineError, Generation, GenerationRequest


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer instead of waiting for it. Everything on it must be simulated."""

    def __init__(self):
        super().__init__()
        self._virtual_now = 0.0
        select = self._selector.select

        def jump(timeout):
            if timeout is None:
                raise RuntimeError("deadlock: nothing is scheduled and nobody is awaited")
            self._virtual_now += max(timeout, 0.0)
            return select(0)

        self._selector.select = jump

    def time(self) -> float:
        return self._virtual_now


def run_virtual(coroutine):
    """The coroutine's result, on a fresh VirtualTimeLoop."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(coroutine)


class SimulatedEngine:
    """An Engine that answers after the simulated time of its tokens, with what the conversation and the position determine.

    The token at absolute position p of a conversation, its log-prob and its routes are functions of (session, p), so a response that was
    aborted and continued is the one that was not.

    Args:
        length_of: (session, prompt tokens) -> response tokens, the last of which is `eos`.
        eos: the token that ends a response.
        vocabulary: token ids are in [0, vocabulary), `eos` excepted.
        seconds_per_token: simulated decoding time of a request's token.
        slots: requests that decode at once, over all; further ones wait.
        route_shape: (layers, top-k, experts) of the routes; None has no routes.
    """

    def __init__(self, length_of: Callable[[str, list[int]], int], eos: int = 0, vocabulary: int = 64, seconds_per_token: float = 0.02,
                 slots: int = 1 << 30, route_shape: tuple[int, int, int] | None = None):
        self.length_of, self.eos, self.vocabulary, self.seconds_per_token = length_of, eos, vocabulary, seconds_per_token
        self.route_shape, self.version = route_shape, 0
        self.free, self.queue = slots, deque()
        self.aborts: dict[str, asyncio.Event] = {}
        self.busy_s = 0.0                       # slot-seconds spent decoding
        self.sampled = 0
        self.starts: dict[str, int] = {}        # session -> prompt length
        self.requests: list[GenerationRequest] = []

    async def generate(self, request: GenerationRequest) -> Generation:
        if request.request_id in self.aborts:
            raise EngineError(f"request {request.request_id} is not unique")
        self.requests.append(request)
        abort = self.aborts[request.request_id] = asyncio.Event()
        try:
            if not await self._place(abort):
                return Generation(request.request_id, [], np.zeros(0, np.float32), "abort")
            try:
                return await self._decode(request, abort)
            finally:
                self._give_place()
        finally:
            del self.aborts[request.request_id]

    async def abort(self, request_ids: list[str] | None = None) -> None:
        for request_id in list(self.aborts) if request_ids is None else request_ids:
            if request_id in self.aborts:
                self.aborts[request_id].set()

    async def close(self) -> None:
        await self.abort()

    def tokens(self, session: str, start: int, end: int) -> list[int]:
        return (1 + (hash_of(session) + 31 * np.arange(start, end)) % (self.vocabulary - 1)).tolist()

    def routes(self, session: str, start: int, end: int) -> np.ndarray:
        layers, topk, experts = self.route_shape
        first = (hash_of(session) + np.arange(start, end)[:, None] * 7 + np.arange(layers)[None, :] * 3) % experts
        return ((first[:, :, None] + np.arange(topk)) % experts).astype(np.uint8)

    async def _decode(self, request: GenerationRequest, abort: asyncio.Event) -> Generation:
        begin, session, version = len(request.input_ids), request.session, self.version
        start = self.starts.setdefault(session, begin)
        total = self.length_of(session, request.input_ids[:start])
        wanted = min(max(total - (begin - start), 1), request.params.max_new_tokens)
        clock = asyncio.get_running_loop().time
        began, finish = clock(), "stop" if begin - start + wanted >= total else "length"
        try:
            await asyncio.wait_for(abort.wait(), wanted * self.seconds_per_token)
            wanted, finish = min(int((clock() - began) / self.seconds_per_token + 1e-6), wanted - 1), "abort"
        except TimeoutError:
            pass
        self.busy_s += clock() - began
        self.sampled += wanted
        ids = self.tokens(session, begin, begin + wanted)
        if finish == "stop":
            ids[-1] = self.eos
        logp = -(1 + np.array(ids, np.float32)) / 100
        routes = None
        if request.return_routes and self.route_shape and ids:
            routes = self.routes(session, request.routes_start, begin + wanted - 1)
        support = [np.array([t], np.int32) for t in ids] if request.return_sampling_mask else None
        return Generation(request.request_id, ids, logp, finish, routes, support, [(str(version), 0, wanted)] if ids else [])

    async def _place(self, abort: asyncio.Event) -> bool:
        """Wait for a slot, first come first served; False if aborted in the queue."""
        if self.free and not self.queue:
            self.free -= 1
            return True
        turn = asyncio.get_running_loop().create_future()
        self.queue.append(turn)
        aborted = asyncio.ensure_future(abort.wait())
        await asyncio.wait({turn, aborted}, return_when=asyncio.FIRST_COMPLETED)
        aborted.cancel()
        if not turn.done():
            turn.cancel()
            return False
        if abort.is_set():
            self._give_place()
            return False
        return True

    def _give_place(self) -> None:
        while self.queue:
            turn = self.queue.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self.free += 1


def hash_of(text: str) -> int:
    """Stable across processes, unlike hash()."""
    value = 17
    for c in text.encode():
        value = (value * 131 + c) % 1_000_003
    return value
