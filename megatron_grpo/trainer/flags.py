"""The command line: every Megatron flag as it is, plus the fields of our settings classes.

    args = parse_args()                 # Megatron's namespace, validated, with `args.grpo` = Settings

A Megatron script of your own passes `add_grpo_args` as its extra_args_provider and calls `resolve(args)` afterwards.
"""

import argparse
import difflib
import importlib.util
import math
import os
import re
import sys
import traceback
from dataclasses import dataclass
from functools import partial
from typing import NoReturn

from ..algorithms import AlgorithmChoice, resolve_algorithm
from ..config import AdvantageConfig, CorrectionConfig, GRPOConfig, KLConfig, LossConfig, RewardConfig
from ..hooks import HookConfig
from ..parallel.config import PackingConfig
from ..rewards.config import VerifierConfig
from ..rollout.config import EngineConfig, PromptConfig, RolloutConfig
from ..routing.config import RoutingConfig
from ..settings import ConfigError, add_arguments, from_namespace, given
from ..weights.config import WeightsConfig
from . import checkpoint, megatron_rl, platform_cpu
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


# What argparse formats in a help text, or a % of its own, of which some of Megatron's are not written %%.
FORMATS = re.compile(r"%%|%\(\w+\)[-+ #0-9.]*[a-z]|%")


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


# Sections that are checked one by one; the algorithm's are resolved together with its recipe (algorithms.py).
SECTIONS: dict[str, type] = dict(trainer=TrainerConfig, hooks=HookConfig, prompts=PromptConfig, rollout=RolloutConfig, verifier=VerifierConfig,
                                 engine=EngineConfig, weights=WeightsConfig, routing=RoutingConfig, packing=PackingConfig)

# A warm start is the plain REINFORCE loss with advantage 1 on the labels: the mean negative log-likelihood of their tokens.
SUPERVISED = GRPOConfig(advantage=AdvantageConfig(advantage_estimator="reinforce"),
                        loss=LossConfig(ratio="none", surrogate="reinforce", reducer="token_mean"))


def add_grpo_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Our flags; Megatron's `extra_args_provider`. Also makes the parser's --help work and its errors short."""
    for action in parser._actions:
        action.help = action.help and FORMATS.sub(lambda found: found[0] if len(found[0]) > 1 else "%%", action.help)
    setattr(parser, "error", partial(_error, parser))       # noqa: B010  (mypy refuses the assignment)
    for title, classes in GROUPS.items():
        add_arguments(parser, title, *classes)
    if given("--platform", sys.argv) == "cpu":
        platform_cpu.set_defaults(parser)
    return parser


def make_parser() -> argparse.ArgumentParser:
    """A parser of every flag of Megatron and ours."""
    from megatron.training.arguments import add_megatron_arguments
    return add_grpo_args(add_megatron_arguments(argparse.ArgumentParser("megatron_grpo", allow_abbrev=False)))


def _error(parser: argparse.ArgumentParser, message: str) -> NoReturn:
    """argparse's error without its usage, which is 800 lines here, and with the flags that resemble the unknown ones."""
    known = parser._option_string_actions
    unknown = [word.split("=", 1)[0] for word in message.split() if word.startswith("--")] if message.startswith("unrecognized") else []
    near = [f"; for {word}, did you mean {' or '.join(names)}?" for word in unknown if (names := difflib.get_close_matches(word, known))]
    parser.exit(2, f"megatron_grpo: rank {os.environ.get('RANK', '0')}: {message}{''.join(near)} (--help lists every flag)\n")


def parse_args(argv: list[str] | None = None, extra_args_provider=add_grpo_args) -> argparse.Namespace:
    """Parse and validate the whole command line and install what it asks for; sets Megatron's global variables.

    Raises:
        ConfigError: settings that cannot work, all of them.
    """
    args = read_args(argv, extra_args_provider)
    args.grpo = resolve(args)
    check_installation(args)
    validate(args)
    from megatron.training.global_vars import set_global_variables
    set_global_variables(args, build_tokenizer=False)      # prompts are tokenized by the Hugging Face tokenizer
    return args


def read_args(argv: list[str] | None = None, extra_args_provider=add_grpo_args) -> argparse.Namespace:
    """Every flag as given, nothing checked yet but that it exists; installs the platform that it asks for."""
    if argv is not None:
        sys.argv[1:] = argv
    if given("--platform", sys.argv) == "cpu":
        platform_cpu.install(force="--force-platform-cpu" in sys.argv)
    from megatron.training.arguments import parse_args as megatron_parse_args
    return megatron_parse_args(extra_args_provider)


