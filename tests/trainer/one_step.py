"""One language-model step of a small model under any layout, from the same weights: loss and gradients, in global coordinates."""

import sys
import zlib
from unittest import mock

import torch
import torch.distributed as dist

MODEL = """--num-layers 4 --hidden-size 32 --num-attention-heads 4 --group-query-attention --num-query-groups 2 --ffn-hidden-size 48
--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 24 --normalization RMSNorm --disable-bias-linear --swiglu --qk-layernorm
--moe-token-dispatcher-type alltoall --moe-router-load-balancing-type none --moe-router-dtype fp64 --position-embedding-type rope
--seq-length 64 --max-position-embeddings 64 --micro-batch-size 1 --global-batch-size 8 --train-iters 1 --lr 1e-3
--tokenizer-type NullTokenizer --vocab-size 127 --ckpt-format torch_dist --eval-iters 0 --no-check-for-nan-in-loss-and-grad""".split()
LENGTHS = ((13, 5, 24), (1, 40), (7, 7, 2, 9), (31,))        # tokens of the sequences of each micro-batch


def start(flags=(), dtype=torch.float64):
    """Megatron's arguments and process groups on the CPU platform."""
    from megatron_grpo.parallel.config import PackingConfig
    from megatron_grpo.settings import add_arguments
    from megatron_grpo.trainer import platform_cpu
    platform_cpu.install()
    from megatron.training import arguments
    from megatron.training.global_vars import set_global_variables
    from megatron.training.initialize import initialize_megatron
    from megatron.training.vocab_utils import calculate_padded_vocab_size

    def extra(parser):
        add_arguments(parser, "grpo", PackingConfig)
        platform_cpu.set_defaults(parser)
        return parser

    sys.argv = ["test", *MODEL, *flags]
    args = arguments.parse_args(extra)
    platform_cpu.check(args)
    with mock.patch.object(arguments, "_print_args"):       # a third of a second
        arguments.validate_args(args)
    args.padded_vocab_size = calculate_padded_vocab_size(args.vocab_size, args.make_vocab_size_divisible_by, args.tensor_model_parallel_size,
                                                         logging_enabled=False)
    set_global_variables(args, build_tokenizer=False)       # a tokenizer costs more than the step
    args.params_dtype = dtype
    args.variable_seq_lengths = args.pipeline_model_parallel_size > 1      # micro-batches differ in length
    initialize_megatron(allow_no_cuda=True)
    return args


def shards(chunks):
    """Every parameter's shards, (key, global shape, global offset, tensor); the tensors are views."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
    found = []

    def walk(x):
        if isinstance(x, ShardedTensorFactory):
            walk(x.build())
        elif isinstance(x, ShardedTensor):
            found.append((x.key, tuple(x.global_shape), tuple(x.global_offset), x.data))
        elif isinstance(x, dict):
            list(map(walk, x.values()))
        elif isinstance(x, list | tuple):
            list(map(walk, x))

    for chunk in chunks:
        walk(chunk.sharded_state_dict())
    return found


def slices(tensor, shape, offset):
    local = (1,) * (len(shape) - tensor.dim()) + tuple(tensor.shape)
    return tuple(slice(o, o + n) for o, n in zip(offset, local))


def initial(key, shape):
    """A parameter's weights, from its name: the same under every layout."""
    generator = torch.Generator().manual_seed(zlib.crc32(key.encode()))
    return torch.randn(shape, generator=generator, dtype=torch.float64) * 0.2 + ("norm" in key)


def build(args):
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.utils import get_model_config, unwrap_model
    from megatron.training.training import get_model

    from megatron_grpo.trainer.model import model_provider
    model = get_model(model_provider)
    for key, shape, offset, tensor in shards(unwrap_model(model)):
        tensor.data.copy_(initial(key, shape)[slices(tensor, shape, offset)].view(tensor.shape))
    config = get_model_config(model[0])
    config.finalize_model_grads_func = finalize_model_grads
    return model, config


def sequences():
    """The token ids of each sequence of each micro-batch."""
    generator = torch.Generator().manual_seed(7)
    return [[torch.randint(0, 127, (n,), generator=generator) for n in lengths] for lengths in LENGTHS]


