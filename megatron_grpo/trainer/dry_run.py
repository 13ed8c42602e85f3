"""`--dry-run`: what a command line means, before any GPU is held: axes, layout, expected memory, and every refusal.

    WORLD_SIZE=256 python -m megatron_grpo.train --dry-run <the flags of the job>

It needs the model's config.json, reads the first row of the prompts where a path is given, and needs neither weights, tokenizer, engine nor
GPU; those are checked at the start of the run. Without WORLD_SIZE it plans the fewest GPUs that the layout allows.
"""

import io
import math
import os
import re
import warnings
from collections.abc import Callable
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from ..algorithms import describe
from ..hooks import HookConfig, load_hooks
from ..hooks.protocols import HookError
from ..rollout.config import PromptConfig
from ..rollout.prompts import check_prompts
from ..routing.config import check_model
from ..settings import ConfigError, from_namespace
from . import memory
from .flags import add_grpo_args, read_args, resolve, validate
from .memory import GIB, Memory, Stage
from .model import check_cp_layout, check_dtype
from .router_replay import check_interface

HOPPER = (9, 0)         # what Megatron's checks of the GPU are told where there is none
ON_GPU = ("weights", "gradients", "optimizer", "logits", "log_probs", "layer_inputs", "routes")
ON_HOST = ("host_routes", "host_optimizer", "host_reference")
NEEDS_TE = ("apply_rope_fusion", "moe_permute_fusion", "moe_router_fusion")    # refused by Megatron where Transformer Engine is missing


@dataclass
class Plan:
    """What a dry run found; parts that refusals kept from being known are None."""

    args: Any
    stages: list[Stage] | None = None
    memory: list[Memory] | None = None      # of a GPU of each stage
    megatron: float = 0.0                   # Megatron's own estimate of weights, gradients and optimizer, bytes
    refusals: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def fullest(self) -> int:
        """The stage whose GPUs hold most."""
        assert self.memory is not None
        return max(range(len(self.memory)), key=lambda i: self.memory[i].total)


def plan(argv: list[str] | None = None) -> Plan:
    """Parse and check a command line as far as no GPU, weights or peers are needed. Sets no global variable of Megatron."""
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(redirect_stdout(io.StringIO()))
        args = read_args(argv, add_grpo_args)
        found = Plan(args)
        stack.enter_context(_hopper(found))
        if "WORLD_SIZE" not in os.environ:
            args.world_size = _fewest(args)
        settings = _attempt(found, resolve, args)
        if settings is not None:
            args.grpo = settings
        _attempt(found, load_hooks, from_namespace(HookConfig, args), args)
        _attempt(found, lambda: check_prompts(from_namespace(PromptConfig, args)))
        # without layers the model is unknown, which is refused already
        if args.num_layers is not None and _attempt(found, validate, args) is not None:
            _check_model(found)
    return found


def _check_model(found: Plan) -> None:
    """Megatron's model configuration, its stages, and what replay and the layout refuse of it."""
    from megatron.training.theoretical_memory_usage import compute_weight_and_optimizer_memory

    args = found.args
    _attempt(found, check_cp_layout, args)
    _attempt(found, check_dtype, args)
    config = _attempt(found, _transformer_config, found)
    if args.use_routing_replay or args.use_rollout_routing_replay:
        _attempt(found, check_interface)
        if config is not None:
            _attempt(found, check_model, config)
    stages = _attempt(found, pipeline_stages, config) if config is not None else None
    if stages is not None and hasattr(args, "grpo"):        # else our settings are refused, and no layout is worth showing
        found.stages = stages
        try:
            found.memory = [memory.estimate(args, stage, i) for i, stage in enumerate(stages)]
            found.megatron = compute_weight_and_optimizer_memory(SimpleNamespace(**vars(args)))
        except NotImplementedError as error:
            found.notes.append(f"memory is not estimated: {error}")


def _attempt(found: Plan, call: Callable, *arguments) -> Any:
    """call(*arguments); None where it refuses, and the refusals are kept: a line each, indented lines belong to the one before."""
    try:
        return call(*arguments)
    except (ConfigError, HookError) as error:
        found.refusals += re.split(r"\n(?! )", str(error))
        return None


