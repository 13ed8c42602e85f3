"""Causal attention by scaled_dot_product_attention for packed and padded batches, under context parallelism.

Keys and values are gathered over the context-parallel group and the local queries kept, so that one form serves the zigzag
and the contiguous layout. Rotary positions restart with each sequence of a pack.
"""

import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.enums import AttnMaskType
from ...settings import ConfigError
from .packing import Pack


class GatherSequence(torch.autograd.Function):
    """[T, ...] of each rank -> [n, T, ...]; the gradient of a rank's part is summed over the ranks that used it."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        parts = x.new_empty(group.size(), *x.shape)
        dist.all_gather_into_tensor(parts.view(-1, *x.shape[1:]), x.contiguous(), group=group)
        return parts

    @staticmethod
    def backward(ctx, grad):
        received = torch.empty_like(grad, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, grad.contiguous(), group=ctx.group)
        return received.sum(0), None


class PackedAttention(torch.nn.Module):
    """Megatron's core attention on CPU: (t, h, d) with a Pack, or (s, b, h, d).

    Args:
        contiguous: the context-parallel layout: rank r holds the r-th stretch instead of the zigzag pair of chunks.
    """

    def __init__(self, config, layer_number, attn_mask_type, attention_type, attention_dropout=None, softmax_scale=None,
                 cp_comm_type=None, pg_collection=None, contiguous=False, **_):
        super().__init__()
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        for bad, flag in ((dropout, "--attention-dropout 0"), (config.window_size, "no --window-size"),
                          (config.softmax_type != "vanilla", "--softmax-type vanilla"), (attention_type != "self", "self attention")):
            if bad:
                raise ConfigError(f"--platform cpu: attention on CPU needs {flag}")
        self.cp, self.contiguous = pg_collection.cp, contiguous
        self.scale = softmax_scale if softmax_scale is not None else config.softmax_scale
        self.masks = {}

    def forward(self, query, key, value, attention_mask, attn_mask_type=None, attention_bias=None, packed_seq_params=None, **_):
        if attn_mask_type not in (AttnMaskType.causal, AttnMaskType.padding_causal) or attention_bias is not None:
            raise ConfigError(f"--platform cpu: attention on CPU is causal and takes no bias, got {attn_mask_type}")
        if packed_seq_params is not None:
            return self._packed(query, key, value, packed_seq_params)
        return self._padded(query, key, value)

    def _gather(self, key, value):
        """[n * T, ...] keys and values of the whole group, rank after rank."""
        if self.cp.size() == 1:
            return key, value
        both = GatherSequence.apply(torch.cat([key, value], dim=-1), self.cp).flatten(0, 1)
        return both.split([key.shape[-1], value.shape[-1]], dim=-1)

    def _attend(self, query, key, value, mask):
        """(b, s, h, d) -> (b, s, h, d)"""
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None, scale=self.scale, enable_gqa=True)
        return out.transpose(1, 2)

    def _packed(self, query, key, value, pack: Pack):
        key, value = self._gather(key, value)
        outputs = []
        for bucket in pack.buckets:
            out = self._attend(query[bucket.query_BQ], key[bucket.key_BK], value[bucket.key_BK], bucket.mask_B1QK)
            outputs.append(out.flatten(0, 1))
        return torch.cat(outputs)[pack.output_T].flatten(1)

    def _padded(self, query, key, value):
        n, rank, s = self.cp.size(), self.cp.rank(), len(query)
        key, value = self._gather(key, value)
        mask = None
        if n > 1:
            order, mask = self._padded_order(n, rank, s, query.device)
            key, value = key[order], value[order]
        out = self._attend(*(x.transpose(0, 1) for x in (query, key, value)), mask)
        return out.transpose(0, 1).flatten(2)

    def _padded_order(self, n, rank, s, device):
        if s not in self.masks:
            half = s // 2
            where = torch.arange(n * s, device=device).view(n, s) if self.contiguous else torch.stack(
                [torch.cat([torch.arange(half) + r * half, torch.arange(half) + (2 * n - 1 - r) * half]) for r in range(n)]).to(device)
            self.masks = {s: (where.flatten().argsort(), where[rank, :, None] >= torch.arange(n * s, device=device))}
        return self.masks[s]


class _OneRank:
    """A context-parallel group of one, for the rotary code: this rank's angles are chosen already."""

    def size(self): return 1
    def rank(self): return 0


ONE_RANK = _OneRank()


class PackedSelfAttention(SelfAttention):
    """Megatron's self attention, with the rotary angles of this rank's own rows in either layout."""

    def __init__(self, *args, contiguous=False, **kwargs):
        super().__init__(*args, **kwargs)
        self.cp, self.contiguous = self.pg_collection.cp, contiguous
        self.core_attention.contiguous = contiguous
        self.pg_collection = copy.copy(self.pg_collection)
        self.pg_collection.cp = ONE_RANK

    def forward(self, hidden_states, attention_mask=None, *args, rotary_pos_emb=None, packed_seq_params=None, **kwargs):
        n, rank = self.cp.size(), self.cp.rank()
        if packed_seq_params is not None and packed_seq_params.qkv_format == "thd":
            packed_seq_params = Pack.of(packed_seq_params, n, rank, self.contiguous, hidden_states.device)
            if rotary_pos_emb is not None:
                rotary_pos_emb = packed_seq_params.rotary(rotary_pos_emb)
        else:
            packed_seq_params = None
            if rotary_pos_emb is not None and self.contiguous:
                rotary_pos_emb = rotary_pos_emb.chunk(n)[rank]
        return super().forward(hidden_states, attention_mask, *args, rotary_pos_emb=rotary_pos_emb,
                               packed_seq_params=packed_seq_params, **kwargs)
