"""The claims of the rollout benchmarks, at a small size."""

import pytest

from benchmarks import partial_rollout, rollout_memory


def test_partial_rollouts_cut_idle_time_and_lose_no_long_sample(monkeypatch):
    monkeypatch.setattr(partial_rollout, "PROMPTS", 12)
    monkeypatch.setattr(partial_rollout, "SAMPLES", 4)
    monkeypatch.setattr(partial_rollout, "MEDIAN", 32)
    monkeypatch.setattr(partial_rollout, "LONGEST", 512)
    partial_rollout.long_length.cache_clear()
    every, over, partial, capped = (partial_rollout.simulate({k: 24 if "batch" in k else v for k, v in options.items()}, steps=12)
                                    for options in partial_rollout.STRATEGIES.values())
    partial_rollout.long_length.cache_clear()
    for result in (partial, capped):
        assert result["idle_slot_hours"] < 0.6 * every["idle_slot_hours"] and result["seconds_a_step"] < every["seconds_a_step"]
        assert result["groups_lost"] == result["groups_overdue"] == 0 == result["wasted_token_share"]
        assert result["long_share"] > 0.7 * every["long_share"]
    assert capped["oldest_token"] <= 2 < partial["oldest_token"]
    assert over["wasted_token_share"] > 0.3 and over["groups_overdue"] > 0     # what partial rollouts are for


def test_a_ranks_memory_follows_its_own_share(monkeypatch):
    monkeypatch.setattr(rollout_memory, "MEDIAN", 64)
    monkeypatch.setattr(rollout_memory, "PROMPT", 16)
    monkeypatch.setattr(rollout_memory, "LONGEST", 256)
    small, large = (rollout_memory.measure(ranks, samples=4, rank=1) for ranks in (2, 64))
    for result in (small, large):
        assert result["peak_mb"] < 3.5 * result["own_mb"] + 0.2
        assert result["received_mb"] == pytest.approx(result["received_floor_mb"], rel=0.2)
    assert large["central_mb"] > 20 * small["central_mb"] and large["peak_mb"] < 2 * small["peak_mb"] + 0.2