def _transformer_config(found: Plan):
    from megatron.core.utils import is_te_min_version
    from megatron.training.argument_utils import gpt_config_from_args

    args, fused = found.args, {}
    if args.platform != "cpu" and not is_te_min_version("1.0"):
        fused = {name: getattr(args, name) for name in NEEDS_TE}
        found.notes.append("Transformer Engine is not installed here, and what Megatron asks of its version was not checked")
    try:
        config = gpt_config_from_args(SimpleNamespace(**vars(args) | dict.fromkeys(fused, False))).transformer
    except (AssertionError, ValueError) as error:
        raise ConfigError(f"Megatron refuses the model: {error}") from error
    for name, value in fused.items():
        setattr(config, name, value)
    return config


def pipeline_stages(config) -> list[Stage]:
    """Which layers each stage builds, by Megatron's own rule.

    Raises:
        ConfigError: the layers cannot be divided so.
    """
    from megatron.core.transformer.enums import LayerType
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    size, chunks = config.pipeline_model_parallel_size, config.virtual_pipeline_model_parallel_size
    if size == 1:
        return [Stage(tuple(range(config.num_layers)), True, True)]
    stages, layout = [], config.pipeline_model_parallel_layout
    for rank in range(size):
        layers: list[int] = []
        for chunk in range(chunks or 1):
            virtual = chunk if chunks else None
            if layout is not None:
                sizes = [[part.count(LayerType.decoder) for part in parts] for parts in layout.layout]
                first = sum(sizes[r][c] for c in range(chunks or 1) for r in range(size) if (c, r) < (chunk, rank))
                count = sizes[rank][chunk]
            else:
                try:
                    count = get_num_layers_to_build(config, vp_stage=virtual, pp_rank=rank)
                except AssertionError as error:
                    raise ConfigError(f"--pipeline-model-parallel-size {size}: {' '.join(str(error).split())}; see "
                                      "--decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers") from None
                first = get_transformer_layer_offset(config, vp_stage=virtual, pp_rank=rank)
            layers += range(first, first + count)
        stages.append(Stage(tuple(layers), rank == 0, rank == size - 1))
    return stages


def _fewest(args) -> int:
    """The fewest GPUs that all parallel sizes divide."""
    pp, tp = args.pipeline_model_parallel_size, args.tensor_model_parallel_size
    experts = (args.expert_tensor_parallel_size or tp) * args.expert_model_parallel_size if args.expert_model_parallel_size > 1 else 1
    return math.lcm(tp * args.context_parallel_size * pp, experts * pp)


@contextmanager
def _hopper(found: Plan):
    """Without a GPU, Megatron's validation is told of one."""
    if torch.cuda.is_available() or found.args.platform == "cpu":
        yield
        return
    found.notes.append("no GPU here: checked as for a Hopper")
    kept = {name: getattr(torch.cuda, name) for name in ("get_device_properties", "get_device_capability")}
    torch.cuda.get_device_properties = lambda *_: SimpleNamespace(major=HOPPER[0], minor=HOPPER[1])  # type: ignore[assignment,return-value]
    torch.cuda.get_device_capability = lambda *_: HOPPER  # type: ignore[assignment]
    try:
        yield
    finally:
        for name, value in kept.items():
            setattr(torch.cuda, name, value)


# ---- what people read ---------------------------------------------------------------------------------------------------


def render(found: Plan) -> str:
    """The page of a plan."""
    args, blocks = found.args, []
    if getattr(args, "grpo", None) is not None:
        blocks.append(describe(args.grpo.algorithm, args.algorithm, args.grpo.hooks))
    if found.stages is not None:
        blocks.append("\n".join(_layout(found)))
    if found.memory is not None:
        blocks.append("\n".join(_memory(found)))
    if found.notes:
        blocks.append("\n".join(f"note        {note}" for note in found.notes))
    refusals = [f"refused     {text}" for text in dict.fromkeys(found.refusals)]
    blocks.append("\n".join(refusals) if refusals else "refused     nothing")
    return "\n\n".join(blocks)


