"""What a checkpoint directory says, whatever a killed run left in it."""

import json
import multiprocessing
import os
import signal
from types import SimpleNamespace

import pytest

from megatron_grpo.settings import ConfigError
from megatron_grpo.trainer import checkpoint
from megatron_grpo.trainer.checkpoint import POINTER, complete_iterations, leader_file, load_leader_states, prune, repair_pointer
from megatron_grpo.trainer.config import TrainerConfig
from megatron_grpo.trainer.resharding import regrouped
from megatron_grpo.trainer.sources import LeaderState, RecordedSource, SupervisedSource, restore
from tests.processes import ends


@pytest.fixture
def directory(tmp_path):
    """Checkpoints 2 and 4 complete, 6 cut off in its files, 8 in its metadata; the pointer at 4."""
    for iteration in (2, 4, 6, 8):
        where = tmp_path / f"iter_{iteration:07d}"
        where.mkdir()
        (where / "__0_0.distcp").write_text("x")
        for rank in range(2):
            checkpoint._write_atomically(iteration + rank, leader_file(str(tmp_path), iteration, rank, 2))
        if iteration <= 4:
            (where / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
    (tmp_path / "iter_0000008" / "metadata.json").write_text("")
    (tmp_path / POINTER).write_text("4")
    return tmp_path


def pointer(directory):
    return (directory / POINTER).read_text()


def left(directory):
    return sorted(int(path.name[5:]) for path in directory.glob("iter_*")), sorted(int(path.name[5:]) for path in directory.glob("grpo/iter_*"))


def test_complete_iterations(directory):
    assert complete_iterations(str(directory)) == [2, 4]
    assert complete_iterations(str(directory / "none")) == []


@pytest.mark.parametrize("torn", ["", "\0\0", "1", "6x", None])
def test_a_torn_pointer_is_repaired(directory, torn):
    (directory / POINTER).unlink() if torn is None else (directory / POINTER).write_text(torn)
    repair_pointer(str(directory))
    assert pointer(directory) == "4"


@pytest.mark.parametrize("good", ["2", "release", "6"])       # 6: another format, whose completeness is not ours to judge
def test_a_good_pointer_is_left_alone(directory, good):
    (directory / POINTER).write_text(good)
    repair_pointer(str(directory))
    assert pointer(directory) == good


def test_a_pointer_without_any_checkpoint_is_not_a_fresh_start(tmp_path):
    repair_pointer(str(tmp_path))
    repair_pointer(None)
    assert not (tmp_path / POINTER).exists()
    (tmp_path / POINTER).write_text("12")
    with pytest.raises(ConfigError, match="names checkpoint 12, which is not there"):
        repair_pointer(str(tmp_path))


def test_prune_keeps_what_is_pointed_at_and_all_after_it(directory):
    prune(str(directory), 2)
    assert left(directory) == ([2, 4, 6, 8], [2, 4, 6, 8])
    prune(str(directory), 1)
    assert left(directory) == ([4, 6, 8], [4, 6, 8])
    (directory / POINTER).write_text("8")
    prune(str(directory), 1)       # 6 was cut off, and lies before the pointer
    assert left(directory) == ([4, 8], [4, 8])


def test_leader_states(directory):
    assert load_leader_states(str(directory), 4) == [4, 5]
    os.remove(leader_file(str(directory), 4, 1, 2))
    for iteration in (4, 10):
        with pytest.raises(ConfigError, match=f"step {iteration}.*--finetune"):
            load_leader_states(str(directory), iteration)


def test_a_checkpoint_of_another_kind_of_run_is_refused():
    def source():
        return SupervisedSource(None, None, None, None, 0, 1)
    args = SimpleNamespace(load="ckpt", iteration=4, grpo=SimpleNamespace(
        trainer=SimpleNamespace(ref_load=None), weights=SimpleNamespace(hf_checkpoint="hf")))
    ours, reference = source(), SimpleNamespace(identity="b")
    restore(ours, [LeaderState("SupervisedSource", {"position": 7}, None)], args, None)
    assert ours.position == 7
    with pytest.raises(ConfigError, match=r"another kind of run \(EngineSource.*--finetune"):
        restore(source(), [LeaderState("EngineSource", {}, None)], args, None)
    with pytest.raises(ConfigError, match="another reference.*--ref-load"):
        restore(source(), [LeaderState("SupervisedSource", {"position": 7}, "a")], args, reference)
    args.grpo.trainer.ref_load = "hf"       # said to be meant
    restore(source(), [LeaderState("SupervisedSource", {"position": 7}, "a")], args, reference)
    restore(RecordedSource("", 0, 1), [LeaderState("EngineSource", {}, None)], args, None)


@pytest.mark.parametrize("flags, fix", [
    (dict(keep=2, ckpt_format="torch"), "--keep-checkpoints"), (dict(async_save=True, ckpt_format="torch"), "--ckpt-format torch"),
    (dict(async_save=True, async_strategy="nvrx"), "--async-strategy mcore")])
def test_a_save_that_would_fail_is_refused_at_the_start(flags, fix):
    args = dict(save="x", async_save=False, async_strategy="mcore", ckpt_format="torch_dist") | flags
    trainer = TrainerConfig(keep_checkpoints=args.pop("keep", None))
    with pytest.raises(ConfigError, match=fix):
        checkpoint.check(SimpleNamespace(**args), trainer)
    checkpoint.check(SimpleNamespace(**args | {"save": None}), trainer)


def test_optimizer_states_of_one_and_of_two():
    def group(decay, expert):
        return {"wd_mult": decay, "is_expert_parallel": expert, "step": 3}
    one = {"optimizer": {"param_groups": [group(1, False), group(0, False)]}, "param_state_sharding_type": "fully_reshardable"}
    two = {0: one, 1: one | {"optimizer": {"param_groups": [group(1, True)]}}}
    dense, experts = {"param_state": "dense"}, {"param_state": "experts"}
    assert regrouped(one | dense, 1) == one | dense
    assert regrouped({k: two[k] | part for k, part in enumerate((dense, experts))}, 2)[1]["param_state"] == "experts"

    split = regrouped(one | {0: dense, 1: experts}, 2)
    assert sorted(split) == [0, 1] and split[1]["param_state"] == "experts" and split[1]["param_state_sharding_type"] == "fully_reshardable"
    assert all(g in split[1]["optimizer"]["param_groups"] for g in (group(1, True), group(0, True), group(1, False)))

    whole = regrouped({"param_state": "all"} | two, 1)
    assert whole["param_state"] == "all" and not {0, 1} & whole.keys()
    assert whole["optimizer"]["param_groups"] == [group(1, False), group(0, False), group(1, True)]


def queue_of_a_rank():
    """(pid of the manager, what came through the queue), after the signals by which Slurm asks a whole step to stop."""
    checkpoint.start_result_queue()
    from megatron.core.dist_checkpointing.strategies.filesystem_async import get_write_results_queue
    queue, (manager,) = get_write_results_queue(), multiprocessing.active_children()
    for number in (signal.SIGTERM, signal.SIGUSR1):
        os.kill(manager.pid, number)
    queue.put([1.0, 1.0])
    return manager.pid, queue.get_nowait()


def test_the_writers_queue_survives_a_stop_signal_and_not_its_rank(pool):
    [(manager, answer)] = pool.run(queue_of_a_rank)     # the rank then ends without clean-up, as one that is killed
    assert answer == [1.0, 1.0]
    assert ends(manager, 10)
