"""Engines whose routes cannot be trusted, refused before the first rollout: what `/server_info` tells."""

import re
from typing import Any

from ..settings import ConfigError

# SGLang releases and what is wrong with their routes; docs/routing.md has the table.
FIRST = (0, 5, 7)           # no routes before
PER_REQUEST = (0, 5, 13)    # before: in a batch in which only some requests ask, one gets another's rows
DRAFT = (0, 5, 15)          # before: the draft model's routers overwrite rows

IN_KERNEL = ("flashinfer_trtllm", "experimental_sgl_trtllm", "flashinfer_mxfp4", "triton_kernel")


def check_server(url: str, info: dict[str, Any]) -> None:
    """Refuse an SGLang server that would return no routes, stale ones or another request's.

    Args:
        url: for the message.
        info: its `/server_info`.

    Raises:
        ConfigError: names the server, its flag and the fix.
    """
    number = version(info.get("version", ""))
    text = info.get("version", "of unknown version")
    speculative = info.get("speculative_algorithm")
    loads_back = [name for name in ("enable_hierarchical_cache", "enable_lmcache", "enable_flexkv") if info.get(name)]
    for bad, problem, fix in (
        (number < FIRST, f"SGLang {text} does not report routed experts", "install 0.5.15 or newer"),
        (number < PER_REQUEST, f"SGLang {text} mixes up the routes of requests in one batch", "install 0.5.15 or newer"),
        (number < DRAFT and speculative, f"SGLang {text} lets the draft model overwrite routes",
         "install 0.5.15 or newer, or drop --speculative-algorithm"),
        (not info.get("enable_return_routed_experts"), "it does not record routed experts", "start it with --enable-return-routed-experts"),
        (info.get("pp_size", 1) > 1, "under --pipeline-parallel-size above 1 the later stages' routes come back as zeros",
         "use --tensor-parallel-size or --data-parallel-size instead"),
        (loads_back, f"--{''.join(loads_back[:1]).replace('_', '-')} loads cached prefixes back without their routes", "drop it"),
        (info.get("disaggregation_mode") in ("prefill", "decode"), "--disaggregation-mode splits the routes of prompt and response",
         "serve without disaggregation"),
        (info.get("moe_runner_backend") in IN_KERNEL,
         f"--moe-runner-backend {info.get('moe_runner_backend')} routes inside its kernel and its routes come back as zeros",
         "use another backend, such as triton or flashinfer_trtllm_routed"),
        (speculative and (info.get("speculative_eagle_topk") or 1) > 1, "tree speculation moves tokens in the cache without their routes",
         "use --speculative-eagle-topk 1"),
    ):
        if bad:
            raise ConfigError(f"routing replay cannot use the server {url}: {problem}; {fix}")


def version(text: str) -> tuple[int, ...]:
    """"0.5.9.post1" -> (0, 5, 9); () when it is not one. A development version counts as its release."""
    found = re.match(r"v?(\d+)\.(\d+)\.(\d+)", str(text))
    return tuple(map(int, found.groups())) if found else ()
