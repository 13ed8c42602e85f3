"""The main job on a laptop: warm-start a small mixture-of-experts model, then train it with GRPO against a real SGLang server.

    make demo                         or    python examples/demo.py --seed 1 --run-dir runs/demo

Two ranks of an unmodified Megatron-Core (expert parallel 2, gloo) and one SGLang server share this machine's CPU. The task is
addition and subtraction of numbers of up to two digits (reasoning-gym's chain_sum), one character a token. The last line is JSON:
held-out accuracy before and after GRPO, train-versus-rollout mismatch, steps, seconds, and the report to open in a browser.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from megatron_grpo.rollout.tokenizer import make_character_tokenizer

MODEL = dict(
    architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", vocab_size=32, hidden_size=64, intermediate_size=128,
    moe_intermediate_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=8,
    num_experts_per_tok=2, norm_topk_prob=True, mlp_only_layers=[], decoder_sparse_step=1, max_position_embeddings=128,
    tie_word_embeddings=False, rms_norm_eps=1e-6, rope_theta=10000.0, hidden_act="silu", attention_bias=False)

COMMON = """--platform cpu --expert-model-parallel-size 2 --use-distributed-optimizer --ckpt-format torch_dist
--prompt-task chain_sum --prompt-task-args {"min_terms":2,"max_terms":2,"min_digits":1,"max_digits":2} --prompt-task-format compact
--prompt-task-size 5000 --rollout-shuffle --rollout-max-response-len 8 --eval-num-prompts 200
--seq-length 32 --use-dynamic-batch-size --max-tokens-per-gpu 4096 --data-pad-size-multiplier 8
--lr-decay-style constant --adam-beta2 0.95 --weight-decay 0 --clip-grad 1.0""".split()

WARM_START = "--loss-type sft --rollout-batch-size 256 --lr 3e-3 --min-lr 3e-3 --lr-warmup-iters 10".split()

GRPO = """--algorithm grpo --no-use-kl-loss --rollout-batch-size 32 --n-samples-per-prompt 16 --rm-type task
--sglang-launch local --sglang-dtype float32 --lr 3e-4 --min-lr 3e-4""".split()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--run-dir", default="runs/demo")
    parser.add_argument("--warm-steps", type=int, default=300, help="optimizer steps of the warm start")
    parser.add_argument("--steps", type=int, default=130, help="GRPO steps")
    parser.add_argument("flags", nargs="*", help="further flags of megatron_grpo.train for the GRPO run, after --")
    args = parser.parse_args()
    start, run = time.monotonic(), Path(args.run_dir).absolute() / f"seed{args.seed}"
    if run.exists():
        parser.error(f"{run} exists: give another --run-dir, or remove it")

    model = run / "model"
    model.mkdir(parents=True)
    tokenizer = make_character_tokenizer(model, "0123456789+-=")
    ids = dict(bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    (model / "config.json").write_text(json.dumps(MODEL | ids, indent=1))
    seeds = ["--seed", str(args.seed), "--rollout-seed", str(args.seed)]

    train("warm start", [*COMMON, *WARM_START, *seeds, "--hf-checkpoint", model, "--train-iters", args.warm_steps,
                         "--save", run / "warm", "--save-interval", 10**6], run / "warm.log")
    train("GRPO", [*COMMON, *GRPO, *seeds, "--hf-checkpoint", model, "--pretrained-checkpoint", run / "warm", "--train-iters", args.steps,
                   "--eval-interval", max(args.steps // 4, 1), "--save", run / "grpo", "--save-interval", 10**6, "--run-dir", run / "report",
                   *args.flags], run / "grpo.log")

    lines = [json.loads(line) for line in (run / "report" / "metrics.jsonl").read_text().splitlines()]
    accuracy = [line["metrics"]["eval/accuracy"] for line in lines if "eval/accuracy" in line["metrics"]]
    mismatch = [line["metrics"]["mismatch_k3"] for line in lines if "mismatch_k3" in line["metrics"]]
    print(json.dumps(dict(eval_before=accuracy[0], eval_after=accuracy[-1], mismatch_k3=sum(mismatch) / len(mismatch), steps=args.steps,
                          seconds=round(time.monotonic() - start), report=str(run / "report" / "report.html"))))


def train(what: str, flags: list, log: Path) -> None:
    """One job on two ranks; its progress lines are shown, everything goes to the log."""
    print(f"{what}: log in {log}", flush=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0", "--rdzv-backend", "c10d",
               "--rdzv-endpoint", "localhost:0", "-m", "megatron_grpo.train", *map(str, flags)]
    with open(log, "w") as file, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                                   env=os.environ | {"OMP_NUM_THREADS": "1"}) as job:
        tail: list[str] = []
        for line in job.stdout:
            file.write(line)
            tail = [*tail[-40:], line]
            if line.startswith(("step", "megatron_grpo")):
                print(line, end="", flush=True)
    if job.returncode:
        sys.exit(f"{what} failed with code {job.returncode}; the end of {log}:\n{''.join(tail)}")


if __name__ == "__main__":
    main()
