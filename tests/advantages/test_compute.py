from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron_grpo.advantages import AdvantageInputs, compute_advantages
from megatron_grpo.algorithms import recipe_config
from megatron_grpo.config import AdvantageConfig, GRPOConfig, KLConfig
from megatron_grpo.parallel.layout import Layout
from megatron_grpo.recipes import RECIPES
from megatron_grpo.refusals import GROUP_ESTIMATORS


def batch(rewards, groups, lengths, mask=None, **more):
    """Responses only: `lengths` tokens each, all trained on unless `mask` says otherwise."""
    seq = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    return AdvantageInputs(
        reward_N=torch.tensor(rewards), group_N=torch.tensor(groups), valid_N=torch.ones(len(rewards), dtype=torch.bool),
        sample_S=torch.arange(len(rewards)), seq_T=seq, mask_T=torch.tensor(mask or [True] * len(seq)), num_seqs=len(lengths), **more)


def run(x, kl=KLConfig(), **settings):
    return compute_advantages(x, GRPOConfig(advantage=AdvantageConfig(**settings), kl=kl))


def test_grpo_is_spread_over_tokens_and_0_where_masked():
    advantage_T, metrics = run(batch([0.0, 1.0], [3, 3], [2, 3], mask=[True, True, True, False, True]), advantage_eps=0.0)
    assert advantage_T.tolist() == pytest.approx([-0.5 ** 0.5] * 2 + [0.5 ** 0.5, 0, 0.5 ** 0.5])
    assert advantage_T.dtype == torch.float32
    assert [float(v) for v in metrics["zero_std_groups"]] == [0, 1]
    assert [float(v) for v in metrics["advantage"]] == pytest.approx([0, 4])


def test_gdpo_keeps_what_the_sum_loses():
    """The two cases of arXiv 2601.05242: summed rewards (0, 1) and (0, 2) both give +-0.7071; GDPO gives +-0.7071 and +-1.4142."""
    def both(second):
        x = batch([0.0, 1.0 + second], [0, 0], [1, 1],
                  rewards_N={"a": torch.tensor([0.0, 1.0]), "b": torch.tensor([0.0, second])})
        summed, _ = run(x, advantage_eps=0.0)
        decoupled, _ = run(x, advantage_estimator="gdpo", gdpo_reward_keys=("a", "b"), gdpo_batch_norm="none", advantage_eps=0.0)
        return summed.tolist(), decoupled.tolist()

    assert both(0.0) == (pytest.approx([-0.70711, 0.70711], abs=1e-5), pytest.approx([-0.70711, 0.70711], abs=1e-5))
    assert both(1.0) == (pytest.approx([-0.70711, 0.70711], abs=1e-5), pytest.approx([-1.41421, 1.41421], abs=1e-5))


def test_gdpo_batch_norm_counts_responses_not_tokens():
    x = batch([0.0] * 4, [0, 0, 1, 1], [1, 9, 2, 3], rewards_N={
        "a": torch.tensor([0.0, 1.0, 0.0, 1.0]), "b": torch.tensor([1.0, 0.0, 0.0, 1.0])})
    keys = dict(advantage_estimator="gdpo", gdpo_reward_keys=("a", "b"), advantage_eps=0.0)
    raw, _ = run(x, gdpo_reward_weights=(1.0, 0.5), gdpo_batch_norm="none", **keys)
    first = torch.tensor([0, 1, 10, 12])        # one token of each response
    per_response = raw[first]
    assert per_response.tolist() == pytest.approx([-0.35355, 0.35355, -1.06066, 1.06066], abs=1e-5)
    got, metrics = run(x, gdpo_reward_weights=(1.0, 0.5), **keys)
    assert got[first].tolist() == pytest.approx((per_response / per_response.std()).tolist())
    over_tokens, _ = run(x, gdpo_reward_weights=(1.0, 0.5), gdpo_batch_norm="tokens", **keys)
    assert over_tokens.mean().item() == pytest.approx(0, abs=1e-6) and over_tokens.std().item() == pytest.approx(1, abs=1e-5)
    assert [float(v) for v in metrics["zero_std_groups"]] == [0, 4]
    with pytest.raises(ValueError, match="--gdpo-reward-keys c: 4 of the 4 samples of this step have no reward of that name"):
        run(x, **keys | dict(gdpo_reward_keys=("a", "c")))
    x.rewards_N["b"][2] = torch.nan
    with pytest.raises(ValueError, match="--gdpo-reward-keys b: 1 of the 4 samples"):
        run(x, **keys)
    assert run(replace(x, valid_N=torch.tensor([True, True, False, True])), **keys)[0].isfinite().all()     # an aborted one has none


