"""The KL of the loss, by exact enumeration of a small vocabulary: no sampling, so value and gradient are exact."""

import math

import pytest
import torch

from megatron_grpo.config import KLConfig
from megatron_grpo.losses.kl import kl_loss

V = 5
LOGITS = torch.tensor([0.3, -0.8, 1.1, 0.0, -0.2], dtype=torch.float64)
REF = torch.log_softmax(torch.tensor([-0.5, 0.4, 0.6, 0.1, -1.0], dtype=torch.float64), 0)
OLD = torch.log_softmax(LOGITS + torch.tensor([0.2, -0.3, 0.1, 0.4, -0.5], dtype=torch.float64), 0)


def truth():
    """KL(pi || ref) and its gradient to the logits."""
    logits = LOGITS.clone().requires_grad_()
    logp = torch.log_softmax(logits, 0)
    kl = (logp.exp() * (logp - REF)).sum()
    return kl.detach(), torch.autograd.grad(kl, logits)[0]


def expectation(behaviour, **settings):
    """E over tokens sampled from `behaviour` of the token loss, and of its gradient; the sampling itself has no gradient."""
    logits = LOGITS.clone().requires_grad_()
    logp = torch.log_softmax(logits, 0)
    behaviour = logp.detach() if behaviour is None else behaviour
    mean = (behaviour.exp() * kl_loss(logp, behaviour, REF, KLConfig(**settings))).sum()
    return mean.detach(), torch.autograd.grad(mean, logits)[0]


@pytest.mark.parametrize("kind", ["k1", "k3", "low_var_kl"])
def test_on_policy_with_the_score_function_term(kind):
    for got, want in zip(expectation(None, kl_loss_type=kind), truth(), strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("kind", ["k1", "k3", "low_var_kl"])
def test_off_policy_weighted_by_the_ratio(kind):
    """DeepSeek-V3.2: E_old[(pi / pi_old) k] = KL(pi || ref), and its gradient is the KL's."""
    for got, want in zip(expectation(OLD, kl_loss_type=kind, use_unbiased_kl=True), truth(), strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "abs"])
def test_straight_through_has_the_true_gradient_on_policy(kind):
    torch.testing.assert_close(expectation(None, kl_loss_type=kind, kl_gradient="straight_through")[1], truth()[1])


def test_what_is_wrong_without():
    """Plain k3 has the gradient of another divergence, plain k1 none at all; off-policy the score-function term is not enough."""
    value, gradient = expectation(None, kl_loss_type="k3", kl_gradient="pathwise")
    torch.testing.assert_close(value, truth()[0])
    assert (gradient - truth()[1]).abs().max() > 0.05
    assert expectation(None, kl_loss_type="k1", kl_gradient="pathwise")[1].abs().max() < 1e-12
    assert (expectation(OLD, kl_loss_type="k3")[1] - truth()[1]).abs().max() > 0.01


def one(x, dtype=torch.float64, **settings):
    """(value, gradient) of one token with log pi - log ref = x, on-policy."""
    logp = torch.tensor([-1.0], dtype=dtype).requires_grad_()
    kl = kl_loss(logp, logp.detach(), logp.detach() - x, KLConfig(**settings))
    return kl.item(), torch.autograd.grad(kl.sum(), logp)[0].item()


def test_estimators_by_hand():
    e = torch.tensor(-0.5, dtype=torch.float64).exp().item()
    plain = dict(kl_gradient="pathwise")
    assert one(0.5, kl_loss_type="k1", **plain) == pytest.approx((0.5, 1.0))
    assert one(0.5, kl_loss_type="k2", **plain) == pytest.approx((0.125, 0.5))
    assert one(0.5, kl_loss_type="k3", **plain) == pytest.approx((e - 0.5, 1 - e))
    assert one(-0.5, kl_loss_type="abs", **plain) == pytest.approx((0.5, -1.0))
    assert one(0.5, kl_loss_type="k1") == pytest.approx((0.5, 1.5))


def test_clamps():
    assert one(-30.0, kl_loss_type="k2") == pytest.approx((200.0, 0.0))                 # input: no gradient, also not of the weight
    assert one(-30.0, kl_loss_type="k1", kl_input_clamp=5.0)[0] == -5
    assert one(-8.0, kl_loss_type="low_var_kl") == (10.0, 0.0)                          # output, 10 without being asked
    assert one(-8.0, kl_loss_type="k3")[0] > 1000
    assert one(-8.0, kl_loss_type="k3", kl_output_clamp=3.0) == (3.0, 0.0)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "low_var_kl", "abs"])
@pytest.mark.parametrize("x", [-300.0, -30.0, 30.0, 300.0])
def test_extremes_stay_finite_in_float32(kind, x):
    for settings in (dict(), dict(use_unbiased_kl=True), dict(kl_gradient="straight_through")):
        value, gradient = one(x, torch.float32, kl_loss_type=kind, **settings)
        assert torch.isfinite(torch.tensor([value, gradient])).all()


@pytest.mark.parametrize("kind", ["k3", "low_var_kl"])
@pytest.mark.parametrize("x", [-19.5, -17.0, -13.0, -1e-5, 1e-5, 15.0])
def test_the_gradient_of_a_weighted_k3_is_w_x_in_float32(kind, x):
    """(d w) k3 + w dk3 = w (exp(-x) - 1 + x) + w (1 - exp(-x)): exp(-x) is 3e8 at -19.5, and float32 has 7 digits."""
    logp = torch.tensor([-20.0]).requires_grad_()
    old, ref = torch.tensor([-20.25]), logp.detach() - x
    exact = (logp.detach().double() - ref.double()).item()
    for settings, weight in ((dict(use_unbiased_kl=True), math.exp(0.25)), (dict(kl_gradient="score_function"), 1.0)):
        kl = kl_loss(logp, old, ref, KLConfig(kl_loss_type=kind, kl_output_clamp=1e10, **settings))
        assert kl.item() == pytest.approx(weight * (math.expm1(-exact) + exact), rel=1e-4, abs=1e-10)
        assert torch.autograd.grad(kl.sum(), logp)[0].item() == pytest.approx(weight * exact, rel=1e-5)
