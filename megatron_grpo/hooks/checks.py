"""The checks around each hook: its arguments when it is loaded, what it returns at every call."""

import asyncio
import inspect
import math
from collections.abc import Callable
from typing import Any

import torch

from . import slime
from .protocols import FilterOutput, HookError, PgLossOutput, RewardOutput, TisOutput


def check_signature(fn: Callable, where: str, native: str, slime_form: str = "") -> None:
    signature = inspect.signature(fn)
    try:
        signature.bind(*native.split(", "))
    except TypeError as error:
        also = f", or slime's fn({slime_form})" if slime_form else ""
        raise HookError(f"{where}: the function takes {signature}, expected fn({native}){also}: {error}") from None


def _check_tensor(x: Any, name: str, like_T: torch.Tensor, mask_T: torch.Tensor, where: str) -> torch.Tensor:
    """A float tensor of the shape and device of `like_T`, finite where the mask is True."""
    if not isinstance(x, torch.Tensor):
        raise HookError(f"{where}: {name} is a {type(x).__name__}, expected a tensor of shape {tuple(like_T.shape)}")
    if x.shape != like_T.shape:
        raise HookError(f"{where}: {name} has shape {tuple(x.shape)}, expected {tuple(like_T.shape)}, one value for each local token")
    if x.dtype not in (torch.float32, torch.float64):
        raise HookError(f"{where}: {name} has dtype {x.dtype}, expected float32 (cast it: losses are never below float32)")
    bad = ~torch.isfinite(x.detach()) & mask_T
    if bad.any():
        raise HookError(f"{where}: {name} of shape {tuple(x.shape)} is not finite at {int(bad.sum())} of the {int(mask_T.sum())} tokens "
                        f"with mask 1; the first is position {int(bad.nonzero()[0])}")
    return x


def _check_metrics(metrics: Any, where: str) -> dict:
    for name, pair in (metrics.items() if isinstance(metrics, dict) else [("metrics", None)]):
        if not (isinstance(pair, tuple) and len(pair) == 2):
            raise HookError(f"{where}: metric {name!r} must be a pair (sum, count) over this rank's tokens")
    return metrics


def _check_number(x: Any, name: str, where: str) -> float:
    try:
        value = float(x)
    except (TypeError, ValueError):
        raise HookError(f"{where}: {name} is {x!r} of type {type(x).__name__}, expected a number") from None
    if not math.isfinite(value):
        raise HookError(f"{where}: {name} is {value}, expected a finite number")
    return value


def pg_loss(fn, where, args):
    check_signature(fn, where, "inputs, config")

    def checked(inputs, config):
        out = fn(inputs, config)
        out = out if isinstance(out, PgLossOutput) else PgLossOutput(out)
        _check_tensor(out.loss_T, "loss_T", inputs.logp_T, inputs.mask_T, where)
        if inputs.logp_T.requires_grad and not out.loss_T.requires_grad:
            raise HookError(f"{where}: loss_T has no gradient; compute it from inputs.logp_T without detaching it")
        _check_metrics(out.metrics, where)
        return out
    return checked


def reducer(fn, where, args):
    if slime.is_reducer(fn):
        fn = slime.reducer(fn, args)
    else:
        check_signature(fn, where, "loss_T, inputs", "total_lengths, response_lengths, loss_masks, calculate_per_token_loss")

    def checked(loss_T, inputs):
        out = fn(loss_T, inputs)
        if not isinstance(out, torch.Tensor) or out.dim() != 0:
            got = tuple(out.shape) if isinstance(out, torch.Tensor) else type(out).__name__
            raise HookError(f"{where}: returned {got} for loss_T of shape {tuple(loss_T.shape)}, expected a scalar tensor of shape ()")
        if not torch.isfinite(out.detach()):
            raise HookError(f"{where}: returned {out.item()} for loss_T of shape {tuple(loss_T.shape)}, expected a finite number")
        if loss_T.requires_grad and not out.requires_grad:
            raise HookError(f"{where}: the result has no gradient; compute it from loss_T without detaching it")
        return out
    return checked


