"""Log-probs, entropies and their gradients against float64 autograd, slime and verl: on one rank and on two tensor-parallel ranks."""

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron_grpo.logprobs import vocab_parallel_logprob
from tests.golden import choose

UNREAD = {"recipe": "_draw follows it", "w_lp": "drawn again", "w_ent": "drawn again", "check": "sums of what is drawn again"}

DTYPES = dict(on_float32_logits=torch.float32, on_bfloat16_logits=torch.bfloat16)


def tolerance(case: dict, name: str) -> float:
    """The float64 outputs are exact to rounding. float32 loses ulp(|logit| / temperature) of the peers that do not subtract first."""
    if name == "peer_slime_float32":
        return 2e-6 + 2.5e-7 * (abs(case["inputs"]["offset"]) + 5 * case["inputs"]["scale"]) / case["inputs"]["temperature"]
    return {"on_float32_logits": 1e-5, "on_bfloat16_logits": 1.5e-2}.get(name, 1e-9)


def run(case: dict, pool) -> dict:
    inputs = case["inputs"]
    want = _outputs(inputs, None)
    for got in pool.run(_own_columns, inputs, ranks=2):
        for name in ("log_prob", "entropy"):
            torch.testing.assert_close(torch.tensor(got[name]), torch.tensor(want[name]), rtol=1e-9, atol=1e-9)
    for name, peer in case["outputs"].items():
        if name.startswith("peer_"):                    # their entropy is NaN where a column is -inf
            want[name] = {k: [None if math.isnan(p) else v for v, p in zip(want[k], peer[k], strict=True)] for k in peer}
    return {name: want[name] for name in case["outputs"] if name in want}


def _own_columns(inputs: dict) -> dict:
    return _outputs(inputs, dist.group.WORLD)


def _outputs(inputs: dict, tp_group) -> dict:
    logits, w_lp, w_ent, probes = _draw(inputs)
    lp, entropy, g_lp, g_ent = _evaluate(logits, inputs, w_lp, w_ent, tp_group)
    out = dict(log_prob=lp.tolist(), entropy=entropy.tolist())
    if tp_group is not None:
        return out
    out |= dict(grad_of_sum_wlp_logprob=_digest(g_lp, inputs, probes), grad_of_sum_went_entropy=_digest(g_ent, inputs, probes))
    for name, dtype in DTYPES.items():
        lp, entropy, both = _evaluate(logits.to(dtype), inputs, w_lp, w_ent, None, together=True)
        digest = _digest(both.double(), inputs, probes)
        out[name] = dict(log_prob=lp.tolist(), entropy=entropy.tolist(), grad_both_at_target=digest["at_target"],
                         grad_both_row_dot_probe0=digest["row_dot_probe"][0], grad_both_row_l2=digest["row_l2"])
    return out


def _draw(inputs: dict):
    """The recipe of the file: all draws in exactly this order."""
    T, V, valid, g = inputs["T"], inputs["V"], inputs["V_valid"], torch.Generator("cpu").manual_seed(inputs["seed"])
    draw = dict(generator=g, dtype=torch.float64)
    logits = torch.randn(T, V, **draw) * inputs["scale"] + inputs["offset"]
    torch.randint(0, valid, (T,), generator=g)                  # the targets, given in the file
    if choose(dict(normal=False, spike=True), inputs["kind"], "kind of logits"):
        logits[torch.arange(T), torch.randint(0, valid, (T,), generator=g)] = 1e4
    logits[:, valid:] = -torch.inf
    w_lp, w_ent = torch.randn(T, **draw), torch.randn(T, **draw)
    return logits, w_lp, w_ent, [torch.randn(T, V, **draw) for _ in range(2)]


def _evaluate(logits, inputs, w_lp, w_ent, tp_group, together=False):
    if tp_group is not None:        # the last rank may hold a column of padding more
        logits = F.pad(logits, (0, -logits.shape[1] % dist.get_world_size(tp_group)), value=-torch.inf)
        logits = logits.chunk(dist.get_world_size(tp_group), 1)[dist.get_rank(tp_group)].contiguous()
    leaf, target = logits.requires_grad_(), torch.tensor(inputs["targets"])
    lp, entropy = vocab_parallel_logprob(leaf, target, tp_group=tp_group, vocab_size=inputs["V_valid"], temperature=inputs["temperature"],
                                         with_entropy=True, entropy_grad=True)
    losses = (lp * w_lp.to(lp.dtype)).sum(), (entropy * w_ent.to(lp.dtype)).sum()
    grads = [torch.autograd.grad(loss, leaf, retain_graph=True)[0] for loss in ([sum(losses)] if together else losses)]
    return lp.detach(), entropy.detach(), *grads


def _digest(grad, inputs, probes) -> dict:
    return dict(at_target=grad[torch.arange(len(grad)), torch.tensor(inputs["targets"])].tolist(),
                at_columns=grad[:, inputs["columns"]].T.tolist(), row_sum=grad.sum(1).tolist(), row_l2=grad.norm(dim=1).tolist(),
                row_absmax=grad.abs().amax(1).tolist(), row_dot_probe=[(grad * p).sum(1).tolist() for p in probes])
