"""Each file of examples/hooks, loaded by its path and run as the job would."""

import argparse
import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_grpo.advantages import AdvantageInputs, compute_advantages
from megatron_grpo.batch import Sample
from megatron_grpo.config import AdvantageConfig, CorrectionConfig, GRPOConfig, LossConfig
from megatron_grpo.hooks import FilterOutput, HookConfig, HookError, load_hooks
from megatron_grpo.losses.inputs import LossInputs, StepCounts
from megatron_grpo.losses.policy_loss import policy_loss

EXAMPLES = Path(__file__).parents[2] / "examples" / "hooks"
ARGS = argparse.Namespace(calculate_per_token_loss=False, tis_clip=1.2, tis_clip_low=0.9, kl_coef=0.5)


def hooks(setting, path):
    return load_hooks(HookConfig(**{setting: f"{EXAMPLES}/{path}"}), ARGS)


def loss_inputs(**changes):
    """Two sequences of prompt and response in one pack: 2 + 3 and 1 + 2 tokens; the last position predicts nothing."""
    generator = torch.Generator().manual_seed(0)
    logp, old, rollout = (-torch.rand(8, generator=generator) for _ in range(3))
    x = LossInputs(
        logp_T=logp.requires_grad_(), old_logp_T=old, rollout_logp_T=rollout, advantage_T=torch.tensor([1.0] * 5 + [-2.0] * 3),
        mask_T=torch.tensor([False, True, True, True, False, True, True, False]), seq_T=torch.tensor([0] * 5 + [1] * 3), num_seqs=2,
        counts=StepCounts(tokens=10, sequences=4, rollouts=4, prompts=2), seq_tokens_S=torch.tensor([3.0, 2.0]),
        rollout_tokens_S=torch.tensor([3.0, 2.0]), prompt_tokens_S=torch.tensor([5.0, 5.0]),
        position_T=torch.tensor([0, 1, 2, 3, 4, 0, 1, 2]), length_S=torch.tensor([5, 3]), prompt_length_S=torch.tensor([2, 1]))
    return replace(x, **changes)


def samples(*rewards, lengths=None, responses=None, label="12"):
    return [Sample(sample_id=i, group_id=0, tokens=np.zeros(1 + n, np.int64), prompt_length=1, loss_mask=np.ones(n, bool),
                   rollout_logp=np.zeros(n, np.float32), reward=r, response=text, label=label)
            for i, (r, n, text) in enumerate(zip(rewards, lengths or [3] * len(rewards), responses or [""] * len(rewards), strict=True))]


def test_pg_loss():
    x = loss_inputs()
    config = GRPOConfig(loss=LossConfig(eps_clip=0.1))
    plain = policy_loss(x, config)
    out = policy_loss(x, config, hooks("custom_pg_loss_path", "pg_loss.py:ppo_with_positive_nll"))
    nll = -0.1 * x.logp_T[1:4].mean() / 4        # only the first sequence has a positive advantage; mean of its tokens, over 4 sequences
    assert out.loss.item() == pytest.approx((plain.loss + nll).item(), rel=1e-6)
    assert [float(v) for v in out.metrics["positive_tokens"]] == [3, 5]


def test_reducer():
    x = loss_inputs()
    out = policy_loss(x, GRPOConfig(loss=LossConfig(surrogate="reinforce", ratio="none")),
                      hooks("custom_pg_loss_reducer_path", "reducer.py:sqrt_length"))
    token = -(x.advantage_T * x.logp_T)
    assert out.loss.item() == pytest.approx((token[1:4].sum() / 3 ** 0.5 / 4 + token[5:7].sum() / 2 ** 0.5 / 4).item(), rel=1e-6)


def test_tis():
    x = loss_inputs()
    config = GRPOConfig(loss=LossConfig(surrogate="reinforce", ratio="none", reducer="token_mean"))
    out = policy_loss(x, config, hooks("custom_tis_function_path", "tis.py:two_sided"))
    weight = (-(x.old_logp_T - x.rollout_logp_T).abs()).exp()
    token = torch.where(x.mask_T, -(x.advantage_T * x.logp_T) * weight, 0)
    assert out.loss.item() == pytest.approx(token.sum().item() / 10, rel=1e-6)
    assert "two_sided_weight" in out.metrics


def advantage_inputs(**more):
    return AdvantageInputs(
        reward_N=torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0, 1.0]), group_N=torch.tensor([0, 0, 0, 0, 1, 1]),
        valid_N=torch.ones(6, dtype=torch.bool), sample_S=torch.tensor([0, 1]), seq_T=torch.tensor([0] * 5 + [1] * 3), num_seqs=2,
        mask_T=torch.tensor([False, True, True, True, False, True, True, False]), position_T=torch.tensor([0, 1, 2, 3, 4, 0, 1, 2]),
        length_S=torch.tensor([5, 3]), prompt_length_S=torch.tensor([2, 1]), **more)


def test_advantage():
    advantage_T, _ = compute_advantages(advantage_inputs(), GRPOConfig(), hooks("custom_advantage_function_path",
                                                                                "advantage.py:mean_normalized"))
    assert advantage_T.tolist() == [0, 3, 3, 3, 0, -1, -1, 0]       # (1 - 0.25) / 0.25 and (0 - 0.25) / 0.25


def test_rm():
    rm = hooks("custom_rm_path", "rm.py:answer_and_format").rm
    right, wordy, wrong = samples(0, 0, 0, responses=["12", "4 + 8 = 12", "13"])
    assert not rm.group
    assert [asyncio.run(rm(s)) for s in (right, wordy, wrong)] == [
        {"correct": 1.0, "format": 1.0}, {"correct": 1.0, "format": 0.0}, {"correct": 0.0, "format": 1.0}]


