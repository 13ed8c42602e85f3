import json
from pathlib import Path

import pytest

from tests.golden.run import compare, main, run_file

FILES = sorted((Path(__file__).parent / "data").glob("*.json"))


@pytest.mark.parametrize("path", FILES, ids=lambda f: f.stem)
def test_family(path, pool):
    report = run_file(path, pool)
    assert not report.failed, "\n".join(f"{case}: {reason}" for case, reason in report.failed)
    assert len(report.passed) > len(report.not_covered)
    assert all(reason for _, reason in report.not_covered)


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
