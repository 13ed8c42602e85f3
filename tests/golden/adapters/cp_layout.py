"""Context-parallel layouts against slime's: one sequence cut into zigzag chunks, and packed micro-batches of both kinds."""

import torch

from megatron_grpo.parallel.layout import Layout


def run(case: dict, pool) -> dict:
    inputs = case["inputs"]
    if "total_length" in inputs:
        return _one_sequence(inputs["total_length"], inputs["response_length"], inputs["cp_size"])
    return _packed(inputs, inputs["params"])


def _one_sequence(total_length: int, response_length: int, cp_size: int) -> dict:
    layout = Layout((total_length,), cp_size=cp_size)
    where = layout.response_index([total_length - response_length])
    response = torch.full((total_length,), -1)
    response[where] = torch.arange(response_length)
    shards = [layout.shard(response, r, fill=-1) for r in range(cp_size)]
    ranks = []
    for r in range(cp_size):
        own = dict(rank=r, slice_with_cp=layout.index(r), slice_log_prob=shards[r][shards[r] >= 0])
        if cp_size > 1:
            size = layout.local_tokens // 2
            spans = [_span(layout.positions(r)[(shards[r] >= 0) & (layout.chunk_ids(r) == c)]) for c in layout.columns(r)]
            own |= dict(chunk_size=size, chunks=[[c * size, (c + 1) * size] for c in layout.columns(r)], logits=spans,
                        tokens=[[a + (a < b), b + (a < b)] if a < b else [0, 0] for a, b in spans], gather_positions=own["slice_log_prob"])
        ranks.append({k: v.tolist() if isinstance(v, torch.Tensor) else v for k, v in own.items()})
    return dict(ranks=ranks, gathered=layout.gather(shards)[where])


def _span(positions: torch.Tensor) -> list[int]:
    return [int(positions[0]), int(positions[-1]) + 1] if len(positions) else [0, 0]


def _packed(inputs: dict, p: dict) -> dict:
    lengths = inputs["total_lengths"]
    layout = Layout(tuple(lengths), cp_size=p["cp_size"], tp_size=p["tp_size"], multiple=p["pad_multiplier"],
                    kind="contiguous" if p["allgather_cp"] else "zigzag")
    tokens = torch.cat([100 * (s + 1) + torch.arange(n) for s, n in enumerate(lengths)])
    where = layout.response_index([n - r for n, r in zip(lengths, inputs["response_lengths"], strict=True)])
    in_response, mask, labels = torch.zeros(len(tokens), dtype=torch.bool), torch.zeros(len(tokens)), layout.labels(tokens)
    in_response[where] = True
    mask[where] = torch.tensor([float(m) for row in inputs["loss_mask"] for m in row])
    if p["cp_size"] > 1 and not p["allgather_cp"]:
        shown = labels * in_response            # the peer leaves the other targets of a zigzag shard at 0
    else:
        shown = labels
    ranks = []
    for r in range(p["cp_size"]):
        own, seq = layout.shard(in_response, r, False), layout.seq_ids(r)
        ranks.append(dict(
            rank=r, tokens=layout.shard(tokens, r).tolist(), cu_seqlens=layout.cu_seqlens_padded.tolist(),
            full_loss_mask=layout.shard(mask, r).tolist(), shifted_targets=layout.shard(shown, r).tolist(),
            per_sample_targets=[layout.shard(labels, r)[own & (seq == s)].tolist() for s in range(layout.num_seqs)]))
    return dict(ranks=ranks)
