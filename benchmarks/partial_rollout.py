"""Idle time of the rollout phase under long-tailed response lengths: waiting for all, over-sampling, partial rollouts.

    python -m benchmarks.partial_rollout [--steps 20] [--json FILE]

The real sampler on a simulated engine and simulated time. Lengths are log-normal (median 128 tokens, sigma 1) and cut at 2048; they depend
on the prompt and on the sample, so that few samples hold the step, as APRIL (arXiv 2509.18521) describes. One simulated token stands
for 16. The engine has as many decoding slots as a step has samples; idle is a slot without work while a rollout phase runs. Training
time is not simulated.

Two floors: no idle time, and the lengths trained as they are drawn. `long` is the share of trained samples over the 95th percentile of the
lengths (the last steps' longest ones are still in flight), `lost` counts groups that are neither trained nor in flight at the end, and
`overdue` those in flight that were drawn more than 8 steps before the end.
"""

import argparse
import functools
import json
import math
import statistics

from benchmarks.simulation import SimulatedEngine, hash_of, run_virtual
from megatron_grpo.batch import Sample
from megatron_grpo.rollout.config import PromptConfig, RolloutConfig
from megatron_grpo.rollout.prompts import PromptOrder, Prompts
from megatron_grpo.rollout.sampler import Sampler

PROMPTS, SAMPLES = 64, 8                            # of a step
MEDIAN, SIGMA_PROMPT, SIGMA_SAMPLE, LONGEST = 128, 0.6, 0.8, 2048
SECONDS_PER_TOKEN = 16 * 0.02
STRATEGIES = {
    "wait for all": {},
    "over-sampling": dict(over_sampling_batch_size=2 * PROMPTS),
    "partial rollouts": dict(over_sampling_batch_size=2 * PROMPTS, partial_rollout=True),
    "partial, staleness <= 2": dict(over_sampling_batch_size=2 * PROMPTS, partial_rollout=True, max_weight_staleness=2),
}


class Letters:
    """A tokenizer of letters."""

    eos_token_id = 0

    def encode(self, text):
        return [1 + ord(c) % 60 for c in text]

    def decode(self, tokens, skip_special_tokens):
        return ""


class NoRewards:
    async def __call__(self, sample: Sample): ...
    async def finish(self, samples): ...


def length_of(session: str, prompt: list[int]) -> int:
    """exp of a normal number of the prompt plus one of the sample."""
    normal = lambda text: statistics.NormalDist().inv_cdf((hash_of(text * 3) + 0.5) / 1_000_003)
    return min(LONGEST, max(1, round(MEDIAN * math.exp(SIGMA_PROMPT * normal(str(prompt)) + SIGMA_SAMPLE * normal(session)))))


def simulate(options: dict, steps: int) -> dict:
    """One strategy: idle share and time of the rollout phases, waste, and what became of the long samples."""
    engine = SimulatedEngine(length_of, seconds_per_token=SECONDS_PER_TOKEN, slots=PROMPTS * SAMPLES)
    rows = [{"input": f"prompt {i}", "label": None, "metadata": None} for i in range(100_000)]
    config = RolloutConfig(rollout_batch_size=PROMPTS, n_samples_per_prompt=SAMPLES, rollout_max_response_len=LONGEST, **options)
    prompts = Prompts(rows, Letters(), PromptConfig(), "simulated")
    sampler = Sampler(engine, prompts, PromptOrder(len(rows), False, 0), NoRewards(), Letters(), config)

    async def run():
        rollouts = []
        for engine.version in range(steps):
            rollouts.append(await sampler.rollout(engine.version))
        return rollouts, [g.position for g in (*sampler.running.values(), *sampler.finished)] + [p for p, _ in sampler.returned]

    rollouts, in_flight = run_virtual(run())
    trained = [s for r in rollouts for s in r.samples]
    seconds = sum(r.seconds for r in rollouts)
    slots = PROMPTS * SAMPLES
    oldest = [max((version - int(v) for s in r.samples for v, _, _ in s.weight_versions), default=0) for version, r in enumerate(rollouts)]
    positions = {s.group_id for s in trained}
    drawn = range(sampler.tickets.drawn())
    return {
        "idle_slot_hours": (seconds * slots - engine.busy_s) / 3600, "idle_share": 1 - engine.busy_s / (seconds * slots),
        "seconds_a_step": seconds / steps, "wasted_token_share": sum(r.books.wasted_tokens for r in rollouts) / engine.sampled,
        "off_policy_token_share": sum(r.off_policy_tokens for r in rollouts) / sum(s.response_length for s in trained),
        "oldest_token": max(oldest), "long_share": sum(s.response_length >= long_length() for s in trained) / len(trained),
        "groups_lost": len(set(drawn) - positions - set(in_flight)),
        "groups_overdue": sum(p < min(PROMPTS * (steps - 8), len(drawn)) for p in in_flight)}


@functools.cache
def long_length() -> int:
    """95th percentile of the lengths."""
    drawn = sorted(length_of(f"sample-{p * SAMPLES + i}", Letters().encode(f"prompt {p}")) for p in range(500) for i in range(SAMPLES))
    return drawn[int(0.95 * len(drawn))]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--json", help="write the figures to this file")
    args = parser.parse_args()
    results = {name: simulate(options, args.steps) for name, options in STRATEGIES.items()}
    base = results["wait for all"]
    print(f"{PROMPTS} prompts x {SAMPLES} samples, {args.steps} steps; long means {long_length()} tokens or more")
    print(f"{'':26}{'idle h':>8}{'cut':>7}{'idle':>7}{'s/step':>8}{'wasted':>8}{'off-policy':>11}{'oldest':>7}{'long':>7}"
          f"{'lost':>6}{'overdue':>8}")
    for name, r in results.items():
        r["idle_cut"] = 1 - r["idle_slot_hours"] / base["idle_slot_hours"]
        print(f"{name:26}{r['idle_slot_hours']:8.1f}{r['idle_cut']:7.0%}{r['idle_share']:7.1%}{r['seconds_a_step']:8.1f}"
              f"{r['wasted_token_share']:8.1%}{r['off_policy_token_share']:11.1%}{r['oldest_token']:7d}{r['long_share']:7.1%}"
              f"{r['groups_lost']:6d}{r['groups_overdue']:8d}")
    if args.json:
        with open(args.json, "w") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
