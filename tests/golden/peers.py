"""What several families share: run our loss, and say each peer's settings and denominators in our words."""

from dataclasses import dataclass
from types import SimpleNamespace

import torch

from megatron_grpo.config import CorrectionConfig, KLConfig, LossConfig
from megatron_grpo.losses import corrections, ratios, surrogates
from megatron_grpo.losses.policy_loss import policy_loss, prepared
from megatron_grpo.losses.sequence import sum_columns
from tests.golden import NotCovered, choose
from tests.golden.pack import flat, loss_inputs, rows

INF = float("inf")
UNCLAMPED = dict(log_ratio_min=-INF, log_ratio_max=INF)
VERL_REDUCERS = {"token-mean": "token_mean", "token-sum": "token_mean", "seq-mean-token-sum": "seq_mean_token_sum",
                 "seq-mean-token-sum-norm": "seq_mean_token_sum_norm", "seq-mean-token-mean": "seq_mean_token_mean"}


@dataclass
class Run:
    """Our loss, its gradients to log-probs and entropy, the policy loss of each token after correction, metrics and maxima."""

    loss: float
    grad_T: torch.Tensor
    pg_T: torch.Tensor
    metrics: dict
    maxima: dict
    grad_entropy_T: torch.Tensor | None = None


def evaluate(x, *, loss: LossConfig, kl: KLConfig = KLConfig(), correction: CorrectionConfig = CorrectionConfig()) -> Run:
    """Forward and backward of policy_loss; means of the metrics."""
    seen = {}

    def reducer(pg_T, x):       # the built-in one, looked into
        seen["pg_T"] = pg_T.detach()
        weight_T = torch.where(x.mask_T, surrogate_reducer(loss)(x, loss), 0)
        return (weight_T * pg_T).sum()

    leaves = [x.logp_T] + ([x.entropy_T] if x.entropy_T is not None and x.entropy_T.requires_grad else [])
    out = policy_loss(x, SimpleNamespace(loss=loss, kl=kl, correction=correction), SimpleNamespace(reducer=reducer))
    grads = torch.autograd.grad(out.loss, leaves, allow_unused=True)
    means = {k: float(s) / float(n) if n else float("nan") for k, (s, n) in out.metrics.items()}
    return Run(out.loss.item(), grads[0], seen["pg_T"], means, {k: float(v) for k, v in out.maxima.items()},
               None if len(grads) < 2 or grads[1] is None else grads[1])


def surrogate_reducer(loss: LossConfig):
    from megatron_grpo.losses.reducers import REDUCERS
    return REDUCERS[loss.reducer]


def bounded(x, loss: LossConfig) -> dict[str, torch.Tensor]:
    """The clip rule alone: which tokens it bounds."""
    x = prepared(x, CorrectionConfig())
    sums = sum_columns(x, ratios.columns(x, loss) | surrogates.columns(x, loss))
    return surrogates.SURROGATES[loss.surrogate](x, ratios.ratio(x, sums, loss), sums, loss).bounded


def ratio(x, loss: LossConfig) -> torch.Tensor:
    """The ratio alone."""
    x = prepared(x, CorrectionConfig())
    return ratios.ratio(x, sum_columns(x, ratios.columns(x, loss)), loss).detach()


def weights(inputs: dict, correction: CorrectionConfig, loss: LossConfig, **streams) -> corrections.Correction:
    """The correction alone."""
    x = prepared(loss_inputs(inputs, **streams), correction)
    sums = sum_columns(x, corrections.columns(x, correction, loss))
    return corrections.correct(x, sums, correction, loss)


@dataclass
class Peer:
    """A peer's settings in our words: LossConfig fields, and the denominators and streams of loss_inputs."""

    loss: dict
    denominators: dict


