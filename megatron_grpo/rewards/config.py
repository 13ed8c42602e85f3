"""Settings of the verifiers: where a response's raw reward comes from."""

from dataclasses import dataclass

from ..settings import ConfigError, flag, setting
from .verifiers import VERIFIERS

BUILT_IN = (*VERIFIERS, "remote")


@dataclass(frozen=True)
class VerifierConfig:
    rm_type: tuple[str, ...] = setting(
        (), "built-in rewards: task (the reasoning-gym task's own verifier), exact (the response is the label), math "
        "(math-verify), remote (--rm-url); each is a named reward "
        "beside those of --custom-rm-path", nargs="+")
    rm_url: str | None = setting(None, "address that answers a POST of {prompt, response, label, metadata} with a number or a dictionary")
    reward_key: str | None = setting(None, "which of several named rewards is the reward; their sum when not given")
    rm_timeout: float = setting(30.0, "time limit of one reward; a later one counts as infrastructure failure, never as reward 0",
                                unit="seconds")
    rm_workers: int = setting(1, "processes for task, exact and math, per data-parallel rank", unit="processes")
    rm_concurrency: int = setting(64, "remote and custom rewards computed at once, per data-parallel rank", unit="samples")

    def __post_init__(self):
        unknown = set(self.rm_type) - set(BUILT_IN)
        if unknown:
            raise ConfigError(f"--rm-type {' '.join(sorted(unknown))}: choose among {', '.join(BUILT_IN)}, or give --custom-rm-path")
        if ("remote" in self.rm_type) and not self.rm_url:
            raise ConfigError("--rm-type remote: give the address with --rm-url")
        for name in ("rm_timeout", "rm_workers", "rm_concurrency"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{flag(name)} {getattr(self, name)}: give a positive number")
