"""A run whose ranks are killed at any moment goes on from the last complete checkpoint: no prompt is lost or trained on twice.

MEGATRON_GRPO_KILLS sets how many times; MEGATRON_GRPO_SEED when.
"""

import json
import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

from megatron_grpo.trainer.checkpoint import POINTER, complete_iterations, load_leader_states
from megatron_grpo.verify.ranks import RankFailed
from tests.e2e.engine import training_engine
from tests.e2e.run import run_train
from tests.faults.truth import VOCAB, continuation
from tests.rollout.tiny import tiny_qwen3_moe

KILLS, SEED = int(os.environ.get("MEGATRON_GRPO_KILLS", 4)), int(os.environ.get("MEGATRON_GRPO_SEED", 0))
RESPONSE, SAMPLES, INTERVAL = 12, 2, 2
RUN = f"""--platform cpu --algorithm grpo --no-use-kl-loss --seq-length 64 --lr 1e-3 --lr-decay-style constant --override-opt-param-scheduler
--rollout-batch-size 4 --n-samples-per-prompt {SAMPLES} --over-sampling-batch-size 8 --partial-rollout --rollout-max-response-len {RESPONSE}
--use-dynamic-batch-size --max-tokens-per-gpu 128 --data-pad-size-multiplier 8 --label-key label --use-distributed-optimizer
--expert-model-parallel-size 2 --eval-num-prompts 0 --weight-sync-check none --save-interval {INTERVAL} --keep-checkpoints 2
--report-samples 0 --use-tis""".split()


def life(argv, pids):
    """One life of the job, on one rank: leave the pid, then train."""
    Path(pids, os.environ["RANK"]).write_text(str(os.getpid()))
    return run_train(argv)


class Job:
    """The job, life after life."""

    def __init__(self, pool, engine, directory):
        self.pool, self.engine, self.save, self.pids = pool, engine, directory / "run", directory / "pids"
        self.rollouts = directory / "rollouts"
        self.pids.mkdir()
        model = tiny_qwen3_moe(directory / "model", vocab_size=VOCAB)
        prompts = directory / "prompts.jsonl"
        prompts.write_text("".join(json.dumps({"input": f"<t{5 + i % 90}> <t{5 + i // 90}>", "label": "x"}) + "\n" for i in range(8000)))
        self.argv = [*RUN, "--hf-checkpoint", model, "--prompt-data", prompts, "--save", self.save, "--load", self.save, "--sglang-urls",
                     engine.url, "--custom-rm-path", f"{Path(__file__).with_name('reward.py')}:by_id",
                     "--save-debug-rollout-data", f"{self.rollouts}/{{step}}_{{dp_rank}}.pt"]

    def live(self, steps, *flags):
        """(exit code, stderr) of each rank; raises RankFailed when one is killed."""
        return self.pool.run(life, list(map(str, [*self.argv, "--train-iters", steps, *flags])), str(self.pids), ranks=2, timeout=300)

    @property
    def pointer(self) -> int:
        path = self.save / POINTER
        text = path.read_text() if path.exists() else ""
        return int(text) if text else max(complete_iterations(self.save), default=0)       # torn: the next life repairs it

    def steps(self) -> list[int]:
        """Every step that was ever done, in order."""
        log = self.save / "metrics.jsonl"
        return [json.loads(line)["step"] for line in log.read_text().splitlines()] if log.exists() else []

    def kill(self, victim: int, moment: str, delay: float, found: list):
        """Kill a rank `delay` after `moment`: its start, a step of this life, or the beginning of a save. Then the other one, as a launcher does."""
        done, saved = len(self.steps()), self.saves()
        happened = {"start": lambda: len(list(self.pids.iterdir())) == 2, "step": lambda: len(self.steps()) > done,
                    "save": lambda: not self.saves() <= saved}[moment]
        deadline = time.monotonic() + 250
        while not happened() and time.monotonic() < deadline:
            time.sleep(0.002)
        time.sleep(delay)
        found.append({"pointer": self.pointer, "unfinished": sorted(self.saves() - set(complete_iterations(self.save)))})
        for rank in (victim, 1 - victim):
            os.kill(int((self.pids / str(rank)).read_text()), signal.SIGKILL)
            time.sleep(0.3)

    def saves(self) -> set[int]:
        return {int(path.name[5:]) for path in self.save.glob("iter_*")} if self.save.exists() else set()


@pytest.fixture(scope="module")
def job(pool, tmp_path_factory):
    with training_engine(0.004) as engine:
        yield Job(pool, engine, tmp_path_factory.mktemp("restart"))


@pytest.mark.slow
def test_killed_at_random_moments(job):
    chance, found = random.Random(SEED), []
    for number in range(KILLS):
        moment, longest = (("save", 1.0), ("step", 2.0), ("save", 0.3), ("start", 5.0))[number % 4]
        before, done = job.pointer, len(job.steps())
        for file in job.pids.iterdir():
            file.unlink()       # of the life before
        killer = threading.Thread(target=job.kill, args=(chance.randrange(2), moment, chance.uniform(0, longest), found))
        killer.start()
        with pytest.raises(RankFailed, match="exit code -9"):
            pytest.fail(f"not killed: {job.live(10**6, *['--async-save'] * (number % 2), *['--rollout-ahead', 1] * (number // 2 % 2))}")
        killer.join()
        redone = job.steps()[done:]
        assert not redone or redone[0] == before + 1        # it went on from the pointer
        assert job.pointer >= before and (not job.pointer or job.pointer in complete_iterations(job.save))
        print(f"kill {number + 1}: {moment}, resumed at {before}, did {len(redone)} steps, left {found[-1]}, pointer {job.pointer}")
    before, done = job.pointer, len(job.steps())
    last = before + 2 * INTERVAL
    assert [code for code, _ in job.live(last)] == [0, 0]
    assert job.steps()[done:] == list(range(before + 1, last + 1)) and job.pointer == last
    assert len(complete_iterations(job.save)) == 2
    assert any(save["unfinished"] for save in found), "no kill hit a save"

    trained = [s for step in range(last) for rank in range(2) for s in torch.load(job.rollouts / f"{step}_{rank}.pt", weights_only=False)]
    assert len(trained) == last * 4 * SAMPLES == len({s.sample_id for s in trained})
    states = [leader.state for leader in load_leader_states(job.save, last)]
    held = {g.position for s in states for g in s["groups"]} | {position for s in states for position, _ in s["returned"]}
    assert sorted({s.group_id for s in trained} | held) == list(range(states[0]["position"]))       # none is lost
    assert not held & {s.group_id for s in trained}                                                 # nor comes again
    for sample in trained:
        prompt = list(sample.tokens[:sample.prompt_length])
        assert prompt == [5 + sample.group_id % 90, 5 + sample.group_id // 90]
        assert list(sample.tokens[sample.prompt_length:]) == continuation(prompt, RESPONSE)     # also of those that were carried over
    assert any(len(sample.weight_versions) > 1 for sample in trained)
