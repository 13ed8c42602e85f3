"""The training loop: rollout, log-probs, advantages, optimizer steps, publish; straight from top to bottom."""

import signal
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist

from ..hooks import Hooks, load_hooks
from ..parallel.collectives import reduce_metrics
from . import checkpoint
from .advantages import fill_advantages
from .build import Trained, build, initialize, is_last_stage, is_logger
from .distribute import Placement, RolloutBatch, agree, distribute
from .flags import Settings
from .forward import StepContext
from .groups import ControlGroups, make_control_groups
from .run_log import Phases, RunLog
from .step import StepResult, logprob_pass, optimizer_step


@dataclass
class Job:
    """Everything that a step uses."""

    args: object
    settings: Settings
    trained: Trained
    groups: ControlGroups
    placement: Placement
    context: StepContext
    hooks: Hooks
    log: RunLog
    reference: object = None
    replay: object = None
    source: object = None           # leaders only
    engine: object = None           # the link to the engine; None without one
    stop_signal: list = field(default_factory=list)


def run(args, model_provider) -> None:
    """A whole run. Every rank calls it; `args` comes from flags.parse_args."""
    initialize(args)
    job = setup(args, model_provider)
    try:
        train(job)
    finally:
        for part in (job.source, job.engine, job.log):
            if part is not None:
                part.close()


def train(job: Job) -> None:
    args, steps = job.args, job.settings.trainer.num_steps_per_rollout
    if args.iteration == 0:
        evaluate(job, 0)
    for iteration in range(args.iteration, args.train_iters, steps):
        phases = Phases()
        with phases("rollout"):
            batch = rollout(job, iteration)
        with phases("logprobs"):
            log_probs(job, batch)
        with phases("train"):
            results = [update(job, batch, i) for i in range(steps)]
        done = iteration + steps
        with phases("publish"):
            if job.engine is not None and done < args.train_iters or job.engine is not None and _due(done, args.eval_interval, args.train_iters):
                job.engine.publish(job.trained.model, version=str(done))
        record(job, batch, results, iteration, phases)
        if _due(done, args.eval_interval, args.train_iters):
            evaluate(job, done)
        stopping = _stop_asked(job)
        if args.save and (_due(done, args.save_interval, args.train_iters) or stopping):
            save(job, done)
        if stopping:
            job.log.message(f"stopped by signal after step {done}; " + ("resume with --load" if args.save else "nothing saved: no --save"))
            return


# ---- the phases of a step ---------------------------------------------------------------------------------------------


def rollout(job: Job, iteration: int) -> RolloutBatch:
    """Generate on the leaders, then place on every rank. A leader that fails fails the step on every rank."""
    samples = metrics = error = None
    if job.groups.is_leader:
        try:
            samples, metrics = job.source.next(iteration)
            if template := job.settings.trainer.save_debug_rollout_data:
                from .sources import save_samples
                save_samples(template, iteration, job.groups.dp_rank, samples)
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}"
    agree(job.groups, error)
    return distribute(job.groups, job.placement, samples, metrics, job.replay)


def log_probs(job: Job, batch: RolloutBatch) -> None:
    """Old (and reference) log-probs of every micro-batch, then the advantages."""
    context = _context(job, batch)
    config = context.algorithm
    r2, r3 = job.settings.routing.use_routing_replay, job.settings.routing.use_rollout_routing_replay
    if job.reference is not None:
        with job.reference.applied(job.trained.model):
            _each_step(batch, partial(_pass, job, context, "ref_logp_T", "native"))
    if config.correction.use_rollout_logprobs or job.settings.trainer.loss_type == "sft":
        for mb in batch.microbatches:
            mb.old_logp_T = mb.rollout_logp_T if config.correction.use_rollout_logprobs else None
    else:
        _each_step(batch, partial(_pass, job, context, "old_logp_T", "replay" if r3 else "record" if r2 else "native"))
    if is_last_stage():
        from megatron.core import mpu
        batch.metrics = {**(batch.metrics or {}), **fill_advantages(
            batch, config, job.hooks, columns=batch.microbatches[0].layout.all_columns, cp_group=mpu.get_context_parallel_group(),
            dp_cp_group=mpu.get_data_parallel_group(with_context_parallel=True))}


def update(job: Job, batch: RolloutBatch, index: int) -> StepResult:
    """One optimizer step on the batch's micro-batches number `index`."""
    microbatches = batch.mini_steps[index]
    routing = job.settings.routing
    return optimizer_step(
        job.trained.model, job.trained.optimizer, job.trained.scheduler, microbatches, _context(job, batch, microbatches), job.args.global_batch_size,
        routing="replay" if routing.use_routing_replay or routing.use_rollout_routing_replay else "native")


def evaluate(job: Job, done: int) -> None:
    """Greedy answers to held-out prompts, split over the leaders."""
    if job.engine is None or not job.settings.trainer.eval_num_prompts:
        return
    phases, scores, error = Phases(), None, None
    with phases("eval"):
        if job.groups.is_leader:
            try:
                scores = job.source.evaluate()
            except Exception as failure:
                error = f"{type(failure).__name__}: {failure}"
        agree(job.groups, error)
        scores = job.groups.from_leader(_sum_over_leaders(job.groups, scores))
    job.log.step(done, scores, phases.seconds)


