"""The table on models that cannot run here: Transformer Engine's names, expert parallelism, pipeline stages; and megatron-bridge."""

from types import SimpleNamespace

import pytest
import torch

from megatron_grpo.settings import ConfigError
from megatron_grpo.weights.bridge import bridged_tensors
from megatron_grpo.weights.live import LiveModel, ModelGroups

CONFIG = dict(architectures=["Glm4MoeForCausalLM"], num_attention_heads=2, num_key_value_heads=1, head_dim=2, hidden_size=4, vocab_size=6,
              num_hidden_layers=6, n_routed_experts=4)
TRANSFORMER_ENGINE = {      # of one dense and one MoE layer
    "0.self_attention.linear_qkv.layer_norm_weight": (4,), "0.self_attention.linear_qkv.weight": (8, 4),
    "0.self_attention.linear_proj.weight": (4, 4), "0.mlp.linear_fc1.layer_norm_weight": (4,), "0.mlp.linear_fc1.weight": (6, 4),
    "0.mlp.linear_fc2.weight": (4, 3), "1.pre_mlp_layernorm.weight": (4,), "1.mlp.router.weight": (4, 4),
    "1.mlp.experts.linear_fc1.weight0": (6, 4), "1.mlp.experts.linear_fc1.weight1": (6, 4), "1.mlp.experts.linear_fc2.weight1": (4, 3),
    "1.mlp.shared_experts.linear_fc1.weight": (6, 4)}


class Group(SimpleNamespace):
    def rank(self):
        return self.r

    def size(self):
        return self.n


def chunk(names, first_layer=0, **more):
    """A module whose parameters have these names; `layer_number` counts from 1 over the whole model."""
    root = torch.nn.Module()
    root.config, root.pre_process = SimpleNamespace(**more), first_layer == 0
    root.decoder = torch.nn.Module()
    root.decoder.layers = torch.nn.ModuleList(torch.nn.Module() for _ in range(2))
    for i, layer in enumerate(root.decoder.layers):
        layer.layer_number = first_layer + i + 1
    for name, shape in names.items():
        *path, last = name.split(".")
        module = root
        for part in path:
            if not hasattr(module, part):
                module.add_module(part, torch.nn.Module())
            module = getattr(module, part)
        module.register_parameter(last, torch.nn.Parameter(torch.zeros(shape)))
    return root


def live(chunks, ep=0, config=CONFIG):
    one = Group(r=0, n=1)
    return LiveModel.from_config(chunks, config, ModelGroups(one, one, Group(r=ep, n=2), one, one, True, True))


def test_transformer_engine_names():
    inner = chunk({f"decoder.layers.{name}": shape for name, shape in TRANSFORMER_ENGINE.items()}, first_layer=2)
    wrapped = torch.nn.Module()
    wrapped.module = inner
    found = {shard.name: shard.hf_names() for shard in live([wrapped], ep=1).shards()}
    assert found == {f"decoder.layers.{name}": tuple(f"model.layers.{part}" for part in hf) for name, hf in {
        "2.self_attention.linear_qkv.layer_norm_weight": ["2.input_layernorm.weight"],
        "2.self_attention.linear_qkv.weight": [f"2.self_attn.{x}_proj.weight" for x in "qkv"],
        "2.self_attention.linear_proj.weight": ["2.self_attn.o_proj.weight"],
        "2.mlp.linear_fc1.layer_norm_weight": ["2.post_attention_layernorm.weight"],
        "2.mlp.linear_fc1.weight": ["2.mlp.gate_proj.weight", "2.mlp.up_proj.weight"],
        "2.mlp.linear_fc2.weight": ["2.mlp.down_proj.weight"],
        "3.pre_mlp_layernorm.weight": ["3.post_attention_layernorm.weight"], "3.mlp.router.weight": ["3.mlp.gate.weight"],
        # expert-parallel rank 1 of 2: its experts are 2 and 3
        "3.mlp.experts.linear_fc1.weight2": ["3.mlp.experts.2.gate_proj.weight", "3.mlp.experts.2.up_proj.weight"],
        "3.mlp.experts.linear_fc1.weight3": ["3.mlp.experts.3.gate_proj.weight", "3.mlp.experts.3.up_proj.weight"],
        "3.mlp.experts.linear_fc2.weight3": ["3.mlp.experts.3.down_proj.weight"],
        "3.mlp.shared_experts.linear_fc1.weight": ["3.mlp.shared_experts.gate_proj.weight", "3.mlp.shared_experts.up_proj.weight"],
    }.items()}


def test_a_tied_output_layer_is_read_but_not_exported():
    names = {"output_layer.weight": (6, 4), "embedding.word_embeddings.weight": (6, 4)}
    tied = {s.name: (s.hf_names(), s.exported) for s in live([chunk(names)], config=CONFIG | dict(tie_word_embeddings=True)).shards()}
    assert tied == {"output_layer.weight": (("model.embed_tokens.weight",), False),
                    "embedding.word_embeddings.weight": (("model.embed_tokens.weight",), True)}
    untied = {s.name: (s.hf_names(), s.exported) for s in live([chunk(names)]).shards()}
    assert untied["output_layer.weight"] == (("lm_head.weight",), True)


def test_what_the_table_lacks_is_refused():
    with pytest.raises(ConfigError, match="decoder.layers.0.self_attention.core_attention.softmax_offset"):
        list(live([chunk({"decoder.layers.0.self_attention.core_attention.softmax_offset": (2,)})]).shards())
    with pytest.raises(ConfigError, match="--moe-mlp-glu-interleave-size 32"):
        live([chunk({}, moe_mlp_glu_interleave_size=32)])
    with pytest.raises(ConfigError, match="pip install megatron-bridge"):
        live([chunk({})], config=CONFIG | dict(architectures=["Mystery"]))
    model = live([chunk({"decoder.layers.0.self_attention.linear_qkv.weight": (9, 4)})])
    with pytest.raises(ConfigError, match="linear_qkv.weight: the fused QKV has 9 rows"):
        model.blocks(next(model.shards()))


def test_names_through_megatron_bridge(monkeypatch):
    """Its tasks, of which those of parameters that it does not know are None, speak of bare modules."""
    inner = chunk({})
    wrapped = torch.nn.Module()
    wrapped.module = inner

    class Bridge:
        def get_conversion_tasks(self, chunks):
            assert chunks == [inner]
            return [SimpleNamespace(mapping=SimpleNamespace(hf_param=hf)) for hf in ("model.norm.weight", dict(q="a", k="b"))] + [None]

    monkeypatch.setattr("megatron_grpo.weights.live.open_bridge", lambda config: Bridge())
    assert live([wrapped], config=CONFIG | dict(architectures=["Mystery"])).hf_names() == ["model.norm.weight", "a", "b"]
    assert live([chunk({"output_layer.weight": (6, 4)})]).hf_names() == ["lm_head.weight"]


@pytest.mark.parametrize("rank, buckets", [(0, [["a", "b"], ["c"], ["d"]]), (1, [])])
def test_megatron_bridge_is_bucketed_on_rank_0(monkeypatch, rank, buckets):
    class Bridge:
        def export_hf_weights(self, chunks, cpu, show_progress):
            yield from ((name, torch.zeros(size)) for name, size in (("a", 1), ("b", 2), ("c", 9), ("d", 3)))

    monkeypatch.setattr("torch.distributed.get_rank", lambda: rank)
    assert [[name for name, _ in bucket] for bucket in bridged_tensors(Bridge(), [], 12)] == buckets
