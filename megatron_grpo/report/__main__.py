"""python -m megatron_grpo.report RUN [RUN ...]: write the report of one run, or of several side by side; or serve it while they run."""

import argparse
import glob
import os
import sys

from .page import write_report
from .watch import serve


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m megatron_grpo.report", description=__doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run directory, the one that holds metrics.jsonl")
    parser.add_argument("--output", metavar="FILE", help="where to write the page (default: report.html in the first run directory)")
    parser.add_argument("--watch", action="store_true", help="serve the page on 127.0.0.1, refreshed as the runs write; writes no file")
    parser.add_argument("--port", type=int, help="port of --watch (default: 8890)")
    args = parser.parse_args(argv)
    if args.watch and args.output:
        parser.error("--watch writes no file: leave out --output")
    if args.port is not None and not args.watch:
        parser.error("--port is the port of --watch: add --watch")
    for run in args.runs:
        if os.path.isdir(run) and not os.path.exists(os.path.join(run, "metrics.jsonl")) and not args.watch:
            found = sorted(glob.glob(os.path.join(glob.escape(run), "**", "metrics.jsonl"), recursive=True))
            parser.error(f"{run} holds no metrics.jsonl" + (f"; did you mean {' '.join(map(os.path.dirname, found))}?" if found else ""))
    try:
        if args.watch:
            serve(args.runs, 8890 if args.port is None else args.port)
        else:
            print(write_report(args.runs, args.output))
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        pass
    return 0


if __name__ == "__main__":
    sys.exit(main())
