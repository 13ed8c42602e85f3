"""`verify --all-layouts`: every parallel axis and its mixes, with every algorithm of the table, on up to 8 ranks of this machine.

Without --full each layout is paired with a few algorithms so that every pair (axis value, algorithm) occurs; with it, all with all.
"""

import itertools
import os
import subprocess
import sys
import tempfile

import torch

from .recipes import RECIPES

TP, PP, CP2, CP4 = ["--tensor-model-parallel-size", "2", "--sequence-parallel"], ["--pipeline-model-parallel-size", "2"], [
    "--context-parallel-size", "2"], ["--context-parallel-size", "4"]
VPP, EP, PADDED = ["--num-virtual-stages-per-pipeline-rank", "2"], ["--expert-model-parallel-size", "2"], ["--qkv-format", "bshd"]
CONTIGUOUS, PER_TOKEN = ["--cp-layout", "contiguous"], ["--calculate-per-token-loss"]
RECOMPUTE = ["--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"]
LAYOUTS = {     # name -> (ranks, flags)
    "dp2": (2, []), "tp2": (2, TP), "pp2": (2, PP), "pp2 vpp2": (2, PP + VPP), "cp2": (2, CP2), "cp4": (4, CP4), "ep2": (2, EP),
    "cp2 contiguous": (2, CP2 + CONTIGUOUS), "cp4 contiguous": (4, CP4 + CONTIGUOUS), "padded": (1, PADDED), "cp2 padded": (2, CP2 + PADDED),
    "recompute": (1, RECOMPUTE), "per token": (2, PER_TOKEN), "cp2 per token": (2, CP2 + PER_TOKEN), "cp2 recompute": (2, CP2 + RECOMPUTE),
    "tp2 cp2": (4, TP + CP2), "pp2 cp2": (4, PP + CP2), "tp2 pp2 vpp2": (4, TP + PP + VPP),
    "tp2 ep2": (2, [*TP, *EP, "--expert-tensor-parallel-size", "1"]),
    "tp2 cp2 ep2 dp2": (8, [*TP, *CP2, *EP, "--expert-tensor-parallel-size", "1"]), "pp2 vpp2 cp2 per token": (4, PP + VPP + CP2 + PER_TOKEN)}
EXTRA = {"gdpo": ["--gdpo-reward-keys", "a", "b"]}      # what an algorithm needs beside its name


def all_layouts(argv: list[str]) -> int:
    """Run the cells one after the other; prints a line each, and a table for those that fail. Exit code 1 if any fails."""
    from .verify import OURS, compare, one_rank, prepare, table

    common = [w for w in argv if w not in OURS]
    names = sorted(RECIPES)
    if "--full" in argv:
        cells = list(itertools.product(LAYOUTS, names))
    elif "--quick" in argv:
        cells = [(layout, names[i % len(names)]) for i, layout in enumerate(LAYOUTS)]
    else:       # each layout with three algorithms, each algorithm with several layouts
        cells = [(layout, names[(3 * i + k * 7) % len(names)]) for i, layout in enumerate(LAYOUTS) for k in range(3)]
    references: dict[str, tuple] = {}
    failed = 0
    with tempfile.TemporaryDirectory(prefix="verify-") as directory:
        for layout, algorithm in sorted(cells, key=lambda cell: cell[1]):
            if algorithm not in references:
                where = os.path.join(directory, algorithm)
                flags = prepare(where, [*common, "--algorithm", algorithm, *EXTRA.get(algorithm, [])])
                references[algorithm] = flags, _run(1, one_rank(flags), os.path.join(where, "reference.pt"), "float64")
            flags, (reference, said) = references[algorithm]
            ranks, more = LAYOUTS[layout]
            found, said = _run(ranks, [*flags, *more], os.path.join(directory, "found.pt"), "job") if reference else (None, said)
            lines = compare(found, reference) if found else []
            ok = bool(lines) and all(line.ok for line in lines)
            failed += not ok
            worst = f"{len(lines)} lines, largest error {lines[-1].error:.1e}" if lines else "no result"
            print(f"{'ok  ' if ok else 'FAIL'} {layout:<24} {algorithm:<28} {worst}", flush=True)
            if not ok:
                print(table(lines) if lines else said, flush=True)
    print(f"{len(cells) - failed} cells passed, {failed} failed")
    return int(failed > 0)


def _run(ranks: int, flags: list[str], path: str, dtype: str) -> tuple[dict | None, str]:
    """One step on `ranks` fresh processes -> (result, the end of what they said)."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--rdzv-backend", "c10d", "--rdzv-endpoint",
               "localhost:0", "-m", "megatron_grpo.verify", "--step", path, dtype, *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=os.environ | {"OMP_NUM_THREADS": "1"})
    result = torch.load(path, weights_only=False) if done.returncode == 0 else None
    return result, (done.stdout + done.stderr)[-3000:]
