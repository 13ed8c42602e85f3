"""Replay on a Megatron-Core release in a directory of its own: python core_replay.py SITE_PACKAGES. One rank, CPU, no megatron.training."""

import os
import sys

sys.path.insert(0, sys.argv[1])

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.utils.cpp_extension  # noqa: E402


def no_compiler(**_):
    raise ImportError("no CUDA")


torch.utils.cpp_extension.load_inline = no_compiler     # 0.15 compiles a CUDA allocator when it is imported, and can do without

from megatron.core.package_info import __shortversion__  # noqa: E402

from megatron_grpo.trainer.platform_cpu import stand_ins  # noqa: E402

stand_ins.PROVED = (__shortversion__,)
stand_ins.install()

from megatron.core.transformer.moe import moe_utils  # noqa: E402

moe_utils.te_general_gemm = getattr(moe_utils, "te_general_gemm", None)     # releases before 0.17 leave it undefined without TE


def build():
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer.transformer_config import TransformerConfig
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=4, hidden_size=32, num_attention_heads=4, ffn_hidden_size=48, add_bias_linear=False, gated_linear_unit=True,
        num_moe_experts=8, moe_router_topk=2, moe_ffn_hidden_size=24, moe_layer_freq=[0, 1, 1, 1], moe_shared_expert_intermediate_size=16,
        moe_router_load_balancing_type="none", moe_router_dtype="fp32", moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True, moe_router_num_groups=4, moe_router_group_topk=2, moe_router_topk_scaling_factor=2.5,
        moe_token_dispatcher_type="alltoall", attention_dropout=0.0, hidden_dropout=0.0, use_cpu_initialization=True, init_method_std=0.3,
        bias_activation_fusion=False, bias_dropout_fusion=False, masked_softmax_fusion=False, apply_rope_fusion=False,
        recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    return GPTModel(config, get_gpt_decoder_block_spec(config, use_transformer_engine=False), vocab_size=64, max_sequence_length=32,
                    position_embedding_type="rope", share_embeddings_and_output_weights=False)


def main():
    from megatron_grpo.parallel.layout import Layout
    from megatron_grpo.routing.placement import RoutesShare, unrouted
    from megatron_grpo.trainer.router_replay import RouterReplay
    model = build()
    replay = RouterReplay.bind([model])
    assert replay.layers == (1, 2, 3)
    generator = torch.Generator().manual_seed(0)
    T = 16
    free = unrouted(Layout((T - 3,), multiple=T))
    shares = [RoutesShare(torch.rand(T, 3, 8, generator=generator).argsort(-1)[..., :2].to(torch.int8), replay.layers) for _ in range(2)]
    tokens = [torch.randint(0, 64, (1, T), generator=generator) for _ in range(2)]
    mask = torch.ones(T, T, dtype=torch.bool).triu(1)[None, None]
    routers = [block.mlp.router for block in model.decoder.layers[1:]]
    calls = []

    def check(router, inputs, output):
        from megatron_grpo.trainer.router_replay import _RUNNING
        layer = router.router_replay.layer
        wanted = _RUNNING.get().routes.experts_TLK[:, layer - 1].long()
        assert torch.equal(output[1], torch.zeros(T, 8, dtype=torch.bool).scatter(1, wanted, True)), layer
        calls.append(layer)

    for router in routers:
        router.register_forward_hook(check)

    def forward(i):
        with replay.forward(shares[i], unrouted_T=free, record=True) as capture:
            logits = model(tokens[i], torch.arange(T)[None], mask)
        assert torch.equal(capture.routes.experts_TLK, shares[i].experts_TLK)
        return logits.float().log_softmax(-1)

    with torch.no_grad():
        old = [forward(i) for i in range(2)]
    new = [forward(i) for i in range(2)]            # both forwards before both backwards, in the other order
    assert all(torch.equal(a, b.detach()) for a, b in zip(old, new, strict=True)), "the ratio is not exactly 1"
    for logp in reversed(new):
        logp[..., 3].sum().backward()
    assert len(calls) == 3 * 2 * 3, calls           # old pass, policy pass, recompute
    for router, layer in zip(routers, replay.layers, strict=True):
        assert router.weight.grad.abs().sum() > 0
        real = torch.cat([s.experts_TLK[~free, layer - 1] for s in shares]).flatten().long()
        assert router.local_tokens_per_expert.tolist() == torch.bincount(real, minlength=8).tolist()
    print("replayed on", __shortversion__, "from", os.path.dirname(sys.modules["megatron.core"].__file__))


main()
