"""Log-probabilities and entropies of tokens from vocab-parallel logits."""

from .support import SupportMask
from .vocab_parallel import vocab_parallel_logprob

__all__ = ["SupportMask", "vocab_parallel_logprob"]
