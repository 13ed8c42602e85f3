"""What a person at the terminal sees of an optimizer step."""

import io
import sys

from megatron_grpo.trainer.step import data_iterators


class Terminal(io.StringIO):
    def isatty(self):
        return True


class MicroBatch:
    pass


def bars():
    """(what a terminal shows of the first rank's step, of a pass without a bar, what a log file gets)."""
    said = []
    for stream, title in ((Terminal(), "train"), (Terminal(), ""), (io.StringIO(), "train")):
        real, sys.stderr = sys.stderr, stream
        microbatches = [MicroBatch() for _ in range(3)]
        try:
            first, second = data_iterators([None, None], microbatches, "context", title)
            assert all([next(first), next(second)] == [mb, mb] and mb.context == "context" for mb in microbatches)
        finally:
            sys.stderr = real
        said.append(stream.getvalue())
    return said


def test_bar_of_the_micro_batches(pool):
    (terminal, silent, log), *others = pool.run(bars, ranks=2)
    assert "train:" in terminal and "/3" in terminal and not silent and not log
    assert others == [["", "", ""]]
