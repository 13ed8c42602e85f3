"""Off-policy corrections: weights, rejection masks, OPSM, the error mask, bypass, and slime's whole policy loss."""

import math
from dataclasses import replace

import torch

from megatron_grpo.config import CorrectionConfig, KLConfig, LossConfig
from megatron_grpo.losses.renormalize import prepare_step
from tests.golden import NotCovered, choose, peers
from tests.golden.adapters.ppo_clip import megatron
from tests.golden.pack import flat, loss_inputs, rows

IGNORED = {"clip_mask": "AReaL takes rejected tokens out of it; see ppo_clip"}
UNREAD = {"rewards": "of the error mask: they play no part in it"}
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
    known = dict(slime=_slime, nemo=_nemo, openrlhf=_openrlhf, areal=_areal, trl=_trl, megatron=megatron)
    return choose(known, peer, f"{function} of")(case)


# ---- losses with a weight ------------------------------------------------------------------------------------------------


def _slime(case: dict) -> dict:
    p, function = case["inputs"]["params"], case["source"].split(":")[-1]
    mode = choose(dict(vanilla_tis_function="tis", icepop_function="icepop"), function, "correction of slime")
    correction = CorrectionConfig(use_tis=True, tis_mode=mode, tis_clip=p["tis_clip"], tis_clip_low=p["tis_clip_low"])
    found = peers.weights(case["inputs"], correction, LossConfig(**peers.UNCLAMPED))
    mask_T, lengths = flat(case["inputs"]["loss_mask"], torch.bool), case["inputs"]["response_lengths"]
    return peers.outputs(case, peers.slime(case), correction) | dict(
        weights=rows(found.weight_T, lengths, mask_T), tis_clipfrac=rows(found.clipped_T.double(), lengths, mask_T))


def _nemo(case: dict) -> dict:
    return peers.outputs(case, peers.nemo(case), peers.nemo_correction(case["inputs"]["params"]))


def _openrlhf(case: dict) -> dict:
    p = case["inputs"]["params"]
    if not p["enable_vllm_is_correction"] or p.get("policy_loss_type", "ppo") != "ppo":
        raise NotCovered("only OpenRLHF's ppo loss with its correction on is weighted")
    low, high = p["vllm_is_truncated_threshold"]
    modes = {"tis": "tis", "icepop": "icepop", "seq-mask-tis": "seq_mask_tis"}
    mode = choose(modes, p["vllm_is_correction_type"], "vllm_is_correction_type")
    return peers.outputs(case, peers.openrlhf(case), CorrectionConfig(use_tis=True, tis_mode=mode, tis_clip=high, tis_clip_low=low))


def _areal(case: dict) -> dict:
    p = case["inputs"]["params"]["rejection_sampling"]
    low, high = p["lower"], p["upper"]
    kind = tuple(p[k] for k in ("level", "action", "agg"))
    if kind[0] == "token":
        kind = kind[:2]
    if p["metric"] == "ratio":
        known = {("token", "mask"): "icepop", ("token", "clamp"): "tis", ("sequence", "mask", "mean"): "geometric"}
        mode = choose(known, kind, "rejection_sampling of the ratio")
        correction = CorrectionConfig(use_tis=True, tis_mode=mode, tis_clip=high, tis_clip_low=0.0 if low is None else low)
    else:                       # kept tokens carry their plain ratio
        known = {("token", "mask"): "token"} | {("sequence", "mask", agg): f"seq_{ours}" for agg, ours in
                                                (("max", "all"), ("mean", "mean"), ("sum", "sum"))}
        level = choose(known, kind, "rejection_sampling of a KL")
        metric = choose(dict(kl_k1="k1", kl_k2="k2", kl_k3="k3"), p["metric"], "rejection_sampling.metric")
        if metric == "k1" and level == "seq_all":
            raise NotCovered("the maximum of a signed KL against a lower bound is no rule of all tokens")
        rule = f"{level}_{metric}={'' if low is None else low}..{high}"
        correction = CorrectionConfig(use_tis=True, tis_clip=peers.INF, rejection=(rule,))
    found = peers.weights(case["inputs"], correction, LossConfig(**peers.UNCLAMPED))
    mask_T = flat(case["inputs"]["loss_mask"], torch.bool)
    filtered = ~torch.stack([*found.masked.values(), found.clipped_T]).any(0) if p["metric"] == "ratio" else found.weight_T != 0
    got = peers.outputs(case, peers.areal(case), correction)
    del got["clip_mask"]        # rejected tokens are not in it
    return got | dict(
        behave_imp_weight=rows(found.weight_T, case["inputs"]["response_lengths"], mask_T),
        filtered_fraction=int((~filtered & mask_T).sum()) / max(int(mask_T.sum()), 1))


