"""The trainer's link to the inference engines: start or find them, check them, publish weights to them.

Every rank has a link, because publishing gathers weights from all of them. Only leaders hold a client, and only the
first rank of a job that launches its own server holds the server. Whoever waits for a server waits in the control groups: a collective
of NCCL would be taken for hung after --distributed-timeout-minutes.
"""

import os
import shutil
import tempfile

import torch.distributed as dist

from ..rollout.client import SGLangClient
from ..rollout.responses import ServedModel
from ..rollout.server import LocalServer
from ..weights.fp8 import serving_arguments
from ..weights.hf_config import read_hf_config
from ..weights.publish import WeightPublisher
from .build import Trained
from .distribute import on_leaders
from .groups import ControlGroups
from .sources import EventLoop


class EngineLink:
    """`launch`, `connect`, `publish` and `close` are called by every rank, in this order, and so is the constructor.

    Args:
        directory: of the server's log and of the weights; None makes one on the first rank's node, which `close` removes.
    """

    def __init__(self, args, groups: ControlGroups, directory: str | None):
        self.args, self.settings, self.groups = args, args.grpo, groups
        self.temporary = None if directory or dist.get_rank() else tempfile.mkdtemp(prefix="run-")
        box = [directory or self.temporary]
        dist.broadcast_object_list(box, src=0)      # all ranks write their part of the weights there
        self.directory: str = box[0]
        self.server: LocalServer | None = None
        self.client: SGLangClient | None = None
        self.events: EventLoop | None = None
        self.publisher: WeightPublisher | None = None
        self.urls: list[str] = list(self.settings.engine.server_urls)

    def launch(self) -> None:
        """Start the local server without waiting for it: it loads while Megatron builds the model."""
        urls = self.groups.over_leaders(on_leaders(self.groups, self._launched))
        if urls is not None:
            self.urls = urls[0]         # the first rank's, which leads the first replica

    def _launched(self) -> list[str]:
        engine = self.settings.engine
        if engine.sglang_launch == "local" and dist.get_rank() == 0:
            os.makedirs(self.directory, exist_ok=True)
            path = self.settings.weights.hf_checkpoint
            extra = serving_arguments(path, read_hf_config(path)) + ("--trust-remote-code",) * self.args.trust_remote_code
            self.server = LocalServer.from_config(engine, path,
                                                  routes=self.settings.routing.use_rollout_routing_replay,
                                                  log_directory=self.directory,
                                                  device=self.settings.trainer.platform, extra=extra)
            return [self.server.launch().url]
        return self.urls

    def connect(self, trained: Trained, replay) -> None:
        """Wait for the servers, connect the leaders' clients, and refuse an engine that cannot serve this run."""
        on_leaders(self.groups, lambda: None if self.server is None else self.server.wait())
        if self.groups.is_leader:
            self.events = EventLoop()
        self.client = on_leaders(self.groups, lambda: self.events.run(self._client(trained, replay)))
        where, engine = self.settings.weights.weight_sync_dir or os.path.join(self.directory, "weights"), self.settings.engine
        patience = 0.0 if engine.sglang_launch == "local" else engine.sglang_down_timeout       # a local server that died stays dead
        self.publisher = WeightPublisher(trained.live, trained.hf_config, self.settings.weights, where, engine.api_key, patience)

    async def _client(self, trained: Trained, replay) -> SGLangClient:
        routes = replay.spec if self.settings.routing.use_rollout_routing_replay else None
        model = ServedModel(self.args.vocab_size, routes, trained.hf_config.get("model_type"))
        return await SGLangClient(self.settings.engine, model, self.urls).start()

    def publish(self, trained: Trained, version: int) -> None:
        """Bring the engines to the model's weights; those that cannot follow are not sampled from until they do."""
        with trained.whole_parameters():
            report = self.publisher.publish(self.settings.engine.worker_urls or self.urls, str(version))
        if self.client is not None:
            self.events.run(self.client.expect(report.version, report.left_out))

    def close(self) -> None:
        if self.client is not None:
            self.events.run(self.client.close())
        if self.events is not None:
            self.events.close()
        if self.publisher is not None:
            self.publisher.close()
        if self.server is not None:
            self.server.stop()
        if self.temporary is not None:
            shutil.rmtree(self.temporary, ignore_errors=True)
