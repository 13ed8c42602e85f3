"""Megatron's local modules for latent attention on one rank, around a causal attention of our own: Megatron's takes heads of one width only."""

import torch
import torch.nn.functional as F


class Causal(torch.nn.Module):
    """[s, b, heads, d] queries and keys, [s, b, heads, v] values -> [s, b, heads v]."""

    def __init__(self, *_, softmax_scale, **__):
        super().__init__()
        self.scale = softmax_scale

    def forward(self, query, key, value, attention_mask, **_):
        out = F.scaled_dot_product_attention(*(x.permute(1, 2, 0, 3) for x in (query, key, value)), is_causal=True, scale=self.scale)
        return out.permute(2, 0, 1, 3).flatten(2)


def spec(config, vp_stage=None):
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=vp_stage)
    for layer in block.layer_specs:
        layer.submodules.self_attention.submodules.core_attention = Causal
    return block
