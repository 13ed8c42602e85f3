"""Stand-ins that let an unmodified Megatron-Core run on CPU over gloo. Each line says what in Megatron asks for it."""

import contextlib
import functools
import os
import sys
from types import SimpleNamespace

import torch
import torch.distributed as dist

from ...settings import ConfigError

PROVED = ("0.19.2",)
CUDA_ONLY = ("transformer_engine", "apex")     # Megatron takes their kernels for norms, optimizers and routers wherever they can be imported
_installed = False


def install(force: bool = False) -> None:
    """Stand in for torch.cuda and for what gloo lacks, in this process and for good. A second call does nothing.

    Args:
        force: also where a CUDA device is visible; that device is then out of reach for this process.

    Raises:
        ConfigError: a CUDA device is visible, Megatron was imported before with kernels for CUDA, or the installed Megatron-Core is not one
            the stand-ins are proved with.
    """
    global _installed
    if _installed:
        return
    if torch.cuda.is_available() and not force:
        raise ConfigError("--platform cpu: a CUDA device is visible, and the stand-ins would hide it from the whole process. "
                          "Drop --platform cpu, hide the device with CUDA_VISIBLE_DEVICES= (empty), or give --force-platform-cpu")
    _hide()
    from megatron.core.package_info import __shortversion__ as version
    if version not in PROVED:
        raise ConfigError(f"--platform cpu: proved with megatron-core {', '.join(PROVED)}, found {version}. "
                          f"Install the proved version: pip install megatron-core=={PROVED[-1]}")
    _installed = True
    _cuda()
    _tensors()
    _random()
    _collectives()
    _optimizer()
    torch.compiler.set_stance("force_eager")    # Megatron's jit_fuser is torch.compile: minutes of C++ for nothing here
    from megatron.core.datasets import utils
    utils.compile_helpers = lambda: None        # initialize_megatron runs make; the wheel has the built module, no Makefile


def installed() -> bool:
    """Whether this process runs on the CPU platform."""
    return _installed


def _hide():
    """Megatron is to be imported as where these packages are not installed."""
    for name in CUDA_ONLY:
        if sys.modules.get(name) is not None and "megatron.core" in sys.modules:
            raise ConfigError(f"--platform cpu: Megatron was imported before, with {name}, whose kernels need CUDA; install the platform first")
        sys.modules[name] = None  # type: ignore


class _Nothing:
    """A stream or an event on a platform that has neither."""

    def __init__(self, *args, **kwargs): ...
    def wait_stream(self, *args): ...
    def wait_event(self, *args): ...
    def synchronize(self): ...
    def record(self, *args): ...
    def wait(self, *args): ...
    def record_event(self, *args): return self
    def query(self): return True
    def elapsed_time(self, other): return 0.0
    def __enter__(self): return self
    def __exit__(self, *args): return False


def _cuda():
    cuda, device = torch.cuda, torch.device("cpu")
    cuda.is_available = lambda: False                       # nobody reaches for the device that a forced platform hides
    cuda.current_device = lambda: device                    # every buffer Megatron allocates
    cuda.device_count = lambda: int(os.environ.get("LOCAL_WORLD_SIZE", "1"))    # initialize_megatron divides by it
    cuda.set_device = lambda *args, **kwargs: None          # initialize_megatron
    cuda.synchronize = lambda *args, **kwargs: None         # timers
    cuda.empty_cache = lambda: None                         # train_step with --empty-unused-memory-level
    cuda.get_device_properties = lambda *args: SimpleNamespace(     # arguments.py asks for the architecture
        name="cpu", major=10, minor=0, multi_processor_count=1, total_memory=0)
    cuda.get_device_capability = lambda *args: (10, 0)      # below 10, CUDA_DEVICE_MAX_CONNECTIONS=1 is asked for
    cuda.current_stream = lambda *args, **kwargs: _Nothing()    # overlap code waits on it
    cuda.Stream = cuda.Event = _Nothing                     # the all-to-all dispatcher makes one
    cuda.stream = lambda stream: contextlib.nullcontext()  # type: ignore
    cuda.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()          # rerun machine, checkpoints
    cuda.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    cuda.random.get_rng_state, cuda.random.set_rng_state = cuda.get_rng_state, cuda.set_rng_state   # the RNG tracker
    cuda.manual_seed = lambda seed: torch.manual_seed(seed)     # model_parallel_cuda_manual_seed


def _is_cuda(device) -> bool:
    return (isinstance(device, str) and device.startswith("cuda")) or (isinstance(device, torch.device) and device.type == "cuda")


def _on_cpu(factory):
    @functools.wraps(factory)
    def made(*args, **kwargs):
        if kwargs:
            if _is_cuda(kwargs.get("device")):
                kwargs["device"] = "cpu"
            kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)
    return made


