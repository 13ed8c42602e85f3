"""Replay in the real model under Megatron's own schedules, on the ranks of the pool."""

import numpy as np
import torch
import torch.distributed as dist

from megatron_grpo.parallel.layout import Layout
from megatron_grpo.routing.codec import MISSING
from megatron_grpo.routing.placement import RoutesShare, RouteStore, place, unrouted
from tests.trainer import one_step

FP32 = ("--untie-embeddings-and-output-weights", "--moe-router-dtype", "fp32")
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
            routes = [rng.random((n - 1, len(spec.moe_layers), spec.num_experts)).argsort(-1)[..., :spec.topk].astype(np.int8) for n in lengths]
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
        running, layer = _RUNNING.get(), router.router_replay.layer
        if running is None or running.routes is None:
            return
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
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b))


def r3_then_r2(flags):
    """Every claim about one layout; returns what only the whole job can judge."""
    job = Job(flags)
    native = job.run()
    # R3: the engine's routes in both passes
    old = job.run(job.shares, compare=True, captures=(captures := []))
    after_old = job.checked
    new = job.run(job.shares, forward_only=False)
    assert same(old, new), "R3: the ratio is not exactly 1"
    assert job.checked >= 2 * after_old > 0
    recomputed = job.checked > 2 * after_old
    assert all(g > 0 for g in job.router_gradients()), "a router lost its gradient"
    assert not native or not same(native, old), "the routes changed nothing: the test is void"
    own = {n for _, c in captures for n in c.own.layers}
    assert own == set(job.replay.layers)
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
    return dict(layers=list(job.replay.layers), recomputed=recomputed, finite=all(torch.isfinite(x).all().item() for x in new))
