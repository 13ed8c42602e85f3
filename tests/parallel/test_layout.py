import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_grpo.parallel.layout import Layout

LAYOUTS = st.builds(
    Layout, lengths=st.lists(st.integers(0, 37), min_size=0, max_size=6).map(tuple), cp_size=st.sampled_from([1, 2, 3, 4]),
    tp_size=st.sampled_from([1, 2, 3]), kind=st.sampled_from(["zigzag", "contiguous"]), qkv_format=st.sampled_from(["thd", "bshd"]),
    multiple=st.sampled_from([1, 4]))


def test_zigzag_by_hand():
    """Lengths 5 and 2 on 2 ranks: rows of 8 and 4, chunks of 2 and 1, rank 0 has chunks 0 and 3."""
    layout = Layout((5, 2), cp_size=2)
    assert layout.local_tokens == 6 and layout.num_tokens == 7 and layout.num_chunks == 4
    assert layout.index(0).tolist() == [0, 1, -1, -1, 5, -1]
    assert layout.index(1).tolist() == [2, 3, 4, -1, 6, -1]
    assert layout.positions(0).tolist() == [0, 1, 6, 7, 0, 3]
    assert layout.seq_ids(0).tolist() == [0, 0, 0, 0, 1, 1]
    assert layout.chunk_ids(0).tolist() == [0, 0, 3, 3, 0, 3]
    assert layout.chunk_ids(1).tolist() == [1, 1, 2, 2, 1, 2]
    assert layout.chunk_lengths().tolist() == [[2, 2, 1, 0], [1, 1, 0, 0]]
    assert layout.columns(0) == (0, 3) and layout.columns(1) == (1, 2)
    assert layout.cu_seqlens.tolist() == [0, 5, 7] and layout.cu_seqlens_padded.tolist() == [0, 8, 12] and layout.max_seqlen == 8


def test_contiguous_by_hand():
    """Lengths 5 and 2 on 2 ranks of 2 sequence-parallel ranks: 7 tokens and a tail of 1, cut in the middle."""
    layout = Layout((5, 2), cp_size=2, tp_size=2, kind="contiguous")
    assert layout.index(0).tolist() == [0, 1, 2, 3] and layout.index(1).tolist() == [4, 5, 6, -1]
    assert layout.positions(1).tolist() == [4, 0, 1, 0] and layout.seq_ids(1).tolist() == [0, 1, 1, 1]
    assert layout.chunk_lengths().tolist() == [[4, 1], [0, 2]]
    assert layout.hidden_index(1, 1).tolist() == [6, -1]
    assert layout.cu_seqlens.tolist() == [0, 5, 7, 7] and layout.cu_seqlens_padded.tolist() == [0, 5, 7, 8]


def test_padded_by_hand():
    """Lengths 3 and 1, bshd: two rows of 4; a decoder layer sees [sequence, batch], cut by sequence parallelism."""
    layout = Layout((3, 1), tp_size=2, qkv_format="bshd")
    assert layout.local_shape == (2, 4)
    assert layout.index().tolist() == [0, 1, 2, -1, 3, -1, -1, -1]
    assert layout.hidden_index(0, 0).tolist() == [0, 3, 1, -1] and layout.hidden_index(0, 1).tolist() == [2, -1, -1, -1]


def test_labels_and_response_positions_by_hand():
    layout = Layout((4, 0, 3), cp_size=2)
    assert layout.labels(torch.tensor([10, 11, 12, 13, 20, 21, 22]), fill=-1).tolist() == [11, 12, 13, -1, 21, 22, -1]
    assert layout.response_index([2, 0, 3]).tolist() == [1, 2]          # tokens 2 and 3 of the first, none of the others
    assert layout.response_index([1, 0, 1]).tolist() == [0, 1, 2, 4, 5]
    with pytest.raises(ValueError, match="sequence 2: a prompt of 4 tokens in 3"):
        layout.response_index([2, 0, 4])
    with pytest.raises(ValueError, match="sequence 0: a prompt of 0 tokens"):
        layout.response_index([0, 0, 1])


