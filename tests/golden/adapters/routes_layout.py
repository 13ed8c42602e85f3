"""Each rank's routes against slime's: packing, context parallelism of both kinds, sequence parallelism.

Rows without a route of their own (padding, a sequence's last token) are not compared: their experts are a choice, spread here by a
running row number and there by one that restarts with every block of padding.
"""

import numpy as np

from megatron_grpo.parallel.layout import Layout
from megatron_grpo.routing.placement import place, unrouted
from tests.golden import NotCovered

REFUSAL = "AssertionError"      # slime's exception where ours is a ValueError


def run(case: dict, pool) -> dict:
    inputs = case["inputs"]
    if "rows" in inputs:
        return _row_count(inputs["token_lengths"], inputs["rows"])
    p = inputs["params"]
    routes = [np.array(rows) for rows in inputs["routed_experts"]]
    _, layers, topk = routes[0].shape
    split = p["tp_size"] if p["sequence_parallel"] else 1
    layout = Layout(tuple(inputs["token_lengths"]), cp_size=p["cp_size"], tp_size=split,
                    kind="contiguous" if p["allgather_cp"] else "zigzag", multiple=p["data_pad_size_multiplier"] * p["tp_size"] // split)
    ranks = []
    for cp_rank in range(p["cp_size"]):
        for tp_rank in range(split):
            share = place(routes, layout, columns=range(layers), topk=topk, num_experts=p["num_experts"], cp_rank=cp_rank, tp_rank=tp_rank)
            free = unrouted(layout, cp_rank, tp_rank)
            ranks.append(dict(cp_rank=cp_rank, tp_rank=tp_rank if p["sequence_parallel"] else "all",
                              rows=[None if f else row.tolist() for f, row in zip(free, share, strict=True)]))
    return dict(ranks=ranks)


def _row_count(lengths: list[int], rows: int) -> dict:
    if rows == lengths[0]:
        raise NotCovered("as many rows as tokens are legal here: the last row is cut")
    try:
        place([np.zeros((rows, 1, 1), np.int8)], Layout(tuple(lengths)), columns=[0], topk=1, num_experts=1)
    except ValueError:
        return dict(error=REFUSAL)
    return dict(error=None)
