"""What can go wrong with an answer: name -> handler(server, request, body) of FaultServer.

It spoils the bytes, the HTTP around them, the stream, or the numbers.
"""

import asyncio
import json
from collections.abc import Callable

from aiohttp import web

from .truth import EXPERTS, VOCAB, continuation, encoded, routes

HANG = 3600.0
VERSION = "v1"
FAULTS: dict[str, Callable] = {}
RETRIED: set[str] = set()       # an attempt with this fault must not be used, and another one may succeed


def fault(function: Callable) -> Callable:
    FAULTS[function.__name__] = function
    RETRIED.add(function.__name__)
    return function


async def ok(server, request, body):
    return await server.answer(request, body)


async def everything_so_far(server, request, body):
    """A server without --incremental-streaming-output."""
    return await server.answer(request, body, cumulative=True)


async def whole(server, request, body):
    """A gateway that does not stream."""
    return web.json_response(server.message(body))


async def plain_text(server, request, body):
    return web.Response(text=json.dumps(server.message(body)), content_type="text/plain")


async def slow_but_steady(server, request, body):
    stream = await server.begin(request)
    text = b"data: " + json.dumps(server.message(body)).encode() + b"\n\n"
    for i in range(0, len(text), 9):
        await stream.write(text[i:i + 9])
        await asyncio.sleep(0)
    return stream


async def tiny_positive_logprob(server, request, body):
    def spoil(message):
        message["meta_info"]["output_token_logprobs"][-1][0] += 1e-9
        return message
    return await server.answer(request, body, spoil)


async def split_events(server, request, body):
    stream = await server.begin(request)
    text = b": comment\n\ndata: " + json.dumps(server.message(body)).encode() + b"\n\ndata: [DONE]\n\n"
    cut = len(text) - 16
    for piece in (text[:5], text[5:cut], text[cut:]):
        await stream.write(piece)
        await asyncio.sleep(0.002)
    return stream


for _harmless in (ok, everything_so_far, whole, plain_text, slow_but_steady, tiny_positive_logprob, split_events):
    FAULTS[_harmless.__name__] = _harmless
HARMLESS = tuple(FAULTS)


# ---- transport ------------------------------------------------------------------------------------------------------------------


def _after_parts(act: Callable, parts: int = 2) -> Callable:
    async def handler(server, request, body):
        stream = await server.begin(request)
        for i in range(parts):
            if (count := 1 + i * server.part) < body["sampling_params"]["max_new_tokens"]:
                await server.event(stream, server.message(body, count, max(count - server.part, 0)))
        await asyncio.sleep(0.01)
        await act(request, stream)
        return stream
    return handler


async def _reset(request, stream):
    request.transport.abort()
    await asyncio.sleep(0.05)


async def _end(request, stream):
    await stream.write(b"data: [DONE]\n\n")


async def _hang(request, stream):
    await asyncio.sleep(HANG)


async def _half_event(request, stream):
    await stream.write(b'data: {"output_ids": [1')
    await asyncio.sleep(0.01)
    request.transport.abort()
    await asyncio.sleep(0.05)


async def _garbage_event(request, stream):
    await stream.write(b"data: {\"output_ids\": [}\n\n")


async def _error_event(request, stream):
    await stream.write(b'data: {"error": {"message": "scheduler died", "code": 500}}\n\n')


async def _busy_event(request, stream):
    await stream.write(b'data: {"error": {"message": "queue full", "code": 503}}\n\n')


for _name, _act in dict(reset_in_mid_stream=_reset, stream_ends_early=_end, hang_in_mid_stream=_hang, half_an_event=_half_event,
                        garbage_event=_garbage_event, error_event=_error_event, busy_event=_busy_event).items():
    FAULTS[_name] = _after_parts(_act)
    RETRIED.add(_name)


@fault
async def reset_at_once(server, request, body):
    request.transport.abort()
    await asyncio.sleep(0.05)


@fault
async def closed_at_once(server, request, body):
    request.transport.close()
    await asyncio.sleep(0.05)


@fault
async def hang_before_headers(server, request, body):
    await asyncio.sleep(HANG)


@fault
async def hang_after_headers(server, request, body):
    await server.begin(request)
    await asyncio.sleep(HANG)


@fault
async def hang_in_mid_body(server, request, body):
    return await _raw(server, request, body, cut=0.5, then=HANG)


