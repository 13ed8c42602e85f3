"""Checkpoints: Megatron's `torch_dist` for weights, optimizer, schedule and RNG; beside it what the rollouts need.

    SAVE/iter_0000012/              Megatron's checkpoint
    SAVE/grpo/iter_0000012/dp_00000.pt   each leader's prompt position and carried-over samples
    SAVE/latest_checkpointed_iteration.txt

The leaders' files are written, flushed and renamed before Megatron's save starts, and Megatron moves the pointer only
when its own files are complete, so the pointer never names a half-written checkpoint. A run that was killed while the pointer
itself was being written finds the newest complete checkpoint instead (`repair_pointer`).
"""

import contextlib
import os
import re
import shutil

import torch
import torch.distributed as dist

from .groups import ControlGroups

POINTER = "latest_checkpointed_iteration.txt"


def save(args, trained, groups: ControlGroups, iteration: int, leader_state: dict | None, keep: int | None) -> None:
    """Collective over all ranks; `leader_state` is given on leaders."""
    from megatron.training.checkpointing import save_checkpoint

    if groups.is_leader:
        directory = _leader_directory(args.save, iteration)
        os.makedirs(directory, exist_ok=True)
        _write_atomically(leader_state, os.path.join(directory, f"dp_{groups.dp_rank:05d}.pt"))
    dist.barrier()
    save_checkpoint(iteration, trained.model, trained.optimizer, trained.scheduler, 0)
    if keep is not None:
        dist.barrier()
        if dist.get_rank() == 0:
            prune(args.save, keep)


def load_leader_states(directory: str, iteration: int) -> list[dict]:
    """Every leader's state at that iteration, by data-parallel rank; empty when the checkpoint has none."""
    where = _leader_directory(directory, iteration)
    if not os.path.isdir(where):
        return []
    return [torch.load(os.path.join(where, name), weights_only=False) for name in sorted(os.listdir(where)) if name.endswith(".pt")]


def complete_iterations(directory: str) -> list[int]:
    """Iterations whose checkpoint is complete, ascending."""
    found = []
    for name in os.listdir(directory) if os.path.isdir(directory) else []:
        match = re.fullmatch(r"iter_(\d{7})", name)
        if match and os.path.exists(os.path.join(directory, name, "metadata.json")):
            found.append(int(match[1]))
    return sorted(found)


def repair_pointer(directory: str | None) -> None:
    """Point at the newest complete checkpoint when the pointer is empty, torn, or names one that is not there. Rank 0 only."""
    if directory is None or not os.path.isdir(directory):
        return
    path = os.path.join(directory, POINTER)
    text = ""
    if os.path.exists(path):
        with open(path) as file:
            text = file.read().strip()
    done = complete_iterations(directory)
    if text == "release" or (text.isdigit() and int(text) in done):
        return
    if done:
        temporary = path + ".tmp"
        with open(temporary, "w") as file:
            file.write(str(done[-1]))
        os.replace(temporary, path)
    elif os.path.exists(path):
        os.remove(path)


def prune(directory: str, keep: int) -> None:
    """Delete complete checkpoints but the newest `keep`, and incomplete ones older than the newest complete one."""
    done = complete_iterations(directory)
    kept = set(done[-keep:])
    for name in os.listdir(directory):
        match = re.fullmatch(r"iter_(\d{7})", name)
        if match and done and int(match[1]) < done[-1] and int(match[1]) not in kept:
            # the metadata goes first: what a kill leaves behind is then incomplete, never half a "complete" one
            with contextlib.suppress(FileNotFoundError):
                os.remove(os.path.join(directory, name, "metadata.json"))
            shutil.rmtree(os.path.join(directory, name), ignore_errors=True)
            shutil.rmtree(_leader_directory(directory, int(match[1])), ignore_errors=True)


def _leader_directory(directory: str, iteration: int) -> str:
    return os.path.join(directory, "grpo", f"iter_{iteration:07d}")


def _write_atomically(value, path: str) -> None:
    temporary = path + ".tmp"
    with open(temporary, "wb") as file:
        torch.save(value, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