def outputs(case: dict, peer: Peer, correction: CorrectionConfig = CorrectionConfig(), kl: KLConfig = KLConfig(), **streams) -> dict:
    """The outputs that most cases have: loss and gradient, the token sum and its gradient, the token losses and clip flags."""
    inputs, want = case["inputs"], case["outputs"]
    lengths = inputs["response_lengths"]
    got = {}
    x = loss_inputs(inputs, tokens=1.0, seq_tokens=peer.denominators.get("seq_tokens"), **streams)
    loss = LossConfig(**peer.loss | dict(reducer="token_mean"))
    total = evaluate(x, loss=loss, correction=correction)
    got |= dict(masked_sum=total.loss, grad_masked_sum=rows(total.grad_T, lengths))
    got |= {name: rows(total.pg_T, lengths, x.mask_T) for name in ("per_token_loss", "per_token_actor_loss")}
    flags, never_T = bounded(x, loss), torch.zeros_like(x.mask_T)
    clipped_T = flags.get("low", never_T) | flags.get("high", never_T)
    got |= dict(clipfrac=rows(clipped_T.double(), lengths, x.mask_T), clip_mask=rows(clipped_T, lengths, x.mask_T),
                dual_clip_mask=rows(flags.get("dual", never_T), lengths, x.mask_T))
    got |= dict(clip_ratio=int((clipped_T & x.mask_T).sum()) / max(int(x.mask_T.sum()), 1), ppo_kl=total.metrics["ppo_kl"],
                vllm_kl=total.metrics.get("mismatch_k1"))
    if "sum_of_sample_mean" in want:
        run = evaluate(loss_inputs(inputs, sequences=1.0, **streams), loss=LossConfig(**peer.loss | dict(reducer="seq_mean_token_mean")),
                       correction=correction)
        got |= dict(sum_of_sample_mean=run.loss, grad_sum_of_sample_mean=rows(run.grad_T, lengths))
    if "loss" in want:
        x = loss_inputs(inputs, **peer.denominators, **streams)
        run = evaluate(x, loss=LossConfig(**peer.loss), kl=kl, correction=correction)
        got |= dict(loss=run.loss, grad_loss=rows(run.grad_T, lengths), metrics=peer_metrics(case, x, run, LossConfig(**peer.loss)))
    return {name: value for name, value in got.items() if name in want}


def peer_metrics(case: dict, x, run: Run, loss: LossConfig) -> dict:
    """Those of the peer's metrics that ours say too."""
    want, tokens = case["outputs"].get("metrics", {}), float(x.mask_T.sum())
    low, high, dual, cov = (run.metrics.get(f"clip_frac_{name}", 0.0) for name in ("low", "high", "dual", "cov"))
    shrink = tokens / (tokens + 1e-8)           # verl's masked mean
    ours = {"actor/ppo_kl": run.metrics["ppo_kl"] * shrink, "actor/pg_clipfrac_lower": dual * shrink,
            "actor/pg_clipfrac": cov if loss.surrogate == "clip_cov" else (low + high) * shrink}
    if case["inputs"]["params"].get("level") != "sequence":       # TRL's are shares of sequences then
        ours |= {"clip_ratio/low_mean": low, "clip_ratio/high_mean": high, "clip_ratio/region_mean": low + high}
    return {name: value for name, value in ours.items() if name in want}


# ---- the peers ---------------------------------------------------------------------------------------------------------


def slime(case: dict) -> Peer:
    p = case["inputs"]["params"]
    clip = {k: p[k] for k in ("eps_clip", "eps_clip_high", "eps_clip_c") if k in p}
    return Peer(clip | UNCLAMPED, {})


def verl(case: dict, reducer: str | None = None, dual: bool = False, clamp: dict | None = None) -> Peer:
    """Local denominators, or global ones times dp_size; rows are divided by (n + 1e-8)."""
    inputs, p = case["inputs"], case["inputs"]["params"]
    info, mode = p.get("global_batch_info") or {}, p.get("loss_agg_mode")
    mode = reducer or mode      # `reducer`: the function has its own, whatever the mode
    tokens = [float(sum(row)) for row in inputs["loss_mask"]]
    dp = info.get("dp_size", 1)
    loss = dict(reducer=choose(VERL_REDUCERS, mode, "loss_agg_mode"), eps_clip=p.get("clip_ratio_low", p["clip_ratio"]),
                eps_clip_high=p.get("clip_ratio_high", p["clip_ratio"]))
    scale, width = info.get("loss_scale_factor"), p.get("padded_width")
    if mode == "seq-mean-token-sum-norm":
        loss["loss_norm_length"] = scale or width
        if loss["loss_norm_length"] is None:
            raise NotCovered("seq-mean-token-sum-norm divides by loss_scale_factor or padded_width, and the case gives neither")
    if dual:
        loss["eps_clip_c"] = p["clip_ratio_c"]
    counted, sequences = info.get("batch_num_tokens"), info.get("global_batch_size")
    return Peer(loss | (clamp or {}), dict(
        tokens=(1 if mode == "token-sum" else counted or sum(tokens)) / dp,
        sequences=(sequences or sum(n > 0 for n in tokens)) / dp, seq_tokens=[n + 1e-8 for n in tokens]))


def nemo(case: dict) -> Peer:
    """Global denominators + 1e-8."""
    inputs, p = case["inputs"], case["inputs"]["params"]
    loss = dict(eps_clip=p.get("ratio_clip_min", 0.2), eps_clip_high=p.get("ratio_clip_max", 0.2), eps_clip_c=p.get("ratio_clip_c"),
                reducer="token_mean" if p.get("token_level_loss", True) else "seq_mean_token_mean")
    if p.get("use_cispo"):
        loss["surrogate"] = "cispo"
    if p.get("disable_ppo_ratio"):
        loss |= dict(surrogate="reinforce", ratio="none")
    if p.get("force_on_policy_ratio"):
        loss["ratio"] = "on_policy"
    if p.get("sequence_level_importance_ratios"):
        loss["ratio"] = "sequence"
    if p.get("positive_example_nll_weight"):
        raise NotCovered("VAPO's NLL term on samples with a positive reward is not a part of this loss")
    tokens, sequences = inputs["global_valid_toks"] + 1e-8, inputs["global_valid_seqs"] + 1e-8
    if "rollout_log_probs" in inputs and loss.get("ratio") == "on_policy":
        inputs.ignore("old_log_probs")
    return Peer(loss | UNCLAMPED, dict(
        tokens=tokens, sequences=sequences, seq_tokens=[sum(row) + 1e-8 for row in inputs["loss_mask"]]))


