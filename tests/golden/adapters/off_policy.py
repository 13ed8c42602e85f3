"""Off-policy corrections: weights, rejection masks, OPSM, the error mask, bypass, and slime's whole policy loss."""

import math
from dataclasses import replace

import torch

from megatron_grpo.config import CorrectionConfig, KLConfig, LossConfig
from megatron_grpo.losses.renormalize import prepare_step
from tests.golden import peers
from tests.golden.adapters.ppo_clip import megatron
from tests.golden.pack import flat, loss_inputs, rows

IGNORED = {"vllm_kl": "mean(rollout - old): compared as verl's kl", "clip_mask": "AReaL takes rejected tokens out of it; see ppo_clip"}
CLAMPED = dict(log_ratio_min=-20.0, log_ratio_max=20.0)


def tolerance(case: dict, name: str) -> float:
    if peers.name(case) == "areal" or name == "reported":       # float32: AReaL's log-ratio, the KL that slime reports
        return 1e-5
    return 1e-8 if case["inputs"]["params"].get("rollout_is_batch_normalize") else 1e-9     # verl adds 1e-8 to every count of its mean


def run(case: dict, pool) -> dict:
    function, peer = case["source"].split(":")[-1], peers.name(case)
    if function == "compute_mis_weights":
        return _mis(case)
    if function == "compute_rollout_correction_and_rejection_mask":
        return _verl(case)
    if function == "compute_policy_loss_bypass_mode":
        return _verl_bypass(case)
    if function == "compute_and_apply_seq_logprob_error_masking":
        return _seq_logprob_error(case)
    if "opsm_mask" in case["outputs"] or "keep_mask" in case["outputs"]:
        return _opsm(case)
    if function == "policy_loss_function":
        return _slime_whole(case)
    if peer == "megatron":
        return megatron(case)
    return globals()[f"_{peer}"](case)


# ---- losses with a weight ------------------------------------------------------------------------------------------------


def _slime(case: dict) -> dict:
    p, mode = case["inputs"]["params"], "icepop" if "icepop" in case["source"] else "tis"
    correction = CorrectionConfig(use_tis=True, tis_mode=mode, tis_clip=p["tis_clip"], tis_clip_low=p["tis_clip_low"])
    found = peers.weights(case["inputs"], correction, LossConfig(**peers.UNCLAMPED))
    mask_T, lengths = flat(case["inputs"]["loss_mask"], torch.bool), case["inputs"]["response_lengths"]
    return peers.outputs(case, peers.slime(case), correction) | dict(
        weights=rows(found.weight_T, lengths, mask_T), tis_clipfrac=rows(found.clipped_T.double(), lengths, mask_T))


def _nemo(case: dict) -> dict:
    p = case["inputs"]["params"]
    setup, kind = peers.nemo(case), p.get("truncated_importance_sampling_type")
    correction = CorrectionConfig()
    if p.get("use_importance_sampling_correction"):
        mode = {None: "tis", "tis": "tis", "icepop": "icepop", "seq-mask-tis": "seq_mask_tis"}[kind]
        if p.get("sequence_level_importance_ratios"):
            mode = {"tis": "seq_tis", "icepop": "seq_icepop"}[mode]
        high, low = p.get("truncated_importance_sampling_ratio"), p.get("truncated_importance_sampling_ratio_min")
        correction = CorrectionConfig(use_tis=True, tis_mode=mode, tis_clip=peers.INF if high is None else high,
                                      tis_clip_low=0.0 if low is None else low)
    return peers.outputs(case, setup, correction)


def _openrlhf(case: dict) -> dict:
    p = case["inputs"]["params"]
    low, high = p["vllm_is_truncated_threshold"]
    mode = p["vllm_is_correction_type"].replace("-", "_")
    return peers.outputs(case, peers.openrlhf(case), CorrectionConfig(use_tis=True, tis_mode=mode, tis_clip=high, tis_clip_low=low))


