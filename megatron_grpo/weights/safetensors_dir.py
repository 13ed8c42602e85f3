"""A directory of safetensors shards, as Hugging Face writes it: read by slices, written atomically."""

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file

from ..settings import ConfigError

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".index.json")


def has_weights(path: str | os.PathLike) -> bool:
    """Whether a directory holds safetensors that can be loaded (and not only a config and a tokenizer)."""
    return (Path(path) / INDEX).is_file() or (Path(path) / SINGLE).is_file()


class SafetensorsDirectory:
    """Tensors of a checkpoint by name; only what is sliced is read.

    Attributes:
        files: tensor name -> file name.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)
        self._open: dict[str, Any] = {}
        if (self.path / INDEX).is_file():
            self.files: dict[str, str] = json.loads((self.path / INDEX).read_text())["weight_map"]
        elif (self.path / SINGLE).is_file():
            self.files = dict.fromkeys(self._file(SINGLE).keys(), SINGLE)
        else:
            raise ConfigError(f"{path} holds neither {INDEX} nor {SINGLE}: give a directory with safetensors weights")
        missing = sorted(name for name in set(self.files.values()) if not (self.path / name).is_file())
        if missing:
            raise ConfigError(f"{path}: the index names files that are not there: {', '.join(missing[:5])}; download or copy them again")

    def slice(self, name: str) -> Any:
        """A lazy view of a tensor: indexing it with slices reads that part."""
        return self._file(self.files[name]).get_slice(name)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.slice(name).get_shape())

    def close(self) -> None:
        self._open.clear()

    def _file(self, name: str):
        if name not in self._open:
            self._open[name] = safe_open(self.path / name, "pt")
        return self._open[name]


class SafetensorsWriter:
    """One rank's part of a directory that several ranks write at the same time.

    Files appear under their final names only in `publish`, when every rank is done; until then all of it lies in
    `<directory>.partial`, which a run that was killed leaves behind and the next one to the same directory removes.
    """

    def __init__(self, directory: str | os.PathLike, rank: int):
        self.directory, self.rank = Path(directory), rank
        self.partial = Path(f"{directory}.partial")
        self.files: dict[str, str] = {}
        self.bytes = 0

    def prepare(self) -> None:
        """On one rank, before any rank writes."""
        shutil.rmtree(self.partial, ignore_errors=True)
        self.partial.mkdir(parents=True)

    def write(self, tensors: Sequence[tuple[str, Any]]) -> None:
        """One shard file of (name, tensor)."""
        name = f"model-{self.rank:05d}-{len(set(self.files.values())):05d}.safetensors"
        save_file({key: tensor.cpu().contiguous() for key, tensor in tensors}, self.partial / name, metadata={"format": "pt"})
        _sync(self.partial / name)
        self.files |= dict.fromkeys((key for key, _ in tensors), name)
        self.bytes += sum(tensor.nbytes for _, tensor in tensors)

    def publish(self, files: dict[str, str], total_bytes: int, config: dict[str, Any], copy_from: str | os.PathLike | None) -> None:
        """On one rank, when all have written: index, config.json, the tokenizer's files of `copy_from`; then the rename."""
        if copy_from is not None:
            for file in sorted(Path(copy_from).iterdir()):
                if file.is_file() and file.name != "config.json" and not file.name.endswith(WEIGHTS):
                    shutil.copy2(file, self.partial / file.name)
        for name, value in (("config.json", config), (INDEX, {"metadata": {"total_size": total_bytes},
                                                              "weight_map": dict(sorted(files.items()))})):
            (self.partial / name).write_text(json.dumps(value, indent=2) + "\n")
            _sync(self.partial / name)
        old = Path(f"{self.directory}.old")
        shutil.rmtree(old, ignore_errors=True)
        if self.directory.exists():
            os.rename(self.directory, old)      # a directory cannot be renamed onto another
        os.rename(self.partial, self.directory)
        shutil.rmtree(old, ignore_errors=True)


def _sync(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())
