"""One request over its attempts: where it runs, and the tokens that lost attempts brought.

When a server dies in mid-response, another one goes on from the tokens received. It reads them as its prompt, so it also returns
their routes.
"""

import asyncio
from collections.abc import Awaitable
from dataclasses import replace

import numpy as np

from .engine import Generation, GenerationRequest
from .fleet import Server
from .responses import BadResponse, Part, ServedModel, chained, finish


class Call:
    """One `generate` in progress.

    Attributes:
        server, rid: where it was sent last, and its id there, which is empty between two attempts.
        scope: what it waits for; expiring it interrupts the wait.
        held: what lost attempts had brought.
        rescued: tokens of `held` that its answer has.
    """

    def __init__(self, request: GenerationRequest, model: ServedModel):
        self.request, self.model = request, model
        self.server: Server | None = None
        self.rid = ""
        self.scope: asyncio.Timeout | None = None
        self.aborted = False
        self.held: Generation | None = None
        self.rescued = 0

    def rest(self) -> GenerationRequest:
        """What is left to ask for."""
        request, held = self.request, self.held
        if held is None:
            return request
        left = request.params.max_new_tokens - len(held.output_ids)
        return replace(request, input_ids=[*request.input_ids, *held.output_ids], params=replace(request.params, max_new_tokens=left))

    def hold(self, part: Part | None, url: str) -> None:
        """Keep the tokens that an attempt brought before it was lost, if they leave something to do."""
        request = replace(self.rest(), return_routes=False)     # they come with the last message only
        if part is None or part.finish or not 0 < len(part.output_ids) < request.params.max_new_tokens:
            return
        try:
            self.held = self._joined(finish(part, request, self.model, (), url))
        except BadResponse:
            self.held = None

    def whole(self, generation: Generation) -> Generation:
        """The answer of the last attempt, after what is held.

        Raises:
            BadResponse: the weights changed in between.
        """
        if self.held is None or self.request.return_routes and generation.routes is None:      # aborted in the queue: nobody has held routes
            return generation
        both = self._joined(generation)
        self.rescued = len(self.held.output_ids)
        return both

    def partial(self) -> Generation:
        """What an aborted call has; without tokens whose routes are wanted and lost."""
        if self.held is not None and not self.request.return_routes:
            self.rescued = len(self.held.output_ids)
            return self.held
        return Generation(self.request.request_id, [], np.zeros(0, np.float32), "abort",
                          sampling_mask=[] if self.request.return_sampling_mask else None)

    async def unless_aborted[T](self, waiting: Awaitable[T]) -> T | None:
        """Its result, or None if the call is aborted meanwhile."""
        try:
            async with asyncio.timeout(None) as self.scope:
                return await waiting
        except TimeoutError:
            return None
        finally:
            self.scope = None

    def _joined(self, more: Generation) -> Generation:
        """The tokens held, then those of the server that went on from them, whose routes are those of all."""
        held = self.held
        if held is None:
            return more
        if len({version for version, _, _ in (*held.weight_versions, *more.weight_versions)}) > 1:
            raise BadResponse("weight version", "the weights changed while the request moved to another server")
        ids = [*held.output_ids, *more.output_ids]
        spans = [(version, 0, len(ids)) for version, _, _ in held.weight_versions[:1] or more.weight_versions[:1]]
        return replace(more, output_ids=ids, logp=np.concatenate([held.logp, more.logp]), weight_versions=spans,
                       sampling_mask=chained(held.sampling_mask, more.sampling_mask))
