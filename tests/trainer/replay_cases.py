"""Replay in the real model under Megatron's own schedules, on the ranks of the pool."""

import numpy as np
import torch

from megatron_grpo.parallel.layout import Layout
from megatron_grpo.routing.codec import MISSING
from megatron_grpo.routing.mismatch import compare, mismatch_metrics
from megatron_grpo.routing.placement import RoutesShare, RouteStore, place, unrouted
from tests.routing.noise import flip
from tests.trainer import one_step

FP32 = ("--untie-embeddings-and-output-weights", "--moe-router-dtype", "fp32")
FULL = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")
MOE = ("--recompute-granularity", "selective", "--recompute-modules", "moe")
RICH = (*FP32, "--moe-layer-freq", "([0]*1+[1]*3)", "--moe-shared-expert-intermediate-size", "16", "--mtp-num-layers", "1",
        "--moe-router-score-function", "sigmoid", "--moe-router-enable-expert-bias", "--moe-router-num-groups", "4",
        "--moe-router-group-topk", "2", "--moe-router-topk-scaling-factor", "2.5")


class Job:
    """A model with bound routers, the micro-batches of a step, and the engine's routes for them."""

    def __init__(self, flags, missing=0.0):
        from megatron.core import mpu
        from megatron.core.utils import get_model_config

        from megatron_grpo.trainer.router_replay import RouterReplay
        self.args = one_step.start(flags, torch.float32)
        self.model, _ = one_step.build(self.args)
        self.config = get_model_config(self.model[0])
        self.replay = RouterReplay.bind(self.model)
        spec, rng = self.replay.spec, np.random.default_rng(0)
        cp, tp = mpu.get_context_parallel_rank(), mpu.get_tensor_model_parallel_rank() if self.args.sequence_parallel else 0
        generator = torch.Generator().manual_seed(1)
        self.batches, self.shares, self.expected = [], [], []
        for lengths in one_step.LENGTHS:
            layout = Layout(lengths, cp_size=self.args.context_parallel_size, kind=self.args.cp_layout,
                            tp_size=self.args.tensor_model_parallel_size if self.args.sequence_parallel else 1)
            tokens = torch.randint(0, 127, (layout.num_tokens,), generator=generator)
            sizes = [(n - 1, len(spec.moe_layers), spec.num_experts) for n in lengths]
            routes = [rng.random(size).argsort(-1)[..., :spec.topk].astype(np.int8) for size in sizes]
            for rows in routes:
                rows[rng.random(len(rows)) < missing] = MISSING
            columns = [spec.moe_layers.index(n) for n in self.replay.layers]
            share = place(routes, layout, columns=columns, topk=spec.topk, num_experts=spec.num_experts, cp_rank=cp, tp_rank=tp)
            self.shares.append(RoutesShare.of(share, self.replay.layers))
            self.batches.append((layout, layout.shard(tokens, cp).view(layout.local_shape), layout.shard(layout.labels(tokens), cp),
                                 layout.positions(cp).view(layout.local_shape), _packed(layout), unrouted(layout, cp, tp)))
        dp, mine = mpu.get_data_parallel_world_size(), mpu.get_data_parallel_rank()
        self.batches, self.shares = self.batches[mine::dp], self.shares[mine::dp]
        self.used, self.checked = [], 0
        for chunk in self.model:
            for router in _routers(chunk):
                router.register_forward_hook(self._check)

    def _check(self, router, inputs, output):
        """The map that a bound router returns names the experts of the micro-batch that is running, in forward and in recompute."""
        from megatron_grpo.trainer.router_replay import _RUNNING
        running = _RUNNING.get()
        if running is None or running.routes is None or router.router_replay is None:
            return
        layer = router.router_replay.layer
        wanted = running.routes.experts_TLK[:, running.routes.layers.index(layer)].long()
        given = wanted[:, 0] >= 0
        mask = torch.zeros_like(output[1]).index_put((torch.arange(len(wanted))[given, None], wanted[given]), torch.tensor(True))
        assert torch.equal(output[1][given], mask[given]), f"layer {layer}: other experts than the engine's"
        assert (output[1].sum(1) == router.topk).all()
        self.checked += int(given.sum())

    def run(self, shares=None, forward_only=True, captures=None, **options):
        """Log-probs of every micro-batch on the last stage."""
        from megatron.core.pipeline_parallel import get_forward_backward_func
        logps = {}

        def forward_step(iterator, chunk):
            number = next(iterator)
            _, tokens, labels, positions, params, free = self.batches[number]
            with self.replay.forward(shares[number] if shares else None, unrouted_T=free, **options) as capture:
                output = chunk(tokens, positions, None, packed_seq_params=params)
            if captures is not None:
                captures.append((number, capture))

            def loss(logits, non_loss_data=False):
                logp = logits.float().flatten(0, 1).log_softmax(-1).gather(1, (labels % logits.shape[-1])[:, None]).squeeze(1)
                logps[number] = logp.detach().clone()
                return logp.mean(), {}
            return output, loss

        for chunk in self.model:
            chunk.zero_grad_buffer()
        iterators = [iter(range(len(self.batches))) for _ in self.model]
        with torch.set_grad_enabled(not forward_only):
            get_forward_backward_func()(
                forward_step_func=forward_step, data_iterator=iterators if len(self.model) > 1 else iterators[0], model=self.model,
                num_microbatches=len(self.batches), seq_length=self.args.seq_length, micro_batch_size=1, forward_only=forward_only)
        return [logps[n] for n in sorted(logps)]

    def router_gradients(self):
        return [r.weight.main_grad.abs().max().item() for chunk in self.model for r in _routers(chunk)]


