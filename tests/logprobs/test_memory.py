import pytest
import torch

from benchmarks.meter import peak_bytes
from megatron_grpo.logprobs import SupportMask, vocab_parallel_logprob

T, V = 512, 4096


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("dtype, keep", [(torch.float32, False), (torch.bfloat16, False), (torch.float32, True)])
def test_memory_beyond_logits_and_gradient_is_under_a_tenth(dtype, keep, inplace):
    """Of one float32 [T, V] tensor, over a forward and a backward with entropy gradient."""
    logits = torch.randn(T, V).to(dtype).requires_grad_()
    nonleaf, target = logits.view_as(logits), torch.randint(0, V, (T,))
    mask = SupportMask.from_lengths(torch.randint(0, V, (8 * T,)), torch.full((T,), 8)) if keep else None

    def step():
        logp, entropy = vocab_parallel_logprob(nonleaf, target, with_entropy=True, entropy_grad=True, keep_mask=mask, inplace_grad=inplace)
        torch.autograd.grad(logp.sum() + entropy.sum(), nonleaf)

    gradient = 0 if inplace else logits.numel() * logits.element_size()
    used = peak_bytes(step, logits.device)
    assert gradient < used < gradient + 0.1 * 4 * T * V
    if inplace:
        with torch.no_grad():
            assert nonleaf.abs().max() < 2          # the gradient, not the logits
