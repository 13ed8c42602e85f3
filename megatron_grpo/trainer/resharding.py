"""A checkpoint under another layout than it was saved under.

Megatron reshards weights always, and the distributed optimizer's state when it was saved with --dist-ckpt-optim-fully-reshardable. It
keeps one optimizer for all parameters, or with expert parallelism one for the experts and one for the rest; between the two it
cannot load, although only the little that is common to all ranks (steps, learning rates) is arranged differently.
"""

from contextlib import contextmanager

from ..settings import ConfigError
from .checkpoint import iteration_to_load

LAYOUT = {"tensor_model_parallel_size": "TP", "pipeline_model_parallel_size": "PP", "virtual_pipeline_model_parallel_size": "VPP",
          "expert_model_parallel_size": "EP", "expert_tensor_parallel_size": "ETP"}


def check_layout(args) -> None:
    """Refuse an optimizer state that can only be spread over other data-parallel sizes. On one rank.

    Raises:
        ConfigError: the layout changed; names both, and the fix.
    """
    from megatron.core import dist_checkpointing

    directory = iteration_to_load(args)
    if (directory is None or args.finetune or args.no_load_optim or not args.use_distributed_optimizer
            or not dist_checkpointing.check_is_distributed_checkpoint(directory)):
        return
    common = dist_checkpointing.load_common_state_dict(directory)
    saved = common.get("args")
    kind = (dist_checkpointing.load_content_metadata(preloaded_state_dict=common) or {}).get("distrib_optim_sharding_type")
    if saved is None or kind != "dp_reshardable" or getattr(saved, "no_save_optim", False):
        return
    then, now = ({short: getattr(a, name, None) or 1 for name, short in LAYOUT.items()} for a in (saved, args))
    if then != now:
        changed = [short for short in then if then[short] != now[short]]
        raise ConfigError(f"--load {directory} was saved with {', '.join(f'{s}={then[s]}' for s in changed)}, this run has "
                          f"{', '.join(f'{s}={now[s]}' for s in changed)}, and its optimizer state can only be spread over another data-parallel "
                          "size: save it with --dist-ckpt-optim-fully-reshardable, or load the weights alone with --no-load-optim")


@contextmanager
def any_number_of_optimizers():
    """Inside, a state that one optimizer saved is loaded by several and the other way round."""
    from megatron.core.optimizer.optimizer import ChainedOptimizer

    load = ChainedOptimizer.load_state_dict

    def regrouping(self, state):
        load(self, regrouped(state, len(self.chained_optimizers)))

    ChainedOptimizer.load_state_dict = regrouping
    try:
        yield
    finally:
        ChainedOptimizer.load_state_dict = load


def regrouped(state: dict, count: int) -> dict:
    """The state as `count` optimizers take it: {"optimizer": ..., "param_state": ...} for one, {0: {...}, 1: {...}} for several.

    What is common to all ranks comes as it was saved, the state of the parameters as this run wants it. A group of parameters is found by
    its settings, of which one is whether they are experts of this rank.
    """
    numbered = {key: value for key, value in state.items() if isinstance(key, int)}
    if count == 1 and numbered:
        whole = {key: value for key, value in state.items() if key not in numbered}
        parts = [numbered[key] for key in sorted(numbered)]
        groups = [group for part in parts for group in part["optimizer"]["param_groups"]]
        return parts[0] | whole | {"optimizer": parts[0]["optimizer"] | {"param_groups": groups}}
    if count > 1 and "optimizer" in state:
        common = {key: value for key, value in state.items() if key not in numbered}
        groups = [group | {"is_expert_parallel": expert} for group in common["optimizer"]["param_groups"] for expert in (False, True)]
        common["optimizer"] = common["optimizer"] | {"param_groups": groups}
        return {key: common | part for key, part in numbered.items()}
    return state
