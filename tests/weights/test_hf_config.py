import argparse
import json
import sys
import types

import pytest
from transformers import DeepseekV3Config, Glm4MoeConfig, Qwen2MoeConfig, Qwen3Config, Qwen3MoeConfig

from megatron_grpo.settings import ConfigError
from megatron_grpo.weights.hf_config import apply_hf_config, config_from_hf, hf_config_from_args

CONFIGS = [
    Qwen3Config(vocab_size=100, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
                tie_word_embeddings=True),
    Qwen3MoeConfig(vocab_size=100, num_hidden_layers=4, mlp_only_layers=[1], num_experts=8, norm_topk_prob=True,
                   rope_parameters={"rope_theta": 1e6, "rope_type": "default"}),
    Qwen2MoeConfig(vocab_size=100, num_hidden_layers=4, num_experts=8, norm_topk_prob=False, head_dim=128, mlp_only_layers=[]),
    Glm4MoeConfig(vocab_size=100, num_hidden_layers=4, first_k_dense_replace=2, n_routed_experts=8, n_shared_experts=2, num_mtp_layers=0,
                  head_dim=128, use_qk_norm=True, attention_bias=True, routed_scaling_factor=2.5, n_group=4, topk_group=4),
    DeepseekV3Config(vocab_size=100, num_hidden_layers=4, first_k_dense_replace=1, n_routed_experts=16, num_nextn_predict_layers=0, rope_parameters={
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096}),
]


def write(config, path, **changes):
    config.architectures = [type(config).__name__.replace("Config", "ForCausalLM")]
    (path / "config.json").write_text(json.dumps(json.loads(config.to_json_string(use_diff=False)) | changes))
    return path


def namespace(flags, **more):
    return argparse.Namespace(**flags | dict(bf16=True, fp16=False, hf_checkpoint=None) | more)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.model_type)
def test_flags_to_config_and_back(config, tmp_path):
    flags = config_from_hf(write(config, tmp_path))
    again = hf_config_from_args(namespace({"moe_layer_freq": 1} | flags))
    assert again["architectures"] == config.architectures and again["model_type"] == config.model_type and again["dtype"] == "bfloat16"
    assert config_from_hf(write(type(config)(**{k: v for k, v in again.items() if k != "architectures"}), tmp_path)) == flags


def test_known_values(tmp_path):
    flags = config_from_hf(write(CONFIGS[3], tmp_path))
    expected = dict(
        num_layers=4, rotary_percent=0.5, rotary_base=10000, add_qkv_bias=True, qk_layernorm=True, moe_layer_freq=[0, 0, 1, 1],
        moe_shared_expert_intermediate_size=2 * 1408, moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True,
        moe_router_topk_scaling_factor=2.5, moe_router_num_groups=4, moe_router_group_topk=4, layernorm_epsilon=1e-5,
        untie_embeddings_and_output_weights=True, add_bias_linear=False, num_query_groups=8, kv_channels=128)
    assert {name: flags[name] for name in expected} == expected
    flags = config_from_hf(write(CONFIGS[1], tmp_path))
    assert (flags["moe_layer_freq"], flags["moe_router_pre_softmax"], flags["rotary_base"]) == ([1, 0, 1, 1], False, 1000000)
    assert config_from_hf(write(CONFIGS[2], tmp_path))["moe_router_pre_softmax"] is True


def test_older_configs_are_read(tmp_path):
    old = dict(architectures=["Qwen3MoeForCausalLM"], hidden_act="silu", num_attention_heads=4, num_hidden_layers=2, hidden_size=32,
               intermediate_size=64, vocab_size=10, max_position_embeddings=64, rms_norm_eps=1e-6, rope_theta=5e6, rope_scaling=None,
               num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8, norm_topk_prob=True)
    (tmp_path / "config.json").write_text(json.dumps(old))
    flags = config_from_hf(tmp_path)
    assert (flags["rotary_base"], flags["kv_channels"], flags["num_query_groups"]) == (5000000, 8, 4)


