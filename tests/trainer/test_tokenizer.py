"""Tokenizers of --hf-checkpoint: with code of their own, and without an end-of-text token."""

import json

import pytest

from megatron_grpo.rollout.tokenizer import make_character_tokenizer
from megatron_grpo.settings import ConfigError
from megatron_grpo.trainer.sources import load_tokenizer

CODE = """
from transformers import PreTrainedTokenizerFast

class Own(PreTrainedTokenizerFast):
    own = True
"""


def of_own_code(path):
    make_character_tokenizer(path, "ab")
    (path / "own.py").write_text(CODE)
    config = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps(config | dict(tokenizer_class="Own", auto_map=dict(AutoTokenizer=[None, "own.Own"]))))
    return str(path)


def test_code_of_the_checkpoint_runs_only_when_it_is_trusted(tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    path = of_own_code(tmp_path / "model")
    with pytest.raises(ConfigError, match="read it, then give --trust-remote-code"):
        load_tokenizer(path, False)
    tokenizer = load_tokenizer(path, True)
    assert tokenizer.own and tokenizer.encode("ab", add_special_tokens=False) == [8, 9]


def test_no_tokenizer_and_no_end_of_text(tmp_path):
    with pytest.raises(ConfigError, match="--hf-checkpoint .*: no tokenizer"):
        load_tokenizer(str(tmp_path), False)
    make_character_tokenizer(tmp_path, "ab")
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config.pop("eos_token")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="no end-of-text token"):
        load_tokenizer(str(tmp_path), False)
