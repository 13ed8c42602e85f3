"""Checkpoints: Megatron's `torch_dist` for weights, optimizer, schedule and RNG; beside it what the rollouts need.

    SAVE/iter_0000012/                              Megatron's checkpoint; its metadata.json is written last
    SAVE/grpo/iter_0000012/dp_00000_of_00002.pt     each leader's prompt position and carried-over samples
    SAVE/grpo/iter_0000012/kept/                    the same, newer: after a step that failed, with what of its rollout was good
    SAVE/latest_checkpointed_iteration.txt          the pointer

The leaders' files are written, flushed and renamed before Megatron's save starts, and Megatron moves the pointer only
when its own files are complete, so the pointer never names a half-written checkpoint; with --async-save it moves at the step that finds
the writers done. A run that was killed while the pointer itself was being written finds the newest complete checkpoint instead
(`repair_pointer`).
"""

import contextlib
import ctypes
import importlib.util
import json
import multiprocessing
import os
import re
import shutil
import signal
from multiprocessing.managers import SyncManager

import torch
import torch.distributed as dist

from ..settings import ConfigError
from .config import TrainerConfig
from .distribute import RolloutFailed, on_leaders
from .groups import ControlGroups, any_rank

KEPT = "kept"
POINTER = "latest_checkpointed_iteration.txt"
PROBE = 1 << 20     # bytes
PR_SET_PDEATHSIG = 1


class CheckpointFailed(RuntimeError):
    """A checkpoint could not be written; the one before it is intact."""


class Checkpoints:
    """Writes the checkpoints of a job. Its methods are collective over all ranks.

    Args:
        args: Megatron's, for --save and --async-save.
        keep: complete checkpoints to keep; None keeps all.
    """

    def __init__(self, args, groups: ControlGroups, keep: int | None):
        self.args, self.groups, self.keep = args, groups, keep
        self.writing: int | None = None         # iteration of the asynchronous save in flight

    def save(self, trained, iteration: int, leader_state) -> None:
        """Write a checkpoint, or with --async-save start to; `leader_state` is given on leaders.

        Raises:
            CheckpointFailed: names the cause, e.g. a full disk.
        """
        from megatron.training.checkpointing import save_checkpoint

        self.finish(wait=True)      # one at a time: two would mix their results, and hold two copies of everything on the host
        with self._explained(iteration):
            if dist.get_rank() == 0:
                _remove(self.args.save, iteration)      # what a killed run left: its leaders may have been more
            dist.barrier()
            on_leaders(self.groups, lambda: _write_atomically(leader_state, leader_file(
                self.args.save, iteration, self.groups.dp_rank, self.groups.dp_size)))
            self.writing = iteration
            save_checkpoint(iteration, trained.model, trained.optimizer, trained.scheduler, 0)
        if not self.args.async_save:
            self._complete()

    def keep_rollout(self, trained, iteration: int, leader_state) -> None:
        """Where the rollouts stand at the end of a run whose step after `iteration` failed: beside that checkpoint, or with a new one."""
        self.finish(wait=True)
        if not any_rank(dist.get_rank() == 0 and iteration in complete_iterations(self.args.save), trained.device):
            self.save(trained, iteration, leader_state)
            self.finish(wait=True)
            return
        if dist.get_rank() == 0:
            shutil.rmtree(os.path.join(_leader_directory(self.args.save, iteration), KEPT), ignore_errors=True)
        dist.barrier()
        on_leaders(self.groups, lambda: _write_atomically(leader_state, leader_file(
            self.args.save, iteration, self.groups.dp_rank, self.groups.dp_size, KEPT)))

    def finish(self, wait: bool) -> None:
        """Move the pointer to the asynchronous save in flight if it is done; with `wait`, when it is.

        Raises:
            CheckpointFailed: names the cause, e.g. a full disk.
        """
        from megatron.training.async_utils import is_empty_async_queue, maybe_finalize_async_save

        if self.writing is None:
            return
        with self._explained(self.writing):
            maybe_finalize_async_save(blocking=wait)
        if is_empty_async_queue():
            self._complete()

    def _complete(self) -> None:
        self.writing = None
        if self.keep is not None:
            dist.barrier()
            if dist.get_rank() == 0:
                prune(self.args.save, self.keep)

    @contextlib.contextmanager
    def _explained(self, iteration: int):
        """Errors of a save with their cause; what was written of it is removed, so that the disk has room for the rest of the run."""
        from torch.distributed.checkpoint.api import CheckpointException

        try:
            yield
        except (CheckpointException, RolloutFailed) as error:      # both are raised on every rank
            causes: list = [None] * dist.get_world_size()
            dist.all_gather_object(causes, _probe(self.args.save))
            cause = next((f"rank {rank}: {cause}" for rank, cause in enumerate(causes) if cause), str(error))
            raise self._failure(iteration, cause) from error
        except OSError as error:
            raise self._failure(iteration, str(error)) from error

    def _failure(self, iteration: int, cause: str) -> CheckpointFailed:
        if dist.get_rank() == 0:
            with contextlib.suppress(OSError, ConfigError):
                if _pointed(self.args.save) != str(iteration):
                    _remove(self.args.save, iteration)
                repair_pointer(self.args.save)
        last = _pointed(self.args.save)
        intact = f"that of step {last} is intact: mend the cause and resume with --load" if last else "there is none before it"
        return CheckpointFailed(f"the checkpoint of step {iteration} could not be written to --save {self.args.save} ({cause}); {intact}")


