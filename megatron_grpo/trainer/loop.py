"""The training loop: rollout, log-probs, advantages, optimizer steps, publish; straight from top to bottom."""

import signal
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch.distributed as dist

from ..algorithms import describe
from ..hooks import load_hooks
from ..routing.placement import RouteStore
from . import checkpoint
from .advantages import fill_advantages, prepare_corrections
from .build import Trained, build, initialize, is_last_stage, is_logger
from .checkpoint import Checkpoints
from .distribute import Placement, RolloutBatch, RolloutFailed, agree, distribute, on_leaders
from .engine_link import EngineLink
from .failure import watched
from .flags import Settings
from .forward import StepContext
from .groups import ControlGroups, any_rank, make_control_groups
from .measure import evaluation_metrics, record, route_metrics
from .reference import Reference, load_reference
from .resharding import check_layout
from .router_replay import RouterReplay
from .run_log import Phases, RunLog
from .sample_log import write_samples
from .sources import LeaderState, load_data, make_source, save_samples
from .step import StepResult, logprob_pass, optimizer_step


@dataclass
class Job:
    """Everything that a step uses."""

    args: Any
    settings: Settings
    trained: Trained
    groups: ControlGroups
    where: Placement
    context: StepContext
    log: RunLog
    engine: EngineLink | None       # None in a supervised or recorded run
    source: Any = None           # on leaders: sources.py
    reference: Reference | None = None
    checkpoints: Checkpoints | None = None                  # None without --save
    signals: list[int] = field(default_factory=list)        # received, each asks for a stop


def run(args, model_provider) -> None:
    """A whole run; every rank calls it with `args` from flags.parse_args."""
    with stop_signals() as signals:
        if args.save:
            checkpoint.start_result_queue()
        initialize(args)
        if dist.get_rank() == 0:
            print(describe(args.grpo.algorithm, args.algorithm, args.grpo.hooks), flush=True)
        with watched() as failures, make_job(args, model_provider) as job, failures.told():
            job.signals = signals
            train(job)


@contextmanager
def stop_signals():
    """The signals received so far that ask for a stop. Afterwards they are ignored: the end of the interpreter would die of one."""
    signals: list[int] = []
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda received, frame: signals.append(received))
    try:
        yield signals
    finally:
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, signal.SIG_IGN)


def train(job: Job) -> None:
    args, steps = job.args, job.settings.trainer.num_steps_per_rollout
    if _stop_asked(job):
        job.log.message("stopped by a signal before the first step: there is nothing new to save")
        return
    if job.engine is not None:
        publish(job, args.iteration)
    if args.iteration == 0:
        evaluate(job, 0)
    for iteration in range(args.iteration, args.train_iters, steps):
        phases, done = Phases(), iteration + steps
        try:
            with phases("rollout"):
                batch = rollout(job, iteration)
            with phases("logprobs"):
                metrics = log_probs(job, batch)
        except RolloutFailed as failure:
            keep_rollout(job, iteration, failure.damaged)
            raise
        with phases("train"):
            results = [update(job, mbs) for mbs in batch.mini_steps]
        with phases("publish"):
            if job.engine is not None and (done < args.train_iters or job.settings.trainer.eval_num_prompts):
                publish(job, done)
        record(job, batch, results, metrics, iteration, phases)
        looked_at = _due(done, args.eval_interval, args.train_iters)
        if looked_at:
            if job.engine is not None:
                write_samples(job, batch, done, job.settings.trainer.report_samples)
            evaluate(job, done)
        stopping = _stop_asked(job)
        if looked_at or stopping:
            job.log.report()        # all ranks have met in between, so the samples are there
        if job.checkpoints is not None:
            if _due(done, args.save_interval, args.train_iters) or stopping:
                save(job, done)
            job.checkpoints.finish(wait=stopping or done == args.train_iters)
        if stopping:
            job.log.message(f"stopped by a signal after step {done}; resume with --load" if args.save else "stopped by a signal; no --save")
            return


def rollout(job: Job, iteration: int) -> RolloutBatch:
    """Generate on the leaders, then place on every rank. A leader that fails fails the step on every rank."""
    def generate():
        samples, metrics = job.source.next(iteration)
        if template := job.settings.trainer.save_debug_rollout_data:
            save_samples(template, iteration, job.groups.dp_rank, samples)
        return samples, metrics

    samples, metrics = on_leaders(job.groups, generate) or (None, None)
    counted = job.groups.over_leaders(metrics)      # every source reports counts: they add up
    total = {name: sum(m.get(name, 0.0) for m in counted) for name in sorted(set().union(*counted))} if counted else None
    replay = job.context.replay if job.settings.routing.use_rollout_routing_replay else None
    return distribute(job.groups, job.where, samples, total, bool(job.source and job.source.rewards_are_advantages), replay)


def log_probs(job: Job, batch: RolloutBatch) -> dict:
    """Reference and old log-probs of every micro-batch, then the advantages; returns (sum, count) metrics of the last stage."""
    routing, config, model = job.settings.routing, job.settings.algorithm, job.trained.model
    context = job.context
    context.store.clear()
    context.mismatches.clear()
    if job.reference is not None:
        with job.trained.whole_parameters(), job.reference.applied(model):
            for mbs in batch.mini_steps:
                logprob_pass(model, mbs, replace(context, store=RouteStore(), mismatches=[]), "ref_logp_T", routing.mode("reference"))
    if job.settings.trainer.loss_type == "sft":
        for mb in batch.microbatches:
            mb.rollout_logp_T = None        # labels were not sampled: there is no engine to compare with
    elif (routing.replay or not config.correction.use_rollout_logprobs):
        for mbs in batch.mini_steps:
            logprob_pass(model, mbs, context, "old_logp_T", routing.mode("old"))
    metrics = route_metrics(job)
    if not is_last_stage():
        return {}
    from megatron.core import mpu
    groups = dict(cp_group=mpu.get_context_parallel_group(), dp_cp_group=mpu.get_data_parallel_group(with_context_parallel=True))
    return metrics | fill_advantages(batch, config, context.hooks, **groups) | prepare_corrections(batch, config, **groups)


