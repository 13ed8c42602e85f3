"""Megatron's flags on the CPU platform: what is set without being asked for, and what is refused."""

import argparse

from ...settings import ConfigError, flag

# What Megatron's parser gets as defaults, so that nobody types it. Fusions are CUDA kernels.
DEFAULTS = dict(
    transformer_impl="local", distributed_backend="gloo", use_cpu_initialization=True, gradient_accumulation_fusion=False,
    masked_softmax_fusion=False, bias_swiglu_fusion=False, bias_gelu_fusion=False, bias_dropout_fusion=False,
    apply_rope_fusion=False, no_persist_layer_norm=True, attention_dropout=0.0, hidden_dropout=0.0)

# What a user may have set explicitly and cannot work: destination -> values that can.
ALLOWED = dict(
    transformer_impl=("local",), distributed_backend=("gloo",), fp8=(None,), fp4=(None,), moe_permute_fusion=(False,),
    moe_router_fusion=(False,), tp_comm_overlap=(False,), use_megatron_fsdp=(False,), use_torch_fsdp2=(False,), fp16=(False,),
    multi_latent_attention=(False,), cuda_graph_impl=("none",), attention_dropout=(0.0,), cross_entropy_loss_fusion=(False,),
    normalization=("RMSNorm",), optimizer_cpu_offload=(False,), cpu_offloading=(False,), enable_cuda_graph=(False,),
    moe_token_dispatcher_type=("alltoall", "allgather"), window_size=(None,), fine_grained_activation_offloading=(False,),
    apply_layernorm_1p=(False,), qk_l2_norm=(False,), use_nccl_ub=(False,), group_query_attention=(True, False),
    position_embedding_type=("rope", "yarn", "none"))


def set_defaults(parser: argparse.ArgumentParser) -> None:
    """Give Megatron's parser the defaults of the CPU platform; call it in extra_args_provider, before parsing."""
    parser.set_defaults(**DEFAULTS)


def check(args: argparse.Namespace) -> None:
    """Refuse what was asked for and cannot run on CPU.

    Raises:
        ConfigError: names the flag and the values that work.
    """
    for name, values in ALLOWED.items():
        if getattr(args, name, values[0]) not in values:
            raise ConfigError(f"{flag(name)} {getattr(args, name)} cannot work with --platform cpu: "
                              + (f"use {' or '.join(map(str, values))}" if values not in ((False,), (None,)) else "drop it"))
