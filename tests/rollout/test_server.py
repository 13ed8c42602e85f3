"""The local server: the tiny model served for real, refusals at start, and no orphan whatever the owner's end."""

import base64
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request

import numpy as np
import pytest

from megatron_grpo.rollout.config import EngineConfig
from megatron_grpo.rollout.engine import EngineError
from megatron_grpo.rollout.server import LocalServer
from tests.processes import alive, ends

SERVES = """
import http.server, subprocess, sys
from megatron_grpo.rollout.server import die_with_owner
die_with_owner()
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])     # as SGLang's scheduler
print("child", child.pid, flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


class Pretended(LocalServer):
    """LocalServer of a program that starts faster than SGLang."""

    def __init__(self, path, program: str, **options):
        (path / "config.json").write_text("{}")
        super().__init__(path, log=path / "log", **options)
        self.program = program

    def command(self):
        return [sys.executable, "-c", self.program, str(self.port)]


def child_of(log) -> int:
    return int(log.read_text().split("child ")[1].split()[0])


def test_stop_kills_the_whole_group(tmp_path):
    with Pretended(tmp_path, SERVES) as server:
        pids = [server.process.pid, child_of(tmp_path / "log")]
        assert all(map(alive, pids)) and urllib.request.urlopen(server.url + "/health", timeout=20).status == 200
        directory = server._directory
    assert all(map(ends, pids)) and not os.path.exists(directory)
    server.stop()       # again, to no effect


def test_server_dies_with_a_killed_owner(tmp_path):
    program = f"import sys; sys.path.insert(0, {os.getcwd()!r})\n" + """
import pathlib, time
from tests.rollout.test_server import SERVES, Pretended
server = Pretended(pathlib.Path(sys.argv[1]), SERVES).start()
print(server.process.pid, flush=True)
time.sleep(600)
"""
    owner = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    pids = [int(owner.stdout.readline()), child_of(tmp_path / "log")]
    assert all(map(alive, pids))
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    assert all(map(ends, pids))


def test_server_stops_at_the_end_of_the_interpreter(tmp_path):
    program = f"import sys; sys.path.insert(0, {os.getcwd()!r})\n" + """
import pathlib
from tests.rollout.test_server import SERVES, Pretended
print(Pretended(pathlib.Path(sys.argv[1]), SERVES).start().process.pid)
"""
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True, timeout=120)
    assert ends(int(done.stdout)) and ends(child_of(tmp_path / "log"))


@pytest.mark.parametrize("program, options, message", [
    ("import sys; print('some log'); print('error: unrecognized arguments: --nonsense'); sys.exit(2)", {},
     r"ended with code 2. Fix: correct --sglang-server-args\n(.*\n)*some log"),
    ("raise ModuleNotFoundError(\"No module named 'sglang'\")", {}, "pip install sglang"),
    ("import time; print('slow', flush=True); time.sleep(600)", dict(start_timeout=1.5),
     "not healthy after 2 s; raise --sglang-start-timeout"),
])
def test_failed_start_says_why_and_leaves_nothing(tmp_path, program, options, message):
    server = Pretended(tmp_path, program, **options).launch()
    pid = server.process.pid
    with pytest.raises(EngineError, match=message):
        server.wait()
    assert ends(pid) and server.process is None


def test_refusals_before_anything_starts(tmp_path):
    with pytest.raises(EngineError, match="holds no config.json"):
        LocalServer(tmp_path).start()
    (tmp_path / "config.json").write_text("{}")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(EngineError, match="is taken .*--sglang-port"):
            LocalServer(tmp_path, port=taken.getsockname()[1]).start()


def test_arguments_of_the_flags_win(tmp_path):
    config = EngineConfig(sglang_launch="local", sglang_dtype="bfloat16", sglang_server_args='--max-total-tokens 7 --json "a b"')
    command = LocalServer.from_config(config, tmp_path, routes=False, device="cpu", log_directory=tmp_path).command()
    assert command[-4:] == ["--max-total-tokens", "7", "--json", "a b"] and "--enable-return-routed-experts" not in command
    assert command[command.index("--dtype") + 1] == "bfloat16"


# ---- the real one ---------------------------------------------------------------------------------------------------------------


def post(url, path, **body):
    request = urllib.request.Request(url + path, data=json.dumps(body).encode(), headers={"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as reply:
        return json.loads(reply.read())


@pytest.mark.engine
def test_routes_and_logprobs_equal_transformers(sglang_server):
    """A ragged batch, whose prompts share prefixes, through the shim's batched attention and grouped experts."""
    import torch
    from transformers import AutoModelForCausalLM
    random = np.random.RandomState(0)
    long = random.randint(3, 500, size=60).tolist()
    others = [random.randint(3, 500, size=n).tolist() for n in (3, 1, 21)]
    prompts = [long, long[:40] + [7, 8], long[:40] + [9], *others]
    replies = post(sglang_server.url, "/generate", input_ids=prompts, return_logprob=True, return_routed_experts=True,
                   sampling_params=[dict(max_new_tokens=n, temperature=0.7, ignore_eos=True) for n in (9, 12, 5, 16, 8, 1)])
    model = AutoModelForCausalLM.from_pretrained(sglang_server.model_path, dtype=torch.float32).eval()
    for prompt, reply in zip(prompts, replies, strict=True):
        ids = reply["output_ids"]
        with torch.no_grad():
            out = model(torch.tensor([prompt + ids]), output_router_logits=True)
        routes = np.frombuffer(base64.b64decode(reply["meta_info"]["routed_experts"]), np.int32).reshape(-1, 4, 2)
        expected = np.stack([x.topk(2, -1).indices.numpy() for x in out.router_logits], 1)[:-1]
        np.testing.assert_array_equal(np.sort(routes), np.sort(expected))
        logp = (out.logits[0] / 0.7).log_softmax(-1)[len(prompt) - 1:-1].gather(1, torch.tensor(ids)[:, None])[:, 0]
        np.testing.assert_allclose([x for x, *_ in reply["meta_info"]["output_token_logprobs"]], logp, atol=1e-5)
