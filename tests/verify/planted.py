"""Faults that trainers have had, each a patch that is planted in the ranks that take a step."""

from dataclasses import replace
from unittest import mock

from megatron_grpo.verify import step, take_steps


def factor_of_cp():
    """The loss of a rank counts once for every context-parallel rank."""
    from megatron_grpo.trainer import forward
    right = forward.loss_function

    def wrong(mb, logits):
        loss, *rest = right(mb, logits)
        return (loss * mb.context.cp_group.size(), *rest)
    return mock.patch.object(forward, "loss_function", wrong)


def whitening_over_dp_only():
    """Each context-parallel rank whitens by the mean and the variance of its own tokens."""
    from megatron.core import mpu

    from megatron_grpo.trainer import loop
    right = loop.fill_advantages
    return mock.patch.object(loop, "fill_advantages",
                             lambda *args, **groups: right(*args, **groups | dict(dp_cp_group=mpu.get_data_parallel_group())))


def returns_of_the_local_chunk():
    """Returns end where a rank's chunk ends, whatever follows on other ranks."""
    from megatron_grpo.advantages import compute
    right = compute.discounted_returns
    return mock.patch.object(compute, "discounted_returns", lambda *args, **kwargs: right(*args, **kwargs | dict(cp_group=None)))


def gather_without_gradient():
    """What a rank's loss asks of another rank's tokens is lost."""
    from megatron_grpo.parallel import collectives
    return mock.patch.object(collectives._SequenceSums, "backward", staticmethod(
        lambda ctx, grad: (grad[ctx.saved_tensors[0]], None, None, None)))


def no_auxiliary_loss_scale():
    """Auxiliary losses keep the scale 1, as if there were one micro-batch."""
    import torch
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
    right = MoEAuxLossAutoScaler.set_loss_scale
    return mock.patch.object(MoEAuxLossAutoScaler, "set_loss_scale", staticmethod(lambda scale: right(torch.ones_like(scale))))


def trained_tokens_as_divisor():
    """--calculate-per-token-loss divides by the trained tokens, and auxiliary losses were multiplied by all."""
    from megatron_grpo.trainer import forward
    right = forward.loss_function

    def wrong(mb, logits):
        loss, _, metrics = right(mb, logits)
        return loss / mb.context.positions * mb.counts.tokens, mb.mask_T.sum().int(), metrics
    return mock.patch.object(forward, "loss_function", wrong)


def two_values_per_token():
    """--calculate-per-token-loss gets the values that belong to a job without it."""
    from megatron_grpo.trainer import forward
    right = forward.loss_function

    def wrong(mb, logits):
        loss, _, metrics = right(mb, logits)
        return loss / mb.context.positions * (mb.context.num_microbatches * mb.context.dp_size), metrics
    return mock.patch.object(forward, "loss_function", wrong)


def mean_of_micro_batches():
    """The loss of the step is the mean over micro-batches of each one's mean."""
    from megatron_grpo.trainer.microbatch import MicroBatch
    right = MicroBatch.loss_inputs

    def wrong(mb, *args):
        inputs, count = right(mb, *args), mb.context.num_microbatches * mb.context.dp_size
        own = dict(tokens=float(mb.seq_tokens_S.sum()) * count, sequences=float((mb.seq_tokens_S > 0).sum()) * count)
        return replace(inputs, counts=replace(inputs.counts, **own))
    return mock.patch.object(MicroBatch, "loss_inputs", wrong)


def steps(flags, cases, faults):
    """take_steps, the fault of that name (None: none) planted in each case."""
    take, names = step._take, iter(faults)

    def with_fault(*args, **kwargs):
        name = next(names)
        if name is None:
            return take(*args, **kwargs)
        with globals()[name]():
            return take(*args, **kwargs)
    step._take = with_fault         # in a process that ends with this case
    return take_steps(flags, cases)
