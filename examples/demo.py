"""The main job on a laptop: warm-start a small mixture-of-experts model, then train it with GRPO against a real SGLang server.

    make demo                         or    python examples/demo.py --seed 1 --run-dir runs/demo

Two ranks of an unmodified Megatron-Core (expert parallel 2, gloo) and one SGLang server share this machine's CPU. The task is to
spell a word backward (reasoning-gym's spell_backward), one character a token. The warm start learns from examples of which
only some are right: a smaller share spells the word backward, the rest repeat it. As with a pretrained model, what the reward wants is
then one habit among others, and GRPO has to find it. The last line is JSON: accuracy on held-out words before and after GRPO,
train-versus-rollout mismatch, steps, seconds, and the report to open in a browser.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from megatron_grpo.rollout.tasks import task_rows
from megatron_grpo.rollout.tokenizer import make_character_tokenizer

MODEL = dict(
    architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", vocab_size=48, hidden_size=96, intermediate_size=192,
    moe_intermediate_size=96, num_hidden_layers=4, num_attention_heads=3, num_key_value_heads=3, head_dim=32, num_experts=8,
    num_experts_per_tok=2, norm_topk_prob=True, mlp_only_layers=[], decoder_sparse_step=1, max_position_embeddings=128,
    tie_word_embeddings=False, rms_norm_eps=1e-6, rope_theta=10000.0, hidden_act="silu", attention_bias=False)

TASK, TASK_ARGS, WORDS, HELD_OUT = "spell_backward", '{"min_word_len":4,"max_word_len":7}', 3000, 200
RIGHT_SHARE = 0.35      # of the warm start's examples

COMMON = """--platform cpu --expert-model-parallel-size 2 --use-distributed-optimizer --ckpt-format torch_dist
--rollout-shuffle --rollout-max-response-len 10 --seq-length 32 --use-dynamic-batch-size --max-tokens-per-gpu 8192
--data-pad-size-multiplier 8 --lr-decay-style constant --weight-decay 0 --clip-grad 1.0""".split()

WARM_START = "--loss-type sft --rollout-batch-size 256 --lr 2e-3 --min-lr 2e-3 --lr-warmup-fraction 0.06 --adam-beta2 0.95".split()

GRPO = f"""--prompt-task {TASK} --prompt-task-args {TASK_ARGS} --prompt-task-format compact --prompt-task-size {WORDS}
--eval-num-prompts {HELD_OUT} --algorithm grpo --no-use-kl-loss --rollout-batch-size 64 --n-samples-per-prompt 8 --rm-type exact
--sglang-launch local --sglang-dtype float32 --lr 1e-4 --min-lr 1e-4 --adam-beta2 0.99""".split()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--run-dir", default="runs/demo")
    parser.add_argument("--warm-steps", type=int, default=160, help="optimizer steps of the warm start")
    parser.add_argument("--steps", type=int, default=60, help="GRPO steps")
    parser.add_argument("flags", nargs="*", help="further flags of megatron_grpo.train for the GRPO run, after --")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    start, run = time.monotonic(), Path(args.run_dir).absolute() / f"seed{args.seed}"
    if run.exists():
        parser.error(f"{run} exists: give another --run-dir, or remove it")

    model, examples = make_model(run / "model"), make_examples(run / "examples.jsonl", args.seed)
    seeds = ["--seed", str(args.seed), "--rollout-seed", str(args.seed)]
    warm_start = [*COMMON, *WARM_START, *seeds, "--prompt-data", examples, "--label-key", "label", "--hf-checkpoint", model,
                  "--train-iters", args.warm_steps, "--save", run / "warm"]
    grpo = [*COMMON, *GRPO, *seeds, "--hf-checkpoint", model, "--pretrained-checkpoint", run / "warm", "--train-iters", args.steps,
            "--eval-interval", max(args.steps // 4, 1), "--save", run / "grpo", "--run-dir", run / "report", *args.flags]
    check(grpo)
    train("warm start", warm_start, run / "warm.log")
    train("GRPO", grpo, run / "grpo.log")

    lines = [json.loads(line) for line in (run / "report" / "metrics.jsonl").read_text().splitlines()]
    accuracy = [line["metrics"]["eval/accuracy"] for line in lines if "eval/accuracy" in line["metrics"]]
    mismatch = [line["metrics"]["mismatch_k3"] for line in lines if "mismatch_k3" in line["metrics"]]
    print(json.dumps(dict(eval_before=accuracy[0], eval_after=accuracy[-1], mismatch_k3=sum(mismatch) / len(mismatch), steps=args.steps,
                          seconds=round(time.monotonic() - start), report=str(run / "report" / "report.html"))))


def make_model(directory: Path, config: dict = MODEL, characters: str = "abcdefghijklmnopqrstuvwxyz<") -> Path:
    """A Hugging Face directory without weights: config.json, and a tokenizer of one character a token."""
    directory.mkdir(parents=True)
    tokenizer = make_character_tokenizer(directory, characters)
    ids = dict(bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    (directory / "config.json").write_text(json.dumps(config | ids, indent=1))
    return directory


def make_examples(file: Path, seed: int) -> Path:
    """Examples of the warm start: the words that GRPO trains on too, none of the held-out ones."""
    words, _ = task_rows(TASK, TASK_ARGS, WORDS, HELD_OUT, seed, "compact")
    choice = random.Random(seed)
    file.write_text("".join(json.dumps({
        "input": word["input"], "label": word["label"] if choice.random() < RIGHT_SHARE else word["label"][::-1]}) + "\n" for word in words))
    return file


def check(flags: list) -> None:
    """Refuse before the warm start what the GRPO run would refuse after it."""
    command = [sys.executable, "-m", "megatron_grpo.train", "--dry-run", *map(str, flags)]
    plan = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"WORLD_SIZE": "2"})
    if plan.returncode:
        sys.exit(plan.stdout + "\n".join(_said(plan.stderr.splitlines())))


def train(what: str, flags: list, log: Path) -> None:
    """One job on two ranks; its progress lines are shown, everything goes to the log."""
    print(f"{what}: log in {log}", flush=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0", "--rdzv-backend", "c10d",
               "--rdzv-endpoint", "localhost:0", "-m", "megatron_grpo.train", *map(str, flags)]
    with open(log, "w") as file, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                                   env=os.environ | {"OMP_NUM_THREADS": "1"}) as job:
        tail: list[str] = []
        try:
            for line in job.stdout:
                file.write(line)
                tail = [*tail[-40:], line]
                if line.startswith(("step", "megatron_grpo")):
                    print(line, end="", flush=True)
        except BaseException:       # Ctrl-C, SIGTERM: the job ends too, and its server with it
            job.terminate()
            raise
    if job.returncode:
        sys.exit(f"{what} failed with code {job.returncode}; the end of {log}:\n{''.join(_said(tail))}")


def _said(lines: list[str]) -> list[str]:
    """Our own messages, or everything where there is none."""
    return [line for line in lines if line.startswith("megatron_grpo:")] or lines


if __name__ == "__main__":
    main()
