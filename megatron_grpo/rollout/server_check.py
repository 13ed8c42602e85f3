"""Refuses a server that would serve another model or lie about its routes. Each refusal says what to change.

What a server's arguments do to its routes was read in SGLang's sources and tried on running servers; docs/routing.md has the table.
"""

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .engine import EngineError
from .responses import ServedModel
from .wire import Wire

ROUTING_IN_KERNEL = ("flashinfer_trtllm", "experimental_sgl_trtllm", "triton_kernel")
EXPERT_COUNT = ("num_experts", "n_routed_experts", "num_local_experts")      # names in the config.json of different models


async def describe(wire: Wire, url: str) -> tuple[dict, dict]:
    """/server_info and /model_info; {} where a gateway does not have them."""
    replies = await asyncio.gather(wire.control(url, "/server_info"), wire.control(url, "/model_info"), return_exceptions=True)
    info, model_info = ({} if isinstance(reply, EngineError) else reply for reply in replies)
    return info, model_info


def check_server(info: dict[str, Any], model_info: dict[str, Any], model: ServedModel) -> list[str]:
    """What is wrong with a server, each with its fix; empty if nothing is.

    Args:
        info, model_info: see `describe`.
        model: what it has to serve; with `model.routes`, it has to return routes.
    """
    return [*_model_faults(info, model_info, model), *(_route_faults(info) if model.routes else ())]


async def vocabulary_fault(wire: Wire, url: str, model: ServedModel) -> str:
    """SGLang names its vocabulary when a bias is asked for on a token outside it. (Such a token in a prompt would kill it.)"""
    request = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "logit_bias": {str(model.vocab_size): 0.0}}}
    try:
        await wire.control(url, "/generate", request)
    except EngineError as error:
        named = re.search(r"keys in \[0, (\d+)\]", str(error))
        if named and int(named[1]) + 1 != model.vocab_size:
            return (f"its model has a vocabulary of {int(named[1]) + 1}, the trainer's of {model.vocab_size}: serve the model of "
                    "--hf-checkpoint")
    return ""


def _model_faults(info: dict, model_info: dict, model: ServedModel) -> Iterator[str]:
    preferred = model_info.get("preferred_sampling_params")
    if preferred:
        yield f"it changes how requests are sampled ({preferred}): drop --preferred-sampling-params"
    if model_info.get("is_generation") is False:
        yield "it does not generate: serve the model to be trained"
    found = {"model_type": model_info.get("model_type")} | _served_config(info)
    wanted = {"model_type": model.model_type, "vocab_size": model.vocab_size}
    if model.routes:
        wanted |= {"num_hidden_layers": model.routes.num_layers, "num_experts_per_tok": model.routes.topk,
                   "num_experts": model.routes.num_experts}
    for name, value in wanted.items():
        if value is not None and found.get(name) is not None and found[name] != value:
            yield (f"it serves {info.get('model_path')} with {name} {found[name]}, the trainer's model has {value}: serve the model of "
                   "--hf-checkpoint")


def _route_faults(info: dict) -> Iterator[str]:
    if "version" in info:       # a gateway does not say
        version = _version(info["version"])
        if version < (0, 5, 7):
            yield f"SGLang {info['version']} cannot return routed experts: install 0.5.13 or newer"
        elif version < (0, 5, 13):
            yield f"SGLang {info['version']} mixes up routes when only some requests of a batch ask for them: install 0.5.13 or newer"
        elif version < (0, 5, 15) and info.get("speculative_algorithm"):
            yield f"in SGLang {info['version']} the draft model overwrites routes: install 0.5.15 or newer, or drop --speculative-algorithm"
    if info.get("enable_return_routed_experts") is False:
        yield "it returns no routes: start it with --enable-return-routed-experts"
    if (info.get("pp_size") or 1) > 1:
        yield f"with --pp-size {info['pp_size']} the routes of later stages come back as zeros: use --tp-size or --ep-size instead"
    for name, option in (("enable_hierarchical_cache", "--enable-hierarchical-cache"), ("enable_lmcache", "--enable-lmcache")):
        if info.get(name):
            yield f"a prefix that its cache loads back has stale routes: drop {option}"
    if info.get("disaggregation_mode") not in (None, "null"):
        yield "with prefill and decode on different servers the routes of the prompt are garbage: drop --disaggregation-mode"
    if info.get("moe_runner_backend") in ROUTING_IN_KERNEL:
        yield (f"the MoE backend {info['moe_runner_backend']} routes inside its kernel, its routes come back as zeros: give another "
               "--moe-runner-backend, e.g. triton")


def _served_config(info: dict) -> dict[str, Any]:
    """The served model's config.json in names of ours, as far as this machine can read it."""
    try:
        config = json.loads((Path(info["model_path"]) / "config.json").read_text())
    except (OSError, KeyError, TypeError, ValueError):
        return {}
    config = config.get("text_config", config)
    experts = next((config[name] for name in EXPERT_COUNT if config.get(name)), None)
    return {name: config.get(name) for name in ("vocab_size", "num_hidden_layers", "num_experts_per_tok")} | {"num_experts": experts}


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text)[:3])
