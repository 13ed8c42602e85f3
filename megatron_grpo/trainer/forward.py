"""The forward step that Megatron's schedules call, and what it does with the logits.

    output, loss_function = forward_step(data_iterator, model)

`data_iterator` yields MicroBatch objects; what to do with each is in its `context`, so there is no global state and
the same forward step serves the log-prob passes and the policy pass, under any pipeline schedule.

Loss scale. `policy_loss` returns an addend L_r of this rank: the loss of the optimizer step is the sum of L_r over
micro-batches, data-parallel and context-parallel ranks. Megatron then does, with M micro-batches,

* without --calculate-per-token-loss: multiply by CP, divide by M, and average gradients over DP x CP. We return
  (L_r * M * DP, metrics): the product of all factors is 1. The 2-tuple is what Megatron scales the MoE
  auxiliary losses for.
* with --calculate-per-token-loss: sum gradients over DP x CP and divide by the summed number of tokens. We return
  (L_r * N, n_r, metrics) with n_r this rank's trained tokens and N their sum over the step.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from ..logprobs import vocab_parallel_logprob
from ..losses.inputs import LossInputs
from ..losses.policy_loss import policy_loss
from .microbatch import MicroBatch


@dataclass
class StepContext:
    """What one pass over the micro-batches of an optimizer step needs; the same object on every micro-batch.

    Attributes:
        algorithm: GRPOConfig.
        hooks: the user's callables (hooks.py).
        target: the MicroBatch field that a log-prob pass fills ("old_logp_T", "ref_logp_T"); None in the policy pass.
        replay: the RouterReplay bound to the model, or None.
        routing: "native" | "record" | "replay": what the routers do in this pass.
    """

    algorithm: Any
    hooks: Any
    vocab_size: int
    temperature: float
    tp_group: Any
    cp_group: Any
    dp_size: int
    num_microbatches: int
    per_token_loss: bool = False
    target: str | None = None
    replay: Any = None
    routing: str = "native"
    routes_recorded: Callable[[MicroBatch, Any], None] | None = None
    logprob_chunk: int = 1024
    inplace_logit_grad: bool = True
    metrics: list = field(default_factory=list)


def forward_step(data_iterator, model):
    """Run the model on the next micro-batch; Megatron's `forward_step_func`."""
    mb: MicroBatch = next(data_iterator)
    context: StepContext = mb.context
    extra = {}
    if _takes_padding_mask(model):
        extra["padding_mask"] = mb.padding_T.view(mb.tokens.shape)
    with _routing(context, mb):
        output = model(mb.tokens, mb.positions, None, packed_seq_params=mb.packed_seq_params, **extra)
    return output, partial(logprob_function if context.target else loss_function, mb)


def _routing(context: StepContext, mb: MicroBatch):
    if context.replay is None:
        return nullcontext()
    return context.replay.microbatch(mb, context)


def _takes_padding_mask(model) -> bool:
    """Expert-bias statistics and auxiliary losses leave padding out where Megatron's model takes the mask."""
    while hasattr(model, "module"):
        model = model.module
    return getattr(model, "grpo_takes_padding_mask", False)


def logits_to_logprobs(mb: MicroBatch, logits: torch.Tensor, with_entropy: bool, entropy_grad: bool = False):
    """([T] log-prob of each position's label, [T] entropy or None), float32, under the rollout temperature."""
    context = mb.context
    return vocab_parallel_logprob(
        logits.reshape(-1, logits.shape[-1]), mb.labels_T, tp_group=context.tp_group, vocab_size=context.vocab_size,
        temperature=context.temperature, with_entropy=with_entropy, entropy_grad=entropy_grad, keep_mask=mb.keep_mask,
        chunk_size=context.logprob_chunk, inplace_grad=context.inplace_logit_grad)


def logprob_function(mb: MicroBatch, logits: torch.Tensor, non_loss_data: bool = True):
    """Store the pass's log-probs on the micro-batch; nothing is returned to the schedule."""
    logp_T, _ = logits_to_logprobs(mb, logits, with_entropy=False)
    setattr(mb, mb.context.target, logp_T.detach())
    return None


def loss_function(mb: MicroBatch, logits: torch.Tensor):
    """The policy loss of one micro-batch, scaled for Megatron (see the module's text)."""
    context = mb.context
    bonus = context.algorithm.loss.entropy_coef != 0
    logp_T, entropy_T = logits_to_logprobs(mb, logits, with_entropy=True, entropy_grad=bonus)
    out = policy_loss(
        LossInputs(
            logp_T=logp_T, old_logp_T=logp_T.detach() if mb.old_logp_T is None else mb.old_logp_T, advantage_T=mb.advantage_T,
            mask_T=mb.mask_T, seq_T=mb.seq_T, num_seqs=mb.num_seqs, counts=mb.counts, seq_tokens_S=mb.seq_tokens_S,
            rollout_tokens_S=mb.rollout_tokens_S, prompt_tokens_S=mb.prompt_tokens_S, rollout_logp_T=mb.rollout_logp_T,
            ref_logp_T=mb.ref_logp_T, entropy_T=entropy_T, cp_group=context.cp_group),
        context.algorithm, context.hooks)
    context.metrics.append(out)
    if context.per_token_loss:
        num_tokens = mb.mask_T.sum().to(torch.int)
        return out.loss * max(mb.counts.tokens, 1.0), num_tokens, {}
    return out.loss * (context.num_microbatches * context.dp_size), {}
