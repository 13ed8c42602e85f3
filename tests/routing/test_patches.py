import compileall
import difflib
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_grpo.patches import PATCHES, PatchError, main, parse, turned

LINES = st.lists(st.sampled_from(["a\n", "b\n", "-c\n", "+d\n", "\n", "@@ -1 +1 @@\n"]), max_size=12)


@settings(max_examples=60, deadline=None)
@given(LINES, LINES, st.integers(0, 3))
def test_a_diff_turns_one_file_into_the_other_and_back(old, new, context):
    diff = "".join(difflib.unified_diff(old, new, "a/f", "b/f", n=context))
    hunks = parse("a comment\n\n" + diff).get("f", [])
    assert turned("".join(old), hunks) == "".join(new)
    assert turned("".join(new), hunks, reverse=True) == "".join(old)


def test_a_diff_is_exact():
    hunks = parse("--- a/f\n+++ b/f\n@@ -2,2 +2,2 @@\n two\n-three\n+THREE\n")["f"]
    assert turned("one\ntwo\nthree\n", hunks) == "one\ntwo\nTHREE\n"
    for text in ("zero\none\ntwo\nthree\n", "one\ntwo\n", "one\ntwo\nthree"):
        with pytest.raises(PatchError, match="line"):
            turned(text, hunks)


def sha(content):
    return hashlib.sha256(content).hexdigest()


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """An installed release with two files, and a patch for both."""
    old = {"megatron/core/x.py": b"one\ntwo\n", "megatron/core/y.py": b"three\n"}
    new = {"megatron/core/x.py": b"one\nTWO\n", "megatron/core/y.py": b"three\nfour\n"}
    root, patches = tmp_path / "site", tmp_path / "patches"
    (root / "megatron_core-0.15.9.dist-info").mkdir(parents=True)
    (root / "megatron_core-0.15.9.dist-info" / "METADATA").write_text("Name: megatron-core\nVersion: 0.15.9\n")
    (root / "megatron" / "core").mkdir(parents=True)
    patches.mkdir()
    for name, content in old.items():
        (root / name).write_bytes(content)
        (root / name).chmod(0o640)
    lines = lambda content: content.decode().splitlines(keepends=True)
    (patches / "p.patch").write_text("".join(
        line for n in old for line in difflib.unified_diff(lines(old[n]), lines(new[n]), f"a/{n}", f"b/{n}", n=1)))
    (patches / "index.json").write_text(json.dumps({"megatron-core": [{"versions": ["0.15.9"], "patch": "p.patch", "files": {
        n: {"before": sha(old[n]), "after": sha(new[n])} for n in old}}]}))
    monkeypatch.setattr("megatron_grpo.patches.PATCHES", patches)
    return root, old, new


def run(capsys, action, root, package="megatron-core"):
    status = main([action, package, "--root", str(root)])
    out = capsys.readouterr()
    return status, out.out + out.err


def contents(root, names):
    return {n: (root / n).read_bytes() for n in names}


def test_apply_is_idempotent_and_revert_restores_every_byte(tree, capsys):
    root, old, new = tree
    assert run(capsys, "check", root)[0] == 1
    for already in (False, True):
        status, message = run(capsys, "apply", root)
        assert status == 0 and ("already" in message) is already and contents(root, old) == new
    assert run(capsys, "check", root) == (0, f"megatron-core 0.15.9 in {root}: patched\n")
    for already in (False, True):
        status, message = run(capsys, "revert", root)
        assert status == 0 and ("already" in message) is already and contents(root, old) == old
    assert {(root / n).stat().st_mode & 0o777 for n in old} == {0o640}
    assert not list(root.rglob("tmp*"))


def test_an_interrupted_apply_is_finished(tree, capsys):
    root, old, new = tree
    (root / "megatron/core/y.py").write_bytes(new["megatron/core/y.py"])
    assert run(capsys, "check", root)[0] == 1
    assert run(capsys, "apply", root)[0] == 0 and contents(root, old) == new


