"""The plain softmax over whole rows: what every other implementation is tested against, and enough for small models."""

import torch

from .support import SupportMask


def reference_logprob(logits_TV: torch.Tensor, target_T: torch.Tensor, *, vocab_size: int | None = None, temperature: float = 1.0,
                      keep_mask: SupportMask | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """log pi(target) and entropy of pi = softmax(logits / temperature), by autograd, over an undivided vocabulary.

    Args:
        logits_TV: [T, V] float.
        target_T: [T] int64 in [0, vocab_size).
        vocab_size: columns from here on are padding and have probability 0; V when not given.
        temperature: > 0.
        keep_mask: the support of each position.

    Returns:
        (logp_T, entropy_T) in nats, in float64 for float64 logits and float32 otherwise.
    """
    x = logits_TV[:, :vocab_size].to(torch.promote_types(logits_TV.dtype, torch.float32)) / temperature
    if keep_mask is not None:
        keep = keep_mask.dense(0, len(x), 0, x.shape[1]).scatter(1, target_T[:, None], True)
        x = x.masked_fill(~keep, -torch.inf)
    logp = x.log_softmax(-1)
    entropy_T = -(logp.exp() * logp.masked_fill(logp == -torch.inf, 0)).sum(-1)
    return logp.gather(1, target_T[:, None]).squeeze(1), entropy_T
