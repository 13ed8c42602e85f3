"""A rank that is killed ends the job soon, and every other rank says which one it was."""

import re
import socket
import subprocess
import sys
import time
from pathlib import Path

from megatron_grpo import verify


def test_one_of_three_ranks_is_killed(tmp_path):
    flags = verify.prepare(str(tmp_path), ["--platform", "cpu", "--algorithm", "grpo", "--no-use-kl-loss"])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # each rank has a launcher of its own, as on three nodes: none of them kills the others' ranks
    launch = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "3", "--nproc-per-node", "1", "--master-addr", "127.0.0.1",
              "--master-port", str(port)]
    train = ["-m", "megatron_grpo.train", *flags, "--custom-pg-loss-reducer-path", f"{Path(__file__).with_name('failing.py')}:is_killed"]
    nodes = [subprocess.Popen([*launch, "--node-rank", str(node), *train], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
             for node in range(3)]
    try:
        killed = nodes[1].communicate(timeout=180)[1]
        start = time.monotonic()
        others = [nodes[0].communicate(timeout=60)[1], nodes[2].communicate(timeout=60)[1]]
        assert time.monotonic() - start < 40
    finally:
        for node in nodes:
            node.kill()
    assert all(node.returncode for node in nodes)
    assert "SIGKILL" in killed
    for rank, output in zip((0, 2), others, strict=True):
        [(who, what)] = re.findall(r"^megatron_grpo: rank (\d): (.*)$", output, re.MULTILINE)
        assert who == str(rank) and re.match(r"ended because rank 1 on \S+ failed: it ended without a word", what), output
