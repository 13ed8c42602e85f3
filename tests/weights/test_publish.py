"""Publishing against engines that follow a script: who gets the weights, who is left out, and that no rank hangs."""

import dataclasses
import threading
import time

import pytest
import torch

from megatron_grpo.settings import ConfigError
from megatron_grpo.weights.config import WeightsConfig
from tests.weights import tiny
from tests.weights.scripted_engine import ScriptedEngine
from tests.weights.test_checkpoints import read_all, same

SETTINGS = WeightsConfig(weight_sync_bucket_size=40_000, weight_sync_timeout=15, weight_sync_check="none", weight_sync_retries=1)
EP2 = ["--expert-model-parallel-size", "2"]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny.write_model("glm4_moe", tmp_path_factory.mktemp("models") / "glm4_moe")


@pytest.fixture
def engines():
    made = []

    def make(count, **kinds):
        made.extend(ScriptedEngine(**kinds) for _ in range(count))
        return made
    yield make
    for engine in made:
        engine.kill()


def publish(path, urls, directory, settings, versions, down_timeout=0.0):
    """Load, then publish once a version; each rank's reports, or the message of the error."""
    from megatron_grpo.rollout.engine import EngineError
    from megatron_grpo.weights import load_hf_checkpoint
    from megatron_grpo.weights.hf_config import read_hf_config
    from megatron_grpo.weights.publish import WeightPublisher
    _, chunks = tiny.start(path, EP2)
    model = tiny.live(path, chunks)
    load_hf_checkpoint(model, path)
    publisher, results = WeightPublisher(model, read_hf_config(path), settings, directory, down_timeout=down_timeout), []
    for version in versions:
        try:
            results.append(dataclasses.replace(publisher.publish(urls, version), seconds=0.0))
        except EngineError as error:
            results.append(str(error))
    publisher.close()
    return results


def run(pool, path, engines, directory, settings=SETTINGS, versions=("1",), urls=(), **more):
    results = pool.run(publish, str(path), [*(e.url for e in engines), *urls], str(directory), settings, versions, ranks=2, timeout=500,
                       **more)
    assert results[0] == results[1], "every rank is told the same"
    return results[0]


def test_disk(pool, path, engines, tmp_path):
    good, hiccup, refuses, stale = engines(4)
    hiccup.faults["/update_weights_from_disk"] = 1
    refuses.faults["/update_weights_from_disk"] = 99
    stale.stale = True
    dead = "http://127.0.0.1:9"
    report, = run(pool, path, [good, hiccup, refuses, stale], tmp_path, urls=[dead])
    assert (set(report.updated), report.attempts, report.version) == ({good.url, hiccup.url}, 2, "1")
    assert set(report.left_out) == {refuses.url, stale.url, dead}
    assert "scripted" in report.left_out[refuses.url] and "weight version 'none'" in report.left_out[stale.url]
    assert "is the server up" in report.left_out[dead]
    assert good.calls == ["/pause_generation", "/update_weights_from_disk", "/continue_generation", "/model_info"]
    assert refuses.calls.count("/continue_generation") == refuses.calls.count("/pause_generation") == 2     # never left paused
    assert good.path == str(tmp_path / "weights-1") and same(read_all(good.path), read_all(path))


def test_engines_that_all_restart_are_waited_for(pool, path, tmp_path):
    gone = ScriptedEngine()
    gone.kill()
    back = []

    def restart():
        while not (tmp_path / "weights-1").exists():
            time.sleep(0.05)
        time.sleep(0.5)     # the first look finds nobody
        back.append(ScriptedEngine(port=gone.server.server_address[1]))
    threading.Thread(target=restart, daemon=True).start()
    report, = run(pool, path, [gone], tmp_path, down_timeout=60.0)
    assert report.updated == (gone.url,) and not report.left_out and back[0].version == "1"
    back[0].kill()


