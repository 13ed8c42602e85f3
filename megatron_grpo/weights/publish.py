"""Publish the trainer's weights to the engines: gather, send, verify; retry, and leave out who cannot follow."""

import logging
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..rollout.engine import EngineError
from ..settings import ConfigError
from .broadcast import BroadcastGroup, send_all
from .check import can_be_sampled, sample, verify_checksums
from .config import WeightsConfig
from .control import EngineControl, EnginesFailed, failures_of, on_each, raise_failures
from .export import Bucket, iterate_hf_tensors
from .live import LiveModel
from .safetensors_dir import SafetensorsDirectory
from .save import save_hf_checkpoint

logger = logging.getLogger(__name__)
POLL = 5.0      # seconds between two looks when no engine answers
Failures = dict[EngineControl, EngineError]


@dataclass(frozen=True)
class PublishReport:
    """What an update did; the same on every rank.

    Attributes:
        version: weight version that the engines in `updated` now answer with.
        updated: urls of the engines that hold the new weights.
        left_out: url -> reason; these must not be sampled from until an update reaches them.
        attempts: attempts that it took.
        nbytes: bytes of the weights.
        seconds: time of the whole update.
    """

    version: str
    updated: tuple[str, ...]
    left_out: dict[str, str] = field(default_factory=dict)
    attempts: int = 1
    nbytes: int = 0
    seconds: float = 0.0


