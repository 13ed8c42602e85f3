"""Which groups a step trains on: over-sampling, dynamic sampling, first-completed acceptance, partial rollouts.

    begin   groups carried over from the step before go on; new ones are begun until --over-sampling-batch-size are in flight or kept
    settle  a complete group is filtered, then claims one of the step's slots; a refused or failed one is replaced
    end     when all slots are taken, what still runs is aborted: it is carried over (--partial-rollout), or its prompt comes again

Several data-parallel leaders run this at once and share nothing but Tickets. Groups are ordered by their prompt's position,
so that the step is the same whatever order the responses came in.
"""

import asyncio
import copy
import logging
from collections.abc import Callable, Container
from dataclasses import dataclass

from ..batch import SampleGroup, Status
from ..hooks import Hooks
from ..rewards.reward import Rewards
from ..settings import ConfigError
from .books import Books, Tally
from .config import RolloutConfig
from .engine import Engine, EngineError
from .gate import Gate
from .group import Group, GroupRunner, sampling_params, version_number
from .multi_turn import Conversation
from .prompts import PromptOrder, Prompts
from .tickets import LocalTickets, Tickets
from .trajectory import Trajectory

log = logging.getLogger(__name__)

FALLEN = 3      # a step in which any group was sound survives fewer fallen ones than this
STEP, PAUSE = "between steps", "paused"         # who closes the gate
TRIES = 2       # a prompt whose group fell to infrastructure twice is dropped


@dataclass
class Rollout:
    """One leader's share of a step, by group_id and sample_id."""

    groups: list[SampleGroup]
    books: Books
    seconds: float
    off_policy_tokens: int = 0      # sampled under weights older than those the step trains

    @property
    def samples(self) -> list:
        return [sample for group in self.groups for sample in group.samples]


