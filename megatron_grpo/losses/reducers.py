"""Reducers: how token losses become one number.

Each reducer is one function that gives every token a weight, and nothing else:

    loss of the step = sum over ranks, over micro-batches, over tokens of  w_t * mask_t * loss_t

Denominators are counts of the whole optimizer step that come with the inputs, so the loss does not depend on the size or
order of micro-batches, on padding, or on which rank holds which token.
"""

from collections.abc import Callable

import torch

from ..config import LossConfig
from .inputs import LossInputs


def token_mean(x: LossInputs, c: LossConfig) -> torch.Tensor:
    """Mean over the tokens of the step: w = 1 / sum_i |y_i|. DAPO (2503.14476, eq. 8)."""
    return _per_token(x, x.seq_tokens_S.new_ones(x.num_seqs) / _count(x.counts.tokens))


def seq_mean_token_mean(x: LossInputs, c: LossConfig) -> torch.Tensor:
    """Mean over sequences of the mean over tokens: w = 1 / (N |y_i|). GRPO (2402.03300, eq. 3), GSPO (2507.18071, eq. 5)."""
    return _per_token(x, 1 / (_count(x.counts.sequences) * _tokens(x.seq_tokens_S)))


def seq_mean_token_sum(x: LossInputs, c: LossConfig) -> torch.Tensor:
    """Mean over sequences of the sum over tokens: w = 1 / N."""
    return _per_token(x, x.seq_tokens_S.new_ones(x.num_seqs) / _count(x.counts.sequences))


def seq_mean_token_sum_norm(x: LossInputs, c: LossConfig) -> torch.Tensor:
    """Sum over tokens over a fixed length L: w = 1 / (N L). Dr.GRPO (2503.20783, section 3.2)."""
    if not c.loss_norm_length:
        raise ValueError("--reducer seq_mean_token_sum_norm divides by a fixed length: give it with --loss-norm-length")
    return _per_token(x, x.seq_tokens_S.new_ones(x.num_seqs) / (_count(x.counts.sequences) * c.loss_norm_length))


def rollout_mean(x: LossInputs, c: LossConfig) -> torch.Tensor:
    """Mean over rollouts of the mean over the tokens of all samples cut from one rollout: w = 1 / (M |rollout_i|)."""
    return _per_token(x, 1 / (_count(x.counts.rollouts) * _tokens(x.rollout_tokens_S)))


def prompt_mean(x: LossInputs, c: LossConfig) -> torch.Tensor:
    """Mean over prompts of the mean over the tokens of all responses to one prompt: w = 1 / (P |group_i|)."""
    return _per_token(x, 1 / (_count(x.counts.prompts) * _tokens(x.prompt_tokens_S)))


Reducer = Callable[[LossInputs, LossConfig], torch.Tensor]

REDUCERS: dict[str, Reducer] = dict(
    token_mean=token_mean, seq_mean_token_mean=seq_mean_token_mean, seq_mean_token_sum=seq_mean_token_sum,
    seq_mean_token_sum_norm=seq_mean_token_sum_norm, rollout_mean=rollout_mean, prompt_mean=prompt_mean)


def _per_token(x: LossInputs, weight_S: torch.Tensor) -> torch.Tensor:
    return weight_S.to(x.logp_T.dtype)[x.seq_T]


def _count(n: float) -> float:
    """A step without a single token has loss 0, not 0/0."""
    return n if n > 0 else 1.0


def _tokens(tokens_S: torch.Tensor) -> torch.Tensor:
    """A fully masked sequence has no token that the weight would reach; keep the weight finite."""
    return torch.where(tokens_S > 0, tokens_S, 1.0)
