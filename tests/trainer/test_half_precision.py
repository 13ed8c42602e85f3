"""bfloat16 training as on GPUs: half-precision logits, float32 main weights, parameters that are gathered late."""

import pytest
import torch

DISTRIBUTED = "--bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather".split()


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    from megatron_grpo.verify import prepare
    return [*prepare(str(tmp_path_factory.mktemp("step")), ["--platform", "cpu", "--algorithm", "grpo", "--use-kl-loss"]), *DISTRIBUTED]


def job_of(flags):
    from megatron_grpo.trainer import loop
    from megatron_grpo.trainer.flags import parse_args
    from megatron_grpo.trainer.model import model_provider
    args = parse_args(flags)
    loop.initialize(args)
    return loop.make_job(args, model_provider)


def main_weights(optimizer):
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    return [p.detach() for part in parts for group in part.shard_fp32_from_float16_groups for p in group if p is not None]


def two_steps(flags):
    """Dtypes of the logits, whether losses have a graph, and the policy's weights after the log-prob passes of the second step."""
    from megatron_grpo.trainer import forward, loop
    seen, graphs = [], []
    compute = forward.vocab_parallel_logprob

    def watched(logits, *args, **kwargs):
        seen.append(logits.dtype)
        return compute(logits, *args, **kwargs)

    forward.vocab_parallel_logprob = watched
    with job_of(flags) as job:
        for _ in range(2):
            batch = loop.rollout(job, 0)
            loop.log_probs(job, batch)
            weights = torch.cat([p.detach().flatten() for p in job.trained.model[0].parameters()])
            graphs += [out.loss.requires_grad for result in [loop.update(job, mbs) for mbs in batch.mini_steps] for out in result.outputs]
    return set(seen), graphs, weights.clone()


def test_logits_losses_and_late_parameters(pool, flags):
    results = pool.run(two_steps, [*flags, "--lr", "0.1"], ranks=2, timeout=400)
    for dtypes, graphs, _ in results:
        assert dtypes == {torch.bfloat16}, "the log-probs read the model's own logits, without a float32 copy"
        assert graphs and not any(graphs), "a finished micro-batch keeps no graph"
    assert torch.equal(results[0][2], results[1][2]), "the reference's pass does not leave one rank with the old weights of another"


def loads_the_reference_after_training(flags):
    from megatron_grpo.trainer.reference import load_reference
    with job_of(flags) as job:
        trained = job.trained
        weights = main_weights(trained.optimizer)
        for w in weights:
            w.mul_(1 + 1e-4)         # as after a step: less than bfloat16 tells
        before = [w.clone() for w in weights]
        load_reference(job.args, trained)
        return all(map(torch.equal, before, weights)), len(weights)


def test_the_reference_leaves_the_main_weights(pool, flags):
    """They have more digits than the model's: a resumed run goes on from them bit for bit."""
    ((same, count),) = pool.run(loads_the_reference_after_training, flags, timeout=400)
    assert same and count
