"""What a GRPO optimizer step costs beside Megatron's own `train_step` with a plain language-model loss, on the same packed tokens.

    python benchmarks/step_overhead.py [--repeats 9] [--vocab 4096] [--hidden 256] [--layers 4] [<flags of megatron_grpo.train>]

Both sides run the same model, micro-batches, schedule and optimizer, by turns. "Language model" is Megatron's train_step with its own
cross entropy and loss report. "GRPO" is everything between the old log-probs and the metrics of the step: advantages, policy loss with
log-probs and entropy, backward, optimizer, reduction of the metrics. Generation, placement and the old-log-prob pass are no part of
either; the latter two are printed for themselves. On CPU times are those of the process, which other jobs do not lengthen.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.meter import free_port
from megatron_grpo.batch import Sample
from megatron_grpo.verify.problem import DEFAULT


def write_job(directory: str, o) -> list[str]:
    """A model's config.json and the samples of a step; the flags that train on them."""
    config = DEFAULT | dict(
        hidden_size=o.hidden, intermediate_size=o.hidden, moe_intermediate_size=o.hidden // 2, head_dim=32, num_attention_heads=o.hidden // 32,
        num_key_value_heads=2, vocab_size=o.vocab, num_experts_per_tok=2, max_position_embeddings=4096, num_hidden_layers=o.layers)
    with open(os.path.join(directory, "config.json"), "w") as file:
        json.dump(config, file)
    rng, samples = np.random.default_rng(0), []
    for i in range(o.samples):
        prompt, response = int(rng.integers(16, 48)), int(rng.integers(o.length // 2, o.length))
        samples.append(Sample(
            sample_id=i, group_id=i // 4, tokens=rng.integers(0, o.vocab, prompt + response), prompt_length=prompt,
            loss_mask=np.ones(response, bool), rollout_logp=np.full(response, -np.log(o.vocab), np.float32), reward=float(rng.normal())))
    torch.save(samples, os.path.join(directory, "samples_0_0.pt"))
    return ["--algorithm", "grpo", "--no-use-kl-loss", "--use-dynamic-batch-size", "--max-tokens-per-gpu", str(o.tokens),
            "--seq-length", str(o.tokens), "--rollout-batch-size", str(o.samples // 4), "--n-samples-per-prompt", "4",
            "--rollout-max-response-len", str(o.length), "--train-iters", "100000", "--lr", "1e-6", "--moe-router-load-balancing-type", "none",
            "--hf-checkpoint", directory, "--load-debug-rollout-data", os.path.join(directory, "samples_{step}_{dp_rank}.pt")]


def language_model_step(job, microbatches):
    """One Megatron train_step over the micro-batches."""
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.rerun_state_machine import RerunDataIterator
    from megatron.training import training

    def loss_function(mask_T, losses):
        loss, tokens = (losses.flatten() * mask_T).sum(), mask_T.sum().int()
        return loss, tokens, {"lm loss": torch.stack([loss.detach(), tokens])}

    def forward_step(iterator, model):
        mb = next(iterator)
        losses = model(mb.tokens, mb.positions, None, labels=mb.labels_T.view_as(mb.tokens), packed_seq_params=mb.packed_seq_params)
        return losses, lambda out: loss_function((~mb.padding_T).float(), out)

    model, optimizer = job.trained.model, job.trained.optimizer
    iterators = [RerunDataIterator(iter(microbatches)) for _ in model]
    with mock.patch.object(training, "get_num_microbatches", lambda: len(microbatches)):
        training.train_step(forward_step, iterators if len(model) > 1 else iterators[0], model, optimizer, job.trained.scheduler,
                            job.trained.config, get_forward_backward_func(), iteration=0)


def grpo_step(job, batch):
    """Advantages, the optimizer step, and its metrics."""
    from megatron.core import mpu

    from megatron_grpo.trainer import loop
    groups = dict(cp_group=mpu.get_context_parallel_group(), dp_cp_group=mpu.get_data_parallel_group(with_context_parallel=True))
    pairs = loop.fill_advantages(batch, job.settings.algorithm, job.context.hooks, **groups) if loop.is_last_stage() else {}
    results = [loop.update(job, mbs) for mbs in batch.mini_steps]
    loop.record(job, batch, results, pairs, 0, SimpleNamespace(seconds={}))


def clock(device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


def measure(argv: list[str], repeats: int) -> dict[str, list[float]]:
    from megatron_grpo.trainer import loop
    from megatron_grpo.trainer.flags import parse_args
    from megatron_grpo.trainer.model import model_provider

    args = parse_args(argv)
    loop.initialize(args)
    times: dict[str, list[float]] = {}
    with loop.make_job(args, model_provider) as job:
        job.log.step = lambda *a: None
        device, kept = job.trained.device, {}

        def timed(name, fn):
            start = clock(device)
            kept[name] = fn()
            times.setdefault(name, []).append(clock(device) - start)

        for turn in range(repeats + 1):       # the first is not counted
            timed("placement", lambda: loop.rollout(job, 0))
            batch = kept["placement"]
            timed("old log-probs", lambda: loop.log_probs(job, batch))
            both = [("language model", lambda: language_model_step(job, batch.mini_steps[0])), ("GRPO", lambda: grpo_step(job, batch))]
            for name, fn in both[::(-1) ** turn]:
                timed(name, fn)
        tokens = sum(len(mb.mask_T) for mb in batch.microbatches)
    return {"tokens": tokens, "micro-batches": len(batch.microbatches)} | {name: found[1:] for name, found in times.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name, default in dict(repeats=7, vocab=4096, hidden=512, layers=4, samples=16, length=384, tokens=1024).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options, flags = parser.parse_known_args()
    if not torch.cuda.is_available():
        flags = ["--platform", "cpu", *flags]
        torch.set_num_threads(1)
    for name, value in dict(RANK=0, LOCAL_RANK=0, WORLD_SIZE=1, MASTER_ADDR="localhost", MASTER_PORT=free_port()).items():
        os.environ.setdefault(name, str(value))
    with tempfile.TemporaryDirectory() as directory:
        box = [write_job(directory, options)]
        found = measure([*box[0], *flags], options.repeats)
    if dist.get_rank():
        return
    base = statistics.median(found["language model"])
    print(f"{found['tokens']} tokens in {found['micro-batches']} micro-batches, {options.layers} layers of width {options.hidden}, "
          f"vocabulary {options.vocab}; median of {options.repeats} steps by turns")
    for name in ("language model", "GRPO", "old log-probs", "placement"):
        spread = sorted(found[name])
        print(f"  {name:<16}{statistics.median(spread) * 1e3:>10.1f} ms   ({spread[0] * 1e3:.1f} .. {spread[-1] * 1e3:.1f})"
              f"{statistics.median(spread) / base:>9.3f} of the language model's step")
    pairs = [ours / theirs for ours, theirs in zip(found["GRPO"], found["language model"], strict=True)]
    print(f"a GRPO step costs {statistics.median(pairs) - 1:+.1%} (median of the {len(pairs)} ratios)")


if __name__ == "__main__":
    main()
