"""Routing replay inside Megatron's routers, keyed by (micro-batch, layer).

    replay = RouterReplay.bind(model, use=...)              # once, after the model is built
    with replay.forward(routes, record=..., unrouted_T=...) as capture:
        output = model(...)                                 # one micro-batch through one model chunk
    capture.routes                                          # what the routers used, when recorded

Megatron's top-k asks the router's `router_replay` object for its experts. Ours looks up the forward that is running in a context
variable. Megatron's checkpoint functions are wrapped so that a recompute runs under the forward that it repeats, whenever
and on whatever thread the schedule runs it. So there is no stage to switch and no queue to keep in order: pipelines,
forward-only passes in between and exceptions in mid-step cannot mix up micro-batches.

Gate values are gathered from the full scores at the replayed experts; Megatron normalises and scales them as always. They equal
native routing's on the same experts, and the router keeps its gradient.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch

from ..routing.audit import RouteSpec
from ..routing.codec import route_dtype
from ..routing.config import check_model, route_spec
from ..routing.placement import RoutesShare, spread
from ..settings import ConfigError

_RUNNING: ContextVar["Forward | None"] = ContextVar("running_forward", default=None)


class Forward:
    """One micro-batch's forward through one model chunk: what its routers replay, and what they chose.

    Attributes:
        routes: the share to replay, or None: native routing.
        record: keep what the routers used.
        compare: also keep what the routers would have chosen.
        unrouted_T: [T] bool rows whose experts are spread, and which no statistic counts; or None.
        quiet: no auxiliary loss.
        topk: K.
    """

    def __init__(self, routes: RoutesShare | None, record: bool, compare: bool, unrouted_T: torch.Tensor | None, quiet: bool, topk: int):
        self.routes, self.record, self.compare, self.unrouted_T, self.quiet, self.topk = routes, record, compare, unrouted_T, quiet, topk
        self.chosen: dict[int, torch.Tensor] = {}       # layer -> [T, K] narrow; the recompute takes it from here
        self.native: dict[int, torch.Tensor] = {}

    def experts(self, layer: int, scores: torch.Tensor, native: Callable[[], torch.Tensor]) -> torch.Tensor:
        """[T, K] int64 experts of a layer, chosen at the first call and the same at every later one."""
        if layer not in self.chosen:
            self.chosen[layer] = self._choose(layer, scores, native)
        return self.chosen[layer].long()

    def _choose(self, layer, scores, native):
        narrow = getattr(torch, route_dtype(scores.shape[1]).name)
        if self.unrouted_T is not None and len(self.unrouted_T) != len(scores):
            raise ValueError(f"layer {layer} sees {len(scores)} rows, but unrouted_T has {len(self.unrouted_T)}")
        if self.routes is None:
            own = native()
            if self.unrouted_T is not None:
                free = spread(torch.arange(len(own), device=own.device), own.shape[1], scores.shape[1])
                own = torch.where(self.unrouted_T[:, None], free, own)
            return own.to(narrow)
        if layer not in self.routes.layers:
            raise ValueError(f"no routes for layer {layer}: this micro-batch has those of layers {list(self.routes.layers)}")
        self.routes = self.routes.to(scores.device)         # at the first layer; free afterwards
        replayed = self.routes.experts_TLK[:, self.routes.layers.index(layer)]
        if len(replayed) != len(scores):
            raise ValueError(f"layer {layer} sees {len(scores)} rows, but the micro-batch has routes of {len(replayed)}")
        missing = layer in self.routes.missing
        if missing or self.compare:
            own = native().sort(dim=1).values.to(narrow)    # one order, whatever the kernel's: the gate's softmax sums in it
            if self.compare:
                self.native[layer] = own
            if missing:
                return torch.where(replayed[:, :1] < 0, own, replayed)
        return replayed

    def share(self, by_layer: dict[int, torch.Tensor]) -> RoutesShare:
        """`chosen` or `native` as one array; without columns for a chunk without routers."""
        layers = tuple(sorted(by_layer))
        if not layers:
            return RoutesShare(torch.empty(0 if self.unrouted_T is None else len(self.unrouted_T), 0, self.topk, dtype=torch.int8), ())
        return RoutesShare(torch.stack([by_layer[n] for n in layers], dim=1), layers)


class Capture:
    """What a forward kept; complete when its `with` block has ended."""

    def __init__(self, forward: Forward):
        self._forward = forward

    @property
    def routes(self) -> RoutesShare | None:
        """The experts that were used, on the device; None when not recorded."""
        return self._forward.share(self._forward.chosen) if self._forward.record else None

    @property
    def own(self) -> RoutesShare | None:
        """The experts that the routers would have chosen, for routing.mismatch.compare; None when not asked for."""
        return self._forward.share(self._forward.native) if self._forward.compare else None


class LayerReplay:
    """What one router asks for its experts; stands where Megatron keeps its own RouterReplay."""

    def __init__(self, layer: int):
        self.layer = layer

    def get_replay_topk(self, scores, topk, num_groups=None, group_topk=None, default_compute_topk=None):
        """([T, K] scores, [T, K] experts), with gradient through the scores. Called by Megatron's top-k."""
        forward = _RUNNING.get()
        if forward is None:
            return default_compute_topk(scores, topk, num_groups, group_topk)
        experts = forward.experts(self.layer, scores, lambda: default_compute_topk(scores, topk, num_groups, group_topk)[1])
        return scores.gather(1, experts), experts


