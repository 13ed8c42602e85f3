"""The command line of verify, one layout at a time."""

import json
import os
import subprocess
import sys
import tempfile

import torch
import torch.distributed as dist

from .compare import TOLERANCE, compare, table
from .problem import one_rank, prepare
from .step import Case, take_steps

CASES = [Case(), Case(single=True)]


def main(argv: list[str] | None = None) -> int:
    """Verify the layout that torchrun started, or with --all-layouts those of layouts.py; the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["--reference"]:
        torch.save(take_steps(argv[2:], CASES, torch.float64), argv[1])
        return 0
    if "--all-layouts" in argv:
        from .layouts import all_layouts
        return all_layouts(argv)
    return one_layout(argv)


def one_layout(argv: list[str]) -> int:
    """One step of the job's layout on the ranks of torchrun, against a reference that the last of them starts."""
    rank = int(os.environ.get("RANK", 0))
    store = dist.TCPStore(os.environ.get("MASTER_ADDR", "localhost"), int(os.environ.get("MASTER_PORT", 29500)) + 1,
                          is_master=rank == 0, wait_for_workers=False)
    if rank == 0:
        directory = tempfile.mkdtemp(prefix="verify-")
        store.set("flags", json.dumps([directory, prepare(directory, argv)]))
    directory, flags = json.loads(store.get("flags"))
    reference = None
    if rank == int(os.environ.get("WORLD_SIZE", 1)) - 1:
        reference = subprocess.Popen([sys.executable, "-m", "megatron_grpo.verify", "--reference", f"{directory}/reference.pt", *one_rank(flags)],
                                     env=_alone(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    results = take_steps(flags, CASES)
    if reference is None or results is None:
        return 0
    output, _ = reference.communicate(timeout=600)
    if reference.returncode:
        print(f"the one-rank reference failed:\n{output[-4000:]}", file=sys.stderr)
        return 1
    failed = False
    for found, wanted in zip(results, torch.load(f"{directory}/reference.pt", weights_only=False), strict=True):
        lines = compare(found, wanted, tolerance(flags))
        print(table(lines), flush=True)
        failed |= not all(line.ok for line in lines)
        if wanted["near_ties"]:
            print(f"  {wanted['near_ties']} choices of experts are so close that rounding may flip them: repeat with another --seed")
    return int(failed)


def tolerance(flags: list[str]) -> float:
    """That of the job's dtype."""
    return TOLERANCE["bfloat16" if "--bf16" in flags else "float16" if "--fp16" in flags else "float32"]


def _alone() -> dict[str, str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TORCHELASTIC_")}
    return environment | {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "localhost",
                          "MASTER_PORT": str(int(os.environ.get("MASTER_PORT", 29500)) + 2)}
