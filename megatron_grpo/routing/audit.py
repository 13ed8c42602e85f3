"""What may enter the trainer as routes: the checks of an engine's answer, and the metrics of engine mismatch.

An engine that routes wrongly does not fail: it answers with another layer's experts, with zeros or with too few rows, and the
trainer would replay them. So every answer passes `accept` (bytes) or `audit` (arrays) before anything is installed, and a
refusal names sample, layer, position and the likely cause on the engine's side.
"""

from dataclasses import dataclass
from itertools import combinations

import numpy as np

from .codec import MISSING, RouteRangeError, RouteWireError, decode_sglang, route_dtype, wire_dtype, wire_size

_TOP1_ROWS = 64     # with top-1, this many rows that all name expert 0 are a layer that was never captured


@dataclass(frozen=True)
class RouteSpec:
    """The trainer's routers, which an engine's answer has to fit.

    Attributes:
        num_layers: decoder layers, dense ones included, MTP layers excluded.
        moe_layers: 0-based indices of the decoder layers that have a router of their own, ascending.
        topk: routed experts a token, shared experts excluded.
        num_experts: routed experts.
    """

    num_layers: int
    moe_layers: tuple[int, ...]
    topk: int
    num_experts: int


class RouteAuditError(ValueError):
    """Routes that must not be replayed. The message names sample, layer, position and the likely cause."""

    def __init__(self, sample_id: int | str, problem: str, cause: str, *, layer: int | None = None, position: int | None = None):
        at = "".join(f", {name} {value}" for name, value in (("layer", layer), ("position", position)) if value is not None)
        super().__init__(f"routes of sample {sample_id}{at}: {problem}. Likely cause: {cause}")
        self.sample_id, self.layer, self.position = sample_id, layer, position


def accept(sample_id: int | str, payload: str | bytes, spec: RouteSpec, *, tokens: int, start: int = 0,
           dtype_key: str | None = None) -> np.ndarray:
    """Decode and audit one engine answer.

    Args:
        sample_id: for messages.
        payload: `meta_info["routed_experts"]`.
        tokens: N, prompt and sampled tokens of the request.
        start: `routed_experts_start_len` of the request; row 0 of the payload is this position.
        dtype_key: `meta_info["routed_experts_dtype"]` where present.

    Returns:
        [rows, L, K] narrow integers over `spec.moe_layers`; rows = N - 1 - start or N - start.

    Raises:
        RouteAuditError.
    """
    def fits(rows, layers, topk=spec.topk, key=dtype_key):
        try:
            return wire_dtype(wire_size(payload), rows * layers * topk, key)
        except RouteWireError:
            return None

    row_counts, layer_counts = (tokens - 1 - start, tokens - start), (spec.num_layers, len(spec.moe_layers))
    keys = (dtype_key,) if dtype_key is not None else ("int32", None)     # without a key, any shape in int32 before a narrower dtype
    shape = next(((r, n, k) for k in keys for r in row_counts for n in layer_counts if fits(r, n, key=k)), None)
    if shape is None:
        raise _misshapen(sample_id, wire_size(payload), spec, tokens, start, dtype_key)
    rows, layers, key = shape
    try:
        routes = decode_sglang(payload, layers=layers, topk=spec.topk, rows=rows, num_experts=spec.num_experts, dtype_key=key)
    except RouteRangeError as error:
        layer = error.layer if layers == spec.num_layers else spec.moe_layers[error.layer]
        raise _out_of_range(sample_id, layer, start + error.row, error.value, spec) from None
    except RouteWireError as error:
        raise RouteAuditError(sample_id, str(error), "the answer was cut or rewritten on its way") from None
    return audit(sample_id, routes, spec, tokens=tokens, start=start)


