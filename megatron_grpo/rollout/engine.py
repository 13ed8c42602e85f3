"""What the sampler asks of an inference engine, and what it gets back. Tokens in, tokens out."""

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np


@dataclass(frozen=True)
class SamplingParams:
    """How the engine samples. `temperature` scales the logits before the log-prob that is returned."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None


@dataclass(frozen=True)
class GenerationRequest:
    """One continuation of `input_ids`.

    Attributes:
        request_id: unique; also the engine's rid, so that an abort finds it.
        input_ids: everything so far (prompt, earlier turns, tool output).
        session: requests of one conversation share it, for prefix-sticky dispatch.
        routes_start: with routes, the first row wanted (absolute position); earlier rows are already held.
    """

    request_id: str
    input_ids: list[int]
    params: SamplingParams
    session: str = ""
    return_routes: bool = False
    routes_start: int = 0
    return_sampling_mask: bool = False


@dataclass
class Generation:
    """What the engine sampled, validated.

    Attributes:
        output_ids: [n] token ids.
        logp: [n] float32 log-prob of each under the distribution that the request's temperature gives; with
            `return_sampling_mask`, under that distribution renormalised over the support that top-p and top-k left.
        sampling_mask: for each token the int32 ids of that support, or None.
        finish_reason: "stop" | "length" | "abort".
        routes: [rows, L, K] narrow integers, rows = len(input_ids) + n - 1 - routes_start, or None.
        weight_versions: spans (version, start, end) over the output tokens.
    """

    request_id: str
    output_ids: list[int]
    logp: np.ndarray
    finish_reason: str
    routes: np.ndarray | None = None
    sampling_mask: list[np.ndarray] | None = None
    weight_versions: list[tuple[str, int, int]] = field(default_factory=list)
    cached_tokens: int = 0
    server: str = ""


class EngineError(RuntimeError):
    """The engine cannot serve: message names the server, the request and the fix."""


class Engine(Protocol):
    """An inference engine, one server or a fleet. Every call has a deadline; none hangs."""

    async def generate(self, request: GenerationRequest) -> Generation: ...
    async def abort(self, request_ids: list[str] | None = None) -> None:
        """Abort these requests (None: all of this client's); their `generate` returns finish_reason "abort"."""
    async def close(self) -> None: ...
