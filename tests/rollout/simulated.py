"""A sampler over a simulated engine on virtual time."""

import numpy as np

from benchmarks.simulation import SimulatedEngine, hash_of
from megatron_grpo.batch import Sample
from megatron_grpo.rewards.reward import abort
from megatron_grpo.rollout.config import PromptConfig, RolloutConfig
from megatron_grpo.rollout.engine import EngineError
from megatron_grpo.rollout.prompts import PromptOrder, Prompts
from megatron_grpo.rollout.sampler import Sampler

EOS = 0


class Tokenizer:
    """One token a character; token 0 ends a response."""

    eos_token_id = EOS

    def encode(self, text: str) -> list[int]:
        return [1 + ord(c) % 63 for c in text]

    def decode(self, tokens, skip_special_tokens=False) -> str:
        return " ".join(str(t) for t in tokens if t != EOS or not skip_special_tokens)


class StubRewards:
    """reward_of(sample) -> number, or None for a verifier that failed."""

    def __init__(self, reward_of=lambda sample: float(sample.sample_id % 2)):
        self.reward_of, self.calls = reward_of, 0

    async def __call__(self, sample: Sample) -> None:
        self.calls += 1
        value = self.reward_of(sample)
        if value is None:
            abort(sample, "reward: broken verifier")
        else:
            sample.rewards, sample.reward = {"r": value}, value

    async def finish(self, samples) -> None: ...


class Faulty(SimulatedEngine):
    """A fault for each request, "" for none: an error before or after some tokens, no routes, an unasked abort, too many tokens."""

    def __init__(self, draw_fault, length_of, **options):
        super().__init__(length_of, **options)
        self.draw_fault = draw_fault

    async def generate(self, request):
        fault = self.draw_fault()
        if fault == "refused":
            raise EngineError("refused")
        generation = await super().generate(request)
        if fault == "reset":
            raise EngineError("reset")
        if fault == "no routes":
            generation.routes = None
        if fault == "too long":
            generation.output_ids = generation.output_ids + [1] * 1000
        if fault == "empty abort":
            generation.output_ids, generation.finish_reason, generation.routes, generation.weight_versions = [], "abort", None, []
        return generation


def prompts(count: int = 1000) -> Prompts:
    return Prompts([{"input": f"prompt {i}", "label": i, "metadata": None} for i in range(count)], Tokenizer(), PromptConfig(), "test")


def lengths(low: int = 2, high: int = 40):
    """Response length of a conversation: uniform in [low, high], by its name."""
    return lambda session, prompt: low + hash_of(session) % (high - low + 1)


def make_sampler(engine=None, *, rewards=None, count: int = 1000, **options):
    """Sampler; keywords of RolloutConfig and of Sampler are told apart by name."""
    fields = set(RolloutConfig.__dataclass_fields__)
    config = RolloutConfig(**{k: options.pop(k) for k in list(options) if k in fields})
    engine = engine or SimulatedEngine(lengths())
    return Sampler(engine, prompts(count), PromptOrder(count, True, 7), rewards or StubRewards(), Tokenizer(), config, **options)


def same(a: Sample, b: Sample) -> bool:
    """Bitwise equality of two samples."""
    for name in Sample.__dataclass_fields__:
        x, y = getattr(a, name), getattr(b, name)
        if isinstance(x, np.ndarray):
            if x.dtype != y.dtype or x.shape != y.shape or (x != y).any():
                return False
        elif name == "sampling_mask" and x is not None:
            if len(x) != len(y) or any((p != q).any() for p, q in zip(x, y, strict=True)):
                return False
        elif x != y:
            return False
    return True
