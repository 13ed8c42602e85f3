"""Expected memory of a job from its flags alone: parameters of each pipeline stage, and bytes on its GPUs.

Each weight is counted by its shape and by what it is divided over: `tp` (tensor parallelism), `expert` (expert and expert tensor
parallelism), or nothing. Gradients and optimizer states follow Megatron's mixed-precision Adam: the states of a dense weight are
divided over data x context parallelism, those of an expert over the expert data parallelism, by --use-distributed-optimizer.

Megatron's own estimate (megatron.training.theoretical_memory_usage) counts the same weights, but gives each pipeline stage an equal
share of the layers, divides the down-projections of latent attention over tensor parallelism, which Transformer Engine keeps whole on
every rank, and divides dense optimizer states over data parallelism without context parallelism.
"""

from collections import Counter
from dataclasses import dataclass

from ..routing.codec import route_dtype

GIB = 2 ** 30
DTYPES = dict(fp32=4, bf16=2, fp16=2, fp8=1)
STATES = dict(adam=2, sgd=1)        # float32 numbers of a parameter's optimizer state
UNCOUNTED = ("moe_latent_size", "hybrid_layer_pattern", "heterogeneous_layers_config_path", "experimental_attention_variant")

type Counts = Counter[str]
"""Parameters by what they are divided over: "tp", "expert" or "whole"."""


@dataclass(frozen=True)
class Stage:
    """The decoder layers of a pipeline stage (0-based, of all its virtual stages), and whether it has the embedding and the output."""

    layers: tuple[int, ...]
    first: bool
    last: bool


@dataclass(frozen=True)
class Memory:
    """Bytes on a GPU of one stage; host bytes are a rank's.

    Attributes:
        parameters: that this GPU holds.
        weights, gradients, optimizer: of them.
        logits: of one micro-batch in the model's dtype; their gradient is written over them.
        log_probs: work space of the log-probs, at most a tenth of float32 logits.
        layer_inputs: layer inputs that full recomputation keeps, over the micro-batches in flight; None: another recomputation, not estimated.
        routes: replayed experts of one micro-batch.
        host_routes: of a whole rollout batch.
        host_optimizer: states that --optimizer-cpu-offload keeps on the host.
        host_reference: the reference policy's copy.
    """

    parameters: float
    weights: float
    gradients: float
    optimizer: float
    logits: float
    log_probs: float
    layer_inputs: float | None
    routes: float
    host_routes: float
    host_optimizer: float
    host_reference: float

    @property
    def model_and_optimizer(self) -> float:
        """Weights, gradients and optimizer states."""
        return self.weights + self.gradients + self.optimizer

    @property
    def total(self) -> float:
        """All that is estimated on the GPU."""
        return self.model_and_optimizer + self.logits + self.log_probs + (self.layer_inputs or 0) + self.routes


def moe_pattern(args) -> list[int]:
    """1 for each decoder layer with experts."""
    if not args.num_experts:
        return [0] * args.num_layers
    freq = args.moe_layer_freq
    return [int(i % freq == 0) for i in range(args.num_layers)] if isinstance(freq, int) else list(freq)


def attention(args) -> Counts:
    """One attention: queries, keys, values and output, with their norms. MLA's down-projections are whole on every rank."""
    h, heads, d = args.hidden_size, args.num_attention_heads, args.kv_channels
    if args.multi_latent_attention:
        query, q_rank, kv_rank = heads * (args.qk_head_dim + args.qk_pos_emb_head_dim), args.q_lora_rank, args.kv_lora_rank
        out: Counts = Counter(tp=heads * (kv_rank * (args.qk_head_dim + args.v_head_dim) + h * args.v_head_dim),
                              whole=h * (kv_rank + args.qk_pos_emb_head_dim) + kv_rank)
        return out + (Counter(tp=h * query) if q_rank is None else Counter(tp=q_rank * query, whole=h * q_rank + q_rank))
    rows = (heads + 2 * (args.num_query_groups if args.group_query_attention else heads)) * d
    biased = args.add_bias_linear or args.add_qkv_bias
    return Counter(tp=h * (rows + heads * d) + rows * biased, whole=h * bool(args.add_bias_linear) + 2 * d * bool(args.qk_layernorm))


