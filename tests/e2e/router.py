"""What SGLang's router does in front of one server: it passes generation and health checks on, and knows no other path."""

import asyncio
import contextlib
import urllib.parse

from megatron_grpo.trainer.sources import EventLoop

PASSED = (b"POST /generate ", b"GET /health ")


@contextlib.contextmanager
def router(url: str):
    """The address of a router in front of `url`; a connection carries one request."""
    server = urllib.parse.urlsplit(url)

    async def serve(reader, writer):
        request = await reader.readline()
        if not request.startswith(PASSED):
            writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            writer.close()
            return
        answer, forward = await asyncio.open_connection(server.hostname, server.port)
        forward.write(request)
        await asyncio.gather(_pipe(reader, forward), _pipe(answer, writer), return_exceptions=True)

    events = EventLoop()
    listening = events.run(asyncio.start_server(serve, "127.0.0.1", 0), 20)
    try:
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    finally:
        events.close()


async def _pipe(source, sink):
    try:
        while data := await source.read(1 << 16):
            sink.write(data)
            await sink.drain()
    finally:
        sink.close()
