"""Megatron's distributed set-up, the model and its optimizer, as Megatron's own training script makes them."""

import os
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from ..settings import ConfigError
from ..weights import LiveModel, ModelGroups, has_weights, load_hf_checkpoint, save_hf_checkpoint
from ..weights.hf_config import read_hf_config
from . import platform_cpu
from .resharding import any_number_of_optimizers


@dataclass
class Trained:
    """The model chunks of this rank with their optimizer and schedule."""

    args: Any
    model: list
    optimizer: Any
    scheduler: Any
    config: Any          # Megatron's TransformerConfig
    hf_config: dict = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        return next(self.model[0].parameters()).device

    @property
    def live(self) -> LiveModel:
        """The weights by their Hugging Face names."""
        from megatron.core import mpu
        return LiveModel.from_config(self.model, self.hf_config, ModelGroups.from_mpu(mpu))

    @contextmanager
    def whole_parameters(self):
        """Inside, every rank's parameters are the newest: --overlap-param-gather leaves them stale until the next forward."""
        from megatron.training.training import disable_forward_pre_hook, enable_forward_pre_hook, should_disable_forward_pre_hook

        if not should_disable_forward_pre_hook(self.args):
            yield
            return
        disable_forward_pre_hook(self.model, self.optimizer)
        try:
            yield
        finally:
            enable_forward_pre_hook(self.model)

    def load_hf(self, path: str) -> None:
        """Load Hugging Face weights into the model and the optimizer's copies of them."""
        load_hf_checkpoint(self.live, path)
        self.optimizer.reload_model_params()

    def save_hf(self, path: str) -> None:
        """Write a Hugging Face directory with config and tokenizer."""
        weights = self.args.grpo.weights
        with self.whole_parameters():
            save_hf_checkpoint(self.live, path, self.hf_config, weights.weight_sync_bucket_size, tokenizer_from=weights.hf_checkpoint)


def check_launched() -> None:
    """Refuse a process that nobody told which rank it is.

    Raises:
        ConfigError: neither process groups nor the variables of a launcher are there.
    """
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing and not dist.is_initialized():
        raise ConfigError(f"start with torchrun --nproc-per-node N -m ..., for one rank too: {', '.join(missing)} "
                          f"{'is' if len(missing) == 1 else 'are'} not set")


def initialize(args) -> None:
    """Process groups, seeds and Megatron's global state."""
    from megatron.core.datasets import utils as dataset_utils
    from megatron.training.initialize import initialize_megatron

    check_launched()
    dataset_utils.compile_helpers = lambda: None    # an index builder for pre-training data; the wheel cannot compile it
    initialize_megatron(allow_no_cuda=platform_cpu.installed())


def build(args, model_provider) -> Trained:
    """Model, optimizer and schedule, with the weights of --load or else of --hf-checkpoint; sets `args.iteration`.

    Raises:
        ConfigError: the checkpoint's schedule does not fit the flags.
    """
    from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
    from megatron.core.enums import ModelType
    from megatron.core.utils import get_model_config
    from megatron.training.checkpointing import checkpoint_exists
    from megatron.training.training import setup_model_and_optimizer

    try:
        with any_number_of_optimizers():
            model, optimizer, scheduler = setup_model_and_optimizer(ModelType.encoder_or_decoder, model_provider_func=model_provider)
    except AssertionError as error:
        if not str(error).startswith("OptimizerParamScheduler:"):
            raise
        raise ConfigError(f"--load {args.load}: its schedule is not that of these flags ({error}): to go on with that of the flags, e.g. to "
                          "another --train-iters, give --override-opt-param-scheduler; with its own, --use-checkpoint-opt-param-scheduler"
                          ) from error
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
    hf = args.grpo.weights.hf_checkpoint
    trained = Trained(args, model, optimizer, scheduler, config, read_hf_config(hf))
    loaded = any(path and checkpoint_exists(path) for path in (args.load, args.pretrained_checkpoint))
    if not loaded and has_weights(hf):
        trained.load_hf(hf)
    return trained


def is_last_stage() -> bool:
    """Whether this rank holds the output layer, and with it the log-probs and losses."""
    from megatron.core import mpu
    return mpu.get_pipeline_model_parallel_rank() == mpu.get_pipeline_model_parallel_world_size() - 1


def is_logger() -> bool:
    """The rank that writes: the last one, where Megatron keeps its TensorBoard and W&B writers."""
    return dist.get_rank() == dist.get_world_size() - 1
