"""The algorithm's part of the command line, parsed and resolved without Megatron."""

import argparse
from functools import cache

from megatron_grpo.algorithms import SECTIONS, AlgorithmChoice, resolve_algorithm
from megatron_grpo.config import GRPOConfig
from megatron_grpo.hooks import HookConfig
from megatron_grpo.settings import add_arguments


@cache
def parser() -> argparse.ArgumentParser:
    """Flags of the algorithm and the hooks, and those of other rooms that refusals look at."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_arguments(parser, "algorithm", AlgorithmChoice, *SECTIONS.values(), HookConfig)
    parser.add_argument("--rollout-ahead", type=int, default=0)
    parser.add_argument("--rollout-max-response-len", type=int, default=1000)
    parser.add_argument("--n-samples-per-prompt", type=int, default=8)
    parser.add_argument("--num-steps-per-rollout", type=int, default=1)
    parser.add_argument("--calculate-per-token-loss", action="store_true")
    return parser


def parse(words: str) -> argparse.Namespace:
    return parser().parse_args(words.split())


def resolve(words: str = "") -> GRPOConfig:
    return resolve_algorithm(parse(words))
