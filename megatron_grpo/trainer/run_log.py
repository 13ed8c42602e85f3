"""What a run leaves behind: metrics.jsonl, TensorBoard and W&B through Megatron's writers, one line a step."""

import json
import os
import time
from contextlib import contextmanager, suppress

LINE = (("reward", "reward/mean", "{:.3f}"), ("acc", "eval/accuracy", "{:.3f}"), ("loss", "loss", "{:+.4f}"), ("|g|", "grad_norm", "{:.3f}"),
        ("len", "response_length/mean", "{:.1f}"), ("H", "entropy", "{:.3f}"), ("clip", "clip_frac_high", "{:.4f}"),
        ("k3", "mismatch_k3", "{:.1e}"), ("kl", "ref_kl", "{:.1e}"))


class Phases:
    """Seconds spent in each phase of a step."""

    def __init__(self):
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str):
        start = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - start


class RunLog:
    """Writes on one rank; a silent object elsewhere. `metrics.jsonl` has one JSON object a step and is only appended to."""

    def __init__(self, directory: str | None, active: bool, total_steps: int):
        self.active, self.total_steps, self.directory = active, total_steps, directory
        self.file = None
        if active and directory:
            os.makedirs(directory, exist_ok=True)
            self.file = open(os.path.join(directory, "metrics.jsonl"), "a", buffering=1)  # noqa: SIM115

    def step(self, step: int, metrics: dict[str, float], seconds: dict[str, float]) -> None:
        """Record one optimizer step (or evaluation) with the seconds of each phase."""
        if not self.active:
            return
        record = {"step": step, "time": time.time(), "metrics": metrics, "seconds": seconds}
        if self.file:
            try:
                self.file.write(json.dumps(record) + "\n")
            except OSError as error:
                raise OSError(error.errno, error.strerror, self.file.name) from error
        self._megatron_writers(step, {**metrics, **{f"seconds/{k}": v for k, v in seconds.items()}})
        shown = [f"{label} {form.format(metrics[key])}" for label, key, form in LINE if key in metrics]
        times = " ".join(f"{k} {v:.1f}s" for k, v in seconds.items())
        print(f"step {step}/{self.total_steps}  {'  '.join(shown)}  [{times}]", flush=True)

    def _megatron_writers(self, step: int, metrics: dict[str, float]) -> None:
        from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer

        if writer := get_tensorboard_writer():
            for key, value in metrics.items():
                writer.add_scalar(key, value, step)
        if wandb := get_wandb_writer():
            wandb.log(metrics, step)

    def message(self, text: str) -> None:
        if self.active:
            print(text, flush=True)

    def report(self) -> None:
        """(Re)write report.html; it reads what the run has written so far."""
        if self.file:
            from ..report import write_report
            write_report([self.directory])

    def close(self) -> None:
        if self.file:
            with suppress(OSError):     # a full disk has been complained of at the write
                self.file.close()
