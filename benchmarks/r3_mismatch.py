"""Train-versus-rollout mismatch without and with R3, and that of a dense model of the same size trained the same way.

    python benchmarks/r3_mismatch.py [--seeds 1 2 3] [--engine-dtype bfloat16 --trainer-dtype float32] [--run-dir runs/r3]

The demo's model with more layers, after a supervised warm start on sums and differences of two numbers. A real SGLang server samples in one dtype
and Megatron computes the log-probs of the same samples in the other: once routed natively, once with the engine's experts replayed, so that
the two differ in nothing but the experts. `experts differ` is the share of (token, layer) whose used experts are not the engine's. The
dense models have the layers of the MoE model and, in turn, as many MLP neurons as a token of it uses, and as it has in all.

    k3    mean(r - 1 - log r), r = pi_trainer / mu on the sampled tokens        F(2)  share of tokens with max(r, 1 / r) > 2
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import fmean, geometric_mean

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from examples.demo import MODEL, make_model, train

EXPERTS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob", "mlp_only_layers", "decoder_sparse_step")
RESULT = "result: "

COMMON = """--platform cpu --use-distributed-optimizer --ckpt-format torch_dist --seq-length 32 --rollout-max-response-len 8 --rollout-shuffle
--prompt-task chain_sum --prompt-task-args {"min_terms":2,"max_terms":2,"min_digits":1,"max_digits":2} --prompt-task-format compact
--prompt-task-size 5000 --eval-num-prompts 0 --use-dynamic-batch-size --max-tokens-per-gpu 4096 --data-pad-size-multiplier 8
--lr-decay-style constant --adam-beta2 0.95 --weight-decay 0 --clip-grad 1.0""".split()
WARM_START = "--loss-type sft --rollout-batch-size 256 --lr 3e-3 --min-lr 3e-3 --lr-warmup-iters 10".split()
SAMPLE = """--algorithm grpo --no-use-kl-loss --rollout-batch-size 32 --n-samples-per-prompt 16 --rm-type task --sglang-launch local
--lr 3e-4""".split()


def configs(layers: int) -> dict[str, dict]:
    """name -> config.json of the MoE model and its dense counterparts."""
    moe = MODEL | dict(num_hidden_layers=layers)
    width = lambda experts: dict(intermediate_size=experts * moe["moe_intermediate_size"])
    dense = {k: v for k, v in moe.items() if k not in EXPERTS} | dict(architectures=["Qwen3ForCausalLM"], model_type="qwen3")
    return {"MoE": moe, "dense, active size": dense | width(moe["num_experts_per_tok"]), "dense, total size": dense | width(moe["num_experts"])}


def compare(name: str, config: dict, seed: int, args) -> dict[str, dict]:
    """Warm-start one model and measure it; way of routing -> numbers."""
    run = Path(args.run_dir).absolute() / f"seed{seed}" / name.replace(", ", "-").replace(" ", "-")
    model = make_model(run / "model", config, "0123456789+-=")
    moe = "num_experts" in config
    common = [*COMMON, "--seed", seed, "--rollout-seed", seed, "--hf-checkpoint", model]
    if moe:
        common += ["--expert-model-parallel-size", 2]
    balance = ["--moe-aux-loss-coeff", args.aux_loss] if moe else []
    train(name, [*common, *WARM_START, *balance, "--train-iters", args.warm_steps, "--save", run / "warm"], run / "warm.log")
    flags = [*common, *SAMPLE, "--pretrained-checkpoint", run / "warm", "--train-iters", args.rollouts,
             "--run-dir", run / "report", "--sglang-dtype", args.engine_dtype, *(["--bf16"] if args.trainer_dtype == "bfloat16" else []),
             *(["--use-rollout-routing-replay"] if moe else [])]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint",
               "localhost:0", __file__, "--measure", *map(str, flags)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    (run / "measure.log").write_text(done.stdout)
    lines = [line for line in done.stdout.splitlines() if line.startswith(RESULT)]
    if done.returncode or not lines:
        sys.exit(f"measuring failed with code {done.returncode}; the end of {run / 'measure.log'}:\n{done.stdout[-4000:]}")
    return json.loads(lines[0].removeprefix(RESULT))


# ---- on the ranks of the measuring job ------------------------------------------------------------------------------------------


def measure(argv: list[str]) -> None:
    """Sample --train-iters rollouts of the loaded weights and print the numbers; every rank of the job calls it."""
    import torch
    import torch.distributed as dist

    from megatron_grpo.trainer.build import initialize
    from megatron_grpo.trainer.flags import parse_args
    from megatron_grpo.trainer.loop import make_job, publish, rollout
    from megatron_grpo.trainer.model import model_provider
    from megatron_grpo.trainer.step import logprob_pass

    args = parse_args(argv)
    initialize(args)
    sums: dict[str, torch.Tensor] = {}
    with make_job(args, model_provider) as job:
        publish(job, 0)
        for i in range(args.train_iters):
            batch = rollout(job, i)
            for way, routing in (("native", "record"), ("R3", "replay")) if args.num_experts else (("native", "native"),):
                job.context.store.clear()
                logprob_pass(job.trained.model, batch.microbatches, job.context, "old_logp_T", routing)
                found = sum(_numbers(mb, job.context) for mb in batch.microbatches)
                sums[way] = sums.get(way, 0) + found
    for total in sums.values():
        dist.all_reduce(total)
    if dist.get_rank() == 0:
        names = ("k3", "f2", "experts_differ", "tokens_differ", "tokens")
        print(RESULT + json.dumps({way: dict(zip(names, _means(total), strict=True)) for way, total in sums.items()}), flush=True)


def _numbers(mb, context):
    """[6] sums of one micro-batch: k3, F(2), sampled tokens; routers and tokens whose experts differ, and how many there are."""
    import torch

    from megatron_grpo.routing.mismatch import compare
    log_r = (mb.old_logp_T - mb.rollout_logp_T)[mb.mask_T].double()
    out = [(torch.expm1(log_r) - log_r).sum(), (log_r.abs() > torch.tensor(2.0).log()).sum(), torch.tensor(len(log_r))]
    if mb.routes is not None:
        used = compare(mb.routes, context.store.get(mb.key), mb.unrouted_T)
        out += [used.differs_TL.sum(), used.counted_TL.sum(), used.differs_TL.any(1).sum(), used.counted_TL.any(1).sum()]
    return torch.stack([*(x.double() for x in out), *[torch.zeros((), dtype=torch.float64)] * (7 - len(out))])


def _means(total):
    k3, f2, tokens, differ, routers, any_layer, rows = total.tolist()
    return k3 / tokens, f2 / tokens, differ / max(routers, 1), any_layer / max(rows, 1), int(tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--layers", type=int, default=8, help="MoE layers")
    parser.add_argument("--engine-dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--trainer-dtype", default="float32", choices=("bfloat16", "float32"))
    parser.add_argument("--warm-steps", type=int, default=130, help="optimizer steps of the supervised warm start")
    parser.add_argument("--aux-loss", type=float, default=0.02, help="load-balancing loss of the warm start, as large MoE models have one")
    parser.add_argument("--rollouts", type=int, default=16, help="rollouts of 32 prompts x 16 samples")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="k3 of one training varies by a factor of 2, so use several")
    parser.add_argument("--run-dir", default="runs/r3_mismatch")
    parser.add_argument("--json", help="write the numbers to this file")
    args = parser.parse_args()
    if Path(args.run_dir).exists():
        parser.error(f"{args.run_dir} exists: give another --run-dir, or remove it")
    start, results = time.monotonic(), []
    for seed in args.seeds:
        results.append({f"{name}, {way}" if name == "MoE" else name: numbers for name, config in configs(args.layers).items()
                        for way, numbers in compare(name, config, seed, args).items()})
        print(f"\nseed {seed}: SGLang in {args.engine_dtype}, Megatron in {args.trainer_dtype}, {args.layers} layers")
        table(results[-1])
        if args.json:
            Path(args.json).write_text(json.dumps(dict(zip(map(str, args.seeds), results)), indent=1))
    print(f"\n{len(args.seeds)} seeds, {time.monotonic() - start:.0f} s: k3 is the geometric mean, the other columns are means")
    mean = {name: {key: fmean(r[name][key] for r in results) for key in first} for name, first in results[0].items()}
    k3 = {name: geometric_mean(r[name]["k3"] for r in results) for name in mean}
    table({name: r | {"k3": k3[name]} for name, r in mean.items()})
    r3 = k3["MoE, R3"]
    print(f"k3 without R3 / with R3 = {k3['MoE, native'] / r3:.2f}; with R3 / dense = "
          + ", ".join(f"{r3 / value:.2f} ({name})" for name, value in k3.items() if name.startswith("dense")))


def table(results: dict[str, dict]) -> None:
    print(f"{'':<22}{'k3':>10}{'F(2)':>10}{'experts differ':>16}{'tokens differ':>15}{'tokens':>9}")
    for name, r in results.items():
        routed = f"{r['experts_differ']:>16.2%}{r['tokens_differ']:>15.1%}" if name.startswith("MoE") else f"{'':>31}"
        print(f"{name:<22}{r['k3']:>10.2e}{r['f2']:>10.2e}{routed}{r['tokens']:>9.0f}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        measure(sys.argv[2:])
    else:
        main()
