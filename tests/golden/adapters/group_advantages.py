"""Advantages of groups: each peer's conventions are settings of AdvantageConfig."""

import math
from types import SimpleNamespace

import torch

from megatron_grpo.advantages import AdvantageInputs, compute_advantages
from megatron_grpo.config import AdvantageConfig, CorrectionConfig, KLConfig
from tests.golden import NotCovered, choose
from tests.golden.pack import flat, rows
from tests.golden.peers import name

IGNORED = {"advantages_dtype": "the dtype of the peer's result; it sets the tolerance"}


def tolerance(case: dict, output: str) -> float:
    """1e-9 where the peer computed in float64, 1e-5 in float32, 1e-6 where it took some statistics of float64 values in float32."""
    function = case["source"].split(":")[-1]
    if output == "whitened" or name(case) == "verl" and any(f"_{kind}_" in function for kind in ("grpo", "gpg")):
        return 1e-6
    in_double = case["outputs"].get("advantages_dtype") == "torch.float64" or function == "distributed_masked_whiten"
    return 1e-9 if in_double or name(case) == "megatron" else 1e-5


def run(case: dict, pool) -> dict:
    if any(math.isnan(v) for v in _values(case["outputs"]["advantages"])):
        raise NotCovered("the peer's advantage of a group of one is NaN (0/0); ours is 0, or the reward with --singleton-advantage reward")
    inputs, params = case["inputs"], case["inputs"].get("params", {})
    known = dict(slime=_slime, miles=_miles, verl=_verl, nemo=_nemo, openrlhf=_openrlhf, megatron=_megatron, trl=_trl)
    return choose(known, name(case), "the advantages of")(case, inputs, params)


def advantages(case: dict, *, rewards=None, group_ids=None, valid=None, rollout_ids=None, components=None, kl=None, per_sample=False,
               old=None, ref=None, kl_type="k1", **settings):
    """Our advantages [T] and the masks, cut into the case's rows, or one number for each sample."""
    inputs = case["inputs"]
    rewards = torch.tensor(inputs["rewards"] if rewards is None else rewards, dtype=torch.float64)
    group_ids = torch.tensor(inputs.get("group_ids", list(range(len(rewards)))) if group_ids is None else group_ids)
    mask = [[1]] * len(rewards) if per_sample else inputs["loss_mask"]
    lengths = [len(row) for row in mask]
    mask_T = flat(mask, torch.bool)
    x = AdvantageInputs(
        reward_N=rewards, group_N=group_ids, valid_N=torch.ones_like(group_ids, dtype=torch.bool) if valid is None else torch.tensor(valid),
        sample_S=torch.arange(len(rewards)), seq_T=torch.arange(len(rewards)).repeat_interleave(torch.tensor(lengths)), mask_T=mask_T,
        num_seqs=len(rewards), rewards_N={k: torch.tensor(v, dtype=torch.float64) for k, v in (components or {}).items()},
        rollout_N=None if rollout_ids is None else torch.tensor(rollout_ids), kl_T=None if kl is None else flat(kl),
        old_logp_T=None if old is None else flat(old), ref_logp_T=None if ref is None else flat(ref))
    config = SimpleNamespace(advantage=AdvantageConfig(**settings), kl=KLConfig(kl_loss_type=kl_type, kl_input_clamp=float("inf")),
                             correction=CorrectionConfig())
    advantage_T, _ = compute_advantages(x, config)
    if config.advantage.advantage_estimator in ("grpo", "rloo", "opo", "passk") and not config.advantage.normalize_advantages:
        flat_groups(case, x, advantage_T)
    return advantage_T if per_sample else rows(advantage_T, lengths, mask_T)


