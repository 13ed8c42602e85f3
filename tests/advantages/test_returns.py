import time

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_grpo.advantages.returns import discounted_returns
from megatron_grpo.parallel.layout import Layout


def reference(rewards, steps, final, gamma):
    """One sequence, token by token from the end, in plain Python."""
    out, following = [], final
    for r, step in zip(reversed(rewards), reversed(steps), strict=True):
        out.append(r + following)
        following = out[-1] * (gamma if step else 1)
    return out[::-1]


def test_by_hand():
    r, steps = [1.0, 0.0, 2.0, 4.0], [True, False, True, True]
    # from the end: 4 + 8 = 12; 2 + 12/2 = 8; tool token 0 + 8/2 = 4; 1 + 4 = 5: the tool token passes 4 on undecayed
    assert reference(r, steps, 8.0, 0.5) == [5, 4, 8, 12]
    got = discounted_returns(torch.tensor(r), torch.tensor(steps), torch.zeros(4, dtype=torch.int64), 1, 0.5, torch.tensor([8.0]))
    assert got.tolist() == [5, 4, 8, 12]


def test_gamma_one_is_the_reversed_cumulative_sum():
    r = torch.arange(1.0, 8.0)
    got = discounted_returns(r, torch.ones(7, dtype=torch.bool), torch.tensor([0, 0, 0, 1, 1, 1, 1]), 2)
    assert got.tolist() == [6, 5, 3, 22, 18, 13, 7]


def draw_batch(data):
    lengths = data.draw(st.lists(st.integers(0, 40), min_size=1, max_size=7).filter(any))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 10**6)))
    seq = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    steps = torch.rand(len(seq), generator=generator) > data.draw(st.sampled_from([0.0, 0.4, 1.0]))
    r = torch.where(steps, torch.randn(len(seq), dtype=torch.float64, generator=generator), 0)
    return lengths, seq, steps, r, torch.randn(len(lengths), dtype=torch.float64, generator=generator)


def per_sequence(lengths, steps, r, final, gamma):
    out, start = [], 0
    for n, f in zip(lengths, final.tolist(), strict=True):
        out += reference(r[start:start + n].tolist(), steps[start:start + n].tolist(), f, gamma)
        start += n
    return out


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from([1.0, 0.999, 0.9, 0.3, 0.0]))
def test_against_the_plain_loop(data, gamma):
    lengths, seq, steps, r, final = draw_batch(data)
    got = discounted_returns(r, steps, seq, len(lengths), gamma, final)
    assert got.tolist() == pytest.approx(per_sequence(lengths, steps, r, final, gamma), abs=1e-12)


def test_float32_is_accurate_over_long_packs():
    """One sum over the whole pack would lose the digits of a sequence to the total of its neighbours."""
    lengths = [9000, 1, 5000, 8192]
    seq = torch.arange(4).repeat_interleave(torch.tensor(lengths))
    steps = torch.ones(len(seq), dtype=torch.bool)
    r = torch.rand(len(seq), dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    r[:9000] *= 1e5
    r[9001:14001] *= 1e3
    for gamma in (1.0, 0.99):
        exact = discounted_returns(r, steps, seq, 4, gamma)
        got = discounted_returns(r.float(), steps, seq, 4, gamma)
        assert ((got - exact).abs() / exact.abs()).max() < 2e-6


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_the_device_is_never_waited_for(gamma):
    """Tensors without data: any operation whose result the host must know raises."""
    r, seq = torch.empty(100, device="meta"), torch.empty(100, dtype=torch.int64, device="meta")
    assert discounted_returns(r, r > 0, seq, 5, gamma, torch.empty(5, device="meta")).shape == (100,)
    with pytest.raises(Exception, match="[Mm]eta"):
        r.sum().item()


def sharded(lengths, kind, cp_size, steps, r, final, gammas):
    """Two micro-batches' worth of shards on this rank; returns (stream positions, values for each gamma)."""
    rank, half = dist.get_rank(), len(lengths) // 2
    parts, first, offset = [], 0, 0
    for own in (lengths[:half], lengths[half:]):
        layout = Layout(tuple(own), cp_size=cp_size, kind=kind)
        n = sum(own)
        rewards, trained = torch.tensor(r[offset:offset + n], dtype=torch.float64), torch.tensor(steps[offset:offset + n])
        parts.append((layout, layout.index(rank), offset, first, layout.shard(rewards, rank), layout.shard(trained, rank, False)))
        first, offset = first + layout.num_seqs, offset + n
    got = [discounted_returns(
        torch.cat([p[4] for p in parts]), torch.cat([p[5] for p in parts]), torch.cat([p[0].seq_ids(rank) + p[3] for p in parts]), first,
        gamma, torch.tensor(final, dtype=torch.float64), chunk_T=torch.cat([p[0].chunk_ids(rank) for p in parts]),
        columns=tuple(parts[0][0].columns(c) for c in range(cp_size)), cp_group=dist.group.WORLD).tolist() for gamma in gammas]
    index = torch.cat([torch.where(p[1] >= 0, p[1] + p[2], -1) for p in parts])
    return index.tolist(), got


@pytest.mark.parametrize("kind", ["zigzag", "contiguous"])
@pytest.mark.parametrize("cp_size", [2, 4])
def test_context_parallel_shards(pool, kind, cp_size):
    lengths = [13, 1, 30, 5, 2, 17]
    generator = torch.Generator().manual_seed(3)
    steps = (torch.rand(sum(lengths), generator=generator) > 0.3)
    steps[14:30] = False                # a prompt that fills whole chunks
    r = torch.where(steps, torch.randn(sum(lengths), generator=generator, dtype=torch.float64), 0)
    final = torch.randn(len(lengths), generator=generator, dtype=torch.float64)
    got = pool.run(sharded, lengths, kind, cp_size, steps.tolist(), r.tolist(), final.tolist(), (1.0, 0.9), ranks=cp_size)
    for number, gamma in enumerate((1.0, 0.9)):
        want = per_sequence(lengths, steps, r, final, gamma)
        values = {i: v for index, x in got for i, v in zip(index, x[number], strict=True) if i >= 0}
        assert [values[i] for i in range(sum(lengths))] == pytest.approx(want, abs=1e-12)


def best(fn, n=15):
    times = []
    for _ in range(n):
        start = time.process_time()
        fn()
        times.append(time.process_time() - start)
    return min(times)


def test_speed_against_the_dense_cumulative_sum():
    """64 x 8192 packed tokens, in multiples of total - cumsum + r over a dense [64, 8192]: 0.8 ms on an idle core of the CI machine."""
    S, L = 64, 8192
    r, seq = torch.randn(S * L), torch.arange(S).repeat_interleave(L)
    steps, final = torch.rand(S * L) > 0.1, torch.randn(S)

    def dense():
        x = r.view(S, L)
        c = x.cumsum(1)
        return c[:, -1:] - c + x

    ratios = {}
    for gamma, limit in ((1.0, 2.5), (0.999, 10.0)):
        for _ in range(3):          # a neighbour on the machine may spoil a round
            ratios[gamma] = best(lambda gamma=gamma: discounted_returns(r, steps, seq, S, gamma, final)) / best(dense)
            if ratios[gamma] < limit:
                break
        assert ratios[gamma] < limit, ratios