def nemo_correction(p: dict) -> CorrectionConfig:
    """Weights old/rollout: of a token, or the product over the sequence with sequence-level ratios."""
    on, kind = p.get("use_importance_sampling_correction"), p.get("truncated_importance_sampling_type")
    high, low = p.get("truncated_importance_sampling_ratio"), p.get("truncated_importance_sampling_ratio_min")
    if not on:
        return CorrectionConfig()
    modes = {None: "tis", "tis": "tis", "icepop": "icepop", "seq-mask-tis": "seq_mask_tis"}
    if p.get("sequence_level_importance_ratios"):
        modes = {None: "seq_tis", "tis": "seq_tis", "icepop": "seq_icepop"}
    return CorrectionConfig(use_tis=True, tis_mode=choose(modes, kind, "truncated_importance_sampling_type of this ratio"),
                            tis_clip=INF if high is None else high, tis_clip_low=0.0 if low is None else low)


def openrlhf(case: dict) -> Peer:
    p = case["inputs"]["params"]
    loss = dict(eps_clip=p["clip_eps_low"], eps_clip_high=p["clip_eps_high"], eps_clip_c=p.get("dual_clip"), reducer="token_mean")
    return Peer(loss, {})


def areal(case: dict) -> Peer:
    p = case["inputs"]["params"]
    return Peer(dict(eps_clip=p.get("eps_clip", 0.2), eps_clip_high=p.get("eps_clip_higher"), eps_clip_c=p.get("c_clip"),
                     reducer="token_mean") | UNCLAMPED, {})


def trl(case: dict) -> Peer:
    """loss_type names the normaliser; means over sequences count every row, also a fully masked one."""
    inputs, p = case["inputs"], case["inputs"]["params"]
    kind, tokens = p["loss_type"], [float(sum(row)) for row in inputs["loss_mask"]]
    steps, low, high, delta = p.get("grad_acc", 1), p.get("eps_low", 1.0), p.get("eps_high"), p.get("delta")
    inputs.ignore("num_items_in_batch", "max_completion_length")        # each is read by the normaliser that divides by it
    p.ignore("num_items", "max_completion_length")                      # the same numbers again
    if delta is not None and delta < 1 + (low if high is None else high):
        raise NotCovered("delta below 1 + eps_high also lowers the ratio of a positive advantage; dual clip never does")
    loss = dict(eps_clip=low, eps_clip_high=high, eps_clip_c=delta) | UNCLAMPED
    by_row = dict(sequences=len(tokens) * steps)
    if kind == "dr_grpo":
        return Peer(loss | dict(reducer="seq_mean_token_sum_norm", loss_norm_length=inputs["max_completion_length"]), by_row)
    if kind in ("dapo", "cispo", "vespo"):
        return Peer(loss | dict(reducer="token_mean"), dict(tokens=inputs["num_items_in_batch"]))
    if kind == "bnpo":
        return Peer(loss | dict(reducer="token_mean"), dict(tokens=sum(tokens) * steps))
    by_sequence = dict(grpo="seq_mean_token_mean", sapo="seq_mean_token_mean", luspo="seq_mean_token_sum")
    return Peer(loss | dict(reducer=choose(by_sequence, kind, "loss_type")), by_row)


PEERS = {"THUDM": "slime", "radixark": "miles", "verl-project": "verl", "NVIDIA-NeMo": "nemo", "OpenRLHF": "openrlhf",
         "inclusionAI": "areal", "huggingface": "trl", "NVIDIA": "megatron"}


def name(case: dict) -> str:
    return choose(PEERS, case["source"].split("/")[0], "source")


def setup_of(case: dict) -> Peer:
    """The settings of the case's peer, for the functions that take its policy loss."""
    known = dict(slime=slime, verl=verl, nemo=nemo, openrlhf=openrlhf, areal=areal, trl=trl)
    return choose(known, name(case), "a policy loss of")(case)


def rollout_of_weights(inputs: dict) -> torch.Tensor:
    """Rollout log-probs whose ratio old/rollout is the given weight."""
    return flat(inputs["old_log_probs"]) - flat(inputs["rollout_is_weights"]).log()


GIVEN_WEIGHTS = CorrectionConfig(use_tis=True, tis_clip=INF)