def even_mask(layout, dtype):
    """[N] mask whose ones, seen from the position before, fall equally on both of two zigzag ranks: Megatron divides the loss of
    multi-token prediction by the count of each context-parallel rank, so that only such a mask makes it independent of the layout."""
    from megatron_grpo.parallel.layout import Layout
    two, mask = Layout(layout.lengths, cp_size=2), torch.zeros(layout.num_tokens, dtype=dtype)
    ends = torch.tensor(layout.lengths).cumsum(0)
    for rank in range(2):
        inside = [i for i in two.index(rank).tolist() if i >= 0 and not {i, i + 1} & set((ends - 1).tolist())]
        mask[[i + 1 for i in inside[:3]]] = 1
    return mask


def micro_batches(args, even=False):
    """(tokens, labels, mask, positions, PackedSeqParams, Layout) of this rank, and the number of labels of the step."""
    from megatron.core import mpu
    from megatron.core.packed_seq_params import PackedSeqParams

    from megatron_grpo.parallel.layout import Layout
    n, rank = mpu.get_context_parallel_world_size(), mpu.get_context_parallel_rank()
    out, total = [], 0
    for parts in sequences():
        layout = Layout([len(p) for p in parts], cp_size=n, tp_size=args.tensor_model_parallel_size, kind=args.cp_layout,
                        qkv_format=args.qkv_format)
        tokens = torch.cat(parts)
        mask = even_mask(layout, args.params_dtype) if even else layout.labels(torch.ones(layout.num_tokens, dtype=args.params_dtype))
        total += int(mask.sum())
        padded = layout.cu_seqlens_padded
        params = None if args.qkv_format == "bshd" else PackedSeqParams(
            "thd", padded, padded, padded, padded, layout.max_seqlen, layout.max_seqlen)
        local = [layout.shard(x, rank).view(layout.local_shape) for x in (tokens, layout.labels(tokens), mask)]
        out.append((*local, layout.positions(rank).view(layout.local_shape), params, layout))
    return out[mpu.get_data_parallel_rank()::mpu.get_data_parallel_world_size()], total


def step(flags=(), dtype=torch.float64, mtp=False):
    """Loss of the step, and this rank's gradient shards."""
    from megatron.core import mpu
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
    from megatron.core.utils import unwrap_model
    args = start(flags, dtype)
    model, config = build(args)
    batches, total = micro_batches(args, even=mtp)
    dp, losses = mpu.get_data_parallel_world_size(), []

    def forward_step(iterator, chunk):
        tokens, labels, mask, positions, params, _ = next(iterator)
        kwargs = dict(loss_mask=mask, labels=labels) if mtp else {}
        output = chunk(tokens, positions, None, packed_seq_params=params, **kwargs)

        def loss_func(output):
            if mtp:
                loss = (output.flatten() @ mask.flatten().to(output.dtype)) / total
            else:       # Megatron's own cross entropy is float32 whatever the logits are
                whole = gather_from_tensor_model_parallel_region(output, group=mpu.get_tensor_model_parallel_group())
                loss = torch.nn.functional.cross_entropy(whole.flatten(0, 1), labels.flatten(), reduction="none") @ mask.flatten() / total
            losses.append(loss.detach().clone())
            return loss * len(batches) * dp, {}
        return output, loss_func

    iterators = [iter(batches) for _ in model]
    get_forward_backward_func()(
        forward_step_func=forward_step, data_iterator=iterators if len(model) > 1 else iterators[0], model=model,
        num_microbatches=len(batches), seq_length=args.seq_length, micro_batch_size=args.micro_batch_size, forward_only=False)
    loss = torch.stack(losses).sum().double() if losses else torch.zeros((), dtype=torch.float64)
    dist.all_reduce(loss, group=mpu.get_data_parallel_group(with_context_parallel=True))
    if args.pipeline_model_parallel_size > 1:
        dist.broadcast(loss, mpu.get_pipeline_model_parallel_last_rank(), group=mpu.get_pipeline_model_parallel_group())
    for chunk in model:
        for parameter in chunk.parameters():
            parameter.data.copy_(parameter.main_grad)
    return loss.item(), [(key, shape, offset, tensor.detach().clone()) for key, shape, offset, tensor in shards(unwrap_model(model))]


def assemble(results):
    """(loss, {key: whole gradient}) from every rank's (loss, shards)."""
    whole = {}
    for _, parts in results:
        for key, shape, offset, tensor in parts:
            target = whole.setdefault(key, torch.full(shape, torch.nan, dtype=torch.float64))
            where = slices(tensor, shape, offset)
            target[where] = tensor.double().view(target[where].shape)
    assert len({loss for loss, _ in results}) == 1
    return results[0][0], whole
