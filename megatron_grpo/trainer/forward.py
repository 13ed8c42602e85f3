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
  (L_r * N, n_r, metrics) with n_r the positions of this rank, trained or not, and N their sum over the step. Routers multiply
  their auxiliary losses by the positions that they see, so with n_r the trained tokens these losses would weigh N / n too much.
"""

from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from ..logprobs import vocab_parallel_logprob
from ..losses.policy_loss import policy_loss
from ..routing.mismatch import compare
from .microbatch import MicroBatch


@dataclass
class StepContext:
    """What one pass over the micro-batches of an optimizer step needs; the same object on every micro-batch.

    Attributes:
        algorithm: GRPOConfig.
        hooks: the user's callables (hooks.Hooks).
        target: the MicroBatch field that a log-prob pass fills ("old_logp_T", "ref_logp_T"); None in the policy pass.
        replay: the bound RouterReplay, or None.
        routing: "native", "record" or "replay": what the routers do in this pass (RoutingConfig.mode).
        store: the experts that the old-log-prob pass used, for the policy passes of the same rollout.
        outputs: LossOutput of each micro-batch of a policy pass, on the last pipeline stage.
        mismatches: RouteMismatch of each micro-batch and model chunk of an old-log-prob pass that replays.
    """

    algorithm: Any
    hooks: Any
    vocab_size: int
    temperature: float
    tp_group: Any
    cp_group: Any
    dp_size: int
    num_microbatches: int = 1
    per_token_loss: bool = False
    positions: torch.Tensor | None = None       # N of --calculate-per-token-loss
    recompute_loss: bool = False
    inplace_grad: bool = True
    target: str | None = None
    replay: Any = None
    routing: str = "native"
    store: Any = None               # RouteStore
    outputs: list = field(default_factory=list)
    mismatches: list = field(default_factory=list)


def forward_step(data_iterator, model):
    """Run the model on the next micro-batch; Megatron's `forward_step_func`."""
    from megatron.core.utils import get_model_config

    mb: MicroBatch = next(data_iterator)
    context: StepContext = mb.context
    config = get_model_config(model)
    # Megatron's half-precision wrapper would copy the logits to float32: twice their memory, and not one more digit
    more = {"fp32_output": False} if config.bf16 or config.fp16 else {}
    with _routed(context, mb):
        output = model(mb.tokens, mb.positions, None, packed_seq_params=mb.packed_seq_params, **more)
    return output, partial(logprob_function if context.target else loss_function, mb)


@contextmanager
def _routed(context: StepContext, mb: MicroBatch):
    """The forward of one model chunk with its experts recorded or replayed."""
    if context.replay is None:
        yield
        return
    first = context.target is not None          # before the policy passes: what is used here is what they replay
    record, routes = first and context.routing != "native", None
    if context.routing == "replay":
        routes = mb.routes if first else context.store.get(mb.key)
    with context.replay.forward(routes, record=record, compare=record and routes is not None, unrouted_T=mb.unrouted_T) as capture:
        yield
    if record:
        context.store.put(mb.key, capture.routes)
        if routes is not None:
            context.mismatches.append((mb, compare(routes, capture.own, mb.unrouted_T)))


def logits_to_logprobs(mb: MicroBatch, logits: torch.Tensor, with_entropy: bool, entropy_grad: bool = False):
    """([T] log-prob of each position's label, [T] entropy or None), float32 or better, under the rollout temperature."""
    context = mb.context
    return vocab_parallel_logprob(
        logits.reshape(-1, logits.shape[-1]), mb.labels_T, tp_group=context.tp_group, vocab_size=context.vocab_size,
        temperature=context.temperature, with_entropy=with_entropy, entropy_grad=entropy_grad, keep_mask=mb.keep_mask,
        inplace_grad=context.inplace_grad and torch.is_grad_enabled())


def logprob_function(mb: MicroBatch, logits: torch.Tensor, non_loss_data: bool = True):
    """Store the pass's log-probs on the micro-batch; nothing is returned to the schedule."""
    logp_T, _ = logits_to_logprobs(mb, logits, with_entropy=False)
    setattr(mb, mb.context.target, logp_T.detach())


def loss_function(mb: MicroBatch, logits: torch.Tensor):
    """The policy loss of one micro-batch, scaled for Megatron (see the module's text)."""
    context = mb.context
    if context.recompute_loss:
        mb.logp_T, out = checkpoint(_policy_loss, mb, logits, use_reentrant=False)
    else:
        mb.logp_T, out = _policy_loss(mb, logits)
    context.outputs.append(replace(out, loss=out.loss.detach()))     # the graph would keep what its functions hold until the step's end
    if context.per_token_loss:
        return out.loss * context.positions, mb.mask_T.new_full((), len(mb.mask_T), dtype=torch.int), {}
    return out.loss * (context.num_microbatches * context.dp_size), {}


def _policy_loss(mb: MicroBatch, logits: torch.Tensor):
    """(detached log-probs, LossOutput)"""
    context = mb.context
    logp_T, entropy_T = logits_to_logprobs(mb, logits, with_entropy=True, entropy_grad=context.algorithm.loss.entropy_coef != 0)
    return logp_T.detach(), policy_loss(mb.loss_inputs(logp_T, entropy_T, context.cp_group), context.algorithm, context.hooks)
