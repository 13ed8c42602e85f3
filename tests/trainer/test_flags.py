"""The parser that users meet: --help, a flag with a typo, a process that no launcher started."""

import argparse
import sys
from types import SimpleNamespace

import pytest

from megatron_grpo.settings import ConfigError
from megatron_grpo.trainer import flags
from megatron_grpo.trainer.build import check_launched
from megatron_grpo.trainer.flags import GROUPS, add_grpo_args, make_parser
from megatron_grpo.trainer.model import check_dtype
from megatron_grpo.weights.config import WeightsConfig


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


# ---- what only a GPU would notice ------------------------------------------------------------------------------------

def on_gpu(**more):
    return SimpleNamespace(**dict(grpo=SimpleNamespace(trainer=SimpleNamespace(platform="cuda")), transformer_impl="transformer_engine", spec=None,
                                  qkv_format="thd", bf16=True, fp16=False, gradient_accumulation_fusion=True) | more)


@pytest.mark.parametrize("there, message", [
    ((), "pip install megatron-grpo"), (("transformer_engine",), "--no-gradient-accumulation-fusion"),
    (("transformer_engine", "fused_weight_gradient_mlp_cuda"), None)])
def test_packages_of_a_gpu_run(monkeypatch, there, message):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name in there or None)
    if message is None:
        flags.check_installation(on_gpu())
    else:
        with pytest.raises(ConfigError, match=message):
            flags.check_installation(on_gpu())
    flags.check_installation(on_gpu(grpo=SimpleNamespace(trainer=SimpleNamespace(platform="cpu"))))


def test_packs_need_half_precision():
    with pytest.raises(ConfigError, match="give --bf16"):
        check_dtype(on_gpu(bf16=False))
    for works in (dict(), dict(bf16=False, fp16=True), dict(bf16=False, qkv_format="bshd"), dict(bf16=False, transformer_impl="local")):
        check_dtype(on_gpu(**works))


def test_dispatchers_of_unequal_micro_batches(monkeypatch):
    def dispatch(kind, backend="deepep"):
        args = argparse.Namespace(num_experts=8, moe_token_dispatcher_type=kind, moe_flex_dispatcher_backend=backend,
                                  moe_hybridep_pad_uneven_dispatch_inputs=False)
        flags._unequal_lengths(args)
        return args.moe_token_dispatcher_type, args.moe_hybridep_pad_uneven_dispatch_inputs

    monkeypatch.setattr(sys, "argv", ["train"])
    assert dispatch("allgather") == ("alltoall", False)
    assert dispatch("flex") == ("flex", False) and dispatch("flex", "hybridep") == ("flex", True)
    with pytest.raises(ConfigError, match="use deepep or hybridep"):
        dispatch("flex", "ncclep")


def test_collectives_outlast_a_broadcast_to_the_engines(monkeypatch):
    def minutes(timeout, sync="distributed", given=10, *words):
        monkeypatch.setattr(sys, "argv", ["train", *words])
        args = argparse.Namespace(distributed_timeout_minutes=given)
        flags._patience(args, WeightsConfig(weight_sync=sync, weight_sync_timeout=timeout))
        return args.distributed_timeout_minutes

    assert minutes(600, "disk") == 10 and minutes(540) == 10 and minutes(600) == 11 and minutes(601) == 12
    with pytest.raises(ConfigError, match="give at least 11"):
        minutes(600, "distributed", 10, "--distributed-timeout-minutes", "10")


def test_quantized_parameters_are_refused():
    with pytest.raises(ConfigError, match="--fp8-param-gather: .* drop it"):
        flags._plain_parameters(argparse.Namespace(fp8_param_gather=True))
    flags._plain_parameters(argparse.Namespace(fp8_param_gather=False, fp4_param_gather=False))