class Sampler:
    """Generates a leader's groups, step by step. All methods run on one event loop.

    Args:
        engine: any Engine.
        prompts, order: what is drawn, and in which order.
        rewards: scores finished samples.
        tokenizer: decodes responses; its eos token ends one.
        config: batch sizes, lengths, strategy.
        hooks: the sampling filter and the rollout function are used.
        return_routes: ask the engine for routed experts (R3).
        tickets: shared with the other leaders; a single leader needs none.
        on_group: called with (groups kept, groups expected) of this leader whenever one is kept.
        version_step: by how much the weights' version number grows from one step to the next.
        stall_limit_s: longest wait for other leaders when this one has nothing to do.
    """

    def __init__(self, engine: Engine, prompts: Prompts, order: PromptOrder, rewards: Rewards, tokenizer, config: RolloutConfig, *,
                 hooks: Hooks | None = None, return_routes: bool = False, tickets: Tickets | None = None,
                 on_group: Callable[[int, int], None] = lambda kept, wanted: None, version_step: int = 1, stall_limit_s: float = 7200.0):
        self.engine, self.prompts, self.order, self.rewards, self.config = engine, prompts, order, rewards, config
        self.hooks, self.return_routes, self.on_group = hooks or Hooks(), return_routes, on_group
        self.version_step, self.stall_limit_s = version_step, stall_limit_s
        self.tickets = tickets or LocalTickets()
        self.gate = Gate(engine, STEP)
        self.runner = GroupRunner(self.gate, rewards, tokenizer, config, sampling_params(config, tokenizer, order.seed),
                                  function=self.hooks.rollout, on_tokens=self._count_tokens)
        self.running: dict[asyncio.Task, Group] = {}
        self.waiting: list[Group] = []              # carried over in a checkpoint, not running yet
        self.finished: list[Group] = []             # complete, but the step's slots were taken
        self.returned: list[tuple[int, int]] = []   # (position, tries) of prompts that come again
        self.kept: list[Group] = []
        self.books = Books()
        self.version = 0
        self.mask_checked = False
        leader, leaders = self.tickets.leader, self.tickets.leaders
        self.width, self.share = self._share(config.groups_in_flight, leader), self._share(config.rollout_batch_size, leader)
        self.poll_s = 0.05 + leaders / 2000 if leaders > 1 else None       # how often to look what the others have

    def _share(self, total: int, leader: int) -> int:
        leaders = self.tickets.leaders
        return total * (leader + 1) // leaders - total * leader // leaders

    # ---- a step -------------------------------------------------------------------------------------------------------------

    async def rollout(self, version: int = 0) -> Rollout:
        """The groups of the step that trains weights number `version`.

        Raises:
            EngineError: as many groups fell to infrastructure as are in flight at a time, here or on another leader.
            ConfigError: the filter refuses too many groups.
        """
        now = asyncio.get_running_loop().time
        start = now()
        try:
            await self._begin(version)
            await self._fill()
            await self._end()
        except BaseException as error:
            self.tickets.fail(f"{type(error).__name__}: {error}")
            await self._stop()
            raise
        groups = [group.sample_group() for group in sorted(self.kept, key=lambda g: g.position)]
        rollout = Rollout(groups, self.books, now() - start)
        self._mark_off_policy(rollout)
        self.kept = []
        return rollout

    async def _begin(self, version: int) -> None:
        self.version, self.books, self.kept = version, Books(), []
        self.spares: list[Group] = []
        self.dropped: list[Group] = []
        self.begun = self.fallen = self.sound = 0
        self.last_failure = ""
        if self.config.use_rollout_sampling_mask and not self.mask_checked:
            await self._check_sampling_mask()
        self.tickets.open_step(self.config.rollout_batch_size)
        for group in (*self.finished, *self.waiting, *self.running.values()):
            self.books.carried_in.add(group.size, group.sampled)
        for group in self.waiting:
            self._launch(group)
        self.waiting = []
        limit = self.config.max_weight_staleness
        if limit is not None:       # what reaches the limit in this step has to be trained in it, so it gets its slot at once
            age = lambda g: -(-g.age(version) // self.version_step)
            for group in [g for g in (*self.finished, *self.running.values()) if age(g) >= limit]:
                group.claimed = age(group) == limit and self.tickets.claim()
                if not group.claimed:
                    await self._discard(group, "too stale")
        finished, self.finished = sorted(self.finished, key=lambda g: (-g.claimed, g.due is None, g.due or 0, g.position)), []
        for group in finished:
            self._accept(group)
        self.gate.open(STEP)

    async def _check_sampling_mask(self) -> None:
        """One token, so that an engine that drops the field is refused before it has generated a batch."""
        probe = Trajectory(0, 0, self.prompts[0], 1, want_sampling_mask=True)
        await Conversation(probe, Gate(self.engine), self.runner.params, self.runner.tokenizer, tag="probe").generate()
        self.mask_checked = True

    async def _fill(self) -> None:
        now = asyncio.get_running_loop().time
        idle_since = now()
        while not self._complete():
            await self.gate.wait()      # in a pause no prompt is drawn, so that the leaders' states fit together
            self._start()
            if self.running:
                await asyncio.wait(self.running, timeout=self.poll_s, return_when=asyncio.FIRST_COMPLETED)
                self._settle_done()
                idle_since = now()
                if self.fallen >= max(self.width, 1) and (self.fallen >= FALLEN or not self.sound):
                    raise EngineError(f"{self.fallen} groups of this step fell to infrastructure; the last failure: {self.last_failure}")
            else:
                await asyncio.sleep(self.poll_s or 0)
            if message := self.tickets.failure():
                raise EngineError(message)
            if now() - idle_since > self.stall_limit_s:
                raise EngineError(f"data-parallel rank {self.tickets.leader} waited {self.stall_limit_s:g} s for the groups of the others")

    def _complete(self) -> bool:
        return self.tickets.full() and not any(g.claimed for g in self.running.values())

    def _start(self) -> None:
        while len(self.running) + len(self.kept) < self.width and not self.tickets.full():
            if self.begun >= self.config.dynamic_sampling_max_batches * self.width:
                if not self.running:
                    self._use_spares()
                return
            position, tries = self.returned.pop(0) if self.returned else (self.tickets.draw(), 0)
            group = Group(position, self._trajectories(position), tries)
            self.begun += 1
            self.books.generated.add(group.size, 0)
            self._launch(group)

    def _trajectories(self, position: int, without: Container[int] = ()) -> list[Trajectory]:
        """New ones for the samples of a prompt, but for those of these ids."""
        n, prompt = self.config.n_samples_per_prompt, self.prompts[self.order[position]]
        options = (self.config.rollout_max_response_len, self.return_routes, self.config.use_rollout_sampling_mask)
        return [Trajectory(i, position, prompt, *options) for i in range(position * n, (position + 1) * n) if i not in without]

    def _launch(self, group: Group) -> None:
        self.running[asyncio.ensure_future(self.runner.run(group))] = group

    def _settle_done(self) -> None:
        for task in [t for t in self.running if t.done()]:
            group = self.running.pop(task)
            task.result()
            self._settle(group)

    def _settle(self, group: Group) -> None:
        """Failed samples leave the group; with fewer than two left (of several) it falls: those that failed are sampled once more.

        The others pass the filter or not.
        """
        failed = {i: s for i, s in group.samples.items() if s.status is Status.ABORTED}
        if failed:
            self.last_failure = failed[max(failed)].metadata["aborted"]
            group.samples = {i: s for i, s in group.samples.items() if i not in failed}
            self._book(Group(group.position, [], samples=failed), self.books.failed, self.last_failure.partition(":")[0])
        if group.size < min(2, self.config.n_samples_per_prompt):
            self._unclaim(group)
            self._retry(group)
            return
        self.sound += 1
        if self.hooks.sampling_filter is not None:
            verdict = self.hooks.sampling_filter(group.sample_group().samples)
            if not verdict.keep:
                self._unclaim(group)
                if verdict.keep_when_insufficient:
                    self.spares.append(group)
                else:
                    self._book(group, self.books.filtered, verdict.reason or "filtered")
                return
        group.done = True
        self._accept(group)

    def _accept(self, group: Group) -> None:
        if self._is_early(group) or not group.claimed and not self.tickets.claim():
            self.finished.append(group)
            return
        group.claimed, group.due = False, self.version
        self.kept.append(group)
        self.books.kept.add(group.size, group.sampled)
        self.on_group(len(self.kept), self.share)

    def _is_early(self, group: Group) -> bool:
        """A later step had kept it, in the run that is being continued."""
        return group.due is not None and group.due > self.version

    def _book(self, group: Group, account: Tally, reason: str) -> None:
        if group.size:
            account.add(group.size, group.sampled)
            self.books.reasons[reason] += group.size

    def _unclaim(self, group: Group) -> None:
        if group.claimed:
            self.tickets.release()
            group.claimed = False

    def _retry(self, group: Group) -> None:
        self.fallen += 1
        group.tries += 1
        if group.tries < TRIES:
            group.growing = self._trajectories(group.position, without=group.samples)
            self.books.generated.add(len(group.growing), 0)
            self._launch(group)
        else:
            self._book(group, self.books.failed, "its group fell")
            self.dropped.append(group)
            log.warning("prompt %d is dropped: its group failed %d times; the last failure: %s", self.order[group.position], TRIES,
                        self.last_failure)

    def _return(self, position: int, tries: int) -> None:
        self.returned = sorted([*self.returned, (position, tries)])

    def _use_spares(self) -> None:
        """Groups that the filter would rather refuse, when it refused too many others."""
        while self.spares and not self.tickets.full():
            self._accept(self.spares.pop(0))
        if len(self.kept) < self.share and not self.tickets.full():
            refused = ", ".join(f"{reason}: {count}" for reason, count in self.books.reasons.most_common(3))
            raise ConfigError(f"kept {len(self.kept)} of {self.share} groups after beginning {self.begun} (samples lost: {refused}); the "
                              "prompts are too easy or too hard for --dynamic-sampling-filter-path: change them, raise "
                              "--n-samples-per-prompt or --dynamic-sampling-max-batches, or drop the filter")

    async def _end(self) -> None:
        await self.gate.close(STEP)
        self._settle_done()
        for group in self.spares:
            self._book(group, self.books.filtered, "spare")
        if not self.config.partial_rollout:
            for group in (*(g for g in self.finished if not self._is_early(g)), *self.running.values()):
                await self._discard(group, "enough groups were complete")
        for group in (*self.finished, *self.running.values()):
            self.books.carried_out.add(group.size, group.sampled)
        self.books.check()

    async def _discard(self, group: Group, reason: str) -> None:
        """Give the group up; its prompt comes again."""
        self._return(group.position, group.tries)
        self._book(group, self.books.discarded, reason)
        self.finished = [g for g in self.finished if g is not group]
        await self._cancel([task for task, running in self.running.items() if running is group])

    async def _stop(self) -> None:
        """End a step that failed. What was sampled stays, for `state_dict`: resuming loses no sample that was good, and no prompt."""
        groups = [*self.dropped, *self.running.values()]
        await self._cancel(list(self.running))
        for group in groups:
            group.tries = 0
            group.samples = {i: s for i, s in group.samples.items() if s.status is not Status.ABORTED}
            group.growing += self._trajectories(group.position, without={*group.samples, *(t.sample_id for t in group.growing)})
        self.waiting += groups
        self.finished, self.kept = [*self.finished, *self.kept], []

    async def _cancel(self, tasks: list[asyncio.Task]) -> None:
        for task in tasks:
            task.cancel()
            self.running.pop(task)
        await asyncio.gather(*tasks, return_exceptions=True)

    def _count_tokens(self, count: int) -> None:
        self.books.generated.tokens += count

    def _mark_off_policy(self, rollout: Rollout) -> None:
        """Count tokens older than the step's weights, and mask them with --mask-offpolicy-in-partial-rollout."""
        if not self.config.partial_rollout and not self.config.rollout_ahead:
            return
        for sample in rollout.samples:
            for version, start, end in sample.weight_versions:
                if version_number(version) < self.version:
                    rollout.off_policy_tokens += end - start
                    if self.config.mask_offpolicy_in_partial_rollout:
                        sample.loss_mask[start:end] = False
                        sample.rollout_logp[start:end] = 0.0

    # ---- pauses and checkpoints ------------------------------------------------------------------------------------------------

    async def pause(self) -> None:
        """Abort what the engine is generating and let nothing pass to it until `resume`, e.g. for a weight update."""
        await self.gate.close(PAUSE)

    def resume(self) -> None:
        self.gate.open(PAUSE)

    def state_dict(self) -> dict:
        """What a resumed run needs to go on as if it had never stopped. Ask for it between steps, or in a pause of all leaders.

        A rollout function cannot be resumed in its middle: its unfinished groups begin again.
        """
        groups = [*self.kept, *self.finished, *self.waiting, *self.running.values()]
        again = [] if self.hooks.rollout is None else [(g.position, g.tries) for g in groups if not g.done]
        groups = copy.deepcopy([g for g in groups if g.done or self.hooks.rollout is None])
        for group in groups:
            group.claimed = False
        return self._order() | {"position": self.tickets.drawn(), "kind": self._kind(), "groups": groups,
                                "returned": sorted([*self.returned, *again])}

    def _order(self) -> dict[str, int]:
        """What says which prompt stands at which position."""
        return {"prompts": self.order.size, "shuffle": self.order.shuffle, "seed": self.order.seed}

    def untrained(self, groups: list[SampleGroup], damaged: Container[int]) -> list[Group]:
        """Groups that were handed out and not trained on, for `state_dict`; those of damaged samples lack them, and sample them again."""
        out = []
        for group in groups:
            good = {s.sample_id: s for s in group.samples if s.sample_id not in damaged}
            whole = len(good) == len(group.samples)
            growing = [] if whole else self._trajectories(group.group_id, without=good)
            out.append(Group(group.group_id, growing, samples=good, done=whole, due=0))      # before any other
        return out

    def _kind(self) -> tuple[int, bool, bool]:
        """What every group of a step has to have in common: samples, routes, sampling masks."""
        return self.config.n_samples_per_prompt, self.return_routes, self.config.use_rollout_sampling_mask

    def load_state_dict(self, states: list[dict]) -> None:
        """Continue from the states of all leaders of a run, which may have had another number of leaders.

        Groups with another number of samples, or without the routes or sampling masks that this run wants, begin again.

        Raises:
            ConfigError: the prompts are not those of that run.
        """
        for name, now in self._order().items():
            if (saved := states[0][name]) != now:
                raise ConfigError(f"the checkpoint's rollouts drew from {name} {saved}, this run has {now}: give the same --prompt-data "
                                  "(or --prompt-task, --prompt-task-size), --rollout-shuffle and --rollout-seed")
        groups, returned = [g for s in states for g in s["groups"]], [r for s in states for r in s["returned"]]
        if states[0]["kind"] != self._kind():
            groups, returned = [], [*returned, *((g.position, g.tries) for g in groups)]
        groups, returned = self._own(sorted(groups, key=lambda g: g.position)), self._own(sorted(returned))
        self.finished, self.waiting, self.returned = [g for g in groups if g.done], [g for g in groups if not g.done], returned
        self.tickets.start_at(max(s["position"] for s in states))

    def _own(self, inherited: list) -> list:
        """This leader's part; those that begin no groups have none."""
        heirs = [i for i in range(self.tickets.leaders) if self._share(self.config.groups_in_flight, i)]
        return inherited[heirs.index(self.tickets.leader)::len(heirs)] if self.tickets.leader in heirs else []

    async def close(self) -> None:
        await self._cancel(list(self.running))