def check_installation(args: argparse.Namespace) -> None:
    """Refuse what the installed packages cannot run on a GPU, before anything slow starts; a dry run needs none of them.

    Raises:
        ConfigError: names the package and the flag.
    """
    if args.grpo.trainer.platform == "cpu":
        return
    if args.transformer_impl == "transformer_engine" and importlib.util.find_spec("transformer_engine") is None:
        raise ConfigError("--transformer-impl transformer_engine: Transformer Engine is not installed; pip install megatron-grpo[cuda]")
    if args.gradient_accumulation_fusion and importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is None:
        raise ConfigError("Megatron fuses gradient accumulation by an extension of NVIDIA's apex, which is not installed: build apex with its CUDA "
                          "extensions, or give --no-gradient-accumulation-fusion")


def validate(args: argparse.Namespace) -> argparse.Namespace:
    """Megatron's own validation of `args`, which also derives flags from others.

    Raises:
        ConfigError: what Megatron's assertion says.
    """
    from megatron.training.arguments import validate_args
    from megatron.training.vocab_utils import calculate_padded_vocab_size
    try:
        validate_args(args)
    except AssertionError as error:
        failed = traceback.extract_tb(error.__traceback__)[-1].line
        raise ConfigError(f"Megatron refuses the flags: {error if str(error) else failed}") from error
    args.padded_vocab_size = calculate_padded_vocab_size(args.vocab_size, args.make_vocab_size_divisible_by,
                                                         args.tensor_model_parallel_size, logging_enabled=False)
    # Micro-batches differ in length, and stages must tell each other; Megatron's validation sets it to False.
    args.variable_seq_lengths = args.pipeline_model_parallel_size > 1
    return args


def resolve(args: argparse.Namespace) -> Settings:
    """Settings from parsed flags; also fills the Megatron flags that follow from ours.

    Raises:
        ConfigError: settings, or pairs of settings, that cannot work; one line each.
    """
    refused: list[str] = []

    def attempt(call, *needs):
        """call(*needs), unless a need was refused already."""
        if any(need is None for need in needs):
            return None
        try:
            return call(*needs)
        except ConfigError as error:
            refused.append(str(error))

    parts = {name: attempt(partial(from_namespace, cls, args)) for name, cls in SECTIONS.items()}
    trainer, weights, routing, rollout = (parts[name] for name in ("trainer", "weights", "routing", "rollout"))
    supervised = trainer is not None and trainer.loss_type == "sft"
    parts["algorithm"] = SUPERVISED if supervised else attempt(partial(resolve_algorithm, args))
    attempt(partial(_model_from_hf, args), weights)
    if trainer is not None and trainer.platform == "cpu":
        attempt(partial(platform_cpu.check, args))
    if supervised and routing is not None and routing.replay:
        refused.append("--loss-type sft samples nothing, so there are no experts to replay: drop --use-routing-replay and "
                       "--use-rollout-routing-replay")
    if routing is not None and routing.use_rollout_routing_replay and weights is not None and weights.weight_sync_pause == "in_place":
        refused.append("--weight-sync-pause in_place keeps the engine's prefix cache over a weight update, and with it routes of the old "
                       "weights, which --use-rollout-routing-replay would replay: give abort, drain or retract")
    attempt(_labels, trainer, parts["prompts"], parts["verifier"])
    attempt(partial(megatron_rl.refuse, sys.argv[1:]))
    attempt(partial(_batch_size, args), trainer, rollout)
    attempt(partial(_intervals, args), trainer)
    attempt(partial(_unequal_lengths, args))
    attempt(partial(_patience, args), weights)
    attempt(partial(_plain_parameters, args))
    attempt(partial(checkpoint.check, args), trainer)
    if refused:
        raise ConfigError("\n".join(refused))
    if routing.replay:
        args.moe_enable_routing_replay = True   # routers then ask a replay object for their experts
    return Settings(**parts)


def _model_from_hf(args, weights: WeightsConfig) -> None:
    """Model flags from --hf-checkpoint: filled where not given, refused where they contradict it."""
    if weights.hf_checkpoint is None:
        raise ConfigError("--hf-checkpoint is needed: a Hugging Face directory with config.json and the tokenizer; the model's flags "
                          "are read from it and the engine loads it")
    from ..weights.hf_config import apply_hf_config

    apply_hf_config(args, weights.hf_checkpoint)


