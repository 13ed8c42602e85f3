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

    Raises:
        ValueError: cp_group has several ranks and chunk_T is not given.
    """
    final = r_T.new_zeros(num_seqs) if final_S is None else final_S.to(r_T.dtype)
    if cp_group is None or cp_group.size() == 1:
        return _returns(r_T, step_T, seq_T, num_seqs, final, gamma)
    if chunk_T is None:
        raise ValueError("returns over context-parallel shards need chunk_T, the chunk of each token")
    num_chunks, mine = sum(map(len, columns)), torch.tensor(columns[cp_group.rank()], device=r_T.device)
    cell_T = torch.cummax(seq_T * num_chunks + chunk_T, 0).values       # the tail of padding joins the last cell
    cell_SC = torch.arange(num_seqs, device=r_T.device)[:, None] * num_chunks + mine
    start_SC, stop_SC = torch.searchsorted(cell_T, cell_SC), torch.searchsorted(cell_T, cell_SC, right=True)
    local_T, num_cells = torch.searchsorted(cell_SC.flatten(), cell_T), cell_SC.numel()

    first = _returns(r_T, step_T, local_T, num_cells, r_T.new_zeros(num_cells), gamma)
    steps_T = F.pad(step_T.cumsum(0), (1, 0))
    decay_SC = torch.pow(gamma, (steps_T[stop_SC] - steps_T[start_SC]).to(r_T.dtype))
    at_start_SC = start_SC.clamp(max=len(r_T) - 1)
    value_SC = first[at_start_SC]
    value_SC = torch.where(step_T[at_start_SC], gamma * value_SC, value_SC)
    value_SC = torch.where(stop_SC > start_SC, value_SC, 0.0)

    carries = torch.stack([decay_SC, value_SC]).to(r_T.dtype)
    gathered = r_T.new_empty(cp_group.size(), carries.numel())
    dist.all_gather_into_tensor(gathered.view(-1), carries.view(-1), group=cp_group)
    order = torch.tensor([c for held in columns for c in held], device=r_T.device).argsort()
    decay, value = gathered.view(-1, *carries.shape).permute(1, 2, 0, 3).flatten(2)[:, :, order]       # [S, num_chunks] each
    after = [final]                                                             # what follows each chunk, from the last on
    for c in range(num_chunks - 1, 0, -1):
        after.append(value[:, c] + decay[:, c] * after[-1])
    after_SC = torch.stack(after[::-1], dim=1)[:, mine]
    return _returns(r_T, step_T, local_T, num_cells, after_SC.flatten(), gamma)


def _returns(r_T, step_T, seg_T, num_segs, final_s, gamma):
    """One rank's returns of contiguous segments, each followed by `final_s`."""
    length, segments = len(r_T), torch.arange(num_segs, device=seg_T.device)
    if length == 0:
        return r_T.clone()
    stop_s = torch.searchsorted(seg_T, segments, right=True)
    start_s = F.pad(stop_s[:-1], (1, 0))
    filled_s = stop_s > start_s
    final_s, end_s = torch.where(filled_s, final_s, 0.0), torch.where(filled_s, stop_s - 1, length - 1)
    if gamma == 1:
        return _suffix_sum(r_T, seg_T, start_s.clamp(max=length - 1), end_s, final_s)
    x, follows = _columns(r_T), _columns(F.pad(step_T[1:], (0, 1)))
    one, discount = x.new_ones(()), x.new_full((), gamma)
    decay = torch.where(follows, discount, one)                     # of what follows the token
    at_s = end_s % x.shape[0] * x.shape[1] + end_s // x.shape[0]
    x.view(-1).index_add_(0, at_s, final_s)
    decay.view(-1)[at_s] = 0
    return _scan(x, decay).t().flatten()[:length]


def _columns(x_T: torch.Tensor, rows: int = 64) -> torch.Tensor:
    """[T] -> [rows, T / rows], padded with zeros: each column is a stretch of `rows` tokens."""
    rows = min(rows, len(x_T))
    return F.pad(x_T, (0, -len(x_T) % rows)).view(-1, rows).t().contiguous()


def _scan(x: torch.Tensor, decay: torch.Tensor) -> torch.Tensor:
    """R_t = x_t + decay_t R_{t+1} in the order of `_columns`, beyond the end 0; in place. All columns at once, then their first tokens."""
    xs, decays = x.unbind(0), decay.unbind(0)
    for i in range(len(xs) - 2, -1, -1):
        xs[i].addcmul_(decays[i], xs[i + 1])
        decays[i].mul_(decays[i + 1])                       # now of what follows the column
    if x.shape[1] > 1:
        firsts = _scan(_columns(x[0]), _columns(decay[0])).t().flatten()[:x.shape[1]]
        x.addcmul_(decay, F.pad(firsts[1:], (0, 1)))
    return x


def _suffix_sum(x_T: torch.Tensor, seg_T: torch.Tensor, start_s: torch.Tensor, end_s: torch.Tensor, final_s: torch.Tensor) -> torch.Tensor:
    """Sum from each token to the end of its segment, plus `final_s`, in float32 accuracy: no sum takes in another segment.

    Tokens are cut into rows. Inside a row, sums run to its right edge, and a row within one segment adds what the segment has in
    later rows. A row in which a segment ends is put together anew, from each segment's own part.
    """
    length, num_segs = len(x_T), len(end_s)
    row = max(8, min(128, length // num_segs))
    x = (F.pad(x_T, (0, -length % row)) if length % row else x_T).view(-1, row)
    sums = x.cumsum(1)
    row_sum_r = sums[:, -1].clone()
    torch.sub(x, sums, out=sums)

    row_2s = torch.cat([end_s, start_s]) // row                                     # each segment's last row, then its first
    last_s, first_s = row_2s[:num_segs], row_2s[num_segs:]
    place = row_2s[:, None] * row + torch.arange(row, device=x.device)
    own = seg_T[place.clamp(max=length - 1)] == torch.arange(num_segs, device=x.device).repeat(2)[:, None]
    own_sums = torch.where(own, x[row_2s], 0.0).flip(1).cumsum(1).flip(1)           # of its own tokens to the right edge

    to_edge_r = row_sum_r.double().cumsum(0)                                        # of the pack, up to a row's right edge
    total_s = F.pad(to_edge_r, (1, 0))[last_s] + own_sums[:num_segs, 0] + final_s
    left_r = torch.arange(0, length, row, device=x.device)
    last_seg_r = seg_T[(left_r + row - 1).clamp(max=length - 1)]
    later_r = (total_s[last_seg_r] - to_edge_r).to(x.dtype)                         # what follows a row in its last segment
    sums += (row_sum_r + later_r)[:, None]

    goes_on_s = (first_s < last_s) & (seg_T[left_r] != last_seg_r)[first_s]         # begins in a row where another ends
    used = own & torch.cat([torch.ones_like(goes_on_s), goes_on_s])[:, None]
    sums[last_s] = 0
    sums.index_add_(0, row_2s, torch.where(used, own_sums + torch.cat([final_s, later_r[first_s]])[:, None], 0.0))
    return sums.view(-1)[:length]
