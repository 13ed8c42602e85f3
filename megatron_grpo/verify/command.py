"""Prove a layout on your own machines: one step of your job's layout and algorithm against one rank in float64.

    torchrun --nproc-per-node N -m megatron_grpo.verify <the flags of your job>
    python -m megatron_grpo.verify --all-layouts --platform cpu          every layout on up to 8 ranks of this machine

A small model with your architecture and layout takes one step on synthetic samples that contain what breaks losses: responses of
one token, fully masked samples, holes of tool tokens, context-parallel shards without a response token, groups of one, and
micro-batches without samples. The same step is taken by one rank in float64. Loss, every metric, the gradient norm and the gradient of every
parameter are compared, and any line out of tolerance makes the exit code 1. No engine is needed.
"""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from .batch import Sample, Status
from .settings import given

TOLERANCE = 1e-5            # relative, in float32
OURS = ("--all-layouts", "--full", "--quick")
SMALL = dict(hidden_size=64, intermediate_size=96, moe_intermediate_size=32, head_dim=16, num_attention_heads=4, num_key_value_heads=2,
             vocab_size=250, num_experts_per_tok=2, max_position_embeddings=256, num_nextn_predict_layers=0)
DEFAULT = dict(architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", num_hidden_layers=4, num_experts=8, norm_topk_prob=True,
               mlp_only_layers=[], decoder_sparse_step=1, tie_word_embeddings=False, rms_norm_eps=1e-6, rope_theta=1e4, hidden_act="silu",
               attention_bias=False)
STEP = """--use-dynamic-batch-size --max-tokens-per-gpu 64 --data-pad-size-multiplier 4 --seq-length 64 --rollout-batch-size 6
--n-samples-per-prompt 4 --rollout-max-response-len 24 --train-iters 1 --lr 1e-3 --clip-grad 0 --make-vocab-size-divisible-by 8
--moe-router-dtype fp64""".split()


@dataclass
class Line:
    """One compared number or tensor: `error` is relative to `scale`."""

    name: str
    value: float
    reference: float
    error: float

    @property
    def ok(self) -> bool:
        return self.error <= TOLERANCE


# ---- one step, as any rank takes it ---------------------------------------------------------------------------------------


def one_step(argv: list[str], dtype: torch.dtype | None = None) -> dict | None:
    """The step's loss, metrics, gradient norm and gradients by Hugging Face name; on the last rank, None elsewhere.

    Args:
        argv: flags of megatron_grpo.train, with --load-debug-rollout-data.
        dtype: of parameters and activations in place of the job's.
    """
    from .trainer import loop
    from .trainer.flags import parse_args
    from .trainer.model import model_provider

    args = parse_args(argv)
    if dtype is not None:
        args.params_dtype = dtype
    loop.initialize(args)
    with loop.make_job(args, model_provider) as job:
        batch = loop.rollout(job, 0)
        pairs = loop.log_probs(job, batch)
        captured: dict = {}
        step = job.trained.optimizer.step
        job.trained.optimizer.step = lambda: (captured.update(_gradients(job)), step())[1]
        results = [loop.update(job, mbs) for mbs in batch.mini_steps[:1]]
        records: list = []
        job.log.step = lambda number, metrics, seconds: records.append(metrics)
        loop.record(job, batch, results, pairs, 0, _NoPhases())
    if not records:
        return None
    return {"metrics": records[0], "gradients": captured}


class _NoPhases:
    seconds: dict = {}


def _gradients(job) -> dict[str, np.ndarray]:
    """Whole gradients by Hugging Face name, on the last rank. Collective over all ranks."""
    from megatron.core.utils import unwrap_model

    from .weights import iterate_hf_tensors

    parameters = [p for chunk in unwrap_model(job.trained.model) for p in chunk.parameters()]
    weights = [p.data for p in parameters]
    for p in parameters:
        p.data = p.main_grad.to(p.dtype).view(p.shape)
    try:
        found = {name: tensor.double().cpu().numpy() for bucket in iterate_hf_tensors(job.trained.live, 1 << 24) for name, tensor in bucket}
    finally:
        for p, weight in zip(parameters, weights, strict=True):
            p.data = weight
    box = [found]
    dist.broadcast_object_list(box, src=0)
    return {name: value for name, value in box[0].items() if not name.endswith("e_score_correction_bias")}


# ---- what is stepped on -----------------------------------------------------------------------------------------------------


