"""Random micro-batches, and what every test of the losses does with them."""

from dataclasses import replace
from types import SimpleNamespace

import torch

from megatron_grpo.config import CorrectionConfig, KLConfig, LossConfig
from megatron_grpo.losses.inputs import LossInputs, StepCounts
from megatron_grpo.losses.policy_loss import policy_loss

TOKEN_FIELDS = ("logp_T", "old_logp_T", "advantage_T", "mask_T", "seq_T", "rollout_logp_T", "ref_logp_T", "entropy_T", "position_T",
                "weight_T")
SEQUENCE_FIELDS = ("seq_tokens_S", "rollout_tokens_S", "prompt_tokens_S")


def config(kl: dict | None = None, correction: dict | None = None, **loss):
    """What policy_loss wants of a config."""
    return SimpleNamespace(loss=LossConfig(**loss), kl=KLConfig(**kl or {}), correction=CorrectionConfig(**correction or {}))


def row(logp, old, advantage, **fields) -> LossInputs:
    """One sequence, every token masked in, alone in its step."""
    logp_T = torch.tensor(logp, dtype=torch.float64).requires_grad_()
    n = len(logp)
    return batch([n], logp_T=logp_T, old_logp_T=torch.tensor(old, dtype=torch.float64),
                 advantage_T=torch.tensor([advantage] * n if isinstance(advantage, float) else advantage, dtype=torch.float64),
                 mask_T=torch.ones(n, dtype=torch.bool), **fields)


def batch(lengths, *, logp_T, old_logp_T, advantage_T, mask_T, **fields) -> LossInputs:
    """Sequences one after the other; counts are those of these sequences, a rollout and a prompt each."""
    seq_T = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    tokens_S = torch.zeros(len(lengths), dtype=logp_T.dtype).index_add(0, seq_T, mask_T.to(logp_T.dtype))
    with_tokens = float((tokens_S > 0).sum())
    return LossInputs(logp_T=logp_T, old_logp_T=old_logp_T, advantage_T=advantage_T, mask_T=mask_T, seq_T=seq_T, num_seqs=len(lengths),
                      counts=StepCounts(float(tokens_S.sum()), with_tokens, with_tokens, with_tokens), seq_tokens_S=tokens_S,
                      rollout_tokens_S=tokens_S, prompt_tokens_S=tokens_S, **fields)


def random_batch(lengths, seed: int = 0, spread: float = 0.3, dtype=torch.float64, masked: float = 0.25) -> LossInputs:
    """Every stream filled; one advantage a sequence; siblings 0 and 1 share a rollout and a prompt."""
    g = torch.Generator().manual_seed(seed)
    n = sum(lengths)

    def normal(scale=1.0):
        return (torch.randn(n, generator=g, dtype=torch.float64) * scale).to(dtype)

    old_T = -(torch.rand(n, generator=g, dtype=torch.float64) * 2 + 0.05).to(dtype)
    advantage_S = torch.randn(len(lengths), generator=g, dtype=torch.float64).to(dtype)
    x = batch(lengths, logp_T=(old_T + normal(spread)).clamp(max=-1e-3).requires_grad_(), old_logp_T=old_T,
              advantage_T=advantage_S.repeat_interleave(torch.tensor(lengths)),
              mask_T=torch.rand(n, generator=g) >= masked, rollout_logp_T=old_T + normal(spread), ref_logp_T=old_T + normal(spread),
              entropy_T=torch.rand(n, generator=g, dtype=torch.float64).to(dtype).requires_grad_())
    if len(lengths) > 1:
        shared = x.seq_tokens_S.clone()
        shared[:2] = shared[:2].sum()
        groups = float((shared > 0).sum()) - float(min(x.seq_tokens_S[:2]) > 0 or (shared[0] > 0))
        x = replace(x, rollout_tokens_S=shared, prompt_tokens_S=shared, counts=replace(x.counts, rollouts=groups, prompts=groups))
    return x


def leaf(x: LossInputs) -> LossInputs:
    """The same inputs with fresh leaves where the gradient goes."""
    entropy_T = None if x.entropy_T is None else x.entropy_T.detach().clone().requires_grad_()
    return replace(x, logp_T=x.logp_T.detach().clone().requires_grad_(), entropy_T=entropy_T)


def run(x: LossInputs, cfg, hooks=None):
    """(loss, gradient to logp_T, output)."""
    x = leaf(x)
    out = policy_loss(x, cfg, hooks)
    return out.loss.detach(), torch.autograd.grad(out.loss, x.logp_T)[0], out


def select(x: LossInputs, tokens: torch.Tensor, sequences: torch.Tensor | None = None) -> LossInputs:
    """The tokens of these indices; with `sequences`, also only these sequences, renumbered in this order."""
    fields = {name: None if getattr(x, name) is None else getattr(x, name).detach()[tokens] for name in TOKEN_FIELDS}
    if sequences is not None:
        number = torch.full((x.num_seqs,), -1)
        number[sequences] = torch.arange(len(sequences))
        fields["seq_T"] = number[fields["seq_T"]]
        fields |= {name: getattr(x, name)[sequences] for name in SEQUENCE_FIELDS} | dict(num_seqs=len(sequences))
    return leaf(replace(x, **fields))
