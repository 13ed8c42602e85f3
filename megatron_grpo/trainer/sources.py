"""Where a leader's samples come from: the engine, recorded rollouts, or the labels of the prompts.

Every source has the same face, and lives on leaders only:

    next(step) -> (samples, metrics)      the samples of the rollout that starts at optimizer step `step`
    state() / restore(states)             what a checkpoint keeps
    close()
"""

import asyncio
import os
import threading

import numpy as np
import torch

from ..batch import Sample
from ..settings import ConfigError


class EventLoop:
    """One asyncio loop in a thread of its own, for the whole run: connections and health checks outlive a step."""

    def __init__(self):
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True, name="rollout")
        self.thread.start()

    def run(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result()

    def close(self):
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(timeout=10)


class SupervisedSource:
    """One sample a prompt, whose response is the label: a warm start (--loss-type sft)."""

    def __init__(self, prompts, order, tokenizer, config, dp_rank: int, dp_size: int):
        self.prompts, self.order, self.tokenizer, self.config = prompts, order, tokenizer, config
        self.dp_rank, self.dp_size, self.position = dp_rank, dp_size, 0

    def next(self, step: int) -> tuple[list[Sample], dict]:
        first, self.position = self.position, self.position + self.config.rollout_batch_size
        return [self._sample(i) for i in range(first, self.position) if i % self.dp_size == self.dp_rank], {}

    def _sample(self, position: int) -> Sample:
        prompt = self.prompts[self.order[position]]
        if prompt.label is None:
            raise ConfigError(f"{self.prompts.source}: prompt {prompt.index} has no label to learn from; give --label-key")
        response = self.tokenizer.encode(str(prompt.label), add_special_tokens=False) + [self.tokenizer.eos_token_id]
        n = len(response)
        if n > self.config.rollout_max_response_len:
            raise ConfigError(f"{self.prompts.source}: the label of prompt {prompt.index} has {n} tokens, over --rollout-max-response-len")
        return Sample(sample_id=position, group_id=position, tokens=np.array(prompt.tokens + response), prompt_length=len(prompt.tokens),
                      loss_mask=np.ones(n, bool), rollout_logp=np.zeros(n, np.float32), reward=1.0, prompt=prompt.text, response=str(prompt.label))

    def state(self) -> dict:
        return {"position": self.position}

    def restore(self, states: list[dict]) -> None:
        self.position = states[0]["position"]

    def close(self) -> None: ...


class RecordedSource:
    """Samples that --save-debug-rollout-data wrote, of any number of data-parallel ranks."""

    def __init__(self, template: str, dp_rank: int, dp_size: int):
        self.template, self.dp_rank, self.dp_size = template, dp_rank, dp_size

    def next(self, step: int) -> tuple[list[Sample], dict]:
        samples: list[Sample] = []
        for rank in range(10**6):
            path = self.template.format(step=step, dp_rank=rank)
            if not os.path.exists(path) or (rank and path == self.template.format(step=step, dp_rank=0)):
                break
            samples += torch.load(path, weights_only=False)
        if not samples:
            raise ConfigError(f"--load-debug-rollout-data: no file {self.template.format(step=step, dp_rank=0)}")
        groups = sorted({s.group_id for s in samples})
        mine = set(groups[self.dp_rank::self.dp_size])
        return sorted((s for s in samples if s.group_id in mine), key=lambda s: s.sample_id), {}

    def state(self) -> dict:
        return {}

    def restore(self, states: list[dict]) -> None: ...

    def close(self) -> None: ...


def save_samples(template: str, step: int, dp_rank: int, samples: list[Sample]) -> None:
    """Write a leader's samples for RecordedSource."""
    path = template.format(step=step, dp_rank=dp_rank)
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    torch.save(samples, path + ".tmp")
    os.replace(path + ".tmp", path)
