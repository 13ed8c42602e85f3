"""Tiny random models for a real server."""

from pathlib import Path

TINY = dict(vocab_size=512, hidden_size=64, intermediate_size=128, moe_intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=2, head_dim=32, num_experts=8, num_experts_per_tok=2, norm_topk_prob=True, mlp_only_layers=[],
            decoder_sparse_step=1, max_position_embeddings=2048, tie_word_embeddings=False, bos_token_id=1, eos_token_id=2, pad_token_id=0)


def tiny_qwen3_moe(path: str | Path, seed: int = 0, **changes) -> Path:
    """Write a random float32 Qwen3-MoE with a tokenizer of words <t0> .. <t511> to `path`, made if missing; returns `path`.

    Gates are drawn wide, so that routes differ between tokens. `changes` go to Qwen3MoeConfig.
    """
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

    path = Path(path)
    config = Qwen3MoeConfig(**{**TINY, **changes})
    model = Qwen3MoeForCausalLM(config).float()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.normal_(0, 0.2 if "gate.weight" in name else 0.08, generator=generator)
    model.save_pretrained(path)
    words = Tokenizer(models.WordLevel({f"<t{i}>": i for i in range(config.vocab_size)}, unk_token="<t3>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<t1>", eos_token="<t2>", pad_token="<t0>", unk_token="<t3>",
                            chat_template="{% for m in messages %}{{ m['content'] }} {% endfor %}").save_pretrained(path)
    return path
