"""Reducers against verl, slime, miles, NeMo-RL, OpenRLHF and TRL: their denominators are passed in, the weights are ours."""

import torch

from megatron_grpo.config import LossConfig
from megatron_grpo.losses.reducers import REDUCERS
from megatron_grpo.parallel.layout import Layout
from tests.golden import NotCovered, peers
from tests.golden.pack import flat, loss_inputs, rows

NAN_RULE = "the peer's loss is NaN (0/0, or NaN under the mask); here it is 0 or unaffected by what the mask hides"


def run(case: dict, pool) -> dict:
    peer, inputs, p, want = case["source"].split("/")[0], case["inputs"], case["inputs"]["params"], case["outputs"]
    if "loss" in want and want["loss"] != want["loss"]:
        raise NotCovered(NAN_RULE)
    counts = torch.tensor([float(sum(row)) for row in inputs["loss_mask"]], dtype=torch.float64)
    valid = float((counts > 0).sum())
    if peer == "huggingface":
        return peers.outputs(case, peers.trl(case))
    if peer == "verl-project":
        return _verl(inputs, p, counts, valid)
    if peer == "OpenRLHF":
        scale = p.get("dp_size", 1)
        if p["token_level_loss"]:
            return _loss(inputs, "token_mean", tokens=p.get("batch_num_tokens", counts.sum().item()) / scale)
        return _loss(inputs, "seq_mean_token_mean", sequences=p.get("global_batch_size", valid) / scale, seq_tokens=counts + 1e-8)
    if peer == "NVIDIA-NeMo":
        return _nemo(case, inputs, p)
    if peer == "radixark":
        return dict(value=_loss(inputs, "token_mean", tokens=1.0 if p["calculate_per_token_loss"] else p["DIVISOR"])["loss"])
    if "loss_function" in case["source"].split(":")[-1]:
        return _slime_loss_function(inputs, p, counts)
    return _slime(inputs, p, counts)


def _reduce(inputs: dict, reducer: str, *, norm: int | None = None, **denominators):
    """(weight * mask, loss) of every token."""
    x = loss_inputs(inputs, **denominators)
    weight_T = REDUCERS[reducer](x, LossConfig(reducer=reducer, loss_norm_length=norm)) * x.mask_T
    values = flat(inputs["per_token_loss" if "per_token_loss" in inputs else "per_token"])
    return weight_T, weight_T * torch.where(x.mask_T, values, 0.0)


def _loss(inputs: dict, reducer: str, **denominators) -> dict:
    weight_T, loss_T = _reduce(inputs, reducer, **denominators)
    return dict(loss=loss_T.sum().item(), grad_loss=rows(weight_T, inputs["response_lengths"]))


def _verl(inputs, p, counts, valid):
    mode, dp = p["loss_agg_mode"], p.get("dp_size", 1)
    tokens = 1 / dp if mode == "token-sum" else p.get("batch_num_tokens", counts.sum().item()) / dp
    return _loss(inputs, peers.VERL_REDUCERS[mode], norm=p.get("loss_scale_factor", p["padded_width"]), tokens=tokens,
                 seq_tokens=counts + 1e-8, sequences=p.get("global_batch_size", valid) / dp)


def _nemo(case, inputs, p):
    mask = [[m * s for m in row] for row, s in zip(inputs["loss_mask"], inputs["sample_mask"], strict=True)]
    if "_token_" in case["id"]:
        return _loss(inputs, "token_mean", tokens=(p["global"] or sum(map(sum, mask))) + 1e-8)
    return _loss(inputs, "seq_mean_token_mean", sequences=(p["global"] or sum(inputs["sample_mask"])) + 1e-8,
                 seq_tokens=[sum(row) + 1e-8 for row in inputs["loss_mask"]])


def _slime_reduce(inputs, p, counts):
    """Weights and losses under slime's sum over samples of the sample mean, or its token sum."""
    denominators = p.get("sample_denoms", p.get("rollout_mask_sums"))
    if p["calculate_per_token_loss"]:
        return _reduce(inputs, "token_mean", tokens=1.0)
    if denominators is None:
        return _reduce(inputs, "seq_mean_token_mean", sequences=1.0)
    return _reduce(inputs, "rollout_mean", rollout_tokens=denominators)


def _shards(inputs, cp_size):
    """Per rank, per sequence: which response tokens it holds. The zigzag layout of this package."""
    prompts = [n - r for n, r in zip(inputs["total_lengths"], inputs["response_lengths"], strict=True)]
    layout = Layout(tuple(inputs["total_lengths"]), cp_size=cp_size)
    token_of = {int(i): t for t, i in enumerate(layout.response_index(prompts))}
    for rank in range(cp_size):
        yield [token_of[int(i)] for i in layout.index(rank) if int(i) in token_of]


def _slime(inputs, p, counts):
    weight_T, loss_T = _slime_reduce(inputs, p, counts)
    seq = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(inputs["response_lengths"]))
    ranks = []
    for index in _shards(inputs, p["cp_size"]):
        local = torch.bincount(seq[index], minlength=len(counts)).tolist()
        ranks.append(dict(local_lengths=local, value=loss_T[index].sum().item(), grad=rows(weight_T[index], local)))
    return dict(ranks=ranks, sum_over_ranks=loss_T.sum().item())


def _slime_loss_function(inputs, p, counts):
    """What slime hands to Megatron, whose own factors follow: in sample mode the step's loss over its count, times DP and CP ranks."""
    _, loss_T = _slime_reduce(inputs, p, counts)
    if p["calculate_per_token_loss"]:
        scale, normalizer = p["cp_size"], counts.clamp(min=1).sum().item()
    else:
        scale, normalizer = p["num_microbatches"] / p["step_global_batch_size"] * p["dp_size"] * p["cp_size"], 1
    return dict(ranks=[dict(scaled_loss=loss_T[index].sum().item() * scale, normalizer=normalizer)
                       for index in _shards(inputs, p["cp_size"])])
