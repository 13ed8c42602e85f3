"""The data that flows: Sample (one response), SampleGroup (the responses to one prompt), and its masks.

Positions. A sample of N tokens has P prompt tokens and R = N - P response tokens. Arrays named `response_*`,
`loss_mask`, `rollout_logp`, ... have length R and speak of response tokens. In a packed micro-batch every per-token
tensor `x_T` stands at the position of the token that is the model's *input*: `logp_T[i]` is the log-probability of
token i + 1 given tokens 0..i, and so is its mask, advantage and reward. The last position of a sequence predicts
nothing and its mask is 0.
"""

import enum
from dataclasses import dataclass, field

import numpy as np


class Status(enum.Enum):
    """How a response ended."""

    COMPLETED = "completed"     # the policy ended it (stop token or stop condition)
    TRUNCATED = "truncated"     # it hit the length limit: the policy's own doing, so a reward is due
    ABORTED = "aborted"         # infrastructure ended it (abort, dead engine, failed verifier): never a reward


@dataclass
class Sample:
    """One response to one prompt, as the engine produced it and as the trainer will use it.

    Attributes:
        sample_id: unique in a run; orders the samples of a step.
        group_id: the prompt instance; samples that share it form the group of the baseline.
        rollout_id: siblings cut from one rollout share it (reducer `rollout_mean`); otherwise equals sample_id.
        tokens: [N] int64, prompt and response.
        prompt_length: P.
        loss_mask: [R] bool, True on tokens that the policy chose, False on tool or environment tokens.
        rollout_logp: [R] float32, log-prob under the engine that sampled (0 where loss_mask is False).
        routes: [N - 1 or N, L, K] narrow integers, experts by (token, MoE layer, k), or None.
        sampling_mask: per response token the int32 ids of the truncated support, or None.
        weight_versions: spans (version, start, end) over the response tokens.
        rewards: named raw rewards; `reward` is what the advantage sees after shaping.
        turns: for metrics: number of generations that made this sample.
    """

    sample_id: int
    group_id: int
    tokens: np.ndarray
    prompt_length: int
    loss_mask: np.ndarray
    rollout_logp: np.ndarray
    status: Status = Status.COMPLETED
    rollout_id: int = -1
    routes: np.ndarray | None = None
    sampling_mask: list[np.ndarray] | None = None
    weight_versions: list[tuple[str, int, int]] = field(default_factory=list)
    rewards: dict[str, float] = field(default_factory=dict)
    reward: float = 0.0
    prompt: str = ""
    response: str = ""
    label: object = None
    metadata: dict = field(default_factory=dict)
    turns: int = 1

    def __post_init__(self):
        if self.rollout_id < 0:
            self.rollout_id = self.sample_id
        response = len(self.tokens) - self.prompt_length
        for name in ("loss_mask", "rollout_logp"):
            if len(getattr(self, name)) != response:
                raise ValueError(f"sample {self.sample_id}: {name} has {len(getattr(self, name))} entries for {response} response tokens")

    @property
    def response_length(self) -> int:
        return len(self.tokens) - self.prompt_length


@dataclass
class SampleGroup:
    """The responses to one prompt instance, all with the same group_id."""

    group_id: int
    samples: list[Sample]
