"""One optimizer step, and the log-prob passes before it, through Megatron's own schedules."""

import math
import sys
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from tqdm import tqdm

from .forward import StepContext, forward_step
from .microbatch import MicroBatch


@dataclass
class StepResult:
    """What an optimizer step did; `outputs` are the LossOutputs of this rank's micro-batches (last pipeline stage only)."""

    grad_norm: float
    learning_rate: float
    skipped: bool
    outputs: list


def data_iterators(model: list, microbatches: list[MicroBatch], context: StepContext, bar: str = ""):
    """What Megatron's schedules read: the same micro-batches for each virtual stage, and rewindable for Megatron's reruns.

    Args:
        bar: title of a progress bar on the first rank's terminal; none when empty.
    """
    from megatron.core.rerun_state_machine import RerunDataIterator

    for mb in microbatches:
        mb.context = context
    hidden = not bar or dist.get_rank() != 0 or not sys.stderr.isatty()
    shown = tqdm(microbatches, desc=bar, unit="micro-batch", leave=False, disable=hidden)
    iterators = [RerunDataIterator(iter(shown if i == 0 else microbatches)) for i in range(len(model))]
    return iterators if len(model) > 1 else iterators[0]


def run_schedule(model: list, iterators, context: StepContext, forward_only: bool) -> None:
    """All micro-batches through the model under the job's pipeline schedule."""
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.training import get_args

    args = get_args()
    with torch.no_grad() if forward_only else torch.enable_grad():
        get_forward_backward_func()(
            forward_step_func=forward_step, data_iterator=iterators, model=model, num_microbatches=context.num_microbatches,
            seq_length=args.seq_length, micro_batch_size=args.micro_batch_size,
            decoder_seq_length=args.seq_length, forward_only=forward_only, collect_non_loss_data=forward_only)


def logprob_pass(model: list, microbatches: list[MicroBatch], context: StepContext, target: str, routing: str = "native") -> None:
    """Fill `target` ("old_logp_T" or "ref_logp_T") of every micro-batch on the last pipeline stage, without gradient."""
    context = replace(context, target=target, routing=routing, num_microbatches=len(microbatches))
    run_schedule(model, data_iterators(model, microbatches, context), context, forward_only=True)


def optimizer_step(model: list, optimizer, scheduler, microbatches: list[MicroBatch], context: StepContext, increment: int,
                   routing: str = "native") -> StepResult:
    """Forward, backward, all gradient reductions, and one update of the weights.

    Args:
        increment: samples by which the learning-rate schedule advances.

    Raises:
        FloatingPointError: the gradient norm is not finite, and no loss scaler skipped the step.
    """
    from megatron.core.rerun_state_machine import get_rerun_state_machine

    context = replace(context, target=None, routing=routing, num_microbatches=len(microbatches), outputs=[],
                      positions=_positions(microbatches) if context.per_token_loss else None)
    iterators, machine = data_iterators(model, microbatches, context, "train"), get_rerun_state_machine()
    while machine.should_run_forward_backward(iterators):      # again when Megatron doubts a result (--rerun-mode)
        context.outputs.clear()
        for chunk in model:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        run_schedule(model, iterators, context, forward_only=False)
    if (stop := machine.should_checkpoint_and_exit())[1]:
        raise RuntimeError(f"Megatron's rerun state machine asks to stop with code {stop[2]}: see its report above")
    updated, grad_norm = _agree(*optimizer.step()[:2])
    if updated and not math.isfinite(grad_norm):
        raise FloatingPointError(f"the gradient norm is {grad_norm}: see the loss and mismatch metrics of this step")
    if updated:
        scheduler.step(increment=increment)
    rate = next((g["lr"] for g in optimizer.param_groups if not g.get("is_decoupled_lr")), 0.0)
    return StepResult(grad_norm=float(grad_norm or 0.0), learning_rate=float(rate), skipped=not updated, outputs=context.outputs)


def _positions(microbatches: list[MicroBatch]) -> torch.Tensor:
    """Of all micro-batches on all data-parallel and context-parallel ranks, padding included."""
    from megatron.core import mpu

    total = torch.tensor(sum(len(mb.mask_T) for mb in microbatches), device=microbatches[0].mask_T.device)
    dist.all_reduce(total, group=mpu.get_data_parallel_group(with_context_parallel=True))
    return total


def _agree(updated, grad_norm):
    """Stages without trainable parameters report nothing: take the model-parallel group's word."""
    from megatron.core import mpu
    from megatron.training.utils import logical_and_across_model_parallel_group, reduce_max_stat_across_model_parallel_group

    group = mpu.get_model_parallel_group()
    return logical_and_across_model_parallel_group(updated, group=group), reduce_max_stat_across_model_parallel_group(grad_norm, group=group)