def _areal(case: dict) -> dict:
    p = case["inputs"]["params"]["rejection_sampling"]
    low, high = p["lower"], p["upper"]
    if p["metric"] == "ratio":
        mode = "geometric" if p["level"] == "sequence" else {"mask": "icepop", "clamp": "tis"}[p["action"]]
        correction = CorrectionConfig(use_tis=True, tis_mode=mode, tis_clip=high, tis_clip_low=0.0 if low is None else low)
    else:                       # kept tokens carry their plain ratio
        level = {"max": "seq_all", "mean": "seq_mean", "sum": "seq_sum"}[p["agg"]] if p["level"] == "sequence" else "token"
        rule = f"{level}_{p['metric'].removeprefix('kl_')}={'' if low is None else low}..{high}"
        correction = CorrectionConfig(use_tis=True, tis_clip=peers.INF, rejection=(rule,))
    found = peers.weights(case["inputs"], correction, LossConfig(**peers.UNCLAMPED))
    mask_T = flat(case["inputs"]["loss_mask"], torch.bool)
    filtered = ~torch.stack([*found.masked.values(), found.clipped_T]).any(0) if p["metric"] == "ratio" else found.weight_T != 0
    got = peers.outputs(case, peers.areal(case), correction)
    del got["clip_mask"]        # rejected tokens are not in it
    return got | dict(
        behave_imp_weight=rows(found.weight_T, case["inputs"]["response_lengths"], mask_T),
        filtered_fraction=int((~filtered & mask_T).sum()) / int(mask_T.sum()))


def _trl(case: dict) -> dict:
    p = case["inputs"]["params"]
    mode = {"token_truncate": "tis", "token_mask": "icepop", "sequence_truncate": "seq_tis", "sequence_mask": "seq_icepop"}[p["mode"]]
    correction = CorrectionConfig(use_tis=True, tis_mode=mode, tis_clip=p["clip_max"], tis_clip_low=p["clip_min"] or 0.0)
    return peers.outputs(case, peers.trl(case), correction) | dict(importance_sampling_ratio=None)     # padded; seen through the loss


def _slime_whole(case: dict) -> dict:
    """The whole policy loss at once: pg, KL, entropy, correction and reducer."""
    inputs, p = case["inputs"], case["inputs"]["params"]
    loss = dict(eps_clip=p.get("eps_clip", 0.2), eps_clip_high=p.get("eps_clip_high", 0.28), eps_clip_c=p.get("eps_clip_c"),
                entropy_coef=p.get("entropy_coef", 0.0),
                reducer="token_mean" if p.get("calculate_per_token_loss") else "rollout_mean")
    loss |= {"gspo": dict(ratio="sequence"), "cispo": dict(surrogate="cispo")}.get(p.get("advantage_estimator"), {})
    kl = KLConfig(
        use_kl_loss=p.get("use_kl_loss", False), kl_loss_coef=p.get("kl_loss_coef", 0.0), kl_loss_type=p.get("kl_loss_type", "k1"),
        use_unbiased_kl=p.get("use_unbiased_kl", False), kl_gradient="pathwise", kl_input_clamp=peers.INF)
    icepop = p.get("custom_tis_function_path") == "icepop"
    correction = CorrectionConfig(
        use_tis=p.get("use_tis", False), tis_mode="icepop" if icepop else "tis", tis_clip=p.get("tis_clip", 2.0),
        tis_clip_low=p.get("tis_clip_low", 0.0), use_opsm=p.get("use_opsm", False), opsm_delta=p.get("opsm_delta", 1e-4),
        use_rollout_logprobs=p.get("use_rollout_logprobs", False))
    entropy_T = flat(inputs["entropy"]).requires_grad_()
    x = loss_inputs(inputs, tokens=1.0, rollout_tokens=inputs["rollout_mask_sums"], entropy_T=entropy_T)
    run = peers.evaluate(x, loss=LossConfig(**loss | peers.UNCLAMPED), kl=kl, correction=correction)
    grad_entropy_T = torch.zeros_like(entropy_T) if run.grad_entropy_T is None else run.grad_entropy_T
    share = int(x.mask_T.sum())         # of a count of one token: totals
    reported = dict(loss=run.metrics["loss"] * share, pg_loss=run.metrics["pg_loss"] * share)
    if "kl_loss" in case["outputs"]["reported"]:
        reported["kl_loss"] = run.metrics["kl_loss"] * share
    return dict(loss=run.loss, grad_loss=rows(run.grad_T, inputs["response_lengths"]), reported=reported,
                grad_entropy=rows(grad_entropy_T, inputs["response_lengths"]))


# ---- weights and masks alone ----------------------------------------------------------------------------------------------


