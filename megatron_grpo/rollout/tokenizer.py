"""A character tokenizer made on the spot, for models small enough to train on a laptop.

It is a Hugging Face fast tokenizer saved to a directory, so that Megatron, the trainer and SGLang load the same one.
"""

from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}")


def make_character_tokenizer(directory: str | Path, alphabet: str) -> PreTrainedTokenizerFast:
    """Write a tokenizer with one token a character of `alphabet` to `directory` and return it.

    Ids: the SPECIAL_TOKENS in their order, then the distinct characters, sorted. Text is encoded with a leading <bos>; a
    character outside the alphabet becomes <unk>.

    Raises:
        ValueError: the alphabet is empty.
    """
    characters = sorted(set(alphabet))
    if not characters:
        raise ValueError("a character tokenizer needs at least one character")
    vocabulary = {token: i for i, token in enumerate([*SPECIAL_TOKENS, *characters])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    core.decoder = decoders.Fuse()
    core.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", vocabulary["<bos>"])])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>",
        additional_special_tokens=list(SPECIAL_TOKENS[4:]), clean_up_tokenization_spaces=False)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(str(directory))
    return tokenizer
