"""Discounted returns over packed sequences, on one rank or over context-parallel shards.

    R_t = r_t + C_{t+1},    C_t = d_t R_t,    C beyond the last token = final_S,    d_t = gamma where step_T, else 1

so that a token that is no step (tool output, padding) neither decays what comes after it nor loses it, and a reward for the whole
response reaches its last step undiscounted. REINFORCE++, arXiv 2501.03262 equation 4: A_t = r - beta sum_{i >= t} KL_i at gamma 1.

No step of this waits for the device. The work is a few passes over T and small arrays of the sequences.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F


def discounted_returns(r_T: torch.Tensor, step_T: torch.Tensor, seq_T: torch.Tensor, num_seqs: int, gamma: float = 1.0,
                       final_S: torch.Tensor | None = None, *, chunk_T: torch.Tensor | None = None,
                       columns: tuple[tuple[int, ...], ...] = ((0,),), cp_group: "dist.ProcessGroup | None" = None) -> torch.Tensor:
    """The return of every token.

    Under context parallelism each rank scans its chunks, one all-gather exchanges (decay, value) of every chunk, and a second scan
    starts each chunk from what follows it on other ranks. Every rank of `cp_group` must call, whatever it holds.

    Args:
        r_T: [T] float32 or float64 reward of each token, 0 where it has none.
        step_T: [T] bool, tokens that count as a time step for gamma.
        seq_T: [T] int64 in [0, S), not decreasing.
        num_seqs: S.
        gamma: discount, in [0, 1].
        final_S: [S] what follows the last token: the reward of the whole response; 0 when not given.
        chunk_T: [T] int64 chunk of each token (parallel.layout.Layout.chunk_ids); only with cp_group.
        columns: the chunks that each CP rank holds, ascending (Layout.columns of every rank).
        cp_group: the ranks that hold the other chunks of the sequences, or None.

    Returns:
        [T] of r_T's dtype.
    """
    final_S = r_T.new_zeros(num_seqs) if final_S is None else final_S.to(r_T.dtype)
    if cp_group is None or cp_group.size() == 1:
        return _returns(r_T, step_T, seq_T, num_seqs, final_S, gamma)
    num_chunks, mine = sum(map(len, columns)), torch.tensor(columns[cp_group.rank()], device=r_T.device)
    cell_T = torch.cummax(seq_T * num_chunks + chunk_T, 0).values       # the tail of padding joins the last cell
    cell_SC = torch.arange(num_seqs, device=r_T.device)[:, None] * num_chunks + mine
    start_SC, stop_SC = torch.searchsorted(cell_T, cell_SC), torch.searchsorted(cell_T, cell_SC, right=True)
    local_T, num_cells = torch.searchsorted(cell_SC.flatten(), cell_T), cell_SC.numel()

    first = _returns(r_T, step_T, local_T, num_cells, r_T.new_zeros(num_cells), gamma)
    steps_T = F.pad(step_T.cumsum(0), (1, 0))
    decay_SC = torch.pow(gamma, (steps_T[stop_SC] - steps_T[start_SC]).to(r_T.dtype))
    at_start_SC = start_SC.clamp(max=len(r_T) - 1)
    value_SC = _decay(step_T[at_start_SC], gamma, r_T.dtype) * first[at_start_SC]
    value_SC = torch.where(stop_SC > start_SC, value_SC, 0.0)

    carries = torch.stack([decay_SC, value_SC]).to(r_T.dtype)
    gathered = r_T.new_empty(cp_group.size(), carries.numel())
    dist.all_gather_into_tensor(gathered.view(-1), carries.view(-1), group=cp_group)
    order = torch.tensor([c for held in columns for c in held], device=r_T.device).argsort()
    decay, value = gathered.view(-1, *carries.shape).permute(1, 2, 0, 3).flatten(2)[:, :, order]       # [S, num_chunks] each
    after = [final_S]                                                           # what follows each chunk, from the last on
    for c in range(num_chunks - 1, 0, -1):
        after.append(value[:, c] + decay[:, c] * after[-1])
    after_SC = torch.stack(after[::-1], dim=1)[:, mine]
    return _returns(r_T, step_T, local_T, num_cells, after_SC.flatten(), gamma)


def _returns(r_T, step_T, seg_T, num_segs, final_s, gamma):
    """One rank's returns of contiguous segments, each followed by `final_s`."""
    if len(r_T) == 0:
        return r_T.clone()
    stop_s = torch.searchsorted(seg_T, torch.arange(num_segs, device=seg_T.device), right=True)
    filled_s = torch.diff(stop_s, prepend=stop_s.new_zeros(1)) > 0
    end_s = torch.where(filled_s, stop_s - 1, len(r_T) - 1)
    x_T = r_T.index_add(0, end_s, torch.where(filled_s, final_s, 0.0))
    if gamma == 1:
        return _suffix_sum(x_T, seg_T, F.pad(stop_s[:-1], (1, 0)).clamp(max=len(r_T) - 1), end_s)
    decay_T = _decay(F.pad(step_T[1:], (0, 1)), gamma, r_T.dtype)      # of what follows the token
    decay_T[end_s] = 0
    return _scan(x_T, decay_T)


