"""What each hook receives and returns: its flag, its Protocol, its dataclasses."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch

from ..batch import Sample
from ..settings import ConfigError, setting

if TYPE_CHECKING:
    from ..advantages.inputs import AdvantageInputs
    from ..config import AdvantageConfig, CorrectionConfig, LossConfig
    from ..losses.inputs import LossInputs, Metric
    from ..rollout.engine import Generation


class HookError(ConfigError):
    """A hook that cannot be loaded or that returned something unusable. The message names the flag, the path and the shapes."""


@dataclass(frozen=True)
class HookConfig:
    custom_pg_loss_path: str | None = setting(None, "policy loss per token: fn(inputs, config) -> PgLossOutput")
    custom_pg_loss_reducer_path: str | None = setting(
        None, "token losses to one number: fn(loss_T, inputs) -> scalar", aliases=("--custom-pg-loss-reducer-function-path",))
    custom_advantage_function_path: str | None = setting(None, "advantages: fn(inputs, config) -> advantage_T")
    custom_tis_function_path: str | None = setting(None, "off-policy correction: fn(loss_T, inputs, config) -> TisOutput")
    custom_rm_path: str | None = setting(None, "reward: [async] fn(args, sample) -> number or dict; or fn(args, samples) -> list")
    custom_reward_post_process_path: str | None = setting(None, "rewards before the baseline: fn(args, samples) -> RewardOutput")
    dynamic_sampling_filter_path: str | None = setting(None, "which groups to train on: fn(args, samples) -> FilterOutput or bool")
    rollout_function_path: str | None = setting(None, "how a response is made, turn by turn: async fn(args, episode)")


# ---- what hooks return ------------------------------------------------------------------------------------------------


@dataclass
class PgLossOutput:
    """loss_T: [T] float32 loss of each token before correction and reduction. metrics: name -> (sum, count) over this rank's tokens."""

    loss_T: torch.Tensor
    metrics: dict[str, "Metric"] = field(default_factory=dict)


@dataclass
class TisOutput:
    """loss_T: [T] the corrected loss. mask_T: [T] bool, the tokens that are kept: a part of inputs.mask_T."""

    loss_T: torch.Tensor
    mask_T: torch.Tensor
    metrics: dict[str, "Metric"] = field(default_factory=dict)


@dataclass
class RewardOutput:
    """reward: one number for each sample. is_advantage: it is the advantage already, so the group baseline is left out."""

    reward: list[float]
    is_advantage: bool = False


@dataclass
class FilterOutput:
    """keep: train on the group. reason: counted in the metrics. keep_when_insufficient: better this group than another round."""

    keep: bool
    reason: str | None = None
    keep_when_insufficient: bool = False


# ---- one Protocol per hook ----------------------------------------------------------------------------------------------


class PgLoss(Protocol):
    def __call__(self, inputs: "LossInputs", config: "LossConfig") -> "PgLossOutput | torch.Tensor":
        """The policy loss of each token, [T] with gradient to inputs.logp_T; ratio and clip rule are the function's own."""


class Reducer(Protocol):
    def __call__(self, loss_T: torch.Tensor, inputs: "LossInputs") -> torch.Tensor:
        """This rank's addend of the step's loss: the sum over micro-batches, DP and CP ranks is the loss.

        Divide by `inputs.counts` (whole step) or by constants, never by what this micro-batch holds. `loss_T` is 0 where masked.
        """


class Tis(Protocol):
    def __call__(self, loss_T: torch.Tensor, inputs: "LossInputs", config: "CorrectionConfig") -> TisOutput:
        """Weight or mask token losses by how far inputs.old_logp_T is from inputs.rollout_logp_T. Detach the weights."""


class Advantage(Protocol):
    def __call__(self, inputs: "AdvantageInputs", config: "AdvantageConfig") -> torch.Tensor:
        """[T] advantage of each token. `inputs.estimate_N` holds what the built-in baseline gives each sample."""


class RewardModel(Protocol):
    group: bool                 # called with the samples of a whole group, not with one

    async def __call__(self, sample: "Sample | list[Sample]") -> "dict[str, float] | list[dict[str, float]]":
        """Named rewards of a sample; a plain number is named "reward". An exception means: failed by infrastructure."""


class RewardPostProcess(Protocol):
    def __call__(self, samples: list[Sample]) -> RewardOutput:
        """Replaces reward shaping for all samples of the step (of this data-parallel rank); `sample.reward` is the raw one."""


class SamplingFilter(Protocol):
    def __call__(self, samples: list[Sample]) -> FilterOutput:
        """Decides on one group, with its rewards in place."""


class Episode(Protocol):
    """One conversation with the engine, as a rollout function drives it; it ends when the function returns."""

    prompt: str
    label: object
    metadata: dict
    tokens: list[int]           # prompt and everything since
    remaining: int              # tokens left under --rollout-max-response-len
    tokenizer: object           # the Hugging Face tokenizer

    async def generate(self, max_new_tokens: int | None = None, stop_token_ids: tuple[int, ...] = ()) -> "Generation":
        """Sample one turn; its tokens join the response with mask 1."""

    def append(self, tokens: list[int]) -> None:
        """Add environment tokens (tool output, a user's turn); they join the response with mask 0."""


class RolloutFunction(Protocol):
    async def __call__(self, episode: Episode) -> None: ...


@dataclass(frozen=True)
class Hooks:
    """The hooks that the flags name, ready to call; None where there is none."""

    pg_loss: PgLoss | None = None
    reducer: Reducer | None = None
    advantage: Advantage | None = None
    tis: Tis | None = None
    rm: RewardModel | None = None
    reward_post_process: RewardPostProcess | None = None
    sampling_filter: SamplingFilter | None = None
    rollout: RolloutFunction | None = None
