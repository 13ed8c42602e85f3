"""Steps of the real trainer on recorded samples, with everything that layouts are compared by."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ..rewards.shaping import shape_rewards
from ..weights.live import unwrap

POLICY_SCALE = 1.06
"""The policy's weights are those that sampled times this: ratios differ from 1 and some are clipped, in any layout the same."""

NEAR_TIE = 3e-6
"""Router logits are shaken by this much: choices that change could be flipped by float32 rounding."""


@dataclass(frozen=True)
class Case:
    """One step to take.

    Attributes:
        algorithm: the flags of the algorithm; None: as in the command line.
        single: on the samples of equal length, one in a micro-batch, with the auxiliary losses of the routers; these, and the clip
            rules that choose tokens by a micro-batch's covariances, depend on which samples share a micro-batch, which here no layout changes.
            Else on samples of all shapes, packed or padded as the command line says, without auxiliary losses.
    """

    algorithm: tuple[str, ...] | None = None
    single: bool = False


def one_step(argv: list[str], dtype: torch.dtype | None = None, case: Case = Case()) -> dict | None:  # noqa: B008
    """`take_steps` of one case."""
    results = take_steps(argv, [case], dtype)
    return None if results is None else results[0]


def take_steps(argv: list[str], cases: list[Case], dtype: torch.dtype | None = None) -> list[dict] | None:
    """Each case's metrics (with the gradient norm) and gradients by Hugging Face name, all from the same weights; on the last rank.

    Args:
        argv: flags of megatron_grpo.train, from problem.prepare.
        cases: the steps to take, one after the other.
        dtype: of parameters and activations in place of the job's.

    Returns:
        For each case {"metrics", "gradients", "near_ties": choices of experts on this rank that float32 could flip, with dtype float64};
        None on ranks that hold no results.
    """
    from ..trainer import loop
    from ..trainer.flags import parse_args
    from ..trainer.model import model_provider

    args = parse_args(argv)
    if dtype is not None:
        args.params_dtype = dtype
    loop.initialize(args)
    results: list = []
    with loop.make_job(args, model_provider) as job:
        start = [(t, t.detach().clone()) for t in _state(job)]
        for case in cases:
            results.append(_take(_configured(job, argv, case), case, exact=dtype == torch.float64))
            for t, value in start:
                t.data.copy_(value)
            job.trained.optimizer.reload_model_params()
    return results if results[0] is not None else None


def _state(job) -> list[torch.Tensor]:
    return [t for chunk in map(unwrap, job.trained.model) for t in (*chunk.parameters(), *chunk.buffers())]


def _configured(job, argv: list[str], case: Case):
    """The job with the case's algorithm, packing and auxiliary losses."""
    from ..algorithms import resolve_algorithm
    from ..trainer.flags import read_args
    from ..trainer.reference import load_reference

    settings, where, args = job.settings, job.where, job.args
    if case.algorithm is not None:
        settings = dataclasses.replace(settings, algorithm=resolve_algorithm(read_args([*argv, *case.algorithm])))
    if case.single:
        packing = dataclasses.replace(where.packing, use_dynamic_batch_size=False, max_tokens_per_gpu=None)
        where = dataclasses.replace(where, packing=packing, micro_batch_size=1)
    coefficient = args.moe_aux_loss_coeff
    for module in (m for chunk in job.trained.model for m in unwrap(chunk).modules() if hasattr(m, "config")):     # chunks have copies
        module.config.moe_aux_loss_coeff = coefficient if case.single else [0.0] * len(coefficient) if isinstance(coefficient, list) else 0.0
        module.config.moe_z_loss_coeff = args.moe_z_loss_coeff if case.single else None
    if settings.algorithm.needs_reference and job.reference is None:
        job.reference = load_reference(args, job.trained)
    return dataclasses.replace(
        job, settings=settings, where=where, context=dataclasses.replace(job.context, algorithm=settings.algorithm),
        reference=job.reference if settings.algorithm.needs_reference else None, source=job.source and _Shaped(job, settings))


class _Shaped:
    """The recorded samples after the algorithm's reward shaping."""

    rewards_are_advantages = False

    def __init__(self, job, settings):
        self.source, self.settings, self.hook = job.source, settings, job.context.hooks.reward_post_process

    def next(self, step: int):
        samples, counts = self.source.next(step)
        shape_rewards(samples, self.settings.algorithm.reward, self.settings.rollout.rollout_max_response_len, self.hook)
        return samples, counts


def _take(job, case: Case, exact: bool) -> dict | None:
    from ..trainer import loop

    optimizer = job.trained.optimizer
    captured: dict = {}
    records: list[dict] = []
    step = optimizer.step

    def capture():
        captured.update(_gradients(job))
        # Megatron's norm is of float32 gradients: a float64 one, on one rank, is taken here
        return (True, _norm(job), None) if exact else step()

    with _near_ties(exact) as ties:
        try:
            optimizer.step = capture
            batch = loop.rollout(job, int(case.single))
            pairs = loop.log_probs(job, batch)
            for t in _state(job):
                if t.is_floating_point():
                    t.data.mul_(POLICY_SCALE)
            results = [loop.update(job, mbs) for mbs in batch.mini_steps[:1]]
        finally:
            optimizer.step = step
    job.log.step = lambda number, metrics, seconds: records.append(metrics)
    loop.record(job, batch, results, pairs, 0, SimpleNamespace(seconds={}))
    if not records:
        return None
    metrics = {name: value for name, value in records[0].items() if name not in ("learning_rate", "skipped")}
    return {"metrics": metrics, "gradients": captured, "near_ties": ties[0]}


def _norm(job) -> float:
    return float(sum(p.main_grad.square().sum() for chunk in map(unwrap, job.trained.model) for p in chunk.parameters())) ** 0.5


@contextmanager
def _near_ties(active: bool) -> Iterator[list[int]]:
    """[how many tokens a router would send elsewhere if its logits were NEAR_TIE off], counted inside."""
    count = [0]
    if not active:
        yield count
        return
    from megatron.core.transformer.moe import router

    choose, generator = router.topk_routing_with_score_function, torch.Generator().manual_seed(0)

    def checked(logits, *args: Any, **kwargs: Any):
        out = choose(logits, *args, **kwargs)
        noise = torch.randn(logits.shape, generator=generator, dtype=logits.dtype).to(logits.device)
        shaken = choose(logits.detach() + NEAR_TIE * noise, *args, **kwargs)
        count[0] += int((out[1].bool() != shaken[1].bool()).any(-1).sum())
        return out

    router.topk_routing_with_score_function = checked
    try:
        yield count
    finally:
        router.topk_routing_with_score_function = choose


def _gradients(job) -> dict[str, np.ndarray]:
    """Whole gradients by Hugging Face name, on every rank. Collective over all ranks."""
    from ..weights import iterate_hf_tensors

    parameters = [p for chunk in map(unwrap, job.trained.model) for p in chunk.parameters()]
    weights = [p.data for p in parameters]
    for p in parameters:
        p.data = p.main_grad.to(p.dtype).view(p.shape)
    try:
        found = {name: tensor.double().cpu().numpy() for bucket in iterate_hf_tensors(job.trained.live, 1 << 24) for name, tensor in bucket}
    finally:
        for p, weight in zip(parameters, weights, strict=True):
            p.data = weight
    box = [found]
    dist.broadcast_object_list(box, src=0)
    return {name: value for name, value in box[0].items() if not name.endswith("e_score_correction_bias")}