def check(args, trainer: TrainerConfig) -> None:
    """Refuse flags with which a save would fail in mid-run.

    Raises:
        ConfigError: names the flag and the fix.
    """
    if not args.save:
        return
    if trainer.keep_checkpoints is not None and args.ckpt_format != "torch_dist":
        raise ConfigError(f"--keep-checkpoints knows complete torch_dist checkpoints only: drop it, or --ckpt-format {args.ckpt_format}")
    if not args.async_save:
        return
    if args.ckpt_format != "torch_dist":
        raise ConfigError(f"--async-save writes torch_dist checkpoints, not --ckpt-format {args.ckpt_format}: drop one of them")
    if args.async_strategy == "nvrx" and importlib.util.find_spec("nvidia_resiliency_ext") is None:
        raise ConfigError("--async-save: --async-strategy nvrx needs the package nvidia-resiliency-ext; install it, or give "
                          "--async-strategy mcore")


def start_result_queue() -> None:
    """The manager process through which Megatron's writers report. Call it before there are threads, process groups or a model.

    Left to itself, Megatron spawns one at the first save: it imports everything once more (seconds, 0.6 GB a rank), outlives a rank that
    is killed or fails, and holds that rank's output open. This one is forked, ignores the signals that ask for a stop and a
    checkpoint, and dies with its rank.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    if getattr(filesystem_async, "_results_queue", ...) is None:
        manager = SyncManager(ctx=multiprocessing.get_context("fork"))
        manager.start(_begin_manager, (os.getpid(),))
        filesystem_async._results_queue = manager.Queue()


def _begin_manager(owner: int) -> None:
    for number in (signal.SIGTERM, signal.SIGUSR1):     # Slurm sends them to every process of a step
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != owner:       # it died before
        os._exit(1)


# ---- the directory ----------------------------------------------------------------------------------------------------------


def leader_file(directory: str, iteration: int, dp_rank: int, dp_size: int, part: str = "") -> str:
    return os.path.join(_leader_directory(directory, iteration), part, f"dp_{dp_rank:05d}_of_{dp_size:05d}.pt")


def load_leader_states(directory: str, iteration: int) -> list:
    """Every leader's state at that iteration, by data-parallel rank.

    Raises:
        ConfigError: not all are there.
    """
    for where in (os.path.join(_leader_directory(directory, iteration), KEPT), _leader_directory(directory, iteration)):
        names = sorted(name for name in (os.listdir(where) if os.path.isdir(where) else ()) if re.fullmatch(r"dp_\d+_of_\d+\.pt", name))
        if names and len(names) == int(names[0][-8:-3]):
            break
    else:
        raise ConfigError(f"--load {directory}: where the rollouts stood at step {iteration} is not all in {where} ({len(names)} files), so "
                          "prompts would be repeated: copy that directory too, or start anew from the weights with --finetune")
    return [torch.load(os.path.join(where, name), weights_only=False) for name in names]


def iteration_to_load(args) -> str | None:
    """The directory of the checkpoint that --load names, or None."""
    if not args.load:
        return None
    text = str(args.ckpt_step) if args.ckpt_step else _pointed(args.load)
    return (os.path.join(args.load, "release") if text == "release" else _iteration_directory(args.load, int(text))) if text else None


def complete_iterations(directory: str) -> list[int]:
    """Iterations whose torch_dist checkpoint is complete, ascending."""
    found = []
    for name in os.listdir(directory) if os.path.isdir(directory) else []:
        if (match := re.fullmatch(r"iter_(\d{7})", name)) and _is_complete(os.path.join(directory, name)):
            found.append(int(match[1]))
    return sorted(found)


def _is_complete(directory: str) -> bool:
    try:
        with open(os.path.join(directory, "metadata.json")) as file:
            json.load(file)
    except (OSError, ValueError):       # a kill can leave it empty
        return False
    return True


def repair_pointer(directory: str | None) -> None:
    """Point at the newest complete checkpoint when the pointer is missing, empty or torn, or names one that is not there. Rank 0 only.

    Raises:
        ConfigError: there is a pointer, and no complete checkpoint.
    """
    if directory is None or not os.path.isdir(directory):
        return
    path, text = os.path.join(directory, POINTER), _pointed(directory)
    if text == "release" or (text and os.path.isdir(_iteration_directory(directory, int(text)))):
        return
    if done := complete_iterations(directory):
        with open(path + ".tmp", "w") as file:
            file.write(str(done[-1]))
        os.replace(path + ".tmp", path)
    elif os.path.exists(path):
        raise ConfigError(f"{path} names checkpoint {text or '(nothing)'}, which is not there, nor is any complete one: restore it, or remove "
                          "the file to start from the beginning")


def prune(directory: str, keep: int) -> None:
    """Delete the checkpoints before the one that is pointed at, complete or not, but for the newest `keep` complete ones with it."""
    pointed = int(_pointed(directory) or 0)
    kept = [iteration for iteration in complete_iterations(directory) if iteration <= pointed][-keep:]
    for name in os.listdir(directory):
        match = re.fullmatch(r"iter_(\d{7})", name)
        if match and int(match[1]) < pointed and int(match[1]) not in kept:
            _remove(directory, int(match[1]))


def _pointed(directory: str) -> str:
    """"release", digits, or "" when the pointer is missing or torn."""
    try:
        with open(os.path.join(directory, POINTER)) as file:
            text = file.read().strip()
    except FileNotFoundError:
        return ""
    return text if text.isdigit() or text == "release" else ""


def _remove(directory: str, iteration: int) -> None:
    """The metadata goes first: what a kill leaves behind is then incomplete, never half a "complete" one."""
    with contextlib.suppress(FileNotFoundError):
        os.remove(os.path.join(_iteration_directory(directory, iteration), "metadata.json"))
    shutil.rmtree(_leader_directory(directory, iteration), ignore_errors=True)
    shutil.rmtree(_iteration_directory(directory, iteration), ignore_errors=True)     # last: `prune` looks for these


def _iteration_directory(directory: str, iteration: int) -> str:
    return os.path.join(directory, f"iter_{iteration:07d}")


def _leader_directory(directory: str, iteration: int) -> str:
    return os.path.join(directory, "grpo", f"iter_{iteration:07d}")


def _write_atomically(value, path: str) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path + ".tmp", "wb") as file:
        torch.save(value, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(path + ".tmp", path)


def _probe(directory: str) -> str:
    """Why nothing can be written there, "" if it can: Megatron's writers do not report the system's error."""
    path = os.path.join(directory, f".probe_{dist.get_rank()}")
    try:
        with open(path, "wb") as file:
            file.write(bytes(PROBE))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return str(error)
    finally:
        with contextlib.suppress(OSError):
            os.remove(path)
    return ""
