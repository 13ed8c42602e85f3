"""The published models: each field that changes what they compute is a Megatron flag or refused by its name."""

import json

import pytest

from megatron_grpo.settings import ConfigError
from megatron_grpo.trainer import memory
from megatron_grpo.trainer.dry_run import plan
from megatron_grpo.weights.hf_config import config_from_hf
from tests.weights.published import CONFIGS, MOONLIGHT, SIZES, parameters

SIGMOID = dict(moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True, moe_router_pre_softmax=False, moe_router_dtype="fp32")
LATENT = dict(multi_latent_attention=True, qk_layernorm=True, kv_lora_rank=512, qk_head_dim=128, qk_pos_emb_head_dim=64, v_head_dim=128)
EXPECTED = {
    "DeepSeek-V3": SIGMOID | LATENT | dict(
        moe_layer_freq=[0] * 3 + [1] * 58, num_experts=256, moe_router_num_groups=8, moe_router_group_topk=4, moe_router_topk=8, q_lora_rank=1536,
        moe_router_topk_scaling_factor=2.5, moe_shared_expert_intermediate_size=2048, rope_type="yarn", rotary_base=10000,
        rotary_scaling_factor=40, mscale=1.0, mscale_all_dim=1.0, beta_fast=32, beta_slow=1, original_max_position_embeddings=4096,
        layernorm_epsilon=1e-6, untie_embeddings_and_output_weights=True),
    "Kimi-K2-Instruct": SIGMOID | LATENT | dict(
        moe_layer_freq=[0] + [1] * 60, num_experts=384, moe_router_num_groups=None, moe_router_group_topk=None, moe_router_topk=8,
        q_lora_rank=1536, moe_router_topk_scaling_factor=2.827, num_attention_heads=64, rope_type="yarn", rotary_base=50000,
        rotary_scaling_factor=32, mscale=1.0, mscale_all_dim=1.0, beta_fast=1, beta_slow=1, layernorm_epsilon=1e-6, vocab_size=163840),
    "Kimi-K2-Instruct-0905": dict(rotary_scaling_factor=64, beta_fast=1),
    "GLM-4.6": SIGMOID | dict(
        moe_layer_freq=[0] * 3 + [1] * 89, qk_layernorm=True, add_qkv_bias=True, rotary_percent=0.5, rotary_base=1000000, kv_channels=128,
        num_query_groups=8, moe_router_topk_scaling_factor=2.5, moe_router_num_groups=None, num_experts=160, layernorm_epsilon=1e-5),
    "GLM-4.5-Air": dict(qk_layernorm=False, add_qkv_bias=True, moe_router_topk_scaling_factor=1.0, moe_layer_freq=[0] + [1] * 45),
    "Qwen3-Coder-480B-A35B": dict(
        moe_router_score_function="softmax", moe_router_pre_softmax=False, qk_layernorm=True, add_qkv_bias=False, rotary_base=10000000,
        moe_router_enable_expert_bias=False, moe_shared_expert_intermediate_size=None, num_query_groups=8, kv_channels=128, num_experts=160),
}


def write(path, config):
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("name", EXPECTED)
def test_fields_are_flags(tmp_path, name):
    flags = config_from_hf(write(tmp_path, CONFIGS[name]))
    assert {flag: flags[flag] for flag in EXPECTED[name]} == EXPECTED[name]


@pytest.mark.parametrize("name", CONFIGS)
def test_dry_run_counts_the_published_parameters(tmp_path, monkeypatch, name):
    """Nothing is refused; the count is that of the Hugging Face model, and of the model card."""
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    config = CONFIGS[name]
    found = plan(["--hf-checkpoint", str(write(tmp_path, config)), "--bf16", "--seq-length", "4096", "--train-iters", "1", "--lr", "1e-6",
                  "--rollout-batch-size", "8", "--n-samples-per-prompt", "8", "--max-tokens-per-gpu", "4096", "--use-dynamic-batch-size"])
    assert found.refusals == []
    total, active = SIZES[name]
    assert memory.model_parameters(found.args) / 1e9 == pytest.approx(total, rel=0.01)
    assert memory.active_parameters(found.args) / 1e9 == pytest.approx(active, rel=0.13)
    padding = 2 * (found.args.padded_vocab_size - config["vocab_size"]) * config["hidden_size"]
    assert memory.model_parameters(found.args) - padding == parameters(config)


