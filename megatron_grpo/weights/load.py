"""Hugging Face -> Megatron: each rank reads the slices that it holds, and nothing else."""

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from ..settings import ConfigError
from .fp8 import WeightsDirectory, block_size
from .hf_config import read_hf_config
from .live import LiveModel


@torch.no_grad()
def load_hf_checkpoint(model: LiveModel, path: str | Path) -> None:
    """Fill the live model from a directory of safetensors, under any TP, PP, VPP, EP and ETP; rows of padding become 0.

    Block-wise FP8 is dequantised as it is read (fp8.py). Values are cast to the dtype of the live tensor. An optimizer that keeps its own
    copy of the weights has to take them again afterwards (`optimizer.reload_model_params()`).

    Collective over all ranks: a fault on one rank is raised on every rank.

    Raises:
        ConfigError: tensors that are missing, have another shape, are quantized in another way, or have no place in the model; the message
            names them.
    """
    if model.bridge is not None:
        model.bridge.load_hf_weights(list(model.chunks), str(path))
        return
    faults, used, names = [], torch.zeros(0), []
    try:
        checkpoint = WeightsDirectory(path, block_size(read_hf_config(path)))
        names = sorted(checkpoint.files)
        index = {name: i for i, name in enumerate(names)}
        used = torch.zeros(len(names), dtype=torch.uint8)
        for shard in model.shards():
            shapes, blocks = model.blocks(shard)
            sources = shard.hf_names()
            absent = [name for name in sources if name not in index]
            wrong = [f"{name} is {checkpoint.shape(name)}, the model needs {tuple(shape)}"
                     for name, shape in zip(sources, shapes, strict=True) if name in index and checkpoint.shape(name) != tuple(shape)]
            faults += [f"{name} (for {shard.name}) is missing" for name in absent] + wrong
            if absent or wrong:
                continue
            if sum(b.shard_rows[1] - b.shard_rows[0] for b in blocks) < len(shard.tensor):
                shard.tensor.zero_()
            for block in blocks:
                block.of_shard(shard.tensor).copy_(block.of_hf(checkpoint.slice(sources[block.source])))
            for name in sources:
                used[[index[part] for part in checkpoint.stored(name)]] = 1
        checkpoint.close()
    except (ConfigError, OSError, ValueError) as error:
        faults.append(str(error))
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, faults)
    if any(everyone):
        rank, first = next((r, f) for r, f in enumerate(everyone) if f)
        more = f"\n  and {len(first) - 8} more" if len(first) > 8 else ""
        raise ConfigError(f"cannot load {path} (rank {rank}):\n  " + "\n  ".join(first[:8]) + more)
    _no_leftovers(model, path, names, used)


def _no_leftovers(model: LiveModel, path, names: Sequence[str], used: torch.Tensor) -> None:
    """Every tensor of the checkpoint went into some rank's model, except layers of multi-token prediction."""
    used = used.to(model.device)
    dist.all_reduce(used, dist.ReduceOp.MAX)
    left = [name for name, seen in zip(names, used.tolist(), strict=True) if not seen and not _may_be_left(name, model)]
    if left:
        raise ConfigError(f"{path} holds {len(left)} tensors that the model has no place for, e.g. {', '.join(left[:5])}: "
                          "a model flag differs from its config.json")


def _may_be_left(name: str, model: LiveModel) -> bool:
    part = name.split(".")
    beyond = part[:2] == ["model", "layers"] and int(part[2]) >= model.geometry.num_layers
    return beyond or name.endswith("rotary_emb.inv_freq") or (model.geometry.tied and name == "lm_head.weight")
