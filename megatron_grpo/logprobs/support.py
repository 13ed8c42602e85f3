"""The truncated support (top-p, top-k) under which the engine sampled each token, to be replayed in the trainer.

DeepSeek-V3.2 (arXiv 2512.02556, 3.1, "Keep Sampling Mask"): the engine's nucleus of each token is the support of the softmax under
pi_old and pi_theta too, so that the importance ratio compares distributions over the same tokens.
"""

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class SupportMask:
    """For each of T local positions the token ids that may be sampled there; a position without a list keeps the whole vocabulary.

    The position's target is always kept, whether listed or not.

    Attributes:
        ids: [n] integer token ids, those of position 0 first.
        row: [n] int64, the position of each id, ascending.
        offsets: [T + 1] int64 on the CPU: the ids of position t are offsets[t] .. offsets[t + 1]. It stays there, so that
            cutting into chunks of positions needs no device synchronisation.
    """

    ids: torch.Tensor
    row: torch.Tensor
    offsets: torch.Tensor

    @staticmethod
    def from_lengths(ids: torch.Tensor, lengths_T: torch.Tensor) -> "SupportMask":
        """From the lists of all positions, one after the other, and the length of each; length 0 keeps the whole vocabulary."""
        lengths_T = torch.as_tensor(lengths_T, dtype=torch.int64)
        if int(lengths_T.sum()) != len(ids):
            raise ValueError(f"{len(ids)} ids, but the lengths of their lists sum to {int(lengths_T.sum())}")
        offsets = torch.cat([lengths_T.new_zeros(1), lengths_T.cumsum(0)])
        return SupportMask(torch.as_tensor(ids), torch.repeat_interleave(torch.arange(len(lengths_T)), lengths_T), offsets)

    @staticmethod
    def from_response(ids, lengths_R, where_R: torch.Tensor, num_tokens: int, index_T: torch.Tensor) -> "SupportMask":
        """From the engine's lists of response tokens to a rank's shard of positions.

        Args:
            ids: the lists of all response tokens, one after the other.
            lengths_R: [sum of R] the length of each.
            where_R: [sum of R] where each response token stands in the stream (Layout.response_index).
            num_tokens: N, the length of the stream.
            index_T: [T] the stream position of each local one, -1 where padding (Layout.index).
        """
        ids, lengths_R = torch.as_tensor(ids), torch.as_tensor(lengths_R, dtype=torch.int64)
        if len(lengths_R) != len(where_R) or int(lengths_R.sum()) != len(ids):
            raise ValueError(f"sampling mask: {len(lengths_R)} lists of together {int(lengths_R.sum())} ids for {len(where_R)} response "
                             f"tokens and {len(ids)} ids")
        length_N, start_N = torch.zeros(2, num_tokens + 1, dtype=torch.int64).unbind()       # the last entry serves padding, index -1
        length_N[where_R] = lengths_R
        start_N[where_R] = lengths_R.cumsum(0) - lengths_R
        length_T, start_T = length_N[index_T], start_N[index_T]
        first = length_T.cumsum(0) - length_T
        where = torch.repeat_interleave(start_T - first, length_T) + torch.arange(int(length_T.sum()))
        return SupportMask.from_lengths(ids[where], length_T)

    def to(self, device) -> "SupportMask":
        """On another device, except `offsets`."""
        return replace(self, ids=self.ids.to(device), row=self.row.to(device))

    @property
    def num_rows(self) -> int:
        return len(self.offsets) - 1

    def dense(self, start: int, stop: int, first_column: int, columns: int) -> torch.Tensor:
        """[stop - start, columns] bool: which columns of positions start .. stop are in the support, on `ids`' device."""
        begin, end = int(self.offsets[start]), int(self.offsets[stop])
        row, column = self.row[begin:end] - start, self.ids[begin:end].to(torch.int64) - first_column
        keep = torch.ones(stop - start, dtype=torch.bool, device=row.device).index_fill_(0, row, False)
        keep = keep[:, None].repeat(1, columns + 1)                      # the last column takes the ids of other shards
        keep[row, torch.where((column >= 0) & (column < columns), column, columns)] = True
        return keep[:, :columns]
