"""A real SGLang server follows the trainer: same log-probs after an update, whichever way the weights went."""

import pytest
import torch

from megatron_grpo.weights.config import WeightsConfig
from tests.weights import tiny

LAYOUT = ["--tensor-model-parallel-size", "2", "--sequence-parallel", "--expert-model-parallel-size", "2", "--expert-tensor-parallel-size", "1"]
SEQUENCES = torch.randint(3, 512, (32, 24), generator=torch.Generator().manual_seed(5))


@pytest.fixture
def server(sglang_server):
    """The session's server; its own weights are put back afterwards."""
    from megatron_grpo.weights.control import EngineControl
    control = EngineControl(sglang_server.url, 120)
    version = control.weight_version()
    yield sglang_server
    control.update_from_disk(str(sglang_server.model_path), version, flush=True)


def publish(path, url, directory, mode):
    """Publish changed weights; this rank's part of the trainer's logits [B, S, V / tp]."""
    from megatron_grpo.weights import load_hf_checkpoint
    from megatron_grpo.weights.hf_config import read_hf_config
    from megatron_grpo.weights.publish import WeightPublisher
    _, chunks = tiny.start(path, LAYOUT)
    model = tiny.live(path, chunks)
    load_hf_checkpoint(model, path)
    for shard in model.shards():
        shard.tensor.mul_(1.1).add_(0.01)
    publisher = WeightPublisher(model, read_hf_config(path), WeightsConfig(weight_sync=mode, weight_sync_bucket_size=2 ** 18), directory)
    report = publisher.publish([url], f"{mode}-7")
    publisher.close()
    with torch.no_grad():
        return report, chunks[0].eval()(SEQUENCES, torch.arange(SEQUENCES.shape[1]).expand(len(SEQUENCES), -1), None)


@pytest.mark.engine
@pytest.mark.parametrize("mode", ["disk", "distributed"])
def test_log_probs_after_publishing(pool, server, tmp_path, mode):
    from megatron_grpo.weights.control import EngineControl
    engine = EngineControl(server.url, 120)
    before = torch.tensor(engine.logprobs(SEQUENCES.tolist()))
    (report, left), (_, right), *_ = pool.run(publish, str(server.model_path), server.url, str(tmp_path), mode, ranks=4, timeout=500)
    logp = torch.cat([left, right], -1).log_softmax(-1)[:, :-1].gather(-1, SEQUENCES[:, 1:, None])[..., 0]
    assert report.updated == (server.url,) and report.attempts == 1
    assert engine.weight_version() == f"{mode}-7"
    after = torch.tensor(engine.logprobs(SEQUENCES.tolist()))
    assert (after - logp).abs().max() < 1e-4
    assert (before - logp).abs().max() > 0.1        # the old weights would have shown
