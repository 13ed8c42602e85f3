"""A run that stops and resumes is bit for bit the run that never stopped, given the same rollouts."""

import shutil

import torch
from safetensors import safe_open

from megatron_grpo import verify
from tests.e2e.run import run_train

LAYOUT = ["--expert-model-parallel-size", "2", "--use-distributed-optimizer", "--ckpt-format", "torch_dist"]


def weights(directory):
    with safe_open(next(directory.glob("*.safetensors")), "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def test_resumed_equals_undisturbed(pool, tmp_path):
    flags = verify.prepare(str(tmp_path), ["--platform", "cpu", "--algorithm", "grpo", "--no-use-kl-loss", "--lr-decay-style", "constant"])
    samples = torch.load(tmp_path / "samples_0_0.pt", weights_only=False)
    for step in range(1, 4):
        torch.save(samples[step:], tmp_path / f"samples_{step}_0.pt")
    flags = verify.without(flags, "--train-iters") + LAYOUT + ["--train-iters", "4", "--save-interval", "2"]

    def run(*more):
        results = pool.run(run_train, [*flags, *map(str, more)], ranks=2, timeout=240)
        assert [code for code, _ in results] == [0, 0], results

    straight, resumed = tmp_path / "straight", tmp_path / "resumed"      # the first saves while it trains
    run("--save", straight, "--async-save", "--save-hf", tmp_path / "hf-straight-{iteration}")
    shutil.copytree(straight, resumed)
    shutil.rmtree(resumed / "iter_0000004")
    (resumed / "latest_checkpointed_iteration.txt").write_text("")       # as a kill in the middle of writing it leaves it
    run("--save", resumed, "--load", resumed, "--save-hf", tmp_path / "hf-resumed-{iteration}")
    want, got = weights(tmp_path / "hf-straight-4"), weights(tmp_path / "hf-resumed-4")
    start = weights(tmp_path / "hf-straight-2")
    assert want.keys() == got.keys()
    assert all(torch.equal(want[name], got[name]) for name in want)
    assert any(not torch.equal(want[name], start[name]) for name in want)
    assert not (tmp_path / "hf-resumed-2").exists()
