import math

import pytest
import torch

from megatron_grpo.config import CorrectionConfig, LossConfig
from megatron_grpo.losses import corrections
from megatron_grpo.losses.corrections import Rule
from megatron_grpo.losses.policy_loss import prepared
from megatron_grpo.losses.renormalize import prepare_step
from megatron_grpo.losses.sequence import sum_columns
from tests.losses.cases import batch, config, random_batch, row, run


def correction(x, **settings):
    c, guard = CorrectionConfig(**settings), LossConfig()
    x = prepared(x, c)
    return corrections.correct(x, sum_columns(x, corrections.columns(x, c, guard)), c, guard)


def mismatch(r, advantage=1.0, **fields):
    """Tokens whose old/rollout ratio is r."""
    return row([-1.0] * len(r), [-1.0] * len(r), advantage,
               rollout_logp_T=torch.tensor([-1.0 - math.log(v) if v > 0 else math.inf for v in r]).double(), **fields)


def weight(r, **settings):
    return correction(mismatch(r), use_tis=True, **settings).weight_T


def seen(x):
    """The ratios as the code sees them, to the last bit."""
    return (x.old_logp_T - x.rollout_logp_T).exp().tolist()


def close(a, b):
    torch.testing.assert_close(a, torch.as_tensor(b, dtype=torch.float64))


def test_tis_truncates_above_and_below():
    close(weight([0.1, 0.7, 1.0, 1.9, 5.0], tis_clip=2.0), [0.1, 0.7, 1.0, 1.9, 2.0])
    close(weight([0.1, 0.7, 5.0], tis_clip=2.0, tis_clip_low=0.5), [0.5, 0.7, 2.0])


def test_icepop_zeroes_outside_and_keeps_both_closed_ends():
    low, high = seen(mismatch([0.5, 5.0]))
    icepop = dict(tis_mode="icepop", tis_clip_low=low, tis_clip=high)
    assert weight([0.5, 5.0], **icepop).tolist() == [low, high]
    assert weight([0.5, 5.0], **icepop | dict(tis_clip_low=math.nextafter(low, 1))).tolist() == [0, high]
    assert weight([0.5, 5.0], **icepop | dict(tis_clip=math.nextafter(high, 0))).tolist() == [low, 0]


def test_tis_counts_nothing_as_clipped_on_its_closed_ends():
    x = mismatch([0.5, 2.0])
    low, high = seen(x)
    edge = dict(use_tis=True, tis_clip_low=low, tis_clip=high)
    assert correction(x, **edge).clipped_T.tolist() == [False, False]
    assert correction(x, **edge | dict(tis_clip=math.nextafter(high, 0))).clipped_T.tolist() == [False, True]


def test_sequence_weights():
    r = [2.0, 0.5, 3.0]                                 # product 3, geometric mean 3^(1/3) = 1.442
    g = 3 ** (1 / 3)
    close(weight(r, tis_mode="seq_tis", tis_clip=2.5), [2.5] * 3)
    close(weight(r, tis_mode="seq_tis", tis_clip=5.0), [3.0] * 3)
    close(weight(r, tis_mode="seq_icepop", tis_clip=2.5), [0.0] * 3)
    close(weight(r, tis_mode="seq_icepop", tis_clip=3.5), [3.0] * 3)
    close(weight(r, tis_mode="seq_mask_tis", tis_clip=1.5, tis_clip_low=0.9), r)        # kept: the raw token weights
    close(weight(r, tis_mode="seq_mask_tis", tis_clip=1.4, tis_clip_low=0.9), [0.0] * 3)
    close(weight(r, tis_mode="geometric", tis_clip=1.5, tis_clip_low=0.9), [g] * 3)
    close(weight(r, tis_mode="geometric", tis_clip=1.5, tis_clip_low=1.45), [0.0] * 3)