def test_disk_keeps_the_last_two(pool, path, engines, tmp_path):
    reports = run(pool, path, engines(1), tmp_path, versions=("1", "2", "3"))
    assert [r.version for r in reports] == ["1", "2", "3"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["weights-2", "weights-3"]


@pytest.mark.parametrize("mode, calls", [
    ("retract", ["/pause_generation"]), ("drain", ["/flush_cache", "/pause_generation"]), ("in_place", ["/pause_generation"])])
def test_pause_modes(engines, mode, calls):
    from megatron_grpo.weights.control import EngineControl
    engine, = engines(1)
    if mode == "drain":
        engine.faults["/flush_cache"] = 1       # a request still runs at the first look
        calls = ["/flush_cache", *calls]
    EngineControl(engine.url, 10).pause(mode)
    assert engine.calls == calls


def test_no_engine_follows(pool, path, engines, tmp_path):
    engine, = engines(1)
    engine.faults["/pause_generation"] = 99
    message, = run(pool, path, [engine], tmp_path)
    assert message.startswith("no engine could take weights 1") and engine.url in message


def test_control_requests_go_past_a_proxy(engines, monkeypatch):
    from megatron_grpo.weights.control import EngineControl
    engine, = engines(1)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")      # nobody is there
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    EngineControl(engine.url, 10).pause("abort")
    assert engine.calls == ["/pause_generation"]


DISTRIBUTED = dataclasses.replace(SETTINGS, weight_sync="distributed")


def test_broadcast(pool, path, engines, tmp_path):
    first, second = engines(2)
    reports = run(pool, path, [first, second], tmp_path, DISTRIBUTED, ("1", "2"))
    assert [(r.updated, r.left_out, r.attempts) for r in reports] == [((first.url, second.url), {}, 1)] * 2
    for engine in (first, second):
        assert same(engine.weights, read_all(path)) and engine.version == "2" and not engine.session
        assert engine.calls.count("/init_weights_update_group") == 1        # the group outlives an update
        order = [c for c in dict.fromkeys(engine.calls)]
        assert order == ["/init_weights_update_group", "/pause_generation", "/begin_weight_update", "/update_weights_from_distributed",
                         "/end_weight_update", "/flush_cache", "/update_weight_version", "/continue_generation", "/model_info",
                         "/destroy_weights_update_group"]


def test_broadcast_around_a_dead_engine(pool, path, engines, tmp_path):
    engine, = engines(1)
    dead = "http://127.0.0.1:9"
    report, = run(pool, path, [engine], tmp_path, DISTRIBUTED, urls=[dead])
    assert report.updated == (engine.url,) and set(report.left_out) == {dead} and report.attempts == 1
    assert same(engine.weights, read_all(path))


def test_broadcast_that_breaks_in_the_middle_is_repeated(pool, path, engines, tmp_path):
    first, second = engines(2)
    second.faults["/update_weights_from_distributed"] = 1
    report, = run(pool, path, [first, second], tmp_path, DISTRIBUTED)
    assert report.updated == (first.url, second.url) and report.attempts == 2
    assert same(first.weights, read_all(path)) and same(second.weights, read_all(path))
    assert not first.session and not second.session


def test_broadcast_into_an_engine_that_hangs(pool, path, engines, tmp_path):
    first, second = engines(2)
    second.slow["/update_weights_from_distributed"] = 12
    report, = run(pool, path, [first, second], tmp_path, dataclasses.replace(DISTRIBUTED, weight_sync_timeout=8))
    assert report.updated == (first.url, second.url) and report.attempts == 2
    assert same(first.weights, read_all(path)) and same(second.weights, read_all(path))


def test_broadcast_refuses_what_sglang_cannot(pool, path, engines, tmp_path):
    engine, = engines(1, dp_size=2)
    message, = run(pool, path, [engine], tmp_path, DISTRIBUTED)
    assert "--weight-sync disk" in message


# ---- checksums ------------------------------------------------------------------------------------------------------------

def checksums_of(path, tp_size, spoil=None):
    """What an engine of `tp_size` ranks, 4 heads each of the model's 8 at 2, answers for layer 2."""
    import hashlib
    weights, prefix, ranks = read_all(path), "model.layers.2.", []
    q, k, v = (weights[f"{prefix}self_attn.{x}_proj.weight"] for x in "qkv")
    for rank in range(tp_size):
        rows = lambda t: t.chunk(tp_size)[rank]
        own = {f"{prefix}self_attn.qkv_proj.weight": torch.cat([rows(q), rows(k), rows(v)]),
               f"{prefix}self_attn.o_proj.weight": weights[f"{prefix}self_attn.o_proj.weight"].chunk(tp_size, 1)[rank],
               f"{prefix}mlp.gate.weight": weights[f"{prefix}mlp.gate.weight"].bfloat16()}
        if spoil == rank:
            own[f"{prefix}self_attn.o_proj.weight"] = own[f"{prefix}self_attn.o_proj.weight"] + 1e-6
        hashes = {name: hashlib.sha256(t.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16] for name, t in own.items()}
        ranks.append({"checksums": hashes, "parallelism_info": [{"role": "target", "tp_rank": rank, "tp_size": tp_size, "dp_size": 1}]})
    return ranks


@pytest.mark.parametrize("tp_size", [1, 2])
def test_checksums(engines, path, tp_size):
    from megatron_grpo.rollout.engine import EngineError
    from megatron_grpo.weights.check import sample, verify_checksums
    from megatron_grpo.weights.control import EngineControl
    weights = read_all(path)
    chosen = sample(weights, 1000, 4, "any")
    assert chosen["model.layers.0.self_attn.o_proj.weight"] == ("model.layers.0.self_attn.o_proj.weight",)
    assert "model.layers.0.mlp.gate.weight" not in chosen and len(chosen) == 4 * 7 - 1      # layer 0 is dense
    assert len(sample(weights, 5, 4, "1")) == 5 and sample(weights, 5, 4, "1") != sample(weights, 5, 4, "2")
    good, spoilt, foreign = engines(3)
    good.checksums, spoilt.checksums = checksums_of(path, tp_size), checksums_of(path, tp_size, spoil=tp_size - 1)
    foreign.checksums = [{"checksums": {"other": "0"}, "parallelism_info": [{"tp_rank": 0, "tp_size": 1, "dp_size": 1}]}]
    assert verify_checksums(EngineControl(good.url, 10), chosen, weights.__getitem__, 16) == 3 * tp_size
    with pytest.raises(EngineError, match=f"o_proj.weight on rank {tp_size - 1}"):
        verify_checksums(EngineControl(spoilt.url, 10), chosen, weights.__getitem__, 16)
    with pytest.raises(EngineError, match="to compare"):
        verify_checksums(EngineControl(foreign.url, 10), chosen, weights.__getitem__, 16)


def test_settings_are_checked():
    with pytest.raises(ConfigError, match="--weight-sync-bucket-size 0"):
        WeightsConfig(weight_sync_bucket_size=0)