def update(job: Job, microbatches: list) -> StepResult:
    """One optimizer step."""
    trained = job.trained
    return optimizer_step(trained.model, trained.optimizer, trained.scheduler, microbatches, job.context, job.args.global_batch_size,
                          job.settings.routing.mode("policy"))


def evaluate(job: Job, done: int) -> None:
    """Greedy answers to held-out prompts, split over the leaders."""
    if job.engine is None or not job.settings.trainer.eval_num_prompts:
        return
    phases = Phases()
    with phases("eval"):
        metrics = evaluation_metrics(job.groups, on_leaders(job.groups, lambda: job.source.evaluate()))
    if metrics:
        job.log.step(done, metrics, phases.seconds)


def publish(job: Job, version: int) -> None:
    """New weights to the engines, with no request of any leader at them meanwhile (rollouts may be generated ahead)."""
    with paused(job):
        job.engine.publish(job.trained, version)


@contextmanager
def paused(job: Job):
    """Inside, no leader generates or draws a prompt. Collective over all ranks."""
    with job.source.paused() if job.groups.is_leader else nullcontext():
        agree(job.groups, None)
        yield


def save(job: Job, done: int) -> None:
    """A checkpoint, and with --save-hf a Hugging Face directory."""
    with paused(job):
        state = on_leaders(job.groups, lambda: LeaderState.of(job.source, job.reference))
    job.checkpoints.save(job.trained, done, state)
    if job.settings.weights.save_hf:
        job.trained.save_hf(job.settings.weights.save_hf.format(iteration=done))


def keep_rollout(job: Job, iteration: int, damaged: frozenset[int]) -> None:
    """Before a failed rollout ends the run: its good samples go into the checkpoint that a resumed run starts from.

    The first step has none: a run that fails in it begins again.
    """
    if job.checkpoints is None or not iteration:
        return
    with paused(job):
        state = on_leaders(job.groups, lambda: LeaderState.of(job.source, job.reference, damaged))
    job.checkpoints.keep_rollout(job.trained, iteration, state)
    job.log.message(f"the rollout of step {iteration + 1} failed; its good samples are kept, resume with --load {job.args.save}")


def _check_checkpoint(args) -> None:
    checkpoint.repair_pointer(args.load)
    check_layout(args)


def _due(done: int, interval: int | None, last: int) -> bool:
    return done == last or (interval or 0) > 0 and done % (interval or 1) == 0


def _stop_asked(job: Job) -> bool:
    """Whether any rank was told to stop (SIGTERM, SIGUSR1): all must agree on the step after which they do."""
    return any_rank(bool(job.signals), job.trained.device)


# ---- set-up -------------------------------------------------------------------------------------------------------------


@contextmanager
def make_job(args, model_provider):
    """Everything between parsed flags and the first step; closes what it opened."""
    from megatron.core import mpu

    settings: Settings = args.grpo
    with ExitStack() as stack:
        hooks = load_hooks(settings.hooks, args)
        groups = make_control_groups(settings.trainer.control_timeout)
        directory = settings.trainer.run_dir or args.save
        log = RunLog(directory, is_logger(), args.train_iters)
        stack.callback(log.close)
        data = on_leaders(groups, lambda: load_data(args))
        engine = None
        if settings.trainer.loss_type == "policy_loss" and not settings.trainer.load_debug_rollout_data:
            engine = EngineLink(args, groups, directory)
            stack.callback(engine.close)
            engine.launch()
        on_leaders(groups, lambda: _check_checkpoint(args) if dist.get_rank() == 0 else None)
        trained = build(args, model_provider)
        replay = None
        if settings.routing.replay:
            replay = RouterReplay.bind(trained.model, no_aux_loss=settings.routing.router_replay_no_aux_loss)
        reference = load_reference(args, trained) if settings.algorithm.needs_reference else None
        if engine is not None:
            engine.connect(trained, replay)
        source = on_leaders(groups, lambda: make_source(args, data, engine, groups, hooks, reference))
        if source is not None:
            stack.callback(source.close)
        parallel = args.sequence_parallel
        where = Placement(
            packing=settings.packing, num_steps=settings.trainer.num_steps_per_rollout, micro_batch_size=args.micro_batch_size,
            multiple=args.pipeline_model_parallel_size if len(trained.model) > 1 else 1,
            cp_size=mpu.get_context_parallel_world_size(), cp_rank=mpu.get_context_parallel_rank(),
            tp_size=mpu.get_tensor_model_parallel_world_size() if parallel else 1,
            tp_rank=mpu.get_tensor_model_parallel_rank() if parallel else 0, device=trained.device)
        context = StepContext(
            algorithm=settings.algorithm, hooks=hooks, vocab_size=args.vocab_size, temperature=settings.rollout.rollout_temperature,
            tp_group=mpu.get_tensor_model_parallel_group(), cp_group=mpu.get_context_parallel_group(),
            dp_size=mpu.get_data_parallel_world_size(), per_token_loss=args.calculate_per_token_loss,
            recompute_loss=settings.trainer.recompute_loss_function, replay=replay, store=RouteStore())
        checkpoints = Checkpoints(args, groups, settings.trainer.keep_checkpoints) if args.save else None
        yield Job(args, settings, trained, groups, where, context, log, engine, source, reference, checkpoints)
