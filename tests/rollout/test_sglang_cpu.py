"""The shim's own arithmetic against plain float64 loops, and its refusals. (The whole of it: test_server.py.)"""

import importlib.metadata
import json
import sys

import pytest
import torch

from megatron_grpo.rollout import sglang_cpu


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 4e-2)])
@pytest.mark.parametrize("seed", range(4))
def test_batched_attention(dtype, tolerance, seed):
    torch.manual_seed(seed)
    batch, heads, kv_heads, dim = 5, 4, 2, 16
    prefix, new = torch.randint(0, 12, (batch,)), torch.randint(1, 9, (batch,))
    if seed == 0:
        new[:] = 1      # a decode step
    k_cache, v_cache = torch.randn(2, 300, kv_heads, dim, dtype=dtype).unbind()
    slots = torch.randint(0, 300, (batch, int((prefix + new).max())), dtype=torch.int32)
    query = torch.randn(int(new.sum()), heads, dim, dtype=dtype)
    output = sglang_cpu._attend(query, torch.empty_like(query), k_cache, v_cache, slots, prefix, new, int(new.max()), 0.3, True)
    rows = iter(zip(query.double(), output.double(), strict=True))
    for b in range(batch):
        k, v = (cache[slots[b].long()].repeat_interleave(2, 1).double() for cache in (k_cache, v_cache))
        for i in range(int(new[b])):
            seen = int(prefix[b]) + i + 1
            q, got = next(rows)
            weights = (torch.einsum("hd,lhd->hl", q, k[:seen]) * 0.3).softmax(-1)
            torch.testing.assert_close(got, torch.einsum("hl,lhd->hd", weights, v[:seen]), atol=tolerance, rtol=0)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 4e-2)])
@pytest.mark.parametrize("tokens", [1, 7, 40])
def test_grouped_experts_and_experts_of_other_ranks(dtype, tolerance, tokens):
    torch.manual_seed(tokens)
    experts, inner, hidden, topk = 8, 24, 16, 2
    x = torch.randn(tokens, hidden, dtype=dtype)
    w13, w2 = (torch.randn(experts, 2 * inner, hidden) * 0.3).to(dtype), (torch.randn(experts, hidden, inner) * 0.3).to(dtype)
    weights, ids = torch.randn(tokens, experts).softmax(-1).topk(topk, -1)
    ids = ids.int().masked_fill(torch.rand(tokens, topk) < 0.3, -1)
    expected = torch.zeros(tokens, hidden, dtype=torch.float64)
    for t in range(tokens):
        for k in range(topk):
            if (e := int(ids[t, k])) >= 0:
                gate, up = (w13[e].double() @ x[t].double()).chunk(2)
                expected[t] += weights[t, k].double() * (w2[e].double() @ (torch.nn.functional.silu(gate) * up))
    torch.testing.assert_close(sglang_cpu._experts(x, weights, ids, w13, w2).double(), expected, atol=tolerance, rtol=0)


def test_unproved_version_is_refused(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.5.99")
    with pytest.raises(RuntimeError, match="0.5.99 is not proved on a CPU: pip install sglang==0.5.23"):
        sglang_cpu.install("unused")


def test_stub_imports_and_refuses_calls(monkeypatch):
    monkeypatch.setattr(sys, "meta_path", [sglang_cpu._KernelStub(), *sys.meta_path])
    import sgl_kernel
    from sgl_kernel.some.module import kernel
    with pytest.raises(NotImplementedError, match="sgl_kernel.some.module.kernel needs SGLang's compiled kernels"):
        kernel(1)
    with pytest.raises(AttributeError):
        _ = sgl_kernel.__nothing__
    for name in [name for name in sys.modules if name.split(".")[0] == "sgl_kernel"]:
        del sys.modules[name]


def test_only_the_models_own_module_is_registered(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Qwen3MoeForCausalLM"]}))
    others = sglang_cpu._other_models(str(tmp_path))
    assert "qwen3_moe" not in others and {"llama", "qwen2_moe", "glm4_moe"} <= set(others)