def prepare(directory: str, argv: list[str]) -> list[str]:
    """Write a small model and synthetic samples to `directory`; returns the flags of the step. On one rank."""
    from transformers import AutoConfig, AutoModelForCausalLM

    flags = [w for w in argv if w not in OURS]
    source = given("--hf-checkpoint", flags)
    config: dict[str, Any] = DEFAULT.copy()
    if source is not None:
        with open(os.path.join(source, "config.json")) as file:
            config = json.load(file)
    config |= {k: v for k, v in SMALL.items() if k in config or k not in ("head_dim", "num_nextn_predict_layers")}
    stages = int(given("--pipeline-model-parallel-size", flags) or 1) * max(int(given("--num-virtual-stages-per-pipeline-rank", flags) or 1), 1)
    config["num_hidden_layers"] = max(4, 2 * stages)
    for key in ("num_experts", "n_routed_experts", "num_local_experts"):
        if key in config:
            config[key] = max(8, 2 * int(given("--expert-model-parallel-size", flags) or 1))
    model = os.path.join(directory, "model")
    os.makedirs(model, exist_ok=True)
    with open(os.path.join(model, "config.json"), "w") as file:
        json.dump(config, file)
    torch.manual_seed(1)
    network = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model)).float()
    with torch.no_grad():
        for name, p in network.named_parameters():
            if "norm" not in name:
                p.normal_(0, 0.5 if "gate.weight" in name else 0.1)     # wide gates: no near-tie that rounding could flip
    network.save_pretrained(model)
    samples = synthetic_samples(config["vocab_size"])
    torch.save(samples, os.path.join(directory, "samples_0_0.pt"))
    for name in ("--hf-checkpoint", "--load", "--save", "--prompt-data", "--global-batch-size", "--micro-batch-size", "--train-iters", "--seq-length",
                 "--rollout-batch-size", "--n-samples-per-prompt", "--max-tokens-per-gpu", "--rollout-max-response-len", "--ref-load"):
        flags = _without(flags, name)
    for name in ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather", "--use-dynamic-batch-size"):
        flags = [w for w in flags if w != name]     # gradients are compared whole
    padded = given("--qkv-format", flags) == "bshd"
    step = STEP[3:] + ["--micro-batch-size", "3"] if padded else STEP
    return [*step, *flags, "--hf-checkpoint", model, "--load-debug-rollout-data", os.path.join(directory, "samples_{step}_{dp_rank}.pt")]