def tis(fn, where, args):
    if slime.is_tis(fn):
        fn = slime.tis(fn, args, where)
    else:
        check_signature(fn, where, "loss_T, inputs, config", "args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks, **kwargs")

    def checked(loss_T, inputs, config):
        out = fn(loss_T, inputs, config)
        if not isinstance(out, TisOutput):
            raise HookError(f"{where}: returned a {type(out).__name__}, expected a TisOutput(loss_T, mask_T, metrics)")
        if not isinstance(out.mask_T, torch.Tensor) or out.mask_T.shape != inputs.mask_T.shape or out.mask_T.dtype != torch.bool:
            raise HookError(f"{where}: mask_T is {_describe(out.mask_T)}, expected bool of shape {tuple(inputs.mask_T.shape)}")
        out.mask_T = out.mask_T & inputs.mask_T
        _check_tensor(out.loss_T, "loss_T", loss_T, out.mask_T, where)
        _check_metrics(out.metrics, where)
        return out
    return checked


def advantage(fn, where, args):
    if slime.is_advantage(fn):
        fn = slime.advantage(fn, args, where)
    else:
        check_signature(fn, where, "inputs, config", "args, rollout_data")

    def checked(inputs, config):
        return _check_tensor(fn(inputs, config), "advantage_T", inputs.seq_T, inputs.mask_T, where)
    return checked


class RewardModelHook:
    def __init__(self, fn, where, args):
        names = list(inspect.signature(fn).parameters)
        self.group = len(names) > 1 and names[1] == "samples"
        check_signature(fn, where, "args, samples" if self.group else "args, sample")
        self.fn, self.where, self.args = fn, where, args

    async def __call__(self, sample):
        if inspect.iscoroutinefunction(self.fn):
            out = await self.fn(self.args, sample)
        else:
            out = await asyncio.to_thread(self.fn, self.args, sample)
            out = await out if inspect.isawaitable(out) else out
        if not self.group:
            return self._named(out)
        if not isinstance(out, (list, tuple)) or len(out) != len(sample):
            raise HookError(f"{self.where}: returned {_describe(out)} for {len(sample)} samples, expected a list of {len(sample)}")
        return [self._named(x) for x in out]

    def _named(self, out) -> dict[str, float]:
        named = out if isinstance(out, dict) else {"reward": out}
        if not named:
            raise HookError(f"{self.where}: returned an empty dict, expected at least one named reward")
        return {str(k): _check_number(v, f"reward {k!r}", self.where) for k, v in named.items()}


def reward_post_process(fn, where, args):
    check_signature(fn, where, "args, samples")

    def checked(samples):
        out = fn(args, samples)
        if isinstance(out, tuple) and len(out) == 2:        # slime: (raw rewards, rewards that are advantages)
            out = RewardOutput(out[1], is_advantage=True)
        elif not isinstance(out, RewardOutput):
            out = RewardOutput(out)
        rewards = out.reward.flatten().tolist() if hasattr(out.reward, "flatten") else out.reward
        if not isinstance(rewards, (list, tuple)) or len(rewards) != len(samples):
            raise HookError(f"{where}: reward is {_describe(out.reward)}, expected {len(samples)} numbers, one for each sample")
        return RewardOutput([_check_number(r, f"reward of sample {s.sample_id}", where) for r, s in zip(rewards, samples, strict=True)],
                            out.is_advantage)
    return checked


def sampling_filter(fn, where, args):
    check_signature(fn, where, "args, samples")

    def checked(samples):
        out = fn(args, samples)
        if hasattr(out, "keep"):
            return FilterOutput(bool(out.keep), getattr(out, "reason", None), bool(getattr(out, "keep_when_insufficient", False)))
        if out is None or getattr(out, "shape", ()) not in ((), (1,)):
            raise HookError(f"{where}: returned {_describe(out)} for {len(samples)} samples, expected a FilterOutput or a bool")
        return FilterOutput(bool(out))
    return checked


def rollout(fn, where, args):
    check_signature(fn, where, "args, episode")
    if not inspect.iscoroutinefunction(fn):
        raise HookError(f"{where}: write it as `async def {getattr(fn, '__name__', 'fn')}(args, episode)` and await episode.generate(...)")

    async def checked(episode):
        if await fn(args, episode) is not None:
            raise HookError(f"{where}: returned a value, expected None; append tokens to the episode instead")
    return checked


def _describe(x: Any) -> str:
    if hasattr(x, "shape"):
        return f"{getattr(x, 'dtype', type(x).__name__)} of shape {tuple(x.shape)}"
    return f"a {type(x).__name__} of length {len(x)}" if hasattr(x, "__len__") else f"a {type(x).__name__}"
