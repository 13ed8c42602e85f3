import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, note, settings
from hypothesis import strategies as st

from megatron_grpo.hooks import PgLossOutput, TisOutput
from megatron_grpo.losses import metrics
from megatron_grpo.losses.policy_loss import policy_loss
from tests.losses.cases import SEQUENCE_FIELDS, batch, config, random_batch, row, run, select
from tests.losses.recipes import OF_THE_MICRO_BATCH, RECIPES

# ---- against a plain reference -------------------------------------------------------------------------------------------------


def reference(x, ratio, cispo, tis, kl_coef, reducer):
    """The loss, sequence by sequence, as the papers write it."""
    total = 0.0
    for s in range(x.num_seqs):
        own = (x.seq_T == s) & x.mask_T
        if not own.any():
            continue
        logp, old, mu, ref, A = (t[own] for t in (x.logp_T, x.old_logp_T, x.rollout_logp_T, x.ref_logp_T, x.advantage_T))
        l = logp - old if ratio == "token" else (logp - old).mean().expand(len(logp))
        r = l.exp()
        if cispo:
            loss = -r.detach().clamp(0.8, 1.28) * A * logp
        else:
            loss = -torch.minimum(r * A, r.clamp(0.8, 1.28) * A)
        loss = loss * (old - mu).exp().clamp(max=2.0) if tis else loss
        loss = loss + kl_coef * ((ref - logp).exp() - 1 - (ref - logp)) * (logp - old).exp()
        n = {"token_mean": x.counts.tokens / len(logp), "seq_mean_token_mean": x.counts.sequences,
             "seq_mean_token_sum_norm": x.counts.sequences * 100 / len(logp),
             "rollout_mean": x.counts.rollouts * x.rollout_tokens_S[s] / len(logp)}[reducer]
        total = total + loss.mean() / n
    return total


