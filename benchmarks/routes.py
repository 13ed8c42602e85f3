"""Bytes and time of routed experts: on the wire, at rest, in transit between ranks, held per rank; decode time.

    python benchmarks/routes.py [--repeat 30]

The floors are the ordered entropy of uniform routing for bytes and pybase64's bare decode of the same payload for time.
"""

import argparse
import math
import pickle
import sys
import time
from pathlib import Path

import numpy as np
import pybase64

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from megatron_grpo.parallel.layout import Layout
from megatron_grpo.routing.audit import RouteSpec, accept
from megatron_grpo.routing.codec import decode_sglang
from megatron_grpo.routing.placement import place

MODELS = {      # decoder layers, of which dense at first, K, experts
    "Qwen3-30B-A3B": (48, 0, 8, 128), "DeepSeek-V3": (61, 3, 8, 256), "Kimi-K2": (61, 1, 8, 384), "Qwen3-Next": (48, 0, 10, 512),
    "GLM-4.5-Air": (46, 1, 8, 128)}
TOKENS = 8192


def answer(layers, dense, topk, experts, tokens, seed=0):
    """What SGLang would send for `tokens` tokens: base64 of int32 [tokens - 1, layers, K]."""
    rng = np.random.default_rng(seed)
    some = rng.random((64, layers, experts), dtype=np.float32).argpartition(topk, axis=-1)[..., :topk].astype("<i4")
    routes = some[rng.integers(0, 64, tokens - 1)]
    routes[:, :dense] = 0
    return pybase64.b64encode(routes.tobytes())


def sizes():
    print(f"{'model':<16}{'layers x K, E':>16}{'wire b64':>10}{'wire int32':>12}{'at rest':>9}{'in transit':>12}{'floor':>8}   B/token")
    for name, (layers, dense, topk, experts) in MODELS.items():
        spec = RouteSpec(layers, tuple(range(dense, layers)), topk, experts)
        text = answer(layers, dense, topk, experts, TOKENS)
        routes = accept(name, text, spec, tokens=TOKENS)
        rows, moe = routes.shape[:2]
        sent = len(pickle.dumps(routes, protocol=5))        # a share as it goes to its rank
        floor = moe * sum(math.log2(experts - k) for k in range(topk)) / 8
        print(f"{name:<16}{f'{moe} x {topk}, {experts}':>16}{len(text) / rows:>10.0f}{layers * topk * 4:>12}{routes.nbytes / rows:>9.1f}"
              f"{sent / rows:>12.1f}{floor:>8.0f}")


def best(call, repeat):
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times) * 1e3, sorted(times)[repeat // 2] * 1e3


def decode_times(repeat):
    print(f"\ndecode of 25 MB, best and median of {repeat}; share of the floor = bare / ours")
    for experts in (128, 512):
        rows = 25_000_000 // (48 * 8 * 4)
        text = answer(48, 0, 8, experts, rows + 1)
        spec = RouteSpec(48, tuple(range(48)), 8, experts)
        bare, bare_median = best(lambda: pybase64.b64decode(text, validate=True), repeat)
        for label, call in (("decode_sglang", lambda: decode_sglang(text, layers=48, topk=8, rows=rows, num_experts=experts)),
                            ("accept (with audit)", lambda: accept(0, text, spec, tokens=rows + 1))):
            ours, median = best(call, repeat)
            print(f"  {experts} experts  {label:<20} {ours:6.1f} ms ({median:.1f})   bare base64 {bare:5.1f} ms ({bare_median:.1f})"
                  f"   {bare / ours:4.0%}")


def held(dp_batch=32, length=1024):
    """One optimizer step's routes on one rank, largest over ranks."""
    layers, dense, topk, experts = MODELS["Qwen3-30B-A3B"]
    routes = np.tile(np.arange(topk, dtype=np.int8), (length - 1, layers, 1))
    print(f"\nheld by the fullest rank: {dp_batch} sequences of {length} tokens, {layers} x {topk} of {experts}")
    print(f"{'DP':>4}{'CP':>4}{'SP':>4}{'PP':>4}{'MB':>10}{'x product':>12}")
    for dp, cp, sp, pp in ((1, 1, 1, 1), (2, 1, 1, 1), (1, 2, 1, 1), (1, 1, 2, 1), (1, 1, 1, 2), (4, 1, 1, 4), (2, 2, 2, 2), (4, 4, 4, 4)):
        count = dp_batch // dp
        layout = Layout((length,) * count, cp_size=cp, tp_size=sp)
        columns = range(layers // pp)
        share = max(place([routes] * count, layout, columns=columns, topk=topk, num_experts=experts, cp_rank=c, tp_rank=t).nbytes
                    for c in range(cp) for t in range(sp))
        print(f"{dp:>4}{cp:>4}{sp:>4}{pp:>4}{share / 1e6:>10.3f}{share * dp * cp * sp * pp / 1e6:>12.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--repeat", type=int, default=30, help="runs per timing")
    args = parser.parse_args()
    sizes()
    decode_times(args.repeat)
    held()
