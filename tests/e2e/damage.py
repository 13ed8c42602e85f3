"""A server's routes, damaged on their way: a proxy in front of a real one."""

import base64
import contextlib
import json

import aiohttp
import numpy as np
from aiohttp import web

from megatron_grpo.trainer.sources import EventLoop

DAMAGES = {     # [rows, layers, K] -> what arrives
    "truncated": lambda routes: routes[:-4],
    "out of range": lambda routes: routes + 3 * (routes == routes.max()),
    "other model's width": lambda routes: np.concatenate([routes, routes[..., :1]], -1),
    "permuted layers": lambda routes: routes[:, ::-1],
}


class DamagingProxy:
    """Passes everything on, and damages the routes of some samples.

    Attributes:
        url: where it listens.
        damage: a key of DAMAGES; None for none.
        spared: sample id -> whether its routes are left alone.
        asked: the samples that were asked for.
        intact: sample id -> output tokens, of the answers that passed unharmed.
    """

    def __init__(self, server: str, layers: int, topk: int):
        self.server, self.shape = server, (-1, layers, topk)
        self.damage, self.spared, self.asked, self.intact = None, lambda sample: False, [], {}

    async def _serve(self):
        self.session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None))
        app = web.Application(client_max_size=1 << 28)
        app.router.add_route("*", "/{path:.*}", self._pass_on)
        self.runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"

    async def _stop(self):
        await self.runner.cleanup()
        await self.session.close()

    async def _pass_on(self, request):
        body = await request.read()
        async with self.session.request(request.method, self.server + request.path_qs, data=body, headers={
                "Content-Type": request.content_type}) as answer:
            if request.path != "/generate" or b'"rid"' not in body:
                return web.Response(body=await answer.read(), status=answer.status, content_type=answer.content_type)
            kind, number, *_ = f"{json.loads(body)['rid'].split('.')[1]}-".split("-")      # sample-17-4: the fourth request of the run
            sample = int(number) if kind == "sample" else None
            if sample is not None:
                self.asked.append(sample)
            stream, ids = web.StreamResponse(headers={"Content-Type": answer.headers["Content-Type"]}), []
            await stream.prepare(request)
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    message = json.loads(line[6:])
                    ids += message["output_ids"]
                    if "routed_experts" in message["meta_info"] and sample is not None:
                        self._spoil(sample, ids, message["meta_info"])
                        line = b"data: " + json.dumps(message, separators=(",", ":")).encode() + b"\n"
                with contextlib.suppress(ConnectionResetError):     # the run has stopped
                    await stream.write(line)
            return stream

    def _spoil(self, sample, ids, meta):
        if self.damage is None or self.spared(sample):
            self.intact[sample] = list(ids)
            return
        routes = np.frombuffer(base64.b64decode(meta["routed_experts"]), "<i4").reshape(self.shape)
        meta["routed_experts"] = base64.b64encode(np.ascontiguousarray(DAMAGES[self.damage](routes), "<i4").tobytes()).decode()


@contextlib.contextmanager
def damaging_proxy(server: str, layers: int, topk: int):
    """A running proxy."""
    events, proxy = EventLoop(), DamagingProxy(server, layers, topk)
    events.run(proxy._serve(), 20)
    try:
        yield proxy
    finally:
        events.run(proxy._stop(), 20)
        events.close()