def mlp(args, width: int) -> Counts:
    """A dense MLP or the shared experts."""
    up = 2 * width if args.swiglu else width
    return Counter(tp=args.hidden_size * (up + width) + up * args.add_bias_linear, whole=args.hidden_size * bool(args.add_bias_linear))


def layer(args, moe: bool) -> Counts:
    """One decoder layer with its two norms."""
    h = args.hidden_size
    counts = attention(args) + Counter(whole=2 * _norm(args))
    if not moe:
        return counts + mlp(args, args.ffn_hidden_size)
    width = args.moe_ffn_hidden_size or args.ffn_hidden_size
    counts += Counter(whole=h * args.num_experts, expert=args.num_experts * h * width * (3 if args.swiglu else 2))
    if args.moe_shared_expert_intermediate_size:
        counts += mlp(args, args.moe_shared_expert_intermediate_size) + Counter(whole=h * bool(args.moe_shared_expert_gate))
    return counts


def stage_parameters(args, stage: Stage) -> Counts:
    """All weights of a stage. Tied embeddings and those that multi-token prediction reads have a copy on the last stage.

    Raises:
        NotImplementedError: the model has parts that are not counted here.
    """
    for name in UNCOUNTED:
        if getattr(args, name, None):
            raise NotImplementedError(f"--{name.replace('_', '-')}: its parameters are not counted")
    pattern, table = moe_pattern(args), args.padded_vocab_size * args.hidden_size
    counts: Counts = Counter()
    for i in stage.layers:
        counts += layer(args, bool(pattern[i]))
    if stage.first:
        counts += Counter(tp=table)
    if stage.last:
        counts += Counter(whole=_norm(args))
        if args.untie_embeddings_and_output_weights or not stage.first:
            counts += Counter(tp=table)
        for _ in range(args.mtp_num_layers or 0):
            counts += layer(args, bool(pattern[-1])) + Counter(tp=2 * args.hidden_size ** 2, whole=3 * _norm(args))
        if args.mtp_num_layers and args.untie_embeddings_and_output_weights and not stage.first:
            counts += Counter(tp=table)
    return counts


def parameters_on_gpu(args, stage: Stage) -> dict[str, float]:
    """{"dense", "expert"}: what one GPU of a stage holds; their optimizer states are divided over different groups."""
    counts = stage_parameters(args, stage)
    return {"dense": counts["tp"] / args.tensor_model_parallel_size + counts["whole"],
            "expert": counts["expert"] / (_expert_tp(args) * args.expert_model_parallel_size)}


def model_parameters(args) -> int:
    """Of the whole model, each weight once."""
    return sum(stage_parameters(args, Stage(tuple(range(args.num_layers)), True, True)).values())


def active_parameters(args) -> int:
    """Those that a token passes through, both embeddings included."""
    counts = stage_parameters(args, Stage(tuple(range(args.num_layers)), True, True))
    share = args.moe_router_topk / args.num_experts if args.num_experts else 1
    return round(counts["tp"] + counts["whole"] + counts["expert"] * share)


