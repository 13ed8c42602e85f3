"""Functions written for slime, run unchanged: recognised by argument names, fed with slime's lists of response tensors.

slime hands its functions one tensor of response tokens for each sample. Ours are packed over prompt and response, and cut over
context-parallel ranks. `Responses` goes from one to the other: every CP rank sees whole responses, as on one rank, so that
a function written for CP = 1 is right under any layout; the gradient stays with the rank that holds the token.
"""

import inspect
from collections.abc import Callable

import torch
import torch.distributed as dist

from .protocols import HookError, TisOutput


def _names(fn: Callable) -> list[str]:
    return list(inspect.signature(fn).parameters)


def is_reducer(fn: Callable) -> bool:
    """slime: (total_lengths, response_lengths, loss_masks, calculate_per_token_loss=False) -> (x -> scalar)."""
    return _names(fn)[:3] == ["total_lengths", "response_lengths", "loss_masks"]


def is_advantage(fn: Callable) -> bool:
    """slime: (args, rollout_data) -> None, sets rollout_data["advantages"]."""
    return _names(fn)[:2] == ["args", "rollout_data"]


def is_tis(fn: Callable) -> bool:
    """slime: (args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks, ...) -> (pg_loss, masks, metrics)."""
    return {"pg_loss", "train_log_probs", "rollout_log_probs", "loss_masks"} <= set(_names(fn))


class Responses:
    """Packed positions <-> the concatenation of all response tokens of the S sequences, R_total long."""

    def __init__(self, inputs):
        if inputs.position_T is None:
            raise ValueError("a slime-style hook needs inputs.position_T, length_S and prompt_length_S")
        self.mask_T, self.group = inputs.mask_T, inputs.cp_group
        lengths_S = inputs.length_S - inputs.prompt_length_S
        self.total_lengths, self.response_lengths = inputs.length_S.tolist(), lengths_S.tolist()
        start_S = torch.cumsum(lengths_S, 0) - lengths_S
        within_T = inputs.position_T + 1 - inputs.prompt_length_S[inputs.seq_T]        # the token that position predicts
        self.valid_T = (inputs.position_T >= 0) & (within_T >= 0) & (within_T < lengths_S[inputs.seq_T])
        self.slot_T = torch.where(self.valid_T, start_S[inputs.seq_T] + within_T, 0)
        self.size = sum(self.response_lengths)

    @property
    def cp_size(self) -> int:
        return 1 if self.group is None else self.group.size()

    def whole(self, x_T: torch.Tensor) -> torch.Tensor:
        """[T] -> [R_total] over all CP ranks, 0 where masked; gradient flows to this rank's own tokens."""
        x_T = torch.where(self.mask_T & self.valid_T, x_T, torch.zeros_like(x_T))
        own = x_T.new_zeros(self.size + 1).index_add(0, torch.where(self.valid_T, self.slot_T, self.size), x_T)[:-1]
        if self.cp_size == 1:
            return own
        everyone = own.detach().clone()
        dist.all_reduce(everyone, group=self.group)
        return own + (everyone - own.detach())

    def split(self, x_R: torch.Tensor) -> list[torch.Tensor]:
        return list(x_R.split(self.response_lengths))

    def local(self, x_R: torch.Tensor) -> torch.Tensor:
        """[R_total] -> [T], 0 outside the responses."""
        if self.size == 0:
            return torch.zeros_like(self.slot_T, dtype=x_R.dtype)
        return torch.where(self.valid_T, x_R[self.slot_T], torch.zeros((), dtype=x_R.dtype, device=x_R.device))

    def masks(self) -> list[torch.Tensor]:
        return self.split(self.whole(self.mask_T.float()))


def reducer(fn: Callable, args) -> Callable:
    """slime divides what its reducer returns by the tokens of the step (--calculate-per-token-loss) or by its rollouts."""

    def run(loss_T, inputs):
        per_token = bool(getattr(args, "calculate_per_token_loss", False))
        r = Responses(inputs)
        value = fn(r.total_lengths, r.response_lengths, r.masks(), per_token)(r.whole(loss_T))
        value = torch.as_tensor(value, dtype=loss_T.dtype, device=loss_T.device)
        value = value + 0 * torch.where(inputs.mask_T, loss_T, torch.zeros_like(loss_T)).sum()     # a sum over no samples is a plain 0
        value = value - value.detach() + value.detach() / r.cp_size         # every CP rank holds the whole value, its own gradient
        return value / max(inputs.counts.tokens if per_token else inputs.counts.rollouts, 1)
    return run


def tis(fn: Callable, args, where: str) -> Callable:
    def run(loss_T, inputs, config):
        r = Responses(inputs)
        out = fn(args=args, pg_loss=r.whole(loss_T), train_log_probs=r.split(r.whole(inputs.old_logp_T)),
                 rollout_log_probs=r.split(r.whole(inputs.rollout_logp_T)), loss_masks=r.masks(),
                 total_lengths=r.total_lengths, response_lengths=r.response_lengths)
        if not isinstance(out, tuple) or len(out) != 3:
            raise HookError(f"{where}: returned a {type(out).__name__}, expected (pg_loss, loss_masks, metrics)")
        loss_R, masks, metrics = out
        mask_R = torch.cat(list(masks)) if masks else loss_R.new_zeros(0)
        for name, x in (("pg_loss", loss_R), ("loss_masks", mask_R)):
            if not isinstance(x, torch.Tensor) or x.shape != (r.size,):
                raise HookError(f"{where}: {name} has shape {tuple(getattr(x, 'shape', ()))}, expected ({r.size},), the response tokens")
        return TisOutput(r.local(loss_R), r.local(mask_R.float()) > 0, {k: _metric(r, x, k, where) for k, x in metrics.items()})
    return run


def _metric(r: Responses, x, name: str, where: str):
    x = torch.as_tensor(x, dtype=torch.float32, device=r.mask_T.device).detach()
    if x.dim() == 0:
        return x, torch.ones_like(x)
    if x.shape != (r.size,):
        raise HookError(f"{where}: metric {name!r} has shape {tuple(x.shape)}, expected () or ({r.size},), the response tokens")
    counted = r.mask_T & r.valid_T
    return torch.where(counted, r.local(x), 0.0).sum(), counted.sum().float()


def advantage(fn: Callable, args, where: str) -> Callable:
    """`rewards` holds what slime's would: the group-normalised rewards of the estimators that have a group baseline."""

    def run(inputs, config):
        r = Responses(inputs)
        streams = dict(log_probs=inputs.old_logp_T, ref_log_probs=inputs.ref_logp_T, rollout_log_probs=inputs.rollout_logp_T)
        data = {name: None if x is None else r.split(r.whole(x)) for name, x in streams.items()}
        kl_T = torch.zeros_like(inputs.mask_T, dtype=torch.float32) if inputs.kl_T is None else inputs.kl_T
        data |= dict(kl=r.split(r.whole(kl_T)), loss_masks=r.masks(), values=None, total_lengths=r.total_lengths,
                     response_lengths=r.response_lengths, rewards=inputs.estimate_N[inputs.sample_S].tolist(),
                     raw_reward=inputs.reward_N[inputs.sample_S].tolist())
        fn(args, data)
        lists = data.get("advantages")
        if lists is None:
            raise HookError(f"{where}: did not set rollout_data['advantages']")
        shapes, expected = [tuple(x.shape) for x in lists], [(n,) for n in r.response_lengths]
        if shapes != expected:
            raise HookError(f"{where}: rollout_data['advantages'] has shapes {shapes}, expected {expected}, each sample's response tokens")
        return r.local(torch.cat(list(lists)).float())
    return run
