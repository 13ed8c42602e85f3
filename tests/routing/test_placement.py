import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_grpo.parallel.layout import Layout
from megatron_grpo.routing.codec import MISSING
from megatron_grpo.routing.placement import RoutesShare, RouteStore, place, spread, unrouted

L, K, E = 3, 2, 8


def samples(lengths, seed=0):
    """Routes whose every row says where it belongs: sample, position, layer."""
    rng = np.random.default_rng(seed)
    return [rng.random((max(n - 1, 0), L, E)).argsort(-1)[..., :K].astype(np.int8) for n in lengths]


def layouts():
    return st.builds(lambda lengths, cp, tp, kind, fmt, multiple: Layout(tuple(lengths), cp, tp, kind, fmt, multiple),
                     st.lists(st.integers(1, 9), min_size=1, max_size=4), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]),
                     st.sampled_from(["zigzag", "contiguous"]), st.sampled_from(["thd", "bshd"]), st.sampled_from([1, 3]))


@settings(max_examples=40, deadline=None)
@given(layouts(), st.lists(st.integers(0, L - 1), min_size=1, max_size=L, unique=True))
def test_every_row_of_every_rank_is_its_tokens_own(layout, columns):
    routes = samples(layout.lengths)
    flat = [(s, i) for s, n in enumerate(layout.lengths) for i in range(n)]
    held = 0
    for cp_rank in range(layout.cp_size):
        for tp_rank in range(layout.tp_size):
            share = place(routes, layout, columns=columns, topk=K, num_experts=E, cp_rank=cp_rank, tp_rank=tp_rank)
            index = layout.hidden_index(cp_rank, tp_rank).tolist()
            free = unrouted(layout, cp_rank, tp_rank).tolist()
            assert share.shape == (len(index), len(columns), K) and share.dtype == np.int8
            for row, at, is_free in zip(share, index, free, strict=True):
                s, i = flat[at] if at >= 0 else (-1, -1)
                assert is_free == (at < 0 or i == layout.lengths[s] - 1)
                if not is_free:
                    assert np.array_equal(row, routes[s][i][columns])
                    held += 1
                assert all(len(set(r)) == K and min(r) >= 0 and max(r) < E for r in row.tolist())
    assert held == sum(n - 1 for n in layout.lengths)


def test_missing_samples_and_rows_stay_missing_and_are_known_on_the_host():
    layout = Layout((3, 4), multiple=8)
    first, second = samples((3, 4))
    second[1, 2] = MISSING
    share = place([None, second], layout, columns=[0, 2], topk=K, num_experts=E)
    assert (share[:2] == MISSING).all()                         # no routes at all
    assert np.array_equal(share[3:6], second[:, [0, 2]]) and (share[4, 1] == MISSING).all()
    assert (share[[2, 6, 7]] != MISSING).all()                  # last tokens and the tail
    assert RoutesShare.of(share, (0, 2)).missing == {0, 2}
    assert RoutesShare.of(place([first, samples((3, 4))[1]], layout, columns=[0], topk=K, num_experts=E), (0,)).missing == frozenset()


def test_as_many_rows_as_tokens_are_cut():
    layout = Layout((3,))
    full = np.arange(9 * K, dtype=np.int8).reshape(3, 3, K) % E
    assert np.array_equal(place([full], layout, columns=[0], topk=K, num_experts=E)[:2], full[:2, :1])


def test_wrong_rows_are_refused():
    with pytest.raises(ValueError, match="sequence 1: 2 rows of routes for 5 tokens"):
        place(samples((3, 3)), Layout((3, 5)), columns=[0], topk=K, num_experts=E)
    with pytest.raises(ValueError, match="1 sequences"):
        place(samples((3,)), Layout((3, 5)), columns=[0], topk=K, num_experts=E)


def test_an_empty_micro_batch_is_all_padding():
    layout = Layout((), multiple=4)
    share = place([], layout, columns=[0, 1], topk=K, num_experts=E)
    assert share.shape == (4, 2, K) and unrouted(layout).all()


@pytest.mark.parametrize("experts, topk", [(8, 2), (128, 8), (256, 8), (10, 3), (4, 4)])
def test_padding_is_spread_evenly(experts, topk):
    rows = spread(torch.arange(1000), topk, experts)
    assert all(len(set(r)) == topk for r in rows.tolist())
    counts = np.bincount(rows.flatten(), minlength=experts)
    assert counts.max() - counts.min() <= topk


def test_a_rank_holds_the_share_of_its_place_only():
    lengths = (64, 128, 64)
    routes = samples(lengths)
    whole = place(routes, Layout(lengths), columns=range(L), topk=K, num_experts=E).nbytes
    for cp, tp, stages in ((2, 1, 1), (4, 2, 1), (2, 2, 3)):
        part = place(routes, Layout(lengths, cp, tp), columns=[0] if stages == 3 else range(L), topk=K, num_experts=E, cp_rank=1).nbytes
        assert part * cp * tp * stages == whole


def test_store_joins_the_chunks_of_a_micro_batch_and_refuses_a_second_recording():
    store = RouteStore()
    a, b = torch.arange(8, dtype=torch.int8).view(2, 2, 2), torch.full((2, 1, 2), 7, dtype=torch.int8)
    store.put("mb", RoutesShare(a, (0, 4)))
    store.put("mb", RoutesShare(b, (2,)))
    share = store.get("mb")
    assert share.layers == (0, 4, 2) and torch.equal(share.experts_TLK, torch.cat([a, b], 1)) and store.nbytes() == 12
    with pytest.raises(ValueError, match=r"\[4\] are stored"):
        store.put("mb", RoutesShare(b, (4,)))
    store.clear()
    with pytest.raises(KeyError, match="mb"):
        store.get("mb")
