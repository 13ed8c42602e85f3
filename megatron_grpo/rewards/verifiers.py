"""The built-in verifiers, and the process they run in.

A verifier parses whatever a model wrote, so it can be slow, hang in a regular expression that never returns, or kill its
process. It therefore runs in a process of its own (VerifierPool) that can be killed at the time limit. That also gives
math-verify the main thread which its own signal-based time limits need.

This file is that process's program too, so it imports nothing of the package.
"""

import asyncio
import functools
import json
import os
import signal
import sys
from collections.abc import Callable

START_LIMIT_S = 300.0       # importing reasoning-gym or math-verify from a cold, busy disk
REPLY_LIMIT = 1 << 20       # bytes of one reply


def score_task(response: str, label, metadata: dict) -> float:
    """The reasoning-gym task's own verifier, on what stands between <answer> tags, or on the whole text without them."""
    from reasoning_gym.utils import extract_answer

    answer = extract_answer(response)
    entry = {"question": metadata.get("question", ""), "answer": label, "metadata": metadata}
    return float(_task_verifier(metadata["source_dataset"])(response.strip() if answer is None else answer, entry))


@functools.cache
def _task_verifier(task: str):
    """Kept: reasoning-gym makes the whole task for it, word lists and all."""
    import reasoning_gym

    return reasoning_gym.get_score_answer_fn(task)


def score_exact(response: str, label, metadata: dict) -> float:
    """1 if the response is the label, surrounding space aside, else 0: no credit for a part that a policy could learn to game."""
    return float(response.strip() == str(label).strip())


def score_math(response: str, label, metadata: dict) -> float:
    """1 if math-verify finds the response's final expression equal to the label, else 0."""
    from math_verify import parse, verify

    gold = parse(str(label), raise_on_error=True) or parse(f"${label}$", raise_on_error=True)
    if not gold:
        raise ValueError(f"math-verify cannot parse the label {label!r}")
    return float(verify(gold, parse(response)))


VERIFIERS: dict[str, Callable[[str, object, dict], float]] = {"task": score_task, "exact": score_exact, "math": score_math}


class VerifierError(RuntimeError):
    """A verifier raised, hung or died: infrastructure, not a wrong answer."""


class VerifierPool:
    """`size` verifier processes, started at the first use, each replaced when it hangs or dies.

    Args:
        size: how many run at once; further calls wait their turn, which their time limit does not count.
        timeout_s: time limit of one verification.
    """

    def __init__(self, size: int, timeout_s: float):
        self.timeout_s = timeout_s
        self.idle: asyncio.LifoQueue = asyncio.LifoQueue()
        self.processes: set[asyncio.subprocess.Process] = set()
        self.tasks: set[asyncio.Task] = set()
        for _ in range(size):
            self.idle.put_nowait(None)      # a place; the process starts when it is taken first

    async def score(self, kind: str, response: str, label, metadata: dict) -> float:
        """The verifier's number. Raises VerifierError.

        When the caller is cancelled the process still finishes what it was asked, which is cheaper than to start another.
        """
        task = asyncio.ensure_future(self._score(kind, response, label, metadata))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        task.add_done_callback(lambda t: t.cancelled() or t.exception())
        return await asyncio.shield(task)

    async def _score(self, kind: str, response: str, label, metadata: dict) -> float:
        process = await self.idle.get()
        try:
            process = process or await self._start()
            message = json.dumps([kind, response, label, metadata], default=str)
            reply = await asyncio.wait_for(self._ask(process, message), self.timeout_s)
        except BaseException as error:      # the process may still work on this request: it cannot be asked another
            self._kill(process)
            process = None
            if isinstance(error, TimeoutError):
                raise VerifierError(f"verifier {kind} gave no answer within {self.timeout_s:g} s (--rm-timeout)") from None
            if isinstance(error, (OSError, ValueError, EOFError)):
                raise VerifierError(f"verifier {kind} died: {error!r}") from error
            raise
        finally:
            self.idle.put_nowait(process)
        if "error" in reply:
            raise VerifierError(f"verifier {kind} raised {reply['error']}")
        return reply["score"]

    async def close(self) -> None:
        for task in list(self.tasks):
            task.cancel()
        for process in list(self.processes):
            self._kill(process)
            await process.wait()

    async def _start(self) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", os.path.abspath(__file__), str(2 * self.timeout_s),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=REPLY_LIMIT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""})
        self.processes.add(process)
        try:
            await asyncio.wait_for(self._ask(process, ""), START_LIMIT_S)
        except BaseException:
            self._kill(process)
            raise
        return process

    async def _ask(self, process: asyncio.subprocess.Process, message: str) -> dict:
        assert process.stdin and process.stdout
        process.stdin.write(message.encode() + b"\n")
        await process.stdin.drain()
        reply = await process.stdout.readline()
        if not reply:
            raise EOFError("the process ended")
        return json.loads(reply)

    def _kill(self, process) -> None:
        if process is not None:
            self.processes.discard(process)
            if process.returncode is None:
                process.kill()


def _serve():
    """Answer one line of JSON with one line of JSON until the parent closes the pipe.

    Should the parent be killed while a verifier hangs, the timer's signal ends this process: it needs no interpreter to handle it.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)        # an interrupt of the terminal is the parent's to handle
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)       # a verifier that prints must not break the protocol
    for line in sys.stdin:
        if not line.strip():
            import math_verify  # noqa: F401
            import reasoning_gym  # noqa: F401
            reply = {"ready": True}
        else:
            kind, response, label, metadata = json.loads(line)
            signal.setitimer(signal.ITIMER_PROF, float(sys.argv[1]))
            try:
                reply = {"score": VERIFIERS[kind](response, label, metadata)}
            except Exception as error:
                reply = {"error": f"{type(error).__name__}: {error}"[:2000]}
            signal.setitimer(signal.ITIMER_PROF, 0)
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


if __name__ == "__main__":
    _serve()
