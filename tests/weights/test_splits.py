"""The blocks of all ranks tile every Hugging Face tensor exactly once, and land where Megatron's fused layout wants them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_grpo.weights.splits import Block, Geometry, columns, gated, qkv, vocabulary, whole


def geometry(heads=4, groups=2, head_dim=1, vocab=6):
    return Geometry(heads=heads, groups=groups, head_dim=head_dim, vocab_size=vocab, num_layers=1)


def shards(split, shape, g, size, hf):
    """Every rank's shard, filled from the full tensors."""
    out = []
    for rank in range(size):
        shard = torch.full(shape, -1.0)
        for block in split(shape, g, rank, size)[1]:
            block.of_shard(shard).copy_(block.of_hf(hf[block.source]))
        out.append(shard)
    return out


def test_qkv_by_hand():
    # 4 heads, 2 groups, 1 channel: rows q0 q1 k0 v0 | q2 q3 k1 v1
    q, k, v = torch.tensor([[0.], [1.], [2.], [3.]]), torch.tensor([[10.], [11.]]), torch.tensor([[20.], [21.]])
    first, second = shards(qkv, (4, 1), geometry(), 2, [q, k, v])
    assert first.flatten().tolist() == [0, 1, 10, 20] and second.flatten().tolist() == [2, 3, 11, 21]
    quarters = shards(qkv, (2, 1), geometry(), 4, [q, k, v])        # more ranks than groups: a group is cut
    assert [s.flatten().tolist() for s in quarters] == [[0, 1], [10, 20], [2, 3], [11, 21]]


def test_gated_by_hand():
    gate, up = torch.arange(4.)[:, None], torch.arange(10., 14.)[:, None]
    first, second = shards(gated, (4, 1), geometry(), 2, [gate, up])
    assert first.flatten().tolist() == [0, 1, 10, 11] and second.flatten().tolist() == [2, 3, 12, 13]


def test_vocabulary_leaves_padding_out():
    first, second = shards(vocabulary, (4, 1), geometry(), 2, [torch.arange(6.)[:, None]])
    assert first.flatten().tolist() == [0, 1, 2, 3] and second.flatten().tolist() == [4, 5, -1, -1]
    assert vocabulary((8, 1), geometry(), 1, 2) == ([(6, 1)], [])       # a rank of padding alone


def test_sizes_that_do_not_fit():
    with pytest.raises(ValueError, match="--vocab-size"):
        vocabulary((2, 1), geometry(), 0, 2)
    with pytest.raises(ValueError, match="--num-query-groups"):
        qkv((5, 1), geometry(), 0, 2)


def test_whole_is_the_same_on_every_rank():
    assert whole((3,), geometry(), 0, 2) == whole((3,), geometry(), 1, 2) == ([(3,)], [Block(0, (0, 3), (0, 3))])


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_blocks_tile(data):
    size = data.draw(st.sampled_from([1, 2, 4]))
    groups, per_group, d = data.draw(st.sampled_from([1, 2, 4])), data.draw(st.sampled_from([1, 2, 3])), data.draw(st.sampled_from([4, 8]))
    g = geometry(groups * per_group, groups, d, data.draw(st.integers(1, 12)))
    split, shape = data.draw(st.sampled_from([
        (qkv, ((per_group + 2) * groups * d // size, 3)), (gated, (6, 3)), (columns, (3, 2)), (vocabulary, (12 // size, 3))]))
    full_shapes = split(shape, g, 0, size)[0]
    hf = [torch.arange(float(torch.Size(s).numel())).view(s) + 1000 * i for i, s in enumerate(full_shapes)]
    parts = shards(split, shape, g, size, hf)
    back = [torch.full(s, torch.nan) for s in full_shapes]
    for rank, shard in enumerate(parts):
        for block in split(shape, g, rank, size)[1]:
            target = block.of_hf(back[block.source])
            assert torch.isnan(target).all(), "a row twice"
            target.copy_(block.of_shard(shard))
    assert all(torch.equal(a, b) for a, b in zip(back, hf, strict=True))
