"""The policy loss: ratio, clip rule, correction, KL, entropy and reducer, in this order.

    L = sum_t w_t m_t [ c_t S(r_t, A_t) + k_t (beta KL_t - eta H_t) ]

m the mask, r the ratio (ratios.py), S the clip rule (surrogates.py), c the off-policy weight and k its keep mask (corrections.py),
KL the estimator (kl.py), H the entropy, w the reducer's weight (reducers.py). The sum over micro-batches, data-parallel and
context-parallel ranks is the loss of the optimizer step.
"""

from dataclasses import replace

import torch

from . import corrections, metrics, ratios, surrogates
from .inputs import LossInputs, LossOutput, Metric
from .kl import estimate, kl_loss
from .reducers import REDUCERS
from .sequence import sum_columns


def policy_loss(inputs: LossInputs, config, hooks=None) -> LossOutput:
    """Loss and metrics of one micro-batch on one rank.

    Everything is computed in the dtype of the inputs (float32 in training). What stands at positions with mask False never
    reaches the loss or its gradient; a micro-batch without a single token has loss 0, with gradient 0.

    Args:
        inputs: the micro-batch.
        config: has `.loss` (LossConfig), `.kl` (KLConfig) and `.correction` (CorrectionConfig).
        hooks: may have `.pg_loss`, `.reducer` and `.tis` (hooks/protocols.py), each replacing its part.

    Returns:
        LossOutput; see metrics.py for the names of the metrics.

    Raises:
        ValueError: the settings need a log-prob stream, or a preparation of the step, that the inputs lack.
    """
    loss_config, correction_config = config.loss, config.correction
    pg_hook, reducer_hook, tis_hook = (getattr(hooks, name, None) for name in ("pg_loss", "reducer", "tis"))
    x = prepared(inputs, correction_config)
    geometric = loss_config.surrogate == "gmpo"

    sums = sum_columns(x, (ratios.columns(x, loss_config) | surrogates.columns(x, loss_config) |
                           corrections.columns(x, correction_config, loss_config, geometric)))
    ratio_T = ratios.ratio(x, sums, loss_config)
    means: dict[str, Metric] = {}

    if pg_hook is not None:
        out = pg_hook(x, loss_config)
        pg_T, bounded = getattr(out, "loss_T", out), {}
        means |= getattr(out, "metrics", {})
    else:
        surrogate = surrogates.SURROGATES[loss_config.surrogate](x, ratio_T, sums, loss_config)
        pg_T, bounded = surrogate.loss_T, surrogate.bounded

    if tis_hook is not None:
        out = tis_hook(torch.where(x.mask_T, pg_T, 0), x, correction_config)
        pg_T = torch.where(out.mask_T, out.loss_T, 0)
        means |= out.metrics
        means["masked_tis_hook"] = metrics.token_mean((~out.mask_T).float(), x.mask_T)
        correction_config = replace(correction_config, use_tis=False)
    correction = _correction(x, sums, config, correction_config, geometric)
    pg_T = torch.where(x.mask_T & (correction.weight_T != 0), pg_T * correction.weight_T, 0)

    weight_T = torch.where(x.mask_T, REDUCERS[loss_config.reducer](x, loss_config), 0)
    share = x.mask_T.sum() / max(x.counts.tokens, 1.0)         # all micro-batches and ranks together: 1
    loss = reducer_hook(pg_T, x) if reducer_hook is not None else (weight_T * pg_T).sum()
    means["pg_loss"] = (loss.detach(), share)
    keep_T = x.mask_T & correction.keep_T
    if config.kl.use_kl_loss:
        kl_T = torch.where(keep_T, kl_loss(x.logp_T, x.old_logp_T, _reference(x), config.kl), 0)
        kl_total = (weight_T * kl_T).sum()
        loss = loss + config.kl.kl_loss_coef * kl_total
        means["kl_loss"] = (kl_total.detach(), share)
    if loss_config.entropy_coef != 0:
        if x.entropy_T is None:
            raise ValueError("--entropy-coef needs the entropy, and this batch has none")
        entropy_total = (weight_T * torch.where(keep_T, x.entropy_T, 0)).sum()
        loss = loss - loss_config.entropy_coef * entropy_total
        means["entropy_loss"] = (entropy_total.detach(), share)
    means["loss"] = (loss.detach(), share)

    with torch.no_grad():
        more, maxima = metrics.policy_metrics(x, ratio_T, bounded)
        means |= more | metrics.correction_metrics(x, correction, correction_config.use_tis)
        if "logprob_error" in sums:
            more, more_maxima = metrics.mismatch_metrics(x, sums, loss_config)
            means, maxima = means | more, maxima | more_maxima
        if x.ref_logp_T is not None:
            means["ref_kl"] = metrics.token_mean(estimate("k3", (x.logp_T - x.ref_logp_T).clamp(-20, 20)), x.mask_T)
    return LossOutput(loss, means, maxima)


def prepared(inputs: LossInputs, c) -> LossInputs:
    """Inputs with 0 wherever the mask is False, and with the engine's log-probs as the old ones under --use-rollout-logprobs."""
    def clean(x_T):
        return None if x_T is None else torch.where(inputs.mask_T, x_T, 0)

    old_T = inputs.old_logp_T
    if c.use_rollout_logprobs:
        if inputs.rollout_logp_T is None:
            raise ValueError("--use-rollout-logprobs needs the engine's log-probs, and this batch has none")
        old_T = inputs.rollout_logp_T
    return replace(
        inputs, logp_T=clean(inputs.logp_T), old_logp_T=clean(old_T), advantage_T=clean(inputs.advantage_T),
        rollout_logp_T=clean(inputs.rollout_logp_T), ref_logp_T=clean(inputs.ref_logp_T), entropy_T=clean(inputs.entropy_T))


def _correction(x: LossInputs, sums, config, c, geometric: bool) -> corrections.Correction:
    """The correction of this micro-batch, or the one that was computed for the whole step (renormalize.py)."""
    if x.weight_T is None:
        if c.renormalize_masked or c.tis_batch_normalize:
            raise ValueError("--renormalize-masked and --tis-batch-normalize need counts of the whole step: pass the micro-batches "
                             "through losses.renormalize.prepare_step first")
        return corrections.correct(x, sums, c, config.loss, geometric)
    # What left the mask is in no sum any more and must not be judged again; only OPSM waits for the current policy.
    rest = replace(c, use_tis=False)
    if c.renormalize_masked:
        rest = replace(rest, rejection=(), rs_veto_threshold=None, seq_logprob_error_threshold=None)
    out = corrections.correct(x, sums, rest, config.loss)
    out.weight_T = out.weight_T * x.weight_T
    return out


def _reference(x: LossInputs) -> torch.Tensor:
    if x.ref_logp_T is None:
        raise ValueError("--use-kl-loss needs the reference log-probs, and this batch has none")
    return x.ref_logp_T