def _mis(case: dict) -> dict:
    """slime's helper: the weight is compared times the mask, since ours says both with one number."""
    inputs, p = case["inputs"], case["inputs"]["params"]
    mode = {("token", "truncate"): "tis", ("token", "clip"): "tis", ("token", "mask"): "icepop", ("sequence", "truncate"): "seq_tis",
            ("sequence", "mask"): "seq_icepop", ("geometric", "mask"): "geometric"}[p["tis_level"], p["tis_mode"]]
    low = (p["tis_lower_bound"] or 1 / p["tis_upper_bound"]) if p["tis_mode"] != "truncate" else 0.0
    rejection = ()
    if p["use_rs"]:
        level = {"token": "token", "sequence": "seq_sum", "geometric": "seq_mean"}[p["rs_level"]]
        high = p["rs_upper_bound"] or p["tis_upper_bound"]
        rejection = (f"{level}_ratio={p['rs_lower_bound'] or 1 / high}..{high}",)
    correction = CorrectionConfig(
        use_tis=True, tis_mode=mode, tis_clip=p["tis_upper_bound"], tis_clip_low=low, rejection=rejection,
        rs_veto_threshold=p["rs_veto_threshold"] if p["use_rs"] else None, tis_batch_normalize=p["tis_batch_normalize"])
    weight_T = _step_weights(inputs, correction, LossConfig(**CLAMPED), every_row=True)
    return _compared(case, weight_T, "modified_masks")


def _verl(case: dict) -> dict:
    inputs, p = case["inputs"], case["inputs"]["params"]
    correction = _verl_correction(p)
    weight_T = _step_weights(inputs, correction, LossConfig(**CLAMPED))
    got = _compared(case, weight_T, "modified_mask")
    x = loss_inputs(inputs)
    x.__dict__["logp_T"] = x.old_logp_T.clone().requires_grad_()
    run = peers.evaluate(x, loss=LossConfig(reducer="token_mean", **peers.UNCLAMPED))
    shrink = float(x.mask_T.sum()) / (float(x.mask_T.sum()) + 1e-8)
    want = case["outputs"]["metrics"]
    ours = dict(kl=run.metrics["mismatch_k1"] * shrink, k3_kl=run.metrics["mismatch_k3"] * shrink)
    if "rollout_rs_masked_fraction" in want:
        kept = float(((weight_T != 0) & x.mask_T).sum())
        ours["rollout_rs_masked_fraction"] = 1 - kept / float(x.mask_T.sum())
    return got | dict(metrics=ours)


def _verl_correction(p: dict) -> CorrectionConfig:
    settings = dict(tis_batch_normalize=p.get("rollout_is_batch_normalize", False))
    if p.get("rollout_is"):
        low, _, high = str(p["rollout_is_threshold"]).rpartition("_")
        mode = ("icepop" if low else "tis") if p["rollout_is"] == "token" else ("seq_icepop" if low else "seq_tis")
        settings |= dict(use_tis=True, tis_mode=mode, tis_clip=float(high), tis_clip_low=float(low or 0.0))
    if p.get("rollout_rs"):
        names, bands = p["rollout_rs"].split(","), str(p["rollout_rs_threshold"]).split(",")
        settings["rejection"] = tuple(_verl_rule(n, b) for n, b in zip(names, bands, strict=True))
    return CorrectionConfig(**settings)


def _verl_rule(name: str, band: str) -> str:
    """verl gives the band of k1 as ratios rollout/old, a single number as its upper end; of k2 and k3 an upper bound."""
    low, _, high = band.rpartition("_")
    name = name.replace("seq_max", "seq_all")
    if name.endswith("k1"):
        return f"{name}={math.log(float(low) if low else 1 / float(high))!r}..{math.log(float(high))!r}"
    return f"{name}=..{high}"


def _step_weights(inputs: dict, correction: CorrectionConfig, loss: LossConfig, every_row: bool = False) -> torch.Tensor:
    """Weights of the whole step, normalised where asked; `every_row` counts fully masked rows in the mean."""
    if not correction.tis_batch_normalize:
        return peers.weights(inputs, correction, loss).weight_T
    x = loss_inputs(inputs)
    rows_S = torch.arange(x.num_seqs)
    config = type("Config", (), dict(correction=correction, loss=loss))
    weight_T = prepare_step([x], config, [rows_S], [rows_S], x.num_seqs, x.num_seqs)[0][0].weight_T
    if every_row and correction.tis_mode not in ("tis", "icepop"):
        weight_T = weight_T * x.num_seqs / x.counts.sequences
    return weight_T


