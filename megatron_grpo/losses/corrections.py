"""Off-policy correction: the engine that sampled (mu) is not the trainer that the gradient is for (pi_old).

r = pi_old / mu of a token. A correction is a detached weight per token: it multiplies the policy loss, after the clip rule and
before the reducer; 0 takes the token out of the numerator. Denominators stay those of the step, unless renormalize.py prepares
the step with others. KL and entropy are not weighted; --seq-logprob-error-threshold drops a sequence from these too.

    --tis-mode     weight of a token, [lo, hi] = [--tis-clip-low, --tis-clip], both ends closed
    tis            clip(r, lo, hi)                                    TIS (Yao et al. 2025)
    icepop         r in [lo, hi], else 0                              IcePop (Ant Ling 2025)
    seq_tis        clip(prod r, lo, hi) of the sequence
    seq_icepop     prod r of the sequence in [lo, hi], else 0
    seq_mask_tis   r if the geometric mean of r is in [lo, hi], else 0   (NeMo-RL)
    geometric      the geometric mean of r if in [lo, hi], else 0

log r of a token, and the sum or mean of log r over a sequence, are clamped to [--log-ratio-min, --log-ratio-max] each for itself: the sum
is that of the unclamped values. A token whose r is not a finite number (the engine gave -inf or NaN) has weight 0, and no part in a sum.
"""

from dataclasses import dataclass, field

import torch

from ..config import CorrectionConfig, LossConfig
from .inputs import LossInputs
from .kl import estimate
from .sequence import Columns, mean_per_token

LEVELS = ("token", "seq_sum", "seq_mean", "seq_all")
METRICS = ("ratio", "k1", "k2", "k3")
TOKEN_MODES = ("tis", "icepop")


@dataclass(frozen=True)
class Rule:
    """A rejection rule: what is outside [low, high] has weight 0. Both ends are closed.

    Metrics of l = log r: ratio = exp(l), k1 = -l, k2 = l^2 / 2, k3 = exp(l) - 1 - l. Levels: each token by itself; the sequence by
    the sum or mean over its tokens (of l for ratio, so seq_mean_ratio is the geometric mean); the sequence if all its tokens pass.
    """

    level: str
    metric: str
    low: float
    high: float

    @property
    def name(self) -> str:
        return f"{self.level}_{self.metric}"

    @staticmethod
    def parse(text: str) -> "Rule":
        """`seq_mean_ratio=0.99..1.01`, `token_k3=..0.3` -> Rule.

        Raises:
            ValueError: says which part is not understood.
        """
        name, _, band = text.partition("=")
        level, _, metric = name.rpartition("_")
        low, dots, high = band.partition("..")
        try:
            if level not in LEVELS or metric not in METRICS or not dots:
                raise ValueError
            rule = Rule(level, metric, float(low or "-inf"), float(high or "inf"))
        except ValueError:
            raise ValueError(f"--rejection {text}: write LEVEL_METRIC=LOW..HIGH with a level of {', '.join(LEVELS)} and a metric of "
                             f"{', '.join(METRICS)}, for example seq_mean_ratio=0.99..1.01") from None
        if not rule.low < rule.high:
            raise ValueError(f"--rejection {text}: the lower bound must be below the upper one")
        return rule


@dataclass
class Correction:
    """What a correction says of each token.

    Attributes:
        weight_T: [T] detached factor of the policy loss.
        keep_T: [T] bool, False where also KL and entropy are dropped.
        masked: rule -> [T] bool, the tokens that it takes out; for the metrics.
        clipped_T: [T] bool, the tokens whose weight was clipped.
    """

    weight_T: torch.Tensor
    keep_T: torch.Tensor
    masked: dict[str, torch.Tensor] = field(default_factory=dict)
    clipped_T: torch.Tensor | None = None


def rules(c: CorrectionConfig) -> list[Rule]:
    """The rejection rules of --rejection and --rs-veto-threshold."""
    veto = [] if c.rs_veto_threshold is None else [Rule("seq_all", "ratio", c.rs_veto_threshold, torch.inf)]
    return [Rule.parse(text) for text in c.rejection] + veto


