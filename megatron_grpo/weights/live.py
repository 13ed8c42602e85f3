"""The live model as the table sees it: which shard of which Hugging Face tensor this rank holds.

Nothing here imports Megatron: model chunks, configs and process groups are passed in.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ..settings import ConfigError
from .bridge import bridged_names, open_bridge
from .name_map import NAME_MAP, Entry
from .splits import Block, Geometry, Shape

WRAPPED = "module"      # where DistributedDataParallel and Float16Module keep the model


@dataclass(frozen=True)
class ModelGroups:
    """This rank's place in the model's layout.

    Attributes:
        tp: tensor-parallel group.
        etp: expert tensor-parallel group.
        ep: expert-parallel group.
        etp_ep: the ranks of a stage that together hold one copy of its experts.
        pp: pipeline-parallel group.
        first_replica: this rank is in the first of the copies (data and context parallelism) of the dense weights.
        first_expert_replica: the same for the experts.
    """

    tp: dist.ProcessGroup
    etp: dist.ProcessGroup
    ep: dist.ProcessGroup
    etp_ep: dist.ProcessGroup
    pp: dist.ProcessGroup
    first_replica: bool
    first_expert_replica: bool

    @classmethod
    def from_mpu(cls, mpu: Any) -> "ModelGroups":
        """From Megatron's `megatron.core.parallel_state`."""
        return cls(tp=mpu.get_tensor_model_parallel_group(), etp=mpu.get_expert_tensor_parallel_group(),
                   ep=mpu.get_expert_model_parallel_group(), etp_ep=mpu.get_expert_tensor_and_model_parallel_group(),
                   pp=mpu.get_pipeline_model_parallel_group(),
                   first_replica=mpu.get_data_parallel_rank(with_context_parallel=True) == 0,
                   first_expert_replica=mpu.get_expert_data_parallel_rank() == 0)


@dataclass(frozen=True)
class Shard:
    """One Megatron tensor of this rank.

    Attributes:
        name: its name in the model, layers and experts counted over the whole model.
        tensor: the live tensor.
        entry: its kind.
        numbers: {"layer": ..., "expert": ...} counted over the whole model.
        exported: False for a second copy of a tensor that another rank or chunk exports (tied embeddings).
    """

    name: str
    tensor: torch.Tensor
    entry: Entry
    numbers: dict[str, int]
    exported: bool

    def hf_names(self, expert: int | None = None) -> tuple[str, ...]:
        """Names of the tensors that it is a part of; `expert` asks for those of another expert of the layer."""
        return self.entry.hf_names(self.numbers if expert is None else self.numbers | {"expert": expert})


