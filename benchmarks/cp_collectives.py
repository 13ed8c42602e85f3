"""What context parallelism exchanges for a micro-batch: sequence log-ratios (GSPO) and returns (REINFORCE++), in one run.

    python benchmarks/cp_collectives.py [--ranks 2] [--sequences 64] [--length 2048]

Rows: the usual way, restated (each rank pads its chunks of a sequence's response to the full length, one all-reduce per sequence and
quantity); everything gathered at once (plain PyTorch, one all-gather of the shards); and this package (one all-reduce of [S, n] sums,
one all-gather of a carry per chunk). Bytes are what one rank hands to the collectives, forward and backward. The floor is the smallest
exchange that can do: two floats a sequence for the ratios (sum and the gradient that comes back), two floats per chunk for the returns.
"""

import argparse
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.meter import Collectives, free_port
from megatron_grpo.advantages.returns import discounted_returns
from megatron_grpo.parallel.collectives import all_gather, sequence_sums
from megatron_grpo.parallel.layout import Layout

GAMMA = 0.999


class _AllReduce(torch.autograd.Function):
    """Differentiable sum over ranks, as torch.distributed.nn has it."""

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


class Problem:
    """Sequences of random lengths whose second half is the response, and this rank's shard of their log-ratios and rewards."""

    def __init__(self, sequences: int, length: int):
        g = torch.Generator().manual_seed(0)
        lengths = torch.randint(length // 4, length + 1, (sequences,), generator=g)
        self.rank = dist.get_rank()
        self.layout = Layout(tuple(lengths.tolist()), cp_size=dist.get_world_size())
        where = self.layout.response_index((lengths // 2).tolist())
        mask = torch.zeros(self.layout.num_tokens, dtype=torch.bool)
        mask[where] = True
        stream = torch.randn(self.layout.num_tokens, generator=g) * 0.1
        self.mask_T, self.x_T = self.layout.shard(mask, self.rank, False), self.layout.shard(stream, self.rank)
        self.seq_T, self.chunk_T = self.layout.seq_ids(self.rank), self.layout.chunk_ids(self.rank)
        self.columns = tuple(self.layout.columns(r) for r in range(self.layout.cp_size))
        self.tokens_S = torch.zeros(sequences).index_add_(0, torch.repeat_interleave(torch.arange(sequences), lengths), mask.float())
        # for the per-sequence way: the positions of each sequence's masked tokens, here and within its response
        starts = torch.cumsum(lengths, 0) - lengths + lengths // 2 - 1
        index = self.layout.index(self.rank)
        self.here = [((self.seq_T == s) & self.mask_T).nonzero().squeeze(1) for s in range(sequences)]
        self.there = [index[t] - starts[s] for s, t in enumerate(self.here)]
        self.response = (lengths - lengths // 2).tolist()

    def full(self, x_T, s):
        """The usual: this rank's part of a response at its place in the full length, summed over ranks."""
        return _AllReduce.apply(torch.zeros(self.response[s]).index_copy(0, self.there[s], x_T[self.here[s]]))


def ratios_per_sequence(p, x_T):
    means = [p.full(x_T, s).sum() / p.tokens_S[s] for s in range(p.layout.num_seqs)]
    return torch.stack(means)[p.seq_T]


def ratios_gathered(p, x_T):
    x_N, mask_N = (p.layout.gather(all_gather(t, dist.group.WORLD)) for t in (x_T * p.mask_T, p.mask_T.float()))
    seq_N = torch.repeat_interleave(torch.arange(p.layout.num_seqs), torch.tensor(p.layout.lengths))
    sums = torch.zeros(2, p.layout.num_seqs).index_add(1, seq_N, torch.stack([x_N, mask_N]))
    return (sums[0] / sums[1])[p.seq_T]


def ratios_ours(p, x_T):
    return (sequence_sums((x_T * p.mask_T)[:, None], p.seq_T, p.layout.num_seqs, dist.group.WORLD)[:, 0] / p.tokens_S)[p.seq_T]


def returns_per_sequence(p, x_T):
    out = torch.zeros_like(x_T)
    for s in range(p.layout.num_seqs):
        r = p.full(x_T, s)
        every, one = torch.ones_like(r, dtype=torch.bool), torch.zeros(len(r), dtype=torch.int64)
        out[p.here[s]] = discounted_returns(r, every, one, 1, GAMMA)[p.there[s]]
    return out


def returns_gathered(p, x_T):
    r_N, mask_N = (p.layout.gather(all_gather(t, dist.group.WORLD)) for t in (x_T * p.mask_T, p.mask_T.float()))
    seq_N = torch.repeat_interleave(torch.arange(p.layout.num_seqs), torch.tensor(p.layout.lengths))
    return p.layout.shard(discounted_returns(r_N, mask_N > 0, seq_N, p.layout.num_seqs, GAMMA), p.rank)


def returns_ours(p, x_T):
    return discounted_returns(x_T * p.mask_T, p.mask_T, p.seq_T, p.layout.num_seqs, GAMMA, chunk_T=p.chunk_T, columns=p.columns,
                              cp_group=dist.group.WORLD)


WAYS = {"sequence log-ratios": (True, {"per sequence, full length": ratios_per_sequence, "all shards gathered": ratios_gathered,
                                       "this": ratios_ours}),
        "returns": (False, {"per sequence, full length": returns_per_sequence, "all shards gathered": returns_gathered,
                            "this": returns_ours})}


def measure(rank, args, port):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=args.ranks)
    p = Problem(args.sequences, args.length)
    say = print if rank == 0 else lambda *a: None
    say(f"{args.sequences} sequences, {p.layout.num_tokens} tokens, on {args.ranks} context-parallel ranks (gloo, CPU)")
    for title, (differentiable, ways) in WAYS.items():
        floor = 4 * 2 * args.sequences * (1 if differentiable else len(p.columns[0]))
        say(f"{title + (', forward and backward' if differentiable else ''):<42}{'ms':>9}{'collectives':>13}{'bytes':>12}{'of floor':>10}"
            f"{'largest difference':>20}")
        reference = None
        for name, fn in ways.items():
            x_T = p.x_T.clone().requires_grad_(differentiable)

            def step(fn=fn, x_T=x_T):
                y = fn(p, x_T)
                return (y, *torch.autograd.grad((y.exp() * p.mask_T).sum(), x_T)) if differentiable else (y,)

            with (meter := Collectives()).counted():
                result = [t.detach() * p.mask_T for t in step()]
            reference = reference or result
            difference = max((a - b).abs().max().item() for a, b in zip(result, reference, strict=True))
            best = float("inf")
            for _ in range(args.repeats):
                dist.barrier()
                start = time.perf_counter()
                step()
                best = min(best, time.perf_counter() - start)
            say(f"  {name:<40}{best * 1e3:>9.2f}{meter.count:>13}{meter.bytes:>12}{floor / meter.bytes:>10.1%}{difference:>20.1e}")
            if difference > 1e-3:
                raise SystemExit(f"{name}: differs by {difference}")
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--length", type=int, default=2048, help="longest sequence")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    mp.spawn(measure, (args, free_port()), nprocs=args.ranks)


if __name__ == "__main__":
    main()
