"""Where prompts come from: files, `datasets` directories, reasoning-gym tasks; and in which order they are drawn.

The run draws prompts by position 0, 1, 2, ... A position alone says which prompt it is, so the state to save is one number,
several ranks can share one counter, and a resumed run sees each prompt exactly once an epoch.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import numpy as np

from ..settings import ConfigError, flag
from .config import PromptConfig
from .tasks import task_rows


@dataclass(frozen=True)
class Prompt:
    """One prompt, ready for the engine: text for people, tokens for the model, label and metadata for the verifier."""

    index: int
    text: str
    tokens: list[int]
    label: object = None
    metadata: dict = field(default_factory=dict)


class Prompts:
    """A sequence of prompts over rows {"input", "label", "metadata"}; a row is tokenized when it is asked for.

    Args:
        rows: anything with len and integer indexing that gives dictionaries.
        tokenizer: a Hugging Face tokenizer.
        config: keys, template and length limit.
        source: name for messages, e.g. the file.

    Raises:
        ConfigError: no rows; an empty prompt; a prompt over --rollout-max-prompt-len; chat messages without --apply-chat-template.
    """

    def __init__(self, rows, tokenizer, config: PromptConfig, source: str):
        if not len(rows):
            raise ConfigError(f"{source}: holds no prompt")
        self.rows, self.tokenizer, self.config, self.source = rows, tokenizer, config, source
        self.template_arguments = _json_object(config.apply_chat_template_kwargs, "--apply-chat-template-kwargs")
        if config.rollout_max_prompt_len is not None:       # tokenizing all is the price of refusing at start-up, not in mid-run
            for index in range(len(rows)):
                self[index]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Prompt:
        row = self.rows[index]
        text, tokens = self._render(row["input"], index)
        limit = self.config.rollout_max_prompt_len
        if not tokens:
            raise ConfigError(f"{self.source}: prompt {index} is empty")
        if limit is not None and len(tokens) > limit:
            raise ConfigError(f"{self.source}: prompt {index} has {len(tokens)} tokens, over --rollout-max-prompt-len {limit}; "
                              "raise the limit or remove the prompt")
        return Prompt(index, text, tokens, row["label"], row["metadata"] or {})

    def _render(self, prompt, index: int) -> tuple[str, list[int]]:
        if not prompt:
            return "", []
        if self.config.apply_chat_template:
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
            text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **self.template_arguments)
            return text, self.tokenizer.encode(text, add_special_tokens=False)
        if not isinstance(prompt, str):
            raise ConfigError(f"{self.source}: prompt {index} is a {type(prompt).__name__}, not text; "
                              "chat messages need --apply-chat-template")
        return prompt, self.tokenizer.encode(prompt)


class PromptOrder:
    """Which prompt stands at which position of the run: epoch after epoch, each a fresh permutation if shuffled."""

    def __init__(self, size: int, shuffle: bool, seed: int):
        self.size, self.shuffle, self.seed = size, shuffle, seed
        self._epoch, self._order = -1, np.arange(size)

    def __getitem__(self, position: int) -> int:
        epoch, offset = divmod(position, self.size)
        if not self.shuffle:
            return offset
        if epoch != self._epoch:
            self._epoch, self._order = epoch, np.random.default_rng([self.seed, epoch]).permutation(self.size)
        return int(self._order[offset])


def load_prompts(config: PromptConfig, tokenizer, held_out_size: int = 0) -> tuple[Prompts, Prompts | None]:
    """(training prompts, held-out prompts or None) as the flags say.

    Args:
        held_out_size: held-out problems wanted of a task, or the most that are taken of --eval-prompt-data.

    Raises:
        ConfigError: names the flag or file, and the line or prompt, and says the fix.
    """
    if config.prompt_task:
        problems, unseen = task_rows(config.prompt_task, config.prompt_task_args, config.prompt_task_size, held_out_size,
                                     config.rollout_seed, config.prompt_task_format)
        source = f"--prompt-task {config.prompt_task}"
        return Prompts(problems, tokenizer, config, source), Prompts(unseen, tokenizer, config, source) if unseen else None
    if not config.prompt_data:
        raise ConfigError("no prompts: give --prompt-data FILE or --prompt-task NAME")
    train = Prompts(read_rows(config.prompt_data, config, "--prompt-data"), tokenizer, config, config.prompt_data)
    if not config.eval_prompt_data or not held_out_size:
        return train, None
    held_out = read_rows(config.eval_prompt_data, config, "--eval-prompt-data")
    return train, Prompts(_Head(held_out, held_out_size), tokenizer, config, config.eval_prompt_data)


def check_prompts(config: PromptConfig) -> None:
    """Read the first row of each prompt file that is named.

    Raises:
        ConfigError: no such file, no row, or one without the keys that the flags say.
    """
    for name in ("prompt_data", "eval_prompt_data"):
        path = getattr(config, name)
        if path:
            rows = read_rows(path, config, flag(name), limit=1)
            if not len(rows):
                raise ConfigError(f"{flag(name)} {path}: holds no prompt")
            rows[0]


def read_rows(path: str, config: PromptConfig, option: str, limit: int | None = None):
    """Rows {"input", "label", "metadata"} of a .jsonl or .parquet file or of a `datasets` directory; of .jsonl the first `limit`."""
    file = Path(path)
    if not file.exists():
        raise ConfigError(f"{option} {path}: no such file or directory")
    if file.is_dir():
        return _Columns(_open_dataset(file, option), config, f"{option} {path}")
    if file.suffix == ".parquet":
        return _Columns(_open_parquet(file, option), config, f"{option} {path}")
    if file.suffix in (".jsonl", ".json"):
        return list(islice(_read_jsonl(file, config, option), limit))
    raise ConfigError(f"{option} {path}: give a .jsonl or .parquet file, or a directory written by datasets' save_to_disk")


def _read_jsonl(file: Path, config: PromptConfig, option: str) -> Iterator[dict]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ConfigError(f"{option} {file}, line {number}: not JSON ({error})") from error
            where = f"{option} {file}, line {number}"
            if not isinstance(row, dict):
                raise ConfigError(f"{where}: a JSON object is wanted, found a {type(row).__name__}")
            _check_keys(row, config, where)
            if not row[config.input_key]:
                raise ConfigError(f"{where}: the prompt ({config.input_key}) is empty")
            yield _row(row, config, where)


def _check_keys(found, config: PromptConfig, where: str):
    for name in ("input_key", "label_key"):
        key = getattr(config, name)
        if key is not None and key not in found:
            raise ConfigError(f"{where}: no key {key!r}; set {flag(name)} to one of the keys found: {', '.join(sorted(found))}")


def _row(row: dict, config: PromptConfig, where: str) -> dict:
    metadata = row.get(config.metadata_key)
    if isinstance(metadata, str):
        metadata = _json_object(metadata, f"{where}: {config.metadata_key}")
    if not isinstance(metadata, dict | None):
        raise ConfigError(f"{where}: {config.metadata_key} is a {type(metadata).__name__}; a dictionary is wanted, or its JSON text")
    return {"input": row[config.input_key], "label": row[config.label_key] if config.label_key else None, "metadata": metadata}


class _Columns:
    """Rows of a column store that stays memory-mapped."""

    def __init__(self, table, config: PromptConfig, where: str):
        self.table, self.config, self.where = table, config, where
        _check_keys(table.column_names, config, where)

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index: int) -> dict:
        return _row(self.table[index], self.config, f"{self.where}, row {index}")


class _ArrowRows:
    """A pyarrow table read row by row."""

    def __init__(self, table):
        self.table, self.column_names = table, table.column_names

    def __len__(self) -> int:
        return self.table.num_rows

    def __getitem__(self, index: int) -> dict:
        return self.table.slice(index, 1).to_pylist()[0]


class _Head:
    """The first `size` of some rows."""

    def __init__(self, rows, size: int):
        self.rows, self.size = rows, min(size, len(rows))

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict:
        return self.rows[index]


def _open_parquet(file: Path, option: str) -> _ArrowRows:
    import pyarrow
    import pyarrow.parquet

    try:
        return _ArrowRows(pyarrow.parquet.read_table(file, memory_map=True))
    except pyarrow.ArrowException as error:
        raise ConfigError(f"{option} {file}: not a readable Parquet file ({error})") from error


def _open_dataset(directory: Path, option: str):
    try:
        import datasets
    except ImportError:
        raise ConfigError(f"{option} {directory}: reading it needs the package datasets: pip install datasets") from None
    try:
        found = datasets.load_from_disk(str(directory))
    except (FileNotFoundError, ValueError) as error:
        raise ConfigError(f"{option} {directory}: not a directory written by datasets' save_to_disk ({error})") from error
    if isinstance(found, datasets.DatasetDict):
        raise ConfigError(f"{option} {directory}: holds several splits; give the directory of one: "
                          f"{', '.join(str(directory / split) for split in found)}")
    return found


def _json_object(text: str, where: str) -> dict:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{where} {text}: not JSON ({error})") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{where} {text}: a JSON object is wanted")
    return value
