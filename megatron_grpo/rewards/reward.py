"""The raw reward of a finished sample: built-in verifiers, a remote one, the user's own, all under one time limit.

A verifier that raises, hangs or dies says nothing about the response. Its sample becomes ABORTED with the reason, and is
never scored 0.
"""

import asyncio
import math

import aiohttp

from ..batch import Sample, Status
from ..hooks import RewardModel
from ..settings import ConfigError
from .config import VerifierConfig
from .hook_thread import HookThread
from .verifiers import VERIFIERS, VerifierError, VerifierPool

REMOTE_TRIES = 3


class Rewards:
    """Scores samples: fills `sample.rewards` and `sample.reward`, or aborts the sample.

    Args:
        config: built-in rewards and limits.
        custom: Hooks.rm, or None.

    Raises:
        ConfigError: no reward is named at all.
    """

    def __init__(self, config: VerifierConfig, custom: RewardModel | None = None):
        if not config.rm_type and custom is None:
            raise ConfigError("no reward: give --rm-type (task, exact, math, remote) or --custom-rm-path")
        self.config, self.custom = config, custom
        self.pool, self.thread = VerifierPool(config.rm_workers, config.rm_timeout), HookThread()
        self._places = asyncio.Semaphore(config.rm_concurrency)
        self._session: aiohttp.ClientSession | None = None

    async def __call__(self, sample: Sample) -> None:
        """Score one sample by everything that needs no other sample of its group."""
        try:
            for name in self.config.rm_type:
                if name in VERIFIERS:
                    sample.rewards[name] = await self.pool.score(name, sample.response, sample.label, sample.metadata)
                else:
                    sample.rewards.update(await self._remote(sample))
            if self.custom is not None and not self.custom.group:
                sample.rewards.update(await self._custom(sample))
            if self.custom is None or not self.custom.group:
                sample.reward = self._total(sample.rewards)
        except Exception as error:
            abort(sample, f"reward: {_say(error)}")

    async def finish(self, samples: list[Sample]) -> None:
        """Call a reward hook that wants the whole group; `samples` are its finished samples, already scored by `__call__`."""
        if self.custom is None or not self.custom.group or not samples:
            return
        try:
            for sample, named in zip(samples, await self._custom(samples), strict=True):
                sample.rewards.update(named)
                sample.reward = self._total(sample.rewards)
        except Exception as error:
            for sample in samples:
                abort(sample, f"reward: {_say(error)}")

    async def close(self) -> None:
        await self.pool.close()
        self.thread.close()
        if self._session is not None:
            await self._session.close()

    async def _custom(self, argument):
        async with self._places:
            try:
                return await self.thread.call(self.custom, argument, timeout_s=self.config.rm_timeout)
            except TimeoutError:
                raise VerifierError(f"--custom-rm-path gave no answer within {self.config.rm_timeout:g} s (--rm-timeout)") from None

    async def _remote(self, sample: Sample) -> dict[str, float]:
        """POST until an answer of status 200 comes, a few times within the time limit."""
        body = {"prompt": sample.prompt, "response": sample.response, "label": sample.label, "metadata": sample.metadata}
        async with self._places:
            try:
                async with asyncio.timeout(self.config.rm_timeout):
                    for attempt in range(1, REMOTE_TRIES + 1):
                        try:
                            answer = await self._post(body)
                            break
                        except (aiohttp.ClientError, OSError) as error:
                            if attempt == REMOTE_TRIES:
                                raise VerifierError(f"--rm-url {self.config.rm_url}: {_say(error)}") from error
                            await asyncio.sleep(0.2 * attempt)
            except TimeoutError:
                raise VerifierError(f"--rm-url {self.config.rm_url} gave no answer within {self.config.rm_timeout:g} s "
                                    "(--rm-timeout)") from None
        named = answer if isinstance(answer, dict) else {"remote": answer}
        bad = {k: v for k, v in named.items() if isinstance(v, bool) or not isinstance(v, (int, float))}
        if bad or not named:
            raise VerifierError(f"--rm-url {self.config.rm_url} answered {answer!r}; a number, or a dictionary of numbers, is wanted")
        return {k: float(v) for k, v in named.items()}

    async def _post(self, body: dict):
        if self._session is None:
            # --rm-concurrency and --rm-timeout are the limits, not aiohttp's 100 connections and 300 s
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None))
        async with self._session.post(str(self.config.rm_url), json=body) as response:
            response.raise_for_status()
            return await response.json(content_type=None)

    def _total(self, rewards: dict[str, float]) -> float:
        """One number of the named rewards: --reward-key, or the sum."""
        bad = {name: value for name, value in rewards.items() if not math.isfinite(value)}
        if bad:
            raise ValueError(f"not finite: {bad}")
        if self.config.reward_key is None:
            return float(sum(rewards.values()))
        if self.config.reward_key not in rewards:
            raise ValueError(f"--reward-key {self.config.reward_key}: the rewards are {', '.join(sorted(rewards))}")
        return float(rewards[self.config.reward_key])


def abort(sample: Sample, reason: str) -> None:
    """Mark a sample as failed by infrastructure."""
    sample.status, sample.rewards, sample.reward = Status.ABORTED, {}, 0.0
    sample.metadata = {**sample.metadata, "aborted": reason}


def _say(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
