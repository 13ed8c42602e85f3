"""A local SGLang server that lives and dies with this process.

    with LocalServer("path/to/model", dtype="float32") as server:
        requests.post(server.url + "/generate", ...)

The server runs in its own process group. `stop` kills the whole group; so do the end of the interpreter and, should this
process die without a word (SIGKILL, out of memory), a watch inside the server.
"""

import argparse
import atexit
import contextlib
import logging
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from .config import EngineConfig
from .engine import EngineError

logger = logging.getLogger(__name__)

CPU_ARGS = ("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--disable-cuda-graph",
            "--disable-overlap-schedule", "--max-total-tokens", "32768",
            "--sleep-on-idle")      # an idle scheduler would spin on a core that the trainer needs
COMMON_ARGS = ("--host", "127.0.0.1", "--skip-server-warmup", "--incremental-streaming-output")
LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE",
                      "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
OWNER = "MEGATRON_GRPO_SERVER_OWNER"     # environment variable: the pid that the server dies with, by default its parent's
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))      # a site's http_proxy is not for its own nodes
PORT_FIX = "give --sglang-port another port, or 0 for a free one"
HINTS = {       # text in the log -> the fix
    "No module named 'sglang'": "pip install sglang",
    "address already in use": PORT_FIX,
    "CUDA out of memory": "lower --mem-fraction-static in --sglang-server-args",
    "unrecognized arguments": "correct --sglang-server-args",
    "does not appear to have a file named": "give a Hugging Face model directory with its config and tokenizer",
}


class LocalServer:
    """One SGLang server on loopback.

    Args:
        model_path: Hugging Face model directory.
        port: 0 takes a free one, at the first start.
        dtype: of weights and activations.
        routes: start with --enable-return-routed-experts.
        device: "cpu" or "cuda".
        extra_args: further server arguments; they win over the defaults.
        start_timeout: seconds until the server must be healthy.
        log: file for the server's output; None keeps it in a temporary directory.
    """

    def __init__(self, model_path: str | os.PathLike, port: int = 0, dtype: str = "float32", routes: bool = True, device: str = "cpu",
                 extra_args: Sequence[str] = (), start_timeout: float = 300, log: str | os.PathLike | None = None):
        self.model_path, self.port, self.dtype, self.routes, self.device = str(model_path), port, dtype, routes, device
        self.extra_args, self.start_timeout, self.log = tuple(extra_args), start_timeout, log and Path(log)
        self.process: subprocess.Popen | None = None
        self._owner = os.getpid()
        self._directory = ""

    @classmethod
    def from_config(cls, config: EngineConfig, model_path: str | os.PathLike, *, routes: bool,
                    log_directory: str | os.PathLike | None = None, device: str | None = None,
                    extra: Sequence[str] = ()) -> "LocalServer":
        """The server of --sglang-launch local, on `device`, by default the GPUs where there are any; its log is `sglang.log`.

        `extra` are the caller's own arguments; --sglang-server-args wins over them.
        """
        import torch
        return cls(model_path, port=config.sglang_port, dtype=config.sglang_dtype, routes=routes,
                   device=device or ("cuda" if torch.cuda.is_available() else "cpu"),
                   extra_args=(*extra, *shlex.split(config.sglang_server_args)), start_timeout=config.sglang_start_timeout,
                   log=log_directory and Path(log_directory) / "sglang.log")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def command(self) -> list[str]:
        args = [*COMMON_ARGS, *(CPU_ARGS if self.device == "cpu" else ()), "--model-path", self.model_path, "--dtype", self.dtype]
        if self.routes:
            args.append("--enable-return-routed-experts")
        return [sys.executable, "-m", __name__, *args, "--port", str(self.port), *self.extra_args]

    def start(self) -> "LocalServer":
        """Start and wait until the server answers; at most `start_timeout` seconds.

        Raises:
            EngineError: it died or did not answer in time; with the tail of its log and the fix.
        """
        self.launch()
        return self.wait()

    def launch(self) -> "LocalServer":
        """Start without waiting, so that several servers start at the same time."""
        if not (Path(self.model_path) / "config.json").is_file():
            raise EngineError(f"{self.model_path} holds no config.json: give a Hugging Face model directory")
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)     # as the server does: a port in TIME_WAIT is free
            try:
                probe.bind(("127.0.0.1", self.port))
            except OSError as error:
                raise EngineError(f"port {self.port} of this machine is taken ({error.strerror}): {PORT_FIX}") from None
            self.port = probe.getsockname()[1]
        self._directory = tempfile.mkdtemp(prefix="sgl-")
        log = self.log or Path(self._directory) / "server.log"
        environment = {k: v for k, v in os.environ.items() if k not in LAUNCHER_VARIABLES and not k.startswith("TORCHELASTIC_")}
        environment.update(TMPDIR=self._directory, **{OWNER: str(self._owner)}, OMP_NUM_THREADS=os.environ.get("OMP_NUM_THREADS", "1"))
        with open(log, "ab") as output:
            self.process = subprocess.Popen(self.command(), stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                                            env=environment, start_new_session=True)
        self._deadline = time.monotonic() + self.start_timeout
        atexit.register(self.stop)
        return self

    def wait(self) -> "LocalServer":
        """Wait until a launched server answers; see `start`."""
        process = self.process
        if process is None:
            raise EngineError("the server was not launched")
        while True:
            healthy = self._healthy()
            if process.poll() is not None:
                self._fail(f"the SGLang server on {self.model_path} ended with code {process.returncode}")
            if healthy:
                break
            if time.monotonic() > self._deadline:
                self._fail(f"the SGLang server on {self.model_path} was not healthy after {self.start_timeout:.0f} s; "
                           "raise --sglang-start-timeout if it is only slow")
            time.sleep(0.2)
        logger.info("SGLang serves %s at %s (pid %d)", self.model_path, self.url, process.pid)
        return self

    def stop(self) -> None:
        """Kill the server's process group and remove its files. Safe to call twice, and from a forked child (no effect)."""
        if self.process is None or os.getpid() != self._owner:
            return
        atexit.unregister(self.stop)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.process = None
        shutil.rmtree(self._directory, ignore_errors=True)

    def log_tail(self, lines: int = 30) -> str:
        path = self.log or Path(self._directory) / "server.log"
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])

    def _healthy(self) -> bool:
        try:
            with DIRECT.open(self.url + "/health", timeout=5) as reply:
                return reply.status == 200
        except (urllib.error.URLError, OSError):
            return False

    def _fail(self, what: str):
        tail = self.log_tail()
        fix = next((fix for text, fix in HINTS.items() if text in tail), "read the log's last lines below")
        self.stop()
        raise EngineError(f"{what}. Fix: {fix}\n{tail}")

    def __enter__(self) -> "LocalServer":
        return self.start()

    def __exit__(self, *exception) -> None:
        self.stop()


def die_with_owner() -> None:
    """In the server: kill this process group when the owner is gone. PR_SET_PDEATHSIG would watch the owner's thread, not the process."""
    owner = int(os.environ.pop(OWNER, os.getppid()))

    def watch():
        while os.getppid() == owner:
            time.sleep(0.5)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def main() -> None:
    """The server process: `python -m megatron_grpo.rollout.server <arguments of sglang.launch_server>`."""
    die_with_owner()
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--device")
    parser.add_argument("--model-path")
    known, _ = parser.parse_known_args()
    if known.device == "cpu":
        from . import sglang_cpu
        sglang_cpu.install(known.model_path)
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    load_plugins()
    run_server(prepare_server_args(sys.argv[1:]))


if __name__ == "__main__":
    main()
