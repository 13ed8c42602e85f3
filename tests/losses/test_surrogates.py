import math

import pytest
import torch

from megatron_grpo.config import CorrectionConfig, LossConfig
from megatron_grpo.losses import ratios, surrogates
from megatron_grpo.losses.policy_loss import prepared
from megatron_grpo.losses.sequence import sum_columns
from tests.losses.cases import batch, config, row, run


def surrogate(x, **loss):
    c = LossConfig(**loss)
    x = prepared(x, CorrectionConfig())
    sums = sum_columns(x, ratios.columns(x, c) | surrogates.columns(x, c))
    return surrogates.SURROGATES[c.surrogate](x, ratios.ratio(x, sums, c), sums, c)


def of_ratio(r, advantage, old=-1.0):
    """Tokens whose ratio is r."""
    return row([old + math.log(v) for v in r], [old] * len(r), advantage)


def gradient(x, **loss):
    out = surrogate(x, **loss)
    return torch.autograd.grad(out.loss_T.sum(), x.logp_T)[0]


def close(a, b):
    torch.testing.assert_close(a, torch.as_tensor(b, dtype=torch.float64))


@pytest.mark.parametrize("advantage, r, loss, slope", [
    (1.0, [0.5, 1.0, 1.25, 1.5], [-0.5, -1.0, -1.25, -1.28], [-0.5, -1.0, -1.25, 0.0]),         # the upper end holds
    (-1.0, [0.5, 0.9, 1.0, 1.5], [0.8, 0.9, 1.0, 1.5], [0.0, 0.9, 1.0, 1.5]),                   # the lower end holds
])
def test_ppo(advantage, r, loss, slope):
    out = surrogate(of_ratio(r, advantage), eps_clip=0.2, eps_clip_high=0.28)
    close(out.loss_T, loss)
    close(gradient(of_ratio(r, advantage), eps_clip=0.2, eps_clip_high=0.28), slope)
    assert out.bounded["high" if advantage > 0 else "low"].tolist() == [s == 0 for s in slope]


def test_ppo_upper_range_is_the_lower_one_when_not_given():
    close(surrogate(of_ratio([1.5], 1.0), eps_clip=0.2).loss_T, [-1.2])


def test_dual_clip():
    x = dict(r=[1.0, 2.9, 3.5], advantage=-2.0)
    close(surrogate(of_ratio(**x), eps_clip_c=3.0).loss_T, [2.0, 5.8, 6.0])
    close(gradient(of_ratio(**x), eps_clip_c=3.0), [2.0, 5.8, 0.0])
    assert surrogate(of_ratio(**x), eps_clip_c=3.0).bounded["dual"].tolist() == [False, False, True]
    close(surrogate(of_ratio([3.5], 2.0), eps_clip_c=3.0).loss_T, [-2.4])           # a positive advantage is not its business


def test_gspo_clips_a_sequence_as_a_whole():
    """Log-ratios of 1e-3 and -2e-4 on four tokens each: one leaves the paper's range, one does not."""
    logp_T = (torch.tensor([1e-3] * 4 + [-2e-4] * 4, dtype=torch.float64) - 1).requires_grad_()
    x = batch([4, 4], logp_T=logp_T, old_logp_T=-torch.ones(8).double(),
              advantage_T=torch.ones(8).double(), mask_T=torch.ones(8, dtype=torch.bool))
    out = surrogate(x, ratio="sequence", eps_clip=3e-4, eps_clip_high=4e-4)
    assert out.bounded["high"].tolist() == [True] * 4 + [False] * 4
    close(out.loss_T, [-1.0004] * 4 + [-math.exp(-2e-4)] * 4)
    close(gradient(x, ratio="sequence", eps_clip=3e-4, eps_clip_high=4e-4), [0.0] * 4 + [-math.exp(-2e-4)] * 4)


