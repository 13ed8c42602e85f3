"""What is stepped on: a small model of the job's architecture, synthetic samples, and the flags of the step."""

import json
import os
from typing import Any

import numpy as np
import torch

from ..batch import Sample, Status
from ..settings import given
from ..weights.architectures import moe_layers
from ..weights.hf_config import config_from_hf

OURS = ("--all-layouts", "--full", "--quick")
SMALL = dict(hidden_size=64, intermediate_size=96, moe_intermediate_size=32, head_dim=16, num_attention_heads=4, num_key_value_heads=2,
             vocab_size=250, num_experts_per_tok=2, max_position_embeddings=256, num_nextn_predict_layers=0)
DEFAULT = dict(architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", num_hidden_layers=4, num_experts=8, norm_topk_prob=True,
               mlp_only_layers=[], decoder_sparse_step=1, tie_word_embeddings=False, rms_norm_eps=1e-6, rope_theta=1e4, hidden_act="silu",
               attention_bias=False)
EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")
# The gradient norm is computed where gradients are clipped, and at 1e9 nothing is.
STEP = """--seq-length 64 --rollout-batch-size 6 --n-samples-per-prompt 4 --rollout-max-response-len 24 --train-iters 1 --lr 1e-3 --clip-grad 1e9
--make-vocab-size-divisible-by 8 --moe-router-dtype fp64""".split()
PACKED = ["--use-dynamic-batch-size", "--max-tokens-per-gpu", "64", "--data-pad-size-multiplier", "4"]
PACKING = ("--use-dynamic-batch-size", "--max-tokens-per-gpu", "--data-pad-size-multiplier")
PADDED = ["--micro-batch-size", "3"]
AUXILIARY = {"--moe-router-load-balancing-type": "aux_loss", "--moe-aux-loss-coeff": "0.05", "--moe-z-loss-coeff": "0.001"}
EVEN = 32       # tokens of each sample of equal length: no layout on up to 8 ranks pads it

# Flags that say which samples and sizes, which the step brings, or that leave a rank with a part of its gradients.
REPLACED = ("--hf-checkpoint", "--load", "--save", "--prompt-data", "--global-batch-size", "--micro-batch-size", "--train-iters", "--seq-length",
            "--rollout-batch-size", "--n-samples-per-prompt", "--max-tokens-per-gpu", "--data-pad-size-multiplier", "--rollout-max-response-len",
            "--ref-load", "--router-agreement-floor", "--clip-grad", "--num-steps-per-rollout", "--use-distributed-optimizer",
            "--overlap-grad-reduce", "--overlap-param-gather", "--use-dynamic-batch-size")
# How a GPU computes and communicates, which changes no number beyond rounding; the reference runs on the host.
KERNELS = ("--attention-backend", "--cross-entropy-loss-fusion", "--cross-entropy-fusion-impl", "--moe-grouped-gemm", "--moe-flex-dispatcher-backend",
           "--moe-shared-expert-overlap", "--overlap-moe-expert-parallel-comm", "--distributed-backend", "--transformer-impl", "--fp8-format",
           "--moe-token-dispatcher-type", "--cuda-graph-impl", "--moe-permute-fusion", "--moe-router-fusion", "--tp-comm-overlap", "--nccl-ub",
           "--optimizer-cpu-offload", "--fine-grained-activation-offloading")
LAYOUT = ("--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--context-parallel-size", "--expert-model-parallel-size",
          "--expert-tensor-parallel-size", "--num-virtual-stages-per-pipeline-rank", "--num-layers-per-virtual-pipeline-stage",
          "--cp-layout", "--qkv-format", "--micro-batch-size", "--cp-comm-type", "--recompute-granularity", "--recompute-method",
          "--recompute-num-layers", "--recompute-modules", "--sequence-parallel", "--calculate-per-token-loss", "--recompute-activations",
          "--recompute-loss-function", "--bf16", "--fp16", *PACKING)


def without(words: list[str], *names: str) -> list[str]:
    """A command line without these flags and their values."""
    out, skip = [], False
    for w in words:
        if w.startswith("--"):
            skip = w.split("=", 1)[0] in names
        if not skip:
            out.append(w)
    return out


def prepare(directory: str, argv: list[str]) -> list[str]:
    """Write a small model, a reference policy and synthetic samples to `directory`; returns the flags of the step. On one rank."""
    from transformers import AutoConfig, AutoModelForCausalLM

    flags = without(argv, *OURS)
    if given("--platform", flags) != "cpu" and not {"--bf16", "--fp16"} & set(flags):
        flags.append("--bf16")      # Transformer Engine's attention of packs
    config = _small_config(flags)
    model, reference = os.path.join(directory, "model"), os.path.join(directory, "reference")
    os.makedirs(model, exist_ok=True)
    with open(os.path.join(model, "config.json"), "w") as file:
        json.dump(config, file)
    torch.manual_seed(int(given("--seed", flags) or 1))
    network = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model)).float().eval()
    with torch.no_grad():
        for name, p in network.named_parameters():
            if "norm" not in name:
                p.normal_(0, 0.25 if "gate.weight" in name else 0.1)    # wide gates, far from ties
        network.save_pretrained(model)
        for i, samples in enumerate((hard_samples(config["vocab_size"]), even_samples(config["vocab_size"]))):
            _sample_from(network, samples)
            if "--use-rollout-routing-replay" in flags:
                _route(samples, config_from_hf(model))
            torch.save(samples, os.path.join(directory, f"samples_{i}_0.pt"))
        for p in network.parameters():
            p.add_(torch.randn_like(p) * 0.1 * p.std(unbiased=False))
        network.save_pretrained(reference)
    flags = without(flags, *REPLACED)
    step = STEP + PACKED
    if any(key in config for key in EXPERTS):
        step += [w for pair in AUXILIARY.items() if given(pair[0], flags) is None for w in pair]
    if "--use-rollout-routing-replay" in flags:
        step += ["--router-agreement-floor", "0"]       # the experts of the samples are random
    return with_layout([*step, "--hf-checkpoint", model, "--ref-load", reference,
                        "--load-debug-rollout-data", os.path.join(directory, "samples_{step}_{dp_rank}.pt")], flags)


