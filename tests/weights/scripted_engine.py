"""An engine that speaks SGLang's update protocol, holds no model, and fails on request."""

import json
import threading
import time
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch
import torch.distributed as dist


class ScriptedEngine:
    """Serves on loopback until `kill`.

    Attributes:
        calls: paths asked for, in order, without /server_info.
        weights: what the last update by broadcast brought.
        version: its weight version.
        faults: path -> how many of the next requests to it are refused.
        slow: path -> seconds that the next request to it waits before it is refused.
        stale: it takes updates and keeps its version.
    """

    def __init__(self, checksums=None, port=0, **info):
        self.calls, self.weights, self.version, self.faults, self.stale = [], {}, "none", {}, False
        self.slow = {}
        self.info = dict(version="0.5.23", tp_size=1, pp_size=1, dp_size=1, device="cpu", quantization=None) | info
        self.checksums, self.group, self.session = checksums, None, False
        engine = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                code, reply = engine.answer(self.path.split("?")[0], json.loads(body) if body else {})
                text = json.dumps(reply).encode()
                self.send_response(code)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            do_POST = do_GET

            def log_message(self, *args): ...

        self.server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def kill(self):
        self.server.shutdown()
        self.server.server_close()

    def answer(self, path, body):
        if path == "/server_info":
            return 200, self.info
        self.calls.append(path)
        if path in self.slow:
            time.sleep(self.slow.pop(path))
            return 400, {"success": False, "message": "too late"}
        if self.faults.get(path):
            self.faults[path] -= 1
            return 400, {"success": False, "message": "scripted"}
        action = getattr(self, path.strip("/"), None)
        reply = action(body) if action else {}
        return reply if isinstance(reply, tuple) else (200, reply or {})

    def model_info(self, body):
        return {"weight_version": self.version}

    def update_weights_from_disk(self, body):
        self.path = body["model_path"]
        return self.update_weight_version({"new_version": body["weight_version"]})

    def update_weight_version(self, body):
        self.version = self.version if self.stale else body["new_version"]

    def weights_checker(self, body):
        return {"ranks": self.checksums(self) if callable(self.checksums) else self.checksums}

    def begin_weight_update(self, body):
        was_open, self.session = self.session, True
        return (400, {"message": "a weight-update session is already open"}) if was_open else {}

    def end_weight_update(self, body):
        self.session = False

    def init_weights_update_group(self, body):
        store = dist.TCPStore(body["master_address"], body["master_port"], body["world_size"], False)
        name = body["group_name"]       # the chain of prefixes by which torch's own group creation finds its members
        store = dist.PrefixStore("cpu/", dist.PrefixStore(f"{name}/", dist.PrefixStore(name, store)))
        self.group = dist.ProcessGroupGloo(store, body["rank_offset"], body["world_size"], timedelta(seconds=20))

    def update_weights_from_distributed(self, body):
        if not self.session:
            return 400, {"message": "must run between begin_weight_update() and end_weight_update()"}
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        for name, dtype, shape in zip(body["names"], body["dtypes"], body["shapes"], strict=True):
            tensor = torch.empty(shape, dtype=getattr(torch, dtype))
            self.group.broadcast([tensor], options).wait()
            self.weights[name] = tensor
        return {}
