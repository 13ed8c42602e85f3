"""A server that speaks SGLang's /generate and fails on demand. Tests only.

    server = await FaultServer(script).start()      # script: (request id, attempt) -> name of a fault (faults.py), or "ok"
"""

import asyncio
import json
from collections.abc import Callable

from aiohttp import web

from .faults import FAULTS, HANG, VERSION
from .truth import VOCAB, continuation, encoded, logp, routes


class FaultServer:
    """
    Args:
        script: the fault of each attempt.
        part: tokens of a streamed part.
        pause: seconds between two parts.
    """

    def __init__(self, script: Callable[[str, int], str] = lambda request, attempt: "ok", *, part: int = 4, pause: float = 0.0):
        self.script, self.part, self.pause = script, part, pause
        self.healthy, self.version, self.info = True, VERSION, {"version": "0.5.23", "enable_return_routed_experts": True, "pp_size": 1}
        self.port = 0
        self.running: dict[str, asyncio.Event] = {}     # rid -> set when aborted
        self.seen: list[dict] = []                      # bodies of /generate
        self.aborts: list[str] = []
        self.most_at_once = self.at_once = 0
        self.keys: set[str | None] = set()              # Authorization of all requests

    async def start(self) -> "FaultServer":
        @web.middleware
        async def note_key(request, handler):
            self.keys.add(request.headers.get("Authorization"))
            return await handler(request)

        app = web.Application(client_max_size=1 << 28, middlewares=[note_key])
        app.add_routes(self.routes())
        self.runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        self.port = site._server.sockets[0].getsockname()[1]
        return self

    def routes(self) -> list:
        return [web.post("/generate", self.generate), web.get("/health", self.health), web.get("/server_info", self.server_info),
                web.get("/model_info", self.model_info), web.post("/abort_request", self.abort_request),
                web.post("/update_weights_from_disk", self.update)]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def die(self) -> None:
        """Close the port and every connection, as a killed process does."""
        if self.runner.server is not None:
            for connection in list(self.runner.server.connections):
                if connection.transport:
                    connection.transport.abort()
            await self.runner.cleanup()

    stop = die

    async def health(self, request):
        if self.healthy == "hangs":
            await asyncio.sleep(HANG)
        return web.Response(status=200 if self.healthy else 503)

    async def server_info(self, request):
        return web.json_response(self.info)

    async def model_info(self, request):
        return web.json_response({"weight_version": self.version, "is_generation": True})

    async def update(self, request):
        """Whoever trains publishes to it: tests/e2e/test_restart.py, tests/slurm."""
        await request.read()
        return web.json_response({"success": True, "message": ""})

    async def abort_request(self, request):
        rid = (await request.json())["rid"]
        self.aborts.append(rid)
        for other, aborted in self.running.items():
            if other.startswith(rid):       # as SGLang does
                aborted.set()
        return web.Response()

    async def generate(self, request):
        body = await request.json()
        if "logit_bias" in body["sampling_params"]:
            return web.json_response({"error": {"message": f"logit_bias must has keys in [0, {VOCAB - 1}], got x."}}, status=400)
        self.seen.append(body)
        _, name, attempt = body["rid"].rstrip(";").split(".")
        fault = FAULTS[self.script(name, int(attempt))]
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        self.running[body["rid"]] = asyncio.Event()
        try:
            return await fault(self, request, body)
        finally:
            self.at_once -= 1
            self.running.pop(body["rid"], None)

    # ---- a right answer ---------------------------------------------------------------------------------------------------------

    def message(self, body: dict, count: int | None = None, since: int = 0, finish: dict | None = None) -> dict:
        """Output tokens since .. count - 1; all of them and the end by default."""
        prompt, limit = body["input_ids"], body["sampling_params"]["max_new_tokens"]
        if count is None:
            count, finish = limit, {"type": "length", "length": limit}
        ids = continuation(prompt, count)
        meta = {"id": body["rid"], "finish_reason": finish, "prompt_tokens": len(prompt), "completion_tokens": count,
                "weight_version": self.version, "cached_tokens": 0, "output_token_logprobs": [[logp(t), t, None] for t in ids[since:]]}
        if finish and count:
            meta["weight_versions"] = [{"version": self.version, "start": 0, "end": count}]
            if body.get("return_routed_experts"):
                meta["routed_experts"] = encoded(routes(prompt + ids, body["routed_experts_start_len"]))
        if body.get("return_sampling_mask"):
            meta["output_token_sampling_mask"] = [[t, (t + 1) % VOCAB] for t in ids[since:]]
            meta["output_token_sampling_logprobs"] = [logp(t) / 2 for t in ids[since:]]
        return {"text": "", "output_ids": ids[since:], "meta_info": meta}

    async def answer(self, request, body: dict, spoil: Callable[[dict], object] = lambda message: message, *, cumulative: bool = False):
        """Send it as the request asks, streamed or whole; `spoil` changes the last message."""
        limit = body["sampling_params"]["max_new_tokens"]
        if not body.get("stream"):
            await asyncio.sleep(self.pause * limit / self.part)
            return web.json_response(spoil(self.message(body)))
        stream = await self.begin(request)
        sent = 0
        for count in [*range(1, limit, self.part), limit]:
            if self.pause:
                await asyncio.sleep(self.pause)
            if self.running[body["rid"]].is_set():
                await self.event(stream, self.message(body, sent, 0 if cumulative else sent, {"type": "abort", "message": "Aborted"}))
                return stream
            last = count == limit
            message = self.message(body, count, 0 if cumulative else sent, {"type": "length", "length": limit} if last else None)
            await self.event(stream, spoil(message) if last else message)
            sent = count
        await stream.write(b"data: [DONE]\n\n")
        return stream

    async def begin(self, request) -> web.StreamResponse:
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await stream.prepare(request)
        return stream

    async def event(self, stream, message) -> None:
        await stream.write(b"data: " + json.dumps(message, separators=(",", ":")).encode() + b"\n\n")
