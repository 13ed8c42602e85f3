"""What runs once a micro-batch, on a GPU that is pretended: tensors have shapes, dtypes and devices, but no values.

So a host tensor that meets one of the device raises, and so does whatever waits for the device to read a value. Collectives check
that they are given the device's tensors, as NCCL does.
"""

from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode

from megatron_grpo.advantages import AdvantageInputs, compute_advantages
from megatron_grpo.config import AdvantageConfig, CorrectionConfig, KLConfig
from megatron_grpo.logprobs import SupportMask, vocab_parallel_logprob
from megatron_grpo.logprobs.chunked import gradient
from megatron_grpo.logprobs.vocab_parallel import Shard
from megatron_grpo.losses.policy_loss import policy_loss
from megatron_grpo.losses.renormalize import prepare_step
from megatron_grpo.parallel.layout import Layout
from megatron_grpo.routing.mismatch import compare, mismatch_metrics
from megatron_grpo.routing.placement import RoutesShare
from tests.losses.cases import config, random_batch
from tests.losses.recipes import OF_THE_MICRO_BATCH, RECIPES

GPU = torch.device("cuda:0")


class Pair:
    """A group of two ranks, of which this is the first."""

    def size(self):
        return 2

    def rank(self):
        return 0


@contextmanager
def gpu():
    """Yields a function that moves tensors, and whatever holds some, to the pretended device."""
    def checked(*tensors, **_):
        assert all(t.device == GPU for t in tensors if isinstance(t, torch.Tensor)), "a host tensor in a collective of the device"

    with FakeTensorMode() as mode, mock.patch.multiple(
            dist, all_reduce=checked, all_gather_into_tensor=checked, get_world_size=lambda group=None: 2, get_rank=lambda group=None: 0):
        def moved(x):
            if isinstance(x, torch.Tensor):
                return (x if isinstance(x, FakeTensor) else mode.from_tensor(x)).detach().to(GPU)
            if isinstance(x, SupportMask):
                return replace(x, ids=moved(x.ids), row=moved(x.row), offsets=x.offsets.tolist())     # read on the host
            if is_dataclass(x):
                return replace(x, **{f.name: moved(getattr(x, f.name)) for f in fields(x)})
            return x

        yield moved


def on_gpu(x):
    assert x.device == GPU
    return True


def test_the_pretended_device_tells():
    host = torch.arange(3)
    with gpu() as moved:
        with pytest.raises(RuntimeError, match="same device"):
            moved(host) + torch.arange(3)
        with pytest.raises(DataDependentOutputException):
            bool(moved(host).sum() > 0)
        with pytest.raises(AssertionError, match="a host tensor"):
            dist.all_reduce(torch.zeros(1))