def with_layout(flags: list[str], more: list[str]) -> list[str]:
    """The step with these flags of a layout too."""
    padded = given("--qkv-format", more) == "bshd"
    return [*without(flags, *PACKING), *PADDED, *more] if padded else [*flags, *more]


def one_rank(flags: list[str]) -> list[str]:
    """The same step without its layout: packed, nothing recomputed, one way of scaling; on the CPU platform, where float64 works."""
    reducer = []
    if "--calculate-per-token-loss" in flags and given("--algorithm", flags) is None and given("--reducer", flags) is None:
        reducer = ["--reducer", "token_mean"]       # what the flag stands for without --algorithm
    return [*without(flags, *LAYOUT, *KERNELS, "--platform"), *reducer, "--platform", "cpu", "--force-platform-cpu",
            *PACKED, "--max-tokens-per-gpu", "4096"]       # the later of two values counts


def _small_config(flags: list[str]) -> dict[str, Any]:
    """config.json of the job's architecture, small, with layers for every pipeline stage and experts for every rank."""
    source = given("--hf-checkpoint", flags)
    config: dict[str, Any] = DEFAULT.copy()
    if source is not None:
        with open(os.path.join(source, "config.json")) as file:
            config = json.load(file)
    config |= {k: v for k, v in SMALL.items() if k in config or k not in ("head_dim", "num_nextn_predict_layers")}

    def size(name):
        return max(int(given(name, flags) or 1), 1)
    stages = size("--pipeline-model-parallel-size") * size("--num-virtual-stages-per-pipeline-rank")
    config["num_hidden_layers"] = max(4, 2 * stages)
    for key in EXPERTS:
        if key in config:
            config[key] = max(8, 2 * size("--expert-model-parallel-size"))
    return config


def hard_samples(vocabulary: int) -> list[Sample]:
    """24 samples in groups of unequal size, with every shape of response that a loss must survive."""
    rng = np.random.default_rng(5)
    samples: list[Sample] = []
    for group, size in enumerate([4, 1, 6, 5, 4, 4]):
        prompt = int(rng.integers(3, 9))
        for _ in range(size):
            response = (1, 2, 24, 9, 17, 5, 12, 3)[len(samples) % 8]
            samples.append(_sample(rng, vocabulary, len(samples), group, prompt, response))
    return samples


def even_samples(vocabulary: int) -> list[Sample]:
    """12 samples of EVEN tokens; none with two trained ones, whose covariances would be equal but for rounding (KL-Cov)."""
    rng = np.random.default_rng(6)
    samples: list[Sample] = []
    for group, size in enumerate([4, 1, 3, 4]):
        for _ in range(size):
            response = (1, 24, 9, 17, 5, 12, 6, 4)[len(samples) % 8]
            samples.append(_sample(rng, vocabulary, len(samples), group, EVEN - response, response))
    return samples


def _sample(rng, vocabulary: int, i: int, group: int, prompt: int, response: int) -> Sample:
    mask = np.ones(response, bool)
    if i % 7 == 3:
        mask[:] = False                                     # fully masked
    elif i % 5 == 4:
        mask[response // 3:2 * response // 3] = False       # a hole of tool tokens
    return Sample(
        sample_id=i, group_id=group, tokens=rng.integers(3, vocabulary, prompt + response), prompt_length=prompt, loss_mask=mask,
        rollout_logp=rng.normal(0, 0.5, response).astype(np.float32),       # for now how far the engine is from the trainer
        status=Status.COMPLETED if i % 6 else Status.TRUNCATED, rewards={"a": float(rng.random() < 0.5), "b": float(rng.normal())},
        reward=float(rng.normal()))


def _sample_from(network, samples: list[Sample]) -> None:
    """Make the engine's log-probs near those of the network, as rollouts are."""
    for s in samples:
        tokens = torch.from_numpy(s.tokens)
        logp = network(tokens[None]).logits[0, :-1].log_softmax(-1).gather(1, tokens[1:, None]).squeeze(1)
        s.rollout_logp = s.rollout_logp + logp[s.prompt_length - 1:].numpy()


def _route(samples: list[Sample], flags: dict[str, Any]) -> None:
    """Experts for every token and MoE layer at random, as no router of the model would choose them."""
    rng = np.random.default_rng(7)
    layers, experts, topk = sum(moe_layers(flags)), flags["num_experts"], flags["moe_router_topk"]
    for s in samples:
        order = rng.random((len(s.tokens) - 1, layers, experts)).argsort(-1)
        s.routes = order[..., :topk].astype(np.int8)
