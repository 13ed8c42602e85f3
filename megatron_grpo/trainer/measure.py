"""From the parts that ranks hold to the numbers of a step."""

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ..losses.metrics import derived
from ..parallel.collectives import reduce_maxima, reduce_means
from ..routing.audit import RouteAuditError
from ..routing.mismatch import RouteMismatch, find_damage, mismatch_metrics
from .build import is_last_stage
from .distribute import RolloutBatch, RolloutFailed
from .groups import ControlGroups, any_rank

if TYPE_CHECKING:
    from .loop import Job


def record(job: "Job", batch: RolloutBatch, results: list, pairs: dict, iteration: int, phases) -> None:
    """Reduce the metrics of each optimizer step over the ranks that hold losses, and write them."""
    from megatron.core import mpu

    auxiliary = _auxiliary_losses(job, batch)
    if not is_last_stage():
        return
    group, device = mpu.get_data_parallel_group(with_context_parallel=True), job.trained.device
    shared = rollout_metrics(batch) | batch.metrics | auxiliary | derived(reduce_means(pairs, group, device))
    for i, result in enumerate(results):
        means: dict = {}
        for out in result.outputs:
            for name, pair in out.metrics.items():
                before = means.get(name, (0.0, 0.0))
                means[name] = (before[0] + pair[0], before[1] + pair[1])
        maxima = {name: torch.stack([out.maxima[name] for out in result.outputs]).amax() for name in result.outputs[0].maxima}
        metrics = derived(reduce_means(means, group, device)) | reduce_maxima(maxima, group, device)
        metrics.setdefault("loss", 0.0)         # no token is trained: there is nothing to average, and no gradient
        metrics |= dict(grad_norm=result.grad_norm, learning_rate=result.learning_rate, skipped=float(result.skipped))
        last = i == len(results) - 1
        job.log.step(iteration + i + 1, metrics | shared if last else metrics, phases.seconds if last else {})


def rollout_metrics(batch: RolloutBatch) -> dict[str, float]:
    """What the samples' cards say: the same on every rank, nothing to reduce."""
    cards = [c for c in batch.cards if c.valid]
    metrics = {"samples/count": float(len(cards)), "samples/aborted": float(len(batch.cards) - len(cards))}
    if not cards:
        return metrics
    groups: dict[int, list[float]] = {}
    for c in cards:
        groups.setdefault(c.group_id, []).append(c.reward)

    def stats(name, values):
        return {f"{name}/mean": sum(values) / len(values), f"{name}/max": float(max(values)), f"{name}/min": float(min(values))}

    metrics |= stats("reward", [c.reward for c in cards]) | stats("response_length", [c.response_length for c in cards])
    metrics["samples/truncated"] = sum(c.truncated for c in cards) / len(cards)
    metrics["tokens/trained"] = float(sum(c.trained_tokens for c in cards))
    metrics["groups/zero_std"] = sum(max(r) == min(r) for r in groups.values()) / len(groups)
    for name in sorted({name for c in cards for name, _ in c.rewards}):
        values = [dict(c.rewards)[name] for c in cards if name in dict(c.rewards)]
        metrics[f"reward/{name}/mean"] = sum(values) / len(values)
    return metrics


def evaluation_metrics(groups: ControlGroups, answers) -> dict[str, float]:
    """Of the leaders' shares of an evaluation; the same on every rank. Empty without held-out prompts."""
    mine = None if answers is None else (answers.correct, sum(s.reward for s in answers.scored), len(answers.scored), len(answers.samples),
                                         sum(s.response_length for s in answers.scored))
    everyone = groups.over_leaders(mine)
    totals = groups.from_leader([sum(column) for column in zip(*(e for e in everyone if e), strict=True)] if everyone else None)
    if not totals:
        return {}
    correct, reward, scored, asked, tokens = totals
    return {"eval/accuracy": correct / scored, "eval/reward": reward / scored, "eval/response_length": tokens / scored,
            "eval/prompts": float(scored), "eval/failed": float(asked - scored)}