def test_an_empty_micro_batch_is_one_sequence_without_tokens():
    for qkv_format in ("thd", "bshd"):
        layout = Layout((), cp_size=2, tp_size=2, qkv_format=qkv_format, multiple=4)
        assert layout.num_seqs == 1 and layout.num_tokens == 0 and layout.local_tokens == 8
        assert layout.shard(torch.empty(0), 1, fill=7.).tolist() == [7.] * 8
        assert layout.gather([torch.ones(8), torch.ones(8)]).tolist() == []
        assert layout.labels(torch.empty(0)).tolist() == [] and layout.response_index([]).tolist() == []


@settings(max_examples=80, deadline=None)
@given(LAYOUTS)
def test_every_token_is_on_one_rank_and_comes_back(layout):
    stream = torch.arange(layout.num_tokens * 2).view(-1, 2)
    shards = [layout.shard(stream, r, fill=-7) for r in range(layout.cp_size)]
    assert all(len(s) == layout.local_tokens for s in shards)
    assert torch.equal(layout.gather(shards), stream)
    held = torch.cat([layout.index(r) for r in range(layout.cp_size)])
    assert sorted(held[held >= 0].tolist()) == list(range(layout.num_tokens))
    assert torch.equal(torch.cat(shards)[held < 0], torch.full((int((held < 0).sum()), 2), -7))


@settings(max_examples=80, deadline=None)
@given(LAYOUTS)
def test_index_agrees_with_sequences_positions_and_chunks(layout):
    starts = np.cumsum(layout.lengths) - layout.lengths
    counts = np.zeros((layout.num_seqs, layout.num_chunks), int)
    for r in range(layout.cp_size):
        index, seq, position, chunk = (f(r).numpy() for f in (layout.index, layout.seq_ids, layout.positions, layout.chunk_ids))
        real = index >= 0
        assert np.array_equal(index[real], (starts[seq] + position)[real])
        assert seq.min() >= 0 and seq.max() < layout.num_seqs and position.max() < layout.max_seqlen
        assert np.all((position < np.array(layout.lengths)[seq])[real])
        assert set(chunk) <= set(layout.columns(r))
        np.add.at(counts, (seq[real], chunk[real]), 1)
        for s in range(layout.num_seqs):                                # chunks follow each other in the order of their ids
            own = [(c, p) for c, p in zip(chunk[real & (seq == s)], position[real & (seq == s)], strict=True)]
            assert own == sorted(own)
            assert [p for _, p in own] == sorted(p for _, p in own)
        parts = torch.stack([layout.hidden_index(r, t) for t in range(layout.tp_size)])
        batch, length = layout.local_shape
        assert parts.numel() == layout.local_tokens and length % (layout.tp_size * layout.multiple) == 0
        assert torch.equal(parts.view(length, batch).T.reshape(-1), torch.from_numpy(index))
    assert np.array_equal(counts, layout.chunk_lengths().numpy())
    assert sorted(c for r in range(layout.cp_size) for c in layout.columns(r)) == list(range(layout.num_chunks))


@settings(max_examples=60, deadline=None)
@given(LAYOUTS)
def test_boundaries_are_those_of_the_padded_stream(layout):
    cu, padded = layout.cu_seqlens.tolist(), layout.cu_seqlens_padded.tolist()
    assert len(cu) == len(padded) and cu[-1] == layout.num_tokens and padded[-1] == layout.local_tokens * layout.cp_size
    assert tuple(np.diff(cu)[:layout.num_seqs]) == layout.lengths
    assert np.all(np.diff(padded) >= np.diff(cu)) and layout.max_seqlen == max(np.diff(padded))
    if layout.kind == "zigzag" or layout.qkv_format == "bshd":
        assert np.all(np.diff(padded) % layout.num_chunks == 0)
    if layout.qkv_format == "bshd":
        assert len(set(np.diff(padded))) == 1


@pytest.mark.parametrize("bad", [dict(lengths=(3, -1)), dict(lengths=(3,), cp_size=0), dict(lengths=(3,), kind="ring"),
                                 dict(lengths=(3,), qkv_format="sbhd")])
def test_bad_layouts_are_refused(bad):
    with pytest.raises(ValueError):
        Layout(**bad)


def test_a_tensor_of_another_length_is_refused():
    layout = Layout((3, 4), cp_size=2)
    with pytest.raises(ValueError, match="the stream has 7 tokens"):
        layout.shard(torch.zeros(8))
    with pytest.raises(ValueError, match="1 shards for 2"):
        layout.gather([torch.zeros(layout.local_tokens)])
    with pytest.raises(ValueError, match="cp_rank 2"):
        layout.index(2)
