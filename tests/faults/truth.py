"""A pretend policy, so that a test knows what each answer has to be: everything follows from the tokens before it."""

import base64

import numpy as np

from megatron_grpo.rollout.engine import Generation, GenerationRequest
from megatron_grpo.rollout.responses import ServedModel
from megatron_grpo.routing.audit import RouteSpec

VOCAB, LAYERS, TOPK, EXPERTS = 101, 3, 2, 8
MODEL = ServedModel(VOCAB, RouteSpec(LAYERS, tuple(range(LAYERS)), TOPK, EXPERTS))


def continuation(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append((31 * tokens[-1] + 7 * len(tokens) + sum(tokens)) % VOCAB)
    return tokens[len(prompt):]


def logp(token: int) -> float:
    return -(1 + token % 7) / 8


def routes(tokens: list[int], start: int = 0) -> np.ndarray:
    """[rows, LAYERS, TOPK]: row i belongs to token start + i; the last token has none."""
    first = np.array(tokens[start:-1])[:, None] + np.arange(LAYERS)
    return np.stack([first % EXPERTS, (first + 3) % EXPERTS], -1).astype(np.int32)


def encoded(rows: np.ndarray) -> str:
    return base64.b64encode(np.ascontiguousarray(rows, "<i4").tobytes()).decode()


def check(generation: Generation, request: GenerationRequest, version: str = "v1") -> None:
    """Every number is what the policy says, however many servers and attempts it took."""
    ids = generation.output_ids
    assert ids == continuation(request.input_ids, len(ids))
    assert len(ids) <= request.params.max_new_tokens
    if generation.finish_reason == "length":
        assert len(ids) == request.params.max_new_tokens
    scale = 0.5 if request.return_sampling_mask else 1.0        # those over the support differ from those over the vocabulary
    np.testing.assert_array_equal(generation.logp, np.array([scale * logp(t) for t in ids], np.float32))
    if request.return_routes and ids:
        np.testing.assert_array_equal(generation.routes, routes(request.input_ids + ids, request.routes_start))
    assert generation.weight_versions == ([(version, 0, len(ids))] if ids else [])
