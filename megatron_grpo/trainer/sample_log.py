"""Samples with their tokens' log-probs, for the report: RUN/samples/step_0000010.jsonl, one sample a line."""

import json
import os
from typing import TYPE_CHECKING

import numpy as np

from .build import is_last_stage
from .distribute import RolloutBatch

if TYPE_CHECKING:
    from .loop import Job

STREAMS = ("logp_T", "old_logp_T", "advantage_T")


def write_samples(job: "Job", batch: RolloutBatch, step: int, limit: int) -> None:
    """The first `limit` samples that the first replica trained on. Collective over that replica; the others return at once."""
    if job.log.directory is None or job.groups.dp_rank != 0 or not limit:
        return
    chosen, count = [], 0
    for mb in batch.microbatches:
        if count < limit and mb.sample_ids:
            chosen.append(mb)
            count += len(mb.sample_ids)
    mine = None
    if is_last_stage():
        mine = [[None if getattr(mb, name) is None else getattr(mb, name).float().cpu() for name in STREAMS] for mb in chosen]
    parts = job.groups.to_leader(mine)
    if parts is None:
        return
    last = max(place.pp_rank for place in job.groups.places)
    shards = [part for place, part in zip(job.groups.places, parts, strict=True) if place.pp_rank == last and place.tp_rank == 0]
    directory = os.path.join(job.log.directory, "samples")
    os.makedirs(directory, exist_ok=True)
    tokenizer = job.source.tokenizer
    with open(os.path.join(directory, f"step_{step:07d}.jsonl"), "w") as file:
        for i, mb in enumerate(chosen):
            streams = [None if shards[0][i][k] is None else mb.layout.gather([shard[i][k] for shard in shards]).numpy() for k in range(len(STREAMS))]
            start = 0
            for sample_id, length in zip(mb.sample_ids, mb.layout.lengths, strict=True):
                file.write(json.dumps(_record(batch.samples[sample_id], [None if s is None else s[start:start + length] for s in streams],
                                              tokenizer)) + "\n")
                start += length


def _record(sample, streams, tokenizer) -> dict:
    first, n = sample.prompt_length - 1, sample.response_length        # the token before the first response token predicts it
    logp, old_logp, advantage = ([None] * n if s is None else np.round(s[first:first + n], 5).tolist() for s in streams)
    tokens = [dict(text=tokenizer.decode([int(t)]), mask=int(m), logp=a, old_logp=b, rollout_logp=round(float(r), 5))
              for t, m, a, b, r in zip(sample.tokens[sample.prompt_length:], sample.loss_mask, logp, old_logp, sample.rollout_logp, strict=True)]
    trained = [a for a, m in zip(advantage, sample.loss_mask, strict=True) if m and a is not None]
    label = None if sample.label is None else str(sample.label)
    return dict(sample_id=sample.sample_id, group_id=sample.group_id, prompt=sample.prompt, response=sample.response, label=label,
                reward=sample.reward, rewards=sample.rewards, advantage=trained[0] if trained else 0.0, status=sample.status.value, tokens=tokens)
