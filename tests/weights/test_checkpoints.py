"""Hugging Face -> Megatron -> Hugging Face is bit-exact under any layout, and Megatron then computes what Transformers computes."""

import shutil
from pathlib import Path

import pytest
import torch

from tests.weights import tiny

BUCKET = 40_000         # bytes: a dozen buckets, some parameters larger than one
LAYOUTS = {
    "1": (1, ""), "ep2": (2, "--expert-model-parallel-size 2"), "tp2": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "pp2": (2, "--pipeline-model-parallel-size 2"),
    "pp2_vpp2": (2, "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"),
    "etp2": (2, "--expert-tensor-parallel-size 2"),
    "tp2_ep2": (4, "--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2 --expert-tensor-parallel-size 1 "
                   "--make-vocab-size-divisible-by 100"),
    "tp2_etp2_ep2": (4, "--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2"),
}
SEQUENCES = torch.randint(0, 500, (3, 16), generator=torch.Generator().manual_seed(3))


def read_all(path):
    from megatron_grpo.weights.safetensors_dir import SafetensorsDirectory
    files = SafetensorsDirectory(path)
    return {name: files.slice(name)[:] for name in files.files}


def load(path, flags):
    from megatron_grpo.weights import load_hf_checkpoint
    _, chunks = tiny.start(path, flags)
    model = tiny.live(path, chunks)
    for shard in model.shards():
        shard.tensor.fill_(float("nan"))
    load_hf_checkpoint(model, path)
    return model


def round_trip(path, flags, out):
    from megatron_grpo.weights import iterate_hf_tensors, save_hf_checkpoint
    from megatron_grpo.weights.hf_config import read_hf_config
    model = load(path, flags)
    padding = [shard.tensor[500 - len(shard.tensor) * model.groups.tp.rank():] for shard in model.shards() if "embed" in shard.entry.hf[0]]
    assert not any(torch.isnan(t).any() for t in padding) and not any(torch.isnan(s.tensor).any() for s in model.shards())
    nbytes = save_hf_checkpoint(model, out, read_hf_config(path), BUCKET, tokenizer_from=path)
    seen = {}
    for bucket in iterate_hf_tensors(model, BUCKET):
        assert sum(t.nbytes for _, t in bucket) <= BUCKET or len({name.rsplit(".", 2)[0] for name, _ in bucket}) == 1
        assert not seen.keys() & dict(bucket).keys(), "exported twice"
        seen.update(bucket)
    return nbytes, seen


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """kind -> directory, made once."""
    made = {}

    def get(kind, name=None, **changes):
        name = name or kind
        if name not in made:
            made[name] = tiny.write_model(kind, tmp_path_factory.mktemp("models") / name, **changes)
        return made[name]
    return get


def check_round_trip(pool, path, layout, out):
    ranks, flags = LAYOUTS[layout]
    results = pool.run(round_trip, str(path), flags.split(), str(out), ranks=ranks, timeout=500)
    original = read_all(path)
    assert same(read_all(out), original)                     # written by the owners
    assert same(results[0][1], original)                     # gathered to rank 0
    assert not any(seen for _, seen in results[1:])
    assert {nbytes for nbytes, _ in results} == {sum(t.nbytes for t in original.values())}
    assert (out / "tokenizer_config.json").read_text() == "{}" and not Path(f"{out}.partial").exists()
    shutil.rmtree(out)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["qwen3_moe", "glm4_moe"])
def test_round_trip(pool, models, tmp_path, kind, layout):
    check_round_trip(pool, models(kind), layout, tmp_path / "out")


@pytest.mark.parametrize("kind, layout", [("qwen3", "pp2"), ("qwen3", "tp2"), ("qwen2_moe", "tp2_ep2")])
def test_round_trip_of_dense_tied_and_gated_shared_expert(pool, models, tmp_path, kind, layout):
    check_round_trip(pool, models(kind), layout, tmp_path / "out")


def test_round_trip_with_more_ranks_than_query_groups(pool, models, tmp_path):
    check_round_trip(pool, models("qwen3_moe", "one_group", num_key_value_heads=1), "tp2", tmp_path / "out")


# ---- what the weights mean ------------------------------------------------------------------------------------------------

def forward(path, flags):
    """This rank's part of the logits [B, S, V / tp], and of each MoE layer's experts as a map [S / tp, B, E]."""
    model, maps = load(path, flags), []
    (chunk,) = (c.eval() for c in model.chunks)
    batch, length = SEQUENCES.shape
    for name, module in chunk.named_modules():
        if name.endswith("mlp.router"):
            module.register_forward_hook(lambda _, __, out: maps.append(out[1].view(-1, batch, out[1].shape[-1])))
    with torch.no_grad():
        logits = chunk(SEQUENCES, torch.arange(length).expand(batch, -1), None)
    return logits, torch.stack(maps) if maps else None


