"""Flags of Megatron's own RL: every one is refused, and what stands for it is a flag of ours."""

import argparse
import re

import pytest
from megatron.training import arguments

from megatron_grpo.settings import ConfigError
from megatron_grpo.trainer import megatron_rl
from megatron_grpo.trainer.flags import add_grpo_args


def options(add) -> set[str]:
    parser = argparse.ArgumentParser(add_help=False)
    add(parser)
    return set(parser._option_string_actions)


def test_every_flag_is_refused_and_no_other():
    theirs, ours = options(arguments._add_rl_args), options(add_grpo_args)
    assert len(theirs) > 30 and set(megatron_rl.OURS) <= theirs
    for name in theirs:
        with pytest.raises(ConfigError, match=f"^{name} belongs to Megatron's own RL"):
            megatron_rl.refuse([f"{name}=1"])
    for text in megatron_rl.OURS.values():
        assert set(re.findall(r"--[a-z-]+", text)) <= ours
    megatron_rl.refuse([*ours, *options(arguments.add_megatron_arguments) - theirs, "--rl-on-policy-target fsdp"])     # words for the engine
