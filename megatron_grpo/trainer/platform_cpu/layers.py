"""The layer specification for CPU: Megatron's local modules, with a norm and an attention that work under SP and CP."""

import torch
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_layer_specs, get_gpt_mtp_block_spec_for_backend
from megatron.core.transformer.enums import AttnMaskType, LayerType
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from ...settings import ConfigError
from .attention import PackedAttention, PackedSelfAttention


class Normalize(torch.autograd.Function):
    """x * w / sqrt(mean(x^2) + eps), in half the passes over memory that autograd makes of it; Zhang and Sennrich (2019), eq. 4."""

    @staticmethod
    def forward(ctx, x, weight, eps):
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        unit = wide * scale
        ctx.save_for_backward(unit, scale, weight)
        return (unit * weight).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        unit, scale, weight = ctx.saved_tensors
        grad_weight = (grad * unit).flatten(0, -2).sum(0).to(weight.dtype)
        inner = (grad * weight).to(unit.dtype)
        mean = torch.linalg.vecdot(inner, unit).unsqueeze(-1).div_(unit.shape[-1])
        return torch.addcmul(inner, unit, mean, value=-1).mul_(scale).to(grad.dtype), grad_weight, None


class RMSNorm(torch.nn.Module):
    """RMS normalisation whose weight is marked sequence_parallel, so that Megatron sums its gradient over tensor-parallel
    ranks; the local specification's own norm refuses sequence parallelism."""

    def __init__(self, config, hidden_size, eps=1e-5, **_):
        super().__init__()
        self.eps, self.weight = eps, torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x):
        return Normalize.apply(x, self.weight, self.eps)


class _Backend(LocalSpecProvider):
    """Megatron's local modules with this file's norm and attention."""

    def layer_norm(self, rms_norm=False, for_qk=False, has_residual=False):
        return RMSNorm

    def core_attention(self):
        return PackedAttention


def layer_spec(config, vp_stage: int | None = None, contiguous: bool = False) -> TransformerBlockSubmodules:
    """The decoder block of this pipeline stage on CPU.

    Args:
        config: Megatron's TransformerConfig.
        vp_stage: the virtual pipeline stage.
        contiguous: context-parallel rank r holds the r-th stretch of the pack (or padded sequence), not the zigzag pair.

    Raises:
        ConfigError: the configuration names something that has no CPU implementation.
    """
    layers = _layers(config, contiguous)
    if config.pipeline_model_parallel_layout is not None:
        numbers = config.pipeline_model_parallel_layout.get_layer_id_list(layer_type=LayerType.decoder, vp_stage=vp_stage)
    else:
        first = get_transformer_layer_offset(config, vp_stage=vp_stage)
        numbers = range(first, first + get_num_layers_to_build(config, vp_stage=vp_stage))
    return TransformerBlockSubmodules(layer_specs=[layers[i] for i in numbers], layer_norm=RMSNorm)


def mtp_spec(config, vp_stage: int | None = None):
    """The multi-token-prediction block of this pipeline stage on CPU, or None. Megatron shifts its tokens over zigzag chunks."""
    if not config.mtp_num_layers:
        return None
    return get_gpt_mtp_block_spec_for_backend(config, _layers(config, contiguous=False)[-1], _Backend(), vp_stage=vp_stage)


def _layers(config, contiguous) -> list[ModuleSpec]:
    for bad, fix in ((config.normalization != "RMSNorm", "--normalization RMSNorm"),
                     (config.multi_latent_attention, "no --multi-latent-attention"),
                     (config.experimental_attention_variant, "no --experimental-attention-variant"),
                     (config.layernorm_zero_centered_gamma, "no --apply-layernorm-1p"),
                     (config.qk_l2_norm, "no --qk-l2-norm")):
        if bad:
            raise ConfigError(f"--platform cpu: the layers on CPU need {fix}")
    layers = get_gpt_decoder_layer_specs(config, use_transformer_engine=False, normalization="RMSNorm")
    backend = _Backend()
    for layer in layers:            # the same two objects many times over: setting twice is harmless
        parts, attention = layer.submodules, layer.submodules.self_attention
        parts.input_layernorm = parts.pre_mlp_layernorm = backend.layer_norm()
        attention.module = PackedSelfAttention
        attention.params = {"attn_mask_type": AttnMaskType.causal, "contiguous": contiguous}
        attention.submodules.core_attention = backend.core_attention()
        if config.qk_layernorm:
            attention.submodules.q_layernorm = attention.submodules.k_layernorm = backend.layer_norm(for_qk=True)
    return layers
