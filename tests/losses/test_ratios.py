import math

import torch

from megatron_grpo.config import LossConfig
from megatron_grpo.losses import ratios
from megatron_grpo.losses.sequence import sum_columns
from tests.losses.cases import config, row, run


def ratio(x, **loss):
    c = LossConfig(**loss)
    return ratios.ratio(x, sum_columns(x, ratios.columns(x, c)), c)


X = dict(logp=[-1.0, -2.0, -0.5], old=[-1.2, -1.7, -0.5], advantage=1.0)      # log-ratios 0.2, -0.3, 0


def test_values():
    x = row(**X)
    torch.testing.assert_close(ratio(x, ratio="token"), torch.tensor([0.2, -0.3, 0.0], dtype=torch.float64).exp())
    s = math.exp((0.2 - 0.3) / 3)
    for kind in ("sequence", "sequence_token"):
        torch.testing.assert_close(ratio(x, ratio=kind), torch.full((3,), s).double())
    for kind in ("none", "on_policy"):
        assert ratio(x, ratio=kind).tolist() == [1.0, 1.0, 1.0]


def test_gradients():
    """Of the first token's ratio, to all three log-probs."""
    s = math.exp(-0.1 / 3)
    expected = dict(token=[math.exp(0.2), 0, 0], sequence=[s / 3] * 3, sequence_token=[s, 0, 0], on_policy=[1, 0, 0])
    for kind, gradient in expected.items():
        x = row(**X)
        got, = torch.autograd.grad(ratio(x, ratio=kind)[0], x.logp_T)
        torch.testing.assert_close(got, torch.tensor(gradient, dtype=torch.float64), msg=kind)
    assert not ratio(row(**X), ratio="none").requires_grad


def test_sequence_and_sequence_token_have_one_gradient_when_the_advantage_is_constant():
    a, b = (run(row(**X), config(ratio=kind, eps_clip=0.5)) for kind in ("sequence", "sequence_token"))
    torch.testing.assert_close(a[0], b[0])
    torch.testing.assert_close(a[1], b[1])
    # GSPO: every token weighs s A / |y|
    torch.testing.assert_close(a[1], torch.full((3,), -math.exp(-0.1 / 3) / 3).double())


def test_clamp():
    x = row([-1.0, -60.0], [-60.0, -1.0], 1.0)
    assert ratio(x).tolist() == [math.exp(20), math.exp(-20)]
    assert torch.autograd.grad(ratio(x).sum(), x.logp_T)[0].tolist() == [0, 0]
    off = ratio(x, log_ratio_min=-math.inf, log_ratio_max=math.inf)
    torch.testing.assert_close(off, torch.tensor([59.0, -59.0], dtype=torch.float64).exp())
