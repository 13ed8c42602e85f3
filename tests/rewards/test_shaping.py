import numpy as np
import pytest

from megatron_grpo.batch import Sample, Status
from megatron_grpo.config import RewardConfig
from megatron_grpo.hooks import RewardOutput
from megatron_grpo.rewards.shaping import overlong_punishment, shape_rewards


def sample(i, reward, length=4, status=Status.COMPLETED):
    return Sample(sample_id=i, group_id=0, tokens=np.zeros(1 + length, np.int64), prompt_length=1, loss_mask=np.ones(length, bool),
                  rollout_logp=np.zeros(length, np.float32), status=status, reward=reward, rewards={"correct": reward})


@pytest.mark.parametrize("length, want", [(0, 0), (80, 0), (81, -0.05), (90, -0.5), (100, -1), (101, -1), (1000, -1)])
def test_overlong_ramp_of_dapo(length, want):
    assert overlong_punishment(length, 100, 20) == pytest.approx(want)
    assert overlong_punishment(length, 100, 20, factor=0.5) == pytest.approx(want / 2)


def test_without_the_floor():
    assert overlong_punishment(120, 100, 20, factor=0.5, bounded=False) == pytest.approx(-1)
    assert overlong_punishment(90, 100, 20, bounded=False) == pytest.approx(-0.5)


def test_scale_clip_then_punish():
    samples = [sample(0, 3.0, length=10), sample(1, -0.1, length=2)]
    assert not shape_rewards(samples, RewardConfig(reward_scale=0.5, reward_clip=1.0, overlong_buffer_len=4), max_response_len=12)
    assert [s.reward for s in samples] == pytest.approx([1 - 0.5, -0.05])
    assert [s.rewards for s in samples] == [{"correct": 3.0, "overlong": -0.5}, {"correct": -0.1, "overlong": 0.0}]


def test_truncated_keeps_its_reward_and_aborted_has_none():
    samples = [sample(0, 1.0), sample(1, 1.0, status=Status.TRUNCATED), sample(2, 1.0, status=Status.ABORTED)]
    shape_rewards(samples, RewardConfig(), max_response_len=4)
    assert [s.reward for s in samples] == [1, 1, 0]
    assert [s.loss_mask.any() for s in samples] == [True, True, False]
    shape_rewards(samples, RewardConfig(overlong_filter=True), max_response_len=4)
    assert [s.reward for s in samples] == [1, 1, 0]
    assert [s.loss_mask.any() for s in samples] == [True, False, False]


@pytest.mark.parametrize("coefficient, want", [(0.3, [1, 0.3]), (0.0, [1, 0]), (-0.5, [1, -0.5])])
def test_stop_properly(coefficient, want):
    samples = [sample(0, 1.0), sample(1, 1.0, status=Status.TRUNCATED)]
    shape_rewards(samples, RewardConfig(stop_properly_penalty_coef=coefficient), max_response_len=4)
    assert [s.reward for s in samples] == pytest.approx(want)


def test_hook_replaces_the_formula_and_never_sees_aborted_samples():
    samples = [sample(0, 1.0), sample(1, 7.0, status=Status.ABORTED), sample(2, 2.0)]
    seen = []

    def hook(given):
        seen.extend(s.sample_id for s in given)
        return RewardOutput([10 * s.reward for s in given], is_advantage=True)

    assert shape_rewards(samples, RewardConfig(overlong_buffer_len=4), 4, hook)
    assert seen == [0, 2] and [s.reward for s in samples] == [10, 0, 20]