def _decay(step: torch.Tensor, gamma: float, dtype: torch.dtype) -> torch.Tensor:
    return torch.ones(step.shape, dtype=dtype, device=step.device).masked_fill_(step, gamma)


def _suffix_sum(x_T: torch.Tensor, seg_T: torch.Tensor, start_s: torch.Tensor, end_s: torch.Tensor) -> torch.Tensor:
    """Sum from each token to the end of its segment, in float32 accuracy: no sum takes in tokens of another segment.

    Rows of tokens are summed from their right edge. A row lacks what its last segment has in later rows, and is wrong where another
    segment ends inside it. Rows within one segment are mended at once; the first and the last row of each segment by themselves.
    """
    length, device = len(x_T), x_T.device
    row = max(8, min(512, length // len(end_s)))
    x = F.pad(x_T, (0, -length % row + row)).view(-1, row)                  # with a row to spare
    sums = x.flip(1).cumsum(1).flip(1)
    flat, spare = sums.view(-1), sums.numel() - 1
    first_row_s, last_row_s = start_s // row, end_s // row
    columns, segments = torch.arange(row, device=device), torch.arange(len(end_s), device=device)[:, None]

    def own(row_s):
        place = row_s[:, None] * row + columns
        return place, seg_T[place.clamp(max=length - 1)] == segments

    place, mine = own(last_row_s)
    in_last_row = torch.where(mine, x[last_row_s], 0.0).flip(1).cumsum(1).flip(1)
    to_edge_r = sums[:-1, 0].double().cumsum(0)                                             # of the pack, up to each row's edge
    total_s = F.pad(to_edge_r, (1, 0))[last_row_s] + in_last_row[:, 0]                      # of the pack, up to each segment's end
    first_r = torch.arange(0, length, row, device=device)
    last_r = seg_T[(first_r + row - 1).clamp(max=length - 1)]
    later_r = (total_s[last_r] - to_edge_r).to(x_T.dtype)                                   # of the row's last segment, in later rows
    within_r = seg_T[first_r] == last_r
    sums[:-1] += torch.where(within_r, later_r, 0.0)[:, None]
    flat.scatter_(0, torch.where(mine, place, spare).flatten(), in_last_row.flatten())
    place, mine = own(first_row_s)
    later_s = torch.where((first_row_s < last_row_s) & ~within_r[first_row_s], later_r[first_row_s], 0.0)
    flat.index_add_(0, place.flatten(), torch.where(mine, later_s[:, None], 0.0).flatten())
    return flat[:length]


def _scan(x_T: torch.Tensor, decay_T: torch.Tensor, rows: int = 64) -> torch.Tensor:
    """R_t = x_t + decay_t R_{t+1}, beyond the end 0: columns of `rows` tokens side by side, then the columns' own scan."""
    length = len(x_T)
    rows = min(rows, length)
    padding = (0, -length % rows)
    x = F.pad(x_T, padding).view(-1, rows).t().contiguous()
    decay = F.pad(decay_T, padding).view(-1, rows).t().contiguous()
    xs, decays = x.unbind(0), decay.unbind(0)
    for i in range(rows - 2, -1, -1):
        xs[i].addcmul_(decays[i], xs[i + 1])
        decays[i].mul_(decays[i + 1])               # now the decay of all that follows the column
    if x.shape[1] > 1:
        following = F.pad(_scan(x[0], decay[0])[1:], (0, 1))
        x.addcmul_(decay, following)
    return x.t().flatten()[:length]