def _compared(case: dict, weight_T: torch.Tensor, mask_name: str) -> dict:
    """Ours is one number; theirs a weight (zero or not at masked tokens) and a mask: compare the mask, and the weight where it is 1."""
    inputs, want = case["inputs"], case["outputs"]
    mask_T = flat(inputs["loss_mask"], torch.bool)
    kept_T = mask_T & (weight_T != 0)
    got = {mask_name: rows(kept_T.double(), inputs["response_lengths"])}
    if want["weights"] is None:
        return got | dict(weights=None)
    if inputs["params"].get("rollout_is") and not inputs["params"].get("rollout_rs"):     # verl's IcePop is a weight, not a mask
        got[mask_name] = inputs["loss_mask"]
        kept_T = mask_T
    return got | dict(weights=rows(weight_T, inputs["response_lengths"], kept_T))


def _verl_bypass(case: dict) -> dict:
    """old = rollout; weights and rejection compare the current policy with it, and rejected tokens leave the denominator."""
    inputs, p = case["inputs"], case["inputs"]["params"]
    correction = replace(_verl_correction(p), renormalize_masked=True)
    x = loss_inputs(inputs)
    x.__dict__["old_logp_T"] = x.logp_T.detach().clone()
    if p["loss_type"] == "reinforce":
        loss = LossConfig(surrogate="reinforce", ratio="none", reducer="token_mean", **CLAMPED)
    else:                       # no weight, only the rejection; the ratio is current / rollout
        loss = LossConfig(reducer="token_mean", eps_clip=p["clip_ratio_low"], eps_clip_high=p["clip_ratio_high"],
                          eps_clip_c=p["clip_ratio_c"], **CLAMPED)
        correction = replace(correction, use_tis=False)
    rows_S = torch.arange(x.num_seqs)
    config = type("Config", (), dict(correction=correction, loss=loss))
    x, = prepare_step([x], config, [rows_S], [rows_S], x.num_seqs, x.num_seqs)[0]
    x.__dict__["old_logp_T"] = x.rollout_logp_T
    run = peers.evaluate(x, loss=loss, correction=correction)
    total = peers.evaluate(replace(x, counts=replace(x.counts, tokens=1.0)), loss=loss, correction=correction)
    tokens = dict(grad_loss=run.grad_T, grad_masked_sum=total.grad_T, effective_mask=x.mask_T.double())
    return dict(loss=run.loss, masked_sum=total.loss, metrics={}, per_token_loss=rows(total.pg_T, inputs["response_lengths"], x.mask_T)) | {
        name: rows(value_T, inputs["response_lengths"]) for name, value_T in tokens.items()}


def _seq_logprob_error(case: dict) -> dict:
    inputs, threshold = case["inputs"], case["inputs"]["params"]["seq_logprob_error_threshold"]
    correction = CorrectionConfig(seq_logprob_error_threshold=threshold)
    x = loss_inputs(inputs)
    x.__dict__["logp_T"] = x.old_logp_T.clone().requires_grad_()
    loss = LossConfig(**peers.UNCLAMPED)
    run = peers.evaluate(x, loss=loss, correction=correction)
    keep_T = peers.weights(inputs, correction, loss).keep_T
    keep_S = [bool(torch.stack(list(k)).all()) if len(k) else True for k in keep_T.split(inputs["response_lengths"])]
    had = inputs["sample_mask"]
    masked = sum(1 for keep, one in zip(keep_S, had, strict=True) if one and not keep)
    metrics = dict(max_seq_mult_prob_error=run.maxima["seq_logprob_error_max"], mean_seq_mult_prob_error=run.metrics["seq_logprob_error"],
                   num_masked_seqs=masked)
    return dict(sample_mask=[float(keep) * one for keep, one in zip(keep_S, had, strict=True)], metrics=metrics)


def _opsm(case: dict) -> dict:
    inputs, p = case["inputs"], case["inputs"]["params"]
    trl = "off_policy_threshold" in p           # compares with the engine
    correction = CorrectionConfig(use_opsm=True, opsm_delta=p["off_policy_threshold" if trl else "opsm_delta"], use_rollout_logprobs=trl)
    masked_T = peers.weights(inputs, correction, LossConfig()).masked["opsm"]
    if trl:
        first = torch.tensor(inputs["response_lengths"]).cumsum(0) - torch.tensor(inputs["response_lengths"])
        return dict(keep_mask=[[float(not masked_T[i])] for i in first.tolist()])
    mask_T = flat(inputs["loss_mask"], torch.bool)
    return dict(opsm_mask=rows((~masked_T).double(), inputs["response_lengths"], mask_T), opsm_clipfrac=None)    # theirs: masked tokens too