def test_the_ratio_of_a_sequence_is_clamped_as_a_whole():
    """verl and slime clamp the sum of log r to +-20, not its terms: tokens of +30 and -25 make e^5, two of +30 make e^20."""
    def logs(*values):
        n = len(values)
        return row([-1.0] * n, [-1.0] * n, 1.0, rollout_logp_T=-1 - torch.tensor(values, dtype=torch.float64))

    product = dict(use_tis=True, tis_mode="seq_tis", tis_clip=math.inf)
    close(correction(logs(30.0, -25.0), **product).weight_T, [math.exp(5)] * 2)
    close(correction(logs(30.0, 30.0), **product).weight_T, [math.exp(20)] * 2)
    close(correction(logs(*[-30.0] * 40), **product).weight_T, [math.exp(-20)] * 40)
    close(correction(logs(30.0, -25.0), use_tis=True, tis_mode="geometric", tis_clip=20.0).weight_T, [math.exp(2.5)] * 2)
    for rule, kept in (("seq_sum_ratio=100..200", True), ("seq_mean_ratio=12..13", True), ("seq_sum_ratio=..100", False)):
        assert (correction(logs(30.0, -25.0), rejection=(rule,)).weight_T != 0).tolist() == [kept] * 2


def test_sequence_bands_are_closed():
    x = mismatch([2.0, 2.0])
    total = (x.old_logp_T - x.rollout_logp_T).sum(0, keepdim=True)
    for mode, edge in (("seq_icepop", total.exp().item()), ("geometric", (total / 2).exp().item())):
        band = dict(use_tis=True, tis_mode=mode, tis_clip=edge, tis_clip_low=edge)
        assert correction(x, **band).weight_T.tolist() == [edge, edge]
        assert correction(x, **band | dict(tis_clip_low=math.nextafter(edge, 9), tis_clip=9.0)).weight_T.tolist() == [0, 0]


@pytest.mark.parametrize("bad", [-math.inf, math.inf, math.nan])
def test_a_token_that_the_engine_gives_no_number_for_has_weight_zero(bad):
    x = row([-1.0, -1.0], [-1.0, -1.0], 1.0, rollout_logp_T=torch.tensor([bad, -1.0], dtype=torch.float64))
    for mode in ("tis", "icepop", "seq_tis", "seq_mask_tis", "geometric"):
        assert correction(x, use_tis=True, tis_mode=mode).weight_T.tolist() == [0.0, 1.0]
    for rule in (dict(use_tis=True), dict(rejection=("token_ratio=0.5..2",)), dict(rs_veto_threshold=0.5)):
        loss, gradient, out = run(x, config(correction=rule))
        assert gradient[0] == 0 and gradient[1] != 0 and loss.isfinite()
        assert out.metrics["masked"][0] == 1
    assert correction(x, seq_logprob_error_threshold=10.0).keep_T.tolist() == [False, False]    # and it is the largest error


@pytest.mark.parametrize("text, kept", [
    ("token_ratio=0.5..1.5", [True, False, True]), ("token_k1=-0.1..1", [True, False, True]), ("token_k2=..0.2", [True, False, False]),
    ("token_k3=..0.2", [True, False, True]), ("seq_sum_ratio=1.01..", [True] * 3), ("seq_sum_ratio=1.1..", [False] * 3),
    ("seq_mean_ratio=0.9..1.02", [True] * 3), ("seq_mean_ratio=..1.006", [False] * 3), ("seq_all_ratio=0.5..2.1", [True] * 3),
    ("seq_all_ratio=0.6..", [False] * 3), ("seq_mean_k2=..0.25", [True] * 3), ("seq_sum_k2=..0.25", [False] * 3),
])
def test_rejection_rules(text, kept):
    """log r = 0, 0.7178, -0.6931; sum 0.0247, mean 0.0082."""
    out = correction(mismatch([1.0, 2.05, 0.500001]), rejection=(text,))
    assert (out.weight_T != 0).tolist() == kept
    assert out.masked[text.partition("=")[0]].tolist() == [not k for k in kept]


def test_rules_add_up_and_the_veto_is_one():
    x = mismatch([1.0, 3.0, 1e-5])
    assert correction(x, rs_veto_threshold=1e-4).weight_T.tolist() == [0, 0, 0]
    assert correction(x, rs_veto_threshold=1e-6).weight_T.tolist() == [1, 1, 1]
    both = correction(x, rejection=("seq_all_ratio=..2", "token_ratio=..2"), rs_veto_threshold=1e-6)
    assert both.weight_T.tolist() == [0, 0, 0] and both.masked["token_ratio"].tolist() == [False, True, False]
    edge = mismatch([0.25])
    assert correction(edge, rs_veto_threshold=seen(edge)[0]).weight_T.tolist() == [1]
    assert correction(edge, rs_veto_threshold=math.nextafter(seen(edge)[0], 1)).weight_T.tolist() == [0]


