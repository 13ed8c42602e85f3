"""Megatron-Core on CPU over gloo: `install` before the first model, `layer_spec` for its layers."""

import importlib

from .flags import check, set_defaults
from .stand_ins import install, installed

__all__ = ["ONE_RANK", "check", "install", "installed", "layer_spec", "mtp_spec", "set_defaults"]
_LATE = {"layer_spec": "layers", "mtp_spec": "layers", "ONE_RANK": "attention"}     # these import Megatron, the platform does not


def __getattr__(name):
    if name in _LATE:
        return getattr(importlib.import_module(f"{__name__}.{_LATE[name]}"), name)
    raise AttributeError(name)
