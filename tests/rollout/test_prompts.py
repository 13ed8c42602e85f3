import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_grpo.rollout.config import PromptConfig
from megatron_grpo.rollout.prompts import PromptOrder, load_prompts, read_rows
from megatron_grpo.settings import ConfigError, flag

from .simulated import Tokenizer

ROWS = [{"question": f"{i}+{i}=", "answer": str(2 * i), "metadata": {"level": i}} for i in range(5)]


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def write_parquet(path, rows):
    import pyarrow
    import pyarrow.parquet
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return str(path)


def write_dataset(path, rows):
    import datasets
    datasets.Dataset.from_list(rows).save_to_disk(str(path))
    return str(path)


def config(path=None, **options):
    return PromptConfig(**{**dict(prompt_data=path, input_key="question", label_key="answer"), **options})


@pytest.mark.parametrize("write, name", [(write_jsonl, "p.jsonl"), (write_parquet, "p.parquet"), (write_dataset, "p")])
def test_every_format_gives_the_same_prompts(tmp_path, write, name):
    path = write(tmp_path / name, ROWS)
    prompts, held_out = load_prompts(config(path, eval_prompt_data=path), Tokenizer(), held_out_size=3)
    assert len(prompts) == 5 and len(held_out) == 3
    for i in range(5):
        prompt = prompts[i]
        assert (prompt.index, prompt.text, prompt.label, prompt.metadata) == (i, ROWS[i]["question"], ROWS[i]["answer"], {"level": i})
        assert prompt.tokens == Tokenizer().encode(ROWS[i]["question"])


def test_blank_lines_and_metadata_as_json_text(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"question": "a", "answer": 1, "metadata": "{\\"x\\": 2}"}\n\n{"question": "b", "answer": 2}\n')
    prompts, _ = load_prompts(config(str(path)), Tokenizer())
    assert len(prompts) == 2 and prompts[0].metadata == {"x": 2} and prompts[1].metadata == {}


@pytest.mark.parametrize("write, name", [(write_jsonl, "p.jsonl"), (write_parquet, "p.parquet"), (write_dataset, "p")])
def test_a_wrong_key_lists_those_found(tmp_path, write, name):
    path = write(tmp_path / name, ROWS)
    with pytest.raises(ConfigError, match=r"no key 'input'; set --input-key to one of the keys found: answer, metadata, question"):
        read_rows(path, config(path, input_key="input"), "--prompt-data")
    with pytest.raises(ConfigError, match=r"no key 'solution'; set --label-key to one of"):
        read_rows(path, config(path, label_key="solution"), "--prompt-data")


@pytest.mark.parametrize("line, problem", [
    ("{broken", "not JSON"), ("[1, 2]", "a JSON object is wanted, found a list"), ('{"question": ""}', r"the prompt \(question\) is empty"),
    ('{"text": "a"}', "no key 'question'"), ('{"question": "a", "metadata": "{"}', "metadata {: not JSON"),
    ('{"question": "a", "metadata": [1]}', "metadata is a list; a dictionary is wanted"), (b'{"question": "\xff"}', "not JSON")])
def test_a_malformed_line_is_named_by_file_and_number(tmp_path, line, problem):
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'{"question": "a"}\n\n' + (line if isinstance(line, bytes) else line.encode()) + b"\n")
    with pytest.raises(ConfigError, match=rf"--prompt-data .*p\.jsonl, line 3: .*{problem}"):
        read_rows(str(path), config(label_key=None), "--prompt-data")


