"""A reducer of one's own:  --custom-pg-loss-reducer-path examples/hooks/reducer.py:sqrt_length

Between the two usual ones: a sequence weighs as the square root of its length, neither as 1 nor as its length.
"""


def sqrt_length(loss_T, inputs):
    """This rank's addend of mean over sequences of sum_t loss_t / sqrt(|y|).

    `seq_tokens_S` counts a sequence's tokens on all context-parallel ranks and `counts` the whole optimizer step, so that the
    sum of this over micro-batches and ranks is the same under every layout. `loss_T` is 0 where masked.
    """
    weight_S = inputs.seq_tokens_S.clamp(min=1).rsqrt() / max(inputs.counts.sequences, 1)
    return (weight_S[inputs.seq_T] * loss_T).sum()
