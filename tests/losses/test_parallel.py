"""The loss on 2 and 4 context-parallel ranks is that on one, whatever shard of the tokens each rank holds."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from megatron_grpo.losses.policy_loss import policy_loss
from megatron_grpo.losses.renormalize import prepare_step
from megatron_grpo.parallel.collectives import sequence_sums
from tests.losses.cases import config, leaf, random_batch, run, select
from tests.losses.recipes import RECIPES

LENGTHS = [5, 1, 9, 4, 7, 2]


def owners(ranks, seed):
    """Which rank holds each token: random, but with four ranks the last holds none, and with two and an odd seed the first."""
    g = torch.Generator().manual_seed(seed)
    owner = torch.randint(ranks, (sum(LENGTHS),), generator=g)
    if ranks == 4:
        owner[owner == 3] = 1
    elif seed % 2:
        owner[:] = 1
    return owner


def shard(x, rank, ranks, seed):
    own = (owners(ranks, seed) == rank).nonzero().flatten()
    return replace(select(x, own), cp_group=dist.group.WORLD), own


def every_recipe(seed):
    """(loss, gradient of the own tokens, metrics, maxima) of every recipe on this rank."""
    rank, ranks, out = dist.get_rank(), dist.get_world_size(), {}
    for name, recipe in RECIPES.items():
        x, _ = shard(random_batch(LENGTHS, seed), rank, ranks, seed)
        loss, gradient, o = run(x, config(**recipe))
        means = {k: [float(v) for v in pair] for k, pair in o.metrics.items()}
        out[name] = (loss, gradient, means, {k: float(v) for k, v in o.maxima.items()})
    return out


@pytest.mark.parametrize("ranks, seed", [(2, 0), (2, 1), (4, 2)])
def test_every_recipe(pool, ranks, seed):
    results = pool.run(every_recipe, seed, ranks=ranks)
    x = random_batch(LENGTHS, seed)
    for name, recipe in RECIPES.items():
        loss, gradient, o = run(x, config(**recipe))
        parts = [r[name] for r in results]
        torch.testing.assert_close(sum(p[0] for p in parts), loss, msg=lambda m: f"{name}: loss: {m}")
        got = torch.zeros_like(gradient)
        for rank, part in enumerate(parts):
            got[owners(ranks, seed) == rank] = part[1]
        torch.testing.assert_close(got, gradient, rtol=1e-9, atol=1e-12, msg=lambda m: f"{name}: gradient: {m}")
        for metric, pair in o.metrics.items():
            total = [sum(p[2][metric][i] for p in parts) for i in (0, 1)]
            assert total == pytest.approx([float(v) for v in pair], rel=1e-6, abs=1e-6), f"{name}: {metric}"
        for metric, value in o.maxima.items():
            assert max(p[3][metric] for p in parts) == pytest.approx(float(value)), f"{name}: {metric}"


def counted(recipes):
    """How many collectives each recipe's forward and backward enter."""
    out = {}
    for name in recipes:
        calls = []
        saved = {f: getattr(dist, f) for f in ("all_reduce", "all_gather_into_tensor")}
        try:
            for f, original in saved.items():
                setattr(dist, f, lambda *a, original=original, f=f, **k: (calls.append(f), original(*a, **k))[1])
            x, _ = shard(random_batch(LENGTHS, 0), dist.get_rank(), dist.get_world_size(), 0)
            if name in ("ppo", "gspo", "opsm"):
                x = replace(x, rollout_logp_T=None)         # without the engine's log-probs there is no mismatch to report
            loss = policy_loss(x, config(**RECIPES[name])).loss
            forward = len(calls)
            torch.autograd.grad(loss, x.logp_T)
            out[name] = (forward, len(calls) - forward)
        finally:
            for f, original in saved.items():
                setattr(dist, f, original)
    return out


def test_one_collective_a_micro_batch(pool):
    expected = {"ppo": (0, 0), "opsm": (1, 0), "gspo": (1, 1), "gspo seq_tis": (1, 1), "gspo_token": (1, 0), "seq_mask_tis": (1, 0),
                "rejection": (1, 0), "gmpo tis": (1, 1), "clip_cov": (2, 0), "kl_cov": (2, 0)}
    assert pool.run(counted, list(expected), ranks=2) == [expected, expected]


