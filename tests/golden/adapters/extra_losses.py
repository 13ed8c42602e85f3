"""SAPO, GMPO, GPG, Clip-Cov, KL-Cov, DPPO, DRO and VESPO."""

import torch

from megatron_grpo.config import CorrectionConfig, LossConfig
from megatron_grpo.losses import ratios, surrogates
from megatron_grpo.losses.policy_loss import prepared
from megatron_grpo.losses.reducers import REDUCERS
from megatron_grpo.losses.sequence import sum_columns
from tests.golden import NotCovered, choose, peers
from tests.golden.pack import loss_inputs, rows

IGNORED = {"metrics": "verl counts other tokens as clipped in GMPO, KL-Cov and DPPO; compared in the other cases"}
UNREAD = {"torch_manual_seed": "the permutation that was drawn is given"}
VERL_CLAMP = dict(log_ratio_min=-20.0, log_ratio_max=20.0)


def tolerance(case: dict, name: str) -> float:
    return 1e-6 if peers.name(case) == "trl" and case["inputs"]["params"]["loss_type"] == "sapo" else 1e-9     # its temperature is float32


def run(case: dict, pool) -> dict:
    kind, inputs, p = case["source"].split(":")[-1], case["inputs"], case["inputs"]["params"]
    peer = peers.name(case)
    correction, streams = CorrectionConfig(), {}
    if peer == "verl":
        kind = kind.removeprefix("compute_policy_loss_")
        setup = peers.verl(case, clamp=VERL_CLAMP, reducer="seq-mean-token-mean" if kind in ("sapo", "geo_mean") else None)
        setup.loss |= _verl(kind, p, inputs, setup)
        if "rollout_is_weights" in inputs:
            correction, streams = peers.GIVEN_WEIGHTS, dict(rollout_logp_T=peers.rollout_of_weights(inputs))
    elif peer == "trl":
        setup = peers.trl(case)
        if p["loss_type"] not in ("sapo", "vespo"):
            raise NotCovered(f"loss_type {p['loss_type']} of TRL")
        if p["loss_type"] == "sapo":
            setup.loss |= dict(surrogate="sapo", sapo_tau_pos=p["sapo_temperature_pos"], sapo_tau_neg=p["sapo_temperature_neg"])
        else:
            setup.loss |= dict(surrogate="vespo", log_ratio_min=torch.tensor(1e-8).double().log().item(), log_ratio_max=20.0)
    elif peer == "areal" and kind == "sapo_loss_fn":
        setup = peers.areal(case)
        level = choose(dict(token="token", sequence="sequence"), p["importance_sampling_level"], "importance_sampling_level")
        setup.loss |= dict(surrogate="sapo", sapo_tau_pos=p["tau_pos"], sapo_tau_neg=p["tau_neg"], ratio=level)
    else:
        raise NotCovered(f"{kind} of {peer}")
    if "randperm_drawn" in inputs and inputs["randperm_drawn"]:
        return _seeded(case, setup)
    got = peers.outputs(case, setup, correction, **streams)
    if kind in ("geo_mean", "kl_cov", "dppo_tv", "dppo_kl"):
        got.pop("metrics")      # other notions of clipping, and mean |l| in the place of mean l
    return got


def _verl(kind: str, p: dict, inputs: dict, setup: peers.Peer) -> dict:
    extra = p.get("policy_loss") or {}
    if kind == "sapo":
        return dict(surrogate="sapo", sapo_tau_pos=p["tau_pos"], sapo_tau_neg=p["tau_neg"])
    if kind == "geo_mean":      # mean over every row, also a fully masked one; only the means inside a row divide by n + 1e-8
        setup.denominators |= dict(rollouts=len(inputs["loss_mask"]), rollout_tokens=[sum(row) for row in inputs["loss_mask"]])
        return dict(surrogate="gmpo", reducer="rollout_mean", **peers.UNCLAMPED)
    if kind == "gpg":
        return dict(surrogate="reinforce", ratio="none")
    if kind == "clip_cov":
        return dict(surrogate="clip_cov", clip_cov_ratio=extra["clip_cov_ratio"], clip_cov_low=extra["clip_cov_lb"],
                    clip_cov_high=extra["clip_cov_ub"])
    if kind == "kl_cov":
        return dict(surrogate="kl_cov", kl_cov_ratio=extra["kl_cov_ratio"], kl_cov_coef=extra["ppo_kl_coef"], **peers.UNCLAMPED)
    if kind == "dro":
        return dict(surrogate="dro", dro_beta=extra["dro_beta"])
    kinds = dict(dppo_tv="dppo_tv", dppo_kl="dppo_kl")
    return dict(surrogate=choose(kinds, kind, "policy loss of verl"), **({"dppo_ratio_max": p["clip_ratio_c"]} if "clip_ratio_c" in p else {}))


def _seeded(case: dict, setup: peers.Peer) -> dict:
    """Clip-Cov with the permutation that the peer drew: the place of a candidate in it is its key."""
    inputs = case["inputs"]
    loss = LossConfig(**setup.loss)

    def surrogate(x):
        x = prepared(x, CorrectionConfig())
        sums = sum_columns(x, surrogates.columns(x, loss))
        ratio_T = ratios.ratio(x, sums, loss)
        everything = surrogates.clip_cov(x, ratio_T, sums, LossConfig(**setup.loss | dict(clip_cov_ratio=1.0)))
        candidates = everything.bounded["cov"].nonzero().flatten()
        key_T = torch.full_like(x.logp_T, peers.INF, dtype=torch.float64)
        for place, candidate in enumerate(inputs["randperm_drawn"][0]):
            key_T[candidates[candidate]] = place
        return surrogates.clip_cov(x, ratio_T, sums, loss, key_T)

    got = {}
    for name, reducer, denominators in (("loss", loss.reducer, setup.denominators), ("masked_sum", "token_mean", dict(tokens=1.0))):
        x = loss_inputs(inputs, **denominators)
        out = surrogate(x)
        total = torch.where(x.mask_T, REDUCERS[reducer](x, loss) * out.loss_T, 0).sum()
        grad_T, = torch.autograd.grad(total, x.logp_T)
        got |= {name: total.item(), f"grad_{name}": rows(grad_T, inputs["response_lengths"])}
    clipped = int(out.bounded["cov"].sum()) / int(x.mask_T.sum())
    return got | dict(per_token_loss=rows(out.loss_T, inputs["response_lengths"], x.mask_T), metrics={"actor/pg_clipfrac": clipped})
