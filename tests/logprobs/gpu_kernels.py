"""The compiled kernels against float64 on a GPU. Not collected by pytest on its own: scripts/gpu_check.sh names this file."""

import pytest
import torch

from benchmarks.meter import peak_bytes
from megatron_grpo.logprobs import vocab_parallel_logprob
from tests.logprobs.test_vocab_parallel import CASES, expected, make, ours

DEVICE = torch.device("cuda")


def on_device(logits, target, weights, kwargs):
    if "keep_mask" in kwargs:
        kwargs = kwargs | dict(keep_mask=kwargs["keep_mask"].to(DEVICE))
    return logits.to(DEVICE), target.to(DEVICE), weights.to(DEVICE), kwargs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [48, 4096, 12345, 151936])
@pytest.mark.parametrize("name", CASES)
def test_against_float64(name, width, dtype):
    case = CASES[name] | (dict(vocab_size=width - 267) if "vocab_size" in CASES[name] and width > 300 else {})
    if dtype == torch.float16 and name == "huge":
        case["offset"] = 1e3                                # 1e4 leaves no digits below 8
    logits, target, weights, kwargs = on_device(*make(**case, tokens=37, width=width))
    got, want = ours(logits, target, weights, dtype, kernel=True, **kwargs), expected(logits.to(dtype).double(), target, weights, **kwargs)
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        tolerance = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}[dtype] if i > 1 else 1e-5
        torch.testing.assert_close(g.double(), w, rtol=tolerance, atol=2e-5 if i < 2 else 1e-5)


def test_many_rows():
    """Over 65,536 rows, and over 2^31 logits: the grid's and the index's limits."""
    logits = torch.zeros(70_000, 32_768, dtype=torch.bfloat16, device=DEVICE)
    logits[-1, 5] = 3.0
    logits.requires_grad_()
    target = torch.full((len(logits),), 5, device=DEVICE)
    logp, _ = vocab_parallel_logprob(logits.view_as(logits), target, inplace_grad=True)
    rest = torch.tensor(32767.0)
    first, last = -(rest + 1).log(), 3 - (rest + torch.tensor(3.0).exp()).log()
    torch.testing.assert_close(logp[[0, -1]].cpu(), torch.stack([first, last]), rtol=1e-5, atol=1e-5)
    logp[-1].backward()
    torch.testing.assert_close(logits.detach()[-1, 5].float().cpu(), 1 - last.exp(), rtol=4e-3, atol=0)
    assert logits.detach()[:-1].abs().max() == 0


def test_memory_and_no_synchronisation():
    """Extra memory is a few numbers a token, and nothing waits for the device."""
    source = torch.randn(4096, 32_000, device=DEVICE).bfloat16().requires_grad_()
    target = torch.randint(0, 32_000, (4096,), device=DEVICE)

    def step():
        logits = source.view_as(source)
        logp, entropy = vocab_parallel_logprob(logits, target, with_entropy=True, entropy_grad=True)
        torch.autograd.grad(logp.sum() + entropy.sum(), logits)

    step()
    extra = peak_bytes(step, DEVICE) - source.numel() * 2
    assert extra < 0.01 * 4 * source.numel()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