def _layout(found: Plan) -> list[str]:
    args = found.args
    trainer, rollout, packing, routing = args.grpo.trainer, args.grpo.rollout, args.grpo.packing, args.grpo.routing
    tp, pp, cp, dp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.context_parallel_size, args.data_parallel_size
    ep, etp = args.expert_model_parallel_size, args.expert_tensor_parallel_size or tp
    virtual = f" x {args.virtual_pipeline_model_parallel_size} virtual" if args.virtual_pipeline_model_parallel_size else ""
    experts = f"; experts: EP {ep} x ETP {etp} x DP {args.world_size // (ep * etp * pp)}" if args.num_experts else ""
    sequence = " with sequence parallelism" if args.sequence_parallel else ""
    lines = [f"layout      {args.world_size} GPUs = TP {tp}{sequence} x CP {cp} x PP {pp}{virtual} x DP {dp}{experts}"]
    pattern = memory.moe_pattern(args)
    for i, stage in enumerate(found.stages or ()):
        moe = sum(pattern[n] for n in stage.layers)
        ends = [name for name, has in (("embedding", stage.first), ("output", stage.last)) if has]
        count = sum(memory.stage_parameters(args, stage).values())
        lines.append(f"  stage {i:<5}{moe} MoE + {len(stage.layers) - moe} dense layers ({_ranges(stage.layers)})"
                     f"{''.join(', ' + e for e in ends)}: {count / 1e9:.1f} B parameters")
    steps, prompts = trainer.num_steps_per_rollout, rollout.rollout_batch_size
    group = args.global_batch_size * steps // prompts           # 1 in a supervised run, whatever --n-samples-per-prompt
    lines.append(f"  rollout    {prompts} prompts x {group} sample{'s' * (group > 1)}, {steps} optimizer step{'s' * (steps > 1)} of "
                 f"{args.global_batch_size} samples; {prompts / dp:g} prompts a replica")
    tokens = memory.tokens_per_gpu(args)
    packed = "packed by tokens" if packing.use_dynamic_batch_size else f"{args.micro_batch_size} sequences, {packing.qkv_format}"
    lines.append(f"  micro-batch  {tokens} tokens a GPU, {tokens * cp} over context parallelism; {packed}")
    replay = "R3: the engine's experts" if routing.use_rollout_routing_replay else "R2: those of the old-log-prob pass" if routing.replay else "none"
    lines.append(f"  replay     {replay}")
    recompute = args.recompute_granularity or "none"
    lines.append(f"  recompute  {recompute}{f', {args.recompute_method} {args.recompute_num_layers}' if args.recompute_method else ''}")
    return lines


def _memory(found: Plan) -> list[str]:
    """The fullest stage, and beside it the last one, which has the logits."""
    args, stages = found.args, found.memory
    assert stages is not None
    total, active = memory.model_parameters(args), memory.active_parameters(args)
    shown = sorted({found.fullest, len(stages) - 1})
    lines = [f"parameters  {total / 1e9:.2f} B, {active / 1e9:.2f} B of them active for a token; {stages[found.fullest].parameters / 1e9:.2f} B on a "
             f"GPU of stage {found.fullest}, the fullest", "memory      a GPU of " + "".join(f"{f'stage {i}':>14}" for i in shown)]
    for name in (*ON_GPU, "total"):
        cells = [getattr(stages[i], name) for i in shown]
        lines.append(f"  {name.replace('_', ' '):<19}" + "".join(f"{_size(value):>14}" for value in cells))
    if args.recompute_granularity == "full":
        lines.append("  beside these: activations of the layer that is recomputed, buffers of communication, fragmentation")
    lines.append(f"  Megatron's own estimate of weights, gradients and optimizer: {_size(found.megatron)}; here "
                 f"{_size(max(m.model_and_optimizer for m in stages))}")
    hosts = [(name, getattr(stages[found.fullest], name)) for name in ON_HOST]
    lines += [f"  on the host, a rank: {name.removeprefix('host_').replace('_', ' ')} {_size(value)}" for name, value in hosts if value]
    return lines


def _size(value: float | None) -> str:
    if value is None:
        return "not estimated"
    return f"{value / GIB:.2f} GiB" if value >= 0.01 * GIB or not value else f"{value / 2 ** 20:.2f} MiB"


def _ranges(numbers: tuple[int, ...]) -> str:
    """0-3, 8-11"""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and runs[-1][1] == n - 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ", ".join(f"{a}-{b}" if a < b else str(a) for a, b in runs) or "none"
