"""Flags of Megatron's own reinforcement learning (megatron/rl), which this trainer does not run: each is refused when it is given."""

import re

from ..settings import ConfigError

OURS = {
    "--grpo-prompts-per-step": "--rollout-batch-size",
    "--grpo-group-size": "--n-samples-per-prompt",
    "--grpo-iterations": "--num-steps-per-rollout",
    "--grpo-clamp-eps-lower": "--eps-clip",
    "--grpo-clamp-eps-upper": "--eps-clip-high",
    "--grpo-kl-beta": "--kl-loss-coef with --use-kl-loss",
    "--grpo-entropy-term-weight": "--entropy-coef",
    "--grpo-filter-groups-with-same-reward": "--dynamic-sampling-filter-path megatron_grpo.rollout.filters.reward_nonzero_std",
    "--langrl-env-config": "--rm-type or --custom-rm-path, and --rollout-function-path",
    "--refit-method": "--weight-sync",
    "--rl-default-temperature": "--rollout-temperature",
    "--rl-default-top-p": "--rollout-top-p",
    "--rl-default-top-k": "--rollout-top-k",
    "--rl-prompts-per-eval": "--eval-num-prompts",
    "--rl-partial-rollouts": "--partial-rollout",
    "--rl-generation-lag": "--rollout-ahead",
    "--rl-inference-logprobs-is-correction": "--use-tis",
    "--rl-importance-sampling-truncation-coef": "--tis-clip",
    "--rl-use-sequence-packing": "--use-dynamic-batch-size",
}
NAMES = re.compile(r"--(no-)?(rl|grpo)-[a-z0-9-]+|--perform-rl-step|--langrl-env-config|--refit-method")


def refuse(words: list[str]) -> None:
    """Raise ConfigError with every such flag among the words of a command line, and ours for it."""
    given = [name for name in dict.fromkeys(word.split("=")[0] for word in words) if NAMES.fullmatch(name)]
    if given:
        raise ConfigError("\n".join(f"{name} belongs to Megatron's own RL and would have no effect: "
                                    f"{f'give {OURS[name]}' if name in OURS else 'drop it'}" for name in given))
