"""What SGLang sends for routed experts, decoded into what we hold.

Routes are an integer array [rows, L, K]: row i holds the K experts of each of L layers that token i used when it was the
model's input. At rest they have the narrowest signed dtype that holds every expert id and MISSING.
"""

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pybase64

MISSING = -1
"""A (row, layer) without a route has MISSING in all K places; the trainer then routes it natively."""

_BLOCK = 1 << 19        # base64 characters a pass: a multiple of 16, so that a block holds whole numbers, and of a size for the cache
_WIRE = {name: np.dtype(name).newbyteorder("<") for name in ("int8", "uint8", "int16", "uint16", "int32", "int64")}


class RouteWireError(ValueError):
    """The payload is not base64, or its bytes are not routes of the expected shape and range."""


class RouteRangeError(RouteWireError):
    """An expert id that the model does not have."""

    def __init__(self, row: int, layer: int, value: int, num_experts: int):
        super().__init__(f"row {row}, layer {layer}: expert id {value} of a model with {num_experts} experts")
        self.row, self.layer, self.value = row, layer, value


def route_dtype(num_experts: int) -> np.dtype:
    """The narrowest signed dtype that holds 0 .. num_experts - 1 and MISSING: int8 up to 128 experts, then int16, int32."""
    for name in ("int8", "int16", "int32"):
        if num_experts - 1 <= np.iinfo(name).max:
            return np.dtype(name)
    raise ValueError(f"{num_experts} experts")


def wire_size(text: str | bytes) -> int:
    """Bytes that base64 `text` decodes to."""
    end = text[-2:] if isinstance(text, str) else bytes(text[-2:]).decode("latin-1")
    return len(text) // 4 * 3 - (2 if end == "==" else end.endswith("="))


def wire_dtype(nbytes: int, count: int, key: str | None = None) -> np.dtype:
    """The dtype of `count` numbers in `nbytes`: the engine's key ("int32", "torch.uint8", ...) if sent, else by size.

    SGLang up to 0.5.23 sends int32 and no key; a payload of one or two bytes a number is unsigned.

    Raises:
        RouteWireError: unknown key, or no dtype gives this size.
    """
    if key is not None:
        name = str(key).removeprefix("torch.")
        if name not in _WIRE:
            raise RouteWireError(f"routed_experts_dtype {key!r} is unknown; known are {', '.join(_WIRE)}")
        if _WIRE[name].itemsize * count != nbytes:
            raise RouteWireError(f"{nbytes} bytes for {count} numbers of {name}")
        return _WIRE[name]
    for name in ("int32", "uint16", "uint8"):
        if _WIRE[name].itemsize * count == nbytes:
            return _WIRE[name]
    raise RouteWireError(f"{nbytes} bytes for {count} numbers: neither 4, 2 nor 1 bytes each")


def decode_sglang(text: str | bytes, *, layers: int, topk: int, rows: int, num_experts: int, dtype_key: str | None = None) -> np.ndarray:
    """Decode `meta_info["routed_experts"]`: standard base64 of a C-contiguous little-endian [rows, layers, topk].

    Works block by block, so the result is the only whole copy and is already narrow and range-checked; a large payload is
    decoded by several threads (base64 and numpy both release the GIL).

    Args:
        text: base64, bytes or str.
        layers, topk, rows: the shape; the engine does not send it.
        num_experts: routed experts of the model.
        dtype_key: `meta_info["routed_experts_dtype"]` where the engine sends one.

    Returns:
        [rows, layers, topk] of route_dtype(num_experts), writable.

    Raises:
        RouteWireError: malformed base64 or another byte count. RouteRangeError: an id outside -1 .. num_experts - 1.
    """
    count = rows * layers * topk
    wire = wire_dtype(wire_size(text), count, dtype_key)
    unsigned = np.dtype(f"<u{wire.itemsize}")
    out = np.empty(count, route_dtype(num_experts))
    view = text if isinstance(text, str) else memoryview(text)

    def decode_block(start: int):
        try:
            block = np.frombuffer(pybase64.b64decode(view[start:start + _BLOCK], validate=True), wire)
        except ValueError as error:     # binascii.Error is one; so is a size that is no multiple of the dtype's
            raise RouteWireError(f"not base64 near character {start}: {error}") from None
        first = start // 4 * 3 // wire.itemsize
        target = out[first:first + _BLOCK // 4 * 3 // wire.itemsize]
        if len(target) != len(block):
            raise RouteWireError(f"base64 padding inside the payload, near character {start}")
        np.copyto(target, block, casting="unsafe")
        # As unsigned numbers, legal ids are small and everything else is large: one reduction in the usual case.
        if len(block) and block.view(unsigned).max() >= num_experts:
            bad = np.flatnonzero((block < MISSING) | (block >= num_experts))
            if len(bad):
                at = first + int(bad[0])
                raise RouteRangeError(at // (layers * topk), at // topk % layers, int(block[bad[0]]), num_experts)

    starts = iter(range(0, len(text), _BLOCK))      # shared: a thread that gets no core takes no blocks

    def work():
        for start in starts:
            decode_block(start)

    helpers = min(4, os.cpu_count() or 1, len(text) // _BLOCK) - 1
    if helpers > 0:
        pool = ThreadPoolExecutor(helpers, "routes")
        running = [pool.submit(work) for _ in range(helpers)]
        try:
            work()
            for helper in running:
                if not helper.cancel():
                    helper.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
    else:
        work()
    return out.reshape(rows, layers, topk)
