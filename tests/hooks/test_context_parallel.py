"""Example hooks on the shards of context-parallel ranks: the values and gradients of one rank."""

import argparse
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_grpo.advantages import AdvantageInputs, compute_advantages
from megatron_grpo.config import AdvantageConfig, GRPOConfig
from megatron_grpo.hooks import HookConfig, load_hooks
from megatron_grpo.losses.inputs import LossInputs, StepCounts
from megatron_grpo.losses.policy_loss import policy_loss
from megatron_grpo.parallel.layout import Layout

EXAMPLES = Path(__file__).parents[2] / "examples" / "hooks"
LENGTHS, PROMPTS = [11, 4, 1 + 1, 23], [3, 3, 1, 15]
HOOKS = (dict(custom_pg_loss_reducer_path=f"{EXAMPLES}/reducer.py:sqrt_length"),
         dict(custom_pg_loss_reducer_path=f"{EXAMPLES}/slime_style.py:get_dr_grpo_reducer"),
         dict(custom_tis_function_path=f"{EXAMPLES}/slime_style.py:clip_both_ends"),
         dict(custom_pg_loss_path=f"{EXAMPLES}/pg_loss.py:ppo_with_positive_nll"))


def on_this_rank(kind, cp):
    """The loss addend and the gradient by stream position for each of HOOKS, then the advantages of slime's function."""
    rank, group = dist.get_rank(), dist.group.WORLD
    args = argparse.Namespace(calculate_per_token_loss=False, tis_clip=1.2, tis_clip_low=0.9, kl_coef=0.5)
    layout = Layout(tuple(LENGTHS), cp_size=cp, kind=kind)
    generator = torch.Generator().manual_seed(5)
    streams = {name: -torch.rand(layout.num_tokens, generator=generator) for name in ("logp", "old", "rollout", "ref", "advantage")}
    trained = torch.zeros(layout.num_tokens, dtype=torch.bool)
    where = layout.response_index(PROMPTS)
    trained[where] = torch.rand(len(where), generator=generator) > 0.2
    shards = {name: layout.shard(x, rank) for name, x in streams.items()}
    index, mask_T = layout.index(rank), layout.shard(trained, rank, False)
    seq = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
    tokens_S = torch.zeros(len(LENGTHS)).index_add(0, seq, trained.float())
    where_T = dict(position_T=torch.where(index < 0, -1, layout.positions(rank)), length_S=torch.tensor(LENGTHS),
                   prompt_length_S=torch.tensor(PROMPTS), seq_T=layout.seq_ids(rank), mask_T=mask_T, num_seqs=len(LENGTHS), cp_group=group)
    out = []
    for config in HOOKS:
        logp_T = shards["logp"].clone().requires_grad_()
        x = LossInputs(
            logp_T=logp_T, old_logp_T=shards["old"], rollout_logp_T=shards["rollout"], advantage_T=shards["advantage"] + 0.5,
            counts=StepCounts(tokens=40, sequences=9, rollouts=9, prompts=3), seq_tokens_S=tokens_S, rollout_tokens_S=tokens_S,
            prompt_tokens_S=tokens_S, **where_T)
        loss = policy_loss(x, GRPOConfig(), load_hooks(HookConfig(**config), args)).loss
        grad_T = torch.autograd.grad(loss, logp_T)[0]
        out.append((loss.item(), {int(i): float(g) for i, g in zip(index, grad_T, strict=True) if i >= 0}))
    x = AdvantageInputs(
        reward_N=torch.tensor([1.0, 0.0, 3.0, 2.0]), group_N=torch.tensor([0, 0, 1, 1]), valid_N=torch.ones(4, dtype=torch.bool),
        sample_S=torch.arange(4), old_logp_T=shards["old"], ref_logp_T=shards["ref"], dp_cp_group=group, **where_T)
    hooks = load_hooks(HookConfig(custom_advantage_function_path=f"{EXAMPLES}/slime_style.py:rewards_less_kl"), args)
    config = GRPOConfig(advantage=AdvantageConfig(advantage_std="none", kl_coef=0.5, kl_penalty="immediate", normalize_advantages=True))
    advantage_T, _ = compute_advantages(x, config, hooks)
    out.append((0.0, {int(i): float(a) for i, a in zip(index, advantage_T, strict=True) if i >= 0}))
    return out


@pytest.mark.parametrize("kind, cp", [("zigzag", 2), ("contiguous", 4)])
def test_same_as_on_one_rank(pool, kind, cp):
    alone = pool.run(on_this_rank, "zigzag", 1, ranks=1)[0]
    ranks = pool.run(on_this_rank, kind, cp, ranks=cp)
    for number, (value, by_place) in enumerate(alone):
        assert sum(rank[number][0] for rank in ranks) == pytest.approx(value, rel=1e-5)
        got = {place: v for rank in ranks for place, v in rank[number][1].items()}
        assert [got[p] for p in by_place] == pytest.approx(list(by_place.values()), rel=1e-5, abs=1e-7)
        assert any(by_place.values())
