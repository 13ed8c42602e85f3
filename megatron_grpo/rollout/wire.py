"""HTTP with one SGLang server: generation as a series of messages, control requests, and what each failure means."""

import json
from collections.abc import AsyncIterator

import aiohttp

from .engine import EngineError

CONNECT_TIMEOUT = 10.0      # seconds
CONTROL_TIMEOUT = 30.0      # of a request that does no work on an accelerator
WAIT_CAP = 60.0             # longest Retry-After that is obeyed [s]


class Lost(Exception):
    """The attempt brought no answer, another one may.

    Attributes:
        reason: one of few words, for counting.
        gone: nothing listens at the url.
        wait: seconds that the server asks to be left alone.
    """

    def __init__(self, reason: str, detail: str, *, gone: bool = False, wait: float = 0.0):
        super().__init__(f"{reason}: {detail}")
        self.reason, self.gone, self.wait = reason, gone, wait


class Wire:
    """
    Args:
        stall_timeout: longest silence while an answer is awaited or read [s].
    """

    def __init__(self, api_key: str | None, stall_timeout: float):
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self.stall_timeout = stall_timeout
        self.session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True), headers=headers, trust_env=False)

    async def close(self) -> None:
        await self.session.close()

    async def generate(self, url: str, body: dict) -> AsyncIterator[bytes]:
        """POST /generate: the JSON texts of the answer, one, or several when the server streams.

        Raises:
            Lost. EngineError: the server will never accept this request.
        """
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT, sock_read=self.stall_timeout)
        try:
            async with self.session.post(url + "/generate", json=body, timeout=timeout, allow_redirects=False) as reply:
                if reply.status != 200:
                    raise refusal(url, reply.status, await reply.text(errors="replace"), reply.headers.get("Retry-After", ""))
                if reply.content_type == "text/event-stream":
                    async for message in _events(reply.content):
                        yield message
                else:
                    yield await reply.read()
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            refused = isinstance(getattr(error, "os_error", None), ConnectionRefusedError)      # other causes may be on this side
            raise Lost("no connection", str(error), gone=refused) from None
        except aiohttp.ServerTimeoutError:
            raise Lost("silence", f"nothing for {self.stall_timeout:g} s (--sglang-stall-timeout)") from None
        except (aiohttp.ClientError, OSError) as error:
            raise Lost("connection lost", f"{type(error).__name__} {error}") from None

    async def control(self, url: str, path: str, body: dict | None = None, timeout: float = CONTROL_TIMEOUT) -> dict:
        """GET, or POST `body`: the reply's JSON object, {} if it is none. Raises EngineError."""
        limits = aiohttp.ClientTimeout(total=timeout, sock_connect=CONNECT_TIMEOUT)
        try:
            async with self.session.request("GET" if body is None else "POST", url + path, json=body, timeout=limits,
                                            allow_redirects=False) as reply:
                text = await reply.text(errors="replace")
        except TimeoutError:
            raise EngineError(f"{url}{path} gave no answer in {timeout:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise EngineError(f"{url}{path}: {str(error) or type(error).__name__}; is the server up?") from None
        if reply.status != 200:
            raise EngineError(f"{url}{path} answered {reply.status}: {text[:300]}")
        try:
            value = json.loads(text)
        except ValueError:
            return {}
        return value if isinstance(value, dict) else {}


def refusal(url: str, status: int, text: str, retry_after: str = "") -> Exception:
    """What an error status means: come again (Lost), or never (EngineError)."""
    if status in (429, 503):
        return Lost("busy", f"{status} {text[:200]}", wait=min(float(retry_after), WAIT_CAP) if retry_after.isdigit() else 0.0)
    if status >= 500:
        return Lost(f"status {status}", text[:200])
    if status in (401, 403):
        return EngineError(f"{url} answered {status}: name the variable that holds its API key in --sglang-api-key-env")
    return EngineError(f"{url} does not accept the request ({status}): {text[:500]}")


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """The data of server-sent events, whose lines may be far longer than a stream reader's limit."""
    buffer = bytearray()
    async for chunk in content.iter_any():
        start = max(len(buffer) - 1, 0)
        buffer += chunk
        while (end := buffer.find(b"\n\n", start)) >= 0:
            event = bytes(buffer[:end])
            del buffer[:end + 2]
            start = 0
            if event.startswith(b"data:") and event[5:].strip() != b"[DONE]":
                yield event[5:]
