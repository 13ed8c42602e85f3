"""The CPU platform where the packages of a GPU are installed: Megatron must not find their kernels."""

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import importlib.util
{before}
from megatron_grpo.trainer import platform_cpu
platform_cpu.install()
assert importlib.util.find_spec("transformer_engine") is None
from megatron.core.extensions.transformer_engine import HAVE_TE
assert not HAVE_TE
"""


def run(tmp_path, before):
    """In a process with a Transformer Engine that says when it is imported."""
    (tmp_path / "transformer_engine").mkdir(exist_ok=True)
    (tmp_path / "transformer_engine" / "__init__.py").write_text("print('looks at the GPU')\n")
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{Path(__file__).parents[2]}"}
    return subprocess.run([sys.executable, "-W", "ignore", "-c", SCRIPT.format(before=before)], env=environment, capture_output=True, text=True,
                          timeout=500)


def test_transformer_engine_is_hidden(tmp_path):
    done = run(tmp_path, "")
    assert done.returncode == 0 and "looks at the GPU" not in done.stdout, done.stderr[-2000:]


def test_too_late_to_hide_it(tmp_path):
    """Megatron, imported before, has found it."""
    done = run(tmp_path, "import sys, transformer_engine; sys.modules['megatron.core'] = sys")
    assert done.returncode == 1 and "looks at the GPU" in done.stdout
    assert "Megatron was imported before, with transformer_engine" in done.stderr


def test_ranks_import_neither_before_they_know_their_platform(monkeypatch):
    from megatron_grpo.verify import ranks
    for there in (True, None):
        monkeypatch.setattr("importlib.util.find_spec", lambda name: there)
        preloaded = []
        monkeypatch.setattr("multiprocessing.context.BaseContext.set_forkserver_preload", lambda self, names: preloaded.extend(names))
        ranks.LocalRanks(1).close()
        assert any("megatron" in name for name in preloaded) == (there is None) and "torch" in preloaded
