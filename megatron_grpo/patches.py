"""Patches for releases that lack what routing replay needs.

    python -m megatron_grpo.patches check  megatron-core      # what is installed, and whether it will do
    python -m megatron_grpo.patches apply  megatron-core      # idempotent
    python -m megatron_grpo.patches revert megatron-core      # byte for byte

A patch is applied only to files whose SHA-256 is the release's: nothing is written to a tree that is not known, and nothing at
all before the whole result has been computed and its hashes are right. `--root DIR` names another site-packages directory.
"""

import argparse
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from .routing.server import FIRST, PER_REQUEST, version

PATCHES = Path(__file__).resolve().parents[1] / "patches"
NATIVE = {"megatron-core": (0, 16, 0), "sglang": PER_REQUEST}
UNPATCHED = {
    "megatron-core": "there is no patch for this release; install megatron-core 0.16.1 or newer",
    "sglang": f"releases before {'.'.join(map(str, FIRST))} do not record routed experts, and recording them inside captured CUDA graphs "
              f"takes more than a patch can carry honestly; those before {'.'.join(map(str, PER_REQUEST))} mix up the requests of a batch. "
              "Install sglang 0.5.15 or newer",
}


class PatchError(RuntimeError):
    """Nothing was written. The message names the file or the release, and the fix."""


class Tree:
    """An installed package, and the patch that fits its version, if any."""

    def __init__(self, package: str, root: str | None = None):
        if package not in NATIVE:
            raise PatchError(f"unknown package {package!r}; known are {', '.join(NATIVE)}")
        found = next(iter(importlib.metadata.distributions(name=package, path=[root] if root else sys.path)), None)
        if found is None:
            raise PatchError(f"{package} is not installed{f' in {root}' if root else ''}")
        self.package, self.version = package, found.version
        self.root = Path(root) if root else self._root(found)
        entries = json.loads((PATCHES / "index.json").read_text()).get(package, []) if PATCHES.is_dir() else []
        self.entry = next((e for e in entries if self.version in e["versions"]), None)

    @staticmethod
    def _root(found) -> Path:
        """Site-packages, or the checkout of an editable installation."""
        root = Path(str(found.locate_file("")))
        if not (root / "megatron" / "core").is_dir() and found.metadata["Name"].lower().replace("_", "-") == "megatron-core":
            spec = importlib.util.find_spec("megatron.core")
            root = Path(spec.origin).parents[2] if spec is not None and spec.origin else root
        return root

    @property
    def native(self) -> bool:
        return version(self.version) >= NATIVE[self.package]

    def state(self) -> dict[str, str]:
        """Each file of the patch: "original", "patched" or "unknown"."""
        states = {}
        for name, hashes in (self.entry or {"files": {}})["files"].items():
            path = self.root / name
            found = _sha(path.read_bytes()) if path.is_file() else None
            states[name] = {hashes["before"]: "original", hashes["after"]: "patched"}.get(found, "unknown")
        return states

    def check(self) -> tuple[bool, str]:
        """(whether routing replay can work with it, what to do)."""
        name = f"{self.package} {self.version} in {self.root}"
        if self.native:
            return True, f"{name}: needs no patch"
        if self.entry is None:
            return False, f"{name}: {UNPATCHED[self.package]}"
        states = self.state()
        if set(states.values()) == {"patched"}:
            return True, f"{name}: patched"
        if "unknown" in states.values():
            return False, f"{name}: {self._unknown(states)}"
        return False, f"{name}: not patched; run python -m megatron_grpo.patches apply {self.package}"

    def apply(self) -> str:
        return self._turn("original", "patched", "after", reverse=False)

    def revert(self) -> str:
        return self._turn("patched", "original", "before", reverse=True)

    def _turn(self, old: str, new: str, wanted: str, reverse: bool) -> str:
        if self.native:
            return self.check()[1]
        if self.entry is None:
            raise PatchError(self.check()[1])
        states = self.state()
        if "unknown" in states.values():
            raise PatchError(f"{self.package} {self.version} in {self.root}: {self._unknown(states)}")
        diffs = parse((PATCHES / self.entry["patch"]).read_text())
        results = {}
        for name in (n for n, s in states.items() if s == old):
            content = turned((self.root / name).read_text(), diffs[name], reverse).encode()
            if _sha(content) != self.entry["files"][name][wanted]:
                raise PatchError(f"{self.entry['patch']} does not give the expected {name}: this checkout of megatron_grpo is damaged")
            results[self.root / name] = content
        for path, content in results.items():
            _replace(path, content)
        return f"{self.package} {self.version} in {self.root}: {new}" + ("" if results else " already")

    def _unknown(self, states: dict[str, str]) -> str:
        names = ", ".join(n for n, s in states.items() if s == "unknown")
        return (f"{names} is neither the release's nor the patched file; reinstall it: "
                f"pip install --force-reinstall {self.package}=={self.version}")


Hunk = tuple[int, int, list[str]]
"""Lines before the hunk in the old and in the new file, and its lines with their signs."""


def parse(text: str) -> dict[str, list[Hunk]]:
    """A unified diff -> hunks of each file; text before the first file is a comment."""
    files: dict[str, list[Hunk]] = {}
    hunks: list[Hunk] | None = None
    for line in text.splitlines(keepends=True):
        if line.startswith("--- a/"):
            hunks = files.setdefault(line[6:].strip(), [])
        elif hunks is not None and (head := re.match(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@", line)):
            old, old_length, new, new_length = head.groups()
            hunks.append((int(old) - (old_length != "0"), int(new) - (new_length != "0"), []))     # an empty side names the line before
        elif hunks and line[0] in " +-" and not line.startswith("+++ b/"):
            hunks[-1][2].append(line)
    return files


def turned(text: str, hunks: list[Hunk], reverse: bool = False) -> str:
    """The new file from the old one, or with `reverse` the old one from the new. Exact: no fuzz, no offsets.

    Raises:
        PatchError: a line is not what the diff says.
    """
    drop, add = ("+", "-") if reverse else ("-", "+")
    lines, out, at = text.splitlines(keepends=True), [], 0
    for old, new, body in hunks:
        start = new if reverse else old
        out += lines[at:start]
        at = start
        for line in body:
            if line[0] != add:
                if at >= len(lines) or lines[at] != line[1:]:
                    raise PatchError(f"line {at + 1} is not {line[1:]!r}")
                at += 1
            if line[0] != drop:
                out.append(line[1:])
    return "".join(out + lines[at:])


def _sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _replace(path: Path, content: bytes) -> None:
    """Atomic: a reader or a crash sees the old file or the new one."""
    handle, name = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(handle, "wb") as file:
        file.write(content)
    os.chmod(name, path.stat().st_mode & 0o7777)
    os.replace(name, path)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m megatron_grpo.patches", description=__doc__.split("\n\n")[0])
    parser.add_argument("action", choices=("check", "apply", "revert"))
    parser.add_argument("package", choices=tuple(NATIVE))
    parser.add_argument("--root", help="site-packages directory to work on instead of the running interpreter's")
    args = parser.parse_args(argv)
    try:
        tree = Tree(args.package, args.root)
        action: Callable = getattr(tree, args.action)
        good, message = action() if args.action == "check" else (True, action())
    except (PatchError, OSError) as error:
        good, message = False, str(error)
    print(message, file=sys.stdout if good else sys.stderr)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
