import json
from urllib.request import urlopen

import pytest

from megatron_grpo.routing.server import check_server, version
from megatron_grpo.settings import ConfigError

GOOD = dict(version="0.5.23", enable_return_routed_experts=True, pp_size=1, enable_hierarchical_cache=False, disaggregation_mode="null",
            moe_runner_backend="auto", speculative_algorithm=None, speculative_eagle_topk=None)


@pytest.mark.parametrize("info, parts", [
    (dict(version="0.5.6.post2"), ("0.5.6.post2", "install 0.5.15")),
    (dict(version=""), ("install 0.5.15",)),
    (dict(version="0.5.12"), ("one batch", "install 0.5.15")),
    (dict(version="0.5.14", speculative_algorithm="EAGLE"), ("draft", "--speculative-algorithm")),
    (dict(enable_return_routed_experts=False), ("--enable-return-routed-experts",)),
    (dict(pp_size=2), ("--pipeline-parallel-size", "zeros")),
    (dict(enable_hierarchical_cache=True), ("--enable-hierarchical-cache", "drop it")),
    (dict(enable_lmcache=True), ("--enable-lmcache", "drop it")),
    (dict(disaggregation_mode="decode"), ("--disaggregation-mode",)),
    (dict(moe_runner_backend="triton_kernel"), ("--moe-runner-backend triton_kernel", "zeros")),
    (dict(speculative_algorithm="EAGLE", speculative_eagle_topk=4), ("--speculative-eagle-topk 1",)),
])
def test_refused(info, parts):
    with pytest.raises(ConfigError) as error:
        check_server("http://n1:30000", GOOD | info)
    for part in ("http://n1:30000", *parts):
        assert part in str(error.value)


@pytest.mark.parametrize("info", [{}, dict(speculative_algorithm="EAGLE", speculative_eagle_topk=1), dict(version="0.5.13")])
def test_accepted(info):
    check_server("http://n1:30000", GOOD | info)


def test_version():
    assert version("0.5.9.post1") == (0, 5, 9) and version("v0.5.23rc1") == (0, 5, 23) and version("main") == ()


@pytest.mark.engine
def test_what_a_real_server_says_is_accepted_and_each_word_of_it_is_read(sglang_server):
    info = json.load(urlopen(f"{sglang_server.url}/server_info", timeout=60))
    check_server(sglang_server.url, info)
    assert set(GOOD) <= set(info)           # a field that is renamed would otherwise be read as harmless
