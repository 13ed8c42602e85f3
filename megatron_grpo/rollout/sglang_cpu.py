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
import importlib.util
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
        raise RuntimeError(f"SGLang {version} is not proved on a CPU: pip install sglang=={PROVED[-1]}, or serve on a GPU and give --sglang-urls")
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    os.environ.setdefault("SGLANG_NCCL_SO_PATH", "/nonexistent/libnccl.so")     # several ranks: gloo, not pynccl
    os.environ.setdefault("SGLANG_DISABLED_MODEL_ARCHS", ",".join(_other_models(model_path)))
    sys.meta_path.insert(0, _KernelStub())
    sys.modules.setdefault("megatron", None)        # SGLang's debug dumper would import it
    gc.disable()                                    # 6,700 modules: collecting while they load costs seconds
    scan, importlib.metadata.packages_distributions = importlib.metadata.packages_distributions, dict
    import sglang.srt.entrypoints.http_server       # noqa: F401
    importlib.metadata.packages_distributions = scan    # transformers reads every installed file list for it: 2 s
    _patch()
    gc.enable()
    gc.freeze()                                     # forked processes share these pages
    start_method = multiprocessing.set_start_method
    multiprocessing.set_start_method = lambda method, force=False: start_method("fork", force=True)


def _other_models(model_path: str) -> list[str]:
    """SGLang's modules of models that do not define this model's class: importing all 200 of them costs seconds."""
    architectures = json.loads((Path(model_path) / "config.json").read_text())["architectures"]
    modules = Path(importlib.util.find_spec("sglang").origin).parent.glob("srt/models/*.py")
    defines = re.compile(rf"^(class|EntryClass).*\b({'|'.join(architectures)})\b", re.MULTILINE)
    return [module.stem for module in modules if not defines.search(module.read_text())]


def _patch() -> None:
    import torch
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.mem_cache.pool_host import common

    def plain_memory(dims, dtype, device, pin_memory, allocator, registration_granularity_bytes=None):
        return torch.empty(dims, dtype=dtype)

    common.ALLOC_MEMORY_FUNCS["cpu"] = plain_memory     # the buffer of routed experts asks for CUDA-registered memory
    # Data-parallel attention pads batches and asks the backend for the filler's length.
    TorchNativeAttnBackend.get_cpu_graph_seq_len_fill_value = TorchNativeAttnBackend.get_cuda_graph_seq_len_fill_value = lambda self: 1
