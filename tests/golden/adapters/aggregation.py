"""Reducers against verl, slime, miles, NeMo-RL, OpenRLHF and TRL: their denominators are passed in, the weights are ours."""

import torch

from megatron_grpo.config import LossConfig
from megatron_grpo.losses.reducers import REDUCERS
from megatron_grpo.parallel.layout import Layout
from tests.golden import NotCovered, choose, peers
from tests.golden.pack import flat, loss_inputs, rows

NAN_RULE = "the peer's loss is NaN (0/0, or NaN under the mask); here it is 0 or unaffected by what the mask hides"


def run(case: dict, pool) -> dict:
    peer, inputs, p, want = peers.name(case), case["inputs"], case["inputs"]["params"], case["outputs"]
    if "loss" in want and want["loss"] != want["loss"]:
        raise NotCovered(NAN_RULE)
    counts = torch.tensor([float(sum(row)) for row in inputs["loss_mask"]], dtype=torch.float64)
    valid = float((counts > 0).sum())
    if peer == "trl":
        return peers.outputs(case, peers.trl(case))
    if peer == "verl":
        return _verl(inputs, p, counts, valid)
    if peer == "openrlhf":
        scale, tokens, sequences = p.get("dp_size", 1), p.get("batch_num_tokens", counts.sum().item()), p.get("global_batch_size", valid)
        if p["token_level_loss"]:
            return _loss(inputs, "token_mean", tokens=tokens / scale)
        return _loss(inputs, "seq_mean_token_mean", sequences=sequences / scale, seq_tokens=counts + 1e-8)
    if peer == "nemo":
        return _nemo(case, inputs, p)
    if peer == "miles":
        divisor = p["DIVISOR"]
        return dict(value=_loss(inputs, "token_mean", tokens=1.0 if p["calculate_per_token_loss"] else divisor)["loss"])
    if peer != "slime":
        raise NotCovered(f"no reducer of {peer} is known")
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
    tokens, sequences = p.get("batch_num_tokens", counts.sum().item()), p.get("global_batch_size", valid)
    return _loss(inputs, choose(peers.VERL_REDUCERS, mode, "loss_agg_mode"), norm=p.get("loss_scale_factor", p["padded_width"]),
                 tokens=(1 if mode == "token-sum" else tokens) / dp, seq_tokens=counts + 1e-8, sequences=sequences / dp)


def _nemo(case, inputs, p):
    """Only the id says over what masked_mean was taken."""
    mask, total = [[m * s for m in row] for row, s in zip(inputs["loss_mask"], inputs["sample_mask"], strict=True)], p["global"]
    if "_token_" in case["id"]:
        return _loss(inputs, "token_mean", tokens=(sum(map(sum, mask)) if total is None else total) + 1e-8)
    if "_seq_" not in case["id"]:
        raise NotCovered("the id has neither _token_ nor _seq_, and nothing else says what the mean is over")
    return _loss(inputs, "seq_mean_token_mean", sequences=(sum(inputs["sample_mask"]) if total is None else total) + 1e-8,
                 seq_tokens=[sum(row) + 1e-8 for row in inputs["loss_mask"]])


def _slime_reduce(inputs, p, counts):
    """Weights and losses under slime's sum over samples of the sample mean, or its token sum."""
    denominators = p.get("sample_denoms", p.get("rollout_mask_sums"))
    p.ignore("rollout_mask_sums")               # of the token sum, which has no denominators
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
    of_samples = p["num_microbatches"] / p["step_global_batch_size"] * p["dp_size"] * p["cp_size"]
    scale, normalizer = of_samples, 1
    if p["calculate_per_token_loss"]:
        scale, normalizer = p["cp_size"], counts.clamp(min=1).sum().item()
    return dict(ranks=[dict(scaled_loss=loss_T[index].sum().item() * scale, normalizer=normalizer)
                       for index in _shards(inputs, p["cp_size"])])
