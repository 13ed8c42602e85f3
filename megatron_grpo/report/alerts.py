"""What deserves a look in a run: rules with a threshold, where the threshold comes from, and what to do."""

import math
from dataclasses import dataclass
from statistics import median

from .runs import Run

RECENT = 10  # a rule speaks of the median of this many last values
RISE_FROM = 20  # values before a trend is judged
RISE_BY = 5.0  # last fifth over first fifth
MISMATCH = "mismatch_"  # metrics of trainer against engine
STATES = {"bad": "broken", "warn": "watch"}  # level of an alert -> verdict


@dataclass(frozen=True)
class Rule:
    """One metric against two thresholds.

    Attributes:
        over: True: too high is bad; False: too low is bad.
        warn, bad: thresholds of the two levels.
        source: where the thresholds come from.
        advice: what to look at.
    """

    metric: str
    title: str
    warn: float
    bad: float
    source: str
    advice: str
    over: bool = True

    @property
    def side(self) -> str:
        return "over" if self.over else "under"

    def level(self, value: float) -> str | None:
        beyond = (lambda limit: value > limit) if self.over else (lambda limit: value < limit)
        return "bad" if beyond(self.bad) else "warn" if beyond(self.warn) else None


@dataclass(frozen=True)
class Alert:
    """level: bad, warn or note (was over and is not any more). step: the newest step it speaks of."""

    run: str
    level: str
    metric: str
    title: str
    text: str
    step: int
    source: str
    advice: str


@dataclass(frozen=True)
class Verdict:
    """state: broken, watch, healthy or unknown. metric: what decided it, or what is missing."""

    state: str
    metric: str
    text: str
    advice: str


KL_SOURCE = (
    "a 30B-A3B MoE has 1.5e-3 between SGLang and Megatron, 8.4e-4 between two identical Megatron passes (R3, arXiv 2510.11370); "
    "Fireworks saw collapse by step 20 at 1.3e-2"
)
KL_ADVICE = (
    "Same weights, dtype and sampling support on both sides? For MoE turn on --use-rollout-routing-replay; "
    "bound what remains with --use-tis."
)
CLIP_SOURCE = (
    "GSPO reports about 0.0013 for GRPO and 0.15 for GSPO (arXiv 2507.18071, fig. 2); Fireworks saw collapse with 0.45 of the "
    "tokens clipped"
)
CLIP_ADVICE = "Fewer optimizer steps per rollout, a smaller learning rate, or clip bounds that fit the ratio's level (token or sequence)."
HOUSE = "this report's own rule of thumb, no published value"

RULES = (
    Rule("mismatch_k3", "Train-versus-rollout KL (k3)", 3e-3, 1e-2, KL_SOURCE, KL_ADVICE),
    Rule("mismatch_k1", "Train-versus-rollout KL (k1)", 3e-3, 1e-2, KL_SOURCE, KL_ADVICE),
    Rule(
        "mismatch_f2",
        "Tokens whose ratio is beyond 2",
        1e-2,
        0.1,
        "F(2) above 0.1 at the crash, mostly below 1e-4 with R3 (arXiv 2510.11370); the lower threshold is a tenth of the crash value",
        KL_ADVICE,
    ),
    Rule(
        "mismatch_abs",
        "Mean |log-prob difference| to the engine",
        0.05,
        0.1,
        "slime's CI refuses 0.1; the lower threshold is half of it",
        KL_ADVICE,
    ),
    Rule(
        "mismatch_ratio_ess",
        "Effective sample size, trainer against engine",
        0.8,
        0.5,
        HOUSE + "; k3 alone is blind to some collapses",
        KL_ADVICE,
        over=False,
    ),
    Rule("ratio_ess", "Effective sample size of the policy ratio", 0.8, 0.5, HOUSE, CLIP_ADVICE, over=False),
    Rule("clip_frac_high", "Tokens clipped from above", 0.2, 0.45, CLIP_SOURCE, CLIP_ADVICE),
    Rule("clip_frac_low", "Tokens clipped from below", 0.2, 0.45, CLIP_SOURCE, CLIP_ADVICE),
    Rule(
        "groups/zero_std",
        "Groups without a learning signal",
        0.5,
        0.8,
        HOUSE + "; DAPO (arXiv 2503.14476) samples such groups away",
        "The prompts are too easy or too hard: --dynamic-sampling-filter-path with --over-sampling-batch-size, or other prompts.",
    ),
    Rule(
        "routing/router_mismatch",
        "Routers that choose other experts than the engine",
        0.2,
        0.5,
        "about 0.1 between SGLang and Megatron in bf16 (arXiv 2510.11370); the thresholds are twice and five times that",
        "Look at the layers: one that stands out speaks of permuted layers or of weights that did not arrive.",
    ),
    Rule(
        "routing/fallback",
        "Rows without a route from the engine",
        0.01,
        0.1,
        HOUSE,
        "The engine returned no experts for part of the tokens.",
    ),
    Rule(
        "samples/truncated",
        "Responses cut at the length limit",
        0.3,
        0.6,
        HOUSE,
        "Raise --rollout-max-response-len, or shape overlong responses.",
    ),
)


