"""Architectures without an entry in our table go through NVIDIA's megatron-bridge, where it is installed."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..settings import ConfigError
from .name_map import NAME_MAP


def open_bridge(config: dict[str, Any]) -> Any:
    """megatron-bridge's converter for the model of a config.json (as `read_hf_config` gives it).

    Raises:
        ConfigError: megatron-bridge is not installed, or does not know the architecture; says the fix.
    """
    names, path = config.get("architectures"), config.get("_name_or_path")
    try:
        from megatron.bridge import AutoBridge
    except ImportError:
        raise ConfigError(f"architecture {names} of {path} is not in our name map ({', '.join(NAME_MAP)}): pip install megatron-bridge, "
                          "or add it to weights/architectures.py and weights/name_map.py") from None
    try:
        return AutoBridge.from_hf_pretrained(path)
    except (ValueError, OSError) as error:
        raise ConfigError(f"megatron-bridge cannot open {path} ({names}): {error}") from error


def bridged_names(bridge: Any, chunks: Sequence[torch.nn.Module]) -> list[str]:
    """Hugging Face names of all tensors that the bridge knows in the model. Collective over all ranks."""
    found = (task.mapping.hf_param for task in bridge.get_conversion_tasks(list(chunks)) if task is not None)
    return [name for hf in found for name in ([hf] if isinstance(hf, str) else hf.values())]


def bridged_tensors(bridge: Any, chunks: Sequence[torch.nn.Module], bucket_bytes: int) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Buckets of (Hugging Face name, full tensor) on rank 0; the bridge gathers each tensor on every rank."""
    bucket: list[tuple[str, torch.Tensor]] = []
    size = 0
    for name, tensor in bridge.export_hf_weights(list(chunks), cpu=False, show_progress=False):
        if dist.get_rank() > 0:
            continue
        if bucket and size + tensor.nbytes > bucket_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    if bucket:
        yield bucket
