"""Sequence-level ratios, also over context-parallel ranks."""

from dataclasses import replace

import torch
import torch.distributed as dist

from megatron_grpo.config import CorrectionConfig, LossConfig
from tests.golden import NotCovered, peers
from tests.golden.pack import flat, loss_inputs, rows

SEQUENCE = dict(nemo=("sequence_level_importance_ratios", True), openrlhf=("policy_loss_type", "gspo"),
                areal=("importance_sampling_level", "sequence"), trl=("level", "sequence"))
"""The option that asks a peer's loss for sequence-level ratios; slime's and verl's are functions of their own."""


def run(case: dict, pool) -> dict:
    peer, inputs, p = peers.name(case), case["inputs"], case["inputs"]["params"]
    if "ranks" in case["outputs"]:
        return _context_parallel(case, pool)
    if peer in SEQUENCE and p.get(SEQUENCE[peer][0]) != SEQUENCE[peer][1]:
        raise NotCovered(f"{SEQUENCE[peer][0]} {p.get(SEQUENCE[peer][0])}: not a loss with sequence-level ratios")
    setup = peers.verl(case, reducer="seq-mean-token-mean") if peer == "verl" else peers.setup_of(case)
    setup.loss["ratio"] = "sequence"
    correction, streams = CorrectionConfig(), {}
    if peer == "verl":          # the gradient of GSPO-token, and a clamp from above only
        setup.loss |= dict(ratio="sequence_token", log_ratio_min=-peers.INF, log_ratio_max=10.0)
        _rows_apart(setup, inputs)
    elif peer == "nemo":
        correction = peers.nemo_correction(p)
    elif peer == "openrlhf":
        setup.loss |= dict(reducer="seq_mean_token_mean", **peers.UNCLAMPED)
        setup.denominators["seq_tokens"] = [sum(row) + 1e-8 for row in inputs["loss_mask"]]
        _rows_apart(setup, inputs)
        correction = CorrectionConfig(use_rollout_logprobs=bool(p.get("enable_vllm_is_correction")))
        p.ignore("vllm_is_truncated_threshold", "vllm_is_correction_type")     # the ratio is to the rollout already
    elif peer == "areal":       # one advantage a sequence: the mean of its tokens'
        streams["advantage_T"] = _row_mean(inputs)
    got = peers.outputs(case, setup, correction, **streams)
    if "ppo_kl" in case["outputs"] and peer == "slime":
        x = loss_inputs(inputs)
        s_T = peers.ratio(x, LossConfig(**setup.loss))
        got["ppo_kl"] = rows(-s_T.log(), inputs["response_lengths"], x.mask_T)
    if peer == "openrlhf":      # of the recomputed old log-probs
        got["ppo_kl"] = peers.evaluate(loss_inputs(inputs), loss=LossConfig()).metrics["ppo_kl"]
    return got


def _rows_apart(setup: peers.Peer, inputs: dict) -> None:
    """The reducer divides rows by (n + 1e-8), the sequence ratio by n: give the reducer its own row counts, as those of rollouts."""
    d = setup.denominators
    sequences = d.pop("sequences", None)
    d |= dict(rollouts=sum(map(any, inputs["loss_mask"])) if sequences is None else sequences, rollout_tokens=d.pop("seq_tokens"))
    setup.loss["reducer"] = "rollout_mean"


def _row_mean(inputs):
    means = [sum(a * m for a, m in zip(row, mask, strict=True)) / max(sum(mask), 1)
             for row, mask in zip(inputs["advantages"], inputs["loss_mask"], strict=True)]
    return flat([[mean] * len(row) for mean, row in zip(means, inputs["advantages"], strict=True)])


def _context_parallel(case: dict, pool) -> dict:
    inputs, p = case["inputs"], case["inputs"]["params"]
    if p["advantage_estimator"] != "gspo":
        raise NotCovered(f"advantage_estimator {p['advantage_estimator']} over context-parallel ranks")
    reducer = "token_mean" if p.get("calculate_per_token_loss") else "seq_mean_token_mean"
    loss = dict(peers.slime(case).loss, ratio="sequence", reducer=reducer)
    indices = [rank["local_indices"] for rank in case["outputs"]["ranks"]]        # where the peer put the tokens; not a result
    x = loss_inputs(inputs, tokens=1.0, sequences=1.0)
    x = replace(x, logp_T=x.logp_T.detach())
    results = pool.run(_rank, x, inputs["response_lengths"], loss, indices, ranks=p["cp_size"])
    ranks = [dict(rank=r, local_indices=indices[r], loss=value, grad_local=grad) for r, (value, grad) in enumerate(results)]
    return dict(ranks=ranks, sum_over_ranks=sum(value for value, _ in results))


def _rank(x, lengths, loss, indices):
    """This rank's loss and gradient: its shard of the tokens, sums over the group."""
    starts = [sum(lengths[:i]) for i in range(x.num_seqs)]
    own = torch.tensor([start + i for start, row in zip(starts, indices[dist.get_rank()], strict=True) for i in row], dtype=torch.int64)
    shard = {name: getattr(x, name)[own] for name in ("logp_T", "old_logp_T", "advantage_T", "mask_T", "seq_T")}
    x = replace(x, **shard, cp_group=dist.group.WORLD)
    x.logp_T.requires_grad_()
    run = peers.evaluate(x, loss=LossConfig(**loss))
    return run.loss, rows(run.grad_T, [len(row) for row in indices[dist.get_rank()]])
