"""CISPO under each peer's bounds and reducer."""

from megatron_grpo.config import CorrectionConfig
from tests.golden import peers


def run(case: dict, pool) -> dict:
    peer, p = peers.name(case), case["inputs"]["params"]
    setup = getattr(peers, peer)(case)
    setup.loss["surrogate"] = "cispo"
    if peer == "trl":           # eps_high is the cap itself, and there is no lower bound
        setup.loss |= dict(eps_clip=1.0, eps_clip_high=p["eps_high"] - 1)
    correction = CorrectionConfig()
    if p.get("use_importance_sampling_correction"):
        correction = CorrectionConfig(use_tis=True, tis_clip=peers.INF)
    return peers.outputs(case, setup, correction)