def test_cispo_keeps_the_gradient_of_clipped_tokens():
    x = dict(r=[0.5, 1.0, 4.0, 9.0], advantage=1.5)
    close(gradient(of_ratio(**x), surrogate="cispo", eps_clip=1.0, eps_clip_high=4.0), [-0.75, -1.5, -6.0, -7.5])
    close(gradient(of_ratio(**x), surrogate="ppo", eps_clip=0.2, eps_clip_high=4.0), [-0.75, -1.5, -6.0, 0.0])
    logp = torch.tensor([0.5, 1.0, 4.0, 9.0], dtype=torch.float64).log() - 1
    close(surrogate(of_ratio(**x), surrogate="cispo", eps_clip=1.0, eps_clip_high=4.0).loss_T,
          -1.5 * torch.tensor([0.5, 1.0, 4.0, 5.0], dtype=torch.float64) * logp)


def test_reinforce():
    close(gradient(of_ratio([0.5, 2.0], 3.0), surrogate="reinforce", ratio="none"), [-3.0, -3.0])
    close(gradient(of_ratio([0.5, 2.0], 3.0), surrogate="reinforce", ratio="token"), [-1.5, -6.0])


def test_sapo_is_the_policy_gradient_on_policy():
    for advantage, tau in ((2.0, 1.0), (-2.0, 1.05)):
        close(gradient(of_ratio([1.0], advantage), surrogate="sapo"), [-advantage])
        close(surrogate(of_ratio([1.0], advantage), surrogate="sapo").loss_T, [-advantage * 2 / tau])
    r = 1.7
    gate = 1 / (1 + math.exp(-1.05 * (r - 1)))
    close(gradient(of_ratio([r], -1.0), surrogate="sapo"), [4 * gate * (1 - gate) * r])


@pytest.mark.parametrize("advantage", [-2.0, 2.0])
@pytest.mark.parametrize("low, high", [(0.2, 0.0), (0.0, 0.2)])
def test_ppo_has_the_whole_gradient_on_its_closed_ends(advantage, low, high):
    """On policy with a range of 0 on one side, r = 1 is an end."""
    close(gradient(row([-1.0], [-1.0], advantage), eps_clip=low, eps_clip_high=high), [-advantage])


def test_gmpo():
    """Log-ratios 0.6 and -0.2 in the range [-0.4, 0.4]: A > 0 takes 0.4, A < 0 takes 0.6."""
    x = dict(logp=[-0.4, -1.2], old=[-1.0, -1.0])
    close(surrogate(row(**x, advantage=2.0), surrogate="gmpo", eps_clip=0.4).loss_T, [-2 * math.exp(0.1)] * 2)
    close(surrogate(row(**x, advantage=-2.0), surrogate="gmpo", eps_clip=0.4).loss_T, [2 * math.exp(0.2)] * 2)
    close(run(row(**x, advantage=2.0), config(surrogate="gmpo", eps_clip=0.4))[1], [0.0, -math.exp(0.1)])
    close(run(row(**x, advantage=-2.0), config(surrogate="gmpo", eps_clip=0.4))[1], [math.exp(0.2)] * 2)


def test_clip_cov_takes_the_loss_of_high_covariance_tokens():
    """Covariances of (A - 0)(logp + 2): 1, -1, 1, -1 ... the band keeps the positive ones as candidates."""
    x = row([-1.0, -1.0, -3.0, -3.0], [-1.0, -1.0, -3.0, -3.0], [1.0, -1.0, -1.0, 1.0])
    every = dict(surrogate="clip_cov", clip_cov_low=0.5, clip_cov_high=5.0)
    close(surrogate(x, clip_cov_ratio=1.0, **every).loss_T, [0.0, 1.0, 0.0, -1.0])
    assert surrogate(x, clip_cov_ratio=1.0, **every).bounded["cov"].tolist() == [True, False, True, False]
    assert int(surrogate(x, clip_cov_ratio=0.3, **every).bounded["cov"].sum()) == 1      # int(0.3 * 4)
    assert int(surrogate(x, clip_cov_ratio=0.01, **every).bounded["cov"].sum()) == 1     # never less than one
    assert int(surrogate(x, clip_cov_ratio=1.0, surrogate="clip_cov", clip_cov_low=2.0).bounded["cov"].sum()) == 0


