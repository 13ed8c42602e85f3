"""The small model in plain float64 PyTorch, one sequence at a time: what every layout must equal."""

import torch
import torch.nn.functional as F

LAYERS, HEADS, GROUPS, HEAD, TOPK = 4, 4, 2, 8, 2


def logits(weights, tokens, sigmoid=False, scaling=1.0, tied=False):
    """[N] token ids of one sequence -> [N, V]."""
    def of(layer, name):
        """Megatron's checkpoint stacks layers that are all alike and numbers those that are not."""
        stacked = weights.get(f"decoder.layers.{name}")
        return weights.get(f"decoder.layers.{layer}.{name}") if stacked is None else stacked[layer]

    x = weights["embedding.word_embeddings.weight"][tokens]
    for i in range(LAYERS):
        x = x + _attention(lambda name: of(i, f"self_attention.{name}"), x)
        h = _norm(x, of(i, "mlp.linear_fc1.layer_norm_weight"))
        if of(i, "mlp.router.weight") is None:
            x = x + _swiglu(h, of(i, "mlp.linear_fc1.weight"), of(i, "mlp.linear_fc2.weight"))
            continue
        y = _experts(lambda name: of(i, f"mlp.{name}"), h, sigmoid, scaling)
        if of(i, "mlp.shared_experts.linear_fc1.weight") is not None:
            y = y + _swiglu(h, of(i, "mlp.shared_experts.linear_fc1.weight"), of(i, "mlp.shared_experts.linear_fc2.weight"))
        x = x + y
    head = weights["embedding.word_embeddings.weight" if tied else "output_layer.weight"]
    return _norm(x, weights["decoder.final_layernorm.weight"]) @ head.T


def _norm(x, weight):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight


def _swiglu(x, fc1, fc2):
    gate, up = (x @ fc1.T).chunk(2, dim=-1)
    return (F.silu(gate) * up) @ fc2.T


def _rope(x):
    inverse = 1.0 / 10000 ** (torch.arange(0, HEAD, 2, dtype=torch.float32) / HEAD)
    angle = torch.outer(torch.arange(len(x), dtype=torch.float32), inverse).repeat(1, 2)[:, None]     # Megatron's own precision
    a, b = x.chunk(2, dim=-1)
    return x * angle.cos().double() + torch.cat([-b, a], dim=-1) * angle.sin().double()


def _attention(of, x):
    qkv = (_norm(x, of("linear_qkv.layer_norm_weight")) @ of("linear_qkv.weight").T).view(len(x), GROUPS, -1)
    q, k, v = qkv.split([HEADS // GROUPS * HEAD, HEAD, HEAD], dim=-1)
    q = _rope(_norm(q.reshape(len(x), HEADS, HEAD), of("q_layernorm.weight")))
    k = _rope(_norm(k, of("k_layernorm.weight")))
    k, v = (y.repeat_interleave(HEADS // GROUPS, dim=1) for y in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / HEAD**0.5
    scores = scores.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1) @ of("linear_proj.weight").T


def _experts(of, x, sigmoid, scaling):
    scores = x @ of("router.weight").T
    if sigmoid:
        scores = scores.float().sigmoid()         # Megatron's own precision, here and in the softmax
        chosen = (scores + of("router.expert_bias").float()).topk(TOPK).indices
        gate = scores.gather(1, chosen)
        gate = (gate / gate.sum(-1, keepdim=True) * scaling).double()
    else:
        top, chosen = scores.topk(TOPK)
        gate = top.softmax(-1, dtype=torch.float32).double()
    out = torch.zeros_like(x)
    for t in range(len(x)):
        for k in range(TOPK):
            e = chosen[t, k]
            out[t] = out[t] + gate[t, k] * _swiglu(x[t], of("experts.experts.linear_fc1.weight")[e], of("experts.experts.linear_fc2.weight")[e])
    return out
