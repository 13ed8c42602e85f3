"""The first step of a job is the same under every layout: loss, metrics, gradient norm and every parameter's gradient."""

import pytest
import torch

from megatron_grpo import verify

TP2 = ["--tensor-model-parallel-size", "2", "--sequence-parallel"]
PP2 = ["--pipeline-model-parallel-size", "2"]
VPP = ["--num-virtual-stages-per-pipeline-rank", "2"]
CP2 = ["--context-parallel-size", "2"]
EP2 = ["--expert-model-parallel-size", "2"]
CELLS = {
    "one rank": (1, []), "dp2": (2, []), "ep2": (2, EP2), "tp2": (2, TP2), "pp2": (2, PP2), "pp2 vpp2": (2, PP2 + VPP), "cp2": (2, CP2),
    "cp2 contiguous": (2, [*CP2, "--cp-layout", "contiguous"]), "cp2 tp2 ep2": (4, [*CP2, *TP2, *EP2, "--expert-tensor-parallel-size", "1"]),
    "per token": (2, [*CP2, "--calculate-per-token-loss"])}


@pytest.fixture(scope="module")
def job(tmp_path_factory, pool):
    """(flags of the step, float64 result on one rank)."""
    directory = str(tmp_path_factory.mktemp("verify"))
    flags = verify.prepare(directory, ["--platform", "cpu", "--algorithm", "grpo", "--no-use-kl-loss"])
    (reference,) = pool.run(verify.one_step, verify.one_rank(flags), torch.float64, ranks=1)
    return flags, reference


@pytest.mark.parametrize("cell", CELLS)
def test_first_step(pool, job, cell):
    flags, reference = job
    ranks, layout = CELLS[cell]
    found = pool.run(verify.one_step, [*flags, *layout], ranks=ranks)[-1]
    lines = verify.compare(found, reference)
    assert all(line.ok for line in lines), "\n" + verify.table(lines)
    assert len(lines) > 40
