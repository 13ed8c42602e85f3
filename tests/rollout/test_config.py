import pytest

from megatron_grpo.rollout.config import RolloutConfig
from megatron_grpo.settings import ConfigError


@pytest.mark.parametrize("options, message", [
    (dict(rollout_batch_size=0), "--rollout-batch-size 0: give at least 1"),
    (dict(rollout_temperature=0.0), "--rollout-temperature 0.0: training needs a temperature above 0"),
    (dict(rollout_top_p=1.5), r"--rollout-top-p 1.5: give a probability in \(0, 1\]"),
    (dict(rollout_top_k=0), "--rollout-top-k 0: give at least 1, or -1"),
    (dict(rollout_ahead=-1), "--rollout-ahead -1: give 0 or more"),
    (dict(rollout_function_timeout=0.0), "--rollout-function-timeout 0.0"),
    (dict(over_sampling_batch_size=8, rollout_batch_size=16), "--over-sampling-batch-size 8 is below --rollout-batch-size 16"),
    (dict(mask_offpolicy_in_partial_rollout=True), "give both or neither"),
    (dict(mask_offpolicy_in_partial_rollout=True, partial_rollout=True, rollout_ahead=1), "would mask every token"),
    (dict(max_weight_staleness=1, rollout_ahead=2), "--max-weight-staleness 1 is below --rollout-ahead 2"),
    (dict(max_weight_staleness=0, partial_rollout=True), "give at least 1, or drop --partial-rollout"),
    (dict(use_rollout_sampling_mask=True), "nothing is truncated; drop it"),
    (dict(use_rollout_sampling_mask=True, rollout_top_p=0.9), "give --rollout-top-k 1 .. 4096"),
    (dict(use_rollout_sampling_mask=True, rollout_top_k=5000), "give --rollout-top-k 1 .. 4096")])
def test_what_cannot_work_is_refused_with_the_fix(options, message):
    with pytest.raises(ConfigError, match=message):
        RolloutConfig(**options)


def test_what_works():
    config = RolloutConfig(use_rollout_sampling_mask=True, rollout_top_k=64, rollout_top_p=0.95, partial_rollout=True,
                           max_weight_staleness=2, rollout_ahead=1, over_sampling_batch_size=48)
    assert config.groups_in_flight == 48 and RolloutConfig().groups_in_flight == 32