class RouterReplay:
    """The bound routers of this rank.

    Attributes:
        spec: the model's routers, all of them (routing.audit).
        layers: 0-based decoder layers with a router on this rank, ascending, over all its model chunks.
    """

    def __init__(self, spec: RouteSpec, chunks: list[frozenset[int]], no_aux_loss: bool = False):
        self.spec, self._chunks, self._no_aux_loss = spec, chunks, no_aux_loss
        self.layers = tuple(sorted(set().union(*chunks)))

    @staticmethod
    def bind(model: Sequence[torch.nn.Module], no_aux_loss: bool = False) -> "RouterReplay":
        """Take over the routers of a built model.

        Args:
            model: this rank's model chunks, wrapped (DDP, Float16Module) or not.
            no_aux_loss: no load-balancing loss where experts are replayed.

        Raises:
            ConfigError: replay would be bypassed: names the flag to change, or the Megatron release to install or patch.
        """
        check_interface()
        chunks, config = [], None
        for chunk in model:
            inner = _unwrap(chunk)
            config = inner.config
            check_model(config)
            chunks.append(_bind_chunk(inner, route_spec(config)))
        _keep_forward_in_recompute()
        return RouterReplay(route_spec(config), chunks, no_aux_loss)

    @contextlib.contextmanager
    def forward(self, routes: RoutesShare | None = None, *, record: bool = False, compare: bool = False,
                unrouted_T: torch.Tensor | None = None) -> Iterator[Capture]:
        """Run one micro-batch's forward through one model chunk inside this block.

        Args:
            routes: this rank's share, on host or device; None routes natively.
            record: keep the experts that are used (R2's old-log-prob pass; R3's, to fix the missing rows for the policy passes).
            compare: also keep the routers' own choice. Needs `routes`.
            unrouted_T: [T] bool (placement.unrouted): their experts are spread, and no statistic or auxiliary loss counts them.

        Raises:
            RuntimeError: a router of the chunk was not asked; something bypasses replay.
        """
        running = Forward(routes, record, compare and routes is not None, unrouted_T, self._no_aux_loss and routes is not None,
                          self.spec.topk)
        token = _RUNNING.set(running)
        try:
            yield Capture(running)
        finally:
            _RUNNING.reset(token)
        if (routes is not None or record) and frozenset(running.chosen) not in self._chunks:
            raise RuntimeError(f"routers of layers {sorted(running.chosen)} asked for their experts; the model chunks of this rank have "
                               f"layers {[sorted(c) for c in self._chunks]}: something routes without asking")


def check_interface() -> None:
    """Refuse a Megatron-Core whose routers do not ask for replayed experts."""
    from megatron.core.package_info import __shortversion__ as version
    from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function as topk

    if "router_replay" not in inspect.signature(topk).parameters:
        raise ConfigError(f"megatron-core {version} has no router-replay interface: install 0.16.1 or newer, or run "
                          "python -m megatron_grpo.patches apply megatron-core")


