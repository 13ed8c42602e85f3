"""examples/slurm on a real Slurm: three nodes of its own on this machine, see private_slurm.sh."""

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from megatron_grpo.rollout.server import CPU_ARGS
from tests.e2e.run import run_train
from tests.rollout.tiny import tiny_qwen3_moe

pytestmark = pytest.mark.engine
ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "examples" / "slurm"
STEPS = 8
RUN = f"""--platform cpu --algorithm grpo --no-use-kl-loss --seq-length 64 --lr 1e-3 --rollout-batch-size 4 --n-samples-per-prompt 4
--rollout-max-response-len 12 --use-dynamic-batch-size --max-tokens-per-gpu 128 --data-pad-size-multiplier 8 --ckpt-format torch_dist
--label-key label --rollout-stop-token-ids 7 --use-distributed-optimizer --eval-num-prompts 0 --use-rollout-routing-replay
--expert-model-parallel-size 2 --custom-rm-path {ROOT}/tests/slurm/reward.py:even_tokens""".split()


def free_ports(count):
    sockets = [socket.socket() for _ in range(count)]
    for s in sockets:
        s.bind(("127.0.0.1", 0))
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


class Cluster:
    """Submits jobs to the private Slurm and watches them."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.environment = os.environ | {"SLURM_CONF": str(directory / "slurm.conf"), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}

    def __call__(self, *words, **variables) -> str:
        environment = self.environment | {name: str(value) for name, value in variables.items()}
        done = subprocess.run(list(map(str, words)), env=environment, cwd=SCRIPTS, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, (words, done.stderr)
        return done.stdout.strip()

    def submit(self, script, log, options, flags, **variables) -> str:
        """The job's id; `options` are of sbatch, `variables` of env.sh."""
        done = self("sbatch", "--parsable", "--gpus-per-node=0", f"--output={log}", *options, script, *flags, **variables)
        return done.split(";")[0]

    def show(self, job) -> dict[str, str]:
        """Of a heterogeneous job: the component that runs the script."""
        return dict(re.findall(r"(\w+)=(\S*)", self("scontrol", "show", "job", job).split("\n\n")[0]))

    def wait(self, job, what, timeout, logs):
        """Until what(job's fields) is true; `logs` is the directory of everything worth reading when it never is."""
        deadline = time.monotonic() + timeout
        while not what(fields := self.show(job)):
            if time.monotonic() > deadline or fields["JobState"] in ("FAILED", "CANCELLED", "TIMEOUT", "COMPLETED"):
                raise AssertionError(f"{fields}\n" + "\n".join(f"{p}: {p.read_text()[-3000:]}" for p in sorted(logs.rglob("*.log"))))
            time.sleep(0.5)
        return fields


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    if not shutil.which("slurmctld") or os.geteuid():
        missing = "a private Slurm needs root and Debian's slurmctld, slurmd and munge: tests/slurm/private_slurm.sh install"
        assert not os.environ.get("REQUIRE_SLURM"), missing
        pytest.skip(missing)
    directory = tmp_path_factory.mktemp("slurm")
    script = ROOT / "tests" / "slurm" / "private_slurm.sh"
    subprocess.run([script, "start", directory, "3"], check=True, timeout=120)
    cluster = Cluster(directory)
    env_sh = directory / "env.sh"
    env_sh.write_text(f"source {shlex.quote(str(SCRIPTS / 'env.sh'))}\naddress() {{ echo 127.0.0.1; }}      # all nodes are this machine\n")
    prompts = directory / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"input": f"<t{5 + i}> <t{60 + i}> <t{100 + i}>", "label": "x"}) + "\n" for i in range(40)))
    RUN.extend(["--prompt-data", str(prompts)])
    cluster.environment |= {
        "GRPO_ENV": str(env_sh), "MODEL": str(tiny_qwen3_moe(directory / "model")), "PYTHON": sys.executable, "TRAIN_NODES": "2",
        "GPUS_PER_NODE": "1", "SGLANG": f"{sys.executable} -m megatron_grpo.rollout.server",
        "SERVER_ARGS": shlex.join([*CPU_ARGS, "--dtype", "float32", "--skip-server-warmup", "--enable-return-routed-experts"])}
    yield cluster
    subprocess.run([script, "stop", directory], check=True, timeout=60)


def ports():
    master, server = free_ports(2)
    return {"MASTER_PORT": master, "SERVER_PORT": server}