def _labels(trainer: TrainerConfig, prompts: PromptConfig, verifier: VerifierConfig) -> None:
    """Prompts of a file have labels only where --label-key says so."""
    if not prompts.prompt_data or prompts.label_key is not None or trainer.load_debug_rollout_data:
        return
    compares = [name for name in verifier.rm_type if name in ("exact", "math")]
    if trainer.loss_type == "sft":
        raise ConfigError("--loss-type sft learns the labels of --prompt-data: name their column with --label-key")
    if compares:
        raise ConfigError(f"--rm-type {' '.join(compares)} compares the response with the label, and --prompt-data has none without "
                          "--label-key: every reward would be 0; name the column of the labels")


def _batch_size(args, trainer: TrainerConfig, rollout: RolloutConfig) -> None:
    """Megatron's --global-batch-size counts samples of an optimizer step; ours follow from the rollout."""
    steps = trainer.num_steps_per_rollout
    samples = rollout.rollout_batch_size * (rollout.n_samples_per_prompt if trainer.loss_type == "policy_loss" else 1)
    if samples % steps:
        raise ConfigError(f"a rollout of {samples} samples (--rollout-batch-size x --n-samples-per-prompt) cannot be split into "
                          f"--num-steps-per-rollout {steps} equal optimizer steps; change one of them")
    if args.global_batch_size not in (None, samples // steps):
        raise ConfigError(f"--global-batch-size {args.global_batch_size} contradicts --rollout-batch-size x --n-samples-per-prompt / "
                          f"--num-steps-per-rollout = {samples // steps}; drop it")
    args.global_batch_size = samples // steps
    args.micro_batch_size = args.micro_batch_size or 1


def _intervals(args, trainer: TrainerConfig) -> None:
    """Whatever of Megatron counts iterations counts optimizer steps, of which a rollout has several."""
    steps = trainer.num_steps_per_rollout
    if args.save and args.save_interval is None:
        args.save_interval = args.train_iters       # a checkpoint at the end, which Megatron's validation wants spelled out
    if args.train_iters is not None and args.train_iters % steps:
        raise ConfigError(f"--train-iters {args.train_iters} counts optimizer steps and must be a multiple of --num-steps-per-rollout {steps}")
    decay = args.lr_decay_iters or args.train_iters
    if decay is not None and 0 < decay <= args.lr_warmup_iters:
        raise ConfigError(f"--lr-warmup-iters {args.lr_warmup_iters} leaves no step after the warm-up: give fewer than "
                          f"{'--lr-decay-iters' if args.lr_decay_iters else '--train-iters'} {decay}")
    for name in ("save_interval", "eval_interval"):
        value = getattr(args, name)
        if value and value % steps:
            raise ConfigError(f"--{name.replace('_', '-')} {value} counts optimizer steps and must be a multiple of --num-steps-per-rollout {steps}")


def _unequal_lengths(args) -> None:
    """Micro-batches differ in length, over time and between data-parallel ranks: what in Megatron takes them for equal."""
    if args.num_experts and args.moe_token_dispatcher_type == "allgather":
        if given("--moe-token-dispatcher-type", sys.argv):
            raise ConfigError("--moe-token-dispatcher-type allgather gathers equally many tokens from every expert-parallel rank, and packed "
                              "micro-batches differ: use alltoall or flex")
        args.moe_token_dispatcher_type = "alltoall"
    flex = args.moe_token_dispatcher_type == "flex" and args.moe_flex_dispatcher_backend
    if flex == "ncclep":
        raise ConfigError("--moe-flex-dispatcher-backend ncclep sizes its buffers by the first micro-batch, and later ones may be longer: use deepep "
                          "or hybridep")
    if flex == "hybridep":
        args.moe_hybridep_pad_uneven_dispatch_inputs = True


def _plain_parameters(args) -> None:
    """Weights are loaded, published and swapped for the reference's in blocks of rows and columns."""
    for name in ("fp8_param_gather", "fp4_param_gather"):
        if getattr(args, name, False):
            raise ConfigError(f"--{name.replace('_', '-')}: parameters that are themselves quantized cannot be written in blocks, as loading and the "
                              "reference need; drop it (--fp8-format alone computes in FP8)")


def _patience(args, weights: WeightsConfig) -> None:
    """While the first rank sends a bucket to the engines, the others wait for it in the collectives of the next."""
    needed = math.ceil(weights.weight_sync_timeout / 60) + 1
    if weights.weight_sync == "disk" or args.distributed_timeout_minutes >= needed:
        return
    if given("--distributed-timeout-minutes", sys.argv):
        raise ConfigError(f"--distributed-timeout-minutes {args.distributed_timeout_minutes}: with --weight-sync distributed a collective may last "
                          f"as long as --weight-sync-timeout {weights.weight_sync_timeout} (seconds): give at least {needed}, or lower that")
    args.distributed_timeout_minutes = needed