def check_run(run: Run) -> list[Alert]:
    """All alerts of a run, the worst first."""
    found = [alert for rule in RULES if (alert := _against(run, rule))]
    found += filter(None, (_rise(run, "mismatch_k3", 1e-4), _rise(run, "mismatch_f2", 1e-4), _entropy(run), _failed(run)))
    found += _not_finite(run)
    return worst_first(found)


def agreement(run: Run, alerts: list[Alert]) -> Verdict:
    """Whether trainer and engine agree: the worst of the run's alerts (from `check_run`) that speaks of a mismatch, or that there is none."""
    rules = [rule for rule in RULES if rule.metric.startswith(MISMATCH)]
    seen = next((rule for rule in rules if run.series(rule.metric)), None)
    if seen is None:
        advice = "Both sides' log-probs are needed: a supervised run has none of the engine, --use-rollout-logprobs none of the trainer."
        return Verdict("unknown", rules[0].metric, "the run has no finite value", advice)
    for alert in alerts:
        if alert.metric.startswith(MISMATCH) and alert.level in STATES:
            return Verdict(STATES[alert.level], alert.metric, alert.text, alert.advice)
    return Verdict("healthy", seen.metric, f"{_now(run.series(seen.metric))[1]}, not {seen.side} {seen.warn:g}", "Nothing to do.")


def worst_first(alerts: list[Alert]) -> list[Alert]:
    return sorted(alerts, key=lambda a: ("bad", "warn", "note").index(a.level))


def unchecked(run: Run) -> list[str]:
    """Metrics that a rule needs and the run does not have."""
    return [name for name in dict.fromkeys([r.metric for r in RULES] + ["entropy"]) if not run.series(name)]


def _now(points: list[tuple[int, float]]) -> tuple[float, str]:
    """The value that a rule judges, and the same in words."""
    value = median(v for _, v in points[-RECENT:])
    return value, f"median of the last {min(RECENT, len(points))} steps is {value:.3g}"


def _against(run: Run, rule: Rule) -> Alert | None:
    points = run.series(rule.metric)
    if not points:
        return None
    now, words = _now(points)
    if level := rule.level(now):
        limit = rule.bad if level == "bad" else rule.warn
        text = f"{words}, {rule.side} {limit:g}"
        return Alert(run.name, level, rule.metric, rule.title, text, points[-1][0], rule.source, rule.advice)
    beyond = [(s, v) for s, v in points if rule.level(v)]
    if not beyond:
        return None
    worst = (max if rule.over else min)(beyond, key=lambda p: p[1])
    text = (
        f"{rule.side} {rule.warn:g} on {len(beyond)} of {len(points)} steps, worst {worst[1]:.3g} at step {worst[0]}, "
        f"last at step {beyond[-1][0]}; now {now:.3g}"
    )
    return Alert(run.name, "note", rule.metric, rule.title, text, beyond[-1][0], rule.source, rule.advice)


