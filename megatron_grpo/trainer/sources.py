"""Where a leader's samples come from: the engine, recorded rollouts, or the labels of the prompts.

Every source has the same face, and lives on leaders only:

    next(step) -> (samples, counts)       the samples of the rollout that starts at optimizer step `step`, and counts that add up over leaders
    paused()                              inside, nothing is generated or drawn
    state() / restore(states)             what a checkpoint keeps (recorded rollouts: nothing); ask for it while all leaders' sources are paused
    state_untrained(damaged)              the same after a rollout that was taken and not trained on, for the fault of these samples
    close()
    rewards_are_advantages                whether a reward hook made the last rollout's rewards advantages already
"""

import asyncio
import contextlib
import os
import sys
import threading
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from ..batch import Sample, SampleGroup
from ..rewards.reward import Rewards
from ..rewards.shaping import shape_rewards
from ..rollout.evaluate import evaluate
from ..rollout.pipeline import Rollouts
from ..rollout.prompts import PromptOrder, Prompts, load_prompts
from ..rollout.sampler import Sampler
from ..rollout.tickets import LocalTickets, StoreTickets
from ..settings import ConfigError
from .checkpoint import load_leader_states


class EventLoop:
    """One asyncio loop in a thread of its own, for the whole run: connections and health checks outlive a step."""

    def __init__(self):
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True, name="rollout")
        self.thread.start()

    def run(self, coroutine, timeout: float | None = None):
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(timeout)

    def close(self):
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(timeout=10)


class SupervisedSource:
    """One sample a prompt, whose response is the label: a warm start (--loss-type sft)."""

    rewards_are_advantages = False

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

    def paused(self):
        return contextlib.nullcontext()

    def state(self) -> dict:
        return {"position": self.position}

    def state_untrained(self, damaged: frozenset[int]) -> dict:
        return {"position": self.position - self.config.rollout_batch_size}

    def restore(self, states: list[dict]) -> None:
        self.position = states[0]["position"]

    def close(self) -> None: ...


class RecordedSource:
    """Samples that --save-debug-rollout-data wrote, of any number of data-parallel ranks."""

    rewards_are_advantages = False

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

    def paused(self):
        return contextlib.nullcontext()

    def state(self) -> dict:
        return {}

    def state_untrained(self, damaged: frozenset[int]) -> dict:
        return {}

    def close(self) -> None: ...


def save_samples(template: str, step: int, dp_rank: int, samples: list[Sample]) -> None:
    """Write a leader's samples for RecordedSource."""
    path = template.format(step=step, dp_rank=dp_rank)
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    torch.save(samples, path + ".tmp")
    os.replace(path + ".tmp", path)


class EngineSource:
    """Samples that the engine generates for this leader, scored and shaped.

    Args:
        link: the engine link, whose client and event loop it uses.
        tickets: shared with the other leaders.
        end: the optimizer step at which the run ends.
    """

    def __init__(self, link, tickets, *, prompts, held_out, order, tokenizer, rewards, hooks, settings, end: int, dp_rank: int, dp_size: int):
        self.link, self.held_out, self.tokenizer, self.rewards, self.hooks, self.settings = link, held_out, tokenizer, rewards, hooks, settings
        self.dp_rank, self.dp_size, self.rewards_are_advantages = dp_rank, dp_size, False
        self.bar, self.counted, self.taken = Bar(dp_rank == 0), dict[str, float](), list[SampleGroup]()
        sampler = Sampler(
            link.client, prompts, order, rewards, tokenizer, settings.rollout, hooks=hooks, tickets=tickets, on_group=self.bar,
            return_routes=settings.routing.use_rollout_routing_replay, version_step=settings.trainer.num_steps_per_rollout,
            stall_limit_s=settings.trainer.control_timeout)
        self.rollouts = Rollouts(link.events.loop, sampler, settings.trainer.control_timeout, end)

    def next(self, step: int) -> tuple[list[Sample], dict]:
        self.taken = []
        with self.bar:
            rollout = self.rollouts.next(step)
        self.taken = [replace(g, samples=[replace(s, rewards=dict(s.rewards)) for s in g.samples]) for g in rollout.groups]     # before shaping
        samples = rollout.samples
        self.rewards_are_advantages = shape_rewards(
            samples, self.settings.algorithm.reward, self.settings.rollout.rollout_max_response_len, self.hooks.reward_post_process)
        counts = {f"rollout/{name}": value for name, value in rollout.books.metrics().items()}
        return samples, counts | {"rollout/tokens_off_policy": float(rollout.off_policy_tokens)} | self._engine_counts()

    def _engine_counts(self) -> dict[str, float]:
        """Of the client's requests since the last call."""
        before, self.counted = self.counted, self.link.client.stats.metrics()
        return {f"engine/{name}": value - before.get(name, 0.0) for name, value in self.counted.items()}

    def paused(self):
        """Inside, no request is at the engine; what was cut goes on after it."""
        return self.rollouts.paused()

    def evaluate(self):
        """This leader's share of the held-out prompts, greedily; None without any."""
        if self.held_out is None:
            return None
        share = range(self.dp_rank, len(self.held_out), self.dp_size)
        return self.rollouts.run(evaluate(
            self.link.client, self.held_out, self.rewards, self.tokenizer, self.settings.rollout, indices=share,
            max_response_len=self.settings.trainer.eval_max_response_len, function=self.hooks.rollout))

    def state(self) -> dict:
        return self.rollouts.state_dict()

    def state_untrained(self, damaged: frozenset[int]) -> dict:
        """As if the last rollout, which failed, had not been taken; its damaged samples are to be sampled again."""
        state = self.state()
        return state | {"groups": [*self.rollouts.sampler.untrained(self.taken, damaged), *state["groups"]]}

    def restore(self, states: list[dict]) -> None:
        self.rollouts.load_state_dict(states)

    def close(self) -> None:
        self.rollouts.close()
        self.link.events.run(self.rewards.close())