def test_reinforce_plus_plus_returns_by_hand():
    # KL 1, 2, -, 4 with a tool token in between: from the end 8 - 4, 8 - 4 - 2, 8 - 4 - 2 - 1 at gamma 1 and coefficient 1
    x = batch([8.0], [0], [4], mask=[True, True, False, True], kl_T=torch.tensor([1.0, 2.0, float("nan"), 4.0]))
    rpp = dict(advantage_estimator="reinforce_plus_plus", kl_coef=1.0)
    assert run(x, **rpp)[0].tolist() == [1, 2, 0, 4]
    # gamma 0.5 decays between policy tokens only, or over the tool token too
    assert run(x, gamma=0.5, **rpp)[0].tolist() == [-1 + 0 / 2, -2 + 4 / 2, 0, 4]
    assert run(x, gamma=0.5, gamma_tool_tokens=True, **rpp)[0].tolist() == [-1 + (-2 + 4 / 4) / 2, -2 + 4 / 4, 0, 4]
    trailing = replace(x, mask_T=torch.tensor([True, True, True, False]), kl_T=torch.zeros(4))
    assert run(trailing, gamma=0.5, gamma_tool_tokens=True, **rpp)[0].tolist() == [2, 4, 8, 0]


def test_a_fully_masked_sample_is_0_and_changes_nothing():
    two = batch([8.0, 1.0], [0, 1], [2, 3], kl_T=torch.tensor([0.5, 0.25, 1.0, 2.0, 3.0]))
    three = batch([8.0, 1.0, 5.0], [0, 1, 2], [2, 3, 2], mask=[True] * 5 + [False] * 2,
                  kl_T=torch.tensor([0.5, 0.25, 1.0, 2.0, 3.0, float("inf"), float("nan")]))
    for settings in (dict(kl_coef=0.1), dict(kl_coef=0.1, gamma=0.9), dict(normalize_advantages=True)):
        alone, _ = run(two, advantage_estimator="reinforce_plus_plus", **settings)
        together, _ = run(three, advantage_estimator="reinforce_plus_plus", **settings)
        assert together[:5].tolist() == pytest.approx(alone.tolist())
        assert together[5:].tolist() == [0, 0]


def test_kl_in_the_reward_in_its_three_forms():
    x = batch([1.0, 2.0], [0, 0], [2, 1], old_logp_T=torch.tensor([-1.0, -1.0, -2.0]), ref_logp_T=torch.tensor([-2.0, -1.5, -1.0]))
    kl = [1.0, 0.5, -1.0]
    assert run(x, advantage_estimator="reinforce", kl_coef=0.1, kl_penalty="immediate")[0].tolist() == pytest.approx(
        [1 - 0.1 * kl[0], 1 - 0.1 * kl[1], 2 - 0.1 * kl[2]])
    assert run(x, advantage_estimator="reinforce", kl_coef=0.1)[0].tolist() == pytest.approx([0.85, 0.85, 2.1])
    assert run(x, advantage_estimator="rloo", kl_coef=0.1)[0].tolist() == pytest.approx([0.85 - 2.1] * 2 + [2.1 - 0.85])
    k2 = run(x, advantage_estimator="reinforce", kl_coef=1.0, kl_penalty="immediate", kl=KLConfig(kl_loss_type="k2"))[0]
    assert k2.tolist() == pytest.approx([1 - 0.5, 1 - 0.125, 2 - 0.5])
    with pytest.raises(ValueError, match="--kl-coef needs the log-probs"):
        run(replace(x, ref_logp_T=None), advantage_estimator="reinforce", kl_coef=0.1)


def test_whitening_and_clipping_follow():
    x = batch([0.0, 1.0, 2.0, 9.0], [0, 1, 2, 3], [1, 1, 1, 1])
    settings = dict(advantage_estimator="reinforce", normalize_advantages=True)
    whitened, _ = run(x, **settings)
    assert whitened.mean().item() == pytest.approx(0, abs=1e-6) and whitened.std().item() == pytest.approx(1, abs=1e-6)
    assert run(x, advantage_clip=1.0, **settings)[0].tolist() == pytest.approx(whitened.clamp(-1, 1).tolist())
    population, _ = run(x, whiten_std="population", **settings)
    assert population.std(unbiased=False).item() == pytest.approx(1, abs=1e-6)


def test_batch_std_and_gpg():
    x = batch([0.0, 1.0, 0.0, 0.0], [0, 0, 1, 1], [1, 1, 1, 1])
    assert run(x, advantage_std="batch", advantage_eps=0.0)[0].tolist() == pytest.approx([-1, 1, 0, 0])       # std of the batch 0.5
    assert run(x, advantage_estimator="gpg")[0].tolist() == pytest.approx([-2, 2, 0, 0])        # 4 samples, 1 with a reward


