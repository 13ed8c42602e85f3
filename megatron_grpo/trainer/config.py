"""Settings of the training run itself; Megatron's own flags say everything about model, layout and optimizer."""

from dataclasses import dataclass

from ..settings import ConfigError, setting


@dataclass(frozen=True)
class TrainerConfig:
    platform: str = setting("cuda", "cuda, or cpu: an unmodified Megatron-Core over gloo, for laptops and tests", choices=("cuda", "cpu"))
    force_platform_cpu: bool = setting(False, "--platform cpu also where a CUDA device is visible, which the run then cannot use")
    dry_run: bool = setting(False, "print the resolved algorithm, the layout, the expected memory per GPU and every refusal, for WORLD_SIZE GPUs "
                                   "or the fewest that the layout allows, and end; needs no GPU and no weights")
    loss_type: str = setting("policy_loss", "policy_loss: reinforcement learning; sft: supervised warm start on the prompts' labels",
                             choices=("policy_loss", "sft"))
    num_steps_per_rollout: int = setting(1, "optimizer steps per rollout batch", unit="steps")
    recompute_loss_function: bool = setting(False, "compute log-probs and loss again in the backward, keeping nothing but the logits for it")
    ref_load: str | None = setting(None, "checkpoint or Hugging Face directory of the reference model; the starting weights when not given")
    eval_num_prompts: int = setting(200, "held-out prompts of an evaluation (every --eval-interval steps, greedy)", unit="prompts")
    eval_max_response_len: int | None = setting(None, "length limit of an evaluation's responses; --rollout-max-response-len when not given",
                                                unit="tokens")
    run_dir: str | None = setting(None, "directory of metrics.jsonl, report.html and samples; --save when not given")
    report_samples: int = setting(32, "samples that the report shows of each evaluated step; 0 for none", unit="samples")
    save_debug_rollout_data: str | None = setting(None, "write each step's samples to this path; {step} and {dp_rank} are filled in")
    load_debug_rollout_data: str | None = setting(None, "train on samples written by --save-debug-rollout-data instead of generating")
    keep_checkpoints: int | None = setting(None, "complete checkpoints to keep; all when not given")
    control_timeout: int = setting(7200, "longest wait of one rank for another's rollout or data", unit="seconds")

    def __post_init__(self):
        if self.num_steps_per_rollout < 1:
            raise ConfigError(f"--num-steps-per-rollout {self.num_steps_per_rollout}: give at least 1")
        if self.keep_checkpoints is not None and self.keep_checkpoints < 1:
            raise ConfigError(f"--keep-checkpoints {self.keep_checkpoints}: give at least 1, or leave it out to keep all")
