"""The fields of published config.json files that say what the model computes, as their publishers wrote them; and their Hugging Face models.

SIZES: (billions of parameters, of those active for a token) of the model cards.
"""

YARN = dict(type="yarn", beta_fast=32, beta_slow=1, factor=40, mscale=1.0, mscale_all_dim=1.0, original_max_position_embeddings=4096)
FP8 = dict(activation_scheme="dynamic", fmt="e4m3", quant_method="fp8", weight_block_size=[128, 128])

DEEPSEEK_V3 = dict(
    architectures=["DeepseekV3ForCausalLM"], model_type="deepseek_v3", attention_bias=False, attention_dropout=0.0, first_k_dense_replace=3,
    ep_size=1, hidden_act="silu", hidden_size=7168, intermediate_size=18432, kv_lora_rank=512, max_position_embeddings=163840,
    moe_intermediate_size=2048, moe_layer_freq=1, n_group=8, n_routed_experts=256, n_shared_experts=1, norm_topk_prob=True,
    num_attention_heads=128, num_experts_per_tok=8, num_hidden_layers=61, num_key_value_heads=128, num_nextn_predict_layers=1,
    q_lora_rank=1536, qk_nope_head_dim=128, qk_rope_head_dim=64, quantization_config=FP8, rms_norm_eps=1e-06, rope_scaling=YARN,
    rope_theta=10000, routed_scaling_factor=2.5, scoring_func="sigmoid", tie_word_embeddings=False, topk_group=4, topk_method="noaux_tc",
    torch_dtype="bfloat16", v_head_dim=128, vocab_size=129280)
KIMI_K2 = DEEPSEEK_V3 | dict(
    model_type="kimi_k2", first_k_dense_replace=1, max_position_embeddings=131072, n_group=1, n_routed_experts=384, num_attention_heads=64,
    num_key_value_heads=64, num_nextn_predict_layers=0, rope_theta=50000.0, routed_scaling_factor=2.827, topk_group=1, vocab_size=163840,
    rope_scaling=YARN | dict(beta_fast=1.0, beta_slow=1.0, factor=32.0))
MOONLIGHT = dict(
    architectures=["DeepseekV3ForCausalLM"], model_type="deepseek_v3", attention_bias=False, attention_dropout=0.0, ep_size=1,
    first_k_dense_replace=1, hidden_act="silu", hidden_size=2048, intermediate_size=11264, kv_lora_rank=512,
    max_position_embeddings=8192, moe_intermediate_size=1408, moe_layer_freq=1, n_group=1, n_routed_experts=64, n_shared_experts=2,
    norm_topk_prob=True, num_attention_heads=16, num_experts_per_tok=6, num_hidden_layers=27, num_key_value_heads=16,
    num_nextn_predict_layers=0, q_lora_rank=None, qk_nope_head_dim=128, qk_rope_head_dim=64, rms_norm_eps=1e-05, rope_theta=50000.0,
    routed_scaling_factor=2.446, scoring_func="sigmoid", tie_word_embeddings=False, topk_group=1, topk_method="noaux_tc",
    torch_dtype="bfloat16", v_head_dim=128, vocab_size=163840)
QWEN3_235B = dict(
    architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", attention_bias=False, attention_dropout=0.0, decoder_sparse_step=1,
    head_dim=128, hidden_act="silu", hidden_size=4096, intermediate_size=12288, max_position_embeddings=40960, max_window_layers=94,
    mlp_only_layers=[], moe_intermediate_size=1536, norm_topk_prob=True, num_attention_heads=64, num_experts=128, num_experts_per_tok=8,
    num_hidden_layers=94, num_key_value_heads=4, rms_norm_eps=1e-06, rope_scaling=None, rope_theta=1000000.0, sliding_window=None,
    tie_word_embeddings=False, torch_dtype="bfloat16", use_sliding_window=False, vocab_size=151936)
GLM_4_5 = dict(
    architectures=["Glm4MoeForCausalLM"], model_type="glm4_moe", attention_bias=True, attention_dropout=0.0, first_k_dense_replace=3,
    head_dim=128, hidden_act="silu", hidden_size=5120, intermediate_size=12288, max_position_embeddings=131072, moe_intermediate_size=1536,
    n_group=1, n_routed_experts=160, n_shared_experts=1, norm_topk_prob=True, num_attention_heads=96, num_experts_per_tok=8,
    num_hidden_layers=92, num_key_value_heads=8, num_nextn_predict_layers=1, partial_rotary_factor=0.5, rms_norm_eps=1e-05,
    rope_scaling=None, rope_theta=1000000, routed_scaling_factor=2.5, tie_word_embeddings=False, topk_group=1, torch_dtype="bfloat16",
    use_qk_norm=True, vocab_size=151552)

CONFIGS = {
    "DeepSeek-V3": DEEPSEEK_V3,         # and DeepSeek-R1
    "DeepSeek-V3.1": DEEPSEEK_V3 | dict(quantization_config=FP8 | dict(scale_fmt="ue8m0")),
    "Kimi-K2-Instruct": KIMI_K2,
    "Kimi-K2-Instruct-0905": KIMI_K2 | dict(max_position_embeddings=262144, rope_scaling=KIMI_K2["rope_scaling"] | dict(factor=64.0)),
    "GLM-4.5": GLM_4_5,
    "GLM-4.6": GLM_4_5 | dict(max_position_embeddings=202752),
    "GLM-4.5-Air": GLM_4_5 | dict(
        first_k_dense_replace=1, hidden_size=4096, intermediate_size=10944, moe_intermediate_size=1408, n_routed_experts=128,
        num_hidden_layers=46, routed_scaling_factor=1.0, use_qk_norm=False),
    "Qwen3-235B-A22B": QWEN3_235B,
    "Qwen3-30B-A3B": QWEN3_235B | dict(
        hidden_size=2048, intermediate_size=6144, max_window_layers=48, moe_intermediate_size=768, num_attention_heads=32, num_hidden_layers=48),
    "Qwen3-Coder-480B-A35B": QWEN3_235B | dict(
        hidden_size=6144, intermediate_size=8192, max_position_embeddings=262144, max_window_layers=62, moe_intermediate_size=2560,
        num_attention_heads=96, num_experts=160, num_hidden_layers=62, num_key_value_heads=8, rope_theta=10000000, qkv_bias=False,
        use_qk_norm=True, shared_expert_intermediate_size=0),
}
SIZES = {"DeepSeek-V3": (671, 37), "DeepSeek-V3.1": (671, 37), "Kimi-K2-Instruct": (1026, 32), "Kimi-K2-Instruct-0905": (1026, 32),
         "GLM-4.5": (355, 32), "GLM-4.6": (355, 32), "GLM-4.5-Air": (106, 12), "Qwen3-235B-A22B": (235, 22),
         "Qwen3-30B-A3B": (30.5, 3.3), "Qwen3-Coder-480B-A35B": (480, 35)}


def parameters(config):
    """Of the Hugging Face model of a config.json, without multi-token prediction."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    fields = {key: value for key, value in config.items() if key not in ("architectures", "model_type", "quantization_config")}
    kind = config["model_type"].replace("kimi_k2", "deepseek_v3")       # Kimi-K2's own class is code of its repository
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **fields))
    return sum(p.numel() for p in model.parameters())