class Bar:
    """A progress bar of the groups of a rollout, on the first leader's terminal; silent elsewhere."""

    def __init__(self, active: bool):
        self.active, self.bar = active and sys.stderr.isatty(), None

    def __enter__(self):
        self.bar = tqdm(desc="rollout", unit="group", leave=False, disable=not self.active)

    def __call__(self, kept: int, wanted: int) -> None:
        bar = self.bar      # called from the event loop's thread, also after `__exit__` when rollouts are generated ahead
        if bar is not None:
            bar.total = wanted
            bar.update(kept - bar.n)

    def __exit__(self, *_):
        self.bar.close()
        self.bar = None


@dataclass
class Data:
    """Prompts and tokenizer; read before anything slow starts, so that a wrong path or key fails at once."""

    tokenizer: Any
    prompts: Prompts
    held_out: Prompts | None
    order: PromptOrder


def load_data(args) -> Data | None:
    """None when recorded samples are trained on.

    Raises:
        ConfigError: names the flag, file, line or key, and the fix.
    """
    settings = args.grpo
    if settings.trainer.load_debug_rollout_data:
        return None
    tokenizer = load_tokenizer(settings.weights.hf_checkpoint, args.trust_remote_code)
    prompts, held_out = load_prompts(settings.prompts, tokenizer, settings.trainer.eval_num_prompts)
    return Data(tokenizer, prompts, held_out, PromptOrder(len(prompts), settings.prompts.rollout_shuffle, settings.prompts.rollout_seed))


@dataclass
class LeaderState:
    """What a leader keeps in a checkpoint.

    Attributes:
        source: the kind of source whose `state` it is.
        reference: the identity of the KL's reference, None without one.
    """

    source: str
    state: dict
    reference: str | None

    @classmethod
    def of(cls, source, reference, damaged: frozenset[int] | None = None) -> "LeaderState":
        """Args: damaged: the samples for which the last rollout was not trained on; None when it was."""
        state = source.state() if damaged is None else source.state_untrained(damaged)
        return cls(type(source).__name__, state, reference and reference.identity)


def restore(source, states: list[LeaderState], args, reference) -> None:
    """Go on where the checkpoint's leaders stood.

    Raises:
        ConfigError: they did something else than this run, or had another reference and --ref-load does not say that this is meant.
    """
    then = states[0]
    if reference is not None and then.reference not in (None, reference.identity) and not args.grpo.trainer.ref_load:
        raise ConfigError(f"--load {args.load}: its KL had another reference than --hf-checkpoint {args.grpo.weights.hf_checkpoint} holds now; "
                          "give the one that is meant by --ref-load")
    if isinstance(source, RecordedSource):      # recorded rollouts stand by themselves
        return
    if then.source != type(source).__name__:
        raise ConfigError(f"--load {args.load}: step {args.iteration} is of another kind of run ({then.source}, this is a {type(source).__name__}), "
                          "and says nothing about which prompts to draw: start anew from its weights with --finetune")
    source.restore([state.state for state in states])


def make_source(args, data: Data | None, link, groups, hooks, reference):
    """The leader's source that the flags ask for, restored to the position of the checkpoint that was loaded."""
    settings, at = args.grpo, dict(dp_rank=groups.dp_rank, dp_size=groups.dp_size)
    if data is None:
        source: Any = RecordedSource(settings.trainer.load_debug_rollout_data, **at)
    elif settings.trainer.loss_type == "sft":
        source = SupervisedSource(data.prompts, data.order, data.tokenizer, settings.rollout, **at)
    else:
        tickets = LocalTickets() if groups.dp_size == 1 else StoreTickets(
            default_store(), groups.dp_rank, groups.dp_size, settings.rollout.rollout_ahead)
        source = EngineSource(link, tickets, prompts=data.prompts, held_out=data.held_out, order=data.order, tokenizer=data.tokenizer,
                              rewards=Rewards(settings.verifier, hooks.rm), hooks=hooks, settings=settings, end=args.train_iters, **at)
    if args.load and args.iteration:
        restore(source, load_leader_states(args.load, args.iteration), args, reference)
    return source


def default_store():
    """The job's TCPStore."""
    from torch.distributed.distributed_c10d import _get_default_store
    return _get_default_store()


def load_tokenizer(path: str, trust_remote_code: bool):
    """The Hugging Face tokenizer of a directory, of the directory's own code only with Megatron's --trust-remote-code.

    Raises:
        ConfigError: there is none, or it needs code that is not trusted.
    """
    from transformers import AutoTokenizer
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (ImportError, OSError, ValueError) as error:
        if not trust_remote_code and "trust_remote_code" in str(error):
            raise ConfigError(f"--hf-checkpoint {path}: its tokenizer is Python code in that directory: read it, then give --trust-remote-code "
                              "(an SGLang server that is not started by --sglang-launch needs its own)") from None
        raise ConfigError(f"--hf-checkpoint {path}: no tokenizer: {error}") from None
    if tokenizer.eos_token_id is None:
        raise ConfigError(f"--hf-checkpoint {path}: the tokenizer has no end-of-text token, so no response would end; set eos_token")
    return tokenizer
