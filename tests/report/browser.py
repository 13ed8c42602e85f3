"""Chromium without a window, driven over its DevTools socket: enough to open a page, run script in it and take its picture."""

import asyncio
import base64
import contextlib
import os
import re
import shutil
import signal

import aiohttp


class Browser:
    """`async with Browser(profile_directory) as page`. errors: what the console shows as errors; requests: every URL that was asked for."""

    def __init__(self, profile: str):
        self.profile, self.errors, self.requests = profile, [], []
        self._waiting: dict[int, asyncio.Future] = {}

    async def __aenter__(self):
        binary = shutil.which("chromium")
        if not binary:
            raise RuntimeError("the report is looked at in Chromium, which is not on the PATH: apt-get install chromium")
        self.process = await asyncio.create_subprocess_exec(
            binary,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--disable-extensions",
            "--hide-scrollbars",
            "--disable-background-networking",
            "--no-proxy-server",
            "--remote-debugging-port=0",
            f"--user-data-dir={self.profile}",
            "about:blank",
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        try:
            url = await asyncio.wait_for(self._address(), 60)
            self.drain = asyncio.create_task(self.process.stderr.read())
            self.http = aiohttp.ClientSession()
            self.socket = await self.http.ws_connect(url, max_msg_size=0)
            self.reader = asyncio.create_task(self._read())
            self.session = None
            target = (await self.send("Target.createTarget", url="about:blank"))["targetId"]
            self.session = (await self.send("Target.attachToTarget", targetId=target, flatten=True))["sessionId"]
            for domain in ("Page", "Runtime", "Network", "Log"):
                await self.send(f"{domain}.enable")
        except BaseException:
            await self._end()
            raise
        return self

    async def __aexit__(self, *_):
        self.reader.cancel()
        await self.http.close()
        await self._end()

    async def _end(self):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        await self.process.wait()

    async def _address(self) -> str:
        seen = b""
        while text := await self.process.stderr.readline():
            seen += text
            if found := re.search(rb"DevTools listening on (ws://\S+)", text):
                return found[1].decode()
        raise RuntimeError(f"chromium ended before it listened: {seen.decode(errors='replace')[-2000:]}")

    async def _read(self):
        async for message in self.socket:
            event = message.json()
            if "id" in event:
                self._waiting.pop(event["id"]).set_result(event)
            elif event["method"] == "Runtime.exceptionThrown":
                details = event["params"]["exceptionDetails"]
                self.errors.append(details.get("exception", {}).get("description", details["text"]))
            elif event["method"] == "Log.entryAdded" and event["params"]["entry"]["level"] == "error":
                self.errors.append(event["params"]["entry"]["text"])
            elif event["method"] == "Network.requestWillBeSent":
                self.requests.append(event["params"]["request"]["url"])

    async def send(self, method: str, **params) -> dict:
        number = self._number = getattr(self, "_number", 0) + 1
        self._waiting[number] = asyncio.get_running_loop().create_future()
        await self.socket.send_json(
            {"id": number, "method": method, "params": params} | ({"sessionId": self.session} if self.session else {})
        )
        answer = await asyncio.wait_for(self._waiting[number], 60)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    async def open(self, url: str, width: int, height: int) -> None:
        await self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        await self.send("Page.navigate", url=url)
        await self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    async def js(self, expression: str):
        answer = await self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    async def until(self, expression: str, seconds: float = 30) -> None:
        async with asyncio.timeout(seconds):
            while not await self.js(expression):
                await asyncio.sleep(0.05)

    async def hover(self, selector: str, x: float = 0.5, y: float = 0.5) -> None:
        """Move the pointer over a share of an element, after bringing it into view."""
        box = await self.js(
            f"(e => {{ e.scrollIntoView({{block: 'center', behavior: 'instant'}}); const b = e.getBoundingClientRect(); "
            f"return [b.x + b.width * {x}, b.y + b.height * {y}]; }})(document.querySelector({selector!r}))"
        )
        await self.send("Input.dispatchMouseEvent", type="mouseMoved", x=box[0], y=box[1])

    async def picture(self, width: int, height: int) -> bytes:
        """The top left of the page as PNG."""
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        return base64.b64decode((await self.send("Page.captureScreenshot", captureBeyondViewport=True, clip=clip))["data"])
