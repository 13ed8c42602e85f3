"""An off-policy correction of one's own:  --custom-tis-function-path examples/hooks/tis.py:two_sided

Weight min(r, 1/r) of r = old/rollout: full where trainer and engine agree, falling off on both sides; hopeless tokens are masked.
"""

from megatron_grpo.hooks import TisOutput


def two_sided(loss_T, inputs, config):
    """The corrected loss. `inputs` is a LossInputs, `config` a CorrectionConfig; weights are detached."""
    gap_T = (inputs.old_logp_T - inputs.rollout_logp_T).detach().abs()
    weight_T = (-gap_T).exp()
    keep_T = inputs.mask_T & (weight_T > 0.01)
    kept = inputs.mask_T.sum().float()
    return TisOutput(loss_T * weight_T, keep_T, {"two_sided_weight": ((weight_T * inputs.mask_T).sum(), kept)})