def _unwrap(chunk: Any) -> Any:
    """The module that has the decoder: inside DDP, Float16Module, and a vision-language model."""
    while not hasattr(chunk, "decoder"):
        inner = getattr(chunk, "module", None) or getattr(chunk, "language_model", None)
        if inner is None:
            raise ConfigError(f"routing replay: {type(chunk).__name__} has no decoder; use Megatron's GPTModel or a wrapper of it")
        chunk = inner
    return chunk


def _bind_chunk(model, spec: RouteSpec) -> frozenset[int]:
    """Bind the routers of the live decoder layers. MTP layers are elsewhere in the model; dense ones have no router."""
    from megatron.core.transformer.moe.router import TopKRouter

    bound = set()
    for block in model.decoder.layers:
        layer, router = block.layer_number - 1, getattr(getattr(block, "mlp", None), "router", None)
        if (router is not None) != (layer in spec.moe_layers):
            raise ConfigError(f"routing replay: decoder layer {layer} {'has a' if router is not None else 'has no'} router, but by "
                              f"--moe-layer-freq layers {list(spec.moe_layers)} have")
        if router is None:
            continue
        if not isinstance(router.router_replay, LayerReplay):
            if getattr(type(router), "routing", None) is not TopKRouter.routing:
                raise ConfigError(f"routing replay: the router of layer {layer} is a {type(router).__name__} with its own routing; only "
                                  "Megatron's TopKRouter asks for replayed experts")
            router.__class__ = _replayed(router.__class__)
        router.router_replay = LayerReplay(layer)
        bound.add(layer)
    return frozenset(bound)


@functools.cache
def _replayed(cls: Any) -> Any:
    """The class of a bound router: statistics leave unrouted rows out, and the auxiliary loss can be off."""

    class ReplayedRouter(cls):
        def routing(self, logits, padding_mask=None):
            running = _RUNNING.get()
            if running is not None and running.unrouted_T is not None and padding_mask is None:
                padding_mask = running.unrouted_T
            return super().routing(logits, padding_mask=padding_mask)

        def is_aux_loss_enabled(self):
            running = _RUNNING.get()
            return super().is_aux_loss_enabled() and not (running is not None and running.quiet)

        def _apply_expert_bias(self, routing_map, padding_mask=None):
            # Megatron's own combines a [T, E] map with a [T] mask, which fails or, with T = E, masks experts.
            if self.enable_expert_bias and torch.is_grad_enabled():
                with torch.no_grad():
                    if padding_mask is not None:
                        routing_map = routing_map & ~padding_mask.reshape(-1, 1)
                    self.local_tokens_per_expert += routing_map.sum(dim=0)

    return ReplayedRouter


def _keep_forward_in_recompute():
    """Wrap what Megatron checkpoints with: its own autograd function, and Transformer Engine's function where installed."""
    from megatron.core.tensor_parallel.random import CheckpointFunction

    if not hasattr(CheckpointFunction, "keeps_forward"):
        forward = CheckpointFunction.forward
        CheckpointFunction.forward = staticmethod(lambda ctx, function, *args: forward(ctx, _under_running(function), *args))
        CheckpointFunction.keeps_forward = True
    try:
        import transformer_engine.pytorch.distributed as te
    except ImportError:
        return
    if not hasattr(te.checkpoint, "keeps_forward"):
        checkpoint = te.checkpoint      # Megatron's te_checkpoint looks it up at each call

        @functools.wraps(checkpoint)
        def keeping(function, *args, **kwargs):
            return checkpoint(_under_running(function), *args, **kwargs)

        keeping.keeps_forward = True
        te.checkpoint = keeping


def _under_running(function):
    """`function`, always run under the forward that is running now."""
    running = _RUNNING.get()
    if running is None:
        return function

    def run(*args, **kwargs):
        token = _RUNNING.set(running)
        try:
            return function(*args, **kwargs)
        finally:
            _RUNNING.reset(token)

    return run
