"""Megatron's flags on the CPU platform: what is set without being asked for, and what is refused."""

import argparse

from ...settings import ConfigError

# Defaults of Megatron's parser, so that nobody types them. Fusions are CUDA kernels; the other strategy of
# --async-save comes from a package for GPUs.
DEFAULTS = dict(
    transformer_impl="local", distributed_backend="gloo", gradient_accumulation_fusion=False,
    masked_softmax_fusion=False, bias_swiglu_fusion=False, bias_gelu_fusion=False, bias_dropout_fusion=False,
    apply_rope_fusion=False, async_strategy="mcore", no_persist_layer_norm=True, attention_dropout=0.0, hidden_dropout=0.0)

# What a user may have set and cannot work: flag -> the values that can. None and False: the flag is not given.
ALLOWED = {
    "--transformer-impl": ("local",), "--distributed-backend": ("gloo",), "--normalization": ("RMSNorm",),
    "--attention-dropout": (0.0,), "--position-embedding-type": ("rope", "yarn", "learned_absolute", "none"),
    "--moe-token-dispatcher-type": ("alltoall", "allgather"), "--cuda-graph-impl": ("none",), "--fp8-format": (None,),
    "--fp4-format": (None,), "--fp16": (False,), "--window-size": (None,), "--multi-latent-attention": (False,), "--qk-l2-norm": (False,),
    "--moe-permute-fusion": (False,), "--moe-router-fusion": (False,), "--tp-comm-overlap": (False,), "--nccl-ub": (False,),
    "--use-megatron-fsdp": (False,), "--use-torch-fsdp2": (False,), "--optimizer-cpu-offload": (False,),
    "--fine-grained-activation-offloading": (False,),
}
DESTINATIONS = {"--fp8-format": "fp8", "--fp4-format": "fp4"}


def set_defaults(parser: argparse.ArgumentParser) -> None:
    """Give Megatron's parser the defaults of the CPU platform; call it in extra_args_provider, before parsing."""
    parser.set_defaults(**DEFAULTS)


def check(args: argparse.Namespace) -> None:
    """Refuse what was asked for and cannot run on CPU.

    Raises:
        ConfigError: names the flag and the values that work.
    """
    for flag, values in ALLOWED.items():
        value = getattr(args, DESTINATIONS.get(flag, flag[2:].replace("-", "_")))
        if value not in values:
            fix = "drop it" if values[0] is None or values[0] is False else f"use {' or '.join(map(str, values))}"
            raise ConfigError(f"{flag}{'' if value is True else f' {value}'} cannot work with --platform cpu: {fix}")
