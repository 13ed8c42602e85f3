"""Tiny random models for a real server."""

from pathlib import Path

TINY = dict(vocab_size=512, hidden_size=64, intermediate_size=128, moe_intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=2, head_dim=32, num_experts=8, num_experts_per_tok=2, norm_topk_prob=True, mlp_only_layers=[],
            decoder_sparse_step=1, max_position_embeddings=2048, tie_word_embeddings=False, bos_token_id=1, eos_token_id=2, pad_token_id=0)
# First layer dense, a shared expert, sigmoid scores with expert bias, experts in groups.
TINY_GLM = {k: v for k, v in TINY.items() if k not in ("num_experts", "mlp_only_layers", "decoder_sparse_step")} | dict(
    n_routed_experts=8, n_shared_experts=1, first_k_dense_replace=1, n_group=2, topk_group=1, routed_scaling_factor=1.5,
    use_qk_norm=True, attention_bias=True, num_nextn_predict_layers=0)


def tiny_qwen3_moe(path: str | Path, seed: int = 0, **changes) -> Path:
    """Write a random float32 Qwen3-MoE with a tokenizer of words <t0> .. <t511> to `path`, made if missing; returns `path`.

    Gates are drawn wide, so that routes differ between tokens. `changes` go to Qwen3MoeConfig.
    """
    return _write(path, "Qwen3Moe", TINY | changes, seed)


def tiny_glm4_moe(path: str | Path, seed: int = 0, **changes) -> Path:
    """As tiny_qwen3_moe, a GLM4-MoE; the expert biases are drawn too."""
    return _write(path, "Glm4Moe", TINY_GLM | changes, seed)


def _write(path, kind, fields, seed) -> Path:
    import torch
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    path = Path(path)
    config = getattr(transformers, f"{kind}Config")(**fields)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).float()
    generator = torch.Generator().manual_seed(seed)
    drawn = [*model.named_parameters(), *((n, b) for n, b in model.named_buffers() if n.endswith("e_score_correction_bias"))]
    with torch.no_grad():
        for name, tensor in drawn:
            if "norm" not in name:
                tensor.normal_(0, 0.2 if "gate.weight" in name else 0.08, generator=generator)
    model.save_pretrained(path)
    words = Tokenizer(models.WordLevel({f"<t{i}>": i for i in range(config.vocab_size)}, unk_token="<t3>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<t1>", eos_token="<t2>", pad_token="<t0>", unk_token="<t3>",
                            chat_template="{% for m in messages %}{{ m['content'] }} {% endfor %}").save_pretrained(path)
    return path