@dataclass(frozen=True)
class LiveModel:
    """The model chunks of this rank, with what is needed to read them.

    Attributes:
        chunks: Megatron model chunks, wrapped (DDP, Float16Module) or not.
        entries: the table of its architecture.
        geometry: its sizes.
        groups: this rank's place.
        bridge: megatron-bridge's converter when the architecture is not in the table; it then does all the work.
    """

    chunks: Sequence[torch.nn.Module]
    entries: tuple[Entry, ...]
    geometry: Geometry
    groups: ModelGroups
    bridge: Any = None

    @property
    def device(self) -> torch.device:
        return next(self.chunks[0].parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.chunks[0].parameters()).dtype

    @classmethod
    def from_config(cls, chunks: Sequence[torch.nn.Module], config: dict[str, Any], groups: ModelGroups) -> "LiveModel":
        """
        Args:
            config: config.json of the model, as `read_hf_config` or `hf_config_from_args` give it.

        Raises:
            ConfigError: the architecture is neither in the table nor known to an installed megatron-bridge, or the model keeps its
                weights in a layout that the table lacks.
        """
        name = next((a for a in config["architectures"] if a in NAME_MAP), None)
        interleave = getattr(unwrap(chunks[0]).config, "moe_mlp_glu_interleave_size", None)
        if interleave is not None:
            raise ConfigError(f"--moe-mlp-glu-interleave-size {interleave}: gate and up rows can not be told apart; drop it")
        heads = config["num_attention_heads"]
        geometry = Geometry(
            heads=heads, groups=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            vocab_size=config["vocab_size"], num_layers=config["num_hidden_layers"],
            num_experts=next((config[key] for key in ("num_experts", "num_local_experts", "n_routed_experts") if config.get(key)), 0),
            tied=config.get("tie_word_embeddings", False))
        if name is None:
            return cls(list(chunks), (), geometry, groups, open_bridge(config))
        return cls(list(chunks), NAME_MAP[name], geometry, groups)

    def hf_names(self) -> list[str]:
        """Hugging Face names of the tensors that this rank holds a part of; of the whole model through megatron-bridge, collective then."""
        if self.bridge is not None:
            return bridged_names(self.bridge, [unwrap(chunk) for chunk in self.chunks])
        return [name for shard in self.shards() for name in shard.hf_names()]

    def shards(self) -> Iterator[Shard]:
        """Every parameter and known buffer of this rank, in the same order on every rank of its pipeline stage.

        Raises:
            ConfigError: a parameter that the table does not know.
        """
        for chunk in map(unwrap, self.chunks):
            layers = {i: layer.layer_number - 1 for i, layer in enumerate(chunk.decoder.layers)}
            for name, tensor in chunk.named_parameters():
                yield self._shard(chunk, layers, name, tensor, buffer=False)
            for name, buffer in chunk.named_buffers():
                if any(entry.buffer and entry.match(name) for entry in self.entries):
                    yield self._shard(chunk, layers, name, buffer, buffer=True)

    def _shard(self, chunk, layers: dict[int, int], name: str, tensor: torch.Tensor, buffer: bool) -> Shard:
        for entry in self.entries:
            numbers = entry.match(name) if entry.buffer == buffer else None
            if numbers is not None:
                break
        else:
            raise ConfigError(f"parameter {name} {tuple(tensor.shape)} has no entry in the name map of its architecture: a flag gave the "
                              "model a part that the Hugging Face model lacks, or weights/name_map.py needs an entry")
        local = dict(numbers)
        if "layer" in numbers:
            numbers["layer"] = layers[numbers["layer"]]
        if "expert" in numbers:
            numbers["expert"] += self.groups.ep.rank() * self.experts_per_rank
        # a layer's own name: the number after "layers." is the local one, which virtual pipeline stages repeat
        if local != numbers:
            name = entry.megatron.format(**numbers)
        exported = chunk.pre_process if "embed_tokens" in entry.hf[0] else not (self.geometry.tied and name == "output_layer.weight")
        if self.geometry.tied and name == "output_layer.weight":
            entry = next(e for e in self.entries if e.megatron == "embedding.word_embeddings.weight")
        return Shard(name, tensor.data, entry, numbers, exported)

    @property
    def experts_per_rank(self) -> int:
        return self.geometry.num_experts // self.groups.ep.size()

    def blocks(self, shard: Shard, rank: int | None = None) -> tuple[list[Shape], list[Block]]:
        """Shapes of the full Hugging Face tensors of a shard, and the blocks that tensor-parallel rank `rank` (None: this one) holds.

        Raises:
            ConfigError: sizes that do not fit; names the parameter.
        """
        group = self.groups.etp if shard.entry.is_expert else self.groups.tp
        try:
            return shard.entry.split(tuple(shard.tensor.shape), self.geometry, group.rank() if rank is None else rank, group.size())
        except ValueError as error:
            raise ConfigError(f"{shard.name}: {error}") from None


def unwrap(module: Any) -> Any:
    """The GPTModel inside Megatron's wrappers."""
    while hasattr(module, WRAPPED):
        module = getattr(module, WRAPPED)
    return module