def test_sources_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match="--prompt-data .*none.jsonl: no such file"):
        load_prompts(config(str(tmp_path / "none.jsonl")), Tokenizer())
    (tmp_path / "p.csv").write_text("a")
    with pytest.raises(ConfigError, match="give a .jsonl or .parquet file"):
        load_prompts(config(str(tmp_path / "p.csv")), Tokenizer())
    (tmp_path / "p.parquet").write_text("not parquet")
    with pytest.raises(ConfigError, match="not a readable Parquet file"):
        load_prompts(config(str(tmp_path / "p.parquet")), Tokenizer())
    (tmp_path / "d").mkdir()
    with pytest.raises(ConfigError, match="not a directory written by datasets"):
        load_prompts(config(str(tmp_path / "d")), Tokenizer())
    (tmp_path / "e.jsonl").write_text("\n")
    with pytest.raises(ConfigError, match="holds no prompt"):
        load_prompts(config(str(tmp_path / "e.jsonl")), Tokenizer())
    with pytest.raises(ConfigError, match="give --prompt-data FILE or --prompt-task NAME"):
        load_prompts(config(), Tokenizer())
    with pytest.raises(ConfigError, match="both name the prompts"):
        config("p.jsonl", prompt_task="chain_sum")
    for name, value in (("label_key", "answer"), ("eval_prompt_data", "p.jsonl")):
        with pytest.raises(ConfigError, match=f"{flag(name)} {value} has no effect: --prompt-task chain_sum has labels"):
            PromptConfig(**{"prompt_task": "chain_sum", name: value})


def test_several_splits_are_refused(tmp_path):
    import datasets
    datasets.DatasetDict(train=datasets.Dataset.from_list(ROWS), test=datasets.Dataset.from_list(ROWS)).save_to_disk(str(tmp_path / "d"))
    with pytest.raises(ConfigError, match="holds several splits.*d/train, .*d/test"):
        load_prompts(config(str(tmp_path / "d")), Tokenizer())


def test_a_prompt_that_is_too_long_or_empty_is_refused_at_start_up(tmp_path):
    path = write_jsonl(tmp_path / "p.jsonl", [*ROWS, {"question": "123456789", "answer": ""}])
    with pytest.raises(ConfigError, match="prompt 5 has 9 tokens, over --rollout-max-prompt-len 8; raise the limit"):
        load_prompts(config(path, rollout_max_prompt_len=8), Tokenizer())
    assert len(load_prompts(config(path, rollout_max_prompt_len=9), Tokenizer())[0]) == 6
    path = write_parquet(tmp_path / "p.parquet", [{"question": "a", "answer": ""}, {"question": "", "answer": ""}])
    with pytest.raises(ConfigError, match="prompt 1 is empty"):
        load_prompts(config(path, rollout_max_prompt_len=9), Tokenizer())


class ChatTokenizer(Tokenizer):
    def apply_chat_template(self, messages, tokenize, add_generation_prompt, **options):
        return "".join(f"[{m['role']}]{m['content']}" for m in messages) + str(options)

    def encode(self, text, add_special_tokens=True):
        return ([62] if add_special_tokens else []) + super().encode(text)


def test_chat_templates(tmp_path):
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    path = write_jsonl(tmp_path / "p.jsonl", [{"question": "hi", "answer": ""}, {"question": chat, "answer": ""}])
    prompts, _ = load_prompts(config(path, apply_chat_template=True, apply_chat_template_kwargs='{"think": 0}'), ChatTokenizer())
    assert prompts[0].text == "[user]hi{'think': 0}" and prompts[1].text == "[system]s[user]u{'think': 0}"
    assert prompts[0].tokens == Tokenizer().encode(prompts[0].text)     # the template brings its own special tokens
    with pytest.raises(ConfigError, match="prompt 1 is a list, not text; chat messages need --apply-chat-template"):
        load_prompts(config(path), Tokenizer())[0][1]
    with pytest.raises(ConfigError, match="--apply-chat-template-kwargs .*: a JSON object is wanted"):
        load_prompts(config(path, apply_chat_template_kwargs="[]"), Tokenizer())


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 40), st.booleans(), st.integers(0, 2**31), st.integers(0, 4))
def test_each_epoch_holds_each_prompt_once_wherever_a_run_resumes(size, shuffle, seed, epoch):
    positions = range(epoch * size, (epoch + 1) * size)
    order = PromptOrder(size, shuffle, seed)
    drawn = [order[p] for p in positions]
    assert sorted(drawn) == list(range(size))
    assert [PromptOrder(size, shuffle, seed)[p] for p in reversed(positions)] == drawn[::-1]
    if not shuffle:
        assert drawn == list(range(size))


def test_epochs_and_seeds_shuffle_differently():
    order = PromptOrder(50, True, 1)
    first, second = [order[p] for p in range(50)], [order[p] for p in range(50, 100)]
    assert first != second and first != [PromptOrder(50, True, 2)[p] for p in range(50)]
