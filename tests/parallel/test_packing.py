import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_grpo.parallel.config import PackingConfig
from megatron_grpo.parallel.packing import partition, plan
from megatron_grpo.settings import ConfigError


def test_partition_by_hand():
    """8 7 6 5 4 in two: differencing leaves 16 against 14 (the optimum, 15 against 15, is not what the method finds)."""
    parts = partition([8, 7, 6, 5, 4], 2)
    assert sorted(sum([8, 7, 6, 5, 4][i] for i in p) for p in parts) == [14, 16]
    assert sorted(map(len, partition([1, 1, 1, 1], 4))) == [1, 1, 1, 1]
    assert partition([], 3) == [[], [], []] and sorted(partition([5], 2)) == [[], [0]]


def test_a_plan_by_hand():
    """Limit 10 on one rank needs three: 9, 6 + 3 and 5 + 4."""
    (rank,) = plan([9, 6, 5, 4, 3], dp_size=1, max_tokens_per_gpu=5, cp_size=2)
    assert sorted(rank) == [[0], [1, 4], [2, 3]]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 60), max_size=40), st.sampled_from([1, 2, 3, 8]), st.sampled_from([1, 2]), st.sampled_from([1, 2, 3]),
       st.booleans())
def test_every_sequence_once_under_the_limit_and_equal_counts(lengths, dp_size, cp_size, multiple, dynamic):
    how = dict(max_tokens_per_gpu=64 // cp_size) if dynamic else dict(micro_batch_size=3)
    ranks = plan(lengths, dp_size=dp_size, cp_size=cp_size, multiple=multiple, **how)
    assert len(ranks) == dp_size and len({len(r) for r in ranks}) == 1
    assert len(ranks[0]) >= 1 and len(ranks[0]) % multiple == 0
    assert sorted(i for r in ranks for m in r for i in m) == list(range(len(lengths)))
    for m in (m for r in ranks for m in r):
        assert sum(lengths[i] for i in m) <= 64 if dynamic else len(m) <= 3
    assert ranks == plan(lengths, dp_size=dp_size, cp_size=cp_size, multiple=multiple, **how)


def test_large_steps_are_balanced_and_full():
    lengths = np.clip(np.random.default_rng(0).lognormal(8, 1, 2000), 50, 32000).astype(int).tolist()
    ranks = plan(lengths, dp_size=8, cp_size=2, max_tokens_per_gpu=16384)
    tokens = np.array([[sum(lengths[i] for i in m) for m in r] for r in ranks])
    assert tokens.sum(1).max() / tokens.sum(1).mean() < 1.0001
    assert tokens.max() <= 32768 and tokens.mean() / 32768 > 0.9
    assert tokens.max(0).sum() / tokens.mean(0).sum() < 1.02            # ranks wait for the longest of each micro-batch


def test_a_sample_over_the_limit_is_named():
    with pytest.raises(ConfigError, match=r"sample 77 has 21 tokens.*--max-tokens-per-gpu 10 x context-parallel size 2 = 20.*at least 11"):
        plan([5, 21], dp_size=1, cp_size=2, max_tokens_per_gpu=10, sample_ids=[70, 77])


@pytest.mark.parametrize("bad, says", [
    (dict(use_dynamic_batch_size=True), "needs --max-tokens-per-gpu"),
    (dict(max_tokens_per_gpu=5), "without --use-dynamic-batch-size"),
    (dict(use_dynamic_batch_size=True, max_tokens_per_gpu=0), "at least 1"),
    (dict(use_dynamic_batch_size=True, max_tokens_per_gpu=5, qkv_format="bshd"), "--micro-batch-size"),
    (dict(data_pad_size_multiplier=0), "--data-pad-size-multiplier"),
])
def test_bad_settings_are_refused(bad, says):
    with pytest.raises(ConfigError, match=says):
        PackingConfig(**bad)