def _trl(case: dict) -> dict:
    p = case["inputs"]["params"]
    modes = {"token_truncate": "tis", "token_mask": "icepop", "sequence_truncate": "seq_tis", "sequence_mask": "seq_icepop"}
    mode = choose(modes, p["mode"], "mode")
    if p["clip_max"] is None:
        raise NotCovered("no upper bound")
    correction = CorrectionConfig(use_tis=True, tis_mode=mode, tis_clip=p["clip_max"], tis_clip_low=p["clip_min"] or 0.0)
    return peers.outputs(case, peers.trl(case), correction) | dict(importance_sampling_ratio=None)     # padded; seen through the loss


def _slime_whole(case: dict) -> dict:
    """The whole policy loss at once: pg, KL, entropy, correction and reducer."""
    inputs, p = case["inputs"], case["inputs"]["params"]
    loss = dict(eps_clip=p.get("eps_clip", 0.2), eps_clip_high=p.get("eps_clip_high", 0.28), eps_clip_c=p.get("eps_clip_c"),
                entropy_coef=p.get("entropy_coef", 0.0),
                reducer="token_mean" if p.get("calculate_per_token_loss") else "rollout_mean")
    estimators = {None: {}, "grpo": {}, "gspo": dict(ratio="sequence"), "cispo": dict(surrogate="cispo")}
    loss |= choose(estimators, p.get("advantage_estimator"), "advantage_estimator")
    kl = KLConfig(
        use_kl_loss=p.get("use_kl_loss", False), kl_loss_coef=p.get("kl_loss_coef", 0.0), kl_loss_type=p.get("kl_loss_type", "k1"),
        use_unbiased_kl=p.get("use_unbiased_kl", False), kl_gradient="pathwise", kl_input_clamp=peers.INF)
    choose({k: k for k in ("k1", "k2", "k3", "low_var_kl")}, kl.kl_loss_type, "kl_loss_type")
    icepop = choose({None: False, "icepop": True}, p.get("custom_tis_function_path"), "custom_tis_function_path")
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
    if not p["use_tis"]:
        raise NotCovered("rejection without weights")
    modes = {("token", "truncate"): "tis", ("token", "clip"): "tis", ("token", "mask"): "icepop", ("sequence", "truncate"): "seq_tis",
             ("sequence", "clip"): "seq_tis", ("sequence", "mask"): "seq_icepop", ("geometric", "mask"): "geometric"}
    mode = choose(modes, (p["tis_level"], p["tis_mode"]), "(tis_level, tis_mode)")
    low = (p["tis_lower_bound"] or 1 / p["tis_upper_bound"]) if p["tis_mode"] != "truncate" else 0.0
    rejection = ()
    if p["use_rs"]:
        level = choose({"token": "token", "sequence": "seq_sum", "geometric": "seq_mean"}, p["rs_level"], "rs_level")
        high = p["rs_upper_bound"] or p["tis_upper_bound"]
        rejection = (f"{level}_ratio={p['rs_lower_bound'] or 1 / high}..{high}",)
    p.ignore("tis_lower_bound", "rs_level", "rs_lower_bound", "rs_upper_bound", "rs_veto_threshold")    # of what is off
    correction = CorrectionConfig(
        use_tis=True, tis_mode=mode, tis_clip=p["tis_upper_bound"], tis_clip_low=low, rejection=rejection,
        rs_veto_threshold=p["rs_veto_threshold"] if p["use_rs"] else None, tis_batch_normalize=p["tis_batch_normalize"])
    weight_T = _step_weights(inputs, correction, LossConfig(**CLAMPED), every_row=True)
    return _compared(case, weight_T, weight_T != 0, "modified_masks")


