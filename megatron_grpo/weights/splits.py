"""How one Megatron tensor is made of rows and columns of Hugging Face tensors.

A split answers, for tensor-parallel rank r of n: which block of which Hugging Face tensor lies where in this rank's shard?
Loading reads the blocks, exporting writes them back, so the two can not disagree.

    rows        cut along dim 0
    columns     [..., n * b] cut along dim 1 (row-parallel weights)
    whole       every rank holds all of it (norms, router)
    vocabulary  rows, of which those at and above the vocabulary size are Megatron's padding and exist on no disk
    gated       gate and up projections: a shard is [gate rows of r; up rows of r]
    qkv         query, key and value projections: rows of [q q k v | q q k v | ...], one block a key-value group, cut along dim 0
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Geometry:
    """The sizes that a shard's shape does not tell.

    Attributes:
        heads, groups, head_dim: query heads, key-value heads, channels of a head.
        vocab_size: rows of the embedding on disk (without Megatron's padding).
        num_layers: decoder layers.
        num_experts: routed experts of a layer; 0 for a dense model.
        tied: the output layer is the embedding.
    """

    heads: int
    groups: int
    head_dim: int
    vocab_size: int
    num_layers: int
    num_experts: int = 0
    tied: bool = False


@dataclass(frozen=True)
class Block:
    """The block `hf[rows, columns]` of Hugging Face tensor number `source` lies in `shard[shard_rows]`.

    `columns` is None for the full width (and for vectors, which have no columns).
    """

    source: int
    rows: tuple[int, int]
    shard_rows: tuple[int, int]
    columns: tuple[int, int] | None = None

    def of_hf(self, tensor):
        """The block of the Hugging Face tensor: a view, or what a safetensors slice reads."""
        rows = slice(*self.rows)
        return tensor[rows] if self.columns is None else tensor[rows, slice(*self.columns)]

    def of_shard(self, tensor):
        return tensor[slice(*self.shard_rows)]


Split = Callable[[Shape, Geometry, int, int], tuple[list[Shape], list[Block]]]
"""(shard shape, geometry, rank, size) -> (shapes of the full Hugging Face tensors, blocks of this rank)."""


def whole(shape: Shape, geometry: Geometry, rank: int, size: int):
    return [shape], [Block(0, (0, shape[0]), (0, shape[0]))]


def rows(shape: Shape, geometry: Geometry, rank: int, size: int):
    height = shape[0]
    return [(height * size, *shape[1:])], [Block(0, (rank * height, (rank + 1) * height), (0, height))]


def columns(shape: Shape, geometry: Geometry, rank: int, size: int):
    width = shape[1]
    return [(shape[0], width * size)], [Block(0, (0, shape[0]), (0, shape[0]), (rank * width, (rank + 1) * width))]


def vocabulary(shape: Shape, geometry: Geometry, rank: int, size: int):
    if shape[0] * size < geometry.vocab_size:
        raise ValueError(f"the model's padded vocabulary has {shape[0] * size} rows, the checkpoint {geometry.vocab_size}: "
                         f"raise --vocab-size (or --padded-vocab-size) to {geometry.vocab_size}")
    return [(geometry.vocab_size, *shape[1:])], _cut([(0, 0, geometry.vocab_size)], rank * shape[0], shape[0])


def gated(shape: Shape, geometry: Geometry, rank: int, size: int):
    half = shape[0] // 2
    full = (half * size, *shape[1:])
    mine = (rank * half, (rank + 1) * half)
    return [full, full], [Block(0, mine, (0, half)), Block(1, mine, (half, 2 * half))]


def qkv(shape: Shape, geometry: Geometry, rank: int, size: int):
    d, per_group = geometry.head_dim, geometry.heads // geometry.groups
    total = (geometry.heads + 2 * geometry.groups) * d
    if shape[0] * size != total:
        raise ValueError(f"the fused QKV has {shape[0] * size} rows, but {geometry.heads} heads and {geometry.groups} query groups of "
                         f"{d} channels make {total}: check --num-attention-heads, --num-query-groups, --kv-channels")
    runs = [run for g in range(geometry.groups)
            for run in ((0, g * per_group * d, per_group * d), (1, g * d, d), (2, g * d, d))]
    hf_shapes = [(heads * d, *shape[1:]) for heads in (geometry.heads, geometry.groups, geometry.groups)]
    return hf_shapes, _cut(runs, rank * shape[0], shape[0])


def _cut(runs: Sequence[tuple[int, int, int]], start: int, length: int) -> list[Block]:
    """The part [start, start + length) of the rows that `runs` (source, first row, number of rows) make one after the other."""
    blocks, position = [], 0
    for source, first, count in runs:
        a, b = max(position, start), min(position + count, start + length)
        if a < b:
            blocks.append(Block(source, (first + a - position, first + b - position), (a - start, b - start)))
        position += count
    return blocks
