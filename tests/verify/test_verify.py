"""Verify passes on every pair of values of the layout's axes and the algorithms, and on no planted fault."""

import contextlib
import functools
import itertools
import os
import socket
import subprocess
import sys

import numpy as np
import pytest
import torch

from megatron_grpo.recipes import RECIPES
from megatron_grpo.verify import Case, command, compare, one_rank, prepare, table, take_steps, with_layout
from megatron_grpo.verify.layouts import AXES, BY_MICRO_BATCH, Layout, cases_of, covering, dealt, every_layout, verify_layouts
from megatron_grpo.verify.problem import even_samples, hard_samples
from megatron_grpo.verify.ranks import RankFailed
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
    alone = dealt(covering(1), ["grpo"], each_value=True)      # --quick of one algorithm
    assert {value for item in alone for value in item.pairs} == values and len(alone) > 1


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


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    return prepare(str(tmp_path_factory.mktemp("verify")), ["--platform", "cpu", "--algorithm", "grpo"])


GRPO, GSPO, REINFORCE, EVEN = (Case(("--algorithm", name), single) for name, single in (
    ("grpo", False), ("gspo", False), ("reinforce_plus_plus", False), ("grpo", True)))
CP2, DP2, PER_TOKEN = layout(cp="2"), layout(dp="2"), layout(cp="2", per_token_loss="on", loss_recompute="on")
PLANTED = {CP2: [(GRPO, planted.factor_of_cp), (REINFORCE, planted.whitening_over_dp_only), (REINFORCE, planted.returns_of_the_local_chunk),
                 (GSPO, planted.gather_without_gradient)],
           DP2: [(EVEN, planted.no_auxiliary_loss_scale), (GRPO, planted.mean_of_micro_batches)],
           PER_TOKEN: [(EVEN, planted.trained_tokens_as_divisor), (EVEN, planted.two_values_per_token)]}


@pytest.fixture(scope="module")
def compared(pool, flags):
    """layout -> [(case, name of the fault or None, lines)]: each case without a fault, then each fault; the ranks are set up once."""
    cases = [GRPO, GSPO, REINFORCE, EVEN]
    reference = dict(zip(cases, pool.run(take_steps, one_rank(flags), cases, torch.float64, timeout=400)[0]))

    @functools.cache
    def run(where):
        planned = [(case, None) for case in cases] + [(case, fault.__name__) for case, fault in PLANTED[where]]
        found = pool.run(planted.steps, with_layout(flags, where.flags), *zip(*planned), ranks=where.ranks, timeout=400)[-1]
        return [(case, fault, compare(result, reference[case])) for (case, fault), result in zip(planned, found)]
    return run


@pytest.mark.parametrize("where", PLANTED, ids=str)
def test_passes_without_a_fault(compared, where):
    for case, fault, lines in compared(where):
        assert fault or all(line.ok for line in lines), f"{case}\n{table(lines)}"


@pytest.mark.parametrize("where,fault", [(where, fault.__name__) for where, pairs in PLANTED.items() for _, fault in pairs], ids=str)
def test_fails_on_a_fault(compared, where, fault):
    (lines,) = (lines for _, name, lines in compared(where) if name == fault)
    worst = [line for line in lines if line.error > 1e-3]
    assert any(line.name.startswith("gradient of") for line in worst), table(lines)


def test_exit_code_and_report(capsys):
    """What fails is told with its table, and a rank that raises is a failure too."""
    right = {"metrics": {"loss": 1.0}, "gradients": {"w": np.ones(2)}, "near_ties": 0}
    wrong = right | {"gradients": {"w": np.ones(2) * 2}}

    class Answers:
        size = 8

        def run(self, fn, flags, cases, dtype=None, **kwargs):
            if dtype is None and "--context-parallel-size" in flags:
                raise RankFailed("rank 1: out of luck")
            return [[wrong if dtype is None and "--qkv-format" in flags else right for _ in cases]]

    def verify(*layouts):
        return verify_layouts(Answers(), ["--platform", "cpu"], {item: ["grpo"] for item in layouts}), capsys.readouterr().out

    code, said = verify(layout(), layout(dp="2"))
    assert code == 0 and said.count("ok  ") == 2 and "4 steps equal" in said and "0 do not" in said
    assert said.splitlines()[-1].startswith("verify: PASS")
    code, said = verify(layout(), layout(batch="padded"))
    assert code == 1 and "FAIL one rank, padded" in said and "gradient of w" in said and "OUT" in said and "2 do not" in said
    code, said = verify(layout(cp="2"))
    assert code == 1 and "FAIL cp2" in said and "out of luck" in said and said.splitlines()[-1].startswith("verify: FAIL")


def test_verdict_of_one_layout(capsys, tmp_path):
    right = {"metrics": {"loss": 1.0}, "gradients": {"w": np.ones(2)}, "near_ties": 0}
    torch.save([right, right], tmp_path / "reference.pt")
    for second, code, verdict in ((right, 0, "verify: PASS  4 of 4"), (right | {"metrics": {"loss": 1.1}}, 1, "verify: FAIL  3 of 4")):
        assert command._report([right, second], str(tmp_path / "reference.pt"), 1e-5) == code
        said = capsys.readouterr().out
        assert said.splitlines()[-1].startswith(verdict) and all(title in said for title in command.TITLES)


def test_help_waits_for_no_import():
    code = ("import sys; from megatron_grpo.verify import main; assert main(['--help']) == 0; "
            "assert not {'torch', 'transformers', 'megatron.training'} & set(sys.modules)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in ("--all-layouts", "--quick", "--full", "torchrun --nproc-per-node"))


def test_refuses_before_it_starts(capsys, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    for words, message in (([], "torchrun --nproc-per-node"), (["--quick"], "--all-layouts")):
        assert command.main(words) == 2
        said = capsys.readouterr().err
        assert said.startswith("verify: FAIL") and message in said


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_every_pair(pool, flags, capsys):
    cells = dealt(covering(2), sorted(RECIPES), each_value=True)
    assert verify_layouts(pool, flags, cells) == 0, capsys.readouterr().out


@pytest.mark.slow
def test_command(tmp_path):
    """The command of a user with two ranks, as a job would be started, where the ports beside the job's are taken."""
    port, taken = _port_with_taken_neighbours()
    with taken:
        words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(port),
                 "-m", "megatron_grpo.verify", "--platform", "cpu", "--algorithm", "gspo", "--context-parallel-size", "2"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=500,
                              env=os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)})
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert done.stdout.count("0 out of tolerance") == 2
    lines = done.stdout.splitlines()
    assert lines[-1].startswith("verify: PASS") and len(lines) < 40, done.stdout[:3000]
    assert not list(tmp_path.glob("verify-*"))


def _port_with_taken_neighbours() -> tuple[int, contextlib.ExitStack]:
    """A free port, and what holds the two after it."""
    for port in range(21000, 31000, 3):
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            job, *_ = [stack.enter_context(socket.create_server(("", port + i))) for i in range(3)]
            job.close()
            return port, stack.pop_all()
    raise AssertionError("no three free ports")


def test_reference_without_an_algorithm(pool, tmp_path):
    """--calculate-per-token-loss alone means the mean over tokens, for the reference too."""
    words = prepare(str(tmp_path), ["--platform", "cpu", "--calculate-per-token-loss"])
    (wanted,), = pool.run(take_steps, one_rank(words), [Case()], torch.float64)
    (found,), = pool.run(take_steps, words, [Case()])
    lines = compare(found, wanted)
    assert all(line.ok for line in lines), table(lines)
