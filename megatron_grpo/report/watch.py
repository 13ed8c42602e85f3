"""The report while the runs write: a server on 127.0.0.1 that renders from disk and tells the page when something changed."""

import json
import os
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from .page import page_data, render

POLL_SECONDS = 5.0


def state_of(run_dirs: list[str]) -> str:
    """Changes whenever a file that the report reads was written."""
    seen = []
    for directory in run_dirs:
        samples = os.path.join(directory, "samples")
        names = sorted(os.listdir(samples)) if os.path.isdir(samples) else []
        for path in [os.path.join(directory, "metrics.jsonl"), *(os.path.join(samples, n) for n in names)]:
            if os.path.exists(path):
                status = os.stat(path)
                seen.append((path, status.st_mtime_ns, status.st_size))
    return f'"{hash(tuple(seen)):x}"'


def make_server(run_dirs: list[str], port: int, poll_seconds: float = POLL_SECONDS) -> ThreadingHTTPServer:
    """GET / is the page, GET /data its data with an ETag. Bound to loopback; a request that names another host is refused.

    Raises:
        FileNotFoundError: a run directory does not exist.
        OSError: the port is taken.
    """
    page_data(run_dirs)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            host = self.headers.get("Host", "").rsplit(":", 1)[0]
            if host not in ("127.0.0.1", "localhost"):      # a foreign page that resolves its own name to us must not read samples
                return self.answer(403, "text/plain", "this report is served to 127.0.0.1 and localhost only")
            tag = state_of(run_dirs)
            if self.path == "/data" and self.headers.get("If-None-Match") == tag:
                return self.answer(304, "application/json", "", tag)
            try:
                if self.path == "/data":
                    return self.answer(200, "application/json", json.dumps(page_data(run_dirs), allow_nan=False), tag)
                if self.path == "/":
                    return self.answer(200, "text/html", render(page_data(run_dirs), poll_seconds))
            except OSError as error:
                return self.answer(500, "text/plain", str(error))
            return self.answer(404, "text/plain", "the report is at /")

        def answer(self, status: int, kind: str, text: str, tag: str | None = None) -> None:
            body = text.encode("utf-8", errors="replace")
            self.send_response(status)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Cache-Control", "no-store")
            if tag:
                self.send_header("ETag", tag)
            if status != 304:
                self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if status != 304:
                self.wfile.write(body)

        def log_message(self, *_):
            """Silent: a poll every few seconds is not news."""

    return ThreadingHTTPServer(("127.0.0.1", port), Handler)


def serve(run_dirs: list[str], port: int) -> None:
    """Serve until interrupted."""
    with make_server(run_dirs, port) as server:
        print(f"http://127.0.0.1:{server.server_port}/   (Ctrl-C ends it)", flush=True)
        server.serve_forever()
