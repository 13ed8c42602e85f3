"""Settings of prompts and sampling."""

from dataclasses import dataclass

from ..settings import ConfigError, setting


@dataclass(frozen=True)
class PromptConfig:
    prompt_data: str | None = setting(None, "prompts: a .jsonl or .parquet file, or a directory written by datasets' save_to_disk")
    eval_prompt_data: str | None = setting(None, "held-out prompts, in the same formats and with the same keys")
    input_key: str = setting("input", "column of the prompt: text, or a list of chat messages")
    label_key: str | None = setting(None, "column of the reference answer, for the verifier")
    metadata_key: str = setting("metadata", "column of a dictionary that rewards and rollout functions see; may be absent")
    apply_chat_template: bool = setting(False, "render the prompt with the tokenizer's chat template")
    apply_chat_template_kwargs: str = setting("{}", "further arguments of the chat template, as JSON")
    rollout_shuffle: bool = setting(False, "shuffle the prompts anew in each epoch")
    rollout_seed: int = setting(42, "seed of shuffling, of generated tasks and of sampling")
    rollout_max_prompt_len: int | None = setting(None, "longest prompt; a longer one is refused at start-up", unit="tokens")
    prompt_task: str | None = setting(None, "reasoning-gym task as source of prompts and of their verifier, e.g. chain_sum")
    prompt_task_args: str = setting("{}", 'arguments of the task, as JSON, e.g. {"max_terms": 2}')
    prompt_task_size: int = setting(10000, "distinct training problems made of the task", unit="prompts")
    prompt_task_format: str = setting("question", "question: the task's own text; compact: as few characters as say it (12+7=)",
                                      choices=("question", "compact"))

    def __post_init__(self):
        if self.prompt_data and self.prompt_task:
            raise ConfigError(f"--prompt-data {self.prompt_data} and --prompt-task {self.prompt_task} both name the prompts: give one")
        if self.rollout_max_prompt_len is not None and self.rollout_max_prompt_len < 1:
            raise ConfigError(f"--rollout-max-prompt-len {self.rollout_max_prompt_len}: give at least 1")


@dataclass(frozen=True)
class RolloutConfig:
    rollout_batch_size: int = setting(32, "prompt groups that a step trains on, over all data-parallel ranks", unit="prompts")
    n_samples_per_prompt: int = setting(8, "responses to each prompt", unit="samples")
    rollout_max_response_len: int = setting(1024, "longest response, tool output included", unit="tokens")
    rollout_temperature: float = setting(1.0, "sampling temperature")
    rollout_top_p: float = setting(1.0, "nucleus sampling: smallest set of tokens with this probability")
    rollout_top_k: int = setting(-1, "sample among the k likeliest tokens; -1 is all", unit="tokens")
    rollout_stop_token_ids: tuple[int, ...] = setting((), "tokens that end a response, beside the tokenizer's end of text", nargs="+")

    def __post_init__(self):
        for name in ("rollout_batch_size", "n_samples_per_prompt", "rollout_max_response_len"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name.replace('_', '-')} {getattr(self, name)}: give at least 1")
        if self.rollout_temperature <= 0:
            raise ConfigError(f"--rollout-temperature {self.rollout_temperature}: training needs a temperature above 0")
        if not 0 < self.rollout_top_p <= 1:
            raise ConfigError(f"--rollout-top-p {self.rollout_top_p}: give a probability in (0, 1]")
        if self.rollout_top_k != -1 and self.rollout_top_k < 1:
            raise ConfigError(f"--rollout-top-k {self.rollout_top_k}: give at least 1, or -1 for all tokens")