def _fifths(points: list[tuple[int, float]]) -> tuple[float, float]:
    n = max(len(points) // 5, 1)
    return median(v for _, v in points[:n]), median(v for _, v in points[-n:])


def _rise(run: Run, metric: str, floor: float) -> Alert | None:
    points = run.series(metric)
    if len(points) < RISE_FROM:
        return None
    first, last = _fifths(points)
    if last <= floor or last <= RISE_BY * max(first, 0.0):
        return None
    return Alert(
        run.name,
        "warn",
        metric,
        "Mismatch with the engine is rising",
        f"median of the last fifth of the steps is {last:.3g}, of the first fifth {first:.3g}",
        points[-1][0],
        f"the mismatch compounds as training goes on (IcePop); {RISE_BY:g} times the start and over {floor:g} is this report's rule",
        KL_ADVICE,
    )


def _entropy(run: Run) -> Alert | None:
    points = run.series("entropy")
    if len(points) < RISE_FROM:
        return None
    first, last = _fifths(points)
    if first <= 0 or last >= 0.3 * first:
        return None
    return Alert(
        run.name,
        "bad" if last < 0.1 * first else "warn",
        "entropy",
        "Entropy is collapsing",
        f"median of the last fifth is {last:.3g} nats, {last / first:.0%} of the first fifth's {first:.3g}",
        points[-1][0],
        HOUSE + " (30 % and 10 % of the start); DAPO (arXiv 2503.14476) raises the upper clip bound against it",
        "Raise --eps-clip-high over --eps-clip, add --entropy-coef, or lower the learning rate. "
        "Harmless if held-out accuracy is high and still rising.",
    )


def _failed(run: Run) -> Alert | None:
    """Samples lost to infrastructure, as a share of those begun, over the recent steps together."""
    made, lost = run.metrics.get("rollout/samples_generated", {}), run.metrics.get("rollout/samples_failed", {})
    steps = [s for s in sorted(made) if s in lost and math.isfinite(made[s] + lost[s])][-RECENT:]
    total, failed = sum(made[s] for s in steps), sum(lost[s] for s in steps)
    if not total or failed / total <= 0.01:
        return None
    return Alert(
        run.name,
        "bad" if failed / total > 0.1 else "warn",
        "rollout/samples_failed",
        "Samples lost to infrastructure",
        f"{failed / total:.1%} of the samples of the last {len(steps)} steps (engine or verifier)",
        steps[-1],
        HOUSE,
        "The trainer's log names the reason of each: dead engine, deadline, verifier.",
    )


def _not_finite(run: Run) -> list[Alert]:
    alerts = []
    for name in ("loss", "grad_norm"):
        steps = [s for s, v in run.series(name, finite=False) if not math.isfinite(v)]
        if steps:
            alerts.append(
                Alert(
                    run.name,
                    "bad" if steps[-1] == run.series(name, finite=False)[-1][0] else "note",
                    name,
                    f"{name} is not finite",
                    f"{len(steps)} of {len(run.metrics[name])} steps, first at step {steps[0]}, last at step {steps[-1]}",
                    steps[-1],
                    "always an error",
                    "Look at the step before the first one: ratio_max, mismatch_abs_max and the samples.",
                )
            )
    skipped = [s for s, v in run.series("skipped") if v > 0]
    if skipped:
        alerts.append(
            Alert(
                run.name,
                "warn" if len(skipped) * 20 > len(run.series("skipped")) else "note",
                "skipped",
                "Optimizer steps skipped",
                f"{len(skipped)} steps, last at step {skipped[-1]}",
                skipped[-1],
                HOUSE + " (over 5 % of the steps)",
                "Megatron skips a step whose gradients overflow or are not finite.",
            )
        )
    return alerts