def flat_groups(case: dict, x: AdvantageInputs, advantage_T: torch.Tensor) -> None:
    """Where all rewards of a group are equal ours must be exactly 0, and where the peer's float32 sums cannot be exact it magnifies
    their rounding error, which ours then stands for."""
    for group in x.group_N.unique():
        own = (x.group_N == group) & x.valid_N
        rewards = x.reward_N[own].unique()
        if own.sum() > 1 and len(rewards) == 1:
            here = own[x.sample_S][x.seq_T] & x.mask_T
            assert (advantage_T[here] == 0).all(), f"group {group} has equal rewards and advantages {advantage_T[here].tolist()}"
            sums = torch.arange(1, int(own.sum()) + 1, dtype=torch.float64) * torch.stack([rewards, rewards.square()])
            if (sums != sums.float().double()).any():
                advantage_T[here] = torch.tensor(_values(case["outputs"]["advantages"]), dtype=advantage_T.dtype)[here]


def _values(advantages: list) -> list[float]:
    return [v for row in advantages for v in (row if isinstance(row, list) else [row])]


def _slime(case, inputs, p):
    if "kl" in inputs:
        settings = dict(advantage_estimator="reinforce", kl_coef=p["kl_coef"], kl_penalty="immediate", kl=inputs["kl"])
        return dict(advantages=advantages(case, **settings), whitened=advantages(case, normalize_advantages=True, **settings))
    groups = inputs["group_ids"]
    if len(groups) != p["n_samples_per_prompt"] * p["rollout_batch_size"]:
        groups = [0] * len(groups)              # slime then takes the whole batch for one group
    estimators = {None: False, "grpo": False, "gspo": False, "cispo": False, "reinforce_plus_plus_baseline": True}
    if choose(estimators, p.get("advantage_estimator"), "advantage_estimator"):
        p.ignore("grpo_std_normalization")
        return dict(advantages=advantages(case, group_ids=groups, per_sample=True, advantage_estimator="reinforce_plus_plus_baseline"))
    std = "sample" if p.get("grpo_std_normalization", True) else "none"
    return dict(advantages=advantages(case, group_ids=groups, per_sample=True, advantage_std=std))


def _miles(case, inputs, p):
    std = "sample" if p.get("grpo_std_normalization", True) else "none"
    return dict(advantages=advantages(case, rollout_ids=inputs.get("rollout_ids"), per_sample=True, advantage_std=std))


def _verl(case, inputs, p):
    function = case["source"].split(":")[-1]
    std = "sample" if p.get("norm_adv_by_std_in_grpo", True) else "none"
    if "gdpo" in function:
        names = list(inputs["reward_components"])
        return dict(advantages=advantages(
            case, rewards=[0.0] * len(inputs["group_ids"]), components=inputs["reward_components"], advantage_estimator="gdpo",
            advantage_std=std, gdpo_reward_keys=tuple(names), gdpo_reward_weights=tuple(p["weights"] or ()), gdpo_batch_norm="tokens",
            singleton_advantage="reward"))
    if "passk" in function:
        return dict(advantages=advantages(case, advantage_estimator="passk", advantage_std=std))
    if "baseline" in function:
        return dict(advantages=advantages(case, advantage_estimator="reinforce_plus_plus_baseline", normalize_advantages=True,
                                          singleton_advantage="reward"))
    estimator = next((e for e in ("grpo", "rloo", "opo", "gpg") if f"_{e}_" in function), None)
    if estimator is None:
        raise NotCovered(f"no {function} of verl is known")
    settings = dict(advantage_std=std) if estimator == "grpo" else {}
    return dict(advantages=advantages(case, advantage_estimator=estimator,
                                      singleton_advantage="zero" if function.startswith("compute_rloo_vec") else "reward", **settings))


