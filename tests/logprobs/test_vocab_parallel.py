import pytest
import torch
import torch.distributed as dist

from megatron_grpo.logprobs import SupportMask, vocab_parallel_logprob
from megatron_grpo.logprobs.reference import reference_logprob

CASES = {
    "plain": dict(),
    "temperature": dict(temperature=0.7),
    "padded": dict(vocab_size=41),                              # of 48 columns
    "mostly padding": dict(vocab_size=10, temperature=1.3),     # of 4 ranks with 12 columns, three hold no token at all
    "very negative": dict(offset=-112.0),
    "huge": dict(offset=1e4),
    "wide": dict(scale=60.0),
    "support": dict(keep=True, vocab_size=41),
}


def make(offset=0.0, scale=2.0, keep=False, seed=0, tokens=13, width=48, **kwargs):
    """(logits, targets, weights of log-prob and entropy, keyword arguments); padded columns hold garbage."""
    g = torch.Generator().manual_seed(seed)
    vocab = kwargs.get("vocab_size", width)
    logits = torch.randn(tokens, width, generator=g, dtype=torch.float64) * scale + offset
    logits[:, vocab:] = torch.nan
    target = torch.randint(0, vocab, (tokens,), generator=g)
    weights = torch.randn(2, tokens, generator=g, dtype=torch.float64)
    if keep:
        lengths = torch.randint(0, 6, (tokens,), generator=g)
        kwargs["keep_mask"] = SupportMask.from_lengths(torch.randint(0, vocab, (int(lengths.sum()),), generator=g), lengths)
    return logits, target, weights, kwargs


def expected(logits, target, weights, **kwargs):
    logits = logits.clone().requires_grad_()
    logp, entropy = reference_logprob(logits, target, **kwargs)
    grads = [torch.autograd.grad(loss, logits, retain_graph=True)[0] for loss in ((logp * weights[0]).sum(), (entropy * weights[1]).sum())]
    return logp.detach(), entropy.detach(), *grads


def ours(logits, target, weights, dtype=torch.float64, **kwargs):
    leaf = logits.to(dtype, copy=True).requires_grad_()
    logp, entropy = vocab_parallel_logprob(leaf, target, with_entropy=True, entropy_grad=True, **kwargs)
    weights = weights.to(logp.dtype)
    grads = [torch.autograd.grad(loss, leaf, retain_graph=True)[0] for loss in ((logp * weights[0]).sum(), (entropy * weights[1]).sum())]
    return logp.detach(), entropy.detach(), *grads


@pytest.mark.parametrize("name", CASES)
def test_float64_is_exact(name):
    logits, target, weights, kwargs = make(**CASES[name])
    for got, want in zip(ours(logits, target, weights, **kwargs), expected(logits, target, weights, **kwargs), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 3e-6), (torch.bfloat16, 8e-3)])
@pytest.mark.parametrize("name", CASES)
def test_lower_precision(name, dtype, tolerance):
    """Outputs are float32 whatever the logits are; against float64 of the same rounded logits. A bf16 gradient is rounded at the end."""
    logits, target, weights, kwargs = make(**CASES[name])
    logits = logits.to(dtype).double()
    got, want = ours(logits, target, weights, dtype, **kwargs), expected(logits, target, weights, **kwargs)
    assert got[0].dtype == got[1].dtype == torch.float32 and got[2].dtype == dtype
    for g, w in zip(got[:2], want[:2], strict=True):
        torch.testing.assert_close(g.double(), w, rtol=2e-6, atol=3e-6)
    for g, w in zip(got[2:], want[2:], strict=True):
        torch.testing.assert_close(g.double(), w, rtol=tolerance, atol=3e-6)


def test_two_tokens_by_hand():
    """Probabilities 1/4 and 3/4, temperature 2: logits 0 and 2 log 3."""
    logits = torch.tensor([[0.0, 2 * 1.0986123]], requires_grad=True)
    logp, entropy = vocab_parallel_logprob(logits, torch.tensor([1]), temperature=2.0, with_entropy=True)
    torch.testing.assert_close(logp, torch.tensor([0.75]).log())
    torch.testing.assert_close(entropy, torch.tensor([0.5623351]))
    assert not entropy.requires_grad
    logp.sum().backward()
    torch.testing.assert_close(logits.grad, torch.tensor([[-0.125, 0.125]]))       # (1 - 3/4) / 2


