import numpy as np
import pybase64
import pytest

from megatron_grpo.routing.audit import RouteAuditError, RouteSpec, accept, audit, forget

SPEC = RouteSpec(num_layers=4, moe_layers=(1, 2, 3), topk=2, num_experts=8)
N = 10


def legal(rows=N - 1, spec=SPEC, seed=0):
    """[rows, all layers, K]: distinct experts, zeros in dense layers."""
    rng = np.random.default_rng(seed)
    out = np.zeros((rows, spec.num_layers, spec.topk), np.int32)
    out[:, spec.moe_layers] = rng.random((rows, len(spec.moe_layers), spec.num_experts)).argsort(-1)[..., :spec.topk]
    return out


def wire(routes):
    return pybase64.b64encode(np.ascontiguousarray(routes, "<i4").tobytes())


def refused(routes, *parts, tokens=N, spec=SPEC, start=0):
    with pytest.raises(RouteAuditError) as error:
        accept("s7", wire(routes), spec, tokens=tokens, start=start)
    for part in ("sample s7", "Likely cause:", *parts):
        assert part in str(error.value)
    return error.value


def test_all_layer_and_moe_only_payloads_give_the_same_narrow_routes():
    routes = legal()
    for payload in (routes, routes[:, 1:]):
        out = accept(7, wire(payload), SPEC, tokens=N)
        assert out.dtype == np.int8 and np.array_equal(out, routes[:, 1:])


def test_as_many_rows_as_tokens_are_legal_and_start_shifts_the_count():
    assert len(accept(7, wire(legal(N)), SPEC, tokens=N)) == N
    assert len(accept(7, wire(legal(4)), SPEC, tokens=N, start=5)) == 4


def test_order_within_a_row_is_kept():
    routes = legal()
    assert np.array_equal(accept(7, wire(routes[..., ::-1]), SPEC, tokens=N), routes[:, 1:, ::-1])


def test_truncated():
    refused(legal()[:-3], "expected 9 rows", "as 6 rows", "truncated")
    refused(legal(), "expected 4 rows", "as 9 rows", "ignores routed_experts_start_len", start=5)


def test_other_layer_count():
    refused(legal()[:, :1].repeat(7, 1), "as 7 layers", "another model")


def test_wider_rows_name_fused_shared_experts():
    refused(np.concatenate([legal(), legal()[..., :1]], -1), "as 3 experts a token", "--disable-shared-experts-fusion")


def test_other_models_top_k():
    refused(legal(spec=RouteSpec(4, (1, 2, 3), 4, 64)), "as 4 experts a token", "another top-k", spec=RouteSpec(4, (1, 2, 3), 3, 64))
    refused(legal(spec=RouteSpec(4, (1, 2, 3), 4, 64)), "as 4 experts a token", "another top-k", spec=RouteSpec(4, (1, 2, 3), 5, 64))


def test_no_shape_fits():
    with pytest.raises(RouteAuditError, match="cut on its way"):
        accept(1, wire(legal().ravel()[:-1]), SPEC, tokens=N)


def test_out_of_range_is_located():
    routes = legal()
    routes[6, 2] = 3, 11
    error = refused(routes, "layer 2, position 6", "expert id 11", "8 routed experts", "EPLB")
    assert (error.layer, error.position) == (2, 6)
    moe_only = refused(routes[:, 1:], "layer 2, position 6")
    assert moe_only.layer == 2
    assert refused(routes[4:], "position 6", start=4).position == 6


def test_duplicates_are_located():
    routes = legal()
    routes[5, 3] = 4, 4
    error = refused(routes, "layer 3, position 5", "an expert twice: [4, 4]")
    assert (error.layer, error.position) == (3, 5)


def test_a_layer_that_was_never_captured():
    routes = legal()
    routes[:, 2:] = 0
    refused(routes, "layers [2, 3] are zero", "pipeline-parallel", "--moe-runner-backend")


def test_top1_layers_of_zeros_need_many_rows():
    spec = RouteSpec(2, (0, 1), 1, 8)
    routes = np.zeros((200, 2, 1), np.int32)
    routes[:, 1] = 5
    assert np.array_equal(accept(1, wire(routes[:20]), spec, tokens=21), routes[:20])
    refused(routes, "layers [0] are zero", spec=spec, tokens=201)


def test_permuted_layers_show_in_the_dense_one():
    refused(legal()[:, ::-1], "layer 0", "a dense layer has routes", "permuted")


def test_missing_rows_are_legal_only_as_a_whole():
    routes = legal()
    routes[3, 1:] = -1
    assert (accept(7, wire(routes), SPEC, tokens=N)[3] == -1).all()
    routes[3, 2, 0] = 5
    refused(routes, "layer 2, position 3", "some experts of a token are missing")


def test_arrays_are_audited_like_payloads():
    routes = legal().astype(np.int64)
    assert np.array_equal(audit(1, routes, SPEC, tokens=N), routes[:, 1:])
    for bad, message in ((routes[:, :2], "2 layers"), (routes[..., :1], "shape"), (routes[:4], "4 rows")):
        with pytest.raises(RouteAuditError, match=message):
            audit(1, bad, SPEC, tokens=N)


def test_a_half_sized_answer_is_not_taken_for_another_dtype_when_its_content_is_wrong():
    with pytest.raises(RouteAuditError):
        accept(1, wire(legal()[:, :2]), SPEC, tokens=N)     # 144 bytes: also 9 x 4 x 2 numbers of two bytes


def test_forget_leaves_the_rows_of_the_new_weights():
    routes = legal()[:, 1:].astype(np.int8)
    out = forget(routes, 4)
    assert (out[:4] == -1).all() and np.array_equal(out[4:], routes[4:]) and (routes[:4] != -1).all()
