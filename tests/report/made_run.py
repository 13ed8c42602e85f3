"""A run directory made by hand: metrics of a plausible run, samples with tokens."""

import json
import math
import random


def metrics_line(step: int, total: int, rng: random.Random, mismatch: float = 1e-3, **more) -> dict:
    x, noise = step / total, lambda scale: rng.gauss(0, scale)
    length = 220 + 400 * x + noise(15)
    metrics = {
        "reward/mean": 0.25 + 0.5 * x + noise(0.03),
        "reward/correct/mean": 0.2 + 0.5 * x + noise(0.03),
        "reward/format/mean": min(1.0, 0.6 + x),
        "response_length/mean": length,
        "samples/truncated": max(0.0, 0.1 * x + noise(0.01)),
        "entropy": 0.6 * math.exp(-1.2 * x) + noise(0.01),
        "loss": noise(0.01),
        "clip_frac_low": abs(noise(0.002)),
        "clip_frac_high": abs(noise(0.004)),
        "ref_kl": 0.02 * x + abs(noise(1e-3)),
        "ppo_kl": noise(2e-4),
        "ratio_ess": 0.995 + noise(1e-3),
        "grad_norm": 1.0 + abs(noise(0.3)),
        "learning_rate": 1e-6 * min(1, step / 10),
        "mismatch_k3": mismatch * math.exp(noise(0.2)),
        "mismatch_k1": mismatch * math.exp(noise(0.2)),
        "mismatch_f2": mismatch / 5 * math.exp(noise(0.4)),
        "mismatch_ratio_ess": 0.98 + noise(4e-3),
        "mismatch_abs_max": 1.5 * math.exp(noise(0.3)),
        "groups/zero_std": 0.1 + 0.3 * x,
        "routing/router_mismatch": 0.1 + noise(4e-3),
        "routing/token_mismatch": 0.93 + noise(4e-3),
        "routing/agreement": 0.98,
        "routing/fallback": 0.0,
        "rollout/samples_generated": 544.0,
        "rollout/samples_kept": 512.0,
        "rollout/samples_filtered": 24.0,
        "rollout/samples_failed": 0.0,
        "rollout/samples_discarded": 8.0,
        "rollout/samples_carried_out": 0.0,
        "rollout/tokens_generated": 544 * length,
        "tokens/trained": 512 * length,
        "rollout/tokens_wasted": 32 * length,
        "rollout/tokens_off_policy": 0.0,
        "my_hook/value": noise(1),
    }
    metrics |= {f"routing/router_mismatch/layer_{n}": 0.06 + 0.08 * n / 24 + noise(2e-3) for n in range(24)}
    seconds = {"rollout": 60 + 30 * x + noise(4), "logprobs": 9 + noise(0.5), "train": 31 + noise(1), "publish": 4 + noise(0.3)}
    return {"step": step, "time": 1.7e9 + 110 * step, "metrics": metrics | more, "seconds": seconds}


def sample_line(i: int, rng: random.Random) -> dict:
    words = ["Let us", "add", "the two", "numbers", ":", "17", "+", "25", "=", "42", ",", "so", "the", "answer", "is", "42", "."]
    words = words * rng.randint(1, 5)
    tokens = []
    for n, word in enumerate(words):
        old = -rng.expovariate(3)
        tokens.append(
            {
                "text": word + (" " if n % 17 != 16 else "\n"),
                "mask": n % 17 not in (9, 10),
                "logp": old + rng.gauss(0, 0.1),
                "old_logp": old,
                "rollout_logp": old + (rng.gauss(0, 0.05) if rng.random() > 0.05 else rng.gauss(0, 1.2)),
            }
        )
    reward = float(rng.random() > 0.4)
    return {
        "sample_id": i,
        "group_id": i // 4,
        "prompt": f"What is {17 + i // 4} + 25?\n",
        "response": "".join(t["text"] for t in tokens),
        "label": str(42 + i // 4),
        "reward": reward,
        "rewards": {"correct": reward, "format": 1.0},
        "advantage": reward * 1.3 - 0.6,
        "status": "completed",
        "tokens": tokens,
    }


def make_run(directory, steps: int = 60, seed: int = 0, mismatch=lambda step: 1e-3, samples: bool = True):
    """Writes metrics.jsonl with an evaluation every 10 steps, and samples of those steps."""
    rng = random.Random(seed)
    (directory / "samples").mkdir(parents=True)
    with open(directory / "metrics.jsonl", "w") as file:
        for step in range(steps + 1):
            if step:
                file.write(json.dumps(metrics_line(step, steps, rng, mismatch(step))) + "\n")
            if step % 10 == 0:
                accuracy = 0.3 + 0.45 * step / steps + rng.gauss(0, 0.02)
                file.write(
                    json.dumps(
                        {
                            "step": step,
                            "time": 1.7e9 + 110 * step + 20,
                            "metrics": {"eval/accuracy": accuracy, "eval/prompts": 200.0},
                            "seconds": {"eval": 18.0},
                        }
                    )
                    + "\n"
                )
                if samples and step:
                    (directory / "samples" / f"step_{step:07d}.jsonl").write_text(
                        "".join(json.dumps(sample_line(i, rng)) + "\n" for i in range(24))
                    )
    return directory