def synthetic_samples(vocabulary: int) -> list[Sample]:
    """24 samples in groups of unequal size, with every shape of response that a loss must survive."""
    rng = np.random.default_rng(5)
    samples: list[Sample] = []
    sizes = [4, 1, 6, 5, 4, 4]
    for group, size in enumerate(sizes):
        prompt = int(rng.integers(3, 9))
        for _ in range(size):
            i = len(samples)
            response = (1, 2, 24, 9, 17, 5, 12, 3)[i % 8]
            mask = np.ones(response, bool)
            if i % 7 == 3:
                mask[:] = False                                     # fully masked
            elif i % 5 == 4:
                mask[response // 3:2 * response // 3] = False       # a hole of tool tokens
            logp = -rng.random(response).astype(np.float32) * 4 - 0.5
            samples.append(Sample(
                sample_id=i, group_id=group, tokens=rng.integers(3, vocabulary, prompt + response), prompt_length=prompt, loss_mask=mask,
                rollout_logp=logp, status=Status.COMPLETED if i % 6 else Status.TRUNCATED,
                rewards={"a": float(rng.random() < 0.5), "b": float(rng.normal())}, reward=float(rng.normal())))
    return samples


# ---- comparing --------------------------------------------------------------------------------------------------------------


def compare(found: Any, reference: dict) -> list[Line]:
    """Every number and gradient, worst last."""
    lines = []
    for name, want in reference["metrics"].items():
        got = found["metrics"].get(name, float("nan"))
        if np.isnan(want) and np.isnan(got) or want == got:
            lines.append(Line(name, got, want, 0.0))
        else:
            lines.append(Line(name, got, want, abs(got - want) / max(abs(want), 1e-2)))
    for name, want in reference["gradients"].items():
        got = found["gradients"].get(name)
        scale = float(np.linalg.norm(want))
        error = np.inf if got is None or got.shape != want.shape else np.linalg.norm(got - want) / max(scale, 1e-6)
        lines.append(Line(f"gradient of {name}", float("nan") if got is None else float(np.linalg.norm(got)), float(scale), float(error)))
    extra = set(found["gradients"]) - set(reference["gradients"])
    lines += [Line(f"gradient of {name}", float("nan"), 0.0, float("inf")) for name in sorted(extra)]
    return sorted(lines, key=lambda line: line.error)


def table(lines: list[Line]) -> str:
    """The loss, the norm, the worst metric and the worst parameters."""
    shown = [line for line in lines if line.name in ("loss", "pg_loss", "kl_loss", "grad_norm", "entropy")]
    shown += [line for line in lines if not line.ok and line not in shown] or lines[-3:]
    rows = [f"{'':2}{line.name:<60} {line.value:>14.7g} {line.reference:>14.7g}  {line.error:.1e}{'' if line.ok else '  OUT'}" for line in shown]
    bad = sum(not line.ok for line in lines)
    head = f"  {'compared':<60} {'this layout':>14} {'one rank, f64':>14}  relative error"
    return "\n".join([head, *rows, f"  {len(lines)} lines compared, {bad} out of tolerance {TOLERANCE:g}"])


# ---- commands ----------------------------------------------------------------------------------------------------------------


def step_main(path: str, dtype: str, argv: list[str]) -> None:
    """One step in processes of its own, its result in a file: `verify --step FILE float64|job <flags>`."""
    result = one_step(argv, torch.float64 if dtype == "float64" else None)
    if result is not None:
        torch.save(result, path)


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["--step"]:
        step_main(argv[1], argv[2], argv[3:])
        return 0
    if "--all-layouts" in argv:
        from .verify_layouts import all_layouts
        return all_layouts(argv)
    rank = int(os.environ.get("RANK", 0))
    store = dist.TCPStore(os.environ.get("MASTER_ADDR", "localhost"), int(os.environ.get("MASTER_PORT", 29500)) + 1,
                          is_master=rank == 0, wait_for_workers=False)
    directory = tempfile.mkdtemp(prefix="verify-") if rank == 0 else ""
    if rank == 0:
        store.set("flags", json.dumps([directory, prepare(directory, argv)]))
    directory, flags = json.loads(store.get("flags"))
    reference = None
    if rank == int(os.environ.get("WORLD_SIZE", 1)) - 1:
        reference = subprocess.Popen([sys.executable, "-m", "megatron_grpo.verify", "--step", f"{directory}/reference.pt", "float64",
                                      *one_rank(flags)],
                                     env=_alone(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    found = one_step(flags)
    if reference is None:
        return 0
    output, _ = reference.communicate(timeout=600)
    if reference.returncode:
        print(f"the one-rank reference failed:\n{output[-4000:]}", file=sys.stderr)
        return 1
    lines = compare(found, torch.load(f"{directory}/reference.pt", weights_only=False))
    print(table(lines), flush=True)
    return int(not all(line.ok for line in lines))


LAYOUT_FLAGS = ("--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--context-parallel-size", "--expert-model-parallel-size",
                "--expert-tensor-parallel-size", "--num-virtual-stages-per-pipeline-rank", "--num-layers-per-virtual-pipeline-stage",
                "--cp-layout", "--qkv-format", "--micro-batch-size", "--cp-comm-type", "--recompute-granularity", "--recompute-method",
                "--recompute-num-layers", "--recompute-modules")


def one_rank(flags: list[str]) -> list[str]:
    """The same job without its layout: packed, nothing recomputed, per-step loss."""
    for name in LAYOUT_FLAGS:
        flags = _without(flags, name)
    flags = [w for w in flags if w not in ("--sequence-parallel", "--bf16", "--fp16", "--use-routing-replay", "--use-rollout-routing-replay",
                                           "--calculate-per-token-loss", "--recompute-activations", "--recompute-loss-function",
                                           "--use-dynamic-batch-size")]
    return ["--use-dynamic-batch-size", "--max-tokens-per-gpu", "4096", *_without(flags, "--max-tokens-per-gpu")]


def _alone() -> dict[str, str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TORCHELASTIC_")}
    return environment | {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "localhost",
                          "MASTER_PORT": str(int(os.environ.get("MASTER_PORT", 29500)) + 2)}


def _without(words: list[str], name: str) -> list[str]:
    """Without the flag and its values."""
    out, skip = [], False
    for w in words:
        if w.startswith("--"):
            skip = w.split("=", 1)[0] == name
        if not skip:
            out.append(w)
    return out


if __name__ == "__main__":
    sys.exit(main())
