"""Host memory of one leader while a step's samples move, as the job grows to 1,024 data-parallel ranks.

    python -m benchmarks.rollout_memory [--ranks 1 8 64 256 1024] [--samples 8] [--json FILE]

Shapes of Qwen3-30B-A3B: 48 MoE layers, top-8 of 128 experts, so 384 bytes of routes a token. Every rank generates --samples samples with
log-normal lengths (median 2,048 tokens, sigma 1, cut at 16,384); the step is balanced by tokens and the samples move.
One rank runs the real balancing, packing and exchange; a child process answers for all of its peers. Memory is what Python and
numpy allocate on that rank (tracemalloc), at its peak.

`own` is the floor: the larger of the shares that the rank generated and that it trains on. `central` is what a rank would hold if
every rank got the whole step. `cards` is what all ranks must know of all samples to compute the same plan.
"""

import argparse
import json
import multiprocessing
import pickle
import socket
import tracemalloc
from unittest import mock

import numpy as np
import torch

from megatron_grpo.batch import Sample
from megatron_grpo.parallel.packing import partition
from megatron_grpo.rollout import exchange
from megatron_grpo.trainer.plan import SampleCard

LAYERS, TOPK, EXPERTS = 48, 8, 128
MEDIAN, SIGMA, LONGEST, PROMPT = 2048, 1.0, 16_384, 256


def length(sample_id: int) -> int:
    return PROMPT + min(LONGEST, max(1, int(MEDIAN * np.exp(SIGMA * np.random.default_rng([1, sample_id]).standard_normal()))))


def sample(sample_id: int) -> Sample:
    n = length(sample_id)
    r = n - PROMPT
    return Sample(sample_id, sample_id // 8, np.zeros(n, np.int64), PROMPT, np.ones(r, bool), np.zeros(r, np.float32),
                  routes=np.full((n - 1, LAYERS, TOPK), sample_id % EXPERTS, np.uint8), weight_versions=[("0", 0, r)])


class Peers:
    """Stands in for torch.distributed and the group of one rank: what is sent is dropped, what is received comes from a child process."""

    def __init__(self, rank: int, ranks: int, owner: dict[int, int], destination: dict[int, int]):
        self._rank, self._size, self.sent, self.received = rank, ranks, 0, 0
        self.socket, theirs = socket.socketpair()
        self.process = multiprocessing.get_context("fork").Process(
            target=answer, args=(theirs, self.socket, rank, owner, destination), daemon=True)
        self.process.start()
        theirs.close()
        self.asked: set[int] = set()

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def isend(self, tensor: torch.Tensor, group, group_dst: int):
        self.sent += tensor.nbytes
        return mock.Mock()

    def recv(self, tensor: torch.Tensor, group, group_src: int) -> None:
        if group_src not in self.asked:
            self.asked.add(group_src)
            self.socket.sendall(group_src.to_bytes(8, "little"))
        view = memoryview(tensor.numpy()).cast("B")
        while len(view):
            count = self.socket.recv_into(view)
            if not count:
                raise ConnectionError("the peers' process ended")
            view = view[count:]
        self.received += tensor.nbytes


def answer(connection: socket.socket, other_end: socket.socket, rank: int, owner: dict[int, int], destination: dict[int, int]) -> None:
    """Send the buffer of each rank that is asked for, its size first, until the other end is closed."""
    other_end.close()
    while source := connection.recv(8):
        source = int.from_bytes(source, "little")
        buffer = exchange.pack([sample(i) for i in sorted(destination) if destination[i] == rank and owner[i] == source])
        connection.sendall(len(buffer).to_bytes(8, "little"))
        connection.sendall(buffer)


def measure(ranks: int, samples: int, rank: int) -> dict:
    """One rank of `ranks`, which generates `samples` samples."""
    lengths = [length(i) for i in range(ranks * samples)]
    owner = {i: i // samples for i in range(ranks * samples)}
    destination = {i: part for part, ids in enumerate(partition(lengths, ranks)) for i in ids}
    nbytes = lambda ids: sum(lengths[i] * (8 + LAYERS * TOPK) + (lengths[i] - PROMPT) * 5 - LAYERS * TOPK for i in ids)
    generated = [i for i in owner if owner[i] == rank]
    trained = [i for i in owner if destination[i] == rank]
    cards = len(pickle.dumps([SampleCard(i, i // 8, i, n, n - PROMPT, owner[i], 1.0, (("task", 1.0),), True, n - PROMPT, False)
                              for i, n in enumerate(lengths)]))
    group = Peers(rank, ranks, owner, destination)
    tracemalloc.start()
    try:
        with mock.patch.object(exchange, "dist", group):
            result = exchange.exchange_samples([sample(i) for i in generated], destination, owner, group)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        group.socket.close()
        group.process.join()
    assert [s.sample_id for s in result] == sorted(trained) and all((s.routes == s.sample_id % EXPERTS).all() for s in result)
    moved = nbytes(i for i in trained if owner[i] != rank)
    return {"ranks": ranks, "own_mb": max(nbytes(generated), nbytes(trained)) / 1e6, "peak_mb": peak / 1e6, "cards_mb": cards / 1e6,
            "central_mb": nbytes(owner) / 1e6, "received_mb": group.received / 1e6, "received_floor_mb": moved / 1e6}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 8, 64, 256, 1024])
    parser.add_argument("--samples", type=int, default=8, help="samples that each rank generates")
    parser.add_argument("--json", help="write the figures to this file")
    args = parser.parse_args()
    print(f"{'ranks':>6}{'own MB':>9}{'peak MB':>9}{'of own':>8}{'cards MB':>10}{'central MB':>12}{'received MB':>13}{'of floor':>10}")
    results = []
    for ranks in args.ranks:
        r = measure(ranks, args.samples, rank=ranks // 2)
        results.append(r)
        share = f"{r['received_mb'] / r['received_floor_mb']:10.2f}" if r["received_floor_mb"] else f"{'-':>10}"
        print(f"{ranks:6d}{r['own_mb']:9.1f}{r['peak_mb']:9.1f}{r['peak_mb'] / r['own_mb']:8.2f}{r['cards_mb']:10.2f}"
              f"{r['central_mb']:12.1f}{r['received_mb']:13.1f}{share}", flush=True)
    if args.json:
        with open(args.json, "w") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