def needs_rollout(c: CorrectionConfig) -> bool:
    """Whether any rule compares with the log-probs of the engine."""
    return c.use_tis or bool(rules(c)) or c.seq_logprob_error_threshold is not None


def log_mismatch(x: LossInputs, guard: LossConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """(log r, clamped to [--log-ratio-min, --log-ratio-max] and 0 where r is not a finite number; bool where it is one). [T], [T]"""
    assert x.rollout_logp_T is not None
    difference_T = x.old_logp_T - x.rollout_logp_T
    log_r_T = _clamp(difference_T, guard)
    finite_T = difference_T.isfinite() & log_r_T.exp().isfinite()
    return torch.where(finite_T, log_r_T, 0), finite_T


def _unclamped(x: LossInputs, finite_T: torch.Tensor) -> torch.Tensor:
    """[T] log r, 0 where it is not a finite number: what the ratio of a sequence is the sum or mean of."""
    assert x.rollout_logp_T is not None
    return torch.where(finite_T, x.old_logp_T - x.rollout_logp_T, 0)


def columns(x: LossInputs, c: CorrectionConfig, guard: LossConfig, geometric_weight: bool = False) -> Columns:
    """What the correction must know of whole sequences. All are without gradient."""
    out = {}
    if c.use_opsm:
        out["opsm"] = x.old_logp_T - x.logp_T.detach()
    if x.rollout_logp_T is None or c.use_rollout_logprobs:      # nothing to compare with, or the same twice
        return out
    log_r_T, finite_T = log_mismatch(x, guard)
    out["logprob_error"] = torch.where(finite_T, log_r_T.abs(), guard.log_ratio_max).exp()      # not a number is the largest error
    if c.use_tis:
        if c.tis_mode not in TOKEN_MODES:
            out["log_mismatch"] = _unclamped(x, finite_T)
        elif geometric_weight:
            out["log_weight"] = (_token_weight(log_r_T, finite_T, c)[0] + 1e-10).log()
    for rule in rules(c):
        if rule.level != "token":
            of_sequence = rule.metric == "ratio" and rule.level != "seq_all"
            value_T = _unclamped(x, finite_T) if of_sequence else _token_metric(rule, log_r_T)
            out[str(rule)] = (~_inside(rule, value_T)).to(log_r_T.dtype) if rule.level == "seq_all" else value_T
    return out


def correct(x: LossInputs, sums: Columns, c: CorrectionConfig, guard: LossConfig, geometric_weight: bool = False) -> Correction:
    """The weight of every token.

    Args:
        x: rollout_logp_T is needed by everything but OPSM.
        sums: what `columns` asked for.
        guard: the clamp of log-ratios.
        geometric_weight: fold token weights into their geometric mean over the sequence, as the ratio of GMPO is.

    Raises:
        ValueError: a rule needs the engine's log-probs and there are none.
    """
    out = Correction(torch.ones_like(x.advantage_T), torch.ones_like(x.mask_T))
    if needs_rollout(c):
        if x.rollout_logp_T is None:
            raise ValueError("an off-policy correction (--use-tis, --rejection, --rs-veto-threshold, --seq-logprob-error-threshold) "
                             "compares with the engine's log-probs, and this batch has none")
        log_r_T, finite_T = log_mismatch(x, guard)
        if c.use_tis:
            out.weight_T, out.clipped_T = _tis_weight(x, log_r_T, finite_T, sums, c, guard)
            if geometric_weight and c.tis_mode in TOKEN_MODES:
                out.weight_T = mean_per_token(x, sums["log_weight"]).exp()[x.seq_T]
        out.weight_T = torch.where(finite_T, out.weight_T, 0)
        for rule in rules(c):
            _mask(out, rule.name, ~_passes(rule, x, log_r_T, sums, guard))
        if c.seq_logprob_error_threshold is not None:
            drop_T = (mean_per_token(x, sums["logprob_error"]) > c.seq_logprob_error_threshold)[x.seq_T]
            _mask(out, "seq_logprob_error", drop_T)
            out.keep_T = ~drop_T
    if c.use_opsm:
        _mask(out, "opsm", opsm(x, sums, c))
    return out


def opsm(x: LossInputs, sums: Columns, c: CorrectionConfig) -> torch.Tensor:
    """[T] bool: tokens with A < 0 of sequences with mean_t log(pi_old / pi) > delta. DeepSeek-V3.2 (2512.02556, section 3.1)."""
    return (x.advantage_T < 0) & (mean_per_token(x, sums["opsm"]) > c.opsm_delta)[x.seq_T]


def _tis_weight(x, log_r_T, finite_T, sums, c, guard) -> tuple[torch.Tensor, torch.Tensor]:
    """(weight, bool where the weight is not the plain ratio)."""
    if c.tis_mode in TOKEN_MODES:
        return _token_weight(log_r_T, finite_T, c)
    product_S = _clamp(sums["log_mismatch"], guard).exp()
    mean_S = _clamp(mean_per_token(x, sums["log_mismatch"]), guard).exp()
    if c.tis_mode == "seq_tis":
        weight_T = product_S.clamp(c.tis_clip_low, c.tis_clip)[x.seq_T]
        outside_T = _outside(product_S, c)[x.seq_T]
    elif c.tis_mode == "seq_icepop":
        outside_T = _outside(product_S, c)[x.seq_T]
        weight_T = torch.where(outside_T, 0, product_S[x.seq_T])
    else:
        outside_T = _outside(mean_S, c)[x.seq_T]
        weight_T = torch.where(outside_T, 0, log_r_T.exp() if c.tis_mode == "seq_mask_tis" else mean_S[x.seq_T])
    return weight_T, outside_T


def _token_weight(log_r_T, finite_T, c) -> tuple[torch.Tensor, torch.Tensor]:
    r_T = log_r_T.exp()
    outside_T = _outside(r_T, c)
    weight_T = r_T.clamp(c.tis_clip_low, c.tis_clip) if c.tis_mode == "tis" else torch.where(outside_T, 0, r_T)
    return torch.where(finite_T, weight_T, 0), outside_T


def _outside(r: torch.Tensor, c: CorrectionConfig) -> torch.Tensor:
    return (r < c.tis_clip_low) | (r > c.tis_clip)


def _token_metric(rule: Rule, log_r_T: torch.Tensor) -> torch.Tensor:
    """The token's value; of `ratio`, the logarithm, which is what sums and means are taken of."""
    return log_r_T if rule.metric == "ratio" else estimate(rule.metric, -log_r_T)


def _inside(rule: Rule, value: torch.Tensor) -> torch.Tensor:
    value = value.exp() if rule.metric == "ratio" else value
    return (value >= rule.low) & (value <= rule.high)


def _clamp(log_r: torch.Tensor, guard: LossConfig) -> torch.Tensor:
    return log_r.clamp(guard.log_ratio_min, guard.log_ratio_max)


def _passes(rule: Rule, x: LossInputs, log_r_T: torch.Tensor, sums: Columns, guard: LossConfig) -> torch.Tensor:
    if rule.level == "token":
        return _inside(rule, _token_metric(rule, log_r_T))
    if rule.level == "seq_all":
        return (sums[str(rule)] == 0)[x.seq_T]
    value_S = mean_per_token(x, sums[str(rule)]) if rule.level == "seq_mean" else sums[str(rule)]
    return _inside(rule, _clamp(value_S, guard) if rule.metric == "ratio" else value_S)[x.seq_T]


def _mask(out: Correction, name: str, masked_T: torch.Tensor) -> None:
    out.masked[name] = out.masked[name] | masked_T if name in out.masked else masked_T
    out.weight_T = torch.where(masked_T, 0, out.weight_T)
