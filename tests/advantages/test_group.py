import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_grpo.advantages.group import Groups, group_advantage


def advantage(rewards, ids=None, valid=None, rollouts=None, **options):
    groups = Groups.of(torch.tensor(rewards, dtype=torch.float64), torch.tensor(ids or [0] * len(rewards)),
                       None if valid is None else torch.tensor(valid), None if rollouts is None else torch.tensor(rollouts))
    return group_advantage(groups, **options).tolist()


def test_grpo_by_hand():
    # mean 0.25, sample std sqrt(3 * 0.0625 + 0.5625) / sqrt(3) = 0.5, population std sqrt(0.1875)
    assert advantage([0, 1, 0, 0], eps=0.0) == pytest.approx([-0.5, 1.5, -0.5, -0.5])
    assert advantage([0, 1, 0, 0], std="population", eps=0.0) == pytest.approx([-0.25 / math.sqrt(0.1875)] + [0.75 / math.sqrt(0.1875)]
                                                                               + [-0.25 / math.sqrt(0.1875)] * 2)
    assert advantage([0, 1, 0, 0], std="none") == pytest.approx([-0.25, 0.75, -0.25, -0.25])
    assert advantage([0, 1, 0, 0], eps=0.5) == pytest.approx([-0.25, 0.75, -0.25, -0.25])


def test_leave_one_out_by_hand():
    # others of the first: 1, 3, 5: mean 3, sample std 2
    got = advantage([7, 1, 3, 5], baseline="leave_one_out", std="leave_one_out", eps=0.0)
    assert got[0] == pytest.approx((7 - 3) / 2)
    # a group of two has one other sample, without a std: not divided
    assert advantage([1, 4], baseline="leave_one_out", std="leave_one_out") == pytest.approx([-3, 3])
    # all others equal: not divided
    assert advantage([1, 0, 0], baseline="leave_one_out", std="leave_one_out")[0] == pytest.approx(1)


@pytest.mark.parametrize("n", [2, 3, 8])
def test_rloo_is_the_scaled_mean_baseline(n):
    rewards = [0.1 * i * i for i in range(n)]
    mean = sum(rewards) / n
    assert advantage(rewards, baseline="leave_one_out", std="none") == pytest.approx([n / (n - 1) * (r - mean) for r in rewards])


def test_opo_and_pass_at_k_by_hand():
    groups = Groups.of(torch.tensor([1.0, 0.0, 0.0]), torch.tensor([0, 0, 0]))
    got = group_advantage(groups, baseline="length", std="none", tokens_N=torch.tensor([1.0, 2.0, 1.0]))
    assert got.tolist() == pytest.approx([0.75, -0.25, -0.25])
    assert advantage([0.2, 0.9, 0.5, 0.9], baseline="second_best", std="none") == [0, 0, 0, 0]
    assert advantage([0.2, 0.9, 0.5, 0.1], baseline="second_best", std="none") == pytest.approx([0, 0.4, 0, 0])


@pytest.mark.parametrize("options", [dict(std=s, baseline=b) for s in ("sample", "population", "leave_one_out", "none")
                                     for b in ("mean", "leave_one_out", "second_best")])
@pytest.mark.parametrize("value", [0.97, 0.1, 1e-7, -3e8])
def test_equal_rewards_give_exactly_zero(options, value):
    assert advantage([value] * 8, **options) == [0.0] * 8
    as_float32 = torch.tensor([value] * 7, dtype=torch.float32)
    assert group_advantage(Groups.of(as_float32, torch.zeros(7, dtype=torch.int64)), **options).abs().max() == 0


def test_rewards_that_differ_by_rounding_are_equal():
    summed = torch.tensor([0.1 + 0.2 + 0.3, 0.3 + 0.2 + 0.1, 0.6], dtype=torch.float32) + torch.tensor([0, 6e-8, 0])
    assert len(summed.unique()) > 1
    assert group_advantage(Groups.of(summed, torch.zeros(3, dtype=torch.int64))).tolist() == [0, 0, 0]
    assert advantage([0.6, 0.60001]) != [0, 0]


def test_groups_of_one():
    assert advantage([0.7, 1, 0], ids=[5, 2, 2])[0] == 0
    assert advantage([0.7, 1, 0], ids=[5, 2, 2], singleton="reward", eps=0.0)[0] == pytest.approx(0.7)
    assert advantage([0.7], singleton="reward", std="none", baseline="leave_one_out") == pytest.approx([0.7])


def test_aborted_samples_are_in_no_statistic():
    whole = advantage([0, 1, 2], ids=[4, 4, 4])
    with_aborted = advantage([0, float("nan"), 1, 2, 9], ids=[4, 4, 4, 4, 7], valid=[True, False, True, True, False])
    assert with_aborted == pytest.approx([whole[0], 0, whole[1], whole[2], 0])
    groups = Groups.of(torch.tensor([0.0, 1.0, 2.0]), torch.tensor([0, 0, 1]), torch.tensor([False, False, True]))
    assert groups.count_flat() == 2


def test_siblings_count_once():
    # rollouts 0 (two samples), 1, 2: mean (0 + 3 + 6) / 3, not (0 + 0 + 3 + 6) / 4
    assert advantage([0, 0, 3, 6], rollouts=[0, 0, 1, 2], std="none") == pytest.approx([-3, -3, 0, 3])
    # the same rollout id in two groups is two rollouts
    assert advantage([0, 2, 1, 3], ids=[0, 0, 1, 1], rollouts=[0, 1, 0, 1], std="none") == pytest.approx([-1, 1, -1, 1])
    # siblings of one rollout are a group of one, whatever their rewards and however their shares of 1 round
    for baseline, std in itertools.product(("mean", "leave_one_out", "length", "second_best"), ("sample", "leave_one_out", "none")):
        assert advantage([0, 1] * 24 + [0], rollouts=[5] * 49, baseline=baseline, std=std, tokens_N=torch.ones(49)) == [0] * 49
    assert advantage([1, 3], rollouts=[5, 5], singleton="reward", std="none") == [1, 3]


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_order_and_names_of_groups_do_not_matter(data):
    sizes = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=5))
    ids = [g for g, n in enumerate(sizes) for _ in range(n)]
    rewards = data.draw(st.lists(st.floats(-100, 100, width=32), min_size=len(ids), max_size=len(ids)))
    order = data.draw(st.permutations(range(len(ids))))
    std, baseline = data.draw(st.sampled_from(["sample", "population", "leave_one_out", "none"])), data.draw(
        st.sampled_from(["mean", "leave_one_out"]))
    got = advantage(rewards, ids=ids, std=std, baseline=baseline)
    shuffled = advantage([rewards[i] for i in order], ids=[1000 - 7 * ids[i] for i in order], std=std, baseline=baseline)
    assert shuffled == pytest.approx([got[i] for i in order], rel=1e-9, abs=1e-9)
    start = 0
    for n in sizes:         # each group by itself gives the same
        alone = advantage(rewards[start:start + n], std=std, baseline=baseline)
        assert got[start:start + n] == pytest.approx(alone, rel=1e-9, abs=1e-9)
        if baseline == "mean" and std in ("sample", "population", "none"):
            assert sum(alone) == pytest.approx(0, abs=1e-5)
        start += n
