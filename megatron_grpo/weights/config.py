"""Settings of Hugging Face checkpoints in and out, and of publishing the weights to the engines."""

from dataclasses import dataclass

from ..settings import ConfigError, setting


@dataclass(frozen=True)
class WeightsConfig:
    hf_checkpoint: str | None = setting(None, "Hugging Face directory: the starting weights, the tokenizer, and the model flags that "
                                              "are not given (those given are checked against its config.json)")
    save_hf: str | None = setting(None, "also write a Hugging Face checkpoint to this directory whenever a checkpoint is saved; "
                                        "{iteration} is filled in")
    weight_sync: str = setting("disk", "how the engines get new weights. disk: safetensors on a file system that they share with the "
                                       "trainer; distributed: broadcast over NCCL (gloo on CPU)", choices=("disk", "distributed"))
    weight_sync_dir: str | None = setting(None, "directory of --weight-sync disk; `weights` in the run directory when not given")
    weight_sync_bucket_size: int = setting(512 * 1024 ** 2, "weights gathered and sent at a time; a larger tensor goes alone",
                                           unit="bytes", aliases=("--update-weight-buffer-size",))
    weight_sync_pause: str = setting(
        "abort", "what happens to running requests. abort: they return what they have; drain: they finish first; retract: they are "
                 "computed again under the new weights; in_place: they go on over the old cache. Only abort and drain keep every "
                 "route and log-prob that of the weights that sampled the token", choices=("abort", "drain", "retract", "in_place"))
    weight_sync_retries: int = setting(2, "further attempts at a failed update before the engine is left out", unit="attempts")
    weight_sync_timeout: int = setting(600, "deadline of one request to an engine, and of one broadcast", unit="seconds")
    weight_sync_check: str = setting("checksum", "after an update, compare checksums of some of each engine's tensors with the trainer's",
                                     choices=("checksum", "none"))
    weight_sync_check_tensors: int = setting(16, "tensors in that sample", unit="tensors")

    def __post_init__(self):
        for name, least in (("weight_sync_bucket_size", 1), ("weight_sync_timeout", 1), ("weight_sync_retries", 0),
                            ("weight_sync_check_tensors", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"--{name.replace('_', '-')} {getattr(self, name)}: give at least {least}")