class WeightPublisher:
    """Publishes one model to a fleet of engines. Building it and `publish` are collective over all ranks.

    Args:
        model: the live model.
        config: its config.json.
        settings: how to publish.
        directory: where --weight-sync disk writes, on a file system that trainer and engines share.
        api_key: of the engines.
        down_timeout: longest wait for a first engine when none answers, e.g. because they restart [s].
    """

    def __init__(self, model: LiveModel, config: dict[str, Any], settings: WeightsConfig, directory: str | Path,
                 api_key: str | None = None, down_timeout: float = 0.0):
        _refuse_what_sglang_cannot_serve(config)
        self.model, self.config, self.settings, self.api_key, self.down_timeout = model, config, settings, api_key, down_timeout
        self.directory = Path(directory).absolute()
        self.current: Path | None = None        # directory of the newest complete weights
        self._engines: dict[str, EngineControl] = {}
        self._broadcast: BroadcastGroup | None = None
        # ranks that do not publish wait here for rank 0, which may wait for engines
        patience = settings.weight_sync_timeout * 8 * (settings.weight_sync_retries + 1) + down_timeout
        self._control: Any = dist.new_group(backend="gloo", timeout=timedelta(seconds=patience))
        names: list[list[str]] = [[]] * dist.get_world_size()
        dist.all_gather_object(names, [n for n in model.hf_names() if can_be_sampled(n)], group=self._control)  # type: ignore[arg-type]
        self._sampled_from = set().union(*names)

    def publish(self, urls: Sequence[str], version: str) -> PublishReport:
        """Bring the engines to the live model's weights.

        Args:
            urls: the engines; rank 0's count.
            version: the new weight version, which the engines put on what they generate.

        Raises:
            EngineError: no engine could follow; on every rank.
            ConfigError: the weights could not be written; on every rank.
        """
        start, first = time.monotonic(), dist.get_rank() == 0
        pending = [self._engine(url) for url in urls] if first else []
        updated: list[str] = []
        left_out: dict[str, str] = {}
        attempt, nbytes, more = 0, 0, True
        if self.settings.weight_sync == "disk":
            nbytes = self._write(version)
        while more:
            attempt += 1
            # a dead engine is left out at once; the rest of a broadcast that it broke tries again without it
            silent = self._silent(pending, 0.0 if updated else self.down_timeout)
            left_out |= {engine.url: str(error) for engine, error in silent.items()}
            pending = [engine for engine in pending if engine not in silent]
            if self.settings.weight_sync == "disk":
                failures = failures_of(on_each(pending, lambda engine: self._update_from_disk(engine, version)))
            else:
                failures, nbytes = self._send(pending, version)
            updated += [engine.url for engine in pending if engine not in failures]
            pending = list(failures)
            for error in failures.values():
                logger.warning("weights %s, attempt %d: %s", version, attempt, error)
            if attempt > self.settings.weight_sync_retries:
                left_out |= {engine.url: str(error) for engine, error in failures.items()}
                pending = []
            more = self._from_rank0(bool(pending))
        report = self._from_rank0(PublishReport(version, tuple(updated), left_out, attempt, nbytes, time.monotonic() - start))
        if first:
            for url, reason in report.left_out.items():
                logger.error("weights %s: %s is left out: %s", version, url, reason)
            logger.info("weights %s: %d engines, %.1f MB in %.2f s", version, len(updated), nbytes / 1e6, report.seconds)
        if not report.updated:
            raise EngineError(f"no engine could take weights {version}: {'; '.join(report.left_out.values()) or 'there is none'}")
        return report

    def _silent(self, engines: Sequence[EngineControl], patience: float) -> Failures:
        """Those that do not answer. While none does, they are asked again for `patience` seconds."""
        end = time.monotonic() + patience
        while len(silent := failures_of(on_each(engines, lambda engine: engine.ping()))) == len(engines) and time.monotonic() < end and engines:
            logger.warning("no engine answers; waiting for one: %s", "; ".join(map(str, silent.values())))
            time.sleep(min(POLL, patience))
        return silent

    def close(self) -> None:
        """Leave the broadcast group. The newest weights stay on disk: an engine that reloads needs them."""
        self._leave_group(broken=False)

    # ---- disk ---------------------------------------------------------------------------------------------------------

    def _write(self, version: str) -> int:
        """All ranks write; the weights before the last are deleted, because an engine may still be reading the last."""
        target = self.directory / f"weights-{version}"
        nbytes = save_hf_checkpoint(self.model, target, self.config, self.settings.weight_sync_bucket_size)
        if dist.get_rank() == 0:
            for old in self.directory.glob("weights-*"):
                if old not in (target, self.current):
                    shutil.rmtree(old, ignore_errors=True)
        self.current = target
        return nbytes

    def _update_from_disk(self, engine: EngineControl, version: str) -> None:
        assert self.current is not None, "publish writes before it updates"
        mode = self.settings.weight_sync_pause
        engine.pause(mode)
        try:
            engine.update_from_disk(str(self.current), version, flush=mode != "in_place")
        finally:
            engine.resume()
        files = SafetensorsDirectory(self.current)
        self._verify(engine, version, lambda name: files.slice(name)[:])

    # ---- broadcast ----------------------------------------------------------------------------------------------------

    def _send(self, engines: list[EngineControl], version: str) -> tuple[Failures, int]:
        """One attempt of all ranks: gather, and broadcast from rank 0. Once it has begun, every rank draws every bucket whatever happens."""
        failures: Failures = {}
        nbytes, kept = 0, dict[str, torch.Tensor]()
        try:
            if engines:
                self._prepare(engines)
        except EngineError as error:
            failures = self._cut_off(engines, error)
        # The others wait for the engines here: in a bucket's collectives NCCL would take them for hung.
        if self._from_rank0(bool(engines) and not failures):
            buckets = iterate_hf_tensors(self.model, self.settings.weight_sync_bucket_size)
            try:
                if engines:
                    nbytes = self._broadcast_to(engines, _keeping(buckets, self._chosen(version), kept), version)
            except EngineError as error:
                failures = self._cut_off(engines, error)
            for _ in buckets:
                pass
        unverified = [engine for engine in engines if engine not in failures]
        return failures | failures_of(on_each(unverified, lambda engine: self._verify(engine, version, kept.__getitem__))), nbytes

    def _cut_off(self, engines: list[EngineControl], error: EngineError) -> Failures:
        """Whoever is not known to have failed was cut off in the middle."""
        self._leave_group(broken=True)
        known = error.failures if isinstance(error, EnginesFailed) else {}
        return {engine: known.get(engine, error) for engine in engines}

    def _prepare(self, engines: list[EngineControl]) -> None:
        """A group with these engines, which generate nothing and await an update."""
        if self._broadcast is not None and self._broadcast.engines != engines:
            self._leave_group(broken=False)
        if self._broadcast is None:
            self._broadcast = BroadcastGroup(engines, self.model.device, self.settings.weight_sync_timeout)
        try:
            on_each(engines, lambda engine: engine.pause(self.settings.weight_sync_pause), must=True)
            on_each(engines, lambda engine: engine.begin_update(), must=True)
        except EngineError:
            on_each(engines, lambda engine: engine.resume())
            raise

    def _broadcast_to(self, engines: list[EngineControl], buckets: Iterator[Bucket], version: str) -> int:
        assert self._broadcast is not None
        try:
            nbytes = send_all(self._broadcast, buckets)
            flush = self.settings.weight_sync_pause != "in_place"
            on_each(engines, lambda engine: engine.finish_update(version, flush), must=True)
        finally:
            resumed = on_each(engines, lambda engine: engine.resume())
        raise_failures(resumed)
        return nbytes

    def _leave_group(self, broken: bool) -> None:
        if self._broadcast is not None:
            self._broadcast.close(broken)
            self._broadcast = None

    # ---- common -------------------------------------------------------------------------------------------------------

    def _verify(self, engine: EngineControl, version: str, tensor: Callable[[str], torch.Tensor]) -> None:
        """The engine answers with the new version and holds the new weights."""
        if (answers := engine.weight_version()) != version:
            raise EngineError(f"{engine.url} still answers with weight version {answers!r} after an update to {version!r}")
        if self.settings.weight_sync_check == "checksum":
            verify_checksums(engine, self._chosen(version), tensor, self.model.geometry.head_dim)

    def _chosen(self, version: str) -> dict[str, tuple[str, ...]]:
        return sample(self._sampled_from, self.settings.weight_sync_check_tensors, self.model.geometry.num_layers, version)

    def _engine(self, url: str) -> EngineControl:
        return self._engines.setdefault(url, EngineControl(url, self.settings.weight_sync_timeout, self.api_key))

    def _from_rank0(self, value):
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self._control)
        return box[0]


def _keeping(buckets: Iterator[Bucket], chosen: dict[str, tuple[str, ...]], kept: dict[str, torch.Tensor]) -> Iterator[Bucket]:
    """The same buckets; the tensors that will be compared are kept on the host."""
    wanted = {name for names in chosen.values() for name in names}
    for bucket in buckets:
        kept.update((name, tensor.cpu()) for name, tensor in bucket if name in wanted)
        yield bucket


def _refuse_what_sglang_cannot_serve(config: dict[str, Any]) -> None:
    """SGLang builds every layer of a Qwen MoE model as a MoE layer and says nothing about the weights it then lacks."""
    dense = config.get("mlp_only_layers") or (config.get("decoder_sparse_step") or 1) > 1
    if dense and config["architectures"][0] in ("Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM"):
        raise ConfigError(f"{config['architectures'][0]} with dense layers (mlp_only_layers {config.get('mlp_only_layers')}, "
                          f"decoder_sparse_step {config.get('decoder_sparse_step')}): SGLang serves random experts there. Use "
                          "--moe-layer-freq 1, or Glm4MoeForCausalLM, whose first layers may be dense")
