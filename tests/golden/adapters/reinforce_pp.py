"""REINFORCE++: returns of the reward less the token KL, and their whitening."""

import torch

from megatron_grpo.advantages.returns import discounted_returns
from tests.golden import NotCovered
from tests.golden.adapters.group_advantages import IGNORED, advantages
from tests.golden.pack import flat, rows
from tests.golden.peers import name

__all__ = ["IGNORED"]
UNREAD = {"token_level_rewards": "verl's rewards less the KL; made from these here"}


def tolerance(case: dict, output: str) -> float:
    """1e-9 for returns in float64; slime whitens with float32 statistics, verl divides its mean by n + 1e-8."""
    return 1e-5 if name(case) in ("openrlhf", "nemo") else 1e-9 if output == "returns" else 1e-6 if output == "whitened" else 1e-8


def run(case: dict, pool) -> dict:
    inputs, p, peer = case["inputs"], case["inputs"]["params"], name(case)
    if "error" in case["outputs"]:
        raise NotCovered("the peer aborts on a fully masked sequence; ours gives it 0")
    if p.get("cp_size", 1) != 1:
        raise NotCovered("returns over context-parallel ranks are tested in tests/advantages")
    if peer == "nemo":
        if p["minus_baseline"] or p.get("use_kl_in_reward"):
            raise NotCovered("see the family group_advantages")
        return dict(advantages=advantages(case, advantage_estimator="reinforce", normalize_advantages=True, whiten_std="population"))
    if peer == "miles":
        return dict(returns=_with_kl_of_tool_tokens(inputs, p))
    if peer not in ("slime", "verl", "openrlhf"):
        raise NotCovered(f"no REINFORCE++ of {peer} is known")
    settings = dict(advantage_estimator="reinforce_plus_plus", gamma=p["gamma"], kl_coef=p.get("kl_coef", 0.0), kl=inputs.get("kl"))
    if peer != "verl":
        settings["gamma_tool_tokens"] = True
    out = dict(returns=advantages(case, **settings))
    whitened = advantages(case, normalize_advantages=True, whiten_std="population" if peer == "openrlhf" else "sample", **settings)
    key = "whitened" if peer == "slime" else "advantages"
    return out | ({key: whitened} if key in case["outputs"] else {})


def _with_kl_of_tool_tokens(inputs, p):
    """miles counts the KL of tokens that the policy did not choose; ours does not, but its returns take any token reward."""
    mask_T, lengths = flat(inputs["loss_mask"], torch.bool), inputs["response_lengths"]
    seq_T = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    r_T = -p["kl_coef"] * flat(inputs["kl"])
    for s, reward in enumerate(inputs["rewards"]):
        if not (mask_T & (seq_T == s)).any():
            raise NotCovered("the peer has no token to give the reward of a fully masked sequence; ours gives it 0")
        r_T[(mask_T & (seq_T == s)).nonzero()[-1]] += reward
    return rows(discounted_returns(r_T, torch.ones_like(mask_T), seq_T, len(lengths), p["gamma"]), lengths)
