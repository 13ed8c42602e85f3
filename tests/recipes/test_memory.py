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


@pytest.mark.parametrize("kind", ["qwen3_moe", "glm4_moe", "qwen2_moe"])
def test_parameters_of_every_rank(pool, tmp_path, kind):
    path = tiny.write_model(kind, tmp_path / kind)
    for flags in LAYOUTS.values():
        for counted, held, layers, built in pool.run(counted_and_held, str(path), flags.split(), ranks=4, timeout=300):
            assert counted == held and layers == built
