import math

import numpy as np
import pytest
import torch

from megatron_grpo.parallel.layout import Layout
from megatron_grpo.routing.audit import RouteAuditError
from megatron_grpo.routing.mismatch import compare, find_damage, mismatch_metrics
from megatron_grpo.routing.placement import RoutesShare
from tests.routing.noise import flip


def share(rows, layers):
    return RoutesShare(torch.tensor(rows, dtype=torch.int8), tuple(layers))


def mean(metrics, name):
    total, count = metrics[f"routing/{name}"]
    return float(total / count)


def test_by_hand():
    # 4 tokens, 2 layers, K = 2; token 3 is unrouted; token 2 has no route in layer 5
    engine = share([[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[0, 1], [-1, -1]], [[0, 1], [2, 3]]], (1, 5))
    own = share([[[3, 2], [1, 0]], [[6, 7], [5, 0]], [[1, 3], [0, 4]], [[7, 6], [5, 4]]], (5, 1))
    part = compare(engine, own, torch.tensor([False, False, False, True]))
    # layer 5: tokens 0, 1 equal as sets; layer 1: token 0 equal, token 1 differs by one expert, token 2 differs by one
    assert part.layers == (5, 1)
    assert part.differs_TL.tolist() == [[False, False], [False, True], [False, True], [False, False]]
    assert part.agreement_TL.tolist() == [[1, 1], [1, 0.5], [0, 0.5], [0, 0]]
    assert part.missing_L.tolist() == [1, 0]
    metrics = mismatch_metrics([part, part])
    assert metrics["routing/router_mismatch"] == (4, 10)
    assert metrics["routing/router_mismatch/layer_5"] == (0, 4) and metrics["routing/router_mismatch/layer_1"] == (4, 6)
    assert metrics["routing/token_mismatch"] == (4, 6)
    assert metrics["routing/agreement"] == (8, 10)
    assert metrics["routing/fallback"] == (2, 12)


def test_layers_must_be_held():
    with pytest.raises(ValueError, match="replayed layers"):
        compare(share([[[0, 1]]], (1,)), share([[[0, 1]]], (2,)), torch.tensor([False]))


def noisy(tokens, layers, topk, experts, seed=0):
    """Native routes, and an engine's."""
    rng = np.random.default_rng(seed)
    own = rng.random((tokens, layers, experts), dtype=np.float32).argpartition(topk, axis=-1)[..., :topk].astype(np.int8)
    return own, flip(own, experts, seed)


def test_noise_calibrated_to_the_paper_is_reported_as_such():
    own, engine = noisy(4000, 48, 8, 64)
    part = compare(RoutesShare.of(engine, range(48)), RoutesShare.of(own, range(48)), torch.zeros(4000, dtype=torch.bool))
    metrics = mismatch_metrics([part])
    assert mean(metrics, "router_mismatch") == pytest.approx(0.10, abs=0.004)
    assert mean(metrics, "token_mismatch") == pytest.approx(0.94, abs=0.012)
    assert mean(metrics, "agreement") == pytest.approx(1 - 0.1 / 8, abs=0.001)
    assert mean(metrics, "fallback") == 0
    layers = [mean(metrics, f"router_mismatch/layer_{n}") for n in range(48)]
    assert max(abs(x - 0.10) for x in layers) < 5 * math.sqrt(0.1 * 0.9 / 4000)
    assert find_damage(part, Layout((2000, 2000)), ["a", "b"], 0.5) == []


def split(part_of):
    import torch.distributed as dist
    rank = dist.get_rank()
    own, engine = noisy(300, 48, 8, 64)
    layers = list(range(48))[part_of * rank:part_of * (rank + 1)]
    part = compare(RoutesShare.of(engine[:, layers], layers), RoutesShare.of(own[:, layers], layers), torch.zeros(300, dtype=torch.bool))
    return [float(x) for x in mismatch_metrics([part], dist.group.WORLD)["routing/token_mismatch"]]


def test_token_mismatch_is_over_all_pipeline_stages(pool):
    own, engine = (RoutesShare.of(x, range(48)) for x in noisy(300, 48, 8, 64))
    whole = mismatch_metrics([compare(engine, own, torch.zeros(300, dtype=torch.bool))])
    assert pool.run(split, 24, ranks=2) == [[float(x) for x in whole["routing/token_mismatch"]]] * 2


@pytest.mark.parametrize("cp, tp", [(1, 1), (2, 2)])
def test_permuted_layers_of_one_sample_are_named(cp, tp):
    lengths = (100, 120, 90)
    own, engine = noisy(310, 6, 8, 64)
    engine[100:220] = engine[100:220, [0, 2, 1, 3, 4, 5]]
    layout, found = Layout(lengths, cp, tp), []
    for cp_rank in range(cp):
        for tp_rank in range(tp):
            index = layout.hidden_index(cp_rank, tp_rank)
            parts = [RoutesShare.of(np.ascontiguousarray(x[index.numpy()]), range(6)) for x in (engine, own)]
            errors = find_damage(compare(*parts, index < 0), layout, ["a", "b", "c"], 0.5, cp_rank, tp_rank)
            assert [type(e) for e in errors] == [RouteAuditError]
            found += errors
    assert {(e.sample_id, e.layer in (1, 2)) for e in found} == {("b", True)}
    assert "permuted" in str(found[0]) and "--router-agreement-floor" in str(found[0])