def test_infinite_logits_have_no_probability():
    logits = torch.tensor([[1.0, -torch.inf, 2.0]], dtype=torch.float64)
    got = ours(logits, torch.tensor([2]), torch.ones(2, 1))
    want = ours(logits[:, [0, 2]], torch.tensor([1]), torch.ones(2, 1))
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    for g, w in zip(got[2:], want[2:], strict=True):
        assert g[0, 1] == 0 and torch.equal(g[:, [0, 2]], w)


@pytest.mark.parametrize("chunk_size", [1, 3, 1000])
def test_chunks_do_not_change_the_result(chunk_size, monkeypatch):
    monkeypatch.setattr("megatron_grpo.logprobs.chunked._chunk_rows", lambda rows, columns, limit, *_: limit)
    logits, target, weights, kwargs = make(keep=True, vocab_size=41)
    got, want = ours(logits, target, weights, chunk_size=chunk_size, **kwargs), expected(logits, target, weights, **kwargs)
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-10, atol=1e-12)


def test_gradient_in_place_is_the_same_and_safe():
    logits, target, weights, kwargs = make()
    want = ours(logits, target, weights, **kwargs)[2]
    leaf = logits.clone().requires_grad_()
    hidden = leaf * 1
    logp, _ = vocab_parallel_logprob(hidden, target, inplace_grad=True)
    loss = (logp * weights[0]).sum()
    (grad,) = torch.autograd.grad(loss, leaf, retain_graph=True)
    assert torch.equal(grad, want) and torch.equal(hidden.detach(), want)         # it lies where the logits were
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss, leaf)
    logp, _ = vocab_parallel_logprob(leaf.tanh(), target, inplace_grad=True)      # tanh needs its output in its backward
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        logp.sum().backward()
    logp, _ = vocab_parallel_logprob(leaf, target, inplace_grad=True)             # a leaf is never overwritten
    before = leaf.detach().clone()
    logp.sum().backward()
    assert torch.equal(leaf.detach(), before)


def test_nothing_needs_a_gradient():
    logits, target, _, _ = make()
    logp, entropy = vocab_parallel_logprob(logits, target)
    assert entropy is None and not logp.requires_grad
    assert vocab_parallel_logprob(logits[:0], target[:0], with_entropy=True)[1].shape == (0,)


@pytest.mark.parametrize("change, says", [
    (dict(target_T=torch.tensor([0, 5])), "targets"),
    (dict(target_T=torch.tensor([0, 5, 8])), "position 2: target 8 is not a token of a vocabulary of 8"),
    (dict(target_T=torch.tensor([0, -100, 7])), "position 1: target -100"),
    (dict(temperature=0.0), "--rollout-temperature 0.0"),
    (dict(vocab_size=9), "9 tokens does not fit"),
    (dict(entropy_grad=True), "with_entropy"),
    (dict(keep_mask=SupportMask.from_lengths(torch.tensor([1]), torch.tensor([1, 0]))), "2 positions for 3"),
])
def test_bad_input_is_named(change, says):
    with pytest.raises(ValueError, match=says):
        vocab_parallel_logprob(**(dict(logits_TV=torch.zeros(3, 8), target_T=torch.zeros(3, dtype=torch.int64)) | change))


def shard_cases(dtype):
    """All cases on this rank's columns; counts the collectives."""
    calls = []
    all_reduce = dist.all_reduce
    dist.all_reduce = lambda tensor, *args, **kwargs: (calls.append(tuple(tensor.shape)), all_reduce(tensor, *args, **kwargs))[1]
    try:
        results = {}
        for name, case in CASES.items():
            logits, target, weights, kwargs = make(**case)
            own = logits.chunk(dist.get_world_size(), 1)[dist.get_rank()]
            results[name] = ours(own, target, weights, dtype, tp_group=dist.group.WORLD, **kwargs)
        return results, calls
    finally:
        dist.all_reduce = all_reduce


@pytest.mark.parametrize("ranks", [2, 4])
def test_tensor_parallel_ranks_agree_with_one(pool, ranks):
    results = pool.run(shard_cases, torch.float64, ranks=ranks)
    for _, calls in results:
        assert calls == [(13,), (3, 13)] * len(CASES)            # two small collectives, none in the backward
    for name, case in CASES.items():
        logits, target, weights, kwargs = make(**case)
        want = expected(logits, target, weights, **kwargs)
        got = [r[0][name] for r in results]
        for own in got:
            torch.testing.assert_close(own[:2], want[:2], rtol=1e-10, atol=1e-11)
        for i in (2, 3):
            torch.testing.assert_close(torch.cat([own[i] for own in got], 1), want[i], rtol=1e-10, atol=1e-11)
