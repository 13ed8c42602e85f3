"""Settings of prompts, sampling and the inference engine."""

import os
import shlex
from dataclasses import dataclass

from ..settings import ConfigError, flag, setting

SAMPLING_MASK_MAX_TOKENS = 4096     # SGLang's default --sampling-mask-max-tokens


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
        for name in ("label_key", "eval_prompt_data"):
            if self.prompt_task and getattr(self, name) is not None:
                raise ConfigError(f"{flag(name)} {getattr(self, name)} has no effect: --prompt-task {self.prompt_task} has labels and held-out "
                                  "problems of its own; drop it")
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
    over_sampling_batch_size: int | None = setting(
        None, "groups in flight or kept at a time; a step takes the first --rollout-batch-size that complete; the same when not given",
        unit="prompts")
    dynamic_sampling_max_batches: int = setting(
        10, "give up a step after beginning this many times the groups in flight, because too many are refused", unit="batches")
    partial_rollout: bool = setting(
        False, "carry responses that a step cut off over to the next one (APRIL); otherwise their prompts come again")
    mask_offpolicy_in_partial_rollout: bool = setting(False, "mask tokens sampled under older weights than those the step trains")
    max_weight_staleness: int | None = setting(
        None, "weight updates between sampling a token and training on it; a step waits for samples that would exceed it", unit="updates")
    rollout_ahead: int = setting(
        0, "steps whose rollouts are generated while the trainer works; needs an off-policy correction", unit="steps")
    use_rollout_sampling_mask: bool = setting(
        False, "renormalise log-probs over the support that top-p and top-k left at each token, in the engine and in the trainer")
    rollout_function_timeout: float = setting(
        600.0, "longest time that a --rollout-function-path spends between two generations", unit="seconds")

    def __post_init__(self):
        for name in ("rollout_batch_size", "n_samples_per_prompt", "rollout_max_response_len", "dynamic_sampling_max_batches"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{flag(name)} {getattr(self, name)}: give at least 1")
        for name in ("rollout_ahead", "max_weight_staleness"):
            if (getattr(self, name) or 0) < 0:
                raise ConfigError(f"{flag(name)} {getattr(self, name)}: give 0 or more")
        if self.rollout_function_timeout <= 0:
            raise ConfigError(f"--rollout-function-timeout {self.rollout_function_timeout}: give a positive number")
        if self.rollout_temperature <= 0:
            raise ConfigError(f"--rollout-temperature {self.rollout_temperature}: training needs a temperature above 0")
        if not 0 < self.rollout_top_p <= 1:
            raise ConfigError(f"--rollout-top-p {self.rollout_top_p}: give a probability in (0, 1]")
        if self.rollout_top_k != -1 and self.rollout_top_k < 1:
            raise ConfigError(f"--rollout-top-k {self.rollout_top_k}: give at least 1, or -1 for all tokens")
        self._check_strategy()
        self._check_sampling_mask()

    @property
    def groups_in_flight(self) -> int:
        return self.over_sampling_batch_size or self.rollout_batch_size

    def _check_strategy(self):
        if self.groups_in_flight < self.rollout_batch_size:
            raise ConfigError(f"--over-sampling-batch-size {self.over_sampling_batch_size} is below --rollout-batch-size "
                              f"{self.rollout_batch_size}: raise it, or leave it out")
        if self.mask_offpolicy_in_partial_rollout and not self.partial_rollout:
            raise ConfigError("--mask-offpolicy-in-partial-rollout masks what --partial-rollout carries over: give both or neither")
        if self.mask_offpolicy_in_partial_rollout and self.rollout_ahead:
            raise ConfigError("--mask-offpolicy-in-partial-rollout with --rollout-ahead would mask every token: drop one of them")
        if self.max_weight_staleness is not None:
            if self.max_weight_staleness < self.rollout_ahead:
                raise ConfigError(f"--max-weight-staleness {self.max_weight_staleness} is below --rollout-ahead {self.rollout_ahead}, "
                                  "by which every sample is stale: raise it")
            if self.partial_rollout and self.max_weight_staleness <= self.rollout_ahead:
                raise ConfigError(f"--max-weight-staleness {self.max_weight_staleness} leaves --partial-rollout nothing to carry over: "
                                  f"give at least {self.rollout_ahead + 1}, or drop --partial-rollout")

    def _check_sampling_mask(self):
        if not self.use_rollout_sampling_mask:
            return
        if self.rollout_top_p == 1 and self.rollout_top_k == -1:
            raise ConfigError("--use-rollout-sampling-mask without --rollout-top-p below 1 or --rollout-top-k: nothing is truncated; "
                              "drop it")
        if not 1 <= self.rollout_top_k <= SAMPLING_MASK_MAX_TOKENS:
            raise ConfigError(f"--use-rollout-sampling-mask: SGLang returns a support of at most {SAMPLING_MASK_MAX_TOKENS} tokens; give "
                              f"--rollout-top-k 1 .. {SAMPLING_MASK_MAX_TOKENS}, the largest of which cuts almost nothing")


@dataclass(frozen=True)
class EngineConfig:
    rollout_engine: str = setting("sglang", "inference engine of the rollouts", choices=("sglang",))
    sglang_urls: tuple[str, ...] = setting((), "running SGLang servers, or one SGLang router, e.g. http://node1:30000", nargs="+")
    sglang_worker_urls: tuple[str, ...] = setting(
        (), "SGLang servers behind the router of --sglang-urls: weights and aborts go straight to them, because a router passes "
            "neither on", nargs="+")
    sglang_launch: str = setting("none", "local: start one SGLang server on this machine, and stop it with the run",
                                 choices=("none", "local"))
    sglang_port: int = setting(0, "port of the local server; 0 takes a free one")
    sglang_dtype: str = setting("auto", "dtype of the local server's weights", choices=("auto", "float32", "bfloat16", "float16"))
    sglang_server_args: str = setting("", 'further arguments of the local server, e.g. "--tp-size 2 --mem-fraction-static 0.6"')
    sglang_start_timeout: float = setting(600.0, "longest start of the local server, and longest wait for the servers to answer at first",
                                          unit="seconds")
    sglang_api_key_env: str | None = setting(None, "environment variable that holds the servers' API key")
    sglang_server_concurrency: int = setting(512, "requests of one data-parallel rank in flight at one server; further ones wait",
                                             unit="requests")
    sglang_request_timeout: float = setting(3600.0, "longest time of one request at one server, its queue included", unit="seconds")
    sglang_stall_timeout: float = setting(900.0, "longest silence of a server on a request", unit="seconds")
    sglang_stream_interval: int = setting(
        256, "how often a running response is sent: what has arrived is not lost with a dead server; 0 sends it at its end only",
        unit="tokens")
    sglang_retries: int = setting(4, "further attempts at a request that failed or whose answer was refused", unit="attempts")
    sglang_down_timeout: float = setting(600.0, "give up when no server has been healthy for so long", unit="seconds")
    rollout_health_check_interval: float = setting(15.0, "time between two health checks of a server", unit="seconds")
    rollout_health_check_timeout: float = setting(30.0, "longest health check; a slower server is left out until it answers again",
                                                  unit="seconds")

    def __post_init__(self):
        if self.sglang_urls and self.sglang_launch == "local":
            raise ConfigError("--sglang-urls and --sglang-launch local both name an engine: give one")
        if self.sglang_worker_urls and not self.sglang_urls:
            raise ConfigError("--sglang-worker-urls names the servers behind a router: give the router's address with --sglang-urls")
        for name, given in (("--sglang-urls", self.sglang_urls), ("--sglang-worker-urls", self.sglang_worker_urls)):
            for url in given:
                if not url.startswith(("http://", "https://")):
                    raise ConfigError(f"{name} {url}: give http://host:port")
            if len({url.rstrip("/") for url in given}) < len(given):
                raise ConfigError(f"{name} names a server twice: {' '.join(given)}")
        for name in ("sglang_server_concurrency", "sglang_request_timeout", "sglang_stall_timeout", "sglang_start_timeout",
                     "sglang_down_timeout", "rollout_health_check_interval", "rollout_health_check_timeout"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{flag(name)} {getattr(self, name)}: give a number above 0")
        for name in ("sglang_stream_interval", "sglang_retries", "sglang_port"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{flag(name)} {getattr(self, name)}: give 0 or more")
        try:
            shlex.split(self.sglang_server_args)
        except ValueError as error:
            raise ConfigError(f"--sglang-server-args {self.sglang_server_args}: {error}; close the quotation mark") from None
        if self.sglang_api_key_env is not None and not os.environ.get(self.sglang_api_key_env):
            raise ConfigError(f"--sglang-api-key-env {self.sglang_api_key_env}: the variable is not set; export it, or drop the flag")

    @property
    def server_urls(self) -> tuple[str, ...]:
        return tuple(url.rstrip("/") for url in self.sglang_urls)

    @property
    def worker_urls(self) -> tuple[str, ...]:
        return tuple(url.rstrip("/") for url in self.sglang_worker_urls)

    @property
    def api_key(self) -> str | None:
        return os.environ[self.sglang_api_key_env] if self.sglang_api_key_env else None
