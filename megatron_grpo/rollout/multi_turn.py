"""Conversations: a rollout function generates, appends environment tokens, and ends by returning.

    async def rollout(args, episode):                                   # --rollout-function-path
        while episode.remaining > 0:
            turn = await episode.generate(stop_token_ids=(CLOSE_CALL,))
            if turn.finish_reason != "stop" or turn.output_ids[-1] != CLOSE_CALL:
                return
            episode.append(await run_tool(turn.output_ids))

A turn can be cut by a pause (end of the step, weight update) and goes on after it from the tokens received; the function does not
notice. Without a rollout function a conversation is one turn.
"""

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from ..batch import Status
from .engine import EngineError, Generation, GenerationRequest, SamplingParams
from .gate import Gate
from .trajectory import Trajectory

EMPTY_ABORTS = 600          # unasked aborts in a row without a token, about 10 minutes, after which the engine is given up
_serial = itertools.count()


class Conversation:
    """hooks.Episode over a Trajectory.

    Args:
        trajectory: what grows.
        gate: the way to the engine.
        params: sampling of each turn; its limit is the whole response's.
        tokenizer: for the rollout function's own use.
        tag: prefix of request ids.
        on_tokens: called with the number of tokens of each answer of the engine.
    """

    def __init__(self, trajectory: Trajectory, gate: Gate, params: SamplingParams, tokenizer, *, tag: str = "sample",
                 on_tokens: Callable[[int], None] = lambda n: None):
        self.trajectory, self.gate, self.params, self.tokenizer, self.tag = trajectory, gate, params, tokenizer, tag
        self.on_tokens = on_tokens
        self.prompt, self.label = trajectory.prompt.text, trajectory.prompt.label
        self.metadata = dict(trajectory.prompt.metadata)
        self.cut = False                # something was cut at --rollout-max-response-len
        self.left_engine = 0.0          # event-loop time at which the last turn ended; infinite while one runs

    @property
    def tokens(self) -> list[int]:
        return list(self.trajectory.tokens)

    @property
    def remaining(self) -> int:
        return self.trajectory.remaining

    async def generate(self, max_new_tokens: int | None = None, stop_token_ids: tuple[int, ...] = ()) -> Generation:
        """Sample one turn; its tokens join the response with mask 1.

        Args:
            max_new_tokens: limit of this turn; it never exceeds `remaining`.
            stop_token_ids: tokens that end this turn, beside those that end every response.

        Returns:
            The whole turn. finish_reason "length" without a token when nothing remains.
        """
        before = len(self.trajectory.tokens)
        end = min(before + self.remaining, before + (self.remaining if max_new_tokens is None else max_new_tokens))
        stops = tuple(dict.fromkeys((*self.params.stop_token_ids, *stop_token_ids)))
        self.left_engine = float("inf")
        try:
            last = await self._sample(end, stops)
        finally:        # also when it fails: the function may go on
            self.left_engine = asyncio.get_running_loop().time()
        self.trajectory.turns += 1
        return self._turn(before, last)

    def append(self, tokens: list[int]) -> None:
        """Add environment tokens (tool output, a user's turn); they join the response with mask 0. What does not fit is cut off."""
        self.cut |= len(tokens) > self.remaining
        self.trajectory.append(list(tokens)[:self.remaining])

    async def _sample(self, end: int, stops: tuple[int, ...]) -> Generation | None:
        """Sample until the turn ends or there are `end` tokens; returns the engine's last answer."""
        generation, pause, aborts = None, 0.05, 0
        while len(self.trajectory.tokens) < end:
            await self.gate.wait()
            generation = await self.gate.generate(self._request(end - len(self.trajectory.tokens), stops))
            self.trajectory.extend(generation)
            self.on_tokens(len(generation.output_ids))
            if generation.finish_reason != "abort":
                break
            if self.gate.is_open:       # the engine's own doing: a weight update, a server that restarts
                aborts = 0 if generation.output_ids else aborts + 1
                if aborts > EMPTY_ABORTS:
                    raise EngineError(f"{generation.server}: request {generation.request_id} was aborted {aborts} times in a row")
                await asyncio.sleep(pause)
                pause = min(2 * pause, 1.0)
        return generation

    def _request(self, limit: int, stops: tuple[int, ...]) -> GenerationRequest:
        t = self.trajectory
        return GenerationRequest(
            request_id=f"{self.tag}-{t.sample_id}-{next(_serial)}", input_ids=list(t.tokens), session=f"{self.tag}-{t.sample_id}",
            params=replace(self.params, max_new_tokens=limit, stop_token_ids=stops), return_routes=t.routes is not None,
            routes_start=t.route_rows, return_sampling_mask=t.sampling_mask is not None)

    def _turn(self, before: int, last: Generation | None) -> Generation:
        """The turn as one Generation, without the routes, which stay with the trajectory."""
        t = self.trajectory
        start = before - len(t.prompt.tokens)
        reason = "length" if last is None or last.finish_reason == "abort" else last.finish_reason
        self.cut = reason == "length"
        return Generation(
            last.request_id if last else "", t.tokens[before:].tolist(), np.array(t.logp[start:], np.float32), reason,
            server=last.server if last else "", weight_versions=[(v, max(a - start, 0), b - start) for v, a, b in t.versions if b > start])


async def converse(conversation: Conversation, function: Callable | None, idle_limit_s: float) -> None:
    """Run a conversation to its end and set the trajectory's status.

    Args:
        function: Hooks.rollout; None is one turn.
        idle_limit_s: longest time that the function may spend between two turns.

    Raises:
        EngineError: from the engine, or when the function hangs; and whatever the function raises.
    """
    if function is None:
        await conversation.generate()
    else:
        await _watched(conversation, function, idle_limit_s)
    conversation.trajectory.status = Status.TRUNCATED if conversation.cut else Status.COMPLETED


async def _watched(conversation: Conversation, function: Callable, idle_limit_s: float) -> None:
    now = asyncio.get_running_loop().time
    conversation.left_engine = now()
    task = asyncio.ensure_future(function(conversation))
    try:
        while not task.done():
            left = idle_limit_s - max(now() - conversation.left_engine, 0.0)
            if left < 1e-3:
                raise EngineError(f"the rollout function spent over {idle_limit_s:g} s outside the engine (--rollout-function-timeout)")
            await asyncio.wait({task}, timeout=left)
        task.result()
    finally:
        task.cancel()