def test_hook_and_advantages_as_rewards():
    x = batch([0.0, 1.0], [0, 0], [1, 2])
    assert run(replace(x, is_advantage=True))[0].tolist() == [0, 1, 1]

    def hook(inputs, config):
        assert inputs.estimate_N.tolist() == pytest.approx([-0.5, 0.5])
        return 2 * inputs.estimate_N[inputs.sample_S][inputs.seq_T]

    config = GRPOConfig(advantage=AdvantageConfig(advantage_std="none"))
    assert compute_advantages(x, config, SimpleNamespace(advantage=hook))[0].tolist() == [-1, 1, 1]


# ---- every algorithm, whole ----------------------------------------------------------------------------------------------------


def whole(rewards, groups, seed=0, garbage=False, **changes):
    """Four tokens a sample, the third a tool's; every named reward is the reward, and every stream is filled."""
    n, g = len(rewards), torch.Generator().manual_seed(seed)
    logp = -torch.rand(2, n, 4, generator=g)
    if garbage:
        logp[:, :, 2] = torch.tensor([torch.nan, -torch.inf])[:, None]
    reward_N = torch.as_tensor(rewards)
    x = batch([0.0] * n, groups, [4] * n, mask=[True, True, False, True] * n, old_logp_T=logp[0].flatten(), ref_logp_T=logp[1].flatten(),
              rollout_logp_T=logp[0].flatten(), rewards_N={"a": reward_N, "b": 2 * reward_N})
    return replace(x, **dict(reward_N=reward_N) | changes)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("value", [0.97, -0.1, 1e6 + 0.1, 3e-7])
def test_groups_without_signal_give_exactly_zero(name, value):
    """Equal rewards up to float32's rounding, and groups of one; without a baseline the reward itself, without a KL whitened to 0."""
    config = recipe_config(name)
    config = replace(config, advantage=replace(config.advantage, kl_coef=0.0))
    rewards = torch.tensor([value] * 8 + [2 * value, -value], dtype=torch.float32)
    rewards[:8] *= 1 + torch.tensor([0, 1, -1, 0, 1, 0, -1, 0]) * torch.finfo(torch.float32).eps
    advantage_T, metrics = compute_advantages(whole(rewards, [0] * 8 + [1, 2]), config)
    if config.advantage.advantage_estimator in GROUP_ESTIMATORS:
        assert (advantage_T == 0).all() and [float(v) for v in metrics["zero_std_groups"]][0] in (3, 6)
    else:
        want = rewards.repeat_interleave(4).where(whole(rewards, [0] * 10).mask_T, 0)
        if config.advantage.normalize_advantages:
            trained = want[want != 0]
            want = ((want - trained.mean()) / trained.std()).where(want != 0, 0) if abs(value) > 1e-3 else advantage_T
        torch.testing.assert_close(advantage_T, want, rtol=1e-4, atol=1e-4)
    alone, _ = compute_advantages(whole(rewards[:8], [0] * 8), config)
    assert alone.isfinite().all() and (config.advantage.advantage_estimator == "reinforce" or (alone == 0).all())


@pytest.mark.parametrize("name", RECIPES)
def test_order_aborted_samples_and_what_the_mask_hides_change_nothing(name):
    config, groups = recipe_config(name), [0, 0, 0, 1, 1, 2, 0]
    rewards = torch.tensor([1.0, 0.0, 0.5, 3.0, -1.0, 2.0, 0.25])
    plain = compute_advantages(whole(rewards, groups), config)[0].view(7, 4)
    assert plain.isfinite().all() and (plain[:, 2] == 0).all() and (plain[:, 0] != 0).any()
    torch.testing.assert_close(compute_advantages(whole(rewards, groups, garbage=True), config)[0].view(7, 4), plain)

    order = torch.tensor([4, 2, 6, 0, 5, 3, 1])
    x = whole(rewards[order], [groups[i] for i in order])
    streams = {k: getattr(whole(rewards, groups), k).view(7, 4)[order].flatten() for k in ("old_logp_T", "ref_logp_T", "rollout_logp_T")}
    torch.testing.assert_close(compute_advantages(replace(x, **streams), config)[0].view(7, 4), plain[order])

    x, valid = whole(torch.cat([rewards, torch.tensor([torch.nan, 99.0])]), groups + [0, 7]), torch.tensor([True] * 7 + [False] * 2)
    streams = {k: torch.cat([getattr(whole(rewards, groups), k), torch.full((8,), torch.nan)]) for k in streams}
    x = replace(x, valid_N=valid, mask_T=x.mask_T & valid.repeat_interleave(4), **streams)
    more = compute_advantages(x, config)[0].view(9, 4)
    torch.testing.assert_close(more[:7], plain)
    assert (more[7:] == 0).all()


