"""Megatron's distributed set-up, the model and its optimizer, as Megatron's own training script makes them."""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from . import platform_cpu


@dataclass
class Trained:
    """The model chunks of this rank with their optimizer and schedule."""

    model: list
    optimizer: object
    scheduler: object
    config: object          # Megatron's TransformerConfig

    @property
    def device(self) -> torch.device:
        return next(self.model[0].parameters()).device


def initialize(args) -> None:
    """Process groups, seeds and Megatron's global state."""
    from megatron.core.datasets import utils as dataset_utils
    from megatron.training.initialize import initialize_megatron

    dataset_utils.compile_helpers = lambda: None    # an index builder for pre-training data; the wheel cannot compile it
    initialize_megatron(allow_no_cuda=platform_cpu.installed())


def build(args, model_provider) -> Trained:
    """Model, optimizer and schedule; loads --load (or the Hugging Face weights) and sets `args.iteration`."""
    from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
    from megatron.core.enums import ModelType
    from megatron.core.utils import get_model_config
    from megatron.training.training import setup_model_and_optimizer

    model, optimizer, scheduler = setup_model_and_optimizer(ModelType.encoder_or_decoder, model_provider_func=model_provider)
    config = get_model_config(model[0])
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = config.finalize_model_grads_func or finalize_model_grads
    one = len(model) == 1
    if isinstance(model[0], DistributedDataParallel) and args.overlap_grad_reduce:
        config.no_sync_func = model[0].no_sync if one else [chunk.no_sync for chunk in model]
        if args.align_grad_reduce:
            config.grad_sync_func = model[0].start_grad_sync if one else [chunk.start_grad_sync for chunk in model]
    if args.overlap_param_gather and args.align_param_gather:
        config.param_sync_func = model[0].start_param_sync if one else [chunk.start_param_sync for chunk in model]
    return Trained(model, optimizer, scheduler, config)


def is_last_stage() -> bool:
    """Whether this rank holds the output layer, and with it the log-probs and losses."""
    from megatron.core import mpu
    return mpu.get_pipeline_model_parallel_rank() == mpu.get_pipeline_model_parallel_world_size() - 1


def is_logger() -> bool:
    """The rank that writes: the last one, where Megatron keeps its TensorBoard and W&B writers."""
    return dist.get_rank() == dist.get_world_size() - 1
