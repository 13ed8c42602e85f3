"""The command line: every Megatron flag as it is, plus the fields of our settings classes.

    args = parse_args()                 # Megatron's namespace, validated, with `args.grpo` = Settings

A Megatron script of your own passes `add_grpo_args` as its extra_args_provider and calls `resolve(args)` afterwards.
"""

import argparse
import sys
from dataclasses import dataclass

from ..algorithms import AlgorithmChoice, resolve_algorithm
from ..config import AdvantageConfig, CorrectionConfig, GRPOConfig, KLConfig, LossConfig, RewardConfig
from ..hooks import HookConfig
from ..parallel.config import PackingConfig
from ..rewards.config import VerifierConfig
from ..rollout.config import EngineConfig, PromptConfig, RolloutConfig
from ..routing.config import RoutingConfig
from ..settings import ConfigError, add_arguments, from_namespace, given
from ..weights.config import WeightsConfig
from . import platform_cpu
from .config import TrainerConfig

GROUPS = {
    "GRPO: run": (TrainerConfig,),
    "GRPO: algorithm": (AlgorithmChoice, AdvantageConfig, LossConfig, KLConfig, CorrectionConfig, RewardConfig),
    "GRPO: hooks by import path": (HookConfig,),
    "GRPO: prompts, rollout and rewards": (PromptConfig, RolloutConfig, VerifierConfig),
    "GRPO: inference engine": (EngineConfig,),
    "GRPO: weights": (WeightsConfig,),
    "GRPO: routing replay": (RoutingConfig,),
    "GRPO: packing and layout": (PackingConfig,),
}


@dataclass(frozen=True)
class Settings:
    """All of our settings, validated one by one and against each other."""

    algorithm: GRPOConfig
    trainer: TrainerConfig
    hooks: HookConfig
    prompts: PromptConfig
    rollout: RolloutConfig
    verifier: VerifierConfig
    engine: EngineConfig
    weights: WeightsConfig
    routing: RoutingConfig
    packing: PackingConfig


# A warm start is the plain REINFORCE loss with advantage 1 on the labels: the mean negative log-likelihood of their tokens.
SUPERVISED = GRPOConfig(advantage=AdvantageConfig(advantage_estimator="reinforce"),
                        loss=LossConfig(ratio="none", surrogate="reinforce", reducer="token_mean"))


def add_grpo_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Our flags; Megatron's `extra_args_provider`."""
    for title, classes in GROUPS.items():
        add_arguments(parser, title, *classes)
    if given("--platform", sys.argv) == "cpu":
        platform_cpu.set_defaults(parser)
    return parser


def parse_args(argv: list[str] | None = None, extra_args_provider=add_grpo_args) -> argparse.Namespace:
    """Parse and validate the whole command line and install what it asks for; sets Megatron's global variables.

    Raises:
        ConfigError: a setting, or a pair of settings, that cannot work.
    """
    if argv is not None:
        sys.argv[1:] = argv
    if given("--platform", sys.argv) == "cpu":
        platform_cpu.install(force="--force-platform-cpu" in sys.argv)
    from megatron.training.arguments import parse_args as megatron_parse_args
    from megatron.training.arguments import validate_args
    from megatron.training.global_vars import set_global_variables

    args = megatron_parse_args(extra_args_provider)
    args.grpo = resolve(args)
    validate_args(args)
    from megatron.training.vocab_utils import calculate_padded_vocab_size
    args.padded_vocab_size = calculate_padded_vocab_size(args.vocab_size, args.make_vocab_size_divisible_by,
                                                         args.tensor_model_parallel_size, logging_enabled=False)
    set_global_variables(args, build_tokenizer=False)      # prompts are tokenized by the Hugging Face tokenizer
    return args


