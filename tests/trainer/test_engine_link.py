"""The link to the engines: where its files are, and the first rank's server, for which the others wait in the control groups only."""

import os
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from megatron_grpo.rollout.config import EngineConfig
from megatron_grpo.trainer import engine_link
from megatron_grpo.trainer.distribute import RolloutFailed


def directories(given):
    """(the directory, whether it is there before and after the link is closed)."""
    link = engine_link.EngineLink(SimpleNamespace(grpo=SimpleNamespace(engine=EngineConfig())), None, given)
    there = os.path.isdir(link.directory)
    dist.barrier()
    link.close()
    dist.barrier()
    return link.directory, there, os.path.isdir(link.directory)


def test_all_ranks_share_a_directory_also_where_none_is_named(pool, tmp_path):
    first, second = pool.run(directories, None, ranks=2)
    assert first == second and first[1:] == (True, False)
    assert pool.run(directories, str(tmp_path), ranks=2) == [(str(tmp_path), True, True)] * 2


class Server:
    url = "http://127.0.0.1:1"

    def __init__(self, fails=()):
        self.fails = fails

    def launch(self):
        return self._do("launch")

    def wait(self):
        return self._do("wait")

    def stop(self): ...

    def _do(self, what):
        if what in self.fails:
            raise OSError(f"cannot {what}")
        return self


class Alone:
    """The control groups of one rank."""

    is_leader, dp_size = True, 1

    def over_leaders(self, value):
        return [value]

    def from_leader(self, value):
        return value


@pytest.fixture
def link(monkeypatch, tmp_path):
    def make(server, launch="local", urls=()):
        monkeypatch.setattr(dist, "get_rank", lambda group=None: 0)
        monkeypatch.setattr(dist, "broadcast_object_list", lambda *args, **kwargs: None)
        monkeypatch.setattr(engine_link, "serving_arguments", lambda *args: ())
        monkeypatch.setattr(engine_link, "read_hf_config", lambda path: {})
        monkeypatch.setattr(engine_link.LocalServer, "from_config", lambda *args, **kwargs: server)
        monkeypatch.setattr(engine_link, "WeightPublisher", lambda *args: SimpleNamespace(close=lambda: None))
        settings = SimpleNamespace(engine=EngineConfig(sglang_launch=launch, sglang_urls=urls),
                                   weights=SimpleNamespace(hf_checkpoint="model", weight_sync_dir=None),
                                   routing=SimpleNamespace(use_rollout_routing_replay=False), trainer=SimpleNamespace(platform="cpu"))
        made = engine_link.EngineLink(SimpleNamespace(grpo=settings, trust_remote_code=False), Alone(), str(tmp_path))

        monkeypatch.setattr(dist, "broadcast_object_list", lambda *args, **kwargs: pytest.fail("a collective that NCCL would give up"))

        async def client(trained, replay):
            async def close(): ...
            return SimpleNamespace(urls=made.urls, close=close)
        made._client = client
        return made
    return make


TRAINED = SimpleNamespace(live=None, hf_config={})


@pytest.mark.parametrize("launch, urls, served", [("local", (), [Server.url]), ("none", ("http://a:1/", "http://b:1"), ["http://a:1", "http://b:1"])])
def test_leaders_learn_where_the_servers_are(link, launch, urls, served):
    made = link(Server(), launch, urls)
    made.launch()
    made.connect(TRAINED, None)
    assert made.urls == made.client.urls == served and (made.server is not None) == (launch == "local")
    made.close()


@pytest.mark.parametrize("what", ["launch", "wait"])
def test_a_server_that_fails_fails_every_rank(link, what):
    made = link(Server([what]))
    with pytest.raises(RolloutFailed, match=f"OSError: cannot {what}"):
        made.launch()
        made.connect(TRAINED, None)
    made.close()


@pytest.mark.parametrize("trusted", (True, False))
def test_the_local_server_trusts_the_code_that_the_trainer_trusts(trusted, tmp_path, monkeypatch):
    started = {}
    monkeypatch.setattr(engine_link.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(engine_link.LocalServer, "launch", lambda server: started.update(command=server.command()) or server)
    (tmp_path / "config.json").write_text("{}")
    link = object.__new__(engine_link.EngineLink)
    link.args, link.directory = SimpleNamespace(trust_remote_code=trusted), str(tmp_path)
    link.settings = SimpleNamespace(engine=EngineConfig(sglang_launch="local"), weights=SimpleNamespace(hf_checkpoint=str(tmp_path)),
                                    routing=SimpleNamespace(use_rollout_routing_replay=False), trainer=SimpleNamespace(platform="cpu"))
    link._launched()
    assert ("--trust-remote-code" in started["command"]) == trusted
