"""User code by import path: how it is found, what each hook receives and returns, and the checks around each call.

    --custom-pg-loss-reducer-path my_package.losses.reducer        an importable function
    --custom-pg-loss-reducer-path ./losses.py:reducer              a function of a file

`load_hooks` turns the flags into `Hooks`, whose members are called like the Protocols of protocols.py. A path that leads
nowhere or a function with other arguments is refused when it is loaded; a result of the wrong type or shape, or one that is
not finite, when it is returned. Functions written for slime are recognised by the names of their arguments (slime.py).
"""

from .loading import load_function, load_hooks
from .protocols import (
    Advantage,
    Episode,
    FilterOutput,
    HookConfig,
    HookError,
    Hooks,
    PgLoss,
    PgLossOutput,
    Reducer,
    RewardModel,
    RewardOutput,
    RewardPostProcess,
    RolloutFunction,
    SamplingFilter,
    Tis,
    TisOutput,
)

__all__ = [
    "Advantage", "Episode", "FilterOutput", "HookConfig", "HookError", "Hooks", "PgLoss", "PgLossOutput", "Reducer", "RewardModel",
    "RewardOutput", "RewardPostProcess", "RolloutFunction", "SamplingFilter", "Tis", "TisOutput", "load_function", "load_hooks",
]
