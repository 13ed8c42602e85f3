"""The parts of the CPU platform: stand-ins, flags, norm, rotary embedding, attention of packs, and what the model refuses."""

import argparse

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron_grpo.settings import ConfigError
from megatron_grpo.trainer import platform_cpu
from tests.trainer import one_step

UNTIED = "--untie-embeddings-and-output-weights"


# ---- stand-ins ------------------------------------------------------------------------------------------------------

def test_import_touches_nothing():
    assert not platform_cpu.installed()
    assert torch.cuda.current_device.__module__ == "torch.cuda" and not hasattr(torch.zeros, "__wrapped__")


def test_refuses_a_visible_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ConfigError, match="CUDA device is visible"):
        platform_cpu.install()
    assert not platform_cpu.installed()


def install_with_version(version):
    import megatron.core.package_info as info

    from megatron_grpo.trainer.platform_cpu import stand_ins
    proved, stand_ins._installed, info.__shortversion__ = info.__shortversion__, False, version
    try:
        platform_cpu.install()
    except ConfigError as error:
        return str(error)
    finally:
        stand_ins._installed, info.__shortversion__ = True, proved


def install_twice():
    platform_cpu.install()
    before = torch.zeros, dist.all_gather, torch.Tensor.type
    platform_cpu.install()
    assert (torch.zeros, dist.all_gather, torch.Tensor.type) == before
    assert torch.zeros(2, device="cuda", pin_memory=True).device.type == "cpu" and torch.ones(1).cuda().type() == "torch.cuda.FloatTensor"
    return install_with_version("0.18.0")


def test_install(pool):
    (message,) = pool.run(install_twice, timeout=300)
    assert "proved with megatron-core 0.19.2, found 0.18.0" in message


def uneven():
    platform_cpu.install()
    rank, rows = dist.get_rank(), [3, 0, 1, 2]
    full = torch.arange(12.0).view(6, 2)
    parts = [torch.empty(n, 2) for n in rows]
    dist.all_gather(parts, full.split(rows)[rank])
    assert torch.equal(torch.cat(parts), full)
    mine = torch.empty(rows[rank], 2)
    dist.reduce_scatter(mine, list((full * (rank + 1)).split(rows)))
    assert torch.equal(mine, full.split(rows)[rank] * 10)
    splits = torch.tensor([1, 2, 0, 1])         # rank r sends splits[i] rows to rank i
    received = torch.empty(4 * int(splits[rank]), 1)
    dist.all_to_all_single(received, torch.full((4, 1), float(rank)), torch.full((4,), int(splits[rank])), splits)
    assert torch.equal(received.flatten(), torch.arange(4.0).repeat_interleave(int(splits[rank])))
    return True


def test_uneven_collectives(pool):
    assert pool.run(uneven, ranks=4, timeout=300) == [True] * 4


# ---- flags ----------------------------------------------------------------------------------------------------------

def namespace(**given):
    names = {platform_cpu.flags.DESTINATIONS.get(f, f[2:].replace("-", "_")): v[0] for f, v in platform_cpu.flags.ALLOWED.items()}
    return argparse.Namespace(**{**names, **given})


@pytest.mark.parametrize("given,message", [
    (dict(transformer_impl="transformer_engine"), "--transformer-impl transformer_engine cannot work with --platform cpu: use local"),
    (dict(fp8="hybrid"), "--fp8-format hybrid cannot work with --platform cpu: drop it"),
    (dict(moe_permute_fusion=True), "--moe-permute-fusion cannot work with --platform cpu: drop it"),
    (dict(attention_dropout=0.1), "--attention-dropout 0.1 cannot work with --platform cpu: use 0.0"),
    (dict(moe_token_dispatcher_type="flex"), "--moe-token-dispatcher-type flex cannot work with --platform cpu: use alltoall or allgather"),
])
def test_refused_flags(given, message):
    platform_cpu.check(namespace())
    with pytest.raises(ConfigError) as error:
        platform_cpu.check(namespace(**given))
    assert str(error.value) == message


def parse(words):
    """Megatron's own parser with the platform's defaults."""
    platform_cpu.install()
    from megatron.training.arguments import add_megatron_arguments
    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    platform_cpu.set_defaults(parser)
    args = parser.parse_args([*words, "--normalization", "RMSNorm"])
    try:
        platform_cpu.check(args)
    except ConfigError as error:
        return str(error)
    return {name: getattr(args, name) for name in platform_cpu.flags.DEFAULTS}


def test_defaults_and_explicit_flags(pool):
    assert pool.run(parse, [], timeout=300) == [platform_cpu.flags.DEFAULTS]
    (message,) = pool.run(parse, ["--distributed-backend", "nccl"])
    assert message.startswith("--distributed-backend nccl cannot work")


# ---- norm and rotary embedding --------------------------------------------------------------------------------------

