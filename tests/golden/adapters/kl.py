"""KL estimators, their clamps and gradients, alone and inside the loss."""

import torch

from megatron_grpo.config import KLConfig, LossConfig
from megatron_grpo.losses.kl import kl_loss
from tests.golden import NotCovered, choose, peers
from tests.golden.pack import flat, loss_inputs, rows

IGNORED = {"kl_dtype": "the peer's; here the dtype of the inputs is kept", "metrics": "of NeMo-RL and TRL; the KL is compared as the loss"}
KINDS = {k: k for k in ("k1", "k2", "k3", "low_var_kl", "abs")}
FLOAT32 = ("slime", "miles", "openrlhf", "areal")           # peers that compute in float32


def tolerance(case: dict, name: str) -> float:
    p = case["inputs"]["params"]
    if "grad" in name and (p.get("importance_ratio") or p.get("bias_kl")):      # their terms cancel, in float64 too: ours is exact
        return 1e-7
    return 1e-5 if peers.name(case) in FLOAT32 and not name.endswith("_f64") else 1e-9


def run(case: dict, pool) -> dict:
    peer, inputs, p, want = peers.name(case), case["inputs"], case["inputs"]["params"], case["outputs"]
    if "loss" in want:
        return _in_loss(case, peer, p)
    config = KLConfig(**_settings(peer, p))
    got = {}
    for suffix, dtype in (("", torch.float32 if want.get("kl_dtype") == "torch.float32" else torch.float64), ("_f64", torch.float64)):
        if f"kl{suffix}" not in want:
            continue
        logp_T = flat(inputs["log_probs"]).requires_grad_()
        old = inputs.get("old_log_probs", inputs.get("rollout_log_probs"))
        old_T = logp_T.detach() if old is None else flat(old)
        kl_T = kl_loss(logp_T.to(dtype), old_T.to(dtype), flat(inputs["ref_log_probs"]).to(dtype), config)
        mask_T = flat(inputs["loss_mask"], torch.bool)
        total = torch.where(mask_T, kl_T, 0).double().sum()
        grad_T, = torch.autograd.grad(total, logp_T)
        got |= {f"kl{suffix}": rows(kl_T, inputs["response_lengths"], mask_T), f"masked_sum{suffix}": total.item(),
                f"grad_masked_sum{suffix}": rows(grad_T, inputs["response_lengths"])}
    if p.get("importance_ratio"):       # terms that cancel, rounded to float32 first: noise; compared in float64
        got["grad_masked_sum"] = None
    return got


def _settings(peer: str, p: dict) -> dict:
    off = dict(kl_input_clamp=peers.INF, kl_gradient="pathwise")
    if peer in ("slime", "miles"):      # no clamp of the log-ratio; miles has one in low_var_kl
        clamp = dict(kl_input_clamp=20.0) if peer == "miles" and p["kl_loss_type"] == "low_var_kl" else {}
        kind = choose(KINDS, p["kl_loss_type"], "kl_loss_type")
        return off | dict(kl_loss_type=kind, use_unbiased_kl=p["importance_ratio"]) | clamp
    if peer == "nemo":
        bounds = dict(kl_input_clamp=_given(p["input_clamp_value"]), kl_output_clamp=_given(p["output_clamp_value"]))
        weight = {"score": dict(kl_gradient="score_function"), "on_policy": dict(use_unbiased_kl=True), None: dict(kl_gradient="pathwise")}
        return dict(kl_loss_type=choose(KINDS, p["kl_type"], "kl_type")) | bounds | choose(weight, p["weights"], "weights")
    if peer == "verl":
        kind = p["kl_penalty"]
        ours = choose(KINDS | {"kl": "k1", "mse": "k2", "k3": "low_var_kl"}, kind.removesuffix("+"), "kl_penalty")
        return dict(kl_loss_type=ours, kl_gradient="straight_through" if kind.endswith("+") else "pathwise",
                    kl_input_clamp=20.0 if ours == "low_var_kl" else peers.INF)
    if peer not in ("openrlhf", "areal"):
        raise NotCovered(f"no KL of {peer} is known")
    return off | dict(kl_loss_type=choose(KINDS, p["kl_estimator"], "kl_estimator"), kl_output_clamp=10.0)


def _given(x):
    return peers.INF if x is None else x


def _in_loss(case: dict, peer: str, p: dict) -> dict:
    if peer not in ("nemo", "trl"):
        raise NotCovered(f"the KL in the loss of {peer} is not known")
    setup = peers.setup_of(case)
    if peer == "nemo":
        kind = choose(KINDS, p["reference_policy_kl_type"], "reference_policy_kl_type")
        kl = dict(kl_loss_coef=p["reference_policy_kl_penalty"], kl_loss_type=kind, kl_output_clamp=10.0,
                  use_unbiased_kl=p["use_on_policy_kl_approximation"])
    else:
        kl = dict(kl_loss_coef=p["beta"], kl_loss_type="k3", kl_input_clamp=peers.INF, use_unbiased_kl=p["bias_kl"], kl_gradient="pathwise")
    x = loss_inputs(case["inputs"], **setup.denominators)
    if peer == "nemo" and p["use_on_policy_kl_approximation"]:      # the policy that sampled is the engine's
        x.__dict__["old_logp_T"] = x.rollout_logp_T
    run = peers.evaluate(x, loss=LossConfig(**setup.loss), kl=KLConfig(use_kl_loss=True, **kl))
    return dict(loss=run.loss, grad_loss=rows(run.grad_T, case["inputs"]["response_lengths"]))