def resolve(args: argparse.Namespace) -> Settings:
    """Settings from parsed flags; also fills the Megatron flags that follow from ours.

    Raises:
        ConfigError: a setting, or a pair of settings, that cannot work.
    """
    trainer = from_namespace(TrainerConfig, args)
    settings = Settings(
        algorithm=resolve_algorithm(args) if trainer.loss_type == "policy_loss" else SUPERVISED, trainer=trainer,
        verifier=from_namespace(VerifierConfig, args), hooks=from_namespace(HookConfig, args),
        prompts=from_namespace(PromptConfig, args), rollout=from_namespace(RolloutConfig, args), engine=from_namespace(EngineConfig, args),
        weights=from_namespace(WeightsConfig, args), routing=from_namespace(RoutingConfig, args), packing=from_namespace(PackingConfig, args))
    _model_from_hf(args, settings.weights)
    if settings.trainer.platform == "cpu":
        platform_cpu.check(args)
    if trainer.loss_type == "sft" and settings.routing.replay:
        raise ConfigError("--loss-type sft samples nothing, so there are no experts to replay: drop --use-routing-replay and "
                          "--use-rollout-routing-replay")
    _batch_size(args, settings)
    _unequal_lengths(args)
    if settings.routing.use_routing_replay or settings.routing.use_rollout_routing_replay:
        args.moe_enable_routing_replay = True   # routers then ask a replay object for their experts
    return settings


def _model_from_hf(args, weights: WeightsConfig) -> None:
    """Model flags from --hf-checkpoint: filled where not given, refused where they contradict it."""
    if weights.hf_checkpoint is None:
        raise ConfigError("--hf-checkpoint is needed: a Hugging Face directory with config.json and the tokenizer; the model's flags "
                          "are read from it and the engine loads it")
    from ..weights.hf_config import apply_hf_config

    apply_hf_config(args, weights.hf_checkpoint)


def _batch_size(args, settings: Settings) -> None:
    """Megatron's --global-batch-size counts samples of an optimizer step; ours follow from the rollout."""
    rollout, steps = settings.rollout, settings.trainer.num_steps_per_rollout
    samples = rollout.rollout_batch_size * (rollout.n_samples_per_prompt if settings.trainer.loss_type == "policy_loss" else 1)
    if samples % steps:
        raise ConfigError(f"a rollout of {samples} samples (--rollout-batch-size x --n-samples-per-prompt) cannot be split into "
                          f"--num-steps-per-rollout {steps} equal optimizer steps; change one of them")
    if args.global_batch_size not in (None, samples // steps):
        raise ConfigError(f"--global-batch-size {args.global_batch_size} contradicts --rollout-batch-size x --n-samples-per-prompt / "
                          f"--num-steps-per-rollout = {samples // steps}; drop it")
    args.global_batch_size = samples // steps
    args.micro_batch_size = args.micro_batch_size or 1
    if args.save and args.save_interval is None:
        args.save_interval = args.train_iters       # a checkpoint at the end, which Megatron's validation wants spelled out
    if args.train_iters is not None and args.train_iters % steps:
        raise ConfigError(f"--train-iters {args.train_iters} counts optimizer steps and must be a multiple of --num-steps-per-rollout {steps}")
    for name in ("save_interval", "eval_interval"):
        value = getattr(args, name)
        if value and value % steps:
            raise ConfigError(f"--{name.replace('_', '-')} {value} counts optimizer steps and must be a multiple of --num-steps-per-rollout {steps}")


def _unequal_lengths(args) -> None:
    """Micro-batches differ in length, over time and between data-parallel ranks: what in Megatron takes them for equal."""
    if args.pipeline_model_parallel_size > 1:
        args.variable_seq_lengths = True
    if args.num_experts and args.moe_token_dispatcher_type == "allgather":
        if given("--moe-token-dispatcher-type", sys.argv):
            raise ConfigError("--moe-token-dispatcher-type allgather gathers equally many tokens from every expert-parallel rank, and packed "
                              "micro-batches differ: use alltoall or flex")
        args.moe_token_dispatcher_type = "alltoall"
