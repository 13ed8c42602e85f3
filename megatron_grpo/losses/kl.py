"""The KL to the reference policy, as a loss: estimators on the sampled tokens, and what makes their gradient right.

x = log pi(t) - log pi_ref(t) on tokens sampled from pi_old, sg stop-gradient. An estimator k(x) has the right mean, but its own
gradient is not that of the KL, since the tokens were sampled from the policy that is being changed. Two ways to the true gradient:

    on-policy (pi_old = pi):    sg-weight  exp(log pi - sg(log pi)) k(x)      value k, gradient grad k + k grad log pi
    off-policy:                 (pi / pi_old) k(x), with gradient             DeepSeek-V3.2 (2512.02556, section 3.1)

With k1 or k3 both have mean KL(pi || pi_ref) and its gradient; k2's mean is not the KL. `straight_through` has the value of
the estimator and the gradient of k2, x grad log pi, whose on-policy mean is also the true gradient (verl's "+").
"""

import torch

from ..config import KLConfig

K3 = ("k3", "low_var_kl")


def estimate(kind: str, x_T: torch.Tensor) -> torch.Tensor:
    """k1 = x, k2 = x^2 / 2, k3 = exp(-x) - 1 + x, abs = |x|. Schulman, "Approximating KL divergence" (2020)."""
    if kind == "k1":
        return x_T
    if kind == "k2":
        return x_T.square() / 2
    if kind == "abs":
        return x_T.abs()
    if kind not in K3:
        raise ValueError(f"no KL estimator {kind!r}: choose k1, k2, k3, low_var_kl or abs")
    return torch.expm1(-x_T) + x_T


def kl_loss(logp_T: torch.Tensor, old_logp_T: torch.Tensor, ref_logp_T: torch.Tensor, c: KLConfig) -> torch.Tensor:
    """Token KL for the loss, with the gradient that `c` asks for.

    Args:
        logp_T: [T] log-probs under the trained weights, with gradient.
        old_logp_T: [T] log-probs under the policy that sampled.
        ref_logp_T: [T] log-probs under the reference.

    Returns:
        [T], clamped after its weight. Where the clamp of x acts, the weight has no gradient either. The gradient of a weighted k3 is w x,
        also where the clamp of the weight acts.
    """
    x_T = logp_T - ref_logp_T
    bound = c.kl_output_clamp if c.kl_output_clamp is not None else 10.0 if c.kl_loss_type == "low_var_kl" else torch.inf
    clamped_T = _clamp(x_T, c.kl_input_clamp)
    kl_T = estimate(c.kl_loss_type, clamped_T)
    if c.use_unbiased_kl:
        weight_T = _clamp(logp_T - old_logp_T, c.kl_input_clamp).exp()
    elif c.kl_gradient == "score_function":
        weight_T = (logp_T - logp_T.detach()).exp()
    elif c.kl_gradient == "straight_through":
        return _with_gradient_of(estimate("k2", x_T), _clamp(kl_T, bound))
    else:
        return _clamp(kl_T, bound)
    if c.kl_loss_type in K3:
        # d(w k3) = w x = w dk2. Left to autograd it is the difference of two terms of size exp(-x), of which float32 keeps nothing near x = -15.
        value_T = (weight_T * kl_T).detach()
        inside_T = value_T.abs() <= bound
        return _with_gradient_of(torch.where(inside_T, weight_T.detach(), 0) * estimate("k2", clamped_T), _clamp(value_T, bound))
    inside_T = x_T.detach().abs() <= c.kl_input_clamp
    return _clamp(torch.where(inside_T, weight_T, weight_T.detach()) * kl_T, bound)


def _with_gradient_of(x: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return value.detach() + (x - x.detach())


def _clamp(x: torch.Tensor, bound: float) -> torch.Tensor:
    """To [-bound, bound]; inf is off, also for the gradient of an infinite x."""
    return x if bound == torch.inf else x.clamp(-bound, bound)