def _tensors():
    for name in ("tensor", "zeros", "ones", "empty", "full", "arange", "rand", "randn", "empty_like", "zeros_like"):
        setattr(torch, name, _on_cpu(getattr(torch, name)))         # device="cuda" and pin_memory=True, all over Megatron
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    torch.nn.Module.cuda = lambda self, *args, **kwargs: self       # get_model moves the model
    torch.Tensor.pin_memory = lambda self, *args, **kwargs: self
    kind = torch.Tensor.type
    torch.Tensor.type = lambda self, *args, **kwargs: (         # optimizers sort parameters by "torch.cuda.FloatTensor"
        kind(self, *args, **kwargs) if args or kwargs else kind(self).replace("torch.", "torch.cuda."))


def _random():
    """The RNG tracker goes from one stream to another and back: without this each rank would draw its dense weights from the last stream
    that was made, the experts' own, and data-parallel ranks would begin with different weights."""
    from megatron.core.tensor_parallel import random

    random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)


def _collectives():
    all_to_all_single, all_gather, reduce_scatter = dist.all_to_all_single, dist.all_gather, dist.reduce_scatter

    def listed(splits):
        return splits.tolist() if isinstance(splits, torch.Tensor) else splits

    def with_listed_splits(output, input, output_split_sizes=None, input_split_sizes=None, group=None, async_op=False):
        """The all-to-all dispatcher gives its splits as CPU tensors; on gloo only lists are taken."""
        return all_to_all_single(output, input, listed(output_split_sizes), listed(input_split_sizes), group=group, async_op=async_op)

    def uneven_gather(tensor_list, tensor, group=None, async_op=False):
        """Expert tensor parallelism gathers shards of different lengths; gloo takes equal ones only."""
        rows = max(len(t) for t in tensor_list) if tensor.dim() else 0
        if async_op or all(t.shape == tensor_list[0].shape for t in tensor_list):
            return all_gather(tensor_list, tensor, group=group, async_op=async_op)
        own = tensor.new_zeros(rows, *tensor.shape[1:])
        own[:len(tensor)] = tensor
        padded = [torch.empty_like(own) for _ in tensor_list]
        all_gather(padded, own, group=group)
        for whole, part in zip(padded, tensor_list):
            part.copy_(whole[:len(part)])

    def uneven_reduce_scatter(output, input_list, op=dist.ReduceOp.SUM, group=None, async_op=False):
        """The backward of the uneven gather."""
        if async_op or all(t.shape == input_list[0].shape for t in input_list):
            return reduce_scatter(output, [t.contiguous() for t in input_list], op=op, group=group, async_op=async_op)
        whole = torch.cat(list(input_list))
        dist.all_reduce(whole, op=op, group=group)
        output.copy_(whole.split([len(t) for t in input_list])[dist.get_rank(group)])

    dist.all_to_all_single, dist.all_gather, dist.reduce_scatter = with_listed_splits, uneven_gather, uneven_reduce_scatter


def _optimizer():
    from megatron.core.optimizer.distrib_optimizer import HAVE_APEX_OR_TE, DistributedOptimizer

    state_dict = DistributedOptimizer.state_dict

    def with_step(self):
        """Loading describes a fresh optimizer first, and reads the step that torch's Adam, unlike apex's, has only after a step."""
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                if "step" not in self.optimizer.state[p]:
                    self.optimizer.state[p].setdefault("exp_avg", torch.zeros_like(p))
                    self.optimizer.state[p].setdefault("exp_avg_sq", torch.zeros_like(p))
                    self.optimizer.state[p]["step"] = torch.tensor(0.0)
        return state_dict(self)

    load_state_dict = DistributedOptimizer.load_state_dict

    def with_own_steps(self, state):
        """Loading overwrites the step with that of the fresh optimizer, in one tensor for all parameters.

        It also writes into float32 parameters in place, outside no_grad: their main copies are views of themselves.
        """
        step = float(state["optimizer"]["param_groups"][0]["step"])
        with torch.no_grad():
            load_state_dict(self, state)
        for own in self.optimizer.state.values():
            own["step"] = torch.tensor(step)

    set_states = DistributedOptimizer._set_main_param_and_optimizer_states

    def without_step(self, model_param, tensors):
        """A fully reshardable checkpoint has the step among its common state only, and torch's Adam is asked for it here."""
        return set_states(self, model_param, {"step": None} | tensors)

    if not HAVE_APEX_OR_TE:
        DistributedOptimizer.state_dict = with_step
        DistributedOptimizer._set_main_param_and_optimizer_states = without_step
        DistributedOptimizer.load_state_dict = with_own_steps
