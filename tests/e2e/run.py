"""megatron_grpo.train as a case of the worker pool."""

import contextlib
import io


def run_train(argv: list[str]) -> tuple[int, str]:
    """(exit code, what the rank wrote to stderr)."""
    from megatron_grpo import train

    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        try:
            code = train.main(argv)
        except SystemExit as stop:      # argparse
            code = stop.code
    return code, said.getvalue()
