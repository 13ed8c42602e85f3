"""CISPO under each peer's bounds and reducer."""

from megatron_grpo.config import CorrectionConfig
from tests.golden import NotCovered, peers


def run(case: dict, pool) -> dict:
    peer, p = peers.name(case), case["inputs"]["params"]
    setup = peers.setup_of(case)
    if peer == "nemo" and not p.get("use_cispo"):
        raise NotCovered("NeMo-RL's loss without use_cispo is no CISPO")
    setup.loss["surrogate"] = "cispo"
    if peer == "trl":           # eps_high is the cap itself, and there is no lower bound
        setup.loss |= dict(eps_clip=1.0, eps_clip_high=p["eps_high"] - 1)
        if p["loss_type"] != "cispo" or setup.loss["eps_clip_c"] is not None:
            raise NotCovered(f"loss_type {p['loss_type']} of TRL, or with a delta, is no CISPO")
    return peers.outputs(case, setup, peers.nemo_correction(p) if peer == "nemo" else CorrectionConfig())
