"""docs/flags.md, made from the settings:  python -m megatron_grpo.trainer.flag_table > docs/flags.md"""

from dataclasses import Field, fields

from ..settings import flag, takes_none
from .flags import GROUPS

HEAD = """# Flags

Made by `python -m megatron_grpo.trainer.flag_table`. Beside these, every flag of Megatron works as it does there. A default "by algorithm" is one
that `--algorithm` may set; any flag that is given wins, also to undo: `--no-use-kl-loss`, and `none` where the table says
"takes `none`" (`--eps-clip-c none`).
"""


def flag_table() -> str:
    """Every flag of ours, in the groups of --help, with its default, unit and meaning."""
    lines = [HEAD]
    for title, classes in GROUPS.items():
        lines += [f"## {title.removeprefix('GRPO: ').capitalize()}", "", "| flag | default | |", "|---|---|---|"]
        lines += [_row(cls, field) for cls in classes for field in fields(cls)] + [""]
    return "\n".join(lines)


def _row(cls: type, field: Field) -> str:
    meta = field.metadata
    names = ", ".join(f"`{name}`" for name in (flag(field.name), *meta["aliases"]))
    text = meta["help"] + (f"; one of {', '.join(f'`{c}`' for c in meta['choices'])}" if meta["choices"] else "")
    cell = ", ".join(filter(None, (_default(field), "by algorithm" * getattr(cls, "by_recipe", False), "takes `none`" * takes_none(cls, field.name))))
    return f"| {names} | {cell} | {text.replace('|', chr(92) + '|')} |"


def _default(field: Field) -> str:
    value = field.default
    if isinstance(value, bool):
        return "on" if value else "off"
    return "" if value in (None, (), "") else f"`{value}` {field.metadata['unit']}".strip()


if __name__ == "__main__":
    print(flag_table(), end="")
