"""The command line of verify, one layout at a time."""

import argparse
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
import warnings
from contextlib import contextmanager, redirect_stdout

from ..settings import ConfigError

# torch and Megatron are imported where they are used: --help answers without them.


def main(argv: list[str] | None = None) -> int:
    """Verify the layout that torchrun started, or with --all-layouts those of layouts.py.

    Returns:
        The exit code: 0 passed, 1 failed, 2 the flags cannot work. The last line printed is the verdict, on the rank that has it.
    """
    argv = sys.argv[1:] if argv is None else argv
    if "--help" in argv or "-h" in argv:
        print(_help(), end="")
        return 0
    try:
        return _main(argv)
    except ConfigError as error:
        return _fail(str(error), 2)
    except SystemExit as stop:          # argparse, which has said why
        return _fail("a flag cannot be read", int(stop.code or 0))
    except KeyboardInterrupt:
        return _fail("interrupted", 1)
    except Exception as error:
        traceback.print_exc()
        return _fail(f"{type(error).__name__}: {error}", 1)


def _main(argv: list[str]) -> int:
    if argv[:1] == ["--reference"]:
        with quiet():
            _reference(argv[1], argv[2:])
        return 0
    if "--all-layouts" in argv:
        from .layouts import all_layouts
        return all_layouts(argv)
    for name in ("--quick", "--full"):
        if name in argv:
            raise ConfigError(f"{name} says how many layouts --all-layouts runs: give both, or drop it")
    return one_layout(argv)


def one_layout(argv: list[str]) -> int:
    """One step of the job's layout on the ranks of torchrun, against a reference that the last of them starts."""
    import torch.distributed as dist

    from ..trainer.build import check_launched
    from .problem import prepare
    from .step import take_steps

    check_launched()
    signal.signal(signal.SIGTERM, signal.default_int_handler)       # torchrun ends the peers of a rank that failed: they clean up
    # torchrun's own store: another port could be taken
    store, rank, size = next(dist.rendezvous("env://"))
    store = dist.PrefixStore("verify", store)
    directory, reference = None, None
    try:
        with quiet():
            if rank == 0:
                directory = tempfile.mkdtemp(prefix="verify-")
                store.set("flags", json.dumps([directory, prepare(directory, argv)]))
            directory, flags = json.loads(store.get("flags"))
            if rank == size - 1:
                reference = _start_reference(directory, flags)
            results = take_steps(flags, cases())
        if reference is None or results is None:
            return 0
        output, _ = reference.communicate(timeout=600)
        if reference.returncode:
            print(output[-4000:], file=sys.stderr)
            return _fail("the one-rank reference failed", 1)
        code = _report(results, f"{directory}/reference.pt", tolerance(flags))
        shutil.rmtree(directory)        # the other ranks are past their last read
        return code
    except BaseException:
        if directory is not None:
            shutil.rmtree(directory, ignore_errors=True)
        raise
    finally:
        if reference is not None:
            reference.kill()


def cases() -> list:
    """The steps of one layout, in the order of TITLES."""
    from .step import Case
    return [Case(), Case(single=True)]


TITLES = ("samples of every shape, without auxiliary losses", "samples of equal length, one a micro-batch, with the routers' auxiliary losses")


def _report(results: list[dict], path: str, bound: float) -> int:
    """A table for each step and the verdict."""
    import torch

    from .compare import compare, table

    bad = total = 0
    for title, found, wanted in zip(TITLES, results, torch.load(path, weights_only=False), strict=True):
        lines = compare(found, wanted, bound)
        print(f"{title}\n{table(lines)}\n")
        out = sum(not line.ok for line in lines)
        bad, total = bad + out, total + len(lines)
        if out and wanted["near_ties"]:
            print(f"  {wanted['near_ties']} choices of experts are so close that rounding may flip them: repeat with another --seed\n")
    print(f"verify: {'FAIL' if bad else 'PASS'}  {total - bad} of {total} numbers and gradients within {bound:g} of one rank in float64", flush=True)
    return int(bad > 0)


def tolerance(flags: list[str]) -> float:
    """That of the job's dtype."""
    from .compare import TOLERANCE
    return TOLERANCE["bfloat16" if "--bf16" in flags else "float16" if "--fp16" in flags else "float32"]


@contextmanager
def quiet():
    """Inside, Megatron and its libraries say errors only: standard output, warnings and progress bars are dropped."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    logging.disable(logging.WARNING)
    try:
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


def _start_reference(directory: str, flags: list[str]) -> subprocess.Popen:
    """The same step on one rank of its own, as a process; writes reference.pt."""
    from .problem import one_rank

    environment = {k: v for k, v in os.environ.items() if not k.startswith(("TORCHELASTIC_", "MASTER_"))}
    environment |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    return subprocess.Popen([sys.executable, "-m", "megatron_grpo.verify", "--reference", f"{directory}/reference.pt", *one_rank(flags)],
                            env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def _reference(path: str, flags: list[str]) -> None:
    import torch
    import torch.distributed as dist

    from .step import take_steps

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)       # no port
    torch.save(take_steps(flags, cases(), torch.float64), path)


def _fail(why: str, code: int) -> int:
    print(f"verify: FAIL  rank {os.environ.get('RANK', '0')}: {why}", file=sys.stderr, flush=True)
    return code


def _help() -> str:
    from . import __doc__ as description

    parser = argparse.ArgumentParser("megatron_grpo.verify", description=description, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     usage="torchrun --nproc-per-node N -m megatron_grpo.verify [flags of the job]\n"
                                           "       python -m megatron_grpo.verify --all-layouts [--quick | --full] [flags of the job]",
                                     epilog="Flags of the job: python -m megatron_grpo.train --help. Those that say which data and how much of it "
                                            "are replaced.")
    parser.add_argument("--all-layouts", action="store_true", help="every pair of values of the layout's axes and the algorithms, on this machine")
    parser.add_argument("--quick", action="store_true", help="with --all-layouts: every value once")
    parser.add_argument("--full", action="store_true", help="with --all-layouts: every layout with every algorithm; hours")
    return parser.format_help()
