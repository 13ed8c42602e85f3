"""DeepSeek-V3: its table of names, its yarn embedding and its router mean in Megatron what they mean in Transformers."""

import pytest
import torch

from tests.weights import tiny
from tests.weights.test_checkpoints import check_round_trip, forward, reference

SPEC = "--spec tests.weights.latent spec".split()
YARN = dict(rope_type="yarn", rope_theta=1e4, factor=4.0, beta_fast=32.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0,
            original_max_position_embeddings=128)
KIMI = dict(n_group=1, rope_parameters=YARN | dict(rope_theta=5e4, factor=32.0, beta_fast=1.0))        # its two betas are equal


@pytest.mark.parametrize("changes", [dict(rope_parameters=YARN), {}, KIMI], ids=["yarn", "unscaled", "kimi"])
def test_logits_and_routes_equal_transformers(pool, tmp_path, changes):
    path = tiny.write_model("deepseek_v3", tmp_path / "model", **changes)
    ((logits, maps),) = pool.run(forward, str(path), SPEC, ranks=1, timeout=500)
    wanted, chosen = reference(path)
    assert (logits[..., :500] - wanted).abs().max() < 1e-4
    assert torch.equal(maps, chosen)


@pytest.mark.parametrize("layout", ["pp2", "ep2"])
def test_round_trip(pool, tmp_path, monkeypatch, layout):
    from tests.weights import test_checkpoints
    ranks, flags = test_checkpoints.LAYOUTS[layout]
    monkeypatch.setitem(test_checkpoints.LAYOUTS, "latent", (ranks, f"{flags} {' '.join(SPEC)}"))
    check_round_trip(pool, tiny.write_model("deepseek_v3", tmp_path / "model"), "latent", tmp_path / "out")
