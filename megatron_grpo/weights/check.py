"""Does the engine hold the trainer's weights? Checksums of a sample of tensors, each rank of the engine compared with its part."""

import hashlib
import random
from collections.abc import Callable, Collection, Iterator

import torch

from ..rollout.engine import EngineError
from .control import EngineControl, NotFound

# Tensors that SGLang keeps in the layout of the checkpoint on every backend. Expert weights are not: kernels reorder them.
SAMPLED = {     # the engine's name -> the Hugging Face tensors it is made of
    "model.layers.{layer}.input_layernorm.weight": ("input_layernorm.weight",),
    "model.layers.{layer}.post_attention_layernorm.weight": ("post_attention_layernorm.weight",),
    "model.layers.{layer}.self_attn.q_norm.weight": ("self_attn.q_norm.weight",),
    "model.layers.{layer}.self_attn.k_norm.weight": ("self_attn.k_norm.weight",),
    "model.layers.{layer}.mlp.gate.weight": ("mlp.gate.weight",),
    "model.layers.{layer}.self_attn.o_proj.weight": ("self_attn.o_proj.weight",),
    "model.layers.{layer}.self_attn.qkv_proj.weight": ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
}
DTYPES = (torch.bfloat16, torch.float32, torch.float16)


def can_be_sampled(name: str) -> bool:
    """Whether a Hugging Face tensor is one that `sample` may choose."""
    return any(name.endswith(f".{part}") for parts in SAMPLED.values() for part in parts)


def sample(known: Collection[str], count: int, num_layers: int, seed: str) -> dict[str, tuple[str, ...]]:
    """`count` tensors to compare, another choice for each seed: {engine's name: Hugging Face names}, all of them `known`."""
    candidates = {}
    for layer in range(num_layers):
        for name, parts in SAMPLED.items():
            hf = tuple(f"model.layers.{layer}.{part}" for part in parts)
            if all(part in known for part in hf):
                candidates[name.format(layer=layer)] = hf
    chosen = random.Random(seed).sample(sorted(candidates), min(count, len(candidates)))
    return {name: candidates[name] for name in chosen}


def verify_checksums(engine: EngineControl, chosen: dict[str, tuple[str, ...]], tensor: Callable[[str], torch.Tensor],
                     head_dim: int) -> int:
    """Compare the chosen tensors on every rank of the engine.

    Args:
        chosen: from `sample`.
        tensor: Hugging Face name -> the trainer's full tensor.
        head_dim: channels of an attention head.

    Returns:
        comparisons made.

    Raises:
        EngineError: a tensor differs, or nothing can be compared; names engine, rank and tensors.
    """
    hint = "; --weight-sync-check none turns this check off"
    if engine.info.get("quantization"):
        raise EngineError(f"{engine.url} quantizes its weights ({engine.info['quantization']}), so they differ from the trainer's{hint}")
    try:
        ranks = engine.checksums()
    except NotFound as error:
        raise EngineError(f"{error}{hint}") from None
    compared, wrong = 0, []
    for rank in ranks:
        place = rank["parallelism_info"]
        place = place[0] if isinstance(place, list) else place
        size = place["tp_size"] // place["dp_size"]         # data-parallel attention splits attention over fewer ranks
        for name in chosen.keys() & rank["checksums"].keys():
            part = _part(name, [tensor(hf) for hf in chosen[name]], place["tp_rank"] % size, size, head_dim)
            compared += 1
            if rank["checksums"][name] not in set(_hashes(part, engine.info["device"])):
                wrong.append(f"{name} on rank {place['tp_rank']}")
    if wrong:
        raise EngineError(f"{engine.url} does not hold the published weights: {len(wrong)} of {compared} checksums differ, e.g. "
                          f"{', '.join(sorted(wrong)[:4])}{hint}")
    if compared == 0:
        raise EngineError(f"{engine.url} has none of the tensors {', '.join(sorted(chosen)[:4])} to compare{hint}")
    return compared


def _part(name: str, full: list[torch.Tensor], rank: int, size: int, head_dim: int) -> torch.Tensor:
    """What rank `rank` of `size` tensor-parallel ranks of the engine holds."""
    if name.endswith("o_proj.weight"):
        return full[0].chunk(size, dim=1)[rank]
    if name.endswith("qkv_proj.weight"):
        heads = [len(t) // head_dim for t in full]
        # fewer key-value heads than ranks: each is held by several ranks
        return torch.cat([t.view(n, head_dim, -1).flatten(1)[_share(n, rank, size)].reshape(-1, t.shape[1])
                          for t, n in zip(full, heads, strict=True)])
    return full[0]


def _share(heads: int, rank: int, size: int) -> slice:
    if heads < size:
        return slice(rank * heads // size, rank * heads // size + 1)
    return slice(rank * heads // size, (rank + 1) * heads // size)


def _hashes(tensor: torch.Tensor, device: str) -> Iterator[str]:
    """The engine's hash of the tensor in each dtype that the engine may keep it in."""
    for dtype in dict.fromkeys((tensor.dtype, *DTYPES)):
        yield f"{_hash(tensor.to(dtype).contiguous(), device):016x}"


def _hash(tensor: torch.Tensor, device: str) -> int:
    if device == "cpu":
        data = tensor.cpu().reshape(-1).view(torch.uint8).numpy()
        return int.from_bytes(hashlib.sha256(memoryview(data)).digest()[:8], "big")
    try:
        from sglang.kernels.ops.memory.gpu_tensor_hash import gpu_tensor_hash
    except ImportError:
        raise EngineError("the engine hashes on the GPU; to compare, SGLang must be installed beside the trainer too "
                          "(pip install megatron-grpo[cuda]), or give --weight-sync-check none") from None
    return gpu_tensor_hash(tensor.cuda())
