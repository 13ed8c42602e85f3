"""Settings of routing replay, and the models on which replay would be bypassed: refused at start-up."""

from dataclasses import dataclass
from typing import Any

from ..settings import ConfigError, setting
from .audit import RouteSpec


@dataclass(frozen=True)
class RoutingConfig:
    use_routing_replay: bool = setting(False, "R2: record the experts in the old-log-prob pass, replay them in the policy passes")
    use_rollout_routing_replay: bool = setting(
        False, "R3: replay the experts that the engine used, in the old-log-prob and the policy passes; takes precedence over R2")
    ref_routing_replay: bool = setting(False, "R3: replay them in the reference pass too, which routes natively otherwise")
    router_replay_no_aux_loss: bool = setting(False, "no load-balancing loss where experts are replayed; its scores are native otherwise")
    router_agreement_floor: float = setting(
        0.5, "stop when less than this share of a layer's replayed experts of a sample are the trainer's own: damaged routes")

    def __post_init__(self):
        if self.ref_routing_replay and not self.use_rollout_routing_replay:
            raise ConfigError("--ref-routing-replay replays the engine's experts: add --use-rollout-routing-replay, or drop it")
        if self.router_replay_no_aux_loss and not self.replay:
            raise ConfigError("--router-replay-no-aux-loss has no effect without replay: add --use-routing-replay or "
                              "--use-rollout-routing-replay, or drop it")
        if not 0 <= self.router_agreement_floor < 1:
            raise ConfigError(f"--router-agreement-floor {self.router_agreement_floor}: give a share in [0, 1); 0 turns the check off")

    @property
    def replay(self) -> bool:
        """Whether any pass replays."""
        return self.use_routing_replay or self.use_rollout_routing_replay

    def mode(self, target: str) -> str:
        """What the routers do in a pass: "native", "record" or "replay".

        Args:
            target: "reference", "old" (the old-log-prob pass) or "policy".
        """
        if target == "policy":
            return "replay" if self.replay else "native"
        if target == "old":
            return "replay" if self.use_rollout_routing_replay else "record" if self.use_routing_replay else "native"
        return "replay" if self.ref_routing_replay else "native"


def route_spec(model: Any) -> RouteSpec:
    """The routers of a model.

    Args:
        model: Megatron's TransformerConfig.

    Raises:
        ConfigError: the model has no experts.
    """
    if not model.num_moe_experts:
        raise ConfigError("routing replay: the model has no experts; drop --use-routing-replay and --use-rollout-routing-replay")
    freq = getattr(model, "moe_layer_freq", 1)
    pattern = [i % freq == 0 for i in range(model.num_layers)] if isinstance(freq, int) else freq
    return RouteSpec(model.num_layers, tuple(i for i, moe in enumerate(pattern) if moe), model.moe_router_topk, model.num_moe_experts)


def check_model(model: Any) -> None:
    """Refuse a model whose routing does not ask for, or does not keep, the replayed experts.

    Args:
        model: Megatron's TransformerConfig.

    Raises:
        ConfigError: names each flag to change, one a line.
    """
    refused = []
    balancing = model.moe_router_load_balancing_type
    balancing = [balancing] if isinstance(balancing, str) else list(balancing)
    graphs, impl = _graphed(model)
    hash_layers = next((n for n in ("moe_n_hash_layers", "n_hash_layers", "num_hash_layers") if getattr(model, n, None)), None)
    for bad, flag, why, fix in (
        (model.moe_router_fusion, "--moe-router-fusion", "the fused kernel chooses its own experts", "drop it"),
        ("sinkhorn" in balancing, "--moe-router-load-balancing-type sinkhorn", "it chooses its own experts", "use none or aux_loss"),
        ("quantile_balancing" in balancing, "--moe-router-load-balancing-type quantile_balancing", "it chooses its own experts",
         "use none or aux_loss"),
        (model.moe_expert_capacity_factor is not None, "--moe-expert-capacity-factor", "it drops replayed experts", "drop it"),
        (getattr(model, "moe_pad_expert_input_to_capacity", False), "--moe-pad-expert-input-to-capacity", "it adds experts", "drop it"),
        (model.moe_router_force_load_balancing, "--moe-router-force-load-balancing", "router logits are random", "drop it"),
        (getattr(model, "moe_router_force_biased", None) is not None, "--moe-router-force-biased", "router logits are random", "drop it"),
        (model.moe_input_jitter_eps is not None, "--moe-input-jitter-eps", "noise makes two passes of one model differ", "drop it"),
        (getattr(model, "overlap_moe_expert_parallel_comm", False), "--overlap-moe-expert-parallel-comm",
         "layers of two micro-batches run interleaved", "drop it"),
        (getattr(model, "transformer_impl", None) == "inference_optimized", "--transformer-impl inference_optimized",
         "its routers do not train", "use transformer_engine"),
        (graphs, f"--cuda-graph-impl {impl}", "a captured router replays the experts of the capture",
         "use --cuda-graph-impl none, or leave moe, moe_router and moe_preprocess out of --cuda-graph-modules"),
        (hash_layers, f"--{(hash_layers or '').replace('_', '-')}", "hash-routed layers have no router to replay, and engines report "
         "no routes for them", "use a model without them, or drop routing replay"),
    ):
        if bad:
            refused.append(f"routing replay cannot work with {flag}: {why}. {fix[0].upper()}{fix[1:]}.")
    if refused:
        raise ConfigError("\n".join(refused))


def _graphed(model):
    """(whether a CUDA graph captures a router, its implementation); the names differ between Megatron releases."""
    impl = getattr(model, "cuda_graph_impl", None) or "none"
    if getattr(model, "enable_cuda_graph", False) or getattr(model, "external_cuda_graph", False):
        impl = "local" if impl == "none" else impl
    modules = getattr(model, "cuda_graph_modules", None)
    modules = getattr(model, "cuda_graph_scope", None) if modules is None else modules
    modules = [modules] if isinstance(modules, str) else modules or []
    names = {getattr(m, "name", m) for m in modules}
    return impl != "none" and (not names or bool(names & {"full", "full_iteration", "moe", "moe_router", "moe_preprocess"})), impl
