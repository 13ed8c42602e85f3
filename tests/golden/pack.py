"""Golden rows <-> packed tensors.

A case holds ragged rows, one list a sequence. `flat` concatenates them to [T], `rows` cuts [T] again, `loss_inputs` builds the
LossInputs of a case with the denominators of that case alone; a peer's other denominators are passed as keywords.
"""

import torch

from megatron_grpo.losses.inputs import LossInputs, StepCounts

STREAMS = dict(logp_T="log_probs", old_logp_T="old_log_probs", rollout_logp_T="rollout_log_probs", ref_logp_T="ref_log_probs",
               advantage_T="advantages", entropy_T="entropy")


def flat(rows_, dtype=torch.float64) -> torch.Tensor:
    """Ragged rows -> [T]."""
    return torch.tensor([v for row in rows_ for v in row], dtype=dtype)


def rows(x_T: torch.Tensor, lengths, mask_T: torch.Tensor | None = None) -> list[list]:
    """[T] -> ragged rows; with a mask, None (not compared) where it is False."""
    values = x_T.detach().tolist()
    if mask_T is not None:
        values = [v if m else None for v, m in zip(values, mask_T.tolist(), strict=True)]
    out, start = [], 0
    for n in lengths:
        out.append(values[start:start + n])
        start += n
    return out


def loss_inputs(inputs: dict, *, mask_rows=None, tokens=None, sequences=None, rollouts=1.0, prompts=1.0, seq_tokens=None,
                rollout_tokens=None, prompt_tokens=None, dtype=torch.float64, **streams) -> LossInputs:
    """LossInputs of a case; `logp_T` is a leaf with gradient. `sample_mask` drops whole rows from the mask.

    Args:
        mask_rows: in place of the case's loss_mask.
        tokens, sequences, rollouts, prompts: StepCounts; tokens and sequences are counted when not given.
        seq_tokens, rollout_tokens, prompt_tokens: [S]; the masked tokens of each row when not given.
        streams: [T] tensors in place of the case's.
    """
    mask = mask_rows or inputs["loss_mask"]
    if "sample_mask" in inputs:
        mask = [[m * s for m in row] for row, s in zip(mask, inputs["sample_mask"], strict=True)]
    count = torch.tensor([float(sum(row)) for row in mask], dtype=dtype)
    mask_T = flat(mask, torch.bool)
    tensors = {name: flat(inputs[key], dtype) for name, key in STREAMS.items() if key in inputs} | streams
    for name in ("logp_T", "old_logp_T", "advantage_T"):
        tensors.setdefault(name, torch.zeros(len(mask_T), dtype=dtype))
    tensors["logp_T"] = tensors["logp_T"].clone().requires_grad_()

    def per_row(given):
        return count if given is None else torch.as_tensor(given, dtype=dtype)

    return LossInputs(
        **tensors, mask_T=mask_T, num_seqs=len(mask),
        seq_T=torch.repeat_interleave(torch.arange(len(mask)), torch.tensor([len(row) for row in mask])),
        counts=StepCounts(tokens=float(count.sum()) if tokens is None else tokens,
                          sequences=float((count > 0).sum()) if sequences is None else sequences, rollouts=rollouts, prompts=prompts),
        seq_tokens_S=per_row(seq_tokens), rollout_tokens_S=per_row(rollout_tokens), prompt_tokens_S=per_row(prompt_tokens))
