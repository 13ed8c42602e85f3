"""A training step from the same weights is the same under every layout, and equals plain PyTorch, sequence by sequence."""

import functools

import pytest
import torch

from tests.trainer import one_step, reference

UNTIED = ["--untie-embeddings-and-output-weights"]
DENSE_FIRST = ["--moe-layer-freq", "([0]*1+[1]*3)"]
SHARED_BIASED = ["--moe-shared-expert-intermediate-size", "24", "--moe-router-score-function", "sigmoid",
                 "--moe-router-enable-expert-bias", "--moe-router-topk-scaling-factor", "1.5"]
MODELS = {
    "plain": UNTIED,
    "rich": [*UNTIED, *DENSE_FIRST, *SHARED_BIASED],      # dense first layer, shared expert, aux-loss-free bias
    "tied": [],
    "padded": [*UNTIED, "--qkv-format", "bshd"],
    "mtp": [*UNTIED, *DENSE_FIRST, "--mtp-num-layers", "1"],
    "recompute": [*UNTIED, "--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"],
    "recompute_core": [*UNTIED, "--recompute-granularity", "selective", "--recompute-modules", "core_attn", "moe"],
}
ROUTER = 1e-7
WORDS = dict(tp="--sequence-parallel --make-vocab-size-divisible-by 64 --tensor-model-parallel-size", pp="--pipeline-model-parallel-size",
             vpp="--num-layers-per-virtual-pipeline-stage", cp="--context-parallel-size", ep="--expert-model-parallel-size",
             etp="--expert-tensor-parallel-size", layout="--cp-layout")


def flags(**parallel):
    return [w for name, value in parallel.items() for w in (*WORDS[name].split(), str(value))]


@pytest.fixture(scope="module")
def one_rank(pool):
    return functools.cache(lambda model: one_step.assemble(
        pool.run(one_step.step, MODELS[model], mtp=model == "mtp", timeout=300)))


@pytest.mark.parametrize("model", ["plain", "rich", "tied", "padded"])
def test_one_rank_equals_plain_pytorch(one_rank, model):
    loss, gradients = one_rank(model)
    weights = {key: one_step.initial(key, gradient.shape).requires_grad_("bias" not in key) for key, gradient in gradients.items()}
    total, count = 0.0, 0
    for tokens in sum(one_step.sequences(), []):
        rich = dict(sigmoid=True, scaling=1.5) if model == "rich" else {}
        logits = reference.logits(weights, tokens, tied=model == "tied", **rich)
        total = total + torch.nn.functional.cross_entropy(logits[:-1], tokens[1:], reduction="sum")
        count += len(tokens) - 1
    (total / count).backward()
    # Megatron rounds the scores of the router to float32, and processors differ in the last bit of the float64 that is rounded.
    assert loss == pytest.approx(float(total / count), rel=ROUTER)
    for key, gradient in gradients.items():
        if weights[key].requires_grad:
            assert (gradient - weights[key].grad).norm() < ROUTER * weights[key].grad.norm(), key


SMALL = [dict(tp=2), dict(pp=2), dict(pp=2, vpp=1), dict(cp=2), dict(cp=2, layout="contiguous"), dict(ep=2), dict(tp=2, etp=2), dict()]
LARGE = [(4, dict(cp=4)), (4, dict(cp=4, layout="contiguous")), (4, dict(tp=2, ep=2, etp=2)), (4, dict(tp=2, cp=2, ep=2, etp=1)),
         (4, dict(pp=2, cp=2, vpp=1)), (4, dict(tp=2, pp=2, etp=2)), (8, dict(tp=2, pp=2, cp=2, ep=2, etp=1)),
         (8, dict(tp=2, pp=2, vpp=1, cp=2, layout="contiguous", etp=2))]
CASES = ([("plain", 2, p) for p in SMALL] + [("plain", n, p) for n, p in LARGE]
         + [("rich", 2, p) for p in SMALL] + [("rich", 8, LARGE[-2][1])]
         + [("tied", 2, dict(pp=2)), ("tied", 4, dict(tp=2, pp=2))]
         + [("padded", 2, dict(cp=2)), ("padded", 2, dict(cp=2, layout="contiguous")), ("padded", 4, dict(tp=2, pp=2)),
            ("padded", 4, dict(cp=4))]
         + [("mtp", 2, dict(tp=2)), ("mtp", 2, dict(pp=2)), ("mtp", 2, dict(cp=2)), ("mtp", 2, dict(ep=2)), ("mtp", 4, dict(tp=2, pp=2, vpp=1))]
         + [("recompute", 4, dict(tp=2, cp=2, ep=2, etp=2)), ("recompute_core", 4, dict(pp=2, cp=2))])


@pytest.mark.parametrize("model,ranks,parallel", CASES, ids=lambda x: x if isinstance(x, str) else str(x) if isinstance(x, int) else
                         "-".join(f"{k}{v}" for k, v in x.items()) or "dp")
def test_layout_equals_one_rank(pool, one_rank, model, ranks, parallel):
    loss, gradients = one_rank(model)
    got_loss, got = one_step.assemble(pool.run(
        one_step.step, [*MODELS[model], *flags(**parallel)], mtp=model == "mtp", ranks=ranks, timeout=300))
    bound = 1e-5 if model == "mtp" else ROUTER         # Megatron's own cross entropy, which MTP uses, is float32
    assert got_loss == pytest.approx(loss, rel=bound)
    assert got.keys() == gradients.keys()
    for key, gradient in gradients.items():
        assert (got[key] - gradient).norm() <= bound * gradient.norm(), key


def test_float32_step(pool, one_rank):
    """The float32 step differs from the float64 one by rounding only, on one rank and on four."""
    loss, gradients = one_rank("rich")
    for ranks, parallel in ((1, {}), (4, dict(tp=2, cp=2, ep=2, etp=2))):
        got_loss, got = one_step.assemble(pool.run(
            one_step.step, [*MODELS["rich"], *flags(**parallel)], torch.float32, ranks=ranks, timeout=300))
        assert got_loss == pytest.approx(loss, rel=1e-5)
        for key, gradient in gradients.items():
            assert (got[key] - gradient).norm() <= 1e-5 * gradient.norm(), key


def with_megatron_modules(flags):
    """The step on one rank with the modules of Megatron's local specification instead of ours."""
    from unittest import mock

    from megatron_grpo.trainer import platform_cpu
    with mock.patch.object(platform_cpu, "installed", lambda: False):
        return one_step.step(flags, torch.float32)


@pytest.mark.parametrize("model", ["padded", "rich"])
def test_equals_megatron_modules(pool, model):
    """Where Megatron's own CPU modules work (padded, one rank), ours give the same, and under the same parameter names."""
    flags = [*MODELS[model], "--qkv-format", "bshd"]
    loss, gradients = one_step.assemble(pool.run(one_step.step, flags, torch.float32, timeout=300))
    got_loss, got = one_step.assemble(pool.run(with_megatron_modules, flags, timeout=300))
    assert got_loss == pytest.approx(loss, rel=1e-6)
    assert got.keys() == gradients.keys()
    for key, gradient in gradients.items():
        assert (got[key] - gradient).norm() <= 1e-5 * gradient.norm(), key