@pytest.mark.parametrize("text", ["token_ratio", "token_ratio=1", "word_ratio=1..2", "token_k4=1..2", "token_ratio=a..2", "token_k1=2..1"])
def test_a_rule_that_cannot_be_read_is_refused(text):
    with pytest.raises(ValueError, match="--rejection " + text.replace(".", r"\.")):
        Rule.parse(text)


def test_opsm_masks_negative_tokens_of_sequences_that_drifted():
    """mean log(old / pi) = 0.5: the mask starts strictly above it."""
    x = row([-1.5, -2.0], [-1.25, -1.25], [-1.0, 1.0])
    assert correction(x, use_opsm=True, opsm_delta=0.499).weight_T.tolist() == [0, 1]
    assert correction(x, use_opsm=True, opsm_delta=0.5).weight_T.tolist() == [1, 1]
    towards = row([-1.0, -1.0], [-1.5, -1.5], -1.0)
    assert correction(towards, use_opsm=True).weight_T.tolist() == [1, 1]


def test_seq_logprob_error_drops_the_sequence_from_kl_and_entropy_too():
    x = random_batch([4, 5], masked=0.0)
    x.rollout_logp_T[:4] = x.old_logp_T[:4] + math.log(1.5)      # mean exp|.| = 1.5 of the first; the second is far below 3
    cfg = dict(kl=dict(use_kl_loss=True, kl_loss_coef=0.1), entropy_coef=0.01)
    _, gradient, out = run(x, config(**cfg, correction=dict(seq_logprob_error_threshold=1.499)))
    assert (gradient[:4] == 0).all()
    edge = math.exp(abs(float(x.old_logp_T[0] - x.rollout_logp_T[0]))) * (1 + 1e-12)
    assert (run(x, config(**cfg, correction=dict(seq_logprob_error_threshold=edge)))[1][:4] != 0).all()
    assert out.metrics["masked_seq_logprob_error"][0] >= 4


def test_weights_are_detached_and_kl_is_not_weighted():
    x = mismatch([4.0, 0.5], ref_logp_T=torch.tensor([-1.5, -1.5], dtype=torch.float64))
    kl = dict(use_kl_loss=True, kl_loss_coef=1.0)
    with_tis = run(x, config(kl=kl, correction=dict(use_tis=True)))[1]
    without = run(x, config(kl=kl))[1]
    close(with_tis - without, [-(2.0 - 1) / 2, -(0.5 - 1) / 2])           # only the policy term: -A (w - 1) / |y|


def test_bypass_takes_the_rollout_as_old():
    x = mismatch([4.0, 0.5])
    close(run(x, config(correction=dict(use_rollout_logprobs=True), eps_clip=10.0))[1], [-4.0 / 2, -0.5 / 2])


def test_gmpo_folds_the_weights_of_a_sequence_into_their_geometric_mean():
    x = mismatch([4.0, 0.5])
    loss, _, _ = run(x, config(surrogate="gmpo", correction=dict(use_tis=True, tis_clip=2.0)))
    close(loss, -math.sqrt(2.0 * 0.5))


@pytest.mark.parametrize("settings", [dict(use_tis=True), dict(rejection=("token_k3=..1",)), dict(rs_veto_threshold=0.1),
                                      dict(seq_logprob_error_threshold=2.0), dict(use_rollout_logprobs=True)])
def test_without_the_engines_log_probs(settings):
    with pytest.raises(ValueError, match="engine's log-probs"):
        run(row([-1.0], [-1.0], 1.0), config(correction=settings))


# ---- denominators of the whole step ------------------------------------------------------------------------------------------


def step(xs, cfg, rollouts=None, prompts=None):
    """prepare_step for sequences that are each a rollout and a prompt, or as given."""
    starts = [sum(x.num_seqs for x in xs[:i]) for i in range(len(xs))]
    own = [torch.arange(s, s + x.num_seqs) for s, x in zip(starts, xs, strict=True)]
    count = sum(x.num_seqs for x in xs)
    return prepare_step(xs, cfg, rollouts or own, prompts or own, count, count)


def two_rows(r1, r2):
    n = len(r1) + len(r2)
    return batch([len(r1), len(r2)], logp_T=torch.full((n,), -1.0).double().requires_grad_(), old_logp_T=-torch.ones(n).double(),
                 advantage_T=torch.ones(n).double(), mask_T=torch.ones(n, dtype=torch.bool),
                 rollout_logp_T=-1 - torch.tensor(r1 + r2, dtype=torch.float64).log())


