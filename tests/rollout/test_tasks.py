import re

import pytest
from transformers import AutoTokenizer

from megatron_grpo.rollout.config import PromptConfig
from megatron_grpo.rollout.prompts import load_prompts
from megatron_grpo.rollout.tasks import COMPACT, alphabet, task_rows
from megatron_grpo.rollout.tokenizer import SPECIAL_TOKENS, make_character_tokenizer
from megatron_grpo.settings import ConfigError

ARGS = '{"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}'


def test_held_out_problems_do_not_occur_in_training():
    train, held_out = task_rows("chain_sum", ARGS, 2000, 200, seed=3, style="compact")
    assert len(train) == 2000 and len(held_out) == 200
    questions = [row["input"] for row in train + held_out]
    assert len(set(questions)) == 2200
    for row in train[:50] + held_out[:50]:
        assert re.fullmatch(r"\d{1,2}[+-]\d{1,2}=", row["input"]) and eval(row["input"][:-1]) == int(row["label"])
    share = [sum(len(re.split("[+-]", row["input"])[0]) == 1 for row in rows) / len(rows) for rows in (train, held_out)]
    assert abs(share[0] - share[1]) < 0.1       # both sets are of one distribution


def test_every_process_makes_the_same_problems_and_a_seed_others():
    a, b, c = (task_rows("chain_sum", ARGS, 100, 20, seed=s) for s in (1, 1, 2))
    assert a == b and a != c
    assert a[0][0]["input"].startswith("State the final answer") and a[0][0]["metadata"]["question"] == a[0][0]["input"]


@pytest.mark.parametrize("task", sorted(COMPACT))
def test_compact_forms_are_short(task):
    train, _ = task_rows(task, "{}", 20, 5, seed=0, style="compact")
    assert all(len(row["input"]) < len(row["metadata"]["question"]) for row in train)


def test_what_cannot_be_made_is_refused():
    with pytest.raises(ConfigError, match="--prompt-task chain_sun: reasoning-gym has no such task; it has .*chain_sum"):
        task_rows("chain_sun", "{}", 10, 1, seed=0)
    with pytest.raises(ConfigError, match="found 200 distinct problems, but 100 held-out and 150 training problems are wanted"):
        task_rows("chain_sum", '{"max_terms": 2, "max_digits": 1}', 150, 100, seed=0, style="compact")
    with pytest.raises(ConfigError, match="task sudoku has no compact form"):
        task_rows("sudoku", "{}", 10, 1, seed=0, style="compact")
    for arguments in ('{"max_terms": 0}', '{"no_such": 1}', "{", "[1]"):
        with pytest.raises(ConfigError, match="--prompt-task-args"):
            task_rows("chain_sum", arguments, 10, 1, seed=0)


def test_the_character_tokenizer_is_what_it_saves(tmp_path):
    train, held_out = task_rows("chain_sum", ARGS, 50, 10, seed=0, style="compact")
    made = make_character_tokenizer(tmp_path / "tokenizer", alphabet(train + held_out))
    loaded = AutoTokenizer.from_pretrained(str(tmp_path / "tokenizer"))
    for tokenizer in (made, loaded):
        assert len(tokenizer) == len(SPECIAL_TOKENS) + len("+-0123456789=")
        assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)
        ids = tokenizer.encode("12+7=")
        assert ids == [1, *(len(SPECIAL_TOKENS) + "+-0123456789=".index(c) for c in "12+7=")]
        assert tokenizer.decode(ids + [2], skip_special_tokens=True) == "12+7="
        assert tokenizer.decode(ids) == "<bos>12+7=" and tokenizer.encode("x", add_special_tokens=False) == [3]
        text = tokenizer.apply_chat_template([{"role": "user", "content": "1="}], tokenize=False, add_generation_prompt=True)
        assert text == "<bos><|user|>1=<|assistant|>" and len(tokenizer.encode(text, add_special_tokens=False)) == 5
    prompts, evaluation = load_prompts(PromptConfig(prompt_task="chain_sum", prompt_task_args=ARGS, prompt_task_size=50, rollout_seed=0,
                                                    prompt_task_format="compact"), loaded, held_out_size=10)
    assert [prompts[i].text for i in range(50)] == [row["input"] for row in train] and len(evaluation) == 10
    assert all(3 not in prompts[i].tokens for i in range(50))


def test_an_empty_alphabet_is_refused(tmp_path):
    with pytest.raises(ValueError, match="at least one character"):
        make_character_tokenizer(tmp_path, "")
