"""PPO's clip rule, dual clip, REINFORCE and the pinned ratio, under each peer's reducer."""

import torch

from megatron_grpo.config import CorrectionConfig, KLConfig, LossConfig
from megatron_grpo.losses import ratios
from megatron_grpo.losses.kl import estimate
from tests.golden import NotCovered, peers
from tests.golden.pack import loss_inputs, rows


def tolerance(case: dict, name: str) -> float:
    return 1e-5 if peers.name(case) == "miles" else 1e-9         # miles casts to float32


def run(case: dict, pool) -> dict:
    peer, inputs = peers.name(case), case["inputs"]
    if peer == "megatron":
        return megatron(case)
    if peer == "miles":
        setup = peers.slime(case)
        setup.loss |= dict(log_ratio_min=-20.0, log_ratio_max=20.0)
        return peers.outputs(case, setup)
    if peer == "verl":
        if "rollout_is_weights" in inputs:
            return peers.outputs(case, peers.verl(case, dual=True), peers.GIVEN_WEIGHTS, rollout_logp_T=peers.rollout_of_weights(inputs))
        return peers.outputs(case, peers.verl(case, dual=True))
    if peer == "trl" and inputs["params"]["loss_type"] not in ("grpo", "bnpo", "dr_grpo", "dapo"):
        raise NotCovered(f"loss_type {inputs['params']['loss_type']} of TRL has another clip rule")
    if peer == "nemo":
        return peers.outputs(case, peers.nemo(case), peers.nemo_correction(inputs["params"]))
    return peers.outputs(case, peers.setup_of(case))


def megatron(case: dict) -> dict:
    """k3 without clamps or score-function term, and p log p of the sampled token in the place of the entropy."""
    inputs, p = case["inputs"], case["inputs"]["params"]
    x = loss_inputs(inputs, tokens=1.0)
    x.__dict__["entropy_T"] = -x.logp_T.exp() * x.logp_T
    loss = LossConfig(eps_clip=p["lo"], eps_clip_high=p["hi"], reducer="token_mean", entropy_coef=p["ent"], **peers.UNCLAMPED)
    kl = KLConfig(use_kl_loss=True, kl_loss_coef=p["beta"], kl_loss_type="k3", kl_gradient="pathwise", kl_input_clamp=peers.INF)
    correction = CorrectionConfig()
    if "rollout_log_probs" in inputs:
        cap = p["is_truncation_coef"]
        correction = CorrectionConfig(use_tis=True, tis_clip=peers.INF if cap is None else cap)
    run = peers.evaluate(x, loss=loss, kl=kl, correction=correction)
    with torch.no_grad():
        kl_T = estimate("k3", x.logp_T - x.ref_logp_T)
        ratio_T = ratios.ratio(x, {}, loss)
        per_token_T = run.pg_T + p["beta"] * kl_T - p["ent"] * x.entropy_T
    got = dict(per_token_loss=per_token_T, kl_term=kl_T, ratios=ratio_T)
    return {k: rows(v, inputs["response_lengths"], x.mask_T) for k, v in got.items()} | dict(
        masked_sum=run.loss, grad_masked_sum=rows(run.grad_T, inputs["response_lengths"]))
