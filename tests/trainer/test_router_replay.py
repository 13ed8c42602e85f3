import pytest

from tests.trainer import replay_cases as cases
from tests.trainer.replay_cases import FP32, FULL, MOE, RICH

PP2 = ("--pipeline-model-parallel-size", "2")
VPP2 = (*PP2, "--num-layers-per-virtual-pipeline-stage", "1")
CP2 = ("--context-parallel-size", "2")
TP2 = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
EP2 = ("--expert-model-parallel-size", "2")


@pytest.mark.parametrize("flags, ranks, recomputed", [
    pytest.param((), 1, False, id="plain"),
    pytest.param(FULL, 1, True, id="full recompute"),
    pytest.param(MOE, 1, True, id="moe recompute"),
    pytest.param(PP2, 2, False, id="pp2"),
    pytest.param(VPP2, 2, False, id="pp2 vpp2"),
    pytest.param(CP2, 2, False, id="cp2"),
    pytest.param((*TP2, "--expert-tensor-parallel-size", "1"), 2, False, id="tp2 sp"),
    pytest.param(EP2, 2, False, id="ep2"),
    pytest.param((*VPP2, *CP2, *FULL), 4, True, id="pp2 vpp2 cp2, full recompute"),
    pytest.param((*PP2, *TP2, *EP2, *MOE, "--expert-tensor-parallel-size", "1"), 4, True, id="pp2 tp2 sp ep2, moe recompute"),
])
def test_ratio_is_exactly_one(pool, flags, ranks, recomputed):
    results = pool.run(cases.r3_then_r2, (*FP32, *flags), ranks=ranks)
    assert {n for r in results for n in r["layers"]} == {0, 1, 2, 3}
    assert all(r["recomputed"] is recomputed and r["finite"] for r in results)
    differ, tokens = results[0]["token_mismatch"]       # random experts: most tokens differ
    assert 0.9 * tokens < differ <= tokens


@pytest.mark.parametrize("flags, ranks, recomputed", [
    pytest.param((), 1, False, id="plain"),
    pytest.param(FULL, 1, True, id="full recompute"),
    pytest.param((*PP2, *MOE), 2, True, id="pp2, moe recompute"),
    pytest.param((*TP2, *EP2, "--expert-tensor-parallel-size", "1"), 2, False, id="tp2 sp ep2"),
])
def test_dense_first_shared_experts_mtp_grouped_sigmoid_bias(pool, flags, ranks, recomputed):
    results = pool.run(cases.r3_then_r2, (*RICH, *flags), ranks=ranks)
    assert {n for r in results for n in r["layers"]} == {1, 2, 3}
    assert all(r["recomputed"] is recomputed and r["finite"] for r in results)


def test_noise_calibrated_to_the_paper_is_reported_and_replayed_at_every_token_and_layer(pool):
    (reported, checked, choices), = pool.run(cases.calibrated_noise, FULL)
    assert reported[0] == pytest.approx(0.10, abs=0.02)
    assert reported[1] == pytest.approx(0.94, abs=0.06)     # three standard deviations of 129 tokens
    assert checked == choices > 48 * 130


def test_gate_arithmetic_is_native_on_the_same_experts(pool):
    assert pool.run(cases.gate_arithmetic) == [7]


@pytest.mark.parametrize("flags", [FULL, MOE], ids=["full recompute", "moe recompute"])
def test_missing_rows_fall_back_once(pool, flags):
    assert pool.run(cases.missing_rows, (*FP32, *flags)) == [True]


@pytest.mark.parametrize("flags, ranks", [
    pytest.param((), 1, id="plain"),
    pytest.param(FULL, 1, id="recompute"),
    pytest.param((*TP2, "--expert-tensor-parallel-size", "1"), 2, id="tp2 sp"),
])
def test_expert_bias_counts_real_rows_only_and_once(pool, flags, ranks):
    for found in pool.run(cases.expert_bias_counts, (*RICH, *flags), ranks=ranks):
        assert len(found) == 3
        assert all(counted == real and sum(real) > 0 for counted, real in found)


@pytest.mark.parametrize("flags", [FULL, MOE], ids=["full recompute", "moe recompute"])
def test_an_exception_in_mid_step_leaves_nothing_behind(pool, flags):
    assert pool.run(cases.exception_in_mid_step, (*FP32, *flags)) == [True]


def test_aux_loss_can_be_off_under_replay(pool):
    zero, off, on = (pool.run(cases.aux_loss_gradients, *case)[0] for case in (("0", False), ("1", True), ("1", False)))
    assert off == zero != on


def test_a_pipeline_stage_without_experts(pool):
    results = pool.run(cases.r3_then_r2, (*FP32, "--moe-layer-freq", "([0]*2+[1]*2)", *PP2), ranks=2)
    assert [r["layers"] for r in results] == [[], [2, 3]]
    assert results[0]["token_mismatch"] == results[1]["token_mismatch"] and results[0]["token_mismatch"][0] > 0


def test_mtp_routers_are_not_bound(pool):
    assert pool.run(cases.what_is_bound, RICH) == [(4, 3, 0)]


def test_refusals(pool):
    messages, = pool.run(cases.refusals)
    bypassed = "something routes without asking"
    expected = ["no routes for layer 2", "layer 0 sees", "layer 0 sees", bypassed, bypassed, "--moe-router-fusion",
                "--moe-expert-capacity-factor", "--moe-layer-freq"]
    assert len(messages) == len(expected)
    for message, part in zip(messages, expected, strict=True):
        assert part in message


def test_transformer_engine_recomputes_under_its_forward(pool):
    assert pool.run(cases.transformer_engine_checkpoint) == [(True, True, (1,), {"tp_group": 2})]