def _nemo(case, inputs, p):
    if "minus_baseline" in p:
        coefficient, kind = p.get("reference_policy_kl_penalty", 0.0), p.get("reference_policy_kl_type", "k1")
        settings = dict(advantage_estimator="reinforce_plus_plus_baseline" if p["minus_baseline"] else "reinforce",
                        normalize_advantages=True, whiten_std="population", kl_penalty="immediate",
                        kl_coef=coefficient if p.get("use_kl_in_reward") else 0.0)
        return dict(advantages=advantages(
            case, old=inputs.get("logprobs_policy"), ref=inputs.get("logprobs_reference"),
            kl_type=choose(dict(k1="k1", k2="k2", k3="k3"), kind, "reference_policy_kl_type"), **settings))
    loo = p["use_leave_one_out_baseline"]
    settings = dict(advantage_baseline="leave_one_out" if loo else "mean",
                    advantage_std="none" if not p["normalize_rewards"] else "leave_one_out" if loo else "sample")
    if "reward_components" in inputs:
        names = sorted(inputs["reward_components"])
        return dict(advantages=advantages(
            case, rewards=[0.0] * len(inputs["group_ids"]), components=inputs["reward_components"], advantage_estimator="gdpo",
            gdpo_reward_keys=tuple(names), gdpo_reward_weights=tuple(p["weights_alphabetical"] or ()), **settings))
    return dict(advantages=advantages(case, **settings))


def _openrlhf(case, inputs, p):
    known = dict(rloo=dict(advantage_estimator="rloo"), dr_grpo=dict(advantage_std="none"), group_norm=dict(advantage_eps=1e-9),
                 reinforce_baseline=dict(advantage_estimator="reinforce_plus_plus_baseline"))
    settings = choose(known, p["estimator"], "estimator")
    if p.get("gamma", 1.0) != 1 or p.get("kl_coef", 0.0) != 0:
        raise NotCovered("a discount or a KL in the reward of a group baseline")
    groups, size = inputs["group_ids"], p["n_samples_per_prompt"]
    if any(len(set(groups[i:i + size])) > 1 for i in range(0, len(groups), size)):
        raise NotCovered("the peer cuts groups of a fixed size, whatever the ids")
    whitened = dict(normalize_advantages=True, whiten_std="population") if p["estimator"] == "reinforce_baseline" else {}
    return dict(advantages=advantages(case, **settings, **whitened), returns=advantages(case, **settings))


def _megatron(case, inputs, p):
    by_group, turns = inputs["rewards_by_group"], inputs["num_turns"]
    return dict(advantages=advantages(
        case, rewards=[r for group in by_group for r in group], group_ids=[g for g, group in enumerate(by_group) for _ in group],
        valid=[n > 0 for group in turns for n in group], per_sample=True, advantage_std="population", advantage_eps=1e-4))


def _trl(case, inputs, p):
    table = torch.tensor(inputs["rewards_per_func"], dtype=torch.float64)
    weights = p.get("reward_weights", [1.0] * table.shape[1])
    valid = ~table.isnan().all(dim=1)
    group_ids = [i // p["num_generations"] for i in range(len(table))]
    settings = dict(group_ids=group_ids, valid=valid.tolist(), per_sample=True, advantage_eps=1e-4)
    scale, aggregation = p["scale_rewards"], p.get("multi_objective_aggregation", "sum_then_normalize")
    std = choose({"group": "sample", "batch": "batch", "none": "none"}, scale, "scale_rewards")
    if choose(dict(sum_then_normalize=False, normalize_then_sum=True), aggregation, "multi_objective_aggregation"):
        if table.isnan().any() or std != "sample":
            raise NotCovered("GDPO of TRL with unscored rewards or another std")
        names = [f"f{i}" for i in range(table.shape[1])]
        return dict(advantages=advantages(case, rewards=[0.0] * len(table), components=dict(zip(names, table.T.tolist(), strict=True)),
                                          advantage_estimator="gdpo", gdpo_reward_keys=tuple(names), gdpo_reward_weights=tuple(weights),
                                          **settings))
    rewards = (table.nan_to_num() * torch.tensor(weights, dtype=torch.float64)).sum(dim=1).tolist()
    return dict(advantages=advantages(case, rewards=rewards, advantage_std=std, **settings))