def sums_gradient():
    """d/dx of (rank + 1) * sum of y^2, y the sums: every rank's weight reaches every rank's tokens."""
    rank = dist.get_rank()
    x = torch.full((rank, 2), 1.0 + rank).double().requires_grad_()        # rank 0 holds no token
    y = sequence_sums(x, torch.zeros(rank, dtype=torch.int64), 2, dist.group.WORLD)
    gradient, = torch.autograd.grad((rank + 1) * y.square().sum(), x)
    return y.detach(), gradient


def test_sequence_sums(pool):
    for rank, (y, gradient) in enumerate(pool.run(sums_gradient, ranks=3)):
        assert y.tolist() == [[8.0, 8.0], [0.0, 0.0]]               # 1 token of 2 and 2 tokens of 3
        assert gradient.tolist() == [[2 * 8.0 * 6] * 2] * rank      # weights 1 + 2 + 3


# ---- a step over data-parallel and context-parallel ranks ------------------------------------------------------------------------

STEP = dict(tis=dict(correction=dict(use_tis=True, tis_mode="icepop", tis_clip_low=0.7, tis_clip=1.4, renormalize_masked=True),
                     reducer="rollout_mean"),
            error=dict(correction=dict(seq_logprob_error_threshold=1.25, renormalize_masked=True), reducer="seq_mean_token_mean"),
            normalized=dict(correction=dict(use_tis=True, tis_mode="seq_tis", tis_batch_normalize=True), reducer="token_mean"))


def siblings():
    """Samples 0 and 3 are cut from one rollout; 4 and 5 answer one prompt."""
    return torch.tensor([0, 1, 2, 0, 3, 4]), torch.tensor([0, 1, 2, 0, 3, 3])


def step_of(x, sequences, cfg, group):
    """Loss and gradient of the micro-batches `sequences` (lists) after prepare_step. The gradient is of all tokens of x."""
    rollouts, prompts = siblings()
    parts, tokens = [], []
    for own in sequences:
        own = torch.tensor(own, dtype=torch.int64)
        index = torch.cat([(x.seq_T == s).nonzero().flatten() for s in own]) if len(own) else torch.arange(0)
        parts.append(select(x, index, own))
        tokens.append(index)
    prepared, metrics = prepare_step([replace(p, cp_group=x.cp_group) for p in parts], cfg, [rollouts[torch.tensor(s)] for s in sequences],
                                     [prompts[torch.tensor(s)] for s in sequences], 5, 4, group)
    total, gradient = torch.zeros(()).double(), torch.zeros(len(x.seq_T)).double()
    for p, index in zip(prepared, tokens, strict=True):
        loss, gradient[index], _ = run(p, cfg)
        total += loss
    return total, gradient, [float(v) for v in metrics["step_masked"]]


def step_rank(recipe):
    """Two data-parallel replicas with one and two micro-batches, two context-parallel ranks each."""
    rank = dist.get_rank()
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    x = random_batch(LENGTHS, 5)
    own = (owners(2, 4) == rank % 2).nonzero().flatten()
    local = replace(select(x, own), cp_group=groups[rank // 2])
    total, gradient, masked = step_of(local, [[0, 2], [5]] if rank < 2 else [[3], [1, 4]], config(**STEP[recipe]), dist.group.WORLD)
    return total, own, gradient, masked


@pytest.mark.parametrize("recipe", sorted(STEP))
def test_prepared_step(pool, recipe):
    want, gradient, masked = step_of(leaf(random_batch(LENGTHS, 5)), [[0, 1, 2, 3, 4, 5]], config(**STEP[recipe]), None)
    results = pool.run(step_rank, recipe, ranks=4)
    torch.testing.assert_close(sum(r[0] for r in results), want)
    got = torch.zeros_like(gradient)
    for _, own, part, _ in results:
        got[own] += part
    torch.testing.assert_close(got, gradient)
    assert [sum(r[3][i] for r in results) for i in (0, 1)] == masked
