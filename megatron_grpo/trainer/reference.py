"""The reference policy: frozen weights on the host, swapped into the model for one forward pass."""

import hashlib
from contextlib import contextmanager
from pathlib import Path

import torch

from ..weights.live import unwrap

BLOCKS, BLOCK = 16, 4096        # of each file, in bytes


class Reference:
    """Host copies of the reference's parameters and buffers, in the order of the model's.

    `applied()` swaps them in and puts the policy's bits back afterwards; the optimizer's own copies are not touched.

    Attributes:
        identity: says in a checkpoint which weights these are.
    """

    def __init__(self, model: list, identity: str = ""):
        self.identity = identity
        self.tensors = [t.detach().to("cpu", copy=True) for t in _state(model)]

    @contextmanager
    def applied(self, model: list):
        live = _state(model)
        policy = [t.detach().to("cpu", copy=True) for t in live]
        try:
            _copy(live, self.tensors)
            yield
        finally:
            _copy(live, policy)


def load_reference(args, trained) -> Reference:
    """The reference named by --ref-load, else the weights of --hf-checkpoint.

    Raises:
        ConfigError: neither holds weights.
    """
    import os

    from megatron.training.checkpointing import load_checkpoint

    from ..settings import ConfigError
    from ..weights import has_weights, load_hf_checkpoint

    where = args.grpo.trainer.ref_load or args.grpo.weights.hf_checkpoint
    model, policy = trained.model, Reference(trained.model)
    if has_weights(where):
        load_hf_checkpoint(trained.live, where)     # not into the optimizer, whose float32 weights have digits that the model's lack
    elif os.path.exists(os.path.join(where, "latest_checkpointed_iteration.txt")):
        kept = {name: getattr(args, name) for name in ("finetune", "no_load_optim", "no_load_rng", "iteration", "consumed_train_samples",
                                                       "exit_on_missing_checkpoint")}
        args.finetune = args.no_load_optim = args.no_load_rng = args.exit_on_missing_checkpoint = True
        args.ref_load = where
        load_checkpoint(model, None, None, load_arg="ref_load")
        for name, value in kept.items():
            setattr(args, name, value)
    else:
        raise ConfigError(f"the KL needs a reference model: {where} holds neither safetensors nor a Megatron checkpoint; give --ref-load")
    reference = Reference(model, _identity(where))
    _copy(_state(model), policy.tensors)
    return reference


def _identity(where: str) -> str:
    """A digest of the safetensors in a directory, wherever it is: their sizes and some blocks of each, not every byte."""
    found = hashlib.sha256()
    for path in sorted(Path(where).glob("*.safetensors")):
        size = path.stat().st_size
        found.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            for i in range(BLOCKS):
                file.seek(i * size // BLOCKS)
                found.update(file.read(BLOCK))
    return found.hexdigest()


def _state(model: list) -> list[torch.Tensor]:
    return [t for chunk in map(unwrap, model) for t in (*chunk.parameters(), *chunk.buffers())]


@torch.no_grad()
def _copy(target: list[torch.Tensor], source: list[torch.Tensor]) -> None:
    for t, s in zip(target, source, strict=True):
        t.copy_(s)