@pytest.mark.parametrize("reducer, plain, renormalized", [
    ("token_mean", 4 / 6, 1.0), ("seq_mean_token_mean", (2 / 4 + 1) / 2, 1.0), ("rollout_mean", (2 / 4 + 1) / 2, 1.0)])
def test_renormalize_masked_takes_tokens_out_of_the_denominators(reducer, plain, renormalized):
    """IcePop drops two of the first four tokens; every loss is -1."""
    x = two_rows([1.0, 9.0, 1.0, 9.0], [1.0, 1.0])
    icepop = dict(use_tis=True, tis_mode="icepop", tis_clip=2.0, tis_clip_low=0.5)
    assert run(x, config(reducer=reducer, correction=icepop))[0].item() == pytest.approx(-plain)
    cfg = config(reducer=reducer, correction=icepop | dict(renormalize_masked=True))
    (y,), metrics = step([x], cfg)
    assert run(y, cfg)[0].item() == pytest.approx(-renormalized)
    assert [float(v) for v in metrics["step_masked"]] == [2, 6]


def test_renormalize_masked_counts_over_micro_batches_and_siblings():
    a, b = two_rows([9.0], [1.0, 9.0]), two_rows([1.0, 1.0], [9.0, 9.0])
    cfg = config(reducer="rollout_mean", correction=dict(rejection=("token_ratio=..2",), renormalize_masked=True))
    groups = [torch.tensor([0, 0]), torch.tensor([0, 1])]
    (x, y), _ = step([a, b], cfg, rollouts=groups, prompts=groups)
    assert (x.counts.tokens, x.counts.sequences, x.counts.rollouts) == (3, 2, 1)
    assert x.rollout_tokens_S.tolist() == [3, 3] and y.rollout_tokens_S.tolist() == [3, 0]
    assert (run(x, cfg)[0] + run(y, cfg)[0]).item() == pytest.approx(-1.0)


def test_a_rejected_token_does_not_change_the_judgement_of_the_rest():
    """After token rejection the sequence's mean is another; the rules were applied to the whole sequence, once."""
    cfg = config(correction=dict(rejection=("token_ratio=..2", "seq_mean_ratio=1.01.."), renormalize_masked=True))
    (x,), _ = step([two_rows([3.0, 1.0], [1.0, 1.0])], cfg)
    assert x.mask_T.tolist() == [False, True, False, False]
    assert run(x, cfg)[0].item() == pytest.approx(-1.0)


def test_tis_batch_normalize():
    x = two_rows([1.0, 0.5], [0.25, 1.0, 1.0, 1.0])
    cfg = config(correction=dict(use_tis=True, tis_batch_normalize=True), reducer="token_mean")
    (y,), _ = step([x], cfg)
    close(y.weight_T, torch.tensor([1.0, 0.5, 0.25, 1.0, 1.0, 1.0], dtype=torch.float64) / (4.75 / 6))
    assert run(y, cfg)[0].item() == pytest.approx(-1.0)
    sequence = config(correction=dict(use_tis=True, tis_mode="seq_tis", tis_batch_normalize=True))
    close(step([x], sequence)[0][0].weight_T[[0, 2]], torch.tensor([0.5, 0.25], dtype=torch.float64) / 0.375)


@pytest.mark.parametrize("mode, reducer, rows, weights", [
    ("icepop", "token_mean", ([0.5, 9.0], [1.0, 9.0]), [0.5 / 0.75, 1 / 0.75]),
    ("seq_icepop", "seq_mean_token_mean", ([0.5, 1.0], [9.0]), [1.0, 1.0])])
def test_what_renormalize_masked_takes_out_is_not_in_the_mean_weight_either(mode, reducer, rows, weights):
    """Else half the tokens masked would count twice: in the denominators, and in a mean weight of half the size."""
    both = dict(renormalize_masked=True, tis_batch_normalize=True)
    cfg = config(reducer=reducer, correction=dict(use_tis=True, tis_mode=mode, tis_clip=2.0, **both))
    (y,), _ = step([two_rows(*rows)], cfg)
    close(y.weight_T[y.mask_T], weights)
    assert run(y, cfg)[0].item() == pytest.approx(-1.0)


@pytest.mark.parametrize("flag", ["renormalize_masked", "tis_batch_normalize"])
def test_a_step_that_was_not_prepared_is_an_error(flag):
    with pytest.raises(ValueError, match="prepare_step"):
        run(mismatch([1.0]), config(correction={"use_tis": True, flag: True}))