@pytest.mark.parametrize("reducer", ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum_norm", "rollout_mean"])
@pytest.mark.parametrize("ratio, cispo, tis, kl_coef", [("token", False, False, 0.0), ("sequence", False, True, 0.0),
                                                       ("token", True, True, 0.1), ("sequence", False, False, 0.1)])
def test_reference(ratio, cispo, tis, kl_coef, reducer):
    x = random_batch([3, 1, 7, 4, 5], seed=11)
    want = reference(x, ratio, cispo, tis, kl_coef, reducer)
    cfg = config(dict(use_kl_loss=True, kl_loss_coef=kl_coef, kl_loss_type="k3", use_unbiased_kl=True), dict(use_tis=tis), ratio=ratio,
                 surrogate="cispo" if cispo else "ppo", eps_clip_high=0.28, reducer=reducer, loss_norm_length=100)
    loss, gradient, _ = run(x, cfg)
    torch.testing.assert_close(loss, want.detach())
    torch.testing.assert_close(gradient, torch.autograd.grad(want, x.logp_T)[0])
    loss32, gradient32, _ = run(random_batch([3, 1, 7, 4, 5], seed=11, dtype=torch.float32), cfg)
    assert loss32.dtype == gradient32.dtype == torch.float32
    torch.testing.assert_close(gradient32.double(), gradient, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("loss, value, mass_short, mass_long", [
    (dict(), 0.24038972, 0.19568, 0.29263), (dict(reducer="token_mean"), 0.51717388, 0.07827, 0.46821),
    (dict(reducer="seq_mean_token_sum_norm", loss_norm_length=8), 0.32323368, 0.04892, 0.29263),
    (dict(ratio="sequence", eps_clip=3e-4, eps_clip_high=4e-4), 0.15429390, 0.19550, 0.0)])
def test_polgrad_table(loss, value, mass_short, mass_long):
    """The comparison table of github.com/SaifPunjwani/polgrad (27613d8), examples/which_grpo_am_i_running.py."""
    g = torch.Generator().manual_seed(0)
    lengths = torch.tensor([2, 4, 6, 8])
    real = torch.arange(8) < lengths[:, None]
    logp = -(torch.rand(4, 8, generator=g, dtype=torch.float64) * 2 + 0.1)
    gap = torch.rand(4, 8, generator=g, dtype=torch.float64) * 2 - 1
    x = batch([8] * 4, logp_T=logp.flatten().requires_grad_(), old_logp_T=(logp - gap).flatten(), mask_T=real.flatten(),
              advantage_T=torch.tensor([1.5, -0.8, 0.6, -1.2], dtype=torch.float64).repeat_interleave(8))
    got, gradient, _ = run(x, config(**loss))
    assert got.item() == pytest.approx(value, abs=1e-8)
    mass = gradient.abs().view(4, 8).sum(1)
    assert mass[0].item() == pytest.approx(mass_short, abs=1e-5) and mass[3].item() == pytest.approx(mass_long, abs=1e-5)


# ---- properties, for every recipe ------------------------------------------------------------------------------------------------

lengths_ = st.lists(st.integers(1, 6), min_size=2, max_size=5)
seed_ = st.integers(0, 10**6)


def property_of(names, **drawn):
    """The test must hold of each recipe on four random batches."""
    def decorate(body):
        def test(**values):
            for name in sorted(names):
                note(name)          # the last one printed is the one that fails
                body(config(**RECIPES[name]), **values)
        test.__name__, test.__doc__ = body.__name__, body.__doc__
        return settings(max_examples=4, deadline=None, derandomize=True)(given(**drawn)(test))
    return decorate


def same(a, b):
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@property_of(RECIPES, lengths=lengths_, seed=seed_)
def test_order_of_the_samples(cfg, lengths, seed):
    x = random_batch(lengths, seed)
    g = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(lengths), generator=g)
    tokens = torch.cat([(x.seq_T == s).nonzero().flatten() for s in order])
    loss, gradient, out = run(x, cfg)
    loss2, gradient2, out2 = run(select(x, tokens, order), cfg)
    same(loss, loss2), same(gradient[tokens], gradient2)
    for name, (total, count) in out.metrics.items():
        same(total.double(), out2.metrics[name][0].double()), same(count, out2.metrics[name][1])


@property_of(set(RECIPES) - OF_THE_MICRO_BATCH, lengths=lengths_, seed=seed_, parts=st.integers(1, 4))
def test_split_into_micro_batches(cfg, lengths, seed, parts):
    x = random_batch(lengths, seed)
    loss, gradient, out = run(x, cfg)
    total, gradients, sums = 0, torch.zeros_like(gradient), {}
    for part in range(parts):
        sequences = torch.arange(len(lengths))[part::parts]
        tokens = torch.isin(x.seq_T, sequences).nonzero().flatten()
        value, gradients[tokens], o = run(select(x, tokens, sequences), cfg)
        total = total + value
        for name, pair in o.metrics.items():
            sums[name] = [a + b for a, b in zip(sums.get(name, (0, 0)), pair, strict=True)]
    same(loss, total), same(gradient, gradients)
    for name, pair in out.metrics.items():
        torch.testing.assert_close(torch.stack(pair), torch.stack(sums[name]), rtol=1e-6, atol=1e-6)      # counts are float32


@property_of(RECIPES, lengths=lengths_, seed=seed_, padding=st.integers(1, 6))
def test_padding_of_garbage(cfg, lengths, seed, padding):
    """Masked positions anywhere, of any sequence, holding NaN and inf in every stream."""
    x = random_batch(lengths, seed)
    g = torch.Generator().manual_seed(seed)
    n, size = len(x.seq_T), len(x.seq_T) + padding
    slots = torch.randperm(size, generator=g)[:n].sort().values
    streams = {}
    for name in ("logp_T", "old_logp_T", "advantage_T", "rollout_logp_T", "ref_logp_T", "entropy_T"):
        garbage = torch.tensor([math.nan, math.inf, -math.inf], dtype=torch.float64)[torch.randint(3, (size,), generator=g)]
        streams[name] = garbage.index_copy(0, slots, getattr(x, name).detach())
    padded = replace(x, **streams, mask_T=torch.zeros(size, dtype=torch.bool).index_copy(0, slots, x.mask_T),
                     seq_T=torch.randint(x.num_seqs, (size,), generator=g).index_copy(0, slots, x.seq_T))
    loss, gradient, _ = run(x, cfg)
    loss2, gradient2, _ = run(padded, cfg)
    same(loss, loss2), same(gradient, gradient2[slots])
    outside = torch.ones(size, dtype=torch.bool).index_fill(0, slots, False)
    assert (gradient2[outside] == 0).all() and (gradient[~x.mask_T] == 0).all()


@property_of(RECIPES, lengths=lengths_, seed=seed_)
def test_a_fully_masked_sample_changes_nothing(cfg, lengths, seed):
    x = random_batch(lengths, seed)
    nothing = {name: torch.cat([getattr(x, name), torch.zeros(1).double()]) for name in SEQUENCE_FIELDS}
    more = replace(
        x, num_seqs=x.num_seqs + 1, seq_T=torch.cat([x.seq_T, torch.full((3,), x.num_seqs)]), **nothing,
        mask_T=torch.cat([x.mask_T, torch.zeros(3, dtype=torch.bool)]),
        **{name: torch.cat([getattr(x, name).detach(), torch.full((3,), math.nan).double()])
           for name in ("logp_T", "old_logp_T", "advantage_T", "rollout_logp_T", "ref_logp_T", "entropy_T")})
    loss, gradient, out = run(x, cfg)
    loss2, gradient2, out2 = run(more, cfg)
    same(loss, loss2), same(gradient, gradient2[:-3])
    assert (gradient2[-3:] == 0).all()
    for name, pair in out.metrics.items():
        same(torch.stack(pair), torch.stack(out2.metrics[name]))


extreme_ = st.floats(-30, 30) | st.sampled_from([-30.0, 30.0])


@property_of(RECIPES, seed=seed_, policy=extreme_, engine=extreme_)
def test_extreme_log_ratios_stay_finite_in_float32(cfg, seed, policy, engine):
    x = random_batch([4, 3, 5], seed, dtype=torch.float32)
    old, g = x.old_logp_T.clone(), torch.Generator().manual_seed(seed)
    some = torch.randint(2, (2, 12), generator=g)
    x = replace(x, logp_T=(old + policy * some[0]).requires_grad_(), rollout_logp_T=old - engine * some[1], ref_logp_T=old + policy)
    loss, gradient, out = run(x, cfg)
    assert loss.isfinite() and gradient.isfinite().all()
    assert all(torch.stack([t.float() for t in pair]).isfinite().all() for pair in out.metrics.values())


@pytest.mark.parametrize("recipe", sorted(RECIPES))
def test_nothing_to_train_on(recipe):
    """No token with mask 1, and no token at all: loss 0 with a gradient of 0, so that backward still runs."""
    cfg = config(**RECIPES[recipe])
    x = random_batch([3, 2], masked=0.0)
    empty = replace(x, mask_T=torch.zeros(5, dtype=torch.bool), **{name: torch.zeros(2).double() for name in SEQUENCE_FIELDS})
    for y in (empty, select(empty, torch.arange(0))):
        loss, gradient, out = run(y, cfg)
        assert loss == 0 and (gradient == 0).all() and loss.isfinite()
        assert all(count == 0 for _, count in out.metrics.values())
        assert all(m == -math.inf for m in out.maxima.values())


# ---- metrics -------------------------------------------------------------------------------------------------------------------


def test_metrics_by_hand():
    r = [1.5, 0.5, 1.0, 1.1]
    x = replace(row([-1 + math.log(v) for v in r], [-1.0] * 4, [1.0, -1.0, 1.0, -1.0]),
                entropy_T=torch.tensor([1.0, 2.0, 3.0, 6.0], dtype=torch.float64),
                rollout_logp_T=-1 - torch.tensor([3.0, 1.0, 0.4, 1.0], dtype=torch.float64).log())
    _, _, out = run(x, config(correction=dict(use_tis=True, tis_clip=2.0, rejection=("token_ratio=0.5..",))))
    means = {name: float(s) / float(n) for name, (s, n) in out.metrics.items()}
    logs = [math.log(v) for v in (3.0, 1.0, 0.4, 1.0)]
    expected = dict(
        ratio=sum(r) / 4, ppo_kl=-sum(map(math.log, r)) / 4, clip_frac_low=0.25, clip_frac_high=0.25, entropy=3.0,
        mismatch_k1=-sum(logs) / 4, mismatch_k3=sum(math.exp(v) - 1 - v for v in logs) / 4, mismatch_f2=0.5,
        mismatch_abs=sum(map(abs, logs)) / 4, seq_logprob_error=(3 + 1 + 2.5 + 1) / 4, tis_weight=(2 + 1 + 0 + 1) / 4,
        tis_clip_frac=0.25, masked=0.25, masked_token_ratio=0.25)
    for name, value in expected.items():
        assert means[name] == pytest.approx(value), name
    assert float(out.maxima["ratio_max"]) == pytest.approx(1.5)
    assert float(out.maxima["mismatch_abs_max"]) == pytest.approx(math.log(3))
    assert float(out.maxima["seq_logprob_error_max"]) == pytest.approx(7.5 / 4)
    derived = metrics.derived(means)
    assert derived["ratio_ess"] == pytest.approx(sum(r) ** 2 / 4 / sum(v * v for v in r))
    assert derived["tis_weight_ess"] == pytest.approx(16 / 4 / 6) and "ratio_sq" not in derived


def test_losses_are_reported_as_the_step_will_add_them_up():
    x = random_batch([3, 4, 2])
    cfg = config(dict(use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type="k3"), entropy_coef=0.01)
    loss, _, out = run(x, cfg)
    m = {name: float(s) for name, (s, _) in out.metrics.items()}
    assert m["loss"] == pytest.approx(loss.item()) == pytest.approx(m["pg_loss"] + 0.1 * m["kl_loss"] - 0.01 * m["entropy_loss"])
    assert float(out.metrics["loss"][1]) == pytest.approx(1.0)


def test_the_entropy_bonus_has_a_gradient_and_lowers_the_loss():
    x = random_batch([3, 4])
    out = policy_loss(x, config(entropy_coef=0.5, reducer="token_mean"))
    gradient, = torch.autograd.grad(out.loss, x.entropy_T)
    torch.testing.assert_close(gradient, torch.where(x.mask_T, -0.5 / x.counts.tokens, 0.0).double())


@pytest.mark.parametrize("settings_, field, message", [
    (dict(kl=dict(use_kl_loss=True)), "ref_logp_T", "reference log-probs"), (dict(entropy_coef=0.1), "entropy_T", "--entropy-coef")])
def test_missing_streams(settings_, field, message):
    with pytest.raises(ValueError, match=message):
        run(replace(random_batch([3]), **{field: None}), config(**settings_))


# ---- hooks ------------------------------------------------------------------------------------------------------------------------


def test_hooks_replace_their_parts():
    x = random_batch([3, 4, 2], masked=0.0)
    pg = lambda inputs, c: PgLossOutput(-inputs.advantage_T * inputs.logp_T, {"mine": (torch.tensor(2.0), torch.tensor(4.0))})
    reducer = lambda loss_T, inputs: loss_T.sum() / 7
    tis = lambda loss_T, inputs, c: TisOutput(3 * loss_T, inputs.seq_T != 1)
    _, gradient, out = run(x, config(correction=dict(use_tis=True)), SimpleNamespace(pg_loss=pg, reducer=reducer, tis=tis))
    torch.testing.assert_close(gradient, torch.where(x.seq_T != 1, -3 * x.advantage_T / 7, 0))
    assert out.metrics["mine"][0] == 2 and out.metrics["masked_tis_hook"][0] == 4
    plain = run(x, config(surrogate="reinforce", ratio="none"))[1]
    bare = run(x, config(), SimpleNamespace(pg_loss=lambda inputs, c: -inputs.advantage_T * inputs.logp_T, reducer=None, tis=None))[1]
    torch.testing.assert_close(plain, bare)