def _packed(layout):
    from megatron.core.packed_seq_params import PackedSeqParams
    cu = layout.cu_seqlens_padded
    return PackedSeqParams("thd", cu, cu, cu, cu, layout.max_seqlen, layout.max_seqlen)


def _routers(chunk):
    from megatron_grpo.trainer.router_replay import LayerReplay
    return [m for m in chunk.modules() if isinstance(getattr(m, "router_replay", None), LayerReplay)]


def same(a, b):
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def r3_then_r2(flags):
    """Every claim about one layout; returns what only the whole job can judge."""
    from megatron.core import mpu
    job = Job(flags)
    native = job.run()
    # R3: the engine's routes in both passes
    old = job.run(job.shares, compare=True, captures=(captures := []))
    after_old = job.checked
    new = job.run(job.shares, forward_only=False)
    assert same(old, new), "R3: the ratio is not exactly 1"
    assert job.checked >= 2 * after_old and (after_old > 0) is bool(job.replay.layers)
    recomputed = job.checked > 2 * after_old
    assert all(g > 0 for g in job.router_gradients()), "a router lost its gradient"
    assert not native or not same(native, old), "the routes changed nothing: the test is void"
    assert {n for _, c in captures for n in c.own.layers} == set(job.replay.layers)
    parts = [compare(job.shares[n], c.own, job.batches[n][-1]) for n, c in captures]
    differ, tokens = mismatch_metrics(parts, mpu.get_pipeline_model_parallel_group())["routing/token_mismatch"]
    # R2: record, replay in two mini-steps, with a native pass in between
    store = RouteStore()
    old = job.run(record=True, captures=(captures := []))
    for number, capture in captures:
        store.put(number, capture.routes)
    shares = [store.get(n) for n in range(len(job.batches))]
    for _ in range(2):
        assert same(old, job.run(shares, forward_only=False)), "R2: the ratio is not exactly 1"
        job.run()
    assert all(set(s.layers) == set(job.replay.layers) for s in shares)
    return dict(layers=list(job.replay.layers), recomputed=recomputed, finite=all(torch.isfinite(x).all().item() for x in new),
                token_mismatch=(int(differ), int(tokens)))


def calibrated_noise(flags):
    """The native routes of 48 layers with the paper's flips: (router and token mismatch as the audit reports them, choices checked in the
    routers in a pass and how many there are)."""
    job = Job((*FP32, "--num-layers", "48", *flags))
    job.run(record=True, captures=(captures := []))
    native = {number: capture.routes for number, capture in captures}
    shares = [RoutesShare.of(flip(native[n].experts_TLK.numpy(), 8, seed=n), native[n].layers) for n in range(len(job.batches))]
    metrics = mismatch_metrics([compare(s, native[n], job.batches[n][-1]) for n, s in enumerate(shares)])
    old, checked = job.run(shares), job.checked
    assert same(old, job.run(shares, forward_only=False)), "the ratio is not exactly 1"
    reported = [float(total / count) for total, count in (metrics["routing/router_mismatch"], metrics["routing/token_mismatch"])]
    return reported, checked, sum(s.experts_TLK[..., 0].numel() for s in shares)


