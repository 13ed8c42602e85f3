"""Settings of packing and of the context-parallel layout."""

from dataclasses import dataclass

from ..settings import ConfigError, setting


@dataclass(frozen=True)
class PackingConfig:
    use_dynamic_batch_size: bool = setting(False, "pack sequences into micro-batches by tokens; without it by --micro-batch-size")
    max_tokens_per_gpu: int | None = setting(
        None, "most tokens of a micro-batch on one GPU: a micro-batch holds this times the context-parallel size", unit="tokens")
    cp_layout: str = setting("zigzag", "split of tokens over context-parallel ranks; contiguous is for attention that gathers its keys",
                             choices=("zigzag", "contiguous"))
    qkv_format: str = setting("thd", "thd packs the sequences of a micro-batch, bshd pads them to a common length", choices=("thd", "bshd"))
    data_pad_size_multiplier: int = setting(
        128, "a rank's packed length (thd) is padded to a multiple of this times the tensor-parallel size", unit="tokens")

    def __post_init__(self):
        if self.use_dynamic_batch_size and self.max_tokens_per_gpu is None:
            raise ConfigError("--use-dynamic-batch-size needs --max-tokens-per-gpu")
        if self.max_tokens_per_gpu is not None and not self.use_dynamic_batch_size:
            raise ConfigError("--max-tokens-per-gpu has no effect without --use-dynamic-batch-size: add it or drop the limit")
        if self.max_tokens_per_gpu is not None and self.max_tokens_per_gpu < 1:
            raise ConfigError(f"--max-tokens-per-gpu {self.max_tokens_per_gpu} must be at least 1")
        if self.use_dynamic_batch_size and self.qkv_format == "bshd":
            raise ConfigError("--qkv-format bshd pads each micro-batch to its longest sequence: drop --use-dynamic-batch-size and set "
                              "--micro-batch-size, or use --qkv-format thd")
        if self.data_pad_size_multiplier < 1:
            raise ConfigError(f"--data-pad-size-multiplier {self.data_pad_size_multiplier} must be at least 1")
