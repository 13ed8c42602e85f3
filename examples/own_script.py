"""A Megatron script of your own, made a GRPO script by the lines marked <--.

    torchrun --nproc-per-node 2 examples/own_script.py --platform cpu <flags of megatron_grpo.train>
"""

import sys

from megatron_grpo.trainer import flags, loop  # <-- our flags and our loop


def model_provider(pre_process=True, post_process=True, vp_stage=None, config=None, pg_collection=None, **kwargs):
    """Your model: any module that maps (tokens, positions, attention mask, packed_seq_params) to logits."""
    from megatron_grpo.trainer.model import model_provider as gpt

    return gpt(pre_process, post_process, vp_stage, config, pg_collection, **kwargs)


def extra_args(parser):
    """Your flags, then ours."""
    parser.add_argument_group("mine").add_argument("--greeting", default="hello")
    return flags.add_grpo_args(parser)                            # <-- instead of `return parser`


if __name__ == "__main__":      # checkpoint saving spawns workers that import this file
    args = flags.parse_args(extra_args_provider=extra_args)       # <-- parses, validates, sets Megatron's globals
    print(args.greeting)
    loop.run(args, model_provider)                                # <-- instead of pretrain(...)
    sys.exit(0)
