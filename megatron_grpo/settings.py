"""Settings as frozen dataclasses, and their command-line flags.

A room's settings are one frozen dataclass whose fields are made with `setting`. A field named `eps_clip` is the
flag `--eps-clip` and the attribute `args.eps_clip`: one name everywhere, so the help, the code and the
message of a refused value never drift apart.
"""

import argparse
import dataclasses
import types
import typing
from collections.abc import Callable
from typing import Any


class ConfigError(ValueError):
    """A setting, or a pair of settings, that cannot work. The message names the flag and says the fix."""


def setting(default: Any, help: str, *, unit: str = "", choices: tuple | None = None, nargs: str | None = None,
            aliases: tuple[str, ...] = ()) -> Any:
    """A dataclass field that is also a flag.

    Args:
        default: the value without the flag. A list default is given as a tuple.
        help: one line; shown by `--help` with the default and the unit appended.
        unit: what the number counts ("tokens", "seconds", ...).
        choices: the legal words.
        nargs: argparse's nargs, for a tuple of values.
        aliases: further spellings of the flag, kept for users of other frameworks.
    """
    return dataclasses.field(default=default, metadata=dict(help=help, unit=unit, choices=choices, nargs=nargs, aliases=aliases))


def flag(name: str) -> str:
    """`eps_clip` -> `--eps-clip`."""
    return "--" + name.replace("_", "-")


def add_arguments(parser: argparse.ArgumentParser, title: str, *classes: type) -> None:
    """Add one argument group with a flag for every field of `classes`.

    A class with `by_recipe = True` has defaults that depend on the algorithm: its flags are in the namespace only when given,
    and each of them can be undone (`--no-use-kl-loss`, `--eps-clip-c none`).
    """
    group = parser.add_argument_group(title)
    for cls in classes:
        hints, by_recipe = typing.get_type_hints(cls), getattr(cls, "by_recipe", False)
        for field in dataclasses.fields(cls):
            meta, kind = field.metadata, _scalar_type(hints[field.name])
            convert: Callable = kind
            names = [flag(field.name), *meta["aliases"]]
            unit = f" {meta['unit']}" if meta["unit"] else ""
            text = (f"{meta['help']} (default: {field.default}{unit}{' or as --algorithm says' * by_recipe}"
                    f"{'; takes none' * takes_none(cls, field.name)})").replace("%", "%%")
            default = argparse.SUPPRESS if by_recipe else field.default
            if kind is bool:
                action = argparse.BooleanOptionalAction if by_recipe or field.default else "store_true"
                group.add_argument(*names, dest=field.name, action=action, default=default, help=text)
            else:
                if takes_none(cls, field.name):
                    convert = _or_none(kind)
                group.add_argument(*names, dest=field.name, type=convert, default=default, choices=meta["choices"],
                                   nargs=meta["nargs"], help=text)


def takes_none(cls: type, name: str) -> bool:
    """Whether the flag of this field takes the word none, which unsets a number."""
    hint = typing.get_type_hints(cls)[name]
    return type(None) in typing.get_args(hint) and _scalar_type(hint) is not str


def given(name: str, words: list[str]) -> str | None:
    """The value that a command line gives a flag, before any parser has seen it; None when it is not there."""
    for i, word in enumerate(words):
        if word == name and i + 1 < len(words):
            return words[i + 1]
        if word.startswith(name + "="):
            return word.split("=", 1)[1]
    return None


def from_namespace(cls: type, args: argparse.Namespace) -> Any:
    """Build `cls` from the parsed flags; its `__post_init__` refuses what cannot work."""
    values = {f.name: getattr(args, f.name) for f in dataclasses.fields(cls)}
    return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})


def _or_none(kind: type) -> Callable[[str], Any]:
    """The word "none" takes back a number that a recipe sets."""
    def convert(word: str):
        return None if word.lower() == "none" else kind(word)
    convert.__name__ = kind.__name__        # argparse's message for a bad word
    return convert


def _scalar_type(hint: Any) -> type:
    """The type that argparse converts each word to: `int | None` -> int, `tuple[str, ...]` -> str."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        hint = next(a for a in typing.get_args(hint) if a is not type(None))
    if typing.get_origin(hint) is tuple:
        hint = typing.get_args(hint)[0]
    return hint
