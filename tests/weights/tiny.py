"""Tiny random models as Hugging Face directories, and the same models as live Megatron models on the CPU platform."""

import sys
from pathlib import Path

COMMON = dict(vocab_size=500, hidden_size=64, intermediate_size=96, moe_intermediate_size=32, num_hidden_layers=4, num_attention_heads=8,
              num_key_value_heads=4, head_dim=16, num_experts_per_tok=2, max_position_embeddings=512, tie_word_embeddings=False)
QWEN3_MOE = dict(num_experts=8, norm_topk_prob=True, mlp_only_layers=[1])
QWEN2_MOE = dict(num_experts=8, norm_topk_prob=False, mlp_only_layers=[], shared_expert_intermediate_size=48, qkv_bias=True)
GLM4_MOE = dict(n_routed_experts=8, n_shared_experts=2, first_k_dense_replace=1, use_qk_norm=True, attention_bias=True, n_group=1,
                topk_group=1, routed_scaling_factor=1.5, norm_topk_prob=True, num_mtp_layers=0)
DEEPSEEK_V3 = dict(n_routed_experts=8, n_shared_experts=2, first_k_dense_replace=1, n_group=2, topk_group=1, routed_scaling_factor=2.5,
                   norm_topk_prob=True, q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16, head_dim=8,
                   num_key_value_heads=8, num_nextn_predict_layers=0)
KINDS = {"deepseek_v3": ("DeepseekV3", DEEPSEEK_V3),
         "qwen3_moe": ("Qwen3Moe", QWEN3_MOE), "glm4_moe": ("Glm4Moe", GLM4_MOE), "qwen2_moe": ("Qwen2Moe", QWEN2_MOE),
         "qwen3": ("Qwen3", dict(tie_word_embeddings=True))}


def write_model(kind: str, path: Path, seed: int = 0, **changes) -> Path:
    """A random float32 model of several shards. Norms, biases and gates are drawn too, so that a mix-up shows."""
    import torch
    import transformers
    name, own = KINDS[kind]
    options = {**COMMON, **own, **changes}
    if kind == "qwen3":
        options = {k: v for k, v in options.items() if "moe" not in k and "experts" not in k}
    model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**options)).float()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, tensor in model.state_dict().items():
            center, width = (1.0, 0.1) if "norm" in key else (0.0, 0.3 if "gate.weight" in key else 0.1)
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * width + center)
    model.save_pretrained(path, max_shard_size="150KB")
    (Path(path) / "tokenizer_config.json").write_text("{}")
    return Path(path)


FLAGS = """--seq-length 64 --micro-batch-size 1 --global-batch-size 8 --train-iters 1 --lr 1e-3 --tokenizer-type NullTokenizer
--eval-iters 0 --moe-token-dispatcher-type alltoall --moe-router-load-balancing-type none --moe-router-dtype fp32"""


def start(path, flags=()):
    """Megatron's flags from the directory's config.json, its process groups, and the model chunks; on the CPU platform."""
    from megatron_grpo.parallel.config import PackingConfig
    from megatron_grpo.settings import add_arguments
    from megatron_grpo.trainer import platform_cpu
    from megatron_grpo.weights.config import WeightsConfig
    from megatron_grpo.weights.hf_config import apply_hf_config
    platform_cpu.install()
    from megatron.training.arguments import parse_args, validate_args
    from megatron.training.global_vars import set_global_variables
    from megatron.training.initialize import initialize_megatron
    from megatron.training.training import get_model
    from megatron.training.vocab_utils import calculate_padded_vocab_size

    from megatron_grpo.trainer.model import model_provider

    def extra(parser):
        add_arguments(parser, "grpo", WeightsConfig, PackingConfig)
        platform_cpu.set_defaults(parser)
        return parser

    sys.argv = ["test", *FLAGS.split(), "--hf-checkpoint", str(path), *flags]
    args = parse_args(extra)
    apply_hf_config(args, path)
    validate_args(args)
    args.padded_vocab_size = calculate_padded_vocab_size(args.vocab_size, args.make_vocab_size_divisible_by,
                                                         args.tensor_model_parallel_size, logging_enabled=False)
    set_global_variables(args, build_tokenizer=False)
    initialize_megatron(allow_no_cuda=True)
    return args, get_model(model_provider, wrap_with_ddp=False)


def live(path, chunks):
    from megatron.core import mpu

    from megatron_grpo.weights import LiveModel, ModelGroups
    from megatron_grpo.weights.hf_config import read_hf_config
    return LiveModel.from_config(chunks, read_hf_config(path), ModelGroups.from_mpu(mpu))
