"""Checkpoints in block-wise FP8, as DeepSeek-V3 and Kimi-K2 are published: read as the weights that they stand for.

    w[i, j] = X.weight[i, j] * X.weight_scale_inv[i // m, j // n]       in float32, blocks of weight_block_size = [m, n]

`X.weight` is float8_e4m3fn, `X.weight_scale_inv` has one number a block, those that the edges cut included (DeepSeek-V3's README_WEIGHTS.md;
its name says inverse, and it multiplies). Tensors in other dtypes of the same directory are plain weights.
"""

import os
from collections.abc import Mapping
from typing import Any

import torch

from ..rollout.server_check import PLAIN_WEIGHTS
from ..settings import ConfigError
from .safetensors_dir import SafetensorsDirectory, has_weights

KEYS = ("quantization_config", "compression_config")        # where config.json speaks of it
FP8, SCALE = "F8_E4M3", "_scale_inv"


def block_size(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Rows and columns of a block of a config.json's FP8 weights; None if they are not quantized.

    Raises:
        ConfigError: they are quantized in another way.
    """
    how = next((config[key] for key in KEYS if config.get(key) is not None), None)
    if how is None:
        return None
    method, block = how.get("quant_method"), how.get("weight_block_size")
    if method != "fp8" or how.get("fmt", "e4m3") != "e4m3" or not block:
        raise ConfigError(f"config.json: the weights are quantized by quant_method {method!r} (fmt {how.get('fmt')!r}, weight_block_size "
                          f"{block}), and only 'fp8' in e4m3 with a weight_block_size is read: give the bfloat16 or block-wise FP8 checkpoint "
                          "of the same model, or, where no weights are read from it, drop quantization_config from its config.json")
    rows, columns = block
    return rows, columns


def without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of the same model in plain weights."""
    return {key: value for key, value in config.items() if key not in KEYS}


def serving_arguments(path: str | os.PathLike, config: Mapping[str, Any]) -> tuple[str, ...]:
    """Arguments with which SGLang serves the model of a directory in plain weights: random ones where the directory holds none, which the
    trainer replaces by its own before the first request.
    """
    if block_size(config) is not None:
        return PLAIN_WEIGHTS
    return () if has_weights(path) else ("--load-format", "dummy")


class WeightsDirectory(SafetensorsDirectory):
    """A directory of weights, plain or in block-wise FP8; `slice` gives views that read and dequantise only what is indexed.

    Args:
        path: the directory.
        block: from `block_size` of its config.json.

    Raises:
        ConfigError: as SafetensorsDirectory; by `slice` and what uses it, a scale that is missing or has the wrong shape.
    """

    def __init__(self, path: str | os.PathLike, block: tuple[int, int] | None):
        super().__init__(path)
        self.block = block

    def slice(self, name: str) -> Any:
        weight = super().slice(name)
        if weight.get_dtype() != FP8:
            return weight
        if self.block is None:
            raise ConfigError(f"{name} is stored in FP8, but config.json has no quantization_config with a weight_block_size: give the config.json "
                              "that was published with these weights")
        if name + SCALE not in self.files:
            raise ConfigError(f"{name}{SCALE}, the scales of {name}, is missing: download or copy the checkpoint again")
        scale, shape = super().slice(name + SCALE), weight.get_shape()
        wanted = [-(-size // block) for size, block in zip(shape, self.block, strict=False)]
        if len(shape) != 2 or scale.get_shape() != wanted:
            raise ConfigError(f"{name}{SCALE} is {tuple(scale.get_shape())}; blocks of {self.block} of {name} {tuple(shape)} need {tuple(wanted)}")
        return Dequantized(weight, scale, self.block)

    def stored(self, name: str) -> tuple[str, ...]:
        """The tensors on disk that make this one."""
        return (name, name + SCALE) if super().slice(name).get_dtype() == FP8 else (name,)


class Dequantized:
    """A lazy view as safetensors gives them: indexing it with slices of rows and columns reads that part, in float32."""

    def __init__(self, weight: Any, scale: Any, block: tuple[int, int]):
        self.weight, self.scale, self.block = weight, scale, block

    def get_shape(self) -> list[int]:
        return self.weight.get_shape()

    def __getitem__(self, index: slice | tuple[slice, ...]) -> torch.Tensor:
        index = (*(index if isinstance(index, tuple) else (index,)), slice(None))[:2]
        spans = [part.indices(size)[:2] for part, size in zip(index, self.get_shape(), strict=True)]
        scale = self.scale[tuple(slice(a // n, -(-b // n)) for (a, b), n in zip(spans, self.block, strict=True))].float()
        for dim, ((a, b), n) in enumerate(zip(spans, self.block, strict=True)):
            scale = scale.repeat_interleave(n, dim).narrow(dim, a % n, b - a)       # a slice may begin and end inside a block
        return self.weight[tuple(slice(a, b) for a, b in spans)].float().mul_(scale)
