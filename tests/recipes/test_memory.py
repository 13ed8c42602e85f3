"""The counted parameters are those that each rank of a real Megatron model holds."""

import pytest

from tests.weights import tiny

LAYOUTS = {
    "tp2 pp2 ep2": "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2 --expert-model-parallel-size 2 "
                   "--expert-tensor-parallel-size 1",
    "pp2 vpp2 ep2": "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 --expert-model-parallel-size 2"}


def counted_and_held(path, flags):
    from megatron.core import mpu
    from megatron.core.utils import get_model_config

    from megatron_grpo.trainer import memory
    from megatron_grpo.trainer.dry_run import pipeline_stages
    args, chunks = tiny.start(path, flags)
    stage = pipeline_stages(get_model_config(chunks[0]))[mpu.get_pipeline_model_parallel_rank()]
    layers = [block.layer_number - 1 for chunk in chunks for block in chunk.decoder.layers]
    expert = sum(p.numel() for chunk in chunks for name, p in chunk.named_parameters() if ".experts." in name)
    total = sum(p.numel() for chunk in chunks for p in chunk.parameters())
    return memory.parameters_on_gpu(args, stage), {"dense": total - expert, "expert": expert}, stage.layers, tuple(layers)


@pytest.mark.parametrize("kind, layout", [("glm4_moe", "tp2 pp2 ep2"), ("qwen2_moe", "pp2 vpp2 ep2")])
def test_parameters_of_every_rank(pool, tmp_path, kind, layout):
    """Norms of queries and keys, biases, shared experts and their gates, dense layers, a vocabulary that is padded."""
    path = tiny.write_model(kind, tmp_path / kind)
    for counted, held, layers, built in pool.run(counted_and_held, str(path), LAYOUTS[layout].split(), ranks=4, timeout=300):
        assert counted == held and layers == built


def cpu_plans(path):
    """(refusals, page) of a plan that works and of one that does not."""
    from megatron_grpo.trainer.dry_run import plan, render
    base = f"""--platform cpu --hf-checkpoint {path} --algorithm grpo --no-use-kl-loss --seq-length 64 --train-iters 4 --lr 1e-3 --bf16
        --rollout-batch-size 8 --n-samples-per-prompt 4 --micro-batch-size 2 --expert-model-parallel-size 2""".split()
    found = [plan(base), plan([*base, "--transformer-impl", "transformer_engine", "--ref-routing-replay"])]
    return [(f.refusals, render(f)) for f in found]


def test_a_plan_for_the_cpu_platform(pool, tmp_path, monkeypatch):
    """No model is built and no group is made; replay and recomputation are off, the optimizer is not distributed."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    ((works, fails),) = pool.run(cpu_plans, str(tiny.write_model("qwen3_moe", tmp_path / "model")), ranks=1, timeout=200)
    refusals, text = works
    assert refusals == [] and "8 prompts x 4 samples, 1 optimizer step of 32 samples" in text and "not estimated" in text
    assert "Transformer Engine" not in text and "GPU here" not in text
    assert [r.split()[0] for r in fails[0][:2]] == ["--ref-routing-replay", "--transformer-impl"], fails[0]
