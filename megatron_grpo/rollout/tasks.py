"""Prompts made by reasoning-gym, whose tasks also verify the answers."""

import json
import random

from ..settings import ConfigError

# What a problem says in as few characters as a character-level model can learn from; in lower case, as the answer is then too.
COMPACT = {
    "chain_sum": lambda entry: entry["metadata"]["expression"].replace(" ", "") + "=",
    "basic_arithmetic": lambda entry: entry["metadata"]["expression"].replace(" ", "") + "=",
    "products": lambda entry: entry["metadata"]["expression"].replace(" ", "") + "=",
    "gcd": lambda entry: f"gcd({','.join(map(str, entry['metadata']['numbers']))})=",
    "lcm": lambda entry: f"lcm({','.join(map(str, entry['metadata']['numbers']))})=",
    "spell_backward": lambda entry: f"{entry['metadata']['word']}<",      # its verifier ignores case too
    "count_bits": lambda entry: f"bits({entry['metadata']['number']})=",
}
MISSES_PER_PROBLEM = 20      # repeated draws in a row, per problem found, after which a task is taken to be exhausted


def task_rows(task: str, arguments: str, train_size: int, held_out_size: int, seed: int, style: str = "question") -> tuple[list, list]:
    """Distinct problems of a reasoning-gym task: (training rows, held-out rows), each {"input", "label", "metadata"}.

    The distinct questions of one stream drawn from `seed` are split at random (a task repeats its small problems, so the first
    ones drawn are easier than the rest). No held-out question occurs in training; every process gets the same two sets.

    Args:
        task: name in reasoning-gym, e.g. "chain_sum".
        arguments: the task's own arguments, as JSON.
        style: "question" or "compact" (see COMPACT).

    Raises:
        ConfigError: unknown task, bad arguments, no compact form, or a task with fewer distinct problems.
    """
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if task not in DATASETS:
        raise ConfigError(f"--prompt-task {task}: reasoning-gym has no such task; it has {', '.join(sorted(DATASETS))}")
    if style == "compact" and task not in COMPACT:
        raise ConfigError(f"--prompt-task-format compact: task {task} has no compact form ({', '.join(COMPACT)} have one); "
                          "use --prompt-task-format question")
    try:
        options = json.loads(arguments)
        stream = reasoning_gym.create_dataset(task, size=2**31 - 1, seed=seed, **options)
    except (ValueError, TypeError, AssertionError) as error:
        raise ConfigError(f"--prompt-task-args {arguments}: {error}") from error
    rows: list[dict] = []
    seen: set[str] = set()
    misses = 0
    wanted, index = held_out_size + train_size, 0
    while len(rows) < wanted and misses < 100 + MISSES_PER_PROBLEM * len(rows):
        entry = stream[index]
        index += 1
        question, answer = entry["question"], entry["answer"]
        if style == "compact":
            question, answer = COMPACT[task](entry).lower(), answer.lower()
        if question in seen:
            misses += 1
            continue
        seen.add(question)
        misses = 0
        rows.append({"input": question, "label": answer, "metadata": {**entry["metadata"], "question": entry["question"]}})
    if len(rows) < wanted:
        raise ConfigError(
            f"--prompt-task {task} {arguments}: found {len(rows)} distinct problems, but {held_out_size} held-out and {train_size} "
            "training problems are wanted; lower --prompt-task-size or widen --prompt-task-args")
    random.Random(seed).shuffle(rows)
    return rows[held_out_size:], rows[:held_out_size]


def alphabet(rows: list[dict]) -> str:
    """Every character of the questions and answers, for `make_character_tokenizer`."""
    return "".join(sorted({c for row in rows for c in row["input"] + str(row["label"])}))
