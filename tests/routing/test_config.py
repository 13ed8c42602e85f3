from types import SimpleNamespace

import pytest

from megatron_grpo.routing.config import RoutingConfig, check_model, route_spec
from megatron_grpo.settings import ConfigError


def model(**changes):
    return SimpleNamespace(**(dict(
        num_layers=4, num_moe_experts=8, moe_layer_freq=1, moe_router_topk=2, moe_router_load_balancing_type="aux_loss",
        moe_router_fusion=False, moe_expert_capacity_factor=None, moe_router_force_load_balancing=False, moe_input_jitter_eps=None,
        cuda_graph_impl="none", cuda_graph_modules=[]) | changes))


def test_modes():
    assert [RoutingConfig().mode(p) for p in ("reference", "old", "policy")] == ["native"] * 3
    assert [RoutingConfig(use_routing_replay=True).mode(p) for p in ("reference", "old", "policy")] == ["native", "record", "replay"]
    r3 = RoutingConfig(use_routing_replay=True, use_rollout_routing_replay=True)
    assert [r3.mode(p) for p in ("reference", "old", "policy")] == ["native", "replay", "replay"]
    assert RoutingConfig(use_rollout_routing_replay=True, ref_routing_replay=True).mode("reference") == "replay"


@pytest.mark.parametrize("settings, flag", [
    (dict(ref_routing_replay=True), "--use-rollout-routing-replay"),
    (dict(router_replay_no_aux_loss=True), "--use-routing-replay"),
    (dict(router_agreement_floor=1.0), "--router-agreement-floor"),
])
def test_settings_that_cannot_work(settings, flag):
    with pytest.raises(ConfigError, match=flag):
        RoutingConfig(**settings)


@pytest.mark.parametrize("changes, flag", [
    (dict(moe_router_fusion=True), "--moe-router-fusion"),
    (dict(moe_router_load_balancing_type="sinkhorn"), "sinkhorn"),
    (dict(moe_router_load_balancing_type=["aux_loss", "quantile_balancing"]), "quantile_balancing"),
    (dict(moe_expert_capacity_factor=1.0), "--moe-expert-capacity-factor"),
    (dict(moe_pad_expert_input_to_capacity=True), "--moe-pad-expert-input-to-capacity"),
    (dict(moe_router_force_load_balancing=True), "--moe-router-force-load-balancing"),
    (dict(moe_router_force_biased=1.0), "--moe-router-force-biased"),
    (dict(moe_input_jitter_eps=0.1), "--moe-input-jitter-eps"),
    (dict(overlap_moe_expert_parallel_comm=True), "--overlap-moe-expert-parallel-comm"),
    (dict(transformer_impl="inference_optimized"), "--transformer-impl"),
    (dict(cuda_graph_impl="local"), "--cuda-graph-impl local"),
    (dict(cuda_graph_impl="full_iteration"), "--cuda-graph-impl full_iteration"),
    (dict(cuda_graph_impl="transformer_engine", cuda_graph_modules=[SimpleNamespace(name="moe_router")]), "moe_router"),
    (dict(cuda_graph_modules=None, cuda_graph_scope="full", enable_cuda_graph=True), "--cuda-graph-impl local"),
    (dict(moe_n_hash_layers=2), "--moe-n-hash-layers"),
])
def test_what_bypasses_replay_is_refused(changes, flag):
    with pytest.raises(ConfigError, match=flag):
        check_model(model(**changes))


@pytest.mark.parametrize("changes", [{}, dict(cuda_graph_impl="transformer_engine", cuda_graph_modules=[SimpleNamespace(name="attn")])])
def test_what_works_is_not_refused(changes):
    check_model(model(**changes))


def test_spec_of_a_model():
    assert route_spec(model()).moe_layers == (0, 1, 2, 3)
    assert route_spec(model(moe_layer_freq=2)).moe_layers == (0, 2)
    assert route_spec(model(moe_layer_freq=[0, 1, 1, 1])).moe_layers == (1, 2, 3)
    with pytest.raises(ConfigError, match="no experts"):
        route_spec(model(num_moe_experts=None))