def missing_rows(flags):
    """A third of the engine's rows is missing: routed natively, the same in recompute and in every later pass."""
    job = Job(flags, missing=0.33)
    assert all(s.missing for s in job.shares)
    old = job.run(job.shares, record=True, compare=True, captures=(captures := []))
    assert same(old, job.run(job.shares, forward_only=False)), "a missing row was routed differently in the policy pass"
    recorded = [c.routes for _, c in captures]
    assert all((r.experts_TLK >= 0).all() and not r.missing for r in recorded)
    for share, used, (_, capture) in zip(job.shares, recorded, captures, strict=True):
        given = share.experts_TLK >= 0
        assert torch.equal(used.experts_TLK[given], share.experts_TLK[given])
        assert torch.equal(used.experts_TLK[~given], capture.own.experts_TLK[~given])
    with torch.no_grad():       # the weights move: missing rows keep the experts of the old-log-prob pass only if those are replayed
        for chunk in job.model:
            for router in _routers(chunk):
                router.weight.neg_()
    job.run(recorded, captures=(later := []), record=True)
    assert all(torch.equal(a.experts_TLK, c.routes.experts_TLK) for a, (_, c) in zip(recorded, later, strict=True))
    parts = [compare(job.shares[n], c.own, job.batches[n][-1]) for n, c in captures]
    missing, rows = mismatch_metrics(parts)["routing/fallback"]
    lost = sum(int((s.experts_TLK[:, 0, 0] < 0).sum()) for s in job.shares) * len(job.replay.layers)
    return float(missing) == lost and 0.2 < float(missing / rows) < 0.45


def expert_bias_counts(flags):
    """(tokens per expert that Megatron will balance with, those of the real rows) of each bound router."""
    job = Job(flags)
    job.config.finalize_model_grads_func = None     # it updates the bias and clears the counts
    job.run(job.shares, forward_only=False)
    found = []
    for chunk in job.model:
        for router in _routers(chunk):
            column = job.replay.layers.index(router.router_replay.layer)
            real = torch.cat([s.experts_TLK[~b[-1], column] for s, b in zip(job.shares, job.batches, strict=True)])
            found.append((router.local_tokens_per_expert.tolist(), torch.bincount(real.flatten().long(), minlength=8).float().tolist()))
    return found


def exception_in_mid_step(flags):
    job = Job(flags)
    old, run, calls = job.run(job.shares), job.replay.forward, []

    def failing(*args, **kwargs):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return run(*args, **kwargs)

    job.replay.forward = failing
    try:
        job.run(job.shares, forward_only=False)
    except KeyboardInterrupt:
        job.replay.forward = run
    from megatron_grpo.trainer.router_replay import _RUNNING
    assert _RUNNING.get() is None and len(calls) == 3
    return same(old, job.run(job.shares, forward_only=False))


def aux_loss_gradients(coefficient, no_aux_loss):
    """Router gradients of a policy pass under replay."""
    job = Job((*FP32, "--moe-router-load-balancing-type", "aux_loss", "--moe-aux-loss-coeff", coefficient, *FULL))
    job.replay._no_aux_loss = no_aux_loss
    job.run(job.shares, forward_only=False)
    return torch.stack([r.weight.main_grad for r in _routers(job.model[0])]).flatten().tolist()


def what_is_bound(flags):
    from megatron.core.transformer.moe.router import TopKRouter
    from megatron.core.utils import unwrap_model
    job = Job(flags)
    model = unwrap_model(job.model)[0]
    routers = [m for m in model.modules() if isinstance(m, TopKRouter)]
    return len(routers), len(_routers(model)), len(_routers(model.mtp))


def refusals():
    """The messages of what must not pass."""
    import pytest

    from megatron_grpo.settings import ConfigError
    from megatron_grpo.trainer.router_replay import RouterReplay
    job, messages = Job(FP32), []
    share, free = job.shares[0], job.batches[0][-1]

    def refused(error, routes, unrouted_T=free, **options):
        _, tokens, _, positions, params, _ = job.batches[0]
        with pytest.raises(error) as found, job.replay.forward(routes, unrouted_T=unrouted_T, **options), torch.no_grad():
            job.model[0](tokens, positions, None, packed_seq_params=params)
        messages.append(str(found.value))

    refused(ValueError, RoutesShare(share.experts_TLK[:, :2], (0, 1)))                  # layers 2, 3 have no routes
    refused(ValueError, RoutesShare(share.experts_TLK[:-1], share.layers))              # another micro-batch's
    refused(ValueError, None, free[:-1])
    _routers(job.model[0])[1].router_replay = None                                      # something bypasses replay
    refused(RuntimeError, share)
    refused(RuntimeError, None, record=True)
    for change in (dict(moe_router_fusion=True), dict(moe_expert_capacity_factor=1.0), dict(moe_layer_freq=[0, 1, 1, 1])):
        before = {k: getattr(job.config, k) for k in change}
        vars(job.config).update(change)
        with pytest.raises(ConfigError) as found:
            RouterReplay.bind(job.model)
        messages.append(str(found.value))
        vars(job.config).update(before)
    return messages


