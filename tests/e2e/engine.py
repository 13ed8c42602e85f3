"""An engine without a model that a whole training run can use: it answers as truth.py says, in streams, and takes every update.

What it says about a prompt does not depend on when it is asked or how often it is cut, so a sample that was repeated, lost or
continued wrongly shows in its tokens.
"""

import asyncio
import contextlib

from aiohttp import web

from megatron_grpo.trainer.sources import EventLoop
from tests.faults.server import FaultServer


class TrainingEngine(FaultServer):
    """FaultServer in a thread, with the routes of --weight-sync disk; prompts differ in how long their answers take."""

    ROUTES = ("pause_generation", "continue_generation", "flush_cache")

    async def answer(self, request, body, spoil=lambda message: message, *, cumulative=False):
        await asyncio.sleep(sum(body["input_ids"]) % 5 * self.pause)
        return await super().answer(request, body, spoil, cumulative=cumulative)

    async def update(self, request):
        self.version = (await request.json())["weight_version"]
        return web.json_response({"success": True})

    def routes(self):
        async def nothing(request):
            return web.json_response({})
        return [*super().routes(), *(web.post(f"/{name}", nothing) for name in self.ROUTES)]


@contextlib.contextmanager
def training_engine(pause: float):
    """A running engine; `pause` seconds between two parts of a streamed answer."""
    events, engine = EventLoop(), TrainingEngine(part=2, pause=pause)
    events.run(engine.start(), 20)
    try:
        yield engine
    finally:
        events.run(engine.stop(), 20)
        events.close()
