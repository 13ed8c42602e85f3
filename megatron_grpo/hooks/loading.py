"""From an import path to a checked callable."""

import importlib
import importlib.util
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

from ..settings import flag
from . import checks
from .protocols import HookConfig, HookError, Hooks

_HOOKS = dict(
    pg_loss=("custom_pg_loss_path", checks.pg_loss),
    reducer=("custom_pg_loss_reducer_path", checks.reducer),
    advantage=("custom_advantage_function_path", checks.advantage),
    tis=("custom_tis_function_path", checks.tis),
    rm=("custom_rm_path", checks.RewardModelHook),
    reward_post_process=("custom_reward_post_process_path", checks.reward_post_process),
    sampling_filter=("dynamic_sampling_filter_path", checks.sampling_filter),
    rollout=("rollout_function_path", checks.rollout),
)


def load_hooks(config: HookConfig, args: Namespace) -> Hooks:
    """Import every hook that `config` names and check its arguments.

    Args:
        config: the paths.
        args: all flags; handed to the hooks whose signature has `args`.

    Raises:
        HookError: a path leads nowhere, or the function takes other arguments.
    """
    hooks = {}
    for name, (setting_name, make) in _HOOKS.items():
        path = getattr(config, setting_name)
        if path is not None:
            hooks[name] = make(load_function(path, flag(setting_name)), f"{flag(setting_name)} {path}", args)
    return Hooks(**hooks)


def load_function(path: str, flag_name: str) -> Callable:
    """`pkg.mod.fn` or `file.py:fn` -> the function.

    Raises:
        HookError: names the flag, the path and what is missing: file, module, attribute, or that it cannot be called.
    """
    where = f"{flag_name} {path}"
    module_name, _, attribute = path.rpartition(":" if ".py:" in path else ".")
    if not module_name or not attribute:
        raise HookError(f"{where}: give pkg.mod.function or file.py:function")
    try:
        module = _load_file(Path(module_name)) if module_name.endswith(".py") else importlib.import_module(module_name)
    except Exception as error:
        raise HookError(f"{where}: cannot import {module_name}: {type(error).__name__}: {error}") from error
    fn = getattr(module, attribute, None)
    if fn is None:
        raise HookError(f"{where}: {module_name} has no {attribute!r}; it has {[n for n in vars(module) if not n.startswith('_')]}")
    if not callable(fn):
        raise HookError(f"{where}: {attribute} is a {type(fn).__name__}, not a function")
    return fn


def _load_file(path: Path):
    path = path.expanduser().resolve()
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}")
    name = f"_hook_{path}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None         # a .py file always has them
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module          # before it runs: dataclasses and pickles look it up there
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]
