"""Write the live model as a Hugging Face directory, atomically, by many ranks at once."""

import os
from typing import Any

import torch.distributed as dist

from ..settings import ConfigError
from .export import iterate_hf_tensors
from .fp8 import without_quantization
from .live import LiveModel
from .safetensors_dir import SafetensorsWriter


def save_hf_checkpoint(model: LiveModel, path: str | os.PathLike, config: dict[str, Any], bucket_bytes: int,
                       tokenizer_from: str | os.PathLike | None = None) -> int:
    """Collective over all ranks. The directory appears under its name complete or not at all; returns the bytes written by all.

    Args:
        model: the live model.
        path: directory, on a file system that all ranks see.
        config: config.json.
        bucket_bytes: gathered at a time, and the size of a shard file [bytes].
        tokenizer_from: directory whose other files (tokenizer, generation_config.json) are copied.

    Raises:
        ConfigError: a rank could not write; raised on every rank.
    """
    rank, writer = dist.get_rank(), SafetensorsWriter(path, dist.get_rank())
    fault: Exception | None = None
    try:
        if rank == 0:
            writer.prepare()
    except OSError as error:
        fault = error
    _agree(path, fault)
    for bucket in iterate_hf_tensors(model, bucket_bytes, to="owners"):
        try:
            if fault is None:
                writer.write(bucket)
        except Exception as error:      # go on to draw buckets: the others wait in their collectives
            fault = error
    parts = _agree(path, fault, (writer.files, writer.bytes))
    total = sum(size for _, size in parts)
    try:
        if rank == 0:
            writer.publish({name: file for files, _ in parts for name, file in files.items()}, total,
                           _config_of(model, config), tokenizer_from)
    except OSError as error:
        fault = error
    _agree(path, fault)
    return total


def _agree(path, fault: Exception | None, value: Any = None) -> list:
    """Every rank's value; a fault on one rank is raised on all."""
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (None if fault is None else f"{type(fault).__name__}: {fault}", value))
    faults = [f"rank {rank}: {text}" for rank, (text, _) in enumerate(everyone) if text]
    if faults:
        raise ConfigError(f"cannot write {path}: {'; '.join(faults[:4])}. It must be on a file system that all ranks see, with space left")
    return [value for _, value in everyone]


def _config_of(model: LiveModel, config: dict[str, Any]) -> dict[str, Any]:
    """config.json of what is written: its dtype, plain weights, no path of this machine, and no layers of multi-token prediction."""
    config = without_quantization(config) | {"dtype": str(model.dtype).removeprefix("torch.")}
    config.pop("torch_dtype", None)
    config.pop("_name_or_path", None)
    return config | ({"num_nextn_predict_layers": 0} if config.get("num_nextn_predict_layers") else {})
