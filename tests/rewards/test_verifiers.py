import asyncio
import os
import signal
import subprocess
import sys
import textwrap

import pytest

from megatron_grpo.rewards import verifiers
from megatron_grpo.rewards.verifiers import VerifierError, VerifierPool, score_exact, score_task

CHAIN = {"source_dataset": "chain_sum", "question": "1 + 2 ="}


@pytest.mark.parametrize("response, score", [
    ("3", 1.0), (" 3 ", 1.0), ("+3.0", 1.0), ("13", 0.5), ("4", 0.0), ("", 0.0), ("1+2 is <answer>3</answer>!", 1.0),
    ("<answer>4</answer><answer> 3 </answer>", 1.0), ("3 <answer>5</answer>", 0.0)])
def test_a_tasks_own_verifier(response, score):
    assert score_task(response, "3", CHAIN) == score


@pytest.mark.parametrize("response, score", [("nus", 1.0), (" nus\n", 1.0), ("nu", 0.0), ("nuss", 0.0), ("", 0.0), ("nuS", 0.0)])
def test_no_credit_for_a_part(response, score):
    assert score_exact(response, "nus", {}) == score


def test_math_in_a_process_of_its_own():
    """Also what a time limit by signals could not check outside the main thread: this runs in a thread."""
    cases = [(r"so \boxed{\frac{1}{2}}", "0.5", 1.0), ("The answer is $x^2+1$", "$1+x^2$", 1.0), (r"\boxed{3}", "4", 0.0),
             ("no idea", "4", 0.0), (r"\boxed{1/3}", r"\frac{1}{3}", 1.0)]

    async def run():
        pool = VerifierPool(1, 60.0)
        try:
            scores = [await pool.score("math", response, label, {}) for response, label, _ in cases]
            task = await asyncio.gather(*(pool.score("task", str(n), "3", CHAIN) for n in range(6)))
            with pytest.raises(VerifierError, match=r"verifier task raised KeyError: 'source_dataset'"):
                await pool.score("task", "3", "3", {})
            with pytest.raises(VerifierError, match="math-verify cannot parse the label ''"):
                await pool.score("math", "3", "", {})
            return scores, task
        finally:
            await pool.close()
    async def threaded():
        return await asyncio.to_thread(asyncio.run, run())
    scores, task = asyncio.run(threaded())
    assert scores == [score for _, _, score in cases] and task == [0, 0, 0, 1, 0, 0]


def test_a_hanging_verifier_does_not_outlive_its_killed_owner():
    """The real program, whose verifier hangs inside a regular expression and whose pipe nobody closes or reads."""
    code = ("import sys, re; sys.argv = ['v', '1.0']; from megatron_grpo.rewards import verifiers; "
            "verifiers.VERIFIERS['math'] = lambda *a: re.match('(a+)+$', 'a' * 60 + 'b'); verifiers._serve()")
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdin.write(b'["math", "", "", {}]\n')
        process.stdin.flush()
        assert process.wait(120) == -signal.SIGPROF


PROGRAM = """
    import json, os, sys, time, re
    for line in sys.stdin:
        if not line.strip():
            print(json.dumps({"ready": True}), flush=True); continue
        kind, response, label, metadata = json.loads(line)
        if response == "hang": re.match("(a+)+$", "a" * 60 + "b")
        if response == "die": os._exit(3)
        if response == "garbage": print("garbage", flush=True); continue
        print(json.dumps({"score": float(len(response)), "pid": os.getpid()}), flush=True)
"""


@pytest.fixture
def scripted(tmp_path, monkeypatch):
    """The pool over a scripted process that can hang inside a regular expression, die, or answer nonsense."""
    path = tmp_path / "verifier.py"
    path.write_text(textwrap.dedent(PROGRAM))
    monkeypatch.setattr(verifiers, "__file__", str(path))


def test_a_process_that_hangs_dies_or_babbles_is_replaced(scripted):
    async def run():
        pool = VerifierPool(2, 2.0)
        try:
            for bad, message in (("hang", r"no answer within 2 s \(--rm-timeout\)"), ("die", "died: EOFError"),
                                 ("garbage", "died: JSONDecode")):
                with pytest.raises(VerifierError, match=message):
                    await pool.score("math", bad, "", {})
                assert await pool.score("math", "four", "", {}) == 4.0
            assert len(pool.processes) <= 2
            return list(pool.processes)
        finally:
            await pool.close()
    for process in asyncio.run(run()):
        assert process.returncode is not None


def test_waiting_for_a_free_process_is_not_counted_and_others_go_on(scripted):
    async def run():
        pool = VerifierPool(2, 3.0)
        try:
            return await asyncio.gather(*(pool.score("math", r, "", {}) for r in ["hang", *["ok"] * 30]), return_exceptions=True)
        finally:
            await pool.close()
    first, *others = asyncio.run(run())
    assert isinstance(first, VerifierError) and others == [2.0] * 30


def test_a_cancelled_call_leaves_its_process_usable(scripted):
    async def run():
        pool = VerifierPool(1, 30.0)
        try:
            await pool.score("math", "a", "", {})
            before = [p.pid for p in pool.processes]
            call = asyncio.ensure_future(pool.score("math", "ab", "", {}))
            await asyncio.sleep(0)
            call.cancel()
            assert await pool.score("math", "abc", "", {}) == 3.0
            assert [p.pid for p in pool.processes] == before
        finally:
            await pool.close()
    asyncio.run(run())


def test_a_process_killed_from_outside_costs_one_score(scripted):
    async def run():
        pool = VerifierPool(1, 30.0)
        try:
            await pool.score("math", "a", "", {})
            os.kill(next(iter(pool.processes)).pid, signal.SIGKILL)
            with pytest.raises(VerifierError, match="died"):
                await pool.score("math", "a", "", {})
            assert await pool.score("math", "ab", "", {}) == 2.0
        finally:
            await pool.close()
    asyncio.run(run())