def norm():
    from megatron_grpo.trainer.platform_cpu.layers import Normalize
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(7, 3, 12, dtype=torch.float64, generator=generator, requires_grad=True)
    weight = torch.randn(12, dtype=torch.float64, generator=generator, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, w: Normalize.apply(x, w, 1e-5), (x, weight))
    torch.testing.assert_close(Normalize.apply(x, weight, 1e-5), F.rms_norm(x, (12,), weight, 1e-5), rtol=1e-12, atol=1e-12)
    half = Normalize.apply(x.bfloat16(), weight.bfloat16(), 1e-5)
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.double(), F.rms_norm(x, (12,), weight, 1e-5), rtol=2e-2, atol=2e-2)
    zero = Normalize.apply(torch.zeros(2, 12, requires_grad=True), torch.ones(12), 1e-5)
    assert torch.equal(zero, torch.zeros(2, 12))
    return True


def rotary():
    """Against Megatron's own, for all of its variants."""
    from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd

    from megatron_grpo.trainer.platform_cpu.attention import Rotate
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 2, 3, 8, dtype=torch.float64, generator=generator)
    for interleaved in (False, True):
        for width in (8, 4):
            freqs = torch.randn(5, 1, 1, width // 2, dtype=torch.float64, generator=generator)
            freqs = freqs.repeat_interleave(2, -1) if interleaved else torch.cat([freqs, freqs], -1)
            expected = _apply_rotary_pos_emb_bshd(x, freqs, interleaved, mscale=1.3)
            cos, sin = freqs.cos() * 1.3, freqs.sin() * 1.3
            torch.testing.assert_close(Rotate.apply(x, cos, sin, interleaved), expected, rtol=1e-12, atol=1e-12)
            assert torch.autograd.gradcheck(lambda x: Rotate.apply(x, cos, sin, interleaved), (x.clone().requires_grad_(),))
    return True


def test_norm_and_rotary(pool):
    assert pool.run(norm, timeout=300) == [True]
    assert pool.run(rotary) == [True]


# ---- attention of packs ---------------------------------------------------------------------------------------------

HEADS, GROUPS, SIZE = 4, 2, 8
PACKS = [(0,), (5,), (1, 1, 1, 1), (13, 5, 24, 1), (40, 3, 3, 3, 3, 3, 3), (2, 0, 17), (64, 1), (9, 11, 10, 12, 9, 8, 30, 31)]


def attention(kind, dtype, packs=PACKS):
    """Outputs and gradients of every pack under this rank's layout, gathered: (out, dq, dk, dv) of the stream, float64."""
    platform_cpu.install()
    from types import SimpleNamespace

    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.enums import AttnMaskType

    from megatron_grpo.parallel.layout import Layout
    from megatron_grpo.trainer.platform_cpu.attention import PackedAttention
    from megatron_grpo.trainer.platform_cpu.packing import packed_rows
    group, n, rank = dist.group.WORLD, dist.get_world_size(), dist.get_rank()
    config = SimpleNamespace(attention_dropout=0.0, window_size=None, softmax_type="vanilla", rotary_interleaved=False, softmax_scale=None)
    core = PackedAttention(config, 1, AttnMaskType.causal, "self", pg_collection=SimpleNamespace(cp=group))
    results = []
    for lengths in packs:
        layout = Layout(lengths, cp_size=n, kind=kind, multiple=4)
        stream, angles = streams(lengths)
        local = [layout.shard(x, rank).to(dtype).requires_grad_() for x in stream[:3]]
        padded = layout.cu_seqlens_padded
        params = PackedSeqParams("thd", padded, padded, padded, padded, layout.max_seqlen, layout.max_seqlen)
        rows = packed_rows(params, n, rank, kind == "contiguous", torch.device("cpu")).rotated(angles, 1.0, dtype)
        out = core(*local, None, attn_mask_type=AttnMaskType.causal, packed_seq_params=rows)
        assert torch.isfinite(out).all()
        out.backward(layout.shard(stream[3], rank).flatten(1).to(dtype))
        whole = []
        for x in (out.detach(), *(x.grad for x in local)):
            parts = [torch.empty_like(x) for _ in range(n)]
            dist.all_gather(parts, x.contiguous())
            whole.append(layout.gather(parts).flatten(1).double())
        results.append(whole)
    return results


def streams(lengths):
    """q, k, v and the gradient of the output [N, heads, size], and the rotary angles of all positions."""
    generator = torch.Generator().manual_seed(sum(lengths))
    N = sum(lengths)
    stream = [torch.randn(N, h, SIZE, dtype=torch.float64, generator=generator) for h in (HEADS, GROUPS, GROUPS, HEADS)]
    return stream, torch.randn(128, 1, 1, SIZE // 2, dtype=torch.float64, generator=generator).repeat(1, 1, 1, 2)


def plain_attention(lengths):
    """The same, sequence by sequence, from the formula."""
    (q, k, v, grad), angles = streams(lengths)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    outputs = []
    for q_S, k_S, v_S in zip(*(x.split(lengths) for x in (q, k, v)), strict=True):
        n = len(q_S)
        a = angles[:n, 0]
        turn = lambda x: x * a.cos() + torch.cat([-x[..., SIZE // 2:], x[..., :SIZE // 2]], -1) * a.sin()
        k_S, v_S = (x.repeat_interleave(HEADS // GROUPS, 1) for x in (turn(k_S), v_S))
        scores = torch.einsum("qhd,khd->hqk", turn(q_S), k_S) / SIZE**0.5
        scores = scores.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), -torch.inf)
        outputs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v_S))
    out = torch.cat(outputs)
    out.backward(grad)
    return [x.flatten(1) for x in (out.detach(), q.grad, k.grad, v.grad)]


@pytest.mark.parametrize("ranks,kind,dtype", [(1, "zigzag", torch.float64), (2, "zigzag", torch.float64), (2, "contiguous", torch.float64),
                                              (4, "zigzag", torch.float64), (4, "contiguous", torch.float64),
                                              (2, "zigzag", torch.float32), (2, "contiguous", torch.bfloat16)])
def test_packed_attention(pool, ranks, kind, dtype):
    bound = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    results = pool.run(attention, kind, dtype, ranks=ranks, timeout=300)
    for lengths, *per_rank in zip(PACKS, *results, strict=True):
        for whole in per_rank:
            for got, expected in zip(whole, plain_attention(lengths), strict=True):
                assert (got - expected).norm() <= bound * (1 + expected.norm()), lengths


def test_buckets_hold_every_row_once(pool):
    assert pool.run(buckets, timeout=300) == [True]


def buckets():
    from megatron.core.packed_seq_params import PackedSeqParams

    from megatron_grpo.trainer.platform_cpu.packing import packed_rows
    rng = np.random.default_rng(0)
    for _ in range(20):
        lengths = 8 * rng.integers(1, 30, rng.integers(1, 40))
        cu = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
        for n, contiguous in ((1, False), (4, False), (4, True)):
            for rank in range(n):
                rows = packed_rows(PackedSeqParams("thd", cu, cu, cu, cu), n, rank, contiguous, torch.device("cpu"))
                T = int(cu[-1]) // n
                assert torch.equal(rows.query[rows.output_T], torch.arange(T))      # each row's output is its own query's
                assert sum(B * K for B, _, K in rows.shapes) == len(rows.key)
                if n == 1:
                    assert len(rows.key) <= 1.25 * T + 16 * len(lengths)
    return True


# ---- the model ------------------------------------------------------------------------------------------------------

def refused(flags):
    args = one_step.start(flags)
    try:
        one_step.build(args)
    except (ConfigError, ValueError) as error:
        return str(error)


@pytest.mark.parametrize("ranks,flags,message", [
    (2, "--context-parallel-size 2 --cp-layout contiguous --mtp-num-layers 1", "use --cp-layout zigzag"),
    (1, "--apply-layernorm-1p", "need no --apply-layernorm-1p"),
])
def test_refused_models(pool, ranks, flags, message):
    for text in pool.run(refused, [UNTIED, *flags.split()], ranks=ranks, timeout=300):
        assert message in text


def marked_spec(config, vp_stage=None):
    block = platform_cpu.layer_spec(config.transformer, vp_stage)
    block.layer_norm = Marked
    return block


class Marked(torch.nn.LayerNorm):
    def __init__(self, config, hidden_size, eps=1e-5, **_):
        super().__init__(hidden_size, eps, dtype=config.params_dtype)


def named_spec():
    from megatron.core.utils import unwrap_model
    args = one_step.start([UNTIED, "--spec", __name__, "marked_spec"])
    (chunk,) = unwrap_model(one_step.build(args)[0])
    return type(chunk.decoder.final_layernorm).__name__


def test_spec_is_honoured(pool):
    assert pool.run(named_spec, timeout=300) == ["Marked"]


def fresh_weights(flags):
    """{name: (kind, weights)} of a model that nothing is loaded into; kind: of every rank, of a tensor-parallel shard, of an expert."""
    from megatron.core.utils import unwrap_model
    (chunk,) = unwrap_model(one_step.build(one_step.start([UNTIED, *flags.split()]))[0])
    return {name: ("expert" if not getattr(p, "allreduce", True) else "shard" if getattr(p, "tensor_model_parallel", False) else "all",
                   p.detach().clone()) for name, p in chunk.named_parameters() if p.dim() > 1}


@pytest.mark.parametrize("flags", ["--expert-model-parallel-size 2", "--tensor-model-parallel-size 2 --sequence-parallel"])
def test_fresh_weights(pool, flags):
    """Data-parallel ranks begin with the same dense weights; shards and experts are drawn apart."""
    first, second = pool.run(fresh_weights, flags, ranks=2, timeout=300)
    same = {name for name in first if torch.equal(first[name][1], second[name][1])}
    apart = {"expert"} if "expert" in flags else {"shard", "expert"}
    assert same == {name for name, (kind, _) in first.items() if kind not in apart}
    assert same and len(same) < len(first)
