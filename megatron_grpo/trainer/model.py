"""The policy model: Megatron's GPT with mixture-of-experts layers, on GPU by Transformer Engine, on CPU by our platform."""

import inspect

from . import platform_cpu


def model_provider(pre_process=True, post_process=True, vp_stage=None, config=None, pg_collection=None, **_):
    """One pipeline stage of the model that the command line describes; give it to Megatron's setup_model_and_optimizer.

    `--spec MODULE NAME` names a layer specification, or a function (config[, vp_stage]) -> specification, that
    replaces the default one: Transformer Engine's modules on GPU, `platform_cpu.layer_spec` on CPU.

    Args:
        pre_process: this stage has the embedding.
        post_process: this stage has the output layer.
        vp_stage: virtual pipeline stage, or None.
        config: TransformerConfig; None makes it from the flags.
        pg_collection: Megatron's process groups; None takes the global ones.
    """
    from megatron.core.models.gpt import GPTModel
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.training import get_args
    from megatron.training.argument_utils import gpt_config_from_args
    from megatron.training.models.gpt import default_layer_spec, mtp_block_spec

    args = get_args()
    settings = gpt_config_from_args(args, config)
    config = settings.transformer
    # Micro-batches differ in length, and so do the activations that pipeline stages exchange.
    config.variable_seq_lengths = config.pipeline_model_parallel_size > 1
    contiguous = args.cp_layout == "contiguous" and config.context_parallel_size > 1
    on_cpu = platform_cpu.installed()

    block = settings.transformer_layer_spec
    if block is None:
        block = platform_cpu.layer_spec(config, vp_stage, contiguous) if on_cpu else default_layer_spec(settings, vp_stage)
    elif callable(block) and not isinstance(block, ModuleSpec):
        named = {"vp_stage": vp_stage} if "vp_stage" in inspect.signature(block).parameters else {}
        block = block(settings, **named)
    mtp = platform_cpu.mtp_spec(config, vp_stage, contiguous) if on_cpu else mtp_block_spec(settings, block, vp_stage=vp_stage)

    model = GPTModel(
        config=config, transformer_layer_spec=block, mtp_block_spec=mtp, vocab_size=args.padded_vocab_size,
        max_sequence_length=settings.seq_length, pre_process=pre_process, post_process=post_process,
        fp16_lm_cross_entropy=settings.fp16_lm_cross_entropy, parallel_output=settings.parallel_output,
        share_embeddings_and_output_weights=settings.share_embeddings_and_output_weights,
        position_embedding_type=settings.position_embedding_type, rotary_percent=settings.rotary_percent,
        rotary_base=settings.rotary_base, rope_scaling=settings.rope_scaling, rope_scaling_factor=settings.rope_scaling_factor,
        seq_len_interpolation_factor=settings.seq_len_interpolation_factor,
        pg_collection=pg_collection or ProcessGroupCollection.use_mpu_process_groups(), vp_stage=vp_stage)
    if on_cpu and hasattr(model, "rotary_pos_emb"):
        model.rotary_pos_emb.cp_group = platform_cpu.ONE_RANK    # all positions: the attention takes this rank's own
    return model