def reference(path):
    from transformers import AutoModelForCausalLM
    model, chosen = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval(), []
    for name, module in model.named_modules():
        if name.endswith("mlp.gate"):
            module.register_forward_hook(lambda _, __, out: chosen.append(out[-1]))
    with torch.no_grad():
        logits = model(SEQUENCES).logits
    batch, length = SEQUENCES.shape
    maps = [torch.zeros(batch * length, 8).scatter_(1, index, 1).bool().view(batch, length, 8).transpose(0, 1) for index in chosen]
    return logits, torch.stack(maps) if maps else None


@pytest.mark.parametrize("layout", ["1", "tp2"])
@pytest.mark.parametrize("kind, name, changes", [
    ("qwen3_moe", "qwen3_moe", {}), ("glm4_moe", "glm4_moe", {}), ("qwen2_moe", "qwen2_moe", {}), ("qwen3", "qwen3", {}),
    ("qwen3_moe", "one_group", dict(num_key_value_heads=1)), ("glm4_moe", "grouped", dict(n_group=4, topk_group=1))],
    ids=["qwen3_moe", "glm4_moe", "qwen2_moe", "qwen3", "one_group", "grouped"])
def test_logits_and_routes_equal_transformers(pool, models, kind, name, changes, layout):
    path = models(kind, name, **changes)
    ranks, flags = LAYOUTS[layout]
    results = pool.run(forward, str(path), flags.split(), ranks=ranks, timeout=500)
    logits, maps = reference(path)
    ours = torch.cat([part for part, _ in results], -1)
    assert (ours[..., :500] - logits).abs().max() < 1e-4
    if maps is not None:
        assert torch.equal(torch.cat([part for _, part in results], 1), maps)


# ---- faults ---------------------------------------------------------------------------------------------------------------

def faults(path, flags, broken):
    """The error of loading each broken directory, on this rank."""
    from megatron_grpo.settings import ConfigError
    from megatron_grpo.weights import load_hf_checkpoint
    _, chunks = tiny.start(path, flags)
    messages = []
    for directory in broken:
        with pytest.raises(ConfigError) as error:
            load_hf_checkpoint(tiny.live(path, chunks), directory)
        messages.append(str(error.value))
    return messages


def break_(path, target, change):
    from safetensors.torch import save_file
    shutil.copytree(path, target)
    tensors = read_all(path)
    change(tensors)
    for file in target.glob("*.safetensors*"):
        file.unlink()
    save_file(tensors, target / "model.safetensors")
    return str(target)


def test_faulty_checkpoints_are_refused_on_every_rank(pool, models, tmp_path):
    path = models("qwen3_moe")
    missing = "model.layers.3.mlp.experts.7.down_proj.weight"           # read by the second expert-parallel rank only
    quantized, torn = tmp_path / "quantized", tmp_path / "torn"
    for target in (quantized, torn):
        shutil.copytree(path, target)
    (quantized / "config.json").write_text('{"quantization_config": {}}')
    sorted(torn.glob("*.safetensors"))[0].unlink()
    broken = [
        break_(path, tmp_path / "a", lambda t: t.pop(missing)),
        break_(path, tmp_path / "b", lambda t: t.update({"model.norm.weight": torch.ones(3)})),
        break_(path, tmp_path / "c", lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(128)})),
        str(quantized), str(torn), str(tmp_path)]
    results = pool.run(faults, str(path), LAYOUTS["ep2"][1].split(), broken, ranks=2, timeout=500)
    assert results[0] == results[1]
    wanted = [missing, "model.norm.weight is (3,), the model needs (64,)", "q_proj.bias", "quantized", "files that are not there",
              "config.json"]
    for message, part in zip(results[0], wanted, strict=True):
        assert part in message, message


def unwritable(path, out):
    from megatron_grpo.settings import ConfigError
    from megatron_grpo.weights import save_hf_checkpoint
    model = load(path, LAYOUTS["ep2"][1].split())
    with pytest.raises(ConfigError) as error:
        save_hf_checkpoint(model, out, {}, BUCKET)
    return str(error.value)


def test_a_directory_that_cannot_be_written_fails_on_every_rank(pool, models, tmp_path):
    (tmp_path / "file").write_text("")
    messages = pool.run(unwritable, str(models("qwen3_moe")), str(tmp_path / "file" / "out"), ranks=2, timeout=500)
    assert messages[0] == messages[1] and "rank 0" in messages[0]