YARN = CONFIGS["DeepSeek-V3"]["rope_scaling"]


@pytest.mark.parametrize("name, changes, message", [
    ("DeepSeek-V3", dict(scoring_func="softmax"), "scoring_func 'softmax'"),
    ("DeepSeek-V3", dict(topk_method="greedy"), "topk_method 'greedy'"),
    ("DeepSeek-V3", dict(moe_layer_freq=2), "moe_layer_freq 2"),
    ("DeepSeek-V3", dict(norm_topk_prob=False), "norm_topk_prob false"),
    ("DeepSeek-V3", dict(topk_group=2), "n_group 8 with topk_group 2"),
    ("DeepSeek-V3", dict(attention_bias=True), "attention_bias"),
    ("DeepSeek-V3", dict(rope_interleave=False), "rope_interleave"),
    ("DeepSeek-V3", dict(partial_rotary_factor=0.5), "partial_rotary_factor"),
    ("DeepSeek-V3", dict(rope_scaling=YARN | dict(type="longrope")), "rope_type 'longrope'"),
    ("DeepSeek-V3", dict(rope_scaling=YARN | dict(attention_factor=1.2)), "attention_factor 1.2"),
    ("DeepSeek-V3", dict(rope_scaling=YARN | dict(truncate=False)), "truncate False"),
    ("DeepSeek-V3", dict(rope_scaling=YARN | dict(mscale=None)), "give both or neither"),
    ("DeepSeek-V3", dict(rope_scaling=YARN | dict(mscale=0.7, mscale_all_dim=0.0)), "give both or neither"),
    ("Kimi-K2-Instruct", dict(num_experts_per_tok=1), "num_experts_per_tok 1"),
    ("Kimi-K2-Instruct", dict(quantization_config=dict(quant_method="compressed-tensors", format="pack-quantized")),
     "quant_method 'compressed-tensors'"),       # Kimi-K2-Thinking's 4-bit experts
    ("GLM-4.6", dict(scoring_func="softmax"), "scoring_func 'softmax'"),
    ("GLM-4.6", dict(rope_scaling=dict(rope_type="yarn", factor=4.0)), "rope_type 'yarn'"),
    ("Qwen3-235B-A22B", dict(rope_scaling=dict(rope_type="yarn", factor=4.0)), "rope_type 'yarn'"),
    ("Qwen3-235B-A22B", dict(use_sliding_window=True), "use_sliding_window"),
])
def test_what_changes_the_maths_is_refused_by_name(tmp_path, name, changes, message):
    with pytest.raises(ConfigError, match=message):
        config_from_hf(write(tmp_path, CONFIGS[name] | changes))


def test_queries_without_a_down_projection(tmp_path):
    """Megatron-Core 0.19 builds a norm for them that Moonlight lacks; all else of it can be said."""
    with pytest.raises(ConfigError, match="q_lora_rank null"):
        config_from_hf(write(tmp_path, MOONLIGHT))
    flags = config_from_hf(write(tmp_path, MOONLIGHT | dict(q_lora_rank=512)))
    assert (flags["rope_type"], flags["rotary_scaling_factor"], flags["moe_shared_expert_intermediate_size"]) == ("rope", 1.0, 2816)


def test_yarn_without_mscales_and_no_shared_experts(tmp_path):
    """mscale 1 and mscale_all_dim 0 mean what their absence means; no shared experts are none."""
    bare = {key: value for key, value in YARN.items() if "mscale" not in key}
    flags = config_from_hf(write(tmp_path, CONFIGS["DeepSeek-V3"] | dict(rope_scaling=bare, n_shared_experts=None)))
    assert (flags["mscale"], flags["mscale_all_dim"], flags["moe_shared_expert_intermediate_size"]) == (1.0, 0.0, None)
