import pytest

from megatron_grpo.rollout.config import EngineConfig
from megatron_grpo.settings import ConfigError


@pytest.mark.parametrize("settings, message", [
    (dict(sglang_urls=("http://a:1",), sglang_launch="local"), "--sglang-urls and --sglang-launch local both"),
    (dict(sglang_urls=("a:30000",)), "--sglang-urls a:30000: give http://host:port"),
    (dict(sglang_urls=("http://a:1", "http://a:1/")), "names a server twice"),
    (dict(sglang_worker_urls=("http://a:1",)), "behind a router: give the router's address with --sglang-urls"),
    (dict(sglang_urls=("http://a:1",), sglang_worker_urls=("b:1",)), "--sglang-worker-urls b:1: give http://host:port"),
    (dict(sglang_server_concurrency=0), "--sglang-server-concurrency 0: give a number above 0"),
    (dict(sglang_retries=-1), "--sglang-retries -1: give 0 or more"),
    (dict(sglang_server_args='--a "b'), "--sglang-server-args .*close the quotation mark"),
    (dict(sglang_api_key_env="NO_SUCH_VARIABLE"), "NO_SUCH_VARIABLE: the variable is not set"),
])
def test_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**settings)


def test_urls_and_key(monkeypatch):
    monkeypatch.setenv("KEY", "k")
    config = EngineConfig(sglang_urls=("http://a:1/", "https://b"), sglang_api_key_env="KEY")
    assert config.server_urls == ("http://a:1", "https://b") and config.api_key == "k" and EngineConfig().api_key is None
