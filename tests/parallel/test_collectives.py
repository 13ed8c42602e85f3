import math

import pytest
import torch
import torch.distributed as dist

from megatron_grpo.parallel.collectives import all_gather, reduce_maxima, reduce_means, sequence_sums


def _tokens():
    """Twelve tokens of three sequences; `rank` says who holds each. Rank 2 of 3 holds none of them."""
    g = torch.Generator().manual_seed(3)
    x = torch.randn(12, 2, generator=g, dtype=torch.float64)
    seq = torch.tensor([0, 0, 0, 1, 1, 1, 1, 1, 2, 2, 2, 2])
    rank = torch.tensor([0, 1, 1, 0, 0, 1, 1, 0, 1, 1, 0, 0])
    return x, seq, rank


def _loss(x_Tn, sums_Sn, seq_T):
    """Nonlinear in the token and in its sequence's sums, as the sequence ratios are."""
    return (x_Tn[:, 0] * sums_Sn[seq_T].sin().sum(1)).sum()


def _sums_case():
    x, seq, owner = _tokens()
    own = owner == dist.get_rank()
    x_Tn, seq_T = x[own].requires_grad_(), seq[own]
    sums = sequence_sums(x_Tn, seq_T, 3, dist.group.WORLD)
    loss = _loss(x_Tn, sums, seq_T)
    loss.backward()
    return own, sums.detach(), loss.detach(), x_Tn.grad


def test_sequence_sums_and_gradients_are_those_of_one_rank(pool):
    x, seq, _ = _tokens()
    x.requires_grad_()
    sums = sequence_sums(x, seq, 3)
    by_hand = torch.stack([x[:3].sum(0), x[3:8].sum(0), x[8:].sum(0)])
    assert torch.allclose(sums, by_hand, atol=1e-14)
    loss = _loss(x, by_hand, seq)
    loss.backward()
    results = pool.run(_sums_case, ranks=3)
    assert math.isclose(sum(r[2] for r in results), loss.item(), rel_tol=1e-12)
    for own, rank_sums, _, grad in results:
        assert torch.allclose(rank_sums, by_hand, atol=1e-14) and torch.allclose(grad, x.grad[own], atol=1e-13)


def _gather_case():
    x = (torch.arange(2.) + 10 * dist.get_rank()).requires_grad_()
    y = all_gather(x, dist.group.WORLD)
    ((dist.get_rank() + 1) * (y * y).sum()).backward()          # the loss of rank r weighs r + 1
    return y.detach().tolist(), x.grad.tolist()


def test_all_gather_collects_every_ranks_gradient(pool):
    for rank, (y, grad) in enumerate(pool.run(_gather_case, ranks=3)):
        assert y == [[0, 1], [10, 11], [20, 21]]
        assert grad == [6 * 2 * 10 * rank, 6 * 2 * (10 * rank + 1)]           # 1 + 2 + 3 = 6
    x = torch.ones(2, requires_grad=True)
    (3 * all_gather(x).sum()).backward()
    assert x.grad.tolist() == [3, 3]


def _metrics_case(own):
    mine = own[dist.get_rank()]
    try:
        return reduce_means({n: (torch.tensor(s), torch.tensor(c)) for n, (s, c) in mine.items()}, dist.group.WORLD), \
            reduce_maxima({n: torch.tensor(s) for n, (s, _) in mine.items()}, dist.group.WORLD)
    except ValueError as error:
        return str(error)


def test_metrics_do_not_depend_on_who_holds_the_tokens(pool):
    own = [{"a": (1.0, 1.0), "b": (5.0, 10.0)}, {"b": (1.0, 2.0), "a": (8.0, 2.0)}, {"a": (0.0, 0.0), "b": (0.0, 0.0)}]
    assert pool.run(_metrics_case, own, ranks=3) == [({"a": 3.0, "b": 0.5}, {"a": 8.0, "b": 5.0})] * 3
    nothing = torch.tensor(0.0)
    assert reduce_means({}) == {} == reduce_means({"a": (nothing, nothing)}) == reduce_maxima({"a": torch.tensor(-math.inf)})


@pytest.mark.parametrize("other", [{"a": (1.0, 1.0), "c": (1.0, 1.0)}, {"a": (1.0, 1.0)}, {}])
def test_unequal_metrics_are_refused_on_every_rank(pool, other):
    for message in pool.run(_metrics_case, [{"a": (1.0, 1.0), "b": (5.0, 10.0)}, other], ranks=2, timeout=30):
        assert "other names on another rank" in message
