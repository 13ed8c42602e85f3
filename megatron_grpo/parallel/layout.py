"""Which rank holds which token of which sequence: the only place that knows.

Three streams, from the data to a rank:

* the *stream*: the sequences of a micro-batch one after the other, without padding, N = sum(lengths) tokens;
* the *padded stream*: the same cut into rows, each padded to what Megatron needs;
* the *shard* of a context-parallel rank: its chunks of every row, T tokens.

    layout       rows                              chunks of a row    chunks of rank r
    thd zigzag   the sequences, then a tail        2 cp               r and 2 cp - 1 - r
    thd contig.  one: all sequences and the tail   cp                 r
    bshd         the sequences, all equally long   2 cp or cp         as above

`index(cp_rank)` maps a shard to the stream (-1 = padding); everything else derives from it or from the same arrays.
Zigzag is the load-balanced split of Megatron and Transformer Engine; contiguous is the split of attention that all-gathers
its keys (slime's --allgather-cp). With cp_size 1 the two are the same and a row is one chunk.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

KINDS = ("zigzag", "contiguous")
FORMATS = ("thd", "bshd")


@dataclass(frozen=True)
class Layout:
    """The layout of one micro-batch. No sequences at all count as one sequence without tokens, so S >= 1 and T >= 1.

    Attributes:
        lengths: [S] tokens of each sequence, without padding; 0 is legal.
        cp_size: context-parallel ranks.
        tp_size: ranks of sequence parallelism, among which a shard is divided again; 1 without --sequence-parallel.
        kind: "zigzag" or "contiguous".
        qkv_format: "thd" (packed) or "bshd" (one row a sequence, padded to a common length).
        multiple: the length that one tensor-parallel rank holds of a shard (bshd: of a row of it) is a multiple of this.
    """

    lengths: tuple[int, ...]
    cp_size: int = 1
    tp_size: int = 1
    kind: str = "zigzag"
    qkv_format: str = "thd"
    multiple: int = 1

    def __post_init__(self):
        object.__setattr__(self, "lengths", tuple(int(n) for n in self.lengths) or (0,))
        if min(self.lengths) < 0:
            raise ValueError(f"sequence {int(np.argmin(self.lengths))} has a negative length: {min(self.lengths)}")
        if min(self.cp_size, self.tp_size, self.multiple) < 1:
            raise ValueError(f"cp_size {self.cp_size}, tp_size {self.tp_size} and multiple {self.multiple} must be at least 1")
        if self.kind not in KINDS or self.qkv_format not in FORMATS:
            raise ValueError(f"kind {self.kind!r} must be one of {KINDS} and qkv_format {self.qkv_format!r} one of {FORMATS}")

    # ---- sizes ----------------------------------------------------------------------------------------------------

    @property
    def num_seqs(self) -> int:
        """S."""
        return len(self.lengths)

    @cached_property
    def num_tokens(self) -> int:
        """N, tokens without padding."""
        return sum(self.lengths)

    @cached_property
    def num_chunks(self) -> int:
        """C, the chunks that a row is cut into."""
        return 1 if self.cp_size == 1 else 2 * self.cp_size if self.kind == "zigzag" else self.cp_size

    @cached_property
    def local_tokens(self) -> int:
        """T, the length of every rank's shard."""
        return int(self._row_lengths.sum()) // self.cp_size

    @property
    def local_shape(self) -> tuple[int, int]:
        """(batch, sequence) of a rank's token tensor: (1, T) packed, (S, T / S) padded."""
        rows = self.num_seqs if self.qkv_format == "bshd" else 1
        return rows, self.local_tokens // rows

    # ---- arrays of the streams ------------------------------------------------------------------------------------

    @cached_property
    def _starts(self) -> np.ndarray:
        """[S] where each sequence starts in the stream."""
        return _exclusive_cumsum(np.array(self.lengths))

    @cached_property
    def _padded_lengths(self) -> np.ndarray:
        """[S] or [S + 1] padded length of each sequence, then of the tail if there is one."""
        lengths = np.array(self.lengths)
        unit = math.lcm(self.num_chunks, self.cp_size * self.tp_size * self.multiple)      # of what a rank's shard must divide
        if self.qkv_format == "bshd":
            return np.full(len(lengths), _round_up(max(int(lengths.max()), 1), unit))
        if self.kind == "zigzag":
            lengths = _round_up(lengths, self.num_chunks)
        total = int(lengths.sum())
        tail = _round_up(max(total, 1), unit) - total
        return np.append(lengths, tail) if tail else lengths

    @cached_property
    def _row_lengths(self) -> np.ndarray:
        one_row = self.qkv_format == "thd" and (self.kind == "contiguous" or self.cp_size == 1)
        return self._padded_lengths.sum(keepdims=True) if one_row else self._padded_lengths

    @cached_property
    def _padded_starts(self) -> np.ndarray:
        return _exclusive_cumsum(self._padded_lengths)

    @cached_property
    def _padded_index(self) -> np.ndarray:
        """[padded stream] the position in the stream, -1 where padding."""
        index = np.full(int(self._padded_lengths.sum()), -1)
        offset = self._padded_starts[:self.num_seqs] - self._starts
        index[np.arange(self.num_tokens) + np.repeat(offset, self.lengths)] = np.arange(self.num_tokens)
        return index

    @cached_property
    def _padded_seq(self) -> np.ndarray:
        """[padded stream] the sequence; the tail counts as the last one."""
        return np.repeat(np.minimum(np.arange(len(self._padded_lengths)), self.num_seqs - 1), self._padded_lengths)

    @cached_property
    def _padded_chunk(self) -> np.ndarray:
        """[padded stream] the chunk of its row."""
        sizes = np.repeat(self._row_lengths // self.num_chunks, self.num_chunks)
        return np.repeat(np.tile(np.arange(self.num_chunks), len(self._row_lengths)), sizes)

    def columns(self, cp_rank: int) -> tuple[int, ...]:
        """The chunks of every row that a rank holds, in ascending order."""
        if not 0 <= cp_rank < self.cp_size:
            raise ValueError(f"cp_rank {cp_rank} is not in [0, {self.cp_size})")
        return (cp_rank,) if self.num_chunks == self.cp_size else (cp_rank, self.num_chunks - 1 - cp_rank)

    def _slots(self, cp_rank: int) -> np.ndarray:
        """[T] the position of each token of a shard in the padded stream."""
        columns = np.array(self.columns(cp_rank))
        size = self._row_lengths // self.num_chunks
        starts = _exclusive_cumsum(self._row_lengths)[:, None] + columns * size[:, None]
        return _ranges(starts.ravel(), np.repeat(size, len(columns)))

    # ---- one rank's view ------------------------------------------------------------------------------------------

    def index(self, cp_rank: int = 0) -> torch.Tensor:
        """[T] int64: the position in the stream of each token of a rank's shard, -1 where padding."""
        return torch.from_numpy(self._padded_index[self._slots(cp_rank)])

    def hidden_index(self, cp_rank: int = 0, tp_rank: int = 0) -> torch.Tensor:
        """[T / tp_size] int64: `index` of the rows that a decoder layer sees on a sequence-parallel rank.

        Megatron's hidden states are [sequence, batch, H] and sequence parallelism cuts the first dimension.
        """
        if not 0 <= tp_rank < self.tp_size:
            raise ValueError(f"tp_rank {tp_rank} is not in [0, {self.tp_size})")
        return self.index(cp_rank).view(self.local_shape).T.reshape(self.tp_size, -1)[tp_rank]

    def seq_ids(self, cp_rank: int = 0) -> torch.Tensor:
        """[T] int64 in [0, S): the sequence of each position, also of its padding; the tail has that of the last sequence."""
        return torch.from_numpy(self._padded_seq[self._slots(cp_rank)])

    def positions(self, cp_rank: int = 0) -> torch.Tensor:
        """[T] int64: the position within the sequence, counted on through its padding; the tail restarts at 0."""
        slots = self._slots(cp_rank)
        return torch.from_numpy(slots - np.repeat(self._padded_starts, self._padded_lengths)[slots])

    def chunk_ids(self, cp_rank: int = 0) -> torch.Tensor:
        """[T] int64 in [0, C): the chunk of each position. Ranks hold whole chunks; within a sequence they follow in this order."""
        return torch.from_numpy(self._padded_chunk[self._slots(cp_rank)])

    def chunk_lengths(self) -> torch.Tensor:
        """[S, C] int64: tokens of each sequence in each chunk, without padding. Rank r holds the columns `columns(r)`."""
        real = self._padded_index >= 0
        key = self._padded_seq[real] * self.num_chunks + self._padded_chunk[real]
        return torch.from_numpy(np.bincount(key, minlength=self.num_seqs * self.num_chunks)).view(self.num_seqs, self.num_chunks)

    # ---- sequence boundaries, as attention wants them ---------------------------------------------------------------

    @cached_property
    def cu_seqlens(self) -> torch.Tensor:
        """int32 boundaries without padding, over all ranks; the tail is one more sequence, without tokens."""
        lengths = np.array(self.lengths + (0,) * (len(self._padded_lengths) - self.num_seqs))
        return torch.from_numpy(np.append(0, np.cumsum(lengths)).astype(np.int32))

    @cached_property
    def cu_seqlens_padded(self) -> torch.Tensor:
        """int32 boundaries in the padded stream, over all ranks; the tail is one more sequence."""
        return torch.from_numpy(np.append(0, np.cumsum(self._padded_lengths)).astype(np.int32))

    @cached_property
    def max_seqlen(self) -> int:
        """The longest padded sequence or tail."""
        return int(self._padded_lengths.max())

    # ---- moving data ------------------------------------------------------------------------------------------------

    def shard(self, x_stream: torch.Tensor, cp_rank: int = 0, fill: float = 0) -> torch.Tensor:
        """[N, ...] -> [T, ...], with `fill` where padding."""
        self._check(x_stream, self.num_tokens, "the stream")
        index = self.index(cp_rank).to(x_stream.device)
        if self.num_tokens == 0:
            return x_stream.new_full((len(index), *x_stream.shape[1:]), fill)
        padding = (index < 0).view(-1, *[1] * (x_stream.dim() - 1))
        return x_stream[index.clamp(min=0)].masked_fill(padding, fill)

    @cached_property
    def _gather_index(self) -> torch.Tensor:
        """[N] the position of each token of the stream in the concatenation of all shards."""
        index = torch.cat([self.index(r) for r in range(self.cp_size)])
        slots = (index >= 0).nonzero().squeeze(1)
        out = torch.empty(self.num_tokens, dtype=torch.int64)
        out[index[slots]] = slots
        return out

    def gather(self, shards: Sequence[torch.Tensor]) -> torch.Tensor:
        """The shards of all context-parallel ranks, in rank order, -> [N, ...]; the inverse of `shard`."""
        if len(shards) != self.cp_size:
            raise ValueError(f"{len(shards)} shards for {self.cp_size} context-parallel ranks")
        for x_T in shards:
            self._check(x_T, self.local_tokens, "a shard")
        return torch.cat(list(shards))[self._gather_index.to(shards[0].device)]

    def labels(self, x_stream: torch.Tensor, fill: float = 0) -> torch.Tensor:
        """[N] -> [N]: the next token of the same sequence, `fill` at each sequence's last; shard the result, not the input."""
        self._check(x_stream, self.num_tokens, "the stream")
        out = torch.cat([x_stream[1:], x_stream[:1]])
        ends = self._starts + np.array(self.lengths) - 1
        out[torch.from_numpy(ends[np.array(self.lengths) > 0]).to(out.device)] = fill
        return out

    def response_index(self, prompt_lengths: Sequence[int]) -> torch.Tensor:
        """[sum of R] int64: where in the stream each response token stands, that is at the token before it.

        Args:
            prompt_lengths: [S] P of each sequence of N tokens; its R = N - P response tokens stand at P - 1 .. N - 2.
        """
        prompts, lengths = np.array(prompt_lengths, dtype=np.int64), np.array(self.lengths)
        if prompts.shape != lengths.shape:
            if lengths.any() or prompts.size:
                raise ValueError(f"{prompts.size} prompt lengths for {lengths.size} sequences")
            prompts = lengths
        bad = (prompts > lengths) | ((prompts < 1) & (lengths > 0))
        if bad.any():
            s = int(bad.argmax())
            raise ValueError(f"sequence {s}: a prompt of {prompts[s]} tokens in {lengths[s]} tokens; it must be at least 1 and at most all")
        return torch.from_numpy(_ranges(self._starts + prompts - 1, lengths - prompts))

    @staticmethod
    def _check(x: torch.Tensor, length: int, what: str) -> None:
        if x.dim() < 1 or x.shape[0] != length:
            raise ValueError(f"{what} has {length} tokens, but the tensor has shape {tuple(x.shape)}")


def _round_up(n, unit: int):
    return -(-n // unit) * unit


def _exclusive_cumsum(x: np.ndarray) -> np.ndarray:
    return np.cumsum(x) - x


def _ranges(starts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """The concatenation of arange(start, start + size) over all pairs."""
    return np.repeat(starts - _exclusive_cumsum(sizes), sizes) + np.arange(int(sizes.sum()))