@fault
async def body_shorter_than_announced(server, request, body):
    return await _raw(server, request, body, cut=0.5, then=0.0)


@fault
async def too_slow_bytes(server, request, body):
    stream = await server.begin(request)
    for byte in b"data: " + json.dumps(server.message(body)).encode():
        await stream.write(bytes([byte]))
        await asyncio.sleep(0.1)
    return stream


async def _raw(server, request, body, cut, then):
    text = json.dumps(server.message(body)).encode()
    stream = web.StreamResponse(headers={"Content-Type": "application/json", "Content-Length": str(len(text))})
    await stream.prepare(request)
    await stream.write(text[:int(len(text) * cut)])
    await asyncio.sleep(then)
    request.transport.abort()
    return stream


@fault
async def not_http(server, request, body):
    request.transport.write(b"SSH-2.0-OpenSSH_9.2\r\n\r\n")
    request.transport.close()
    await asyncio.sleep(0.05)


@fault
async def not_gzip(server, request, body):
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Encoding: gzip\r\nContent-Length: 7\r\n\r\n"
    request.transport.write(head + b"notgzip")
    await asyncio.sleep(0.02)
    request.transport.close()
    await asyncio.sleep(0.05)


def _status(status, text="", **headers):
    async def handler(server, request, body):
        return web.Response(status=status, text=text, headers={k.replace("_", "-"): v for k, v in headers.items()})
    return handler


for _code in (429, 500, 502, 503, 504):
    FAULTS[f"status_{_code}"] = _status(_code, "<html>sorry</html>", Retry_After="0")
    RETRIED.add(f"status_{_code}")
TIMED = ("hang_in_mid_stream", "hang_before_headers", "hang_after_headers", "hang_in_mid_body", "too_slow_bytes")   # end by a deadline
REFUSED = ("status_400", "status_401", "status_404", "status_302")     # never tried again
for _code in (400, 401, 404):
    FAULTS[f"status_{_code}"] = _status(_code, "no")
FAULTS["status_302"] = _status(302, "", Location="http://127.0.0.1:9/")


def _body_of(text: bytes, content_type="application/json"):
    async def handler(server, request, body):
        return web.Response(body=text, content_type=content_type)
    return handler


for _name, _text in dict(empty_body=b"", truncated_json=b'{"output_ids": [1, 2', json_null=b"null", json_list=b"[1, 2]", json_number=b"NaN",
                         not_utf8=b'{"a": "\xff\xfe"}', empty_object=b"{}", deep_json=b"[" * 100_000).items():
    FAULTS[_name] = _body_of(_text)
    RETRIED.add(_name)
FAULTS["html"] = _body_of(b"<html><body>Welcome to nginx</body></html>", "text/html")
RETRIED.add("html")


# ---- content --------------------------------------------------------------------------------------------------------------------


def content(change: Callable[[dict, dict], object], name: str = "") -> Callable:
    """`change(message, meta)` spoils the last message, in place or by what it returns."""
    async def handler(server, request, body):
        return await server.answer(request, body, lambda message: change(message, message["meta_info"]) or message)
    FAULTS[name or change.__name__] = handler
    RETRIED.add(name or change.__name__)
    return change


def _set(key, value):
    return lambda message, meta: meta.update({key: value})


def _entry(index, value):
    def change(message, meta):
        meta["output_token_logprobs"][-1][index] = value
    return change


def _token(value):
    def change(message, meta):
        message["output_ids"][-1] = meta["output_token_logprobs"][-1][1] = value
    return change


