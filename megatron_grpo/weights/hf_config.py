"""The model flags from a Hugging Face directory, and its config.json from the flags."""

import argparse
import json
import logging
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..settings import ConfigError, flag
from .architectures import ARCHITECTURES, Architecture, moe_layers
from .bridge import open_bridge
from .fp8 import block_size

logger = logging.getLogger(__name__)

OPTIONS = {"add_bias_linear": "--disable-bias-linear", "layernorm_epsilon": "--norm-epsilon"}
"""Flags that are not spelt as their argparse name."""

def option(name: str) -> str:
    """The flag that sets the argparse name."""
    return OPTIONS.get(name, flag(name))


CHOSEN_BY_USER = {"max_position_embeddings", "attention_dropout", "hidden_dropout", "moe_router_dtype"}
"""Taken from config.json when not given, but not part of what the weights mean: the user's value is never refused."""


def read_hf_config(path: str | Path) -> dict[str, Any]:
    """The config.json of a Hugging Face directory; its `_name_or_path` is the directory.

    Raises:
        ConfigError: there is none, or it is not JSON.
    """
    file = Path(path) / "config.json"
    try:
        return json.loads(file.read_text()) | {"_name_or_path": str(path)}
    except FileNotFoundError:
        raise ConfigError(f"--hf-checkpoint {path}: there is no config.json; give a local directory of a Hugging Face model") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"{file} is not valid JSON: {error}") from None


def architecture_of(config: dict[str, Any]) -> Architecture | None:
    """The entry of the table for this config.json; None when it has none."""
    return next((ARCHITECTURES[name] for name in config.get("architectures") or () if name in ARCHITECTURES), None)


def config_from_hf(path: str | Path) -> dict[str, Any]:
    """The Megatron flags (argparse names) that describe the model of a Hugging Face directory.

    Raises:
        ConfigError: no config.json, an architecture without an entry in architectures.py, one that Megatron can not express, or a
            quantization that is not read.
    """
    config = read_hf_config(path)
    architecture = architecture_of(config)
    if architecture is None:
        raise ConfigError(f"{path}: architecture {config.get('architectures')} is not one of {', '.join(ARCHITECTURES)}: add it to "
                          "weights/architectures.py and weights/name_map.py")
    try:
        block_size(config)
        return architecture.flags(config)
    except KeyError as error:
        raise ConfigError(f"{path}/config.json: {error} is missing, which a {architecture.name} needs") from None
    except ConfigError as error:
        raise ConfigError(f"{path}/{error}") from None


def apply_hf_config(args: argparse.Namespace, path: str | Path, argv: Sequence[str] | None = None) -> None:
    """Set the model flags that were not given from `path`'s config.json; check those that were.

    Call after parsing and before Megatron's validation, which derives other values from these.

    Args:
        args: the parsed flags, changed in place.
        path: Hugging Face directory.
        argv: the words that were parsed, which tell the flags that were given; the process's own when None.

    Raises:
        ConfigError: a given flag contradicts config.json; names all such flags and both values. Or the architecture is neither in
            our table nor known to an installed megatron-bridge.
    """
    config = read_hf_config(path)
    if architecture_of(config) is None:
        open_bridge(config)
        logger.warning("%s: %s is not in our table, so its model flags are neither set nor checked", path, config.get("architectures"))
        return
    words = {word.split("=", 1)[0] for word in (sys.argv[1:] if argv is None else argv)}
    flags, wrong = config_from_hf(path), []
    for name, value in flags.items():
        if option(name) not in words:
            setattr(args, name, value)
        elif name not in CHOSEN_BY_USER and not _same(name, getattr(args, name), value, flags):
            wrong.append(f"{option(name)} gives {name} = {getattr(args, name)!r}, but config.json says {value!r}")
    if wrong:
        raise ConfigError(f"flags that contradict --hf-checkpoint {path}; correct them or leave them out:\n  " + "\n  ".join(wrong))


def hf_config_from_args(args: argparse.Namespace) -> dict[str, Any]:
    """The config.json of the model that the flags describe: that of --hf-checkpoint, or a known architecture that says the same.

    Raises:
        ConfigError: no known architecture can say it; names the flags in which the nearest differs.
    """
    if args.hf_checkpoint:
        return read_hf_config(args.hf_checkpoint) | dict(dtype=_dtype_name(args))
    flags, misses = vars(args), {}
    for architecture in ARCHITECTURES.values():
        if (bool(flags["num_experts"]), bool(flags.get("multi_latent_attention"))) != (architecture.moe, architecture.latent):
            continue
        config = architecture.config(flags)
        says = architecture.flags(config)
        differ = [name for name, value in says.items() if name not in CHOSEN_BY_USER and not _same(name, flags[name], value, flags)]
        if not differ:
            return dict(architectures=[architecture.name], model_type=architecture.model_type, dtype=_dtype_name(args)) | config
        misses[architecture.name] = ", ".join(f"{option(n)} must give {says[n]!r}, not {flags[n]!r}" for n in differ)
    nearest = min(misses, key=lambda name: len(misses[name]))
    raise ConfigError(f"no known Hugging Face architecture is this model; the nearest is {nearest}: {misses[nearest]}")


def _same(name: str, ours: Any, theirs: Any, flags) -> bool:
    if name == "moe_layer_freq":
        ours, theirs = (moe_layers({"num_layers": flags["num_layers"], name: freq}) for freq in (ours, theirs))
    if isinstance(theirs, float) and isinstance(ours, (int, float)):
        return math.isclose(ours, theirs, rel_tol=1e-9)
    return ours == theirs


def _dtype_name(args: argparse.Namespace) -> str:
    return "bfloat16" if args.bf16 else "float16" if args.fp16 else "float32"
