"""Control requests to one SGLang server: pause, update, flush, version, checksums. Synchronous, each with a deadline."""

import contextlib
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ..rollout.engine import EngineError
from ..rollout.server import DIRECT

DRAIN_POLL = 5.0        # seconds that one request of a drain waits inside the server
PATIENCE = 30.0         # seconds for an answer that needs no work


class NotFound(EngineError):
    """The server has no such route."""


class EnginesFailed(EngineError):
    """Several engines failed: `failures` says which, and how."""

    def __init__(self, failures: dict["EngineControl", EngineError]):
        super().__init__("; ".join(map(str, failures.values())))
        self.failures = failures


class EngineControl:
    """One server.

    Args:
        url: of the server itself; a router passes none of these requests on.
        timeout: deadline of a request [s].
        api_key: the server's --admin-api-key or --api-key.
    """

    def __init__(self, url: str, timeout: float, api_key: str | None = None):
        self.url, self.timeout, self.api_key = url.rstrip("/"), timeout, api_key
        self._info: dict[str, Any] | None = None

    def request(self, path: str, body: dict | None = None, timeout: float | None = None) -> Any:
        """POST `body` (GET without one); the reply's JSON, or None when it is not JSON.

        Raises:
            NotFound: the server has no such route.
            EngineError: no connection, no answer in time, or an answer that says no; names the server and the request.
        """
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self.api_key}"} if self.api_key else {})
        request = urllib.request.Request(self.url + path, None if body is None else json.dumps(body).encode(), headers)
        deadline = self.timeout if timeout is None else timeout
        try:
            with DIRECT.open(request, timeout=deadline) as reply:
                text = reply.read()
        except urllib.error.HTTPError as error:
            says = error.read()[:500].decode(errors="replace")
            if error.code == 404:
                raise NotFound(f"{self.url}{path} does not exist: give the SGLang servers behind a router in "
                               "--sglang-worker-urls, and a release that has it") from None
            raise EngineError(f"{self.url}{path} answered {error.code}: {says}") from None
        except TimeoutError:
            raise EngineError(f"{self.url}{path} gave no answer in {deadline:.0f} s (--weight-sync-timeout)") from None
        except (OSError, urllib.error.URLError) as error:
            raise EngineError(f"{self.url}{path}: {getattr(error, 'reason', error)}; is the server up?") from None
        try:
            return json.loads(text)
        except ValueError:
            return None

    # ---- what it is ---------------------------------------------------------------------------------------------------

    @property
    def info(self) -> dict[str, Any]:
        """/server_info as last asked for: the server's arguments, `version`, sizes."""
        return self._info or self._ask_info(self.timeout)

    def _ask_info(self, timeout: float) -> dict[str, Any]:
        try:
            info = self.request("/server_info", timeout=timeout)
        except NotFound:
            info = self.request("/get_server_info", timeout=timeout)      # older releases
        self._info = info
        return info

    def ping(self) -> None:
        """Its scheduler answers; asks for no generation, which would wait in a paused server.

        Raises:
            EngineError: no answer within 30 s.
        """
        self._ask_info(min(PATIENCE, self.timeout))

    def weight_version(self) -> str:
        try:
            return str(self.request("/model_info")["weight_version"])
        except NotFound:
            return str(self.request("/get_model_info")["weight_version"])

    # ---- requests stopped and resumed -----------------------------------------------------------------------------------

    def pause(self, mode: str) -> None:
        """Stop generation as --weight-sync-pause says; new requests wait in the server until `resume`."""
        if mode == "drain":
            self._drain()
        self.request("/pause_generation", {"mode": "retract" if mode == "drain" else mode})

    def resume(self) -> None:
        self.request("/continue_generation", {})

    def _drain(self) -> None:
        """Wait until nothing runs: the cache can only be flushed then."""
        end = time.monotonic() + self.timeout
        while True:
            try:
                return self.flush(wait=DRAIN_POLL)
            except EngineError as error:
                self.ping()
                if time.monotonic() > end:
                    raise EngineError(f"{self.url} did not drain in {self.timeout:.0f} s (--weight-sync-timeout): {error}") from None
                time.sleep(0.2)

    def flush(self, wait: float = 0.0) -> None:
        """Empty the prefix cache; fails while requests run."""
        self.request(f"/flush_cache?timeout={wait}", {})

    # ---- weights ------------------------------------------------------------------------------------------------------

    def update_from_disk(self, path: str, version: str, flush: bool) -> None:
        # load_format: an engine that was started with random weights has to read these ones all the same
        self.request("/update_weights_from_disk", {"model_path": path, "load_format": "auto", "weight_version": version,
                                                   "flush_cache": flush})

    def set_version(self, version: str) -> None:
        self.request("/update_weight_version", {"new_version": version, "abort_all_requests": False})

    def begin_update(self) -> None:
        """From SGLang 0.5.21 on, updates must lie between begin and end; earlier releases lack both routes."""
        with contextlib.suppress(NotFound):
            try:
                self.request("/begin_weight_update", {})
            except NotFound:
                raise
            except EngineError:         # a session that a failed update left open
                self.end_update()
                self.request("/begin_weight_update", {})

    def end_update(self) -> None:
        with contextlib.suppress(NotFound):
            self.request("/end_weight_update", {})

    def finish_update(self, version: str, flush: bool) -> None:
        """Close an update by broadcast: what it left unfinished, the old prefix cache, the version."""
        self.end_update()
        if flush:
            self.flush()
        self.set_version(version)

    def join_group(self, address: str, port: int, rank: int, world_size: int, name: str, backend: str) -> None:
        self.request("/init_weights_update_group", {"master_address": address, "master_port": port, "rank_offset": rank,
                                                    "world_size": world_size, "group_name": name, "backend": backend})

    def leave_group(self, name: str) -> None:
        self.request("/destroy_weights_update_group", {"group_name": name})

    def receive(self, name: str, tensors: Sequence[tuple[str, Any]]) -> None:
        """Receive one broadcast a tensor, in this order, and load them."""
        self.request("/update_weights_from_distributed", {
            "names": [key for key, _ in tensors], "dtypes": [str(t.dtype).removeprefix("torch.") for _, t in tensors],
            "shapes": [list(t.shape) for _, t in tensors], "group_name": name, "flush_cache": False})

    def checksums(self) -> list[dict[str, Any]]:
        """Of every rank: {"checksums": {engine's parameter name: hash}, "parallelism_info": ...}."""
        return self.request("/weights_checker", {"action": "checksum"})["ranks"]

    # ---- log-probs ----------------------------------------------------------------------------------------------------

    def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """log p(token | the ones before it) at temperature 1 of each sequence's tokens but the first."""
        replies = self.request("/generate", {"input_ids": [list(s) for s in sequences], "return_logprob": True, "logprob_start_len": 0,
                                             "sampling_params": {"max_new_tokens": 1, "temperature": 1.0}})
        return [[entry[0] for entry in reply["meta_info"]["input_token_logprobs"][1:]] for reply in replies]


def on_each(engines: Sequence[EngineControl], action: Callable[[EngineControl], Any], must: bool = False) -> dict[EngineControl, Any]:
    """`action` on all engines at the same time: {engine: result, or the EngineError it raised}; with `must`, failures are raised."""
    def guarded(engine: EngineControl):
        try:
            return action(engine)
        except EngineError as error:
            return error
        except Exception as error:      # nothing may stop this rank from telling the others
            return EngineError(f"{engine.url}: {type(error).__name__}: {error}")

    if not engines:
        return {}
    with ThreadPoolExecutor(len(engines)) as pool:
        outcomes = dict(zip(engines, pool.map(guarded, engines), strict=True))
    if must:
        raise_failures(outcomes)
    return outcomes


def failures_of(outcomes: dict[EngineControl, Any]) -> dict[EngineControl, EngineError]:
    """Of what `on_each` returns, the engines that failed."""
    return {engine: outcome for engine, outcome in outcomes.items() if isinstance(outcome, EngineError)}


def raise_failures(outcomes: dict[EngineControl, Any]) -> None:
    """
    Raises:
        EnginesFailed: some outcome is a failure.
    """
    if failures := failures_of(outcomes):
        raise EnginesFailed(failures)
