"""The parser that users meet: --help, a flag with a typo, a process that no launcher started."""

import argparse

import pytest

from megatron_grpo.settings import ConfigError
from megatron_grpo.trainer.build import check_launched
from megatron_grpo.trainer.flags import GROUPS, add_grpo_args, make_parser


@pytest.fixture(scope="module")
def parser():
    return make_parser()


def test_help(parser, capsys):
    with pytest.raises(SystemExit) as stop:
        parser.parse_args(["--help"])
    said = capsys.readouterr().out
    assert stop.value.code == 0 and all(f"{title}:" in said for title in GROUPS)
    assert "1.10 = 10%)" in " ".join(said.split())


def test_percents():
    parser = argparse.ArgumentParser()
    parser.add_argument("--share", default=3, help="50% of 100%% (%(default)s, %(default)05d)")
    assert "50% of 100% (3, 00003)" in add_grpo_args(parser).format_help()


def test_typo(parser, capsys):
    with pytest.raises(SystemExit) as stop:
        parser.parse_args(["--eps-clp", "0.2", "--tensor-model-paralel-size=2"])
    (line,) = capsys.readouterr().err.splitlines()
    assert stop.value.code == 2
    assert "for --eps-clp, did you mean --eps-clip" in line and "did you mean --tensor-model-parallel-size" in line and "--help" in line
    with pytest.raises(SystemExit):
        parser.parse_args(["--eps-clip", "much"])
    (line,) = capsys.readouterr().err.splitlines()
    assert "argument --eps-clip: invalid" in line and "did you mean" not in line


def test_no_launcher(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")
    check_launched()
    monkeypatch.delenv("MASTER_ADDR")
    with pytest.raises(ConfigError, match="torchrun --nproc-per-node N .* MASTER_ADDR is not set"):
        check_launched()
