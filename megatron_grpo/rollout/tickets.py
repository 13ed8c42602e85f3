"""What the data-parallel leaders share while they generate: the next prompt's position, and the step's slots for groups.

A leader draws a position for each group it begins and claims a slot for each group it wants to keep. The step is complete when its
slots are taken. One leader alone counts for itself; several count in the job's store, so none knows another's prompts or groups.
"""

from typing import Protocol


class Tickets(Protocol):
    leader: int         # this leader's number, 0 .. leaders - 1
    leaders: int

    def start_at(self, position: int) -> None:
        """Positions below this one were drawn by the run that is being continued. The same on every leader."""

    def draw(self) -> int:
        """The next position; nobody else gets it."""

    def drawn(self) -> int:
        """How many positions all leaders have drawn."""

    def open_step(self, slots: int) -> None:
        """Begin the next step, with this many slots. Every leader opens every step."""

    def claim(self) -> bool:
        """Take a slot; False when none is free."""

    def release(self) -> None:
        """Give a claimed slot back: its group fell."""

    def full(self) -> bool:
        """All slots are taken."""

    def fail(self, message: str) -> None:
        """Tell the other leaders that this step cannot be completed."""

    def failure(self) -> str | None:
        """What another leader said failed."""


class LocalTickets:
    """For a single leader."""

    leader, leaders = 0, 1

    def __init__(self):
        self.position = self.taken = self.slots = 0

    def start_at(self, position: int) -> None:
        self.position = position

    def draw(self) -> int:
        self.position += 1
        return self.position - 1

    def drawn(self) -> int:
        return self.position

    def open_step(self, slots: int) -> None:
        self.taken, self.slots = 0, slots

    def claim(self) -> bool:
        if self.taken >= self.slots:
            return False
        self.taken += 1
        return True

    def release(self) -> None:
        self.taken -= 1

    def full(self) -> bool:
        return self.taken >= self.slots

    def fail(self, message: str) -> None:
        pass

    def failure(self) -> str | None:
        return None


class StoreTickets:
    """For the leaders of one job, over its TCPStore.

    Args:
        store: the job's store; its `add` and `compare_set` are atomic (a TCPStore).
        leader, leaders: this leader and how many there are.
        ahead: steps that a leader may begin before the others have ended the same one (--rollout-ahead).
        prefix: keys of this object; a second one in the same job needs another prefix.
    """

    def __init__(self, store, leader: int, leaders: int, ahead: int = 0, prefix: str = "rollout"):
        self.store, self.leader, self.leaders, self.ahead, self.prefix = store, leader, leaders, ahead, prefix
        self.base, self.step, self.slots, self.serial = 0, -1, 0, 0

    def start_at(self, position: int) -> None:
        self.base = position

    def draw(self) -> int:
        return self.base + self.store.add(f"{self.prefix}/position", 1) - 1

    def drawn(self) -> int:
        return self.base + self.store.add(f"{self.prefix}/position", 0)

    def open_step(self, slots: int) -> None:
        self.step, self.slots = self.step + 1, slots
        self.store.compare_set(self._key(self.step), "", "0")
        old = self.step - self.ahead - 2        # a leader may still be closing the step after it
        if self.leader == 0 and old >= 0:
            self.store.delete_key(self._key(old))

    def claim(self) -> bool:
        return self._change(+1)

    def release(self) -> None:
        self._change(-1)

    def full(self) -> bool:
        return _count(self._value()) >= self.slots

    def fail(self, message: str) -> None:
        self.store.compare_set(f"{self.prefix}/failure", "", f"data-parallel rank {self.leader}: {message}")     # the first cause stays

    def failure(self) -> str | None:
        key = f"{self.prefix}/failure"
        return self.store.get(key).decode() if self.store.check([key]) else None

    def _key(self, step: int) -> str:
        return f"{self.prefix}/slots/{step}"

    def _value(self) -> str:
        return self.store.get(self._key(self.step)).decode()

    def _change(self, by: int) -> bool:
        """Compare and swap: an `add` would overshoot for a moment, and who looks then would take the step for complete.

        Each value is written once only (count, leader, serial number), so that a swap that failed cannot look like one that did not.
        """
        while 0 <= (taken := _count(value := self._value())) + by <= self.slots:
            self.serial += 1
            wanted = f"{taken + by}:{self.leader}:{self.serial}"
            if self.store.compare_set(self._key(self.step), value, wanted).decode() == wanted:
                return True
        return False


def _count(value: str) -> int:
    return int(value.partition(":")[0])