def steps_logged(run):
    log = run / "metrics.jsonl"
    return log.read_text().count("\n") if log.exists() else 0


def weights(directory):
    with safe_open(next(directory.glob("*.safetensors")), "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def test_preempted_and_requeued_equals_undisturbed(slurm, pool, tmp_path):
    """2 trainer nodes and 1 server node; SIGTERM in mid-run, requeue, end: the weights of a run that never stopped, bit for bit."""
    run, log, rollouts = tmp_path / "run", tmp_path / "job.log", tmp_path / "rollouts" / "{step}_{dp_rank}.pt"
    job = slurm.submit("train.sbatch", log, ["--nodes=3"], [*RUN, "--train-iters", STEPS, "--save-debug-rollout-data", rollouts,
                                                            "--save-hf", tmp_path / "hf-{iteration}"], RUN=run, **ports())
    slurm.wait(job, lambda _: steps_logged(run) >= 2, 400, tmp_path)
    slurm("scancel", "--batch", "--signal=TERM", job)
    slurm.wait(job, lambda fields: fields["JobState"] == "PENDING", 120, tmp_path)
    stopped = int((run / "latest_checkpointed_iteration.txt").read_text())
    assert 2 <= stopped < STEPS and steps_logged(run) == stopped
    assert f"stopped by a signal after step {stopped}" in (run / "logs" / f"{job}.0" / "trainer-1.log").read_text()
    slurm("scontrol", "update", f"jobid={job}", "StartTime=now")       # Slurm makes a requeued job wait two minutes
    fields = slurm.wait(job, lambda fields: fields["JobState"] == "COMPLETED", 400, tmp_path)
    assert fields["ExitCode"] == "0:0" and fields["Restarts"] == "1"
    assert steps_logged(run) == STEPS

    samples = [[s for path in sorted(rollouts.parent.glob(f"{step}_*.pt")) for s in torch.load(path, weights_only=False)] for step in range(STEPS)]
    groups = [sorted({s.group_id for s in step}) for step in samples]
    assert sorted(g for step in groups for g in step) == list(range(4 * STEPS))       # no prompt repeated, none lost
    assert {len(step) for step in samples} == {16}

    argv = [*RUN, "--train-iters", STEPS, "--load-debug-rollout-data", rollouts, "--hf-checkpoint", slurm.environment["MODEL"],
            "--save", tmp_path / "undisturbed", "--save-hf", tmp_path / "undisturbed-{iteration}"]
    results = pool.run(run_train, list(map(str, argv)), ranks=2, timeout=300)
    assert [code for code, _ in results] == [0, 0], results
    want, got, halfway = weights(tmp_path / f"undisturbed-{STEPS}"), weights(tmp_path / f"hf-{STEPS}"), weights(tmp_path / f"hf-{stopped}")
    assert want.keys() == got.keys() and all(torch.equal(want[name], got[name]) for name in want)
    assert any(not torch.equal(halfway[name], got[name]) for name in got)

    # the same steps on two nodes with an accident of one rank: the job fails, and says so once
    job = slurm.submit("train.sbatch", tmp_path / "failed.log", ["--nodes=2"], [
        *RUN, "--train-iters", STEPS, "--load-debug-rollout-data", rollouts, "--custom-pg-loss-reducer-path", f"{ROOT}/tests/e2e/failing.py:raises"],
        RUN=tmp_path / "failed", **ports())
    fields = slurm.wait(job, lambda fields: fields["JobState"] == "FAILED", 300, tmp_path)
    assert fields["ExitCode"] == "1:0"
    [line] = [line for line in (tmp_path / "failed.log").read_text().splitlines() if "boom" in line]
    assert re.fullmatch(r"megatron_grpo: rank 1(: | on \S+ failed: )ValueError: boom", line)


def test_colocated_ends_with_its_server(slurm, tmp_path, monkeypatch):
    """Trainer and server on one node; the server dies: the job ends at once, fails, and names the server."""
    run, log = tmp_path / "run", tmp_path / "job.log"
    monkeypatch.setitem(slurm.environment, "SERVER_ARGS", slurm.environment["SERVER_ARGS"] + " --base-gpu-id 0")      # there is no third GPU
    gpus, at = dict(GPUS_PER_NODE=3, TRAIN_GPUS=2, SERVER_GPUS=1), ports()
    job = slurm.submit("colocated.sbatch", log, ["--nodes=1"], [*RUN, "--train-iters", 500], RUN=run, **gpus, **at)
    slurm.wait(job, lambda _: steps_logged(run) >= 1, 400, tmp_path)
    step = re.search(r"(\S+) server-n1-", slurm("squeue", "--steps", "--jobs", job, "--noheader", "--format=%i %j")).group(1)
    start = time.monotonic()
    slurm("scancel", "--signal=KILL", step)
    fields = slurm.wait(job, lambda fields: fields["JobState"] == "FAILED", 120, tmp_path)
    assert time.monotonic() - start < 60 and fields["ExitCode"] == "1:0"
    assert f"megatron_grpo: the server http://127.0.0.1:{at['SERVER_PORT']} ended with code" in log.read_text()


ECHO = """#!/bin/bash
echo "args: $*"
case "$*" in *torch.distributed.run*) sleep 2 ;; *) exec sleep 60 ;; esac
"""
LAYOUTS = {      # name: (sbatch's words, variables, what each log must say; 2 GPUs a node)
    "server over two nodes, router": (["--nodes=3", "train.sbatch"], dict(TRAIN_NODES=1, SERVER_GPUS=4, ROUTER="{echo}"), {
        "server-n2-30000-0": "--port 30000 --tp-size 4 --nnodes 2 --node-rank 0 --dist-init-addr n2:30500",
        "server-n2-30000-1": "--port 30000 --tp-size 4 --nnodes 2 --node-rank 1 --dist-init-addr n2:30500",
        "router-0": "--port 29900 --worker-urls http://n2:30000",
        "trainer-0": "--sglang-urls http://n2:29900 --sglang-worker-urls http://n2:30000 --x y"}),
    "heterogeneous": (["--nodes=2", ":", "--gpus-per-node=0", "--nodes=1", "train.sbatch"], dict(SERVER_GPUS=1), {
        "server-n3-30000-0": "--port 30000 --tp-size 1", "server-n3-30001-0": "--port 30001 --tp-size 1 --base-gpu-id 1",
        "trainer-0": "--master-addr n1 --master-port 29500 --nnodes 2 --node-rank 0 --nproc-per-node 2",
        "trainer-1": "--sglang-urls http://n3:30000 http://n3:30001 --x y"}),
    "colocated": (["--nodes=2", "colocated.sbatch"], dict(TRAIN_GPUS=1, SERVER_GPUS=1), {
        "server-n1-30000-0": "--port 30000 --tp-size 1 --base-gpu-id 1", "server-n2-30000-0": "--port 30000 --tp-size 1 --base-gpu-id 1",
        "trainer-0": "--nnodes 2 --node-rank 0 --nproc-per-node 1", "trainer-1": "--sglang-urls http://n1:30000 http://n2:30000 --x y"}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_who_is_started_where(slurm, tmp_path, layout):
    """Real allocations, with a program that only says how it was called in place of the trainer and the servers."""
    words, variables, expected = LAYOUTS[layout]
    echo = tmp_path / "echo"
    echo.write_text(ECHO)
    echo.chmod(0o755)
    variables = {name: str(value).format(echo=echo) for name, value in variables.items()}
    job = slurm.submit(words[-1], tmp_path / "job.log", words[:-1], ["--x", "y"], PYTHON=echo, SGLANG=echo, GRPO_ENV=SCRIPTS / "env.sh",
                       GPUS_PER_NODE=2, RUN=tmp_path / "run", SERVER_ARGS="", **variables)
    # COMPLETING: the script has ended, while Slurm may still wait for a step that was killed as it started
    ended = slurm.wait(job, lambda fields: fields["JobState"] in ("COMPLETED", "COMPLETING"), 120, tmp_path)
    assert ended["ExitCode"] == "0:0"
    for log, words in expected.items():
        said = (tmp_path / "run" / "logs" / f"{job}.0" / f"{log}.log").read_text()
        assert words in said.splitlines()[0], said


def test_servers_that_do_not_fit(slurm, tmp_path):
    """Colocated without a GPU left for the server: refused at once, with the variables to change."""
    job = slurm.submit("colocated.sbatch", tmp_path / "job.log", ["--nodes=2"], [], PYTHON="true", GPUS_PER_NODE=2, RUN=tmp_path / "run")
    fields = slurm.wait(job, lambda fields: fields["JobState"] == "FAILED", 120, tmp_path)
    assert fields["ExitCode"] == "2:0" and "TRAIN_GPUS" in (tmp_path / "job.log").read_text()
