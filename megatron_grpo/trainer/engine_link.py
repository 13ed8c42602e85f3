"""The trainer's link to the inference engines: start or find them, check them, publish weights, sample, evaluate.

Every rank has a link, because publishing gathers weights from all of them; only leaders hold a client, and only the first
rank of a job that launches its own server holds the server.
"""

import os

import torch.distributed as dist

from ..rewards.reward import Rewards
from ..rollout.client import SGLangClient, check_server
from ..rollout.engine import EngineError
from ..rollout.prompts import PromptOrder, load_prompts
from ..rollout.sampler import Sampler, evaluate
from ..rollout.server import LocalServer
from .distribute import agree
from .groups import ControlGroups
from .sources import EventLoop


class EngineLink:
    """Collective over all ranks: `start`, `publish`, `close`."""

    def __init__(self, args, groups: ControlGroups, directory: str):
        self.args, self.settings, self.groups, self.directory = args, args.grpo, groups, directory
        self.server: LocalServer | None = None
        self.urls: list[str] = []
        self.client = self.events = self.publisher = None

    def launch(self) -> None:
        """Start the local server, without waiting for it: it loads while Megatron builds the model."""
        if dist.get_rank() == 0 and self.settings.engine.sglang_launch == "local":
            self.server = LocalServer.from_config(self.settings.engine, self.settings.weights.hf_checkpoint,
                                                  routes=self.settings.routing.use_rollout_routing_replay, log_directory=self.directory)
            self.server.launch()