@pytest.mark.parametrize("name", sorted(RECIPES.keys() - OF_THE_MICRO_BATCH))       # these say that they wait
def test_policy_loss(name):
    x = replace(random_batch([5, 7, 3, 9], dtype=torch.float32), cp_group=Pair())
    with gpu() as moved:
        out = policy_loss(moved(x), config(**RECIPES[name]))
        assert on_gpu(out.loss) and all(on_gpu(v) for pair in out.metrics.values() for v in pair) and all(map(on_gpu, out.maxima.values()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("keep", [False, True])
def test_logprobs_in_chunks(dtype, keep):
    mask = SupportMask.from_lengths(torch.arange(6), torch.tensor([1, 0, 2, 3] + [0] * 9)) if keep else None
    logits, target = torch.zeros(13, 48, dtype=dtype), torch.zeros(13, dtype=torch.int64)
    with gpu() as moved, torch.no_grad():
        logits, target, mask = moved(logits), moved(target), moved(mask)
        logp, entropy = vocab_parallel_logprob(logits, target, tp_group=Pair(), vocab_size=90, with_entropy=True, keep_mask=mask, kernel=False)
        assert on_gpu(logp) and on_gpu(entropy) and logp.dtype == entropy.dtype == torch.float32
        gradient(logits, logits, target, Shard(0, 41, 1.0, mask, 4), logp, logp, logp, logp, entropy)


ADVANTAGES = [dict(advantage_estimator=name) for name in ("grpo", "rloo", "reinforce", "opo", "gpg", "passk", "reinforce_plus_plus_baseline")] + [
    dict(advantage_estimator="reinforce_plus_plus", kl_coef=0.1, gamma=0.9, gamma_tool_tokens=True, normalize_advantages=True),
    dict(advantage_estimator="reinforce_plus_plus", kl_coef=0.1), dict(advantage_std="batch", advantage_clip=1.0)]


@pytest.mark.parametrize("settings", ADVANTAGES, ids=lambda s: "-".join(map(str, s.values())))
def test_advantages(settings):
    """But for finding the groups of a rollout (torch.unique), and GDPO's look for rewards that are missing, nothing waits."""
    layout, n = Layout((9, 4, 7), cp_size=2), 3
    tokens = layout.local_tokens
    logp_T = torch.zeros(tokens)
    inputs = AdvantageInputs(
        reward_N=torch.ones(n), group_N=torch.arange(n), valid_N=torch.ones(n, dtype=torch.bool), sample_S=torch.arange(n), seq_T=layout.seq_ids(),
        mask_T=torch.ones(tokens, dtype=torch.bool), num_seqs=n, rollout_N=torch.arange(n), old_logp_T=logp_T, ref_logp_T=logp_T,
        chunk_T=layout.chunk_ids(), columns=(layout.columns(0), layout.columns(1)), cp_group=Pair(), dp_cp_group=Pair())
    settings = SimpleNamespace(advantage=AdvantageConfig(**settings), kl=KLConfig(), correction=CorrectionConfig())
    groups = lambda x, return_inverse, dim=None: (x[..., :2], torch.zeros_like(x.reshape(-1)[:n]))
    with gpu() as moved, mock.patch.object(torch, "unique", groups):
        advantage_T, metrics = compute_advantages(moved(inputs), settings)
        assert on_gpu(advantage_T) and all(on_gpu(v) for pair in metrics.values() for v in pair)


def test_a_step_is_prepared_with_one_wait():
    """For the denominators of the step, after the all-reduce; not in its micro-batches."""
    x = replace(random_batch([5, 7, 3, 9], dtype=torch.float32), cp_group=Pair())
    settings = config(correction=dict(rejection=("token_k3=..0.2",), renormalize_masked=True))
    place_S = torch.arange(4)
    with gpu() as moved, mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as reduced, pytest.raises(DataDependentOutputException):
        prepare_step([moved(x)] * 3, settings, [moved(place_S)] * 3, [moved(place_S)] * 3, 4, 4, Pair())
    assert reduced.call_count == 2 * 3 + 1      # of each micro-batch what the rules ask of sequences, and their kept tokens; and the step's


@pytest.mark.parametrize("missing", [frozenset(), frozenset([4])])
def test_replay(missing):
    from megatron_grpo.trainer.router_replay import Forward
    routes = RoutesShare(torch.zeros(13, 2, 2, dtype=torch.int8), (2, 4), missing)
    scores, unrouted_T = torch.zeros(13, 8), torch.zeros(13, dtype=torch.bool)
    with gpu() as moved:
        held = replace(routes, experts_TLK=moved(routes.experts_TLK).cpu())            # on the host until the forward
        scores, unrouted_T = moved(scores), moved(unrouted_T)
        native = lambda: scores.topk(2).indices
        replayed = Forward(held, True, True, unrouted_T, False, 2)
        recorded = Forward(None, True, False, unrouted_T, False, 2)
        assert all(on_gpu(forward.experts(layer, scores, native)) for forward in (replayed, recorded) for layer in (2, 4))
        part = compare(held, replayed.share(replayed.native), unrouted_T)
        assert all(on_gpu(v) for pair in mismatch_metrics([part, part], Pair()).values() for v in pair)


def test_a_microbatch_is_on_its_device():
    """All of it but the boundaries of the sampling mask's lists, which are read on the host."""
    from megatron_grpo.losses.inputs import StepCounts
    from megatron_grpo.trainer.microbatch import PackedSamples, place
    meta, one = torch.device("meta"), np.ones(2, np.float32)
    packed = PackedSamples(sample_ids=[3, 4], lengths=[5, 4], prompt_lengths=[2, 2], tokens=np.arange(9), mask_R=np.ones(5, bool),
                           rollout_logp_R=np.zeros(5, np.float32), sample_S=np.arange(2), rollout_tokens_S=one, prompt_tokens_S=one,
                           support=(np.arange(5, dtype=np.int32), np.ones(5, np.int32)))
    mb = place(packed, (0, 0), Layout((5, 4), cp_size=2, tp_size=2, multiple=4), 1, 1, StepCounts(5.0, 2.0, 2.0, 2.0), meta)
    tensors = {name: value for part in (mb, mb.packed_seq_params, mb.keep_mask) for name, value in vars(part).items()
               if isinstance(value, torch.Tensor)}
    assert len(tensors) > 18 and {name for name, value in tensors.items() if value.device != meta} == {"offsets"}