def route_metrics(job: "Job") -> dict:
    """(sum, count) pairs of how the engine's experts differ from the trainer's own, over all pipeline stages. Collective over all ranks.

    Raises:
        RolloutFailed: on every rank: some rank found routes that cannot be those of these weights.
    """
    from megatron.core import mpu

    if not job.context.mismatches:
        return {}
    parts = _whole(job.context.mismatches)
    floor, where = job.settings.routing.router_agreement_floor, job.where
    damage = [e for mb, part in parts for e in find_damage(part, mb.layout, mb.sample_ids, floor, where.cp_rank, where.tp_rank)]
    raise_together(job, damage)
    pipeline = mpu.get_pipeline_model_parallel_group()
    own = {k: (float(s), float(n)) for k, (s, n) in mismatch_metrics([part for _, part in parts], pipeline).items()}
    stages: list = [None] * pipeline.size()
    dist.all_gather_object(stages, own, group=pipeline)
    merged: dict[str, Any] = dict(own)
    for name in sorted({n for stage in stages for n in stage} - {"routing/token_mismatch"}):
        pairs = [stage[name] for stage in stages if name in stage]
        merged[name] = (sum(s for s, _ in pairs), sum(n for _, n in pairs))
    group = mpu.get_tensor_and_data_parallel_group(with_context_parallel=True)
    reduced = reduce_means(merged, group, job.trained.device)
    return {name: (torch.tensor(value), torch.tensor(1.0)) for name, value in reduced.items()}


def raise_together(job: "Job", damage: list[RouteAuditError]) -> None:
    """Raise on every rank if any rank found damaged samples; each rank's first is told. Collective over all ranks."""
    if any_rank(bool(damage), job.trained.device):
        found: list = [None] * dist.get_world_size()
        dist.all_gather_object(found, [(e.sample_id, str(e)) for e in damage])
        damaged = frozenset(sample for errors in found for sample, _ in errors)
        raise RolloutFailed("\n".join([f"routes of {len(damaged)} samples are damaged",
                                       *(f"rank {rank}: {errors[0][1]}" for rank, errors in enumerate(found) if errors)]), damaged)


def _whole(mismatches: list) -> list:
    """[(micro-batch, mismatch over all layers of this rank)]: virtual pipeline chunks of a micro-batch are joined."""
    chunks: dict = {}
    for mb, part in mismatches:
        chunks.setdefault(mb.key, (mb, []))[1].append(part)
    joined = []
    for mb, parts in chunks.values():
        columns = {name: torch.cat([getattr(p, name) for p in parts], dim=-1) for name in ("counted_TL", "differs_TL", "agreement_TL", "missing_L")}
        joined.append((mb, RouteMismatch(tuple(n for p in parts for n in p.layers), **columns)))
    return joined


def _auxiliary_losses(job: "Job", batch: RolloutBatch) -> dict[str, float]:
    """Megatron's own load-balancing and z losses, a mean over layers and the rollout's micro-batches. Collective over all ranks."""
    args = job.args
    if not args.num_experts:
        return {}
    from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

    kinds = args.moe_router_load_balancing_type
    kinds = [kinds] if isinstance(kinds, str) else kinds
    names = [name for kind, name in (("aux_loss", "load_balancing_loss"), ("seq_aux_loss", "seq_load_balancing_loss"),
                                     ("global_aux_loss", "global_load_balancing_loss")) if kind in kinds]
    names += ["z_loss"] if args.moe_z_loss_coeff is not None else []
    total: dict = {}
    get_moe_metrics_tracker().report(
        loss_scale=1 / max(len(batch.microbatches), 1), iteration=0, total_loss_dict=total, force_initialize=True, track_names=names,
        num_layers=args.num_layers, moe_layer_freq=args.moe_layer_freq, mtp_num_layers=args.mtp_num_layers)
    return {f"moe/{name}": float(value) for name, value in total.items()}