def tokens_per_gpu(args, multiple: int = 1) -> int:
    """Most positions of a micro-batch on one GPU: --max-tokens-per-gpu, or --micro-batch-size sequences of --seq-length."""
    packing = args.grpo.packing
    tokens = packing.max_tokens_per_gpu or -(-args.micro_batch_size * args.seq_length // args.context_parallel_size)
    return -(-tokens // multiple) * multiple


def estimate(args, stage: Stage, number: int = 0) -> Memory:
    """Of one GPU of `stage`, the `number`-th of the pipeline.

    Args:
        args: flags as flags.parse_args leaves them.

    Raises:
        NotImplementedError: a model or an optimizer whose bytes are not known.
    """
    if args.optimizer not in STATES:
        raise NotImplementedError(f"--optimizer {args.optimizer}: its states are not counted")
    held, half = parameters_on_gpu(args, stage), bool(args.bf16 or args.fp16)
    tp, pp, world = args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.world_size
    shards = {"dense": world // (tp * pp), "expert": world // (_expert_tp(args) * args.expert_model_parallel_size * pp)}
    if not args.use_distributed_optimizer:
        shards = dict.fromkeys(shards, 1)
    gradient, state = _bytes(args)
    states = sum(held[kind] * state / shards[kind] for kind in held)
    offloaded = states * args.optimizer_offload_fraction if args.optimizer_cpu_offload else 0.0
    sequence = tp if args.sequence_parallel else 1
    tokens = tokens_per_gpu(args, args.grpo.packing.data_pad_size_multiplier * tp if args.grpo.packing.qkv_format == "thd" else 1)
    logits = tokens * args.padded_vocab_size / tp if stage.last else 0
    parameters = sum(held.values())
    kept = None
    if args.recompute_granularity == "full":
        in_flight = _in_flight(args, number)
        group = args.recompute_num_layers or 1
        kept = len(stage.layers) / (group if args.recompute_method == "uniform" else 1) * tokens / sequence * args.hidden_size * (
            2 if half else 4) * in_flight
    routes = host = 0.0
    if args.grpo.routing.replay:
        per_token = _moe_layers(args, stage) * args.moe_router_topk * route_dtype(args.num_experts).itemsize
        routes = tokens / sequence * per_token
        host = rollout_tokens(args) / (args.data_parallel_size * args.context_parallel_size) / sequence * per_token
    return Memory(
        parameters=parameters, weights=parameters * (2 if half else 4), gradients=parameters * gradient, optimizer=states - offloaded,
        logits=logits * (2 if half else 4), log_probs=0.1 * 4 * logits, layer_inputs=kept, routes=routes, host_routes=host, host_optimizer=offloaded,
        host_reference=parameters * (2 if half else 4) if args.grpo.algorithm.needs_reference else 0.0)


def rollout_tokens(args) -> int:
    """Most tokens of a rollout batch: every sample as long as --seq-length, or as its prompt and response may be."""
    rollout, longest = args.grpo.rollout, args.grpo.prompts.rollout_max_prompt_len
    length = args.seq_length if longest is None else min(args.seq_length, longest + rollout.rollout_max_response_len)
    return rollout.rollout_batch_size * rollout.n_samples_per_prompt * length


def _norm(args) -> int:
    return args.hidden_size * (1 if args.normalization == "RMSNorm" else 2)


def _expert_tp(args) -> int:
    return args.expert_tensor_parallel_size or args.tensor_model_parallel_size


def _moe_layers(args, stage: Stage) -> int:
    pattern = moe_pattern(args)
    return sum(pattern[i] for i in stage.layers)


def _bytes(args) -> tuple[float, float]:
    """(bytes of a gradient, of the optimizer's copy and states), a parameter."""
    if not (args.bf16 or args.fp16):
        return 4, 4 * STATES[args.optimizer]
    gradient = 4 if args.accumulate_allreduce_grads_in_fp32 else 2
    if not args.use_precision_aware_optimizer:
        return gradient, 4 + 4 * STATES[args.optimizer]
    sizes = [_size(args.main_params_dtype), _size(args.exp_avg_dtype), _size(args.exp_avg_sq_dtype)]
    return _size(args.main_grads_dtype), sum(sizes[:1 + STATES[args.optimizer]])


def _size(dtype) -> int:
    return DTYPES[dtype] if isinstance(dtype, str) else dtype.itemsize


def _in_flight(args, number: int) -> float:
    """Micro-batches whose inputs a stage keeps (1F1B); with virtual stages, Megatron's factor for the interleaved schedule."""
    pp, vpp = args.pipeline_model_parallel_size, args.virtual_pipeline_model_parallel_size
    return pp - number if vpp is None else pp * (1 + (pp - 1) / (pp * vpp))
