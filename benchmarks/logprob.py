"""Log-prob and entropy of vocab-parallel logits: time, peak memory, collectives, and the share of the floor, in one run.

    python benchmarks/logprob.py                                    # CPU, small; or one GPU, 8192 x 151936, where there is one
    python benchmarks/logprob.py --tokens 2048 --vocab 151936 --dtype float32

Rows: plain PyTorch (log_softmax, gather), the usual vocab-parallel function that keeps the softmax for its backward (four all-reduces,
float32), and this package: PyTorch in chunks, and on a GPU the Triton kernels. The floor reads each logit once forward (log-prob
passes), and in addition reads and writes it once backward (policy pass), at the speed of a large copy in the same run.
"extra" is the peak beyond logits and gradient, in units of one float32 [T, V] tensor.
"""

import argparse
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.meter import Collectives, copy_bandwidth, free_port, peak_bytes, seconds
from megatron_grpo.logprobs import vocab_parallel_logprob


def plain(logits, target, tp_group, entropy):
    logp = logits.float().log_softmax(-1)
    return logp.gather(1, target[:, None]).squeeze(1), -(logp.exp() * logp).sum(-1) if entropy else None


class _KeepsSoftmax(torch.autograd.Function):
    """What RL trainers on Megatron commonly do, restated: reduce max, sum, target and entropy term; keep the float32 softmax."""

    @staticmethod
    def forward(ctx, logits, target, tp_group, entropy):
        rank, width = (dist.get_rank(tp_group) if tp_group else 0), logits.shape[1]
        maximum = logits.max(-1, keepdim=True).values
        _reduce(maximum, tp_group, dist.ReduceOp.MAX)
        shifted = logits - maximum
        local = target - rank * width
        outside = (local < 0) | (local >= width)
        local = local.masked_fill(outside, 0)
        chosen = shifted.gather(1, local[:, None]).squeeze(1).masked_fill(outside, 0)
        _reduce(chosen, tp_group)
        softmax = shifted.exp_()
        total = softmax.sum(-1, keepdim=True)
        _reduce(total, tp_group)
        softmax.div_(total)
        mean = None
        if entropy:
            mean = (softmax * logits).sum(-1, keepdim=True)
            _reduce(mean, tp_group)
        ctx.save_for_backward(softmax, local, outside, logits if entropy else None, mean)
        lse = (total.log() + maximum).squeeze(1)
        return chosen - total.log().squeeze(1), lse - mean.squeeze(1) if entropy else None

    @staticmethod
    def backward(ctx, grad_logp, grad_entropy):
        softmax, local, outside, logits, mean = ctx.saved_tensors
        if grad_entropy is not None:
            slope = (logits - mean).mul_(softmax).mul_(-grad_entropy[:, None])
        grad = softmax.mul_(-grad_logp[:, None])
        grad.scatter_add_(1, local[:, None], (grad_logp * ~outside)[:, None])
        return grad if grad_entropy is None else grad.add_(slope), None, None, None


def _reduce(x, tp_group, op=dist.ReduceOp.SUM):
    if tp_group is not None:
        dist.all_reduce(x, op=op, group=tp_group)


def keeps_softmax(logits, target, tp_group, entropy):
    return _KeepsSoftmax.apply(logits.float(), target, tp_group, entropy)


def ours(**options):
    def run(logits, target, tp_group, entropy):
        return vocab_parallel_logprob(logits, target, tp_group=tp_group, with_entropy=entropy, entropy_grad=entropy, **options)
    return run


def implementations(device):
    rows = {"plain PyTorch": plain, "keeps the softmax": keeps_softmax, "this, PyTorch": ours(kernel=False),
            "this, PyTorch, in place": ours(kernel=False, inplace_grad=True)}
    if device.type == "cuda":
        rows |= {"this, Triton": ours(kernel=True), "this, Triton, in place": ours(kernel=True, inplace_grad=True)}
    return rows


def step(fn, source, target, weight, tp_group, train):
    """A log-prob pass, or a policy pass with entropy bonus up to the gradient of the logits."""
    if not train:
        with torch.no_grad():
            fn(source, target, tp_group, False)
        return
    logits = source.view_as(source)             # not a leaf: may be overwritten
    logp, entropy = fn(logits, target, tp_group, True)
    torch.autograd.grad((logp * weight).sum() + (entropy * weight).sum(), logits)


def count_collectives(rank, ranks, port, results):
    """Collectives of one policy pass, forward and backward, on two gloo ranks."""
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    logits, target, weight = torch.randn(64, 128, requires_grad=True), torch.randint(0, 256, (64,)), torch.randn(64)
    for name, fn in implementations(torch.device("cpu")).items():
        if fn is not plain:
            with (meter := Collectives()).counted():
                step(fn, logits, target, weight, dist.group.WORLD, True)
            results[name] = (meter.count, meter.bytes / 64)
    dist.destroy_process_group()


def main():
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=8192 if cuda else 512)
    parser.add_argument("--vocab", type=int, default=151936 if cuda else 32768, help="columns of this rank")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--repeats", type=int, default=10 if cuda else 3)
    args = parser.parse_args()
    device, dtype = torch.device("cuda" if cuda else "cpu"), getattr(torch, args.dtype)
    torch.set_num_threads(1)
    with mp.Manager() as manager:
        results = manager.dict()
        mp.spawn(count_collectives, (2, free_port(), results), nprocs=2)
        collectives = dict(results)

    source = torch.randn(args.tokens, args.vocab, device=device).to(dtype).requires_grad_()
    target, weight = torch.randint(0, args.vocab, (args.tokens,), device=device), torch.randn(args.tokens, device=device)
    bandwidth, logit_bytes, unit = copy_bandwidth(device), source.numel() * source.element_size(), source.numel() * 4
    floors = {False: logit_bytes / bandwidth, True: 3 * logit_bytes / bandwidth}
    print(f"{args.tokens} tokens x {args.vocab} columns, {args.dtype}, {device}; copies run at {bandwidth / 1e9:.1f} GB/s, "
          f"so the floors are {floors[False] * 1e3:.2f} ms (log-prob pass) and {floors[True] * 1e3:.2f} ms (policy pass with entropy)")
    print(f"{'':<26}{'log-prob pass':^30}{'policy pass':^30}{'collectives (TP 2)':^24}")
    print(f"{'':<26}{'ms':>10}{'of floor':>10}{'extra':>10}{'ms':>10}{'of floor':>10}{'extra':>10}{'count':>12}{'bytes/token':>12}")
    for name, fn in implementations(device).items():
        row = f"{name:<26}"
        in_place = "in place" in name
        for train in (False, True):
            # in place the logits become their gradient, so each run works on a copy, and the copy's own time is taken off
            fresh = (lambda: source.detach().clone().requires_grad_()) if train and in_place else lambda: source
            run = lambda: step(fn, fresh(), target, weight, None, train)
            time = seconds(run, device, args.repeats) - (seconds(fresh, device, args.repeats) if train and in_place else 0)
            extra = (peak_bytes(run, device) - train * logit_bytes) / unit      # the gradient, or the copy that became it
            row += f"{time * 1e3:>10.2f}{floors[train] / time:>10.1%}{extra:>10.3f}"
        count, size = collectives.get(name, ("-", 0)) if "Triton" not in name else collectives["this, PyTorch"]
        print(row + f"{count:>12}{size:>12.0f}")


if __name__ == "__main__":
    main()
