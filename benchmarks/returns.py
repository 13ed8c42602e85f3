"""Discounted returns of packed sequences on one rank: time, bytes moved and share of the floor, in one run.

    python benchmarks/returns.py [--sequences 64] [--length 8192] [--device cpu]

Rows: plain PyTorch (gamma 1: flipped cumulative sum of each sequence; else a loop over time steps, all sequences at once); the usual way,
restated (per sequence: mask, reward on the last trained token found by reading it back, padding; then products of 128 tokens with a
matrix of powers, carried from block to block; tool tokens count as steps); and this package. The floor reads a reward and writes
a return, 8 bytes a token, at the speed of a copy on this machine. `bytes` is what that copy would have moved in the row's time.
"""

import argparse
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.meter import copy_bandwidth, peak_bytes, seconds
from megatron_grpo.advantages.returns import discounted_returns

BLOCK = 128


class Problem:
    def __init__(self, sequences: int, length: int, device: torch.device):
        g = torch.Generator().manual_seed(0)
        self.lengths = [length] * sequences
        self.r_T = (torch.randn(sequences * length, generator=g) * 0.01).to(device)
        self.step_T = torch.ones(sequences * length, dtype=torch.bool, device=device)
        self.seq_T = torch.arange(sequences, device=device).repeat_interleave(length)
        self.final_S = torch.randn(sequences, generator=g).to(device)


def plain(p: Problem, gamma: float) -> torch.Tensor:
    if gamma == 1:
        parts = zip(p.r_T.split(p.lengths), p.final_S, strict=True)
        return torch.cat([r.flip(0).cumsum(0).flip(0) + final for r, final in parts])
    r = p.r_T.view(len(p.lengths), -1)
    out, following = torch.empty_like(r), p.final_S
    for t in range(r.shape[1] - 1, -1, -1):
        out[:, t] = r[:, t] + following
        following = gamma * out[:, t]
    return out.flatten()


def usual(p: Problem, gamma: float) -> torch.Tensor:
    rows = []
    for r, mask, final in zip(p.r_T.split(p.lengths), p.step_T.split(p.lengths), p.final_S, strict=True):
        if not mask.sum().item():
            raise ValueError("a sequence without a trained token")
        row = r * mask
        row[mask.nonzero()[-1]] += final
        rows.append(row)
    backwards = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).flip(1)
    width = backwards.shape[1]
    blocks = F.pad(backwards, (0, -width % BLOCK)).view(len(rows), -1, BLOCK)
    powers = gamma ** torch.arange(BLOCK + 1, dtype=blocks.dtype, device=blocks.device)
    distance = torch.arange(BLOCK, device=blocks.device)[None] - torch.arange(BLOCK, device=blocks.device)[:, None]
    within = blocks @ torch.where(distance >= 0, powers[distance.clamp(min=0)], 0.0)
    out, carry = torch.empty_like(within), torch.zeros(len(rows), device=blocks.device)
    for b in range(within.shape[1]):
        out[:, b] = within[:, b] + carry[:, None] * powers[1:]
        carry = out[:, b, -1]
    return torch.cat([row[:n] for row, n in zip(out.view(len(rows), -1)[:, :width].flip(1), p.lengths, strict=True)])


def this(p: Problem, gamma: float) -> torch.Tensor:
    return discounted_returns(p.r_T, p.step_T, p.seq_T, len(p.lengths), gamma, p.final_S)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=10)
    args = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device(args.device)
    p, bandwidth = Problem(args.sequences, args.length, device), copy_bandwidth(device)
    floor = 8 * len(p.r_T)
    print(f"{args.sequences} x {args.length} tokens, float32, {device}; a copy moves {bandwidth / 1e9:.1f} GB/s; "
          f"the floor is {floor} bytes, {floor / bandwidth * 1e3:.2f} ms")
    print(f"{'gamma':<8}{'way':<16}{'ms':>9}{'bytes':>14}{'of floor':>10}{'peak memory':>13}{'largest error':>15}")
    for gamma in (1.0, 0.999):
        exact = discounted_returns(p.r_T.double(), p.step_T, p.seq_T, len(p.lengths), gamma, p.final_S.double())
        for name, fn in (("plain PyTorch", plain), ("the usual", usual), ("this", this)):
            error = (fn(p, gamma) - exact).abs().max().item()
            if error > 1e-3:
                raise SystemExit(f"{name}: differs from float64 by {error}")
            time = seconds(lambda fn=fn, gamma=gamma: fn(p, gamma), device, args.repeats if fn is not plain or gamma == 1 else 1)
            peak = peak_bytes(lambda fn=fn, gamma=gamma: fn(p, gamma), device)
            print(f"{gamma:<8}{name:<16}{time * 1e3:>9.2f}{int(time * bandwidth):>14}{floor / bandwidth / time:>10.1%}"
                  f"{peak:>13}{error:>15.1e}")


if __name__ == "__main__":
    main()
