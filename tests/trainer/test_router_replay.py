import pytest

from tests.trainer import replay_cases as cases

FULL = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")
MOE = ("--recompute-granularity", "selective", "--recompute-modules", "moe")
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
    results = pool.run(cases.r3_then_r2, (*cases.FP32, *flags), ranks=ranks)
    assert {n for r in results for n in r["layers"]} == {0, 1, 2, 3}
    assert all(r["recomputed"] is recomputed and r["finite"] for r in results)


@pytest.mark.parametrize("flags, ranks, recomputed", [
    pytest.param((), 1, False, id="plain"),
    pytest.param(FULL, 1, True, id="full recompute"),
    pytest.param((*PP2, *MOE), 2, True, id="pp2, moe recompute"),
    pytest.param((*TP2, *EP2, "--expert-tensor-parallel-size", "1"), 2, False, id="tp2 sp ep2"),
])
def test_dense_first_shared_experts_mtp_grouped_sigmoid_bias(pool, flags, ranks, recomputed):
    results = pool.run(cases.r3_then_r2, (*cases.RICH, *flags), ranks=ranks)
    assert {n for r in results for n in r["layers"]} == {1, 2, 3}
    assert all(r["recomputed"] is recomputed and r["finite"] for r in results)
