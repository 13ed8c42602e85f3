import numpy as np
import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_grpo.batch import Sample, Status
from megatron_grpo.rollout import exchange
from megatron_grpo.rollout.exchange import exchange_samples, pack, unpack

from .simulated import same


def make(sample_id: int, prompt=3, response=4, routes=True, support=True, dtype=np.uint8) -> Sample:
    rng = np.random.default_rng(sample_id)
    n = prompt + response
    return Sample(
        sample_id=sample_id, group_id=sample_id // 2, tokens=rng.integers(0, 99, n), prompt_length=prompt,
        loss_mask=rng.random(response) < 0.5, rollout_logp=-rng.random(response, np.float32), status=Status.TRUNCATED, rollout_id=7,
        reward=0.5, rewards={"a": 0.5},
        routes=rng.integers(0, 100, (n - 1, 2, 3)).astype(dtype) if routes else None,
        sampling_mask=[rng.integers(0, 99, rng.integers(1, 5)).astype(np.int32) for _ in range(response)] if support else None,
        weight_versions=[("3", 0, response)], prompt="p\u00e9", response="r", label={"x": [1]}, metadata={"m": (1, "s")}, turns=2)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9), st.booleans(), st.booleans(),
                          st.sampled_from([np.uint8, np.int16, np.int32])), min_size=1, max_size=5))
def test_packing_keeps_every_bit(shapes):
    samples = [make(i, *shape) for i, shape in enumerate(shapes)]
    buffer = pack(samples)
    assert buffer.dtype == np.uint8 and buffer.ndim == 1
    back = unpack(buffer)
    assert all(same(a, b) for a, b in zip(samples, back, strict=True))


def exchange_case(ranks_of, chunk):
    """Each rank owns the samples whose owner it is; returns what it holds after the exchange."""
    exchange.CHUNK = chunk
    owner, destination = ranks_of
    own = [make(i, 2 + i % 3, 1 + i % 5) for i in owner if owner[i] == dist.get_rank()]
    return exchange_samples(own[::-1], destination, owner, dist.group.WORLD)


@pytest.mark.parametrize("ranks, seed, chunk", [(2, 0, 1 << 28), (3, 1, 100), (4, 2, 1 << 28)])
def test_each_leader_ends_with_the_samples_it_trains_on(pool, ranks, seed, chunk):
    rng = np.random.default_rng(seed)
    owner = {int(i): int(rng.integers(ranks)) for i in rng.permutation(17)}
    destination = {i: int(rng.integers(ranks)) for i in owner if i % 5}     # the others are trained on by nobody
    if ranks == 4:
        destination = {i: 0 for i in destination}       # one receives all, some receive nothing
    results = pool.run(exchange_case, (owner, destination), chunk, ranks=ranks)
    for rank, held in enumerate(results):
        assert [s.sample_id for s in held] == sorted(i for i, to in destination.items() if to == rank)
        assert all(same(s, make(s.sample_id, 2 + s.sample_id % 3, 1 + s.sample_id % 5)) for s in held)


def test_one_leader_moves_nothing():
    samples = [make(2), make(1)]
    assert exchange_samples(samples, {1: 0, 2: 0}, {1: 0, 2: 0}, None) == samples[::-1]


def test_a_sample_that_its_owner_lacks_is_named():
    with pytest.raises(ValueError, match=r"data-parallel rank 0 does not hold its samples \[4\]"):
        exchange_samples([make(1)], {1: 0, 4: 0}, {1: 0, 4: 0}, None)