def test_clip_cov_chooses_at_random_but_the_same_on_every_call():
    g = torch.Generator().manual_seed(0)
    old = -torch.rand(400, generator=g).double()
    old[:100] = 0.0                                                             # certain tokens: all of one old log-prob
    x = row(old.tolist(), old.tolist(), 1.0, position_T=torch.arange(400))
    keys = surrogates._random_key(x)
    assert torch.equal(keys, surrogates._random_key(x)) and len(keys.unique()) == 400
    assert abs(torch.corrcoef(torch.stack([keys, old]))[0, 1]) < 0.15           # the order says nothing of the value
    for part in (keys[:100], keys[100:]):
        assert abs(part.mean() / 2**53 - 0.5) < 0.1


def test_kl_cov_penalises_the_tokens_of_highest_covariance():
    x = row([-1.0, -1.0, -3.0, -3.0], [-1.5, -1.5, -3.5, -3.5], [2.0, -1.0, -1.0, 1.0])      # covariance 1.75, -1.25, 1.25, -.75
    out = surrogate(x, surrogate="kl_cov", kl_cov_ratio=0.5, kl_cov_coef=3.0)
    assert out.bounded["cov"].tolist() == [True, False, True, False]
    r = math.exp(0.5)
    close(out.loss_T, [-2 * r + 1.5, r, r + 1.5, -r])


@pytest.mark.parametrize("advantage, logp, old, masked", [
    (1.0, 0.5, 0.2, True), (1.0, 0.34, 0.2, False), (1.0, 0.05, 0.5, False),        # only up, only beyond 0.15
    (-1.0, 0.2, 0.5, True), (-1.0, 0.4, 0.5, False), (-1.0, 0.9, 0.1, False),
])
def test_dppo_tv(advantage, logp, old, masked):
    x = row([math.log(logp)], [math.log(old)], advantage)
    loss = dict(surrogate="dppo_tv", eps_clip=0.15)
    close(gradient(x, **loss), [0.0 if masked else -advantage * min(logp / old, 20.0)])
    assert bool(torch.stack(list(surrogate(x, **loss).bounded.values())).any()) == masked


def test_dppo_kl():
    p, q = 0.5, 0.2
    kl = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
    x = row([math.log(p)], [math.log(q)], 1.0)
    assert gradient(x, surrogate="dppo_kl", eps_clip=kl * 1.001).item() == pytest.approx(-2.5)
    assert gradient(x, surrogate="dppo_kl", eps_clip=kl * 0.999).item() == 0
    assert gradient(row([math.log(p)], [math.log(q)], -1.0), surrogate="dppo_kl", eps_clip=kl * 0.999).item() == pytest.approx(2.5)
    sure = row([0.0], [0.0], 1.0)                       # probability 1 leaves 0/0 for the other tokens
    assert gradient(sure, surrogate="dppo_kl", eps_clip=0.05).item() == -1


def test_dro_and_vespo():
    close(gradient(row([-1.0], [-1.5], 2.0), surrogate="dro", dro_beta=0.4), [-2.0 + 0.4 * 0.5])
    x = row([-1.0, -2.0], [-1.5, -2.2], 2.0)            # W = e^0.7
    w = math.exp(0.7)
    close(gradient(x, surrogate="vespo"), [-2 * w**2 * math.exp(3 * (1 - w))] * 2)
    close(gradient(row([-1.0], [-1.0], -2.0), surrogate="vespo"), [2.0])            # on-policy: the policy gradient


def test_every_surrogate_of_the_setting_exists():
    from dataclasses import fields
    choices = next(f for f in fields(LossConfig) if f.name == "surrogate").metadata["choices"]
    assert set(choices) == set(surrogates.SURROGATES)
