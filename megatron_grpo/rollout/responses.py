"""SGLang's /generate: the request's fields, and how an answer becomes a Generation, or a BadResponse with its reason.

An engine, a gateway or a network that is wrong rarely says so. Everything that the trainer will use is checked here, so that the
step trains on what the policy sampled or not at all.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..routing.audit import RouteAuditError, RouteSpec, accept, forget
from .engine import Generation, GenerationRequest
from .wire import refusal

ROUTES = b'"routed_experts":"'
PARTS = 16              # most parts of a streamed response: some servers send everything so far with each
LOGP_ROUNDING = 1e-4    # a log-prob may be above 0 by this much (float32 log_softmax of a sure token); it then becomes 0


class BadResponse(ValueError):
    """An answer that must not be trained on.

    Attributes:
        reason: one of few words, for counting.
    """

    def __init__(self, reason: str, detail: str):
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


@dataclass(frozen=True)
class ServedModel:
    """The trainer's model, which the servers have to serve.

    Attributes:
        vocab_size: rows of the embedding in the Hugging Face checkpoint; Megatron's padding is not part of it.
        routes: its routers; None when no request asks for routes.
        model_type: Hugging Face's name of the architecture, e.g. "qwen3_moe"; None is not compared.
    """

    vocab_size: int
    routes: RouteSpec | None = None
    model_type: str | None = None


@dataclass
class Part:
    """Output tokens of a request, all so far or the last ones; an attempt that streams is the sum of its parts."""

    output_ids: list[int]
    logp: np.ndarray
    sampling_mask: list[np.ndarray] | None
    finish: dict | None         # None while it runs
    meta: dict

    @property
    def nbytes(self) -> int:
        """Of the routes as they came, which are what takes time to decode."""
        routes = self.meta.get("routed_experts")
        return len(routes) if isinstance(routes, (str, bytes)) else 0


def body(request: GenerationRequest, rid: str, stream_interval: int) -> dict[str, Any]:
    """The JSON of POST /generate; with `stream_interval` tokens a part, or in one message if that is 0."""
    p = request.params
    sampling = {"max_new_tokens": p.max_new_tokens, "temperature": p.temperature, "top_p": p.top_p, "top_k": p.top_k,
                "stop_token_ids": list(p.stop_token_ids), "ignore_eos": p.ignore_eos, "skip_special_tokens": False}
    if p.seed is not None:
        sampling["sampling_seed"] = p.seed
    fields = {"rid": rid, "input_ids": request.input_ids, "sampling_params": sampling, "return_logprob": True}
    if stream_interval:
        fields["stream"] = True
        sampling["stream_interval"] = max(stream_interval, -(-p.max_new_tokens // PARTS))
    if request.return_routes:
        fields.update(return_routed_experts=True, routed_experts_start_len=request.routes_start)
    if request.return_sampling_mask:
        fields["return_sampling_mask"] = True
    return fields


def parse(reply: object, request: GenerationRequest, rid: str, model: ServedModel, held: int = 0) -> Part:
    """Check the tokens and log-probs of one message.

    Args:
        reply: the decoded JSON.
        rid: the request's id at the server.
        held: output tokens of this attempt that earlier messages brought.

    Returns:
        The part: all tokens so far, or those after `held`, as the server streams; `completion_tokens` tells which.

    Raises:
        BadResponse.
    """
    if not isinstance(reply, dict) or not isinstance(reply.get("meta_info"), dict) or not isinstance(reply.get("output_ids"), list):
        raise BadResponse("malformed", "no object with output_ids and meta_info")
    ids, meta = reply["output_ids"], reply["meta_info"]
    if meta.get("id") != rid:
        raise BadResponse("another request's", f"asked as {rid}, answered as {meta.get('id')}")
    vocabulary = model.vocab_size
    if not all(type(i) is int and 0 <= i < vocabulary for i in ids):
        wrong = next(i for i in ids if type(i) is not int or not 0 <= i < vocabulary)
        raise BadResponse("token id", f"{wrong!r} is not in the vocabulary of {vocabulary}; is another model served?")
    finish = _finish(meta.get("finish_reason"))
    prompt = meta.get("prompt_tokens", len(request.input_ids) if finish and finish["type"] == "abort" else None)
    if prompt != len(request.input_ids):
        raise BadResponse("length", f"prompt_tokens {prompt}, sent {len(request.input_ids)}")
    total = meta.get("completion_tokens", 0 if finish and finish["type"] == "abort" else None)
    if total not in (len(ids), held + len(ids)):
        raise BadResponse("length", f"completion_tokens {total}, but {len(ids)} output_ids (and {held} before)")
    if total > request.params.max_new_tokens:
        raise BadResponse("length", f"{total} tokens, asked for at most {request.params.max_new_tokens}")
    if finish and finish["type"] != "abort":
        _check_end(finish, ids, total, request)
    logp, masks = _logp(meta.get("output_token_logprobs", []), ids), _sampling_mask(meta, ids, request, model)
    if masks is not None:       # renormalised over the support: what the token was really drawn with
        entries = meta.get("output_token_sampling_logprobs", [])
        fits = isinstance(entries, list) and len(entries) == len(ids)
        logp = _logp([[x, t] for x, t in zip(entries, ids, strict=True)] if fits else None, ids)
    return Part(ids, logp, masks, finish, meta)


def finish(part: Part, request: GenerationRequest, model: ServedModel, versions: Sequence[str], server: str) -> Generation:
    """The Generation of a whole attempt.

    Args:
        part: all its tokens, with the meta_info of the last message; one that is not finished counts as aborted.
        versions: weight versions that its tokens may have, () for any.

    Raises:
        BadResponse.
    """
    count = len(part.output_ids)
    routes = None
    if request.return_routes and model.routes is not None and count:
        payload = part.meta.get("routed_experts")
        if not isinstance(payload, (str, bytes)):
            raise BadResponse("no routes", "meta_info has no routed_experts: start the server with --enable-return-routed-experts, and "
                              "give the servers' own urls if a gateway drops the field")
        tokens = len(request.input_ids) + count
        try:
            routes = accept(request.request_id, payload, model.routes, tokens=tokens, start=request.routes_start,
                            dtype_key=part.meta.get("routed_experts_dtype"))[:tokens - 1 - request.routes_start]
        except RouteAuditError as error:
            raise BadResponse("routes", str(error)) from None
    spans = _spans(part.meta, count)
    if versions and (stale := {v for v, _, _ in spans} - set(versions)):
        raise BadResponse("weight version", f"sampled under {', '.join(sorted(stale))}, expected {' or '.join(versions)}")
    if routes is not None and len(spans) > 1:
        # The weights changed in mid-request. With pause mode `retract` the engine has read everything again, so the rows before the
        # change are the new weights', while the log-probs there are the old ones'; nothing tells the mode.
        routes = forget(routes, max(len(request.input_ids) + spans[-1][1] - 1 - request.routes_start, 0))
    reason = part.finish["type"] if part.finish else "abort"
    return Generation(request.request_id, part.output_ids, part.logp, reason, routes, part.sampling_mask, spans,
                      int(part.meta.get("cached_tokens") or 0), server)


def _finish(reason: object) -> dict | None:
    if reason is None:
        return None
    if not isinstance(reason, dict) or reason.get("type") not in ("stop", "length", "abort"):
        raise BadResponse("finish reason", repr(reason)[:200])
    return reason


def _check_end(finish: dict, ids: list[int], total: int, request: GenerationRequest) -> None:
    if not total:
        raise BadResponse("length", "no token, and not aborted")
    if finish["type"] == "length" and finish.get("length", total) != total:
        raise BadResponse("length", f"{total} tokens, but finished at length {finish['length']}")
    matched = finish.get("matched")
    if finish["type"] == "stop" and isinstance(matched, int) and ids and ids[-1] != matched:
        raise BadResponse("finish reason", f"stopped at token {matched}, but the last one is {ids[-1]}")


def _logp(entries: object, ids: list[int]) -> np.ndarray:
    if not isinstance(entries, list) or len(entries) != len(ids):
        raise BadResponse("log-probs", f"{len(entries) if isinstance(entries, list) else 'no'} log-probs for {len(ids)} tokens")
    for entry, token in zip(entries, ids, strict=True):
        if not isinstance(entry, list) or len(entry) < 2 or entry[1] != token:
            raise BadResponse("log-probs", f"{entry!r:.100} is not that of token {token}")
        if type(entry[0]) not in (float, int) or not math.isfinite(entry[0]) or entry[0] > LOGP_ROUNDING:
            raise BadResponse("log-probs", f"{entry[0]} of token {token}: not a finite log-prob")
    return np.minimum(np.array([entry[0] for entry in entries], np.float32), 0)


def _sampling_mask(meta: dict, ids: list[int], request: GenerationRequest, model: ServedModel) -> list[np.ndarray] | None:
    if not request.return_sampling_mask:
        return None
    support = meta.get("output_token_sampling_mask", [] if not ids else None)
    if not isinstance(support, list) or len(support) != len(ids):
        raise BadResponse("sampling mask", f"{len(support) if isinstance(support, list) else 'no'} supports for {len(ids)} tokens; "
                          "--use-rollout-sampling-mask needs SGLang 0.5.16 and no gateway that drops the field")
    masks = []
    for tokens, token in zip(support, ids, strict=True):
        if not isinstance(tokens, list) or not all(type(t) is int and 0 <= t < model.vocab_size for t in tokens) or token not in tokens:
            raise BadResponse("sampling mask", f"the support of token {token} does not hold it, or tokens outside the vocabulary")
        masks.append(np.array(tokens, np.int32))
    return masks


def _spans(meta: dict, count: int) -> list[tuple[str, int, int]]:
    """SGLang from 0.5.19 on sends spans; before, the version at the end of the request, which is taken for all of it."""
    spans = meta.get("weight_versions")
    if spans is None:
        return [(str(meta["weight_version"]), 0, count)] if count and meta.get("weight_version") is not None else []
    try:
        spans = [(str(s["version"]), int(s["start"]), int(s["end"])) for s in spans]
    except (TypeError, KeyError, ValueError):
        raise BadResponse("weight version", f"weight_versions {spans!r:.200}") from None
    spans = [s for s in spans if s[1] < s[2]]
    if [s[1] for s in spans] + [count] != [0] + [s[2] for s in spans]:
        raise BadResponse("weight version", f"spans {spans} do not cover {count} tokens")
    return spans


# ---- several messages ---------------------------------------------------------------------------------------------------------


def read(raw: bytes, request: GenerationRequest, rid: str, model: ServedModel, before: Part | None, server: str) -> Part:
    """Parse one message and add it to those before it; a server streams either everything so far or what is new.

    Raises:
        BadResponse. Lost, EngineError: the message is an error.
    """
    try:
        reply = _loads(raw)
    except (ValueError, RecursionError) as error:
        raise BadResponse("malformed", f"not JSON: {error}") from None
    if isinstance(reply, dict) and "error" in reply:
        fault = reply["error"] if isinstance(reply["error"], dict) else {"message": reply["error"]}
        raise refusal(server, _status(fault.get("code")), str(fault.get("message")))
    held = len(before.output_ids) if before else 0
    part = parse(reply, request, rid, model, held)
    if part.finish and part.finish["type"] == "abort" and part.finish.get("status_code"):
        raise refusal(server, _status(part.finish["status_code"]), str(part.finish.get("message")))
    if before is None or part.meta.get("completion_tokens") == len(part.output_ids):
        return part
    return replace(part, output_ids=[*before.output_ids, *part.output_ids], logp=np.concatenate([before.logp, part.logp]),
                   sampling_mask=chained(before.sampling_mask, part.sampling_mask))


def _loads(raw: bytes) -> object:
    """json.loads, but the routes, which are most of a long answer, stay the bytes they are.

    A quotation mark inside a JSON string is escaped, so the marker cannot stand inside one.
    """
    start = raw.rfind(ROUTES)
    if start < 0:
        return json.loads(raw)
    start += len(ROUTES)
    end = raw.find(b'"', start)
    reply = json.loads(raw[:start] + raw[end:])
    if isinstance(reply, dict) and isinstance(reply.get("meta_info"), dict) and "routed_experts" in reply["meta_info"]:
        reply["meta_info"]["routed_experts"] = raw[start:end]
    return reply


def chained(first: list | None, second: list | None) -> list | None:
    return None if first is None or second is None else [*first, *second]


def _status(code: object) -> int:
    return code if isinstance(code, int) and 400 <= code < 600 else 500
