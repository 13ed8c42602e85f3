"""A real SGLang server on a machine without a GPU: what SGLang needs changed to serve a small model on any x86 CPU.

SGLang's CPU path wants the compiled kernels of `sgl_kernel`, which exist for AMX machines only; without AMX it calls none of
them and uses its torch-native forwards. So a package of that name whose attributes import, and raise when called, is enough,
with the few patches of `install`, all made in memory. They are proved with the versions in `PROVED` and refused with others.

It also starts fast: one process imports SGLang once and forks the scheduler and the detokenizer, which by SGLang's default
would each import it again.
"""

import gc
import importlib.abc
import importlib.machinery
import importlib.metadata
import json
import multiprocessing
import os
import re
import sys
from pathlib import Path

PROVED = ("0.5.23",)


class _Missing:
    """Stands for any kernel: has any attribute, raises when called."""

    def __init__(self, name: str):
        self.__name__ = self.__qualname__ = name

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Missing(f"{self.__name__}.{name}")

    def __call__(self, *args, **kwargs):
        raise NotImplementedError(f"{self.__name__} needs SGLang's compiled kernels: serve this model or option on a GPU")


class _KernelStub(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds `sgl_kernel` and every submodule of it."""

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "sgl_kernel":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        missing = _Missing(module.__name__)
        module.__getattr__ = lambda name: getattr(missing, name)
        module.__version__ = "0.4.10"


def install(model_path: str) -> None:
    """Make this process, and those it forks, serve the model at `model_path` on the CPU. To be called before SGLang is imported.

    Raises:
        RuntimeError: the installed SGLang is not one that the patches are proved with.
    """
    version = importlib.metadata.version("sglang")
    if version not in PROVED:
        raise RuntimeError(f"SGLang {version} is not proved on a CPU: pip install sglang=={PROVED[-1]}, or serve on a GPU and give "
                           "--sglang-urls")
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    os.environ.setdefault("SGLANG_NCCL_SO_PATH", "/nonexistent/libnccl.so")     # several ranks: gloo, not pynccl
    os.environ.setdefault("SGLANG_DISABLED_MODEL_ARCHS", ",".join(_other_models(model_path)))
    sys.meta_path.insert(0, _KernelStub())
    sys.modules["megatron"] = None  # type: ignore[assignment]     # SGLang's debug dumper would import it
    gc.disable()                                    # 6,700 modules: collecting while they load costs seconds
    import torch
    # torch.compile needs a C++ compiler, and 3 s to import
    torch.compile = lambda model=None, **options: model or (lambda function: function)  # type: ignore[assignment]
    scan, importlib.metadata.packages_distributions = importlib.metadata.packages_distributions, dict
    import sglang.srt.entrypoints.http_server  # noqa: F401
    importlib.metadata.packages_distributions = scan    # transformers reads every installed file list for it: 2 s
    _patch()
    gc.enable()
    gc.freeze()                                     # forked processes share these pages
    start_method = multiprocessing.set_start_method
    multiprocessing.set_start_method = lambda method, force=False: start_method("fork", force=True)


def _other_models(model_path: str) -> list[str]:
    """SGLang's modules of models that do not define this model's class: importing all 200 of them costs seconds."""
    architectures = json.loads((Path(model_path) / "config.json").read_text())["architectures"]
    package = importlib.metadata.distribution("sglang").locate_file("sglang")
    modules = Path(str(package)).glob("srt/models/*.py")
    defines = re.compile(rf"^(class|EntryClass).*\b({'|'.join(architectures)})\b", re.MULTILINE)
    return [module.stem for module in modules if not defines.search(module.read_text())]


def _patch() -> None:
    import torch
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend as Backend
    from sglang.srt.layers.moe import fused_moe_native
    from sglang.srt.mem_cache.pool_host import common

    def plain_memory(dims, dtype, device, pin_memory, allocator, registration_granularity_bytes=None):
        return torch.empty(dims, dtype=dtype)

    common.ALLOC_MEMORY_FUNCS["cpu"] = plain_memory     # the buffer of routed experts asks for CUDA-registered memory
    # Data-parallel attention pads batches and asks the backend for the filler's length.
    Backend.get_cpu_graph_seq_len_fill_value = Backend.get_cuda_graph_seq_len_fill_value = lambda self: 1
    extend, decode, experts = Backend._run_sdpa_forward_extend, Backend._run_sdpa_forward_decode, fused_moe_native.moe_forward_native

    # SGLang attends sequence by sequence; most of a small model's step would go into that loop. Batched, padded to the longest
    # sequence, the numbers are the same; a batch that padding would blow up stays with the loop.
    def fast_extend(self, query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, extend_prefix_lens, extend_seq_lens,
                    encoder_lens=None, **options):
        longest, most = int(seq_lens.max()), int(extend_seq_lens.max())
        padded, needed = len(seq_lens) * longest * most, int((seq_lens * extend_seq_lens).sum())
        if _plain(options, query, k_cache, encoder_lens) and options["causal"] and padded <= 4 * needed:
            return _attend(query, output, k_cache, v_cache, req_to_token[:, :longest][req_pool_indices], extend_prefix_lens,
                           extend_seq_lens, most, options["scaling"], options["enable_gqa"])
        return extend(self, query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, extend_prefix_lens, extend_seq_lens,
                      encoder_lens, **options)

    def fast_decode(self, query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, encoder_lens=None, **options):
        longest = int(seq_lens.max())
        if _plain(options, query, k_cache, encoder_lens) and len(seq_lens) * longest <= 4 * int(seq_lens.sum()):
            return _attend(query, output, k_cache, v_cache, req_to_token[:, :longest][req_pool_indices], seq_lens - 1,
                           torch.ones_like(seq_lens), 1, options["scaling"], options["enable_gqa"])
        return decode(self, query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, encoder_lens, **options)

    def fast_experts(layer, x, topk_output, config):
        if config.activation != "silu" or config.gemm1_alpha is not None or config.apply_router_weight_on_input or hasattr(
                layer, "w13_weight_bias"):
            return experts(layer, x, topk_output, config)
        return _experts(x, topk_output[0], topk_output[1], layer.w13_weight, layer.w2_weight)

    Backend._run_sdpa_forward_extend, Backend._run_sdpa_forward_decode = fast_extend, fast_decode
    fused_moe_native.moe_forward_native = fast_experts


def _plain(options: dict, query, k_cache, encoder_lens) -> bool:
    """Causal self-attention over the whole prefix, in one dtype."""
    window = options["sliding_window_size"]
    return encoder_lens is None and not options["is_cross_attn"] and (window is None or window < 0) and query.dtype == k_cache.dtype


def _attend(query, output, k_cache, v_cache, slots, prefix_lens, new_lens, most, scaling, enable_gqa):
    """Attention of packed `query` [sum(new_lens), heads, dim]: query i of sequence b sees cache `slots[b, : prefix_lens[b] + i + 1]`."""
    import torch
    batch, longest = slots.shape
    step = torch.arange(most)
    real = step < new_lens[:, None]
    start = new_lens.cumsum(0) - new_lens
    q = query[(start[:, None] + step).clamp_(max=len(query) - 1)] if most > 1 else query[:, None]
    k, v = (cache.index_select(0, slots.flatten()).view(batch, longest, *cache.shape[1:]).transpose(1, 2) for cache in (k_cache, v_cache))
    visible = torch.arange(longest) <= (prefix_lens[:, None] + step)[:, None, :, None]
    out = torch.nn.functional.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=visible, scale=scaling, enable_gqa=enable_gqa)
    output.copy_(out.transpose(1, 2)[real])
    return output


def _experts(x, weights, experts, w13, w2):
    """SwiGLU experts as two grouped products over tokens sorted by expert; -1 marks an expert of another rank and adds nothing."""
    import torch
    flat = experts.flatten().long()
    flat = flat.masked_fill(flat < 0, len(w13))
    ends = torch.bincount(flat, minlength=len(w13))[:len(w13)].cumsum(0).int()
    order = flat.argsort()[:int(ends[-1])]
    gate, up = torch.nn.functional.grouped_mm(x[order // experts.shape[1]], w13.transpose(1, 2), offs=ends).chunk(2, -1)
    out = x.new_zeros(len(flat), x.shape[1])
    out[order] = torch.nn.functional.grouped_mm(torch.nn.functional.silu(gate) * up, w2.transpose(1, 2), offs=ends)
    return (out.view(*experts.shape, -1).to(weights.dtype) * weights[..., None]).sum(1).to(x.dtype)