SETTINGS = (dict(), dict(advantage_estimator="opo"), dict(advantage_estimator="rloo", kl_coef=0.1),
            dict(advantage_estimator="reinforce_plus_plus", kl_coef=0.1, gamma=0.97, normalize_advantages=True),
            dict(advantage_estimator="reinforce_plus_plus", kl_coef=0.1, gamma=0.9, gamma_tool_tokens=True),
            dict(advantage_estimator="gdpo", gdpo_reward_keys=("a", "b"), gdpo_batch_norm="tokens", advantage_clip=1.0))


def over_ranks(dp, cp, kind, whole_groups):
    """This rank's advantages by stream position of every sample that it holds, for all SETTINGS.

    Samples go round-robin over data-parallel ranks with the rewards of the whole step on each, or group by group with the rewards
    of its own groups on each.
    """
    rank = dist.get_rank()
    cp_groups = [dist.new_group(list(range(d * cp, d * cp + cp))) for d in range(dp)]
    dp_groups = [dist.new_group(list(range(c, dp * cp, cp))) for c in range(cp)]
    d, c = divmod(rank, cp)
    lengths, prompts, groups = [9, 4, 12, 7, 1 + 3, 30, 5, 6], [3, 2, 5, 6, 1, 2, 4, 1], [0, 0, 1, 1, 1, 2, 3, 3]
    generator = torch.Generator().manual_seed(7)
    rewards = torch.randn(8, generator=generator)
    named = {k: torch.randn(8, generator=generator) for k in "ab"}
    streams = [(torch.randn(n, generator=generator), torch.randn(n, generator=generator), torch.rand(n, generator=generator) > 0.3)
               for n in lengths]
    mine = [i for i in range(8) if (groups[i] if whole_groups else i) % dp == d]
    known = mine if whole_groups else list(range(8))
    layout = Layout(tuple(lengths[i] for i in mine), cp_size=cp, kind=kind)
    old, ref = (layout.shard(torch.cat([streams[i][k] for i in mine]), c) for k in (0, 1))
    trained = torch.zeros(layout.num_tokens, dtype=torch.bool)
    where = layout.response_index([prompts[i] for i in mine])
    trained[where] = torch.cat([streams[i][2] for i in mine])[where]
    index = layout.index(c)
    x = AdvantageInputs(
        reward_N=rewards[known], group_N=torch.tensor(groups)[known], valid_N=torch.ones(len(known), dtype=torch.bool),
        sample_S=torch.tensor([known.index(i) for i in mine]), seq_T=layout.seq_ids(c), mask_T=layout.shard(trained, c, False),
        num_seqs=len(mine), rewards_N={k: v[known] for k, v in named.items()}, old_logp_T=old, ref_logp_T=ref,
        position_T=torch.where(index < 0, -1, layout.positions(c)), length_S=torch.tensor([lengths[i] for i in mine]),
        prompt_length_S=torch.tensor([prompts[i] for i in mine]), chunk_T=layout.chunk_ids(c),
        columns=tuple(layout.columns(r) for r in range(cp)), cp_group=cp_groups[d], dp_cp_group=dist.group.WORLD,
        sample_group=dp_groups[c] if whole_groups else None)
    starts = [sum(lengths[:i]) for i in range(8)]
    place = torch.cat([torch.arange(lengths[i]) + starts[i] for i in mine])
    out = []
    for settings in SETTINGS:
        advantage_T, _ = compute_advantages(x, GRPOConfig(advantage=AdvantageConfig(**settings)))
        out.append({int(place[p]): float(a) for p, a in zip(index, advantage_T, strict=True) if p >= 0})
    return out


@pytest.fixture(scope="module")
def alone(pool):
    return pool.run(over_ranks, 1, 1, "zigzag", False, ranks=1)[0]


@pytest.mark.parametrize("dp, cp, kind, whole_groups", [(2, 1, "zigzag", False), (2, 1, "zigzag", True), (1, 2, "contiguous", False),
                                                        (2, 2, "zigzag", True), (1, 4, "zigzag", False)])
def test_same_on_every_layout(pool, alone, dp, cp, kind, whole_groups):
    ranks = pool.run(over_ranks, dp, cp, kind, whole_groups, ranks=dp * cp)
    for number, want in enumerate(alone):
        got = {place: value for rank in ranks for place, value in rank[number].items()}
        assert got.keys() == want.keys()
        assert [got[p] for p in want] == pytest.approx(list(want.values()), abs=2e-6), SETTINGS[number]