def test_given_flags_are_checked_and_the_rest_is_set(tmp_path):
    write(CONFIGS[1], tmp_path)
    args = argparse.Namespace(num_layers=4, moe_layer_freq=[1, 0, 1, 1], max_position_embeddings=77, vocab_size=None,
                              layernorm_epsilon=1e-6)
    words = "--num-layers 4 --moe-layer-freq=[1,0,1,1] --max-position-embeddings 77 --norm-epsilon 1e-6"
    apply_hf_config(args, tmp_path, words.split())
    assert (args.vocab_size, args.max_position_embeddings, args.num_experts) == (100, 77, 8)
    args.num_layers, args.layernorm_epsilon = 5, 1e-5
    with pytest.raises(ConfigError) as error:
        apply_hf_config(args, tmp_path, ["--num-layers", "5", "--norm-epsilon=1e-5"])
    assert "--num-layers gives num_layers = 5, but config.json says 4" in str(error.value)
    assert "--norm-epsilon gives layernorm_epsilon = 1e-05, but config.json says 1e-06" in str(error.value)


def test_integer_layer_frequency_means_the_same_as_the_list(tmp_path):
    write(Qwen3MoeConfig(num_hidden_layers=4, mlp_only_layers=[1, 3]), tmp_path)
    args = argparse.Namespace(moe_layer_freq=2, num_layers=4)
    apply_hf_config(args, tmp_path, ["--moe-layer-freq", "2"])
    assert args.moe_layer_freq == 2


@pytest.mark.parametrize("changes, message", [
    (dict(rope_parameters={"rope_theta": 1e4, "rope_type": "yarn", "factor": 4.0}), "rope_type 'yarn'"),
    (dict(hidden_act="gelu"), "hidden_act"),
    (dict(attention_bias=True), "attention_bias"),
    (dict(architectures=["Mystery"]), "architectures.py"),
])
def test_what_megatron_cannot_express_is_refused(tmp_path, changes, message):
    write(CONFIGS[1], tmp_path, **changes)
    with pytest.raises(ConfigError, match=message):
        config_from_hf(tmp_path)


def test_an_unknown_architecture_needs_megatron_bridge(tmp_path, monkeypatch):
    write(CONFIGS[1], tmp_path, architectures=["Mystery"])
    args = argparse.Namespace(num_layers=7)
    with pytest.raises(ConfigError, match="pip install megatron-bridge"):
        apply_hf_config(args, tmp_path, [])
    opened = []
    bridge = types.SimpleNamespace(AutoBridge=types.SimpleNamespace(from_hf_pretrained=opened.append))
    monkeypatch.setitem(sys.modules, "megatron.bridge", bridge)
    apply_hf_config(args, tmp_path, [])
    assert opened == [str(tmp_path)] and args.num_layers == 7


def test_missing_and_broken_config(tmp_path):
    with pytest.raises(ConfigError, match="no config.json"):
        config_from_hf(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not valid JSON"):
        config_from_hf(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(dict(architectures=["Qwen3MoeForCausalLM"])))
    with pytest.raises(ConfigError, match="is missing"):
        config_from_hf(tmp_path)


def test_a_model_that_no_architecture_says(tmp_path):
    flags = config_from_hf(write(CONFIGS[1], tmp_path)) | dict(rotary_percent=0.25)
    with pytest.raises(ConfigError, match="Qwen3MoeForCausalLM: --rotary-percent must give 1.0, not 0.25"):
        hf_config_from_args(namespace(flags))


def test_config_of_the_hf_checkpoint_is_kept(tmp_path):
    write(CONFIGS[1], tmp_path, something_else=3)
    config = hf_config_from_args(namespace({}, hf_checkpoint=str(tmp_path)))
    assert config["something_else"] == 3 and config["dtype"] == "bfloat16"
