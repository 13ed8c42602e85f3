import numpy as np
import pybase64
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_grpo.routing.codec import (
    RouteRangeError,
    RouteWireError,
    decode_sglang,
    route_dtype,
    wire_dtype,
    wire_size,
)


def wire(routes, dtype="<i4"):
    return pybase64.b64encode(np.ascontiguousarray(routes, dtype).tobytes())


@pytest.mark.parametrize("experts, dtype", [(2, "int8"), (128, "int8"), (129, "int16"), (256, "int16"), (32768, "int16"), (32769, "int32")])
def test_narrowest_dtype_holds_every_id_and_the_sentinel(experts, dtype):
    assert route_dtype(experts) == dtype
    assert np.array([experts - 1, -1]).astype(dtype).tolist() == [experts - 1, -1]


def test_a_known_payload():
    # int32 little-endian: 3, 0, 7, 127 -> base64 by hand of 03000000 00000000 07000000 7f000000
    text = "AwAAAAAAAAAHAAAAfwAAAA=="
    for form in (text, text.encode()):
        out = decode_sglang(form, layers=1, topk=2, rows=2, num_experts=128)
        assert out.dtype == np.int8 and out.tolist() == [[[3, 0]], [[7, 127]]]


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 40), st.integers(1, 4), st.integers(1, 5), st.sampled_from([8, 128, 200, 256, 512]),
       st.sampled_from([None, "int32", "torch.int32", "uint16", "uint8"]), st.randoms())
def test_round_trips(rows, layers, topk, experts, key, random):
    if key == "uint8" and experts > 256:
        experts = 256
    routes = np.random.default_rng(random.randint(0, 1 << 30)).integers(0, experts, (rows, layers, topk))
    text = wire(routes, (key or "int32").removeprefix("torch."))
    assert wire_size(text) == wire_size(text.decode()) == len(pybase64.b64decode(text))
    out = decode_sglang(text, layers=layers, topk=topk, rows=rows, num_experts=experts, dtype_key=key)
    assert out.dtype == route_dtype(experts) and np.array_equal(out, routes)


def test_a_payload_of_many_blocks_is_decoded_whole_and_its_error_located():
    rng = np.random.default_rng(0)
    routes = rng.integers(0, 256, (5000, 24, 8), dtype=np.int32)     # 3.8 MB: several blocks and threads
    out = decode_sglang(wire(routes), layers=24, topk=8, rows=5000, num_experts=256)
    assert np.array_equal(out, routes)
    for value in (256, 300, 1 << 20, -2):
        bad = routes.copy()
        bad[4321, 7, 3] = value
        with pytest.raises(RouteRangeError) as error:
            decode_sglang(wire(bad), layers=24, topk=8, rows=5000, num_experts=256)
        assert (error.value.row, error.value.layer, error.value.value) == (4321, 7, value)


def test_missing_is_legal():
    routes = np.array([[[-1, -1], [3, 4]]])
    assert np.array_equal(decode_sglang(wire(routes), layers=2, topk=2, rows=1, num_experts=8), routes)


@pytest.mark.parametrize("text", [
    b"AwAAAAAAAAAHAAAAfwAAAA", b"AwAAAAAAAA!HAAAAfwAAAA==", b"", b"AwAA\nAAAAAAAHAAAAfwAAAA==", b"AwAAAA=AAAAHAAAAfwAAAA=="])
def test_malformed_base64_is_an_error(text):
    with pytest.raises(RouteWireError):
        decode_sglang(text, layers=1, topk=2, rows=2, num_experts=128)


def test_padding_in_the_middle_of_a_long_payload_is_an_error():
    text = bytearray(wire(np.zeros((4000, 24, 8), np.int32)))
    text[(1 << 19) - 2:1 << 19] = b"=="
    with pytest.raises(RouteWireError, match="padding|base64"):
        decode_sglang(bytes(text), layers=24, topk=8, rows=4000, num_experts=8)


def test_sizes_that_are_no_dtype_and_unknown_keys_are_errors():
    with pytest.raises(RouteWireError, match="neither 4, 2 nor 1"):
        wire_dtype(30, 10)
    with pytest.raises(RouteWireError, match="float16"):
        wire_dtype(20, 10, "float16")
    with pytest.raises(RouteWireError, match="int32"):
        wire_dtype(20, 10, "int32")
