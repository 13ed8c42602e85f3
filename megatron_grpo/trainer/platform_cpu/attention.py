"""Causal attention by scaled_dot_product_attention for packed and padded batches, under context parallelism.

Keys and values are gathered over the context-parallel group and the local queries kept, so that one form serves the zigzag
and the contiguous layout. Rotary positions restart with each sequence of a pack.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.enums import AttnMaskType

from ...settings import ConfigError
from .packing import Rows, packed_rows, padded_rows


class GatherSequence(torch.autograd.Function):
    """[T, ...] of each rank -> [n T, ...]; the gradient of a rank's part is summed over the ranks that used it."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        whole = x.new_empty(group.size() * len(x), *x.shape[1:])
        dist.all_gather_into_tensor(whole, x.contiguous(), group=group)
        return whole

    @staticmethod
    def backward(ctx, grad):
        received = torch.empty_like(grad, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, grad.contiguous(), group=ctx.group)
        return received.unflatten(0, (ctx.group.size(), -1)).sum(0), None


class Rotate(torch.autograd.Function):
    """Rotary embedding of the first d channels: (a, b) -> (a cos - b sin, b cos + a sin), where (a, b) are the two halves
    of the channels, or with `interleaved` the even and the odd ones. Su et al., RoFormer (2021), eq. 34."""

    @staticmethod
    def forward(ctx, x, cos, sin, interleaved):
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return Rotate._turn(x, cos, sin, interleaved, -1)

    @staticmethod
    def backward(ctx, grad):
        cos, sin = ctx.saved_tensors
        return Rotate._turn(grad, cos, sin, ctx.interleaved, 1), None, None, None

    @staticmethod
    def _turn(x, cos, sin, interleaved, sign):
        d = cos.shape[-1]
        out = x * cos if d == x.shape[-1] else torch.cat([x[..., :d] * cos, x[..., d:]], dim=-1)
        a, b = (slice(0, d, 2), slice(1, d, 2)) if interleaved else (slice(0, d // 2), slice(d // 2, d))
        out[..., a].addcmul_(x[..., b], sin[..., a], value=sign)
        out[..., b].addcmul_(x[..., a], sin[..., b], value=-sign)
        return out


class PackedAttention(torch.nn.Module):
    """Megatron's core attention on CPU: (t, h, d) packed or (s, b, h, d) padded, described by a `Rows`."""

    def __init__(self, config, layer_number, attn_mask_type, attention_type, attention_dropout=None, softmax_scale=None,
                 cp_comm_type=None, pg_collection=None, **_):
        super().__init__()
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        for bad, fix in ((dropout, "--attention-dropout 0"), (config.window_size, "no --window-size"),
                         (config.softmax_type != "vanilla", "--softmax-type vanilla"), (attention_type != "self", "self attention")):
            if bad:
                raise ConfigError(f"--platform cpu: attention on CPU needs {fix}")
        self.cp, self.interleaved = pg_collection.cp, config.rotary_interleaved
        self.scale = softmax_scale if softmax_scale is not None else config.softmax_scale

    def forward(self, query, key, value, attention_mask, attn_mask_type=None, attention_bias=None, packed_seq_params: Rows = None, **_):
        if attn_mask_type not in (AttnMaskType.causal, AttnMaskType.padding_causal) or attention_bias is not None:
            raise ConfigError(f"--platform cpu: attention on CPU is causal and takes no bias, got {attn_mask_type}")
        rows = packed_seq_params
        if rows.cos_sin is not None:
            query, key = (Rotate.apply(x, *rows.cos_sin, self.interleaved) for x in (query, key))
        if self.cp.size() > 1:
            both = GatherSequence.apply(torch.cat([key, value], dim=-1), self.cp)
            key, value = both.split([key.shape[-1], value.shape[-1]], dim=-1)
        return (self._packed if rows.qkv_format == "thd" else self._padded)(query, key, value, rows)

    def _packed(self, query, key, value, rows):
        def buckets(x, index, which):
            """The (B, S, h, d) batches of the rows that `index` names."""
            sizes = [shape[0] * shape[which] for shape in rows.shapes]
            parts = x.flatten(1).index_select(0, index).split(sizes)
            return [p.view(shape[0], shape[which], *x.shape[1:]) for p, shape in zip(parts, rows.shapes)]

        parts = (buckets(query, rows.query, 1), buckets(key, rows.key, 2), buckets(value, rows.key, 2), rows.masks)
        outputs = [self._attend(*part).flatten(0, 1).flatten(1) for part in zip(*parts, strict=True)]
        return torch.cat(outputs).index_select(0, rows.output_T)

    def _padded(self, query, key, value, rows):
        mask = None
        if rows.key is not None:
            key, value, (mask,) = key.index_select(0, rows.key), value.index_select(0, rows.key), rows.masks
        return self._attend(*(x.transpose(0, 1) for x in (query, key, value)), mask).transpose(0, 1).flatten(2)

    def _attend(self, query, key, value, mask):
        """(b, s, h, d) -> (b, s, h, d)"""
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None, scale=self.scale, enable_gqa=True)
        return out.transpose(1, 2)


class PackedSelfAttention(SelfAttention):
    """Megatron's self attention; the rotary embedding is left to the core attention, which knows each row's position.

    Args:
        contiguous: context-parallel rank r holds the r-th stretch of the micro-batch instead of the zigzag pair of chunks.
    """

    def __init__(self, *args, contiguous=False, **kwargs):
        super().__init__(*args, **kwargs)
        self.contiguous = contiguous
        self.rotary = not (self.config.no_rope_freq and self.config.no_rope_freq[self.layer_number - 1])

    def forward(self, hidden_states, attention_mask=None, *args, rotary_pos_emb=None, packed_seq_params=None, **kwargs):
        cp, tp = self.pg_collection.cp, self.pg_collection.tp
        if packed_seq_params is not None and packed_seq_params.qkv_format == "thd":
            rows = packed_rows(packed_seq_params, cp.size(), cp.rank(), self.contiguous, hidden_states.device)
        else:
            s = len(hidden_states) * (tp.size() if self.config.sequence_parallel else 1)
            rows = padded_rows(s, cp.size(), cp.rank(), self.contiguous, hidden_states.device)
        rows = rows.rotated(rotary_pos_emb if self.rotary else None, self._yarn_concentration_factor, hidden_states.dtype)
        return super().forward(hidden_states, attention_mask, *args, rotary_pos_emb=None, packed_seq_params=rows, **kwargs)


class _OneRank:
    """A context-parallel group of one, for a RotaryEmbedding that is to give the angles of all positions."""

    def size(self): return 1
    def rank(self): return 0


ONE_RANK = _OneRank()
