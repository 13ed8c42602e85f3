"""The documentation against the code: marked commands run, flags and metrics exist, tables are those that the code makes, links lead somewhere."""

import argparse
import os
import re
import subprocess
import sys
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])
RUNNABLE = re.compile(r"^```(bash|python) runnable\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`([^`\n]+)`")
# flags of other programs that the pages speak of
ELSEWHERE = {"--enable-return-routed-experts", "--disable-shared-experts-fusion", "--moe-runner-backend", "--nproc-per-node", "--list-algorithms",
             "--load-format", "--json-model-override-args", "--output", "--watch", "--quick", "--full", "--all-layouts", "--steps", "--warm-steps",
             "--pipeline-parallel-size"}


def blocks():
    return [pytest.param(kind, text, id=f"{page.name}-{i}") for page in PAGES for i, (kind, text) in enumerate(RUNNABLE.findall(page.read_text()))]


@pytest.mark.parametrize("kind, text", blocks())
def test_marked_blocks_run(kind, text, tmp_path):
    """In a directory of their own that shows the repository's examples; `python` is this one."""
    for name in ("examples", "benchmarks", "docs"):
        (tmp_path / name).symlink_to(ROOT / name)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    command = ["bash", "-euo", "pipefail", "-c", text] if kind == "bash" else [sys.executable, "-c", text]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def test_some_blocks_are_marked():
    assert len(blocks()) >= 3


@cache
def known_flags() -> dict[str, argparse.Action]:
    """Every flag of ours and of Megatron."""
    from megatron.training.arguments import add_megatron_arguments

    from megatron_grpo.trainer.flags import add_grpo_args
    ours, megatron = argparse.ArgumentParser(allow_abbrev=False), argparse.ArgumentParser(allow_abbrev=False)
    add_megatron_arguments(megatron)
    return megatron._option_string_actions | add_grpo_args(ours)._option_string_actions


def flags_in(text: str):
    """(flag, the word after it) of every flag in code, without those of slime in the first column of a table about it."""
    for code in CODE.findall(text):
        words = [] if "benchmarks" in code else code.split()        # which have flags of their own
        for word, after in zip(words, [*words[1:], ""]):
            if re.fullmatch(r"--[a-z][a-z0-9-]*(=.*)?", word):
                yield word.split("=")[0], after


def our_side(page: Path) -> str:
    """The page without what it says of other programs' flags: the slime columns and lists of the migration guide."""
    text = page.read_text()
    if page.name == "migration.md":
        text = re.sub(r"^\| `--[^|]*\|(?= )", "| x |", text.split("### Another name")[1], flags=re.MULTILINE)
        text = re.sub(r"### Always on.*?## NeMo-RL", "", text, flags=re.DOTALL)
    return text


@pytest.mark.parametrize("page", [p for p in PAGES if p.name != "slurm.md"], ids=lambda p: p.name)    # which speaks of Slurm's own
def test_flags_exist(page):
    flags, wrong = known_flags(), []
    for name, value in flags_in(our_side(page)):
        action = flags.get(name)
        if action is None and name not in ELSEWHERE:
            wrong.append(name)
        elif action is not None and action.choices and re.fullmatch(r"[a-z0-9_]{2,}", value) and value not in map(str, action.choices):
            wrong.append(f"{name} {value}")
    for name, values in re.findall(r"`(--[a-z0-9-]+)`((?:,? `[a-z0-9_]+`)+)", our_side(page)):      # `--flag` `value`, `value`
        choices = getattr(flags.get(name), "choices", None)
        wrong += [f"{name} {value}" for value in CODE.findall(values) if choices and value not in map(str, choices)]
    assert not wrong, f"{page.name} names what the parser does not know: {wrong}"


def test_slimes_flags_are_all_told():
    """Those of slime 624b824; with the name that both have under "the same name", and no name there that we lack."""
    text = (ROOT / "docs" / "migration.md").read_text()
    names = (Path(__file__).parent / "slime_flags.txt").read_text().split()
    told = {word for code in CODE.findall(text) for word in code.split()}
    assert [n for n in names if n not in told] == []
    same = {word for code in CODE.findall(text.split("### Numerics")[0]) for word in code.split() if word.startswith("--")}
    assert [n for n in same if n not in known_flags()] == []
    assert [n for n in names if n in known_flags() and n not in same] == []


def test_flag_table_is_up_to_date():
    from megatron_grpo.trainer.flag_table import flag_table
    assert (ROOT / "docs" / "flags.md").read_text() == flag_table(), "run python -m megatron_grpo.trainer.flag_table > docs/flags.md"


def test_every_hook_is_described():
    from megatron_grpo.hooks import HookConfig
    page = (ROOT / "docs" / "hooks.md").read_text()
    assert [f.name for f in fields(HookConfig) if f"`--{f.name.replace('_', '-')}`" not in page] == []


def test_quoted_messages_exist():
    """What the troubleshooting page puts in quotation marks is what a run says: a string of ours, or of Megatron's validation."""
    import megatron.training.arguments as arguments
    said = [f.read_text() for f in (ROOT / "megatron_grpo").rglob("*.py")] + [Path(arguments.__file__).read_text()]
    text = re.sub(r"""(["'])\s*\\?\s*\n\s*f?\1""", "", "\n".join(said))
    quoted = re.findall(r'"([^"]+)"', (ROOT / "docs" / "troubleshooting.md").read_text())
    assert len(quoted) >= 4
    assert [q for q in quoted if q not in text and q not in ("Engine agreement", "memory", "on the host", "on the host, a rank")] == []


METRIC = re.compile(r"`((?:routing|rollout|samples|groups|moe|eval|reward|response_length)/[a-zA-Z_/]+"
                    r"|(?:mismatch|clip_frac|ratio|seq_logprob)_\w+|ref_kl|ppo_kl|entropy|grad_norm)`")


@pytest.mark.parametrize("page", ["troubleshooting.md", "report.md", "first_hour.md"])
def test_metrics_exist(page):
    """Each metric that a page sends its reader to is written by the trainer under that name; an effective sample size is derived."""
    source = "\n".join(f.read_text() for f in (ROOT / "megatron_grpo").rglob("*.py") if "report" not in f.parts)
    names = set(METRIC.findall((ROOT / "docs" / page).read_text()))
    parts = {part for name in names for part in name.removeprefix("clip_frac_").split("/")} - {"NAME", "layer_N"}
    parts = {part.removesuffix("_ess").removeprefix("samples_") for part in parts}
    assert names and [part for part in sorted(parts) if not re.search(rf"\b{part}\b", source)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


def test_every_page_is_reached_from_the_readme():
    readme = (ROOT / "README.md").read_text()
    assert [p.name for p in PAGES if p.parent.name == "docs" and f"docs/{p.name}" not in readme] == []
