import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_grpo.logprobs import SupportMask
from megatron_grpo.parallel.layout import Layout


def test_dense_by_hand():
    """Three positions: {1, 3}, everything, {0}; columns 2 and 3 of a vocabulary of 4 are this rank's."""
    mask = SupportMask.from_lengths(torch.tensor([1, 3, 0], dtype=torch.int32), torch.tensor([2, 0, 1]))
    assert mask.dense(0, 3, 0, 4).tolist() == [[False, True, False, True], [True] * 4, [True, False, False, False]]
    assert mask.dense(0, 3, 2, 2).tolist() == [[False, True], [True, True], [False, False]]
    assert mask.dense(2, 3, 0, 1).tolist() == [[True]]


def test_response_lists_land_where_their_tokens_stand():
    """Prompt of 2, response of 2 (lists {7}, {8, 9}); on 2 ranks, the response stands at positions 1 and 2 of 4."""
    layout = Layout((4,), cp_size=2)
    where = layout.response_index([2])
    for r, lists in enumerate([[[], []], [[7], [8, 9]]]):           # rank 0 holds positions 0 and 3
        mask = SupportMask.from_response(torch.tensor([7, 8, 9]), [1, 2], where, layout.num_tokens, layout.index(r))
        assert [mask.ids[a:b].tolist() for a, b in zip(mask.offsets[:-1], mask.offsets[1:], strict=True)] == lists


def test_response_of_two_sequences():
    layout = Layout((3, 0, 3))
    mask = SupportMask.from_response([5, 6, 7], [1, 0, 2], layout.response_index([2, 0, 1]), 6, layout.index())
    assert mask.offsets.tolist() == [0, 0, 1, 1, 1, 3, 3] and mask.ids.tolist() == [5, 6, 7]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 6)), min_size=1, max_size=4), st.sampled_from([1, 2]), st.integers(0, 99))
def test_every_shard_has_the_lists_of_its_positions(sizes, cp_size, seed):
    g = torch.Generator().manual_seed(seed)
    layout = Layout(tuple(p + r for p, r in sizes), cp_size=cp_size, multiple=4)
    where = layout.response_index([p for p, _ in sizes])
    lengths = torch.randint(0, 3, (len(where),), generator=g)
    ids = torch.randint(0, 100, (int(lengths.sum()),), generator=g)
    lists = dict(zip(where.tolist(), [t.tolist() for t in ids.split(lengths.tolist())], strict=True)) if len(where) else {}
    for r in range(cp_size):
        index = layout.index(r)
        mask = SupportMask.from_response(ids, lengths, where, layout.num_tokens, index)
        got = [mask.ids[a:b].tolist() for a, b in zip(mask.offsets[:-1], mask.offsets[1:], strict=True)]
        assert got == [lists.get(i, []) for i in index.tolist()]


def test_lengths_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="2 ids, but the lengths"):
        SupportMask.from_lengths(torch.tensor([1, 2]), torch.tensor([1]))
    with pytest.raises(ValueError, match="sampling mask: 1 lists of together 1 ids for 2 response tokens"):
        SupportMask.from_response([1], [1], torch.tensor([0, 1]), 2, torch.tensor([0, 1]))