for _name, _change in dict(
        rid_of_another=_set("id", "x.other.0;"), no_rid=_set("id", None), prompt_of_another=_set("prompt_tokens", 1),
        count_too_high=_set("completion_tokens", 10_000), count_too_low=_set("completion_tokens", 0),
        no_count=_set("completion_tokens", None),
        finish_unknown=_set("finish_reason", {"type": "exploded"}), finish_text=_set("finish_reason", "length"),
        finish_at_other_length=_set("finish_reason", {"type": "length", "length": 3}),
        stop_token_not_last=_set("finish_reason", {"type": "stop", "matched": VOCAB}), never_finished=_set("finish_reason", None),
        abort_with_status=_set("finish_reason", {"type": "abort", "status_code": 503, "message": "no memory"}),
        no_logprobs=_set("output_token_logprobs", None), logprobs_of_nothing=_set("output_token_logprobs", []),
        logprob_nan=_entry(0, float("nan")), logprob_null=_entry(0, None), logprob_infinite=_entry(0, float("inf")),
        logprob_minus_infinite=_entry(0, float("-inf")), logprob_positive=_entry(0, 0.5), logprob_text=_entry(0, "-1.0"),
        logprob_bool=_entry(0, False), logprob_of_another_token=_entry(1, VOCAB + 1),
        token_too_high=_token(VOCAB), token_negative=_token(-1), token_float=_token(1.5), token_bool=_token(True), token_text=_token("a"),
        no_routes=_set("routed_experts", None), routes_not_base64=_set("routed_experts", "!!!!"), routes_empty=_set("routed_experts", ""),
        routes_number=_set("routed_experts", 7), stale_version=_set("weight_versions", [{"version": "v0", "start": 0, "end": 20}]),
        future_version=_set("weight_versions", [{"version": "v9", "start": 0, "end": 20}]), spans_malformed=_set("weight_versions", [3]),
        spans_too_short=_set("weight_versions", [{"version": VERSION, "start": 0, "end": 1}]),
        spans_overlap=_set("weight_versions", [{"version": VERSION, "start": 0, "end": 9},
                                               {"version": VERSION, "start": 8, "end": 20}])).items():
    content(_change, _name)


def _rows(change: Callable) -> Callable:
    async def handler(server, request, body):
        prompt, limit = body["input_ids"], body["sampling_params"]["max_new_tokens"]
        rows = routes(prompt + continuation(prompt, limit), body["routed_experts_start_len"])
        spoiled = encoded(change(rows))
        return await server.answer(request, body, lambda message: message["meta_info"].update(routed_experts=spoiled) or message)
    return handler


def _at(position, value):
    def change(rows):
        rows[position] = value
        return rows
    return change


for _name, _change in dict(
        routes_cut=lambda rows: rows[:-2], routes_of_another=lambda rows: rows[:5], routes_one_layer_less=lambda rows: rows[:, :-1],
        routes_wider=lambda rows: rows[:, :, [0, 1, 1]], routes_out_of_range=_at((3, 1, 0), EXPERTS), routes_negative=_at((3, 1, 0), -5),
        routes_twice_the_same=_at((2, 1), (4, 4)), routes_layer_of_zeros=_at((slice(None), 1), 0),
        routes_all_zeros=_at(slice(None), 0)).items():
    FAULTS[_name] = _rows(_change)
    RETRIED.add(_name)


@content
def no_tokens(message, meta):
    message["output_ids"], meta["completion_tokens"], meta["output_token_logprobs"] = [], 0, []


@content
def no_output_ids(message, meta):
    del message["output_ids"]


@content
def ids_not_a_list(message, meta):
    message["output_ids"] = "1,2,3"


@content
def tokens_twice(message, meta):
    message["output_ids"] *= 2


@content
def one_token_too_many(message, meta):
    message["output_ids"].append(1)
    meta["output_token_logprobs"].append([-1.0, 1, None])
    meta["completion_tokens"] += 1


@content
def one_logprob_less(message, meta):
    meta["output_token_logprobs"].pop()


@content
def no_meta(message, meta):
    return {"output_ids": message["output_ids"]}


def _parts(counts: Callable) -> Callable:
    """Stream the parts (since, count) that `counts(limit, part)` names, without saying that any is missing."""
    async def handler(server, request, body):
        limit = body["sampling_params"]["max_new_tokens"]
        stream = await server.begin(request)
        for since, count in counts(limit, server.part):
            await server.event(stream, server.message(body, count, since, {"type": "length", "length": limit} if count == limit else None))
        return stream
    return handler


for _name, _counts in dict(
        part_missing=lambda n, p: [(0, 1), (1 + p, n)], part_twice=lambda n, p: [(0, 1), (1, 1 + p), (1, 1 + p), (1 + p, n)],
        parts_swapped=lambda n, p: [(1, 1 + p), (0, 1), (1 + p, n)]).items():
    FAULTS[_name] = _parts(_counts)
    RETRIED.add(_name)


@fault
async def mask_missing(server, request, body):
    return await server.answer(request, {k: v for k, v in body.items() if k != "return_sampling_mask"})


@content
def mask_without_the_token(message, meta):
    meta["output_token_sampling_mask"] = [[(t + 1) % VOCAB] for t in message["output_ids"]]