def save(job: Job, done: int) -> None:
    state = job.source.state() if job.groups.is_leader else None
    checkpoint.save(job.args, job.trained, job.groups, done, state, job.settings.trainer.keep_checkpoints)


# ---- what the phases share ----------------------------------------------------------------------------------------------


def _each_step(batch: RolloutBatch, run_pass) -> None:
    for microbatches in batch.mini_steps:
        run_pass(batch, microbatches)


def _pass(job: Job, context: StepContext, target: str, routing: str, batch: RolloutBatch, microbatches: list) -> None:
    logprob_pass(job.trained.model, microbatches, _context(job, batch, microbatches), target, routing)


def _context(job: Job, batch: RolloutBatch, microbatches: list | None = None) -> StepContext:
    from dataclasses import replace
    return replace(job.context, num_microbatches=len(microbatches or batch.mini_steps[0]))


def record(job: Job, batch: RolloutBatch, results: list[StepResult], iteration: int, phases: Phases) -> None:
    """Reduce the metrics of each optimizer step over the ranks that hold losses, and write them."""
    from megatron.core import mpu

    if not is_last_stage():
        return
    group = mpu.get_data_parallel_group(with_context_parallel=True)
    shared = {**rollout_metrics(batch), **(batch.metrics or {})}
    for i, result in enumerate(results):
        metrics = reduce_metrics([out.metrics for out in result.outputs], group)
        metrics.update(grad_norm=result.grad_norm, learning_rate=result.learning_rate, skipped=float(result.skipped))
        last = i == len(results) - 1
        job.log.step(iteration + i + 1, {**shared, **metrics} if last else metrics, phases.seconds if last else {})


def rollout_metrics(batch: RolloutBatch) -> dict[str, float]:
    """What the samples' cards say: the same on every rank, nothing to reduce."""
    cards = [c for c in batch.cards if c.valid]
    if not cards:
        return {"samples/aborted": float(len(batch.cards))}
    n = len(cards)
    groups: dict[int, list[float]] = {}
    for c in cards:
        groups.setdefault(c.group_id, []).append(c.reward)
    lengths = [c.response_length for c in cards]
    metrics = {
        "reward/mean": sum(c.reward for c in cards) / n, "reward/max": max(c.reward for c in cards),
        "reward/min": min(c.reward for c in cards), "response_length/mean": sum(lengths) / n, "response_length/max": float(max(lengths)),
        "samples/truncated": sum(c.truncated for c in cards) / n, "samples/aborted": float(len(batch.cards) - n),
        "samples/count": float(n), "tokens/trained": float(sum(c.trained_tokens for c in cards)),
        "groups/zero_std": sum(max(r) == min(r) for r in groups.values()) / len(groups)}
    for name in sorted({name for c in cards for name, _ in c.rewards}):
        values = [dict(c.rewards)[name] for c in cards if name in dict(c.rewards)]
        metrics[f"reward/{name}/mean"] = sum(values) / len(values)
    return metrics


def _sum_over_leaders(groups: ControlGroups, scores: dict | None) -> dict | None:
    """{name: (sum, count)} of every leader -> {name: mean}."""
    if groups.leaders is None:
        return None
    everyone: list = [None] * groups.dp_size
    dist.all_gather_object(everyone, scores, group=groups.leaders)
    return {name: sum(s[name][0] for s in everyone) / max(sum(s[name][1] for s in everyone), 1) for name in everyone[0]}


def _due(done: int, interval: int | None, last: int) -> bool:
    return done == last or bool(interval) and done % interval == 0


def _stop_asked(job: Job) -> bool:
    """Whether any rank was asked to stop (SIGTERM, SIGUSR1): all must agree on the step after which they do."""
    flag = torch.tensor([float(bool(job.stop_signal))], device=job.trained.device)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag.item())


# ---- set-up -------------------------------------------------------------------------------------------------------------


def setup(args, model_provider) -> Job:
    """Everything between parsed flags and the first step."""
    from megatron.core import mpu

    from ..routing.replay_config import refuse  # noqa: F401  (replaced when routing lands)

    settings: Settings = args.grpo
    if dist.get_rank() == 0:
        checkpoint.repair_pointer(args.load)
    dist.barrier()
    hooks = load_hooks(settings.hooks, args)
    groups = make_control_groups(settings.trainer.control_timeout)
    trained = build(args, model_provider)
    placement = Placement(
        packing=settings.packing, num_steps=settings.trainer.num_steps_per_rollout, micro_batch_size=args.micro_batch_size,
        multiple=args.pipeline_model_parallel_size if len(trained.model) > 1 else 1,
        cp_size=mpu.get_context_parallel_world_size(), cp_rank=mpu.get_context_parallel_rank(),
        tp_size=mpu.get_tensor_model_parallel_world_size() if args.sequence_parallel else 1, device=trained.device)
    context = StepContext(
        algorithm=settings.algorithm, hooks=hooks, vocab_size=args.vocab_size, temperature=settings.rollout.rollout_temperature,
        tp_group=mpu.get_tensor_model_parallel_group(), cp_group=mpu.get_context_parallel_group(),
        dp_size=mpu.get_data_parallel_world_size(), num_microbatches=1, per_token_loss=args.calculate_per_token_loss)
    directory = settings.trainer.run_dir or args.save
    job = Job(args, settings, trained, groups, placement, context, hooks, RunLog(directory, is_logger(), args.train_iters))
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda received, frame: job.stop_signal.append(received))
    return job