def _verl(case: dict) -> dict:
    inputs, p = case["inputs"], case["inputs"]["params"]
    correction = _verl_correction(p)
    weight_T = _step_weights(inputs, correction, LossConfig(**CLAMPED))
    rejection = replace(correction, use_tis=False, tis_batch_normalize=False)       # verl's IcePop is a weight, not a mask
    kept_T = peers.weights(inputs, rejection, LossConfig(**CLAMPED)).weight_T != 0
    got = _compared(case, weight_T, kept_T, "modified_mask")
    x = loss_inputs(inputs)
    x.__dict__["logp_T"] = x.old_logp_T.clone().requires_grad_()
    run = peers.evaluate(x, loss=LossConfig(reducer="token_mean", **peers.UNCLAMPED))
    shrink = float(x.mask_T.sum()) / (float(x.mask_T.sum()) + 1e-8)
    want = case["outputs"]["metrics"]
    ours = dict(kl=run.metrics["mismatch_k1"] * shrink, k3_kl=run.metrics["mismatch_k3"] * shrink)
    if "rollout_rs_masked_fraction" in want:
        ours["rollout_rs_masked_fraction"] = int((~kept_T & x.mask_T).sum()) / max(int(x.mask_T.sum()), 1)
    return got | dict(metrics=ours)


def _verl_correction(p: dict) -> CorrectionConfig:
    settings = dict(tis_batch_normalize=p.get("rollout_is_batch_normalize", False))
    if p.get("rollout_is"):
        choose(dict(token=0, sequence=0), p["rollout_is"], "rollout_is")
        low, _, high = str(p["rollout_is_threshold"]).rpartition("_")
        mode = ("icepop" if low else "tis") if p["rollout_is"] == "token" else ("seq_icepop" if low else "seq_tis")
        settings |= dict(use_tis=True, tis_mode=mode, tis_clip=float(high), tis_clip_low=float(low or 0.0))
    if p.get("rollout_rs"):
        names, bands = p["rollout_rs"].split(","), str(p["rollout_rs_threshold"]).split(",")
        if len(names) != len(bands):
            raise NotCovered(f"{len(bands)} thresholds of {len(names)} rules")
        settings["rejection"] = tuple(_verl_rule(n, b) for n, b in zip(names, bands, strict=True))
    return CorrectionConfig(**settings)


def _verl_rule(name: str, band: str) -> str:
    """verl gives the band of k1 as ratios rollout/old, a single number as its upper end; of k2 and k3 an upper bound."""
    low, _, high = band.rpartition("_")
    known = {f"{level}_k{k}": f"{level}_k{k}" for level in ("token", "seq_sum", "seq_mean") for k in (1, 2, 3)}
    name = choose(known | dict(seq_max_k2="seq_all_k2", seq_max_k3="seq_all_k3"), name.strip(), "rollout_rs")
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


def _compared(case: dict, weight_T: torch.Tensor, kept_T: torch.Tensor, mask_name: str) -> dict:
    """Ours is one number; theirs a weight (zero or not at masked tokens) and a mask: compare the mask, and the weight where it is 1."""
    inputs, want = case["inputs"], case["outputs"]
    kept_T = flat(inputs["loss_mask"], torch.bool) & kept_T
    got = {mask_name: rows(kept_T.double(), inputs["response_lengths"])}
    if want["weights"] is None:
        return got | dict(weights=None)
    return got | dict(weights=rows(weight_T, inputs["response_lengths"], kept_T))


def _verl_bypass(case: dict) -> dict:
    """old = rollout; weights and rejection compare the current policy with it, and rejected tokens leave the denominator."""
    inputs, p = case["inputs"], case["inputs"]["params"]
    correction = replace(_verl_correction(p), renormalize_masked=True)
    if not p["bypass_mode"] or correction.tis_mode in ("icepop", "seq_icepop") or correction.tis_batch_normalize:
        raise NotCovered("IcePop's zeros stay in verl's denominator, and its normalised weights are those before rejection")
    reinforce = choose(dict(reinforce=True, ppo_clip=False), p["loss_type"], "loss_type")
    p.ignore("clip_ratio", "rollout_rs_threshold", "rollout_is_threshold", *["clip_ratio_low", "clip_ratio_high", "clip_ratio_c"] * reinforce)
    x = loss_inputs(inputs)
    x.__dict__["old_logp_T"] = x.logp_T.detach().clone()
    if reinforce:
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
