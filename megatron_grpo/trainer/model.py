"""The policy model: Megatron's GPT with mixture-of-experts layers, on GPU by Transformer Engine, on CPU by our platform."""

import inspect

from ..settings import ConfigError
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

    Raises:
        ConfigError: the layout of context parallelism, or the dtype, does not fit the model's attention.
    """
    from megatron.core.models.gpt import GPTModel
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.training import get_args
    from megatron.training.argument_utils import gpt_config_from_args
    from megatron.training.models.gpt import mtp_block_spec

    args = get_args()
    settings = gpt_config_from_args(args, config)
    config, named = settings.transformer, settings.transformer_layer_spec
    ours = platform_cpu.installed() and named is None
    contiguous = check_cp_layout(args)
    check_dtype(args)
    if ours:
        block, mtp = platform_cpu.layer_spec(config, vp_stage, contiguous), platform_cpu.mtp_spec(config, vp_stage)
    else:
        block = _megatron_spec(settings, vp_stage)
        mtp = mtp_block_spec(settings, block, vp_stage=vp_stage)

    model = GPTModel(
        config=config, transformer_layer_spec=block, mtp_block_spec=mtp, vocab_size=args.padded_vocab_size,
        max_sequence_length=settings.seq_length, pre_process=pre_process, post_process=post_process,
        fp16_lm_cross_entropy=settings.fp16_lm_cross_entropy, parallel_output=settings.parallel_output,
        share_embeddings_and_output_weights=settings.share_embeddings_and_output_weights,
        position_embedding_type=settings.position_embedding_type, rotary_percent=settings.rotary_percent,
        rotary_base=settings.rotary_base, rope_scaling=settings.rope_scaling, rope_scaling_factor=settings.rope_scaling_factor,
        seq_len_interpolation_factor=settings.seq_len_interpolation_factor,
        pg_collection=pg_collection or ProcessGroupCollection.use_mpu_process_groups(), vp_stage=vp_stage)
    if ours and hasattr(model, "rotary_pos_emb"):
        model.rotary_pos_emb.cp_group = platform_cpu.ONE_RANK    # all positions: the attention takes this rank's own
    return model


def check_cp_layout(args) -> bool:
    """Whether tokens are cut into contiguous shards.

    Raises:
        ConfigError: the model cannot work on them.
    """
    if args.cp_layout != "contiguous" or args.context_parallel_size == 1:
        return False
    if args.mtp_num_layers:
        raise ConfigError("--mtp-num-layers shifts tokens over zigzag chunks: use --cp-layout zigzag")
    if args.spec is None and not platform_cpu.installed():
        raise ConfigError("--cp-layout contiguous: Transformer Engine's attention takes zigzag chunks; use --cp-layout zigzag, or name "
                          "an attention that gathers its keys by --spec")
    return True


def check_dtype(args) -> None:
    """Refuse float32 where attention cannot work in it.

    Raises:
        ConfigError: names the flags.
    """
    if (args.qkv_format == "thd" and args.spec is None and args.transformer_impl == "transformer_engine" and not (args.bf16 or args.fp16)):
        raise ConfigError("--qkv-format thd: Transformer Engine's attention takes packs in half precision only; give --bf16")


def _megatron_spec(settings, vp_stage):
    """The specification that --spec names, called if it is a function, or Megatron's own default."""
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.training.models.gpt import default_layer_spec

    named = settings.transformer_layer_spec
    if named is None:
        return default_layer_spec(settings, vp_stage)
    if isinstance(named, ModuleSpec) or not callable(named):
        return named
    stage = {"vp_stage": vp_stage} if "vp_stage" in inspect.signature(named).parameters else {}
    return named(settings, **stage)
