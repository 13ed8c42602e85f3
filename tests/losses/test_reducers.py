from dataclasses import fields, replace

import pytest
import torch

from megatron_grpo.config import LossConfig
from megatron_grpo.losses.inputs import StepCounts
from megatron_grpo.losses.reducers import REDUCERS
from tests.losses.cases import batch, config, random_batch, run


def uneven():
    """Sequences of 1, 3 and 2 masked tokens (and a fully masked one); 0 and 1 are siblings; 3 prompts in the step, 12 tokens."""
    x = batch([1, 4, 2, 2], logp_T=torch.full((9,), -1.0).double().requires_grad_(), old_logp_T=-torch.ones(9).double(),
              advantage_T=torch.ones(9).double(), mask_T=torch.tensor([1, 1, 1, 0, 1, 1, 1, 0, 0]).bool())
    return replace(x, counts=StepCounts(tokens=12, sequences=6, rollouts=5, prompts=3),
                   rollout_tokens_S=torch.tensor([4, 4, 2, 0], dtype=torch.float64),
                   prompt_tokens_S=torch.tensor([8, 8, 2, 0], dtype=torch.float64))


@pytest.mark.parametrize("reducer, weights", [
    ("token_mean", [1 / 12] * 3),
    ("seq_mean_token_mean", [1 / 6, 1 / 18, 1 / 12]),
    ("seq_mean_token_sum", [1 / 6] * 3),
    ("seq_mean_token_sum_norm", [1 / 60] * 3),
    ("rollout_mean", [1 / 20, 1 / 20, 1 / 10]),
    ("prompt_mean", [1 / 24, 1 / 24, 1 / 6]),
])
def test_weight_of_a_token_of_each_sequence(reducer, weights):
    x = uneven()
    w_T = REDUCERS[reducer](x, LossConfig(loss_norm_length=10))
    torch.testing.assert_close(w_T[[0, 1, 5]], torch.tensor(weights, dtype=torch.float64))
    assert w_T.isfinite().all()
    loss, gradient, _ = run(x, config(reducer=reducer, loss_norm_length=10))
    torch.testing.assert_close(gradient, torch.where(x.mask_T, -w_T, 0))        # on-policy with A = 1
    torch.testing.assert_close(loss, -(w_T * x.mask_T).sum())


def test_every_reducer_of_the_setting_exists():
    assert set(next(f for f in fields(LossConfig) if f.name == "reducer").metadata["choices"]) == set(REDUCERS)


@pytest.mark.parametrize("reducer", ["token_mean", "seq_mean_token_mean", "rollout_mean", "prompt_mean"])
def test_the_weights_of_a_mean_sum_to_one(reducer):
    x = random_batch([3, 1, 8, 5, 2], seed=3)
    w_T = REDUCERS[reducer](x, LossConfig())
    assert (w_T * x.mask_T).sum().item() == pytest.approx(1.0)


def test_dr_grpo_does_not_see_the_length():
    """The gradient of a token is A / (N L) in a short and in a long response; GRPO divides by the response's length."""
    def gradient(length, **loss):
        x = batch([length], logp_T=torch.full((length,), -1.0).double().requires_grad_(), old_logp_T=-torch.ones(length).double(),
                  advantage_T=torch.ones(length).double(), mask_T=torch.ones(length, dtype=torch.bool))
        return run(x, config(**loss))[1][0].item()
    norm = dict(reducer="seq_mean_token_sum_norm", loss_norm_length=3000)
    assert gradient(2, **norm) == gradient(50, **norm) == pytest.approx(-1 / 3000)
    assert gradient(2) == pytest.approx(25 * gradient(50))


def test_token_mean_weighs_sequences_by_length():
    """DAPO: the sequence's share of the gradient is its share of the tokens."""
    x = random_batch([2, 4, 6, 8], masked=0.0)
    w_T = REDUCERS["token_mean"](x, LossConfig())
    shares = torch.zeros(4).double().index_add(0, x.seq_T, w_T)
    torch.testing.assert_close(shares, torch.tensor([2, 4, 6, 8], dtype=torch.float64) / 20)


def test_dr_grpo_needs_the_length():
    with pytest.raises(ValueError, match="--loss-norm-length"):
        run(uneven(), config(reducer="seq_mean_token_sum_norm"))