@pytest.mark.parametrize("action", ["check", "apply", "revert"])
@pytest.mark.parametrize("damage", ["edited", "gone"])
def test_an_unknown_tree_is_left_alone(tree, capsys, action, damage):
    root, old, _ = tree
    path = root / "megatron/core/y.py"
    path.write_bytes(b"mine\n") if damage == "edited" else path.unlink()
    before = {p: p.read_bytes() for p in root.rglob("*.py")}
    status, message = run(capsys, action, root)
    assert status == 1 and "megatron/core/y.py is neither" in message and "pip install --force-reinstall megatron-core==0.15.9" in message
    assert {p: p.read_bytes() for p in root.rglob("*.py")} == before


def test_a_damaged_patch_writes_nothing(tree, capsys, monkeypatch):
    root, old, _ = tree
    from megatron_grpo import patches
    path = patches.PATCHES / "p.patch"
    path.write_text(path.read_text().replace("+four", "+five"))
    status, message = run(capsys, "apply", root)
    assert status == 1 and "damaged" in message and contents(root, old) == old


@pytest.mark.parametrize("package, version, status, part", [
    ("megatron-core", "0.14.0", 1, "install megatron-core 0.16.1"), ("megatron-core", "0.16.1", 0, "needs no patch"),
    ("sglang", "0.5.6.post2", 1, "Install sglang 0.5.15"), ("sglang", "0.5.12", 1, "mix up"), ("sglang", "0.5.23", 0, "needs no patch")])
def test_verdict_on_releases_without_a_patch(tmp_path, capsys, package, version, status, part):
    folder = tmp_path / f"{package.replace('-', '_')}-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Name: {package}\nVersion: {version}\n")
    for action in ("check", "apply", "revert"):
        got, message = run(capsys, action, tmp_path, package)
        assert got == status and part in message


def test_nothing_installed(tmp_path, capsys):
    status, message = run(capsys, "apply", tmp_path)
    assert status == 1 and "is not installed" in message


def test_the_index_names_files_of_this_repository():
    index = json.loads((PATCHES / "index.json").read_text())
    for entries in index.values():
        for entry in entries:
            assert set(parse((PATCHES / entry["patch"]).read_text())) == set(entry["files"])


def release(version, folder) -> Path:
    """A wheel from the package index, unpacked."""
    subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", f"megatron-core=={version}", "-d", str(folder)], check=True,
                   timeout=300)
    root = folder / "site"
    with ZipFile(next(folder.glob("*.whl"))) as wheel:
        wheel.extractall(root)
    return root


def replays(root) -> subprocess.CompletedProcess:
    script = Path(__file__).parent / "core_replay.py"
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, str(script), str(root)], capture_output=True, text=True, timeout=400, env=env)


@pytest.mark.slow
def test_megatron_core_0_15_3_is_patched_compiles_replays_and_is_restored(tmp_path, capsys):
    root = release("0.15.3", tmp_path)
    before = {p.relative_to(root): sha(p.read_bytes()) for p in root.rglob("*.py")}
    assert run(capsys, "check", root)[0] == 1
    assert run(capsys, "apply", root)[0] == 0 and run(capsys, "check", root)[0] == 0
    assert compileall.compile_dir(root / "megatron" / "core" / "transformer" / "moe", quiet=1, force=True)
    done = replays(root)
    assert "replayed on 0.15.3" in done.stdout and str(root) in done.stdout, done.stderr[-3000:]
    assert run(capsys, "revert", root)[0] == 0
    for cache in root.rglob("__pycache__"):
        shutil.rmtree(cache)
    assert {p.relative_to(root): sha(p.read_bytes()) for p in root.rglob("*.py")} == before


@pytest.mark.slow
def test_megatron_core_0_16_1_needs_no_patch_and_replays(tmp_path, capsys):
    root = release("0.16.1", tmp_path)
    for action in ("check", "apply", "revert"):
        status, message = run(capsys, action, root)
        assert status == 0 and "needs no patch" in message
    done = replays(root)
    assert "replayed on 0.16.1" in done.stdout and str(root) in done.stdout, done.stderr[-3000:]