def test_reward_post_process():
    out = hooks("custom_reward_post_process_path", "reward_post_process.py:shorter_is_better").reward_post_process(
        samples(1.0, 1.0, 1.0, 0.0, lengths=[2, 4, 6, 1]))
    assert out.reward == pytest.approx([1.2, 1.1, 1.0, 0.0]) and not out.is_advantage


def test_sampling_filter():
    keep = hooks("dynamic_sampling_filter_path", "sampling_filter.py:neither_easy_nor_hopeless").sampling_filter
    assert keep(samples(1.0, 0.0)) == FilterOutput(True)
    assert keep(samples(1.0, 1.0)) == FilterOutput(False, "too_easy")
    assert keep(samples(0.0, 0.0)) == FilterOutput(False, "too_hard")


class Turns:
    """An episode whose policy says 7 as often as it may."""

    def __init__(self, remaining):
        self.tokens, self.remaining, self.asked = [1, 2], remaining, []
        self.tokenizer = argparse.Namespace(encode=lambda text, add_special_tokens: [9, 9, 9])

    async def generate(self, max_new_tokens=None, stop_token_ids=()):
        n = min(self.remaining, max_new_tokens or self.remaining)
        self.asked.append(n)
        self.tokens, self.remaining = self.tokens + [7] * n, self.remaining - n
        return argparse.Namespace(output_ids=[7] * n, finish_reason="length")

    def append(self, tokens):
        self.tokens, self.remaining = self.tokens + tokens, self.remaining - len(tokens)


def test_rollout():
    rollout = hooks("rollout_function_path", "rollout.py:think_twice").rollout
    episode = Turns(10)
    asyncio.run(rollout(episode))
    assert episode.tokens == [1, 2] + [7] * 5 + [9] * 3 + [7] * 2
    short = Turns(4)
    asyncio.run(rollout(short))
    assert short.tokens == [1, 2, 7, 7]


# ---- functions in slime's form ------------------------------------------------------------------------------------------


def test_slime_reducer():
    x = loss_inputs()
    run = hooks("custom_pg_loss_reducer_path", "slime_style.py:get_dr_grpo_reducer").reducer
    loss_T = torch.where(x.mask_T, x.logp_T, 0)
    out = run(loss_T, x)
    assert out.item() == pytest.approx(loss_T.sum().item() / 1000 / 4)
    assert torch.autograd.grad(out, x.logp_T)[0].tolist() == pytest.approx([m / 4000 for m in x.mask_T.tolist()])
    # --calculate-per-token-loss: slime divides by the tokens of the step instead
    per_token = load_hooks(HookConfig(custom_pg_loss_reducer_path=f"{EXAMPLES}/slime_style.py:get_dr_grpo_reducer"),
                           argparse.Namespace(calculate_per_token_loss=True)).reducer
    assert per_token(loss_T, x).item() == pytest.approx(loss_T.sum().item() / 1000 / 10)


def test_slime_reducer_without_samples():
    none = loss_inputs(mask_T=torch.zeros(8, dtype=torch.bool), length_S=torch.tensor([0]), prompt_length_S=torch.tensor([0]), num_seqs=1,
                       seq_T=torch.zeros(8, dtype=torch.int64), position_T=torch.full((8,), -1))
    out = hooks("custom_pg_loss_reducer_path", "slime_style.py:get_dr_grpo_reducer").reducer(none.logp_T * 1, none)
    assert out.item() == 0 and torch.autograd.grad(out, none.logp_T)[0].abs().max() == 0


def test_slime_advantage():
    x = advantage_inputs(old_logp_T=torch.full((8,), -1.0), ref_logp_T=torch.full((8,), -1.5))
    config = GRPOConfig(advantage=AdvantageConfig(advantage_std="none"))
    advantage_T, _ = compute_advantages(x, config, hooks("custom_advantage_function_path", "slime_style.py:rewards_less_kl"))
    assert advantage_T.tolist() == pytest.approx([0, 0.75, 0.75, 0.75, 0, -0.25, -0.25, 0])        # without --kl-coef the KL is 0
    config = GRPOConfig(advantage=AdvantageConfig(advantage_std="none", kl_coef=0.5, kl_penalty="immediate"))
    advantage_T, _ = compute_advantages(x, config, hooks("custom_advantage_function_path", "slime_style.py:rewards_less_kl"))
    assert advantage_T.tolist() == pytest.approx([0, 0.5, 0.5, 0.5, 0, -0.5, -0.5, 0])


def test_slime_tis_is_the_built_in_one():
    x = loss_inputs()
    ours = policy_loss(x, GRPOConfig(correction=CorrectionConfig(use_tis=True, tis_clip=1.2, tis_clip_low=0.9)))
    theirs = policy_loss(x, GRPOConfig(), hooks("custom_tis_function_path", "slime_style.py:clip_both_ends"))
    assert theirs.loss.item() == pytest.approx(ours.loss.item(), rel=1e-6)
    a, b = (torch.autograd.grad(out.loss, x.logp_T)[0] for out in (ours, theirs))
    assert a.tolist() == pytest.approx(b.tolist(), rel=1e-6)
    assert float(theirs.metrics["tis"][1]) == 5


def test_slime_function_of_the_wrong_shape(tmp_path):
    path = tmp_path / "bad.py"
    path.write_text("def f(args, rollout_data):\n    rollout_data['advantages'] = [k[:1] for k in rollout_data['kl']]\n")
    hook = load_hooks(HookConfig(custom_advantage_function_path=f"{path}:f"), ARGS)
    with pytest.raises(HookError, match=r"has shapes \[\(1,\), \(1,\)\], expected \[\(3,\), \(2,\)\]"):
        compute_advantages(advantage_inputs(), GRPOConfig(), hook)
