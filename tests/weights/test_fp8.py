"""Block-wise FP8 checkpoints load, under any layout and slice, as a plain reference dequantises them; anything else is refused by name."""

import json
import shutil

import pytest
import torch
from safetensors.torch import save_file

from megatron_grpo.settings import ConfigError
from megatron_grpo.weights.fp8 import Dequantized, WeightsDirectory, block_size
from tests.weights import test_checkpoints, tiny
from tests.weights.test_checkpoints import break_, faults, read_all, round_trip, same
from tests.weights.test_latent_attention import SPEC

BLOCK = [20, 24]        # divides neither the tiny model's sizes nor its shards
PLAIN = ("embed_tokens", "lm_head", "norm", "mlp.gate.", "bias")      # what the published checkpoints keep in bfloat16 and float32


def quantize(weight, block):
    """(fp8, scale, what they stand for), one block after the other."""
    (m, n), (rows, columns) = block, weight.shape
    fp8, meant = torch.empty(weight.shape, dtype=torch.float8_e4m3fn), torch.empty(weight.shape)
    scale = torch.empty(-(-rows // m), -(-columns // n))
    for i in range(len(scale)):
        for j in range(len(scale[0])):
            area = (slice(i * m, (i + 1) * m), slice(j * n, (j + 1) * n))
            scale[i, j] = weight[area].abs().max() / 448
            fp8[area] = (weight[area] / scale[i, j]).to(torch.float8_e4m3fn)
            meant[area] = fp8[area].to(torch.float32) * scale[i, j]
    return fp8, scale, meant


def write_fp8(kind, path, block=BLOCK):
    """A tiny model in FP8, of several shards; what its tensors stand for."""
    plain = tiny.write_model(kind, path.with_name(f"{path.name}-plain"))
    stored, meant = {}, {}
    for name, tensor in read_all(plain).items():
        if any(part in name for part in PLAIN):
            stored[name] = meant[name] = tensor
        else:
            stored[name], stored[f"{name}_scale_inv"], meant[name] = quantize(tensor, block)
    path.mkdir()
    names = sorted(stored)
    files = {name: f"model-{i % 3}.safetensors" for i, name in enumerate(names)}      # a scale need not lie beside its weight
    for file in set(files.values()):
        save_file({name: stored[name] for name in names if files[name] == file}, path / file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    (path / "tokenizer_config.json").write_text("{}")
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"] = dict(activation_scheme="dynamic", fmt="e4m3", quant_method="fp8", weight_block_size=block)
    (path / "config.json").write_text(json.dumps(config))
    return meant


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """kind -> (directory, what its tensors stand for), made once."""
    made = {}

    def get(kind):
        if kind not in made:
            path = tmp_path_factory.mktemp("models") / kind
            made[kind] = path, write_fp8(kind, path)
        return made[kind]
    return get


@pytest.mark.parametrize("kind, layout, more", [
    ("glm4_moe", "tp2", []), ("glm4_moe", "tp2_ep2", []), ("glm4_moe", "etp2", []), ("qwen3_moe", "pp2", []), ("deepseek_v3", "pp2", SPEC),
    ("deepseek_v3", "ep2", SPEC)])
def test_loads_what_it_stands_for(pool, models, tmp_path, kind, layout, more):
    """And what is saved is plain: no scales, and a config.json that says nothing of quantization."""
    path, meant = models(kind)
    ranks, flags = test_checkpoints.LAYOUTS[layout]
    pool.run(round_trip, str(path), [*flags.split(), *more], str(tmp_path / "out"), ranks=ranks, timeout=1500)
    assert same(read_all(tmp_path / "out"), meant)
    assert "quant" not in (tmp_path / "out" / "config.json").read_text()


def bf16_weights(path, flags):
    return {name: shard.tensor.clone() for shard in test_checkpoints.load(path, flags).shards() for name in shard.hf_names()[:1]
            if name.endswith("down_proj.weight")}


def test_values_are_cast_last(pool, models):
    """The product is float32; only then it is rounded to the model's dtype."""
    path, meant = models("qwen3_moe")
    (weights,) = pool.run(bf16_weights, str(path), ["--bf16"], ranks=1, timeout=1500)
    assert len(weights) > 8 and all(w.dtype == torch.bfloat16 and torch.equal(w, meant[name].bfloat16()) for name, w in weights.items())


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16])
def test_any_slice(tmp_path, scale_dtype):
    """Rows and columns that begin and end inside blocks, in blocks of 128 whose last ones the edges cut; scales in bfloat16 as Qwen3's."""
    weight = torch.randn(576, 320, generator=torch.Generator().manual_seed(0))
    fp8, scale, _ = quantize(weight, (128, 128))
    scale = scale.to(scale_dtype)
    meant = fp8.float() * scale.float().repeat_interleave(128, 0)[:576].repeat_interleave(128, 1)[:, :320]
    save_file({"w.weight": fp8, "w.weight_scale_inv": scale, "plain": weight}, tmp_path / "model.safetensors")
    directory = WeightsDirectory(tmp_path, (128, 128))
    view = directory.slice("w.weight")
    assert isinstance(view, Dequantized) and directory.shape("w.weight") == (576, 320)
    assert directory.stored("w.weight") == ("w.weight", "w.weight_scale_inv") and directory.stored("plain") == ("plain",)
    for rows in ((0, 576), (0, 1), (100, 300), (127, 129), (128, 256), (511, 576), (575, 576)):
        assert torch.equal(view[slice(*rows)], meant[slice(*rows)])
        for columns in ((0, 320), (1, 2), (60, 200), (128, 320), (319, 320)):
            assert torch.equal(view[slice(*rows), slice(*columns)], meant[slice(*rows), slice(*columns)])
    assert torch.equal(directory.slice("plain")[3:5], weight[3:5])


def test_faults_are_named_on_every_rank(pool, models, tmp_path):
    path, _ = models("qwen3_moe")
    name = "model.layers.3.mlp.experts.7.down_proj.weight"           # read by the second expert-parallel rank only
    scale = f"{name}_scale_inv"
    missing = break_(path, tmp_path / "a", lambda t: t.pop(scale))
    wrong = break_(path, tmp_path / "b", lambda t: t.update({scale: torch.ones(2, 2)}))
    stray = break_(path, tmp_path / "c", lambda t: t.update({"model.layers.1.mlp.gate_proj.weight": torch.ones(96, 64)}))
    unsaid, other = tmp_path / "unsaid", tmp_path / "other"
    for target, quantization in ((unsaid, None), (other, {"quant_method": "compressed-tensors", "format": "pack-quantized"})):
        shutil.copytree(path, target)
        config = json.loads((target / "config.json").read_text())
        (target / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    results = pool.run(faults, str(path), test_checkpoints.LAYOUTS["ep2"][1].split(), [missing, wrong, stray, str(unsaid), str(other)], ranks=2,
                       timeout=1500)
    assert results[0] == results[1]
    wanted = [f"{scale}, the scales of {name}, is missing", f"{scale} is (2, 2); blocks of (20, 24) of {name} (64, 32) need (4, 2)",
              "e.g. model.layers.1.mlp.gate_proj.weight_scale_inv: ", "stored in FP8, but config.json has no quantization_config",
              "quantized by quant_method 'compressed-tensors'"]
    for message, part in zip(results[0], wanted, strict=True):
        assert part in message, message


@pytest.mark.parametrize("how", [
    dict(quant_method="fp8", weight_block_size=None), dict(quant_method="fp8", fmt="e5m2", weight_block_size=[128, 128]),
    dict(quant_method="compressed-tensors"), dict(quant_method="gptq", bits=4), {}])
def test_other_quantizations_are_refused(how):
    with pytest.raises(ConfigError, match=f"quant_method {how.get('quant_method')!r}.*give the bfloat16"):
        block_size({"quantization_config": how})


def test_what_config_json_says():
    assert block_size({}) is None is block_size({"quantization_config": None})
    assert block_size({"quantization_config": dict(quant_method="fp8", weight_block_size=[128, 64], scale_fmt="ue8m0")}) == (128, 64)


def test_servers_keep_plain_weights(tmp_path):
    """Ours is started with random plain weights; one that serves the FP8 weights themselves is refused."""
    from megatron_grpo.rollout.responses import ServedModel
    from megatron_grpo.rollout.server_check import PLAIN_WEIGHTS, check_server
    from megatron_grpo.weights.fp8 import serving_arguments
    config = {"vocab_size": 500, "quantization_config": dict(quant_method="fp8", weight_block_size=[128, 128])}
    (tmp_path / "config.json").write_text(json.dumps(config))
    info, model = {"model_path": str(tmp_path), "json_model_override_args": "{}"}, ServedModel(500, None)
    (fault,) = check_server("http://engine", info, {}, model)
    assert "start it with --load-format dummy --json-model-override-args {\"quantization_config\":null}" in fault
    assert check_server("http://engine", info | {"json_model_override_args": PLAIN_WEIGHTS[-1]}, {}, model) == []
    save_file({"w": torch.ones(1)}, tmp_path / "model.safetensors")
    assert serving_arguments(tmp_path, config) == PLAIN_WEIGHTS and serving_arguments(tmp_path, {}) == ()
    assert serving_arguments(tmp_path / "nowhere", {}) == PLAIN_WEIGHTS[:2]
