"""The accounts of a step: where every sample and every sampled token went."""

from collections import Counter
from dataclasses import dataclass, field, fields


@dataclass
class Tally:
    """A number of samples and the tokens that the policy sampled for them."""

    samples: int = 0
    tokens: int = 0

    def add(self, samples: int, tokens: int) -> None:
        self.samples += samples
        self.tokens += tokens

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(self.samples + other.samples, self.tokens + other.tokens)


@dataclass
class Books:
    """What came in equals what went out, in samples and in tokens:

        carried_in + generated = kept + filtered + failed + discarded + carried_out

    Attributes:
        carried_in: unfinished or finished samples held over from the step before, and their tokens so far.
        generated: samples begun in this step; tokens sampled in this step, those of carried-in samples too.
        kept: in the step's groups.
        filtered: in groups that the dynamic-sampling filter refused.
        failed: lost to infrastructure (engine, verifier), and their group's other samples if the group fell with them.
        discarded: aborted because enough groups were complete, or too stale; their prompts come again.
        carried_out: held over to the next step.
        reasons: how many samples were filtered, failed or discarded for which reason.
    """

    carried_in: Tally = field(default_factory=Tally)
    generated: Tally = field(default_factory=Tally)
    kept: Tally = field(default_factory=Tally)
    filtered: Tally = field(default_factory=Tally)
    failed: Tally = field(default_factory=Tally)
    discarded: Tally = field(default_factory=Tally)
    carried_out: Tally = field(default_factory=Tally)
    reasons: Counter = field(default_factory=Counter)

    def __add__(self, other: "Books") -> "Books":
        return Books(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    @property
    def wasted_tokens(self) -> int:
        """Sampled and never trained on."""
        return self.filtered.tokens + self.failed.tokens + self.discarded.tokens

    def check(self) -> None:
        """Raises AssertionError if the books do not balance."""
        came, went = self.carried_in + self.generated, self.kept + self.filtered + self.failed + self.discarded + self.carried_out
        if came != went:
            raise AssertionError(f"the rollout's books do not balance: {came} came in, {went} went out ({self})")

    def metrics(self) -> dict[str, float]:
        """Flat numbers for the step's metrics, e.g. `samples_kept`, `tokens_discarded`, `tokens_wasted`."""
        flat = {f"{unit}_{f.name}": float(getattr(getattr(self, f.name), unit))
                for f in fields(self) if f.name != "reasons" for unit in ("samples", "tokens")}
        return flat | {"tokens_wasted": float(self.wasted_tokens)}