def audit(sample_id: int | str, routes: np.ndarray, spec: RouteSpec, *, tokens: int, start: int = 0) -> np.ndarray:
    """Check routes and keep the MoE layers.

    Args:
        routes: [rows, num_layers or len(moe_layers), K] integers; the dense layers of an all-layer payload are zeros.
        tokens, start: as in `accept`.

    Returns:
        [rows, len(moe_layers), K] of the narrowest dtype. A (row, layer) of MISSING only is legal: it will be routed natively.

    Raises:
        RouteAuditError: rows, layers, width, range, duplicate experts, dense layers with routes, layers never captured.
    """
    if routes.ndim != 3 or routes.shape[2] != spec.topk:
        raise RouteAuditError(sample_id, f"shape {routes.shape}, expected [rows, layers, {spec.topk}]",
                              "the engine serves a model with another top-k, or counts fused shared experts as routed")
    rows, layers = routes.shape[:2]
    if rows not in (tokens - 1 - start, tokens - start):
        raise RouteAuditError(sample_id, f"{rows} rows for {tokens} tokens from position {start}, expected {tokens - 1 - start}", _ROWS)
    moe = np.asarray(spec.moe_layers)
    if layers == spec.num_layers:
        dense = np.setdiff1d(np.arange(layers), moe)
        stray = dense[_nonzero_layers(routes)[dense]]
        if len(stray):
            raise RouteAuditError(sample_id, "a dense layer has routes", "the engine's layers are permuted or shifted, or another model's",
                                  layer=int(stray[0]))
        routes = routes[:, moe] if len(dense) else routes
    elif layers != len(moe):
        raise RouteAuditError(sample_id, f"{layers} layers, expected {spec.num_layers} (all) or {len(moe)} (MoE layers only)", _LAYERS)

    if routes.size and (routes.min() < MISSING or routes.max() >= spec.num_experts):
        row, layer, k = map(int, np.argwhere((routes < MISSING) | (routes >= spec.num_experts))[0])
        raise _out_of_range(sample_id, spec.moe_layers[layer], start + row, routes[row, layer, k], spec)
    routes = np.ascontiguousarray(routes, route_dtype(spec.num_experts))
    _refuse_uncaptured(sample_id, routes, spec)
    planes = np.ascontiguousarray(np.moveaxis(routes, -1, 0))       # contiguous comparisons, an order faster than sorting rows of K
    absent = planes == MISSING
    missing = absent.all(0)
    twice = np.zeros_like(missing)
    for one, other in combinations(planes, 2):
        twice |= one == other
    partly = "some experts of a token are missing, not all", "the engine's padding reached the answer"
    for bad, (problem, cause) in ((absent.any(0) & ~missing, partly), (twice & ~missing, ("an expert twice", _UNCAPTURED))):
        if bad.any():
            row, layer = map(int, np.argwhere(bad)[0])
            raise RouteAuditError(sample_id, f"{problem}: {routes[row, layer].tolist()}", cause, layer=spec.moe_layers[layer],
                                  position=start + row)
    return routes


def forget(routes: np.ndarray, stop: int) -> np.ndarray:
    """A copy whose rows before `stop` are MISSING.

    For a weight update in mid-request with pause mode `retract`: the engine prefills everything again, so all rows are those
    of the new weights, while the log-probs before the switch are the old policy's.
    """
    routes = routes.copy()
    routes[:stop] = MISSING
    return routes


_ROWS = ("the answer was truncated, or is another request's (SGLang 0.5.7 to 0.5.12 mix up batches in which only some requests ask for "
         "routes), or ignores routed_experts_start_len (SGLang before 0.5.12)")
_FUSED = "shared experts are fused into the routed ones (start the engine with --disable-shared-experts-fusion)"
_LAYERS = "the engine serves another model, or counts MTP layers as decoder layers"
_UNCAPTURED = ("the layer was not captured: the engine is pipeline-parallel, or runs a MoE backend that routes inside its kernel "
               "(--moe-runner-backend flashinfer_trtllm, flashinfer_mxfp4, triton_kernel), or the layer is hash-routed")


def _refuse_uncaptured(sample_id, routes, spec):
    """An all-zero layer is one failure with one cause; reported before its rows are reported as duplicates."""
    if len(routes) < (1 if spec.topk > 1 else _TOP1_ROWS):
        return
    zero = np.flatnonzero(~_nonzero_layers(routes))
    if len(zero):
        layers = [spec.moe_layers[i] for i in zero]
        raise RouteAuditError(sample_id, f"all rows of layers {layers} are zero", _UNCAPTURED, layer=layers[0])


def _nonzero_layers(routes):
    """[L] bool. Along contiguous rows: `any` over the axes (0, 2) takes a hundred times as long."""
    flat = np.ascontiguousarray(routes).reshape(len(routes), -1)
    return np.bitwise_or.reduce(flat, axis=0).reshape(routes.shape[1:]).any(-1)


def _out_of_range(sample_id, layer, position, value, spec):
    return RouteAuditError(sample_id, f"expert id {int(value)}, but the model has {spec.num_experts} routed experts",
                           "physical ids under EPLB (SGLang before 0.5.10 with --enable-eplb), a fused shared expert's id "
                           "(start the engine with --disable-shared-experts-fusion), or another model's routes",
                           layer=int(layer), position=int(position))


def _misshapen(sample_id, nbytes, spec, tokens, start, dtype_key):
    """No expected shape has this size: name every single change that would explain it."""
    size = wire_dtype(0, 0, dtype_key).itemsize        # of the key, else int32
    count, rows = nbytes // size, tokens - 1 - start
    readings = []
    for layers in dict.fromkeys((spec.num_layers, len(spec.moe_layers))):
        if count % (layers * spec.topk) == 0:
            readings.append((f"{count // (layers * spec.topk)} rows", _ROWS))
        if rows > 0 and count % (rows * layers) == 0 and count > rows * layers * spec.topk:
            readings.append((f"{count // (rows * layers)} experts a token", f"{_FUSED}, or the engine serves a model with another top-k"))
        elif rows > 0 and count % (rows * layers) == 0:
            readings.append((f"{count // (rows * layers)} experts a token", "the engine serves a model with another top-k"))
    if rows > 0 and count % (rows * spec.topk) == 0:
        readings.append((f"{count // (rows * spec.topk)} layers", _LAYERS))
    readings = readings or [("no shape", "the answer was cut on its way")]
    return RouteAuditError(
        sample_id, f"{nbytes} bytes, expected {rows} rows x {spec.num_layers} layers x {spec.topk} experts x {size} bytes",
        "; or ".join(dict.fromkeys(f"as {reading}: {cause}" for reading, cause in readings)))
