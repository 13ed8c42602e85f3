"""The table: Megatron parameter <-> Hugging Face tensors. One `Entry` per kind of parameter, for every architecture we know.

To teach it a new parameter, add an `Entry` to the architecture's tuple: the Megatron name (as `named_parameters` gives it, with
`{layer}` for the number of the decoder layer in the whole model and `{expert}` for that of the expert), the Hugging Face names
that it is made of, in the order of its rows, and how it is split over tensor parallelism (splits.py). A name with `{expert}` is
split over expert tensor parallelism and spread over expert parallelism. Local-spec and Transformer-Engine names stand
side by side: a model has one of the two.
"""

import re
from dataclasses import dataclass
from functools import cached_property

from .splits import Split, columns, gated, qkv, rows, vocabulary, whole

LAYER, HF_LAYER = "decoder.layers.{layer}.", "model.layers.{layer}."


@dataclass(frozen=True)
class Entry:
    """One kind of parameter.

    Attributes:
        megatron: name pattern.
        hf: names of the Hugging Face tensors, in the order of the Megatron tensor's rows.
        split: how the tensor is cut over tensor-parallel ranks.
        buffer: a buffer and not a parameter.
    """

    megatron: str
    hf: tuple[str, ...]
    split: Split
    buffer: bool = False

    @property
    def is_expert(self) -> bool:
        return "{expert}" in self.megatron

    @cached_property
    def _regex(self) -> re.Pattern:
        pattern = re.escape(self.megatron).replace(r"\{layer\}", r"(?P<layer>\d+)").replace(r"\{expert\}", r"(?P<expert>\d+)")
        return re.compile(pattern)

    def match(self, name: str) -> dict[str, int] | None:
        """The numbers in `name` ({"layer": 3, "expert": 1}), or None if this is not its entry."""
        found = self._regex.fullmatch(name)
        return {key: int(value) for key, value in found.groupdict().items()} if found else None

    def hf_names(self, numbers: dict[str, int]) -> tuple[str, ...]:
        return tuple(name.format(**numbers) for name in self.hf)


def in_layer(megatron: str, hf: str | tuple[str, ...], split: Split, buffer: bool = False) -> Entry:
    """An entry of a decoder layer: names without the layer's prefix."""
    hf = (hf,) if isinstance(hf, str) else hf
    return Entry(LAYER + megatron, tuple(HF_LAYER + name for name in hf), split, buffer)


def mlp(megatron: str, hf: str) -> tuple[Entry, Entry]:
    """A gated MLP: fc1 = [gate; up], fc2 = down."""
    return (in_layer(f"{megatron}.linear_fc1.weight", (f"{hf}.gate_proj.weight", f"{hf}.up_proj.weight"), gated),
            in_layer(f"{megatron}.linear_fc2.weight", f"{hf}.down_proj.weight", columns))


def projection(kind: str) -> tuple[str, ...]:
    return tuple(f"self_attn.{x}_proj.{kind}" for x in "qkv")


EMBEDDINGS = (
    Entry("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), vocabulary),
    Entry("output_layer.weight", ("lm_head.weight",), vocabulary),
    Entry("decoder.final_layernorm.weight", ("model.norm.weight",), whole),
)
ATTENTION = (
    in_layer("input_layernorm.weight", "input_layernorm.weight", whole),
    in_layer("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight", whole),            # Transformer Engine
    in_layer("self_attention.linear_qkv.weight", projection("weight"), qkv),
    in_layer("self_attention.linear_qkv.bias", projection("bias"), qkv),
    in_layer("self_attention.linear_proj.weight", "self_attn.o_proj.weight", columns),
    in_layer("self_attention.q_layernorm.weight", "self_attn.q_norm.weight", whole),
    in_layer("self_attention.k_layernorm.weight", "self_attn.k_norm.weight", whole),
    in_layer("pre_mlp_layernorm.weight", "post_attention_layernorm.weight", whole),
)
LATENT_ATTENTION = (            # MLA; Transformer Engine keeps the down-projections whole on every tensor-parallel rank
    in_layer("input_layernorm.weight", "input_layernorm.weight", whole),
    in_layer("self_attention.linear_q_down_proj.weight", "self_attn.q_a_proj.weight", whole),
    in_layer("self_attention.q_layernorm.weight", "self_attn.q_a_layernorm.weight", whole),
    in_layer("self_attention.linear_q_up_proj.layer_norm_weight", "self_attn.q_a_layernorm.weight", whole),       # Transformer Engine
    in_layer("self_attention.linear_q_up_proj.weight", "self_attn.q_b_proj.weight", rows),
    in_layer("self_attention.linear_kv_down_proj.weight", "self_attn.kv_a_proj_with_mqa.weight", whole),
    in_layer("self_attention.kv_layernorm.weight", "self_attn.kv_a_layernorm.weight", whole),
    in_layer("self_attention.linear_kv_up_proj.layer_norm_weight", "self_attn.kv_a_layernorm.weight", whole),     # Transformer Engine
    in_layer("self_attention.linear_kv_up_proj.weight", "self_attn.kv_b_proj.weight", rows),
    in_layer("self_attention.linear_proj.weight", "self_attn.o_proj.weight", columns),
    in_layer("pre_mlp_layernorm.weight", "post_attention_layernorm.weight", whole),
)
DENSE_MLP = (
    in_layer("mlp.linear_fc1.layer_norm_weight", "post_attention_layernorm.weight", whole),               # Transformer Engine
    *mlp("mlp", "mlp"),
)
EXPERT = "mlp.experts.{expert}"
ROUTED_EXPERTS = (
    in_layer("mlp.router.weight", "mlp.gate.weight", whole),
    *mlp("mlp.experts.local_experts.{expert}", EXPERT),                                                  # SequentialMLP
    in_layer("mlp.experts.linear_fc1.weight{expert}", (f"{EXPERT}.gate_proj.weight", f"{EXPERT}.up_proj.weight"), gated),  # TE grouped
    in_layer("mlp.experts.linear_fc2.weight{expert}", f"{EXPERT}.down_proj.weight", columns),
)
EXPERT_BIAS = (in_layer("mlp.router.expert_bias", "mlp.gate.e_score_correction_bias", whole, buffer=True),)
SHARED_EXPERT_GATE = (in_layer("mlp.shared_experts.gate_weight", "mlp.shared_expert_gate.weight", whole),)

DENSE = EMBEDDINGS + ATTENTION + DENSE_MLP
NAME_MAP: dict[str, tuple[Entry, ...]] = {
    "Qwen3ForCausalLM": DENSE,
    "Qwen3MoeForCausalLM": DENSE + ROUTED_EXPERTS,
    "Glm4MoeForCausalLM": DENSE + ROUTED_EXPERTS + EXPERT_BIAS + mlp("mlp.shared_experts", "mlp.shared_experts"),
    "DeepseekV3ForCausalLM": (EMBEDDINGS + LATENT_ATTENTION + DENSE_MLP + ROUTED_EXPERTS + EXPERT_BIAS
                              + mlp("mlp.shared_experts", "mlp.shared_experts")),
    "Qwen2MoeForCausalLM": DENSE + ROUTED_EXPERTS + mlp("mlp.shared_experts", "mlp.shared_expert") + SHARED_EXPERT_GATE,
}
