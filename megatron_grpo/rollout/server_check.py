"""Refuses a server that would serve another model, sample otherwise than asked, or lie about its routes; and says what to change."""

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..routing import server as routing_server
from ..settings import ConfigError
from .engine import EngineError
from .responses import ServedModel
from .wire import Wire

# What makes a server of an FP8 directory keep plain weights: random ones, until the trainer publishes its own.
PLAIN_WEIGHTS = ("--load-format", "dummy", "--json-model-override-args", '{"quantization_config":null}')
EXPERT_COUNT = ("num_experts", "n_routed_experts", "num_local_experts")      # names in the config.json of different models


async def describe(wire: Wire, url: str) -> tuple[dict, dict]:
    """/server_info and /model_info; {} where a gateway does not have them."""
    async def read(path: str) -> dict:
        try:
            return await wire.control(url, path)
        except EngineError:
            return {}

    info, model_info = await asyncio.gather(read("/server_info"), read("/model_info"))
    return info, model_info


def check_server(url: str, info: dict[str, Any], model_info: dict[str, Any], model: ServedModel) -> list[str]:
    """What is wrong with a server, each with its fix; empty if nothing is.

    Args:
        url: for messages.
        info, model_info: see `describe`.
        model: what it has to serve; with `model.routes`, it has to return routes.
    """
    return [*_model_faults(info, model_info, model), *(_route_faults(url, info) if model.routes else ())]


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
    if found.get("quantization_config"):
        yield (f"it serves {info.get('model_path')} in the quantization of its config.json, and the trainer publishes plain weights, which would be "
               f"cast into it without scales: start it with {' '.join(PLAIN_WEIGHTS)}")
    wanted = {"model_type": model.model_type, "vocab_size": model.vocab_size}
    if model.routes:
        wanted |= {"num_hidden_layers": model.routes.num_layers, "num_experts_per_tok": model.routes.topk,
                   "num_experts": model.routes.num_experts}
    for name, value in wanted.items():
        if value is not None and found.get(name) is not None and found[name] != value:
            yield (f"it serves {info.get('model_path')} with {name} {found[name]}, the trainer's model has {value}: serve the model of "
                   "--hf-checkpoint")


def _route_faults(url: str, info: dict) -> Iterator[str]:
    if not info:        # a gateway; whether routes pass it shows with the first request
        return
    try:
        routing_server.check_server(url, info)
    except ConfigError as error:
        yield str(error)


def _served_config(info: dict) -> dict[str, Any]:
    """The served model's config.json in names of ours, as far as this machine can read it."""
    try:
        config = json.loads((Path(info["model_path"]) / "config.json").read_text())
        config |= json.loads(info.get("json_model_override_args") or "{}")
    except (OSError, KeyError, TypeError, ValueError):
        return {}
    config = config.get("text_config", config)
    experts = next((config[name] for name in EXPERT_COUNT if config.get(name)), None)
    names = ("vocab_size", "num_hidden_layers", "num_experts_per_tok", "quantization_config")
    return {name: config.get(name) for name in names} | {"num_experts": experts}
