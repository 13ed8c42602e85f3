"""Hugging Face config.json <-> Megatron flags, one `Architecture` per model class.

`flags(config)` gives the Megatron flags that say the same as a config.json, `config(flags)` the inverse. A config that Megatron
can not express is refused. Keys are argparse's names (`layernorm_epsilon`, not `--norm-epsilon`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..settings import ConfigError

type Config = dict[str, Any]
type Flags = dict[str, Any]


@dataclass(frozen=True)
class Architecture:
    """`flags` and `config` are inverse to each other on what they can express, which has experts (`moe`) and MLA (`latent`) or not."""

    name: str
    model_type: str
    flags: Callable[[Config], Flags]
    config: Callable[[Mapping[str, Any]], Config]
    moe: bool = True
    latent: bool = False


def require(holds: bool, what: str) -> None:
    if not holds:
        raise ConfigError(f"config.json: {what}")


# ---- what all of them share -----------------------------------------------------------------------------------------

def rope_of(config: Config) -> Config:
    """The position embedding's settings, `rope_type` included, wherever this config.json keeps them."""
    rope = {"rope_theta": config.get("rope_theta"), "partial_rotary_factor": config.get("partial_rotary_factor"),
            **(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    return rope | dict(rope_type=rope.get("rope_type", rope.get("type", "default")))


def common_flags(config: Config, rope_types: tuple[str, ...] = ("default",)) -> Flags:
    rope = rope_of(config)
    kind = rope["rope_type"]
    require(kind in rope_types, f"rope_type {kind!r} has no counterpart in Megatron's GPT model here; supported: {', '.join(rope_types)}")
    require(config["hidden_act"] == "silu", f"hidden_act {config['hidden_act']!r} is not supported, only silu")
    require(not config.get("use_sliding_window"), "use_sliding_window is not supported")
    theta = float(rope["rope_theta"] or 10000.0)
    require(theta == int(theta), f"rope_theta {theta}: --rotary-base takes whole numbers only")
    heads = config["num_attention_heads"]
    return dict(
        num_layers=config["num_hidden_layers"], hidden_size=config["hidden_size"], ffn_hidden_size=config["intermediate_size"],
        num_attention_heads=heads, group_query_attention=True, num_query_groups=config.get("num_key_value_heads") or heads,
        kv_channels=config.get("head_dim") or config["hidden_size"] // heads,
        vocab_size=config["vocab_size"], max_position_embeddings=config["max_position_embeddings"],
        untie_embeddings_and_output_weights=not config.get("tie_word_embeddings", False),
        layernorm_epsilon=config["rms_norm_eps"], normalization="RMSNorm", swiglu=True, add_bias_linear=False,
        position_embedding_type="rope", rotary_base=int(theta), rotary_percent=float(rope.get("partial_rotary_factor") or 1.0),
        qk_layernorm=False, add_qkv_bias=False, attention_dropout=0.0, hidden_dropout=0.0, num_experts=None)


def common_config(flags: Mapping[str, Any]) -> Config:
    return dict(
        num_hidden_layers=flags["num_layers"], hidden_size=flags["hidden_size"], intermediate_size=flags["ffn_hidden_size"],
        num_attention_heads=flags["num_attention_heads"],
        num_key_value_heads=flags["num_query_groups"] if flags["group_query_attention"] else flags["num_attention_heads"],
        head_dim=flags["kv_channels"], vocab_size=flags["vocab_size"], max_position_embeddings=flags["max_position_embeddings"],
        tie_word_embeddings=not flags["untie_embeddings_and_output_weights"], rms_norm_eps=flags["layernorm_epsilon"],
        hidden_act="silu", rope_parameters=dict(rope_type="default", rope_theta=float(flags["rotary_base"])),
        rope_theta=float(flags["rotary_base"]), attention_bias=False, attention_dropout=0.0)


def moe_layers(flags: Mapping[str, Any]) -> list[int]:
    """1 for each MoE layer, 0 for each dense one (an integer n of --moe-layer-freq: every n-th, the first included)."""
    freq = flags["moe_layer_freq"]
    return [int(i % freq == 0) for i in range(flags["num_layers"])] if isinstance(freq, int) else list(freq)


def moe_flags(config: Config, experts: int, layers: list[int]) -> Flags:
    return dict(num_experts=experts, moe_router_topk=config["num_experts_per_tok"], moe_ffn_hidden_size=config["moe_intermediate_size"],
                moe_layer_freq=layers, moe_shared_expert_intermediate_size=None, moe_shared_expert_gate=False,
                moe_router_enable_expert_bias=False, moe_router_topk_scaling_factor=None, moe_router_num_groups=None,
                moe_router_group_topk=None)


def moe_config(flags: Mapping[str, Any]) -> Config:
    return dict(num_experts_per_tok=flags["moe_router_topk"], moe_intermediate_size=flags["moe_ffn_hidden_size"])


# ---- Qwen -----------------------------------------------------------------------------------------------------------

def qwen3_flags(config: Config) -> Flags:
    require(not config.get("attention_bias"), "attention_bias: Megatron has no bias on linear_proj alone")
    return common_flags(config) | dict(qk_layernorm=True)


def qwen_moe_flags(config: Config) -> Flags:
    step, dense = config.get("decoder_sparse_step") or 1, set(config.get("mlp_only_layers") or ())
    layers = [int(i not in dense and (i + 1) % step == 0) for i in range(config["num_hidden_layers"])]
    return moe_flags(config, config.get("num_experts") or config["num_local_experts"], layers) | dict(
        moe_router_score_function="softmax", moe_router_pre_softmax=not config.get("norm_topk_prob", False))


def qwen_moe_config(flags: Mapping[str, Any]) -> Config:
    return moe_config(flags) | dict(
        num_experts=flags["num_experts"], norm_topk_prob=not flags["moe_router_pre_softmax"], decoder_sparse_step=1,
        mlp_only_layers=[i for i, sparse in enumerate(moe_layers(flags)) if not sparse])


def qwen2_moe_flags(config: Config) -> Flags:
    return common_flags(config) | qwen_moe_flags(config) | dict(
        add_qkv_bias=config.get("qkv_bias", True), moe_shared_expert_intermediate_size=config["shared_expert_intermediate_size"],
        moe_shared_expert_gate=True)


def qwen2_moe_config(flags: Mapping[str, Any]) -> Config:
    return common_config(flags) | qwen_moe_config(flags) | dict(
        shared_expert_intermediate_size=flags["moe_shared_expert_intermediate_size"], qkv_bias=flags["add_qkv_bias"])


# ---- GLM ------------------------------------------------------------------------------------------------------------

SIGMOID_MOE = dict(scoring_func="sigmoid", topk_method="noaux_tc", moe_layer_freq=1)


def sigmoid_moe_flags(config: Config) -> Flags:
    """Experts of GLM-4.5 and DeepSeek-V3: sigmoid scores, expert bias, groups, shared experts, dense layers at first."""
    for name, value in SIGMOID_MOE.items():
        require(config.get(name, value) == value, f"{name} {config.get(name)!r} is not supported, only {value!r}")
    require(config["norm_topk_prob"], "norm_topk_prob false: Megatron's sigmoid router always normalises")
    groups, group_topk, topk = config.get("n_group") or 1, config.get("topk_group") or 1, config["num_experts_per_tok"]
    require(topk > 1, "num_experts_per_tok 1: Megatron's sigmoid router does not normalise a single score, as norm_topk_prob asks")
    require(groups == 1 or topk == 2 * group_topk, f"n_group {groups} with topk_group {group_topk}: a group's score is the sum of its best "
                                                   f"2 experts, in Megatron of its best {topk} / topk_group")
    dense = config["first_k_dense_replace"]
    layers = [int(i >= dense) for i in range(config["num_hidden_layers"])]
    return moe_flags(config, config["n_routed_experts"], layers) | dict(
        moe_shared_expert_intermediate_size=(config["n_shared_experts"] or 0) * config["moe_intermediate_size"] or None,
        moe_router_score_function="sigmoid", moe_router_pre_softmax=False, moe_router_dtype="fp32",
        moe_router_enable_expert_bias=True, moe_router_topk_scaling_factor=config["routed_scaling_factor"],
        moe_router_num_groups=groups if groups > 1 else None, moe_router_group_topk=group_topk if groups > 1 else None)


def sigmoid_moe_config(flags: Mapping[str, Any]) -> Config:
    return moe_config(flags) | dict(
        n_routed_experts=flags["num_experts"], first_k_dense_replace=moe_layers(flags).index(1), norm_topk_prob=True,
        n_shared_experts=(flags["moe_shared_expert_intermediate_size"] or 0) // flags["moe_ffn_hidden_size"],
        routed_scaling_factor=flags["moe_router_topk_scaling_factor"] or 1.0, n_group=flags["moe_router_num_groups"] or 1,
        topk_group=flags["moe_router_group_topk"] or 1, num_nextn_predict_layers=0)


def glm4_moe_flags(config: Config) -> Flags:
    return common_flags(config) | sigmoid_moe_flags(config) | dict(
        qk_layernorm=bool(config.get("use_qk_norm")), add_qkv_bias=bool(config.get("attention_bias")))


def glm4_moe_config(flags: Mapping[str, Any]) -> Config:
    config = common_config(flags) | sigmoid_moe_config(flags)
    config["rope_parameters"] |= dict(partial_rotary_factor=flags["rotary_percent"])
    return config | dict(partial_rotary_factor=flags["rotary_percent"], use_qk_norm=flags["qk_layernorm"],
                         attention_bias=flags["add_qkv_bias"])


# ---- DeepSeek -------------------------------------------------------------------------------------------------------

YARN = dict(factor="rotary_scaling_factor", beta_fast="beta_fast", beta_slow="beta_slow", mscale="mscale", mscale_all_dim="mscale_all_dim",
            original_max_position_embeddings="original_max_position_embeddings")
YARN_DEFAULTS = dict(beta_fast=32.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=0.0)
LATENT = dict(q_lora_rank="q_lora_rank", kv_lora_rank="kv_lora_rank", qk_nope_head_dim="qk_head_dim", qk_rope_head_dim="qk_pos_emb_head_dim",
              v_head_dim="v_head_dim")


def deepseek_v3_flags(config: Config) -> Flags:
    require(not config.get("attention_bias"), "attention_bias: Megatron's latent attention has no biases")
    require(bool(config["q_lora_rank"]), "q_lora_rank null (Moonlight): Megatron-Core norms such queries of latent attention once more before their "
                                         "projection where it norms the keys and values (--qk-layernorm), and the model does not")
    require(config.get("rope_interleave", True), "rope_interleave false: Megatron's latent attention rotates interleaved channels")
    rope = rope_of(config)
    require(rope["partial_rotary_factor"] in (None, 1), "partial_rotary_factor: Megatron's latent attention rotates all of qk_rope_head_dim")
    flags = common_flags(config, ("default", "yarn")) | sigmoid_moe_flags(config) | dict(
        multi_latent_attention=True, group_query_attention=False, num_query_groups=None, kv_channels=config["v_head_dim"], qk_layernorm=True,
        rotary_percent=1.0, rope_type="rope", rotary_scaling_factor=1.0)     # the softmax scale reads the factor whatever the rope_type
    flags |= {ours: config[theirs] for theirs, ours in LATENT.items()}
    if rope["rope_type"] == "yarn":
        yarn = YARN_DEFAULTS | rope
        for name, value in (("attention_factor", None), ("truncate", True)):
            require(rope.get(name, value) == value, f"rope {name} {rope.get(name)!r} has no counterpart in Megatron's yarn")
        # with one of the two, the published code and Transformers disagree on the scale of the embedding
        require(bool(rope.get("mscale")) if yarn["mscale_all_dim"] else yarn["mscale"] == 1.0,
                f"yarn with mscale {rope.get('mscale')} and mscale_all_dim {rope.get('mscale_all_dim')}: give both or neither")
        flags |= dict(rope_type="yarn") | {ours: yarn[theirs] for theirs, ours in YARN.items()}
    return flags


def deepseek_v3_config(flags: Mapping[str, Any]) -> Config:
    config = common_config({**flags, "group_query_attention": False}) | sigmoid_moe_config(flags) | SIGMOID_MOE
    del config["head_dim"]
    config |= {theirs: flags[ours] for theirs, ours in LATENT.items()}
    if flags["rope_type"] == "yarn":
        config["rope_parameters"] |= dict(rope_type="yarn") | {theirs: flags[ours] for theirs, ours in YARN.items()}
    return config


ARCHITECTURES: dict[str, Architecture] = {a.name: a for a in (
    Architecture("Qwen3ForCausalLM", "qwen3", qwen3_flags, common_config, moe=False),
    Architecture("Qwen3MoeForCausalLM", "qwen3_moe", lambda config: qwen3_flags(config) | qwen_moe_flags(config),
                 lambda flags: common_config(flags) | qwen_moe_config(flags)),
    Architecture("Glm4MoeForCausalLM", "glm4_moe", glm4_moe_flags, glm4_moe_config),
    Architecture("DeepseekV3ForCausalLM", "deepseek_v3", deepseek_v3_flags, deepseek_v3_config, latent=True),
    Architecture("Qwen2MoeForCausalLM", "qwen2_moe", qwen2_moe_flags, qwen2_moe_config),
)}