def gate_arithmetic():
    """Gate values, map and gradient on replayed experts, against Megatron's native path and a float64 formula."""
    from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function as topk

    from megatron_grpo.routing.audit import RouteSpec
    from megatron_grpo.trainer.router_replay import LayerReplay, RouterReplay
    T, E, K, generator = 50, 16, 4, torch.Generator().manual_seed(0)
    replay, layer, cases = RouterReplay(RouteSpec(1, (0,), K, E), [frozenset([0])]), LayerReplay(0), 0
    for function, pre, groups, bias, scale in (("softmax", False, None, False, None), ("softmax", True, None, False, None),
                                               ("softmax", True, 4, False, 1.5), ("sigmoid", False, None, False, None),
                                               ("sigmoid", False, None, True, 2.5), ("sigmoid", False, 4, True, 2.5),
                                               ("sqrtsoftplus", False, None, True, None)):
        logits = torch.randn(T, E, generator=generator)
        options = dict(use_pre_softmax=pre, num_groups=groups, group_topk=groups and 2, scaling_factor=scale, score_function=function,
                       expert_bias=torch.randn(E, generator=generator) if bias else None)
        weight = torch.randn(T, E, generator=generator)

        def run(routes, record=False):
            x = logits.clone().requires_grad_()
            with replay.forward(routes, record=record) as capture:
                probs, chosen = topk(x, K, router_replay=layer, **options)
            (probs * weight).sum().backward()
            return probs.detach(), chosen, x.grad, capture.routes

        x = logits.clone().requires_grad_()
        probs, chosen = topk(x, K, **options)
        (probs * weight).sum().backward()
        native = probs.detach(), chosen, x.grad
        *recorded, share = run(None, record=True)
        *replayed, _ = run(share)
        assert same(native, recorded) and same(native, replayed), function
        other = torch.rand(T, E, generator=generator).argsort(1)[:, :K]         # experts that are not the native ones
        probs, chosen, grad, _ = run(RoutesShare(other[:, None].to(torch.int8), (0,)))
        x = logits.double().requires_grad_()
        scores = {"softmax": lambda: x.softmax(-1) if pre else x.exp(), "sigmoid": x.sigmoid,
                  "sqrtsoftplus": lambda: torch.nn.functional.softplus(x).sqrt()}[function]().gather(1, other)
        gates = (scores if pre else scores / scores.sum(1, keepdim=True)) * (scale or 1)
        (gates * weight.gather(1, other)).sum().backward()
        assert torch.allclose(probs.gather(1, other).double(), gates, atol=1e-6) and torch.allclose(grad.double(), x.grad, atol=1e-5)
        assert torch.equal(chosen, torch.zeros(T, E, dtype=torch.bool).scatter(1, other, True))
        assert (grad.abs().sum(1) > 0).all()
        cases += 1
    return cases


def transformer_engine_checkpoint():
    """Transformer Engine's checkpoint is wrapped where Megatron looks it up, at each call."""
    import sys
    from types import ModuleType

    from megatron_grpo.trainer import router_replay as module
    names = ["transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.distributed"]
    te = {name: ModuleType(name) for name in names}
    te[names[0]].pytorch, te[names[1]].distributed = te[names[1]], te[names[2]]
    te[names[2]].checkpoint = lambda function, *args, **kwargs: (function, args, kwargs)
    sys.modules.update(te)
    try:
        module._keep_forward_in_recompute()
        module._keep_forward_in_recompute()
        forward = module.Forward(None, False, False, None, False, 2)
        token = module._RUNNING.set(forward)
        function, args, kwargs = te[names[2]].checkpoint(lambda: module._RUNNING.get(), 1, tp_group=2)
        module._RUNNING.reset(token)
        outside, _, _ = te[names[2]].checkpoint(lambda: module._RUNNING.get())
        return function() is forward, outside() is None, args, kwargs
    finally:
        for name in names:
            del sys.modules[name]
