"""Train with reinforcement learning:  torchrun --nproc-per-node N -m megatron_grpo.train <any Megatron flag> <our flags>

Exit codes: 0 done, 1 failed, 2 the flags or the input cannot work.
"""

import os
import sys
import traceback


def main(argv: list[str] | None = None) -> int:
    from .settings import ConfigError

    try:
        return _main(argv)
    except ConfigError as error:
        return _fail(str(error), 2)
    except KeyboardInterrupt:
        return _fail("interrupted", 1)
    except Exception as error:
        from .rollout.engine import EngineError
        from .trainer.checkpoint import CheckpointFailed
        from .trainer.distribute import RolloutFailed
        from .trainer.failure import PeerFailed
        if isinstance(error, PeerFailed):
            return _fail(f"ended because {error}", 1)
        if not isinstance(error, CheckpointFailed | EngineError | RolloutFailed):
            traceback.print_exc()
        return _fail(f"{type(error).__name__}: {error}", 1)


def _main(argv) -> int:
    words = sys.argv[1:] if argv is None else argv
    if "--list-algorithms" in words:
        from .algorithms import list_algorithms
        print(list_algorithms())
        return 0
    if "--dry-run" in words:
        from .trainer.dry_run import plan, render
        found = plan(argv)
        print(render(found))
        return 2 if found.refusals else 0
    from .trainer.flags import parse_args
    from .trainer.loop import run
    from .trainer.model import model_provider

    run(parse_args(argv), model_provider)
    return 0


def _fail(message: str, code: int) -> int:
    print(f"megatron_grpo: rank {os.environ.get('RANK', '0')}: {message}", file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":      # checkpoint saving spawns workers that import this file
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # A rank that failed must not wait in a destructor for peers that are still in a collective.
    os._exit(code) if code else sys.exit(0)
