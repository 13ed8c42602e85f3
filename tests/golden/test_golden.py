import json
import math
from copy import copy
from pathlib import Path

import pytest
import torch

from tests.golden import NotCovered, Recorded, pack
from tests.golden import run as golden_run
from tests.golden.run import adapter_of, check, compare, main, run_file

FILES = sorted((Path(__file__).parent / "data").glob("*.json"))


@pytest.mark.parametrize("path", FILES, ids=lambda f: f.stem)
def test_family(path, pool):
    report = run_file(path, pool)
    assert not report.failed, "\n".join(f"{case}: {reason}" for case, reason in report.failed)
    assert len(report.passed) > len(report.not_covered)
    assert all(reason and not reason.startswith("the adapter does not") for _, reason in report.not_covered)


WITHOUT_RANKS = [f for f in FILES if f.stem not in ("logprob_entropy", "gspo")]
"""What several ranks share is compared in test_family; here every case is run twice."""


def leaves(value, path=()):
    """(path, number) of every finite number in an output."""
    if isinstance(value, (list, dict)):
        for key, inner in (value.items() if isinstance(value, dict) else enumerate(value)):
            yield from leaves(inner, (*path, key))
    elif isinstance(value, (int, float)) and math.isfinite(value):
        yield path, value


def changed(outputs, path, value):
    if not path:
        return value
    outputs = copy(outputs)
    outputs[path[0]] = changed(outputs[path[0]], path[1:], value)
    return outputs


@pytest.mark.parametrize("path", WITHOUT_RANKS, ids=lambda f: f.stem)
def test_no_case_passes_with_another_number_or_with_an_option_that_nobody_reads(path):
    """A hundredth off in one number of every output that is compared, or one more option: the case must not pass any more."""
    data, never = json.loads(path.read_text()), {}
    adapter = adapter_of(data["family"])
    for case in data["cases"]:
        options = case["inputs"].get("params") or {}
        with pytest.raises(NotCovered):
            check(case | dict(inputs=case["inputs"] | dict(params=options | dict(no_such_option=1))), adapter, None)
        try:
            got = adapter.run(case | dict(inputs=Recorded(case["inputs"])), None)
        except NotCovered:
            continue
        for name, value in got.items():
            tolerance, want = adapter.tolerance(case, name) if hasattr(adapter, "tolerance") else 1e-9, case["outputs"].get(name)
            places = list(leaves(want))
            if value not in (None, {}) and places and not any(
                    compare("", value, changed(want, place, v * 1.01 + 0.01), tolerance) for place, v in places):
                never[case["id"], name] = len(places)
    assert never == {}


@pytest.mark.parametrize("family", ["aggregation", "cispo", "extra_losses", "gspo", "off_policy", "ppo_clip"])
def test_the_same_in_float32_to_1e_5(family, monkeypatch):
    monkeypatch.setattr(pack.flat, "__defaults__", (torch.float32,))
    monkeypatch.setitem(pack.loss_inputs.__kwdefaults__, "dtype", torch.float32)
    monkeypatch.setattr(golden_run, "compare", lambda name, got, want, tolerance: compare(name, got, want, max(tolerance, 1e-5)))
    data = json.loads((FILES[0].parent / f"{family}.json").read_text())
    wrong = {}
    for case in data["cases"]:
        if family == "gspo" and "ranks" in case["outputs"]:
            continue
        try:
            wrong[case["id"]] = check(case, adapter_of(family), None)
        except NotCovered:
            continue
    assert len(wrong) > 10 and {name: problems for name, problems in wrong.items() if problems} == {}


def test_compare_sees_differences():
    assert compare("x", [[1.0, None]], [[1.0 + 1e-10, 5.0]], 1e-9) == []
    assert compare("x", [1.0], [1.0 + 1e-8], 1e-9) and compare("x", [1.0], [1.0, 2.0], 1e-9)
    assert compare("x", float("nan"), float("nan"), 1e-9) == [] and compare("x", float("nan"), 0.0, 1e-9)
    assert compare("x", {"a": 1.0}, {"b": 1.0}, 1e-9) and compare("x", {"a": 1.0}, {"a": 1.0, "b": 2.0}, 1e-9) == []


def test_exit_status_and_unknown_family(tmp_path, capsys):
    (tmp_path / "a.json").write_text(
        '{"family": "no_such_family", "cases": [{"id": "c", "source": "s", "inputs": {}, "outputs": {}}]}')
    assert main(str(tmp_path)) == 0
    assert "not covered: no_such_family/c: no adapter for this family" in capsys.readouterr().out
    inputs = {"response_lengths": [1], "loss_mask": [[1]], "per_token_loss": [[2.0]], "params": {"token_level_loss": True}}
    wrong = {"id": "wrong", "source": "OpenRLHF/x", "inputs": inputs, "outputs": {"loss": 3.0, "grad_loss": [[1.0]]}}
    (tmp_path / "b.json").write_text(json.dumps({"family": "aggregation", "cases": [wrong]}))
    assert main(str(tmp_path)) == 1
    assert "FAILED: aggregation/wrong: loss: 2.0 != 3.0" in capsys.readouterr().out
