"""Checkpoints under another layout, and on a disk that is full."""

import json
import os
import subprocess

import pytest
import torch

from megatron_grpo import verify
from megatron_grpo.trainer.checkpoint import POINTER, complete_iterations
from tests.e2e.run import run_train

FULL_LAYOUT = ["--use-distributed-optimizer", "--dist-ckpt-optim-fully-reshardable"]
TP2_PP2 = ["--tensor-model-parallel-size", "2", "--sequence-parallel", "--pipeline-model-parallel-size", "2"]
EP2_DP2 = ["--expert-model-parallel-size", "2"]


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    """Three steps on recorded samples."""
    directory = tmp_path_factory.mktemp("checkpoints")
    flags = verify.prepare(str(directory), ["--platform", "cpu", "--algorithm", "grpo", "--no-use-kl-loss", "--lr-decay-style", "constant",
                                            # the routers' losses are of micro-batches, which each layout cuts in another way
                                            "--moe-router-load-balancing-type", "none", "--moe-z-loss-coeff", "0"])
    samples = torch.load(directory / "samples_0_0.pt", weights_only=False)
    for step in (1, 2):
        torch.save(samples[step:], directory / f"samples_{step}_0.pt")
    return [*verify.without(flags, "--train-iters"), "--train-iters", "3", "--save-interval", "1"]


def train(pool, flags, ranks, *more, code=0):
    """What each rank wrote to stderr."""
    found = pool.run(run_train, [*map(str, [*flags, *more])], ranks=ranks, timeout=120)
    assert all(ended == code for ended, _ in found), found
    return [said for _, said in found]


def metrics(run):
    return {line["step"]: line["metrics"] for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines())}


def test_another_layout_takes_the_same_steps(pool, flags, tmp_path):
    """The next step shows the weights, the one after it the optimizer's state."""
    saved, loaded = tmp_path / "saved", tmp_path / "loaded"
    train(pool, [*flags, *FULL_LAYOUT, *TP2_PP2], 4, "--save", saved)
    train(pool, [*flags, *FULL_LAYOUT, *EP2_DP2], 2, "--load", saved, "--ckpt-step", 1, "--run-dir", loaded)
    want, got = metrics(saved), metrics(loaded)
    assert sorted(got) == [2, 3]
    for step in (2, 3):
        for name in ("loss", "grad_norm", "entropy", "mismatch_k3"):
            assert got[step][name] == pytest.approx(want[step][name], rel=1e-5, abs=1e-6), (step, name)


def test_an_optimizer_state_that_fits_no_other_layout_is_refused(pool, flags, tmp_path):
    argv = [*flags, "--use-distributed-optimizer"]
    train(pool, argv, 1, "--train-iters", 1, "--save", tmp_path)
    found = pool.run(run_train, list(map(str, [*argv, *EP2_DP2, "--load", tmp_path])), ranks=2)
    for code, said in found:
        assert code == 1 and "EP=1" in said and "EP=2" in said and "--dist-ckpt-optim-fully-reshardable" in said, said
    found = pool.run(run_train, list(map(str, [*argv, "--load", tmp_path])), ranks=1)
    assert found[0][0] == 2 and "--override-opt-param-scheduler" in found[0][1]     # --train-iters is another


@pytest.fixture
def small_disk(tmp_path):
    """resize(bytes) of a file system of its own."""
    place = tmp_path / "disk"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", place], capture_output=True).returncode:
        pytest.skip("mounting a file system needs root")
    try:
        yield place, lambda size: subprocess.run(["mount", "-o", f"remount,size={size}", place], check=True)
    finally:
        subprocess.run(["umount", "-l", place], check=True)


@pytest.mark.parametrize("how", ["sync", "async"])
def test_full_disk(pool, flags, tmp_path, small_disk, how):
    disk, resize = small_disk
    argv = [*flags, *EP2_DP2, *FULL_LAYOUT, *["--async-save"] * (how == "async"), "--save", disk / "run", "--run-dir", tmp_path / "log"]
    resize("512m")
    train(pool, argv, 2, "--train-iters", 1)
    used = int(subprocess.run(["du", "-sk", disk], capture_output=True, text=True, check=True).stdout.split()[0])
    resize(f"{used * 3 // 2}k")
    more = ("--load", disk / "run", "--override-opt-param-scheduler")
    for said in train(pool, argv, 2, *more, code=1):
        assert "Traceback" not in said
        assert f"the checkpoint of step 2 could not be written to --save {disk / 'run'} (" in said, said
        assert "No space left on device" in said and "that of step 1 is intact" in said, said
    assert complete_iterations(disk / "run") == [1] and (disk / "run" / POINTER).read_text() == "1"
    assert sorted(os.listdir(disk / "run")) == ["grpo", "iter_0000001", POINTER] and os.listdir(disk / "run" / "grpo") == ["iter_0000001"]
    resize("512m")
    train(pool, argv, 2, *more)
    assert complete_iterations(disk / "run") == [1, 2, 3] and (disk / "run" / POINTER).read_text() == "3"
