import statistics

import pytest
import torch
import torch.distributed as dist

from megatron_grpo.advantages.whiten import standardize, whiten

VALUES = [0.5, -1.0, 2.0, 4.0, 0.25, -3.0, 1.0, 1.5]


def test_by_hand():
    x, everything = torch.tensor(VALUES), torch.ones(8, dtype=torch.bool)
    mean, std = statistics.mean(VALUES), statistics.stdev(VALUES)
    assert whiten(x, everything, eps=0.0).tolist() == pytest.approx([(v - mean) / std for v in VALUES])
    assert standardize(x, everything, eps=0.5).tolist() == pytest.approx([(v - mean) / (std + 0.5) for v in VALUES])
    population = statistics.pstdev(VALUES)
    assert whiten(x, everything, eps=0.0, ddof=0).tolist() == pytest.approx([(v - mean) / population for v in VALUES])


def test_masked_values_are_not_looked_at():
    x = torch.tensor([1.0, float("nan"), 3.0, float("inf")])
    got = whiten(x, torch.tensor([True, False, True, False]), eps=0.0)
    assert got.tolist() == pytest.approx([-(0.5 ** 0.5), 0, 0.5 ** 0.5, 0])


@pytest.mark.parametrize("value", [0.97, 1e-9, -1e9])
@pytest.mark.parametrize("normalise", [whiten, standardize])
def test_equal_values_give_exactly_zero(value, normalise):
    for n in (1, 7, 1000):
        assert normalise(torch.full((n,), value), torch.ones(n, dtype=torch.bool)).abs().max() == 0


def test_a_large_common_part_costs_no_precision():
    x = torch.randn(1000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    everything = torch.ones(1000, dtype=torch.bool)
    assert whiten(x + 1e5, everything).tolist() == pytest.approx(whiten(x, everything).tolist(), abs=1e-7)


def shard_of(values, mask):
    """This rank's strided part; of four ranks the last holds nothing at all."""
    rank, world = dist.get_rank(), dist.get_world_size()
    holders = max(world - 1, 1) if world == 4 else world
    mine = [i for i in range(len(values)) if i % holders == rank] if rank < holders else []
    x = torch.tensor([values[i] for i in mine], dtype=torch.float32)
    m = torch.tensor([mask[i] for i in mine], dtype=torch.bool)
    return {i: v for i, v in zip(mine, whiten(x, m, dist.group.WORLD).tolist(), strict=True)}


def test_same_on_any_number_of_ranks(pool):
    mask = [True, True, False, True, True, True, True, False]
    alone = whiten(torch.tensor(VALUES), torch.tensor(mask)).tolist()
    for ranks in (1, 2, 4):
        parts = {i: v for part in pool.run(shard_of, VALUES, mask, ranks=ranks) for i, v in part.items()}
        assert [parts[i] for i in range(len(VALUES))] == pytest.approx(alone, abs=1e-6)
