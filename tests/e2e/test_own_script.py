"""A user's own Megatron script with our lines in it, and Megatron's TensorBoard writer beside our log."""

import contextlib
import io
import json
import runpy
import shutil
import sys
from pathlib import Path

from megatron_grpo import verify

SCRIPT = Path(__file__).parents[2] / "examples" / "own_script.py"


def run_script(argv: list[str]) -> tuple[int, str]:
    sys.argv, said = [str(SCRIPT), *argv], io.StringIO()
    with contextlib.redirect_stdout(said):
        try:
            runpy.run_path(str(SCRIPT), run_name="__main__")
        except SystemExit as stop:
            return stop.code, said.getvalue()
    return -1, said.getvalue()


def test_own_script(pool, tmp_path):
    flags = verify.prepare(str(tmp_path), ["--platform", "cpu", "--algorithm", "grpo", "--no-use-kl-loss"])
    shutil.copy(tmp_path / "samples_0_0.pt", tmp_path / "samples_1_0.pt")
    flags = [*verify.without(flags, "--train-iters"), "--train-iters", "2", "--greeting", "good morning", "--run-dir", str(tmp_path / "run"),
             "--tensorboard-dir", str(tmp_path / "board")]
    ((code, said),) = pool.run(run_script, flags, timeout=200)
    assert code == 0 and "good morning" in said and "step 2/2" in said, said
    losses = [json.loads(line)["metrics"]["loss"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert "<html" in (tmp_path / "run" / "report.html").read_text()        # also where nothing is evaluated

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    board = EventAccumulator(str(tmp_path / "board"))
    board.Reload()
    shown = board.Scalars("loss")
    assert [event.step for event in shown] == [1, 2] and len(losses) == 2
    assert all(abs(event.value - loss) < 1e-6 for event, loss in zip(shown, losses, strict=True))
