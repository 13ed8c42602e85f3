"""Verify passes on every pair of values of the layout's axes and the algorithms, and on no planted fault."""

import itertools
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from megatron_grpo.recipes import RECIPES
from megatron_grpo.verify import Case, compare, one_rank, prepare, table, take_steps
from megatron_grpo.verify.layouts import AXES, BY_MICRO_BATCH, Layout, cases_of, covering, dealt, every_layout, verify_layouts
from megatron_grpo.verify.problem import even_samples, hard_samples
from tests.verify import planted


def layout(**values):
    return Layout(tuple(values.get(axis.replace(" ", "_").replace("-", "_"), first) for axis, (first, *_) in AXES.items()))


# ---- what is covered ------------------------------------------------------------------------------------------------------


def test_pairs_are_covered():
    layouts, names = covering(2), sorted(RECIPES)
    cells = dealt(layouts, names, each_value=True)

    def pairs(some):
        return {frozenset(pair) for item in some for pair in itertools.combinations(item.pairs, 2)}

    assert pairs(layouts) == pairs(every_layout())
    values = {value for item in every_layout() for value in item.pairs}
    assert values == {(axis, value) for axis, options in AXES.items() for value in options}
    for name in names:
        assert {value for item, own in cells.items() if name in own for value in item.pairs} == values, name
    steps = [case for turn, own in enumerate(cells.values()) for case in cases_of(own, turn)]
    for name in names:
        kinds = {case.single for case in steps if case.algorithm[1] == name}
        assert (name in BY_MICRO_BATCH or False in kinds) and kinds, name
    assert all(any(case.single for case in cases_of(own)) for own in cells.values() if set(own) - set(BY_MICRO_BATCH))
    assert max(item.ranks for item in layouts) == 8


def test_samples_have_every_hard_shape():
    samples = hard_samples(250)
    lengths = {s.response_length for s in samples}
    assert {1, 2} <= lengths and any(not s.loss_mask.any() for s in samples)
    assert any(s.loss_mask[0] and not s.loss_mask.all() and s.loss_mask[-1] and s.response_length > 2 for s in samples)
    assert {sum(s.group_id == g for s in samples) for g in {s.group_id for s in samples}} >= {1, 4, 6}
    assert len({len(s.tokens) for s in even_samples(250)}) == 1


def test_compare_finds_each_difference():
    reference = {"metrics": {"loss": 1.0, "empty": float("nan")}, "gradients": {"w": np.ones(4), "unused": np.zeros(2)}}

    def bad(metrics=(), gradients=()):
        found = {"metrics": reference["metrics"] | dict(metrics), "gradients": reference["gradients"] | dict(gradients)}
        return [line.name for line in compare(found, reference) if not line.ok]

    assert bad() == [] and bad({"loss": 1 + 9e-6}) == []
    assert bad({"loss": 1 + 2e-5}) == ["loss"] and bad({"empty": 0.0}) == ["empty"] and bad({"more": 1.0}) == ["more"]
    assert bad({"loss": float("nan")}) == ["loss"]
    assert bad(gradients={"w": np.ones(4) * (1 + 2e-5)}) == ["gradient of w"]
    assert bad(gradients={"w": np.ones(3)}) == ["gradient of w"] and bad(gradients={"unused": np.ones(2)}) == ["gradient of unused"]
    assert bad(gradients={"w": np.full(4, np.nan)}) == ["gradient of w"] and bad(gradients={"v": np.ones(1)}) == ["gradient of v"]


# ---- steps ----------------------------------------------------------------------------------------------------------------


class Kept:
    """A pool that remembers the float64 references, and plants a fault in the layouts' steps."""

    def __init__(self, pool):
        self.pool, self.size, self.fault, self.kept = pool, pool.size, None, {}

    def run(self, fn, flags, cases, *dtype, ranks=1, timeout=120):
        if dtype:
            for case in cases:
                if case not in self.kept:
                    (self.kept[case],) = self.pool.run(fn, flags, [case], *dtype, timeout=timeout)[0]
            return [[self.kept[case] for case in cases]]
        if self.fault:
            return self.pool.run(planted.steps, self.fault, flags, cases, ranks=ranks, timeout=timeout)
        return self.pool.run(fn, flags, cases, ranks=ranks, timeout=timeout)


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    return prepare(str(tmp_path_factory.mktemp("verify")), ["--platform", "cpu", "--algorithm", "grpo"])


@pytest.fixture(scope="module")
def kept(pool):
    return Kept(pool)


CP2, DP2, PER_TOKEN = layout(cp="2"), layout(dp="2"), layout(cp="2", per_token_loss="on")
FAULTS = [(planted.factor_of_cp, CP2, "grpo"), (planted.whitening_over_dp_only, CP2, "reinforce_plus_plus"),
          (planted.returns_of_the_local_chunk, CP2, "reinforce_plus_plus"), (planted.gather_without_gradient, CP2, "gspo"),
          (planted.no_auxiliary_loss_scale, DP2, "grpo"), (planted.trained_tokens_as_divisor, PER_TOKEN, "grpo"),
          (planted.two_values_per_token, PER_TOKEN, "grpo"), (planted.mean_of_micro_batches, DP2, "grpo")]


@pytest.mark.parametrize("where,name", sorted({(where, name) for _, where, name in FAULTS}, key=str), ids=str)
def test_passes_without_a_fault(kept, flags, where, name, capsys):
    kept.fault = None
    assert verify_layouts(kept, flags, {where: [name]}) == 0, capsys.readouterr().out


@pytest.mark.parametrize("fault,where,name", FAULTS, ids=lambda x: getattr(x, "__name__", ""))
def test_fails_on_a_fault(kept, flags, fault, where, name, capsys):
    kept.fault = fault.__name__
    assert verify_layouts(kept, flags, {where: [name]}) == 1
    said = capsys.readouterr().out
    assert "FAIL" in said and "OUT" in said and "Traceback" not in said, said


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_every_pair(pool, flags, capsys):
    cells = dealt(covering(2), sorted(RECIPES), each_value=True)
    assert verify_layouts(pool, flags, cells) == 0, capsys.readouterr().out


@pytest.mark.slow
def test_command(tmp_path):
    """The command of a user with two ranks, as a job would be started."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0",
               "-m", "megatron_grpo.verify", "--platform", "cpu", "--algorithm", "gspo", "--context-parallel-size", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert done.stdout.count("0 out of tolerance") == 2


def test_reference_without_an_algorithm(pool, tmp_path):
    """--calculate-per-token-loss alone means the mean over tokens, for the reference too."""
    words = prepare(str(tmp_path), ["--platform", "cpu", "--calculate-per-token-loss"])
    (wanted,), = pool.run(take_steps, one_rank(words), [Case()], torch.float64)
    (found,), = pool.run(take_steps, words, [Case()])
    lines = compare(found, wanted)
    assert all(line.ok for line in lines), table(lines)
